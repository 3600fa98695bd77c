"""Heads on disk, in every published layout."""

import copy
import fnmatch
import json
import shutil

import huggingface_hub
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from support.definitions import causal
from support.norms import DEFAULTS, with_norms
from support.tiny import PROMPTS, V, engine, heads, module

from specexp.drafters.eagle import of_layers
from specexp.drafters.medusa import MedusaHeads
from specexp.engine import Engine
from specexp.errors import UserError
from specexp.models.heads import layouts
from specexp.models.heads.layouts import default_taps, medusa_size
from specexp.models.heads.weights import check, load, save
from specexp.models.load import of_module
from specexp.sampling import Sampling
from specexp.tree import Tree

KINDS = ["medusa", "eagle", "eagle3"]
E, HIDDEN, DRAFT_V = 32, 64, 20


def tensors(**shapes):
    torch.manual_seed(3)
    return {name.replace("__", "."): torch.randn(shape) / 8 for name, shape in shapes.items()}


def layer(prefix: str, reads: int) -> dict[str, tuple[int, int]]:
    return {
        f"{prefix}.self_attn.q_proj.weight": (E, reads),
        f"{prefix}.self_attn.k_proj.weight": (16, reads),
        f"{prefix}.self_attn.v_proj.weight": (16, reads),
        f"{prefix}.self_attn.o_proj.weight": (E, E),
        f"{prefix}.mlp.gate_proj.weight": (HIDDEN, E),
        f"{prefix}.mlp.up_proj.weight": (HIDDEN, E),
        f"{prefix}.mlp.down_proj.weight": (E, HIDDEN),
        f"{prefix}.post_attention_layernorm.weight": (E,),
    }


LAYER = {
    "hidden_size": E, "intermediate_size": HIDDEN, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": V, "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0, "max_position_embeddings": 128, "model_type": "llama",
}  # fmt: skip


def eagle3_tensors(prefix: str, on=()):
    norms = {f"{prefix}.input_layernorm.weight": (E,), f"{prefix}.hidden_norm.weight": (E,)}
    if "norm_before_fc" in on:
        norms["input_norm.weight"] = (3 * E,)
    if "fc_norm" in on:
        norms |= {f"fc_norm.{i}.weight": (E,) for i in range(3)}
    ends = {"fc.weight": (E, 3 * E), "norm.weight": (E,), "lm_head.weight": (DRAFT_V, E)}
    held = tensors(**layer(prefix, 2 * E), **norms, **ends)
    ids = torch.arange(DRAFT_V) + torch.arange(DRAFT_V) // 2
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[ids] = True
    return held | {"d2t": ids - torch.arange(DRAFT_V), "t2d": t2d}


def published(layout: str):
    """config and tensors exactly as on the hub, and the file they come in."""
    if layout.startswith("medusa"):
        prefix = "medusa_head." if layout == "medusa, prefixed" else ""
        shapes = {}
        for i in range(3):
            shapes |= {f"{prefix}{i}.0.linear.weight": (E, E), f"{prefix}{i}.0.linear.bias": (E,)}
            shapes[f"{prefix}{i}.1.weight"] = (V, E)
        config = {"medusa_num_heads": 3, "medusa_num_layers": 1, "model_type": "medusa",
                  "base_model_name_or_path": "target"}  # fmt: skip
        return config, tensors(**shapes)
    if layout.startswith("eagle-1"):
        shapes = layer("layers.0", E) | {"fc.weight": (E, 2 * E), "embed_tokens.weight": (V, E)}
        if "bias" in layout:
            shapes["fc.bias"] = (E,)
        return LAYER | {"architectures": ["LlamaForCausalLM"]}, tensors(**shapes)
    if layout == "eagle-3":
        config = LAYER | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_V}
        return config, eagle3_tensors("midlayer")
    if layout == "P-EAGLE":
        deeper = layer("layers.1", E) | {"layers.1.input_layernorm.weight": (E,)}
        held = eagle3_tensors("layers.0") | tensors(**deeper)
        held |= tensors(mask_hidden=(1, 1, 3 * E), embed_tokens__weight=(V, E))
        config = {
            "architectures": ["PEagleSpeculator"], "speculators_model_type": "peagle",
            "draft_vocab_size": DRAFT_V, "mask_token_id": 7,
            "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
            "transformer_layer_config": LAYER | {"num_hidden_layers": 2},
        }  # fmt: skip
        return config, held
    config = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0", "draft_vocab_size": DRAFT_V,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2], "transformer_layer_config": LAYER,
        "speculators_config": {"algorithm": "eagle3"},
    }  # fmt: skip
    on = {"speculators": (), "speculators, today's": DEFAULTS}.get(layout, (layout,))
    return config | {name: name in on for name in layouts.NORMS}, eagle3_tensors("layers.0", on)


