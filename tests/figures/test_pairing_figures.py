"""Figures of one pairing say what its tables say, and claim no more."""

from itertools import product

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from conftest import one_in
from support.questions import PROMPTS
from support.readable import title

from specexp import figures
from specexp.measure import one_pairing, summaries
from specexp.trace import Acceptance


def test_crossing_claims_nothing_of_one_sample():
    assert "pay" not in figures.pairings.crossing(sweep((2, 2, 2), (0.5, 0.5, 0.5))).lower()


def test_every_pairing_figure_has_a_title(acceptance, latency, throughput, pairing):
    costs = one_pairing.pass_costs(pairing, PROMPTS, [1, 3], repeats=3)
    predicted = summaries.predicted(latency, "gamma", costs)
    warm = one_pairing.acceptance([pairing], PROMPTS, 8, [0.0, 1.0])
    by_batch = summaries.speedups(throughput, "batch")
    drawn = [
        figures.pairings.by_category(acceptance), figures.pairings.by_position(acceptance),
        figures.pairings.by_temperature(warm),
        figures.pairings.over_gamma(summaries.speedups(latency, "gamma", predicted), predicted),
        figures.pairings.round_costs(costs),
        figures.pairings.throughput(by_batch), figures.pairings.over_batch(by_batch),
    ]  # fmt: skip
    for figure in drawn:
        assert title(figure)
        assert figure.axes[0].has_data()
    assert not plt.get_fignums()


def sweep(*speedups: tuple[float, float, float]) -> pd.DataFrame:
    batches = [2**i for i in range(len(speedups))]
    rows = [
        {"batch": b, "speedup": v, "low": lo, "high": hi, "tok_s": 100 * v * b,
         "plain_tok_s": 100 * b, "rate": 0.5, "length": 2.0}
        for b, (v, lo, hi) in zip(batches, speedups, strict=True)
    ]  # fmt: skip
    return summaries.judged(pd.DataFrame(rows))


@pytest.mark.parametrize(
    ("speedups", "claim"),
    [
        ([(2, 1.9, 2.1), (1.2, 1.1, 1.3), (0.8, 0.7, 0.9)], "stops paying between batch 2 and 4"),
        ([(2, 1.9, 2.1), (1.0, 0.9, 1.1), (0.8, 0.7, 0.9)], "stops paying between batch 1 and 4"),
        ([(2, 1.9, 2.1), (1.2, 1.1, 1.3)], "Pays at every batch size tried"),
        ([(0.9, 0.8, 0.95), (0.5, 0.4, 0.6)], "Pays at no batch size tried"),
        (
            [(1.1, 0.9, 1.3), (0.9, 0.8, 1.1)],
            "1.10x [0.90, 1.30] at batch 1, 0.90x [0.80, 1.10] at batch 2",
        ),
    ],
)
def test_crossing_is_claimed_only_by_intervals(speedups, claim):
    assert claim in figures.pairings.crossing(sweep(*speedups))
    assert claim in title(figures.pairings.over_batch(sweep(*speedups)))


@pytest.mark.parametrize("speedup", [(2, 1.9, 2.1), (1, 0.9, 1.1), (0.9, 0.8, 0.95)])
def test_crossing_names_a_single_batch_once(speedup):
    assert figures.pairings.crossing(sweep(speedup)).count("at batch 1") == 1


def test_throughput_of_a_single_batch_is_not_compared_with_itself():
    words = title(figures.pairings.throughput(sweep((2, 1.9, 2.1))))
    assert words == "Batch 1: 100 tokens/s in plain decoding, 200 with speculation"


def test_temperatures_close_together_can_be_read(pairing):
    rules = [pairing.with_(rule=rule, temperature=1.0) for rule in ("reject", "block", "match")]
    samples = one_pairing.acceptance(rules, PROMPTS, 8, [0.0, 0.1, 0.25, 0.5, 2.0])
    axes = figures.pairings.over_temperature(samples).axes[0]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0", "0.5", "2"]
    warm = figures.pairings.by_temperature(samples[samples["temperature"] == 0.5])
    assert title(warm).count("at temperature 0.5") == 1
    assert " at 0.5" not in title(warm)


