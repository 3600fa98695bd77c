"""What would stop a round on a GPU, found without one."""

from weakref import WeakKeyDictionary

import pytest
import torch
from support.fake_cuda import ATTENTION, begun
from support.tiny import DRAFTERS, FAMILIES, PROMPTS, SHAPES, TREES, engine, processed

from specexp.drafters.ngram import NGram
from specexp.engine import Engine
from specexp.fast import fused

ROUNDS = [("chain", "reject", 0.9), ("grown", "match", 0.0), ("branching", "reject", 0.9)]
EVERY = [(tree, rule, t) for rule, tree in SHAPES for t in (0.0, 0.9)]
layouts = pytest.mark.parametrize("attention", ATTENTION)


@pytest.fixture(autouse=True)
def _fused_as_on_a_gpu(monkeypatch):
    monkeypatch.setenv("SPECEXP_NATIVE", "off")
    monkeypatch.setattr(fused, "_FUSED", WeakKeyDictionary())  # compiled by other tests


def stays(attention, kind, tree, rule, temperature, family="llama") -> None:
    """A round gives a report of every row, and what a round may not do is not done."""
    dtype = ATTENTION[attention]
    made = engine(kind, tree, rule, family, temperature, dtype)
    with begun(made, PROMPTS, TREES[tree], attention) as seqs:
        report = made.round(seqs, TREES[tree])
        assert report.is_meta
        assert len(report) == len(PROMPTS)


@pytest.mark.parametrize(("tree", "rule", "temperature"), ROUNDS)
@pytest.mark.parametrize("kind", DRAFTERS)
@layouts
def test_round_leaves_the_device(attention, kind, tree, rule, temperature):
    stays(attention, kind, tree, rule, temperature)


@pytest.mark.slow
@pytest.mark.parametrize(("tree", "rule", "temperature"), sorted(set(EVERY) - set(ROUNDS)))
@pytest.mark.parametrize("kind", DRAFTERS)
@layouts
def test_round_of_any_shape_leaves_the_device(attention, kind, tree, rule, temperature):
    stays(attention, kind, tree, rule, temperature)


@pytest.mark.parametrize("family", FAMILIES)
@layouts
def test_round_of_another_family_leaves_the_device(attention, family):
    stays(attention, "ngram", "branching", "reject", 0.9, family)


@pytest.mark.parametrize("family", ["granite4", "jamba", "lfm2", "qwen3_5"])
@layouts
def test_round_over_states_leaves_the_device(attention, family):
    stays(attention, "self", "grown", "match", 0.9, family)


@pytest.mark.parametrize("tree", ["chain", "grown"])
@layouts
def test_round_with_processed_logits_leaves_the_device(attention, tree):
    config = {
        "repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "suppress_tokens": [3],
        "sequence_bias": [[[5, 6], 1.5]],
    }  # fmt: skip
    made = processed(engine("model", tree, "match", dtype=ATTENTION[attention]), **config)
    with begun(made, PROMPTS, TREES[tree], attention) as seqs:
        assert made.round(seqs, TREES[tree]).is_meta


@pytest.mark.parametrize("kind", ["model", "recycle"])
def test_moving_rows_leaves_the_device(kind):
    [attention, _] = ATTENTION
    made = engine(kind, "chain", "match", dtype=ATTENTION[attention])
    with begun(made, PROMPTS, TREES["chain"], attention):
        made.rows.move(0, 1, 8)
        made.rows.leave(0)
        made.rows.clear(0)


class ReadsHost(NGram):
    def propose(self, seqs, tree, rng):
        assert int(seqs.length[0])
        return super().propose(seqs, tree, rng)


class OnCpu(NGram):
    def propose(self, seqs, tree, rng):
        draft = super().propose(seqs, tree, rng)
        draft.tokens = draft.tokens + torch.zeros(len(tree), dtype=torch.int64)
        return draft


class ShapedByValues(NGram):
    def propose(self, seqs, tree, rng):
        seqs.tokens.nonzero()
        return super().propose(seqs, tree, rng)


@pytest.mark.parametrize(
    ("mistake", "seen"),
    [(ReadsHost, "item"), (OnCpu, "on the cpu"), (ShapedByValues, "nonzero")],
)
@layouts
def test_mistake_is_noticed(attention, mistake, seen):
    made = engine("ngram", "chain", dtype=ATTENTION[attention])
    made = Engine.of(made, drafter=mistake(2))
    round_ = begun(made, PROMPTS, TREES["chain"], attention)
    with round_ as seqs, pytest.raises(AssertionError, match=seen):
        made.round(seqs, TREES["chain"])
