"""The shape of a draft: which draft token follows which.

A draft is a tree of tokens in breadth-first order. Node 0, the root, is the last committed token.
A chain is a tree in which no node has more than one child. `Tree` is the shape on the host; it is
hashable, so it can be part of a recorded graph's key. `Nodes` is the same shape as tensors: one for
all rows, or one per row for drafters that choose the shape as they draft. This file knows nothing
about tokens, models or caches, and checks shapes without importing torch.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING

from specexp.errors import UserError, check_type, counted

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MOST = 1024  # draft tokens per round


@dataclass(frozen=True)
class Tree:
    """A draft's shape, on the host: which draft token follows which.

    `Tree.chain(5)`, `Tree.branching(3, 2, 1)` and `Tree.grown(16, 5)` make one. Trees of draft
    tokens: SpecInfer (Miao et al. 2023); grown by confidence: EAGLE-2 (Li et al. 2024).

    Attributes:
        parents: The parent of each of N nodes, in breadth-first order; node 0 is the root, the last
            committed token, with parent -1.
        width: If not 0, only the number of nodes and the depth are fixed. A drafter that has
            confidences then places the nodes where they are most likely to be accepted, and feeds
            `width` of them per level. Other drafters use the shape of `parents`.

    Raises:
        UserError: The parents are not a tree in breadth-first order.
    """

    parents: tuple[int, ...]
    width: int = 0

    def __post_init__(self) -> None:
        p = self.parents
        whole = isinstance(p, tuple) and all(type(node) is int for node in (*p, self.width))
        if not whole or self.width < 0:
            raise UserError(
                f"parents is {p!r:.40} and width {self.width!r:.40}; they must be a tuple of whole "
                "numbers and a whole number of 0 or more"
            )
        ordered = all(a <= b for a, b in itertools.pairwise(p))
        if not p or p[0] != -1 or not ordered or any(not -1 < p[i] < i for i in range(1, len(p))):
            raise UserError(
                f"parents {p} are not a tree in breadth-first order: start with -1, then give each "
                "node's parent, never decreasing and always earlier than the node"
            )

    @classmethod
    @cache
    def chain(cls, gamma: int) -> Tree:
        """A chain of gamma draft tokens; gamma = 0 is plain decoding."""
        check_type("gamma", gamma, "int")
        if gamma < 0:
            raise UserError(f"gamma is {gamma}; use 1 or more")
        _check_size("chain", gamma)
        return cls(tuple(range(-1, gamma)))

    @classmethod
    def branching(cls, *widths: int) -> Tree:
        """`widths[d]` children for each node of depth d: `branching(3, 2)` has 1 + 3 + 6 nodes."""
        for width in widths:
            check_type("the children of a node", width, "int")
            if width < 1:
                raise UserError(f"a node with {width} children: use 1 or more at each depth")
        size = sum(itertools.accumulate(widths, operator.mul))
        _check_size("x".join(map(str, widths)), size)
        parents, level = [-1], [0]
        for width in widths:
            of_level = [node for node in level for _ in range(width)]
            level = list(range(len(parents), len(parents) + len(of_level)))
            parents += of_level
        return cls(tuple(parents))

    @classmethod
    def grown(cls, size: int, depth: int) -> Tree:
        """`size` draft tokens, at most `depth` deep, placed by the drafter's confidence (Li et al.
        2024, EAGLE-2). Drafters without confidences use `parents`: chains side by side.
        """
        check_type("the size of a tree", size, "int")
        check_type("gamma", depth, "int")
        _check_size(f"grown:{size}", size)
        if not 0 < depth <= size:
            raise UserError(
                f"a tree of {size} draft tokens cannot be {depth} deep: use gamma 1 to {size}"
            )
        sizes = [size // depth + (d < size % depth) for d in range(depth)]
        starts = [1 + sum(sizes[:d]) for d in range(depth)]
        parents = [-1] + [0] * sizes[0]
        for above, count in zip(starts, sizes[1:], strict=False):
            parents += range(above, above + count)
        return cls(tuple(parents), width=math.isqrt(size - 1) + 1)

    @classmethod
    def parse(cls, shape: str | Tree, gamma: int) -> Tree:
        """`chain` (gamma tokens), `3x2x1` (children per node at each depth) or `grown:16` (16
        tokens, at most gamma deep); a tree is itself. Raises UserError for anything else."""
        if isinstance(shape, Tree):
            return shape
        check_type("tree", shape, "str")
        if shape == "chain":
            return cls.chain(gamma)
        if grown := re.fullmatch(r"grown:([1-9]\d{0,9})", shape):
            return cls.grown(int(grown[1]), gamma)
        if re.fullmatch(r"[1-9]\d{0,9}(x[1-9]\d{0,9})*", shape):
            return cls.branching(*map(int, shape.split("x")))
        raise UserError(
            f"tree {shape!r:.40} is unknown; use chain, the children at each depth such as 3x2x1, "
            "or grown:16 for 16 draft tokens placed by the drafter's confidence"
        )

    def cut(self, depth: int) -> Tree:
        """The same tree without the nodes deeper than `depth`; the root always stays."""
        if depth >= self.depth:
            return self
        count = sum(d <= depth for d in self.depths[1:])
        return Tree(self.parents[: 1 + count], self.width if count else 0)

    @property
    def room(self) -> int:
        """The most slots past the committed tokens that one round writes, in any model's cache."""
        return max(len(self), 1 + self.width * self.depth)

    def __len__(self) -> int:
        return len(self.parents)

    def __str__(self) -> str:
        return f"{counted(len(self) - 1, 'draft token')}, {self.depth} deep"

    @cached_property
    def depths(self) -> tuple[int, ...]:
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """The number of children of each node."""
        return tuple(self.parents.count(node) for node in range(len(self)))

    @property
    def depth(self) -> int:
        """D, the largest number of draft tokens that can be accepted."""
        return self.depths[-1]

    @cached_property
    def levels(self) -> tuple[slice, ...]:
        """The nodes of each depth 0..D; breadth-first order makes them contiguous."""
        starts = [self.depths.index(d) for d in range(self.depth + 1)] + [len(self)]
        return tuple(slice(a, b) for a, b in itertools.pairwise(starts))

    @property
    def is_chain(self) -> bool:
        return self.depth == len(self) - 1 and not self.width

    def nodes(self, device: torch.device | str) -> Nodes:
        import torch

        return _nodes(self, torch.device(device))


