"""Figures over many runs average what is alike, and say what to run where there is nothing."""

from collections import Counter

import numpy as np
import pandas as pd
import pytest
from support.readable import title

from specexp import figures
from specexp.measure import statistics
from specexp.tracking import compare

SIMULATIONS = 100


def test_runs_of_different_categories_share_a_figure():
    names = ["params.drafter", "metrics.category/code", "metrics.category/prose"]
    rows = [("ngram", 0.5, None), ("model", None, 0.25), ("none", None, None)]
    runs = pd.DataFrame(rows, columns=names).assign(experiment="acceptance")
    runs["metrics.category_ci/code_low"], runs["metrics.category_ci/code_high"] = 0.41, 0.59
    figure = figures.runs.by_category(runs)
    assert "25% to 50%" in title(figure)
    assert {t.get_text() for t in figure.axes[0].texts} >= {"50%\n[41, 59]", "25%\n1 run"}
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["ngram", "model"]


def test_only_alike_runs_are_averaged():
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
    assert [t.get_text() for t in axes.texts] == ["60%\n2 runs", "30%\n1 run"]
    assert "run 10" in figures.runs.by_category(runs.tail(2)).axes[0].texts[0].get_text()


def test_paths_are_cut_to_what_tells_them_apart_and_fit_their_figures():
    folder = "/srv/models/of/the/company/llama-8b-instruct"
    drafters = [f"{folder}/small/step-1000", f"{folder}/large/step-1000", "ngram"]
    kinds = {f"metrics.category/my-own-kind-of-text-{n}": [0.4, 0.5, 0.6] for n in range(9)}
    runs = pd.DataFrame({"params.drafter": drafters, "experiment": "acceptance"} | kinds)
    short = compare.short(runs)
    assert list(short["params.drafter"]) == ["small/step-1000", "large/step-1000", "ngram"]
    figures.runs.by_category(short)
    steps = [{"step": step, "value": 1.0, "low": 0.9, "high": 1.1} for step in (1, 4)]
    about = [{"run_id": name, "drafter": name, "credible": True} for name in drafters]
    rows = [run | step for run in about for step in steps]
    figures.runs.over_batch(pd.DataFrame(rows))


def test_runs_of_several_targets_are_told_apart():
    metrics = {"metrics.acceptance/rate": 0.5, "metrics.speedup/measured": 1.5}
    pairs = {"params.drafter": ["ngram", "ngram"], "params.target": ["big", "small"]}
    runs = pd.DataFrame(pairs | metrics | {"experiment": "x"})
    curves = pd.DataFrame({"run_id": ["a", "b"], "drafter": "ngram", "target": ["big", "small"],
                           "credible": True, "step": 1, "value": 1.5, "low": 1.4,
                           "high": 1.6})  # fmt: skip
    several = {"ngram, target big", "ngram, target small"}
    for draw, table in (
        (figures.runs.rate_and_speedup, runs), (figures.runs.over_batch, curves),
    ):  # fmt: skip
        for part, names in ((table, several), (table.head(1), {"ngram"})):
            assert {*draw(part).axes[0].get_legend_handles_labels()[1]} == names


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


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ([(1.3, 1.5), (0.9, 1.1)], "Fastest: a, 1.40x [1.29, 1.51]"),
        ([(1.2, 1.6), (1.1, 1.3)], "2 of 2 runs are certainly faster than plain decoding, none is"),
        ([(0.6, 0.8), (0.5, 0.7)], "0 of 2 runs are certainly faster"),
        ([(1.01, 1.5), (0.9, 1.1)], "0 of 2 runs are certainly faster"),  # one by one, it would be
        ([(1.3, 1.5), (None, None)], "1 of 2 runs is certainly faster than plain decoding"),
        ([(0.9, 1.1)], "0 of 1 run is certainly faster"),
    ],
)
def test_fastest_run_is_named_only_above_all_other_intervals(ends, words):
    rows = [
        {"params.drafter": name, "experiment": "x", "metrics.acceptance/rate": 0.5,
         "metrics.speedup/measured": (low + high) / 2 if low else 1.0,
         "metrics.speedup/ci_low": low, "metrics.speedup/ci_high": high}
        for name, (low, high) in zip("ab", ends, strict=False)
    ]  # fmt: skip
    assert words in title(figures.runs.rate_and_speedup(pd.DataFrame(rows)))


