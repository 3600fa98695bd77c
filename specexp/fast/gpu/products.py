"""Products of a few rows with a matrix of weights, which take as long as reading the weights.

So the whole GPU has to read at once: a matrix with few outputs is split along its depth, too, into
shares whose products are parts of the sums. The last program of a block of outputs adds the parts
up, or the kernel that adds the residual and norms it. For more rows torch's product is faster.

Weights may be 8-bit integers with one scale for each output, which multiplies its sum. torch first
widens such a matrix, and so moves five bytes a weight instead of one: here more rows are taken.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specexp.fast.fused import Norm
from specexp.fast.gpu.launches import blocks_of, dependent_launch, power_of_2, wait_for_previous
from specexp.fast.gpu.laws import counters, is_last
from specexp.fast.gpu.layers import KINDS, can_add_norm, launch_add_norm
from specexp.models import int8

FEW = 16  # rows at most; tl.dot multiplies no fewer
FEW_OF_INTEGERS = 32  # rows at most of 8-bit weights
FILLED = 512  # programs that keep a large GPU busy
DEEP = 256  # the depth of a share is a multiple of this


@triton.jit
def product_kernel(
    x, weight, scales, bias, parts, out, ended, n, stride, E: tl.constexpr, DEEP: tl.constexpr,
    SHARE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
    SCALED: tl.constexpr, BIAS: tl.constexpr, SUMS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """lm.product of few rows. A program owns BLOCK outputs over one share of the depth: it reads x
    [n, DEEP] and its part of weight [E, DEEP], and writes to parts [shares, n, E]. With SUMS, the
    last program of a block adds these up and writes out [n, E]. SCALED: weights are integers."""
    row, e, begins = tl.arange(0, ROWS), tl.arange(0, DEPTH), tl.program_id(1) * SHARE
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = weight + tl.minimum(column, E - 1).to(tl.int64) * DEEP + begins
    wait_for_previous(DEPENDENT)
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, SHARE, DEPTH):
        deep = begins + first + e
        some = x + row[:, None] * stride + deep[None, :]
        some = tl.load(some, (row < n)[:, None] & (deep < DEEP)[None, :], other=0.0)
        there = (column < E)[:, None] & (deep < DEEP)[None, :]
        w = tl.load(here[:, None] + (first + e)[None, :], there, other=0).to(x.dtype.element_ty)
        sums = tl.dot(some, tl.trans(w), sums, input_precision="tf32x3")
    if SCALED:
        sums *= tl.load(scales + column, column < E, other=0.0)[None, :]
    real = (row < n)[:, None] & (column < E)[None, :]
    to = row[:, None] * E + column[None, :]
    if SUMS:
        tl.store(parts + tl.program_id(1) * n * E + to, sums, real)
        last = is_last(ended, tl.program_id(0), DEEP // SHARE)
        if last:
            sums = tl.zeros([ROWS, BLOCK], tl.float32)
            for share in tl.static_range(DEEP // SHARE):
                sums += tl.load(parts + share * n * E + to, real, other=0.0, cache_modifier=".cg")
        real = real & last
    else:
        out += tl.program_id(1) * n * E
    if BIAS:
        sums += tl.load(bias + column, column < E, other=0.0).to(tl.float32)[None, :]
    tl.store(out + to, sums.to(out.dtype.element_ty), real)


class Matrix(NamedTuple):
    """A matrix and a bias [E] as the kernels read them: weights [E, depth] of x's dtype, or 8-bit
    integers and their scales, E float32 numbers."""

    weights: Tensor
    scales: Tensor | None
    bias: Tensor | None

    def arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Those of a kernel, with any tensor for what there is not."""
        w, scales, bias = self
        return w, w if scales is None else scales, w if bias is None else bias

    def sizes(self, x: Tensor) -> dict[str, Any]:
        """The sizes and launch options that both kernels share, for rows x [n, depth]."""
        narrow, scaled = x.dtype.itemsize == 2, self.scales is not None
        sizes: dict[str, Any] = {"ROWS": max(FEW, power_of_2(len(x))), "SCALED": scaled}
        sizes |= {"DEPTH": 128 if narrow else 64, "num_stages": 4 if narrow else 3}
        return sizes | {"BIAS": self.bias is not None} | dependent_launch(x)


def launch_product(
    x: Tensor, matrix: Matrix, parts: Tensor, out: Tensor | None, block: int
) -> None:
    """Write x [n, depth] times a matrix, plus its bias, to out [n, E], by way of parts [shares of
    the depth, n, E]; without `out`, the parts alone. block: outputs of a program."""
    (shares, n, E), depth = parts.shape, x.shape[1]
    blocks, sums = blocks_of(block, E), out is not None
    product_kernel[blocks, shares](
        x, *matrix.arguments(), parts, out if sums else parts,
        counters(x.device, blocks) if sums else parts, n, x.stride(0), E=E, DEEP=depth,
        SHARE=depth // shares, BLOCK=block, SUMS=sums, **matrix.sizes(x),
    )  # fmt: skip


