"""Prompts from files in common formats, or from the sets that ship with the project.

FORMATS lists the kinds of file. A record of any of them holds its text under the first of these
keys that it has: `turns` (MT-bench, Spec-Bench), `prompt`, `messages` (chat), `conversations`
(ShareGPT), `text`. Beside it may stand `question_id` and `category`, by default its number and the
file's name, and `"chat": true` for the target's chat template. Other keys are ignored. A file with
a broken record is rejected as a whole, and the error names the lines; a conversation in which no
user speaks is left out, and counted.

A prompt is a text to continue, unchanged. Without its chat template, an instruct model writes other
texts than in use, and its acceptance rate is not that of its use: see `in_chat`.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from string import whitespace
from typing import Any, Protocol

from tqdm.auto import tqdm

from specexp.errors import UserError, check_type, counted, meant, meant_beside

SHIPPED = Path(__file__).resolve().parents[2] / "data" / "prompts"
NAMES = ("code", "prose", "records", "editing", "messy")  # files, and their one category each
SETS = f"shipped are {', '.join(NAMES)}, all"
KEYS = ("turns", "prompt", "messages", "conversations", "text")  # of the text, the first one counts
SHOWN = 5  # broken records named in one message
USERS, ASSISTANTS = ("user", "human"), ("assistant", "gpt")  # their names in chats

Records = Iterator[tuple[int, Any]]  # a number, and what stands there or the UserError about it


@dataclass(frozen=True)
class Prompt:
    """One question. `text` is the prompt; the rest is for `in_chat`, whose prompts say which turn
    of a conversation they are: all of one conversation have its question_id."""

    question_id: int | str
    category: str
    turns: tuple[str, ...]  # of the user
    answers: tuple[str, ...] = ()  # of the assistant, as the file records them
    system: str = ""
    chat: bool = False  # whether the file marks it for the target's chat template
    turn: int = 1

    @property
    def text(self) -> str:
        return self.turns[0]


class Prompts(list[Prompt]):
    """Prompts, and in words (`str`) how many and what they were taken from."""

    def __init__(self, prompts: Iterable[Prompt], source: str) -> None:
        super().__init__(prompts)
        self.source = source

    def __str__(self) -> str:
        return f"{counted(len(self), 'prompt')}{self.source}"


def load(
    path_or_name: str | Path, categories: Sequence[str] | None = None, limit: int | None = None
) -> Prompts:
    """The prompts of a shipped set (`code`, ..., or `all`), of a file or of a folder of texts, one
    of each category in turn, so that the first few cover all categories.

    A prompt that is given again is skipped: intervals over prompts need different ones.

    `categories`: use only these, or all if there are none; `limit`: at most this many prompts.
    Raises UserError, which names the file and its broken lines."""
    paths = files(path_or_name)
    if shipped := path_or_name in (*NAMES, "all"):
        prompts = [prompt for path in paths for prompt in _read(path)[0]]
        source = "" if path_or_name == "all" else f" of {path_or_name}"
    elif os.path.isdir(path_or_name):
        prompts, source = _folder(Path(path_or_name), paths)
    else:
        prompts, source = _read(paths[0])
    prompts, skipped = _distinct(
        prompts, lambda prompt: (prompt.turns, prompt.answers, prompt.system)
    )
    source += skipped
    total = len(prompts)
    if categories:
        present = {prompt.category: None for prompt in prompts}
        if unknown := [category for category in categories if category not in present]:
            raise UserError(
                f"no prompts of category {_names(unknown)}; there are {_names(present)}"
            )
        prompts = [prompt for prompt in prompts if prompt.category in categories]
    if limit is not None:
        check_type("limit", limit, "int")
        if limit < 1:
            raise UserError(f"limit must be at least 1 prompt, not {limit}")
    chosen = in_turns(prompts)[:limit]
    some = not shipped and len(chosen) < total
    return Prompts(chosen, f" (of {total})" * some + source)


def in_turns(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The same prompts, one of each category in turn."""
    counts: Counter[str] = Counter()

    def turn(prompt: Prompt) -> int:
        counts[prompt.category] += 1
        return counts[prompt.category]

    return sorted(prompts, key=turn)


