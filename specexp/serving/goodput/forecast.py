"""What plans would bring at these rows and prices, and which plans to compare."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from specexp.policy import Plan
from specexp.serving.goodput.prices import Slowdown
from specexp.tree import Tree

PLAIN = Plan(Tree.chain(0))
CROWD = 2  # above so many rows, a pass is priced at its mean number of draft tokens


@dataclass
class Forecast(ABC):
    """Draft tokens are told apart by the row that they belong to, since some requests are easier
    than others (`ByRow`), or, where the drafter grades its drafts, by the grade, which predicts
    more (`ByGrade`).

    size: rows of the batch, and so of a budget; rows: those being decoded; start_s: seconds a round
    charged to each of these if it drafts. From the cost table: levels[depth][n], seconds in which n
    rows draft from `depth` to one deeper; verify[n], seconds of all else in a round with n draft
    tokens.
    """

    size: int
    rows: Sequence[int]
    start_s: Sequence[float]
    levels: Sequence[Sequence[float]]
    verify: Sequence[float]
    slowdown: Slowdown

    @abstractmethod
    def rate(self, plan: Plan) -> float:
        """Expected tokens a second of a row: the geometric mean over rows."""

    @abstractmethod
    def plans(self, gammas: Sequence[int], settled: Plan, less: bool) -> list[Plan]:
        """The best plans that draft, with `less` shallower ones too, and the settled plan if it
        still fits these rows."""

    @abstractmethod
    def still(self, settled: Plan) -> Plan:
        """The settled plan, adapted to these rows."""


@dataclass
class ByRow(Forecast):
    """Every row has an acceptance of its own. marginal[row][i]: P(draft tokens 1..i + 1 accepted);
    filled[row]: share of the requested draft tokens that the drafter makes; apart: whether rows may
    have draft lengths of their own; wide: 0, or, where passes compute padding too, the rows that
    are paid for at every depth."""

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


@dataclass
class ByGrade(Forecast):
    """All rows are alike, and passes leave out padding. often[grade]: how often a row is at that
    grade; marginal[grade][i]: P(draft tokens 1..i + 1 accepted) there; filled[grade]: share of the
    draft tokens requested there that the drafter makes."""

    often: list[float]
    marginal: list[list[float]]
    filled: list[float]

    def rate(self, plan: Plan) -> float:
        reach = plan.reach or (0,) * len(self.often)
        each = zip(self.often, self.marginal, reach, strict=True)
        tokens = 1 + sum(often * sum(marginal[:g]) for often, marginal, g in each)
        return tokens / self.seconds(plan.tree.depth, reach)

    def seconds(self, deepest: int, reach: Sequence[int]) -> float:
        """Expected seconds of a round in which rows draft as deep as the reach of their grade."""
        w, likely = len(self.rows), {0: 0.0}
        for often, share, g in zip(self.often, self.filled, reach, strict=True):
            likely[g] = likely.get(g, 0.0) + often * share
            likely[0] += often * (1 - share)
        drafting = sum(level[w] for level in self.levels[:deepest])
        start = sum(self.start_s) if deepest else 0.0
        return self.slowdown.factor(deepest) * (drafting + self._verify_s(likely) + start)

    def _verify_s(self, likely: dict[int, float]) -> float:
        """Expected seconds of all but drafting; likely[n]: P(a row drafts n tokens). Exact for
        few rows, since a pass may be faster with one token more; in a crowd at the mean."""
        w, verify = len(self.rows), self.verify
        if w > CROWD:
            at = w * sum([often * n for n, often in likely.items()])
            low = min(int(at), len(verify) - 2)
            return verify[low] + (at - low) * (verify[low + 1] - verify[low])
        total = {0: 1.0}  # P(all rows draft n tokens together)
        for _ in range(w):
            before, total = total, {}
            for n, chance in before.items():
                for more, often in likely.items():
                    total[n + more] = total.get(n + more, 0.0) + chance * often
        return sum([verify[n] * often for n, often in total.items()])

    def plans(self, gammas: Sequence[int], settled: Plan, less: bool) -> list[Plan]:
        limits = {*gammas, settled.tree.depth} - {0}
        return [self.best(limit) for limit in sorted(limits, reverse=True)]

    def still(self, settled: Plan) -> Plan:
        """The best plan that is no deeper than the settled one."""
        return self.best(settled.tree.depth) if settled.tree.depth else settled

    def best(self, most: int) -> Plan:
        """The plan of depth 1 to `most` with the highest rate. Greedy: draft tokens are added in
        the order of P(accepted) over P(made), which is what a token brings for what is paid."""
        cells = [
            (-chance / max(share, 1e-9), grade, depth)
            for grade, (each, share) in enumerate(zip(self.marginal, self.filled, strict=True))
            for depth, chance in enumerate(each[:most], 1)
        ]
        cells.sort()
        reach, tokens = [0] * len(self.often), 1.0
        fastest, chosen = 0.0, reach
        for _, grade, depth in cells:
            reach[grade] = depth
            tokens += self.often[grade] * self.marginal[grade][depth - 1]
            rate = tokens / self.seconds(max(reach), reach)
            if rate > fastest:
                fastest, chosen = rate, reach.copy()
        return graded(tuple(chosen))


@lru_cache(4096)
def budgeted(budget: tuple[int, ...]) -> Plan:
    """A chain as deep as the largest of these budgets of rows."""
    return Plan(Tree.chain(max(budget)), budget)


@lru_cache(4096)
def graded(reach: tuple[int, ...]) -> Plan:
    """A chain as deep as the largest of these depths of grades."""
    return Plan(Tree.chain(max(reach)), reach=reach)
