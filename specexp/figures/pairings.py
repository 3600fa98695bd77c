"""Figures of one pairing's measurements. Each takes tables and measures nothing.

Titles state the result and are computed from the data; they say faster or slower only if the
interval excludes 1, and name the best of several only if its interval lies above all others.
Measured points carry their 95 % intervals.
"""

from __future__ import annotations

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from specexp.figures.style import PLAIN, PREDICTED, SPECULATIVE, batch_axis, canvas, ends
from specexp.measure import statistics
from specexp.measure.prompts import NAMES
from specexp.measure.summaries import fastest, leads, length, pooled, step_s, units, verdict
from specexp.trace import Acceptance

PHASES = {"draft_s": "draft", "verify_s": "verify", "rest_s": "accept, commit"}


def by_category(samples: pd.DataFrame) -> Figure:
    """Acceptance rate by pairing and category; samples from `one_pairing.acceptance`."""
    rows = []
    for (pairing, category), part in samples.groupby(["pairing", "category"], sort=False):
        rate = statistics.share(*units(part, "accepted", "drafted"))
        rows.append({"pairing": pairing, "category": category, **rate._asdict()})
    rates = pd.DataFrame(rows)
    pairings = list(dict.fromkeys(samples["pairing"]))
    shipped = [c for c in NAMES if c in set(rates["category"])]
    order = shipped + [c for c in dict.fromkeys(rates["category"]) if c not in shipped]
    main = rates[rates["pairing"] == pairings[0]].set_index("category")["value"]
    with canvas(9, 4.2) as (figure, axes):
        width = 0.8 / len(pairings)
        for i, (pairing, colour) in enumerate(
            zip(pairings, sns.color_palette("colorblind", len(pairings)), strict=True)
        ):
            part = rates[rates["pairing"] == pairing].set_index("category").reindex(order)
            at = [x - 0.4 + width * (i + 0.5) for x in range(len(order))]
            error = [part["value"] - part["low"], part["high"] - part["value"]]
            axes.bar(at, part["value"], width * 0.92, yerr=error, color=colour, label=pairing,
                     error_kw={"elinewidth": 1, "ecolor": "#333333"})  # fmt: skip
        axes.set_xticks(range(len(order)), order)
        axes.set(ylabel="acceptance rate", ylim=(0, 1.02))
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.legend(title=None, ncols=len(pairings), loc="upper right", bbox_to_anchor=(1, 1.12))
        best, worst = main.idxmax(), main.idxmin()
        figure.suptitle(
            f"{pairings[0]}: acceptance rate {main[best]:.0%} on {best}, "
            f"{main[worst]:.0%} on {worst}", x=0.01, ha="left",
        )  # fmt: skip
    return figure


def by_position(samples: pd.DataFrame) -> Figure:
    """Acceptance by position in the draft, one colour per pairing: P(at least i tokens
    accepted), and P(token i accepted | token i - 1 was)."""
    pairings = list(dict.fromkeys(samples["pairing"]))
    with canvas() as (figure, axes):
        palette = sns.color_palette("colorblind", len(pairings))
        for pairing, colour in zip(pairings, palette, strict=True):
            record = pooled(samples[samples["pairing"] == pairing])
            steps = range(1, len(record.marginal) + 1)
            axes.plot(steps, record.marginal, "o-", color=colour, label=pairing)
            axes.plot(steps, record.conditional, "o:", color=colour, alpha=0.6, markersize=4)
        axes.plot([], [], "k-", label="this token and all before it")
        axes.plot([], [], "k:", label="this token, given the one before")
        gamma = int(samples["gamma"].max())
        axes.set(xlabel="position in the draft", ylabel="probability of acceptance",
                 ylim=(0, 1.02))  # fmt: skip
        axes.set_xticks(range(1, gamma + 1))
        axes.legend()
        record = pooled(samples[samples["pairing"] == pairings[0]])
        axes.set_title(
            f"{pairings[0]}: acceptance length {record.length:.2f}; the first draft token is "
            f"accepted in {_marginal(record, 1):.0%} of rounds, the last in "
            f"{_marginal(record, gamma):.0%}"
        )
    return figure


