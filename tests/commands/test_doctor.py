"""`specexp doctor` says what is missing."""

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
