"""The layers of EAGLE-1, 2 and 3 and of P-EAGLE: those of Llama or of Qwen 3."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specexp.models.heads.borrowing import Borrowing
from specexp.models.lm import Network, Unfused, product
from specexp.models.servable import cache_name
from specexp.ops import op


@dataclass(frozen=True)
class EagleShape:
    """kind: `eagle` (EAGLE-1 and 2: reads the target's last state), `eagle3` (fuses the states
    `taps`) or `peagle` (drafts in parallel).

    `layer`: the config of its layers (`layer_config`). `draft_vocab`: tokens of its own LM head; 0:
    it borrows the target's. `mask`: of P-EAGLE, the token that stands for one not known yet.
    `target`: the width of the target's states, if that is another (0: it is not). `biased`: what
    reads the inputs of its first attention has biases. `fuses`: EAGLE-3 fuses states; without that
    it reads one.

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
    mask: int = 0
    target: int = 0
    biased: bool = False
    fuses: bool = True

    @property
    def fused(self) -> bool:
        return self.kind != "eagle"

    @property
    def read(self) -> int:
        """The width of all the target's states that it reads of a token."""
        return len(self.taps) * (self.target or self.layer.hidden_size)


LAYER = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
         "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings",
         "rope_parameters", "rope_scaling", "rope_theta")  # fmt: skip


def layer_config(settings: Mapping[str, Any], layers: int = 1, normed: bool = False) -> Any:
    """The config of EAGLE layers by those of these settings that are not None: of Llama's, or of
    Qwen 3's, in which queries and keys are `normed`."""
    from transformers import LlamaConfig, Qwen3Config  # imported where a head is built: a second

    names = (*LAYER, "hidden_act", "attention_bias", "mlp_bias")
    chosen = {name: settings[name] for name in names if settings.get(name) is not None}
    kind = Qwen3Config if normed else LlamaConfig
    return kind(**chosen, num_hidden_layers=layers, attn_implementation="sdpa")


def _whole_layer(config: Any, number: int) -> Any:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

    made = LlamaDecoderLayer if config.model_type == "llama" else Qwen3DecoderLayer
    return made(config, number)


class Layer(nn.Module):
    """A decoder layer that has no norm before its attention; for EAGLE-3, its attention reads
    embedding and feature concatenated."""

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        E, whole = shape.layer.hidden_size, _whole_layer(shape.layer, 0)
        self.self_attn, self.mlp = whole.self_attn, whole.mlp
        self.post_attention_layernorm = whole.post_attention_layernorm
        if shape.fused:
            self.hidden_norm = type(whole.input_layernorm)(E, shape.layer.rms_norm_eps)
            self.input_layernorm = whole.input_layernorm
        for name in ("q_proj", "k_proj", "v_proj"):
            outputs = getattr(self.self_attn, name).out_features
            reads = nn.Linear(2 * E if shape.fused else E, outputs, bias=shape.biased)
            setattr(self.self_attn, name, reads)

    def forward(self, read: Tensor, residual: Tensor, *attention: Any) -> Tensor:
        residual = residual + self.self_attn(read, *attention)[0]
        return residual + self.mlp(self.post_attention_layernorm(residual))


