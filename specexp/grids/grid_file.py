"""A grid file, parsed and checked: each mistake with its line and the nearest valid name.

A `Grid` knows which points its file means and the line of each value. It does not know what the
values mean to models (`points`).
"""

import itertools
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specexp.errors import UserError, meant, nearest
from specexp.grids import notebooks, yaml_lines
from specexp.grids.notebooks import Notebook, Parameter, shown
from specexp.measure.parameters import PARAMETERS, mentioned
from specexp.tracking import redact
from specexp.tracking.results import ROOT

KEYS = ("notebook", "experiment", "fixed", "grid", "seeds", "exclude", "include", "timeout_s")
MAX_POINTS, MAX_PROBLEMS = 1_000_000, 200  # of one file; reported at once
Wrong = Callable[..., None]  # called with a message and the path of the value in the file


class Report:
    """Collects the problems of several files, to report them all at once."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        self.problems: list[tuple[Path | None, int | None, str]] = []

    def add(self, path: Path | None, line: int | None, what: str) -> None:
        self.problems.append((path, line, what))

    def refuse(self) -> None:
        """Raise a UserError with a line per problem, sorted by file and line, if there are any."""
        if not self.problems:
            return
        order = [None, *self.files]
        messages = dict[str, None]()  # each once, in this order
        for path, line, what in sorted(
            self.problems, key=lambda problem: (order.index(problem[0]), problem[1] or 0)
        ):
            place = "" if path is None else f"{path}: " if line is None else f"{path}:{line}: "
            message = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in place + what)
            messages[message] = None
        shown = [*messages][:MAX_PROBLEMS]
        if more := len(messages) - len(shown):
            shown.append(f"and {more:,} more problems")
        raise UserError("\n".join(shown))


@dataclass(frozen=True)
class Grid:
    """A grid file. Where values do not fit their parameters, or it is not sure which values these
    have, the parameters are left out, so that the others can be checked.

    `base`: every parameter of the notebook, at its fixed or default value; `axes`: those of `grid`,
    and the seeds; `include`, `exclude`: entries by their index in the file; `product`: whether the
    product of the axes is run, or only the `include` entries; `lines`: of each value of an axis;
    `wrong`: whether problems were reported, so that nothing will run.
    """

    path: Path
    document: yaml_lines.Document
    notebook: Notebook
    base: dict[str, Any]
    axes: dict[str, list[Any]]
    include: dict[int, dict[str, Any]]
    exclude: dict[int, dict[str, Any]]
    product: bool
    lines: dict[str, dict[Any, int]]
    wrong: bool = False

    @property
    def size(self) -> int:
        """The number of points before `exclude`."""
        axes = math.prod(map(len, self.axes.values())) if self.product else 0
        return axes + len(self.include)

    @property
    def whole(self) -> bool:
        """Whether no parameter is left out."""
        return len(self.base) == len(self.notebook.parameters)

    @property
    def line(self) -> int:
        keys = [key for key in ("grid", "seeds", "notebook") if self.document.has(key)]
        return self.document.line(*keys[:1])

    @property
    def varying(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self.axes, *(n for i in self.include.values() for n in i)]))

    def combinations(self) -> Iterator[tuple[dict[str, Any], int | None]]:
        """The parameters of every point, and the index of its `include` entry if it has one."""
        for values in itertools.product(*self.axes.values()) if self.product else ():
            params = self.base | dict(zip(self.axes, values, strict=True))
            if not any(_matches(params, entry) for entry in self.exclude.values()):
                yield params, None
        for index, entry in self.include.items():
            yield self.base | entry, index

    def values(self, name: str) -> list[Any]:
        """The distinct values of a parameter over all points."""
        of_product = self.axes.get(name, [self.base[name]]) if self.product else []
        of_include = (i.get(name, self.base[name]) for i in self.include.values())
        return distinct([*of_product, *of_include])

    def where(
        self, name: str, params: dict[str, Any], index: int | None, what: str = ""
    ) -> int | None:
        """The line that sets a parameter of a point, or the item of its list that the message
        `what` is about; None if it has its default."""
        if name in self.axes and index is None:
            return self.lines[name][canonical(params[name])]
        own = index is not None and name in self.include[index]
        path: tuple[str | int, ...] = ("include", index or 0, name) if own else ("fixed", name)
        items = params[name] if isinstance(params[name], list) else []
        about = [i for i, item in enumerate(items) if mentioned(item, what)]
        return self.document.line(*path, *about[:1]) if self.document.has(*path) else None


def read(path: Path, report: Report) -> Grid | None:
    """Read a grid file. Problems go to the report; None if they hide which values it means."""
    before = len(report.problems)
    try:
        document = yaml_lines.read(path)
    except UserError as e:
        report.add(path, None, str(e))
        return None
    for line, what in document.problems:
        report.add(path, line, what)

    def wrong(what: str, *where: str | int) -> None:
        report.add(path, document.line(*where), what)

    spec = document.value
    if not isinstance(spec, dict):
        if not document.problems:
            kind = "is empty" if spec is None else "is not a mapping"
            wrong(f"{kind}: a grid file is a mapping with the keys {', '.join(KEYS)}")
        return None
    sections = _well_formed(spec, wrong)
    well_formed = len(report.problems) == before
    _check_texts(spec, wrong)
    try:
        notebook = notebooks.read(_find(path, spec.get("notebook")))
    except UserError as e:
        for problem in str(e).splitlines():
            wrong(problem, "notebook")
        notebook = notebooks.unread(path.resolve(), _named(sections))
        well_formed = False
    grid = _with_checked_values(path, document, notebook, sections, wrong)
    if well_formed:
        _check_points(grid, wrong)
    else:  # a parameter that seems to have its default may have been meant to have another value
        written = {name: value for name, value in grid.base.items() if name in sections["fixed"]}
        grid = replace(grid, base=written)
    return replace(grid, wrong=len(report.problems) > before)


def _check_texts(spec: dict[str, Any], wrong: Wrong) -> None:
    """Check `experiment` and `timeout_s`."""
    title = spec.get("experiment")
    fits = title is None or (isinstance(title, str) and re.fullmatch(r"\w[\w .-]{0,79}", title))
    if not fits or notebooks.value_problem(title or ""):
        what = "experiment must be a name of up to 80 letters, digits, spaces, dots and dashes"
        read = "" if isinstance(title, str) else f"; YAML reads {title!r:.40}: put it in quotes"
        wrong(what + read, "experiment")
    timeout = spec.get("timeout_s")
    if timeout is not None and (type(timeout) not in (int, float) or not 0 < timeout < 1e9):
        wrong("timeout_s must be a number of seconds above 0 and below 1.0e+9", "timeout_s")


def _well_formed(spec: dict[str, Any], wrong: Wrong) -> dict[str, Any]:
    """`fixed`, `grid`, `include`, `exclude` and `seeds`, as far as they are well-formed."""
    strange = [name for name in spec if name not in KEYS]
    for name in strange:
        keys = KEYS if len(strange) <= MAX_PROBLEMS else ()
        hint = meant(name, keys, f"; the keys are {', '.join(KEYS)}")
        wrong(f"unknown key {name!r:.60}{hint}", name)
    good: dict[str, Any] = {}
    for name in ("fixed", "grid"):
        value = spec.get(name)
        good[name] = value if isinstance(value, dict) else {}
        if name == "grid" and name in spec and not value:
            wrong("grid is empty: give it an axis such as `gamma: [2, 4]`, or leave it out", name)
        elif not isinstance(value, dict | None):
            wrong(f"{name} must be a mapping from parameter names to values", name)
    for name in ("include", "exclude"):
        value = spec.get(name)
        entries = value if isinstance(value, list) else []
        odd = [i for i, entry in enumerate(entries) if not isinstance(entry, dict) or not entry]
        what = f"{name} must be a list of mappings from parameter names to values"
        if not isinstance(value, list | None):
            wrong(what, name)
        for i in odd:
            wrong(what, name, i)
        good[name] = {i: entry for i, entry in enumerate(entries) if i not in odd}
    if isinstance(spec.get("seeds"), list) and spec["seeds"]:
        good["seeds"] = spec["seeds"]
    elif "seeds" in spec:
        wrong("seeds must be a list of whole numbers of 0 or more", "seeds")
    return good


def _named(sections: dict[str, Any]) -> set[str]:
    """The names of all parameters in a file."""
    entries = (*sections["include"].values(), *sections["exclude"].values())
    return {name for part in (sections["fixed"], sections["grid"], *entries) for name in part}


def _find(grid_file: Path, named: Any) -> Path:
    """The notebook that a grid names. A notebook is code, so its resolved path must be in this
    repository or below the parent of the grid file's folder."""
    if not isinstance(named, str) or not named.strip():
        raise UserError("notebook must name the notebook to run, as in ../10_acceptance.ipynb")
    folder = grid_file.resolve().parent
    above = folder.parent if folder.parent != folder.parent.parent else folder
    outside = None
    for base in (folder, ROOT):
        try:
            path = (base / named).resolve()
            is_notebook = path.is_file() and path.suffix == ".ipynb"
        except (OSError, ValueError, RuntimeError):
            continue
        if is_notebook and any(path.is_relative_to(root) for root in (above, ROOT)):
            return path
        outside = outside or (path if is_notebook else None)
    if outside:
        raise UserError(
            f"notebook {named!r:.80} is outside {above} and {ROOT}: a notebook is code, so only "
            "those in these folders are run"
        )
    homes = (f.glob("*.ipynb") for f in (folder, folder.parent, ROOT / "notebooks"))
    beside = [p for found in homes for p in sorted(itertools.islice(found, 1000))]
    bases = folder, ROOT
    written = {
        p.name: min((os.path.relpath(p, b) for b in bases), key=len) for p in reversed(beside)
    }
    near = nearest(named.rpartition("/")[2], written)
    hint = f"; did you mean {written[near]!r}?" if near else ""
    raise UserError(f"notebook {named!r:.80} does not exist or is not an .ipynb file{hint}")


