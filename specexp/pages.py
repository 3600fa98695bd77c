"""A model's weights side by side in large pages, on a CPU whose system has them.

Every pass reads every weight, and asks for the address of each page anew: of 4 KiB each there are
ten thousand in a small model, of 2 MiB each twenty.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any

import torch

from specexp import quantised

LARGE = 1 << 21  # bytes of such a page
LINE = 64  # bytes of a cache's


def settle(module: Any) -> None:
    """Move the parameters of a module to large pages: matrices first, in their own order. One that
    would not fill a page stays where it is, and so do quantised weights."""
    plain = (p for p in module.parameters() if p.device.type == "cpu" and not quantised.small(p))
    weights = sorted(plain, key=lambda p: p.dim() < 2)
    size = sum(_room(p) for p in weights)
    if size < LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    places = torch.frombuffer(memory, dtype=torch.uint8).split([_room(p) for p in weights])
    for p, place in zip(weights, places, strict=True):
        p.data = place[: p.nbytes].view(p.dtype).view(p.shape).copy_(p.data)


def _room(p: torch.Tensor) -> int:
    return -(-p.nbytes // LINE) * LINE
