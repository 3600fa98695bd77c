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
import itertools
import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from specexp import drafters, rules
from specexp.drafters.model import all_rows
from specexp.engine import Engine, Generation
from specexp.errors import UserError, first_line
from specexp.measure import prompts
from specexp.models import int8, memory
from specexp.models.cache import rounded
from specexp.models.lm import LM
from specexp.models.load import DTYPES, read_config, read_tokenizer, smaller, weight_bytes
from specexp.models.load import load as load_model
from specexp.models.servable import reach
from specexp.policy import Fixed
from specexp.rules import Rule
from specexp.sampling import Sampling
from specexp.serving import arrivals, fleet, policies
from specexp.tree import Tree
from specexp.zoo import shelf

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_LEAST = {
    "max_new_tokens": 1, "batch": 1, "limit": 1, "seed": 0, "repeats": 1, "stream": 1,
    "turns": 2, "count": 1, "rows": 1, "chunk": 1, "queue": 0,
}  # fmt: skip
_POSITIVE = ("ttft_ms", "tpot_ms", "offered", "tpot_steps")
_NEEDED = (
    "gammas", "batches", "contexts", "measured_batches", "streams", "temperatures",
    "loads",
)  # fmt: skip
ALONE = {
    "seed", "seeds", "repeats", "stream", "streams", "turns", "count", "rows", "chunk", "queue",
    *_POSITIVE, "arrivals",
}  # fmt: skip
"""Parameters that `check` judges independently of all others."""


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
    _check_pairing(Once(), *options.items())
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
_DEFAULTS = {name: p.default for name, p in inspect.signature(build).parameters.items()}


def _assemble(model: LM, tokenizer: Any, **o: Any) -> Pairing:
    plan = _plan(o, model.config, model.vocab, tokenizer)
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
        plan = _plan(options | {"gamma": 1, "tree": "chain"}, *_known(options["target"]))
        return min(5, drafters.prepare(plan).deepest)
    except (UserError, OSError):
        return 5  # `check` reports what is wrong


def _plan(o: dict[str, Any], config: Any, vocab: int, tokenizer: Any) -> drafters.Request:
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


def _known(target: str) -> tuple[Any, int, Any]:
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


def check(params: dict[str, Any], texts: list[prompts.Prompt] | None = None) -> list[str]:
    """Every problem with these parameters, one line each, without loading a weight.

    texts: the prompts, by default those that the parameters name. Unknown parameters are ignored:
    a notebook may have its own.
    """
    return problems_of(params, texts, Once())


def insist(params: dict[str, Any], texts: list[prompts.Prompt] | None = None) -> None:
    """Raises UserError with every problem that `check` finds, one line each."""
    if problems := check(params, texts):
        raise UserError("\n".join(problems))


