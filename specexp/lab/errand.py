"""Running a grid point on another machine.

`run` executes the point there in a temporary folder and returns that folder as an `Answer`: workers
have no store, only the runner commits and publishes. `Seat` is the runner's side; transport is up
to a `Carrier` (`cluster`, `slurm`).
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
from specexp.lab import kernels, store, track
from specexp.lab.execute import Failure, Watch, execute
from specexp.lab.grid import Point
from specexp.lab.identity import SWITCHES, code_digest

MOST_BYTES = 200_000_000
RETRIES = 3


@dataclass(frozen=True)
class Errand:
    """A point sent to a worker. `notebook`: relative to the checkout; `modules`: imported before
    kernels are forked; `code`: the digest of the library; `environment`: variables to set."""

    point: Point
    notebook: Path
    modules: Sequence[str]
    forked: bool
    code: str
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Answer:
    """A worker's result. `folder`: the attempt folder as a tar; `failure`: kind, message and
    traceback; `node`: where it ran."""

    node: str
    folder: bytes = b""
    failure: tuple[str, str, str] | None = None


def run(errand: Errand, watch: Watch = lambda said: None) -> Answer:
    """Execute the point on this machine. A failure is part of the answer."""
    node = socket.gethostname()
    if _imported() != errand.code:
        differs = f"the code imported there, from {store.ROOT}, is not the runner's"
        return Answer(node, failure=("error", differs, ""))

    watch(f"on {node}, starting")
    point = replace(errand.point, notebook=store.ROOT / errand.notebook)
    with tempfile.TemporaryDirectory(prefix="specexp-") as name:
        folder, failure = Path(name), None
        try:
            slot = _slot(tuple(errand.modules), errand.forked)
            execute(
                point, folder, slot, lambda said: watch(f"on {node}, {said}"), errand.environment
            )  # fmt: skip
        except Failure as e:
            failure = e.kind, str(e), traceback.format_exc()
        return Answer(node, *packed(folder, failure))


@cache
def _imported() -> str:
    """The digest of the code at this process's first errand, which imported it."""
    return code_digest()


_slots: dict[tuple[object, ...], kernels.Slot] = {}
_open = contextlib.ExitStack()


def _slot(modules: Sequence[str], forked: bool) -> kernels.Slot:
    """This process's slot for kernels, kept for later errands; it runs one point at a time."""
    key = modules, forked, os.environ.get("OMP_NUM_THREADS")
    if key not in _slots:
        home = _open.enter_context(kernels.Kernels(modules, forked))
        _slots[key] = _open.enter_context(home.slot())
    return _slots[key]


def packed(
    folder: Path, failure: tuple[str, str, str] | None, most: int = MOST_BYTES
) -> tuple[bytes, tuple[str, str, str] | None]:
    """The files of a folder as a tar, smallest first, up to `most` bytes in all. If any is left
    out, the failure says so."""
    files = sorted((p.stat().st_size, p) for p in folder.rglob("*") if p.is_file())
    total, taken = sum(size for size, _ in files), 0
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for size, path in files:
            taken += size
            if taken > most:
                large = (
                    f"its folder holds {total / 1e6:.0f} MB, and at most {most / 1e6:.0f} MB are "
                    "sent back: write less to it"
                )
                failure = failure or ("invalid-result", large, "")
                break
            tar.add(path, str(path.relative_to(folder)), recursive=False)
    return made.getvalue(), failure


def unpack(data: bytes, folder: Path, most: int = MOST_BYTES) -> None:
    """Unpack the tar of `packed`. Raises Failure for anything but regular files inside the
    folder, and for more than `most` bytes."""
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            members = tar.getmembers()
            for member in members:
                if not member.isreg() or member.issparse():
                    raise Failure("invalid-result", f"{member.name!r} is not a regular file")
                if not (folder / member.name).resolve().is_relative_to(folder.resolve()):
                    raise Failure("invalid-result", f"{member.name!r} lies outside its folder")
            if sum(member.size for member in members) > most:
                raise Failure("invalid-result", f"more than {most / 1e6:.0f} MB came back")
            tar.extractall(folder, members, filter="data")
    except tarfile.TarError as e:
        raise Failure("invalid-result", f"what came back is damaged: {e}") from e


# --- in the runner -------------------------------------------------------------------------------


class Lost(Exception):
    """The machine or process that ran the point is gone."""


class Carrier(Protocol):
    """Sends errands to machines. say: called with a line about each one lost."""

    say: Callable[[str], None]

    def carry(self, point: Point, seat: int, watch: Watch) -> Answer:
        """Run the point elsewhere and wait for its answer. Raises Lost and Failure."""


class Seat:
    """Runs one point at a time on other machines, and up to RETRIES times more if it is lost."""

    def __init__(self, carrier: Carrier, number: int) -> None:
        self._carrier, self._number, self.name = carrier, number, "elsewhere"

    def execute(self, point: Point, attempt: Path, watch: Watch) -> None:
        for tries in range(1, RETRIES + 2):
            try:
                answer = self._carrier.carry(point, self._number, watch)
            except Lost as e:
                why = f"its machine or process was lost {tries} times: {e}"
                if tries <= RETRIES:
                    self._carrier.say(f"{point.label}: {why}; trying again")
            else:
                self.name = answer.node
                if answer.folder:
                    unpack(answer.folder, attempt)
                if answer.failure:
                    kind, message, trace = answer.failure
                    raise Failure(kind, f"on {answer.node}: {message}") from There(trace)
                return
        raise Failure("lost", why)


class There(Exception):
    """An exception of another machine, as text."""


class Errands:
    """Makes errands from points. Raises UserError for a point that cannot be sent."""

    def __init__(self, points: Sequence[Point], forked: bool, together: bool) -> None:
        for point in points:
            if not point.notebook.is_relative_to(store.ROOT):
                raise UserError(
                    f"{point.notebook} is outside {store.ROOT}, and workers get only that folder: "
                    "move the notebook into it"
                )
        self._forked, self._together = forked, together
        self._modules = kernels.modules_of(sorted({p.notebook for p in points}))
        self._code = code_digest()
        about = track.provenance()
        self._environment = {name: os.environ.get(name, "") for name in SWITCHES} | {
            "SPECEXP_GIT": f"{about['git.commit'] or 'unknown'} {about['git.dirty']}"
        }

    def alone(self, point: Point) -> bool:
        return point.timed and not self._together

    def of(self, point: Point) -> Errand:
        return Errand(
            point, point.notebook.relative_to(store.ROOT), self._modules, self._forked,
            self._code, self._environment,
        )  # fmt: skip
