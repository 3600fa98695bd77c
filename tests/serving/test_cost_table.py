"""The cost table: what it says at, between and beyond its points, and that it is kept whole."""

import itertools
import json
import math
import os
import re
import sys
import time
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from conftest import tiny_llama
from hypothesis import given
from hypothesis import strategies as st
from support.cost_tables import ABOUT, BATCHES, CONTEXTS, GAMMAS, LENGTHS, planted, rough

from specexp import api, theory
from specexp.commands import app
from specexp.drafters.model import DraftModel
from specexp.drafters.ngram import NGram
from specexp.drafters.null import Null
from specexp.engine import Engine
from specexp.errors import UserError
from specexp.measure import break_even, one_pairing
from specexp.measure.prompts import Prompt
from specexp.models.lm import LM
from specexp.policy import Fixed
from specexp.rules import Match
from specexp.sampling import Sampling
from specexp.serving import costs
from specexp.serving.costs import Costs, Fit
from specexp.trace import Acceptance
from specexp.tracking import runs
from specexp.tree import Tree

# --- reading -------------------------------------------------------------------------------------


def test_at_its_points_the_table_says_what_it_holds():
    table = rough()
    for i, b in enumerate(BATCHES):
        for j, g in enumerate(GAMMAS):
            for k, c in enumerate(CONTEXTS):
                assert table.verify_s(b, g + 1, c) == table.verify[i, j, k]
                assert table.draft_s(b, g, c) == table.draft[i, j, k]
    assert [table.prefill_s(n) for n in LENGTHS] == table.prefill.tolist()
    assert [table.catch_up_s(n) for n in LENGTHS] == table.catch_up.tolist()


@given(st.floats(1, 16), st.floats(1, 6), st.floats(64, 128))
def test_between_its_points_the_table_stays_between_their_values(batch, tokens, context):
    table = rough()
    found = table.verify_s(batch, tokens, context)
    assert table.verify.min() <= found <= table.verify.max()


@given(st.sampled_from(BATCHES[:-1]), st.sampled_from(CONTEXTS))
def test_halfway_between_two_points_is_their_mean(batch, context):
    table = rough()
    i, k = BATCHES.index(batch), CONTEXTS.index(context)
    middle = (batch + BATCHES[i + 1]) / 2
    mean = table.verify[i : i + 2, 0, k].mean()
    assert table.verify_s(middle, 1, context) == pytest.approx(mean)


@given(st.integers(0, 20), st.floats(16, 1e4), st.floats(16, 1e4))
def test_beyond_its_end_an_axis_goes_on_in_a_line_that_never_falls(seed, one, other):
    """Along each axis, whatever the slope between its last two points."""
    table = rough(seed)
    low, high = sorted((one, other))
    ways = [
        (lambda x: table.verify_s(x, 2, 64), table.verify[:, 1, 0], BATCHES),
        (lambda x: table.verify_s(4, x, 64), table.verify[2, :, 0], table.tokens),
        (lambda x: table.draft_s(4, 3, x * 8), table.draft[2, 2, :], [c / 8 for c in CONTEXTS]),
        (lambda x: table.prefill_s(x * 4), table.prefill, [n / 4 for n in LENGTHS]),
    ]
    for read, values, axis in ways:
        assert values[-1] <= read(low) <= read(high)
        slope = max(0.0, (values[-1] - values[-2]) / (axis[-1] - axis[-2]))
        assert read(high) == pytest.approx(values[-1] + slope * (high - axis[-1]))


def test_before_its_first_point_an_axis_is_what_it_is_there():
    table = rough()
    assert table.verify_s(1, 1, 1) == table.verify[0, 0, 0]
    assert table.verify_s(0, 1, 64) == table.verify[0, 0, 0]
    assert table.prefill_s(0) == table.prefill[0]