def problems_of(
    params: dict[str, Any], texts: list[prompts.Prompt] | None, once: Once
) -> list[str]:
    """As `check`, reusing what earlier checks looked up."""
    problems: list[str] = []

    def attempt(f: Callable[..., Any], *args: Any) -> Any:
        try:
            return f(*args)
        except UserError as e:
            problems.append(str(e))
        except OSError as e:
            problems.append(first_line(e))

    for name, at_least in _LEAST.items():
        for value in _values(params, name, name + "s", name + "es"):
            if value < at_least:
                problems.append(f"{name} is {value}; it must be {at_least} or more")
    for name in _POSITIVE:
        if not 0 < params.get(name, 1) < math.inf:
            problems.append(f"{name} is {params[name]}; it must be positive and finite")
    for name in _NEEDED:
        if params.get(name) == []:
            problems.append(f"{name} is empty; give at least one")
    for value in _values(params, "temperature", "temperatures"):
        attempt(Sampling, value)
    attempt(Sampling, 0.0, params.get("top_k", 0), params.get("top_p", 1.0))
    for rule in _values(params, "rule", "rules"):
        if rule != "auto":
            attempt(rules.of, rule)
    for gamma in _values(params, "gamma", "gammas") or [1]:
        for shape in _values(params, "tree", "trees") or ["chain"]:
            attempt(Tree.parse, shape, gamma)
    if named := params.get("arrivals"):
        attempt(arrivals.parse, arrivals.at_rate(named, 1.0), 1)
    attempt(fleet.check_router, params.get("router", "least"))
    attempt(arrivals.check_swing, params.get("swing", 0.0))
    if params.get("dtype", "float32") not in DTYPES:
        problems.append(f"dtype {params['dtype']!r} is unknown; use {', '.join(DTYPES)}")
    device = params.get("device", "auto")
    if device not in ("auto", "cpu") and not re.fullmatch(r"cuda(:\d+)?", device):
        problems.append(f"device {device!r} is unknown; use auto, cpu, cuda or cuda:N")
    elif device.startswith("cuda") and not torch.cuda.is_available():
        problems.append("no CUDA device is available; use device auto or cpu")
    elif int(device.partition(":")[2] or 0) >= max(1, torch.cuda.device_count()):
        problems.append(
            f"device {device!r} does not exist; GPUs here: {torch.cuda.device_count()}, from cuda:0"
        )
    if texts is None:
        categories = tuple(params.get("categories") or ()) or None
        named = params.get("prompts", "all"), categories, params.get("limit")
        texts = attempt(once, prompts.load, *named) or []
    deepest = policies.MOST
    if "target" in params:
        found, pairings, longest = _check_models(params, texts, once, attempt)
        problems += found
        if pairings and not problems:
            problems += attempt(_check_memory, params, pairings, longest) or []
        deepest = min([deepest, *(ready.deepest for _, ready in filter(None, pairings))])
    for policy in _values(params, "policy", "policies"):
        if "requests_per_day" in params:
            attempt(fleet.check_policy, policy)
        if policy not in ("plain", "goodput"):
            attempt(policies.of, policy, None, deepest)
    return list(dict.fromkeys(problems))


Candidate = tuple[drafters.Request, drafters.Prepared]


def _check_models(
    params: dict[str, Any], texts: list[prompts.Prompt], once: Once, attempt: Callable[..., Any]
) -> tuple[list[str], list[Candidate], int]:
    """Problems; the pairings that the parameters name (None for a bad one); tokens of the longest
    prompt with its output."""
    target = params["target"]
    known = attempt(once, _known, target)
    if not known:
        return [], [], 0
    config, _, tokenizer = known
    pairings = [
        attempt(once, _check_pairing, once, *(options | {"seed": 0}).items())
        for options in _each(params)
    ]
    context = reach(config)
    new = params.get("max_new_tokens", 0)
    problems, too_long = [], []
    for gamma in _values(params, "gamma", "gammas"):
        if gamma >= context:
            problems.append(f"gamma {gamma} exceeds the {context}-token context of {target}")
    longest = 0
    for prompt in texts:
        need = len(attempt(once, encode, tokenizer, prompt.text) or []) + new
        longest = max(longest, need)
        if need > context:
            too_long.append((need, prompt.question_id))
    if too_long:
        need, name = max(too_long, key=lambda pair: pair[0])
        others = f" ({len(too_long) - 1} more prompts are too long)" if len(too_long) > 1 else ""
        problems.append(
            f"prompt {name} with {new} new tokens needs {need} tokens, {need - context} more than "
            f"the {context}-token context of {target}{others}"
        )
    return problems, pairings, longest


def _check_memory(params: dict[str, Any], pairings: list[Candidate], longest: int) -> list[str]:
    """A problem, with advice on what would fit, if the pairing that needs the most memory does not
    fit the device."""
    dtype, config = DTYPES[params.get("dtype", "float32")], pairings[0][0].config
    free = memory.free_memory(torch.device(where(params.get("device", "auto"))))
    batch = max(_values(params, "batch", "batches"), default=1)

    def need(batch: int) -> memory.Need:
        found = (needed(plan, ready, dtype, batch, longest) for plan, ready in pairings)
        return max(found, key=lambda need: need.total)

    most = need(batch)
    if most.total <= free:
        return []
    fits = bisect_left(range(1, batch), free + 1, key=lambda b: need(b).total)
    advice = f"a batch of {fits} would fit" if fits else smaller(config, dtype, free)
    return [
        f"{params['target']} on batch {batch} x {longest} tokens needs at least {most}, and "
        f"{memory.gib(free)} GiB are free: {advice}"
    ]