@pytest.mark.parametrize("many", [[1], range(1, 17), [1, 2, 3, 4, 6, 8, 12, 192, 256]])
def test_numbers_at_an_axis_can_be_read_and_its_ends_are_among_them(many):
    batches = sweep(*[(2, 1.9, 2.1)] * len(many)).assign(batch=many)
    by_gamma = arms(*[(2, 1.9, 2.1)] * len(many)).assign(gamma=many)
    predicted = pd.DataFrame({"gamma": many, "speedup": 2.0, "tokens": 2.0})
    costs = pd.DataFrame({"gamma": [0, *many], "draft_s": 1.0, "verify_s": 1.0, "rest_s": 0.0})
    for figure in (
        figures.pairings.throughput(batches), figures.pairings.over_gamma(by_gamma, predicted),
        figures.lesson.together(costs, predicted, by_gamma),
    ):  # fmt: skip
        numbers = [text.get_text() for text in figure.axes[-1].get_xticklabels()]
        assert {f"{min(many)}", f"{max(many)}"} <= {*numbers}


def test_few_lines_are_drawn_in_a_panel():
    """With their intervals, thirteen could not be told apart."""
    record = Acceptance(drafted=6, emitted=5, cut=0, histogram=(0, 1, 1, 0))
    names = [f"drafter {n}" for n in range(13)]
    rows = [{"pairing": n, "gamma": 3, "question_id": q, "accepted": 3, "drafted": 6, "passes": 2,
             "record": record} for n in names for q in range(2)]  # fmt: skip
    figure = figures.pairings.by_position(pd.DataFrame(rows))
    drawn = [[bars.get_label() for bars in axes.containers] for axes in figure.axes]
    assert all(len(labels) <= 6 for labels in drawn)
    for side in (drawn[::2], drawn[1::2]):
        assert [label for labels in side for label in labels] == names


def test_intervals_of_two_lines_do_not_hide_each_other():
    by_batch = sweep((2, 1.9, 2.1), (1.2, 1.1, 1.3)).assign(doubt="")
    served = by_batch.rename(columns={"batch": "load"})
    static, loops = figures.pairings.over_batch(by_batch, served).axes[0].containers
    assert static.get_label() == "static batch, interval over prompts"
    assert loops.get_label() == "continuous batching, interval over turns"
    assert not {*static.lines[0].get_xdata()} & {*loops.lines[0].get_xdata()}


def test_an_interval_that_is_very_wide_leaves_room_for_the_points():
    busy = sweep((1.5, 0.1, 25), (1.2, 1.1, 1.3)).assign(doubt="")
    [axes] = figures.pairings.over_batch(busy).axes
    assert axes.get_ylim() == (0, pytest.approx(2.2 * 1.5))
    loops = busy.rename(columns={"batch": "load"}).assign(speedup=[3, 2])
    [axes] = figures.pairings.over_batch(busy, loops).axes
    assert axes.get_ylim() == (0, pytest.approx(2.2 * 3)), "that of both lines"


def test_words_of_kinds_of_text_are_not_broken():
    kinds = ["summarization", "retrieval_qa", *(f"kind {n}" for n in range(9))]
    figure = figures.pairings.by_category(acceptances(dict.fromkeys(kinds, 0.5), 2))
    assert {text.get_text() for text in figure.axes[0].get_xticklabels()} == {*kinds}


def test_dollar_signs_in_names_are_no_formula(tmp_path):
    figures.pairings.by_category(acceptances({"from $x_$ on": 0.5}, 2)).savefig(tmp_path / "kinds")
    table = arms((1.5, 1.4, 1.6)).assign(arm="my$^$model")
    figures.pairings.forest(table).savefig(tmp_path / "arms")


