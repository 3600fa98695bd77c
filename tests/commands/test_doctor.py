"""`specexp doctor` says what is missing."""

import pytest

from specexp.commands import doctor


@pytest.fixture(autouse=True)
def idle(monkeypatch):
    """Whatever else runs here."""
    monkeypatch.setattr(doctor, "doubts", lambda device: [])
    monkeypatch.setattr(doctor, "missing", lambda: [])


def test_doctor_tells_absent_from_too_old(monkeypatch):
    monkeypatch.undo()
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


@pytest.mark.parametrize(
    ("fast", "said"), [("on", "; float64 runs without"), ("off", "SPECEXP_FAST")]
)
def test_doctor_says_which_kernels_run(monkeypatch, capsys, fast, said):
    monkeypatch.setenv("SPECEXP_FAST", fast)
    monkeypatch.setattr(doctor, "speeds", lambda device: "")
    doctor.examine()
    [line] = [x for x in capsys.readouterr().out.splitlines() if x.strip().startswith("kernels ")]
    assert line.rstrip().endswith(said)


def test_doctor_says_that_a_busy_machine_times_nothing_now(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "speeds", lambda device: "")
    assert doctor.examine()
    assert "ready: nothing is missing\n" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "doubts", lambda device: ["3 other programs run"])
    assert doctor.examine()
    busy = capsys.readouterr().out
    assert "doubtful timings: 3 other programs run\n" in busy
    assert "ready: nothing is missing, but do not time anything now\n" in busy


def test_doctor_names_the_compiler_without_a_digest(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "speeds", lambda device: "")
    monkeypatch.setattr(doctor.ops, "state", lambda device: "compiled by c++, AVX2, dd328a4d")
    doctor.examine()
    assert "compiled by c++, AVX2; float64" in capsys.readouterr().out
