"""CUDA graphs: functions captured once on a stream and replayed whole. Only this file uses them."""

import os
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch
from torch import Tensor

from specexp.errors import first_line
from specexp.fast.recordings import Recordings, Refused, memory_of
from specexp.models.cache import SlotCache
from specexp.models.lm import LM, fill
from specexp.ops import kernel
from specexp.recording import Recorder, Reports, recorder_for
from specexp.sequences import Sequences

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


# A pass is captured while its launches may take the host longer than it takes the device: up to
# so many multiplications, and so many tokens, which keep what a capture holds small.
WORK, MOST = 1 << 42, 8192
_fills: WeakKeyDictionary[SlotCache, Recordings] = WeakKeyDictionary()
_refused: WeakSet[Any] = WeakSet()  # modules whose passes cannot be captured


@kernel(fill, "cuda")
def replayed_fill(
    lm: LM, seqs: Sequences, span: range, from_root: bool, taps: tuple[int, ...] = ()
) -> Tensor | None:
    """Prefill, captured: its passes are padded on the right to a few sizes. Not in every row of a
    server, which are many, but in the last (`EngineRows.desk`)."""
    B, n = len(seqs.tokens), padded(len(span))
    assert lm.cache is not None
    one_of_many = 0 < seqs.first < lm.cache.batch - 1
    large = n * B > min(MOST, WORK // lm.parameters)
    if one_of_many or large or lm.net.parts or lm.module in _refused:
        return NotImplemented
    if (fresh := on(lm.device)) is None:
        return NotImplemented
    graphs = _fills.setdefault(lm.cache, fresh)
    graphs.warm, graphs.whose = 1, f"prompts that {lm.name} reads"

    def run(at: Tensor, length: Tensor) -> Tensor | None:
        return lm.fill_at(replace(seqs, length=length), at, from_root, taps)

    at = torch.arange(span.start, span.start + n, device=lm.device)[None]
    key = lm.net, seqs.address, n, from_root, taps
    hidden = graphs.run("fill", key, run, at, seqs.length, held=memory_of(seqs))
    if graphs.refused:
        _refused.add(lm.module)
    return None if hidden is None else hidden[:, : len(span)].clone()


def padded(tokens: int) -> int:
    """Tokens of the pass in which so many are read: 16, 32, 64, 128, 192, 256, ..."""
    return max(16, 1 << (tokens - 1).bit_length()) if tokens <= 64 else -(-tokens // 64) * 64


def capture(fn: Callable[[], T], device: torch.device) -> Callable[[], T]:
    """`fn` itself on a CPU; on CUDA, after a few calls, its replay: read the result before the next
    call. `fn` must do the same in the same memory every time."""
    graphs = on(device)
    return fn if graphs is None else lambda: graphs.run(None, None, fn)
