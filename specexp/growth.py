"""Growing a draft level by level.

A `step` is called once per level and returns logits for every node of it. That is all in which a
draft model, an early exit, Medusa heads and EAGLE differ. The tree is either given or chosen row by
row by the drafter's confidence. This file does not know what computes the logits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from specexp.sampling import Rng, Sampling, ranked
from specexp.sequences import Draft, Sequences, columns
from specexp.tree import Branches, Nodes, Tree


@dataclass(frozen=True)
class Level:
    """Nodes of one depth, to be fed together.

    Every node that will be fed has one of M places in the drafter's cache; the root has place 0.
    `at`: the places of these nodes. tokens [B, n], -1 in rows that draft no deeper; parent [b, n],
    the rank of each node's parent in the previous level; ancestors [b, n, M] bool over places,
    themselves included.
    """

    depth: int
    at: slice
    tokens: Tensor
    parent: Tensor
    ancestors: Tensor

    def placed(self, text: Sequences, back: int = 0) -> tuple[Tensor, Tensor, Branches | None]:
        """The nodes' slots and positions [B, n], and what they see (see `LM.feed`), in a cache in
        which the root's slot is `back` less than in the target's."""
        device = text.tokens.device
        first, beyond = self.at.start - back, self.at.stop - back
        slots = text.places(torch.arange(first, beyond, device=device)[None])
        if self.at == slice(self.depth, self.depth + 1):  # a chain so far
            return slots, slots, None
        root = text.length[:, None] - 1 - back
        positions = (root + self.depth).expand_as(slots)
        return slots, positions, Branches(root, self.ancestors)


Step = Callable[[Level], Tensor]  # returns logits [B, n, V] of the token after each node


def grow(seqs: Sequences, tree: Tree, step: Step, sampling: Sampling, rng: Rng | None) -> Draft:
    """Draw each node's children from `sampling`'s distribution of the logits or, at temperature 0
    or without `rng`, take the most likely tokens. A tree with a `width` is grown by confidence and
    never drawn. The draft's memo [b, N]: the place in the drafter's cache of each node that was
    fed; else any."""
    if tree.width and tree.depth:
        return _by_confidence(seqs, tree, step)
    device = seqs.tokens.device
    nodes = tree.nodes(device)
    if not tree.depth:
        return seqs.draft(nodes, memo=nodes.depth)
    place = torch.arange(len(tree), device=device)[None]
    tokens, rank = seqs.root, place[:, :1]
    drafted = [tokens]
    laws: list[Tensor] = []
    for depth, (here, below) in enumerate(pairwise(tree.levels)):
        fed = seqs.drafting(tokens, depth)
        logits = step(Level(depth, here, fed, rank, nodes.ancestors[:, here]))
        width = max(tree.parents.count(i) for i in range(here.start, here.stop))
        if rng is None or sampling.temperature == 0:
            picked = ranked(logits, width)
        else:
            laws.append(sampling.law(logits))
            picked = rng.draw(laws[-1], width, seqs.keys(nodes.depth[:, here]))
        if tree.is_chain:
            tokens = picked[..., 0]
        else:
            parent = nodes.parents[:, below]
            sibling = place[:, below] - nodes.children[0, parent[0], 0]
            rank = parent - here.start
            tokens = picked[:, rank[0], sibling[0]]
        drafted.append(tokens)
    q = None
    if laws:
        B, _, V = laws[0].shape
        leaves = len(tree) - tree.levels[-1].start
        none = torch.zeros(B, leaves, V, dtype=laws[0].dtype, device=device)
        q = torch.cat([*laws, none], 1)
    return Draft(columns(*drafted), nodes, seqs, q, memo=place)


def _by_confidence(seqs: Sequences, tree: Tree, step: Step) -> Draft:
    """EAGLE-2 (Li et al. 2024, section 4): each level feeds its `width` most likely nodes and takes
    `width` children of each; the N - 1 most likely nodes overall become the draft.

    A node's confidence is the product of the drafter's probabilities along its path, so a parent is
    never less likely than its children, and the chosen nodes form a tree.
    """
    N, D, K = len(tree), tree.depth, tree.width
    wide = K if D > 1 else N - 1
    B, device = len(seqs.tokens), seqs.tokens.device
    M = 1 + (D - 1) * K
    ancestors = (torch.arange(M, device=device) == 0).expand(B, 1, M)
    zero = torch.zeros(B, 1, dtype=torch.int64, device=device)
    level = Level(0, slice(0, 1), seqs.drafting(seqs.root, 0), zero, ancestors)
    trust = torch.zeros(B, 1, device=device)
    name = zero  # the number of a candidate: 0 is the root, then 1, 2, ... in order of creation
    candidates: list[tuple[Tensor, ...]] = []  # tokens, confidence, parent's name, place; [B, n]
    count = 1
    for depth in range(1, D + 1):
        best = step(level).float().log_softmax(-1).clamp(max=0).topk(wide)
        tokens = best.indices.flatten(1)
        confidence = (trust[..., None] + best.values).flatten(1)
        parent = name.repeat_interleave(best.indices.shape[-1], 1)
        n = tokens.shape[1]
        place = torch.zeros_like(tokens)
        if depth < D:
            start = 1 + (depth - 1) * K
            chosen = confidence.sort(dim=1, descending=True, stable=True).indices[:, :K]
            places = torch.arange(start, start + K, device=device).expand(B, K)
            place = place.scatter(1, chosen, places)
            own = torch.arange(M, device=device) == places[..., None]
            up = chosen // K
            ancestors = level.ancestors.gather(1, up[..., None].expand(B, K, M)) | own
            at = slice(start, start + K)
            fed = seqs.drafting(tokens.gather(1, chosen), depth)
            level = Level(depth, at, fed, up, ancestors)
            trust, name = confidence.gather(1, chosen), count + chosen
        candidates.append((tokens, confidence, parent, place))
        count += n
    parts = (torch.cat(part, 1) for part in zip(*candidates, strict=True))
    tokens, confidence, parent, place = parts
    likeliest = confidence.sort(dim=1, descending=True, stable=True).indices[:, : N - 1]
    selected = likeliest.sort(1).values
    number = torch.zeros(B, count, dtype=torch.int64, device=device)
    number = number.scatter(1, selected + 1, torch.arange(1, N, device=device).expand(B, -1))
    parents = torch.cat([zero, number.gather(1, parent.gather(1, selected))], 1)
    memo = torch.cat([zero, place.gather(1, selected)], 1)
    return seqs.draft(Nodes.of(parents, D, wide), tokens.gather(1, selected), memo=memo)
