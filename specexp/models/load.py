"""From a folder, a hub id or a module in memory to an LM.

Only this file chooses the network that runs a module, and tests it.
"""

from __future__ import annotations

import copy
import json
import os
from functools import cache, lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
from safetensors import SafetensorError
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from specexp.errors import UserError, first_line, ran_out
from specexp.models import int8, memory
from specexp.models.lm import LM, Unfused, network
from specexp.models.memory import gib
from specexp.models.servable import servable
from specexp.ops import op
from specexp.sequences import Sequences
from specexp.tree import Tree

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
TREE = Tree((-1, 0, 0, 1, 1, 2, 3, 5))  # the draft on which modules are probed
# modules in use, by source, files, dtype and device
_IN_USE: WeakValueDictionary[Any, Any] = WeakValueDictionary()
_PROBED: WeakSet[Any] = WeakSet()  # modules whose logits over a tree are their own


def read_config(source: str | Path) -> Any:
    """The config of a folder or hub id, a copy of the caller's own.

    For `NAME+int8` (int8.py) it has the field `quantised`, which transformers does not know.
    Raises UserError if the model is unsafe or cannot be served.
    """
    bare, suffix = int8.split(str(source))
    config = copy.deepcopy(_config(bare, _state(bare)))
    if suffix:
        int8.check(config, bare)
        config.get_text_config().quantised = suffix
        if not _sizes(config)[1]:
            raise UserError(f"{bare} has no nn.Linear to quantise: leave out +int8")
    return config


def read_tokenizer(source: str | Path) -> Any:
    """The tokenizer of a folder or hub id: the same object while its files do not change."""
    bare, _ = int8.split(str(source))
    return _tokenizer(bare, _state(bare))


def load(source: str | Path, name: str, dtype: str, device: str, vocab: int | None = None) -> LM:
    """Load weights, from safetensors only and without remote code; weights in use are shared.

    Args:
        source: a folder or hub id, with or without `+int8` (int8.py).
        name: what messages and tables call it.
        dtype: one of DTYPES.
        device: `cpu`, `cuda` or `cuda:N`.
        vocab: the tokens it may emit; None: as many as it has logits.

    Raises:
        UserError: a model, dtype or device that is not there or cannot be used, or too little
            memory.
    """
    config = read_config(source)
    _check_device(dtype, device)
    bare, suffix = int8.split(str(source))
    stats = (f.stat() for f in Path(bare).glob("*.safetensors"))
    files = tuple(sorted((s.st_ino, s.st_size, s.st_mtime_ns) for s in stats))
    key = (str(source), files, dtype, device)
    if (module := _IN_USE.get(key)) is None:
        module = _read_weights(config, bare, name, dtype, device)
        if suffix:
            int8.quantise(module, device)
        _IN_USE[key] = module = module.to(device)
        settle(module)
    return of_module(module, name, vocab)


def of_module(module: Any, name: str = "model", vocab: int | None = None) -> LM:
    """The LM of a causal LM in memory, run by the fastest network that agrees with the module.

    Args:
        module: a transformers causal LM, which is put in evaluation mode, or what looks like one.
        name: what messages and tables call it.
        vocab: the tokens it may emit; None: as many as it has logits.

    Raises:
        UserError: the module cannot be driven over trees of drafts.
    """
    module.eval().requires_grad_(False)
    config = module.config.get_text_config()
    servable(config, name)
    vocab = vocab or config.vocab_size
    lm = LM(module, name, vocab, network(module, name, vocab))
    if isinstance(lm.net, Unfused) and isinstance(module, PreTrainedModel):
        probe(lm.apart())
    return lm


@op
def settle(module: Any) -> None:
    """Move a module's weights to where passes read them sooner; by default, nowhere."""


def probe(lm: LM) -> None:
    """Raise UserError if the LM's logits over a tree are not its module's own of each path.

    A module is probed once. The LM's cache is replaced.
    """
    if lm.module in _PROBED:
        return
    refusal = f"{lm.name} ({lm.config.model_type}) cannot be served; choose another model: "
    try:
        difference = _difference(lm)
    except Exception as e:  # a module that was not meant to be run so may raise anything
        if isinstance(e, torch.OutOfMemoryError) or ran_out(str(e)):
            raise
        raise UserError(f"{refusal}in {lm.dtype} it fails over a tree: {first_line(e)}") from e
    if difference > (0.1 if lm.dtype == torch.bfloat16 else 0.01):  # far beyond rounding
        raise UserError(
            f"{refusal}its logits over a tree differ by {difference:.1e} of their size from those "
            "of each path alone"
        )
    _PROBED.add(lm.module)


@torch.inference_mode()
def _difference(lm: LM) -> float:
    """The relative difference between logits over a tree, after two prefixes in one batch, and the
    module's own logits for each path alone, where both are finite."""
    ids = torch.arange(21, device=lm.device) * 7919 % lm.vocab
    prefixes = [ids[:6].tolist(), ids[6:7].tolist()]
    seqs = Sequences.of(prefixes, 0, slack=2 * len(TREE), device=lm.device)
    draft = seqs.draft(TREE.nodes(lm.device), ids[7:].view(2, -1))
    lm.allocate(*seqs.tokens.shape)
    lm.prefill(seqs, 0, len(prefixes[0]) - 1)
    logits = lm.verify(seqs, draft).logits
    texts, over_tree = [], []
    for leaf in set(range(len(TREE))) - set(TREE.parents):
        path = draft.nodes.ancestors[0, leaf].nonzero()[:, 0]
        for row, prefix in enumerate(prefixes):
            texts.append(torch.cat([seqs.tokens[row, : len(prefix) - 1], draft.tokens[row, path]]))
            over_tree.append(logits[row, path])
    alone = lm.module(input_ids=pad_sequence(texts, batch_first=True), use_cache=False).logits
    triples = zip(alone, texts, over_tree, strict=True)
    reference = torch.cat([x[len(t) - len(o) : len(t), : lm.vocab] for x, t, o in triples])
    ours = torch.cat(over_tree)
    finite = ours.isfinite() & reference.isfinite()
    return float((ours - reference)[finite].float().norm() / reference[finite].float().norm())


