"""Facts of a model, read from the files of its folder without torch and transformers.

This covers the most common cases: Llama and Qwen 3, tokenizers defined by their tokenizer.json
alone, heads that `specexp zoo train` made for the target, and drafters that ship with specexp. For
anything else or unusual (an unlisted field, a size that does not fit, a hub id, 8-bit weights), the
functions here return None. Then `names` asks transformers, which also says what is wrong.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property, wraps
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

from specexp import fitting
from specexp.errors import UserError, refusing
from specexp.measure import prompts
from specexp.models import memory, servable
from specexp.models.heads import layouts
from specexp.zoo import naming, shelf
from specexp.zoo.known import Known

P = ParamSpec("P")
R = TypeVar("R")
BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}  # of a number
TYPES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
TOKENIZERS = ("TokenizersBackend", "PreTrainedTokenizerFast")  # add nothing to tokenizer.json
ROPES: dict[str, set[str]] = {  # and what each takes besides its base
    "default": set(),
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}
SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings",
)  # fmt: skip


def _is(*types: type | None) -> Callable[[Any], bool]:
    """Whether a value is of one of these types; None is for null."""
    return lambda value: (None if value is None else type(value)) in types


_flag, _text, _number, _id = _is(bool), _is(str), _is(int, float), _is(int, None)


def _share(value: Any) -> bool:
    return type(value) is float and 0 <= value <= 1


def _rope(value: Any) -> bool:
    """Whether this rotation is a usual one, without a limit of its own."""
    if value is None:
        return True
    others = {name: v for name, v in value.items() if name not in ("rope_type", "rope_theta")}
    numbers = [value.get("rope_theta", 1e4), *others.values()]
    usual = others.keys() == ROPES[value["rope_type"]]
    return usual and all(_number(v) and v > 0 for v in numbers)


_TOKENS: dict[str, Callable[[Any], bool]] = {
    "bos_token_id": _id, "pad_token_id": _id, "unk_token_id": _id, "transformers_version": _text,
    "eos_token_id": lambda v: _id(v) or (type(v) is list and all(map(_is(int), v))),
}  # fmt: skip
_CONFIG: dict[str, Callable[[Any], bool]] = _TOKENS | {
    **dict.fromkeys(SIZES, lambda v: type(v) is int and v > 0),
    **dict.fromkeys(("tie_word_embeddings", "use_cache"), _flag),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_sliding_window"), lambda v: v is False),
    **dict.fromkeys(("dtype", "torch_dtype"), lambda v: v in (*BYTES, "float16")),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), _rope),
    "sliding_window": _is(None), "layer_types": lambda v: {*(v or ())} <= {"full_attention"},
    "model_type": _text, "architectures": _is(list), "pretraining_tp": _is(int),
    **dict.fromkeys(("_name_or_path", "_model_name_or_path"), _text),
    "hidden_act": lambda v: v == "silu", "initializer_range": _share, "attention_dropout": _number,
    "rms_norm_eps": _share, "rope_theta": _number, "max_window_layers": _is(int),
}  # fmt: skip
_GENERATION: dict[str, Callable[[Any], bool]] = _TOKENS | {
    **dict.fromkeys(("_from_model_config", "do_sample", "use_cache"), _flag),
    **dict.fromkeys(("output_attentions", "output_hidden_states"), _flag),
    "top_p": lambda v: _share(v) and v > 0,
    "temperature": lambda v: _number(v) and v > 0, "top_k": lambda v: type(v) is int and v > 0,
}  # fmt: skip
_TOKENIZER: dict[str, Callable[[Any], bool]] = {
    "tokenizer_class": lambda v: v in TOKENIZERS, "backend": lambda v: v == "tokenizers",
    **dict.fromkeys(("clean_up_tokenization_spaces", "is_local", "local_files_only"), _flag),
    "model_max_length": _number, "model_input_names": _is(list), "added_tokens_decoder": _is(dict),
    **dict.fromkeys(("chat_template", "name_or_path", "padding_side"), _text),
    **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), _is(str, None)),
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A folder's `config`, of the fields SIZES, its `tokenizer`, a `tokenizers.Tokenizer`, and how
    many `numbers` its weights are."""

    folder: Path
    config: Any
    tokenizer: Any
    numbers: int

    @cached_property
    def tokens(self) -> dict[str, int]:
        return dict(self.tokenizer.get_vocab())

    @cached_property
    def facts(self) -> dict[str, Any]:
        """See `names.facts_of_target`."""
        return {
            "vocab": max(self.tokens.values()) + 1,
            "reach": servable.context_length(self.config),
            "context": servable.context_in_words(self.config),
        }

    def sizes(self, itemsize: int) -> dict[str, Any]:
        """See `names._sizes`."""
        buffers = 4 * self.config.head_dim  # rotary frequencies, twice
        return memory.shape(self.config) | {
            "described": str(self.folder), "itemsize": itemsize,
            "weights": self.numbers * itemsize + buffers, "bfloat16": self.numbers * 2 + buffers,
            "kv": memory.slot_bytes(self.config, itemsize), "state": 0, "state_by_node": 0,
        }  # fmt: skip


def _if_plain(read: Callable[P, R]) -> Callable[P, R | None]:
    """None in place of whatever `read` raises over a file or name that is out of the ordinary."""

    @wraps(read)
    def reading(*args: P.args, **kwargs: P.kwargs) -> R | None:
        with suppress(UserError), refusing("strange"):  # libraries may raise anything
            return read(*args, **kwargs)
        return None

    return reading


def _insist(plain: bool) -> None:
    if not plain:
        raise ValueError