def test_a_drafter_of_a_long_name_leads():
    table = arms((1.5, 1.4, 1.6), (1.2, 1.1, 1.3)).assign(arm=["a-draft-model-of-" * 2, "ngram"])
    lead = pd.DataFrame({"arm": ["ngram"], "times": [1.25], "low": [1.2], "high": [1.3]})
    label = figures.pairings.forest(table, lead).axes[1].get_xlabel()
    assert label.replace("\n", " ").endswith("over each, paired by prompt")


def test_reject_alone_is_compared_with_nothing(pairing):
    alone = pairing.with_(rule="reject", temperature=1.0)
    samples = one_pairing.acceptance([alone], PROMPTS, 8, [1.0])
    gains = summaries.gains(samples, over="reject").round(3)
    assert gains.empty
    assert list(gains) == ["rule", "gain", "low", "high"]
    [text] = figures.pairings.over_temperature(samples).axes[0].texts
    assert text.get_text().startswith("Only reject was measured")
    bias = {"reject": one_pairing.bias(alone, PROMPTS, 8)}
    figure = figures.pairings.bias_and_length(summaries.length_and_bias(samples, bias))
    assert title(figure) == "Every rule here keeps the target's distribution"


def test_round_costs_state_a_plain_step_of_microseconds():
    costs = pd.DataFrame({"gamma": [0, 2], "draft_s": 0.0, "verify_s": 3e-5, "rest_s": 0.0})
    [axes] = figures.pairings.round_costs(costs).axes
    assert axes.get_xlabel() == "plain steps (of 0.03 ms)"


def arms(*speedups: tuple[float, float, float]) -> pd.DataFrame:
    table = pd.DataFrame(speedups, columns=["speedup", "low", "high"])
    table["arm"] = [f"arm {n}" for n in range(len(table))]
    promised = table["speedup"].max()
    return summaries.judged(table.assign(tok_s=1.0, plain_tok_s=1.0, promised=promised, length=2.0))


@pytest.mark.parametrize(
    ("speedups", "words"),
    [
        ([(1.5, 1.4, 1.6), (1.2, 1.1, 1.3)], "arm 0: 1.50x [1.40, 1.60]: faster"),
        ([(1.5, 1.25, 1.6), (1.2, 1.1, 1.3)], "2 of 2 are certainly faster than plain decoding"),
        ([(1.5, 0.9, 1.6), (1.2, 0.8, 1.3)], "None is certainly faster than plain decoding"),
        ([(0.7, 0.6, 0.8), (0.65, 0.5, 0.75)], "All are slower than plain decoding"),
        ([(0.73, 0.7, 0.8), (0.5, 0.4, 0.6)], "All are slower than plain decoding"),
        ([(1.5, 1.25, 1.6), (1.2, 0.9, 1.3)], "1 of 2 is certainly faster than plain decoding"),
    ],
)
def test_winner_is_named_only_above_all_other_intervals(speedups, words):
    assert words in title(figures.pairings.forest(arms(*speedups)))


def test_forest_is_sorted_and_paired_differences_decide():
    table = arms((1.2, 1.1, 1.3), (1.5, 1.25, 1.6))
    lead = pd.DataFrame({"arm": ["arm 0"], "times": [1.25], "low": [1.2], "high": [1.3]})
    figure = figures.pairings.forest(table, lead)
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["arm 1", "arm 0"]
    assert "arm 1: 1.50x [1.25, 1.60]: faster" in title(figure)
    assert "none is certainly" in title(figures.pairings.forest(table, lead.assign(low=0.9)))


@pytest.mark.parametrize(
    ("low", "high"),
    one_in(5, product((0.05, 0.3, 0.5, 0.6, 0.85, 0.99), (1.01, 1.2, 1.5, 2, 3.1, 4.4, 9, 45))),
)
def test_axis_of_a_forest_has_numbers_and_1_among_them(low, high):
    [axes] = figures.pairings.forest(arms((1.0, low, high))).axes
    start, end = axes.get_xlim()
    numbers = [
        float(t.get_text()) for t in axes.get_xticklabels() if start <= t.get_position()[0] <= end
    ]
    assert 1 in numbers
    assert 2 <= len(numbers) <= 9


