"""What a generation config means: what is followed, refused, sampled, and where texts end."""

import json
import logging
import math
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import MinPLogitsWarper

import specexp
from specexp.errors import NonFiniteLogits, UserError
from specexp.models import generation
from specexp.models.load import read_generation
from specexp.models.processors import unprocessed
from specexp.sampling import Sampling

REFUSED = {
    "num_beams": 4, "guidance_scale": 1.5, "encoder_repetition_penalty": 1.2,
    "encoder_no_repeat_ngram_size": 3, "forced_eos_token_id": 0, "forced_bos_token_id": 0,
    "exponential_decay_length_penalty": [5, 1.1], "min_length": 9, "min_new_tokens": 1,
    "begin_suppress_tokens": [3], "penalty_alpha": 0.6, "diversity_penalty": 0.5, "max_time": 9.5,
    "stop_strings": ["}"], "token_healing": True, "watermarking_config": {"bias": 2.5},
    "dola_layers": "high", "force_words_ids": [[3]], "constraints": ["x"], "num_beam_groups": 2,
    "cache_implementation": "quantized",
}  # fmt: skip


@pytest.fixture
def folder(tiny_folders, tmp_path):
    """A model's folder; `folder.says(**settings)` writes its generation_config.json."""
    copy = shutil.copytree(tiny_folders[0], tmp_path / "target")

    def says(**settings) -> str:
        (copy / "generation_config.json").write_text(json.dumps(settings))
        return str(copy)

    return says


@pytest.mark.parametrize(("setting", "value"), REFUSED.items(), ids=REFUSED)
def test_a_setting_that_cannot_be_followed_is_refused_before_weights_are_read(
    setting, value, folder, monkeypatch
):
    monkeypatch.setattr("specexp.api.load_model", None)
    with pytest.raises(UserError, match=rf"target sets {setting} to .* remove it there") as refusal:
        specexp.load(folder(**{setting: value}), "ngram")
    assert "\n" not in str(refusal.value)


def test_every_setting_that_can_be_refused_has_a_value_here():
    assert REFUSED.keys() == generation.REFUSED.keys()


@pytest.mark.parametrize(
    ("setting", "value"),
    [("repetition_penalty", 0), ("repetition_penalty", "x"), ("no_repeat_ngram_size", "two"),
     ("no_repeat_ngram_size", -2), ("no_repeat_ngram_size", 2.5),
     ("repetition_penalty", math.inf), ("repetition_penalty", math.nan),
     ("sequence_bias", [[[1], math.nan]]), ("sequence_bias", [[[1], math.inf]]),
     ("bad_words_ids", [[]]), ("bad_words_ids", 3), ("sequence_bias", [3]),
     ("suppress_tokens", ["a"]), ("suppress_tokens", list(range(9999))),
     ("eos_token_id", [{"id": 3}])],
)  # fmt: skip
def test_a_setting_with_a_wrong_value_is_one_line(setting, value, folder):
    with pytest.raises(UserError, match=setting) as refusal:
        specexp.load(folder(**{setting: value}), "ngram")
    assert "\n" not in str(refusal.value)


def test_settings_that_together_leave_no_token_are_named(folder):
    most = {"suppress_tokens": list(range(1, 9999)), "no_repeat_ngram_size": 2}
    said = "rules out every token by sequence_bias and suppress_tokens: allow some there"
    with pytest.raises(UserError, match=said):
        specexp.load(folder(**most, sequence_bias=[[[0], -math.inf]]), "ngram")
    with pytest.raises(UserError, match="rules out every token by bad_words_ids and suppress_tok"):
        specexp.load(folder(**most, bad_words_ids=[[0]]), "ngram")
    specexp.load(folder(**most, bad_words_ids=[[0]], eos_token_id=0), "ngram")  # bans no EOS
    pairing = specexp.load(folder(**most, eos_token_id=9999), "ngram")
    said = "no token is left by no_repeat_ngram_size and suppress_tokens of the generation config"
    with pytest.raises(NonFiniteLogits, match=said):
        pairing.generate("a", 9)


def test_a_generation_config_that_is_no_json_is_refused(folder):
    path = Path(folder()) / "generation_config.json"
    path.write_text("{")
    with pytest.raises(UserError, match=r"cannot read .*generation_config.json"):
        specexp.load(str(path.parent), "ngram")


def test_settings_that_change_nothing_are_no_processors(folder):
    neutral = {
        "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "suppress_tokens": [],
        "min_length": 0, "num_beams": 1, "guidance_scale": 1, "encoder_repetition_penalty": 1.0,
        "max_length": 20, "cache_implementation": "static",
    }  # fmt: skip
    pair = specexp.load(folder(**neutral), "ngram")
    assert pair.target.process is unprocessed
    pair = specexp.load(folder(repetition_penalty=1.1), "ngram")
    assert pair.engine.plain().target.process is pair.apart().target.process is pair.target.process


