"""The joint law of what the real round writes is the target's, exactly; and it is written fast.

Total variation must be rounding (1e-12), not "small"; oracle.py says how it is computed. The last
part samples with the engine's own noise: there N texts over K outcomes bound the distance only by
the empirical one plus sqrt(K / N) / 2 + sqrt(ln(1e9) / 2N), with confidence 1 - 1e-9.
"""

import itertools
from fractions import Fraction

import pytest
import torch
from conftest import also, in_turn, one_in
from support.oracle import (
    distance,
    explore,
    gap,
    kept,
    overlap,
    plain,
    sampled,
    surprise,
    written,
)
from support.toys import Toy, texts, toy_engine

from specexp.errors import UserError
from specexp.models.lm import Unfused
from specexp.policy import Fixed, Plan
from specexp.rules import Block, Match, Reject, Typical
from specexp.rules import of as rules_of
from specexp.sampling import Sampling
from specexp.sequences import Sequences
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
SIZES = [(2, 3, 4), (3, 2, 3)]  # V, gamma, new tokens
LARGER = [(4, 2, 3), (5, 2, 3), (3, 3, 4), (4, 3, 4)]

CHAIN_RULES = RULES | {"block": Block()}

rules = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
chain_rules = pytest.mark.parametrize("rule", CHAIN_RULES.values(), ids=CHAIN_RULES)
laws = pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
DRAFTERS = ["null", "ngram", "scripted", "drawn", "chosen", "lookup"]


def rounds():
    """A rule, a drafter and a shape: each drafter drafts each shape, and one rule judges it in
    every `make test`, in turn."""
    for i, drafter in enumerate(DRAFTERS):
        for j, shape in enumerate(SHAPES):
            fit = ["match", "reject", "block"] if SHAPES[shape].is_chain else ["reject", "match"]
            at = (i + j) % len(fit)
            yield fit[at], drafter, shape
            yield from also(*((rule, drafter, shape) for rule in fit if rule != fit[at]))


@pytest.mark.parametrize(("law", "size"), in_turn(LAWS, SIZES), ids=str)
@chain_rules
def test_chains_keep_the_distribution_in_many_contexts(rule, law, size):
    V, gamma, length = size
    engine = toy_engine(rule, "drawn", V, **LAWS[law])
    contexts = texts(V, 6 if isinstance(rule, Match) else 20)
    assert gap(engine, contexts, length, [Tree.chain(gamma)]) <= ROUNDING


@chain_rules
def test_chains_keep_the_only_text_of_one_token(rule):
    assert gap(toy_engine(rule, "drawn", 1), texts(1, 20), 3, [Tree.chain(2)]) <= ROUNDING


@pytest.mark.parametrize(("rule", "drafter", "shape"), rounds())
def test_every_drafter_rule_and_tree_keeps_the_distribution(rule, drafter, shape):
    rule, shape = CHAIN_RULES[rule], SHAPES[shape]
    settings = [(2, "dense", 2 if len(shape) > 5 else 5)] * (shape != SHAPES["triplets"])
    settings += [(3, "zeros", 3)] * (len(shape) <= 4)
    for V, kind, contexts in settings:
        engine = toy_engine(rule, drafter, V, p=kind, q=kind)
        assert gap(engine, texts(V, contexts), 3, [shape]) <= ROUNDING


@laws
@rules
def test_siblings_without_replacement_keep_the_distribution(rule, law):
    engine = toy_engine(rule, "drawn", **law)
    assert gap(engine, texts(3, 4), 3, [Tree.branching(2)]) <= ROUNDING


@pytest.mark.parametrize(
    ("rule", "drafter", "eos"),
    one_in(3, itertools.product(CHAIN_RULES, DRAFTERS, [(0,), (1, 2)])),
)
def test_first_eos_ends_the_text(rule, drafter, eos):
    """Some prompts hold one, too; it ends nothing."""
    rule = CHAIN_RULES[rule]
    engine = toy_engine(rule, drafter, eos=eos)
    for shape in (Tree.chain(2), *[Tree.branching(2)] * (not rule.chains_only)):
        assert gap(engine, texts(3, 6), 3, [shape]) <= ROUNDING


@pytest.mark.parametrize(
    ("rule", "drafter"),
    [*itertools.product(["reject", "block"], ["drawn", "scripted"]), ("match", "scripted"),
     *also(("match", "drawn"))],
)  # fmt: skip
def test_rows_of_a_ragged_batch_are_independent(rule, drafter):
    engine = toy_engine(CHAIN_RULES[rule], drafter, V=2, eos=(1,))
    assert gap(engine, texts(2, 2, rows=2), 3, [Tree.chain(2)]) <= ROUNDING


