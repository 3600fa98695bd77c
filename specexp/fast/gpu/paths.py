"""The accepted path of a tree of draft tokens, found by one program for each row.

The reference is a dozen of torch's operations, each a launch. It runs where a tree has more nodes
than one program can hold.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specexp.fast.gpu.launches import dependent_launch, power_of_2, wait_for_previous
from specexp.sequences import Draft, Verdict

LARGEST = 128  # nodes of a tree that one program can hold


@triton.jit
def accepted_path(
    good, depth, ancestors, row, depth_b, ancestors_b, N: tl.constexpr, WIDE: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """The deepest path from the root whose nodes are all `good` [WIDE]: its depth, its last node,
    and the depths [WIDE] of the nodes on it, -1 for all others. WHOLE: good nodes are known to have
    good ancestors."""
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
    """The nodes at depths `level` of the path `route` (`accepted_path`); 0 where there is none."""
    at = route[None, :] == level[:, None]
    return tl.sum(tl.where(at, tl.arange(0, WIDE)[None, :], 0), 1)


@triton.jit
def follow_kernel(
    tokens, sample, parents, depth, ancestors, path, count, new, parents_b, depth_b, ancestors_b,
    D: tl.constexpr, N: tl.constexpr, WIDE: tl.constexpr, LEVELS: tl.constexpr, FIRST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """rules.follow: the path along draft tokens that equal the sample [B, N] at their parents. With
    FIRST, only the first of equal siblings may be on it. A program owns a row."""
    wait_for_previous(DEPENDENT)
    row, node, level = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE), tl.arange(0, LEVELS)
    real = node < N
    parent = tl.load(parents + row * parents_b + node, real, other=-1).to(tl.int32)
    wanted = tl.load(sample + row * N + parent, real & (node > 0), other=-2)
    good = tl.load(tokens + row * N + node, real, other=-1) == wanted
    if FIRST:
        before = good[None, :] & (parent[None, :] == parent[:, None])
        good = good & (tl.max(tl.where(before & (node[None, :] < node[:, None]), 1, 0), 1) == 0)
    n, _, route = accepted_path(good, depth, ancestors, row, depth_b, ancestors_b, N, WIDE, False)
    at = at_depth(route, tl.minimum(level, n), WIDE)
    tl.store(count + row, n.to(tl.int64))
    tl.store(path + row * D + level, at.to(tl.int64), level < D)
    tl.store(new + row * D + level, tl.load(sample + row * N + at, level < D, other=0), level < D)


def shared(x: Tensor) -> int:
    """The stride between the trees of rows, x [b, ...]; 0 if b is 1 and all rows share one."""
    return x.stride(0) if len(x) > 1 else 0


def walkable(draft: Draft) -> bool:
    """Whether one program can find a path in this draft's tree."""
    nodes, N = draft.nodes, draft.tokens.shape[1]
    parts = nodes.parents, nodes.depth, nodes.ancestors, nodes.children
    return N <= LARGEST and all(x.is_contiguous() for x in parts)


def tree_sizes(draft: Draft) -> dict[str, int]:
    N, D = draft.tokens.shape[1], draft.nodes.deepest + 1
    return {"N": N, "D": D, "WIDE": power_of_2(N), "LEVELS": power_of_2(D)}


def follow(draft: Draft, sample: Tensor, first: bool = False) -> Verdict:
    if not walkable(draft) or sample.dtype != torch.int64:
        return NotImplemented
    nodes, result = draft.nodes, Verdict.empty(draft)
    trees = nodes.parents, nodes.depth, nodes.ancestors
    follow_kernel[len(sample),](
        draft.tokens.contiguous(), sample.contiguous(), *trees, result.path, result.n, result.new,
        *map(shared, trees), FIRST=first, **tree_sizes(draft), **dependent_launch(sample),
    )  # fmt: skip
    return result
