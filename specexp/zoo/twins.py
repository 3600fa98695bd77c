"""Pairs of random models in real shapes: true costs at any scale, without a download.

The target has a real architecture and random weights; the draft is the same model cut off after its
first layers. The deep layers of the target are damped (what they add to the residual stream is
scaled by one factor), so the draft agrees with it as often as asked. Costs are those of trained
models of the shape, acceptance is what was chosen, and the text is noise: no token is likelier than
another, and nothing comes back for a lookup to find.

**alpha** is the acceptance of a guess in a chain, greedy, given that the guesses before it were
accepted: the share of positions of the target's own greedy text where the draft, given that text,
has the same most probable token. Damping is found by bisection on it, with the weights and the
dtype that are written; of shapes too large to run here, on a narrow stand-in of the same depth.

This file does not know how models are named or loaded elsewhere (`shelf.py`, `lab/build.py`).
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from specexp.errors import UserError
from specexp.lm import DTYPES, free_memory
from specexp.zoo import cards, shelf
from specexp.zoo.recipes import END, VOCABULARY


@dataclass(frozen=True)
class Shape:
    """A Llama. `draft`: how many of its layers the draft keeps; `tied`: head = embeddings."""

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    draft: int
    vocab: int = 128_256
    tied: bool = False
    context: int = 8192

    def config(self, dtype: str = "bfloat16") -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocab, hidden_size=self.width, intermediate_size=self.hidden,
            num_hidden_layers=self.layers, num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads, head_dim=self.width // self.heads,
            max_position_embeddings=self.context, rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
            tie_word_embeddings=self.tied, bos_token_id=END, eos_token_id=END, pad_token_id=END,
            architectures=["LlamaForCausalLM"], dtype=dtype,
        )  # fmt: skip

    def weights(self) -> dict[str, torch.Size]:
        """Every weight's name and size, in the order of the model."""
        with torch.device("meta"):
            return {n: w.shape for n, w in LlamaForCausalLM(self.config()).named_parameters()}

    @property
    def parameters(self) -> int:
        return sum(size.numel() for size in self.weights().values())


SHAPES = {
    "200M": Shape(12, 1024, 2816, 16, 4, draft=2, vocab=32_768),
    "1B": Shape(16, 2048, 8192, 32, 8, draft=2, tied=True, context=131_072),  # Llama 3.2
    "8B": Shape(32, 4096, 14_336, 32, 8, draft=4),  # Llama 3
    "70B": Shape(80, 8192, 28_672, 64, 8, draft=10),  # Llama 3
}
OWN = 2_000_000_000  # parameters up to which a shape is calibrated on itself
MILDEST, STRONGEST = 4.0, 1e-4  # damping: factors on what deep layers write


def make(
    params: str,
    alpha: float | None = None,
    out: Path | None = None,
    damp: float | None = None,
    dtype: str = "bfloat16",
    seed: int = 0,
    vocab: int | None = None,
    force: bool = False,
    shapes: Mapping[str, Shape] = SHAPES,
) -> dict[str, Any]:
    """Write `twin-PARAMS-target` and `twin-PARAMS-draft` under `out` (default: `shelf.twins()`).

    alpha is calibrated unless `damp` gives the factor itself; vocab: rows of the embeddings and the
    head, by default those of the real shape. Returns the target's facts, `zoo.json`. Raises
    UserError before anything is written for impossible requests, too little memory or disk.
    """
    shape = _shape(params, vocab, shapes)
    _check(alpha, damp, dtype)
    out = out or shelf.twins()
    name = f"twin-{params.lower()}"
    places = {out / f"{name}-draft": shape.draft, out / f"{name}-target": shape.layers}
    for folder in places:
        if folder.exists() and not force:
            raise UserError(f"{folder} exists; write it anew with --force, or elsewhere with --out")
    _room(params, shape, out, dtype, alpha)
    about: dict[str, Any] = {"asked": alpha, "damp": damp}
    if damp is None:
        assert alpha is not None
        about = calibrated(shape, alpha, dtype, seed)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".twin-", suffix=".part", dir=out) as work:
        total = sum(_bytes(replace(shape, layers=layers), dtype) for layers in places.values())
        with tqdm(total=total, desc="writing", unit="B", unit_scale=True) as bar:
            for folder, layers in places.items():
                part = Path(work) / folder.name
                write(shape, layers, part, about["damp"], dtype, seed, bar.update)
                facts = _facts(name, shape, layers, about, dtype, seed)
                cards.write(part, facts, _card(facts))
        for folder in places:  # the target last: where it is, the pair is whole
            if folder.exists():
                folder.replace(Path(work) / f"old-{folder.name}")
            (Path(work) / folder.name).replace(folder)
    return facts


