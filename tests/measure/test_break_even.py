"""The stored cost table of a pairing, break-even batches and maps, and `specexp profile`."""

import itertools
import json
import math
import os
import re
import shutil
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import also
from hypothesis import given
from hypothesis import strategies as st
from support.cost_tables import planted, rough

from specexp import api, figures
from specexp.commands import app, bench
from specexp.errors import UserError
from specexp.measure import break_even, costs, one_pairing, summaries
from specexp.measure.prompts import Prompt
from specexp.serving.cost_table import Costs
from specexp.trace import Acceptance
from specexp.tracking import mlflow_view

# --- the stored table of a pairing ---------------------------------------------------------------

PROMPTS = [Prompt(i, f"c{i % 2}", (f"def mean {i}",)) for i in range(5)]
SETTINGS = {"batches": [1, 2], "gammas": [1, 2], "contexts": [24], "repeats": 1}


@pytest.fixture(scope="module")
def pairing(tiny_folders):
    return api.load(tiny_folders[0], tiny_folders[1], gamma=2)


@pytest.fixture
def measured(store, monkeypatch):
    """How often something was measured; each time differs."""
    times = []

    def measure(engine, ids, batches, gammas, contexts, repeats):
        times.append(repeats)
        axes = [tuple(sorted({*axis})) for axis in (batches, (0, *gammas), contexts)]
        seconds = np.random.default_rng(len(times)).uniform(1, 2, [*map(len, axes)])
        one, (batches, gammas, contexts) = np.ones(1), axes
        about = costs.about(engine)
        return Costs(about, batches, contexts, seconds, gammas, seconds, (1,), one, one)

    monkeypatch.setattr(costs, "measure", measure)
    return times


def test_profile_is_measured_once(pairing, measured, store):
    first = break_even.profile(pairing, **SETTINGS)
    again = break_even.profile(pairing, **SETTINGS)
    assert len(measured) == 1
    assert np.array_equal(first.verify, again.verify)
    assert first.about["drafter"] == pairing.named
    assert break_even.table_path(pairing).parent == store / "costs"
    assert re.fullmatch(
        r"[\w.-]+--[\w.-]+--[0-9a-f]{12}\.json", break_even.table_path(pairing).name
    )
    break_even.profile(pairing, **SETTINGS, force=True)
    assert len(measured) == 2


def test_point_of_a_grid_measures_its_own_table(pairing, measured, store, monkeypatch, tmp_path):
    """No key names the stored one, which anything may have happened to."""
    stored = break_even.profile(pairing, **SETTINGS)
    wrong = replace(stored, verify=1000 * stored.verify)
    wrong.save(break_even.table_path(pairing))
    assert np.array_equal(break_even.profile(pairing, **SETTINGS).verify, wrong.verify)
    for attempt in (tmp_path / "1", tmp_path / "2"):
        monkeypatch.setenv("SPECEXP_ATTEMPT", str(attempt))
        own = [break_even.profile(pairing, **SETTINGS) for _ in range(2)]
        assert (own[0].verify < 500 * stored.verify).all()
        assert np.array_equal(own[0].verify, own[1].verify)
        assert np.array_equal(own[0].verify, Costs.load(break_even.table_path(pairing)).verify)
        assert break_even.table_path(pairing).parent == attempt / "costs"
    assert len(measured) == 3


def test_profile_measures_only_missing_points(pairing, measured):
    break_even.profile(pairing, **SETTINGS)
    break_even.profile(pairing, **SETTINGS | {"batches": [2], "gammas": [2]})
    assert len(measured) == 1
    more = break_even.profile(pairing, **SETTINGS | {"batches": [3], "gammas": [1]})
    assert (more.batches, more.gammas) == ((1, 2, 3), (0, 1))
    break_even.profile(pairing, **SETTINGS)
    assert len(measured) == 2, "what was kept is kept"


def test_profile_reaches_the_longest_text(pairing, monkeypatch, store):
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


def test_profile_depth_is_cut_to_request_and_drafter(pairing, measured):
    break_even.profile(pairing, **SETTINGS)
    assert break_even.profile(pairing, **SETTINGS | {"gammas": [0, 1]}).gammas == (0, 1)
    deep = break_even.profile(replace(pairing, deepest=1), **SETTINGS)
    assert (deep.gammas, deep.tokens) == ((0, 1), (1, 2))
    too_deep = SETTINGS | {"gammas": [2]}
    assert break_even.profile(replace(pairing, deepest=1), **too_deep).gammas == (0,)
    assert len(measured) == 1
    with pytest.raises(UserError, match="drafts nothing"):
        break_even.profile(pairing.with_(drafter="plain"))


