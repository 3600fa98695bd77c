"""The kernels of a GPU: so far none of its own, but captured rounds and joined matrices."""

import os

from specexp.fast import cuda_graphs, fused, fused_eagle

__all__ = ["cuda_graphs", "fused", "fused_eagle"]  # importing them registers theirs


def state() -> str:
    """In words, which kernels run here."""
    off = os.environ.get("SPECEXP_GRAPHS") == "off"
    return f"joined matrices, {'no CUDA graphs (SPECEXP_GRAPHS=off)' if off else 'CUDA graphs'}"
