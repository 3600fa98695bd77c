"""SIMULATED servers take the times of the table and have the acceptance they are given."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from support.cost_tables import planted
from support.questions import LETTERS, PROMPTS
from support.served import answer, run_of, tick
from support.traces import requests

from specexp.measure import under_load
from specexp.measure.under_load import simulation
from specexp.policy import Fixed
from specexp.serving.server import Server
from specexp.serving.simulated_rows import SimulatedRows
from specexp.serving.sources import Source, serve
from specexp.trace import Acceptance
from specexp.tree import Tree


def test_compare_runs_pairs_real_with_simulated(few):
    later = [answer(0.0, (2.0, 1), (6.0, 5), begun_s=1.0)]
    sooner = [answer(0.0, (1.0, 1), (4.0, 5), begun_s=1.0)]
    real = {name: run_of(later, [tick(0.0, 10.0)]) for name in ("plain", "goodput", "always:1")}
    simulated = real | {"plain": run_of(sooner, [tick(0.0, 8.0)])}
    table = under_load.compare_runs(real, simulated, 1, 1).set_index(["policy", "figure"])
    assert len(table) == 3 * 4
    assert table.loc["plain"].T.to_dict() == {
        "tokens/s": {"real": 0.5, "simulated": 0.625},
        "TTFT p95 (ms)": {"real": 2000, "simulated": 1000},
        "TPOT p95 (ms)": {"real": 1000, "simulated": 750},
        "E2E p95 (ms)": {"real": 6000, "simulated": 4000},
    }
    assert (table.loc["goodput", "real"] == table.loc["goodput", "simulated"]).all()
    again = real | {name: run_of(sooner, [tick(0.0, 8.0)]) for name in ("plain", "always:1")}
    metrics = under_load.simulation_metrics(under_load.compare_runs(real, again, 1, 1))
    assert metrics == pytest.approx({
        "simulated/throughput_off": 0.25, "simulated/ttft_p95_off": 0.5,
        "simulated/tpot_p95_off": 0.25, "simulated/e2e_p95_off": 1 / 3,
    })  # fmt: skip
    none = under_load.simulation_metrics(under_load.compare_runs(real, simulated, 1, 1))
    assert set(none.values()) == {0.0}


def simulated(gamma, conditional=lambda stream: [0.9, 0.5, 0.2], count=40, rows=4, **options):
    fixed = Fixed(Tree.chain(gamma))
    bank = SimulatedRows(planted(), conditional, rows, 512, fixed.widest, **options)
    server = Server(bank, fixed)
    todo = requests([(0.0, 20, 300)] * count)
    return server, serve(server, Source(todo, rows))


@pytest.mark.parametrize("gamma", [0, 1, 2, 3, 5])
def test_simulated_tokens_match_acceptance(gamma):
    """The last round of an answer is cut by its limit, and left out."""
    _, responses = simulated(gamma)
    gained = np.concatenate([np.diff([n for _, n in a.deliveries])[:-1] for a in responses])
    wanted = 1 + sum(np.cumprod([0.9, 0.5, 0.2, 0.2, 0.2][:gamma]))  # none is known beyond three
    assert len(gained) > 4000
    assert gained.mean() == pytest.approx(wanted, abs=4 * max(gained.std(), 1e-9) / 60)
    assert {a.deliveries[-1][1] for a in responses} == {300}
    assert all(a.drafted == gamma * a.passes for a in responses)


@pytest.mark.parametrize("packs", [False, True])
def test_simulated_misses_cost_only_unpacked_passes(packs):
    costs = planted(slot=0)
    costs = replace(costs, about=costs.about | {"passes": "native" if packs else "fused"})
    bank = SimulatedRows(costs, lambda stream: [0.6], 1, 512, 6, filled=lambda stream: 0.75)
    responses = serve(Server(bank, Fixed(Tree.chain(1))), Source(requests([(0.0, 20, 300)] * 40)))
    passes, drafted = sum(a.passes for a in responses), sum(a.drafted for a in responses)
    kept = sum(a.accepted for a in responses)
    assert drafted / passes == pytest.approx(0.75, abs=0.02)
    assert kept / passes == pytest.approx(0.6, abs=0.02)
    paid = drafted if packs else passes
    read = 40 * costs.prefill_s(19)
    assert bank.time - read == pytest.approx(
        paid * costs.round_s(1, 1, 512) + (passes - paid) * costs.step_s(1, 512), rel=0.05
    )


def test_simulated_time_matches_the_table():
    """Windows are 64 slots wide, or as many times that as the longest text and a draft need."""
    costs = planted()
    bank = SimulatedRows(costs, lambda stream: [0.5] * 5, 4, 500, 6, overhead_s=1e-3)
    begin, spent = bank.clock(), []
    for row in range(3):
        bank.enter(row, range(50), row)
        bank.end_prefill(row, 400)
    for call in (
        lambda: bank.prefill(0, 9, 49),
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


def test_simulated_response_takes_prefill_and_rounds():
    server, [response] = simulated(0, count=1, rows=1, overhead_s=1e-3)
    assert len(response.deliveries) == 300
    read, costs = planted().prefill_s(19), planted()
    steps = [costs.round_s(1, 0, -(-(20 + i + 1) // 64) * 64) + 1e-3 for i in range(300)]
    assert [at for at, _ in response.deliveries] == pytest.approx(list(read + np.cumsum(steps)))
    assert server.steps[-1].end_s == response.deliveries[-1][0]


def test_simulation_depends_on_seed_only():
    first, again, other = (simulated(3, seed=s, count=8)[1] for s in (1, 1, 2))
    assert first == again
    assert first != other


def test_simulation_uses_acceptance_by_category():
    """Draft tokens on code are always kept, on messy text never."""
    accepted = pd.DataFrame({
        "category": ["code", "messy"], "gamma": 5,
        "record": [Acceptance(50, 60, 0, (0, 0, 0, 0, 0, 10)), Acceptance(50, 10, 0, (10,))],
    })  # fmt: skip
    offered = under_load.traffic(LETTERS, PROMPTS, "poisson:40", 12, 24)
    names = ["plain", "always:5", "goodput"]
    runs = simulation.simulate(planted(), accepted, names, offered, rows=3)
    assert list(runs) == names
    for run in runs.values():
        assert [a.request for a in run.responses] == list(offered.requests)
        assert {(a.state, a.deliveries[-1][1]) for a in run.responses} == {("done", 24)}
    for a in runs["always:5"].responses:
        assert a.passes == (4 if a.request.kind == "code" else 24)
    assert all(a.drafted == 0 for a in runs["plain"].responses)
    again = simulation.simulate(planted(), accepted, names, offered, rows=3)
    assert {n: r.responses for n, r in again.items()} == {n: r.responses for n, r in runs.items()}


def test_simulated_fits_the_pace_of_the_machine():
    """Runs on a machine that was slower than its table says, which policies did not know."""
    record = Acceptance(300, 210, 0, (10,) * 6)
    accepted = pd.DataFrame({"category": ["a"], "gamma": [5], "record": [record]})
    offered = under_load.traffic(LETTERS, PROMPTS, "poisson:40", 60, 24)
    names = ["plain", "always:3", "goodput"]
    real = simulation.simulate(planted(), accepted, names, offered, rows=3, factors=(1.5, 1.2))
    runs, factors = under_load.simulate_fitted(planted(), accepted, real, offered, rows=3)
    assert factors == pytest.approx((1.5, 1.2), rel=0.05)
    for name in names:
        assert runs[name].server.now == pytest.approx(real[name].server.now, rel=0.01)
