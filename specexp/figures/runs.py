"""Figures over many runs, from the tables of `tracking`: which drafter, which text, which batch."""

import math

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from specexp.errors import brief, counted
from specexp.figures import style
from specexp.figures.pairings import heat_map
from specexp.measure.statistics import NOT_CREDIBLE
from specexp.measure.summaries import best_is_certain
from specexp.tracking.mlflow_view import widened

PAIRING = ("drafter", "target", "gamma", "temperature", "rule", "tree", "prompts")


def by_category(runs: pd.DataFrame) -> Figure:
    """Acceptance rate by pairing and category as a heat map, with its interval, or averaged over
    runs from `tracking.runs` that differ in nothing of `PAIRING`. Only runs of 10_acceptance:
    others weigh draft tokens differently."""
    missing = "No run has acceptance by category yet: run 10_acceptance"
    columns = {c: c.rpartition("/")[2] for c in runs if c.startswith("metrics.category/")}
    if not columns:
        return style.nothing(missing)
    own = runs.get("tags.notebook", runs["experiment"]) == "10_acceptance.ipynb"
    have = runs[own | (runs["experiment"] == "acceptance")].dropna(subset=list(columns), how="all")
    if have.empty:
        return style.nothing(missing)
    pairing = have.reindex(columns=[f"params.{name}" for name in PAIRING]).fillna("").astype(str)
    labels = pairing["params.drafter"].copy()
    for name in PAIRING[1:]:
        value = pairing[f"params.{name}"]
        if (value != value.iloc[0]).any():
            labels += (f", {name} " + value).where(value != "", "")
    rates = have.groupby(labels)[list(columns)].mean().rename(columns=columns)
    rates = rates.loc[rates.mean(axis=1).sort_values(ascending=False).index]
    runs_of = have.groupby(labels).size().reindex(rates.index)
    counts = pd.DataFrame(dict.fromkeys(rates, runs_of.map(lambda n: counted(n, "run"))))
    low, high = (
        100 * have.reindex(columns=[f"metrics.category_ci/{name}_{end}" for name in rates])
        .set_axis(rates.columns, axis=1).groupby(labels).mean().reindex(rates.index)
        for end in ("low", "high")
    )  # fmt: skip
    of_one = low.notna() & (runs_of == 1).to_numpy()[:, None]
    between = "[" + low.map("{:.0f}".format) + ", " + high.map("{:.0f}".format) + "]"
    lowest, highest = rates.min(axis=None), rates.max(axis=None)
    finding = f"Acceptance rates in runs of 10_acceptance: {lowest:.0%} to {highest:.0%}"
    why = "" if of_one.all(axis=None) else "in averages of runs, nor where none was logged"
    return heat_map(rates, finding, between.where(of_one, counts), no_intervals=why)


def rate_and_speedup(runs: pd.DataFrame) -> Figure:
    """Speedup over acceptance rate with their intervals, one point a run from `tracking.runs`;
    hollow where the timing is not credible. The intervals of speedups hold together: the fastest
    of many null runs is rarely called faster."""
    needed = ["metrics.acceptance/rate", "metrics.speedup/measured"]
    have = runs.dropna(subset=needed) if set(needed) <= set(runs) else runs.head(0)
    if have.empty:
        return style.nothing("No run has both yet: run 20_latency or 30_throughput_under_batch")
    have = have.assign(drafter=_named(have, "params.drafter", "params.target"))
    sound = have.get("metrics.speedup/credible", pd.Series(1, have.index)) != 0
    looks = style.marks(have["drafter"].unique())
    rates, speeds = (_within(have, *n) for n in zip(needed, ("rate_ci", "ci"), strict=True))
    speeds = _together(speeds)
    with style.canvas(9.5, 5.2) as (figure, axes):
        axes.axhline(1, color=style.PLAIN, lw=1.5)
        for drafter, look in looks.items():
            for own, inside in ((~sound, style.HOLLOW), (sound, {})):
                across, up = (each[own & (have["drafter"] == drafter)] for each in (rates, speeds))
                if len(up):
                    axes.errorbar(across["value"], up["value"], style.ends(up, "value"),
                                  style.ends(across, "value"), ls="", elinewidth=1, capsize=2,
                                  markersize=8, label=drafter, **look | inside)  # fmt: skip
        axes.set(xlabel="acceptance rate", xlim=(0, 1))
        axes.set_ylabel("speedup over plain decoding\n(intervals hold for all runs at once)")
        style.per_cent(axes, "x")
        axes.set_ylim(0.9 * min(1, speeds["low"].min()), 1.1 * max(1, speeds["high"].max()))
        style.log_axis(axes)
        claim = "Speedup over acceptance rate"
        if sound.any():
            claim = _winner(have[sound], rates[sound], speeds[sound])
        style.title(figure, "; ".join(filter(None, [claim, _left_out((~sound).sum())])))
    return figure


def _named(runs: pd.DataFrame, drafter: str, target: str) -> pd.Series:
    """The drafters of runs, from this column; with their targets if there are several."""
    targets = runs.get(target, pd.Series("", runs.index)).fillna("")
    several = len({*targets}) > 1
    return runs[drafter] + (", target " + targets).where((targets != "") & several, "")


def _left_out(runs: int) -> str:
    """What a title says of so many runs that are drawn hollow."""
    named = counted(runs, "run")
    return f"hollow, not counted: {named}, {NOT_CREDIBLE}" * bool(runs)


def _within(runs: pd.DataFrame, name: str, ends: str) -> pd.DataFrame:
    """A metric with its interval, of no width where none was logged: columns value, low, high."""
    group = name.rpartition("/")[0]
    table = runs.reindex(columns=[f"{group}/{ends}_low", f"{group}/{ends}_high"]).astype(float)
    return table.set_axis(["low", "high"], axis=1).apply(
        lambda end: end.fillna(runs[name])).assign(value=runs[name])  # fmt: skip