@_if_plain
def model(source: str) -> Model:
    """The model in a folder."""
    folder = Path(source)
    servable.check_files(folder)
    described = _read(folder / "config.json", _CONFIG)
    servable.check_config_json(described, source)
    kind, E, H = (described[n] for n in ("model_type", "hidden_size", "num_attention_heads"))
    if kind == "llama":
        described.setdefault("head_dim", E // H)
    config = SimpleNamespace(**{name: described[name] for name in SIZES})
    L, V, d = config.num_hidden_layers, config.vocab_size, config.head_dim
    _insist(described["architectures"] == [TYPES[kind]] and E % H == d % 2 == 0)
    _insist((described.get("pad_token_id") or 0) in range(V))
    _insist(len(described.get("layer_types") or range(L)) == L)
    if (folder / "generation_config.json").exists():
        _read(folder / "generation_config.json", _GENERATION)
    keys = H + config.num_key_value_heads
    layer = 2 * E * d * keys + 3 * E * config.intermediate_size + 2 * E + 2 * d * (kind == "qwen3")
    numbers = V * E * (1 if described["tie_word_embeddings"] else 2) + L * layer + E
    _insist(numbers == _numbers(folder))
    plain = Model(folder, config, _tokenizer(folder), numbers)
    _insist(plain.facts["vocab"] <= V)
    return plain


def _read(file: Path, known: Mapping[str, Callable[[Any], bool]]) -> dict[str, Any]:
    """The settings in a file, all of which have values that are known."""
    settings: dict[str, Any] = json.loads(file.read_bytes())
    _insist(all(known[name](value) for name, value in settings.items()))
    return settings


def _numbers(folder: Path) -> int:
    """How many numbers the tensors in a folder hold."""
    index, named = folder / "model.safetensors.index.json", {"model.safetensors"}
    if index.exists():
        named = set(json.loads(index.read_bytes())["weight_map"].values())
    files = [*folder.glob("*.safetensors")]
    _insist({file.name for file in files} == named)
    return sum(prod(shape) for file in files for shape in layouts.shapes_in(file).values())


def _tokenizer(folder: Path) -> Any:
    """A folder's tokenizer, if it is what its tokenizer.json says and nothing more."""
    from tokenizers import AddedToken, Tokenizer

    _insist(not (folder / "added_tokens.json").exists())
    settings = _read(folder / "tokenizer_config.json", _TOKENIZER)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    added = {str(id_): token for id_, token in tokenizer.get_added_tokens_decoder().items()}
    for id_, token in settings.get("added_tokens_decoder", {}).items():
        _insist(repr(AddedToken(**token)) == repr(added[id_]))
    special = {v for name, v in settings.items() if name.endswith("_token") and v is not None}
    if (beside := folder / "special_tokens_map.json").exists():
        values = json.loads(beside.read_bytes()).values()
        special |= {v if isinstance(v, str) else v["content"] for v in values}
    _insist(special <= {token.content for token in added.values()})
    _insist("tokenizer_class" in settings)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@_if_plain
def chat(target: Model, prompt: prompts.Prompt) -> list[int]:
    """See `feasible.facts_of_chat`, for a template that asks for nothing but the messages."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    jinja = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    del jinja.filters["tojson"]  # transformers has another
    template = jinja.from_string((target.folder / "chat_template.jinja").read_text())
    settings = json.loads((target.folder / "tokenizer_config.json").read_bytes())
    _insist(
        not (target.folder / "special_tokens_map.json").exists() | ("chat_template" in settings)
    )
    special = {name: v for name, v in settings.items() if name.endswith("_token") and v is not None}
    answers = prompts.answers_before_last(prompt)
    messages = prompts.messages(prompt, answers)
    text = template.render(
        messages=messages, tools=None, documents=None, add_generation_prompt=True, **special
    )
    _insist(messages[-1]["content"].strip() in text)
    tokens = target.tokenizer.encode(text, add_special_tokens=False).ids
    alike = (text, text.removeprefix(special.get("bos_token", "")))
    _insist(bool(tokens) and tokens in [target.tokenizer.encode(same).ids for same in alike])
    return [len(tokens), len(answers) - len(prompt.answers)]


@_if_plain
def pairing(known: Known, options: tuple[tuple[str, Any], ...]) -> dict[str, Any] | None:
    """See `names.facts_of_pairing`, for a sampling that is given."""
    wanted = dict(options)
    target = known(model, known(naming.locate, wanted["target"]))
    method, argument = naming.method_of(wanted["drafter"]) or ("", "")
    source = naming.source_of(wanted["drafter"], wanted["target"])
    _insist(target is not None and wanted["sampling"] == "given")
    limits = fitting.limits_of(method, argument, target.config.num_hidden_layers)
    if not limits:
        return None
    named, (method, _) = method, fitting.behind(method, argument)
    used, itemsize = [target], BYTES[wanted["dtype"] or "float32"]
    roles = shelf.METHODS.get(method, ("draft",))
    if source and "draft" not in roles:
        card = json.loads(Path(source, "zoo.json").read_bytes())
        _insist(card["target"] == target.folder.name)
        head = layouts.read(source)
        _insist(head.kind in roles)
        taps = len(layouts.states_read(head, target.config.num_hidden_layers))
        limits = replace(limits, taps=taps)
        if method == "medusa":
            limits = replace(limits, deepest=layouts.medusa_size(head)[0])
        if method == "dflash":
            drafted = head.config["block_size"] - (not head.config["sample_from_anchor"])
            limits = replace(limits, deepest=drafted)
    elif source:
        used.append(known(model, source))
        _insist(used[1].tokens == target.tokens)
    return {
        "method": named,
        "limits": {limit.name: getattr(limits, limit.name) for limit in fields(fitting.Limits)},
        "models": [one.sizes(itemsize) for one in used],
    }