# the weights


def draw(name: str, size: torch.Size, dtype: torch.dtype, seed: int, damp: float = 1.0) -> Tensor:
    """One weight, a function of the seed and its name alone.

    Matrices are normal with 1 / sqrt(fan in), so that what they make has the size of what they
    read, whatever the width, but for three gains. Queries and keys: 1.2 each, so that attention
    rests on a few tokens (scores spread by 1.4) and greedy text neither circles nor amplifies
    rounding. Writing into the residual stream: 8, so that the embedding of the last token does not
    show through tied heads and repeat it. Head and embeddings: 3.4, so that the law over 4096
    tokens has the entropy of a language model's (ln V - 3.4² / 2, about 2.5 nats). Rows that no
    text may hold, the end of text and what the tokenizer lacks, are a quarter of that: computed in
    full, never the most probable.
    """
    if len(size) == 1:
        return torch.ones(size, dtype=dtype)
    kind = name.split(".")[-2]
    ends = kind in ("embed_tokens", "lm_head")
    gain = {"q_proj": 1.2, "k_proj": 1.2, "o_proj": 8 * damp, "down_proj": 8 * damp}.get(kind, 1.0)
    key = hashlib.sha256(f"{seed} {name}".encode()).digest()
    rng = torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))
    spread = (3.4 if ends else gain) / math.sqrt(size[1])
    weight = torch.empty(size, dtype=dtype).normal_(0, spread, generator=rng)
    if ends:
        weight[VOCABULARY:] *= 0.25
        weight[END] *= 0.25
    return weight


def _layer(name: str) -> int:
    """The layer a weight belongs to; -1 for embeddings, norm and head."""
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else -1


def _deep(name: str, shape: Shape) -> bool:
    return _layer(name) >= shape.draft and name.split(".")[-2] in ("o_proj", "down_proj")


