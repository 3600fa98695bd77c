"""MLflow is a view: what it lost comes back, what was deleted in it on purpose is named, what was
renamed appears under its new name, and nothing of a notebook stands for the runner's own."""

import json
import shutil
import sqlite3
from dataclasses import replace

import pytest
from mlflow.exceptions import MlflowException
from rich.console import Console
from support.stores import METRICS, active, go, problems, run_of, shown

from specexp.errors import UserError
from specexp.grids import progress
from specexp.grids.machines import local
from specexp.tracking import audit, mlflow_view, presence, report, runs
from specexp.tracking.mlflow_store import StoreUnreachable

pytestmark = pytest.mark.usefixtures("copied_tables")


def older_database(store):
    with sqlite3.connect(store / "mlflow.db") as db:
        for table in ("metrics", "latest_metrics", "params", "tags", "runs"):
            db.execute(f"DELETE FROM {table}")


def emptied_id(store):
    (store / "id").write_text("")


def half_a_run(store):
    [result, _] = sorted((store / "results").iterdir())
    runs.client().update_run(run_of(result), status="RUNNING")


def called_failed(store):
    [result, _] = sorted((store / "results").iterdir())
    runs.client().set_terminated(run_of(result), "FAILED")


def tag_deleted(store):
    [result, _] = sorted((store / "results").iterdir())
    runs.client().delete_tag(run_of(result), "run_key")


LOSSES = {
    "key deleted in the UI": (tag_deleted, 1),
    "older database": (older_database, 3),
    "id emptied": (emptied_id, 3),
    "run that never ended": (half_a_run, 1),
    "run that is called failed": (called_failed, 1),
}


@pytest.mark.parametrize("how", LOSSES)
def test_runs_that_mlflow_lost_are_published_again(store, written, how):
    todo = written(1, 2, 13)
    assert go(todo)[0] == 1
    lose, count = LOSSES[how]
    lose(store)
    [line] = presence.find_gaps(progress.shown_as(todo)).lines("`specexp grid run`")
    lacking = f"MLflow lacks {count} published run{'s' * (count > 1)}, which"
    assert line == f"{lacking} `specexp grid run` publishes again"
    code, text = go(todo)
    assert code == 1
    assert f"{lacking} this run publishes again" in text
    assert "0 of 3 points to run" in text
    assert len(runs.runs()) == 2
    assert problems() == []
    assert presence.find_gaps(progress.shown_as(todo)).lines() == []


def test_an_outage_takes_no_mark_and_a_run_that_is_gone_does(store, written, monkeypatch):
    assert go(written(1))[0] == 0
    [result] = (store / "results").iterdir()
    locked = MlflowException("database is locked")
    with monkeypatch.context() as patch:
        patch.setattr(runs.client().__class__, "get_run", lambda *_: (_ for _ in ()).throw(locked))
        with pytest.raises(StoreUnreachable):
            presence.unmark(result)
    assert runs.published(result)
    older_database(store)
    presence.unmark(result)
    assert not runs.published(result)


@pytest.mark.parametrize("what", ["all", "run"])
def test_files_that_mlflow_lost_are_published_again(store, written, what):
    todo = written(1, 2, 13)
    assert go(todo)[0] == 1
    before, artifacts = shown(), runs.backend().artifacts
    [run] = [run for run in active() if run.data.tags["run_key"] == todo[0].run_key]
    shutil.rmtree(artifacts if what == "all" else next(artifacts.glob(f"*/{run.info.run_id}")))
    count = "3 published runs" if what == "all" else "1 published run"
    line = f"MLflow lacks the files of {count}, which"
    assert presence.find_gaps(progress.shown_as(todo)).lines("X") == [f"{line} X publishes again"]
    broken = problems()
    assert len(broken) == (3 if what == "all" else 1)
    lacking = "MLflow lacks its files: run its grid again, or `specexp store rebuild`"
    assert f"results/{todo[0].run_key}: {lacking}" in broken
    code, text = go(todo)
    assert code == 1
    assert f"{line} this run publishes again" in text
    assert "0 of 3 points to run" in text
    assert shown() == before
    assert problems() == []
    assert "lacks" not in go(todo)[1]


