"""Attention over a static cache: a row's keys are read up to its length and no further.

The reference reads all S slots of the cache, and a mask. Here no mask is made: a chain is masked by
its own slots, a tree from its root on by the table of its ancestors, and what lies before all
windows is not read. A pass has few queries and many keys, so each program takes all query heads of
one key head, and the keys of a row are split among programs (Dao et al. 2023, Flash-Decoding). The
last of them to finish combines the parts. A split's size is computed on the device, from the row's
length; the launch does not depend on it, so one graph serves every length.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specexp.fast.fused import AttentionInfo
from specexp.fast.gpu.launches import blocks_of, dependent_launch, power_of_2, wait_for_previous
from specexp.fast.gpu.laws import counters, is_last, positive_or_one
from specexp.fast.gpu.layers import KINDS
from specexp.fast.gpu.paths import shared
from specexp.fitting import UNLIMITED
from specexp.tree import Branches

FILLED = 256  # programs that keep a large GPU busy
SPLITS = 32  # at most
LOG2E = 1.4426950408889634
WIDEST = 1024  # bytes of the largest head that fits
COMBINE_SLOTS = 0.5  # slots read in the time in which a query's part of a split is written and read


@triton.jit
def combine_splits(
    parts, stats, to, d, share, span, sink, real, here, D: tl.constexpr, QUERIES: tl.constexpr,
    WIDE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The outputs [QUERIES, WIDE] of all splits that have slots, combined."""
    part = tl.arange(0, SPLITS)
    at = stats + (to[:, None] * SPLITS + part[None, :]) * 2
    wrote = real[:, None] & (part * share < span)[None, :]
    level = tl.load(at, wrote, other=-float("inf"), cache_modifier=".cg")
    most = tl.max(level, 1)
    most = tl.where(most == -float("inf"), 0.0, most)
    weight = tl.exp2(level - most[:, None])
    total = tl.load(at + 1, wrote, other=0.0, cache_modifier=".cg")
    weight /= positive_or_one(tl.sum(total * weight, 1) + tl.exp2(sink - most))[:, None]
    mean = tl.zeros([QUERIES, WIDE], tl.float32)
    parts += (to * SPLITS * D)[:, None] + d[None, :]
    # as registers allow
    AT_ONCE: tl.constexpr = 2 if QUERIES >= 32 else 4 if WIDE >= 256 else 8
    for first in range(0, tl.cdiv(span, share), AT_ONCE):
        for more in tl.static_range(AT_ONCE):
            one = first + more
            its = tl.load(
                parts + one * D, here & (one * share < span), other=0.0, cache_modifier=".cg"
            )
            mean += its * tl.sum(tl.where(part[None, :] == one, weight, 0.0), 1)[:, None]
    return mean


