"""Guess what the target itself thought likely the last time it read this token.

(Token Recycling: Luo et al. 2024, arXiv 2408.08696.) Every verified node leaves the target's k
likeliest next tokens in a table, one row a token; a draft reads the table breadth-first, the r-th
child of a node being the r-th candidate after its token. The table is shared by the batch, so which
guesses are made, though never the law of the text, depends on the other rows. It begins with what
followed each token in the prompts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specexp.drafters import Plan, Ready
from specexp.errors import UserError
from specexp.lm import LM, Forward
from specexp.sampling import Rng
from specexp.sequences import Draft, Sequences, Verdict
from specexp.tree import Tree


class Recycle:
    name = "recycle"
    taps: tuple[int, ...] = ()
    models: tuple[LM, ...] = ()
    context = 1 << 30

    def __init__(self, vocab: int, k: int = 8) -> None:
        self.vocab, self.k = vocab, min(k, vocab)

    def prefill(self, seqs: Sequences, hidden: Tensor | None) -> None:
        device = seqs.tokens.device
        self.table = torch.full((self.vocab + 1, self.k), -1, device=device)  # the last row: none
        place = torch.arange(seqs.tokens.shape[1] - 1, device=device)
        known = place + 1 < seqs.length[:, None]
        followed = torch.full((*known.shape, self.k), -1, device=device)
        followed[..., 0] = seqs.tokens[:, 1:]
        self._learn(torch.where(known, seqs.tokens[:, :-1], -1), followed)

    def propose(self, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
        nodes = tree.nodes(seqs.tokens.device)
        tokens = [row_of(seqs.root, self.vocab)]
        for parent in range(len(tree)):
            for rank in range(tree.parents.count(parent)):
                guess = self.table[tokens[parent], rank]
                tokens.append(row_of(guess, self.vocab))
        self.fed = torch.cat(tokens, 1)
        guesses = self.fed[:, 1:]
        return seqs.draft(nodes, torch.where(guesses == self.vocab, -1, guesses))

    def observe(self, seqs: Sequences, tree: Tree, verdict: Verdict, seen: Forward) -> None:
        likeliest = seen.logits.topk(self.k).indices
        self._learn(self.fed, likeliest)

    def _learn(self, tokens: Tensor, candidates: Tensor) -> None:
        """Write candidates [B, n, k] into the rows of tokens [B, n]; of twins the last counts."""
        writer = last_writer(tokens, self.vocab)
        news = candidates.flatten(0, 1)[writer.clamp(min=0)]
        self.table = torch.where((writer >= 0)[:, None], news, self.table)


def row_of(token: Tensor, vocab: int) -> Tensor:
    """The row of a token in a table of vocab + 1; the last one for no token and for ids beyond."""
    return torch.where((token < 0) | (token >= vocab), vocab, token)


def last_writer(tokens: Tensor, vocab: int) -> Tensor:
    """[vocab + 1]: where in tokens [B, n], flattened, each row's token last stands; -1 nowhere.

    So a table can be written in one pass in which twins do not race.
    """
    rows = row_of(tokens, vocab).flatten()
    place = torch.arange(len(rows), device=rows.device)
    writer = torch.full((vocab + 1,), -1, device=rows.device)
    writer = writer.scatter_reduce(0, rows, place, "amax")
    return writer.masked_fill(torch.arange(vocab + 1, device=rows.device) == vocab, -1)


def prepare(plan: Plan) -> Ready:
    """`recycle:8`: keep eight candidates a token, at least as many as a node has children."""
    k = plan.whole(default=8)
    widest = max(plan.tree.parents.count(i) for i in range(len(plan.tree)))
    if widest > k:
        raise UserError(
            f"drafter recycle:{k} keeps {k} candidates and the tree wants {widest} children of one "
            f"node: use recycle:{widest}"
        )
    return Ready(lambda target: Recycle(target.vocab, k))
