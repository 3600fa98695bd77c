"""The fleet simulator against exact arithmetic, queueing theory, and the server it stands for."""

import dataclasses
import itertools
import math
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.cost_tables import planted, rough
from support.traces import requests, triples

from specexp.errors import UserError
from specexp.figures import fleet_day, under_load
from specexp.measure.under_load import answered
from specexp.measure.under_load import fleet_day as fleets
from specexp.measure.under_load.fleet_day import Day, Setting
from specexp.serving import policies
from specexp.serving.arrivals import Arrivals, Lengths, bursty, day
from specexp.serving.fleet import Limits, Pace, pace, simulate, size
from specexp.serving.server import Server
from specexp.serving.simulated_rows import SimulatedRows
from specexp.serving.sources import Source, serve
from specexp.trace import Acceptance

KEPT = (0.8, 0.75, 0.7, 0.6, 0.6)
LENGTHS = Lengths(prompt=30, output=60, most=200)


def even(rates, round_=0.0, over=0.0, spread=0.0) -> Pace:
    """A pace of these tokens a second at 1, 2, ... streams."""
    many = len(rates) + 1
    return Pace("even", [0] * many, [0.0, *rates], [round_] * many, [over] * many, [spread] * many)


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

    @property
    def load(self):
        return len(self.streams) + len(self.waiting)


small = st.fractions(Fraction(1, 8), 4, max_denominator=8)
tiny_case = st.fixed_dictionaries({
    "gaps": st.lists(st.fractions(0, 5, max_denominator=16), min_size=1, max_size=9),
    "rates": st.lists(small, min_size=1, max_size=4),
    "round": st.sampled_from([Fraction(0), Fraction(1), Fraction(5, 2)]),
    "over": st.sampled_from([Fraction(0), Fraction(1, 2)]),
    "replicas": st.integers(1, 3),
    "data": st.randoms(use_true_random=False),
})  # fmt: skip


@settings(max_examples=300)
@given(tiny_case)
def test_times_match_exact_arithmetic(case):
    rates, rng = [Fraction(0), *case["rates"]], case["data"]
    at = [t + Fraction(i, 997) for i, t in enumerate(itertools.accumulate(case["gaps"]))]
    tokens = [rng.randint(1, 9) for _ in at]
    prompts = [rng.randint(0, 3) for _ in at]
    read = Fraction(1, 3)
    fleet = [Exact(rates, case["round"], case["over"], len(rates) - 1)
             for _ in range(case["replicas"])]  # fmt: skip
    where = []
    for i, now in enumerate(at):
        for replica in fleet:
            replica.run(now)
        loads = [replica.load for replica in fleet]
        where.append(loads.index(min(loads)))
        fleet[where[-1]].come(i, tokens[i], read * prompts[i])
    first, end = {}, {}
    for replica in fleet:
        replica.run(None)
        first |= replica.first
        end |= replica.end
    moments = {*end.values(), *first.values()}
    assume(all(abs(a - t) > 1e-6 for a in at for t in moments))  # no ties by rounding
    served = simulate(
        arrivals(at, prompts, tokens),
        even([float(r) for r in rates[1:]], float(case["round"]), float(case["over"])),
        lambda p: float(read * int(p)), case["replicas"],
    )  # fmt: skip
    order = range(len(at))
    assert served.replica.tolist() == where
    assert served.e2e_s == pytest.approx([float(end[i] - at[i]) for i in order])
    assert served.ttft_s == pytest.approx([float(first[i] - at[i]) for i in order])
    for i in order:
        if tokens[i] > 1:
            further = float(end[i] - first[i]) / (tokens[i] - 1)
            assert served.tpot_s[i] == pytest.approx(further, abs=1e-12)
        else:
            assert math.isnan(served.tpot_s[i])


def test_idle_replica_prefills_then_decodes():
    """Three tokens a round of 0.3 s: the first round ends 0.3 s after the prompt is read, and
    seven tokens are written as 8 of 10 a second, one being too many."""
    served = simulate(arrivals([5], [4], [7]), even([10], 3, 1), lambda p: p / 8, 1)
    assert served.ttft_s[0] == pytest.approx(0.5 + 0.3)
    assert served.e2e_s[0] == pytest.approx(0.5 + 0.8)
    assert served.tpot_s[0] == pytest.approx(0.5 / 6)
    assert served.busy_s[0] == served.stream_s[0] == pytest.approx(1.3)