def by_temperature(samples: pd.DataFrame) -> Figure:
    """Acceptance rate over temperature, one line per pairing; samples from
    `one_pairing.acceptance`."""
    rows = []
    for (pairing, temperature), part in samples.groupby(["pairing", "temperature"], sort=False):
        rate = statistics.share(*units(part, "accepted", "drafted"))
        rows.append({"pairing": pairing, "temperature": temperature, **rate._asdict()})
    rates = pd.DataFrame(rows).sort_values("temperature")
    pairings = list(dict.fromkeys(samples["pairing"]))
    with canvas() as (figure, axes):
        palette = sns.color_palette("colorblind", len(pairings))
        for pairing, colour in zip(pairings, palette, strict=True):
            part = rates[rates["pairing"] == pairing]
            axes.plot(part["temperature"], part["value"], "o-", color=colour, label=pairing)
            axes.fill_between(
                part["temperature"], part["low"], part["high"], color=colour, alpha=0.15
            )
        axes.set(xlabel="temperature", ylabel="acceptance rate", ylim=(0, 1.02))
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.legend()
        main = rates[rates["pairing"] == pairings[0]]
        cold, hot = main.iloc[0], main.iloc[-1]
        axes.set_title(
            f"{pairings[0]}: acceptance rate {cold['value']:.0%} at temperature "
            f"{cold['temperature']:g}, {hot['value']:.0%} at {hot['temperature']:g}"
        )
    return figure


def over_temperature(samples: pd.DataFrame) -> Figure:
    """Acceptance length over temperature, one line per rule; samples from
    `one_pairing.acceptance`."""
    rows = []
    for (rule, temperature), part in samples.groupby(["rule", "temperature"], sort=False):
        rows.append({"rule": rule, "temperature": temperature, **length(part)._asdict()})
    lengths = pd.DataFrame(rows).sort_values("temperature")
    with canvas(8.5, 4.4) as (figure, axes):
        names = list(dict.fromkeys(samples["rule"]))
        palette = sns.color_palette("colorblind", len(names))
        for rule, colour in zip(names, palette, strict=True):
            part = lengths[lengths["rule"] == rule]
            style = "o--" if "lossy" in rule else "o-"
            axes.plot(part["temperature"], part["value"], style, color=colour, label=rule)
            axes.fill_between(
                part["temperature"], part["low"], part["high"], color=colour, alpha=0.12
            )
        axes.set(xlabel="temperature", ylabel="acceptance length (tokens a target pass)")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        hot = lengths[lengths["temperature"] == lengths["temperature"].max()]
        exact = hot[~hot["rule"].str.contains("lossy")]
        best = exact.loc[exact["value"].idxmax()]
        warm = f"At temperature {best['temperature']:g}"
        axes.set_title(
            f"{warm} the exact rule with the longest acceptance length is {best['rule']}: "
            f"{best['value']:.2f}" if leads(exact, "value") else
            f"{warm} no exact rule certainly accepts most: acceptance length "
            f"{exact['value'].min():.2f} to {exact['value'].max():.2f}"
        )  # fmt: skip
    return figure


def bias_and_length(table: pd.DataFrame) -> Figure:
    """Acceptance length over bias, one point per rule; table: columns rule, length, bias (total
    variation)."""
    with canvas(8, 4.2) as (figure, axes):
        palette = sns.color_palette("colorblind", len(table))
        for (_, row), colour in zip(table.iterrows(), palette, strict=True):
            axes.scatter(row["bias"], row["length"], s=90, color=colour, label=row["rule"],
                         marker="D" if row["bias"] > 0 else "o")  # fmt: skip
        axes.set(xlabel="bias: total variation of a round's first token to the target's p",
                 ylabel="acceptance length (tokens a target pass)",
                 xlim=(-0.02, max(0.1, table["bias"].max() * 1.15)))  # fmt: skip
        axes.xaxis.set_major_formatter(PercentFormatter(1))
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        worst = table.loc[table["bias"].idxmax()]
        axes.set_title(
            f"Largest bias: {worst['rule']}, total variation {worst['bias']:.1%}"
            if worst["bias"] > 0 else "Every rule here keeps the target's distribution"
        )  # fmt: skip
    return figure


