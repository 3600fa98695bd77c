"""Serving under load as an experiment: traffic from prompts, policies compared, their metrics.

`offered`: the requests and when they arrive. `races`: servers of several policies at the same
work, by turns on one machine. `served`: what their steps and responses say. `simulation`: the same
servers on the cost table instead of the models. Notebooks read all of it from here.
"""

from specexp.measure.under_load.offered import requests, slots_for, staggered, traffic
from specexp.measure.under_load.races import (
    bake_off,
    certify_served,
    in_turn,
    notes,
    open_race,
    overhead_s,
    prices,
    race,
)
from specexp.measure.under_load.served import (
    QUANTILES,
    answered,
    answers,
    by_policy,
    gaps,
    metrics,
    rates,
    regrets,
    served_metrics,
    steps,
    sums,
    timeline,
)
from specexp.measure.under_load.simulation import (
    compare_runs,
    simulate,
    simulated,
    simulation_metrics,
)
from specexp.serving.sources import Run
