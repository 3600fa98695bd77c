"""Whether the pairings that parameters name can be built, fit their context and memory, and may run
their policies: found from files' heads, before a weight is loaded.

Here facts are compared with what is asked for. To find them out takes torch and transformers, which
`zoo.known` imports when it is asked for one that is not in the cache.
"""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from types import SimpleNamespace
from typing import Any

from specexp import fitting, objects
from specexp.errors import UserError, counted, first_line, refusing
from specexp.measure import prompts
from specexp.measure.parameters import (
    PARAMETERS,
    Problem,
    by_mention,
    problems_of_values,
    values,
)
from specexp.models import memory
from specexp.policy import PRICED
from specexp.tree import MOST, Tree
from specexp.zoo import naming
from specexp.zoo.known import OWN_CODE, Answer, Known

Params = Mapping[str, Any]
PAIRING = ("drafter", "gamma", "temperature", "rule", "tree")
"""What a pairing is varied over: singly, or in a list."""
SAMPLING = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
DEFAULTS: dict[str, Any] = {
    n: PARAMETERS[n].default for n in ("target", *PAIRING, *SAMPLING, "sampling", "dtype", "seed")
}
SERVER = "server"
"""The parameter that says where the models run, if not here."""
SHORT = prompts.Prompt("of one letter", "", ("a",))
"""In place of prompts that cannot be read: what is impossible with it is so with any."""


@dataclass(frozen=True)
class Candidate:
    """A pairing that can be built. models: the sizes of its models, the target first."""

    limits: fitting.Limits
    tree: Tree
    temperature: float
    models: Sequence[Any]


@dataclass
class _Findings:
    """The problems of some parameters."""

    params: Params
    problems: list[Problem] = field(default_factory=list)

    def add(self, what: str, *names: str) -> None:
        self.problems.append(Problem(what, tuple(n for n in names if n in self.params)))

    def check(self, run: Callable[..., Any], *args: Any, blame: Sequence[str]) -> Any:
        """What run(*args) returns; if it raises, None, and a problem that names the parameters to
        `blame`, those first which the message mentions."""
        try:
            return run(*args)
        except (UserError, OSError) as e:
            present = [name for name in blame if name in self.params]
            self.add(first_line(e), *by_mention(first_line(e), present, self.params))
        return None


def problems_of(
    params: Params, texts: list[prompts.Prompt] | None, known: Known, wrong: Set[str], light: bool
) -> list[Problem]:
    """The problems of these parameters together; if `light`, those that names, numbers and the
    prompts show, without torch. `wrong`: those whose own value is wrong already; if there are any,
    memory is not asked about."""
    findings = _Findings(params)
    texts = _check_texts(params, texts, known, findings, wrong)
    if not light and str(device := params.get("device", "auto")).startswith("cuda"):
        findings.check(known.cached, facts_of_gpu, device, blame=("device",))
    deepest = MOST
    if not light and "target" in params and SERVER not in params:
        pairings, longest = _check_models(params, texts, known, findings, wrong)
        if pairings and not (findings.problems or wrong):
            _check_memory(params, pairings, longest, known, findings)
        deepest = min([deepest, *(pairing.limits.deepest for pairing in pairings)])
    _check_policies(params, deepest, known, findings)
    return findings.problems


def _check_texts(
    params: Params, texts: list[prompts.Prompt] | None, known: Known, findings: _Findings,
    wrong: Set[str],
) -> list[prompts.Prompt]:  # fmt: skip
    """Problems of names and numbers; returns the prompts."""
    for gamma in values(params, "gamma", "gammas") or [1]:
        for shape in values(params, "tree", "trees") or ["chain"]:
            findings.check(Tree.parse, shape, gamma, blame=("gamma", "gammas", "tree", "trees"))
    if "prompts" not in {*params, *wrong} and not prompts.SHIPPED.is_dir():
        texts = texts or [SHORT]  # an installed package ships none, and none are asked for
    if texts is None:
        categories = None if "prompts" in wrong else tuple(params.get("categories") or ()) or None
        limit = None if "limit" in wrong else params.get("limit")
        source = prompts.load, params.get("prompts", "all"), categories, limit
        texts = findings.check(known, *source, blame=("prompts", "limit", "categories"))
        texts = texts or [SHORT]
    for rule in values(params, "rule", "rules"):
        if rule != "auto":
            findings.check(known, fitting.rule, rule, blame=("rule", "rules"))
    lists = [name for name in params if name in PARAMETERS and PARAMETERS[name].each]
    compared = any(value != "plain" for value in values(params, *lists))
    for name in ("drafter", "rivals"):
        if compared and "plain" in values(params, name):
            findings.add(
                "drafter plain drafts nothing: it is the baseline that all others are compared "
                "with; name another one, such as ngram", name
            )  # fmt: skip
        for drafter in values(params, name) if "target" in {*params, *wrong} else ():
            findings.check(known, naming.insist_on_drafter, drafter, "", blame=(name,))
    if "target" in params:
        there = findings.check(known, naming.locate, params["target"], blame=("target",))
        here = there and SERVER not in params  # what a server drafts with need not be here
        each = {options["drafter"]: options for options in each_pairing(params, wrong) if here}
        for drafter, options in each.items():
            blame = [*_naming(options, params), "target", "dtype"]
            question = naming.insist_on_drafter, drafter, params["target"]
            findings.check(known, *question, blame=blame)
    return texts


