"""From logits to a distribution p, which is not written where it would only be read again.

The reference writes p several times, and sorts the vocabulary for top-p. Here a program owns one
block or a few of a row of logits [rows, V], so that even one row keeps a GPU busy, and the last
program of a row to finish combines what all have found. The result, `laws` [rows, 4 + blocks], is
all that it takes to compute any p of a row from its logits x:
    0  the largest logit; a token's exponent is (x - largest) * scale, its weight 2 ** exponent
    1  the least exponent that is kept; 2: the last token kept of those that have it (integer bits)
    3  1 / the sum of the weights that are kept
    4- the largest logit of each block, by which blocks with p = 0 are skipped
The least exponent is found digit by digit. Temperature 0 and float64 are left to the reference.
"""

from functools import cache
from math import e, inf, log2
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specexp.fast.gpu.launches import blocks_of, dependent_launch, power_of_2, wait_for_previous
from specexp.sampling import PART, Sampling

BLOCK = PART  # tokens
MANY = 64  # rows that keep a large GPU busy, even if a program takes several blocks
BITS = {torch.float32: 32, torch.bfloat16: 16, torch.float16: 20}  # leading bits used as float32


@triton.jit
def positive_or_one(x):
    """x, or 1 where it is not positive, so that it can be divided by."""
    return tl.where(x > 0, x, 1.0)


@triton.jit
def is_last(ended, row, programs):
    """Whether this is the last of a row's `programs` to come here; then all they wrote is there."""
    tl.debug_barrier()  # all threads of this program have written before it is counted
    last = tl.atomic_add(ended + row, 1, sem="acq_rel") == programs - 1
    if last:
        tl.store(ended + row, 0)  # for the next launch
    return last


@triton.jit
def weight(x, token, law, scale):
    """The weights of tokens with logits x by a row of `laws`; 0 if cut off, NaN if x is NaN."""
    x = (x - tl.load(law)) * scale
    least, last = tl.load(law + 1), tl.load(law + 2).to(tl.int32, bitcast=True)
    return tl.where((x < least) | ((x == least) & (token > last)), 0.0, tl.exp2(x))


@triton.jit
def probability(logits, laws, row, token, real, stride, scale, COUNT: tl.constexpr):
    """p of one or many tokens, by a row's logits and `laws`; 0 or NaN where not `real`."""
    law = laws + row * (4 + COUNT)
    x = tl.load(logits + row * stride + token, real, other=-float("inf")).to(tl.float32)
    return weight(x, token, law, scale) * tl.load(law + 3)


@triton.jit
def all_zero(laws, row, block, scale, COUNT: tl.constexpr):
    """Whether all tokens of a block have p = 0."""
    law = laws + row * (4 + COUNT)
    share = tl.load(law + 3)
    return (weight(tl.load(law + 4 + block), 0, law, scale) == 0) & (share == share)


@triton.jit
def rank(x, BITS: tl.constexpr):
    """float32 x as unsigned integers of BITS bits, in the same order; a NaN counts as infinity. All
    further bits of x must be 0, as in numbers that were bfloat16 or float16."""
    x = tl.where(x != x, float("inf"), x + 0.0)  # + 0.0 makes -0 a 0
    bits = x.to(tl.uint32, bitcast=True)
    return (bits ^ tl.where(bits >> 31 == 1, 0xFFFFFFFF, 0x80000000).to(tl.uint32)) >> 32 - BITS


