"""A fixed bank of rows over an engine: texts come, are read, written and leave; memory stays.

Passes cover windows of the bank: the rows in use and as many slots as their texts need; rounds that
are recorded cover free rows, too, so that there are few sizes. The round is the engine's.
Nothing here decides anything: serve.py does, and simulate.py has a bank of the same shape that
holds no text.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Protocol

import numpy as np
import torch

from specexp.engine import Engine
from specexp.errors import UserError, first_line, ran_out
from specexp.sequences import Sequences
from specexp.trace import Step
from specexp.tree import Tree

log = logging.getLogger(__name__)

SLOTS = 64  # windows grow by this many slots, so that there are few shapes


def window(need: int, slots: int) -> int:
    """Slots that a pass covers which needs so many of a row's `slots`."""
    return min(slots, -(-need // SLOTS) * SLOTS)


def bucket(rows: int) -> int:
    """Rows that a recorded round covers for so many: 1, 2, 4, 8, 16, 24, 32, ..."""
    return 1 << (rows - 1).bit_length() if rows < 8 else -(-rows // 8) * 8


class Timer(Protocol):
    def clock(self) -> float: ...
    def wait(self, until: float) -> None: ...


class Wall:
    """The time of the world."""

    def clock(self) -> float:
        return time.perf_counter()

    def wait(self, until: float) -> None:
        time.sleep(max(0.0, until - self.clock()))


class Stopwatch:
    """Stands still while stopped, and does not wait: several banks can share a machine in turns,
    each on a time of its own."""

    def __init__(self) -> None:
        self.passed, self.since = 0.0, 0.0
        self.running = False

    def clock(self) -> float:
        return self.passed + (time.perf_counter() - self.since if self.running else 0.0)

    def wait(self, until: float) -> None:
        self.passed += max(0.0, until - self.clock())

    def start(self) -> None:
        self.since, self.running = time.perf_counter(), True

    def stop(self) -> None:
        self.passed, self.running = self.clock(), False


class OutOfMemory(Exception):
    """A pass did not fit; the texts are as they were before it."""


class EngineBank:
    """`rows` texts of up to `slots` tokens; fewer, if that is too many for the memory or turns out
    to be. `room`: slots that a round may write past a text."""

    def __init__(
        self, engine: Engine, rows: int, slots: int, room: int, timer: Timer | None = None
    ) -> None:
        self.engine, self.slots, self.room = engine, slots, room
        self.timer = timer or Wall()
        self.rows = _allocated(engine, rows, slots)
        device = engine.target.device
        self.seqs = Sequences.empty(self.rows, slots, engine.eos, device)
        self._told, self._said = tuple[int, ...](), tuple[int, ...]()
        self._near = np.zeros(self.rows, dtype=np.int64)
        self._budget = torch.from_numpy(self._near).to(device)  # on a CPU the same memory
        self._reach = torch.full((engine.drafter.grades,), room, device=device)
        self._windows: dict[tuple[int, int, int, bool], Sequences] = {}
        self._hidden: dict[int, list[torch.Tensor]] = {}
        self.leave(0, broken=True)  # who came to take the memory

    @property
    def context(self) -> int:
        """The longest text that the target can continue."""
        return self.engine.target.context

    @property
    def drafter_context(self) -> int:
        """The longest text that the drafter can continue, its guesses included."""
        return self.engine.drafter.context

    @property
    def steady(self) -> bool:
        """See `Engine.steady`."""
        return self.engine.steady

    @property
    def reads(self) -> bool:
        """See `Drafter.reads`."""
        return self.engine.drafter.reads

    def clock(self) -> float:
        return self.timer.clock()

    def wait(self, until: float) -> None:
        self.timer.wait(until)

    @torch.inference_mode()
    def enter(self, row: int, text: Sequence[int], stream: int) -> None:
        """A text takes a row; nothing of it is in the target's cache."""
        self.seqs.write(row, text, len(text), stream)
        self._hidden[row] = []
        for lm in self.engine.models:
            lm.fault[row] = 0

    def read(self, row: int, start: int, stop: int) -> None:
        """The target reads the tokens start..stop-1 of a row."""
        with _memory():
            seqs = self._window(row, 1, stop)
            hidden = self.engine.target.prefill(seqs, start, stop, self.engine.drafter.taps)
            if hidden is not None:
                self._hidden[row].append(hidden)

    @torch.inference_mode()
    def begin(self, row: int, limit: int) -> None:
        """The row is read but for its last token: from now on it is written, up to `limit`."""
        self.seqs.limit[row] = limit
        hidden = torch.cat(self._hidden[row], 1) if self._hidden[row] else None
        with _memory():
            self.engine.drafter.prefill(self._window(row, 1, limit), hidden)
        del self._hidden[row]

    @torch.inference_mode()
    def guide(self, row: int, start: int, stop: int) -> None:
        """The drafter reads the tokens start..stop-1 of a row."""
        seqs = self._window(row, 1, stop + 1)
        until = replace(seqs, length=torch.full_like(seqs.length, stop + 1))
        with _memory():
            self.engine.drafter.catch_up(until, stop - start)

    @torch.inference_mode()
    def catch_up(self, budget: Sequence[int], longest: int, missed: int) -> None:
        """The drafter reads the last `missed` tokens before the root of the rows with a budget."""
        with _memory():
            self.engine.drafter.catch_up(self._rows(budget, longest, 1), missed)

    @torch.inference_mode()
    def round(
        self, budget: Sequence[int], longest: int, tree: Tree, reach: tuple[int, ...] = ()
    ) -> list[Step]:
        """One round of the first rows, none of them longer than `longest`: each drafts as deep as
        its budget, -1: it is not written, and as the reach of its grade, if given."""
        if self._spares(self._covered(len(budget)), tree):
            longest = self.slots  # costs nothing, and what is recorded serves texts of any length
        with _memory():
            report = self.engine.report(self._rows(budget, longest, tree.depth, reach), tree)
        return self.engine.steps(report)

    def rehearse(self, deepest: int) -> None:
        """Where rounds are recorded, record those of every size that drafts up to so deep, before
        anybody waits for them, if they serve texts of any length and memory lasts: the smallest
        last, for those are kept longest. Nothing is written."""
        if self.engine.recordings is None or self.engine.drafter.on_host:
            return
        sizes = sorted({self._covered(n) for n in range(1, self.rows + 1)}, reverse=True)
        kinds = [(0, 0), *((depth, -1) for depth in range(deepest + 1))]
        for rows, (depth, part) in product(sizes, kinds):
            if self._spares(rows, Tree.chain(depth)):
                try:
                    for _ in range(self.engine.warm + 1):
                        self.round([part] * rows, 1, Tree.chain(depth))
                except OutOfMemory:
                    return

    def _spares(self, rows: int, tree: Tree) -> bool:
        """Does such a pass read of each text only what there is, however many slots it covers?"""
        tokens = rows * (1 + tree.depth)
        return all(tokens <= lm.net.sparing for lm in self.engine.models)

    def _covered(self, rows: int) -> int:
        """Where rounds are recorded, as many free rows besides as make a size that is known: a
        recorded round of five rows is no use to six."""
        return rows if self.engine.recordings is None else min(bucket(rows), self.rows)

    def _rows(
        self, budget: Sequence[int], longest: int, depth: int, reach: tuple[int, ...] = ()
    ) -> Sequences:
        """The first rows and how deep they may draft, but where none drafts and all are written.
        Compiled passes leave out whoever is not written; CUDA graphs of plain rounds do not,
        nothing is kept of that, and whoever takes a row begins it anew."""
        rows = self._covered(len(budget))
        all_written = rows == len(budget) and min(budget) >= 0
        if not depth and (all_written or self.engine.graphs is not None):
            return self._window(0, rows, longest)
        if self._told != budget:
            self._told = tuple(budget)
            self._near[: len(budget)], self._near[len(budget) :] = budget, -1
            if self._budget.is_cuda:
                self._budget.copy_(torch.from_numpy(self._near))
        if self._said != reach:
            self._said = reach
            self._reach.copy_(torch.tensor(reach or [self.room] * len(self._reach)))
        return self._window(0, rows, longest, ragged=True)

    def _window(self, first: int, rows: int, longest: int, ragged: bool = False) -> Sequences:
        at = first, rows, window(longest + self.room, self.slots), ragged
        if at not in self._windows:
            seqs = self.seqs.window(*at[:3])
            if ragged:
                seqs = replace(seqs, budget=self._budget[:rows], reach=self._reach)
            self._windows[at] = seqs
        return self._windows[at]

    @torch.inference_mode()
    def move(self, source: int, target: int, length: int) -> None:
        """A text of `length` tokens changes its row."""
        caches = {id(lm.cache): lm.cache for lm in self.engine.models}
        for cache in caches.values():
            assert cache is not None
            cache.copy(source, target, length if cache.size == self.slots else cache.size)
        own = (self.seqs.tokens, self.seqs.length, self.seqs.limit, self.seqs.stream)
        faults = (lm.fault for lm in self.engine.models)
        for part in (*own, *faults, *self.engine.drafter.state):
            part[target] = part[source]
        if source in self._hidden:
            self._hidden[target] = self._hidden.pop(source)

    @torch.inference_mode()
    def leave(self, row: int, broken: bool = False) -> None:
        """The row is free; if it broke, nothing that is no number stays behind."""
        self.seqs.length[row] = self.seqs.limit[row] = 1
        self._hidden.pop(row, None)
        if broken:
            for lm in self.engine.models:
                assert lm.cache is not None
                lm.cache.clear(row)
                lm.fault[row] = 0
            for part in self.engine.drafter.state:
                part[row] = 0

    def text(self, row: int, start: int, stop: int) -> list[int]:
        return [int(t) for t in self.seqs.tokens[row, start:stop].tolist()]


@torch.inference_mode()
def _allocated(engine: Engine, rows: int, slots: int) -> int:
    """Allocate for as many rows as fit, at most `rows`; how many do. The memory is taken at once:
    as models make keys and values in their first pass, they read the first of two tokens."""
    text = Sequences.of([[0, 0]], 0, slack=0, device=engine.target.device)
    while True:
        try:
            with _memory():
                engine.allocate(rows, slots)
                engine.target.prefill(text, 0, 1)
                engine.drafter.catch_up(text, 1)
            return rows
        except (UserError, OutOfMemory) as e:
            if rows == 1:
                said = f"not one row of {slots} slots fits: serve shorter texts ({e})"
                raise UserError(said) from e
            rows //= 2
            log.warning("too little memory for more than %d rows of %d slots", rows, slots)


@contextmanager
def _memory() -> Iterator[None]:
    """Whatever an allocator raises when there is no memory left becomes OutOfMemory."""
    try:
        yield
    except torch.OutOfMemoryError as e:
        torch.cuda.empty_cache()
        raise OutOfMemory(first_line(e)) from e
    except RuntimeError as e:
        if not ran_out(str(e)):
            raise
        raise OutOfMemory(first_line(e)) from e
