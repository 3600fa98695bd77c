"""From logits to a distribution, which is not written where it is only read.

A row of logits is read in blocks; each program of a row takes some, and the last of them to finish
puts together what all have found. So one row, too, keeps a GPU busy, and a pass is one launch.

What a row's logits are worth is in `laws` [rows, 4 + blocks]: the largest, the least that is kept
after temperature, the last token that is kept of those equal to it, the sum of all weights, and the
largest of every block, by which blocks that are worth nothing are passed over. No vocabulary is
sorted: the least is found by four bits of it a pass.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from specexp.sampling import Sampling

BLOCK = 1024  # tokens at a time
TILE = 8192  # tokens that a program holds at most
PROGRAMS = 4096  # that keep a large GPU busy
BITS = {torch.float32: 32, torch.bfloat16: 16, torch.float16: 20}  # of a float32 that is one of it
DIGIT = 4  # bits of a bound that a pass finds
DIGITS = tl.constexpr(1 << DIGIT)
LOG2_E = 1.4426950408889634


@triton.jit
def is_last(ended, row, programs):
    """Whether this is the last program of a row to come here; the others have written then."""
    tl.debug_barrier()  # all of this program has written before it says so
    last = tl.atomic_add(ended + row, 1, sem="acq_rel") == programs - 1
    if last:
        tl.store(ended + row, 0)  # for the next launch
    return last


@triton.jit
def exp(x):
    """exp(x) to about two last places however small it is; x <= 0 or NaN."""
    x = tl.where(x < -200, -200.0, x)
    k = tl.floor(x * 1.4426950408889634 + 0.5)
    rest = (x - k * 0.693359375) + k * 2.12194440e-4  # the first product is exact
    return tl.exp2(k) * tl.exp2(rest * 1.4426950408889634)


@triton.jit
def weight(x, token, law, temperature, min_p):
    """What logits x are worth by a row's law, 1 at the top. A NaN is worth NaN."""
    x = tl.div_rn(x - tl.load(law), temperature)
    least, last = tl.load(law + 1), tl.load(law + 2).to(tl.int32, bitcast=True)
    w = exp(x)
    return tl.where((x < least) | ((x == least) & (token > last)) | (w < min_p), 0.0, w)


@triton.jit
def chance(logits, laws, row, token, real, stride, temperature, min_p, COUNT: tl.constexpr):
    """p of tokens, one or many, by the logits of a row and its `laws`; 0 where not real."""
    law = laws + row * (4 + COUNT)
    x = tl.load(logits + row * stride + token, real, other=-float("inf")).to(tl.float32)
    w = weight(x, token, law, temperature, min_p)
    return tl.where(real, tl.div_rn(w, tl.load(law + 3)), 0.0)