@triton.jit
def unrank(rank, BITS: tl.constexpr):
    """The inverse of `rank`; NaN for rank 0, which no number has."""
    bits = rank << 32 - BITS
    below = (bits >> 31) == 0
    bits = tl.where(below, (bits | (1 << 32 - BITS) - 1) ^ 0xFFFFFFFF, bits ^ 0x80000000)
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def unfiltered_kernel(
    logits, laws, sums, ended, scale, stride, V: tl.constexpr, BLOCK: tl.constexpr,
    COUNT: tl.constexpr, ROOM: tl.constexpr, PART: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The `laws` without top-k, top-p and min-p. A program owns PART blocks of a row. sums [rows,
    COUNT]: of the weights of each block, relative to its own largest logit."""
    wait_for_previous(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    law, sums = laws + row * (4 + COUNT), sums + row * COUNT
    block = tl.program_id(1) * PART + tl.arange(0, PART)
    token = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(logits + row * stride + token, token < V, other=-float("inf")).to(tl.float32)
    most = tl.max(x, 1)
    level = tl.where(most == -float("inf"), 0.0, most)
    total = tl.sum(tl.exp2((x - level[:, None]) * scale), 1)
    most = tl.where(total == total, most, float("nan"))  # a NaN makes the row's p NaN
    tl.store(law + 4 + block, most, block < COUNT)
    tl.store(sums + block, total, block < COUNT)
    if is_last(ended, row, tl.num_programs(1)):
        its = tl.arange(0, ROOM)
        tops = tl.load(law + 4 + its, its < COUNT, -float("inf"), cache_modifier=".cg")
        totals = tl.load(sums + its, its < COUNT, other=0.0, cache_modifier=".cg")
        top = tl.max(tops, 0)
        tl.store(law, top)
        tl.store(law + 1, -float("inf"))
        tl.store(law + 2, tl.full([], V, tl.int32).to(tl.float32, bitcast=True))
        tl.store(law + 3, tl.div_rn(1.0, tl.sum(totals * tl.exp2((tops - top) * scale), 0)))


@triton.jit(do_not_specialize=["shift"])
def narrow_kernel(
    logits, laws, floors, sums, ended, scale, enough, shift, stride, V: tl.constexpr,
    BLOCK: tl.constexpr, COUNT: tl.constexpr, ROOM: tl.constexpr, BITS: tl.constexpr,
    DIGIT: tl.constexpr, DIGITS: tl.constexpr, MASS: tl.constexpr, CUT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Find one digit of the bound of top-k: the `rank` of the largest logit such that `enough`
    logits are not below it. With MASS, the bound of top-p: such that the logits not below it have
    the share `enough` of all weights or, if CUT, of those that top-k kept. The digit, which begins
    at bit `shift`, is added to `found` [rows]; the last digit sets the least exponent of `laws`.
    sums [rows, COUNT, DIGITS]: how much of a block is not below each value of the digit."""
    wait_for_previous(DEPENDENT)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    law, digit = laws + row * (4 + COUNT), tl.arange(0, DIGITS)
    first = shift == BITS - DIGIT
    floor = tl.load(floors + row, ~first, other=0).to(tl.uint32, bitcast=True)
    top, least, most = tl.load(law), tl.load(law + 1), tl.load(law + 4 + block)
    below = rank(most, BITS) < floor + (1 << shift).to(tl.uint32)
    at = sums + (row * COUNT + block) * DIGITS
    if (below & ~(first & MASS)) | ((most - top) * scale < least):
        tl.store(at + digit, tl.zeros([DIGITS], tl.float32))
    else:
        token = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + token, token < V, other=-float("inf")).to(tl.float32)
        w = tl.where(token < V, 1.0, 0.0)
        if MASS:
            x_below = (x - top) * scale
            w = tl.exp2(x_below)
            if CUT:
                w = tl.where(x_below < least, 0.0, w)
        ranks = rank(x, BITS)
        for tried in tl.static_range(DIGITS):
            reached = ranks >= floor + (tried << shift).to(tl.uint32)
            tl.store(at + tried, tl.sum(tl.where(reached, w, 0.0), 0))
    if is_last(ended, row, COUNT):
        blocks = tl.arange(0, ROOM)
        its = sums + ((row * COUNT + blocks) * DIGITS)[:, None] + digit[None, :]
        its = tl.load(its, (blocks < COUNT)[:, None], other=0.0, cache_modifier=".cg")
        total = tl.sum(its, 0)
        if MASS:
            whole = tl.load(law + 3)
            if first:
                whole = enough * tl.sum(tl.where(digit == 0, total, 0.0), 0)
                tl.store(law + 3, whole)
            enough = whole
        passed = tl.sum(((total >= enough) & (digit > 0)).to(tl.int32), 0)
        floor += (passed << shift).to(tl.uint32)
        tl.store(floors + row, floor.to(tl.int32, bitcast=True))
        if shift == 0:
            bound = (unrank(floor, BITS) - top) * scale
            tl.store(law + 1, tl.where(bound == bound, bound, least))


