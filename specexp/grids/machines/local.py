"""Where points run. `Here`: on this machine; `ray.OnRay`: on those of a Ray cluster."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from specexp.grids import kernels, notebooks
from specexp.grids.execute import Watch, execute
from specexp.grids.points import Point
from specexp.tracking import results

if TYPE_CHECKING:
    from specexp.grids.machines.ray import OnRay

LOCKS = Path(tempfile.gettempdir(), f"specexp-{os.getuid()}")
# Runs a point into an attempt folder; returns the machine's name. Raises Failure.
Execute: TypeAlias = Callable[[Point, Path, Watch], str]
Machines: TypeAlias = "Here | OnRay"  # where points run; a context manager around all of them


class Here:
    """This machine. With several GPUs, worker i sees only GPU i, unless a point names a device."""

    def __init__(self, points: Sequence[Point], forked: bool = True) -> None:
        modules = notebooks.modules_of(p.notebook for p in points)
        on_cpu = any(p.identity.parts.get("device") == "cpu" for p in points)
        why = "all points are on a GPU" * (not on_cpu) if forked else "as requested"
        self._kernels = kernels.Kernels(modules, why)
        self._workers: dict[int, kernels.Worker] = {}

    @property
    def how(self) -> str:
        """Where points run, in words."""
        return f"in {self._kernels.how}"

    def at_once(self, jobs: int | None, alone: bool) -> int:
        """How many points run at once, given `jobs` or None. `alone`: each needs a machine."""
        return 1 if alone else jobs or 1

    @staticmethod
    def timing_lock() -> contextlib.AbstractContextManager[bool]:
        """A lock around a timed point, for all stores of this user here: False if it is held."""
        with contextlib.suppress(OSError):
            LOCKS.mkdir(mode=0o700, exist_ok=True)
        own = results.is_folder(LOCKS) and LOCKS.stat().st_uid == os.getuid()  # else the store's
        return results.claim(f"timing-{socket.gethostname()}", LOCKS if own else None)

    def __enter__(self) -> Here:
        self._kernels.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._kernels.__exit__(*exception)

    @contextlib.contextmanager
    def worker(self, number: int) -> Iterator[Execute]:
        """Worker 0, 1, 2 ..., each for one thread."""
        with self._kernels.worker() as worker:
            self._workers[number] = worker
            yield partial(_run, worker, number)
        del self._workers[number]

    def kill(self) -> None:
        """Kill every running point at once. May be called from any thread."""
        for worker in list(self._workers.values()):
            worker.kill()


def _run(worker: kernels.Worker, number: int, point: Point, attempt: Path, watch: Watch) -> str:
    named = point.device.startswith("cuda:")
    execute(point, attempt, worker, watch, {} if named else _visible(number))
    return "this machine"


def _visible(number: int) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES for this worker; empty if there is at most one GPU."""
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        return {}
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    devices = named.split(",") if named else [str(i) for i in range(count)]
    return {"CUDA_VISIBLE_DEVICES": devices[number % count]}
