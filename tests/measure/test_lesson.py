"""The lesson shows the engine's own rounds, and its tables the numbers of the theory."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import tiny

from specexp import api, theory
from specexp.drafters.lookup import Lookup
from specexp.drafters.suffix import Suffix
from specexp.errors import UserError
from specexp.measure import lesson
from specexp.measure.prompts import Prompt
from specexp.tree import Tree

TEXT = "def mean(values):"


@pytest.fixture(scope="module")
def pairing(tiny_folders):
    return api.load(*tiny_folders, gamma=3, temperature=1.0)


@pytest.fixture(scope="module")
def snapshots(pairing):
    return lesson.rounds(pairing, TEXT, 6)


@pytest.fixture(scope="module")
def position(snapshots):
    return lesson.pick_position(snapshots)


def test_rounds_by_hand_match_the_engine(pairing, snapshots):
    output = pairing.generate([TEXT], 24)
    steps = output.trace.steps()[:6]
    assert [snap.accepted for snap in snapshots] == [step.accepted for step in steps]
    assert [tuple(snap.draft) for snap in snapshots] == [step.draft for step in steps]
    emitted = [token for snap in snapshots for token in snap.emitted]
    assert emitted == output.tokens[0][: len(emitted)]
    last = snapshots[-1].context
    assert last == [*pairing.encode([TEXT])[0], *emitted][: len(last)]


def test_p_and_q_are_the_models_distributions(pairing, snapshots):
    models = (pairing.target, "p", [*range(4)]), (pairing.engine.drafter.lm, "q", [*range(3)])
    for lm, name, positions in models:
        for snap in snapshots[:2]:
            for i in positions:
                ids = lm.module.dummy_inputs["input_ids"].new_tensor(
                    [[*snap.context, *snap.draft[:i]]]
                )
                expected = lm.module(ids).logits[0, -1, : lm.vocab].double().softmax(-1)
                assert np.allclose(getattr(snap, name)[i], expected.detach(), atol=1e-5)


def test_a_token_that_was_looked_up_counts_as_drawn_from_a_certain_q(pairing):
    own = pairing.apart()
    behind = Lookup(Suffix(own.target.vocab), own.engine.drafter, 1)
    looked_up = own.with_(drafter=behind)
    snapshots = lesson.rounds(looked_up, 3 * TEXT, 8)
    most = [q.max() for snap in snapshots for q in snap.q]
    assert min(most) < 1 == max(most)
    assert np.allclose([q.sum() for snap in snapshots for q in snap.q], 1)
    table = lesson.outcomes(looked_up, snapshots)
    certain = table[(table["q"] == 1) & table["chance"].notna()]
    assert (certain["chance"] == certain["p"]).all()


def test_outcomes_have_chance_and_outcome_of_every_draft_token(snapshots, pairing):
    table = lesson.outcomes(pairing, snapshots)
    for (_, part), snap in zip(table.groupby("round"), snapshots, strict=True):
        drafted = part[part["q"].notna()].reset_index(drop=True)
        for i, token in enumerate(snap.draft):
            row = drafted.loc[i]
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


def test_overlap_residual_and_excess_add_up_to_p_and_q(pairing, position):
    table = lesson.overlap(pairing, position)
    alpha = theory.alpha_of(position.p, position.q)
    assert np.allclose(table["shared"] + table["residual"], table["p"])
    assert np.allclose(table["shared"] + table["excess"], table["q"])
    assert table["shared"].sum() == pytest.approx(alpha, abs=1e-5)
    assert table["residual"].sum() == pytest.approx(1 - alpha, abs=1e-5)
    assert table["id"].iloc[-1] == -1


def test_picked_position_overlaps_nearest_to_half(snapshots, position):
    alphas = [theory.alpha_of(snap.p[0], snap.q[0]) for snap in snapshots]
    alpha = theory.alpha_of(position.p, position.q)
    assert alpha == min(alphas, key=lambda a: abs(a - 0.5))


def test_first_tokens_follow_p_and_draft_tokens_follow_q(pairing, position):
    draws = lesson.first_tokens(pairing, position.context, 1500)
    assert len(draws) == 1500
    assert lesson.fit(draws["emitted"], position.p) > lesson.SIGNIFICANCE
    assert lesson.fit(draws["drafted"], position.q) > lesson.SIGNIFICANCE
    assert lesson.fit(draws["drafted"], position.p) < lesson.SIGNIFICANCE
    alpha = theory.alpha_of(position.p, position.q)
    assert draws["accepted"].mean() == pytest.approx(alpha, abs=0.06)
    accepted = draws[draws["accepted"]]
    assert (accepted["drafted"] == accepted["emitted"]).all()
    assert (draws[~draws["accepted"]].eval("drafted != emitted")).all()  # (p - q)+ is 0 there


@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3", "crossed", "early_exit"])
def test_first_tokens_reset_a_drafter_with_state(kind):
    """What it noted after another outcome would give it another q."""
    engine = tiny.engine(kind, Tree.chain(1), temperature=1.0, dtype=torch.float32)
    pairing = SimpleNamespace(
        engine=engine, with_=lambda **_: pairing, encode=lambda _: tiny.PROMPTS[1:2]
    )
    prompt = tuple(tiny.PROMPTS[1])
    position = lesson.pick_position(lesson.rounds(pairing, "", 3))
    assert tuple(tiny.PROMPTS[1]) == prompt, "the caller's prompt grew"
    draws = lesson.first_tokens(pairing, position.context, 1500)
    assert lesson.fit(draws["drafted"], position.q) > lesson.SIGNIFICANCE
    assert lesson.fit(draws["emitted"], position.p) > lesson.SIGNIFICANCE


def test_lesson_shows_no_round_of_a_text_that_the_drafter_does_not_read(pairing):
    own = pairing.apart()
    length = len(own.encode([TEXT])[0])
    own.engine.drafter.context = length + 3
    assert 1 <= len(lesson.rounds(own, TEXT, 6)) <= 3
    own.engine.drafter.context = length
    with pytest.raises(UserError, match="longer than draft reads: use another"):
        lesson.rounds(own, TEXT, 6)


def test_fit_counts_rare_tokens_together():
    p = np.array([0.5, 0.498, 0.001, 0.001])
    assert lesson.fit([0] * 50 + [1] * 50, p) > 0.9
    assert lesson.fit([0] * 90 + [1] * 10, p) < 1e-6
    assert lesson.fit([0] * 50 + [3] * 50, p) == pytest.approx(lesson.fit([0] * 50 + [1] * 50, p))
    assert lesson.fit([0] * 9, np.array([1.0, 0.0])) == 1
    peaked = np.array([0.999, 0.001])
    assert lesson.fit([0] * 1000 + [1] * 1000, peaked) < 1e-6
    assert lesson.fit([0] * 1999 + [1], peaked) > 0.1


def test_passes_leave_out_what_exceeds_the_context(pairing):
    passes = lesson.passes(pairing, [Prompt(1, "code", (TEXT,))], [4, 500])
    assert passes["tokens"].tolist() == [1, 4]
    assert passes["times"].iloc[0] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drafter": "ngram"}, "ngram does not: use a draft model"),
        ({"temperature": 0.0}, "use a temperature above 0"),
    ],
)
def test_lesson_refuses_greedy_and_unsampled_drafts(pairing, changes, message):
    lesson.insist(pairing)
    with pytest.raises(UserError, match=message) as raised:
        lesson.insist(pairing.with_(**changes))
    assert "\n" not in str(raised.value)
