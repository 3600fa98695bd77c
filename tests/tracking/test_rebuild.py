"""`specexp store rebuild`: into the store's own database, another one, or what is left of it."""

import json
import os
from pathlib import Path

import pytest
from support.stores import METRICS, active, first, go, problems, quiet, run_of_key, shown

from specexp.errors import UserError
from specexp.tracking import rebuild
from specexp.tracking import results as store
from specexp.tracking import runs as track
from specexp.tracking.mlflow_store import Backend, StoreUnreachable

pytestmark = pytest.mark.usefixtures("copied_tables")


def test_rebuild_refuses_while_a_runner_works(filled):
    with store.claim("k"), pytest.raises(store.StoreBusy, match=str(os.getpid())):
        rebuild.rebuild(quiet())
    assert problems() == []


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
    assert problems()
    rebuild.rebuild(quiet())
    assert problems() == []
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


def created(monkeypatch) -> list[str]:
    """The run keys for which runs are created from now on."""
    from mlflow import MlflowClient

    real, keys = MlflowClient.create_run, []

    def create(self, experiment_id, start_time=None, tags=None, run_name=None):
        keys.append(tags["run_key"])
        return real(self, experiment_id, start_time, tags, run_name)

    monkeypatch.setattr(MlflowClient, "create_run", create)
    return keys


def test_rebuild_adds_to_another_store_only_what_it_lacks(filled, written, monkeypatch, tmp_path):
    assert go(written(1, 13))[0] == 1
    here = shown()
    (tmp_path / "backup").mkdir()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/backup/mlflow.db")
    assert len([line for line in problems() if "0 times" in line]) == 5
    keys = created(monkeypatch)
    rebuilt = rebuild.rebuild(quiet())
    assert (rebuilt.results, rebuilt.failures, rebuilt.aside) == (4, 1, ())
    assert len(keys) == 5
    assert problems() == []
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
    assert problems() == []

    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    rebuild.rebuild(quiet())
    assert problems() == []
    assert len(shown()) == 6


def test_rebuild_that_was_killed_leaves_nothing_half_elsewhere(filled, monkeypatch, tmp_path):
    here = shown()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/backup.db")
    real = Backend.put
    for _ in range(2):  # one run gets its files, then we are killed
        budget = [None]

        def dies(self, location, folder, files, budget=budget):
            if not budget:
                raise KeyboardInterrupt
            budget.pop()
            real(self, location, folder, files)

        monkeypatch.setattr(Backend, "put", dies)
        with pytest.raises(KeyboardInterrupt):
            rebuild.rebuild(quiet())
    monkeypatch.setattr(Backend, "put", real)
    rebuild.rebuild(quiet())
    assert shown() == here
    assert problems() == []


def test_rebuild_to_a_place_that_cannot_be_is_one_line(filled, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
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
