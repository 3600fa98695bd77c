"""Draft what followed the latest earlier occurrence of the last few tokens (prompt lookup).

(Saxena 2023, prompt lookup decoding; Yang et al. 2023, LLMA.) Searches the whole row for the
longest match with its last tokens, up to `n` of them, and proposes what followed the most recent
one. It has no weights and no state; the search is vectorised over the batch and needs no host
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
        """vocab: ids from there on may occur in a prompt but are never drafted."""
        self.n, self.vocab = n, vocab

    @op
    def propose(self, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
        """The k-th leaf of the tree continues the k-th best occurrence; -1 where there is none."""
        nodes = tree.nodes(seqs.tokens.device)
        if len(tree) == 1:
            return seqs.draft(nodes)
        leaves, branch = first_leaf(tree, seqs.tokens.device)
        ends, agrees = self._occurrences(seqs, leaves)  # [B, leaves]
        step = nodes.depth[:, 1:]
        end, matched = ends[:, branch], agrees[:, branch] > 0
        last = seqs.length[:, None] - 1
        period = (last - end).clamp(min=1)  # past the end of the row, the copy repeats itself
        at = end + 1 + (step - 1) % period
        at = at.clamp(0, seqs.tokens.shape[1] - 1)  # where nothing was found, `end` is arbitrary
        token = seqs.tokens.gather(1, at)
        drafted = torch.where(matched & (token < self.vocab), token, -1)
        return seqs.draft(nodes, drafted)

    def _occurrences(self, seqs: Sequences, count: int) -> tuple[Tensor, Tensor]:
        """Where the `count` best earlier matches end, longest first, then latest, and how many
        tokens match there: [B, count] each."""
        S = seqs.tokens.shape[1]
        end = torch.arange(S, device=seqs.tokens.device)
        last = seqs.length[:, None] - 1
        same = torch.ones_like(seqs.tokens, dtype=torch.bool)
        matched = torch.zeros_like(seqs.tokens)
        for back in range(self.n):
            suffix = seqs.tokens.gather(1, (last - back).clamp(min=0))
            same = same & (end >= back) & (seqs.tokens.roll(back, 1) == suffix) & (last >= back)
            matched += same
        score = torch.where((end < last) & (matched > 0), matched * S + end, -1)
        best = score.topk(min(count, S), dim=1)
        return best.indices, best.values.clamp(min=0) // S


@cache  # never freed: recorded graphs read these tensors
def first_leaf(tree: Tree, device: torch.device) -> tuple[int, Tensor]:
    """The number of leaves and, for every draft token, the index of the first leaf below it."""
    leaves = [i for i in range(len(tree)) if i not in tree.parents]
    first: list[int] = [len(leaves)] * len(tree)
    for rank, leaf in enumerate(leaves):
        node = leaf
        while node >= 0:
            first[node] = min(first[node], rank)
            node = tree.parents[node]
    return len(leaves), torch.tensor(first[1:], device=device)


def prepare(request: Request) -> Prepared:
    """`ngram:3`: match up to three tokens."""
    n = request.whole(default=3)
    return Prepared(lambda target: NGram(n, target.vocab))
