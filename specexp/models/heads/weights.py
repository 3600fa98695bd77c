"""Checks heads before they are loaded, loads and saves them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from specexp.errors import UserError, refusing
from specexp.models.heads import layouts
from specexp.models.heads.block import DFLASH2, Block, shape_of
from specexp.models.heads.eagle import Eagle, EagleShape, layer_config
from specexp.models.heads.layouts import BLOCKS, EAGLE3, medusa_size, states_read
from specexp.models.heads.medusa import Medusa


def check(head: layouts.Head, config: Any, target: str, *kinds: str) -> None:
    """Refuse heads of another kind, for another target, or with missing or unknown tensors.

    config: the target's. Raises UserError with both numbers, or the names of the tensors."""
    insist_on_kind(head, *kinds)
    subject = head.subject
    if head.kind != "medusa":
        for name in NEEDED:
            if not isinstance(head.config.get(name), int):
                raise UserError(f"{subject}; config.json gives no whole number for {name}")
    elif max(medusa_size(head)) > len(head.shapes):
        raise UserError(f"{subject}; the file lacks heads: it has {len(head.shapes)} tensors")
    for what, ours, theirs in _sizes(head, config):
        if ours != theirs:
            raise UserError(
                f"{subject} for {what} {theirs}, and {target} has {ours}: they were made for "
                "another target"
            )
    if kind := head.config.get("quantization_config"):
        method = kind.get("quant_method", "something") if isinstance(kind, dict) else kind
        raise UserError(f"{subject} quantised by {method}, which are not read here")
    with refusing(f"{subject}; config.json describes no such layer"), torch.device("meta"):
        if head.kind != "medusa":
            _insist_on_usual(head, config)
        net = _build(head, config, None)
    if not isinstance(net, Medusa):
        L, V, mask = config.num_hidden_layers, config.vocab_size, net.shape.mask
        if not 0 <= mask < V:
            raise UserError(f"{subject} with the mask {mask}, and {target} embeds {V} tokens")
        if bad := [t for t in net.shape.taps if t > L]:
            raise UserError(f"{subject} reading layer {bad[0]}, and {target} has {L} layers")
        size, own = (V, head.config["hidden_size"]), head.shapes.get(EMBED)
        if own not in (None, size):
            raise UserError(f"{subject}; {EMBED} is {own} where {size} is expected")
        if size[1] != config.hidden_size and not {EMBED, "lm_head.weight"} <= head.shapes.keys():
            raise UserError(f"{subject} of width {size[1]}, and the file lacks embeddings or head")
    shapes = {n: s for n, s in head.shapes.items() if n != EMBED}
    if len(getattr(net, "d2t", ())) == config.vocab_size:
        shapes.setdefault("d2t", (config.vocab_size,))  # optional for a full vocabulary
    insist_on_tensors(subject, net, shapes)


def _insist_on_usual(head: layouts.Head, config: Any) -> None:
    """Raise UserError for layers (those of blocks: `shape_of`) or an LM head that are not run here.
    config: the target's."""
    if head.kind not in BLOCKS:
        head.insist_on({"logit_scale": 1, "partial_rotary_factor": 1})
        if "sliding_attention" in head.setting("layer_types", []):
            raise UserError(f"{head.subject} with windows, which are not run here")
    if head.draft_vocab or head.kind == "eagle":
        return
    if head.setting("draft_vocab_size", config.vocab_size) != config.vocab_size:
        raise UserError(f"{head.subject}; the file lacks lm_head.weight")
    tied = head.config.get("tie_word_embeddings") and not config.tie_word_embeddings
    if tied and head.kind in EAGLE3:
        raise UserError(f"{head.subject} whose LM head is the embeddings, which is not run here")


def insist_on_kind(head: layouts.Head, *kinds: str) -> None:
    """Raise UserError for heads of another kind."""
    if head.kind not in kinds:
        method = layouts.DRAFTED_BY[head.kind]
        raise UserError(f"{head.subject}, and not {' or '.join(kinds)}: use {method}:{head.source}")


