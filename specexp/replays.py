"""Rounds on a CPU as one call: what is compiled in them is noted once, and then called again.

A round of a small model is some twenty calls of compiled code (native.py), and what Python does
between them takes a fifth as long as its passes. Where torch did nothing in a round but make room
and look at it in another shape, those calls in their order are the round: the memory that they read
and write stays where it is, as graphs.py has it. A round in which torch reckons, or a number
reaches the host, is run as it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from ctypes import Structure, addressof, c_void_p
from typing import Any, Self, TypeVar

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specexp import native
from specexp.graphs import Graphs
from specexp.lm import LM

T = TypeVar("T")

ROOMS = {"empty", "arange"}
VIEWS = {
    "alias", "detach", "expand", "reshape", "select", "slice", "squeeze", "t", "transpose",
    "unsqueeze", "view", "_unsafe_view",
}  # fmt: skip
MOST = 8 << 20  # bytes that are kept for a replay; beside larger passes Python is nothing


class _Call(Structure):
    _fields_ = [("function", c_void_p), ("places", c_void_p)]


class _Noted(TorchDispatchMode):
    """Notes the compiled calls, and whether they were all that was done."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[native.Call] = []
        self.whole, self.room = True, 0

    def __enter__(self) -> Self:
        self.before, native.here.calls = native.here.calls, self.calls
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        native.here.calls = self.before
        super().__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if self.whole:
            self.whole = self._known(func.overloadpacket.__name__, args, made)
        return made

    def _known(self, name: str, args: Any, made: Any) -> bool:
        if name in VIEWS:
            return made.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr()
        if name not in ROOMS or any(isinstance(x, Tensor) for x in tree_leaves(args)):
            return False
        self.room += made.nbytes
        return self.room <= MOST


class _Again:
    """All calls once more. What they were given lasts as long as this does."""

    def __init__(self, calls: list[native.Call]) -> None:
        self.calls = calls
        self.list = (_Call * len(calls))(*(_Call(c.function, addressof(c.places)) for c in calls))
        self.count, self.first = len(calls), addressof(self.list)
        self.code = native.replay()

    def __call__(self) -> None:
        if not self.code(self.count, self.first):
            raise IndexError("a token or a slot was to be read that there is not")


def of(target: LM) -> Graphs | None:
    """An owner's own, where the target's passes are compiled; None if SPECEXP_GRAPHS is off."""
    off = os.environ.get("SPECEXP_GRAPHS") == "off"
    return None if off or not isinstance(target.net, native.Native) else Graphs(Calls())


class Calls:
    """A recorder of them for `graphs.Graphs`."""

    warm = 1

    def run(self, fn: Callable[[], T]) -> T:
        return fn()

    def record(self, fn: Callable[[], T], kind: Hashable) -> tuple[Callable[[], Any] | None, T]:
        with _Noted() as noted:
            made = fn()
        return _Again(noted.calls) if noted.whole and noted.calls else None, made