def _check_policies(params: Params, deepest: int, known: Known, findings: _Findings) -> None:
    for policy in values(params, "policy", "policies"):
        fluid = "requests_per_day" in params
        if fluid or policy not in PRICED:  # whose cost table is measured later
            question = facts_of_policy, policy, deepest, fluid
            findings.check(known.cached, *question, blame=("policy", "policies", "drafter"))


def facts_of_policy(policy: str, deepest: int, fluid: bool) -> Answer:
    """None: it may run. Raises UserError for one that may not, for drafts of this depth or, if
    `fluid`, in a simulation of fleets."""
    from specexp.serving import policies

    if fluid and policy == "bandit":
        raise UserError("bandit learns by trial, which this simulation cannot model: use goodput")
    if policy in PRICED:
        return None, []
    return None, [] if objects.is_shipped(policies.of(policy, None, deepest)) else [OWN_CODE]


def _check_models(
    params: Params, texts: list[prompts.Prompt], known: Known, findings: _Findings, wrong: Set[str]
) -> tuple[list[Candidate], int]:
    """The pairings that can be built, and the tokens of the longest prompt with its output."""
    target = params["target"]
    there = findings.check(known, naming.locate, target, blame=("target",))
    asking = known.cached, "specexp.names.facts_of_target", target
    if not there or not (facts := findings.check(*asking, blame=("target",))):
        return [], 0
    pairings = []
    for options in each_pairing(params, wrong):
        blame = *_naming(options, params), "target", "dtype"
        wrong_alone = {name for problem in problems_of_values(options) for name in problem.names}
        if (rule := options["rule"]) != "auto":
            judged = findings.check(known, fitting.rule, rule, blame=("rule", "rules"))
            wrong_alone |= set() if judged else {"rule"}
        options |= {name: DEFAULTS[name] for name in wrong_alone}  # which hides no other problem
        if pairing := findings.check(candidate, options, facts["vocab"], known, blame=blame):
            pairings.append(pairing)
    context, in_words = facts["reach"], facts["context"]
    new = params.get("max_new_tokens", 0)
    gammas = values(params, "gamma", "gammas")
    for gamma in gammas:
        if gamma >= context:
            findings.add(
                f"gamma {gamma} exceeds the {in_words} of {target}", "gamma", "gammas", "target"
            )
    for slots in values(params, "contexts"):  # of which `costs.measure` needs a few beside a draft
        if slots > context:
            what = f"context {slots} exceeds the {in_words} of {target}"
            findings.add(what, "contexts", "target")
        elif gammas and slots < (least := max(gammas) + 4):
            what = f"context {slots} is too short for {max(gammas)} draft tokens: use {least} or"
            findings.add(f"{what} more", "contexts", "gammas", "gamma")
    needs = []
    for prompt in texts:
        if params.get("chat") or prompt.chat:
            blame = ("chat", "target", "prompts")
            asking = known.cached, facts_of_chat, target, *astuple(prompt)
            n, answers = findings.check(*asking, blame=blame) or (0, 0)
        else:
            plain, blame = (_tokens_of, prompt.text, target, known), ("prompts", "target")
            n, answers = findings.check(known, *plain, blame=blame) or 0, 0
        needs.append(n + new * (1 + answers))
    longest = max(needs, default=0)
    if longest > context:
        name = texts[needs.index(longest)].question_id
        more = sum(need > context for need in needs) - 1
        others = f" (also too long: {counted(more, 'more prompt')})" * (more > 0)
        findings.add(
            f"prompt {name} with {new} new tokens needs {longest} tokens, {longest - context} more "
            f"than the {in_words} of {target}{others}",
            *(("max_new_tokens",) if new >= context / 2 else ()), "prompts", "max_new_tokens",
            "target",
        )  # fmt: skip
    return pairings, longest


