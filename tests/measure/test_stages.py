"""The stages of `make gpu` keep what they learned, whatever fails."""

import json
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support import gpu_stages as stages
from support.gpu_stages import Rows

from specexp import api
from specexp.measure import prompts
from specexp.models import memory
from specexp.zoo import twins


def fails() -> dict:
    raise RuntimeError("an illegal instruction\nand its address")


def test_row_that_fails_stops_the_next(tmp_path):
    rows = Rows(tmp_path / "gpu_smoke.json", {"device": "a card"})
    rows.add("first", fails)
    rows.add("second", lambda: {"ms": 2.0})
    report = json.loads(rows.file.read_text())
    assert report["machine"] == {"device": "a card"}
    first, second = report["rows"]
    assert (first["ok"], first["error"]) == (False, "RuntimeError: an illegal instruction")
    assert "in fails" in first["traceback"]
    assert (second["ok"], second["ms"]) == (True, 2.0)


def test_stage_that_fails_whole_leaves_no_error(tmp_path, monkeypatch):
    monkeypatch.setitem(stages.STAGES, "smoke", lambda rows, device: fails())
    inside = ["--inside", "--stage", "smoke", "--device", "cpu", "--out", str(tmp_path)]
    assert stages.main(inside) == 0
    [row] = json.loads((tmp_path / "gpu_smoke.json").read_text())["rows"]
    assert row["error"] == "RuntimeError: an illegal instruction"


def test_stage_that_takes_too_long_leaves_no_report(tmp_path, capsys):
    late = ["--stage", "smoke", "--device", "cpu", "--minutes", "0.001", "--out", str(tmp_path)]
    assert stages.main(late) == 1
    report = json.loads((tmp_path / "gpu_smoke.json").read_text())
    assert report["error"] == "it was not finished after 0.001 minutes"
    assert not report["ok"]
    assert "smoke: 0 of 0 rows are right" in capsys.readouterr().out


def test_stage_without_a_row_is_right(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        stages.subprocess, "Popen", lambda *_, **__: SimpleNamespace(wait=lambda s: 0)
    )
    assert stages.main(["--stage", "smoke", "--device", "cpu", "--out", str(tmp_path)]) == 1
    assert "smoke: 0 of 0 rows are right, 0 s it did nothing" in capsys.readouterr().out


def ended(test: str, **more) -> SimpleNamespace:
    report = {"nodeid": test, "when": "call", "duration": 0.5, "longrepr": None} | more
    outcome = report.get("outcome", "passed")
    return SimpleNamespace(**report, **{o: o == outcome for o in ("passed", "failed", "skipped")})


@pytest.mark.parametrize(("code", "right"), [(0, True), (1, True), (2, False), (5, False)])
def test_interrupted_tests_are_right(tmp_path, monkeypatch, code, right):
    """What had ended before is kept, at every moment."""
    rows = Rows(tmp_path / "gpu_exactness.json", {})
    wrong = SimpleNamespace(reprcrash=SimpleNamespace(message="assert 1 == 2"))

    def main(arguments, plugins):
        [plugin] = plugins
        for report in (
            ended("a.py::x", when="setup"), ended("a.py::x"), ended("a.py::x", when="teardown"),
            ended("a.py::y[1]", outcome="failed", longrepr=wrong),
            ended("b.py::z", outcome="skipped", when="setup"),
            ended("b.py::z", when="teardown"),
        ):  # fmt: skip
            plugin.pytest_runtest_logreport(report)
        return code

    monkeypatch.setattr(pytest, "main", main)
    with nullcontext() if right else pytest.raises(RuntimeError, match=f"exit code {code}"):
        stages.exactness(rows, torch.device("cpu"))
    [row] = json.loads(rows.file.read_text())["rows"]
    assert (row["name"], row["tests"], row["process_s"], row["ok"]) == ("a.py", 2, 1.0, False)
    assert row["error"] == '1 tests fail: {"y[1]": "assert 1 == 2"}'


