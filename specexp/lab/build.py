"""From names to an engine: what a notebook, a grid point or the command line asks for.

A model is named by its zoo name, a folder, or a hub id. A drafter is `null`, `ngram`, `model` (the
target's own sibling from the zoo) or the name of a draft model. `check` finds everything that is
wrong with a set of parameters without loading a weight; `build` raises on the first of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from specexp import lm
from specexp.drafters import Drafter
from specexp.drafters.model import DraftModel
from specexp.drafters.ngram import NGram
from specexp.drafters.null import Null
from specexp.engine import Engine, Generation
from specexp.errors import UserError
from specexp.lab import prompts
from specexp.policy import Fixed
from specexp.rules import Match, Reject, Rule
from specexp.sampling import Sampling
from specexp.tree import Tree
from specexp.zoo import shelf

RULES: dict[str, type[Rule]] = {"match": Match, "reject": Reject}
WITHOUT_MODEL = ("null", "ngram")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Rig:
    """An engine and the tokenizer that goes with it; `drafter` as it was named."""

    engine: Engine
    tokenizer: Any
    drafter: str
    options: dict[str, Any]

    @property
    def target(self) -> lm.LM:
        return self.engine.target

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [encode(self.tokenizer, text) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens))

    def generate(self, texts: Sequence[str], max_new_tokens: int) -> Generation:
        return self.engine.generate(self.encode(texts), max_new_tokens)

    def with_(self, **changes: Any) -> Rig:
        """The same target with another drafter, gamma, temperature, rule ..."""
        return _assemble(self.target, self.tokenizer, **(self.options | changes))


def build(
    target: str = "target-10m",
    drafter: str = "model",
    gamma: int = 5,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    rule: str = "reject",
    dtype: str = "float32",
    device: str = "auto",
    seed: int = 0,
    ngram: int = 3,
) -> Rig:
    """Load and wire a pairing. gamma: draft length; ngram: longest suffix that is looked up.

    device "auto" takes the GPU when there is one. Raises UserError with one line for bad input.
    """
    where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    tokenizer = _tokenizer(target)
    name = Path(target).name
    model = lm.load(locate(target), name, dtype, where, vocabulary(tokenizer, target))
    options = {
        "target": target, "drafter": drafter, "gamma": gamma, "temperature": temperature,
        "top_k": top_k, "top_p": top_p, "rule": rule, "dtype": dtype, "seed": seed, "ngram": ngram,
    }  # fmt: skip
    return _assemble(model, tokenizer, **options)


def _assemble(model: lm.LM, tokenizer: Any, **o: Any) -> Rig:
    sampling = Sampling(o["temperature"], o["top_k"], o["top_p"])
    policy = Fixed(Tree.chain(o["gamma"]))
    if o["rule"] not in RULES:
        raise UserError(f"rule {o['rule']!r} is unknown; use one of {', '.join(RULES)}")
    eos = model.module.generation_config.eos_token_id
    if eos is None:
        eos = model.config.eos_token_id
    stops = [] if eos is None else eos if isinstance(eos, list) else [eos]
    engine = Engine(
        model, _drafter(model, tokenizer, sampling, **o), policy, sampling,
        RULES[o["rule"]](), o["seed"], stops,
    )  # fmt: skip
    return Rig(engine, tokenizer, resolve_drafter(o["target"], o["drafter"]), o)


def _drafter(model: lm.LM, tokenizer: Any, sampling: Sampling, **o: Any) -> Drafter:
    name = resolve_drafter(o["target"], o["drafter"])
    if name == "null":
        return Null()
    if name == "ngram":
        return NGram(o["ngram"])
    same_tokens(tokenizer, o["target"], name)
    source = locate(name)
    if source == locate(o["target"]):
        draft = lm.LM(model.module, f"{name} (as its own draft)", model.vocab)
    else:
        draft = lm.load(source, Path(name).name, o["dtype"], str(model.device), model.vocab)
    return DraftModel(draft, sampling)


def resolve_drafter(target: str, drafter: str) -> str:
    """`model` means the target's own sibling; every other name stands for itself."""
    return shelf.default_draft(target).name if drafter == "model" else drafter


def locate(name: str) -> str:
    """The folder of a zoo name or path, or the hub id itself."""
    if Path(name).is_dir():
        return str(Path(name).resolve())
    if name in {m.name for m in shelf.models()} or not _HUB_ID.fullmatch(name):
        return str(shelf.find(name))
    return name


@lru_cache(maxsize=8)
def _tokenizer(name: str) -> Any:
    return lm.read_tokenizer(locate(name))


