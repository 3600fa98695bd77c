"""Match, Reject and Block on chains and trees, by the target's logits: p is never written.

Nodes are judged side by side, each by a program that tries the node's children in turn; what is
left of p after each that was refused is known by the sum of it, so it too is made where it is read.
Then one program a row and part of the vocabulary walks from the root, and draws where it stops.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specexp.fast.gpu.laws import chance, counters, is_last, shaped, split, worthless
from specexp.fast.gpu.sampling import arrival, best_left, better, drawn, leave, plain, uniform
from specexp.rules import Block, Match, Reject, follow
from specexp.sampling import ACCEPT, RESIDUAL, TOKEN, Certain, Noise, likeliest
from specexp.sequences import Draft, Verdict

LARGEST = 128  # nodes of a tree that one program walks


@triton.jit
def over(w, whole, otherwise):
    """w / whole; otherwise where whole is 0."""
    return tl.where(whole > 0, tl.div_rn(w, tl.where(whole > 0, whole, 1.0)), otherwise)


@triton.jit
def left(p, q, token, notes, count, lenience):
    """What is left of p and of q at tokens once the first children, so many, were refused."""
    for j in range(count):
        note = notes + j * 4
        x = tl.load(note).to(tl.int32, bitcast=True)
        whole, rest = tl.load(note + 2), tl.load(note + 3)
        drawn_ = tl.where(tl.load(note + 1) > 0, (token == x).to(tl.float32), q)
        uncovered = tl.maximum(p - lenience * drawn_, 0.0)
        others = tl.where(token == x, 0.0, drawn_)
        p = tl.where(x >= 0, over(uncovered, whole, p), p)
        q = tl.where(x >= 0, over(others, rest, drawn_), q)
    return p, q


@triton.jit
def try_children(
    logits, laws, q, tokens, keys, children, ok, notes, stride, temperature, min_p, lenience, salt,
    children_b, N: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
    COUNT: tl.constexpr, DRAWN: tl.constexpr,
):  # fmt: skip
    """Reject at one node: which child is accepted, to `ok` [B, N], and `notes` [B, N, K, 4] of
    those that were refused."""
    row, node = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = row * N + node
    notes += place * K * 4
    key, last = tl.load(keys + place), -1
    for rank in range(K):
        child = tl.load(children + row * children_b + node * K + rank)
        x = tl.load(tokens + row * N + child, child > 0, other=-1)
        last = tl.where((x >= 0) & (x < V), rank, last)
    took = -1
    for rank in range(K):
        child = tl.load(children + row * children_b + node * K + rank)
        x = tl.load(tokens + row * N + child, child > 0, other=-1).to(tl.int32)
        x = tl.where((x < V) & (took < 0), x, -1)
        tl.store(notes + rank * 4, x.to(tl.float32, bitcast=True))
        if x >= 0:
            px = chance(logits, laws, place, x, x >= 0, stride, temperature, min_p, COUNT)
            qx = 0.0 * px
            if DRAWN:
                qx = tl.load(q + place * V + x)
            px, qx = left(px, qx, x, notes, rank, lenience)
            chosen = qx <= 0
            odds = tl.div_rn(px, lenience * tl.where(chosen, 1.0, qx))
            if uniform(key, salt, tl.full([], 0, tl.int32) + rank) <= odds:
                took = rank
            tl.store(notes + rank * 4 + 1, chosen.to(tl.float32))
            tl.store(notes + rank * 4 + 2, 1.0)
            if (took < 0) & (rank < last):
                whole, rest = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
                for first in range(0, V, BLOCK):
                    token = first + tl.arange(0, BLOCK)
                    real = token < V
                    p = chance(logits, laws, place, token, real, stride, temperature, min_p, COUNT)
                    d = 0.0 * p
                    if DRAWN:
                        d = tl.load(q + place * V + token, real, other=0.0)
                    p, d = left(p, d, token, notes, rank, lenience)
                    d = tl.where(chosen, (token == x).to(tl.float32), d)
                    whole += tl.maximum(p - lenience * d, 0.0)
                    rest += tl.where(token == x, 0.0, d)
                tl.store(notes + rank * 4 + 2, tl.sum(whole, 0))
                tl.store(notes + rank * 4 + 3, tl.sum(rest, 0))
        if child > 0:
            tl.store(ok + row * N + child, tl.where(took == rank, 1, 0))
        tl.debug_barrier()  # the notes are read by all


@triton.jit
def weigh_prefix(
    logits, laws, q, tokens, keys, ok, notes, stride, temperature, min_p, salt, N: tl.constexpr,
    V: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr, DRAWN: tl.constexpr,
):  # fmt: skip
    """Block at one node of a chain: does the prefix that ends there pass? Its note: the draft token
    after it, whether that counts as chosen, and the weight of the prefix."""
    row, node = tl.program_id(0).to(tl.int64), tl.program_id(1)
    P, exists = tl.full([], 1.0, tl.float32), tl.full([], 1, tl.int32) > 0
    x, chosen = tl.full([], -1, tl.int32), exists
    for step in range(node + 1):
        i = tl.full([], 0, tl.int32) + step
        if i > 0:
            place = row * N + i - 1
            px = chance(logits, laws, place, x, exists, stride, temperature, min_p, COUNT)
            qx = 0.0 * px
            if DRAWN:
                qx = tl.load(q + place * V + x, exists, other=0.0)
            odds = tl.div_rn(px, tl.where(qx > 0, qx, 1.0))
            P = tl.where(exists, tl.minimum(P * odds, 1.0), 0.0)
        x = tl.load(tokens + row * N + i + 1, i + 1 < N, other=-1).to(tl.int32)
        exists = exists & (x >= 0) & (x < V)
    place = row * N + node
    x = tl.where(exists, x, -1)
    chosen = exists
    if DRAWN:
        chosen = tl.load(q + place * V + x, exists, other=0.0) <= 0
    passes = tl.full([], 0, tl.int32)
    if (P > 0) & (node > 0):
        sums = tl.zeros([BLOCK], tl.float32)
        for first in range(0, V, BLOCK):
            token = first + tl.arange(0, BLOCK)
            real = token < V
            p = chance(logits, laws, place, token, real, stride, temperature, min_p, COUNT)
            d = (token == x).to(tl.float32)
            if DRAWN:
                d = tl.where(chosen, d, tl.load(q + place * V + token, real & exists, other=0.0))
            sums += tl.maximum(P * p - d, 0.0)
        S = tl.sum(sums, 0)
        odds = over(S, S + 1 - P, 1.0)
        u = uniform(tl.load(keys + place - 1), salt, tl.full([], 0, tl.int32))
        passes = (u <= odds).to(tl.int32)
    tl.store(ok + place, passes)
    tl.store(notes + place * 4, x.to(tl.float32, bitcast=True))
    tl.store(notes + place * 4 + 1, chosen.to(tl.float32))
    tl.store(notes + place * 4 + 2, P)


@triton.jit
def walk(
    good, depth, ancestors, row, depth_b, ancestors_b, N: tl.constexpr, WIDE: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """How deep the good nodes [WIDE] reach from the root, the node where that ends, and the depths
    [WIDE] of the nodes on the path to it, -1 of others. A prefix that is judged as a WHOLE needs no
    good nodes before its last."""
    node = tl.arange(0, WIDE)
    table = ancestors + row * ancestors_b
    reached = good | (node == 0)
    if not WHOLE:
        inside = (node < N)[:, None] & (node < N)[None, :]
        above = tl.load(table + node[:, None] * N + node[None, :], inside, other=0) != 0
        reached = tl.min(tl.where(above & ~reached[None, :], 0, 1), 1) > 0
    deep = tl.load(depth + row * depth_b + node, node < N, other=-1).to(tl.int32)
    n = tl.max(tl.where(reached & (node < N), deep, -1), 0)
    stop = tl.min(tl.where(reached & (node < N) & (deep == n), node, WIDE), 0)
    on = tl.load(table + stop * N + node, node < N, other=0) != 0
    return n, stop, tl.where(on, deep, -1)


@triton.jit
def at_depth(route, level, WIDE: tl.constexpr):
    """The nodes at these levels of a path."""
    at = route[None, :] == level[:, None]
    return tl.sum(tl.where(at, tl.arange(0, WIDE)[None, :], 0), 1)


@triton.jit
def draw_last(
    logits, laws, q, tokens, keys, ok, notes, depth, ancestors, bests, ended, path, count, new,
    stride, temperature, min_p, lenience, salt, depth_b, ancestors_b, D: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr, LEVELS: tl.constexpr, V: tl.constexpr,
    BLOCK: tl.constexpr, COUNT: tl.constexpr, PART: tl.constexpr, ROOM: tl.constexpr,
    DRAWN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The path of a row and the bonus token at its end: of what is left of p, if anything is, or of
    what was left before the last child was refused; any if p is NaN."""
    row, part, programs = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    node = tl.arange(0, WIDE)
    good = tl.load(ok + row * N + node, (node > 0) & (node < N), other=0) > 0
    n, stop, route = walk(good, depth, ancestors, row, depth_b, ancestors_b, N, WIDE, WHOLE)
    place = row * N + stop
    key = tl.load(keys + place)
    notes += place * K * 4
    last = -1
    for rank in range(K):
        tried = tl.load(notes + rank * 4).to(tl.int32, bitcast=True) >= 0
        last = tl.where(tried, rank, last)
    refused = tl.load(notes + last * 4, last >= 0, other=0.0).to(tl.int32, bitcast=True)
    chosen = tl.load(notes + last * 4 + 1, last >= 0, other=0.0) > 0
    scale = tl.load(notes + last * 4 + 2, last >= 0, other=0.0)

    most, kept = tl.full([BLOCK], -1.0, tl.float32), tl.zeros([BLOCK], tl.int32)
    whole, plain = most, kept
    for i in range(PART):
        block = part * PART + i
        if ~worthless(laws, place, block, temperature, min_p, COUNT):
            token = block * BLOCK + tl.arange(0, BLOCK)
            real = token < V
            late = arrival(key, salt, token)
            p = chance(logits, laws, place, token, real, stride, temperature, min_p, COUNT)
            d = 0.0 * p
            if DRAWN:
                d = tl.load(q + place * V + token, real, other=0.0)
            p, d = left(p, d, token, notes, last, lenience)
            d = tl.where(chosen, (token == refused).to(tl.float32), d)
            rest = tl.maximum(scale * p - lenience * d, 0.0)
            most, kept = better(most, kept, tl.where(real, rest / late, -1.0), token)
            whole, plain = better(whole, plain, tl.where(real, p / late, -1.0), token)
    bests += row * programs * 4
    leave(bests, part, tl.where(last >= 0, most, -1.0), kept)
    leave(bests + programs * 2, part, whole, plain)
    level = tl.arange(0, LEVELS)
    if part == 0:
        tl.store(count + row, n.to(tl.int64))
        to = row * D + level
        tl.store(path + to, at_depth(route, tl.minimum(level, n), WIDE).to(tl.int64), level < D)
        line = tl.load(tokens + row * N + at_depth(route, level + 1, WIDE), level < n, other=0)
        tl.store(new + to, line, level < n)
    if is_last(ended, row, programs):
        some, token = best_left(bests, programs, ROOM)
        other = best_left(bests + programs * 2, programs, ROOM)[1]
        bonus = tl.minimum(tl.where(some > 0, token, other), V - 1).to(tl.int64)
        tl.store(new + row * D + level, bonus, (level >= n) & (level < D))


