"""The figures of 00_lesson, from the tables of `measure.lesson` and of one pairing."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from IPython.display import display
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.cells import cell_len
from scipy.stats import binomtest

from specexp.errors import counted
from specexp.figures import style
from specexp.figures.pairings import crossing, gamma_panel, speedup_panel
from specexp.figures.tokens import COLOURS, HATCHED, cut, symbols
from specexp.measure.lesson import SIGNIFICANCE, fit
from specexp.measure.summaries import doubt_of_passes, doubt_of_speedups, rounds_s, step_s
from specexp.serving.cost_table import Costs


def by_hand(table: pd.DataFrame) -> Figure:
    """Rounds as lines of cells, from `outcomes`: as many draft tokens as can be read side by side,
    and the target's token."""
    every, lines = table.assign(token=table["token"].map(_label)), table["round"].nunique()
    width, longest = max(1.9, every["token"].map(cell_len).max() * 0.13), int(table["at"].max())
    columns = min(longest, max(2, round((style.WIDEST - 1.1) / width)))
    of_target = every["q"].isna()
    table = every.assign(at=every["at"].clip(upper=columns))[of_target | (every["at"] < columns)]
    with style.canvas(width * columns + 1.1, lines + 0.8) as (figure, axes):
        axes.set(xlim=(0.5, columns + 0.5), ylim=(lines + 0.5, 0.5))
        for _, row in table.iterrows():
            x, y = row["at"], row["round"]
            axes.bar(x, 0.92, 0.96, y - 0.46, color=COLOURS[row["outcome"]], alpha=0.4,
                     hatch=HATCHED.get(row["outcome"]), edgecolor="white")  # fmt: skip
            values = "   ".join(f"{x} = {_short(row[x])}" for x in "qp" if pd.notna(row[x]))
            odds = f"min(1, p/q) = {_short(row['chance'])}" if pd.notna(row["chance"]) else ""
            for dy, line in ((-0.1, values), (0.12, odds), (0.33, row["outcome"])):
                axes.text(x, y + dy, line, ha="center", va="center", fontsize=10)
            axes.text(x, y - 0.3, row["token"], ha="center", va="center", fontsize=11,
                      weight="bold")  # fmt: skip
        axes.set_yticks(range(1, lines + 1), [f"round {n}" for n in range(1, lines + 1)])
        names = [f"draft token {i}" for i in range(1, columns)]
        axes.set_xticks(range(1, columns + 1), [*names, "the target's token"])
        axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
        axes.grid(False)
        accepted, drafted = int((every["outcome"] == "accepted").sum()), int((~of_target).sum())
        shown = f"; shown are the first {columns - 1} of {longest - 1}" * (columns < longest)
        style.title(figure, f"{accepted} of {counted(drafted, 'draft token')} accepted: "
                      f"{accepted + int(of_target.sum())} tokens in "
                      f"{counted(lines, 'target pass', 'es')}{shown}")  # fmt: skip
    return figure


def _short(p: float) -> str:
    if not p:
        return "below 1e-300"
    return f"{p:.2f}" if p >= 0.1 else f"{p:.2g}" if p >= 0.001 else f"{p:.0e}"


def _label(text: str) -> str:
    """A token as a label, in quotes, since many begin with a space."""
    return f'"{cut(symbols(text))}"'


def overlap_bars(table: pd.DataFrame) -> Figure:
    """q and p side by side, divided into what they share and what they do not; from `overlap`."""
    x, alpha = np.arange(len(table)), table["shared"].sum()
    with style.canvas(10, 4.4) as (figure, axes):
        for dx, extra, name, label in (
            (-0.2, "excess", "rejected", "(q − p)+: drafted and rejected"),
            (0.2, "residual", "corrected", "(p − q)+: the residual, for corrections"),
        ):
            axes.bar(x + dx, table["shared"], 0.36, color=COLOURS["accepted"],
                     label="min(p, q): drafted and accepted" if dx < 0 else None)  # fmt: skip
            axes.bar(x + dx, table[extra], 0.36, table["shared"], color=COLOURS[name],
                     hatch=HATCHED[name], edgecolor="white", label=label)  # fmt: skip
            for at, height in zip(x, table["shared"] + table[extra], strict=True):
                axes.text(at + dx, height, "q" if dx < 0 else "p", ha="center", va="bottom")
        _tokens(axes, table)
        axes.set(ylabel="probability of the next token")
        style.title(figure, f"A draft token is accepted with probability Σ min(p, q) = "
                            f"{alpha:.0%}; the residual sums to the other {1 - alpha:.0%}"
        )  # fmt: skip
    return figure