@triton.jit
def worthless(laws, row, block, temperature, min_p, COUNT: tl.constexpr):
    """Whether all tokens of a block have p = 0."""
    law = laws + row * (4 + COUNT)
    most = tl.load(law + 4 + block, block < COUNT, other=-float("inf"))
    whole = tl.load(law + 3)
    return (weight(most, 0, law, temperature, min_p) == 0) & (whole == whole)


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
def measure(
    logits, laws, sums, ended, scale, stride, V: tl.constexpr, BLOCK: tl.constexpr,
    COUNT: tl.constexpr, PART: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """The largest logit of every block, and the law of a row that keeps all tokens."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    law, sums = laws + row * (4 + COUNT), sums + row * COUNT
    for i in range(PART):
        block = part * PART + i
        token = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + token, token < V, other=-float("inf")).to(tl.float32)
        most = tl.max(x, 0)
        level = tl.where(most == -float("inf"), 0.0, most)
        total = tl.sum(tl.exp2((x - level) * scale), 0)
        most = tl.where(total == total, most, float("nan"))  # that of a block with a NaN
        tl.store(law + 4 + block, most, block < COUNT)
        tl.store(sums + block, total, block < COUNT)
    if is_last(ended, row, tl.num_programs(1)):
        block = tl.arange(0, ROOM)
        most = tl.load(law + 4 + block, block < COUNT, -float("inf"), cache_modifier=".cg")
        total = tl.load(sums + block, block < COUNT, other=0.0, cache_modifier=".cg")
        top = tl.max(most, 0)
        tl.store(law, top)
        tl.store(law + 1, -float("inf"))
        tl.store(law + 2, tl.full([], V, tl.int32).to(tl.float32, bitcast=True))
        tl.store(law + 3, tl.sum(total * tl.exp2((most - top) * scale), 0))


@triton.jit(do_not_specialize=["shift"])
def narrow(
    logits, laws, found, sums, ended, temperature, scale, enough, shift, stride, V: tl.constexpr,
    BLOCK: tl.constexpr, COUNT: tl.constexpr, TILE: tl.constexpr, ROOM: tl.constexpr,
    BITS: tl.constexpr, DIGIT: tl.constexpr, MASS: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """One digit of the rank of the largest logit such that those not below it are `enough`; with
    MASS, such that they have this share of the weight of all, or of those that are kept after a
    CUT. The digits above `shift` are those of `found` [rows]. After the last it is the least."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    law, programs, digit = laws + row * (4 + COUNT), tl.num_programs(1), tl.arange(0, DIGITS)
    first = shift == BITS - DIGIT
    known = tl.load(found + row, ~first, other=0).to(tl.uint32, bitcast=True)
    top, least = tl.load(law), tl.load(law + 1)
    block = part * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
    most = tl.load(law + 4 + block, block < COUNT, other=-float("inf"))
    below = rank(most, BITS) < known + (1 << shift).to(tl.uint32)
    none = (below & ~(first & MASS)) | (tl.div_rn(most - top, temperature) < least)
    at = sums + (row * programs + part) * DIGITS
    if tl.min(none.to(tl.int32), 0) > 0:
        tl.store(at + digit, tl.zeros([DIGITS], tl.float32))
    else:
        token = part * TILE + tl.arange(0, TILE)
        x = tl.load(logits + row * stride + token, token < V, other=-float("inf")).to(tl.float32)
        w = tl.where(token < V, 1.0, 0.0)
        if MASS:
            w = tl.exp2((x - top) * scale)
            if CUT:
                w = tl.where(tl.div_rn(x - top, temperature) < least, 0.0, w)
        ranks = rank(x, BITS)
        for tried in tl.static_range(DIGITS):
            reached = ranks >= known + (tried << shift).to(tl.uint32)
            tl.store(at + tried, tl.sum(tl.where(reached, w, 0.0), 0))
    if is_last(ended, row, programs):
        parts = tl.arange(0, ROOM)
        its = sums + ((row * programs + parts) * DIGITS)[:, None] + digit[None, :]
        its = tl.load(its, (parts < programs)[:, None], other=0.0, cache_modifier=".cg")
        total = tl.sum(its, 0)
        if MASS:
            whole = tl.load(law + 3)
            if first:
                whole = enough * tl.sum(tl.where(digit == 0, total, 0.0), 0)
                tl.store(law + 3, whole)
            enough = whole
        passed = tl.sum(((total >= enough) & (digit > 0)).to(tl.int32), 0)
        known += (passed << shift).to(tl.uint32)
        tl.store(found + row, known.to(tl.int32, bitcast=True))
        if shift == 0:
            bound = tl.div_rn(ranked(known, BITS) - top, temperature)
            tl.store(law + 1, tl.where(bound == bound, bound, least))


@triton.jit
def close(
    logits, laws, sums, ended, temperature, min_p, stride, V: tl.constexpr, BLOCK: tl.constexpr,
    COUNT: tl.constexpr, PART: tl.constexpr, ROOM: tl.constexpr, MASS: tl.constexpr,
):  # fmt: skip
    """The last token that is kept of those equal to the least, by MASS or all, and the sum of all
    weights."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    law, programs, at = laws + row * (4 + COUNT), tl.num_programs(1), tl.arange(0, BLOCK)
    top, least = tl.load(law), tl.load(law + 1)
    above, kept = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    equal = tl.zeros([BLOCK], tl.int32)
    for i in range(PART):
        block = part * PART + i
        most = tl.load(law + 4 + block, block < COUNT, other=-float("inf"))
        if ~(tl.div_rn(most - top, temperature) < least):
            token = block * BLOCK + at
            x = tl.load(logits + row * stride + token, token < V, other=-float("inf"))
            x = tl.div_rn(x.to(tl.float32) - top, temperature)
            w = tl.where((x > least) | (x != x), exp(x), 0.0)
            above += w
            kept += tl.where(w < min_p, 0.0, w)
            equal += ((x == least) & (token < V)).to(tl.int32)
    sums += row * programs * 3
    tl.store(sums + part * 3, tl.sum(above, 0))
    tl.store(sums + part * 3 + 1, tl.sum(kept, 0))
    tl.store(sums + part * 3 + 2, tl.sum(equal, 0).to(tl.float32, bitcast=True))
    if is_last(ended, row, programs):
        parts = tl.arange(0, ROOM)
        its, real = sums + parts * 3, parts < programs
        more = tl.sum(tl.load(its, real, other=0.0, cache_modifier=".cg"), 0)
        whole = tl.sum(tl.load(its + 1, real, other=0.0, cache_modifier=".cg"), 0)
        many = tl.load(its + 2, real, other=0.0, cache_modifier=".cg").to(tl.int32, bitcast=True)
        each, enough = exp(least), tl.full([], float("inf"), tl.float32)
        if MASS:
            enough = tl.load(law + 3)
        before = tl.cumsum(many, 0) - many
        keeps = (many > 0) & (more + before.to(tl.float32) * each < enough)
        end = tl.max(tl.where(keeps, parts, 0), 0)  # the part with the last that is kept
        count = tl.sum(tl.where(parts == end, before, 0), 0)
        last, ties = tl.full([], -1, tl.int32), tl.full([], 0, tl.int32)
        for i in range(PART):
            token = (end * PART + i) * BLOCK + at
            x = tl.load(logits + row * stride + token, token < V, other=-float("inf"))
            x = tl.div_rn(x.to(tl.float32) - top, temperature)
            same = ((x == least) & (token < V)).to(tl.int32)
            index = count + tl.cumsum(same, 0) - same
            good = (same > 0) & (more + index.to(tl.float32) * each < enough)
            last = tl.maximum(last, tl.max(tl.where(good, token, -1), 0))
            ties = tl.maximum(ties, tl.max(tl.where(good, index + 1, 0), 0))
            count += tl.sum(same, 0)
        tl.store(law + 2, last.to(tl.float32, bitcast=True))
        tl.store(law + 3, whole + tl.where(each < min_p, 0.0, ties.to(tl.float32) * each))


@triton.jit
def write(
    logits, laws, p, temperature, min_p, stride, V: tl.constexpr, BLOCK: tl.constexpr,
    COUNT: tl.constexpr, PART: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    for i in range(PART):
        block = part * PART + i
        token = block * BLOCK + tl.arange(0, BLOCK)
        real = token < V
        if worthless(laws, row, block, temperature, min_p, COUNT):
            tl.store(p + row * V + token, tl.zeros([BLOCK], tl.float32), real)
        else:
            its = chance(logits, laws, row, token, real, stride, temperature, min_p, COUNT)
            tl.store(p + row * V + token, its, real)


def split(rows: int, V: int) -> tuple[int, dict[str, int]]:
    """The programs of a row, and how they read it: PART of COUNT blocks each."""
    block = min(BLOCK, triton.next_power_of_2(V))
    count = triton.cdiv(V, block)
    part = triton.cdiv(count, max(1, min(PROGRAMS // rows, count)))
    room = triton.next_power_of_2(count)
    tile = {"V": V, "BLOCK": block, "COUNT": count, "PART": part, "ROOM": room}
    return triton.cdiv(count, part), tile


def tiled(rows: int, V: int) -> tuple[int, int]:
    """The programs of a row that each hold a tile of it at once, and the tile's tokens."""
    parts = max(triton.cdiv(V, TILE), min(PROGRAMS // rows, triton.cdiv(V, BLOCK)))
    tile = triton.next_power_of_2(triton.cdiv(V, parts))
    return triton.cdiv(V, tile), tile


def counters(device: torch.device, rows: int) -> Tensor:
    """How many programs of each row have ended: 0 between launches, which share a stream."""
    return zeros(device, triton.next_power_of_2(rows))


@cache  # never freed: recorded graphs count in it
def zeros(device: torch.device, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


def shaped(sampling: Sampling, logits: Tensor) -> Tensor | None:
    """The `laws` of logits [rows, V]; None if no kernel reads these."""
    warm = sampling.temperature > 0 and logits.stride(1) == 1
    if not warm or logits.dtype not in BITS or not logits.numel():
        return None
    (rows, V), bits, temperature = logits.shape, BITS[logits.dtype], float(sampling.temperature)
    parts, tile = split(rows, V)
    top_k, top_p, min_p = 0 < sampling.top_k < V, sampling.top_p < 1, float(sampling.min_p)
    laws = torch.empty(rows, 4 + tile["COUNT"], device=logits.device)
    holders, held = tiled(rows, V)
    sums = laws.new_empty(rows, max(tile["COUNT"], 3 * parts, holders << DIGIT))
    ended, stride, scale = counters(logits.device, rows), logits.stride(0), LOG2_E / temperature
    measure[rows, parts](logits, laws, sums, ended, scale, stride, **tile)
    found = laws.new_empty(rows, dtype=torch.int32)
    for mass, enough in [(False, float(sampling.top_k))] * top_k + [(True, sampling.top_p)] * top_p:
        for shift in reversed(range(0, bits, DIGIT)):
            narrow[rows, holders](
                logits, laws, found, sums, ended, temperature, scale, enough, shift, stride, V=V,
                BLOCK=tile["BLOCK"], COUNT=tile["COUNT"], TILE=held, BITS=bits, DIGIT=DIGIT,
                ROOM=triton.next_power_of_2(holders), MASS=mass, CUT=top_k,
                num_warps=4 if held <= BLOCK else 8,
            )  # fmt: skip
    if top_k or top_p or min_p:
        close[rows, parts](
            logits, laws, sums, ended, temperature, min_p, stride, MASS=top_p, **tile
        )
    return laws


def law(self: Sampling, logits: Tensor) -> Tensor:
    """Logits of 16 bits are widened as they are read."""
    rows = logits.reshape(-1, logits.shape[-1])
    if (laws := shaped(self, rows)) is None:
        return NotImplemented
    p = torch.empty_like(logits, dtype=torch.float32, memory_format=torch.contiguous_format)
    parts, tile = split(*rows.shape)
    numbers = float(self.temperature), float(self.min_p), rows.stride(0)
    write[len(rows), parts](rows, laws, p, *numbers, **tile)
    return p
