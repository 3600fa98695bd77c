"""Rounds and passes as CUDA graphs: recorded once, then launched whole. No other file knows them.

What is recorded reads and changes nothing but memory that stays where it is: no value reaches the
host, every shape is given beforehand, what lasts is changed in place. It needs no random generator:
noise is a function of rows and lengths (sampling.py), which lie in that memory too. The first calls
of a function are real ones, launched one operation at a time, so that libraries have what they need
before anything is recorded. On a CPU functions stay what they are.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

log = logging.getLogger("specexp")
T = TypeVar("T")

WARM = 3  # calls before the one that is recorded
MOST = 64  # graphs that are kept; the one not used for longest goes first


class Recorder(Protocol):
    """How a function is run so that it can be recorded afterwards, and how it is recorded."""

    def run(self, fn: Callable[[], T]) -> T: ...

    def record(self, fn: Callable[[], T], kind: Hashable) -> tuple[Callable[[], Any], T]:
        """Run `fn` once; how to run it again, and what it returned, which every run overwrites, as
        may that of others of its `kind` (None: of none)."""
        ...


class Cuda:
    """Graphs of one device, recorded on a stream of their own; those of a kind share memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pools: dict[Hashable, Any] = {}

    def run(self, fn: Callable[[], T]) -> T:
        with torch.cuda.device(self.device):
            now = torch.cuda.current_stream()
            self.stream.wait_stream(now)
            with torch.cuda.stream(self.stream):
                made = fn()
            now.wait_stream(self.stream)
        return made

    def record(self, fn: Callable[[], T], kind: Hashable) -> tuple[Callable[[], Any], T]:
        with torch.cuda.device(self.device):
            pool = torch.cuda.graph_pool_handle()
            if kind is not None:
                pool = self.pools.setdefault(kind, pool)
            graph = torch.cuda.CUDAGraph()
            # a recording that fails leaves its own stream in place: the outer one puts ours back
            with (
                torch.cuda.stream(torch.cuda.current_stream()),
                torch.cuda.graph(graph, pool=pool, stream=self.stream),
            ):
                made = fn()
            graph.replay()
        return graph.replay, made


class Replay:
    """What was recorded of a function of tensors. A graph owns none of the memory that it knows:
    `held` is what nobody else may hold."""

    def __init__(self) -> None:
        self.calls = 0
        self.again: Callable[[], Any] | None = None
        self.inputs: tuple[Tensor, ...] = ()
        self.held: tuple[Tensor, ...] = ()
        self.made: Any = None


class Graphs:
    """The graphs of one owner, each under a key that says what it depends on besides memory."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.kept: dict[Hashable, Replay] = {}
        self.refused = False  # something could not be recorded: nothing more is tried

    def run(
        self,
        kind: Hashable,
        key: Hashable,
        fn: Callable[..., T],
        *inputs: Tensor,
        held: tuple[Tensor, ...] = (),
    ) -> T:
        """fn(*inputs), whose result is to be read before the next run of the same `kind`.

        Equal keys stand for functions that do the same in the same memory, given `inputs` of the
        same shapes. `held`: memory of theirs that has to outlive the caller.
        """
        found = self.kept.pop((kind, key), None) or Replay()
        self.kept[kind, key] = found  # the last used comes last
        if len(self.kept) > MOST:
            del self.kept[next(iter(self.kept))]
        if found.again is not None:
            for place, x in zip(found.inputs, inputs, strict=True):
                place.copy_(x)
            found.again()
        elif self.refused:
            return fn(*inputs)
        elif found.calls < WARM:
            found.calls += 1
            return self.recorder.run(lambda: fn(*inputs))
        elif not self._record(found, kind, fn, inputs):
            return fn(*inputs)
        found.held = held
        made: T = found.made
        return made

    def _record(
        self, found: Replay, kind: Hashable, fn: Callable[..., Any], inputs: tuple[Tensor, ...]
    ) -> bool:
        found.inputs = tuple(x.clone() for x in inputs)
        try:
            found.again, found.made = self.recorder.record(lambda: fn(*found.inputs), kind)
        except RuntimeError as e:
            self.refused = True
            why = str(e.__context__ or e).strip().splitlines()[0]
            log.warning("launched one operation at a time, not as a CUDA graph: %s", why)
        return found.again is not None

    def clear(self) -> None:
        """Forget all: memory that they knew is gone."""
        self.kept.clear()


@cache
def _cuda(device: torch.device) -> Cuda:
    return Cuda(device)


def on(device: torch.device) -> Graphs | None:
    """Where graphs can be recorded, an owner's own; None on a CPU, or if SPECEXP_GRAPHS is off."""
    if device.type != "cuda" or os.environ.get("SPECEXP_GRAPHS") == "off":
        return None
    return Graphs(_cuda(device))


def fetched(x: Tensor) -> Callable[[], Any]:
    """Begin to bring x to the host, before anything that is launched later can overwrite it. What
    is returned waits for that, and is x as lists."""
    if not x.is_cuda:
        return x.clone().tolist
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    there = torch.cuda.Event()
    there.record(torch.cuda.current_stream(x.device))

    def wait() -> Any:
        there.synchronize()
        return host.tolist()

    return wait


def capture(fn: Callable[[], T], device: torch.device) -> Callable[[], T]:
    """`fn` itself on a CPU; on CUDA its replay, after a few calls: read what it returns before the
    next. `fn` must do the same in the same memory every time."""
    graphs = on(device)
    return fn if graphs is None else lambda: graphs.run(None, None, fn)
