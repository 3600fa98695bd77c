"""Grids: from YAML files to a checked list of points. Nothing here runs anything.

A grid file has exactly the keys of `KEYS`. Everything that can be wrong is found before a kernel
starts, and all of it is told at once: papermill itself would only warn about a misspelt parameter
and then run the default under the wrong label.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import itertools
import json
import keyword
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import nbformat
import yaml

from specexp.errors import UserError
from specexp.lab import build

ROOT = Path(__file__).resolve().parents[2]
KEYS = ("notebook", "experiment", "fixed", "grid", "seeds", "exclude", "include", "timeout_s")
TIMEOUT_S = 900.0
LARGEST_FILE, MOST_ALIASES, MOST_POINTS, LONGEST_TEXT = 1_000_000, 100, 10_000, 65_536
_TYPES = {"int": int, "float": float, "bool": bool, "str": str, "list": list}
_SECRET = re.compile(
    r"hf_\w{20,}|sk-[\w-]{20,}|AKIA[A-Z0-9]{12,}|-----BEGIN|eyJ[\w-]{10,}\.[\w-]{10,}"
)
_SECRET_NAME = re.compile(r"token$|secret|password|api_?key", re.IGNORECASE)


@dataclass(frozen=True)
class Parameter:
    """One line of a notebook's parameters cell: its type, default and help."""

    kind: type
    default: Any
    optional: bool
    help: str

    def coerced(self, value: Any) -> Any:
        """A whole number given for a float is that float, so that it has one identity."""
        return float(value) if self.kind is float and value is not None else value

    def problem(self, value: Any) -> str | None:
        """What is wrong with a value for it, or None."""
        if value is None:
            return None if self.optional else f"needs {self.kind.__name__}, not null"
        if self.kind is float and type(value) is int:
            return None
        if type(value) is not self.kind:
            hint = _yaml_hint(value, self.kind)
            return f"needs {self.kind.__name__}, not {type(value).__name__} {value!r}{hint}"
        return _unfit(value)


@dataclass(frozen=True)
class Point:
    """One notebook run. `params`: every parameter, defaults included; `varying`: the grid's own."""

    grid: str
    notebook: Path
    experiment: str
    params: dict[str, Any] = field(hash=False)
    varying: tuple[str, ...]
    timeout_s: float
    run_key: str

    timed: bool = True

    @property
    def label(self) -> str:
        shown = " ".join(f"{n}={self.params[n]}" for n in self.varying)
        return f"{self.notebook.stem} {shown}".strip()


def load(paths: Sequence[Path | str]) -> list[Point]:
    """The points of these files, each once. Raises one UserError that lists every problem."""
    problems: list[str] = []
    points: dict[str, Point] = {}
    for path in map(Path, paths):
        found, wrong = _read(path)
        problems += [f"{path}: {w}" for w in wrong]
        points |= {p.run_key: p for p in found if p.run_key not in points}
    if problems:
        raise UserError("\n".join(problems))
    if len(points) > MOST_POINTS:
        raise UserError(f"{len(points)} points are more than {MOST_POINTS}: split the grid")
    return list(points.values())


def _read(path: Path) -> tuple[list[Point], list[str]]:
    try:
        spec = _parse(path)
    except UserError as e:
        return [], [str(e)]
    problems = _shape_problems(spec)
    if problems:
        return [], problems
    notebook = _find(path, spec["notebook"])
    if notebook is None:
        return [], [f"notebook {spec['notebook']!r} does not exist{_near_notebook(spec)}"]
    try:
        known = parameters_of(notebook)
    except UserError as e:
        return [], [str(e)]
    axes = dict(spec.get("grid") or {})
    if spec.get("seeds") is not None:
        axes["seed"] = spec["seeds"]
    fixed = spec.get("fixed") or {}
    include, exclude = spec.get("include") or [], spec.get("exclude") or []
    problems = _value_problems(known, fixed, axes, include, exclude)
    if problems:
        return [], problems
    if math.prod(map(len, axes.values())) > MOST_POINTS:
        return [], [f"the product of the axes has more than {MOST_POINTS} points: split the grid"]
    combinations = [dict(zip(axes, v, strict=True)) for v in itertools.product(*axes.values())]
    kept = [c for c in combinations if not any(_matches(fixed | c, e) for e in exclude)]
    kept = [*(kept if axes or not include else []), *include]
    if not kept:
        return [], ["exclude leaves no point: nothing would run"]
    unused = [e for e in exclude if not any(_matches(fixed | c, e) for c in combinations)]
    if unused:
        return [], [f"exclude {e} matches no point" for e in unused]
    varying = tuple(dict.fromkeys([*axes, *(n for i in include for n in i)]))
    points = [_point(path, spec, notebook, known, fixed | c, varying) for c in kept]
    semantic = [w for p in points for w in build.check(p.params)]
    return points, list(dict.fromkeys(semantic))


