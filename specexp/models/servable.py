"""Which models can be served: by their files and config, before a weight is read; and why a module
cannot, by running it."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from typing import Any

from safetensors import safe_open

from specexp.errors import UserError, refusing
from specexp.fitting import UNLIMITED
from specexp.models.memory import layers
from specexp.objects import signature

CONTEXTS = ("max_position_embeddings", "max_seq_len")
ORIGINAL = "original_max_position_embeddings"
CACHES = "cache", "past_key_values", "cache_params"  # the latter two before transformers 5.24
READ = {"full_attention", "sliding_attention", "chunked_attention", "indexed_attention"}
READ |= {"moe", "mlp"}  # the kinds of layers served; these two have no attention

# What is built or listed one by one, and the most of it, which no number in a list exceeds either.
MOST = {
    re.compile("n_layer|attention_types|.*(layers|depths?|blocks|stages|_replace)"): 4096,
    re.compile("n_head|.*(heads|experts|codebooks|quantizers|inputs|cycles|ngram|labels)"): 32768,
}
# The most values in a config.json, and tensors of a model: each takes microseconds to read or make.
VALUES, TENSORS = 100_000, 5_000
WEIGHTS = "weights are *.safetensors of the folder itself"
PICKLED = (".bin", ".pt", ".pth")
WHOLE, AGAIN = "model.safetensors", "download or save the model again"
EXPERTS = "eager", "batched_mm", "grouped_mm"  # others fetch what they run
FETCHED = {"eetq", "fbgemm_fp8", "metal"}  # methods of quantisation whose kernels are on a hub
SIZES = {"hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads"}
SIZES |= {"num_key_value_heads", "n_embd", "n_layer", "n_head", "max_position_embeddings"}


def check_files(folder: Path) -> None:
    """Raise UserError for a folder without a config or safetensors, or whose weights are not all
    its own."""
    if (folder / "adapter_config.json").is_file():
        raise UserError(
            f"{folder} holds an adapter, which is not applied here: merge it into its model "
            "(merge_and_unload of peft), and save that"
        )
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} has no config.json; point at a Hugging Face model folder")
    if (folder / "config.json").read_bytes().count(b",") >= VALUES:
        raise UserError(f"{folder}/config.json has more than {VALUES:,} values: no model's has")
    if not any(folder.glob("*.safetensors")):
        pickled = any(file.suffix in PICKLED for file in folder.iterdir())
        why = "pickled weights are refused: convert them" if pickled else "it holds no weights"
        raise UserError(f"{folder} has no *.safetensors; {why}")
    for index in folder.glob("*.safetensors.index.json"):
        with refusing(f"cannot read {index}", AGAIN):
            named = set(json.loads(index.read_bytes())["weight_map"].values())
        read = index.name == f"{WHOLE}.index.json" and not (folder / WHOLE).exists()
        for file in sorted(map(str, named)):
            if not _holds_weights(file):
                raise UserError(f"{index} names {file!r}: {WEIGHTS}")
            if read and not (folder / file).exists():
                raise UserError(f"{index} names {file}, which is not there: {AGAIN}")


def check_count(folder: Path, layers: int) -> None:
    """Refuse a folder with fewer tensors than layers, before a model so deep is built."""
    tensors = 0
    for file in folder.glob("*.safetensors"):
        with refusing(f"cannot read {file}", AGAIN), safe_open(file, "np") as weights:
            tensors += len(weights.keys())
    if tensors < layers and folder.is_dir():
        raise UserError(
            f"{folder} has {tensors} tensors for the {layers} layers that config.json says: {AGAIN}"
        )


def check_config_json(described: dict[str, Any], source: str) -> None:
    """Raise UserError for a config.json with impossible values (sizes below 1, NaN, names that are
    no text) or code from a hub, before anything is built from it."""
    for path, value in fields(described):
        name, wrong = path.rpartition(".")[2], ""
        most = next((most for names, most in MOST.items() if names.fullmatch(name)), math.inf)
        if "implementation" in path and isinstance(value, str):
            if re.search("[/:|]", value):
                wrong = "kernels from a hub are never fetched: remove the field"
            elif "attn" in path and value not in ("eager", "sdpa"):
                wrong = "it must be eager or sdpa, which take any mask"
            elif "experts" in path and value not in EXPERTS:
                wrong = f"it must be one of {', '.join(EXPERTS)}: others fetch kernels from a hub"
        elif name == "quant_method" and value in FETCHED:
            wrong = "its kernels are on a hub and are never fetched: choose another model"
        elif name == "quant_method" and value == "gguf":
            wrong = "its weights are in a GGUF file: give that, or remove the field"
        elif name == "architectures" and not all(isinstance(x, str) for x in _list(value or [])):
            wrong = "it must be a list of names"
        elif isinstance(value, float) and math.isnan(value):
            wrong = "it must be a number"
        elif name == "eos_token_id" and not all(isinstance(i, int | None) for i in _list(value)):
            wrong = "it must be a token id or a list of them"
        elif name in SIZES and isinstance(value, int | float) and value < 1:
            wrong = "it must be 1 or more"
        elif most < max(_integers(value), default=0):
            what = "layers" if re.fullmatch("n_layer|.*layers", name) else "of them"
            wrong = f"no model has more than {most:.0f} {what}"
        elif name == "transformers_weights" and not _holds_weights(value):
            wrong = WEIGHTS
        if wrong:
            raise UserError(f"{source}: config.json has {path} {value!r:.80}: {wrong}")


@contextmanager
def few_tensors(what: str) -> Iterator[None]:
    """Raise a UserError that begins with `what` once modules have made more than TENSORS."""
    from torch.nn.modules.module import register_module_parameter_registration_hook as registered

    number = count(1)

    def made(*_: Any) -> None:
        if next(number) > TENSORS:
            raise UserError(f"{what}: none has more than {TENSORS:,} tensors")

    with registered(made):
        yield


def _holds_weights(file: Any) -> bool:
    """Whether this is the name of a file of weights in a folder, and not a path to elsewhere. A
    link of that name may lead anywhere: the caches of hubs consist of links."""
    kinds = (".safetensors", ".safetensors.index.json")
    return isinstance(file, str) and Path(file).name == file and file.endswith(kinds)


def fields(described: dict[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """Every field with its value; those of a config within are named
    `text_config.num_hidden_layers`."""
    for name, value in described.items():
        yield f"{within}{name}", value
        for part in _list(value):
            if isinstance(part, dict):
                yield from fields(part, f"{within}{name}.")


def _integers(value: Any) -> Iterator[int]:
    """The whole numbers in a value and in lists within lists."""
    for part in _list(value):
        if isinstance(part, list):
            yield from _integers(part)
        elif type(part) is int:
            yield part


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def limits(config: Any) -> dict[str, int]:
    """The longest sequences that a model with this config can be run on, by the field that limits
    them.

    Besides the context, some fields limit what is exact over a static cache: past the reach of
    `longrope`'s short factors the rotation of every row would change; past `floor_scale`, Llama 4
    scales queries by their slot, as Inkling past `log_scaling_n_floor`; past `keep_window_size`,
    Doge drops keys by the number of slots.
    """
    lengths = {name: getattr(config, name, None) for name in (*CONTEXTS, "keep_window_size")}
    rope = getattr(config, "rope_parameters", None) or {}
    for kind in (rope, *(kind for kind in rope.values() if isinstance(kind, dict))):
        if kind.get("rope_type") == "longrope":
            lengths |= {ORIGINAL: kind.get(ORIGINAL)}
    if getattr(config, "attn_temperature_tuning", False) and not all(config.no_rope_layers):
        lengths |= {"floor_scale": config.floor_scale - 1}
    if getattr(config, "model_type", "") == "inkling_text":
        lengths |= {"log_scaling_n_floor": config.log_scaling_n_floor}
    return {name: length for name, length in lengths.items() if length and length > 0}  # XLNet: -1


def context_length(config: Any) -> int:
    """The longest sequence, in tokens, that a model with this config can be run on."""
    return min(limits(config).values(), default=UNLIMITED)


def context_in_words(config: Any) -> str:
    """`context_length` in words, with the field that sets it where that is not the usual one."""
    lengths, length = limits(config), context_length(config)
    names = [name for name, limit in lengths.items() if limit == length]
    beside = "" if not names or names[0] in CONTEXTS else f" ({names[0]} in its config)"
    return f"{length}-token context{beside}"


def check_servable(config: Any, name: str) -> None:
    """Refuse, by its config alone, a model whose state cannot be rolled back."""
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"{name} is an encoder-decoder; use a decoder-only causal LM")
    if not hasattr(config, "num_hidden_layers"):
        raise UserError(f"{name} ({config.model_type}) does not say how many layers it has")
    here = layers(config, context_length(config))
    kinds = {layer.kind for layer in here if not layer.has_state} - READ
    if kinds:
        raise UserError(
            f"{name} has {', '.join(sorted(kinds))} layers, which cannot be rolled back here: "
            "choose a model without them"
        )
    if len(here) > config.num_hidden_layers and any(x.has_state for x in here):
        raise UserError(f"{name} runs layers with states in a loop: choose a model that does not")
    if not hasattr(config, "num_attention_heads") and not any(x.has_state for x in here):
        raise UserError(f"{name} ({config.model_type}) has no attention cache to roll back")


def takes(module: Any) -> Mapping[str, Any]:
    """The parameters of a module's `forward`, by name; of a wrapper's that names no cache, those of
    the first module within that does."""
    within = module.modules() if hasattr(module, "modules") else iter([module])
    named = (signature(getattr(part, "forward", part)).parameters for part in within)
    own = next(named)
    return next((names for names in chain([own], named) if names.keys() & set(CACHES)), own)


def cache_name(module: Any) -> str:
    """What a module calls the cache that it takes and returns; "" if it takes none."""
    return next((name for name in CACHES if name in takes(module)), "")


def cause(module: Any, error: Exception | None = None) -> str:
    """Why a causal LM has other logits over a tree than of each path, or raised this error, as its
    signature and short passes show; "" if they do not."""
    if isinstance(error, AttributeError) and type(error.obj).__module__.startswith("specexp."):
        return f"it asks its cache for {error.name}"
    if not (cache := cache_name(module)):
        return "it takes no cache"
    placed = "position_ids" in takes(module)
    with suppress(Exception):  # of the module: anything
        if seen := _fault(module, cache, placed):
            return seen
    attends = any(not layer.has_state for layer in layers(module.config.get_text_config()))
    return "it takes no position_ids" if attends and not placed else ""


def _fault(module: Any, cache: str, positioned: bool) -> str:
    """What passes over eight tokens in a line show that no tree can do with."""
    import torch

    at = torch.arange(8, device=module.device)[None]
    ids = (at + 1) % module.config.get_text_config().vocab_size
    least = torch.finfo(module.dtype).min
    triangle = torch.full((8, 8), least, dtype=module.dtype, device=module.device).triu(1)
    kept: dict[str, Any] = {}

    def differ(first: int, end: int, **inputs: Any) -> bool:
        """Whether these tokens have other logits than in a pass over the whole text."""
        out = module(input_ids=ids[:, first:end], **{"use_cache": False} | inputs)
        kept[cache], difference = out.get(cache), out.logits[0] - whole[first:end]
        far = max(0.01, 12 * torch.finfo(module.dtype).eps)  # beyond rounding
        return bool(difference.norm() > far * whole[first:end].norm())

    with torch.inference_mode():
        whole = module(input_ids=ids, use_cache=False).logits[0]
        if differ(0, 7):
            return "its logits change with later tokens"
        if positioned and differ(0, 8, position_ids=at):
            return "its own positions do not begin at 0, as those of generate() do"
        if any(differ(i, i + 1, use_cache=True, **kept) for i in range(8)):
            return "its own logits with and without a cache differ"
        turned = {"position_ids": at.flip(1), "attention_mask": triangle[None, None]}
        return "it does not read position_ids" if positioned and not differ(0, 8, **turned) else ""
