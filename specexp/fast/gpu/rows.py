"""What a round does to rows besides passes and rules: one program a row, one launch each."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specexp.drafters.ngram import NGram, first_leaf
from specexp.fast.gpu.laws import BITS
from specexp.fast.gpu.rules import shared
from specexp.fast.gpu.sampling import mix
from specexp.models.cache import Slots
from specexp.sampling import Noise, Rng
from specexp.sequences import Draft, Sequences, Verdict
from specexp.tree import Tree

AT_ONCE = 1024  # slots


@triton.jit
def address(
    stream, length, depth, out, depth_b, n, WIDE: tl.constexpr, BY_ROUND: tl.constexpr
):  # fmt: skip
    row, at = tl.program_id(0), tl.arange(0, WIDE)
    root = mix(tl.load(stream + row)) + tl.load(length + row)
    if BY_ROUND:
        root = mix(root)
    to = mix(root + tl.load(depth + row * depth_b + at, at < n, other=0))
    tl.store(out + row * n + at, to, at < n)


def keys(self: Noise, stream: Tensor, length: Tensor, depth: Tensor) -> Tensor:
    if not lines(stream, length, depth) or not depth.numel() or len(depth) not in (1, len(length)):
        return NotImplemented
    B, n = len(length), depth.shape[1]
    out = torch.empty(B, n, dtype=torch.int64, device=depth.device)
    wide = triton.next_power_of_2(n)
    address[B,](stream, length, depth, out, shared(depth), n, WIDE=wide, BY_ROUND=self.by_round)
    return out


@triton.jit
def append(
    tokens, length, limit, eos, new, count, report, tokens_b, E, D: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """See Sequences.commit; tokens past a row's new length are not written."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    token = tl.load(new + row * D + at, at < D, other=-1)
    first = tl.full([], D, tl.int32)
    for e in range(E):
        ends = (token == tl.load(eos + e)) & (at < D)
        first = tl.minimum(first, tl.min(tl.where(ends, at, D), 0))
    n, begin, most = tl.load(count + row), tl.load(length + row), tl.load(limit + row)
    gained = tl.minimum(tl.minimum(n, first.to(tl.int64)) + 1, tl.maximum(most - begin, 0))
    tl.store(tokens + row * tokens_b + begin + at, token, at < gained)
    end = begin + gained
    most = tl.where(gained > first, end, most)
    tl.store(length + row, end)
    tl.store(limit + row, most)
    tl.store(report + row * 3, n)
    tl.store(report + row * 3 + 1, gained)
    tl.store(report + row * 3 + 2, (end < most).to(tl.int64))


def commit(self: Sequences, verdict: Verdict) -> Tensor:
    tokens, new = self.tokens, verdict.new
    counted = lines(self.length, self.limit, self.eos, verdict.n)
    if not counted or tokens.stride(1) != 1 or not new.is_contiguous():
        return NotImplemented
    (B, D), report = new.shape, new.new_empty(len(new), 3)
    append[B,](
        tokens, self.length, self.limit, self.eos, new, verdict.n, report, tokens.stride(0),
        len(self.eos), D=D, WIDE=triton.next_power_of_2(D),
    )  # fmt: skip
    return report


