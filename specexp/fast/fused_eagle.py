"""Fused passes of an EAGLE layer: what fused.py and cpu/ do for whole networks.

Run by its own module, every pass of the layer is many short operations. Here the layer, its norm
and its head become a `Fused` network of one layer. That network reads hidden states in which
embeddings are already mixed (EAGLE-1: Li et al. 2024, section 3), or states and embeddings
(EAGLE-3: Li et al. 2025, section 3.1). If no such network can be built, or its logits differ from
the module's on a probe, a warning says why and the module runs unchanged.
"""

import torch
from torch import Tensor, nn

from specexp.fast import fused
from specexp.fast.cpu.passes import Native
from specexp.fast.fused import Fused
from specexp.fast.parts import beyond_weights
from specexp.models.cache import SlotCache
from specexp.models.heads import eagle as layers
from specexp.models.heads.eagle import Eagle
from specexp.models.lm import Network, product
from specexp.ops import kernel


class FusedEagle:
    """An `lm.Network` in which `net` runs the layer of `eagle`. Any tap that is asked for gives
    the layer's new features. `tap`: the number by which `net` knows them: that of the
    layers after the last norm, -1 before it."""

    parts = ()

    def __init__(self, eagle: Eagle, net: Fused | Native) -> None:
        self.eagle, self.net, self.by_length_up_to = eagle, net, net.by_length_up_to
        self.tap = eagle.config.num_hidden_layers if "norm_output" in eagle.shape.norms else -1

    def __call__(
        self, tokens: Tensor, positions: Tensor, cache: SlotCache, taps: tuple[int, ...],
        last: int | None, **inputs: Tensor,
    ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        """A pass over tokens [B, n] and the input `features` [B, n, E]; see `lm.Network` and
        `eagle.Eagle`."""
        x = inputs["features"].flatten(0, 1)
        if not self.eagle.shape.fused:
            embedded = self.eagle.embedded(tokens, x.dtype).flatten(0, 1)
            mixed = torch.cat([embedded, x], -1)
            x = product(mixed, self.eagle.fc.weight, self.eagle.fc.bias)
        return self.net(tokens, positions, cache, (self.tap,) * len(taps), last, x=x)


@kernel(layers.network, "cpu", "cuda")
def network(eagle: nn.Module, name: str, vocab: int) -> Network:
    """The layer's fused passes, compiled if they can be, with logits of the first `vocab` tokens.
    NotImplemented, after a warning that says why, if the module has to run as it is."""
    if not isinstance(eagle, Eagle):  # a layer of the target's own class: drafters/mtp.py
        return NotImplemented
    return fused.warned(name, *_fuse(eagle, vocab))


@torch.inference_mode()
def _fuse(eagle: Eagle, vocab: int) -> tuple[FusedEagle | None, str]:
    if why := beyond_weights(eagle, lm_head=eagle.head):
        return None, why
    layers = eagle.config.num_hidden_layers
    tokens = fused.probe(eagle)
    features = torch.linspace(
        -1, 1, tokens.shape[1] * eagle.config.hidden_size, device=eagle.device
    )
    features = features.view(*tokens.shape, -1).to(eagle.dtype).sin()
    at, cache = fused.whole_sequence(layers, tokens)
    try:
        net = _network(eagle, vocab)
        reference = eagle(tokens, at, cache.mask(None, eagle.dtype), features).logits[..., :vocab]
    except Exception as e:
        return None, fused.failure(e)
    nets = (FusedEagle(eagle, each) for each in fused.implementations(net))
    return fused.fastest_agreeing(nets, layers, tokens, reference, features=features)


def _network(eagle: Eagle, vocab: int) -> Fused:
    """EAGLE-1's layers over states [B * n, E] that contain the embeddings; or EAGLE-3's over states
    and embeddings."""
    head, ids = fused.inside(eagle.head.weight, eagle.draft_ids, vocab)
    if not eagle.shape.fused:
        return Fused([*eagle.layers], eagle.rotary, None, head, ids=ids, vocab=vocab)
    layer = eagle.midlayer
    return Fused(
        [layer, *eagle.deeper], eagle.rotary, eagle.norm, head, eagle.borrowed[0].weight,
        beside=(layer.input_layernorm, layer.hidden_norm),
        adds="norm_before_residual" in eagle.shape.norms,
        ids=ids, vocab=vocab,
    )  # fmt: skip