def _tokens(axes: Axes, table: pd.DataFrame) -> None:
    labels = [_label(text) if token >= 0 else text
              for token, text in zip(table["id"], table["token"], strict=True)]  # fmt: skip
    axes.set_xticks(range(len(table)), labels, fontsize=9)
    axes.grid(axis="x", visible=False)


def frequencies(draws: pd.DataFrame, table: pd.DataFrame, p: np.ndarray) -> Figure:
    """Frequencies of draft tokens and of emitted tokens against p [V]; from `first_tokens` and
    `overlap`."""
    n, x = len(draws), np.arange(len(table))
    with style.canvas(10, 4.4) as (figure, axes):
        axes.bar(x, table["p"], 0.7, color=style.PLAIN, alpha=0.5, label="p: the target alone")
        for dx, column, marker, colour, label in (
            (-0.15, "drafted", "x", COLOURS["rejected"], "the draft tokens"),
            (0.15, "emitted", "o", style.SPECULATIVE, "the tokens emitted"),
        ):
            counts = [int((draws[column] == token).sum()) for token in table["id"]]
            counts[-1] = n - sum(counts)
            intervals = [binomtest(k, n).proportion_ci(method="wilson") for k in counts]
            share = np.array(counts) / n
            error = [share - [e.low for e in intervals], [e.high for e in intervals] - share]
            axes.errorbar(x + dx, share, np.maximum(error, 0), fmt=marker, color=colour,
                          capsize=3, label=label)  # fmt: skip
        _tokens(axes, table)
        axes.set(ylabel=f"share of {n:,} first tokens")
        ours, theirs = fit(draws["emitted"], p), fit(draws["drafted"], p)
        emitted = "follow" if ours > SIGNIFICANCE else "do NOT follow"
        drafted = "do too" if theirs > SIGNIFICANCE else "do not"
        style.title(figure, f"The tokens emitted {emitted} p; the draft tokens {drafted} "
                       f"(p-values {_short(ours)} and {_short(theirs)})")  # fmt: skip
    return figure


def price(passes: pd.DataFrame, costs: pd.DataFrame) -> Figure:
    """Left: a pass over n tokens, from `passes`. Right: drafting, from `one_pairing.pass_costs`."""
    drafts, last = costs[costs["gamma"] > 0], passes.iloc[-1]
    drafting = drafts["draft_s"] / step_s(costs)
    with style.panels(2, 5.25, 4.2) as (figure, (left, right)):
        _curve(left, passes, "one pass")
        left.plot(passes["tokens"], passes["tokens"], ":", color=style.PLAIN,
                  label="as many passes of one token")  # fmt: skip
        right.plot(drafts["gamma"], drafting, "o-", color=style.SPECULATIVE)
        right.set(ylabel="time to draft, in plain steps", ylim=(0, None))
        style.gamma_axis(right, drafts["gamma"])
        each = drafting.sum() / drafts["gamma"].sum()
        style.title(figure, f"A pass over {last['tokens']:.0f} tokens takes "
                            f"{style.times(last, 'times')} the time of one; a draft token costs "
                            f"{each:.2f} plain steps" + doubt_of_passes(passes["times"]),
                    no_intervals="drafting (right), medians of repeats")  # fmt: skip
    return figure


def _curve(axes: Axes, passes: pd.DataFrame, label: str | None = None) -> None:
    look = {"color": style.SPECULATIVE, "marker": "o"}
    style.points(axes, passes, "tokens", "times", label=label, **look)
    style.batch_axis(axes, passes["tokens"])
    axes.set(xlabel="tokens in the pass", ylabel="time, pass over one token = 1")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")