def test_of_eight_runs_that_gain_nothing_hardly_any_is_called_faster():
    """Each on 300 prompts, with the interval that it logs."""
    rng, said = np.random.default_rng(0), Counter()
    for _ in range(SIMULATIONS):
        rows = []
        for _ in range(8):
            plain, fast = np.exp(rng.normal(0, 0.05, (2, 300)))
            rows.append(statistics.speedup(plain, np.ones(300), fast, np.ones(300))[:3])
        alone = pd.DataFrame(rows, columns=["value", "low", "high"])
        said["alone"] += (alone["low"] > 1).any()
        said["together"] += (figures.runs._together(alone)["low"] > 1).any()
    assert said["alone"] >= 0.05 * SIMULATIONS
    assert said["together"] <= 0.03 * SIMULATIONS


def test_acceptance_rates_and_speedups_carry_their_intervals():
    run = {"params.drafter": "a", "experiment": "x", "metrics.acceptance/rate": 0.5,
           "metrics.acceptance/rate_ci_low": 0.4, "metrics.acceptance/rate_ci_high": 0.65,
           "metrics.speedup/measured": 1.4, "metrics.speedup/ci_low": 1.2,
           "metrics.speedup/ci_high": 1.5}  # fmt: skip
    [axes] = figures.runs.rate_and_speedup(pd.DataFrame([run])).axes
    assert "hold for all runs at once" in axes.get_ylabel(), "so wider than those of its table"
    [bars] = axes.containers
    across, up = (line.get_segments()[0] for line in bars.lines[2])
    assert across.tolist() == [[pytest.approx(0.4), 1.4], [pytest.approx(0.65), 1.4]]
    assert up.tolist() == [[0.5, pytest.approx(1.2)], [0.5, pytest.approx(1.5)]]


def test_very_wide_intervals_of_runs_leave_room_for_the_points():
    rows = [{"params.drafter": name, "experiment": "x", "metrics.acceptance/rate": 0.5,
             "metrics.speedup/measured": 1.2, "metrics.speedup/ci_low": 0.2,
             "metrics.speedup/ci_high": high}
            for name, high in (("a", 1.4), ("b", 25))]  # fmt: skip
    [axes] = figures.runs.rate_and_speedup(pd.DataFrame(rows)).axes
    assert axes.get_yscale() == "log", "as of all ratios that have no zero"
    steps = [{"run_id": "a", "drafter": "a", "step": s, "value": 1.2, "low": 0.2, "high": 25,
              "credible": True} for s in (1, 4)]  # fmt: skip
    assert figures.runs.over_batch(pd.DataFrame(steps)).axes[0].get_ylim()[1] < 3


def test_a_map_of_plans_frames_where_to_draft():
    rows = [("ngram", 4, 1, 1.5, True, True), ("ngram", 2, 1, 1.4, False, False),
            ("ngram", 2, 8, 0.8, True, False), ("suffix", 3, 1, 1.1, True, False)]  # fmt: skip
    names = ["drafter", "draft", "batch", "speedup", "best", "on"]
    table = pd.DataFrame(rows, columns=names)
    table = table.assign(low=table["speedup"] - 0.1, high=table["speedup"] + 0.1)
    figure = figures.runs.plans(table)
    assert title(figure).startswith("ngram pays up to batch 1; framed")
    axes = figure.axes[0]
    cells = {t.get_text() for t in axes.texts} - {""}
    assert cells == {
        "1.50x\n[1.40, 1.60]\ndraft 4", "0.80x\n[0.70, 0.90]\ndraft 2",
        "1.10x\n[1.00, 1.20]\ndraft 3",
    }  # fmt: skip
    assert [p.get_xy() for p in axes.patches] == [(0, 0)], "only the first cell is framed"
    off = figures.runs.plans(table.assign(on=False))
    alone = "No drafter is certainly faster than plain decoding for one stream"
    assert title(off).startswith(alone), "one may be in a batch of 8"
    off = figures.runs.plans(table[table["batch"] > 1].assign(on=False))
    assert title(off).endswith("plain decoding in a batch of 8")
    assert "run 20_latency" in figures.runs.plans(table.head(0)).axes[0].texts[0].get_text()
