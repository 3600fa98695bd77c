"""The joint law of what the real round writes is the target's, exactly; and it is written fast.

Total variation must be rounding (1e-12), not "small"; oracle.py says how it is computed. The last
part samples with the engine's own noise: there N texts over K outcomes bound the distance only by
the empirical one plus sqrt(K / N) / 2 + sqrt(ln(1e9) / 2N), with confidence 1 - 1e-9.
"""

import itertools
from fractions import Fraction

import pytest
from oracle import distance, explore, gap, plain, sampled, surprise, written
from toys import texts, toy_engine

from specexp.policy import Fixed
from specexp.rules import Match, Reject
from specexp.sampling import Sampling
from specexp.tree import Tree

ROUNDING = 1e-12
RULES = {"match": Match(), "reject": Reject()}
SHAPES = {
    "empty": Tree.chain(0),
    "chain 1": Tree.chain(1),
    "chain 2": Tree.chain(2),
    "chain 3": Tree.chain(3),
    "twins": Tree.branching(2),
    "triplets": Tree.branching(3),
    "second child has one": Tree((-1, 0, 0, 2)),
    "irregular": Tree((-1, 0, 0, 1, 3)),
    "branching": Tree.branching(2, 2),
}
LAWS = {
    "dense": {},
    "zeros in p": {"p": "zeros"},
    "zeros in q": {"q": "zeros"},
    "zeros in both": {"p": "zeros", "q": "zeros"},
    "certain p": {"p": "onehot"},
    "certain q": {"q": "onehot"},
    "q is p": {"twin": True},
    "disjoint": {"p": "even", "q": "odd"},
    "ties": {"p": "tied", "q": "tied"},
}
SIZES = [(1, 2, 3), (2, 3, 4), (3, 2, 3)]  # V, gamma, new tokens
LARGER = [(4, 2, 3), (5, 2, 3), (3, 3, 4), (4, 3, 4)]

rules = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
laws = pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
drafters = pytest.mark.parametrize("drafter", ["null", "ngram", "scripted", "drawn", "chosen"])


@laws
@pytest.mark.parametrize(("V", "gamma", "length"), SIZES)
@rules
def test_chains_keep_the_law_in_twenty_contexts(rule, V, gamma, length, law):
    if V == 1:
        law = {}
    engine = toy_engine(rule, "drawn", V, **law)
    assert gap(engine, texts(V, 20), length, [Tree.chain(gamma)]) <= ROUNDING


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@drafters
@rules
def test_every_drafter_rule_and_tree_keeps_the_law(rule, drafter, shape):
    settings = [(2, "dense", 5)] * (shape != SHAPES["triplets"])
    settings += [(3, "zeros", 3)] * (len(shape) <= 4)
    for V, kind, contexts in settings:
        engine = toy_engine(rule, drafter, V, p=kind, q=kind)
        assert gap(engine, texts(V, contexts), 3, [shape]) <= ROUNDING


@laws
@rules
def test_siblings_drawn_without_replacement_keep_the_law(rule, law):
    engine = toy_engine(rule, "drawn", **law)
    assert gap(engine, texts(3, 6), 3, [Tree.branching(2)]) <= ROUNDING


@pytest.mark.parametrize("eos", [(0,), (1, 2)])
@drafters
@rules
def test_texts_end_at_the_first_end_of_text(rule, drafter, eos):
    """Some prompts hold one, too; it ends nothing."""
    engine = toy_engine(rule, drafter, eos=eos)
    for shape in (Tree.chain(2), Tree.branching(2)):
        assert gap(engine, texts(3, 6), 3, [shape]) <= ROUNDING


@pytest.mark.parametrize("drafter", ["drawn", "scripted"])
@rules
def test_the_rows_of_a_ragged_batch_are_independent(rule, drafter):
    engine = toy_engine(rule, drafter, V=2, eos=(1,))
    assert gap(engine, texts(2, 4, rows=2), 3, [Tree.chain(2)]) <= ROUNDING
    assert gap(engine, texts(2, 1, rows=3), 2, [Tree.chain(1)]) <= ROUNDING


SAMPLINGS = [
    Sampling(0.0),
    Sampling(0.5),
    Sampling(1.0, top_k=2),
    Sampling(1.0, top_p=0.6),
    Sampling(0.5, top_k=2, top_p=0.7),
]


