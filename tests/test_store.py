"""The tracking store as its users meet it: checked, made anew, copied, served."""

import json

import pytest

from specexp.lab import check, store, track

METRICS = {"acceptance/rate": 0.5, "speedup/measured": 1.25}
SERIES = {"acceptance/at_position": [0.9, 0.8], "speedup/at_batch": {1: 2.0, 32: 0.9}}


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


def test_a_store_in_order_has_no_problems(filled):
    assert check.problems() == []


def test_an_empty_place_has_no_problems(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECEXP_MLRUNS", str(tmp_path / "nothing"))
    assert check.problems() == []
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
    "torn": (lambda r: (r / "result.json").write_text("{}"), "not as it was committed"),
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
    "unmarked": (lambda r: track.client().set_tag(run_of(r), "published", "0"), "died"),
    "no result": (lambda r: r.rename(r.parent.parent / "gone"), "is not there"),
    "attempt": (lambda r: store.new_attempt("k"), "a run that died"),
}


@pytest.mark.parametrize("how", BREAKS)
def test_each_broken_promise_is_told(filled, how):
    """The controls: a check that sees nothing would pass everything."""
    breaks, said = BREAKS[how]
    breaks(first(filled))
    found = check.problems()
    assert found
    assert any(said in line for line in found), found


@pytest.mark.parametrize("how", ["torn", "deleted", "half", "other metric"])
def test_what_somebody_has_claimed_is_not_judged(filled, how):
    BREAKS[how][0](first(filled))
    with store.claim(first(filled).name):
        assert check.problems() == []
    assert check.problems()
