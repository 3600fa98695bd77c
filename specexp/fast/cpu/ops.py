"""The kernels of a CPU."""

from specexp.fast import fused, fused_eagle, huge_pages

__all__ = ["fused", "fused_eagle", "huge_pages"]  # importing them registers theirs
