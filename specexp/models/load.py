"""From a folder, a hub id or a module in memory to an LM.

Only this file chooses the network that runs a module, and tests it.
"""

import copy
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, wraps
from math import isnan
from pathlib import Path
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
import transformers  # imports a class when it is named: model classes take a second
from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
from torch.fx.experimental import _config as meta
from transformers.utils import logging as transformers_logging

from specexp import fitting
from specexp.errors import UserError, first_line, ran_out, refusing, warn_once
from specexp.models import int8, memory, recurrent, servable
from specexp.models.heads import layouts
from specexp.models.lm import LM, Unfused, network, shorten_head
from specexp.models.memory import gib, layers
from specexp.ops import op
from specexp.sequences import Sequences
from specexp.tree import Tree

log = logging.getLogger("specexp")
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in memory.DTYPES}
LIMITS = re.compile(  # names of lengths in a config past which a model may behave otherwise
    "window|chunk|local|topk|keep|floor|span|block_size|budget|lengths?$|original_max_position"
)
WORK = 6e11  # weights times tokens that a probe on a CPU may read
TREE = Tree((-1, 0, 0, 1, 1, 2, 3, 5))  # the draft on which modules are probed
# modules in use, by source, files, dtype and device
_IN_USE: WeakValueDictionary[Any, Any] = WeakValueDictionary()
_ON_META: dict[tuple[str, torch.dtype], Any] = {}  # the last modules without weights, by config
MOST_ON_META = 16  # a deep one takes half a second to make, and some MB
PROBED: WeakSet[Any] = WeakSet()  # modules whose logits over a tree are their own


def _kept(read: Callable[[str], Any]) -> Callable[[str | Path], Any]:
    """A function of a folder or hub id whose results are kept: of a folder while its files do not
    change, of a hub id for good. It takes names with `+int8` too, and reads the same."""
    by_version = lru_cache(maxsize=64)(lambda bare, version: read(bare))

    @wraps(read)
    def reading(source: str | Path) -> Any:
        bare, _ = fitting.split(str(source))
        return by_version(bare, _version(bare))

    return reading


def read_config(source: str | Path) -> Any:
    """The config of a folder or hub id, a copy of the caller's own.

    For `NAME+int8` (int8.py) it has the field `quantised`, which transformers does not know.
    Raises UserError if the model is unsafe or cannot be served.
    """
    bare, suffix = fitting.split(str(source))
    config = copy.deepcopy(_config(source))
    if suffix:
        int8.check(config, bare)
        config.get_text_config().quantised = suffix
        if not _sizes(config)[1]:
            raise UserError(f"{bare} has no nn.Linear to quantise: leave out +int8")
    return config


@_kept
def read_tokenizer(source: str) -> Any:
    """The tokenizer of a folder or hub id: the same object while its files do not change."""
    absent = UserError(f"{source} has no tokenizer.json: save its tokenizer there, too")
    with layouts.hub(source), refusing(f"cannot read the tokenizer of {source}", servable.AGAIN):
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        except ValueError as e:
            if "instantiate the backend tokenizer" not in str(e):
                raise
            raise absent from e
        if tokenizer.get_vocab().keys() <= {*tokenizer.all_special_tokens}:  # made out of nothing
            raise absent
    return tokenizer


@_kept
def read_generation(source: str) -> Any:
    """The generation config of a folder or hub id: generation_config.json, and config.json only
    where there is none, as in transformers."""
    with layouts.hub(source), refusing(f"cannot read generation_config.json of {source}"):
        try:
            return transformers.GenerationConfig.from_pretrained(source)
        except OSError:
            if (Path(source) / "generation_config.json").exists():
                raise
            named = {"config_file_name": "config.json", "_from_model_config": True}
            return transformers.GenerationConfig.from_pretrained(source, **named)


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
    bare, suffix = fitting.split(str(source))
    device = str(torch.empty(0, device=device).device)  # cuda is cuda:0
    key = (str(source), _version(bare), dtype, device)
    if (module := _IN_USE.get(key)) is None:
        module = _read_weights(config, bare, name, dtype, device)
        if suffix:
            int8.quantise(module, device)
        module = module.to(device)
        if method := int8.method(config):
            int8.unpack(module, DTYPES[dtype], f"cannot load {name}, quantised by {method}")
        _IN_USE[key] = module
        place_weights(module)
    return of_module(module, name, vocab)