def _point(
    path: Path, spec: dict[str, Any], notebook: Path, known: dict[str, Parameter],
    given: dict[str, Any], varying: tuple[str, ...],
) -> Point:  # fmt: skip
    params = {name: p.coerced(given.get(name, p.default)) for name, p in known.items()}
    identity = [params, _digest(notebook), code_digest()]
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    experiment = spec.get("experiment") or notebook.stem
    timeout = float(spec.get("timeout_s") or TIMEOUT_S)
    return Point(path.stem, notebook, experiment, params, varying, timeout, key)


def parameters_of(notebook: Path) -> dict[str, Parameter]:
    """The parameters cell: one `name: type = literal  # help` a line."""
    try:
        cells = nbformat.read(notebook, as_version=4).cells
    except (OSError, ValueError, nbformat.ValidationError) as e:
        raise UserError(f"{notebook.name} is not a notebook: {str(e).splitlines()[0]}") from e
    tagged = [c for c in cells if "parameters" in c.metadata.get("tags", [])]
    if len(tagged) != 1:
        raise UserError(
            f"{notebook.name} has {len(tagged)} cells tagged `parameters`; it needs one"
        )
    lines = tagged[0].source.splitlines()
    found = {}
    for node in ast.parse(tagged[0].source).body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            raise UserError(
                f"{notebook.name}, parameters cell, line {node.lineno}: write `name: type = value`"
            )
        kinds = [k.strip() for k in ast.unparse(node.annotation).split("|")]
        kind = _TYPES.get(kinds[0].split("[")[0])
        if kind is None or node.value is None:
            raise UserError(
                f"{notebook.name}, parameters cell, line {node.lineno}: give a value and one of "
                f"the types {', '.join(_TYPES)}"
            )
        help_ = lines[node.end_lineno - 1].partition("#")[2].strip() if node.end_lineno else ""
        found[node.target.id] = Parameter(
            kind, ast.literal_eval(node.value), "None" in kinds[1:], help_
        )
    return found


def _shape_problems(spec: Any) -> list[str]:
    if not isinstance(spec, dict):
        return ["a grid is a mapping with the keys " + ", ".join(KEYS)]
    problems = []
    for key in spec:
        if key not in KEYS:
            near = difflib.get_close_matches(str(key), KEYS, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f" (there are {', '.join(KEYS)})"
            problems.append(f"unknown key {key!r}{hint}")
    if not isinstance(spec.get("notebook"), str):
        problems.append("notebook: name the notebook to run, such as ../10_acceptance.ipynb")
    if not isinstance(spec.get("experiment", ""), str) or not re.fullmatch(
        r"[\w .-]{0,80}", spec.get("experiment") or ""
    ):
        problems.append("experiment: a short name of letters, digits, blanks, dots and dashes")
    for key in ("fixed", "grid"):
        value = spec.get(key)
        if value is not None and not (
            isinstance(value, dict) and all(isinstance(n, str) for n in value)
        ):
            problems.append(f"{key}: a mapping from parameter names to values")
    for name, values in (spec.get("grid") or {}).items() if not problems else ():
        if not isinstance(values, list) or not values:
            problems.append(f"grid.{name}: a list with at least one value")
        elif len({json.dumps(v, sort_keys=True, default=str) for v in values}) < len(values):
            problems.append(f"grid.{name}: a value stands there twice")
    for key in ("exclude", "include"):
        value = spec.get(key)
        if value is not None and not (
            isinstance(value, list) and all(isinstance(v, dict) and v for v in value)
        ):
            problems.append(f"{key}: a list of mappings from parameter names to values")
    seeds = spec.get("seeds")
    if seeds is not None and not (
        isinstance(seeds, list) and seeds and all(type(s) is int and s >= 0 for s in seeds)
    ):
        problems.append("seeds: a list of whole numbers, 0 or more")
    elif seeds and len(set(seeds)) < len(seeds):
        problems.append("seeds: a value stands there twice")
    timeout = spec.get("timeout_s")
    if timeout is not None and (type(timeout) not in (int, float) or not 0 < timeout < math.inf):
        problems.append("timeout_s: a number of seconds above 0")
    return problems


def _value_problems(
    known: dict[str, Parameter], fixed: dict[str, Any], axes: dict[str, list[Any]],
    include: list[dict[str, Any]], exclude: list[dict[str, Any]],
) -> list[str]:  # fmt: skip
    problems = [f"{n} is both fixed and on an axis" for n in axes if n in fixed]
    places = [("fixed", n, v) for n, v in fixed.items()]
    places += [("grid" if n != "seed" else "seeds", n, v) for n, vs in axes.items() for v in vs]
    places += [("include", n, v) for i in include for n, v in i.items()]
    places += [("exclude", n, v) for e in exclude for n, v in e.items()]
    for where, name, value in places:
        wrong = _name_problem(known, name) or known[name].problem(value)
        if wrong:
            shown = name if name.isidentifier() else repr(name)
            problems.append(f"{where}.{shown} {wrong}")
    return list(dict.fromkeys(problems))


def _name_problem(known: dict[str, Parameter], name: str) -> str | None:
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name) or name[0] == "_":
        return "is not a parameter name"
    if _SECRET_NAME.search(name) and name not in known:
        return "looks like a secret; parameters are stored in the open, use the environment"
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
        return f"is not a parameter of the notebook; {hint}"
    return None


