"""Serving figures agree with what is counted by hand; servers that race do the same work."""

import itertools
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from support.cost_tables import planted

from specexp import api, figures
from specexp.errors import UserError
from specexp.measure import under_load
from specexp.measure.prompts import Prompt
from specexp.measure.under_load import races, served
from specexp.policy import Fixed
from specexp.serving.arrivals import Arrival, write_csv
from specexp.serving.server import Answer, Closed, Request, Server, Tick, Timed, serve
from specexp.serving.simulated_rows import SimulatedBank, requests
from specexp.trace import Acceptance
from specexp.tree import Tree

PROMPTS = [
    Prompt(1, "code", ("def mean(values):",)),
    Prompt(2, "code", ("return sum(values) / len(values)",)),
    Prompt(3, "messy", ("zz qq mean mean mean",)),
]
LETTERS = SimpleNamespace(encode=lambda texts: [[ord(c) for c in text] for text in texts])


def answer(came_s, *deliveries, begun_s=None, state="done", kind="code", prompt=3, **counts):
    asked = Request(range(prompt), 9, came_s, kind=kind)
    return Answer(asked, came_s, state, begun_s=begun_s, deliveries=list(deliveries), **counts)


def tick(begin_s, end_s, busy_s=0.0, **counts):
    none = dict.fromkeys(
        ("waiting", "read", "live", "rows", "speculated", "drafted", "accepted", "emitted"), 0
    )
    return Tick(begin_s, end_s, busy_s, **none | counts)


ANSWERS = [
    answer(1.0, (2.0, 1), (2.5, 3), (3.5, 5), begun_s=1.5, drafted=6, accepted=2, passes=3),
    answer(2.0, (2.25, 1), begun_s=2.125, prompt=7, kind="chat"),
    answer(2.0, (3.0, 4), begun_s=2.5),
    answer(2.5, state="refused"),
    answer(3.0, (3.5, 2), begun_s=3.25, state="cancelled"),
]
TICKS = [
    tick(1.0, 2.0, 0.75, live=1, rows=2, speculated=2, drafted=3, accepted=1, emitted=2, waiting=4),
    tick(2.0, 2.5, 0.5, live=2, rows=2, speculated=0, emitted=2, waiting=2),
    tick(3.0, 5.0, 1.75, live=3, rows=4, speculated=1, drafted=5, accepted=3, emitted=9),
]


# --- what is reported ----------------------------------------------------------------------------


def test_times_of_a_request_count_from_its_coming():
    table = under_load.answered(ANSWERS)
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
    assert list(table["state"]) == ["done", "done", "done", "refused", "cancelled"]


def test_gaps_lie_between_deliveries_not_tokens():
    assert under_load.gaps(ANSWERS).tolist() == [0.5, 1.0]
    assert under_load.gaps(ANSWERS[1:]).tolist() == []


@pytest.fixture
def few(monkeypatch):
    """Quantiles are told of any number of samples."""
    monkeypatch.setattr(served, "LEAST", dict.fromkeys(under_load.QUANTILES, 1))


def test_a_quantile_is_told_of_samples_enough_to_tell_it_from():
    told = {}
    for count in (59, 60, 661, 662):
        found = under_load.served_metrics([ANSWERS[0]] * count, TICKS, 1e4, 1e4)
        told[count] = [q for q in under_load.QUANTILES if found[f"latency/ttft_p{q}_ms"] == 1000]
    assert told == {59: [50], 60: [50, 95], 661: [50, 95], 662: [50, 95, 99]}
    assert figures.under_load.as_text("latency/ttft_p99_ms", float("nan")) == "-"
    figure = figures.under_load.latencies(
        under_load.by_policy({"plain": run(ANSWERS, TICKS)}, 1e4, 1e4)
    )
    assert [t.get_text() for t in figure.axes[0].get_xticklabels()] == ["p50"]


