"""What a notebook may log, how it reaches MLflow, and the security of the UI."""

import contextlib
import importlib.metadata
import io
import json
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console
from support.artifacts import digests
from support.servers import Mlflow

from specexp.errors import UserError
from specexp.tracking import compare, mlflow_server, report, results
from specexp.tracking import mlflow_view as view
from specexp.tracking import runs as track
from specexp.tracking.results import ROOT, root

METRICS = {"acceptance/rate": 0.5, "speedup/measured": 1.25, "category/code": 0.75}


CELL = "x: int = 1  # a number\nname: str = 'a'\nlist_: list = [1]\nnone: int | None = None\n"


def test_parameters_are_those_of_the_cell_that_ran_last():
    names = {"x": 2, "name": "a", "list_": [1], "none": None}
    stray = {"left": 1, "np": track, "_hidden": 1, "open": len, "Out": {}}
    ran = ["import numpy\nleft = 1", "x: int = 1\nold: int = 3", CELL, "x = 2", "%time"]
    assert track.parameters(names | stray | {"In": ["", *ran]}) == names
    assert list(track.parameters(names | {"In": [CELL]})) == list(names)


def test_parameters_of_a_script_are_its_annotated_lines(tmp_path):
    script = f"import os\n\nleft = 1\n{CELL}print(x)\n"
    call = "from specexp.tracking import runs\nprint(runs.parameters(globals()))\n"
    (tmp_path / "script.py").write_text(script + call)
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "{'x': 1, 'name': 'a', 'list_': [1], 'none': None}"


@pytest.mark.parametrize("names", [{"x": 1}, {"x": 1, "In": ["x = 1", "x: int = 1\ny = 2"]}])
def test_parameters_without_their_cell_are_refused(names):
    with pytest.raises(UserError, match="run the parameters cell first"):
        track.parameters(names)


def test_overwritten_parameter_is_named():
    with pytest.raises(UserError, match="the parameter x was overwritten by a dict"):
        track.parameters({"x": {}, "In": ["x: int = 1"]})


def test_run_by_hand_is_committed_and_published(store, capsys):
    figure, _ = plt.subplots()
    plt.close(figure)
    track.log(
        "mine",
        {"drafter": "ngram", "gammas": [1, 2]},
        METRICS,
        {"acceptance/at_position": [0.9, 0.8], "speedup/at_batch": {1.0: 2.0, 32: 0.9}},
        tags={"why": "test"},
        tables={
            "costs": pd.DataFrame({"question_id": [1, 2]}),
            "rounds": pd.DataFrame({"question_id": [1, 2]}),
        },
        figures={"empty": figure},
    )
    assert "specexp ui" in capsys.readouterr().out
    [run] = track.runs("mine").to_dict("records")
    assert run["metrics.acceptance/rate"] == 0.5
    assert run["params.gammas"] == "[1, 2]"
    assert run["tags.why"] == "test"
    assert track.curve(run["run_id"], "speedup/at_batch") == {1: 2.0, 32: 0.9}
    names = digests(track.backend(), track.client().get_run(run["run_id"]))
    assert {"result.json", "tables/rounds.parquet", "figures/empty.png"} <= set(names)
    at_top = sorted({name.partition("/")[0] for name in names})  # as a run's page lists them
    assert at_top[0] == "figures"
    assert [run.prompts for run in report.of("mine")] == [2]
    assert (store / "artifacts" / "mine" / run["run_id"] / "artifacts" / "result.json").exists()


def test_run_by_hand_that_cannot_be_written_leaves_no_attempt(store):
    with pytest.raises(AttributeError):
        track.log("mine", {}, METRICS, figures={"speed": "no figure"})
    assert results.listed("attempts") == []