@triton.jit
def shift(
    keys, values, source, slots, n, d, k_b, k_h, k_s, v_b, v_h, v_s, source_b, slots_b,
    PLACES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place, at = tl.arange(0, PLACES), tl.arange(0, WIDE)
    real = (place < n)[:, None] & (at < d)[None, :]
    old = tl.load(source + row * source_b + place, place < n, other=0)[:, None]
    to = tl.load(slots + row * slots_b + place, place < n, other=0)[:, None]
    keys += row * k_b + head * k_h + at[None, :]
    values += row * v_b + head * v_h + at[None, :]
    k = tl.load(keys + old * k_s, real, other=0.0)
    v = tl.load(values + old * v_s, real, other=0.0)
    tl.debug_barrier()  # all is read before anything is written
    tl.store(keys + to * k_s, k, real)
    tl.store(values + to * v_s, v, real)


def keep(self: Slots, rows: slice, source: Tensor, slots: Tensor) -> Any:
    if self.index is not None or not self.is_initialized:
        return NotImplemented
    keys, values = self.keys[rows], self.values[rows]
    (B, H, _, d), n = keys.shape, source.shape[1]
    last = [x.stride(-1) for x in (keys, values, source, slots)]
    if keys.shape != values.shape or n * d > 1 << 14 or last != [1] * 4:
        return NotImplemented
    up = triton.next_power_of_2
    shift[B, H](
        keys, values, source, slots, n, d, *keys.stride()[:3], *values.stride()[:3],
        source.stride(0), slots.stride(0), PLACES=up(n), WIDE=up(d), num_warps=4,
    )  # fmt: skip
    return None


@triton.jit
def look_up(
    text, length, depth, branch, out, text_b, S, vocab, N: tl.constexpr, WIDE: tl.constexpr,
    LEAVES: tl.constexpr, MATCH: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """See NGram.propose: leaf by leaf the best occurrence below the one before."""
    row, node = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    text += row * text_b
    last = tl.load(length + row).to(tl.int32) - 1
    tl.store(out + row * N, tl.load(text + tl.maximum(last, 0)))
    step = tl.load(depth + node, node < N, other=1).to(tl.int32)
    mine = tl.load(branch + node - 1, (node > 0) & (node < N), other=-1)
    below = tl.full([], 0x7FFFFFFF, tl.int32)
    for leaf in range(LEAVES):
        best = tl.full([], -1, tl.int32)
        for first in range(0, S, AT_ONCE):
            end = first + tl.arange(0, AT_ONCE)
            same, matched = end < last, tl.zeros([AT_ONCE], tl.int32)
            for back in tl.static_range(MATCH):
                token = tl.load(text + tl.maximum(last - back, 0))
                near = same & (end >= back) & (last >= back)
                same = near & (tl.load(text + end - back, near, other=-1) == token)
                matched += same.to(tl.int32)
            score = tl.where(matched > 0, matched * S + end, -1)
            best = tl.maximum(best, tl.max(tl.where(score < below, score, -1), 0))
        below = best
        end = tl.maximum(best, 0) % S
        at = end + 1 + (step - 1) % tl.maximum(last - end, 1)
        at = tl.minimum(tl.maximum(at, 0), S - 1)
        token = tl.load(text + at, (mine == leaf) & (best >= 0), other=-1)
        tl.store(out + row * N + node, tl.where(token < vocab, token, -1), mine == leaf)


def look(self: NGram, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
    text, N = seqs.tokens, len(tree)
    if N == 1 or text.stride(1) != 1 or not lines(seqs.length):
        return NotImplemented
    B, S = text.shape
    nodes, (leaves, branch) = tree.nodes(text.device), first_leaf(tree, text.device)
    if leaves > S or (self.n + 1) * S >= 1 << 31:
        return NotImplemented
    tokens = text.new_empty(B, N)
    look_up[B,](
        text, seqs.length, nodes.depth, branch, tokens, text.stride(0), S, self.vocab, N=N,
        WIDE=triton.next_power_of_2(N), LEAVES=leaves, MATCH=self.n, AT_ONCE=AT_ONCE,
    )  # fmt: skip
    return Draft(tokens, nodes, seqs)


@triton.jit
def peak(logits, tops, size, BLOCK: tl.constexpr):
    """The largest logit of one part of a row; infinity where one is NaN."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * size + at, at < size, other=-float("inf")).to(tl.float32)
    top = tl.max(tl.where(x != x, float("inf"), x), 0)
    tl.store(tops + row * tl.num_programs(1) + tl.program_id(1), top)


def spoil(fault: Tensor, logits: Tensor) -> Any:
    if logits.dtype not in BITS or not logits.is_contiguous() or not logits.numel():
        return NotImplemented
    B, size = len(logits), logits[0].numel()
    tops = torch.empty(B, triton.cdiv(size, 4 * AT_ONCE), device=logits.device)
    peak[tops.shape](logits, tops, size, BLOCK=4 * AT_ONCE)
    fault.add_(tops.amax(1), alpha=0)
    return None


def lines(*tensors: Tensor) -> bool:
    """Whether these are int64, and their numbers lie side by side."""
    return all(x.dtype == torch.int64 and x.is_contiguous() for x in tensors)
