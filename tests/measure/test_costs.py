"""Measuring costs: every setting is timed as often as asked, with full drafts."""

import json

import numpy as np
import pytest
from conftest import tiny_llama
from support import tiny

from specexp.drafters.lookup import Lookup
from specexp.drafters.model import DraftModel
from specexp.drafters.ngram import NGram
from specexp.drafters.plain import Plain
from specexp.drafters.suffix import Suffix
from specexp.engine import Engine
from specexp.errors import UserError
from specexp.measure import costs
from specexp.models.lm import LM
from specexp.models.load import of_module
from specexp.policy import Fixed
from specexp.rules import Match
from specexp.sampling import Sampling
from specexp.tree import Tree


@pytest.fixture(scope="module")
def engine():
    target, draft = of_module(tiny_llama(0), "target"), of_module(tiny_llama(1, layers=1), "draft")
    return Engine(target, DraftModel(draft, Sampling()), Fixed(Tree.chain(2)), rule=Match())


def test_measure_gives_positive_times_everywhere(engine):
    table = costs.measure(engine, [[1, 2, 3], [4]], [4, 1, 2], [2, 1], [48, 32], repeats=3)
    assert (table.batches, table.tokens, table.gammas) == ((1, 2, 4), (1, 2, 3), (0, 1, 2))
    assert table.contexts == (32, 48)
    assert table.lengths == (1, 2, 4, 8, 16, 32, 44)
    assert table.verify.shape == table.draft.shape == (3, 3, 2)
    assert table.prefill.shape == table.catch_up.shape == (7,)
    for times in (table.verify, table.prefill, table.catch_up, table.draft[:, 1:]):
        assert np.isfinite(times).all()
        assert (times > 0).all()
    assert (table.about["target"], table.about["drafter"]) == ("target", "draft")
    assert table.about["parameters"] == engine.target.parameters
    assert json.loads(json.dumps(table.about)) == table.about


@pytest.mark.parametrize("kind", ["model", "medusa"])
def test_weights_behind_a_lookup_count(kind):
    alone = tiny.engine(kind)
    behind = Engine.of(alone, drafter=Lookup(Suffix(alone.target.vocab), alone.drafter))
    assert costs.added_bytes(behind) == costs.added_bytes(alone) > 0


def test_measure_times_full_drafts(engine, monkeypatch):
    """A lookup that finds nothing, and a table of what finding something would cost."""
    seen, verify = [], LM.verify
    monkeypatch.setattr(
        LM, "verify", lambda lm, seqs, draft, taps: (seen.append(draft), verify(lm, seqs, draft))[1]
    )
    lookup = Engine(engine.target, NGram(), engine.policy)
    costs.measure(lookup, [list(range(20))], [2], [2], [24], repeats=1)
    assert min(int(draft.tokens.min()) for draft in seen) >= 0
    assert {draft.tokens.shape[1] for draft in seen} == {1, 3}


@pytest.fixture
def played(monkeypatch) -> list[tuple[int, int, int]]:
    """The rounds that are timed from now on: rows, slots and draft tokens of each. Each takes a
    second, and a tenth for each draft token."""
    found = []

    def spy(engine, seqs, tree):
        found.append((*seqs.tokens.shape, drafted := len(tree) - 1))
        return 0.1 * drafted, 1 + 0.1 * drafted

    monkeypatch.setattr(costs, "_round", spy)
    return found


