"""Serving under load as an experiment: traffic from prompts, policies compared, their metrics.

The servers of the compared policies share the machine by turns, each with a stopwatch of its own,
so that a slow moment of the machine affects all of them. A turn ends after a number of tokens in a
closed loop, and after a stretch of the server's own time in open traffic. Confidence intervals are
over turns, paired between policies.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from specexp.api import Pairing
from specexp.errors import UserError
from specexp.measure import break_even, one_pairing, statistics
from specexp.measure.exactness import Exactness, compare
from specexp.measure.prompts import Prompt
from specexp.policy import Policy
from specexp.serving import arrivals, policies
from specexp.serving.cost_table import Costs
from specexp.serving.engine_rows import EngineBank, Stopwatch
from specexp.serving.server import (
    Answer,
    Arriving,
    Closed,
    Request,
    Server,
    Tick,
    Timed,
    advance,
    serve,
)
from specexp.serving.simulated_rows import SimulatedBank

QUANTILES = (50, 95, 99)
LEAST = {50: 1, 95: 60, 99: 662}  # samples below which a quantile is not reported
LEARNING = 2  # first turns that do not count: rounds are captured and policies learn
PIECES = 8  # of a turn, each run by all servers: a disturbance of a second affects all of them
SHOWN = {
    "throughput/tok_s": "tokens/s", "throughput/req_s": "requests/s",
    "goodput/share": "within the limits", "goodput/req_s": "goodput, requests/s",
    **{f"latency/{kind}_p{q}_ms": f"{kind.upper()} p{q}, ms"
       for kind in ("ttft", "tpot", "itl", "e2e") for q in (50, 95)},
    "load/occupancy": "streams decoded at once", "load/speculated": "rows speculated",
    "served/rate": "guesses accepted", "load/overhead": "scheduler's share of the time",
    "load/refused": "refused", "load/failed": "failed",
}  # fmt: skip
SHARES = ("goodput/share", "load/speculated", "served/rate", "load/overhead")


@dataclass
class Run:
    """A server, where its requests come from, and the answers so far."""

    server: Server
    arriving: Arriving
    answers: list[Answer] = field(default_factory=list)

    @property
    def ticks(self) -> list[Tick]:
        return self.server.ticks

    def advance(self) -> bool:
        return advance(self.server, self.arriving, self.answers)


def requests(
    pairing: Pairing, prompts: Sequence[Prompt], count: int, max_new_tokens: int
) -> list[Request]:
    """`count` requests: the prompts, interleaved over their categories and repeated as needed."""
    kinds: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        kinds.setdefault(prompt.category, []).append(prompt)
    mixed = [p for row in itertools.zip_longest(*kinds.values()) for p in row if p]
    ids = pairing.encode([p.text for p in mixed])
    return [
        Request(ids[i % len(ids)], max_new_tokens, stream=i, kind=mixed[i % len(ids)].category)
        for i in range(count)
    ]


def staggered(asked: Sequence[Request], count: int) -> list[Request]:
    """The same requests, the first `count` of them cut to rising lengths: they begin together, but
    end one by one, so that the next prompts are not all prefilled in one step."""
    first = [replace(r, new=max(1, r.new * (i + 1) // count)) for i, r in enumerate(asked[:count])]
    return [*first, *asked[count:]]


@dataclass(frozen=True)
class Traffic:
    """Requests and their arrival: in a closed loop of `concurrency` streams, or, if that is None,
    at their own times."""

    requests: tuple[Request, ...]
    concurrency: int | None = None

    def arriving(self) -> Arriving:
        """A new source of these requests."""
        if self.concurrency is None:
            return Timed(self.requests)
        return Closed(self.requests, self.concurrency)

    def as_served(self, answers: Iterable[Answer]) -> Traffic:
        """The same traffic with outputs as long as these, which may have ended before their
        limits."""
        written = {a.request.stream: max(1, len(a.tokens)) for a in answers}
        cut = (replace(r, new=written.get(r.stream, r.new)) for r in self.requests)
        return replace(self, requests=tuple(cut))


def traffic(
    pairing: Pairing,
    prompts: Sequence[Prompt],
    load: str,
    count: int,
    max_new_tokens: int,
    seed: int = 0,
) -> Traffic:
    """The load of that name (see `arrivals.parse`) with these prompts, `max_new_tokens` of output
    each. A trace's lengths shorten both."""
    made = arrivals.parse(load, count, seed)
    if isinstance(made, arrivals.Closed):
        return Traffic(tuple(requests(pairing, prompts, count, max_new_tokens)), made.concurrency)
    asked = requests(pairing, prompts, len(made), max_new_tokens)
    traced = load.startswith("trace:")
    return Traffic(tuple(
        replace(
            r, at_s=a.at_s, prompt=r.prompt[: a.prompt] if traced else r.prompt,
            new=min(a.output, r.new) if traced else r.new,
        )
        for r, a in zip(asked, made, strict=True)
    ))  # fmt: skip


