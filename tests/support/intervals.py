"""How often intervals hold the truth, and how often the best of equal arms is called faster: by
simulation, with the intervals over prompts and with those of repeated timings, which stood in their
place before.

    PYTHONPATH=tests python -m support.intervals data/measurements/intervals 1000

writes intervals.json and intervals.png there, of 1000 runs each (a quarter of an hour).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from scipy.stats import bootstrap, norm, t

from specexp.figures.style import PLAIN, SPECULATIVE, panels
from specexp.measure import statistics
from specexp.measure.statistics import Interval
from specexp.measure.summaries import fastest, speedups
from specexp.trace import Acceptance

KINDS = {"bimodal": "20 % x2.2, 80 % x0.7", "pareto": "Pareto 2.5"}
UNITS, ARMS = (5, 6, 8, 10, 12, 16, 20, 24, 30, 40, 80), (1, 3, 5, 8)
LEVEL = 0.95
Method = Callable[..., Interval]


def over_prompts(above: np.ndarray, below: np.ndarray) -> Interval:
    return statistics.ratio(above, below)


def over_repeats(above: np.ndarray, below: np.ndarray) -> Interval:
    """An earlier method: a percentile bootstrap, widened by Student's t."""
    value, n = above.sum() / below.sum(), len(above)
    drawn = bootstrap(
        (above, below), lambda a, b, axis: a.sum(axis) / b.sum(axis),
        paired=True, method="percentile", n_resamples=2000, rng=0,
    )  # fmt: skip
    wider = t.ppf(0.975, n - 1) / norm.ppf(0.975) * np.sqrt(n / (n - 1))
    return Interval(value, *(value + wider * (end - value) for end in drawn.confidence_interval))


def ratios(kind: str, rng: np.random.Generator, n: int) -> tuple[np.ndarray, float]:
    """Speedups of n prompts, and their true mean."""
    if kind == "bimodal":
        return np.where(rng.random(n) < 0.2, 2.2, 0.7) * rng.normal(1, 0.02, n), 1.0
    return 1 + rng.pareto(2.5, n), 1 / 1.5 + 1


def covered(kind: str, n: int, runs: int, method: Method = over_prompts) -> float:
    """The share of runs with n prompts whose interval holds the true mean."""
    rng, hits = np.random.default_rng(1), 0
    for _ in range(runs):
        values, truth = ratios(kind, rng, n)
        found = method(values, np.ones(n))
        hits += found.low <= truth <= found.high
    return hits / runs


def equal_arms(rng: np.random.Generator, n: int, arms: int) -> pd.DataFrame:
    """A table like that of `one_pairing.latency`: draft lengths that are all as fast as plain
    decoding. Noise of 5 % on every timing; prompts differ by 15 %."""
    spread = rng.normal(1, 0.15, n)
    plain = spread * rng.normal(1, 0.05, n)
    return pd.concat(
        pd.DataFrame(
            {"question_id": range(n), "gamma": gamma, "record": Acceptance(0, 0, 0, (1,))}
            | {"s": spread * rng.normal(1, 0.05, n), "tokens": 64}
            | {"plain_s": plain, "plain_tokens": 64}
        )
        for gamma in range(1, arms + 1)
    )


def together(samples: pd.DataFrame) -> tuple[float, float]:
    """The lower end and the value of the best arm, as logged."""
    best = fastest(speedups(samples, "gamma"))
    return best["low"], best["speedup"]


def alone(samples: pd.DataFrame) -> tuple[float, float]:
    """The same of the arm that came out first, with an interval as if it were the only one."""
    arms = (part[["plain_s", "s"]].to_numpy().T for _, part in samples.groupby("gamma"))
    best = max(over_repeats(*arm) for arm in arms)
    return best.low, best.value


def called_faster(
    n: int, arms: int, runs: int, best: Callable[..., tuple[float, float]] = together
) -> tuple[float, float]:
    """Of runs with equal arms: the share whose best arm is called faster, and its mean speedup."""
    rng = np.random.default_rng(2)
    ends = np.array([best(equal_arms(rng, n, arms)) for _ in range(runs)])
    return float(np.mean(ends[:, 0] > 1)), float(ends[:, 1].mean())


def simulate(runs: int) -> pd.DataFrame:
    """One row a simulation: what, x (prompts, or arms), before and now. Best of several arms: with
    40 prompts, and 20."""
    rows = [
        {"what": kind, "x": n, "before": covered(kind, n, runs, over_repeats)}
        | {"now": covered(kind, n, runs)}
        for kind in KINDS
        for n in UNITS
    ]
    for n in (20, 40):
        for arms in ARMS:
            (before, mean_before), (now, mean) = (
                called_faster(n, arms, runs // 2, best) for best in (alone, together)
            )
            rows.append({"what": f"faster, {n} prompts", "x": arms, "before": before, "now": now})
            rows.append(
                {"what": f"speedup, {n} prompts", "x": arms, "before": mean_before, "now": mean}
            )
    return pd.DataFrame(rows)


def drawn(table: pd.DataFrame) -> Figure:
    """Coverage by the number of prompts, and false claims by the number of arms."""
    colours = {"before": PLAIN, "now": SPECULATIVE}
    with panels(2, 12.5, 4.6) as (figure, (left, right)):
        left.axhline(LEVEL, color="k", lw=1, label="nominal")
        for (kind, label), dash in zip(KINDS.items(), ("-", "--"), strict=True):
            part = table[table["what"] == kind]
            for when, colour in colours.items():
                left.plot(part["x"], part[when], f"o{dash}", color=colour, ms=5,
                          label=f"{label}, {when}")  # fmt: skip
        left.set(xscale="log", xlabel="prompts", ylabel="intervals that hold the true speedup",
                 ylim=(0.5, 1.01))  # fmt: skip
        left.set_xticks(UNITS, [str(n) for n in UNITS])
        left.minorticks_off()
        part = table[table["what"].isin(KINDS)]
        left.set_title(f"95 % intervals hold the truth in {part['now'].min():.1%} of runs or more, "
                       f"before {part['before'].min():.1%}")  # fmt: skip
        right.axhline((1 - LEVEL) / 2, color="k", lw=1, label="nominal")
        for n, dash in ((20, "--"), (40, "-")):
            part = table[table["what"] == f"faster, {n} prompts"]
            for when, colour in colours.items():
                right.plot(part["x"], part[when], f"o{dash}", color=colour, ms=5,
                           label=f"{n} prompts, {when}")  # fmt: skip
        right.set(xlabel="draft lengths compared, all as fast as plain decoding",
                  ylabel='runs whose best is called "faster"', ylim=(-0.004, None))  # fmt: skip
        right.set_xticks(ARMS)
        part = table[table["what"].str.startswith("faster")]
        right.set_title(f"False claims: at most {part['now'].max():.1%}, before "
                        f"{part['before'].max():.1%}")  # fmt: skip
        for axes in (left, right):
            axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
            axes.legend(fontsize=9)
    return figure


if __name__ == "__main__":
    out = Path(sys.argv[1])
    simulated = simulate(int(sys.argv[2]))
    out.with_suffix(".json").write_text(simulated.to_json(orient="records", indent=1) + "\n")
    drawn(simulated).savefig(out.with_suffix(".png"), dpi=110)
