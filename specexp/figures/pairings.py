"""Figures of one pairing's measurements. Each takes tables and measures nothing.

Titles state the result and are computed from the data; they say faster or slower only if the
interval excludes 1, and name the best of several only if its interval lies above all others.
Measured points carry their 95 % intervals.
"""

from itertools import product
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from specexp.figures import style
from specexp.measure import summaries
from specexp.measure.prompts import NAMES
from specexp.measure.statistics import NOTHING

MOST_LINES = 6  # with intervals, that can be told apart in a panel
LONG = 28  # characters of a label that make a second line
PHASES = {"draft_s": "draft", "verify_s": "verify", "rest_s": "accept, commit"}


def by_category(samples: pd.DataFrame) -> Figure:
    """Acceptance rate by pairing and category as a heat map, with the interval and the number n of
    prompts, or of conversations, in each cell; samples from `one_pairing.acceptance`. Hatched: too
    few prompts, or none in which anything was drafted."""
    rates = _rates(samples, "category")
    few, nothing = rates["high"] - rates["low"] > style.WIDE_SHARE, rates["doubt"] == NOTHING
    between = "[" + (100 * rates[["low", "high"]]).round().astype(int).astype(str).agg(
        ", ".join, axis=1) + "]\n"  # fmt: skip
    between = between.mask(few, "").mask(nothing, "no draft\n")
    rates["note"] = between + "n = " + rates["n"].astype(str)
    table, notes, hatched = (
        rates.assign(few=few).pivot_table(column, "pairing", "category", "first", sort=False)
        for column in ("value", "note", "few")
    )
    first = rates["pairing"].iloc[0]
    main = rates[(rates["pairing"] == first) & ~nothing].sort_values("value")
    claim = NOTHING if main.empty else f"{main['value'].iloc[0]:.0%}"
    if len(main) > 1:
        hardest, easiest = main.iloc[0], main.iloc[-1]
        claim += f" to {easiest['value']:.0%}"
        if hardest["high"] < easiest["low"]:
            kinds = f"{hardest['category']} than on {easiest['category']}"
            claim = f"certainly lower on {kinds}, {claim}"
        else:
            claim += f"; too few {summaries.unit(samples)} to tell them apart"
    finding = f"Acceptance rate of {first} by kind of text: {claim}"
    return heat_map(table, finding, notes, hatched)


def _rates(samples: pd.DataFrame, by: str) -> pd.DataFrame:
    """The acceptance rate of each pairing and value of `by`, as columns value, low, high, with the
    number n of prompts or conversations."""
    return pd.DataFrame(
        {"pairing": pairing, by: key, "n": part["question_id"].nunique()}
        | summaries.rate(part)._asdict()
        for (pairing, key), part in samples.groupby(["pairing", by], sort=False)
    )


def heat_map(
    rates: pd.DataFrame, finding: str, notes: pd.DataFrame, hatched: pd.DataFrame | None = None,
    no_intervals: str = "",
) -> Figure:  # fmt: skip
    """Shares as a heat map with a note below each, the shipped categories first; cells in which
    `hatched` is true are hatched."""
    rates = rates.dropna(axis=1, how="all")
    order = [c for c in NAMES if c in rates] + [c for c in rates if c not in NAMES]
    rates = rates[order]
    texts = rates.map(lambda share: "" if pd.isna(share) else f"{share:.0%}")
    texts = texts + "\n" + notes.reindex_like(rates).fillna("")
    wide = min(style.WIDEST, max(style.NARROWEST, 2.5 + 1.3 * len(order)))
    room = int(10 * (wide - 2.5) / len(order))  # characters
    level = all(len(w) <= room for c in order for w in str(c).replace("-", "- ").split())
    across = [fill(str(c), room if level else LONG) for c in order]
    below = 0 if level else style.DIGIT * max(map(len, "\n".join(across).split("\n")))
    up = [fill(str(name), LONG) for name in rates.index]
    lines = max(text.count("\n") for text in [*up, *texts.to_numpy().flat])
    with style.canvas(wide, 1.4 + below + (0.55 + 0.2 * lines) * len(rates)) as (figure, axes):
        sns.heatmap(rates, annot=texts, fmt="", vmin=0, vmax=1, cmap="crest", ax=axes, cbar=False,
                    annot_kws={"fontsize": 10}, linewidths=1, xticklabels=across,
                    yticklabels=up)  # fmt: skip
        for text in axes.texts:
            x, y = map(int, text.get_position())
            text.set_color("black" if rates.iloc[y, x] < 0.5 else "white")  # whichever is clearer
        hatch = rates * 0 if hatched is None else hatched.reindex_like(rates)
        for y, x in np.argwhere(hatch.fillna(0).to_numpy(bool)):
            axes.add_patch(Rectangle((x, y), 1, 1, fill=False, hatch="//", lw=0, alpha=0.25))
        axes.set(xlabel="", ylabel="")
        axes.grid(False)  # behind cells without a value
        axes.tick_params("x", rotation=0 if level else 90)
        axes.tick_params("y", rotation=0)
        style.title(figure, finding, no_intervals=no_intervals)
    return figure


