"""Fused passes of Llama-like models: the same weights, fewer operations.

q, k and v are one product, gate and up another; q and k are rotated together; queries that share a
key head are stacked, so that no key is copied. The module itself still works: its parameters become
views of the joined matrices. A network of another family, or one whose fused logits differ from its
module's on a probe, is run by transformers (lm.Unfused).

The operations marked @op here are the references of kernels: Triton's in gpu/; on a CPU a whole
pass is compiled instead (cpu/passes.cpp). Where keys and values go is up to the cache.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
import transformers  # imports a class when it is named: model classes take a second
from torch import Tensor, nn

from specexp.errors import first_line, ran_out
from specexp.fast.cpu import build, passes
from specexp.fast.cpu.passes import Native
from specexp.models import int8, lm, memory
from specexp.models.cache import SlotCache
from specexp.models.lm import Network, among_all, product
from specexp.models.servable import context_length
from specexp.ops import kernel, op
from specexp.tree import Branches

log = logging.getLogger("specexp")
Net = TypeVar("Net")

FAMILIES = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}


class Norm:
    """RMS norm (Zhang & Sennrich 2019)."""

    def __init__(self, module: Any) -> None:
        self.weight: Tensor = module.weight
        self.eps: float = module.variance_epsilon

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def joined(parts: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """One matrix [sum of outputs, inputs] and bias whose rows are the parts', which become views of
    it, so that no weight is stored twice."""
    return _side_by_side([p.weight for p in parts]), (
        None if parts[0].bias is None else _side_by_side([p.bias for p in parts])
    )


def _side_by_side(parts: list[Tensor]) -> Tensor:
    first, size = parts[0], sum(len(p) for p in parts)
    if int8.is_quantised(first):
        return int8.joined(parts, _side_by_side)
    at = first.storage_offset()
    for p in parts:
        if p.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() or (
            p.storage_offset() != at
        ):
            break
        at += p.numel()
    else:
        return first.detach().as_strided((size, *first.shape[1:]), first.stride())
    whole = torch.cat([p.data for p in parts])
    for p, view in zip(parts, whole.split([len(p) for p in parts]), strict=True):
        p.data = view
    return whole


@dataclass(frozen=True)
class AttentionInfo:
    """What attention needs to know of a pass over tokens [B, n], in layers of one kind.

    visible: which slots each token sees, windows aside; None: its own and all before it. positions
    [B, n]. masks: those that were made, by the number of query heads of a key head and of tokens;
    lasts: what `of_last` has returned.
    """

    cache: SlotCache
    visible: Branches | None
    positions: Tensor
    kind: memory.Layer
    masks: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    lasts: dict[int, tuple[Tensor, Tensor, Branches | None]] = field(default_factory=dict)

    @property
    def slots(self) -> Tensor:
        """[B, n]: where each token's own key lies."""
        return self.cache.slots[:, 0, :, 0]

    @property
    def size(self) -> int:
        """Places that these layers have."""
        return self.cache.sizes[self.kind.span]

    def of_last(self, n: int) -> tuple[Tensor, Tensor, Branches | None]:
        """Slots, positions and `visible` of the last n tokens."""
        if n not in self.lasts:
            seen = self.visible and replace(self.visible, ancestors=self.visible.ancestors[:, -n:])
            self.lasts[n] = self.slots[:, -n:], self.positions[:, -n:], seen
        return self.lasts[n]

    def mask(self, dtype: torch.dtype, group: int, n: int) -> Tensor:
        """[B, 1, group * n, S] for `scaled_dot_product_attention`, of the last n tokens."""
        if (group, n) not in self.masks:
            mask = self.cache.mask(self.cache.near(self.visible, self.kind), dtype)[:, :, -n:]
            self.masks[group, n] = mask.repeat(1, 1, group, 1) if group > 1 else mask
        return self.masks[group, n]


@op
def add_norm(x: Tensor, y: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor]:
    """The residual x + y [rows, E], and `norm` of it."""
    x = x + y
    return x, norm(x) if norm else x


@op
def product_add_norm(
    x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm | None
) -> tuple[Tensor, Tensor]:
    """`add_norm` of x [rows, E] and of y [rows, depth] times weight [E, depth]."""
    return add_norm(x, product(y, weight, bias), norm)


