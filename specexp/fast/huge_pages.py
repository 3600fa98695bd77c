"""Moves a model's weights into huge pages of memory, on a CPU whose system has them.

Every pass reads every weight, and for that the processor looks up the address of every page: ten
thousand pages of 4 KiB in a small model, but only twenty of 2 MiB. Where the system grants no huge
pages, the weights lie side by side in ordinary ones.
"""

import mmap
from contextlib import suppress
from typing import Any

import torch

from specexp.models import int8, load
from specexp.ops import kernel

LARGE = 1 << 21  # bytes of a huge page
LINE = 64  # bytes of a cache line


@kernel(load.place_weights, "cpu")
def place_weights(module: Any) -> None:
    """Move a module's parameters to huge pages: matrices first, then vectors, each in the module's
    order. Quantised weights and those on other devices stay where they are, and so does everything
    if the parameters together are smaller than one huge page, or memory does not hold them twice.
    """
    plain = (p for p in module.parameters() if p.device.type == "cpu" and not int8.is_quantised(p))
    weights = sorted(plain, key=lambda p: p.dim() < 2)
    sizes = [-(-p.nbytes // LINE) * LINE for p in weights]  # whole cache lines
    if sum(sizes) < LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    try:
        memory = mmap.mmap(-1, sum(sizes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # a system that promises no more memory than it has
        return
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    parts = torch.frombuffer(memory, dtype=torch.uint8).split(sizes)
    for p, part in zip(weights, parts, strict=True):
        p.data = part[: p.nbytes].view(p.dtype).view(p.shape).copy_(p.data)
