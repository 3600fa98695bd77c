"""How long rounds of each kind take, learned while the machine speeds up and slows down."""

from __future__ import annotations

import math


class Pace:
    """How long rounds take, as a multiple of what the table says: the machine's pace, which drifts
    and is the same for all, times what the table has wrong about each kind of round.

    A Kalman filter (Kalman 1960) over the logarithms. So a slow minute is not held against the kind
    of round that it falls on, and kinds are compared by rounds that lie side by side. A round that
    took far longer than it should was held up by something else, and says little.
    """

    def __init__(
        self, drafts: int, machine: float, plain: float, table: float, drift: float, noise: float
    ) -> None:
        """In logarithms: by how much the machine may be off, and the table about plain rounds and
        about each kind of draft, the machine's drift a round and the noise of one. Plain rounds
        wait for memory, others for arithmetic too, and neighbours slow down one or the other."""
        known = [machine, plain, *[table] * drafts]
        self.mean = [0.0] * len(known)
        self.spread = [[x * x * (i == j) for j, x in enumerate(known)] for i in range(len(known))]
        self.drift, self.noise = drift**2, noise**2

    def see(self, kind: int, times: float, rounds: int) -> None:
        """So many rounds of a kind took so many times what the table says of them."""
        spread, mean, at = self.spread, self.mean, 1 + kind
        spread[0][0] += self.drift * rounds
        shared = [row[0] + row[at] for row in spread]
        variance = shared[0] + shared[at] + self.noise / rounds
        most = 2 * math.sqrt(variance)
        off = min(max(math.log(max(times, 1e-9)) - mean[0] - mean[at], -most), most)
        for i, part in enumerate(shared):
            mean[i] += part * off / variance
            spread[i] = [x - part * y / variance for x, y in zip(spread[i], shared, strict=True)]

    def slower(self, kind: int) -> float:
        """How many times longer than the table says rounds of a kind take."""
        return math.exp(self.mean[0] + self.mean[1 + kind])

    def doubt(self, kind: int) -> float:
        return self.spread[1 + kind][1 + kind]
