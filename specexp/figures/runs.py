"""Figures over many runs, from the tables of `tracking`: which drafter, which text, which batch."""

import math

import pandas as pd
from matplotlib.figure import Figure

from specexp.figures.pairings import heat
from specexp.figures.style import (
    PLAIN,
    SYMBOLS,
    batch_axis,
    canvas,
    ends,
    marks,
    nothing,
    per_cent,
    title,
)
from specexp.measure.summaries import leads

PAIRING = ("drafter", "target", "gamma", "temperature", "rule", "tree", "prompts")


def by_category(runs: pd.DataFrame) -> Figure:
    """Acceptance rate by pairing and category as a heat map, averaged over the runs from
    `tracking.runs` that differ in nothing of `PAIRING`. Only runs of 10_acceptance: others weigh
    draft tokens differently."""
    missing = "No run has acceptance by category yet: run 10_acceptance"
    columns = {c: c.rpartition("/")[2] for c in runs if c.startswith("metrics.category/")}
    if not columns:
        return nothing(missing)
    own = runs.get("tags.notebook", runs["experiment"]) == "10_acceptance.ipynb"
    have = runs[own | (runs["experiment"] == "acceptance")].dropna(subset=list(columns), how="all")
    if have.empty:
        return nothing(missing)
    pairing = have.reindex(columns=[f"params.{name}" for name in PAIRING]).fillna("").astype(str)
    labels = pairing["params.drafter"].copy()
    for name in PAIRING[1:]:
        value = pairing[f"params.{name}"]
        if (value != value.iloc[0]).any():
            labels += (f", {name} " + value).where(value != "", "")
    rates = have.groupby(labels)[list(columns)].mean().rename(columns=columns)
    rates = rates.loc[rates.mean(axis=1).sort_values(ascending=False).index]
    runs_of = have.groupby(labels).size().reindex(rates.index)
    words = [f"{n} run{'s' * (n > 1)}" for n in runs_of]
    counts = pd.DataFrame(dict.fromkeys(rates, words), rates.index)
    return heat(
        rates,
        f"Acceptance rates in runs of 10_acceptance: {rates.min(axis=None):.0%} to "
        f"{rates.max(axis=None):.0%}",
        counts if (runs_of > 1).any() else None,
    )


def rate_and_speedup(runs: pd.DataFrame) -> Figure:
    """Speedup over acceptance rate with their intervals, one point a run from `tracking.runs`;
    colours are drafters, symbols experiments."""
    needed = ["metrics.acceptance/rate", "metrics.speedup/measured"]
    have = runs.dropna(subset=needed) if set(needed) <= set(runs) else runs.head(0)
    if have.empty:
        return nothing("No run has both yet: run 20_latency or 30_throughput_under_batch")
    have = have.rename(columns={"params.drafter": "drafter"})
    looks, experiments = marks(have["drafter"].unique()), list(have["experiment"].unique())
    with canvas(9.5, 4.8) as (figure, axes):
        axes.axhline(1, color=PLAIN, lw=1.5)
        bars = [_within(have, *names) for names in zip(needed, ("rate_ci", "ci"), strict=True)]
        for at, (_, run) in enumerate(have.iterrows()):
            across, up = (ends(bar.iloc[[at]], "value") for bar in bars)
            symbol = SYMBOLS[experiments.index(run["experiment"]) % len(SYMBOLS)]
            axes.errorbar(run[needed[0]], run[needed[1]], up, across, elinewidth=1, capsize=2,
                          markersize=8, color=looks[run["drafter"]]["color"],
                          marker=symbol)  # fmt: skip
        for name, look in looks.items():
            axes.plot([], [], ls="", color=look["color"], marker="o", label=name)
        for symbol, name in zip(SYMBOLS, experiments, strict=False):
            axes.plot([], [], ls="", color=PLAIN, marker=symbol, label=name)
        axes.set(xlabel="acceptance rate", ylabel="speedup over plain decoding", xlim=(0, 1))
        per_cent(axes, "x")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        title(figure, _first(have))
    return figure


def _within(runs: pd.DataFrame, name: str, ends: str) -> pd.DataFrame:
    """A metric with its interval, of no width where none was logged: columns value, low, high."""
    group = name.rpartition("/")[0]
    columns = {f"{group}/{ends}_low": "low", f"{group}/{ends}_high": "high"}
    table = runs.reindex(columns=list(columns)).rename(columns=columns).astype(float)
    value = runs[name]
    return table.apply(lambda end: end.fillna(value)).assign(value=value)


def _first(runs: pd.DataFrame) -> str:
    """Which run is the fastest, if that is certain. A run without an interval proves nothing."""
    names = {"metrics.speedup/ci_low": "low", "metrics.speedup/ci_high": "high"}
    ends = runs.reindex(columns=list(names)).rename(columns=names)
    table = runs.join(ends.fillna({"low": -math.inf, "high": math.inf}))
    best = table.loc[table["metrics.speedup/measured"].idxmax()]
    if best["low"] > 1 and leads(table, "metrics.speedup/measured"):
        return (
            f"Fastest: {best['drafter']}, {best['metrics.speedup/measured']:.2f}x "
            f"[{best['low']:.2f}, {best['high']:.2f}] at acceptance rate "
            f"{best['metrics.acceptance/rate']:.0%}"
        )
    faster = int((table["low"] > 1).sum())
    return f"{faster} of {len(table)} runs are certainly faster than plain decoding" + (
        ", none is certainly the fastest" * (faster > 1)
    )


def over_batch(curves: pd.DataFrame) -> Figure:
    """Speedup over batch, a line a run, from `compare.curves(runs, "speedup/at_batch")`."""
    if curves.empty:
        return nothing("No run has a batch sweep yet: run 30_throughput_under_batch")
    looks = marks(curves["drafter"].unique())
    with canvas() as (figure, axes):
        axes.axhline(1, color=PLAIN, lw=1.5)
        for (drafter, _), part in curves.groupby(["drafter", "run_id"], sort=False):
            axes.plot(part["step"], part["value"], label=drafter, **looks[drafter])
        batch_axis(axes, sorted(curves["step"].unique()))
        axes.set(ylabel="speedup over plain decoding", ylim=(0, None))
        lines = {str(line.get_label()): line for line in axes.lines[1:]}
        axes.legend(lines.values(), list(lines))
        largest = curves[curves["step"] == curves["step"].max()]
        speeds = (f"{value:.2f}x" for value in largest["value"].agg(["min", "max"]))
        speedups = " to ".join(dict.fromkeys(speeds))
        title(figure, f"Speedup at batch {largest['step'].iloc[0]}: {speedups}")
    return figure
