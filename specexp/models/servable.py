"""Which models can be served: by their config alone, before a weight is read."""

from __future__ import annotations

from typing import Any

from specexp.errors import UserError
from specexp.models.layers import layers

READ = {"full_attention", "sliding_attention", "chunked_attention", "moe", "mlp"}  # kinds served
ALIBI = {"bloom", "mpt"}  # always use ALiBi; Falcon's configs say whether they do


def reach(config: Any) -> int:
    """The longest sequence of a model with this config. For `longrope` that is the length up to
    which it uses its short factors: a longer pass would change the rotation of every row."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    long = (kind for kind in kinds if kind.get("rope_type") == "longrope")
    ends = (kind["original_max_position_embeddings"] for kind in long)
    names = "max_position_embeddings", "max_seq_len"
    limits = (getattr(config, name, None) or 1 << 30 for name in names)
    return min([*limits, *ends])


def servable(config: Any, name: str) -> None:
    """Refuse, by its config alone, a model whose state cannot be rolled back, or whose attention
    depends on distances in slots."""
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"{name} is an encoder-decoder; use a decoder-only causal LM")
    if not hasattr(config, "num_hidden_layers"):
        raise UserError(f"{name} ({config.model_type}) does not say how many layers it has")
    kinds = {layer.kind for layer in layers(config, reach(config))} - READ
    if "local" in (getattr(config, "attention_layers", None) or []):  # GPT-Neo's field
        kinds.add("local_attention")
    if kinds:
        raise UserError(
            f"{name} has {', '.join(sorted(kinds))} layers, which cannot be rolled back here: "
            "choose a model without them"
        )
    if not hasattr(config, "num_attention_heads"):
        raise UserError(f"{name} ({config.model_type}) has no attention cache to roll back")
    if config.model_type in ALIBI or getattr(config, "alibi", False):
        raise UserError(
            f"{name} has ALiBi in place of positions, which is wrong for drafts that branch: "
            "choose a model without it"
        )