def test_unknown_stage_is_run(capsys):
    with pytest.raises(SystemExit) as ended:
        stages.main(["--stage", "smoke,speed"])
    assert ended.value.code == 2
    assert "stage 'speed' is unknown; there are smoke," in capsys.readouterr().err


@pytest.mark.compiler
def test_smoke_says_that_rounds_are_recorded_and_what_runs_them():
    said = stages.speaks("eagle", 0.0, torch.device("cpu"))
    assert said["nets"] == ["Native", "FusedEagle"]
    assert said["recorded"] >= 1
    assert 0 < said["acceptance"] < 1


OLD = "The NVIDIA driver on your system is too old (found version 11040).\nPlease update it."


@pytest.mark.parametrize("raised", [RuntimeError(OLD), AssertionError("without CUDA")])
def test_missing_gpu_takes_more_than_a_line(raised, capsys, monkeypatch):
    def init() -> None:
        raise raised

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    assert stages.main(["--device", "cuda"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    why = str(raised).split(".")[0].splitlines()[0]
    assert line == (f"no CUDA device is available ({why}); --device cpu runs the stages on a CPU")


def test_weights_that_do_not_fit_stop_smaller_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: 3 << 30)
    monkeypatch.setattr(stages, "of_module", lambda *_: SimpleNamespace(parameters=1, net=None))
    made = SimpleNamespace(from_config=lambda config: torch.nn.Identity())
    monkeypatch.setattr(stages, "AutoModelForCausalLM", made)
    monkeypatch.setattr(stages, "PASSES", [])
    rows = Rows(tmp_path / "gpu_passes.json", {})
    stages.passes(rows, torch.device("cpu"))
    large, small, between = rows.rows
    assert [row["ok"] for row in (small, between)] == [True, False]
    assert large["error"] == (
        "UserError: the weights take 15.0 GiB and 3.0 GiB are free: choose a model of at most 1.6 "
        "billion parameters, in bfloat16"
    )
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.slow
def test_streams_and_training_have_no_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "SERVED", 8)
    monkeypatch.setattr(stages, "TURNS", 1)
    monkeypatch.setenv("SPECEXP_MLRUNS", str(tmp_path))
    pair = api.load("target-10m", "ngram", device="cpu")
    texts = prompts.load("all", limit=4)
    found = stages.served_at(2, pair, ["plain", "always:2"], [], texts)["rates"]
    assert [row["policy"] for row in found] == ["plain", "always:2"]
    rows = Rows(tmp_path / "gpu_training.json", {})
    assert stages.trained("medusa", rows, torch.device("cpu"), quick=True)["folder"]
    assert all(row["training/loss"] > 0 for row in rows.rows)
    assert rows.rows


@pytest.mark.slow
def test_pair_drawn_on_the_device_has_no_figures(tmp_path, monkeypatch):
    few = {"width": 128, "hidden": 256, "heads": 4, "kv_heads": 2, "rows": 8192}
    for params in ("8B", "1B"):
        monkeypatch.setitem(twins.SHAPES, params, replace(twins.SHAPES[params], **few))
    monkeypatch.setattr(stages, "NEW", 8)
    monkeypatch.setattr(stages, "STREAMS", [2])
    rows = Rows(tmp_path / "gpu_pair.json", {})
    stages.pair(rows, torch.device("cpu"))
    assert [row.get("error") for row in rows.rows] == [None] * 10
    assert [row["name"].startswith("1B: ") for row in rows.rows] == [False] * 5 + [True] * 5
    for size, pair in ((4, rows.rows[:5]), (2, rows.rows[5:])):
        weights, prefill, round_, batch, peers = pair
        assert prefill["plain_ms"] > 0 < prefill["drafting_ms"]
        assert weights["draft"] == size
        assert round_["acceptance"]["rate"] > 0.1
        assert all(row["their_tok_s"] or row["missing"] for row in peers["rows"])
        assert batch["gamma 5"]["tok_s"] > 0


@pytest.mark.slow
def test_smoke_runs_on_a_cpu_too(tmp_path):
    assert stages.main(["--stage", "smoke", "--device", "cpu", "--out", str(tmp_path)]) == 0
