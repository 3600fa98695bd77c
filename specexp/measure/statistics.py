"""Bootstrap confidence intervals for ratios and rates, whatever is measured.

The resampled unit is the prompt (or the repeat), never the token, because the draft tokens within
one output are not independent. A speedup is called faster or slower only if its interval excludes
1.

A percentile bootstrap over six units covers the true value 84 % of the time instead of 95 %, so
both ends are moved outwards by the ratio of Student's t quantile to the normal one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import bootstrap, norm, t

FEWEST = 5  # units that an interval should rest on; with fewer it says little
_TINY = np.finfo(float).tiny


class Interval(NamedTuple):
    """A value with its 95 % bootstrap interval; low = high = value if there is only one unit."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def ratio(above: ArrayLike, below: ArrayLike) -> Interval:
    """sum(above) / sum(below) over paired units [n]; 0 if both sums are 0."""
    return _within(0, interval(_ratio, above, below), np.inf)


def share(part: ArrayLike, whole: ArrayLike) -> Interval:
    """As `ratio`, for parts that never exceed the whole: the interval ends at 1."""
    return _within(0, interval(_ratio, part, whole), 1)


def _ratio(above: np.ndarray, below: np.ndarray) -> Any:
    return above.sum(-1) / np.maximum(below.sum(-1), _TINY)


def _within(least: float, whole: Interval, most: float) -> Interval:
    return whole._replace(low=max(least, whole.low), high=min(most, whole.high))


def speedup(
    plain_s: ArrayLike, plain_tokens: ArrayLike, fast_s: ArrayLike, fast_tokens: ArrayLike
) -> Interval:
    """Seconds per delivered token of plain decoding over speculation's; paired units [n]."""
    times = interval(
        lambda ps, pt, fs, ft: (ps.sum(-1) / pt.sum(-1)) / (fs.sum(-1) / ft.sum(-1)),
        plain_s, plain_tokens, fast_s, fast_tokens,
    )  # fmt: skip
    return _within(0, times, np.inf)


def interval(statistic: Callable[..., Any], *columns: ArrayLike) -> Interval:
    """A statistic of paired columns [n] with its bootstrap interval over units.

    `statistic` takes columns [..., n] and reduces the last axis. Raises ValueError unless the
    columns are one-dimensional, equally long and not empty.
    """
    data = [np.asarray(c, float) for c in columns]
    if len({d.shape for d in data}) != 1 or data[0].ndim != 1 or not data[0].size:
        raise ValueError(f"need equally long series, got shapes {[d.shape for d in data]}")
    value, n = float(statistic(*data)), data[0].size
    if n < 2:
        return Interval(value, value, value)
    resampled = bootstrap(
        data, lambda *x, axis: statistic(*x),
        paired=True, vectorized=True, method="percentile", n_resamples=2000, rng=0,
    )  # fmt: skip
    wider = t.ppf(0.975, n - 1) / norm.ppf(0.975) * np.sqrt(n / (n - 1))
    low, high = (value + wider * (float(end) - value) for end in resampled.confidence_interval)
    return Interval(value, low, high)


def verdict(speedup: Interval) -> str:
    """The speedup in words: faster or slower only if the interval excludes 1."""
    if speedup.low == speedup.high:
        return f"{speedup.value:.2f}x in one sample"
    if speedup.low > 1:
        return f"{speedup.value:.2f}x faster"
    if speedup.high < 1:
        return f"{1 / speedup.value:.2f}x slower"
    return "no clear difference"
