"""Rounds and passes as CUDA graphs: recorded once, then launched whole. No other file knows them.

What is recorded reads and changes nothing but memory that stays where it is: no value reaches the
host, every shape is given beforehand, what lasts is changed in place. It needs no random generator:
noise is a function of rows and lengths (sampling.py), which lie in that memory too. The first calls
of a function are real ones, launched one operation at a time, so that libraries have what they need
before anything is recorded. On a CPU functions stay what they are, but for rounds (replays.py).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable
from functools import cache, cached_property
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from specexp.errors import first_line

log = logging.getLogger("specexp")
T = TypeVar("T")

MOST = 64  # graphs that are kept; the one not used for longest goes first


class Refused(Exception):
    """Something cannot be recorded, and was not done; why, in a line."""


class Recorder(Protocol):
    """How a function is run so that it can be recorded afterwards, and how it is recorded. `warm`:
    calls before the one that is recorded."""

    warm: int

    def run(self, fn: Callable[[], T]) -> T: ...

    def record(self, fn: Callable[[], T], kind: Hashable) -> tuple[Callable[[], Any] | None, T]:
        """Run `fn` once. Returns how to run it again, or None if only by calling it, and its
        result. Every later run overwrites that, and so may any run of its `kind`, if one is given.
        Raises Refused where nothing can be recorded."""
        ...


class Cuda:
    """Graphs of one device, recorded on a stream of their own; those of a kind share memory."""

    warm = 3

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pools: dict[Hashable, Any] = {}
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
            pool = torch.cuda.graph_pool_handle()
            if kind is not None:
                pool = self.pools.setdefault(kind, pool)
            graph = torch.cuda.CUDAGraph()
            # a recording that fails leaves its own stream in place: the outer one puts ours back
            try:
                with (
                    torch.cuda.stream(torch.cuda.current_stream()),
                    torch.cuda.graph(graph, pool=pool, stream=self.stream),
                ):
                    made = fn()
            except RuntimeError as e:
                self.pools.pop(kind, None)  # before torch 2.12 it stays one being recorded into
                self.failed.append(graph)  # and every allocation asks the graph whose it is
                raise Refused(first_line(e.__context__ or e)) from e
            graph.replay()
        return graph.replay, made


class Replay:
    """What was recorded of a function of tensors. A graph owns none of the memory that it knows:
    `held` keeps alive what nobody else might."""

    def __init__(self) -> None:
        self.calls = 0
        self.again: Callable[[], Any] | None = None
        self.refused = False
        self.inputs: tuple[Tensor, ...] = ()
        self.held: tuple[Tensor, ...] = ()
        self.made: Any = None


class Graphs:
    """The graphs of one owner, each under a key that says what it depends on besides memory."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.kept: dict[tuple[Hashable, Hashable], Replay] = {}
        self.latest: tuple[Any, Replay] = None, Replay()
        self.kinds: set[Hashable] = set()  # of what was recorded
        self.refused = False  # something could not be recorded: nothing more is tried
        self.steady = True  # the next run like the last one will take as long

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
            log.warning("launched one operation at a time, not as a CUDA graph: %s", e)
            return fn(*inputs)
        found.refused = found.again is None
        if found.again is not None:
            found.inputs, found.held, found.made = places, held, made
            self.kinds.add(kind)
        return made

    def _found(self, name: tuple[Hashable, Hashable]) -> Replay:
        """The last used comes last; it is asked for again the most, and comparing is quick."""
        if name != self.latest[0]:
            found = self.kept.pop(name, None) or Replay()
            self.kept[name] = found
            self.latest = name, found
            if len(self.kept) > MOST:
                del self.kept[next(iter(self.kept))]
        return self.latest[1]

    def clear(self) -> None:
        """Forget all: memory that they knew is gone."""
        self.kept.clear()
        self.latest = None, Replay()


@cache
def _cuda(device: torch.device) -> Cuda:
    return Cuda(device)


def on(device: torch.device) -> Graphs | None:
    """Where graphs can be recorded, an owner's own; None on a CPU, or if SPECEXP_GRAPHS is off."""
    if device.type != "cuda" or os.environ.get("SPECEXP_GRAPHS") == "off":
        return None
    return Graphs(_cuda(device))


class Told:
    """Numbers for the host, which may be others after every run of what made them."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.far = x, x.is_cuda

    def fetch(self) -> Callable[[], Any]:
        """Begin to bring them to the host, before anything that is launched later can overwrite
        them. What is returned waits for that, and gives them as lists."""
        if not self.far:
            there = self._near.tolist()
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
    def _near(self) -> memoryview:
        """Where they are; torch takes ten times as long to say what is there."""
        return self.x.numpy().data


def capture(fn: Callable[[], T], device: torch.device) -> Callable[[], T]:
    """`fn` itself on a CPU; on CUDA its replay, after a few calls: read what it returns before the
    next. `fn` must do the same in the same memory every time."""
    graphs = on(device)
    return fn if graphs is None else lambda: graphs.run(None, None, fn)
