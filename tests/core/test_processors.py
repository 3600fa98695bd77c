"""A target's generation config shapes its logits as in transformers, whatever is drafted."""

import functools
from itertools import product

import pytest
import torch
from conftest import in_turn, one_in
from support.oracle import gap, target_law
from support.tiny import NEW, PROMPTS, TREES, NoHostReads, V, engine, expected, module, processed
from support.toys import PROCESSED, processed_toy, toy_engine

from specexp.drafters import Drafter
from specexp.engine import Engine
from specexp.errors import NonFiniteLogits
from specexp.rules import Block, Match, Reject
from specexp.sequences import Sequences
from specexp.tree import Tree

CASES = {
    "penalty": {"repetition_penalty": 1.3},
    "reward": {"repetition_penalty": 0.8},
    "unigrams": {"no_repeat_ngram_size": 1},
    "bigrams": {"no_repeat_ngram_size": 2},
    "words": {"bad_words_ids": [[5], [7, 7], [9, 8, 1], [3, 4, 5, 6, 1, 2, 29]]},
    "biases": {"sequence_bias": [[[12], 4.0], [[12, 14], -9.0], [[7, 7, 14], 9.0], [[1, 14], 9.0]]},
    "suppressed": {"suppress_tokens": [1, 5, 9, 12, 30, 999]},
    "all": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "bad_words_ids": [[13], [0]],
            "sequence_bias": [[[11], 1.5]], "suppress_tokens": [3]},
}  # fmt: skip
PAIRS = [
    ("null", "empty"), ("ngram", "chain"), ("model", "chain"), ("model", "irregular"),
    ("eagle", "grown"), ("recycle", "branching"),
]  # fmt: skip


@functools.cache
def generated(case: str) -> list[list[int]]:
    """What transformers generates of the prompts."""
    net, theirs = module(), []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        output = net.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False,
            eos_token_id=0, pad_token_id=0, **CASES[case],
        )  # fmt: skip
        theirs.append(output[0, len(prompt) :].tolist())
    return theirs


@pytest.mark.parametrize(("case", "pair"), one_in(5, product(CASES, PAIRS)))
def test_greedy_text_is_that_of_transformers(case, pair):
    assert generated(case) != expected("llama"), "the case changes nothing"
    made = processed(engine(*pair, "match", eos=(0,)), **CASES[case])
    assert made.generate(PROMPTS, NEW).tokens == generated(case)


@pytest.mark.parametrize(
    ("case", "pair"),
    in_turn(CASES, [("ngram", "chain"), ("model", "branching"), ("self", "grown")]),
)
def test_sampled_text_under_match_is_that_of_plain_decoding(case, pair):
    made = processed(engine(*pair, "match", temperature=0.9), **CASES[case])
    assert made.generate(PROMPTS, NEW).tokens == made.plain().generate(PROMPTS, NEW).tokens


@pytest.mark.parametrize(
    ("rule", "drafter", "shape"),
    [(Reject(), "drawn", (-1, 0, 0, 2)), (Reject(), "scripted", (-1, 0, 0, 1)),
     (Match(), "scripted", (-1, 0, 0, 2)), (Block(), "drawn", (-1, 0, 1))],
    ids=["reject", "reject chosen", "match", "block"],
)  # fmt: skip
def test_processors_keep_the_distribution_of_the_target(rule, drafter, shape):
    """Every branch of chance of rounds on a tree, against the law of processed plain decoding."""
    made = processed_toy(rule, drafter)
    unprocessed, prompt = toy_engine(rule).target, (0, 2, 1, 0, 2)
    assert target_law(made.target, prompt, 1) != target_law(unprocessed, prompt, 1)
    assert gap(made, PROCESSED, 2, [Tree(shape)]) <= 1e-12


@pytest.mark.parametrize("tree", TREES)
def test_processors_read_nothing_on_the_host(tree):
    made = processed(engine("model", tree, temperature=0.9), **CASES["all"])
    seqs = made.begin(Sequences.of(PROMPTS, NEW, slack=TREES[tree].room))
    made.round(seqs, TREES[tree])
    with NoHostReads():
        made.round(seqs, TREES[tree])


ROUNDS = [
    ("null", "empty", "match"), ("model", "chain", "reject"), ("self", "chain", "block"),
    ("model", "irregular", "reject"), ("self", "grown", "match"),
]  # fmt: skip


@pytest.mark.parametrize(("round_", "temperature"), in_turn(ROUNDS, (0.0, 0.9)))
def test_row_whose_tokens_are_all_ruled_out_is_named(round_, temperature):
    """No token twice: after all V are used, none is left, and token 0 must not stand for it."""
    made = processed(engine(*round_, temperature=temperature), no_repeat_ngram_size=1)
    [tokens] = made.generate([PROMPTS[0]], V - 1).tokens
    assert sorted(PROMPTS[0] + tokens) == list(range(V))
    said = "no token is left by no_repeat_ngram_size of the generation config of target in row 2: "
    with pytest.raises(NonFiniteLogits, match=said):
        made.generate(PROMPTS[:2], V - 1)
    assert made.generate([PROMPTS[0]], V - 1).tokens == [tokens], "and the next text is unharmed"


class Ends(Drafter):
    """Only the EOS, again and again."""

    def propose(self, seqs, tree, rng):
        drafted = torch.zeros(len(seqs.length), len(tree) - 1, dtype=torch.int64)
        return seqs.draft(tree.nodes("cpu"), drafted)


def test_row_may_end_with_its_last_token_that_is_not_ruled_out():
    late = {"no_repeat_ngram_size": 1, "sequence_bias": [[[0], -99.0]]}
    made = processed(engine("null", "chain", "match", eos=(0,)), **late)
    made = Engine.of(made, drafter=Ends())
    generation = made.generate([PROMPTS[0]], V + 9)
    assert generation.tokens[0][-1] == 0
    assert len(generation.tokens[0]) == V - 1
    assert generation.trace.acceptance.cut == 4, "accepted behind the EOS, where no token is left"
