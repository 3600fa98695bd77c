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

from specexp.fast.gpu.laws import (
    by_temperature,
    chance,
    counters,
    is_last,
    shaped,
    split,
    worthless,
)
from specexp.fast.gpu.sampling import arrival, best_left, drawn, leave, pass_over, plain, uniform
from specexp.rules import Block, Match, Reject, follow
from specexp.sampling import ACCEPT, RESIDUAL, TOKEN, Certain, Noise, likeliest
from specexp.sequences import Draft, Verdict

LARGEST = 128  # nodes of a tree that one program walks


@triton.jit
def over(w, whole, otherwise):
    """w / whole; otherwise where whole is 0."""
    return tl.where(whole > 0, tl.div_rn(w, tl.where(whole > 0, whole, 1.0)), otherwise)


@triton.jit
def refused(p, q, token, note, share, lenience):
    """What is left of share * p, and of q, at tokens once the child of a note was refused, neither
    normalised; and the distribution behind that child."""
    x = tl.load(note).to(tl.int32, bitcast=True)
    drawn = tl.where(tl.load(note + 1) > 0, (token == x).to(tl.float32), q)
    return tl.maximum(share * p - lenience * drawn, 0.0), tl.where(token == x, 0.0, drawn), drawn


@triton.jit
def left(
    logits, laws, q, notes, place, token, real, count, stride, scale, lenience, K: tl.constexpr,
    V: tl.constexpr, COUNT: tl.constexpr, DRAWN: tl.constexpr,
):  # fmt: skip
    """What is left of p and of q at tokens once a node's first children, so many, were refused."""
    p = chance(logits, laws, place, token, real, stride, scale, COUNT)
    q_left = 0.0 * p
    if DRAWN:
        q_left = tl.load(q + place * V + token, real, other=0.0)
    for j in range(K - 1):
        note = notes + j * 4
        was = (j < count) & (tl.load(note).to(tl.int32, bitcast=True) >= 0)
        some, others, drawn = refused(p, q_left, token, note, 1.0, lenience)
        p = tl.where(was, over(some, tl.load(note + 2), p), p)
        q_left = tl.where(was, over(others, tl.load(note + 3), drawn), q_left)
    return p, q_left


@triton.jit
def last_tried(notes, count, K: tl.constexpr):
    """The last child with a note among the first, so many; or -1."""
    last = -1
    for j in range(K):
        x = tl.load(notes + j * 4, j < count, other=-1.0, cache_modifier=".cg")
        last = tl.where(x.to(tl.int32, bitcast=True) >= 0, j, last)
    return last


@triton.jit
def weigh_left(
    logits, laws, q, notes, sums, place, last, share, stride, scale, lenience,
    K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
    DRAWN: tl.constexpr,
):  # fmt: skip
    """How much the refusal of a node's last child leaves of p and of q in a block, to `sums`."""
    block = tl.program_id(1)
    sums += (place * COUNT + block) * 2
    if worthless(laws, place, block, scale, COUNT) & (not DRAWN):
        tl.store(sums, 0.0)
        tl.store(sums + 1, 0.0)
    else:
        token = block * BLOCK + tl.arange(0, BLOCK)
        real = token < V
        p, d = left(
            logits, laws, q, notes, place, token, real, last, stride, scale, lenience, K, V, COUNT,
            DRAWN,
        )  # fmt: skip
        some, others, _ = refused(p, d, token, notes + last * 4, share, lenience)
        tl.store(sums, tl.sum(some, 0))
        tl.store(sums + 1, tl.sum(others, 0))