def _distinct(prompts: Sequence[Prompt], key: Callable[[Prompt], Any]) -> tuple[list[Prompt], str]:
    """The first prompt of each key, and in words how many were skipped."""
    first: dict[Any, Prompt] = {}
    for prompt in prompts:
        first.setdefault(key(prompt), prompt)
    repeats = len(prompts) - len(first)
    return [*first.values()], f"; {counted(repeats, 'repeat')} skipped" * (repeats > 0)


def files(path_or_name: str | Path) -> list[Path]:
    """The files that a name of prompts stands for."""
    if path_or_name == "":
        raise UserError(f"no prompts are named: give a file or a folder; {SETS}")
    if path_or_name in (*NAMES, "all"):
        if not SHIPPED.is_dir():
            raise UserError(
                f"prompts {path_or_name!r} are in a clone of the repository, not in an installed "
                "specexp: give a file of yours"
            )
        names = NAMES if path_or_name == "all" else [path_or_name]
        return [SHIPPED / f"{name}.jsonl" for name in names]
    path = Path(path_or_name)
    return sorted(path.glob("*.txt")) if os.path.isdir(path_or_name) else [path]


class Speaker(Protocol):
    """What a conversation is held with: a pairing, or a server."""

    @property
    def tokenizer(self) -> Any: ...

    def answer(self, text: str, max_new_tokens: int) -> str:
        """The target's own greedy continuation of a text, by plain decoding."""


def in_chat(
    prompts: Sequence[Prompt], pairing: Speaker, max_new_tokens: int, chat: bool = True
) -> Prompts:
    """These prompts in the target's chat template, one for each turn of the user, behind the turns
    before it and their answers: those of the file, or else the target's own by plain decoding.

    max_new_tokens: of an answer to an earlier turn, where the file has none.
    chat: False leaves those as they are that their file does not mark by `"chat": true`.

    Raises UserError if the tokenizer has no chat template, or if that takes no such conversation.
    """
    texts: list[Prompt] = []
    source, cut = getattr(prompts, "source", ""), 0
    silent = None if chat or any(prompt.chat for prompt in prompts) else True
    for prompt in tqdm(prompts, "chat", disable=silent, leave=False):
        in_template = chat or prompt.chat
        cut += len(prompt.turns) > 1 and not in_template
        texts += _turns(prompt, pairing, max_new_tokens) if in_template else [prompt]
    used = f"; without chat only the first turn of {counted(cut, 'conversation')} is used"
    texts, skipped = _distinct(texts, lambda prompt: prompt.text)
    of = f", turns of {counted(len({text.question_id for text in texts}), 'conversation')}"
    of *= any(text.turn > 1 for text in texts)
    return Prompts(texts, of + source + used * (cut > 0) + skipped)


def _turns(prompt: Prompt, pairing: Speaker, max_new_tokens: int) -> Iterator[Prompt]:
    answers: list[str] = []
    for number in range(len(prompt.turns)):
        text = _in_template(pairing.tokenizer, prompt, answers)
        yield Prompt(prompt.question_id, prompt.category, (text,), turn=number + 1)
        if number < len(prompt.answers):
            answers.append(prompt.answers[number])
        elif number + 1 < len(prompt.turns):
            answers.append(pairing.answer(text, max_new_tokens))


def longest(prompt: Prompt, tokenizer: Any) -> tuple[str, int]:
    """The text of a prompt's last turn, with a question for each answer that is still to be
    decoded, and how many those are."""
    answers = [*prompt.answers, *prompt.turns][: len(prompt.turns) - 1]
    return _in_template(tokenizer, prompt, answers), len(answers) - len(prompt.answers)


def _in_template(tokenizer: Any, prompt: Prompt, answers: Sequence[str]) -> str:
    """The conversation up to the turn behind these answers, in the target's chat template."""
    from specexp.names import chat_text  # of torch, too

    messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
    for turn, answer in zip_longest(prompt.turns[: len(answers) + 1], answers):
        messages.append({"role": "user", "content": turn})
        if answer is not None:
            messages.append({"role": "assistant", "content": answer})
    return chat_text(tokenizer, messages)


def _folder(folder: Path, paths: list[Path]) -> tuple[list[Prompt], str]:
    prompts = [
        Prompt(path.name, folder.resolve().name, (text,))
        for path in paths
        if (text := _decode(path, _bytes(path)).strip("\n")).strip()
    ]
    if not prompts:
        raise UserError(f"{folder} holds no texts: a folder of prompts has one in each *.txt file")
    empty = len(paths) - len(prompts)
    skipped = f"; {counted(empty, 'empty file')} skipped" if empty else ""
    return prompts, f" from the .txt files of {folder.name}{skipped}"