def test_run_by_hand_keeps_and_shows_no_secret(store, monkeypatch, capsys):
    token, word = f"ghp_{'A1b2C3d4' * 5}", "correct horse battery"
    monkeypatch.setenv("MY_PASSWORD", word)
    figure, _ = plt.subplots()
    figure.suptitle(f"target {word}")
    plt.close(figure)
    rows = {"text": [f"it is {word}", "well", None], "n": [1, 2, 3], "parts": [[token], ["a"], []]}
    track.log(
        "mine",
        {"drafter": token, "gammas": [1, 2], "words": [word]},
        METRICS,
        tags={"why": f"by {token}", "mlflow.note.content": word},
        tables={"rows": pd.DataFrame(rows), "plain": pd.DataFrame({"x": ["a"]})},
        figures={"titled": figure},
        rivals={f"model:{token}": (METRICS, {})},
    )
    [folder] = (store / "results").iterdir()
    files = [path for path in store.rglob("*") if path.is_file()]
    for secret in (token, word):
        assert [path for path in files if secret.encode() in path.read_bytes()] == []
    kept = pd.read_parquet(folder / "tables" / "rows.parquet")
    assert kept["text"].fillna("").to_list() == ["it is [hidden]", "well", ""]
    assert list(kept["parts"][0]) == ["[hidden]"]
    runs = track.runs("mine")
    assert set(runs["params.drafter"]) == {"[hidden]", "model:[hidden]"}
    assert set(runs["tags.why"]) == {"by [hidden]"}
    assert set(runs["params.gammas"]) == {"[1, 2]"}
    assert token not in runs.to_json() + capsys.readouterr().out


@pytest.mark.parametrize(
    ("metrics", "series", "said"),
    [
        ({"a/b": float("nan")}, {}, "a/b is nan"),
        ({"a/b": float("inf")}, {}, "a/b is inf"),
        ({"a/b": 1.0}, {"c/d": [1.0, float("nan")]}, "c/d at 2 is nan"),
        ({"rate": 1.0}, {}, "group/name"),
        ({"a/b%": 1.0}, {}, "group/name"),
        ({"a/b": 1.0}, {"c@d/e": [1.0]}, "group/name"),
        ({"a/..": 1.0}, {}, "group/name"),
        ({"a/" + "b" * 249: 1.0}, {}, "has 251 characters, more than 250"),
        ({"a/b": 1.0}, {"c/" + "d" * 249: [1.0]}, "has 251 characters, more than 250"),
        ({"a/b": 1.0}, {"c/d": {0.5: 1.0}}, "c/d has the step 0.5, not a 64-bit integer"),
        ({"a/b": 1.0}, {"c/d": {float("inf"): 1.0}}, "the step inf"),
        ({"a/b": 1.0}, {"c/d": {2**70: 1.0}}, "not a 64-bit integer"),
        ({"a/b": None}, {}, "the metric a/b is None, not a number"),
        ({"a/b": 1.0}, {"c/d": ["x"]}, "the metric c/d is 'x', not a number"),
    ],
)
def test_unpublishable_names_and_values_are_refused(store, metrics, series, said):
    with pytest.raises(UserError, match="group/name" if said == "group/name" else said):
        track.log("mine", {}, metrics, series)
    assert not (store / "results").exists()
    assert track.runs().empty


def test_parameters_of_numpy_and_torch_are_those_of_python_and_others_are_refused(store):
    track.log("mine", {"gamma": np.int64(3), "alphas": torch.tensor([0.5, 1])}, METRICS)
    [run] = track.runs().to_dict("records")
    assert (run["params.gamma"], run["params.alphas"]) == ("3", "[0.5, 1.0]")
    with pytest.raises(UserError, match=r"the parameter torch\.float16 is no number, no text"):
        track.log("mine", {"dtype": torch.float16}, METRICS)
    assert not list((store / "attempts").glob("*"))


def test_names_that_are_no_files_are_refused_before_anything_is_written(store):
    with pytest.raises(UserError, match=r"letters, digits, - and _, not '\.\./x'; .* not 'a b'"):
        track.log("mine", {}, METRICS, tables={"../x": pd.DataFrame()}, figures={"a b": None})
    assert not list((store / "attempts").glob("*"))


