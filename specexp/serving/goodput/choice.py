"""The draft length in force, when to think about it again, and when to try another.

It is replaced by the one with the highest rate if that gains more than `margin`: the highest of
several estimates is probably too high (the winner's curse). Deciding takes time: it happens every
`interval` rounds and when rows come or go, and ever less often, up to every `longest_interval`
rounds, while nothing changes.

Every `gap` rounds, `trial` rounds go to the length that would be best if its time, and, where
nobody drafts, acceptance too, were a standard error better than it seems (optimism in the face of
uncertainty: Auer et al. 2002, Machine Learning 47): both may have changed since they were last
seen. The gap doubles from `first_gap` up to `longest_gap`; while somebody drafts it is shorter
where trials seem to cost less than `trial_share` of the time.
"""

import math
from collections.abc import Mapping

from specexp.serving.cost_table import CALM
from specexp.serving.goodput.prices import Slowdown, size_class


class Choice:
    margin = 0.02  # relative gain for which the settled length is changed
    interval, longest_interval = 24, 128  # rounds between decisions, at first and at most
    first_gap, longest_gap = 64, 2048  # rounds between trials
    trial = 4  # rounds of a trial
    calm = CALM  # more of plain rounds: see `Prices.calm`
    trial_share = 0.002  # of the time: what trials may seem to cost

    def __init__(self) -> None:
        self.settled = self.rows = 0  # the draft length, and the rows for which it was settled
        self.rounds = self.left = 0  # rounds so far, and until the next decision
        self.wait = self.interval  # rounds from that to the one after it
        self.trial_at = self.gap = self.first_gap  # the round of the next trial, and from that on

    def due(self) -> bool:
        """Count a round; whether it is time for a decision."""
        self.rounds += 1
        self.left -= 1
        if self.left >= 0:
            return False
        self.left = min(self.wait, self.rounds, max(1, self.trial_at - self.rounds)) - 1
        self.wait = min(2 * self.wait, self.longest_interval)
        return True

    def moved(self, rows: int, gamma: int) -> bool:
        """Whether rows have come or gone since the last decision; while nobody drafts, whether the
        size class is another. gamma: the draft length of the last round."""
        if gamma or self.rows == rows:
            return self.rows != rows
        return size_class(rows) != size_class(self.rows)

    def decide(self, rows: int, rates: Mapping[int, float]) -> None:
        """Settle the draft length anew. If drafting begins or ends with it, look again after a
        trial's time, since the estimates may have been too high, and try others soon."""
        before, best = self.settled, max(rates, key=rates.__getitem__)
        self.rows = rows
        if rates[best] > rates[before] * (1 + self.margin):
            self.settled = best
        if bool(self.settled) != bool(before):
            self.wait, self.gap = self.interval, self.first_gap
            self.trial_at = min(self.trial_at, self.rounds + self.first_gap)
            self.left = min(self.left, self.trial - 1)

    def attempt(
        self, rates: Mapping[int, float], hopeful: Mapping[int, float], slowdown: Slowdown
    ) -> int:
        """The draft length to try now, which may be the settled one, and when the next trial is
        due. hopeful: rates at an acceptance better than it seems."""
        settled = self.settled

        def bound(gamma: int) -> float:
            doubt = 0.0 if gamma == settled else math.sqrt(slowdown.variance(gamma))
            return hopeful[gamma] * math.exp(doubt)

        gamma = max(rates, key=bound)
        self.gap = min(2 * self.gap, self.longest_gap)
        if gamma != settled:
            lasts = self.trial + (0 if gamma else self.calm)
            self.left = lasts - 1
            if settled:
                cheap = int(lasts * (1 - rates[gamma] / rates[settled]) / self.trial_share)
                self.gap = max(self.first_gap, min(self.gap, cheap))
        self.trial_at = self.rounds + self.gap
        return gamma
