"""Serving figures agree with what is counted by hand; servers that race do the same work."""

import itertools
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from support.cost_tables import planted
from support.questions import LETTERS, PROMPTS
from support.served import ANSWERS, TICKS, answer, run_of, samples, tick
from support.simulated_loads import depths, load
from support.traces import write_csv

from specexp import figures
from specexp.errors import UserError
from specexp.measure import statistics, under_load
from specexp.measure.under_load import loops, served
from specexp.serving.requests import Request
from specexp.serving.sources import Source, serve

# --- what is reported ----------------------------------------------------------------------------


def test_request_times_count_from_arrival():
    table = served.request_table(ANSWERS)
    wanted = {
        "wait_s": [0.5, 0.125, 0.5, np.nan, 0.25],
        "ttft_s": [1.0, 0.25, 1.0, np.nan, 0.5],
        "tpot_s": [(3.5 - 2.0) / 4, np.nan, 0.0, np.nan, 0.0],
        "e2e_s": [2.5, 0.25, 1.0, np.nan, 0.5],
        "tokens": [5, 1, 4, 0, 2],
        "prompt": [3, 7, 3, 3, 3],
        "passes": [3, 0, 0, 0, 0],
        "drafted": [6, 0, 0, 0, 0],
        "accepted": [2, 0, 0, 0, 0],
    }
    for column, values in wanted.items():
        np.testing.assert_array_equal(table[column], values, column)
    assert list(table["kind"]) == ["code", "chat", "code", "code", "code"]
    assert list(table["state"]) == ["done", "done", "done", "refused", "failed"]


def test_gaps_are_between_deliveries_not_tokens():
    assert served.itl_s(ANSWERS).tolist() == [0.5, 1.0]
    assert served.itl_s(ANSWERS[1:]).tolist() == []


def test_quantiles_need_enough_samples():
    reported = {}
    for count in (59, 60, 661, 662):
        metrics = served.served_metrics([ANSWERS[0]] * count, TICKS, 1e4, 1e4)
        reported[count] = [q for q in served.QUANTILES if metrics[f"latency/ttft_p{q}_ms"] == 1000]
    assert reported == {59: [50], 60: [50, 95], 661: [50, 95], 662: [50, 95, 99]}
    assert figures.under_load.as_text("latency/ttft_p99_ms", float("nan")) == "-"


def test_served_metrics_match_count_by_hand(few):
    metrics = served.served_metrics(ANSWERS, TICKS, 1e4, 1e4)
    expected = {
        "throughput/tok_s": 10 / 4, "throughput/req_s": 3 / 4,
        "goodput/share": 3 / 5, "goodput/req_s": 3 / 4,
        "load/occupancy": 8 / 4, "load/speculated": 3 / 8, "load/refused": 1, "load/failed": 1,
        "load/overhead": 1 - 3.0 / 3.5, "served/rate": 4 / 8,
        "latency/ttft_p50_ms": 1000, "latency/ttft_p95_ms": 1000, "latency/ttft_p99_ms": 1000,
        "latency/tpot_p50_ms": 375 / 2, "latency/tpot_p95_ms": 375 * 0.95,
        "latency/tpot_p99_ms": 375 * 0.99,
        "latency/e2e_p50_ms": 1000, "latency/e2e_p95_ms": 1000 + 0.9 * 1500,
        "latency/e2e_p99_ms": 1000 + 0.98 * 1500,
        "latency/itl_p50_ms": 750, "latency/itl_p95_ms": 975, "latency/itl_p99_ms": 995,
    }  # fmt: skip
    assert metrics == pytest.approx(expected)


@pytest.mark.parametrize(
    ("ttft_ms", "tpot_ms", "within"),
    [(1000, 375, 3), (999, 375, 1), (1000, 374, 2), (250, 0, 1), (249, 375, 0)],
)
def test_goodput_limits_are_inclusive(ttft_ms, tpot_ms, within):
    """Requests done take 1000, 250, 1000 ms to begin and 375, -, 0 a token; of five that came."""
    metrics = served.served_metrics(ANSWERS, TICKS, ttft_ms, tpot_ms)
    assert metrics["goodput/share"] == within / 5
    assert metrics["goodput/req_s"] == within / 4


