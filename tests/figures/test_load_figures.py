"""Figures of serving under load say what their tables say."""

import itertools

import pandas as pd
import pytest
from support.served import ANSWERS, TICKS, run_of, samples, tick

from specexp import figures
from specexp.measure import under_load


def drawn_of(axes) -> dict[str, list[float]]:
    return {bars.get_label(): pytest.approx(bars.lines[0].get_ydata()) for bars in axes.containers}


def drawn(figure, folder) -> str:
    figure.savefig(folder / "figure.png")
    return figure.get_suptitle()


def test_closed_loops_title_matches_its_table(tmp_path):
    few = samples(plain=[(1, 10)] * 3, **{"always:3": [(1, 20)] * 3, "goodput": [(1, 19)] * 3})
    more = samples(plain=[(1, 80)] * 3, **{"always:3": [(1, 40)] * 3, "goodput": [(1, 77)] * 3})
    both = pd.concat([few.assign(load=1), more.assign(load=9)])
    figure = figures.under_load.closed_loops(under_load.rates(both), under_load.regrets(both))
    assert drawn(figure, tmp_path) == (
        "always:3: 2.00x with 1 and 0.50x with 9 streams; "
        "at worst, against the best fixed policy: goodput 5% [5, 5] lost"
    )
    rate, ratio, regret = figure.axes
    assert drawn_of(rate) == {"plain": [10, 80], "always:3": [20, 40], "goodput": [19, 77]}
    assert [list(bars.lines[0].get_ydata()) for bars in ratio.containers] == [
        [2.0, 0.5], pytest.approx([1.9, 77 / 80])
    ]  # fmt: skip
    assert len(regret.containers) == 1
    for name in ("bandit", "mine:Cautious", "always_mine:Cautious"):  # one's own is load-aware, too
        aware = pd.concat([both, both[both["policy"] == "goodput"].assign(policy=name)])
        figure = figures.under_load.closed_loops(under_load.rates(aware), under_load.regrets(aware))
        assert f"goodput 5% [5, 5] lost, {name} 5% [5, 5] lost" in drawn(figure, tmp_path)
        assert len(figure.axes[2].containers) == 2
    for axes in figure.axes[:2]:  # intervals at one load do not hide each other
        places = [bars.lines[0].get_xdata()[0] for bars in axes.containers]
        assert len(set(places)) == len(places)
        assert places == pytest.approx([1] * len(places), rel=0.2)
    fixed = both[both["policy"] != "goodput"]
    title = drawn(
        figures.under_load.closed_loops(under_load.rates(fixed), under_load.regrets(fixed)),
        tmp_path,
    )
    assert title == "always:3: 2.00x with 1 and 0.50x with 9 streams"
    one = fixed[fixed["load"] == 9]
    title = drawn(
        figures.under_load.closed_loops(under_load.rates(one), under_load.regrets(one)), tmp_path
    )
    assert title == "always:3: 0.50x with 9 streams"


def test_the_largest_regret_has_the_interval_that_is_logged_and_below_zero_is_a_gain(tmp_path):
    rates = pd.DataFrame({"load": [1, 8], "policy": "goodput", "tok_s": 1.0, "speedup": 1.0,
                          "low": 1.0, "high": 1.0, "doubt": ""})  # fmt: skip
    regrets = pd.DataFrame({"load": [1, 8], "policy": "goodput", "regret": [0.05, 0.04],
                            "low": [0.01, 0.02], "high": [0.06, 0.3]})  # fmt: skip
    assert drawn(figures.under_load.closed_loops(rates, regrets), tmp_path).endswith(
        "goodput 5% [2, 30] lost"
    )
    faster = regrets.assign(regret=-0.12, low=-0.24, high=0.01)
    assert drawn(figures.under_load.closed_loops(rates, faster), tmp_path).endswith(
        "goodput 12% [-1, 24] gained"
    )
    served = pd.DataFrame({"policy": ["goodput"]})
    logged, _ = under_load.metrics(rates.assign(speculated=0.0), regrets, served, "goodput")
    assert [logged[f"regret/worst{end}"] for end in ("", "_low", "_high")] == [0.05, 0.02, 0.3]


@pytest.mark.parametrize(
    ("second", "words"),
    [(1.3, "1.50x at one stream, faster up to 2 streams"), (1.8, "at one stream, 1.80x at best, ")],
)
def test_title_of_a_replica_says_its_best_once(second, words):
    paces = [("plain", 1, 1.0), ("plain", 2, 1.0), ("goodput", 1, 1.5), ("goodput", 2, second)]
    table = pd.DataFrame(paces, columns=["policy", "streams", "tok_s"])
    assert words in figures.fleet_day._paying(table, "goodput")
    assert "plain decoding: 1.00x" not in figures.fleet_day._paying(table, "goodput")


