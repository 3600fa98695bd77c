"""Prompt lookup, against a search that reads like its definition."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.references import references
from support.tiny import NEW, engine

from specexp.drafters import Drafter, Request
from specexp.drafters.ngram import NGram, matched_until, prepare
from specexp.engine import Engine
from specexp.models.lm import LM
from specexp.sampling import Certain
from specexp.sequences import Draft, Sequences
from specexp.tree import Tree

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=20)


def occurrences(text: list[int], n: int) -> list[int]:
    """Earlier ends of the text's longest suffixes, longest match first, then the latest."""
    last = len(text) - 1
    found = []
    for end in range(last):
        length = 0
        while length < n and length <= end and text[end - length] == text[last - length]:
            length += 1
        if length:
            found.append((length, end))
    return [end for _, end in sorted(found, reverse=True)]


def test_longest_match_costs_no_more_than_the_text():
    seqs = Sequences.of([[1, 2, 1, 2, 1, 2], [3]], 2, slack=1)
    assert matched_until(seqs, 10**12).equal(matched_until(seqs, 9))


def continuation(text: list[int], end: int, count: int) -> list[int]:
    """What followed, going on into what is being written."""
    grown = list(text)
    for i in range(count):
        grown.append(grown[end + 1 + i])
    return grown[len(text) :]


def drafted(texts: list[list[int]], tree: Tree, n: int, vocab: int = 100) -> Draft:
    """Compiled, where there is a compiler, and by torch's operations."""
    slots = max(map(len, texts)) + len(tree)
    seqs = Sequences.of(texts, 8, slack=len(tree)).window(0, len(texts), slots)
    made = NGram(n, vocab).propose(seqs, tree, Certain())
    with references():
        again = NGram(n, vocab).propose(seqs, tree, Certain())
    assert again.tokens.equal(made.tokens)
    return made


def propose(texts: list[list[int]], tree: Tree, n: int) -> torch.Tensor:
    return drafted(texts, tree, n).tokens


@given(st.lists(TEXTS, min_size=1, max_size=3), st.integers(0, 5), st.integers(1, 4))
def test_ngram_chain_continues_the_best_earlier_occurrence(texts, gamma, n):
    drafts = propose(texts, Tree.chain(gamma), n)
    for text, draft in zip(texts, drafts.tolist(), strict=True):
        ends = occurrences(text, n)
        expected = continuation(text, ends[0], gamma) if ends else [-1] * gamma
        assert draft == [text[-1], *expected]


@given(TEXTS, st.integers(1, 4))
def test_ngram_tree_follows_another_occurrence_down_each_branch(text, n):
    """Three chains of two from the root: nodes 1-3 are their first tokens, 4-6 their second."""
    [draft] = propose([text], Tree((-1, 0, 0, 0, 1, 2, 3)), n).tolist()
    ends = occurrences(text, n)
    for branch in range(3):
        pair = continuation(text, ends[branch], 2) if branch < len(ends) else [-1, -1]
        assert [draft[1 + branch], draft[4 + branch]] == pair


def test_ngram_searches_the_whole_context():
    text = [7, 8, 9, *range(10, 90), 7, 8]
    assert propose([text], Tree.chain(1), 2).tolist() == [[8, 9]]


def test_ngram_prefers_a_longer_match_to_a_later_one():
    text = [1, 2, 3, 4, 9, 3, 5, 1, 2, 3]
    assert propose([text], Tree.chain(1), 3).tolist() == [[3, 4]]
    assert propose([text], Tree.chain(1), 1).tolist() == [[3, 5]]


@given(st.lists(TEXTS, min_size=1, max_size=3), st.integers(0, 4))
def test_ngram_drafts_no_id_beyond_the_vocabulary(texts, vocab):
    tree = Tree.branching(2, 1, 1)
    every, known = (drafted(texts, tree, 3, size).tokens[:, 1:] for size in (4, vocab))
    assert known.equal(every.where(every < vocab, -1))


def test_ngram_drafts_no_id_that_the_target_cannot_emit():
    made = engine("ngram", "branching", "match", temperature=0.9, dtype=torch.float32, vocab=9)
    made = Engine.of(made, drafter=prepared(made.target))
    trace = made.generate([[1, 20, 2, 1, 20, 2, 1], [30, 8, 30]], NEW).trace
    assert max(token for step in trace.steps() for token in step.draft) < 9


def prepared(target: LM) -> Drafter:
    """What `ngram:3` is for a target, of whatever tokenizer and sampling."""
    asked = dict.fromkeys(["config", "tokenizer", "sampling", "tree", "dtype", "seed", "source"])
    plan = Request(method="ngram", argument="3", target="target", vocab=target.vocab, **asked)
    return prepare(plan).make(target)


def test_ngram_with_more_leaves_than_tokens_stays_inside_the_buffer():
    for width in range(1, 9):
        for length in range(1, 9):
            assert (propose([[*range(length)]], Tree.branching(width), 3)[:, 1:] == -1).all()
