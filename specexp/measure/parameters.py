"""Every problem with the parameters of an experiment, found before a weight is loaded."""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from specexp import drafters, rules
from specexp.api import (
    DEFAULTS,
    Once,
    encode,
    locate,
    prepare,
    read_target,
    request,
    usual_gamma,
    where,
)
from specexp.errors import UserError, first_line
from specexp.measure import prompts
from specexp.models import memory
from specexp.models.cache import rounded
from specexp.models.load import DTYPES, smaller, weight_bytes
from specexp.models.servable import reach
from specexp.sampling import Sampling
from specexp.serving import arrivals, fleet, policies
from specexp.tree import Tree

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
        if policy not in ("plain", *policies.PRICED):
            attempt(policies.of, policy, None, deepest)
    return list(dict.fromkeys(problems))


Candidate = tuple[drafters.Request, drafters.Prepared]


def _check_models(
    params: dict[str, Any], texts: list[prompts.Prompt], once: Once, attempt: Callable[..., Any]
) -> tuple[list[str], list[Candidate], int]:
    """Problems; the pairings that the parameters name (None for a bad one); tokens of the longest
    prompt with its output."""
    target = params["target"]
    known = attempt(once, read_target, target)
    if not known:
        return [], [], 0
    config, _, tokenizer = known
    pairings = [
        attempt(once, prepare, once, *(options | {"seed": 0}).items())
        for options in each_pairing(params)
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


def each_pairing(params: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every combination of `load` options that these parameters name, singly or in lists. `rivals`
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
    fixed = DEFAULTS | {name: value for name, value in params.items() if name in DEFAULTS}
    lists = {name: values for name, values in named.items() if values}
    for values in itertools.product(*lists.values()):
        options = fixed | dict(zip(lists, values, strict=True))
        if options["gamma"] is None:
            options["gamma"] = usual_gamma(options)
        yield options


def sources(params: dict[str, Any]) -> set[str]:
    """The folders and hub ids of all models that these parameters name, zoo defaults included.

    Raises UserError for a model that does not exist.
    """
    found = {locate(name) for name in _values(params, "target", "targets", "draft", "drafts")}
    for target in _values(params, "target", "targets"):
        known = read_target(target)
        drafts = {
            options["drafter"]: options for options in each_pairing(params | {"target": target})
        }
        for options in drafts.values():
            plan = request(options | {"gamma": 1, "tree": "chain"}, *known)

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