def test_prefill_stalls_all_streams():
    """The second comes when the first has 4 of its 10 tokens, and takes 2 s to read."""
    served = simulate(arrivals([0, 4], [0, 1], [10, 3]), even([1, 1]), lambda p: 2 * p, 1)
    assert served.e2e_s.tolist() == pytest.approx([12, 5])
    assert served.ttft_s.tolist() == pytest.approx([0, 2])


# --- what must hold for any traffic --------------------------------------------------------------

traffic = st.builds(
    lambda rate, count, seed, cv: bursty(rate, count, LENGTHS, seed, cv),
    st.floats(0.5, 200), st.integers(1, 300), st.integers(0, 99), st.floats(0.5, 3),
)  # fmt: skip


@settings(max_examples=40)
@given(traffic, st.integers(1, 6), st.integers(1, 8))
def test_all_tokens_are_served_once(offered, replicas, rows):
    """At 100 tokens a second a replica whoever shares them, busy seconds count the tokens."""
    shared = even([100 / b for b in range(1, rows + 1)])
    served = simulate(offered, shared, free, replicas, seed=3)
    assert 100 * served.busy_s.sum() == pytest.approx(offered.output.sum())
    for r in range(replicas):
        mine = served.replica == r
        assert 100 * served.busy_s[r] == pytest.approx(offered.output[mine].sum())
        if rows >= mine.sum():  # nobody waits: all the time here is a stream's
            assert served.stream_s[r] == pytest.approx(served.e2e_s[mine].sum())
    assert (served.ttft_s >= -1e-9).all()
    assert (served.e2e_s >= offered.output / 100 - 1e-9).all()
    assert (served.e2e_s >= served.ttft_s).all()


@settings(max_examples=30)
@given(traffic, st.integers(1, 4), st.integers(1, 5))
def test_equal_requests_end_in_order(offered, replicas, rows):
    offered = Arrivals(offered.at_s, np.full(len(offered), 7), np.full(len(offered), 40))
    served = simulate(offered, even([90 / b**0.5 for b in range(1, rows + 1)], 2.0),
                      lambda p: p / 1000, replicas)  # fmt: skip
    for r in range(replicas):
        mine = served.replica == r
        assert (np.diff((offered.at_s + served.e2e_s)[mine]) > -1e-9).all()
        assert (np.diff((offered.at_s + served.ttft_s)[mine]) > -1e-9).all()
    assert (served.ttft_s >= 7 / 1000).all()


@settings(max_examples=20)
@given(traffic, st.integers(1, 4))
def test_times_scale_with_the_machine(offered, replicas):
    table = pace(planted(), "goodput", KEPT, 12, 100, 30, 60)
    slow = Pace(table.name, table.gamma, [x / 2 for x in table.tokens_s], table.round, table.over,
                table.spread)  # fmt: skip
    one = simulate(offered, table, lambda p: p / 512, replicas)
    two = simulate(Arrivals(2 * offered.at_s, offered.prompt, offered.output), slow,
                   lambda p: p / 256, replicas)  # fmt: skip
    assert (two.replica == one.replica).all()
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
    served = simulate(offered, even([1 / b for b in range(1, 1000)]), free, 1)
    batches = served.e2e_s.reshape(25, -1).mean(axis=1)
    error = batches.std(ddof=1) / 5
    assert error < 0.04 / (1 - rho)
    assert abs(served.e2e_s.mean() - 1 / (1 - rho)) < 4 * error
    assert served.busy_s[0] / served.seconds == pytest.approx(rho, rel=0.03)


@pytest.mark.parametrize("gamma", [1, 3, 5])
def test_rounds_match_renewal_theory(gamma):
    """Against the exact law of the number of rounds, by dynamic programming."""
    costs = planted()
    reading = dataclasses.replace(costs, about=costs.about | {"reads": True})
    table, plain_first = (pace(c, f"always:{gamma}", KEPT, 1, 64) for c in (costs, reading))
    assert plain_first.over[1] == pytest.approx(table.over[1] + table.round[1] - 1)
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
    assert table.round[1] == pytest.approx(sum(at_least))
    assert mean * table.round[1] == pytest.approx(new + table.over[1], rel=1e-6)
    spread = math.sqrt(square - mean**2) * table.round[1]
    assert spread == pytest.approx(table.spread[1] * math.sqrt(new), rel=0.03)