@pytest.mark.parametrize("what", ["run", "experiment"])
def test_runs_deleted_on_purpose_are_named_and_stay_deleted(store, written, what):
    todo = written(1, 2)
    assert go(todo)[0] == 0
    result = store / "results" / todo[0].run_key
    if what == "run":
        runs.client().delete_run(run_of(result))
    else:
        runs.client().delete_experiment(runs.experiment_id("grid of trifles"))
    for _ in range(2):
        code, text = go(todo)
        assert code == 0
        count = 1 if what == "run" else 2
        deleted = f"{count} run{'s' * (count > 1)} deleted in MLflow on purpose (x="
        assert deleted in text
        assert "`specexp store rebuild` brings back what was deleted" in text
        assert len(active()) == 2 - count
    console = Console(record=True, width=300)
    assert audit.show(console)
    assert deleted in console.export_text()


def test_restored_experiment_shows_no_run_that_another_had_replaced(store, written):
    for options in ({}, {"force": True}):  # which replaces a result and a failure
        assert go(written(1, 13), **options)[0] == 1
    before = {run.info.run_id for run in active()}
    runs.client().delete_experiment(runs.experiment_id("grid of trifles"))
    assert go(written(1, 2, 13))[0] == 1
    after = {run.info.run_id for run in active()}
    assert (len(before), len(after), after > before) == (2, 3, True)
    assert problems() == []


def test_failure_deleted_on_purpose_is_no_fault(store, written):
    todo = written(13)
    for _ in range(2):  # the run of the first gives way to that of the second
        assert go(todo, retry_failed=True)[0] == 1
    [run] = active()
    runs.client().delete_run(run.info.run_id)
    assert problems() == []
    assert go(todo)[0] == 1
    assert active() == []


def test_what_was_renamed_appears_under_its_new_name(store, written, tmp_path):
    todo = written(1, 2, 13)
    assert go(todo)[0] == 1
    moved = tmp_path / "renamed.ipynb"
    moved.write_bytes(todo[0].notebook.read_bytes())
    for experiment, notebook in (("new", todo[0].notebook), ("new", moved)):
        now = [replace(p, experiment=experiment, notebook=notebook) for p in todo]
        code, text = go(now)
        assert code == 1
        assert "renamed as their notebook or experiment is: 2 results" in text
        assert "0 of 3 points to run" in text
        frame = runs.runs()
        assert set(frame["experiment"]) == {"new"}
        assert sorted(frame["name"]) == sorted(p.tags["name"] for p in now[:2])
        assert set(frame["tags.notebook"]) == {notebook.name}
        assert problems() == []
        assert "renamed as" not in go(now)[1]


def test_a_common_point_stays_in_the_experiment_of_the_grid_that_ran_it(store, written, tmp_path):
    todo = written(1, 2)
    assert go(todo)[0] == 0
    (other := tmp_path / "other.yaml").write_text("")
    theirs = [replace(p, experiment="other", files=(other,)) for p in written(2, 3)]
    code, text = go(theirs)
    assert code == 0
    assert "of another grid, and shown where that has them (grid of trifles): 1 result" in text
    assert sorted(runs.runs("grid of trifles")["params.x"]) == ["1", "2"]
    assert list(runs.runs("other")["params.x"]) == ["3"]
    todo[0].file.unlink()  # then its points are the other's
    assert "renamed as" in go(theirs)[1]
    assert sorted(runs.runs("other")["params.x"]) == ["2", "3"]
    assert problems() == []


def test_a_result_that_a_grid_takes_again_is_the_current_one(store, written, monkeypatch):
    [point] = before = written(1)
    edited = [replace(point, run_key="0" * 16)]
    for points, speedup, count in ((before, 1.6, 1), (edited, 1.1, 1), (before, 1.6, 0)):
        monkeypatch.setitem(METRICS, "speedup/measured", speedup)
        code, text = go(points)
        assert (code, f"{count} of 1 points to run" in text, f"{speedup}0x" in text) == (
            0,
            True,
            True,
        )
        [run] = report.of("grid of trifles")
        assert run.metrics["speedup/measured"] == speedup
        assert list(runs.runs("grid of trifles")["metrics.speedup/measured"]) == [speedup]
        [experiment] = [e for e in runs.backend().experiments() if e.name != "Default"]
        assert f"x=1: {speedup}0x" in experiment.tags[mlflow_view.NOTE]
    changed = (store / "results" / before[0].run_key).stat().st_mtime_ns
    go(before)
    assert (store / "results" / before[0].run_key).stat().st_mtime_ns == changed
    assert problems() == []