@triton.jit
def follow_samples(
    tokens, sample, parents, depth, ancestors, path, count, new, parents_b, depth_b, ancestors_b,
    D: tl.constexpr, N: tl.constexpr, WIDE: tl.constexpr, LEVELS: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """The path of a row along draft tokens that equal the sample at their parents; with FIRST, of
    equal siblings along the first."""
    row, node, level = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE), tl.arange(0, LEVELS)
    real = node < N
    parent = tl.load(parents + row * parents_b + node, real, other=-1).to(tl.int32)
    wanted = tl.load(sample + row * N + parent, real & (node > 0), other=-2)
    good = tl.load(tokens + row * N + node, real, other=-1) == wanted
    if FIRST:
        before = good[None, :] & (parent[None, :] == parent[:, None])
        good = good & (tl.max(tl.where(before & (node[None, :] < node[:, None]), 1, 0), 1) == 0)
    n, _, route = walk(good, depth, ancestors, row, depth_b, ancestors_b, N, WIDE, False)
    at = at_depth(route, tl.minimum(level, n), WIDE)
    tl.store(count + row, n.to(tl.int64))
    tl.store(path + row * D + level, at.to(tl.int64), level < D)
    tl.store(new + row * D + level, tl.load(sample + row * N + at, level < D, other=0), level < D)