@pytest.mark.parametrize(
    "tags", [{"n": 3}, {"l": [1]}, {"": "x"}, {"a%": "x"}, {1: "x"}, {"long": "x" * 5001}]
)
def test_tags_that_mlflow_would_refuse_are_refused_at_once(store, tags):
    with pytest.raises(UserError, match="must have a plain name and a text"):
        track.log("mine", {}, METRICS, tags=tags)
    assert not (store / "results").exists()
    track.log("mine", {}, METRICS, tags={"text": "x" * 5000, "a.b-c d": ""})
    assert len(track.runs()) == 1


def test_log_under_the_runner_leaves_the_store_alone(store, tmp_path, monkeypatch):
    attempt = tmp_path / "attempt"
    attempt.mkdir()
    monkeypatch.setenv("SPECEXP_ATTEMPT", str(attempt))
    monkeypatch.setenv("SPECEXP_EXPERIMENT", "the grid's")
    before = (store / "mlflow.db").stat().st_mtime_ns
    track.log("mine", {"x": 1}, METRICS)
    record = json.loads((attempt / "result.json").read_text())
    assert record["experiment"] == "the grid's"
    assert record["metrics"] == METRICS
    assert (store / "mlflow.db").stat().st_mtime_ns == before
    with pytest.raises(UserError, match=r"called runs\.log before"):
        track.log("mine", {"x": 1}, METRICS)


def test_device_tag_follows_the_device_parameter(store, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device=None: f"GPU {device}")
    monkeypatch.setattr("torch.backends.cudnn.version", lambda: None)  # which asks real devices
    monkeypatch.setenv("SPECEXP_ATTEMPT", str(tmp_path))
    for device, name in {"cpu": "cpu", "cuda:1": "GPU cuda:1", "auto": "GPU cuda"}.items():
        track.log("mine", {"device": device}, METRICS)
        assert json.loads((tmp_path / "result.json").read_text())["tags"]["device"] == name
        (tmp_path / "result.json").unlink()


def test_relative_store_path_is_refused(monkeypatch):
    monkeypatch.setenv("SPECEXP_MLRUNS", "")
    assert root() == ROOT / "mlruns"
    monkeypatch.setenv("SPECEXP_MLRUNS", "mlruns")
    with pytest.raises(UserError, match=r"SPECEXP_MLRUNS is 'mlruns'.*give the whole path"):
        root()


@pytest.mark.parametrize("below", [".", "mlruns/deep"])
@pytest.mark.parametrize("make", [Path.touch, os.mkfifo])
def test_store_in_the_place_of_a_file_is_refused(monkeypatch, tmp_path, below, make):
    make(tmp_path / "file")
    monkeypatch.setenv("SPECEXP_MLRUNS", str(tmp_path / "file" / below))
    for call in (root, lambda: track.log("mine", {}, METRICS)):
        with pytest.raises(UserError, match=r"/file is a file: give a folder"):
            call()


def test_run_is_logged_without_git(store, monkeypatch):
    monkeypatch.setenv("PATH", str(store))
    track.log("mine", {"x": 1}, METRICS)
    [run] = track.runs("mine").to_dict("records")
    assert (run["tags.git.commit"], run["tags.git.dirty"]) == ("", "false")


def test_run_is_logged_by_an_uninstalled_package(store, monkeypatch):
    real = importlib.metadata.version

    def version(name):
        if name == "specexp":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    track.log("mine", {"x": 1}, METRICS)
    [run] = track.runs("mine").to_dict("records")
    assert run["tags.version.specexp"] == "unknown"
    assert run["tags.version.torch"] == real("torch")


def test_processes_open_a_fresh_store_together(warm, tmp_path):
    together = [warm.start("open", tmp_path / "fresh") for _ in range(3)]
    ends = [warm.wait(pid) for pid in together]
    assert [end.code for end in ends] == [0, 0, 0], [end.said for end in ends]
    assert [end.value for end in ends] == [1, 1, 1]


