"""Running a point on another machine.

On the worker, `run` executes a `Task` in a temporary folder and returns that folder as an
`Outcome`: workers have no store, only the runner commits and publishes. In the runner,
`run_elsewhere` gets the outcome through `ray.OnRay`, and tries again if the worker was lost.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from specexp.errors import UserError
from specexp.grids import identity, kernels, notebooks
from specexp.grids.execute import Watch, execute
from specexp.grids.points import Point
from specexp.grids.progress import Failure
from specexp.tracking import provenance, results

if TYPE_CHECKING:
    from specexp.grids.machines.ray import OnRay

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
    """The result of a task: the files of the attempt folder by their paths there; kind, message,
    traceback of a failure."""

    node: str
    files: Mapping[str, bytes] = field(default_factory=dict)
    failure: tuple[str, str, str] | None = None


def run(task: Task, watch: Watch = lambda message: None) -> Outcome:
    """Execute a task on this machine."""
    node = socket.gethostname()
    os.environ.update(task.environment)
    if _imported() != task.code:
        message = f"this machine imported code that differs from the runner's, from {results.ROOT}"
        return Outcome(node, failure=("error", message, ""))
    if others := _others(task.point):
        message = f"this machine is of another kind than the runner's: {others}"
        return Outcome(node, failure=("error", message, ""))
    watch(f"on {node}, starting")
    point = replace(task.point, notebook=results.ROOT / task.notebook)
    with tempfile.TemporaryDirectory(prefix="specexp-") as name:
        folder, failure = Path(name), None
        try:
            worker = _worker(tuple(task.modules), task.forked)
            execute(
                point, folder, worker,
                lambda message: watch(f"on {node}, {message}"), task.environment,
            )  # fmt: skip
        except Failure as e:
            failure = e.kind, str(e), traceback.format_exc()
        return Outcome(
            node, *(packed(folder, failure) if results.is_folder(folder) else ({}, failure))
        )


def _others(point: Point) -> str:
    """What differs from the machine that the point's key names, on which it was loaded."""
    parts, device = point.around.parts, point.params.get("device", "auto")
    torch.set_num_threads(int(parts["threads"]))
    here = provenance.machine(device, point.timed)
    here |= {"kernels": provenance.kernels(device)} if "kernels" in parts else {}
    return identity.why_new(here, {name: parts.get(name, "") for name in here})


@cache
def _imported() -> str:
    """The digest of the code that this process runs: as it was at its first task."""
    return provenance.code_digest()


_workers: dict[tuple[object, ...], kernels.Worker] = {}
_open = contextlib.ExitStack()


def _worker(modules: Sequence[str], forked: bool) -> kernels.Worker:
    """What runs kernels for this process, kept for later tasks."""
    key = modules, forked, os.environ.get("OMP_NUM_THREADS")
    if key not in _workers:
        home = _open.enter_context(kernels.Kernels(modules, forked))
        _workers[key] = _open.enter_context(home.worker())
    return _workers[key]


def packed(
    folder: Path, failure: tuple[str, str, str] | None, most: int = MOST_BYTES
) -> tuple[dict[str, bytes], tuple[str, str, str] | None]:
    """The files of a folder, smallest first and at most `most` bytes in all. If any are left out,
    the returned failure says so."""
    sizes = sorted((path.stat().st_size, path) for path in results.files_in(folder))
    fit = [total <= most for total in accumulate(size for size, _ in sizes)]
    paths = [path for (_, path), fits in zip(sizes, fit, strict=True) if fits]
    if not all(fit):
        total_mb = f"{sum(size for size, _ in sizes) / 1e6:.0f}"
        message = f"its folder holds {total_mb} MB, and at most {most / 1e6:.0f} MB are sent back"
        failure = failure or ("invalid-result", message, "")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}, failure


def unpack(files: Mapping[str, bytes], folder: Path, most: int = MOST_BYTES) -> None:
    """Write what `packed` returned. Raises Failure for a path outside the folder."""
    if sum(map(len, files.values())) > most:
        raise Failure("invalid-result", f"more than {most / 1e6:.0f} MB came back")
    for name, data in files.items():
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise Failure("invalid-result", f"{name!r} is outside its folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


# --- in the runner -------------------------------------------------------------------------------


class WorkerLost(Exception):
    """The machine or process that ran the task is gone."""


def run_elsewhere(machines: OnRay, number: int, point: Point, attempt: Path, watch: Watch) -> str:
    """Run a point into an attempt folder; up to RETRIES times again if its machine is lost. Returns
    the machine's name. Raises Failure."""
    for tries in range(1, RETRIES + 2):
        try:
            outcome = machines.run_point(point, number, watch)
        except WorkerLost as e:
            why = f"its machine or process was lost (try {tries} of {RETRIES + 1}): {e}"
            if tries <= RETRIES:
                machines.say(f"{point.label}: {why}; trying again")
        else:
            unpack(outcome.files, attempt)
            if outcome.failure:
                kind, message, trace = outcome.failure
                raise Failure(kind, f"on {outcome.node}: {message}") from RemoteError(trace)
            return outcome.node
    raise Failure("lost", why)


class RemoteError(Exception):
    """The traceback of an error on another machine, as text."""


class Tasks:
    """Makes the tasks of these points. Raises UserError for a point that cannot be sent."""

    def __init__(self, points: Sequence[Point], forked: bool) -> None:
        for point in points:
            if not point.notebook.is_relative_to(results.ROOT):
                raise UserError(
                    f"{point.notebook} is outside {results.ROOT}: workers only get what is in there"
                )
        self._forked = forked
        self._modules = notebooks.modules_of(sorted({p.notebook for p in points}))
        self._code = provenance.code_digest()
        about = provenance.tags()
        git = f"{about['git.commit'] or 'unknown'} {about['git.dirty']}"
        self._environment = {name: os.environ.get(name, "") for name in provenance.SWITCHES}
        self._environment |= {"OMP_NUM_THREADS": about["threads"], "SPECEXP_GIT": git}

    def of(self, point: Point) -> Task:
        return Task(
            point, point.notebook.relative_to(results.ROOT), self._modules, self._forked,
            self._code, self._environment,
        )  # fmt: skip
