"""Whether the pairings that parameters name can be built, fit their context and memory, and may run
their policies: found from files' heads, before a weight is loaded."""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from specexp import drafters
from specexp.api import DEFAULTS, Once, prepare, request_of, usual_gamma, where
from specexp.errors import UserError, first_line
from specexp.measure import prompts
from specexp.measure.parameters import PARAMETERS, Problem, by_mention, values
from specexp.models import memory
from specexp.models.cache import rounded
from specexp.models.load import DTYPES, smaller, state_bytes, weight_bytes
from specexp.models.servable import context as in_words
from specexp.models.servable import reach
from specexp.names import drafter_of, encode, locate, read_target
from specexp.serving import fleet, policies
from specexp.tree import Tree

Params = Mapping[str, Any]
Candidate = tuple[drafters.Request, drafters.Prepared]
PAIRING = ("drafter", "gamma", "temperature", "rule", "tree")
"""What a pairing is varied over: singly, or in a list."""
SAMPLING = ("top_k", "top_p", "min_p", "sampling")


@dataclass
class _Findings:
    """The problems of some parameters. `of` runs a check and keeps what it raises, naming the
    parameters to change: those that the message mentions first."""

    params: Params
    problems: list[Problem] = field(default_factory=list)

    def add(self, what: str, *names: str) -> None:
        self.problems.append(Problem(what, tuple(n for n in names if n in self.params)))

    def of(self, names: Sequence[str], check: Callable[..., Any], *args: Any) -> Any:
        try:
            return check(*args)
        except (UserError, OSError) as e:
            present = [name for name in names if name in self.params]
            self.add(first_line(e), *by_mention(first_line(e), present, self.params))
        return None


def problems_of(
    params: Params, texts: list[prompts.Prompt] | None, once: Once, wrong: set[str]
) -> list[Problem]:
    """The problems of these parameters together. `wrong`: those whose own value is wrong already;
    if there are any, memory is not asked about."""
    findings = _Findings(params)
    for gamma in values(params, "gamma", "gammas") or [1]:
        for shape in values(params, "tree", "trees") or ["chain"]:
            findings.of(("gamma", "gammas", "tree", "trees"), Tree.parse, shape, gamma)
    if texts is None:
        categories = tuple(params.get("categories") or ()) or None
        limit = None if "limit" in wrong else params.get("limit")
        named = params.get("prompts", "all"), categories, limit
        texts = findings.of(("prompts", "limit", "categories"), once, prompts.load, *named) or []
    deepest = policies.MOST
    if "target" in params:
        pairings, longest = _check_models(params, texts, once, findings)
        if pairings and not (findings.problems or wrong):
            findings.of(("dtype", "target"), _check_memory, params, pairings, longest, findings)
        deepest = min([deepest, *(prepared.deepest for _, prepared in pairings)])
    for policy in values(params, "policy", "policies"):
        if "requests_per_day" in params:
            findings.of(("policy", "policies"), fleet.check_policy, policy)
        if policy not in policies.PRICED:
            findings.of(("policy", "policies", "drafter"), policies.of, policy, None, deepest)
    return findings.problems


def _check_models(
    params: Params, texts: list[prompts.Prompt], once: Once, findings: _Findings
) -> tuple[list[Candidate], int]:
    """The pairings that can be built, and the tokens of the longest prompt with its output."""
    target = params["target"]
    parts = findings.of(("target",), once, read_target, target)
    if not parts:
        return [], 0
    config, _, tokenizer = parts
    pairings = []
    for options in each_pairing(params):
        to_change = [*_naming(options, params), "target", "dtype"]
        of_seed_0 = (options | {"seed": 0}).items()
        if pairing := findings.of(to_change, once, prepare, once, *of_seed_0):
            pairings.append(pairing)
    context = reach(config)
    new = params.get("max_new_tokens", 0)
    for gamma in values(params, "gamma", "gammas"):
        if gamma >= context:
            what = f"gamma {gamma} exceeds the {in_words(config)} of {target}"
            findings.add(what, "gamma", "gammas", "target")
    longest, too_long = 0, []
    for prompt in texts:
        text, answers = prompt.text, 0
        if params.get("chat") or prompt.chat:
            names = ("chat", "target", "prompts")
            text, answers = findings.of(names, prompts.longest, prompt, tokenizer) or ("", 0)
        tokens = findings.of(("prompts", "target"), once, encode, tokenizer, text) if text else []
        need = len(tokens or []) + new * (1 + answers)
        longest = max(longest, need)
        if need > context:
            too_long.append((need, prompt.question_id))
    if too_long:
        need, name = max(too_long, key=lambda pair: pair[0])
        others = f" ({len(too_long) - 1} more prompts are too long)" if len(too_long) > 1 else ""
        findings.add(
            f"prompt {name} with {new} new tokens needs {need} tokens, {need - context} more than "
            f"the {in_words(config)} of {target}{others}",
            *(("max_new_tokens",) if new >= context / 2 else ()), "prompts", "max_new_tokens",
            "target",
        )  # fmt: skip
    return pairings, longest


