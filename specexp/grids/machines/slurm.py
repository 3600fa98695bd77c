"""Runs points on a Slurm site, each as a job submitted by submitit.

Submitit exchanges task and outcome through a folder that the job's machine must see, too: one below
the home folder, removed when the job is over. Slurm alone schedules the jobs.
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
from specexp.grids.execute import Failure, Watch
from specexp.grids.machines import worker
from specexp.grids.points import Point

AT_ONCE, ASK_S = 16, 30.0
LONGER_MIN = 10  # minutes that a job gets beyond its point's timeout, to start and to pack up


class OnSlurm:
    """Runs points as Slurm jobs. `asked`: options of sbatch for every job, such as
    `partition=gpu,gpus-per-node=1`; they override the defaults.

    A timed point gets a machine of its own unless `together`; others get one CPU. Both get one GPU
    if the point's device is one. Raises UserError.
    """

    def __init__(
        self, points: Sequence[Point], asked: str = "", *, forked: bool = True,
        together: bool = False, say: Callable[[str], None] = lambda said: None,
    ) -> None:  # fmt: skip
        if importlib.util.find_spec("submitit") is None:
            raise UserError('to run on Slurm install submitit: pip install "specexp[slurm]"')
        if shutil.which("sbatch") is None or shutil.which("srun") is None:
            raise UserError("sbatch or srun is missing: run this on a Slurm login node")
        self.asked: dict[str, str] = {}
        for option in filter(None, asked.split(",")):
            name, _, value = option.partition("=")
            spelt = name.replace("-", "_")  # submitit's spelling; Slurm's has dashes
            if not (spelt.isidentifier() and value):
                raise UserError(
                    f"{option!r} is not a Slurm option: write slurm:partition=gpu,account=me"
                )
            self.asked[spelt] = value
        self.say = say
        self._tasks = worker.Tasks(points, forked, together)
        self._over = threading.Event()

    def __enter__(self) -> OnSlurm:
        """Ask Slurm whether it accepts such jobs, and make the folder for them."""
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in self.asked.items()]
        answer = subprocess.run(
            ["sbatch", "--test-only", *flags, "--wrap=true"], capture_output=True, text=True
        )
        if answer.returncode:
            raise UserError(f"Slurm rejects these jobs: {' '.join(answer.stderr.split())[:300]}")
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
        return contextlib.nullcontext(True)  # ensured by `demand`

    @contextlib.contextmanager
    def seat(self, number: int) -> Iterator[worker.Seat]:
        yield worker.Seat(self, number)

    def kill(self) -> None:
        self._over.set()

    def demand(self, point: Point) -> dict[str, Any]:
        """The options of sbatch for a point; the user's own take precedence."""
        alone, device = self._tasks.alone(point), str(point.params.get("device", "cpu"))
        wanted: dict[str, Any] = {
            "job_name": "specexp", "time": math.ceil(point.timeout_s / 60) + LONGER_MIN,
        }  # fmt: skip
        wanted |= {"exclusive": True} if alone else {"cpus_per_task": 1}
        wanted |= {"gpus_per_node": 1} if device.startswith("cuda") else {}
        return wanted | self.asked

    def run_point(self, point: Point, seat: int, watch: Watch) -> worker.Outcome:
        import submitit

        wanted, extra = self.demand(point), {}
        for name in set(self.asked) - set(submitit.SlurmExecutor._valid_parameters()):
            extra[name.replace("_", "-")] = wanted.pop(name)
        executor = submitit.SlurmExecutor(tempfile.mkdtemp(dir=self._folder), max_num_timeout=0)
        executor.update_parameters(**wanted, additional_parameters=extra)
        try:
            job = executor.submit(worker.run, self._tasks.of(point))
            return self._wait(job, watch)
        except submitit.core.utils.FailedJobError as e:
            raise Failure("error", f"Slurm: {_line(e)}") from e
        except submitit.core.utils.UncompletedJobError as e:
            raise worker.WorkerLost(f"job {job.job_id} ended {job.state}") from e
        finally:
            shutil.rmtree(executor.folder, ignore_errors=True)

    def _wait(self, job: Any, watch: Watch) -> worker.Outcome:
        """Wait for a job. Submitit's folder shows its end; Slurm itself is asked every ASK_S, as a
        lost job leaves nothing there."""
        begin = time.monotonic()
        for ask in itertools.count(1):
            while time.monotonic() < begin + ask * ASK_S and not job.done():
                if self._over.wait(0.5):
                    job.cancel(check=False)
                    raise Failure("interrupted", "stopped")
                watch(f"job {job.job_id}, {job.state.lower()}")
            if job.done(force_check=True):
                break
        answer: worker.Outcome = job.result()
        return answer


def _line(e: Exception) -> str:
    """The error of a command, or the last line of a job's traceback."""
    parts = str(e).split("-" * 22)
    said = (parts[1] if len(parts) > 2 else parts[0]).strip().splitlines()
    return said[-1].strip()[:200] if said else type(e).__name__
