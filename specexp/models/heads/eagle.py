"""The layer of EAGLE-1, 2 and 3, and the layers of P-EAGLE."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from specexp.models.heads.borrowing import Borrowing
from specexp.models.lm import Network, Unfused, product
from specexp.models.servable import cache_name
from specexp.ops import op


@dataclass(frozen=True)
class EagleShape:
    """kind: `eagle` (EAGLE-1 and 2: reads the target's last state, uses its LM head), `eagle3`
    (fuses the states `taps`, has an LM head of `draft_vocab` tokens) or `peagle` (drafts in
    parallel; may have more layers).

    `layer`: the config of its layers (`layer_config`). `mask`: of P-EAGLE, the token that stands
    for one not known yet.

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

    @property
    def fused(self) -> bool:
        return self.kind != "eagle"


LAYER = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
         "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings",
         "rope_parameters", "rope_scaling", "rope_theta")  # fmt: skip


def layer_config(settings: Mapping[str, Any], layers: int = 1) -> Any:
    """The LlamaConfig of EAGLE layers by those of these settings that are not None."""
    from transformers import LlamaConfig  # a second of imports, only where a head is built

    chosen = {name: settings[name] for name in LAYER if settings.get(name) is not None}
    return LlamaConfig(**chosen, num_hidden_layers=layers, attn_implementation="sdpa")


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


class Eagle(Borrowing):
    """Autoregression on features: the feature of position t and the token of position t + 1 give
    the feature of t + 1, and that gives the logits of the token of t + 2.

    (Li et al. 2024, EAGLE, section 3; Li et al. 2025, EAGLE-3, section 3.1.) Called like a
    transformers model. `features` [B, n, E]: the target's (see `fuse`) or its own. Returns its new
    features as `hidden_states[-1]` [B, n, E], and logits [B, n, V], or those of the last
    `logits_to_keep` positions; tokens outside the draft vocabulary get -inf."""

    def __init__(self, shape: EagleShape, embed: Any, lm_head: Any) -> None:
        from transformers.models.llama.modeling_llama import (
            LlamaDecoderLayer,
            LlamaRMSNorm,
            LlamaRotaryEmbedding,
        )

        super().__init__()
        self.shape, self.config = shape, shape.layer
        self.borrowed = (embed, lm_head)
        self.rotary = LlamaRotaryEmbedding(self.config)
        E, eps, L = self.config.hidden_size, self.config.rms_norm_eps, self.config.num_hidden_layers
        if shape.fused:
            wide = len(shape.taps) * E
            if "norm_before_fc" in shape.norms:
                self.input_norm = LlamaRMSNorm(wide, eps)
            if "fc_norm" in shape.norms:
                self.fc_norm = nn.ModuleList(LlamaRMSNorm(E, eps) for _ in shape.taps)
            self.fc = nn.Linear(wide, E, bias=shape.fc_bias)
            self.midlayer = Layer(self.config, True)
            self.norm = LlamaRMSNorm(E, eps)
            self.own_head(shape.draft_vocab)
            if shape.kind == "peagle":
                self.mask_hidden = nn.Parameter(torch.zeros(1, 1, wide))
            deeper = (LlamaDecoderLayer(self.config, i) for i in range(1, L))
            self.layers = nn.ModuleList([nn.Identity(), *deeper])  # in the place of `midlayer`
            self.kept = cache_name(self.layers[-1])
        else:
            self.fc = nn.Linear(2 * E, E, bias=shape.fc_bias)
            self.layers = nn.ModuleList([Layer(self.config, False)])

    @property
    def deeper(self) -> list[nn.Module]:
        """The layers after the first, of P-EAGLE."""
        return list(self.layers)[1:]

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
            for deeper in self.deeper:
                output = deeper(
                    output, position_embeddings=attention[0], attention_mask=attention_mask,
                    **{self.kept: cache},
                )  # fmt: skip
            return self.norm(output) if "norm_output" in norms else output
        mixed = self.fc(torch.cat([embedded, features], -1))
        return self.layers[0](mixed, mixed, *attention)

    def draft_logits(self, features: Tensor) -> Tensor:
        """Logits [..., draft_vocab] of the tokens it can draft."""
        if not self.shape.fused:
            return self.borrowed[1](features)
        return self.lm_head(features if "norm_output" in self.shape.norms else self.norm(features))

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
