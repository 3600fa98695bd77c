"""Points on the machines of a Ray cluster, each a Ray task that runs `execute`.

Ray finds every point a machine and queues those for which there is none yet; nothing is scheduled
here. A machine gets this checkout's code, runs a point in a folder of its own and sends the folder
back. It knows no store: what comes back is checked, committed and published by the runner alone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import signal
import socket
import tarfile
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from specexp.errors import UserError
from specexp.lab import kernels, store, track
from specexp.lab.execute import Failure, Watch, execute
from specexp.lab.grid import Point, code_digest

OWN, HERE = "ray", "auto"
MOST_BYTES = 200_000_000
RETRIES = 3
_ADDRESS = re.compile(r"(ray://)?([\w.-]+|\[[0-9a-fA-F:]+\]):(\d+)")


# --- on a worker ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Errand:
    """A point on its way to a worker. `notebook`: relative to the checkout; `modules`: what kernels
    are forked with; `alone`: it has the machine for itself; `code`: the digest of the library."""

    point: Point
    notebook: Path
    modules: Sequence[str]
    forked: bool
    alone: bool
    code: str
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Answer:
    """What came of it: the attempt folder as a tar; kind, message and traceback of a failure."""

    node: str
    folder: bytes = b""
    failure: tuple[str, str, str] | None = None


class Mailbox:
    """An actor which keeps the last word of every seat until it is fetched."""

    def __init__(self) -> None:
        self._said: dict[int, str] = {}

    def say(self, seat: int, said: str) -> None:
        self._said[seat] = said

    def fetch(self, seat: int) -> str:
        return self._said.pop(seat, "")


def run(errand: Errand, mailbox: Any, seat: int) -> Answer:
    """The task: execute the point on this machine."""
    node = socket.gethostname()
    if code_digest() != errand.code:
        found = f"other code than the runner's is imported there, from {store.ROOT}"
        return Answer(node, failure=("error", found, ""))

    def watch(said: str) -> None:
        mailbox.say.remote(seat, f"on {node}, {said}")

    watch("starting")
    point = replace(errand.point, notebook=store.ROOT / errand.notebook)
    with tempfile.TemporaryDirectory(prefix="specexp-") as name:
        folder, failure = Path(name), None
        try:
            slot = _slot(tuple(errand.modules), errand.forked, errand.alone)
            execute(point, folder, slot, watch, errand.environment)
        except Failure as e:
            failure = e.kind, str(e), traceback.format_exc()
        return Answer(node, *packed(folder, failure))


_slots: dict[Any, kernels.Slot] = {}
_open = contextlib.ExitStack()


def _slot(modules: Sequence[str], forked: bool, alone: bool) -> kernels.Slot:
    """This process's own place for kernels: Ray gives a process one task at a time and keeps it."""
    if alone:  # Ray has set as many threads as there are CPUs, hyperthreads and all
        os.environ["OMP_NUM_THREADS"] = str(psutil.cpu_count(logical=False) or os.cpu_count())
    key = modules, forked, alone
    if key not in _slots:
        _slots[key] = _open.enter_context(
            _open.enter_context(kernels.Kernels(modules, forked)).slot()
        )
    return _slots[key]


def packed(
    folder: Path, failure: tuple[str, str, str] | None, most: int = MOST_BYTES
) -> tuple[bytes, tuple[str, str, str] | None]:
    """The files of a folder as a tar, the smallest first and at most `most` bytes of them: if that
    leaves any out, the point has failed."""
    files = sorted((p.stat().st_size, p) for p in folder.rglob("*") if p.is_file())
    total, taken = sum(size for size, _ in files), 0
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for size, path in files:
            taken += size
            if taken > most:
                said = f"its folder holds {total / 1e6:.0f} MB, of which at most {most / 1e6:.0f}"
                failure = failure or ("invalid-result", f"{said} are brought back", "")
                break
            tar.add(path, str(path.relative_to(folder)), recursive=False)
    return made.getvalue(), failure


