"""Run the points of a grid, crash-safe and resumable.

A point is claimed, executed in an attempt folder (`execute`), committed by one rename (`results`)
and published to MLflow (`runs`). A point that has a result never runs again, whichever runner made
it and however that runner ended. A failed point is kept with its notebook, log and error, and the
others go on. Several runners may share a store: each point is run by one of them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from specexp.errors import counted
from specexp.grids import identity, progress
from specexp.grids.points import Point
from specexp.grids.progress import Board, Failure, failure_of, failures_of
from specexp.terminal import Terminal
from specexp.tracking import compare, presence, rebuild, report, results, runs

if TYPE_CHECKING:
    from specexp.grids.machines import local

DONE, FAILED, BUSY, DAMAGED, DISK_FULL, INTERRUPTED, TERMINATED = 0, 1, 3, 4, 5, 130, 143
AWAY = "cannot be reached"
UNREACHABLE = "cannot publish to MLflow for now, points run all the same"
PATIENCE_S = 90.0
ROOM_PER_POINT = 2_000_000


def run(
    points: Sequence[Point], console: Terminal, *,
    machines: local.Machines | None = None, jobs: int | None = None, retry_failed: bool = False,
    retry_doubtful: bool = False, force: bool = False, forked: bool = True,
    only: Sequence[str] = (),
) -> int:  # fmt: skip
    """Run the points that have no result yet, print the comparison and write the report.

    machines: started if there is a point to run; by default this one, with kernels that are
    forked unless `forked` is false. jobs: points at once, by default what the machines have room
    for; `alone` ones have a machine to themselves. retry_failed: also run points that failed
    before; retry_doubtful: and those of doubtful timings; force: every point, even those with a
    result. only: the filters that chose them, which name their page. Returns 0 all done and
    published, 1 some failed or unpublished, 3 store busy, 4 store damaged, 5 disk full, 130 and 143
    stopped by a signal.
    """
    try:
        with Board(console, len(points)) as board:
            with results.claim_setup(lambda message: board.say(message, once=True)):
                try:
                    runs.initialise()
                except runs.StoreUnreachable as e:
                    board.say(f"{UNREACHABLE}: {e}", once=True)
                for file in dict.fromkeys(file for p in points for file in p.files):
                    results.remember(file, {p.run_key for p in points if file in p.files})
            work = Work(points, board, retry_failed, force, retry_doubtful)
            with _signals(work):
                work.compare_with_mlflow()
                work.recover()
                work.plan()
                for line in progress.explain_reruns(work.queue):
                    board.say(line)
                count = f"{len(work.queue)} of {len(points)} points to run"
                if not work.queue:
                    board.say(count)
                else:
                    from specexp.grids.machines import local  # what runs notebooks takes seconds

                    with machines or local.Here(points, forked) as where:
                        board.say(f"{count}, {where.how}")
                        work.run_queue(where, jobs)
                work.publish_rest()
        if work.stopped:
            return _error(console, "stopped", work.stopped[1], work.stopped[0])
        done = rebuild.accept(f for p in points if (f := p.result).exists())
        compare.show(console, report.frame(done))
        if remedy := report.remedy(done):
            console.print(Text(remedy), soft_wrap=True)
        rebuild.describe()
    except results.StoreBusy as e:
        return _error(console, "busy", str(e), BUSY)
    except runs.StoreCorrupt as e:
        return _error(console, "damaged", str(e), DAMAGED)
    except OSError as e:
        if e.errno in results.FULL:
            message = f"{e.strerror}: {e.filename or results.root()}, {_advice(force)}"
            return _error(console, "disk full", message, DISK_FULL)
        return _error(console, "error", f"{e}; {_resume(force)}", FAILED)
    except runs.StoreUnreachable as e:
        console.print(Text(f"MLflow's notes are not renewed: {e}"), soft_wrap=True)
    if board.failed:
        why = f"{results.root()}/failed/*/{progress.ERROR}; --retry-failed runs failed points again"
        console.print(Text(f"{'errors':10s} {why}"), soft_wrap=True)
    _report(points, done, console, only)
    return FAILED if board.failed or work.unpublished else DONE


@dataclass
class Work:
    """A grid being run: the queue of points, and what could not be published."""

    points: Sequence[Point]
    board: Board
    retry_failed: bool = False
    force: bool = False
    retry_doubtful: bool = False
    queue: deque[Point] = field(default_factory=deque)
    unpublished: dict[Path, str] = field(default_factory=dict)  # and why
    stopped: tuple[int, str] | None = None

    def __post_init__(self) -> None:
        self._stopping = threading.Event()
        self._publishing = threading.Lock()
        self._where: local.Machines | None = None
        self._timing_lock: Callable[[], contextlib.AbstractContextManager[bool]]
        self._away = False
        self._earlier: set[str] = set()  # names of failures and results of other runs
        self._again: set[str] = set()  # keys of points that run whatever result they have

    def plan(self) -> None:
        """Fill the queue. Raises OSError if the disk has too little space for its results."""
        self._earlier = {f.name for kind in ("failed", "results") for f in results.listed(kind)}
        failures = {} if self.retry_failed or self.force else failures_of(self.points)
        there = (p.result for p in self.points if self.retry_doubtful)
        done = report.newest(filter(Path.exists, there))
        self._again = {p.run_key for p in self.points if self.force}
        self._again |= {run.folder.name for run in done if run.doubts}
        for point in self.points:
            if point.run_key not in self._again and runs.published(point.result):
                self.board.done += 1
            elif point.result.exists() or point.run_key not in failures:
                self.queue.append(point)
            else:
                message = f"in an earlier run: {failures[point.run_key]}"
                self.board.ended(point, "failed", message)
        self.board.start()
        free, need = shutil.disk_usage(results.root()).free, len(self.queue) * ROOM_PER_POINT
        if free < need:
            message = f"too little space, {len(self.queue)} points may need {need / 1e6:.0f} MB"
            raise OSError(errno.ENOSPC, message, str(results.root()))

    def stop(self, code: int, why: str) -> None:
        """Start no more points and kill those that run. May be called at any time, repeatedly."""
        self.stopped = self.stopped or (code, why)
        self._stopping.set()
        if self._where:
            self._where.kill()

    def run_queue(self, where: local.Machines, jobs: int | None) -> None:
        """Run every point of the queue: first those that others may run beside."""
        self._where = where
        for alone in (False, True):
            queue = deque(p for p in self.queue if p.alone == alone)
            self._timing_lock = where.timing_lock if alone else lambda: contextlib.nullcontext(True)
            workers = min(where.at_once(jobs, alone), len(queue))
            with ThreadPoolExecutor(workers or 1, "point") as pool:
                each = [pool.submit(self._serve, queue, where, n) for n in range(workers)]
                while not all(f.done() for f in each):
                    time.sleep(0.05)
                    if self.stopped:  # a kernel may have started after `stop` killed the others
                        where.kill()
                for f in each:
                    f.result()

    def publish_rest(self) -> None:
        """Try once more to publish what MLflow could not take before."""
        self._away = False
        for kept in [folder for folder, why in self.unpublished.items() if why == AWAY]:
            with results.claim(results.key_of(kept)) as ours:
                if ours and not self._publish(kept):
                    return

    def _serve(self, queue: deque[Point], where: local.Machines, number: int) -> None:
        try:
            with where.worker(number) as worker:
                while not self._stopping.is_set():
                    try:
                        point = queue.popleft()
                    except IndexError:
                        return
                    if not self._take(point, worker):
                        queue.append(point)
                        self._stopping.wait(0.5)
        except BaseException:
            self.stop(FAILED, "an error in specexp itself")
            raise

    def _take(self, point: Point, worker: local.Execute) -> bool:
        """Run a point, or accept what another runner made of it. False if it must be taken again
        later: another runner has claimed it or is timing something."""
        key = point.run_key
        with results.claim(key) as ours:
            if not ours:
                who = results.holder(key) or "another runner"
                self.board.say(f"waiting for {point.label}, run by {who}", once=True)
                return False
            self._recover(key)
            others = failures_of([point], ignoring=self._earlier)
            if key not in self._again and point.result.exists():
                self._report_done(point, "by another runner" * (key not in self._earlier))
            elif key in others:
                self.board.ended(point, "failed", f"by another runner: {others[key]}")
            else:
                with self._timing_lock() as ours:
                    if ours:
                        self._attempt(point, worker)
                    else:
                        why = "it is timed, and another runner is timing"
                        self.board.say(f"waiting with {point.label}: {why}", once=True)
                    return ours
            return True

    def _report_done(self, point: Point, message: str) -> None:
        if runs.published(point.result):
            self.board.ended(point, "done", message)
        else:
            message = f"the result is safe, but MLflow {self.unpublished.get(point.result, AWAY)}"
            self.board.ended(point, "kept", message)

    def _attempt(self, point: Point, worker: local.Execute) -> None:
        attempt = results.new_attempt(point.run_key)
        begin = time.monotonic()
        watch = self.board.began(point)
        try:
            where = _execute(point, attempt, worker, watch)
            if compare.has_doubtful_timing(attempt):
                self.board.say(f"{point.label}: its timing is not credible; it is timed once more")
                results.set_aside(attempt, "replaced")
                attempt = results.new_attempt(point.run_key)
                where = _execute(point, attempt, worker, watch)
            took = f"{time.monotonic() - begin:.2f}"
            tags = point.tags | {"seconds": took, "where": where, "status": "FINISHED"}
            result = results.commit(attempt, point.run_key, tags)
        except (Failure, OSError) as e:
            self._fail(point, attempt, failure_of(e, attempt) if isinstance(e, OSError) else e)
            return
        self._publish(result)
        self._report_done(point, report.Run(result).headline)

    def _fail(self, point: Point, attempt: Path, failure: Failure) -> None:
        if failure.kind == "disk":
            shutil.rmtree(attempt, ignore_errors=True)
            self.board.ended(point, "stopped", str(failure))
            self.stop(DISK_FULL, f"{failure}, {_advice(self.force)}")
            return
        there, stopping = results.is_folder(attempt), self._stopping.is_set()
        if stopping:
            failure = Failure("interrupted", "stopped")
        elif not there:
            failure = Failure("invalid-result", progress.REMOVED)
        if not there:
            attempt.unlink(missing_ok=True)
            attempt.mkdir()
        _write_point(point, attempt)
        self._publish_if_whole(progress.set_aside(attempt, failure))
        message = f"{failure.kind}: {str(failure).splitlines()[0]}"
        self.board.ended(point, "stopped" if stopping else "failed", message)

    def _publish_if_whole(self, folder: Path) -> None:
        """Publish a result or a failed attempt that is not in MLflow, if enough of it is left."""
        if not runs.published(folder) and runs.publishable(folder):
            self._publish(folder)

    def _publish(self, folder: Path) -> bool:
        """Publish a folder, trying for PATIENCE_S, or only once if the last one failed:
        `publish_rest` tries again. False if MLflow cannot be reached; a refusal is reported."""
        with self._publishing:
            deadline = time.monotonic() + (0.0 if self._away else PATIENCE_S)
            self._away = False
            while True:
                try:
                    runs.publish(folder)
                except runs.StoreRejected as e:
                    self.unpublished[folder] = "refused it"
                    self.board.say(f"MLflow refused {folder}: {e}", once=True)
                except runs.StoreUnreachable as e:
                    if time.monotonic() < deadline and not self._stopping.is_set():
                        self.board.say("waiting for MLflow to answer", once=True)
                        self._stopping.wait(2)
                        continue
                    self._away, self.unpublished[folder] = True, AWAY
                    message = f"not published to MLflow yet, run the same command again later: {e}"
                    self.board.say(message, once=True)
                else:
                    self.unpublished.pop(folder, None)
                return not self._away

    def compare_with_mlflow(self) -> None:
        """Give results, but not another grid's, the names that their points have now, and take the
        marks from folders that MLflow lacks or shows under another name: `recover` publishes them.
        """
        shown, renamed, others = progress.shown_as(self.points), set(), list[str]()
        for point in self.points:
            result, now = point.result, (point.experiment, point.notebook.name)
            if shown[result] in (now, (None, None)):
                continue
            if presence.is_of_another_grid(result, point.file):
                others.append(shown[result][0] or "")
                continue
            with results.claim(point.run_key) as ours:
                if ours and result.exists():
                    presence.rename(result, point.experiment, point.tags)
                    shown[result] = now
                    renamed.add(result)
        if n := len(renamed):
            self.board.say(f"renamed as their notebook or experiment is: {counted(n, 'result')}")
        if others:
            count, where = counted(len(others), "result"), ", ".join(sorted({*others}))
            self.board.say(f"of another grid, and shown where that has them ({where}): {count}")
        try:
            gaps = presence.find_gaps(shown)
            for folder in (*gaps.vanished, *gaps.bare):
                with results.claim(results.key_of(folder)) as ours:
                    if ours:
                        presence.unmark(folder)
        except runs.StoreUnreachable as e:
            self.board.say(f"{UNREACHABLE}: {e}", once=True)
            return
        for line in replace(gaps, vanished=[*{*gaps.vanished} - renamed]).lines():
            self.board.say(line)

    def recover(self) -> None:
        """Clean up after runners that died: for these points, for abandoned attempts of any, and,
        with the store's own database, for unpublished failures of any."""
        mine = {p.run_key for p in self.points}
        failed = [path for path in results.listed("failed") if not runs.published(path)]
        of_any = [*results.listed("attempts"), *(failed if runs.own() else ())]
        keys = {results.key_of(path) for path in of_any if path.is_dir()} - {""}
        keys |= mine & set(map(results.key_of, failed))
        for key in keys | set(filter(_is_unsettled, mine)):
            with results.claim(key) as ours:
                if ours:
                    self._recover(key)

    def _recover(self, key: str) -> None:
        """Clean up after a claimed key's dead runners: finish interrupted commits, set aside other
        attempts and damaged results, and publish what is not in MLflow."""
        for attempt in results.attempts_of(key, "attempts"):
            if not results.finish(attempt):
                progress.set_aside(attempt, Failure("interrupted", "the runner was killed"))
        result = results.result_of(key)
        if result.exists() and not runs.publishable(result):
            results.set_aside(result, "replaced")
        failed = sorted(results.attempts_of(key, "failed"), key=results.ended_ms)
        for folder in (*failed, result):
            self._publish_if_whole(folder)