def timed(seconds: dict[str, list[float]]) -> list[dict]:
    """For each arm the seconds of a token in each repeat, of 40 prompts; plain decoding takes two
    in the first repeat, and four in all others."""
    return [
        {"arm": arm, "question_id": q, "repeat": repeat, "s": s * (1 + q), "tokens": 10,
         "plain_s": (4.0 if repeat else 2.0) * (1 + q), "plain_tokens": 10}
        for arm, each in seconds.items() for repeat, s in enumerate(each) for q in range(40)
    ]  # fmt: skip


def test_the_fastest_arm_is_that_of_the_highest_speedup():
    """One arm remembers texts, so that only its first repeat counts, and then the machine became
    slower."""
    rows = timed({"once": [1.25], "thrice": [1.0, 2.0, 2.0]})
    assert summaries.lead_over_others(pd.DataFrame(rows))["arm"].tolist() == ["once"]


def test_lead_over_others_is_paired_by_prompt():
    rows = timed({"fast": [1.0], "slow": [1.5]})
    [row] = summaries.lead_over_others(pd.DataFrame(rows)).to_dict("records")
    assert row["arm"] == "slow"
    assert [row[c] for c in ("times", "low", "high")] == pytest.approx([1.5] * 3)
    alone = summaries.lead_over_others(pd.DataFrame(rows[:40]))
    assert alone.empty
    assert len(figures.pairings.forest(arms((1.2, 1.1, 1.3)), alone).axes) == 1


def acceptances(shares: dict[str, float], prompts: int) -> pd.DataFrame:
    return pd.DataFrame(
        {"pairing": "draft", "category": category, "question_id": f"{category}{n}",
         "accepted": round(1000 * share) + n % 2, "drafted": 1000, "passes": 250}
        for category, share in shares.items()
        for n in range(prompts)
    )  # fmt: skip


def test_kinds_of_text_are_ranked_only_where_intervals_are_apart():
    apart = figures.pairings.by_category(acceptances({"code": 0.9, "prose": 0.2}, 40))
    assert "certainly lower on prose than on code, 20% to 90%" in title(apart)
    assert "n = 40" in apart.axes[0].texts[0].get_text()
    assert not apart.axes[0].patches
    few = figures.pairings.by_category(acceptances({"code": 0.6, "prose": 0.5}, 2))
    assert "too few prompts to tell them apart" in title(few)
    turns = pd.concat([acceptances({"code": 0.6, "prose": 0.5}, 2).assign(turn=n) for n in (1, 2)])
    assert "too few conversations to tell them" in title(figures.pairings.by_category(turns))
    assert len(few.axes[0].patches) == 2  # hatched
    assert title(figures.pairings.by_category(acceptances({"own": 0.6}, 40))).endswith(": 60%")
    assert [t.get_text() for t in few.axes[0].texts] == ["60%\nn = 2", "50%\nn = 2"]


def test_a_kind_of_text_on_which_nothing_was_drafted_is_not_ranked():
    samples = acceptances({"code": 0.9, "records": 0.7, "prose": 0.0}, 40)
    nothing = samples["category"] == "prose"
    samples.loc[nothing, ["accepted", "drafted"]] = 0
    figure = figures.pairings.by_category(samples)
    assert "certainly lower on records than on code, 70% to 90%" in title(figure)
    assert len(figure.axes[0].patches) == 1  # hatched
    assert "0%\nno draft\nn = 40" in [text.get_text() for text in figure.axes[0].texts]
    assert title(figures.pairings.by_category(samples[nothing])).endswith("nothing was drafted")