def _with_checked_values(
    path: Path, document: yaml_lines.Document, notebook: Notebook, sections: dict[str, Any],
    wrong: Wrong,
) -> Grid:  # fmt: skip
    """Check every value against its parameter."""
    parameters = notebook.parameters
    hints = len(_named(sections) - parameters.keys()) <= MAX_PROBLEMS
    left_out = set[str]()

    def refuse(problem: str, name: str, *where: str | int) -> None:
        wrong(f"{where[0]}.{shown(name)} {problem}", *where)
        near = nearest(str(name), parameters) if hints else None
        left_out.update((name, near or name))

    def checked(name: str, value: Any, *where: str | int) -> Any:
        """The coerced value, or the value itself if it has a problem, which is reported."""
        problem = _name_problem(parameters, name, hints)
        problem = redact.REFUSED if redact.is_secret(name, value) else problem
        if problem := problem or parameters[name].problem(value):
            about = f" ({name}: {PARAMETERS[name].help})" if name in PARAMETERS else ""
            refuse(f"{problem}{about}", name, *where)
        return value if problem else parameters[name].coerced(value)

    fixed = {n: checked(n, v, "fixed", n) for n, v in sections["fixed"].items()}
    axes: dict[str, list[Any]] = {}
    for name, values in sections["grid"].items():
        if problem := _name_problem(parameters, name, hints):
            refuse(problem, name, "grid", name)
        elif not isinstance(values, list) or not values:
            refuse("must be a list of at least one value", name, "grid", name)
        else:
            axes[name] = [checked(name, v, "grid", name, i) for i, v in enumerate(values)]
    if "seeds" in sections:
        problem = ""
        if "seed" not in parameters or parameters["seed"].kind is not int:
            none = f"{notebook.path.name} has no parameter `seed: int`"
            problem = f"seeds: {none}, so every seed would be the same point"
        elif "seed" in axes:
            problem = "seeds: `grid` has an axis seed already; remove one of them"
        if problem:
            wrong(problem, "seeds")
            left_out.add("seed")
        else:
            each = enumerate(sections["seeds"])
            axes["seed"] = [checked("seed", seed, "seeds", i) for i, seed in each]
    lines: dict[str, dict[Any, int]] = {}
    for name, values in axes.items():
        where, lines[name] = _axis(document, name), {}
        for i, value in enumerate(values):
            if first := lines[name].get(canonical(value)):
                what = f"{'.'.join(where)}: {shown(value)} appears twice"
                wrong(f"{what}, first on line {first}", *where, i)
            else:
                lines[name][canonical(value)] = document.line(*where, i)
        if name in fixed:
            first = document.line("fixed", name)
            wrong(f"{name} is both in `fixed` (line {first}) and in `{where[0]}`", *where)
    include, exclude = (
        {
            i: {n: checked(n, v, name, i, n) for n, v in entry.items()}
            for i, entry in sections[name].items()
        }
        for name in ("include", "exclude")
    )
    base = {name: p.default for name, p in parameters.items()} | fixed
    spec = document.value
    product = bool(spec.get("grid") or spec.get("seeds") or not spec.get("include"))

    def sound(entry: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in entry.items() if name not in left_out}

    return Grid(
        path, document, notebook, sound(base), sound(axes),
        {i: sound(entry) for i, entry in include.items()},
        exclude, product, lines,
    )  # fmt: skip


