"""A strict YAML reader that records the line of every key and value, and every problem.

It accepts mappings with string keys, lists and scalars. It rejects anchors, aliases and tags, and
the scalars that YAML 1.1 reads in ways nobody means (012, 1:30, dates). This module knows nothing
of grids. (ruamel.yaml's round-trip loader knows lines, too, but stops at the first repeated key and
accepts anchors, merge keys, tags and 012 without a word: every check below would remain.)
"""

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import SafeConstructor
from yaml.reader import Reader

from specexp.errors import UserError, meant_beside
from specexp.tracking.results import ROOT

LARGEST, DEEPEST, LONGEST_NUMBER = 1_000_000, 20, 400
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_resolve = yaml.SafeLoader("").resolve
_build = SafeConstructor()
HIDDEN = re.compile(rf"{Reader.NON_PRINTABLE.pattern}|[\x85\u2028\u2029\ufeff]")
_OCTAL = re.compile(r"[-+]?0[0-7_]+")
_TAG = "tag:yaml.org,2002:"


class Document:
    """A file as plain data, at most DEEPEST levels deep, and the lines of its keys and items.

    `value`: None for an empty file. `problems`: (line, message), as found.
    """

    def __init__(self) -> None:
        self.value: Any = None
        self.problems: list[tuple[int, str]] = []
        self._lines: dict[tuple[str | int, ...], int] = {}

    def has(self, *path: str | int) -> bool:
        return path in self._lines

    def line(self, *path: str | int) -> int:
        """The line of a key or list item, counted from 1, or of the nearest thing that holds it."""
        while path and path not in self._lines:
            path = path[:-1]
        return self._lines.get(path, 1)

    def parse(self, text: str) -> None:
        self._events: Iterator[Any] = yaml.parse(text, _Loader)
        begins: Iterator[Any] = (e for e in self._events if isinstance(e, yaml.DocumentStartEvent))
        if next(begins, None):
            self.value = self._any(next(self._events), ())
        if second := next(begins, None):
            what = "starts a second YAML document: a file holds one grid"
            self._wrong(second.start_mark.line + 1, what)

    def _wrong(self, line: int, what: str) -> None:
        self.problems.append((line, what))

    def _any(self, event: Any, path: tuple[str | int, ...]) -> Any:
        line = event.start_mark.line + 1
        self._lines.setdefault(path, line)
        if len(path) > DEEPEST:
            raise yaml.MarkedYAMLError(problem="nested too deep", problem_mark=event.start_mark)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            what = f"anchors and aliases ({event.anchor}) are not supported: write the value out"
            self._wrong(line, what)
        if tag := getattr(event, "tag", None):
            self._wrong(line, f"the tag {tag!r:.60} is not supported: remove it")
        if isinstance(event, yaml.SequenceStartEvent):
            return self._sequence(path)
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(path)
        if isinstance(event, yaml.ScalarEvent):
            return self.scalar(event.value, line) if event.implicit[0] else event.value
        return "*"

    def _sequence(self, path: tuple[str | int, ...]) -> list[Any]:
        values: list[Any] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            values.append(self._any(event, (*path, len(values))))
        return values

    def _mapping(self, path: tuple[str | int, ...]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            line = event.start_mark.line + 1
            before = len(self.problems)
            key = self._any(event, (*path, "\0key"))
            what = ""
            if key == "<<":
                what = "merge keys (<<) are not supported: write the values out"
            elif not isinstance(key, str):
                hint = ", YAML reads it as true or false" if isinstance(key, bool) else ""
                written = repr(getattr(event, "value", "[...]"))[:60]
                what = f"the key {written} is not a string{hint}: put it in quotes"
            elif key in values:
                what = f"{key!r:.60} appears twice, first on line {self.line(*path, key)}"
            if not what:
                self._lines[*path, key] = line
                values[key] = self._any(next(self._events), (*path, key))
                continue
            if isinstance(key, str) or len(self.problems) == before:
                self._wrong(line, what)
            self._any(next(self._events), (*path, "\0value"))
        return values

    def scalar(self, raw: str, line: int) -> Any:
        """The value of a text without quotes."""
        tag = _resolve(yaml.ScalarNode, raw, (True, False))
        kind = tag.removeprefix(_TAG)
        if kind not in ("int", "float", "bool", "null", "timestamp"):
            return raw
        if len(raw) > LONGEST_NUMBER:
            self._wrong(line, f"{raw[:40]} is too large a number")
            return 0
        if kind == "timestamp":
            self._wrong(line, f"YAML reads {raw} as a date: put it in quotes")
            return raw
        try:
            value = getattr(_build, f"construct_yaml_{kind}")(yaml.ScalarNode(tag, raw))
        except OverflowError:
            self._wrong(line, f"{raw[:40]} is too large a number")
            return 0
        except ValueError:
            self._wrong(line, f"YAML takes {raw[:40]} for a number: put it in quotes")
            return raw
        if _OCTAL.fullmatch(raw) or ":" in raw:
            base = "60" if ":" in raw else "8"
            read = f"YAML reads {raw[:40]} as {value!r:.40} (base {base})"
            self._wrong(line, f"{read}: write that number, or put it in quotes")
        return value


def read(path: Path) -> Document:
    """Parse a file. Raises a one-line UserError if it cannot be read at all."""
    document = Document()
    text = _text(path, document)
    if document.problems:
        return document
    try:
        document.parse(text)
    except yaml.MarkedYAMLError as e:
        document.problems.append(_syntax(e, text))
    except yaml.YAMLError as e:
        document.problems.append((1, f"is not YAML: {' '.join(str(e).split())}"))
    return document


def scalar(text: str) -> Any:
    """The value of an unquoted YAML scalar. Raises UserError for those that `read` rejects."""
    document = Document()
    value = document.scalar(text, 1)
    if document.problems:
        raise UserError(document.problems[0][1])
    return value


def _text(path: Path, document: Document) -> str:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise UserError("cannot be read: it is not a file")
        with open(path, "rb") as file:
            raw = file.read(LARGEST + 1)
    except (OSError, ValueError) as e:
        shipped = meant_beside(Path(os.path.relpath(ROOT / "notebooks" / "grids")) / path.name)
        hint = meant_beside(path, shipped) if isinstance(e, FileNotFoundError) else ""
        raise UserError(f"cannot be read: {getattr(e, 'strerror', None) or e}{hint}") from e
    if len(raw) > LARGEST:
        raise UserError(f"is larger than {LARGEST // 1000} kB, too large for a grid file")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        bad = raw.count(b"\n", 0, e.start) + 1
        document.problems.append((bad, "is not UTF-8: save the file in that encoding"))
        return ""
    if odd := HIDDEN.search(text):
        bad = text.count("\n", 0, odd.start()) + 1
        document.problems.append((bad, f"contains the character U+{ord(odd[0]):04X}: remove it"))
    return text


def _syntax(error: yaml.MarkedYAMLError, text: str) -> tuple[int, str]:
    mark, begun = error.problem_mark or error.context_mark, error.context_mark
    rows = text.splitlines() or [""]
    line = mark.line if mark else 0
    if begun and not "".join(rows[line:]).strip():  # unterminated: blame where it begins
        line = begun.line
    line = min(line, len(rows) - 1)
    if re.match(r" *\t", rows[line]):
        return line + 1, "is indented with a tab: YAML needs spaces"
    message = str(error.problem or error.context)
    if begun and begun.line < line:
        message += f" ({error.context}, which starts on line {begun.line + 1})"
    return line + 1, f"is not YAML: {' '.join(message.split())}"
