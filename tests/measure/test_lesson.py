"""The lesson shows the engine's own rounds, and its figures the numbers of the theory."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from support import tiny

from specexp import api, theory
from specexp.errors import UserError
from specexp.measure import lesson
from specexp.measure.prompts import Prompt
from specexp.tree import Tree

TEXT = "def mean(values):"


@pytest.fixture(scope="module")
def pairing(tiny_folders):
    return api.build(*tiny_folders, gamma=3, temperature=1.0)


@pytest.fixture(scope="module")
def found(pairing):
    return lesson.rounds(pairing, TEXT, 6)


@pytest.fixture(scope="module")
def place(found):
    return lesson.telling(found)


def words(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_the_rounds_by_hand_are_those_of_the_engine(pairing, found):
    made = pairing.generate([TEXT], 24)
    steps = made.trace.steps()[:6]
    assert [snap.accepted for snap in found] == [step.accepted for step in steps]
    assert [tuple(snap.guesses) for snap in found] == [step.guesses for step in steps]
    emitted = [token for snap in found for token in snap.emitted]
    assert emitted == made.tokens[0][: len(emitted)]
    assert found[-1].context == [*pairing.encode([TEXT])[0], *emitted][: len(found[-1].context)]


def test_p_and_q_are_the_distributions_of_the_two_models(pairing, found):
    models = (pairing.target, "p", [*range(4)]), (pairing.engine.drafter.lm, "q", [*range(3)])
    for lm, name, places in models:
        for snap in found[:2]:
            for i in places:
                ids = lm.module.dummy_inputs["input_ids"].new_tensor(
                    [[*snap.context, *snap.guesses[:i]]]
                )
                law = lm.module(ids).logits[0, -1, : lm.vocab].double().softmax(-1)
                assert np.allclose(getattr(snap, name)[i], law.detach(), atol=1e-5)


def test_every_guess_has_its_chance_and_nothing_is_judged_after_a_rejection(found, pairing):
    table = lesson.judged(pairing, found)
    for (_, part), snap in zip(table.groupby("round"), found, strict=True):
        guesses = part[part["q"].notna()].reset_index(drop=True)
        for i, token in enumerate(snap.guesses):
            row = guesses.loc[i]
            assert row["q"] == snap.q[i, token]
            if i > snap.accepted:
                assert row["outcome"] == "discarded"
                assert np.isnan([row["p"], row["chance"]]).all()
                continue
            assert row["outcome"] == ("accepted" if i < snap.accepted else "rejected")
            assert row["chance"] == min(1, snap.p[i, token] / snap.q[i, token])
        last = part.iloc[-1]
        assert last["outcome"] == ("bonus" if snap.accepted == 3 else "corrected")
        assert last["p"] == snap.p[snap.accepted, snap.emitted[-1]]
    assert {"accepted", "rejected", "discarded", "corrected"} <= set(table["outcome"])


def test_the_picture_of_rounds_has_a_cell_for_every_token_and_counts_them(pairing, found):
    table = lesson.judged(pairing, found)
    figure = lesson.by_hand(table)
    [axes] = figure.axes
    assert len(axes.patches) == len(table)
    kept, emitted = sum(s.accepted for s in found), sum(len(s.emitted) for s in found)
    said = f"{kept} of 18 guesses accepted: {emitted} tokens in 6 target passes"
    assert figure.get_suptitle() == said
    row = table[table["outcome"] == "rejected"].iloc[0]
    assert f"min(1, p/q) = {row['chance']:.2f}" in words(axes) or row["chance"] < 0.1


def test_the_parts_of_p_and_q_add_up(pairing, place):
    table, alpha = lesson.overlap(pairing, place), theory.alpha_of(place.p, place.q)
    assert np.allclose(table["shared"] + table["residual"], table["p"])
    assert np.allclose(table["shared"] + table["excess"], table["q"])
    assert table["shared"].sum() == pytest.approx(alpha, abs=1e-5)
    assert table["residual"].sum() == pytest.approx(1 - alpha, abs=1e-5)
    assert table["id"].iloc[-1] == -1
    [axes] = lesson.overlap_bars(table).axes
    assert f"= {alpha:.0%}" in axes.get_title(loc="left")


def test_the_position_is_where_guess_and_target_overlap_by_half(found, place):
    judged = [theory.alpha_of(snap.p[0], snap.q[0]) for snap in found]
    assert theory.alpha_of(place.p, place.q) == min(judged, key=lambda a: abs(a - 0.5))


def test_first_tokens_follow_p_guesses_follow_q_and_alpha_of_them_are_accepted(pairing, place):
    draws = lesson.first_tokens(pairing, place.context, 1500)
    assert len(draws) == 1500
    assert lesson.fit(draws["emitted"], place.p) > lesson.LEAST
    assert lesson.fit(draws["guess"], place.q) > lesson.LEAST
    assert lesson.fit(draws["guess"], place.p) < lesson.LEAST
    alpha = theory.alpha_of(place.p, place.q)
    assert draws["accepted"].mean() == pytest.approx(alpha, abs=0.06)
    kept = draws[draws["accepted"]]
    assert (kept["guess"] == kept["emitted"]).all()
    assert (draws[~draws["accepted"]].eval("guess != emitted")).all()  # (p - q)+ is 0 there
    [axes] = lesson.frequencies(draws, lesson.overlap(pairing, place), place.p).axes
    assert axes.get_title(loc="left").startswith("The tokens emitted follow p; the guesses do not")
    wrong = draws.assign(emitted=draws["guess"])
    [axes] = lesson.frequencies(wrong, lesson.overlap(pairing, place), place.p).axes
    assert "emitted do NOT follow p" in axes.get_title(loc="left")


@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3", "crossed", "early_exit"])
def test_a_drafter_that_remembers_its_last_round_begins_each_of_them_anew(kind):
    """What it noted after another outcome would give it another q."""
    made = tiny.engine(kind, Tree.chain(1), temperature=1.0, dtype=torch.float32)
    pairing = SimpleNamespace(
        engine=made, with_=lambda **_: pairing, encode=lambda _: tiny.PROMPTS[1:2]
    )
    prompt = tuple(tiny.PROMPTS[1])
    place = lesson.telling(lesson.rounds(pairing, "", 3))
    assert tuple(tiny.PROMPTS[1]) == prompt, "the caller's prompt grew"
    draws = lesson.first_tokens(pairing, place.context, 1500)
    assert lesson.fit(draws["guess"], place.q) > lesson.LEAST
    assert lesson.fit(draws["emitted"], place.p) > lesson.LEAST


def test_fit_counts_rare_tokens_together():
    p = np.array([0.5, 0.498, 0.001, 0.001])
    assert lesson.fit([0] * 50 + [1] * 50, p) > 0.9
    assert lesson.fit([0] * 90 + [1] * 10, p) < 1e-6
    assert lesson.fit([0] * 50 + [3] * 50, p) == pytest.approx(lesson.fit([0] * 50 + [1] * 50, p))
    assert lesson.fit([0] * 9, np.array([1.0, 0.0])) == 1


def test_the_figures_of_cost_and_speed_say_what_the_tables_say(pairing):
    passes = lesson.passes(pairing, [Prompt(1, "code", (TEXT,))], [4, 500])
    assert passes["tokens"].tolist() == [1, 4]  # 500 do not fit the context
    assert passes["times"].iloc[0] == 1

    passes = pd.DataFrame({"tokens": [1, 4, 16], "ms": [1.0, 1.5, 6.0], "times": [1.0, 1.5, 6.0]})
    passes = passes.assign(low=passes["times"], high=passes["times"])
    costs = pd.DataFrame({"gamma": [0, 2, 4], "draft_s": [0.0, 0.5, 1.0],
                          "verify_s": [1.0, 1.2, 1.5], "rest_s": 0.0})  # fmt: skip
    left, right = lesson.price(passes, costs).axes
    assert left.get_title(loc="left") == "A pass over 16 tokens: 6.0x the time of one"
    assert right.get_title(loc="left") == "A guess costs 0.25 plain steps"

    predicted = pd.DataFrame({"gamma": [0, 2, 4], "speedup": [1.0, 1.2, 0.9], "tokens": [1, 2, 2]})
    measured = pd.DataFrame({"gamma": [2, 4], "speedup": [1.3, 0.8], "low": [1.2, 0.7],
                             "high": [1.4, 0.9]})  # fmt: skip
    left, right = lesson.together(costs, predicted, measured).axes
    assert left.get_title(loc="left") == "Predicted to pay at γ = 2"
    assert right.get_title(loc="left") == "Best measured at γ = 2: 1.30x faster"

    by_batch = measured.rename(columns={"gamma": "batch"}).assign(batch=[1, 8])
    left, right = lesson.tension(passes, by_batch, 3).axes
    assert [said.strip() for said in words(left) if said] == ["batch 1: 1.5x"]  # 8 end at 32
    assert right.get_title(loc="left") == "1.30x at batch 1; stops paying between batch 1 and 8"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"drafter": "ngram"}, "ngram does not: use a draft model"),
        ({"temperature": 0.0}, "use a temperature above 0"),
    ],
)
def test_what_the_lesson_cannot_show_is_said_in_one_line(pairing, changes, said):
    lesson.insist(pairing)
    with pytest.raises(UserError, match=said) as raised:
        lesson.insist(pairing.with_(**changes))
    assert "\n" not in str(raised.value)
