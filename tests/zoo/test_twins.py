"""Twins: pairs of random models with a chosen acceptance, here of four layers 64 wide."""

import json
import math
import os
from collections import namedtuple
from dataclasses import replace
from functools import partial

import pytest
import torch
from filelock import FileLock
from support.command_line import ran
from transformers import AutoModelForCausalLM, AutoTokenizer

from specexp import api
from specexp.errors import UserError
from specexp.measure import one_pairing, summaries
from specexp.measure.exactness import certify
from specexp.measure.prompts import Prompt
from specexp.trace import Acceptance
from specexp.tracking import results
from specexp.zoo import shelf, twins
from specexp.zoo.recipes import END, VOCABULARY
from specexp.zoo.twins import agreement, bisect

TINY = twins.Shape(4, 64, 176, 4, 2, draft=1, rows=4224)
REAL = twins.SHAPES
SHAPES = {"Tiny": TINY, "Tied": replace(TINY, tied=True)}
SHAPES |= {"Whole": replace(TINY, draft=4), "70B": REAL["70B"]}
PAIRS = [("Tiny", 0.5), ("Tied", 0.9)]
TEXTS = ["def mean(values):", "The museum opens at nine", "id,name\n1,", "once more", "a b", "x"]


def make(params, alpha, out, **options):
    return twins.make(params, alpha, out, **{"dtype": "float32"} | options)


@pytest.fixture(scope="module", autouse=True)
def tiny_shapes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(twins, "SHAPES", SHAPES)
        yield


@pytest.fixture(scope="module")
def pairs(shared):
    """(shape, alpha) -> facts and the folders of target and draft."""
    made = {}
    for params, alpha in PAIRS:
        out = shared / "twins" / str(alpha)
        folders = [out / f"twin-{params.lower()}-{x}" for x in ("target", "draft")]
        out.mkdir(parents=True, exist_ok=True)
        with FileLock(out / "lock"):  # calibration takes seconds
            if not folders[0].exists():
                make(params, alpha, out)
        made[params, alpha] = json.loads((folders[0] / "zoo.json").read_text()), *folders
    return made


# the weights


def test_twin_draft_equals_first_layers_of_target(pairs):
    for (params, _), (_, *folders) in pairs.items():
        target, draft = (AutoModelForCausalLM.from_pretrained(f).state_dict() for f in folders)
        layers = {name.split(".")[2] for name in draft if ".layers." in name}
        assert layers == {"0"}
        for name, weight in draft.items():
            assert torch.equal(weight, target[name]), name
        assert torch.equal(draft["lm_head.weight"], draft["model.embed_tokens.weight"]) == (
            params == "Tied"
        )


def test_only_what_deep_layers_write_is_damped(tmp_path):
    damps, weights = (0.2, 0.05), []
    for damp in damps:
        make("Tiny", None, tmp_path, damp=damp, force=True)
        net = AutoModelForCausalLM.from_pretrained(tmp_path / "twin-tiny-target")
        weights.append(net.state_dict())
    strong, weak = weights
    changed = {name for name, weight in weak.items() if not torch.equal(weight, strong[name])}
    assert changed == {
        f"model.layers.{layer}.{part}.weight"
        for layer in (1, 2, 3)
        for part in ("self_attn.o_proj", "mlp.down_proj")
    }
    for name in changed:
        torch.testing.assert_close(weak[name] * (damps[0] / damps[1]), strong[name])


def test_a_twin_is_a_function_of_its_seed(tmp_path):
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        make("Tiny", None, tmp_path / folder, damp=0.1, seed=seed, dtype="bfloat16")
    a, b, c = (
        {f.name: f.read_bytes() for f in (tmp_path / x / "twin-tiny-target").iterdir()}
        for x in "abc"
    )
    assert a == b
    shards = [name for name in a if name.endswith(".safetensors")]
    assert len(shards) == TINY.layers + 2
    assert not any(a[name] == c[name] for name in shards)


def test_a_folder_is_a_model_in_the_usual_format(pairs):
    facts, folder, _ = pairs["Tiny", 0.5]
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.num_parameters() == facts["parameters"] == TINY.parameters
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * facts["parameters"]
    ids = AutoTokenizer.from_pretrained(folder)("def f(x):")["input_ids"]
    shared = AutoTokenizer.from_pretrained(shelf.find("target-10m"))
    assert ids == shared("def f(x):")["input_ids"]


def test_shapes_are_those_of_the_models_they_are_named_after():
    billions = {name: shape.parameters / 1e9 for name, shape in REAL.items()}
    assert billions == pytest.approx(
        {"200M": 0.202, "1B": 1.236, "8B": 8.03, "70B": 70.55}, rel=1e-2
    )


# acceptance


