"""The figures of the lesson say what their tables say."""

import numpy as np
import pandas as pd
import pytest

from specexp import figures
from specexp.measure import lesson

JUDGED = pd.DataFrame(
    [
        {"round": 1, "at": 1, "token": "a", "q": 0.5, "p": 0.6, "chance": 1.0,
         "outcome": "accepted"},
        {"round": 1, "at": 2, "token": " b\n", "q": 0.4, "p": 0.1, "chance": 0.25,
         "outcome": "rejected"},
        {"round": 1, "at": 3, "token": "c", "p": 0.3, "outcome": "corrected"},
        {"round": 2, "at": 1, "token": "d", "q": 0.4, "p": 0.4, "chance": 1.0,
         "outcome": "accepted"},
        {"round": 2, "at": 2, "token": "e", "q": 0.4, "p": 0.4, "chance": 1.0,
         "outcome": "accepted"},
        {"round": 2, "at": 3, "token": "a name of many letters", "p": 0.3, "outcome": "bonus"},
    ]
)  # fmt: skip
OVERLAP = pd.DataFrame(
    {"id": [7, 3, -1], "token": [" x", "y", "1,234 others"], "p": [0.6, 0.3, 0.1],
     "q": [0.2, 0.5, 0.3], "shared": [0.2, 0.3, 0.1], "residual": [0.4, 0.0, 0.0],
     "excess": [0.0, 0.2, 0.2]}
)  # fmt: skip


def title(axes) -> str:
    return axes.get_title(loc="left")


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_by_hand_has_a_cell_for_every_token_and_counts_them():
    figure = figures.lesson.by_hand(JUDGED)
    [axes] = figure.axes
    assert len(axes.patches) == len(JUDGED)
    assert figure.get_suptitle() == "3 of 4 draft tokens accepted: 5 tokens in 2 target passes"
    assert "min(1, p/q) = 0.25" in texts(axes)
    assert {'" b⏎"', '"a name of m…"'} <= set(texts(axes))


def test_by_hand_leaves_out_draft_tokens_for_which_there_is_no_room():
    first = JUDGED[JUDGED["round"] == 1].iloc[:2]
    late = [first.iloc[[1]].assign(at=at, token=f"late {at}") for at in range(3, 17)]
    table = pd.concat([first, *late, JUDGED.iloc[[2]].assign(at=17)])
    figure = figures.lesson.by_hand(table)
    [axes] = figure.axes
    shown = len(axes.patches) - 1
    assert figure.get_figwidth() / (shown + 1) > 1.7  # inches: a cell's texts do not overlap
    words = figure.get_suptitle()
    assert words.startswith("1 of 16 draft tokens accepted: 2 tokens in 1 target pass; shown are")
    assert f"the first {shown} of 16" in words
    assert {'"a"', '"late 3"', '"c"'} <= set(texts(axes))
    assert '"late 16"' not in texts(axes)


def test_overlap_bars_state_alpha_and_quote_tokens_only():
    figure = figures.lesson.overlap_bars(OVERLAP)
    assert "= 60%" in figure.get_suptitle()
    [axes] = figure.axes
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == ['" x"', '"y"', "1,234 others"]


def test_frequencies_say_whether_tokens_follow_p():
    p = np.zeros(10)
    p[[7, 3, 1]] = 0.6, 0.3, 0.1
    of_p, of_q = [7] * 600 + [3] * 300 + [1] * 100, [7] * 200 + [3] * 500 + [1] * 300
    draws = pd.DataFrame({"drafted": of_q, "emitted": of_p})
    figure = figures.lesson.frequencies(draws, OVERLAP, p)
    assert figure.get_suptitle().startswith("The tokens emitted follow p; the draft tokens do not")
    figure = figures.lesson.frequencies(draws.assign(emitted=of_q), OVERLAP, p)
    assert "emitted do NOT follow p" in figure.get_suptitle()


