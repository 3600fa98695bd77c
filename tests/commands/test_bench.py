"""`specexp bench`: reports, comparisons with earlier ones, and bad input."""

import json
from functools import partial

import pytest
from support.command_line import ran

from specexp.errors import UserError
from specexp.measure import interleave
from specexp.measure.hardware import roofline, suites, work


def test_report_in_a_folder_is_named_by_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(suites, "fingerprint", lambda *_: {"device": "NVIDIA X 9", "dtype": "f8"})
    options = {"device": "cpu", "dtype": "bfloat16", "target": "some/mine"}
    assert suites.report_path(tmp_path, options) == tmp_path / "bench_NVIDIA-X-9_f8_mine.json"
    assert suites.report_path(tmp_path / "x.json", options) == tmp_path / "x.json"
    (tmp_path / "v0.3").mkdir()
    assert suites.report_path(tmp_path / "v0.3", options).parent == tmp_path / "v0.3"


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(roofline, "COPIED", {"cpu": 2**16})
    monkeypatch.setattr(roofline, "PASSES", 2)


@pytest.fixture
def bench(monkeypatch, capsys, tiny_folders, tmp_path):
    """bench("round", "--gamma", "2") -> (exit code, stdout, stderr), on the tiny models."""
    file = tmp_path / "question.jsonl"
    lines = [{"question_id": i, "category": "mine", "turns": [f"text {i}"]} for i in range(2)]
    file.write_text("\n".join(map(json.dumps, lines)))
    usual = ("--target", tiny_folders[0], "--drafter", tiny_folders[1], "--prompts", str(file))

    few = ("--gamma", "2", "--repeats", "1", "--max-new-tokens", "6", "--batches", "1,2")
    return partial(ran, monkeypatch, capsys, "bench", *usual, *few)


def test_bench_writes_json_with_every_suite(bench, tmp_path, tiny_folders):
    out = tmp_path / "new" / "bench.json"
    code, printed, err = bench("--out", str(out))
    assert code == 0, err
    report = json.loads(out.read_text())
    assert list(report["suites"]) == list(work.NAMES)
    assert {"device", "torch", "threads", "dtype", "load", "versions", "warning"} <= set(
        report["about"]
    )
    assert {"torch", "transformers", "python"} <= set(report["about"]["versions"])
    assert report["parameters"]["target"] == tiny_folders[0]
    assert report["parameters"]["batches"] == [1, 2]
    for name in work.NAMES:
        assert f"{name}:" in printed
    first = printed.splitlines()[0]
    assert all(part in first for part in ("cpu", "float32", " thread", "load average"))


def test_bench_json_prints_only_json_and_warns_of_a_busy_machine(bench, monkeypatch):
    monkeypatch.setattr(suites, "doubts", lambda device: ["3 other programs run"])
    code, out, err = bench("roofline", "round", "roofline", "--json")
    assert code == 0, err
    assert err.startswith("warning: 3 other programs run\n")
    report = json.loads(out)
    assert report["about"]["warning"] == "3 other programs run"
    assert list(report["suites"]) == ["roofline", "round"]
    assert [row["tokens"] for row in report["suites"]["roofline"]["rows"]] == [1, 3, 1, 3]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["rooflin"],
            "suite 'rooflin' is unknown; did you mean 'roofline'? (there are peers,",
        ),
        (["--gamma", "0"], "gamma is 0"),
        (["--gamma", "-1"], "gamma is -1"),
        (["--repeats", "0"], "repeats is 0"),
        (["--batches", "0,2"], "batch is 0"),
        (["--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--gamma", "999"], "gamma 999 exceeds the 128-token context"),
        (["--temperature", "-1"], "temperature"),
        (["--dtype", "int8"], "dtype 'int8' is unknown"),
        (["--device", "tpu"], "device 'tpu' is unknown"),
        (["--drafter", "modl"], "did you mean"),
        (["--prompts", "nowhere.jsonl"], "no prompts at nowhere.jsonl"),
        (["--out", "/dev/null/bench.json"], "cannot write /dev/null/bench.json"),
    ],
)
def test_bench_refuses_bad_input_before_loading(bench, monkeypatch, options, says):
    def loaded(*args):
        raise AssertionError("loaded")

    monkeypatch.setattr("specexp.models.load.load", loaded)
    code, out, err = bench(*options)
    assert code == 2, err
    assert says in err
    assert len(err.strip().splitlines()) == 1
    assert not out