def _check_points(grid: Grid, wrong: Wrong) -> None:
    """Check the values together: unread axes, `exclude` and `include`."""
    for name in grid.varying:
        if grid.notebook.reads is not None and name not in grid.notebook.reads:
            entry = next((i for i, entry in grid.include.items() if name in entry), 0)
            on_axis = name in grid.axes
            wrong(
                f"{name} is read by no cell of {grid.notebook.path.name}: its points would all be "
                "the same experiment",
                *(_axis(grid.document, name) if on_axis else ("include", entry, name)),
            )
    if grid.exclude and not grid.product:
        wrong("exclude removes points of `grid` and `seeds`, and this file has neither", "exclude")
    axes = {name: set(map(canonical, values)) for name, values in grid.axes.items()}
    domains = {name: {canonical(value)} for name, value in grid.base.items()} | axes
    _check_exclude(grid, domains, wrong)
    _check_include(grid, domains, wrong)


def _check_exclude(grid: Grid, domains: dict[str, set[Any]], wrong: Wrong) -> None:
    for i, entry in grid.exclude.items() if grid.product else ():
        absent = (n for n in entry if n in domains and canonical(entry[n]) not in domains[n])
        if name := next(absent, None):
            only = listed(grid.axes.get(name, [grid.base[name]]))
            never = f"{name} is never {shown(entry[name])}; its values are {only}"
            wrong(f"exclude matches no point: {never}", "exclude", i, name)
    few = grid.whole and grid.size <= MAX_POINTS
    if grid.exclude and few and next(grid.combinations(), None) is None:
        wrong("exclude removes every point: nothing would run", "exclude")


