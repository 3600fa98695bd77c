"""Running a point on another machine.

On the worker, `run` executes a `Task` in a temporary folder and returns that folder as an
`Outcome`: workers have no store, only the runner commits and publishes. In the runner, `Seat` gets
the outcome through an `Executor` (`ray.OnRay`), and tries again if the worker was lost.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import tarfile
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Protocol

from specexp.errors import UserError
from specexp.grids import kernels, notebooks
from specexp.grids.execute import Failure, Watch, execute
from specexp.grids.identity import code_digest
from specexp.grids.points import Point
from specexp.tracking import provenance, results

MOST_BYTES = 200_000_000
RETRIES = 3


@dataclass(frozen=True)
class Task:
    """A point to be run by a worker. `notebook`: relative to the checkout; `modules`: to import
    before kernels are forked; `code`: the digest of the library's source; `environment`: variables
    for the kernel."""

    point: Point
    notebook: Path
    modules: Sequence[str]
    forked: bool
    code: str
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Outcome:
    """The result of a task: the attempt folder as a tar; kind, message, traceback of a failure."""

    node: str
    folder: bytes = b""
    failure: tuple[str, str, str] | None = None


def run(task: Task, watch: Watch = lambda message: None) -> Outcome:
    """Execute a task on this machine."""
    node = socket.gethostname()
    if _imported() != task.code:
        message = f"this machine imported code that differs from the runner's, from {results.ROOT}"
        return Outcome(node, failure=("error", message, ""))

    watch(f"on {node}, starting")
    point = replace(task.point, notebook=results.ROOT / task.notebook)
    with tempfile.TemporaryDirectory(prefix="specexp-") as name:
        folder, failure = Path(name), None
        try:
            slot = _slot(tuple(task.modules), task.forked)
            execute(
                point, folder, slot,
                lambda message: watch(f"on {node}, {message}"), task.environment,
            )  # fmt: skip
        except Failure as e:
            failure = e.kind, str(e), traceback.format_exc()
        return Outcome(node, *packed(folder, failure))


@cache
def _imported() -> str:
    """The digest of the code that this process runs: as it was at its first task."""
    return code_digest()


_slots: dict[tuple[object, ...], kernels.Slot] = {}
_open = contextlib.ExitStack()


def _slot(modules: Sequence[str], forked: bool) -> kernels.Slot:
    """The slot of this process, kept for later tasks."""
    key = modules, forked, os.environ.get("OMP_NUM_THREADS")
    if key not in _slots:
        home = _open.enter_context(kernels.Kernels(modules, forked))
        _slots[key] = _open.enter_context(home.slot())
    return _slots[key]


def packed(
    folder: Path, failure: tuple[str, str, str] | None, most: int = MOST_BYTES
) -> tuple[bytes, tuple[str, str, str] | None]:
    """The files of a folder as a tar, smallest first and at most `most` bytes in all. If any are
    left out, the returned failure says so."""
    files = sorted((p.stat().st_size, p) for p in folder.rglob("*") if p.is_file())
    total, taken = sum(size for size, _ in files), 0
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for size, path in files:
            taken += size
            if taken > most:
                size_mb, most_mb = f"{total / 1e6:.0f}", f"{most / 1e6:.0f}"
                message = f"its folder holds {size_mb} MB, and at most {most_mb} MB are sent back"
                failure = failure or ("invalid-result", message, "")
                break
            tar.add(path, str(path.relative_to(folder)), recursive=False)
    return buffer.getvalue(), failure


def unpack(data: bytes, folder: Path, most: int = MOST_BYTES) -> None:
    """Extract what `packed` returned. Raises Failure for anything but plain files in the folder."""
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            members = tar.getmembers()
            for member in members:
                if not member.isreg() or member.issparse():
                    raise Failure("invalid-result", f"{member.name!r} came back: not a plain file")
                if not (folder / member.name).resolve().is_relative_to(folder.resolve()):
                    raise Failure("invalid-result", f"{member.name!r} is outside its folder")
            if sum(member.size for member in members) > most:
                raise Failure("invalid-result", f"more than {most / 1e6:.0f} MB came back")
            tar.extractall(folder, members, filter="data")
    except tarfile.TarError as e:
        raise Failure("invalid-result", f"the folder that came back is damaged: {e}") from e


# --- in the runner -------------------------------------------------------------------------------


class WorkerLost(Exception):
    """The machine or process that ran the task is gone."""


class Executor(Protocol):
    """Runs points on other machines. `say` reports lost workers to the user."""

    say: Callable[[str], None]

    def run_point(self, point: Point, seat: int, watch: Watch) -> Outcome:
        """Run a point and wait for its outcome. Raises WorkerLost and Failure."""


class Seat:
    """Runs one point at a time elsewhere; up to RETRIES times again if the worker is lost."""

    def __init__(self, executor: Executor, number: int) -> None:
        self._executor, self._number, self.name = executor, number, "elsewhere"

    def execute(self, point: Point, attempt: Path, watch: Watch) -> None:
        for tries in range(1, RETRIES + 2):
            try:
                answer = self._executor.run_point(point, self._number, watch)
            except WorkerLost as e:
                why = f"its machine or process was lost (try {tries} of {RETRIES + 1}): {e}"
                if tries <= RETRIES:
                    self._executor.say(f"{point.label}: {why}; trying again")
            else:
                self.name = answer.node
                if answer.folder:
                    unpack(answer.folder, attempt)
                if answer.failure:
                    kind, message, trace = answer.failure
                    raise Failure(kind, f"on {answer.node}: {message}") from RemoteError(trace)
                return
        raise Failure("lost", why)


class RemoteError(Exception):
    """The traceback of an error on another machine, as text."""


class Tasks:
    """Makes the tasks of these points. Raises UserError for a point that cannot be sent."""

    def __init__(self, points: Sequence[Point], forked: bool, together: bool) -> None:
        for point in points:
            if not point.notebook.is_relative_to(results.ROOT):
                raise UserError(
                    f"{point.notebook} is outside {results.ROOT}: workers only get what is in there"
                )
        self._forked, self._together = forked, together
        self._modules = notebooks.modules_of(sorted({p.notebook for p in points}))
        self._code = code_digest()
        about = provenance.tags()
        self._environment = {name: os.environ.get(name, "") for name in provenance.SWITCHES} | {
            "SPECEXP_GIT": f"{about['git.commit'] or 'unknown'} {about['git.dirty']}"
        }

    def alone(self, point: Point) -> bool:
        """Whether this point needs a machine to itself."""
        return point.timed and not self._together

    def of(self, point: Point) -> Task:
        return Task(
            point, point.notebook.relative_to(results.ROOT), self._modules, self._forked,
            self._code, self._environment,
        )  # fmt: skip
