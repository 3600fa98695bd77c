"""Guess with a smaller causal LM (Leviathan et al. 2022; Chen et al. 2023).

The first pass of a round always feeds the last two committed tokens and the deepest level is never
fed: whether or not the whole last draft was accepted, nothing is missing from the cache.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from specexp.lm import LM, Forward, tree_mask
from specexp.sampling import Rng, Sampling
from specexp.sequences import Draft, Sequences, Verdict
from specexp.tree import Tree


class DraftModel:
    """Children are drawn from the draft's law under `sampling`, or, at temperature 0 or when
    `chosen`, are its most likely tokens."""

    taps: tuple[int, ...] = ()

    def __init__(self, lm: LM, sampling: Sampling, chosen: bool = False) -> None:
        self.lm, self.sampling = lm, sampling
        self.chosen = chosen or sampling.temperature == 0
        self.name = lm.name
        self.models: tuple[LM, ...] = (lm,)
        self.context = lm.context

    def prefill(self, seqs: Sequences, hidden: Tensor | None) -> None:
        self.lm.prefill(seqs)

    def propose(self, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
        nodes = tree.nodes(seqs.tokens.device)
        keys = seqs.keys(nodes.depth)
        visible = tree_mask(seqs, nodes.ancestors)
        root = seqs.length[:, None] - 1
        guesses: list[Tensor] = []
        laws: list[Tensor] = []
        width = nodes.children.shape[-1]
        for level, below in pairwise(tree.levels):
            if level.start == 0:
                logits = self._catch_up(seqs)
            else:
                slots = root + torch.arange(level.start, level.stop, device=root.device)
                depth = root + nodes.depth[:, level]
                logits = self.lm.feed(guesses[-1], slots, depth, visible[:, level]).logits
            if self.chosen:
                picked = logits.topk(width).indices
            else:
                laws.append(self.sampling.law(logits))
                picked = rng.draw(laws[-1], width, keys[:, level])
            parent = nodes.parents[0, below]
            born = torch.arange(below.start, below.stop, device=root.device)
            rank = born - nodes.children[0, parent, 0]
            guesses.append(picked[:, parent - level.start, rank])
        if not guesses:
            return seqs.draft(nodes)
        q = None
        if not self.chosen:
            B, _, V = laws[0].shape
            leaves = laws[0].new_zeros(B, len(tree) - tree.levels[-1].start, V)
            q = torch.cat([*laws, leaves], 1)
        return seqs.draft(nodes, torch.cat(guesses, 1), q)

    def _catch_up(self, seqs: Sequences) -> Tensor:
        """Feed the last two committed tokens; logits [B, 1, V] after the last."""
        slots = (seqs.length[:, None] - 2 + torch.arange(2, device=seqs.tokens.device)).clamp(min=0)
        visible = torch.arange(seqs.tokens.shape[1], device=slots.device) <= slots[:, :, None]
        fed = self.lm.feed(seqs.tokens.gather(1, slots), slots, slots, visible)
        return fed.logits[:, 1:]

    def observe(self, seqs: Sequences, tree: Tree, verdict: Verdict, seen: Forward) -> None:
        if not tree.is_chain:
            self.lm.keep(seqs, verdict)
