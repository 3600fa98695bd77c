"""The stages of `make gpu` keep what they learned, whatever fails."""

import json

import pytest
import torch

from specexp.measure.hardware import stages
from specexp.measure.hardware.stages import Rows


def fails() -> dict:
    raise RuntimeError("an illegal instruction\nand its address")


def test_row_that_fails_stops_the_next(tmp_path):
    rows = Rows(tmp_path / "gpu_smoke.json")
    rows.add("first", fails)
    rows.add("second", lambda: {"ms": 2.0})
    first, second = json.loads(rows.file.read_text())["rows"]
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


@pytest.mark.parametrize(
    ("wrong", "seen"),
    [
        (["--stage", "smoke,speed"], "stage 'speed' is unknown; there are smoke,"),
        (["--device", "cuda"], "torch finds no GPU here"),
    ],
)
def test_wrong_options_are_no_one_line(wrong, seen, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        stages.main(wrong)
    assert ended.value.code == 2
    assert seen in capsys.readouterr().err


@pytest.mark.slow
def test_smoke_runs_on_a_cpu_too(tmp_path):
    assert stages.main(["--stage", "smoke", "--device", "cpu", "--out", str(tmp_path)]) == 0
