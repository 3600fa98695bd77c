"""Rounds without kernels."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from specexp import ops


@contextmanager
def references(off: bool = True) -> Iterator[None]:
    """Meanwhile every operation is its torch reference, unless `off` is false."""
    with pytest.MonkeyPatch.context() as patch:
        if off:
            patch.setattr(ops, "fast", lambda: False)
            ops.forget()
        yield
    ops.forget()
