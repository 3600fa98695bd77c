"""What names of models and drafters stand for.

A model is a zoo name, a folder, a hub id or a transformers module; NAME+int8 is that model with
8-bit weights. A drafter is `METHOD`, `METHOD:ARGUMENT`, `module:Class`, a model's name, or an
object. No weight is loaded here.
"""

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from specexp import drafters, fitting, objects, rules
from specexp.drafters import Drafter
from specexp.drafters.model import causal_config, check_vocabulary
from specexp.errors import UserError, refusing, warn_once
from specexp.models import generation, load, memory
from specexp.models.servable import context_in_words, context_length
from specexp.sampling import Sampling
from specexp.tree import Tree
from specexp.zoo import shelf
from specexp.zoo.known import OWN_CODE, Answer, with_contents
from specexp.zoo.naming import locate, method_of

TODAY = datetime(2024, 7, 26)  # always the same date, so that equal keys have equal prompts
_CLOCK = "".join(f"|replace('%{code}', '{TODAY:%{code}}')" for code in "aAbBdmyYjHIMSp")
CLOCK = f"{{% macro strftime_now(form) %}}{{{{ form{_CLOCK} }}}}{{% endmacro %}}\n"
_PADDING = 1.1  # a model may have this many times more logits than its tokenizer has tokens


class TargetInfo(NamedTuple):
    """What is known of a target before its weights are read. vocab: tokens that it may emit."""

    config: Any
    vocab: int
    tokenizer: Any


def name_of(model: Any) -> str:
    """A model's name in messages: as given, or the folder or class of a model in memory."""
    if isinstance(model, str):
        return model
    return Path(getattr(model, "name_or_path", "") or type(model).__name__).name


def parse_drafter(drafter: Any) -> tuple[str, str, Any]:
    """Method, argument and object of a drafter; the object is None if the method ships with
    specexp. A model's name alone means `model:NAME`."""
    if drafter is None:
        raise UserError("drafter is None: give a name; plain drafts nothing")
    if isinstance(drafter, Drafter):
        return drafter.name, "", drafter
    if isinstance(drafter, nn.Module):
        return name_of(drafter), "", drafter
    if not isinstance(drafter, str):
        return getattr(drafter, "__name__", type(drafter).__name__), "", drafter
    if named := method_of(drafter):
        return *named, None
    own, argument = objects.find("drafter", drafter) or (None, "")
    return drafter.removesuffix(f":{argument}"), argument, own


def default_draft(target: Any, method: str) -> str:
    """The zoo's model or heads for this target. Raises UserError if it has none."""
    if not isinstance(target, str):
        raise UserError(
            f"the zoo has nothing for {name_of(target)}, a target in memory: name or pass a "
            "drafter, such as drafter=draft_model or drafter='ngram'"
        )
    return shelf.default_draft(target, method).name


def in_memory(target: Any, tokenizer: Any, dtype: str | None, device: str) -> tuple[str, str]:
    """Dtype and device of a target in memory. Raises UserError if one of them differs from what was
    asked for, or if its tokenizer is missing."""
    about = f"target {name_of(target)}"
    causal_config(target, about)
    if tokenizer is None:
        raise UserError(f"{about} is in memory: give its tokenizer too, tokenizer=...")
    devices = {str(p.device) for p in target.parameters()}
    if len(devices) > 1:
        raise UserError(
            f"{about} is spread over {', '.join(sorted(devices))}: put it on one device"
        )
    own, here = str(target.dtype)[6:], target.device
    if own not in load.DTYPES:
        raise UserError(f"{about} is in {own}: convert it with .to(torch.bfloat16)")
    if dtype not in (None, own):
        raise UserError(f"{about} is in {own}, not {dtype}: convert it with .to(torch.{dtype})")
    if device != "auto" and torch.device(device) not in (here, torch.device(here.type)):
        raise UserError(f"{about} is on {here}, not {device}: move it with .to({device!r})")
    return own, str(here)


def read_target(target: str) -> TargetInfo:
    load.read_config(source := locate(target))
    return target_of(target, load.read_tokenizer(source))


