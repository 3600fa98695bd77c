"""The parameters of experiments: one table that notebooks, grids, `--help` and the page read.

A notebook may have parameters of its own, which are not checked here. Importing this file loads
nothing heavy: a check imports what it needs when it runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specexp import fitting
from specexp.errors import UserError, first_line, warn_once
from specexp.models.memory import DTYPES, check_device
from specexp.zoo.known import Known

if TYPE_CHECKING:
    from specexp.measure.prompts import Prompt

PAGE = Path(__file__).resolve().parents[2] / "notebooks" / "README.md"
BEGIN, END = "<!-- parameters: begin -->\n", "<!-- parameters: end -->\n"
_ASIDE = re.compile(r"\(.*?\)")
_TYPES: dict[str, Any] = {"int": int, "float": (int, float), "bool": bool, "str": str, "list": list}


@dataclass(frozen=True)
class Parameter:
    """`type`: as a notebook writes it. `help`: the comment behind it there. `check`: raises
    UserError, and gets the parameter's name and a value (of a list: each of its items). `default`:
    of the command line and of `specexp.load`. `each`: the parameter whose values a list holds, and
    whose check they pass. `empty`: whether a list may have no items."""

    type: str
    help: str
    check: Callable[[str, Any], object] = lambda name, value: None
    default: Any = None
    each: str = ""
    empty: bool = True


@dataclass(frozen=True)
class Problem:
    """`what`: one line for the user. `names`: the parameters that could be changed to solve it, the
    likeliest first; none if the check does not know."""

    what: str
    names: tuple[str, ...] = ()


# --- checks of one value -------------------------------------------------------------------------


def _must(fits: Callable[[Any], bool], otherwise: str) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        if not fits(value):
            raise UserError(f"{name} is {value}; {otherwise}")

    return check


def _least(bound: int) -> Callable[[str, Any], None]:
    return _must(lambda value: value >= bound, f"it must be {bound} or more")


_positive = _must(lambda value: 0 < value < math.inf, "it must be positive and finite")
_swing = _must(lambda value: 0 <= value <= 1, "it is a share of the mean rate, from 0 to 1")


def _drafting(name: str, value: Any) -> None:
    if value < 1:
        raise UserError(
            f"gamma is {value}{', so nothing is drafted' * (value == 0)}; use 1 or more"
        )


def _sampling(name: str, value: Any) -> None:
    fitting.check_sampling(**{name: value})


def _arrivals(name: str, value: Any) -> None:
    from specexp.serving import arrivals

    if value:
        arrivals.parse(arrivals.at_rate(value, 1.0), 1)


def _one_of(*choices: str) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        if value not in choices:
            raise UserError(f"{name} {value!r} is unknown; use {', '.join(choices)}")

    return check


def _address(name: str, value: Any) -> None:
    from urllib.parse import urlsplit

    with suppress(ValueError):
        if urlsplit(value if "://" in value else f"http://{value}").hostname:
            return
    raise UserError(f"{name} {value!r} is no address; use one such as http://localhost:8000")


# --- the table -----------------------------------------------------------------------------------

PARAMETERS: dict[str, Parameter] = {
    # the pairing
    "target": Parameter("str", "target model: zoo name, folder or hub id", default="target-10m"),
    "drafter": Parameter("str", "a draft model, METHOD or METHOD:ARGUMENT (see: specexp models)",
                         default="model"),
    "rivals": Parameter("list", "other drafters", each="drafter"),
    "gamma": Parameter("int", "draft length", _drafting),
    "gammas": Parameter("list", "draft lengths", each="gamma", empty=False),
    "tree": Parameter("str", "shape of a draft: chain, 3x2x1 or grown:16", default="chain"),
    "trees": Parameter("list", "other shapes of the draft; [] for none", each="tree"),
    "rule": Parameter("str",
        "auto (reject if the draft is sampled, else match), match, reject, block", default="auto"),
    "rules": Parameter("list", "other rules", each="rule"),
    "temperature": Parameter("float", "sampling temperature; 0 is greedy", _sampling, 0.0),
    "temperatures": Parameter("list", "sampling temperatures; 0 is greedy", each="temperature",
                              empty=False),
    "top_k": Parameter("int", "sample from the k likeliest tokens; 0: from all", _sampling, 0),
    "top_p": Parameter("float", "sample from the likeliest tokens of this total probability",
                       _sampling, 1.0),
    "min_p": Parameter("float", "sample from tokens at least so likely, relative to the likeliest",
                       _sampling, 0.0),
    "sampling": Parameter("str",
        "given (temperature, top_k, ...), or model (generation_config.json)",
        _one_of("given", "model"), "given"),
    "dtype": Parameter("str", "float32 or bfloat16", _one_of(*DTYPES), "float32"),
    "device": Parameter("str", "auto, cpu, cuda or cuda:N",
                        lambda _, value: check_device(value), "auto"),
    "seed": Parameter("int", "seed of sampled output", _least(0), 0),
    # what it is measured on
    "prompts": Parameter("str",
        "a shipped category, all, or a path to your own (txt, csv, parquet, jsonl)", default="all"),
    "chat": Parameter("bool", "put prompts into the target's chat template, turn by turn",
                      default=False),
    "categories": Parameter("list", "categories of the prompts; [] for all"),
    "limit": Parameter("int", "number of prompts, spread evenly over the categories", _least(1)),
    "max_new_tokens": Parameter("int", "most tokens to generate per prompt", _least(1), 64),
    "batch": Parameter("int", "batch size", _least(1)),
    "batches": Parameter("list", "batch sizes", each="batch", empty=False),
    "measured_batches": Parameter("list", "batch sizes at which the map is checked", each="batch",
                                  empty=False),
    "contexts": Parameter("list", "KV cache slots per row, for prompt, output and draft",
                          _least(1), empty=False),
    "repeats": Parameter("int", "repeats of the whole measurement", _least(1)),
    "force": Parameter("bool", "measure costs again even if they are stored"),
    # requests under load
    "policy": Parameter("str",
        "never, always:3, threshold:3,8, table:1=4,8=0, greedy, goodput, bandit"),
    "policies": Parameter("list", "other policies besides plain", each="policy"),
    "streams": Parameter("list", "concurrent requests in the closed loops", _least(1), empty=False),
    "turns": Parameter("int", "turns of each closed loop, over which its intervals are taken",
                       _least(2)),
    "arrivals": Parameter("str", "poisson, bursty,3 (relative spread of the gaps), day, trace:FILE",
                          _arrivals),
    "offered": Parameter("float", "request rate, as a share of what plain decoding can serve",
                         _positive),
    "count": Parameter("int", "requests of the open traffic; in 00_lesson: rounds of a position",
                       _least(1), 64),
    "rows": Parameter("int", "most requests decoded at once", _least(1), 32),
    "queue": Parameter("int", "most requests that may wait; further ones are rejected",
                       _least(0), 1024),
    "chunk": Parameter("int", "prompt tokens prefilled between two rounds", _least(1), 512),
    "ttft_ms": Parameter("float", "limit on the time to first token, in ms", _positive, 1000.0),
    "tpot_ms": Parameter("float", "limit on the time per token after the first, in ms",
                         _positive, 50.0),
    # a day of many requests, simulated
    "requests_per_day": Parameter("int", "SIMULATED requests per day, from a sample of each hour",
                                  _least(1)),
    "swing": Parameter("float", "swing of the request rate over the day, as a share of its mean",
                       _swing),
    "prompt_tokens": Parameter("int", "tokens of the median prompt; lengths are lognormal",
                               _least(1)),
    "output_tokens": Parameter("int", "tokens of the median output", _least(1)),
    "tpot_steps": Parameter("float", "limit on p95 TPOT, in plain steps of a single stream",
                            _positive),
    "sample": Parameter("int", "requests simulated per hour, on one replica", _least(1)),
    # servers that run elsewhere
    "server": Parameter("str", "a running server that drafts: vLLM, SGLang or llama.cpp", _address),
    "plain_server": Parameter("str", "the same server, started without drafting", _address),
    # finished runs
    "grid": Parameter("str", "only runs of this grid; empty: all runs"),
    "newest": Parameter("int", "most runs to show, newest first", _least(1)),
}  # fmt: skip


def help_of(name: str, more: str = "") -> str:
    """What a parameter is, as sentences, for `--help`; a value that comes first stays as it is."""
    text = PARAMETERS[name].help
    first = text.split()[0]
    value = first.endswith(",") or first == PARAMETERS[name].default
    return f"{text[0] if value else text[0].upper()}{text[1:]}. {more}".strip()


def as_markdown() -> str:
    """The table for the page."""
    rows = [
        f"| `{name}` | {p.type} | {p.help} | {'' if p.default is None else f'`{p.default}`'} |\n"
        for name, p in PARAMETERS.items()
    ]
    return "| name | type | what it is | default |\n|---|---|---|---|\n" + "".join(rows)


# --- checking ------------------------------------------------------------------------------------


def insist(
    params: Mapping[str, Any], texts: list[Prompt] | None = None, problems: Sequence[str] = ()
) -> None:
    """Raises UserError with these problems and every one of `problems_of`, one line each; or, if
    there are any, with those that show without torch. Warns of values that have no effect.

    texts: the prompts, by default those that the parameters name."""
    known = Known()
    for light in (True, False):
        further = [problem.what for problem in problems_of(params, texts, known, light)]
        if every := dict.fromkeys([*problems, *further]):
            raise UserError("\n".join(every))
    if not any(values(params, "temperature", "temperatures")) and params.get("sampling") != "model":
        for name in ("top_k", "top_p", "min_p"):
            if params.get(name, PARAMETERS[name].default) != PARAMETERS[name].default:
                warn_once("%s has no effect at temperature 0", name)


def problems_of(
    params: Mapping[str, Any], texts: list[Prompt] | None, known: Known, light: bool = False,
    wrong: Set[str] = frozenset(),
) -> list[Problem]:  # fmt: skip
    """Every problem with these parameters, reusing what earlier checks looked up; if `light`, those
    that show without torch. `wrong`: parameters that are left out, as they have no value yet."""
    from specexp.measure import feasible

    problems = list(problems_of_values(params))
    wrong = wrong | {name for problem in problems for name in problem.names}
    problems += feasible.problems_of(params, texts, known, wrong, light)
    first: dict[str, Problem] = {}
    for problem in problems:
        first.setdefault(problem.what, problem)
    return list(first.values())


def problems_of_values(params: Mapping[str, Any]) -> Iterator[Problem]:
    """The problems of single values. A value of another type than the table's is a notebook's own
    affair."""
    for name, value in params.items():
        parameter = PARAMETERS.get(name)
        if not parameter or not isinstance(value, _TYPES[parameter.type]):
            continue
        if value == [] and not parameter.empty:
            yield Problem(f"{name} is empty; give at least one", (name,))
        own, items = parameter.each or name, value if isinstance(value, list) else [value]
        for item in (x for i, x in enumerate(items) if x in items[:i]):  # intervals would narrow
            yield Problem(f"{name} holds {item} twice; leave one out", (name,))
        for item in items:
            if parameter.each and not isinstance(item, _TYPES[PARAMETERS[own].type]):
                continue
            try:
                PARAMETERS[own].check(own, item)
            except (UserError, OSError) as e:
                yield Problem(first_line(e), (name,))


def values(params: Mapping[str, Any], *names: str) -> list[Any]:
    """All values of these parameters, lists flattened; None is left out."""
    present = [params[name] for name in names if params.get(name) is not None]
    return [v for x in present for v in (x if isinstance(x, list) else [x])]


def by_mention(what: str, names: Iterable[str], params: Mapping[str, Any]) -> tuple[str, ...]:
    """These parameters, those first whose name and value a message mentions. A number without the
    name may be any number."""
    bare = _ASIDE.sub("", what)

    def mentions(name: str) -> int:
        own = PARAMETERS[name].each or name if name in PARAMETERS else name
        named = bool(re.search(rf"\b{re.escape(own)}", bare))
        given = [v for v in values(params, name) if named or isinstance(v, str)]
        return named + any(mentioned(value, what) for value in given)

    return tuple(sorted(names, key=lambda name: -mentions(name)))


def mentioned(value: Any, what: str) -> bool:
    """Whether a message is about a value, or about the argument of a `METHOD:ARGUMENT`. What stands
    in brackets or behind a semicolon is advice."""
    bare = _ASIDE.sub("", what).partition(";")[0]
    texts = filter(None, (str(value), str(value).partition(":")[2]))
    return any(re.search(rf"(?<![\w.]){re.escape(text)}(?!\w)", bare) for text in texts)


if __name__ == "__main__":  # renew the table of the page
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + as_markdown() + END + rest.partition(END)[2])
