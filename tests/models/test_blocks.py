"""Block drafters (DFlash, DSpark) in every published layout, and against transformers' own."""

import dataclasses
import fnmatch
import shutil

import huggingface_hub
import pytest
import torch
from support.definitions import block_hidden, states
from support.tiny import PROMPTS, TREES, V, engine, heads, module
from test_heads import put
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from specexp.drafters.dflash import BlockDrafter
from specexp.engine import Engine
from specexp.errors import UserError
from specexp.models.heads import layouts
from specexp.models.heads.block import Block
from specexp.models.heads.weights import check, load, save
from specexp.models.load import of_module
from specexp.sampling import Sampling

E = 32
LAYERS = {
    "hidden_size": E, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "head_dim": 8, "vocab_size": V, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128, "model_type": "qwen3", "rope_theta": 5000.0,
}  # fmt: skip
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}
DRAFTS = 20  # tokens of the draft vocabulary


def tensors(rank=0, gated=False, draft_vocab=0, confidence=False, second=False):
    torch.manual_seed(5)
    shapes = {"fc": (E, 2 * E), "hidden_norm": (E,), "norm": (E,)}
    for i in range(2):
        own, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        shapes |= {
            f"{own}.q_proj": (32, E), f"{own}.k_proj": (16, E), f"{own}.v_proj": (16, E),
            f"{own}.o_proj": (E, 32), f"{own}.q_norm": (8,), f"{own}.k_norm": (8,),
            f"{mlp}.gate_proj": (64, E), f"{mlp}.up_proj": (64, E), f"{mlp}.down_proj": (E, 64),
            f"layers.{i}.input_layernorm": (E,), f"layers.{i}.post_attention_layernorm": (E,),
        }  # fmt: skip
    if rank and not second:
        shapes |= {
            "markov_head.markov_w1": (V, rank), "markov_head.markov_w2": (draft_vocab or V, rank),
        }  # fmt: skip
    if gated:
        shapes["markov_head.gate_proj"] = (rank, E + rank)
    if confidence:
        shapes["confidence_head.proj"] = (1, E + rank)
    if draft_vocab:
        shapes |= {"lm_head": (draft_vocab, E), "embed_tokens": (V, E)}
    held = {f"{name}.weight": torch.randn(shape) / 3 for name, shape in shapes.items()}
    if gated:
        held["markov_head.gate_proj.bias"] = torch.randn(rank)
    if draft_vocab:
        ids = torch.arange(draft_vocab) + torch.arange(draft_vocab) // 2
        held |= {"d2t": ids - torch.arange(draft_vocab), "t2d": torch.zeros(V, dtype=torch.bool)}
    if second:
        selector = "candidate_selector"
        names = {f"{selector}.{side}_codebook": (V, rank) for side in ("predecessor", "successor")}
        names[f"{selector}.hidden_projection.weight"] = (rank, E)
        for conv in (f"layers.{i}.{part}_conv" for i in range(2) for part in ("attention", "mlp")):
            names |= {f"{conv}.base_kernel": (2, 2, E),
                      f"{conv}.kernel_projection.weight": (2 * 2 * 8, E)}  # fmt: skip
        held |= {name: torch.randn(shape) / 3 for name, shape in names.items()}
    return held


def muse(held):
    ours = {
        "fc.weight": "encoder.fc.weight",
        "hidden_norm.weight": "encoder.output_norm_enc.weight",
    }
    return {ours.get(name, name): tensor for name, tensor in held.items()}