def test_overview_shows_what_differs_and_was_logged(store):
    for drafter, gamma, speed in (("ngram", 3, 1.5), ("sibling-3m", 3, 2.0)):
        params = {"drafter": drafter, "gamma": gamma, "target": "t"}
        ci = {"speedup/ci_low": speed - 0.1, "speedup/ci_high": speed + 0.1, "exact/pass": 1.0}
        shown = {"speedup/measured": speed, "exact/detectable_tv": 0.123}
        track.log("mine", params, METRICS | shown | ci)
    runs = track.runs("mine")
    view = compare.overview(runs)
    columns = ["experiment", "drafter", "speedup", "accepted", "exact", "detects a bias of"]
    assert list(view) == columns, "one category is all that was accepted"
    both = compare.overview(runs.assign(**{"metrics.category/prose": 0.5}))
    assert list(both) == [*columns, "accepted: code", "accepted: prose"]
    assert set(view["detects a bias of"]) == {"TV 0.12"}
    assert set(view["speedup"]) == {"1.50x [1.40, 1.60]", "2.00x [1.90, 2.10]"}
    assert set(view["exact"]) == {"yes"}


def test_paths_are_cut_where_that_tells_them_apart():
    far = ["/models/a/target", "/models/b/target"]
    runs = pd.DataFrame({"params.drafter": ["/models/a/draft", "ngram"], "params.target": far})
    assert list(compare.short(runs)["params.drafter"]) == ["draft", "ngram"]
    assert list(compare.short(runs)["params.target"]) == ["a/target", "b/target"]


def test_a_drafter_has_one_name_however_a_run_called_it():
    drafters = ["model", "sibling-3m", "lookup", "eagle", None, "no such:thing"]
    runs = pd.DataFrame({"params.drafter": drafters, "params.target": "target-10m"})
    names = ["sibling-3m", "sibling-3m", "lookup:sibling-3m", "eagle", "", "no such:thing"]
    assert list(compare.short(runs)["params.drafter"].fillna("")) == names


def test_a_parameter_of_some_experiments_only_is_no_column():
    runs = pd.DataFrame(
        {"experiment": ["a", "b", "b"], "params.rows": [None, "8", "8"],
         "params.gamma": ["3", "3", "4"], "metrics.speedup/measured": 1.5}
    )  # fmt: skip
    assert list(compare.overview(runs)) == ["experiment", "speedup", "gamma"]


def test_overview_shows_metrics_of_ones_own():
    names = ["mine/score", "mine/score_low", "mine/score_high", "latency/ms", "speedup/measured"]
    rows = [(0.51234, 0.4, 0.6, 12, 1.5), (None, None, None, 7, None)]
    runs = pd.DataFrame(rows, columns=[f"metrics.{name}" for name in names])
    runs["experiment"] = ["shipped", "own"]
    view = compare.overview(runs)
    assert list(view) == ["experiment", "speedup", "mine/score", "latency/ms"]
    assert list(view["mine/score"]) == ["0.5123 [0.4, 0.6]", ""]
    assert list(view["latency/ms"]) == ["", "7"], "what answers is enough where there is an answer"


def test_no_file_of_a_result_is_held_in_memory(store, monkeypatch):
    attempt = results.new_attempt("a")
    (attempt / results.RESULT).write_text("{}")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} is read whole"))
        assert results.intact(results.commit(attempt, "a", {}))


def test_curves_of_runs_without_a_drafter_have_none(store):
    track.log("mine", {"x": 1}, METRICS, {"speedup/at_batch": [2.0]})
    assert set(compare.curves(track.runs("mine"), "speedup/at_batch")["drafter"]) == {""}


