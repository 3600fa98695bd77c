"""What a round costs here and now: the cost table, corrected for today's machine, and the drafter's
prefill.

The table was measured on a calm machine; how much longer rounds take now is learned for each draft
length, apart for 1, 2, 3-4, 5-8, ... rows (`Slowdown`). A drafter that reads prompts must catch up
before it drafts: with each request as it arrives, and with what it lacks of a row, which is spread
over the rounds that it will serve.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from specexp.policy import Load, Plan
from specexp.serving.cost_table import CALM, Costs
from specexp.trace import Step

LONG = 32  # tokens of catch-up in a round, from which on its time says little about drafting


class PastRound(NamedTuple):
    """What `Policy.learn` receives of a round."""

    load: Load
    plan: Plan
    steps: Sequence[Step]
    seconds: float | None


class Prices:
    """deepest: draft tokens of the longest draft."""

    horizon = 32  # rounds over which catching up is spread
    calm = CALM  # plain rounds after a draft that are not timed: its weights fill the caches
    memory = 64.0  # rounds without a request before the first, or it would seem a flood

    def __init__(self, costs: Costs, deepest: int) -> None:
        self.costs, self.deepest = costs, deepest
        self.slowdowns: dict[int, Slowdown] = {}  # by size class
        self.plainly = self.calm  # rounds since somebody drafted
        # requests that arrived, tokens of them that the drafter had not read, and the rounds in
        # which they came; all three fade
        self.arrived, self.lacked, self.lasted = 0.0, 0.0, self.memory

    def seconds(
        self, load: Load, gammas: Sequence[int], filled: float, drafts: bool
    ) -> list[float]:
        """[gammas]: expected seconds of a round with that draft length. filled: the share of the
        draft tokens that will be made, to which passes that leave out padding are linear; drafts:
        whether rows draft now, so that catching up is no further cost."""
        rows, slowdown = self._paid(load), self.slowdown(load)
        start = 0.0
        if self.arrived:
            lacked = self.lacked / self.arrived
            start = self.arrived / self.lasted * self.costs.catch_up_s(lacked)
        if not drafts:
            behind = [s.behind for s in load.streams if s and s.behind]
            start += sum(map(self.costs.catch_up_s, behind)) / self.horizon
        made = filled if self.costs.packs else 1.0
        seconds = []
        for gamma in gammas:
            least = self.costs.round_s(rows, gamma, load.context, 0)
            most = self.costs.round_s(rows, gamma, load.context)
            took = least + made * (most - least) + (start if gamma else 0.0)
            seconds.append(slowdown.factor(gamma) * took)
        return seconds

    def slowdown(self, load: Load) -> Slowdown:
        """That of rounds of this size class."""
        return self.of_size(size_class(self._paid(load)))

    def of_size(self, size: int) -> Slowdown:
        """At first with half of the errors of the nearest size class."""
        if size not in self.slowdowns:
            new = Slowdown(self.deepest)
            if self.slowdowns:
                nearest = min(self.slowdowns, key=lambda other: abs(other - size))
                new.mean = self.slowdowns[nearest].mean / 2
            self.slowdowns[size] = new
        return self.slowdowns[size]

    def learn(self, rounds: Sequence[PastRound]) -> None:
        """Compare the times of rounds with the cost table, and count the requests that arrived."""
        ratios = defaultdict[tuple[int, int], list[float]](list)  # measured over predicted time
        for load, plan, steps, seconds in rounds:
            gamma, behind = plan.tree.depth, 0
            self.plainly = 0 if gamma else self.plainly + 1
            for row, stream in enumerate(load.streams):
                if stream and (lacks := stream.behind):
                    if not stream.rounds:
                        self.arrived, self.lacked = self.arrived + 1, self.lacked + lacks
                    if plan.depth(row):
                        behind += lacks
            calm = gamma or self.plainly > self.calm
            if calm and behind < LONG and seconds is not None:
                rows = self._paid(load)
                drafted = sum([s.drafted for s in steps]) if self.costs.packs else gamma * rows
                predicted = self.costs.round_s(rows, gamma, load.context, drafted)
                predicted += self.costs.catch_up_s(behind) if behind else 0.0
                ratios[size_class(rows), gamma].append(seconds / predicted)
        for (size, gamma), each in ratios.items():
            self.of_size(size).observe(gamma, median(each), len(each))
        self.lasted += len(rounds)

    def forget(self, share: float) -> None:
        """Let the counts of requests fade to this share."""
        self.arrived, self.lacked = share * self.arrived, share * self.lacked
        self.lasted *= share

    def _paid(self, load: Load) -> int:
        """Rows that a pass is paid for."""
        return load.rows - load.streams.count(None) if self.costs.packs else load.rows


def size_class(rows: int) -> int:
    """0, 1, 2, 3, ... for 1, 2, 3-4, 5-8, ... rows: the table errs in another way about one row
    than about eight."""
    return (rows - 1).bit_length()


class Slowdown:
    """Measured over predicted time of rounds, for every draft length ("kind"; 0 is a plain round).

    log(measured / predicted) = machine + error[kind] + noise. `machine` is shared by all kinds;
    `error` is what the table has wrong about one. A Kalman filter (Kalman 1960) estimates both, so
    that a slow minute is not blamed on the kind of round that was running. Both drift, and an error
    that was not seen for long is as uncertain as at first. Outliers are clipped at two standard
    deviations: such a round was held up by something else.
    """

    # Standard deviations of logarithms: the priors of `machine`, of the error of plain rounds and
    # of that of a draft length; the machine's drift a round, the noise of one, the errors' drift.
    # Errors drift, and plain rounds have a prior of their own, because neighbours that use memory
    # slow down plain rounds more, and those that compute slow down drafts more.
    MACHINE, PLAIN, TABLE, DRIFT, NOISE, WANDER = 0.3, 0.3, 0.15, 0.02, 0.15, 0.006

    def __init__(self, drafts: int) -> None:
        """For draft lengths up to `drafts`."""
        self.prior = np.square([self.MACHINE, self.PLAIN, *[self.TABLE] * drafts])
        self.mean, self.covariance = np.zeros(len(self.prior)), np.diag(self.prior)

    def observe(self, kind: int, ratio: float, rounds: int) -> None:
        """Update on `rounds` rounds of a kind with this median of measured over predicted time."""
        covariance, at = self.covariance, 1 + kind
        covariance[0, 0] += self.DRIFT**2 * rounds
        errors = np.arange(1, len(covariance))
        drifted = covariance[errors, errors] + self.WANDER**2 * rounds
        covariance[errors, errors] = np.minimum(self.prior[1:], drifted)
        shared = covariance[0] + covariance[at]
        variance = float(shared[0] + shared[at]) + self.NOISE**2 / rounds
        most = 2 * math.sqrt(variance)
        error = math.log(max(ratio, 1e-9)) - self.mean[0] - self.mean[at]
        self.mean += shared * min(max(error, -most), most) / variance
        covariance -= np.outer(shared, shared) / variance

    def factor(self, kind: int) -> float:
        """Expected measured over predicted time of a round of that kind."""
        return math.exp(self.mean[0] + self.mean[1 + kind])

    def variance(self, kind: int) -> float:
        """Variance of the table's error about that kind, in logarithms."""
        return float(self.covariance[1 + kind, 1 + kind])
