"""The networks that draft from the target's hidden states: Medusa heads and the EAGLE layer.

Tensor names are those of the published checkpoints. Embeddings, and the LM head of EAGLE-1, are
borrowed from the target, so a head's `state_dict` holds only what was trained. Attention, MLP,
norms and rotary positions are transformers' own. How they make drafts is in drafters/, how they are
trained in zoo/heads.py.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from specexp.errors import UserError, refusing
from specexp.models import head_files
from specexp.models.head_files import medusa_size, states_read
from specexp.models.lm import Network, Unfused, among_all, product
from specexp.ops import op


class ResBlock(nn.Module):
    """x + SiLU(Wx + b), initialised to the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(product(x, self.linear.weight, self.linear.bias))


class Medusa(nn.ModuleList):
    """Head k predicts the token k + 1 places after the one the target's own head predicts.

    (Cai et al. 2024, section 2.1.) hidden [..., E]: the state the target's LM head reads; returns
    logits [heads, ..., V]."""

    def __init__(self, heads: int, layers: int, width: int, vocab: int) -> None:
        def head() -> nn.Sequential:
            last = nn.Linear(width, vocab, bias=False)
            return nn.Sequential(*(ResBlock(width) for _ in range(layers)), last)

        super().__init__(head() for _ in range(heads))
        self.blocks = layers

    @property
    def readouts(self) -> list[Tensor]:
        """The output matrix [V, E] of each head."""
        return [p for name, p in self.named_parameters() if "linear" not in name]

    def logits(self, k: int, hidden: Tensor, vocab: int | None = None) -> Tensor:
        """Logits [..., V] of head k alone, optionally of the first `vocab` tokens."""
        head: Any = self[k]
        x = head[:-1](hidden.reshape(-1, hidden.shape[-1]))
        return product(x, head[-1].weight[:vocab], None).view(*hidden.shape[:-1], -1)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.stack([self.logits(k, hidden) for k in range(len(self))])


@dataclass(frozen=True)
class EagleShape:
    """kind: `eagle` (EAGLE-1 and 2: reads the target's last state, uses its LM head) or `eagle3`
    (fuses the states `taps`, has an LM head of `draft_vocab` tokens).

    `layer`: the config of its one layer (`layer_config`).

    `norms`: EAGLE-3's optional norms, by their names in the `speculators` format:
    `norm_before_residual` (the residual starts from the normed feature), `norm_before_fc` (the
    concatenated states are normed before they are fused), `fc_norm` (each state is normed by
    itself) and `norm_output` (the next place inherits the normed feature)."""

    kind: str
    layer: Any
    draft_vocab: int
    taps: tuple[int, ...]
    fc_bias: bool = False
    norms: tuple[str, ...] = ()

    @property
    def fused(self) -> bool:
        return self.kind == "eagle3"


LAYER = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
         "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings",
         "rope_parameters", "rope_scaling", "rope_theta")  # fmt: skip


def layer_config(settings: Mapping[str, Any]) -> Any:
    """The LlamaConfig of an EAGLE layer by those of these settings that are not None."""
    from transformers import LlamaConfig  # a second of imports, only where a head is built

    chosen = {name: settings[name] for name in LAYER if settings.get(name) is not None}
    return LlamaConfig(**chosen, num_hidden_layers=1, attn_implementation="sdpa")


class Layer(nn.Module):
    """A Llama layer; for EAGLE-3, its attention reads embedding and feature concatenated."""

    def __init__(self, config: Any, fused: bool) -> None:
        from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm

        super().__init__()
        E, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = LlamaAttention(config, 0)
        self.mlp = LlamaMLP(config)
        self.post_attention_layernorm = LlamaRMSNorm(E, eps)
        if fused:
            self.hidden_norm = LlamaRMSNorm(E, eps)
            self.input_layernorm = LlamaRMSNorm(E, eps)
            for name in ("q_proj", "k_proj", "v_proj"):
                narrow = getattr(self.self_attn, name)
                setattr(self.self_attn, name, nn.Linear(2 * E, narrow.out_features, bias=False))

    def forward(self, read: Tensor, residual: Tensor, *attention: Any) -> Tensor:
        residual = residual + self.self_attn(read, *attention)[0]
        return residual + self.mlp(self.post_attention_layernorm(residual))


