"""Runs points on a Ray cluster, each as a Ray task.

Ray alone schedules and queues them. Workers run the code of this checkout, which is sent to them
unless the cluster is one started here. A worker executes a `Task` in a temporary folder and returns
that folder as an `Outcome`: it has no store, only the runner commits and publishes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import socket
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from specexp.errors import UserError
from specexp.grids import identity, kernels, notebooks
from specexp.grids.execute import Watch, execute
from specexp.grids.machines.local import Execute, Here
from specexp.grids.points import Point
from specexp.grids.progress import Failure
from specexp.tracking import provenance, results

OWN_CLUSTER, RUNNING_CLUSTER = "ray", "auto"
RETRIES = 3  # of a point whose machine was lost
STARTUP_S = 120.0
MOST_BYTES = 200_000_000
_ADDRESS = re.compile(r"(ray://)?([\w.-]+|\[[0-9a-fA-F:]+\]):(\d+)")


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
    """A task's result: the files of its folder by path; kind, message, traceback of a failure."""

    node: str
    files: Mapping[str, bytes] = field(default_factory=dict)
    failure: tuple[str, str, str] | None = None


class Mailbox:
    """An actor that keeps the last progress message of every worker until it is fetched."""

    def __init__(self) -> None:
        self._messages: dict[int, str] = {}

    def say(self, number: int, message: str) -> None:
        self._messages[number] = message

    def fetch(self, number: int) -> str:
        return self._messages.pop(number, "")


# --- on a worker ---------------------------------------------------------------------------------


def run(task: Task, mailbox: Any = None, number: int = 0) -> Outcome:
    """Execute a task on this machine; its progress goes to the mailbox under this number."""

    def watch(message: str) -> None:
        if mailbox:
            mailbox.say.remote(number, f"on {node}, {message}")

    node = socket.gethostname()
    os.environ.update(task.environment)
    if why := _refusal(task):
        return Outcome(node, failure=("error", why, ""))
    watch("starting")
    point = replace(task.point, notebook=results.ROOT / task.point.notebook)
    with tempfile.TemporaryDirectory(prefix="specexp-") as name:
        folder, failure = Path(name), None
        try:
            worker = _worker(task.modules, task.forked, os.environ.get("OMP_NUM_THREADS"))
            execute(point, folder, worker, watch, task.environment)
        except Failure as e:
            failure = e.kind, str(e), traceback.format_exc()
        return Outcome(node, *packed(folder, failure))


def _refusal(task: Task) -> str:
    """Why a task cannot run on this machine, in words: its code, or how it differs from the machine
    that the point's key names."""
    if _imported() != task.code:
        return f"this machine imported code that differs from the runner's, from {results.ROOT}"
    point = task.point
    parts = point.identity.parts
    torch.set_num_threads(int(parts["threads"]))
    here = provenance.machine(point.device, point.timed)
    here |= {"kernels": provenance.kernels(point.device)} if "kernels" in parts else {}
    how = identity.why_new(here, {name: parts.get(name, "") for name in here})
    return how and f"this machine is of another kind than the runner's: {how}"


@cache
def _imported() -> str:
    """The digest of the code that this process runs: as it was at its first task."""
    return provenance.code_digest()


@cache
def _worker(modules: tuple[str, ...], forked: bool, threads: str | None) -> kernels.Worker:
    """What runs kernels for this process, kept for later tasks; `threads`: of its environment."""
    return kernels.Worker(kernels.Kernels(modules, "" if forked else "as requested").__enter__())


def packed(
    folder: Path, failure: tuple[str, str, str] | None
) -> tuple[dict[str, bytes], tuple[str, str, str] | None]:
    """A folder's files, smallest first, up to MOST_BYTES; the failure says if any are left out. A
    notebook may have removed the folder."""
    files = results.files_in(folder) if results.is_folder(folder) else []
    sizes = sorted((path.stat().st_size, path) for path in files)
    fit = [total <= MOST_BYTES for total in accumulate(size for size, _ in sizes)]
    paths = [path for (_, path), fits in zip(sizes, fit, strict=True) if fits]
    if not all(fit):
        total_mb = f"{sum(size for size, _ in sizes) / 1e6:.0f}"
        message = f"its folder holds {total_mb} MB; at most {MOST_BYTES / 1e6:.0f} MB are sent back"
        failure = failure or ("invalid-result", message, "")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}, failure