def slots_for(asked: Sequence[Request], room: int) -> int:
    """Slots of a row for the longest of these requests and a draft of `room` slots."""
    return max(len(r.prompt) + r.new for r in asked) + room


def bank(
    pairing: Pairing, policy: str, rows: int, asked: Sequence[Request], room: int, timer: Any = None
) -> EngineBank:
    """A bank for these requests; without a drafter for the policy `plain`."""
    engine = pairing.apart().engine
    engine = engine.plain() if policy == "plain" else engine
    return EngineBank(engine, rows, slots_for(asked, room), room, timer)


def policy(pairing: Pairing, name: str, costs: Costs | None) -> Policy:
    """`policies.of`, and `plain`: never drafting, on an engine without a drafter."""
    return policies.of("never" if name == "plain" else name, costs, pairing.deepest)


def room(pairing: Pairing, names: Iterable[str], costs: Costs | None) -> int:
    """Slots for the largest draft of these policies."""
    return max(policy(pairing, name, costs).widest for name in names)


def race(
    pairing: Pairing,
    names: Sequence[str],
    costs: Costs | None,
    asked: Sequence[Request],
    concurrency: int,
    tokens: int,
    turns: int,
    chunk: int = 512,
) -> tuple[pd.DataFrame, dict[str, Run]]:
    """A closed loop of `concurrency` streams under every policy, by turns; the requests repeat.

    Returns one row a policy and turn (`sums`), and the runs. The first turn begins when every row
    has been in use, and `LEARNING` turns come before those that count. In a turn each server
    generates at least `tokens` tokens, a piece at a time. Raises UserError for requests that yield
    no tokens.
    """
    space = room(pairing, names, costs)
    watches = {name: Stopwatch() for name in names}
    runs = {}
    for name in names:
        made = bank(pairing, name, concurrency, asked, space, watches[name])
        server = Server(made, policy(pairing, name, costs), chunk, queue=len(asked))
        runs[name] = Run(server, Closed(asked, concurrency, again=True))
    _alike(runs)
    begun = dict.fromkeys(runs, 0)

    def go(name: str, enough: float) -> None:
        run, most = runs[name], len(runs[name].answers) + len(asked)
        watches[name].start()
        while sum(t.emitted for t in run.ticks[begun[name] :]) < enough:
            run.advance()
            if len(run.answers) > most:
                why = "; ".join(notes(runs)) or "their outputs end at once"
                raise UserError(f"{len(asked)} requests did not yield {tokens} tokens: {why}")
        watches[name].stop()

    for name, run in runs.items():
        while not full(run, concurrency):
            go(name, 1 + sum(t.emitted for t in run.ticks))
    rows: list[dict[str, Any]] = []
    for turn in range(-LEARNING, turns):
        begun = {name: len(run.ticks) for name, run in runs.items()}
        for piece in range(1, PIECES + 1):
            for name in in_turn(runs, turn * PIECES + piece):
                go(name, tokens * piece / PIECES)
        if turn >= 0:
            for name, run in runs.items():
                rows.append({"policy": name, "turn": turn} | sums(run.ticks[begun[name] :]))
    return pd.DataFrame(rows), runs


def in_turn(names: Collection[str], number: int) -> list[str]:
    """The names in a random order that depends on `number`: a server that runs after one that
    drafts finds fewer of the target's weights in the CPU's caches, and no policy should suffer that
    more often than another."""
    return random.Random(number).sample(list(names), len(names))


def _alike(runs: Mapping[str, Run]) -> None:
    """Give all servers the same number of rows: later banks may have found less memory."""
    least = min(run.server.rows for run in runs.values())
    for run in runs.values():
        run.server.rows = least


def full(run: Run, concurrency: int) -> bool:
    """Whether every row of a closed loop has been in use."""
    return len([a for a in run.answers if a.deliveries]) >= concurrency