def by_position(samples: pd.DataFrame) -> Figure:
    """Acceptance by position in the draft, one line a pairing, and a row of panels for every few.
    Left: P(at least i tokens accepted); right: P(token i accepted | token i - 1 was)."""
    looks = style.marks(samples["pairing"])
    first, gamma = samples["pairing"].iloc[0], int(samples["gamma"].max())
    sides = {"this token and all before it": False, "this token, given the one before": True}
    groups = np.array_split(list(looks), -(-len(looks) // MOST_LINES))
    with style.panels(2 * len(groups), 5.25, 4.2, sharey=True) as (figure, every):
        each = product(groups, sides.items())
        for axes, (group, (name, given)) in zip(every, each, strict=True):
            for at, pairing in enumerate(group):
                table = summaries.positions(samples[samples["pairing"] == pairing], given)
                table["position"] += 0.05 * (at - (len(group) - 1) / 2)  # none hides another
                style.points(axes, table, "position", "value", label=pairing, **looks[pairing])
            axes.set_title(name)
            style.axis_of(axes, "position in the draft", range(1, gamma + 1))
            axes.set_ylim(0, 1.02)
            style.per_cent(axes)
        style.label_left(every, "probability of acceptance")
        main = samples[samples["pairing"] == first]
        reached = summaries.positions(main)
        style.title(figure,
              f"{first}: acceptance length {summaries.length(main)}; first draft token "
              f"accepted in {style.share(reached.iloc[0])} of rounds, last in "
              f"{style.share(reached.iloc[-1])}"
        )  # fmt: skip
    return figure


def by_temperature(samples: pd.DataFrame) -> Figure:
    """Acceptance rate over temperature, one line per pairing; samples from
    `one_pairing.acceptance`."""
    rates = _rates(samples, "temperature").sort_values("temperature")
    first = samples["pairing"].iloc[0]
    with style.canvas() as (figure, axes):
        for pairing, look in style.marks(samples["pairing"]).items():
            part = rates[rates["pairing"] == pairing]
            style.points(axes, part, "temperature", "value", label=pairing, **look)
        axes.set(ylabel="acceptance rate", ylim=(0, 1.02))
        style.axis_of(axes, "temperature", rates["temperature"])
        style.per_cent(axes)
        main = rates[rates["pairing"] == first]
        cold, hot = main.iloc[0], main.iloc[-1]
        warmer = f", {style.share(hot)} at {hot['temperature']:g}" * (len(main) > 1)
        style.title(figure,
              f"{first}: acceptance rate {style.share(cold)} at temperature "
              f"{cold['temperature']:g}{warmer}"
        )  # fmt: skip
    return figure


def over_temperature(samples: pd.DataFrame) -> Figure:
    """What each rule accepts more than Reject, paired by prompt, over temperature: a panel a rule,
    with the acceptance lengths at the highest; samples from `one_pairing.acceptance`."""
    each = samples.groupby("temperature")
    table = pd.concat([summaries.gains(part, "reject").assign(temperature=t) for t, part in each])
    hottest = max(each.groups)
    hot = samples[samples["temperature"] == hottest]
    if not (rules := list(dict.fromkeys(table["rule"]))):
        return style.nothing("Only reject was measured: other rules are compared with it")
    with style.panels(len(rules), 3.5, 3.2, sharey=True) as (figure, every):
        for axes, (rule, look) in zip(every, style.marks(rules).items(), strict=True):
            axes.axhline(0, color=style.PLAIN, lw=1.5)
            style.points(axes, table[table["rule"] == rule], "temperature", "gain", **look)
            axes.set_title(f"{rule}: {summaries.length(hot[hot['rule'] == rule]).value:.2f}")
            style.axis_of(axes, "temperature", each.groups)
        style.label_left(every, "acceptance length\nminus that of reject")
        last = table[(table["temperature"] == hottest) & ~table["rule"].str.contains("lossy")]
        more = [f"{r['rule']} accepts {abs(r['gain']):.2f} tokens per pass "
                f"{'more' if r['gain'] > 0 else 'less'} than reject"
                for _, r in last.iterrows() if r["low"] > 0 or r["high"] < 0]  # fmt: skip
        base = summaries.length(hot[hot["rule"] == "reject"]).value
        claim = "; ".join(more) or "no exact rule certainly differs from reject"
        style.title(
            figure, f"At temperature {hottest:g} {claim}, whose acceptance length is {base:.2f}"
        )
    return figure


def bias_and_length(table: pd.DataFrame) -> Figure:
    """Each rule's acceptance length and, beside it, its bias (total variation), with their
    intervals; from `summaries.length_and_bias`. Hollow: a rule that is lossy by its kind."""
    lossy, looks = table["rule"].str.contains("lossy"), style.marks(table["rule"])
    for rule in table["rule"][lossy]:
        looks[rule] = looks[rule] | style.HOLLOW
    tall = 2.0 + 0.42 * len(table)
    with style.panels(2, 5.25, tall, sharey=True) as (figure, (lengths, biases)):
        _bars(lengths, table, "rule", "length", looks)
        lengths.set_xlabel("tokens per target pass")
        _bars(biases, table, "rule", "bias", looks)
        most = max(0.1, table["bias_high"].max() * 1.05)
        biases.set(xlabel="bias (total variation, first token)", xlim=(-most / 40, most))
        for axes in (lengths, biases):
            axes.locator_params("x", nbins=5)
        style.per_cent(biases, "x")
        worst = table.loc[table["bias"].where(lossy, -1).idxmax()]
        value = worst[["bias", "bias_low", "bias_high"]].set_axis(["value", "low", "high"])
        style.title(figure,
              f"Largest bias: {worst['rule']}, total variation {style.share(value)}"
              if lossy.any() else "Every rule here keeps the target's distribution"
        )  # fmt: skip
    return figure


def forest(measured: pd.DataFrame, lead: pd.DataFrame | None = None) -> Figure:
    """Speedup of each arm with its interval, the fastest first; from `summaries.speedups`.
    lead: how many times as fast the first arm is as each, paired by prompt, from
    `summaries.lead_over_others`."""
    table = measured.sort_values("speedup", ascending=False, ignore_index=True)
    looks = style.marks(measured["arm"])
    lead = None if lead is None or lead.empty else lead  # of one arm there is nothing
    sides, tall = 1 if lead is None else 2, 2.0 + 0.42 * len(table)
    with style.panels(sides, 8.5 if lead is None else 5.25, tall, sharey=True) as (figure, every):
        _rows(every[0], table, "speedup", looks)
        every[0].set_xlabel("speedup over plain decoding")
        if lead is not None:
            rest = table[["arm"]].merge(lead, on="arm", how="left")
            _rows(every[1], rest, "times", looks)
            every[1].set_xlabel(fill(f"{table['arm'][0]} over each,", LONG) + "\npaired by prompt")
        style.title(figure, _winner(table, lead) + summaries.doubt_of_speedups(table))
    return figure


def _bars(axes: Axes, table: pd.DataFrame, by: str, column: str, looks: dict[str, Any]) -> None:
    """A line a row, named by the column `by`, with the point of a column and its interval."""
    for y, row in table.dropna(subset=[column]).iterrows():
        axes.errorbar(row[column], y, xerr=style.ends(table.loc[[y]], column), capsize=3,
                      markersize=8, **looks[row[by]])  # fmt: skip
    axes.set_yticks(range(len(table)), table[by])
    axes.set_ylim(len(table) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)


def _rows(axes: Axes, table: pd.DataFrame, column: str, looks: dict[str, Any]) -> None:
    """How many times as fast each arm is, with its interval, and the numbers beside it."""
    axes.axvline(1, color=style.PLAIN, lw=1.5)
    _bars(axes, table, "arm", column, looks)
    shown = table.dropna(subset=[column])
    for y, row in shown.iterrows():
        axes.annotate(style.times(row, column), (1.0, y), xycoords=("axes fraction", "data"),
                      fontsize=10, va="center", color=style.INK)  # fmt: skip
    axes.set(xlim=(0.9 * min(1, shown["low"].min()), 1.1 * max(1, shown["high"].max())))
    style.log_axis(axes, "x")


def _winner(table: pd.DataFrame, lead: pd.DataFrame | None) -> str:
    """Which arm of `summaries.speedups`, the fastest first, is certainly faster than plain decoding
    and than all others. A timing that is not credible counts for nothing."""
    best, sound = summaries.fastest(table), summaries.sound(table)
    if (table["high"] < 1).all() and sound.all():
        return "All are slower than plain decoding"
    alone = summaries.best_is_certain(table, "speedup") if lead is None else (lead["low"] > 1).all()
    if best["low"] > 1 and alone and sound.all():
        return f"{best['arm']}: {summaries.verdict(best)}"
    if faster := int((table["low"][sound] > 1).sum()):
        they = f"{faster} of {len(table)} {'is' if faster == 1 else 'are'} certainly faster"
        return f"{they} than plain decoding" + ", none is certainly the fastest" * (faster > 1)
    few = best["doubt"] if sound.all() else ""  # what is not credible is said once, at the end
    return "None is certainly faster than plain decoding" + f"; {few}" * bool(few)


def round_costs(costs: pd.DataFrame) -> Figure:
    """Where a round's time goes, in plain steps, for each draft length or arm; from
    `one_pairing.pass_costs` or `one_pairing.arm_costs`."""
    by = "arm" if "arm" in costs else "gamma"
    step = summaries.step_s(costs)
    parts = costs[list(PHASES)].rename(columns=PHASES) / step
    left = parts.cumsum(axis=1) - parts
    with style.canvas(8.5, 2 + 0.42 * len(costs)) as (figure, axes):
        for at, phase in enumerate(parts):
            axes.barh(range(len(parts)), parts[phase], 0.65, left=left[phase], label=phase,
                      edgecolor="white", color=style.COLOURS[at],
                      hatch=style.HATCHES[at])  # fmt: skip
        names = costs[by] if by == "arm" else [f"γ = {gamma}" for gamma in costs["gamma"]]
        axes.set_yticks(range(len(parts)), list(names))
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.axvline(1, color=style.PLAIN, lw=1.5)
        axes.set(xlabel=f"plain steps (of {step * 1e3:.3g} ms)")
        draft, check = parts["draft"], parts["verify"]
        if by == "arm":
            dearest, slowest = costs["arm"][draft.idxmax()], costs["arm"][check.idxmax()]
            finding = (f"Most expensive draft: {dearest}, {draft.max():.2f} plain steps; "
                       f"verification: {slowest}, {check.max():.2f}")  # fmt: skip
        else:
            gamma, longer = int(costs["gamma"].iloc[-1]), check.iloc[-1] / check.iloc[0]
            finding = (f"Verifying {gamma + 1} tokens takes {longer:.2f}x as long as one; "
                       f"drafting {gamma} takes {draft.iloc[-1]:.2f} plain steps")  # fmt: skip
        finding += summaries.doubt_of_passes(check + parts["accept, commit"])
        style.title(figure, finding, no_intervals="medians of repeated rounds")
    return figure


def over_gamma(measured: pd.DataFrame, predicted: pd.DataFrame) -> Figure:
    """Speedup over draft length: `summaries.speedups(by="gamma")`, of which these are expected,
    against `summaries.predicted`."""
    with style.canvas() as (figure, axes):
        style.title(figure, gamma_panel(axes, measured, predicted))
    return figure


def gamma_panel(axes: Axes, measured: pd.DataFrame, predicted: pd.DataFrame) -> str:
    """`over_gamma` on these axes, and its title."""
    speedup_panel(axes, measured, "gamma", label="measured")
    axes.plot(predicted["gamma"], predicted["speedup"], "s--", color=style.PREDICTED,
              label="predicted from acceptance and pass costs")  # fmt: skip
    style.gamma_axis(axes, {*measured["gamma"], *predicted["gamma"]})
    best, by_gamma = summaries.fastest(measured), predicted.set_index("gamma")["speedup"]
    claim = f"At γ = {best['gamma']:.0f}: {summaries.verdict(best)}"
    discredited = summaries.NOT_CREDIBLE in claim
    return f"{claim}; predicted {by_gamma[best['gamma']]:.2f}x" + (
        "" if discredited else summaries.doubt_of_speedups(measured)
    )


def speedup_panel(axes: Axes, table: pd.DataFrame, by: str, **look: Any) -> None:
    """Speedups with intervals, which are cut off where they are very wide: on a busy machine."""
    most = max(axes.get_ylim()[1], style.top(table["speedup"], table["high"]))
    axes.axhline(1, color=style.PLAIN, lw=1.5)
    style.points(axes, table, by, **{"color": style.SPECULATIVE, "marker": "o"} | look)
    axes.set(ylabel="speedup over plain decoding", ylim=(0, most))


def throughput(by_batch: pd.DataFrame) -> Figure:
    """Tokens/s over batch for plain and speculative decoding, with the interval of their ratio;
    `summaries.speedups(by="batch")`."""
    first, last = by_batch.iloc[0], by_batch.iloc[-1]
    plain = by_batch["plain_tok_s"]
    own = by_batch.assign(low=by_batch["low"] * plain, high=by_batch["high"] * plain)
    with style.canvas() as (figure, axes):
        axes.plot(by_batch["batch"], plain, "x-", color=style.PLAIN, label="plain")
        style.points(axes, own, "batch", "tok_s", color=style.SPECULATIVE, marker="o",
                 label="speculative, with the interval of its ratio to plain")  # fmt: skip
        style.batch_axis(axes, by_batch["batch"])
        axes.set(ylabel="tokens/s, all streams", ylim=(0, None))
        finding = (
            f"Batch {last['batch']:.0f} over batch {first['batch']:.0f}: "
            f"{last['plain_tok_s'] / first['plain_tok_s']:.1f}x the tokens/s in plain decoding, "
            f"{last['tok_s'] / first['tok_s']:.1f}x with speculation"
            if len(by_batch) > 1
            else f"Batch {first['batch']:.0f}: {first['plain_tok_s']:,.0f} tokens/s in plain "
            f"decoding, {first['tok_s']:,.0f} with speculation"
        )
        doubt = summaries.doubt_of_speedups(by_batch)
        style.title(figure, finding + doubt)
    return figure


def over_batch(by_batch: pd.DataFrame, served: pd.DataFrame | None = None) -> Figure:
    """Speedup over batch size; from `summaries.speedups(by="batch")`. served: the same under
    continuous batching, from `under_load.rates` for one policy."""
    with style.canvas() as (figure, axes):
        lines = 1 if served is None else 2
        static = style.shifted(by_batch, "batch", 0, lines)
        speedup_panel(axes, static, "batch", label="static batch, interval over prompts")
        if served is not None:
            loops = style.shifted(served, "load", 1, lines)
            speedup_panel(axes, loops, "load", label="continuous batching, interval over turns",
                          color=style.PREDICTED, marker="s", ls="--")  # fmt: skip
        style.batch_axis(axes, by_batch["batch"])
        every = pd.concat([by_batch, served])
        style.title(figure, crossing(by_batch) + summaries.doubt_of_speedups(every))
    return figure


def crossing(measured: pd.DataFrame, by: str = "batch") -> str:
    """The batch size (or load, the column `by`) at which speculation stops paying, in words; only
    intervals that exclude 1 count, and only of credible timings."""
    more = measured["low"] < measured["high"]  # than one sample
    with_interval = measured[more & summaries.sound(measured)]
    pays = with_interval[with_interval["low"] > 1][by]
    costs = with_interval[with_interval["high"] < 1][by]
    start, end = (
        f"{style.times(row, 'speedup')} at {by} {row[by]:.0f}"
        for row in (measured.iloc[0], measured.iloc[-1])
    )
    ends = start if len(measured) == 1 else f"{start}, {end}"
    if len(pays) and len(costs) and costs.min() > pays.max():
        return f"{start}; stops paying between {by} {pays.max():.0f} and {costs.min():.0f}"
    sizes = f"{by} size" if by == "batch" else by
    if len(pays) == len(measured):
        return f"Pays at every {sizes} tried: {ends}"
    if len(costs) == len(measured):
        return f"Pays at no {sizes} tried: {ends}"
    return ends
