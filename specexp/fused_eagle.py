"""The passes of an EAGLE layer with less work: what fused.py and native.cpp do for whole networks.

What the layer reads is put together here; the layer itself, the norm and the head are a network of
one layer over given states. Of another kind than that, or at odds with the module on a probe, it is
run as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import Tensor

from specexp import fused
from specexp.cache import SlotCache
from specexp.fused import Fused, Norm, product
from specexp.heads import Eagle
from specexp.native import Native

log = logging.getLogger("specexp")


class FusedEagle:
    """`net` runs the layer of `eagle`. There is one tap: the features that it makes."""

    def __init__(self, eagle: Eagle, net: Fused | Native) -> None:
        self.eagle, self.net = eagle, net
        self.norms = eagle.shape.norms
        self.ids: Tensor | None = None  # of the tokens it can guess, unless it is all of them
        if eagle.shape.fused:
            every = torch.arange(eagle.shape.vocab, device=eagle.device)
            self.ids = None if torch.equal(eagle.draft_ids, every) else eagle.draft_ids
            self.token_norm = Norm(eagle.midlayer.input_layernorm)
            self.feature_norm = Norm(eagle.midlayer.hidden_norm)

    @property
    def fused(self) -> FusedEagle:
        """The same of torch's operations alone."""
        return FusedEagle(self.eagle, getattr(self.net, "fused", self.net))

    def __call__(
        self, tokens: Tensor, positions: Tensor, visible: Tensor | None, cache: SlotCache,
        taps: tuple[int, ...], last: int | None, **inputs: Tensor,
    ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        """See `lm.Network` and `heads.Eagle`."""
        features = inputs["features"].flatten(0, 1)
        embedded = self.eagle.borrowed[0](tokens.clamp(min=0)).flatten(0, 1).to(features.dtype)
        x, read = self._read(embedded, features)
        made = (1 if "norm_output" in self.norms else -1,) * len(taps)
        logits, states = self.net(tokens, positions, visible, cache, made, last, x=x, read=read)
        if logits is None or self.ids is None:
            return logits, states
        everywhere = logits.new_full((*logits.shape[:-1], self.eagle.shape.vocab), -torch.inf)
        return everywhere.index_copy_(-1, self.ids, logits), states

    def _read(self, embedded: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """What the layer adds to and what its attention reads [B * n, ...]."""
        if not self.eagle.shape.fused:
            mixed = torch.cat([embedded, features], -1)
            mixed = product(mixed, self.eagle.fc.weight, self.eagle.fc.bias)
            return mixed, mixed
        normed = self.feature_norm(features)
        read = torch.cat([self.token_norm(embedded), normed], -1)
        return normed if "norm_before_residual" in self.norms else features, read


def of(eagle: Eagle, name: str) -> FusedEagle | None:
    """The layer's passes with less work, or None, and a line that says why not."""
    found, why = _tried(eagle)
    if why:
        log.warning("%s is run as it is: %s", name, why)
    return found


@torch.inference_mode()
def _tried(eagle: Eagle) -> tuple[FusedEagle | None, str]:
    lm_head = eagle.lm_head if eagle.shape.fused else eagle.borrowed[1]
    layer, norm = (eagle.midlayer, eagle.norm) if eagle.shape.fused else (eagle.layers[0], None)
    if getattr(lm_head, "bias", None) is not None:
        return None, "the head it borrows has a bias"
    net = Fused([layer], eagle.rotary, norm, lm_head.weight)

    def ways() -> Iterator[FusedEagle]:
        return (FusedEagle(eagle, way) for way in fused.ways(net))

    tokens = fused.probe(eagle)
    features = torch.linspace(-1, 1, tokens.shape[1] * eagle.shape.width, device=eagle.device)
    features = features.view(*tokens.shape, -1).to(eagle.dtype).sin()
    at, cache = fused.aimed(1, tokens)
    wanted = eagle(tokens, at, cache.mask(None, eagle.dtype), features).logits
    return fused.agreed(ways(), 1, tokens, wanted, features=features)
