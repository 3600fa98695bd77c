"""Linear layers tell which dtype this machine emulates, and are timed reading, not launching."""

from itertools import cycle

import pytest
import torch

from specexp.measure.hardware import machine

CPU = torch.device("cpu")


@pytest.mark.parametrize(("times", "message"), [([9, 1], "9x"), ([2, 1], "")])
def test_emulated_dtype_is_warned_of(monkeypatch, times, message):
    single = iter([times[0]] * 4 + [times[1]] * 4)
    monkeypatch.setattr(machine, "pass_s", lambda weights, tokens: next(single))
    warning = machine.emulated(torch.float64, CPU)
    assert message in warning
    assert bool(warning) == bool(message)
    assert len(warning.splitlines()) <= 1
    assert machine.emulated(torch.float32, CPU) == ""


def test_layers_take_longer_to_read_than_to_launch():
    """On the fastest memory there is, in the smaller dtype."""
    width, count = machine.SHAPES["cuda"]
    read_s, launch_s = 2 * width**2 / 5e12, 5e-6
    assert read_s > 4 * launch_s
    assert 4 * count * width**2 <= 2**30


@pytest.fixture
def passes(monkeypatch):
    """passes(one, several): the machine takes these times for a pass, in turn, by threads."""

    def plant(one: list[float], several: list[float], load: float = 0.1) -> list[str]:
        turns = {1: cycle(one), 2: cycle(several)}
        monkeypatch.setattr(machine, "pass_s", lambda *_: next(turns[torch.get_num_threads()]))
        monkeypatch.setattr(machine.os, "getloadavg", lambda: (load, 0.0, 0.0))
        monkeypatch.setattr(machine.os, "cpu_count", lambda: 2)
        threads = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            return machine.doubts(CPU)
        finally:
            torch.set_num_threads(threads)

    return plant


def test_quiet_machine_raises_no_doubt(passes):
    assert passes([1.0, 1.1], [0.6, 0.7]) == []


def test_threads_that_wait_for_each_other_are_named(passes):
    [line] = passes([1.0], [24.0], load=1.5)
    assert line == (
        "2 threads take 24.0x as long as one, since they wait for each other (load average 1.5 on "
        "2 cores): set OMP_NUM_THREADS=1"
    )


@pytest.mark.parametrize(("one", "load"), [([1.0, 2.0, 2.0], 0.5), ([1.0], 6.0)])
def test_busy_machine_is_named(passes, one, load):
    [line] = passes(one, [1.0], load)
    assert line.endswith("others use this machine; measure when it is quiet")
    assert ("its fastest time" in line) == (len(one) > 1), "what does not swing is not said to"