def test_an_axis_of_one_point_says_the_same_everywhere():
    table = rough()
    one = Costs(
        ABOUT, (4,), (1,), (64,), table.verify[2:3, :1, :1], (0,), table.draft[2:3, :1, :1],
        (16,), table.prefill[1:2], table.catch_up[1:2],
    )  # fmt: skip
    assert one.verify_s(99, 9, 999) == table.verify[2, 0, 0]
    assert one.prefill_s(999) == table.prefill[1]


def test_a_round_is_a_draft_and_a_pass_and_without_guesses_a_plain_step():
    table = rough()
    assert table.round_s(4, 3, 100) == table.draft_s(4, 3, 100) + table.verify_s(4, 4, 100)
    assert table.round_s(4, 0, 100) == table.step_s(4, 100) == table.verify_s(4, 1, 100)


@given(
    st.lists(st.floats(0, 1), max_size=6), st.integers(1, 5), st.integers(1, 40), st.floats(64, 500)
)
def test_the_speedup_is_theorys_with_the_times_of_this_load(kept, gamma, batch, context):
    table = planted()
    chain = [*kept, *[0.0] * gamma][:gamma]
    tokens = 1 + math.fsum(math.prod(chain[: i + 1]) for i in range(gamma))
    expected = tokens * table.step_s(batch, context) / table.round_s(batch, gamma, context)
    assert table.speedup(batch, gamma, kept, context) == pytest.approx(expected)
    assert table.speedup(batch, 0, kept, context) == 1


def test_guesses_that_are_not_made_are_paid_for_only_where_passes_are_as_wide_as_the_longest():
    """Rows of three guesses, of one and of none; the last one has no part in the round."""
    padded = planted()
    packed = replace(padded, about=ABOUT | {"passes": "native"})
    law = packed.fit()
    assert packed.plan_s([3, 1, 0, -1], 64) == pytest.approx(3 * 1e-3 + law.pass_s(7, 1, 64))
    assert packed.plan_s([0, 0, -1], 64) == pytest.approx(law.pass_s(2, 1, 64))
    assert padded.plan_s([3, 1, 0, -1], 64) == padded.round_s(4, 3, 64)
    for table in (padded, packed):
        assert table.plan_s([3, 3], 64) == table.round_s(2, 3, 64)
    by_row = np.array([[[1e-3 * g * b] * 2 for g in GAMMAS] for b in BATCHES])
    uneven = replace(packed, draft=by_row)
    assert uneven.plan_s([3, 1], 64) == pytest.approx(4 * 1e-3 + law.pass_s(6, 1, 64))


def test_free_drafts_and_flat_passes_reach_the_closed_form():
    table = planted(token=0, slot=0, draft=0)
    assert table.speedup(8, 5, [0.8] * 5, 64) == pytest.approx(theory.speedup(0.8, 5, 0))


# --- the fit -------------------------------------------------------------------------------------


@given(
    st.floats(1e-5, 1), st.one_of(st.just(0.0), st.floats(1e-6, 1e-2)),
    st.one_of(st.just(0.0), st.floats(1e-8, 1e-4)),
)  # fmt: skip
def test_the_fit_finds_planted_coefficients(floor, token, slot):
    table = planted(floor, token, slot)
    fit = table.fit()
    for b, n, c in ((1, 1, 64), (16, 6, 128), (4, 2, 64)):
        assert fit.pass_s(b, n, c) == pytest.approx(table.verify_s(b, n, c), rel=1e-6)
    scale = table.verify.max()
    assert fit.floor_s == pytest.approx(floor, rel=1e-5, abs=1e-9 * scale)
    assert fit.per_token_s == pytest.approx(token, rel=1e-4, abs=1e-9 * scale)
    assert fit.per_slot_s == pytest.approx(slot, rel=1e-4, abs=1e-9 * scale)
    assert fit.r2 == pytest.approx(1)


@given(st.integers(0, 50))
def test_no_coefficient_is_negative_and_disorder_is_not_explained(seed):
    fit = rough(seed).fit()
    assert min(fit.floor_s, fit.per_token_s, fit.per_slot_s) >= 0
    assert 0 <= fit.r2 < 0.9


