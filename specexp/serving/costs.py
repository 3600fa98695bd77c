"""The cost table: measured times of rounds on this machine, with interpolation.

Drafting is timed over (batch, gamma, context), all else of a round over (batch, tokens a row,
context), prefill over the prompt's length. *Context* is the number of slots of the static buffers,
in which rows are of unequal length: some passes read all slots, compiled ones those of each row.
Policies, the simulator and the break-even maps ask the table what a round would take, thousands of
times a second: axes and values are kept as plain lists, which are faster to index than arrays.

This file does not know which draft length is best, nor how many guesses will be accepted.
"""

from __future__ import annotations

import json
import os
import platform
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle, islice, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from specexp import theory
from specexp.engine import Engine
from specexp.errors import UserError
from specexp.fast import cpu
from specexp.models.int8 import held
from specexp.sequences import Draft, Sequences
from specexp.tree import Tree

AXES = {
    "verify": ("batches", "tokens", "contexts"),
    "draft": ("batches", "gammas", "contexts"),
    "prefill": ("lengths",),
    "catch_up": ("lengths",),
}


FULL = 8  # a batch of n < FULL is timed FULL // n times as often: short passes are easily disturbed
BLOCK = 8  # rounds timed at one draft length before the next length takes its turn
LEAD = 4  # rounds before them that are not timed, until the CPU's caches hold what such rounds use;
CALM = 8  # of plain steps more, since a drafter's weights leave the caches slowly


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
        n, c, t = (np.asarray(x, float).ravel() for x in (tokens, context, seconds))
        columns = np.stack([np.ones_like(t), n, n * c], 1) / t[:, None]
        found = _non_negative(columns, np.ones_like(t))
        off = ((columns @ found - 1) ** 2).sum()
        mean = (1 / t).sum() / (1 / t**2).sum()
        spread = ((mean / t - 1) ** 2).sum()
        floor, token, slot = map(float, found)
        return cls(floor, token, slot, float(1 - off / spread) if spread > 1e-12 else 1.0)

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
    """Tables of seconds over axes that rise strictly; `tokens` (fed a row, gamma + 1) starts at 1
    and `gammas` at 0.

    about: target, drafter, rule, dtype, device and sizes, plain values that JSON knows.
    draft [batch, gamma, context]: making the guesses; 0 at gamma 0.
    verify [batch, tokens, context]: all else of a round, that is, the target pass, the rule, the
    commit and the copy of the result to the host.
    prefill [length]: the target's prefill of so many tokens of one row.
    catch_up [length]: the drafter's.

    Raises UserError for axes and tables that do not belong together.
    """

    about: dict[str, Any]
    batches: tuple[int, ...]
    tokens: tuple[int, ...]
    contexts: tuple[int, ...]
    verify: np.ndarray
    gammas: tuple[int, ...]
    draft: np.ndarray
    lengths: tuple[int, ...]
    prefill: np.ndarray
    catch_up: np.ndarray

    def __post_init__(self) -> None:
        for name, first in {"tokens": 1, "gammas": 0}.items():
            if getattr(self, name)[:1] != (first,):
                raise UserError(f"{name} {list(getattr(self, name))} must start at {first}")
        for name in ("batches", "tokens", "contexts", "gammas", "lengths"):
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

    def verify_s(self, batch: float, tokens: float, context: float) -> float:
        """All of a round but drafting, `tokens` a row. Linear between the points and beyond the
        last, where it never falls; constant before the first."""
        return _read(self._lists["verify"], batch, tokens, context)

    def draft_s(self, batch: float, gamma: float, context: float) -> float:
        """Drafting gamma guesses a row."""
        return _read(self._lists["draft"], batch, gamma, context)

    def step_s(self, batch: float, context: float) -> float:
        """A plain step, without guesses."""
        return self.verify_s(batch, 1, context)

    def round_s(self, batch: float, gamma: float, context: float) -> float:
        """A round of gamma guesses a row; gamma 0 is a plain step, without the drafter."""
        if gamma == 0:
            return self.step_s(batch, context)
        return self.draft_s(batch, gamma, context) + self.verify_s(batch, gamma + 1, context)

    def upto(self, deepest: int) -> Costs:
        """This table without longer drafts than that."""
        n = sum(tokens <= 1 + deepest for tokens in self.tokens)
        m = sum(gamma <= deepest for gamma in self.gammas)
        return replace(self, tokens=self.tokens[:n], verify=self.verify[:, :n],
                       gammas=self.gammas[:m], draft=self.draft[:, :m])  # fmt: skip

    @property
    def packs(self) -> bool:
        """Whether the target's passes leave out padding; if not, it costs what guesses cost."""
        return self.about.get("passes") == "native"

    @property
    def grades(self) -> int:
        """See `Drafter.grades`."""
        return int(self.about.get("grades", 1))

    @property
    def reads(self) -> bool:
        """See `Drafter.reads`."""
        return bool(self.about.get("reads"))

    def level_s(self, rows: float, depth: int, context: float) -> float:
        """Drafting from depth - 1 to `depth`, by so many rows."""
        before = self.draft_s(rows, depth - 1, context) if depth > 1 else 0.0
        return max(0.0, self.draft_s(rows, depth, context) - before)

    def plan_s(self, budget: Sequence[int], context: float) -> float:
        """A round in which each row has a draft length of its own; -1: it is not decoded."""
        deepest = max(budget)
        rows = sum(g >= 0 for g in budget) if self.packs else len(budget)
        if not self.packs or min(budget) == deepest:
            return self.round_s(rows, deepest, context)
        guesses = sum(g for g in budget if g > 0)
        levels = ((sum(g >= d for g in budget), d) for d in range(1, deepest + 1))
        drafting = sum(self.level_s(n, d, context) for n, d in levels)
        return drafting + self.verify_s(rows, 1 + guesses / rows, context)

    def prefill_s(self, length: float) -> float:
        """The target's prefill of so many tokens."""
        return _line(self.lengths, self._lists["prefill"][1], length)

    def catch_up_s(self, length: float) -> float:
        """The drafter's prefill of so many tokens."""
        return _line(self.lengths, self._lists["catch_up"][1], length)

    def speedup(
        self, batch: float, gamma: int, conditional: Sequence[float], context: float
    ) -> float:
        """`theory.measured_speedup` of gamma guesses at this load. conditional[i]: P(guess i + 1
        accepted given that guess i was); guesses beyond its end are never accepted."""
        if gamma == 0:
            return 1.0
        kept = [*conditional[:gamma], *[0.0] * (gamma - len(conditional))]
        return theory.measured_speedup(
            kept,
            self.draft_s(batch, gamma, context),
            self.verify_s(batch, gamma + 1, context),
            self.step_s(batch, context),
        )

    def sparing(self, made: float) -> Costs:
        """This table for a drafter that makes only this share of its guesses: cheaper to verify
        where passes leave out padding."""
        if not self.packs:
            return self
        fed = [1 + made * (tokens - 1) for tokens in self.tokens]
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
        kept = {name: getattr(self, name) for name in self.__annotations__}
        write_whole(path, json.dumps(kept, default=np.ndarray.tolist))

    @classmethod
    def load(cls, path: str | Path) -> Costs:
        """Raises UserError when the file cannot be read or holds no cost table."""
        try:
            kept = json.loads(Path(path).read_text())
            for name in cls.__annotations__:
                if name in AXES:
                    kept[name] = np.array(kept[name], float)
                elif name != "about":
                    kept[name] = tuple(int(x) for x in kept[name])
            return cls(**kept)
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


