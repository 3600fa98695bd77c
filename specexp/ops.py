"""The seam between the algorithm and what makes it fast.

`@op` marks a torch function as the *reference* of an operation, written as in the paper. The
callable that it returns runs a *kernel* of the same signature if one is registered for the device,
and the reference otherwise. Kernels are imported from fast/ at the first call on their device.
Without fast/, or with SPECEXP_FAST=off, only references run. Dispatch is a table lookup, because
that of `torch.library` takes longer (LOG.md).
"""

import importlib
import os
from collections.abc import Callable
from functools import update_wrapper
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from specexp.errors import UserError

P = ParamSpec("P")
T = TypeVar("T")
KERNELS = {"cpu": "specexp.fast.cpu.ops", "cuda": "specexp.fast.gpu.ops"}  # modules, by device


Ready = Callable[[torch.device], object]


class Op(NamedTuple):
    reference: Callable[..., Any]
    kernels: dict[str, tuple[Callable[..., Any], Ready]]  # by device, with `ready`
    chosen: dict[torch.device, Callable[..., Any]]  # what runs on the devices met so far


OPS: dict[Callable[..., Any], Op] = {}  # by the callable that `op` returned


def op(reference: Callable[P, T]) -> Callable[P, T]:
    """Make this torch function, or method, the reference of an operation.

    The device is that of the first positional argument with a `.device`. A kernel refuses an input
    (a dtype, a stride) by returning NotImplemented before it has written anything.
    """
    operation = Op(reference, {}, chosen := dict[torch.device, Callable[..., Any]]())

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
    operation: Callable[P, T], *devices: str, ready: Ready = lambda device: True
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Register a function as an operation's kernel; it is used if `ready(device)`, called before
    the first use on a device, is true."""

    def register(run: Callable[P, T]) -> Callable[P, T]:
        OPS[operation].kernels.update(dict.fromkeys(devices, (run, ready)))
        return run

    return register


def fast() -> bool:
    """Whether anything but references may run: SPECEXP_FAST is not `off`."""
    return not switched_off("SPECEXP_FAST")


def switched_off(name: str) -> bool:
    """Whether this environment variable is `off`. Raises UserError for a value that only seems to
    switch something off, such as 0."""
    if (value := os.environ.get(name, "")) not in ("", "on", "off"):
        raise UserError(f"{name} is {value!r}, which switches nothing: use off, or leave it unset")
    return value == "off"


def forget() -> None:
    """Forget which kernels were chosen, after SPECEXP_FAST or what a kernel needs has changed."""
    for operation in OPS.values():
        operation.chosen.clear()


def kernels_of(device: torch.device) -> Any:
    """The module of kernels for a device, whose `state()` says in words what can run; or None."""
    name = KERNELS.get(device.type) if fast() else None
    try:
        return name and importlib.import_module(name)
    except ModuleNotFoundError as e:
        if not f"{name}.".startswith(f"{e.name}."):  # something else that it imports
            raise


def state(device: torch.device) -> str:
    """In words, which kernels run on a device: `compiled by c++, AVX512`, `off by SPECEXP_FAST`."""
    if kernels := kernels_of(device):
        return str(kernels.state())
    return "no kernels: torch's operations" if fast() else "off by SPECEXP_FAST"


def _choose(operation: Op, device: torch.device) -> Callable[..., Any]:
    kernels_of(device)  # registers its kernels
    run, ready = operation.kernels.get(device.type, (operation.reference, bool))
    if not fast() or not ready(device):
        run = operation.reference
    return operation.chosen.setdefault(device, run)
