"""Two reports of `specexp bench` are compared by ratio."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from specexp.errors import UserError
from specexp.figures import hardware
from specexp.measure.hardware import regression, work

MEASURED = Path(__file__).parents[2] / "data" / "measurements"


def as_json(value: float, off: float = 0.0) -> dict[str, float]:
    return {"value": value, "low": value - off, "high": value + off}


def figures(**ratios: dict[str, float]) -> dict:
    """A report of these ratios, the others as they usually are."""
    sides = {side: {"overhead": as_json(0.16, 0.02)} for side in ("plain", "fast")}
    sides["fast"]["overhead"] = ratios.get("overhead", sides["fast"]["overhead"])
    peer = {"work": "plain", "batch": 1, "ratio": ratios.get("peer", as_json(3.0, 0.1))}
    step = {"model": "m", "tokens": 4, "over_bare": as_json(0.6, 0.1),
            "over_step": ratios.get("step", as_json(1.1, 0.02))}  # fmt: skip
    speedup = {"measured": as_json(1.5, 0.1)}
    return {
        "about": {"device": "this"},
        "suites": {
            "peers": {"rows": [peer, peer | {"work": "draft", "ratio": None}]},
            "roofline": {"rows": [step]},
            "round": sides | {"speedup": speedup},
        },
    }


@pytest.mark.parametrize(
    ("now", "worse", "better"),
    [
        ({}, None, None),
        ({"peer": as_json(2.5, 0.1)}, "peers: plain, batch 1", None),
        ({"peer": as_json(2.7, 0.1)}, None, None),  # apart, by less than the margin
        ({"peer": as_json(2.5, 0.5)}, None, None),  # too uncertain
        ({"peer": as_json(4.0, 0.1)}, None, "peers: plain, batch 1"),
        ({"step": as_json(1.3, 0.02)}, "pass: m, 4 tokens / one", None),
        ({"step": as_json(1.0, 0.01)}, None, "pass: m, 4 tokens / one"),
        ({"overhead": as_json(0.3, 0.01)}, "round: fast, share inside passes", None),
    ],
)
def test_ratio_is_worse_when_intervals_are_disjoint(now, worse, better):
    compared = regression.changes(figures(), figures(**now))
    assert len(compared) == 6
    assert [c.what for c in compared if c.worse] == ([worse] if worse else [])
    assert [c.what for c in compared if c.better] == ([better] if better else [])


@pytest.mark.parametrize("then", [0.0, -0.02, 0.001])
def test_overheads_near_zero_do_not_look_worse(then):
    """A margin of theirs would be none, or on the wrong side."""
    before, after = (figures(overhead=as_json(x, 0.004)) for x in (then, then + 0.01))
    compared = [*regression.changes(before, after), *regression.changes(before, before)]
    assert not any(change.worse or change.better for change in compared)


@pytest.mark.parametrize("alone", [as_json(3.0, 0.1), None])
def test_two_peer_rows_at_batch_one_stay_apart(alone):
    report = figures(peer=alone)
    plain = report["suites"]["peers"]["rows"][0]
    report["suites"]["peers"]["rows"].append(plain | {"ratio": as_json(1.0, 0.1)})
    compared = regression.changes(report, report)
    assert not any(change.worse or change.better for change in compared)
    names = [change.what for change in compared if "peers" in change.what]
    assert names == ["peers: plain, batch 1"] * bool(alone) + ["peers: plain, batch 1, together"]


def test_model_names_are_not_read_as_markup():
    report = figures()
    report["suites"]["roofline"]["rows"][0]["model"] = "[bold]m[/]"
    console = Console(width=200, record=True)
    with console.capture() as printed:
        console.print(hardware.changed(regression.changes(report, report), report, report))
    assert "pass: [bold]m[/], 4 tokens / one" in printed.get()


def test_committed_reports_can_be_compared():
    for file in ("bench.json", "bench_bfloat16.json"):
        report = json.loads((MEASURED / file).read_text())
        again = regression.read(MEASURED / file, report["parameters"], work.NAMES)
        compared = regression.changes(report, again)
        assert len(compared) == 14
        assert not any(change.worse or change.better for change in compared)


def test_report_of_other_suites_is_refused(tmp_path):
    file = tmp_path / "then.json"
    options = dict.fromkeys(regression.MUST_MATCH, 1)
    file.write_text(json.dumps({"parameters": options, "suites": {"scale": {}, "peers": {}}}))
    with pytest.raises(UserError, match="none of the suites"):
        regression.read(file, options, ["scale", "round"])
    assert regression.read(file, options, ["peers"])