def test_old_profile_is_warned_about(pairing, measured, caplog):
    break_even.profile(pairing, **SETTINGS)
    break_even.profile(pairing, **SETTINGS)
    assert not caplog.records
    yesterday = time.time() - 24.4 * 3600
    os.utime(break_even.table_path(pairing), (yesterday, yesterday))
    break_even.profile(pairing, **SETTINGS)
    [line] = [record.getMessage() for record in caplog.records]
    assert "was measured 24 hours ago" in line
    assert str(break_even.table_path(pairing)) in line
    break_even.profile(pairing, **SETTINGS, force=True)
    assert len(caplog.records) == 1


def test_profile_is_kept_by_device(pairing, measured, monkeypatch):
    break_even.profile(pairing, **SETTINGS)
    here = break_even.table_path(pairing)
    whole = costs.fingerprint
    monkeypatch.setattr(costs, "fingerprint", lambda *a: whole(*a) | {"threads": 99})
    assert break_even.profile(pairing, **SETTINGS).about["threads"] == 99
    assert break_even.table_path(pairing) != here
    assert len(measured) == 2
    here.replace(break_even.table_path(pairing))  # a table of elsewhere in the place of this one
    break_even.profile(pairing, **SETTINGS)
    assert len(measured) == 3


def test_profile_is_kept_by_sampling_and_processors(tiny_folders, tmp_path, store):
    """Each costs time in every round: a sort of the vocabulary, a pass over the text."""
    folder = Path(shutil.copytree(tiny_folders[0], tmp_path / "target"))
    told: tuple[dict, ...] = {}, {"repetition_penalty": 1.1}, {"bad_words_ids": [[5], [6, 7]]}
    cuts = {}, {"top_k": 9}, {"top_p": 0.5}, {"min_p": 0.1}
    paths, each = [], [*((settings, {}) for settings in told), *(({}, cut) for cut in cuts[1:])]
    for settings, cut in each:
        (folder / "generation_config.json").write_text(json.dumps(settings))
        pairing = api.load(str(folder), "ngram", 2, temperature=1.0, **cut)
        paths.append(break_even.table_path(pairing))
        assert break_even.table_path(pairing) == paths[-1], "the same from call to call"
        assert json.loads(json.dumps(break_even.about(pairing))) == break_even.about(pairing)
    assert len(set(paths)) == len(each)


def test_damaged_profile_is_measured_again(pairing, measured):
    break_even.profile(pairing, **SETTINGS)
    break_even.table_path(pairing).write_text("{")
    break_even.profile(pairing, **SETTINGS)
    assert len(measured) == 2
    assert Costs.load(break_even.table_path(pairing)).batches == (1, 2)


def test_profile_is_kept_by_rule_and_drafter(pairing, store):
    others = [pairing, pairing.with_(rule="reject"), pairing.with_(drafter="ngram", rule="auto")]
    assert len({break_even.table_path(r) for r in others}) == 3


# --- break-even ----------------------------------------------------------------------------------


def accepted(*histograms):
    """A table like that of `one_pairing.acceptance`: one row a prompt."""
    records = [
        Acceptance((len(h) - 1) * sum(h), sum((k + 1) * n for k, n in enumerate(h)), 0, h)
        for h in histograms
    ]
    return pd.DataFrame(
        {"accepted": [r.accepted for r in records], "passes": [r.passes for r in records],
         "drafted": [r.drafted for r in records], "record": records,
         "question_id": range(len(records)), "gamma": len(histograms[0]) - 1}
    )  # fmt: skip


SAMPLES = accepted((2, 3, 5, 0, 0, 10), (8, 1, 1, 0, 0, 2), (1, 1, 1, 1, 1, 4))


def test_tokens_of_a_round_count_first_draft_tokens():
    assert break_even.round_tokens(SAMPLES, 5).value == Acceptance.pooled(SAMPLES["record"]).length
    assert break_even.round_tokens(SAMPLES, 1).value == pytest.approx(1 + 30 / 41)
    found = break_even.round_tokens(SAMPLES, 3)
    assert found.low < found.value < found.high


def test_no_round_yields_more_tokens_than_gamma_allows():
    for gamma in (1, 3, 5):
        value, _, high, _ = break_even.round_tokens(SAMPLES, gamma)
        assert value < high <= gamma + 1


