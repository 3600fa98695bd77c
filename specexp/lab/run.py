"""Run the points of a grid, one after another, and lose nothing.

Each point is a notebook executed by papermill in a kernel of its own, in an attempt folder. What
papermill says of a run is not believed (a dead kernel's cells are marked completed, SystemExit
passes for success): a point is done when every cell was executed and the result it wrote is there,
complete, finite and of this very point. Then one rename commits it and it is published; a point
whose result is committed is never run again. A failing point is kept with its notebook, log and
error, and the others go on.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from specexp.lab import report, track
from specexp.lab.grid import Point

DONE, FAILED, BUSY, DISK_FULL, INTERRUPTED = 0, 1, 3, 5, 130
NOTEBOOK, POINT, ERROR = "notebook.ipynb", "point.json", "error.txt"


class Failure(Exception):
    """A point did not succeed. `kind`: error, timeout, kernel-died, invalid-result or disk."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def run(points: Sequence[Point], console: Console | None = None) -> int:
    """Run what is not done yet; returns the exit code (0 all done, 1 some failed, 3 store busy,
    5 disk full, 130 interrupted). Prints progress, then the comparison and where everything is."""
    console = console or Console()
    try:
        with track.locked():
            track.initialise()
            recover(points)
            code = _run_all(points, console)
    except track.StoreBusy as e:
        console.print(f"[bold red]busy[/]: {e}", highlight=False, soft_wrap=True)
        return BUSY
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(track.store()).free
        console.print(
            f"[bold red]disk full[/]: writing {e.filename or track.store()}, {free / 1e6:.0f} MB "
            "free; make room and run the same command again",
            soft_wrap=True,
        )
        return DISK_FULL
    except KeyboardInterrupt:
        console.print("[yellow]stopped[/]: finished points are kept; run again to go on")
        return INTERRUPTED
    report.show(console, {p.run_key for p in points})
    return code


def _run_all(points: Sequence[Point], console: Console) -> int:
    todo = [p for p in points if not is_done(p)]
    if len(todo) < len(points):
        console.print(f"{len(points) - len(todo)} of {len(points)} points are done already")
    failed = 0
    took: list[float] = []
    with _bar(console, len(points), len(points) - len(todo)) as (bar, task):
        for point in todo:
            bar.update(task, description=point.label, left=_left(took, len(todo)))
            begin = time.monotonic()
            try:
                result = attempt(point)
                state, detail = "[green]done[/]  ", report.headline(result)
            except Failure as e:
                failed += 1
                state, detail = "[red]failed[/]", f"{e.kind}: {e}".splitlines()[0]
            took.append(time.monotonic() - begin)
            bar.advance(task)
            console.print(
                f"{state} {took[-1]:5.1f} s  {point.label}  [dim]{detail}[/]", highlight=False
            )
        bar.update(task, description="finished", left="")
    return FAILED if failed else DONE


@contextlib.contextmanager
def _bar(console: Console, total: int, done: int) -> Iterator[tuple[Progress, Any]]:
    columns = (
        MofNCompleteColumn(), BarColumn(bar_width=24), TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"), TextColumn("{task.description}"),
    )  # fmt: skip
    with Progress(*columns, console=console, refresh_per_second=2) as bar:
        yield bar, bar.add_task("starting", total=total, completed=done, left="")


def _left(took: list[float], total: int) -> str:
    if not took:
        return ""
    seconds = int(sum(took) / len(took) * (total - len(took)))
    return f"about {seconds // 60}:{seconds % 60:02d} left"


def is_done(point: Point) -> bool:
    return track.intact(track.store() / "results" / point.run_key)


def attempt(point: Point) -> Path:
    """Run one point to a committed and published result. Raises Failure after recording it."""
    folder = track.new_attempt(point.run_key)
    (folder / POINT).write_text(json.dumps({
        "experiment": point.experiment, "params": point.params, "tags": tags_of(point),
    }))  # fmt: skip
    try:
        _execute(point, folder)
        _check(point, folder)
        _to_html(folder)
        result = track.commit(folder, point.run_key, tags_of(point))
    except Failure as e:
        _record_failure(folder, str(e), e.kind, "FAILED")
        raise
    except KeyboardInterrupt:
        kill_children()
        _record_failure(folder, "interrupted", "interrupted", "KILLED")
        raise
    publish(result)
    return result


def publish(result: Path) -> None:
    """Publish a committed result and remember that it is."""
    (result / "published").write_text(track.publish(result))


def recover(points: Sequence[Point]) -> None:
    """What an earlier run left behind: publish committed results, set aside broken attempts."""
    for point in points:
        result = track.store() / "results" / point.run_key
        if result.exists() and not track.intact(result):
            result.rename(_aside(f"{point.run_key}-damaged"))
        elif result.exists() and not (result / "published").exists():
            publish(result)
    attempts = track.store() / "attempts"
    for folder in attempts.iterdir() if attempts.exists() else ():
        _record_failure(folder, "the runner was killed", "interrupted", "KILLED")


