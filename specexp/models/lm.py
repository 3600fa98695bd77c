"""Any transformers causal LM, run at given slots and positions over a static cache.

Targets and draft models are the same class. Contact with transformers is limited to this file,
cache.py and heads.py (fused.py knows how its layers are built). An explicit mask and explicit
positions are enough to run a ragged batch of trees through an unmodified model; a model for which
they are not is refused. Common families run fused (fused.py, native/).
"""

from __future__ import annotations

import copy
import json
import os
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakSet, WeakValueDictionary

import psutil
import torch
from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from specexp.errors import UserError, first_line, ran_out
from specexp.fast import cpu, fused, huge_pages
from specexp.models import int8, memory
from specexp.models.cache import SlotCache
from specexp.models.memory import PREFILL
from specexp.sequences import Draft, Sequences, Verdict
from specexp.tree import Tree, tree_mask

TREE = Tree((-1, 0, 0, 1, 1, 2, 3, 5))  # the draft on which modules are probed
ALIBI = {"bloom", "mpt"}  # always use ALiBi; Falcon's configs say whether they do
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass
class Forward:
    """logits [B, N, V]; hidden [B, N, taps*E], the requested hidden states, or None."""

    logits: Tensor
    hidden: Tensor | None = None


class Network(Protocol):
    """What an LM runs: a pass over tokens [B, n] at positions [B, n] that writes keys and values at
    the slots the cache is aimed at. It reads the slots that are visible [B, n, S]; if that is None,
    each token's own slot and all before it (`SlotCache.mask`). A token of -1 is padding: what is
    returned for it, and what its slot holds afterwards, is unspecified.

    Returns logits of the `last` places of each row (None: of all; 0: no logits) and, for all
    places, the hidden states `taps` concatenated (0: the embeddings; L: what the LM head reads).
    """

    @property
    def sparing(self) -> int:
        """Passes of up to this many tokens take no longer in a larger window: they read only the
        slots they see."""
        ...

    def __call__(
        self, tokens: Tensor, positions: Tensor, visible: Tensor | None, cache: SlotCache,
        taps: tuple[int, ...], last: int | None, **inputs: Tensor,
    ) -> tuple[Tensor | None, Tensor | None]: ...  # fmt: skip


