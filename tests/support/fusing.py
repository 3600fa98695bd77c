"""What tests of the fused passes of heads share: heads unlike those they began as, and how far the
passes of two of them are apart."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from support.references import interpreted
from torch import Tensor, nn

from specexp.fast import fused

NEAR = {torch.float64: 1e-6, torch.float32: 2e-6, torch.bfloat16: 0.03}  # of their size


def bound(dtype: torch.dtype, device: str) -> float:
    """How far passes may be from exact ones: a GPU adds float32 in other orders."""
    return 1e-5 if (device, dtype) == ("cuda", torch.float32) else NEAR[dtype]


def of_its_own(net: nn.Module, dtype: torch.dtype, device: str = "cpu") -> nn.Module:
    """Heads none of whose norms is of ones, over an embedding and a head of their own."""
    torch.manual_seed(1)
    for name, weight in net.named_parameters():
        if "norm" in name:
            weight.data += torch.rand_like(weight) / 2
    net.borrowed = tuple(part.to(device, dtype) for part in net.borrowed)
    net = net.to(device).eval().requires_grad_(False)
    for weight in net.parameters():  # rotary frequencies are buffers and stay float32
        weight.data = weight.data.to(dtype)
    return net


def in_float64(net: nn.Module) -> nn.Module:
    """The same heads, of which the buffers are in float64, too."""
    net = net.to(torch.float64)
    for weight in (*net.parameters(), *(part.weight for part in net.borrowed)):
        weight.data = weight.data.to(torch.float64)
    return net


def furthest(ours: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> float:
    """The largest difference, of its size; NaN if there is any."""
    pairs = zip(ours, exact, strict=True)
    return float(torch.stack([(a.double() - b).norm() / b.norm() for a, b in pairs]).max())


where_kernels_run = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.interpreter),
        pytest.param("cuda", marks=pytest.mark.cuda),
    ],
)


@contextmanager
def through_kernels(device: str) -> Iterator[None]:
    """Meanwhile passes on this device run a GPU's kernels: on a CPU, in Triton's interpreter."""
    if device == "cuda":
        yield
        return
    with pytest.MonkeyPatch.context() as patch, interpreted():
        patch.setenv("SPECEXP_NATIVE", "off")
        yield


def uncompiled(monkeypatch) -> None:
    monkeypatch.setenv("SPECEXP_NATIVE", "off")
    monkeypatch.setitem(fused.ROUNDING, torch.float64, 1e-5)  # norms of transformers are float32's
