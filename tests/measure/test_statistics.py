"""Intervals that cover what they say, on noise that is not kind."""

import numpy as np
import pandas as pd
import pytest
from conftest import also
from support.intervals import (
    ARMS,
    KINDS,
    UNITS,
    alone,
    called_faster,
    covered,
    equal_arms,
    over_repeats,
)

from specexp.measure import interleave, statistics, summaries
from specexp.trace import Acceptance

RECORD = Acceptance(drafted=60, emitted=60, cut=0, histogram=(20, 0, 20))


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


def turns(seconds: np.ndarray, tokens: np.ndarray) -> list[interleave.Turn]:
    return [interleave.Turn(s) for s in seconds / tokens]


@pytest.mark.parametrize(
    ("kind", "n"),
    [("lognormal", 40), ("bimodal", 6),
     *also(("normal", 6), ("normal", 40), ("lognormal", 6), ("bimodal", 40))],
)  # fmt: skip
def test_repeats_are_covered_at_the_nominal_level(kind, n):
    rng = np.random.default_rng(1)
    columns = [pairs(kind, 1.5, rng, n) for _ in range(300)]
    for intervals in (
        [statistics.speedup(*c, same_work=True) for c in columns],
        [interleave.ratio(turns(*c[:2]), turns(*c[2:])) for c in columns],
    ):
        covered = np.mean([i.low <= 1.5 <= i.high for i in intervals])
        assert 0.93 <= covered <= 0.995, covered


@pytest.mark.parametrize(
    ("prompts", "runs"), [((5, 12, 20, 40), 200), *also(((1, 2, *UNITS), 1000))]
)
@pytest.mark.parametrize("kind", KINDS)
def test_intervals_hold_their_level_with_any_number_of_prompts(kind, prompts, runs):
    for n in prompts:
        assert covered(kind, n, runs) >= 0.93, n


def test_simulations_notice_intervals_of_repeats_in_the_place_of_those_of_prompts():
    assert all(covered(kind, 5, 200, over_repeats) < 0.9 for kind in KINDS)
    assert called_faster(40, 8, 60, alone)[0] > 0.05


@pytest.mark.parametrize(("plain", "fast"), [(1, -1), (0, -1), (1, 0)])
def test_rare_slow_prompts_are_covered_whichever_side_is_slow(plain, fast):
    """A fifth of prompts at 0.7, the others at 2.2: plain decoding or speculation takes as long."""
    rng = np.random.default_rng(4)
    truth = {(0, -1): 1 / (0.2 / 0.7 + 0.8 / 2.2), (1, 0): 0.2 * 0.7 + 0.8 * 2.2}
    truth[1, -1] = np.mean([0.7**0.5, *[2.2**0.5] * 4]) / np.mean([0.7**-0.5, *[2.2**-0.5] * 4])
    power = 0.5 if plain and fast else 1
    for n in (5, 14):
        hits = 0
        for _ in range(60):
            ratio = np.where(rng.random(n) < 0.2, 0.7, 2.2) ** power
            found = statistics.speedup(ratio**plain, np.ones(n), ratio**fast, np.ones(n))
            hits += found.low <= truth[plain, fast] <= found.high
        assert hits >= 56


@pytest.mark.parametrize(
    ("prompts", "arms", "runs"),
    [(40, 5, 60), *also(*((n, arms, 300) for n in (10, 40, 80) for arms in ARMS))],
)
def test_best_of_equal_arms_is_rarely_called_faster(prompts, arms, runs):
    false, mean = called_faster(prompts, arms, runs)
    assert false <= 0.03
    assert abs(mean - 1) < 0.008


def test_clearly_faster_arm_among_slow_ones_is_found():
    samples = equal_arms(np.random.default_rng(0), 40, 5)
    samples.loc[samples["gamma"] == 3, "s"] /= 1.2
    measured = summaries.speedups(samples, "gamma")
    assert summaries.fastest(measured)["gamma"] == 3
    assert summaries.fastest(measured)["low"] > 1.1
    assert summaries.fastest(measured)["speedup"] == measured["speedup"].max()
    assert summaries.best_is_certain(measured, "speedup")


def test_figure_of_the_fastest_says_which_one_is_cross_validated():
    measured = summaries.speedups(equal_arms(np.random.default_rng(0), 40, 5), "gamma")
    best = summaries.fastest(measured)
    assert best["speedup"] < best["measured"]
    assert f" ({best['measured']:.2f}x without cross-validation)" in summaries.verdict(best)


def of_batches(
    passes: np.ndarray, rng: np.random.Generator, batch: int, noise: float = 0.05, repeats: int = 5
) -> pd.DataFrame:
    """A table like that of `one_pairing.throughput` at one size, of prompts that take these passes
    for 60 tokens; a round takes twice as long as a plain step, and noise is that of each batch."""
    numbers = np.arange(len(passes)) // batch
    return pd.concat(
        pd.DataFrame({"question_id": range(len(passes)), "batch": batch, "number": numbers})
        .assign(repeat=repeat, passes=passes, tokens=60, plain_tokens=60, record=RECORD)
        .assign(plain_s=60 * rng.normal(1, noise, len(passes))[numbers])
        .assign(s=2 * passes * rng.normal(1, noise, len(passes))[numbers])
        for repeat in range(repeats)
    )


def of_one_size(samples: pd.DataFrame) -> pd.Series:
    return summaries.speedups(samples, "batch").iloc[0]


