"""Responses and steps of a server, made up for tests of what is reported of them."""

from types import SimpleNamespace

import pandas as pd

from specexp.serving.requests import Request, Response, ServerStep
from specexp.serving.sources import Run, Source


def answer(came_s, *deliveries, begun_s=None, state="done", kind="code", prompt=3, **counts):
    request = Request(range(prompt), 9, came_s, kind=kind)
    return Response(request, came_s, state, begun_s=begun_s, deliveries=list(deliveries), **counts)


def tick(begin_s, end_s, busy_s=0.0, **counts):
    none = dict.fromkeys(
        ("waiting", "read", "live", "rows", "speculated", "drafted", "accepted", "emitted"), 0
    )
    return ServerStep(begin_s, end_s, busy_s, **none | counts)


def run_of(responses, steps):
    return Run(SimpleNamespace(steps=steps), Source([]), responses)


def samples(**policies):
    """A table of turns, as (seconds, tokens), of each policy at one load."""
    rows = [
        {"policy": name, "turn": turn, "s": s, "busy_s": s / 2, "tokens": n, "rows": 4,
         "speculated": turn, "drafted": 4, "accepted": turn}
        for name, turns in policies.items()
        for turn, (s, n) in enumerate(turns)
    ]  # fmt: skip
    return pd.DataFrame(rows)


ANSWERS = [
    answer(1.0, (2.0, 1), (2.5, 3), (3.5, 5), begun_s=1.5, drafted=6, accepted=2, passes=3),
    answer(2.0, (2.25, 1), begun_s=2.125, prompt=7, kind="chat"),
    answer(2.0, (3.0, 4), begun_s=2.5),
    answer(2.5, state="refused"),
    answer(3.0, (3.5, 2), begun_s=3.25, state="failed"),
]
TICKS = [
    tick(1.0, 2.0, 0.75, live=1, rows=2, speculated=2, drafted=3, accepted=1, emitted=2, waiting=4),
    tick(2.0, 2.5, 0.5, live=2, rows=2, speculated=0, emitted=2, waiting=2),
    tick(3.0, 5.0, 1.75, live=3, rows=4, speculated=1, drafted=5, accepted=3, emitted=9),
]
