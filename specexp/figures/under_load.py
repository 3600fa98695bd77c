"""Figures of serving under load: policies compared over load and over time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from specexp.figures.style import PLAIN, batch_axis, panels
from specexp.measure.under_load import QUANTILES

LOAD_AWARE = ("goodput", "greedy", "bandit", "threshold", "table")
SHOWN = {
    "throughput/tok_s": "tokens/s", "throughput/req_s": "requests/s",
    "goodput/share": "within the limits", "goodput/req_s": "goodput, requests/s",
    **{f"latency/{kind}_p{q}_ms": f"{kind.upper()} p{q}, ms"
       for kind in ("ttft", "tpot", "itl", "e2e") for q in (50, 95)},
    "load/occupancy": "streams decoded at once", "load/speculated": "rows speculated",
    "served/rate": "draft tokens accepted", "load/overhead": "scheduler's share of the time",
    "load/refused": "refused", "load/failed": "failed",
}  # fmt: skip
SHARES = ("goodput/share", "load/speculated", "served/rate", "load/overhead")


def as_text(key: str, value: float) -> str:
    """A value of `under_load.served_metrics` as text; - where there is none."""
    if math.isnan(value):
        return "-"
    return f"{value:.1%}" if key in SHARES else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def bake_off(rates: pd.DataFrame, regrets: pd.DataFrame) -> Figure:
    """Left: speedup over plain decoding, by the number of streams. Right: the regret of the
    load-aware policies. From `under_load.rates` and `under_load.regrets`."""
    names = list(dict.fromkeys(rates["policy"]))
    colours = palette(names)
    with panels(2, 14, 4.8) as (figure, (left, right)):
        left.axhline(1, color=PLAIN, lw=1)
        right.axhline(0, color=PLAIN, lw=1)
        for name in names:
            if name == "plain":
                continue
            part, style = rates[rates["policy"] == name], _style(name)
            left.plot(part["load"], part["speedup"], style, color=colours[name], label=name)
            left.fill_between(part["load"], part["low"], part["high"], color=colours[name],
                              alpha=0.12)  # fmt: skip
        for name in [n for n in names if n.startswith(LOAD_AWARE)]:
            part = regrets[regrets["policy"] == name]
            right.plot(part["load"], part["regret"], _style(name), color=colours[name], label=name)
            right.fill_between(part["load"], part["low"], part["high"], color=colours[name],
                               alpha=0.12)  # fmt: skip
        for axes in (left, right):
            batch_axis(axes, sorted(set(rates["load"])))
            axes.set_xlabel("streams served together")
        left.set_ylabel("tokens a second, plain decoding = 1")
        left.legend(ncols=2, fontsize=9)
        right.set_ylabel("regret: share lost to the best fixed choice")
        right.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
        right.set_ylim(top=min(right.get_ylim()[1], 0.5))
        if right.get_legend_handles_labels()[0]:
            right.legend(fontsize=9)
        figure.suptitle(_verdict(rates, regrets), x=0.01, ha="left")
    return figure


def _verdict(rates: pd.DataFrame, regrets: pd.DataFrame) -> str:
    """The title of `bake_off`."""
    aware = regrets[regrets["policy"].str.startswith(LOAD_AWARE)]
    always = [n for n in dict.fromkeys(rates["policy"]) if n.startswith("always")]
    parts = []
    if always:
        fixed = rates[rates["policy"] == always[-1]]
        ends = fixed.iloc[sorted({0, len(fixed) - 1})]
        each = [f"{s:.2f}x with {n}" for s, n in zip(ends["speedup"], ends["load"], strict=True)]
        parts.append(f"{always[-1]}: {' and '.join(each)} streams")
    if len(aware):
        worst = aware.groupby("policy")["regret"].max()
        parts.append(
            f"{worst.idxmin()} loses {max(0, worst.min()):.1%} at worst to the best fixed choice"
        )
    return "; ".join(parts)


def timelines(tables: dict[str, pd.DataFrame]) -> Figure:
    """The load and the drafts over time, a line a policy; tables from `under_load.timeline`."""
    rows = {"live": "streams being decoded", "waiting": "requests waiting",
            "speculated": "rows speculated", "kept": "draft tokens accepted"}  # fmt: skip
    colours = palette(list(tables))
    with panels(len(rows), 4.2 * len(rows), 3.8) as (figure, every):
        for axes, (column, label) in zip(every, rows.items(), strict=True):
            for name, table in tables.items():
                axes.plot(table["end_s"], table[column], color=colours[name], label=name, lw=1.3)
            axes.set(xlabel="seconds", ylabel=label, ylim=(0, None))
            if column in ("speculated", "kept"):
                axes.set_ylim(0, 1.02)
                axes.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
        handles, labels = every[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
        lasts = {name: table["end_s"].max() for name, table in tables.items()}
        names = sorted(lasts, key=lasts.__getitem__)
        ends = dict.fromkeys([names[0], names[-1]])
        each = [f"{lasts[name]:.0f} s under {name}" for name in ends]
        figure.suptitle(
            f"The same arrivals: all answered after {', '.join(each)}", x=0.01, ha="left"
        )
    return figure


def latencies(served: pd.DataFrame, title: str = "") -> Figure:
    """Quantiles of TTFT, TPOT and E2E under every policy; from `under_load.by_policy`."""
    names = list(served["policy"])
    colours = palette(names)
    with panels(3, 13, 4) as (figure, every):
        for axes, kind in zip(every, ("ttft", "tpot", "e2e"), strict=True):
            width = 0.8 / len(names)
            columns = {f"latency/{kind}_p{q}_ms": f"p{q}" for q in QUANTILES}
            table = served[list(columns)].dropna(axis=1, how="all")
            for i, (_, row) in enumerate(served.iterrows()):
                at = [x - 0.4 + width * (i + 0.5) for x in range(len(table.columns))]
                values = row[list(table)].astype(float)
                axes.bar(at, values, width * 0.92, color=colours[row["policy"]],
                         label=row["policy"])  # fmt: skip
            axes.set_xticks(range(len(table.columns)), [columns[c] for c in table])
            axes.set(ylabel=f"{kind.upper()} (ms)", yscale="log")
            for ticks in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
                ticks(LogFormatter(minor_thresholds=(2, 0.5)))
            axes.grid(visible=False, axis="x")
        handles, labels = every[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
        within = served.sort_values("goodput/share", ascending=False)
        each = [
            f"{p} {x:.0%}" for p, x in zip(within["policy"], within["goodput/share"], strict=True)
        ]
        figure.suptitle(title or f"Within the limits: {', '.join(each)}", x=0.01, ha="left")
    return figure


def simulated(compared: pd.DataFrame) -> Figure:
    """Simulated against real, one point a policy and figure; from `under_load.compare_runs`."""
    kinds = list(dict.fromkeys(compared["figure"]))
    colours = palette(list(dict.fromkeys(compared["policy"])))
    with panels(len(kinds), 4.6 * len(kinds), 4.2) as (figure, every):
        for axes, kind in zip(every, kinds, strict=True):
            part = compared[compared["figure"] == kind]
            for _, row in part.iterrows():
                axes.scatter(row["real"], row["simulated"], s=90, color=colours[row["policy"]],
                             label=row["policy"], zorder=3)  # fmt: skip
            low = 0.8 * part[["real", "simulated"]].min().min()
            high = 1.2 * part[["real", "simulated"]].max().max()
            axes.plot([low, high], [low, high], color=PLAIN, lw=1)
            axes.fill_between([low, high], [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high],
                              color=PLAIN, alpha=0.2, label="within 10 %")  # fmt: skip
            axes.set(xlabel=f"real {kind}", ylabel=f"SIMULATED {kind}")
        handles, labels = every[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
        off = (compared["simulated"] / compared["real"] - 1).abs()
        worst = compared.loc[off.idxmax()]
        figure.suptitle(
            f"SIMULATED against real: {off.median():.0%} off in the median, at worst "
            f"{off.max():.0%} ({worst['figure']}, {worst['policy']})", x=0.01, ha="left",
        )  # fmt: skip
    return figure


def _style(name: str) -> str:
    return "o-" if name.startswith(LOAD_AWARE) else "o--"


def palette(names: Sequence[str]) -> dict[str, tuple[float, ...] | str]:
    """A colour for every policy; plain decoding is grey."""
    others = [n for n in names if n not in ("plain", "never")]
    colours = dict(zip(others, sns.color_palette("colorblind", len(others)), strict=True))
    return {"plain": PLAIN, "never": "#555555"} | colours
