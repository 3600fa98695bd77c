"""The fleet simulator against exact arithmetic, queueing theory, and the server it stands for."""

import dataclasses
import itertools
import math
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
from conftest import also
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.cost_tables import planted, rough
from support.traces import requests, triples

from specexp.errors import UserError
from specexp.figures import fleet_day, under_load
from specexp.measure.under_load import fleet
from specexp.measure.under_load.fleet import Day, Pace, Setting, paces_of, simulate
from specexp.measure.under_load.served import request_table
from specexp.serving import policies
from specexp.serving.arrivals import Arrivals, Lengths, bursty, day
from specexp.serving.server import Server
from specexp.serving.simulated_rows import SimulatedRows
from specexp.serving.sources import Source, serve
from specexp.trace import Acceptance

KEPT = (0.8, 0.75, 0.7, 0.6, 0.6)
LENGTHS = Lengths(prompt=30, output=60, most=200)


def even(rates, *rounds) -> list[Pace]:
    """Paces of these tokens a second at 1, 2, ... streams."""
    return [Pace(0, rate, *rounds) for rate in rates]


def free(tokens: float) -> float:
    return 0.0


def arrivals(at_s, prompt, output) -> Arrivals:
    return Arrivals(np.array(at_s, float), np.array(prompt), np.array(output, float))


# --- exact arithmetic ----------------------------------------------------------------------------


class Exact:
    """One replica in fractions, stream by stream: what each still needs, no credit, no heap."""

    def __init__(self, rates, round_, over, rows):
        self.rates, self.round, self.over, self.rows = rates, round_, over, rows
        self.now = self.reading = self.ahead = Fraction(0)
        self.streams, self.waiting, self.first, self.end = {}, [], {}, {}

    def join(self, i, tokens, read, waits):
        running = waits and self.streams and not self.reading
        self.ahead = wait = max(self.ahead, self.round / 2 if running else Fraction(0))
        need = max(self.round, tokens + self.over)
        self.streams[i] = [wait + self.round, wait + need]
        self.reading += read

    def come(self, i, tokens, read):
        if len(self.streams) < self.rows:
            self.join(i, tokens, read, True)
        else:
            self.waiting.append((i, tokens, read))

    def run(self, until):
        """To a time, one change after the other; None: until all is done."""
        while self.streams and (until is None or self.now < until):
            rate = self.rates[len(self.streams)]
            if self.reading:
                step = self.reading
            else:
                step = min(left for need in self.streams.values() for left in need if left >= 0)
                step /= rate
            step = step if until is None else min(step, until - self.now)
            self.now += step
            if self.reading:
                self.reading -= step
                continue
            self.ahead = max(Fraction(0), self.ahead - rate * step)
            for i, need in self.streams.items():
                need[:] = [left - rate * step for left in need]
                if need[0] <= 0 and i not in self.first:
                    self.first[i] = self.now
            self.streams = {i: [-1 if i in self.first else need[0], need[1]]
                            for i, need in self.streams.items()}  # fmt: skip
            for i in [i for i, need in self.streams.items() if need[1] == 0][:1]:
                del self.streams[i]
                self.ahead = self.ahead if self.streams else Fraction(0)
                self.end[i] = self.now
                if self.waiting:
                    self.join(*self.waiting.pop(0), False)
        self.now = self.now if until is None else until


small = st.fractions(Fraction(1, 8), 4, max_denominator=8)
tiny_case = st.fixed_dictionaries({
    "gaps": st.lists(st.fractions(0, 5, max_denominator=16), min_size=1, max_size=9),
    "rates": st.lists(small, min_size=1, max_size=4),
    "round": st.sampled_from([Fraction(1), Fraction(5, 2)]),
    "over": st.sampled_from([Fraction(0), Fraction(1, 2)]),
    "data": st.randoms(use_true_random=False),
})  # fmt: skip


