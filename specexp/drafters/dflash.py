"""Draft a whole block in one pass (DFlash), corrected token by token (DSpark, DFlash 2).

(Chen et al. 2026, DFlash, arXiv 2602.06036.) A round feeds the root and a mask for each draft
token. Of the text before the root, the layers read keys and values of the target's hidden states,
which are written before a token is committed, so no draft token is ever fed. What is drafted at a
level does not depend on the levels above it, except by DSpark's Markov head or DFlash 2's selector,
which read the token before.
"""

import torch
from torch import Tensor

from specexp.drafters import Drafter, Prepared, Request
from specexp.growth import Level, at_once, grow
from specexp.models.heads.block import Block, network, shape_of
from specexp.models.heads.borrowing import lm_of
from specexp.models.heads.layouts import BLOCKS, read
from specexp.models.heads.weights import check, load
from specexp.models.lm import LM, Forward
from specexp.sampling import Rng, Sampling
from specexp.sequences import Draft, Sequences, Verdict
from specexp.tree import Tree


class BlockDrafter(Drafter):
    draws = True

    def __init__(self, net: Block, target: LM, sampling: Sampling) -> None:
        self.name, self.taps = net.shape.kind, net.shape.taps
        self.net, self.sampling = net, sampling
        self.lm = lm_of(net, target, network)
        self.models: tuple[LM, ...] = (self.lm,)
        self.context = self.lm.context

    def prefill(self, seqs: Sequences, hidden: Tensor | None) -> None:
        if hidden is not None:
            slots = torch.arange(hidden.shape[1], device=hidden.device).expand(hidden.shape[:2])
            self._remember(seqs, hidden, slots)

    def _remember(self, seqs: Sequences, states: Tensor, slots: Tensor) -> None:
        """Write keys and values of the target's states [B, n, taps*E] of the tokens in slots
        [B, n]."""
        features = self.net.fuse(states)
        unread = slots  # in place of tokens, of which only the shape counts
        self.lm.feed(seqs, unread, slots, slots, None, last=0, features=features)

    def propose(self, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
        shape = self.net.shape
        states: list[Tensor] = []  # [B, depth, E]

        def block() -> Tensor:
            places = torch.arange(tree.depth + (not shape.from_root), device=self.lm.device)[None]
            slots = seqs.places(places)
            tokens = torch.where(places > 0, shape.mask, seqs.drafting(seqs.root, 0))
            seen = self.lm.feed(seqs, tokens, slots, slots, None, taps=(0,), last=tree.depth)
            assert seen.hidden is not None
            states.append(seen.hidden)
            return seen.logits

        independent = at_once(block)

        def corrected(level: Level) -> Tensor:
            logits = independent(level)
            state = states[0][:, level.depth, None].expand(-1, level.tokens.shape[1], -1)
            return self.net.corrected(logits, level.tokens, state)

        step = corrected if shape.rank else independent
        return grow(seqs, tree, step, self.sampling, rng)

    def observe(self, seqs: Sequences, draft: Draft, verdict: Verdict, seen: Forward) -> None:
        assert seen.hidden is not None
        states = torch.take_along_dim(seen.hidden, verdict.path[..., None], 1)
        self._remember(seqs, states, seqs.slots(0, states.shape[1]))


def prepare(request: Request) -> Prepared:
    """`dflash:NAME`: a folder or hub id of DFlash, DFlash 2 or DSpark weights; without a name, the
    zoo's."""
    head = read(request.source(request.method, request.argument))
    check(head, request.config, request.target, *BLOCKS)
    shape = shape_of(head)
    return Prepared(
        lambda target: BlockDrafter(load(head, target.module), target, request.sampling),
        draws=True, deepest=shape.deepest, taps=len(shape.taps),
    )  # fmt: skip