def write(
    shape: Shape, layers: int, folder: Path, damp: float, dtype: str, seed: int,
    wrote: Callable[[int], Any] = lambda n: None,
) -> None:  # fmt: skip
    """The first `layers` layers as a Hugging Face folder, one shard a layer, one in memory."""
    folder.mkdir()
    cut = replace(shape, layers=layers)
    shards = [list(part) for _, part in groupby(cut.weights().items(), lambda w: _layer(w[0]))]
    places = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {
            name: draw(name, size, DTYPES[dtype], seed, damp if _deep(name, shape) else 1.0)
            for name, size in shard
        }
        save_file(tensors, folder / file, {"format": "pt"})
        places |= dict.fromkeys(tensors, file)
        wrote(sum(weight.nbytes for weight in tensors.values()))
    index = {"metadata": {"total_size": _bytes(cut, dtype)}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    cut.config(dtype).save_pretrained(folder)
    GenerationConfig(bos_token_id=END, eos_token_id=END, pad_token_id=END).save_pretrained(folder)
    _tokenizer(folder, shape.context)


def _tokenizer(folder: Path, context: int) -> None:
    """The zoo's, which knows 4096 tokens."""
    zoo = shelf.find("target-10m", shelf.SHELF)
    shutil.copyfile(zoo / "tokenizer.json", folder / "tokenizer.json")
    options = json.loads((zoo / "tokenizer_config.json").read_text())
    options["model_max_length"] = context
    (folder / "tokenizer_config.json").write_text(json.dumps(options, indent=1))


# damping


def calibrated(shape: Shape, alpha: float, dtype: str, seed: int) -> dict[str, Any]:
    """The factor that gives alpha; agreement and text with it, on prompts not seen before."""
    trial = _trial(shape)
    model = _drawn(trial, dtype, seed)
    with tqdm(desc=f"damping for alpha {alpha}", unit="try") as bar:

        def measure(damp: float) -> float:
            _damp(model, trial, damp, seed)
            seen = agreement(model, trial.draft, rows=32, new=64, seed=0)[1].float().mean().item()
            bar.set_postfix_str(f"{seen:.3f} at {damp:.3g}")
            bar.update()
            return seen

        damp = bisect(measure, alpha)
    _damp(model, trial, damp, seed)
    text, agrees = agreement(model, trial.draft, rows=16, new=128, seed=1)
    reached = agrees.float().mean().item()
    if abs(reached - alpha) > 0.1:
        raise UserError(f"alpha {alpha} is out of reach of this shape: damping gives {reached:.3f}")
    return {
        "asked": alpha, "reached": round(reached, 4),
        "error": round(math.sqrt(reached * (1 - reached) / agrees.numel()), 4),
        "tokens": agrees.numel(), "damp": damp,
        "on": "the model itself" if trial == shape else f"as many layers {trial.width} wide",
        "text": variety(text),
    }  # fmt: skip


def bisect(measure: Callable[[float], float], alpha: float, tries: int = 12) -> float:
    """The factor at which a measure that falls with it is alpha, within 0.003 or the last try."""
    low, high = math.log(STRONGEST), math.log(MILDEST)
    for _ in range(tries):
        middle = (low + high) / 2
        seen = measure(math.exp(middle))
        if abs(seen - alpha) < 0.003:
            break
        low, high = (middle, high) if seen > alpha else (low, middle)
    return float(f"{math.exp(middle):.4g}")


@torch.inference_mode()
def agreement(model: Any, draft: int, rows: int, new: int, seed: int) -> tuple[Tensor, Tensor]:
    """The model's greedy text after prompts of 16 drawn tokens, [rows, new], and where its first
    `draft` layers, given that text, would say the same, [rows, new] bool."""
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randint(END + 1, VOCABULARY, (rows, 16), generator=rng)
    cache, text, agrees = None, [], []
    for _ in range(new):
        seen = model(tokens, past_key_values=cache, output_hidden_states=True, logits_to_keep=1)
        early = model.lm_head(model.model.norm(seen.hidden_states[draft][:, -1:]))  # [rows, 1, V]
        guess, tokens = (x[..., :VOCABULARY].argmax(-1) for x in (early, seen.logits))
        cache = seen.past_key_values
        text.append(tokens)
        agrees.append(guess == tokens)
    return torch.cat(text, 1), torch.cat(agrees, 1)


def variety(text: Tensor) -> dict[str, float]:
    """Of texts [rows, n]: `distinct`, different tokens of a row over its length; `repeated`, the
    share of 4-grams that the row held before; `commonest`, the share of one token in all."""
    rows = text.tolist()
    grams = [[tuple(row[i : i + 4]) for i in range(len(row) - 3)] for row in rows]
    return {
        "distinct": round(sum(len(set(row)) for row in rows) / text.numel(), 4),
        "repeated": round(1 - sum(len(set(g)) for g in grams) / sum(map(len, grams)), 4),
        "commonest": round(text.flatten().bincount().max().item() / text.numel(), 4),
    }


def _trial(shape: Shape) -> Shape:
    """What is calibrated: the shape itself, or as many layers 512 wide, which agree as often."""
    if shape.parameters <= OWN:
        return shape
    return replace(shape, width=512, hidden=1792, heads=8, kv_heads=2, vocab=VOCABULARY)


def _drawn(shape: Shape, dtype: str, seed: int) -> Any:
    """The undamped target, in memory."""
    with torch.random.fork_rng():
        model: Any = LlamaForCausalLM._from_config(shape.config(dtype), dtype=DTYPES[dtype])
    for name, weight in model.named_parameters():
        weight.data.copy_(draw(name, weight.shape, weight.dtype, seed))
    return model.eval().requires_grad_(False)


def _damp(model: Any, shape: Shape, damp: float, seed: int) -> None:
    for name, weight in model.named_parameters():
        if _deep(name, shape):
            weight.copy_(draw(name, weight.shape, weight.dtype, seed, damp))


# what is refused, and what is said


def _shape(params: str, vocab: int | None, shapes: Mapping[str, Shape]) -> Shape:
    named = {name.lower(): shape for name, shape in shapes.items()}
    if params.lower() not in named:
        raise UserError(f"no twin of {params!r} parameters: there are {', '.join(shapes)}")
    shape = named[params.lower()]
    if vocab is not None and vocab < VOCABULARY:
        raise UserError(f"vocab is {vocab}; the tokenizer needs {VOCABULARY} or more")
    return replace(shape, vocab=vocab or shape.vocab)


def _check(alpha: float | None, damp: float | None, dtype: str) -> None:
    if (alpha is None) == (damp is None):
        raise UserError("give either --alpha, the acceptance wanted, or --damp, the factor itself")
    if alpha is not None and not 0 < alpha < 1:
        raise UserError(f"alpha is {alpha}; it must be between 0 and 1, both excluded")
    if damp is not None and not 0 < damp <= MILDEST:
        raise UserError(f"damp is {damp}; it must be above 0 and at most {MILDEST:g}")
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is unknown; use one of {', '.join(DTYPES)}")


def _bytes(shape: Shape, dtype: str) -> int:
    return shape.parameters * DTYPES[dtype].itemsize


def _room(params: str, shape: Shape, out: Path, dtype: str, alpha: float | None) -> None:
    """Refuse what would not fit: both models on disk; in memory a shard twice, or the trial."""
    disk = _bytes(shape, dtype) + _bytes(replace(shape, layers=shape.draft), dtype)
    there = next(folder for folder in (out.resolve(), *out.resolve().parents) if folder.exists())
    ends = shape.vocab * shape.width * (1 if shape.tied else 2)
    memory = 2 * ends * DTYPES[dtype].itemsize
    if alpha is not None:
        memory = max(memory, 2 * _bytes(_trial(shape), dtype))
    free = {"disk": shutil.disk_usage(there).free, "memory": free_memory(torch.device("cpu"))}
    for what, need in (("disk", disk), ("memory", memory)):
        if need > free[what]:
            raise UserError(
                f"twin {params} in {dtype} needs {need:,} bytes of {what} and {free[what]:,} are "
                "free: choose a smaller shape, or another place with --out"
            )


def _facts(
    name: str, shape: Shape, layers: int, about: Mapping[str, Any], dtype: str, seed: int
) -> dict[str, Any]:
    """The content of `zoo.json`; `shelf.py` reads the first lines of it."""
    cut, whole = replace(shape, layers=layers), layers == shape.layers
    return {
        "name": name if whole else f"{name}-draft",
        "role": "target" if whole else "draft",
        "target": None if whole else name,
        "parameters": cut.parameters,
        "layers": layers,
        "width": shape.width,
        "about": "Random weights in a real shape, to measure what it costs."
        if whole else f"The first {layers} layers of {name}: the same weights, norm and head.",
        "shape": asdict(cut),
        "bytes": _bytes(cut, dtype),
        "dtype": dtype,
        "seed": seed,
        "agreement": dict(about),
    }  # fmt: skip


def _card(facts: Mapping[str, Any]) -> str:
    """The model card, in Markdown."""
    name = facts["target"] or facts["name"]
    shape, about = facts["shape"], facts["agreement"]
    said = f"The deep layers of {name} are damped by {about['damp']}; alpha was not measured."
    if "reached" in about:
        text = about["text"]
        said = (
            f"alpha asked: {about['asked']}; reached: {about['reached']} ± {about['error']}, with "
            f"what layers after the first {shape['draft']} of {name} write scaled by "
            f"{about['damp']}. Measured on {about['on']}, in {facts['dtype']}, over "
            f"{about['tokens']} tokens: the share of positions of the target's own greedy text "
            "where the draft, given that text, has the same most probable token.\n\n"
            f"Of that text, in rows of 128 tokens, {text['distinct']:.0%} are different tokens of "
            f"their row, {text['repeated']:.1%} of the 4-grams came before in it, and the "
            f"commonest token is {text['commonest']:.1%} of all."
        )
    return (
        "\n\n".join(
            [
                "---\nlicense: mit\nlibrary_name: transformers\ntags: [speculative-decoding]\n---",
                f"# {facts['name']}",
                facts["about"],
                f"A Llama ({facts['layers']} layers, width {facts['width']}, {shape['heads']} heads of "
                f"which {shape['kv_heads']} for keys and values) of {facts['parameters']:,} parameters "
                f"in {facts['dtype']}, drawn from seed {facts['seed']}. Its text is noise.",
                f"The head has {shape['vocab']:,} rows and is computed in full; the tokenizer is the "
                f"zoo's, and only its {VOCABULARY} tokens are ever emitted: specexp reads no further, "
                "and the other rows are too small to win at temperature 0.",
                "## Acceptance",
                said,
            ]
        )
        + "\n"
    )
