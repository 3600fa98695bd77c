"""Layers for multi-token prediction, in checkpoints laid out as the published ones are."""

import json
import shutil

import pytest
import torch
from conftest import CONTEXT, in_turn, one_in
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Glm4MoeConfig, MellumConfig, Qwen3_5TextConfig
from transformers.modeling_layers import MtpModel

import specexp
from specexp.drafters import mtp
from specexp.errors import UserError
from specexp.measure.exactness import certify
from specexp.zoo import shelf

pytestmark = pytest.mark.mtp
SMALL = {
    "vocab_size": 4096, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
SPECULATORS = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj",
               "post_norm": "final_layernorm"}  # fmt: skip
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
QWEN = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc",
        "post_norm": "norm"}  # fmt: skip


def of_qwen(name):
    part, _, rest = name.partition(".")
    return f"mtp.{QWEN[part]}.{rest}" if part in QWEN else f"mtp.layers.0.{rest}"


def of_glm(name):
    name = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
    return f"model.layers.46.{name}"


# GLM 4.5 Air has 46 layers, and only its layer 46 is known for what it is
CONFIGS = {
    "qwen3_5": (of_qwen, lambda: Qwen3_5TextConfig(
        **SMALL, **DELTA, num_hidden_layers=2, mtp_num_hidden_layers=1,
        layer_types=["linear_attention", "full_attention"],
    )),
    "glm4_moe": (of_glm, lambda: Glm4MoeConfig(
        **SMALL, **EXPERTS, num_hidden_layers=46, first_k_dense_replace=46, n_group=1,
        topk_group=1,
    )),
}  # fmt: skip


def separate(tensors):
    """Experts as checkpoints have them: a tensor each."""
    for name, tensor in tensors.items():
        if ".experts.gate_up_proj" in name:
            for number, expert in enumerate(tensor):
                for part, half in zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True):
                    yield name.replace("gate_up_proj", f"{number}.{part}.weight"), half.clone()
        elif ".experts.down_proj" in name:
            for number, expert in enumerate(tensor):
                yield name.replace("down_proj", f"{number}.down_proj.weight"), expert.clone()
        else:
            yield name, tensor.clone()


def change(folder, edit):
    """Edits the tensors of a folder."""
    [file] = folder.glob("*.safetensors")
    save_file(edit(load_file(file)), file, {"format": "pt"})


@pytest.fixture
def saved(tmp_path):
    """saved(family): a folder, and the tensors of its layer for multi-token prediction."""

    def call(family):
        theirs, config = CONFIGS[family]
        torch.manual_seed(0)
        target = AutoModelForCausalLM.from_config(config())
        target.save_pretrained(folder := tmp_path / family)
        for file in shelf.find("target-10m").glob("tokenizer*.json"):
            shutil.copy(file, folder)
        layer = MtpModel(mtp.named(target), 1).layers[0].state_dict()
        for tensor in layer.values():
            tensor.normal_(0, 0.3)  # experts are not initialised
        change(folder, lambda own: own | {theirs(n): t for n, t in separate(layer)})
        return folder, layer

    return call


def load(folder, drafter="mtp", **options):
    return specexp.load(str(folder), drafter, 3, **options)


@pytest.mark.parametrize(("family", "temperature"), in_turn(CONFIGS, (0.0, 0.8)))
def test_layer_of_a_checkpoint_drafts_and_the_output_is_the_targets(saved, family, temperature):
    folder, layer = saved(family)
    pairing = load(folder, temperature=temperature)
    read = pairing.engine.drafter.net.layer.state_dict()
    assert read.keys() == layer.keys()
    assert [n for n in layer if not torch.equal(read[n], layer[n])] == []
    checked = certify(pairing.engine, [[1, 2, 3, 4], [5, 6], [7]], 20)
    assert not checked.bugs
    assert pairing.engine.generate([[1, 2, 3]], 20).trace.acceptance.drafted > 20


def as_speculators(name):
    part, _, rest = name.partition(".")
    return "mtp_layers.0." + (f"{SPECULATORS[part]}.{rest}" if part in SPECULATORS else rest)


