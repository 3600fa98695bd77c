"""What a Ray worker does: it executes a `Task` in a temporary folder and returns that folder as an
`Outcome`. Workers have no store: only the runner (ray.py) commits and publishes.
"""

from __future__ import annotations

import os
import socket
import tempfile
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate
from pathlib import Path

import torch

from specexp.grids import identity, kernels
from specexp.grids.execute import Watch, execute
from specexp.grids.points import Point
from specexp.grids.progress import Failure
from specexp.tracking import provenance, results

MOST_BYTES = 200_000_000


@dataclass(frozen=True)
class Task:
    """A point to be run by a worker, whose notebook is relative to the checkout. `modules`: to
    import before kernels are forked; `code`: the digest of the library's source; `environment`:
    variables for the kernel."""

    point: Point
    modules: tuple[str, ...]
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
    point = replace(task.point, notebook=results.ROOT / task.point.notebook)
    with tempfile.TemporaryDirectory(prefix="specexp-") as name:
        folder, failure = Path(name), None
        try:
            worker = _worker(task.modules, task.forked, os.environ.get("OMP_NUM_THREADS"))
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


@cache
def _worker(modules: tuple[str, ...], forked: bool, threads: str | None) -> kernels.Worker:
    """What runs kernels for this process, kept for later tasks; `threads`: of its environment."""
    return kernels.Worker(kernels.Kernels(modules, forked).__enter__())


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
