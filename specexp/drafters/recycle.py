"""Draft the tokens that the target ranked highest the last time it processed the same token.

(Token Recycling: Luo et al. 2024, arXiv 2408.08696.) Every verified node stores the target's k most
likely next tokens in a table indexed by token. A draft reads the table breadth-first: the r-th
child of a node is the r-th candidate stored for its token. Every row has its own table, initialised
with the token that followed each token in the prompt.
"""

import torch
from torch import Tensor

from specexp.drafters import Drafter, Prepared, Request
from specexp.models.lm import LM, Forward
from specexp.ops import op
from specexp.sampling import Rng, ranked
from specexp.sequences import Draft, Sequences, Verdict, columns
from specexp.tree import Tree


class Table:
    """A hash table for each of B rows, from a token to its note: k tokens, int64.

    A row has at most `places` notes. In a larger vocabulary, tokens that are equal modulo `places`
    share a place, which holds the note of the token written last, its `owner`.
    """

    def __init__(
        self, B: int, vocab: int, k: int, device: torch.device, places: int = 4096
    ) -> None:
        self.places = min(vocab, places)
        # the last place takes writes for padding
        self.owner = torch.full((B, self.places + 1), -1, device=device)
        self.notes = torch.full((B, self.places + 1, k), -1, device=device)
        self.state = (self.owner, self.notes)

    def clear(self, rows: slice) -> None:
        for part in self.state:
            part[rows] = -1

    @op
    def read(self, rows: slice, tokens: Tensor) -> Tensor:
        """The notes [b, n, k] of tokens [b, n], -1 where there is none."""
        place = self._place(tokens)
        owned = (self.owner[rows].gather(1, place) == tokens) & (tokens >= 0)
        notes = torch.take_along_dim(self.notes[rows], place[..., None], 1)
        return torch.where(owned[..., None], notes, -1)

    @op
    def write(self, rows: slice, tokens: Tensor, notes: Tensor) -> None:
        """Set the notes [b, n, k] of tokens [b, n]; -1 is padding, the last of equals wins."""
        place = self._place(tokens)
        order = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        last = torch.zeros_like(self.owner[rows]).scatter_reduce(1, place, order, "amax")
        writer = last.gather(1, place)  # equal tokens all write the last one's note
        self.owner[rows].scatter_(1, place, tokens.gather(1, writer))
        written = torch.take_along_dim(notes, writer[..., None], 1)
        self.notes[rows].scatter_(1, place[..., None].expand_as(notes), written)

    def _place(self, tokens: Tensor) -> Tensor:
        return torch.where(tokens < 0, self.places, tokens % self.places)


class Recycle(Drafter):
    name = "recycle"

    def __init__(self, target: LM, k: int = 8) -> None:
        self.vocab, self.device, self.k = target.vocab, target.device, min(k, target.vocab)

    def allocate(self, B: int, S: int) -> None:
        self.table = Table(B, self.vocab, self.k, self.device)
        self.state = self.table.state

    def prefill(self, seqs: Sequences, hidden: Tensor | None) -> None:
        self.table.clear(seqs.rows)
        place = torch.arange(1, seqs.tokens.shape[1], device=self.device)
        following = seqs.tokens[:, 1:]
        notes = torch.full((*following.shape, self.k), -1, device=self.device)
        notes[..., 0] = torch.where(following < self.vocab, following, -1)  # a prompt may exceed it
        tokens = torch.where(place < seqs.length[:, None], seqs.tokens[:, :-1], -1)
        self.table.write(seqs.rows, tokens, notes)

    def propose(self, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
        tokens = [seqs.root]
        for parent, children in enumerate(tree.degrees):
            if children:
                candidates = self.table.read(seqs.rows, tokens[parent])
                tokens += candidates[:, 0, :children].split(1, dim=1)
        return Draft(columns(*tokens), tree.nodes(seqs.device), seqs)

    def observe(self, seqs: Sequences, draft: Draft, verdict: Verdict, seen: Forward) -> None:
        self.table.write(seqs.rows, draft.tokens, ranked(seen.logits, self.k))


def prepare(request: Request) -> Prepared:
    """`recycle:8`: keep eight candidates per token; no node may have more children."""
    k = request.integer()
    return Prepared(lambda target: Recycle(target, k), widest=k)
