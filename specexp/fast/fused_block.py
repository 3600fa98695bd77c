"""Fused passes over the blocks of DFlash and DSpark: what fused.py and cpu/ do for whole networks.
DFlash 2's convolutions are not compiled for a CPU.

A block whose layers have no window is a pass of a `Fused` network in which every token sees every
other one. If no such network can be built, or its logits differ from the module's on a probe, a
warning says why and the module runs unchanged. Keys and values of the text are the module's.
"""

from typing import Any

import torch
from torch import Tensor

from specexp.fast import fused
from specexp.fast.cpu.passes import Native
from specexp.fast.fused import (
    AttentionInfo,
    Fused,
    Norm,
    add_norm,
    attention,
    product_swiglu,
    rotate_and_store,
)
from specexp.fast.parts import beyond_weights
from specexp.models.cache import SlotCache
from specexp.models.heads import block as blocks
from specexp.models.heads.block import Block
from specexp.models.heads.dependence import Convolution, Convolved
from specexp.models.lm import Network, product
from specexp.ops import kernel
from specexp.tree import Branches


class ConvolvedLayer(fused.Layer):
    """A decoder layer with convolutions; see `dependence.Convolved`."""

    compiles = False

    def __init__(self, layer: Convolved) -> None:
        super().__init__(layer)
        self.attention_conv, self.mlp_conv = layer.attention_conv, layer.mlp_conv

    def __call__(
        self, x: Tensor, read: Tensor, info: AttentionInfo, rotations: tuple[Tensor, Tensor],
        cache: Any, then: Norm | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """See `fused.Layer`."""

        def enter(conv: Convolution, read: Tensor) -> tuple[Tensor, Tensor]:
            mixed, after = conv.enter(read.view(*info.positions.shape, -1))
            return mixed.flatten(0, 1), after

        def mix(conv: Convolution, y: Tensor, after: Tensor) -> Tensor:
            return conv.mix(y.view(*info.positions.shape, -1), after).flatten(0, 1)

        mixed, after = enter(self.attention_conv, read)
        qkv = product(mixed, self.qkv, self.qkv_bias)
        q, keys, values = rotate_and_store(qkv, self, rotations, cache)
        y = product(attention(q, keys, values, info, self.scale), self.out, self.out_bias)
        x, read = add_norm(x, mix(self.attention_conv, y, after), self.after)
        mixed, after = enter(self.mlp_conv, read)
        y = product(product_swiglu(mixed, self.up, self.up_bias), self.down, self.down_bias)
        return add_norm(x, mix(self.mlp_conv, y, after), then)


class FusedBlock:
    """A `Block` whose passes over blocks are those of `net`."""

    parts = ()

    def __init__(self, block: Block, net: Fused | Native) -> None:
        self.block, self.net, self.by_length_up_to = block, net, net.by_length_up_to
        self.causal = block.shape.spans[0][1]

    def __call__(
        self, tokens: Tensor, positions: Tensor, cache: SlotCache, taps: tuple[int, ...],
        last: int | None, **inputs: Tensor,
    ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        """See `Block.forward`."""
        if inputs:
            return self.block(tokens, positions, cache, taps, last, **inputs)
        n, L = tokens.shape[1], len(self.block.layers)
        if not self.causal:
            every = torch.ones(1, n, n, dtype=torch.bool, device=tokens.device)
            cache.see(Branches(cache.slots[:, 0, :1, 0], every))
        logits, hidden = self.net(tokens, positions, cache, (L,) * len(taps), last)
        return logits, None if hidden is None else hidden[:, -(last or 0) :]


@kernel(blocks.network, "cpu", "cuda")
def network(block: Block, name: str, vocab: int) -> Network:
    """The block's fused passes, compiled if they can be, with logits of the first `vocab` tokens.
    NotImplemented, after a warning that says why, if the module has to run as it is."""
    return fused.warned(name, *_fuse(block, vocab))


@torch.inference_mode()
def _fuse(block: Block, vocab: int) -> tuple[FusedBlock | None, str]:
    shape, embed = block.shape, block.borrowed[0].weight
    if len({*shape.spans}) > 1 or shape.spans[0][0]:
        return None, "its layers have windows"
    if (shape.embeds_by, shape.scale, shape.cap) != (1, 1, 0):
        return None, "it scales embeddings or logits"
    if why := beyond_weights(block, lm_head=block.head):
        return None, why
    tokens = fused.probe(block)[:, : shape.block]
    at, cache = fused.whole_sequence(len(block.layers), tokens)
    try:
        head, ids = fused.inside(block.head.weight, block.draft_ids, vocab)
        net = Fused(
            [*block.layers], block.rotary, block.norm, head, embed, ids=ids, vocab=vocab,
            made=ConvolvedLayer if shape.kernel else fused.Layer,
        )  # fmt: skip
        reference, _ = block(tokens, at, cache, (), None)
    except Exception as e:
        return None, fused.failure(e)
    assert reference is not None
    nets = (FusedBlock(block, each) for each in fused.implementations(net))
    return fused.fastest_agreeing(nets, len(block.layers), tokens, reference[..., :vocab])
