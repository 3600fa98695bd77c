"""Acceptance rules: which draft tokens to keep, so that the output has the target's distribution.

A rule sees the draft, the target's distribution p at every node, and the noise. It knows nothing
about models, caches or temperature. Match, Reject and Block are exact for any drafter. Typical and
lenient Reject are lossy: their names say so, and `emitted` gives the biased distribution.
"""

from typing import Any, Protocol, cast

import torch
from torch import Tensor

from specexp import fitting, objects
from specexp.errors import UserError
from specexp.ops import op
from specexp.sampling import TOKEN, Rng
from specexp.sequences import Draft, Verdict


class Rule(Protocol):
    """Decides which draft tokens are accepted.

    To write a rule, subclass this and define `__call__`; see specexp/drafters/README.md. The
    shipped rules are in specexp/rules.py, with the papers that they come from.

    Attributes:
        name: The name in tables; by default the class's, in lower case.
        lossy: The output's distribution is not the target's. An exact rule leaves it False.
        wants_q: It accepts more draft tokens if they are sampled and it is given their q.
        samples: It only samples from p, so at temperature 0 it can be given logits in place of p.
        chains_only: It cannot judge trees.
        looks_ahead: Its verdict depends on draft tokens that it does not accept, so their noise
            must not be used again (`Noise.by_round`).
    """

    name: str = "rule"
    lossy: bool = False
    wants_q: bool = False
    samples: bool = False
    chains_only: bool = False
    looks_ahead: bool = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" not in vars(cls):
            cls.name = cls.__name__.lower()

    def __call__(self, draft: Draft, p: Tensor, rng: Rng) -> Verdict:
        """Judge one round.

        Args:
            draft: The draft tokens [B, N] of the round, their tree and, if drawn, their q.
            p: [B, N, V], the target's distribution of the token that follows each node.
            rng: The noise; `draft.keys` [B, N] are the addresses of each node's next token.

        Returns:
            The accepted path from the root and the bonus token, as made by `draft.judged`.
        """

    def emitted(self, p: Tensor, q: Tensor) -> Tensor:
        """The distribution [..., V] of the first token of a round with one draft token, drawn from
        q [..., V] (for a chosen one: its one-hot). For an exact rule that is p."""
        return p


class Match(Rule):
    """Sample the target at every node and follow the child that equals the sample.

    Exact without knowing q, since every emitted token is the target's own sample. With a drafter
    that reads the same noise, the two samples agree with probability >= (1 - TV) / (1 + TV).
    Siblings with the same token see the same noise, so the one that leads deeper may be followed.
    """

    samples = True

    def __call__(self, draft: Draft, p: Tensor, rng: Rng) -> Verdict:
        return follow(draft, rng.categorical(p, draft.keys, TOKEN))


@op
def follow(draft: Draft, sample: Tensor) -> Verdict:
    """Accept the draft tokens that equal sample [B, N] at their parents, as deep as possible."""
    at_parent = torch.take_along_dim(sample, draft.nodes.parents, 1)
    path, n = draft.nodes.accepted(draft.tokens == at_parent)
    return Verdict(path, n, sample.gather(1, path))