def test_served_figures_are_those_counted_by_hand(few):
    found = under_load.served_metrics(ANSWERS, TICKS, 1e4, 1e4)
    wanted = {
        "throughput/tok_s": 10 / 4, "throughput/req_s": 3 / 4,
        "goodput/share": 3 / 5, "goodput/req_s": 3 / 4,
        "load/occupancy": 8 / 3.5, "load/speculated": 3 / 8, "load/refused": 1, "load/failed": 0,
        "load/overhead": 1 - 3.0 / 3.5, "served/rate": 4 / 8,
        "latency/ttft_p50_ms": 1000, "latency/ttft_p95_ms": 1000, "latency/ttft_p99_ms": 1000,
        "latency/tpot_p50_ms": 375 / 2, "latency/tpot_p95_ms": 375 * 0.95,
        "latency/tpot_p99_ms": 375 * 0.99,
        "latency/e2e_p50_ms": 1000, "latency/e2e_p95_ms": 1000 + 0.9 * 1500,
        "latency/e2e_p99_ms": 1000 + 0.98 * 1500,
        "latency/itl_p50_ms": 750, "latency/itl_p95_ms": 975, "latency/itl_p99_ms": 995,
    }  # fmt: skip
    assert found == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("ttft_ms", "tpot_ms", "within"),
    [(1000, 375, 3), (999, 375, 1), (1000, 374, 2), (250, 0, 1), (249, 375, 0)],
)
def test_on_the_limit_is_within_it_and_one_token_has_no_time_between_tokens(
    ttft_ms, tpot_ms, within
):
    """Requests done take 1000, 250, 1000 ms to begin and 375, -, 0 a token; of five that came."""
    found = under_load.served_metrics(ANSWERS, TICKS, ttft_ms, tpot_ms)
    assert found["goodput/share"] == within / 5
    assert found["goodput/req_s"] == within / 4


def test_where_nothing_was_served_there_is_nothing_to_tell():
    found = under_load.served_metrics([answer(1.0, state="refused")], [], 1, 1)
    assert (found["goodput/share"], found["load/refused"]) == (0, 1)
    assert np.isnan(found["latency/ttft_p50_ms"])
    assert np.isnan(found["load/overhead"])
    assert set(found) == set(under_load.served_metrics(ANSWERS, TICKS, 1, 1))


def test_a_timeline_has_sums_as_shares_and_means_of_what_is_counted():
    table = under_load.timeline(
        [*TICKS[:2], tick(2.5, 3.0, live=5, rows=8, speculated=5), TICKS[2]], 3
    )
    assert table["end_s"].tolist() == [2.5, 5.0]
    assert table["live"].tolist() == [8 / 3, 3]
    assert table["waiting"].tolist() == [2, 0]
    assert table["speculated"].tolist() == [7 / 12, 1 / 4]
    assert table["kept"].tolist() == [1 / 3, 3 / 5]
    assert np.isnan(under_load.timeline(TICKS[1:2])["kept"][0])


