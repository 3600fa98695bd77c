"""What a round of these rows promises and costs under a plan, and which plan promises most.

Guesses are told apart by whose they are, for some texts are easier than others (`ByRow`), or, where
the drafter itself says how sure it is, by that, which says more (`ByGrade`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from specexp.policy import Plan, Stream
from specexp.serving.pace import Pace
from specexp.tree import Tree

PLAIN = Plan(Tree.chain(0))
CROWD = 2  # more rows are a crowd


@dataclass(frozen=True)
class Beliefs:
    """What is thought of acceptance. shares: how likely a guess of each depth is kept if the one
    before it was; mean: how many are kept of all that are judged; weight: how many judged guesses
    of all rows are worth as much as one of the row itself."""

    shares: Sequence[float]
    mean: float
    weight: float

    @cached_property
    def usual(self) -> float:
        """The odds of all rows."""
        return self.mean / max(1 - self.mean, 1e-9)

    def better(self, row: Stream) -> float:
        """How many times its odds are those of all rows, at every depth."""
        judged, kept = row.judged + self.weight, row.kept + self.weight * self.mean
        return kept / max(judged - kept, 1e-9 * judged) / self.usual

    def enough(self, better: float) -> tuple[float, float]:
        """So many guesses kept for each that was refused, and so many more, make a row's odds so
        many times those of all rows."""
        odds = better * self.usual
        return odds, self.weight * (odds * (1 - self.mean) - self.mean)

    def chances(self, better: float = 1.0) -> list[float]:
        """How likely the guess of each depth is kept, and all before it, if its odds are so many
        times those of all rows."""
        chance, found = 1.0, []
        for share in self.shares:
            chance *= better * share / (1 - share + better * share)
            found.append(chance)
        return found


@dataclass
class Outlook(ABC):
    """size: of how many rows a plan is; rows: those that are written; begin: the seconds that it
    takes each of these to begin to draft. Of the table, at this size: levels [depth][rows that
    draft so deep], seconds to guess one deeper, and verify [guesses made], of all else."""

    size: int
    rows: Sequence[int]
    begin: Sequence[float]
    levels: Sequence[Sequence[float]]
    verify: Sequence[float]
    pace: Pace

    @abstractmethod
    def rate(self, plan: Plan) -> float:
        """Tokens a second of a row, their geometric mean."""

    @abstractmethod
    def plans(self, gammas: Sequence[int], settled: Plan, less: bool) -> list[Plan]:
        """The drafts that promise most, the same less deep if asked for, and what is settled, if
        that can still be."""

    def still(self, settled: Plan) -> Plan:
        """What is settled, for these rows."""
        return settled


@dataclass
class ByRow(Outlook):
    """Of each row: how likely the guess of each depth is kept, and all before it; and the share of
    its guesses that are made. apart: rows may draft unlike each other. wide: so many rows are paid
    for at every depth; 0: those alone that have a guess there, for passes leave out what is no
    token."""

    chances: list[list[float]]
    filled: list[float]
    apart: bool
    wide: int

    def rate(self, plan: Plan) -> float:
        depths = [plan.depth(row) for row in self.rows]
        gains = sum(math.log1p(sum(each[:g])) for each, g in zip(self.chances, depths, strict=True))
        return math.exp(gains / len(depths)) / self.seconds(depths)

    def seconds(self, depths: Sequence[int]) -> float:
        """How long such a round takes."""
        deepest = max(depths)
        counts = [self.wide or sum(g > d for g in depths) for d in range(deepest)]
        seconds = sum(level[n] for level, n in zip(self.levels, counts, strict=False))
        seconds += sum(begin for begin, g in zip(self.begin, depths, strict=True) if g)
        made = sum(share * g for share, g in zip(self.filled, depths, strict=True))
        most = sum(depths)
        if self.wide:
            made = most = deepest * self.wide
        return self.pace.slower(deepest) * (seconds + self._checked(made, most))

    def _checked(self, made: float, most: int) -> float:
        """Seconds of all but the guesses, if so many are made, or none, of so many at most."""
        least = self.verify[0]
        return least + made / most * (self.verify[most] - least) if most else least

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
        """How deep each row should draft, at least one of them: guesses are spent one by one on the
        row to which they bring most, for what they cost, under every limit of their depth."""
        levels, all_s = self.levels, self.verify[-1] - self.verify[0]
        guess_s = (sum(n[-1] for n in levels) + all_s) / (len(self.verify) - 1)
        order = []
        for row, (each, share) in enumerate(zip(self.chances, self.filled, strict=True)):
            before, worth = 1.0, math.inf
            for depth, chance in enumerate(each):
                gained = math.log1p(chance / before)
                costs = share * guess_s + (0.0 if depth else self.begin[row])
                worth = min(worth, gained / max(costs, 1e-12))
                order.append((-worth, row, depth, gained))
                before += chance
        order.sort()
        w, best, most, deepest = len(self.chances), -math.inf, 0, 0
        for deep in range(len(levels)):
            slower = self.pace.slower(deep + 1)
            counts, count, gains, made, seconds = [0] * (deep + 1), 0, 0.0, 0.0, 0.0
            for at, (_, row, depth, gained) in enumerate(order):
                if depth > deep:
                    continue
                count, counts[depth] = count + 1, (n := counts[depth] + 1)
                seconds += levels[depth][n] - levels[depth][n - 1]
                made += self.filled[row]
                gains += gained
                if not depth:
                    seconds += self.begin[row]
                found = gains / w - math.log(slower * (seconds + self._checked(made, count)))
                if found > best:
                    best, most, deepest = found, at, deep
        spent = [0] * w
        for _, row, depth, _ in order[: most + 1]:
            if depth <= deepest:
                spent[row] = depth + 1
        return tuple(spent)


@dataclass
class ByGrade(Outlook):
    """Of each grade: how often a row is at it; how likely the guess of each depth is kept, and all
    before it; and the share of guesses that are made. Passes leave out what is no token."""

    found: list[float]
    chances: list[list[float]]
    filled: list[float]

    def rate(self, plan: Plan) -> float:
        reach = plan.reach or (0,) * len(self.found)
        each = zip(self.found, self.chances, reach, strict=True)
        tokens = 1 + sum(often * sum(chances[:g]) for often, chances, g in each)
        return tokens / self.seconds(plan.tree.depth, reach)

    def seconds(self, deepest: int, reach: Sequence[int]) -> float:
        """How long such a round takes."""
        w, made = len(self.rows), {0: 0.0}
        for often, share, g in zip(self.found, self.filled, reach, strict=True):
            made[g] = made.get(g, 0.0) + often * share
            made[0] += often * (1 - share)
        guessed = sum(level[w] for level in self.levels[:deepest])
        begun = sum(self.begin) if deepest else 0.0
        return self.pace.slower(deepest) * (guessed + self._checked(made) + begun)

    def _checked(self, made: dict[int, float]) -> float:
        """Seconds of all but the guesses, if a row makes so many so often. In a crowd as many are
        made as on average."""
        w, verify = len(self.rows), self.verify
        if w > CROWD:
            at = w * sum([often * n for n, often in made.items()])
            less = min(int(at), len(verify) - 2)
            return verify[less] + (at - less) * (verify[less + 1] - verify[less])
        of_all = {0: 1.0}
        for _ in range(w):
            before, of_all = of_all, {}
            for n, likely in before.items():
                for more, often in made.items():
                    of_all[n + more] = of_all.get(n + more, 0.0) + likely * often
        return sum([verify[n] * often for n, often in of_all.items()])

    def plans(self, gammas: Sequence[int], settled: Plan, less: bool) -> list[Plan]:
        limits = {*gammas, settled.tree.depth} - {0}
        return [self.best(limit) for limit in sorted(limits, reverse=True)]

    def still(self, settled: Plan) -> Plan:
        """As deep as that; at which grades is found anew."""
        return self.best(settled.tree.depth) if settled.tree.depth else settled

    def best(self, most: int) -> Plan:
        """What promises most of all that drafts, and no deeper than that: guesses that are likely
        to be kept, for each that is paid for, come first."""
        cells = [
            (-chance / max(share, 1e-9), grade, depth)
            for grade, (each, share) in enumerate(zip(self.chances, self.filled, strict=True))
            for depth, chance in enumerate(each[:most], 1)
        ]
        cells.sort()
        reach, tokens = [0] * len(self.found), 1.0
        fastest, chosen = 0.0, reach
        for _, grade, depth in cells:
            reach[grade] = depth
            tokens += self.found[grade] * self.chances[grade][depth - 1]
            rate = tokens / self.seconds(max(reach), reach)
            if rate > fastest:
                fastest, chosen = rate, reach.copy()
        return graded(tuple(chosen))


@lru_cache(4096)
def budgeted(budget: tuple[int, ...]) -> Plan:
    return Plan(Tree.chain(max(budget)), budget)


@lru_cache(4096)
def graded(reach: tuple[int, ...]) -> Plan:
    return Plan(Tree.chain(max(reach)), reach=reach)
