"""The runner: success is proved, failure is kept, and a killed run goes on where it was."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from rich.console import Console

from specexp.lab import build, grid, run, track

TRIVIAL = Path(__file__).parent / "notebooks" / "trivial.ipynb"


@pytest.fixture(autouse=True)
def no_semantics(monkeypatch):
    monkeypatch.setattr(build, "check", lambda params: [])


@pytest.fixture
def points(tmp_path):
    def call(timeout_s: float = 60, **axes) -> list[grid.Point]:
        file = tmp_path / "trivial.yaml"
        spec = {"notebook": str(TRIVIAL), "experiment": "grid of trifles", "timeout_s": timeout_s}
        file.write_text(yaml.safe_dump(spec | {"grid": axes}))
        return grid.load([file])

    return call


def go(points: list[grid.Point]) -> tuple[int, str]:
    console = Console(record=True, width=200, force_terminal=False)
    code = run.run(points, console)
    return code, console.export_text()


def statuses() -> dict[str, str]:
    """run_key -> status of every run in MLflow."""
    mlflow = track.client()
    ids = [e.experiment_id for e in mlflow.search_experiments()]
    return {r.data.tags["run_key"]: r.info.status for r in mlflow.search_runs(ids)}


def test_a_grid_is_run_committed_published_and_not_run_again(store, points):
    todo = points(x=[1, 2])
    code, said = go(todo)
    assert code == 0
    assert "done" in said
    assert statuses() == {p.run_key: "FINISHED" for p in todo}
    for point in todo:
        result = store / "results" / point.run_key
        assert track.intact(result)
        names = {p.name for p in result.iterdir()}
        assert {"result.json", "notebook.ipynb", "notebook.html", "manifest.json"} <= names
    frame = track.runs(experiment="grid of trifles")
    assert sorted(frame["metrics.acceptance/rate"]) == [0.1, 0.2]
    assert set(frame["params.how"]) == {"well"}
    assert set(frame["tags.grid"]) == {"trivial"}
    assert frame["tags.version.torch"].notna().all()
    assert track.curve(frame["run_id"].iloc[0], "acceptance/at_position") == {1: 0.5, 2: 0.25}
    before = {p: p.stat().st_mtime_ns for p in (store / "results").rglob("*") if p.is_file()}
    code, said = go(todo)
    assert code == 0
    assert "2 of 2 points are done already" in said
    after = {p: p.stat().st_mtime_ns for p in (store / "results").rglob("*") if p.is_file()}
    assert after == before
    assert len(statuses()) == 2


KINDS = {
    "raises": ("error", "ZeroDivisionError: division by zero"),
    "exits": ("invalid-result", "never executed"),
    "dies": ("kernel-died", "the kernel died"),
    "killed": ("kernel-died", "the kernel died"),
    "nothing": ("invalid-result", "track.log"),
    "nan": ("error", "not a finite number"),
    "other": ("invalid-result", "other parameters than it was given: x"),
    "twice": ("error", "one run logs once"),
}


def test_failing_points_are_kept_with_their_reason_and_the_others_go_on(store, points):
    todo = points(how=[*KINDS, "well"])
    assert go(todo)[0] == 1
    found = statuses()
    mlflow = track.client()
    ids = [e.experiment_id for e in mlflow.search_experiments()]
    tags = {r.data.tags["run_key"]: r.data.tags for r in mlflow.search_runs(ids)}
    for point in todo:
        how = point.params["how"]
        if how == "well":
            assert found[point.run_key] == "FINISHED"
            continue
        kind, reason = KINDS[how]
        assert found[point.run_key] == "FAILED"
        assert tags[point.run_key]["error.kind"] == kind
        assert reason in tags[point.run_key]["error"]
        [kept] = (store / "failed").glob(f"{point.run_key}-*")
        assert {"error.txt", "notebook.ipynb", "notebook.html"} <= {p.name for p in kept.iterdir()}
        assert not (store / "results" / point.run_key).exists()
    kept = [p.read_text() for p in (store / "failed").glob("*/notebook.ipynb")]
    assert any("ZeroDivisionError" in notebook for notebook in kept)
    assert not list((store / "attempts").iterdir())
    table = Console(record=True, width=200)
    table.print(run.status(todo))
    text = table.export_text()
    assert text.count("failed") == len(KINDS)
    assert text.count("done") == 1


def test_a_hanging_point_ends_at_its_wall_clock_with_all_its_processes(store, points):
    begin = time.monotonic()
    code, _ = go(points(timeout_s=4, how=["hangs"]))
    assert code == 1
    assert time.monotonic() - begin < 4 + 10
    assert list(track.runs().columns) == []
    [kept] = (store / "failed").iterdir()
    assert "took longer than 4 s" in (kept / "error.txt").read_text()
    assert not psutil.Process().children(recursive=True)


def test_a_runner_killed_in_the_middle_loses_nothing(store, points, tmp_path):
    todo = points(how=["well", "slow"])
    code = (
        "from pathlib import Path; from specexp.lab import build, grid, run; "
        "build.check = lambda params: []; "
        f"run.run(grid.load([Path({str(tmp_path / 'trivial.yaml')!r})]))"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    first, second = (store / "results" / p.run_key for p in todo)
    deadline = time.monotonic() + 120
    while not (first.exists() and list((store / "attempts").glob(f"{todo[1].run_key}-*"))):
        assert time.monotonic() < deadline
        assert child.poll() is None
        time.sleep(0.1)
    time.sleep(1.5)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert first.exists()
    assert not second.exists()
    before = (first / "manifest.json").stat().st_mtime_ns
    code, _ = go(todo)
    assert code == 0
    assert (first / "manifest.json").stat().st_mtime_ns == before
    found = statuses()
    assert found[todo[0].run_key] == found[todo[1].run_key] == "FINISHED"
    assert "RUNNING" not in found.values()
    frame = track.runs()
    assert sorted(frame["tags.run_key"]) == sorted(p.run_key for p in todo)


def test_a_committed_but_unpublished_result_is_published_once(store, points):
    todo = points(x=[1])
    assert go(todo)[0] == 0
    result = store / "results" / todo[0].run_key
    (result / "published").unlink()
    assert go(todo)[0] == 0
    assert len(statuses()) == 1
    mlflow = track.client()
    [old] = mlflow.search_runs([track.experiment_id("grid of trifles")])
    mlflow.set_tag(old.info.run_id, "published", "0")
    (result / "published").unlink()
    assert go(todo)[0] == 0
    [new] = mlflow.search_runs([track.experiment_id("grid of trifles")])
    assert new.info.run_id != old.info.run_id


@pytest.mark.parametrize("damage", ["cut", "gone", "swapped"])
def test_a_damaged_result_is_set_aside_and_done_again(store, points, damage):
    todo = points(x=[1])
    assert go(todo)[0] == 0
    result = store / "results" / todo[0].run_key
    if damage == "cut":
        text = (result / "notebook.ipynb").read_bytes()
        (result / "notebook.ipynb").write_bytes(text[: len(text) // 2])
    elif damage == "gone":
        (result / "result.json").unlink()
    else:
        (result / "result.json").write_text("{}")
    assert go(todo)[0] == 0
    assert track.intact(result)
    assert (store / "failed" / f"{todo[0].run_key}-damaged").exists()


def test_a_second_runner_is_refused_and_told_who_holds_the_store(store, points):
    code = (
        "import time; from specexp.lab import track\n"
        "with track.locked(): print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline().strip() == "held"
        code, said = go(points(x=[1]))
        assert code == 3
        assert str(holder.pid) in said
    finally:
        holder.kill()
        holder.wait()
    assert go(points(x=[1]))[0] == 0  # a killed holder leaves no lock behind


def test_ctrl_c_stops_cleanly(store, points, monkeypatch):
    def interrupted(point, folder):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "_execute", interrupted)
    code, said = go(points(x=[1]))
    assert code == 130
    assert "run again" in said
    assert set(statuses().values()) == {"KILLED"}
    assert not list((store / "attempts").iterdir())


def test_a_full_disk_says_so_and_commits_nothing(store, points, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device", "notebook.ipynb")

    monkeypatch.setattr(run, "_execute", full)
    code, said = go(points(x=[1]))
    assert code == 5
    assert "disk full" in said
    assert "notebook.ipynb" in said
    assert not (store / "results").exists()
    monkeypatch.undo()
    os.environ["SPECEXP_MLRUNS"] = str(store)
    try:
        assert go(points(x=[1]))[0] == 0
    finally:
        del os.environ["SPECEXP_MLRUNS"]


def test_papermills_own_word_is_not_believed(store, points, tmp_path):
    """The control: papermill alone returns as after a success from a notebook that ended early."""
    import papermill

    out = tmp_path / "out.ipynb"
    papermill.execute_notebook(
        str(TRIVIAL), str(out), {"how": "exits"}, progress_bar=False, kernel_name="python3"
    )
    assert json.loads(out.read_text())["cells"][-1]["execution_count"] is None
    assert go(points(how=["exits"]))[0] == 1
