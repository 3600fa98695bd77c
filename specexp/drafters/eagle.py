"""Draft with a layer or a few on the target's hidden states (EAGLE-1, 2 and 3, and P-EAGLE).

(Li et al. 2024, EAGLE; 2024, EAGLE-2, whose trees are `Tree.grown`; 2025, EAGLE-3.) The layer's
input is a pair: the feature of position t and the token of position t + 1. Pair t is in slot t of
the layer's cache, so the root's pair is in slot length-2. Features computed from the target's
states are kept per slot. A round first feeds the pairs of the last committed tokens, overwriting
the entries that drafting left there: as many pairs as the deepest draft so far can have accepted.
From then on the layer continues with its own features. P-EAGLE's layers do not: the feature and the
token that they read in place of those not known yet were learned, so that one pass drafts all
levels (in the layout of the `speculators` package).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specexp.drafters import Drafter, Prepared, Request
from specexp.growth import Level, Step, at_once, grow
from specexp.models.heads.borrowing import lm_of
from specexp.models.heads.eagle import Eagle, network
from specexp.models.heads.layouts import EAGLE3, read, states_read
from specexp.models.heads.weights import check, load
from specexp.models.lm import LM, PREFILL, Forward
from specexp.sampling import Rng, Sampling
from specexp.sequences import Draft, Sequences, Verdict
from specexp.tree import Tree

if TYPE_CHECKING:
    from specexp.drafters.mtp import Mtp


class EagleLayer(Drafter):
    draws = reads = True

    def __init__(self, net: Eagle | Mtp, target: LM, sampling: Sampling) -> None:
        self.name, self.taps = net.shape.kind, net.shape.taps
        self.net, self.sampling = net, sampling
        self.lm = lm_of(net, target, network)
        self.models: tuple[LM, ...] = (self.lm,)
        self.context = self.lm.context
        self.deepest = 0  # depth of the drafts so far

    def allocate(self, B: int, S: int) -> None:
        width = self.net.config.hidden_size
        self.features, self.state = torch.zeros(0), ()  # the old ones leave their memory
        self.lm.allocate(B, S, S * width * self.lm.dtype.itemsize)
        self.features = torch.zeros(B, S, width, dtype=self.lm.dtype, device=self.lm.device)
        self.state = (self.features,)

    def prefill(self, seqs: Sequences, hidden: Tensor | None) -> None:
        if hidden is None:  # all prompts have one token, which has no feature before it
            B, width = len(seqs.tokens), self.net.shape.read
            hidden = torch.zeros(B, 1, width, dtype=self.lm.dtype, device=self.lm.device)
        hidden[:, 0].masked_fill_((seqs.length == 1)[:, None], 0)  # nor in a batch with longer ones
        self.features[seqs.rows, : hidden.shape[1]] = self.net.fuse(hidden)

    def catch_up(self, seqs: Sequences, missed: int) -> None:
        count = missed + self.deepest  # drafting wrote over the entries of the last `deepest` pairs
        for first in range(0, count, PREFILL):
            self._feed(seqs, count - first, min(PREFILL, count - first))

    def _feed(self, seqs: Sequences, back: int, count: int, last: int = 1) -> Forward:
        """Feed `count` pairs per row, starting `back` before the root's; logits after the last
        `last`."""
        from_root = torch.arange(-1 - back, count - 1 - back, device=seqs.device)[None]
        slots = seqs.places(from_root)
        tokens, features = self._pairs(seqs, from_root, slots)
        return self.lm.feed(
            seqs, tokens, slots, slots, None, taps=(0,), last=last, features=features
        )

    def _pairs(self, seqs: Sequences, from_root: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens [B, n] and features [B, n, E] of the pairs in slots [B, n], `from_root` [1, n]
        slots from the root's."""
        # the minimum is for a one-token row, which has no pair
        following = torch.minimum(slots + 1, seqs.length[:, None] - 1)
        tokens = seqs.drafting(seqs.read(following), 0)
        return tokens, torch.take_along_dim(self.features[seqs.rows], slots[..., None], 1)

    def propose(self, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
        self.deepest = max(self.deepest, tree.depth)
        self.shaped_by = (self.deepest,)
        return grow(seqs, tree, self._step(seqs, tree), self.sampling, rng)

    def _step(self, seqs: Sequences, tree: Tree) -> Step:
        features: list[Tensor] = []  # [B, n, E] of the previous level

        def step(level: Level) -> Tensor:
            if level.depth == 0:
                fed = self._feed(seqs, self.deepest, self.deepest + 1)
            else:
                inherited = torch.take_along_dim(features.pop(), level.parent[..., None], 1)
                placed = level.placed(seqs, back=1)
                fed = self.lm.feed(seqs, level.tokens, *placed, taps=(0,), features=inherited)
            assert fed.hidden is not None
            features.append(fed.hidden[:, -level.tokens.shape[1] :])
            return fed.logits

        return step

    def observe(self, seqs: Sequences, draft: Draft, verdict: Verdict, seen: Forward) -> None:
        assert seen.hidden is not None
        features = self.net.fuse(torch.take_along_dim(seen.hidden, verdict.path[..., None], 1))
        slots = seqs.slots(0, features.shape[1])
        at = slots[..., None].expand(-1, -1, features.shape[2])
        self.features[seqs.rows].scatter_(1, at, features)


class ParallelEagle(EagleLayer):
    """Drafts all levels in one pass; what is drafted does not depend on the levels above."""

    def __init__(self, net: Eagle, target: LM, sampling: Sampling) -> None:
        super().__init__(net, target, sampling)
        with torch.inference_mode():
            self.unknown = net.fuse(net.mask_hidden)  # [1, 1, E]

    def _pairs(self, seqs: Sequences, from_root: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        tokens, features = super()._pairs(seqs, from_root, slots)
        unknown = from_root >= 0
        tokens = torch.where(unknown, self.net.shape.mask, tokens)
        return tokens, torch.where(unknown[..., None], self.unknown, features)

    def _step(self, seqs: Sequences, tree: Tree) -> Step:
        count = self.deepest + tree.depth
        return at_once(lambda: self._feed(seqs, self.deepest, count, tree.depth).logits)


def of_layers(net: Eagle, target: LM, sampling: Sampling) -> EagleLayer:
    """The drafter that these layers are."""
    parallel = net.shape.kind == "peagle"
    return (ParallelEagle if parallel else EagleLayer)(net, target, sampling)


def prepare(request: Request) -> Prepared:
    """`eagle:NAME`: a folder or hub id of EAGLE-1, 2, 3 or P-EAGLE weights; without a name, the
    zoo's."""
    head = read(request.source(request.method, request.argument))
    check(head, request.config, request.target, "eagle", *EAGLE3)
    return Prepared(
        lambda target: of_layers(load(head, target.module), target, request.sampling),
        draws=True, taps=len(states_read(head, request.config.num_hidden_layers)),
    )  # fmt: skip
