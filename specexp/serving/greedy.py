"""Greedy: draft the length that maximises expected tokens over measured seconds.

The policy to read first (SmartSpec's objective: Liu et al. 2024, arXiv 2406.14066, section 4), and
the one that `goodput` must beat. SIMULATED with 1 to 64 streams, it loses 0.1 to 0.2 % to the best
fixed choice in the mean and 1.0 % at worst where the cost table is right (goodput 0.2 to 1.3 and
4.7 %); where drafts take 1.3 times as long as the table says, 2.1 to 6.4 and 19 % (0.3 to 2.5 and
7.0 %): `goodput` learns what its table has wrong, greedy does not.
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from specexp.policy import Load, Plan
from specexp.serving.cost_table import Costs
from specexp.trace import Step
from specexp.tree import Tree

FADE, PLAIN_FADE = 0.99, 0.999  # of the counts, in a round that drafts and in one that does not
HOPE = 8.0  # draft tokens that count as accepted at first, and again after many plain rounds
TINY = 1e-9  # a depth that was not judged for thousands of rounds is hoped for, too


class Greedy:
    """costs: seconds of a round; gammas: the draft lengths to choose from. All rows draft alike."""

    def __init__(self, costs: Costs, gammas: tuple[int, ...]) -> None:
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
            for i in range(min(step.accepted + 1, plan.depth(step.row))):
                self.judged[i] += 1
                self.accepted[i] += i < step.accepted
