"""The plan in force, and when to think about it again.

The settled plan is replaced by the one with the highest rate if that gains more than `margin`: the
highest of several estimates is probably too high (the winner's curse). Deciding takes time: it
happens every `interval` rounds and when rows come or go, and ever less often, up to every
`longest_interval` rounds, while all rows draft or none does. In between, the depth of each drafting
row follows its last draft tokens (`adapt`), since texts become easy and hard within a few rounds.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from statistics import median_high

from specexp.policy import Load, Plan
from specexp.serving.goodput.acceptance import Beliefs
from specexp.serving.goodput.forecast import PLAIN, ByRow, Forecast, budgeted
from specexp.serving.goodput.prices import decoding, size_class

ODDS_RATIOS = [1e-6, *(2.0 ** (i / 8) for i in range(-32, 33))]  # at which thresholds are sought


@dataclass
class Choice:
    """gammas: the draft lengths that all rows may share."""

    gammas: tuple[int, ...]
    margin: float = 0.02  # relative gain for which the settled plan is changed
    interval: int = 24  # rounds between decisions: at first,
    longest_interval: int = 128  # and at most

    settled: Plan = field(default=PLAIN, init=False)
    shape: tuple[int, int] = field(default=(0, 0), init=False)  # rows for which it was made
    thresholds: list[tuple[float, float]] = field(default_factory=list, init=False)  # by depth
    left: int = field(default=0, init=False)  # rounds until the next decision,
    wait: int = field(init=False)  # and from that to the one after it

    def __post_init__(self) -> None:
        self.wait = self.interval

    def due(self, most: int) -> bool:
        """Count a round; whether it is time for a decision. The next is due in `most` rounds at
        most."""
        self.left -= 1
        if self.left >= 0:
            return False
        self.left = min(self.wait, most) - 1
        self.wait = min(2 * self.wait, self.longest_interval)
        return True

    def moved(self, load: Load, plan: Plan) -> bool:
        """Whether rows have come or gone since the last decision; while nobody drafts, whether the
        size class is another. plan: that of the last round."""
        shape = load.rows, len(load.streams)
        if plan.tree.depth or self.shape == shape:
            return self.shape != shape
        return size_class(load.rows) != size_class(self.shape[0])

    def rates(self, forecast: Forecast, less: bool = False) -> dict[Plan, float]:
        """The rate of plain decoding and of each of `Forecast.plans`."""
        plans = forecast.plans(self.gammas, self.settled, less)
        return {plan: forecast.rate(plan) for plan in (PLAIN, *plans)}

    def decide(self, load: Load, forecast: Forecast, rates: Mapping[Plan, float]) -> bool:
        """Settle the plan anew; whether drafting has begun or ended with it."""
        self.shape, before = (load.rows, len(load.streams)), self.settled
        best = max(rates, key=rates.__getitem__)
        now = forecast.still(before)
        if now not in rates:  # made for other rows
            now = max(rates.keys() - {PLAIN}, key=rates.__getitem__)
        self.settled = best if rates[best] > rates[now] * (1 + self.margin) else now
        switched = bool(self.settled.tree.depth) != bool(before.tree.depth)
        if switched or [*map(bool, self.settled.reach)] != [*map(bool, before.reach)]:
            self.wait = self.interval
        self.thresholds = []
        self._soon(load)
        return switched

    def watch(self, forecast: ByRow, believed: Beliefs) -> None:
        """Set thresholds[depth]: `Beliefs.evidence` from which on it pays a row to draft 1, 2, ...
        deep while the others go on as they are; prices are those of a row whose depth is the
        median."""
        depths = [self.settled.budget[row] for row in forecast.rows]
        row = depths.index(median_high(depth for depth in depths if depth))
        prices = []
        for depth in range(max(self.gammas) + 1):
            depths[row] = depth
            prices.append(len(depths) * math.log(forecast.seconds(depths)))

        @cache
        def best(odds_ratio: float) -> int:
            tokens, most, deep = 1.0, -prices[0], 0
            for depth, chance in enumerate(believed.marginal(odds_ratio), 1):
                tokens += chance
                rate = math.log(tokens) - prices[depth]
                if rate > most:
                    most, deep = rate, depth
            return deep  # never falls as the odds rise, so that it can be bisected

        at = (bisect_left(ODDS_RATIOS, depth, key=best) for depth in range(1, len(prices)))
        self.thresholds = [believed.evidence(ODDS_RATIOS[i]) for i in at if i < len(ODDS_RATIOS)]

    def adapt(self, load: Load) -> Plan:
        """Set each drafting row to the depth that its last draft tokens call for, all else
        unchanged."""
        depths, budget = [], self.settled.budget
        for row, depth in zip(load.streams, budget, strict=True):
            if depth and row:
                rejected, depth = row.judged - row.accepted, 0
                for slope, offset in self.thresholds:
                    if row.accepted < slope * rejected + offset:
                        break
                    depth += 1
            depths.append(depth)
        if tuple(depths) != budget and any(depths):
            self.settled = budgeted(tuple(depths))
            self._soon(load)
        return self.settled

    def _soon(self, load: Load) -> None:
        """Where some rows draft and others do not, decide after `interval` rounds at most: only a
        decision lets a row begin to draft."""
        budget = self.settled.budget
        if any(budget) and not all(budget[row] for row in decoding(load)):
            self.wait = self.interval
            self.left = min(self.left, self.interval - 1)
