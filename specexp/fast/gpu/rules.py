"""Match, Reject and Block on chains and trees, by the target's logits: p is never written.

The references write p and every residual, each [B, N, V]. Here only the sum of a residual is kept,
and its numbers are computed where they are read. All nodes are judged side by side: Reject tries
their children in turn, with a launch for each rank, and Block judges their prefixes. Then the path
is followed from the root, and the bonus token is drawn at its end. A program owns a block of the
vocabulary at a node, except where a kernel says otherwise. Other rules, larger trees (paths.py) and
logits that laws.py cannot read are left to the references.

`notes` [B, N, K, 4] has for each child of a node: 0: its token (integer bits; -1: not tried); 1:
whether it was chosen, not drawn from q; 2, 3: the sums of the residual of p, and of what is left of
q, after it was rejected. For Block, a node's one note is on the node after it: token, chosen, and
the weight of the prefix up to this node. `place`: the index of a node in [B * N].
"""

from typing import Any

import torch
import triton
import triton.language as tl

from specexp.fast.gpu.launches import dependent_launch, wait_for_previous
from specexp.fast.gpu.laws import (
    all_zero,
    by_blocks,
    counters,
    is_last,
    laws_of,
    logit_scale,
    positive_or_one,
    probability,
)
from specexp.fast.gpu.paths import (
    accepted_path,
    at_depth,
    follow,
    shared,
    tree_sizes,
    walkable,
)
from specexp.fast.gpu.sampling import (
    best_of,
    best_put,
    draw,
    floats,
    put_none,
    put_part,
    raced,
    uniform,
)
from specexp.rules import Block, Match, Reject
from specexp.sampling import ACCEPT, RESIDUAL, TOKEN, Certain, Noise, Sampling, likeliest
from specexp.sequences import Draft, Verdict


@triton.jit
def quotient(w, whole, otherwise):
    """w / whole, rounded to nearest; `otherwise` where whole is not positive."""
    return tl.where(whole > 0, tl.div_rn(w, positive_or_one(whole)), otherwise)


@triton.jit
def unscaled_residuals(p, q, token, note, share, lenience):
    """At these tokens, after the child of a note was rejected: the residual of share * p and what
    is left of q, both not normalised; and the distribution that the child was drawn from."""
    x = tl.load(note).to(tl.int32, bitcast=True)
    drawn = tl.where(tl.load(note + 1) > 0, (token == x).to(tl.float32), q)
    return tl.maximum(share * p - lenience * drawn, 0.0), tl.where(token == x, 0.0, drawn), drawn


@triton.jit
def residuals(
    logits, laws, q, notes, place, token, real, count, stride, scale, lenience, K: tl.constexpr,
    V: tl.constexpr, COUNT: tl.constexpr, DRAWN: tl.constexpr,
):  # fmt: skip
    """The residual of p and what is left of q after a node's first `count` children, normalised."""
    p = probability(logits, laws, place, token, real, stride, scale, COUNT)
    q_left = 0.0 * p
    if DRAWN:
        q_left = tl.load(q + place * V + token, real, other=0.0)
    for j in range(K - 1):
        note = notes + j * 4
        was = (j < count) & (tl.load(note).to(tl.int32, bitcast=True) >= 0)
        some, others, drawn = unscaled_residuals(p, q_left, token, note, 1.0, lenience)
        p = tl.where(was, quotient(some, tl.load(note + 2), p), p)
        q_left = tl.where(was, quotient(others, tl.load(note + 3), drawn), q_left)
    return p, q_left


@triton.jit
def last_tried(notes, count, K: tl.constexpr):
    """The rank of the last of a node's first `count` children that was tried, or -1."""
    last = -1
    for j in range(K):
        x = tl.load(notes + j * 4, j < count, other=-1.0, cache_modifier=".cg")
        last = tl.where(x.to(tl.int32, bitcast=True) >= 0, j, last)
    return last


