"""Accesses that a GPU may not survive, seen in the interpreter of Triton; a CPU lets most pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch


@contextmanager
def inside() -> Iterator[None]:
    """Meanwhile an interpreted kernel that reads or writes outside the memory of the tensors that
    it was given raises an error."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    memory: list[tuple[int, int]] = []  # from, to: of the kernel that runs
    launch = GridExecutor.__call__

    def launched(self: Any, *args: Any, **options: Any) -> None:
        given = filter(torch.is_tensor, (*args, *options.values()))
        parts = [x.untyped_storage() for x in given]
        memory[:] = [(x.data_ptr(), x.data_ptr() + x.nbytes()) for x in parts]
        launch(self, *args, **options)

    def checked(name: str, pointer: int, mask: int) -> Any:
        """A builder's method that is given pointers and a mask as its n-th arguments."""
        access = getattr(InterpreterBuilder, name)

        def check(self: Any, *args: Any) -> Any:
            size = args[pointer].get_element_ty().primitive_bitwidth // 8
            at = args[pointer].data[args[mask].data.astype(bool)].astype(np.int64)
            if at.size and not any(a <= at.min() and at.max() + size <= b for a, b in memory):
                one = [(a <= at) & (at + size <= b) for a, b in memory]
                assert np.any(one, 0).all(), f"{name} outside the kernel's tensors"
            return access(self, *args)

        return check

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", launched)
        for name, *where in (
            ("create_masked_load", 0, 1), ("create_masked_store", 0, 2),
            ("create_atomic_rmw", 1, 3),
        ):  # fmt: skip
            patch.setattr(InterpreterBuilder, name, checked(name, *where))
        yield
