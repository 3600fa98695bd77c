"""Linear layers tell which dtype this machine emulates, and are timed reading, not launching."""

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
