"""The audit: each violation of a store's invariants is reported, and nothing else."""

import io
import json
import shutil

import pytest
from conftest import also
from rich.console import Console
from support.stores import METRICS, first, half, problems, run_of, run_of_key

from specexp.tracking import audit, mlflow_view
from specexp.tracking import results as store
from specexp.tracking import runs as track
from specexp.tracking.mlflow_store import StoreUnreachable

pytestmark = pytest.mark.usefixtures("copied_tables")


def test_audit_of_intact_store_is_empty(filled):
    assert problems() == []


def test_values_are_rounded_for_mlflow_and_kept_whole(store, monkeypatch):
    logged = {"speedup/measured": 4 / 3, "a/cost": 2 / 3e7, "a/large": 12345.6, "counts/all": 98765}
    shown = {"speedup/measured": 1.333, "a/cost": 6.667e-8, "a/large": 12346, "counts/all": 98765}
    track.log("mine", {"x": 1}, logged, {"a/curve": [1 / 3]})
    result = first(store)
    record = json.loads((result / "result.json").read_text())
    assert record["metrics"] == logged
    assert track.client().get_run(run_of(result)).data.metrics == {**shown, "a/curve": 0.3333}
    with monkeypatch.context() as patch:  # as runs were published before
        patch.setattr(mlflow_view, "rounded", float)
        track.log("mine", {"x": 2}, logged, {"a/curve": [1 / 3]})
    assert problems() == []


def test_audit_of_missing_store_is_empty(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECEXP_MLRUNS", str(tmp_path / "nothing"))
    assert problems() == []
    assert not (tmp_path / "nothing").exists()


def test_store_check_of_missing_store_creates_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECEXP_MLRUNS", str(tmp_path / "mistyped"))
    console = Console(file=io.StringIO(), width=200)
    assert audit.show(console)
    assert console.file.getvalue() == f"no store at {tmp_path / 'mistyped'} yet: nothing to check\n"
    assert not (tmp_path / "mistyped").exists()


def test_store_check_says_what_it_counts_and_that_nothing_is_published(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECEXP_MLRUNS", str(tmp_path))
    console = Console(file=io.StringIO(), width=200)
    assert audit.show(console)
    first, second, *_, note, _ = console.file.getvalue().splitlines()
    assert first.split() == ["checked"]
    assert second == "ok            0  results are intact"
    assert first.endswith("checked")
    assert note == "no runs published yet: `specexp grid run` publishes them"


def unpublished(result):
    track.client().delete_run(run_of(result))
    (result / ".published").unlink()


def twice(result):
    (result / ".published").unlink()
    record = json.loads((result / "tags.json").read_text())
    old = run_of_key(result.name)
    track.client().set_tag(old, "run_key", "hidden")
    track.publish(result)
    track.client().set_tag(old, "run_key", record["run_key"])


BREAKS = {
    "torn": (lambda r: (r / "result.json").write_text("{}"), "changed since it was committed"),
    "unpublished": (unpublished, "0 times"),
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
    found = problems()
    assert found
    assert any(said in line for line in found), found


@pytest.mark.parametrize("how", ["torn", "other metric", *also("unpublished", "half")])
def test_audit_skips_claimed_points(filled, how):
    BREAKS[how][0](first(filled))
    with store.claim(first(filled).name):
        assert problems() == []
    assert problems()


def between_looks(monkeypatch, then):
    monkeypatch.setattr(audit.time, "sleep", lambda seconds: then())


def test_audit_ignores_what_only_one_look_finds(filled, monkeypatch):
    result = first(filled)
    away = result.rename(filled / "away")
    between_looks(monkeypatch, lambda: away.rename(result))
    assert problems() == []


def test_audit_reports_what_two_looks_find(filled, monkeypatch):
    """A lasting problem is reported, one that only one of two looks finds is not."""
    lasting, passing = sorted((filled / "results").iterdir())[:2]
    shutil.rmtree(lasting)
    away = passing.rename(filled / "away")

    def then():
        away.rename(passing)
        store.new_attempt("just-begun")

    between_looks(monkeypatch, then)
    [line] = problems()
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
    [line] = problems()
    assert "is missing" in line


def test_audit_reports_unreachable_store(filled, monkeypatch):
    looks = []

    def away():
        looks.append(1)
        raise StoreUnreachable(f"no answer to connection {len(looks)}")

    monkeypatch.setattr(audit, "_shown", away)
    assert problems() == ["no answer to connection 2"]


def test_audit_ignores_point_finished_meanwhile(filled, monkeypatch):
    """It was claimed, committed, published and released between two looks."""
    real, looks = audit._shown, []

    def slowly():
        looks.append(1)
        if len(looks) == 1:
            track.log("mine", {"drafter": "ngram"}, METRICS)
        return real()

    monkeypatch.setattr(audit, "_shown", slowly)
    assert problems() == []
    assert len(looks) == 2