def as_json(value: float, off: float = 0.0) -> dict[str, float]:
    return {"value": value, "low": value - off, "high": value + off}


def test_failed_bench_keeps_the_earlier_report(bench, tmp_path, monkeypatch):
    def fails(*args):
        raise UserError("planted")

    (out := tmp_path / "then.json").write_text("earlier figures")
    monkeypatch.setattr(suites, "run", fails)
    assert bench("round", "--out", str(out))[0] == 2
    assert out.read_text() == "earlier figures"


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_interrupted_bench_keeps_what_it_has_timed(bench, tmp_path, monkeypatch, options):
    """The suites before, and of the interrupted one the seconds of each arm."""
    whole = interleave.time_in_turns

    def interrupted(arms, items, device, label, *rest, **more):
        if label != "peers":
            return whole(arms, items, device, label, *rest, **more)
        left = iter(range(18))  # six arms on two prompts to warm up, and on one that counts

        def stops(arm):
            def call(item):
                if next(left, None) is None:
                    raise KeyboardInterrupt
                return arm(item)

            return call

        arms = {name: stops(arm) for name, arm in arms.items()}
        return whole(arms, items, device, label, *rest, **more)

    monkeypatch.setattr(interleave, "time_in_turns", interrupted)
    out = tmp_path / "bench.json"
    code, printed, err = bench("round", "peers", "roofline", "--out", str(out), *options)
    assert code == 130
    assert "interrupted: peers, after ours plain " in err.splitlines()[-1]
    report = json.loads(out.read_text())
    assert list(report["suites"]) == ["round"]
    assert len(report["interrupted"]["peers"]["ours plain"]) == 1
    assert not options or json.loads(printed) == report
    monkeypatch.undo()
    assert bench("round", "--against", str(out))[0] in (0, 1), "a report of fewer suites"


def test_bench_exits_1_when_a_ratio_is_worse(bench, tmp_path):
    out = tmp_path / "then.json"
    assert bench("round", "--out", str(out))[0] == 0
    report = json.loads(out.read_text())
    report["about"]["device"] = "a toaster"
    report["suites"]["round"]["plain"]["overhead"] = as_json(1e9)  # nothing can be worse
    report["suites"]["round"]["speedup"]["measured"] = as_json(1e-9)
    for overhead, code, word in ((-1e9, 1, "worse"), (1e9, 0, "better")):
        report["suites"]["round"]["fast"]["overhead"] = as_json(overhead)
        out.write_text(json.dumps(report))
        ended, printed, err = bench("round", "--against", str(out))
        assert ended == code, err
        assert "device a toaster, now " in printed
        assert "threads" not in printed.partition("earlier run")[2]
        [row] = [line for line in printed.splitlines() if "round: fast" in line]
        assert word in row


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda file: file.unlink(), "cannot read"),
        (lambda file: file.write_text("[]"), "is not a report that this version reads"),
        (lambda file: file.write_text("{"), "is not a report that this version reads"),
        (
            lambda file: file.write_text('{"parameters": {}, "suites": {}}'),
            "was measured with target",
        ),
        (
            lambda file: file.write_text('{"parameters": {}, "suites": {"round": {"plain": 1}}}'),
            "is not a report that this version reads",
        ),
        (
            lambda file: file.write_text('{"parameters": {}, "suites": {"peers": []}}'),
            "is not a report that this version reads",
        ),
    ],
)
def test_bench_refuses_an_unreadable_report(bench, tmp_path, spoil, says):
    file = tmp_path / "then.json"
    file.write_text("{}")
    spoil(file)
    code, out, err = bench("round", "--against", str(file))
    assert code == 2
    assert says in err
    assert len(err.strip().splitlines()) == 1
    assert not out


def test_check_refuses_an_unknown_suite(tiny_folders):
    with pytest.raises(UserError, match="unknown"):
        work.insist(["x"], {"gamma": 1, "target": tiny_folders[0], "drafter": "plain"})