def of_module(module: Any, name: str = "model", vocab: int | None = None) -> LM:
    """The LM of a causal LM in memory, run by the fastest network that agrees with the module.

    Args:
        module: a transformers causal LM, or what looks like one; it is put in evaluation mode and
            needs no gradients from then on.
        name: what messages and tables call it.
        vocab: the tokens it may emit; None: as many as it has logits.

    Raises:
        UserError: the module cannot be driven over trees of drafts.
    """
    module.eval().requires_grad_(False)
    config = module.config.get_text_config()
    servable.check_servable(config, name)
    vocab = vocab or getattr(config, "unpadded_vocab_size", None) or config.vocab_size
    with _refusing(name, module):
        lm = LM(module, name, vocab, network(module, name, vocab))
    if any(layer.has_state for layer in lm.layers) and not lm.net.parts:
        raise UserError(
            f"{name} ({config.model_type}) keeps its layers' states where they cannot be taken "
            "back: choose another model"
        )
    unlike = isinstance(lm.net, Unfused) or any(layer.span for layer in lm.layers)
    if unlike and isinstance(module, transformers.PreTrainedModel) and module not in PROBED:
        probe(lm.apart())
    return lm


@op
def place_weights(module: Any) -> None:
    """Move a module's weights to memory from which passes read them sooner; by default, nowhere."""


def probe(lm: LM) -> None:
    """Raise UserError if the LM's logits over a tree are not its module's own of each path. Its
    cache is replaced."""
    with _refusing(lm.name, lm.module):
        off = difference(lm, probe_length(lm))
    if isnan(off):
        raise UserError(f"{lm.name} cannot be served: its logits are NaN; check weights and config")
    if off > (0.1 if lm.dtype == torch.bfloat16 else 0.01):  # far beyond rounding
        apart = f"differ by {off:.1e} of their size from those of each path alone"
        raise _unservable(lm.name, lm.module, f"its logits over a tree {apart}")
    PROBED.add(lm.module)


@contextmanager
def _refusing(name: str, module: Any) -> Iterator[None]:
    """Raise UserError for any exception of a module, which may not be made to run over trees."""
    try:
        yield
    except Exception as e:
        if isinstance(e, torch.OutOfMemoryError | UserError) or ran_out(str(e)):
            raise
        seen = f"in {module.dtype} it fails over a tree: {first_line(e)}"
        raise _unservable(name, module, seen, e) from e


def _unservable(name: str, module: Any, seen: str, error: Exception | None = None) -> UserError:
    kind = f"{name} ({module.config.get_text_config().model_type})"
    why = "; ".join(filter(None, (servable.cause(module, error), seen)))
    return UserError(f"{kind} cannot be served; choose another model: {why}")


def probe_length(lm: LM) -> int:
    """The tokens of the longer prefix of a probe: enough to pass every length in the config at
    which the model may behave otherwise (a window, a chunk, ...), if that many are read in
    seconds."""
    sizes = ((k, v) for k, v in servable.fields(lm.config.to_dict()) if type(v) is int)
    reached = range(6, lm.context - 3 * len(TREE))
    within = {k: v for k, v in sizes if v in reached and LIMITS.search(k)}
    enough = max(within.values(), default=0) + 6
    most = int(WORK * (50 if lm.device.type == "cuda" else 1) / lm.parameters)
    if enough > most:
        log.warning(
            "%s was compared with its module on %d tokens: %s of its config lies beyond",
            lm.name, most, ", ".join(k for k, v in within.items() if v > most - 6),
        )  # fmt: skip
    return max(6, min(enough, most))


@torch.inference_mode()
def difference(lm: LM, length: int) -> float:
    """The relative difference between an LM's logits in two rounds over a tree and those of its
    module, which reads each path alone and without a cache; NaN if that has logits that are NaN,
    infinite if one has infinite logits where the other has not, else those aside.

    The batch has a prefix of `length` tokens and one of a single token. The first round accepts the
    tree's deepest path, so that keys are moved. In the longer row only that path is compared, since
    each costs a pass over its text.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(lm.vocab, (length + 1 + 4 * len(TREE),), generator=generator).to(lm.device)
    prefixes = [ids[:length].tolist(), ids[length : length + 1].tolist()]
    drafted = ids[length + 1 :].view(2, 2, -1)[:, :, 1:]  # [rounds, rows, nodes but the root]
    seqs = Sequences.of(prefixes, 2 * len(TREE), slack=2 * len(TREE), device=lm.device)
    nodes = TREE.nodes(lm.device)
    leaves = [node for node, children in enumerate(TREE.degrees) if not children]
    paths = [nodes.ancestors[0, leaf].nonzero()[:, 0] for leaf in leaves]
    deepest = max(paths, key=len)
    lm.room = len(TREE)
    lm.allocate(*seqs.tokens.shape)
    lm.prefill(seqs, 0, length - 1)
    ours, reference = [], []
    for tokens in drafted:
        draft = seqs.draft(nodes, tokens)
        logits = lm.verify(seqs, draft).logits
        for row, text in enumerate(seqs.tokens):
            before = text[: int(seqs.length[row]) - 1]
            for path in [deepest] if row == 0 else paths:
                whole = torch.cat([before, draft.tokens[row, path]])[None]
                alone = lm.module(input_ids=whole, use_cache=False, logits_to_keep=len(path))
                reference.append(alone.logits[0, -len(path) :, : lm.vocab])
                ours.append(logits[row, path])
        last = torch.full((2,), len(deepest) - 1, device=lm.device)
        verdict = draft.judged(deepest.expand(2, -1), last, last)
        lm.keep(seqs, draft, verdict)
        seqs.commit(verdict)
    own, true = torch.cat(ours), torch.cat(reference)
    if true.isnan().any():
        return torch.nan
    finite = own.isfinite()
    if not torch.equal(finite, true.isfinite()):
        return torch.inf
    return float((own - true)[finite].float().norm() / true[finite].float().norm())


def weight_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of the weights of a model, from its config alone; 0 (unknown) if its files are already
    quantised. Raises UserError for a dtype that `+int8` does not support."""
    if int8.method(config):
        return 0
    numbers, int8_bytes, _ = _sizes(config)
    if int8_bytes and dtype not in int8.DTYPES:
        raise UserError("weights in float64 cannot be +int8: use --dtype float32 or bfloat16")
    return numbers * dtype.itemsize + int8_bytes


