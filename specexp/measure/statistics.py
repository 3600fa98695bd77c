"""95 % intervals of ratios and rates that hold their level with few prompts, and for the best of
several arms.

The unit is a prompt, never a token: the draft tokens of one output are not independent. Five
prompts that look alike say little about a sixth. So an interval over prompts counts one more that
was not seen: at the lower end as bad, at the upper end as good as a prompt may be. Units are
weighted at random, with Dirichlet weights (Rubin 1981); with the extreme unit among them the ends
are Gaffke's bounds (2005), which for units that are all or nothing are those of Clopper and
Pearson.

How far the unseen prompt may lie: a kind of text that makes up a fifth of all is missed by up to
`MIN_PROMPTS - 1` prompts more than once in forty times (0.8^16 = 2.8 %). With so few it is up to
`UNSEEN_FACTOR` times as fast, or as slow, as any that was seen, and its share of draft tokens
accepted may be anything. That fades out until there are twice as many; rarer kinds are then not
guarded against.

Timings of the same work again and again meet only noise: `same_work` is for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import binomtest

Key = TypeVar("Key")

MIN_REPEATS = 5  # repeats of the same work that an interval should rest on
MIN_PROMPTS = 17  # prompts that a verdict should rest on
UNSEEN_FACTOR = 3.0
SIGNS = np.array([-1, 1])  # of the lower and of the upper end
RESAMPLES = 4000
TAIL = 0.025  # probability beyond either end
NOT_CREDIBLE = "not credible: was the machine busy?"
NOTHING = "nothing was drafted"
_TINY = np.finfo(float).tiny


class Interval(NamedTuple):
    """A value with its 95 % interval. doubt: why it should not be trusted (too few units, and how
    many more are needed; or not credible), else "". A single repeat has low = high = value."""

    value: float
    low: float
    high: float
    doubt: str = ""

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"

    def columns(self, name: str) -> dict[str, float]:
        """Those of a table's row: `name`, low and high."""
        return {name: self.value, "low": self.low, "high": self.high}

    def plus(self, more: float) -> Interval:
        return Interval(self.value + more, self.low + more, self.high + more, self.doubt)

    def rest(self) -> Interval:
        """1 minus the value, such as what a share leaves."""
        return Interval(1 - self.value, 1 - self.high, 1 - self.low, self.doubt)


class Draws(NamedTuple):
    """A value, and the bootstrap draws [R] of it from which the lower and the upper end of its
    interval are taken. Arms with equally many units have the same random weights in every draw."""

    value: float
    low: np.ndarray
    high: np.ndarray
    doubt: str = ""

    @property
    def interval(self) -> Interval:
        """Its own; that of any of several arms is one of `simultaneous`."""
        return simultaneous({0: self})[0]

    def under(self, noise: Draws) -> Draws:
        """The same with the relative spread of another value, which is independent of it."""
        low, high = (
            own * of_noise[::-1] / noise.value
            for own, of_noise in ((self.low, noise.low), (self.high, noise.high))
        )
        return Draws(self.value, low, high, self.doubt or noise.doubt)


def simultaneous(arms: Mapping[Key, Draws]) -> dict[Key, Interval]:
    """Intervals of several arms that all hold at once with 95 %, so that any of them may be picked.

    The ends of each are quantiles of its draws, of one level for all: the level at which in 2.5 %
    of the draws, taken by all arms together, any of them is beyond its end (max-T, by ranks)."""
    if not arms:
        return {}
    lows = _quantiles(np.array([arm.low for arm in arms.values()]))
    highs = -_quantiles(np.array([-arm.high for arm in arms.values()]))
    return {
        key: Interval(arm.value, min(arm.value, float(low)), max(arm.value, float(high)), arm.doubt)
        for (key, arm), low, high in zip(arms.items(), lows, highs, strict=True)
    }