class Reject(Rule):
    """Accept a draft token x with probability min(1, p(x)/q(x)), else sample the residual of p.

    On a chain this is speculative sampling (Leviathan et al. 2022, algorithm 1; Chen et al. 2023).
    On a tree siblings are tried in turn, each against the residual that the rejected ones left
    (SpecInfer, Miao et al. 2023, section 4.3; drawn without replacement: RRSw, Jeon et al. 2024).
    A chosen draft token (q is None, or q(x) = 0) counts as drawn from a one-hot q.

    `lenience` < 1 multiplies q (Leviathan et al. 2022, appendix A.5): more draft tokens are
    accepted, the distribution is no longer p, and no token becomes more than 1 / lenience times as
    likely.
    """

    wants_q = True

    def __init__(self, lenience: float = 1.0) -> None:
        fitting.share("lenience", lenience)
        self.lenience, self.lossy = lenience, lenience < 1
        if self.lossy:
            self.name = f"lenient {lenience:g} (lossy)"

    @op
    def __call__(self, draft: Draft, p: Tensor, rng: Rng) -> Verdict:
        nodes, tokens = draft.nodes, draft.tokens
        left, q = p, draft.q  # the residual of p, and the distribution of the next sibling
        open_ = torch.ones_like(tokens, dtype=torch.bool)  # [B, N]: no child accepted yet
        ok = torch.zeros_like(open_)
        for rank in range(nodes.children.shape[-1]):
            child = nodes.children[..., rank].expand_as(tokens)
            x = torch.where(child >= 0, tokens.gather(1, child.clamp(min=0)), -1)
            tried, x = open_ & (x >= 0), x.clamp(min=0)[..., None]
            drawn = drawn_from(q, p, x)
            ratio = left.gather(-1, x) / (self.lenience * drawn.gather(-1, x))
            accepted = tried & rng.bernoulli(ratio[..., 0].clamp(max=1), draft.keys, rank)
            ok = ok.scatter(1, child.clamp(min=0), accepted)
            open_ = open_ & ~accepted
            uncovered = (left - self.lenience * drawn).clamp(min=0)
            left = torch.where(tried[..., None], normalised(uncovered, left), left)
            if q is not None:
                q = torch.where(tried[..., None], normalised(drawn.scatter(-1, x, 0.0), drawn), q)
        path, n = nodes.accepted(ok)
        return with_bonus(draft, path, n, left, rng)

    def emitted(self, p: Tensor, q: Tensor) -> Tensor:
        accepted = torch.minimum(q, p / self.lenience)
        rest = normalised((p - self.lenience * q).clamp(min=0), p)
        return accepted + (1 - accepted.sum(-1, keepdim=True)).clamp(min=0) * rest


class Block(Rule):
    """Judge a chain as a whole: keep the longest of its prefixes that pass.

    (Sun et al. 2024, Block verification, arXiv 2403.10444, algorithm 2.) Prefix i has weight
    P_i = min(1, P_{i-1} p/q) and passes with probability S_i / (S_i + 1 - P_i), where S_i is the
    mass of (P_i p - q)+ over the next token; the bonus is drawn from that residual. In expectation
    it keeps at least as many draft tokens as Reject, for any p and q. After a row's last draft
    token, or where its draft tokens end early, q counts as 0: the prefix passes with probability
    P_i and the bonus is drawn from p.
    """

    wants_q = chains_only = looks_ahead = True

    @op
    def __call__(self, draft: Draft, p: Tensor, rng: Rng) -> Verdict:
        tokens = draft.tokens
        N = p.shape[1]
        if draft.nodes.deepest != N - 1:
            raise UserError("rule block judges chains; use tree chain, or the rule reject")
        following = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], -1)], 1)
        x = following.clamp(min=0)[..., None]
        exists = (following >= 0).cumprod(1).bool()  # [B, N]: draft tokens up to node i + 1
        drawn = torch.where(exists[..., None], drawn_from(draft.q, p, x), 0.0)
        odds = torch.where(exists, (p.gather(-1, x) / drawn.gather(-1, x))[..., 0], 0.0)
        weights = [torch.ones_like(odds[:, 0])]
        for i in range(N - 1):
            weights.append((weights[-1] * odds[:, i]).clamp(max=1))
        P = torch.stack(weights, 1)  # [B, N]: weight of the prefix that ends with node i
        uncovered = (P[..., None] * p - drawn).clamp(min=0)
        S = uncovered.sum(-1)
        chance = torch.where(S + 1 - P > 0, S / (S + 1 - P), 1.0)
        passes = rng.bernoulli(chance[:, 1:], draft.keys[:, : N - 1], 0)
        lengths = torch.arange(1, N, device=p.device)
        n = (passes * lengths).amax(1) if N > 1 else torch.zeros_like(tokens[:, 0])
        path = torch.arange(N, device=p.device).clamp(max=n[:, None])
        return with_bonus(draft, path, n, normalised(uncovered, p), rng)