def _unfit(value: Any) -> str | None:
    """Values of the right type that still cannot be used."""
    if isinstance(value, list):
        for item in value:
            if not isinstance(item, int | float | str | bool):
                return f"may hold numbers and texts only, not {type(item).__name__}"
            if wrong := _unfit(item):
                return wrong
    if isinstance(value, float) and not math.isfinite(value):
        return f"is {value}; only finite numbers"
    if isinstance(value, int) and abs(value) > 2**63:
        return "is too large a number"
    if isinstance(value, str):
        if len(value) > LONGEST_TEXT:
            return f"is a text of {len(value)} characters, more than {LONGEST_TEXT}"
        if any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 for c in value):
            return "has control characters"
        if _SECRET.search(value):
            return "looks like a secret; parameters are stored in the open, use the environment"
    return None


def _yaml_hint(value: Any, kind: type) -> str:
    if kind is float and isinstance(value, str):
        return " (YAML reads 1e-3 as text; write 1.0e-3)"
    if kind is str and isinstance(value, bool):
        return " (YAML reads yes, no, on, off as true and false; put it in quotes)"
    if kind is str and isinstance(value, int | float):
        return " (put it in quotes)"
    return ""


def _matches(params: dict[str, Any], pattern: dict[str, Any]) -> bool:
    return all(name in params and params[name] == value for name, value in pattern.items())


def _find(grid_file: Path, notebook: str) -> Path | None:
    for base in (grid_file.resolve().parent, ROOT):
        path = (base / notebook).resolve()
        if path.suffix == ".ipynb" and path.is_file():
            return path
    return None


def _near_notebook(spec: dict[str, Any]) -> str:
    there = [p.name for p in (ROOT / "notebooks").glob("*.ipynb")]
    near = difflib.get_close_matches(Path(spec["notebook"]).name, there, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


# --- reading YAML safely -------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """Safe YAML that also refuses a key that stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise UserError(f"line {key_node.start_mark.line + 1}: key {key!r} is not a text")
            if key in seen:
                raise UserError(f"line {key_node.start_mark.line + 1}: {key!r} stands there twice")
            seen.add(key)
        return super().construct_mapping(node, deep)


def _parse(path: Path) -> Any:
    try:
        raw = path.read_bytes()
    except OSError as e:
        raise UserError(f"cannot be read: {e.strerror}") from e
    if len(raw) > LARGEST_FILE:
        raise UserError(f"is larger than {LARGEST_FILE // 1000} kB; that is no grid")
    try:
        text = raw.decode("utf-8-sig")
        if sum(isinstance(t, yaml.AliasToken) for t in yaml.scan(text)) > MOST_ALIASES:
            raise UserError(f"has more than {MOST_ALIASES} aliases")
        return yaml.load(text, _Loader)
    except UnicodeDecodeError as e:
        raise UserError(f"is not UTF-8 (byte {e.start})") from e
    except yaml.MarkedYAMLError as e:
        line = f"line {e.problem_mark.line + 1}: " if e.problem_mark else ""
        raise UserError(f"{line}{e.problem or e.context}") from e
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        raise UserError(f"is not YAML: {str(e).splitlines()[0]}") from e


@lru_cache(maxsize=64)
def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@lru_cache(maxsize=1)
def code_digest() -> str:
    """A digest of the library's source: results of other code are other results."""
    total = hashlib.sha256()
    for path in sorted((ROOT / "specexp").rglob("*.py")):
        total.update(path.read_bytes())
    return total.hexdigest()