@pytest.mark.parametrize("rule", ["reject", "block"])
def test_drafts_of_which_only_some_rows_were_drawn_keep_the_distribution(rule):
    """In two rows of one batch, of which one, both or none repeats itself at first."""
    cases, tree, drawn = texts(2, 4, rows=2)[1:], Tree.chain(2), set()
    for case in cases:
        engine = toy_engine(CHAIN_RULES[rule], "lookup", V=2)
        seqs = engine.begin(Sequences.of(case, 2, slack=3))
        drawn |= {tuple(bool(row.any()) for row in engine.draft(seqs, tree).q)}
    assert drawn == {(True, True), (True, False), (False, False)}
    assert gap(toy_engine(CHAIN_RULES[rule], "lookup", V=2), cases, 2, [tree]) <= ROUNDING


@pytest.mark.parametrize("drafter", ["scripted", *also("drawn")])
@chain_rules
def test_three_ragged_rows_are_independent(rule, drafter):
    engine = toy_engine(rule, drafter, V=2, eos=(1,))
    assert gap(engine, texts(2, 1, rows=3), 2, [Tree.chain(1)]) <= ROUNDING


SAMPLINGS = [
    Sampling(0.0),
    Sampling(0.5),
    Sampling(1.0, top_k=2),
    Sampling(1.0, top_p=0.6),
    Sampling(0.5, top_k=2, top_p=0.7),
]


@pytest.mark.parametrize(
    ("rule", "sampling", "drafted"),
    one_in(
        2, itertools.product(CHAIN_RULES, SAMPLINGS, [None, Sampling(1.0), Sampling(0.5, top_k=1)])
    ),
    ids=str,
)
def test_draft_sampling_does_not_change_the_distribution(rule, sampling, drafted):
    for drafter in ("drawn", "chosen"):
        engine = toy_engine(CHAIN_RULES[rule], drafter, V=4, p="tied", sampling=sampling)
        engine.drafter.sampling = drafted or sampling
        assert gap(engine, texts(4, 4), 2, [Tree.chain(2)]) <= ROUNDING


def test_tree_that_varies_by_round_keeps_the_distribution():
    engine = toy_engine(Reject(), "drawn")
    shapes = [Tree.chain(2), Tree.branching(2), Tree.chain(0), Tree.chain(1)]
    assert gap(engine, texts(3, 3), 4, shapes) <= ROUNDING


@pytest.mark.slow
@laws
@pytest.mark.parametrize(("V", "gamma", "length"), LARGER)
@chain_rules
def test_longer_chains_keep_the_distribution(rule, V, gamma, length, law):
    contexts = 2 if isinstance(rule, Match) else 20
    engine = toy_engine(rule, "drawn", V, **law)
    assert gap(engine, texts(V, contexts), length, [Tree.chain(gamma)]) <= ROUNDING


@pytest.mark.slow
@laws
@pytest.mark.parametrize("shape", ["second child has one", "irregular", "branching"])
@pytest.mark.parametrize("drafter", ["scripted", "drawn", "chosen"])
@rules
def test_larger_trees_keep_the_distribution(rule, drafter, shape, law):
    engine = toy_engine(rule, drafter, eos=(2,), **law)
    contexts = 1 if shape == "branching" else 3
    assert gap(engine, texts(3, contexts), 2, [SHAPES[shape]]) <= ROUNDING


# The loop around the round ----------------------------------------------------------------------


@pytest.mark.parametrize(("length", "eos"), in_turn([3, 2, 1, 0], [(1,), ()]))
def test_generate_keeps_the_distribution_of_plain_decoding(eos, length):
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

    def choose(self, load):
        last = int(self.seqs.root.sum() + self.seqs.length.sum())
        trees = [Tree.chain(0), Tree.chain(1), Tree.branching(2)]
        return Plan(trees[(last + load.rows) % 3])

    def learn(self, load, plan, steps, seconds): ...


@rules
def test_policy_that_depends_on_the_past_keeps_the_distribution(rule):
    engine = toy_engine(rule, "chosen", V=2, eos=(1,))
    engine.policy = Nosy(engine.drafter)
    for case in texts(2, 3)[1:]:
        assert distance(written(engine, case, 3), plain(engine, case, 3)) <= ROUNDING


def test_policy_that_sees_finished_rows_keeps_the_distribution():
    engine = toy_engine(Match(), "ngram", V=2, eos=(1,))
    engine.policy = Nosy(engine.drafter)
    [case] = texts(2, 1, rows=2)
    assert distance(written(engine, case, 2), plain(engine, case, 2)) <= ROUNDING


# What losslessness cannot see: whether draft tokens are kept ------------------------------------