def shared(x: Tensor) -> int:
    """The stride between the trees [b, ...] of rows: 0 if all have the same."""
    return x.stride(0) if len(x) > 1 else 0


def walkable(draft: Draft) -> bool:
    nodes, N = draft.nodes, draft.tokens.shape[1]
    parts = nodes.parents, nodes.depth, nodes.ancestors, nodes.children
    return N <= LARGEST and all(x.is_contiguous() for x in parts)


def verdict(draft: Draft) -> Verdict:
    """Room for one."""
    B, D = len(draft.tokens), draft.nodes.deepest + 1
    path, new = (draft.tokens.new_empty(B, D) for _ in range(2))
    return Verdict(path, draft.tokens.new_empty(B), new)


def sizes(draft: Draft) -> dict[str, int]:
    N, D = draft.tokens.shape[1], draft.nodes.deepest + 1
    up = triton.next_power_of_2
    return {"N": N, "D": D, "WIDE": up(N), "LEVELS": up(D)}


def followed(draft: Draft, sample: Tensor, first: bool = False) -> Verdict:
    if not walkable(draft) or sample.dtype != torch.int64:
        return NotImplemented
    nodes, result = draft.nodes, verdict(draft)
    trees = nodes.parents, nodes.depth, nodes.ancestors
    follow_samples[len(sample),](
        draft.tokens.contiguous(), sample.contiguous(), *trees, result.path, result.n, result.new,
        *map(shared, trees), FIRST=first, **sizes(draft),
    )  # fmt: skip
    return result