@pytest.mark.parametrize("batch", [16, *also(4, 32)])
def test_intervals_of_batches_cover_other_prompts(batch):
    """Also where all prompts fit in one or two batches."""
    rng, truth = np.random.default_rng(9), 60 / (0.25 * 20 + 0.75 * 50) / 2
    found = [
        of_one_size(of_batches(np.where(rng.random(32) < 0.25, 20, 50), rng, batch))
        for _ in range(100)
    ]
    assert np.mean([row["low"] <= truth <= row["high"] for row in found]) >= 0.95
    assert np.mean([row["high"] / row["low"] for row in found]) < 2


@pytest.mark.parametrize("batch", [8, 40])
def test_timing_noise_of_batches_widens_their_intervals(batch):
    quiet, noisy = (
        of_one_size(of_batches(np.full(40, 20), np.random.default_rng(3), batch, noise))
        for noise in (0.001, 0.1)
    )
    assert quiet["high"] / quiet["low"] < 1.01
    assert noisy["high"] / noisy["low"] > 1.05


def test_a_batch_that_ran_once_has_no_interval():
    row = of_one_size(of_batches(np.full(40, 20), np.random.default_rng(3), 40, repeats=1))
    assert row["low"] == row["speedup"] == row["high"]
    assert summaries.verdict(row).endswith("too few repeats: at least 4 more")


@pytest.mark.parametrize(("prompts", "least"), [(5, 0.4), (20, 0.8)])
def test_share_of_all_accepted_is_not_certain(prompts, least):
    """As if every prompt were one draft token: the interval of Clopper and Pearson."""
    found = statistics.share([20] * prompts, [20] * prompts)
    assert least < found.low < 0.025 ** (1 / prompts) + 0.03
    assert found.high == 1


def test_shares_of_nearly_all_accepted_are_covered():
    rng = np.random.default_rng(5)
    drawn = [statistics.share(rng.binomial(20, 0.995, 5), [20] * 5) for _ in range(200)]
    assert np.mean([found.low <= 0.995 <= found.high for found in drawn]) >= 0.93


def test_rare_prompts_that_keep_less_and_draft_more_are_covered():
    """For 64 tokens, four fifths of prompts take 17 rounds of five draft tokens and a fifth 61."""
    kinds = np.array([[17, 47], [61, 3]])  # rounds and accepted
    rounds, kept = [0.8, 0.2] @ kinds
    rng = np.random.default_rng(8)
    for n in (6, 10, 20):
        hits = np.zeros(2)
        for _ in range(200):
            passes, accepted = (kinds[(rng.random(n) < 0.2).astype(int)] + rng.integers(0, 3)).T
            truth = kept + 1, rounds + 1
            share = statistics.share(accepted, 5 * passes, 5 * (passes + accepted))
            length = statistics.ratio(accepted, passes, passes + accepted)
            for i, (found, times) in enumerate([(share, 5), (length, 1)]):
                hits[i] += found.low <= truth[0] / (times * truth[1]) <= found.high
        assert min(hits) >= 186, n


def test_many_prompts_alike_give_a_narrow_interval():
    rng = np.random.default_rng(6)
    few, many = (statistics.ratio(rng.normal(1.5, 0.05, n), np.ones(n)) for n in (5, 40))
    assert many.high - many.low < 0.06 < 0.6 < few.high - few.low


def test_interval_stays_within_possible_values():
    assert statistics.share([9, 10], [10, 10]).high <= 1
    assert statistics.ratio([0, 9], [10, 1]).low >= 0
    assert statistics.speedup([9, 1], [1, 1], [1, 9], [1, 1]).low > 0


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
    assert statistics.ratio([1], [2], same_work=True)[:3] == (0.5, 0.5, 0.5)
    assert statistics.ratio([1], [2]).low < 0.2 < 1 < statistics.ratio([1], [2]).high
    for above, below in np.random.default_rng(0).uniform(0.1, 9, (50, 2)):
        found = statistics.speedup([above], [7], [below], [7], same_work=True)
        assert found.low == found.value == found.high
        assert statistics.verdict(found) == "too few repeats: at least 4 more"
    with pytest.raises(ValueError, match="equally long"):
        statistics.ratio([1, 2], [1])
    with pytest.raises(ValueError, match="equally long"):
        statistics.ratio([], [])


def test_rate_of_nothing_drafted_may_be_anything():
    assert statistics.ratio([0, 0], [0, 0]).value == 0
    assert statistics.share([0, 0], [0, 0]) == (0, 0, 1, "nothing was drafted")


@pytest.mark.parametrize(
    ("interval", "words"),
    [
        ((1.5, 1.2, 1.8), "faster"),
        ((0.5, 0.4, 0.9), "slower than plain decoding"),
        ((1.5, 0.9, 2.0), "no clear difference"),
        ((1.5, 1.5, 1.5, "too few repeats: at least 4 more"), "too few repeats: at least 4 more"),
        ((1.5, 0.9, 2.0, "too few prompts: at least 7 more"), "too few prompts: at least 7 more"),
        ((2.5, 1.1, 6.0, "too few prompts: at least 7 more"), "faster"),
        ((1.5, 1.5, 1.5), "faster"),
    ],
)
def test_verdict_needs_an_interval_without_one(interval, words):
    assert statistics.verdict(statistics.Interval(*interval)) == words


@pytest.mark.parametrize(("n", "more"), [(1, 16), (10, 7), (16, 1)])
def test_too_few_prompts_say_how_many_more(n, more):
    found = statistics.speedup([1.1] * n, [1] * n, [1.0] * n, [1] * n)
    assert statistics.verdict(found) == f"too few prompts: at least {more} more"


def test_equal_timings_are_not_one_sample():
    found = [statistics.speedup([2] * n, [1] * n, [1] * n, [1] * n, same_work=True) for n in (3, 5)]
    assert [statistics.verdict(f) for f in found] == ["too few repeats: at least 2 more", "faster"]
