"""What the networks share that borrow embeddings from the target."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from specexp.models.lm import LM, Network, among_all


class Borrowing(nn.Module):
    """Has `borrowed`, the target's embedding and LM head, in a tuple, which hides them: not to be
    trained, moved or saved."""

    d2t: Tensor
    lm_head: nn.Linear
    config: Any
    shape: Any
    borrowed: tuple[Any, ...]

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def own_head(self, draft_vocab: int) -> None:
        """Give it an LM head of its own. `d2t` [draft_vocab]: of each row of that head, the
        target's id minus the row's index."""
        self.lm_head = nn.Linear(self.config.hidden_size, draft_vocab, bias=False)
        self.register_buffer("d2t", torch.zeros(draft_vocab, dtype=torch.int64))

    @property
    def head(self) -> Any:
        """Its LM head: its own, or the target's."""
        return self.lm_head if hasattr(self, "d2t") else self.borrowed[1]

    @property
    def draft_ids(self) -> Tensor:
        """[draft_vocab or V] the target's ids of the tokens it can draft."""
        if not hasattr(self, "d2t"):
            return torch.arange(self.config.vocab_size, device=self.device)
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def among_all(self, logits: Tensor) -> Tensor:
        """Logits [..., V] by those [..., draft_vocab or V] of the tokens it can draft."""
        if not hasattr(self, "d2t"):
            return logits
        return among_all(logits, self.draft_ids, self.config.vocab_size)


def lm_of(net: Any, target: LM, network: Callable[[Any, str, int], Network]) -> LM:
    """An LM of such a network, at the target's positions and with its vocabulary; `network` says
    what runs it."""
    name = f"{net.shape.kind} of {target.name}"
    lm = LM(net, name, target.vocab, network(net, name, target.vocab))
    lm.context = target.context
    return lm
