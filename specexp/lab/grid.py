"""Grids: from YAML files to a checked list of points. Nothing here runs anything.

A grid file has exactly the keys of `KEYS`. Everything that can be wrong is found before a kernel
starts, and all of it is told at once, each with its line: papermill itself would only warn about a
misspelt parameter and then run the default under the wrong label.
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specexp.errors import UserError
from specexp.lab import build, identity, lines
from specexp.lab.notebook import Notebook, Parameter, is_name, parameters_of, shown, unfit
from specexp.lab.notebook import read as read_notebook

__all__ = ["MANY", "MOST", "ROOT", "Point", "load", "parameters_of"]

ROOT = Path(__file__).resolve().parents[2]
KEYS = ("notebook", "experiment", "fixed", "grid", "seeds", "exclude", "include", "timeout_s")
TIMEOUT_S = 900.0
MANY, MOST = 1_000, 1_000_000  # points that are asked about; that one file may have
LOADED = ("target", "dtype", "device", "drafter", "draft")  # slowest first in the order of points
_SECRET_NAME = re.compile(r"token$|secret|password|api_?key", re.IGNORECASE)
_UNPRINTABLE = re.compile(r"[^ -~\u00a0-\ud7ff\ue000-\U0010ffff]|[\u2028-\u202e\u2066-\u2069]")


@dataclass(frozen=True, slots=True)
class Point:
    """One notebook run. `params`: every parameter, defaults included; `varying`: the grid's own;
    `surroundings`: the parts of its identity besides the parameters; `timed`: it measures time, so
    nothing else should run beside it."""

    grid: str
    notebook: Path
    experiment: str
    params: dict[str, Any] = field(hash=False)
    varying: tuple[str, ...]
    timeout_s: float
    surroundings: dict[str, str] = field(hash=False)
    run_key: str
    timed: bool = True

    @property
    def label(self) -> str:
        values = " ".join(f"{n}={shown(self.params[n])}" for n in self.varying)
        return f"{self.notebook.stem} {values}".strip()

    @property
    def identity(self) -> dict[str, str]:
        """Digests of what the result depends on; `run_key` is the digest of them all."""
        return {"params": identity.digest(self.params), **self.surroundings}


@dataclass(frozen=True)
class Sheet:
    """A grid file that says what it means: every value fits its parameter and is coerced.

    `base`: every parameter of the notebook, defaults and fixed values; `axes`: seeds included;
    `include`, `exclude`: their entries; `product`: whether the axes are run, or the includes alone.
    """

    path: Path
    document: lines.Document
    notebook: Notebook
    base: dict[str, Any]
    axes: dict[str, list[Any]]
    include: list[dict[str, Any]]
    exclude: list[dict[str, Any]]
    product: bool

    @property
    def most(self) -> int:
        """Points, were there no `exclude`."""
        axes = math.prod(map(len, self.axes.values())) if self.product else 0
        return axes + len(self.include)

    @property
    def line(self) -> int:
        keys = (key for key in ("grid", "seeds", "notebook") if self.document.has(key))
        return self.document.line(next(keys))

    @property
    def varying(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self.axes, *(n for i in self.include for n in i)]))

    def combinations(self) -> Iterator[tuple[dict[str, Any], int | None]]:
        """The parameters of every point, and which `include` it is of, if it is of one."""
        for values in itertools.product(*self.axes.values()) if self.product else ():
            params = self.base | dict(zip(self.axes, values, strict=True))
            if not any(_matches(params, entry) for entry in self.exclude):
                yield params, None
        for index, entry in enumerate(self.include):
            yield self.base | entry, index

    def values(self, name: str) -> list[Any]:
        """The values that a parameter has in some point, each once."""
        of_product = self.axes.get(name, [self.base[name]]) if self.product else []
        return _distinct([*of_product, *(i.get(name, self.base[name]) for i in self.include)])

    def where(self, name: str, params: dict[str, Any], index: int | None) -> int | None:
        """The line that gives a point its value of a parameter; None if that is the default."""
        if index is not None and name in self.include[index]:
            return self.document.line("include", index, name)
        if name in self.axes and index is None:
            at = _keys(self.axes[name]).index(_key(params[name]))
            return self.document.line(*_axis(self.document, name), at)
        given = self.document.has("fixed", name)
        return self.document.line("fixed", name) if given else None


def load(
    paths: Sequence[Path | str], ask: Callable[[int], bool] | None = None, only: Sequence[str] = ()
) -> list[Point]:
    """The points of these files, each once, those that load the same models side by side.

    `ask` is called with the number of points when there are more than MANY, and may refuse them.
    `only`: texts such as "gamma=3" or "drafter=ngram,sibling-3m", all of which a point must meet.
    Raises one UserError that lists every problem as `FILE:LINE: what`.
    """
    report = Report(list(map(Path, paths)))
    sheets = [sheet for path in report.files if (sheet := _read(path, report))]
    if not report.problems:
        sheets = _narrowed(sheets, only, report)
    if not report.problems:
        _ask(sheets, ask, report)
    points: dict[str, Point] = {}
    once, surroundings = build.Once(), identity.Surroundings()
    if sum(sheet.most for sheet in sheets) <= MANY or not report.problems:
        for sheet in sheets:
            for point in _points(sheet, Checks(sheet, once, report), surroundings):
                points.setdefault(point.run_key, point)
    report.refuse()
    return _ordered(points.values())


class Report:
    """What is wrong with these files, to be told all at once."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        self.problems: list[tuple[Path | None, int | None, str]] = []

    def add(self, path: Path | None, line: int | None, what: str) -> None:
        self.problems.append((path, line, what))

    def refuse(self) -> None:
        """Raise UserError if there is a problem: one line each, files in order, lines in order."""
        if not self.problems:
            return
        places: dict[Path | None, int] = {f: i for i, f in reversed([*enumerate(self.files)])}
        ordered = sorted(self.problems, key=lambda p: (places.get(p[0], -1), p[1] or 0))
        said = [
            ("" if path is None else f"{path}: " if line is None else f"{path}:{line}: ") + what
            for path, line, what in ordered
        ]
        escaped = (_UNPRINTABLE.sub(lambda c: ascii(c[0])[1:-1], text) for text in said)
        raise UserError("\n".join(dict.fromkeys(escaped)))


