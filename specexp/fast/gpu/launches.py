"""How Triton's kernels are launched: in which sizes, and without waiting for the one before to end.

A short kernel takes as long to start as to run. From compute capability 9 on, it may be started
while the one before it still runs (CUDA's programmatic dependent launch); on other GPUs it waits.
Triton's own `cdiv` and `next_power_of_2` are made for kernels, and take 5 microseconds of the host.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):
    """Wait for the end of the kernel before this one. To be called before the first read of what
    that kernel writes and the first write of what it reads."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()


def dependent_launch(x: Tensor) -> dict[str, Any]:
    """The options with which a kernel that calls `wait_for_previous` is launched on x's device."""
    return {"DEPENDENT": True, "launch_pdl": True} if supported(x.device) else {"DEPENDENT": False}


@cache
def supported(device: torch.device) -> bool:
    """Whether a kernel on this device may be started while the one before it runs."""
    newer = device.type == "cuda" and torch.version.hip is None
    return newer and torch.cuda.get_device_capability(device) >= (9, 0)


def blocks_of(size: int, n: int) -> int:
    """How many blocks of this size it takes to hold n items."""
    return -(-n // size)


def power_of_2(n: int) -> int:
    """The least power of two that is not below n, for n >= 1."""
    return 1 << (n - 1).bit_length()