@op
def swiglu(x: Tensor) -> Tensor:
    """SiLU of the first half of x [rows, 2 * hidden], times the second half (Shazeer 2020)."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


@op
def product_swiglu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`swiglu` of x [rows, E] times weight [2 * hidden, E]."""
    return swiglu(product(x, weight, bias))


@op
def rotate_and_store(
    qkv: Tensor, layer: Layer, rotations: tuple[Tensor, Tensor], cache: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate the queries and keys in qkv [B * n, (H + 2K) d] by their positions (Su et al. 2021),
    and write keys and values to the cache. rotations: their cosines and sines [B, 1, n, d], the
    first half of the sines negated. Returns queries [B, H, n, d], and the layer's whole cache of
    keys and of values, each [B, K, S, d]."""
    (B, _, n, d), (cos, sin) = rotations[0].shape, rotations
    H, K = layer.heads, layer.keys
    qkv = qkv.reshape(B, n, H + 2 * K, d).transpose(1, 2)
    if layer.norms:
        q, k, v = qkv.split((H, K, K), 1)
        qkv = torch.cat([layer.norms[0](q), layer.norms[1](k), v], 1)
    x, v = qkv.split((H + K, K), 1)
    x = torch.addcmul(x * cos, x.roll(d // 2, -1), sin)
    q, k = x.split((H, K), 1)
    return q, *cache.update(k, v)


@op
def attention(
    q: Tensor, keys: Tensor, values: Tensor, info: AttentionInfo, scale: float,
    cap: float = 0.0, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention [B * n, H * d] of queries [B, H, n, d], which are those of the last n tokens of a
    pass, over keys and values [B, K, S, d]. cap: scores lie within -cap to cap, by a tangent
    (Gemma 2); 0: anywhere. sinks [H]: the score of a key of each head whose value is 0 (gpt-oss).
    """
    B, H, n, d = q.shape
    group = H // keys.shape[1]
    q = q.reshape(B, keys.shape[1], -1, d)  # the queries of a key head together: no key is copied
    mask = info.mask(q.dtype, group, n)
    if cap or sinks is not None:
        score = scale * q @ keys.transpose(2, 3)
        score = (cap * (score / cap).tanh() if cap else score) + mask
        if sinks is not None:
            sink = sinks.view(1, -1, group, 1).repeat_interleave(n, 2).expand(B, -1, -1, 1)
            score = torch.cat([score, sink.to(score.dtype)], -1)
        heads = score.softmax(-1, torch.float32)[..., : keys.shape[2]].to(values.dtype) @ values
    else:
        heads = F.scaled_dot_product_attention(q, keys, values, mask, scale=scale)
    heads = heads.unflatten(2, (-1, n)).permute(0, 3, 1, 2, 4)  # kernels differ in strides
    return heads.reshape(B * n, -1)


@op
def by_length_up_to(head: Tensor) -> int:
    """`lm.Network.by_length_up_to` of passes with weights like these: 0, for under a mask
    `attention` reads all slots."""
    return 0


class Layer:
    """A decoder layer over the residual x [B * n, E]."""

    def __init__(self, layer: Any) -> None:
        attn, mlp = layer.self_attn, layer.mlp
        first = getattr(layer, "input_layernorm", None)
        self.before = first and Norm(first)
        self.after = Norm(layer.post_attention_layernorm)
        self.qkv, self.qkv_bias = joined([attn.q_proj, attn.k_proj, attn.v_proj])
        self.out, self.out_bias = attn.o_proj.weight, attn.o_proj.bias
        self.up, self.up_bias = joined([mlp.gate_proj, mlp.up_proj])
        self.down, self.down_bias = mlp.down_proj.weight, mlp.down_proj.bias
        self.norms = (Norm(attn.q_norm), Norm(attn.k_norm)) if hasattr(attn, "q_norm") else None
        self.head_dim, self.scale = attn.head_dim, attn.scaling
        self.heads = attn.q_proj.out_features // self.head_dim
        self.keys = attn.k_proj.out_features // self.head_dim
        self.hidden = mlp.gate_proj.out_features

    def __call__(
        self, x: Tensor, read: Tensor, info: AttentionInfo, rotations: tuple[Tensor, Tensor],
        cache: Any, then: Norm | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """read: x after this layer's first norm. Returns the new x, and x after the norm `then`."""
        qkv = product(read, self.qkv, self.qkv_bias)
        q, keys, values = rotate_and_store(qkv, self, rotations, cache)
        heads = attention(q, keys, values, info, self.scale)
        x, read = product_add_norm(x, heads, self.out, self.out_bias, self.after)
        read = product_swiglu(read, self.up, self.up_bias)
        return product_add_norm(x, read, self.down, self.down_bias, then)


class Fused:
    """A whole network (`lm.Network`) over tokens [B, n], over hidden states in place of embeddings,
    or, as EAGLE-3's layer, over both.

    beside: norms of embeddings and of states; the first attention reads the two normed and
    concatenated. adds: the residual starts from the normed state. ids [V']: the tokens that the
    rows of `head` stand for, among `vocab` tokens; None: all of them in order.
    """

    parts = ()

    def __init__(
        self, layers: Sequence[Any], rotary: Any, norm: Any, head: Tensor, embed: Any = None,
        beside: tuple[Any, Any] | None = None, adds: bool = False, ids: Tensor | None = None,
        vocab: int = 0,
    ) -> None:  # fmt: skip
        self.layers = [Layer(layer) for layer in layers]
        self.embed, self.rotary = embed, rotary
        self.frequencies: Tensor = rotary.original_inv_freq  # the only ones within the context
        self.norm, self.head = norm and Norm(norm), head
        self.beside = beside and (Norm(beside[0]), Norm(beside[1]))
        self.adds, self.ids, self.vocab = adds, ids, vocab or len(head)
        self.by_length_up_to = by_length_up_to(head)

    def __call__(
        self, tokens: Tensor, positions: Tensor, visible: Branches | None, cache: SlotCache,
        taps: tuple[int, ...], last: int | None, **inputs: Tensor,
    ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        """See `lm.Network`. inputs: optionally the states x [B * n, E]. Tap -1: the input of the
        last norm."""
        B, n = tokens.shape
        x, read = self._begin(tokens.flatten(), **inputs)
        info = AttentionInfo(cache, visible, positions, cache.kinds[0])
        rotations = self._rotations(x, positions)
        states = {0: x} if 0 in taps else {}
        norms = [*(layer.before for layer in self.layers[1:]), self.norm]
        each = zip(self.layers, norms, cache.layers, strict=False)
        for t, (layer, then, slots) in enumerate(each, 1):
            # an early exit has fewer layers than the cache
            x, read = layer(x, read, info, rotations, slots, then)
            states |= {t: x} if t in taps else {}
        states[-1] = x
        states[len(self.layers)] = x = read
        hidden = torch.cat([states[t] for t in taps], -1).view(B, n, -1) if taps else None
        if last == 0:
            return None, hidden
        x = x if last is None else x.view(B, n, -1)[:, -last:].flatten(0, 1)
        logits = product(x, self.head, None).reshape(B, last or n, -1)
        return logits if self.ids is None else among_all(logits, self.ids, self.vocab), hidden

    def _begin(self, tokens: Tensor, x: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The residual that the first layer gets, and what its attention reads."""
        if x is None or self.beside is None:
            x = F.embedding(tokens.clamp(min=0), self.embed) if x is None else x
            first = self.layers[0].before
            return x, first(x) if first else x
        embedded = F.embedding(tokens.clamp(min=0), self.embed).to(x.dtype)
        normed = self.beside[1](x)
        return normed if self.adds else x, torch.cat([self.beside[0](embedded), normed], -1)

    def _rotations(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Of `rotate_and_store`, in the dtype of x."""
        angles = positions[..., None] * self.frequencies
        scale = self.rotary.attention_scaling
        cos, sin = ((part * scale).to(x.dtype) for part in (angles.cos(), angles.sin()))
        return torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None]


@kernel(lm.network, "cpu")
def network(module: Any, name: str, vocab: int) -> Network:
    """The module's fused passes, compiled if they can be; none after a warning that says why. All
    LMs of one module and vocabulary share them."""
    if not isinstance(module, transformers.PreTrainedModel):
        return NotImplemented
    networks = _FUSED.setdefault(module, {})
    key = vocab, build.off()
    if key not in networks:
        networks[key], why = _fuse(module, vocab)
        warn(name, networks[key], why)
    return networks[key] or NotImplemented


_FUSED: WeakKeyDictionary[Any, dict[tuple[int, bool], Fused | Native | None]] = WeakKeyDictionary()
# Relative difference of logits that rounding alone explains, through many layers.
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.1}


def warn(name: str, net: object, why: str) -> None:
    """Log why a module is run by `net` (None: by transformers) and by nothing faster."""
    if why:
        how = "in torch's operations, uncompiled" if net else "without passes of our own"
        log.warning("%s: run %s, because %s", name, how, why)


@torch.inference_mode()
def _fuse(module: Any, vocab: int) -> tuple[Fused | Native | None, str]:
    family = type(module).__name__
    if family not in FAMILIES:
        return None, f"{family} is none of {', '.join(sorted(FAMILIES))}"
    kinds = memory.layers(module.config, context_length(module.config))
    spans = {(layer.window, layer.chunk) for layer in kinds}
    if len(spans) > 1:
        return None, "not all of its layers have the same window"
    if not all(map(int8.by_rows, module.parameters())):
        return None, "its weights are neither plain tensors nor quantised by rows"

    tokens = probe(module)
    try:
        base, ids = module.model, getattr(module.lm_head, "ids", None)
        head = module.lm_head.weight[: vocab if ids is None else None]
        fused = Fused(
            base.layers, base.rotary_emb, base.norm, head, base.embed_tokens.weight,
            ids=ids, vocab=vocab,
        )  # fmt: skip
        wanted = module(input_ids=tokens, use_cache=False).logits[..., :vocab]
    except Exception as e:  # what calls itself by a family's name may be anything
        return None, failure(e)
    if wanted.isnan().any():  # which load.py refuses in a line of its own
        return None, ""
    return fastest_agreeing(implementations(fused), kinds, tokens, wanted)


def probe(module: Any) -> Tensor:
    """Tokens [1, 8] on which implementations are compared."""
    return torch.arange(8, device=module.device)[None] * 7919 % module.config.vocab_size


def whole_sequence(kinds: Sequence[Any] | int, tokens: Tensor) -> tuple[Tensor, SlotCache]:
    """Positions [1, n] of a sequence of tokens [1, n], and a cache of layers of these kinds, aimed
    at its n slots."""
    n = tokens.shape[1]
    at, cache = torch.arange(n, device=tokens.device)[None], SlotCache(kinds, 1, n)
    cache.aim(slice(0, 1), at, n)
    return at, cache


def implementations(fused: Fused) -> Iterator[Fused | Native]:
    """Implementations of a network, each faster than the one before."""
    yield fused
    if compiled := passes.of(fused):
        yield compiled


def fastest_agreeing(
    nets: Iterable[Net],
    kinds: Sequence[Any] | int,
    tokens: Tensor,
    reference: Tensor,
    **inputs: Tensor,
) -> tuple[Net | None, str]:
    """The last of these networks such that it and all before it give the `reference` logits of
    tokens [1, n], or None; and why the next one was not taken, if there is one."""
    best: Net | None = None
    for net in nets:
        try:
            difference = _difference(net, kinds, tokens, reference, inputs)
        except Exception as e:
            return best, failure(e)
        if not difference <= ROUNDING.get(reference.dtype, 0.0):
            why = f"its logits differ by {difference:.1e} of their size from those of its module"
            rounded = reference.dtype == torch.float64 and difference <= ROUNDING[torch.float32]
            return best, "in float64 their rounding shows" if rounded else why
        best = net
    return best, ""


def failure(e: Exception) -> str:
    """What a network raised, in words. If memory ran out, which is no fault of the network's, it is
    raised again."""
    if isinstance(e, torch.OutOfMemoryError) or ran_out(str(e)):
        raise e
    return f"it fails with {type(e).__name__}: {first_line(e)}"


def _difference(
    net: Any,
    kinds: Sequence[Any] | int,
    tokens: Tensor,
    reference: Tensor,
    inputs: dict[str, Tensor],
) -> float:
    """The relative difference from the reference logits, where those are finite."""
    at, cache = whole_sequence(kinds, tokens)
    logits, _ = net(tokens, at, None, cache, (), None, **inputs)
    finite = reference.isfinite()
    return float((logits - reference)[finite].float().norm() / reference[finite].float().norm())
