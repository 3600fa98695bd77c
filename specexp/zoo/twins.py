"""Makes twins: a target and a draft with random weights, a real shape and a chosen acceptance.

They measure true costs at any scale without a download. The target has a real architecture; the
draft is the same model cut off after its first layers. The outputs of the target's deeper layers
are scaled by one factor (*damped*), which decides how often the two agree. Costs are those of
trained models of the shape, acceptance is chosen, and the output is noise without repetitions, so
prompt lookup finds nothing in it.

**alpha** is the probability at temperature 0 that a draft token of a chain is accepted, given
that those before it were: the share of positions of the target's greedy output where the draft,
given the tokens before, has the same most probable token. The factor is found by bisection on that
share, in the dtype that is written, and for shapes wider than 512 on a model of the same depth and
width 512: because the spread of the weights follows the width (`draw`), agreement depends on depth
alone. At 12 layers damped by 0.04 it is 0.82, 0.82, 0.81 and 0.82 for widths of 128, 256, 512 and
1024 (± 0.009, bfloat16).

Random logits are flatter than learned ones: the best two of 4096 differ by a quarter of the logits'
standard deviation. So bfloat16 rounding changes 4 to 7 % of the argmaxes (compared with float32 and
the same weights), plain and speculative output diverge at near ties sooner than usual, and an alpha
above 0.95 depends on the kernels. Use float32 where that matters.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from transformers import (
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from specexp.errors import UserError, refusing
from specexp.models.load import DTYPES
from specexp.models.memory import free_memory
from specexp.models.servable import cache_name
from specexp.zoo import files, shelf
from specexp.zoo.recipes import END, VOCABULARY


@dataclass(frozen=True)
class Shape:
    """The shape of a Llama. `draft`: layers that the draft keeps. `tied`: whether the LM head is
    the embeddings. `rows`: of the head and the embeddings; the tokenizer has the first 4096."""

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    draft: int
    rows: int = 128_256
    tied: bool = False
    context: int = 8192

    def config(self, dtype: str = "bfloat16") -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.rows, hidden_size=self.width, intermediate_size=self.hidden,
            num_hidden_layers=self.layers, num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads, head_dim=self.width // self.heads,
            max_position_embeddings=self.context, rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
            tie_word_embeddings=self.tied, bos_token_id=END, eos_token_id=END, pad_token_id=END,
            architectures=["LlamaForCausalLM"], dtype=dtype,
        )  # fmt: skip

    @cached_property
    def weights(self) -> dict[str, torch.Size]:
        """The size of every weight by name, in the order of the model."""
        with torch.device("meta"):
            return {n: w.shape for n, w in LlamaForCausalLM(self.config()).named_parameters()}

    @property
    def parameters(self) -> int:
        return sum(size.numel() for size in self.weights.values())

    def is_deep(self, name: str) -> bool:
        """Whether a weight writes to the residual stream in a layer that the draft lacks."""
        return _layer(name) >= self.draft and _kind(name) in ("o_proj", "down_proj")


SHAPES = {
    "200M": Shape(12, 1024, 2816, 16, 4, draft=2, rows=32_768),
    "1B": Shape(16, 2048, 8192, 32, 8, draft=2, tied=True, context=131_072),  # Llama 3.2
    "8B": Shape(32, 4096, 14_336, 32, 8, draft=4),  # Llama 3
    "70B": Shape(80, 8192, 28_672, 64, 8, draft=10),  # Llama 3
}
NARROW = 512
LEAST, MOST = 1e-4, 4.0  # range of damping factors


def make(
    params: str, alpha: float | None = None, out: Path | None = None, damp: float | None = None,
    dtype: str = "bfloat16", seed: int = 0, force: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Write `twin-PARAMS-target` and `twin-PARAMS-draft` to `out`, by default the store's `twins/`.

    alpha: the acceptance to calibrate the damping for, unless `damp` gives the factor. force:
    replace an existing pair. Returns the content of the target's `zoo.json`. Raises UserError,
    before it writes any weights, for an impossible request, an existing pair, or too little disk
    or memory."""
    shape, out = _shape_of(params, alpha, damp, dtype), out or shelf.store() / "twins"
    shelf.find("target-10m")  # whose tokenizer they get
    name = f"twin-{params.lower()}"
    target = out / f"{name}-target"
    if target.exists() and not force:
        raise UserError(f"{target} exists: replace it with --force, or choose another with --out")
    for left in out.glob(".twin-*-*"):  # by runs that were killed
        if not Path("/proc", left.name.rpartition("-")[2]).exists():
            shutil.rmtree(left)
    draft = replace(shape, layers=shape.draft)
    _check_room(params, [draft, shape], out, dtype, alpha)
    with refusing(f"cannot write to {out}; give another folder with --out"):
        out.mkdir(parents=True, exist_ok=True)
    damping: dict[str, Any] = calibrated(shape, alpha, dtype, seed) if alpha else {"damp": damp}
    shutil.rmtree(target, ignore_errors=True)  # where there is a target, its own draft is there
    for folder, cut in {out / f"{name}-draft": draft, target: shape}.items():
        whole = folder == target
        facts = {
            "name": name if whole else folder.name, "role": "target" if whole else "draft",
            "target": None if whole else name, "parameters": cut.parameters,
            "layers": cut.layers, "width": cut.width,
            "about": "Random weights in a real shape, for measuring its costs." if whole
            else f"The first {cut.layers} layers of {name}, with the same weights, norm and head.",
            "shape": asdict(cut), "dtype": dtype, "seed": seed, "agreement": damping,
        }  # fmt: skip
        with files.whole(folder) as part:
            write(cut, part, damping["damp"], dtype, seed)
            (part / "zoo.json").write_text(json.dumps(facts, indent=1) + "\n")
    return facts


