"""What plans would bring where all rows are alike and drafts differ by the drafter's grade."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specexp.policy import Plan
from specexp.serving.goodput.forecast import Forecast, graded

CROWD = 2  # above so many rows, a pass is priced at its mean number of draft tokens


@dataclass
class ByGrade(Forecast):
    """Passes leave out padding. often[grade]: how often a row is at that grade; marginal[grade][i]:
    P(draft tokens 1..i + 1 accepted) there; filled[grade]: share of the draft tokens asked for
    there that the drafter makes."""

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
