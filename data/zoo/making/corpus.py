"""The zoo's training text, gathered from the standard library of the Python that runs this file.

Five kinds of document, each a plain string:

- `code`: top-level pieces of the standard library, without its tests and encoding tables;
- `prose`: its docstrings, long comments, language-reference topics and text files;
- `records`: JSON lines, CSV, logs, settings and tables from a seeded generator (`records.py`);
- `edits`: a passage followed by the same passage with one change (`edits.py`);
- `echoes`: random words, repeated once.

The hash of a source file's content decides whether it is held out, so its code, its docstrings and
edits of both are on the same side. Misspelt text, other languages and truncated logs are left out
on purpose: such prompts are out of distribution for the models.

This file does not know about tokens or models.
"""

import ast
import hashlib
import importlib
import inspect
import io
import os
import platform
import random
import re
import sysconfig
import tokenize
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from making.edits import echo, edit
from making.records import record
from specexp.zoo.rows import PIECE, Texts

KINDS = ("code", "prose", "records", "edits", "echoes")
LEFT_OUT = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "encodings",
    "pydoc_data",
}
SUFFIXES = {".py", ".txt", ".rst"}
HELD_OUT = 16  # of 256 hash values: about 6 % of the sources


def small() -> Texts:
    """A little of the text, for a smoke test."""
    return gather(records=80, edits=80, limit=24)


