"""Tier 0: the exact joint law of what the real round writes, by walking every branch of chance.

Total variation must be rounding (1e-12), not "small": see oracle.py for how that is computed.
"""

import pytest
from oracle import explore, gap, texts, toy_engine

from specexp.rules import Match, Reject
from specexp.sampling import Sampling
from specexp.tree import Tree

ROUNDING = 1e-12
RULES = {"match": Match(), "reject": Reject()}
TREES = {
    "empty": Tree.chain(0),
    "chain 1": Tree.chain(1),
    "chain 2": Tree.chain(2),
    "chain 3": Tree.chain(3),
    "twins": Tree.branching(2),
    "triplets": Tree.branching(3),
    "branching": Tree.branching(2, 1),
    "irregular": Tree((-1, 0, 0, 1)),
}
KINDS = [  # the target's law, the drafter's
    ("dense", "dense"), ("zeros", "dense"), ("dense", "zeros"), ("zeros", "zeros"),
    ("dense", "onehot"), ("onehot", "dense"), ("onehot", "onehot"), ("even", "odd"),
    ("tied", "tied"),
]  # fmt: skip


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("drafter", ["null", "ngram", "scripted", "drawn", "chosen"])
@pytest.mark.parametrize("rule", RULES)
def test_every_drafter_rule_and_tree_keeps_the_law(rule, drafter, tree):
    engine = toy_engine(RULES[rule], drafter)
    cases = texts(3, 2 if len(TREES[tree]) > 4 else 4)
    assert gap(engine, cases, 3, [TREES[tree]]) <= ROUNDING


@pytest.mark.parametrize(("p", "q"), KINDS)
@pytest.mark.parametrize("tree", ["chain 2", "twins"])
@pytest.mark.parametrize("rule", RULES)
def test_zeros_certainties_ties_and_disjoint_supports(rule, tree, p, q):
    engine = toy_engine(RULES[rule], "drawn", p=p, q=q)
    assert gap(engine, texts(3, 6), 3, [TREES[tree]]) <= ROUNDING


@pytest.mark.parametrize("rule", RULES)
def test_a_draft_that_is_the_target(rule):
    engine = toy_engine(RULES[rule], "drawn", twin=True)
    assert gap(engine, texts(3, 8), 4, [Tree.chain(2)]) <= ROUNDING


@pytest.mark.parametrize(("V", "gamma", "length"), [(1, 2, 3), (2, 3, 4), (4, 2, 3), (5, 1, 3)])
def test_other_vocabularies_and_lengths(V, gamma, length):
    engine = toy_engine(Reject(), "drawn", V=V, p="zeros")
    assert gap(engine, texts(V, 4), length, [Tree.chain(gamma)]) <= ROUNDING


@pytest.mark.parametrize("eos", [(0,), (1, 2)])
@pytest.mark.parametrize("tree", ["chain 2", "twins"])
@pytest.mark.parametrize("rule", RULES)
def test_texts_end_at_the_first_end_of_text(rule, tree, eos):
    engine = toy_engine(RULES[rule], "drawn", eos=eos)
    assert gap(engine, texts(3, 6), 3, [TREES[tree]]) <= ROUNDING


@pytest.mark.parametrize("drafter", ["drawn", "scripted"])
@pytest.mark.parametrize("rule", RULES)
def test_the_rows_of_a_ragged_batch_are_independent(rule, drafter):
    engine = toy_engine(RULES[rule], drafter, V=2, eos=(1,))
    assert gap(engine, texts(2, 4, rows=2), 3, [Tree.chain(2)]) <= ROUNDING


@pytest.mark.parametrize(
    "sampling",
    [Sampling(0.0), Sampling(0.5), Sampling(1.0, top_k=2), Sampling(1.0, top_p=0.6),
     Sampling(0.5, top_k=2, top_p=0.7)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("rule", RULES)
def test_temperature_top_k_and_top_p_shape_the_law_that_is_kept(rule, sampling):
    for drafter in ("drawn", "chosen"):
        engine = toy_engine(RULES[rule], drafter, V=4, p="tied", sampling=sampling)
        assert gap(engine, texts(4, 4), 2, [Tree.chain(2)]) <= ROUNDING


def test_the_draft_may_change_its_shape_from_round_to_round():
    engine = toy_engine(Reject(), "drawn")
    trees = [Tree.chain(2), Tree.branching(2), Tree.chain(0), Tree.chain(1)]
    assert gap(engine, texts(3, 6), 4, trees) <= ROUNDING


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_draft_that_is_the_target_is_accepted_whole_in_every_round(depth):
    cases = texts(2, 4)
    engine = toy_engine(Reject(), "drawn", V=2, twin=True)
    found = explore(engine, cases, 6, [Tree.chain(depth)]).accepted
    assert {n for (_, _, n), weight in found.items() if weight > 1e-12} == {depth}
    assert max(r for _, r, _ in found) == -(-6 // (depth + 1)) - 1


def test_the_chance_that_a_guess_is_kept_is_the_overlap_of_the_laws():
    """alpha = sum(min(p, q)), Leviathan et al., corollary 3.6; Match keeps sum(p * q)."""
    cases = texts(3, 8)
    for rule, overlap in ((Reject(), min), (Match(), lambda a, b: a * b)):
        engine = toy_engine(rule, "drawn")
        found = explore(engine, cases, 1, [Tree.chain(1)]).accepted
        for c, ((prompt,),) in enumerate(zip(cases, strict=True)):
            p, q = (lm.module.after(prompt) for lm in engine.models)
            alpha = sum(overlap(a / sum(p), b / sum(q)) for a, b in zip(p, q, strict=True))
            assert found[c, 0, 1] == pytest.approx(alpha, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["scripted", "drawn", "chosen"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tree", [Tree.chain(3), Tree.branching(2, 2), Tree((-1, 0, 0, 0, 1, 3))])
def test_larger_toys(rule, drafter, tree):
    for p, q in KINDS:
        engine = toy_engine(RULES[rule], drafter, V=3, p=p, q=q, eos=(2,))
        assert gap(engine, texts(3, 20), 4, [tree]) <= ROUNDING
