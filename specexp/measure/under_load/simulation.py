"""SIMULATED: the same servers and policies on the cost table instead of the models."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from specexp.measure.summaries import drafted_share, pooled
from specexp.measure.under_load.loops import overhead_s
from specexp.measure.under_load.offered import slots_for
from specexp.measure.under_load.served import served_metrics, totals
from specexp.policy import PRICED
from specexp.serving import policies
from specexp.serving.cost_table import Costs
from specexp.serving.server import Server
from specexp.serving.simulated_rows import SimulatedRows
from specexp.serving.sources import Run, Source

COMPARED = {  # each figure, and the name under which its error is logged
    "throughput/tok_s": ("tokens/s", "throughput"),
    "latency/ttft_p95_ms": ("TTFT p95 (ms)", "ttft_p95"),
    "latency/tpot_p95_ms": ("TPOT p95 (ms)", "tpot_p95"),
    "latency/e2e_p95_ms": ("E2E p95 (ms)", "e2e_p95"),
}


def simulate(
    costs: Costs, accepted: pd.DataFrame, names: Sequence[str], offered: Source, rows: int,
    overhead_s: float = 0.0, factors: tuple[float, float] = (1.0, 1.0),
) -> dict[str, Run]:  # fmt: skip
    """SIMULATED: the same traffic under every policy, on the cost table instead of the models.

    accepted: rows of `one_pairing.acceptance`; a request has the acceptance of its category, and
    draft tokens as often. overhead_s: see `loops.overhead_s`. factors: of the table's times of
    rounds and of prefill; the policies do not know them."""
    parts = [*accepted.groupby("category"), (None, accepted)]
    by_kind = {kind: (pooled(part).conditional, drafted_share(part)) for kind, part in parts}
    alike = {r.stream: by_kind.get(r.kind, by_kind[None]) for r in offered.requests}
    runs = {}
    for name in names:
        deepest = costs.gammas[-1] if name in (*PRICED, "bandit") else policies.MOST
        chosen = policies.of(name, costs, deepest)
        slots = slots_for(offered.requests, chosen.widest)
        rows_of_server = SimulatedRows(
            costs.scaled(*factors), lambda stream: alike[stream][0], rows, slots, chosen.widest,
            overhead_s=overhead_s, filled=lambda stream: alike[stream][1],
        )  # fmt: skip
        runs[name] = Run(Server(rows_of_server, chosen), offered)
        while runs[name].advance():
            pass
    return runs


def simulate_fitted(
    costs: Costs, accepted: pd.DataFrame, real: dict[str, Run], offered: Source, rows: int
) -> tuple[dict[str, Run], tuple[float, float]]:
    """SIMULATED: the real runs by `simulate`, on a machine as fast as it was during them, and the
    `factors` that this takes. They are fitted so that the steps with prefill, and those without,
    take as long in total as they really did, in the median of the policies. (Within minutes a
    machine's speed changes by a third, which queues amplify.)"""
    own_s, rounds, prefill = overhead_s(real), 1.0, 1.0

    def off(runs: dict[str, Run], reading: bool) -> float:
        def seconds(run: Run) -> float:
            return totals([t for t in run.steps if bool(t.read) == reading])["s"]

        return float(np.median([seconds(real[n]) / max(seconds(runs[n]), 1e-9) for n in real]))

    for _ in range(20):
        factors = rounds, prefill
        runs = simulate(costs, accepted, list(real), offered, rows, own_s, factors)
        slower = off(runs, False), off(runs, True)
        if np.allclose(slower, 1, atol=0.005):
            break
        rounds, prefill = rounds * slower[0], prefill * slower[1]
    return runs, factors


def compare_runs(
    real: dict[str, Run], simulated: dict[str, Run], ttft_ms: float, tpot_ms: float
) -> pd.DataFrame:
    """Real and SIMULATED metrics: throughput and, where there are enough requests, 95th
    percentiles. One row a policy and figure, with columns policy, figure, real, simulated."""
    rows = []
    for name in real:
        ours, theirs = (
            served_metrics(r.responses, r.steps, ttft_ms, tpot_ms)
            for r in (real[name], simulated[name])
        )
        rows += [
            {"policy": name, "figure": figure, "real": ours[key], "simulated": theirs[key]}
            for key, (figure, _) in COMPARED.items()
        ]
    return pd.DataFrame(rows).dropna()


def simulation_metrics(compared: pd.DataFrame) -> dict[str, float]:
    """Relative error of the SIMULATED figures, the median over policies."""
    off = (compared["simulated"] / compared["real"] - 1).abs().groupby(compared["figure"]).median()
    names = dict(COMPARED.values())
    return {f"simulated/{names[figure]}_off": float(value) for figure, value in off.items()}
