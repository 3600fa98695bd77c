"""Which drafter to switch on, with which draft length, up to which load, in an engine's words."""

import ast
import json
import os
import re
import shlex
import shutil

import pandas as pd
import pytest
import torch
import yaml
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from specexp import figures
from specexp.commands import app
from specexp.decision import engines, next_grid
from specexp.decision.recommend import SHARED, Measured, Plan, advise
from specexp.errors import UserError
from specexp.grids import notebooks, points
from specexp.measure.parameters import PARAMETERS
from specexp.tracking import report, results
from specexp.zoo import shelf

MACHINE = {"device": "cpu", "processor": "AMD EPYC, 2 cores", "threads": "2"}


def log(
    drafter, at, gamma=3, half=0.05, exact=1.0, tags=MACHINE, best=None, identity=None,
    contents=None, **params,
):  # fmt: skip
    """A committed result: `at` is the speedup of one stream, or one for each batch size. best: the
    draft length of the former, if several were tried. identity: that of a grid's point. contents:
    as `provenance.contents` gives them."""
    curve = at if isinstance(at, dict) else {1: at}
    first, more = curve[min(curve)], {"exact/pass": exact, "speedup/best_gamma": best}
    record = {
        "experiment": "mine",
        "params": {"target": "target-10m", "prompts": "all", "drafter": drafter, "gamma": gamma}
        | params,
        "metrics": {
            "speedup/measured": first, "speedup/ci_low": first - half,
            "speedup/ci_high": first + half,
        } | {n: v for n, v in more.items() if v is not None},
        "series": {
            f"speedup/at_batch{end}": {str(b): v + off for b, v in curve.items()}
            for end, off in (("", 0), ("_low", -half), ("_high", half))
        } if curve is at else {},
        "tags": tags,
        "contents": contents or {},
    }  # fmt: skip
    name = f"{re.sub('[:/]', '', drafter)}{gamma}{len(results.listed('results'))}"
    attempt = results.new_attempt(name)
    (attempt / results.RESULT).write_text(json.dumps(record))
    if identity:
        (attempt / results.POINT).write_text(json.dumps({"identity": identity}))
    results.commit(attempt, name, {"name": drafter, "status": "FINISHED"})


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs `specexp recommend` with these words: exit code, output and errors."""

    def command(*words):
        monkeypatch.setattr("sys.argv", ["specexp", "recommend", *words])
        with pytest.raises(SystemExit) as ended:
            app.main()
        return ended.value.code, *capsys.readouterr()

    return command


def only(advice):
    (one,) = advice
    return one


def test_a_plan_joins_grids_into_a_draft_length_for_each_load(store):
    log("ngram", 1.8, gamma=6)
    log("ngram", {1: 1.5, 4: 1.2, 8: 1.04, 16: 0.8}, gamma=4)
    log("ngram", {1: 1.3, 4: 1.4, 8: 1.3, 16: 0.9}, gamma=2)
    log("suffix", 1.2)
    advice = only(advise())
    first, second = advice.plans
    assert (first.drafter, second.drafter) == ("ngram", "suffix")
    assert [(last, chosen.draft) for last, chosen in first.steps] == [(1, 6), (8, 2)]
    assert first.schedule() == "1: 6, 2 to 8: 2, then off"
    assert second.schedule() == "1: 3, then off (not measured)"
    said = advice.verdict()
    assert said.startswith("Draft 6 tokens with ngram for one stream: 1.80x [1.7")
    assert "Switch it off in batches above 8 (0.90x [0.84, 0.96] in one of 16). It is" in said
    assert said.endswith("It is certainly better than the other drafters.")


def test_what_is_certainly_better_is_so_than_every_setting_measured_there(store):
    log("ngram", 1.6, gamma=6)
    log("suffix", 1.2)
    log("suffix", 1.5, gamma=8, half=0.6)  # its widest interval reaches above all others
    said = only(advise()).verdict()
    assert said.startswith("Draft 6 tokens with ngram for one stream: 1.60x")
    assert said.endswith("It is not certainly better than suffix.")


def test_rules_that_accept_the_same_are_one_situation(store):
    for rule in ("auto", "match", "reject", "block"):
        log("ngram", 1.5, rule=rule)
        log("ngram", 1.4, rule=rule, temperature=0.8)
    assert sorted(advice.situation.rule for advice in advise()) == ["", "auto", "block", "match"]


def test_no_engine_has_the_rule_match_for_drafts_that_are_sampled(store):
    log("eagle", 1.5, rule="match", temperature=0.8)
    written = engines.of_advice(only(advise()))
    assert set(written.values()) == {
        "has no such rule for drafts that were sampled: measure rule auto"
    }


def test_a_server_is_a_situation_of_its_own_and_gets_the_options_of_its_engine(store, run):
    here = {"engine": "vLLM on gpu7"}
    log("ngram", {1: 1.8, 4: 1.3}, exact=None, tags=MACHINE | here, server="gpu7:8000")
    log("suffix", 1.4, exact=None, tags=MACHINE | here, server="gpu7:8001")
    log("ngram", 1.2, exact=None)  # not of a server, so its output should have been checked
    served, other = advise()
    assert str(served.situation) == "prompts all; vLLM on gpu7"
    assert [plan.drafter for plan in served.plans] == ["ngram", "suffix"]
    assert "Larger batches than 4 were not measured with it: run 50_servers with more" in str(
        served
    )
    assert list(engines.of_advice(served)) == ["vLLM"]
    assert [why for _, why in other.left_out] == ["its output was not checked, or not the target's"]
    code, out, err = run("target-10m")
    assert (code, err) == (0, "")
    assert "In an engine (as measured there):" in out
    with pytest.raises(UserError, match="run 50_servers with more streams for: prompts all; vLLM"):
        next_grid.text([served], store)


def test_a_setting_under_load_competes_though_its_drafter_is_off_for_one_stream(store):
    log("ngram", {4: 1.5})
    log("suffix", {1: 1.0, 4: 1.6})
    log("recycle", {4: 1.1})
    assert only(advise()).verdict().endswith("It is not certainly better than suffix.")


def test_the_best_of_several_draft_lengths_is_not_that_of_the_batches_beside_it(store):
    log("ngram", {1: 1.5, 4: 1.2}, gamma=3, best=6)
    measured = {(each.draft, each.batch) for each in only(advise()).measured}
    assert measured == {(6, 1), (3, 1), (3, 4)}


def test_what_was_not_measured_there_is_not_called_worse(store):
    log("ngram", 1.6)
    log("suffix", 1.2)
    log("recycle", {4: 1.9})
    said = only(advise()).verdict()
    assert "It is certainly better than the other drafters measured there." in said


def test_intervals_are_widened_for_the_settings_that_compete_at_a_batch_size(store):
    log("ngram", 1.05, half=0.045)
    assert only(advise()).best, "its interval lies above 1 while nothing competes with it"
    for gamma in (4, 5, 6):
        log("ngram", 1.0, gamma=gamma)
    advice = only(advise())
    assert not advice.best
    assert advice.verdict().startswith("Leave drafting off: no drafter is certainly faster for one")
    assert "ngram, drafting 3 tokens: 1.05x [0.99, 1.11]; more prompts would" in advice.verdict()


def test_drafting_stays_off_from_the_first_load_at_which_nothing_is_certain(store):
    log("ngram", {1: 1.5, 2: 1.02, 4: 1.5})
    assert only(advise()).plans[0].schedule() == "1: 3, then off"


def test_a_drafter_measured_under_load_alone_is_recommended_for_that_load(store):
    log("ngram", 1.02)
    log("suffix", {4: 1.5, 8: 0.9}, tree="3x2")
    said = only(advise()).verdict()
    assert said.startswith("Draft the tree 3x2 with suffix in a batch of 4: 1.50x")
    assert said.endswith("Switch it off in batches above 4 (0.90x [0.85, 0.95] in one of 8).")


def test_a_drafter_that_pays_in_larger_batches_than_the_best_is_named(store):
    log("suffix", {1: 1.9, 4: 1.2, 8: 0.9})
    log("ngram", {1: 1.5, 8: 1.2, 16: 0.8}, gamma=2)
    log("recycle", {1: 1.4, 4: 1.2})
    said = only(advise()).verdict()
    assert "Switch it off in batches above 4 (0.90x [0.84, 0.96] in one of 8). It is cert" in said
    assert said.endswith(
        "In batches up to 8 ngram pays: there 1.20x [1.14, 1.26], drafting 2 tokens."
    )


def test_what_cannot_be_trusted_decides_nothing_and_is_named(store):
    log("ngram", 9.0, exact=0.0)
    log("suffix", 1.4, tags=MACHINE | {"load": "7.5"})
    log("recycle", 1.4, half=0.0)
    log("medusa", 8.0, tags=MACHINE | {"simulated": "speedup"})
    log("eagle", 1.4, gamma=None, policy="goodput")
    advice = only(advise())
    assert not advice.plans
    assert dict(advice.left_out) == {
        "mine: ngram": "its output was not checked, or not the target's",
        "mine: suffix": "other work ran beside it (the load average was 7.5, its own threads 2)",
        "mine: medusa": "it is simulated",
        "mine: recycle": "it has no interval",
        "mine: eagle": "a policy chose its draft lengths",
    }
    assert "of 5 results none has a speedup that can be trusted" in advice.verdict()
    assert "To measure doubtful timings again, with nothing else running: run their" in str(advice)


def test_a_notebook_of_ones_own_without_a_drafter_decides_nothing(store):
    log("ngram", 1.5)
    record = json.loads((results.listed("results")[0] / results.RESULT).read_text())
    del record["params"]["drafter"]
    attempt = results.new_attempt("own")
    (attempt / results.RESULT).write_text(json.dumps(record))
    results.commit(attempt, "own", {"name": "own", "status": "FINISHED"})
    advice = only(advise())
    assert [plan.drafter for plan in advice.plans] == ["ngram"]
    assert advice.left_out == (("mine: own", "its parameters name no drafter"),)


def test_only_results_of_one_situation_are_joined(store):
    log("ngram", 1.5)
    log("ngram", 1.4, gamma=5)
    log("suffix", 1.9, temperature=0.8, prompts="/some/where/mine.jsonl", chat=True)
    log("suffix", 1.9, tags={"device": "NVIDIA H100", "threads": "1"})
    log("suffix", 1.9, temperature=0.8, top_p=0.9)
    log("suffix", 1.9, target="own/model")
    every = advise("target-10m")
    assert [str(advice.situation) for advice in every] == [
        "prompts all; cpu, AMD EPYC, 2 cores, 2 threads",
        "prompts mine.jsonl, chat True, temperature 0.8; cpu, AMD EPYC, 2 cores, 2 threads",
        "prompts all; NVIDIA H100, 1 thread",
        "prompts all, temperature 0.8, top_p 0.9; cpu, AMD EPYC, 2 cores, 2 threads",
    ]
    assert only(advise("model")).situation.target == "own/model"
    with pytest.raises(UserError, match=r"no results of target-10 in .*did you mean 'target-10m'"):
        advise("target-10")


def test_a_result_of_another_machine_replaces_none(store):
    for kernels in ("compiled by c++, AVX2, 12345678", "compiled by c++, AVX2, 9abcdef0"):
        log("ngram", {1: 1.5}, tags=MACHINE | {"kernels": kernels})
    log("suffix", 1.4, tags=MACHINE | {"kernels": kernels})
    without = "no C++ compiler: torch's operations"
    log("ngram", {1: 1.9}, tags=MACHINE | {"kernels": without})
    log("ngram", {1: 1.8}, tags=MACHINE | {"processor": "Intel", "kernels": kernels})
    assert [(str(each.situation), len(each.measured)) for each in advise()] == [
        ("prompts all; cpu, AMD EPYC, 2 cores, 2 threads", 2),
        (f"prompts all; cpu, AMD EPYC, 2 cores, 2 threads, {without}", 1),
        ("prompts all; cpu, Intel, 2 threads", 1),
    ]


def test_results_of_another_output_length_are_not_compared(store):
    log("ngram", 1.6)
    log("suffix", 1.2, max_new_tokens=512)
    assert [str(advice.situation).partition(";")[0] for advice in advise()] == [
        "prompts all", "prompts all, max_new_tokens 512"
    ]  # fmt: skip
    assert not any("certainly better" in advice.verdict() for advice in advise())


def test_results_of_other_categories_of_prompts_are_not_compared(store):
    log("ngram", 1.6)
    log("suffix", 1.5, categories=[])
    log("suffix", 1.2, categories=["code", "math"])
    log("recycle", 1.1, categories=["math", "code"])
    assert [str(advice.situation).partition(";")[0] for advice in advise()] == [
        "prompts all", "prompts all, categories code, math"
    ]  # fmt: skip


def test_a_notebook_of_ones_own_may_list_what_others_have_one_of(store):
    log("ngram", 1.6, temperature=[0.0, 1.0])
    assert "temperature 0.0, 1.0" in str(only(advise()).situation)


def test_a_curve_without_intervals_says_nothing_of_one_stream(store):
    log("ngram", {8: 1.5})
    (file,) = (folder / results.RESULT for folder in results.listed("results"))
    record = json.loads(file.read_text())
    record["series"] = {"speedup/at_batch": record["series"]["speedup/at_batch"]}
    file.write_text(json.dumps(record))
    assert not only(advise(runs=[report.Run(file.parent)])).measured


def test_a_grown_tree_of_another_depth_is_another_setting(store):
    log("eagle", 1.1, tree="grown:12", gamma=3)
    log("eagle", 1.3, tree="grown:12", gamma=6, half=0.1)
    log("eagle", 1.1, tree="3x2", gamma=3, half=0.05)
    log("eagle", 1.2, tree="3x2", gamma=6, half=0.2)  # its depth is its own
    advice = only(advise())
    assert {m.draft for m in advice.measured} == {"grown:12, 3 deep", "grown:12, 6 deep", "3x2"}
    said = advice.verdict()
    assert said.startswith("Draft the tree grown:12, 6 deep with eagle for one stream: 1.30x")
    assert "--grid" not in said
    with pytest.raises(UserError, match="larger ones need no grid, and trees have none"):
        next_grid.text([advice], store)


def test_notebooks_and_demo_grids_measure_speedups_that_can_be_joined():
    for name in ("20_latency", "30_throughput_under_batch", "40_drafters"):
        own = notebooks.read(results.ROOT / f"notebooks/{name}.ipynb").parameters
        for shared in {*SHARED} & {*own}:
            assert own[shared].default == PARAMETERS[shared].default, (name, shared)
    files = [results.ROOT / f"notebooks/grids/demo_{part}.yaml"
             for part in ("2_latency", "3_throughput")]  # fmt: skip
    assert len({tuple(p.params.get(name) for name in SHARED) for p in points.load(files)}) == 1


def test_an_empty_store_says_what_fills_it(store, run):
    assert advise() == []
    code, _, err = run()
    assert code == 2
    assert "has a speedup: run 20_latency, 40_drafters or 30_throughput_under_batch" in err


def test_names_of_one_draft_model_are_one_drafter_and_planted_drafts_are_none(store):
    log("model", 1.5)
    log("model:sibling-3m", 1.4, gamma=4)
    log("sibling-3m", 1.3, gamma=5)
    log("planted:0.8", 1.9)
    advice = only(advise())
    assert [plan.drafter for plan in advice.plans] == ["sibling-3m"]
    assert [(m.draft, m.speedup) for m in advice.measured] == [(3, 1.5), (4, 1.4), (5, 1.3)]
    assert dict(advice.left_out).keys() == {"mine: planted:0.8"}


def test_names_of_one_folder_are_one_target_and_one_drafter(store, monkeypatch, tmp_path):
    target, draft = shelf.find("target-10m"), shelf.find("sibling-1m")
    monkeypatch.chdir(target.parent)
    log("ngram", 1.5, gamma=2)
    log("sibling-1m", 1.4, gamma=3, target=str(target))
    log(f"model:{draft}", 1.3, gamma=4, target="./target-10m")
    log("eagle", 1.2, gamma=5)
    log(f"eagle:{shelf.find('target-10m-eagle3')}", 1.1, gamma=6)
    for name in ("target-10m", str(target), "./target-10m"):
        advice = only(advise(name))
        assert advice.situation.target == "target-10m"
        assert {plan.drafter: plan.alone.draft for plan in advice.plans} == {
            "ngram": 2, "sibling-1m": 3, "eagle": 5
        }  # fmt: skip


def test_paths_relative_to_a_notebook_are_found_from_here(store, monkeypatch, tmp_path):
    monkeypatch.setattr(results, "ROOT", tmp_path)
    shutil.copytree(shelf.find("sibling-1m"), tmp_path / "models" / "mine")
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path)
    log("model:../models/mine", 1.5, prompts="../models/mine/README.md",
        tags=MACHINE | {"mlflow.source.name": "notebooks/20_latency.ipynb"})  # fmt: skip
    advice = only(advise())
    assert dict(advice.situation.params)["prompts"] == "models/mine/README.md"
    assert advice.best.drafter == "models/mine"
    options = engines.options(advice.best, "target-10m")
    assert f'"model": "{tmp_path}/models/mine"' in options["vLLM"]


def test_a_grid_goes_on_from_the_largest_batch_with_what_still_pays_there(
    store, run, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "models" / "mine"
    shutil.copytree(shelf.find("sibling-1m"), mine)
    log("model:models/mine", {1: 1.5, 2: 1.4}, temperature=0.8)
    log("ngram", 1.3, gamma=4, temperature=0.8)
    log("suffix", {1: 1.5, 2: 0.9}, temperature=0.8)
    log("eagle", 1.5, tree="3x2", temperature=0.8)
    file = tmp_path / "grids" / "next.yaml"
    file.parent.mkdir()
    code, said, err = run("target-10m", "--grid", str(file))
    assert code == 0, err
    assert f"specexp grid run {file}" in said
    written = points.load([file])
    assert [(p.params["drafter"], p.params["gamma"]) for p in written] == [
        (os.path.relpath(mine, results.ROOT / "notebooks"), 3), ("ngram", 4)
    ]  # fmt: skip
    assert {p.params["temperature"] for p in written} == {0.8}
    assert written[0].params["batches"] == [1, 2, 4, 8, 16, 32]
    code, _, err = run("target-10m", "--grid", str(file))
    assert code == 2
    assert "is there already" in err


def test_a_grid_goes_on_in_every_situation(store, run, tmp_path):
    log("ngram", {1: 1.5, 4: 1.4})
    log("suffix", {1: 1.5, 2: 0.9})
    log("ngram", {1: 1.5, 2: 1.3}, gamma=2, temperature=0.8)
    log("ngram", 1.4, gamma=5, temperature=0.8, tags=MACHINE | {"processor": "Intel"})
    file = tmp_path / "next.yaml"
    code, _, err = run("--grid", str(file))
    assert code == 0, err
    names = ("drafter", "gamma", "temperature", "batches")
    assert [tuple(p.params[name] for name in names) for p in points.load([file])] == [
        ("ngram", 3, 0.0, [4, 8, 16, 32, 64, 128]), ("ngram", 2, 0.8, [2, 4, 8, 16, 32, 64])
    ]  # fmt: skip


def test_a_grid_leaves_out_what_its_notebook_cannot_be_given(store, run, tmp_path):
    own = notebooks.read(results.ROOT / next_grid.NOTEBOOK).parameters
    assert {*SHARED} - {*own} == {*next_grid.LACKS}
    log("ngram", 1.5, categories=["code"])
    log("suffix", 1.5, temperature=[0.5, 0.8])
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    code, _, err = run("--grid", str(first))
    assert code == 2
    assert "the notebook lacks a parameter of: prompts all, " in err
    log("ngram", 1.5)
    code, _, err = run("--grid", str(second))
    assert code == 0, err
    assert "lacks a parameter of: prompts all, categories code; " in second.read_text()
    [point] = points.load([second])
    assert point.params["temperature"] == 0.0


def test_no_grid_is_written_where_nothing_is_open(store, run, tmp_path):
    log("ngram", {1: 1.5, 2: 0.9})
    code, _, err = run("--grid", str(tmp_path / "next.yaml"))
    assert code == 2
    assert "larger ones need no grid" in err
    assert not (tmp_path / "next.yaml").exists()


def test_no_grid_is_written_where_no_timing_can_be_trusted(store, run, tmp_path):
    log("suffix", 1.4, tags=MACHINE | {"load": "7.5"})
    code, _, err = run("--grid", str(tmp_path / "next.yaml"))
    assert code == 2
    assert "none has a speedup that can be trusted" in err
    assert "larger ones need no grid" not in err
    code, _, _ = run("--out", str(tmp_path / "map.csv"))
    assert code == 0
    assert {"drafter", "batch", "speedup", "on"} <= {*pd.read_csv(tmp_path / "map.csv")}


def test_folders_are_called_by_what_tells_them_apart_and_engines_get_the_whole_path(store):
    first, second = "model:/models/one/draft", "model:/models/two/draft"
    log(first, 0.8)
    said = only(advise()).verdict()
    assert "The fastest is draft, drafting 3 tokens: 0.80x" in said
    assert said.endswith("it loses.")
    log(second, 1.5)
    advice = only(advise())
    assert advice.verdict().startswith("Draft 3 tokens with two/draft for one stream")
    assert [*advice.table()["drafter"]] == ["two/draft", "one/draft"]
    drawn = figures.runs.plans(advice.speedups()).axes[0]
    assert [label.get_text() for label in drawn.get_yticklabels()] == ["two/draft", "one/draft"]
    assert advice.best.drafter == "/models/two/draft"


def test_the_most_precise_of_several_measurements_counts(store):
    log("ngram", 1.6, half=0.4)
    log("ngram", 1.3, half=0.05, limit=60)
    assert only(advise()).plans[0].alone.speedup == 1.3


@pytest.mark.parametrize(
    ("part", "what", "stay"),
    [("models", "models", {"suffix", "ngram"}), ("data", "prompts", set())],
)
def test_what_was_measured_before_a_change_of_contents_does_not_count(store, part, what, stay):
    """Of models, what a newer result of the same drafter shows; prompts are those of all."""
    parts = {"models": "a", "data": "b"}
    log("ngram", 1.8, gamma=6, half=0.01, identity=parts)
    log("suffix", 1.2, identity=parts)
    log("recycle", 1.1)  # by hand: nobody knows of what
    log("ngram", 1.4, gamma=4, identity=parts | {part: "c"})
    advice = only(advise())
    assert {m.drafter for m in advice.measured} == {"ngram", "recycle"} | stay
    assert {m.draft for m in advice.measured if m.drafter == "ngram"} == {4}
    assert ("mine: ngram", f"its {what} have changed since") in advice.left_out


@pytest.mark.parametrize(
    ("changed", "stay"),
    [("target", set()), ("drafter", {"suffix", "recycle"}), ("prompts", set())],
)
def test_one_result_by_hand_shows_which_others_are_of_older_contents(store, changed, stay):
    """Drafters that were not measured since included, and those of another situation."""
    lookups = {"target": "a", "prompts": "b"}
    heads = lookups | {"drafter": "c"}
    log("suffix", 1.4, contents=lookups)
    log("recycle", 1.3, contents=lookups)
    log("eagle", 1.2, contents=heads)
    log("eagle", 1.9, temperature=0.8, contents=heads | {changed: "d"})
    first, second = advise()
    before, after = sorted((first, second), key=lambda each: "temperature" in str(each))
    assert {m.drafter for m in before.measured} == stay
    assert [m.drafter for m in after.measured] == ["eagle"]
    reason = f"its {changed} {'have' if changed == 'prompts' else 'has'} changed since"
    assert ("mine: eagle", reason) in before.left_out


def plan(drafter, schedule=((1, 4), (4, 2))):
    steps = [(last, Measured(drafter, draft, last, 1.5, 1.2, 1.8, 40)) for last, draft in schedule]
    return Plan(drafter, tuple(steps), steps[0][1], 16)


def test_vllm_is_told_every_range_and_that_drafting_ends():
    line = engines.options(plan("ngram:2"), "target-10m")["vLLM"]
    flag, text = shlex.split(line)
    assert flag == "--speculative-config"
    assert json.loads(text) == {
        "method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2,
        "num_speculative_tokens": 4,
        "num_speculative_tokens_per_batch_size": [[1, 1, 4], [2, 4, 2], [5, 5, 0]],
    }  # fmt: skip


def test_an_engine_with_one_draft_length_is_told_the_batches_that_it_pays_in():
    written = engines.options(plan("ngram", [(2, 6), (8, 2)]), "target-10m")
    assert "-draft-tokens 7 " in written["SGLang"]
    assert "for at most 2 requests at once" in written["SGLang"]
    assert "-m 6 -np 2  # drafts at any load: admits 2 requests at once" in written["llama.cpp"]
    assert "num_tokens=6" in written["transformers"]


def test_tensorrt_llm_is_told_in_yaml():
    line = engines.options(plan("ngram"), "target-10m")["TensorRT-LLM"]
    assert line.endswith("  # 1.3 or later; with disable_overlap_scheduler: true")
    assert yaml.safe_load(line) == {
        "speculative_config": {
            "decoding_type": "NGram", "max_matching_ngram_size": 3, "is_use_oldest": False,
            "max_draft_len": 4, "draft_len_schedule": {1: 4, 4: 2},
        }
    }  # fmt: skip


def test_engines_sample_drafts_and_verify_them_as_was_measured(store):
    log("eagle", 1.5, temperature=0.8)
    log("eagle", 1.5, temperature=0.8, rule="block")
    log("eagle", 1.5)
    rules = {advice.situation.rule: advice.best for advice in advise()}
    assert set(rules) == {"auto", "block", ""}
    sampled, block, greedy = (
        engines.options(rules[rule], "target-10m", rule) for rule in ("auto", "block", "")
    )
    own = json.loads(shlex.split(sampled["vLLM"])[1])
    assert own["draft_sample_method"] == "probabilistic"
    assert "rejection_sample_method" not in own
    assert " --speculative-use-rejection-sampling  # " in sampled["SGLang"]
    written = yaml.safe_load(sampled["TensorRT-LLM"])["speculative_config"]
    assert written["use_rejection_sampling"] is True
    assert " --spec-draft-sampling probabilistic " in sampled["llama.cpp"]
    own = json.loads(shlex.split(block.pop("vLLM"))[1])
    assert own["rejection_sample_method"] == "block"
    assert set(block.values()) == {"has no block verification"}
    assert not any("sampl" in line for line in greedy.values())
    for method in ("ngram", "lookup:eagle", "medusa"):  # whose draft tokens are chosen there
        written = engines.options(plan(method, [(1, 3)]), "target-10m", "auto")
        assert not any("sampl" in line for line in written.values()), method


@pytest.mark.parametrize(
    ("name", "order"), [("ngram", "BFS"), ("ngram:2", "BFS"), ("suffix", "PROB")]
)
def test_a_lookup_in_sglang_is_a_chain_out_of_its_own_tree(name, order):
    line = engines.options(plan(name), "target-10m")["SGLang"]
    words = shlex.split(line, comments=True)
    assert words[1::2] == ["NGRAM", "5", "1", order]
    assert line.endswith("measure its acceptance there")


def test_a_draft_model_and_heads_are_named_by_their_folder():
    draft = str(shelf.find("sibling-3m"))
    for name in ("sibling-3m", "model", "sibling-3m+int8"):
        written = engines.options(plan(name), "target-10m")
        assert json.loads(shlex.split(written["vLLM"])[1])["model"] == draft
        words = shlex.split(written["SGLang"], comments=True)
        assert words[1::2] == ["STANDALONE", draft, "4", "1", "5"]
        for engine, line in written.items():
            assert line.endswith(engines.IN_8_BITS) == name.endswith("+int8"), engine
            assert line.count("  # ") <= 1
    heads = engines.options(plan("eagle"), "target-10m")
    assert '"method": "eagle3"' in heads["vLLM"]
    assert "--speculative-algorithm EAGLE3" in heads["SGLang"]
    assert "draft-eagle3" in heads["llama.cpp"]


def test_a_lookup_before_another_drafter_is_an_option_of_that_drafter():
    written = engines.options(plan("lookup:eagle"), "target-10m")
    own = yaml.safe_load(written["TensorRT-LLM"])["speculative_config"]
    assert (own["decoding_type"], own["sa_config"]) == ("Eagle3", {"threshold": 4})
    assert own["speculative_model"] == str(shelf.find("target-10m-eagle3"))
    assert written["llama.cpp"].startswith(
        "--spec-type draft-eagle3,ngram-simple --spec-ngram-simple-size-n 4 "
        "--spec-ngram-simple-size-m 4 --spec-draft-n-max 4 --spec-draft-model DRAFT.gguf"
    )
    for engine in ("vLLM", "SGLang", "transformers"):
        assert written[engine] == engines.NOT_THERE
    written = engines.options(plan("lookup:mtp"), "target-10m")
    assert "sa_config" in yaml.safe_load(written["TensorRT-LLM"])["speculative_config"]
    assert written["llama.cpp"].startswith("--spec-type draft-mtp,ngram-simple --spec-ngram-simple")
    for name in ("lookup", "lookup:sibling-1m", "lookup:dflash"):  # documented for no such drafter
        written = engines.options(plan(name), "target-10m")
        assert written["TensorRT-LLM"] == engines.NOT_THERE
        assert ",ngram-simple " in written["llama.cpp"]
    assert set(engines.options(plan("lookup:medusa"), "target-10m").values()) == {engines.NOT_THERE}


@pytest.mark.parametrize("name", ["suffix", "medusa"])
def test_vllm_is_given_one_draft_length_where_it_stops_at_others(name):
    written = engines.options(plan(name, [(2, 3), (4, 1)]), "target-10m")["vLLM"]
    own = json.loads(shlex.split(written, comments=True)[1])
    assert own.pop("model", None) == {"medusa": str(shelf.find("target-10m-medusa"))}.get(name)
    assert own == {"method": name, "num_speculative_tokens": 3}
    assert "# drafts at any load: use it for at most 2 requests at once; needs " in written


def test_medusa_drafts_with_all_its_heads_in_vllm():
    written = engines.options(plan("medusa"), "target-10m")  # four tokens
    assert written.pop("vLLM") == "drafts with all 3 heads: measure gamma 3"
    assert set(written.values()) == {engines.NOT_THERE}


def test_a_targets_own_layer_needs_no_other_model():
    written = engines.options(plan("mtp"), "target-10m")
    assert json.loads(shlex.split(written["vLLM"])[1])["method"] == "mtp"
    words = shlex.split(written["SGLang"], comments=True)
    assert words[1::2] == ["NEXTN", "4", "1", "5"]
    assert yaml.safe_load(written["TensorRT-LLM"])["speculative_config"]["decoding_type"] == "MTP"
    assert written["llama.cpp"].startswith("--spec-type draft-mtp --spec-draft-n-max 4")
    assert "use_mtp=True" in written["transformers"]


def test_a_layer_in_place_of_the_targets_own_is_named(tmp_path):
    written = engines.options(plan(f"mtp:{tmp_path}"), "target-10m")
    own = json.loads(shlex.split(written.pop("vLLM"))[1])
    assert (own["method"], own["model"]) == ("mtp", str(tmp_path))
    assert set(written.values()) == {engines.NOT_THERE}


@pytest.mark.parametrize(
    ("kind", "called", "own"),
    [("dflash", "DFlash", "fc"), ("dspark", "DSpark", "markov_head.markov_w1"),
     ("dflash", None, "candidate_selector.hidden_projection")],
    ids=["DFlash", "DSpark", "DFlash 2"],
)  # fmt: skip
def test_a_block_drafter_is_called_by_its_kind(tmp_path, kind, called, own):
    heads = {"fc", "hidden_norm", own}
    save_file({f"{name}.weight": torch.zeros(1) for name in heads}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    written = engines.options(plan(f"dflash:{tmp_path}"), "target-10m")
    own = json.loads(shlex.split(written["vLLM"])[1])
    assert (own["method"], own["model"]) == (kind, str(tmp_path))
    if called is None:
        assert written["TensorRT-LLM"] == engines.NOT_THERE
    else:
        own = yaml.safe_load(written["TensorRT-LLM"])["speculative_config"]
        assert (own["decoding_type"], own["speculative_model"]) == (called, str(tmp_path))
    assert written["llama.cpp"].startswith(f"--spec-type draft-{kind} --spec-draft-n-max 4")
    words = shlex.split(written["SGLang"], comments=True)
    assert words[1::2] == [kind.upper(), str(tmp_path), *["5"] * (kind == "dflash")]
    assert written["transformers"] == engines.NOT_THERE


def test_layers_that_draft_in_parallel_are_called_so(tmp_path):
    names = ["fc.weight", "layers.0.hidden_norm.weight", "mask_hidden"]
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    written = engines.options(plan(f"eagle:{tmp_path}"), "target-10m")
    own = json.loads(shlex.split(written["vLLM"])[1])
    assert (own["method"], own["parallel_drafting"]) == ("eagle3", True)
    assert written["SGLang"] == written["TensorRT-LLM"] == engines.NOT_THERE


def test_a_draft_model_that_drafts_in_parallel_is_called_so(tmp_path):
    folder = tmp_path / "draft"
    shutil.copytree(shelf.find("sibling-1m"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pard_token": 0}))
    written = engines.options(plan(f"model:{folder}"), "target-10m")
    assert json.loads(shlex.split(written["vLLM"])[1])["parallel_drafting"] is True
    assert yaml.safe_load(written["TensorRT-LLM"])["speculative_config"]["decoding_type"] == "PARD"
    assert written["SGLang"] == written["llama.cpp"] == engines.NOT_THERE


@pytest.mark.parametrize("drafter", ["recycle", "mine:Again", "early_exit"])
def test_an_engine_says_so_where_it_has_no_such_drafter(drafter):
    written = engines.options(plan(drafter), "target-10m")
    assert set(written.values()) == {engines.NOT_THERE}
    lost = engines.options(plan("model:./lost"), "target-10m")
    assert set(lost.values()) == {"there is no folder ./lost"}
    grown = engines.options(plan("ngram", [(1, "grown:12")]), "target-10m")
    assert set(grown.values()) == {"cannot be given the tree grown:12"}


@pytest.mark.parametrize("drafter", ["ngram", "sibling-3m", "early_exit:2"])
def test_transformers_runs_what_it_is_told(drafter):
    line = engines.options(plan(drafter), "target-10m")["transformers"]
    call = ast.parse(line.partition("#")[0].strip()).body[0].value
    given = {k.arg: k.value for k in call.keywords}
    folder = shelf.find("target-10m")
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = AutoTokenizer.from_pretrained(folder)("def mean(values):", return_tensors="pt").input_ids
    draft = AutoModelForCausalLM.from_pretrained(shelf.find("sibling-3m"))
    options = {
        name: draft if ast.unparse(value) == "draft" else ast.literal_eval(value)
        for name, value in given.items()
    }
    plain = model.generate(ids, max_new_tokens=16, do_sample=False)
    assert model.generate(ids, max_new_tokens=16, do_sample=False, **options).equal(plain)


def test_the_command_prints_the_plan_and_an_engines_options(store, run, tmp_path):
    log("ngram", {1: 1.5, 8: 0.9})
    log("suffix", 1.4, tags=MACHINE | {"load": "7.5"})
    out = tmp_path / "speedups.csv"
    code, text, err = run("target-10m", "--out", str(out))
    assert code == 0, err
    for said in (
        "1: 3, then off",
        "Draft 3 tokens with ngram",
        "Switch it off in batches above 1",
        "Not used: 1 result",
        "the load average was 7.5",
        "prompt_lookup_num_tokens=3",
    ):
        assert said in " ".join(text.split())  # fmt: skip
    assert out.read_text().startswith("drafter,draft,batch,speedup,low,high,prompts,best,on\n")
    assert out.with_suffix(".png").stat().st_size > 1000
    later = figures.runs.plans(pd.read_csv(out)).get_suptitle()
    assert later == "ngram pays up to batch 1; framed: where to draft", "it is about no target"
    advice = only(json.loads(run("--json")[1]))
    assert advice["drafters"][0]["draft length by batch"] == "1: 3, then off"
    assert set(advice["engines"]) == set(engines.ENGINES)