def sums(ticks: Sequence[Tick]) -> dict[str, float]:
    """Totals over steps: seconds, seconds in the bank, tokens emitted, rows, seconds times streams,
    rows that had guesses, guesses drafted and accepted."""
    return {
        "s": sum(t.end_s - t.begin_s for t in ticks),
        "busy_s": sum(t.busy_s for t in ticks),
        "tokens": sum(t.emitted for t in ticks),
        "rows": sum(t.rows for t in ticks),
        "stream_s": sum(t.live * (t.end_s - t.begin_s) for t in ticks),
        "speculated": sum(t.speculated for t in ticks),
        "drafted": sum(t.drafted for t in ticks),
        "accepted": sum(t.accepted for t in ticks),
    }


def open_race(
    pairing: Pairing,
    names: Sequence[str],
    costs: Costs | None,
    offered: Traffic,
    rows: int,
    chunk: int = 512,
    queue: int = 1024,
    slice_s: float = 0.5,
) -> dict[str, Run]:
    """The same traffic under every policy. Servers take turns of `slice_s` seconds of their own
    time, in which idle time is skipped. Before the first request arrives, the rounds of a bank are
    captured and it has been full once, since first rounds of a size are slow."""
    asked = offered.requests
    space = room(pairing, names, costs)
    watches = {name: Stopwatch() for name in names}
    filling = [replace(r, at_s=0.0, new=min(r.new, 8)) for r in asked[:rows]]
    runs = {}
    for name in names:
        made, chosen = (
            bank(pairing, name, rows, asked, space, watches[name]),
            policy(pairing, name, costs),
        )
        made.rehearse(chosen.widest - 1)
        watches[name].start()
        serve(Server(made, policy(pairing, name, costs), chunk, queue=rows), Timed(filling))
        watches[name].stop()
        runs[name] = Run(Server(made, chosen, chunk, queue), offered.arriving())
    _alike(runs)
    going, turn = list(names), 0
    with tqdm(total=len(asked) * len(names), desc="serving", unit="request", delay=1) as bar:
        while going:
            turn += 1
            for name in in_turn(going, turn):
                run, watch = runs[name], watches[name]
                watch.start()
                while run.server.now < turn * slice_s:
                    if not run.advance():
                        going.remove(name)
                        break
                watch.stop()
            bar.update(sum(a.over for run in runs.values() for a in run.answers) - bar.n)
    return runs


