"""Draft what followed earlier where the text repeats itself; elsewhere let a network draft.

(The suffix automaton over a neural drafter of TensorRT-LLM, `sa_config`; llama.cpp's `--spec-type
draft-eagle3,ngram-simple`.) A row's draft is `suffix`'s in the rounds in which its last tokens, at
least `least` of them, occurred before, and the other drafter's in all others. Which one depends on
committed tokens alone, so every exact rule stays exact. Both take part in every round, so that a
round is one graph; where the lookup drafts, the other drafts one token, which keeps its caches up
to date, and the rest of its passes is padding, which compiled passes on a CPU leave out. The target
may accept tokens that the other drafter did not draft: see `Drafter.give_way`.
"""

from dataclasses import replace

import torch
from torch import Tensor

from specexp import drafters
from specexp.drafters import Drafter, Prepared, Request
from specexp.drafters.model import insist_on_rereading
from specexp.drafters.suffix import Suffix
from specexp.fitting import LONG_MATCH, behind
from specexp.models.lm import LM, Forward
from specexp.models.memory import layers
from specexp.models.servable import context_length
from specexp.sampling import Rng
from specexp.sequences import Draft, Sequences, Verdict
from specexp.tree import Nodes, Tree


class Lookup(Drafter):
    """`least`: the shortest match, in tokens, on which the lookup's draft is taken, by default
    as in TensorRT-LLM. Raises UserError if the other drafter cannot give way."""

    def __init__(self, lookup: Suffix, other: Drafter, least: int = LONG_MATCH) -> None:
        other.give_way()
        self.lookup, self.other, self.least = lookup, other, least
        self.name, self.draws, self.taps = f"lookup:{other.name}", other.draws, other.taps
        self.models, self.reads, self.context = other.models, other.reads, other.context
        self.on_host = other.on_host

    def allocate(self, B: int, S: int) -> None:
        self.other.allocate(B, S)
        self.state = self.other.state

    def prefill(self, seqs: Sequences, hidden: Tensor | None) -> None:
        self.other.prefill(seqs, hidden)

    def catch_up(self, seqs: Sequences, missed: int) -> None:
        self.other.catch_up(seqs, missed)

    def propose(self, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
        """In rows that take the lookup's draft, q [B, N, V] is 0: its tokens were chosen."""
        if not tree.depth:
            return self._others(seqs, tree, rng)
        copied = self.lookup.propose(seqs, tree, rng)
        sure = repeats(seqs, self.least) & (copied.tokens[:, 1:2] >= 0)  # [B, 1]
        depth = torch.full_like(seqs.length, tree.depth) if seqs.budget is None else seqs.budget
        shorter = replace(seqs, budget=torch.where(sure[:, 0], depth.clamp(max=1), depth))
        draft = self._others(shorter, tree, rng)
        nodes = draft.nodes
        if tree.width:  # its shape is another in each row
            parents = torch.where(sure, copied.nodes.parents, nodes.parents)
            most = max(nodes.children.shape[-1], copied.nodes.children.shape[-1])
            nodes = Nodes.of(parents, tree.depth, most)
        tokens = torch.where(sure, copied.tokens, draft.tokens)
        q = None if draft.q is None else draft.q.masked_fill(sure[..., None], 0)
        return Draft(tokens, nodes, seqs, q, draft.memo)

    def _others(self, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
        draft = self.other.propose(seqs, tree, rng)
        self.shaped_by = self.other.shaped_by
        return draft

    def observe(self, seqs: Sequences, draft: Draft, verdict: Verdict, seen: Forward) -> None:
        self.other.observe(seqs, draft, verdict, seen)


def repeats(seqs: Sequences, n: int) -> Tensor:
    """[B, 1] bool: whether a row's last n tokens, root included, occurred before."""
    last = seqs.read(seqs.slots(1 - n, 1))
    spans = seqs.tokens.unfold(1, n, 1)  # [B, S - n + 1, n]
    before = torch.arange(n, n + spans.shape[1], device=last.device) < seqs.length[:, None]
    return ((spans == last[:, None]).all(-1) & before).any(1, keepdim=True)


def prepare(request: Request) -> Prepared:
    """`lookup:DRAFTER`: before a draft model or heads, such as `lookup:eagle`; without a name,
    before the zoo's draft model."""
    method, argument = behind(request.method, request.argument)
    other = drafters.prepare(replace(request, method=method, argument=argument))
    if config := other.config:
        kept = layers(config, context_length(config))
        able = not any(layer.span or layer.has_state for layer in kept)
        insist_on_rereading(able, argument or method)

    def make(target: LM) -> Lookup:
        return Lookup(Suffix(target.vocab), other.make(target))

    return replace(other, make=make)