@pytest.mark.parametrize("family", one_in(2, CONFIGS))
def test_layer_trained_further_takes_the_place_of_the_checkpoints(saved, family, tmp_path):
    """As `speculators` saves it. The target's checkpoint lacks parts of its own."""
    folder, layer = saved(family)
    theirs, _ = CONFIGS[family]
    change(folder, lambda own: {n: t for n, t in own.items() if n not in map(theirs, layer)})
    trained = {name: torch.randn_like(tensor) / 3 for name, tensor in layer.items()}
    (heads := tmp_path / "trained").mkdir()
    (heads / "config.json").write_text(json.dumps({
        "speculators_model_type": "mtp", "num_nextn_predict_layers": 1,
        "transformer_layer_config": json.loads((folder / "config.json").read_text()),
    }))  # fmt: skip
    save_file({as_speculators(n): t for n, t in trained.items()}, heads / "model.safetensors")
    pairing = load(folder, f"mtp:{heads}")
    read = pairing.engine.drafter.net.layer.state_dict()
    assert read.keys() == trained.keys()
    assert [n for n in trained if not torch.equal(read[n], trained[n])] == []
    assert not certify(pairing.engine, [[1, 2, 3, 4], [5, 6], [7]], 20).bugs
    with pytest.raises(UserError, match=r"are mtp heads, and not dflash .*: use mtp:"):
        load(folder, f"dflash:{heads}")
    change(heads, lambda own: {n: t for n, t in own.items() if "hidden_layernorm" not in n})
    with pytest.raises(UserError, match=r"are mtp heads; the file lacks hnorm.weight"):
        load(folder, f"mtp:{heads}")
    settings = json.loads((folder / "config.json").read_text()) | {"chain_hidden_post_norm": True}
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=r"are mtp heads; the norm behind such layers .*: use mtp"):
        load(folder, f"mtp:{heads}")


def test_layer_has_the_dtype_that_was_asked_for(saved):
    folder, _ = saved("qwen3_5")
    pairing = load(folder, dtype="bfloat16")
    assert pairing.engine.drafter.net.dtype == pairing.engine.target.dtype == torch.bfloat16
    assert len(pairing.engine.generate([[1, 2, 3]], 8).tokens[0]) == 8


def test_layer_of_eight_bit_weights_stays_as_it_is(saved):
    folder, layer = saved("qwen3_5")
    pairing = load(f"{folder}+int8")
    assert not certify(pairing.engine, [[1, 2, 3, 4]], 12).bugs
    read = pairing.engine.drafter.net.layer.state_dict()
    assert torch.equal(read["eh_proj.weight"], layer["eh_proj.weight"])


def test_of_several_layers_the_first_is_kept():
    target = AutoModelForCausalLM.from_config(CONFIGS["qwen3_5"][1]())
    target.config.mtp_num_hidden_layers = 3
    model = MtpModel(mtp.named(target), 3)
    first = model.layers[0]
    net = mtp.Mtp(model, (2,))
    assert [*net.borrowed[0].layers] == [net.layer] == [first]
    assert net.config.num_hidden_layers == 1


def test_layer_that_only_the_weights_tell_of_drafts(saved):
    """As of Qwen 3 Next, whose config counts no such layers."""
    folder, layer = saved("qwen3_5")
    config = json.loads((folder / "config.json").read_text())
    counts = [name for name in mtp.COUNTS if config.pop(name, None)]
    (folder / "config.json").write_text(json.dumps(config))
    assert counts == ["mtp_num_hidden_layers"]
    read = load(folder).engine.drafter.net.layer.state_dict()
    assert [n for n in layer if not torch.equal(read[n], layer[n])] == []
    change(folder, lambda own: {n: t for n, t in own.items() if not n.startswith("mtp.")})
    with pytest.raises(UserError, match="has no layer for multi-token prediction: use another dra"):
        load(folder)


def test_targets_without_such_a_layer_are_refused_before_they_are_loaded(saved):
    with pytest.raises(UserError, match="target-10m has no layer for multi-token prediction: use"):
        specexp.load("target-10m", "mtp")
    with pytest.raises(UserError, match="no zoo model is called '2'"):
        load(shelf.find("target-10m"), "mtp:2")
    folder, _ = saved("qwen3_5")
    change(folder, lambda own: {n: t for n, t in own.items() if not n.startswith("mtp.")})
    with pytest.raises(UserError, match=r"config.json names a layer .*, and the weights have none"):
        load(folder)
    with pytest.raises(UserError, match="has sliding_attention, which is not run here: use anoth"):
        mtp.check(MellumConfig(num_nextn_predict_layers=1), "mellum", "")


def test_transformers_that_cannot_load_such_a_layer_is_refused(saved, monkeypatch):
    folder, _ = saved("qwen3_5")
    monkeypatch.delattr(MtpModel, "get_mtp_weights_regex")
    with pytest.raises(UserError, match=r"need transformers 5\.20 or newer, and here is 5\."):
        load(folder)


def test_missing_tensor_of_the_layer_is_one_line(saved):
    folder, _ = saved("qwen3_5")
    change(folder, lambda own: {n: t for n, t in own.items() if n != "mtp.fc.weight"})
    with pytest.raises(UserError, match=r"cannot load the layer .*eh_proj") as refused:
        load(folder)
    assert "\n" not in str(refused.value)
