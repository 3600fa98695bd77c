"""What a model's config says of its layers, and the memory that a run needs: weights, KV cache and
workspace.

The workspace is the most that tensors take at any time of a pass, or while its logits are judged.
It is counted tensor by tensor for the passes of fused.py and the rules of rules.py; other networks
come close. Memory that a library uses inside one operation is not included. Nothing here loads or
allocates anything. `free_memory` says how much there is.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from specexp.errors import UserError, first_line
from specexp.fitting import UNLIMITED

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float64")  # of weights, by their names in torch
DEV = Path("/dev")
PREFILL = 512  # tokens per row in one prefill pass

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
        config: The model's, or its own where the model gives it one.
    """

    kind: str = "full_attention"
    window: int = 0
    chunk: int = 0
    owns: bool = True
    config: Any = field(default=None, compare=False, repr=False)

    @property
    def span(self) -> int:
        """How many positions back it reads, its own included; 0: all."""
        return self.window or self.chunk

    @property
    def has_state(self) -> bool:
        """Whether it keeps a state that no mask can take back."""
        return self.kind in STATES


def layers(config: Any, context: int = UNLIMITED) -> tuple[Layer, ...]:
    """The layers of a model with this config. context: its longest text in tokens; a window or
    chunk that is as long counts as none."""
    kinds: Sequence[str] | None = getattr(config, "layer_types", None)
    window_size, windowed = "sliding_window", "sliding"
    if own_names := getattr(config, "attention_layers", None):  # GPT-Neo
        kinds = ["sliding_attention" if kind == "local" else "full_attention" for kind in own_names]
        window_size = "window_size"
    elif getattr(config, "model_type", "") == "minimax":
        windowed = "full"  # it reads the window in all layers with keys
    sharing = getattr(config, "kv_sharing_modes", None)
    if sharing is None and (last := getattr(config, "num_kv_shared_layers", 0)):
        sharing = [None] * (config.num_hidden_layers - last) + ["reuse"] * last  # in 5.17
    described = []
    for i, own in enumerate(_own_configs(config)):
        sizes = (getattr(own, name, None) for name in (window_size, "attention_chunk_size"))
        window, chunk = (size if size and size < context else 0 for size in sizes)
        if kinds:
            kind = kinds[i]
            window, chunk = window * (windowed in kind), chunk * ("chunked" in kind)
        else:
            window = window if getattr(config, "use_sliding_window", True) else 0
            kind = "sliding" if window else "chunked" if chunk else "full"
            kind += "_attention"
        owns = kind not in NO_KEYS and not (sharing and sharing[i] == "reuse")
        described.append(Layer(kind, window, chunk, owns, own))
    return (*described, *_again(config, described))


def _again(config: Any, each: list[Layer]) -> list[Layer]:
    """Those that a pass runs in a loop, once for each further time; caches hold them behind all."""
    if (times := getattr(config, "loop_num_passes", 1)) > 1:  # Inkling 2 with loops
        first, end = config.loop_layer_index_start, config.loop_layer_index_end
    elif (times := getattr(config, "n_recurrent_loops", 1)) > 1:  # Dory
        first, end = config.n_input_layers, len(each) - config.n_output_layers
        times = times if config.recurrent_kv_cache_mode == "per_loop" else 1
    else:
        return []
    return each[first:end] * (times - 1)


def _own_configs(config: Any) -> list[Any]:
    if getattr(config, "is_heterogeneous", False):
        return list(config.per_layer_config)
    if not (own := {k[4:]: x for k, x in vars(config).items() if k.startswith("swa_")}):
        return [config] * config.num_hidden_layers
    vars(windowed := copy(config)).update(own)  # Inkling's layers with a window
    return [windowed if "sliding" in kind else config for kind in config.layer_types]


@dataclass(frozen=True)
class Need:
    """The memory of a run, in bytes."""

    weights: int
    cache: int
    work: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.work

    def __str__(self) -> str:
        return (
            f"{gib(self.total)} GiB ({gib(self.weights)} of weights, {gib(self.cache)} of keys, "
            f"values and states, {gib(self.work)} to work in)"
        )


def gib(size: float) -> str:
    """Bytes as GiB (2**30 bytes): `0.004`, `1.3` or `120`."""
    size /= 2**30
    return f"{size:.0f}" if size >= 99.5 else f"{size:.1f}" if size >= 0.1 else f"{size:.3f}"


def advice(halved: int, dtype: str, free: int) -> str:
    """What to do when the weights, which take `halved` bytes in bfloat16, do not fit into `free`
    bytes."""
    if dtype != "bfloat16" and halved <= free:
        return "use --dtype bfloat16"
    return f"choose a model of at most {free / 2e9:.1f} billion parameters, in bfloat16"