LAYOUTS = [
    "medusa", "medusa, prefixed", "eagle-1", "eagle-1 with bias", "eagle-3", "speculators",
    "speculators, today's", "P-EAGLE",
]  # fmt: skip
FILES = {
    "safetensors": "model.safetensors",
    "pickle": "pytorch_model.bin",
    "pt": "medusa_lm_head.pt",
    "pickle of torch 1.5": "old.bin",
}


def put(folder, config, held, file="model.safetensors"):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith("safetensors"):
        save_file(held, folder / file)
    else:
        torch.save(held, folder / file, _use_new_zipfile_serialization=not file.startswith("old"))
    return folder


@pytest.mark.parametrize("file", FILES.values(), ids=FILES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_published_heads_load_bit_for_bit_and_generate(tmp_path, layout, file):
    config, held = published(layout)
    head = layouts.read(put(tmp_path / "head", config, held, file))
    kind = layout.split(",")[0].split(" ")[0].replace("-", "").replace("eagle1", "eagle").lower()
    assert head.kind == {"speculators": "eagle3"}.get(kind, kind)
    target = module("llama", torch.float64)
    check(head, target.config, "target", head.kind)
    made = load(head, target)
    given = {name.removeprefix("medusa_head.").replace("layers.0.", "midlayer.")
             if head.kind in layouts.EAGLE3 else name.removeprefix("medusa_head."): t
             for name, t in held.items()}  # fmt: skip
    for name, tensor in made.state_dict().items():
        assert torch.equal(tensor, given[name].to(tensor.dtype)), name
    if head.kind == "peagle":
        assert (made.shape.mask, len(made.deeper)) == (7, 1)
    if "eagle-1" in layout or head.kind == "peagle":
        assert torch.equal(made.borrowed[0].weight, given["embed_tokens.weight"].double())
    law = Sampling()
    lm = of_module(target, "target")
    drafter = (MedusaHeads if head.kind == "medusa" else of_layers)(made, lm, law)
    pairing = Engine.of(engine("null", Tree.chain(3)), target=lm, drafter=drafter)
    assert pairing.generate(PROMPTS, 12).tokens == engine("null").generate(PROMPTS, 12).tokens


def test_shards_of_an_index_are_read_as_one_file(tmp_path):
    """Beside what a trainer left."""
    config, held = published("eagle-3")
    folder = put(tmp_path / "head", config, held)
    (folder / "model.safetensors").unlink()
    names = sorted(held)
    shards = {"model-1-of-2.safetensors": names[::2], "model-2-of-2.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: held[name] for name in part}, folder / file)
    save_file({"old": torch.zeros(1)}, folder / "adapter.safetensors")
    (folder / "optimizer.pt").write_bytes(b"")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({
        "weight_map": {name: file for file, part in shards.items() for name in part}
    }))  # fmt: skip
    head = layouts.read(folder)
    check(head, module().config, "target", "eagle3")
    read = head.tensors()
    assert {n.replace("layers.0.", "midlayer.") for n in held} - {"t2d"} == read.keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in read.items())
    (folder / "model-2-of-2.safetensors").unlink()
    with pytest.raises(UserError, match=r"lacks model-2-of-2.safetensors, which model.saf"):
        layouts.read(folder)
    index.write_text("{}")
    with pytest.raises(UserError, match=r"cannot read model.safetensors.index.json"):
        layouts.read(folder)


def test_what_a_trainer_left_is_not_taken_for_weights(tmp_path):
    config, held = published("eagle-3")
    folder = put(tmp_path / "head", config, held, "pytorch_model.bin")
    for name in ("optimizer.pt", "training_args.bin"):
        (folder / name).write_bytes(b"")
    assert layouts.read(folder).kind == "eagle3"


