"""A notebook that compares drafters: one result, and one run in MLflow for each of them."""

import shutil
from pathlib import Path

import pytest
from support import artifacts
from support.stores import METRICS, SERIES, active, first, problems, quiet, run_of

from specexp.errors import UserError
from specexp.tracking import presence, rebuild, report, results
from specexp.tracking import runs as track
from specexp.zoo import shelf

RIVALS = {"ngram": ({"speedup/measured": 1.5, "speedup/ci_low": 1.4, "speedup/ci_high": 1.6},
                    {"acceptance/at_position": [0.4, 0.1]}),
          "medusa": ({"speedup/measured": 0.9}, {})}  # fmt: skip


@pytest.fixture
def compared(store):
    """A store with one result of three drafters."""
    params = {"drafter": "eagle", "gamma": 3, "rivals": list(RIVALS)}
    track.log("mine", params, METRICS, SERIES, tables={}, rivals=RIVALS)
    return store


def shown() -> dict:
    """Of each run its name, drafter, metrics and answer."""
    return {
        r.info.run_name: (r.data.params["drafter"], r.data.metrics, r.data.tags["answer"])
        for r in active()
    }


def test_each_drafter_is_a_run_with_its_own_numbers(compared):
    runs = shown()
    assert sorted(runs) == ["eagle γ=3 by hand", "medusa γ=3 by hand", "ngram γ=3 by hand"]
    drafter, metrics, answer = runs["ngram γ=3 by hand"]
    assert (drafter, answer) == ("ngram", "1.50x [1.40, 1.60]")
    assert metrics == RIVALS["ngram"][0] | {"acceptance/at_position": 0.1}
    assert runs["eagle γ=3 by hand"][1] == METRICS | {
        "acceptance/at_position": 0.8, "speedup/at_batch": 0.9,
    }  # fmt: skip
    assert set(track.runs("mine")["params.drafter"]) == {"eagle", "ngram", "medusa"}
    assert problems() == []


def test_a_result_says_what_each_drafters_names_stood_for(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(shelf.find("sibling-1m"), "draft")
    Path("mine.txt").write_text("one\n")
    params = {"target": "target-10m", "drafter": "model:./draft", "prompts": "mine.txt"}

    def logged(key):
        track.log("mine", params | {"seed": key}, METRICS, rivals={"ngram": RIVALS["ngram"]})
        (folder,) = (f for f in results.listed("results") if seed_of(f) == key)
        return [run["contents"] for run in results.runs_in(record_of(folder)).values()]

    own, rival = before = logged(0)
    assert (sorted(own), sorted(rival)) == (["drafter", "prompts", "target"], ["prompts", "target"])
    assert own["target"] == rival["target"]
    assert logged(1) == before
    Path("mine.txt").write_text("two\n")
    Path("draft/config.json").write_text(Path("draft/config.json").read_text() + " ")
    after, _ = logged(2)
    assert [name for name in own if own[name] != after[name]] == ["drafter", "prompts"]
    params["target"] = "./lost"
    assert sorted(logged(3)[0]) == ["prompts"]


def record_of(folder):
    return results.load(folder / results.RESULT)


def seed_of(folder):
    return record_of(folder)["params"]["seed"]


def test_a_rivals_description_leads_to_the_files_of_the_run_that_has_them(compared):
    main = run_of(first(compared)).split()[0]
    [notes] = {r.data.tags["mlflow.note.content"] for r in active() if "ngram" in r.info.run_name}
    assert f"/runs/{main}/artifacts" in notes
    kept = [r.info.run_id for r in active() if artifacts.digests(track.backend(), r)]
    assert kept == [main]


def test_rebuild_and_publishing_twice_show_the_same_runs(compared):
    before = shown()
    track.marker(first(compared)).unlink()
    track.publish(first(compared))
    assert shown() == before
    rebuild.rebuild(quiet())
    assert shown() == before
    assert problems() == []


def test_publishing_that_stopped_between_the_runs_is_completed(compared):
    result = first(compared)
    before, ids = shown(), run_of(result).split()
    track.client().delete_run(ids[1])
    track.marker(result).unlink()
    assert any("with ngram is in MLflow 0 times" in line for line in problems())
    track.publish(result)
    assert shown() == before
    assert run_of(result).split()[::2] == ids[::2]


def test_a_rivals_run_that_is_lost_or_deleted_is_noticed(compared):
    result = first(compared)
    rival = run_of(result).split()[2]
    track.client().delete_run(rival)
    assert presence.find_gaps({result: presence.shown_as(result)}).deleted == [result]
    track.client().restore_run(rival)
    track.client().set_tag(rival, "published", "0")
    assert presence.find_gaps({result: presence.shown_as(result)}).vanished == [result]
    track.marker(result).write_text("")
    assert presence.find_gaps({result: presence.shown_as(result)}).vanished == [result]


def test_report_compares_the_drafters_and_draws_each_figure_once(compared):
    runs = report.of("mine")
    assert [run.label for run in runs] == [f"{n} γ=3 by hand" for n in ("eagle", "medusa", "ngram")]
    assert report.answer(runs).startswith("ngram γ=3 by hand: 1.50x [")
    assert "best of 3 runs" in report.answer(runs)


def test_names_and_numbers_of_rivals_are_checked(store):
    with pytest.raises(UserError, match="metric 'speed' is not named group/name"):
        track.log("mine", {}, METRICS, rivals={"ngram": ({"speed": 1.0}, {})})
    assert track.runs().empty