def write_whole(path: str | Path, text: str) -> None:
    """Write a file whole or not at all. Raises UserError when that fails."""
    path = Path(path)
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(text)
        fresh.replace(path)
    except OSError as e:
        raise UserError(f"cannot write {path}: {e.strerror}; choose another place") from e


def _read(table: tuple[Any, Any], x: float, y: float, z: float) -> float:
    """Trilinear interpolation."""
    (xs, ys, zs), values = table
    (i, i1, u), (j, j1, v), (k, k1, w) = _span(xs, x), _span(ys, y), _span(zs, z)

    def at(plane: list[list[float]]) -> float:
        a, b = plane[j], plane[j1]
        return _between(_between(a[k], a[k1], w), _between(b[k], b[k1], w), v)

    return _between(at(values[i]), at(values[i1]), u)


def _line(axis: tuple[int, ...], values: list[float], x: float) -> float:
    i, i1, u = _span(axis, x)
    return _between(values[i], values[i1], u)


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
    """Linear from a to b; past b (w > 1) never falling."""
    return b if w >= 1 and b <= a else a * (1 - w) + b * w


def _non_negative(A: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The x >= 0 that minimises |A x - b|, by trying all subsets of the (few) columns."""
    best, least = np.zeros(A.shape[1]), float(b @ b)
    for chosen in product((False, True), repeat=A.shape[1]):
        x = np.zeros(A.shape[1])
        x[list(chosen)] = np.linalg.lstsq(A[:, chosen], b, rcond=None)[0]
        off = float(((A @ x - b) ** 2).sum())
        if (x >= 0).all() and off < least:
            best, least = x, off
    return best


# --- measuring -----------------------------------------------------------------------------------


def fingerprint(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """What times depend on besides the models: device, torch, threads, dtype."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{platform.machine()} {cpu.vectors()}, {os.cpu_count()} cores"
    return {
        "device": name, "torch": torch.__version__, "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
    }  # fmt: skip


def about(engine: Engine) -> dict[str, Any]:
    """`Costs.about` of a table of this engine."""
    target = engine.target
    weights = {p.data_ptr(): p for p in held(target.module.parameters())}.values()
    return {
        "target": target.name, "drafter": engine.drafter.name, "rule": engine.rule.name,
        "temperature": engine.sampling.temperature, "parameters": target.parameters,
        "weight_bytes": sum(p.numel() * p.element_size() for p in weights),
        "grades": engine.drafter.grades, "reads": engine.drafter.reads,
        "passes": type(target.net).__name__.lower(),
        "rounds": "replayed" if engine.recordings else "run",
        **fingerprint(target.device, target.dtype),
    }  # fmt: skip


def measure(
    engine: Engine,
    ids: Sequence[Sequence[int]],
    batches: Sequence[int],
    gammas: Sequence[int],
    contexts: Sequence[int],
    repeats: int = 5,
    watch: Callable[[int, int], None] | None = None,
) -> Costs:
    """Time every setting after a warm-up that includes graph capture. Times are the lower quartile
    of `repeats` (more at small batches, see FULL), since disturbances only ever add time.

    ids: token ids, strung together and cut into rows; the longest row of a batch fills its buffer,
    the shortest half of it, as among requests that come and go. Rounds of a kind are timed in
    blocks, as they follow each other in use: a plain step right after a draft finds less of its
    weights in the caches. Draft lengths take turns, and the grid is walked forwards, then
    backwards, so that a machine that is slow for a while does not look like a slope. `watch` is
    told how many settings are done, and of how many. Raises UserError for settings that fit no
    buffer.
    """
    batches, gammas, contexts = (sorted(set(x)) for x in (batches, [0, *gammas], contexts))
    _check(engine, ids, batches, gammas, contexts, repeats)
    engine = _Unpadded.of(engine)
    slack = gammas[-1] + 1
    room = contexts[-1] - slack - 1
    lengths = [*(2**i for i in range(room.bit_length()) if 2**i < room), room]
    text = list(islice(cycle(t for row in ids for t in row), contexts[-1] * batches[-1]))

    def rows(batch: int, length: int, context: int) -> Sequences:
        sizes = [length - i * length // (2 * batch) for i in range(batch)]
        prompts = [text[i * length :][:size] for i, size in enumerate(sizes)]
        new = context - slack - length
        return Sequences.of(prompts, new, slack=slack, device=engine.target.device)

    lead = {gamma: max(LEAD if gamma else CALM, 1 + engine.warm) for gamma in gammas}
    places = list(product(batches, contexts))
    rounds: dict[Any, list[tuple[float, float]]] = {
        p: [] for p in product(batches, gammas, contexts)
    }
    reads: dict[Any, list[tuple[float, float]]] = {n: [] for n in lengths}
    for way, times in ((1, (repeats + 1) // 2), (-1, repeats // 2)):
        for at, (batch, context) in enumerate(places[::way], 1):
            seqs = rows(batch, room + context - contexts[-1], context)
            engine.allocate(*seqs.tokens.shape)
            _prefill(engine, seqs)
            count = times * max(1, FULL // batch)
            for turn, done in enumerate(range(0, count, BLOCK)):
                few = min(BLOCK, count - done)
                for gamma in gammas[:: way * (-1) ** turn]:
                    tree, before = Tree.chain(gamma), lead[gamma]
                    turns = [_round(engine, seqs, tree) for _ in range(before + few)]
                    rounds[batch, gamma, context] += turns[before:]
            if watch:
                watch(at + (way < 0) * len(places), 2 * len(places))
        engine.allocate(1, contexts[-1])
        for repeat in range(times + 1):
            for n in lengths[:: way * (-1) ** repeat]:
                took = _prefill(engine, rows(1, n + 1, contexts[-1]))
                reads[n] += [took] if repeat else []
    draft, whole = _quartiles(rounds, len(batches), len(gammas), len(contexts))
    prefill, catch_up = _quartiles(reads, len(lengths))
    tokens = (g + 1 for g in gammas)
    return Costs(
        about(engine), tuple(batches), tuple(tokens), tuple(contexts),
        np.maximum(whole - draft, 1e-9), tuple(gammas), draft, tuple(lengths), prefill, catch_up,
    )  # fmt: skip


def _quartiles(times: dict[Any, list[tuple[float, float]]], *shape: int) -> np.ndarray:
    """Lower quartiles [2, *shape] of both times, the keys being in order."""
    found = [np.quantile(took, 0.25, axis=0) for took in times.values()]
    return np.array(found).T.reshape(2, *shape)


def _check(
    engine: Engine, ids: Sequence[Sequence[int]], batches: list[int], gammas: list[int],
    contexts: list[int], repeats: int,
) -> None:  # fmt: skip
    for name, values, least in (
        ("batch", batches, 1), ("gamma", gammas, 0), ("context", contexts, gammas[-1] + 4),
        ("repeats", [repeats], 1),
    ):  # fmt: skip
        if not values or values[0] < least:
            given = values[0] if values else "missing"
            raise UserError(f"{name} is {given}; to measure costs it must be {least} or more")
    for model, needed, instead in (
        (engine.target, True, ""), (engine.drafter, gammas[-1] > 0, ", or gamma 0 alone"),
    ):  # fmt: skip
        if needed and contexts[-1] > model.context:
            raise UserError(
                f"context {contexts[-1]} exceeds the {model.context} tokens that {model.name} "
                f"serves; measure shorter ones{instead}"
            )
    if not any(ids):
        raise UserError("no prompt to measure costs on; give at least one token")


class _Unpadded(Engine):
    """An engine whose padding is replaced by tokens, so that every guess asked for is verified and
    timed, also where passes leave out padding."""

    @classmethod
    def of(cls, engine: Engine) -> _Unpadded:
        made = cls.__new__(cls)
        vars(made).update(vars(engine))
        return made

    def _guesses(self, seqs: Sequences, tree: Tree) -> Draft:
        draft = super()._guesses(seqs, tree)
        return replace(draft, tokens=_at_least(0, draft.tokens))


def _at_least(least: int, x: Tensor) -> Tensor:
    if code := cpu.by(x):
        made = torch.empty(x.shape, dtype=torch.int64)
        code.at_least(x.numel(), least, x, made)
        return made
    return x.clamp(min=least)


@torch.inference_mode()
def _prefill(engine: Engine, seqs: Sequences) -> tuple[float, float]:
    """Prefill; seconds of the target and of the drafter."""
    known = int(seqs.length.max()) - 1
    now = [_clock(engine)]
    hidden = engine.target.prefill(seqs, 0, known, engine.drafter.taps)
    now.append(_clock(engine))
    engine.drafter.prefill(seqs, hidden)
    engine.drafter.catch_up(seqs, known)
    now.append(_clock(engine))
    return now[1] - now[0], now[2] - now[1]


@torch.inference_mode()
def _round(engine: Engine, seqs: Sequences, tree: Tree) -> tuple[float, float]:
    """A round, undone afterwards; seconds to draft, and of all of it. Both are timed right after a
    whole round, as in use: a drafter that has just drafted finds its weights in the caches."""
    length, limit = seqs.length.clone(), seqs.limit.clone()

    def took(call: Callable[[Sequences, Tree], Any]) -> float:
        begin = _clock(engine)
        call(seqs, tree)
        seconds = _clock(engine) - begin
        seqs.length.copy_(length)
        seqs.limit.copy_(limit)
        return seconds

    if tree.depth:
        took(engine.report)
    whole = took(engine.report)
    return took(engine.drafted) if tree.depth else 0.0, whole


def _clock(engine: Engine) -> float:
    if engine.target.device.type == "cuda":
        torch.cuda.synchronize(engine.target.device)
    return time.perf_counter()
