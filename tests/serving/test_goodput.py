"""Goodput chooses what pays by what it has seen: its parts one by one."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated_loads import (
    Recorded,
    alike,
    chosen,
    closed_loop,
    informed,
    load,
    seconds,
    table,
    tuned,
)

from specexp.policy import Plan, Stream
from specexp.serving.cost_table import CALM
from specexp.serving.goodput import GAMMAS, Choice, Goodput, Slowdown
from specexp.trace import Step
from specexp.tree import Tree

HALF = [0] * 16 + [1] * 8 + [2] * 4 + [3] * 2 + [4, 5]  # draft tokens kept by chances of 1/2


LAWS = st.fixed_dictionaries({
    "floor": st.floats(1e-4, 1e-1), "token": st.floats(1e-5, 1e-2), "draft": st.floats(0, 1e-2)
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


class Counted(Choice):
    """Notes the rounds before which it decided."""

    decided = ()

    def decide(self, *known):
        self.decided = *self.decided, self.rounds
        super().decide(*known)


@pytest.mark.parametrize("draft", [5e-4, 1.0])
def test_decisions_become_rarer_while_nothing_changes(draft):
    """All draft where it is cheap, nobody where it is dear; what is always kept needs no trying."""
    costs = table(draft=draft)
    policy = Goodput(costs, (5,))
    policy.choice = Counted()
    closed_loop(policy, costs, alike(1.0), streams=4, count=200)
    gaps = list(np.diff(policy.choice.decided))
    assert gaps[:4] == [1, 2, 4, 8]
    assert max(gaps) == policy.choice.longest_interval
    assert sum(gaps) > 2 * policy.choice.interval * len(gaps)


def test_decides_at_once_when_a_crowd_has_gone():
    policy = informed(HALF, table(token=1e-3), interval=1 << 40)
    policy.choice.rounds, policy.choice.trial_at = 1 << 40, 1 << 41
    assert [chosen(policy, rows) for rows in (64, 33)] == [0, 0]
    assert policy.choice.rows == 64
    assert chosen(policy, 1) > 0


@pytest.mark.parametrize(("better", "least", "most"), [(1.02, 8, 60), (2.0, 0, 4)])
def test_close_plans_are_tried_often_and_bad_ones_seldom(better, least, most):
    """A draft token is always kept: to draft one is worth so much."""
    costs = table(floor=1e-2, token=0.0, draft=2e-2 / better - 1e-2)
    policy = Recorded(tuned(costs, gammas=(1,), prior=1.0))
    closed_loop(policy, costs, alike(1.0), streams=1, count=60)
    drafts = policy.drafts()
    tries = sum(a > b for a, b in pairwise(drafts))
    assert least <= tries <= most


def test_tokens_that_are_seldom_made_are_cheap_where_passes_pack():
    """A draft token costs a sixth of a step and is kept seven times in ten: drafting one in a tenth
    of the rounds pays only where the others do not pay for it."""
    law, steps = {"floor": 1e-2, "token": 2e-3, "draft": 0.0}, [Step(0, 1, 1, 2)] * 7
    steps += [Step(0, 1, 0, 1)] * 3 + [Step(0, 0, 0, 1)] * 90
    for packs in (False, True):
        policy = tuned(table(packs=packs, **law), gammas=(1,), prior_tokens=1e-9, margin=0.0)
        policy.learn(load(1), Plan(Tree.chain(1)), steps, None)
        policy.choice.left = 0
        assert chosen(policy, 1) == packs


@pytest.mark.parametrize(("margin", "moves"), [(0.0, True), (0.09, True), (0.11, False)])
def test_plan_changes_only_beyond_the_margin(margin, moves):
    """A draft token adds half a step. 13 of 20 kept: to draft gains 10 %; 4 of 11: to stop does."""
    options = {"costs": table(token=1e-9, draft=5e-3), "gammas": (1,), "margin": margin}
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


def test_rows_in_prefill_are_not_priced(monkeypatch):
    """No decision was made since the last request of that row ended."""
    seen = []
    monkeypatch.setattr(Slowdown, "observe", lambda self, *known: seen.append(known))
    policy = informed(HALF, table(packs=True, token=1e-3), interval=8)
    policy.choice.rounds = 8
    for streams in ((Stream(), Stream()), (None, Stream())):
        plan = policy.choose(load(2, *streams))
        assert plan.tree.depth == 1
        steps = [Step(row, 1, 1, 2) for row, stream in enumerate(streams) if stream]
        policy.learn(load(2, *streams), plan, steps, 1.0)
    policy.digest()
    assert seen == [(1, pytest.approx(1.0 / seconds(rows, 1, token=1e-3)), 1) for rows in (2, 1)]


@pytest.mark.parametrize("packs", [False, True])
def test_rounds_in_which_few_rows_draft_are_priced_as_such(monkeypatch, packs):
    seen, costs = [], table(packs=packs)
    costs = replace(costs, draft=costs.draft * np.array(costs.batches)[:, None, None])
    monkeypatch.setattr(Slowdown, "observe", lambda self, *known: seen.append(known))
    policy, plan = Goodput(costs), Plan(Tree.chain(2), (2, 0, 0, 0))
    steps = [Step(row, 2 * (row == 0), 0, 1) for row in range(4)]
    policy.learn(load(4), plan, steps, costs.plan_s(plan.budget, 512))
    policy.digest()
    assert seen == [(2, pytest.approx(1.0), 1)]


def test_slowdown_is_learned_by_size_class():
    """A draft token is always kept and a second one never."""
    policy = informed([1] * 32, table())
    assert [chosen(policy, rows) for rows in (1, 8)] == [1, 1]
    for depth in (1, 0) * 4:
        took = seconds(1, depth) * (4 if depth else 1)
        for _ in range(2 * CALM):
            policy.learn(load(1), Plan(Tree.chain(depth)), [Step(0, depth, depth, depth + 1)], took)
        policy.digest()
    assert [chosen(policy, rows) for rows in (1, 8)] == [0, 1]
