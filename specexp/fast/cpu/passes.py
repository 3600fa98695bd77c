"""Compiled passes: a pass of a network over a few rows as one call of passes.cpp.

As torch's operations, a small model's pass is some six hundred calls of a few microseconds each,
three times as long as it takes to read the weights. A token's logits are equal to the last bit
whatever tokens share its pass, so verifying a chain gives exactly what plain decoding gives. The
weights must be plain float32 or bfloat16 tensors on a CPU, those of products may be 8-bit integers
with a scale for each row, and all layers must be of the same shapes; other networks run uncompiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import POINTER, Structure, addressof, c_float, c_int64, c_void_p
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from specexp.fast.cpu.build import address, addresses, library
from specexp.models import int8

if TYPE_CHECKING:
    from specexp.models.cache import SlotCache

NORMS, PRODUCTS = ("before", "after", "q_norm", "k_norm"), ("qkv", "out", "up", "down")


class Matrix(Structure):  # this and the three below repeat structs of passes.cpp, field by field
    _fields_ = [(name, c_void_p) for name in ("weights", "bias", "scales")]


class Layer(Structure):
    _fields_ = [*((n, c_void_p) for n in NORMS), *((p, Matrix) for p in PRODUCTS)]


class Net(Structure):
    _fields_ = [
        *((n, c_int64) for n in ("layers", "width", "reads", "heads", "keys", "dim", "hidden")),
        *((n, c_int64) for n in ("known", "vocab", "all", "adds")),
        *((n, c_float) for n in ("eps", "scale", "stretch")),
        *((n, c_void_p) for n in ("embed", "norm")),
        ("head", Matrix),
        *((n, c_void_p) for n in ("token_norm", "state_norm", "ids", "frequencies")),
        ("layer", POINTER(Layer)),
    ]


class Pass(Structure):
    _fields_ = [
        *((n, c_int64) for n in ("rows", "n", "seen", "threads")),
        *((n, c_void_p) for n in ("tokens", "positions", "slots", "visible", "x", "k", "v")),
        *((n, c_int64) for n in ("at", "row_stride", "head_stride", "last", "taps")),
        *((n, c_void_p) for n in ("tap", "states", "logits", "room")),
    ]


class Native:
    """Compiled passes of a `Fused` network on a CPU; a `lm.Network`. Passes over more than
    `by_length_up_to` tokens are left to `fused`: torch's products are faster for many rows."""

    by_length_up_to = 512
    parts = ()

    def __init__(self, fused: Any, code: Any) -> None:
        self.fused, first = fused, fused.layers[0]
        self.dtype: torch.dtype = fused.head.dtype
        name = str(self.dtype).removeprefix("torch.")
        self.run = getattr(code, name)
        self.room_for = getattr(code, f"room_for_{name}").code  # which is not recorded
        self.frequencies = fused.frequencies.float().contiguous()
        self.layers = (Layer * len(fused.layers))(*(_layer(layer) for layer in fused.layers))
        vocab = 0 if fused.embed is None else len(fused.embed)  # of its input
        self.net = Net(
            len(fused.layers), fused.head.shape[1], first.qkv.shape[1], first.heads, first.keys,
            first.head_dim, first.hidden, vocab, len(fused.head), fused.vocab, fused.adds,
            first.after.eps, first.scale, fused.rotary.attention_scaling, address(fused.embed),
            _weight(fused.norm), _matrix(fused.head, None),
            *map(_weight, fused.beside or (None, None)),
            address(fused.ids), address(self.frequencies), self.layers,
        )  # fmt: skip
        self.buffers: WeakKeyDictionary[SlotCache, tuple[Any, Any]] = WeakKeyDictionary()

    def __call__(
        self, tokens: Tensor, positions: Tensor, cache: SlotCache, taps: tuple[int, ...],
        last: int | None, **inputs: Tensor,
    ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        """See `Fused.__call__`; logits are float32. Raises IndexError if a token is outside the
        vocabulary or a slot is outside the cache."""
        B, n = tokens.shape
        if B * n > self.by_length_up_to:
            return self.fused(tokens, positions, cache, taps, last, **inputs)
        last, net = n if last is None else last, self.net
        keys, values = self.buffers.get(cache) or self._buffers(cache)
        tapped = (c_int64 * len(taps))(*taps)
        size = cache.layers[0].size
        seen = min(cache.seen, size)
        near = cache.near(cache.kinds[0].window, cache.kinds[0].chunk)
        arguments = (tokens, positions, cache.places[size], near, inputs.get("x"))
        packed = [None if x is None else x.contiguous() for x in arguments]
        states = torch.empty(B, n, len(taps) * net.width, dtype=self.dtype) if taps else None
        logits = torch.empty(B, last, net.all, dtype=torch.float32)
        head = size * net.dim
        row = net.keys * head
        call = Pass(
            B, n, seen, torch.get_num_threads(), *map(address, packed), addressof(keys),
            addressof(values), cache.rows.start * row, row, head, last, len(taps),
            addressof(tapped), address(states), address(logits), None,
        )  # fmt: skip
        floats = self.room_for((c_int64 * 2)(addressof(net), addressof(call)))
        room = torch.empty(floats, dtype=torch.float32)
        call.room = address(room)
        call.holds = packed, keys, values, tapped, states, logits, room
        if not self.run(net, call):
            raise IndexError(f"a token is not below {net.known}, or a slot not below {seen}")
        return logits if last else None, states

    def _buffers(self, cache: SlotCache) -> tuple[Any, Any]:
        """The addresses of every layer's keys and values, which are allocated first if need be."""
        like = torch.empty(0, self.net.keys, 0, self.net.dim, dtype=self.dtype)
        layers = cache.layers[: len(self.layers)]
        for layer in layers:
            if not layer.is_initialized:
                layer.lazy_initialization(like, like)
        buffers = addresses([x.keys for x in layers]), addresses([x.values for x in layers])
        return self.buffers.setdefault(cache, buffers)


def _weight(norm: Any) -> int | None:
    return norm and address(norm.weight)


def _layer(layer: Any) -> Layer:
    norms = map(_weight, (layer.before, layer.after, *(layer.norms or (None, None))))
    return Layer(
        *norms, *(_matrix(getattr(layer, p), getattr(layer, f"{p}_bias")) for p in PRODUCTS)
    )


def _matrix(weight: Tensor, bias: Tensor | None) -> Matrix:
    weights, scales = int8.scaled_rows(weight) or (weight, None)
    return Matrix(address(weights), address(bias), address(scales))


def _tensors(fused: Any) -> Iterator[tuple[Tensor, tuple[int, ...], torch.dtype]]:
    """All tensors whose addresses a `Native` holds, with the shape and the dtype that passes.cpp
    takes it to have: layers are like the first, but that the first may read embeddings and
    states."""
    first, E, dtype = fused.layers[0], fused.head.shape[1], fused.head.dtype
    Q, wide = (first.heads + 2 * first.keys) * first.head_dim, first.heads * first.head_dim
    if fused.embed is not None:
        yield fused.embed, (len(fused.embed), E), dtype
    products = [(fused.head, (len(fused.head), E))]
    norms = [(norm, E) for norm in (fused.norm, *(fused.beside or ()))]
    for layer in fused.layers:
        reads = 2 * E if fused.beside and layer is first else E
        sides = {"qkv": (Q, reads), "out": (E, wide), "up": (2 * first.hidden, E)}
        for name, shape in (sides | {"down": (E, first.hidden)}).items():
            products.append((getattr(layer, name), shape))
            if (bias := getattr(layer, f"{name}_bias")) is not None:
                yield bias, shape[:1], dtype
        norms += [(layer.before, E), (layer.after, E)]
        norms += [(norm, first.head_dim) for norm in layer.norms or ()]
    for weight, shape in products:
        if scaled := int8.scaled_rows(weight):
            yield scaled[0], shape, torch.int8
            yield scaled[1], (shape[0], 1), torch.float32
        else:
            yield weight, shape, dtype
    yield from ((norm.weight, (size,), dtype) for norm, size in norms if norm)


def of(fused: Any) -> Native | None:
    """The compiled passes of a `Fused` network; None if there is no compiled code for its layers or
    weights, or its rotation covers only a part of a head."""
    if not all(layer.compiles for layer in fused.layers):
        return None
    dtype = fused.head.dtype
    if dtype not in (torch.float32, torch.bfloat16):
        return None
    for w, shape, kind in _tensors(fused):
        plain = type(w) is Tensor and w.is_cpu and w.dtype == kind and w.is_contiguous()
        if not plain or w.shape != shape:
            return None
    if 2 * len(fused.frequencies) != fused.layers[0].head_dim:
        return None
    code = library()
    return Native(fused, code) if code else None


def passes_s() -> float:
    """Seconds spent in compiled passes so far, in this process."""
    code = library()
    return code.spent_ns() / 1e9 if code else 0.0
