"""`specexp doctor` says what is missing."""

import re
from types import SimpleNamespace

from specexp.commands import doctor


def test_doctor_tells_absent_from_too_old(monkeypatch):
    there = {"torch": "2.4.0", "numpy": "2.1", "pandas": None}
    required = ["torch>=2.11", "numpy", "pandas>=2"]
    monkeypatch.setattr(doctor, "version", there.get)
    monkeypatch.setattr(
        doctor.metadata, "requires", lambda name: [*required, "nvml; extra == 'gpu'"]
    )
    assert doctor.missing() == [
        "torch>=2.11, 2.4.0 is installed: pip install 'torch>=2.11'",
        "pandas: pip install pandas",
    ]


def test_doctor_says_that_without_kernels_everything_runs_in_torch(monkeypatch, capsys):
    monkeypatch.setenv("SPECEXP_FAST", "off")
    monkeypatch.setattr(doctor, "speeds", lambda device: "")
    doctor.examine()
    assert re.search(r"in torch +everything *\n", capsys.readouterr().out)


def test_doctor_names_float64_alone_where_all_else_has_kernels(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "speeds", lambda device: "")
    home = SimpleNamespace(state=lambda: "compiled")
    monkeypatch.setattr(doctor.ops, "kernels_of", lambda device: home)
    monkeypatch.setattr(doctor.ops, "in_torch", lambda device: [])
    doctor.examine()
    assert re.search(r"in torch +float64 *\n", capsys.readouterr().out)