@triton.jit
def sum_residuals(
    logits, laws, q, notes, sums, place, last, share, stride, scale, lenience,
    K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
    DRAWN: tl.constexpr,
):  # fmt: skip
    """Write to sums [B * N, COUNT, 2] a block's sums of the residual of share * p, and of what is
    left of q, after child `last` was rejected."""
    block = tl.program_id(1)
    sums += (place * COUNT + block) * 2
    if all_zero(laws, place, block, scale, COUNT) & (not DRAWN):
        tl.store(sums, 0.0)
        tl.store(sums + 1, 0.0)
    else:
        token = block * BLOCK + tl.arange(0, BLOCK)
        real = token < V
        p, d = residuals(
            logits, laws, q, notes, place, token, real, last, stride, scale, lenience, K, V, COUNT,
            DRAWN,
        )  # fmt: skip
        some, others, _ = unscaled_residuals(p, d, token, notes + last * 4, share, lenience)
        tl.store(sums, tl.sum(some, 0))
        tl.store(sums + 1, tl.sum(others, 0))


@triton.jit
def sums_of(sums, place, COUNT: tl.constexpr, ROOM: tl.constexpr):
    """Both sums of a node, over all blocks."""
    block = tl.arange(0, ROOM)
    its = sums + (place * COUNT + block) * 2
    whole = tl.load(its, block < COUNT, other=0.0, cache_modifier=".cg")
    rest = tl.load(its + 1, block < COUNT, other=0.0, cache_modifier=".cg")
    return tl.sum(whole, 0), tl.sum(rest, 0)


