"""Edit and echo documents: a passage, then the same passage with one change or none.

They teach the models to copy from their context, which is what prompt lookup relies on.
`edit(rng, snippets, paragraphs)` and `echo(rng, vocabulary)` draw one document each. The headings
below are part of the format: prompts of the category "editing" use the same ones.

    # Before / # After: rename x to total          one name is changed
    # Before / # After: add a comment              a comment is put above a line of the body
    # Before / # After: remove the last line       one line is removed
    # Before / # After: add a check that x is not None      two lines are added after the def
    Original: / Corrected:                         a doubled word, a missing capital or a missing
                                                   full stop is corrected
    Original: / Replace "old" with "new":          one word is replaced everywhere
    Text: / Copy:                                  an exact copy
    Text: / Quote the sentence about "word":       one sentence is copied
    Input: / Output: set status to done where id is 104       one cell of a table is changed
    Input: / Output: remove the row where id is 104           one row is removed
    CSV: / JSON lines:  and  JSON lines: / CSV:    the same values in another format
"""

import json
import keyword
import random
import re
from collections.abc import Sequence

from making.records import FIELDS, csv, json_lines, key_value, rows, words

NEW_NAMES = words(
    "total value result item entry index count text data name path node key table buffer source "
    "output line width first last other current size"
)
NOTES = (
    "do the work",
    "check the input first",
    "this may be slow",
    "keep the order",
    "see the documentation",
    "nothing to do here",
    "start with the common case",
    "make sure the value is valid",
)


def edit(rng: random.Random, snippets: Sequence[str], paragraphs: Sequence[str]) -> str:
    """Draw one edit: of code half of the time, of prose or records a quarter each."""
    if rng.random() < 0.5:
        return _of_code(rng, rng.choice(snippets))
    if rng.random() < 0.5:
        return _of_prose(rng, rng.choice(paragraphs))
    return _of_records(rng)


def echo(rng: random.Random, vocabulary: Sequence[str]) -> str:
    """Draw random words, then the same words: the second half is predictable only by copying."""
    lines = [
        " ".join(rng.choices(vocabulary, k=rng.randint(3, 8))) for _ in range(rng.randint(3, 9))
    ]
    text = "\n".join(lines)
    if rng.random() < 0.5:
        return _document("Text:", text, "Copy:", text)
    old, new = rng.choice(text.split()), rng.choice(NEW_NAMES)
    changed = re.sub(rf"\b{re.escape(old)}\b", new, text)
    return _document("Original:", text, f'Replace "{old}" with "{new}":', changed)


def rename(code: str, old: str, new: str) -> str:
    """Replace the whole word `old` by `new`, except where it is an attribute."""
    return re.sub(rf"(?<![\w.]){re.escape(old)}(?!\w)", new, code)


def _of_code(rng: random.Random, code: str) -> str:
    lines = code.split("\n")
    body = _body(lines)
    names = [n for n in _names(code) if n not in ("self", "cls")]
    what = rng.choice(("rename", "rename", "rename", "comment", "remove", "check", "copy"))
    if what == "rename" and names:
        old = rng.choice(names)
        new = rng.choice([n for n in NEW_NAMES if not re.search(rf"\b{n}\b", code)] or ["renamed"])
        return _document(
            "# Before", code, f"# After: rename {old} to {new}", rename(code, old, new)
        )
    if what == "comment":
        at = rng.randrange(body, len(lines))
        indent = re.match(r"\s*", lines[at])[0] or "    "  # type: ignore[index]
        after = [*lines[:at], f"{indent}# {rng.choice(NOTES)}", *lines[at:]]
        return _document("# Before", code, "# After: add a comment", "\n".join(after))
    if what == "remove" and len(lines) > body + 1:
        return _document("# Before", code, "# After: remove the last line", "\n".join(lines[:-1]))
    if what == "check" and names:
        name = rng.choice(names)
        test = [f"    if {name} is None:", f'        raise ValueError("{name} is missing")']
        after = [*lines[:body], *test, *lines[body:]]
        heading = f"# After: add a check that {name} is not None"
        return _document("# Before", code, heading, "\n".join(after))
    return _document("Text:", code, "Copy:", code)


def _of_prose(rng: random.Random, text: str) -> str:
    words = text.split(" ")
    what = rng.choice(("double", "capital", "stop", "replace", "replace", "copy", "quote"))
    if what == "double":
        at = rng.randrange(len(words))
        return _document("Original:", " ".join([*words[: at + 1], *words[at:]]), "Corrected:", text)
    if what == "capital":
        return _document("Original:", text[0].lower() + text[1:], "Corrected:", text)
    if what == "stop":
        return _document("Original:", text[:-1], "Corrected:", text)
    if what == "replace":
        old = rng.choice([w for w in words if w.isalpha() and len(w) > 2] or ["the"])
        new = rng.choice(NEW_NAMES)
        changed = re.sub(rf"\b{old}\b", new, text)
        return _document("Original:", text, f'Replace "{old}" with "{new}":', changed)
    sentences = re.split(r"(?<=\.) (?=[A-Z])", text)
    if what == "quote" and len(sentences) > 1:
        sentence = rng.choice(sentences)
        word = max(re.findall(r"\w+", sentence) or ["it"], key=len)
        return _document("Text:", text, f'Quote the sentence about "{word}":', sentence)
    return _document("Text:", text, "Copy:", text)


def _of_records(rng: random.Random) -> str:
    table = rows(rng, most=9)
    what = rng.choice(("set", "set", "set", "remove", "to_json", "to_csv"))
    if what == "to_json":
        return _document("CSV:", csv(table), "JSON lines:", json_lines(table))
    if what == "to_csv":
        return _document("JSON lines:", json_lines(table), "CSV:", csv(table))
    write = rng.choice((json_lines, csv, key_value))
    row = rng.choice(table)
    where, column = next(iter(row)), rng.choice(list(row)[1:])
    place = f"where {where} is {_plain(row[where])}"
    if what == "remove":
        rest = [r for r in table if r[where] != row[where]] or table[:1]
        return _document("Input:", write(table), f"Output: remove the row {place}", write(rest))
    value = FIELDS[column](rng, 0)
    changed = [{**r, column: value} if r[where] == row[where] else r for r in table]
    heading = f"Output: set {column} to {_plain(value)} {place}"
    return _document("Input:", write(table), heading, write(changed))


def _document(first: str, before: str, second: str, after: str) -> str:
    return f"{first}\n{before.rstrip()}\n\n{second}\n{after.rstrip()}\n"


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _body(lines: list[str]) -> int:
    """Index of the first line after the signature, or of the last line if there is no body."""
    for at, line in enumerate(lines[:-1]):
        if line.rstrip().endswith(":"):
            return at + 1
    return len(lines) - 1


def _names(code: str) -> list[str]:
    """Names worth changing: used at least twice, not keywords, not called."""
    seen = re.findall(r"(?<![\w.\"'])([a-z_]\w*)(?![\w(\"'])", code)
    often = dict.fromkeys(n for n in seen if seen.count(n) > 1)
    return [n for n in often if not keyword.iskeyword(n) and not n.startswith("__")]
