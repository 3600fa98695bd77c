"""What would stop a round on a GPU, found without one."""

import copy
import subprocess
import sysconfig
import venv
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from weakref import WeakKeyDictionary

import pytest
import torch
from conftest import in_turn, one_in
from support import architectures, tiny
from support.fake_cuda import ATTENTION, ON_HOST, begun
from support.references import lightened
from support.tiny import DRAFTERS, FAMILIES, PROMPTS, SHAPES, TREES, engine, module, processed

from specexp.drafters.model import DraftModel
from specexp.drafters.ngram import NGram
from specexp.engine import Engine
from specexp.fast import fused
from specexp.models import int8
from specexp.models.lm import LM
from specexp.models.load import of_module
from specexp.policy import Fixed
from specexp.sampling import Sampling

EVERY = [(tree, rule, t) for rule, tree in SHAPES for t in (0.0, 0.9)]
layouts = pytest.mark.parametrize("attention", ATTENTION)


@pytest.fixture(autouse=True)
def _fused_as_on_a_gpu(monkeypatch):
    monkeypatch.setenv("SPECEXP_NATIVE", "off")
    monkeypatch.setattr(fused, "_FUSED", WeakKeyDictionary())  # compiled by other tests


def stays(attention, kind, tree, rule, temperature, family="llama") -> None:
    made = engine(kind, tree, rule, family, temperature, ATTENTION[attention])
    round_stays(made, tree, attention)


def round_stays(made: Engine, tree: str, attention) -> None:
    """A round gives a report of every row, and what a round may not do is not done."""
    with begun(made, PROMPTS, TREES[tree], attention) as seqs:
        report = made.round(seqs, TREES[tree])
        assert report.is_meta
        assert len(report) == len(PROMPTS)


def grown_round_stays(target: LM, attention) -> None:
    """A round of a draft tree that the target grows itself."""
    own = DraftModel(target.apart("draft"), Sampling(0.0))
    round_stays(Engine(target, own, Fixed(TREES["grown"]), Sampling(0.0)), "grown", attention)


@pytest.mark.parametrize(
    ("kind", "case", "attention"), one_in(5, product(DRAFTERS, EVERY, ATTENTION))
)
def test_round_leaves_the_device(attention, kind, case):
    tree, rule, temperature = case
    stays(attention, kind, tree, rule, temperature)


@pytest.mark.parametrize(("family", "attention"), in_turn(FAMILIES, ATTENTION))
def test_round_of_another_family_leaves_the_device(attention, family):
    stays(attention, "ngram", "branching", "reject", 0.9, family)


@pytest.mark.parametrize(
    ("tree", "family", "attention"),
    one_in(3, product(["chain", "grown"], ["granite4", "jamba", "lfm2", "qwen3_5"], ATTENTION)),
)
def test_round_over_states_leaves_the_device(attention, family, tree):
    stays(attention, "self", tree, "match", 0.9, family)


@pytest.mark.parametrize(("tree", "attention"), in_turn(["chain", "grown"], ATTENTION))
def test_round_over_rings_leaves_the_device(attention, tree):
    with architectures.short_passes():
        stays(attention, "self", tree, "match", 0.9, "gemma3")


@pytest.mark.parametrize(
    ("name", "attention"),
    in_turn(["bloom", "mpt", "bart", "gpt_neo", "inkling_text"], ATTENTION),
)
def test_round_by_position_leaves_the_device(attention, name):
    net = architectures.build(name, ATTENTION[attention])
    net.config._experts_implementation = "batched_mm"
    grown_round_stays(of_module(net), attention)


@pytest.mark.parametrize(
    ("name", "attention"), in_turn(["gemma2", "gpt_oss", "gemma4_text", "falcon_h1"], ATTENTION)
)
def test_round_through_lighter_passes_leaves_the_device(attention, name):
    net = architectures.build(name, ATTENTION[attention])
    net.config._experts_implementation = "batched_mm"  # others read which experts are asked
    with lightened():
        target = of_module(net)
    assert not target.net.table.off
    grown_round_stays(target, attention)


@pytest.mark.parametrize(("tree", "attention"), in_turn(["chain", "grown"], ATTENTION))
def test_round_with_processed_logits_leaves_the_device(attention, tree):
    config = {
        "repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "suppress_tokens": [3],
        "sequence_bias": [[[5, 6], 1.5]],
    }  # fmt: skip
    made = processed(engine("model", tree, "match", dtype=ATTENTION[attention]), **config)
    round_stays(made, tree, attention)


@pytest.mark.parametrize("tree", ["chain", "grown"])
@pytest.mark.parametrize("kind", DRAFTERS)
@layouts
def test_round_of_served_rows_leaves_the_device(attention, kind, tree):
    """Of rows that have moved, each with a budget; the drafter catches up with some."""
    tree = TREES[tree]
    made = engine(kind, tree, "match", temperature=0.9, dtype=ATTENTION[attention])
    with begun(made, PROMPTS, tree, attention) as seqs:
        made.rows.move(0, 1, 8)
        made.rows.leave(0)
        made.rows.clear(0)
        ragged = replace(seqs, budget=torch.empty_like(seqs.length))
        if not isinstance(made.drafter, ON_HOST):
            made.drafter.catch_up(ragged, 2)
        assert made.round(ragged, tree).is_meta


@pytest.mark.torchao
@pytest.mark.parametrize("kind", DRAFTERS)
@layouts
def test_round_of_quantised_weights_leaves_the_device(attention, kind, monkeypatch):
    small = copy.deepcopy(module("llama", ATTENTION[attention]))
    int8.quantise(small, "cpu")
    monkeypatch.setattr(tiny, "module", lambda *_: small)
    tree = TREES["grown"]
    made = engine(kind, tree, "match", temperature=0.9, dtype=ATTENTION[attention])
    with begun(made, PROMPTS, tree, attention) as seqs:
        assert any(map(int8.is_quantised, small.parameters()))
        assert made.round(seqs, tree).is_meta


OLDER = "torch==2.11.0", "transformers==5.17.0"  # what images for GPUs hold


@pytest.mark.slow
def test_rounds_under_older_releases_leave_the_device(tmp_path):
    """The same tests in an environment of their own; the other packages are those of this one."""
    with TemporaryDirectory(dir=tmp_path) as folder:
        venv.create(folder, with_pip=True)
        [site] = Path(folder).glob("lib/python*/site-packages")
        Path(site, "zz_rest.pth").write_text(sysconfig.get_path("purelib"))
        python = Path(folder, "bin", "python")
        here = {
            "capture_output": True,
            "text": True,
            "check": False,
            "cwd": Path(__file__).parents[2],
        }
        if subprocess.run([python, "-m", "pip", "install", *OLDER], **here).returncode:
            pytest.skip(f"no index here has {' and '.join(OLDER)}")
        run = subprocess.run([python, "-m", "pytest", __file__], **here)
        assert run.returncode == 0, run.stdout[-3000:]


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
