"""Fused passes of Llama-like models: the same weights, fewer operations.

A pass over a few tokens consists of many short operations, and starting one takes time whatever its
size. Here the products for q, k and v are one product, as are those for gate and up; q and k are
rotated together; and queries that share a key head are stacked, so that no key is copied. The
module itself still works: its parameters become views of the joined matrices. Only the families
below are fused, and only if all their layers have the same window. A module of another family, or
one whose fused logits differ from its own on a probe, is run by transformers (`lm.Unfused`; on a
GPU see lighter.py), after a warning that says why.

The operations marked @op are the references of Triton's kernels in gpu/. On a CPU a whole pass is
compiled instead (cpu/passes.cpp). The cache decides where keys and values are written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
import transformers  # imports a class when it is named: model classes take a second
from torch import Tensor

from specexp.errors import first_line, ran_out
from specexp.fast.cpu import build, passes
from specexp.fast.cpu.passes import Native
from specexp.fast.parts import beyond_weights, joined, weights_of
from specexp.models import int8, lm, memory
from specexp.models.cache import SlotCache
from specexp.models.lm import Network, among_all, product
from specexp.models.servable import context_length
from specexp.ops import kernel, op
from specexp.tree import Branches

log = logging.getLogger("specexp")
Net = TypeVar("Net")
Kinds: TypeAlias = Sequence[Any] | int  # of a cache's layers; a number: all of them read every slot

FAMILIES = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}


class Norm:
    """RMS norm (Zhang & Sennrich 2019) of x [..., E], by the weight and epsilon of a module."""

    def __init__(self, module: Any) -> None:
        self.weight: Tensor = module.weight.detach()
        self.eps: float = module.variance_epsilon

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True)
class AttentionInfo:
    """What attention needs to know of a pass over tokens [B, n], in layers of one kind.

    positions: [B, n]. masks: the masks made so far, by the number of query heads
    that share a key head and the number of tokens. lasts: what `of_last` has returned, by n.
    """

    cache: SlotCache
    positions: Tensor
    kind: memory.Layer
    masks: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    lasts: dict[int, tuple[Tensor, Tensor, Branches | None]] = field(default_factory=dict)

    @property
    def slots(self) -> Tensor:
        """[B, n]: the slot of each token."""
        return self.cache.slots[:, 0, :, 0]

    @property
    def size(self) -> int:
        """How many places for keys each row of these layers has: all slots, or those of a ring."""
        return self.cache.sizes[self.kind.span]

    def of_last(self, n: int) -> tuple[Tensor, Tensor, Branches | None]:
        """Of each row's last n tokens: slots [B, n], positions [B, n] and what they see
        (`SlotCache.see`), before the layers' window narrows it."""
        if n not in self.lasts:
            seen = self.cache.visible
            seen = seen and replace(seen, ancestors=seen.ancestors[:, -n:])
            self.lasts[n] = self.slots[:, -n:], self.positions[:, -n:], seen
        return self.lasts[n]

    def mask(self, dtype: torch.dtype, group: int, n: int) -> Tensor:
        """The additive mask [B, 1, group * n, S] of the last n tokens, repeated for the `group`
        query heads that share a key head; as `scaled_dot_product_attention` takes it."""
        if (group, n) not in self.masks:
            near = self.cache.near(self.kind.window, self.kind.chunk)
            mask = self.cache.mask(near, dtype)[:, :, -n:]
            self.masks[group, n] = mask.repeat(1, 1, group, 1) if group > 1 else mask
        return self.masks[group, n]


@op
def add_norm(x: Tensor, y: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor]:
    """The sum x + y [rows, E], and its `norm`; without a norm, the sum twice."""
    x = x + y
    return x, norm(x) if norm else x


@op
def product_add_norm(
    x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm | None
) -> tuple[Tensor, Tensor]:
    """`add_norm` of x [rows, E] and the product of y [rows, depth] and weight [E, depth], plus
    bias [E]."""
    return add_norm(x, product(y, weight, bias), norm)


@op
def swiglu(x: Tensor) -> Tensor:
    """[rows, hidden]: SiLU of the first half of x [rows, 2 * hidden], times the second half
    (SwiGLU: Shazeer 2020)."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


@op
def product_swiglu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`swiglu` of the product of x [rows, E] and weight [2 * hidden, E], plus bias [2 * hidden]."""
    return swiglu(product(x, weight, bias))