def rules(**each: tuple[float, float]) -> pd.DataFrame:
    """(acceptance length, bias) of each rule, with intervals."""
    return pd.DataFrame(
        {"rule": rule, "length": length, "length_low": length - 0.5, "length_high": length + 0.5,
         "bias": bias, "bias_low": max(0.0, bias - 0.1), "bias_high": bias + 0.1}
        for rule, (length, bias) in each.items()
    )  # fmt: skip


def test_a_rule_is_lossy_by_its_kind_not_by_rounding():
    table = rules(reject=(2.0, 0), block=(2.1, 1e-9))
    assert "Every rule here keeps" in title(figures.pairings.bias_and_length(table))
    table.loc[1, "rule"] = "typical (lossy)"
    figure = figures.pairings.bias_and_length(table)
    assert "Largest bias: typical (lossy), total variation 0% [0, 10]" in title(figure)


def test_rules_without_a_bias_do_not_hide_each_other():
    figure = figures.pairings.bias_and_length(rules(reject=(2.0, 0), block=(2.0, 0)))
    for axes in figure.axes:
        assert sorted({line.get_ydata()[0] for line in axes.lines}) == [0, 1]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["reject", "block"]


@pytest.mark.parametrize("bias", [0.02, 0.14, 0.9])
def test_percentages_on_an_axis_are_those_of_its_ticks(bias):
    figure = figures.pairings.bias_and_length(rules(**{"typical (lossy)": (2.0, bias)}))
    figure.canvas.draw()
    [_, axes] = figure.axes
    shown = [label.get_text().replace("−", "-") for label in axes.get_xticklabels()]
    assert not any(label.endswith(".0%") for label in shown)
    assert [float(label.rstrip("%")) for label in shown] == pytest.approx(100 * axes.get_xticks())


def test_a_name_keeps_its_colour_and_symbol():
    whole = figures.style.marks(["plain", "one", "two", "three"])
    assert figures.style.marks(["three"]) == {"three": whole["three"]}
    assert len({(m["color"], m["marker"]) for m in whole.values()}) == 4


def test_a_title_ends_with_what_it_is_about():
    figures.style.subject("target with draft, 8 prompts")
    try:
        about = title(figures.pairings.forest(arms((1.5, 1.4, 1.6))))
    finally:
        figures.style.subject("")
    assert about.endswith(" target with draft, 8 prompts")


def test_gain_within_noise_is_not_called_faster():
    measured = arms((1.1, 0.9, 1.3)).assign(gamma=2)
    predicted = pd.DataFrame({"gamma": [2], "speedup": [1.2]})
    assert "no clear difference" in title(figures.pairings.over_gamma(measured, predicted))
    measured["low"] = 1.05
    assert "1.10x [1.05, 1.30]: faster" in title(figures.pairings.over_gamma(measured, predicted))
    slow = measured.assign(speedup=0.73, promised=0.73, low=0.7, high=0.8)
    predicted = predicted.assign(speedup=0.8)
    assert "At γ = 2: 0.73x [0.70, 0.80]: slower than plain decoding; predicted 0.80x" in (
        title(figures.pairings.over_gamma(slow, predicted))
    )


def test_timings_that_cannot_be_are_said():
    assert "not credible" in title(figures.pairings.forest(arms((2.5, 2.4, 2.6))))
    measured = arms((1.5, 1.4, 1.6)).assign(gamma=2)
    predicted = pd.DataFrame({"gamma": [2], "speedup": [4.6]})
    measured = summaries.judged(measured, predicted)
    assert "not credible" in title(figures.pairings.over_gamma(measured, predicted))
    costs = pd.DataFrame({"gamma": [0, 2], "draft_s": [0, 1], "verify_s": [1, 0.5], "rest_s": 0.0})
    assert "not credible" in title(figures.pairings.round_costs(costs))
    costs["verify_s"] = [1, 1.2]
    assert "busy" not in title(figures.pairings.round_costs(costs))
