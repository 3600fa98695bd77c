"""Intervals for ratios and rates. Nothing here knows what is being measured.

The resampled unit is the prompt (or the repetition), never the token: guesses of one text are not
independent. "Faster" is said only of an interval that excludes 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import bootstrap


class Interval(NamedTuple):
    """A figure and its 95 % bootstrap interval; low = high = value where only one unit was seen."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def ratio(above: ArrayLike, below: ArrayLike, seed: int = 0) -> Interval:
    """sum(above) / sum(below) over units [n] that belong together pairwise (percentile bootstrap)."""
    a, b = np.asarray(above, float), np.asarray(below, float)
    if a.shape != b.shape or a.ndim != 1 or not a.size:
        raise ValueError(f"need two equally long series, got {a.shape} and {b.shape}")
    value = float(a.sum() / b.sum()) if b.sum() else float("nan")
    if a.size < 2 or not np.isfinite(value):
        return Interval(value, value, value)
    found = bootstrap(
        (a, b),
        lambda x, y, axis=-1: x.sum(axis) / np.maximum(y.sum(axis), np.finfo(float).tiny),
        paired=True, vectorized=True, method="percentile", n_resamples=2000, rng=seed,
    )  # fmt: skip
    return Interval(value, *map(float, found.confidence_interval))


def speedup(
    plain_s: ArrayLike, plain_tokens: ArrayLike, fast_s: ArrayLike, fast_tokens: ArrayLike
) -> Interval:
    """Seconds a delivered token of plain decoding over the same of speculation, paired units [n]."""
    ps, pt, fs, ft = (np.asarray(x, float) for x in (plain_s, plain_tokens, fast_s, fast_tokens))

    def statistic(ps: np.ndarray, pt: np.ndarray, fs: np.ndarray, ft: np.ndarray, axis: int = -1):  # type: ignore[no-untyped-def]
        return (ps.sum(axis) / pt.sum(axis)) / (fs.sum(axis) / ft.sum(axis))

    value = float(statistic(ps, pt, fs, ft))
    if ps.size < 2:
        return Interval(value, value, value)
    found = bootstrap(
        (ps, pt, fs, ft), statistic,
        paired=True, vectorized=True, method="percentile", n_resamples=2000, rng=0,
    )  # fmt: skip
    return Interval(value, *map(float, found.confidence_interval))


def verdict(speedup: Interval) -> str:
    """In words: faster or slower only when the interval excludes 1."""
    if speedup.low > 1:
        return f"{speedup.value:.2f}x faster"
    if speedup.high < 1:
        return f"{1 / speedup.value:.2f}x slower"
    return "no clear difference"
