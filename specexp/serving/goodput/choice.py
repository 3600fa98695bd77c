"""The draft length in force, and when to think about it again.

It is replaced by the one with the highest rate if that gains more than `margin`: the highest of
several estimates is probably too high (the winner's curse). Deciding takes time: it happens every
`interval` rounds and when rows come or go, and ever less often, up to every `longest_interval`
rounds, while nothing changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from specexp.serving.goodput.prices import size_class


@dataclass
class Choice:
    margin: float = 0.02  # relative gain for which the settled length is changed
    interval: int = 24  # rounds between decisions: at first,
    longest_interval: int = 128  # and at most

    settled: int = field(default=0, init=False)
    rows: int = field(default=0, init=False)  # for which it was settled
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

    def moved(self, rows: int, gamma: int) -> bool:
        """Whether rows have come or gone since the last decision; while nobody drafts, whether the
        size class is another. gamma: the draft length of the last round."""
        if gamma or self.rows == rows:
            return self.rows != rows
        return size_class(rows) != size_class(self.rows)

    def decide(self, rows: int, rates: Mapping[int, float]) -> bool:
        """Settle the draft length anew; whether drafting has begun or ended with it."""
        before, best = self.settled, max(rates, key=rates.__getitem__)
        self.rows = rows
        if rates[best] > rates[before] * (1 + self.margin):
            self.settled = best
        switched = bool(self.settled) != bool(before)
        if switched:
            self.wait = self.interval
        return switched
