"""Heads on disk, in every published layout, and what drafting with them must propose."""

import copy
import dataclasses
import fnmatch
import functools
import itertools
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_llama, tiny_tokenizer
from safetensors.torch import save_file
from support.norms import DEFAULTS, with_norms
from support.tiny import PROMPTS, Alphabet, V, engine, heads, module
from tokenizers.processors import TemplateProcessing

from specexp.drafters.crossed import Crossed, TokenMap
from specexp.drafters.eagle import EagleLayer
from specexp.drafters.early_exit import EarlyExit
from specexp.drafters.medusa import MedusaHeads
from specexp.drafters.planted import Planted
from specexp.errors import UserError
from specexp.models import head_files
from specexp.models.heads import Eagle, check, default_taps, load, medusa_size, save
from specexp.models.load import of_module
from specexp.sampling import Sampling
from specexp.sequences import Sequences
from specexp.tree import Tree
from specexp.zoo.heads import accuracy, laws_of, loss_of, make, train_heads
from specexp.zoo.recipes import HEADS, Course, Phase
from specexp.zoo.rows import Rows
from specexp.zoo.train import fit

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
    config = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0", "draft_vocab_size": DRAFT_V,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2], "transformer_layer_config": LAYER,
        "speculators_config": {"algorithm": "eagle3"},
    }  # fmt: skip
    on = {"speculators": (), "speculators, today's": DEFAULTS}.get(layout, (layout,))
    return config | {name: name in on for name in head_files.NORMS}, eagle3_tensors("layers.0", on)


LAYOUTS = [
    "medusa", "medusa, prefixed", "eagle-1", "eagle-1 with bias", "eagle-3", "speculators",
    "speculators, today's",
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
def test_published_heads_are_read_bit_for_bit_and_generate(tmp_path, layout, file):
    config, held = published(layout)
    head = head_files.read(put(tmp_path / "head", config, held, file))
    kind = layout.split(",")[0].split(" ")[0].replace("-", "").replace("eagle1", "eagle")
    assert head.kind == {"speculators": "eagle3"}.get(kind, kind)
    target = module("llama", torch.float64)
    check(head, target.config, "target", head.kind)
    made = load(head, target)
    given = {name.removeprefix("medusa_head.").replace("layers.0.", "midlayer.")
             if head.kind == "eagle3" else name.removeprefix("medusa_head."): t
             for name, t in held.items()}  # fmt: skip
    for name, tensor in made.state_dict().items():
        assert torch.equal(tensor, given[name].to(tensor.dtype)), name
    if "eagle-1" in layout:
        assert torch.equal(made.borrowed[0].weight, given["embed_tokens.weight"].double())
    law = Sampling()
    lm = of_module(target, "target")
    pairing = engine("null", Tree.chain(3))
    pairing.drafter = (MedusaHeads if head.kind == "medusa" else EagleLayer)(made, lm, law)
    pairing.target = lm
    assert pairing.generate(PROMPTS, 12).tokens == engine("null").generate(PROMPTS, 12).tokens


def test_a_head_of_the_full_vocabulary_needs_no_map(tmp_path):
    config, held = published("eagle-3")
    held = {n: t for n, t in held.items() if n not in ("d2t", "t2d")}
    held["lm_head.weight"] = torch.randn(V, E)
    head = head_files.read(put(tmp_path / "head", config | {"draft_vocab_size": V}, held))
    check(head, module().config, "target", "eagle3")
    assert load(head, module()).draft_ids.tolist() == list(range(V))


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x / (x.pow(2).mean() + LAYER["rms_norm_eps"]).sqrt()


@pytest.mark.parametrize("on", ["speculators", *head_files.NORMS, "speculators, today's"])
def test_the_eagle3_layer_is_the_one_worked_out_by_hand(tmp_path, on):
    """Two places that each see only themselves: whatever the positions, what attention reads is
    the place's own value."""
    config, held = published(on)
    head = head_files.read(put(tmp_path / "head", config, held))
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


TAPS = {
    "speculators": ({"eagle_aux_hidden_state_layer_ids": [1, 5, 9]}, (1, 5, 9)),
    "out of order": ({"eagle_aux_hidden_state_layer_ids": [9, 2, 6]}, (2, 6, 9)),
    "layers": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [8, 1, 5]}}, (2, 6, 9)),
    "states": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 6, 9]}}, (2, 6, 9)),
    "none listed": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, ()),
    "nothing said": ({"eagle_config": None}, ()),
}