def _check_include(grid: Grid, domains: dict[str, set[Any]], wrong: Wrong) -> None:
    first: dict[Any, int] = {}
    product = grid.product and grid.whole
    for i, entry in grid.include.items():
        if len(entry) < len(grid.document.value["include"][i]):
            continue  # some of it was left out
        params = grid.base | entry
        of_grid = product and all(canonical(v) in domains[name] for name, v in params.items())
        of_grid = of_grid and not any(_matches(params, e) for e in grid.exclude.values())
        earlier = first.setdefault(tuple(map(canonical, params.values())), i)
        if earlier != i:
            line = grid.document.line("include", earlier)
            wrong(f"include repeats the point of line {line}", "include", i)
        elif of_grid:
            wrong(f"include repeats a point of the grid (line {grid.line})", "include", i)


def _name_problem(parameters: dict[str, Parameter], name: str, hints: bool) -> str | None:
    if not notebooks.is_name(name):
        return "is not a parameter name"
    if name in parameters:
        return None
    # one that other notebooks have is misspelt only as gamma is of gammas
    one = [p for p in parameters if p.startswith(name) or name.startswith(p)]
    hint = meant(name, (one if name in PARAMETERS else parameters) if hints else [])
    if redact.NAME.search(name) and not hint:
        return redact.REFUSED
    choices = f"; choose from {', '.join(parameters)}"
    return f"is not a parameter of the notebook{hint or choices}"


# --- values --------------------------------------------------------------------------------------


def canonical(value: Any) -> Any:
    """A hashable key, equal for values that mean the same to an experiment."""
    if isinstance(value, list):
        return tuple(map(canonical, value))
    return (type(value), str(value)) if isinstance(value, bool | dict) else value


def distinct(values: list[Any]) -> list[Any]:
    return list({canonical(value): value for value in reversed(values)}.values())[::-1]


def _matches(params: dict[str, Any], pattern: dict[str, Any]) -> bool:
    """Whether parameters have these values; those that are left out may have them."""
    shared = params.keys() & pattern.keys()
    return bool(shared) and all(canonical(params[n]) == canonical(pattern[n]) for n in shared)


def _axis(document: yaml_lines.Document, name: str) -> tuple[str, ...]:
    """The path of an axis in its file."""
    return ("grid", name) if document.has("grid", name) else ("seeds",)


def listed(values: list[Any]) -> str:
    some = ", ".join(shown(value) for value in values[:12])
    return some + (f" and {len(values) - 12} more" if len(values) > 12 else "")