@settings(max_examples=150)
@given(tiny_case)
def test_times_match_exact_arithmetic(case):
    rates, rng = [Fraction(0), *case["rates"]], case["data"]
    at = [t + Fraction(i, 997) for i, t in enumerate(itertools.accumulate(case["gaps"]))]
    tokens = [rng.randint(1, 9) for _ in at]
    prompts = [rng.randint(0, 3) for _ in at]
    read = Fraction(1, 3)
    replica = Exact(rates, case["round"], case["over"], len(rates) - 1)
    for i, now in enumerate(at):
        replica.run(now)
        replica.come(i, tokens[i], read * prompts[i])
    replica.run(None)
    first, end = replica.first, replica.end
    moments = {*end.values(), *first.values()}
    assume(all(abs(a - t) > 1e-6 for a in at for t in moments))  # no ties by rounding
    ends = sorted(end.values())
    assume(len(ends) < len(rates) or all(b - a > 1e-6 for a, b in itertools.pairwise(ends)))
    served = simulate(
        arrivals(at, prompts, tokens),
        even([float(r) for r in rates[1:]], float(case["round"]), float(case["over"])),
        lambda p: float(read * int(p)),
    )  # fmt: skip
    order = range(len(at))
    assert served.e2e_s.tolist() == pytest.approx([float(end[i] - at[i]) for i in order])
    assert served.ttft_s.tolist() == pytest.approx([float(first[i] - at[i]) for i in order])
    for i in order:
        if tokens[i] > 1:
            further = float(end[i] - first[i]) / (tokens[i] - 1)
            assert served.tpot_s[i] == pytest.approx(further, abs=1e-9)
        else:
            assert math.isnan(served.tpot_s[i])


def test_idle_replica_prefills_then_decodes():
    """Three tokens a round of 0.3 s: the first round ends 0.3 s after the prompt is read, and
    seven tokens are written as 8 of 10 a second, one being too many."""
    served = simulate(arrivals([5], [4], [7]), even([10], 3, 1), lambda p: p / 8)
    assert served.ttft_s[0] == pytest.approx(0.5 + 0.3)
    assert served.e2e_s[0] == pytest.approx(0.5 + 0.8)
    assert served.tpot_s[0] == pytest.approx(0.5 / 6)


def test_prefill_stalls_all_streams():
    """The second comes when the first has 4 of its 10 tokens, takes 2 s to read, and waits for half
    a round."""
    served = simulate(arrivals([0, 4], [0, 1], [10, 3]), even([1, 1]), lambda p: 2 * p)
    assert served.e2e_s.tolist() == pytest.approx([12, 5.5])
    assert served.ttft_s.tolist() == pytest.approx([1, 3.5])


# --- what must hold for any traffic --------------------------------------------------------------

traffic = st.builds(
    lambda rate, count, seed, cv: bursty(rate, count, LENGTHS, seed, cv),
    st.floats(0.5, 200), st.integers(1, 300), st.integers(0, 99), st.floats(0.5, 3),
)  # fmt: skip


@settings(max_examples=40)
@given(traffic, st.integers(1, 8))
def test_all_tokens_are_served_once(offered, rows):
    """At 100 tokens a second whoever shares them, a replica is idle when a queue would be."""
    served = simulate(offered, even([100 / b for b in range(1, rows + 1)], 0), free, seed=3)
    idle_s = 0.0
    for at, tokens in zip(offered.at_s, offered.output, strict=True):
        idle_s = max(idle_s, at) + tokens / 100
    assert (served.at_s + served.e2e_s).max() == pytest.approx(idle_s)
    assert (served.e2e_s >= offered.output / 100 - 1e-9).all()


@settings(max_examples=30)
@given(traffic, st.integers(1, 5))
def test_equal_requests_end_in_order(offered, rows):
    offered = Arrivals(offered.at_s, np.full(len(offered), 7), np.full(len(offered), 40))
    paces = even([90 / b**0.5 for b in range(1, rows + 1)], 2.0)
    served = simulate(offered, paces, lambda p: p / 1000)
    assert (np.diff(offered.at_s + served.e2e_s) > -1e-9).all()
    assert (np.diff(offered.at_s + served.ttft_s) > -1e-9).all()
    assert (served.ttft_s >= 7 / 1000).all()
    assert (served.e2e_s >= served.ttft_s).all()


@settings(max_examples=20)
@given(traffic)
def test_times_scale_with_the_machine(offered):
    paces = paces_of(planted(), "goodput", KEPT, 12, 100, 30, 60)
    slow = [pace._replace(tokens_s=pace.tokens_s / 2) for pace in paces]
    one = simulate(offered, paces, lambda p: p / 512)
    late = Arrivals(2 * offered.at_s, offered.prompt, offered.output)
    two = simulate(late, slow, lambda p: p / 256)
    assert (two.e2e_s == 2 * one.e2e_s).all()
    assert (two.ttft_s == 2 * one.ttft_s).all()


# --- queueing theory -----------------------------------------------------------------------------


