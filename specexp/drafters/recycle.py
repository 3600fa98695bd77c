"""Guess what the target itself thought likely the last time it read this token.

(Token Recycling: Luo et al. 2024, arXiv 2408.08696.) Every verified node leaves the target's k
likeliest next tokens in a table, one place a token; a draft reads the table breadth-first, the r-th
child of a node being the r-th candidate after its token. Every stream has a table of its own, which
begins with what followed each token in the prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specexp import native
from specexp.drafters import Drafter, Plan, Ready
from specexp.errors import UserError
from specexp.lm import LM, Forward
from specexp.sampling import Rng, ranked
from specexp.sequences import Draft, Sequences, Verdict, columns
from specexp.tree import Tree


class Table:
    """What was last noted of a token, for B streams: [..., *shape], filled with -1.

    A stream has `places` places at most: where there are more tokens than that, those that are
    equal modulo it share one, and the last one noted has it.
    """

    def __init__(
        self, B: int, vocab: int, shape: tuple[int, ...], device: torch.device, places: int = 4096
    ) -> None:
        self.places = min(vocab, places)
        # the last place is for what is no token
        self.owner = torch.full((B, self.places + 1), -1, device=device)
        self.notes = torch.full((B, self.places + 1, *shape), -1, device=device)

    @property
    def state(self) -> tuple[Tensor, ...]:
        return (self.owner, self.notes)

    def clear(self, rows: slice) -> None:
        for part in self.state:
            part[rows] = -1

    def read(self, rows: slice, tokens: Tensor) -> Tensor:
        """What is noted of tokens [b, n]: [b, n, *shape], -1 where nothing is."""
        if code := native.by(*self.state):
            size = self.notes.stride(1)
            made = torch.empty(*tokens.shape, *self.notes.shape[2:], dtype=torch.int64)
            read = tokens, self.owner[rows], self.notes[rows]
            code.recall(*tokens.shape, self.places, size, *tokens.stride(), *read, made)
            return made
        place = self._place(tokens)
        known = (self.owner[rows].gather(1, place) == tokens) & (tokens >= 0)
        found = _gather(self.notes[rows], place)
        return torch.where(_as(known, found), found, -1)

    def write(self, rows: slice, tokens: Tensor, notes: Tensor) -> None:
        """Note [b, n, *shape] of tokens [b, n], -1 being none; of twins the last counts."""
        if code := native.by(tokens, notes, *self.state):
            size = self.notes.stride(1)
            changed = self.owner[rows], self.notes[rows]
            code.note(*tokens.shape, self.places, size, tokens, notes, *changed)
            return
        place = self._place(tokens)
        order = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        last = torch.zeros_like(self.owner[rows]).scatter_reduce(1, place, order, "amax")
        writer = last.gather(1, place)  # twins all write what the last of them says
        self.owner[rows].scatter_(1, place, tokens.gather(1, writer))
        news = _gather(notes, writer)
        self.notes[rows].scatter_(1, _as(place, news).expand_as(news), news)

    def _place(self, tokens: Tensor) -> Tensor:
        return torch.where(tokens < 0, self.places, tokens % self.places)


def _as(index: Tensor, like: Tensor) -> Tensor:
    return index.reshape(*index.shape, *(1,) * (like.dim() - index.dim()))


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """x [b, m, *shape] at index [b, n]: [b, n, *shape]."""
    return x.gather(1, _as(index, x).expand(*index.shape, *x.shape[2:]))


def ours(tokens: Tensor, vocab: int) -> Tensor:
    """-1 in place of what the target has no word for, though a prompt may hold it."""
    return torch.where(tokens < vocab, tokens, -1)


class Recycle(Drafter):
    name = "recycle"

    def __init__(self, target: LM, k: int = 8) -> None:
        self.vocab, self.device, self.k = target.vocab, target.device, min(k, target.vocab)

    def allocate(self, B: int, S: int) -> None:
        self.table = Table(B, self.vocab, (self.k,), self.device)

    @property
    def state(self) -> tuple[Tensor, ...]:
        return self.table.state

    def prefill(self, seqs: Sequences, hidden: Tensor | None) -> None:
        self.table.clear(seqs.rows)
        place = torch.arange(1, seqs.tokens.shape[1], device=self.device)
        followed = torch.full((*seqs.tokens[:, 1:].shape, self.k), -1, device=self.device)
        followed[..., 0] = ours(seqs.tokens[:, 1:], self.vocab)
        tokens = torch.where(place < seqs.length[:, None], seqs.tokens[:, :-1], -1)
        self.table.write(seqs.rows, tokens, followed)

    def propose(self, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
        tokens = [seqs.root]
        for parent in range(len(tree)):
            if children := tree.parents.count(parent):
                found = self.table.read(seqs.rows, tokens[parent])
                tokens += found[:, 0, :children].split(1, dim=1)
        draft = Draft(columns(tokens), tree.nodes(seqs.tokens.device), seqs).within()
        self.fed = draft.tokens
        return draft

    def observe(self, seqs: Sequences, tree: Tree, verdict: Verdict, seen: Forward) -> None:
        self.table.write(seqs.rows, self.fed, ranked(seen.logits, self.k))


def prepare(plan: Plan) -> Ready:
    """`recycle:8`: keep eight candidates a token, at least as many as a node has children."""
    k = plan.whole(default=8)
    widest = max(plan.tree.parents.count(i) for i in range(len(plan.tree)))
    if widest > k:
        raise UserError(
            f"drafter recycle:{k} keeps {k} candidates and the tree wants {widest} children of one "
            f"node: use recycle:{widest}"
        )
    return Ready(lambda target: Recycle(target, k))