# checks


def _shape_of(params: str, alpha: float | None, damp: float | None, dtype: str) -> Shape:
    shapes = {name.lower(): shape for name, shape in SHAPES.items()}
    if params.lower() not in shapes:
        raise UserError(f"no twin has {params!r} parameters: choose one of {', '.join(SHAPES)}")
    if (alpha is None) == (damp is None):
        raise UserError("give either --alpha, the acceptance wanted, or --damp, the damping factor")
    if alpha is not None and not 0 < alpha < 1:
        raise UserError(f"alpha is {alpha}; it must lie between 0 and 1, excluding both")
    if damp is not None and not 0 < damp <= MOST:
        raise UserError(f"damp is {damp}; it must be above 0 and at most {MOST:g}")
    if dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r} is unknown; use one of {', '.join(DTYPES)}")
    return shapes[params.lower()]


def _check_room(params: str, pair: list[Shape], out: Path, dtype: str, alpha: float | None) -> None:
    """Raise UserError unless the disk has room for both models, and memory for twice the larger of
    the embeddings and the model run to calibrate."""
    existing = next(folder for folder in (out.resolve(), *out.resolve().parents) if folder.exists())
    free = {"disk": shutil.disk_usage(existing).free, "memory": free_memory(torch.device("cpu"))}
    embeddings = pair[-1].rows * pair[-1].width * DTYPES[dtype].itemsize
    most = max(embeddings, _bytes(_trial(pair[-1]), dtype) if alpha else 0)
    need = {"disk": sum(_bytes(shape, dtype) for shape in pair), "memory": 2 * most}
    for what, advice in {"disk": "choose another with --out", "memory": "free some"}.items():
        if need[what] > free[what]:
            raise UserError(
                f"twin {params} in {dtype} needs {need[what]:,} bytes of {what} and {free[what]:,} "
                f"are free: {advice}, or choose a smaller shape"
            )


def _bytes(shape: Shape, dtype: str) -> int:
    return shape.parameters * DTYPES[dtype].itemsize


# weights


def draw(
    name: str, size: torch.Size, dtype: torch.dtype, seed: int, damp: float = 1.0,
    device: torch.device | str = "cpu",
) -> Tensor:  # fmt: skip
    """A weight, as a function of seed, name, size, damping and kind of device.

    Matrices are normal with standard deviation gain / sqrt(columns), which makes the scale of
    activations independent of the width. Gains other than 1 were chosen from greedy outputs:
    1.4 for queries and keys, so that attention concentrates on a few tokens and outputs do not
    repeat (at 0.7, 10 to 33 % of the 4-grams occurred before, at 1.4 under 1 %; larger gains
    amplify rounding);
    8 for weights that write to the residual stream, so that the last token's embedding does not
    dominate a tied head and repeat that token;
    3.4 for embeddings and head, so that the distribution over 4096 tokens has the entropy of a
    language model (ln V - 3.4² / 2, about 2.5 nats).
    Rows of the end of text and of ids that the tokenizer lacks get a quarter of that: they are
    computed like any other and are never the most probable."""
    if len(size) == 1:
        return torch.ones(size, dtype=dtype, device=device)
    kind = _kind(name)
    gain = {"q_proj": 1.4, "k_proj": 1.4, "o_proj": 8.0, "down_proj": 8.0, "embed_tokens": 3.4,
            "lm_head": 3.4}.get(kind, 1.0)  # fmt: skip
    key = hashlib.sha256(f"{seed} {name}".encode()).digest()
    rng = torch.Generator(device).manual_seed(int.from_bytes(key[:7], "big"))
    weight = torch.empty(size, dtype=dtype, device=device)
    weight.normal_(0, damp * gain / math.sqrt(size[1]), generator=rng)
    if kind in ("embed_tokens", "lm_head"):
        weight[VOCABULARY:] *= 0.25
        weight[END] *= 0.25
    return weight


