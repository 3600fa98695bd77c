"""Exploration: now and then a few rounds go to a draft length that is not the best by what is
known.

Every `gap` rounds, `trial` rounds go to the length that would be best if its time, and, where
nobody drafts, acceptance too, were a standard error better than it seems (optimism in the face of
uncertainty: Auer et al. 2002, Machine Learning 47): both may have changed since they were last
seen. The gap doubles from `first_gap` up to `longest_gap`; while somebody drafts it is shorter
where trials seem to cost less than `trial_share` of the time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from specexp.serving.cost_table import CALM
from specexp.serving.goodput.prices import Slowdown


@dataclass
class Trials:
    trial: int = 4  # rounds of a trial
    calm: int = CALM  # more of plain rounds: see `Prices.calm`
    first_gap: int = 64  # rounds between trials
    longest_gap: int = 2048
    trial_share: float = 0.002  # of the time: what trials may seem to cost

    due: int = field(init=False)  # the round of the next trial,
    gap: int = field(init=False)  # and from that to the one after it

    def __post_init__(self) -> None:
        self.due = self.gap = self.first_gap

    def soon(self, now: int) -> None:
        """Drafting has just begun or ended: let the next trial come as soon as the first did."""
        self.gap = self.first_gap
        self.due = min(self.due, now + self.first_gap)

    def best(self, rates: Mapping[int, float], slowdown: Slowdown, settled: int) -> int:
        """The best draft length if all but the settled one are a standard error faster than
        predicted."""

        def bound(gamma: int) -> float:
            variance = slowdown.variance(gamma) if gamma != settled else 0.0
            return rates[gamma] * math.exp(math.sqrt(variance))

        return max(rates, key=bound)

    def next(self, now: int) -> None:
        """Set when the next trial is due after one in round `now`."""
        self.gap = min(2 * self.gap, self.longest_gap)
        self.due = now + self.gap

    def begin(self, now: int, gamma: int, loss: float | None) -> int:
        """Rounds that the trial of this draft length lasts. loss: the share of their time that it
        seems to cost, if the next trial may come the sooner for that."""
        lasts = self.trial + (0 if gamma else self.calm)
        if loss is not None:
            self.gap = max(self.first_gap, min(self.gap, int(lasts * loss / self.trial_share)))
            self.due = now + self.gap
        return lasts
