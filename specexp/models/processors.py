"""What a model's generation config does to its logits: one more step before `Sampling`.

A processor is a function of a text and of the logits after it, so speculation keeps it exactly, on
any tree: every node of a draft has a text of its own, which is the row's committed tokens and then
those on the path from the root to the node. Names and meaning are those of transformers'
generation configs; models/generation.py reads them. Shapes depend on the round's alone.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from specexp.sequences import Draft

Processor: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function of texts [B, N, S] (arbitrary tokens behind their `length` [B, N]), these lengths, and
the logits [B, N, V] of the token after each text; it returns the logits to use in their place."""

ANY, NONE = -1, -2  # in a sequence to match: any token; in a text: no token


def unprocessed(draft: Draft, logits: Tensor) -> Tensor:
    return logits


@dataclass(frozen=True)
class Processors:
    """Processors by setting, one after the other, over a draft; in float32 or float64."""

    steps: Mapping[str, Processor]

    def __str__(self) -> str:
        return " and ".join(self.steps)

    def __call__(self, draft: Draft, logits: Tensor) -> Tensor:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        text, length = texts(draft)
        for step in self.steps.values():
            logits = step(text, length, logits)
        return logits


def texts(draft: Draft) -> tuple[Tensor, Tensor]:
    """The text of each node, itself included: tokens [B, N, S + 1], of which the first `length`
    [B, N] count. S: slots of a row; nodes off the path are written to the last place, unread."""
    seqs, nodes = draft.text, draft.nodes
    (B, N), S = draft.tokens.shape, seqs.tokens.shape[1]
    slots = seqs.places(nodes.depth)
    path = torch.where(nodes.ancestors, slots[:, None], S)  # [B, N, N]
    committed = pad(seqs.tokens, (0, 1))[:, None].expand(B, N, S + 1)
    tokens = draft.tokens.clamp(min=0)[:, None].expand(B, N, N)
    return committed.scatter(2, path, tokens), slots + 1


@dataclass(frozen=True)
class RepetitionPenalty:
    """Divide positive logits of tokens in the text by `penalty`, multiply negative ones by it.

    (Keskar et al. 2019, CTRL, section 4.1; prompt included.)"""

    penalty: float

    def __post_init__(self) -> None:
        if not 0 < self.penalty < math.inf:
            raise ValueError("a penalty is a number above 0")

    def __call__(self, text: Tensor, length: Tensor, logits: Tensor) -> Tensor:
        within = torch.arange(text.shape[-1], device=text.device) < length[..., None]
        penalised = torch.where(logits < 0, logits * self.penalty, logits / self.penalty)
        return torch.where(_present(text, within, logits.shape[-1]), penalised, logits)


@dataclass(frozen=True)
class NoRepeatNgram:
    """Rule out each token that would complete n tokens which the text already has in a row."""

    n: int

    def __post_init__(self) -> None:
        if type(self.n) is not int or self.n < 1:
            raise ValueError("a sequence has a whole number of tokens, one or more")

    def __call__(self, text: Tensor, length: Tensor, logits: Tensor) -> Tensor:
        if self.n > text.shape[-1]:
            return logits
        grams = text.unfold(-1, self.n, 1)  # [B, N, S - n + 1, n]
        last = _tail(text, length, self.n - 1)
        end = torch.arange(self.n, text.shape[-1] + 1, device=text.device)
        begins_alike = (grams[..., :-1] == last[:, :, None]).all(-1) & (end <= length[..., None])
        repeats = _present(grams[..., -1], begins_alike, logits.shape[-1])
        return logits.masked_fill(repeats, -torch.inf)


class SequenceBias:
    """Add a bias to the last token of each sequence whose other tokens end the text.

    biases: by sequence, of one token or more; -inf rules its last token out."""

    def __init__(
        self, biases: Mapping[tuple[int, ...], float], vocab: int, device: torch.device
    ) -> None:
        if not all(bias < math.inf for bias in biases.values()):
            raise ValueError("a bias is a number or -inf")
        longer = sorted((row for row in biases if len(row) > 1), key=len)
        self.alone = torch.zeros(vocab, dtype=torch.float32)
        for row, bias in biases.items():
            if len(row) == 1:
                self.alone[row[0]] = bias
        self.alone = self.alone.to(device)
        self.most = len(longer[-1]) - 1 if longer else 0
        starts = [[ANY] * (self.most + 1 - len(row)) + [*row[:-1]] for row in longer]
        self.starts = torch.tensor(starts, dtype=torch.int64, device=device)  # [K, most]
        self.last = torch.tensor([row[-1] for row in longer], dtype=torch.int64, device=device)
        values = [biases[row] for row in longer]
        self.bias = torch.tensor(values, dtype=torch.float32, device=device)

    def __call__(self, text: Tensor, length: Tensor, logits: Tensor) -> Tensor:
        bias = self.alone.to(logits.dtype).expand_as(logits)
        if self.most:
            end = _tail(text, length, self.most)[:, :, None]
            ends = ((end == self.starts) | (self.starts == ANY)).all(-1)  # [B, N, K]
            owed = torch.where(ends, self.bias.to(logits.dtype), 0.0)
            bias = bias.index_add(-1, self.last, owed)
        return logits + bias


def _tail(text: Tensor, length: Tensor, count: int) -> Tensor:
    """The last `count` tokens of each text, [B, N, count]; NONE before its first."""
    at = length[..., None] + torch.arange(-count, 0, device=text.device)
    return torch.where(at >= 0, text.gather(-1, at.clamp(min=0)), NONE)


def _present(tokens: Tensor, where: Tensor, V: int) -> Tensor:
    """[B, N, V] bool: whether a token occurs among tokens [B, N, n], where `where` [B, N, n]."""
    index = torch.where(where, tokens, V).clamp(max=V)
    none = torch.zeros(*tokens.shape[:2], V + 1, dtype=torch.bool, device=tokens.device)
    return none.scatter(-1, index, True)[..., :V]