@triton.jit
def ties_kernel(
    logits, laws, sums, ended, scale, floor, stride, V: tl.constexpr, BLOCK: tl.constexpr,
    COUNT: tl.constexpr, ROOM: tl.constexpr, MASS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The rest of `laws`, once top-k and top-p have found the least exponent: the last token kept
    of those that have it (with MASS, as many as top-p needs, else all), min-p's `floor` if that is
    higher, and the sum. sums [rows, COUNT, 3]: the weights of each block above the least exponent,
    those of them not below the floor, and how many tokens have the least exponent."""
    wait_for_previous(DEPENDENT)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    law, sums = laws + row * (4 + COUNT), sums + row * COUNT * 3
    top, least, most = tl.load(law), tl.load(law + 1), tl.load(law + 4 + block)
    at, own = tl.arange(0, BLOCK), sums + block * 3
    if (most - top) * scale < least:
        for i in range(3):
            tl.store(own + i, 0.0)
    else:
        token = block * BLOCK + at
        x = tl.load(logits + row * stride + token, token < V, other=-float("inf"))
        x = (x.to(tl.float32) - top) * scale
        w = tl.where((x > least) | (x != x), tl.exp2(x), 0.0)
        equal = tl.sum(((x == least) & (token < V)).to(tl.int32), 0)
        tl.store(own, tl.sum(w, 0))
        tl.store(own + 1, tl.sum(tl.where(x < floor, 0.0, w), 0))
        tl.store(own + 2, equal.to(tl.float32, bitcast=True))
    if is_last(ended, row, COUNT):
        blocks = tl.arange(0, ROOM)
        its, real = sums + blocks * 3, blocks < COUNT
        more = tl.sum(tl.load(its, real, other=0.0, cache_modifier=".cg"), 0)
        whole = tl.sum(tl.load(its + 1, real, other=0.0, cache_modifier=".cg"), 0)
        many = tl.load(its + 2, real, other=0.0, cache_modifier=".cg").to(tl.int32, bitcast=True)
        each, enough = tl.exp2(least), tl.full([], float("inf"), tl.float32)
        if MASS:
            enough = tl.load(law + 3)
        before = tl.cumsum(many, 0) - many
        keeps = (many > 0) & (more + before.to(tl.float32) * each < enough)
        end = tl.max(tl.where(keeps, blocks, 0), 0)  # the block of the last token that is kept
        there = end * BLOCK + at
        y = tl.load(logits + row * stride + there, there < V, other=-float("inf"))
        y = (y.to(tl.float32) - top) * scale
        same = ((y == least) & (there < V)).to(tl.int32)
        count = tl.sum(tl.where(blocks == end, before, 0), 0)
        index = count + tl.cumsum(same, 0) - same
        good = (same > 0) & (more + index.to(tl.float32) * each < enough)
        last = tl.where(least < floor, V, tl.max(tl.where(good, there, -1), 0))
        ties = tl.where(least < floor, 0, tl.max(tl.where(good, index + 1, 0), 0))
        tl.store(law + 1, tl.maximum(least, floor))
        tl.store(law + 2, last.to(tl.float32, bitcast=True))
        tl.store(law + 3, tl.div_rn(1.0, whole + ties.to(tl.float32) * each))


@triton.jit
def law_kernel(
    logits, laws, p, scale, stride, V: tl.constexpr, BLOCK: tl.constexpr,
    COUNT: tl.constexpr, ROOM: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Sampling.law: writes p [rows, V], float32, of logits [rows, V] by their `laws`."""
    wait_for_previous(DEPENDENT)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    real = token < V
    if all_zero(laws, row, block, scale, COUNT):
        tl.store(p + row * V + token, tl.zeros([BLOCK], tl.float32), real)
    else:
        its = probability(logits, laws, row, token, real, stride, scale, COUNT)
        tl.store(p + row * V + token, its, real)


def by_blocks(w: Tensor, times: int = 1) -> dict[str, Any]:
    """The sizes and options of a kernel that reads w [..., V] in COUNT blocks of `times` BLOCK."""
    V = w.shape[-1]
    block = min(times * BLOCK, power_of_2(V))
    count = blocks_of(block, V)
    sizes = {"V": V, "BLOCK": block, "COUNT": count, "ROOM": power_of_2(count)}
    return sizes | dependent_launch(w)


def counters(device: torch.device, rows: int) -> Tensor:
    """How many programs of each row have ended, for `is_last`; 0 between launches on a stream."""
    return zeros(device, power_of_2(rows))


@cache  # never freed: recorded graphs count in it
def zeros(device: torch.device, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


def logit_scale(sampling: Sampling) -> float:
    """The factor that turns differences of logits into exponents of 2."""
    return log2(e) / sampling.temperature


def laws_of(sampling: Sampling, logits: Tensor) -> Tensor | None:
    """The `laws` of logits [rows, V] (see above); None if the kernels cannot compute them."""
    warm = sampling.temperature > 0 and logits.stride(1) == 1
    if not warm or logits.dtype not in BITS or not logits.numel():
        return None
    (rows, V), bits, scale = logits.shape, BITS[logits.dtype], logit_scale(sampling)
    tile = by_blocks(logits)
    blocks, part = tile["COUNT"], 4 if rows >= MANY else 1
    digit = 2 if rows >= MANY else 4  # bits of a bound that a pass finds
    top_k, top_p, min_p = 0 < sampling.top_k < V, sampling.top_p < 1, sampling.min_p
    laws = torch.empty(rows, 4 + blocks, dtype=torch.float32, device=logits.device)
    sums = laws.new_empty(rows, blocks << digit)
    ended, stride = counters(logits.device, rows), logits.stride(0)
    unfiltered_kernel[rows, blocks_of(part, blocks)](
        logits, laws, sums, ended, scale, stride, PART=part, num_warps=4 if part == 1 else 8, **tile
    )
    floors = laws.new_empty(rows, dtype=torch.int32)
    for mass, enough in [(False, float(sampling.top_k))] * top_k + [(True, sampling.top_p)] * top_p:
        for shift in reversed(range(0, bits, digit)):
            narrow_kernel[rows, blocks](
                logits, laws, floors, sums, ended, scale, enough, shift, stride,
                BITS=bits, DIGIT=digit, DIGITS=1 << digit, MASS=mass, CUT=top_k, **tile,
            )  # fmt: skip
    if top_k or top_p or min_p:
        floor = log2(min_p) if min_p else -inf
        ties_kernel[rows, blocks](
            logits, laws, sums, ended, scale, floor, stride, MASS=top_p, **tile
        )
    return laws


def law(self: Sampling, logits: Tensor) -> Tensor:
    rows = logits.reshape(-1, logits.shape[-1])
    if (laws := laws_of(self, rows)) is None:
        return NotImplemented
    p = torch.empty_like(logits, dtype=torch.float32, memory_format=torch.contiguous_format)
    tile = by_blocks(rows)
    law_kernel[len(rows), tile["COUNT"]](rows, laws, p, logit_scale(self), rows.stride(0), **tile)
    return p