def _kind(name: str) -> str:
    return name.split(".")[-2]


def _layer(name: str) -> int:
    """The layer that a weight belongs to; -1 for embeddings, final norm and head."""
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else -1


def write(shape: Shape, folder: Path, damp: float, dtype: str, seed: int) -> None:
    """Write a model as a Hugging Face folder, one shard per layer and in memory at a time."""
    folder.mkdir()
    shards = [list(part) for _, part in groupby(shape.weights.items(), lambda w: _layer(w[0]))]
    places: dict[str, str] = {}
    for number, shard in enumerate(tqdm(shards, desc="writing", unit="shard"), 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weights = {
            name: draw(name, size, DTYPES[dtype], seed, damp if shape.is_deep(name) else 1.0)
            for name, size in shard
        }
        save_file(weights, folder / file, {"format": "pt"})
        places |= dict.fromkeys(weights, file)
    index = {"metadata": {"total_size": _bytes(shape, dtype)}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    shape.config(dtype).save_pretrained(folder)
    GenerationConfig(bos_token_id=END, eos_token_id=END, pad_token_id=END).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(shelf.find("target-10m"))
    tokenizer.model_max_length = shape.context
    tokenizer.save_pretrained(folder)


# calibration


def calibrated(shape: Shape, alpha: float, dtype: str, seed: int) -> dict[str, Any]:
    """The damping factor for alpha, and the agreement that it gives on new prompts."""
    trial = _trial(shape)
    model = _undamped(trial, dtype, seed)
    damp = bisect(partial(_agreement_at, model, trial, seed=seed), alpha, LEAST, MOST)
    _damp(model, trial, damp, seed)
    agrees = agreement(model, trial.draft, rows=16, new=128, seed=1)
    reached = agrees.float().mean().item()
    if abs(reached - alpha) > 0.1:
        raise UserError(f"alpha {alpha} is out of reach of this shape: damping gives {reached:.3f}")
    return {
        "asked": alpha, "reached": round(reached, 4),
        "error": round(math.sqrt(reached * (1 - reached) / agrees.numel()), 4),
        "tokens": agrees.numel(), "damp": damp,
        "on": "the model itself" if trial == shape else f"a {trial.width}-wide model of this depth",
    }  # fmt: skip


def _trial(shape: Shape) -> Shape:
    """The shape to calibrate on."""
    if shape.width <= NARROW:
        return shape
    return replace(shape, width=NARROW, hidden=1792, heads=8, kv_heads=2, rows=VOCABULARY)


def _undamped(shape: Shape, dtype: str, seed: int) -> Any:
    """The undamped target, in memory."""
    with torch.random.fork_rng():
        model: Any = LlamaForCausalLM._from_config(shape.config(dtype), dtype=DTYPES[dtype])
    for name, weight in model.named_parameters():
        weight.data.copy_(draw(name, weight.shape, weight.dtype, seed))
    return model.eval().requires_grad_(False)


def _damp(model: Any, shape: Shape, damp: float, seed: int) -> None:
    for name, weight in model.named_parameters():
        if shape.is_deep(name):
            weight.copy_(draw(name, weight.shape, weight.dtype, seed, damp))


def _agreement_at(model: Any, shape: Shape, damp: float, seed: int) -> float:
    _damp(model, shape, damp, seed)
    return agreement(model, shape.draft, rows=32, new=64, seed=0).float().mean().item()


@torch.inference_mode()
def agreement(model: Any, draft: int, rows: int, new: int, seed: int) -> Tensor:
    """Whether the model's first `draft` layers predict the same tokens as all of them, given the
    same tokens before: bool [rows, new], of greedy continuations of random prompts of 16 tokens."""
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randint(END + 1, VOCABULARY, (rows, 16), generator=rng)
    cache, agrees = {cache_name(model): DynamicCache()}, []
    for _ in range(new):
        output = model(tokens, **cache, output_hidden_states=True, logits_to_keep=1)
        early = model.lm_head(model.model.norm(output.hidden_states[draft][:, -1:]))  # [rows, 1, V]
        drafted, tokens = (x[..., :VOCABULARY].argmax(-1) for x in (early, output.logits))
        agrees.append(drafted == tokens)
    return torch.cat(agrees, 1)


def bisect(measure: Callable[[float], float], alpha: float, low: float, high: float) -> float:
    """The factor at which a decreasing `measure` is within 0.004 of alpha, or the 12th tried."""
    with tqdm(desc=f"alpha {alpha}", unit="try") as bar:
        for _ in range(12):
            damp = math.sqrt(low * high)
            rate = measure(damp)
            bar.set_postfix_str(f"{rate:.3f} when damped by {damp:.3g}", refresh=False)
            bar.update()
            if abs(rate - alpha) < 0.004:
                break
            low, high = (damp, high) if rate > alpha else (low, damp)
    return float(f"{damp:.4g}")
