"""The kernels of a GPU."""

from specexp.fast import fused, fused_eagle

__all__ = ["fused", "fused_eagle"]  # importing them registers theirs
