"""EAGLE-3 heads with every norm that a trainer may add."""

import dataclasses

import torch
from support.tiny import heads

from specexp.models.heads.eagle import Eagle

DEFAULTS = ("norm_before_residual", "norm_before_fc", "norm_output")  # of the package's trainer


def with_norms(*on: str) -> Eagle:
    """The EAGLE-3 heads of random weights, norms and all."""
    like = heads("eagle3", torch.float32)
    torch.manual_seed(2)
    made = Eagle(dataclasses.replace(like.shape, norms=on), *like.borrowed)
    for name, weight in made.named_parameters():
        weight.data = (
            torch.rand_like(weight) + 0.5 if "norm" in name else torch.randn_like(weight) / 8
        )
    made.d2t.fill_(3)
    return made.eval().requires_grad_(False)
