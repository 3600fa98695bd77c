"""Arms take turns, and only the turns are timed."""

import pytest
import torch

from specexp.measure import interleave

CPU = torch.device("cpu")


def test_medians_are_seen_as_they_come(now, capsys):
    def slow(item):
        now.s += item

    interleave.time_in_turns({("ours", "slow"): slow, "copy": float}, [2, 2], CPU, "test")
    assert "ms: ours slow 2,000.00, copy" in capsys.readouterr().err


def test_arms_alternate_in_reversed_order(now):
    called = []

    def arm(name, cost):
        def call(item):
            called.append((name, item))
            now.s += cost
            return f"{name}{item}"

        return call

    turns = interleave.time_in_turns({"a": arm("a", 2), "b": arm("b", 1)}, [1, 2, 3], CPU, "test")
    assert called[:2] == [("a", 1), ("b", 1)]  # warm-up
    assert [name for name, _ in called[2:]] == ["b", "a", "a", "b", "b", "a"]
    assert [turn.result for turn in turns["a"]] == ["a1", "a2", "a3"]
    assert interleave.seconds(turns["a"]) == [2, 2, 2]
    assert interleave.ratio(turns["a"], turns["b"], 3)[:3] == pytest.approx((6, 6, 6))


def test_interval_of_a_ratio_is_never_negative():
    one, other = ([interleave.Turn(s, None) for s in seconds] for seconds in ((1, 9), (4, 2)))
    found = interleave.ratio(one, other)
    assert 0 < found.low < found.value < found.high


def test_lead_calls_are_not_timed(now):
    def arm(_):
        now.s += 1

    turns = interleave.time_in_turns({"a": arm}, [0, 0], CPU, "test", lead=2)
    assert interleave.seconds(turns["a"]) == [1, 1]
    assert now.s == 9


def test_warm_up_items_are_not_counted():
    called = []
    turns = interleave.time_in_turns({"a": called.append}, [3, 4, 3, 4], CPU, "test", warm=[4, 3])
    assert called == [4, 3, 3, 4, 3, 4]
    assert len(turns["a"]) == 4