SPECULATORS = {
    "architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash", "block_size": 8,
    "transformer_layer_config": LAYERS, "draft_vocab_size": DRAFTS, "mask_token_id": 3,
    "aux_hidden_state_layer_ids": [1, 2],
}  # fmt: skip
MARKOV = {"markov_rank": 4, "mask_token_id": 3, "block_size": 7, "enable_confidence_head": True}
SECOND = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 3, "selector_top_k": 6}
NESTED = {"mask_token_id": 3, "target_layer_ids": [0, 1]}
LAYOUTS = {
    "DFlash": (
        LAYERS | {"block_size": 16, "dflash_config": NESTED}, tensors(),
        {"kind": "dflash", "deepest": 15, "spans": ((0, False),) * 2},
    ),
    "DFlash with windows": (
        LAYERS | SLIDING | {"dflash_config": NESTED | {"block_size": 16}}, tensors(),
        {"deepest": 15, "spans": ((9, True), (0, False))},
    ),
    "windows everywhere, both ways": (
        LAYERS | {"block_size": 16, "dflash_config": NESTED | {
            "use_swa": True, "swa_window_size": 5, "causal": False,
        }}, tensors(), {"spans": ((5, False),) * 2},
    ),
    "causal": (
        LAYERS | {"block_size": 16, "is_causal": True, "dflash_config": NESTED}, tensors(),
        {"spans": ((0, True),) * 2},
    ),
    "Gemma's": (
        LAYERS | {"block_size": 16, "final_logit_softcapping": 30.0, "dflash_config": NESTED | {
            "input_embedding_scale": 2.0, "output_multiplier": 0.5,
        }}, tensors(), {"cap": 30.0, "embeds_by": 2.0, "scale": 0.5},
    ),
    "Muse's": (
        LAYERS | SLIDING | {"block_size": 16, "is_causal": False} | NESTED, muse(tensors()),
        {"spans": ((9, False), (0, False))},
    ),
    "speculators": (
        SPECULATORS | {"sliding_window_non_causal": False}, tensors(draft_vocab=DRAFTS),
        {"deepest": 7, "draft_vocab": DRAFTS, "spans": ((0, False),) * 2},
    ),
    "speculators, windows both ways": (
        SPECULATORS | {
            "transformer_layer_config": LAYERS | SLIDING, "sliding_window_non_causal": True,
        }, tensors(draft_vocab=DRAFTS), {"spans": ((9, False), (0, False))},
    ),
    "DFlash 2": (
        LAYERS | {"block_size": 8, "dflash_config": NESTED | SECOND}, tensors(3, second=True),
        {"kind": "dflash2", "deepest": 7, "kernel": 2, "group": 4, "rank": 3, "candidates": 6},
    ),
    "DFlash 2 in speculators": (
        SPECULATORS | SECOND | {"speculators_model_type": "dflash2", "draft_vocab_size": V},
        tensors(3, second=True), {"kind": "dflash2", "draft_vocab": 0, "candidates": 6},
    ),
    "DSpark": (
        LAYERS | MARKOV | {"target_layer_ids": [0, 1]}, tensors(4, confidence=True),
        {"kind": "dspark", "deepest": 7, "from_root": True, "rank": 4, "gated": False},
    ),
    "DSpark of ModelOpt": (
        LAYERS | {"block_size": 7, "dflash_config": NESTED | {
            "projector_type": "dspark", "shift_label": True, "markov_rank": 4,
            "markov_head_type": "gated", "use_confidence_head": True,
        }},
        {n.removeprefix("markov_head.").replace("confidence_head.proj", "confidence_proj"): t
         for n, t in tensors(4, True, confidence=True).items()},
        {"kind": "dspark", "deepest": 7, "from_root": True, "rank": 4, "gated": True},
    ),
    "DSpark, gated, in speculators": (
        SPECULATORS | MARKOV | {
            "speculators_model_type": "dspark", "markov_head_type": "gated",
            "sample_from_anchor": True,
        }, tensors(4, True, DRAFTS, True), {"from_root": True, "gated": True},
    ),
    "DSpark after the root": (
        SPECULATORS | MARKOV | {"speculators_model_type": "dspark"}, tensors(4, False, DRAFTS),
        {"from_root": False, "deepest": 6},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "held", "expected"), LAYOUTS.values(), ids=LAYOUTS)
def test_published_block_loads_bit_for_bit_and_generates(tmp_path, config, held, expected):
    head, target = layouts.read(put(tmp_path / "head", config, held)), module()
    check(head, target.config, "target", *layouts.BLOCKS)
    net = load(head, target)
    assert {name: getattr(net.shape, name) for name in expected} == expected
    assert (net.shape.taps, net.shape.mask) == ((1, 2), 3)
    given = muse(held)
    given |= {f"markov_head.{n}": t for n, t in held.items() if n.startswith(("markov_w", "gate"))}
    for name, tensor in muse(net.state_dict()).items():
        assert torch.equal(tensor, given[name].to(tensor.dtype)), name
    lm = of_module(target, "target")
    drafter = BlockDrafter(net, lm, Sampling())
    pairing = Engine.of(engine("null", TREES["chain"]), target=lm, drafter=drafter)
    assert pairing.generate(PROMPTS, 12).tokens == engine("null").generate(PROMPTS, 12).tokens


@torch.no_grad()
def test_states_are_those_of_transformers_own_block(tmp_path):
    config, held, _ = LAYOUTS["Muse's"]
    net = load(layouts.read(put(tmp_path / "head", config, held)), module())
    net.shape = dataclasses.replace(net.shape, spans=((0, False),) * 2)
    theirs = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(
        **LAYERS | {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
        layer_types=["full_attention"] * 2, target_layer_ids=[0, 1], block_size=6,
    ))  # fmt: skip
    theirs.load_state_dict(muse(held))
    text = PROMPTS[1]
    block = torch.tensor([[text[-1], *[net.shape.mask] * 5]])
    out = theirs.double()(
        noise_embeds=net.borrowed[0](block), context_hidden_states=states(text, (1, 2))[None]
    )
    assert torch.allclose(out.last_hidden_state[0, 1:], block_hidden(net, text, 5), atol=1e-9)


@pytest.mark.parametrize(
    ("kind", "own"),
    [("dflash", {"draft_vocab": V - 8}),
     ("dspark", {"draft_vocab": V - 8, "rank": 4, "gated": True}),
     ("dflash2", {"rank": 4, "candidates": 5, "kernel": 3, "group": 8})],
)  # fmt: skip
def test_saved_block_is_read_as_it_was(tmp_path, kind, own):
    """In the layout of `speculators`."""
    net = heads("dflash")
    net = Block(dataclasses.replace(net.shape, kind=kind, **own), *net.borrowed).to(net.dtype)
    if net.shape.draft_vocab:
        net.d2t.fill_(3)
    save(tmp_path, net, "org/target")
    head = layouts.read(tmp_path)
    check(head, module().config, "target", kind)
    again = load(head, module())
    assert (again.shape.deepest, again.shape.spans) == (5, net.shape.spans)
    assert again.state_dict().keys() == net.state_dict().keys()
    assert all(torch.equal(t, again.state_dict()[n]) for n, t in net.state_dict().items())