@triton.jit
def weighed(sums, place, COUNT: tl.constexpr, ROOM: tl.constexpr):
    """The sums of all blocks."""
    block = tl.arange(0, ROOM)
    its = sums + (place * COUNT + block) * 2
    whole = tl.load(its, block < COUNT, other=0.0, cache_modifier=".cg")
    rest = tl.load(its + 1, block < COUNT, other=0.0, cache_modifier=".cg")
    return tl.sum(whole, 0), tl.sum(rest, 0)


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
def end_row(
    ok, tokens, notes, depth, ancestors, ends, path, count, new, row, depth_b, ancestors_b,
    D: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr, LEVELS: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """The path of a row, all nodes of which are judged. To `ends` [B, 4]: its depth, the node where
    it ends, and the last child that was refused there, or -1."""
    node, level = tl.arange(0, WIDE), tl.arange(0, LEVELS)
    good = tl.load(ok + row * N + node, (node > 0) & (node < N), 0, cache_modifier=".cg") > 0
    n, stop, route = walk(good, depth, ancestors, row, depth_b, ancestors_b, N, WIDE, WHOLE)
    to = row * D + level
    tl.store(path + to, at_depth(route, tl.minimum(level, n), WIDE).to(tl.int64), level < D)
    line = tl.load(tokens + row * N + at_depth(route, level + 1, WIDE), level < n, other=0)
    tl.store(new + to, line, level < n)
    tl.store(count + row, n.to(tl.int64))
    tl.store(ends + row * 4, n)
    tl.store(ends + row * 4 + 1, stop)
    tl.store(ends + row * 4 + 2, last_tried(notes + (row * N + stop) * K * 4, K, K))


@triton.jit(do_not_specialize=["rank"])
def try_child(
    logits, laws, q, tokens, keys, ok, notes, sums, ended, children, children_b, rank, stride,
    scale, lenience, salt, rows_ended, depth, ancestors, ends, path, count, new, depth_b,
    ancestors_b, D: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr,
    LEVELS: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
    ROOM: tl.constexpr, DRAWN: tl.constexpr,
):  # fmt: skip
    """Reject: is a node's child of this rank accepted, to `ok` [B, N], if none before it was? Its
    note [B, N, K]: the draft token, whether that counts as chosen, and the sums of what is left of
    p and q once it was refused, which are made by all programs before the next is tried."""
    place, judges = tl.program_id(0).to(tl.int64), tl.program_id(1) == 0
    row, node = place // N, place % N
    notes += place * K * 4
    siblings = children + row * children_b + node * K
    child = tl.load(siblings + rank)
    x = tl.load(tokens + row * N + child, child > 0, other=-1).to(tl.int32)
    took = x >= V
    for j in range(K - 1):
        other = tl.load(siblings + j, j < rank, other=-1)
        took = took | (tl.load(ok + row * N + other, other > 0, other=0) > 0)
    x = tl.where(took, -1, x)
    last = last_tried(notes, rank, K)
    if (x >= 0) & (last >= 0):
        weigh_left(
            logits, laws, q, notes, sums, place, last, 1.0, stride, scale, lenience,
            K, V, BLOCK, COUNT, DRAWN,
        )  # fmt: skip
        judges = is_last(ended, place, COUNT)
        if judges:
            whole, rest = weighed(sums, place, COUNT, ROOM)
            tl.store(notes + last * 4 + 2, whole)
            tl.store(notes + last * 4 + 3, rest)
            tl.debug_barrier()  # the note is read by all
    if judges:
        px, qx = left(
            logits, laws, q, notes, place, x, x >= 0, rank, stride, scale, lenience, K, V, COUNT,
            DRAWN,
        )  # fmt: skip
        chosen = qx <= 0
        odds = tl.div_rn(px, lenience * tl.where(chosen, 1.0, qx))
        u = uniform(tl.load(keys + place), salt, tl.full([], 0, tl.int32) + rank)
        tl.store(notes + rank * 4, x.to(tl.float32, bitcast=True))
        tl.store(notes + rank * 4 + 1, chosen.to(tl.float32))
        tl.store(notes + rank * 4 + 2, 1.0)
        tl.store(ok + row * N + child, ((x >= 0) & (u <= odds)).to(tl.int32), child > 0)
        done = rank == K - 1
        if done:
            done = is_last(rows_ended, row, N)
        if done:
            end_row(
                ok, tokens, notes - place * K * 4, depth, ancestors, ends, path, count, new, row,
                depth_b, ancestors_b, D, N, K, WIDE, LEVELS, False,
            )  # fmt: skip


@triton.jit
def weigh_prefixes(
    logits, laws, q, tokens, notes, stride, scale, N: tl.constexpr,
    WIDE: tl.constexpr, V: tl.constexpr, COUNT: tl.constexpr, DRAWN: tl.constexpr,
):  # fmt: skip
    """Block: the note of every node of a chain: the draft token after it, whether that counts as
    chosen, and the weight of the prefix that ends there."""
    row, node = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    place = row * N + node
    x = tl.load(tokens + place + 1, node + 1 < N, other=-1).to(tl.int32)
    exists = tl.cumsum(((x < 0) | (x >= V)).to(tl.int32), 0) == 0
    px, qx = left(
        logits, laws, q, notes, place, x, exists, 0, stride, scale, 1.0, 1, V, COUNT, DRAWN
    )
    odds = tl.where(exists, tl.div_rn(px, tl.where(qx > 0, qx, 1.0)), 0.0)
    P, weights = tl.full([], 1.0, tl.float32), tl.zeros([WIDE], tl.float32)
    for i in range(N):
        weights = tl.where(node == i, P, weights)
        P = tl.minimum(P * tl.sum(tl.where(node == i, odds, 0.0), 0), 1.0)
    x = tl.where(exists, x, -1).to(tl.float32, bitcast=True)
    tl.store(notes + place * 4, x, node < N)
    tl.store(notes + place * 4 + 1, (exists & (qx <= 0)).to(tl.float32), node < N)
    tl.store(notes + place * 4 + 2, weights, node < N)


@triton.jit
def judge_prefix(
    logits, laws, q, tokens, keys, ok, notes, sums, ended, stride, scale, salt, rows_ended, depth,
    ancestors, ends, path, count, new, depth_b, ancestors_b, D: tl.constexpr, N: tl.constexpr,
    WIDE: tl.constexpr, LEVELS: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
    COUNT: tl.constexpr, ROOM: tl.constexpr, DRAWN: tl.constexpr,
):  # fmt: skip
    """Block: does the prefix that ends with a node pass, to `ok` [B, N]?"""
    place, judges = tl.program_id(0).to(tl.int64), tl.program_id(1) == 0
    notes += place * 4
    P, inside = tl.load(notes + 2), place % N > 0
    S = P  # q counts as 0 where no draft token follows
    if (P > 0) & inside & (last_tried(notes, 1, 1) == 0):
        weigh_left(
            logits, laws, q, notes, sums, place, 0, P, stride, scale, 1.0,
            1, V, BLOCK, COUNT, DRAWN,
        )  # fmt: skip
        judges = is_last(ended, place, COUNT)
        if judges:
            S = weighed(sums, place, COUNT, ROOM)[0]
    if judges:
        u = uniform(tl.load(keys + place - 1, inside, other=0), salt, tl.full([], 0, tl.int32))
        passes = (P > 0) & inside & (u <= over(S, S + 1 - P, 1.0))
        tl.store(ok + place, passes.to(tl.int32))
        row = place // N
        if is_last(rows_ended, row, N):
            end_row(
                ok, tokens, notes - place * 4, depth, ancestors, ends, path, count, new, row,
                depth_b, ancestors_b, D, N, 1, WIDE, LEVELS, True,
            )  # fmt: skip


@triton.jit
def race_left(
    logits, laws, q, notes, bests, place, block, last, key, stride, scale, lenience,
    salt, K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
    DRAWN: tl.constexpr, REFUSED: tl.constexpr,
):  # fmt: skip
    """`leave` the best of a block in the race for what is left of p at a node: after its last
    child, or, if that is not to count as REFUSED, before it."""
    token = block * BLOCK + tl.arange(0, BLOCK)
    real = token < V
    p, d = left(
        logits, laws, q, notes, place, token, real, last, stride, scale, lenience, K, V, COUNT,
        DRAWN,
    )  # fmt: skip
    if REFUSED & (last >= 0):
        note = notes + last * 4
        p = refused(p, d, token, note, tl.load(note + 2), lenience)[0]
    leave(bests, block, tl.where(real, p / arrival(key, salt, token), -1.0), token)


@triton.jit
def draw_last(
    logits, laws, q, keys, notes, ends, bests, ended, new, stride, scale, lenience, salt,
    D: tl.constexpr, N: tl.constexpr, K: tl.constexpr, LEVELS: tl.constexpr, V: tl.constexpr,
    BLOCK: tl.constexpr, COUNT: tl.constexpr, ROOM: tl.constexpr, DRAWN: tl.constexpr,
):  # fmt: skip
    """The bonus token at the end of a row's path: of what is left of p, if anything is, or of what
    was left before the last child was refused; any if p is NaN."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n, stop = tl.load(ends + row * 4), tl.load(ends + row * 4 + 1)
    last, place = tl.load(ends + row * 4 + 2), row * N + stop
    key = tl.load(keys + place)
    notes += place * K * 4
    bests += row * COUNT * 2
    if worthless(laws, place, block, scale, COUNT):
        pass_over(bests, block)
    else:
        race_left(
            logits, laws, q, notes, bests, place, block, last, key, stride, scale, lenience, salt,
            K, V, BLOCK, COUNT, DRAWN, True,
        )  # fmt: skip
    if is_last(ended, row, COUNT):
        some, winner = best_left(bests, COUNT, ROOM)
        if (last >= 0) & (some <= 0):  # rounding alone: p is nowhere above q, and x was refused
            for other in range(COUNT):
                race_left(
                    logits, laws, q, notes, bests, place, other, last, key, stride, scale,
                    lenience, salt, K, V, BLOCK, COUNT, DRAWN, False,
                )  # fmt: skip
            tl.debug_barrier()
            winner = best_left(bests, COUNT, ROOM)[1]
        level = tl.arange(0, LEVELS)
        bonus = tl.minimum(winner, V - 1).to(tl.int64)
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
    rule, sampling, noise, q = engine.rule, engine.sampling, engine.rng, draft.q
    logits, nodes = seen.logits, draft.nodes
    B, N, V = logits.shape
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
    if type(rule) is Match or N == 1:
        purpose = TOKEN if type(rule) is Match else RESIDUAL
        return follow(draft, drawn(noise, rows, laws, sampling, keys, purpose))

    whole, result = type(rule) is Block, verdict(draft)
    K = 1 if whole else nodes.children.shape[-1]
    ok, notes = keys.new_empty(B, N, dtype=torch.int32), laws.new_empty(B, N, K, 4)
    drafted = rows if q is None else q
    given, warm = (rows, laws, drafted), (rows.stride(0), by_temperature(sampling))
    lenience, ended = float(getattr(rule, "lenience", 1)), counters(laws.device, B * (N + 1))
    size = sizes(draft)
    tile = split(V) | {"N": N, "DRAWN": q is not None}
    blocks, ends = tile["COUNT"], ok.new_empty(B, 4)
    judging = *given, tokens, keys, ok, notes, laws.new_empty(B * N, blocks, 2), ended
    ending = (
        ended[B * N :], nodes.depth, nodes.ancestors, ends, result.path, result.n, result.new,
        shared(nodes.depth), shared(nodes.ancestors),
    )  # fmt: skip
    if whole:
        weigh_prefixes[B,](
            *given, tokens, notes, *warm, num_warps=1, N=N, WIDE=size["WIDE"], V=V, COUNT=blocks,
            DRAWN=q is not None,
        )  # fmt: skip
        judge_prefix[B * N, blocks](*judging, *warm, noise.salt(ACCEPT), *ending, **tile | size)
    for rank in range(0 if whole else K):
        try_child[B * N, blocks if rank else 1](
            *judging, nodes.children, shared(nodes.children), rank, *warm, lenience,
            noise.salt(ACCEPT), *ending, K=K, **tile | size,
        )  # fmt: skip
    draw_last[B, blocks](
        *given, keys, notes, ends, ok.new_empty(B, blocks, 2), ended, result.new, *warm, lenience,
        noise.salt(RESIDUAL), D=size["D"], K=K, LEVELS=size["LEVELS"], **tile,
    )  # fmt: skip
    return result
