"""Goodput chooses what pays by what it has seen: its parts one by one."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated_loads import (
    Recorded,
    alike,
    chosen,
    closed_loop,
    depths,
    informed,
    load,
    seconds,
    table,
    tuned,
)

from specexp.policy import Plan, Stream
from specexp.serving.cost_table import CALM
from specexp.serving.goodput import GAMMAS, Goodput
from specexp.serving.goodput.choice import Choice
from specexp.serving.goodput.prices import LONG, Slowdown
from specexp.trace import Step
from specexp.tree import Tree


def odds(share: float) -> float:
    return share / max(1 - share, 1e-9)


HALF = [0] * 16 + [1] * 8 + [2] * 4 + [3] * 2 + [4, 5]  # guesses kept by chances of 1/2
GOOD, BAD = Stream(0, 1e9, 1e9), Stream(0, 1e9, 0.0)


LAWS = st.fixed_dictionaries({
    "floor": st.floats(1e-4, 1e-1), "token": st.floats(1e-5, 1e-2), "guess": st.floats(0, 1e-2)
})  # fmt: skip


@settings(max_examples=80)
@given(st.lists(st.integers(0, 5), min_size=5, max_size=40), st.integers(1, 64), LAWS)
def test_choice_maximises_tokens_per_second(kept, rows, law):
    """Rows alike; what each length would have brought and cost is counted here anew."""
    gamma = chosen(informed(kept, table(**law)), rows)

    def rate(gamma: int) -> float:
        return rows * np.mean([1 + min(k, gamma) for k in kept]) / seconds(rows, gamma, **law)

    best = max(rate(g) for g in (0, *GAMMAS))
    assert rate(gamma) == pytest.approx(best, rel=1e-6)


def test_drafts_alone_and_not_in_a_crowd():
    made = [informed([0, 1, 2, 3, 4], table(token=2e-3)) for _ in range(2)]
    assert chosen(made[0], 1) > 0
    assert chosen(made[1], 64) == 0
    falling = [chosen(informed([0, 1, 2, 3, 4], table(token=2e-3)), b) for b in range(1, 65)]
    assert falling == sorted(falling, reverse=True)
    assert len(set(falling)) >= 3


def test_only_good_rows_draft_where_passes_pack():
    law = {"floor": 5e-2, "token": 1e-3, "guess": 0.0}
    mixed = load(8, BAD, GOOD, GOOD, BAD, BAD, BAD, GOOD, GOOD)
    plan = informed(HALF, table(packs=True, **law)).choose(mixed)
    assert depths(plan, 8) == [0, 5, 5, 0, 0, 0, 5, 5]
    everywhere = informed(HALF, table(**law)).choose(mixed)
    assert not everywhere.budget  # where a pass is as wide as its longest draft


@settings(max_examples=80)
@given(
    LAWS, st.lists(st.integers(0, 5), min_size=5, max_size=40),
    st.lists(st.one_of(st.none(), st.floats(0, 1)), min_size=2, max_size=6).filter(any),
)  # fmt: skip
def test_budgets_of_rows_are_optimal(law, kept, shares):
    """Rows that keep more or less than others: under no budgets at all is the geometric mean of
    their tokens a second larger, all tried and counted here anew."""
    costs = table(packs=True, **law)
    rows = [None if x is None else Stream(0, 8.0, 8.0 * x) for x in shares]
    policy = informed(kept, costs, row_weight=4.0, gammas=(5,))
    overall = policy.acceptance.beliefs().conditional
    mean = policy.acceptance.beliefs().mean
    plan = policy.choose(load(len(rows), *rows))
    written = [row for row, stream in enumerate(rows) if stream]

    def rate(budget: Sequence[int]) -> float:
        tokens = np.exp(np.mean(np.log([*map(promised, written, budget)])))
        took = law["floor"] + (len(written) + sum(budget)) * law["token"]
        return tokens / (took + law["guess"] * max(budget))

    def promised(row: int, depth: int) -> float:
        own = odds((rows[row].accepted + 4 * mean) / 12) / odds(mean)
        return 1 + sum(np.cumprod([own * a / (1 - a + own * a) for a in overall[:depth]]))

    best = max(map(rate, product(range(6), repeat=len(written))))
    got = [plan.depth(row) for row in written]
    assert rate(got) == pytest.approx(best, rel=1e-6)
    assert all(depth == 0 for row, depth in enumerate(plan.budget) if row not in written)


@pytest.mark.parametrize("others", [0, 3])
def test_depth_adapts_between_decisions(others):
    """Counted here anew, for every depth, with the other rows as they are; odds that are a twelfth
    off, as those are at which the policy goes deeper, cost less than half a percent."""
    law = {"floor": 1e-2, "token": 2e-3, "guess": 1e-3}
    policy = informed(
        [0, 1, 2, 5] * 8,
        table(packs=True, **law),
        interval=1 << 40,
        trial=1 << 40,
        depth_weight=4.0,
    )
    policy.rounds, policy.trials.due = 1 << 40, 1 << 41
    usual = [Stream(0, 8.0, 8.0 * policy.acceptance.beliefs().mean)] * others
    first = policy.choose(load(others + 1, Stream(), *usual))
    assert policy.choose(load(others + 1, Stream(), *usual)) is first
    mean, shares, rows = (
        policy.acceptance.beliefs().mean,
        policy.acceptance.beliefs().conditional,
        others + 1,
    )
    found = []
    for kept in range(9):
        own = odds((kept + 4 * mean) / 12) / odds(mean)
        chances = np.cumprod([own * a / (1 - a + own * a) for a in shares])
        rest = first.budget[1:]

        def worth(depth: int, chances=chances, rest=rest) -> float:
            guesses = rows + depth + sum(rest)
            took = law["floor"] + guesses * law["token"] + law["guess"] * max(depth, *rest, 0)
            return np.log1p(sum(chances[:depth])) - rows * np.log(took)

        plan = policy.choose(load(rows, Stream(0, 8.0, float(kept)), *usual))
        assert plan.budget[1:] == rest
        if any(plan.budget):
            found.append(plan.budget[0])
            assert worth(found[-1]) >= max(map(worth, range(6))) - 5e-3
        policy.plan = policy.choice.settled = first
    assert found == sorted(found)
    assert found[0] < found[-1]


def test_stopped_row_waits_for_the_next_decision():
    policy = informed(
        HALF, table(packs=True, floor=5e-2, token=1e-3, guess=0.0), interval=8, trial=8
    )
    policy.rounds = 8
    plans = [
        policy.choose(load(2, GOOD, BAD)),
        *(policy.choose(load(2, GOOD, GOOD)) for _ in range(8)),
    ]
    assert [depths(plan, 2) for plan in plans] == [[5, 0]] * 8 + [[5, 5]]


class Counted(Choice):
    """Notes the rounds before which it decided."""

    rounds, decided = 0, ()

    def due(self, most):
        self.rounds += 1
        return super().due(most)

    def decide(self, *known):
        self.decided = *self.decided, self.rounds
        return super().decide(*known)


@pytest.mark.parametrize("guess", [5e-4, 1.0])
def test_decisions_become_rarer_while_nothing_changes(guess):
    """All draft, or nobody, as guesses cost; drafts that are always kept leave nothing to try."""
    costs = table(guess=guess)
    policy = Goodput(costs, (5,), choice=Counted((5,)))
    closed_loop(policy, costs, alike(1.0), streams=4, count=200)
    gaps = list(np.diff(policy.choice.decided))
    assert gaps[:4] == [1, 2, 4, 8]
    assert max(gaps) == policy.choice.longest_interval
    assert sum(gaps) > 2 * policy.choice.interval * len(gaps)


def test_decisions_stay_frequent_while_a_row_has_stopped():
    policy = informed(
        HALF, table(packs=True, floor=5e-2, token=1e-3, guess=0.0), interval=8, trial=8
    )
    policy.rounds, policy.trials.due = 1 << 40, 1 << 41
    for streams, wanted in (((GOOD, BAD), [5, 0]), ((GOOD, GOOD), [5, 5])):
        for _ in range(80):
            plan = policy.choose(load(2, *streams))
        assert depths(plan, 2) == wanted
        assert policy.choice.wait == (
            policy.choice.interval if 0 in wanted else policy.choice.longest_interval
        )


def test_decides_at_once_when_a_crowd_has_gone():
    policy = informed(HALF, table(token=1e-3), interval=1 << 40)
    policy.rounds, policy.trials.due = 1 << 40, 1 << 41
    assert [chosen(policy, rows) for rows in (64, 33)] == [0, 0]
    assert policy.choice.shape == (64, 64)
    assert chosen(policy, 1) > 0


@pytest.mark.parametrize(("better", "least", "most"), [(1.02, 8, 60), (2.0, 0, 4)])
def test_close_plans_are_tried_often_and_bad_ones_seldom(better, least, most):
    """A guess is always kept: to draft one is worth so much."""
    costs = table(floor=1e-2, token=0.0, guess=2e-2 / better - 1e-2)
    policy = Recorded(tuned(costs, gammas=(1,), prior=1.0))
    closed_loop(policy, costs, alike(1.0), streams=1, count=60)
    drafts = policy.drafts()
    tries = sum(a > b for a, b in pairwise(drafts))
    assert least <= tries <= most


@pytest.mark.parametrize("times", [0.3, 1.0, 4.0])
def test_counts_are_unbiased_by_easy_or_hard_rows(times):
    """Rows whose odds are so many times the usual; counted as they come, other shares are found."""
    policy, shares = informed([0, 1, 2, 5] * 8, table(packs=True)), [0.5, 0.6, 0.7, 0.8, 0.9]
    policy.acceptance.believed = replace(
        policy.acceptance.beliefs(), conditional=shares, mean=0.5, weight=0.0
    )
    row = Stream(0, 1 + times, times)
    assert policy.acceptance.believed.odds_ratio(row) == pytest.approx(times)
    own = [times * a / (1 - a + times * a) for a in shares]
    rng, plan = np.random.default_rng(5), Plan(Tree.chain(5), (5,))
    luck = np.cumprod(rng.random((20_000, 5)) < own, 1).sum(1)
    policy.acceptance.judged, policy.acceptance.accepted = [[0.0] * 5], [[0.0] * 5]
    policy.learn(load(1, row), plan, [Step(0, 5, int(k), int(k) + 1) for k in luck], None)
    policy.digest()
    [found] = np.array(policy.acceptance.accepted) / policy.acceptance.judged
    assert found == pytest.approx(shares, abs=0.05)
    assert times == 1 or abs(found - own).max() > 0.1


def test_row_with_few_draft_tokens_is_cheap():
    """A guess that is made is kept as often in either row, but in one few are made; where all are
    paid for, those are not worth it."""
    often, seldom = Stream(0, 1e3, 700, 1e3, 1e3), Stream(0, 1e3, 70, 1e3, 100)
    law, mixed = {"floor": 6e-3, "token": 1e-3, "guess": 0.0}, load(2, often, seldom)
    options = {"gammas": (1,), "row_weight": 1.0}
    assert depths(informed(HALF, table(packs=True, **law), **options).choose(mixed), 2) == [1, 1]
    always = seldom._replace(drafted=1e3)
    plan = informed(HALF, table(packs=True, **law), **options).choose(load(2, often, always))
    assert depths(plan, 2) == [1, 0]


@pytest.mark.parametrize(("margin", "moves"), [(0.0, True), (0.09, True), (0.11, False)])
def test_plan_changes_only_beyond_the_margin(margin, moves):
    """A guess adds half a step. 13 of 20 kept: to draft gains 10 %; 4 of 11: to stop does."""
    options = {"costs": table(token=1e-9, guess=5e-3), "gammas": (1,), "margin": margin}
    begins = informed([1] * 13 + [0] * 7, **options)
    assert chosen(begins, 1) == (1 if moves else 0)
    stops = informed([1] * 4, **options)
    assert chosen(stops, 1) == 1
    stops.learn(load(1), stops.choose(load(1)), [Step(0, 1, 0, 1)] * 7, 1.5e-2)
    assert chosen(stops, 1) == (0 if moves else 1)


def test_catching_up_is_charged_to_a_new_draft():
    """A step takes 10 ms, and to read ten thousand tokens 100 ms."""
    kept, costs = [2, 3, 4], table()
    behind = load(1, Stream(behind=10_000))
    assert chosen(informed(kept, costs), 1) > 0
    assert informed(kept, costs, horizon=2).choose(behind).depth(0) == 0
    assert informed(kept, costs, horizon=400).choose(behind).depth(0) > 0
    going = informed(kept, costs, horizon=2)
    assert chosen(going, 1) > 0
    assert going.choose(behind).depth(0) > 0  # somebody new does not stop it


def test_catching_up_is_charged_to_joining_rows():
    law = {"floor": 5e-2, "token": 1e-3, "guess": 0.0}
    unread = Stream(10_000, 1e9, 1e9)
    for joining, wanted in ((GOOD, 5), (unread, 0)):
        made = informed(HALF, table(packs=True, **law), horizon=1)
        begun = made.choose(load(8, *[GOOD] * 4, *[BAD] * 4))
        assert depths(begun, 8) == [5] * 4 + [0] * 4
        after = made.choose(load(8, *[GOOD] * 4, *[joining] * 4))
        assert depths(after, 8) == [5] * 4 + [wanted] * 4


def test_rows_in_prefill_are_not_priced(monkeypatch):
    """No decision was made since the last request of that row ended."""
    seen = []
    monkeypatch.setattr(Slowdown, "observe", lambda self, *known: seen.append(known))
    policy = informed(HALF, table(packs=True, token=1e-3), interval=8)
    policy.rounds = 8
    for streams in ((Stream(behind=LONG), Stream()), (None, Stream())):
        plan = policy.choose(load(2, *streams))
        assert depths(plan, 2) == [1, 1]
        steps = [Step(row, 1, 1, 2) for row, stream in enumerate(streams) if stream]
        policy.learn(load(2, *streams), plan, steps, 1.0)
    policy.digest()
    assert seen == [(1, pytest.approx(1.0 / seconds(1, 1, token=1e-3)), 1)]


def test_slowdown_is_learned_by_size_class():
    """A guess is always kept and a second one never."""
    policy = informed([1] * 32, table())
    assert [chosen(policy, rows) for rows in (1, 8)] == [1, 1]
    for depth in (1, 0) * 4:
        took = seconds(1, depth) * (4 if depth else 1)
        for _ in range(2 * CALM):
            policy.learn(load(1), Plan(Tree.chain(depth)), [Step(0, depth, depth, depth + 1)], took)
        policy.digest()
    assert [chosen(policy, rows) for rows in (1, 8)] == [0, 1]
