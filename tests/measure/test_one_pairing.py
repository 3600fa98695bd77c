"""Measurements add up, arms take turns, and figures say what the numbers say."""

import gc
import shutil
import weakref

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from specexp import api, figures
from specexp.errors import UserError
from specexp.measure import one_pairing, summaries
from specexp.measure.prompts import Prompt
from specexp.trace import Acceptance
from specexp.tracking import compare

PROMPTS = [
    Prompt(1, "code", ("def mean(values):",)),
    Prompt(2, "code", ("return sum(values) / len(values)",)),
    Prompt(3, "messy", ("zz qq mean mean mean",)),
]


@pytest.fixture(scope="module")
def pairing(tiny_folders):
    return api.build(tiny_folders[0], tiny_folders[1], gamma=3)


@pytest.fixture(scope="module")
def acceptance(pairing):
    return one_pairing.acceptance([pairing, pairing.with_(drafter="ngram")], PROMPTS, 10)


@pytest.fixture(scope="module")
def latency(pairing):
    return one_pairing.latency(pairing, PROMPTS, [1, 3], 10, repeats=2)


@pytest.fixture(scope="module")
def throughput(pairing):
    return one_pairing.throughput(pairing, PROMPTS, [1, 4], 10, repeats=2)


def test_acceptance_has_a_row_for_every_pairing_and_prompt_and_its_counts_agree(
    pairing, acceptance
):
    assert len(acceptance) == 2 * len(PROMPTS)
    assert set(acceptance["pairing"]) == {pairing.drafter, "ngram"}
    for _, row in acceptance.iterrows():
        assert row["record"].accepted == row["accepted"]
        assert row["emitted"] == row["accepted"] + row["passes"] - row["cut"]
        assert sum(r[-1] for r in row["rounds"]) == row["emitted"]


def test_metrics_are_pooled_over_prompts_not_averaged(acceptance):
    own = acceptance[acceptance["pairing"] != "ngram"]
    metrics, series = summaries.acceptance_metrics(own)
    assert metrics["acceptance/rate"] == own["accepted"].sum() / own["drafted"].sum()
    assert metrics["counts/rounds"] == own["passes"].sum()
    code = own[own["category"] == "code"]
    assert metrics["category/code"] == code["accepted"].sum() / code["drafted"].sum()
    assert metrics["acceptance/length"] == pytest.approx(1 + sum(series["acceptance/at_position"]))


def test_latency_pairs_every_gamma_with_plain_decoding_of_the_same_text(latency):
    assert len(latency) == 2 * 2 * len(PROMPTS)
    assert (latency["tokens"] == latency["plain_tokens"]).all()
    assert (latency[["s", "plain_s", "ttft_s"]] > 0).all().all()
    by_gamma = summaries.speedups(latency, "gamma").set_index("gamma")
    part = latency[latency["gamma"] == 3]
    plain = part["plain_s"].sum() / part["plain_tokens"].sum()
    fast = part["s"].sum() / part["tokens"].sum()
    assert by_gamma.loc[3, "speedup"] == pytest.approx(plain / fast)
    assert by_gamma.loc[3, "low"] <= by_gamma.loc[3, "speedup"] <= by_gamma.loc[3, "high"]


def test_the_order_of_the_arms_turns_from_prompt_to_prompt(pairing, monkeypatch):
    orders, real = [], one_pairing._take_turns
    monkeypatch.setattr(one_pairing, "_take_turns", lambda *a: orders.append(a[3]) or real(*a))
    one_pairing.latency(pairing, PROMPTS, [1], 4, repeats=2)
    assert orders == [False, True, False, True, False, True]


