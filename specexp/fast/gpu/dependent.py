"""Launches that need not wait for the end of the kernel before them.

A short kernel takes as long to start as to run. From compute capability 9 on, one may be started
while the one before it ends (CUDA's programmatic dependent launch), and waits for what that wrote.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def begin(LATE: tl.constexpr):
    """Before the first word that another kernel writes is read, and the first that it reads is
    written."""
    if LATE:
        tl.extra.cuda.gdc_wait()


def late(x: Tensor) -> dict[str, Any]:
    """Options of a launch on x's device."""
    return {"LATE": True, "launch_pdl": True} if able(x.device) else {"LATE": False}


@cache
def able(device: torch.device) -> bool:
    newer = device.type == "cuda" and torch.version.hip is None
    return newer and torch.cuda.get_device_capability(device) >= (9, 0)
