"""The lesson of 00_lesson: rounds with the distributions behind them, as tables and figures.

`rounds` runs the engine's own round step by step and keeps p and q; everything timed comes from
`bench` and `turns`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import binomtest, chisquare
from torch import Tensor

from specexp import theory
from specexp.api import Pairing
from specexp.errors import UserError
from specexp.figures import tokens as look
from specexp.figures.pairings import (
    PLAIN,
    PREDICTED,
    SPECULATIVE,
    batch_axis,
    canvas,
    crossing,
    ends,
    panels,
)
from specexp.measure import interleave, one_pairing, statistics
from specexp.measure.hardware.roofline import CONTEXT, PASSES, a_pass
from specexp.measure.hardware.suites import TOKENS
from specexp.measure.prompts import Prompt
from specexp.sequences import Sequences
from specexp.tree import Tree

COLOURS = {"accepted": "#029e73", "rejected": "#d55e00", "discarded": "#bbbbbb",
           "corrected": "#ece133", "bonus": "#56b4e9"}  # fmt: skip
ROWS = 64  # copies of a position that are sampled in one pass
EXPECTED = 5  # tokens that a bin of the chi-square test should hold
LEAST = 1e-4  # a p-value below this is no coincidence


def insist(pairing: Pairing) -> None:
    """Raises UserError unless guesses are drawn from a distribution q at a temperature above 0."""
    if pairing.options["temperature"] == 0:
        raise UserError("the lesson is about sampling: use a temperature above 0, such as 1.0")
    if pairing.engine.rule.name != "reject":
        raise UserError(
            f"the lesson needs a drafter that draws its guesses from a distribution, and "
            f"{pairing.drafter} does not: use a draft model, such as sibling-3m"
        )


# --- one round by hand ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Snapshot:
    """One round of one row. context: all tokens before it; guesses: D tokens; p [D + 1, V] and
    q [D, V], float64: the target's and the drafter's distribution of the token after the context
    and the first 0, 1, ... guesses; accepted: how many guesses; emitted: the tokens gained."""

    context: list[int]
    guesses: list[int]
    p: np.ndarray
    q: np.ndarray
    accepted: int
    emitted: list[int]


@torch.inference_mode()
def rounds(pairing: Pairing, prompt: str, count: int) -> list[Snapshot]:
    """The first rounds of this prompt, `count` or until it ends: those of `pairing.generate`."""
    engine, [text] = pairing.engine, pairing.encode([prompt])
    tree = one_pairing.lone_tree(engine)
    seqs = Sequences.of(
        [text], count * len(tree), slack=engine.policy.widest, eos=engine.eos,
        device=engine.target.device,
    )  # fmt: skip
    seqs = engine.begin(seqs)
    found: list[Snapshot] = []
    while len(found) < count and bool(seqs.live.all()):
        draft = engine.drafter.propose(seqs, tree, engine.rng)
        seen = engine.target.verify(seqs, draft, engine.drafter.taps)
        law = engine.law(seen)
        verdict = engine.rule(draft, law, engine.rng)
        engine.drafter.observe(seqs, tree, verdict, seen)
        guesses = [token for token in draft.tokens[0, 1:].tolist() if token >= 0]
        p, q = (
            x[0, : len(guesses) + more].double().cpu().numpy()
            for x, more in ((law, 1), (cast(Tensor, draft.q), 0))
        )
        [[accepted, emitted, _]] = seqs.commit(verdict).tolist()
        new = verdict.new[0, :emitted].tolist()
        found.append(Snapshot(text, guesses, p, q, accepted, new))
        text = [*text, *new]
    return found


def judged(pairing: Pairing, found: Sequence[Snapshot]) -> pd.DataFrame:
    """One row per guess (`at` = 1, 2, ...) and for the token that ends a round: q and p of it,
    `chance` = min(1, p / q), and the outcome, a key of `COLOURS`. Guesses after a rejected one are
    discarded: their p belongs to a context that no longer exists."""
    rows = []
    for number, snap in enumerate(found, 1):
        n = snap.accepted
        for i, token in enumerate(snap.guesses):
            q, p = float(snap.q[i, token]), float(snap.p[i, token])
            outcome = "accepted" if i < n else "rejected" if i == n else "discarded"
            known = {"p": p, "chance": min(1.0, p / q)} if i <= n else {}
            rows.append({"round": number, "at": i + 1, "token": _named(pairing, token), "q": q}
                        | known | {"outcome": outcome})  # fmt: skip
        if len(snap.emitted) > n:
            last, whole = snap.emitted[n], n == len(snap.guesses)
            rows.append(
                {"round": number, "at": len(snap.guesses) + 1, "token": _named(pairing, last)}
                | {"p": float(snap.p[n, last]), "outcome": "bonus" if whole else "corrected"}
            )
    return pd.DataFrame(rows)


def by_hand(table: pd.DataFrame) -> Figure:
    """Rounds as lines of cells, from `judged`."""
    lines, columns = table["round"].nunique(), int(table["at"].max())
    width = max(1.9, table["token"].str.len().max() * 0.13)
    with canvas(width * columns + 1.1, lines + 0.8) as (figure, axes):
        axes.set(xlim=(0.5, columns + 0.5), ylim=(lines + 0.5, 0.5))
        for _, row in table.iterrows():
            x, y = row["at"], row["round"]
            axes.bar(x, 0.92, 0.96, y - 0.46, color=COLOURS[row["outcome"]], alpha=0.4)
            laws = "   ".join(f"{x} = {_short(row[x])}" for x in "qp" if pd.notna(row[x]))
            odds = f"min(1, p/q) = {_short(row['chance'])}" if pd.notna(row["chance"]) else ""
            for dy, said in ((-0.1, laws), (0.12, odds), (0.33, row["outcome"])):
                axes.text(x, y + dy, said, ha="center", va="center", fontsize=10)
            axes.text(x, y - 0.3, row["token"], ha="center", va="center", fontsize=11,
                      weight="bold", parse_math=False)  # fmt: skip
        axes.set_yticks(range(1, lines + 1), [f"round {n}" for n in range(1, lines + 1)])
        names = [f"guess {i}" for i in range(1, columns)]
        axes.set_xticks(range(1, columns + 1), [*names, "the target's token"])
        axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
        axes.grid(False)
        kept = int((table["outcome"] == "accepted").sum())
        tokens = kept + int(table["outcome"].isin(["corrected", "bonus"]).sum())
        figure.suptitle(f"{kept} of {int(table['q'].notna().sum())} guesses accepted: {tokens} "
                        f"tokens in {lines} target passes", x=0.01, ha="left")  # fmt: skip
    return figure


def _short(p: float) -> str:
    return f"{p:.2f}" if p >= 0.1 else f"{p:.2g}"


def _named(pairing: Pairing, token: int) -> str:
    """A token as a label: in quotes, since many begin with a space."""
    text = look.symbols(pairing.decode([token]))
    return f'"{text if len(text) <= 12 else text[:11] + "…"}"'


# --- why it is exact -----------------------------------------------------------------------------


class Position(NamedTuple):
    """A context and the distributions [V] of the next token: the target's p, the drafter's q."""

    context: list[int]
    p: np.ndarray
    q: np.ndarray


def telling(found: Sequence[Snapshot]) -> Position:
    """Of the positions of first guesses, the one whose overlap of p and q is closest to one half.
    (With some drafters q of a later guess would differ if a round began there.)"""
    places = [Position(snap.context, snap.p[0], snap.q[0]) for snap in found if snap.guesses]
    return min(places, key=lambda place: abs(theory.alpha_of(place.p, place.q) - 0.5))


def overlap(pairing: Pairing, place: Position, most: int = 8) -> pd.DataFrame:
    """p and q of the likeliest tokens and, in the last row (id -1), of all others together. Columns
    also: `shared` min(p, q), `residual` (p - q)+ and `excess` (q - p)+."""
    p, q = place.p, place.q
    top = np.argsort(-(p + q), kind="stable")[:most]
    top = top[np.argsort(-p[top], kind="stable")]
    every = pd.DataFrame(
        {"p": p, "q": q, "shared": np.minimum(p, q), "residual": np.maximum(p - q, 0),
         "excess": np.maximum(q - p, 0)}
    )  # fmt: skip
    named = every.loc[top].assign(id=top, token=[_named(pairing, int(token)) for token in top])
    others = every.drop(top).sum().to_dict() | {"id": -1, "token": f"{len(p) - len(top):,} others"}
    return pd.concat([named, pd.DataFrame([others])], ignore_index=True)


def overlap_bars(table: pd.DataFrame) -> Figure:
    """q and p side by side, divided into what they share and what they do not; from `overlap`."""
    x, alpha = np.arange(len(table)), table["shared"].sum()
    with canvas(10, 4.4) as (figure, axes):
        for dx, extra, name, label in (
            (-0.2, "excess", "rejected", "(q − p)+: guessed and rejected"),
            (0.2, "residual", "corrected", "(p − q)+: the residual, for corrections"),
        ):
            axes.bar(x + dx, table["shared"], 0.36, color=COLOURS["accepted"],
                     label="min(p, q): guessed and accepted" if dx < 0 else None)  # fmt: skip
            axes.bar(x + dx, table[extra], 0.36, table["shared"], color=COLOURS[name], label=label)
            for at, height in zip(x, table["shared"] + table[extra], strict=True):
                axes.text(at + dx, height, "q" if dx < 0 else "p", ha="center", va="bottom")
        _tokens(axes, table)
        axes.set(ylabel="probability of the next token")
        axes.legend()
        axes.set_title(f"A guess is accepted with probability Σ min(p, q) = {alpha:.0%}; "
                       f"the residual sums to the other {1 - alpha:.0%}")  # fmt: skip
    return figure


def _tokens(axes: Axes, table: pd.DataFrame) -> None:
    axes.set_xticks(range(len(table)), table["token"], rotation=20)
    axes.grid(axis="x", visible=False)
    for label in axes.get_xticklabels():
        label.set_parse_math(False)


@torch.inference_mode()
def first_tokens(pairing: Pairing, context: Sequence[int], count: int) -> pd.DataFrame:
    """Run `count` rounds of one guess from one position, each with noise of its own: the guess,
    whether it was accepted, and the first token emitted."""
    engine, B = pairing.with_(gamma=1).engine, min(count, ROWS)
    seqs = engine.begin(
        Sequences.of([context] * B, 1, slack=engine.policy.widest, device=engine.target.device)
    )
    changing = seqs.length, *engine.drafter.state
    before, parts = [x.clone() for x in changing], []
    for _ in range(0, count, B):
        for now, then in zip(changing, before, strict=True):
            now.copy_(then)  # a roll back to the same position
        steps = engine.steps(engine.report(seqs, Tree.chain(1)))
        emitted = seqs.tokens[:, len(context)].tolist()
        parts += [(s.guesses[0], s.accepted == 1, t) for s, t in zip(steps, emitted, strict=True)]
        seqs.stream.add_(B)
    return pd.DataFrame(parts[:count], columns=["guess", "accepted", "emitted"])


def fit(tokens: Sequence[int], p: np.ndarray) -> float:
    """The p-value of a chi-square test that tokens are drawn from p [V]. Tokens too rare to test
    one by one are counted together."""
    expected = len(tokens) * p / p.sum()
    order = np.argsort(-expected, kind="stable")
    seen, expected = np.bincount(tokens, minlength=len(p))[order], expected[order]
    bins = int((expected >= EXPECTED).sum())
    bins -= expected[bins:].sum() < EXPECTED  # too few are left for a bin of their own
    if bins < 1:
        return 1.0
    ours, theirs = ([*x[:bins], x[bins:].sum()] for x in (seen, expected))
    return float(chisquare(ours, theirs).pvalue)


def frequencies(draws: pd.DataFrame, table: pd.DataFrame, p: np.ndarray) -> Figure:
    """Frequencies of guesses and of emitted tokens against p; from `first_tokens` and `overlap`."""
    n, x = len(draws), np.arange(len(table))
    with canvas(10, 4.4) as (figure, axes):
        axes.bar(x, table["p"], 0.7, color=PLAIN, alpha=0.5, label="p: the target alone")
        for dx, column, style, colour, label in (
            (-0.15, "guess", "x", COLOURS["rejected"], "the draft's guesses"),
            (0.15, "emitted", "o", SPECULATIVE, "the tokens emitted"),
        ):
            seen = [int((draws[column] == token).sum()) for token in table["id"]]
            seen[-1] = n - sum(seen)
            ends = [binomtest(k, n).proportion_ci(method="wilson") for k in seen]
            share = np.array(seen) / n
            error = [share - [e.low for e in ends], [e.high for e in ends] - share]
            axes.errorbar(x + dx, share, np.maximum(error, 0), fmt=style, color=colour, capsize=3,
                          label=label)  # fmt: skip
        _tokens(axes, table)
        axes.set(ylabel=f"share of {n:,} first tokens")
        axes.legend()
        ours, theirs = fit(draws["emitted"], p), fit(draws["guess"], p)
        axes.set_title(
            f"The tokens emitted {'follow' if ours > LEAST else 'do NOT follow'} p; the guesses do "
            f"{'too' if theirs > LEAST else 'not'} (p-values {_short(ours)} and {_short(theirs)})"
        )
    return figure


# --- why it is fast ------------------------------------------------------------------------------


def passes(
    pairing: Pairing, prompts: Sequence[Prompt], tokens: Sequence[int] = TOKENS
) -> pd.DataFrame:
    """The time of a target pass over so many tokens of one row, also in passes over one token
    (`times`, with its interval)."""
    context = min(CONTEXT, pairing.target.context)
    tokens = [n for n in sorted({1, *tokens}) if n <= context // 2]
    ids = [token for row in pairing.encode([p.text for p in prompts]) for token in row]
    arms = {n: a_pass(pairing.target, ids, 1, n, context, tokens[-1]) for n in tokens}
    seen = interleave.take(arms, range(3 * PASSES), pairing.target.device, "passes", lead=1)
    times = {n: interleave.ratio(seen[n], seen[1]) for n in tokens}
    return pd.DataFrame(
        {"tokens": n, "ms": 1e3 * interleave.median_s(seen[n]), "times": t.value, "low": t.low,
         "high": t.high}
        for n, t in times.items()
    )  # fmt: skip


def price(passes: pd.DataFrame, costs: pd.DataFrame) -> Figure:
    """Left: a pass over n tokens, from `passes`. Right: drafting, from `bench.pass_costs`."""
    guesses, last = costs[costs["gamma"] > 0], passes.iloc[-1]
    drafting = guesses["draft_s"] / one_pairing.step_s(costs)
    with panels(2, 11.5, 4.2) as (figure, (left, right)):
        _curve(left, passes)
        left.errorbar(passes["tokens"], passes["times"], ends(passes, "times"), fmt="none",
                      ecolor=SPECULATIVE, capsize=3)  # fmt: skip
        left.plot(passes["tokens"], passes["tokens"], ":", color=PLAIN,
                  label="as many passes of one token")  # fmt: skip
        left.set_ylim(0.7, 1.4 * passes["tokens"].max())
        left.legend(loc="upper left")
        left.set_title(f"A pass over {last['tokens']:.0f} tokens: {last['times']:.1f}x the time "
                       "of one")  # fmt: skip
        right.plot(guesses["gamma"], drafting, "o-", color=PREDICTED)
        right.set(xlabel="draft length γ", ylabel="plain steps", ylim=(0, None))
        right.set_xticks(guesses["gamma"])
        right.set_title(f"A guess costs {drafting.sum() / guesses['gamma'].sum():.2f} plain steps")
    return figure


def _curve(axes: Axes, passes: pd.DataFrame) -> None:
    axes.plot(passes["tokens"], passes["times"], "o-", color=SPECULATIVE, label="one pass")
    batch_axis(axes, passes["tokens"])
    axes.set(xlabel="tokens in the pass", ylabel="time, pass over one token = 1")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")


def _speedups(axes: Axes, table: pd.DataFrame, by: str) -> None:
    """Speedups with intervals; one that is very wide, from a busy machine, is cut off."""
    axes.axhline(1, color=PLAIN, lw=1)
    axes.errorbar(table[by], table["speedup"], ends(table), fmt="o-",
                  color=SPECULATIVE, capsize=3, label="measured")  # fmt: skip
    top = max(1, table["speedup"].max())
    most = min(2 * top, max(top, table["high"].max()))
    axes.set(ylabel="speedup over plain decoding", ylim=(0, 1.1 * most))


def together(costs: pd.DataFrame, predicted: pd.DataFrame, measured: pd.DataFrame) -> Figure:
    """Left: tokens and cost of a round over draft length. Right: their quotient, and the measured
    speedup. From `bench.pass_costs`, `bench.predicted` and `bench.speedups(by="gamma")`."""
    best = measured.loc[measured["speedup"].idxmax()]
    found = statistics.Interval(best["speedup"], best["low"], best["high"])
    pays = predicted.loc[predicted["speedup"] > 1, "gamma"]
    with panels(2, 11.5, 4.2) as (figure, (left, right)):
        left.plot(predicted["gamma"], predicted["tokens"], "o-", color=COLOURS["accepted"],
                  label="tokens a round")  # fmt: skip
        left.plot(costs["gamma"], one_pairing.rounds_s(costs) / one_pairing.step_s(costs), "s-",
                  color=COLOURS["rejected"], label="cost of a round in plain steps")  # fmt: skip
        _speedups(right, measured, "gamma")
        right.plot(predicted["gamma"], predicted["speedup"], "s--", color=PREDICTED,
                   label="predicted: tokens / cost")  # fmt: skip
        right.plot(best["gamma"], best["speedup"], "*", ms=17, color=SPECULATIVE, label="best")
        for axes in (left, right):
            axes.set_xlabel("draft length γ")
            axes.set_xticks(predicted["gamma"])
            axes.legend()
        left.set(ylabel="tokens, or plain steps", ylim=(0, None))
        left.set_title(f"Predicted to pay at γ = {', '.join(map(str, pays)) or 'none of these'}")
        right.set_title(f"Best measured at γ = {best['gamma']:.0f}: {statistics.verdict(found)}")
    return figure


def tension(passes: pd.DataFrame, by_batch: pd.DataFrame, gamma: int) -> Figure:
    """Left: how far gamma guesses move a batch along the curve of `passes`; batches that would end
    beyond it are left out. Right: `bench.speedups(by="batch")`."""
    known = [int(b) for b in by_batch["batch"] if b * (gamma + 1) <= passes["tokens"].max()]
    with panels(2, 11.5, 4.2) as (figure, (left, right)):
        _curve(left, passes)
        for batch in known:
            tokens = [batch, batch * (gamma + 1)]
            start, end = np.interp(tokens, passes["tokens"], passes["times"])
            left.plot(tokens, [start, start], ":", color=PREDICTED)
            left.annotate("", (tokens[1], end), (tokens[1], start),
                          arrowprops={"arrowstyle": "->", "color": PREDICTED, "lw": 2})  # fmt: skip
            left.text(tokens[1], end, f"batch {batch}: {end / start:.1f}x  ", ha="right",
                      va="bottom")  # fmt: skip
        left.set_ylim(top=1.4 * passes["times"].max())
        left.set_title(f"How much longer {gamma} guesses a stream make a pass")
        _speedups(right, by_batch, "batch")
        batch_axis(right, by_batch["batch"])
        right.set_title(crossing(by_batch))
    return figure
