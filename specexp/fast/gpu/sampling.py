"""Draws over a vocabulary in one reading of it: noise is made where it is used and never written.

The noise is that of `Noise`, to the bit up to its logarithm, and to a few last places after it. A
row's vocabulary is split into parts, so that one row keeps a GPU busy too; the best of each part
are compared by a second kernel. Of equals the lowest token wins, as in the references.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specexp import rules, sampling
from specexp.sampling import ACCEPT, RESIDUAL, Noise, Rng, Sampling
from specexp.sequences import Draft, Verdict

BLOCK = 1024  # tokens at a time
FILLED = 256  # programs that keep a large GPU busy
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
def pick(
    w, keys, bests, salt, n, keys_b, keys_n, V: tl.constexpr, PART: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key = tl.load(keys + row // n * keys_b + row % n * keys_n)
    most, winner = tl.full([], -1.0, tl.float32), tl.full([], 0, tl.int32)
    for first in range(0, PART, BLOCK):
        token = part * PART + first + tl.arange(0, BLOCK)
        weight = tl.load(w + row * V + token, token < V, other=0.0)
        value = tl.where(token < V, weight / arrival(key, salt, token), -1.0)
        value, token = best_of(value, token)
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


@triton.jit
def exp(x):
    """exp(x) to about two last places however small it is; x <= 0 or NaN."""
    x = tl.where(x < -200, -200.0, x)
    y = x * 1.4426950408889634
    rest = tl.fma(x, 1.4426950408889634, -y) + x * 1.925963033500e-08
    return tl.exp2(y) * (1 + rest * 0.6931472)


@triton.jit
def warm(logits, p, temperature, stride, V: tl.constexpr, BLOCK: tl.constexpr):
    """The softmax of a row over its temperature."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    here = logits + row * stride
    most = tl.full([BLOCK], -float("inf"), tl.float32)
    for first in range(0, V, BLOCK):
        x = tl.load(here + first + at, first + at < V, other=-float("inf")).to(tl.float32)
        most = tl.maximum(most, x)
    top, total = tl.max(most, 0), tl.zeros([BLOCK], tl.float32)
    for first in range(0, V, BLOCK):
        x = tl.load(here + first + at, first + at < V, other=-float("inf")).to(tl.float32)
        total += exp((x - top) / temperature)
    whole = tl.sum(total, 0)
    for first in range(0, V, BLOCK):
        x = tl.load(here + first + at, first + at < V, other=0.0).to(tl.float32)
        tl.store(p + row * V + first + at, exp((x - top) / temperature) / whole, first + at < V)


@triton.jit
def judge(
    tokens, keys, p, q, bests, path, count, new, accept, residual, lenience, N: tl.constexpr,
    WIDE: tl.constexpr, V: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
    DRAWN: tl.constexpr,
):  # fmt: skip
    """Reject on a chain, for one row and one part of the vocabulary: where it stops, and the best
    tokens there of what is left of p and of p itself."""
    row, part, node = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WIDE)
    x = tl.load(tokens + row * N + node + 1, node < N - 1, other=-1)
    there = (x >= 0) & (x < V)
    px = tl.load(p + (row * N + node) * V + x, there, other=0.0)
    qx = tl.where(there, 0.0, 0.0)
    if DRAWN:
        qx = tl.load(q + (row * N + node) * V + x, there, other=0.0)
    u = uniform(tl.load(keys + row * N + node, node < N, other=0), accept, 0 * node)
    odds = tl.div_rn(px, lenience * tl.where(qx > 0, qx, 1.0))
    stop = tl.min(tl.where(there & (u <= odds), N - 1, tl.minimum(node, N - 1)), 0)
    here = node == stop
    refused = tl.sum(tl.where(here & there, x, 0), 0)
    tried = tl.sum((here & there).to(tl.int32), 0) > 0
    drawn = tl.sum(tl.where(here, qx, 0.0), 0) > 0

    key, at = tl.load(keys + row * N + stop), (row * N + stop) * V
    left, kept = tl.full([], -1.0, tl.float32), tl.full([], 0, tl.int32)
    whole, plain = left, kept
    for first in range(0, PART, BLOCK):
        token = part * PART + first + tl.arange(0, BLOCK)
        real = token < V
        weight, late = tl.load(p + at + token, real, other=0.0), arrival(key, residual, token)
        q_ = (token == refused).to(tl.float32)
        if DRAWN:
            q_ = tl.where(drawn, tl.load(q + at + token, real, other=0.0), q_)
        rest = tl.maximum(weight - lenience * q_, 0.0)
        value, best = best_of(tl.where(real, rest / late, -1.0), token)
        left, kept = better(left, kept, value, best)
        value, best = best_of(tl.where(real, weight / late, -1.0), token)
        whole, plain = better(whole, plain, value, best)
    out = bests + (row * tl.num_programs(1) + part) * 4
    tl.store(out, tl.where(tried, left, -1.0))
    tl.store(out + 1, kept.to(tl.float32, bitcast=True))
    tl.store(out + 2, whole)
    tl.store(out + 3, plain.to(tl.float32, bitcast=True))
    if part == 0:
        tl.store(count + row, stop.to(tl.int64))
        tl.store(path + row * N + node, tl.minimum(node, stop).to(tl.int64), node < N)
        tl.store(new + row * N + node, x, node < stop)