def test_served_metrics_of_nothing_served_are_nan():
    metrics = served.served_metrics([answer(1.0, state="refused")], [], 1, 1)
    assert (metrics["goodput/share"], metrics["load/refused"]) == (0, 1)
    assert np.isnan(metrics["latency/ttft_p50_ms"])
    assert np.isnan(metrics["load/overhead"])
    assert set(metrics) == set(served.served_metrics(ANSWERS, TICKS, 1, 1))


def test_timeline_bins_sum_shares_and_average_counts(monkeypatch):
    monkeypatch.setattr(served, "BINS", 3)
    table = under_load.timeline(
        [*TICKS[:2], tick(2.5, 3.0, live=5, rows=8, speculated=5), TICKS[2]]
    )
    assert table["end_s"].tolist() == [2.5, 5.0]
    assert table["live"].tolist() == [8 / 3, 3]
    assert table["waiting"].tolist() == [2, 0]
    assert table["speculated"].tolist() == [7 / 12, 1 / 4]
    assert table["kept"].tolist() == [1 / 3, 3 / 5]
    assert np.isnan(under_load.timeline(TICKS[1:2])["kept"][0])


def test_rates_are_pooled_over_turns():
    light = samples(plain=[(1, 10), (2, 12)], fast=[(1, 20), (1, 12)], slow=[(2, 10), (4, 12)])
    table = under_load.rates(pd.concat([light.assign(load=2), light.assign(load=8)])).set_index(
        ["load", "policy"]
    )
    assert len(table) == 6
    fast, slow = table.loc[8, "fast"], table.loc[2, "slow"]
    assert (fast["tok_s"], fast["speedup"]) == pytest.approx((16, 3 / 22 * 16))
    assert fast["low"] <= fast["speedup"] <= fast["high"]
    assert (slow["low"], slow["speedup"], slow["high"]) == pytest.approx((0.5, 0.5, 0.5))
    assert (fast["speculated"], fast["kept"], fast["overhead"]) == pytest.approx(
        (1 / 8, 1 / 8, 0.5)
    )
    assert table.loc[2, "plain"]["speedup"] == 1


def test_of_eight_policies_that_gain_nothing_hardly_any_is_called_faster():
    """Of each run the intervals alone: its table of rates would take ten times as long."""
    rng, alone, together = np.random.default_rng(0), 0, 0
    for _ in range(100):
        turns = {
            n: [(s, 10) for s in np.exp(rng.normal(0, 0.1, 10))] for n in ("plain", *"abcdefgh")
        }
        at = samples(**turns).assign(load=1)
        each = served._against(at, "plain")
        lows = [interval.low for interval in statistics.simultaneous(each).values()]
        alone += any(draws.interval.low > 1 for draws in each.values())
        together += max(lows) > 1
    assert alone >= 5
    assert together <= 3
    assert under_load.rates(at)["low"].tolist() == [1, *lows]


def test_regret_is_against_the_best_fixed_choice():
    """At 1 always:3 is the best of the fixed ones, at 9 plain is; goodput is never the measure."""
    few = samples(
        plain=[(1, 10)] * 3, **{"always:3": [(1, 20)] * 3, "goodput": [(1, 25)] * 3}
    ).assign(load=1)
    many = samples(
        plain=[(1, 80)] * 3, **{"always:3": [(1, 40)] * 3, "goodput": [(1, 76)] * 3}
    ).assign(load=9)
    table = under_load.regrets(pd.concat([few, many])).set_index(["load", "policy"])
    assert table["oracle"].groupby("load").agg(set).to_dict() == {1: {"always:3"}, 9: {"plain"}}
    wanted = {(1, "plain"): 0.5, (1, "always:3"): 0, (1, "goodput"): -0.25,
              (9, "plain"): 0, (9, "always:3"): 0.5, (9, "goodput"): 0.05}  # fmt: skip
    for column in ("regret", "low", "high"):
        assert table[column].to_dict() == pytest.approx(wanted)
    with pytest.raises(UserError, match="plain or always"):
        under_load.regrets(few[few["policy"] == "goodput"])


