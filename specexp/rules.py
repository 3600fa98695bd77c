"""Which guesses to keep, so that the output's law stays the target's.

A rule sees the draft, the target's law p at every node and the noise; it knows nothing of models,
caches or temperature. Both rules here are exact for any drafter and any tree.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from specexp.errors import UserError
from specexp.sampling import RESIDUAL, TOKEN, Rng
from specexp.sequences import Draft, Verdict


class Rule(Protocol):
    name: str
    lossy: bool
    wants_q: bool
    chains_only: bool

    def __call__(self, draft: Draft, p: Tensor, rng: Rng) -> Verdict:
        """p [B, N, V]: the target's law of the token that follows each node."""
        ...


class Match:
    """Sample the target at every node and follow the child that agrees.

    Exact without knowing q, since what is emitted is the target's own sample. With a drafter that
    reads the same noise the two samples agree with probability >= (1 - TV) / (1 + TV). Siblings
    that guess the same token see the same noise, so the one that leads deeper may be followed.
    """

    name = "match"
    lossy = wants_q = chains_only = False

    def __call__(self, draft: Draft, p: Tensor, rng: Rng) -> Verdict:
        sample = rng.categorical(p, draft.keys, TOKEN)
        wanted = sample.gather(1, draft.nodes.parents.expand_as(sample))
        path, n = draft.nodes.accepted(draft.tokens == wanted)
        return Verdict(path, n, sample.gather(1, path.gather(1, n[:, None]))[:, 0])


class Reject:
    """Accept a guess x with probability min(1, p(x)/q(x)), else sample what q left uncovered.

    On a chain this is speculative sampling (Leviathan et al. 2022, algorithm 1; Chen et al. 2023).
    On a tree the siblings are tried in turn, each against what the rejected ones left over
    (SpecInfer, Miao et al. 2023, section 4.3; drawn without replacement: RRSw, Jeon et al. 2024).
    A chosen guess (q is None, or no mass left to draw from) counts as drawn from a one-hot q.
    """

    name = "reject"
    lossy = chains_only = False
    wants_q = True

    def __call__(self, draft: Draft, p: Tensor, rng: Rng) -> Verdict:
        nodes, tokens = draft.nodes, draft.tokens
        left, q = p, draft.q  # the law still owed, and the law siblings are still drawn from
        open_ = torch.ones_like(tokens, dtype=torch.bool)  # [B, N]: no child accepted yet
        ok = torch.zeros_like(open_)
        for rank in range(nodes.children.shape[-1]):
            child = nodes.children[..., rank].expand_as(tokens)
            x = torch.where(child >= 0, tokens.gather(1, child.clamp(min=0)), -1)
            tried, x = open_ & (x >= 0), x.clamp(min=0)[..., None]
            certain = torch.zeros_like(p).scatter_(-1, x, 1.0)
            drawn = certain if q is None else torch.where(q.gather(-1, x) > 0, q, certain)
            ratio = left.gather(-1, x) / drawn.gather(-1, x)
            took = tried & rng.bernoulli(ratio[..., 0].clamp(max=1), draft.keys, rank)
            ok = ok.scatter(1, child.clamp(min=0), took)
            open_ = open_ & ~took
            left = torch.where(
                tried[..., None], normalised((left - drawn).clamp(min=0), left), left
            )
            if q is not None:
                q = torch.where(tried[..., None], normalised(drawn.scatter(-1, x, 0.0), drawn), q)
        path, n = nodes.accepted(ok)
        stop = path.gather(1, n[:, None])
        owed = left.gather(1, stop[..., None].expand(-1, 1, left.shape[-1]))[:, 0]
        return Verdict(path, n, rng.categorical(owed, draft.keys.gather(1, stop)[:, 0], RESIDUAL))


def normalised(w: Tensor, otherwise: Tensor) -> Tensor:
    """w [..., V] scaled to sum 1; `otherwise` where nothing is left (of probability 0)."""
    total = w.sum(-1, keepdim=True)
    return torch.where(total > 0, w / total, otherwise)


def of(name: str) -> Rule:
    known: dict[str, Rule] = {"match": Match(), "reject": Reject()}
    if name not in known:
        raise UserError(f"rule {name!r} is unknown; use one of {', '.join(known)}")
    return known[name]
