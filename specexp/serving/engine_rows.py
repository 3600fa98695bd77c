"""Rows over an engine: requests enter, are prefilled, decoded and leave; memory stays allocated.

A pass covers a window: the rows in use, and as many slots as their sequences need. Captured rounds
also cover free rows, so that only a few sizes need capturing. The round is the engine's. All
decisions are made in server.py; simulated_rows.py has rows with the same interface that run no
model.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import torch

from specexp.drafters import named, warn_of_short_context
from specexp.engine import Engine
from specexp.errors import UserError, first_line, ran_out
from specexp.models.lm import LM
from specexp.sequences import Sequences
from specexp.trace import Step
from specexp.tree import Tree

log = logging.getLogger(__name__)

SLOTS = 64  # windows grow by this many slots, so that there are few shapes


def window(need: int, slots: int) -> int:
    """Slots that a pass covers if it needs so many of a row's `slots`."""
    return min(slots, -(-need // SLOTS) * SLOTS)


def bucket(rows: int) -> int:
    """Rows that a captured round covers for so many in use: 1, 2, 4, 8, 16, 24, 32, ..."""
    return 1 << (rows - 1).bit_length() if rows < 8 else -(-rows // 8) * 8


class Stopwatch:
    """A clock that runs inside `with` and skips waiting, so that several servers can share a
    machine by turns, each with a time of its own."""

    def __init__(self, device: torch.device) -> None:
        self.passed, self.since, self.running, self.device = 0.0, 0.0, False, device

    def clock(self) -> float:
        return self.passed + (time.perf_counter() - self.since if self.running else 0.0)

    def settle(self) -> None:
        """Wait until a GPU has done all that was launched: a pass over a prompt would otherwise
        take its time from the round that follows."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def wait(self, until: float) -> None:
        self.passed += max(0.0, until - self.clock())

    def __enter__(self) -> None:
        self.since, self.running = time.perf_counter(), True

    def __exit__(self, *raised: object) -> None:
        self.passed, self.running = self.clock(), False


class OutOfMemory(Exception):
    """A pass did not fit in memory; the rows are as they were before it."""


@contextmanager
def passes() -> Iterator[None]:
    """Around passes: no gradients, and whatever an allocator raises when memory is short becomes
    OutOfMemory."""
    try:
        with torch.inference_mode():
            yield
    except RuntimeError as e:
        if not (isinstance(e, torch.OutOfMemoryError) or ran_out(str(e))):
            raise
        torch.cuda.empty_cache()
        raise OutOfMemory(first_line(e)) from e


class EngineRows:
    """Rows of `slots` slots each; fewer than `count` where those do not fit in memory. `slack`:
    slots kept free behind a sequence for a draft; `timer`: their clock, which stands still until
    it is entered; `desk`: a further row in which prompts are read where prefill is captured, for
    one row's captures serve no other (0: there is none). Raises UserError when not one row fits."""

    def __init__(self, engine: Engine, count: int, slots: int, slack: int) -> None:
        self.engine, self.slots, self.slack, self.fit = engine, slots, slack, engine.fit
        self.timer = Stopwatch(engine.target.device)
        self.clock, self.wait = self.timer.clock, self.timer.wait
        self.settle = self.timer.settle
        self.count = _allocated(engine, count, slots, slack)
        self.seqs, self.reads = engine.rows.seqs, engine.drafter.reads
        self.context, self.drafter_context = engine.target.context, engine.drafter.context
        self.vocab = engine.target.config.vocab_size  # prompts may hold tokens it never emits
        self._windows: dict[tuple[int, int, int, bool], Sequences] = {}
        self._hidden: dict[int, list[torch.Tensor]] = {}
        self.desk = self.count * _needs_desk(engine, self.count)
        self._at_desk = -1, 0  # the row whose prompt is read there, and how much of it has been
        engine.rows.clear(0)  # in which `_allocated` has run a pass

    @property
    def steady(self) -> bool:
        """See `Recorder.steady`."""
        return self.engine.recorder.steady

    @torch.inference_mode()
    def enter(self, row: int, text: Sequence[int], stream: int) -> None:
        """Give a row to a text of which no cache holds anything yet."""
        self.seqs.write(row, text, len(text), stream)
        self._hidden[row] = []
        for lm in self.engine.models:
            lm.forget(row)

    @passes()
    def prefill(self, row: int, start: int, stop: int) -> None:
        """The target's prefill of the tokens start..stop-1 of a row."""
        if self.desk and not start and self._at_desk[0] < 0:
            self._copy_text(row)
            self.engine.target.forget(self.desk)
            self._at_desk = row, 0
        if self._at_desk[0] == row:
            seqs, self._at_desk = self._of_desk(stop), (row, stop)
        else:
            seqs = self._window(row, 1, stop)
        hidden = self.engine.target.prefill(seqs, start, stop, self.engine.drafter.taps)
        if hidden is not None:
            self._hidden[row].append(hidden)

    @passes()
    def end_prefill(self, row: int, limit: int) -> None:
        """From now on a row is decoded, up to `limit` tokens in all."""
        self.seqs.limit[row] = limit
        if self._at_desk[0] == row:
            self._move_from_desk(self.engine.target, row, self._at_desk[1])
            self._at_desk = -1, 0
        hidden = torch.cat(self._hidden[row], 1) if self._hidden[row] else None
        with named(self.engine.drafter):
            self.engine.drafter.prefill(self._window(row, 1, limit), hidden)
        del self._hidden[row]

    @passes()
    def catch_up_row(self, row: int, start: int, stop: int) -> None:
        """The drafter's prefill of the tokens start..stop-1 of a row."""
        drafter = self.engine.drafter
        at_desk = self.desk and not start and self._at_desk[0] < 0 and not drafter.state
        if at_desk:
            self._copy_text(row)
        seqs = self._of_desk(stop + 1) if at_desk else self._window(row, 1, stop + 1)
        until = replace(seqs, length=torch.full_like(seqs.length, stop + 1))
        with named(drafter):
            drafter.catch_up(until, stop - start)
        for lm in drafter.models if at_desk else ():
            self._move_from_desk(lm, row, stop)

    @passes()
    def catch_up(self, budget: Sequence[int], longest: int, missed: int) -> None:
        """The drafter's prefill of the last `missed` tokens before the root, in all rows with a
        budget above 0."""
        with named(self.engine.drafter):
            self.engine.drafter.catch_up(self._rows(budget, longest, 1), missed)

    @passes()
    def round(self, budget: Sequence[int], longest: int, tree: Tree) -> list[Step]:
        """One round of the first len(budget) rows, of which none is longer than `longest`. A row
        drafts as deep as its budget (-1: it is not decoded)."""
        warn_of_short_context(self.engine.drafter, longest)
        if self._by_length(self._covered(len(budget)), tree):
            longest = self.slots  # costs nothing, and one capture serves sequences of any length
        with named(self.engine.drafter):
            return self.engine.run(self._rows(budget, longest, tree.depth), tree)

    def rehearse(self, deepest: int) -> None:
        """Capture the rounds of every size with drafts up to that depth before the first request
        waits for them, as long as memory lasts; only those that serve sequences of any length. The
        smallest come last, since the latest captures are kept longest. No row changes."""
        if not self.engine.recorder.warm or not self.engine.recorded_whole:
            return
        sizes = sorted({self._covered(n) for n in range(1, self.count + 1)}, reverse=True)
        kinds = [(0, 0), *((depth, -1) for depth in range(deepest + 1))]
        for rows, (depth, part) in product(sizes, kinds):
            if self._by_length(rows, Tree.chain(depth)):
                try:
                    for _ in range(self.engine.recorder.warm + 1):
                        self.round([part] * rows, 1, Tree.chain(depth))
                except OutOfMemory:
                    return

    def _by_length(self, rows: int, tree: Tree) -> bool:
        """Whether such passes read the slots that a row uses, however many they cover."""
        tokens = rows * (1 + tree.depth)
        return all(tokens <= lm.net.by_length_up_to for lm in self.engine.models)

    def _covered(self, rows: int) -> int:
        """Rows that a round covers for so many in use: more where rounds are captured, so that
        there are few sizes."""
        return min(bucket(rows), self.count) if self.engine.recorder.warm else rows

    def _rows(self, budget: Sequence[int], longest: int, depth: int) -> Sequences:
        """The first rows, with their budgets unless none drafts and all are decoded. Compiled
        passes leave out rows that are not decoded. CUDA graphs of plain rounds compute them, which
        is harmless if what they write overwrites nothing (`LM.keeps_last_slots_only`)."""
        rows = self._covered(len(budget))
        all_written = rows == len(budget) and min(budget) >= 0
        harmless = not any(lm.keeps_last_slots_only for lm in self.engine.models)
        if not depth and (all_written or (self.engine.recorder.ahead and harmless)):
            return self._window(0, rows, longest)
        none = [-1] * (rows - len(budget))
        self.engine.rows.budget[:rows].copy_(torch.tensor([*budget, *none]))
        return self._window(0, rows, longest, ragged=True)

    def _window(self, first: int, rows: int, longest: int, ragged: bool = False) -> Sequences:
        at = first, rows, window(longest + self.slack, self.slots)
        if (*at, ragged) not in self._windows:
            budget = self.engine.rows.budget[:rows] if ragged else None
            self._windows[*at, ragged] = replace(self.seqs.window(*at), budget=budget)
        return self._windows[*at, ragged]

    def _of_desk(self, need: int) -> Sequences:
        """The desk, with one of few numbers of slots."""
        slots = 1 << (need + self.slack - 1).bit_length()
        return self._window(self.desk, 1, slots - self.slack)

    def _copy_text(self, row: int) -> None:
        """Copy a row's tokens and their number, which are all that is read there, to the desk."""
        for part in (self.seqs.tokens, self.seqs.length):
            part[self.desk] = part[row]

    def _move_from_desk(self, lm: LM, row: int, slots: int) -> None:
        """Copy what a model has read there to a row."""
        assert lm.cache is not None
        lm.cache.copy(self.desk, row, slots)
        lm.fault[row] = lm.fault[self.desk]

    @torch.inference_mode()
    def move(self, source: int, target: int, length: int) -> None:
        """Move a sequence of `length` tokens to a free row."""
        self.engine.rows.move(source, target, length)
        if self._at_desk[0] == source:
            self._at_desk = target, self._at_desk[1]
        if source in self._hidden:
            self._hidden[target] = self._hidden.pop(source)

    @torch.inference_mode()
    def leave(self, row: int, broken: bool = False) -> None:
        """Free a row; `broken`: clear it of NaN and infinities, too."""
        self.engine.rows.leave(row)
        self._hidden.pop(row, None)
        if self._at_desk[0] == row:
            self._at_desk = -1, 0
        desk = self.desk if self._at_desk[0] < 0 else 0  # another prompt may be half read there
        for spoilt in {row, desk or row} if broken else ():
            self.engine.rows.clear(spoilt)

    def text(self, row: int, start: int, stop: int) -> list[int]:
        return self.seqs.tokens[row, start:stop].tolist()


def _needs_desk(engine: Engine, rows: int) -> bool:
    """See `EngineRows.desk`. What layers with states read is not captured."""
    parts = any(lm.net.parts for lm in engine.models)
    return bool(rows > 1 and engine.recorder.ahead and not parts)


def _allocated(engine: Engine, rows: int, slots: int, slack: int) -> int:
    """Allocate for at most `rows` rows; returns how many fit. Caches are allocated in a model's
    first pass, so a pass of one token is run."""
    text = Sequences.of([[0, 0]], 0, slack=0, device=engine.target.device)
    while True:
        try:
            with passes():
                engine.rows.reserve(rows + _needs_desk(engine, rows), slots, engine.eos, slack)
                engine.target.prefill(text, 0, 1)
                engine.drafter.catch_up(text, 1)
            return rows
        except (UserError, OutOfMemory) as e:
            if rows == 1:
                message = f"not one row of {slots} slots fits: serve shorter requests ({e})"
                raise UserError(message) from e
            rows //= 2
            log.warning("too little memory for more than %d rows of %d slots", rows, slots)
