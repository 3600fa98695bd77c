"""CUDA graphs of rounds and passes: captured once, then replayed whole. Only this file uses them.

A captured function may only read and write memory at fixed addresses: no value reaches the host,
every shape is known beforehand, and lasting state is changed in place. No generator state is
captured: noise is a function of rows and lengths (sampling.py), which are in that memory too. The
first calls of a function are warm-ups, launched one operation at a time, so that libraries allocate
what they need before the capture. On a CPU only rounds are recorded (replays.py).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable
from functools import cache, cached_property
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from specexp.errors import first_line

log = logging.getLogger("specexp")
T = TypeVar("T")

MOST = 64  # graphs kept; the least recently used is dropped first


class Refused(Exception):
    """A function cannot be recorded and has not run; the message says why, in one line."""


class Recorder(Protocol):
    """Runs a function as a warm-up, or records it. `warm`: warm-up calls before the recording."""

    warm: int

    def run(self, fn: Callable[[], T]) -> T: ...

    def record(self, fn: Callable[[], T], kind: Hashable) -> tuple[Callable[[], Any] | None, T]:
        """Run `fn` once and record it. Returns its replay, or None if it can only be called again,
        and its result. A replay overwrites the result, and so may the replay or recording of any
        other function of the same `kind` (None: of no kind). Raises Refused if nothing can be
        recorded."""
        ...


class Cuda:
    """Captures graphs of one device on its own stream; graphs of one kind share a memory pool."""

    warm = 3

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        # The last graph of each kind. A pool without a graph cannot be captured into again while a
        # tensor is still in it, so a pool is shared only with a graph that is alive.
        self.latest: WeakValueDictionary[Hashable, Any] = WeakValueDictionary()
        self.failed: list[Any] = []

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
            before = None if kind is None else self.latest.get(kind)
            pool = before.pool() if before else torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # a failed capture leaves its stream current: the outer context restores ours
            try:
                with (
                    torch.cuda.stream(torch.cuda.current_stream()),
                    torch.cuda.graph(graph, pool=pool, stream=self.stream),
                ):
                    made = fn()
            except RuntimeError as e:
                self.latest.pop(kind, None)  # before torch 2.12 its pool stays under capture
                self.failed.append(graph)  # and every later allocation asks this graph about it
                raise Refused(first_line(e.__context__ or e)) from e
            if kind is not None:
                self.latest[kind] = graph
            graph.replay()
        return graph.replay, made


class Replay:
    """The recording of a function of tensors. A graph owns none of the memory it uses: `held` keeps
    tensors alive that the caller may drop."""

    def __init__(self) -> None:
        self.calls = 0
        self.again: Callable[[], Any] | None = None
        self.refused = False
        self.inputs: tuple[Tensor, ...] = ()
        self.held: tuple[Tensor, ...] = ()
        self.made: Any = None


class Graphs:
    """The recordings of one owner, each under its kind and a key: all it depends on."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.kept: dict[tuple[Hashable, Hashable], Replay] = {}
        self.latest: tuple[Any, Replay] = None, Replay()
        self.kinds: set[Hashable] = set()  # kinds with a recording
        self.refused = False  # a recording failed, and none is tried again
        self.steady = True  # see `Engine.steady`

    def run(
        self,
        kind: Hashable,
        key: Hashable,
        fn: Callable[..., T],
        *inputs: Tensor,
        held: tuple[Tensor, ...] = (),
    ) -> T:
        """fn(*inputs), replayed if it is recorded. Read the result before the next run of the same
        `kind`.

        Functions with equal keys must do the same in the same memory, for `inputs` of the same
        shapes. `held`: tensors they use that must outlive the caller.
        """
        found = self._found((kind, key))
        self.steady = found.again is not None or self.refused or found.refused
        if found.again is not None:
            for place, x in zip(found.inputs, inputs, strict=True):
                place.copy_(x)
            found.again()
            made: T = found.made
            return made
        if self.steady:
            return fn(*inputs)
        found.calls += 1
        if found.calls <= self.recorder.warm:
            return self.recorder.run(lambda: fn(*inputs))
        places = tuple(x.clone() for x in inputs)
        try:
            found.again, made = self.recorder.record(lambda: fn(*places), kind)
        except Refused as e:
            self.refused = True
            log.warning("CUDA graphs are off for this engine, which makes it slower: %s", e)
            return fn(*inputs)
        found.refused = found.again is None
        if found.again is not None:
            found.inputs, found.held, found.made = places, held, made
            self.kinds.add(kind)
        return made

    def _found(self, name: tuple[Hashable, Hashable]) -> Replay:
        """The recording of this name, as the most recently used. The latest is remembered, because
        comparing a name is faster than hashing it."""
        if name != self.latest[0]:
            found = self.kept.pop(name, None) or Replay()
            self.kept[name] = found
            self.latest = name, found
            if len(self.kept) > MOST:
                del self.kept[next(iter(self.kept))]
        return self.latest[1]

    def clear(self) -> None:
        """Drop all recordings, because memory they use is going away."""
        self.kept.clear()
        self.latest = None, Replay()


@cache
def _cuda(device: torch.device) -> Cuda:
    return Cuda(device)


def on(device: torch.device) -> Graphs | None:
    """New CUDA graphs for one owner; None on a CPU, or with SPECEXP_GRAPHS=off."""
    if device.type != "cuda" or os.environ.get("SPECEXP_GRAPHS") == "off":
        return None
    return Graphs(_cuda(device))


class HostCopy:
    """A tensor of integers for the host, which the next replay overwrites."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.far = x, x.is_cuda

    def fetch(self) -> Callable[[], Any]:
        """Start copying to the host, ahead of anything launched later. The returned function waits
        for the copy and gives it as nested lists."""
        if not self.far:
            there = self._view.tolist()
            return lambda: there
        host = torch.empty(self.x.shape, dtype=self.x.dtype, pin_memory=True)
        host.copy_(self.x, non_blocking=True)
        brought = torch.cuda.Event()
        brought.record(torch.cuda.current_stream(self.x.device))

        def wait() -> Any:
            brought.synchronize()
            return host.tolist()

        return wait

    @cached_property
    def _view(self) -> memoryview:
        """The tensor's memory; reading it is ten times as fast as `Tensor.tolist`."""
        return self.x.numpy().data


def capture(fn: Callable[[], T], device: torch.device) -> Callable[[], T]:
    """`fn` itself on a CPU; on CUDA, after a few calls, its replay: read the result before the next
    call. `fn` must do the same in the same memory every time."""
    graphs = on(device)
    return fn if graphs is None else lambda: graphs.run(None, None, fn)
