"""What each layer of a model remembers, and how far back it reads: from its config alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

STATES = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}  # kinds that keep a state


@dataclass(frozen=True)
class Layer:
    """A layer of a model.

    Attributes:
        kind: Its name in transformers (`layer_types`), by which a module asks for its mask.
        window: It reads the keys of the last `window` positions, its own included; 0: of all.
        chunk: It reads the keys of its own chunk of `chunk` positions; 0: of all.
        owns: It has keys and values of its own. False: it reads another layer's, or none.
    """

    kind: str = "full_attention"
    window: int = 0
    chunk: int = 0
    owns: bool = True

    @property
    def reads_all(self) -> bool:
        """Whether it reads all keys."""
        return not self.window and not self.chunk

    @property
    def has_state(self) -> bool:
        """Whether it keeps a state that no mask can take back."""
        return self.kind in STATES


def layers(config: Any, reach: int) -> tuple[Layer, ...]:
    """The layers of a model with this config, over texts of up to `reach` tokens: a window or chunk
    that is no shorter is none."""
    window = getattr(config, "sliding_window", None) or 0
    chunk = getattr(config, "attention_chunk_size", None) or 0
    window, chunk = (size if size < reach else 0 for size in (window, chunk))
    kinds: Sequence[str] | None = getattr(config, "layer_types", None)
    if not kinds:
        alike = "full_attention"
        if window and getattr(config, "use_sliding_window", True):
            alike = "sliding_attention"
        elif chunk:
            alike = "chunked_attention"
        kinds = [alike] * config.num_hidden_layers
    kinds = kinds[: config.num_hidden_layers]
    described = {
        kind: Layer(
            kind,
            window if "sliding" in kind else 0,
            chunk if "chunked" in kind else 0,
            kind not in ("moe", "mlp"),
        )
        for kind in set(kinds)
    }
    sharing = getattr(config, "kv_sharing_modes", None) or [None] * len(kinds)
    return tuple(
        replace(described[kind], owns=False) if mode == "reuse" else described[kind]
        for kind, mode in zip(kinds, sharing, strict=False)
    )