def bake_off(
    pairing: Pairing,
    names: Sequence[str],
    costs: Costs | None,
    prompts: Sequence[Prompt],
    concurrency: Sequence[int],
    max_new_tokens: int,
    turns: int = 12,
) -> pd.DataFrame:
    """`race` at every number of streams, `turns` turns each: one row a load, policy and turn."""
    parts = []
    with tqdm(total=len(concurrency), desc="bake-off", unit="load") as bar:
        for c in concurrency:
            tokens = 256 + 20 * c
            count = 2 * c + -(-(turns + LEARNING) * tokens // max_new_tokens)
            asked = staggered(requests(pairing, prompts, count, max_new_tokens), c)
            part, _ = race(pairing, names, costs, asked, c, tokens, turns)
            parts.append(part.assign(load=c))
            bar.update()
    return pd.concat(parts, ignore_index=True)


def rates(samples: pd.DataFrame, base: str = "plain") -> pd.DataFrame:
    """One row a load and policy: tokens/s, the speedup over `base` with its interval over turns,
    the shares of rows speculated and of guesses accepted (`kept`), the scheduler's share of the
    time."""
    rows = []
    for load, at in samples.groupby("load"):
        plain = at[at["policy"] == base].set_index("turn")
        for name, part in at.groupby("policy", sort=False):
            here = part.set_index("turn").loc[plain.index]
            s = statistics.speedup(plain["s"], plain["tokens"], here["s"], here["tokens"])
            rows.append({
                "load": load, "policy": name, "tok_s": here["tokens"].sum() / here["s"].sum(),
                "speedup": s.value, "low": s.low, "high": s.high,
                "speculated": here["speculated"].sum() / here["rows"].sum(),
                "kept": here["accepted"].sum() / max(1, here["drafted"].sum()),
                "overhead": 1 - here["busy_s"].sum() / here["s"].sum(),
            })  # fmt: skip
    return pd.DataFrame(rows)


def regrets(samples: pd.DataFrame) -> pd.DataFrame:
    """One row a load and policy: the regret, which is the share of the rate that a policy loses to
    the best fixed choice at that load (`oracle`: plain decoding or a draft length, picked with
    hindsight), with its interval over turns. Negative where the policy is faster."""
    rows = []
    for load, at in samples.groupby("load"):
        total = at.groupby("policy", sort=False)[["tokens", "s"]].sum()
        speed = total["tokens"] / total["s"]
        fixed = [n for n in speed.index if n in ("plain", "never") or n.startswith("always")]
        if not fixed:
            raise UserError("regret needs a fixed policy to compare with: plain or always:GAMMA")
        oracle = str(speed[fixed].idxmax())
        best = at[at["policy"] == oracle].set_index("turn")
        for name, part in at.groupby("policy", sort=False):
            here = part.set_index("turn").loc[best.index]
            s = statistics.speedup(best["s"], best["tokens"], here["s"], here["tokens"])
            rows.append({"load": load, "policy": name, "oracle": oracle, "regret": 1 - s.value,
                         "low": 1 - s.high, "high": 1 - s.low})  # fmt: skip
    return pd.DataFrame(rows)


def answered(answers: Sequence[Answer]) -> pd.DataFrame:
    """One row a request, times in seconds as serving benchmarks define them: `ttft` from arrival to
    the first token, waiting included; `tpot` from the first token to the last, for each token after
    the first; `e2e` from arrival to the last token."""
    rows = []
    for a in answers:
        first = a.deliveries[0][0] if a.deliveries else float("nan")
        last, count = a.deliveries[-1] if a.deliveries else (float("nan"), 0)
        rows.append({
            "kind": a.request.kind, "state": a.state, "came_s": a.came_s,
            "wait_s": (first if a.begun_s is None else a.begun_s) - a.came_s,
            "ttft_s": first - a.came_s,
            "tpot_s": (last - first) / (count - 1) if count > 1 else float("nan"),
            "e2e_s": last - a.came_s, "tokens": count, "prompt": len(a.request.prompt),
            "drafted": a.drafted, "accepted": a.accepted, "passes": a.passes,
        })  # fmt: skip
    return pd.DataFrame(rows)


def gaps(answers: Sequence[Answer]) -> np.ndarray:
    """ITL: seconds between the deliveries of a request, all requests pooled. The tokens of a round
    arrive together and count as one delivery."""
    found = [np.diff([at for at, _ in a.deliveries]) for a in answers if len(a.deliveries) > 1]
    return np.concatenate(found) if found else np.zeros(0)


def served_metrics(
    answers: Sequence[Answer], ticks: Sequence[Tick], ttft_ms: float, tpot_ms: float
) -> dict[str, float]:
    """The metrics that serving benchmarks report, for MLflow. Goodput: the requests answered within
    both limits, as a share of all and a second. NaN where there are too few samples."""
    table = answered(answers)
    done = table[table["state"] == "done"]
    seconds = (ticks[-1].end_s - min(a.came_s for a in answers)) if ticks else float("nan")
    within = (1e3 * done["ttft_s"] <= ttft_ms) & ~(1e3 * done["tpot_s"] > tpot_ms)
    total = sums(ticks)
    found = {
        "throughput/tok_s": done["tokens"].sum() / seconds,
        "throughput/req_s": len(done) / seconds,
        "goodput/share": within.sum() / len(table),
        "goodput/req_s": within.sum() / seconds,
        "load/occupancy": total["stream_s"] / (total["s"] or float("nan")),
        "load/speculated": total["speculated"] / max(1, total["rows"]),
        "load/refused": (table["state"] == "refused").sum(),
        "load/failed": (table["state"] == "failed").sum(),
        "load/overhead": 1 - total["busy_s"] / (total["s"] or float("nan")),
        "served/rate": total["accepted"] / max(1, total["drafted"]),
    }
    series = {"ttft": done["ttft_s"], "tpot": done["tpot_s"].dropna(), "e2e": done["e2e_s"],
              "itl": gaps(answers)}  # fmt: skip
    for name, values in series.items():
        for q in QUANTILES:
            at = float(np.percentile(values, q)) if len(values) >= LEAST[q] else float("nan")
            found[f"latency/{name}_p{q}_ms"] = 1e3 * at
    return found


def timeline(ticks: Sequence[Tick], bins: int = 120) -> pd.DataFrame:
    """Over time, in bins: rows being decoded, requests waiting, the shares of rows speculated and
    of guesses accepted (`kept`). Raises UserError when nothing was served."""
    if not ticks:
        raise UserError("nothing was served: every request was refused; see the answers' reasons")
    table = pd.DataFrame([vars(t) for t in ticks])
    at = pd.cut(table["end_s"], bins, labels=False)
    total = table.groupby(at)[["speculated", "rows", "drafted", "accepted", "emitted"]].sum()
    mean = table.groupby(at)[["end_s", "live", "waiting"]].mean()
    return mean.assign(
        speculated=total["speculated"] / total["rows"].clip(lower=1),
        kept=total["accepted"] / total["drafted"].where(total["drafted"] > 0),
    ).reset_index(drop=True)


def certify_served(pairing: Pairing, asked: Sequence[Request], concurrency: int) -> Exactness:
    """Serve requests in a closed loop, greedily or under the rule Match, and compare every answer
    with plain decoding of that request alone. All rows draft, then half of them, then none, and so
    on, so that drafters lag and catch up whatever a policy would choose here."""
    coupled = pairing if pairing.options["temperature"] == 0 else pairing.with_(rule="match")
    turning = policies.InTurn(min(3, pairing.deepest))
    made = bank(coupled, "in turn", concurrency, asked, turning.widest)
    server = Server(made, turning, queue=len(asked))
    texts = [a.tokens for a in serve(server, Closed(asked, concurrency))]
    prompts, streams = [list(r.prompt) for r in asked], [r.stream for r in asked]
    return compare(pairing.engine, prompts, texts, max(r.new for r in asked), streams)


def overhead_s(runs: dict[str, Run]) -> float:
    """Mean seconds a step that servers spend outside their banks."""
    ticks = [tick for run in runs.values() for tick in run.ticks]
    return sum(t.end_s - t.begin_s - t.busy_s for t in ticks) / len(ticks)


def simulate(
    costs: Costs,
    accepted: pd.DataFrame,
    names: Sequence[str],
    offered: Traffic,
    rows: int,
    chunk: int = 512,
    queue: int = 1024,
    overhead_s: float = 0.0,
    pace: tuple[float, float] = (1.0, 1.0),
) -> dict[str, Run]:
    """SIMULATED: the same traffic under every policy, on the cost table instead of the models.

    accepted: rows of `bench.acceptance`; a request has the acceptance of its category, and guesses
    as often. overhead_s: see `overhead_s`. pace: factors on the table's times of rounds and of
    prefill, of which the policies do not know.
    """
    parts = [*accepted.groupby("category"), (None, accepted)]
    known = {
        kind: (one_pairing.pooled(part).conditional, one_pairing.made(part)) for kind, part in parts
    }
    alike = {r.stream: known.get(r.kind, known[None]) for r in offered.requests}
    costs = replace(costs, about=costs.about | {"grades": 1})  # simulated guesses have no grades
    runs = {}
    for name in names:
        deepest = costs.gammas[-1] if name in ("goodput", "bandit") else policies.MOST
        chosen = policies.of("never" if name == "plain" else name, costs, deepest)
        slots = slots_for(offered.requests, chosen.widest)
        made = SimulatedBank(
            costs.scaled(*pace), lambda stream: alike[stream][0], rows, slots, chosen.widest,
            overhead_s=overhead_s, made=lambda stream: alike[stream][1],
        )  # fmt: skip
        runs[name] = Run(Server(made, chosen, chunk, queue), offered.arriving())
        while runs[name].advance():
            pass
    return runs


def simulated(
    costs: Costs, accepted: pd.DataFrame, real: dict[str, Run], offered: Traffic, rows: int
) -> tuple[dict[str, Run], tuple[float, float]]:
    """SIMULATED: the same runs by `simulate`, on a machine as fast as the real one was during them,
    and the two factors on the table's times that this takes. They are fitted so that the steps with
    prefill, and those without, take as long in total as they really did, in the median of the
    policies. (Within minutes a machine's speed changes by a third, which queues amplify.)"""
    own_s, rounds, prefill = overhead_s(real), 1.0, 1.0

    def off(runs: dict[str, Run], reading: bool) -> float:
        def seconds(run: Run) -> float:
            return sums([t for t in run.ticks if bool(t.read) == reading])["s"]

        return float(np.median([seconds(real[n]) / max(seconds(runs[n]), 1e-9) for n in real]))

    for _ in range(20):
        pace = rounds, prefill
        runs = simulate(costs, accepted, list(real), offered, rows, overhead_s=own_s, pace=pace)
        found = off(runs, False), off(runs, True)
        if np.allclose(found, 1, atol=0.005):
            break
        rounds, prefill = rounds * found[0], prefill * found[1]
    return runs, pace


def compare_runs(
    real: dict[str, Run], simulated: dict[str, Run], ttft_ms: float, tpot_ms: float
) -> pd.DataFrame:
    """Real and SIMULATED metrics, one row a policy and figure: throughput and, where there are
    enough requests, 95th percentiles."""
    shown = {
        "throughput/tok_s": "tokens/s", "latency/ttft_p95_ms": "TTFT p95 (ms)",
        "latency/tpot_p95_ms": "TPOT p95 (ms)", "latency/e2e_p95_ms": "E2E p95 (ms)",
    }  # fmt: skip
    rows = []
    for name in real:
        ours, theirs = (
            served_metrics(r.answers, r.ticks, ttft_ms, tpot_ms)
            for r in (real[name], simulated[name])
        )
        rows += [
            {"policy": name, "figure": said, "real": ours[key], "simulated": theirs[key]}
            for key, said in shown.items()
        ]
    return pd.DataFrame(rows).dropna()


def prices(pairing: Pairing, names: Iterable[str], asked: Sequence[Request]) -> Costs | None:
    """The cost table for these requests, measured if need be; None if no policy reads it."""
    return break_even.profile(pairing, longest=slots_for(asked, 0)) if "goodput" in names else None


def simulation_metrics(compared: pd.DataFrame) -> dict[str, float]:
    """Relative error of the SIMULATED figures, the median over policies."""
    off = (compared["simulated"] / compared["real"] - 1).abs().groupby(compared["figure"]).median()
    names = {"tokens/s": "throughput", "TTFT p95 (ms)": "ttft_p95", "TPOT p95 (ms)": "tpot_p95",
             "E2E p95 (ms)": "e2e_p95"}  # fmt: skip
    return {f"simulated/{names[said]}_off": float(value) for said, value in off.items()}


def steps(runs: dict[str, Run]) -> pd.DataFrame:
    """One row a step and policy, in order; logged as a table."""
    return pd.concat(
        [
            pd.DataFrame(vars(t) for t in run.ticks).assign(policy=name)
            for name, run in runs.items()
        ],
        ignore_index=True,
    )


def figures(runs: dict[str, Run], ttft_ms: float, tpot_ms: float) -> pd.DataFrame:
    """`served_metrics` of every policy, one row each."""
    return pd.DataFrame(
        {"policy": name} | served_metrics(run.answers, run.ticks, ttft_ms, tpot_ms)
        for name, run in runs.items()
    )


def said(key: str, value: float) -> str:
    """A value of `served_metrics` as text."""
    if np.isnan(value):
        return "-"
    return f"{value:.1%}" if key in SHARES else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def notes(runs: dict[str, Run]) -> list[str]:
    """Messages about memory that ran out and requests refused or failed, with the reasons."""
    found = []
    for name, run in runs.items():
        found += [f"{name}: {line}" for line in run.server.notes]
        lost = Counter((a.state, a.reason) for a in run.answers if a.state in ("refused", "failed"))
        found += [f"{name}: {n} {state}: {reason}" for (state, reason), n in lost.items()]
    return found


def metrics(
    rated: pd.DataFrame, missed: pd.DataFrame, served: pd.DataFrame, policy: str
) -> tuple[dict[str, float], dict[str, Any]]:
    """Metrics and series of one policy, for MLflow: of closed loops from `rates` and `regrets`, of
    open traffic from `figures`. `speedup/measured` is that of the fewest streams."""
    mine = rated[rated["policy"] == policy]
    lost = missed[missed["policy"] == policy].set_index("load")["regret"]
    first = mine.iloc[0]
    found = served.set_index("policy").loc[policy].dropna().to_dict() | {
        "speedup/measured": first["speedup"], "speedup/ci_low": first["low"],
        "speedup/ci_high": first["high"], "speedup/at_largest_batch": mine["speedup"].iloc[-1],
        "regret/worst": lost.max(), "regret/mean": lost.mean(),
    }  # fmt: skip
    by_load = mine.set_index("load")
    return found, {
        "speedup/at_batch": by_load["speedup"].to_dict(),
        "throughput/at_batch": by_load["tok_s"].to_dict(),
        "load/speculated_at_batch": by_load["speculated"].to_dict(),
        "regret/at_batch": lost.to_dict(),
    }