def test_full_vocabulary_head_needs_no_d2t(tmp_path):
    config, held = published("eagle-3")
    held = {n: t for n, t in held.items() if n not in ("d2t", "t2d")}
    held["lm_head.weight"] = torch.randn(V, E)
    head = layouts.read(put(tmp_path / "head", config | {"draft_vocab_size": V}, held))
    check(head, module().config, "target", "eagle3")
    assert load(head, module()).draft_ids.tolist() == list(range(V))


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x / (x.pow(2).mean() + LAYER["rms_norm_eps"]).sqrt()


@pytest.mark.parametrize("on", ["speculators", *layouts.NORMS, "speculators, today's"])
def test_eagle3_layer_matches_hand_computation(tmp_path, on):
    """Two places that each see only themselves: whatever the positions, what attention reads is
    the place's own value."""
    config, held = published(on)
    head = layouts.read(put(tmp_path / "head", config, held))
    check(head, module().config, "target", "eagle3")
    net = load(head, module())
    w = {name.removeprefix("layers.0."): t.double() for name, t in held.items()}
    states, embedded = torch.randn(3, E).double() * 3, net.borrowed[0].weight[[7, 9]]

    fed = rms(states.flatten(), w["input_norm.weight"]) if config["norm_before_fc"] else states
    if config["fc_norm"]:
        fed = torch.stack([rms(state, w[f"fc_norm.{i}.weight"]) for i, state in enumerate(states)])
    feature = ours = w["fc.weight"] @ fed.flatten()
    assert torch.allclose(net.fuse(states.flatten()), feature)
    for place, token in enumerate((7, 9)):
        normed = rms(feature, w["hidden_norm.weight"])
        read = torch.cat([rms(embedded[place], w["input_layernorm.weight"]), normed])
        value = (w["self_attn.v_proj.weight"] @ read).view(2, 8).repeat_interleave(2, 0).flatten()
        residual = normed if config["norm_before_residual"] else feature
        residual = residual + w["self_attn.o_proj.weight"] @ value
        x = rms(residual, w["post_attention_layernorm.weight"])
        gated = F.silu(w["mlp.gate_proj.weight"] @ x) * (w["mlp.up_proj.weight"] @ x)
        made = residual + w["mlp.down_proj.weight"] @ gated
        feature = rms(made, w["norm.weight"]) if config["norm_output"] else made
        logits = w["lm_head.weight"] @ rms(made, w["norm.weight"])
        tokens, at = torch.tensor([[token]]), torch.tensor([[place]])
        said = net(tokens, at, torch.zeros(1, 1, 1, 1).double(), ours[None, None])
        ours = said.hidden_states[-1][0, 0]
        assert torch.allclose(ours, feature)
        assert torch.allclose(said.logits[0, 0, net.draft_ids], logits)


NAMED = layouts.TAPS
TAPS = {
    "speculators": ({NAMED: [1, 5, 9]}, (1, 5, 9)),
    "out of order": ({NAMED: [9, 2, 6]}, (2, 6, 9)),
    "layers": ({"eagle_config": {NAMED: [8, 1, 5]}}, (2, 6, 9)),
    "other layers": ({"eagle_config": {NAMED: [2, 5, 9]}}, (3, 6, 10)),
    "the last layer": ({"eagle_config": {NAMED: [1, 5, 11]}}, (2, 6, -1)),
    "the usual states": ({"eagle_config": {NAMED: [2, 6, 9]}}, (2, 6, 9)),
    "a state that is no layer": ({"eagle_config": {NAMED: [8, 10, 12]}}, (8, 10, -1)),
    "none listed": ({"eagle_config": {NAMED: []}}, (2, 6, 9)),
    "nothing said": ({"eagle_config": None}, (2, 6, 9)),
}


@pytest.mark.parametrize(("said", "taps"), TAPS.values(), ids=TAPS)
def test_taps_are_numbered_as_hidden_states(tmp_path, said, taps):
    config, held = published("eagle-3")
    head = layouts.read(put(tmp_path / "head", config | said, held))
    assert head.taps(12) == taps
    deep = copy.copy(module())
    deep.config = copy.copy(deep.config)
    deep.config.num_hidden_layers = 12
    check(head, deep.config, "target", "eagle3")
    assert load(head, deep).shape.taps == taps


