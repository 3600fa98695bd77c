"""Policies on the same requests, taking turns on one machine.

Every server has a stopwatch of its own, so that a slow moment of the machine affects all of them. A
turn ends after a number of tokens in a closed loop, and after a stretch of the server's own time in
open traffic. Confidence intervals are over turns, paired between policies.
"""

import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd
from tqdm.auto import tqdm

from specexp.api import Pairing
from specexp.errors import UserError
from specexp.measure import break_even
from specexp.measure.exactness import Exactness, check_rounds, compare
from specexp.measure.prompts import Prompt
from specexp.measure.under_load.offered import requests, slots_for, staggered
from specexp.measure.under_load.served import totals
from specexp.policy import PRICED, Load, Plan, Policy
from specexp.serving import policies
from specexp.serving.cost_table import Costs
from specexp.serving.engine_rows import EngineRows
from specexp.serving.requests import Request
from specexp.serving.server import Server
from specexp.serving.sources import Run, Source, serve
from specexp.tree import Tree

LEARNING = 2  # first turns that do not count: rounds are captured and policies learn
PIECES = 8  # of a turn, each run by all servers: a disturbance of a second affects all of them
SLICE_S = 0.5  # of a server's own time that open traffic runs before the next server's turn


# --- a server of each policy ---------------------------------------------------------------------


def rows_for(
    pairing: Pairing, policy: str, rows: int, offered: Sequence[Request], slack: int
) -> EngineRows:
    """The rows of a server for these requests and drafts of up to `slack` slots; without a drafter
    for the policy `plain`."""
    engine = pairing.apart().engine
    engine = engine.plain() if policy == "plain" else engine
    return EngineRows(engine, rows, slots_for(offered, slack), slack)


def _rows_by_policy(
    pairing: Pairing, chosen: Mapping[str, Policy], rows: int, offered: Sequence[Request]
) -> dict[str, EngineRows]:
    """The rows of each policy's server, with slots for the largest draft of any of them."""
    slack = max(policy.widest for policy in chosen.values())
    return {name: rows_for(pairing, name, rows, offered, slack) for name in chosen}


def _equal_counts(engine_rows: Mapping[str, EngineRows]) -> None:
    """Cut all to as many rows as the smallest has: later ones may have found less memory."""
    least = min(rows.count for rows in engine_rows.values())
    for rows in engine_rows.values():
        rows.count = least


def costs_for(pairing: Pairing, names: Iterable[str], offered: Source, rows: int) -> Costs | None:
    """The cost table for these requests, of which at most `rows` run at once; measured if need be,
    in batches up to that size. None if no policy reads it. Raises UserError as `break_even.profile`
    does."""
    if not {*PRICED} & {*names}:
        return None
    most = min(rows, len(offered.requests), offered.concurrency or rows)
    batches = break_even.BATCHES[: max(2, 1 + bisect_left(break_even.BATCHES, most))]
    return break_even.profile(pairing, batches, longest=slots_for(offered.requests, 0))


# --- closed loops --------------------------------------------------------------------------------


def closed_loop(
    pairing: Pairing, names: Sequence[str], costs: Costs | None, offered: Sequence[Request],
    concurrency: int, tokens: int, turns: int,
) -> tuple[pd.DataFrame, dict[str, Run]]:  # fmt: skip
    """A closed loop of `concurrency` streams under every policy, by turns; the requests repeat.

    Returns a table and the runs. The table has one row a policy and turn, with columns policy, turn
    and those of `totals`. The first turn begins when every row has been in use, and `LEARNING`
    turns come before those that count. In a turn each server generates at least `tokens` tokens, a
    piece at a time. Raises UserError for requests that yield no tokens."""
    chosen = {name: policies.of(name, costs, pairing.deepest) for name in names}
    engine_rows = _rows_by_policy(pairing, chosen, concurrency, offered)
    _equal_counts(engine_rows)
    servers = {n: Server(engine_rows[n], chosen[n], queue=len(offered)) for n in names}
    runs = {n: Run(servers[n], Source(offered, concurrency, repeat=True)) for n in names}
    turn_start = dict.fromkeys(runs, 0)

    def go(name: str, enough: float) -> None:
        run, most = runs[name], len(runs[name].responses) + len(offered)
        with engine_rows[name].timer:
            while sum(t.emitted for t in run.steps[turn_start[name] :]) < enough:
                run.advance()
                if len(run.responses) > most:
                    why = "; ".join(notes(runs)) or "their outputs end at once"
                    raise UserError(f"{len(offered)} requests did not yield {tokens} tokens: {why}")

    for name, run in runs.items():
        while sum(bool(a.deliveries) for a in run.responses) < concurrency:
            go(name, 1 + sum(t.emitted for t in run.steps))
    rows: list[dict[str, Any]] = []
    for turn in range(-LEARNING, turns):
        turn_start = {name: len(run.steps) for name, run in runs.items()}
        for piece in range(1, PIECES + 1):
            for name in in_turn(runs, turn * PIECES + piece):
                go(name, tokens * piece / PIECES)
        if turn >= 0:
            for name, run in runs.items():
                rows.append({"policy": name, "turn": turn} | totals(run.steps[turn_start[name] :]))
    return pd.DataFrame(rows), runs


def in_turn(names: Collection[str], number: int) -> list[str]:
    """The names in a random order that depends on `number`: a server that runs after one that
    drafts finds fewer of the target's weights in the CPU's caches, and no policy should suffer that
    more often than another."""
    return random.Random(number).sample(list(names), len(names))


