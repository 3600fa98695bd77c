"""`specexp doctor` says what is missing and what is slow."""

import pytest
import torch

from specexp.commands import doctor

CPU = torch.device("cpu")


@pytest.mark.parametrize(("times", "message"), [([9, 1], "9x"), ([2, 1], "")])
def test_emulated_dtype_is_warned_of(monkeypatch, times, message):
    single = iter([times[0]] * 4 + [times[1]] * 4)
    monkeypatch.setattr(doctor, "_pass", lambda weights, n: next(single))
    warning = doctor.slow(torch.float64, CPU)
    assert message in warning
    assert bool(warning) == bool(message)
    assert len(warning.splitlines()) <= 1
    assert doctor.slow(torch.float32, CPU) == ""


def test_doctor_times_reading_not_launching():
    """On the fastest memory there is, in the smaller dtype."""
    width, count = doctor.SHAPES["cuda"]
    read_s, launch_s = 2 * width**2 / 5e12, 5e-6
    assert read_s > 4 * launch_s
    assert 4 * count * width**2 <= 2**30


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