def test_the_knee_is_where_tokens_cost_what_the_floor_does():
    fit = Fit(5e-3, 1e-4, 1e-6, 1.0)
    assert fit.pass_s(1, fit.knee(100), 100) == pytest.approx(2 * fit.floor_s)
    assert Fit(5e-3, 0.0, 0.0, 1.0).knee(100) == math.inf


# --- the file ------------------------------------------------------------------------------------


def test_a_saved_table_is_read_back_bit_for_bit(tmp_path):
    table = rough()
    table.save(tmp_path / "new folder" / "costs.json")
    again = Costs.load(tmp_path / "new folder" / "costs.json")
    for name in Costs.__annotations__:
        assert np.array_equal(getattr(again, name), getattr(table, name)), name
    assert [p.name for p in (tmp_path / "new folder").iterdir()] == ["costs.json"]


def damaged(**changes):
    return json.dumps(
        {n: v.tolist() if isinstance(v, np.ndarray) else v for n, v in vars(planted()).items()}
        | changes
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        damaged(more=1),
        damaged(verify=[[1.0]]),
        damaged(verify=None),
        damaged(batches=[1, 2, 2, 4, 8]),
        damaged(batches="many"),
        damaged(gammas=[1, 2, 3, 4]),
        damaged(prefill=[1e-3, 2e-3, float("nan")]),
        damaged(catch_up=[0.0, -1.0, 0.0]),
        damaged(prefill=[1e-3, 2e-3]),
    ],
)
def test_a_damaged_file_is_one_line_with_the_mend(tmp_path, text):
    file = tmp_path / "costs.json"
    file.write_text(text)
    with pytest.raises(UserError, match=r"holds no cost table.*delete it.*specexp profile") as e:
        Costs.load(file)
    assert "\n" not in str(e.value)


def test_a_missing_file_says_how_to_make_it(tmp_path):
    with pytest.raises(UserError, match="specexp profile"):
        Costs.load(tmp_path / "none.json")


def test_a_table_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="choose another place"):
        planted().save(tmp_path / "file" / "costs.json")


# --- measuring -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine():
    target, draft = LM(tiny_llama(0), "target"), LM(tiny_llama(1, layers=1), "draft")
    return Engine(target, DraftModel(draft, Sampling()), Fixed(Tree.chain(2)), rule=Match())


