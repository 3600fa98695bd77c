"""CUDA graphs: functions captured once on a stream and replayed whole. Only this file uses them."""

import os
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from specexp.errors import first_line
from specexp.fast.recordings import Recordings, Refused
from specexp.models.lm import LM
from specexp.ops import kernel
from specexp.recording import Recorder, Reports, recorder_for

T = TypeVar("T")


class CudaTape:
    """Records functions of one device as CUDA graphs, on a stream of its own; see `CpuTape`. Graphs
    of one kind share a memory pool."""

    warm, ahead = 3, 1

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
                result = fn()
            now.wait_stream(self.stream)
        return result

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
                    result = fn()
            except RuntimeError as e:
                self.latest.pop(kind, None)  # before torch 2.12 its pool stays under capture
                self.failed.append(graph)  # and every later allocation asks this graph about it
                raise Refused(first_line(e.__context__ or e)) from e
            if kind is not None:
                self.latest[kind] = graph
            graph.replay()
        return graph.replay, result

    def repeat(self, replay: Callable[[], Any] | None, most: int, report: Tensor) -> Reports:
        return []


_tape = cache(CudaTape)  # of a device


def on(device: torch.device) -> Recordings | None:
    """New CUDA graphs for one owner; None on a CPU, or with SPECEXP_GRAPHS=off."""
    if device.type != "cuda" or os.environ.get("SPECEXP_GRAPHS") == "off":
        return None
    return Recordings(_tape(device))


@kernel(recorder_for, "cuda")
def graphs_for(target: LM) -> Recorder:
    """CUDA graphs, unless SPECEXP_GRAPHS is off."""
    return on(target.device) or NotImplemented


def capture(fn: Callable[[], T], device: torch.device) -> Callable[[], T]:
    """`fn` itself on a CPU; on CUDA, after a few calls, its replay: read the result before the next
    call. `fn` must do the same in the same memory every time."""
    graphs = on(device)
    return fn if graphs is None else lambda: graphs.run(None, None, fn)