@triton.jit
def end_row(
    ok, tokens, notes, depth, ancestors, ends, path, count, new, row, depth_b, ancestors_b,
    D: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr, LEVELS: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """A row's verdict but for the bonus token, once all its nodes are judged. Writes to ends [B, 4]
    the depth of its path, the last node, and the rank of the last child rejected there, or -1."""
    node, level = tl.arange(0, WIDE), tl.arange(0, LEVELS)
    good = tl.load(ok + row * N + node, (node > 0) & (node < N), 0, cache_modifier=".cg") > 0
    n, stop, route = accepted_path(
        good, depth, ancestors, row, depth_b, ancestors_b, N, WIDE, WHOLE
    )
    to = row * D + level
    tl.store(path + to, at_depth(route, tl.minimum(level, n), WIDE).to(tl.int64), level < D)
    line = tl.load(tokens + row * N + at_depth(route, level + 1, WIDE), level < n, other=0)
    tl.store(new + to, line, level < n)
    tl.store(count + row, n.to(tl.int64))
    tl.store(ends + row * 4, n)
    tl.store(ends + row * 4 + 1, stop)
    tl.store(ends + row * 4 + 2, last_tried(notes + (row * N + stop) * K * 4, K, K))


@triton.jit(do_not_specialize=["rank"])
def accept_child_kernel(
    logits, laws, q, tokens, keys, ok, notes, sums, ended, children, children_b, rank, stride,
    scale, lenience, salt, rows_ended, depth, ancestors, ends, path, count, new, depth_b,
    ancestors_b, D: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr,
    LEVELS: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
    ROOM: tl.constexpr, DRAWN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """rules.Reject: writes to ok [B, N] whether a node's child of this rank is accepted, and its
    note. The child is tried if none before it was accepted. All programs of a node sum what the
    child tried last leaves, and the last program judges."""
    wait_for_previous(DEPENDENT)
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
        sum_residuals(
            logits, laws, q, notes, sums, place, last, 1.0, stride, scale, lenience,
            K, V, BLOCK, COUNT, DRAWN,
        )  # fmt: skip
        judges = is_last(ended, place, COUNT)
        if judges:
            whole, rest = sums_of(sums, place, COUNT, ROOM)
            tl.store(notes + last * 4 + 2, whole)
            tl.store(notes + last * 4 + 3, rest)
            tl.debug_barrier()  # all threads read the note
    if judges:
        px, qx = residuals(
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
def prefix_weights_kernel(
    logits, laws, q, tokens, notes, stride, scale, N: tl.constexpr,
    WIDE: tl.constexpr, V: tl.constexpr, COUNT: tl.constexpr, DRAWN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """rules.Block: writes a chain's notes. A program owns a row, and reads at draft tokens only."""
    wait_for_previous(DEPENDENT)
    row, node = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    place = row * N + tl.minimum(node, N - 1)
    x = tl.load(tokens + place + 1, node + 1 < N, other=-1).to(tl.int32)
    exists = tl.cumsum(((x < 0) | (x >= V)).to(tl.int32), 0) == 0
    px, qx = residuals(
        logits, laws, q, notes, place, x, exists, 0, stride, scale, 1.0, 1, V, COUNT, DRAWN
    )
    odds = tl.where(exists, tl.div_rn(px, positive_or_one(qx)), 0.0)
    P, weights = tl.full([], 1.0, tl.float32), tl.zeros([WIDE], tl.float32)
    for i in range(N):
        weights = tl.where(node == i, P, weights)
        P = tl.minimum(P * tl.sum(tl.where(node == i, odds, 0.0), 0), 1.0)
    x = tl.where(exists, x, -1).to(tl.float32, bitcast=True)
    tl.store(notes + place * 4, x, node < N)
    tl.store(notes + place * 4 + 1, (exists & (qx <= 0)).to(tl.float32), node < N)
    tl.store(notes + place * 4 + 2, weights, node < N)


@triton.jit
def accept_prefix_kernel(
    logits, laws, q, tokens, keys, ok, notes, sums, ended, stride, scale, salt, rows_ended, depth,
    ancestors, ends, path, count, new, depth_b, ancestors_b, D: tl.constexpr, N: tl.constexpr,
    WIDE: tl.constexpr, LEVELS: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
    COUNT: tl.constexpr, ROOM: tl.constexpr, DRAWN: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """rules.Block: writes to ok [B, N] whether the prefix that ends with a node passes."""
    wait_for_previous(DEPENDENT)
    place, judges = tl.program_id(0).to(tl.int64), tl.program_id(1) == 0
    notes += place * 4
    P, inside = tl.load(notes + 2), place % N > 0
    S = P  # q counts as 0 where no draft token follows
    if (P > 0) & inside & (last_tried(notes, 1, 1) == 0):
        sum_residuals(
            logits, laws, q, notes, sums, place, 0, P, stride, scale, 1.0,
            1, V, BLOCK, COUNT, DRAWN,
        )  # fmt: skip
        judges = is_last(ended, place, COUNT)
        if judges:
            S = sums_of(sums, place, COUNT, ROOM)[0]
    if judges:
        u = uniform(tl.load(keys + place - 1, inside, other=0), salt, tl.full([], 0, tl.int32))
        passes = (P > 0) & inside & (u <= quotient(S, S + 1 - P, 1.0))
        tl.store(ok + place, passes.to(tl.int32))
        row = place // N
        if is_last(rows_ended, row, N):
            end_row(
                ok, tokens, notes - place * 4, depth, ancestors, ends, path, count, new, row,
                depth_b, ancestors_b, D, N, 1, WIDE, LEVELS, True,
            )  # fmt: skip


@triton.jit
def left_of_p(
    logits, laws, q, notes, place, token, last, refused, stride, scale, lenience, K: tl.constexpr,
    V: tl.constexpr, COUNT: tl.constexpr, DRAWN: tl.constexpr,
):  # fmt: skip
    """At these tokens, 0 from V on: the residual at a node after its child `last` was rejected or,
    unless `refused`, before that; not normalised."""
    real = token < V
    p, d = residuals(
        logits, laws, q, notes, place, token, real, last, stride, scale, lenience, K, V, COUNT,
        DRAWN,
    )  # fmt: skip
    if refused & (last >= 0):
        note = notes + last * 4
        p = unscaled_residuals(p, d, token, note, tl.load(note + 2), lenience)[0]
    return tl.where(real, p, 0.0)


@triton.jit
def bonus_kernel(
    logits, laws, q, keys, notes, ends, bests, ended, new, stride, scale, lenience, salt,
    D: tl.constexpr, N: tl.constexpr, K: tl.constexpr, LEVELS: tl.constexpr, V: tl.constexpr,
    BLOCK: tl.constexpr, COUNT: tl.constexpr, ROOM: tl.constexpr, DRAWN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write to new [B, D] a row's bonus token, drawn from the residual at the end of its path or,
    if that is 0 everywhere, from the one before the last rejection. If p is NaN, any token. A
    program owns a block of a row's vocabulary; the draw is uncoupled (sampling.py)."""
    wait_for_previous(DEPENDENT)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n, stop = tl.load(ends + row * 4), tl.load(ends + row * 4 + 1)
    last, place = tl.load(ends + row * 4 + 2), row * N + stop
    key = tl.load(keys + place)
    notes += place * K * 4
    bests += row * COUNT * 2
    at = tl.arange(0, BLOCK)
    if all_zero(laws, place, block, scale, COUNT):
        put_none(bests, block)
    else:
        w = left_of_p(
            logits, laws, q, notes, place, block * BLOCK + at, last, True, stride, scale, lenience,
            K, V, COUNT, DRAWN,
        )  # fmt: skip
        put_part(bests, block, w, key, salt)
    if is_last(ended, row, COUNT):
        some, part = best_put(bests, COUNT, ROOM)
        refused = some > 0  # else by rounding: x was rejected though p is nowhere above q
        if (last >= 0) & (some <= 0):
            for other in range(COUNT):
                w = left_of_p(
                    logits, laws, q, notes, place, other * BLOCK + at, last, False, stride, scale,
                    lenience, K, V, COUNT, DRAWN,
                )  # fmt: skip
                put_part(bests, other, w, key, salt)
            tl.debug_barrier()
            part = best_put(bests, COUNT, ROOM)[1]
        token = part * BLOCK + at
        w = left_of_p(
            logits, laws, q, notes, place, token, last, refused, stride, scale, lenience, K, V,
            COUNT, DRAWN,
        )  # fmt: skip
        winner = best_of(raced(w, token, key, salt, V), token)[1]
        level = tl.arange(0, LEVELS)
        bonus = tl.minimum(winner, V - 1).to(tl.int64)
        tl.store(new + row * D + level, bonus, (level >= n) & (level < D))


def judged(draft: Draft, seen: Any, engine: Any) -> Verdict:
    rule, sampling, noise, q = engine.rule, engine.sampling, engine.rng, draft.q
    logits, nodes = seen.logits, draft.nodes
    B, N, V = logits.shape
    if type(rule) not in (Match, Reject, Block) or not walkable(draft):
        return NotImplemented
    if type(sampling) is not Sampling:  # another may have a law of its own
        return NotImplemented
    if type(rule) is Block and nodes.deepest != N - 1:
        return NotImplemented  # the reference raises an error that says why
    if type(noise) is Certain and not sampling.temperature:
        return follow(draft, likeliest(logits), first=type(rule) is Reject)
    rows = logits.reshape(B * N, V)
    laws = laws_of(sampling, rows) if type(noise) is Noise else None
    if laws is None or (q is not None and (not floats(q) or q.shape != logits.shape)):
        return NotImplemented
    keys, tokens = draft.keys.contiguous(), draft.tokens.contiguous()
    if type(rule) is Match or N == 1:
        purpose = TOKEN if type(rule) is Match else None
        return follow(draft, draw(noise, rows, keys, purpose, laws, logit_scale(sampling)))

    whole, result = type(rule) is Block, Verdict.empty(draft)
    K = 1 if whole else nodes.children.shape[-1]
    ok, notes = keys.new_empty(B, N, dtype=torch.int32), laws.new_empty(B, N, K, 4)
    drafted = rows if q is None else q
    given, warm = (rows, laws, drafted), (rows.stride(0), logit_scale(sampling))
    lenience, ended = float(getattr(rule, "lenience", 1)), counters(laws.device, B * (N + 1))
    size = tree_sizes(draft)
    tile = by_blocks(rows) | {"N": N, "DRAWN": q is not None}
    blocks, ends = tile["COUNT"], ok.new_empty(B, 4)
    args = *given, tokens, keys, ok, notes, laws.new_empty(B * N, blocks, 2), ended
    end_args = (
        ended[B * N :], nodes.depth, nodes.ancestors, ends, result.path, result.n, result.new,
        shared(nodes.depth), shared(nodes.ancestors),
    )  # fmt: skip
    if whole:
        prefix_weights_kernel[B,](
            *given, tokens, notes, *warm, num_warps=1, N=N, WIDE=size["WIDE"], V=V, COUNT=blocks,
            DRAWN=q is not None, **dependent_launch(rows),
        )  # fmt: skip
        accept_prefix_kernel[B * N, blocks](
            *args, *warm, noise.salt(ACCEPT), *end_args, **tile | size
        )
    for rank in range(0 if whole else K):
        accept_child_kernel[B * N, blocks if rank else 1](
            *args, nodes.children, shared(nodes.children), rank, *warm, lenience,
            noise.salt(ACCEPT), *end_args, K=K, num_warps=4 if rank else 1, **tile | size,
        )  # fmt: skip
    bonus_kernel[B, blocks](
        *given, keys, notes, ends, ok.new_empty(B, blocks, 2), ended, result.new, *warm, lenience,
        noise.salt(RESIDUAL), D=size["D"], K=K, LEVELS=size["LEVELS"], **tile,
    )  # fmt: skip
    return result
