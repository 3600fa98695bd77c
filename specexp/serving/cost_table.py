"""The cost table: measured times of rounds on one machine, with interpolation.

Drafting is timed over (batch, gamma, context), the rest of a round over (batch, tokens per row,
context), prefill over the prompt's length. *Context* is the number of slots of the static buffers,
in which rows are of unequal length: some passes read all slots, compiled ones those of each row.
Policies, the simulator and the break-even maps ask the table what a round would take, thousands of
times a second: axes and values are kept as plain lists, which are faster to index than arrays.

How the table is measured is in measure/costs.py; choosing a draft length is up to its readers.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from specexp import theory
from specexp.errors import UserError
from specexp.zoo import files

AXES = {
    "verify": ("batches", "tokens", "contexts"),
    "draft": ("batches", "gammas", "contexts"),
    "prefill": ("lengths",),
    "catch_up": ("lengths",),
}

CALM = 8  # plain steps after a draft until its weights have left the caches: those are slower


@dataclass(frozen=True)
class Fit:
    """The time of a pass over n = batch * tokens as a floor and two slopes:
    floor_s + n * (per_token_s + context * per_slot_s), in seconds. `r2`: the share of the relative
    variation that this explains."""

    floor_s: float
    per_token_s: float
    per_slot_s: float
    r2: float

    @classmethod
    def of(cls, tokens: ArrayLike, context: ArrayLike, seconds: ArrayLike) -> Fit:
        """Non-negative least squares on relative errors. Arrays of one shape: the tokens of all
        rows of a pass, its context and its seconds."""
        from scipy.optimize import nnls  # slow to import, and servers need no fit

        n, c, t = (np.asarray(x, float).ravel() for x in (tokens, context, seconds))
        columns = np.stack([np.ones_like(t), n, n * c], 1) / t[:, None]
        scale = columns.max(0)
        coefficients = nnls(columns / scale, np.ones_like(t))[0] / scale
        squares = ((columns @ coefficients - 1) ** 2).sum()
        mean = (1 / t).sum() / (1 / t**2).sum()
        spread = ((mean / t - 1) ** 2).sum()
        floor, token, slot = map(float, coefficients)
        return cls(floor, token, slot, float(1 - squares / spread) if spread > 1e-12 else 1.0)

    def pass_s(self, batch: float, tokens: float, context: float) -> float:
        return self.floor_s + batch * tokens * self.token_s(context)

    def token_s(self, context: float) -> float:
        """Seconds for one more token in the pass."""
        return self.per_token_s + context * self.per_slot_s

    def knee(self, context: float) -> float:
        """Tokens in a pass (batch * tokens a row) that cost as much as the floor: a larger pass is
        bound by arithmetic, a smaller one by reading the weights. inf without a slope."""
        slope = self.token_s(context)
        return self.floor_s / slope if slope else float("inf")


@dataclass(frozen=True, eq=False)
class Costs:
    """Tables of seconds over axes that rise strictly; `gammas` starts at 0.

    about: target, drafter, rule, dtype, device and sizes, plain values that JSON knows.
    draft [batch, gamma, context]: making the draft; 0 at gamma 0.
    verify [batch, tokens, context]: all else of a round, that is, the target pass, the rule, the
    commit and the copy of the result to the host.
    prefill [length]: the target's prefill of so many tokens of one row.
    catch_up [length]: the drafter's.

    Raises UserError for axes and tables that do not belong together.
    """

    about: dict[str, Any]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    verify: np.ndarray
    gammas: tuple[int, ...]
    draft: np.ndarray
    lengths: tuple[int, ...]
    prefill: np.ndarray
    catch_up: np.ndarray

    def __post_init__(self) -> None:
        if self.gammas[:1] != (0,):
            raise UserError(f"gammas {list(self.gammas)} must start at 0")
        for name in ("batches", "contexts", "gammas", "lengths"):
            axis = getattr(self, name)
            if not axis or any(b <= a for a, b in pairwise(axis)):
                raise UserError(f"{name} {list(axis)} must rise from point to point")
        for name, axes in AXES.items():
            table = getattr(self, name)
            shape = tuple(len(getattr(self, axis)) for axis in axes)
            if table.shape != shape:
                raise UserError(f"{name} has shape {table.shape}, not {shape} ({', '.join(axes)})")
            positive = table > 0 if name == "verify" else table >= 0
            if not (np.isfinite(table) & positive).all():
                raise UserError(f"{name} holds times that are not positive and finite")

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """Tokens fed a row: the draft tokens and the last committed one."""
        return tuple(1 + gamma for gamma in self.gammas)

    def verify_s(self, batch: float, tokens: float, context: float) -> float:
        """All of a round but drafting, `tokens` a row. Linear between the points and beyond the
        last, where it never falls; constant before the first."""
        return self._read("verify", batch, tokens, context)

    def draft_s(self, batch: float, gamma: float, context: float) -> float:
        """Drafting gamma tokens a row."""
        return self._read("draft", batch, gamma, context)

    def step_s(self, batch: float, context: float) -> float:
        """A plain step, without a draft."""
        return self.verify_s(batch, 1, context)

    def round_s(
        self, batch: float, gamma: int, context: float, drafted: float | None = None,
        drafting: float | None = None,
    ) -> float:  # fmt: skip
        """A round of gamma draft tokens a row; gamma 0 is a plain step, without the drafter.
        drafted: draft tokens of all rows that are verified, by default all of them; drafting: rows
        for which the drafter drafts, by default all."""
        rows = batch if drafting is None else drafting
        draft_s = self.draft_s(rows, gamma, context) if gamma else 0.0
        tokens = 1 + (gamma if drafted is None else drafted / batch)
        return draft_s + self.verify_s(batch, tokens, context)

    def upto(self, deepest: int) -> Costs:
        """This table without longer drafts than that."""
        n = sum(gamma <= deepest for gamma in self.gammas)
        return replace(self, gammas=self.gammas[:n], verify=self.verify[:, :n],
                       draft=self.draft[:, :n])  # fmt: skip

    @property
    def packs(self) -> bool:
        """Whether the target's passes leave out padding; otherwise it costs as much as tokens."""
        return self.about.get("passes") == "native"

    @property
    def reads(self) -> bool:
        """See `Drafter.reads`."""
        return bool(self.about.get("reads"))

    def plan_s(self, budget: Sequence[int], context: float) -> float:
        """Seconds of a round in which each row drafts its own number of tokens (-1: the row is not
        decoded). The drafter's time is that of its deepest row."""
        deepest = max(budget)
        if not self.packs:
            return self.round_s(len(budget), deepest, context)
        rows, drafted = sum(g >= 0 for g in budget), sum(g for g in budget if g > 0)
        return self.round_s(rows, deepest, context, drafted, sum(g > 0 for g in budget))

    def prefill_s(self, length: float) -> float:
        """The target's prefill of so many tokens."""
        return self._read("prefill", length)

    def catch_up_s(self, length: float) -> float:
        """The drafter's prefill of so many tokens."""
        return self._read("catch_up", length)

    def speedup(
        self, batch: float, gamma: int, conditional: Sequence[float], context: float
    ) -> float:
        """`theory.measured_speedup` of gamma draft tokens at this load. conditional[i]: P(token
        i + 1 of a draft accepted given that token i was); tokens beyond its end never are."""
        draft = self.draft_s(batch, gamma, context) if gamma else 0.0
        verify, step = self.verify_s(batch, 1 + gamma, context), self.step_s(batch, context)
        return theory.measured_speedup(conditional[:gamma], draft, verify, step)

    def at_drafted_share(self, share: float) -> Costs:
        """This table for a drafter that makes only this share of the planned draft tokens: fewer
        are cheaper to verify, if passes leave out padding."""
        if not self.packs:
            return self
        fed = [1 + share * (tokens - 1) for tokens in self.tokens]
        verify = [
            [[self.verify_s(b, n, c) for c in self.contexts] for n in fed] for b in self.batches
        ]
        return replace(self, verify=np.array(verify))

    def scaled(self, rounds: float, prefill: float) -> Costs:
        """This table with its times of rounds and of prefill multiplied: a machine may slow down in
        arithmetic and in reading memory by different factors."""
        by = {"verify": rounds, "draft": rounds, "prefill": prefill, "catch_up": prefill}
        return replace(self, **{name: getattr(self, name) * times for name, times in by.items()})

    def fit(self) -> Fit:
        """Floor and slopes of `verify`."""
        B, T, C = np.meshgrid(self.batches, self.tokens, self.contexts, indexing="ij")
        return Fit.of(B * T, C, self.verify)

    def save(self, path: str | Path) -> None:
        """Write one JSON file, whole or not at all. Raises UserError when that fails."""
        fields = {name: getattr(self, name) for name in self.__annotations__}
        files.write(Path(path), json.dumps(fields, default=np.ndarray.tolist))

    @classmethod
    def load(cls, path: str | Path) -> Costs:
        """Raises UserError when the file cannot be read or holds no cost table."""
        try:
            kept = json.loads(Path(path).read_text())
            fields = {name: kept[name] for name in cls.__annotations__}
            for name in fields.keys() - {"about"}:
                value = fields[name]
                fields[name] = np.array(value, float) if name in AXES else tuple(map(int, value))
            return cls(**fields)
        except OSError as e:
            raise UserError(f"cannot read {path}: {e.strerror}; make it: specexp profile") from e
        except (ValueError, KeyError, TypeError, UserError) as e:
            raise UserError(
                f"{path} holds no cost table ({type(e).__name__}: {e}); delete it and measure "
                "again: specexp profile"
            ) from e

    @cached_property
    def _lists(self) -> dict[str, Any]:
        return {
            name: (tuple(getattr(self, axis) for axis in axes), getattr(self, name).tolist())
            for name, axes in AXES.items()
        }

    def _read(self, name: str, *point: float) -> float:
        axes, values = self._lists[name]
        return _at(values, list(map(_span, axes, point)))


def _at(values: Any, spans: Sequence[tuple[int, int, float]]) -> float:
    """Linear interpolation in nested lists, axis by axis."""
    (i, i1, w), *rest = spans
    a, b = values[i], values[i1]
    return _between(_at(a, rest), _at(b, rest), w) if rest else _between(a, b, w)


def _span(axis: tuple[int, ...], x: float) -> tuple[int, int, float]:
    """Indices of the points around x, and how far x lies from the first to the second: more than 1
    past the end."""
    last = len(axis) - 1
    if x <= axis[0] or not last:
        return 0, 0, 0.0
    i = min(bisect_right(axis, x), last)
    low = axis[i - 1]
    return i - 1, i, (x - low) / (axis[i] - low)


def _between(a: float, b: float, w: float) -> float:
    """From a (w = 0) to b (w = 1) linearly; past b never falling."""
    return b if w >= 1 and b <= a else a * (1 - w) + b * w