@pytest.mark.parametrize("gamma", [1, 2])
def test_tokens_of_a_round_have_the_interval_of_every_acceptance_length(gamma):
    """Where no token was accepted, the next may be."""
    none = accepted((5, 0, 0), (4, 0, 0), (6, 0, 0))
    tokens = break_even.round_tokens(none, gamma)
    assert (tokens.low, tokens.value) == (1, 1)
    assert tokens.high == summaries.length(none).high > 1


def test_predictions_are_of_the_draft_tokens_that_were_made_and_the_table_of_all():
    """Of a lookup that drafts fewer: the table's own costs stay what they are."""
    table = planted(token=1e-3)
    table = replace(table, about=table.about | {"passes": "native"})
    records = [replace(r, drafted=r.drafted * 3 // 5) for r in SAMPLES["record"]]
    fewer, taxes = SAMPLES.assign(record=records), pd.DataFrame({"batch": [2], "tax": [0.1]})
    shared = table.at_drafted_share(summaries.drafted_share(fewer))
    compared = break_even.compare(table, fewer, throughputs(shared, 1.0))
    assert break_even.predicted_error(compared) < 1e-12
    pd.testing.assert_frame_equal(
        break_even.break_even_batches(table, fewer, 64),
        break_even.break_even_batches(shared, SAMPLES, 64),
    )
    drawn = figures.break_even.speedup_map(table, fewer, compared=compared).axes[0].texts[0]
    usual = Acceptance.pooled(records).conditional
    assert drawn.get_text() == f"{shared.speedup(1, 1, usual, 64):.2f}x"
    assert f"{shared.speedup(1, 1, usual, 64):.2f}" != f"{table.speedup(1, 1, usual, 64):.2f}"
    metrics, _ = break_even.metrics(table, fewer, compared, taxes, 64)
    assert metrics["costs/per_token_us"] == pytest.approx(1064)


@given(st.floats(1.05, 5.9), st.integers(1, 5))
def test_break_even_batch_matches_planted_costs(tokens, gamma):
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
def test_break_even_batch_rises_with_tokens(seed, tokens):
    """What lets the interval of the tokens be carried over; the table may be any."""
    fewer, more = sorted(tokens)
    one, other = (break_even.break_even_batch(rough(seed), 3, t, 100) for t in (fewer, more))
    assert one <= other


def test_break_even_batches_have_intervals():
    line = break_even.break_even_batches(planted(), SAMPLES, 64)
    assert list(line["gamma"]) == [1, 3, 5], "those of the table"
    assert (line["low"] <= line["batch"]).all()
    assert (line["batch"] <= line["high"]).all()
    assert (line["low"] < line["high"]).any()
    alike = break_even.break_even_batches(planted(), accepted(*[(1, 1, 1, 1, 1, 4)] * 40), 64)
    assert np.allclose(alike["low"], alike["high"])


@pytest.mark.parametrize(("batch", "gamma"), [(1, 1), (4, 3), (8, 5)])
def test_speedup_at_break_even_alpha_is_one(batch, gamma):
    table = planted()
    alpha = break_even.break_even_alpha(table, batch, gamma, 100)
    assert 0 < alpha < 1
    assert table.speedup(batch, gamma, [alpha] * gamma, 100) == pytest.approx(1)


def test_break_even_alpha_is_one_where_nothing_pays():
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
                {"gamma": gamma, "batch": batch, "number": number, "repeat": 0, "context": 128}
                | {"question_id": number, "s": s, "tokens": 10, "passes": 10}
                | {"plain_s": factor * told * s, "plain_tokens": 10, "record": kept}
            )
    return pd.DataFrame(rows)


def test_compare_is_exact_for_a_true_table():
    table = planted()
    assert (
        break_even.predicted_error(break_even.compare(table, SAMPLES, throughputs(table, 1.0)))
        < 1e-12
    )
    off = break_even.compare(table, SAMPLES, throughputs(table, 1.25))
    assert break_even.predicted_error(off) == pytest.approx(math.log(1.25))
    assert next(off.itertuples(index=False))[:3] == (1, 2, 128)


def test_prediction_from_the_same_runs_counts_no_token_that_the_end_cut_off():
    table, kept = planted(), Acceptance.pooled(SAMPLES["record"])
    cut = replace(kept, emitted=kept.emitted - 20, cut=20)
    samples = throughputs(table, 1.0)
    whole, short = (
        break_even.compare(table, SAMPLES, samples.assign(record=[record] * len(samples)))
        for record in (kept, cut)
    )
    share = (short["predicted_own"] / whole["predicted_own"]).tolist()
    assert share == pytest.approx([cut.emitted / kept.emitted] * 4)


def test_measured_points_of_a_map_that_cannot_be_are_said():
    table, taxes = planted(), pd.DataFrame({"batch": [2, 8], "tax": [0.1, 0.0]})
    for factor, credible in ((1.1, 1), (3.5, 0), (0.3, 0)):
        compared = break_even.compare(table, SAMPLES, throughputs(table, factor))
        figure = figures.break_even.speedup_map(table, SAMPLES, compared=compared)
        assert ("not credible" in figure.get_suptitle()) != credible
        metrics, _ = break_even.metrics(table, SAMPLES, compared, taxes, 64)
        assert metrics["speedup/credible"] == credible


def test_sweep_and_tax_have_every_setting(pairing):
    samples = break_even.sweep(pairing, PROMPTS, [1, 3], [1, 2], 6, repeats=2)
    assert len(samples) == 2 * len(PROMPTS) * (2 + 3)
    assert set(samples["gamma"]) == {1, 2}
    longest = max(len(pairing.encode([PROMPTS[i].text])[0]) for i in (0, 1, 2))
    assert samples[samples["batch"] == 3]["context"].iloc[0] == longest + 6 + 3
    taxes = break_even.tax(pairing, PROMPTS, [1, 2], 6, repeats=2)
    assert list(taxes["batch"]) == [1, 2]
    assert (taxes["low"] <= taxes["tax"]).all()
    assert (taxes["low"] >= -1).all()


def test_tax_runs_an_idle_drafter(pairing, monkeypatch):
    seen, whole = [], one_pairing.throughput
    monkeypatch.setattr(one_pairing, "throughput", lambda *a: seen.append(whole(*a)) or seen[-1])
    break_even.tax(pairing, PROMPTS, [2], 6, repeats=1)
    assert seen[0]["drafted"].sum() == 0
    assert seen[0]["pairing"].iloc[0] == pairing.drafter


def test_logged_metrics_are_finite_and_named(pairing):
    table, samples = planted(), throughputs(planted(), 1.1)
    taxes = pd.DataFrame({"batch": [2, 8], "tax": [0.1, 0.0]})
    compared = break_even.compare(table, SAMPLES, samples)
    metrics, series = break_even.metrics(table, SAMPLES, compared, taxes, 64)
    assert not mlflow_view.problems_of({"metrics": metrics, "series": series_of(series)})
    assert metrics["costs/floor_ms"] == pytest.approx(5)
    assert metrics["costs/per_token_us"] == pytest.approx(164)
    assert series["tax/at_batch"] == {2: 0.1, 8: 0.0}
    assert set(series["map/break_even_batch"]) == {1, 3, 5}


def series_of(series):
    return {n: v if isinstance(v, dict) else dict(enumerate(v)) for n, v in series.items()}


# --- figures and the command ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "table", [rough(), *also(planted(), planted(draft=1.0), planted(token=0, slot=0))]
)
def test_maps_draw_any_table(table, tmp_path):
    compared = break_even.compare(table, SAMPLES, throughputs(table, 1.1))
    drawn = [
        figures.break_even.cost_curves(table), figures.break_even.alpha_map(table),
        figures.break_even.speedup_map(table, SAMPLES, compared=compared),
    ]  # fmt: skip
    for figure in drawn:
        figure.savefig(tmp_path / "figure.png")
        assert figure.get_suptitle()
    assert [len(f.axes) for f in drawn] == [2, 2, 2]


