"""Figures of simulated fleets; every title says SIMULATED."""

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from specexp.errors import counted
from specexp.figures import style
from specexp.figures.break_even import doubt
from specexp.figures.under_load import lines
from specexp.measure.under_load.fleet import HOURS, Setting, saved


def paces(setting: Setting, table: pd.DataFrame, policy: str) -> Figure:
    """Left: tokens/s of one replica over its number of streams. Right: time per token of a stream,
    with the limit. From `fleet.pace_table`; the title is about `policy`."""
    names = list(setting.paces)
    looks, most = lines(names), int(table["streams"].max())
    with style.panels(2, 5.25, 4.6) as (figure, (left, right)):
        for name in names:
            part, look = table[table["policy"] == name], looks[name] | {"markevery": 0.2}
            left.plot(part["streams"], part["tok_s"], **look)
            right.plot(part["streams"], part["token_ms"], label=name, **look)
        limit = 1e3 * setting.tpot_s
        right.axhline(limit, color="k", lw=1, ls=":", label=f"limit {limit:.3g} ms")
        for axes in (left, right):
            style.batch_axis(axes, [2**i for i in range(most.bit_length())])
            axes.set_xlabel("streams per replica")
        left.set(ylabel="tokens/s, all streams", ylim=(0, None))
        right.set(ylabel="ms per token of a stream",
                  ylim=(0, min(table["token_ms"].max() * 1.05, 4 * limit)))  # fmt: skip
        finding = f"SIMULATED replica{doubt(setting.costs)}: {_paying(table, policy)}"
        style.title(figure, finding, no_intervals="computed")
    return figure


def _paying(table: pd.DataFrame, name: str) -> str:
    mine, plain = (table[table["policy"] == n].set_index("streams") for n in (name, "plain"))
    gain = mine["tok_s"] / plain["tok_s"]
    pays = gain.index[gain > 1 + 1e-9]
    if not len(pays):
        return f"{name} is never faster than plain decoding"
    alone, most = (f"{value:.2f}x" for value in (gain.iloc[0], gain.max()))
    best = f", {most} at best" * (most != alone)
    faster = f"faster up to {counted(pays.max(), 'stream')}"
    return f"{name} over plain decoding: {alone} at one stream{best}, {faster}"


def over_the_day(hours: pd.DataFrame, policy: str) -> Figure:
    """Replicas needed in each hour, one line per policy; from `fleet.hourly`. The title is about
    `policy`."""
    names = list(dict.fromkeys(hours["policy"]))
    looks = lines(names)
    with style.canvas(10, 4.8) as (figure, axes):
        for name in names:
            part = hours[hours["policy"] == name]
            if part["replicas"].isna().any():
                axes.plot([], [], **looks[name], label=f"{name}: misses the limits")
                continue
            total = part["replicas"].sum()
            change = f" ({round(-saved(hours, name), 2) + 0:+.0%})" if name != "plain" else ""
            axes.stairs(
                part["replicas"], range(HOURS + 1), baseline=None,
                lw=5 if name == "plain" else 2,
                **{name: value for name, value in looks[name].items() if name != "marker"},
                label=f"{name}: {total:.0f} replica-hours{change}",
            )  # fmt: skip
        axes.set(xlabel="hour of the day", ylabel="replicas that keep the limits",
                 xlim=(0, HOURS), ylim=(0, None))  # fmt: skip
        axes.set_xticks(range(0, HOURS + 1, 3))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        rate = axes.twinx()
        first = hours[hours["policy"] == names[0]]
        rate.plot(first["hour"] + 0.5, first["rate"], color=style.INK, lw=1, ls=":")
        rate.set(ylabel="requests/s (dotted)", ylim=(0, None))
        rate.grid(False)
        style.title(figure, f"SIMULATED day: {_saving(hours, policy)}")
    return figure


def _saving(hours: pd.DataFrame, name: str) -> str:
    share = saved(hours, name)
    if share != share:
        return f"{name} misses the limits with any number of replicas"
    if share < 0:
        return f"{name} needs {-share:.0%} more replica-hours than plain decoding"
    return f"{name} saves {share:.0%} of plain decoding's replica-hours"


def peak_title(at_peak: pd.DataFrame, replicas: int) -> str:
    """The title of `under_load.latencies` for `fleet.busiest`."""
    good = at_peak.set_index("policy")["goodput/share"]
    shares = ", ".join(f"{name} {share:.1%}" for name, share in good.items())
    fleet = counted(replicas, "replica")
    return f"SIMULATED busiest hour on {fleet}; requests within the limits: {shares}"