def facts_of_chat(target: str, *prompt: Any) -> Answer:
    """The tokens of a prompt, given by its fields, in the target's chat template, and how many
    answers are still to be decoded."""
    from specexp import names

    tokenizer = names.read_target(target)[2]
    text, answers = prompts.longest(prompts.Prompt(*prompt), tokenizer)
    return [len(names.encode(tokenizer, text)), answers], names.read_from(
        [target], [names.locate(target)]
    )


def _tokens_of(text: str, target: str, known: Known) -> int:
    """How many tokens the target has for a text. Raises UserError if there is none."""
    if text and (tokenizer := known(_tokenizer, target, known)):
        with suppress(UserError), refusing("it fails"):  # the target's own says what is wrong
            if tokens := len(tokenizer.encode(text)):
                return tokens
    from specexp import names

    return len(names.encode(known(names.read_target, target)[2], text))


def _tokenizer(target: str, known: Known) -> Any:
    from tokenizers import Tokenizer

    asking = "specexp.names.facts_of_tokenizer", target
    if not (described := known.on_disk and known.cached(*asking)):
        return None
    tokenizer = Tokenizer.from_str(described)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def candidate(options: Mapping[str, Any], vocab: int, known: Known) -> Candidate:
    """The pairing of these options of `specexp.load`. Raises UserError if it cannot be built."""
    known(naming.insist_on_drafter, options["drafter"], options["target"])
    rule, gamma, given = options["rule"], options["gamma"], options["sampling"] == "given"
    ruling = None
    if rule != "auto":
        ruling = SimpleNamespace(**known.cached("specexp.names.facts_of_rule", rule))
    looked_up = {n: v for n, v in options.items() if n != "rule"} | {"seed": 0}
    if given:
        fitting.check_sampling(*(options[name] for name in ("temperature", *SAMPLING)))
        looked_up |= SAMPLING | {"temperature": 0.0}
    if not _may_be_own(options["drafter"]):  # then it sees nothing of the tree and the rule
        looked_up |= {"gamma": 1, "tree": "chain"}
    elif gamma is None:
        looked_up["gamma"] = 1
    asking = tuple(looked_up.items())
    facts = known.cached("specexp.names.facts_of_pairing", *asking)
    limits = fitting.Limits(**facts["limits"])
    if gamma is None:
        gamma = fitting.usual_gamma(limits, options["tree"])
    tree = Tree.parse(options["tree"], gamma)
    temperature = options["temperature"] if given else facts["sampling"]["temperature"]
    fitting.fit(facts["method"], limits, tree, vocab, ruling, temperature)
    models = [SimpleNamespace(**sizes) for sizes in facts["models"]]
    return Candidate(limits, tree, temperature, models)


def _may_be_own(drafter: str) -> bool:
    """Whether code of one's own may stand behind this name (`names.parse_drafter`)."""
    first = drafter.partition(":")[0]
    if first in fitting.shipped():
        return False
    return first in fitting.methods() or bool(objects.module_of(drafter))


def _naming(options: Mapping[str, Any], params: Params) -> Iterator[str]:
    """The parameters from which this pairing has its options."""
    for name, value in params.items():
        option = PARAMETERS[name].each or name if name in PARAMETERS else ""
        listed = value if isinstance(value, list) else [value]
        if option in (*PAIRING, *SAMPLING, "sampling") and options[option] in listed:
            yield name


