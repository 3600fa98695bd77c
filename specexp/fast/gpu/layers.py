"""What a decoder layer does between its matrix products and attention, one kernel each.

Alone these take two to nine launches each, of two microseconds whatever their size. Numbers are
float32 inside and rounded once, when they are written.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specexp.fast.fused import Layer, Norm, Sight

KINDS = (torch.float32, torch.bfloat16, torch.float16)
FEW = 16  # rows: the least product
WIDEST = 16384  # numbers of a row that one program holds


@triton.jit
def turn(
    qkv, cos, sin, slots, q_norm, k_norm, q, keys, values, eps, n, qkv_r, slots_b, slots_n,
    k_b, k_h, k_s, v_b, v_h, v_s, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    WIDE: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """One head of one token: its query to q [B, H, n, D], or its key or value to their slot."""
    place, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, token = place // n, place % n
    d = tl.arange(0, WIDE)
    real = d < D
    other = (d + D // 2) % D  # the half of the head that is mixed into this one
    here = qkv + place * qkv_r + head * D
    x = tl.load(here + d, real, other=0.0).to(tl.float32)
    if head < H + K:
        y = tl.load(here + other, real, other=0.0).to(tl.float32)
        if NORMS:
            weight = q_norm if head < H else k_norm
            size = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
            x = x * size * tl.load(weight + d, real, other=0.0).to(tl.float32)
            y = y * size * tl.load(weight + other, real, other=0.0).to(tl.float32)
        x = x * tl.load(cos + place * D + d, real, other=0.0).to(tl.float32)
        x += y * tl.load(sin + place * D + d, real, other=0.0).to(tl.float32)
    slot = tl.load(slots + row * slots_b + token * slots_n)
    if head < H:
        to = q + ((row * H + head) * n + token) * D
    elif head < H + K:
        to = keys + row * k_b + (head - H) * k_h + slot * k_s
    else:
        to = values + row * v_b + (head - H - K) * v_h + slot * v_s
    tl.store(to + d, x.to(q.dtype.element_ty), real)


def turned(qkv: Tensor, layer: Layer, sight: Sight, cache: Any) -> tuple[Tensor, Tensor, Tensor]:
    B, _, n, d = sight.cos.shape
    H, K, slots = layer.heads, layer.keys, sight.slots
    norms = [norm.weight for norm in layer.norms or ()]
    turns = sight.cos, sight.sin
    if qkv.dtype not in KINDS or d % 2 or qkv.stride(1) != 1 or not all(map(packed, turns)):
        return NotImplemented
    if any(x.dtype != qkv.dtype for x in turns):
        return NotImplemented
    if not cache.is_initialized:
        cache.lazy_initialization(*[qkv.new_empty(B, K, n, d)] * 2)
    seen = cache.cache.rows, slice(None), slice(0, cache.cache.seen)
    keys, values = cache.keys[seen], cache.values[seen]
    q = qkv.new_empty(B, H, n, d)
    turn[B * n, H + 2 * K](
        qkv, sight.cos, sight.sin, slots, *(norms or (qkv, qkv)), q, keys, values,
        layer.norms[0].eps if layer.norms else 0.0, n, qkv.stride(0), *slots.stride(),
        *keys.stride()[:3], *values.stride()[:3], H=H, K=K, D=d,
        WIDE=triton.next_power_of_2(d), NORMS=bool(norms),
    )  # fmt: skip
    return q, keys, values


def packed(x: Tensor) -> bool:
    return x.is_contiguous()


@triton.jit
def add(x, y, weight, total, normed, eps, E: tl.constexpr, WIDE: tl.constexpr):
    """x + y of one row, and its norm."""
    at, e = tl.program_id(0).to(tl.int64) * E, tl.arange(0, WIDE)
    real = e < E
    z = tl.load(x + at + e, real, other=0.0).to(tl.float32)
    z += tl.load(y + at + e, real, other=0.0).to(tl.float32)
    z = z.to(total.dtype.element_ty)  # what is normed is the sum as it is written
    tl.store(total + at + e, z, real)
    z = z.to(tl.float32)
    z = (
        z
        * tl.rsqrt(tl.sum(z * z, 0) / E + eps)
        * tl.load(weight + e, real, other=0.0).to(tl.float32)
    )
    tl.store(normed + at + e, z.to(total.dtype.element_ty), real)


def added(x: Tensor, y: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor]:
    if norm is None or x.shape != y.shape or x.dtype not in KINDS or x.shape[1] > WIDEST:
        return NotImplemented
    if y.dtype != x.dtype or norm.weight.dtype != x.dtype or not (packed(x) and packed(y)):
        return NotImplemented
    total, normed, (rows, E) = torch.empty_like(x), torch.empty_like(x), x.shape
    wide = triton.next_power_of_2(E)
    add[rows,](
        x, y, norm.weight, total, normed, norm.eps, E=E, WIDE=wide, num_warps=warps(wide)
    )  # fmt: skip
    return total, normed


def warps(wide: int) -> int:
    """Of a program over a row: about 16 numbers a thread."""
    return max(1, min(16, wide // 512))


@triton.jit
def gate(wide, out, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = at < HIDDEN
    x = tl.load(wide + row * 2 * HIDDEN + at, real, other=0.0).to(tl.float32)
    up = tl.load(wide + row * 2 * HIDDEN + HIDDEN + at, real, other=0.0).to(tl.float32)
    tl.store(out + row * HIDDEN + at, (x / (1 + tl.exp(-x)) * up).to(out.dtype.element_ty), real)


def gated(wide: Tensor) -> Tensor:
    if wide.dtype not in KINDS or not packed(wide) or wide.dim() != 2:
        return NotImplemented
    hidden = wide.shape[1] // 2
    out = wide.new_empty(len(wide), hidden)
    gate[len(wide), triton.cdiv(hidden, 1024)](wide, out, HIDDEN=hidden, BLOCK=1024)
    return out


@triton.jit
def gate_products(
    x, weight, bias, out, n, stride, E: tl.constexpr, HIDDEN: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, DEPTH: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Some columns of both products of a few rows of x, and their gate."""
    row, at, e = tl.arange(0, ROWS), tl.arange(0, BLOCK), tl.arange(0, DEPTH)
    column = tl.program_id(0) * BLOCK + at
    gates = tl.zeros([ROWS, BLOCK], tl.float32)
    ups = tl.zeros([ROWS, BLOCK], tl.float32)
    here = weight + column.to(tl.int64)[:, None] * E
    for first in range(0, E, DEPTH):
        deep = first + e
        there = (column < HIDDEN)[:, None] & (deep < E)[None, :]
        some = x + row[:, None] * stride + deep[None, :]
        some = tl.load(some, (row < n)[:, None] & (deep < E)[None, :], other=0.0)
        w = tl.load(here + deep[None, :], there, other=0.0)
        gates = tl.dot(some, tl.trans(w), gates, input_precision="tf32x3")
        w = tl.load(here + HIDDEN * E + deep[None, :], there, other=0.0)
        ups = tl.dot(some, tl.trans(w), ups, input_precision="tf32x3")
    if BIAS:
        gates += tl.load(bias + column, column < HIDDEN, other=0.0).to(tl.float32)[None, :]
        ups += tl.load(bias + HIDDEN + column, column < HIDDEN, other=0.0).to(tl.float32)[None, :]
    y = (gates / (1 + tl.exp(-gates)) * ups).to(out.dtype.element_ty)
    real = (row < n)[:, None] & (column < HIDDEN)[None, :]
    tl.store(out + row[:, None] * HIDDEN + column[None, :], y, real)


def gated_products(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Of few rows, which wait for the weights alone; of more, torch's product is faster."""
    n, (wide, E) = len(x), weight.shape
    plain = type(weight) in (Tensor, torch.nn.Parameter) and weight.is_contiguous()
    if n > FEW or x.dtype not in KINDS or weight.dtype != x.dtype or not plain:
        return NotImplemented
    if x.stride(1) != 1 or (bias is not None and not packed(bias)):
        return NotImplemented
    out, narrow = x.new_empty(n, wide // 2), x.dtype.itemsize == 2
    gate_products[triton.cdiv(wide // 2, 32),](
        x, weight, weight if bias is None else bias, out, n, x.stride(0), E=E, HIDDEN=wide // 2,
        ROWS=FEW, BLOCK=32, DEPTH=128 if narrow else 64, BIAS=bias is not None,
        num_stages=4 if narrow else 3,
    )  # fmt: skip
    return out
