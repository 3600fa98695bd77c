"""Break-even maps: at which load and draft length speculation pays, predicted from measured parts.

`profile` measures the cost table of a pairing on this machine once and stores it. With the
acceptance on some prompts, the table predicts the speedup at every batch and draft length; `sweep`
and `compare` measure how well. Intervals are over prompts: that of the tokens a round is
bootstrapped, and that of the break-even batch follows from its ends, since the batch rises with the
tokens.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from tqdm.auto import tqdm

from specexp import theory
from specexp.api import Pairing
from specexp.errors import UserError
from specexp.figures.pairings import PLAIN, PREDICTED, batch_axis, panels
from specexp.measure import costs as tables
from specexp.measure import one_pairing, statistics
from specexp.measure.prompts import Prompt, load
from specexp.measure.statistics import Interval
from specexp.serving import goodput
from specexp.serving.cost_table import Costs, Fit
from specexp.tracking import results

log = logging.getLogger("specexp")

BATCHES, GAMMAS, CONTEXTS = (1, 2, 4, 8, 16, 32, 64), (0, *goodput.GAMMAS), (128, 256)
ROUND = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8, 16)  # speedups on a wide colour bar,
TICKS = sorted((*ROUND, 0.67, 0.8, 0.9, 1.1, 1.25, 1.5))  # and on a narrow one
FRESH = 6  # hours after which a stored table is warned about: a shared machine's speed drifts
DOUBTFUL = 0.8  # R² of a fit below which the measurement was probably disturbed

# --- the table of a pairing ----------------------------------------------------------------------


def profile(
    pairing: Pairing,
    batches: Sequence[int] = BATCHES,
    gammas: Sequence[int] = GAMMAS,
    contexts: Sequence[int] | None = None,
    repeats: int = 5,
    force: bool = False,
    longest: int = 0,
) -> Costs:
    """The cost table of a pairing. The stored one, if it is of these models, device and dtype and
    has all these points; otherwise, or with `force`, one is measured and stored, which keeps the
    points of the stored one. gammas beyond the drafter's longest draft are left out. contexts: by
    default those of `CONTEXTS` that the models reach, and one for `longest` tokens if that is
    more. Raises UserError."""
    if not pairing.engine.drafter.context:
        raise UserError(
            f"drafter {pairing.drafter} drafts nothing, so there are no costs to measure: name "
            "another one, or leave out policy goodput"
        )
    path, gammas = place(pairing), [g for g in gammas if g <= pairing.deepest]
    if contexts is None:
        most = min(pairing.target.context, pairing.engine.drafter.context)
        contexts = [c for c in CONTEXTS if c <= most] or [most]
        if longest > contexts[-1]:
            contexts.append(min(most, 1 << (longest - 1).bit_length()))
    asked, deepest = (batches, gammas, contexts), max(gammas)
    had: tuple[Sequence[int], ...] = (), (), ()
    with suppress(UserError):  # there is none, or it is damaged
        stored = Costs.load(path)
        if stored.about == about(pairing):
            had = stored.batches, stored.gammas, stored.contexts
    if not force and all(set(a) >= set(b) for a, b in zip(had, asked, strict=True)):
        hours = (time.time() - path.stat().st_mtime) / 3600
        if hours > FRESH:
            log.warning("%s was measured %.0f hours ago: if the load of the machine has changed, "
                        "measure again with specexp profile --force", path, hours)  # fmt: skip
        return stored.upto(deepest)
    batches, gammas, contexts = ([*{*a, *b}] for a, b in zip(had, asked, strict=True))
    gammas = [g for g in gammas if g <= pairing.deepest]
    ids = pairing.encode([prompt.text for prompt in load("all", limit=10)])
    with tqdm(desc="costs", unit="setting", delay=1) as bar:

        def watch(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        found = tables.measure(pairing.engine, ids, batches, gammas, contexts, repeats, watch)
    found = replace(found, about=about(pairing))
    found.save(path)
    return found.upto(deepest)


def about(pairing: Pairing) -> dict[str, Any]:
    """`Costs.about` of a table of this pairing."""
    return tables.about(pairing.engine) | {"drafter": pairing.drafter}


def place(pairing: Pairing) -> Path:
    """The file of a pairing's table: one for each target, drafter, device, dtype (and all of
    `about`)."""
    known = json.dumps(about(pairing), sort_keys=True).encode()
    names = (re.sub(r"[^\w.-]+", "_", name) for name in (pairing.target.name, pairing.drafter))
    return (
        results.root()
        / "costs"
        / f"{'--'.join(names)}--{hashlib.sha256(known).hexdigest()[:12]}.json"
    )


# --- break-even ----------------------------------------------------------------------------------


def tokens_of_round(samples: pd.DataFrame, gamma: int) -> Interval:
    """Mean tokens of a round of gamma guesses, with its interval over prompts. samples: rows of
    `bench.acceptance` with at least gamma guesses a round."""
    kept = [sum(n * min(k, gamma) for k, n in enumerate(r.histogram)) for r in samples["record"]]
    return statistics.interval(lambda k, n: 1 + k.sum(-1) / n.sum(-1), kept, samples["passes"])


def break_even_batch(costs: Costs, gamma: int, tokens: float, context: float) -> float:
    """The largest batch at which a round of gamma guesses that yields `tokens` tokens takes no
    longer than as many plain steps: 0 if there is none, the table's last if drafting still pays
    there.

    Times are linear between the table's batches, and so is the time that a round saves.
    """
    at = costs.batches
    saved = [tokens * costs.step_s(b, context) - costs.round_s(b, gamma, context) for b in at]
    if saved[-1] >= 0:
        return float(at[-1])
    for i in reversed(range(len(at) - 1)):
        if saved[i] >= 0:
            return at[i] + (at[i + 1] - at[i]) * saved[i] / (saved[i] - saved[i + 1])
    return 0.0


def break_even_batches(costs: Costs, samples: pd.DataFrame, context: float) -> pd.DataFrame:
    """One row a draft length: gamma, tokens a round, the break-even batch and its interval."""
    rows = []
    for gamma in range(1, costs.gammas[-1] + 1):
        tokens = tokens_of_round(samples, gamma)
        batch, low, high = (break_even_batch(costs, gamma, t, context) for t in tokens)
        rows.append(
            {"gamma": gamma, "tokens": tokens.value, "batch": batch, "low": low, "high": high}
        )
    return pd.DataFrame(rows)


def break_even_alpha(costs: Costs, batch: float, gamma: int, context: float) -> float:
    """The acceptance probability alpha, the same at every position, from which on gamma guesses
    pay at this load; 1 also where no alpha does."""
    extra = costs.round_s(batch, gamma, context) / costs.step_s(batch, context) - 1
    return theory.break_even_alpha(gamma, max(0.0, extra / gamma))


# --- measured against predicted ------------------------------------------------------------------


def sweep(
    pairing: Pairing,
    prompts: Sequence[Prompt],
    batches: Sequence[int],
    gammas: Sequence[int],
    max_new_tokens: int,
    repeats: int = 2,
) -> pd.DataFrame:
    """`bench.throughput` at every draft length; as in the cost table, `context` includes the slots
    of the longest draft."""
    arms = [pairing.with_(gamma=gamma, tree="chain") for gamma in gammas]
    samples = pd.concat(
        [one_pairing.throughput(arm, prompts, batches, max_new_tokens, repeats) for arm in arms],
        ignore_index=True,
    )
    samples["context"] += max(gammas) + 1
    return samples


def compare(costs: Costs, accepted: pd.DataFrame, samples: pd.DataFrame) -> pd.DataFrame:
    """One row a (gamma, batch) of a `sweep`: the measured speedup [low, high], that predicted from
    the acceptance of `accepted` (`predicted`), and that predicted from the acceptance of the very
    same runs (`predicted_own`), whose error comes from the cost table alone."""
    usual = one_pairing.pooled(accepted).conditional
    rows = []
    for (gamma, batch), part in samples.groupby(["gamma", "batch"]):
        context = part["context"].mean()
        found = statistics.speedup(
            *one_pairing.units(part, "plain_s", "plain_tokens", "s", "tokens")
        )
        own = one_pairing.pooled(part).conditional
        rows.append(
            {"gamma": gamma, "batch": batch, "context": context}
            | {"speedup": found.value, "low": found.low, "high": found.high}
            | {"predicted": costs.speedup(batch, gamma, usual, context)}
            | {"predicted_own": costs.speedup(batch, gamma, own, context)}
        )
    return pd.DataFrame(rows)


def predicted_error(compared: pd.DataFrame, column: str = "predicted") -> float:
    """Median of |log(predicted / measured)|: 0.1 is an error of ten per cent either way."""
    return float(np.log(compared[column] / compared["speedup"]).abs().median())


def tax(
    pairing: Pairing, prompts: Sequence[Prompt], batches: Sequence[int], max_new_tokens: int,
    repeats: int = 5,
) -> pd.DataFrame:  # fmt: skip
    """The overhead of having a drafter and a rule without drafting, against plain decoding, by
    turns. One row a batch: `tax` [low, high], the additional time a token (0.02 is two per
    cent)."""
    samples = one_pairing.throughput(
        pairing.with_(gamma=0, tree="chain"), prompts, batches, max_new_tokens, repeats
    )
    rows = []
    for batch, part in samples.groupby("batch"):
        more = statistics.speedup(
            *one_pairing.units(part, "s", "tokens", "plain_s", "plain_tokens")
        )
        rows.append(
            {"batch": batch, "tax": more.value - 1, "low": more.low - 1, "high": more.high - 1}
        )
    return pd.DataFrame(rows)


def metrics(
    costs: Costs,
    accepted: pd.DataFrame,
    compared: pd.DataFrame,
    taxes: pd.DataFrame,
    context: float,
) -> tuple[dict[str, float], dict[str, Any]]:
    """Metrics and series of a map, for MLflow."""
    found, series = one_pairing.acceptance_metrics(accepted)
    fit = costs.fit()
    found |= {
        "costs/floor_ms": 1e3 * fit.floor_s,
        "costs/per_token_us": 1e6 * fit.token_s(context),
        "costs/fit_r2": fit.r2,
        "map/predicted_error": predicted_error(compared),
        "map/predicted_error_own": predicted_error(compared, "predicted_own"),
    }
    batches = break_even_batches(costs, accepted, context).set_index("gamma")
    return found, series | {
        "map/break_even_batch": batches["batch"].to_dict(),
        "tax/at_batch": taxes.set_index("batch")["tax"].to_dict(),
    }


# --- figures -------------------------------------------------------------------------------------


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
    said = f"{fit.floor_s * 1e3:.1f} ms and {fit.token_s(context) * 1e6:.0f} µs a token"
    poor = f"doubtful (R² {fit.r2:.2f}): was the machine busy?"
    return said if fit.r2 > DOUBTFUL else f"{said}, {poor}"


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


def break_even(
    costs: Costs,
    samples: pd.DataFrame,
    contexts: Sequence[int] | None = None,
    compared: pd.DataFrame | None = None,
) -> Figure:
    """Predicted speedup over batch and draft length at the acceptance of `samples`, one panel a
    context; the solid line is where it is 1, the dotted ones its interval over prompts. Points:
    measured speedups from `compare`, in the panel of the nearest context and the same colours."""
    contexts = contexts or costs.contexts
    kept = one_pairing.pooled(samples).conditional
    maps = [_grid(costs, lambda b, g, c=c: costs.speedup(b, g, kept, c)) for c in contexts]
    seen = [] if compared is None else list(compared["speedup"])
    most = max(1.05, *(max(m.max(), 1 / m.min()) for m in maps), *(max(x, 1 / x) for x in seen))
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
    kept = one_pairing.pooled(samples).conditional
    places = [(b, g) for b in costs.batches for g in costs.gammas]
    batch, gamma = max(places, key=lambda at: costs.speedup(at[0], at[1], kept, context))
    line = break_even_batches(costs, samples, context)
    widest = line.loc[line["batch"].idxmax()]
    if not gamma or widest["batch"] == 0:
        return f"{costs.about['drafter']}: predicted to pay at no batch, {context} slots"
    best = costs.speedup(batch, gamma, kept, context)
    last = f"batch {widest['batch']:.0f} [{widest['low']:.0f}, {widest['high']:.0f}]"
    if widest["low"] >= costs.batches[-1]:
        last = f"batch {costs.batches[-1]} or more"
    return (
        f"{costs.about['drafter']}, {context} slots: {best:.2f}x predicted at batch {batch} with "
        f"γ = {gamma}; pays up to {last} with γ = {widest['gamma']:.0f}"
    )


def break_even_alpha_map(costs: Costs, contexts: Sequence[int] | None = None) -> Figure:
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
            f"{costs.about['drafter']}: one guess pays from α = {cheap:.2f} at batch "
            f"{costs.batches[alphas.index(cheap)]}, and at batch {costs.batches[-1]} "
            + (f"from {dear:.2f}" if dear < 1 else "never"), x=0.01, ha="left",
        )  # fmt: skip
    return figure


def _axes(costs: Costs) -> tuple[np.ndarray, np.ndarray]:
    """Batches (evenly spaced in log) and draft lengths of a map."""
    first, last = costs.batches[0], costs.batches[-1]
    return np.geomspace(first, last, 97 if last > first else 1), np.arange(1, costs.gammas[-1] + 1)


def _grid(costs: Costs, value: Any) -> np.ndarray:
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
