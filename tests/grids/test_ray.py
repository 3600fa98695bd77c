"""Points on Ray: each runs once, whatever dies, and its files stay in its folder."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from support.processes import alive, until
from test_runner import go, statuses

from specexp.errors import UserError
from specexp.grids import points as grid
from specexp.grids.machines import ray as cluster
from specexp.grids.machines.local import Here
from specexp.grids.machines.ray import OnRay, Outcome, Task, packed, unpack
from specexp.grids.progress import Failure
from specexp.tracking import provenance, runs

NODE = socket.gethostname()
ray = pytest.mark.ray


@pytest.fixture(scope="session")
def address():
    """A cluster with two CPUs, which this process has joined."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        for tries_left in reversed(range(20)):  # Ray gives itself 30 s, however busy the machine is
            try:
                ray.init("local", num_cpus=2, include_dashboard=False, logging_level="error",
                         log_to_driver=False)  # fmt: skip
                break
            except Exception:
                ray.shutdown()
                if not tries_left:
                    raise
        yield ray.get_runtime_context().gcs_address
        ray.shutdown()


def working(label: str) -> psutil.Process:
    """The process of the worker that runs the point of this label."""
    named = [(" ".join(p.info["cmdline"] or ()), p) for p in psutil.process_iter(["cmdline"])]
    [worker] = [p for name, p in named if name.strip() == f"ray::{label}"]
    return worker


def overheard(machines: OnRay, file: Path) -> OnRay:
    """The same machines, which also write their points' progress to the file."""
    outcome_of = machines._outcome

    def heard(point, number, watch):
        def write(said):
            with file.open("a") as told:
                told.write(f"{point.label} {said}\n")
            watch(said)

        return outcome_of(point, number, write)

    file.touch()
    machines._outcome = heard
    return machines


@ray
@pytest.mark.slow
def test_ray_runs_points_once_and_reports_failures(store, points, address):
    todo = points(together=True, how=["well", "raises"])
    code, said = go(todo, machines=OnRay(todo))
    assert code == 1
    assert (
        "2 of 2 points to run, on Ray (machines: 1, CPUs: 2, GPUs: 0), room for 2 at once" in said
    )
    wanted = {p.run_key: "FINISHED" if p.params["how"] == "well" else "FAILED" for p in todo}
    assert statuses() == wanted
    frame = runs.runs()
    assert set(frame["tags.where"]) == {NODE}
    for key, status in wanted.items():
        if status == "FINISHED":
            names = {p.name for p in (store / "results" / key).iterdir()}
            assert {"result.json", "notebook.ipynb", "notebook.html", "log.txt"} <= names
        else:
            [kept] = (store / "failed").glob(f"{key}-*")
            error = (kept / "error.txt").read_text()
            assert error.startswith(f"error: on {NODE}: ZeroDivisionError")
            assert "PapermillExecutionError" in error
            assert (kept / "notebook.html").exists()
    code, said = go(todo, machines=OnRay(todo))
    assert "0 of 2 points to run" in said


@ray
@pytest.mark.slow
def test_killed_ray_worker_loses_nothing(store, points, address, tmp_path):
    todo = points(how=["slow"])
    heard: list[str] = []
    done: list[tuple[int, str]] = []
    machines = overheard(OnRay(todo, say=heard.append), tmp_path / "told")
    runner = threading.Thread(target=lambda: done.append(go(todo, machines=machines)))
    runner.start()
    until(lambda: f"slow on {NODE}, cell 4 of 5" in (tmp_path / "told").read_text())
    worker = working(todo[0].label)
    below = worker.children(recursive=True)
    worker.kill()
    runner.join()
    assert [code for code, _ in done] == [0]
    assert statuses() == {todo[0].run_key: "FINISHED"}
    assert not list((store / "failed").glob("*"))
    [line] = heard
    assert "lost (try 1 of 4)" in line
    until(lambda: not any(alive(p) for p in below))