def unpack(files: Mapping[str, bytes], folder: Path) -> None:
    """Write what `packed` returned. Raises Failure for a path outside the folder."""
    if sum(map(len, files.values())) > MOST_BYTES:
        raise Failure("invalid-result", f"more than {MOST_BYTES / 1e6:.0f} MB came back")
    for name, data in files.items():
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise Failure("invalid-result", f"{name!r} is outside its folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


# --- in the runner -------------------------------------------------------------------------------


class OnRay:
    """Runs points on a Ray cluster. `address`: `ray` starts one on this machine, `auto` joins the
    one that runs here, HOST:PORT and ray://HOST:PORT join others. `say` reports lost machines.

    A point that needs a machine to itself asks for all CPUs of one of the largest, others for a CPU
    for each of their threads. Both ask for one GPU if their device is one, or is `auto` and the
    cluster has any. Raises UserError.
    """

    def __init__(
        self, points: Sequence[Point], address: str = OWN_CLUSTER, *, forked: bool = True,
        say: Callable[[str], None] = lambda message: None,
    ) -> None:  # fmt: skip
        if address not in (OWN_CLUSTER, RUNNING_CLUSTER) and not _ADDRESS.fullmatch(address):
            raise UserError(
                f"cannot run points on {address!r}: give here, ray, auto, HOST:6379 or "
                "ray://HOST:10001 (on Slurm, let every job run this command: notebooks/README.md)"
            )
        if importlib.util.find_spec("ray") is None:
            raise UserError('to run on Ray install it: pip install "specexp[ray]"')
        for point in points:
            if re.fullmatch(r"cuda:[1-9]\d*", point.device):
                raise UserError(f"{point.label}: a point on Ray sees one GPU; write device: cuda")
            if not point.notebook.is_relative_to(results.ROOT):
                raise UserError(
                    f"{point.notebook} is outside {results.ROOT}: workers only get what is in there"
                )
        self.say, self._points, self._forked = say, points, forked
        usual = os.environ.get("RAY_ADDRESS", OWN_CLUSTER)
        self._address = usual if address == OWN_CLUSTER else address
        self._over = threading.Event()
        self._modules = notebooks.modules_of(p.notebook for p in points)
        self._code = provenance.code_digest()
        about = provenance.tags()
        git = f"{about['git.commit'] or 'unknown'} {about['git.dirty']}"
        self._environment = {name: os.environ.get(name, "") for name in provenance.SWITCHES}
        self._environment |= {"OMP_NUM_THREADS": about["threads"], "SPECEXP_GIT": git}

    def __enter__(self) -> OnRay:
        self._connect()
        import ray

        self._refresh()
        self._gpus = any(gpus >= 1 for _, gpus in self._nodes)
        needy = [p for p in self._points if p.device.startswith("cuda")]
        self._task = ray.remote(max_retries=0)(run)
        self._mailbox = ray.remote(num_cpus=0, max_restarts=-1)(Mailbox).remote()
        try:
            if needy and not self._gpus:
                raise UserError(f"{needy[0].label} needs a GPU, and the Ray cluster has none")
            ray.get(self._mailbox.fetch.remote(0), timeout=STARTUP_S)
        except UserError:
            self.__exit__()
            raise
        except Exception as e:
            self.__exit__()
            raise UserError(f"no Ray worker can run specexp: {_line(e)}") from e
        return self

    def _connect(self) -> None:
        """Join the cluster or start one that listens only on the loopback interface."""
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        options: dict[str, Any] = {"logging_level": "error", "log_to_driver": False}
        if self._address == OWN_CLUSTER:
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # Ray's switch for loopback only
            options |= {"address": "local", "include_dashboard": False}
        else:
            options |= {"address": self._address, "runtime_env": self._shipped()}
            _check_port(self._address)
            if self._address.startswith("ray://"):  # for the others Ray does it
                named = os.environ.keys() & {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}
                if named or (Path.home() / ".ray" / "auth_token").exists():
                    os.environ.setdefault("RAY_AUTH_MODE", "token")
        import ray

        self._ours = not ray.is_initialized()
        if not self._ours:
            return
        handler = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(**options)
        except Exception as e:
            raise UserError(f"cannot reach Ray at {self._address}: {_line(e)}") from e
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)

    def _refresh(self) -> None:
        """Refresh `_nodes`: CPUs and GPUs of each machine."""
        import ray

        resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self._nodes = [(n.get("CPU", 0.0), n.get("GPU", 0.0)) for n in resources]

    def _shipped(self) -> dict[str, Any]:
        """What Ray sends to workers: the library, the data and the folders of the notebooks."""
        folders = (p.notebook.relative_to(results.ROOT).parts[0] for p in self._points)
        kept = {"specexp", "data", *folders}
        excludes = ["/*", *(f"!/{name}" for name in sorted(kept)), "__pycache__"]
        return {"working_dir": str(results.ROOT), "excludes": excludes}

    def __exit__(self, *exception: object) -> None:
        import ray

        if self._ours:
            ray.shutdown()

    @property
    def how(self) -> str:
        cpus, gpus = sum(c for c, _ in self._nodes), sum(g for _, g in self._nodes)
        room = max(self.at_once(None, alone) for alone in (True, False))
        there = f"machines: {len(self._nodes)}, CPUs: {cpus:.0f}, GPUs: {gpus:.0f}"
        return f"on Ray ({there}), room for {room} at once"

    def at_once(self, jobs: int | None, alone: bool) -> int:
        if alone and self._address == OWN_CLUSTER:
            return 1
        demands = [self.demand(p) for p in self._points if p.alone == alone]
        return jobs or max((self._fit(**demand) for demand in demands), default=1)

    def _fit(self, num_cpus: float, num_gpus: int) -> int:
        each = [
            min(cpus // num_cpus, gpus // num_gpus if num_gpus else cpus)
            for cpus, gpus in self._nodes
        ]
        return max(1, int(sum(each)))

    def demand(self, point: Point) -> dict[str, Any]:
        """The CPUs and GPUs that a point asks Ray for."""
        gpus = int(self._gpus and point.device.startswith(("cuda", "auto")))
        fit = [cpus for cpus, there in self._nodes if there >= gpus]
        most, threads = max([1, *fit]), float(point.identity.parts["threads"])
        return {"num_cpus": most if point.alone else min(most, threads), "num_gpus": gpus}

    def timing_lock(self) -> contextlib.AbstractContextManager[bool]:
        """This machine's, as its other runners are unknown to a cluster of our own; in one that
        runners share, `demand` sees to it."""
        own = self._address == OWN_CLUSTER
        return Here.timing_lock() if own else contextlib.nullcontext(True)

    @contextlib.contextmanager
    def worker(self, number: int) -> Iterator[Execute]:
        yield partial(self._run, number)

    def kill(self) -> None:
        self._over.set()

    def task_of(self, point: Point) -> Task:
        at = point.notebook.relative_to(results.ROOT)
        forked = self._forked and point.identity.parts["device"] == "cpu"
        point = replace(point, notebook=at)
        return Task(point, self._modules, forked, self._code, self._environment)

    def _run(self, number: int, point: Point, attempt: Path, watch: Watch) -> str:
        """Run a point into an attempt folder; up to RETRIES times again if its machine is lost.
        Returns the machine's name. Raises Failure."""
        from ray import exceptions as ray

        lost = (
            ray.WorkerCrashedError, ray.NodeDiedError, ray.ObjectLostError,
            ray.LocalRayletDiedError, ConnectionError,
        )  # fmt: skip
        for tries in range(1, RETRIES + 2):
            try:
                outcome = self._outcome(point, number, watch)
                break
            except lost as e:
                why = f"its machine or process was lost (try {tries} of {RETRIES + 1}): {_line(e)}"
                if tries <= RETRIES:
                    self.say(f"{point.label}: {why}; trying again")
            except ray.OutOfMemoryError as e:
                raise Failure("oom", _line(e)) from e
            except ray.RayError as e:
                raise Failure("error", f"Ray: {_line(e)}") from e
        else:
            raise Failure("lost", why)
        unpack(outcome.files, attempt)
        if outcome.failure:
            kind, message, trace = outcome.failure
            kind = "lost" if kind == "disk" else kind  # which is not the runner's
            raise Failure(kind, f"on {outcome.node}: {message}") from RuntimeError(trace)
        return outcome.node

    def _outcome(self, point: Point, number: int, watch: Watch) -> Outcome:
        """Run a point once and wait for its outcome."""
        import ray

        self._refresh()
        options = {"scheduling_strategy": "SPREAD", "name": point.label, **self.demand(point)}
        future = self._task.options(**options).remote(self.task_of(point), self._mailbox, number)
        watch("waiting for a machine")
        while not ray.wait([future], timeout=0.5)[0]:
            if self._over.is_set():
                ray.cancel(future, force=True)
                ray.wait([future], timeout=5)
                raise Failure("interrupted", "stopped")
            with contextlib.suppress(ray.exceptions.RayError):
                if message := ray.get(self._mailbox.fetch.remote(number), timeout=5):
                    watch(message)
        outcome: Outcome = ray.get(future)
        return outcome


def _line(e: Exception) -> str:
    """The first 200 characters of a Ray error, on one line; of its cause if raised remotely."""
    return " ".join(str(getattr(e, "cause", None) or e).split())[:200] or type(e).__name__


def _check_port(address: str) -> None:
    """Raise UserError if nobody listens at the address: Ray itself would wait for a minute."""
    if match := _ADDRESS.fullmatch(address):
        host, port = match[2].strip("[]"), int(match[3])
        try:
            socket.create_connection((host, port), timeout=5).close()
        except OSError as e:
            raise UserError(f"cannot reach Ray at {address}: {e.strerror or e}") from e