def test_measuring_gives_positive_times_for_every_setting(engine):
    seen = []
    table = costs.measure(
        engine, [[1, 2, 3], [4]], [4, 1, 2], [2, 1], [48, 32], repeats=3,
        watch=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert (table.batches, table.tokens, table.gammas) == ((1, 2, 4), (1, 2, 3), (0, 1, 2))
    assert table.contexts == (32, 48)
    assert table.lengths == (1, 2, 4, 8, 16, 32, 44)
    assert table.verify.shape == table.draft.shape == (3, 3, 2)
    assert table.prefill.shape == table.catch_up.shape == (7,)
    for times in (table.verify, table.prefill, table.catch_up, table.draft[:, 1:]):
        assert np.isfinite(times).all()
        assert (times > 0).all()
    assert seen == [(i, 12) for i in range(1, 13)]
    assert (table.about["target"], table.about["drafter"]) == ("target", "draft")
    assert table.about["parameters"] == engine.target.parameters
    assert json.loads(json.dumps(table.about)) == table.about


def test_passes_are_timed_with_every_guess_made(engine, monkeypatch):
    """A lookup that finds nothing, and a table of what finding something would cost."""
    seen, verify = [], LM.verify
    monkeypatch.setattr(
        LM, "verify", lambda lm, seqs, draft, taps: (seen.append(draft), verify(lm, seqs, draft))[1]
    )
    lookup = Engine(engine.target, NGram(), engine.policy)
    costs.measure(lookup, [list(range(20))], [2], [2], [24], repeats=1)
    assert min(int(draft.tokens.min()) for draft in seen) >= 0
    assert {draft.tokens.shape[1] for draft in seen} == {1, 3}


@pytest.fixture
def played(monkeypatch) -> list[tuple[int, int, int]]:
    """The rounds that are timed from now on: rows, slots and guesses of each."""
    found, whole = [], costs._round

    def spy(engine, seqs, tree):
        found.append((*seqs.tokens.shape, len(tree) - 1))
        return whole(engine, seqs, tree)

    monkeypatch.setattr(costs, "_round", spy)
    return found


def test_every_setting_is_timed_as_often_forwards_and_backwards(engine, played, monkeypatch):
    """Warm-ups either way and `repeats` rounds each, those of a kind together; the buffers are what
    the contexts say."""
    monkeypatch.setattr(costs, "FULL", 2)
    costs.measure(engine, [[1, 2, 3]], [1, 2], [2], [16, 24], repeats=2)
    settings = {(b, s, g) for b in (1, 2) for s in (16, 24) for g in (0, 2)}
    assert set(played) == settings
    lead = {0: costs.CALM, 2: costs.LEAD}
    assert min(lead.values()) > engine.warm
    assert all(played.count((b, s, g)) == 2 * (lead[g] + 2 // b) for b, s, g in settings)
    first = [(1, 16, 0)] * (lead[0] + 2) + [(1, 16, 2)] * (lead[2] + 2)
    assert played[: len(first)] == first
    assert played == played[::-1]


def test_draft_lengths_take_turns_where_a_setting_is_timed_often(engine, played, monkeypatch):
    monkeypatch.setattr(costs, "FULL", 5)
    monkeypatch.setattr(costs, "BLOCK", 3)
    costs.measure(engine, [[1, 2, 3]], [1], [2], [16], repeats=1)
    calm, lead = costs.CALM, costs.LEAD
    guesses = [gamma for _, _, gamma in played]
    assert guesses == [0] * (calm + 3) + [2] * (lead + 3) + [2] * (lead + 2) + [0] * (calm + 2)


def test_a_plain_engine_can_be_measured(engine):
    table = costs.measure(engine.plain(), [[1, 2]], [1], [0], [16], repeats=1)
    assert table.gammas == (0,)
    assert table.verify_s(1, 1, 16) > 0
    assert isinstance(engine.plain().drafter, Null)


@pytest.mark.parametrize(
    ("ids", "batches", "gammas", "contexts", "repeats", "said"),
    [
        ([[1]], [0], [1], [16], 1, "batch is 0"),
        ([[1]], [], [1], [16], 1, "batch is missing"),
        ([[1]], [1], [-1], [16], 1, "gamma is -1"),
        ([[1]], [1], [4], [7], 1, "context is 7; to measure costs it must be 8"),
        ([[1]], [1], [1], [999], 1, "the 128 tokens that target serves; measure shorter ones$"),
        ([[1]], [1], [1], [16], 0, "repeats is 0"),
        ([[]], [1], [1], [16], 1, "no prompt"),
    ],
)
def test_settings_that_fit_nothing_are_refused(
    engine, ids, batches, gammas, contexts, repeats, said
):
    with pytest.raises(UserError, match=said):
        costs.measure(engine, ids, batches, gammas, contexts, repeats)


def test_a_drafter_that_never_drafts_has_no_costs_of_drafting(engine):
    with pytest.raises(UserError, match="gamma 0 alone"):
        costs.measure(engine.plain(), [[1]], [1], [2], [16])


# --- the stored table of a pairing ---------------------------------------------------------------

PROMPTS = [Prompt(i, f"c{i % 2}", (f"def mean {i}",)) for i in range(5)]
SETTINGS = {"batches": [1, 2], "gammas": [1, 2], "contexts": [24], "repeats": 1}


@pytest.fixture(scope="module")
def pairing(tiny_folders):
    return api.build(tiny_folders[0], tiny_folders[1], gamma=2)


@pytest.fixture
def measured(store, monkeypatch):
    """How often something was really measured."""
    times, whole = [], costs.measure
    monkeypatch.setattr(costs, "measure", lambda *a: (times.append(a), whole(*a))[1])
    return times


def test_a_profile_is_measured_once_and_kept(pairing, measured, store):
    first = break_even.profile(pairing, **SETTINGS)
    again = break_even.profile(pairing, **SETTINGS)
    assert len(measured) == 1
    assert np.array_equal(first.verify, again.verify)
    assert first.about["drafter"] == pairing.drafter
    assert break_even.place(pairing).parent == store / "costs"
    assert re.fullmatch(r"[\w.-]+--[\w.-]+--[0-9a-f]{12}\.json", break_even.place(pairing).name)
    break_even.profile(pairing, **SETTINGS, force=True)
    assert len(measured) == 2


def test_fewer_points_are_served_from_what_is_kept_and_more_are_measured(pairing, measured):
    break_even.profile(pairing, **SETTINGS)
    break_even.profile(pairing, **SETTINGS | {"batches": [2], "gammas": [2]})
    assert len(measured) == 1
    more = break_even.profile(pairing, **SETTINGS | {"batches": [3], "gammas": [1]})
    assert (more.batches, more.gammas) == ((1, 2, 3), (0, 1))
    break_even.profile(pairing, **SETTINGS)
    assert len(measured) == 2, "what was kept is kept"


def test_a_table_reaches_as_far_as_the_texts_it_is_for(pairing, monkeypatch, store):
    asked = []
    monkeypatch.setattr(
        costs, "measure", lambda engine, ids, batches, gammas, contexts, *a: asked.append(contexts)
    )
    monkeypatch.setattr(break_even, "CONTEXTS", (16, 32))
    for longest in (0, 32, 33, 65, 1 << 20):
        with suppress(TypeError):
            break_even.profile(pairing, longest=longest)
    most = pairing.target.context
    assert [max(contexts) for contexts in asked] == [32, 32, 64, 128, most]
    assert all({16, 32} < {*contexts} for contexts in asked[2:])


def test_a_table_goes_no_deeper_than_asked_or_than_the_drafter_can(pairing, measured):
    break_even.profile(pairing, **SETTINGS)
    assert break_even.profile(pairing, **SETTINGS | {"gammas": [0, 1]}).gammas == (0, 1)
    deep = break_even.profile(replace(pairing, deepest=1), **SETTINGS)
    assert (deep.gammas, deep.tokens) == ((0, 1), (1, 2))
    assert len(measured) == 1
    with pytest.raises(UserError, match="drafts nothing"):
        break_even.profile(pairing.with_(drafter="null"))


def test_a_table_of_yesterday_is_told_of(pairing, measured, caplog):
    break_even.profile(pairing, **SETTINGS)
    break_even.profile(pairing, **SETTINGS)
    assert not caplog.records
    yesterday = time.time() - 24.4 * 3600
    os.utime(break_even.place(pairing), (yesterday, yesterday))
    break_even.profile(pairing, **SETTINGS)
    [line] = [record.getMessage() for record in caplog.records]
    assert "was measured 24 hours ago" in line
    assert str(break_even.place(pairing)) in line
    break_even.profile(pairing, **SETTINGS, force=True)
    assert len(caplog.records) == 1


def test_another_device_is_another_table(pairing, measured, monkeypatch):
    break_even.profile(pairing, **SETTINGS)
    here = break_even.place(pairing)
    whole = costs.fingerprint
    monkeypatch.setattr(costs, "fingerprint", lambda *a: whole(*a) | {"threads": 99})
    assert break_even.profile(pairing, **SETTINGS).about["threads"] == 99
    assert break_even.place(pairing) != here
    assert len(measured) == 2
    here.replace(break_even.place(pairing))  # a table of elsewhere in the place of this one
    break_even.profile(pairing, **SETTINGS)
    assert len(measured) == 3


def test_a_damaged_table_is_measured_again(pairing, measured):
    break_even.profile(pairing, **SETTINGS)
    break_even.place(pairing).write_text("{")
    break_even.profile(pairing, **SETTINGS)
    assert len(measured) == 2
    assert Costs.load(break_even.place(pairing)).batches == (1, 2)


def test_another_rule_or_drafter_is_another_table(pairing, store):
    others = [pairing, pairing.with_(rule="reject"), pairing.with_(drafter="ngram", rule="auto")]
    assert len({break_even.place(r) for r in others}) == 3


# --- break-even ----------------------------------------------------------------------------------


def accepted(*histograms):
    """A table like that of `bench.acceptance`: one row a prompt."""
    records = [
        Acceptance((len(h) - 1) * sum(h), sum((k + 1) * n for k, n in enumerate(h)), 0, h)
        for h in histograms
    ]
    return pd.DataFrame(
        {"accepted": [r.accepted for r in records], "passes": [r.passes for r in records],
         "drafted": [r.drafted for r in records], "record": records}
    )  # fmt: skip


SAMPLES = accepted((2, 3, 5, 0, 0, 10), (8, 1, 1, 0, 0, 2), (1, 1, 1, 1, 1, 4))


def test_tokens_of_a_round_are_those_of_its_first_guesses():
    assert (
        break_even.tokens_of_round(SAMPLES, 5).value == Acceptance.pooled(SAMPLES["record"]).length
    )
    assert break_even.tokens_of_round(SAMPLES, 1).value == pytest.approx(1 + 30 / 41)
    found = break_even.tokens_of_round(SAMPLES, 3)
    assert found.low < found.value < found.high


@given(st.floats(1.05, 5.9), st.integers(1, 5))
def test_the_break_even_batch_is_where_the_planted_law_says(tokens, gamma):
    """tokens (floor + b slope) = draft + floor + (gamma + 1) b slope, solved for b."""
    table, context = planted(), 64
    slope = table.fit().token_s(context)
    saved = (tokens - 1) * 5e-3 - gamma * 1e-3
    loss = (gamma + 1 - tokens) * slope
    exact = saved / loss if loss > 0 else math.inf
    expected = 0.0 if saved < loss else min(exact, 16.0) if loss > 0 else 16.0
    found = break_even.break_even_batch(table, gamma, tokens, context)
    assert found == pytest.approx(expected, rel=1e-6)


@given(st.integers(0, 50), st.lists(st.floats(1, 6), min_size=2, max_size=2))
def test_more_tokens_never_bring_the_break_even_batch_down(seed, tokens):
    """What lets the interval of the tokens be carried over; the table may be any."""
    fewer, more = sorted(tokens)
    one, other = (break_even.break_even_batch(rough(seed), 3, t, 100) for t in (fewer, more))
    assert one <= other


def test_the_line_has_the_interval_of_its_prompts():
    line = break_even.break_even_batches(planted(), SAMPLES, 64)
    assert list(line["gamma"]) == [1, 2, 3, 4, 5]
    assert (line["low"] <= line["batch"]).all()
    assert (line["batch"] <= line["high"]).all()
    assert (line["low"] < line["high"]).any()
    alike = break_even.break_even_batches(planted(), accepted(*[(1, 1, 1, 1, 1, 4)] * 3), 64)
    assert np.allclose(alike["low"], alike["high"])


@pytest.mark.parametrize(("batch", "gamma"), [(1, 1), (4, 3), (8, 5)])
def test_at_the_break_even_alpha_the_speedup_is_one(batch, gamma):
    table = planted()
    alpha = break_even.break_even_alpha(table, batch, gamma, 100)
    assert 0 < alpha < 1
    assert table.speedup(batch, gamma, [alpha] * gamma, 100) == pytest.approx(1)


def test_where_nothing_pays_the_break_even_alpha_is_one():
    assert break_even.break_even_alpha(planted(draft=1.0), 1, 3, 64) == 1
    assert break_even.break_even_batch(planted(draft=1.0), 3, 4.0, 64) == 0


def throughputs(table, factor):
    """A sweep whose speedups are `factor` times what the table says of its own acceptance."""
    rows = []
    for gamma, batch in itertools.product((1, 3), (2, 8)):
        kept = Acceptance.pooled(SAMPLES["record"])
        told = table.speedup(batch, gamma, kept.conditional, 128)
        for number, s in enumerate((0.9, 1.1)):
            rows.append(
                {"gamma": gamma, "batch": batch, "number": number, "context": 128}
                | {"s": s, "tokens": 10}
                | {"plain_s": factor * told * s, "plain_tokens": 10, "record": kept}
            )
    return pd.DataFrame(rows)


def test_a_table_that_is_right_predicts_what_is_measured():
    table = planted()
    assert (
        break_even.predicted_error(break_even.compare(table, SAMPLES, throughputs(table, 1.0)))
        < 1e-12
    )
    off = break_even.compare(table, SAMPLES, throughputs(table, 1.25))
    assert break_even.predicted_error(off) == pytest.approx(math.log(1.25))
    assert next(off.itertuples(index=False))[:3] == (1, 2, 128)


def test_a_sweep_and_the_tax_have_a_row_for_every_place(pairing):
    samples = break_even.sweep(pairing, PROMPTS, [1, 3], [1, 2], 6, repeats=2)
    assert len(samples) == 2 * (3 * 2 + 1 * 5)
    assert set(samples["gamma"]) == {1, 2}
    longest = max(len(pairing.encode([PROMPTS[i].text])[0]) for i in (0, 1, 2))
    assert samples[samples["batch"] == 3]["context"].iloc[0] == longest + 6 + 3
    taxes = break_even.tax(pairing, PROMPTS, [1, 2], 6, repeats=2)
    assert list(taxes["batch"]) == [1, 2]
    assert (taxes["low"] <= taxes["tax"]).all()
    assert (taxes["low"] >= -1).all()


def test_the_idle_drafter_is_taxed_and_drafts_nothing(pairing, monkeypatch):
    seen, whole = [], one_pairing.throughput
    monkeypatch.setattr(one_pairing, "throughput", lambda *a: seen.append(whole(*a)) or seen[-1])
    break_even.tax(pairing, PROMPTS, [2], 6, repeats=1)
    assert seen[0]["drafted"].sum() == 0
    assert seen[0]["pairing"].iloc[0] == pairing.drafter


def test_what_is_logged_is_finite_and_named(pairing):
    table, samples = planted(), throughputs(planted(), 1.1)
    taxes = pd.DataFrame({"batch": [2, 8], "tax": [0.1, 0.0]})
    compared = break_even.compare(table, SAMPLES, samples)
    metrics, series = break_even.metrics(table, SAMPLES, compared, taxes, 64)
    assert not runs.problems_of({"metrics": metrics, "series": series_of(series)})
    assert metrics["costs/floor_ms"] == pytest.approx(5)
    assert metrics["costs/per_token_us"] == pytest.approx(164)
    assert series["tax/at_batch"] == {2: 0.1, 8: 0.0}
    assert set(series["map/break_even_batch"]) == {1, 2, 3, 4, 5}


def series_of(series):
    return {n: v if isinstance(v, dict) else dict(enumerate(v)) for n, v in series.items()}


# --- figures and the command ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "table", [planted(), planted(draft=1.0), planted(token=0, slot=0), rough()]
)
def test_every_map_can_be_drawn(table, tmp_path):
    compared = break_even.compare(table, SAMPLES, throughputs(table, 1.1))
    figures = [
        break_even.cost_curves(table), break_even.break_even_alpha_map(table, [64]),
        break_even.break_even(table, SAMPLES, compared=compared),
        break_even.break_even(table, SAMPLES, [64]),
    ]  # fmt: skip
    for figure in figures:
        figure.savefig(tmp_path / "figure.png")
        assert figure.get_suptitle()
    assert [len(f.axes) for f in figures] == [2, 2, 3, 2]


@pytest.mark.parametrize("few", [planted().upto(1), replace(
    planted(), batches=(1,), verify=planted().verify[:1], draft=planted().draft[:1]
)])  # fmt: skip
def test_maps_of_one_draft_length_or_one_batch_can_be_drawn(few, tmp_path):
    for figure in break_even.break_even_alpha_map(few), break_even.break_even(few, SAMPLES):
        figure.savefig(tmp_path / "figure.png")


@pytest.mark.parametrize(("passes", "made"), [("native", 0.25), ("fused", 1.0)])
def test_guesses_that_are_not_made_are_not_paid_for_where_passes_pack(passes, made):
    table = planted()
    table = replace(table, about=table.about | {"passes": passes})
    spared = table.sparing(0.25)
    for gamma in GAMMAS:
        wanted = table.verify_s(4, 1 + made * gamma, 64)
        assert spared.verify_s(4, 1 + gamma, 64) == pytest.approx(wanted)
    assert np.array_equal(spared.draft, table.draft)


def test_the_share_of_guesses_made_is_of_all_that_were_asked_for():
    records = [Acceptance(6, 5, 0, (3, 1)), Acceptance(20, 9, 0, (0, 4))]
    samples = pd.DataFrame({"gamma": [3, 5], "record": records})
    assert one_pairing.made(samples) == 26 / (3 * 4 + 5 * 4)


def test_the_title_tells_where_it_pays():
    said = break_even.paying(planted(), SAMPLES, 64)
    assert "x predicted at batch 1 with γ = " in said
    assert "pays up to batch" in said
    assert "at no batch" in break_even.paying(planted(draft=1.0), SAMPLES, 64)


def test_a_disturbed_table_is_called_doubtful():
    assert "doubtful" not in break_even.in_words(planted().fit(), 64)
    assert "doubtful" in break_even.in_words(rough().fit(), 64)


def profile(monkeypatch, capsys, *args):
    monkeypatch.setattr(sys, "argv", ["specexp", "profile", *args])
    with pytest.raises(SystemExit) as stopped:
        app.main()
    out, err = capsys.readouterr()
    return stopped.value.code or 0, out, err


def test_the_command_measures_shows_and_keeps(store, tiny_folders, monkeypatch, capsys, tmp_path):
    pairing = ("--target", tiny_folders[0], "--drafter", tiny_folders[1])
    small = ("--batches", "1,2", "--contexts", "24", "--gamma-max", "2")
    code, out, err = profile(monkeypatch, capsys, *pairing, *small)
    assert code == 0, err
    assert "n=3" in out
    assert "tokens they cost as much" in out
    [kept] = (store / "costs").glob("*.json")
    assert kept.with_suffix(".png").stat().st_size > 0
    out_file = tmp_path / "new" / "table.json"
    _, out, _ = profile(monkeypatch, capsys, *pairing, *small, "--json", "--out", str(out_file))
    assert json.loads(out) == json.loads(kept.read_text()) == json.loads(out_file.read_text())
    assert out_file.with_suffix(".png").exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--batches", "1,x"), "give whole numbers such as"),
        (("--batches", "0"), "batch is 0"),
        (("--gamma-max", "-1"), "gamma is -1"),
        (("--contexts", "5"), "context is 5"),
        (("--drafter", "ngrm"), "did you mean"),
    ],
)
def test_bad_input_to_the_command_is_one_line(store, tiny_folders, monkeypatch, capsys, args, said):
    given = ("--target", tiny_folders[0], "--drafter", tiny_folders[1], *args)
    code, _, err = profile(monkeypatch, capsys, *given)
    assert code == 2
    assert said in err
    assert len(err.strip().splitlines()) == 1