def test_a_prompt_that_is_repeated_makes_no_interval_narrower(latency, throughput):
    part, names = latency[latency["gamma"] == 3], ["acceptance/rate_ci_low", "acceptance/rate"]
    often = summaries.acceptance_metrics(pd.concat([part] * 20))[0]
    assert [often[n] for n in names] == [summaries.acceptance_metrics(part)[0][n] for n in names]
    of_speed = summaries.speedups(pd.concat([part] * 20), "gamma")
    columns = ["speedup", "low", "high"]
    pd.testing.assert_frame_equal(of_speed[columns], summaries.speedups(part, "gamma")[columns])
    many = pd.concat([throughput[throughput["batch"] == 1]] * 20)
    assert many["number"].nunique() == 3
    of_batches = summaries.speedups(many, "batch")[columns]
    pd.testing.assert_frame_equal(
        of_batches, summaries.speedups(many[: len(many) // 20], "batch")[columns]
    )
    found = summaries.throughput_metrics(throughput)[0]
    once = throughput[(throughput["batch"] == 1) & (throughput["repeat"] == 0)]
    assert found["acceptance/rate_ci_low"] == summaries.acceptance_metrics(once)[0][names[0]]
    assert found["counts/drafted"] == once["drafted"].sum()


def test_a_batch_seen_once_says_neither_that_it_pays_nor_that_it_does_not():
    assert "pay" not in figures.pairings.crossing(sweep((2, 2, 2), (0.5, 0.5, 0.5))).lower()


def test_throughput_counts_only_rounds_in_which_every_row_is_live(pairing, throughput):
    assert set(throughput["batch"]) == {1, 4}
    made = pairing.generate([p.text for p in PROMPTS], 10).trace
    s, tokens = one_pairing.full_batch(made)
    full = [r for r in made.rounds if len(r.steps) == 3]
    assert tokens == sum(step.emitted for r in full for step in r.steps)
    assert s == full[-1].end_s - made.prefill_s
    assert tokens <= made.emitted
    metrics, series = summaries.throughput_metrics(throughput)
    assert set(series["speedup/at_batch"]) == {1, 4}
    assert metrics["speedup/at_largest_batch"] == series["speedup/at_batch"][4]


def test_every_batch_size_sees_the_same_prompts(pairing, monkeypatch):
    texts = [f"{kind} {i} {'and on ' * i}" for kind in ("code", "prose") for i in range(3)]
    prompts = [Prompt(i, text.split()[0], (text,)) for i, text in enumerate(texts)]
    ids = pairing.encode(texts)
    seen = []
    real = one_pairing._take_turns
    monkeypatch.setattr(one_pairing, "_take_turns", lambda *a: seen.append(a[1]) or real(*a))
    samples = one_pairing.throughput(pairing, prompts, [1, 2, 4], 6, repeats=2)
    by_size = {b: [ids.index(row) for s in seen for row in s if len(s) == b] for b in (1, 2, 4)}
    assert by_size == {b: [0, 1, 2, 3] * n for b, n in ((1, 2), (2, 3), (4, 5))}
    assert list(samples["batch"]) == [1] * 8 + [2] * 6 + [4] * 5
    assert list(samples["context"][-5:]) == [max(map(len, ids[:4])) + 6] * 5
    assert not samples.duplicated(["batch", "number", "repeat"]).any()


def test_a_batch_larger_than_there_are_prompts_repeats_them(pairing):
    samples = one_pairing.throughput(pairing, PROMPTS, [1, 4], 6, repeats=1)
    assert list(samples["batch"]) == [1] * 2 * len(PROMPTS) + [4] * 5
    assert samples["emitted"].iloc[-1] == 4 * 6


def test_an_end_of_text_does_not_empty_the_batch(pairing):
    assert pairing.engine.eos
    samples = one_pairing.throughput(pairing, PROMPTS, [2], 6, repeats=1)
    assert (samples["emitted"] == 2 * 6).all()
    assert pairing.engine.eos


def test_costs_and_prediction_start_from_the_plain_step(pairing):
    costs = one_pairing.pass_costs(pairing, PROMPTS, [1, 3], repeats=3)
    assert list(costs["gamma"]) == [0, 1, 3]
    assert (costs["verify_s"] > 0).all()
    costs = pd.DataFrame(
        {"gamma": [0, 2], "draft_s": [0, 0.5], "verify_s": [0.9, 1.1], "rest_s": [0.1, 0.2]}
    )
    record = Acceptance(drafted=8, emitted=8, cut=0, histogram=(1, 2, 1))
    predicted = summaries.predicted(costs, record).set_index("gamma")
    assert predicted.loc[0, "speedup"] == 1
    assert predicted.loc[2, "tokens"] == record.length == 2
    assert predicted.loc[2, "speedup"] == pytest.approx(2 * 1.0 / 1.8)


def test_what_a_round_costs_is_logged_whole_in_plain_steps(latency):
    costs = {"arm": ["x"], "draft_s": 2.0, "verify_s": 5.0, "rest_s": 1.0, "step_s": 4.0,
             "weights_mb": 0.0, "kv_bytes": 0}  # fmt: skip
    metrics, _ = summaries.duel_metrics(latency.assign(arm="x"), pd.DataFrame(costs))
    names = ("cost/draft_steps", "cost/verify_steps", "cost/rest_steps")
    assert [metrics[name] for name in names] == [0.5, 1.25, 0.25]


def test_what_rounds_cost_is_the_mean_over_how_many_guesses_they_found():
    """Two rounds in three find nothing; one of those was disturbed."""
    found = one_pairing._typical([(0, 1.0, 2.0)] * 5 + [(3, 1.0, 5.0)] * 3 + [(0, 9.0, 90.0)])
    assert found == pytest.approx((1.0, 3.0))


def test_where_nothing_is_drafted_there_is_no_acceptance(pairing):
    with pytest.raises(UserError, match="gamma is 0"):
        one_pairing.acceptance([pairing.with_(gamma=0)], PROMPTS, 8)


def test_rounds_are_kept_one_row_each(latency):
    rounds = summaries.rounds(latency)
    assert len(rounds) == latency["passes"].sum()
    assert rounds["emitted"].sum() == latency["emitted"].sum()
    assert {"question_id", "gamma", "repeat", "end_s", "drafted", "accepted"} <= set(rounds)


def test_every_figure_is_drawn_with_a_title(acceptance, latency, throughput, pairing):
    costs = one_pairing.pass_costs(pairing, PROMPTS, [1, 3], repeats=3)
    predicted = summaries.predicted(costs, summaries.pooled(latency[latency["gamma"] == 3]))
    warm = one_pairing.acceptance([pairing], PROMPTS, 8, [0.0, 1.0])
    by_batch = summaries.speedups(throughput, "batch")
    drawn = [
        figures.pairings.by_category(acceptance), figures.pairings.by_position(acceptance),
        figures.pairings.by_temperature(warm),
        figures.pairings.over_gamma(summaries.speedups(latency, "gamma"), predicted),
        figures.pairings.round_costs(costs),
        figures.pairings.throughput(by_batch), figures.pairings.over_batch(by_batch),
    ]  # fmt: skip
    for figure in drawn:
        assert title(figure)
        assert figure.axes[0].has_data()
    assert not plt.get_fignums()


def title(figure) -> str:
    above = figure.get_suptitle()
    return above or figure.axes[0].get_title(loc="left")


def sweep(*speedups: tuple[float, float, float]) -> pd.DataFrame:
    batches = [2**i for i in range(len(speedups))]
    rows = [
        {"batch": b, "speedup": v, "low": lo, "high": hi, "tok_s": 100 * v * b,
         "plain_tok_s": 100 * b, "rate": 0.5, "length": 2.0}
        for b, (v, lo, hi) in zip(batches, speedups, strict=True)
    ]  # fmt: skip
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("speedups", "said"),
    [
        ([(2, 1.9, 2.1), (1.2, 1.1, 1.3), (0.8, 0.7, 0.9)], "stops paying between batch 2 and 4"),
        ([(2, 1.9, 2.1), (1.0, 0.9, 1.1), (0.8, 0.7, 0.9)], "stops paying between batch 1 and 4"),
        ([(2, 1.9, 2.1), (1.2, 1.1, 1.3)], "Pays at every batch size tried"),
        ([(0.9, 0.8, 0.95), (0.5, 0.4, 0.6)], "Pays at no batch size tried"),
        ([(1.1, 0.9, 1.3), (0.9, 0.8, 1.1)], "1.10x at batch 1, 0.90x at batch 2"),
    ],
)
def test_the_crossing_is_claimed_only_where_intervals_allow_it(speedups, said):
    assert said in figures.pairings.crossing(sweep(*speedups))
    assert said in title(figures.pairings.over_batch(sweep(*speedups)))


def test_a_gain_within_the_noise_is_not_called_faster():
    measured = pd.DataFrame({"gamma": [2], "speedup": [1.1], "low": [0.9], "high": [1.3]})
    predicted = pd.DataFrame({"gamma": [0, 2], "speedup": [1.0, 1.2]})
    assert "No clear difference" in title(figures.pairings.over_gamma(measured, predicted))
    measured["low"] = 1.05
    assert "1.10x faster" in title(figures.pairings.over_gamma(measured, predicted))


def test_what_libraries_brought_is_left_alone_and_what_was_loaded_is_not(tiny_folders, tmp_path):
    """The garbage collector would take a fifth of a second for them, in the middle of a round."""
    target = str(shutil.copytree(tiny_folders[0], tmp_path / "target"))  # nobody else holds it
    made = api.build(target=target, drafter=tiny_folders[1], gamma=2)
    settled = gc.get_freeze_count()
    assert settled > 10_000
    loaded = weakref.ref(made.target.module)
    del made
    gc.collect()
    assert loaded() is None
    api.build(target=target, drafter=tiny_folders[1], gamma=2)
    assert gc.get_freeze_count() <= settled


def test_runs_of_different_categories_share_a_picture():
    names = ["params.drafter", "metrics.category/code", "metrics.category/prose"]
    rows = [("ngram", 0.5, None), ("model", None, 0.25), ("none", None, None)]
    runs = pd.DataFrame(rows, columns=names).assign(experiment="acceptance")
    figure = figures.runs.by_category(runs)
    assert "ngram on code (50%)" in title(figure)
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["ngram", "model"]


def test_only_runs_that_are_alike_are_averaged():
    names = ["experiment", "tags.notebook", "params.drafter", "params.gamma", "params.target",
             "params.seed", "metrics.category/code"]  # fmt: skip
    rows = [
        ("acceptance", None, "ngram", "3", "big", "0", 0.5),
        ("acceptance", None, "ngram", "3", "big", "1", 0.7),
        ("mine", "10_acceptance.ipynb", "ngram", "5", "big", "0", 0.3),
        ("rules", "60_rules.ipynb", "ngram", "3", "big", "0", 0.9),
        ("latency", None, "other", "3", "big", "0", 0.9),
    ]
    runs = pd.DataFrame(rows, columns=names)
    axes = figures.runs.by_category(runs).axes[0]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["ngram, gamma 3", "ngram, gamma 5"]
    assert [t.get_text() for t in axes.texts] == ["60%", "30%"]
    assert "10_acceptance" in axes.get_xlabel()
    assert "run 10" in figures.runs.by_category(runs.tail(2)).axes[0].texts[0].get_text()


def test_figures_of_no_runs_say_what_to_run():
    for figure in (
        figures.runs.rate_and_speedup(pd.DataFrame()),
        figures.runs.rate_and_speedup(  # each of two runs has one of the two
            pd.DataFrame(
                {
                    "metrics.acceptance/rate": [0.5, None],
                    "metrics.speedup/measured": [None, 1.5],
                    "params.drafter": "ngram",
                    "experiment": "x",
                }
            )
        ),
        figures.runs.by_category(pd.DataFrame()),
        figures.runs.over_batch(compare.curves(pd.DataFrame(), "speedup/at_batch")),
    ):
        assert "run " in figure.axes[0].texts[0].get_text()