@pytest.mark.parametrize(("law", "said"), [
    ({}, "above about 30 in a pass, tokens cost more than the floor"),
    ({"floor": 1e-4, "slot": 0}, "above about 1 in a pass, tokens cost more than the floor"),
    ({"floor": 1e-5}, "tokens cost more than the floor in every pass"),
    *((law, "even 96 tokens in a pass, the most measured, cost less than the floor")
      for law in ({"token": 0, "slot": 0}, {"floor": 1.0})),
])  # fmt: skip
def test_title_of_costs_says_where_the_floor_ends(law, said):
    figure = figures.break_even.cost_curves(planted(**law))
    assert said in figure.get_suptitle().replace("\n", " ")


def test_floor_of_microseconds_is_not_said_to_be_none():
    left = figures.break_even.cost_curves(planted(floor=2e-5)).axes[0]
    assert left.get_title(loc="left").startswith("0.02 ms, the floor")


@pytest.mark.parametrize("few", [planted().upto(1), replace(
    planted(), batches=(1,), verify=planted().verify[:1], draft=planted().draft[:1]
)])  # fmt: skip
def test_maps_draw_one_gamma_or_one_batch(few, tmp_path, monkeypatch):
    monkeypatch.setattr(figures.style, "_subject", "a target with a drafter of a long name")
    compared = break_even.compare(few, SAMPLES, throughputs(few, 1.1))
    for figure in (
        figures.break_even.alpha_map(few), figures.break_even.speedup_map(few, SAMPLES, compared)
    ):  # fmt: skip
        figure.savefig(tmp_path / "figure.png")
        assert figure.get_figwidth() >= 6, "the title needs that much"
    last = len(few.batches) > 1
    assert ("and at batch" in figures.break_even.alpha_map(few).get_suptitle()) is last