def methods(measured: pd.DataFrame, costs: pd.DataFrame) -> Figure:
    """Speedup over acceptance length, one point per arm, sized by the cost of its draft; from
    `summaries.speedups(by="arm")` and `one_pairing.costs`."""
    table = measured.merge(costs, on="arm")
    table["draft_steps"] = table["draft_s"] / table["step_s"]
    with canvas(8.5, 4.8) as (figure, axes):
        axes.axhline(1, color=PLAIN, lw=1)
        palette = sns.color_palette("colorblind", len(table))
        for (_, row), colour in zip(table.iterrows(), palette, strict=True):
            error = [[row["speedup"] - row["low"]], [row["high"] - row["speedup"]]]
            axes.errorbar(row["length"], row["speedup"], yerr=error, fmt="o", color=colour,
                          markersize=6 + 9 * row["draft_steps"], capsize=3, alpha=0.85,
                          label=f"{row['arm']} ({row['draft_steps']:.2f})")  # fmt: skip
        axes.set(xlabel="acceptance length (tokens a target pass)",
                 ylabel="speedup over plain decoding",
                 xlim=(0.9, table["length"].max() + 0.25))  # fmt: skip
        axes.legend(title="drafter (cost of a draft in plain steps)", fontsize=9,
                    loc="center left", bbox_to_anchor=(1.0, 0.5))  # fmt: skip
        figure.suptitle(_first(table), x=0.01, ha="left")
    return figure


def _first(measured: pd.DataFrame) -> str:
    """Which arm of `summaries.speedups` is the fastest, if that is certain."""
    best = fastest(measured)
    if leads(measured, "speedup"):
        return f"{best['arm']}: {verdict(best)}"
    faster = int((measured["low"] > 1).sum())
    if faster:
        return (
            f"{faster} of {len(measured)} are certainly faster than plain decoding, none is "
            "certainly the fastest"
        )
    if (measured["high"] < 1).all():
        return "All are slower than plain decoding"
    return "None is certainly faster than plain decoding" + f"; {best['doubt']}" * bool(
        best["doubt"]
    )


def arm_costs(costs: pd.DataFrame) -> Figure:
    """Where a round's time goes for each arm, in plain steps; costs from `one_pairing.costs`."""
    with canvas(8, 1.4 + 0.42 * len(costs)) as (figure, axes):
        left = pd.Series(0.0, index=costs.index)
        palette = sns.color_palette("colorblind", 3)
        for (column, label), colour in zip(PHASES.items(), palette, strict=True):
            share = costs[column] / costs["step_s"]
            axes.barh(costs["arm"], share, left=left, label=label, color=colour)
            left = left + share
        axes.axvline(1, color=PLAIN, lw=1)
        axes.invert_yaxis()
        axes.set(xlabel=f"plain steps (of {costs['step_s'].iloc[0] * 1e3:.1f} ms)")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        draft = costs.loc[costs["draft_s"].idxmax()]
        check = costs.loc[costs["verify_s"].idxmax()]
        figure.suptitle(
            f"Most expensive draft: {draft['arm']}, {draft['draft_s'] / draft['step_s']:.2f} plain "
            f"steps; verification: {check['arm']}, {check['verify_s'] / check['step_s']:.2f}",
            x=0.01, ha="left",
        )  # fmt: skip
    return figure


def over_gamma(measured: pd.DataFrame, predicted: pd.DataFrame) -> Figure:
    """Speedup over draft length: `summaries.speedups(by="gamma")` against `summaries.predicted`."""
    best = fastest(measured)
    by_gamma = predicted.set_index("gamma")["speedup"]
    with canvas() as (figure, axes):
        axes.axhline(1, color=PLAIN, lw=1)
        axes.fill_between(measured["gamma"], measured["low"], measured["high"],
                          color=SPECULATIVE, alpha=0.2, label="95 % interval")  # fmt: skip
        axes.plot(measured["gamma"], measured["speedup"], "o-", color=SPECULATIVE, label="measured")
        axes.plot(predicted["gamma"], predicted["speedup"], "s--", color=PREDICTED,
                  label="predicted from acceptance and pass costs")  # fmt: skip
        axes.set(xlabel="draft length γ", ylabel="speedup over plain decoding")
        axes.set_xticks(sorted({*measured["gamma"], *predicted["gamma"]}))
        axes.set_ylim(0, max(measured["high"].max(), predicted["speedup"].max()) * 1.1)
        axes.legend(loc="best")
        gamma = int(best["gamma"])
        axes.set_title(f"At γ = {gamma} {verdict(best)}; predicted {by_gamma[gamma]:.2f}x")
    return figure


