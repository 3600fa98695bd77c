"""From logits to a distribution, and draws from it: neither is written where it is only read.

The noise is that of `Noise`, to the bit up to its logarithm, and to a few last places after it. A
row's vocabulary is split into parts, so that one row keeps a GPU busy too; the best of each part
are compared by a second kernel. Of equals the lowest token wins, as in the references.

Four numbers of a row, `laws` [rows, 4], say what its logits are worth: the largest, the least that
is kept after temperature, the last token that is kept of those equal to it, and the sum of all
weights. No vocabulary is sorted: the least is found bit by bit, each by a reading of the row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specexp import sampling
from specexp.sampling import Noise, Sampling

BLOCK = 1024  # tokens at a time
FILLED = 256  # programs that keep a large GPU busy
BITS = {torch.float32: 32, torch.bfloat16: 16, torch.float16: 19}  # of a float32 that is one of it
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
    """-log(1 - u) of a uniform u, to about two last places: 1 - u = 2**k (1 + r), -1/4 <= r < 1/2,
    and log(1 + r) is twice the series of artanh(r / (2 + r)). The hardware's own logarithm is wrong
    in the fourth place of what matters most: early arrivals."""
    u = tl.minimum(uniform(key, salt, lane), 0.99999994)  # 1 - 2**-24
    k = ((1 - u).to(tl.int32, bitcast=True) - 0x3F400000) >> 23  # 0x3F400000: 0.75
    shrink = ((127 - k) << 23).to(tl.float32, bitcast=True)  # 2**-k
    r = (shrink - 1) - u * shrink
    s = r / (2 + r)
    z = s * s
    series = 1 + z * (0.33333333 + z * (0.2 + z * (0.14285714 + z * (0.11111111 + z * 0.09090909))))
    return -(2 * s * series + k.to(tl.float32) * 0.6931472)


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
def better(most, winner, value, token):
    """The better of two winners, of which the first has the lower tokens."""
    return tl.maximum(most, value), tl.where(value > most, token, winner)


@triton.jit
def exp(x):
    """exp(x) to about two last places however small it is; x <= 0 or NaN."""
    x = tl.where(x < -200, -200.0, x)
    k = tl.floor(x * 1.4426950408889634 + 0.5)
    rest = (x - k * 0.693359375) + k * 2.12194440e-4  # the first product is exact
    return tl.exp2(k) * tl.exp2(rest * 1.4426950408889634)


@triton.jit
def weight(x, token, top, least, last, temperature, min_p):
    """What logits x are worth, 1 at the top. A NaN is worth NaN."""
    x = tl.div_rn(x - top, temperature)
    w = exp(x)
    return tl.where((x < least) | ((x == least) & (token > last)) | (w < min_p), 0.0, w)


@triton.jit
def chance(logits, laws, row, token, real, stride, temperature, min_p):
    """p of tokens, one or many, by the logits of a row and its `laws`; 0 where not real."""
    law = laws + row * 4
    last = tl.load(law + 2).to(tl.int32, bitcast=True)
    x = tl.load(logits + row * stride + token, real, other=-float("inf")).to(tl.float32)
    w = weight(x, token, tl.load(law), tl.load(law + 1), last, temperature, min_p)
    return tl.where(real, tl.div_rn(w, tl.load(law + 3)), 0.0)


@triton.jit
def rank(x, BITS: tl.constexpr):
    """Unsigned integers of BITS bits in the order of x, of which only so many bits are not 0; a NaN
    is above all."""
    x = tl.where(x != x, float("inf"), x + 0.0)  # + 0.0: there are two zeros
    bits = x.to(tl.uint32, bitcast=True)
    return (bits ^ tl.where(bits >> 31 == 1, 0xFFFFFFFF, 0x80000000).to(tl.uint32)) >> 32 - BITS


@triton.jit
def ranked(rank, BITS: tl.constexpr):
    """The x of a rank; NaN for rank 0, which no number has."""
    bits = rank << 32 - BITS
    below = (bits >> 31) == 0
    bits = tl.where(below, (bits | (1 << 32 - BITS) - 1) ^ 0xFFFFFFFF, bits ^ 0x80000000)
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def bound(
    here, top, least, temperature, enough, V: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr,
    MASS: tl.constexpr,
):  # fmt: skip
    """The largest logit such that those not below it weigh enough together, or are so many; after
    temperature."""
    at, found = tl.arange(0, BLOCK), tl.full([], 0, tl.uint32)
    step = tl.full([], 1 << BITS - 1, tl.uint32)
    for _ in range(BITS):
        tried = found | step
        sums = tl.zeros([BLOCK], tl.float32)
        for first in range(0, V, BLOCK):
            x = tl.load(here + first + at, first + at < V, other=-float("inf")).to(tl.float32)
            w = tl.where(first + at < V, 1.0, 0.0)
            if MASS:
                w = weight(x, 0, top, least, 0, temperature, 0.0)
            sums += tl.where(rank(x, BITS) >= tried, w, 0.0)
        found, step = tl.where(tl.sum(sums, 0) >= enough, tried, found), step >> 1
    return tl.div_rn(ranked(found, BITS) - top, temperature)


@triton.jit
def shape(
    logits, p, laws, temperature, top_k, top_p, min_p, stride, V: tl.constexpr, BLOCK: tl.constexpr,
    BITS: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """The law of a row: to `p`, or as its four numbers to `laws`."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    here = logits + row * stride
    most = tl.full([BLOCK], -float("inf"), tl.float32)
    for first in range(0, V, BLOCK):
        x = tl.load(here + first + at, first + at < V, other=-float("inf")).to(tl.float32)
        most = tl.maximum(most, x)
    top = tl.max(most, 0)
    least, last = tl.full([], -float("inf"), tl.float32), tl.full([], V, tl.int32)
    if TOP_K:
        least = bound(here, top, least, temperature, top_k, V, BLOCK, BITS, False)
    if TOP_P:
        sums = tl.zeros([BLOCK], tl.float32)
        for first in range(0, V, BLOCK):
            x = tl.load(here + first + at, first + at < V, other=-float("inf")).to(tl.float32)
            sums += weight(x, 0, top, least, 0, temperature, 0.0)
        enough, floor = top_p * tl.sum(sums, 0), least
        least = bound(here, top, floor, temperature, enough, V, BLOCK, BITS, True)
        least = tl.where(least == least, least, floor)
        sums = tl.zeros([BLOCK], tl.float32)
        for first in range(0, V, BLOCK):
            x = tl.load(here + first + at, first + at < V, other=-float("inf")).to(tl.float32)
            x = tl.div_rn(x - top, temperature)
            sums += tl.where(x > least, exp(x), 0.0)
        above, each = tl.sum(sums, 0), exp(least)
        last, count = tl.full([], -1, tl.int32), tl.full([], 0, tl.int32)
        for first in range(0, V, BLOCK):
            x = tl.load(here + first + at, first + at < V, other=-float("inf")).to(tl.float32)
            equal = tl.div_rn(x - top, temperature) == least
            equal = (equal & (first + at < V)).to(tl.int32)
            before = count + tl.cumsum(equal, 0) - equal
            keeps = (equal > 0) & (above + before.to(tl.float32) * each < enough)
            last = tl.maximum(last, tl.max(tl.where(keeps, first + at, -1), 0))
            count += tl.sum(equal, 0)
    sums = tl.zeros([BLOCK], tl.float32)
    for first in range(0, V, BLOCK):
        x = tl.load(here + first + at, first + at < V, other=-float("inf")).to(tl.float32)
        sums += weight(x, first + at, top, least, last, temperature, min_p)
    whole = tl.sum(sums, 0)
    if WRITE:
        for first in range(0, V, BLOCK):
            x = tl.load(here + first + at, first + at < V, other=-float("inf")).to(tl.float32)
            w = weight(x, first + at, top, least, last, temperature, min_p)
            tl.store(p + row * V + first + at, tl.div_rn(w, whole), first + at < V)
    else:
        tl.store(laws + row * 4, top)
        tl.store(laws + row * 4 + 1, least)
        tl.store(laws + row * 4 + 2, last.to(tl.float32, bitcast=True))
        tl.store(laws + row * 4 + 3, whole)