@pytest.mark.parametrize(("said", "taps"), TAPS.values(), ids=TAPS)
def test_taps_are_counted_as_transformers_counts_states(tmp_path, said, taps):
    config, held = published("eagle-3")
    head = head_files.read(put(tmp_path / "head", config | said, held))
    assert head.taps == taps
    deep = copy.copy(module())
    deep.config = copy.copy(deep.config)
    deep.config.num_hidden_layers = 12
    check(head, deep.config, "target", "eagle3")
    assert load(head, deep).shape.taps == (taps or default_taps(12))


def test_default_taps_are_in_the_order_of_the_layers():
    assert [default_taps(L) for L in (12, 4, 2)] == [(2, 6, 9), (1, 2, 2), (1, 1, 2)]


def test_norms_may_be_named_in_the_eagle_config(tmp_path):
    config, _ = published("eagle-3")
    said = {"eagle_config": {"norm_before_fc": True}}
    held = eagle3_tensors("midlayer", ("norm_before_fc",))
    head = head_files.read(put(tmp_path / "head", config | said, held))
    check(head, module().config, "target", "eagle3")
    assert load(head, module()).shape.norms == ("norm_before_fc",)


@pytest.mark.parametrize("on", [DEFAULTS, ("fc_norm",)], ids="+".join)
def test_norms_are_saved_with_the_heads(tmp_path, on):
    made = with_norms(*on)
    save(tmp_path, made, "target")
    head = head_files.read(tmp_path)
    check(head, module().config, "target", "eagle3")
    again = load(head, module("llama", torch.float32))
    assert again.shape.norms == on
    assert again.state_dict().keys() == made.state_dict().keys()
    for name, tensor in made.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_of_several_files_on_the_hub_only_the_one_that_is_read_is_fetched(tmp_path, monkeypatch):
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

    monkeypatch.setattr(head_files, "snapshot_download", download)
    for number, best in enumerate(("model.safetensors", "heads.pt", "pytorch_model.bin")):
        here = tmp_path / f"cache {number}"
        here.mkdir()
        assert head_files.read("org/heads").file == here / best
        assert {file.name for file in here.iterdir()} == {"config.json", best}
        (hub / best).unlink()
    here = tmp_path / "empty"
    here.mkdir()
    with pytest.raises(UserError, match="has no weights"):
        head_files.read("org/heads")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_is_read_back_the_same(tmp_path, kind):
    target, made = module(), heads(kind)
    save(tmp_path, made, "target")
    head = head_files.read(tmp_path)
    check(head, target.config, "target", kind)
    again = load(head, target)
    for name, tensor in made.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    if kind == "medusa":
        assert medusa_size(head) == (4, 1)
    else:
        assert again.shape.taps == made.shape.taps
        assert again.config.to_dict() == made.config.to_dict()


def test_eagle3_is_saved_for_vllm(tmp_path):
    save(tmp_path, heads("eagle3"), "org/target", ["Qwen3ForCausalLM"])
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "eagle3"
    verifier = {"name_or_path": "org/target", "architectures": ["Qwen3ForCausalLM"]}
    assert config["speculators_config"]["verifier"] == verifier
    assert not any(config[name] for name in head_files.NORMS)
    assert config["transformer_layer_config"]["vocab_size"] == V
    with head_files.safe_open(tmp_path / "model.safetensors", "pt") as held:
        names = set(held.keys())
        t2d, d2t = held.get_tensor("t2d"), held.get_tensor("d2t")
    assert "layers.0.hidden_norm.weight" in names
    assert t2d.nonzero()[:, 0].tolist() == (torch.arange(len(d2t)) + d2t).tolist()