# --- one file ------------------------------------------------------------------------------------


def _read(path: Path, report: Report) -> Sheet | None:
    """A grid file, or None with what is wrong with it reported."""
    try:
        document = lines.read(path)
    except UserError as e:
        report.add(path, None, str(e))
        return None
    before = len(report.problems)

    def wrong(what: str, *where: str | int) -> None:
        report.add(path, document.line(*where), what)

    for line, what in document.problems:
        report.add(path, line, what)
    spec = document.value
    if not isinstance(spec, dict):
        if not document.problems:
            kind = "is empty" if spec is None else "holds no mapping"
            wrong(f"{kind}: a grid is a mapping with the keys {', '.join(KEYS)}")
        return None
    shaped = _shape(spec, wrong)
    notebook = _notebook(path, spec.get("notebook"), wrong)
    if notebook is None:
        return None
    sheet = _sheet(path, document, notebook, shaped, wrong)
    if len(report.problems) == before:
        _points_problems(sheet, wrong)
    return sheet if len(report.problems) == before else None


def _shape(spec: dict[str, Any], wrong: Callable[..., None]) -> dict[str, Any]:
    """Report what does not have the form of a grid; returns what has."""
    for key in spec:
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f" (there are {', '.join(KEYS)})"
            wrong(f"unknown key {key!r:.60}{hint}", key)
    good: dict[str, Any] = {}
    experiment = spec.get("experiment")
    if experiment is not None and not (
        isinstance(experiment, str)
        and re.fullmatch(r"\w[\w .-]{0,79}", experiment)
        and not unfit(experiment)
    ):
        wrong("experiment: a short name of letters, digits, blanks, dots and dashes", "experiment")
    timeout = spec.get("timeout_s")
    if timeout is not None and (type(timeout) not in (int, float) or not 0 < timeout < 1e9):
        wrong("timeout_s: a number of seconds above 0 and below 1.0e+9", "timeout_s")
    for key in ("fixed", "grid"):
        value = spec.get(key)
        if isinstance(value, dict) and (value or key == "fixed"):
            good[key] = value
        elif key == "grid" and key in spec and not value:
            wrong("grid is empty: give it an axis such as `gamma: [2, 4]`, or leave it out", key)
        elif value is not None:
            wrong(f"{key}: a mapping from parameter names to values", key)
    for name, values in list(good.get("grid", {}).items()):
        if not isinstance(values, list) or not values:
            wrong(f"grid.{shown(name)}: a list with at least one value", "grid", name)
            good["grid"] = {n: v for n, v in good["grid"].items() if n != name}
    for key in ("exclude", "include"):
        value = spec.get(key)
        if isinstance(value, list) and all(isinstance(v, dict) and v for v in value):
            good[key] = value
        elif isinstance(value, list):
            for i, entry in enumerate(value):
                if not isinstance(entry, dict) or not entry:
                    wrong(f"{key}: a list of mappings from parameter names to values", key, i)
        elif value is not None:
            wrong(f"{key}: a list of mappings from parameter names to values", key)
    if "seeds" in spec:
        seeds = spec["seeds"]
        if isinstance(seeds, list) and seeds:
            good["seeds"] = seeds
        else:
            wrong("seeds: a list of whole numbers, 0 or more", "seeds")
    return good


