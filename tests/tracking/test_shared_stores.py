"""Stores that are moved, copied, locked by others or share a server."""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console
from support.stores import go, problems, shown

from specexp.commands import app
from specexp.errors import UserError
from specexp.grids import runner as run
from specexp.grids.machines import local
from specexp.tracking import rebuild
from specexp.tracking import results as store
from specexp.tracking import runs as track
from specexp.tracking.mlflow_store import Backend, hidden

pytestmark = pytest.mark.usefixtures("copied_tables")


def test_moved_or_copied_store_works(filled, written, monkeypatch, tmp_path):
    assert go(written(1, 13))[0] == 1
    before = shown()
    for number, moved in enumerate((shutil.move, shutil.copytree)):
        old = store.root()
        new = tmp_path / f"anderer Ort # 100% ü {number}"
        moved(old, new)
        shutil.rmtree(old, ignore_errors=True)
        monkeypatch.setenv("SPECEXP_MLRUNS", str(new))
        assert problems() == []
        assert shown() == before
    assert go(written(1, 2))[0] == 0
    assert problems() == []
    assert not filled.exists()


def ends():
    """When each run of MLflow ended, by its key."""
    place = track.backend()
    runs = [r for e in place.experiments() for r in place.runs(e.experiment_id)]
    return {r.data.tags["run_key"]: r.info.end_time for r in runs}


def test_copied_store_keeps_end_times(filled, written, monkeypatch, tmp_path):
    todo = written(1, 13)
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
    assert problems() == []


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


@pytest.mark.parametrize("seconds", [1, pytest.param(30, marks=pytest.mark.slow)])
def test_locked_database_is_waited_for(store, written, monkeypatch, seconds):
    real, held = local.execute, []

    def locks(point, *rest):
        real(point, *rest)
        if not held:
            held.append(locked(store / "mlflow.db", seconds))

    monkeypatch.setattr(local, "execute", locks)
    assert go(written(1, 2))[0] == 0
    held[0].join()
    assert problems() == []
    assert len(shown()) == 2


@pytest.mark.slow
def test_next_run_publishes_after_a_long_lock(store, written, monkeypatch):
    monkeypatch.setattr(run, "PATIENCE_S", 1)
    real, held = local.execute, []

    def locks(point, *rest):
        real(point, *rest)
        if not held:
            held.append(locked(store / "mlflow.db", 60))

    monkeypatch.setattr(local, "execute", locks)
    code, said = go(written(1, 2))
    assert code == 1
    assert "another program has locked it" in said
    assert "run the same command again" in said
    held[0].join()
    assert go(written(1, 2))[0] == 0
    assert problems() == []


def test_constant_reader_does_not_disturb_a_grid(store, written):
    stop, read = threading.Event(), []

    def reads():
        while not stop.is_set():
            read.append(len(track.runs()))

    reader = threading.Thread(target=reads)
    reader.start()
    try:
        assert go(written(*range(5)))[0] == 0
    finally:
        stop.set()
        reader.join()
    assert read
    assert problems() == []


def test_stores_sharing_a_server_keep_apart(tmp_path, migrated, monkeypatch, written):
    shutil.copy(migrated / "mlflow.db", tmp_path / "shared.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/shared.db")
    todo = written(1, 13)
    for name in ("mine", "yours"):
        monkeypatch.setenv("SPECEXP_MLRUNS", str(tmp_path / name))
        code, said = go(todo)
        assert code == 1
        assert str(tmp_path / "shared.db") in said
        assert problems() == []
    assert sorted(r[2] for r in shown()) == ["FAILED", "FAILED", "FINISHED", "FINISHED"]
    monkeypatch.setenv("SPECEXP_MLRUNS", str(tmp_path / "mine"))
    assert go(todo, force=True)[0] == 1
    assert problems() == []
    assert len([r for r in shown() if r[2] == "FINISHED"]) == 2


def test_report_of_a_store_that_takes_none_goes_elsewhere(filled, monkeypatch, capsys, tmp_path):
    def report(*words):
        monkeypatch.setattr(sys, "argv", ["specexp", "report", "mine", *words])
        with pytest.raises(SystemExit) as ended:
            app.main()
        return ended.value.code, capsys.readouterr().err

    shutil.rmtree(filled / "reports")
    (filled / "reports").write_text("in the way of the folder")
    refused = [report()]
    (filled / "reports").unlink()
    (filled / "reports" / "mine.html" / "in the way of the page").mkdir(parents=True)
    refused.append(report())
    for (code, err), why in zip(refused, ["File exists", "Is a directory"], strict=True):
        advice = f"cannot write to {filled}/reports: {why}; name a file with --out"
        assert (code, err) == (2, f"error: {advice}\n")
    assert report("--out", str(tmp_path / "mine.html")) == (0, "")


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
