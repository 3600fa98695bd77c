"""Intervals that cover what they say, on noise that is not kind."""

import numpy as np
import pytest

from specexp.measure import statistics


def noise(kind: str, rng: np.random.Generator, n: int) -> np.ndarray:
    """Positive factors with mean near 1."""
    if kind == "normal":
        return np.maximum(rng.normal(1, 0.05, n), 0.1)
    if kind == "lognormal":
        return rng.lognormal(0, 0.2, n)
    return np.where(rng.random(n) < 0.3, 1.25, 0.9) * rng.normal(1, 0.02, n)  # two clocks


def pairs(kind: str, speedup: float, rng: np.random.Generator, n: int = 40) -> tuple:
    """Seconds and tokens of n prompts, plain and fast, of a known speedup on average."""
    tokens = rng.integers(20, 100, n)
    plain = 0.01 * tokens * noise(kind, rng, n)
    fast = 0.01 / speedup * tokens * noise(kind, rng, n)
    return plain, tokens, fast, tokens


@pytest.mark.parametrize("n", [6, 10, 40])
@pytest.mark.parametrize("kind", ["normal", "lognormal", "bimodal"])
def test_interval_coverage_is_nominal(kind, n):
    rng = np.random.default_rng(1)
    intervals = [statistics.speedup(*pairs(kind, 1.5, rng, n)) for _ in range(800)]
    covered = np.mean([i.low <= 1.5 <= i.high for i in intervals])
    assert 0.93 <= covered <= 0.97, covered


def test_interval_stays_within_possible_values():
    assert statistics.share([9, 10], [10, 10]).high == 1
    assert statistics.ratio([0, 9], [10, 1]).low == 0
    assert statistics.speedup([9, 1], [1, 1], [1, 9], [1, 1]).low == 0


def test_equal_arms_are_rarely_called_different():
    rng = np.random.default_rng(2)
    verdicts = [
        statistics.verdict(statistics.speedup(*pairs("normal", 1.0, rng))) for _ in range(400)
    ]
    assert np.mean([s != "no clear difference" for s in verdicts]) <= 0.09


def test_small_gain_under_noise_is_detected():
    rng = np.random.default_rng(3)
    detected = 0
    for _ in range(100):
        tokens = np.full(40, 50)
        plain, fast = (0.01 * tokens * rng.normal(1, 0.03, 40) for _ in range(2))
        interval = statistics.speedup(plain, tokens, fast / 1.05, tokens)
        assert interval.value > 1
        detected += interval.low > 1
    assert detected >= 95


def test_speedup_counts_delivered_tokens():
    assert statistics.speedup([2.0], [10], [1.0], [10]).value == 2
    assert statistics.speedup([2.0], [10], [1.0], [5]).value == 1


def test_interval_of_one_unit_and_of_unequal_series():
    assert statistics.ratio([1], [2]) == (0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match="equally long"):
        statistics.ratio([1, 2], [1])
    with pytest.raises(ValueError, match="equally long"):
        statistics.ratio([], [])


def test_rate_of_nothing_drafted_is_zero():
    assert statistics.ratio([0, 0], [0, 0]).value == 0


@pytest.mark.parametrize(
    ("interval", "words"),
    [
        ((1.5, 1.2, 1.8), "1.50x faster"),
        ((0.5, 0.4, 0.9), "2.00x slower"),
        ((1.5, 0.9, 2.0), "no clear difference"),
        ((1.5, 1.5, 1.5), "1.50x in one sample"),
    ],
)
def test_verdict_needs_an_interval_without_one(interval, words):
    assert statistics.verdict(statistics.Interval(*interval)) == words