def test_overview_marks_lossy_and_simulated_figures():
    names = ["exact/pass", "exact/bugs", "throughput/tok_s", "acceptance/rate"]
    rows = [(1, 0, 9, 0.5), (0, 0, 9, 0.5), (0, 2, 9, 0.5), (1, 0, 9, 0.5)]
    runs = pd.DataFrame(rows, columns=[f"metrics.{name}" for name in names])
    runs["tags.simulated"] = [None, None, None, "fleet, throughput"]
    view = compare.overview(runs)
    assert list(view["exact"]) == ["yes", "lossy", "BUG", "yes"]
    assert list(view["tok/s"]) == ["9", "9", "9", "9 simulated"]
    assert set(view["accepted"]) == {"50%"}
    assert compare.overview(runs.head(0)).empty


def test_experiment_with_a_longer_name_than_its_table_is_wide_keeps_it_on_one_line():
    runs = pd.DataFrame({"experiment": "of_my_own", "params.seed": ["1", "2"]})
    console = Console(file=io.StringIO(), width=80)
    console.print(compare.table("of_my_own", runs))
    assert console.file.getvalue().startswith("of_my_own\n")


def test_a_narrow_table_says_doubtful_whole():
    metrics = {"speedup/measured": 1.5, "speedup/ci_low": 1.2, "speedup/ci_high": 1.9,
               "speedup/best_gamma": 3, "speedup/credible": 0, "acceptance/rate": 0.34,
               "acceptance/rate_ci_low": 0.16, "acceptance/rate_ci_high": 0.62, "exact/pass": 1,
               "acceptance/length": 1.7, "speedup/predicted": 1.2,
               "throughput/tok_s": 1127}  # fmt: skip
    runs = pd.DataFrame([{f"metrics.{name}": value for name, value in metrics.items()}] * 2)
    runs = runs.assign(experiment="mine", **{"params.drafter": ["sibling-3m", "ngram"]})
    console = Console(file=io.StringIO(), width=80)
    console.print(compare.table("mine", runs))
    lines = console.file.getvalue().splitlines()
    assert sum("doubtful" in line.split() for line in lines) == 2
    assert lines[1].split()[-2:] == ["tok/s", "exact"], "a line holds all columns"
    assert len(lines) == 4


def test_overview_tells_what_runs_were_made_with_where_it_differs():
    runs = pd.DataFrame(
        {
            "metrics.acceptance/rate": [0.5] * 3, "tags.together": ["no", "yes", "no"],
            "tags.versions": ["torch 1, numpy 2", "torch 9, numpy 2", None],
            "tags.threads": ["2"] * 3,
        }
    )  # fmt: skip
    view = compare.overview(runs)
    assert list(view) == ["accepted", "versions", "together"]
    assert list(view["versions"]) == ["torch 1", "torch 9", ""]
    assert list(view["together"]) == ["no", "yes", "no"]


def test_runs_come_newest_first_across_experiments(store, monkeypatch):
    monkeypatch.setattr(track, "_RUNNERS", ())  # the test sets the tag of a grid
    for x, name in enumerate(("one", "two", "one")):
        track.log(name, {"x": x}, METRICS, tags={"grid": "o'clock"})
        time.sleep(0.01)
    assert list(track.runs()["experiment"]) == ["one", "two", "one"]
    assert len(track.runs("one", "o'clock")) == 2
    assert track.runs(grid="other").empty


def saved_view(experiment: str) -> dict:
    tags = track.client().get_experiment_by_name(experiment).tags
    return json.loads(tags["mlflow.sharedViewState.specexp"])


def test_shared_view_draws_only_logged_metrics_beside_the_answer(store):
    track.log("mine", {"drafter": "ngram"}, METRICS)
    state = json.loads(saved_view("mine")["state"])
    assert len(json.dumps(state)) < 20_000
    sections = {s["uuid"] for s in state["compareRunSections"]}
    assert all(c["metricSectionId"] in sections for c in state["compareRunCharts"])
    assert state["selectedColumns"] == ["tags.`answer`"]
    assert state["columnOrder"][1:4] == list(view.WIDTHS) == list(state["columnWidths"])
    drawn = {c["metricKey"] for c in state["compareRunCharts"] if "metricKey" in c}
    assert drawn
    assert drawn <= set(METRICS)
    assert state["orderByKey"] == "metrics.`speedup/measured`"
    logged = {"speedup/at_batch", "speedup/measured", "acceptance/at_position"}
    charts = json.loads(json.loads(view.shared_view(logged, 0))["state"])["compareRunCharts"]
    scales = {c["metricKey"]: c["xAxisScaleType"] for c in charts if c["type"] == "LINE"}
    assert scales == {"speedup/at_batch": "log", "acceptance/at_position": "linear"}
    assert "viewStateShareKey=specexp" in view.url("1", 5000)