def turn_tokens(streams: int) -> int:
    """Tokens that a server generates in a turn, at least."""
    return 256 + 20 * streams


def closed_loops(
    pairing: Pairing, names: Sequence[str], costs: Costs | None, prompts: Sequence[Prompt],
    concurrency: Sequence[int], max_new_tokens: int, turns: int,
) -> pd.DataFrame:  # fmt: skip
    """`closed_loop` at every number of streams, `turns` turns of `turn_tokens` each. One row a load
    (number of streams), policy and turn: load, and the columns of `closed_loop`. Raises UserError.
    """
    parts = []
    with tqdm(total=len(concurrency), desc="closed loops", unit="load") as bar:
        for c in concurrency:
            tokens = turn_tokens(c)
            count = 2 * c + -(-(turns + LEARNING) * tokens // max_new_tokens)
            offered = staggered(requests(pairing, prompts, count, max_new_tokens), c)
            part, _ = closed_loop(pairing, names, costs, offered, c, tokens, turns)
            parts.append(part.assign(load=c))
            bar.update()
    return pd.concat(parts, ignore_index=True)


# --- open traffic --------------------------------------------------------------------------------


def open_loop(
    pairing: Pairing, names: Sequence[str], costs: Costs | None, offered: Source, rows: int,
    chunk: int = 512, queue: int = 1024,
) -> dict[str, Run]:  # fmt: skip
    """The same traffic under every policy. Servers take turns of `SLICE_S` seconds of their own
    time, in which idle time is skipped. Before the first request arrives, the rounds of a server
    are captured and it has been full once, since first rounds of a size are slow."""
    arriving = offered.requests
    filling = [replace(r, at_s=0.0, new=min(r.new, 8)) for r in arriving[:rows]]
    chosen = {name: policies.of(name, costs, pairing.deepest) for name in names}
    engine_rows = _rows_by_policy(pairing, chosen, rows, arriving)
    for name, own in engine_rows.items():
        own.rehearse(chosen[name].widest - 1)
        another = policies.of(name, costs, pairing.deepest)  # the server's own has learned nothing
        with own.timer:
            serve(Server(own, another, chunk, queue=rows), Source(filling))
    _equal_counts(engine_rows)
    servers = {n: Server(engine_rows[n], chosen[n], chunk, queue) for n in names}
    runs = {n: Run(servers[n], offered) for n in names}
    going, turn = list(names), 0
    with tqdm(total=len(arriving) * len(names), desc="serving", unit="request", delay=1) as bar:
        while going:
            turn += 1
            for name in in_turn(going, turn):
                with engine_rows[name].timer:
                    while runs[name].server.now < turn * SLICE_S:
                        if not runs[name].advance():
                            going.remove(name)
                            break
            bar.update(sum(a.over for run in runs.values() for a in run.responses) - bar.n)
    return runs


# --- what a run leaves ---------------------------------------------------------------------------


def overhead_s(runs: dict[str, Run]) -> float:
    """Mean seconds a step that servers spend outside their rounds and prefills."""
    steps = [step for run in runs.values() for step in run.steps]
    return sum(t.end_s - t.begin_s - t.busy_s for t in steps) / len(steps)


def notes(runs: dict[str, Run]) -> list[str]:
    """Messages about memory that ran out and requests refused or failed, with the reasons."""
    lines = []
    for name, run in runs.items():
        lines += [f"{name}: {line}" for line in run.server.notes]
        lost = Counter((a.state, a.reason) for a in run.responses
                       if a.state in ("refused", "failed"))  # fmt: skip
        lines += [f"{name}: {n} {state}: {reason}" for (state, reason), n in lost.items()]
    return lines


def certify_served(pairing: Pairing, offered: Sequence[Request], concurrency: int) -> Exactness:
    """Serve requests in a closed loop, greedily or under the rule Match, and compare every output
    with plain decoding of that request alone. All rows draft, then half of them, then none, and so
    on, so that drafters lag and catch up whatever a policy would choose here. Then look at rounds
    of the pairing's own rule (`exactness.check_rounds`)."""
    coupled = pairing if pairing.options["temperature"] == 0 else pairing.with_(rule="match")
    turning = AllHalfNone(min(3, pairing.deepest))
    rows_of_server = rows_for(coupled, "in turn", concurrency, offered, turning.widest)
    server = Server(rows_of_server, turning, queue=len(offered))
    texts = [a.tokens for a in serve(server, Source(offered, concurrency))]
    prompts, streams = [list(r.prompt) for r in offered], [r.stream for r in offered]
    longest = max(r.new for r in offered)
    exact = compare(pairing.engine, prompts, texts, longest, streams)
    return check_rounds(exact, pairing.engine, prompts, longest)


@dataclass
class AllHalfNone(Policy):
    """Drafts gamma tokens for all rows, for half of them and for none, in turn."""

    gamma: int
    rounds: int = field(default=0, init=False)

    @property
    def widest(self) -> int:
        return Tree.chain(self.gamma).room

    def choose(self, load: Load) -> Plan:
        self.rounds += 1
        drafting = (load.rows, load.rows // 2, 0)[(self.rounds - 1) % 3]
        budget = (self.gamma,) * drafting + (0,) * (load.rows - drafting)
        return Plan(Tree.chain(self.gamma), budget)
