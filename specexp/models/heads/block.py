"""The network that drafts a whole block in one pass: DFlash, and DSpark, which adds a Markov head.

(Chen et al. 2026, DFlash, arXiv 2602.06036; of DSpark, the layouts of DeepSeek-AI's checkpoints and
of the `speculators` package.) Its layers are Qwen 3's. What they attend to is not: of the text
before the root they read keys and values that are computed from the target's hidden states alone
(`remember`), and in the block, which is the root followed by masks, every token sees every other.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specexp.errors import UserError
from specexp.models.cache import SlotCache
from specexp.models.heads.borrowing import Borrowing
from specexp.models.heads.dependence import Convolved, Markov, Selector
from specexp.models.heads.eagle import LAYER
from specexp.models.heads.layouts import MASK_EMBEDDING, Head
from specexp.models.lm import Network, as_operations
from specexp.models.servable import cache_name
from specexp.ops import op


@dataclass(frozen=True)
class BlockShape:
    """kind: one of `layouts.BLOCKS`; `layers`: the config of all layers (`layers_config`); `block`:
    its tokens, root included; `mask`: the token that stands for one not known yet; `taps`: the
    target's states it reads.

    `spans`: for each layer its window (0: none), and whether the block is causal in it.
    `from_root`: the output at each place is for the token after it, not for the token there.
    `draft_vocab`: tokens of its own LM head; 0: it borrows the target's. `rank`, `gated`: of the
    Markov head; rank 0: none. `candidates`: tokens among which a selector of this rank chooses; 0:
    no selector. `kernel`: places that a convolution mixes, with a weight for each `group` of
    channels; 0: none. `embeds_by`, `scale`, `cap`: factors on embeddings and logits, and the bound
    to which logits are squashed (0: none)."""

    kind: str
    layers: Any
    block: int
    mask: int
    taps: tuple[int, ...]
    spans: tuple[tuple[int, bool], ...]
    from_root: bool = False
    draft_vocab: int = 0
    rank: int = 0
    gated: bool = False
    candidates: int = 0
    kernel: int = 0
    group: int = 0
    embeds_by: float = 1.0
    scale: float = 1.0
    cap: float = 0.0

    @property
    def deepest(self) -> int:
        """The most draft tokens of a block."""
        return self.block - (not self.from_root)


# the settings of convolutions and the selector, and our names for them
DFLASH2 = {"conv_kernel_size": "kernel", "conv_group_size": "group", "selector_rank": "rank",
           "selector_top_k": "candidates"}  # fmt: skip


# settings that change what is computed, and the values with which they do not
USUAL = {
    "attention_value_scale": 1, "logit_scale": 1, "use_gemma_norm": False, "is_neox_style": True,
    "rope_is_neox_style": True, "use_aux_hidden_state": True,
}  # fmt: skip


def shape_of(head: Head) -> BlockShape:
    """The shape of a block drafter by its config. Raises UserError for settings that are missing,
    or that are not run here."""
    subject, setting = head.subject, head.setting
    head.insist_on(USUAL)
    if setting("projector_type") == "domino":
        raise UserError(f"{subject} with a Domino projector, which is not run here")
    if (kind := setting("markov_head_type", "vanilla")) not in ("vanilla", "gated"):
        raise UserError(f"{subject} with a Markov head of type {kind}, which is not run here")
    if (head.folder / MASK_EMBEDDING).exists():
        raise UserError(f"{subject} with a {MASK_EMBEDDING}, which is not read here")
    block, mask = setting("block_size"), setting("mask_token_id")
    if not head.block_taps or type(block) is not int or block < 2 or type(mask) is not int:
        raise UserError(
            f"{subject}; config.json must give block_size (2 or more), mask_token_id and "
            "target_layer_ids"
        )
    layers = layers_config(head.config)
    head.insist_on({"rope_dim": layers.head_dim})
    own = {"rank": setting("markov_rank", 0)} if head.kind == "dspark" else {}
    if head.kind == "dflash2":
        own = {ours: setting(name) for name, ours in DFLASH2.items()}
        if not all(type(number) is int and number > 0 for number in own.values()):
            raise UserError(f"{subject}; config.json must give {', '.join(DFLASH2)}, all above 0")
    early = head.kind == "dspark" and "speculators_model_type" not in head.config
    return BlockShape(
        head.kind, layers, block, mask, head.block_taps, tuple(_spans(head)),
        from_root=bool(setting("sample_from_anchor", setting("shift_label", early))),
        draft_vocab=head.draft_vocab, gated=kind == "gated", **own,
        embeds_by=float(setting("input_embedding_scale", 1)),
        scale=float(setting("output_multiplier", 1)),
        cap=float(setting("final_logit_softcapping", 0)),
    )  # fmt: skip


def _spans(head: Head) -> Iterator[tuple[int, bool]]:
    """The window of each layer (0: none), and whether the block is causal in it: by default where
    there is a window."""
    setting, L = head.setting, head.config.get("num_hidden_layers", 1)
    kinds = head.config.get("layer_types") or ["full_attention"] * L
    if setting("use_swa") and "sliding_attention" not in kinds:
        kinds = ["sliding_attention"] * L
    causal = setting("is_causal", setting("causal"))
    for kind in kinds:
        slides = kind == "sliding_attention"
        window = setting("swa_window_size", setting("sliding_window")) if slides else 0
        if slides and (type(window) is not int or window < 1):
            raise UserError(f"{head.subject} with windows; config.json gives no sliding_window")
        usual = slides and not setting("sliding_window_non_causal", False)
        yield window, usual if causal is None else bool(causal)


def layers_config(settings: Mapping[str, Any]) -> Any:
    """The Qwen3Config of a block's layers by those of these settings that are not None. It names no
    windows: a block's cache keeps every slot."""
    from transformers import Qwen3Config  # a second of imports, only where a head is built

    names = (*LAYER, "num_hidden_layers", "attention_bias", "hidden_act")
    chosen = {name: settings[name] for name in names if settings.get(name) is not None}
    return Qwen3Config(**chosen, attn_implementation="sdpa")


