"""What a decoder layer does between its matrix products and attention, one kernel each.

The references in fused.py and lighter.py take two to ten launches each, of two microseconds
whatever their size. A kernel computes in float32 and rounds once, when it writes. Rows too wide for
one program, and other dtypes than KINDS, are left to the references.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specexp.fast.fused import Layer, Norm
from specexp.fast.gpu.launches import blocks_of, dependent_launch, power_of_2, wait_for_previous
from specexp.fast.lighter import epsilon

KINDS = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 16384  # numbers of the widest row that a norm takes: one program holds it


@triton.jit
def rotate_kernel(
    qkv, cos, sin, places, q_norm, k_norm, q, keys, values, eps, n, qkv_r, places_b, places_n,
    k_b, k_h, k_s, v_b, v_h, v_s, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    WIDE: tl.constexpr, NORMS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """fused.rotate_and_store. A program owns one head of one token: it reads the head in qkv
    [B * n, (H + 2K) D], and writes a query to q [B, H, n, D], a key or value to its place in the
    cache. cos, sin: [B * n, D]. WIDE: D rounded up to a power of two."""
    wait_for_previous(DEPENDENT)
    at, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row, token = at // n, at % n
    d = tl.arange(0, WIDE)
    real = d < D
    other = (d + D // 2) % D  # the other number of each pair
    here = qkv + at * qkv_r + head * D
    x = tl.load(here + d, real, other=0.0).to(tl.float32)
    if head < H + K:
        y = tl.load(here + other, real, other=0.0).to(tl.float32)
        if NORMS:
            weight = q_norm if head < H else k_norm
            size = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
            x = x * size * tl.load(weight + d, real, other=0.0).to(tl.float32)
            y = y * size * tl.load(weight + other, real, other=0.0).to(tl.float32)
        x = x * tl.load(cos + at * D + d, real, other=0.0).to(tl.float32)
        x += y * tl.load(sin + at * D + d, real, other=0.0).to(tl.float32)
    place = tl.load(places + row * places_b + token * places_n)
    if head < H:
        to = q + ((row * H + head) * n + token) * D
    elif head < H + K:
        to = keys + row * k_b + (head - H) * k_h + place * k_s
    else:
        to = values + row * v_b + (head - H - K) * v_h + place * v_s
    tl.store(to + d, x.to(q.dtype.element_ty), real)


def rotate_and_store(
    qkv: Tensor, layer: Layer, rotations: tuple[Tensor, Tensor], cache: Any
) -> tuple[Tensor, Tensor, Tensor]:
    B, _, n, d = rotations[0].shape
    H, K, places = layer.heads, layer.keys, cache.cache.places[cache.size][:, 0, :, 0]
    norms = [norm.weight for norm in layer.norms or ()]
    if qkv.dtype not in KINDS or d % 2 or qkv.stride(1) != 1:
        return NotImplemented
    if any(x.dtype != qkv.dtype or not x.is_contiguous() for x in rotations):
        return NotImplemented
    if not cache.is_initialized:
        cache.lazy_initialization(*[qkv.new_empty(B, K, n, d)] * 2)
    seen = cache.cache.rows, slice(None), slice(0, cache.cache.seen)
    keys, values = cache.keys[seen], cache.values[seen]
    q = qkv.new_empty(B, H, n, d)
    rotate_kernel[B * n, H + 2 * K](
        qkv, *rotations, places, *(norms or (qkv, qkv)), q, keys, values,
        layer.norms[0].eps if layer.norms else 0.0, n, qkv.stride(0), *places.stride(),
        *keys.stride()[:3], *values.stride()[:3], H=H, K=K, D=d,
        WIDE=power_of_2(d), NORMS=bool(norms), **dependent_launch(qkv),
    )  # fmt: skip
    return q, keys, values


@triton.jit
def add_norm_kernel(
    x, y, bias, weight, total, normed, eps, E: tl.constexpr, WIDE: tl.constexpr,
    PARTS: tl.constexpr, BIAS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """fused.add_norm. A program owns one row of x [rows, E]: it writes x + y to `total`, and the
    norm of that to `normed`. PARTS: y is [PARTS, rows, E], and summed first; 0: y is [rows, E]."""
    row, e = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    real = e < E
    scale = tl.load(weight + e, real, other=0.0).to(tl.float32)
    wait_for_previous(DEPENDENT)
    at = row * E + e
    if PARTS:
        more = tl.zeros([WIDE], tl.float32)
        for part in tl.static_range(PARTS):
            more += tl.load(y + part * tl.num_programs(0) * E + at, real, other=0.0)
        if BIAS:
            more += tl.load(bias + e, real, other=0.0).to(tl.float32)
        more = more.to(total.dtype.element_ty).to(tl.float32)  # rounded like a product's result
    else:
        more = tl.load(y + at, real, other=0.0).to(tl.float32)
    z = tl.load(x + at, real, other=0.0).to(tl.float32) + more
    z = z.to(total.dtype.element_ty)  # the norm is that of the rounded sum
    tl.store(total + at, z, real)
    z = z.to(tl.float32)
    z = z * tl.rsqrt(tl.sum(z * z, 0) / E + eps) * scale
    tl.store(normed + at, z.to(total.dtype.element_ty), real)


def add_norm(x: Tensor, y: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor]:
    if norm is None or not can_add_norm(x, norm) or x.shape != y.shape or y.dtype != x.dtype:
        return NotImplemented
    return launch_add_norm(x, y, None, norm, 0) if y.is_contiguous() else NotImplemented


def can_add_norm(x: Tensor, norm: Norm) -> bool:
    """Whether `add_norm_kernel` takes this x."""
    same = norm.weight.dtype == x.dtype and x.dtype in KINDS
    return same and x.is_contiguous() and x.shape[1] <= WIDEST


def launch_add_norm(
    x: Tensor, y: Tensor, bias: Tensor | None, norm: Norm, parts: int
) -> tuple[Tensor, Tensor]:
    """`add_norm` of x [rows, E] and y [parts, rows, E] plus bias; with parts = 0, y [rows, E]."""
    total, normed, (rows, E) = torch.empty_like(x), torch.empty_like(x), x.shape
    wide = power_of_2(E)
    warps = max(1, min(16, wide // 512))  # about 16 numbers a thread
    add_norm_kernel[rows,](
        x, y, x if bias is None else bias, norm.weight, total, normed, norm.eps, E=E, WIDE=wide,
        PARTS=parts, BIAS=bias is not None, num_warps=warps, **dependent_launch(x),
    )  # fmt: skip
    return total, normed


@triton.jit
def gated_kernel(
    gate, up, out, stride, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, TANH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """lighter.gated of rows [HIDDEN] that lie `stride` apart. A program owns BLOCK of a row."""
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = at < HIDDEN
    x = tl.load(gate + row * stride + at, real, other=0.0).to(tl.float32)
    y = tl.load(up + row * stride + at, real, other=0.0).to(tl.float32)
    slope = 1.5957691216057308 * (x + 0.044715 * x * x * x) if TANH else x  # 1.59..: 2 sqrt(2 / pi)
    y = x / (1 + tl.exp(-slope)) * y
    tl.store(out + row * HIDDEN + at, y.to(out.dtype.element_ty), real)


def swiglu(x: Tensor) -> Tensor:
    if x.dtype not in KINDS or not x.is_contiguous() or x.dim() != 2:
        return NotImplemented
    gate, up = x.chunk(2, -1)
    return launch_gated(gate, up, x.stride(0), False)


def gated(gate: Tensor, up: Tensor, tanh: bool) -> Tensor:
    if gate.dtype not in KINDS or up.dtype != gate.dtype or up.shape != gate.shape:
        return NotImplemented
    whole = gate.is_contiguous() and up.is_contiguous() and gate.numel()
    return launch_gated(gate, up, gate.shape[-1], tanh) if whole else NotImplemented


def launch_gated(gate: Tensor, up: Tensor, stride: int, tanh: bool) -> Tensor:
    """`lighter.gated` of rows that lie `stride` apart."""
    hidden = gate.shape[-1]
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    grid = gate.numel() // hidden, blocks_of(1024, hidden)
    gated_kernel[grid](
        gate, up, out, stride, HIDDEN=hidden, BLOCK=1024, TANH=tanh, **dependent_launch(gate)
    )
    return out


@triton.jit
def rms_norm_kernel(
    x, weight, out, eps, above, n_1, n_2, x_0, x_1, x_2, out_0, out_1, out_2, E: tl.constexpr,
    WIDE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """lighter.rms_norm of x [n_0, n_1, n_2, E], written to out. A program owns one row [E]."""
    e, row = tl.arange(0, WIDE), tl.program_id(0).to(tl.int64)
    first, second, third = row // (n_1 * n_2), row // n_2 % n_1, row % n_2
    real = e < E
    scale = tl.load(weight + e, real, other=0.0).to(tl.float32) + above
    wait_for_previous(DEPENDENT)
    at = x + first * x_0 + second * x_1 + third * x_2
    y = tl.load(at + e, real, other=0.0).to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y, 0) / E + eps) * scale
    to = out + first * out_0 + second * out_1 + third * out_2
    tl.store(to + e, y.to(out.dtype.element_ty), real)


def rms_norm(x: Tensor, norm: Any) -> Tensor:
    E = x.shape[-1]
    if x.dtype not in KINDS or norm.weight.dtype != x.dtype or not 1 < x.dim() < 5 or E > WIDEST:
        return NotImplemented
    if x.stride(-1) != 1 or norm.weight.shape != (E,):
        return NotImplemented
    out = torch.empty_like(x)
    x_rows, out_rows = (y[(None,) * (4 - x.dim())] for y in (x, out))
    wide = power_of_2(E)
    rms_norm_kernel[x.numel() // E,](
        x, norm.weight, out, epsilon(norm), norm.above, *x_rows.shape[1:3], *x_rows.stride()[:3],
        *out_rows.stride()[:3], E=E, WIDE=wide, num_warps=max(1, min(16, wide // 512)),
        **dependent_launch(x),
    )  # fmt: skip
    return out


@triton.jit
def turn_kernel(
    q, k, cos, sin, q_out, k_out, n, q_b, q_h, q_n, k_b, k_h, k_n, cos_b, cos_n, sin_b, sin_n,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """lighter.rotate of q [B, H, n, D] and k [B, K, n, D], written to q_out and k_out. A program
    owns one head of one token."""
    wait_for_previous(DEPENDENT)
    at, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row, token, d = at // n, at % n, tl.arange(0, WIDE)
    real, other = d < D, (d + D // 2) % D
    if head < H:
        here = q + row * q_b + head * q_h + token * q_n
        to = q_out + ((row * H + head) * n + token) * D
    else:
        here = k + row * k_b + (head - H) * k_h + token * k_n
        to = k_out + ((row * K + head - H) * n + token) * D
    x = tl.load(here + d, real, other=0.0).to(tl.float32)
    y = tl.load(here + other, real, other=0.0).to(tl.float32)
    x = x * tl.load(cos + row * cos_b + token * cos_n + d, real, other=0.0).to(tl.float32)
    y = y * tl.load(sin + row * sin_b + token * sin_n + d, real, other=0.0).to(tl.float32)
    x += tl.where(d < D // 2, -y, y)
    tl.store(to + d, x.to(q_out.dtype.element_ty), real)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    (B, H, n, d), K = q.shape, k.shape[1]
    tensors = q, k, cos, sin
    if q.dtype not in KINDS or d % 2 or any(x.stride(-1) != 1 for x in tensors):
        return NotImplemented
    fit = k.shape == (B, K, n, d) and all(x.shape in ((1, n, d), (B, n, d)) for x in (cos, sin))
    exact = all(x.dtype in (q.dtype, torch.float32) for x in (cos, sin))
    if not fit or not exact or k.dtype != q.dtype:
        return NotImplemented
    cos, sin = cos.expand(B, n, d), sin.expand(B, n, d)
    q_out, k_out = q.new_empty(B, H, n, d), k.new_empty(B, K, n, d)
    turn_kernel[B * n, H + K](
        q, k, cos, sin, q_out, k_out, n, *q.stride()[:3], *k.stride()[:3], *cos.stride()[:2],
        *sin.stride()[:2], H=H, K=K, D=d, WIDE=power_of_2(d), **dependent_launch(q),
    )  # fmt: skip
    return q_out, k_out