# --- the server ----------------------------------------------------------------------------------


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize(
    ("name", "rate"), [("plain", 8), ("plain", 22), ("always:3", 20), ("goodput", 8)]
)
def test_one_replica_matches_the_simulated_server(name, rate, reads):
    costs, rows = planted(slot=0), 16
    costs = dataclasses.replace(costs, about=costs.about | {"reads": reads})
    offered = bursty(rate, 700, LENGTHS, 1)
    policy = policies.of("never" if name == "plain" else name, costs, 5)
    bank = SimulatedRows(costs, lambda _: KEPT, rows, 500, policy.widest)
    server = Server(bank, policy, queue=len(offered))
    table = answered(serve(server, Source(requests(triples(offered)))))
    fluid = simulate(
        offered, pace(costs, name, KEPT, rows, 128, offered.prompt.mean(), offered.output.mean()),
        costs.prefill_s, 1,
    )  # fmt: skip
    real = {key: table[f"{key}_s"].quantile([0.5, 0.95]).tolist() for key in ("tpot", "e2e")}
    for key, wanted in real.items():
        found = np.nanquantile(getattr(fluid, f"{key}_s"), [0.5, 0.95])
        assert found == pytest.approx(wanted, rel=0.1), key
    assert fluid.ttft_s.mean() == pytest.approx(table["ttft_s"].mean(), rel=0.2)
    assert fluid.seconds == pytest.approx(server.steps[-1].end_s - offered.at_s[0], rel=0.02)


# --- paces ---------------------------------------------------------------------------------------


def test_pace_is_tokens_over_round_time():
    costs = planted()
    plain, three = (pace(costs, n, KEPT, 8, 64, 16, 50) for n in ("plain", "always:3"))
    tokens = 1 + 0.8 + 0.8 * 0.75 + 0.8 * 0.75 * 0.7
    for b in range(1, 9):
        assert plain.tokens_s[b] == pytest.approx(1 / costs.step_s(b, 64))
        reading = b * tokens / 50 * costs.catch_up_s(16)
        assert three.tokens_s[b] == pytest.approx(tokens / (costs.round_s(b, 3, 64) + reading))
        assert (plain.round[b], plain.over[b], plain.spread[b]) == (1, 0, 0)
    assert set(three.gamma) == {3}


@pytest.mark.parametrize("make", [planted, rough])
@given(st.integers(0, 30), st.floats(0, 1), st.integers(0, 200), st.integers(1, 100))
def test_goodput_pace_is_the_best_at_every_load(make, seed, alpha, prompt, output):
    costs = make() if make is planted else make(seed)
    given_ = [alpha] * 5, 20, 90, prompt, output
    best = pace(costs, "goodput", *given_)
    for name in ("plain", "always:1", "always:2", "always:3", "always:5", "threshold:3,4"):
        other = pace(costs, name, *given_)
        assert all(a >= b for a, b in zip(best.tokens_s, other.tokens_s, strict=True)), name


def test_pace_of_threshold_and_table():
    assert pace(planted(), "threshold:3,4", KEPT, 6, 64).gamma[1:] == [3, 3, 3, 3, 0, 0]
    assert pace(planted(), "table:1=5,3=1", KEPT, 4, 64).gamma[1:] == [5, 5, 1, 1]


# --- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "name"),
    [(Limits(0.2, 0.0075), "plain"), (Limits(0.05, 1.0), "goodput"), (Limits(9, 9), "plain")],
)
def test_size_is_the_fewest_that_keep_the_limits(limits, name):
    costs = planted()
    offered = bursty(150, 1500, LENGTHS, 5)
    table = pace(costs, name, KEPT, 16, 90, 30, 70)

    def kept(replicas):
        return limits.kept(simulate(offered, table, costs.prefill_s, replicas))

    for near in (1, 13):
        found = size(offered, table, costs.prefill_s, limits, near=near)
        assert kept(found)
        assert found == 1 or not kept(found - 1)


def test_goodput_needs_no_more_replicas():
    costs, limits = planted(), Limits(0.3, 0.0072)
    offered = bursty(150, 1500, LENGTHS, 5)
    found = {
        name: size(offered, pace(costs, name, KEPT, 16, 90, 30, 70), costs.prefill_s, limits)
        for name in ("plain", "goodput", "always:5")
    }
    assert found["goodput"] <= found["always:5"]
    assert found["goodput"] < found["plain"]