@pytest.mark.parametrize("rho", [0.3, 0.7])
@pytest.mark.parametrize("law", ["exponential", "constant", "long tail"])
def test_sojourn_times_match_processor_sharing(rho, law):
    """M/G/1-PS: E[T] = E[S] / (1 - rho), whatever the law of S (Kleinrock 1976, section 4.4).
    Within four standard errors by the means of 25 batches, of at most 4 % of the value each."""
    count, rng = 50_000, np.random.default_rng(8)
    sizes = {
        "exponential": rng.exponential(1, count), "constant": np.ones(count),
        "long tail": rng.exponential(1, count) * np.where(rng.random(count) < 0.1, 5.5, 0.5),
    }[law]  # fmt: skip
    offered = Arrivals(rng.exponential(1 / rho, count).cumsum(), np.zeros(count), sizes)
    served = simulate(offered, even([1 / b for b in range(1, 1000)], 0), free)
    batches = served.e2e_s.to_numpy().reshape(25, -1).mean(axis=1)
    error = batches.std(ddof=1) / 5
    assert error < 0.04 / (1 - rho)
    assert abs(served.e2e_s.mean() - 1 / (1 - rho)) < 4 * error


@pytest.mark.parametrize("gamma", [1, 3, 5])
def test_rounds_match_renewal_theory(gamma):
    """Against the exact law of the number of rounds, by dynamic programming."""
    costs = planted()
    reading = dataclasses.replace(costs, about=costs.about | {"reads": True})
    [pace], [plain_first] = (paces_of(c, f"always:{gamma}", KEPT, 1, 64) for c in (costs, reading))
    assert plain_first.overshoot == pytest.approx(pace.overshoot + pace.round - 1)
    at_least = [1.0, *itertools.accumulate(KEPT[:gamma], lambda a, b: a * b), 0.0]
    law = [a - b for a, b in itertools.pairwise(at_least)]  # of 1, 2, ... tokens
    new = 80
    left, mean, square = {new: 1.0}, 0.0, 0.0
    for rounds in itertools.count(1):
        after: dict[int, float] = {}
        for have, chance in left.items():
            for more, p in enumerate(law, 1):
                after[have - more] = after.get(have - more, 0.0) + chance * p
        done = sum(p for have, p in after.items() if have <= 0)
        mean, square = mean + rounds * done, square + rounds**2 * done
        left = {have: p for have, p in after.items() if have > 0}
        if not left:
            break
    assert pace.round == pytest.approx(sum(at_least))
    assert mean * pace.round == pytest.approx(new + pace.overshoot, rel=1e-6)
    spread = math.sqrt(square - mean**2) * pace.round
    assert spread == pytest.approx(pace.spread * math.sqrt(new), rel=0.03)


# --- the server ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rate", "reads"),
    [("plain", 22, False), ("always:3", 20, False), ("always:3", 20, True), ("goodput", 8, True),
     *also(("plain", 8, False), ("plain", 8, True), ("plain", 22, True), ("goodput", 8, False))],
)  # fmt: skip
def test_one_replica_matches_the_simulated_server(name, rate, reads):
    costs, rows = planted(slot=0), 16
    costs = dataclasses.replace(costs, about=costs.about | {"reads": reads})
    offered = bursty(rate, 700, LENGTHS, 1)
    policy = policies.of("never" if name == "plain" else name, costs, 5)
    bank = SimulatedRows(costs, lambda _: KEPT, rows, 500, policy.widest)
    server = Server(bank, policy, queue=len(offered))
    table = request_table(serve(server, Source(requests(triples(offered)))))
    means = offered.prompt.mean(), offered.output.mean()
    fluid = simulate(offered, paces_of(costs, name, KEPT, rows, 128, *means), costs.prefill_s)
    real = {key: table[f"{key}_s"].quantile([0.5, 0.95]).tolist() for key in ("tpot", "e2e")}
    for key, wanted in real.items():
        found = np.nanquantile(getattr(fluid, f"{key}_s"), [0.5, 0.95])
        assert found == pytest.approx(wanted, rel=0.1), key
    assert fluid.ttft_s.mean() == pytest.approx(table["ttft_s"].mean(), rel=0.2)
    end_s = (fluid.at_s + fluid.e2e_s).max()
    assert end_s == pytest.approx(server.steps[-1].end_s, rel=0.02)


# --- paces ---------------------------------------------------------------------------------------


