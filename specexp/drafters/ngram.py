"""Draft what followed the latest earlier occurrence of the last few tokens (prompt lookup).

(Saxena 2023, prompt lookup decoding; Yang et al. 2023, LLMA.) Searches the whole row for the
longest match with its last tokens, up to `n` of them, and proposes what followed the most recent
match. It has no weights and no state; the search is vectorised over the batch and needs no host
round trip.
"""

from functools import cache

import torch
from torch import Tensor

from specexp.drafters import Drafter, Prepared, Request
from specexp.ops import op
from specexp.sampling import Rng
from specexp.sequences import Draft, Sequences
from specexp.tree import Tree


class NGram(Drafter):
    name = "ngram"

    def __init__(self, n: int = 3, vocab: int = 1 << 62) -> None:
        """n: the longest match, in tokens. vocab: larger ids may occur in a prompt, but are never
        drafted."""
        self.n, self.vocab = n, vocab

    @op
    def propose(self, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
        """The k-th leaf of the tree continues the k-th best occurrence; -1 where there is none."""
        nodes = tree.nodes(seqs.device)
        if len(tree) == 1:
            return seqs.draft(nodes)
        leaves, branch = first_leaf(tree, seqs.device)
        S = seqs.tokens.shape[1]
        place = torch.arange(S, device=seqs.device)
        matched = matched_until(seqs, self.n)
        score = torch.where(matched > 0, matched * S + place, -1)
        best = score.topk(min(leaves, S), dim=1)  # the longest match, then the latest
        end, matches = best.indices[:, branch], best.values[:, branch] >= 0
        step = nodes.depth[:, 1:]
        last = seqs.length[:, None] - 1
        period = (last - end).clamp(min=1)  # past the end of the row, the copy repeats itself
        at = end + 1 + (step - 1) % period
        at = at.clamp(0, S - 1)  # where nothing matches, `end` is arbitrary
        token = seqs.tokens.gather(1, at)
        return seqs.draft(nodes, torch.where(matches & (token < self.vocab), token, -1))


def matched_until(seqs: Sequences, longest: int) -> Tensor:
    """[B, S]: for each place before the root, how many of the tokens that end there equal the last
    tokens of the row, root included; at most `longest`."""
    place = torch.arange(seqs.tokens.shape[1], device=seqs.device)
    last = seqs.length[:, None] - 1
    same = place < last
    matched = torch.zeros_like(seqs.tokens)
    for back in range(min(longest, seqs.tokens.shape[1])):
        token = seqs.tokens.gather(1, (last - back).clamp(min=0))
        same = same & (place >= back) & (seqs.tokens.roll(back, 1) == token) & (last >= back)
        matched += same
    return matched


@cache  # never freed: recorded graphs read these tensors
def first_leaf(tree: Tree, device: torch.device) -> tuple[int, Tensor]:
    """The number of leaves and, for every draft token, the index of the first leaf below it."""
    leaves = [node for node, children in enumerate(tree.degrees) if not children]
    first: list[int] = [len(leaves)] * len(tree)
    for rank, leaf in enumerate(leaves):
        node = leaf
        while node >= 0:
            first[node] = min(first[node], rank)
            node = tree.parents[node]
    return len(leaves), torch.tensor(first[1:], device=device)


def prepare(request: Request) -> Prepared:
    """`ngram:3`: match up to three tokens."""
    n = request.integer()
    return Prepared(lambda target: NGram(n, target.vocab))
