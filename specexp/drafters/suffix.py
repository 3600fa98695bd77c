"""Draft the most frequent continuation of the longest earlier match with the end of the text.

(After SuffixDecoding: Oliaro et al. 2024, arXiv 2411.04975.) All earlier places with the longest
match vote for each next token. A draft continues while its estimated probability, the product of
the winners' vote shares, is at least `least`, and for at most `stretch` times the length of the
match. A suffix automaton would find the same places; comparing the whole row in one vectorised step
keeps the search on the device.
"""

import torch
from torch import Tensor

from specexp.drafters import Drafter, Prepared, Request
from specexp.drafters.ngram import matched_until
from specexp.ops import op
from specexp.sampling import Rng
from specexp.sequences import Draft, Sequences
from specexp.tree import Tree


class Suffix(Drafter):
    name = "suffix"

    def __init__(
        self, vocab: int, longest: int = 16, least: float = 0.2, stretch: float = 3.0
    ) -> None:
        self.vocab, self.longest, self.least, self.stretch = vocab, longest, least, stretch

    @op
    def propose(self, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
        """The k-th child of a node is the token with the k-th most votes; ties go to the latest."""
        nodes = tree.nodes(seqs.device)
        if len(tree) == 1:
            return seqs.draft(nodes)
        B, S = seqs.tokens.shape
        place = torch.arange(S, device=seqs.device)
        matched = matched_until(seqs, self.longest)
        most = matched.amax(1, keepdim=True)
        # of each node: the row with its path, the places that match it, its estimated probability
        text, agree = [seqs.tokens], [(matched == most) & (most > 0)]
        confidence = [torch.ones(B, 1, dtype=torch.float32, device=place.device)]
        drafted: list[Tensor] = []
        for parent, children in enumerate(tree.degrees):
            if not children:
                continue
            depth = tree.depths[parent] + 1
            follows = text[parent].roll(-depth, 1)
            voters = agree[parent].long()
            # ids outside the vocabulary share a bin; slots past the text hold anything, and no vote
            bins = follows.clamp(0, self.vocab)
            votes = voters.new_zeros(B, self.vocab + 1).scatter_add(1, bins, voters)
            latest = torch.zeros_like(votes).scatter_reduce(1, bins, voters * (place + 1), "amax")
            best = (votes * (S + 1) + latest)[:, :-1].topk(children).indices
            share = votes.gather(1, best).float() / voters.sum(1, keepdim=True).clamp(min=1)
            for rank in range(children):
                token = best[:, rank : rank + 1]
                probability = confidence[parent] * share[:, rank : rank + 1]
                likely = (probability >= self.least) & (depth <= self.stretch * most)
                after = (seqs.length[:, None] - 1 + depth).clamp(max=S - 1)
                text.append(text[parent].scatter(1, after, token))
                agree.append(agree[parent] & (follows == token) & likely)
                confidence.append(probability)
                drafted.append(torch.where(likely, token, -1))
        return seqs.draft(nodes, torch.cat(drafted, 1))


def prepare(request: Request) -> Prepared:
    """`suffix:16`: match up to sixteen tokens."""
    longest = request.integer()
    return Prepared(lambda target: Suffix(target.vocab, longest))
