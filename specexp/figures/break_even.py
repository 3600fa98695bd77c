"""Figures of the cost table and of the break-even maps that follow from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from specexp.figures.style import DOUBTFUL, PLAIN, PREDICTED, batch_axis, panels
from specexp.measure.break_even import break_even_alpha, break_even_batches
from specexp.measure.summaries import pooled
from specexp.serving.cost_table import Costs, Fit

ROUND = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8, 16)  # speedups on a wide colour bar,
TICKS = sorted((*ROUND, 0.67, 0.8, 0.9, 1.1, 1.25, 1.5))  # and on a narrow one


def cost_curves(costs: Costs, context: float | None = None) -> Figure:
    """Left: time of a pass over the tokens in it, one line a batch, with the fit. Right: a roofline
    of the same passes, with the roofs that the fastest of them reach (Williams et al. 2009)."""
    context = costs.contexts[0] if context is None else context
    fit = costs.fit()
    knee = fit.knee(context)
    n, seconds = _passes(costs, context)
    with panels(2, 12.5, 4.6) as (figure, (left, right)):
        palette = sns.color_palette("crest", len(costs.batches))
        for batch, colour, x, y in zip(costs.batches, palette, n, seconds, strict=True):
            left.plot(x, y * 1e3, "o-", color=colour, markersize=5, label=f"{batch}")
            right.plot(x, _gflops(costs, x, y), "o-", color=colour, markersize=5)
        line = np.geomspace(1, n.max(), 200)
        left.plot(line, [1e3 * fit.pass_s(1, x, context) for x in line], "--", color=PREDICTED,
                  label="floor + slope")  # fmt: skip
        left.set(ylabel=f"ms a pass and rule, {context:g} slots", yscale="log")
        left.legend(title="batch", fontsize=9, title_fontsize=9, ncols=2)
        milliseconds = [m * 10**e for e in range(-2, 5) for m in (1, 2, 5)]
        least, longest = left.get_ylim()
        shown = [t for t in milliseconds if least <= t <= longest]
        left.set_yticks(shown, [f"{t:g}" for t in shown], minor=False)
        left.minorticks_off()
        left.set_title(in_words(fit, context))
        _roofs(right, costs, n, seconds)
        for axes in (left, right):
            axes.axvline(knee, color=PREDICTED, lw=1, ls=":")
            batch_axis(axes, [2**i for i in range(int(math.log2(n.max())) + 1)])
            axes.set_xlabel("tokens in the pass (batch × tokens a row)")
        figure.suptitle(
            f"{costs.about['target']}: the floor ends at about {knee:.0f} tokens in a pass "
            f"({costs.about['device']}, {costs.about['dtype']})", x=0.01, ha="left",
        )  # fmt: skip
    return figure


def in_words(fit: Fit, context: float) -> str:
    """Floor and slope of a fit as text, with a warning if it is poor."""
    costs = f"{fit.floor_s * 1e3:.1f} ms and {fit.token_s(context) * 1e6:.0f} µs a token"
    poor = f"doubtful (R² {fit.r2:.2f}): was the machine busy?"
    return costs if fit.r2 > DOUBTFUL else f"{costs}, {poor}"


def _roofs(axes: Axes, costs: Costs, n: np.ndarray, seconds: np.ndarray) -> None:
    most = _gflops(costs, n, seconds).max()
    slope = _gflops(costs, 1, seconds.min())
    x = np.array([1, most / slope, max(n.max(), most / slope)])
    axes.plot(x, np.minimum(slope * x, most), "-", color=PLAIN, lw=2, zorder=0)
    axes.set(ylabel="GFLOP/s (2 a weight and token)", yscale="log")
    axes.set_ylim(slope / 2, most * 2)
    bandwidth = costs.about["weight_bytes"] / seconds.min() / 1e9
    axes.text(1, most * 1.1, f"at most {most:.0f} GFLOP/s", color="#555555", va="bottom")
    axes.annotate(
        f"at most {bandwidth:.0f} GB/s of weights", (2, 2 * slope), (16, -14), color="#555555",
        textcoords="offset points", va="top", arrowprops={"arrowstyle": "-", "color": PLAIN},
    )  # fmt: skip
    axes.set_title("Achieved, and the roofs that these passes reach")


def _passes(costs: Costs, context: float) -> tuple[np.ndarray, np.ndarray]:
    """Tokens in a pass and its seconds, both [batch, tokens]."""
    n = np.multiply.outer(costs.batches, costs.tokens)
    times = [[costs.verify_s(b, t, context) for t in costs.tokens] for b in costs.batches]
    return n, np.array(times)


def _gflops(costs: Costs, tokens: Any, seconds: Any) -> Any:
    return 2e-9 * costs.about["parameters"] * tokens / seconds


def speedup_map(
    costs: Costs,
    samples: pd.DataFrame,
    contexts: Sequence[int] | None = None,
    compared: pd.DataFrame | None = None,
) -> Figure:
    """Predicted speedup over batch and draft length at the acceptance of `samples`, one panel a
    context; the solid line is where it is 1, the dotted ones its interval over prompts. Points:
    measured speedups from `break_even.compare`, in the panel of the nearest context and the same
    colours."""
    contexts = contexts or costs.contexts
    acceptance = pooled(samples).conditional
    maps = [_grid(costs, lambda b, g, c=c: costs.speedup(b, g, acceptance, c)) for c in contexts]
    measured = [] if compared is None else list(compared["speedup"])
    extremes = [(m.min(), m.max()) for m in maps] + [(x, x) for x in measured]
    most = max(1.05, *(max(high, 1 / low) for low, high in extremes))
    shade: dict[str, Any] = {"cmap": "vlag_r", "norm": LogNorm(1 / most, most)}
    with panels(len(contexts), 1.5 + 5.2 * len(contexts), 4.6) as (figure, every):
        for axes, context, values in zip(every, contexts, maps, strict=True):
            mesh = _paint(axes, costs, values, **shade)
            line = break_even_batches(costs, samples, context)
            axes.plot(line["batch"], line["gamma"], "k-", lw=2, label="break-even")
            axes.plot(line["low"], line["gamma"], "k:", lw=1.5, label="its 95 % interval")
            axes.plot(line["high"], line["gamma"], "k:", lw=1.5)
            axes.set_title(f"buffer of {context} slots")
            if compared is not None:
                near = compared["context"].map(lambda c: min(contexts, key=lambda x: abs(x - c)))
                part = compared[near == context]
                axes.scatter(part["batch"], part["gamma"], c=part["speedup"], s=130, zorder=3,
                             edgecolors="k", clip_on=False, label="measured", **shade)  # fmt: skip
        figure.legend(*every[-1].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        bar = figure.colorbar(mesh, ax=every, label="speedup over plain decoding", pad=0.02)
        bar.set_ticks([t for t in TICKS if 1 / most <= t <= most and (t in ROUND or most < 2.5)])
        bar.ax.yaxis.set_major_formatter(lambda x, _: f"{x:.3g}x")
        bar.minorticks_off()
        figure.suptitle(paying(costs, samples, contexts[0]), x=0.01, ha="left")
    return figure


def paying(costs: Costs, samples: pd.DataFrame, context: float) -> str:
    """The best predicted speedup, and the largest batch at which drafting still pays, as text."""
    acceptance = pooled(samples).conditional
    points = [(b, g) for b in costs.batches for g in costs.gammas]
    batch, gamma = max(points, key=lambda at: costs.speedup(at[0], at[1], acceptance, context))
    line = break_even_batches(costs, samples, context)
    widest = line.loc[line["batch"].idxmax()]
    if not gamma or widest["batch"] == 0:
        return f"{costs.about['drafter']}: predicted to pay at no batch, {context} slots"
    best = costs.speedup(batch, gamma, acceptance, context)
    last = f"batch {widest['batch']:.0f} [{widest['low']:.0f}, {widest['high']:.0f}]"
    if widest["low"] >= costs.batches[-1]:
        last = f"batch {costs.batches[-1]} or more"
    return (
        f"{costs.about['drafter']}, {context} slots: {best:.2f}x predicted at batch {batch} with "
        f"γ = {gamma}; pays up to {last} with γ = {widest['gamma']:.0f}"
    )


def alpha_map(costs: Costs, contexts: Sequence[int] | None = None) -> Figure:
    """The acceptance probability from which on drafting pays, over batch and draft length, one
    panel a context; it follows from costs alone. Grey: it would not pay at any acceptance."""
    contexts = contexts or costs.contexts
    maps = [_grid(costs, lambda b, g, c=c: break_even_alpha(costs, b, g, c)) for c in contexts]
    with panels(len(contexts), 1.5 + 5.2 * len(contexts), 4.6) as (figure, every):
        for axes, context, values in zip(every, contexts, maps, strict=True):
            axes.set_facecolor("#b0b0b0")
            possible = np.ma.masked_greater(values, 1 - 1e-9)
            mesh = _paint(axes, costs, possible, cmap="crest", vmin=0, vmax=1)
            if min(values.shape) > 1:
                lines = axes.contour(
                    *_axes(costs), values, [0.5, 0.6, 0.7, 0.8, 0.9], colors="w", linewidths=1
                )
                axes.clabel(lines, fontsize=9)
            axes.set_title(f"buffer of {context} slots")
        figure.colorbar(mesh, ax=every, label="acceptance probability α at break-even", pad=0.02)
        alphas = [break_even_alpha(costs, b, 1, contexts[0]) for b in costs.batches]
        cheap, dear = min(alphas), alphas[-1]
        figure.suptitle(
            f"{costs.about['drafter']}: one draft token pays from α = {cheap:.2f} at batch "
            f"{costs.batches[alphas.index(cheap)]}, and at batch {costs.batches[-1]} "
            + (f"from {dear:.2f}" if dear < 1 else "never"), x=0.01, ha="left",
        )  # fmt: skip
    return figure


def _axes(costs: Costs) -> tuple[np.ndarray, np.ndarray]:
    """Batches (evenly spaced in log) and draft lengths of a map."""
    first, last = costs.batches[0], costs.batches[-1]
    return np.geomspace(first, last, 97 if last > first else 1), np.arange(1, costs.gammas[-1] + 1)


def _grid(costs: Costs, value: Callable[..., float]) -> np.ndarray:
    """value(batch, gamma) on the axes of a map, [gamma, batch]."""
    x, y = _axes(costs)
    return np.array([[value(float(b), int(g)) for b in x] for g in y])


def _paint(axes: Axes, costs: Costs, values: np.ndarray, **shade: Any) -> Any:
    x, y = _axes(costs)
    half = (x[1] / x[0]) ** 0.5 if len(x) > 1 else 2**0.5
    edges = np.append(x / half, x[-1] * half), np.append(y - 0.5, y[-1] + 0.5)
    axes.grid(False)
    mesh = axes.pcolormesh(*edges, values, rasterized=True, **shade)
    batch_axis(axes, costs.batches)
    axes.set_yticks(y)
    axes.set_ylabel("draft length γ")
    return mesh
