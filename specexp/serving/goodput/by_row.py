"""What plans would bring where every row has an acceptance of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specexp.policy import Plan
from specexp.serving.goodput.forecast import Forecast, budgeted
from specexp.tree import Tree


@dataclass
class ByRow(Forecast):
    """marginal[row][i]: P(draft tokens 1..i + 1 accepted); filled[row]: share of the draft tokens
    asked for that the drafter makes; apart: whether rows may have draft lengths of their own; wide:
    0, or, where passes compute padding too, the rows that are paid for at every depth."""

    marginal: list[list[float]]
    filled: list[float]
    apart: bool
    wide: int

    def rate(self, plan: Plan) -> float:
        depths = [plan.depth(row) for row in self.rows]
        tokens = zip(self.marginal, depths, strict=True)
        gains = sum(math.log1p(sum(each[:g])) for each, g in tokens)
        return math.exp(gains / len(depths)) / self.seconds(depths)

    def seconds(self, depths: Sequence[int]) -> float:
        """Expected seconds of a round in which the rows draft so deep."""
        deepest = max(depths)
        counts = [self.wide or sum(g > d for g in depths) for d in range(deepest)]
        seconds = sum(level[n] for level, n in zip(self.levels, counts, strict=False))
        seconds += sum(start for start, g in zip(self.start_s, depths, strict=True) if g)
        drafted = sum(share * g for share, g in zip(self.filled, depths, strict=True))
        most = sum(depths)
        if self.wide:
            drafted = most = deepest * self.wide
        return self.slowdown.factor(deepest) * (seconds + self._verify_s(drafted, most))

    def _verify_s(self, drafted: float, most: int) -> float:
        """Expected seconds of all but drafting: of `most` draft tokens asked for, `drafted` are
        expected; linear between none and all of them."""
        least = self.verify[0]
        return least + drafted / most * (self.verify[most] - least) if most else least

    def plans(self, gammas: Sequence[int], settled: Plan, less: bool) -> list[Plan]:
        if not self.apart:
            return [Plan(Tree.chain(g)) for g in gammas]
        budget = [0] * self.size
        for row, depth in zip(self.rows, self.spread(), strict=True):
            budget[row] = depth
        most = max(budget)
        limits = (most, *(g for g in gammas if less and g < most))
        plans = [budgeted(tuple(min(g, d) for d in budget)) for g in limits]
        if len(settled.budget) == self.size and any(settled.budget[row] for row in self.rows):
            plans.append(settled)
        return plans

    def spread(self) -> tuple[int, ...]:
        """The draft length of each row that maximises the rate, at least one of them above 0.

        Greedy: draft tokens are ranked by gain in log tokens over marginal cost, a row's deeper
        token never before its shallower one. For each limit of the depth, the best prefix of that
        ranking is found; the best over all limits is taken.
        """
        levels, all_s = self.levels, self.verify[-1] - self.verify[0]
        token_s = (sum(n[-1] for n in levels) + all_s) / (len(self.verify) - 1)
        order = []
        for row, (each, share) in enumerate(zip(self.marginal, self.filled, strict=True)):
            before, worth = 1.0, math.inf
            for depth, chance in enumerate(each):
                gained = math.log1p(chance / before)
                costs = share * token_s + (0.0 if depth else self.start_s[row])
                worth = min(worth, gained / max(costs, 1e-12))
                order.append((-worth, row, depth, gained))
                before += chance
        order.sort()
        w, best, most, deepest = len(self.marginal), -math.inf, 0, 0
        for deep in range(len(levels)):
            factor = self.slowdown.factor(deep + 1)
            counts, count, gains, drafted, seconds = [0] * (deep + 1), 0, 0.0, 0.0, 0.0
            for at, (_, row, depth, gained) in enumerate(order):
                if depth > deep:
                    continue
                count, counts[depth] = count + 1, (n := counts[depth] + 1)
                seconds += levels[depth][n] - levels[depth][n - 1]
                drafted += self.filled[row]
                gains += gained
                if not depth:
                    seconds += self.start_s[row]
                took = factor * (seconds + self._verify_s(drafted, count))
                rate = gains / w - math.log(took)
                if rate > best:
                    best, most, deepest = rate, at, deep
        budget = [0] * w
        for _, row, depth, _ in order[: most + 1]:
            if depth <= deepest:
                budget[row] = depth + 1
        return tuple(budget)

    def still(self, settled: Plan) -> Plan:
        return settled
