"""Goodput with a drafter that says how sure it is."""

from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated_loads import (
    Recorded,
    load,
    speed,
    table,
    tuned,
)

from specexp.policy import Fixed, Plan
from specexp.serving.cost_table import Costs
from specexp.serving.goodput import Goodput
from specexp.serving.requests import Request
from specexp.serving.server import Server
from specexp.serving.simulated_rows import SimulatedRows
from specexp.serving.sources import Closed, serve
from specexp.trace import Step
from specexp.tree import Tree

LAWS = st.fixed_dictionaries({
    "floor": st.floats(1e-4, 1e-1), "token": st.floats(1e-5, 1e-2), "guess": st.floats(0, 1e-2)
})  # fmt: skip


class Graded(SimulatedRows):
    """Every round a row is at a grade by chance. law: how often, and how likely each guess is kept
    there if the one before it was."""

    def __init__(self, costs, law, rows: int, widest: int):
        super().__init__(costs, lambda stream: [], rows, 512, widest)
        self.law = law

    def round(self, budget, longest, tree, reach=()):
        reach = reach or (tree.depth,) * len(self.law)
        below = np.cumsum([p for p, _ in self.law[:-1]])
        found = [int((self.random() >= below).sum()) for _ in budget]
        for row, text in self.texts.items():
            text.conditional = self.law[found[row]][1]
        depths = [min(g, reach[grade]) for g, grade in zip(budget, found, strict=True)]
        steps = super().round(depths, longest, tree)
        return [step._replace(grade=found[step.row]) for step in steps]


@dataclass
class Always:
    """The same plan for whoever is there."""

    plan: Plan
    widest: int = 8

    def choose(self, load):
        return self.plan

    def learn(self, *told):
        pass


UNSURE = [(0.3, [0.1] * 5), (0.3, [0.5] * 5), (0.4, [0.95] * 5)]


def tokens_s(policy, costs: Costs, law, rows: int, count: int) -> float:
    server = Server(Graded(costs, law, rows, policy.widest), policy, chunk=4096)
    serve(server, Closed([Request(range(20), 200, stream=i) for i in range(count)], rows))
    return speed(server)


def test_rows_beyond_reach_do_not_catch_up(monkeypatch):
    """Whoever has no guess is not counted as drafting, and its drafter has gone on reading."""
    costs, caught_up = table(packs=True, grades=3), []
    monkeypatch.setattr(SimulatedRows, "catch_up", lambda *args: caught_up.append(args[1:]))
    policy = Always(Plan(Tree.chain(3), reach=(0, 0, 3)))
    server = Server(Graded(costs, UNSURE, 2, policy.widest), policy, chunk=4096)
    serve(server, Closed([Request([1], 200, stream=i) for i in range(4)], 2))
    assert not caught_up
    assert all(step.speculated == step.drafted / 3 for step in server.steps)
    assert 0.3 < sum(t.speculated for t in server.steps) / sum(t.live for t in server.steps) < 0.5


@settings(max_examples=80)
@given(
    LAWS, st.integers(1, 4), st.dictionaries(st.integers(2, 6), st.floats(0.5, 2)),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.booleans()), min_size=9),
)  # fmt: skip
def test_depth_of_each_grade_is_optimal(law, rows, dear, seen):
    """All that could be done is counted here anew; what it promises, of one row or two, whatever
    passes of some lengths take. Seen: the grade, the guesses kept, and whether any were made."""
    dear = dear if rows <= 2 else {}
    costs = table(dear, packs=True, grades=3, **law)
    policy = tuned(costs, gammas=(1, 2, 3), prior_tokens=1e-9, fade=1.0, margin=0.0)
    steps = [Step(0, 3 * made, k * made, 1 + k * made, grade=g) for g, k, made in seen]
    policy.learn(load(1), Plan(Tree.chain(3)), steps, None)
    policy.digest()
    policy.choice.left = 0
    now = load(rows)
    plan = policy.choose(now)
    laws, often, paid = [], [], []
    for grade in range(3):
        mine = [(k if made else 0, made) for g, k, made in seen if g == grade]
        shares, before = [], 0.8
        for depth in range(3):
            if judged := [k > depth for k, _ in mine if k >= depth]:
                before = float(np.mean(judged))
            shares.append(before)
        laws.append(np.cumprod(shares))
        often.append((len(mine) + 1) / (len(seen) + 3))
        paid.append((3 * sum(made for _, made in mine) + 1) / (3 * len(mine) + 1))

    def rate(reach: tuple[int, ...]) -> float:
        tokens = 1 + sum(p * sum(each[:g]) for p, each, g in zip(often, laws, reach, strict=True))
        row = [(p * x, g) for p, x, g in zip(often, paid, reach, strict=True)]
        row += [(p * (1 - x), 0) for p, x in zip(often, paid, strict=True)]
        took = sum(
            np.prod([p for p, _ in each])
            * costs.verify_s(rows, 1 + sum(g for _, g in each) / rows, 512)
            for each in product(row, repeat=rows)
        )
        return tokens / (took + law["guess"] * max(reach))

    outlook = policy.forecast(now)
    promised = {
        reach: outlook.rate(Plan(Tree.chain(max(reach)), reach=reach))
        for reach in product(range(4), repeat=3)
    }
    assert promised == pytest.approx({reach: rate(reach) for reach in promised}, rel=1e-3)
    if not dear:
        best = max(promised.values())
        assert promised[plan.reach or (0, 0, 0)] == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("rows", [1, 8])
def test_grades_beat_fixed_lengths(rows):
    """Better than any fixed length, and than a policy that does not hear it."""
    law = {"floor": 5e-3, "token": 1e-3 if rows > 1 else 2e-3, "guess": 0.0}
    costs = table(packs=True, grades=3, **law)
    deaf = Goodput(table(packs=True, **law))
    others = [deaf, *(Fixed(Tree.chain(g)) for g in (0, 1, 2, 3, 5))]
    best = max(tokens_s(policy, costs, UNSURE, rows, 10 * rows + 20) for policy in others)
    policy = Recorded(Goodput(costs))
    assert tokens_s(policy, costs, UNSURE, rows, 10 * rows + 20) > 1.02 * best
    reaches = np.array([plan.reach or (0, 0, 0) for _, plan in policy.choices])
    often = (reaches > 0).mean(0)
    assert often[0] < 0.2
    assert often[2] > 0.9


def test_grade_that_became_right_is_tried_again():
    costs = table(packs=True, grades=3, floor=5e-3, token=1e-3, guess=0.0)
    policy, law = Recorded(Goodput(costs)), list(UNSURE)
    bank = Graded(costs, law, 8, policy.widest)
    server = Server(bank, policy, chunk=4096)
    serve(server, Closed([Request(range(20), 200, stream=i) for i in range(100)], 8))
    assert sum(plan.reach[0] > 0 for _, plan in policy.choices[-500:] if plan.reach) < 100
    law[0] = 0.3, [0.95] * 5
    serve(server, Closed([Request(range(20), 200, stream=i) for i in range(200)], 8))
    assert sum(plan.reach[0] > 0 for _, plan in policy.choices[-500:] if plan.reach) > 400
