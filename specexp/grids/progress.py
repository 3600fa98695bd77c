"""How far a grid is: what became of its points, and the display. It loads nothing that runs one."""

from __future__ import annotations

import json
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from rich import progress as bars
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from specexp.errors import counted
from specexp.grids import identity
from specexp.grids.points import Point
from specexp.terminal import ROWS, harmless, listing
from specexp.tracking import presence, redact, results, runs

if TYPE_CHECKING:
    from specexp.tracking import report

ERROR = "error.txt"  # in the folder of a failed attempt
REMOVED = "the notebook removed its attempt folder, where its result belongs"
RETRIED = ("interrupted", "disk", "lost")  # failures not of the point's making: always run again
STATES = {"done": "green", "running": "cyan", "failed": "red", "to do": ""}
ENDS = {"done": "green", "failed": "red", "stopped": "yellow", "kept": "yellow"}


class Failure(Exception):
    """A point did not succeed. `kind`: error, timeout, kernel-died, oom, invalid-result, disk,
    lost (its machine failed or cannot be reached) or interrupted. Its message holds no secret."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(redact.hide(message))
        self.kind = kind


def failure_of(e: OSError, folder: Path) -> Failure:
    """`disk` if it is full, else `lost`: the machine's fault, not the point's."""
    if e.errno in results.FULL:
        return Failure("disk", f"{e.strerror}: {e.filename or folder}")
    return Failure("lost", str(e))


def set_aside(attempt: Path, failure: Failure) -> Path:
    """Move a failed attempt to `failed/`, with its error and the tags of its MLflow run."""
    results.only_files(attempt)
    message = harmless(str(failure))
    trace = "" if failure.__cause__ is None else redact.hide("".join(
        traceback.format_exception(failure.__cause__)
    ))  # fmt: skip
    (attempt / ERROR).write_text(f"{failure.kind}: {message}\n\n{harmless(trace)}")
    record = results.read(attempt / results.POINT)
    if record:
        tags = record["tags"] | {
            "attempt": attempt.name, "error": message.splitlines()[0][:500],
            "error.kind": failure.kind,
            "status": "KILLED" if failure.kind == "interrupted" else "FAILED",
            "ended": results.now_ms(),
        }  # fmt: skip
        (attempt / results.TAGS).write_text(json.dumps(tags))
    return results.set_aside(attempt, "failed")


class Board:
    """Thread-safe display of `total` points: a line for each that ended, a row while one runs."""

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total, self.done, self.failed = console, total, 0, 0
        self._notes: set[str] = set()  # since the last point that ended
        self._lock = threading.RLock()
        self._running: dict[str, tuple[float, bars.TaskID]] = {}  # run_key -> its begin and row
        self._rows = bars.Progress(
            bars.TextColumn("{task.description}", markup=False), bars.BarColumn(12),
            bars.TimeElapsedColumn(), bars.TimeRemainingColumn(),
            bars.TextColumn(
                "{task.fields[detail]}", "dim", markup=False,
                table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),  # what is left
            ),
            console=console, transient=True, expand=True, refresh_per_second=2,
            speed_estimate_period=3600, disable=not console.is_terminal,
        )  # fmt: skip
        self._whole = self._rows.add_task("", total=total, detail="")

    def __enter__(self) -> Board:
        self._rows.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._rows.stop()

    def start(self) -> None:
        """What has ended so far is of earlier runs: the time left is estimated from now on."""
        self._rows.reset(self._whole)
        self._count()

    def began(self, point: Point) -> Callable[[str], None]:
        """A point has started; returns a function to call with its progress."""
        row = self._rows.add_task(point.label, total=None, detail="starting")
        with self._lock:
            self._running[point.run_key] = time.monotonic(), row

        def watch(message: str) -> None:
            with self._lock:
                if point.run_key in self._running:
                    self._rows.update(row, detail=message)

        return watch

    def ended(self, point: Point, state: str, detail: str = "") -> None:
        """A point has ended; `state` is one of ENDS. The time is left out if it did not run."""
        with self._lock:
            took = f"{'':8s}"
            if point.run_key in self._running:
                begin, row = self._running.pop(point.run_key)
                self._rows.remove_task(row)
                took = f"{time.monotonic() - begin:6.1f} s"
            self._notes.clear()
            self.done += state in ("done", "kept")
            self.failed += state == "failed"
            self._count()
            line = Text(f"{state:9s}", ENDS[state]) + Text(f"{took}  {point.label}  ")
            self.console.print(line + Text(detail, "dim"), soft_wrap=True)

    def say(self, line: str, once: bool = False) -> None:
        """Print a message; with `once`, not if no point has ended since it was printed."""
        with self._lock:
            if not once or line not in self._notes:
                self.console.print(Text(line), soft_wrap=True)
            self._notes.add(line)

    def _count(self) -> None:
        counts = f"{self.done} done, {self.failed} failed of {self.total}"
        self._rows.update(self._whole, description=counts, completed=self.done + self.failed)


def status(points: Sequence[Point], done: Iterable[report.Run] = ()) -> Table:
    """One row per point: done (and why its timing is doubtful), running, failed (with its error) or
    to do (and why, if it has an earlier result); the totals as caption, with the time left if
    points of each notebook are done. Of more than ROWS points, those done without doubt have no
    row. done: the results of those done."""
    table = listing("state", "point", "run_key", "detail")
    failures, reasons = failures_of(points), reasons_to_run(points)
    doubts = {run.folder.name: f"doubtful: {'; '.join(run.doubts)}" for run in done if run.doubts}
    counts = dict.fromkeys(STATES, 0)
    took, left = defaultdict[str, list[float]](list), list[str]()
    for point in points:
        holder = results.holder(point.run_key)
        if point.result.exists():
            state, detail = "done", doubts.get(point.run_key, "")
            seconds = float(results.read(point.result / results.TAGS).get("seconds", 0))
            took[point.notebook.name].append(seconds)
        elif holder:
            state, detail = "running", holder
        elif point.run_key in failures:
            state, detail = "failed", failures[point.run_key]
        else:
            state, detail = "to do", reasons.get(point.run_key, "")
        counts[state] += 1
        left += [point.notebook.name] * (state in ("to do", "running"))
        if state == "done" and not detail and len(points) > ROWS:
            continue
        key = point.run_key if "device" in point.identity.parts else ""  # else it is no result's
        table.add_row(Text(state, STATES[state]), Text(point.label), key, Text(detail))
    doubtful = {"done": f", {len(doubts)} of these doubtful" * bool(doubts)}
    total = ", ".join(f"{n} {state}{doubtful.get(state, '')}" for state, n in counts.items() if n)
    if left and took.keys() >= set(left):
        seconds = sum(fmean(took[name]) for name in left) / max(1, counts["running"])
        total += f"; about {timedelta(seconds=round(seconds))} left"
    table.caption, table.caption_justify = total, "left"
    return table


def failures_of(points: Sequence[Point], ignoring: Collection[str] = ()) -> dict[str, str]:
    """run_key -> kind and message of each point's last failure, without the attempts `ignoring` and
    those that are torn; not of points that are to run again in any case, as it is one of RETRIED,
    or was a timeout and the point has more time now."""
    limits = {p.run_key: p.timeout_s for p in points}
    kept = [
        path
        for path in results.listed("failed")
        if results.key_of(path) in limits and path.name not in ignoring and runs.publishable(path)
    ]
    last = {results.key_of(path): path for path in sorted(kept, key=results.ended_ms)}
    failures = {}
    for key, path in last.items():
        tags = results.load(path / results.TAGS)
        had_s = results.load(path / results.POINT).get("timeout_s", 0.0)
        more_time = tags["error.kind"] == "timeout" and had_s < limits[key]
        if tags["error.kind"] not in RETRIED and not more_time:
            failures[key] = f"{tags['error.kind']}: {tags['error']}"
    return failures


def reasons_to_run(points: Iterable[Point]) -> dict[str, str]:
    """run_key -> why a point without a result does not use the one that another key has: which
    parts of its identity changed. Points that never ran are left out."""
    missing = [p for p in points if not p.result.exists()]
    waiting = {(p.notebook.name, p.identity.parts["params"]): p for p in missing}
    reasons: dict[str, tuple[int, str]] = {}
    for path in (results.root() / "results").glob(f"*/{results.POINT}") if waiting else ():
        record = results.read(path)
        before = record.get("identity", {})
        named = record.get("tags", {}).get("notebook", ""), before.get("params", "")
        if point := waiting.get(named):
            why = identity.why_new(point.identity.parts, before)
            reason = results.ended_ms(path.parent), why
            reasons[point.run_key] = max(reason, reasons.get(point.run_key, reason))
    return {key: reason for key, (_, reason) in reasons.items()}


def explain_reruns(points: Iterable[Point]) -> list[str]:
    """Why points that have a result under another key run again, a line for each reason."""
    counts = Counter(reasons_to_run(points).values())
    counts.pop(identity.UNSURE, None)
    kept = "to run again, old results are kept"
    return [f"{counted(n, 'point')} {kept}: {why}" for why, n in counts.items()]


def shown_as(points: Sequence[Point]) -> dict[Path, presence.ShownAs]:
    """Folder -> `presence.shown_as`, for the results and kept failures of these points."""
    keys = {p.run_key for p in points}
    kept = (path for path in results.listed("failed") if results.key_of(path) in keys)
    return {f: presence.shown_as(f) for f in (*(p.result for p in points), *kept)}
