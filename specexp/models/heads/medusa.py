"""Medusa heads."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from specexp.models.lm import product


class ResBlock(nn.Module):
    """x + SiLU(Wx + b), initialised to the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(product(x, self.linear.weight, self.linear.bias))


class Medusa(nn.ModuleList):
    """Head k predicts the token k + 1 places after the one the target's own head predicts.

    (Cai et al. 2024, section 2.1.) A head takes the state [..., E] that the target's LM head reads,
    and returns logits [..., V]."""

    def __init__(self, heads: int, layers: int, width: int, vocab: int) -> None:
        def head() -> nn.Sequential:
            last = nn.Linear(width, vocab, bias=False)
            return nn.Sequential(*(ResBlock(width) for _ in range(layers)), last)

        super().__init__(head() for _ in range(heads))
        self.blocks = layers

    @property
    def readouts(self) -> list[Tensor]:
        """The output matrix [V, E] of each head."""
        return [p for name, p in self.named_parameters() if "linear" not in name]

    def logits(self, k: int, hidden: Tensor, vocab: int) -> Tensor:
        """Logits [..., vocab] of head k for the first `vocab` tokens."""
        head: Any = self[k]
        x = head[:-1](hidden.reshape(-1, hidden.shape[-1]))
        return product(x, head[-1].weight[:vocab], None).view(*hidden.shape[:-1], -1)
