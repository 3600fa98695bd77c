"""What each layer of a model remembers, and how far back it reads: from its config alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

STATES = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}  # kinds that keep a state
NO_KEYS = {"linear_attention", "conv", "moe", "mlp"}


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


def layers(config: Any, reach: int = 1 << 30) -> tuple[Layer, ...]:
    """The layers of a model with this config, over texts of up to `reach` tokens: a window or chunk
    that is no shorter is none."""
    kinds: Sequence[str] | None = getattr(config, "layer_types", None)
    sharing = getattr(config, "kv_sharing_modes", None)
    described = []
    for i, own in enumerate(configs(config)):
        window, chunk = (
            size if size and size < reach else 0
            for size in (
                getattr(own, name, None) for name in ("sliding_window", "attention_chunk_size")
            )
        )
        if kinds:
            kind = kinds[i]
            window, chunk = window * ("sliding" in kind), chunk * ("chunked" in kind)
        else:
            window = window if getattr(config, "use_sliding_window", True) else 0
            kind = "sliding" if window else "chunked" if chunk else "full"
            kind += "_attention"
        owns = kind not in NO_KEYS and not (sharing and sharing[i] == "reuse")
        described.append(Layer(kind, window, chunk, owns))
    return tuple(described)


def configs(config: Any) -> list[Any]:
    """The config of each layer: the model's own, except for what it says of single layers."""
    if getattr(config, "is_heterogeneous", False):
        return list(config.per_layer_config)
    return [config] * config.num_hidden_layers
