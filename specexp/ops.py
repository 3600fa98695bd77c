"""The seam between the algorithm and what makes it fast.

`@op` marks a torch function as the *reference* of an operation: its text, as the paper says it. The
callable it returns runs a *kernel* of the same name and signature where one is registered for the
device, and the reference otherwise. Kernels are imported at the first call on their device, from
`fast/cpu/ops.py` or `fast/gpu/ops.py`; without these files, or with SPECEXP_FAST=off, an operation
is its reference. A table and not `torch.library`, whose dispatch takes longer (LOG.md).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import update_wrapper
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

HOMES = {"cpu": "specexp.fast.cpu.ops", "cuda": "specexp.fast.gpu.ops"}  # device type -> kernels


class Kernel(NamedTuple):
    run: Callable[..., Any]
    ready: Callable[[], object]  # whether it can run here and now; asked before its first use


class Op(NamedTuple):
    reference: Callable[..., Any]
    kernels: dict[str, Kernel]  # by device type
    chosen: dict[torch.device, Callable[..., Any]]  # what runs on the devices met so far


OPS: dict[Callable[..., Any], Op] = {}  # by the callable that `op` returned


def op(reference: Callable[P, T]) -> Callable[P, T]:
    """Make this torch function, or method, the reference of an operation.

    The device is that of the first positional argument with a `.device`: a tensor, a module, an
    object of ours. A kernel refuses an input (a dtype, a stride) by returning NotImplemented before
    it has written anything; then the reference runs.
    """
    operation = Op(reference, {}, {})
    chosen = operation.chosen

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        for x in args:
            if (device := getattr(x, "device", None)) is not None:
                run = chosen.get(device) or _choose(operation, device)
                result: T = run(*args, **kwargs)
                return reference(*args, **kwargs) if result is NotImplemented else result
        return reference(*args, **kwargs)

    OPS[call] = operation
    return update_wrapper(call, reference)


def kernel(
    operation: Callable[P, T], *devices: str, ready: Callable[[], object] = lambda: True
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Register the decorated function as an operation's kernel on devices of these types."""

    def register(run: Callable[P, T]) -> Callable[P, T]:
        OPS[operation].kernels.update(dict.fromkeys(devices, Kernel(run, ready)))
        return run

    return register


def fast() -> bool:
    """Whether anything but references may run: SPECEXP_FAST is not `off`."""
    return os.environ.get("SPECEXP_FAST") != "off"


def forget() -> None:
    """Choose anew at the next call, because SPECEXP_FAST or what a kernel needs has changed."""
    for operation in OPS.values():
        operation.chosen.clear()


def _choose(operation: Op, device: torch.device) -> Callable[..., Any]:
    if fast() and (home := HOMES.get(device.type)):
        try:
            importlib.import_module(home)
        except ModuleNotFoundError as e:
            if not f"{home}.".startswith(f"{e.name}."):  # something else that it imports
                raise
    found = operation.kernels.get(device.type) if fast() else None
    run = found.run if found and found.ready() else operation.reference
    return operation.chosen.setdefault(device, run)