def test_of_policies_that_are_all_alike_hardly_one_is_said_to_lose_at_any_load():
    rng, names, losing = np.random.default_rng(1), ("plain", "always:1", "always:3", "goodput"), 0
    for _ in range(40):
        loads = [
            samples(**{n: [(s, 10) for s in np.exp(rng.normal(0, 0.05, 16))] for n in names})
            for _ in range(3)
        ]
        lost = under_load.regrets(pd.concat(at.assign(load=n) for n, at in enumerate(loads)))
        losing += (lost["low"] > 0).any()
    assert losing <= 3


def test_regret_interval_has_low_below_high():
    rng = np.random.default_rng(0)
    turns = samples(plain=[(1, 10)] * 9, goodput=[(1, n) for n in rng.integers(5, 10, 9)])
    mine = under_load.regrets(turns.assign(load=1)).set_index("policy").loc["goodput"]
    assert 0 < mine["low"] < mine["regret"] < mine["high"] < 1


def test_logged_metrics_are_the_policys_row(few):
    light = samples(plain=[(1, 10)] * 3, **{"always:3": [(1, 20)] * 3, "goodput": [(1, 25)] * 3})
    heavy = samples(plain=[(1, 80)] * 3, **{"always:3": [(1, 40)] * 3, "goodput": [(1, 76)] * 3})
    both = pd.concat([light.assign(load=1), heavy.assign(load=9)])
    table = under_load.by_policy(
        {"goodput": run_of(ANSWERS, TICKS), "plain": run_of(ANSWERS[1:2], TICKS)}, 1e4, 1e4
    )
    rated, lost = under_load.rates(both), under_load.regrets(both)
    metrics, series = under_load.metrics(rated, lost, table, "goodput")
    assert metrics == pytest.approx(served.served_metrics(ANSWERS, TICKS, 1e4, 1e4) | {
        "speedup/measured": 2.5, "speedup/ci_low": 2.5, "speedup/ci_high": 2.5,
        "speedup/at_largest_batch": 0.95, "speedup/credible": 1.0, "regret/worst": 0.05,
        "regret/worst_low": 0.05, "regret/worst_high": 0.05, "regret/mean": -0.1,
    })  # fmt: skip
    expected = {
        "speedup/at_batch": {1: 2.5, 9: 0.95}, "speedup/at_batch_low": {1: 2.5, 9: 0.95},
        "speedup/at_batch_high": {1: 2.5, 9: 0.95}, "throughput/at_batch": {1: 25, 9: 76},
        "load/speculated_at_batch": {1: 0.25, 9: 0.25}, "regret/at_batch": {1: -0.25, 9: 0.05},
    }  # fmt: skip
    for name, values in expected.items():
        assert series[name] == pytest.approx(values), name
    assert set(series) == set(expected)
    plain, _ = under_load.metrics(rated, lost, table, "plain")
    assert np.isfinite(list(plain.values())).all()  # it had one token: no time between tokens
    assert "latency/tpot_p50_ms" not in plain


def test_steps_table_keeps_order_by_policy():
    table = under_load.step_table({"plain": run_of([], TICKS), "goodput": run_of([], TICKS[:1])})
    assert table["policy"].tolist() == ["plain"] * 3 + ["goodput"]
    assert table["emitted"].tolist() == [2, 2, 9, 2]
    assert table["end_s"].tolist() == [2.0, 2.5, 5.0, 2.0]


# --- traffic -------------------------------------------------------------------------------------


def test_closed_loop_repeats_mixed_prompts():
    offered = under_load.traffic(LETTERS, PROMPTS, "closed:2", 5, 20)
    assert offered.concurrency == 2
    assert [r.kind for r in offered.requests] == ["code", "messy", "code", "code", "messy"]
    assert "".join(map(chr, offered.requests[3].prompt)) == "def mean(values):"
    assert [r.stream for r in offered.requests] == list(range(5))
    assert {(r.new, r.at_s) for r in offered.requests} == {(20, 0.0)}