def test_timelines_title_names_first_and_last(tmp_path):
    slow, fast = [*TICKS, tick(5.0, 31.0, live=1)], TICKS
    tables = {"plain": under_load.timeline(slow), "goodput": under_load.timeline(fast)}
    title, once = drawn(figures.under_load.timelines(tables), tmp_path).split("\n")
    assert title == "The same arrivals: all answered after 5 s under goodput, 31 s under plain"
    assert once == "No intervals: each policy served them once"
    spans = [axes.get_xlim() for axes in figures.under_load.timelines(tables).axes]
    assert spans == [(0, 31)] * 4, "one time, also where nothing was drafted at first"
    idle = {"plain": under_load.timeline([tick(0.0, 1.0, live=1)])}
    waiting = figures.under_load.timelines(idle).axes[1]
    ticks = [text.get_text() for text in waiting.get_yticklabels()]
    assert set(ticks) == {"0", "1"}, "requests are whole, also where none waits"
    del tables["plain"]
    title, _ = drawn(figures.under_load.timelines(tables), tmp_path).split("\n")
    assert title == "The same arrivals: all answered after 5 s under goodput"


def test_limits_are_said_of_every_policy(few):
    served = under_load.by_policy(
        {"plain": run_of(ANSWERS, TICKS), "goodput": run_of(ANSWERS[1:2], TICKS)}, 500, 1
    )
    words = figures.under_load.within_limits(served)
    assert words == "Requests within the limits: goodput 100%, plain 20%"


def test_latencies_are_the_share_of_requests_answered_within(tmp_path):
    runs = {"plain": run_of(ANSWERS, TICKS), "goodput": run_of(ANSWERS[1:2], TICKS)}
    both = under_load.answered_requests(runs)
    figure = figures.under_load.latencies(both, "title", tpot=50)
    assert drawn(figure, tmp_path) == "title"
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["", "limit 50 ms", ""]
    figure = figures.under_load.latencies(both, "title", tpot=50.12345)
    assert figure.axes[1].get_title(loc="left") == "limit 50.1 ms"
    plain = figure.axes[0].lines[0]
    assert list(plain.get_xdata()) == sorted(1e3 * both.query("policy == 'plain'")["ttft_s"])
    assert plain.get_ydata()[-1] == 1
    assert figure.axes[0].lines[1].get_label() == "goodput, n = 1"


@pytest.mark.parametrize("widest", [1.3, 4, 30, 400, 1e3, 3e5])
def test_numbers_on_an_axis_of_times_are_apart(widest):
    times = [0.03, 0.03 * widest]
    table = pd.DataFrame({"policy": "plain", "ttft_s": times, "tpot_s": times, "e2e_s": times})
    figure = figures.under_load.latencies(table, "title")
    figure.canvas.draw()
    for axes in figure.axes:
        boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
        assert len(boxes) > 1
        assert all(a.x1 < b.x0 for a, b in itertools.pairwise(boxes))


def test_simulated_figure_says_simulated(tmp_path):
    compared = pd.DataFrame({
        "policy": ["plain", "goodput"] * 2, "figure": ["tokens/s"] * 2 + ["TTFT p95 (ms)"] * 2,
        "real": [100.0, 200.0, 50.0, 80.0], "simulated": [110.0, 190.0, 50.0, 60.0],
    })  # fmt: skip
    figure = figures.under_load.simulated(compared)
    assert drawn(figure, tmp_path) == (
        "SIMULATED against real: 8% off in the median, at worst 25% (TTFT p95 (ms), goodput)\n"
        "No intervals: each point is one run of all requests"
    )
    assert [a.get_ylabel() for a in figure.axes] == [
        "SIMULATED tokens/s", "SIMULATED TTFT p95 (ms)"
    ]  # fmt: skip
    dots = [tuple(d) for a in figure.axes for c in a.collections[:2] for d in c.get_offsets()]
    assert dots == [(100, 110), (200, 190), (50, 50), (80, 60)]


def test_servers_figure_says_where_drafting_stops_paying(tmp_path):
    rates = pd.DataFrame({
        "load": [1, 8], "speedup": [1.5, 0.8], "low": [1.2, 0.7], "high": [1.9, 0.9], "doubt": "",
        "tok_s": [150.0, 640.0], "plain_tok_s": [100.0, 800.0], "ttft_ms": [30.0, 60.0],
        "plain_ttft_ms": [25.0, 45.0], "tpot_ms": [7.0, 12.0], "plain_tpot_ms": [10.0, 10.0],
    })  # fmt: skip
    figure = figures.under_load.servers(rates)
    assert drawn(figure, tmp_path) == (
        "1.50x [1.20, 1.90] at load 1; stops paying between load 1 and 8\n"
        "No intervals: plain decoding, TTFT and TPOT"
    )
    assert drawn_of(figure.axes[0]) == {"drafting": [150, 640]}
    assert list(figure.axes[3].lines[0].get_ydata()) == [7, 12]
