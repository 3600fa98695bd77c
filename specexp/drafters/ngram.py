"""Guess that the text goes on as it did the last time these words came up (prompt lookup).

The longest suffix of up to `n` tokens that occurred earlier in the row is looked up over the whole
context, the most recent occurrence first, and what followed it is proposed. No weights, no state;
the search is vectorised over the batch and needs no host round trip. (Saxena 2023, prompt lookup
decoding; Yang et al. 2023, LLMA, for the idea.) The more tokens agree, the likelier guesses are
right: how many do is their grade.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from specexp import native
from specexp.drafters import Drafter, Plan, Ready
from specexp.errors import UserError
from specexp.sampling import Rng
from specexp.sequences import Draft, Sequences
from specexp.tree import Tree


class NGram(Drafter):
    name = "ngram"

    def __init__(self, n: int = 3, vocab: int = 1 << 62) -> None:
        """vocab: ids beyond it are not guessed, though a prompt may hold them."""
        if n < 1:
            raise UserError(f"ngram n is {n}; look up at least 1 token")
        self.n, self.grades, self.vocab = n, n + 1, vocab

    def propose(self, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
        """Each leaf of the tree, in order, follows the next best occurrence; -1 where none is."""
        nodes = tree.nodes(seqs.tokens.device)
        if len(tree) == 1:
            return seqs.draft(nodes)
        leaves, branch = _first_leaf(tree, seqs.tokens.device)
        if code := native.by(seqs.length):
            (B, _), (stride, _) = seqs.tokens.shape, seqs.tokens.stride()
            made = torch.empty(B, len(tree), dtype=torch.int64)
            read = branch, nodes.depth, seqs.length, seqs.tokens
            grade = torch.empty(B, dtype=torch.int64)
            code.lookup(B, len(tree), self.n, leaves, self.vocab, stride, *read, made, grade)
            return Draft(made, nodes, seqs, grade=grade)
        ends, agrees = self._occurrences(seqs, leaves)  # [B, leaves]
        step = nodes.depth[:, 1:]
        end, found = ends[:, branch], agrees[:, branch] > 0
        last = seqs.length[:, None] - 1
        period = (last - end).clamp(min=1)  # past the end of the text the copy copies itself
        at = end + 1 + (step - 1) % period
        at = at.clamp(0, seqs.tokens.shape[1] - 1)  # where none was found, `end` is anywhere
        guess = seqs.tokens.gather(1, at)
        guesses = torch.where(found & (guess < self.vocab), guess, -1)
        return seqs.draft(nodes, guesses, grade=agrees[:, 0])

    def _occurrences(self, seqs: Sequences, count: int) -> tuple[Tensor, Tensor]:
        """The `count` best earlier ends of the row's suffix [B, count]: longest, then latest; and
        how many tokens agree there."""
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


@cache  # for good: graphs read them where they lie
def _first_leaf(tree: Tree, device: torch.device) -> tuple[int, Tensor]:
    """How many leaves there are, and of every guess the rank of the first leaf it leads to."""
    leaves = [i for i in range(len(tree)) if i not in tree.parents]
    first: list[int] = [len(leaves)] * len(tree)
    for rank, leaf in enumerate(leaves):
        node = leaf
        while node >= 0:
            first[node] = min(first[node], rank)
            node = tree.parents[node]
    return len(leaves), torch.tensor(first[1:], device=device)


def prepare(plan: Plan) -> Ready:
    """`ngram:3`: suffixes of up to three tokens."""
    n = plan.whole(default=3)
    return Ready(lambda target: NGram(n, target.vocab))