def _read(path: Path) -> tuple[list[Prompt], str]:
    """The prompts of a file, and in words what they were taken from."""
    content = _bytes(path)
    read, unit = FORMATS.get(path.suffix.lower(), FORMATS[".jsonl"])
    prompts: list[Prompt] = []
    places: dict[int | str, int] = {}
    keys: Counter[str] = Counter()
    broken, silent = [], 0
    for number, record in read(path, content):
        try:
            key, prompt = _parse(record, number, path.stem)
            if prompt is None:
                silent += 1
                continue
            first = places.setdefault(prompt.question_id, number)
            if first != number:
                raise UserError(f"question_id {prompt.question_id!r:.40} is also on {unit} {first}")
        except UserError as error:
            broken.append(f"{unit} {number}: {error}")
        else:
            prompts.append(prompt)
            keys[key] += 1
    if broken:
        more = f"; and {len(broken) - SHOWN} more" if len(broken) > SHOWN else ""
        ending = path.suffix.lower()
        hint = "" if ending in FORMATS else f"; texts that are no JSON end in .txt, not {ending!r}"
        raise UserError(f"{path}: {'; '.join(broken[:SHOWN])}{more}{hint}")
    if not prompts:
        empty = "has no conversation in which a user speaks" if silent else "holds no prompt"
        raise UserError(f"{path} {empty}: write at least one")
    more = f"; {counted(silent, unit)} skipped: no user speaks there" if silent else ""
    taken = f"{'field' if len(keys) == 1 else 'fields'} {' and '.join(keys)}"
    if read is _text:
        taken = "one a paragraph" if any("\n" in p.text for p in prompts) else "one a line"
    return prompts, f" from {path.name} ({taken}){more}"


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except FileNotFoundError:
        near = meant(str(path), [*NAMES, "all"], meant_beside(path, f"; {SETS}"))
        raise UserError(f"no prompts at {path}{near}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read prompts from {str(path)!r}: {reason}") from None


def _decode(path: Path, content: bytes) -> str:
    try:
        return content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        before = content[: error.start].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        line, column = before.count(b"\n") + 1, len(before) - before.rfind(b"\n")
        raise UserError(
            f"{path}: line {line}: not UTF-8 at byte {column}; save the file as UTF-8"
        ) from None


def _json_lines(path: Path, content: bytes) -> Records:
    for number, line in enumerate(_decode(path, content).split("\n"), start=1):
        if line.strip(whitespace):  # JSON knows no other
            yield number, _json(line)


def _json_list(path: Path, content: bytes) -> Records:
    """One list of records, as ShareGPT has it; else JSON lines that are named .json."""
    if content.lstrip()[:1] != b"[":
        yield from _json_lines(path, content)
        return
    records = _json(_decode(path, content))
    if isinstance(records, UserError):
        raise UserError(f"{path}: {records}")
    yield from enumerate(records, start=1)


