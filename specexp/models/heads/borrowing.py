"""What the networks share that borrow embeddings from the target."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from specexp.models.lm import LM, Network


class Borrowing(nn.Module):
    """Has `borrowed`, the target's embedding and LM head, in a tuple, which hides them: not to be
    trained, moved or saved. `d2t` [draft_vocab]: of each row of its own LM head, the target's id
    minus the row's index; missing if it has none."""

    d2t: Tensor
    config: Any
    shape: Any
    borrowed: tuple[Any, ...]

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def draft_ids(self) -> Tensor:
        """[draft_vocab or V] the target's ids of the tokens it can draft."""
        if not hasattr(self, "d2t"):
            return torch.arange(self.config.vocab_size, device=self.device)
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t


def lm_of(net: Any, target: LM, network: Callable[[Any, str, int], Network]) -> LM:
    """An LM of such a network, at the target's positions and with its vocabulary; `network` says
    what runs it."""
    name = f"{net.shape.kind} of {target.name}"
    lm = LM(net, name, target.vocab, network(net, name, target.vocab))
    lm.context = target.context
    return lm
