"""From names to an engine, for notebooks, grid points and the command line.

A model is named by its zoo name, a folder or a hub id; NAME+int8 is that model with 8-bit weights
(quantised.py). A drafter is `METHOD`, `METHOD:ARGUMENT` (methods: drafters/) or just the name of a
draft model. `check` finds every problem in a set of parameters without loading a weight; `build`
raises the first one.
"""

from __future__ import annotations

import difflib
import gc
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from specexp import drafters, rules
from specexp.drafters.model import all_rows
from specexp.engine import Engine, Generation
from specexp.errors import UserError
from specexp.models import int8
from specexp.models.lm import LM
from specexp.models.load import load as load_model
from specexp.models.load import read_config, read_tokenizer
from specexp.policy import Fixed
from specexp.rules import Rule
from specexp.sampling import Sampling
from specexp.tree import Tree
from specexp.zoo import shelf

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Pairing:
    """An engine with its tokenizer. `drafter`: its name in tables; `options`: the arguments of
    `build`, device aside; `deepest`: the longest draft that the drafter can make."""

    engine: Engine
    tokenizer: Any
    drafter: str
    options: dict[str, Any]
    deepest: int

    @property
    def target(self) -> LM:
        return self.engine.target

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [encode(self.tokenizer, text) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens))

    def generate(self, texts: Sequence[str], max_new_tokens: int) -> Generation:
        return self.engine.generate(self.encode(texts), max_new_tokens)

    def with_(self, **changes: Any) -> Pairing:
        """A pairing with the same target and some options changed: drafter, gamma, rule ..."""
        return _assemble(self.target, self.tokenizer, **(self.options | changes))

    def apart(self) -> Pairing:
        """A pairing with the same target weights and caches of its own."""
        return _assemble(self.target.apart(), self.tokenizer, **self.options)


def build(
    target: str = "target-10m",
    drafter: str = "model",
    gamma: int | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    rule: str = "auto",
    tree: str = "chain",
    dtype: str = "float32",
    device: str = "auto",
    seed: int = 0,
) -> Pairing:
    """Load a target and a drafter and assemble the engine.

    gamma: length of a chain and depth of a grown tree; None: `usual_gamma`. tree: see `Tree.parse`.
    rule: see `rules.of`; "auto": reject if guesses are drawn from a law, else (as always at
    temperature 0) match. device: "auto" takes the GPU if there is one.
    Raises UserError for bad input; for a bad pairing, before any weight is loaded.
    """
    tokenizer = _tokenizer(target)
    _settle()
    options = {
        "target": target, "drafter": drafter, "gamma": gamma, "temperature": temperature,
        "top_k": top_k, "top_p": top_p, "rule": rule, "tree": tree, "dtype": dtype, "seed": seed,
    }  # fmt: skip
    if gamma is None:
        options["gamma"] = usual_gamma(options)
    prepare(Once(), *options.items())
    name = Path(target).name
    model = load_model(locate(target), name, dtype, where(device), vocabulary(tokenizer, target))
    return _assemble(model, tokenizer, **options)


@cache
def _settle() -> None:
    """Exempt the objects of imported libraries from garbage collection: scanning half a million of
    them takes a fifth of a second, in the middle of some timed round."""
    gc.collect()
    gc.freeze()


