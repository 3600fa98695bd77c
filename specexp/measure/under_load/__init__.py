"""Serving under load as an experiment: traffic from prompts, policies compared, their metrics.

`offered`: the requests and when they arrive. `loops`: servers of several policies at the same
work, by turns on one machine. `served`: what their steps and responses say. `simulation`: the same
servers on the cost table instead of the models. Notebooks read all of it from here.
"""

from specexp.measure.under_load.loops import (
    certify_served,
    closed_loop,
    closed_loops,
    costs_for,
    in_turn,
    notes,
    open_loop,
    overhead_s,
)
from specexp.measure.under_load.offered import requests, slots_for, staggered, traffic
from specexp.measure.under_load.served import (
    QUANTILES,
    answered_requests,
    by_policy,
    itl_s,
    metrics,
    rates,
    regrets,
    request_table,
    served_metrics,
    step_table,
    timeline,
    totals,
    worst,
)
from specexp.measure.under_load.simulation import (
    compare_runs,
    simulate,
    simulate_fitted,
    simulation_metrics,
)
from specexp.serving.sources import Run