def tags_of(point: Point) -> dict[str, str]:
    return {
        "run_key": point.run_key,
        "grid": point.grid,
        "name": point.label,
        "notebook": point.notebook.name,
        "notebook.digest": track.digest(point.notebook.read_bytes())[:16],
        "mlflow.source.name": f"notebooks/{point.notebook.name}",
        "mlflow.source.type": "NOTEBOOK",
    }


def _execute(point: Point, folder: Path) -> None:
    """papermill in this process, the kernel in its own; a watchdog ends it at the wall clock."""
    import papermill
    from jupyter_client.manager import AsyncKernelManager
    from nbclient.exceptions import DeadKernelError

    expired = threading.Event()

    def expire() -> None:
        expired.set()
        kill_children()

    watchdog = threading.Timer(point.timeout_s, expire)
    watchdog.start()
    try:
        with tempfile.TemporaryDirectory(prefix="specexp-") as private, _environment(
            SPECEXP_ATTEMPT=str(folder), SPECEXP_EXPERIMENT=point.experiment,
            MLFLOW_DISABLE_TELEMETRY="true", TOKENIZERS_PARALLELISM="false",
        ):  # fmt: skip
            sockets = {"ip": f"{private}/k", "connection_file": f"{private}/kernel.json"}
            papermill.execute_notebook(
                str(point.notebook), str(folder / NOTEBOOK), parameters=point.params,
                kernel_name="python3", progress_bar=False, cwd=str(point.notebook.parent),
                km=AsyncKernelManager(kernel_name="python3", transport="ipc", **sockets),
            )  # fmt: skip
    except papermill.PapermillExecutionError as e:
        raise Failure("error", f"{e.ename}: {e.evalue}") from e
    except Exception as e:
        if expired.is_set():
            raise Failure("timeout", f"took longer than {point.timeout_s:g} s") from e
        if isinstance(e, DeadKernelError):
            raise Failure("kernel-died", "the kernel died: out of memory, or a crash") from e
        if isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise Failure("error", f"{type(e).__name__}: {e}") from e
    finally:
        watchdog.cancel()
        kill_children()


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def kill_children() -> None:
    """End every process this one started: a kernel is a session of its own, with children."""
    children = psutil.Process().children(recursive=True)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, timeout=5)


def _check(point: Point, folder: Path) -> None:
    import nbformat

    notebook = nbformat.read(folder / NOTEBOOK, as_version=4)
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type == "code" and cell.source.strip() and cell.execution_count is None:
            raise Failure("invalid-result", f"cell {number} was never executed")
    try:
        record = json.loads((folder / track.RESULT).read_text())
    except FileNotFoundError:
        raise Failure("invalid-result", "the notebook logged nothing: call track.log") from None
    except ValueError:
        raise Failure("invalid-result", f"{track.RESULT} is not readable") from None
    problems = track.problems_of(record)
    if record["params"] != point.params:
        odd = [n for n in point.params if record["params"].get(n) != point.params[n]]
        odd += [n for n in record["params"] if n not in point.params]
        problems.append(f"it logged other parameters than it was given: {', '.join(odd)}")
    if problems:
        raise Failure("invalid-result", "; ".join(problems))


def _to_html(folder: Path) -> None:
    from nbconvert import HTMLExporter

    page, _ = HTMLExporter().from_filename(str(folder / NOTEBOOK))
    (folder / "notebook.html").write_text(page)


def _record_failure(folder: Path, message: str, kind: str, status: str) -> None:
    """Keep the attempt aside, whole, and show it in MLflow with its error."""
    (folder / ERROR).write_text(f"{message}\n\n{traceback.format_exc()}")
    with contextlib.suppress(Exception):
        _to_html(folder)
    aside = _aside(folder.name)
    folder.rename(aside)
    if (aside / POINT).exists():
        known = json.loads((aside / POINT).read_text())
        tags = known.pop("tags") | {"error": message.splitlines()[0][:500], "error.kind": kind}
        track.publish_failure(aside, known, tags, status)


def _aside(name: str) -> Path:
    folder = track.store() / "failed"
    folder.mkdir(exist_ok=True)
    return folder / name


def status(points: Sequence[Point]) -> Table:
    """One row a point: done, failed (with its error) or to do."""
    table = Table("state", "point", "run_key", "", box=None, header_style="bold")
    for point in points:
        failures = sorted((track.store() / "failed").glob(f"{point.run_key}-*/{ERROR}"))
        if is_done(point):
            table.add_row("[green]done[/]", point.label, point.run_key, "")
        elif failures:
            error = failures[-1].read_text().splitlines()[0]
            table.add_row("[red]failed[/]", point.label, point.run_key, error)
        else:
            table.add_row("to do", point.label, point.run_key, "")
    return table
