"""Grids: from YAML files to a checked list of points. Nothing here runs anything.

Every mistake is found before a kernel starts and reported with its line, all at once. Papermill
itself only warns about a misspelt parameter and runs the default under the wrong label.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specexp.errors import UserError, first_line, meant
from specexp.grids import grid_file, identity, paths, yaml_lines
from specexp.grids.grid_file import MAX_POINTS, Grid, Report, canonical, listed
from specexp.grids.identity import Identity
from specexp.grids.notebooks import shown
from specexp.measure import parameters
from specexp.measure.parameters import Problem, mentioned
from specexp.tracking import mlflow_view, results
from specexp.zoo.known import Kernels, Known

TIMEOUT_S = 900.0
MANY = 1_000  # more points than this need a confirmation


@dataclass(frozen=True, slots=True)
class Point:
    """One notebook run. `name`: what tells it from the grid's others; `label`: the same in lines
    of progress, each value as `--only` takes it, or without its middle if it is long; `files`: the
    grid's, and those of others, loaded with it, that have the same point; `params`: every
    parameter, defaults included; `run_key`: its `identity` as one digest; `timed`: it measures
    time, so no other point should run beside it."""

    name: str
    label: str
    files: tuple[Path, ...]
    notebook: Path
    experiment: str
    params: dict[str, Any] = field(hash=False)
    timeout_s: float
    identity: Identity = field(hash=False)
    run_key: str
    timed: bool

    @property
    def file(self) -> Path:
        return self.files[0]

    @property
    def grid(self) -> str:
        return self.file.stem

    @property
    def device(self) -> str:
        """The device that it names: `auto`, `cpu`, `cuda` or `cuda:1`."""
        return str(self.params.get("device", "auto"))

    @property
    def result(self) -> Path:
        """The folder of its result, if it has one."""
        return results.result_of(self.run_key)

    @property
    def together(self) -> bool:
        """Whether points run beside it although it measures time."""
        return self.identity.parts.get("together") == "yes"

    @property
    def alone(self) -> bool:
        """Whether it needs a machine to itself."""
        return self.timed and not self.together

    @property
    def tags(self) -> dict[str, str]:
        """What a run says of its grid."""
        return {
            "run_key": self.run_key,
            "grid": self.grid,
            "grid.file": results.from_root(self.file) or str(self.file),
            "name": self.name,
            "notebook": self.notebook.name,
            "together": "yes" if self.together else "no",
            "mlflow.source.name": results.from_root(self.notebook) or self.notebook.name,
            "mlflow.source.type": "NOTEBOOK",
        }


def load(
    paths: Sequence[Path | str], ask: Callable[[int], bool] | None = None,
    only: Sequence[str] = (), together: bool = False, checked: bool = True, on_disk: bool = False,
    kernels: Kernels = "compiled",
) -> list[Point]:  # fmt: skip
    """The distinct points of these files, in their order.

    `ask` is called with the number of points if there are more than MANY, and returns whether to
    go on. `only`: filters such as "gamma=3" or "drafter=ngram,sibling-3m"; a point must match all.
    `together`: points that measure time may run side by side, which is another experiment.
    `checked`: False trusts what models, drafters and prompts are, so that none is read.
    `on_disk`: facts that were found out before are taken from the user's cache (`Known`).
    `kernels`: "as found" waits for no compiler, so keys may name kernels `identity.UNCOMPILED`;
    "not asked" leaves out what runs the points, so keys are no results'.
    Raises one UserError that lists every problem as `FILE:LINE: problem`.
    """
    report = Report(list(map(Path, paths)))
    grids = [grid for path in report.files if (grid := grid_file.read(path, report))]
    grids = _filtered(grids, only, report)
    _ask(grids, ask, report)
    points: dict[str, Point] = {}
    known: dict[Path, Known] = defaultdict(lambda: Known(on_disk, kernels))
    if sum(grid.size for grid in grids) <= MANY or not report.problems:
        for grid in grids:
            here = known[grid.notebook.path.parent]  # relative paths start from there
            for point in _points(grid, here, together, checked, report):
                first = points.setdefault(point.run_key, point)
                if point.file not in first.files:
                    points[point.run_key] = replace(first, files=(*first.files, point.file))
    report.refuse()
    return list(points.values())


def _points(
    grid: Grid, known: Known, together: bool, checked: bool, report: Report
) -> Iterator[Point]:
    """The points of a grid up to the first with a problem; all of them are checked."""
    path, varying, folder = grid.notebook.path, grid.varying, grid.path.resolve().parent
    among = {} if grid.wrong else {name: grid.values(name) for name in varying}
    wrong: dict[str, set[int]] = {}  # the problems, each with the lines of the values to change
    good: dict[str, Identity] = {}  # of points that differ in nothing but their seeds
    for written, entry in grid.combinations():
        with contextlib.chdir(path.parent):  # where its kernel will run
            params, problems = _moved(grid, folder, written, entry)
            rest = repr(params | {"seed": None})
            if found := good.get(rest):
                seed = {name: params[name] for name in params.keys() & {"seed"}}
                problems += parameters.problems_of_values(seed)
            else:
                further, found = _checked(grid, params, known, together, checked)
                for problem in further:
                    what = paths.as_written(problem.what, params, path.parent, folder)
                    problems.append(replace(problem, what=what))
        for problem in problems:
            lines_of = (grid.where(n, written, entry, problem.what) for n in problem.names)
            line = next(filter(None, lines_of), grid.line)
            what = problem.what + _default(grid, problem, written, entry)
            wrong.setdefault(what, set()).add(line)
        if not found:
            continue
        good[rest] = found
        if not wrong:
            found = replace(found, parts=found.parts | {"params": identity.digest(params)})
            key, name = identity.digest(found.parts), mlflow_view.run_name(written, varying, among)
            spec, file = grid.document.value, grid.path.parent.resolve() / grid.path.name
            first = grid.path.stem if len(report.files) > 1 else path.stem
            label = " ".join([first, *(f"{n}={shown(written[n])}" for n in varying)])
            yield Point(
                name or path.stem, label, (file,), path, spec.get("experiment") or path.stem,
                params, float(spec.get("timeout_s") or TIMEOUT_S), found, key, grid.notebook.timed,
            )  # fmt: skip
    for what, numbers in wrong.items():
        for line in numbers:
            report.add(grid.path, line, what)


def _default(grid: Grid, problem: Problem, written: dict[str, Any], entry: int | None) -> str:
    """Which drafter that the notebook, not the grid file, names a problem is about."""
    for name in problem.names:
        if name not in ("drafter", "rivals") or grid.where(name, written, entry):
            continue
        for value in parameters.values(written, name):
            if mentioned(value, problem.what):
                return f" ({value} is the notebook's default: set {name} in this file)"
    return ""


# --- which, and how many -------------------------------------------------------------------------


def _filtered(grids: list[Grid], only: Sequence[str], report: Report) -> list[Grid]:
    """The grids, restricted to the points that match every filter of `only`; all of them if one of
    these is wrong. What a grid leaves out may be what a filter asks for."""
    every, before = grids, len(report.problems)
    read = len(grids) == len(report.files) and all(grid.notebook.digest for grid in grids)

    def wrong(text: str, what: str) -> None:
        report.add(None, None, f"--only {text!r:.80}: {what}")

    for text in only:
        name, _, choice = (part.strip() for part in text.partition("="))
        having = [grid for grid in grids if name in grid.notebook.parameters]
        names = list(dict.fromkeys(n for s in grids for n in s.notebook.parameters))
        if not name or not choice:
            wrong(text, "write NAME=VALUE or NAME=VALUE,VALUE")
        elif not having:
            if read:
                wrong(text, f"there is no parameter {name!r:.60}{_near(name, names)}")
        elif all(name in grid.base for grid in having):
            values = grid_file.distinct([value for grid in having for value in grid.values(name)])
            parts = _parts(choice, values)
            for part in parts:
                if not any(_means(part, value) for value in values):
                    wrong(text, f"no point has {name} {shown(part)}{_near(part, values)}")
            chosen = [canonical(v) for v in values if any(_means(part, v) for part in parts)]
            grids = [_restricted(grid, name, chosen) for grid in having]
    left = (grid.size > MAX_POINTS or next(grid.combinations(), None) for grid in grids)
    sure = only and len(report.problems) == before and all(grid.whole for grid in grids)
    if sure and not any(left):
        wrong(" ".join(only), "no point matches all of these")
    return grids if len(report.problems) == before else every


def _near(text: str, candidates: list[Any]) -> str:
    return meant(text, map(str, candidates), f"; choose from {listed(candidates)}")


def _parts(text: str, values: list[Any]) -> list[str]:
    """What a filter asks for: its whole text if that is a value or lists are, else what commas
    separate."""
    if any(isinstance(value, list) or _means(text, value) for value in values):
        return [text]
    return [part.strip().strip("\"'") for part in re.findall(r"\"[^\"]*\"|'[^']*'|[^,]+", text)]


def _means(text: str, value: Any) -> bool:
    """Whether a text stands for a value as YAML reads it, quotes and brackets left out or not."""
    if isinstance(value, list):
        return _bare(text) == _bare(",".join(map(str, value)))
    if isinstance(value, str):
        return text.strip("\"'") == value
    with contextlib.suppress(UserError, ValueError):
        read = yaml_lines.scalar(text)
        read = float(read) if isinstance(value, float) and isinstance(read, str) else read
        return bool(canonical(read) == canonical(value))
    return False


def _bare(text: str) -> str:
    """The text of a list without its brackets, quotes and blanks."""
    return re.sub(r"[\s'\"]", "", text).strip("[]")


def _restricted(grid: Grid, name: str, choices: list[Any]) -> Grid:
    """The grid, restricted to the points that have one of these values of a parameter."""
    include = {
        i: entry
        for i, entry in grid.include.items()
        if canonical(entry.get(name, grid.base[name])) in choices
    }
    if name in grid.axes:
        values = [value for value in grid.axes[name] if canonical(value) in choices]
        return replace(grid, axes=grid.axes | {name: values}, include=include)
    product = grid.product and canonical(grid.base[name]) in choices
    return replace(grid, product=product, include=include)


def _ask(grids: list[Grid], ask: Callable[[int], bool] | None, report: Report) -> None:
    """Report grids of too many points, and more points than MANY without a confirmation."""
    for grid in grids:
        if grid.size > MAX_POINTS:
            points = f"{grid.size:,} points ({_sizes(grid)})"
            what = f"{points} are more than {MAX_POINTS:,}: split the grid"
            report.add(grid.path, grid.line, what)
    if report.problems or sum(grid.size for grid in grids) <= MANY:
        return
    n = sum(1 for grid in grids for _ in grid.combinations())
    if n > MANY and not (ask and ask(n)):
        sizes = "; ".join(map(_sizes, grids))
        what = f"{n:,} points ({sizes:.300}) are more than {MANY:,}: confirm them with --yes"
        report.add(None, None, what)


def _sizes(grid: Grid) -> str:
    axes = " x ".join(f"{name} {len(values)}" for name, values in grid.axes.items())
    return f"{grid.path.name}: {axes}"


# --- whether it can be built ---------------------------------------------------------------------


def _moved(
    grid: Grid, folder: Path, written: dict[str, Any], entry: int | None
) -> tuple[dict[str, Any], list[Problem]]:
    """A point's parameters, with the paths that its grid file, in this folder, sets as they are
    from the notebook's folder; and the problems of those, left out, that are no path from the grid
    file. `entry`: of `include`."""
    params, problems = dict(written), list[Problem]()
    for name in filter(paths.may_name, written):
        if grid.where(name, written, entry):
            try:
                params[name] = paths.moved(name, written[name], folder, grid.notebook.path.parent)
            except UserError as e:
                del params[name]
                problems.append(Problem(str(e), (name,)))
    return params, problems


def _checked(
    grid: Grid, params: dict[str, Any], known: Known, together: bool, checked: bool
) -> tuple[list[Problem], Identity | None]:
    """The problems of a point, those with its models only if it is to be `checked`; if there are
    none, its identity, unless something is wrong already or parameters are left out."""
    left_out = grid.notebook.parameters.keys() - params.keys()
    try:
        if grid.wrong or left_out:
            problems = parameters.problems_of(params, None, known, wrong=left_out)
            return problems if checked else [], None
        identity.files_of(params, grid.notebook, known)
        if checked and (problems := parameters.problems_of(params, None, known)):
            return problems, None
        return [], identity.identity_of(params, grid.notebook, known, together)
    except (UserError, OSError) as e:
        named = [name for name in params if name in parameters.PARAMETERS]
        what = first_line(e)
        return [Problem(what, parameters.by_mention(what, named, params))], None
    except Exception as e:  # a user's model files can raise anything
        at = " ".join(f"{name}={shown(params[name])}" for name in grid.varying)
        reason = f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
        return [Problem(f"cannot be checked at {at or 'all'}: {reason}")], None