class Block(Borrowing):
    """A block's layers, with a head of its own or the target's. It is an `lm.Network`."""

    parts = ()
    by_length_up_to = 0

    def __init__(self, shape: BlockShape, embed: Any, lm_head: Any) -> None:
        from transformers.models.qwen3 import modeling_qwen3 as qwen3

        super().__init__()
        self.shape, self.config = shape, shape.layers
        self.borrowed = (embed, lm_head)
        E, V, eps = self.config.hidden_size, self.config.vocab_size, self.config.rms_norm_eps
        L = self.config.num_hidden_layers
        self.fc = nn.Linear(len(shape.taps) * E, E, bias=False)
        self.hidden_norm = qwen3.Qwen3RMSNorm(E, eps)
        layers: list[Any] = [qwen3.Qwen3DecoderLayer(self.config, i) for i in range(L)]
        self.kept = cache_name(layers[0])
        if shape.kernel:
            layers = [Convolved(each, shape.kernel, shape.group, shape.block) for each in layers]
        self.layers = nn.ModuleList(layers)
        self.norm = qwen3.Qwen3RMSNorm(E, eps)
        self.rotary = qwen3.Qwen3RotaryEmbedding(self.config)
        if shape.draft_vocab:
            self.own_head(shape.draft_vocab)
        if shape.candidates:
            self.candidate_selector = Selector(V, E, shape.rank, shape.candidates)
        elif shape.rank:
            self.markov_head = Markov(V, shape.draft_vocab or V, E, shape.rank, shape.gated)
        as_operations(self)

    def fuse(self, states: Tensor) -> Tensor:
        """The target's states [..., taps*E] as features [..., E], which `remember` takes."""
        return self.hidden_norm(self.fc(states))

    def remember(self, features: Tensor, positions: Tensor, cache: Any) -> None:
        """Append keys and values of features [B, n, E] at positions [B, n] to every layer's."""
        from transformers.models.qwen3.modeling_qwen3 import rotate_half

        cos, sin = (x[:, None] for x in self.rotary(features, positions))
        for number, layer in enumerate(self.layers):
            attention: Any = layer.self_attn
            shape = (*features.shape[:-1], -1, attention.head_dim)
            keys = attention.k_norm(attention.k_proj(features).view(shape)).transpose(1, 2)
            values = attention.v_proj(features).view(shape).transpose(1, 2)
            cache.update(keys * cos + rotate_half(keys) * sin, values, number)

    def hidden(
        self, tokens: Tensor, positions: Tensor, masks: Sequence[Tensor], cache: Any
    ) -> Tensor:
        """The states [B, n, E] of tokens [B, n] of blocks, which read what `remember` appended and
        each other. masks: of each layer."""
        embedding = self.borrowed[0].weight
        x = F.embedding(tokens.clamp(min=0), embedding).to(self.dtype) * self.shape.embeds_by
        rotary = self.rotary(x, positions)
        for layer, mask in zip(self.layers, masks, strict=True):
            x = layer(x, attention_mask=mask, position_embeddings=rotary, **{self.kept: cache})
        return self.norm(x)

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., draft_vocab or V] by states [..., E], without a Markov head's bias."""
        logits: Tensor = self.head(hidden) * self.shape.scale
        return (logits / self.shape.cap).tanh() * self.shape.cap if self.shape.cap else logits

    def corrected(self, logits: Tensor, before: Tensor, hidden: Tensor) -> Tensor:
        """Logits [..., n] of the first n tokens, from those of a place after tokens `before` [...],
        where hidden [..., E] is the state of the logits."""
        if self.shape.candidates:
            chosen: Tensor = self.candidate_selector(logits, before, hidden)
            return chosen
        bias = self.among_all(self.markov_head(before, hidden))
        return logits + bias[..., : logits.shape[-1]]

    def forward(
        self, tokens: Tensor, positions: Tensor, cache: SlotCache, taps: tuple[int, ...],
        last: int | None, **inputs: Tensor,
    ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        """See `lm.Network`. With `features` [B, n, E] they are remembered and nothing is returned;
        otherwise the tokens are a block. The only tap, 0, is the states of the logits."""
        if "features" in inputs:
            self.remember(inputs["features"], positions, cache)
            return None, None
        slots, key = cache.slots[:, 0], torch.arange(cache.seen, device=tokens.device)  # [B, n, 1]
        masks = {}
        for window, causal in set(self.shape.spans):
            seen = key <= (slots if causal else slots[:, -1:]).expand_as(slots)
            near = (slots - key).abs() < window if window else seen
            masks[window, causal] = cache.mask(seen & near, self.dtype)
        spans = [masks[span] for span in self.shape.spans]
        hidden = self.hidden(tokens, positions, spans, cache)[:, -(last or 0) :]
        return self.among_all(self.draft_logits(hidden)), hidden if taps else None


@op
def network(block: Block, name: str, vocab: int) -> Network:
    """What runs a block; see `lm.network`. Its only tap, 0, is the states of the logits."""
    return block