def bad(layout, without=(), shapes=(), **changes):
    config, held, _ = LAYOUTS[layout]
    held = {n: t for n, t in held.items() if n not in without}
    return config | changes, held | {name: torch.zeros(1) for name in shapes}


BAD = {
    "no block": (bad("DSpark", block_size=None), "must give block_size (2 or more), mask_token_id"),
    "no mask": (bad("DFlash", dflash_config={"target_layer_ids": [0]}), "mask_token_id and targ"),
    "no layers": (bad("DSpark", target_layer_ids=[]), "and target_layer_ids"),
    "words": (bad("DSpark", target_layer_ids="all"), "config.json has all for target_layer_ids; "),
    "no such layer": (bad("DSpark", target_layer_ids=[0, 2]), "layer 3, and target has 2 layers"),
    "mask": (bad("DSpark", mask_token_id=V), f"with the mask {V}, and target embeds {V} tokens"),
    "vocabulary": (bad("DFlash", vocab_size=50), "for vocabulary 50, and target has 32"),
    "width": (bad("DFlash", hidden_size=48), "for hidden size 48, and target has 32"),
    "embeddings": (
        bad("DFlash", hidden_size=48, target_hidden_size=32), "embeddings 48, and target has 32",
    ),
    "no window": (bad("DFlash with windows", sliding_window=None), "gives no sliding_window"),
    "recurrent": (bad("DSpark", markov_head_type="rnn"), "Markov head of type rnn, which is not"),
    "values": (bad("DFlash", attention_value_scale=2), "attention_value_scale 2, which is not run"),
    "Domino": (bad("speculators", projector_type="domino"), "with a Domino projector, which is"),
    **{
        f"{name} {value}": (bad("DFlash", **{name: value}), f"with {name} {value}, which is not")
        for name, value in (
            ("use_gemma_norm", True), ("is_neox_style", False), ("rope_is_neox_style", False),
            ("use_aux_hidden_state", False),
        )
    },
    "half a rotation": (
        bad("DFlash", rope_scaling={"rope_type": "default", "rope_dim": 4}), "rope_dim 4, which",
    ),
    "no head for its vocabulary": (
        bad("speculators", without=["lm_head.weight", "d2t"]), "the file lacks lm_head.weight",
    ),
    "own embeddings": (
        (SPECULATORS, tensors(draft_vocab=DRAFTS) | {"embed_tokens.weight": torch.zeros(V, 8)}),
        f"embed_tokens.weight is ({V}, 8) where ({V}, {E}) is expected",
    ),
    "no kernel": (
        bad("DFlash 2", dflash_config=NESTED | SECOND | {"conv_kernel_size": 0}),
        "must give conv_kernel_size, conv_group_size, selector_rank, selector_top_k, all above 0",
    ),
    "odd groups": (
        bad("DFlash 2", dflash_config=NESTED | SECOND | {"conv_group_size": 5}), "no such layer",
    ),
    "unknown": (bad("DFlash", shapes=["domino.x"]), "has unknown domino.x"),
    "missing": (bad("DFlash", without=["layers.1.mlp.up_proj.weight"]), "lacks layers.1.mlp.up"),
    "no layers' width": (bad("DFlash", num_attention_heads=0), "describes no such layer"),
}  # fmt: skip


@pytest.mark.parametrize(("files", "said"), BAD.values(), ids=BAD)
def test_unfit_blocks_are_a_one_line_error(tmp_path, files, said):
    with pytest.raises(UserError) as refused:
        check(layouts.read(put(tmp_path / "h", *files)), module().config, "target", *layouts.BLOCKS)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_separate_embedding_of_the_mask_is_fetched_and_refused(tmp_path, monkeypatch):
    config, held, _ = LAYOUTS["DFlash"]
    (put(tmp_path / "h", config, held) / "mask_embedding.pt").touch()
    with pytest.raises(UserError, match=r"with a mask_embedding.pt, which is not read here"):
        check(layouts.read(tmp_path / "h"), module().config, "target", "dflash")
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download",
        lambda source, allow_patterns: copied(tmp_path / "h", tmp_path / "cache", allow_patterns),
    )  # fmt: skip
    with pytest.raises(UserError, match=r"with a mask_embedding.pt, which is not read here"):
        check(layouts.read("org/heads"), module().config, "target", "dflash")


def copied(source, folder, patterns):
    """The files of a folder that fit patterns, as a hub's cache has them."""
    folder.mkdir()
    for file in source.iterdir():
        if any(fnmatch.fnmatch(file.name, pattern) for pattern in patterns):
            shutil.copy(file, folder)
    return str(folder)
