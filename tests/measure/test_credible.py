"""A timing that cannot be is never taken for a result: metrics, answers, figures, tables and pages
say so, by one check."""

import json

import pandas as pd
import pytest
from support.questions import PROMPTS

from specexp import figures, theory
from specexp.measure import one_pairing, statistics, summaries
from specexp.measure.under_load import served
from specexp.tracking import compare, mlflow_view, report, results
from specexp.tracking import runs as track

CALM = {"draft_s": 0.2, "verify_s": 0.9, "rest_s": 0.1, "step_s": 1.0}
FAULTS = {  # how many times as fast each arm seems, and costs of its rounds
    "calm": (1.0, CALM),
    "above the acceptance length": (10.0, CALM),
    "far from the prediction": (0.2, CALM),
    "a pass below a plain step": (1.0, CALM | {"draft_s": 0.6, "verify_s": 0.4}),
}

IDLE = {"load": "0", "threads": "2"}  # whatever the machine of the tests does


@pytest.fixture(params=FAULTS)
def planted(request, latency):
    """Samples of one arm, costs of its rounds, and whether they may be believed."""
    speedup, costs = FAULTS[request.param]
    samples = latency[latency["gamma"] == 3].assign(arm="x")
    samples = samples.assign(plain_s=speedup * samples["s"])
    about = {"arm": "x", "drafted": 3, "weights_mb": 0.0, "kv_bytes": 0}
    return samples, pd.DataFrame([about | costs]), request.param == "calm"


def title(figure) -> str:
    return figure.get_suptitle().replace("\n", " ")


def test_a_timing_that_cannot_be_is_marked_wherever_it_is_read(planted, store):
    samples, costs, calm = planted
    metrics = {n: float(v) for n, v in summaries.arm_metrics(samples, costs)[0].items()}
    assert metrics["speedup/credible"] == calm
    expected = summaries.predicted(samples, "arm", costs)
    measured = summaries.speedups(samples, "arm", expected)
    assert ("not credible" in title(figures.pairings.forest(measured))) != calm
    ahead = measured.assign(low=1.01, high=99, promised=1.02)
    assert ("x: " in title(figures.pairings.forest(ahead))) == calm
    record = {"params": {"drafter": "x"}, "metrics": metrics, "tags": {}}
    assert bool(mlflow_view.doubts(record)) != calm
    answer = mlflow_view.answer_tags(record, not calm)["answer"]
    assert answer.endswith(" (doubtful)") != calm
    assert ("(doubtful)" in mlflow_view.answer_tags(record, not calm)[mlflow_view.NOTE]) != calm
    track.log("mine", {"drafter": "x"}, metrics, tags=IDLE)
    [result] = results.listed("results")
    assert ("] (doubtful), " in report.Run(result).headline) != calm
    assert compare.has_doubtful_timing(result) != calm
    runs = track.runs()
    assert ("timing" in compare.overview(runs)) != calm
    runs = runs.assign(**{"metrics.speedup/ci_low": 1.5, "metrics.speedup/ci_high": 99.0})
    assert ("Fastest: x" in title(figures.runs.rate_and_speedup(runs))) == calm
    [run] = report.of("mine")
    assert ("a doubtful timing" in report.answer([run])) != calm


@pytest.mark.parametrize("together", ["yes", "no"])
def test_a_finished_point_says_that_others_ran_beside_it(store, together):
    metrics = {"speedup/measured": 2.0, "speedup/ci_low": 1.9, "speedup/ci_high": 2.1}
    track.log("mine", {"drafter": "x"}, metrics, tags=IDLE)
    [result] = results.listed("results")
    tags = json.loads((result / results.TAGS).read_text())
    (result / results.TAGS).write_text(json.dumps(tags | {"together": together}))
    assert ("(doubtful)" in report.Run(result).headline) == (together == "yes")


def test_a_sweep_is_doubtful_if_any_draft_length_is(latency):
    costs = pd.DataFrame({"gamma": [0, 1, 3], "draft_s": [0, 0.1, 0.3],
                          "verify_s": [0.9, 0.9, 0.5], "rest_s": 0.1})  # fmt: skip
    calm = latency.assign(plain_s=latency["s"])
    predicted = summaries.predicted(calm, "gamma", costs)
    assert summaries.latency_metrics(calm, predicted)[0]["speedup/credible"] == 0
    measured = summaries.speedups(calm, "gamma", predicted).set_index("gamma")["doubt"]
    assert [measured[g] == statistics.NOT_CREDIBLE for g in (1, 3)] == [False, True]
    costs["verify_s"] = 0.9
    predicted = summaries.predicted(calm, "gamma", costs)
    assert summaries.latency_metrics(calm, predicted)[0]["speedup/credible"] == 1


