"""Draws from a distribution, which may be known by logits alone.

The noise is that of `Noise`, to the bit up to its logarithm, and to a few last places after it. A
row's vocabulary is split into parts, so that one row keeps a GPU busy too. Of equals the lowest
token wins, as in the references.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specexp import sampling
from specexp.fast.gpu.laws import (
    BITS,
    BLOCK,
    MANY,
    by_temperature,
    counters,
    is_last,
    split,
    weight,
    worthless,
)
from specexp.sampling import Noise, Sampling

GOLDEN, M1, M2 = (tl.constexpr(x) for x in (sampling._GOLDEN, sampling._M1, sampling._M2))


@triton.jit
def mix(x):
    """See sampling.mix."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * M1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * M2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def uniform(key, salt, lane):
    """See Noise.uniform."""
    bits = mix(mix(key + salt) + lane.to(tl.int64) * GOLDEN) & 0x7FFFFFFFFFFFFFFF
    return (bits.to(tl.float32) + 0.5) * 1.0842021724855044e-19  # 2**-63


@triton.jit
def arrival(key, salt, lane):
    """-log(1 - u) of a uniform u, to about two last places: 1 - u = 2**k (1 + r) from 2**k / sqrt 2
    to 2**k sqrt 2, and log(1 + r) is the polynomial of Cephes' logf (Moshier 1992). The hardware's
    own logarithm is wrong in the fourth place of what matters most: early arrivals."""
    u = tl.minimum(uniform(key, salt, lane), 0.99999994)  # 1 - 2**-24
    k = ((1 - u).to(tl.int32, bitcast=True) - 0x3F3504F3) >> 23  # 0x3F3504F3: 1 / sqrt 2
    shrink = ((127 - k) << 23).to(tl.float32, bitcast=True)  # 2**-k
    r = (shrink - 1) - u * shrink
    z = r * r
    series = 0.11676998740 + r * (-0.11514610310 + r * 0.070376836292)
    series = 0.14249322787 + r * (-0.12420140846 + r * series)
    series = 0.20000714765 + r * (-0.16668057665 + r * series)
    series = 0.33333331174 + r * (-0.24999993993 + r * series)
    return k.to(tl.float32) * -0.6931472 + (0.5 * z - r) - r * z * series