def loaded_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of the weights and of what else is made with a module: masks and tables of positions,
    which in old models grow with the context, some with its square."""
    return weight_bytes(config, dtype) + (0 if int8.method(config) else _sizes(config)[2])


def state_bytes(config: Any, dtype: torch.dtype, room: int, refed: int) -> int:
    """Bytes of the states that a model keeps of a row, from its config alone. `room`, `refed`: see
    `LM`."""
    if not any(layer.has_state for layer in layers(config)):
        return 0
    module = _without_weights(config, dtype)
    asks: Any = meta  # where the indexer of Qwen 4 asks which numbers are not 0: all
    refused = _refusing(config.name_or_path or "the model", module)
    with refused, asks.patch(meta_nonzero_assume_all_nonzero=True):
        return recurrent.state_bytes(Unfused.of(module).parts, room, refed)


def _version(source: str) -> Any:
    """A cache key that changes with a folder's files; a hub id is read once per process."""
    if not os.path.isdir(source):
        return None
    with os.scandir(source) as files:
        stats = ((f.name, f.stat()) for f in files if f.is_file())
        return frozenset((name, s.st_ino, s.st_size, s.st_mtime_ns) for name, s in stats)


@_kept
def _config(source: str) -> Any:
    folder, what = Path(source), f"cannot read the model {source}"
    if folder.is_dir():
        servable.check_files(folder)
    with refusing(what) if folder.is_dir() else layouts.from_hub(source):
        described, _ = transformers.PreTrainedConfig.get_config_dict(source)
    with refusing(what):  # wrong values may raise anything
        servable.check_config_json(described, source)
        kind = described.get("model_type")
        if kind not in transformers.CONFIG_MAPPING and (heads := layouts.kind_in(folder)):
            own = f"{layouts.DRAFTED_BY[heads]}:{source}"
            raise UserError(f"{source} are {heads} heads, not a model: name them as {own}")
        if "auto_map" in described and kind not in transformers.CONFIG_MAPPING:
            raise UserError(
                f"{source} needs remote code, which is never run; use a model transformers knows"
            )
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
        servable.check_servable(config.get_text_config(), source)
        servable.check_count(folder, config.get_text_config().num_hidden_layers)
    classes = config.architectures or []
    if classes and not any("CausalLM" in name or "LMHead" in name for name in classes):
        raise UserError(f"{source} is a {classes[0]}, not a causal LM; choose one that is")
    if (method := int8.method(config)) and method != int8.UNNAMED:
        from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as QUANTISED

        if not {method, f"{method}_4bit"} & QUANTISED.keys():
            raise UserError(f"{source} is quantised by {method}, which transformers does not know")
    if method == "mxfp4":
        config.quantization_config["dequantize"] = True  # else its kernels are fetched from a hub
    return config


def tokens_of(tokenizer: Any, text: str, **how: bool) -> list[int]:
    """The tokens of a text. Raises UserError for what is no text, or if the tokenizer fails."""
    if lone := re.search("[\ud800-\udfff]", text):
        byte = ord(lone[0]) - 0xDC00  # so Python keeps a byte that is no UTF-8
        what = f"the byte 0x{byte:02x}" if 0x80 <= byte <= 0xFF else "half a surrogate pair"
        before = text[: lone.start()][-20:]
        raise UserError(f"a prompt holds {what} after {before!r}: that is no UTF-8")
    if isinstance(tokenizer, transformers.PreTrainedTokenizerBase):
        how["verbose"] = False  # too long a prompt is refused where the context is known
    with refusing("the tokenizer fails on a prompt"):
        return list(tokenizer(text, **how).input_ids)