def test_shared_view_without_an_answer_shows_what_was_logged(store):
    track.log("mine", {}, {"throughput/tok_s": 9.0, "own/figure": 1.0})
    assert json.loads(saved_view("mine")["state"])["selectedColumns"] == [
        "metrics.`throughput/tok_s`"
    ]
    [run] = track.runs("mine").to_dict("records")
    assert "tags.answer" not in run


def test_shared_view_is_listed_among_the_saved_views(store):
    track.log("mine", {}, METRICS)
    saved = saved_view("mine")
    kinds = {"name": str, "createdAt": int, "updatedAt": int, "state": str}
    assert {name: type(value) for name, value in saved.items()} == kinds


INTERVALS = {"speedup/ci_low": 1.204, "speedup/ci_high": 1.3, "acceptance/rate_ci_low": 0.4,
             "acceptance/rate_ci_high": 0.61}  # fmt: skip


@pytest.mark.parametrize(
    ("metrics", "tags", "answer", "description"),
    [
        (
            METRICS | INTERVALS, {}, "1.25x [1.20, 1.30]",
            "**1.25x [1.20, 1.30] of plain decoding's speed**; "
            "50% [40, 61] of draft tokens accepted",
        ),
        (METRICS | {"speedup/ci_low": 1.25, "speedup/ci_high": 1.25}, {}, "1.25x",
         "**1.25x of plain decoding's speed**; 50% of draft tokens accepted"),
        ({"fleet/replicas": 1.0}, {}, "1 replica", "**1 replica**"),
        ({"fleet/replicas": 12.0}, {"simulated": "fleet, load"}, "12 replicas simulated",
         "**12 replicas simulated**"),
        (METRICS, {"answer": "no", "mlflow.note.content": "mine"}, "no", "mine"),
    ],
)  # fmt: skip
def test_run_says_its_answer_with_its_interval(store, metrics, tags, answer, description):
    track.log("mine", {"drafter": "ngram"}, metrics, tags=tags)
    [run] = track.backend().runs(track.experiment_id("mine"))
    assert run.data.tags["answer"] == answer
    assert run.data.tags["mlflow.note.content"] == description


def test_answer_of_a_run_on_a_busy_machine_is_marked_in_every_table(store, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (99.5, 0.5, 0.5))
    track.log("mine", {"drafter": "ngram"}, METRICS | INTERVALS)
    [run] = track.backend().runs(track.experiment_id("mine"))
    assert run.data.tags["answer"] == "1.25x [1.20, 1.30] (doubtful)"
    assert list(track.runs()["metrics.speedup/credible"]) == [0.0]


@pytest.mark.parametrize(
    ("params", "varying", "name"),
    [
        ({"drafter": "sibling-3m", "gamma": 3, "limit": 9}, ["gamma"], "sibling-3m γ=3"),
        ({"gamma": 3, "policy": "goodput", "drafter": "ngram"}, ["policy"], "ngram goodput"),
        ({"drafter": "/models/mine/", "limit": 9}, ["limit"], "mine limit=9"),
        ({"drafter": "some/Model-0.6B", "chat": True}, ["chat"], "Model-0.6B chat=True"),
        ({"drafter": "a\n" + "b" * 50}, [], "'a\\n" + "b" * 33 + "..."),
        ({"limit": 9}, [], ""),
    ],
)
def test_run_name_says_what_varies(params, varying, name):
    assert view.run_name(params, varying) == name