def _check_memory(
    params: Params, pairings: list[Candidate], longest: int, known: Known, findings: _Findings
) -> None:
    """A problem, with advice on what would fit, if the pairing that needs the most memory does not
    fit the device."""
    batch = max(values(params, "batch", "batches"), default=1)
    new = params.get("max_new_tokens", 0)

    def need(batch: int) -> memory.Need:
        needs = (needed(pairing, batch, longest, new) for pairing in pairings)
        return max(needs, key=lambda need: need.total)

    most = need(batch)
    if most.total <= (free := _free_memory(params.get("device", "auto"), known)):
        return
    fits = bisect_left(range(1, batch), free + 1, key=lambda b: need(b).total)
    halved, dtype = pairings[0].models[0].bfloat16, params.get("dtype", "float32")
    advice = f"a batch of {fits} would fit" if fits else memory.advice(halved, dtype, free)
    findings.add(
        f"{params['target']} on batch {batch} x {longest} tokens needs at least {most}, and "
        f"{memory.gib(free)} GiB are free: {advice}",
        *(("batch", "batches") if fits else ()), "target", "dtype", "device", "max_new_tokens",
    )  # fmt: skip


def _free_memory(device: str, known: Known) -> int:
    """Bytes that can still be allocated on this device; for a plan that is checked without torch
    (`known.on_disk`), all bytes of its GPU."""
    if device == "cpu" or not (gpu := known.cached(facts_of_gpu, device)):
        return memory.free_memory(None)
    if known.on_disk:
        return int(gpu)
    import torch

    return memory.free_memory(torch.device("cuda" if device == "auto" else device))


def facts_of_gpu(device: str) -> Answer:
    """All bytes of the GPU that a parameter `device` means; None if it means the CPU. Raises
    UserError if it is not there."""
    import torch

    if why := memory.no_cuda():
        if device == "auto":
            return None, []
        raise UserError(f"{why}; use device auto or cpu")
    at, count = torch.device("cuda" if device == "auto" else device), torch.cuda.device_count()
    if (at.index or 0) >= count:
        raise UserError(f"device {device!r} does not exist; GPUs here: {count}, from cuda:0")
    return torch.cuda.mem_get_info(at)[1], []


def needed(pairing: Candidate, batch: int, tokens: int, new: int = 0) -> memory.Need:
    """A lower bound of the memory that a batch needs. tokens: of a row, the `new` ones included.
    Heads are small beside their target and are left out. A draft model feeds a token again."""
    models, tree = pairing.models, pairing.tree
    slots, size = memory.rounded(tokens + tree.room), models[0].itemsize
    law, taps = memory.law_bytes("any", pairing.temperature), pairing.limits.taps
    caches = (
        memory.row_bytes(model.kv, slots * times, tree.room)
        + model.state
        + tree.room * model.state_by_node
        for model, times in zip(models, (1, pairing.limits.slots), strict=False)
    )
    return memory.Need(
        sum({m.described: m.weights for m in models}.values()),  # it may draft for itself
        batch * sum(caches),
        memory.work_bytes(models, size, batch, slots, tokens - new, len(tree), law, taps),
    )


def each_pairing(params: Params, wrong: Set[str] = frozenset()) -> Iterator[dict[str, Any]]:
    """Every combination of pairing options that these parameters name, singly or in lists. `rivals`
    are compared at `temperature` only, not at each of `temperatures`, and not on `trees`. A drafter
    that is `wrong` and left out is not taken for the default one."""
    if "drafter" in params or "drafter" not in wrong:
        yield from _combined(params)
    beside = {n: v for n, v in params.items() if n not in ("temperatures", "trees")}
    for rival in values(params, "rivals"):
        yield from _combined(beside | {"drafter": rival})


def _combined(params: Params) -> Iterator[dict[str, Any]]:
    fixed = DEFAULTS | {name: value for name, value in params.items() if name in DEFAULTS}
    named = {o: values(params, o, *({f"{o}s"} & PARAMETERS.keys())) for o in PAIRING}
    lists = {option: several for option, several in named.items() if several}
    for combination in itertools.product(*lists.values()):
        yield fixed | dict(zip(lists, combination, strict=True))


def sources(params: Params, known: Known) -> set[str]:
    """The folders and hub ids of all models that these parameters name, zoo defaults included; none
    where a server runs them.

    Raises UserError for a target that does not exist."""
    folders: set[str] = set()
    for target in values(params, "target") if SERVER not in params else ():
        folders.add(known(naming.locate, target))
        for drafter in values(params, "drafter", "rivals") or [DEFAULTS["drafter"]]:
            if known(naming.method_of, drafter) is None:
                folders |= {*known.cached("specexp.names.facts_of_sources", target, drafter)}
            with suppress(UserError):
                folders |= {*filter(None, [known(naming.source_of, drafter, target)])}
    return folders