def _naming(options: Mapping[str, Any], params: Params) -> Iterator[str]:
    """The parameters from which this pairing has its options."""
    for name, value in params.items():
        option = PARAMETERS[name].each or name if name in PARAMETERS else ""
        listed = value if isinstance(value, list) else [value]
        if option in (*PAIRING, *SAMPLING) and options[option] in listed:
            yield name


def _check_memory(
    params: Params, pairings: list[Candidate], longest: int, findings: _Findings
) -> None:
    """A problem, with advice on what would fit, if the pairing that needs the most memory does not
    fit the device."""
    dtype, config = DTYPES[params.get("dtype", "float32")], pairings[0][0].config
    free = memory.free_memory(torch.device(where(params.get("device", "auto"))))
    batch = max(values(params, "batch", "batches"), default=1)

    def need(batch: int) -> memory.Need:
        needs = (needed(request, prepared, dtype, batch, longest) for request, prepared in pairings)
        return max(needs, key=lambda need: need.total)

    most = need(batch)
    if most.total <= free:
        return
    fits = bisect_left(range(1, batch), free + 1, key=lambda b: need(b).total)
    advice = f"a batch of {fits} would fit" if fits else smaller(config, dtype, free)
    findings.add(
        f"{params['target']} on batch {batch} x {longest} tokens needs at least {most}, and "
        f"{memory.gib(free)} GiB are free: {advice}",
        *(("batch", "batches") if fits else ()), "target", "dtype", "device", "max_new_tokens",
    )  # fmt: skip


def needed(
    request: drafters.Request, prepared: drafters.Prepared, dtype: torch.dtype, batch: int,
    tokens: int,
) -> memory.Need:  # fmt: skip
    """A lower bound of the memory that a batch needs. tokens: of a row, the new ones included.
    Heads are small beside their target and are left out. A draft model feeds a token again."""
    models = [config for config in (request.config, prepared.config) if config]
    own = {m.to_json_string(use_diff=False): m for m in models}  # it may be its own draft
    size, slots = dtype.itemsize, rounded(tokens + request.tree.room)
    law = memory.law_bytes("any", request.sampling.temperature)
    caches = (
        slots * times * memory.kv_bytes(model, size)
        + state_bytes(model, dtype, request.tree.room, again)
        for model, times, again in zip(models, (1, prepared.slots), (0, 1), strict=False)
    )
    return memory.Need(
        sum(weight_bytes(model, dtype) for model in own.values()),
        batch * sum(caches),
        memory.work_bytes(models, size, batch, slots, tokens, len(request.tree), law),
    )


def each_pairing(params: Params) -> Iterator[dict[str, Any]]:
    """Every combination of pairing options that these parameters name, singly or in lists. `rivals`
    are compared at `temperature` only, not at each of `temperatures`, and not on `trees`."""
    yield from _combined(params)
    beside = {n: v for n, v in params.items() if n not in ("drafters", "temperatures", "trees")}
    for rival in values(params, "rivals"):
        yield from _combined(beside | {"drafter": rival})


def _combined(params: Params) -> Iterator[dict[str, Any]]:
    fixed = DEFAULTS | {name: value for name, value in params.items() if name in DEFAULTS}
    named = {option: values(params, option, f"{option}s") for option in PAIRING}
    lists = {option: several for option, several in named.items() if several}
    for combination in itertools.product(*lists.values()):
        options = fixed | dict(zip(lists, combination, strict=True))
        if options["gamma"] is None:
            options["gamma"] = usual_gamma(options)
        yield options


def sources(params: Params) -> set[str]:
    """The folders and hub ids of all models that these parameters name, zoo defaults included.

    A shipped drafter asks for its model first, so none is read. Raises UserError for a model that
    does not exist."""
    folders = {locate(name) for name in values(params, "target", "targets")}
    for target in values(params, "target", "targets"):
        for drafter in values(params, "drafter", "drafters", "rivals") or [DEFAULTS["drafter"]]:
            options = DEFAULTS | {"target": target, "drafter": drafter, "gamma": 1}
            own = drafter_of(drafter)[2] is not None
            request = request_of(options, *(read_target(target) if own else (None, 0, None)))

            def source(method: str, name: str, find: Any = request.source, own: bool = own) -> str:
                folders.add(find(method, name))
                if own:
                    return str(find(method, name))
                raise UserError("found")

            # gamma 1 may not suit, and a drafter that names no model may ask for the config
            with suppress(UserError, AttributeError):
                drafters.prepare(replace(request, source=source))
    return folders
