"""Arrivals follow their laws and their seeds; traces are read as they were written."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.traces import triples, write_csv

from specexp.errors import UserError
from specexp.serving.arrivals import COLUMNS, Closed, Lengths, bursty, day, parse, read_csv

LENGTHS = Lengths()


def gaps(arrivals):
    return np.diff(arrivals.at_s, prepend=0.0)


@pytest.mark.parametrize("rate", [0.5, 20.0])
@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gaps_have_the_requested_rate_and_burstiness(rate, cv):
    found = gaps(bursty(rate, 20_000, LENGTHS, seed=1, cv=cv))
    assert found.mean() == pytest.approx(1 / rate, rel=5 * cv / 20_000**0.5)
    assert found.std() / found.mean() == pytest.approx(cv, rel=0.15)


def test_arrivals_follow_from_the_seed():
    for make in (bursty, day):
        first, again, other = (triples(make(3, 50, LENGTHS, seed)) for seed in (4, 4, 5))
        assert first == again
        assert first != other


def test_day_follows_its_curve():
    found = day(10, 40_000, LENGTHS, seed=2, swing=0.8).at_s
    assert (np.diff(found) >= 0).all()
    counts, edges = np.histogram(found, 8, (0, 4000))
    middle = (edges[1:] + edges[:-1]) / 2
    width = np.diff(edges)[0]
    smooth = np.sinc(1 / 8)  # what averaging over an eighth of the day leaves of the swing
    wanted = 10 * width * (1 - 0.8 * smooth * np.cos(2 * np.pi * middle / 4000))
    assert np.abs(counts - wanted).max() < 6 * wanted.max() ** 0.5


def test_lengths_have_their_medians_and_bounds():
    prompts, outputs = LENGTHS.draw(20_000, np.random.default_rng(0))
    assert np.median(prompts) == pytest.approx(60, abs=2)
    assert np.median(outputs) == pytest.approx(40, abs=2)
    assert prompts.min() >= 1
    assert prompts.max() <= 400
    assert {a[1:] for a in triples(bursty(1, 9, Lengths(7, 5, 0.0), 0))} == {(7, 5)}


def test_trace_round_trip(tmp_path):
    made = triples(bursty(5, 40, LENGTHS, 0, 2.0))
    write_csv(tmp_path / "t.csv", made)
    again = triples(read_csv(tmp_path / "t.csv"))
    assert [a[1:] for a in again] == [a[1:] for a in made]
    start = made[0][0]
    assert [a[0] for a in again] == pytest.approx([a[0] - start for a in made], abs=2e-3)
    assert triples(parse(f"trace:{tmp_path / 't.csv'}", 7)) == again[:7]


def test_failed_requests_of_a_trace_are_left_out(tmp_path):
    file = tmp_path / "t.csv"
    file.write_text(",".join(COLUMNS) + "\n5,GPT-4,10,0,10,API log\n7,ChatGPT,9,3,12,API log\n")
    assert triples(read_csv(file)) == [(0.0, 9, 3)]


def test_trace_with_a_byte_order_mark_is_read(tmp_path):
    file = tmp_path / "t.csv"
    file.write_bytes(("\ufeff" + ",".join(COLUMNS) + "\r\n\r\n5,m,9,3,12,l\r\n").encode())
    assert triples(read_csv(file)) == [(0.0, 9, 3)]
    with open(file, "a") as out:
        out.write("x,m,9,3,12,l\r\n")
    with pytest.raises(UserError, match=":4: not a request"):
        read_csv(file)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["x,m,1,2,3,l"], ":2: not a request"),
        (["1,m,1,2,3,l", "0.5,m,1,2,3,l"], ":3: is earlier than"),
        (["1,m,-1,2,3,l"], ":2: times and tokens must be finite"),
        (["nan,m,1,2,3,l"], ":2: times and tokens must be finite"),
        (["1,m"], ":2: not a request"),
        ([], "no request"),
        (["1,m,0.5,2,3,l"], "no request"),
        (["x" * 200_000], "cannot read the trace"),
    ],
    ids=["text", "order", "negative", "nan", "short", "empty", "less than a token", "no table"],
)
def test_bad_trace_is_one_line_with_file_and_line(tmp_path, lines, message):
    file = tmp_path / "t.csv"
    file.write_text("\n".join([",".join(COLUMNS), *lines]))
    with pytest.raises(UserError, match=message) as e:
        read_csv(file)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "load",
    ["closed:0", "closed:x", "poisson:", "poisson:-1", "poisson:inf", "bursty:2,0", "day:0",
     "day:1e-310", "bursty:4,1e-200", "bursty:4,1e200", "trace:/nowhere.csv", "steady:3", ""],
)  # fmt: skip
def test_bad_load_is_one_line(load):
    with pytest.raises(UserError) as e:
        parse(load, 5)
    assert "\n" not in str(e.value)


@settings(max_examples=30)
@given(st.integers(1, 99), st.integers(1, 60), st.floats(0.01, 100), st.floats(0.3, 4))
def test_load_names(streams, count, rate, cv):
    assert parse(f"closed:{streams}", count) == Closed(streams)
    for load, same in {
        f"poisson:{rate}": bursty(rate, count, LENGTHS, 3),
        f"bursty:{rate},{cv}": bursty(rate, count, LENGTHS, 3, cv),
    }.items():
        assert triples(parse(load, count, 3)) == triples(same)
    assert len(parse(f"day:{rate}", count, 3)) == count


def test_shipped_traces_are_reproducible(tmp_path):
    from pathlib import Path

    folder = Path(__file__).resolve().parents[2] / "data" / "traces"
    made = {"burst": bursty(2, 300, LENGTHS, 0, 3.0), "day": day(2, 300, LENGTHS, 0)}
    for name, arrivals in made.items():
        write_csv(tmp_path / name, triples(arrivals))
        assert (folder / f"{name}.csv").read_text() == (tmp_path / name).read_text()
