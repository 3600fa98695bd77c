"""Growing a draft level by level.

A `step` is called once per level and returns logits for every node of that level. Draft models,
early exit, Medusa heads and EAGLE differ only in their `step`. The tree is either fixed, or chosen
for each row by the drafter's confidence.
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
    """The nodes of one depth, which the drafter feeds in one pass.

    Every node that will be fed has a place in the drafter's cache, counted from the root, which has
    place 0. `at`: the places of these nodes. tokens [B, n]: -1 in rows that draft no deeper. parent
    [b, n]: the index of each node's parent in the previous level. ancestors [b, n, M] bool: for
    each of the M places, whether the node there is an ancestor of this one, or this one.
    """

    depth: int
    at: slice
    tokens: Tensor
    parent: Tensor
    ancestors: Tensor

    def placed(self, text: Sequences, back: int = 0) -> tuple[Tensor, Tensor, Branches | None]:
        """Slots [B, n], positions [B, n] and visibility of these nodes, as `LM.feed` takes them.
        `back`: how many slots before the target's the drafter's cache keeps the root."""
        slots = text.slots(self.at.start - back, self.at.stop - back)
        if self.at == slice(self.depth, self.depth + 1):  # a chain so far
            return slots, slots, None
        root = text.length[:, None] - 1 - back
        positions = (root + self.depth).expand_as(slots)
        return slots, positions, Branches(root, self.ancestors)


Step = Callable[[Level], Tensor]  # returns logits [B, n, V] of the token after each node


def at_once(run: Callable[[], Tensor]) -> Step:
    """The step of a drafter whose one pass, `run`, returns the logits [B, depth, V] of all levels,
    whatever is drafted above them."""
    ahead: list[Tensor] = []

    def step(level: Level) -> Tensor:
        if not ahead:
            ahead.append(run())
        return ahead[0][:, level.depth, None].expand(-1, level.tokens.shape[1], -1)

    return step


def grow(seqs: Sequences, tree: Tree, step: Step, sampling: Sampling, rng: Rng) -> Draft:
    """Draft a tree level by level.

    The children of a node are drawn from `sampling`'s distribution of its logits; at temperature 0
    they are the most likely tokens. In a tree with a `width`, tokens are chosen by confidence and
    never drawn, so q is None. The draft's memo [b, N] holds the place (see `Level`) of each node
    that was fed; the entries of other nodes are meaningless."""
    if tree.width and tree.depth:
        return _by_confidence(seqs, tree, step)
    device = seqs.device
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
        width = max(tree.degrees[here])
        if sampling.temperature == 0:
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
        leaves = len(tree) - tree.levels[-1].start  # the deepest nodes, which have no children
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
    width = K if D > 1 else N - 1  # children taken of each node that is fed
    B, device = len(seqs.tokens), seqs.device
    M = 1 + (D - 1) * K  # nodes that are fed
    ancestors = (torch.arange(M, device=device) == 0).expand(B, 1, M)
    zero = torch.zeros(B, 1, dtype=torch.int64, device=device)
    level = Level(0, slice(0, 1), seqs.drafting(seqs.root, 0), zero, ancestors)
    fed_confidence = zero.float()  # logarithms, of the nodes of `level`
    fed_number = zero  # candidates are numbered as they come; the root is 0
    candidates: list[tuple[Tensor, ...]] = []  # tokens, confidence, parent's number, place; [B, n]
    count = 1
    for depth in range(1, D + 1):
        logits = step(level)
        best = ranked(logits, width)
        chances = logits.float().log_softmax(-1).clamp(max=0).gather(-1, best)
        tokens, confidence = best.flatten(1), (fed_confidence[..., None] + chances).flatten(1)
        parent = fed_number.repeat_interleave(width, 1)
        place = torch.zeros_like(tokens)
        if depth < D:
            start = 1 + (depth - 1) * K
            chosen = confidence.sort(dim=1, descending=True, stable=True).indices[:, :K]
            places = torch.arange(start, start + K, device=device).expand(B, K)
            place = place.scatter(1, chosen, places)
            parent_in_level = chosen // K
            of_parent = torch.take_along_dim(level.ancestors, parent_in_level[..., None], 1)
            ancestors = of_parent | (torch.arange(M, device=device) == places[..., None])
            fed = seqs.drafting(tokens.gather(1, chosen), depth)
            level = Level(depth, slice(start, start + K), fed, parent_in_level, ancestors)
            fed_confidence, fed_number = confidence.gather(1, chosen), count + chosen
        candidates.append((tokens, confidence, parent, place))
        count += tokens.shape[1]
    parts = (torch.cat(part, 1) for part in zip(*candidates, strict=True))
    tokens, confidence, parent, place = parts
    likeliest = confidence.sort(dim=1, descending=True, stable=True).indices[:, : N - 1]
    selected = likeliest.sort(1).values  # in order of creation, which is breadth-first
    node = torch.zeros(B, count, dtype=torch.int64, device=device)  # of a candidate, by its number
    node = node.scatter(1, selected + 1, torch.arange(1, N, device=device).expand(B, -1))
    parents = torch.cat([zero, node.gather(1, parent.gather(1, selected))], 1)
    memo = torch.cat([zero, place.gather(1, selected)], 1)
    return seqs.draft(Nodes.of(parents, D, width), tokens.gather(1, selected), memo=memo)
