"""Greedy: draft the length that maximises expected tokens over measured seconds.

The policy to read first (SmartSpec's objective: Liu et al. 2024, arXiv 2406.14066, section 4), and
the one that `goodput` must beat. SIMULATED with 1 to 64 streams, it loses 0.5 to 3.3 % to the best
fixed choice in the mean and 7.4 % at worst where the cost table is right (goodput 0.0 to 1.6 and
5.5 %); where drafts take 1.3 times as long as the table says, 4.4 to 7.1 and 21 % (0.9 to 1.5 and
3.4 %): `goodput` learns what its table has wrong, greedy does not. Measured on two shared CPU cores
(target-10m with sibling-3m at 1, 4 and 16 streams): 6.5, 3.2 and -0.4 % (2.1, 1.4 and -1.5 %), give
or take 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Protocol

from specexp.policy import Load, Plan
from specexp.trace import Step
from specexp.tree import Tree

FADE, PLAIN_FADE = 0.99, 0.999  # of the counts, in a round that drafts and in one that does not
HOPE = 8.0  # draft tokens that count as accepted at first, and again after many plain rounds
TINY = 1e-9  # a depth that was not judged for thousands of rounds is hoped for, too


class RoundCosts(Protocol):
    def round_s(self, batch: float, gamma: float, context: float) -> float: ...


class Greedy:
    """costs: seconds of a round, as `cost_table.Costs`; gammas: the draft lengths to choose from.
    All rows draft alike."""

    def __init__(self, costs: RoundCosts, gammas: tuple[int, ...]) -> None:
        self.costs, self.gammas = costs, gammas
        self.widest = Tree.chain(max(gammas)).room
        self.judged = [HOPE] * max(gammas)  # draft tokens at depth 1, 2, ... that were looked at
        self.accepted = [HOPE] * max(gammas)

    def choose(self, load: Load) -> Plan:
        shares = [(a + TINY) / (j + TINY) for a, j in zip(self.accepted, self.judged, strict=True)]
        tokens = list(accumulate(accumulate(shares, mul), initial=1.0))  # of a round, by gamma

        def rate(gamma: int) -> float:
            return tokens[gamma] / self.costs.round_s(load.rows, gamma, load.context)

        return Plan(Tree.chain(max((0, *self.gammas), key=rate)))

    def learn(self, load: Load, plan: Plan, steps: Sequence[Step], seconds: float | None) -> None:
        fade = FADE if plan.tree.depth else PLAIN_FADE
        hope = 0.0 if plan.tree.depth else (1 - fade) * HOPE
        for counts in (self.judged, self.accepted):
            counts[:] = [fade * count + hope for count in counts]
        for step in steps:
            for i in range(min(step.accepted + 1, plan.requested(step))):
                self.judged[i] += 1
                self.accepted[i] += i < step.accepted