def test_default_taps_are_in_layer_order_and_not_the_last_layers():
    assert [default_taps(L) for L in (12, 4, 2)] == [(2, 6, 9), (1, 2, 2), (1, 1, 1)]


def test_norms_are_read_from_eagle_config(tmp_path):
    config, _ = published("eagle-3")
    said = {"eagle_config": {"norm_before_fc": True}}
    held = eagle3_tensors("midlayer", ("norm_before_fc",))
    head = layouts.read(put(tmp_path / "head", config | said, held))
    check(head, module().config, "target", "eagle3")
    assert load(head, module()).shape.norms == ("norm_before_fc",)


@pytest.mark.parametrize("on", [DEFAULTS, ("fc_norm",)], ids="+".join)
def test_saved_heads_keep_their_norms(tmp_path, on):
    made = with_norms(*on)
    save(tmp_path, made, "target")
    head = layouts.read(tmp_path)
    check(head, module().config, "target", "eagle3")
    again = load(head, module("llama", torch.float32))
    assert again.shape.norms == on
    assert again.state_dict().keys() == made.state_dict().keys()
    for name, tensor in made.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_only_the_preferred_weight_file_is_downloaded(tmp_path, monkeypatch):
    config, held = published("medusa")
    hub = put(tmp_path / "hub", config, held)
    for other in ("pytorch_model.bin", "heads.pt"):
        put(hub, config, held, other)

    def download(source, allow_patterns):
        assert source == "org/heads"
        for file in hub.iterdir():
            if any(fnmatch.fnmatch(file.name, pattern) for pattern in allow_patterns):
                shutil.copy(file, here / file.name)
        return str(here)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for number, best in enumerate(("model.safetensors", "heads.pt", "pytorch_model.bin")):
        here = tmp_path / f"cache {number}"
        here.mkdir()
        head = layouts.read("org/heads")
        assert {file for file, _ in head.places.values()} == {here / best}
        assert {file.name for file in here.iterdir()} == {"config.json", best}
        (hub / best).unlink()
    here = tmp_path / "empty"
    here.mkdir()
    with pytest.raises(UserError, match="has no weights"):
        layouts.read("org/heads")


@pytest.mark.parametrize("kind", KINDS)
def test_saved_heads_are_read_back_equal(tmp_path, kind):
    target, made = module(), heads(kind)
    save(tmp_path, made, "target")
    head = layouts.read(tmp_path)
    check(head, target.config, "target", kind)
    again = load(head, target)
    for name, tensor in made.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    if kind == "medusa":
        assert medusa_size(head) == (4, 1)
    else:
        assert again.shape.taps == made.shape.taps
        assert again.config.to_dict() == made.config.to_dict()


def test_eagle3_is_saved_in_the_layout_of_vllm(tmp_path):
    save(tmp_path, heads("eagle3"), "org/target", ["Qwen3ForCausalLM"])
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "eagle3"
    verifier = {"name_or_path": "org/target", "architectures": ["Qwen3ForCausalLM"]}
    assert config["speculators_config"]["verifier"] == verifier
    assert not any(config[name] for name in layouts.NORMS)
    assert config["transformer_layer_config"]["vocab_size"] == V
    with layouts.safe_open(tmp_path / "model.safetensors", "pt") as held:
        names = set(held.keys())
        t2d, d2t = held.get_tensor("t2d"), held.get_tensor("d2t")
    assert "layers.0.hidden_norm.weight" in names
    assert t2d.nonzero()[:, 0].tolist() == (torch.arange(len(d2t)) + d2t).tolist()


