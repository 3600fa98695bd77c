"""The kernels of a GPU."""

from specexp.fast import cuda_graphs, fused, fused_eagle

__all__ = ["cuda_graphs", "fused", "fused_eagle"]  # importing them registers theirs