def target_of(target: Any, tokenizer: Any) -> TargetInfo:
    """The config, vocabulary and tokenizer of a target, given by name or in memory.

    The vocabulary V is one more than the largest id of the tokenizer. Logits beyond it are padding
    and are never emitted. Tokens that were added to the tokenizer and that the model does not know
    are left out. Raises UserError if the model has fewer logits than the other tokens."""
    named = isinstance(target, str)
    config = (load.read_config(locate(target)) if named else target.config).get_text_config()
    if not hasattr(tokenizer, "get_vocab"):
        kind = type(tokenizer).__name__
        raise UserError(f"tokenizer is of type {kind}: give a transformers tokenizer")
    ids, added = tokenizer.get_vocab(), tokenizer.get_added_vocab()
    V = max(ids.values()) + 1
    own = max((i for token, i in ids.items() if token not in added), default=V)
    if own < config.vocab_size < V:
        unknown = V - config.vocab_size
        warn_once("%s does not know the last %d tokens of its tokenizer", name_of(target), unknown)
        V = config.vocab_size
    check_vocabulary(config, V, name_of(target))
    if not named and config.vocab_size > max(_PADDING * V, -(-V // 128) * 128):
        raise UserError(
            f"{name_of(target)} has {config.vocab_size} logits and its tokenizer only {V} tokens: "
            "give the tokenizer that it was trained with"
        )
    return TargetInfo(config, V, tokenizer)


def generation_of(target: Any) -> Any:
    """The generation config of a target, a name or a model in memory; its config if it has none."""
    if isinstance(target, str):
        return load.read_generation(locate(target))
    return getattr(target, "generation_config", None) or target.config


class Whole(str):
    """A text in a chat template that has no special tokens where the tokenizer would add some."""


def encode(tokenizer: Any, text: str) -> list[int]:
    if not isinstance(text, str):
        raise UserError(f"a prompt is {text!r:.40}; it must be a text")
    how = {"add_special_tokens": False} if isinstance(text, Whole) else {}
    tokens = load.tokens_of(tokenizer, text, **how) if text else []
    if not tokens:
        raise UserError("a prompt is empty; give it at least one character")
    return tokens


def chat_text(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    """The text that an instruct model continues with its answer, without the special tokens that
    `encode` puts before every text but a `Whole` one. `messages`: a conversation in transformers'
    form that ends with a turn of the user. A template that tells the date is given `TODAY`."""
    if not getattr(tokenizer, "chat_template", None):
        raise UserError("the target's tokenizer has no chat template; leave chat out")
    with refusing("the target's chat template fails"):
        template = CLOCK + tokenizer.get_chat_template()
        text = tokenizer.apply_chat_template(
            messages, chat_template=template, add_generation_prompt=True, tokenize=False
        )
    if (last := messages[-1]["content"].strip()) not in text:
        raise UserError(
            f"the target's chat template leaves out what the user says, {last!r:.40}: it is not "
            "for messages of text"
        )
    tokens = load.tokens_of(tokenizer, text, add_special_tokens=False)
    for prompt in (str(text), str(text).removeprefix(tokenizer.bos_token or "")):
        if load.tokens_of(tokenizer, prompt) == tokens:
            return prompt
    return Whole(text)


def request_of(o: dict[str, Any], info: TargetInfo) -> drafters.Request:
    """The request for a drafter that the options of `load` make."""
    target = o["target"]
    method, argument, own = parse_drafter(o["drafter"])

    def source(method: str, name: str) -> str:
        return locate(name or default_draft(target, method))

    return drafters.Request(
        method=method, argument=argument, target=name_of(target), sampling=sampling_of(o),
        config=info.config, vocab=info.vocab, tokenizer=info.tokenizer,
        tree=Tree.parse(o["tree"], o["gamma"]), dtype=o["dtype"] or "float32", seed=o["seed"],
        source=source, folder=locate(target) if isinstance(target, str) else "", own=own,
    )  # fmt: skip


def sampling_of(o: dict[str, Any]) -> Sampling:
    """The sampling that is given, or the target's own. Raises UserError for both together."""
    sampling = Sampling(o["temperature"], o["top_k"], o["top_p"], o["min_p"])
    if o["sampling"] == "given":
        return sampling
    if o["sampling"] != "model":
        raise UserError(f"sampling {o['sampling']!r} is unknown; use given or model")
    if sampling != Sampling():
        raise UserError(
            "sampling model takes temperature, top_k, top_p and min_p from the target's generation "
            "config: leave them out, or use sampling given"
        )
    return generation.sampling(generation_of(o["target"]), name_of(o["target"]))


def logit_processors(target: Any, vocab: int, device: torch.device | None = None) -> Any:
    """What a target's generation config does to its logits (`generation.processors`)."""
    here = device or torch.device("cpu")
    return generation.processors(generation_of(target), name_of(target), vocab, here)


# --- facts for checks (measure/feasible.py), which zoo/known.py keeps -----------------------------


def facts_of_target(target: str) -> Answer:
    """Of the target that a name stands for: its vocabulary and its context."""
    config, V, _ = read_target(target)
    facts = {"vocab": V, "reach": context_length(config), "context": context_in_words(config)}
    return facts, read_from([target], [locate(target)])


def facts_of_tokenizer(target: str) -> Answer:
    """A target's tokenizer as JSON (`tokenizers.Tokenizer.from_str`); "" if more than that decides
    the tokens of a text."""
    tokenizer = read_target(target).tokenizer
    fast, own = PreTrainedTokenizerFast, type(tokenizer)
    plain = isinstance(tokenizer, fast) and not tokenizer.split_special_tokens
    plain = plain and (own.__call__, own._encode_plus) == (fast.__call__, fast._encode_plus)
    text = tokenizer.backend_tokenizer.to_str() if plain else ""
    return text, read_from([target], [locate(target)])


def facts_of_pairing(*options: tuple[str, Any]) -> Answer:
    """What decides whether a pairing of names fits its tree, its rule and the memory: the limits of
    its drafter, its sampling, and the sizes of its models, the target first.

    options: those of `load`. Raises UserError for a pairing that cannot be built."""
    o, used = dict(options), list[str]()
    request = _noting(request_of(o, read_target(o["target"])), used)
    prepared = drafters.prepare(request)
    logit_processors(o["target"], request.vocab)
    configs = [config for config in (request.config, prepared.config) if config]
    dtype = load.DTYPES.get(request.dtype, torch.float32)
    facts = {
        "method": request.method,
        "limits": {limit.name: getattr(prepared, limit.name) for limit in fields(fitting.Limits)},
        "sampling": asdict(request.sampling),
        "models": [_sizes(config, dtype, refed) for refed, config in enumerate(configs)],
    }
    named = [o["target"], o["drafter"], fitting.behind(request.method, request.argument)[1]]
    read = read_from(named, [request.folder, *used])
    return facts, read and [*read, *([OWN_CODE] if request.own is not None else [])]


def _sizes(config: Any, dtype: torch.dtype, refed: int) -> dict[str, Any]:
    """What decides the memory that a model needs, as numbers (`measure.feasible.needed`)."""
    states = [load.state_bytes(config, dtype, room, refed) for room in (0, 1)]
    return memory.shape(config) | {
        "described": hashlib.sha256(config.to_json_string(use_diff=False).encode()).hexdigest(),
        "itemsize": dtype.itemsize,
        "weights": load.loaded_bytes(config, dtype),
        "bfloat16": load.loaded_bytes(config, torch.bfloat16),
        "kv": memory.slot_bytes(config, dtype.itemsize, context_length(config)),
        "state": states[0],
        "state_by_node": states[1] - states[0],
    }


def facts_of_sources(target: str, drafter: str) -> Answer:
    """The folders and hub ids of the models of a pairing with a drafter of one's own. Raises
    UserError for a target that does not exist."""
    used = [locate(target)]
    options = {  # the models depend on the first two alone
        "target": target, "drafter": drafter, "gamma": 1, "tree": "chain", "temperature": 0.0,
        "top_k": 0, "top_p": 1.0, "min_p": 0.0, "sampling": "given", "dtype": "float32", "seed": 0,
    }  # fmt: skip
    request = _noting(request_of(options, read_target(target)), used)
    with suppress(UserError):  # gamma 1 may not suit
        drafters.prepare(request)
    read = read_from([target, drafter, request.argument], used)
    return used, read and [*read, OWN_CODE]


def _noting(request: drafters.Request, used: list[str]) -> drafters.Request:
    """The request, whose sources are added to `used` when they are asked for."""

    def source(method: str, name: str) -> str:
        used.append(request.source(method, name))
        return used[-1]

    return replace(request, source=source)


def facts_of_rule(rule: str) -> Answer:
    """What `fitting.fit` asks of a rule. Raises UserError if no rule has this name."""
    judge = rules.of(rule)
    facts = {name: getattr(judge, name) for name in ("name", "chains_only", "wants_q")}
    return facts, [] if objects.is_shipped(judge) else [OWN_CODE]


def read_from(names: Iterable[str], sources: Iterable[str]) -> list[Path] | None:
    """The files and folders that decide what these names stand for and what the models in the
    folders `sources` are; None if one of them is on a hub."""
    folders = [Path(fitting.split(source)[0]) for source in sources]
    if not all(folder.is_dir() for folder in folders):
        return None
    return with_contents(*(Path.cwd() / fitting.split(name)[0] for name in names if name), *folders)
