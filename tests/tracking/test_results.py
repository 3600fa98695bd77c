"""The store from its users' side: checked, damaged, rebuilt, moved, copied, shared."""

import contextlib
import errno
import io
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console

from specexp import api
from specexp.errors import UserError
from specexp.grids import runner as run
from specexp.grids.execute import Failure
from specexp.grids.machines import local
from specexp.tracking import audit, rebuild, results
from specexp.tracking import results as store
from specexp.tracking import runs as track
from specexp.tracking.mlflow_store import Backend, StoreCorrupt, StoreUnreachable, hidden

METRICS = {"acceptance/rate": 0.5, "speedup/measured": 1.25}
SERIES = {"acceptance/at_position": [0.9, 0.8], "speedup/at_batch": {1: 2.0, 32: 0.9}}


@pytest.fixture(autouse=True)
def made_fast(monkeypatch, migrated):
    """Copy MLflow's tables from a template, as creating them takes seconds."""
    real = Backend._create_tables

    def make(self, uri):
        if uri.startswith("sqlite") and not Path(uri.removeprefix("sqlite:///")).exists():
            shutil.copy(migrated / "mlflow.db", uri.removeprefix("sqlite:///"))
        real(self, uri)

    monkeypatch.setattr(Backend, "_create_tables", make)


@pytest.fixture
def filled(store):
    """A store with three results that were logged by hand."""
    for number in range(3):
        track.log("mine", {"drafter": "ngram", "x": [number]}, METRICS, SERIES)
    return store


def first(mlruns):
    return sorted((mlruns / "results").iterdir())[0]


def run_of(result):
    return (result / "published").read_text()


def test_audit_of_intact_store_is_empty(filled):
    assert audit.problems() == []


