"""Draft the target's own continuation with a chosen probability, at a real draft model's cost.

During prefill, the target decodes the prompts plainly. Each draft token is then the known next
token with probability alpha, and a wrong token otherwise. A real draft model runs in every round,
but its draft tokens are ignored. So the cost of drafting and the acceptance probability can be
varied independently, even with random weights. The known continuation is the one that the rule
match samples; other rules give the same one only at temperature 0. Prefill, and therefore TTFT,
includes a whole plain generation.
"""

from dataclasses import replace

import torch
from torch import Tensor

from specexp.drafters import Drafter, Prepared, Request
from specexp.drafters import model as draft_model
from specexp.errors import UserError
from specexp.models.lm import LM, Forward
from specexp.rules import Match
from specexp.sampling import Noise, Rng, Sampling, mix
from specexp.sequences import Draft, Sequences, Verdict
from specexp.tree import Tree

_COINS = Noise(7)  # decides which draft tokens are right, from the prompt, row and position


class Planted(Drafter):
    """`real`: the draft model that runs, whose draft tokens are ignored. future [B, S]: each row's
    continuation, as plain decoding gives it."""

    def __init__(
        self, alpha: float, target: LM, real: Drafter, sampling: Sampling, seed: int, depth: int
    ) -> None:
        self.name = f"planted {alpha:g}"
        self.alpha, self.target, self.real, self.depth = alpha, target, real, depth
        self.sampling, self.rng = sampling, sampling.rng(seed)
        self.models, self.reads, self.context = real.models, real.reads, real.context

    def give_way(self) -> None:
        raise UserError(f"{self.name} cannot draft behind a lookup: its rate would be another")

    def allocate(self, B: int, S: int) -> None:
        self.real.allocate(B, S)
        self.future = torch.zeros(B, S, dtype=torch.int64, device=self.target.device)
        self.salt = torch.zeros(B, 1, dtype=torch.int64, device=self.target.device)
        self.state = (self.future, self.salt, *self.real.state)

    def catch_up(self, seqs: Sequences, missed: int) -> None:
        self.real.catch_up(seqs, missed)

    def prefill(self, seqs: Sequences, hidden: Tensor | None) -> None:
        self.real.prefill(seqs, hidden)
        written = {name: getattr(seqs, name).clone() for name in ("tokens", "length", "limit")}
        plain = replace(seqs, **written)
        place = torch.arange(seqs.tokens.shape[1], device=seqs.device)
        prompt = torch.where(place < seqs.length[:, None], mix(mix(place) + seqs.tokens), 0)
        self.salt[seqs.rows] = prompt.sum(1, keepdim=True)
        plain.limit += self.depth  # draft tokens may lie beyond the limit
        plain.limit.clamp_(max=seqs.tokens.shape[1] - 1)
        root, match = Tree.chain(0).nodes(plain.tokens.device), Match()
        for _ in range(int((plain.limit - plain.length).max())):
            draft = plain.draft(root)
            law = self.sampling.law(self.target.verify(plain, draft).logits)
            plain.commit(match(draft, law, self.rng))
        self.future[seqs.rows, : plain.tokens.shape[1]] = plain.tokens
        if self.target.keeps_last_slots_only:  # it holds the continuation now
            self.target.prefill(seqs, 0, int(seqs.length.max()) - 1)

    def propose(self, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
        """The first child of a node is right with probability alpha, its siblings never."""
        ignored = self.real.propose(seqs, tree, rng)
        self.shaped_by = self.real.shaped_by
        nodes = tree.nodes(seqs.device)
        if len(tree) == 1:
            return ignored
        depth, parent = nodes.depth[:, 1:], nodes.parents[0, 1:]
        place = seqs.places(depth).clamp(max=seqs.tokens.shape[1] - 1)
        rank = torch.arange(1, len(tree), device=place.device) - nodes.children[0, parent, 0]
        odds = torch.full(place.shape, self.alpha, dtype=torch.float32, device=place.device)
        salt, future = self.salt[seqs.rows], self.future[seqs.rows]
        keys = _COINS.keys(seqs.stream, seqs.length, depth)
        right = _COINS.bernoulli(odds, mix(keys + salt), 0) & (rank == 0)
        error = (1 + rank) * ~right  # siblings differ from the right token and from each other
        tokens = (future.gather(1, place) + error) % self.target.vocab
        return seqs.draft(nodes, tokens, memo=ignored.memo)

    def observe(self, seqs: Sequences, draft: Draft, verdict: Verdict, seen: Forward) -> None:
        self.real.observe(seqs, draft, verdict, seen)


def prepare(request: Request) -> Prepared:
    """`planted:0.8` or `planted:0.8,NAME`: alpha, and the draft model that runs."""
    number, _, name = request.argument.partition(",")
    try:
        alpha = float(number or 0.8)
    except ValueError:
        alpha = -1.0
    if not 0 <= alpha <= 1:
        raise UserError(
            f"drafter planted:{request.argument}: give an acceptance probability from 0 to 1, such "
            "as planted:0.8, or planted:0.8,NAME to name the draft model"
        )
    try:
        request.source("model", name)
    except UserError as e:
        if name:
            raise
        raise UserError(
            f"drafter planted runs a draft model in every round, and the zoo has none for "
            f"{request.target}: name one as planted:{alpha:g},NAME"
        ) from e
    ready = draft_model.prepare(replace(request, method="model", argument=name))

    def make(target: LM) -> Planted:
        real = ready.make(target)
        return Planted(alpha, target, real, request.sampling, request.seed, request.tree.depth)

    return Prepared(make, config=ready.config)
