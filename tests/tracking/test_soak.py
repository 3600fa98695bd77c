"""The soak in small, and that it sees harm (soak.py)."""

import subprocess

import pytest
from support import soak as harness
from support.soak import Soak


def test_repeatedly_killed_runner_loses_nothing(warm, disk):
    soak = Soak(warm, disk, kills=3, points=2, seed=1)
    struck = list(soak.run())
    assert soak.found == {}
    assert soak.short() == []
    assert any(kill.resumed for kill in struck)


def test_soak_reports_planted_damage(warm, disk, monkeypatch):
    monkeypatch.setattr(harness, "PATIENCE_S", 0)
    soak = Soak(warm, disk, kills=0, points=3, do="naive")
    assert list(soak.run()) == []
    soak._begin()
    soak._runner()
    assert soak.found == {}
    one, other, third = sorted((soak.store / "results").iterdir())
    soak.ledger.write_text(f"{one.name}-another\n")
    (other / "result.json").write_text("{}")
    (third / "manifest.json").touch()
    left = subprocess.Popen(
        ["sh", "-c", "echo; read _"],
        env={"SPECEXP_MLRUNS": str(soak.store)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with left:
        left.stdout.readline()  # a process has no environment in /proc until it runs
        soak._look()
        soak._look()
    assert [line.removeprefix(f"{soak.store}: ") for line in soak.found] == [
        f"torn {other.name}: after a kill",
        f"changed {other.name}",
        f"changed {third.name}",
        f"executed again {one.name}",
        f"orphan {left.pid}",
    ]


@pytest.mark.slow
def test_naive_runner_loses_results(warm, disk):
    soak = Soak(warm, disk, kills=40, do="naive")
    assert len(list(soak.run())) >= 40
    wrong = soak.figures()["wrong"]
    assert wrong["torn"] > 0
    assert wrong["running"] > 0