def judged(draft: Draft, seen: Any, engine: Any) -> Verdict:
    rule, sampling, noise, logits, q = (
        engine.rule,
        engine.sampling,
        engine.rng,
        seen.logits,
        draft.q,
    )
    (B, N, V), nodes = logits.shape, draft.nodes
    if type(rule) not in (Match, Reject, Block) or not walkable(draft):
        return NotImplemented
    if type(rule) is Block and nodes.deepest != N - 1:
        return NotImplemented  # the reference says why
    if type(noise) is Certain and not sampling.temperature:
        return followed(draft, likeliest(logits), first=type(rule) is Reject)
    rows = logits.reshape(B * N, V)
    laws = shaped(sampling, rows) if type(noise) is Noise else None
    if laws is None or (q is not None and (not plain(q) or q.shape != logits.shape)):
        return NotImplemented
    keys, tokens = draft.keys.contiguous(), draft.tokens.contiguous()
    if type(rule) is Match:
        sample = drawn(noise, rows, laws, sampling, keys, TOKEN)
        return follow(draft, sample)

    K, result = max(nodes.children.shape[-1], 1), verdict(draft)
    ok, notes = keys.new_empty(B, N, dtype=torch.int32), laws.new_empty(B, N, K, 4)
    given = rows, laws, rows if q is None else q, tokens, keys
    warm = rows.stride(0), float(sampling.temperature), float(sampling.min_p)
    lenience = float(getattr(rule, "lenience", 1))
    parts, tile = split(B, V)
    tile["DRAWN"] = q is not None
    whole = {"N": N, "num_warps": 8, **{k: tile[k] for k in ("V", "BLOCK", "COUNT", "DRAWN")}}
    if type(rule) is Block:
        weigh_prefix[B, N](*given, ok, notes, *warm, noise.salt(ACCEPT), **whole)
    else:
        try_children[B, N](
            *given, nodes.children, ok, notes, *warm, lenience, noise.salt(ACCEPT),
            shared(nodes.children), K=nodes.children.shape[-1], **whole,
        )  # fmt: skip
    bests = laws.new_empty(B, parts, 4)
    draw_last[B, parts](
        *given, ok, notes, nodes.depth, nodes.ancestors, bests, counters(bests.device, B),
        result.path, result.n, result.new, *warm, lenience, noise.salt(RESIDUAL),
        shared(nodes.depth), shared(nodes.ancestors), K=K, WHOLE=type(rule) is Block, **tile,
        **sizes(draft), num_warps=8,
    )  # fmt: skip
    return result
