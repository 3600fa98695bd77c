"""Guess as well as you are told to, at the cost of a real draft model.

It knows what the target will say, having decoded the prompts during prefill, and foretells each
token with probability alpha; else it names another. Meanwhile a real draft model works and its
opinion is ignored. So what a draft costs and how often it is right can be asked apart, and of
models whose weights are random. The tokens foretold are those of the rule match; other rules agree
at temperature 0. Prefill, and so TTFT, pays for a whole plain generation.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from specexp.drafters import Drafter, Plan, Ready
from specexp.drafters import model as draft_model
from specexp.errors import UserError
from specexp.lm import LM, Forward
from specexp.rules import Match
from specexp.sampling import Noise, Rng, Sampling, mix
from specexp.sequences import Draft, Sequences, Verdict
from specexp.tree import Tree

_COINS = Noise(7)  # which places are foretold rightly: a function of prompt, row and position


class Planted(Drafter):
    def __init__(
        self, alpha: float, target: LM, worker: Drafter, sampling: Sampling, seed: int, depth: int
    ) -> None:
        self.name = f"planted {alpha:g}"
        self.alpha, self.target, self.worker, self.depth = alpha, target, worker, depth
        self.sampling, self.rng = sampling, sampling.rng(seed)
        self.models, self.reads, self.context = worker.models, worker.reads, worker.context

    def allocate(self, B: int, S: int) -> None:
        self.worker.allocate(B, S)
        self.future = torch.zeros(B, S, dtype=torch.int64, device=self.target.device)
        self.salt = torch.zeros(B, 1, dtype=torch.int64, device=self.target.device)

    @property
    def state(self) -> tuple[Tensor, ...]:
        return (self.future, self.salt, *self.worker.state)

    @property
    def shaped_by(self) -> tuple[int, ...]:
        return self.worker.shaped_by

    def catch_up(self, seqs: Sequences, missed: int) -> None:
        self.worker.catch_up(seqs, missed)

    def prefill(self, seqs: Sequences, hidden: Tensor | None) -> None:
        self.worker.prefill(seqs, hidden)
        told = replace(seqs, **{f: getattr(seqs, f).clone() for f in ("tokens", "length", "limit")})
        place = torch.arange(seqs.tokens.shape[1], device=seqs.tokens.device)
        prompt = torch.where(place < seqs.length[:, None], mix(mix(place) + seqs.tokens), 0)
        self.salt[seqs.rows] = prompt.sum(1, keepdim=True)
        told.limit += self.depth  # guesses go past it
        told.limit.clamp_(max=seqs.tokens.shape[1] - 1)
        root, match = Tree.chain(0).nodes(told.tokens.device), Match()
        for _ in range(int((told.limit - told.length).max())):
            draft = told.draft(root)
            law = self.sampling.law(self.target.verify(told, draft).logits)
            told.commit(match(draft, law, self.rng))
        self.future[seqs.rows, : told.tokens.shape[1]] = told.tokens

    def propose(self, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
        """The first child of a node foretells; its siblings guess wrongly."""
        work = self.worker.propose(seqs, tree, rng)
        nodes = tree.nodes(seqs.tokens.device)
        if len(tree) == 1:
            return work
        depth, parent = nodes.depth[:, 1:], nodes.parents[0, 1:]
        place = seqs.places(depth).clamp(max=seqs.tokens.shape[1] - 1)
        rank = torch.arange(1, len(tree), device=place.device) - nodes.children[0, parent, 0]
        odds = torch.full(place.shape, self.alpha, device=place.device)
        salt, future = self.salt[seqs.rows], self.future[seqs.rows]
        right = _COINS.bernoulli(odds, mix(seqs.keys(depth) + salt), 0) & (rank == 0)
        miss = (1 + rank) * ~right
        return seqs.draft(nodes, (future.gather(1, place) + miss) % self.target.vocab)

    def observe(self, seqs: Sequences, tree: Tree, verdict: Verdict, seen: Forward) -> None:
        self.worker.observe(seqs, tree, verdict, seen)


def prepare(plan: Plan) -> Ready:
    """`planted:0.8` or `planted:0.8,NAME`: alpha, and the draft model whose cost is paid."""
    given, _, name = plan.argument.partition(",")
    try:
        alpha = float(given or 0.8)
    except ValueError:
        alpha = -1.0
    if not 0 <= alpha <= 1:
        raise UserError(
            f"drafter planted:{plan.argument}: give an acceptance probability from 0 to 1, such "
            "as planted:0.8, or with a draft model, planted:0.8,NAME"
        )
    ready = draft_model.prepare(replace(plan, method="model", argument=name))

    def make(target: LM) -> Planted:
        worker = ready.make(target)
        return Planted(alpha, target, worker, plan.sampling, plan.seed, plan.tree.depth)

    return Ready(make, config=ready.config)