class Eagle(Borrowing):
    """Autoregression on features: the feature of position t and the token of position t + 1 give
    the feature of t + 1, and that gives the logits of the token of t + 2.

    (Li et al. 2024, EAGLE, section 3; Li et al. 2025, EAGLE-3, section 3.1.) Called like a
    transformers model. `features` [B, n, E]: the target's (see `fuse`) or its own. Returns its new
    features as `hidden_states[-1]` [B, n, E], and logits [B, n, V], or those of the last
    `logits_to_keep` positions; tokens outside the draft vocabulary get -inf."""

    def __init__(self, shape: EagleShape, embed: Any, lm_head: Any) -> None:
        from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

        super().__init__()
        self.shape, self.config = shape, shape.layer
        self.borrowed = (embed, lm_head)
        self.rotary = LlamaRotaryEmbedding(self.config)
        E, eps, L = self.config.hidden_size, self.config.rms_norm_eps, self.config.num_hidden_layers
        first = Layer(shape)
        if shape.fused:
            if "norm_before_fc" in shape.norms:
                self.input_norm = LlamaRMSNorm(shape.read, eps)
            if "fc_norm" in shape.norms:
                width = shape.read // len(shape.taps)
                self.fc_norm = nn.ModuleList(LlamaRMSNorm(width, eps) for _ in shape.taps)
            if shape.fuses:
                self.fc = nn.Linear(shape.read, E, bias=shape.fc_bias)
            self.midlayer = first
            self.norm = LlamaRMSNorm(E, eps)
            if shape.kind == "peagle":
                self.mask_hidden = nn.Parameter(torch.zeros(1, 1, shape.read))
        else:
            self.fc = nn.Linear(2 * E, E, bias=shape.fc_bias)
        if shape.draft_vocab:
            self.own_head(shape.draft_vocab)
        deeper = (_whole_layer(self.config, i) for i in range(1, L))
        # of EAGLE-3 `midlayer` is the first
        self.layers = nn.ModuleList([nn.Identity() if shape.fused else first, *deeper])
        self.kept = cache_name(self.layers[-1])

    @property
    def deeper(self) -> list[nn.Module]:
        """The layers after the first."""
        return list(self.layers)[1:]

    def fuse(self, features: Tensor) -> Tensor:
        """The target's states [..., taps*E] as features [..., E], which the first pass reads."""
        if not self.shape.fused or not self.shape.fuses:
            return features
        if "norm_before_fc" in self.shape.norms:
            features = self.input_norm(features)
        if "fc_norm" in self.shape.norms:
            states = features.chunk(len(self.fc_norm), -1)
            pairs = zip(self.fc_norm, states, strict=True)
            features = torch.cat([norm(state) for norm, state in pairs], -1)
        rows = features.reshape(-1, features.shape[-1])
        return product(rows, self.fc.weight, self.fc.bias).view(*features.shape[:-1], -1)

    def features(
        self, tokens: Tensor, features: Tensor, position_ids: Tensor, attention_mask: Tensor,
        cache: Any = None,
    ) -> Tensor:  # fmt: skip
        """One step of the layer; returns the features [B, n, E] of the next positions."""
        embedded = self.embedded(tokens, features.dtype)
        attention = self.rotary(features, position_ids), attention_mask, cache
        norms = self.shape.norms
        if self.shape.fused:
            layer = self.midlayer
            normed = layer.hidden_norm(features)
            read = torch.cat([layer.input_layernorm(embedded), normed], -1)
            residual = normed if "norm_before_residual" in norms else features
            output = layer(read, residual, *attention)
        else:
            mixed = self.fc(torch.cat([embedded, features], -1))
            output = self.layers[0](mixed, mixed, *attention)
        for deeper in self.deeper:
            output = deeper(
                output, position_embeddings=attention[0], attention_mask=attention_mask,
                **{self.kept: cache},
            )  # fmt: skip
        return self.norm(output) if "norm_output" in norms else output

    def embedded(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, n, E]: the rows of the embeddings, which no factor of the target (Gemma) scales."""
        return F.embedding(tokens.clamp(min=0), self.borrowed[0].weight).to(dtype)

    def draft_logits(self, features: Tensor) -> Tensor:
        """Logits [..., draft_vocab or V] of the tokens it can draft."""
        normed = not self.shape.fused or "norm_output" in self.shape.norms
        logits: Tensor = self.head(features if normed else self.norm(features))
        return logits

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor, features: Tensor,
        cache: Any = None, logits_to_keep: int = 0, **_: Any,
    ) -> SimpleNamespace:  # fmt: skip
        features = self.features(input_ids, features, position_ids, attention_mask, cache)
        logits = self.among_all(self.draft_logits(features[:, -logits_to_keep:]))
        return SimpleNamespace(logits=logits, hidden_states=(features,))


@op
def network(eagle: nn.Module, name: str, vocab: int) -> Network:
    """What runs an EAGLE layer, or one that is called like it; see `lm.network`. Its only tap, 0,
    is the features it makes."""
    return Unfused(eagle)