def unpack(data: bytes, folder: Path, most: int = MOST_BYTES) -> None:
    """Undo `packed`. Raises Failure for anything but regular files inside the folder."""
    try:
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            members = tar.getmembers()
            for member in members:
                if not member.isreg() or member.issparse():
                    raise Failure("invalid-result", f"{member.name!r} came back, which is no file")
                if not (folder / member.name).resolve().is_relative_to(folder.resolve()):
                    raise Failure("invalid-result", f"{member.name!r} leads out of its folder")
            if sum(member.size for member in members) > most:
                raise Failure("invalid-result", f"more than {most / 1e6:.0f} MB came back")
            tar.extractall(folder, members, filter="data")
    except tarfile.TarError as e:
        raise Failure("invalid-result", f"what came back is damaged: {e}") from e


# --- in the runner -------------------------------------------------------------------------------


class OnRay:
    """A cluster: `ray` is one of this machine's own, `auto` the one that runs here, HOST:PORT and
    ray://HOST:PORT those. say: is told of machines that were lost.

    A point that times something asks for all CPUs of a machine of the largest kind, so that no
    other point is there, unless `together`; other points ask for one CPU. Both ask for one GPU if
    their device is one, or `auto` where the cluster has any. Raises UserError.
    """

    def __init__(
        self, points: Sequence[Point], address: str = OWN, *, forked: bool = True,
        together: bool = False, say: Callable[[str], None] = lambda said: None,
    ) -> None:  # fmt: skip
        if address not in (OWN, HERE) and not _ADDRESS.fullmatch(address):
            raise UserError(f"{address!r} is no Ray address: give ray, auto, HOST:6379 or "
                            "ray://HOST:10001")  # fmt: skip
        if importlib.util.find_spec("ray") is None:
            raise UserError('points on Ray need the package ray: pip install "specexp[ray]"')
        for point in points:
            if not point.notebook.is_relative_to(store.ROOT):
                raise UserError(f"{point.notebook} is not below {store.ROOT}, all that workers get")
            if re.fullmatch(r"cuda:[1-9]\d*", _device(point)):
                raise UserError(f"{point.label}: on Ray a point sees one GPU; write device: cuda")
        self.say, self._points, self._together, self._forked = say, points, together, forked
        self._address = os.environ.get("RAY_ADDRESS", OWN) if address == OWN else address
        self._over = threading.Event()

    def __enter__(self) -> OnRay:
        self._connect()
        import ray

        found = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self._nodes = [(n.get("CPU", 0.0), n.get("GPU", 0.0)) for n in found]
        needy = [p for p in self._points if _device(p).startswith("cuda")]
        if needy and not self._gpus:
            raise UserError(f"the cluster has no GPU, and {needy[0].label} asks for one")
        about = track.provenance()
        self._environment = {
            "SPECEXP_GIT": f"{about['git.commit'] or 'unknown'} {about['git.dirty']}"
        }
        self._modules = kernels.modules_of(sorted({p.notebook for p in self._points}))
        self._task = ray.remote(max_retries=0)(run)
        self._mailbox = ray.remote(num_cpus=0, max_restarts=-1)(Mailbox).remote()
        return self

    def _connect(self) -> None:
        """Join the cluster or start one, which then listens on the loopback interface alone."""
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        options: dict[str, Any] = {"logging_level": "error", "log_to_driver": False}
        if self._address == OWN:
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # Ray's name for loopback only
            options |= {"address": "local", "include_dashboard": False}
        else:
            options |= {"address": self._address, "runtime_env": self._shipped()}
            _knock(self._address)
        import ray

        self._ours = not ray.is_initialized()
        if not self._ours:
            return
        handler = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(**options)
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as e:
            said = str(e).strip().splitlines()[0]
            raise UserError(f"no Ray at {self._address}: {said}") from e
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)

    def _shipped(self) -> dict[str, Any]:
        """What workers get of this checkout: the library, the data, and the points' notebooks."""
        kept = {"specexp", "data", *(self._relative(p).parts[0] for p in self._points)}
        excludes = ["/*", *(f"!/{name}" for name in sorted(kept)), "__pycache__"]
        return {"working_dir": str(store.ROOT), "excludes": excludes}

    def _relative(self, point: Point) -> Path:
        return point.notebook.relative_to(store.ROOT)

    def __exit__(self, *exception: object) -> None:
        import ray

        if self._ours:
            ray.shutdown()

    @property
    def how(self) -> str:
        cpus, gpus = sum(c for c, _ in self._nodes), sum(g for _, g in self._nodes)
        said = f"on Ray: {len(self._nodes)} machines, {cpus:.0f} CPUs"
        return f"{said}, {gpus:.0f} GPUs" if gpus else said

    @property
    def _gpus(self) -> bool:
        return any(gpus >= 1 for _, gpus in self._nodes)

    def at_once(self, jobs: int | None, timed: bool) -> int:
        asked = [self.demand(p) for p in self._points if self._alone(p) == timed]
        return jobs or max((self._fit(**demand) for demand in asked), default=1)

    def _fit(self, num_cpus: float, num_gpus: int) -> int:
        each = [
            min(cpus // num_cpus, gpus // num_gpus if num_gpus else cpus)
            for cpus, gpus in self._nodes
        ]
        return max(1, int(sum(each)))

    def demand(self, point: Point) -> dict[str, Any]:
        """What Ray is asked for: CPUs and GPUs."""
        gpus = int(self._gpus and _device(point).startswith(("cuda", "auto")))
        fit = [cpus for cpus, there in self._nodes if there >= gpus]
        return {"num_cpus": max([1, *fit]) if self._alone(point) else 1, "num_gpus": gpus}

    def _alone(self, point: Point) -> bool:
        return point.timed and not self._together

    @contextlib.contextmanager
    def seat(self, number: int) -> Iterator[_Seat]:
        yield _Seat(self, number)

    def kill(self) -> None:
        self._over.set()

    def ask(self, point: Point, seat: int, watch: Watch) -> Answer:
        """Have a worker run the point; wait for it. Raises Failure, and Ray's errors."""
        import ray

        errand = Errand(
            point, self._relative(point), self._modules, self._forked, self._alone(point),
            code_digest(), self._environment,
        )  # fmt: skip
        options = {"scheduling_strategy": "SPREAD", "name": point.label, **self.demand(point)}
        watch("waiting for a machine")
        task = self._task.options(**options).remote(errand, self._mailbox, seat)
        while not ray.wait([task], timeout=0.3)[0]:
            if self._over.is_set():
                ray.cancel(task, force=True)
                ray.wait([task], timeout=5)
                raise Failure("interrupted", "stopped")
            with contextlib.suppress(ray.exceptions.RayError):
                if said := ray.get(self._mailbox.fetch.remote(seat), timeout=5):
                    watch(said)
        return ray.get(task)


class _Seat:
    def __init__(self, place: OnRay, number: int) -> None:
        self._place, self._number, self.name = place, number, "Ray"

    def execute(self, point: Point, attempt: Path, watch: Watch) -> None:
        from ray import exceptions as ray

        gone = (
            ray.WorkerCrashedError, ray.NodeDiedError, ray.ObjectLostError,
            ray.LocalRayletDiedError, ConnectionError,
        )  # fmt: skip
        for tries in range(1, RETRIES + 2):
            try:
                answer = self._place.ask(point, self._number, watch)
            except gone as e:
                why = f"its machine or worker was lost {tries} times: {_first(e)}"
                if tries <= RETRIES:
                    self._place.say(f"{point.label}: {why}; trying again")
            except ray.OutOfMemoryError as e:
                raise Failure("oom", _first(e)) from e
            except ray.RayError as e:
                raise Failure("error", f"Ray: {_first(e)}") from e
            else:
                self.name = answer.node
                unpack(answer.folder, attempt)
                if answer.failure:
                    kind, message, trace = answer.failure
                    raise Failure(kind, f"on {answer.node}: {message}") from _There(trace)
                return
        raise Failure("lost", why)


class _There(Exception):
    """What was raised on a worker, as text."""


def _first(e: Exception) -> str:
    return next((line for line in str(e).splitlines() if line.strip()), type(e).__name__)


def _device(point: Point) -> str:
    return str(point.params.get("device", "cpu"))


def _knock(address: str) -> None:
    """Ray would wait for a minute where nobody listens."""
    if found := _ADDRESS.fullmatch(address):
        host, port = found[2].strip("[]"), int(found[3])
        try:
            socket.create_connection((host, port), timeout=5).close()
        except OSError as e:
            raise UserError(f"no Ray at {address}: {e.strerror or e}") from e