def test_open_traffic_keeps_times_and_prompts():
    offered = under_load.traffic(LETTERS, PROMPTS, "poisson:4", 6, 20, seed=1)
    times = [r.at_s for r in offered.requests]
    assert offered.concurrency is None
    assert times == sorted(times)
    assert len(set(times)) == 6
    assert {r.new for r in offered.requests} == {20}
    assert all(r.prompt == s.prompt for r, s in zip(
        offered.requests, under_load.requests(LETTERS, PROMPTS, 6, 20), strict=True))  # fmt: skip
    assert offered == under_load.traffic(LETTERS, PROMPTS, "poisson:4", 6, 20, seed=1)
    assert offered != under_load.traffic(LETTERS, PROMPTS, "poisson:4", 6, 20, seed=2)


def test_trace_cuts_prompts_and_outputs(tmp_path):
    file = tmp_path / "trace.csv"
    write_csv(file, [(0.0, 4, 7), (0.5, 400, 3), (2.0, 1, 90)])
    offered = under_load.traffic(LETTERS, PROMPTS, f"trace:{file}", 9, 20)
    assert [r.at_s for r in offered.requests] == [0.0, 0.5, 2.0]
    assert ["".join(map(chr, r.prompt)) for r in offered.requests] == [
        "def ", "zz qq mean mean mean", "r"
    ]  # fmt: skip
    assert [r.new for r in offered.requests] == [7, 3, 20]
    assert loops.slots_for(offered.requests, 5) == 20 + 3 + 5


def test_overhead_is_the_mean_over_steps():
    one, two = SimpleNamespace(steps=[tick(1, 2, 0.9), tick(2, 4, 1.6)]), [tick(0, 1, 0.9)]
    runs = {"plain": one, "never": SimpleNamespace(steps=two)}
    assert loops.overhead_s(runs) == pytest.approx(0.2)


# --- real servers --------------------------------------------------------------------------------

NAMES = ["plain", "never", "always:1", "always:3", "threshold:2,2", "table:1=3,3=1,4=0", "bandit",
         "goodput"]  # fmt: skip


def texts(responses) -> dict[int, list[int]]:
    return {a.request.stream: a.tokens for a in responses if a.state == "done"}


def test_race_pairs_turns_and_outputs_agree(pairing):
    offered = under_load.requests(pairing, PROMPTS, 14, 10)
    table, runs = loops.closed_loop(pairing, NAMES, planted(), offered, 3, tokens=24, turns=2)
    turns = table.groupby("policy")["turn"].agg(list)
    assert set(turns.index) == set(NAMES)
    assert all(t == [0, 1] for t in turns)
    assert (table["tokens"] >= 24).all()
    assert (table[["s", "busy_s"]] > 0).all().all()
    assert (table["busy_s"] <= table["s"]).all()
    table = table.groupby("policy").sum()
    assert table.loc[["plain", "never"], ["drafted", "speculated"]].sum().sum() == 0
    assert (table.loc[["always:1", "always:3"], "drafted"] > 0).all()
    for run in runs.values():
        while sum(a.over for a in run.responses) < 14:
            run.advance()
        shared = texts(run.responses).keys() & texts(runs["plain"].responses).keys()
        assert len(shared) >= 12
        assert all(texts(run.responses)[i] == texts(runs["plain"].responses)[i] for i in shared)


def test_race_repeats_requests_until_turns_end(pairing):
    offered = under_load.requests(pairing, PROMPTS, 3, 4)
    table, runs = loops.closed_loop(
        pairing, ["plain", "always:1"], None, offered, 2, tokens=10, turns=3
    )
    assert sorted(table["turn"]) == [0, 0, 1, 1, 2, 2]
    assert len(runs["plain"].responses) > 3


def test_race_without_tokens_is_refused(pairing, monkeypatch):
    offered = [Request([1] * 9, 1 << 20)] * 3
    monkeypatch.setattr(loops, "slots_for", lambda offered, slack: 64)
    with pytest.raises(UserError, match=r"3 requests did not yield 10 tokens: plain: .* refused"):
        loops.closed_loop(pairing, ["plain"], None, offered, 2, tokens=10, turns=3)


