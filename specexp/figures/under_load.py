"""Figures of serving under load: policies compared over load and over time."""

import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from specexp.figures import style
from specexp.figures.pairings import crossing, speedup_panel
from specexp.measure.summaries import doubt_of_speedups
from specexp.measure.under_load.served import worst
from specexp.serving.policies import is_fixed

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


def closed_loops(rates: pd.DataFrame, regrets: pd.DataFrame) -> Figure:
    """Tokens/s, speedup over plain decoding, and regret of the load-aware policies, by the number
    of streams. From `under_load.rates` and `under_load.regrets`."""
    looks = lines(rates["policy"])
    with style.panels(3, 5.25, 4) as (figure, (left, middle, right)):
        for line, (name, look) in enumerate(looks.items()):
            part, lost = (
                style.shifted(table[table["policy"] == name], "load", line, len(looks))
                for table in (rates, regrets)
            )
            scale = part["tok_s"] / part["speedup"]
            own = part.assign(low=part["low"] * scale, high=part["high"] * scale)
            style.points(left, own, "load", "tok_s", label=name, **look)
            if name != "plain":
                speedup_panel(middle, part, "load", **look)
            if not is_fixed(name):
                style.points(right, lost, "load", "regret", **look)
        right.axhline(0, color=style.PLAIN, lw=1.5)
        for axes in (left, middle, right):
            style.batch_axis(axes, sorted(set(rates["load"])))
            axes.set_xlabel("concurrent streams")
        left.set(ylabel="tokens/s, all streams", ylim=(0, None))
        middle.set_ylabel("tokens/s, plain decoding = 1")
        right.set(ylabel="regret: share of tokens/s\nlost (below 0: gained)",
                  ylim=(None, min(right.get_ylim()[1], 0.5)))  # fmt: skip
        style.per_cent(right)
        style.title(figure, _verdict(rates, regrets) + doubt_of_speedups(rates))
    return figure


def servers(rates: pd.DataFrame) -> Figure:
    """A server that drafts and the same without drafting, by load; from `servers.rates`."""
    plain, drafting = {"color": style.PLAIN, "marker": "x"}, {"color": style.SPECULATIVE}
    with style.panels(4, 5.25, 3.6) as (figure, every):
        left, right, *times = every
        style.points(left, rates.assign(low=rates["low"] * rates["plain_tok_s"],
                                        high=rates["high"] * rates["plain_tok_s"]),
                     "load", "tok_s", **drafting, marker="o", label="drafting")  # fmt: skip
        left.plot(rates["load"], rates["plain_tok_s"], **plain, label="plain")
        speedup_panel(right, rates, "load")
        for axes, kind in zip(times, ("ttft", "tpot"), strict=True):
            axes.plot(rates["load"], rates[f"{kind}_ms"], **drafting, marker="o")
            axes.plot(rates["load"], rates[f"plain_{kind}_ms"], **plain)
        for axes in every:
            style.batch_axis(axes, rates["load"])
            axes.set_xlabel("load: requests at once")
        left.set(ylabel="tokens/s, all streams", ylim=(0, None))
        times[0].set(ylabel="median TTFT, ms", ylim=(0, None))
        times[1].set(ylabel="TPOT, ms", ylim=(0, None))
        finding = crossing(rates, "load") + doubt_of_speedups(rates)
        style.title(figure, finding, no_intervals="plain decoding, TTFT and TPOT")
    return figure


def _verdict(rates: pd.DataFrame, regrets: pd.DataFrame) -> str:
    """The title of `closed_loops`."""
    aware = regrets[[not is_fixed(name) for name in regrets["policy"]]]
    always = [n for n in dict.fromkeys(rates["policy"]) if n.startswith("always")]
    parts = []
    if always:
        fixed = rates[rates["policy"] == always[-1]]
        outer = fixed.iloc[sorted({0, len(fixed) - 1})].to_dict("records")
        each = [f"{style.times(row, 'speedup')} with {row['load']}" for row in outer]
        parts.append(f"{always[-1]}: {' and '.join(each)} streams")
    if len(aware):
        each = [
            f"{name} {style.share({'value': value, 'low': low, 'high': high})} lost" if value >= 0
            else f"{name} {style.share({'value': -value, 'low': -high, 'high': -low})} gained"
            for name, value, low, high in worst(aware).itertuples()
        ]  # fmt: skip
        parts.append(f"at worst, against the best fixed policy: {', '.join(each)}")
    return "; ".join(parts)


