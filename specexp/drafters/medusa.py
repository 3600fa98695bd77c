"""Draft several positions at once with extra heads on the target's last hidden state.

(Cai et al. 2024, Medusa, section 2.1.) Head k, counted from 1, reads the state from which the
target predicted the root and predicts the token k positions after the root, independently of the
tokens between. Drafting needs no pass over the sequence and no cache.
"""

import torch
from torch import Tensor

from specexp.drafters import Drafter, Prepared, Request
from specexp.growth import Level, grow
from specexp.models.heads.layouts import medusa_size, read
from specexp.models.heads.medusa import Medusa
from specexp.models.heads.weights import check, load
from specexp.models.lm import LM, Forward
from specexp.sampling import Rng, Sampling
from specexp.sequences import Draft, Sequences, Verdict
from specexp.tree import Tree


class MedusaHeads(Drafter):
    name = "medusa"
    draws = True

    def __init__(self, heads: Medusa, target: LM, sampling: Sampling) -> None:
        self.heads, self.sampling, self.vocab = heads, sampling, target.vocab
        self.taps: tuple[int, ...] = (target.config.num_hidden_layers,)
        self.context = target.context
        self.width, self.dtype, self.device = target.config.hidden_size, target.dtype, target.device

    def allocate(self, B: int, S: int) -> None:
        self.last = torch.zeros(B, 1, self.width, dtype=self.dtype, device=self.device)
        self.state = (self.last,)

    def prefill(self, seqs: Sequences, hidden: Tensor | None) -> None:
        """Keep the state before the root: zeros for a one-token prompt, which has none."""
        self.last[seqs.rows] = 0
        if hidden is not None:
            last = (seqs.length - 2)[:, None, None]
            state = torch.take_along_dim(hidden, last.clamp(min=0), 1)
            self.last[seqs.rows] = torch.where(last >= 0, state, 0)

    def propose(self, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
        def step(level: Level) -> Tensor:
            logits = self.heads.logits(level.depth, self.last[seqs.rows], self.vocab)
            return logits.expand(-1, level.tokens.shape[1], -1)

        return grow(seqs, tree, step, self.sampling, rng)

    def observe(self, seqs: Sequences, draft: Draft, verdict: Verdict, seen: Forward) -> None:
        assert seen.hidden is not None
        last = verdict.path.gather(1, verdict.n[:, None])
        self.last[seqs.rows] = torch.take_along_dim(seen.hidden, last[..., None], 1)


def prepare(request: Request) -> Prepared:
    """`medusa:NAME`: a folder or hub id of Medusa heads; without a name, the zoo's."""
    head = read(request.source(request.method, request.argument))
    check(head, request.config, request.target, "medusa")
    heads, _ = medusa_size(head)

    def make(target: LM) -> MedusaHeads:
        return MedusaHeads(load(head, target.module), target, request.sampling)

    return Prepared(make, draws=True, deepest=heads, taps=1)
