"""Rounds on a CPU without Python: the operations of one round are recorded and replayed.

A round of a small model is some hundred operations of a few microseconds, and Python takes as long
between them. As in a CUDA graph, they run again in order at the same addresses: consecutive
compiled calls (cpu/) in one call, torch's operations one by one, and those whose result cannot
change not at all. A round that reads a value on the host, or whose shapes depend on values, is not
replayed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import Structure, addressof, c_void_p
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specexp.fast.cpu import build
from specexp.fast.cpu.passes import Native
from specexp.fast.recordings import Recordings
from specexp.models.lm import LM
from specexp.ops import kernel
from specexp.recording import Recorder, Reports, reaches_host, recorder_for

T = TypeVar("T")

OUT_OF_RANGE = "a token or a slot is out of range"
AWAY_S = 0.05  # longest time in one call, during which Python handles no interrupt
MOST = 32 << 20  # bytes kept per replay; in larger rounds the time Python takes does not matter


class Operation(NamedTuple):
    """A torch operation as it was called, and its result."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    @property
    def reads(self) -> set[int]:
        return _memory((self.args, self.kwargs))

    @property
    def writes(self) -> set[int]:
        """The memory it changes in place."""
        if not self.func._schema.is_mutable:
            return set()
        schema = self.func._schema.arguments
        arguments = dict(zip((a.name for a in schema), self.args, strict=False)) | self.kwargs
        changed = [a.name for a in schema if a.alias_info and a.alias_info.is_write]
        return _memory([arguments.get(name) for name in changed])

    @property
    def is_view(self) -> bool:
        """Whether its result is only a view of its inputs."""
        return not self.writes and _memory(self.result) <= self.reads

    @property
    def uninitialised(self) -> bool:
        """Whether its result is uninitialised memory."""
        return self.func.overloadpacket.__name__.removeprefix("new_").startswith("empty")

    def again(self) -> Callable[[], Any]:
        """A call that runs it again and writes into the same result."""
        func, args, kwargs, results = self.func, self.args, self.kwargs, [*_tensors(self.result)]
        if self.writes and self.writes >= _memory(results):
            return partial(func, *args, **kwargs)
        plain = all(type(x) in (Tensor, torch.nn.Parameter) for x in _tensors((args, kwargs)))
        if plain and not self.writes and (overload := _into(func)):
            out, inputs, outputs = overload
            kwargs = {name: x for name, x in kwargs.items() if name in inputs}
            return partial(out, *args, **kwargs, **dict(zip(outputs, results, strict=True)))

        def copied() -> None:
            for place, x in zip(results, _tensors(func(*args, **kwargs)), strict=True):
                place.copy_(x)

        return copied


def _tensors(x: Any) -> Iterator[Tensor]:
    """The tensors in an operation's arguments or result. Nested lists are enough; torch's
    `tree_leaves`, which knows more, would take most of the time of a recording."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (tuple, list, dict)):
        for part in x.values() if isinstance(x, dict) else x:
            yield from _tensors(part)


def _memory(x: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in _tensors(x)}


@cache
def _into(func: Any) -> tuple[Any, set[str], list[str]] | None:
    """The `out=` overload of an operation: it, its other arguments, and the names of its outputs.
    None if there is none. (Options such as dtype may be missing: the outputs have them.)"""
    options = {"dtype", "layout", "device", "pin_memory"}
    arguments = {(a.name, str(a.type)) for a in func._schema.arguments}
    for name in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, name)
        outputs = [a.name for a in other._schema.arguments if a.is_out]
        inputs = {(a.name, str(a.type)) for a in other._schema.arguments if not a.is_out}
        spare = {name for name, _ in arguments - inputs}
        if inputs <= arguments and spare <= options and len(outputs) == len(func._schema.returns):
            return other, {name for name, _ in inputs}, outputs
    return None


Step: TypeAlias = build.Call | Operation


class Recording(TorchDispatchMode):
    """Records the operations that run, and whether they can be replayed."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.whole, self.memory = True, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if reaches_host(func, args) or torch.Tag.inplace_view in func.tags:
            self.not_replayable(func)
        with self:  # composite operations are recorded as their parts
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = func(*args, **kwargs)
        step = Operation(func, args, kwargs, result)
        if self.whole and not step.is_view:
            self.steps.append(step)
            self.memory += sum(x.nbytes for x in _tensors(result))
            if self.memory > MOST:
                self.not_replayable(func)
        return result

    def not_replayable(self, func: Any) -> None:
        """Called for an operation that cannot be replayed."""
        self.whole = False


