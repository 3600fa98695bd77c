"""Policies do what their names say, and choose without a look ahead."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated_loads import (
    Recorded,
    alike,
    chosen,
    closed_loop,
    depths,
    load,
    seconds,
    table,
)

from specexp.engine import Engine
from specexp.errors import UserError
from specexp.policy import Fixed, Load, Plan, Policy, Stream
from specexp.serving import policies
from specexp.serving.goodput import Goodput
from specexp.serving.policies import Bandit, Table
from specexp.serving.requests import Request
from specexp.serving.server import Server
from specexp.serving.simulated_rows import SimulatedRows
from specexp.serving.sources import Run, Source
from specexp.trace import Step
from specexp.tree import Tree


class Own(Policy):
    """Chooses `late` from its fourth round on."""

    widest = Tree.chain(3).room

    def __init__(self, late):
        self.late, self.rounds = late, 0

    def choose(self, load):
        self.rounds += 1
        return self.late() if self.rounds > 3 else Plan(Tree.chain(2))


@pytest.mark.parametrize(
    ("late", "said"),
    [
        (lambda: Plan(Tree.chain(-2)), "gamma is -2; use 1 or more"),
        (lambda: Plan(Tree.chain(9)), "chose a tree with room 10, more than its `widest` of 4"),
        (lambda: Plan(Tree.chain(2), hold=0), "holds its plan for 0 rounds: use 1 or more"),
        (lambda: Plan(2), "planned a int: plan a specexp.Tree, such as Tree.chain(5)"),
        (lambda: -3, "chose a int: return Plan(tree)"),
    ],
)
def test_wrong_plan_of_any_round_is_one_line_that_names_the_policy(pairing, late, said):
    engine, rows = pairing.engine, SimulatedRows(table(), alike(0.5), 2, 512, 4)
    server = Server(rows, Own(late))
    server.submit(Request((1, 2), new=64))
    for run in (
        lambda: Engine.of(engine, policy=Own(late)).generate([[1, 2]], 32),
        lambda: [server.step() for _ in range(20)],
    ):
        with pytest.raises(UserError) as refused:
            run()
        line = str(refused.value)
        assert line.startswith("policy Own")
        assert line.endswith(said)


# --- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("never", Fixed(Tree.chain(0))),
        ("always:0", Fixed(Tree.chain(0))),
        ("always:3", Fixed(Tree.chain(3))),
        ("always:5", Fixed(Tree.chain(5))),
        ("threshold:3,8", Table(((0, 3), (9, 0)))),
        ("table:1=5,8=2,16=0", Table(((1, 5), (8, 2), (16, 0)))),
        ("table:16=0,1=5", Table(((1, 5), (16, 0)))),
        ("bandit", Bandit((0, 1, 2, 3, 5))),
    ],
)
def test_policy_names(name, wanted):
    assert policies.of(name, deepest=5) == wanted


def test_named_policies_are_cut_to_the_drafter():
    costs = table()
    for deepest, gammas in ((9, (1, 2, 3, 5)), (4, (1, 2, 3)), (1, (1,))):
        made = policies.of("goodput", costs, deepest)
        assert isinstance(made, Goodput)
        assert (made.prices.costs, made.gammas) == (costs, (0, *gammas))
        assert policies.of("bandit", deepest=deepest) == Bandit((0, *gammas))
        assert made.widest == Tree.chain(max(gammas)).room


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "unknown"),
        ("sometimes", "unknown"),
        ("never:1", "unknown"),
        ("Never", "unknown"),
        ("goodput:3", "unknown"),
        ("always", "not well formed"),
        ("always:", "not well formed"),
        ("always:x", "not well formed"),
        ("always:1.5", "not well formed"),
        ("always:-1", "drafts -1 tokens; use 0 to 5 here"),
        ("always:9", "drafts 9 tokens; use 0 to 5 here"),
        ("threshold:3", "not well formed"),
        ("threshold:3,8,9", "not well formed"),
        ("threshold:6,8", "drafts 6 tokens; use 0 to 5 here"),
        ("table:", "not well formed"),
        ("table:3", "not well formed"),
        ("table:1=2=3", "not well formed"),
        ("table:1=2,", "not well formed"),
        ("table:1=9", "drafts 9 tokens; use 0 to 5 here"),
        ("table:1=5,1=3", r"policy 'table:1=5,1=3': numbers of rows are \[1, 1\]: name each once"),
        ("table:-2=5,1=3", r"rows are \[-2, 1\]: name each once, rising, from 0"),
        ("threshold:5,-3", r"rows are \[0, -2\]"),
        ("goodput", r"needs a cost table: pass policies.of\('goodput', costs\)"),
        ("greedy", "needs a cost table"),
    ],
)
def test_bad_policy_name_is_one_line(name, said):
    with pytest.raises(UserError, match=said) as e:
        policies.of(name, deepest=5)
    assert "\n" not in str(e.value)


def test_policy_objects_are_taken_as_they_are():
    policy = Table(((0, 3),))
    assert policies.of(policy) is policy
    with pytest.raises(UserError, match=r"^policy object has no choose\(load\): define it"):
        policies.of(object())


def test_absurd_draft_length_is_refused():
    for name in ("always:1000000000", "threshold:1000000000,1", "table:1=1000000000"):
        with pytest.raises(UserError, match="drafts 1000000000 tokens; use 0 to 1024 here"):
            policies.of(name, deepest=1 << 30)


# --- what is chosen ------------------------------------------------------------------------------


def test_threshold_stops_above_its_border():
    found = [chosen(policies.of("threshold:3,8"), rows) for rows in (1, 7, 8, 9, 64)]
    assert found == [3, 3, 3, 0, 0]


def test_table_holds_from_entry_to_entry():
    made = Table(((2, 5), (8, 2), (16, 0), (32, 1)))
    rows = (1, 2, 3, 7, 8, 9, 15, 16, 31, 32, 33, 500)
    assert [chosen(made, n) for n in rows] == [0, 5, 5, 5, 2, 2, 2, 0, 0, 1, 1, 1]


NAMED = st.one_of(
    st.sampled_from(["never", "greedy", "goodput", "bandit"]),
    st.integers(0, 5).map("always:{}".format),
    st.tuples(st.integers(0, 5), st.integers(0, 70)).map(lambda t: f"threshold:{t[0]},{t[1]}"),
    st.dictionaries(st.integers(1, 70), st.integers(0, 5), min_size=1).map(
        lambda entries: "table:" + ",".join(f"{rows}={gamma}" for rows, gamma in entries.items())
    ),
)
STREAMS = st.one_of(
    st.none(),
    st.builds(Stream, st.integers(0, 500), st.integers(0, 30)),
)  # fmt: skip


@settings(max_examples=60)
@given(
    NAMED, st.booleans(), st.randoms(),
    st.lists(st.lists(STREAMS, min_size=1, max_size=12).filter(any), max_size=20),
)  # fmt: skip
def test_plans_fit_the_rows_and_the_stated_width(name, packs, rng, loads):
    """Whatever the loads and however it goes, with what is known of rows and without."""
    policy = policies.of(name, table(packs=packs), deepest=5)
    for streams in loads:
        known = tuple(streams) if rng.random() < 0.8 else ()
        rows = len(streams)
        moment = Load(rows, rng.randint(1, 512), rng.randint(0, 9), known)
        plan = policy.choose(moment)
        assert plan.tree.room <= policy.widest
        assert not plan.budget or (known and len(plan.budget) == rows)
        assert all(0 <= depth <= plan.tree.depth for depth in depths(plan, rows))
        steps = []
        for row in range(rows):
            if not known or streams[row]:
                made = rng.randint(0, plan.depth(row))
                kept = rng.randint(0, made)
                steps.append(Step(row, made, kept, kept + 1))
        policy.learn(moment, plan, steps, rng.uniform(1e-3, 1e-1))


# --- nothing of the future -----------------------------------------------------------------------


def history(name: str, requests: list[Request], until: float):
    """The choices before that time, and those after it."""
    recorded = Recorded(policies.of(name, table()))
    chances = [[0.5 + 0.1 * i] * 5 for i in range(5)]
    bank = SimulatedRows(table(), lambda i: chances[i % 5], 8, 512, recorded.widest)
    server = Server(bank, recorded)
    run, before = Run(server, Source(requests)), 0
    while run.advance():
        if server.steps[-1].end_s < until:
            before = len(recorded.choices)
    return recorded.choices[:before], recorded.choices[before + 1 :]


@pytest.mark.parametrize(
    "name", ["greedy", "goodput", "bandit", "threshold:3,4", "table:1=5,4=2,7=0"]
)
def test_choices_do_not_depend_on_the_future(name):
    """Two histories part after six seconds; what was chosen before that is the same."""
    rng = random.Random(1)
    begun = [Request(range(20), rng.randint(50, 250), 0.15 * i, i) for i in range(40)]
    crowd = [Request(range(20), 90, 6 + 0.01 * i, 100 + i) for i in range(40)]
    lull = [Request(range(20), 30, 6 + 2.0 * i, 203 + 5 * i) for i in range(10)]
    (first, after), (second, otherwise) = (history(name, begun + x, 6.0) for x in (crowd, lull))
    assert len(first) > 250
    assert len({plan for _, plan in first}) > 1
    assert first == second
    assert after[:100] != otherwise[:100]
    assert (first, after) == history(name, begun + crowd, 6.0)


# --- bandit --------------------------------------------------------------------------------------


def test_bandit_ignores_recorded_rounds():
    policy = Bandit()
    for _ in range(3 * policy.hold):
        plan = policy.choose(load(1))
        policy.learn(load(1), plan, [Step(0, plan.tree.depth, 0, 1)], None)
    assert not policy.mean


def test_bandit_does_not_blame_its_choice_for_rounds_that_could_not_draft():
    policy = Bandit()
    for _ in range(20 * policy.hold):
        policy.choose(load(1))
        policy.learn(load(1), Plan(Tree.chain(0)), [Step(0, 0, 0, 1)], 1e-3)
    assert {gamma for _, gamma in policy.mean} <= {0}


@pytest.mark.parametrize(("alpha", "best"), [(0.9, {3, 5}), (0.05, {0, 1})])
def test_bandit_finds_the_fastest_length(alpha, best):
    """Nothing told: by trying every length, and mostly the better ones."""
    policy = Recorded(Bandit())
    closed_loop(policy, table(draft=2e-3), alike(alpha), streams=4, count=60)
    tried = policy.drafts()
    assert set(tried[:100]) == {0, 1, 2, 3, 5}
    late = tried[300:]
    assert len(late) > 200
    assert sum(g in best for g in late) > 0.7 * len(late)


def test_bandit_learns_by_number_of_rows():
    policy, law = Bandit(), {"token": 1e-3}
    found = {1: [], 40: []}
    for turn in range(4000):
        rows = 1 if turn // 20 % 2 else 40
        gamma = chosen(policy, rows)
        found[rows].append(gamma)
        steps = [Step(row, gamma, gamma, gamma + 1) for row in range(rows)]
        lucky = steps if rows == 1 else [Step(s.row, gamma, 0, 1) for s in steps]
        policy.learn(load(rows), Plan(Tree.chain(gamma)), lucky, seconds(rows, gamma, **law))
    assert found[1][-400:].count(5) > 300
    assert found[40][-400:].count(0) > 300