def test_measure_walks_forwards_and_backwards(engine, played, monkeypatch):
    """Warm-ups either way and `repeats` rounds each, those of a kind together; the buffers are what
    the contexts say."""
    monkeypatch.setattr(costs, "FULL", 2)
    costs.measure(engine, [[1, 2, 3]], [1, 2], [2], [16, 24], repeats=2)
    settings = {(b, s, g) for b in (1, 2) for s in (16, 24) for g in (0, 2)}
    assert set(played) == settings
    lead = {0: costs.CALM, 2: costs.LEAD}
    assert min(lead.values()) > engine.recorder.warm
    assert all(played.count((b, s, g)) == 2 * (lead[g] + 2 // b) for b, s, g in settings)
    first = [(1, 16, 0)] * (lead[0] + 2) + [(1, 16, 2)] * (lead[2] + 2)
    assert played[: len(first)] == first
    assert played == played[::-1]


def test_measure_alternates_draft_lengths(engine, played, monkeypatch):
    monkeypatch.setattr(costs, "FULL", 5)
    monkeypatch.setattr(costs, "BLOCK", 3)
    costs.measure(engine, [[1, 2, 3]], [1], [2], [16], repeats=1)
    calm, lead = costs.CALM, costs.LEAD
    drafted = [gamma for _, _, gamma in played]
    assert drafted == [0] * (calm + 3) + [2] * (lead + 3) + [2] * (lead + 2) + [0] * (calm + 2)


def test_a_pass_shorter_than_a_plain_one_is_timed_again(engine, monkeypatch):
    """Drafting disturbed in the only round of a setting: nothing of the round is left."""
    timed = []

    def busy(engine, seqs, tree):
        timed.append(key := (len(seqs.tokens), len(tree) - 1))
        disturbed = key == (8, 2) and timed.count(key) <= costs.LEAD + 1
        return (5.0 if disturbed else 0.3) * (len(tree) > 1), 1.0 + 0.3 * (len(tree) > 1)

    monkeypatch.setattr(costs, "_round", busy)
    table = costs.measure(engine, [[1, 2, 3]], [4, 8], [2], [16], repeats=1)
    assert timed.count((8, 2)) == 2 * (costs.LEAD + 1)
    assert timed.count((4, 2)) == costs.LEAD + 2
    assert table.draft_s(4, 2, 16) == pytest.approx(0.3)
    assert table.verify_s(8, 3, 16) == pytest.approx(0.8)  # the least that a pass takes
    assert table.round_s(8, 2, 16) == pytest.approx(1.3)


def test_rounds_far_shorter_than_plain_steps_are_no_costs(engine, monkeypatch):
    monkeypatch.setattr(costs, "_round", lambda engine, seqs, tree: (0.0, 1.0 / len(tree) ** 2))
    with pytest.raises(UserError, match=r"a round took 0.11 of a plain step, timed twice: the mac"):
        costs.measure(engine, [[1, 2, 3]], [8], [2], [16], repeats=1)


def test_measure_takes_a_plain_engine(engine):
    table = costs.measure(engine.plain(), [[1, 2]], [1], [0], [16], repeats=1)
    assert table.gammas == (0,)
    assert table.verify_s(1, 1, 16) > 0
    assert isinstance(engine.plain().drafter, Plain)


@pytest.mark.parametrize(
    ("ids", "batches", "gammas", "contexts", "repeats", "said"),
    [
        ([[1]], [0], [1], [16], 1, "batch is 0"),
        ([[1]], [], [1], [16], 1, "batch is missing"),
        ([[1]], [1], [-1], [16], 1, "gamma is -1"),
        ([[1]], [1], [4], [7], 1, "context is 7; to measure costs it must be 8"),
        ([[1]], [1], [1], [999], 1, "the 128 tokens that target serves; measure shorter ones$"),
        ([[1]], [1], [1], [16], 0, "repeats is 0"),
        ([[]], [1], [1], [16], 1, "no prompt"),
    ],
)
def test_measure_refuses_impossible_settings(engine, ids, batches, gammas, contexts, repeats, said):
    with pytest.raises(UserError, match=said):
        costs.measure(engine, ids, batches, gammas, contexts, repeats)


def test_measure_refuses_gamma_of_null_drafter(engine):
    with pytest.raises(UserError, match="gamma 0 alone"):
        costs.measure(engine.plain(), [[1]], [1], [2], [16])
