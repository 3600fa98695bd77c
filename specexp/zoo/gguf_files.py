"""GGUF files as folders that every part of this library reads as it reads any other.

Weights are dequantised once, to float32, so the model is exactly the one that the file describes;
a file that says more than transformers reads of it, such as a scaled rotary embedding, is refused.
"""

import hashlib
import importlib.util
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specexp.errors import UserError, refusing
from specexp.terminal import harmless
from specexp.zoo import files, shelf

READING = 2  # counts the ways in which files were read: folders of another way are not found
PART = re.compile(r"-\d{5}-of-\d{5}$")  # ends the name of a file that holds some of the layers
LAYOUT = "tensor_data_layout"  # a setting of old files, which says how they were made
ROPE = "rope_freqs.weight"  # what rotary frequencies are divided by in Llama 3.1 and later


def folder_of(path: Path) -> Path | None:
    """The folder of a GGUF file's model, or of the only such file in a folder that has no config,
    made when it is first named: a minute for 1B parameters. None if the path is neither.

    Raises UserError if the file cannot be read."""
    if os.path.isdir(path) and not (path / "config.json").is_file():
        inside = sorted(file for file in path.iterdir() if _is_gguf(file))
        inside = [file for file in inside if not file.name.startswith("mmproj")]  # for images
        if len(inside) > 1 and not PART.search(inside[0].stem):
            raise UserError(f"{path} holds {len(inside)} GGUF files: name one, such as {inside[0]}")
        return folder_of(inside[0]) if inside else None
    if not (_is_gguf(path) and os.path.isfile(path)):
        return None
    if PART.search(path.stem):
        raise UserError(
            f"{path} holds a part of a model: join the parts (llama-gguf-split --merge)"
        )
    state = path.stat()
    identity = f"{path.resolve()} {state.st_size} {state.st_mtime_ns} {READING}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
    folder = shelf.store() / "zoo/gguf" / f"{path.stem}-{digest}"
    if (folder / "zoo.json").is_file():
        return folder
    insist_on_reader()
    print(harmless(f"reading {path.name} into {folder}, once"), file=sys.stderr)
    return convert(path, folder, {"name": folder.name, "about": f"From {path.name}."})


def _is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf"


def insist_on_reader() -> None:
    """Raises UserError if what transformers reads GGUF files with is not installed."""
    if lacking := [x for x in ("gguf", "accelerate") if importlib.util.find_spec(x) is None]:
        raise UserError(f"a GGUF file needs {' and '.join(lacking)}: pip install 'specexp[real]'")


def convert(file: Path, folder: Path, facts: dict[str, Any]) -> Path:
    """Write a GGUF file's model to a folder of safetensors, in float32, with its tokenizer and a
    `zoo.json` of these facts. Raises UserError if transformers cannot read the file, or not all
    of it."""
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    quiet = logging.get_verbosity()
    logging.set_verbosity_error()  # it warns of the quantisation that is dissolved here
    try:
        with refusing(f"cannot read {file}"):
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            read, report = AutoModelForCausalLM.from_pretrained(
                file.parent, gguf_file=file.name, dtype=torch.float32, output_loading_info=True
            )
            content = GGUFReader(file)
    finally:
        logging.set_verbosity(quiet)
    config = type(read.config).from_dict(
        {k: v for k, v in read.config.to_dict().items() if k != "quantization_config"}
    )
    if missing := sorted(report["missing_keys"]):
        raise UserError(f"cannot read {file}: it lacks {missing[0]}, or names it otherwise")
    if unread := next(_unread(content, read, config), None):
        raise UserError(f"cannot read {file}: transformers ignores its {unread}")
    model = type(read)(config).float()  # the one that was read refuses to be saved
    model.load_state_dict(read.state_dict())
    card = {"role": "target", "target": None, "parameters": model.num_parameters(),
            "layers": config.num_hidden_layers, "width": config.hidden_size}  # fmt: skip
    with files.whole(folder) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / "zoo.json").write_text(json.dumps(facts | card, indent=1))
    return folder


def _unread(content: Any, model: Any, config: Any) -> Iterator[str]:
    """What a GGUF file says of its model that the model which was read does not show: settings
    whose values stand nowhere in its config, and weights. Gives the config the rotary embedding of
    Llama 3, which transformers knows by its parameters and the file by its factors."""
    prefix = content.fields["general.architecture"].contents() + "."
    shown = {value for value in _leaves(config.to_dict()) if isinstance(value, int | float | str)}
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotated = round(head * (getattr(config, "partial_rotary_factor", None) or 1))
    shown |= {head, rotated, "none"}
    for key, field in content.fields.items():
        name = key.removeprefix(prefix)
        if name in (key, LAYOUT):
            continue
        contents = field.contents()
        if name == "attention.sliding_window":
            same = contents == getattr(config, "sliding_window", None)
        else:
            same = all(not value or _among(value, shown) for value in _leaves(contents))
        if not same:
            yield f"{key} = {contents!r:.40}"
    tensors = {tensor.name: tensor for tensor in content.tensors}
    if ROPE in tensors and not _rescale(config, tensors.pop(ROPE).data):
        yield ROPE
    held = sum(int(tensor.n_elements) for tensor in tensors.values())
    if (more := held - sum(weight.numel() for weight in model.parameters())) > 0:
        yield f"{more:,} weights that no part of a {config.model_type} model takes"


def _leaves(value: Any) -> Iterator[Any]:
    """The values in nested lists and dicts."""
    if not isinstance(value, list | dict):
        yield value
        return
    for inner in value.values() if isinstance(value, dict) else value:
        yield from _leaves(inner)


def _among(value: Any, shown: set[Any]) -> bool:
    """Whether a value is among those, numbers up to the rounding of a 32-bit float."""
    if isinstance(value, float):
        numbers = (other for other in shown if isinstance(other, int | float))
        return any(math.isclose(value, other, rel_tol=1e-6) for other in numbers)
    return value in shown


def _rescale(config: Any, factors: Any) -> bool:
    """Give a config the rotary embedding whose frequencies are divided by these factors. False if
    they are not those of Llama 3, whose other parameters are the same in all its models."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    plain = {"rope_type": "default", "rope_theta": config.rope_parameters["rope_theta"]}
    of_llama_3 = {
        "rope_type": "llama3", "factor": float(max(factors)), "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config.rope_parameters = plain | of_llama_3
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    exponents = torch.arange(len(factors), dtype=torch.float64) / len(factors)
    unscaled = plain["rope_theta"] ** -exponents
    expected = torch.tensor(factors, dtype=torch.float64)
    return scaled.shape == unscaled.shape and torch.allclose(
        unscaled / scaled.double(), expected, rtol=1e-4
    )