def _json(text: str) -> Any:
    """The value of this JSON, or the UserError that says why it has none."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column" if error.lineno > 1 else "column"
        return UserError(
            f"not JSON ({error.msg} at {where} {error.colno}); "
            'a line such as {"prompt": "def mean(values):"} is'
        )
    except (ValueError, RecursionError):
        return UserError("not JSON that can be read (a number too long or nested too deep)")


def _text(path: Path, content: bytes) -> Records:
    """Paragraphs where a blank line stands between two of them, else lines."""
    text = _decode(path, content).strip("\n")
    paragraphs = re.split(r"\n(?:[ \t]*\n)+", text)
    pieces = paragraphs if len(paragraphs) > 1 else text.split("\n")
    yield from enumerate(({"text": piece} for piece in pieces if piece.strip()), start=1)


def _csv(path: Path, content: bytes) -> Records:
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    text = io.StringIO(_decode(path, content), newline="")
    rows = csv.DictReader(text, delimiter=delimiter, strict=True)
    start = 2
    usual = csv.field_size_limit(1 << 30)  # characters, for all readers
    try:
        if not set(KEYS) & {*(rows.fieldnames or KEYS)}:
            raise UserError(f"{path}: line 1: {_no_text(rows.fieldnames or ())}")
        for row in rows:
            wide = UserError(
                f"more fields than the {len(row) - 1} of line 1: put quotes around a text that "
                f"holds {delimiter!r}"
            )
            yield start, wide if None in row else row
            start = rows.line_num + 1
    except csv.Error as error:
        raise UserError(f"{path}: line {start}: not CSV ({error})") from None
    finally:
        csv.field_size_limit(usual)


def _parquet(path: Path, content: bytes) -> Records:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(io.BytesIO(content))
        if not set(KEYS) & {*table.column_names}:
            raise UserError(f"{path}: {_no_text(table.column_names)}")
        yield from enumerate(table.to_pylist(), start=1)
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: not Parquet ({error})") from None


Reader = Callable[[Path, bytes], Records]
FORMATS: dict[str, tuple[Reader, str]] = {  # by extension: what reads it, and what it counts
    ".jsonl": (_json_lines, "line"),
    ".json": (_json_list, "item"),
    ".txt": (_text, "text"),
    ".csv": (_csv, "line"),
    ".tsv": (_csv, "line"),
    ".parquet": (_parquet, "row"),
}


def _parse(record: Any, number: int, category: str) -> tuple[str, Prompt | None]:
    """The key of a record's text, and its prompt; None if no user speaks in it."""
    if isinstance(record, UserError):
        raise record
    if not isinstance(record, dict):
        raise UserError('not a JSON object: write {"prompt": "..."}')
    key = next((name for name in KEYS if record.get(name) is not None), None)
    if key is None:
        empty = [name for name in KEYS if name in record]
        raise UserError(f"{_names(empty)} is empty" if empty else _no_text(record))
    question_id = record.get("question_id", number)
    category = record.get("category", category)
    if not isinstance(question_id, int | str) or isinstance(question_id, bool):
        raise UserError("question_id must be a number without fraction, or a string")
    if not isinstance(category, str) or not category.strip():
        raise UserError("category must be a string that is not empty")
    value, system, answers = record[key], "", list[str]()
    if isinstance(value, str) and key in ("prompt", "text"):
        turns = [value]
    elif key == "text":
        raise UserError("text must be a string")
    elif key == "turns":
        turns = value
        if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
            raise UserError("turns must be a list of one or more strings")
    else:
        system, turns, answers = _conversation(key, value)
        if not turns:
            return key, None
    if not turns[0].strip():
        raise UserError("the prompt is empty")
    try:
        "".join((system, *turns, *answers)).encode()
    except UnicodeEncodeError:
        raise UserError("a turn holds half a surrogate pair, which is not valid text") from None
    chat = record.get("chat") or False  # a table has "", or None, where a row says nothing
    if isinstance(chat, str):
        chat = {"true": True, "false": False}.get(chat.strip().lower(), chat)
    if not isinstance(chat, bool):
        raise UserError(f"chat must be true or false, not {chat!r:.40}")
    return key, Prompt(question_id, category, tuple(turns), tuple(answers), system, chat)


def _conversation(key: str, messages: Any) -> tuple[str, list[str], list[str]]:
    """A chat's system message, what its user says, and the answers between, up to the first message
    that is out of turn."""
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise UserError(f"{key} must be a {'string or a ' * (key == 'prompt')}list of messages")
    system, turns, answers = "", list[str](), list[str]()
    for message in messages:
        speaker = str(message.get("role", message.get("from"))).lower()
        content = message.get("content", message.get("value"))
        if content is None and speaker in ASSISTANTS:
            speaker, content = "tool", ""  # it calls one instead of answering
        if isinstance(content, list):  # of parts, some of them images
            parts = [p.get("text") or "" if isinstance(p, dict) else p for p in content]
            content = "".join(parts) if all(isinstance(p, str) for p in parts) else None
        if not isinstance(content, str):
            raise UserError(f"a message of {key} has no text")
        if speaker in USERS and len(turns) == len(answers):
            turns.append(content)
        elif speaker in ASSISTANTS and len(turns) == len(answers) + 1:
            answers.append(content)
        elif speaker == "system" and not turns:
            system = content
        elif turns:
            break
    return system, turns, answers[: len(turns) - 1]


def _no_text(there: Iterable[str]) -> str:
    return f"no text: give one of {_names(KEYS)}; there is {_names(there) or 'none'}"


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"{name!r:.40}" for name in names)