@pytest.mark.speculators
@torch.no_grad()
@pytest.mark.parametrize("on", [(), DEFAULTS, ("fc_norm",)], ids="+".join)
def test_eagle3_logits_match_the_speculators_package(tmp_path, on):
    """Its own class takes every tensor, and its layer makes the same logits."""
    from speculators import SpeculatorModelConfig
    from speculators.models.eagle3.core import Eagle3DraftModel

    ours = with_norms(*on)
    save(tmp_path, ours, "target")
    config = SpeculatorModelConfig.from_pretrained(str(tmp_path))
    assert tuple(config.eagle_aux_hidden_state_layer_ids) == ours.shape.taps
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = Eagle3DraftModel(config)
    with layouts.safe_open(tmp_path / "model.safetensors", "pt") as held:
        tensors = {name: held.get_tensor(name) for name in held.keys()}  # noqa: SIM118
    missing, extra = theirs.load_state_dict(tensors, strict=False)
    assert not extra
    assert set(missing) == {
        "embed_tokens.weight",
        "verifier_lm_head.weight",
        "verifier_norm.weight",
    }
    theirs.embed_tokens.weight.copy_(ours.borrowed[0].weight)
    tokens, place = torch.randint(0, V, (1, 9)), torch.arange(9)[None]
    states = torch.randn(1, 9, 3 * E)
    mask = causal(9).clamp(min=torch.finfo(torch.float32).min).float()
    fed = theirs.input_norm(states) if theirs.input_norm else states
    if theirs.fc_norm:
        fed = torch.cat([n(s) for n, s in zip(theirs.fc_norm, fed.chunk(3, -1), strict=True)], -1)
    read = torch.cat([theirs.embed_tokens(tokens), theirs.fc(fed)], -1)
    made = theirs.layers[0](
        read, attention_mask=mask, position_ids=place,
        position_embeddings=theirs.rotary_emb(read, place),
    )  # fmt: skip
    said = ours.features(tokens, ours.fuse(states), place, attention_mask=mask)
    normed = theirs.norm(made)
    assert torch.allclose(normed if "norm_output" in on else made, said, atol=1e-5)
    assert torch.allclose(theirs.lm_head(normed), ours.draft_logits(said), atol=1e-5)


def bad(layout, **changes):
    config, held = published(layout)
    held = {n: t for n, t in held.items() if n not in changes.get("without", ())}
    held |= {n: torch.zeros(s) for n, s in changes.get("shapes", {}).items()}
    return config | changes.get("config", {}), held


