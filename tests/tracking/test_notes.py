"""The note of an experiment in MLflow: question, today's answer, link, commands."""

import json

import pytest
from support.stores import go, quiet

from specexp.grids.machines import local
from specexp.tracking import mlflow_view, rebuild, report
from specexp.tracking import runs as track

pytestmark = pytest.mark.usefixtures("copied_tables")
TITLE = {"cell_type": "markdown", "source": "# Does `it` pay?\n\nWho knows."}


def note(experiment: str = "grid of trifles") -> str:
    return track.client().get_experiment_by_name(experiment).tags[mlflow_view.NOTE]


@pytest.fixture
def asking(written, monkeypatch):
    """Points whose notebooks have a question."""
    execute = local.execute

    def with_title(point, attempt, *rest):
        execute(point, attempt, *rest)
        (attempt / "notebook.ipynb").write_text(json.dumps({"cells": [TITLE]}))

    monkeypatch.setattr(local, "execute", with_title)
    return written


def test_grid_run_and_rebuild_write_question_answer_link_and_commands(store, asking, tmp_path):
    assert go(asking(1, 2))[0] == 0
    text = note()
    experiment = track.experiment_id("grid of trifles")
    assert text.startswith("x=1: 1.25x")
    assert "**Does it pay?**" in text
    assert "1.25x" in text
    assert "best of 2 runs" in text
    assert f"(./#/experiments/{experiment}/runs?viewStateShareKey=specexp" in text
    assert f"specexp grid run {tmp_path}/trivial.yaml\n```" in text, "with its folder"
    page = store / "artifacts" / "grid-of-trifles" / "grid-of-trifles.html"
    assert "2 runs" in page.read_text()
    assert f"[one page](./api/2.0/mlflow-artifacts/artifacts/{'/'.join(page.parts[-2:])})" in text
    names = {run.info.run_name for run in track.backend().runs(experiment)}
    assert names == {"x=1", "x=2"}

    assert go(asking(1, 2, 3))[0] == 0
    assert "best of 3 runs" in note()
    rebuild.rebuild(quiet())
    assert "best of 3 runs" in note()


def test_note_that_a_killed_runner_left_is_renewed_by_the_next(store, asking, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    assert go(asking(1))[0] == 0
    with monkeypatch.context() as patch:
        patch.setattr(rebuild, "describe", killed)
        with pytest.raises(KeyboardInterrupt):
            go(asking(1, 2))
    assert "best of 2 runs" not in note()
    assert "0 of 2 points to run" in go(asking(1, 2))[1]
    assert "best of 2 runs" in note()


def test_note_of_ones_own_is_kept(store, asking):
    experiment = track.experiment_id("grid of trifles")
    track.client().set_experiment_tag(experiment, mlflow_view.NOTE, "my own words")
    assert go(asking(1))[0] == 0
    assert note() == "my own words"


def test_note_names_the_command_where_the_page_cannot_be_kept(store, asking, monkeypatch):
    monkeypatch.setattr(report, "page", lambda runs: (_ for _ in ()).throw(OSError(13, "no")))
    assert go(asking(1))[0] == 0
    assert "a report to send: `specexp report 'grid of trifles'`" in note()
    track.client().rename_experiment(track.experiment_id("grid of trifles"), "renamed by hand")
    assert go(asking(1, 2))[0] == 0
    assert "a report to send: `specexp report 'grid of trifles'`" in note("renamed by hand")
    assert len(report.of("grid of trifles")) == 2


def test_note_of_runs_by_hand_has_no_grid_to_run(filled):
    text = note("mine")
    assert "**mine**" in text
    assert "Run it again" not in text
    assert "1.25x" in text


def test_a_run_by_hand_supersedes_an_earlier_one_of_its_parameters(store):
    for speedup in (1.6, 1.1):
        track.log("mine", {"drafter": "ngram"}, {"speedup/measured": speedup})
    assert list(track.runs("mine")["metrics.speedup/measured"]) == [1.1]
    assert note("mine").startswith("ngram by hand: 1.10x")


def test_names_in_a_note_are_no_markup():
    text = mlflow_view.note("1", "a_b _c_?", "<b>*bold* `x`: 1.25x [1.20, 1.30]", [], "specexp")
    assert r"**a_b \_c\_?**" in text
    assert r"\<b>\*bold\* \`x\`: 1.25x [1.20, 1.30]" in text