def text_of(tokenizer: Any, tokens: Sequence[int], **how: bool) -> str:
    """The text of tokens. Raises UserError if the tokenizer fails."""
    with refusing("the tokenizer fails on tokens"):
        return str(tokenizer.decode(tokens, **how))


def _check_device(dtype: str, device: str) -> None:
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is unknown; use one of {', '.join(DTYPES)}")
    if not device.startswith("cuda"):
        return
    if why := memory.no_cuda():
        raise UserError(f"{why}; use --device cpu")
    if (torch.device(device).index or 0) >= torch.cuda.device_count():
        raise UserError(f"{device} is not there: CUDA devices: {torch.cuda.device_count()}")
    if dtype == "bfloat16":
        with torch.cuda.device(device):
            if not torch.cuda.is_bf16_supported(including_emulation=False):
                warn_once("this GPU only emulates bfloat16, so timings say nothing of others: "
                          "use --dtype float32")  # fmt: skip


def _check_memory(config: Any, bare: str, name: str, dtype: str, device: str) -> None:
    # on a CPU the whole of a model is there before it is quantised
    stages = [config, read_config(bare)] if device == "cpu" else [config]
    need = max(loaded_bytes(c, DTYPES[dtype]) for c in stages)
    free = memory.free_memory(torch.device(device))
    if need > free:
        raise UserError(
            f"the weights of {name} in {dtype} take {gib(need)} GiB and {gib(free)} GiB are free "
            f"on {device}: {memory.advice(loaded_bytes(config, torch.bfloat16), dtype, free)}"
        )


def _read_weights(config: Any, bare: str, name: str, dtype: str, device: str) -> Any:
    silent = are_progress_bars_disabled()
    transformers_logging.disable_progress_bar()  # of loading weights, and thereby of downloads
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # a table of tensors, of which a line is made below
    if not silent:
        enable_progress_bars()
    if "USE_HUB_KERNELS" not in os.environ:
        from transformers.integrations import hub_kernels

        hub_kernels._kernels_enabled = False  # else the package `kernels` fetches code that runs
    try:
        _check_memory(config, bare, name, dtype, device)
        module, report = transformers.AutoModelForCausalLM.from_pretrained(
            bare,
            config=config,
            dtype=DTYPES[dtype],
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # reported, as missing ones are, and refused below
            output_loading_info=True,
        )
        shorten_head(module)
    except Exception as e:  # of the library that reads the weights: anything
        if isinstance(e, UserError) or ran_out(str(e)):
            raise
        raise UserError(f"cannot load {name}: {first_line(e)}") from e
    finally:
        transformers_logging.set_verbosity(verbosity)
    random = [*report["missing_keys"], *report["mismatched_keys"]]  # initialised by transformers
    if names := sorted(key if isinstance(key, str) else key[0] for key in random):
        raise UserError(
            f"cannot load {name}: {len(names)} of its tensors are missing or of another shape than "
            f"config.json says, such as {names[0]}: {servable.AGAIN}"
        )
    if unused := sorted(report["unexpected_keys"]):
        log.warning("%s: its config has no place for %d tensors of its files, such as %s",
                    name, len(unused), unused[0])  # fmt: skip
    return module


def _without_weights(config: Any, dtype: torch.dtype) -> Any:
    """The model on `meta`. Its experts run as those do whose shapes depend on no routing."""
    described = config.to_json_string(use_diff=False), dtype
    if (module := _ON_META.pop(described, None)) is None:
        config = copy.deepcopy(config)
        config._experts_implementation = "batched_mm"
        what = f"config.json of {config.name_or_path or 'the model'} describes no model"
        refused = refusing(f"{what} that can be built")
        with servable.few_tensors(what), torch.device("meta"), refused:
            module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    _ON_META[described] = module
    if len(_ON_META) > MOST_ON_META:
        del _ON_META[next(iter(_ON_META))]
    return module


def _sizes(config: Any) -> tuple[int, int, int]:
    """The number of weights in the model's dtype, the bytes of quantised ones and of buffers."""
    module = _without_weights(config, torch.float32)
    quantised = getattr(config.get_text_config(), "quantised", "")
    weights = [part.weight for part in int8.linears(module)] if quantised else []
    gone = {id(w) for w in weights}  # but for an embedding to which an LM head was tied
    gone -= {id(part.weight) for part in module.modules() if isinstance(part, torch.nn.Embedding)}
    numbers = sum(p.numel() for p in module.parameters() if id(p) not in gone)
    return numbers, int8.int8_bytes(weights), sum(buffer.nbytes for buffer in module.buffers())