@pytest.mark.parametrize("drafted", [None, Sampling(1.0), Sampling(0.5, top_k=1)], ids=str)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@rules
def test_the_law_kept_is_the_shaped_one_however_the_draft_is_shaped(rule, sampling, drafted):
    for drafter in ("drawn", "chosen"):
        engine = toy_engine(rule, drafter, V=4, p="tied", sampling=sampling)
        engine.drafter.sampling = drafted or sampling
        assert gap(engine, texts(4, 4), 2, [Tree.chain(2)]) <= ROUNDING


def test_the_draft_may_change_its_shape_from_round_to_round():
    engine = toy_engine(Reject(), "drawn")
    shapes = [Tree.chain(2), Tree.branching(2), Tree.chain(0), Tree.chain(1)]
    assert gap(engine, texts(3, 6), 4, shapes) <= ROUNDING


@pytest.mark.slow
@laws
@pytest.mark.parametrize(("V", "gamma", "length"), LARGER)
@rules
def test_longer_chains_over_more_tokens(rule, V, gamma, length, law):
    contexts = 20 if isinstance(rule, Reject) else 2
    engine = toy_engine(rule, "drawn", V, **law)
    assert gap(engine, texts(V, contexts), length, [Tree.chain(gamma)]) <= ROUNDING


@pytest.mark.slow
@laws
@pytest.mark.parametrize("shape", ["second child has one", "irregular", "branching"])
@pytest.mark.parametrize("drafter", ["scripted", "drawn", "chosen"])
@rules
def test_larger_trees_over_more_tokens(rule, drafter, shape, law):
    engine = toy_engine(rule, drafter, eos=(2,), **law)
    contexts = 1 if shape == "branching" else 3
    assert gap(engine, texts(3, contexts), 2, [SHAPES[shape]]) <= ROUNDING


# The loop around the round ----------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 2, 3])
@pytest.mark.parametrize("eos", [(), (1,)])
def test_generate_has_the_law_of_plain_decoding(eos, length):
    """Here a short draft context cuts the draft as the text grows."""
    [case] = texts(2, 3)[1:2]
    engine = toy_engine(Reject(), "drawn", V=2, eos=eos)
    engine.policy = Fixed(Tree.chain(3))
    engine.drafter.context = len(case[0]) + 2
    assert distance(written(engine, case, length), plain(engine, case, length)) <= ROUNDING


class Nosy:
    """A policy that looks at everything there is between rounds: the texts and who is done."""

    widest = 3

    def __init__(self, drafter):
        self.prefill, drafter.prefill = drafter.prefill, self.see

    def see(self, seqs, hidden):
        self.seqs = seqs
        self.prefill(seqs, hidden)

    def choose(self, live):
        last = int(self.seqs.root.sum() + self.seqs.length.sum())
        return [Tree.chain(0), Tree.chain(1), Tree.branching(2)][(last + live) % 3]


@rules
def test_a_policy_may_depend_on_all_that_is_past(rule):
    engine = toy_engine(rule, "chosen", V=2, eos=(1,))
    engine.policy = Nosy(engine.drafter)
    for case in texts(2, 4):
        assert distance(written(engine, case, 3), plain(engine, case, 3)) <= ROUNDING


def test_the_policy_may_depend_on_which_rows_are_done():
    engine = toy_engine(Match(), "ngram", V=2, eos=(1,))
    engine.policy = Nosy(engine.drafter)
    [case] = texts(2, 1, rows=2)
    assert distance(written(engine, case, 2), plain(engine, case, 2)) <= ROUNDING


# What losslessness cannot see: whether guesses are kept -----------------------------------------