@dataclass(frozen=True)
class Unfused:
    """A transformers module as it is. `inputs`: further inputs of the module."""

    module: Any
    sparing = 0

    def __call__(
        self, tokens: Tensor, positions: Tensor, visible: Tensor | None, cache: SlotCache,
        taps: tuple[int, ...], last: int | None, **inputs: Tensor,
    ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        mask = cache.mask(visible, self.module.dtype)
        net = self.module.base_model if last == 0 else self.module
        kept = {} if last == 0 else {"logits_to_keep": last or 0}
        out = net(
            input_ids=tokens.clamp(min=0), position_ids=positions, attention_mask=mask,
            past_key_values=cache, use_cache=True, output_hidden_states=bool(taps),
            **kept, **inputs,
        )  # fmt: skip
        hidden = torch.cat([out.hidden_states[t] for t in taps], -1) if taps else None
        return None if last == 0 else out.logits[:, -(last or 0) :], hidden


class LM:
    """A causal LM with one cache. `vocab` V: the tokens it may emit; ids past it are padding rows.

    `fault` [B]: NaN for rows in which this model has produced NaN or infinite logits, else 0.
    """

    def __init__(
        self, module: Any, name: str = "model", vocab: int | None = None,
        net: Network | None = None,
    ) -> None:  # fmt: skip
        self.module = module.eval().requires_grad_(False)
        self.name = name
        self.config = module.config.get_text_config()
        self.vocab = vocab or self.config.vocab_size
        if net is None and isinstance(module, PreTrainedModel):
            net = fused.of(module, name, self.vocab)
        self.net: Network = net or Unfused(module)
        self.context = reach(self.config)
        self.device, self.dtype = module.device, module.dtype
        servable(self.config, name)
        self.cache: SlotCache | None = None
        self.fault = torch.zeros(0)
        if isinstance(self.net, Unfused) and isinstance(module, PreTrainedModel):
            _probe(self)

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.module.parameters())

    @property
    def kv_bytes_per_token(self) -> int:
        return memory.kv_bytes(self.config, self.dtype.itemsize)

    def allocate(self, B: int, S: int) -> None:
        """Replace the cache by an empty one of B rows of S slots. Raises UserError if it does not
        fit."""
        self.cache = None
        need, free = B * S * self.kv_bytes_per_token, free_memory(self.device)
        if need > free:
            most = free * B // need
            smaller_batch = f"a batch of at most {most}, or " if most else ""
            raise UserError(
                f"the cache of {self.name} for batch {B} x {S} tokens needs {memory.gib(need)} GiB "
                f"and {memory.gib(free)} GiB are free: use {smaller_batch}fewer tokens"
            )
        self.cache = SlotCache(self.config.num_hidden_layers, B, S)
        self.fault = torch.zeros(B, device=self.device)

    @torch.inference_mode()
    def feed(
        self,
        seqs: Sequences,
        tokens: Tensor,
        slots: Tensor,
        positions: Tensor,
        visible: Tensor | None,
        taps: tuple[int, ...] = (),
        last: int | None = None,
        **inputs: Tensor,
    ) -> Forward:
        """One pass over tokens [B, n] of the rows of `seqs`, written at slots [B, n], at positions
        [B, n], reading the visible slots [B, n, S]; None: each token's own and all before it.
        `taps`: hidden states to return, 0 = embeddings; `last`: return logits of that many last
        places, by default of all; `inputs`: further inputs of the network."""
        logits, hidden = self._run(seqs, tokens, slots, positions, visible, taps, last, **inputs)
        assert logits is not None
        logits = logits if logits.shape[-1] == self.vocab else logits[..., : self.vocab]
        if code := cpu.by(logits, self.fault):
            B, n, V = logits.shape
            code.spoil(B, n * V, seqs.first, logits, self.fault)
        else:
            self.fault[seqs.rows].add_(logits.amax((1, 2)), alpha=0)  # 0 * inf and 0 * NaN are NaN
        return Forward(logits, hidden)

    @torch.inference_mode()
    def prefill(
        self, seqs: Sequences, start: int, stop: int, taps: tuple[int, ...] = ()
    ) -> Tensor | None:
        """Fill slots start..stop-1 with the tokens there; returns the tapped hidden states
        [B, stop-start, taps*E], or None.

        Shorter rows write padding past their length, which is never read and later overwritten.
        """
        B, S = seqs.tokens.shape
        slot = torch.arange(S, device=self.device)
        hidden = []
        for first in range(start, stop, PREFILL):
            at = slot[first : min(first + PREFILL, stop)].expand(B, -1)
            states = self._fill(seqs, at, taps)
            hidden += [] if states is None else [states]
        return torch.cat(hidden, 1) if hidden else None

    @torch.inference_mode()
    def refill(self, seqs: Sequences, count: int) -> None:
        """Feed the `count` tokens before each row's root again, in rows that may draft."""
        for first in range(-count, 0, PREFILL):
            back = torch.arange(first, min(first + PREFILL, 0), device=self.device)
            self._fill(seqs, seqs.places(back[None]))

    def follow(self, seqs: Sequences, count: int) -> Tensor:
        """Feed each row's last `count` tokens, root included, in rows that may draft; logits
        [B, 1, V] after the root."""
        slots = seqs.places(torch.arange(1 - count, 1, device=self.device)[None])
        tokens = seqs.drafting(seqs.read(slots), 0)
        return self.feed(seqs, tokens, slots, slots, None, last=1).logits

    def verify(self, seqs: Sequences, draft: Draft, taps: tuple[int, ...] = ()) -> Forward:
        """One pass over a draft: node i in slot length-1+i at position length-1+depth[i]."""
        nodes, visible = draft.nodes, None
        slots = positions = seqs.places(nodes.depth)
        if not nodes.is_chain:
            slots = seqs.places(torch.arange(draft.tokens.shape[1], device=self.device)[None])
            visible = tree_mask(slots[:, :1], seqs.tokens.shape[1], nodes.ancestors)
        return self.feed(seqs, draft.tokens, slots, positions, visible, taps)

    @torch.inference_mode()
    def keep(self, seqs: Sequences, verdict: Verdict) -> None:
        """Move a tree's accepted path to the front of the cache, before the commit."""
        assert self.cache is not None
        self.cache.keep(seqs, verdict)

    def _fill(self, seqs: Sequences, slots: Tensor, taps: tuple[int, ...] = ()) -> Tensor | None:
        """A pass without logits over the tokens at slots [B, n]; returns the tapped states."""
        tokens = seqs.drafting(seqs.read(slots), 0)
        return self._run(seqs, tokens, slots, slots, None, taps, 0)[1]

    def _run(
        self, seqs: Sequences, tokens: Tensor, slots: Tensor, positions: Tensor,
        visible: Tensor | None, taps: tuple[int, ...], last: int | None, **inputs: Tensor,
    ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        assert self.cache is not None, "allocate before the first pass"
        S = seqs.tokens.shape[1]
        self.cache.aim(seqs.rows, slots, S)
        if self.context < S:  # only nodes past the limit are clamped, and they are never emitted
            positions = positions.clamp(max=self.context - 1)
        return self.net(tokens, positions, visible, self.cache, taps, last, **inputs)


def _probe(lm: LM) -> None:
    """Refuse a module whose logits over a tree differ from its own; probed once per module."""
    if lm.module in _PROBED:
        return
    said = f"{lm.name} ({lm.config.model_type}) cannot be served; choose another model: "
    try:
        off = _off(lm)
    except Exception as e:  # a module that was not meant to be run so may raise anything
        if isinstance(e, torch.OutOfMemoryError) or ran_out(str(e)):
            raise
        raise UserError(f"{said}in {lm.dtype} it fails over a tree: {first_line(e)}") from e
    finally:
        lm.cache, lm.fault = None, torch.zeros(0)
    if off > (0.1 if lm.dtype == torch.bfloat16 else 0.01):  # far beyond rounding
        raise UserError(
            f"{said}its logits over a tree differ by {off:.1e} of their size from those of each "
            "path alone"
        )
    _PROBED.add(lm.module)


@torch.inference_mode()
def _off(lm: LM) -> float:
    """The relative difference between logits over a tree, after two prefixes in one batch, and the
    module's own logits for each path alone, where both are finite."""
    ids = torch.arange(21, device=lm.device) * 7919 % lm.vocab
    texts = [ids[:6].tolist(), ids[6:7].tolist()]
    seqs = Sequences.of(texts, 0, slack=2 * len(TREE), device=lm.device)
    draft = seqs.draft(TREE.nodes(lm.device), ids[7:].view(2, -1))
    lm.allocate(*seqs.tokens.shape)
    lm.prefill(seqs, 0, len(texts[0]) - 1)
    made = lm.verify(seqs, draft).logits
    alone, ours = [], []
    for leaf in set(range(len(TREE))) - set(TREE.parents):
        path = draft.nodes.ancestors[0, leaf].nonzero()[:, 0]
        for row, text in enumerate(texts):
            alone.append(torch.cat([seqs.tokens[row, : len(text) - 1], draft.tokens[row, path]]))
            ours.append(made[row, path])
    seen = lm.module(input_ids=pad_sequence(alone, batch_first=True), use_cache=False).logits
    pairs = zip(seen, alone, ours, strict=True)
    wanted = torch.cat([x[len(text) - len(o) : len(text), : lm.vocab] for x, text, o in pairs])
    given = torch.cat(ours)
    known = given.isfinite() & wanted.isfinite()
    return float((given - wanted)[known].float().norm() / wanted[known].float().norm())


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on the device."""
    if device.type == "cuda":
        reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reusable
    return psutil.virtual_memory().available


def reach(config: Any) -> int:
    """The longest sequence of a model with this config. For `longrope` that is the length up to
    which it uses its short factors: a longer pass would change the rotation of every row."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    long = (kind for kind in kinds if kind.get("rope_type") == "longrope")
    ends = (kind["original_max_position_embeddings"] for kind in long)
    names = "max_position_embeddings", "max_seq_len"
    said = (getattr(config, name, None) or 1 << 30 for name in names)
    return min([*said, *ends])


def servable(config: Any, name: str) -> None:
    """Refuse, by its config alone, a model whose state cannot be rolled back, or whose attention
    depends on distances in slots."""
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"{name} is an encoder-decoder; use a decoder-only causal LM")
    layers = getattr(config, "layer_types", None) or []
    kinds = set(layers) - {"full_attention"}
    window = getattr(config, "sliding_window", None)
    if window and window >= reach(config):
        kinds.discard("sliding_attention")
    elif window and not layers and getattr(config, "use_sliding_window", True):
        kinds = {"sliding_attention"}
    if "local" in (getattr(config, "attention_layers", None) or []):  # GPT-Neo's field
        kinds.add("local_attention")
    if kinds:
        raise UserError(
            f"{name} has {', '.join(sorted(kinds))} layers; rolling back needs full attention in "
            "every layer: choose a model without them"
        )
    if not hasattr(config, "num_hidden_layers") or not hasattr(config, "num_attention_heads"):
        raise UserError(f"{name} ({config.model_type}) has no attention cache to roll back")
    if config.model_type in ALIBI or getattr(config, "alibi", False):
        raise UserError(
            f"{name} has ALiBi in place of positions, which is wrong for drafts that branch: "
            "choose a model without it"
        )