def test_audit_of_missing_store_is_empty(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECEXP_MLRUNS", str(tmp_path / "nothing"))
    assert audit.problems() == []
    assert not (tmp_path / "nothing").exists()


def half(result):
    track.client().create_run(track.experiment_id("mine"), tags={"run_key": result.name})


def twice(result):
    (result / "published").unlink()
    record = json.loads((result / "tags.json").read_text())
    old = run_of_key(result.name)
    track.client().set_tag(old, "run_key", "hidden")
    track.publish(result)
    track.client().set_tag(old, "run_key", record["run_key"])


def run_of_key(key):
    place = track.backend()
    runs = [r for e in place.experiments() for r in place.runs(e.experiment_id)]
    [run] = [r for r in runs if r.data.tags.get("run_key") == key]
    return run.info.run_id


BREAKS = {
    "torn": (lambda r: (r / "result.json").write_text("{}"), "changed since it was committed"),
    "deleted": (lambda r: track.client().delete_run(run_of(r)), "0 times"),
    "twice": (twice, "2 times"),
    "half": (half, "RUNNING"),
    "other metric": (lambda r: track.client().log_metric(run_of(r), "new/one", 1.0), "metric"),
    "other step": (
        lambda r: track.client().log_metric(run_of(r), "speedup/at_batch", 3.0, step=2),
        "at_batch",
    ),
    "other parameter": (lambda r: track.client().log_param(run_of(r), "y", 1), "parameter"),
    "status": (lambda r: track.client().set_terminated(run_of(r), "FAILED"), "0 times"),
    "unmarked": (lambda r: track.client().set_tag(run_of(r), "published", "0"), "in part"),
    "no result": (lambda r: r.rename(r.parent.parent / "gone"), "is missing"),
    "attempt": (lambda r: store.new_attempt("k"), "a process that died"),
}


@pytest.mark.parametrize("how", BREAKS)
def test_audit_reports_each_violation(filled, how):
    """The controls: a check that finds nothing would pass everything."""
    breaks, said = BREAKS[how]
    breaks(first(filled))
    found = audit.problems()
    assert found
    assert any(said in line for line in found), found


@pytest.mark.parametrize("how", ["torn", "deleted", "half", "other metric"])
def test_audit_skips_claimed_points(filled, how):
    BREAKS[how][0](first(filled))
    with store.claim(first(filled).name):
        assert audit.problems() == []
    assert audit.problems()


def between_looks(monkeypatch, then):
    monkeypatch.setattr(audit.time, "sleep", lambda seconds: then())


def test_audit_ignores_what_only_one_look_finds(filled, monkeypatch):
    result = first(filled)
    away = result.rename(filled / "away")
    between_looks(monkeypatch, lambda: away.rename(result))
    assert audit.problems() == []


def test_audit_reports_what_two_looks_find(filled, monkeypatch):
    """A lasting problem is reported, one that only one of two looks finds is not."""
    lasting, passing = sorted((filled / "results").iterdir())[:2]
    shutil.rmtree(lasting)
    away = passing.rename(filled / "away")

    def then():
        away.rename(passing)
        store.new_attempt("just-begun")

    between_looks(monkeypatch, then)
    [line] = audit.problems()
    assert lasting.name in line


def test_audit_sees_damage_after_a_busy_database(filled, monkeypatch):
    shutil.rmtree(first(filled))
    real, looks = audit._shown, []

    def busy():
        looks.append(1)
        if len(looks) == 1:
            raise StoreUnreachable("another program has locked it")
        return real()

    monkeypatch.setattr(audit, "_shown", busy)
    [line] = audit.problems()
    assert "is missing" in line


def test_audit_reports_unreachable_store(filled, monkeypatch):
    looks = []

    def away():
        looks.append(1)
        raise StoreUnreachable(f"no answer to connection {len(looks)}")

    monkeypatch.setattr(audit, "_shown", away)
    assert audit.problems() == ["no answer to connection 2"]


def test_audit_ignores_point_finished_meanwhile(filled, monkeypatch):
    """It was claimed, committed, published and released between two looks."""
    real, looks = audit._shown, []

    def slowly():
        looks.append(1)
        if len(looks) == 1:
            track.log("mine", {"drafter": "ngram"}, METRICS)
        return real()

    monkeypatch.setattr(audit, "_shown", slowly)
    assert audit.problems() == []
    assert len(looks) == 2


# --- damage --------------------------------------------------------------------------------------


@pytest.fixture
def points(points, monkeypatch):
    """A grid whose points write their result without a kernel; x = 13 fails."""

    def execute(point, attempt, *rest):
        if point.params["x"] == 13:
            raise Failure("error", "planted")
        record = {
            "experiment": point.experiment, "params": point.params, "metrics": METRICS,
            "series": {"acceptance/at_position": {"1": 0.5, "2": 0.25}}, "tags": {"device": "cpu"},
        }  # fmt: skip
        (attempt / "result.json").write_text(json.dumps(record))

    monkeypatch.setattr(api, "check", lambda params: [])
    monkeypatch.setattr(local, "execute", execute)
    return lambda *xs: points(x=list(xs))


def go(points, **options):
    console = Console(record=True, width=300, force_terminal=False)
    code = run.run(points, console, **options)
    return code, console.export_text()


def quiet():
    return Console(quiet=True)


def shown(place=None):
    """Everything active in MLflow except times and ids."""
    place = place or track.backend()
    found = []
    for e in place.experiments():
        for r in place.runs(e.experiment_id):
            points = {
                n: sorted((m.step, m.value) for m in place.history(r.info.run_id, n))
                for n in r.data.metrics
            }
            times = r.info.start_time, r.info.end_time
            found.append((e.name, r.info.run_name, r.info.status, times, r.data.params, r.data.tags,
                          points, place.digests(r)))  # fmt: skip
    return sorted(found, key=repr)


def cut(db):
    os.truncate(db, db.stat().st_size // 2)


def overwrite(db):
    with db.open("r+b") as file:
        file.seek(2 * 4096)
        file.write(b"\xff" * 4096 * 60)


def newer(db):
    with contextlib.closing(sqlite3.connect(db)) as other:
        other.execute("UPDATE alembic_version SET version_num = 'ffffffffffff'")
        other.commit()


def foreign(db):
    db.unlink()
    with contextlib.closing(sqlite3.connect(db)) as other:
        other.execute("CREATE TABLE diary (day TEXT)")


def trapped(db):
    with contextlib.closing(sqlite3.connect(db)) as other:
        other.execute("CREATE TRIGGER trap AFTER INSERT ON runs BEGIN DELETE FROM runs; END")


def folder(db):
    db.unlink()
    db.mkdir()


def pipe(db):
    db.unlink()
    os.mkfifo(db)


DAMAGE = {
    "corrupt": lambda db: db.write_bytes(b"no database" * 1000),
    "overwritten": overwrite,
    "truncated": cut,
    "zero length": lambda db: os.truncate(db, 0),
    "newer schema": newer,
    "deleted": lambda db: db.unlink(),
}


HOSTILE = {"foreign": foreign, "trigger": trapped, "folder": folder, "pipe": pipe}


@pytest.mark.parametrize("how", DAMAGE)
def test_damaged_database_is_reported_and_rebuilt(filled, points, how):
    todo = points(1, 13)
    assert go(todo)[0] == 1
    before = shown()
    for journal in ("-wal", "-shm"):
        (filled / f"mlflow.db{journal}").unlink(missing_ok=True)
    DAMAGE[how](filled / "mlflow.db")
    code, said = go(points(1, 2, 13))
    assert code == 4
    assert "specexp store rebuild" in said
    assert not (filled / "results" / points(2)[0].run_key).exists()
    assert any("specexp store rebuild" in line for line in audit.problems())
    made = rebuild.rebuild(quiet())
    assert (made.results, made.failures) == (4, 1)
    assert any("damaged-" in p.name for p in made.aside)
    assert audit.problems() == []
    assert shown() == before


def test_store_check_of_missing_store_creates_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECEXP_MLRUNS", str(tmp_path / "mistyped"))
    console = Console(file=io.StringIO(), width=200)
    assert audit.show(console)
    assert console.file.getvalue() == f"no store at {tmp_path / 'mistyped'} yet: nothing to check\n"
    assert not (tmp_path / "mistyped").exists()


@pytest.mark.parametrize("how", HOSTILE)
def test_foreign_database_is_refused_by_every_reader(filled, how):
    (filled / "mlflow.db-wal").unlink(missing_ok=True)
    (filled / "mlflow.db-shm").unlink(missing_ok=True)
    HOSTILE[how](filled / "mlflow.db")
    for reads in (track.initialise, track.runs):
        with pytest.raises(StoreCorrupt, match="specexp store rebuild"):
            reads()
    with pytest.raises(StoreCorrupt, match="results are safe"):
        track.log("mine", {"drafter": "ngram"}, METRICS)
    assert any("specexp store rebuild" in line for line in audit.problems())


def test_database_deleted_in_mid_grid_loses_no_result(store, points, monkeypatch):
    real = local.execute

    def deletes(point, *rest):
        real(point, *rest)
        if point.params["x"] == 2:
            (store / "mlflow.db").unlink()

    monkeypatch.setattr(local, "execute", deletes)
    todo = points(1, 2, 3)
    code, said = go(todo)
    assert code == 4
    assert "specexp store rebuild" in said
    assert len(list((store / "results").iterdir())) == 2
    rebuild.rebuild(quiet())
    monkeypatch.setattr(local, "execute", real)
    assert go(todo)[0] == 0
    assert audit.problems() == []
    assert {r[2] for r in shown()} == {"FINISHED"}


def test_unopenable_database_is_not_reported_corrupt(filled, monkeypatch):
    def connect(*_, **__):
        raise sqlite3.OperationalError("unable to open database file")

    monkeypatch.setattr(sqlite3, "connect", connect)
    with pytest.raises(StoreUnreachable, match="cannot be opened: check permissions"):
        track.backend().empty()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.EMFILE])
