"""Figures over many runs average what is alike, and say what to run where there is nothing."""

import pandas as pd

from specexp import figures
from specexp.tracking import compare


def title(figure) -> str:
    above = figure.get_suptitle()
    return above or figure.axes[0].get_title(loc="left")


def test_runs_of_different_categories_share_a_figure():
    names = ["params.drafter", "metrics.category/code", "metrics.category/prose"]
    rows = [("ngram", 0.5, None), ("model", None, 0.25), ("none", None, None)]
    runs = pd.DataFrame(rows, columns=names).assign(experiment="acceptance")
    figure = figures.runs.by_category(runs)
    assert "ngram on code (50%)" in title(figure)
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
