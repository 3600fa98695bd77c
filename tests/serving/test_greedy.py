"""Greedy drafts what brings most tokens a second by the cost table and the acceptance so far."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated_loads import load, seconds, table

from specexp.policy import Plan
from specexp.serving.goodput import GAMMAS
from specexp.serving.greedy import HOPE, Greedy
from specexp.trace import Step
from specexp.tree import Tree


def observed(kept: list[int], times: int = 1, **law: float) -> Greedy:
    """Greedy that has seen drafts of five tokens, of which so many were accepted."""
    policy = Greedy(table(**law), GAMMAS)
    for _ in range(times):
        steps = [Step(0, 5, k, k + 1) for k in kept]
        policy.learn(load(1), Plan(Tree.chain(5)), steps, None)
    return policy


def test_acceptance_is_conditional_on_the_token_before():
    policy = observed([0, 2, 5])
    fresh = Greedy(table(), GAMMAS)
    judged = np.array(policy.judged) - 0.99 * np.array(fresh.judged)
    accepted = np.array(policy.accepted) - 0.99 * np.array(fresh.accepted)
    assert judged == pytest.approx([3, 2, 2, 1, 1])
    assert accepted == pytest.approx([2, 2, 1, 1, 1])


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 5), min_size=5, max_size=20), st.integers(1, 64),
    st.fixed_dictionaries({"floor": st.floats(1e-4, 1e-1), "token": st.floats(1e-5, 1e-2),
                           "draft": st.floats(0, 1e-2)}),
)  # fmt: skip
def test_choice_maximises_expected_tokens_over_cost(kept, rows, law):
    """Counted here anew, after so many rounds that the hope has faded."""
    gamma = observed(kept, 1000, **law).choose(load(rows)).tree.depth

    def rate(gamma: int) -> float:
        return np.mean([1 + min(k, gamma) for k in kept]) / seconds(rows, gamma, **law)

    assert rate(gamma) == pytest.approx(max(map(rate, (0, *GAMMAS))), rel=1e-2)


def test_first_drafts_are_hoped_for():
    assert Greedy(table(draft=1e-3), GAMMAS).choose(load(1)).tree.depth == max(GAMMAS)


def test_drafting_is_tried_again_after_many_plain_rounds():
    policy = observed([0] * 20, 50)
    plans = []
    for _ in range(4000):
        plan = policy.choose(load(1))
        policy.learn(load(1), plan, [Step(0, plan.tree.depth, 0, 1)], None)
        plans.append(plan.tree.depth)
    assert plans[0] == 0
    assert 0 < sum(depth > 0 for depth in plans) < 0.1 * len(plans)


def test_depths_unseen_for_long_are_hoped_for():
    policy = Greedy(table(draft=1e-3), GAMMAS)
    policy.judged = policy.accepted = [0.0] * 5
    assert policy.choose(load(1)).tree.depth == max(GAMMAS)


def test_counts_never_exceed_what_was_judged():
    policy = observed([5] * 10, 3)
    for _ in range(10_000):
        policy.learn(load(1), Plan(Tree.chain(0)), [Step(0, 0, 0, 1)], None)
    assert policy.judged == pytest.approx([HOPE] * 5, rel=1e-2)
    assert all(a <= j + 1e-9 for a, j in zip(policy.accepted, policy.judged, strict=True))