def test_unreadable_result_is_published_later(store, points, monkeypatch, number):
    real, refused = results.load, []

    def load(path):
        if not refused:
            refused.append(path)
            raise OSError(number, os.strerror(number), str(path))
        return real(path)

    monkeypatch.setattr(results, "load", load)
    code, said = go(points(1, 2))
    assert code == 1
    assert f"error: [Errno {number}]" in said
    assert go(points(1, 2))[0] == 0
    assert audit.problems() == []
    assert len(shown()) == 2


def test_journal_of_a_killed_writer_is_used(filled):
    """The WAL and shared memory of a killed process hold its committed data."""
    code = (
        "import os, signal, sqlite3, sys\n"
        "db = sqlite3.connect(sys.argv[1])\n"
        "db.execute('PRAGMA wal_autocheckpoint=0')\n"
        "db.execute(\"UPDATE runs SET name = 'renamed'\"); db.commit()\n"
        "db.execute(\"UPDATE runs SET name = 'torn'\")\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code, filled / "mlflow.db"], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (filled / "mlflow.db-wal").stat().st_size
    assert audit.problems() == []
    assert set(track.runs()["name"]) == {"renamed"}


def test_journal_of_a_deleted_database_is_not_used(filled):
    code = (
        "import os, signal, sqlite3, sys\n"
        "db = sqlite3.connect(sys.argv[1])\n"
        "db.execute('PRAGMA wal_autocheckpoint=0')\n"
        "db.execute(\"UPDATE runs SET name = 'renamed'\"); db.commit()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, filled / "mlflow.db"], check=False)
    (filled / "mlflow.db").unlink()
    with pytest.raises(StoreCorrupt):
        track.initialise()
    made = rebuild.rebuild(quiet())
    assert any(p.name.endswith("-wal") for p in made.aside)
    assert audit.problems() == []
    assert set(track.runs()["name"]) == {"ngram by hand"}


def test_rebuild_refuses_while_a_runner_works(filled):
    with store.claim("k"), pytest.raises(store.StoreBusy, match=str(os.getpid())):
        rebuild.rebuild(quiet())
    assert audit.problems() == []


def test_killed_rebuild_can_be_repeated(filled, monkeypatch):
    before = shown()
    real, done = track.publish, []

    def dies(folder):
        if done:
            raise KeyboardInterrupt
        done.append(real(folder))

    monkeypatch.setattr(track, "publish", dies)
    with pytest.raises(KeyboardInterrupt):
        rebuild.rebuild(quiet())
    monkeypatch.setattr(track, "publish", real)
    assert audit.problems()
    rebuild.rebuild(quiet())
    assert audit.problems() == []
    assert shown() == before


def test_rebuild_reports_torn_results(filled):
    torn = first(filled)
    (torn / "result.json").write_text("{}")
    assert rebuild.rebuild(quiet()).torn == (torn,)
    assert len(track.runs()) == 2


def committed(name: str, series: dict) -> Path:
    """A result of an earlier version, which rejected less."""
    key = f"byhand-{name}"
    attempt = store.new_attempt(key)
    metrics = {"acceptance/rate": 0.5}
    record = {"experiment": "mine", "params": {}, "metrics": metrics, "series": series}
    (attempt / store.RESULT).write_text(json.dumps(record))
    return store.commit(attempt, key, {"status": "FINISHED"})


def test_rebuild_skips_what_mlflow_cannot_hold(filled):
    odd = committed("odd", {"c/d": {"0.5": 1.0}})
    fine = committed("fine", {"c/d": {"5": 1.0}})
    assert rebuild.rebuild(quiet()).torn == (odd,)
    assert len(track.runs()) == 4
    assert track.published(fine)


TORN = {
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "NUL bytes": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("name", ["tags.json", "point.json"])
@pytest.mark.parametrize("how", TORN)
@pytest.mark.parametrize("told", [True, False])
def test_torn_failure_is_skipped_and_run_again(store, points, how, name, told):
    todo = points(1, 13)
    assert go(todo)[0] == 1
    [torn] = (store / "failed").iterdir()
    TORN[how](torn / name)
    if not told:
        track.client().delete_run(run_of(torn))
        (torn / "published").unlink()
    assert audit.problems() == []
    made = rebuild.rebuild(quiet())
    assert (made.results, made.failures) == (1, 0)
    assert set(made.torn) <= {torn}
    assert audit.problems() == []
    assert [state for _, _, state, *_ in shown()] == ["FINISHED"]
    code, said = go(todo)
    assert code == 1
    assert "1 of 2 points to run" in said
    assert len(list((store / "failed").iterdir())) == 2
    assert audit.problems() == []
    code, said = go(todo)
    assert "0 of 2 points to run" in said
    assert "error: planted" in said


@pytest.mark.parametrize("how", TORN)
def test_failure_is_kept_without_its_error_text(store, points, how):
    todo = points(13)
    assert go(todo)[0] == 1
    [kept] = (store / "failed").iterdir()
    TORN[how](kept / "error.txt")
    assert audit.problems() == []
    assert rebuild.rebuild(quiet()).failures == 1
    code, said = go(todo)
    assert code == 1
    assert "0 of 1 points to run" in said
    assert "error: planted" in said


def test_deleted_experiment_is_restored_by_next_point(store, points):
    assert go(points(1))[0] == 0
    track.client().delete_experiment(track.experiment_id("grid of trifles"))
    assert audit.problems()
    assert go(points(1, 2))[0] == 0
    assert audit.problems() == []


def test_run_duplicated_by_a_lost_answer_is_replaced(filled):
    """The server did as asked, but its answer was lost and the client asked again."""
    half(first(filled))
    (first(filled) / "published").unlink()
    track.publish(first(filled))
    assert audit.problems() == []


def test_moved_or_copied_store_works(filled, points, monkeypatch, tmp_path):
    assert go(points(1, 13))[0] == 1
    before = shown()
    for number, moved in enumerate((shutil.move, shutil.copytree)):
        old = store.root()
        new = tmp_path / f"anderer Ort # 100% ü {number}"
        moved(old, new)
        shutil.rmtree(old, ignore_errors=True)
        monkeypatch.setenv("SPECEXP_MLRUNS", str(new))
        assert audit.problems() == []
        assert shown() == before
    assert go(points(1, 2))[0] == 0
    assert audit.problems() == []
    assert not filled.exists()


def ends():
    """When each run of MLflow ended, by its key."""
    place = track.backend()
    runs = [r for e in place.experiments() for r in place.runs(e.experiment_id)]
    return {r.data.tags["run_key"]: r.info.end_time for r in runs}


def test_copied_store_keeps_end_times(filled, points, monkeypatch, tmp_path):
    todo = points(1, 13)
    assert go(todo)[0] == 1
    before, failures = ends(), run.failures_of(todo)
    tags = [json.loads(file.read_text()) for file in filled.glob("*/*/tags.json")]
    assert sorted(t["ended"] for t in tags) == sorted(before.values())
    shutil.copytree(filled, tmp_path / "copy")
    for file in (tmp_path / "copy").glob("*/*/tags.json"):
        os.utime(file, (0, 0))
    monkeypatch.setenv("SPECEXP_MLRUNS", str(tmp_path / "copy"))
    rebuild.rebuild(Console(quiet=True))
    assert ends() == before
    assert run.failures_of(todo) == failures
    assert audit.problems() == []


# --- several at once -----------------------------------------------------------------------------


def locked(db: Path, seconds: float) -> threading.Thread:
    """Another program that holds the database for itself, readers and all; returns once it does."""
    code = (
        "import sqlite3, sys, time\n"
        "db = sqlite3.connect(sys.argv[1], timeout=60, isolation_level=None)\n"
        "db.execute('PRAGMA locking_mode=EXCLUSIVE')\n"
        "db.execute('BEGIN EXCLUSIVE')\n"
        'db.execute("UPDATE experiments SET creation_time = creation_time")\n'
        "print('held', flush=True); time.sleep(float(sys.argv[2])); db.execute('COMMIT')"
    )
    held = subprocess.Popen([sys.executable, "-c", code, str(db), str(seconds)],
                            stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert held.stdout.readline().strip() == "held"
    waits = threading.Thread(target=held.wait)
    waits.start()
    return waits


@pytest.mark.parametrize("seconds", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_locked_database_is_waited_for(store, points, monkeypatch, seconds):
    real, held = local.execute, []

    def locks(point, *rest):
        real(point, *rest)
        if not held:
            held.append(locked(store / "mlflow.db", seconds))

    monkeypatch.setattr(local, "execute", locks)
    assert go(points(1, 2))[0] == 0
    held[0].join()
    assert audit.problems() == []
    assert len(shown()) == 2


@pytest.mark.slow
def test_next_run_publishes_after_a_long_lock(store, points, monkeypatch):
    monkeypatch.setattr(run, "PATIENCE_S", 1)
    real, held = local.execute, []

    def locks(point, *rest):
        real(point, *rest)
        if not held:
            held.append(locked(store / "mlflow.db", 60))

    monkeypatch.setattr(local, "execute", locks)
    code, said = go(points(1, 2))
    assert code == 1
    assert "another program has locked it" in said
    assert "run the same command again" in said
    held[0].join()
    assert go(points(1, 2))[0] == 0
    assert audit.problems() == []


def test_constant_reader_does_not_disturb_a_grid(store, points):
    stop, read = threading.Event(), []

    def reads():
        while not stop.is_set():
            read.append(len(track.runs()))

    reader = threading.Thread(target=reads)
    reader.start()
    try:
        assert go(points(*range(5)))[0] == 0
    finally:
        stop.set()
        reader.join()
    assert read
    assert audit.problems() == []


def test_stores_sharing_a_server_keep_apart(tmp_path, migrated, monkeypatch, points):
    shutil.copy(migrated / "mlflow.db", tmp_path / "shared.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/shared.db")
    todo = points(1, 13)
    for name in ("mine", "yours"):
        monkeypatch.setenv("SPECEXP_MLRUNS", str(tmp_path / name))
        code, said = go(todo)
        assert code == 1
        assert str(tmp_path / "shared.db") in said
        assert audit.problems() == []
    assert sorted(r[2] for r in shown()) == ["FAILED", "FAILED", "FINISHED", "FINISHED"]
    monkeypatch.setenv("SPECEXP_MLRUNS", str(tmp_path / "mine"))
    assert go(todo, force=True)[0] == 1
    assert audit.problems() == []
    assert len([r for r in shown() if r[2] == "FINISHED"]) == 2


# --- other stores --------------------------------------------------------------------------------


def created(monkeypatch) -> list[str]:
    """The run keys for which runs are created from now on."""
    from mlflow import MlflowClient

    real, keys = MlflowClient.create_run, []

    def create(self, experiment_id, start_time=None, tags=None, run_name=None):
        keys.append(tags["run_key"])
        return real(self, experiment_id, start_time, tags, run_name)

    monkeypatch.setattr(MlflowClient, "create_run", create)
    return keys


def test_rebuild_adds_to_another_store_only_what_it_lacks(filled, points, monkeypatch, tmp_path):
    assert go(points(1, 13))[0] == 1
    here = shown()
    (tmp_path / "backup").mkdir()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/backup/mlflow.db")
    assert len([line for line in audit.problems() if "0 times" in line]) == 5
    keys = created(monkeypatch)
    rebuilt = rebuild.rebuild(quiet())
    assert (rebuilt.results, rebuilt.failures, rebuilt.aside) == (4, 1, ())
    assert len(keys) == 5
    assert audit.problems() == []
    assert shown() == here

    stranger = track.client().create_run(track.experiment_id("mine"), tags={"run_key": "theirs"})
    ids = {r.info.run_id for r in active()}
    rebuild.rebuild(quiet())
    assert len(keys) == 6  # the stranger's
    assert {r.info.run_id for r in active()} == ids

    lost = first(filled)
    track.client().delete_run(run_of_key(lost.name))
    track.log("mine", {"drafter": "ngram", "x": "new"}, METRICS)
    keys.clear()
    rebuild.rebuild(quiet())
    assert keys == [lost.name]
    assert stranger.info.run_id in {r.info.run_id for r in active()}
    track.client().delete_run(stranger.info.run_id)
    assert audit.problems() == []

    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    rebuild.rebuild(quiet())
    assert audit.problems() == []
    assert len(shown()) == 6


def active() -> list:
    place = track.backend()
    return [r for e in place.experiments() for r in place.runs(e.experiment_id)]


def test_rebuild_that_was_killed_leaves_nothing_half_elsewhere(filled, monkeypatch, tmp_path):
    here = shown()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/backup.db")
    real = Backend.put
    for _ in range(2):  # one run gets its files, then we are killed
        budget = [None]

        def dies(self, run, folder, files, budget=budget):
            if not budget:
                raise KeyboardInterrupt
            budget.pop()
            real(self, run, folder, files)

        monkeypatch.setattr(Backend, "put", dies)
        with pytest.raises(KeyboardInterrupt):
            rebuild.rebuild(quiet())
    monkeypatch.setattr(Backend, "put", real)
    rebuild.rebuild(quiet())
    assert shown() == here
    assert audit.problems() == []


def test_rebuild_to_a_place_that_cannot_be_is_one_line(filled, tmp_path, monkeypatch):
    for address, kind, line in (
        (f"sqlite:///{tmp_path}/no/x.db", UserError, "no does not exist: create it first"),
        ("http://127.0.0.1:9", StoreUnreachable, "connection refused"),
        ("file:///x", UserError, r"sqlite:///PATH"),
    ):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        with pytest.raises(kind, match=line):
            rebuild.rebuild(quiet())
    for address in ("", "somewhere", "file:///x", "ftp://x", "sqlite:///", "postgres://a:b@c/d"):
        with pytest.raises(UserError, match=r"sqlite:///PATH"):
            Backend.at(address, tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install .specexp\[postgres\]"):
        Backend.at("postgresql://a:b@c/d", tmp_path)


def test_passwords_in_addresses_are_never_shown(tmp_path, monkeypatch):
    for address in (
        "postgresql://me:hush@host/db", "http://me:hush@host:5000", "postgresql://me:h/u@hush@h/db",
        "postgresql+psycopg2:///db?host=h&password=hush", "postgresql:///db?sslpassword=hush&port=1",
    ):  # fmt: skip
        assert "hush" not in hidden(address)
        assert "hush" not in str(Backend(address, tmp_path))
        with pytest.raises(UserError) as refused, Backend(address, tmp_path).reaching():
            raise track_error(address)
        assert "hush" not in str(refused.value)
    monkeypatch.setattr(sys, "argv", ["specexp", "ui", "postgresql://me:hush@host/db"])
    with store.claim("k"):
        assert "hush" not in str(store.holder("k"))
        assert "specexp ui" in str(store.holder("k"))


def track_error(address):
    from mlflow.exceptions import MlflowException

    return MlflowException(f"cannot reach {address}: no")