def timelines(tables: dict[str, pd.DataFrame], about: str | None = None) -> Figure:
    """The load and the drafts over time, a line a policy; tables from `under_load.timeline`; about:
    of `style.title`."""
    rows = {"live": "streams being decoded", "waiting": "requests waiting",
            "speculated": "rows speculated", "kept": "draft tokens accepted"}  # fmt: skip
    looks = lines(tables)
    with style.panels(len(rows), 5.25, 3.6) as (figure, every):
        lasts = {name: table["end_s"].max() for name, table in tables.items()}
        for axes, (column, label) in zip(every, rows.items(), strict=True):
            for name, table in tables.items():
                wide = {"lw": 4, "alpha": 0.6} if name == "plain" else {"lw": 1.5}
                axes.plot(table["end_s"], table[column], label=name,
                          **looks[name] | wide | {"marker": "None"})  # fmt: skip
            axes.set(xlabel="seconds", ylabel=label, xlim=(0, max(lasts.values())), ylim=(0, None))
            axes.xaxis.set_major_locator(MaxNLocator(5))
            share = column in ("speculated", "kept")
            axes.yaxis.set_major_locator(MaxNLocator(5, integer=not share))
            axes.set_ylim(top=1.02 if share else max(1, axes.get_ylim()[1]))
            if share:
                style.per_cent(axes)
        names = sorted(lasts, key=lasts.__getitem__)
        done = dict.fromkeys([names[0], names[-1]])
        each = [f"{lasts[name]:.3g} s under {name}" for name in done]
        style.title(figure, f"The same arrivals: all answered after {', '.join(each)}",
                    about, no_intervals="each policy served them once")  # fmt: skip
    return figure


def latencies(answers: pd.DataFrame, finding: str, **limits_ms: float) -> Figure:
    """The share of requests that took at most so long, for TTFT, TPOT and E2E, a line a policy;
    answers: columns policy, ttft_s, tpot_s and e2e_s, a row a request. limits_ms: by `ttft`, `tpot`
    or `e2e`, drawn as lines."""
    looks = lines(answers["policy"])
    with style.panels(3, 3.5, 4.2, sharey=True) as (figure, every):
        for axes, kind in zip(every, ("ttft", "tpot", "e2e"), strict=True):
            for name, look in looks.items():
                times = answers.loc[answers["policy"] == name, f"{kind}_s"].dropna().sort_values()
                share = np.arange(1, len(times) + 1) / max(1, len(times))
                label = f"{name}, n = {len(times)}" if axes is every[0] else None
                axes.step(1e3 * times, share, where="post", label=label,
                          **look | {"markevery": 0.2, "markersize": 5})  # fmt: skip
            axes.axhline(0.95, color=style.INK, lw=0.8, ls=":")
            if kind in limits_ms:
                axes.axvline(limits_ms[kind], color=style.INK, lw=1.2)
                axes.set_title(f"limit {float(f'{limits_ms[kind]:.3g}'):g} ms")
            axes.set(xlabel=f"{kind.upper()} (ms)", ylim=(0, 1.02))
            style.log_axis(axes, "x")
        every[0].set_ylabel("share of requests")
        style.per_cent(every[0])
        style.title(figure, finding)
    return figure


def within_limits(served: pd.DataFrame) -> str:
    """The title of `latencies`; from `under_load.by_policy`."""
    shares = served.set_index("policy")["goodput/share"].sort_values(ascending=False)
    each = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    return f"Requests within the limits: {each}"


def simulated(compared: pd.DataFrame) -> Figure:
    """Simulated against real, one point a policy and figure; from `under_load.compare_runs`."""
    kinds = list(dict.fromkeys(compared["figure"]))
    looks = style.marks(compared["policy"])
    with style.panels(len(kinds), 5.25, 4.2) as (figure, every):
        for axes, kind in zip(every, kinds, strict=True):
            part = compared[compared["figure"] == kind]
            for _, row in part.iterrows():
                axes.scatter(row["real"], row["simulated"], s=90, label=row["policy"], zorder=3,
                             **looks[row["policy"]])  # fmt: skip
            low = 0.8 * part[["real", "simulated"]].min().min()
            high = 1.2 * part[["real", "simulated"]].max().max()
            axes.plot([low, high], [low, high], color=style.PLAIN, lw=1)
            axes.fill_between([low, high], [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high],
                              color=style.PLAIN, alpha=0.2, label="within 10%")  # fmt: skip
            axes.set(xlabel=f"real {kind}", ylabel=f"SIMULATED {kind}")
        off = (compared["simulated"] / compared["real"] - 1).abs()
        worst = compared.loc[off.idxmax()]
        style.title(figure,
              f"SIMULATED against real: {off.median():.0%} off in the median, at worst "
              f"{off.max():.0%} ({worst['figure']}, {worst['policy']})",
              no_intervals="each point is one run of all requests"
        )  # fmt: skip
    return figure


def lines(names: Any) -> dict[str, dict[str, Any]]:
    """`style.marks` of policies as lines: dashed unless load-aware, and above the solid ones, so
    that lines that coincide are both visible."""
    return {
        name: look | {"ls": "-", "zorder": 2}
        if name == "plain" or not is_fixed(name)
        else look | {"ls": (0, (3, 2)), "zorder": 3}
        for name, look in style.marks(names).items()
    }
