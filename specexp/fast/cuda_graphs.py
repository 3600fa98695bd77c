"""CUDA graphs for rounds and prefill: captured once, then replayed whole. Only this file uses them.

The kernels of a pass are short, and the host may take longer to launch them than the GPU to run
them; a graph is launched as one. What a captured function must keep to is said in recordings.py. If
a capture fails, a warning says why, and the function runs operation by operation from then on.
SPECEXP_GRAPHS=off turns graphs off.
"""

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch
from torch import Tensor

from specexp.errors import first_line
from specexp.fast.recordings import Recordings, Refused, Tape, memory_of
from specexp.models.cache import SlotCache
from specexp.models.lm import LM, fill
from specexp.ops import kernel, switched_off
from specexp.recording import Recorder, recorder_for
from specexp.sequences import Sequences

T = TypeVar("T")


class CudaTape(Tape):
    """Records functions as CUDA graphs, on a stream of its own. Graphs of one kind share a memory
    pool, so replaying one may overwrite the result of another."""

    warm, ahead = 3, 1

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        # The last graph of each kind, whose pool the next one shares. Once all graphs of a pool are
        # gone, nothing can be captured into it while a tensor is still in it. So the references
        # are weak: a pool is shared only while such a graph is alive.
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
            # A failed capture leaves its own stream current; the outer context restores this one.
            try:
                with (
                    torch.cuda.stream(torch.cuda.current_stream()),
                    torch.cuda.graph(graph, pool=pool, stream=self.stream),
                ):
                    result = fn()
            except RuntimeError as e:
                # Before torch 2.12 the pool of a failed capture stays marked as under capture, and
                # every later allocation asks this graph about it: keep the graph, leave the pool.
                self.latest.pop(kind, None)
                self.failed.append(graph)
                raise Refused(first_line(e.__context__ or e)) from e
            if kind is not None:
                self.latest[kind] = graph
            graph.replay()
        return graph.replay, result


_tape = cache(CudaTape)  # one for each device


def on(device: torch.device) -> Recordings | None:
    """A new recorder by CUDA graphs; None on a CPU, or with SPECEXP_GRAPHS=off."""
    if device.type != "cuda" or switched_off("SPECEXP_GRAPHS"):
        return None
    return Recordings(_tape(device))


@kernel(recorder_for, "cuda")
def graphs_for(target: LM) -> Recorder:
    """The recorder of an engine with a target on a GPU: CUDA graphs, unless SPECEXP_GRAPHS=off."""
    return on(target.device) or NotImplemented


# A prefill pass is captured only where launching it may take the host longer than running it takes
# the GPU: up to WORK multiplications (tokens times parameters). At most MOST tokens keep the memory
# of a capture small.
WORK, MOST = 1 << 42, 8192
_fills: WeakKeyDictionary[SlotCache, Recordings] = WeakKeyDictionary()
_refused: WeakSet[Any] = WeakSet()  # modules whose passes cannot be captured


@kernel(fill, "cuda")
def replayed_fill(
    lm: LM, seqs: Sequences, span: range, from_root: bool, taps: tuple[int, ...] = ()
) -> Tensor | None:
    """`fill` by a CUDA graph: the tapped hidden states [B, len(span), taps*E], or None. Passes are
    padded on the right to a few sizes, each a graph. Refused are large passes, models with states,
    and rows between the first and the last: a server has many, each would need graphs of its own,
    and it reads prompts in its last row instead (`EngineRows.desk`)."""
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
    """The size of the pass that reads this many tokens: 16, 32, 64, 128, 192, 256, ..."""
    return max(16, 1 << (tokens - 1).bit_length()) if tokens <= 64 else -(-tokens // 64) * 64


def capture(fn: Callable[[], T], device: torch.device) -> Callable[[], T]:
    """On a CPU, `fn` itself. On a GPU, a function that calls `fn` a few times, then captures it and
    replays it from then on; read its result before the next call. `fn` must do the same in the same
    memory every time."""
    graphs = on(device)
    return fn if graphs is None else lambda: graphs.run(None, None, fn)