def test_open_race_outputs_agree_between_policies(pairing, monkeypatch):
    monkeypatch.setattr(loops, "SLICE_S", 0.02)
    offered = under_load.traffic(pairing, PROMPTS, "poisson:200", 10, 10)
    runs = under_load.open_loop(pairing, NAMES, planted(), offered, rows=3)
    for run in runs.values():
        assert [a.request for a in run.responses] == list(offered.requests)
        assert [a.came_s for a in run.responses] == [r.at_s for r in offered.requests]
        assert all(a.begun_s >= a.came_s for a in run.responses)
        assert texts(run.responses) == texts(runs["plain"].responses)
        assert len(texts(run.responses)) == 10
    assert all(a.drafted == 0 for a in runs["plain"].responses)
    assert all(a.drafted > 0 for a in runs["always:3"].responses)
    replayed = offered.as_served(runs["plain"].responses[1:])
    lengths = [10, *(len(a.tokens) for a in runs["plain"].responses[1:])]
    assert [r.new for r in replayed.requests] == lengths
    assert [r.prompt for r in replayed.requests] == [r.prompt for r in offered.requests]


@pytest.mark.parametrize(
    ("rows", "streams", "batches"),
    [(32, None, (1, 2, 4, 8)), (3, None, (1, 2, 4)), (32, 1, (1, 2)), (32, 5, (1, 2, 4, 8))],
)
def test_costs_are_measured_up_to_the_most_requests_at_once(monkeypatch, rows, streams, batches):
    asked = []
    monkeypatch.setattr(loops.break_even, "profile", lambda *a, longest: asked.append(a[1]))
    offered = Source([Request([1, 2], 4)] * 7, streams)
    loops.costs_for(None, ["plain", "always:3"], offered, rows)
    assert asked == [], "no policy reads them"
    loops.costs_for(None, ["plain", "goodput"], offered, rows)
    assert asked == [batches]


def test_certified_rounds_draft_for_all_rows_half_and_none():
    policy = loops.AllHalfNone(3)
    chosen = [depths(policy.choose(load(5)), 5) for _ in range(4)]
    assert chosen == [[3] * 5, [3, 3, 0, 0, 0], [0] * 5, [3] * 5]
    assert depths(loops.AllHalfNone(3).choose(load(1)), 1) == [3]


def test_certify_served_finds_a_spoiled_output(pairing, monkeypatch):
    offered = under_load.requests(pairing, PROMPTS, 4, 8)
    exact = under_load.certify_served(pairing, offered, 3)
    assert (exact.rows, exact.bugs) == (4, 0)
    assert exact.tokens > 16

    def spoiled(*arguments):
        responses = serve(*arguments)
        responses[2].tokens[1] ^= 1
        return responses

    monkeypatch.setattr(loops, "serve", spoiled)
    assert under_load.certify_served(pairing, offered, 3).bugs == 1


def test_closed_loops_has_every_load_policy_and_turn(pairing):
    names = ["plain", "always:1", "bandit"]
    table = under_load.closed_loops(pairing, names, None, PROMPTS, [1, 3], 8, turns=2)
    assert set(zip(table["load"], table["policy"], strict=True)) == {
        (c, n) for c in (1, 3) for n in names
    }
    assert (table["tokens"] >= 256 + 20 * table["load"]).all()
    rated, lost = under_load.rates(table), under_load.regrets(table)
    assert len(rated) == len(lost) == 6
    assert (lost["regret"].groupby(lost["load"]).min() <= 0).all()


def test_in_turn_orders_are_balanced():
    names = ["plain", "never", "goodput"]
    run = [name for number in range(600) for name in loops.in_turn(names, number)]
    follows = Counter(itertools.pairwise(run))
    assert {run.count(name) for name in names} == {600}
    assert all(190 < follows[a, b] < 290 for a, b in itertools.permutations(names, 2))
    assert loops.in_turn(names, 7) == loops.in_turn(names, 7)


def test_staggered_requests_end_apart(pairing):
    offered = under_load.requests(pairing, PROMPTS, 9, 8)
    cut = loops.staggered(offered, 5)
    assert [r.new for r in cut] == [1, 3, 4, 6, 8, 8, 8, 8, 8]
    assert [r.prompt for r in cut] == [r.prompt for r in offered]
    assert [r.new for r in loops.staggered(offered, 9)] == [1, 1, 2, 3, 4, 5, 6, 7, 8]
