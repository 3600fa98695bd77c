"""Rounds on a CPU without Python: the operations of one round are recorded and replayed.

A round of a small model is some hundred operations of a few microseconds, and Python takes as long
between them. As in a CUDA graph, they run again in the same order at the same addresses:
consecutive compiled calls (cpu/) as one call of C++, and torch's operations one by one. Operations
whose result cannot change are left out. A recording is discarded if an operation brings a value to
the host, or has shapes that depend on values; the round then keeps running operation by operation.
"""

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import addressof, c_int64, c_void_p
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specexp.fast.cpu import build
from specexp.fast.cpu.passes import Native
from specexp.fast.recordings import Recordings, Tape
from specexp.models.lm import LM
from specexp.ops import kernel, switched_off
from specexp.recording import Recorder, Reports, reaches_host, recorder_for

T = TypeVar("T")

OUT_OF_RANGE = "a token or a slot is out of range"
MAX_CALL_S = 0.05  # seconds that one call replays rounds; Python handles no interrupt meanwhile
MAX_BYTES = 32 << 20  # of results in one recording; in larger rounds Python's time does not matter


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
        """The addresses of the memory that it changes in place."""
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
        """Whether its result is new memory that it leaves uninitialised."""
        return self.func.overloadpacket.__name__.removeprefix("new_").startswith("empty")

    def replay(self) -> Callable[[], Any]:
        """A function that runs it again and writes the result where the first one is."""
        func, args, kwargs, results = self.func, self.args, self.kwargs, [*_tensors(self.result)]
        if self.writes and self.writes >= _memory(results):
            return partial(func, *args, **kwargs)

        def copied() -> None:
            for place, x in zip(results, _tensors(func(*args, **kwargs)), strict=True):
                place.copy_(x)

        return copied


def _tensors(x: Any) -> Iterator[Tensor]:
    """The tensors in an operation's arguments or result, which may be nested in tuples, lists and
    dicts. torch's own `tree_leaves` would take most of the time of a recording."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (tuple, list, dict)):
        for part in x.values() if isinstance(x, dict) else x:
            yield from _tensors(part)


def _memory(x: Any) -> set[int]:
    """The addresses of the storages of the tensors in x."""
    return {tensor.untyped_storage().data_ptr() for tensor in _tensors(x)}


Step: TypeAlias = build.CompiledCall | Operation


class Recording(TorchDispatchMode):
    """Records the torch operations that run while it is active. `steps`: all but views; `whole`:
    nothing so far rules out a replay; `memory`: bytes of results."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.whole, self.memory = True, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if reaches_host(func, args) or torch.Tag.inplace_view in func.tags:
            self.not_replayable(func)
        with self:  # the parts of a composite operation are recorded in its place
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = func(*args, **kwargs)
        step = Operation(func, args, kwargs, result)
        if self.whole and not step.is_view:
            self.steps.append(step)
            self.memory += sum(x.nbytes for x in _tensors(result))
            if self.memory > MAX_BYTES:
                self.not_replayable(func)
        return result

    def not_replayable(self, func: Any) -> None:
        """Note that this operation rules out a replay."""
        self.whole = False


@contextmanager
def recording() -> Iterator[Recording]:
    """Records what this thread runs in the block: torch's operations and compiled calls."""
    recorded = Recording()
    before, build.this_thread.calls = build.this_thread.calls, recorded.steps
    try:
        with recorded:
            yield recorded
    finally:
        build.this_thread.calls = before


class _CompiledReplay:
    """Runs compiled calls again, all in one call of C++, and keeps their arguments alive. Raises
    IndexError if one of them finds a token or a slot out of range."""

    def __init__(self, calls: Sequence[build.CompiledCall]) -> None:
        self.code, self.calls = build.functions(), calls
        pairs = (x for call in calls for x in (call.function, addressof(call.numbers)))
        self.list = (c_void_p * (2 * len(calls)))(*pairs)
        self.numbers = (c_int64 * 2)(len(calls), addressof(self.list))

    def __call__(self) -> None:
        if not self.code.replay.code(self.numbers):
            raise IndexError(OUT_OF_RANGE)

    def rounds(self, most: int, report: Tensor) -> Reports:
        """See `Tape.repeat`: the calls are those of a round, and none is begun after MAX_CALL_S."""
        (B, wide), begin = report.shape, time.perf_counter()
        reports = torch.empty(most, B, wide, dtype=report.dtype)
        seconds = torch.empty(most, dtype=torch.float64)
        count = self.code.replay_rounds(
            *self.numbers, most, MAX_CALL_S, B, wide, report, reports, seconds
        )
        if count < 0:
            raise IndexError(OUT_OF_RANGE)
        ends = (begin + s for s in seconds[:count].tolist())
        return list(zip(reports[:count].tolist(), ends, strict=True))


def replay_of(steps: Sequence[Step]) -> Callable[[], Any] | None:
    """A function that runs these steps again, in order; None if no result of theirs can change."""
    todo: list[Callable[[], Any]] = []
    for operation, together in groupby(changing(steps), lambda step: isinstance(step, Operation)):
        part: list[Any] = list(together)
        todo += [step.replay() for step in part] if operation else [_CompiledReplay(part)]
    if len(todo) == 1 and isinstance(todo[0], _CompiledReplay):
        return todo[0]

    @torch.inference_mode()
    def run() -> None:
        for do in todo:
            do()

    return run if todo else None


def changing(steps: Sequence[Step]) -> Iterator[Step]:
    """The steps whose result can change. A step is dropped if it only makes uninitialised memory,
    or if it reads nothing but results of dropped steps, draws no random numbers, and no step
    changes its result in place. (Compiled code writes only into uninitialised results and into
    memory that outlasts a round.)"""
    written = set[int]().union(*(step.writes for step in steps if isinstance(step, Operation)))
    constant: set[int] = set()
    for step in steps:
        if isinstance(step, build.CompiledCall):
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
    """The recorder of an engine on a CPU: one that replays, if the target's passes are compiled and
    SPECEXP_GRAPHS is not `off`; else NotImplemented."""
    if switched_off("SPECEXP_GRAPHS") or not isinstance(target.net, Native):
        return NotImplemented
    return Recordings(CpuTape())


class CpuTape(Tape):
    """Records functions as lists of compiled calls and torch's operations."""

    def record(self, fn: Callable[[], T], kind: Hashable) -> tuple[Callable[[], Any] | None, T]:
        with recording() as recorded:
            result = fn()
        return replay_of(recorded.steps) if recorded.whole else None, result

    def repeat(self, replay: Callable[[], Any] | None, most: int, report: Tensor) -> Reports:
        """See `Tape.repeat`: only a replay that is one compiled call is repeated."""
        return replay.rounds(most, report) if most and isinstance(replay, _CompiledReplay) else []