class Eagle(nn.Module):
    """Autoregression on features: the feature of position t and the token of position t + 1 give
    the feature of t + 1, and that gives the logits of the token of t + 2.

    (Li et al. 2024, EAGLE, section 3; Li et al. 2025, EAGLE-3, section 3.1.) Called like a
    transformers model. `features` [B, n, E]: the target's (see `fuse`) or its own. Returns its new
    features as `hidden_states[-1]` [B, n, E], and logits [B, n, V], or those of the last
    `logits_to_keep` positions; tokens outside the draft vocabulary get -inf."""

    d2t: Tensor

    def __init__(self, shape: EagleShape, embed: Any, lm_head: Any) -> None:
        from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

        super().__init__()
        self.shape, self.config = shape, shape.layer
        self.borrowed = (embed, lm_head)  # a tuple hides them: not to be trained, moved or saved
        self.rotary = LlamaRotaryEmbedding(self.config)
        E, eps = self.config.hidden_size, self.config.rms_norm_eps
        if shape.fused:
            wide = len(shape.taps) * E
            if "norm_before_fc" in shape.norms:
                self.input_norm = LlamaRMSNorm(wide, eps)
            if "fc_norm" in shape.norms:
                self.fc_norm = nn.ModuleList(LlamaRMSNorm(E, eps) for _ in shape.taps)
            self.fc = nn.Linear(wide, E, bias=shape.fc_bias)
            self.midlayer = Layer(self.config, True)
            self.norm = LlamaRMSNorm(E, eps)
            self.lm_head = nn.Linear(E, shape.draft_vocab, bias=False)
            self.register_buffer("d2t", torch.zeros(shape.draft_vocab, dtype=torch.int64))
        else:
            self.fc = nn.Linear(2 * E, E, bias=shape.fc_bias)
            self.layers = nn.ModuleList([Layer(self.config, False)])

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def fuse(self, features: Tensor) -> Tensor:
        """The target's states [..., taps*E] as features [..., E], which the first pass reads."""
        if not self.shape.fused:
            return features
        if "norm_before_fc" in self.shape.norms:
            features = self.input_norm(features)
        if "fc_norm" in self.shape.norms:
            states = features.split(self.config.hidden_size, -1)
            pairs = zip(self.fc_norm, states, strict=True)
            features = torch.cat([norm(state) for norm, state in pairs], -1)
        rows = features.reshape(-1, features.shape[-1])
        return product(rows, self.fc.weight, self.fc.bias).view(*features.shape[:-1], -1)

    def features(
        self, tokens: Tensor, features: Tensor, position_ids: Tensor, attention_mask: Tensor,
        cache: Any = None,
    ) -> Tensor:  # fmt: skip
        """One step of the layer; returns the features [B, n, E] of the next positions."""
        embedded = self.borrowed[0](tokens).to(features.dtype)
        attention = self.rotary(features, position_ids), attention_mask, cache
        if self.shape.fused:
            layer, norms = self.midlayer, self.shape.norms
            normed = layer.hidden_norm(features)
            read = torch.cat([layer.input_layernorm(embedded), normed], -1)
            residual = normed if "norm_before_residual" in norms else features
            output = layer(read, residual, *attention)
            return self.norm(output) if "norm_output" in norms else output
        mixed = self.fc(torch.cat([embedded, features], -1))
        return self.layers[0](mixed, mixed, *attention)

    def draft_logits(self, features: Tensor) -> Tensor:
        """Logits [..., draft_vocab] of the tokens it can draft."""
        if not self.shape.fused:
            return self.borrowed[1](features)
        return self.lm_head(features if "norm_output" in self.shape.norms else self.norm(features))

    @property
    def draft_ids(self) -> Tensor:
        """[draft_vocab] the target's ids of the tokens it can draft; `d2t` holds id - index."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor, features: Tensor,
        cache: Any = None, logits_to_keep: int = 0, **_: Any,
    ) -> SimpleNamespace:  # fmt: skip
        features = self.features(input_ids, features, position_ids, attention_mask, cache)
        logits = self.draft_logits(features[:, -logits_to_keep:])
        if self.shape.fused:
            logits = among_all(logits, self.draft_ids, self.config.vocab_size)
        return SimpleNamespace(logits=logits, hidden_states=(features,))


@op
def network(eagle: nn.Module, name: str, vocab: int) -> Network:
    """What runs an EAGLE layer, or one that is called like it; see `lm.network`. Its only tap, 0,
    is the features it makes."""
    return Unfused(eagle)


def check(head: head_files.Head, config: Any, target: str, *kinds: str) -> None:
    """Refuse heads of another kind, for another target, or with missing or unknown tensors.

    config: the target's. Raises UserError with both numbers, or the names of the tensors."""
    subject = f"{head.source} are {head.kind} heads"
    if head.kind not in kinds:
        raise UserError(f"{subject}; this drafter takes {' or '.join(kinds)}: name its own method")
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
    with refusing(f"{subject}; config.json describes no such layer"), torch.device("meta"):
        net = _build(head, config, None)
    if isinstance(net, Eagle):
        L = config.num_hidden_layers
        if bad := [t for t in net.shape.taps if not 0 <= t <= L]:
            raise UserError(f"{subject} reading layer {bad[0]}, and {target} has {L} layers")
    expected = {n: tuple(t.shape) for n, t in net.state_dict().items()}
    shapes = {n: s for n, s in head.shapes.items() if n != EMBED}
    if expected.get("d2t") == (config.vocab_size,):
        shapes.setdefault("d2t", expected["d2t"])  # optional for a full vocabulary
    strange = {"lacks": expected.keys() - shapes, "has unknown": shapes.keys() - expected}
    for what, names in strange.items():
        if names:
            raise UserError(f"{subject}; the file {what} {', '.join(sorted(names)[:5])}")
    for name, size in expected.items():
        if shapes[name] != size:
            raise UserError(f"{subject}; {name} is {shapes[name]} where {size} is expected")


