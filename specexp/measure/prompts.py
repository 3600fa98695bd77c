"""Prompts from question files: one JSON object a line with question_id, category and turns.

This is the format of MT-bench and Spec-Bench, whose question.jsonl loads unchanged; other keys are
ignored. Five such files ship with the project, in data/prompts. A file with a broken line is
rejected as a whole, and the error names the lines.

Nothing here knows about tokens, models or chat templates: a prompt is a text to continue.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from specexp.errors import UserError

SHIPPED = Path(__file__).resolve().parents[2] / "data" / "prompts"
NAMES = ("code", "prose", "records", "editing", "messy")  # files, and their one category each
SHOWN = 5  # broken lines named in one message


@dataclass(frozen=True)
class Prompt:
    """One question. `text` is the prompt; later turns of a dialogue are unused."""

    question_id: int | str
    category: str
    turns: tuple[str, ...]

    @property
    def text(self) -> str:
        return self.turns[0]


def load(
    path_or_name: str | Path, categories: Sequence[str] | None = None, limit: int | None = None
) -> list[Prompt]:
    """The prompts of a shipped set (`code`, ..., or `all`) or of a file, one of each category in
    turn, so that the first few cover all categories.

    `categories`: use only these; `limit`: at most this many prompts. Raises UserError, which names
    the file and its broken lines.
    """
    if path_or_name == "all":
        prompts = [prompt for name in NAMES for prompt in _read(SHIPPED / f"{name}.jsonl")]
    elif path_or_name in NAMES:
        prompts = _read(SHIPPED / f"{path_or_name}.jsonl")
    else:
        prompts = _read(Path(path_or_name))
    if categories is not None:
        prompts = _of(prompts, categories)
    if limit is not None and limit < 1:
        raise UserError(f"limit must be at least 1 prompt, not {limit}")
    return _in_turns(prompts)[:limit]


def _of(prompts: list[Prompt], categories: Sequence[str]) -> list[Prompt]:
    present = {prompt.category: None for prompt in prompts}
    if unknown := [category for category in categories if category not in present]:
        raise UserError(f"no prompts of category {_names(unknown)}; there are {_names(present)}")
    return [prompt for prompt in prompts if prompt.category in categories]


def _in_turns(prompts: list[Prompt]) -> list[Prompt]:
    counts: Counter[str] = Counter()
    turn = []
    for prompt in prompts:
        turn.append(counts[prompt.category])
        counts[prompt.category] += 1
    return [prompts[at] for at in sorted(range(len(prompts)), key=turn.__getitem__)]


def _read(path: Path) -> list[Prompt]:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"no prompts at {path}{_hint(path)}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read prompts from {str(path)!r}: {reason}") from None
    prompts: list[Prompt] = []
    lines: dict[int | str, int] = {}
    broken: list[str] = []
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            prompt = _parse(line)
            first = lines.setdefault(prompt.question_id, number)
            if first != number:
                raise UserError(f"question_id {prompt.question_id!r:.40} is also on line {first}")
        except UserError as error:
            broken.append(f"line {number}: {error}")
        else:
            prompts.append(prompt)
    if broken:
        more = f"; and {len(broken) - SHOWN} more" if len(broken) > SHOWN else ""
        raise UserError(f"{path}: {'; '.join(broken[:SHOWN])}{more}")
    if not prompts:
        raise UserError(f"{path} is empty; write one JSON object a line")
    return prompts


def _parse(line: bytes) -> Prompt:
    try:
        question = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 at byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise UserError(f"not JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError):
        raise UserError(
            "not JSON that can be read (a number too long or nested too deep)"
        ) from None
    if not isinstance(question, dict):
        raise UserError("not a JSON object")
    if missing := [key for key in ("question_id", "category", "turns") if key not in question]:
        raise UserError(f"no {_names(missing)}")
    question_id, category, turns = (question[k] for k in ("question_id", "category", "turns"))
    if not isinstance(question_id, int | str) or isinstance(question_id, bool):
        raise UserError("question_id must be a number without fraction, or a string")
    if not isinstance(category, str) or not category.strip():
        raise UserError("category must be a string that is not empty")
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
        raise UserError("turns must be a list of one or more strings")
    if not turns[0].strip():
        raise UserError("the first turn is an empty prompt")
    if any("\ud800" <= char <= "\udfff" for turn in turns for char in turn):
        raise UserError("a turn holds half a surrogate pair, which is no text")
    return Prompt(question_id, category, tuple(turns))


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"{name!r:.40}" for name in names)


def _hint(path: Path) -> str:
    """A suggestion: the most similar shipped set or neighbouring file."""
    beside = (other.name for other in islice(path.parent.glob("*.json*"), 1000))
    close = get_close_matches(path.name, [*NAMES, "all", *beside], n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; shipped are {', '.join(NAMES)}, all"