def _is_unsettled(key: str) -> bool:
    """Whether a point has a result that is damaged or not in MLflow."""
    result = results.result_of(key)
    if not runs.published(result):
        return result.exists()
    return not (results.unchanged(result, runs.marker(result)) or runs.publishable(result))


def _execute(
    point: Point, attempt: Path, worker: local.Execute, watch: Callable[[str], None]
) -> str:
    """Run a point into an attempt folder; returns the machine's name. Raises Failure."""
    _write_point(point, attempt)
    where = worker(point, attempt, watch)
    if why := identity.changed_since(point):
        raise Failure("invalid-result", f"{why} while the grid ran: run the grid again")
    _write_point(point, attempt)  # whatever the notebook has made of it
    return where


@contextlib.contextmanager
def _signals(work: Work) -> Iterator[None]:
    """Ctrl-C and SIGTERM stop the work; a second one changes nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    message = f"finished points are kept; {_resume(work.force)}"
    codes = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TERMINATED}
    before = {
        number: signal.signal(number, lambda got, _: work.stop(codes[signal.Signals(got)], message))
        for number in codes
    }
    try:
        yield
    finally:
        for number, handler in before.items():  # once stopped, let nothing disturb the exit
            signal.signal(number, signal.SIG_IGN if work.stopped else handler)


def _write_point(point: Point, attempt: Path) -> None:
    record = {
        "experiment": point.experiment, "params": point.params, "tags": point.tags,
        "identity": point.identity.parts, "timeout_s": point.timeout_s,
    }  # fmt: skip
    (attempt / results.POINT).write_text(json.dumps(record, indent=1))


def _resume(force: bool) -> str:
    """How to go on after a stop, in words: with --force, a runner repeats what is finished."""
    how = "without --force for the points that have no result yet" if force else "again to resume"
    return f"run the same command {how}"


def _advice(force: bool) -> str:
    """On a full disk: how full it is, and what to do."""
    free_mb = shutil.disk_usage(results.standing()).free / 1e6
    return f"{free_mb:.0f} MB free; free up space and {_resume(force)}"


def _report(
    points: Sequence[Point], done: Sequence[report.Run], console: Terminal, only: Sequence[str]
) -> None:
    """Write a page of the points' results, and print its path."""
    try:
        names = {f"{results.grid_name(point.file)}.yaml" for point in points} | {*only}
        page = report.write(done, names=names) if done else "no result yet"
    except OSError as e:
        page = f"none, {e.strerror}: {e.filename or results.root()}"
    console.print(Text(f"{'report':10s} {page}"), soft_wrap=True)


def _error(console: Terminal, what: str, why: str, code: int) -> int:
    console.print(Text(what, "bold red") + Text(f": {why}", ""), soft_wrap=True)
    return code
