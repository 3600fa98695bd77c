"""The drafters that need no training: what they must draft, written out slowly."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.oracle import distance, plain, written
from support.references import references
from support.tiny import PROMPTS, V, engine
from support.toys import POISON, texts, toy_engine

from specexp.drafters.recycle import Recycle
from specexp.drafters.suffix import Suffix
from specexp.engine import Engine
from specexp.policy import Fixed
from specexp.rules import Match, Reject
from specexp.sampling import Sampling
from specexp.sequences import Sequences
from specexp.tree import Tree

TREES = [Tree.chain(4), Tree.branching(2, 2), Tree((-1, 0, 0, 0, 1, 1, 3, 4)), Tree.chain(0)]
RNG = Sampling().rng(0)


def of_vocabulary(V: int):
    return SimpleNamespace(vocab=V, device=torch.device("cpu"))


def made_by(kind: str, V: int):
    target = of_vocabulary(V)
    return Suffix(V, 4) if kind == "suffix" else Recycle(target, 3)


def begun(drafter, seqs):
    drafter.allocate(*seqs.tokens.shape)
    drafter.prefill(seqs, None)
    return drafter


@pytest.mark.parametrize(
    ("rule", "shape"),
    [(Match(), Tree.chain(2)), (Match(), Tree.branching(2)), (Reject(), Tree.chain(2))],
    ids=["match chain", "match twins", "reject chain"],
)
@pytest.mark.parametrize("kind", ["suffix", "recycle"])
def test_drafter_that_remembers_keeps_the_distribution(kind, rule, shape):
    """`generate` itself, world by world: what it remembers may depend on all that is past."""
    toy = toy_engine(rule, "null", V=2)
    engine = Engine.of(toy, drafter=made_by(kind, 2), policy=Fixed(shape))
    case = texts(2, 3)[2]
    assert distance(written(engine, case, 2), plain(engine, case, 2)) <= 1e-12


@pytest.mark.parametrize("kind", ["suffix", "recycle"])
def test_drafter_forgets_one_text_before_the_next(kind):
    made = engine(kind, "branching")
    first = made.generate(PROMPTS, 12)
    made.generate([[3, 1, 3, 1, 3]], 12)
    again = made.generate(PROMPTS, 12)
    assert [r.steps for r in first.trace.rounds] == [r.steps for r in again.trace.rounds]


def remembered(dtype: torch.dtype, depth: int, budget: int | None, rounds: int = 4):
    """What `recycle` knows after some rounds whose rows all have that budget."""
    made = engine("recycle", "empty", "match", dtype=dtype)
    seqs = made.begin(Sequences.of(PROMPTS, 18, slack=5))
    B = len(PROMPTS)
    seqs = replace(seqs, budget=None if budget is None else torch.full((B,), budget))
    for _ in range(rounds):
        made.round(seqs, Tree.chain(depth))
    return made.drafter.table.read(slice(0, B), torch.arange(V).expand(B, -1)).tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_recycle_stores_nothing_of_draft_tokens_beyond_a_budget(dtype):
    for budget in range(4):
        assert remembered(dtype, 4, budget) == remembered(dtype, budget, None)
    assert remembered(dtype, 4, -1) == remembered(dtype, 4, None, rounds=0)


# suffix -------------------------------------------------------------------------------------------


def voted(
    text: list[int], tree: Tree, longest: int, least: float, stretch: float
) -> tuple[list[int], int]:
    """The draft tokens for nodes 1.., by lists and counters, and how many tokens agree."""

    def agreed(end: int) -> int:
        n = 0
        while n < longest and n <= end and text[end - n] == text[len(text) - 1 - n]:
            n += 1
        return n

    lengths = {end: agreed(end) for end in range(len(text) - 1)}
    most = max(lengths.values(), default=0)
    states = {0: (list(text), [e for e, n in lengths.items() if n == most > 0], 1.0)}
    drafted = []
    for parent in range(len(tree)):
        said, ends, trust = states[parent]
        depth = tree.depths[parent] + 1
        votes = Counter(said[e + depth] for e in ends)
        latest = {said[e + depth]: e for e in sorted(ends)}
        ranked = sorted(votes, key=lambda t: (-votes[t], -latest[t]))
        for rank in range(tree.parents.count(parent)):
            token = ranked[rank] if rank < len(ranked) else None
            sure = trust * votes[token] / len(ends) if token is not None else 0.0
            if token is None or sure < least - 1e-6 or depth > stretch * most:
                drafted.append(-1)
                states[len(drafted)] = ([*said, 0], [], 0.0)
            else:
                drafted.append(token)
                agree = [e for e in ends if said[e + depth] == token]
                states[len(drafted)] = ([*said, token], agree, sure)
    return drafted, most


@settings(max_examples=150)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=24), min_size=1, max_size=3),
    st.sampled_from(TREES),
    st.integers(1, 6),
)
def test_suffix_drafts_what_a_count_over_the_text_gives(rows, tree, longest):
    drafter = Suffix(5, longest)
    seqs = Sequences.of(rows, 8, slack=tree.room)
    for row, text in enumerate(rows):
        seqs.tokens[row, len(text) :] = POISON
    for off in (True, False):
        with references(off):
            draft = drafter.propose(seqs, tree, RNG)
        for row, text in enumerate(rows):
            drafted, _ = voted(text, tree, longest, drafter.least, drafter.stretch)
            assert draft.tokens[row, 1:].tolist() == drafted


def test_suffix_follows_the_majority_or_drafts_nothing():
    told = [1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 3, 7, 5, 1, 2]
    seqs = Sequences.of([told, [5, 6, 7, 8]], 8, slack=4)
    found = Suffix(10).propose(seqs, Tree.chain(3), RNG).tokens[:, 1:].tolist()
    assert found == [[3, 7, 5], [-1, -1, -1]]


# recycle ------------------------------------------------------------------------------------------


def test_recycle_offers_last_candidates_breadth_first():
    made = engine("recycle", Tree.branching(2, 2))
    tree = Tree.branching(2, 2)
    seqs = Sequences.of(PROMPTS[:1], 20, slack=8)
    seqs = made.begin(seqs)
    table: dict[int, list[int]] = {}
    with torch.inference_mode():
        for _ in range(8):
            draft = made.drafter.propose(seqs, tree, made.rng)
            tokens = draft.tokens[0].tolist()
            for child in range(1, len(tree)):
                parent = tree.parents[child]
                rank = [i for i, p in enumerate(tree.parents) if p == parent].index(child)
                assert tokens[child] == table.get(tokens[parent], [-1] * 4)[rank]
            seen = made.target.verify(seqs, draft)
            for node, token in enumerate(tokens):
                if token >= 0:
                    table[token] = seen.logits[0, node].topk(4).indices.tolist()
            verdict = made.rule(draft, made.sampling.law(seen.logits), made.rng)
            made.target.keep(seqs, draft, verdict)
            made.drafter.observe(seqs, draft, verdict, seen)
            seqs.commit(verdict)


def test_recycle_starts_with_the_tokens_that_followed_in_the_prompt():
    seqs = Sequences.of([[1, 2, 3, 1, 4, 1], [7, 8]], 4, slack=4)
    drafter = begun(Recycle(of_vocabulary(10), 2), seqs)
    found = drafter.table.read(slice(0, 2), torch.arange(10).expand(2, -1))[..., 0]
    assert found.tolist() == [[-1, 4, 3, 1, 1, *[-1] * 5], [*[-1] * 7, 8, -1, -1]]
    assert drafter.propose(seqs, Tree.chain(2), RNG).tokens.tolist() == [[1, 4, 1], [8, -1, -1]]