BAD = {
    "another kind": (bad("eagle-3"), ("medusa",), "heads, and not medusa: use eagle:/"),
    "hidden size": (
        bad("eagle-3", config={"hidden_size": 48}), ("eagle3",), "48, and target has 32",
    ),
    "vocabulary": (bad("eagle-1", config={"vocab_size": 50}), ("eagle",), "50, and target has 32"),
    "medusa's vocabulary": (
        bad("medusa", shapes={f"{i}.1.weight": (40, E) for i in range(3)}), ("medusa",),
        "vocabulary 40",
    ),
    "taps": (
        bad("speculators", config={"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}), ("eagle3",),
        "reading layer 9, and target has 2 layers",
    ),
    "missing": (bad("eagle-3", without=["norm.weight"]), ("eagle3",), "lacks norm.weight"),
    "missing head": (bad("medusa", without=["1.1.weight"]), ("medusa",), "lacks 1.1.weight"),
    "no last matrices": (
        bad("medusa", without=[f"{i}.1.weight" for i in range(3)]), ("medusa",),
        "the file lacks 0.0.weight, 1.0.weight, 2.0.weight",
    ),
    "extra": (bad("eagle-3", shapes={"odd": (2,)}), ("eagle3",), "has unknown odd"),
    "shape": (bad("eagle-3", shapes={"norm.weight": (7,)}), ("eagle3",), r"(7,) where (32,)"),
    "no width": (bad("eagle-3", config={"hidden_size": None}), ("eagle3",), "for hidden_size"),
    **{
        f"{name} {value}": (
            bad("eagle-3", config={name: value}), ("eagle3",), "describes no such layer",
        )
        for name, value in (
            ("num_attention_heads", 0), ("num_attention_heads", 3), ("rms_norm_eps", "small"),
            ("rope_scaling", {"rope_type": "yarn"}), ("draft_vocab_size", -3),
            ("rope_scaling", "yarn"), ("layer_types", 3),
        )
    },
    "a norm without its tensor": (
        bad("speculators", config={"norm_before_fc": True}), ("eagle3",), "lacks input_norm.weight",
    ),
    "a norm that nothing names": (
        bad("speculators", shapes={"fc_norm.0.weight": (E,)}), ("eagle3",),
        "has unknown fc_norm.0.weight",
    ),
    "no mask": (bad("P-EAGLE", config={"mask_token_id": None}), ("peagle",), "give mask_token_id"),
    "mask": (bad("P-EAGLE", config={"mask_token_id": V}), ("peagle",), f"mask {V}, and target emb"),
    "a layer too many": (
        bad("P-EAGLE", config={"transformer_layer_config": LAYER}), ("peagle",),
        "has unknown layers.1.",
    ),
    "taps that are words": (
        bad("eagle-3", config={"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["low"]}}),
        ("eagle3",), "give numbers",
    ),
    "windows": (
        bad("eagle-3", config={"layer_types": ["sliding_attention"], "sliding_window": 9}),
        ("eagle3",), "with windows, which are not run here",
    ),
    "half a rotation": (
        bad("eagle-3", config={"rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
        }}), ("eagle3",), "with partial_rotary_factor 0.5, which is not run here",
    ),
    "scaled logits": (bad("eagle-3", config={"logit_scale": 0.5}), ("eagle3",), "logit_scale 0.5"),
    "quantised": (
        bad("eagle-3", config={"quantization_config": {"quant_method": "modelopt"}}), ("eagle3",),
        "quantised by modelopt, which are not read here",
    ),
    "embeddings": (
        bad("eagle-1", shapes={"embed_tokens.weight": (V, 8)}), ("eagle",),
        f"embed_tokens.weight is ({V}, 8) where ({V}, {E}) is expected",
    ),
    "no embeddings of their width": (
        bad("eagle-3", config={"hidden_size": 16, "target_hidden_size": E}), ("eagle3",),
        "of width 16, and the file lacks embeddings or head",
    ),
    "no head for its vocabulary": (
        bad("eagle-3", without=["lm_head.weight"]), ("eagle3",), "the file lacks lm_head.weight",
    ),
    "a head that is the embeddings": (
        bad("eagle-3", without=["lm_head.weight", "d2t"],
            config={"draft_vocab_size": None, "tie_word_embeddings": True}), ("eagle3",),
        "whose LM head is the embeddings, which is not run here",
    ),
    "a layer that is not there": (
        bad("eagle-3", config={"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}),
        ("eagle3",), "reading layer 3, and target has 2 layers",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("files", "kinds", "said"), BAD.values(), ids=BAD)
def test_unfit_heads_are_a_one_line_error(tmp_path, files, kinds, said):
    with pytest.raises(UserError) as refused:
        check(layouts.read(put(tmp_path / "head", *files)), module().config, "target", *kinds)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


class Hostile:
    def __reduce__(self):
        return print, ("never",)


def test_files_that_are_no_heads_are_a_one_line_error(tmp_path, capsys):
    config, held = published("medusa")
    cases = {"none of Medusa": put(tmp_path / "a", config, {"x": torch.zeros(2)})}
    cases["several weight files"] = put(
        put(tmp_path / "b", config, held).parent / "b", config, held, "2.safetensors"
    )
    for name in ("c", "old c"):
        cases[f"{name[:-1]}heads.pt is a pickle"] = put(
            tmp_path / name, config, {"x": Hostile()}, f"{name[:-1]}heads.pt"
        )
    cases["no config.json"] = put(tmp_path / "d", config, held)
    (tmp_path / "d" / "config.json").unlink()
    cases["no weights"] = put(tmp_path / "e", config, held)
    (tmp_path / "e" / "model.safetensors").unlink()
    cases["cannot read model.safetensors"] = put(tmp_path / "f", config, held)
    (tmp_path / "f" / "model.safetensors").write_bytes(b"torn")
    for said, folder in cases.items():
        with pytest.raises(UserError, match=said):
            layouts.read(folder)
    assert "never" not in capsys.readouterr().out
    (tmp_path / "f" / "config.json").write_text("[]")
    with pytest.raises(UserError, match="holds no settings"):
        layouts.read(tmp_path / "f")
    config3, held3 = published("eagle-3")
    held3["d2t"][0] = 99
    with pytest.raises(UserError, match="d2t names tokens outside"):
        load(layouts.read(put(tmp_path / "h", config3, held3)), module())
    held["0.1.weight"][0, 0] = float("nan")
    head = layouts.read(put(tmp_path / "g", config, held))
    with pytest.raises(UserError, match=r"0.1.weight holds NaN"):
        load(head, module())
