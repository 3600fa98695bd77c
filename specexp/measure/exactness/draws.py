"""Do the draws of real rounds follow the distributions that they are said to follow?

Three kinds of draw are compared with a distribution that the round itself gives:

- draft tokens, with the q that the drafter reports;
- what the run's own rule emits on the round's p, q and draft under fresh noise, with p;
- the tokens of the emitted text, with p.

A distribution occurs only once or a few times, so tokens are counted in sets that are fixed before
the draw. One holds the tokens that the other side favours (q above p, or below): a wrong ratio,
residual or acceptance shifts its count. One holds the tokens that are as likely as is typical,
ln p >= -H(p): a wrong temperature or truncation shifts its count. The third is learned: it holds
what the draws before had too often, as a token or by how far ln p is from -H(p), so a fault that
lasts shifts its count, also if it moves probability within the other sets alone. Per draw, a set's
observed count differs from its expected one by at most the mean total variation, and by just that
for a fault that moves probability from this set to the rest. All rows are counted together, which
shows a small fault of all draws, and each on its own, which shows a large fault of a single row.

In an exact run a count is a sum of coin tosses, each of a probability known before the toss. By
Bernstein's inequality the probability that any count of a verdict leaves its range is then at most
`ALARM`.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specexp.engine import Engine
from specexp.models.lm import Forward
from specexp.sequences import Draft, Sequences, Verdict

ALARM = 1e-4  # probability that a verdict of an exact run is a false alarm, at most
SETS, KINDS = 2, 3  # sets that are chosen; kinds of draw
LEVELS = 32  # of how likely a token is, a third of a nat each, about what is typical
SINGLE = LEARNED = 0.05  # the shares of it for counts of single rows, and of sets that are learned
BOUND = math.log(2 * SETS * KINDS / ALARM / (1 - SINGLE - LEARNED))  # each count has two sides
LATE = math.log(2 * KINDS / ALARM / LEARNED)
SURE = 1.645  # standard deviations: a fault of the stated size is missed in 5 % of runs
ROUNDS = 8  # fresh rounds for each recorded one
BUDGET = {"cpu": 1 << 25}  # probabilities [B, N, V] that fresh rounds may read in all
BUDGET_ELSEWHERE = 1 << 30


@dataclass(frozen=True)
class Check:
    """The result for one kind of draw. what: what is drawn; law: the distribution that it should
    follow; n: draws; bias: the largest difference of a count of all rows from its expectation, per
    draw; detectable: the least bias that is found in 95 % of runs; in_row: the same for a fault in
    a single row, both by sets that are not learned; passed: all counts are within chance, and
    nothing of probability 0 was drawn."""

    what: str
    law: str
    n: int
    bias: float
    detectable: float
    in_row: float
    passed: bool

    def __str__(self) -> str:
        if self.passed:
            return f"{self.n} {self.what} follow {self.law}"
        return f"BUG: {self.n} {self.what} do not follow {self.law}, off by {self.bias:.2g}"


class Tally:
    """Counts of sets of tokens, observed and expected, of each row."""

    def __init__(self, rows: int, device: torch.device) -> None:
        # of each set: draws, observed, expected, variance, and draws of probability 0
        self.sums = torch.zeros(rows, SETS + 1, 5, dtype=torch.float64, device=device)
        # draws of each token and of each level, of all rows: observed, expected
        self.tokens: Tensor | None = None
        self.levels = torch.zeros(2, LEVELS, dtype=torch.float32, device=device)

    def add(self, tokens: Tensor, law: Tensor, sets: Tensor, valid: Tensor) -> None:
        """Count tokens [B, N] drawn from law [B, N, V], where `valid` [B, N].

        sets [B, N, SETS, V] bool, chosen before the draw; an empty one is not counted."""
        sets = torch.cat([sets, self._learned(tokens, law, valid)[:, :, None]], 2)
        at, total = tokens.clamp(min=0)[..., None], law.sum(-1, dtype=torch.float64)
        mass = (law[..., None, :] * sets).sum(-1, dtype=torch.float64) / total[..., None]
        mass = mass.clamp(max=1)
        hit = sets.gather(-1, at[..., None, :].expand(*sets.shape[:-1], 1))[..., 0].double()
        never = (law.gather(-1, at) == 0).double().expand_as(mass)
        sums = torch.stack([torch.ones_like(mass), hit, mass, mass * (1 - mass), never], -1)
        counted = valid[..., None] & sets.any(-1)
        self.sums += torch.where(counted[..., None], sums, 0.0).sum(1)

    def _learned(self, tokens: Tensor, law: Tensor, valid: Tensor) -> Tensor:
        """[B, N, V] bool: the tokens that the draws before these had too often, by themselves and
        by their level; then these draws are seen, too."""
        total = law.sum(-1, keepdim=True)
        p = (law / torch.where(total > 0, total, 1)).float()
        level = p.log() + torch.special.entr(p).sum(-1, keepdim=True)
        level = (3 * level + LEVELS / 2).clamp(0, LEVELS - 1).long()  # of p = 0: the lowest
        tokens = torch.where(valid, tokens, 0)
        if self.tokens is None:
            self.tokens = p.new_zeros(2, p.shape[-1])
        learned = (_excess(self.tokens) + _excess(self.levels)[level] > 0) & (law > 0)
        p, hit = p * valid[..., None], valid.flatten().to(p.dtype)
        self.tokens[0].scatter_add_(0, tokens.flatten(), hit)
        self.tokens[1] += p.sum((0, 1))
        self.levels[0].scatter_add_(0, level.gather(-1, tokens[..., None]).flatten(), hit)
        self.levels[1].scatter_add_(0, level.flatten(), p.flatten())
        return learned

    def check(self, what: str, law: str) -> Check:
        chosen, learned = self.sums[:, :SETS], self.sums[:, SETS:]
        single = math.log(len(chosen) * (1 - SINGLE - LEARNED) / SINGLE)
        together = _check(what, law, chosen.sum(0), BOUND)
        later = _check(what, law, learned.sum(0), LATE)
        apart = _check(what, law, chosen.flatten(0, 1), BOUND + single)
        passed = together.passed and later.passed and apart.passed
        bias = max(together.bias, later.bias)
        return replace(together, bias=bias, in_row=apart.detectable, passed=passed)


def _excess(counts: Tensor) -> Tensor:
    """How many more than expected, counts [2, n], in standard deviations of rare draws."""
    return (counts[0] - counts[1]) / (counts[1] + 1).sqrt()


def _check(what: str, law: str, sums: Tensor, bound: float) -> Check:
    """The check of counts [C, 5], each of which leaves its range with probability 2 exp(-bound)."""
    counts = [count for count in sums.tolist() if count[0]]
    n, bias, detectable, passed = 0, 0.0, 0.0 if counts else 1.0, True
    for draws, observed, expected, variance, never in counts:
        off = abs(observed - expected)
        chance = math.sqrt(2 * variance * bound + (bound / 3) ** 2) + bound / 3
        n, bias = max(n, int(draws)), max(bias, off / draws)
        detectable = max(detectable, min(1.0, (chance + SURE * math.sqrt(variance)) / draws))
        passed = passed and off <= chance and not never
    return Check(what, law, n, bias, detectable, detectable, passed)


def sets_of(law: Tensor, favoured: Tensor) -> Tensor:
    """[..., SETS, V] bool: the tokens that are `favoured` [..., V], and those that are at least as
    likely under law [..., V] as is typical."""
    typical = torch.exp(-torch.special.entr(law).sum(-1, keepdim=True))
    return torch.stack([favoured, law >= typical], -2)


class Witness:
    """A clock (see `Engine`) that counts the draws of all rounds of one batch of `rows`.

    kept: the rows whose emitted tokens and logits it keeps, to compare with the module alone."""

    def __init__(self, engine: Engine, rows: int, kept: range) -> None:
        self.engine, self.kept = engine, kept
        device = engine.target.device
        self.drafted, self.judged, self.emitted = (Tally(rows, device) for _ in range(KINDS))
        self.tokens: dict[int, list[int]] = {row: [] for row in kept}
        self.logits: dict[int, list[Tensor]] = {row: [] for row in kept}
        self.generator = torch.Generator(device).manual_seed(engine.seed)
        self.left = BUDGET.get(device.type, BUDGET_ELSEWHERE)
        self.streams = 1 << 32  # of fresh noise, apart from those of rows
        self.reach: Tensor | None = None

    def __call__(self, stage: str, run: Any) -> Any:
        result = run()
        getattr(self, stage)(result)
        return result

    @property
    def checks(self) -> list[Check]:
        engine = self.engine
        checks = [
            self.drafted.check("draft tokens", f"the q of {engine.drafter.name}"),
            self.judged.check(f"tokens of {engine.rule.name} on fresh noise", "p"),
            self.emitted.check("emitted tokens", "p"),
        ]
        return [check for check in checks if check.n]

    # the stages of a round

    def draft(self, draft: Draft) -> None:
        self.proposed = draft

    def verify(self, seen: Forward) -> None:
        self.seen = seen
        self.p = self.engine.law(seen)

    def accept(self, verdict: Verdict) -> None:
        self.verdict = verdict
        if self.engine.sampling.temperature > 0 and self.proposed.tokens.shape[1] > 1:
            if self.proposed.q is not None:
                self._count_drafted(self.proposed, self.proposed.q)
            for _ in range(ROUNDS):
                if self.left > 0:
                    self._count_judged(self.proposed)

    def commit(self, report: Tensor) -> None:
        path, emitted, draft = self.verdict.path, report[:, 1], self.proposed
        if self.engine.sampling.temperature > 0:
            # no set is made of chosen draft tokens: they may depend on the noise the rule reads
            none = torch.zeros((), dtype=torch.bool, device=path.device).expand_as(self.p)
            favoured = none if draft.q is None else draft.q > self.p
            self._count(self.emitted, self.verdict, emitted, self.p, favoured)
        for row in self.kept:
            n = int(emitted[row])
            self.tokens[row] += self.verdict.new[row, :n].tolist()
            self.logits[row].append(self.seen.logits[row, path[row, :n]])

    def _count_drafted(self, draft: Draft, q: Tensor) -> None:
        """The children of the first node of each depth, at positions for which the row has not
        drafted before: draws of one depth, or position, share their noise."""
        nodes, text = draft.nodes, draft.text
        first = nodes.depth.diff(dim=1, prepend=nodes.depth[:, :1] - 1) > 0
        position = text.length[:, None] + nodes.depth
        if self.reach is None or self.engine.rule.looks_ahead:
            self.reach = torch.zeros_like(text.length)
        fresh = first & (position > self.reach[:, None]) & text.live[:, None]
        left, drafted = q, torch.zeros_like(draft.tokens, dtype=torch.bool)
        for rank in range(nodes.children.shape[-1]):
            child = nodes.children[..., rank].expand_as(draft.tokens)
            x = torch.where(child >= 0, draft.tokens.gather(1, child.clamp(min=0)), -1)
            at, drafted = x.clamp(min=0)[..., None], drafted | (x >= 0)
            drawn = fresh & (x >= 0) & (left.gather(-1, at)[..., 0] > 0)  # others were chosen
            self.drafted.add(x, left, sets_of(left, self.p > left), drawn)
            left = left.scatter(-1, at, 0.0)
        self.reach = torch.maximum(self.reach, torch.where(drafted, position, 0).amax(1))

    def _count_judged(self, draft: Draft) -> None:
        """The run's rule on the recorded p and q: draft tokens drawn anew from q (chosen ones as
        they are), and noise of its own. All nodes of a depth get the p of the first of them, so
        that p is a function of the path whichever tokens are drawn."""
        B, engine, nodes = len(draft.tokens), self.engine, draft.nodes
        depth = nodes.depth.expand_as(draft.tokens)
        first = (depth[:, :, None] == depth[:, None, :]).int().argmax(-1)
        p = torch.take_along_dim(self.p, first[..., None], 1)
        one = torch.ones_like(draft.text.length)
        streams = self.streams + torch.arange(B, device=p.device)
        text = Sequences(
            draft.tokens[:, :1], one, one + nodes.deepest + 1, streams, draft.text.eos[:0],
            rng=engine.rng,
        )  # fmt: skip
        tokens = draft.tokens if draft.q is None else self._redrawn(draft, draft.q)
        fresh = replace(draft, tokens=tokens, text=text, memo=None)
        verdict = engine.rule(fresh, p, engine.rng)
        favoured = _drafted_at(draft, p)
        if draft.q is not None:
            favoured = torch.where(draft.q.any(-1, keepdim=True), draft.q > p, favoured)
        self._count(self.judged, verdict, (verdict.n + 1) * draft.text.live, p, favoured)
        self.streams += B
        self.left -= p.numel()

    def _redrawn(self, draft: Draft, q: Tensor) -> Tensor:
        """The draft's tokens [B, N], each drawn anew from q without its earlier siblings; what was
        no draw from q (-1, or of probability 0) stays as it is."""
        tokens, left = draft.tokens.clone(), q.double()
        for rank in range(draft.nodes.children.shape[-1]):
            child = draft.nodes.children[..., rank].expand_as(tokens)
            old = draft.tokens.gather(1, child.clamp(min=0))
            mass = left.cumsum(-1)
            u = torch.rand(
                *old.shape, 1, dtype=mass.dtype, device=q.device, generator=self.generator
            )
            new = torch.searchsorted(mass, u * mass[..., -1:], right=True)
            both = torch.cat([old[..., None], new], -1).clamp(0, q.shape[-1] - 1)
            drawn = (child >= 0) & (old >= 0) & (left.gather(-1, both) > 0).all(-1)
            at = torch.where(drawn, child, 0)
            tokens.scatter_(1, at, torch.where(drawn, new[..., 0], draft.tokens[:, :1]))
            left = torch.where(drawn[..., None], left.scatter(-1, both[..., 1:], 0.0), left)
        return tokens

    def _count(
        self, tally: Tally, verdict: Verdict, emitted: Tensor, p: Tensor, favoured: Tensor
    ) -> None:
        """The first `emitted` [B] tokens of a verdict beside p [B, N, V]; under a rule that looks
        ahead, whose later tokens depend on how many it keeps, the first of each row."""
        at = torch.arange(verdict.path.shape[1], device=p.device)
        most = emitted.clamp(max=1) if self.engine.rule.looks_ahead else emitted
        law, favoured = (torch.take_along_dim(x, verdict.path[..., None], 1) for x in (p, favoured))
        sets = sets_of(law, favoured)
        tally.add(verdict.new, law, sets, at < most[:, None])


def _drafted_at(draft: Draft, p: Tensor) -> Tensor:
    """[B, N, V] bool: the draft tokens one deeper than each node."""
    tokens = draft.tokens[:, 1:]
    depth = draft.nodes.depth.expand_as(draft.tokens)
    flat = (depth[:, 1:] - 1) * p.shape[-1] + tokens.clamp(min=0)
    count = torch.zeros_like(p).flatten(1).scatter_add(1, flat, (tokens >= 0).to(p.dtype))
    return (count > 0).view_as(p).gather(1, depth[..., None].expand_as(p))
