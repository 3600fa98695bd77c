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
from collections.abc import Callable, Iterator, Mapping
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
    """The factor that gives alpha, and what text and agreement are like with it, on new prompts."""
    own = shape.parameters <= OWN
    model = _stood_in(shape, own, dtype, seed)
    with tqdm(desc=f"damping for alpha {alpha}", unit="try", total=12) as bar:

        def measure(damp: float, rows: int = 32, new: int = 64, prompts: int = 0) -> Tensor:
            _damp(model, shape, damp, seed)
            seen = agreement(model, shape.draft, rows, new, seed=prompts)
            bar.set_postfix_str(f"damped by {damp:.3g}: {seen[1].float().mean():.3f}")
            bar.update()
            return seen

        damp = bisect(lambda damp: measure(damp)[1].float().mean().item(), alpha)
        text, agrees = measure(damp, rows=16, new=128, prompts=1)
    reached = agrees.float().mean().item()
    if abs(reached - alpha) > 0.1:
        raise UserError(f"alpha {alpha} is out of reach of this shape: damping gives {reached:.3f}")
    return {
        "asked": alpha, "reached": round(reached, 4),
        "error": round(math.sqrt(reached * (1 - reached) / agrees.numel()), 4),
        "tokens": agrees.numel(), "damp": damp, "on": "itself" if own else "a narrow stand-in",
        "text": variety(text),
    }  # fmt: skip
