"""Rounds without kernels."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from support.bounds import inside

from specexp import ops
from specexp.models import lm


@contextmanager
def references(off: bool = True) -> Iterator[None]:
    """Meanwhile every operation is its torch reference, unless `off` is false."""
    with pytest.MonkeyPatch.context() as patch:
        if off:
            patch.setattr(ops, "fast", lambda: False)
            ops.forget()
        yield
    ops.forget()


@contextmanager
def lightened() -> Iterator[None]:
    """Meanwhile modules without passes of our own run on a CPU as on a GPU, but for its kernels."""
    from specexp.fast import lighter  # others test rounds without fast/

    ops.kernels_of(torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ops.OPS[lm.network].kernels, "cpu", (lighter.network, lambda device: True))
        ops.forget()
        yield
    ops.forget()


@contextmanager
def interpreted() -> Iterator[None]:
    """Meanwhile a GPU's kernels run on a CPU, in Triton's interpreter, inside their tensors."""
    home = ops.kernels_of(torch.device("cuda"))
    ops.forget()
    for op in ops.OPS.values():
        run, ready = op.kernels.get("cuda", (None, None))
        if ready is home.triton_runs:
            op.chosen[torch.device("cpu")] = run
    with inside():
        yield
    ops.forget()
