"""Guess what most often followed the longest stretch of text that came up before.

(After SuffixDecoding: Oliaro et al. 2024, arXiv 2411.04975.) Of all earlier places that agree with
the end of the row for longest, what came next is put to the vote, token by token; the guess goes
on while its estimated probability, the product of its shares of the votes, stays above `least`, and
for at most `stretch` times the length that agreed. A suffix automaton would find the same places;
comparing the whole context at once keeps the search on the device. How many tokens agree is how
sure it is; beyond `SURE` of them more say no more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specexp import native
from specexp.drafters import Drafter, Plan, Ready
from specexp.sampling import Rng
from specexp.sequences import Draft, Sequences
from specexp.tree import Tree

SURE = 4


class Suffix(Drafter):
    name = "suffix"

    def __init__(
        self, vocab: int, longest: int = 16, least: float = 0.2, stretch: float = 3.0
    ) -> None:
        self.vocab, self.longest, self.least, self.stretch = vocab, longest, least, stretch
        self.grades = min(longest, SURE) + 1

    def propose(self, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
        """The k-th child of a node is the token with the k-th most votes; ties go to the latest."""
        nodes = tree.nodes(seqs.tokens.device)
        if len(tree) == 1:
            return seqs.draft(nodes)
        B, S = seqs.tokens.shape
        if code := native.by(seqs.length):
            made, grade = (torch.empty(B * n, dtype=torch.int64) for n in (len(tree), 1))
            read = nodes.parents, nodes.depth, seqs.length, seqs.tokens
            shape = B, len(tree), self.longest, SURE, self.vocab, seqs.tokens.stride(0)
            code.vote(*shape, float(self.least), float(self.stretch), *read, made, grade)
            return Draft(made.view(B, -1), nodes, seqs, grade=grade)
        place = torch.arange(S, device=seqs.tokens.device)
        agreed = self._agreed(seqs)
        most = agreed.amax(1, keepdim=True)
        # of each node: the text up to it, the places that agree with it, its probability
        text, agree = [seqs.tokens], [(agreed == most) & (most > 0)]
        trust = [torch.ones(B, 1, device=place.device)]
        guesses: list[Tensor] = []
        for parent in range(len(tree)):
            children = tree.parents.count(parent)
            if not children:
                continue
            depth = tree.depths[parent] + 1
            follows = text[parent].roll(-depth, 1)
            voters = agree[parent].long()
            known = follows.clamp(max=self.vocab)  # ids beyond the vocabulary share a bin
            votes = voters.new_zeros(B, self.vocab + 1).scatter_add(1, known, voters)
            latest = torch.zeros_like(votes).scatter_reduce(1, known, voters * (place + 1), "amax")
            best = (votes * (S + 1) + latest)[:, :-1].topk(children).indices
            share = votes.gather(1, best) / voters.sum(1, keepdim=True).clamp(min=1)
            for rank in range(children):
                token = best[:, rank : rank + 1]
                sure = trust[parent] * share[:, rank : rank + 1]
                made = (sure >= self.least) & (depth <= self.stretch * most)
                after = (seqs.length[:, None] - 1 + depth).clamp(max=S - 1)
                text.append(text[parent].scatter(1, after, token))
                agree.append(agree[parent] & (follows == token) & made)
                trust.append(sure)
                guesses.append(torch.where(made, token, -1))
        return seqs.draft(nodes, torch.cat(guesses, 1), grade=most[:, 0].clamp(max=SURE))

    def _agreed(self, seqs: Sequences) -> Tensor:
        """[B, S]: how many tokens that end here agree with the end of the row, up to `longest`."""
        place = torch.arange(seqs.tokens.shape[1], device=seqs.tokens.device)
        last = seqs.length[:, None] - 1
        same = place < last
        agreed = torch.zeros_like(seqs.tokens)
        for back in range(self.longest):
            token = seqs.tokens.gather(1, (last - back).clamp(min=0))
            same = same & (place >= back) & (seqs.tokens.roll(back, 1) == token) & (last >= back)
            agreed += same
        return agreed


def prepare(plan: Plan) -> Ready:
    """`suffix:16`: compare up to sixteen tokens."""
    longest = plan.whole(default=16)
    return Ready(lambda target: Suffix(target.vocab, longest))
