"""Points on Slurm: jobs of a fake site, four small scripts, and what they ask it for."""

import contextlib
import importlib.util
import os
import signal
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import submitit
from test_runner import go, statuses, until

from specexp.errors import UserError
from specexp.grids.execute import Failure
from specexp.grids.machines import local, slurm
from specexp.grids.machines.slurm import OnSlurm
from specexp.tracking import runs

NODE = socket.gethostname()
SITE = {
    "sbatch": """
if "--test-only" in sys.argv:
    sys.exit("Invalid partition name" if "--partition=nowhere" in sys.argv else 0)
job = str(len(list(site.glob("*.sh"))) + 1)
script = site / f"{job}.sh"
script.write_text(pathlib.Path(sys.argv[1]).read_text())
told = {"SLURM_JOB_ID": job, "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_NODEID": "0",
        "SLURM_JOB_NODELIST": "node1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
end = f"if bash {script}; then echo COMPLETED; else echo FAILED; fi > {site / job}.end"
quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
group = subprocess.Popen(
    ["bash", "-c", end], env=os.environ | told, start_new_session=True, **quiet
)
(site / f"{job}.pid").write_text(str(group.pid))
print("Submitted batch job", job)
""",
    "srun": """
at = next(i for i, word in enumerate(sys.argv) if "python" in word)
log = sys.argv[sys.argv.index("--output") + 1]
log = log.replace("%j", os.environ["SLURM_JOB_ID"]).replace("%t", "0")
with open(log, "w") as out:
    sys.exit(subprocess.run(sys.argv[at:], stdout=out, stderr=out).returncode)
""",
    "sacct": """
print("JobID|State|NodeList")
for job in [word for word in sys.argv if word.isdigit()]:
    end = site / f"{job}.end"
    print(f"{job}|{end.read_text().strip() if end.exists() else 'RUNNING'}|node1")
""",
    "scancel": """
os.killpg(int((site / f"{sys.argv[1]}.pid").read_text()), 9)
(site / f"{sys.argv[1]}.end").write_text("CANCELLED")
""",
}


@pytest.fixture
def site(tmp_path, monkeypatch):
    folder = tmp_path / "site"
    folder.mkdir()
    head = f"#!{sys.executable}\nimport os, pathlib, subprocess, sys\n"
    for name, text in SITE.items():
        (folder / name).write_text(f"{head}site = pathlib.Path({str(folder)!r})\n{text}")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(slurm, "ASK_S", 2.0)
    submitit.SlurmJob.watcher.clear()  # every site numbers its jobs from 1
    yield folder
    started = [int(pid.read_text()) for pid in folder.glob("*.pid")]
    until(lambda: not any(map(alive, started)), 10)


def alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def asked(site: Path, job: int) -> set[str]:
    lines = (site / f"{job}.sh").read_text().splitlines()
    return {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")}


def test_points_run_as_jobs_and_failures_say_why(store, points, site, tmp_path):
    todo = points(how=["well", "raises"])
    place = local.of("slurm:partition=short,reservation=mine", todo, together=True)
    code, said = go(todo, place=place, together=True)
    assert code == 1
    assert "2 of 2 points to run, on Slurm, at most 16 jobs at once" in said
    wanted = {p.run_key: "FINISHED" if p.params["how"] == "well" else "FAILED" for p in todo}
    assert statuses() == wanted
    assert set(runs.runs()["tags.where"]) == {NODE}
    [error] = (store / "failed").glob("*/error.txt")
    assert error.read_text().startswith(f"error: on {NODE}: ZeroDivisionError")
    assert {"partition=short", "reservation=mine", "time=12", "cpus-per-task=1"} <= asked(site, 1)
    assert not list((tmp_path / "home" / ".cache" / "specexp").iterdir())


@pytest.mark.slow
def test_a_job_that_is_lost_is_asked_for_again(store, points, site):
    todo = points(how=["slow"])
    heard: list[str] = []
    done: list[int] = []
    place = OnSlurm(todo, say=heard.append)
    runner = threading.Thread(target=lambda: done.append(go(todo, place=place)[0]))
    runner.start()
    until(lambda: (site / "1.pid").exists())
    os.killpg(int((site / "1.pid").read_text()), signal.SIGKILL)
    (site / "1.end").write_text("NODE_FAIL")
    runner.join(120)
    assert done == [0]
    assert statuses() == {todo[0].run_key: "FINISHED"}
    [line] = heard
    assert "job 1 ended NODE_FAIL" in line


def test_what_is_stopped_is_cancelled(points, site):
    [point] = points(how=["hangs"])
    with OnSlurm([point]) as place:
        threading.Timer(1.0, place.kill).start()
        with pytest.raises(Failure, match="stopped"):
            place.run_point(point, 0, lambda said: None)
    assert (site / "1.end").read_text() == "CANCELLED"


def test_what_slurm_is_asked_for(points, site):
    [point] = points(x=[1])
    timed = replace(point, timed=True)
    on_gpu = replace(timed, params=point.params | {"device": "cuda"})
    usual = {"job_name": "specexp", "time": 12}
    assert OnSlurm([timed]).demand(timed) == usual | {"exclusive": True}
    assert OnSlurm([timed], together=True).demand(timed) == usual | {"cpus_per_task": 1}
    wanted = usual | {"exclusive": True, "gpus_per_node": 1}
    assert OnSlurm([on_gpu]).demand(on_gpu) == wanted
    own = OnSlurm([on_gpu], "gpus_per_node=2,time=60,mem=8GB")
    assert own.demand(on_gpu) == wanted | {"gpus_per_node": "2", "time": "60", "mem": "8GB"}
    assert OnSlurm([on_gpu], "gpus-per-node=2,time=60,mem=8GB").demand(on_gpu) == own.demand(on_gpu)
    assert own.at_once(None, timed=True) == 16
    assert own.at_once(3, timed=False) == 3


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("slurm:gpu", "'gpu' is not a Slurm option: write slurm:partition=gpu"),
        ("slurm:a b=1", "'a b=1' is not a Slurm option"),
        ("slurm:time=", "'time=' is not a Slurm option"),
    ],
)
def test_what_cannot_be_asked_is_said_at_once(points, site, name, said):
    with pytest.raises(UserError, match=said):
        local.of(name, points(x=[1]))


def test_a_site_that_refuses_is_heard_before_anything_runs(store, points, site):
    todo = points(x=[1, 2])
    with pytest.raises(UserError, match="Slurm rejects these jobs: Invalid partition name"):
        go(todo, place=local.of("slurm:partition=nowhere", todo))
    assert not list(site.glob("*.sh"))


def test_what_slurm_needs_is_named(points, monkeypatch):
    todo = points(x=[1])
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="sbatch or srun is missing"):
        OnSlurm(todo)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'pip install "specexp\[slurm\]"'):
        OnSlurm(todo)