@pytest.mark.parametrize("limits", [Limits(0.2, 0.001), Limits(1e-4, 1.0)])
def test_impossible_limits_are_one_line(limits):
    offered = bursty(5, 50, LENGTHS, 0)
    table = pace(planted(), "plain", KEPT, 4, 64)
    with pytest.raises(UserError, match=r"misses the limits on an idle replica.*raise the limits"):
        size(offered, table, planted().prefill_s, limits)


# --- a day -------------------------------------------------------------------------------------


def settled(tpot_steps=1.4, names=("plain", "always:3", "goodput"), kept=KEPT, **day) -> Setting:
    day = {"requests": 5_000_000, "swing": 0.8, "lengths": fleets.lengths(30, 60)} | day
    reached = [1.0, *itertools.accumulate(kept, lambda a, b: a * b), 0.0]
    counts = [round(10_000 * (a - b)) for a, b in itertools.pairwise(reached)]
    record = Acceptance(5 * sum(counts), 0, 0, tuple(counts))
    accepted = pd.DataFrame({"gamma": [5], "record": [record]})
    return fleets.setting(planted(), accepted, names, Day(**day), 16, 1000, tpot_steps)


def test_day_is_sized_by_hour_and_drawn():
    setting = settled()
    hours = fleets.hourly(setting, 800)
    assert len(hours) == 3 * 24
    by_policy = {name: part["replicas"].tolist() for name, part in hours.groupby("policy")}
    for sizes in by_policy.values():
        assert sizes == sizes[::-1]  # a day is as long in rising as in falling
        assert sizes[0] < sizes[12]
    assert all(a <= b for a, b in zip(by_policy["goodput"], by_policy["plain"], strict=True))
    share = 1 - sum(by_policy["goodput"]) / sum(by_policy["plain"])
    assert fleets.saved(hours, "goodput") == pytest.approx(share)
    assert share > 0.1
    assert fleets.saved(hours, "plain") == 0
    assert fleets.peak(hours, "plain") == max(by_policy["plain"])
    days, answers = fleets.whole_day(dataclasses.replace(setting, day=Day(900, 0.5, LENGTHS)), 2)
    assert (days["goodput/share"].between(0, 1)).all()
    assert (days["latency/e2e_p50_ms"] <= days["latency/e2e_p99_ms"]).all()
    far = dataclasses.replace(setting, limits=Limits(9, 9))
    for figure in (
        fleet_day.paces(setting, fleets.pace_table(setting)),
        fleet_day.paces(far, fleets.pace_table(far)),
        fleet_day.over_the_day(hours),
        under_load.latencies(answers, fleet_day.day_title(days, 2)),
    ):
        assert figure.get_suptitle().startswith("SIMULATED")
        assert figure.get_tightbbox().height < 6


def test_day_has_the_rates_of_its_hours():
    day = Day(60_000, 0.7, LENGTHS, seed=3)
    counts, _ = np.histogram(day.whole().at_s, 24, (0, 86400))
    wanted = 3600 * day.rates()
    assert wanted.sum() == pytest.approx(60_000)
    assert np.abs(counts - wanted).max() < 5 * wanted.max() ** 0.5


def test_policy_that_misses_the_limits_is_shown_so():
    setting = settled(1.3, kept=(0.1,) * 5)
    hours = fleets.hourly(setting, 200)
    assert hours[hours["policy"] == "always:3"]["replicas"].isna().all()
    assert fleets.saved(hours, "goodput") >= 0
    [key] = fleet_day.over_the_day(hours).legends
    assert "misses the limits" in key.texts[1].get_text()
    with pytest.raises(UserError, match="raise tpot_steps"):
        fleets.peak(hours, "always:3")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: settled(names=("goodput",)), "name plain, too"),
        (lambda: fleets.hourly(settled(0.5), 50), "plain misses the limits on an idle replica"),
    ],
)
def test_bad_setting_is_one_line(call, said):
    with pytest.raises(UserError, match=said) as e:
        call()
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: day(-1, 5, LENGTHS, 0), "rate is -1; it must be positive"),
        (lambda: pace(planted(), "always:9", KEPT, 4, 64), "this drafter does 0 to 5"),
        (lambda: pace(planted(), "bandit", KEPT, 4, 64), "use goodput"),
        (lambda: pace(planted(), "sometimes", KEPT, 4, 64), "is unknown"),
    ],
)  # fmt: skip
def test_bad_fleet_input_is_one_line(call, said):
    with pytest.raises(UserError, match=said) as e:
        call()
    assert "\n" not in str(e.value)