def _check_size(shape: str, size: int) -> None:
    if size > MOST:
        raise UserError(f"tree {shape} has {size} draft tokens; draft at most {MOST} a round")


@dataclass(frozen=True)
class Nodes:
    """A tree as tensors; the first dimension b is 1 (shared) or B (one tree per row).

    parents [b, N] int64, with 0 for the root; depth [b, N] int64; children [b, N, K] int64, -1
    where there is none; ancestors [b, N, N] bool, `ancestors[:, i, j]`: j is on the path from the
    root to i, both included. `deepest`: D, a static bound on depth.
    """

    parents: Tensor
    depth: Tensor
    children: Tensor
    ancestors: Tensor
    deepest: int

    @classmethod
    def of(cls, parents: Tensor, deepest: int, width: int) -> Nodes:
        """Build from parents [b, N] (root: 0) with static bounds on depth and children per node."""
        import torch

        b, N = parents.shape
        arange = torch.arange(N, device=parents.device)
        ancestors = torch.eye(N, dtype=torch.bool, device=parents.device).repeat(b, 1, 1)
        above = parents  # the node 1, 2, 4 ... steps above each
        for _ in range(deepest.bit_length()):
            ancestors = ancestors | torch.take_along_dim(ancestors, above[:, :, None], 1)
            above = above.gather(1, above)
        depth = ancestors.sum(-1) - 1
        is_child = (parents[:, None, :] == arange[:, None]) & (arange > 0)  # [b, parent, child]
        rank = (is_child.cumsum(-1) * is_child).sum(1) - 1  # of a node among its siblings
        at = (parents * width + rank)[:, 1:]  # the root is no child
        children = parents.new_full((b, N * width), -1).scatter(1, at, arange[1:].expand(b, -1))
        return cls(parents, depth, children.view(b, N, width), ancestors, deepest)

    @property
    def is_chain(self) -> bool:
        return self.children.shape[-1] <= 1

    def accepted(self, ok: Tensor) -> tuple[Tensor, Tensor]:
        """Follow accepted nodes from the root as deep as possible.

        ok [B, N] bool: whether the node is accepted, given that its parent is (ignored for the
        root). Returns path [B, D+1] int64, the nodes from the root down, padded with the last one;
        and n [B], the number of accepted tokens (the root does not count).
        """
        import torch

        if self.is_chain:
            n = ok[:, 1:].cumprod(1).sum(1)
            return self.depth.clamp(max=n[:, None]), n
        node = torch.arange(ok.shape[1], device=ok.device)
        reached = ((ok | (node == 0))[:, None, :] | ~self.ancestors).all(-1)
        n, last = torch.where(reached, self.depth, -1).max(-1)
        on_path = torch.take_along_dim(self.ancestors, last[:, None, None], 1)[:, 0]
        level = torch.arange(self.deepest + 1, device=ok.device).clamp(max=n[:, None])
        at_level = on_path[:, :, None] & (self.depth[:, :, None] == level[:, None])  # [B, N, D+1]
        return (at_level * node[:, None]).sum(1), n


def line_mask(slots: Tensor, S: int) -> Tensor:
    """The causal mask [B, N, S] of tokens in slots [B, N]: each sees its own slot and all before
    it."""
    import torch

    return torch.arange(S, device=slots.device) <= slots[:, :, None]


@dataclass(frozen=True)
class Branches:
    """The attention of the tokens [B, n] of a tree: each sees all slots before the root's, its
    ancestors and itself.

    root [B, 1]: the root's slot; ancestors [b, n, M] bool over the M slots from the root's on.
    """

    root: Tensor
    ancestors: Tensor

    def mask(self, S: int) -> Tensor:
        """Which of the first S slots each token sees, bool [B, n, S]."""
        import torch

        ancestors = self.ancestors.expand(len(self.root), -1, -1)
        _, n, M = ancestors.shape
        place = torch.arange(S, device=ancestors.device) - self.root  # [B, S]
        index = place.clamp(0, M - 1)[:, None].expand(-1, n, -1)
        inside = ((place >= 0) & (place < M))[:, None]
        return (place < 0)[:, None] | (inside & ancestors.gather(2, index))


@cache  # never evicted: captured graphs read these tensors at their addresses
def _nodes(tree: Tree, device: torch.device) -> Nodes:
    import torch

    parents = torch.tensor([tree.parents], device=device).clamp(min=0)
    return Nodes.of(parents, tree.depth, max(tree.degrees))