def read_config(source: str | Path) -> Any:
    """The config of a folder or hub id. Raises UserError if the model is unsafe or cannot be
    served. For NAME+int8 (quantised.py) it has the field `quantised`, which is our own."""
    bare, how = int8.split(str(source))
    config = copy.deepcopy(_config(bare, _state(bare)))
    if how:
        int8.check(config, bare)
        config.get_text_config().quantised = how
        if not _sizes(config)[1]:
            raise UserError(f"{bare} has no nn.Linear to quantise: leave out +int8")
    return config


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
    made_as = config.architectures or []
    if made_as and not any("CausalLM" in name or "LMHead" in name for name in made_as):
        raise UserError(f"{source} is a {made_as[0]}, not a causal LM; choose one that is")
    servable(config.get_text_config(), str(source))
    return config


def read_tokenizer(source: str | Path) -> Any:
    """The tokenizer of a folder or hub id: the same object while its files do not change."""
    bare, _ = int8.split(str(source))
    return _tokenizer(bare, _state(bare))


@lru_cache(maxsize=64)
def _tokenizer(source: str, state: Any) -> Any:
    try:
        return AutoTokenizer.from_pretrained(str(source), trust_remote_code=False)
    except Exception as e:  # broken files may raise anything
        raise UserError(f"cannot read the tokenizer of {source}: {first_line(e)}") from e