@pytest.mark.speculators
@torch.no_grad()
@pytest.mark.parametrize("on", [(), DEFAULTS, ("fc_norm",)], ids="+".join)
def test_the_package_of_the_speculators_format_says_what_we_say(tmp_path, on):
    """Its own class takes every tensor, and its layer makes the same logits."""
    from speculators import SpeculatorModelConfig
    from speculators.models.eagle3.core import Eagle3DraftModel

    ours = with_norms(*on)
    save(tmp_path, ours, "target")
    config = SpeculatorModelConfig.from_pretrained(str(tmp_path))
    assert tuple(config.eagle_aux_hidden_state_layer_ids) == ours.shape.taps
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = Eagle3DraftModel(config)
    with head_files.safe_open(tmp_path / "model.safetensors", "pt") as held:
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
    "another kind": (bad("eagle-3"), ("medusa",), "takes medusa"),
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
        "lacks the last matrix of every head",
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
        )
    },
    "a norm without its tensor": (
        bad("speculators", config={"norm_before_fc": True}), ("eagle3",), "lacks input_norm.weight",
    ),
    "a norm that nothing names": (
        bad("speculators", shapes={"fc_norm.0.weight": (E,)}), ("eagle3",),
        "has unknown fc_norm.0.weight",
    ),
    "EAGLE-1 with norms": (
        bad("eagle-1", config={"norm_output": True}), ("eagle",), "with norm_output",
    ),
    "taps that are words": (
        bad("eagle-3", config={"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["low"]}}),
        ("eagle3",), "give numbers",
    ),
    "a layer that is not there": (
        bad("eagle-3", config={"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 2]}}),
        ("eagle3",), "reading layer 3, and target has 2 layers",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("files", "kinds", "said"), BAD.values(), ids=BAD)
def test_heads_that_do_not_fit_are_refused_in_one_line(tmp_path, files, kinds, said):
    with pytest.raises(UserError) as refused:
        check(head_files.read(put(tmp_path / "head", *files)), module().config, "target", *kinds)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


class Hostile:
    def __reduce__(self):
        return print, ("never",)


def test_files_that_are_no_heads_are_refused(tmp_path, capsys):
    config, held = published("medusa")
    cases = {"none of Medusa": put(tmp_path / "a", config, {"x": torch.zeros(2)})}
    cases["several weight files"] = put(
        put(tmp_path / "b", config, held).parent / "b", config, held, "2.safetensors"
    )
    for name in ("c", "old c"):
        cases[f"{name[:-1]}heads.pt is a pickle"] = put(
            tmp_path / name, config, {"x": Hostile()}, f"{name[:-1]}heads.pt"
        )
    (tmp_path / "d").mkdir()
    cases["no config.json"] = tmp_path / "d"
    cases["no weights"] = put(tmp_path / "e", config, held)
    (tmp_path / "e" / "model.safetensors").unlink()
    cases["cannot read model.safetensors"] = put(tmp_path / "f", config, held)
    (tmp_path / "f" / "model.safetensors").write_bytes(b"torn")
    for said, folder in cases.items():
        with pytest.raises(UserError, match=said):
            head_files.read(folder)
    assert "never" not in capsys.readouterr().out
    (tmp_path / "f" / "config.json").write_text("[]")
    with pytest.raises(UserError, match="holds no settings"):
        head_files.read(tmp_path / "f")
    config3, held3 = published("eagle-3")
    held3["d2t"][0] = 99
    with pytest.raises(UserError, match="d2t names tokens outside"):
        load(head_files.read(put(tmp_path / "h", config3, held3)), module())
    held["0.1.weight"][0, 0] = float("nan")
    head = head_files.read(put(tmp_path / "g", config, held))
    with pytest.raises(UserError, match=r"0.1.weight holds NaN"):
        load(head, module())


# What is proposed, against the definition computed without any cache -----------------------------


@torch.no_grad()
def states(text: list[int], taps) -> torch.Tensor:
    """[len(text) - 1, taps*E]: the target's states over all but the last token."""
    out = module()(torch.tensor([text[:-1]]), use_cache=False, output_hidden_states=True)
    return torch.cat([out.hidden_states[t][0] for t in taps], -1)


def causal(n: int) -> torch.Tensor:
    return torch.full((n, n), -1e300, dtype=torch.float64).triu(1)[None, None]


@torch.no_grad()
def eagle_law(net, text: list[int], path: list[int]) -> torch.Tensor:
    """Log-probabilities [V] after a path of guesses, by running the layer over the whole chain of
    pairs again for every guess."""
    features = net.fuse(states(text, net.shape.taps))
    tokens = torch.tensor(text[1:])
    for ahead in range(len(path) + 1):
        n = len(tokens)
        made = net.features(
            tokens[None], features[None], torch.arange(n)[None], attention_mask=causal(n)
        )
        features = torch.cat([features, made[0, -1:]])
        tokens = torch.cat([tokens, torch.tensor(path[ahead : ahead + 1])])
    said = net.draft_logits(made[0, -1]).log_softmax(-1)
    ids = net.draft_ids if net.shape.fused else torch.arange(V)
    return torch.full((V,), -torch.inf, dtype=said.dtype).index_copy(0, ids, said)


def eagle_says(net, text: list[int], count: int) -> list[int]:
    guesses: list[int] = []
    for _ in range(count):
        guesses.append(int(eagle_law(net, text, guesses).argmax()))
    return guesses


@torch.no_grad()
def medusa_says(net, text: list[int], count: int) -> list[int]:
    return net(states(text, (2,))[-1]).argmax(-1).tolist()[:count]


@pytest.mark.parametrize("kind", KINDS)
def test_every_guess_of_every_round_is_the_one_defined(kind):
    """Ragged rows, accepted runs of every length; some guesses are accepted by luck alone, so the
    text is steered: what the drafter proposes is accepted as often as the toss of a coin says."""
    made = engine(kind, Tree.chain(3), "match", temperature=3.0, seed=2)
    made.drafter.sampling = Sampling()
    says = medusa_says if kind == "medusa" else eagle_says
    net = made.drafter.heads if kind == "medusa" else made.drafter.net
    prompts = [p for p in PROMPTS if len(p) > 1]
    seqs = Sequences.of(prompts, 30, slack=4)
    made.begin(seqs)
    kept = set()
    for _ in range(12):
        texts = [row[:n] for row, n in zip(seqs.tokens.tolist(), seqs.length.tolist(), strict=True)]
        report = made.round(seqs, Tree.chain(3))
        kept |= set(report[:, 0].tolist())
        for text, row in zip(texts, report.tolist(), strict=True):
            if row[1]:
                assert row[-3:] == says(net, text, 3)
    assert len(kept) >= 2, "an accepted guess and a rejected one, or caches were not exercised"


@torch.no_grad()
def law_after(kind: str, drafter, text: list[int], path: list[int]) -> torch.Tensor:
    """Log-probabilities [V] of the drafter after a path, without any cache."""
    if kind == "medusa":
        return drafter.heads(states(text, (2,))[-1])[len(path)].log_softmax(-1)
    if kind.startswith("eagle"):
        return eagle_law(drafter.net, text, path)
    net = drafter.lm.module
    return net(torch.tensor([text + path]), use_cache=False).logits[0, -1].log_softmax(-1)


def likeliest(says, guesses: int, depth: int, width: int) -> set[tuple[int, ...]]:
    """EAGLE-2's tree by the book: beams of `width`, then the likeliest of all that came up."""
    beams, found = [((), 0.0)], []
    for _ in range(depth):
        born = []
        for path, score in beams:
            law = says(list(path))
            born += [((*path, t), score + float(law[t])) for t in law.topk(width).indices.tolist()]
        found += born
        beams = sorted(born, key=lambda scored: -scored[1])[:width]
    return {path for path, _ in sorted(found, key=lambda scored: -scored[1])[:guesses]}


@pytest.mark.parametrize("shape", [(9, 3), (5, 4), (12, 2)], ids=str)
@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3", "early_exit", "model"])
def test_a_grown_tree_is_that_of_the_book_in_every_row_and_round(kind, shape):
    tree = Tree.grown(*shape)
    made = engine(kind, tree)
    prompts = [p for p in PROMPTS if len(p) > 1]
    seqs = Sequences.of(prompts, 20, slack=tree.room)
    made.begin(seqs)
    drafts = []
    propose = made.drafter.propose
    made.drafter.propose = lambda *given: drafts.append(propose(*given)) or drafts[-1]
    for _ in range(3):
        texts = [row[:n] for row, n in zip(seqs.tokens.tolist(), seqs.length.tolist(), strict=True)]
        made.round(seqs, tree)
        nodes, tokens = drafts[-1].nodes, drafts[-1].tokens
        for row, text in enumerate(texts):
            ways = [nodes.ancestors[row, i].nonzero()[1:, 0] for i in range(1, len(tree))]
            paths = [tuple(tokens[row, way].tolist()) for way in ways]
            says = functools.partial(law_after, kind, made.drafter, text)
            assert set(paths) == likeliest(says, *shape, tree.width)


def test_the_draft_of_all_layers_is_the_target_itself():
    for temperature in (0.0, 0.9):
        made = engine("null", Tree.chain(4), "reject", temperature=temperature)
        made.drafter = EarlyExit(made.target, 2, made.sampling)
        for step in made.generate(PROMPTS, 20).trace.steps():
            assert step.accepted == step.drafted == 4


def test_cross_entropy_of_the_heads_own_law_is_least():
    """`loss_of` is least where the heads say what the target says."""
    law = torch.rand(2, 5, 7).softmax(-1)

    def says(logits):
        return lambda batch: iter([(logits, law)])

    right = loss_of(says(law.log()), "cpu")(torch.zeros(1))
    wrong = loss_of(says(law.log() + torch.randn(2, 5, 7)), "cpu")(torch.zeros(1))
    assert right < wrong
    assert float(right) == pytest.approx(float(-(law * law.log()).sum(-1).mean()), abs=1e-3)
    assert accuracy(says(law.log()), torch.zeros(1), "cpu") == [1.0]


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_training_asks_what_drafting_asks_and_answers_what_the_target_does(kind):
    """Guess `number` of a chain that leaves the text anywhere: what is said of it, and its law."""
    net, target = heads(kind), module()
    drawn = torch.randint(0, V, (1, 14), generator=torch.Generator().manual_seed(1))
    text, drafter = drawn[0].tolist(), SimpleNamespace(heads=net, net=net)
    ids = net.draft_ids if kind == "eagle3" else torch.arange(V)
    for number, (logits, law) in enumerate(laws_of(net, target, 3)(drawn)):
        for known in (2, 6, 10):
            here, whole = known - 2, known + number
            said = law_after(kind, drafter, text[:known], text[known:whole])[ids]
            right = target(drawn[:, :whole], use_cache=False).logits[0, -1].softmax(-1)[ids]
            assert torch.allclose(logits[0, here].log_softmax(-1), said, atol=1e-9), (known, number)
            assert torch.allclose(law[0, here].double(), right, atol=1e-6), (known, number)


def test_planted_guesses_are_right_as_often_as_dialled():
    for temperature in (0.0, 1.0):
        for alpha in (0.0, 0.6, 1.0):
            made = engine("model", Tree.chain(4), "match", temperature=temperature)
            made.drafter = Planted(alpha, made.target, made.drafter, made.sampling, made.seed, 4)
            trace = made.generate(PROMPTS * 12, 40).trace
            tried = [(s.accepted, s.drafted) for s in trace.steps()]
            flips = sum(min(a + 1, d) for a, d in tried)
            rate = sum(a for a, _ in tried) / flips
            assert rate == pytest.approx(
                alpha, abs=5 * (0.25 / flips) ** 0.5 if alpha == 0.6 else 0
            )
            assert made.generate(PROMPTS, 20).tokens == made.plain().generate(PROMPTS, 20).tokens


def test_a_draft_that_spells_every_token_alike_is_accepted_whole():
    """The same network with its vocabulary shifted: only a broken translation could differ."""
    shifted = copy.deepcopy(module())
    for weight in (shifted.model.embed_tokens.weight, shifted.lm_head.weight):
        weight.data = weight.data.roll(5, 0)
    whole = Alphabet(5)
    whole.get_vocab = lambda: {chr(65 + i): (i + 5) % V for i in range(V)}
    for temperature in (0.0, 0.9):
        made = engine("null", Tree.chain(3), "reject", temperature=temperature)
        draft = of_module(shifted, "shifted")
        made.drafter = Crossed(draft, TokenMap(Alphabet(0), whole, V), made.sampling)
        for step in made.generate(PROMPTS, 24).trace.steps():
            assert step.accepted == step.drafted == 3


def test_a_token_the_draft_lacks_is_respelt_and_never_guessed():
    made = engine("crossed", Tree.chain(3), "reject", temperature=1.5)
    trace = made.generate(PROMPTS * 4, 40).trace
    guesses = [g for s in trace.steps() for g in s.guesses]
    assert max(guesses) < V - 6
    assert any(t >= V - 6 for row in made.generate(PROMPTS * 4, 40).tokens for t in row)
    text = made.drafter.texts
    for row in range(3):
        told = made.drafter.token_map.tokenized_prompt(PROMPTS[row])
        assert text.tokens[row, : len(told)].tolist() == told


@pytest.mark.parametrize("kind", KINDS)
def test_losses_of_a_tiny_head_fall(tmp_path, kind):
    target = tiny_llama(0).eval().requires_grad_(False)
    drawn = np.random.default_rng(0).integers(1, V, 5000)
    head = make(HEADS[kind].quick(), target, torch.from_numpy(np.bincount(drawn, minlength=V)))
    loss = loss_of(laws_of(head, target, 3), "cpu")
    course = Course((Phase(40, 4, 32),))
    losses = fit(kind, course, Rows({"noise": [drawn]}), tmp_path, head, loss, compiled=False)
    assert np.mean(losses[-5:]) < np.mean(losses[:5])


def test_heads_are_trained_for_a_target_that_is_not_of_the_zoo(tmp_path):
    """The whole of training, and what it leaves."""
    tokenizer = tiny_tokenizer("def mean(values): return sum(values) / len(values)\n" * 3)
    folder = tmp_path / "mine"
    tiny_llama(0, 3, vocab=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    text = tmp_path / "text.txt"
    text.write_text("def mean(values): return sum(values) / len(values)\n" * 400)
    for kind in KINDS:
        seen = {}
        made = train_heads(
            kind, folder, tmp_path / "out", tmp_path / "work", quick=True, text=text,
            watch=lambda step, figures, seen=seen: seen.update({step: figures}),
        )  # fmt: skip
        facts = json.loads((made / "zoo.json").read_text())
        assert facts["role"] == kind
        assert facts["target"] == "mine"
        card = (made / "README.md").read_text()
        assert f"zoo train --heads {kind} --target mine --text text.txt`" in card
        assert "Check the licences of the target and the text" in card
        assert "license: mit" not in card
        assert {"training/loss", "accuracy/at_1"} <= set(seen[max(seen)])
        check(
            head_files.read(made), module().config.__class__.from_pretrained(folder), "mine", kind
        )
    with pytest.raises(UserError, match="heads 'hydra' are unknown"):
        train_heads("hydra", folder)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_layer_goes_on_past_the_length_that_its_file_names(kind, dtype):
    whole = heads(kind, dtype)
    short = Eagle(dataclasses.replace(whole.shape, context=8), *whole.borrowed)
    short.load_state_dict(whole.state_dict())
    texts = []
    for net in (whole, short.to(dtype)):
        made = engine("null", Tree.chain(3), dtype=dtype)
        made.drafter = EagleLayer(net, made.target, made.sampling)
        texts.append([r.steps for r in made.generate(PROMPTS, 24).trace.rounds])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_prompt_of_one_token_is_drafted_for_whatever_lies_behind_and_beside_it(kind):
    guesses = []
    for left, others in ((3, []), (9, []), (0, [[1, 2, 3]])):
        made = engine(kind, Tree.chain(3))
        seqs = Sequences.of([[5], *others], 8, slack=4)
        seqs.tokens[0, 1:] = left
        seqs = made.begin(seqs)
        guesses.append(made.drafter.propose(seqs, Tree.chain(3), made.rng).tokens[0].tolist())
    assert guesses[0] == guesses[1] == guesses[2]


@torch.inference_mode()
def test_a_prompt_that_is_read_in_parts_is_told_once_and_read_from_its_beginning():
    """Every letter of it takes the draft two pieces."""
    prompt = [26 + i % 6 for i in range(24)]
    texts, caches = [], []
    for parts in ([23], [4, 9, 23]):
        made = engine("crossed", Tree.chain(3))
        made.allocate(1, 64)
        seqs = Sequences.of([prompt], 8, slack=4)
        made.drafter.most = 4  # as after rounds of others
        made.drafter.prefill(seqs, None)
        for start, stop in itertools.pairwise([0, *parts]):
            part = dataclasses.replace(seqs, length=torch.tensor([stop + 1]))
            made.drafter.catch_up(part, stop - start)
        made.drafter.propose(seqs, Tree.chain(3), made.rng)
        text = made.drafter.texts
        texts.append(text.tokens[0, : text.length[0]].tolist())
        caches.append(made.drafter.lm.cache.layers[0].keys[0, :, :47])
    assert texts[0] == texts[1] == [1, 2] * 24
    assert torch.allclose(*caches, atol=1e-12)


def test_a_prompt_begins_as_the_drafts_own_texts_do():
    ours, theirs = tiny_tokenizer("a mean of values"), tiny_tokenizer("values of a mean")
    theirs.add_special_tokens({"bos_token": "<s>"})
    theirs.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", theirs.bos_token_id)]
    )
    token_map = TokenMap(ours, theirs, len(ours))
    prompt = [ours.bos_token_id, *ours("a mean").input_ids]
    assert token_map.tokenized_prompt(prompt) == theirs("a mean").input_ids
    assert theirs.bos_token_id not in token_map.tokenized(prompt)


@pytest.mark.parametrize("shape", [(9, 1), (9, 3)], ids=str)
def test_every_guess_of_a_grown_tree_is_a_child_of_its_parent(shape):
    made = engine("model", tree := Tree.grown(*shape))
    seqs = made.begin(Sequences.of(PROMPTS, 8, slack=tree.room))
    nodes = made.drafter.propose(seqs, tree, made.rng).nodes
    for parents, children in zip(nodes.parents.tolist(), nodes.children.tolist(), strict=True):
        listed = {(child, up) for up, row in enumerate(children) for child in row if child >= 0}
        assert listed == set(enumerate(parents)) - {(0, 0)}
