"""Damaged databases, torn results and lost answers: reported, repaired, nothing lost."""

import contextlib
import errno
import os
import signal
import sqlite3
import subprocess
import sys
from itertools import product

import pytest
from conftest import also, one_in
from support.stores import METRICS, first, go, half, problems, quiet, run_of, shown

from specexp.grids.machines import local
from specexp.tracking import mlflow_store, rebuild, results
from specexp.tracking import runs as track
from specexp.tracking.mlflow_store import StoreCorrupt, StoreUnreachable

pytestmark = pytest.mark.usefixtures("copied_tables")


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


HOSTILE = {"foreign": foreign, "folder": folder, "pipe": pipe}


@pytest.mark.parametrize("how", one_in(2, DAMAGE))
def test_damaged_database_is_reported_and_rebuilt(filled, written, how):
    todo = written(1, 13)
    assert go(todo)[0] == 1
    before = shown()
    for journal in ("-wal", "-shm"):
        (filled / f"mlflow.db{journal}").unlink(missing_ok=True)
    DAMAGE[how](filled / "mlflow.db")
    code, said = go(written(1, 2, 13))
    assert code == 4
    assert "specexp store rebuild" in said
    assert not (filled / "results" / written(2)[0].run_key).exists()
    assert any("specexp store rebuild" in line for line in problems())
    made = rebuild.rebuild(quiet())
    assert (made.results, made.failures) == (4, 1)
    assert any("damaged-" in p.name for p in made.aside)
    assert problems() == []
    assert shown() == before


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
    assert any("specexp store rebuild" in line for line in problems())


def test_database_deleted_in_mid_grid_loses_no_result(store, written, monkeypatch):
    real = local.execute

    def deletes(point, *rest):
        real(point, *rest)
        if point.params["x"] == 2:
            (store / "mlflow.db").unlink()

    monkeypatch.setattr(local, "execute", deletes)
    todo = written(1, 2, 3)
    code, said = go(todo)
    assert code == 4
    assert "specexp store rebuild" in said
    assert len(list((store / "results").iterdir())) == 2
    rebuild.rebuild(quiet())
    monkeypatch.setattr(local, "execute", real)
    assert go(todo)[0] == 0
    assert problems() == []
    assert {r[2] for r in shown()} == {"FINISHED"}


def test_unopenable_database_is_not_reported_corrupt(filled, monkeypatch):
    def connect(*_, **__):
        raise sqlite3.OperationalError("unable to open database file")

    monkeypatch.setattr(sqlite3, "connect", connect)
    with pytest.raises(StoreUnreachable, match="cannot be opened: check permissions"):
        track.backend().empty()


@pytest.mark.parametrize("number", [errno.EACCES, *also(errno.EIO, errno.EMFILE)])
def test_unreadable_result_is_published_later(store, written, monkeypatch, number):
    real, refused = results.load, []

    def load(path):
        if not refused and path.exists() and "attempts" not in path.parts:
            refused.append(path)
            raise OSError(number, os.strerror(number), str(path))
        return real(path)

    monkeypatch.setattr(results, "load", load)
    code, said = go(written(1, 2))
    assert code == 1
    assert f"error: [Errno {number}]" in said
    assert go(written(1, 2))[0] == 0
    assert problems() == []
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
    assert problems() == []
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
    assert problems() == []
    assert set(track.runs()["name"]) == {"ngram by hand"}


TORN = {
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "NUL bytes": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize(
    ("how", "name", "told"), one_in(6, product(TORN, ["tags.json", "point.json"], [True, False]))
)
def test_torn_failure_is_skipped_and_run_again(store, written, how, name, told):
    todo = written(1, 13)
    assert go(todo)[0] == 1
    [torn] = (store / "failed").iterdir()
    TORN[how](torn / name)
    if not told:
        track.client().delete_run(run_of(torn))
        (torn / ".published").unlink()
    assert problems() == []
    made = rebuild.rebuild(quiet())
    assert (made.results, made.failures) == (1, 0)
    assert set(made.torn) <= {torn}
    assert problems() == []
    assert [state for _, _, state, *_ in shown()] == ["FINISHED"]
    code, said = go(todo)
    assert code == 1
    assert "1 of 2 points to run" in said
    assert len(list((store / "failed").iterdir())) == 2
    assert problems() == []
    code, said = go(todo)
    assert "0 of 2 points to run" in said
    assert "error: planted" in said


@pytest.mark.parametrize("how", one_in(4, TORN))
def test_failure_is_kept_without_its_error_text(store, written, how):
    todo = written(13)
    assert go(todo)[0] == 1
    [kept] = (store / "failed").iterdir()
    TORN[how](kept / "error.txt")
    assert problems() == []
    assert rebuild.rebuild(quiet()).failures == 1
    code, said = go(todo)
    assert code == 1
    assert "0 of 1 points to run" in said
    assert "error: planted" in said


def test_deleted_experiment_is_restored_by_next_point(store, written):
    assert go(written(1))[0] == 0
    track.client().delete_experiment(track.experiment_id("grid of trifles"))
    assert problems() == [], "it was on purpose"
    assert go(written(1, 2))[0] == 0
    assert problems() == []


def test_run_duplicated_by_a_lost_answer_is_replaced(filled):
    """The server did as asked, but its answer was lost and the client asked again."""
    half(first(filled))
    (first(filled) / ".published").unlink()
    track.publish(first(filled))
    assert problems() == []


def test_new_database_has_the_version_by_which_its_tables_are_known(migrated):
    with contextlib.closing(sqlite3.connect(migrated / "mlflow.db")) as db:
        [version] = db.execute("SELECT version_num FROM alembic_version").fetchall()
    assert version == (mlflow_store.TABLES,)