def where(device: str) -> str:
    """The device's name, with `auto` resolved: the GPU if there is one."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def warm(params: Mapping[str, Any]) -> None:
    """Load and keep the models that `build` would for this target, drafter, dtype and device, so
    that this process and those forked from it need not load them. Raises as `build` does."""
    named = {n: params[n] for n in ("target", "drafter", "dtype", "device") if n in params}
    _WARM.append(build(**named))


_WARM: list[Pairing] = []
DEFAULTS = {name: p.default for name, p in inspect.signature(build).parameters.items()}


def _assemble(model: LM, tokenizer: Any, **o: Any) -> Pairing:
    plan = request(o, model.config, model.vocab, tokenizer)
    ready = drafters.prepare(plan)
    eos = model.module.generation_config.eos_token_id
    if eos is None:
        eos = model.config.eos_token_id
    stops = [] if eos is None else eos if isinstance(eos, list) else [eos]
    engine = Engine(
        model, ready.make(model), Fixed(plan.tree), plan.sampling,
        _rule(o["rule"], plan, ready), o["seed"], stops,
    )  # fmt: skip
    return Pairing(engine, tokenizer, resolve_drafter(o["target"], o["drafter"]), o, ready.deepest)


def usual_gamma(options: dict[str, Any]) -> int:
    """The default draft length: 5, or the longest that the drafter can make."""
    try:
        plan = request(options | {"gamma": 1, "tree": "chain"}, *read_target(options["target"]))
        return min(5, drafters.prepare(plan).deepest)
    except (UserError, OSError):
        return 5  # `check` reports what is wrong


def request(o: dict[str, Any], config: Any, vocab: int, tokenizer: Any) -> drafters.Request:
    method, argument = split(o["drafter"])

    def source(method: str, name: str) -> str:
        return locate(name or _default_draft(o["target"], method))

    return drafters.Request(
        method=method, argument=argument, target=o["target"], config=config, vocab=vocab,
        tokenizer=tokenizer, sampling=Sampling(o["temperature"], o["top_k"], o["top_p"]),
        tree=Tree.parse(o["tree"], o["gamma"]), dtype=o["dtype"], seed=o["seed"], source=source,
    )  # fmt: skip


def _rule(name: str, plan: drafters.Request, ready: drafters.Prepared) -> Rule:
    """The named rule, or for "auto" the one that suits the guesses. Raises UserError for a rule
    that cannot judge this tree, or that needs q where guesses are not drawn from one."""
    drawn = ready.draws and not plan.tree.width
    if name == "auto":
        return rules.of("reject" if drawn and plan.sampling.temperature > 0 else "match")
    rule = rules.of(name)
    if rule.chains_only and not plan.tree.is_chain:
        raise UserError(f"rule {name} works on chains; use tree chain, or another rule")
    if rule.wants_q and not drawn and plan.sampling.temperature > 0:
        raise UserError(
            f"rule {name} weighs guesses by the law they were drawn from, and those of "
            f"{plan.method} on this tree are chosen, not drawn: use rule match"
        )
    return rule


def split(drafter: str) -> tuple[str, str]:
    """Method and argument of a drafter's name; a model's name alone means `model:NAME`."""
    method, _, argument = drafter.partition(":")
    if method in drafters.methods():
        return method, argument
    if "/" in method or Path(drafter).is_dir():
        return "model", drafter
    if difflib.get_close_matches(method, drafters.methods(), n=1):
        return method, argument
    return "model", drafter


def resolve_drafter(target: str, drafter: str) -> str:
    """A drafter's name in tables: a draft model's own name, any other as given."""
    method, argument = split(drafter)
    if method != "model":
        return drafter
    return argument or _default_draft(target, "model")


def _default_draft(target: str, method: str) -> str:
    return shelf.default_draft(int8.split(target)[0], method).name


def locate(name: str) -> str:
    """The folder of a zoo name or path, or the hub id itself; a suffix `+int8` stays. Raises
    UserError for a name that is none of them."""
    if Path(name).is_dir():
        return str(Path(name).resolve())
    bare, how = int8.split(name)
    if how:
        return locate(bare) + how
    if name in {m.name for m in shelf.models()}:
        return str(shelf.find(name))
    if name.startswith((".", "~", "/")) or name.count("/") > 1:
        raise UserError(f"there is no folder {name}")
    return name if _HUB_ID.fullmatch(name) else str(shelf.find(name))


def _tokenizer(name: str) -> Any:
    return read_tokenizer(locate(name))


def read_target(target: str) -> tuple[Any, int, Any]:
    """Config, vocabulary and tokenizer of a target."""
    config = read_config(locate(target)).get_text_config()
    tokenizer = _tokenizer(target)
    return config, vocabulary(tokenizer, target), tokenizer


def vocabulary(tokenizer: Any, name: str) -> int:
    """V: one more than the largest id of the tokenizer. Logits beyond it are padding and are never
    emitted. Raises UserError if the model has fewer logits."""
    V = max(tokenizer.get_vocab().values()) + 1
    all_rows(read_config(locate(name)).get_text_config(), V, name)
    return V


def encode(tokenizer: Any, text: str) -> list[int]:
    tokens = list(tokenizer(text).input_ids) if text else []
    if not tokens:
        raise UserError("a prompt is empty; give it at least one character")
    return tokens


class Once:
    """Caches results (and UserError or OSError raised) by function and arguments, for many checks
    in a row while no file changes."""

    def __init__(self) -> None:
        self.kept: dict[Any, tuple[Any, Exception | None]] = {}

    def __call__(self, f: Callable[..., Any], *args: Any) -> Any:
        if (f, args) not in self.kept:
            try:
                self.kept[f, args] = f(*args), None
            except (UserError, OSError) as e:
                self.kept[f, args] = None, e
        value, error = self.kept[f, args]
        if error:
            raise error
        return value


def prepare(once: Once, *options: tuple[str, Any]) -> tuple[drafters.Request, drafters.Prepared]:
    o = dict(options)
    config, vocab, tokenizer = once(read_target, o["target"])
    plan = request(o, config, vocab, tokenizer)
    ready = drafters.prepare(plan)
    widest = max(plan.tree.parents.count(i) for i in range(len(plan.tree)))
    if max(widest, plan.tree.width) > vocab:
        raise UserError(f"tree {o['tree']} is wider than the vocabulary of {vocab} tokens")
    _rule(o["rule"], plan, ready)
    return plan, ready