def read(x: Tensor, weight: Tensor, bias: Tensor | None) -> Matrix | None:
    """The matrix by which the kernels multiply x [..., depth]; None if x has too many rows, a
    gradient is wanted, or dtypes and strides are not those that the kernels read."""
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return None
    weights, scales = int8.scaled_rows(weight) or (weight, None)
    plain = type(weight) in (Tensor, torch.nn.Parameter) and weight.is_contiguous()
    if not (plain or scales is not None) or x.dtype not in KINDS or x.dtype != weight.dtype:
        return None
    rows_apart = x.dim() == 2 and x.stride(1) == 1
    if not rows_apart and not x.is_contiguous():
        return None
    most = FEW if scales is None else FEW_OF_INTEGERS
    if not 0 < x.numel() <= most * x.shape[-1] or x.shape[-1:] != weights.shape[1:]:
        return None
    fits = bias is None or (
        bias.shape == weights.shape[:1] and bias.dtype == x.dtype and bias.is_contiguous()
    )
    return Matrix(weights, scales, bias) if fits else None


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not (matrix := read(x, weight, bias)):
        return NotImplemented
    rows, E = x.view(-1, x.shape[-1]), len(weight)
    out = x.new_empty(len(rows), E)
    split = shares(*weight.shape) if E < 8 * FILLED else 1
    if split > 1:
        parts = torch.empty(split, *out.shape, dtype=torch.float32, device=x.device)
        launch_product(rows, matrix, parts, out, 32)
    else:
        launch_product(rows, matrix, out[None], None, 32 if E >= 32 * FILLED else 16)
    return out.view(*x.shape[:-1], -1)


def product_add_norm(
    x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm | None
) -> tuple[Tensor, Tensor]:
    if norm is None or not can_add_norm(x, norm) or y.dtype != x.dtype:
        return NotImplemented
    if not (matrix := read(y, weight, bias)):
        return NotImplemented
    parts = torch.empty(shares(*weight.shape), *x.shape, dtype=torch.float32, device=x.device)
    launch_product(y, matrix._replace(bias=None), parts, None, 32)
    return launch_add_norm(x, parts, bias, norm, len(parts))


def shares(E: int, depth: int) -> int:
    """Into how many equal shares the depth of a matrix [E, depth] is split: at most 8."""
    most = min(8, FILLED // blocks_of(32, E))
    return next((n for n in range(most, 1, -1) if depth % (n * DEEP) == 0), 1)


@triton.jit
def product_swiglu_kernel(
    x, weight, scales, bias, out, n, stride, E: tl.constexpr, HIDDEN: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr, SCALED: tl.constexpr,
    BIAS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """fused.product_swiglu of few rows. A program owns BLOCK columns of out [n, HIDDEN]: it reads x
    [n, E] and the gates and ups of these columns in weight [2 * HIDDEN, E]. The reference writes
    and reads both products in between."""
    row, e = tl.arange(0, ROWS), tl.arange(0, DEPTH)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    near = weight + tl.minimum(column, HIDDEN - 1).to(tl.int64) * E
    wait_for_previous(DEPENDENT)
    gates = tl.zeros([ROWS, BLOCK], tl.float32)
    ups = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, E, DEPTH):
        deep = first + e
        there = (column < HIDDEN)[:, None] & (deep < E)[None, :]
        some = x + row[:, None] * stride + deep[None, :]
        some = tl.load(some, (row < n)[:, None] & (deep < E)[None, :], other=0.0)
        w = tl.load(near[:, None] + deep[None, :], there, other=0).to(x.dtype.element_ty)
        gates = tl.dot(some, tl.trans(w), gates, input_precision="tf32x3")
        w = tl.load(near[:, None] + HIDDEN * E + deep[None, :], there, other=0)
        w = w.to(x.dtype.element_ty)
        ups = tl.dot(some, tl.trans(w), ups, input_precision="tf32x3")
    if SCALED:
        gates *= tl.load(scales + column, column < HIDDEN, other=0.0)[None, :]
        ups *= tl.load(scales + HIDDEN + column, column < HIDDEN, other=0.0)[None, :]
    if BIAS:
        gates += tl.load(bias + column, column < HIDDEN, other=0.0).to(tl.float32)[None, :]
        ups += tl.load(bias + HIDDEN + column, column < HIDDEN, other=0.0).to(tl.float32)[None, :]
    y = (gates / (1 + tl.exp(-gates)) * ups).to(out.dtype.element_ty)
    real = (row < n)[:, None] & (column < HIDDEN)[None, :]
    tl.store(out + row[:, None] * HIDDEN + column[None, :], y, real)


def product_swiglu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not (matrix := read(x, weight, bias)):
        return NotImplemented
    n, (wide, E) = len(x), weight.shape
    out = x.new_empty(n, wide // 2)
    product_swiglu_kernel[blocks_of(32, wide // 2),](
        x, *matrix.arguments(), out, n, x.stride(0), E=E, HIDDEN=wide // 2, BLOCK=32,
        **matrix.sizes(x),
    )  # fmt: skip
    return out
