"""`load` makes a pairing from names or objects, for notebooks, grid points and the command line.

Wherever a name is taken, an object is taken too; names.py resolves names. Mistakes in a pairing are
found before any weight is loaded (`_parts`).
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from specexp import checked, drafters, fitting, names, rules
from specexp.engine import Engine, Generation
from specexp.errors import UserError, brief, check_type, meant, refusing, warn_once
from specexp.models import generation, memory
from specexp.models.lm import LM
from specexp.models.load import load as load_model
from specexp.models.load import of_module, text_of
from specexp.names import TargetInfo
from specexp.policy import Fixed, Policy
from specexp.rules import Rule
from specexp.sampling import Sampling
from specexp.trace import Acceptance
from specexp.tree import Tree
from specexp.zoo.naming import full_name

if TYPE_CHECKING:
    from specexp.measure.comparison import Comparison


@dataclass
class Output(Generation):
    """A `Generation` with its text. text: the new text of each row, without special tokens. A
    notebook shows it in colour, with its acceptance record."""

    text: list[str]
    tokenizer: Any = field(repr=False, compare=False)

    def decode(self, tokens: Sequence[int]) -> str:
        return text_of(self.tokenizer, tokens)

    @property
    def acceptance(self) -> Acceptance:
        """Of all rows together; `trace.by_row` keeps them apart."""
        return self.trace.acceptance

    @property
    def tokens_per_pass(self) -> float:
        """Mean tokens emitted per target forward pass and row, without prefill; 1 if nothing is
        drafted."""
        return self.acceptance.tokens_per_pass

    def __repr__(self) -> str:
        return f"Output({self.acceptance})"

    def _repr_html_(self) -> str:
        from specexp.figures import cards

        return cards.of_output(self)


@dataclass(frozen=True)
class Pairing:
    """A target with a drafter, ready to generate; `specexp.load` makes it.

    Attributes:
        engine: Runs the rounds. `engine.plain()` is ordinary decoding with the same target.
        tokenizer: The target's.
        drafter: The drafter's short name, for tables.
        named: The drafter's full name.
        options: The arguments of `load`, except device and tokenizer.
        gamma: The draft length: that of `options`, or the usual one.
        deepest: The longest draft that the drafter can make, in tokens.
    """

    engine: Engine
    tokenizer: Any
    drafter: str
    named: str
    options: dict[str, Any]
    gamma: int
    deepest: int

    @property
    def target(self) -> LM:
        return self.engine.target

    @property
    def followed(self) -> dict[str, Any]:
        """The settings of the target's generation config that change its logits."""
        return generation.followed(names.generation_of(self.options["target"]))

    def __repr__(self) -> str:
        own = {"target": self.target.name, "drafter": self.named, "gamma": self.gamma}
        options = self.options | own
        shown = [n for n, value in options.items() if n == "target" or value != DEFAULTS[n]]
        return f"Pairing({', '.join(f'{n}={options[n]!r}' for n in shown)})"

    def __str__(self) -> str:
        return f"{self.target.name} with {self.drafter}, {self.engine.sampling}"

    def _repr_html_(self) -> str:
        from specexp.figures import cards

        return cards.of_pairing(self)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [names.encode(self.tokenizer, text) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return text_of(self.tokenizer, tokens)

    def generate(self, texts: str | Sequence[str], max_new_tokens: int = 64) -> Output:
        """Continue texts, all in one batch.

        Args:
            texts: The prompts; one string is a batch of one.
            max_new_tokens: The most tokens that a row gains; it ends earlier at an EOS.

        Returns:
            `text`, a list of strings; `tokens`, a list of token lists, EOS included; `trace`, what
            happened in every round; `acceptance`; and `tokens_per_pass`.

        Raises:
            UserError: A prompt is empty, or does not fit the context or the memory.
            NonFiniteLogits: A model produced NaN or infinite logits, or its generation config left
                no token.
        """
        _check_types(self.generate, texts=texts, max_new_tokens=max_new_tokens)
        texts = [texts] if isinstance(texts, str) else texts
        batch = self.engine.generate(self.encode(texts), max_new_tokens)
        text = [text_of(self.tokenizer, t, skip_special_tokens=True) for t in batch.tokens]
        return Output(batch.tokens, batch.trace, text, self.tokenizer)

    def answer(self, text: str, max_new_tokens: int) -> str:
        """The target's own continuation of a text, by plain decoding."""
        [tokens] = self.engine.plain().generate(self.encode([text]), max_new_tokens).tokens
        return text_of(self.tokenizer, tokens, skip_special_tokens=True)

    def compare_with_plain(
        self, prompts: str | Sequence[str], max_new_tokens: int = 64, repeats: int = 1
    ) -> Comparison:
        """Time this pairing against plain decoding, and check that its output is the target's.

        Both take turns on every prompt, one stream at a time; prefill is not timed.

        Args:
            prompts: Texts. The interval is over prompts: few give a wide one.
            max_new_tokens: Tokens per prompt.
            repeats: How often every prompt is timed.

        Returns:
            An object that prints as two lines, with `speedup` (value, low, high: its 95 % bootstrap
            interval), `n` (prompts), `exact` (no difference beyond rounding; draft tokens follow q,
            emitted tokens p) and `acceptance`.
        """
        # imported from a room above this one, since a pairing is where a reader looks for it
        from specexp.measure import comparison

        options = {"prompts": prompts, "max_new_tokens": max_new_tokens, "repeats": repeats}
        _check_types(self.compare_with_plain, **options)
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        return comparison.with_plain(self, texts, max_new_tokens, repeats)

    def with_(self, **changes: Any) -> Pairing:
        """A pairing with the same target and some options changed: drafter, gamma, rule ..."""
        changeable = [name for name in self.options if name not in ("target", "dtype")]
        for name in changes:
            if name not in changeable:
                hint = "" if name in DEFAULTS else meant(name, changeable)
                raise UserError(
                    f"with_ keeps the target and cannot change {name}{hint} (it can change "
                    f"{', '.join(changeable)}; anything else: specexp.load)"
                )
        changes = {name: _path_as_name(value) for name, value in changes.items()}
        _check_types(load, **changes)
        if isinstance(tree := changes.get("tree"), Tree):
            changes = {"gamma": tree.depth} | changes
        from_model = changes.get("sampling") == "model"
        options = self.options | (asdict(Sampling()) if from_model else {}) | changes
        options |= asdict(names.sampling_of(options)) | {"sampling": "given"}
        pairing = _assemble(self.target, self.tokenizer, options)
        return pairing if "drafter" in changes else replace(pairing, drafter=self.drafter)

    def apart(self) -> Pairing:
        """A pairing with the same target weights but caches of its own. Raises UserError if its
        drafter or policy is an object that cannot be copied."""
        target = self.target.apart()
        options = dict(self.options)
        for part in ("drafter", "policy"):
            own = options[part]
            if not isinstance(own, (str, type, nn.Module)) and own is not None:
                about = f"{part} {type(own).__name__} cannot be copied"
                with refusing(f"{about}; pass its class, or a function that makes it"):
                    options[part] = checked.copied(own, self.target, target)
        return _assemble(target, self.tokenizer, options)


def load(
    target: Any = "target-10m",
    drafter: Any = "model",
    gamma: int | None = None,
    *,
    tokenizer: Any = None,
    rule: Any = "auto",
    policy: Any = None,
    tree: str | Tree = "chain",
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    sampling: str = "given",
    dtype: str | None = None,
    device: str = "auto",
    seed: int = 0,
) -> Pairing:
    """Load a target and a drafter as a pairing.

    The target's generation config applies to its logits as in transformers (repetition_penalty,
    no_repeat_ngram_size, bad_words_ids, suppress_tokens, sequence_bias).

    Mistakes in a pairing are found before any weight is loaded. A drafter, rule or policy that does
    not ship with specexp first runs a few rounds in which everything that it returns is checked.

    Args:
        target: A zoo name, a folder, a hub id, or a transformers causal LM in memory, which is
            put into evaluation mode and needs no gradients from then on. A name followed by `+int8`
            has 8-bit weights.
        drafter: `METHOD` or `METHOD:ARGUMENT` (`specexp models` lists the methods); the name of a
            draft model; a draft model in memory, with the target's tokenizer; a `Drafter`, as an
            instance or a class; a function of a `drafters.Request` that returns one; or
            `module:Class`.
        gamma: The draft length: draft tokens of a chain, or the depth of a grown tree. None: 5, or
            the longest draft that the drafter can make, also of another drafter (`with_`).
        tokenizer: Needed for a target in memory; by default the one in the target's folder.
        rule: `match`, `reject`, `block`, `typical`, `lenient:0.5`; a `Rule`, as an instance or a
            class; or `module:Class`. `auto`: reject if draft tokens are sampled from a
            distribution, else (as always at temperature 0) match.
        policy: What decides how much the next round drafts: a `Policy`, `module:Class`, or a name
            such as `threshold:5,8` (specexp/serving/policies.py). None: `tree` every round.
        tree: The draft's shape: `chain`; `3x2x1`, the children of a node at each depth; or
            `grown:16`, 16 draft tokens where the drafter is most confident (Li et al. 2024,
            EAGLE-2); or a `Tree`, whose depth is then the draft length.
        temperature: Of target and drafter; 0 is greedy.
        top_k: Sample from the k likeliest tokens; 0: from all.
        top_p: Sample from the likeliest tokens of this total probability.
        min_p: Sample from the tokens that are at least this likely, relative to the likeliest.
        sampling: `model`: temperature, top_k, top_p and min_p are those of the target's generation
            config, as in transformers; `given`: those above.
        dtype: `float32`, `bfloat16` or `float64`. None: float32, or that of a model in memory.
        device: `cpu`, `cuda` or `cuda:N`. `auto`: that of a model in memory, else the GPU if there
            is one.
        seed: Of all random numbers. A row's sample depends only on the seed, its prompt and its
            place in the batch.

    Returns:
        The pairing: `generate`, `compare_with_plain`, and `with_` for variants of it.

    Raises:
        UserError: Bad input; its one line says what is wrong and what to do.
    """
    memory.check_device(device := str(device))
    target, drafter = _path_as_name(target), _path_as_name(drafter)
    if isinstance(target, str):
        tokenizer = tokenizer or names.read_target(target).tokenizer
        dtype = "float32" if dtype is None else dtype
    else:
        dtype, device = names.in_memory(target, tokenizer, dtype, device)
    _exempt_imports_from_gc()
    options = {
        "target": target, "drafter": drafter, "gamma": gamma, "temperature": temperature,
        "top_k": top_k, "top_p": top_p, "min_p": min_p, "sampling": sampling, "rule": rule,
        "policy": policy, "tree": tree, "dtype": dtype, "seed": seed,
    }  # fmt: skip
    _check_types(load, **{n: value for n, value in options.items() if value is not DEFAULTS[n]})
    options |= asdict(names.sampling_of(options)) | {"sampling": "given"}
    info = names.target_of(target, tokenizer)
    parts = _parts(options, info)
    names.logit_processors(target, info.vocab)
    if isinstance(target, str):
        source, name, on = names.locate(target), Path(target).name, resolve_device(device)
        model = load_model(source, name, dtype, on, info.vocab)
    else:
        model = of_module(target, names.name_of(target), info.vocab)
    processors = names.logit_processors(target, info.vocab, model.device)
    model = model.apart(process=processors)
    pair = _assemble(model, tokenizer, options, parts)
    if isinstance(target, str):
        # not sooner: a refusal is one line
        generation.warn_of_no_end(names.generation_of(target), info.config, source)
    return pair


@cache
def _exempt_imports_from_gc() -> None:
    """Exempt the objects of imported libraries from garbage collection: scanning half a million of
    them takes a fifth of a second, in the middle of some timed round."""
    gc.collect()
    gc.freeze()


def resolve_device(device: str) -> str:
    """A device's name; `auto` becomes the GPU if there is one, else the CPU, with a warning if
    torch cannot use the GPU. Raises UserError for an unknown device."""
    memory.check_device(device)
    if device != "auto":
        return device
    if torch.cuda.is_available():
        return "cuda"
    if why := memory.unused_gpu():
        warn_once("%s: running on the CPU", why)
    return "cpu"


DEFAULTS = {name: p.default for name, p in inspect.signature(load).parameters.items()}


def _path_as_name(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _check_types(call: Callable[..., Any], **options: Any) -> None:
    """Raise UserError for an option of another type than `call` declares."""
    declared = inspect.signature(call).parameters
    for name, value in options.items():
        check_type(name, value, declared[name].annotation)


class Parts(NamedTuple):
    """What a pairing is made of, before its target's weights are read. rule: None is `auto`."""

    gamma: int
    request: drafters.Request
    prepared: drafters.Prepared
    rule: Rule | None


def _assemble(model: LM, tokenizer: Any, o: dict[str, Any], parts: Parts | None = None) -> Pairing:
    parts = parts or _parts(o, TargetInfo(model.config, model.vocab, tokenizer))
    gamma, request, prepared, rule = parts
    if rule is None:
        drawn = prepared.draws and not request.tree.width
        rule = rules.of("reject" if drawn and request.sampling.temperature > 0 else "match")
    drafter = prepared.make(model)
    if request.own is not None:
        checked.drafter(drafter, model)
    eos = generation.eos_tokens(names.generation_of(o["target"]), names.name_of(o["target"]))
    policy: Policy = Fixed(request.tree)
    if o["policy"] is not None:
        from specexp.serving import policies  # which know of requests under load

        policy = policies.of(o["policy"], None, prepared.deepest)
    engine = Engine(model, drafter, policy, request.sampling, rule, o["seed"], eos, prepared)
    checked.try_out(engine)
    named = isinstance(o["drafter"], str)
    name = full_name(o["drafter"], o["target"]) if named else drafter.name
    return Pairing(engine, tokenizer, brief(name), name, o, gamma, prepared.deepest)


def usual_gamma(o: dict[str, Any]) -> int:
    """The draft length of these options where none is given (`fitting.usual_gamma`)."""
    return _usual(o, names.read_target(o["target"]))[0]


def _usual(o: dict[str, Any], info: TargetInfo) -> tuple[int, drafters.Prepared | None]:
    """The usual draft length, and the drafter prepared for it if that depends on no tree."""
    try:
        request = names.request_of(o | {"gamma": 1}, info)
        prepared = drafters.prepare(request)
    except (UserError, OSError):
        return 5, None  # `_parts` reports what is wrong
    ready = prepared if isinstance(request.own, type) else None
    return fitting.usual_gamma(prepared, o["tree"]), ready


def _parts(o: dict[str, Any], info: TargetInfo) -> Parts:
    """The options checked. Raises UserError for a pairing that cannot be built."""
    if o["policy"] is not None and o["tree"] != "chain":
        raise UserError(
            f"tree {o['tree']!r:.40} and a policy are given, and a policy chooses the shape of "
            "every draft: leave one of them out"
        )
    gamma, prepared = (o["gamma"], None) if o["gamma"] is not None else _usual(o, info)
    request = names.request_of(o | {"gamma": gamma}, info)
    prepared = prepared or drafters.prepare(request)
    auto = isinstance(o["rule"], str) and o["rule"] == "auto"
    rule = None if auto else rules.of(o["rule"])
    temperature = request.sampling.temperature
    fitting.fit(request.method, prepared, request.tree, request.vocab, rule, temperature)
    if isinstance(o["tree"], Tree):
        gamma = request.tree.depth
        if o["gamma"] not in (None, gamma):
            raise UserError(f"gamma is {o['gamma']} and the tree {gamma} deep: leave gamma out")
    return Parts(gamma, request, prepared, rule)