@pytest.mark.parametrize(
    "shape", [Tree.chain(1), Tree.chain(2), Tree.chain(3), Tree.branching(2, 1)], ids=str
)
def test_a_draft_that_is_the_target_is_accepted_whole_in_every_round(shape):
    """Else a hole in the draft's cache, or a wasted bonus token, would go unnoticed."""
    engine = toy_engine(Reject(), "drawn", V=2, twin=True)
    found = explore(engine, texts(2, 4), 6, [shape]).accepted
    assert {n for (_, _, n), weight in found.items() if weight > ROUNDING} == {shape.depth}
    assert max(r for _, r, _ in found) == -(-6 // (shape.depth + 1)) - 1


def overlap(engine, prompt, depth, both):
    """P(at least `depth` guesses of a chain are kept): both(p, q) summed along every path."""
    if depth == 0:
        return Fraction(1)
    p, q = (lm.module.after(prompt) for lm in engine.models)
    return sum(
        both(Fraction(a, sum(p)), Fraction(b, sum(q)))
        * overlap(engine, (*prompt, x), depth - 1, both)
        for x, (a, b) in enumerate(zip(p, q, strict=True))
    )


@pytest.mark.parametrize("kind", ["dense", "zeros"])
@pytest.mark.parametrize(
    ("rule", "both"),
    [(Reject(), min), (Match(), lambda a, b: a * b)],
    ids=RULES.keys().__reversed__(),
)
def test_guesses_are_kept_as_often_as_the_laws_overlap(rule, both, kind):
    """Of a chain: alpha = sum min(p, q) (Leviathan et al. 2022, corollary 3.6); independent
    samples agree with sum p * q."""
    cases = texts(3, 8)
    engine = toy_engine(rule, "drawn", p=kind, q=kind)
    found = explore(engine, cases, 1, [Tree.chain(3)]).accepted
    for c, (prompt,) in enumerate(cases):
        least = [overlap(engine, prompt, d, both) for d in range(4)] + [Fraction(0)]
        for n, (more, most) in enumerate(itertools.pairwise(least)):
            assert found[c, 0, n] == pytest.approx(float(more - most), abs=ROUNDING)


# The same with the engine's own noise -----------------------------------------------------------

ALARM = 1e-6  # of a false alarm, once for all: the seeds are fixed
OWN_NOISE = {
    "match chain": (Match(), "drawn", Tree.chain(2)),
    "reject chain": (Reject(), "drawn", Tree.chain(2)),
    "reject siblings": (Reject(), "drawn", Tree.branching(2)),
    "reject tree": (Reject(), "drawn", Tree((-1, 0, 0, 2))),
    "reject chosen": (Reject(), "scripted", Tree((-1, 0, 0, 2))),
}


@pytest.mark.parametrize(("rule", "drafter", "shape"), OWN_NOISE.values(), ids=OWN_NOISE)
def test_sampled_texts_have_the_joint_law(rule, drafter, shape):
    """N = 50,000 texts over K = 27 outcomes: true TV <= empirical TV + 0.026."""
    engine = toy_engine(rule, drafter)
    engine.policy = Fixed(shape)
    assert surprise(engine, texts(3, 3)[2], 3, 50_000) > ALARM


@rules
def test_sampled_rows_are_independent(rule):
    """N = 30,000 pairs over K = 49 outcomes: true TV <= empirical TV + 0.039."""
    engine = toy_engine(rule, "drawn", V=2, eos=(1,))
    engine.policy = Fixed(Tree.chain(2))
    assert surprise(engine, texts(2, 2, rows=2)[1], 3, 30_000) > ALARM


@pytest.mark.parametrize("shape", [Tree.chain(3), Tree.branching(2, 2)], ids=str)
@pytest.mark.parametrize("drafter", ["ngram", "scripted", "drawn", "chosen"])
def test_under_match_a_seed_writes_what_plain_decoding_writes(drafter, shape):
    engine = toy_engine(Match(), drafter, eos=(0,), seed=7)
    engine.policy = Fixed(shape)
    [case] = texts(3, 1, rows=6)
    assert sampled(engine, case, 12, 50) == sampled(engine.plain(), case, 12, 50)


def test_two_laws_on_the_same_noise_agree_more_often_than_independent_ones_can():
    """At least (1 - TV) / (1 + TV) of the time, and never more than 1 - TV."""
    engine = toy_engine(Match(), "drawn")
    engine.policy = Fixed(Tree.chain(1))
    [case] = texts(3, 2)[1:]
    p, q = (lm.module.after(case[0]) for lm in engine.models)
    alpha = float(overlap(engine, case[0], 1, min))
    N = 50_000
    trace = engine.generate(list(case) * N, 1).trace
    assert trace.acceptance.rate > alpha / (2 - alpha) - 4.9 * (0.25 / N) ** 0.5
    assert trace.acceptance.rate < alpha + 4.9 * (0.25 / N) ** 0.5
    assert sum(a * b for a, b in zip(p, q, strict=True)) / sum(p) / sum(q) < alpha / (2 - alpha)
