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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple, Protocol

from specexp.policy import Load, Plan, Stream
from specexp.serving.cost_table import CALM
from specexp.trace import Step

LONG = 32  # tokens of catch-up in a round, from which on its time says little about drafting


class CostTable(Protocol):
    """What rounds cost on a calm machine: see `cost_table.Costs`."""

    @property
    def packs(self) -> bool: ...
    @property
    def grades(self) -> int: ...
    def verify_s(self, batch: float, tokens: float, context: float) -> float: ...
    def level_s(self, rows: float, depth: int, context: float) -> float: ...
    def catch_up_s(self, length: float) -> float: ...


class PastRound(NamedTuple):
    """What `Policy.learn` receives of a round."""

    load: Load
    plan: Plan
    steps: Sequence[Step]
    seconds: float | None


@dataclass
class Prices:
    costs: CostTable
    deepest: int  # of a draft
    horizon: int = 32  # rounds over which catching up is spread
    calm: int = CALM  # plain rounds after a draft that are not timed: its weights fill the caches
    memory: float = 64.0  # rounds without a request before the first, or it would seem a flood

    tables: dict[tuple[int, int], tuple[list[list[float]], list[float]]] = field(
        default_factory=dict, init=False
    )  # see `table`, by (rows, context)
    slowdowns: dict[int, Slowdown] = field(default_factory=dict, init=False)  # by size class
    plainly: int = field(init=False)  # rounds since somebody drafted
    # requests that arrived; all three fade
    arrived: float = field(default=0.0, init=False)
    lacked: float = field(default=0.0, init=False)  # tokens of them that the drafter had not read
    lasted: float = field(init=False)  # rounds in which they came

    def __post_init__(self) -> None:
        self.plainly, self.lasted = self.calm, self.memory

    def table(self, load: Load) -> tuple[list[list[float]], list[float]]:
        """`levels` and `verify` of `Forecast`, read from the cost table once for each size: a
        server's contexts are few."""
        b, context = self._paid(load), load.context
        if (b, context) not in self.tables:
            levels = [
                [0.0, *(self.costs.level_s(n, d, context) for n in range(1, b + 1))]
                for d in range(1, self.deepest + 1)
            ]
            most = self.deepest * b
            verify = [self.costs.verify_s(b, 1 + m / b, context) for m in range(most + 1)]
            self.tables[b, context] = levels, verify
        return self.tables[b, context]

    def slowdown(self, load: Load) -> Slowdown:
        """That of rounds of this size class."""
        return self._slowdown(size_class(self._paid(load)))

    def _slowdown(self, size: int) -> Slowdown:
        """At first with half of the errors of the nearest size class."""
        if size not in self.slowdowns:
            others = [(abs(other - size), s.mean) for other, s in self.slowdowns.items()]
            self.slowdowns[size] = Slowdown(self.deepest)
            if others:
                self.slowdowns[size].mean = [x / 2 for x in min(others)[1]]
        return self.slowdowns[size]

    def start_s(self, rows: Mapping[int, Stream], plan: Plan) -> list[float]:
        """[rows]: seconds a round that are charged to a row if it drafts, `plan` being in force."""
        arriving = 0.0
        if self.arrived:
            lacked = self.lacked / self.arrived
            arriving = self.arrived / self.lasted * self.costs.catch_up_s(lacked)
        behind = [0 if plan.depth(row) else s.behind for row, s in rows.items()]
        share = arriving / len(rows)
        return [share + self.costs.catch_up_s(n) / self.horizon if n else share for n in behind]

    def learn(self, rounds: Sequence[PastRound]) -> None:
        """Compare the times of rounds with the cost table, and count the requests that arrived."""
        ratios = defaultdict[tuple[int, int], list[float]](list)  # measured over predicted time
        for load, plan, steps, seconds in rounds:
            depth, behind = plan.tree.depth, 0
            self.plainly = 0 if depth else self.plainly + 1
            for row, stream in enumerate(load.streams):
                if stream and (lacks := stream.behind):
                    if not stream.rounds:
                        self.arrived, self.lacked = self.arrived + 1, self.lacked + lacks
                    if depth and plan.depth(row):
                        behind += lacks
            calm = depth or self.plainly > self.calm
            if calm and behind < LONG and seconds is not None:
                predicted = self._table_s(load, plan, steps)
                predicted += self.costs.catch_up_s(behind) if behind else 0.0
                ratios[size_class(self._paid(load)), depth].append(seconds / predicted)
        for (size, depth), each in ratios.items():
            self._slowdown(size).observe(depth, median(each), len(each))
        self.lasted += len(rounds)

    def forget(self, share: float) -> None:
        """Let the counts of requests fade to this share."""
        self.arrived, self.lacked = share * self.arrived, share * self.lacked
        self.lasted *= share

    def _table_s(self, load: Load, plan: Plan, steps: Sequence[Step]) -> float:
        """Seconds of such a round by the table, catching up apart."""
        levels, verify = self.table(load)
        depth, drafted = plan.tree.depth, plan.tree.depth * load.rows
        counts = [load.rows] * depth
        if depth and self.costs.packs:
            depths = [plan.depth(row) for row in decoding(load)]
            counts = [len([g for g in depths if g > d]) for d in range(depth)]
            drafted = sum(step.drafted for step in steps)
        drafting = sum([level[n] for level, n in zip(levels, counts, strict=False)])
        return drafting + verify[drafted]

    def _paid(self, load: Load) -> int:
        """Rows that a pass is paid for."""
        return load.rows - load.streams.count(None) if self.costs.packs else load.rows


def size_class(rows: int) -> int:
    """0, 1, 2, 3, ... for 1, 2, 3-4, 5-8, ... rows: the table errs in another way about one row
    than about eight."""
    return (rows - 1).bit_length()


def decoding(load: Load) -> dict[int, Stream]:
    """The rows being decoded; where nothing is known of rows, all of them, alike."""
    streams = load.streams or (Stream(),) * load.rows
    return {row: stream for row, stream in enumerate(streams) if stream}


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