@op
def rotate_and_store(
    qkv: Tensor, layer: Layer, rotations: tuple[Tensor, Tensor], cache: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate the queries and keys in qkv [B * n, (H + 2K) d] by their positions (RoPE: Su et al.
    2021), after the layer's norms of heads if it has any, and write keys and values to the cache.
    rotations: cosines and sines [B, 1, n, d], the first half of the sines negated. Returns queries
    [B, H, n, d], and the layer's whole cache of keys and of values, each [B, K, S, d]."""
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
    pass, over keys and values [B, K, S, d]. scale: multiplies scores. cap: a hyperbolic tangent
    keeps scores between -cap and cap (Gemma 2); 0: no bound. sinks [H]: for each head, the score of
    one more key, whose value is 0 (gpt-oss).
    """
    B, H, n, d = q.shape
    group = H // keys.shape[1]
    q = q.reshape(B, keys.shape[1], -1, d)  # queries that share a key head are stacked
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
    """`lm.Network.by_length_up_to` of passes with an LM head like this: 0, because the reference of
    `attention` reads all slots under a mask."""
    return 0


class Layer:
    """A decoder layer, called on the residual x [B * n, E]. Its weights are those of a transformers
    layer: `qkv` [(H + 2K) d, inputs] and `up` (gate, then up) [2 * hidden, E] are joined.
    `compiles`: cpu/passes.cpp can run it."""

    compiles = True

    def __init__(self, layer: Any) -> None:
        attn, mlp = layer.self_attn, layer.mlp
        first = getattr(layer, "input_layernorm", None)
        self.before = first and Norm(first)
        self.after = Norm(layer.post_attention_layernorm)
        self.qkv, self.qkv_bias = joined([attn.q_proj, attn.k_proj, attn.v_proj])
        self.out, self.out_bias = joined([attn.o_proj])
        self.up, self.up_bias = joined([mlp.gate_proj, mlp.up_proj])
        self.down, self.down_bias = joined([mlp.down_proj])
        self.norms = (Norm(attn.q_norm), Norm(attn.k_norm)) if hasattr(attn, "q_norm") else None
        self.head_dim, self.scale = attn.head_dim, attn.scaling
        self.heads = attn.q_proj.out_features // self.head_dim
        self.keys = attn.k_proj.out_features // self.head_dim
        self.hidden = mlp.gate_proj.out_features

    def __call__(
        self, x: Tensor, read: Tensor, info: AttentionInfo, rotations: tuple[Tensor, Tensor],
        cache: Any, then: Norm | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """read: x after this layer's first norm. then: the norm that reads its output, that of the
        next layer or the last one. Returns the new x, and `then` of it, both [B * n, E]."""
        qkv = product(read, self.qkv, self.qkv_bias)
        q, keys, values = rotate_and_store(qkv, self, rotations, cache)
        heads = attention(q, keys, values, info, self.scale)
        x, read = product_add_norm(x, heads, self.out, self.out_bias, self.after)
        read = product_swiglu(read, self.up, self.up_bias)
        return product_add_norm(x, read, self.down, self.down_bias, then)


class Fused:
    """A whole network (`lm.Network`). It reads tokens [B, n], or hidden states in place of their
    embeddings, or, as the layer of EAGLE-3, both.

    beside: the norms of embeddings and of states, if it reads both: the first attention reads the
    two normed and concatenated. adds: the residual then starts from the normed state, not from the
    state itself. ids [V']: the token that each row of `head` stands for, among `vocab` tokens; all
    others get -inf. None: the rows are all tokens in order. made: makes a layer of a module's.
    """

    parts = ()

    def __init__(
        self, layers: Sequence[Any], rotary: Any, norm: Any, head: Tensor, embed: Any = None,
        beside: tuple[Any, Any] | None = None, adds: bool = False, ids: Tensor | None = None,
        vocab: int = 0, made: Callable[[Any], Layer] = Layer,
    ) -> None:  # fmt: skip
        self.layers = [made(layer) for layer in layers]
        self.embed: Any = None if embed is None else embed.detach()
        self.rotary = rotary
        self.frequencies: Tensor = rotary.original_inv_freq  # others apply past the context only
        self.norm, self.head = norm and Norm(norm), head.detach()
        self.beside = beside and (Norm(beside[0]), Norm(beside[1]))
        self.adds, self.ids, self.vocab = adds, ids, vocab or len(head)
        self.by_length_up_to = by_length_up_to(head)

    def __call__(
        self, tokens: Tensor, positions: Tensor, cache: SlotCache, taps: tuple[int, ...],
        last: int | None, **inputs: Tensor,
    ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        """See `lm.Network`. inputs: the hidden states x [B * n, E], if it reads any. The tap -1 is
        what the last norm reads."""
        B, n = tokens.shape
        x, read = self._begin(tokens.flatten(), **inputs)
        info = AttentionInfo(cache, positions, cache.kinds[0])
        rotations = self._rotations(x, positions)
        states = {0: x} if 0 in taps else {}
        norms = [*(layer.before for layer in self.layers[1:]), self.norm]
        each = zip(self.layers, norms, cache.layers, strict=False)
        for t, (layer, then, slots) in enumerate(each, 1):
            # a network that exits early has fewer layers than the cache
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
        """The residual that the first layer adds to, and what its attention reads."""
        if x is None or self.beside is None:
            x = F.embedding(tokens.clamp(min=0), self.embed) if x is None else x
            first = self.layers[0].before
            return x, first(x) if first else x
        embedded = F.embedding(tokens.clamp(min=0), self.embed).to(x.dtype)
        normed = self.beside[1](x)
        return normed if self.adds else x, torch.cat([self.beside[0](embedded), normed], -1)

    def _rotations(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The cosines and sines that `rotate_and_store` takes, in the dtype of x."""
        angles = positions[..., None] * self.frequencies
        scale = self.rotary.attention_scaling
        cos, sin = ((part * scale).to(x.dtype) for part in (angles.cos(), angles.sin()))
        return torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None]


@kernel(lm.network, "cpu")
def network(module: Any, name: str, vocab: int) -> Network:
    """The module's fused passes, compiled if they can be, with logits of the first `vocab` tokens.
    NotImplemented for what is no transformers model and, after a warning that says why, for a
    module that cannot be fused. All LMs of one module and vocabulary share the passes, until the
    module has other weights."""
    if not isinstance(module, transformers.PreTrainedModel):
        return NotImplemented
    key = vocab, build.off()
    return kept(module, key, lambda: warned(name, *_fuse(module, vocab)))


# By key (`kept`): a network, and the `weights_of` the module that it is of.
_FUSED: WeakKeyDictionary[Any, dict[Hashable, tuple[Any, Any]]] = WeakKeyDictionary()
# The relative difference of logits that rounding alone may cause through many layers.
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.1}


