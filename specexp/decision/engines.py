"""A plan in the words of the engine that will run it: options for vLLM, SGLang, TensorRT-LLM,
llama.cpp and transformers, as their documentation of November 2026 names them.

Acceptance carries over to another engine, the speedup does not: it depends on that engine's kernels
and scheduler, so it has to be measured there. Where draft tokens were sampled, engines that draft
greedily unless told otherwise are told to sample, too, and to verify by the same rule. An engine
that cannot draft so says why. One that takes a single draft length gets that of the smallest
batches, and is limited to these.
"""

import json
import shlex
from collections.abc import Callable
from typing import Any

from specexp import fitting
from specexp.decision.recommend import Advice, Plan
from specexp.errors import UserError, counted
from specexp.zoo import naming

NOT_THERE = "has no such drafter"
IN_8_BITS = "measured with 8-bit weights: quantise the draft model for this engine"
CHOSEN = ("ngram", "suffix")  # methods whose draft tokens are chosen at any temperature
SUFFIXES = ("eagle3", "mtp", "parallel")  # what TensorRT-LLM puts a suffix automaton before


class _Cannot(Exception):
    """This engine cannot do what the plan says."""


def of_advice(advice: Advice) -> dict[str, str]:
    """`options` of its best plan, if there is one; where a server was measured, of its engine."""
    about = advice.situation
    every = options(advice.best, about.target, about.rule) if advice.best else {}
    return {e: text for e, text in every.items() if about.engine in ("", e)}


def options(plan: Plan, target: str, rule: str = "") -> dict[str, str]:
    """For each engine, what switches the plan on there, or why it cannot. Empty for a plan that
    leaves drafting off. rule: of a sampled output, `Situation.rule`."""
    if not plan.steps:
        return {}
    schedule: dict[int, int] = {}
    for last, chosen in plan.steps:
        if not isinstance(chosen.draft, int):
            return dict.fromkeys(ENGINES, f"cannot be given the tree {chosen.draft}")
        schedule[last] = chosen.draft
    try:
        method, argument, suffix = _method(plan.drafter, target)
    except UserError as e:
        return dict.fromkeys(ENGINES, str(e))
    if rule != "block" and (method in CHOSEN or method.startswith("lookup:")):
        rule = ""
    written = {}
    for engine, write in ENGINES.items():
        try:
            if rule == "block" and engine != "vLLM":
                raise _Cannot("has no block verification")
            if rule == "match":
                raise _Cannot("has no such rule for drafts that were sampled: measure rule auto")
            written[engine] = write(method, argument, schedule, rule)
        except _Cannot as e:
            written[engine] = str(e)
            continue
        if suffix:
            begun = "  # " in written[engine]
            written[engine] += f"{'; ' if begun else '  # '}{IN_8_BITS}"
    return written


def _method(drafter: str, target: str) -> tuple[str, str, str]:
    """The method's name, or that of its heads' kind, `parallel` for a draft model that drafts in
    one pass or `trained` for a layer in place of the target's own, after `lookup:` behind a lookup;
    its argument: the folder or hub id of a model or heads if it has one; and `+int8` for a draft
    model with 8-bit weights. Raises UserError if these are not there any more."""
    try:
        named, argument = naming.method_of(drafter) or ("", "")
    except UserError:  # a class of one's own, from another folder
        return "", "", ""
    method, argument = fitting.behind(named, argument)
    source, suffix = naming.source_of(drafter, target), ""
    if source:
        source, suffix = fitting.split(source)
    if method in ("eagle", "dflash") and source:
        from specexp.models.heads import layouts

        method = layouts.read(source).kind
    if method == "mtp" and source:
        method = "trained"
    if method == "model" and source:
        from specexp.models import load

        if getattr(load.read_config(source).get_text_config(), "pard_token", None) is not None:
            method = "parallel"
    return "lookup:" * (named == "lookup") + method, source or argument, suffix


