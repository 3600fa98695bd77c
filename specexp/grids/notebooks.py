"""Static facts about a notebook: its parameters, the names its cells read, a digest of its code.

Nothing is executed and no notebook is changed. (Papermill's own inspection of parameters skips
lines that it does not understand, keeps the last of two equal names and knows no line numbers.)
"""

import ast
import hashlib
import json
import keyword
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specexp.errors import UserError
from specexp.grids import imports
from specexp.measure.parameters import PARAMETERS
from specexp.tracking import redact

INJECTED = "injected-parameters"  # papermill's tag for the cell that it adds
LARGEST, LONGEST_TEXT = 50_000_000, 65_536
_TYPES = {"int": int, "float": float, "bool": bool, "str": str, "list": list}
_HOW_TO_TAG = (
    "in JupyterLab select the cell, open the Property Inspector (the gears at the right) and add "
    "the cell tag `parameters`"
)


@dataclass(frozen=True)
class Parameter:
    """One line of a notebook's parameters cell. `items`: the type of a list's items, if known."""

    kind: type
    default: Any
    optional: bool
    items: type | None = None

    def coerced(self, value: Any) -> Any:
        """The value, with floats where they are expected, so that 1 and 1.0 are one point."""
        if isinstance(value, list) and self.items is float:
            return [float(v) + 0.0 for v in value]
        return float(value) + 0.0 if self.kind is float and value is not None else value

    def problem(self, value: Any) -> str | None:
        """What is wrong with a value for this parameter, or None."""
        if value is None:
            return None if self.optional else f"needs {_WORDS[self.kind]}, not null"
        if wrong := value_problem(value) or _type_problem(self.kind, value):
            return wrong
        if not self.items or not isinstance(value, list):
            return None
        each = (_type_problem(self.items, item, "a list, each item ") for item in value)
        return next(filter(None, each), None)


@dataclass(frozen=True)
class Notebook:
    """`reads`: the names that the other cells read, or None if they may read any. `digest`: of the
    sources of the code cells, not of output, metadata or prose. `code`: what it holds, without the
    parameters cell. `timed`: it may measure time; false if its metadata say
    {"specexp": {"timed": false}}."""

    path: Path
    parameters: dict[str, Parameter]
    reads: frozenset[str] | None
    digest: str
    code: imports.Source = field(default_factory=imports.Source)
    timed: bool = True


def read(path: Path) -> Notebook:
    """Raises UserError with a line for each problem of the parameters cell."""
    cells, metadata = _cells(path)
    tagged = [source for source, tags in cells if "parameters" in tags]
    if len(tagged) != 1:
        raise UserError(
            f"{path.name} has {len(tagged) or 'no'} code cells tagged `parameters` and needs one: "
            f"{_HOW_TO_TAG}"
        )
    parameters = _parameters(tagged[0], f"{path.name}, parameters cell, line")
    digest = digest_of(source for source, _ in cells)
    about = metadata.get("specexp")
    timed = not (isinstance(about, dict) and about.get("timed") is False)
    code, rest = imports.code_of(source for source, tags in cells if "parameters" not in tags)
    return Notebook(path, parameters, _names(code, rest), digest, imports.read(code), timed)


def unread(path: Path, names: Iterable[str]) -> Notebook:
    """Stands for a notebook that cannot be read: it has the parameters of the table, and those of
    these names, of any type, as its own."""
    own = dict.fromkeys(names, Parameter(object, None, True))
    shared = {n: Parameter(_TYPES[p.type], None, True) for n, p in PARAMETERS.items()}
    return Notebook(path, own | shared, None, "")


def modules_of(paths: Iterable[Path]) -> tuple[str, ...]:
    """The modules that notebooks may import, with what stands behind specexp's public names."""
    names = (name for path in sorted({*paths}) for name in read(path).code.modules)
    full = (part for name in names if name[0] != "." for part in imports.behind_public_names(name))
    return tuple(dict.fromkeys(full))


def digest_of(sources: Iterable[str]) -> str:
    """16 hexadecimal digits for the sources of code cells, but empty ones."""
    code = [source for source in sources if source.strip()]
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()[:16]


def value_problem(value: Any) -> str | None:
    """Why a value cannot be a parameter of any type, or None."""
    if isinstance(value, list):
        for item in value:
            if not isinstance(item, int | float | str | bool):
                return f"may hold only numbers and strings, not {type(item).__name__}"
            if wrong := value_problem(item):
                return wrong
    if isinstance(value, float) and not math.isfinite(value):
        return f"is {value}; only finite numbers are allowed"
    if isinstance(value, int) and abs(value) >= 2**63:
        return "is too large a number"
    if isinstance(value, str):
        if len(value) > LONGEST_TEXT:
            return f"has {len(value)} characters, more than {LONGEST_TEXT}"
        if any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 for c in value):
            return "has control characters"
        if any("\ud800" <= c <= "\udfff" for c in value):
            return "has half a surrogate pair, which is not valid text"
        if redact.hide(value) != value:
            return redact.REFUSED
    return None


def is_name(name: str) -> bool:
    """Whether a parameter may have this name, which becomes code in the kernel."""
    plain = name.isidentifier() and name.isascii() and name[0] != "_"
    return plain and not keyword.iskeyword(name)


