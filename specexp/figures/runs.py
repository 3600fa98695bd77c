"""Figures over many runs, from the tables of `tracking`: which drafter, which text, which batch."""

from __future__ import annotations

import math

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from specexp.figures.style import PLAIN, batch_axis, canvas
from specexp.measure.prompts import NAMES
from specexp.measure.summaries import leads

PAIRING = ("drafter", "target", "gamma", "temperature", "rule", "tree", "prompts")


def by_category(runs: pd.DataFrame) -> Figure:
    """Acceptance rate by pairing and category as a heat map, averaged over the runs from
    `tracking.runs` that differ in nothing of `PAIRING`. Only runs of 10_acceptance: others weigh
    draft tokens differently."""
    nothing = "No run has acceptance by category yet: run 10_acceptance"
    columns = {c: c.rpartition("/")[2] for c in runs if c.startswith("metrics.category/")}
    if not columns:
        return _nothing(nothing)
    own = runs.get("tags.notebook", runs["experiment"]) == "10_acceptance.ipynb"
    have = runs[own | (runs["experiment"] == "acceptance")].dropna(subset=list(columns), how="all")
    if have.empty:
        return _nothing(nothing)
    pairing = have.reindex(columns=[f"params.{name}" for name in PAIRING]).fillna("").astype(str)
    labels = pairing["params.drafter"].copy()
    for name in PAIRING[1:]:
        value = pairing[f"params.{name}"]
        if (value != value.iloc[0]).any():
            labels += (f", {name} " + value).where(value != "", "")
    rates = have.groupby(labels)[list(columns)].mean().rename(columns=columns)
    rates = rates.dropna(axis=1, how="all")
    order = [c for c in NAMES if c in rates] + [c for c in rates if c not in NAMES]
    rates = rates.loc[rates.mean(axis=1).sort_values(ascending=False).index, order]
    with canvas(8, 1.2 + 0.6 * len(rates)) as (figure, axes):
        sns.heatmap(rates, annot=True, fmt=".0%", vmin=0, vmax=1, cmap="crest", ax=axes,
                    cbar_kws={"format": PercentFormatter(1)})  # fmt: skip
        axes.set(xlabel="acceptance rate in runs of 10_acceptance", ylabel="")
        axes.tick_params(axis="y", rotation=0)
        category = rates.max().idxmax()
        drafter, most = rates[category].idxmax(), rates[category].max()
        axes.set_title(f"Highest acceptance rate: {drafter} on {category} ({most:.0%})")
    return figure


def rate_and_speedup(runs: pd.DataFrame) -> Figure:
    """Speedup over acceptance rate, one point per run from `tracking.runs`."""
    needed = ["metrics.acceptance/rate", "metrics.speedup/measured"]
    have = runs.dropna(subset=needed) if set(needed) <= set(runs) else runs.head(0)
    if have.empty:
        return _nothing("No run has both yet: run 20_latency or 30_throughput_under_batch")
    have = have.rename(columns={"params.drafter": "drafter"})
    with canvas() as (figure, axes):
        axes.axhline(1, color=PLAIN, lw=1)
        sns.scatterplot(
            have, x="metrics.acceptance/rate", y="metrics.speedup/measured",
            hue="drafter", style="experiment", s=80, palette="colorblind", ax=axes,
        )  # fmt: skip
        axes.set(xlabel="acceptance rate", ylabel="speedup over plain decoding", xlim=(0, 1))
        axes.xaxis.set_major_formatter(PercentFormatter(1))
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        axes.set_title(_first(have))
    return figure


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
    """Speedup over batch of several runs, from `compare.curves(runs, "speedup/at_batch")`."""
    if curves.empty:
        return _nothing("No run has a batch sweep yet: run 30_throughput_under_batch")
    with canvas() as (figure, axes):
        axes.axhline(1, color=PLAIN, lw=1.5)
        sns.lineplot(
            curves, x="step", y="value", hue="drafter", units="run_id", estimator=None,
            marker="o", palette="colorblind", ax=axes,
        )  # fmt: skip
        batch_axis(axes, sorted(curves["step"].unique()))
        axes.set(ylabel="speedup over plain decoding", ylim=(0, None))
        largest = curves[curves["step"] == curves["step"].max()]
        axes.set_title(
            f"At batch {largest['step'].iloc[0]} speedups of {largest['value'].min():.2f}x to "
            f"{largest['value'].max():.2f}x"
        )
    return figure


def _nothing(why: str) -> Figure:
    with canvas(8, 1.2) as (figure, axes):
        axes.text(0.5, 0.5, why, ha="center", va="center")
        axes.set_axis_off()
    return figure
