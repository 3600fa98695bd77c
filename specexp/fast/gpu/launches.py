"""Launches: how many programs, of which sizes, and that one need not wait for the end of another.

A short kernel takes as long to start as to run. From compute capability 9 on, one may be started
while the one before it ends (CUDA's programmatic dependent launch). Triton's own `cdiv` and
`next_power_of_2` are made for kernels, and take 5 microseconds of the host.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):
    """Wait for the kernel before this one; must precede the first read of what that writes, and the
    first write of what it reads."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()


def dependent_launch(x: Tensor) -> dict[str, Any]:
    """Options of a launch on x's device, of a kernel that calls `wait_for_previous`."""
    return {"DEPENDENT": True, "launch_pdl": True} if supported(x.device) else {"DEPENDENT": False}


@cache
def supported(device: torch.device) -> bool:
    newer = device.type == "cuda" and torch.version.hip is None
    return newer and torch.cuda.get_device_capability(device) >= (9, 0)


def blocks_of(size: int, n: int) -> int:
    """How many blocks of this size hold n."""
    return -(-n // size)


def power_of_2(n: int) -> int:
    """The least from n on."""
    return 1 << (n - 1).bit_length()