def weight_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of the weights of a model, from its config alone; 0 (unknown) if its files are already
    quantised. Raises UserError for a dtype that `+int8` does not support."""
    if getattr(config, "quantization_config", None):
        return 0
    numbers, int8_bytes = _sizes(config)
    if int8_bytes and dtype not in int8.DTYPES:
        raise UserError("weights in float64 cannot be +int8: use --dtype float32 or bfloat16")
    return numbers * dtype.itemsize + int8_bytes


def smaller(config: Any, dtype: torch.dtype, free: int) -> str:
    """Advice for when the weights do not fit into `free` bytes."""
    if dtype.itemsize > 2 and weight_bytes(config, torch.bfloat16) <= free:
        return "use --dtype bfloat16"
    return f"choose a model of at most {free / 2e9:.1f} billion parameters, in bfloat16"


def _state(source: str) -> Any:
    """A cache key that changes with a folder's files; a hub id is read once per process."""
    if not os.path.isdir(source):
        return None
    with os.scandir(source) as files:
        stats = ((f.name, f.stat()) for f in files if f.is_file())
        return frozenset((name, s.st_ino, s.st_size, s.st_mtime_ns) for name, s in stats)


@lru_cache(maxsize=64)
def _config(source: str, state: Any) -> Any:
    folder = Path(source)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"{source} has no config.json; point at a Hugging Face model folder")
        if not any(folder.glob("*.safetensors")):
            raise UserError(
                f"{source} has no *.safetensors; pickled weights are refused: convert them"
            )
    try:
        config = AutoConfig.from_pretrained(str(source), trust_remote_code=False)
    except Exception as e:  # a config with wrong values may raise anything
        raise UserError(f"cannot read the model {source}: {first_line(e)}") from e
    if getattr(config, "auto_map", None):
        raise UserError(
            f"{source} needs remote code, which is never run; use a model transformers knows"
        )
    classes = config.architectures or []
    if classes and not any("CausalLM" in name or "LMHead" in name for name in classes):
        raise UserError(f"{source} is a {classes[0]}, not a causal LM; choose one that is")
    servable(config.get_text_config(), str(source))
    return config


@lru_cache(maxsize=64)
def _tokenizer(source: str, state: Any) -> Any:
    try:
        return AutoTokenizer.from_pretrained(str(source), trust_remote_code=False)
    except Exception as e:  # broken files may raise anything
        raise UserError(f"cannot read the tokenizer of {source}: {first_line(e)}") from e


def _check_device(dtype: str, device: str) -> None:
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is unknown; use one of {', '.join(DTYPES)}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError("no CUDA device is available; use --device cpu")
    if device.startswith("cuda") and (torch.device(device).index or 0) >= torch.cuda.device_count():
        raise UserError(f"{device} is not there: CUDA devices: {torch.cuda.device_count()}")


def _check_memory(config: Any, bare: str, name: str, dtype: str, device: str) -> None:
    # on a CPU the whole of a model is there before it is quantised
    stages = [config, read_config(bare)] if device == "cpu" else [config]
    need = max(weight_bytes(c, DTYPES[dtype]) for c in stages)
    free = memory.free_memory(torch.device(device))
    if need > free:
        raise UserError(
            f"the weights of {name} in {dtype} take {gib(need)} GiB and {gib(free)} GiB are free "
            f"on {device}: {smaller(config, DTYPES[dtype], free)}"
        )


def _read_weights(config: Any, bare: str, name: str, dtype: str, device: str) -> Any:
    silent = are_progress_bars_disabled()
    logging.disable_progress_bar()  # of loading weights; this also turns off those of downloads
    if not silent:
        enable_progress_bars()
    try:
        _check_memory(config, bare, name, dtype, device)
        module, report = AutoModelForCausalLM.from_pretrained(
            bare,
            config=config,
            dtype=DTYPES[dtype],
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # reported, as missing ones are, and refused below
            output_loading_info=True,
        )
    except (OSError, ValueError, SafetensorError) as e:
        raise UserError(f"cannot load {name}: {first_line(e)}") from e
    random = [*report["missing_keys"], *report["mismatched_keys"]]  # initialised by transformers
    if names := sorted(key if isinstance(key, str) else key[0] for key in random):
        raise UserError(
            f"cannot load {name}: {len(names)} of its tensors are missing or of another shape than "
            f"config.json says, such as {names[0]}: download or save the model again"
        )
    return module


def _sizes(config: Any) -> tuple[int, int]:
    """The number of weights in the model's dtype, and the bytes of the quantised ones."""
    quantised = getattr(config.get_text_config(), "quantised", "")
    return _counted(config.to_json_string(use_diff=False), bool(quantised))


@cache
def _counted(description: str, quantised: bool) -> tuple[int, int]:
    config = AutoConfig.for_model(**json.loads(description))
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    weights = [part.weight for part in int8.linears(module)] if quantised else []
    numbers = sum(p.numel() for p in module.parameters()) - sum(w.numel() for w in weights)
    return numbers, int8.int8_bytes(weights)