def _together(speeds: pd.DataFrame) -> pd.DataFrame:
    """Speedups (`_within`) with intervals widened for the number of runs that have one."""
    have = (speeds["low"] < speeds["high"]) & (speeds["low"] > 0)
    rows = speeds.loc[have, ["value", "low", "high"]].to_numpy()
    if len(rows):
        ends = [widened(v, low, high, len(rows)) for v, low, high in rows]
        speeds.loc[have, ["low", "high"]] = ends
    return speeds


def _winner(runs: pd.DataFrame, rates: pd.DataFrame, speeds: pd.DataFrame) -> str:
    """Which run is the fastest, if that is certain. A run without an interval proves nothing."""
    lone = speeds["low"] == speeds["high"]
    table = speeds.assign(low=speeds["low"].mask(lone, -math.inf),
                          high=speeds["high"].mask(lone, math.inf))  # fmt: skip
    best, faster = table["value"].idxmax(), int((table["low"] > 1).sum())
    if table["low"][best] > 1 and best_is_certain(table, "value"):
        return (
            f"Fastest: {runs['drafter'][best]}, {style.times(speeds.loc[best])} at acceptance rate "
            f"{style.share(rates.loc[best])}"
        )
    are, none = "is" if 1 in (faster, len(table)) else "are", ", none is certainly the fastest"
    share = f"{faster} of {counted(len(table), 'run')}"
    return f"{share} {are} certainly faster than plain decoding{none * (faster > 1)}"


def over_batch(curves: pd.DataFrame) -> Figure:
    """Speedup over batch, a line a run, from `compare.curves(runs, "speedup/at_batch")`; hollow
    where timings are not credible."""
    if curves.empty:
        return style.nothing("No run has a batch sweep yet: run 30_throughput_under_batch")
    curves = curves.assign(drafter=_named(curves, "drafter", "target"))
    looks = style.marks(curves["drafter"].unique())
    with style.canvas() as (figure, axes):
        axes.axhline(1, color=style.PLAIN, lw=1.5)
        each = curves.groupby(["drafter", "run_id"], sort=False)
        for line, ((drafter, _), part) in enumerate(each):
            inside = {} if part["credible"].all() else style.HOLLOW
            part = style.shifted(part, "step", line, len(each))
            style.points(axes, part, "step", "value", label=drafter, **looks[drafter] | inside)
        style.batch_axis(axes, sorted(curves["step"].unique()))
        axes.set_ylabel("speedup over plain decoding")
        axes.set_ylim(0, style.top(curves["value"], curves["high"]))
        sound = curves[curves["credible"]].sort_values("value")
        largest = sound[sound["step"] == sound["step"].max()].to_dict("records")
        each = dict.fromkeys(map(style.times, [*largest[:1], *largest[-1:]]))
        claim = "Speedup over batch size"
        if each:
            claim = f"Speedup at batch {largest[0]['step']}: {' to '.join(each)}"
        doubtful = curves.loc[~curves["credible"], "run_id"].nunique()
        style.title(figure, "; ".join(filter(None, [claim, _left_out(doubtful)])))
    return figure


def plans(speedups: pd.DataFrame, about: str | None = None) -> Figure:
    """Speedup of each drafter at each batch size with its best draft, from `Advice.speedups`;
    framed where its plan drafts. Blank: not measured. about: of `style.title`."""
    if speedups.empty:
        return style.nothing(
            "No speedup can be trusted: run 20_latency or 40_drafters, and nothing else meanwhile"
        )
    table = speedups[speedups["best"]]
    names = table["drafter"].unique()
    table = table.assign(drafter=[brief(name, names) for name in table["drafter"]])
    order = list(dict.fromkeys(table["drafter"]))
    cells = table.set_index(["drafter", "batch"])
    shades = cells["speedup"].map(math.log2).unstack("batch").loc[order]  # noqa: PD010
    labels = pd.DataFrame("", shades.index, shades.columns)
    for (drafter, batch), row in cells.iterrows():
        number = style.times(row, "speedup").replace(" [", "\n[")
        labels.loc[drafter, batch] = f"{number}\ndraft {row['draft']}"
    most = max(1.0, shades.abs().max(axis=None))
    with style.canvas(2.5 + 1.3 * shades.shape[1], 1.4 + 0.62 * len(order)) as (figure, axes):
        sns.heatmap(shades, annot=labels, fmt="", vmin=-most, vmax=most, cmap="vlag_r", ax=axes,
                    cbar=False, annot_kws={"fontsize": 9}, linewidths=3)  # fmt: skip
        for text in axes.texts:
            x, y = map(int, text.get_position())
            text.set_color("black" if abs(shades.iloc[y, x]) < 0.75 * most else "white")
        for drafter, batch in cells.index[cells["on"]]:
            corner = shades.columns.get_loc(batch), order.index(drafter)
            axes.add_patch(Rectangle(corner, 1, 1, fill=False, lw=2.5, ec=style.INK, zorder=3))
        axes.set(xlabel="batch size (streams)", ylabel="")
        axes.grid(False)
        axes.tick_params(rotation=0)
        on, least = table[table["on"]], table["batch"].min()
        where = f"in a batch of {least}" if least > 1 else "for one stream"
        claim = f"No drafter is certainly faster than plain decoding {where}"
        if len(on):
            first = on[on["drafter"] == on["drafter"].iloc[0]]
            claim = f"{first['drafter'].iloc[0]} pays up to batch {first['batch'].max()}"
            claim += "; framed: where to draft"
        style.title(figure, claim, about)
    return figure
