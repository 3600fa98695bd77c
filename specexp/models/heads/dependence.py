"""How the tokens of a block depend on each other, which its layers draft all at once.

DSpark adds a bias that follows from the token before (a Markov head). DFlash 2 (z-lab 2026,
github.com/z-lab/dflash) lets the layers see the places before theirs (convolutions), and chooses
among the most likely tokens of a place by how well they follow the token before (a selector).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specexp.models.lm import Linear
from specexp.sampling import ranked


class Markov(nn.Module):
    """Adds to a token's logits a bias that depends on the token before it."""

    def __init__(self, vocab: int, draft_vocab: int, width: int, rank: int, gated: bool) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = Linear(rank, draft_vocab, bias=False)
        nn.init.zeros_(self.markov_w2.weight)
        if gated:
            self.gate_proj = Linear(width + rank, rank)
        self.gated = gated

    def forward(self, before: Tensor, hidden: Tensor) -> Tensor:
        """The bias [..., draft_vocab] after tokens `before` [...], where hidden [..., E] is the
        state of the logits that it is added to."""
        embedded = self.markov_w1(before.clamp(min=0))
        if self.gated:
            embedded = embedded * self.gate_proj(torch.cat([hidden, embedded], -1)).sigmoid()
        return self.markov_w2(embedded)


class Selector(nn.Module):
    """Scores the `count` most likely tokens of a place by their logits and by how well they follow
    the token before; no other token is drafted."""

    def __init__(self, vocab: int, width: int, rank: int, count: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.randn(vocab, rank) * 0.02)
        self.successor_codebook = nn.Parameter(torch.randn(vocab, rank) * 0.02)
        self.hidden_projection = Linear(width, rank, bias=False)
        self.count = count

    def forward(self, logits: Tensor, before: Tensor, hidden: Tensor) -> Tensor:
        """Logits [..., V], -inf but for the candidates, from those of a place after tokens `before`
        [...], where hidden [..., E] is the state of the logits."""
        candidates = ranked(logits.detach(), min(self.count, logits.shape[-1]))
        left = F.embedding(before.clamp(min=0), self.predecessor_codebook)
        follows = F.embedding(candidates, self.successor_codebook)  # [..., count, rank]
        fit = (follows @ (left * self.hidden_projection(hidden))[..., None])[..., 0]
        scores = logits.gather(-1, candidates) + fit
        return torch.full_like(logits, -torch.inf).scatter(-1, candidates, scores)


class Convolution(nn.Module):
    """Mixes each place's input of a part of a layer, and its output, with those of the places
    before it in its block of `block` tokens, or in a single shorter one: by weights `base_kernel`
    for each channel, and by others that follow from the input, for each group of channels. It
    begins as the identity."""

    def __init__(self, width: int, kernel: int, group: int, block: int) -> None:
        super().__init__()
        if width % group:
            raise ValueError(f"{width} channels have no groups of {group}")
        self.base_kernel = nn.Parameter(torch.zeros(2, kernel, width))
        self.base_kernel.data[:, 0] = 1
        self.kernel_projection = Linear(width, 2 * kernel * (width // group), bias=False)
        nn.init.zeros_(self.kernel_projection.weight)
        self.group, self.block = group, block

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the part reads in place of its inputs x [B, n, E], and the weights with which to
        `mix` its outputs."""
        own = self.kernel_projection(x).unflatten(-1, (2, self.base_kernel.shape[1], -1, 1))
        shared = self.base_kernel.unflatten(-1, (-1, self.group))
        before, after = (shared + own).flatten(-2).unbind(-3)
        return self.mix(x, before), after

    def mix(self, y: Tensor, weights: Tensor) -> Tensor:
        """For each place the weighted sum of y [B, n, E] there and at the places before it in its
        block; weights [B, n, kernel, E]: of the place itself, of the one before it, and so on."""
        size = min(self.block, y.shape[1])
        y, weights = (part.unflatten(1, (-1, size)) for part in (y, weights))
        mixed = y * weights[..., 0, :]
        for back in range(1, weights.shape[-2]):
            mixed[:, :, back:].addcmul_(y[:, :, :-back], weights[:, :, back:, back])
        return mixed.flatten(1, 2)


class Convolved(nn.Module):
    """A decoder layer with convolutions around its attention and its MLP."""

    def __init__(self, layer: Any, kernel: int, group: int, block: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm
        width = layer.hidden_size
        self.attention_conv = Convolution(width, kernel, group, block)
        self.mlp_conv = Convolution(width, kernel, group, block)

    def forward(self, x: Tensor, **how: Any) -> Tensor:
        mixed, after = self.attention_conv.enter(self.input_layernorm(x))
        y = self.self_attn(mixed, **how)[0]
        x = x + self.attention_conv.mix(y, after)
        mixed, after = self.mlp_conv.enter(self.post_attention_layernorm(x))
        return x + self.mlp_conv.mix(self.mlp(mixed), after)