@ray
@pytest.mark.slow
def test_ctrl_c_leaves_no_kernel_on_the_cluster(store, points, address, tmp_path):
    """The runner joins from outside, so that its code is sent to the workers."""
    todo = points(how=["well", "hangs"])
    code = (
        f"import sys; sys.path[:0] = {[str(Path(__file__).parents[n]) for n in (0, 1)]}; "
        "from pathlib import Path; from test_ray import OnRay, grid, overheard; "
        "from specexp.grids import runner; from specexp.terminal import Terminal; "
        f"points = grid.load([{str(tmp_path / 'trivial.yaml')!r}]); "
        f"machines = overheard(OnRay(points, {address!r}), Path({str(tmp_path / 'told')!r})); "
        "sys.exit(runner.run(points, Terminal(), machines=machines))"
    )
    runner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    told = tmp_path / "told"
    until(lambda: told.exists() and f"hangs on {NODE}, cell 4 of 5" in told.read_text())
    worker = working(todo[1].label)
    assert "_ray_pkg" in worker.cwd()
    below = worker.children(recursive=True)
    runner.send_signal(signal.SIGINT)
    runner.send_signal(signal.SIGINT)
    assert runner.wait() == 130
    assert statuses() == {todo[0].run_key: "FINISHED", todo[1].run_key: "KILLED"}
    [commit] = runs.runs()["tags.git.commit"]
    assert commit == provenance.tags()["git.commit"]
    until(lambda: not any(alive(p) for p in [worker, *below]))


@ray
def test_workers_get_the_runners_switches(points, monkeypatch):
    native, graphs, *_ = provenance.SWITCHES
    monkeypatch.setenv(native, "off")
    monkeypatch.delenv(graphs, raising=False)
    [point] = points(x=[1])
    told = OnRay([point]).task_of(point).environment
    assert (told[native], told[graphs]) == ("off", "")


@ray
def test_machine_lost_repeatedly_is_a_lost_point(points, monkeypatch):
    asked: list[grid.Point] = []

    def cut(point, number, watch):
        asked.append(point)
        raise ConnectionError("power cut")

    heard: list[str] = []
    [point] = points(x=[1])
    machines = OnRay([point], say=heard.append)
    monkeypatch.setattr(machines, "_outcome", cut)
    with (
        machines.worker(0) as run,
        pytest.raises(Failure, match=r"lost \(try 4 of 4\): power cut") as found,
    ):
        run(point, Path("nowhere"), print)
    assert found.value.kind == "lost"
    assert len(asked) == 4
    assert len(heard) == 3


@ray
def test_resources_requested_of_ray(points):
    """Timed points get one of the largest machines, others a CPU, both a GPU if they need one."""
    [point], [beside] = points(x=[1]), points(together=True, x=[1])

    def cluster_of(nodes, point=point):
        made = OnRay([point], cluster.RUNNING_CLUSTER)
        made._nodes, made._gpus = nodes, any(gpus for _, gpus in nodes)
        return made

    cpus = [(4.0, 0.0), (16.0, 0.0), (16.0, 0.0)]
    alone, together = cluster_of(cpus), cluster_of(cpus, beside)
    assert alone.demand(point) == {"num_cpus": 16, "num_gpus": 0}
    assert alone.at_once(None, alone=True) == 2
    assert alone.at_once(7, alone=True) == 7
    assert together.demand(beside) == {"num_cpus": 1, "num_gpus": 0}
    assert together.at_once(None, alone=False) == 36
    mixed = [(64.0, 0.0), (16.0, 4.0), (8.0, 4.0)]
    assert cluster_of(mixed).demand(point)["num_gpus"] == 1, "a notebook may name no device"
    for device, gpus in (("cpu", 0), ("auto", 1), ("cuda", 1), ("cuda:0", 1)):
        point.params["device"] = beside.params["device"] = device
        assert cluster_of(mixed).demand(point) == {"num_cpus": 16 if gpus else 64, "num_gpus": gpus}
        assert cluster_of(mixed).at_once(None, alone=True) == 1
        assert cluster_of(mixed, beside).at_once(None, alone=False) == (8 if gpus else 88)


