"""Serving under load as an experiment: traffic from prompts, policies compared, their metrics.

`offered`: the requests and when they arrive. `loops`: servers of several policies at the same
work, by turns on one machine. `served`: what their steps and responses say. `simulation`: the same
servers on the cost table instead of the models. Notebooks read all that they need from here.
"""

from specexp.measure.under_load.loops import (
    certify_served,
    closed_loops,
    costs_for,
    notes,
    open_loop,
)
from specexp.measure.under_load.offered import requests, traffic
from specexp.measure.under_load.served import (
    answered_requests,
    by_policy,
    metrics,
    rates,
    regrets,
    step_table,
    timeline,
)
from specexp.measure.under_load.simulation import compare_runs, simulate_fitted, simulation_metrics