def gather(records: int = 5_000, edits: int = 7_500, limit: int | None = None) -> Texts:
    """Read the standard library and generate the rest.

    `records` and `edits`: numbers of generated training documents (a sixteenth as many are held
    out); there are two echoes per five edits. `limit`: use at most this many source files and
    this many topics, on either side.
    """
    kinds = _topics(), _files()
    sides: list[dict[str, list[str]]] = []
    seen: set[str] = set()  # a few docstrings occur in several files
    used = 0  # sources
    for side, held in (("train", False), ("held", True)):
        here = [[text for text in kind if is_held_out(text) == held][:limit] for kind in kinds]
        mine = [text for kind in here for text in kind]
        used += len(mine)
        code = _unique(piece for text in mine for piece in pieces(text))
        prose = _unique(passage for text in mine for passage in passages(text))
        code, prose = ([t for t in part if t not in seen] for part in (code, prose))
        seen.update(code, prose)
        share = HELD_OUT if held else 256
        rng = random.Random(f"0 {side}")
        snippets = [s for text in mine for s in functions(text)]
        paragraphs = [p for passage in prose for p in _paragraphs(passage)]
        vocabulary = sorted({word for s in snippets for word in re.findall(r"[A-Za-z]\w*", s)})
        sides.append(
            {
                "code": code,
                "prose": prose,
                "records": _unique(record(rng) for _ in range(records * share // 256)),
                "edits": _unique(
                    edit(rng, snippets, paragraphs) for _ in range(edits * share // 256)
                ),
                "echoes": _unique(echo(rng, vocabulary) for _ in range(edits * share // 640)),
            }
        )
    train, kept = sides
    return Texts(train, kept, facts(train, kept, used))


def facts(train: dict[str, list[str]], held: dict[str, list[str]], sources: int) -> dict[str, Any]:
    """The Python version, and the document count, characters and checksum of every part."""
    return {
        "python": platform.python_version(),
        "sources": sources,
        "parts": {
            side: {
                kind: {
                    "documents": len(texts),
                    "characters": sum(map(len, texts)),
                    "sha256": hashlib.sha256("\0".join(texts).encode()).hexdigest(),
                }
                for kind, texts in parts.items()
            }
            for side, parts in (("train", train), ("held_out", held))
        },
    }


def is_held_out(text: str) -> bool:
    """Whether a source is held out, which depends on its content alone."""
    return hashlib.sha256(text.encode()).digest()[0] < HELD_OUT


def pieces(source: str) -> list[str]:
    """A module, cut between top-level statements into pieces of about `PIECE` characters."""
    if not _parsed(source):
        return []
    cut: list[str] = []
    piece = ""
    for block in re.split(r"(?m)^(?=(?:@|class |def |async def |if __name__))", source):
        if len(piece) + len(block) > PIECE and piece and not _ends_decorated(piece):
            cut.append(piece)
            piece = ""
        piece += block
        while len(piece) > 2 * PIECE:
            at = piece.rfind("\n    def ", PIECE // 2, 2 * PIECE)
            at = at if at > 0 else piece.rfind("\n", 0, 2 * PIECE)
            if at <= 0:
                break
            cut.append(piece[: at + 1])
            piece = piece[at + 1 :]
    cut.append(piece)
    return [p.strip("\n") + "\n" for p in cut if len(p.strip()) > 200]


def passages(source: str) -> list[str]:
    """The prose of a source: docstrings, each under the name it documents, and long comments."""
    if not (module := _parsed(source)):
        return [p + "\n" for p in _sections(source)]
    found = []
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node)
            if doc and len(doc) > 160:
                found += [_title(node) + part + "\n" for part in _sections(doc)]
    return found + [c + "\n" for c in _comments(source) if len(c) > 240]


def functions(source: str) -> list[str]:
    """Functions and methods short enough to occur twice in a document, dedented."""
    if not (module := _parsed(source)):
        return []
    lines = source.splitlines()
    found = []
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef) and node.end_lineno:
            body = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            if 90 < len(body) < 900 and body.count("\n") < 26:
                found.append(inspect.cleandoc("\n" + body))
    return found


def _topics() -> list[str]:
    """The language-reference topics."""
    return _unique(importlib.import_module("pydoc_data.topics").topics.values())


def _files() -> list[str]:
    """The distinct texts of source files, in an order that does not depend on the file system."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = []
    for folder, inside, files in os.walk(root):
        inside[:] = [name for name in inside if name not in LEFT_OUT]
        paths += [Path(folder, name) for name in files if Path(name).suffix in SUFFIXES]
    texts = []
    for path in sorted(paths):
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
    return _unique(texts)


def _unique(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def _ends_decorated(piece: str) -> bool:
    """Whether the last line is a decorator, which belongs to the next block."""
    return piece.rstrip().rsplit("\n", 1)[-1].startswith("@")


def _parsed(source: str) -> ast.Module | None:
    """The module that a source is; None if it is no code."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    return module if len(module.body) > 1 else None


def _title(node: ast.AST) -> str:
    """The heading of a docstring: `name(arguments)`, `class name`, or "" for a module."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return f"{node.name}({ast.unparse(node.args)})\n\n"
    return f"class {node.name}\n\n" if isinstance(node, ast.ClassDef) else ""


def _sections(text: str) -> list[str]:
    """Consecutive paragraphs joined into parts of up to about 1800 characters."""
    parts, part = [], ""
    for paragraph in re.split(r"\n\s*\n", text.strip("\n")):
        if part and len(part) + len(paragraph) > 1800:
            parts.append(part.strip("\n"))
            part = ""
        part += paragraph.rstrip() + "\n\n"
    parts.append(part.strip("\n"))
    return [p for p in parts if len(p) > 120]


def _paragraphs(passage: str) -> list[str]:
    """Paragraphs of running text, each as one line; code and tables are skipped."""
    found = []
    for block in passage.split("\n\n"):
        text = " ".join(block.split())
        words = len(text.split(" "))
        if 14 <= words <= 90 and text[0].isupper() and text.endswith(".") and ">>>" not in text:
            found.append(text)
    return found


def _comments(source: str) -> list[str]:
    """Runs of four or more comment lines, without the # signs."""
    runs: list[list[str]] = [[]]
    last = -1
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
                if token.start[0] != last + 1:
                    runs.append([])
                runs[-1].append(token.string.lstrip("#").removeprefix(" ").rstrip())
                last = token.start[0]
    except (tokenize.TokenError, IndentationError):
        return []
    return ["\n".join(run).strip("\n") for run in runs if len(run) > 3]