def load(source: str | Path, name: str, dtype: str, device: str, vocab: int | None = None) -> LM:
    """Load weights, from safetensors only and without remote code; weights in use are shared.
    `source`: a folder or hub id, with or without `+int8` (quantised.py)."""
    config = read_config(source)
    bare, how = int8.split(str(source))
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is unknown; use one of {', '.join(DTYPES)}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError("no CUDA device is available; use --device cpu")
    if device.startswith("cuda") and (torch.device(device).index or 0) >= torch.cuda.device_count():
        raise UserError(f"{device} is not there: CUDA devices: {torch.cuda.device_count()}")
    silent = are_progress_bars_disabled()
    logging.disable_progress_bar()  # of loading weights; this also turns off those of downloads
    if not silent:
        enable_progress_bars()
    files = (f.stat() for f in Path(bare).glob("*.safetensors"))
    weights = tuple(sorted((s.st_ino, s.st_size, s.st_mtime_ns) for s in files))
    key = (str(source), weights, dtype, device)
    if key in _LOADED:
        return LM(_LOADED[key], name, vocab)
    try:
        there = [config, read_config(bare)] if device == "cpu" else [config]  # quantised after load
        need = max(weight_bytes(c, DTYPES[dtype]) for c in there)
        free = free_memory(torch.device(device))
        if need > free:
            raise UserError(
                f"the weights of {name} in {dtype} take {memory.gib(need)} GiB and "
                f"{memory.gib(free)} GiB are free on {device}: "
                f"{smaller(config, DTYPES[dtype], free)}"
            )
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
    odd = [*report["missing_keys"], *report["mismatched_keys"]]  # transformers made these random
    if names := sorted(key if isinstance(key, str) else key[0] for key in odd):
        raise UserError(
            f"cannot load {name}: {len(names)} of its tensors are missing or of another shape than "
            f"config.json says, such as {names[0]}: download or save the model again"
        )
    if how:
        int8.quantise(module, device)
    _LOADED[key] = module = module.to(device)
    huge_pages.settle(module)
    return LM(module, name, vocab)


def weight_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of the weights of a model, from its config alone; 0 (unknown) if its files are already
    quantised. Raises UserError for a dtype that `+int8` does not support."""
    if getattr(config, "quantization_config", None):
        return 0
    numbers, small = _sizes(config)
    if small and dtype not in int8.DTYPES:
        raise UserError("weights in float64 cannot be +int8: use --dtype float32 or bfloat16")
    return numbers * dtype.itemsize + small


def smaller(config: Any, dtype: torch.dtype, free: int) -> str:
    """Advice for when the weights do not fit into `free` bytes."""
    if dtype.itemsize > 2 and weight_bytes(config, torch.bfloat16) <= free:
        return "use --dtype bfloat16"
    return f"choose a model of at most {free / 2e9:.1f} billion parameters, in bfloat16"


def _sizes(config: Any) -> tuple[int, int]:
    """The number of weights in the model's dtype, and the bytes of the quantised ones."""
    how = getattr(config.get_text_config(), "quantised", "")
    return _counted(config.to_json_string(use_diff=False), bool(how))


@cache
def _counted(described: str, small: bool) -> tuple[int, int]:
    config = AutoConfig.for_model(**json.loads(described))
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    weights = [part.weight for part in int8.linears(module)] if small else []
    numbers = sum(p.numel() for p in module.parameters()) - sum(w.numel() for w in weights)
    return numbers, int8.int8_bytes(weights)


_PROBED: WeakSet[Any] = WeakSet()  # modules that passed the probe
_LOADED: WeakValueDictionary[Any, Any] = WeakValueDictionary()  # modules still in use