def together(costs: pd.DataFrame, predicted: pd.DataFrame, measured: pd.DataFrame) -> Figure:
    """Left: tokens and cost of a round over draft length. Right: their quotient, and the measured
    speedup. From `one_pairing.pass_costs`, `summaries.predicted` and
    `summaries.speedups(by="gamma")`."""
    pays = predicted.loc[predicted["speedup"] > 1, "gamma"]
    with style.panels(2, 5.25, 4.2) as (figure, (left, right)):
        left.plot([0, *predicted["gamma"]], [1, *predicted["tokens"]], "o-",
                  color=COLOURS["accepted"], label="tokens per round")  # fmt: skip
        left.plot(costs["gamma"], rounds_s(costs) / step_s(costs), "s-",
                  color=COLOURS["rejected"], label="cost per round, in plain steps")  # fmt: skip
        style.title(figure, gamma_panel(right, measured, predicted),
              no_intervals="predictions and medians of round costs (left)")  # fmt: skip
        left.set(ylabel="tokens, or plain steps", ylim=(0, None))
        style.gamma_axis(left, costs["gamma"])
        left.legend()
        tried = f"γ = {', '.join(map(str, pays))}" if len(pays) else "no γ tried"
        if len(pays) > 2 and len(pays) == predicted["gamma"].between(pays.min(), pays.max()).sum():
            tried = f"γ = {pays.min()} to {pays.max()}"
        left.set_title(f"Predicted to pay at {tried}")
    return figure


def tension(passes: pd.DataFrame, by_batch: pd.DataFrame, gamma: int) -> Figure:
    """Left: how far gamma draft tokens move a batch along the curve of `passes`; batches that would
    end beyond it are left out. Right: `summaries.speedups(by="batch")`."""
    batches = [int(b) for b in by_batch["batch"] if b * (gamma + 1) <= passes["tokens"].max()]
    with style.panels(2, 5.25, 4.2) as (figure, (left, right)):
        _curve(left, passes)
        for batch in batches:
            tokens = [batch, batch * (gamma + 1)]
            start, end = np.interp(tokens, passes["tokens"], passes["times"])
            left.plot(tokens, [start, start], ":", color=style.PREDICTED)
            arrow = {"arrowstyle": "->", "color": style.PREDICTED, "lw": 2}
            left.annotate("", (tokens[1], end), (tokens[1], start), arrowprops=arrow)
            left.text(tokens[1], end, f"batch {batch}: {end / start:.1f}x  ", ha="right",
                      va="bottom", zorder=1.5,
                      bbox={"fc": "white", "ec": "none", "alpha": 0.7, "pad": 1}
            )  # fmt: skip
        left.set_ylim(top=1.4 * passes["times"].max())
        left.set_title(f"How much longer a pass is with {counted(gamma, 'draft token')} a stream")
        speedup_panel(right, by_batch, "batch")
        style.batch_axis(right, by_batch["batch"])
        style.title(figure, crossing(by_batch) + doubt_of_speedups(by_batch))
    return figure


def pays(
    costs: Costs, batches: Sequence[int] = (1, 4, 16, 64), alphas: Sequence[float] = (0.5, 0.7, 0.9)
) -> Figure:
    """Predicted speedup over draft length, a panel a batch and a line an acceptance probability
    (the same at every position), from a table of measured costs."""
    gammas, context = costs.gammas[1:], costs.contexts[0]
    values = {
        (a, b): [costs.speedup(b, g, [a] * g, context) for g in gammas]
        for a in alphas
        for b in batches
    }
    with style.panels(len(batches), 5.25, 3.4, sharey=True) as (figure, every):
        for axes, batch in zip(every, batches, strict=True):
            axes.axhline(1, color=style.PLAIN, lw=1.5)
            for alpha, colour, symbol in zip(alphas, style.COLOURS, style.SYMBOLS, strict=False):
                axes.plot(gammas, values[alpha, batch], label=f"α = {alpha:g}", color=colour,
                          marker=symbol)  # fmt: skip
            axes.set(ylim=(0, 2.5), title=f"batch {batch}")
            style.gamma_axis(axes, gammas)
        style.label_left(every, "predicted speedup")
        most = max(alphas)
        pay = [str(b) for b in batches if max(values[most, b]) > 1]
        best = max(max(values[most, b]) for b in batches)
        where = f"at batch {', '.join(pay)}: {best:.2f}x at most" if pay else "at none of these"
        about = f"{costs.about['target']} with {costs.about['drafter']}, {costs.about['device']}"
        style.title(figure, f"With acceptance probability {most:g} a draft pays {where}", about)
    return figure


def sliders(costs: Costs) -> Any:
    """`pays` at a batch and an acceptance probability chosen with sliders."""
    from ipywidgets import FloatSlider, SelectionSlider, interactive

    def show(batch: int, alpha: float) -> None:
        display(pays(costs, [batch], [alpha]))

    return interactive(
        show, batch=SelectionSlider(options=costs.batches),
        alpha=FloatSlider(0.8, min=0.05, max=0.95, step=0.05, continuous_update=False),
    )  # fmt: skip