def samples(**policies):
    """turns (seconds, tokens) of each policy at one load."""
    rows = [
        {"policy": name, "turn": turn, "s": s, "busy_s": s / 2, "tokens": n, "rows": 4,
         "speculated": turn, "drafted": 4, "accepted": turn}
        for name, turns in policies.items()
        for turn, (s, n) in enumerate(turns)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_rates_are_pooled_over_turns():
    made = samples(plain=[(1, 10), (2, 12)], fast=[(1, 20), (1, 12)], slow=[(2, 10), (4, 12)])
    table = under_load.rates(pd.concat([made.assign(load=2), made.assign(load=8)])).set_index(
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


def test_regret_is_counted_from_the_best_fixed_choice_of_each_load():
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


def test_an_interval_of_regret_is_the_right_way_round():
    rng = np.random.default_rng(0)
    made = samples(plain=[(1, 10)] * 9, goodput=[(1, n) for n in rng.integers(5, 10, 9)])
    mine = under_load.regrets(made.assign(load=1)).set_index("policy").loc["goodput"]
    assert 0 < mine["low"] < mine["regret"] < mine["high"] < 1


def run(answers, ticks):
    return under_load.Run(SimpleNamespace(ticks=ticks), Timed([]), answers)


def test_real_and_simulated_stand_side_by_side_and_their_difference_is_a_median(few):
    later = [answer(0.0, (2.0, 1), (6.0, 5), begun_s=1.0)]
    sooner = [answer(0.0, (1.0, 1), (4.0, 5), begun_s=1.0)]
    real = {name: run(later, [tick(0.0, 10.0)]) for name in ("plain", "goodput", "always:1")}
    simulated = real | {"plain": run(sooner, [tick(0.0, 8.0)])}
    table = under_load.compare_runs(real, simulated, 1, 1).set_index(["policy", "figure"])
    assert len(table) == 3 * 4
    assert table.loc["plain"].T.to_dict() == {
        "tokens/s": {"real": 0.5, "simulated": 0.625},
        "TTFT p95 (ms)": {"real": 2000, "simulated": 1000},
        "TPOT p95 (ms)": {"real": 1000, "simulated": 750},
        "E2E p95 (ms)": {"real": 6000, "simulated": 4000},
    }
    assert (table.loc["goodput", "real"] == table.loc["goodput", "simulated"]).all()
    again = real | {name: run(sooner, [tick(0.0, 8.0)]) for name in ("plain", "always:1")}
    found = under_load.simulation_metrics(under_load.compare_runs(real, again, 1, 1))
    assert found == pytest.approx({
        "simulated/throughput_off": 0.25, "simulated/ttft_p95_off": 0.5,
        "simulated/tpot_p95_off": 0.25, "simulated/e2e_p95_off": 1 / 3,
    })  # fmt: skip
    none = under_load.simulation_metrics(under_load.compare_runs(real, simulated, 1, 1))
    assert set(none.values()) == {0.0}


def test_what_is_logged_is_the_row_of_the_policy(few):
    made = samples(plain=[(1, 10)] * 3, **{"always:3": [(1, 20)] * 3, "goodput": [(1, 25)] * 3})
    more = samples(plain=[(1, 80)] * 3, **{"always:3": [(1, 40)] * 3, "goodput": [(1, 76)] * 3})
    both = pd.concat([made.assign(load=1), more.assign(load=9)])
    served = under_load.by_policy(
        {"goodput": run(ANSWERS, TICKS), "plain": run(ANSWERS[1:2], TICKS)}, 1e4, 1e4
    )
    rated, missed = under_load.rates(both), under_load.regrets(both)
    found, series = under_load.metrics(rated, missed, served, "goodput")
    assert found == pytest.approx(under_load.served_metrics(ANSWERS, TICKS, 1e4, 1e4) | {
        "speedup/measured": 2.5, "speedup/ci_low": 2.5, "speedup/ci_high": 2.5,
        "speedup/at_largest_batch": 0.95, "regret/worst": 0.05, "regret/mean": -0.1,
    })  # fmt: skip
    wanted = {
        "speedup/at_batch": {1: 2.5, 9: 0.95}, "throughput/at_batch": {1: 25, 9: 76},
        "load/speculated_at_batch": {1: 0.25, 9: 0.25}, "regret/at_batch": {1: -0.25, 9: 0.05},
    }  # fmt: skip
    for name, values in wanted.items():
        assert series[name] == pytest.approx(values), name
    assert set(series) == set(wanted)
    plain, _ = under_load.metrics(rated, missed, served, "plain")
    assert np.isfinite(list(plain.values())).all()  # it had one token: no time between tokens
    assert "latency/tpot_p50_ms" not in plain


def test_the_steps_of_all_servers_are_kept_in_order():
    table = under_load.steps({"plain": run([], TICKS), "goodput": run([], TICKS[:1])})
    assert table["policy"].tolist() == ["plain"] * 3 + ["goodput"]
    assert table["emitted"].tolist() == [2, 2, 9, 2]
    assert table["end_s"].tolist() == [2.0, 2.5, 5.0, 2.0]


# --- traffic -------------------------------------------------------------------------------------


def test_a_closed_loop_repeats_the_prompts_mixed_over_kinds():
    made = under_load.traffic(LETTERS, PROMPTS, "closed:2", 5, 20)
    assert made.concurrency == 2
    assert isinstance(made.arriving(), Closed)
    assert [r.kind for r in made.requests] == ["code", "messy", "code", "code", "messy"]
    assert "".join(map(chr, made.requests[3].prompt)) == "def mean(values):"
    assert [r.stream for r in made.requests] == list(range(5))
    assert {(r.new, r.at_s) for r in made.requests} == {(20, 0.0)}


def test_open_traffic_comes_at_its_times_with_whole_prompts():
    made = under_load.traffic(LETTERS, PROMPTS, "poisson:4", 6, 20, seed=1)
    times = [r.at_s for r in made.requests]
    assert made.concurrency is None
    assert isinstance(made.arriving(), Timed)
    assert times == sorted(times)
    assert len(set(times)) == 6
    assert {r.new for r in made.requests} == {20}
    assert all(r.prompt == s.prompt for r, s in zip(
        made.requests, under_load.requests(LETTERS, PROMPTS, 6, 20), strict=True))  # fmt: skip
    assert made == under_load.traffic(LETTERS, PROMPTS, "poisson:4", 6, 20, seed=1)
    assert made != under_load.traffic(LETTERS, PROMPTS, "poisson:4", 6, 20, seed=2)


def test_a_trace_cuts_prompts_and_answers(tmp_path):
    file = tmp_path / "trace.csv"
    write_csv(file, [Arrival(0.0, 4, 7), Arrival(0.5, 400, 3), Arrival(2.0, 1, 90)])
    made = under_load.traffic(LETTERS, PROMPTS, f"trace:{file}", 9, 20)
    assert [r.at_s for r in made.requests] == [0.0, 0.5, 2.0]
    assert ["".join(map(chr, r.prompt)) for r in made.requests] == [
        "def ", "zz qq mean mean mean", "r"
    ]  # fmt: skip
    assert [r.new for r in made.requests] == [7, 3, 20]
    assert under_load.slots_for(made.requests, 5) == 20 + 3 + 5


# --- simulation ----------------------------------------------------------------------------------


def simulated(gamma, conditional=lambda stream: [0.9, 0.5, 0.2], count=40, rows=4, **options):
    fixed = Fixed(Tree.chain(gamma))
    bank = SimulatedBank(planted(), conditional, rows, 512, fixed.widest, **options)
    server = Server(bank, fixed)
    todo = requests([(0.0, 20, 300)] * count)
    return server, serve(server, Closed(todo, rows))


@pytest.mark.parametrize("gamma", [0, 1, 2, 3, 5])
def test_a_simulated_round_brings_as_many_tokens_as_its_guesses_are_good(gamma):
    """The last round of an answer is cut by its limit, and left out."""
    _, answers = simulated(gamma)
    gained = np.concatenate([np.diff([n for _, n in a.deliveries])[:-1] for a in answers])
    wanted = 1 + sum(np.cumprod([0.9, 0.5, 0.2, 0.2, 0.2][:gamma]))  # none is known beyond three
    assert len(gained) > 4000
    assert gained.mean() == pytest.approx(wanted, abs=4 * max(gained.std(), 1e-9) / 60)
    assert {a.deliveries[-1][1] for a in answers} == {300}
    assert all(a.drafted == gamma * a.passes for a in answers)


@pytest.mark.parametrize("packs", [False, True])
def test_simulated_guesses_that_are_not_found_are_paid_for_only_where_passes_do_not_pack(packs):
    costs = planted(slot=0)
    costs = replace(costs, about=costs.about | {"passes": "native" if packs else "fused"})
    bank = SimulatedBank(costs, lambda stream: [0.6], 1, 512, 6, made=lambda stream: 0.75)
    answers = serve(Server(bank, Fixed(Tree.chain(1))), Timed(requests([(0.0, 20, 300)] * 40)))
    passes, made = sum(a.passes for a in answers), sum(a.drafted for a in answers)
    kept = sum(a.accepted for a in answers)
    assert made / passes == pytest.approx(0.75, abs=0.02)
    assert kept / passes == pytest.approx(0.6, abs=0.02)
    paid = made if packs else passes
    read = 40 * costs.prefill_s(19)
    assert bank.time - read == pytest.approx(
        paid * costs.round_s(1, 1, 512) + (passes - paid) * costs.step_s(1, 512), rel=0.05
    )


def test_simulated_time_is_that_of_the_table():
    """Windows are 64 slots wide, or as many times that as the longest text and a draft need."""
    costs = planted()
    bank = SimulatedBank(costs, lambda stream: [0.5] * 5, 4, 500, 6, overhead_s=1e-3)
    begin, spent = bank.clock(), []
    for row in range(3):
        bank.enter(row, range(50), row)
        bank.begin(row, 400)
    for call in (
        lambda: bank.read(0, 9, 49),
        lambda: bank.catch_up([3, 3, 3], 50, 7),
        lambda: bank.round([3, 3, 3], 58, Tree.chain(3)),
        lambda: bank.round([3, 3, 3], 59, Tree.chain(3)),
        lambda: bank.round([0, 0], 490, Tree.chain(0)),
        lambda: bank.wait(0.0),
        lambda: bank.wait(bank.clock() + 2.5),
    ):
        call()
        spent.append(bank.clock() - begin)
        begin = bank.clock()
    assert spent == pytest.approx([
        costs.prefill_s(40), costs.catch_up_s(21), costs.round_s(3, 3, 64) + 1e-3,
        costs.round_s(3, 3, 128) + 1e-3, costs.round_s(2, 0, 500) + 1e-3, 0.0, 2.5,
    ])  # fmt: skip


def test_what_servers_spend_on_their_own_is_the_mean_of_their_steps():
    one, two = SimpleNamespace(ticks=[tick(1, 2, 0.9), tick(2, 4, 1.6)]), [tick(0, 1, 0.9)]
    runs = {"plain": one, "never": SimpleNamespace(ticks=two)}
    assert under_load.overhead_s(runs) == pytest.approx(0.2)


def test_a_simulated_answer_takes_its_reading_and_its_rounds():
    server, [made] = simulated(0, count=1, rows=1, overhead_s=1e-3)
    assert len(made.deliveries) == 300
    read, costs = planted().prefill_s(19), planted()
    steps = [costs.round_s(1, 0, -(-(20 + i + 1) // 64) * 64) + 1e-3 for i in range(300)]
    assert [at for at, _ in made.deliveries] == pytest.approx(list(read + np.cumsum(steps)))
    assert server.ticks[-1].end_s == made.ended_s


def test_the_same_seed_gives_the_same_answers_and_another_others():
    first, again, other = (simulated(3, seed=s, count=8)[1] for s in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_simulation_knows_each_kind_of_request_and_answers_all():
    """Guesses on code are always kept, on messy text never."""
    accepted = pd.DataFrame({
        "category": ["code", "messy"], "gamma": 5,
        "record": [Acceptance(50, 60, 0, (0, 0, 0, 0, 0, 10)), Acceptance(50, 10, 0, (10,))],
    })  # fmt: skip
    offered = under_load.traffic(LETTERS, PROMPTS, "poisson:40", 12, 24)
    names = ["plain", "always:5", "goodput"]
    runs = under_load.simulate(planted(), accepted, names, offered, rows=3)
    assert list(runs) == names
    for made in runs.values():
        assert [a.request for a in made.answers] == list(offered.requests)
        assert {(a.state, a.deliveries[-1][1]) for a in made.answers} == {("done", 24)}
    for a in runs["always:5"].answers:
        assert a.passes == (4 if a.request.kind == "code" else 24)
    assert all(a.drafted == 0 for a in runs["plain"].answers)
    again = under_load.simulate(planted(), accepted, names, offered, rows=3)
    assert {n: r.answers for n, r in again.items()} == {n: r.answers for n, r in runs.items()}


def test_a_simulation_finds_out_how_fast_the_machine_was():
    """Runs on a machine that was slower than its table says, which policies did not know."""
    record = Acceptance(300, 210, 0, (10,) * 6)
    accepted = pd.DataFrame({"category": ["a"], "gamma": [5], "record": [record]})
    offered = under_load.traffic(LETTERS, PROMPTS, "poisson:40", 60, 24)
    names = ["plain", "always:3", "goodput"]
    real = under_load.simulate(planted(), accepted, names, offered, rows=3, pace=(1.5, 1.2))
    runs, pace = under_load.simulated(planted(), accepted, real, offered, rows=3)
    assert pace == pytest.approx((1.5, 1.2), rel=0.05)
    for name in names:
        assert runs[name].server.now == pytest.approx(real[name].server.now, rel=0.01)


# --- real servers --------------------------------------------------------------------------------

NAMES = ["plain", "never", "always:1", "always:3", "threshold:2,2", "table:1=3,3=1,4=0", "bandit",
         "goodput"]  # fmt: skip


@pytest.fixture(scope="module")
def pairing(tiny_folders):
    return api.build(tiny_folders[0], tiny_folders[1], gamma=3)


def texts(answers) -> dict[int, list[int]]:
    return {a.request.stream: a.tokens for a in answers if a.state == "done"}


def test_in_a_race_turns_are_paired_and_everybody_writes_the_same(pairing):
    asked = under_load.requests(pairing, PROMPTS, 14, 10)
    table, runs = under_load.race(pairing, NAMES, planted(), asked, 3, tokens=24, turns=2)
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
        while sum(a.over for a in run.answers) < 14:
            run.advance()
        shared = texts(run.answers).keys() & texts(runs["plain"].answers).keys()
        assert len(shared) >= 12
        assert all(texts(run.answers)[i] == texts(runs["plain"].answers)[i] for i in shared)


def test_a_race_of_few_requests_begins_again_until_its_turns_are_done(pairing):
    asked = under_load.requests(pairing, PROMPTS, 3, 4)
    table, runs = under_load.race(
        pairing, ["plain", "always:1"], None, asked, 2, tokens=10, turns=3
    )
    assert sorted(table["turn"]) == [0, 0, 1, 1, 2, 2]
    assert len(runs["plain"].answers) > 3


def test_a_race_of_requests_that_bring_nothing_ends(pairing, monkeypatch):
    asked = [Request([1] * 9, 1 << 20)] * 3
    monkeypatch.setattr(races, "slots_for", lambda offered, slack: 64)
    with pytest.raises(UserError, match=r"3 requests did not yield 10 tokens: plain: .* refused"):
        under_load.race(pairing, ["plain"], None, asked, 2, tokens=10, turns=3)


def test_in_open_traffic_everybody_answers_all_of_it_alike(pairing):
    offered = under_load.traffic(pairing, PROMPTS, "poisson:200", 10, 10)
    runs = under_load.open_race(pairing, NAMES, planted(), offered, rows=3, slice_s=0.02)
    for run in runs.values():
        assert [a.request for a in run.answers] == list(offered.requests)
        assert [a.came_s for a in run.answers] == [r.at_s for r in offered.requests]
        assert all(a.begun_s >= a.came_s for a in run.answers)
        assert texts(run.answers) == texts(runs["plain"].answers)
        assert len(texts(run.answers)) == 10
    assert all(a.drafted == 0 for a in runs["plain"].answers)
    assert all(a.drafted > 0 for a in runs["always:3"].answers)
    replayed = offered.as_served(runs["plain"].answers[1:])
    lengths = [10, *(len(a.tokens) for a in runs["plain"].answers[1:])]
    assert [r.new for r in replayed.requests] == lengths
    assert [r.prompt for r in replayed.requests] == [r.prompt for r in offered.requests]


def test_what_is_served_is_certified(pairing, monkeypatch):
    asked = under_load.requests(pairing, PROMPTS, 4, 8)
    exact = under_load.certify_served(pairing, asked, 3)
    assert (exact.rows, exact.bugs) == (4, 0)
    assert exact.tokens > 16

    def spoiled(*given):
        answers = serve(*given)
        answers[2].tokens[1] ^= 1
        return answers

    monkeypatch.setattr(races, "serve", spoiled)
    assert under_load.certify_served(pairing, asked, 3).bugs == 1


def test_a_bake_off_has_every_load_and_policy_with_its_turns(pairing):
    names = ["plain", "always:1", "bandit"]
    table = under_load.bake_off(pairing, names, None, PROMPTS, [1, 3], 8, turns=2)
    assert set(zip(table["load"], table["policy"], strict=True)) == {
        (c, n) for c in (1, 3) for n in names
    }
    assert (table["tokens"] >= 256 + 20 * table["load"]).all()
    rated, missed = under_load.rates(table), under_load.regrets(table)
    assert len(rated) == len(missed) == 6
    assert (missed["regret"].groupby(missed["load"]).min() <= 0).all()


def test_who_races_follows_each_of_the_others_about_as_often():
    names = ["plain", "never", "goodput"]
    run = [name for number in range(600) for name in under_load.in_turn(names, number)]
    follows = Counter(itertools.pairwise(run))
    assert {run.count(name) for name in names} == {600}
    assert all(190 < follows[a, b] < 290 for a, b in itertools.permutations(names, 2))
    assert under_load.in_turn(names, 7) == under_load.in_turn(names, 7)


def test_the_first_texts_of_a_closed_loop_end_apart(pairing):
    asked = under_load.requests(pairing, PROMPTS, 9, 8)
    made = under_load.staggered(asked, 5)
    assert [r.new for r in made] == [1, 3, 4, 6, 8, 8, 8, 8, 8]
    assert [r.prompt for r in made] == [r.prompt for r in asked]
    assert [r.new for r in under_load.staggered(asked, 9)] == [1, 1, 2, 3, 4, 5, 6, 7, 8]


# --- figures -------------------------------------------------------------------------------------


def drawn(figure, folder) -> str:
    figure.savefig(folder / "figure.png")
    return figure.get_suptitle()


def test_the_title_of_a_bake_off_says_what_its_table_says(tmp_path):
    made = samples(plain=[(1, 10)] * 3, **{"always:3": [(1, 20)] * 3, "goodput": [(1, 19)] * 3})
    more = samples(plain=[(1, 80)] * 3, **{"always:3": [(1, 40)] * 3, "goodput": [(1, 77)] * 3})
    both = pd.concat([made.assign(load=1), more.assign(load=9)])
    figure = figures.under_load.bake_off(under_load.rates(both), under_load.regrets(both))
    assert drawn(figure, tmp_path) == (
        "always:3: 2.00x with 1 and 0.50x with 9 streams; goodput loses 5.0% at worst to the best "
        "fixed choice"
    )
    left, right = figure.axes
    assert [t.get_text() for t in left.get_legend().get_texts()] == ["always:3", "goodput"]
    assert [t.get_text() for t in right.get_legend().get_texts()] == ["goodput"]
    lines = {line.get_label(): line.get_ydata().tolist() for line in left.lines[1:]}
    assert lines["always:3"] == pytest.approx([2.0, 0.5])
    assert lines["goodput"] == pytest.approx([1.9, 77 / 80])
    fixed = both[both["policy"] != "goodput"]
    said = drawn(
        figures.under_load.bake_off(under_load.rates(fixed), under_load.regrets(fixed)), tmp_path
    )
    assert said == "always:3: 2.00x with 1 and 0.50x with 9 streams"
    one = fixed[fixed["load"] == 9]
    said = drawn(
        figures.under_load.bake_off(under_load.rates(one), under_load.regrets(one)), tmp_path
    )
    assert said == "always:3: 0.50x with 9 streams"


def test_the_title_of_timelines_says_who_is_ready_first_and_last(tmp_path):
    slow, fast = [*TICKS, tick(5.0, 31.0, live=1)], TICKS
    tables = {"plain": under_load.timeline(slow, 5), "goodput": under_load.timeline(fast, 5)}
    said = drawn(figures.under_load.timelines(tables), tmp_path)
    assert said == "The same arrivals: all answered after 5 s under goodput, 31 s under plain"
    del tables["plain"]
    said = drawn(figures.under_load.timelines(tables), tmp_path)
    assert said == "The same arrivals: all answered after 5 s under goodput"


def test_the_title_of_latencies_names_who_kept_most_limits(tmp_path, few):
    served = under_load.by_policy(
        {"plain": run(ANSWERS, TICKS), "goodput": run(ANSWERS[1:2], TICKS)}, 500, 1
    )
    figure = figures.under_load.latencies(served)
    assert drawn(figure, tmp_path) == "Most requests within the limits: goodput, 100%"
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    assert heights == pytest.approx([1000, 1000, 1000, 250, 250, 250])
    assert drawn(figures.under_load.latencies(served, "said"), tmp_path) == "said"


def test_what_is_simulated_says_so(tmp_path):
    compared = pd.DataFrame({
        "policy": ["plain", "goodput"] * 2, "figure": ["tokens/s"] * 2 + ["TTFT p95 (ms)"] * 2,
        "real": [100.0, 200.0, 50.0, 80.0], "simulated": [110.0, 190.0, 50.0, 60.0],
    })  # fmt: skip
    figure = figures.under_load.simulated(compared)
    assert drawn(figure, tmp_path) == (
        "SIMULATED against real: 8% off in the median, at worst 25% (TTFT p95 (ms), goodput)"
    )
    assert [a.get_ylabel() for a in figure.axes] == [
        "SIMULATED tokens/s", "SIMULATED TTFT p95 (ms)"
    ]  # fmt: skip
    dots = [tuple(d) for a in figure.axes for c in a.collections[:2] for d in c.get_offsets()]
    assert dots == [(100, 110), (200, 190), (50, 50), (80, 60)]