def _quantiles(draws: np.ndarray) -> np.ndarray:
    """The simultaneous lower 2.5 % quantiles [k] of draws [k, R]."""
    ranks = draws.argsort(1).argsort(1)
    rank = np.quantile(ranks.min(0), TAIL, method="lower")
    return np.sort(draws, 1)[:, int(rank)]


def speedup(*columns: ArrayLike, **about: Any) -> Interval:
    """That of the columns of `speedup_draws`, with its interval. about: its other arguments."""
    return speedup_draws(*columns, **about).interval


def speedup_draws(
    plain_s: ArrayLike, plain_tokens: ArrayLike, fast_s: ArrayLike, fast_tokens: ArrayLike,
    *, same_work: bool = False, units: str = "prompts",
) -> Draws:  # fmt: skip
    """Seconds per delivered token of plain decoding over speculation's, from paired units [n]:
    prompts (or whatever they are called), or repeats of the same work."""
    data = _columns(plain_s, plain_tokens, fast_s, fast_tokens)
    each, usual = _speedup(*data), data.mean(1)
    slow, fast = (_unseen_range(x, same_work)[1] for x in (1 / each, each))
    worst = usual * [1, 1, slow * _speedup(*usual), 1]  # what takes long weighs more at either end
    best = usual * [fast / _speedup(*usual), 1, 1, 1]
    return _bootstrap(_speedup, data, np.array([worst, best]), same_work, units)


def _speedup(plain_s: Any, plain_tokens: Any, fast_s: Any, fast_tokens: Any) -> Any:
    return (plain_s / plain_tokens) / np.maximum(fast_s / fast_tokens, _TINY)


def ratio(
    above: ArrayLike, below: ArrayLike, most: ArrayLike | None = None, *, same_work: bool = False
) -> Interval:
    """sum(above) / sum(below) over paired units [n], never negative; 0 if both sums are 0.

    most: what each unit would have below if it had nothing above: a text of which no draft token is
    accepted takes a pass for every token. None: as much as it has."""
    data = _columns(above, below, below if most is None else most)
    ends = _unseen_range(_ratio(*data[:2]), same_work)
    if most is not None:  # such a unit may have nothing above
        ends[0] *= 1 - _unseen_weight(data.shape[1])
    unseen = _unseen_ratio(ends, data)
    return _bootstrap(_ratio, data[:2], unseen, same_work).interval


def share(
    part: ArrayLike, whole: ArrayLike, most: ArrayLike | None = None, *, same_work: bool = False
) -> Interval:
    """As `ratio`, for counts of which one is a part of the other: the interval is at least as wide
    as Wilson's, in which every token stands for itself. A share of nothing may be anything."""
    data = _columns(part, whole, whole if most is None else most)
    if not data[1].any():
        return Interval(0.0, 0.0, 1.0, NOTHING)
    if same_work:
        value = ratio(part, whole, same_work=True)
        return value._replace(high=min(1.0, value.high))
    data = data[:, data[1] > 0]
    kinds = _unseen_weight(data.shape[1])
    ends = (1 - kinds) * _widened_range(_ratio(*data[:2])).clip(0, 1) + kinds * np.array([0, 1])
    value = _bootstrap(_ratio, data[:2], _unseen_ratio(ends, data)).interval
    alone = binomtest(*data[:2].sum(1).round().astype(int)).proportion_ci(method="wilson")
    return value._replace(low=min(value.low, alone.low), high=max(value.high, alone.high))


def _unseen_ratio(ends: np.ndarray, data: np.ndarray) -> np.ndarray:
    """The columns above and below of an unseen unit with each of these ratios [2], as [2, 2]; from
    columns above, below and most. The lower its ratio, the more it has below."""
    above, below, most = data.mean(1)
    below = np.maximum(below, most / (1 + ends * (most - below) / max(above, 1e-9)))
    return np.c_[ends * below, below]


def _ratio(above: Any, below: Any) -> Any:
    return above / np.maximum(below, _TINY)


