"""Runs points on a Ray cluster, each as a Ray task.

Ray alone schedules and queues them. Workers run the code of this checkout, which is sent to them
unless the cluster is one started here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from specexp.errors import UserError
from specexp.grids import notebooks
from specexp.grids.execute import Watch
from specexp.grids.machines import worker
from specexp.grids.machines.local import Worker
from specexp.grids.machines.worker import Outcome, Task
from specexp.grids.points import Point
from specexp.grids.progress import Failure
from specexp.tracking import provenance, results

OWN, HERE = "ray", "auto"
RETRIES = 3  # of a point whose machine was lost
STARTUP_S = 120.0
_ADDRESS = re.compile(r"(ray://)?([\w.-]+|\[[0-9a-fA-F:]+\]):(\d+)")


class Mailbox:
    """An actor that keeps the last progress message of every worker until it is fetched."""

    def __init__(self) -> None:
        self._messages: dict[int, str] = {}

    def say(self, number: int, message: str) -> None:
        self._messages[number] = message

    def fetch(self, number: int) -> str:
        return self._messages.pop(number, "")


def task(todo: Task, mailbox: Any, number: int) -> Outcome:
    """Run a task on a worker."""
    return worker.run(todo, lambda message: mailbox.say.remote(number, message))


class OnRay:
    """Runs points on a Ray cluster. `address`: `ray` starts one on this machine, `auto` joins the
    one that runs here, HOST:PORT and ray://HOST:PORT join others. `say` reports lost machines.

    A point that needs a machine to itself asks for all CPUs of one of the largest, others for a CPU
    for each of their threads. Both ask for one GPU if their device is one, or is `auto` and the
    cluster has any. Raises UserError.
    """

    def __init__(
        self, points: Sequence[Point], address: str = OWN, *, forked: bool = True,
        say: Callable[[str], None] = lambda message: None,
    ) -> None:  # fmt: skip
        if address not in (OWN, HERE) and not _ADDRESS.fullmatch(address):
            raise UserError(
                f"cannot run points on {address!r}: give here, ray, auto, HOST:6379 or "
                "ray://HOST:10001 (on Slurm, let every job run this command: notebooks/README.md)"
            )
        if importlib.util.find_spec("ray") is None:
            raise UserError('to run on Ray install it: pip install "specexp[ray]"')
        for point in points:
            if re.fullmatch(r"cuda:[1-9]\d*", _device(point)):
                raise UserError(f"{point.label}: a point on Ray sees one GPU; write device: cuda")
            if not point.notebook.is_relative_to(results.ROOT):
                raise UserError(
                    f"{point.notebook} is outside {results.ROOT}: workers only get what is in there"
                )
        self.say, self._points, self._forked = say, points, forked
        self._address = os.environ.get("RAY_ADDRESS", OWN) if address == OWN else address
        self._over = threading.Event()
        self._modules = notebooks.modules_of(sorted({p.notebook for p in points}))
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
        needy = [p for p in self._points if _device(p).startswith("cuda")]
        self._task = ray.remote(max_retries=0)(task)
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
        if self._address == OWN:
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
        gpus = int(self._gpus and _device(point).startswith(("cuda", "auto")))
        fit = [cpus for cpus, there in self._nodes if there >= gpus]
        most, threads = max([1, *fit]), float(point.around.parts["threads"])
        return {"num_cpus": most if point.alone else min(most, threads), "num_gpus": gpus}

    def alone(self) -> contextlib.AbstractContextManager[bool]:
        return contextlib.nullcontext(True)  # ensured by `demand`

    @contextlib.contextmanager
    def worker(self, number: int) -> Iterator[Worker]:
        yield partial(self._run, number)

    def kill(self) -> None:
        self._over.set()

    def task_of(self, point: Point) -> Task:
        at = point.notebook.relative_to(results.ROOT)
        return Task(
            replace(point, notebook=at), self._modules, self._forked, self._code, self._environment
        )

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
        worker.unpack(outcome.files, attempt)
        if outcome.failure:
            kind, message, trace = outcome.failure
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


def _device(point: Point) -> str:
    return str(point.params.get("device", "cpu"))


def _check_port(address: str) -> None:
    """Raise UserError if nobody listens at the address: Ray itself would wait for a minute."""
    if match := _ADDRESS.fullmatch(address):
        host, port = match[2].strip("[]"), int(match[3])
        try:
            socket.create_connection((host, port), timeout=5).close()
        except OSError as e:
            raise UserError(f"cannot reach Ray at {address}: {e.strerror or e}") from e
