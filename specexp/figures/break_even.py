"""Figures of the cost table and of the break-even maps that follow from it."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from specexp.figures import style
from specexp.measure.break_even import break_even_alpha, break_even_batches
from specexp.measure.summaries import doubt_of_speedups, drafted_share, pooled
from specexp.serving.cost_table import Costs, Fit


def cost_curves(costs: Costs) -> Figure:
    """Left: time of a pass over the tokens in it, one line a batch, with the fit. Right: a roofline
    of the same passes, with the roofs that the fastest of them reach (Williams et al. 2009)."""
    context, fit = costs.contexts[0], costs.fit()
    knee = fit.knee(context)
    n, seconds = _passes(costs, context)
    with style.panels(2, 5.25, 4.6) as (figure, (left, right)):
        palette = sns.color_palette("crest", len(costs.batches))
        for batch, colour, x, y in zip(costs.batches, palette, n, seconds, strict=True):
            left.plot(x, y * 1e3, "o-", color=colour, markersize=5, label=f"batch {batch}")
            right.plot(x, _gflops(costs, x, y), "o-", color=colour, markersize=5)
        line = np.geomspace(1, n.max(), 200)
        left.plot(line, [1e3 * fit.pass_s(1, x, context) for x in line], "--",
                  color=style.PREDICTED, label="floor + slope")  # fmt: skip
        left.set(ylabel=f"ms per pass and rule, {context:g} slots")
        left.set_title(in_words(fit, context))
        _roofs(right, costs, n, seconds)
        for axes in (left, right):
            style.log_axis(axes)
            if knee <= n.max():
                axes.axvline(max(1, knee), color=style.PREDICTED, lw=1, ls=":")
            style.batch_axis(axes, [2**i for i in range(int(math.log2(n.max())) + 1)])
            axes.set(xlabel="tokens in the pass (batch × tokens a row)", xlim=(0.9, 1.2 * n.max()))
        style.title(figure,
              f"{costs.about['target']}{doubt(costs)}: {floor_ends(costs, context)} "
              f"({costs.about['device']}, {costs.about['dtype']})",
              no_intervals="lower quartiles of repeated passes"
        )  # fmt: skip
    return figure


def in_words(fit: Fit, context: float) -> str:
    """Floor and slope of a fit as text."""
    return f"{fit.floor_s * 1e3:.3g} ms, the floor, and {fit.token_s(context) * 1e6:.0f} µs a token"


def floor_ends(costs: Costs, context: float) -> str:
    """From how many tokens on their cost outweighs the floor, claiming nothing beyond the passes
    that were measured."""
    knee, most = costs.fit().knee(context), costs.batches[-1] * costs.tokens[-1]
    if knee > most:
        return f"even {most} tokens in a pass, the most measured, cost less than the floor"
    if knee < 1:
        return "tokens cost more than the floor in every pass"
    return f"above about {round(knee)} in a pass, tokens cost more than the floor"


def doubt(costs: Costs) -> str:
    """A warning for titles if the costs of passes follow no floor and slope."""
    r2 = costs.fit().r2
    return "" if r2 > style.DOUBTFUL else f" (doubtful costs, R² {r2:.2f}: was the machine busy?)"


def _roofs(axes: Axes, costs: Costs, n: np.ndarray, seconds: np.ndarray) -> None:
    most = _gflops(costs, n, seconds).max()
    slope = _gflops(costs, 1, seconds.min())
    x = np.array([1, most / slope, max(n.max(), most / slope)])
    axes.plot(x, np.minimum(slope * x, most), "-", color=style.PLAIN, lw=2, zorder=0)
    axes.set(ylabel="GFLOP/s (2 a weight and token)")
    axes.set_ylim(slope / 2, most * 2)
    bandwidth = costs.about["weight_bytes"] / seconds.min() / 1e9
    axes.text(1, most * 1.1, f"at most {most:.0f} GFLOP/s", color=style.INK, va="bottom")
    axes.text(0.98, 0.03, f"on the slope {bandwidth:.0f} GB/s of weights, at most", color=style.INK,
              ha="right", transform=axes.transAxes)  # fmt: skip
    axes.set_title("Achieved, and the roofs that these passes reach")


def _passes(costs: Costs, context: float) -> tuple[np.ndarray, np.ndarray]:
    """Tokens in a pass and its seconds, both [batch, tokens]."""
    n = np.multiply.outer(costs.batches, costs.tokens)
    times = [[costs.verify_s(b, t, context) for t in costs.tokens] for b in costs.batches]
    return n, np.array(times)


def _gflops(costs: Costs, tokens: Any, seconds: Any) -> Any:
    return 2e-9 * costs.about["parameters"] * tokens / seconds


def speedup_map(costs: Costs, samples: pd.DataFrame, compared: pd.DataFrame) -> Figure:
    """Predicted speedup at each batch and draft length of the table, at the acceptance of
    `samples`, one panel a context; the whiskers are where it is 1, over prompts. In brackets:
    measured speedups from `break_even.compare`, in the panel of the nearest context."""
    contexts, acceptance = costs.contexts, pooled(samples).conditional
    own = costs.at_drafted_share(drafted_share(samples))
    maps = [_grid(costs, lambda b, g, c=c: own.speedup(b, g, acceptance, c)) for c in contexts]
    most = max(1.05, *(max(m.max(), 1 / m.min()) for m in maps))
    measured: dict[tuple[int, int, int], str] = {}
    for row in compared.to_dict("records"):
        near = min(contexts, key=lambda context: abs(context - row["context"]))
        measured[near, row["batch"], row["gamma"]] = f"\n[{row['speedup']:.2f}x]"
    with _maps(costs) as (figure, every):
        for axes, context, values in zip(every, contexts, maps, strict=True):
            notes = [[measured.get((context, b, g), "") for b in costs.batches]
                     for g in costs.gammas[1:]]  # fmt: skip
            _paint(axes, values, "{:.2f}x", notes, cmap="vlag_r", norm=LogNorm(1 / most, most))
            line = break_even_batches(costs, samples, context)
            at, low, high = (_column(costs, line[c]) for c in ("batch", "low", "high"))
            ends = np.clip([at - low, high - at], 0, None)
            axes.errorbar(at, line.index - 0.4, xerr=ends, fmt="k|", markersize=12,
                          markeredgewidth=2, capsize=4, clip_on=False,
                          label="break-even batch, with its interval; [measured]")  # fmt: skip
        style.title(figure, paying(costs, samples, contexts[0]) + doubt_of_speedups(compared))
    return figure


def paying(costs: Costs, samples: pd.DataFrame, context: float) -> str:
    """The best predicted speedup, and the largest batch at which drafting still pays, as text."""
    acceptance, name = pooled(samples).conditional, f"{costs.about['drafter']}{doubt(costs)}"
    own = costs.at_drafted_share(drafted_share(samples))
    points = [(b, g) for b in costs.batches for g in costs.gammas]
    batch, gamma = max(points, key=lambda at: own.speedup(at[0], at[1], acceptance, context))
    line = break_even_batches(costs, samples, context)
    widest = line.loc[line["batch"].idxmax()]
    if not gamma or widest["batch"] == 0:
        return f"{name}: predicted to pay at no batch, {context} slots"
    best = own.speedup(batch, gamma, acceptance, context)
    last = f"batch {widest['batch']:.0f} [{widest['low']:.0f}, {widest['high']:.0f}]"
    if widest["low"] >= costs.batches[-1]:
        last = f"batch {costs.batches[-1]} or more"
    return (
        f"{name}, {context} slots: {best:.2f}x predicted at batch {batch} with "
        f"γ = {gamma}; pays up to {last} with γ = {widest['gamma']:.0f}"
    )


def alpha_map(costs: Costs) -> Figure:
    """The acceptance probability from which on drafting pays, at each batch and draft length of
    the table, one panel a context; it follows from costs alone. In grey, never: it would not pay
    at any."""
    with _maps(costs) as (figure, every):
        for axes, context in zip(every, costs.contexts, strict=True):
            values = _grid(costs, lambda b, g, c=context: break_even_alpha(costs, b, g, c))
            axes.set_facecolor("#b0b0b0")
            possible = np.ma.masked_greater(values, 1 - 1e-9)
            _paint(axes, possible, "{:.2f}", cmap="crest", vmin=0, vmax=1)
            for y, x in np.argwhere(np.ma.getmaskarray(possible)):
                axes.text(x, y, "never", ha="center", va="center", fontsize=9)
        alphas = [break_even_alpha(costs, b, 1, costs.contexts[0]) for b in costs.batches]
        cheap, dear = min(alphas), alphas[-1]
        first, last = costs.batches[alphas.index(cheap)], costs.batches[-1]
        until = f", and at batch {last} {f'from {dear:.2f}' if dear < 1 else 'never'}"
        pays = f"from acceptance probability {cheap:.2f} at batch {first}" + until * (last != first)
        style.title(figure, f"{costs.about['drafter']}{doubt(costs)}: one draft token pays "
                    + (pays if cheap < 1 else "at no batch"))  # fmt: skip
    return figure


@contextmanager
def _maps(costs: Costs) -> Iterator[tuple[Figure, list[Axes]]]:
    """A panel a context, batches across and draft lengths up."""
    size = 0.8 + 0.75 * len(costs.batches), 2.4 + 0.6 * len(costs.gammas)
    with style.panels(len(costs.contexts), *size, sharey=True) as (figure, every):
        for axes, context in zip(every, costs.contexts, strict=True):
            axes.grid(False)
            axes.set_xticks(range(len(costs.batches)), [str(b) for b in costs.batches])
            axes.set_yticks(range(len(costs.gammas) - 1), [str(g) for g in costs.gammas[1:]])
            axes.set(xlabel="batch size (streams)", title=f"buffer of {context} slots")
        style.label_left(every, "draft length γ")
        yield figure, every


def _column(costs: Costs, batches: Any) -> np.ndarray:
    """Where batches lie between the columns of a map, on a logarithmic scale."""
    columns = np.arange(len(costs.batches))
    return np.interp(np.log(np.maximum(batches, 0.5)), np.log(costs.batches), columns, left=-0.5)


def _grid(costs: Costs, value: Callable[..., float]) -> np.ndarray:
    """value(batch, gamma) of the table's settings, [gamma, batch]."""
    return np.array([[value(float(b), g) for b in costs.batches] for g in costs.gammas[1:]])


def _paint(axes: Axes, values: np.ndarray, form: str, notes: Any = None, **shade: Any) -> None:
    edges = (np.arange(n + 1) - 0.5 for n in values.shape[::-1])
    mesh = axes.pcolormesh(*edges, values, edgecolors="white", lw=1, rasterized=True, **shade)
    for (y, x), value in np.ma.ndenumerate(values):
        red, green, blue, _ = mesh.to_rgba(value)
        dark = 0.3 * red + 0.6 * green + 0.1 * blue < 0.5
        text = form.format(value) + (notes[y][x] if notes else "")
        axes.text(x, y, text, ha="center", va="center", fontsize=9,
                  color="white" if dark else "black")  # fmt: skip
