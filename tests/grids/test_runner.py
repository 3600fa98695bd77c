"""The runner: success is verified, failures are kept, and a killed run resumes."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import nbformat
import psutil
import pytest
import torch
import yaml
from conftest import TRIVIAL
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import BAD_REQUEST, INVALID_PARAMETER_VALUE
from rich.console import Console
from support.processes import alive, until
from support.stores import Outage, problems

from specexp.grids import points as grid
from specexp.grids import progress
from specexp.grids import runner as run
from specexp.grids.execute import NOTEBOOK, PAGE, WIDGET, _check, _tidy
from specexp.grids.machines import local
from specexp.grids.progress import ERROR, Failure
from specexp.terminal import harmless
from specexp.tracking import audit, compare, rebuild, report, results, runs
from specexp.tracking.results import claim, holder, intact

pytestmark = pytest.mark.usefixtures("kept")
Here = local.Here  # with a fork server of its own


def go(points: list[grid.Point], **options) -> tuple[int, str]:
    console = Console(record=True, width=200, force_terminal=False)
    code = run.run(points, console, **options)
    return code, console.export_text()


def fails(*_) -> None:
    raise Failure("error", "planted")


def all_runs() -> list:
    mlflow = runs.client()
    return list(mlflow.search_runs([e.experiment_id for e in mlflow.search_experiments()]))


def statuses() -> dict[str, str]:
    """run_key -> status of its run in MLflow; asserts that each key has only one."""
    found = all_runs()
    assert len({r.data.tags["run_key"] for r in found}) == len(found)
    return {r.data.tags["run_key"]: r.info.status for r in found}


@pytest.fixture
def start(warm, store, tmp_path):
    """Start a runner process, with a fork server of its own, on the grid that `points` wrote;
    returns its process id."""

    def call(**environment: str) -> int:
        grids, threads = [str(tmp_path / "trivial.yaml")], torch.get_num_threads()
        return warm.start(
            "grid", store, real=True, grids=grids, threads=threads, environment=environment
        )

    return call


@pytest.fixture
def light(points, tmp_path):
    """Points of that notebook, but that its kernels import no torch."""
    own = tmp_path / "light.ipynb"
    stub = "import os; from specexp.tracking import provenance as p; p.tags = lambda device: {}"
    own.write_text(TRIVIAL.read_text().replace("import os", stub))
    return partial(points, notebook=own)


@pytest.mark.parametrize(("credible", "times"), [([0, 1], 2), ([0, 0], 2), ([1], 1), ([], 1)])
def test_speedup_that_is_not_credible_is_measured_again(
    store, written, monkeypatch, credible, times
):
    """Once; then it stands as it is."""
    execute, left, ran = local.execute, list(credible), []

    def timed(point, attempt, *rest):
        execute(point, attempt, *rest)
        ran.append(attempt)
        record = json.loads((attempt / "result.json").read_text())
        if left:
            record["metrics"]["speedup/credible"] = left.pop(0)
        (attempt / "result.json").write_text(json.dumps(record))

    monkeypatch.setattr(local, "execute", timed)
    [point] = todo = written(1)
    code, said = go(todo)
    assert (code, len(ran)) == (0, times)
    assert ("timed once more" in said) == (times == 2)
    assert len(results.listed("replaced")) == times - 1
    kept = json.loads((results.result_of(point.run_key) / "result.json").read_text())
    assert kept["metrics"].get("speedup/credible") == (credible[-1] if credible else None)
    assert not results.listed("attempts")


def test_grid_runs_commits_publishes_once(store, points):
    todo = points(x=[1, 2])
    code, said = go(todo)
    assert code == 0
    assert "done" in said
    assert statuses() == {p.run_key: "FINISHED" for p in todo}
    for point in todo:
        result = store / "results" / point.run_key
        assert intact(result)
        names = {p.name for p in result.iterdir()}
        assert {"result.json", "notebook.ipynb", "notebook.html", "manifest.json"} <= names
    frame = runs.runs(experiment="grid of trifles")
    assert sorted(frame["metrics.acceptance/rate"]) == [0.1, 0.2]
    assert set(frame["params.how"]) == {"well"}
    assert set(frame["tags.grid"]) == {"trivial"}
    assert frame["tags.version.torch"].notna().all()
    assert runs.curve(frame["run_id"].iloc[0], "acceptance/at_position") == {1: 0.5, 2: 0.25}
    before = {p: p.stat().st_mtime_ns for p in (store / "results").rglob("*") if p.is_file()}
    assert len({p.stat().st_mode for p in before}) == 1, "whoever reads one can read all"
    code, said = go(todo)
    assert code == 0
    assert "0 of 2 points to run" in said
    after = {p: p.stat().st_mtime_ns for p in (store / "results").rglob("*") if p.is_file()}
    assert after == before
    assert len(statuses()) == 2


KINDS = {
    "raises": ("error", "ZeroDivisionError: division by zero"),
    "exits": ("invalid-result", "raised SystemExit"),
    "dies": ("kernel-died", "exited with status 0"),
    "killed": ("kernel-died", "killed by SIGKILL"),
    "nothing": ("invalid-result", "runs.log"),
    "nan": ("error", "not a finite number"),
    "other": ("invalid-result", "parameters that differ from its own: x"),
    "twice": ("error", "call it once per run"),
}


def test_failed_points_keep_their_reason_and_others_run(store, points):
    todo = points(how=[*KINDS, "well"])
    assert go(todo)[0] == 1
    found = statuses()
    mlflow = runs.client()
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
    table.print(progress.status(todo))
    text = table.export_text()
    assert text.count("failed  ") >= len(KINDS)
    assert f"1 done, {len(KINDS)} failed" in text


def removed(attempt: Path) -> None:
    shutil.rmtree(attempt)


def replaced_by_a_file(attempt: Path) -> None:
    shutil.rmtree(attempt)
    attempt.write_text("")


def replaced_by_a_link(attempt: Path) -> None:
    attempt.rename(attempt.parents[2] / "elsewhere")
    attempt.symlink_to(attempt.parents[2] / "elsewhere")


@pytest.mark.parametrize("spoil", [removed, replaced_by_a_file, replaced_by_a_link])
@pytest.mark.parametrize("error", [None, OSError(5, "no such folder"), Failure("lost", "planted")])
def test_point_without_its_attempt_folder_fails_once(store, points, monkeypatch, spoil, error):
    def execute(point, attempt, *rest):
        (attempt / "result.json").write_text("{}")
        spoil(attempt)
        if error:
            raise error
        _tidy(attempt)

    monkeypatch.setattr(local, "execute", execute)
    todo = points(x=[1])
    for _ in range(2):
        code, said = go(todo)
        assert code == 1
        assert "invalid-result: the notebook removed its attempt folder" in said
    [kept] = (store / "failed").iterdir()
    assert {path.name for path in kept.iterdir()} >= {"point.json", "tags.json", "error.txt"}
    assert statuses() == {todo[0].run_key: "FAILED"}
    assert "1 failed" in str(progress.status(todo).caption)


def test_notebook_that_removes_its_folder_fails_once(store, points):
    todo = points(how=["removes"])
    assert go(todo)[0] == 1
    code, said = go(todo)
    assert code == 1
    assert "in an earlier run: invalid-result: the notebook removed its attempt folder" in said
    assert statuses() == {todo[0].run_key: "FAILED"}


def test_run_tag_names_the_notebook_path(points):
    [inside] = points(x=[1])
    outside = replace(inside, notebook=Path("/elsewhere/own.ipynb"))
    named = [point.tags["mlflow.source.name"] for point in (inside, outside)]
    assert named == ["tests/support/trivial.ipynb", "own.ipynb"]


def test_time_left_is_said_where_points_of_each_notebook_are_done(store, written):
    done, waiting = written(1, 2)
    assert go([done])[0] == 0
    assert "1 to do; about " in progress.status([done, waiting]).caption
    other = replace(waiting, notebook=Path("/elsewhere/own.ipynb"))
    assert progress.status([done, other]).caption == "1 done, 1 to do"


def test_status_creates_no_store(points, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECEXP_MLRUNS", str(tmp_path / "nothing"))
    assert progress.status(points(x=[1, 2])).caption == "2 to do"
    assert not (tmp_path / "nothing").exists()


def test_failure_of_an_earlier_run_is_reported_as_such(store, points, monkeypatch):
    monkeypatch.setattr(local, "execute", fails)
    todo = points(x=[1])
    assert "s  trivial x=1  error: planted" in go(todo)[1]
    assert "  trivial x=1  in an earlier run: error: planted" in go(todo)[1]
    assert " s  trivial" not in go(todo)[1]


def test_notebook_edited_during_a_grid_fails_its_points(store, tmp_path):
    own, file = tmp_path / "own.ipynb", tmp_path / "grids" / "own.yaml"
    file.parent.mkdir()
    own.write_text(TRIVIAL.read_text())
    file.write_text("notebook: ../own.ipynb\n")
    [before] = grid.load([file])
    own.write_text(TRIVIAL.read_text().replace("import os", "import os, sys"))
    code, said = go([before])
    assert (code, list(store.glob("results/*"))) == (1, [])
    assert "the notebook changed before it ran: run the grid again" in said
    [after] = grid.load([file])
    assert go([after])[0] == 0
    assert intact(store / "results" / after.run_key)


def test_helper_edited_during_a_grid_fails_its_points(store, tmp_path):
    own, helper, file = (tmp_path / name for name in ("own.ipynb", "helper.py", "own.yaml"))
    own.write_text(TRIVIAL.read_text().replace("import os", "import os, helper"))
    helper.write_text("scale = 1")
    file.write_text("notebook: own.ipynb\n")
    [before] = grid.load([file])
    helper.write_text("scale = 22")
    code, said = go([before])
    assert (code, list(store.glob("results/*"))) == (1, [])
    assert "helper.py changed while the grid ran: run the grid again" in said
    [after] = grid.load([file])
    assert after.run_key != before.run_key
    assert go([after])[0] == 0


def test_notebook_that_edits_its_helper_and_data_while_it_runs_fails(store, tmp_path):
    """What is checked before a run only is not what ran."""
    own, helper, file = (tmp_path / name for name in ("own.ipynb", "helper.py", "own.yaml"))
    (data := tmp_path / "data.csv").write_text("1")
    edits = "import os, helper; print(1, file=open(helper.__file__, 'a')), open(names[0], 'w')"
    own.write_text(TRIVIAL.read_text().replace("import os", edits, 1))
    helper.write_text("scale = 1\n")
    file.write_text(yaml.safe_dump({"notebook": own.name, "fixed": {"names": [str(data)]}}))
    code, said = go(grid.load([file]))
    assert (helper.read_text(), data.read_text()) == ("scale = 1\n1\n", "")
    assert (code, list(store.glob("results/*"))) == (1, [])
    assert "data, helper.py changed while the grid ran: run the grid again" in said


def test_kernel_sees_the_absolute_store_path(store, tmp_path, monkeypatch):
    own, file = tmp_path / "elsewhere" / "own.ipynb", tmp_path / "own.yaml"
    own.parent.mkdir()
    asks = f"import os; assert os.environ['SPECEXP_MLRUNS'] == '{store}'"
    own.write_text(TRIVIAL.read_text().replace("import os", asks))
    file.write_text("notebook: elsewhere/own.ipynb\n")
    monkeypatch.setenv("SPECEXP_MLRUNS", f"{own.parent}/../mlruns")
    code, said = go(grid.load([file]))
    assert code == 0, said


def test_store_path_may_hold_any_character(tmp_path, monkeypatch):
    name = "a[bold]b:cat: ?b=c %41b {x}{} #c&d ü@b:c[d]"
    home, file = tmp_path / name, tmp_path / name / "own.yaml"
    home.mkdir()
    shutil.copy(TRIVIAL, home / "own.ipynb")
    file.write_text("notebook: own.ipynb\n")
    store = home / "mlruns"
    monkeypatch.setenv("SPECEXP_MLRUNS", str(store))
    code, said = go(grid.load([file]))
    assert code == 0, said
    assert f"runs       {store}/mlflow.db\n" in said
    assert (store / "mlflow.db").is_file()
    assert sorted(p.name for p in tmp_path.iterdir()) == [name]
    assert problems() == []
    monkeypatch.setenv("MLFLOW_TRACKING_URI", runs.backend().uri)
    assert runs.backend().file == store / "mlflow.db"
    assert len(runs.runs()) == 1
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    console = Console(record=True, width=300)
    assert audit.show(console)
    rebuild.show(rebuild.rebuild(console), console)
    assert console.export_text().count(f"{store}/mlflow.db") == 2


def test_damage_message_is_printed_without_markup(store, points, monkeypatch):
    def damaged() -> None:
        raise runs.StoreCorrupt("a [red]door[/] at [/x] :cat:")

    monkeypatch.setattr(runs, "initialise", damaged)
    code, said = go(points(x=[1]))
    assert (code, said) == (4, "damaged: a [red]door[/] at [/x] :cat:\n")


def test_output_notebook_can_be_run_again(store, points, tmp_path):
    [point] = points(x=[2])
    go([point])
    grids = tmp_path / "grids"
    grids.mkdir()
    shutil.copy(store / "results" / point.run_key / "notebook.ipynb", tmp_path / "own.ipynb")
    (grids / "own.yaml").write_text("notebook: ../own.ipynb\ngrid: {x: [3]}\n")
    [again] = grid.load([grids / "own.yaml"])
    assert again.identity.parts["notebook"] == point.identity.parts["notebook"]
    assert go([again])[0] == 0


def test_resume_asks_little_of_what_is_finished(store, written, monkeypatch):
    """No claim, no search of MLflow, no look into files, no new page; the table is of the result
    folders."""
    for table in (compare, progress):
        monkeypatch.setattr(table, "ROWS", 3)
    todo = written(1, 2, 3, 4, 5, 13)
    assert go(todo)[0] == 1
    claimed, read, load = [], [], results.load
    with monkeypatch.context() as counting:
        counting.setattr(results, "claim", lambda key: claimed.append(key) or claim(key))
        counting.setattr(results, "intact", lambda result: pytest.fail("read whole"))
        counting.setattr(results, "load", lambda path: read.append(path) or load(path))
        for name in ("search_runs", "search_experiments"):
            counting.setattr(
                runs.client().__class__, name, lambda *_, **__: pytest.fail("searched")
            )
        page = store / "reports" / "trivial.yaml.html"
        before = page.stat().st_mtime_ns
        code, said = go(todo)
        assert page.stat().st_mtime_ns == before
    assert code == 1
    assert "0 of 6 points to run" in said
    assert "and 2 more, in the report" in said
    assert claimed == ["setup"]
    times = Counter(path.name for path in read if path.is_file() and "results" in path.parts)
    assert times == {"result.json": 3 * 5, "tags.json": 4 * 5, "manifest.json": 5}
    table = progress.status(todo)
    assert table.row_count == 1, "of many points those done have no row"
    assert table.caption == "5 done, 1 failed"


def test_points_without_a_fork_server_are_lost_and_rerun(store, points, monkeypatch):
    todo = points(x=[1, 2])
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", shutil.which("false"))
        code, said = go(todo, machines=Here(todo))
    assert code == 1
    assert said.count("lost: the fork server exited with status 1") == 2
    assert go(todo)[0] == 0


def test_hanging_point_ends_at_its_timeout_with_its_processes(store, points):
    todo = points(timeout_s=4, how=["hangs"])
    before = set(psutil.Process().children(recursive=True))
    code, _ = go(todo, machines=Here(todo))
    assert code == 1
    assert list(runs.runs().columns) == []
    [kept] = (store / "failed").iterdir()
    error = (kept / "error.txt").read_text()
    assert "took longer than 4 s: raise timeout_s in grid trivial" in error
    assert set(psutil.Process().children(recursive=True)) <= before


def test_timeout_is_retried_with_more_time_only(store, written, monkeypatch):
    [point] = written(1)

    def expires(point, *_):
        raise Failure("timeout", f"took longer than {point.timeout_s:g} s")

    monkeypatch.setattr(local, "execute", expires)
    assert go([point])[0] == 1
    for limit in (point.timeout_s, point.timeout_s - 1):
        less = replace(point, timeout_s=limit)
        assert "0 of 1 points to run" in go([less])[1]
        assert progress.status([less]).caption == "1 failed"
    more = replace(point, timeout_s=point.timeout_s + 1)
    assert progress.status([more]).caption == "1 to do"
    assert f"took longer than {more.timeout_s:g} s" in go([more])[1]
    assert "0 of 1 points to run" in go([more])[1]
    assert len(results.listed("failed")) == 2


def test_killed_runner_loses_nothing(store, light, warm, start, monkeypatch):
    todo = light(how=["well", "slow"])
    first, second = (store / "results" / p.run_key for p in todo)
    killed = start(SLOW_S="600")
    until(lambda: list((store / "attempts").glob(f"{todo[1].run_key}-*/log.txt")))
    os.kill(killed, signal.SIGKILL)
    assert warm.wait(killed).code == -signal.SIGKILL
    assert first.exists()
    assert not second.exists()
    before = (first / "manifest.json").stat().st_mtime_ns
    monkeypatch.setenv("SLOW_S", "0")
    code, _ = go(todo)
    assert code == 0
    assert (first / "manifest.json").stat().st_mtime_ns == before
    found = statuses()
    assert found[todo[0].run_key] == found[todo[1].run_key] == "FINISHED"
    assert "RUNNING" not in found.values()
    frame = runs.runs()
    assert sorted(frame["tags.run_key"]) == sorted(p.run_key for p in todo)


def test_unpublished_result_is_published_once(store, written):
    todo = written(1)
    assert go(todo)[0] == 0
    result = store / "results" / todo[0].run_key
    (result / ".published").unlink()
    assert go(todo)[0] == 0
    assert len(statuses()) == 1
    mlflow = runs.client()
    [old] = mlflow.search_runs([runs.experiment_id("grid of trifles")])
    mlflow.set_tag(old.info.run_id, "published", "0")
    (result / ".published").unlink()
    assert go(todo)[0] == 0
    [new] = mlflow.search_runs([runs.experiment_id("grid of trifles")])
    assert new.info.run_id != old.info.run_id


@pytest.mark.parametrize("unseen", [False, True])
def test_file_swapped_for_one_of_its_size_is_set_aside_and_the_point_rerun(store, written, unseen):
    todo = written(1)
    assert go(todo)[0] == 0
    result = store / "results" / todo[0].run_key
    before = (result / "result.json").stat()
    (result / "result.json").write_text("{}".ljust(before.st_size))
    if unseen:
        os.utime(result / "result.json", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert go(todo)[0] == 0
    assert intact(result)
    assert list((store / "replaced").glob(f"{todo[0].run_key}-*"))


@pytest.mark.parametrize("text", ["{}", "[1]", '{"rivals": 3}', '{"params": 3, "metrics": 4}'])
def test_result_damaged_while_its_grid_runs_is_left_out_and_rerun(
    store, written, monkeypatch, text
):
    def vandal(point, attempt, *rest):
        for file in (store / "results").glob("*/result.json"):
            file.write_text(text)
        execute(point, attempt, *rest)

    todo, execute = written(1, 2), local.execute
    with monkeypatch.context() as patch:
        patch.setattr(local, "execute", vandal)
        code, said = go(todo)
    assert code == 0, said
    [line] = problems()
    assert "changed since it was committed" in line
    assert "1 of 2 points to run" in go(todo)[1]
    assert problems() == []


def test_point_claimed_elsewhere_is_waited_for(store, written, monkeypatch):
    todo, waits, say = written(1, 2), threading.Event(), progress.Board.say

    def heard(board, line, once=False):
        say(board, line, once)
        if line.startswith(f"waiting for {todo[0].label}"):
            waits.set()

    monkeypatch.setattr(progress.Board, "say", heard)
    with claim(todo[0].run_key) as ours:
        assert ours
        runner = threading.Thread(target=lambda: said.append(go(todo)))
        said: list[tuple[int, str]] = []
        runner.start()
        until(lambda: (store / "results" / todo[1].run_key).exists())
        assert waits.wait(600)
        assert runner.is_alive()
        assert not list((store / "attempts").glob(f"{todo[0].run_key}-*"))
    runner.join()
    [(code, text)] = said
    assert code == 0
    assert f"pid {os.getpid()}" in text
    assert statuses() == {p.run_key: "FINISHED" for p in todo}


def test_points_of_one_label_are_two_rows(points):
    console = Console(record=True, width=100)
    board = progress.Board(console, 2)
    first, second = (replace(point, label="same") for point in points(x=[1, 2]))
    for point in (first, second):
        board.began(point)("at work")
    board.ended(first, "done")
    assert [task.description for task in board._rows.tasks] == ["1 done, 0 failed of 2", "same"]
    board.ended(second, "done")
    assert console.export_text().count(" s  same") == 2


def test_two_reasons_to_wait_are_each_said_once(points):
    console = Console(record=True, width=100)
    board = progress.Board(console, 2)
    for _ in range(3):
        board.say("waiting for x", once=True)
        board.say("waiting with y", once=True)
    board.ended(points(x=[1])[0], "done")
    board.say("waiting with y", once=True)
    said = console.export_text()
    assert (said.count("waiting for x"), said.count("waiting with y")) == (1, 2)


@pytest.mark.slow
def test_two_runners_share_a_grid(store, light, warm, start):
    todo = light(x=list(range(8)))
    runners = [start() for _ in range(2)]
    assert [warm.wait(pid).code for pid in runners] == [0, 0]
    assert statuses() == {p.run_key: "FINISHED" for p in todo}
    assert len(list((store / "results").iterdir())) == 8
    assert not list(store.glob("failed/*"))


def test_grid_lists_points_that_another_grid_ran(store, copied_tables, tmp_path):
    def file(name: str, *xs: int) -> Path:
        path = tmp_path / f"{name}.yaml"
        spec = {"notebook": str(TRIVIAL), "experiment": "shared", "grid": {"x": list(xs)}}
        path.write_text(yaml.safe_dump(spec))
        return path

    def shown(name: str) -> list[str]:
        return sorted(runs.runs(grid=name)["params.x"])

    assert go(grid.load([file("one", 1, 2)]))[0] == 0
    assert go(grid.load([file("two", 2, 3), file("three", 3, 4)]))[0] == 0
    assert [shown(name) for name in ("one", "two", "three")] == [["1", "2"], ["2", "3"], ["3", "4"]]
    assert go(grid.load([file("two", 4)]))[0] == 0
    assert shown("two") == ["2", "3", "4"]
    rebuild.rebuild(Console(quiet=True))
    assert shown("two") == ["2", "3", "4"]


def test_killed_holder_leaves_no_claim(store):
    code = (
        "import signal; from specexp.tracking.results import claim\n"
        "with claim('k') as ours: print(ours, flush=True); signal.pause()"
    )
    held = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert held.stdout.readline().strip() == "True"
    with claim("k") as ours:
        assert not ours
    assert str(held.pid) in holder("k")
    held.kill()
    held.wait()
    assert holder("k") is None
    with claim("k") as ours:
        assert ours
    assert not (store / "claims" / "k").exists()


def test_asking_for_the_holder_takes_no_claim(store):
    done = threading.Event()

    def ask():
        while not done.is_set():
            holder("k")

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    found = []
    for _ in range(200):
        with claim("k") as ours:
            found.append(ours)
    done.set()
    for thread in threads:
        thread.join()
    assert all(found)


def test_timed_point_waits_for_other_runners_timing_here(store, points, monkeypatch):
    done, taken = [], []

    def executed(point, *rest):
        done.append(point)
        raise Failure("error", "planted")

    def through(point):
        work = run.Work([point], progress.Board(Console(quiet=True), 1), queue=[point])
        monkeypatch.setattr(work, "_serve", lambda *_: taken.append(work._take(point, worker)))
        work.run_queue(local.Here([point]), 1)

    monkeypatch.setattr(local, "execute", executed)
    (timed, third), [other] = points(x=[1, 3]), points(together=True, x=[2])
    worker = partial(local._run, None, 0)
    with local.Here([]).timing_lock() as ours:
        assert ours
        through(timed)
        assert (taken, done) == ([False], [])
        through(other)
        through(replace(third, timed=False))
        assert len(done) == 2
    through(timed)
    assert taken == [False, True, True, True]
    assert done[-1] == timed


def test_stores_of_a_user_time_in_turn_on_one_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "LOCKS", tmp_path / "locks")
    monkeypatch.setenv("SPECEXP_MLRUNS", str(tmp_path / "one"))
    with Here.timing_lock() as first:
        monkeypatch.setenv("SPECEXP_MLRUNS", str(tmp_path / "other"))
        with Here.timing_lock() as second:
            assert (first, second) == (True, False)
    assert (tmp_path / "locks").stat().st_mode & 0o777 == 0o700
    (tmp_path / "theirs").symlink_to(tmp_path / "locks")
    monkeypatch.setattr(local, "LOCKS", tmp_path / "theirs")
    with Here.timing_lock() as ours:
        assert ours
        assert len(results.listed("claims")) == 1, "somebody took the name: the store's own"


@pytest.mark.parametrize("devices", [("cpu", "GPU"), ("GPU", "GPU")])
def test_kernels_are_not_forked_for_points_that_are_all_on_a_gpu(points, devices):
    todo = [
        replace(p, identity=replace(p.identity, parts=p.identity.parts | {"device": device}))
        for p, device in zip(points(x=[1, 2]), devices, strict=True)
    ]
    how = "forked kernels" if "cpu" in devices else "plain kernels (all points are on a GPU)"
    assert Here(todo).how == f"in {how}"


@pytest.mark.parametrize(
    ("device", "hides"), [("cuda:1", False), ("cuda", True), ("auto", True), (None, True)]
)
def test_point_that_names_a_gpu_sees_all_of_them(points, monkeypatch, device, hides):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    given = []
    monkeypatch.setattr(local, "execute", lambda *args: given.append(args[-1]))
    point = replace(points(x=[1])[0], params={} if device is None else {"device": device})
    local._run(None, 1, point, None, None)
    assert given == [{"CUDA_VISIBLE_DEVICES": "1"} if hides else {}]


def test_claims_exclude_one_another(store):
    inside, most = [], []

    def work():
        for _ in range(300):
            with claim("k") as ours:
                if ours:
                    inside.append(1)
                    time.sleep(1e-4)
                    most.append(len(inside))
                    inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_stop_a_runner_cleanly(store, light, warm, start, number, expected):
    todo = light(how=["well", "hangs"])
    runner = start()
    hanging = todo[1].run_key
    until(lambda: list((store / "attempts").glob(f"{hanging}-*/log.txt")))
    time.sleep(1)
    below = psutil.Process(runner).children(recursive=True)
    os.kill(runner, number)
    time.sleep(0.2)
    os.kill(runner, number)
    assert warm.wait(runner).code == expected
    assert statuses() == {todo[0].run_key: "FINISHED", hanging: "KILLED"}
    assert not list((store / "attempts").iterdir())
    until(lambda: not any(alive(p) for p in below))


def test_failed_points_rerun_only_with_retry_failed(store, points, tmp_path):
    todo = points(how=["raises", "well"])
    assert go(todo)[0] == 1
    code, said = go(todo)
    assert code == 1
    assert "0 of 2 points to run" in said
    assert "--retry-failed" in said
    assert len(list((store / "failed").iterdir())) == 1
    code, said = go(todo, retry_failed=True)
    assert "1 of 2 points to run" in said
    assert len(list((store / "failed").iterdir())) == 2
    assert statuses() == {todo[0].run_key: "FAILED", todo[1].run_key: "FINISHED"}


def test_force_reruns_and_keeps_one_run_a_point(store, written):
    todo = written(1)
    assert go(todo)[0] == 0
    first = (store / "results" / todo[0].run_key / ".published").read_text()
    assert go(todo, force=True)[0] == 0
    second = (store / "results" / todo[0].run_key / ".published").read_text()
    assert second != first
    assert statuses() == {todo[0].run_key: "FINISHED"}
    [replaced] = (store / "replaced").iterdir()
    assert intact(replaced)


def test_stop_under_force_names_a_command_that_repeats_nothing(store, written, monkeypatch):
    execute = local.execute

    def interrupted(*args):
        execute(*args)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(local, "execute", interrupted)
    for options, advice in (
        ({}, "run the same command again to resume"),
        ({"force": True}, "run the same command without --force for the points"),
    ):
        code, said = go(written(1, 2), **options)
        assert code == run.INTERRUPTED
        assert f"finished points are kept; {advice}" in said


def test_doubtful_timings_are_shown_and_measured_again_on_request(store, written, monkeypatch):
    todo, execute, ran, busy = written(1, 2), local.execute, [], ["7.5"]

    def execute_beside_others(point, attempt, *rest):
        execute(point, attempt, *rest)
        ran.append(point.params["x"])
        record = json.loads((attempt / "result.json").read_text())
        record["tags"] |= {"threads": "2", "load": busy[0] if ran[-1] == 2 else "0.5"}
        (attempt / "result.json").write_text(json.dumps(record))

    monkeypatch.setattr(local, "execute", execute_beside_others)
    again = f"nothing else running: specexp grid run {todo[0].file} --retry-doubtful"
    assert again in go(todo)[1]
    assert again in go(todo)[1]
    table = progress.status(todo, report.of("grid of trifles"))
    _, detail = table.columns[3].cells
    assert "doubtful: other work ran beside it (the load average was 7.5" in str(detail)
    assert table.caption == "2 done, 1 of these doubtful"
    table = progress.status(written(1, 2, 3), report.of("grid of trifles"))
    assert table.caption.startswith("2 done, 1 of these doubtful, 1 to do; about 0:00:")
    busy[0] = "0.5"
    assert again not in go(todo, retry_doubtful=True)[1]
    assert ran == [1, 2, 2]


def test_forced_result_replaces_one_of_a_later_clock(store, written):
    todo = written(1)
    assert go(todo)[0] == 0
    [old] = all_runs()
    runs.client().set_terminated(old.info.run_id, end_time=old.info.end_time + 3_600_000)
    assert go(todo, force=True)[0] == 0
    [new] = all_runs()
    assert new.info.run_id != old.info.run_id


def test_failed_forced_run_keeps_the_old_result(store, written, monkeypatch):
    todo = written(1)
    assert go(todo)[0] == 0
    [before] = all_runs()

    monkeypatch.setattr(local, "execute", fails)
    assert go(todo, force=True)[0] == 1
    assert intact(store / "results" / todo[0].run_key)
    after = {r.info.status: r.info.run_id for r in all_runs()}
    assert set(after) == {"FAILED", "FINISHED"}
    assert after["FINISHED"] == before.info.run_id


def test_forced_result_that_the_disk_refuses_leaves_the_old_one(store, written, monkeypatch):
    todo, rename = written(1), os.rename
    assert go(todo)[0] == 0
    before = (todo[0].result / "tags.json").read_text()

    def full(old, new):
        if Path(new) == todo[0].result and "attempts" in Path(old).parts:
            raise OSError(errno.ENOSPC, "No space left on device", str(new))
        rename(old, new)

    monkeypatch.setattr(os, "rename", full)
    assert go(todo, force=True)[0] == run.DISK_FULL
    assert intact(todo[0].result)
    assert (todo[0].result / "tags.json").read_text() == before
    assert problems() == []


def test_untimed_points_run_together_timed_ones_alone(store, points, monkeypatch):
    free = [replace(p, timed=False) for p in points(x=[1, 2, 3, 4])]
    timed = points(x=[5, 6])
    met = threading.Barrier(3)
    running, most = [], {True: 0, False: 0}

    def counted(point, attempt, *rest):
        running.append(point)
        most[point.timed] = max(most[point.timed], len(running))
        if point.params["x"] in meet:
            met.wait()
        running.remove(point)
        raise Failure("error", "planted")

    monkeypatch.setattr(local, "execute", counted)
    meet = {1, 2, 3}
    assert go([*free, *timed], jobs=3)[0] == 1
    assert most == {True: 1, False: 3}
    meet = {1, 5, 6}
    together = [*points(together=True, x=[5, 6]), free[0]]
    assert go(together, jobs=3, retry_failed=True)[0] == 1
    assert most[True] > 1


@pytest.mark.parametrize(
    ("gpus", "named", "seen"),
    [
        (0, None, [None] * 3),
        (1, "5", [None] * 3),
        (2, None, ["0", "1", "0"]),
        (2, "4,7", ["4", "7", "4"]),
        (2, "GPU-1b2c,GPU-9f", ["GPU-1b2c", "GPU-9f", "GPU-1b2c"]),
    ],
)
def test_each_worker_sees_its_own_gpu(points, monkeypatch, gpus, named, seen):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    given = []
    monkeypatch.setattr(local, "execute", lambda *args: given.append(args[-1]))
    (point,) = points(x=[1])
    with local.Here([point], forked=False) as here:
        for number in range(3):
            with here.worker(number) as worker:
                worker(point, Path(), print)
    assert [env.get("CUDA_VISIBLE_DEVICES") for env in given] == seen


def test_parallel_points_run_once_each(store, points):
    todo = points(together=True, x=list(range(3)))
    assert go(todo, jobs=3)[0] == 0
    assert statuses() == {p.run_key: "FINISHED" for p in todo}


def test_timings_of_an_untimed_notebook_are_refused(store, points):
    code, said = go([replace(p, timed=False) for p in points(x=[1])])
    assert code == 1
    assert "it logs speedup/measured" in said


def test_timings_of_a_rival_in_an_untimed_notebook_are_refused(points, tmp_path):
    [point] = points(x=[1])
    rival = {"metrics": {"speedup/measured": 1.5}, "series": {}}
    record = {"params": point.params, "metrics": {}, "series": {}, "rivals": {"ngram": rival}}
    (tmp_path / results.RESULT).write_text(json.dumps(record))
    nbformat.write(nbformat.v4.new_notebook(), tmp_path / NOTEBOOK)
    with pytest.raises(Failure, match="it logs speedup/measured"):
        _check(replace(point, timed=False), tmp_path)


def test_result_of_another_gpu_than_its_key_names_is_refused(store, points):
    """As of worker 1, which sees the second GPU, where keys name the first."""
    [point] = points(x=[1])
    parts = point.identity.parts | {"device": "Other GPU"}
    code, said = go([replace(point, identity=replace(point.identity, parts=parts))])
    assert code == 1
    here = point.identity.parts["device"]
    assert f"invalid-result: it ran on {here}, and its key names Other GPU: leave out" in said


def test_short_mlflow_outage_is_waited_for(store, written, monkeypatch):
    Outage(monkeypatch, 1)
    todo = written(1)
    code, said = go(todo)
    assert code == 0
    assert "waiting for MLflow" in said
    assert statuses() == {todo[0].run_key: "FINISHED"}


def test_server_that_is_away_is_named_though_nothing_is_to_be_published(
    store, written, monkeypatch
):
    todo = written(1)
    assert go(todo)[0] == 0
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    runs.marker(todo[0].result).write_text("0" * 32)
    code, said = go(todo)
    assert code == 0
    assert said.startswith(f"{run.UNREACHABLE}: http://127.0.0.1:9: connection refused")
    assert said.count(run.UNREACHABLE) == 1


def test_long_mlflow_outage_loses_nothing(store, written, monkeypatch):
    monkeypatch.setattr(run, "PATIENCE_S", 0.5)
    outage = Outage(monkeypatch, 1000)
    todo = written(1, 2)
    code, said = go(todo)
    assert code == 1
    assert "run the same command again" in said
    assert all(intact(store / "results" / p.run_key) for p in todo)
    assert statuses() == {}
    outage.times = 0
    code, said = go(todo)
    assert code == 0
    assert "0 of 2 points to run" in said
    assert statuses() == {p.run_key: "FINISHED" for p in todo}


def test_result_that_mlflow_took_late_is_not_called_another_runners(store, written, monkeypatch):
    monkeypatch.setattr(run, "PATIENCE_S", 0.0)
    outage = Outage(monkeypatch, 1000)
    assert go(written(1))[0] == 1
    outage.times = outage.calls + 1
    code, said = go(written(1))
    assert code == 0
    assert "done" in said
    assert "by another runner" not in said


def test_later_success_is_kept_during_an_mlflow_outage(store, points, monkeypatch):
    [point] = points(x=[1])
    with monkeypatch.context() as planted:
        planted.setattr(local, "execute", fails)
        assert go([point])[0] == 1
    with monkeypatch.context() as away:
        away.setattr(run, "PATIENCE_S", 0.0)
        Outage(away, 1000)
        assert "kept" in go([point], retry_failed=True)[1]
        code, said = go([point])
    assert code == 1
    assert "the result is safe, but MLflow cannot be reached" in said
    assert "planted" not in said
    assert go([point])[0] == 0


def refusing(monkeypatch, key, why, code):
    """MLflow refuses the run of that key; others are published."""
    publish = runs._publish

    def refuses(folder):
        if folder.name == key:
            raise MlflowException(why, code)
        return publish(folder)

    monkeypatch.setattr(runs, "_publish", refuses)
    return publish


def test_mlflow_refusal_is_reported_without_waiting(store, written, monkeypatch):
    todo = written(1, 2)
    publish = refusing(monkeypatch, todo[0].run_key, "x is\nbeyond", INVALID_PARAMETER_VALUE)
    code, said = go(todo)
    assert code == 1
    assert "waiting for MLflow" not in said
    refused = store / "results" / todo[0].run_key
    assert f"MLflow refused {refused}: {store}/mlflow.db: x is" in said
    assert "the result is safe, but MLflow refused it" in said
    assert "run the same command again" not in said
    assert statuses() == {todo[1].run_key: "FINISHED"}
    monkeypatch.setattr(runs, "_publish", publish)
    assert go(todo)[0] == 0


def test_rebuild_reports_refusals_and_goes_on(store, copied_tables, written, monkeypatch):
    todo = written(1, 2)
    assert go(todo)[0] == 0
    refusing(monkeypatch, todo[0].run_key, "x is beyond", BAD_REQUEST)
    console = Console(record=True, width=300)
    made = rebuild.rebuild(console)
    rebuild.show(made, console)
    assert (made.results, made.torn) == (1, ())
    said = console.export_text()
    assert f"left out, as MLflow refused it: {store}/results/{todo[0].run_key}: " in said
    assert "x is beyond" in said


def test_full_disk_stops_without_a_commit(store, points, monkeypatch):
    asked = []

    def full(point, *rest):
        asked.append(point)
        raise Failure("disk", "No space left on device: notebook.ipynb")

    monkeypatch.setattr(local, "execute", full)
    todo = points(x=[1, 2])
    code, said = go(todo)
    assert code == 5
    assert len(asked) == 1
    assert "notebook.ipynb" in said
    assert "run the same command again" in said
    assert not (store / "results").exists()
    assert not list((store / "attempts").iterdir())
    monkeypatch.undo()
    monkeypatch.setenv("SPECEXP_MLRUNS", str(store))
    assert go(todo)[0] == 0


def test_too_little_disk_space_is_refused_first(store, points, monkeypatch):
    monkeypatch.setattr(run, "ROOM_PER_POINT", 10**18)
    monkeypatch.setattr(local, "execute", None)
    code, said = go(points(x=[1]))
    assert code == 5
    assert "1 points may need" in said


def test_links_in_an_attempt_are_removed(store, points, tmp_path, monkeypatch):
    """MLflow would copy the file that a link points to."""
    outside = tmp_path / "outside"
    outside.write_text("not yours")
    real = local.execute

    def linked(point, attempt, *rest):
        (attempt / "link").symlink_to(outside)
        os.mkfifo(attempt / "pipe")
        real(point, attempt, *rest)

    monkeypatch.setattr(local, "execute", linked)
    assert go(points(x=[1]))[0] == 0
    assert not list(store.rglob("link"))
    assert not list(store.rglob("pipe"))
    assert outside.read_text() == "not yours"


def test_early_exit_is_a_failure_unlike_in_papermill(store, points, tmp_path):
    """The control: papermill alone reports success for a notebook that ended early."""
    import papermill

    out = tmp_path / "out.ipynb"
    papermill.execute_notebook(
        str(TRIVIAL), str(out), {"how": "exits"}, progress_bar=False, kernel_name="python3"
    )
    assert json.loads(out.read_text())["cells"][-1]["execution_count"] is None
    assert go(points(how=["exits"]))[0] == 1


def test_a_page_has_its_notebooks_title_and_neither_has_dead_widgets(tmp_path):
    bar = nbformat.v4.new_output(
        "display_data", {WIDGET: {"model_id": "1"}, "text/plain": "run:   0%|    | 0/9"}
    )
    whole = nbformat.v4.new_output("stream", text="nine runs")
    cells = [
        nbformat.v4.new_markdown_cell("# How often is <it> right?\n\nOften."),
        nbformat.v4.new_code_cell("run()", outputs=[bar, whole]),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / NOTEBOOK)
    _tidy(tmp_path)
    page = (tmp_path / PAGE).read_text()
    assert "<title>How often is &lt;it&gt; right?</title>" in page
    for text in (page, (tmp_path / NOTEBOOK).read_text()):
        assert "0/9" not in text
        assert "nine runs" in text


def test_page_read_in_a_terminal_sends_no_escapes_and_keeps_its_colours(tmp_path):
    said = "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x9b2J \u202eabc"
    outputs = [
        nbformat.v4.new_output("stream", text=said),
        nbformat.v4.new_output("display_data", {"text/html": f"<b>{said}</b>"}),
    ]
    cells = [nbformat.v4.new_markdown_cell(said), nbformat.v4.new_code_cell("1", outputs=outputs)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / NOTEBOOK)
    _tidy(tmp_path)
    page = (tmp_path / PAGE).read_text()
    assert page == harmless(page)
    assert page.count("␛]0;title␇") == 3
    assert '<span class="ansi-red-fg">red</span>' in page


def test_error_that_is_shown_and_kept_has_no_secret_and_no_escape_sequence(store):
    secret = f"ghp_{'A1b2C3d4' * 5}"
    failure = Failure("error", f"ValueError: \x1b]0;title\x07{secret}")
    failure.__cause__ = ValueError(f"\x1b[2J{secret}")
    assert secret not in str(failure)
    attempt = results.new_attempt("0" * 16)
    kept = (progress.set_aside(attempt, failure) / ERROR).read_text()
    assert "ValueError: ␛]0;title␇[hidden]" in kept
    assert "␛[2J[hidden]" in kept