PASSES = pd.DataFrame({"tokens": [1, 4, 16], "ms": [1.0, 1.5, 6.0], "times": [1.0, 1.5, 6.0]})
PASSES = PASSES.assign(low=PASSES["times"], high=PASSES["times"])
COSTS = pd.DataFrame({"gamma": [0, 2, 4], "draft_s": [0.0, 0.5, 1.0],
                      "verify_s": [1.0, 1.2, 1.5], "rest_s": 0.0})  # fmt: skip
MEASURED = pd.DataFrame({"gamma": [2, 4], "speedup": [1.3, 0.8], "low": [1.2, 0.7],
                         "high": [1.4, 0.9], "doubt": "", "tok_s": 1.0,
                         "plain_tok_s": 1.0, "promised": 1.3, "length": 2.0})  # fmt: skip


def test_price_states_pass_and_draft_costs():
    finding, why = figures.lesson.price(PASSES, COSTS).get_suptitle().splitlines()
    assert finding.startswith("A pass over 16 tokens takes 6.00x")
    assert finding.endswith("the time of one; a draft token costs 0.25 plain steps")
    assert why.startswith("No intervals: drafting")


def test_together_states_prediction_and_best():
    predicted = pd.DataFrame({"gamma": [2, 4], "speedup": [1.2, 0.9], "tokens": [2, 2]})
    figure = figures.lesson.together(COSTS, predicted, MEASURED)
    assert title(figure.axes[0]) == "Predicted to pay at γ = 2"
    finding, why = figure.get_suptitle().splitlines()
    assert finding == "At γ = 2: 1.30x [1.20, 1.40]: faster; predicted 1.20x"
    assert why.startswith("No intervals: predictions")


def test_tension_leaves_out_batches_beyond_the_curve():
    by_batch = MEASURED.rename(columns={"gamma": "batch"}).assign(batch=[1, 8])
    figure = figures.lesson.tension(PASSES, by_batch, 3)
    assert [text.strip() for text in texts(figure.axes[0]) if text] == [
        "batch 1: 1.5x"
    ]  # 8 end at 32
    assert (
        figure.get_suptitle() == "1.30x [1.20, 1.40] at batch 1; stops paying between batch 1 and 8"
    )


def test_tension_counts_one_draft_token():
    by_batch = MEASURED.rename(columns={"gamma": "batch"}).assign(batch=[1, 8])
    figure = figures.lesson.tension(PASSES, by_batch, 1)
    assert title(figure.axes[0]) == "How much longer a pass is with 1 draft token a stream"


def test_pays_says_where_and_sliders_draw_the_same(monkeypatch):
    costs = lesson.shipped_costs()
    figure = figures.lesson.pays(costs, [1, 64], [0.5, 0.9])
    best = max(costs.speedup(1, g, [0.9] * g, 128) for g in costs.gammas[1:])
    words = figure.get_suptitle().replace("\n", " ")
    assert f"With acceptance probability 0.9 a draft pays at batch 1: {best:.2f}x at most" in words
    none = figures.lesson.pays(costs, [64], [0.1]).get_suptitle().replace("\n", " ")
    assert "pays at none of these target-10m with sibling-3m" in none
    drawn = []
    monkeypatch.setattr(figures.lesson, "display", drawn.append)
    widget = figures.lesson.sliders(costs)
    widget.update()
    widget.children[0].value = 16
    assert drawn[-1].axes[0].get_title(loc="left") == "batch 16"


@pytest.mark.parametrize("name", figures.__all__)
def test_every_figure_module_is_reached_by_name(name):
    assert getattr(figures, name).__name__ == f"specexp.figures.{name}"


def test_probabilities_are_short_enough_for_a_cell():
    texts = [figures.lesson._short(p) for p in (1.0, 0.094, 0.0047, 0.00079, 2.3e-140, 0.0)]
    assert texts == ["1.00", "0.094", "0.0047", "8e-04", "2e-140", "below 1e-300"]