def check_device(device: str) -> None:
    """Raise UserError for a name that is no device's."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,4})?", device):
        raise UserError(f"device {device!r} is unknown; use auto, cpu, cuda or cuda:N")


def no_cuda() -> str:
    """Why there is no CUDA device, such as a driver that is too old; or ""."""
    import torch

    if torch.cuda.is_available():
        return ""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as e:
        return f"no CUDA device is available ({first_line(e).rstrip('.')})"
    return "no CUDA device is available"


def unused_gpu() -> str:
    """Why torch cannot use the GPU that NVIDIA's driver has found here; "" if it can, if there is
    none, or if CUDA_VISIBLE_DEVICES hides it."""
    hidden = "CUDA_VISIBLE_DEVICES" in os.environ
    return "" if hidden or not any(DEV.glob("nvidia[0-9]*")) else no_cuda()


def free_memory(device: torch.device | None) -> int:
    """Bytes that can still be allocated on the device; None: on the CPU. What torch keeps for its
    graphs is not among them, though most of it is unused between replays."""
    if device and device.type == "cuda":
        import torch

        here = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.empty_cache()  # which alone takes back what was kept for graphs that are gone
        reusable = sum(
            segment["total_size"] - segment["active_size"]
            for segment in torch.cuda.memory_snapshot()
            if segment["device"] == here and tuple(segment["segment_pool_id"]) == (0, 0)
        )
        return torch.cuda.mem_get_info(device)[0] + reusable
    return psutil.virtual_memory().available


def rounded(slots: int) -> int:
    """`slots` rounded up by at most an eighth, to at least 64, so that few shapes occur."""
    step = max(64, 1 << max(0, slots.bit_length() - 4))
    return -(-slots // step) * step


def layer_slots(span: int, slots: int, room: int) -> int:
    """How many of a row's `slots` a layer's buffers hold if it reads `span` positions back; all of
    them if span is 0.

    Enough for a prefill pass after a round that wrote `room` slots was rolled back, and one slot
    for padding; a multiple of 8, as kernels copy masks of other widths."""
    return min(slots, -(-(span + PREFILL + room - 1) // 8) * 8) if span else slots


def slot_bytes(config: Any, itemsize: int, context: int = UNLIMITED) -> list[tuple[int, int]]:
    """Bytes per slot: (span, bytes of keys and values of all layers with this `Layer.span`).

    Latent attention keeps the latents instead. Layers that share keys keep none. context: see
    `layers`."""
    each = layers(config, context)
    shared = (getattr(config, "indexer_types", None) or []).count("shared")
    indexers = sum(layer.kind == "indexed_attention" for layer in each) - shared
    index = (getattr(config, name, None) or 0 for name in ("index_head_dim", "indexer_head_dim"))
    sizes = Counter({0: indexers * max(index)})
    twice = getattr(config, "model_type", "") == "mimo_v2_flash"  # as many key heads in windows
    for layer in each:
        if layer.owns:
            sizes[layer.span] += _kv(layer.config) << (twice and "sliding" in layer.kind)
    return [(span, itemsize * size) for span, size in sizes.items()]


def row_bytes(sizes: Sequence[Sequence[int]], slots: int, room: int = 1) -> int:
    """Bytes of keys and values of a row of so many slots. sizes: from `slot_bytes`; room: see
    `layer_slots`."""
    return sum(size * layer_slots(span, slots, room) for span, size in sizes)


def _kv(config: Any) -> int:
    """Numbers that a layer's attention keeps of each token."""
    _, K, d = _heads(config)
    if latent := getattr(config, "kv_lora_rank", None):
        return int(latent + config.qk_rope_head_dim)
    return K * (d + (getattr(config, "v_head_dim", None) or d))


def pass_bytes(config: Any, itemsize: int, B: int, n: int, S: int) -> int:
    """Peak bytes of a pass over n tokens of B rows that may read S slots, without logits: the mask
    and, in the MLP, the residual stream and its norm, four wide tensors and what attention left."""
    H, K, d = _most_heads(config)
    group = H // K
    mask = S * itemsize * group
    attention = (H + 2 * K) + (H + K) + H + 2
    wide = _wide(config)
    return B * n * (mask + itemsize * (4 * config.hidden_size + 4 * wide + attention * d))


def shape(config: Any) -> dict[str, int]:
    """The fields of a config that `pass_bytes` and `work_bytes` read, all layers taken together."""
    H, K, d = _most_heads(config)
    return {
        "num_hidden_layers": 1, "num_attention_heads": H, "num_key_value_heads": K, "head_dim": d,
        "hidden_size": config.hidden_size, "intermediate_size": _wide(config),
        "vocab_size": config.vocab_size,
    }  # fmt: skip


def law_bytes(rule: str, temperature: float) -> int:
    """Peak bytes per logit, besides the logit itself, while logits become distributions and are
    judged. Most of it is noise, which is made of 64-bit integers."""
    if temperature > 0:
        return 36
    return 0 if rule == "match" else 24


def work_bytes(
    configs: Sequence[Any], itemsize: int, B: int, S: int, prompt: int, nodes: int, law: int,
    taps: int = 0,
) -> int:  # fmt: skip
    """The workspace of B rows: every model, the target first, prefills `prompt` tokens, then the
    target verifies `nodes` at a time. `law`: `law_bytes`. `taps`: number of hidden states per
    prompt token that the drafter reads."""
    target = configs[0]
    reading = [pass_bytes(c, itemsize, B, min(PREFILL, prompt), S) for c in configs]
    hidden = B * prompt * taps * target.hidden_size * itemsize
    checking = pass_bytes(target, itemsize, B, nodes, S)
    deciding = B * nodes * target.vocab_size * (itemsize + law)
    return max(max(reading) + hidden, 2 * hidden, checking, deciding)


def _wide(config: Any) -> int:
    wide = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return int(max(wide) if isinstance(wide, list) else wide)  # Gemma 3n: of each layer


def _heads(config: Any) -> tuple[int, int, int]:
    """Query heads, key heads and head width. (Falcon's newer layers have a key for every head.)"""
    H = int(getattr(config, "num_attention_heads", 1))
    K = getattr(config, "num_key_value_heads", None) or H
    if getattr(config, "multi_query", False):
        K = H if getattr(config, "new_decoder_architecture", False) else 1
    return H, int(K), int(getattr(config, "head_dim", None) or config.hidden_size // H)


def _most_heads(config: Any) -> tuple[int, int, int]:
    """The same, of all layers the most."""
    H, K, d = map(max, zip(*(_heads(layer.config) for layer in layers(config)), strict=True))
    return H, K, d