def kept(module: Any, key: Hashable, make: Callable[[], Network]) -> Network:
    """What `make` returned for this module and key, made anew if the module has other weights."""
    networks = _FUSED.setdefault(module, {})
    net, its_weights = networks.get(key, (None, None))
    if its_weights != weights_of(module):
        net = make()
        networks[key] = net, weights_of(module)  # joining has moved them
    return net


def warned(name: str, net: Network | None, why: str) -> Network:
    """`net`; NotImplemented for None. Logs `why` the module `name` is run by `net` (None: by
    transformers) and by nothing faster."""
    if why:
        how = "in torch's operations, uncompiled" if net else "by transformers, not fused"
        log.warning("%s: run %s, because %s", name, how, why)
    return net or NotImplemented


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
    if why := beyond_weights(module):
        return None, why

    tokens = probe(module)
    try:
        base, ids = module.model, getattr(module.lm_head, "ids", None)
        head = module.lm_head.weight.data[: vocab if ids is None else None]
        fused = Fused(
            base.layers, base.rotary_emb, base.norm, head, base.embed_tokens.weight,
            ids=ids, vocab=vocab,
        )  # fmt: skip
        wanted = module(input_ids=tokens, use_cache=False).logits[..., :vocab]
    except Exception as e:  # a class with a family's name may do anything
        return None, failure(e)
    if wanted.isnan().any():  # load.py refuses such a module, and says so
        return None, ""
    return fastest_agreeing(implementations(fused), kinds, tokens, wanted)


def inside(head: Tensor, ids: Tensor, vocab: int) -> tuple[Tensor, Tensor | None]:
    """The rows of a head [V', E] whose tokens `ids` [V'] are among the first `vocab`, and these
    tokens; None if they are all the tokens in order."""
    head = head.data  # in inference mode no quantised parameter can be cut
    if torch.equal(ids, torch.arange(len(ids), device=ids.device)) and len(ids) >= vocab:
        return head[:vocab], None
    if not (valid := ids < vocab).all():
        ids, head = ids[valid], head[valid]
    return head, ids.contiguous()


def probe(module: Any) -> Tensor:
    """The tokens [1, 8] on which implementations are compared."""
    return torch.arange(8, device=module.device)[None] * 7919 % module.config.vocab_size


def whole_sequence(kinds: Kinds, tokens: Tensor) -> tuple[Tensor, SlotCache]:
    """Positions [1, n] of tokens [1, n], and a cache with layers of these kinds that is aimed at
    slots 0..n-1."""
    n = tokens.shape[1]
    at, cache = torch.arange(n, device=tokens.device)[None], SlotCache(kinds, 1, n)
    cache.aim(slice(0, 1), at, n)
    return at, cache


def implementations(fused: Fused) -> Iterator[Fused | Native]:
    """Implementations of a network, each faster than the one before: uncompiled, then compiled."""
    yield fused
    if compiled := passes.of(fused):
        yield compiled


def fastest_agreeing(
    nets: Iterable[Net], kinds: Kinds, tokens: Tensor, reference: Tensor, **inputs: Tensor
) -> tuple[Net | None, str]:
    """The fastest of `nets`, which are in order of speed, of those before the first whose logits of
    tokens [1, n] differ from `reference` [1, n, V] by more than rounding, or None; and in words,
    why the next one was not taken. `inputs` are passed on. Raises what says that memory ran out."""
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
    """What a network raised, in words. An exception that says that memory ran out is raised again,
    because the network is not at fault."""
    if isinstance(e, torch.OutOfMemoryError) or ran_out(str(e)):
        raise e
    return f"it fails with {type(e).__name__}: {first_line(e)}"


def _difference(
    net: Any, kinds: Kinds, tokens: Tensor, reference: Tensor, inputs: dict[str, Tensor]
) -> float:
    """The relative difference of a network's logits from the reference, where that is finite."""
    at, cache = whole_sequence(kinds, tokens)
    logits, _ = net(tokens, at, cache, (), None, **inputs)
    finite = reference.isfinite()
    return float((logits - reference)[finite].float().norm() / reference[finite].float().norm())