def test_pace_is_tokens_over_round_time():
    costs = planted()
    plain, three = (paces_of(costs, n, KEPT, 8, 64, 16, 50) for n in ("plain", "always:3"))
    tokens = 1 + 0.8 + 0.8 * 0.75 + 0.8 * 0.75 * 0.7
    for b, (lone, pace) in enumerate(zip(plain, three, strict=True), 1):
        assert lone == (0, pytest.approx(1 / costs.step_s(b, 64)), 1, 0, 0)
        reading = b * tokens / 50 * costs.catch_up_s(16)
        assert pace.tokens_s == pytest.approx(tokens / (costs.round_s(b, 3, 64) + reading))
        assert pace.gamma == 3


@pytest.mark.parametrize("make", [planted, rough])
@given(st.integers(0, 30), st.floats(0, 1), st.integers(0, 200), st.integers(1, 100))
def test_goodput_pace_is_the_best_at_every_load(make, seed, alpha, prompt, output):
    costs = make() if make is planted else make(seed)
    given_ = [alpha] * 5, 20, 90, prompt, output
    best = paces_of(costs, "goodput", *given_)
    for name in ("plain", "always:1", "always:2", "always:3", "always:5", "threshold:3,4"):
        other = paces_of(costs, name, *given_)
        assert all(a.tokens_s >= b.tokens_s for a, b in zip(best, other, strict=True)), name


def test_pace_of_threshold_and_table():
    def gammas(name, rows):
        return [pace.gamma for pace in paces_of(planted(), name, KEPT, rows, 64)]

    assert gammas("threshold:3,4", 6) == [3, 3, 3, 3, 0, 0]
    assert gammas("table:1=5,3=1", 4) == [5, 5, 1, 1]


# --- sizes ---------------------------------------------------------------------------------------


def limited(ttft_s: float, tpot_s: float, *names: str) -> Setting:
    costs, day = planted(), Day(1, 0, LENGTHS, seed=5)
    paces = {name: paces_of(costs, name, KEPT, 16, 90, 30, 70) for name in names}
    return Setting(day, paces, costs, ttft_s, tpot_s)


@pytest.mark.parametrize(
    ("limits", "name"), [((0.2, 0.0075), "plain"), ((0.05, 1.0), "goodput"), ((9, 9), "plain")]
)
def test_fewest_replicas_keep_the_limits(limits, name):
    setting = limited(*limits, name)
    for near in (1, 13):
        found = setting.fewest_replicas(name, 150, 1500, near)
        assert setting.within_limits(setting.serve(name, 150, 1500, found))
        assert found == 1 or not setting.within_limits(setting.serve(name, 150, 1500, found - 1))


def test_goodput_needs_no_more_replicas():
    names = "plain", "goodput", "always:5"
    setting = limited(0.3, 0.0072, *names)
    found = {name: setting.fewest_replicas(name, 150, 1500) for name in names}
    assert found["goodput"] <= found["always:5"]
    assert found["goodput"] < found["plain"]


def test_one_of_many_replicas_gets_requests_in_turn():
    """As every fourth request of all of them would be served, in distribution."""
    setting = limited(1, 1, "plain")
    offered = bursty(40, 40_000, LENGTHS, 1)
    fourth = Arrivals(offered.at_s[::4], offered.prompt[::4], offered.output[::4])
    wanted = simulate(fourth, setting.paces["plain"], setting.costs.prefill_s)
    served = setting.serve("plain", 40, 10_000, 4)
    for column in ("ttft_s", "tpot_s", "e2e_s"):
        assert served[column].mean() == pytest.approx(wanted[column].mean(), rel=0.03)


# --- a day -------------------------------------------------------------------------------------


def settled(tpot_steps=1.4, names=("plain", "always:3", "goodput"), kept=KEPT, **day) -> Setting:
    day = {"requests": 5_000_000, "swing": 0.8, "lengths": fleet.lengths(30, 60)} | day
    reached = [1.0, *itertools.accumulate(kept, lambda a, b: a * b), 0.0]
    counts = [round(10_000 * (a - b)) for a, b in itertools.pairwise(reached)]
    record = Acceptance(5 * sum(counts), 0, 0, tuple(counts))
    accepted = pd.DataFrame({"gamma": [5], "record": [record]})
    return fleet.setting(planted(), accepted, names, Day(**day), 16, 1000, tpot_steps)