def round_costs(costs: pd.DataFrame) -> Figure:
    """Where a round's time goes, in plain steps; costs from `one_pairing.pass_costs`."""
    step = step_s(costs)
    with canvas() as (figure, axes):
        bottom = pd.Series(0.0, index=costs.index)
        palette = sns.color_palette("colorblind", 3)
        for (column, label), colour in zip(PHASES.items(), palette, strict=True):
            axes.bar(costs["gamma"].astype(str), costs[column] / step, 0.7, bottom=bottom,
                     label=label, color=colour)  # fmt: skip
            bottom = bottom + costs[column] / step
        axes.axhline(1, color=PLAIN, lw=1)
        axes.set(xlabel="draft length γ", ylabel=f"plain steps (of {step * 1e3:.1f} ms)")
        axes.legend()
        last = costs.iloc[-1]
        gamma = int(last["gamma"])
        verify = last["verify_s"] / costs["verify_s"].iloc[0]
        axes.set_title(
            f"Verifying {gamma + 1} tokens takes {verify:.2f}x as long as one; "
            f"drafting {gamma} takes {last['draft_s'] / step:.2f} plain steps"
        )
    return figure


def throughput(by_batch: pd.DataFrame) -> Figure:
    """Tokens/s over batch for plain and speculative decoding; `summaries.speedups(by="batch")`."""
    first, last = by_batch.iloc[0], by_batch.iloc[-1]
    with canvas() as (figure, axes):
        axes.plot(by_batch["batch"], by_batch["plain_tok_s"], "o-", color=PLAIN, label="plain")
        axes.plot(
            by_batch["batch"], by_batch["tok_s"], "o-", color=SPECULATIVE, label="speculative"
        )
        batch_axis(axes, by_batch["batch"])
        axes.set(ylabel="tokens/s, all streams", ylim=(0, None))
        axes.legend()
        axes.set_title(
            f"Batch {last['batch']:.0f} over batch {first['batch']:.0f}: plain decoding gains "
            f"{last['plain_tok_s'] / first['plain_tok_s']:.1f}x, speculation "
            f"{last['tok_s'] / first['tok_s']:.1f}x"
        )
    return figure


def over_batch(by_batch: pd.DataFrame, served: pd.DataFrame | None = None) -> Figure:
    """Speedup over batch size with the break-even line; from `summaries.speedups(by="batch")`.
    served: the same under continuous batching, from `under_load.rates` for one policy."""
    with canvas() as (figure, axes):
        axes.axhline(1, color=PLAIN, lw=1.5)
        axes.text(by_batch["batch"].iloc[0], 0.97, "break-even", color=PLAIN, va="top")
        lines = [(by_batch, "batch", "o-", SPECULATIVE, "static batch")]
        if served is not None:
            lines.append((served, "load", "s--", PREDICTED, "continuous batching"))
        for table, at, style, colour, label in lines:
            axes.errorbar(
                table[at], table["speedup"], color=colour, fmt=style, capsize=3, label=label,
                yerr=ends(table),
            )  # fmt: skip
        batch_axis(axes, by_batch["batch"])
        axes.set(ylabel="speedup over plain decoding")
        axes.set_ylim(0, max(1.2, *(table["high"].max() * 1.1 for table, *_ in lines)))
        if served is not None:
            axes.legend(loc="lower left")
        axes.set_title(crossing(by_batch))
    return figure


def crossing(by_batch: pd.DataFrame) -> str:
    """The batch size at which speculation stops paying, in words; only intervals that exclude 1
    count."""
    first = by_batch.iloc[0]
    with_interval = by_batch[by_batch["low"] < by_batch["high"]]  # more than one sample
    pays = with_interval[with_interval["low"] > 1]["batch"]
    costs = with_interval[with_interval["high"] < 1]["batch"]
    start = f"{first['speedup']:.2f}x at batch {first['batch']:.0f}"
    last = by_batch.iloc[-1]
    end = f"{last['speedup']:.2f}x at batch {last['batch']:.0f}"
    if len(pays) and len(costs) and costs.min() > pays.max():
        return f"{start}; stops paying between batch {pays.max():.0f} and {costs.min():.0f}"
    if len(pays) == len(by_batch):
        return f"Pays at every batch size tried: {start}, {end}"
    if len(costs) == len(by_batch):
        return f"Pays at no batch size tried: {start}, {end}"
    return f"{start}, {end}"


def _marginal(record: Acceptance, position: int) -> float:
    """The share of rounds that accepted this position, counted from 1; 0 if none reached it."""
    return record.marginal[position - 1] if len(record.marginal) >= position else 0.0
