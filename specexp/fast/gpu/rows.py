"""What a round does to rows besides passes and rules.

Each operation is one launch here; the references take up to dozens. A program owns a row, except
where a kernel says otherwise.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specexp.drafters.ngram import NGram, first_leaf
from specexp.drafters.suffix import Suffix
from specexp.fast.gpu.launches import blocks_of, power_of_2
from specexp.fast.gpu.laws import BITS
from specexp.fast.gpu.paths import shared
from specexp.fast.gpu.sampling import mix
from specexp.models.cache import Slots
from specexp.sampling import Noise, Rng
from specexp.sequences import Draft, Sequences, Verdict
from specexp.tree import Tree

AT_ONCE = 1024  # slots that a program reads at a time


@triton.jit
def keys_kernel(
    stream, length, depth, out, depth_b, n, WIDE: tl.constexpr, BY_ROUND: tl.constexpr
):  # fmt: skip
    """Noise.keys: writes out [B, n] by stream [B], length [B] and depth [1 or B, n]."""
    row, at = tl.program_id(0), tl.arange(0, WIDE)
    root = mix(tl.load(stream + row)) + tl.load(length + row)
    if BY_ROUND:
        root = mix(root)
    to = mix(root + tl.load(depth + row * depth_b + at, at < n, other=0))
    tl.store(out + row * n + at, to, at < n)


def keys(self: Noise, stream: Tensor, length: Tensor, depth: Tensor) -> Tensor:
    B, n = len(length), depth.shape[1]
    if not integers(stream, length, depth) or not depth.numel() or len(depth) not in (1, B):
        return NotImplemented
    out = torch.empty(B, n, dtype=torch.int64, device=depth.device)
    wide = power_of_2(n)
    keys_kernel[B,](stream, length, depth, out, shared(depth), n, WIDE=wide, BY_ROUND=self.by_round)
    return out


@triton.jit
def commit_kernel(
    tokens, length, limit, eos, new, count, report, tokens_b, E, D: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Sequences.commit of new [B, D], of which `count` [B] are accepted draft tokens. Unlike the
    reference, it writes no tokens past a row's new length."""
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
    counted = integers(self.length, self.limit, self.eos, verdict.n)
    if not counted or tokens.stride(1) != 1 or not new.is_contiguous():
        return NotImplemented
    (B, D), report = new.shape, new.new_empty(len(new), 3)
    commit_kernel[B,](
        tokens, self.length, self.limit, self.eos, new, verdict.n, report, tokens.stride(0),
        len(self.eos), D=D, WIDE=power_of_2(D),
    )  # fmt: skip
    return report


@triton.jit
def store_kernel(
    keys, values, places, new_keys, new_values, n, d_k, d_v, k_b, k_h, k_s, v_b, v_h, v_s, places_b,
    places_n, x_b, x_h, x_n, y_b, y_h, y_n, WIDE: tl.constexpr,
):  # fmt: skip
    """cache.store: new_keys [B, K, n, d_k] and new_values [B, K, n, d_v] go to their places in keys
    and values [B, K, S, d]. A program owns one head of one token."""
    at, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row, token, d = at // n, at % n, tl.arange(0, WIDE)
    place = tl.load(places + row * places_b + token * places_n)
    x = tl.load(new_keys + row * x_b + head * x_h + token * x_n + d, d < d_k, other=0.0)
    y = tl.load(new_values + row * y_b + head * y_h + token * y_n + d, d < d_v, other=0.0)
    tl.store(keys + row * k_b + head * k_h + place * k_s + d, x, d < d_k)
    tl.store(values + row * v_b + head * v_h + place * v_s + d, y, d < d_v)


def store(
    keys: Tensor, values: Tensor, places: Tensor, new_keys: Tensor, new_values: Tensor
) -> Any:
    (B, K, n, d_k), d_v = new_keys.shape, new_values.shape[-1]
    S, tensors = keys.shape[2], (keys, values, new_keys, new_values)
    fit = [(B, K, S, d_k), (B, K, S, d_v), (B, K, n, d_k), (B, K, n, d_v)]
    if [x.shape for x in tensors] != fit or places.shape != (B, 1, n, 1):
        return NotImplemented
    if any(x.stride(-1) != 1 or x.dtype != keys.dtype for x in tensors):
        return NotImplemented
    store_kernel[B * n, K](
        keys, values, places, new_keys, new_values, n, d_k, d_v, *keys.stride()[:3],
        *values.stride()[:3], places.stride(0), places.stride(2), *new_keys.stride()[:3],
        *new_values.stride()[:3], WIDE=power_of_2(max(d_k, d_v)),
    )  # fmt: skip
    return None