EOS = {"named": ({"eos_token_id": 5}, [5]), "several": ({"eos_token_id": [5, 6]}, [5, 6]),
       "elsewhere": ({"bos_token_id": 1}, [])}  # fmt: skip


@pytest.mark.parametrize(("says", "stops"), EOS.values(), ids=EOS)
def test_eos_of_generation_config_counts_alone(says, stops, folder, caplog):
    source = folder(**says)
    config = json.loads((Path(source) / "config.json").read_text())
    (Path(source) / "config.json").write_text(json.dumps(config | {"eos_token_id": 7}))
    with caplog.at_level(logging.WARNING, "specexp"):
        engine = specexp.load(source, "ngram").engine
    assert [*engine.eos] == stops
    assert ("names no EOS" in caplog.text) == (not stops)
    module = AutoModelForCausalLM.from_pretrained(source)
    assert module.generation_config.eos_token_id == says.get("eos_token_id")


def test_refusal_of_a_target_without_eos_is_one_line(folder, caplog):
    source = folder(num_beams=4)
    config = json.loads((Path(source) / "config.json").read_text())
    (Path(source) / "config.json").write_text(json.dumps(config | {"eos_token_id": 7}))
    with caplog.at_level(logging.WARNING, "specexp"), pytest.raises(UserError, match="num_beams"):
        specexp.load(source, "ngram")
    assert not caplog.records


def test_without_generation_config_eos_is_that_of_config(folder):
    source = Path(folder())
    (source / "generation_config.json").unlink()
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"eos_token_id": 7}))
    assert specexp.load(str(source), "ngram").engine.eos == (7,)
    assert read_generation(source).eos_token_id == 7


def test_sampling_of_the_model_is_that_of_its_generation_config(folder):
    own = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1}
    pair = specexp.load(folder(**own), "ngram", sampling="model")
    assert pair.engine.sampling == Sampling(0.7, 20, 0.8, 0.1)
    assert pair.with_(temperature=0.3).engine.sampling == Sampling(0.3, 20, 0.8, 0.1)
    assert specexp.load(folder(**own), "ngram").engine.sampling == Sampling()
    usual = specexp.load(folder(do_sample=True), "ngram", sampling="model")
    assert usual.engine.sampling == Sampling(1.0, 50), "transformers' own defaults"
    greedy = specexp.load(folder(temperature=0.7), "ngram", sampling="model")
    assert greedy.engine.sampling == Sampling()


def test_variant_may_take_the_sampling_of_the_model(folder):
    own = {"do_sample": True, "temperature": 0.7, "top_k": 20}
    pair = specexp.load(folder(**own), "ngram", top_p=0.5)
    changed = pair.with_(sampling="model")
    assert changed.engine.sampling == Sampling(0.7, 20)
    assert changed.options | {"temperature": 0.7, "sampling": "given"} == changed.options
    assert changed.with_(temperature=0.3).engine.sampling == Sampling(0.3, 20)
    with pytest.raises(UserError, match="leave them out"):
        pair.with_(sampling="model", top_k=3)


@pytest.mark.parametrize(
    ("says", "options", "message"),
    [({}, {"sampling": "own"}, "sampling 'own' is unknown; use given or model"),
     ({}, {"sampling": "model", "top_k": 3}, "leave them out"),
     ({"do_sample": True, "typical_p": 0.9}, {"sampling": "model"}, "sets typical_p to 0.9"),
     ({"do_sample": True, "top_k": "x"}, {"sampling": "model"}, "target: top_k is 'x'"),
     ({"do_sample": True, "top_p": 7.0}, {"sampling": "model"}, "target: top_p is 7")],
)  # fmt: skip
def test_sampling_that_cannot_be_is_refused_in_one_line(says, options, message, folder):
    with pytest.raises(UserError, match=message):
        specexp.load(folder(**says), "ngram", **options)


def test_min_p_is_that_of_transformers():
    logits = torch.randn(5, 40, generator=torch.manual_seed(0))
    theirs = MinPLogitsWarper(min_p=0.2)(None, logits / 0.8).softmax(-1)
    assert torch.allclose(Sampling(0.8, min_p=0.2).law(logits), theirs, atol=1e-6)
    for value in (-0.1, 1.5, math.nan):
        with pytest.raises(UserError, match="min_p"):
            Sampling(1.0, min_p=value)


def test_a_target_in_memory_follows_its_own_generation_config(tiny_folders):
    module = AutoModelForCausalLM.from_pretrained(tiny_folders[0])
    module.generation_config = GenerationConfig(eos_token_id=3, repetition_penalty=1.5)
    pair = specexp.load(module, "ngram", tokenizer=specexp.load(tiny_folders[0], "ngram").tokenizer)
    ids = torch.tensor(pair.encode(["def mean"]))
    theirs = module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12)
    assert pair.generate("def mean", 12).tokens == theirs[:, ids.shape[1] :].tolist()