def needed(
    plan: drafters.Request, ready: drafters.Prepared, dtype: torch.dtype, batch: int, tokens: int
) -> memory.Need:
    """A lower bound of the memory that a batch needs. tokens: of a row, the new ones included.
    Heads are small beside their target and are left out."""
    draft = ready.config
    models = [plan.config, *([draft] if draft else [])]
    own = models[:1] if draft == plan.config else models  # a target that drafts for itself
    size, slots = dtype.itemsize, rounded(tokens + plan.tree.room)
    law = memory.law_bytes("any", plan.sampling.temperature)
    held = zip(models, (1, ready.slots), strict=False)
    return memory.Need(
        sum(weight_bytes(model, dtype) for model in own),
        sum(batch * slots * times * memory.kv_bytes(model, size) for model, times in held),
        memory.work_bytes(models, size, batch, slots, tokens, len(plan.tree), law),
    )


def _each(params: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every combination of `build` options that these parameters name, singly or in lists. `rivals`
    are compared at `temperature` only, not at each of `temperatures`."""
    yield from _combined(params)
    beside = {n: v for n, v in params.items() if n not in ("drafters", "temperatures", "trees")}
    for rival in _values(params, "rivals"):
        yield from _combined(beside | {"drafter": rival})


def _combined(params: dict[str, Any]) -> Iterator[dict[str, Any]]:
    named = {
        "drafter": _values(params, "drafter", "drafters"),
        "gamma": _values(params, "gamma", "gammas"),
        "temperature": _values(params, "temperature", "temperatures"),
        "rule": _values(params, "rule", "rules"),
        "tree": _values(params, "tree", "trees"),
    }
    fixed = _DEFAULTS | {name: value for name, value in params.items() if name in _DEFAULTS}
    lists = {name: values for name, values in named.items() if values}
    for values in itertools.product(*lists.values()):
        options = fixed | dict(zip(lists, values, strict=True))
        if options["gamma"] is None:
            options["gamma"] = usual_gamma(options)
        yield options


def _check_pairing(once: Once, *options: tuple[str, Any]) -> Candidate:
    o = dict(options)
    config, vocab, tokenizer = once(_known, o["target"])
    plan = _plan(o, config, vocab, tokenizer)
    ready = drafters.prepare(plan)
    widest = max(plan.tree.parents.count(i) for i in range(len(plan.tree)))
    if max(widest, plan.tree.width) > vocab:
        raise UserError(f"tree {o['tree']} is wider than the vocabulary of {vocab} tokens")
    _rule(o["rule"], plan, ready)
    return plan, ready


def sources(params: dict[str, Any]) -> set[str]:
    """The folders and hub ids of all models that these parameters name, zoo defaults included.

    Raises UserError for a model that does not exist.
    """
    found = {locate(name) for name in _values(params, "target", "targets", "draft", "drafts")}
    for target in _values(params, "target", "targets"):
        known = _known(target)
        drafts = {options["drafter"]: options for options in _each(params | {"target": target})}
        for options in drafts.values():
            plan = _plan(options | {"gamma": 1, "tree": "chain"}, *known)

            def source(method: str, name: str, find: Any = plan.source) -> str:
                found.add(find(method, name))
                return str(find(method, name))

            with suppress(UserError):  # gamma 1 may not suit; `check` has passed the one asked for
                drafters.prepare(replace(plan, source=source))
    return found


def _values(params: dict[str, Any], *names: str) -> list[Any]:
    """All values of these parameters, lists flattened; None is left out."""
    found = [params[n] for n in dict.fromkeys(names) if n in params and params[n] is not None]
    return [v for x in found for v in (x if isinstance(x, list) else [x])]