@triton.jit
def noisy(w, keys, out, salt, n, keys_b, keys_n, V: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + row // n * keys_b + row % n * keys_n)
    weight = tl.load(w + row * V + token, token < V, other=0.0)
    tl.store(out + row * V + token, weight / arrival(key, salt, token), token < V)


@triton.jit
def best_of(value, token):
    """The largest value and its token, the lowest of equals."""
    most = tl.max(value, 0)
    return most, tl.min(tl.where(value == most, token, 0x7FFFFFFF), 0)


@triton.jit
def leave(bests, block, value, token):
    """Write the best of a block to `bests` [blocks, 2] of a row; as an integer, in whose order
    floats are from 0 on."""
    most, winner = best_of(value, token)
    tl.store(bests + block * 2, most.to(tl.int32, bitcast=True))
    tl.store(bests + block * 2 + 1, winner)


@triton.jit
def pass_over(bests, block):
    """`leave` nothing of a block."""
    tl.store(bests + block * 2, -0x80000000)
    tl.store(bests + block * 2 + 1, 0)


@triton.jit
def best_left(bests, blocks, ROOM: tl.constexpr):
    """The best of what all programs of a row have left, and its token."""
    block = tl.arange(0, ROOM)
    most = tl.load(bests + block * 2, block < blocks, -0x80000000, cache_modifier=".cg")
    return best_of(most, tl.load(bests + block * 2 + 1, block < blocks, 0, cache_modifier=".cg"))


@triton.jit
def pick(
    w, laws, keys, bests, out, ended, salt, n, keys_b, keys_n, stride, scale,
    V: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr, ROOM: tl.constexpr,
    SHAPED: tl.constexpr,
):  # fmt: skip
    """A token of every row by its weights or, SHAPED, by its logits and law; any of the vocabulary
    if they are NaN."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    bests += row * COUNT * 2
    skip = block < 0
    if SHAPED:
        skip = worthless(laws, row, block, scale, COUNT)
    if skip:
        pass_over(bests, block)
    else:
        token = block * BLOCK + tl.arange(0, BLOCK)
        its = tl.load(w + row * stride + token, token < V, other=0.0).to(tl.float32)
        if SHAPED:  # p but for its scale
            its = weight(its, token, laws + row * (4 + COUNT), scale)
        key = tl.load(keys + row // n * keys_b + row % n * keys_n)
        leave(bests, block, tl.where(token < V, its / arrival(key, salt, token), -1.0), token)
    if is_last(ended, row, COUNT):
        winner = best_left(bests, COUNT, ROOM)[1]
        tl.store(out + row, tl.minimum(winner, V - 1).to(tl.int64))


@triton.jit
def lead(
    w, bests, out, ended, V: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
    ROOM: tl.constexpr,
):  # fmt: skip
    """The token with the largest of every row of w; a NaN is above all."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(w + row * V + token, token < V, other=0.0).to(tl.float32)
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # + 0.0: there are two zeros
    order = tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    bests += row * COUNT * 2
    leave(bests, block, tl.where(token < V, order, -0x80000000), token)
    if is_last(ended, row, COUNT):
        tl.store(out + row, best_left(bests, COUNT, ROOM)[1].to(tl.int64))


def plain(*weights: Tensor) -> bool:
    """Whether these are float32, contiguous and not empty."""
    return all(w.dtype == torch.float32 and w.is_contiguous() and w.numel() for w in weights)


def addressed(w: Tensor, keys: Tensor) -> bool:
    """Whether keys [n] or [B, n] are those of w [..., V]."""
    return w.shape[:-1] == keys.shape and 0 < keys.dim() < 3


def places(keys: Tensor) -> tuple[int, int, int]:
    """Keys in a row, and the strides of keys [n] or [B, n]."""
    return keys.shape[-1], keys.stride(0) if keys.dim() > 1 else 0, keys.stride(-1)


def likeliest(w: Tensor) -> Tensor:
    if w.dtype not in BITS or not w.is_contiguous() or not w.numel():
        return NotImplemented
    tokens = torch.empty(w.shape[:-1], dtype=torch.int64, device=w.device)
    rows = tokens.numel()
    tile = split(w.shape[-1], 4 if rows >= MANY else 1)
    bests = torch.empty(rows, tile["COUNT"], 2, dtype=torch.int32, device=w.device)
    lead[rows, tile["COUNT"]](
        w, bests, tokens, counters(w.device, rows), num_warps=8 if rows >= MANY else 4, **tile
    )
    return tokens


def race(self: Noise, w: Tensor, keys: Tensor, purpose: int) -> Tensor:
    if type(self) is not Noise or not plain(w) or not addressed(w, keys):
        return NotImplemented
    weights, V = torch.empty_like(w), w.shape[-1]
    noisy[keys.numel(), triton.cdiv(V, BLOCK)](
        w, keys, weights, self.salt(purpose), *places(keys), V=V, BLOCK=BLOCK
    )
    return weights


def categorical(self: Noise, w: Tensor, keys: Tensor, purpose: int) -> Tensor:
    if type(self) is not Noise or not plain(w) or not addressed(w, keys):
        return NotImplemented
    return drawn(self, w, None, Sampling(), keys, purpose)


def drawn(
    noise: Noise, w: Tensor, laws: Tensor | None, sampling: Sampling, keys: Tensor, purpose: int
) -> Tensor:
    """Tokens by weights w, or by logits w [..., V] and their laws."""
    rows = keys.numel()
    tile = split(w.shape[-1])
    bests = torch.empty(rows, tile["COUNT"], 2, dtype=torch.int32, device=w.device)
    tokens = torch.empty(keys.shape, dtype=torch.int64, device=w.device)
    pick[rows, tile["COUNT"]](
        w, w if laws is None else laws, keys, bests, tokens, counters(w.device, rows),
        noise.salt(purpose), *places(keys), w.stride(-2),
        by_temperature(sampling) if sampling.temperature else 1.0, SHAPED=laws is not None, **tile,
    )  # fmt: skip
    return tokens