def difference_draws(
    above: ArrayLike, below: ArrayLike, other_above: ArrayLike, other_below: ArrayLike
) -> Draws:
    """The ratio of the sums of the first two columns minus that of the others; paired units [n].
    The unseen unit differs by up to `UNSEEN_FACTOR` times as much as any seen, either way."""
    data = _columns(above, below, other_above, other_below)
    each, usual = _difference(*data), data.mean(1)
    kinds = (UNSEEN_FACTOR - 1) * _unseen_weight(each.size) * np.abs(each).max()
    unseen = np.array([usual, usual])
    unseen[:, 0] = usual[1] * (usual[2] / usual[3] + _widened_range(each) + kinds * SIGNS)
    return _bootstrap(_difference, data, unseen)


def _difference(above: Any, below: Any, other_above: Any, other_below: Any) -> Any:
    return _ratio(above, below) - _ratio(other_above, other_below)


def _columns(*columns: ArrayLike) -> np.ndarray:
    """[c, n]. Raises ValueError unless they are one-dimensional, equally long and not empty."""
    data = [np.asarray(c, float) for c in columns]
    if len({d.shape for d in data}) != 1 or data[0].ndim != 1 or not data[0].size:
        raise ValueError(f"need equally long series, got shapes {[d.shape for d in data]}")
    return np.array(data)


def _unseen_weight(prompts: int) -> float:
    """The weight of kinds of prompts that were not seen: 1 up to `MIN_PROMPTS` prompts, 0 from
    twice as many on."""
    return float(np.interp(prompts, (MIN_PROMPTS, 2 * MIN_PROMPTS), (1, 0)))


def _widened_range(each: np.ndarray) -> np.ndarray:
    """The ends [2] of the range of values [n], widened for noise: by a quarter of the range, for a
    heavy tail, and by more below six units, for normal noise."""
    return np.array([each.min(), each.max()]) + np.ptp(each) * (0.25 + 90 / each.size**4) * SIGNS


def _unseen_range(each: np.ndarray, same_work: bool) -> np.ndarray:
    """The least and the most that an unseen unit may be, from values of units [n] that are never
    negative."""
    times = 0 if same_work else (UNSEEN_FACTOR - 1) * _unseen_weight(each.size)
    ends = np.array([each.min() / (1 + times) - each.min(), each.max() * times])
    return (_widened_range(each) + ends).clip(0)


def _bootstrap(
    statistic: Callable[..., Any], data: np.ndarray, unseen: np.ndarray, same_work: bool = False,
    units: str = "prompts",
) -> Draws:  # fmt: skip
    """Draws of a statistic of the weighted sums of columns [c, n] and an unseen unit: that of
    unseen [2, c] for the lower, and that for the upper end."""
    n, value = data.shape[1], float(statistic(*data.sum(1)))
    low, high = (statistic(*np.c_[data, row] @ _weights(n + 1)) for row in unseen)
    if same_work and n == 1:  # nothing tells its noise
        low = high = np.full(RESAMPLES, value)
    doubt = too_few(n, *((MIN_REPEATS, "repeats") if same_work else (MIN_PROMPTS, units)))
    return Draws(value, low, high, doubt)


def too_few(units: int, enough: int, name: str) -> str:
    """The doubt of an interval over fewer than enough units, such as prompts; else ""."""
    return f"too few {name}: at least {enough - units} more" if units < enough else ""


@lru_cache(maxsize=4)
def _weights(units: int) -> np.ndarray:
    """Dirichlet weights [units, R], the same for all statistics of so many units."""
    return np.random.default_rng(0).dirichlet(np.ones(units), RESAMPLES).T


def verdict(speedup: Interval) -> str:
    """What may be said of a speedup: faster or slower only if its interval excludes 1."""
    undecided = speedup.low <= 1 <= speedup.high or speedup.low == speedup.high
    if speedup.doubt == NOT_CREDIBLE or (speedup.doubt and undecided):
        return speedup.doubt
    if speedup.low > 1:
        return "faster"
    return "slower than plain decoding" if speedup.high < 1 else "no clear difference"