def test_twin_reaches_the_requested_alpha(pairs):
    for (_, alpha), (facts, *_) in pairs.items():
        seen = facts["agreement"]
        assert seen["reached"] == pytest.approx(
            alpha, abs=4 * math.sqrt(alpha * (1 - alpha) / 2048)
        )
        assert seen["tokens"] == 2048
        assert seen["on"] == "the model itself"


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_engine_acceptance_matches_the_card(pairs, pair):
    facts, target, draft = pairs[pair]
    pairing = api.load(str(target), str(draft), gamma=4)
    prompts = [Prompt(i, "mine", (text,)) for i, text in enumerate(TEXTS)]
    record = summaries.pooled(one_pairing.acceptance([pairing], prompts, 300))
    refused = record.passes - record.histogram[4]
    tested = record.accepted + refused
    seen = facts["agreement"]["reached"]
    noise = math.sqrt(seen * (1 - seen) * (1 / tested + 1 / 2048))
    assert record.accepted / tested == pytest.approx(seen, abs=4 * noise)
    assert certify(pairing.engine, pairing.encode(TEXTS[:2]), 64).bugs == 0


def test_early_exit_of_a_twin_equals_its_draft(pairs):
    _, target, draft = pairs["Tied", 0.9]
    records = []
    for drafter in (str(draft), "early_exit:1"):
        pairing = api.load(str(target), drafter, gamma=3)
        records.append(pairing.generate(TEXTS, 100).trace.acceptance)
    assert isinstance(records[0], Acceptance)
    assert records[0] == records[1]


def test_agreement_is_of_the_greedy_text_of_the_target(pairs):
    _, target, draft = pairs["Tiny", 0.5]
    model, cut = (AutoModelForCausalLM.from_pretrained(f) for f in (target, draft))
    agrees = agreement(model, 1, rows=3, new=40, seed=5)
    start = torch.randint(1, VOCABULARY, (3, 16), generator=torch.Generator().manual_seed(5))
    whole = model.generate(start, max_new_tokens=40, do_sample=False)
    with torch.no_grad():
        drafted = cut(whole).logits[:, 15:-1, :VOCABULARY].argmax(-1)
    assert torch.equal(drafted == whole[:, 16:], agrees)


def test_agreement_falls_with_the_factor():
    model = twins._undamped(TINY, "float32", 0)
    shares = [twins._agreement_at(model, TINY, damp, 0) for damp in (0.001, 0.01, 0.05, 0.2, 1.0)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.99
    assert shares[-1] < 0.15


def test_a_narrow_model_agrees_as_often_as_a_wide_one():
    shares = [
        twins._agreement_at(twins._undamped(shape, "float32", 0), shape, 0.06, 0)
        for shape in (replace(TINY, draft=1), replace(TINY, width=256, hidden=704))
    ]
    assert shares[0] == pytest.approx(shares[1], abs=0.05)


def test_bisection_finds_a_factor_and_stops():
    asked = []

    def measure(damp):
        asked.append(damp)
        return 1 / (1 + 10 * damp)

    assert measure(bisect(measure, 0.8, 1e-4, 4)) == pytest.approx(0.8, abs=0.004)
    assert len(asked) <= 13


def test_twin_output_is_varied_and_never_ends(pairs):
    for _, target, _ in pairs.values():
        model = AutoModelForCausalLM.from_pretrained(target)
        start = torch.randint(1, VOCABULARY, (8, 4), generator=torch.Generator().manual_seed(3))
        made = model.generate(start, max_new_tokens=60, do_sample=False)[:, 4:]
        assert made.shape == (8, 60)
        assert made.max() < VOCABULARY
        assert not (made == END).any()
        assert sum(len(set(row)) for row in made.tolist()) > 0.6 * made.numel()
        assert made.flatten().bincount().max() < 0.05 * made.numel()


# names, refusals, interruption


def test_the_shelf_finds_twins_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECEXP_MLRUNS", str(tmp_path))
    assert shelf.store() / "twins" == results.root() / "twins"
    make("Tiny", None, None, damp=0.05)
    assert shelf.find("twin-tiny") == tmp_path / "twins" / "twin-tiny-target"
    assert shelf.default_draft("twin-tiny").path == tmp_path / "twins" / "twin-tiny-draft"
    assert [model.name for model in shelf.models()][-2:] == ["twin-tiny", "twin-tiny-draft"]
    pairing = api.load("twin-tiny", gamma=3)
    assert pairing.drafter == "twin-tiny-draft"
    assert pairing.target.vocab == VOCABULARY
    assert len(pairing.generate(["def"], 20).tokens[0]) == 20


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"params": "2T"}, "no twin has '2T' parameters: choose one of Tiny, Tied, "),
        ({"alpha": None}, "give either --alpha"),
        ({"damp": 0.1}, "give either --alpha"),
        ({"alpha": 0.0}, "alpha is 0.0; it must lie between 0 and 1"),
        ({"alpha": 1.0}, "alpha is 1.0"),
        ({"alpha": math.nan}, "alpha is nan"),
        ({"alpha": None, "damp": 0.0}, "damp is 0.0"),
        ({"alpha": None, "damp": math.inf}, "damp is inf"),
        ({"dtype": "int8"}, "dtype 'int8' is unknown"),
    ],
)
def test_impossible_twin_is_refused_and_writes_nothing(tmp_path, options, says):
    asked = {"params": "Tiny", "alpha": 0.5} | options
    with pytest.raises(UserError) as refused:
        make(out=tmp_path / "out", **asked)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_twin_output_path_that_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write to .*file; give another .*: .*exists"):
        make("Tiny", None, tmp_path / "file", damp=0.05)