@pytest.mark.parametrize(
    "shape", [Tree.chain(1), Tree.chain(2), Tree.chain(3), Tree.branching(2, 1)], ids=str
)
def test_draft_equal_to_target_is_accepted_whole(shape):
    """Else a hole in the draft's cache, or a wasted bonus token, would go unnoticed."""
    engine = toy_engine(Reject(), "drawn", V=2, twin=True)
    found = explore(engine, texts(2, 3)[2:], 6, [shape]).accepted
    assert {n for (_, _, n), weight in found.items() if weight > ROUNDING} == {shape.depth}
    assert max(r for _, r, _ in found) == -(-6 // (shape.depth + 1)) - 1


@pytest.mark.parametrize("kind", ["dense", "zeros"])
@pytest.mark.parametrize(
    ("rule", "both"),
    [(Reject(), min), (Match(), lambda a, b: a * b)],
    ids=RULES.keys().__reversed__(),
)
def test_acceptance_rate_is_the_overlap_of_p_and_q(rule, both, kind):
    """Of a chain: alpha = sum min(p, q) (Leviathan et al. 2022, corollary 3.6); independent
    samples agree with sum p * q."""
    cases = texts(3, 8)
    engine = toy_engine(rule, "drawn", p=kind, q=kind)
    found = explore(engine, cases, 1, [Tree.chain(3)]).accepted
    for c, (prompt,) in enumerate(cases):
        least = [overlap(engine, prompt, d, both) for d in range(4)] + [Fraction(0)]
        for n, (more, most) in enumerate(itertools.pairwise(least)):
            assert found[c, 0, n] == pytest.approx(float(more - most), abs=ROUNDING)


@laws
@pytest.mark.parametrize("drafter", ["drawn", "scripted"])
def test_block_accepts_at_least_as_many_as_reject(drafter, law):
    """In every context (Sun et al. 2024, theorem 2); with one token they are the same rule."""
    gains = []
    for gamma in (1, 2, 3):
        reject, block = (
            kept(toy_engine(rule, drafter, **law), texts(3, 10), gamma)
            for rule in (Reject(), Block())
        )
        gains += [b - a for a, b in zip(reject, block, strict=True)]
        if gamma == 1:
            assert max(map(abs, gains)) <= ROUNDING
    assert min(gains) >= -ROUNDING
    if drafter == "drawn" and not law:
        assert max(gains) > 0.01


class Biased(Toy):
    """A coin that forgets: heads with probability 1/3, or 2/3."""

    def __init__(self, heads: int) -> None:
        super().__init__(2, salt=heads)

    def weights(self, read, position, token):
        return torch.tensor([self.salt, 3 - self.salt]).double().expand(*read.shape, 2)


@pytest.mark.parametrize(("rule", "expected"), [(Reject(), 10 / 9), (Block(), 11 / 9)])
def test_block_matches_the_papers_worked_example(rule, expected):
    """p = (1/3, 2/3), q = (2/3, 1/3), two draft tokens (Sun et al. 2024, section 2)."""
    engine = toy_engine(rule, "drawn", V=2)
    engine.target.net, engine.drafter.lm.net = Unfused(Biased(1)), Unfused(Biased(2))
    assert kept(engine, [((3,),)], 2) == [pytest.approx(expected, abs=ROUNDING)]


LOSSY = {"typical": Typical(), "typical 0.5": Typical(0.5), "lenient": Reject(0.6)}


@pytest.mark.parametrize("kind", ["dense", "zeros"])
@pytest.mark.parametrize("rule", LOSSY.values(), ids=LOSSY)
def test_emitted_of_a_lossy_rule_matches_its_round(rule, kind):
    """`emitted` against every branch of the real round, one draft token drawn from q."""
    assert rule.lossy
    assert "lossy" in rule.name
    engine = toy_engine(rule, "drawn", V=4, p=kind, q=kind)
    cases = texts(4, 8)
    found = explore(engine, cases, 1, [Tree.chain(1)]).law
    worst = 0.0
    for law, (prompt,) in zip(found, cases, strict=True):
        p, q = (torch.tensor(lm.module.after(prompt)).double() for lm in engine.models)
        p, q = p / p.sum(), q / q.sum()
        said = rule.emitted(p, q).tolist()
        for token in range(4):
            assert said[token] == pytest.approx(law.get(((token,),), 0.0), abs=ROUNDING)
        worst = max(worst, float((rule.emitted(p, q) - p).abs().sum() / 2))
    assert worst > 0.01


@pytest.mark.parametrize("rule", [*CHAIN_RULES.values(), Reject(1.0)], ids=lambda r: r.name)
def test_emitted_of_an_exact_rule_is_the_target(rule):
    p, q = torch.rand(2, 5, dtype=torch.float64).softmax(-1)
    assert not rule.lossy
    assert torch.allclose(rule.emitted(p, q), p, atol=ROUNDING)


def test_typical_is_greedy_at_temperature_zero():
    engine = toy_engine(Typical(), "chosen", sampling=Sampling(0.0))
    assert gap(engine, texts(3, 6), 3, [Tree.chain(2), Tree.branching(2)]) <= ROUNDING


def test_block_rejects_a_tree():
    with pytest.raises(UserError, match="block judges chains; use tree chain"):
        explore(toy_engine(Block(), "drawn"), texts(3, 1), 1, [Tree.branching(2)])


@pytest.mark.parametrize(
    ("name", "said"),
    [("blok", "did you mean 'block'"), ("lenient", "needs a number"), ("reject:2", "no argument"),
     ("lenient:0", r"lie in \(0, 1\]"), ("typical:7", r"in \(0, 1\]"), ("x", "there are match")],
)  # fmt: skip
def test_unknown_rule_is_refused_in_one_line(name, said):
    with pytest.raises(UserError, match=said):
        rules_of(name)


@pytest.mark.parametrize("name", ["match", "reject", "block", "typical", "typical:0.3"])
def test_rule_is_built_from_its_name(name):
    assert rules_of(name).name.startswith(name.partition(":")[0])
    assert rules_of("lenient:0.5").lenience == 0.5


# The same with the engine's own noise -----------------------------------------------------------

ALARM = 1e-6  # of a false alarm, once for all: the seeds are fixed
OWN_NOISE = {
    "match chain": (Match(), "drawn", Tree.chain(2)),
    "reject chain": (Reject(), "drawn", Tree.chain(2)),
    "reject siblings": (Reject(), "drawn", Tree.branching(2)),
    "reject tree": (Reject(), "drawn", Tree((-1, 0, 0, 2))),
    "reject chosen": (Reject(), "scripted", Tree((-1, 0, 0, 2))),
    "block chain": (Block(), "drawn", Tree.chain(2)),
    "block longer chain": (Block(), "drawn", Tree.chain(3)),
}


@pytest.mark.parametrize(
    ("case", "dtype"),
    one_in(5, itertools.product(OWN_NOISE, (torch.float32, torch.float64))),
    ids=str,
)
def test_sampled_texts_have_the_joint_distribution(dtype, case):
    """N = 20,000 texts over K = 27 outcomes: true TV <= empirical TV + 0.041. In float32 by
    compiled code, where there is a compiler."""
    rule, drafter, shape = OWN_NOISE[case]
    engine = toy_engine(rule, drafter, dtype=dtype)
    engine.policy = Fixed(shape)
    assert surprise(engine, texts(3, 3)[2], 3, 20_000) > ALARM


@rules
def test_sampled_rows_are_independent(rule):
    """N = 10,000 pairs over K = 49 outcomes: true TV <= empirical TV + 0.067."""
    engine = toy_engine(rule, "drawn", V=2, eos=(1,))
    engine.policy = Fixed(Tree.chain(2))
    assert surprise(engine, texts(2, 2, rows=2)[1], 3, 10_000) > ALARM


@pytest.mark.parametrize("shape", [Tree.chain(3), Tree.branching(2, 2)], ids=str)
@pytest.mark.parametrize("drafter", ["ngram", "scripted", "drawn", "chosen"])
def test_match_with_a_seed_writes_what_plain_decoding_does(drafter, shape):
    engine = toy_engine(Match(), drafter, eos=(0,), seed=7)
    engine.policy = Fixed(shape)
    [case] = texts(3, 1, rows=6)
    assert sampled(engine, case, 12, 50) == sampled(engine.plain(), case, 12, 50)


def test_shared_noise_accepts_more_than_independent_draws():
    """At least (1 - TV) / (1 + TV) of the time, and never more than 1 - TV."""
    engine = toy_engine(Match(), "drawn")
    engine.policy = Fixed(Tree.chain(1))
    [case] = texts(3, 2)[1:]
    p, q = (lm.module.after(case[0]) for lm in engine.models)
    alpha = float(overlap(engine, case[0], 1, min))
    N = 20_000
    trace = engine.generate(list(case) * N, 1).trace
    assert trace.acceptance.rate > alpha / (2 - alpha) - 4.9 * (0.25 / N) ** 0.5
    assert trace.acceptance.rate < alpha + 4.9 * (0.25 / N) ** 0.5
    assert sum(a * b for a, b in zip(p, q, strict=True)) / sum(p) / sum(q) < alpha / (2 - alpha)