@triton.jit
def keep_kernel(
    keys, values, source, slots, n, d, k_b, k_h, k_s, v_b, v_h, v_s, source_b, slots_b,
    PLACES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Slots.keep: copies keys and values [B, K, S, d] from slots `source` [B, n] to `slots` [B, n].
    A program owns one key head of a row."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    place, at = tl.arange(0, PLACES), tl.arange(0, WIDE)
    real = (place < n)[:, None] & (at < d)[None, :]
    old = tl.load(source + row * source_b + place, place < n, other=0)[:, None]
    to = tl.load(slots + row * slots_b + place, place < n, other=0)[:, None]
    keys += row * k_b + head * k_h + at[None, :]
    values += row * v_b + head * v_h + at[None, :]
    k = tl.load(keys + old * k_s, real, other=0.0)
    v = tl.load(values + old * v_s, real, other=0.0)
    tl.debug_barrier()  # all threads have read before any writes
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
    keep_kernel[B, H](
        keys, values, source, slots, n, d, *keys.stride()[:3], *values.stride()[:3],
        source.stride(0), slots.stride(0), PLACES=power_of_2(n), WIDE=power_of_2(d),
        num_warps=4,
    )  # fmt: skip
    return None


@triton.jit
def match_length(text, end, last, most):
    """How many tokens that end at places `end` equal those that end at `last`: at most `most`."""
    same, matched = end < last, 0 * end
    for back in range(most):
        token = tl.load(text + tl.maximum(last - back, 0))
        near = same & (end >= back) & (last >= back)
        same = near & (tl.load(text + end - back, near, other=-1) == token)
        matched += same.to(tl.int32)
    return matched


@triton.jit
def lookup_kernel(
    text, length, depth, branch, out, text_b, S, vocab, longest, N: tl.constexpr,
    WIDE: tl.constexpr, LEAVES: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """NGram.propose, written to out [B, N]. Each leaf continues the best match in text [B, S] that
    is worse than the match of the leaf before."""
    row, node = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    text += row * text_b
    last = tl.load(length + row).to(tl.int32) - 1
    tl.store(out + row * N, tl.load(text + tl.maximum(last, 0)))
    step = tl.load(depth + node, node < N, other=1).to(tl.int32)
    mine = tl.load(branch + node - 1, (node > 0) & (node < N), other=-1)
    below = tl.full([], 0x7FFFFFFF, tl.int32)
    for leaf in range(LEAVES):
        best = tl.full([], -1, tl.int32)
        for first in range(0, last, AT_ONCE):
            end = first + tl.arange(0, AT_ONCE)
            matched = match_length(text, end, last, longest)
            score = tl.where(matched > 0, matched * S + end, -1)
            best = tl.maximum(best, tl.max(tl.where(score < below, score, -1), 0))
        below = best
        end = tl.maximum(best, 0) % S
        at = end + 1 + (step - 1) % tl.maximum(last - end, 1)
        at = tl.minimum(tl.maximum(at, 0), S - 1)
        token = tl.load(text + at, (mine == leaf) & (best >= 0), other=-1)
        tl.store(out + row * N + node, tl.where(token < vocab, token, -1), mine == leaf)


def lookup(self: NGram, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
    text, N = seqs.tokens, len(tree)
    if N == 1 or text.stride(1) != 1 or not integers(seqs.length):
        return NotImplemented
    B, S = text.shape
    nodes, (leaves, branch) = tree.nodes(text.device), first_leaf(tree, text.device)
    longest = min(self.n, S)
    if leaves > S or (longest + 1) * S >= 1 << 31:
        return NotImplemented
    tokens = text.new_empty(B, N)
    lookup_kernel[B,](
        text, seqs.length, nodes.depth, branch, tokens, text.stride(0), S, self.vocab, longest, N=N,
        WIDE=power_of_2(N), LEAVES=leaves, AT_ONCE=AT_ONCE,
    )  # fmt: skip
    return Draft(tokens, nodes, seqs)


@triton.jit
def token_at(text, line, at, last, real):
    """The tokens at places `at` of a text; past its `last` token, the draft tokens in `line`."""
    ahead = at > last
    token = tl.load(text + at, real & (at <= last), other=0)
    return tl.where(ahead, tl.load(line + at - last, real & ahead, other=0), token).to(tl.int32)


@triton.jit
def vote_kernel(
    text, length, children, parents, depth, votes, voters, trust, out, text_b, S, vocab, longest,
    least, stretch, N: tl.constexpr, K: tl.constexpr, D: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Suffix.propose, written to out [B, N]: the places of the longest match vote for the token
    after them. voters [B, 3, S + D]: each voter's place, the last node that agrees with it, and its
    vote; behind the places, draft tokens. votes [B, vocab + 1]: the count for each token, 0 before
    and after a node. trust [B, N]: each node's estimated probability."""
    row, some = tl.program_id(0).to(tl.int64), tl.arange(0, AT_ONCE)
    text, votes = text + row * text_b, votes + row * (vocab + 1)
    trust, out = trust + row * N, out + row * N
    places = voters + row * 3 * (S + D)
    nodes, says = places + S + D, places + 2 * (S + D)
    line = places + S  # the draft tokens up to a node, by depth
    last = tl.load(length + row).to(tl.int32) - 1
    tl.store(out, tl.load(text + tl.maximum(last, 0)))
    tl.store(trust, 1.0)
    most = tl.full([], 1, tl.int32)
    for first in range(0, last, AT_ONCE):
        matched = match_length(text, first + some, last, longest)
        most = tl.maximum(most, tl.max(matched, 0))
        tl.store(says + first + some, matched, first + some < last)
    tl.debug_barrier()
    count = tl.full([], 0, tl.int32)
    for first in range(0, last, AT_ONCE):
        votes_here = tl.load(says + first + some, first + some < last, other=0) == most
        index = count + tl.cumsum(votes_here.to(tl.int32), 0) - 1
        tl.store(places + index, first + some, votes_here)
        tl.store(nodes + index, 0, votes_here)
        count += tl.sum(votes_here.to(tl.int32), 0)
    for parent in range(N):
        step = tl.load(depth + parent).to(tl.int32) + 1
        node = tl.full([], 0, tl.int32) + parent
        for above in range(1, step):
            tl.store(line + step - above, tl.load(out + node).to(tl.int32))
            node = tl.load(parents + node).to(tl.int32)
        tl.debug_barrier()
        total = tl.full([], 0, tl.int32)
        for first in range(0, count, AT_ONCE):
            at = first + some
            mine = tl.load(nodes + at, at < count, other=-1) == parent
            token = token_at(text, line, tl.load(places + at, mine, other=0) + step, last, mine)
            token = tl.minimum(token, vocab)
            tl.store(says + at, token, mine)
            tl.atomic_add(votes + token, 1, mine, sem="relaxed")
            total += tl.sum(mine.to(tl.int32), 0)
        tl.debug_barrier()
        for rank in range(K):
            child = tl.load(children + parent * K + rank).to(tl.int32)
            best = tl.full([], 0, tl.int64)
            for first in range(0, tl.where(child > 0, count, 0), AT_ONCE):
                at = first + some
                mine = tl.load(nodes + at, at < count, other=-1) == parent
                token = tl.load(says + at, mine, other=0)
                mine = mine & (token < vocab)
                many = tl.load(votes + token, mine, other=0, cache_modifier=".cg")
                place = tl.load(places + at, mine, other=-1)
                best = tl.maximum(best, tl.max((many.to(tl.int64) << 32) + place + 1, 0))
            voted = best > 0
            token = token_at(text, line, best.to(tl.int32) - 1 + step, last, voted)
            share = tl.div_rn((best >> 32).to(tl.float32), tl.maximum(total, 1).to(tl.float32))
            sure = tl.load(trust + parent) * share
            likely = voted & (sure >= least) & (step <= stretch * most)
            tl.store(trust + child, sure, child > 0)
            tl.store(out + child, tl.where(likely, token, -1).to(tl.int64), child > 0)
            for first in range(0, tl.where(voted, count, 0), AT_ONCE):
                at = first + some
                mine = tl.load(nodes + at, at < count, other=-1) == parent
                agrees = mine & (tl.load(says + at, mine, other=-1) == token)
                tl.store(nodes + at, tl.where(likely, child, N), agrees)
            tl.debug_barrier()
        for first in range(0, count, AT_ONCE):
            at = first + some
            token = tl.load(says + at, at < count, other=0)
            tl.store(votes + token, 0, at < count)
        tl.debug_barrier()


def vote(self: Suffix, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
    text, N = seqs.tokens, len(tree)
    if N == 1 or text.stride(1) != 1 or not integers(seqs.length) or self.least <= 0:
        return NotImplemented
    (B, S), nodes = text.shape, tree.nodes(text.device)
    tokens, trust = text.new_empty(B, N), torch.empty(B, N, dtype=torch.float32, device=text.device)
    votes = torch.zeros(B, self.vocab + 1, dtype=torch.int32, device=text.device)
    voters = votes.new_empty(B, 3, S + tree.depth + 1)
    vote_kernel[B,](
        text, seqs.length, nodes.children, nodes.parents, nodes.depth, votes, voters, trust, tokens,
        text.stride(0), S, self.vocab, min(self.longest, S), float(self.least), float(self.stretch),
        N=N, K=nodes.children.shape[-1], D=tree.depth + 1, AT_ONCE=AT_ONCE, num_warps=8,
    )  # fmt: skip
    return Draft(tokens, nodes, seqs)


@triton.jit
def block_max_kernel(logits, tops, size, BLOCK: tl.constexpr):
    """For lm.spoil: writes to tops [B, blocks] the largest logit of each block, or infinity if one
    is NaN. A program owns a block."""
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * size + at, at < size, other=-float("inf")).to(tl.float32)
    top = tl.max(tl.where(x != x, float("inf"), x), 0)
    tl.store(tops + row * tl.num_programs(0) + block, top)


def spoil(fault: Tensor, logits: Tensor) -> Any:
    if logits.dtype not in BITS or not logits.is_contiguous() or not logits.numel():
        return NotImplemented
    B, size = len(logits), logits[0].numel()
    tops = torch.empty(B, blocks_of(4 * AT_ONCE, size), dtype=torch.float32, device=logits.device)
    block_max_kernel[tops.T.shape](logits, tops, size, BLOCK=4 * AT_ONCE)
    fault.add_(tops.amax(1), alpha=0)
    return None


def integers(*tensors: Tensor) -> bool:
    """Whether these tensors are int64 and contiguous."""
    return all(x.dtype == torch.int64 and x.is_contiguous() for x in tensors)