@triton.jit
def end(
    bests, count, new, V: tl.constexpr, N: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr,
    ROOM: tl.constexpr,
):  # fmt: skip
    """The bonus token, from what is left of p if anything is; any if p is NaN."""
    row, part, node = tl.program_id(0).to(tl.int64), tl.arange(0, ROOM), tl.arange(0, WIDE)
    at, real = bests + (row * PARTS + part) * 4, part < PARTS
    left = tl.load(at, real, other=-2.0)
    kept = tl.load(at + 1, real, other=0.0).to(tl.int32, bitcast=True)
    whole = tl.load(at + 2, real, other=-2.0)
    plain = tl.load(at + 3, real, other=0.0).to(tl.int32, bitcast=True)
    most, token = best_of(left, kept)
    bonus = tl.minimum(tl.where(most > 0, token, best_of(whole, plain)[1]), V - 1).to(tl.int64)
    tl.store(new + row * N + node, bonus, (node >= tl.load(count + row)) & (node < N))


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
    V, rows = w.shape[-1], keys.numel()
    size, parts = split(rows, V)
    bests = torch.empty(rows, parts, 2, device=w.device)
    tokens = torch.empty(keys.shape, dtype=torch.int64, device=w.device)
    salt = self.salt(purpose)
    pick[rows, parts](w, keys, bests, salt, *places(keys), V=V, PART=size, BLOCK=BLOCK)
    settle[rows,](bests, tokens, V=V, PARTS=parts, WIDE=triton.next_power_of_2(parts))
    return tokens


def law(self: Sampling, logits: Tensor) -> Tensor:
    """A temperature and nothing else; logits of 16 bits are widened as they are read."""
    only = self == Sampling(self.temperature)
    kinds = torch.float32, torch.bfloat16, torch.float16
    if not only or not self.temperature or logits.dtype not in kinds or not logits.numel():
        return NotImplemented
    rows = logits.reshape(-1, V := logits.shape[-1])
    if rows.stride(1) != 1:
        return NotImplemented
    p = torch.empty(logits.shape, device=logits.device)
    block = min(4096, triton.next_power_of_2(V))
    warm[len(rows),](rows, p, self.temperature, rows.stride(0), V=V, BLOCK=block, num_warps=8)
    return p


def reject(self: rules.Reject, draft: Draft, p: Tensor, rng: Rng) -> Verdict:
    """Chains; trees are left to the reference."""
    (B, N, V), q, nodes = p.shape, draft.q, draft.nodes
    laws = [p] if q is None else [p, q]
    if type(rng) is not Noise or not plain(*laws) or any(x.shape != p.shape for x in laws):
        return NotImplemented
    if not nodes.is_chain or nodes.deepest != N - 1:
        return NotImplemented
    size, parts = split(B, V)
    bests = torch.empty(B, parts, 4, device=p.device)
    path, new = (torch.empty(B, N, dtype=torch.int64, device=p.device) for _ in range(2))
    n = torch.empty(B, dtype=torch.int64, device=p.device)
    wide = triton.next_power_of_2(N)
    judge[B, parts](
        draft.tokens.contiguous(), draft.keys.contiguous(), p, p if q is None else q, bests, path,
        n, new, rng.salt(ACCEPT), rng.salt(RESIDUAL), self.lenience, N=N, WIDE=wide, V=V,
        PART=size, BLOCK=BLOCK, DRAWN=q is not None,
    )  # fmt: skip
    room = triton.next_power_of_2(parts)
    end[B,](bests, n, new, V=V, N=N, WIDE=wide, PARTS=parts, ROOM=room)
    return Verdict(path, n, new)