def test_day_is_sized_by_hour_and_drawn():
    setting = settled()
    hours = fleet.hourly(setting, 800)
    assert len(hours) == 3 * 24
    by_policy = {name: part["replicas"].tolist() for name, part in hours.groupby("policy")}
    for sizes in by_policy.values():
        assert sizes == sizes[::-1]  # a day is as long in rising as in falling
        assert sizes[0] < sizes[12]
    assert all(a <= b for a, b in zip(by_policy["goodput"], by_policy["plain"], strict=True))
    share = 1 - sum(by_policy["goodput"]) / sum(by_policy["plain"])
    assert fleet.saved(hours, "goodput") == pytest.approx(share)
    assert share > 0.1
    assert fleet.saved(hours, "plain") == 0
    assert fleet.peak(hours, "plain") == max(by_policy["plain"])
    replicas = fleet.peak(hours, "goodput")
    at_peak, requests = fleet.busiest(setting, 800, replicas)
    met = at_peak.set_index("policy")
    assert met.loc["goodput", "latency/tpot_p95_ms"] <= 1e3 * setting.tpot_s
    assert met.loc["plain", "latency/tpot_p95_ms"] > 1e3 * setting.tpot_s
    assert (met["latency/e2e_p50_ms"] <= met["latency/e2e_p99_ms"]).all()
    rate = setting.day.rates().max()
    assert met.loc["goodput", "throughput/req_s"] == pytest.approx(rate, rel=0.1)
    far = dataclasses.replace(setting, ttft_s=9, tpot_s=9)
    for figure in (
        fleet_day.paces(setting, fleet.pace_table(setting), "goodput"),
        fleet_day.paces(far, fleet.pace_table(far), "always:3"),
        fleet_day.over_the_day(hours, "goodput"),
        under_load.latencies(
            requests, fleet_day.peak_title(at_peak, replicas), tpot=1e3 * setting.tpot_s
        ),
    ):
        assert figure.get_suptitle().startswith("SIMULATED")
        assert figure.get_tightbbox().height < 6


def test_costs_of_a_setting_are_those_of_all_draft_tokens():
    """The paces are of those that are made."""
    table = dataclasses.replace(planted(), about=planted().about | {"passes": "native"})
    records = [Acceptance(share * 10, 0, 0, (1, 1, 0, 0, 0, 8)) for share in (2, 5)]
    half, all_made = (
        fleet.setting(table, pd.DataFrame({"gamma": [5], "record": [record]}),
                      ("plain", "always:5"), Day(10, 0, LENGTHS), 4, 1000, 1.4)
        for record in records
    )  # fmt: skip
    assert half.costs is table
    assert half.paces["plain"] == all_made.paces["plain"]
    assert half.paces["always:5"][3].tokens_s > all_made.paces["always:5"][3].tokens_s


def test_day_has_the_rates_of_its_hours():
    drawn = day(60_000 / 86400, 60_000, LENGTHS, 3, 0.7)
    counts, _ = np.histogram(drawn.at_s, 24, (0, 86400))
    wanted = 3600 * Day(60_000, 0.7, LENGTHS).rates()
    assert wanted.sum() == pytest.approx(60_000)
    assert np.abs(counts - wanted).max() < 5 * wanted.max() ** 0.5


def test_policy_that_misses_the_limits_is_shown_so():
    setting = settled(1.3, kept=(0.1,) * 5)
    hours = fleet.hourly(setting, 200)
    assert hours[hours["policy"] == "always:3"]["replicas"].isna().all()
    assert fleet.saved(hours, "goodput") >= 0
    figure = fleet_day.over_the_day(hours, "always:3")
    assert "SIMULATED day: always:3 misses the limits with any number" in figure.get_suptitle()
    [key] = figure.legends
    assert "misses the limits" in key.texts[1].get_text()
    with pytest.raises(UserError, match="raise the limits"):
        fleet.peak(hours, "always:3")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: settled(names=("goodput",)), "name plain, too"),
        (lambda: fleet.hourly(settled(0.5), 50), "plain misses the limits on an idle replica"),
        (lambda: day(-1, 5, LENGTHS, 0), "rate is -1; use 1e-6 to 1e6"),
        (lambda: paces_of(planted(), "always:9", KEPT, 4, 64), "use 0 to 5 here"),
        (lambda: paces_of(planted(), "sometimes", KEPT, 4, 64), "is unknown"),
    ],
)  # fmt: skip
def test_bad_fleet_input_is_one_line(call, said):
    with pytest.raises(UserError, match=said) as e:
        call()
    assert "\n" not in str(e.value)