def test_rough_timings_do_not_supersede_careful_ones(store, points, written):
    assert go(written(1))[0] == 0
    rough = points(x=[1], together=True)
    assert go(rough)[0] == 0
    names = report.names_of(report.of("grid of trifles")).values()
    assert {*names} == {"x=1 together=no", "x=1 together=yes"}
    assert len(runs.runs("grid of trifles")) == 2


def test_experiment_that_its_results_left_has_no_answer_of_theirs(store, written):
    def note():
        return runs.client().get_experiment_by_name("grid of trifles").tags[mlflow_view.NOTE]

    assert go(written(1, 2))[0] == 0
    for count in (1, 2):
        moved = [replace(p, experiment="new") for p in written(*range(1, count + 1))]
        assert go(moved)[0] == 0
        assert ("best of 2 runs" in note(), bool(note())) == (False, count == 1)


def test_experiment_renamed_in_mlflow_stays_one_whatever_the_grid_calls_it(store, written):
    todo = written(1, 2)
    assert go(todo)[0] == 0
    runs.client().rename_experiment(runs.experiment_id("grid of trifles"), "renamed by hand")
    for name, count in (("grid of trifles", 3), ("renamed by hand", 4)):
        todo = [replace(p, experiment=name) for p in written(*range(1, count + 1))]
        assert presence.find_gaps(progress.shown_as(todo)).lines() == []
        code, text = go(todo)
        assert code == 0
        assert "lacks" not in text
        assert f"1 of {count} points to run" in text
        assert problems() == []
        assert set(runs.runs()["experiment"]) == {"renamed by hand"}
        assert len(runs.runs(name)) == len(active()) == count
    [experiment] = [e for e in runs.backend().experiments() if e.name != "Default"]
    assert experiment.tags["mlflow.note.content"].endswith(mlflow_view.OWN)


@pytest.mark.parametrize("tag", ["published", "run_key", "store", "status", "mlflow.runName"])
def test_tag_of_the_runner_is_refused_at_once(store, tag):
    with pytest.raises(UserError, match=rf"the tag '{tag}' is the runner's own: rename it"):
        runs.log("mine", {}, METRICS, tags={tag: "1"})
    assert not (store / "results").exists()


@pytest.mark.parametrize("x", [1, 13])
def test_marks_of_a_notebook_are_not_the_runners(store, written, monkeypatch, x):
    """Whatever it wrote into its folder or record itself; the first try to publish is cut short."""
    todo = written(x)
    real, cut = local.execute, runs.client().__class__

    def vandal(point, attempt, *rest):
        for name in ("published", ".published", ".label.json", "manifest.json"):
            (attempt / name).write_text(json.dumps({"experiment": "false", "tags": {}}))
        try:
            real(point, attempt, *rest)
        finally:
            file = attempt / "result.json"
            if file.exists():
                record = json.loads(file.read_text())
                record["tags"] |= {"published": "1", "store": "theirs", "status": "FAILED"}
                file.write_text(json.dumps(record))
            from specexp.tracking import results

            results.only_files(attempt)

    def dies(self, *args, **options):
        raise StoreUnreachable("cut short")

    monkeypatch.setattr(local, "execute", vandal)
    monkeypatch.setattr("specexp.grids.runner.PATIENCE_S", 0)
    with monkeypatch.context() as once:
        once.setattr(cut, "log_batch", dies)
        assert go(todo)[0] == 1
    code, _ = go(todo)
    assert code == (x == 13)
    [run] = active()
    assert run.info.status == ("FINISHED" if x == 1 else "FAILED")
    assert runs.is_whole(run)
    assert problems() == []
