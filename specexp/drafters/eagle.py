"""Guess with one layer that continues the target's own hidden states: EAGLE-1, 2 and 3.

(Li et al. 2024, EAGLE; 2024, EAGLE-2, whose trees are `Tree.grown`; 2025, EAGLE-3.) The layer sees
pairs: the feature of one place beside the token of the next. Pair t sits in slot t of the layer's
cache, so the root's pair is in slot length-2. A round first feeds the pairs whose features the
target has just made, up to D + 1 of them, over the guesses the last draft left there; then the
layer goes on with features of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specexp.drafters import Plan, Ready
from specexp.formats import read
from specexp.growth import Level, grow
from specexp.heads import Eagle, check, load
from specexp.lm import LM, Forward
from specexp.sampling import Rng, Sampling
from specexp.sequences import Draft, Sequences, Verdict
from specexp.tree import Tree

_PREFILL = 512  # pairs a prefill pass


class EagleLayer:
    def __init__(self, net: Eagle, target: LM, sampling: Sampling) -> None:
        self.name = net.shape.kind
        self.net, self.sampling = net, sampling
        self.lm = LM(net, f"{self.name} of {target.name}", target.vocab)
        self.models: tuple[LM, ...] = (self.lm,)
        self.taps = net.shape.taps
        self.context = target.context

    def prefill(self, seqs: Sequences, hidden: Tensor | None) -> None:
        B, S = seqs.tokens.shape
        self.lm.allocate(B, S)
        self.fresh = torch.zeros(B, dtype=torch.int64, device=seqs.tokens.device)
        if hidden is None:  # prompts of one token: the root's pair has no feature
            width = len(self.taps) * self.net.shape.width
            self.states = torch.zeros(B, 1, width, dtype=self.lm.dtype, device=self.lm.device)
            return
        for start in range(0, hidden.shape[1], _PREFILL):
            states = hidden[:, start : start + _PREFILL]
            slots = start + torch.arange(states.shape[1], device=states.device).expand(B, -1)
            self._feed(seqs, slots, states)
        last = (seqs.length - 2).clamp(min=0)[:, None, None]
        self.states = hidden.gather(1, last.expand(-1, -1, hidden.shape[2]))

    def _feed(self, seqs: Sequences, slots: Tensor, states: Tensor) -> Forward:
        """Pairs of target states [B, n, taps*E] and the tokens that follow, in slots [B, n]."""
        S = seqs.tokens.shape[1]
        slots = slots.clamp(0, S - 1)
        tokens = seqs.tokens.gather(1, (slots + 1).clamp(max=S - 1))
        visible = torch.arange(S, device=slots.device) <= slots[:, :, None]
        features = self.net.fuse(states)
        return self.lm.feed(tokens, slots, slots, visible, taps=(0,), features=features)

    def propose(self, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
        root = seqs.length[:, None] - 2
        features: list[Tensor] = []  # of the level before [B, n, E]

        def step(level: Level) -> Tensor:
            if level.depth == 0:
                more = torch.arange(self.states.shape[1], device=root.device)
                fed = self._feed(seqs, root - self.fresh[:, None] + more, self.states)
                assert fed.hidden is not None
                logits, made = _at(fed.logits, self.fresh), _at(fed.hidden, self.fresh)
            else:
                before = features.pop()
                parent = level.parent.expand(len(before), -1)[..., None]
                inherited = before.gather(1, parent.expand(-1, -1, before.shape[2]))
                placed = level.placed(root, seqs.tokens.shape[1])
                fed = self.lm.feed(level.tokens, *placed, taps=(0,), features=inherited)
                assert fed.hidden is not None
                logits, made = fed.logits, fed.hidden
            features.append(made)
            return logits

        drawn = rng if self.sampling.temperature > 0 else None
        return grow(seqs, tree, step, self.sampling, drawn).draft

    def observe(self, seqs: Sequences, tree: Tree, verdict: Verdict, seen: Forward) -> None:
        assert seen.hidden is not None
        path = verdict.path[..., None].expand(-1, -1, seen.hidden.shape[2])
        self.states, self.fresh = seen.hidden.gather(1, path), verdict.n


def _at(x: Tensor, index: Tensor) -> Tensor:
    """x [B, n, d] at one place a row: [B, 1, d]."""
    return x.gather(1, index[:, None, None].expand(-1, 1, x.shape[2]))


def prepare(plan: Plan) -> Ready:
    """`eagle:NAME`: a folder or hub id of an EAGLE head of any generation; else the zoo's."""
    head = read(plan.source(plan.method, plan.argument))
    check(head, plan.config, plan.target, "eagle", "eagle3")

    def make(target: LM) -> EagleLayer:
        made = load(head, target.module)
        assert isinstance(made, Eagle)
        return EagleLayer(made, target, plan.sampling)

    return Ready(make, draws=True)