def test_any_batch_of_a_sweep_and_what_one_stream_should_gain_are_checked(throughput):
    calm = throughput.assign(plain_s=throughput["s"] * throughput["plain_tokens"]
                             / throughput["tokens"])  # fmt: skip
    for speedup, expected, credible in (
        (1.0, None, 1), (1.0, 1.1, 1), (1.0, 5.0, 0), (1.0, 0.2, 0),
    ):  # fmt: skip
        table = expected and pd.DataFrame({"batch": [1], "speedup": expected, "verify": 1.0})
        metrics, _ = summaries.throughput_metrics(calm, table)
        assert metrics["speedup/credible"] == credible, (speedup, expected)
    largest = calm["batch"] == 4
    busy = calm.assign(plain_s=calm["plain_s"].where(~largest, 20 * calm["plain_s"]))
    assert summaries.throughput_metrics(busy)[0]["speedup/credible"] == 0
    by_batch = summaries.speedups(busy, "batch")
    for figure in (figures.pairings.throughput, figures.pairings.over_batch):
        assert "not credible" in title(figure(by_batch))
    slow = by_batch.assign(low=0.5, high=0.6, speedup=[0.55, 9.0])
    assert "Pays at no batch" not in title(figures.pairings.over_batch(slow))


def test_costs_of_one_stream_predict_what_it_gains(pairing, throughput):
    costs = one_pairing.arm_costs({1: pairing}, PROMPTS, repeats=3)
    [row] = summaries.predicted(throughput, "batch", costs).to_dict("records")
    alone = summaries.pooled(throughput[throughput["batch"] == 1])
    whole = costs[["draft_s", "verify_s", "rest_s"]].sum(axis=1).iloc[0]
    assert row["batch"] == 1
    assert row["speedup"] == pytest.approx(alone.length * costs["step_s"].iloc[0] / whole)


def test_rates_under_load_are_checked_too():
    rows = [
        {"load": 1, "policy": name, "turn": turn, "s": s, "busy_s": s, "tokens": 20, "rows": rows,
         "speculated": 0, "drafted": 0, "accepted": 0, "stream_s": s}
        for name, s, rows in (("plain", 10.0, 20), ("possible", 5.0, 10), ("never", 2.0, 10))
        for turn in range(6)
    ]  # fmt: skip
    rated = served.rates(pd.DataFrame(rows)).set_index("policy")
    doubtful = rated["doubt"] == statistics.NOT_CREDIBLE
    assert doubtful.to_dict() == {"plain": False, "possible": False, "never": True}


def test_a_doubtful_run_is_never_called_the_best(store):
    def run(name: str, speedup: float, **more: float):
        low, high = speedup - 0.1, speedup + 0.1
        metrics = {"speedup/measured": speedup, "speedup/ci_low": low, "speedup/ci_high": high}
        track.log(
            "mine", {"drafter": name}, metrics | {"acceptance/length": 2.0, **more}, tags=IDLE
        )

    run("true", 1.5)
    run("untrue", 9.9)
    answer = report.answer(report.of("mine"))
    assert answer.startswith("true by hand: 1.50x")
    assert answer.endswith("The timings of 1 other run are doubtful.")
    [(first, *_), (second, figure, *_)] = report.compared(report.of("mine"))[0]
    assert (first, second, figure[-11:]) == ("true by hand", "untrue by hand", " (doubtful)")
    run("also", 1.2)
    assert "best of 2 runs, besides 1 of doubtful timings" in report.answer(report.of("mine"))
    everything = track.runs().assign(**{"metrics.acceptance/rate": 0.5})
    found = title(figures.runs.rate_and_speedup(everything))
    assert "Fastest: true" in found
    assert "hollow, not counted: 1 run, not credible" in found
    bad = [r for r in report.of("mine") if r.label.startswith("untrue")]
    assert "certainly" not in report.answer(bad)
    run("other", 0.9, **{"speedup/credible": 0.0})
    bad += [r for r in report.of("mine") if r.label.startswith("other")]
    assert "None of the 2 runs is called the best" in report.answer(bad)


def test_batches_of_a_doubtful_run_are_hollow_and_not_counted():
    rows = [(name, name, step, value, value - 0.1, value + 0.1, name == "true")
            for name, value in (("true", 1.2), ("untrue", 9.9)) for step in (1, 8)]  # fmt: skip
    names = ["run_id", "drafter", "step", "value", "low", "high", "credible"]
    curves = pd.DataFrame(rows, columns=names)
    figure = figures.runs.over_batch(curves)
    assert "Speedup at batch 8: 1.20x [1.10, 1.30];" in title(figure)
    assert "hollow, not counted: 1 run" in title(figure)
    inside = {line.get_markerfacecolor() for line in figure.axes[0].lines}
    assert "none" in inside
    doubtful = figures.runs.over_batch(curves.query("not credible"))
    assert title(doubtful).startswith("Speedup over batch size; hollow, not counted: 1 run")


def test_reasons_are_words_and_what_is_unknown_is_not_checked():
    assert theory.doubts(9.9) == []
    assert theory.doubts(9.9, 2.0) == [
        "a speedup of 9.90x with 2.00 tokens per target pass is not credible"
    ]
    assert theory.doubts(1.0, 2.0, 4.0, 0.5) == [
        "1.00x was measured where 4.00x was predicted",
        "verifying a draft took only 0.50 times as long as a plain step",
    ]
    assert theory.doubts(1.0, 2.0, 1.2, 1.0) == []