@contextmanager
def recording() -> Iterator[Recording]:
    """Records what runs meanwhile in this thread: torch's operations and compiled calls."""
    recorded = Recording()
    before, build.here.calls = build.here.calls, recorded.steps
    try:
        with recorded:
            yield recorded
    finally:
        build.here.calls = before


class _Call(Structure):
    _fields_ = [("function", c_void_p), ("numbers", c_void_p)]


class _Compiled:
    """Replays compiled calls. Keeps alive their arguments."""

    def __init__(self, call: build.Call) -> None:
        self.calls: list[build.Call] = []
        self.code = build.replaying()
        self.add(call)

    def add(self, call: build.Call) -> None:
        self.calls.append(call)
        each = (_Call(call.function, addressof(call.numbers)) for call in self.calls)
        self.list = (_Call * len(self.calls))(*each)
        self.count, self.first = len(self.calls), addressof(self.list)

    def __call__(self) -> None:
        if not self.code.replay(self.count, self.first):
            raise IndexError(OUT_OF_RANGE)

    def rounds(self, most: int, report: Tensor) -> Reports:
        (B, wide), begin = report.shape, time.perf_counter()
        reports = torch.empty(most, B, wide, dtype=report.dtype)
        seconds = torch.empty(most, dtype=torch.float64)
        addresses = (x.data_ptr() for x in (report, reports, seconds))
        count = self.code.replay_rounds(self.count, self.first, most, AWAY_S, B, wide, *addresses)
        if count < 0:
            raise IndexError(OUT_OF_RANGE)
        ends = (begin + s for s in seconds[:count].tolist())
        return list(zip(reports[:count].tolist(), ends, strict=True))


def again(steps: Sequence[Step]) -> Callable[[], Any] | None:
    """A function that runs these steps again; None if there is nothing to run."""
    todo: list[Callable[[], Any]] = []
    for step in changing(steps):
        if isinstance(step, Operation):
            todo.append(step.again())
        elif todo and isinstance(todo[-1], _Compiled):
            todo[-1].add(step)
        else:
            todo.append(_Compiled(step))
    if len(todo) == 1 and isinstance(todo[0], _Compiled):
        return todo[0]

    @torch.inference_mode()
    def run() -> None:
        for do in todo:
            do()

    return run if todo else None


def changing(steps: Sequence[Step]) -> Iterator[Step]:
    """The steps whose result can change. Dropped are those that read nothing, or only results of
    dropped steps, and whose result nothing writes to. (Compiled code writes only into uninitialised
    results and into memory that outlasts a round.)"""
    written = set[int]().union(*(step.writes for step in steps if isinstance(step, Operation)))
    constant: set[int] = set()
    for step in steps:
        if isinstance(step, build.Call):
            yield step
        elif not step.uninitialised:
            result = _memory(step.result)
            random = torch.Tag.nondeterministic_seeded in step.func.tags
            if step.reads <= constant and not result & written and not random:
                constant |= result
            else:
                yield step


@kernel(recorder_for, "cpu")
def replays_for(target: LM) -> Recorder:
    """Replays, if the target's passes are compiled and SPECEXP_GRAPHS is not off."""
    if os.environ.get("SPECEXP_GRAPHS") == "off" or not isinstance(target.net, Native):
        return NotImplemented
    return Recordings(Calls())


class Calls:
    """The tape of a CPU: lists of compiled calls and torch's operations."""

    warm, ahead = 1, 0

    def run(self, fn: Callable[[], T]) -> T:
        return fn()

    def record(self, fn: Callable[[], T], kind: Hashable) -> tuple[Callable[[], Any] | None, T]:
        with recording() as recorded:
            result = fn()
        return again(recorded.steps) if recorded.whole else None, result

    def repeat(self, again: Callable[[], Any] | None, most: int, report: Tensor) -> Reports:
        """Only a round that is one compiled call, and no longer than AWAY_S."""
        return again.rounds(most, report) if most and isinstance(again, _Compiled) else []