def vocabulary(tokenizer: Any, name: str) -> int:
    """V: the ids the tokenizer can produce. Logits beyond it are padding and are never emitted."""
    V = max(tokenizer.get_vocab().values()) + 1
    rows = lm.read_config(locate(name)).get_text_config().vocab_size
    if rows < V:
        raise UserError(
            f"{name} has {rows} logits for a tokenizer of {V} tokens; they do not match"
        )
    return V


def same_tokens(tokenizer: Any, target: str, draft: str) -> None:
    """Refuse a draft whose tokenizer maps any token differently."""
    ours, theirs = tokenizer.get_vocab(), _tokenizer(draft).get_vocab()
    if ours != theirs:
        odd = sorted(t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t))
        shown = ", ".join(f"{t!r}: {ours.get(t)} and {theirs.get(t)}" for t in odd[:3])
        raise UserError(
            f"{target} and {draft} have different tokenizers ({len(odd)} tokens differ: {shown}); "
            "pick a draft of the same family"
        )


def encode(tokenizer: Any, text: str) -> list[int]:
    tokens = list(tokenizer(text).input_ids)
    if not tokens:
        raise UserError("a prompt is empty; give it at least one character")
    return tokens


def check(params: dict[str, Any], texts: list[prompts.Prompt] | None = None) -> list[str]:
    """Everything wrong with these parameters, one line each, without loading a weight.

    texts: the prompts, by default those the parameters name. Names that are not known here are
    ignored: a notebook may have parameters of its own.
    """
    problems: list[str] = []

    def attempt(f: Callable[..., Any], *args: Any) -> Any:
        try:
            return f(*args)
        except UserError as e:
            problems.append(str(e))
        except OSError as e:
            problems.append(str(e).strip().splitlines()[0])

    for name, at_least in {
        "gamma": 0, "max_new_tokens": 1, "batch": 1, "limit": 1, "ngram": 1, "seed": 0,
        "repeats": 1,
    }.items():  # fmt: skip
        for value in _values(params, name, name + "s", name + "es"):
            if value < at_least:
                problems.append(f"{name} is {value}; it must be {at_least} or more")
    for value in _values(params, "temperature", "temperatures"):
        attempt(Sampling, value)
    attempt(Sampling, 0.0, params.get("top_k", 0), params.get("top_p", 1.0))
    if params.get("rule", "reject") not in RULES:
        problems.append(f"rule {params['rule']!r} is unknown; use one of {', '.join(RULES)}")
    if params.get("dtype", "float32") not in lm.DTYPES:
        problems.append(f"dtype {params['dtype']!r} is unknown; use {', '.join(lm.DTYPES)}")
    device = params.get("device", "auto")
    if device not in ("auto", "cpu") and not re.fullmatch(r"cuda(:\d+)?", device):
        problems.append(f"device {device!r} is unknown; use auto, cpu, cuda or cuda:N")
    elif device.startswith("cuda") and not torch.cuda.is_available():
        problems.append("no CUDA device is available; use device auto or cpu")
    if texts is None:
        named = params.get("prompts", "all"), params.get("categories") or None, params.get("limit")
        texts = attempt(prompts.load, *named) or []
    if "target" in params:
        problems += _check_models(params, texts, attempt)
    return list(dict.fromkeys(problems))


def _check_models(
    params: dict[str, Any], texts: list[prompts.Prompt], attempt: Callable[..., Any]
) -> list[str]:
    target = params["target"]
    config = attempt(lambda: lm.read_config(locate(target)))
    tokenizer = config and attempt(_tokenizer, target)
    if not tokenizer:
        return []
    attempt(vocabulary, tokenizer, target)
    for drafter in _values(params, "drafter", "drafters", "rivals"):
        attempt(_check_drafter, target, tokenizer, drafter)
    context = getattr(config.get_text_config(), "max_position_embeddings", None) or 1 << 30
    new = params.get("max_new_tokens", 0)
    problems = []
    for gamma in _values(params, "gamma", "gammas"):
        if gamma >= context:
            problems.append(f"gamma {gamma} exceeds the {context}-token context of {target}")
    for prompt in texts:
        need = len(attempt(encode, tokenizer, prompt.text) or []) + new
        if need > context:
            problems.append(
                f"prompt {prompt.question_id} and {new} new tokens need {need} tokens, "
                f"{need - context} more than the {context}-token context of {target}"
            )
    return problems


def _check_drafter(target: str, tokenizer: Any, drafter: str) -> None:
    name = resolve_drafter(target, drafter)
    if name not in WITHOUT_MODEL:
        lm.read_config(locate(name))
        same_tokens(tokenizer, target, name)


def _values(params: dict[str, Any], *names: str) -> list[Any]:
    found = [params[n] for n in dict.fromkeys(names) if n in params and params[n] is not None]
    return [v for x in found for v in (x if isinstance(x, list) else [x])]