def test_twin_that_does_not_fit_is_refused_with_bytes(tmp_path, monkeypatch):
    used = namedtuple("usage", "total used free")
    monkeypatch.setattr(twins.shutil, "disk_usage", lambda path: used(2e11, 0, 50_000_000_000))
    with pytest.raises(UserError) as refused:
        twins.make("70B", 0.8, tmp_path / "out")
    assert "twin 70B in bfloat16 needs 162,4" in str(refused.value)
    assert "bytes of disk and 50,000,000,000 are free" in str(refused.value)
    monkeypatch.setattr(twins.shutil, "disk_usage", lambda path: used(2e12, 0, 10**12))
    monkeypatch.setattr(twins, "free_memory", lambda device: 1_000_000_000)
    with pytest.raises(UserError, match=r"needs 4,202,692,608 bytes of memory and 1,000,000,000"):
        twins.make("70B", None, tmp_path / "out", damp=0.05)
    assert not (tmp_path / "out").exists()


def test_a_pair_is_replaced_only_by_force(tmp_path):
    make("Tiny", None, tmp_path, damp=0.05)
    with pytest.raises(UserError, match=r"twin-tiny-target exists: replace it with --force"):
        make("Tiny", None, tmp_path, damp=0.2)
    make("Tiny", None, tmp_path, damp=0.2, force=True)
    facts = json.loads((tmp_path / "twin-tiny-target" / "zoo.json").read_text())
    assert facts["agreement"] == {"damp": 0.2}
    assert sorted(f.name for f in tmp_path.iterdir()) == ["twin-tiny-draft", "twin-tiny-target"]


def test_leftovers_of_killed_twins_are_removed(tmp_path):
    left, busy = tmp_path / ".twin-tiny-draft-99999999", tmp_path / f".twin-8b-draft-{os.getpid()}"
    for part in (left, busy):
        part.mkdir()
        (part / "model.safetensors").write_bytes(b"half")
    make("Tiny", None, tmp_path, damp=0.05)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        busy.name, "twin-tiny-draft", "twin-tiny-target",
    ]  # fmt: skip


@pytest.mark.parametrize("after", [0, 2, 4, 7])
def test_interrupted_twin_leaves_no_target(tmp_path, monkeypatch, after):
    saved = []

    def save(weights, file, metadata):
        if len(saved) == after:
            assert {model.role for model in shelf.models(tmp_path)} <= {"draft"}
            raise KeyboardInterrupt
        saved.append(file)
        twins_save(weights, file, metadata)

    twins_save = twins.save_file
    monkeypatch.setattr(twins, "save_file", save)
    with pytest.raises(KeyboardInterrupt):
        make("Tiny", None, tmp_path, damp=0.05)
    assert {f.name for f in tmp_path.iterdir()} <= {"twin-tiny-draft"}
    monkeypatch.setattr(twins, "save_file", twins_save)
    make("Tiny", None, tmp_path, damp=0.05)


def test_alpha_out_of_reach_is_refused(tmp_path, monkeypatch):
    """All its layers are the draft's, so that it agrees whatever the factor is."""
    monkeypatch.setattr(twins, "_agreement_at", lambda *_, **__: 1.0)
    with pytest.raises(UserError, match=r"alpha 0.3 is out of reach of this shape: .* gives 1.000"):
        make("Whole", 0.3, tmp_path)


def test_zoo_twin_prints_how_to_use_the_pair(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPECEXP_MLRUNS", str(tmp_path))
    run = partial(ran, monkeypatch, capsys, "zoo", "twin", "--params", "tiny", "--damp", "0.05")
    code, out, _ = run()
    assert code == 0
    assert "use them as --target twin-tiny --dtype bfloat16" in out
    assert "acceptance not measured; output of deep layers scaled by 0.05" in out
    assert json.loads(run("--force", "--json")[1])["agreement"] == {"damp": 0.05}
    code, _, err = run()
    assert code == 2
    assert "exists" in err.strip().splitlines()[-1]