@ray
def test_runners_with_clusters_of_their_own_time_in_turn(store, points, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    todo = points(x=[1])
    first, second = OnRay(todo), OnRay(todo)
    assert first.at_once(7, alone=True) == 1
    for other in (second, Here(todo)):
        with first.timing_lock() as ours, other.timing_lock() as theirs:
            assert (ours, theirs) == (True, False)
    shared = OnRay(todo, cluster.RUNNING_CLUSTER)
    with first.timing_lock(), shared.timing_lock() as theirs:
        assert theirs, "that cluster gives the point a machine to itself"


@ray
def test_impossible_ray_requests_are_refused_first(points, monkeypatch, tmp_path):
    todo = points(x=[1])
    for name in ("rey", "host", "ray://host", "http://host:1", "host:port"):
        with pytest.raises(UserError, match="cannot run points on"):
            OnRay(todo, name)
    with socket.socket() as taken:  # bound but not listening, so that nobody else listens there
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        for name in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
            with pytest.raises(UserError, match="refused"), OnRay(todo, name):
                pass
    todo[0].params["device"] = "cuda:1"
    with pytest.raises(UserError, match="one GPU"):
        OnRay(todo)
    todo[0].params["device"] = "cuda"
    monkeypatch.setattr(cluster.results, "ROOT", tmp_path)
    with pytest.raises(UserError, match="is outside"):
        OnRay(todo)
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install"):
        OnRay(todo)


@ray
def test_worker_with_other_code_refuses(points, tmp_path, monkeypatch):
    [point] = points(x=[1])
    answer = cluster.run(Task(point, (), False, "another digest", {}))
    assert answer == Outcome(NODE, {}, answer.failure)
    kind, message, _ = answer.failure
    assert kind == "error"
    assert "differs from the runner" in message
    machines = OnRay([point])
    monkeypatch.setattr(machines, "_outcome", lambda *asked: answer)
    with (
        machines.worker(0) as run,
        pytest.raises(Failure, match=f"on {NODE}: this machine imported code"),
    ):
        run(point, tmp_path, print)


@ray
def test_full_disk_of_a_worker_fails_its_point_alone(points, tmp_path, monkeypatch):
    [point] = points(x=[1])
    machines = OnRay([point])
    full = Outcome("far", {}, ("disk", "No space left on device", ""))
    monkeypatch.setattr(machines, "_outcome", lambda *asked: full)
    with machines.worker(0) as run, pytest.raises(Failure, match="on far: No space left") as found:
        run(point, tmp_path, print)
    assert found.value.kind == "lost"


def test_packed_folder_survives_the_way_back(tmp_path, monkeypatch):
    there, here = tmp_path / "there", tmp_path / "here"
    (there / "figures").mkdir(parents=True)
    here.mkdir()
    written = {"a": b"", "figures/b.png": os.urandom(1000), "c": b"x" * 5000}
    for name, content in written.items():
        (there / name).write_bytes(content)
    data, failure = packed(there, None)
    assert failure is None
    unpack(data, here)
    assert {str(p.relative_to(here)): p.read_bytes() for p in here.rglob("*") if p.is_file()} == (
        written
    )
    monkeypatch.setattr(cluster, "MOST_BYTES", 2000)
    data, failure = packed(there, None)
    assert failure is not None
    assert failure[0] == "invalid-result"
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    unpack(data, fresh)
    assert {p.name for p in fresh.rglob("*") if p.is_file()} == {"a", "b.png"}
    assert packed(there, ("oom", "before", ""))[1] == ("oom", "before", "")


@pytest.mark.parametrize("name", ["../escaped", "figures/../../escaped", "/absolute", "long"])
def test_unpacking_writes_only_into_its_folder(tmp_path, name, monkeypatch):
    monkeypatch.setattr(cluster, "MOST_BYTES", 2000)
    folder = tmp_path / "attempt"
    folder.mkdir()
    name = str(tmp_path) + name if name == "/absolute" else name
    with pytest.raises(Failure) as found:
        unpack({name: b"x" * (3000 if name == "long" else 10)}, folder)
    assert found.value.kind == "invalid-result"
    assert list(tmp_path.rglob("*")) == [folder]