@triton.jit
def pick(
    w, laws, keys, bests, salt, n, keys_b, keys_n, stride, temperature, min_p, V: tl.constexpr,
    PART: tl.constexpr, BLOCK: tl.constexpr, SHAPED: tl.constexpr,
):  # fmt: skip
    """The best token of a part of a row of weights or, SHAPED, of logits."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key = tl.load(keys + row // n * keys_b + row % n * keys_n)
    most, winner = tl.full([], -1.0, tl.float32), tl.full([], 0, tl.int32)
    for first in range(0, PART, BLOCK):
        token = part * PART + first + tl.arange(0, BLOCK)
        real = token < V
        if SHAPED:
            p = chance(w, laws, row, token, real, stride, temperature, min_p)
        else:
            p = tl.load(w + row * stride + token, real, other=0.0)
        value, token = best_of(tl.where(real, p / arrival(key, salt, token), -1.0), token)
        most, winner = better(most, winner, value, token)
    at = bests + (row * tl.num_programs(1) + part) * 2
    tl.store(at, most)
    tl.store(at + 1, winner.to(tl.float32, bitcast=True))


@triton.jit
def settle(bests, out, V: tl.constexpr, PARTS: tl.constexpr, WIDE: tl.constexpr):
    """The best token of a row's parts; any of the vocabulary if its weights are NaN."""
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    at = bests + (row * PARTS + part) * 2
    value = tl.load(at, part < PARTS, other=-2.0)
    token = tl.load(at + 1, part < PARTS, other=0.0).to(tl.int32, bitcast=True)
    tl.store(out + row, tl.minimum(best_of(value, token)[1], V - 1).to(tl.int64))