EMBED = "embed_tokens.weight"
NEEDED = ("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads")


def _sizes(head: head_files.Head, config: Any) -> Iterator[tuple[str, int, int]]:
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


def _shape(head: head_files.Head, config: Any) -> EagleShape:
    vocab, taps = head.config["vocab_size"], states_read(head, config.num_hidden_layers)
    if head.kind == "eagle3":
        vocab = head.config.get("draft_vocab_size") or vocab
    layer, fc_bias = layer_config(head.config), "fc.bias" in head.shapes
    return EagleShape(head.kind, layer, vocab, taps, fc_bias, head.norms)


def _build(head: head_files.Head, config: Any, target: Any) -> Medusa | Eagle:
    if head.kind == "medusa":
        return Medusa(*medusa_size(head), config.hidden_size, config.vocab_size)
    embed = target and target.get_input_embeddings()
    return Eagle(_shape(head, config), embed, target and target.get_output_embeddings())


def load(head: head_files.Head, target: Any) -> Any:
    """A Medusa or an Eagle with its weights, in the dtype and on the device of `target`, a
    transformers model. Call `check` first. Raises UserError for weights that are not finite or a
    wrong d2t."""
    net = _build(head, target.config.get_text_config(), target)
    tensors = head.tensors()
    embedding = tensors.pop(EMBED, None)  # its own, in place of the target's
    net.load_state_dict({n: t for n, t in net.state_dict().items() if n == "d2t"} | tensors)
    if isinstance(net, Eagle) and net.shape.fused:
        ids = net.draft_ids
        if ids.min() < 0 or ids.max() >= net.config.vocab_size or len(ids.unique()) < len(ids):
            raise UserError(f"{head.source}: d2t names tokens outside the vocabulary, or one twice")
    for name, tensor in net.state_dict().items():
        if not torch.isfinite(tensor.float()).all():
            raise UserError(f"{head.source}: {name} holds NaN or infinite weights")
    net = net.to(target.device).eval().requires_grad_(False)
    for weight in net.parameters():  # rotary frequencies are buffers and stay float32
        weight.data = weight.data.to(target.dtype)
    if isinstance(net, Eagle) and embedding is not None:
        embedding = embedding.to(target.device, target.dtype)
        if not torch.equal(embedding, net.borrowed[0].weight):
            net.borrowed = (nn.Embedding.from_pretrained(embedding), net.borrowed[1])
    return net


def save(folder: Path, net: Medusa | Eagle, target: str, architectures: Sequence[str] = ()) -> None:
    """Write heads in the layout in which their kind is published; EAGLE-3 in that of the
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
        }  # fmt: skip
    elif net.shape.fused:
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


def _layer_settings(net: Eagle) -> dict[str, Any]:
    settings: dict[str, Any] = net.config.to_diff_dict()
    return settings | {"vocab_size": net.config.vocab_size}


def _speculators_config(net: Eagle, target: str, architectures: Sequence[str]) -> dict[str, Any]:
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1,
                "accept_tolerance": 0.0}  # fmt: skip
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target, "architectures": list(architectures)},
        },
        "transformer_layer_config": _layer_settings(net),
        "draft_vocab_size": net.shape.draft_vocab,
        head_files.TAPS: list(net.shape.taps),
        **{name: name in net.shape.norms for name in head_files.NORMS},
    }