def test_run_names_tell_paths_with_equal_ends_apart(store):
    far = ["/models/a/draft", "/models/b/draft", "ngram"]
    names = [view.run_name({"drafter": d, "x": 1}, ["drafter"], {"drafter": far}) for d in far]
    assert names == ["a/draft", "b/draft", "ngram"]
    tags, params = {"name": "a/draft γ=3"}, {"drafter": far[0], "rivals": far[1:]}
    beside = [view.run_tags(tags, params, rival)["name"] for rival in far[1:]]
    assert beside == ["b/draft γ=3", "ngram γ=3"]
    assert view.run_name(params | {"gamma": 3}, ["gamma"]) == tags["name"]
    track.log("mine", params, METRICS, rivals=dict.fromkeys(far[1:], (METRICS, {})))
    shown = {f"{name} by hand" for name in ("a/draft", "b/draft", "ngram")}
    assert set(track.runs("mine")["name"]) == shown


def test_ui_imports_nothing_from_the_current_folder(store, tmp_path, monkeypatch):
    there = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.execvpe", lambda *_: there.append(Path.cwd()))
    track.log("mine", {"drafter": "ngram"}, METRICS)
    mlflow_server.show(0)
    assert there == [store]


def test_ui_refuses_foreign_hosts_and_places(store, tmp_path):
    track.log("mine", {"drafter": "ngram"}, METRICS)
    with Mlflow(track.backend()) as mlflow:
        assert mlflow.status(Host=f"localhost:{mlflow.port}") == 200
        for foreign in (
            "evil.example",
            "127.0.0.1.evil.example",
            f"10.0.0.1:{mlflow.port}",
            "192.168.1.5",
        ):
            assert mlflow.status(Host=foreign) == 403, foreign

        def asked(what: str, **fields: str) -> int:
            body, kind = json.dumps(fields).encode(), {"Content_Type": "application/json"}
            return mlflow.status(f"/api/2.0/mlflow/{what}/create", body, **kind)

        for at in (tmp_path.as_uri(), "mlflow-artifacts:/../x", "s3://x/y", "x"):
            assert asked("experiments", name=f"at {at}", artifact_location=at) == 400, at
        assert asked("experiments", name="at its own place") == 200
        assert asked("registered-models", name="a") == 200
        for at in (tmp_path.as_uri(), f"{store.as_uri()}/artifacts/../..", "/etc"):
            assert asked("model-versions", name="a", source=at) == 400, at


@pytest.mark.parametrize(
    "planted",
    [
        "UPDATE experiments SET artifact_location = '/etc' WHERE name = 'Default'",
        "UPDATE runs SET artifact_uri = 'file:///etc'",
        "UPDATE runs SET artifact_uri = 's3://bucket/x'",
        "UPDATE runs SET artifact_uri = 'mlflow-artifacts:/a/../../../etc'",
        "UPDATE runs SET artifact_uri = '{artifacts}/../../etc'",
        "INSERT INTO model_versions (name, version, source) VALUES ('m', 1, 'file:///etc')",
        "INSERT INTO trace_tags VALUES ('mlflow.artifactLocation', '/etc', 't')",
    ],
)
def test_ui_is_not_started_over_places_that_a_database_names_outside(store, planted):
    track.log("mine", {"drafter": "ngram"}, METRICS)
    artifacts = track.backend().artifacts
    with contextlib.closing(sqlite3.connect(store / "mlflow.db")) as db, db:
        db.execute(f"UPDATE runs SET artifact_uri = '{artifacts.as_uri()}/mine'")
    mlflow_server.check_places(track.backend())
    with contextlib.closing(sqlite3.connect(store / "mlflow.db")) as db, db:
        db.execute(planted.format(artifacts=artifacts))
    with pytest.raises(UserError, match=r"keeps files outside .*: .*(etc|bucket).*start `mlflow"):
        mlflow_server.show(0)