def _vllm(method: str, argument: str, schedule: dict[int, int], rule: str) -> str:
    methods: dict[str, dict[str, Any]] = {
        "model": {"method": "draft_model", "model": argument},
        "parallel": {"method": "draft_model", "model": argument, "parallel_drafting": True},
        "eagle3": {"method": "eagle3", "model": argument},
        "peagle": {"method": "eagle3", "model": argument, "parallel_drafting": True},
        "eagle": {"method": "eagle", "model": argument},
        "dflash": {"method": "dflash", "model": argument},
        "dflash2": {"method": "dflash", "model": argument},
        "dspark": {"method": "dspark", "model": argument},
        "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": _match(argument)},
        "mtp": {"method": "mtp"},
        "trained": {"method": "mtp", "model": argument},
        "medusa": {"method": "medusa", "model": argument},
        "suffix": {"method": "suffix"},
    }
    own = methods.get(method) or _no()
    if rule and method not in (*CHOSEN, "medusa"):
        own["draft_sample_method"] = "probabilistic"
    if rule == "block":
        own["rejection_sample_method"] = "block"
    if method in ("medusa", "suffix"):  # vLLM 0.32 stops if their length is to change
        return _vllm_of_one_length(own, *next(iter(schedule.items())))
    ranges, first = [], 1
    for last, draft in schedule.items():
        ranges.append([first, last, draft])
        first = last + 1
    by_batch = [*ranges, [first, first, 0]]  # the last holds for all larger batches
    own |= {"num_speculative_tokens": max(schedule.values()),
            "num_speculative_tokens_per_batch_size": by_batch}  # fmt: skip
    return f"--speculative-config {shlex.quote(json.dumps(own))}"


def _vllm_of_one_length(own: dict[str, Any], most: int, draft: int) -> str:
    needs = "arctic-inference"
    if own["method"] == "medusa":
        from specexp.models.heads import layouts

        heads, _ = layouts.medusa_size(layouts.read(own["model"]))
        if draft != heads:
            raise _Cannot(f"drafts with all {heads} heads: measure gamma {heads}")
        needs = '"medusa_fc_bias": true in config.json, if its layers have biases'
    own |= {"num_speculative_tokens": draft}
    return f"--speculative-config {shlex.quote(json.dumps(own))}  {_until(most)}; needs {needs}"


def _until(most: int) -> str:
    """The comment on options that know no load."""
    return f"# drafts at any load: use it for at most {counted(most, 'request')} at once"


def _sglang(method: str, argument: str, schedule: dict[int, int], rule: str) -> str:
    names = {"model": "STANDALONE", "eagle3": "EAGLE3", "eagle": "EAGLE", "mtp": "NEXTN",
             "dflash": "DFLASH", "dflash2": "DFLASH", "dspark": "DSPARK"}  # fmt: skip
    orders = {"ngram": "BFS", "suffix": "PROB"}  # what followed last, and what did most often
    most, draft = next(iter(schedule.items()))
    note = _until(most)
    if order := orders.get(method):
        return (
            f"--speculative-algorithm NGRAM --speculative-num-draft-tokens {draft + 1} "
            f"--speculative-ngram-max-bfs-breadth 1 --speculative-ngram-match-type {order}  "
            f"{note}; it copies from the output of all requests and the ends of their prompts, so "
            "measure its acceptance there"
        )
    options = [f"--speculative-algorithm {names.get(method) or _no()}"]
    options += [f"--speculative-draft-model-path {shlex.quote(argument)}"] * bool(argument)
    if method in ("dflash", "dflash2"):
        options.append(f"--speculative-dflash-block-size {draft + 1}")
    elif method == "dspark":
        note += "; the draft length is the checkpoint's"
    else:
        options.append(f"--speculative-num-steps {draft} --speculative-eagle-topk 1")
        options.append(f"--speculative-num-draft-tokens {draft + 1}")
    options += ["--speculative-use-rejection-sampling"] * bool(rule)
    return f"{' '.join(options)}  {note}"