def split(rows: int, V: int) -> tuple[int, int]:
    """Tokens in a part of the vocabulary, and the number of parts."""
    parts = max(1, min(FILLED // max(rows, 1), triton.cdiv(V, BLOCK)))
    size = triton.cdiv(triton.cdiv(V, parts), BLOCK) * BLOCK
    return size, triton.cdiv(V, size)


def plain(*weights: Tensor) -> bool:
    """Whether these are float32, contiguous and not empty."""
    return all(w.dtype == torch.float32 and w.is_contiguous() and w.numel() for w in weights)


def addressed(w: Tensor, keys: Tensor) -> bool:
    """Whether keys [n] or [B, n] are those of w [..., V]."""
    return w.shape[:-1] == keys.shape and 0 < keys.dim() < 3


def places(keys: Tensor) -> tuple[int, int, int]:
    """Keys in a row, and the strides of keys [n] or [B, n]."""
    return keys.shape[-1], keys.stride(0) if keys.dim() > 1 else 0, keys.stride(-1)


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
    V, rows = w.shape[-1], keys.numel()
    size, parts = split(rows, V)
    bests = torch.empty(rows, parts, 2, device=w.device)
    tokens = torch.empty(keys.shape, dtype=torch.int64, device=w.device)
    pick[rows, parts](
        w, w if laws is None else laws, keys, bests, noise.salt(purpose), *places(keys),
        w.stride(-2), float(sampling.temperature), float(sampling.min_p), V=V, PART=size,
        BLOCK=BLOCK, SHAPED=laws is not None,
    )  # fmt: skip
    settle[rows,](bests, tokens, V=V, PARTS=parts, WIDE=triton.next_power_of_2(parts))
    return tokens


def shaped(sampling: Sampling, logits: Tensor, write: bool) -> Tensor | None:
    """The law [rows, V] of logits [rows, V], or its `laws`; None if no kernel shapes these."""
    warm = sampling.temperature > 0 and logits.stride(1) == 1
    if not warm or logits.dtype not in BITS or not logits.numel():
        return None
    rows, V = logits.shape
    out = torch.empty(rows, V if write else 4, device=logits.device)
    numbers = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
    shape[rows,](
        logits, out, out, *map(float, numbers), logits.stride(0), V=V, BITS=BITS[logits.dtype],
        BLOCK=min(4096, triton.next_power_of_2(V)), TOP_K=0 < sampling.top_k < V,
        TOP_P=sampling.top_p < 1, WRITE=write, num_warps=8,
    )  # fmt: skip
    return out


def law(self: Sampling, logits: Tensor) -> Tensor:
    """Logits of 16 bits are widened as they are read."""
    p = shaped(self, logits.reshape(-1, logits.shape[-1]), write=True)
    return NotImplemented if p is None else p.view(logits.shape)