def shown(value: Any) -> str:
    """A value for a message: a printable line, whose middle is left out if it is long."""
    text = value if isinstance(value, str) and value.isprintable() and value else repr(value)
    return text if len(text) <= 60 else f"{text[:27]}...{text[-30:]}"


_WORDS = {
    int: "a whole number", float: "a number", str: "a text", bool: "true or false", list: "a list",
}  # fmt: skip


def _type_problem(kind: type, value: Any, a: str = "") -> str | None:
    if kind in (object, type(value)) or (kind is float and type(value) is int):
        return None
    return f"needs {a}{_WORDS[kind]}, not {value!r:.60}{_hint(value, kind)}"


def _hint(value: Any, kind: type) -> str:
    """What to write instead, where YAML 1.1 or a common mistake explains the value."""
    if kind in (int, float) and isinstance(value, str):
        try:
            meant = float(value) if kind is float else int(value, 0)
            if not math.isfinite(meant):
                return ""
        except (ValueError, OverflowError):
            return ""
        written = re.sub(r"^(-?\d+)e", r"\1.0e", repr(meant))
        return f" (YAML reads {value:.20} as text; write {written})"
    if kind is str and isinstance(value, bool):
        return " (YAML reads yes, no, on, off as true and false; put it in quotes)"
    if kind is str and isinstance(value, int | float):
        return " (put it in quotes)"
    if kind is list and isinstance(value, int | float | str):
        return f" (write [{value!r:.40}])"
    return ""


def _cells(path: Path) -> tuple[list[tuple[str, list[str]]], dict[str, Any]]:
    """Source and tags of every code cell, except papermill's own, and the notebook's metadata."""
    try:
        if path.stat().st_size > LARGEST:
            raise UserError(f"{path.name} is larger than {LARGEST // 10**6} MB: clear its outputs")
        notebook = json.loads(path.read_bytes())
        if notebook["nbformat"] != 4:
            raise UserError(f"{path.name} is in an old format: open and save it in JupyterLab")
        cells = [
            ("".join(cell["source"]), list(cell.get("metadata", {}).get("tags", [])))
            for cell in notebook["cells"]
            if cell["cell_type"] == "code"
        ]
        cells = [cell for cell in cells if INJECTED not in cell[1]]
        return cells, dict(notebook.get("metadata") or {})
    except OSError as e:
        raise UserError(f"{path.name} cannot be read: {e.strerror}") from e
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        reason = " ".join(str(e).split())[:80]
        raise UserError(f"{path.name} is not a notebook: {type(e).__name__} {reason}") from e


def _parameters(source: str, where: str) -> dict[str, Parameter]:
    try:
        lines = imports.parse(source).body
    except SyntaxError as e:
        raise UserError(f"{where} {e.lineno}: {e.msg}") from e
    problems, parameters = [], {}
    for node in lines:
        try:
            name, parameter = _parameter(node)
            if name in parameters:
                raise UserError(f"{name} is defined twice")
            parameters[name] = parameter
        except UserError as e:
            problems.append(f"{where} {node.lineno}: {e}")
    if problems:
        raise UserError("\n".join(problems))
    return parameters


def _parameter(node: ast.stmt) -> tuple[str, Parameter]:
    if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
        raise UserError("write `name: type = value`")
    name = node.target.id
    if not is_name(name):
        raise UserError(f"{name} cannot be the name of a parameter")
    kinds = [k.strip() for k in ast.unparse(node.annotation).split("|")]
    outer, _, inner = kinds[0].partition("[")
    kind = _TYPES.get(outer)
    if kind is None or node.value is None:
        raise UserError(f"give {name} a value and one of the types {', '.join(_TYPES)}")
    try:
        default = ast.literal_eval(node.value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise UserError(f"the value of {name} is not a literal such as 3, 0.5 or 'text'") from None
    optional = "None" in kinds[1:]
    items = _TYPES.get(inner.rstrip("]")) or _items(default)
    parameter = Parameter(kind, default, optional, items)
    wrong = redact.REFUSED if redact.is_secret(name, default) else parameter.problem(default)
    if wrong:
        raise UserError(f"{name} {wrong}")
    return name, Parameter(kind, parameter.coerced(default), optional, items)


def _items(default: Any) -> type | None:
    kinds = {type(item) for item in default} if isinstance(default, list) else set()
    if kinds == {int, float}:
        return float
    return kinds.pop() if len(kinds) == 1 else None


def _names(code: ast.Module, rest: str) -> frozenset[str] | None:
    """The names that cells read: loads, strings that may be keys, and every word of what is not
    Python. None if a cell may read any name."""
    nodes = list(ast.walk(code))
    if re.search(r"^%run\b", rest, re.MULTILINE) or any(map(_may_read_any_name, nodes)):
        return None
    return frozenset([*re.findall(r"\w+", rest), *(name for n in nodes for name in _read_by(n))])


def _may_read_any_name(node: ast.AST) -> bool:
    """`f(**params)`, `exec(...)` and `eval(...)` read names that are not in the source."""
    if not isinstance(node, ast.Call):
        return False
    called = node.func.id if isinstance(node.func, ast.Name) else ""
    return called in ("exec", "eval") or any(k.arg is None for k in node.keywords)


def _read_by(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
        yield from re.findall(r"@(\w+)", node.value)
