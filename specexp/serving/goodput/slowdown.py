"""How much longer rounds take than the cost table says, while the machine's speed drifts."""

from __future__ import annotations

import math


class Slowdown:
    """Measured over predicted time of rounds, for every draft length ("kind"; 0 is a plain round).

    log(measured / predicted) = machine + error[kind] + noise. `machine` is shared by all kinds;
    `error` is what the table has wrong about one. A Kalman filter (Kalman 1960) estimates both, so
    that a slow minute is not blamed on the kind of round that was running. Both drift, and an error
    that was not seen for long is as uncertain as at first. Outliers are clipped at two standard
    deviations: such a round was held up by something else.
    """

    def __init__(
        self,
        drafts: int,
        machine: float = 0.3,
        plain: float = 0.3,
        table: float = 0.15,
        drift: float = 0.02,
        noise: float = 0.15,
        wander: float = 0.006,
    ) -> None:
        """Standard deviations of logarithms: the prior of `machine`, of the error of plain rounds
        and of that of each of `drafts` draft lengths; the machine's drift a round; the noise of one
        round; the drift of errors a round. Plain rounds have a prior of their own, and errors
        drift, because neighbours that use memory slow down plain rounds more, and those that
        compute slow down drafts more."""
        self.prior = [x * x for x in (machine, plain, *[table] * drafts)]
        self.mean = [0.0] * len(self.prior)
        self.covariance = [
            [x * (i == j) for j in range(len(self.prior))] for i, x in enumerate(self.prior)
        ]
        self.drift, self.noise, self.wander = drift**2, noise**2, wander**2

    def observe(self, kind: int, ratio: float, rounds: int) -> None:
        """Update on `rounds` rounds of a kind with this median of measured over predicted time."""
        covariance, mean, at = self.covariance, self.mean, 1 + kind
        covariance[0][0] += self.drift * rounds
        for i in range(1, len(mean)):
            covariance[i][i] = min(self.prior[i], covariance[i][i] + self.wander * rounds)
        shared = [row[0] + row[at] for row in covariance]
        variance = shared[0] + shared[at] + self.noise / rounds
        most = 2 * math.sqrt(variance)
        error = min(max(math.log(max(ratio, 1e-9)) - mean[0] - mean[at], -most), most)
        for i, part in enumerate(shared):
            mean[i] += part * error / variance
            covariance[i] = [
                x - part * y / variance for x, y in zip(covariance[i], shared, strict=True)
            ]

    def factor(self, kind: int) -> float:
        """Expected measured over predicted time of a round of that kind."""
        return math.exp(self.mean[0] + self.mean[1 + kind])

    def variance(self, kind: int) -> float:
        """Variance of the table's error about that kind, in logarithms."""
        return self.covariance[1 + kind][1 + kind]
