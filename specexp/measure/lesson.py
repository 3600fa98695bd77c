"""The lesson of 00_lesson: rounds with the distributions behind them, as tables.

`rounds` runs the engine's own round step by step and keeps p and q; everything timed comes from
`one_pairing` and `interleave`. `figures.lesson` draws the tables.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, cast

import numpy as np
import pandas as pd
import torch
from scipy.stats import binomtest, chisquare
from torch import Tensor

from specexp import theory
from specexp.api import Pairing
from specexp.errors import UserError
from specexp.measure import interleave
from specexp.measure.hardware.roofline import CONTEXT, PASSES, a_pass
from specexp.measure.one_pairing import in_stages
from specexp.measure.prompts import SHIPPED, Prompt
from specexp.policy import single_stream_tree
from specexp.rules import drawn_from
from specexp.sequences import Sequences
from specexp.serving.cost_table import Costs
from specexp.tree import Tree

TOKENS = (1, 2, 4, 8, 16, 32, 64)  # of a pass
ROWS = 64  # copies of a position that are sampled in one pass
SHOWN = 8  # tokens of a distribution
EXPECTED = 5  # tokens that a bin of the chi-square test should hold
SIGNIFICANCE = 1e-4  # a p-value below this is no coincidence


def insist(pairing: Pairing) -> None:
    """Raises UserError unless draft tokens are drawn from a distribution q, at a temperature above
    0."""
    if pairing.options["temperature"] == 0:
        raise UserError("the lesson is about sampling: use a temperature above 0, such as 1.0")
    if pairing.engine.rule.name != "reject":
        raise UserError(
            f"the lesson needs a drafter that draws its tokens from a distribution, and "
            f"{pairing.drafter} does not: use a draft model, such as sibling-3m"
        )


# --- one round by hand ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Snapshot:
    """One round of one row. context: all tokens before it; draft: its D tokens; p [D + 1, V] and
    q [D, V], float64: the target's and the drafter's distribution of the token after the context
    and the first 0, 1, ... draft tokens; accepted: how many of them; emitted: the tokens gained."""

    context: list[int]
    draft: list[int]
    p: np.ndarray
    q: np.ndarray
    accepted: int
    emitted: list[int]


@torch.inference_mode()
def rounds(pairing: Pairing, prompt: str, count: int) -> list[Snapshot]:
    """The first rounds of this prompt, `count` or until it ends: those of `pairing.generate`.
    Raises UserError if it is too long for the drafter."""
    engine, [text] = pairing.engine, pairing.encode([prompt])
    stages = in_stages(engine, text, count * len(single_stream_tree(engine.policy)), engine.eos)
    snapshots: list[Snapshot] = []
    for draft, seen, verdict, step in islice(stages, count):
        if draft.tokens.shape[1] == 1:  # the text is longer than the drafter reads
            break
        drafted = [token for token in draft.tokens[0, 1:].tolist() if token >= 0]
        gamma, law = len(drafted), engine.law(seen)
        at = draft.tokens[:, 1 : gamma + 1, None]
        own = drawn_from(cast(Tensor, draft.q)[:, :gamma], law[:, :gamma], at)
        p, q = (x[0].double().cpu().numpy() for x in (law[:, : gamma + 1], own))
        new = verdict.new[0, : step.emitted].tolist()
        snapshots.append(Snapshot(text, drafted, p, q, step.accepted, new))
        text = [*text, *new]
    if not snapshots:
        raise UserError(f"the first prompt is longer than {pairing.drafter} reads: use another")
    return snapshots


def outcomes(pairing: Pairing, snapshots: Sequence[Snapshot]) -> pd.DataFrame:
    """What became of every draft token, and the token that ended each round.

    One row a token, with columns round and at (both from 1), token (its text), q and p of it,
    chance = min(1, p / q), and outcome: accepted, rejected, discarded, corrected or bonus. Tokens
    after a rejected one are discarded: their p belongs to a context that no longer exists."""
    rows = []
    for number, snap in enumerate(snapshots, 1):
        n = snap.accepted
        for i, token in enumerate(snap.draft):
            q, p = float(snap.q[i, token]), float(snap.p[i, token])
            outcome = "accepted" if i < n else "rejected" if i == n else "discarded"
            decided = {"p": p, "chance": min(1.0, p / q)} if i <= n else {}
            rows.append({"round": number, "at": i + 1, "token": pairing.decode([token]), "q": q}
                        | decided | {"outcome": outcome})  # fmt: skip
        if len(snap.emitted) > n:
            last, whole = snap.emitted[n], n == len(snap.draft)
            rows.append(
                {"round": number, "at": len(snap.draft) + 1, "token": pairing.decode([last])}
                | {"p": float(snap.p[n, last]), "outcome": "bonus" if whole else "corrected"}
            )
    return pd.DataFrame(rows)


# --- why it is exact -----------------------------------------------------------------------------


class Position(NamedTuple):
    """A context and the distributions [V] of the next token: the target's p, the drafter's q."""

    context: list[int]
    p: np.ndarray
    q: np.ndarray


def pick_position(snapshots: Sequence[Snapshot]) -> Position:
    """Of the positions of first draft tokens, the one whose overlap of p and q is closest to one
    half. (With some drafters q of a later token would differ if a round began there.)"""
    positions = [Position(snap.context, snap.p[0], snap.q[0]) for snap in snapshots if snap.draft]
    return min(positions, key=lambda position: abs(theory.alpha_of(position.p, position.q) - 0.5))


def overlap(pairing: Pairing, position: Position) -> pd.DataFrame:
    """p and q of the likeliest tokens and, in the last row (id -1), of all others together.

    One row a token, with columns p, q, shared min(p, q), residual (p - q)+, excess (q - p)+, id and
    token (its text)."""
    p, q = position.p, position.q
    top = np.argsort(-(p + q), kind="stable")[:SHOWN]
    top = top[np.argsort(-p[top], kind="stable")]
    every = pd.DataFrame(
        {"p": p, "q": q, "shared": np.minimum(p, q), "residual": np.maximum(p - q, 0),
         "excess": np.maximum(q - p, 0)}
    )  # fmt: skip
    named = every.loc[top].assign(id=top, token=[pairing.decode([int(token)]) for token in top])
    others = every.drop(top).sum().to_dict() | {"id": -1, "token": f"{len(p) - len(top):,} others"}
    return pd.concat([named, pd.DataFrame([others])], ignore_index=True)


@torch.inference_mode()
def first_tokens(pairing: Pairing, context: Sequence[int], count: int) -> pd.DataFrame:
    """Run `count` rounds of one draft token from one position, each with noise of its own. One row
    a round, with columns drafted (the draft token), accepted (bool) and emitted (the first token
    emitted)."""
    engine, B = pairing.with_(gamma=1).engine, min(count, ROWS)
    seqs = engine.begin(
        Sequences.of([context] * B, 1, slack=engine.policy.widest, device=engine.target.device)
    )
    changing = seqs.length, *engine.drafter.state
    before, parts = [x.clone() for x in changing], []
    for _ in range(0, count, B):
        for now, then in zip(changing, before, strict=True):
            now.copy_(then)  # a roll back to the same position
        steps = engine.run(seqs, Tree.chain(1))
        emitted = seqs.tokens[:, len(context)].tolist()
        parts += [(s.draft[0], s.accepted == 1, t) for s, t in zip(steps, emitted, strict=True)]
        seqs.stream.add_(B)
    return pd.DataFrame(parts[:count], columns=["drafted", "accepted", "emitted"])


def fit(tokens: Sequence[int], p: np.ndarray) -> float:
    """The p-value of a chi-square test that tokens are drawn from p [V]. Tokens too rare to test
    one by one are counted together; if one alone is frequent, the test is a binomial one."""
    expected = len(tokens) * p / p.sum()
    order = np.argsort(-expected, kind="stable")
    counts, expected = np.bincount(tokens, minlength=len(p))[order], expected[order]
    bins = int((expected >= EXPECTED).sum())
    bins -= expected[bins:].sum() < EXPECTED  # too few are left for a bin of their own
    if bins < 1:
        return float(binomtest(counts[0], len(tokens), min(1.0, p[order[0]] / p.sum())).pvalue)
    ours, theirs = ([*x[:bins], x[bins:].sum()] for x in (counts, expected))
    return float(chisquare(ours, theirs).pvalue)


# --- why it is fast ------------------------------------------------------------------------------


def passes(
    pairing: Pairing, prompts: Sequence[Prompt], tokens: Sequence[int] = TOKENS
) -> pd.DataFrame:
    """The time of a target forward pass over so many tokens of one row. One row a number of tokens
    that fits the context, with columns tokens, ms, and times (passes over one token) with its
    interval low, high over turns."""
    context = min(CONTEXT, pairing.target.context)
    tokens = [n for n in sorted({1, *tokens}) if n <= context // 2]
    ids = [token for row in pairing.encode([p.text for p in prompts]) for token in row]
    arms = {n: a_pass(pairing.target, ids, 1, n, context, tokens[-1]) for n in tokens}
    device = pairing.target.device
    turns = interleave.time_in_turns(arms, range(3 * PASSES), device, "passes", lead=1)
    times = {n: interleave.ratio(turns[n], turns[1]) for n in tokens}
    return pd.DataFrame(
        {"tokens": n, "ms": 1e3 * interleave.median_s(turns[n])} | t.columns("times")
        for n, t in times.items()
    )


# --- when it pays --------------------------------------------------------------------------------


def shipped_costs() -> Costs:
    """The times of rounds of target-10m with sibling-3m that data/measurements holds."""
    file = json.loads((SHIPPED.parent / "measurements" / "load_aware.json").read_text())
    costs = file["costs"]
    none = np.zeros(1)
    return Costs(
        file["about"], tuple(costs["batches"]), tuple(costs["contexts"]),
        np.array(costs["verify_ms"]) / 1e3, tuple(costs["gammas"]),
        np.array(costs["draft_ms"]) / 1e3, (1,), none, none,
    )  # fmt: skip