def test_made_is_a_share_of_requested_tokens():
    records = [Acceptance(6, 5, 0, (3, 1)), Acceptance(20, 9, 0, (0, 4))]
    samples = pd.DataFrame({"gamma": [3, 5], "record": records})
    assert summaries.drafted_share(samples) == 26 / (3 * 4 + 5 * 4)


def test_title_says_where_it_pays():
    said = figures.break_even.paying(planted(), SAMPLES, 64)
    assert "x predicted at batch 1 with γ = " in said
    assert "pays up to batch" in said
    assert "at no batch" in figures.break_even.paying(planted(draft=1.0), SAMPLES, 64)


def test_every_cell_and_scale_of_the_maps_can_be_read():
    table = planted(draft=1.0)  # nothing pays
    figure = figures.break_even.alpha_map(table)
    assert "d: one draft token pays at no batch" in figure.get_suptitle().replace("\n", " ")
    axes, _ = figure.axes
    assert [text.get_text() for text in axes.texts] == ["never"] * (
        len(table.batches) * len(table.gammas[1:])
    )
    for axes in figures.break_even.cost_curves(planted()).axes:
        low, high = axes.get_ylim()
        ticks = zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
        shown = {tick: label.get_text() for tick, label in ticks if low <= tick <= high}
        assert len(shown) > 1
        assert all(float(text.replace("k", "e3")) == tick for tick, text in shown.items())


def test_disturbed_table_is_called_doubtful():
    assert "doubtful" not in figures.break_even.doubt(planted())
    assert "doubtful" in figures.break_even.paying(rough(), SAMPLES, 64)


def profile(monkeypatch, capsys, *args):
    monkeypatch.setattr(sys, "argv", ["specexp", "profile", *args])
    with pytest.raises(SystemExit) as stopped:
        app.main()
    out, err = capsys.readouterr()
    return stopped.value.code or 0, out, err


def test_profile_command_measures_shows_and_keeps(
    store, tiny_folders, monkeypatch, capsys, tmp_path
):
    pairing = ("--target", tiny_folders[0], "--drafter", tiny_folders[1])
    small = ("--batches", "1,2", "--contexts", "24", "--gamma-max", "2")
    busy = "specexp.measure.hardware.machine.doubts"
    monkeypatch.setattr(busy, lambda device: ["3 other programs run"])
    code, out, err = profile(monkeypatch, capsys, *pairing, *small)
    assert (code, err) == (0, "warning: 3 other programs run\n")
    assert "n=3" in out
    assert " ms, the floor, and " in " ".join(out.split())
    [kept] = (store / "costs").glob("*.json")
    assert kept.with_suffix(".png").stat().st_size > 0
    out_file = tmp_path / "new" / "table.json"
    _, out, _ = profile(monkeypatch, capsys, *pairing, *small, "--json", "--out", str(out_file))
    shown = json.loads(out)
    assert {"floor_s", "per_token_s", "knee", "r2"} <= shown.pop("fit").keys()
    assert shown == json.loads(kept.read_text()) == json.loads(out_file.read_text())
    assert out_file.with_suffix(".png").exists()


def test_costs_below_a_tenth_of_a_millisecond_are_shown(capsys):
    bench._show_costs(planted(floor=2e-5, token=1e-6, slot=0), 64)
    row = next(line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["1"])
    assert row.split()[1] == "0.021"


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
def test_profile_command_bad_input_is_one_line(
    store, tiny_folders, monkeypatch, capsys, args, said
):
    given = ("--target", tiny_folders[0], "--drafter", tiny_folders[1], *args)
    code, _, err = profile(monkeypatch, capsys, *given)
    assert code == 2
    assert said in err
    assert len(err.strip().splitlines()) == 1
