"""Points as jobs of a Slurm site, each submitted by submitit.

Submitit keeps a job and its answer in a folder that the machine of the job must see, too: one below
the home folder, removed when the job is over. The site's scheduler decides where and when.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import math
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from specexp.errors import UserError
from specexp.lab import errand
from specexp.lab.execute import Failure, Watch
from specexp.lab.grid import Point

AT_ONCE, ASK_S = 16, 30.0
LONGER_MIN = 10  # what a job gets beyond its point's own limit: kernels start in it


class OnSlurm:
    """`asked`: options of sbatch for every job, `partition=gpu,gpus-per-node=1`.

    A job gets one CPU, or, for a point that times something, a machine of its own, unless
    `together`; and one GPU if the point's device is one. Raises UserError.
    """

    def __init__(
        self, points: Sequence[Point], asked: str = "", *, forked: bool = True,
        together: bool = False, say: Callable[[str], None] = lambda said: None,
    ) -> None:  # fmt: skip
        if importlib.util.find_spec("submitit") is None:
            raise UserError('points on Slurm need submitit: pip install "specexp[slurm]"')
        if shutil.which("sbatch") is None or shutil.which("srun") is None:
            raise UserError("there is no sbatch here: run this where jobs of Slurm are submitted")
        self.asked: dict[str, str] = {}
        for option in filter(None, asked.split(",")):
            name, _, value = option.partition("=")
            spelt = name.replace("-", "_")  # as submitit has it; Slurm has dashes
            if not (spelt.isidentifier() and value):
                raise UserError(
                    f"{name!r} is no option for Slurm: write slurm:partition=gpu,account=me"
                )
            self.asked[spelt] = value
        self.say = say
        self._errands = errand.Errands(points, forked, together)
        self._over = threading.Event()

    def __enter__(self) -> OnSlurm:
        """Asks Slurm if it would take such a job, and makes the folder."""
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in self.asked.items()]
        answer = subprocess.run(
            ["sbatch", "--test-only", *flags, "--wrap=true"], capture_output=True, text=True
        )
        if answer.returncode:
            raise UserError(f"Slurm refuses these jobs: {' '.join(answer.stderr.split())[:300]}")
        home = Path.home() / ".cache" / "specexp"
        home.mkdir(parents=True, exist_ok=True)
        self._folder = tempfile.mkdtemp(prefix="slurm-", dir=home)
        return self

    def __exit__(self, *exception: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def how(self) -> str:
        return f"on Slurm, at most {AT_ONCE} jobs at once"

    def at_once(self, jobs: int | None, timed: bool) -> int:
        return jobs or AT_ONCE

    def alone(self) -> contextlib.AbstractContextManager[bool]:
        return contextlib.nullcontext(True)  # `demand` sees to it

    @contextlib.contextmanager
    def seat(self, number: int) -> Iterator[errand.Seat]:
        yield errand.Seat(self, number)

    def kill(self) -> None:
        self._over.set()

    def demand(self, point: Point) -> dict[str, Any]:
        """What sbatch is asked for; what the user asked for comes first."""
        alone, device = self._errands.alone(point), str(point.params.get("device", "cpu"))
        wanted: dict[str, Any] = {
            "job_name": "specexp", "time": math.ceil(point.timeout_s / 60) + LONGER_MIN,
        }  # fmt: skip
        wanted |= {"exclusive": True} if alone else {"cpus_per_task": 1}
        wanted |= {"gpus_per_node": 1} if device.startswith("cuda") else {}
        return wanted | self.asked

    def carry(self, point: Point, seat: int, watch: Watch) -> errand.Answer:
        import submitit

        wanted, extra = self.demand(point), {}
        for name in set(self.asked) - set(submitit.SlurmExecutor._valid_parameters()):
            extra[name.replace("_", "-")] = wanted.pop(name)
        executor = submitit.SlurmExecutor(tempfile.mkdtemp(dir=self._folder), max_num_timeout=0)
        executor.update_parameters(**wanted, additional_parameters=extra)
        try:
            job = executor.submit(errand.run, self._errands.of(point))
            return self._wait(job, watch)
        except submitit.core.utils.FailedJobError as e:
            raise Failure("error", f"Slurm: {_line(e)}") from e
        except submitit.core.utils.UncompletedJobError as e:
            raise errand.Lost(f"job {job.job_id} ended {job.state}") from e
        finally:
            shutil.rmtree(executor.folder, ignore_errors=True)

    def _wait(self, job: Any, watch: Watch) -> errand.Answer:
        """Slurm itself is asked now and then; otherwise the folder says that a job is over."""
        begin = time.monotonic()
        for ask in itertools.count(1):
            while time.monotonic() < begin + ask * ASK_S and not job.done():
                if self._over.wait(0.5):
                    job.cancel(check=False)
                    raise Failure("interrupted", "stopped")
                watch(f"job {job.job_id}, {job.state.lower()}")
            if job.done(force_check=True):
                break
        answer: errand.Answer = job.result()
        return answer


def _line(e: Exception) -> str:
    """The error of a command, or the last line of the traceback that a job has left."""
    parts = str(e).split("-" * 22)
    said = (parts[1] if len(parts) > 2 else parts[0]).strip().splitlines()
    return said[-1].strip()[:200] if said else type(e).__name__