def _notebook(grid_file: Path, named: Any, wrong: Callable[..., None]) -> Notebook | None:
    if not isinstance(named, str) or not named.strip():
        wrong("notebook: name the notebook to run, such as ../10_acceptance.ipynb", "notebook")
        return None
    try:
        return read_notebook(_find(grid_file, named))
    except UserError as e:
        for problem in str(e).splitlines():
            wrong(problem, "notebook")
    return None


def _find(grid_file: Path, named: str) -> Path:
    """The notebook that a grid names. A notebook is code, so it must lie, symbolic links followed,
    in this repository or under the folder above the grid file's own."""
    folder = grid_file.resolve().parent
    above = folder.parent if folder.parent != folder.parent.parent else folder
    outside = None
    for base in (folder, ROOT):
        try:
            path = (base / named).resolve()
            there = path.is_file() and path.suffix == ".ipynb"
        except (OSError, ValueError, RuntimeError):
            continue
        if there and any(path.is_relative_to(root) for root in (above, ROOT)):
            return path
        outside = outside or (path if there else None)
    if outside:
        raise UserError(
            f"notebook {named!r:.80} lies outside {above} and {ROOT}: a notebook is code, and only "
            "those beside the grid or in the repository are run"
        )
    beside = [p.name for f in (folder, folder.parent, ROOT / "notebooks") for p in _notebooks(f)]
    near = difflib.get_close_matches(named.rpartition("/")[2], beside, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UserError(f"notebook {named!r:.80} does not exist, or is no .ipynb file{hint}")


def _notebooks(folder: Path) -> list[Path]:
    return sorted(itertools.islice(folder.glob("*.ipynb"), 1000))


def _sheet(
    path: Path, document: lines.Document, notebook: Notebook, shaped: dict[str, Any],
    wrong: Callable[..., None],
) -> Sheet:  # fmt: skip
    """Report values that do not fit their parameters; the sheet is of use if nothing is wrong."""
    known = notebook.parameters

    def fitting(name: str, value: Any, *where: str | int) -> Any:
        """The value coerced, with its problem reported."""
        if not (problem := _name_problem(known, name)):
            problem = known[name].problem(value)
        if problem:
            wrong(f"{_dotted(where, name)} {problem}", *where)
            return value
        return known[name].coerced(value)

    fixed = {n: fitting(n, v, "fixed", n) for n, v in shaped.get("fixed", {}).items()}
    axes: dict[str, list[Any]] = {}
    for name, values in shaped.get("grid", {}).items():
        if problem := _name_problem(known, name):
            wrong(f"grid.{shown(name)} {problem}", "grid", name)
            continue
        axes[name] = [fitting(name, v, "grid", name, i) for i, v in enumerate(values)]
    if "seeds" in shaped:
        _seeds(shaped["seeds"], notebook, axes, wrong)
    for name, values in axes.items():
        where = _axis(document, name)
        for i, j in _repeated(values):
            first = document.line(*where, i)
            what = f"{'.'.join(where)}: {shown(values[j])} stands there twice"
            wrong(f"{what}, first on line {first}", *where, j)
        if name in fixed:
            first = document.line("fixed", name)
            wrong(f"{name} is both fixed (line {first}) and on an axis", *where)
    entries: dict[str, list[dict[str, Any]]] = {
        key: [{n: fitting(n, v, key, i, n) for n, v in entry.items()}
              for i, entry in enumerate(shaped.get(key, []))]
        for key in ("include", "exclude")
    }  # fmt: skip
    base = {name: p.default for name, p in known.items()} | fixed
    product = bool(axes) or not entries["include"]
    return Sheet(path, document, notebook, base, axes, product=product, **entries)


def _seeds(
    seeds: list[Any], notebook: Notebook, axes: dict[str, list[Any]], wrong: Callable[..., None]
) -> None:
    known = notebook.parameters.get("seed")
    if known is None or known.kind is not int:
        wrong(f"seeds: {notebook.path.name} has no parameter `seed: int`, so all seeds would give "
              "the same", "seeds")  # fmt: skip
        return
    if "seed" in axes:
        wrong("seeds: there is an axis seed already", "seeds")
        return
    for i, seed in enumerate(seeds):
        if type(seed) is not int or seed < 0:
            wrong(f"seeds: a list of whole numbers, 0 or more, not {seed!r:.40}", "seeds", i)
        elif problem := known.problem(seed):
            wrong(f"seeds: {seed!r:.40} {problem}", "seeds", i)
    axes["seed"] = seeds


def _points_problems(sheet: Sheet, wrong: Callable[..., None]) -> None:
    """Values that fit one by one and make no sense together."""
    reads = sheet.notebook.reads
    for name in sheet.varying:
        if reads is not None and name not in reads:
            where: tuple[str | int, ...] = next(
                (("include", i, name) for i, entry in enumerate(sheet.include) if name in entry), ()
            )
            wrong(
                f"{name} is read by no cell of {sheet.notebook.path.name}: its points would all be "
                "the same experiment",
                *(_axis(sheet.document, name) if name in sheet.axes else where),
            )
    if sheet.exclude and not sheet.product:
        wrong("exclude takes points from a grid, and there is none here", "exclude")
        return
    for i, entry in enumerate(sheet.exclude):
        for name, value in entry.items():
            there = sheet.axes.get(name, [sheet.base[name]])
            if _key(value) not in _keys(there):
                wrong(
                    f"exclude matches no point: {name} is never {shown(value)}, only "
                    f"{_listed(there)}", "exclude", i, name,
                )  # fmt: skip
                break
    seen: dict[Any, int] = {}
    for i, entry in enumerate(sheet.include):
        params = sheet.base | entry
        key = tuple(_keys(params.values()))
        on_axes = all(_key(params[n]) in _keys(values) for n, values in sheet.axes.items())
        off_axes = all(
            _key(v) == _key(sheet.base[n]) for n, v in params.items() if n not in sheet.axes
        )
        excluded = any(_matches(params, e) for e in sheet.exclude)
        if key in seen:
            first = sheet.document.line("include", seen[key])
            wrong(f"include repeats the point of line {first}", "include", i)
        elif sheet.product and on_axes and off_axes and not excluded:
            wrong(f"include repeats a point of the grid on line {sheet.line}", "include", i)
        seen.setdefault(key, i)
    if sheet.exclude and not sheet.include and _none_left(sheet):
        wrong("exclude leaves no point: nothing would run", "exclude")


def _none_left(sheet: Sheet) -> bool:
    return sheet.most <= MOST and next(sheet.combinations(), None) is None


def _name_problem(known: dict[str, Parameter], name: str) -> str | None:
    if not is_name(name):
        return "is not a parameter name"
    if _SECRET_NAME.search(name) and name not in known:
        return "looks like a secret; parameters are stored in the open, use the environment"
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
        return f"is not a parameter of the notebook; {hint}"
    return None


# --- which points --------------------------------------------------------------------------------


def _narrowed(sheets: list[Sheet], only: Sequence[str], report: Report) -> list[Sheet]:
    """The sheets without the points that do not meet every text of `only`."""
    for text in only:
        name, equals, listed = (part.strip() for part in text.partition("="))
        known = [sheet for sheet in sheets if name in sheet.notebook.parameters]
        if not equals or not listed:
            report.add(None, None, f"only {text!r:.80}: write NAME=VALUE or NAME=VALUE,VALUE")
        elif not known:
            names = list(dict.fromkeys(n for s in sheets for n in s.notebook.parameters))
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
            report.add(None, None, f"only {text!r:.80}: no parameter {name!r:.60}; {hint}")
        else:
            there = _distinct([value for sheet in known for value in sheet.values(name)])
            wanted = _wanted(listed, known[0].notebook.parameters[name], there)
            for value in wanted:
                if _key(value) not in _keys(there):
                    near = difflib.get_close_matches(str(value), map(str, there), 1)
                    hint = f"did you mean {near[0]!r}? " if near else ""
                    report.add(None, None, f"only {text!r:.80}: no point has {name} "
                               f"{shown(value)}; {hint}there are {_listed(there)}")  # fmt: skip
            sheets = [_having(sheet, name, _keys(wanted)) for sheet in known]
    if not report.problems and only and not any(_left(sheet) for sheet in sheets):
        report.add(None, None, f"only {' '.join(only)!r:.80}: no point meets all of that")
    return sheets


def _wanted(listed: str, parameter: Parameter, there: list[Any]) -> list[Any]:
    """The values a text asks for: itself, if a point has that, or its parts between commas."""
    if parameter.kind is list:
        asked = re.sub(r"[\s'\"]", "", listed).strip("[]")
        return [v for v in there if ",".join(map(str, v)) == asked] or [listed]
    parts = re.findall(r"\"[^\"]*\"|'[^']*'|[^,]+", listed)
    return [_meant(text.strip(), parameter) for text in ([listed] if listed in there else parts)]


def _meant(text: str, parameter: Parameter) -> Any:
    """A value as it would be written in the file; a text that means another type stays a text."""
    if parameter.kind is str and not (parameter.optional and text == "null"):
        return text.strip("\"'")
    try:
        value = lines.scalar(text)
        value = float(value) if parameter.kind is float and isinstance(value, str) else value
    except (UserError, ValueError):
        return text
    return text if parameter.problem(value) else parameter.coerced(value)


def _having(sheet: Sheet, name: str, wanted: list[Any]) -> Sheet:
    include = [i for i in sheet.include if _key(i.get(name, sheet.base[name])) in wanted]
    if name in sheet.axes:
        values = [value for value in sheet.axes[name] if _key(value) in wanted]
        return replace(sheet, axes=sheet.axes | {name: values}, include=include)
    product = sheet.product and _key(sheet.base[name]) in wanted
    return replace(sheet, product=product, include=include)


def _left(sheet: Sheet) -> bool:
    return sheet.most > MOST or next(sheet.combinations(), None) is not None


def _ask(sheets: list[Sheet], ask: Callable[[int], bool] | None, report: Report) -> None:
    """Count before anything is made; report more points than may be, or than are agreed to."""
    for sheet in sheets:
        if sheet.most > MOST:
            what = f"{sheet.most:,} points ({_sizes(sheet)}) are more than {MOST:,}: split the grid"
            report.add(sheet.path, sheet.line, what)
    if report.problems or sum(sheet.most for sheet in sheets) <= MANY:
        return
    n = sum(1 for sheet in sheets for _ in sheet.combinations())
    if n > MANY and not (ask and ask(n)):
        sizes = "; ".join(_sizes(sheet) for sheet in sheets)
        report.add(
            None, None, f"{n:,} points ({sizes:.300}) are more than {MANY:,}: say --yes to run them"
        )


def _sizes(sheet: Sheet) -> str:
    axes = " x ".join(f"{name} {len(values)}" for name, values in sheet.axes.items())
    return f"{sheet.path.name}: {axes}"


def _ordered(points: Iterable[Point]) -> list[Point]:
    """What is loaded changes slowest; otherwise as they come."""
    points = list(points)
    ranks: dict[str, dict[Any, int]] = {name: {} for name in LOADED}
    for point in points:
        for name, rank in ranks.items():
            rank.setdefault(_key(point.params.get(name)), len(rank))
    return sorted(points, key=lambda p: [r[_key(p.params.get(n))] for n, r in ranks.items()])


# --- each point ----------------------------------------------------------------------------------


def _points(sheet: Sheet, checks: Checks, surroundings: identity.Surroundings) -> Iterator[Point]:
    """The points of a sheet, checked; none whose models are not there."""
    spec, varying = sheet.document.value, sheet.varying
    experiment = spec.get("experiment") or sheet.notebook.path.stem
    timeout = float(spec.get("timeout_s") or TIMEOUT_S)
    for params, index in sheet.combinations():
        checks.see(params, index)
        if checks.wrong:
            continue
        try:
            around = surroundings.of(params, sheet.notebook.digest)
        except (UserError, OSError) as e:
            checks.wrong.setdefault(str(e).splitlines()[0], []).append((params, index))
            continue
        key = identity.digest({"params": identity.digest(params), **around})
        yield Point(sheet.path.stem, sheet.notebook.path, experiment, params, varying, timeout,
                    around, key, sheet.notebook.timed)  # fmt: skip
    checks.report_all()


class Checks:
    """What `build.check` finds in the points of a sheet, and on which lines.

    It is asked once for every combination of the values that it reads together, and once for each
    value of those it reads alone.
    """

    def __init__(self, sheet: Sheet, once: build.Once, report: Report) -> None:
        self.sheet, self.once, self.report = sheet, once, report
        self.seen: set[Any] = set()
        self.together = [name for name in sheet.varying if name not in build.ALONE]
        self.alone = [name for name in sheet.varying if name in build.ALONE]
        self.wrong: dict[str, list[tuple[dict[str, Any], int | None]]] = {}

    def see(self, params: dict[str, Any], index: int | None) -> None:
        keys = [("", *(_key(params[name]) for name in self.together))]
        keys += [(name, _key(params[name])) for name in self.alone]
        if self.seen.issuperset(keys):
            return
        self.seen.update(keys)
        for what in self.said(params):
            self.wrong.setdefault(what, []).append((params, index))

    def said(self, params: dict[str, Any]) -> list[str]:
        try:
            return build.problems_of(params, None, self.once)
        except Exception as e:  # a folder of somebody's model can raise anything
            return [f"cannot be checked: {type(e).__name__}: {' '.join(str(e).split())[:200]}"]

    def report_all(self) -> None:
        for what, points in self.wrong.items():
            blamed: dict[tuple[str, Any], set[int | None]] = {}
            for params, index in points:
                there = ((n, blamed.get((n, _key(v)))) for n, v in params.items())
                if any(at and self.sheet.where(n, params, index) in at for n, at in there):
                    continue
                name = self.cause(what, params, index)
                line = self.sheet.where(name, params, index) if name else None
                self.report.add(self.sheet.path, line or self.sheet.line, what)
                if name is None:
                    break
                blamed.setdefault((name, _key(params[name])), set()).add(line)

    def cause(self, what: str, params: dict[str, Any], index: int | None) -> str | None:
        """The given parameter without whose value this would not be said, those that it speaks of
        first; if there is none, one that it names."""
        given = {n: line for n in params if (line := self.sheet.where(n, params, index))}
        spoken = {n: _speaks_of(what, n, params[n]) for n in given}
        for name in sorted(given, key=lambda n: (-spoken[n], n not in self.sheet.varying)):
            default = self.sheet.notebook.parameters[name].default
            if what not in self.said(params | {name: default}):
                return name
        best = max(given, key=lambda n: spoken[n], default=None)
        return best if best and spoken[best] else None


def _speaks_of(what: str, name: str, value: Any) -> int:
    values = value if isinstance(value, list) else [value]
    named = re.search(rf"\b{re.escape(name.rstrip('s'))}", what) is not None
    texts = (re.escape(str(value)) for value in values if value != "")
    return named + any(re.search(rf"(?<![\w.]){text}(?!\w)", what) for text in texts)


# --- values --------------------------------------------------------------------------------------


def _key(value: Any) -> Any:
    """Something hashable that is equal where two values are the same to an experiment."""
    if isinstance(value, list):
        return tuple(map(_key, value))
    return (type(value), str(value)) if isinstance(value, bool | dict) else value


def _keys(values: Iterable[Any]) -> list[Any]:
    return [_key(value) for value in values]


def _distinct(values: list[Any]) -> list[Any]:
    return list({_key(value): value for value in reversed(values)}.values())[::-1]


def _repeated(values: list[Any]) -> Iterator[tuple[int, int]]:
    """Index of the first and of a later one, for each value that stands there again."""
    first: dict[Any, int] = {}
    for at, value in enumerate(values):
        if (i := first.setdefault(_key(value), at)) != at:
            yield i, at


def _matches(params: dict[str, Any], pattern: dict[str, Any]) -> bool:
    return all(_key(params[name]) == _key(value) for name, value in pattern.items())


def _axis(document: lines.Document, name: str) -> tuple[str, ...]:
    """The path of an axis in its file."""
    return ("grid", name) if document.has("grid", name) else ("seeds",)


def _dotted(where: tuple[str | int, ...], name: str) -> str:
    return f"{where[0]}.{shown(name)}"


def _listed(values: list[Any]) -> str:
    some = ", ".join(shown(value) for value in values[:12])
    return some + (f" and {len(values) - 12} more" if len(values) > 12 else "")