def _tensorrt_llm(method: str, argument: str, schedule: dict[int, int], rule: str) -> str:
    methods: dict[str, dict[str, Any]] = {
        "model": {"decoding_type": "DraftTarget", "speculative_model": argument},
        "parallel": {"decoding_type": "PARD", "speculative_model": argument},
        "eagle3": {"decoding_type": "Eagle3", "speculative_model": argument},
        "mtp": {"decoding_type": "MTP"},
        "dflash": {"decoding_type": "DFlash", "speculative_model": argument},
        "dspark": {"decoding_type": "DSpark", "speculative_model": argument},
        "ngram": {"decoding_type": "NGram", "max_matching_ngram_size": _match(argument),
                  "is_use_oldest": False},
    }  # fmt: skip
    own = methods.get(behind := method.removeprefix("lookup:")) or _no()
    if behind != method:
        own |= {"sa_config": {"threshold": fitting.LONG_MATCH}} if behind in SUFFIXES else _no()
    own |= {"max_draft_len": max(schedule.values())}
    own |= {"use_rejection_sampling": True} if rule else {}
    text = json.dumps(own)[:-1].replace('"', "")
    by_batch = ", ".join(f"{last}: {draft}" for last, draft in schedule.items())
    also = "; with disable_overlap_scheduler: true" * (behind in ("model", "ngram"))
    note = f"# 1.3 or later{also}"
    return f"speculative_config: {text}, draft_len_schedule: {{{by_batch}}}}}  {note}"


def _llama_cpp(method: str, argument: str, schedule: dict[int, int], rule: str) -> str:
    most, draft = next(iter(schedule.items()))
    behind = method.removeprefix("lookup:")
    match = _match(argument) if method == "ngram" else fitting.LONG_MATCH
    simple = f"ngram-simple --spec-ngram-simple-size-n {match} --spec-ngram-simple-size-m {draft}"
    lookup = f",{simple}" * (behind != method)
    if method == "ngram":
        own = f"--spec-type {simple}"
    elif behind == "mtp":
        own = f"--spec-type draft-mtp{lookup} --spec-draft-n-max {draft}"
    elif behind in ("model", "eagle3", "dflash", "dflash2", "dspark"):
        kind = "draft-" + {"model": "simple", "dflash2": "dflash"}.get(behind, behind)
        own = f"--spec-type {kind}{lookup} --spec-draft-n-max {draft} --spec-draft-model DRAFT.gguf"
    else:
        _no()
    own += " --spec-draft-sampling probabilistic" * bool(rule)
    return f"{own} -np {most}  # drafts at any load: admits {counted(most, 'request')} at once"


def _transformers(method: str, argument: str, schedule: dict[int, int], rule: str) -> str:
    draft = next(iter(schedule.values()))
    constant = (
        f"num_assistant_tokens={draft}, num_assistant_tokens_schedule='constant', "
        "assistant_confidence_threshold=0"
    )
    own = {
        "model": f"assistant_model=draft, {constant}",
        "early_exit": argument and f"assistant_early_exit={argument}, {constant}",
        "mtp": "use_mtp=True",  # a token a layer, whatever the draft length
        "ngram": f"prompt_lookup_num_tokens={draft}, max_matching_ngram_size={_match(argument)}",
    }.get(method) or _no()
    return f"model.generate(..., {own})  # one request at a time"


def _match(argument: str) -> int:
    """The longest match of `ngram:N`; of another method's argument nothing is meant by it."""
    return fitting.whole(argument) or fitting.DEFAULTS["ngram"]


def _no() -> Any:
    raise _Cannot(NOT_THERE)


ENGINES: dict[str, Callable[[str, str, dict[int, int], str], str]] = {
    "vLLM": _vllm,
    "SGLang": _sglang,
    "TensorRT-LLM": _tensorrt_llm,
    "llama.cpp": _llama_cpp,
    "transformers": _transformers,
}
