"""`specexp grid`: check and run grids of experiment notebooks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from specexp.commands.options import Command, Group, console, own, say
from specexp.errors import UserError, counted

if TYPE_CHECKING:
    from specexp.grids.points import Point
    from specexp.zoo.known import Kernels

app = typer.Typer(cls=Group, help="Run grids of experiment notebooks.", no_args_is_help=True)
FILES = typer.Argument(help="Grid files (YAML).", metavar="FILE")
ONLY = own("Only points with these values, such as gamma=3 or drafter=ngram,suffix; repeatable.")
YES = own("Do not ask for confirmation of very many points.", False)


def _points(
    files: list[Path], only: list[str] | None, yes: bool, together: bool = False,
    checked: bool = True, kernels: Kernels = "not asked",
) -> list[Point]:  # fmt: skip
    """The points of grid files; at a terminal, very many need a confirmation."""
    from specexp.grids import points as grid

    def ask(count: int) -> bool:
        return yes or typer.confirm(f"{count:,} points: is that intended?")

    asking = ask if yes or sys.stdin.isatty() else None
    return grid.load(files, asking, only or (), together, checked, on_disk=True, kernels=kernels)


@app.command("validate", cls=Command)
def validate(files: list[Path] = FILES, only: list[str] | None = ONLY, yes: bool = YES) -> None:
    """Check grid files completely, without running anything."""
    points = _points(files, only, yes)
    say(f"{counted(len(points), 'point')} in {counted(len(files), 'file')}: ready to run")


@app.command("run", cls=Command)
def run(
    files: list[Path] = FILES,
    only: list[str] | None = ONLY,
    jobs: int | None = own(
        "Points to run at once; points that measure time still get a machine to "
        "themselves. Default: 1 here, what fits on Ray."
    ),
    on: str = own(
        "Where to run: here; ray (all CPUs and GPUs of this machine); or a Ray cluster as "
        "HOST:6379, ray://HOST:10001 or auto (the one running here).",
        "here",
    ),
    together: bool = own(
        "Run timed points side by side too. Their timings are rough and count as other results.",
        False,
    ),
    retry_failed: bool = own("Run failed points again.", False),
    retry_doubtful: bool = own(
        "Run points of doubtful timings again; old results are kept.", False
    ),
    force: bool = own("Run finished points again; old results are kept.", False),
    fresh: bool = own("Start every kernel from scratch instead of forking (slower).", False),
    yes: bool = YES,
) -> None:
    """Run every point that has not finished yet.

    Ctrl-C stops the run without losing finished points; the same command resumes it. Exit code:
    0 all done, 1 some failed, 2 bad input, 3 store busy, 4 store damaged, 5 disk full.
    """
    from specexp.grids import runner

    if jobs is not None and jobs < 1:
        raise UserError(f"--jobs is {jobs}; it must be 1 or more")
    points = _points(files, only, yes, together, kernels="compiled")
    machines = None
    if on != "here":
        from specexp.grids.machines.ray import OnRay

        machines = OnRay(points, on, forked=not fresh, say=say)
    code = runner.run(
        points, console, machines=machines, jobs=jobs, retry_failed=retry_failed,
        retry_doubtful=retry_doubtful, force=force, forked=not fresh, only=only or (),
    )  # fmt: skip
    raise typer.Exit(code)


@app.command("status", cls=Command)
def status(
    files: list[Path] = FILES,
    only: list[str] | None = ONLY,
    together: bool = own("Show the results of `grid run --together`.", False),
    yes: bool = YES,
) -> None:
    """Show which points are done, running, failed or to run, and an estimate of the time left.

    It does not check that points can be built; `validate` and `run` do.
    """
    from specexp.grids import progress
    from specexp.tracking import presence, results, runs

    ran = any(map(results.listed, ("grids", "results", "failed")))
    kernels: Kernels = "as found" if ran else "not asked"
    points = _points(files, only, yes, together, checked=False, kernels=kernels)
    done, remedy = [], ""
    if ran:
        from specexp.tracking import report

        done = report.newest(filter(results.intact, (p.result for p in points)))
        remedy = report.remedy(done)
    console.print(progress.status(points, done))
    lines = [*progress.explain_reruns(points), *[remedy] * bool(remedy)]
    try:
        lines += presence.find_gaps(progress.shown_as(points)).lines("`specexp grid run`")
    except (runs.StoreUnreachable, runs.StoreCorrupt) as e:
        lines.append(f"MLflow cannot be read now: {e}")
    for line in lines:
        say(line)