@triton.jit
def attend(
    x, keys, values, k_s, v_s, d, own, least, ring, real, begins, stop, end, scale, cap, root,
    table, M, most, total, mean, D: tl.constexpr, KEYS: tl.constexpr, CAPPED: tl.constexpr,
    WINDOW: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """Attend with queries x to the slots `begins` to `stop` - 1 of a split that stops at `end`.
    Updates the largest score, sum of weights and weighted sum of values: `most`, `total`, `mean`.
    """
    for first in range(begins, stop, KEYS):
        slot = first + tl.arange(0, KEYS)
        held = slot % ring if WINDOW else slot
        inside = slot < end
        there = inside[:, None] & (d < D)[None, :]
        k = tl.load(keys + (held * k_s)[:, None] + d[None, :], there, 0.0)
        v = tl.load(values + (held * v_s)[:, None] + d[None, :], there, 0.0)
        score = tl.dot(x, tl.trans(k), input_precision="tf32x3") * scale
        if CAPPED:  # cap * tanh(score / cap); scores are exponents of 2
            score = cap - 2 * cap / (1 + tl.exp2(score * (2.885390081777927 / cap)))
        sees = real[:, None] & inside[None, :]
        if TREE:
            place = (slot - root)[None, :]
            above = tl.load(table + place, sees & (place >= 0) & (place < M), other=0) != 0
            sees = sees & ((place < 0) | above)
        else:
            sees = sees & (slot[None, :] <= own[:, None])
        if WINDOW:
            sees = sees & (slot[None, :] >= least[:, None])
        score = tl.where(sees, score, -float("inf"))
        more = tl.maximum(most, tl.max(score, 1))
        level = tl.where(more == -float("inf"), 0.0, more)
        weight, fading = tl.exp2(score - level[:, None]), tl.exp2(most - level)
        total = total * fading + tl.sum(weight, 1)
        mean = mean * fading[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="tf32x3")
        most = more
    return most, total, mean


# Triton compiles no kernel of its own for values of these that are 1 or multiples of 16.
COUNTED = [
    "n", "window", "ring", "slots_b", "slots_n", "pos_b", "pos_n", "roots_b", "anc_b", "anc_n", "M"
]  # fmt: skip


@triton.jit(do_not_specialize=COUNTED)
def attention_kernel(
    q, keys, values, slots, positions, roots, ancestors, sinks, out, parts, stats, ended, scale,
    cap, n, window, ring, slots_b, slots_n, pos_b, pos_n, q_b, q_h, q_n, k_b, k_h, k_s, v_b, v_h,
    v_s, roots_b, anc_b, anc_n, M, combine_slots, HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
    SINKS: tl.constexpr, CAPPED: tl.constexpr, WINDOW: tl.constexpr, TREE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """fused.attention. A program owns a block of queries (tokens times GROUP heads) of one row and
    key head, over one split of the row's slots; the last of a block's programs writes its output.
    Reads q [B, H, n, D], keys and values [B, HEADS, S, D]; writes out [B * n, H * D] and, of each
    split, parts [B * n * H, SPLITS, D] and stats [B * n * H, SPLITS, 2] (largest score, sum of
    weights). scale, cap: those of `attention` times LOG2E, as scores are exponents of 2. ring: slot
    s is at place s % ring. WIDE: D rounded up to a power of two. WINDOW: a token reads the last
    `window` positions, its own included; else all."""
    wait_for_previous(DEPENDENT)
    row, head = tl.program_id(0).to(tl.int64) // HEADS, tl.program_id(0).to(tl.int64) % HEADS
    split = tl.program_id(1)
    query = tl.program_id(2) * QUERIES + tl.arange(0, QUERIES)
    token, real = query // GROUP, query < n * GROUP
    at, d = head * GROUP + query % GROUP, tl.arange(0, WIDE)
    own = tl.load(slots + row * slots_b + token * slots_n, mask=real, other=-1).to(tl.int32)
    here = real[:, None] & (d < D)[None, :]
    x = tl.load(q + row * q_b + (at * q_h + token * q_n)[:, None] + d[None, :], here, other=0.0)

    length = tl.max(own, 0) + 1  # no query of a chain sees a later slot
    if TREE:  # and the last of a pass is the furthest
        length = tl.load(slots + row * slots_b + (n - 1) * slots_n).to(tl.int32) + 1
    least, first = own, length * 0  # where each query's window begins, and the first of these
    if WINDOW:
        at_position = positions + row * pos_b + token * pos_n
        least = tl.load(at_position, real, other=1 << 30).to(tl.int32) - window + 1
        first = tl.maximum(tl.min(least, 0), 0) // KEYS * KEYS
    span = length - first
    # slots of a split: so many that reading them takes as long as combining all splits
    share = tl.maximum(tl.cdiv(span, SPLITS), tl.sqrt(span * combine_slots).to(tl.int32))
    share = tl.cdiv(share, KEYS) * KEYS
    begins = first + split * share
    end = tl.minimum(begins + share, length)
    keys, values = keys + row * k_b + head * k_h, values + row * v_b + head * v_h
    most = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mean = tl.zeros([QUERIES, WIDE], tl.float32)
    if TREE:  # the text, which all nodes see, and then the nodes themselves
        root = tl.load(roots + row * roots_b).to(tl.int32)
        table = ancestors + row * anc_b + (token * anc_n)[:, None]
        before = tl.maximum(tl.minimum(root // KEYS * KEYS, end), begins)
        most, total, mean = attend(
            x, keys, values, k_s, v_s, d, own, least, ring, real, begins, before, end, scale, cap,
            root, table, M, most, total, mean, D, KEYS, CAPPED, WINDOW, False,
        )  # fmt: skip
        begins = before
    else:
        root, table = 0, ancestors
    most, total, mean = attend(
        x, keys, values, k_s, v_s, d, own, least, ring, real, begins, end, end, scale, cap, root,
        table, M, most, total, mean, D, KEYS, CAPPED, WINDOW, TREE,
    )  # fmt: skip

    to = (row * n + token) * HEADS * GROUP + at
    last = split == 0
    sink = tl.full([QUERIES], -float("inf"), tl.float32)
    if SINKS:
        sink = tl.load(sinks + at, real, other=0.0).to(tl.float32) * 1.4426950408889634
    if share >= span:  # the only split
        total += tl.exp2(sink - tl.where(most == -float("inf"), 0.0, most))
        mean /= positive_or_one(total)[:, None]
    elif SPLITS > 1:
        if split * share < span:
            tl.store(parts + ((to * SPLITS + split) * D)[:, None] + d[None, :], mean, here)
            tl.store(stats + (to * SPLITS + split) * 2, most, real)
            tl.store(stats + (to * SPLITS + split) * 2 + 1, total, real)
        last = is_last(ended, tl.program_id(0) * tl.num_programs(2) + tl.program_id(2), SPLITS)
        if last:
            mean = combine_splits(
                parts, stats, to, d, share, span, sink, real, here, D, QUERIES, WIDE, SPLITS
            )
    tl.store(out + (to * D)[:, None] + d[None, :], mean.to(out.dtype.element_ty), here & last)


def attention(
    q: Tensor, keys: Tensor, values: Tensor, info: AttentionInfo, scale: float,
    cap: float = 0.0, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    (B, H, n, d), K, S = q.shape, keys.shape[1], keys.shape[2]
    slots, positions, visible = info.of_last(n)
    tree = visible or Branches(slots, slots[..., None])  # not read for a chain
    root, ancestors = tree.root, tree.ancestors
    tensors = [q, keys, values, ancestors]
    if q.dtype not in KINDS or keys.dtype != q.dtype or any(x.stride(-1) != 1 for x in tensors):
        return NotImplemented
    kind, size = info.kind, info.size
    fit = slots.shape == (B, n) and keys.shape == (B, K, S, d) == values.shape and not H % K
    fit = fit and (sinks is None or sinks.shape == (H,)) and d * q.itemsize <= WIDEST
    fit = fit and S * max(keys.stride(2), values.stride(2)) < 1 << 31  # slots are 32 bits wide
    if not fit or kind.chunk:
        return NotImplemented
    if visible is not None and 0 < kind.window < ancestors.shape[2]:
        return NotImplemented  # nodes may lie outside windows
    read = min(S, kind.window + n) if kind.window else S
    tile = tile_sizes(H // K * n, d, read, B * K, q.dtype)
    out = q.new_empty(B * n, H * d)
    splits = tile["SPLITS"]
    parts = q.new_empty(B * n * H, splits, d, dtype=torch.float32) if splits > 1 else out
    stats = q.new_empty(B * n * H, splits, 2, dtype=torch.float32) if splits > 1 else out
    queries, block = H // K * n, tile["QUERIES"]
    blocks, combine_slots = blocks_of(block, queries), COMBINE_SLOTS * min(queries, block)
    attention_kernel[B * K, splits, blocks](
        q, keys, values, slots, positions, root, ancestors, q if sinks is None else sinks, out,
        parts, stats, counters(q.device, FILLED), scale * LOG2E, cap * LOG2E, n, kind.window,
        size - 1 if size < info.cache.size else S, *slots.stride(), *positions.stride(),
        *q.stride()[:3], *keys.stride()[:3], *values.stride()[:3], root.stride(0),
        shared(ancestors), ancestors.stride(1), ancestors.shape[2], combine_slots, HEADS=K,
        GROUP=H // K,
        SINKS=sinks is not None, CAPPED=cap > 0, WINDOW=kind.window > 0, TREE=visible is not None,
        **tile, **dependent_launch(q),
    )  # fmt: skip
    return out


def tile_sizes(queries: int, d: int, S: int, heads: int, dtype: torch.dtype) -> dict[str, int]:
    """The sizes of a program and the number of splits, where S slots are read for so many queries
    of size d, and all rows together have `heads` key heads."""
    wide = max(16, power_of_2(d))
    most = 64 if dtype.itemsize == 2 else 32
    keys = max(16, most * 128 // max(128, wide))  # as shared memory allows
    size = max(16, min(keys, power_of_2(queries)))  # 16: the least product
    programs = heads * blocks_of(size, queries)
    most = min(SPLITS, FILLED // programs, blocks_of(keys, S))
    splits = 1 << max(most, 1).bit_length() - 1
    warps, stages = (4, 3) if dtype.itemsize == 2 else (8, 2)
    more = {"num_warps": warps, "num_stages": stages}
    return {"D": d, "WIDE": wide, "QUERIES": size, "KEYS": keys, "SPLITS": splits} | more


def by_length_up_to(head: Tensor) -> int:
    return UNLIMITED if head.dtype in KINDS else NotImplemented