class Typical(Rule):
    """Accept a draft token that is likely enough under p: p(x) > min(epsilon, delta exp(-H(p))).

    (Cai et al. 2024, Medusa, section 2.3.1, where delta = sqrt(epsilon).) In a tree it keeps the
    longest path of such tokens; the bonus is drawn from p. Lossy, except at temperature 0.
    """

    name = "typical (lossy)"
    lossy = looks_ahead = True

    def __init__(self, epsilon: float = 0.09) -> None:
        fitting.share("epsilon", epsilon)
        self.epsilon, self.delta = epsilon, epsilon**0.5

    def _typical(self, p: Tensor) -> Tensor:
        """[..., V] bool: the tokens that would be accepted."""
        entropy = torch.special.entr(p).sum(-1, keepdim=True)
        least = (self.delta * torch.exp(-entropy)).clamp(max=self.epsilon)
        return p > least

    def __call__(self, draft: Draft, p: Tensor, rng: Rng) -> Verdict:
        typical = torch.take_along_dim(self._typical(p), draft.nodes.parents[..., None], 1)
        x = draft.tokens.clamp(0, p.shape[-1] - 1)[..., None]
        ok = typical.gather(-1, x)[..., 0] & (draft.tokens >= 0)
        path, n = draft.nodes.accepted(ok)
        return with_bonus(draft, path, n, p, rng)

    def emitted(self, p: Tensor, q: Tensor) -> Tensor:
        accepted = q * self._typical(p)
        return accepted + (1 - accepted.sum(-1, keepdim=True)).clamp(min=0) * p


def with_bonus(draft: Draft, path: Tensor, n: Tensor, after: Tensor, rng: Rng) -> Verdict:
    """Accept n [B] draft tokens along path [B, D+1]. `after` [B, N, V]: the distribution from which
    the bonus token is drawn if a node is the last one accepted."""
    stop = path.gather(1, n[:, None])
    law = torch.take_along_dim(after, stop[..., None], 1)[:, 0]
    bonus = rng.uncoupled(law, draft.keys.gather(1, stop)[:, 0])
    return draft.judged(path, n, bonus)


def drawn_from(q: Tensor | None, p: Tensor, x: Tensor) -> Tensor:
    """The distribution [B, N, V] behind x [B, N, 1]: q, or a one-hot where q(x) is 0."""
    certain = torch.zeros_like(p).scatter_(-1, x, 1.0)
    return certain if q is None else torch.where(q.gather(-1, x) > 0, q, certain)


def normalised(w: Tensor, otherwise: Tensor) -> Tensor:
    """w [..., V] scaled to sum 1; `otherwise` where w is all 0 (a case of probability 0)."""
    total = w.sum(-1, keepdim=True)
    return torch.where(total > 0, w / total, otherwise)


# --- names of rules -------------------------------------------------------------------------------

_SHIPPED: dict[str, type[Rule]] = {
    "match": Match, "reject": Reject, "block": Block, "typical": Typical, "lenient": Reject,
}  # fmt: skip
_PARTS = ("name", "lossy", "wants_q", "samples", "chains_only", "looks_ahead", "emitted")


def of(rule: Any) -> Rule:
    """The rule that a name (`fitting.rule`), an entry point, `module:Class`, a class or an instance
    stands for. Raises UserError for anything else."""
    if isinstance(rule, str):
        kind, number = fitting.rule(rule)
        return _SHIPPED[kind](*number) if kind else of(objects.resolve("rule", rule))
    if isinstance(rule, type):
        rule = objects.construct("rule", rule.__name__, rule)
    about = f"rule {type(rule).__name__}"
    if missing := [part for part in _PARTS if not hasattr(rule, part)]:
        raise UserError(
            f"{about} has no {', '.join(missing)}: give a name, or subclass specexp.Rule"
        )
    if not callable(rule) or type(rule).__call__ is Rule.__call__:
        raise UserError(f"{about} has no __call__(self, draft, p, rng): define it (specexp.Rule)")
    objects.check_takes(f"{about}: __call__", rule, "draft, p, rng")
    return cast(Rule, rule)
