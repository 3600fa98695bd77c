"""The cost table: what it says at, between and beyond its points, and that it is kept whole."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cost_tables import ABOUT, BATCHES, CONTEXTS, GAMMAS, LENGTHS, planted, rough

from specexp import theory
from specexp.errors import UserError
from specexp.serving.cost_table import Costs, Fit

# --- reading -------------------------------------------------------------------------------------


def test_table_at_its_points_is_exact():
    table = rough()
    for i, b in enumerate(BATCHES):
        for j, g in enumerate(GAMMAS):
            for k, c in enumerate(CONTEXTS):
                assert table.verify_s(b, g + 1, c) == table.verify[i, j, k]
                assert table.draft_s(b, g, c) == table.draft[i, j, k]
    assert [table.prefill_s(n) for n in LENGTHS] == table.prefill.tolist()
    assert [table.catch_up_s(n) for n in LENGTHS] == table.catch_up.tolist()


@given(st.floats(1, 16), st.floats(1, 6), st.floats(64, 128))
def test_interpolation_stays_between_neighbours(batch, tokens, context):
    table = rough()
    found = table.verify_s(batch, tokens, context)
    assert table.verify.min() <= found <= table.verify.max()


@given(st.sampled_from(BATCHES[:-1]), st.sampled_from(CONTEXTS))
def test_interpolation_halfway_is_the_mean(batch, context):
    table = rough()
    i, k = BATCHES.index(batch), CONTEXTS.index(context)
    middle = (batch + BATCHES[i + 1]) / 2
    mean = table.verify[i : i + 2, 0, k].mean()
    assert table.verify_s(middle, 1, context) == pytest.approx(mean)


@given(st.integers(0, 20), st.floats(16, 1e4), st.floats(16, 1e4))
def test_extrapolation_is_linear_and_never_falls(seed, one, other):
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


def test_below_first_point_is_constant():
    table = rough()
    assert table.verify_s(1, 1, 1) == table.verify[0, 0, 0]
    assert table.verify_s(0, 1, 64) == table.verify[0, 0, 0]
    assert table.prefill_s(0) == table.prefill[0]


def test_axis_of_one_point_is_constant():
    table = rough()
    one = Costs(
        ABOUT, (4,), (64,), table.verify[2:3, :1, :1], (0,), table.draft[2:3, :1, :1],
        (16,), table.prefill[1:2], table.catch_up[1:2],
    )  # fmt: skip
    assert one.verify_s(99, 9, 999) == table.verify[2, 0, 0]
    assert one.prefill_s(999) == table.prefill[1]


def test_round_is_draft_plus_verify():
    table = rough()
    assert table.round_s(4, 3, 100) == table.draft_s(4, 3, 100) + table.verify_s(4, 4, 100)
    assert table.round_s(4, 0, 100) == table.step_s(4, 100) == table.verify_s(4, 1, 100)


@given(
    st.lists(st.floats(0, 1), max_size=6), st.integers(1, 5), st.integers(1, 40), st.floats(64, 500)
)
def test_speedup_matches_theory(kept, gamma, batch, context):
    table = planted()
    chain = [*kept, *[0.0] * gamma][:gamma]
    tokens = 1 + math.fsum(math.prod(chain[: i + 1]) for i in range(gamma))
    expected = tokens * table.step_s(batch, context) / table.round_s(batch, gamma, context)
    assert table.speedup(batch, gamma, kept, context) == pytest.approx(expected)
    assert table.speedup(batch, 0, kept, context) == 1


def test_plan_pays_for_padding_unless_passes_pack():
    """Rows of three draft tokens, of one and of none; the last one has no part in the round."""
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
    assert uneven.plan_s([3, 0], 64) == pytest.approx(3 * 1e-3 + law.pass_s(5, 1, 64))


def test_free_drafts_reach_the_closed_form():
    table = planted(token=0, slot=0, draft=0)
    assert table.speedup(8, 5, [0.8] * 5, 64) == pytest.approx(theory.speedup(0.8, 5, 0))


@pytest.mark.parametrize(("passes", "made"), [("native", 0.25), ("fused", 1.0)])
def test_sparing_scales_verify_where_passes_pack(passes, made):
    table = planted()
    table = replace(table, about=table.about | {"passes": passes})
    spared = table.at_drafted_share(0.25)
    for gamma in GAMMAS:
        wanted = table.verify_s(4, 1 + made * gamma, 64)
        assert spared.verify_s(4, 1 + gamma, 64) == pytest.approx(wanted)
    assert np.array_equal(spared.draft, table.draft)


# --- the fit -------------------------------------------------------------------------------------


@given(
    st.floats(1e-5, 1), st.one_of(st.just(0.0), st.floats(1e-6, 1e-2)),
    st.one_of(st.just(0.0), st.floats(1e-8, 1e-4)),
)  # fmt: skip
def test_fit_recovers_planted_coefficients(floor, token, slot):
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
def test_fit_of_noise_is_not_negative_nor_good(seed):
    fit = rough(seed).fit()
    assert min(fit.floor_s, fit.per_token_s, fit.per_slot_s) >= 0
    assert 0 <= fit.r2 < 0.9


def test_knee_is_where_tokens_cost_the_floor():
    fit = Fit(5e-3, 1e-4, 1e-6, 1.0)
    assert fit.pass_s(1, fit.knee(100), 100) == pytest.approx(2 * fit.floor_s)
    assert Fit(5e-3, 0.0, 0.0, 1.0).knee(100) == math.inf


# --- the file ------------------------------------------------------------------------------------


def test_saved_table_is_read_back_exactly(tmp_path):
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
def test_damaged_file_is_one_line_with_the_fix(tmp_path, text):
    file = tmp_path / "costs.json"
    file.write_text(text)
    with pytest.raises(UserError, match=r"holds no cost table.*delete it.*specexp profile") as e:
        Costs.load(file)
    assert "\n" not in str(e.value)


def test_fields_of_another_version_are_left_out(tmp_path):
    file = tmp_path / "costs.json"
    file.write_text(damaged(tokens=[1, 2, 4, 6]))
    assert Costs.load(file).tokens == (1, 2, 4, 6)


def test_missing_file_says_how_to_make_it(tmp_path):
    with pytest.raises(UserError, match="specexp profile"):
        Costs.load(tmp_path / "none.json")


def test_unwritable_path_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="choose another path"):
        planted().save(tmp_path / "file" / "costs.json")