def insist_on_tensors(subject: str, net: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise UserError unless tensors of these shapes, by name, are those of `net`."""
    expected = {n: tuple(t.shape) for n, t in net.state_dict().items()}
    strange = {"lacks": expected.keys() - shapes, "has unknown": shapes.keys() - expected}
    for what, names in strange.items():
        if names:
            raise UserError(f"{subject}; the file {what} {', '.join(sorted(names)[:5])}")
    for name, size in expected.items():
        if shapes[name] != size:
            raise UserError(f"{subject}; {name} is {shapes[name]} where {size} is expected")


EMBED = "embed_tokens.weight"
BIASES = {"attention_bias": "self_attn.o_proj", "mlp_bias": "mlp.up_proj"}
NEEDED = ("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads")


def _sizes(head: layouts.Head, config: Any) -> Iterator[tuple[str, int, int]]:
    """Sizes that must be equal: (name, the target's, the heads')."""
    if head.kind == "medusa":
        last = [s for n, s in head.shapes.items() if "linear" not in n and len(s) == 2]
        for vocab, width in last[:1]:
            yield "hidden size", config.hidden_size, width
            yield "vocabulary", config.vocab_size, vocab
        return
    width = head.config.get("target_hidden_size") or head.config["hidden_size"]
    yield "hidden size", config.hidden_size, width
    yield "vocabulary", config.vocab_size, head.config["vocab_size"]
    if head.kind in BLOCKS:  # which embeds tokens as the target does
        yield "embeddings", config.hidden_size, head.config["hidden_size"]


def _shape(head: layouts.Head, config: Any) -> EagleShape:
    layers, own = head.config.get("num_hidden_layers", 1), head.shapes
    first = "midlayer" if head.kind in EAGLE3 else "layers.0"
    biases = {name: f"{first}.{part}.bias" in own for name, part in BIASES.items()}
    normed = f"{first}.self_attn.q_norm.weight" in own
    return EagleShape(
        head.kind, layer_config(head.config | biases, layers, normed), head.draft_vocab,
        taps=states_read(head, config.num_hidden_layers), norms=head.norms,
        fc_bias="fc.bias" in own, biased=f"{first}.self_attn.q_proj.bias" in own,
        mask=head.mask if head.kind == "peagle" else 0,
        target=head.config.get("target_hidden_size") or 0, fuses=head.fuses,
    )  # fmt: skip


def _build(head: layouts.Head, config: Any, target: Any) -> Medusa | Eagle | Block:
    if head.kind == "medusa":
        return Medusa(*medusa_size(head), config.hidden_size, config.vocab_size)
    embed = target and target.get_input_embeddings()
    readout = target and target.get_output_embeddings()
    if head.kind in BLOCKS:
        return Block(shape_of(head), embed, readout)
    return Eagle(_shape(head, config), embed, readout)


def load(head: layouts.Head, target: Any) -> Any:
    """A Medusa, an Eagle or a Block with its weights, in the dtype and on the device of `target`, a
    transformers model. Call `check` first. Raises UserError for weights that are not finite or a
    wrong d2t."""
    net = _build(head, target.config.get_text_config(), target)
    tensors = head.tensors()
    embedding = tensors.pop(EMBED, None)  # its own, in place of the target's
    net.load_state_dict({n: t for n, t in net.state_dict().items() if n == "d2t"} | tensors)
    if not isinstance(net, Medusa) and hasattr(net, "d2t"):
        ids = net.draft_ids
        if ids.min() < 0 or ids.max() >= net.config.vocab_size or len(ids.unique()) < len(ids):
            raise UserError(f"{head.source}: d2t names tokens outside the vocabulary, or one twice")
    insist_on_finite(head.source, net)
    net = net.to(target.device).eval().requires_grad_(False)
    for weight in net.parameters():  # rotary frequencies are buffers and stay float32
        weight.data = weight.data.to(target.dtype)
    if not isinstance(net, Medusa) and embedding is not None:
        embedding = embedding.to(target.device, target.dtype)
        if not torch.equal(embedding, net.borrowed[0].weight):
            net.borrowed = (nn.Embedding.from_pretrained(embedding), net.borrowed[1])
    return net


def insist_on_finite(source: str, net: nn.Module) -> None:
    for name, tensor in net.state_dict().items():
        if not torch.isfinite(tensor.float()).all():
            raise UserError(f"{source}: {name} holds NaN or infinite weights")


def save(
    folder: Path, net: Medusa | Eagle | Block, target: str, architectures: Sequence[str] = ()
) -> None:
    """Write heads in the layout in which their kind is published; EAGLE-3 and DFlash in that of the
    `speculators` package, which vLLM serves. `target`, and the `architectures` of its config if
    known, are recorded as the verifier."""
    tensors = {name: tensor.cpu().contiguous() for name, tensor in net.state_dict().items()}
    file = "model.safetensors"
    if isinstance(net, Medusa):
        vocab, width = net.readouts[0].shape
        file = "medusa_lm_head.safetensors"
        config = {
            "model_type": "medusa", "medusa_num_heads": len(net), "medusa_num_layers": net.blocks,
            "hidden_size": width, "vocab_size": vocab, "base_model_name_or_path": target,
            "medusa_fc_bias": True,  # without it vLLM leaves the biases out
        }  # fmt: skip
    elif isinstance(net, Block) or net.shape.fused:
        config = _speculators_config(net, target, architectures)
        t2d = torch.zeros(net.config.vocab_size, dtype=torch.bool)
        tensors["t2d"] = t2d.index_fill(0, net.draft_ids.cpu(), True)
        tensors = {n.replace("midlayer.", "layers.0."): t for n, t in tensors.items()}
    else:
        config = _layer_settings(net)
        config |= {"architectures": ["LlamaForCausalLM"], "bias": net.shape.fc_bias}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n")


def _layer_settings(net: Eagle | Block) -> dict[str, Any]:
    settings: dict[str, Any] = net.config.to_diff_dict()
    return settings | {"vocab_size": net.config.vocab_size}


ARCHITECTURES = {"eagle3": "Eagle3Speculator", "dflash": "DFlashDraftModel",
                 "dflash2": "DFlash2DraftModel", "dspark": "DSparkDraftModel"}  # fmt: skip


def _speculators_config(
    net: Eagle | Block, target: str, architectures: Sequence[str]
) -> dict[str, Any]:
    kind = net.shape.kind
    own: dict[str, Any]
    if isinstance(net, Block):
        draft = net.shape.deepest
        own = {
            "block_size": net.shape.block, "mask_token_id": net.shape.mask,
            layouts.BLOCK_TAPS: list(net.shape.taps), "sample_from_anchor": False,
            "sliding_window_non_causal": True,
        }  # fmt: skip
        if net.shape.candidates:
            own |= {name: getattr(net.shape, ours) for name, ours in DFLASH2.items()}
        elif net.shape.rank:
            gates = {"markov_head_type": "gated" if net.shape.gated else "vanilla"}
            own |= gates | {"markov_rank": net.shape.rank, "enable_confidence_head": False}
    else:
        draft = 5
        own = {layouts.TAPS: list(net.shape.taps)}
        own |= {name: name in net.shape.norms for name in layouts.NORMS}
    proposal = {"proposal_type": "greedy", "speculative_tokens": draft, "verifier_accept_k": 1,
                "accept_tolerance": 0.0}  # fmt: skip
    return {
        "architectures": [ARCHITECTURES[kind]],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target, "architectures": list(architectures)},
        },
        "transformer_layer_config": _layer_settings(net),
        "draft_vocab_size": len(net.draft_ids),
        **own,
    }
