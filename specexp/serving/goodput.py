"""Goodput: a load-aware policy that drafts what maximises the expected decoding rate.

*Objective.* For a plan P, with the draft length g_r of each of R rows,

    rate(P) = (product over r of E[tokens_r(g_r)]) ** (1 / R) / E[seconds(P)],

the geometric mean over rows of expected tokens a second. SmartSpec (Liu et al. 2024, arXiv
2406.14066, section 4) maximises the sum instead. But most of the time goes to the requests whose
guesses are rejected, and hurrying those that are fast anyway saves less of it than the sum says.
(Proportional fairness: Kelly 1997, Charging and rate control for elastic traffic.)

*Estimates.*
- `Beliefs`: the acceptance at each depth over all rows, and each row's odds ratio to it. Where the
  drafter grades its guesses (`Prices.grades`), each grade has an acceptance of its own instead.
- `filled`: the share of the guesses asked for that the drafter makes.
- seconds(P): the cost table (`Prices`) times `Slowdown`, learned for each draft length, apart for
  1, 2, 3-4, 5-8, ... rows. To it is added the drafter's prefill: of requests as they arrive, and,
  spread over the rounds that it will serve (`horizon`), of what the drafter lacks of a row.

*Decision* (`_decide`). The settled plan is replaced by the one with the highest rate if that gains
more than `margin`: the highest of several estimates is probably too high. Where passes leave out
padding (`Prices.packs`), each row has a depth of its own (`ByRow.spread`) or each grade has
(`ByGrade.best`); elsewhere all rows draft one of the `gammas`. Deciding takes time: it happens
every `interval` rounds and when rows come or go, and ever less often, up to every
`longest_interval` rounds, while all rows draft or none does. In between, the depth of each drafting
row follows its last guesses (`_adapt`).

*Exploration* (`_trial`). Every `gap` rounds, `trial` rounds go to another plan: one that would
be best if its time, and, where nobody drafts, acceptance too, were a standard error better than it
seems. Both may have changed since they were last seen. The gap doubles from `first_gap` up to
`longest_gap`; while somebody drafts it is shorter where trials seem to cost less than `trial_share`
of the time.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import median, median_high
from typing import Protocol

from specexp.policy import Load, Plan, Stream
from specexp.serving.cost_table import CALM
from specexp.serving.expected_rate import PLAIN, Beliefs, ByGrade, ByRow, Outlook, budgeted
from specexp.serving.slowdown import Slowdown
from specexp.trace import Step
from specexp.tree import Tree

GAMMAS = (1, 2, 3, 5)
ODDS_RATIOS = [1e-6, *(2.0 ** (i / 8) for i in range(-32, 33))]  # at which `_thresholds` looks
LONG = 32  # tokens of catch-up in a round, from which on its time says little about drafting


class Prices(Protocol):
    """What rounds cost: see `costs.Costs`."""

    @property
    def packs(self) -> bool: ...
    @property
    def grades(self) -> int: ...
    def verify_s(self, batch: float, tokens: float, context: float) -> float: ...
    def level_s(self, rows: float, depth: int, context: float) -> float: ...
    def catch_up_s(self, length: float) -> float: ...


@dataclass
class Goodput:
    """The policy that this file describes; one for one server, as it learns from every round."""

    costs: Prices
    gammas: tuple[int, ...] = GAMMAS
    horizon: int = 32  # rounds over which catching up is spread
    margin: float = 0.02  # relative gain for which the settled plan is changed
    interval: int = 24  # rounds between decisions: at first,
    longest_interval: int = 128  # and at most
    trial: int = 4  # rounds of a trial
    calm: int = CALM  # plain rounds after a draft that are not timed: its weights fill the caches
    first_gap: int = 64  # rounds between trials
    longest_gap: int = 2048
    trial_share: float = 0.002  # of the time: what trials may seem to cost
    prior: float = 0.8  # acceptance before anything is known: high, so that drafts are tried
    prior_guesses: float = 16.0  # judged guesses that the prior counts for
    row_weight: float = 16.0  # `Beliefs.weight` where it is decided who drafts,
    depth_weight: float = 5.0  # and in `_adapt`, where a mistake is soon mended
    fade: float = 0.995  # of all counts, a round, while somebody drafts,
    plain_fade: float = 0.999  # and while nobody does

    # acceptance; all counts fade
    judged: list[list[float]] = field(init=False)  # [grade][depth] guesses, to the first rejected
    kept: list[list[float]] = field(init=False)  # [grade][depth] guesses accepted
    met: list[float] = field(init=False)  # [grade] how often a row was at it,
    asked: list[float] = field(init=False)  # the guesses that it might have had there,
    made: list[float] = field(init=False)  # and those that it had
    believed: Beliefs = field(init=False)  # as of the last decision, with `depth_weight`
    # requests that arrived; fade, too
    arrived: float = field(default=0.0, init=False)
    lacked: float = field(default=0.0, init=False)  # tokens of them that the drafter had not read
    lasted: float = field(init=False)  # rounds in which they came
    # costs
    prices: dict[tuple[int, int], tuple[list[list[float]], list[float]]] = field(
        default_factory=dict, init=False
    )  # see `_prices`, [rows, context]
    slowdowns: dict[int, Slowdown] = field(default_factory=dict, init=False)  # [size class]
    # the decision
    settled: Plan = field(default=PLAIN, init=False)  # in force
    plan: Plan = field(default=PLAIN, init=False)  # of this round: the settled one or a trial
    shape: tuple[int, int] = field(default=(0, 0), init=False)  # rows for which it was made
    thresholds: list[tuple[float, float]] = field(default_factory=list, init=False)  # by depth
    # clocks, in rounds
    rounds: int = field(default=0, init=False)  # since the start
    left: int = field(default=0, init=False)  # until the next decision,
    wait: int = field(init=False)  # and from that to the one after it
    plainly: int = field(init=False)  # since somebody drafted
    due: int = field(init=False)  # the round of the next trial,
    gap: int = field(init=False)  # and from that to the one after it
    # rounds from which nothing was learned yet
    told: list[tuple[Load, Plan, Sequence[Step], float | None]] = field(
        default_factory=list, init=False
    )

    def __post_init__(self) -> None:
        grades = self.costs.grades
        self.judged = [[0.0] * self.deepest for _ in range(grades)]
        self.kept = [[0.0] * self.deepest for _ in range(grades)]
        self.met, self.asked, self.made = ([0.0] * grades for _ in range(3))
        self.believed = self.beliefs()
        self.lasted = float(self.first_gap)  # or the first requests would seem to be a flood
        self.wait = self.interval
        self.plainly = self.calm
        self.due = self.gap = self.first_gap

    @property
    def widest(self) -> int:
        return Tree.chain(self.deepest).room

    @property
    def deepest(self) -> int:
        return max(self.gammas)

    # decision

    def choose(self, load: Load) -> Plan:
        self.rounds += 1
        self.left -= 1
        if late := self.left < 0:
            self._digest()
            self.left = min(self.wait, self.rounds, max(1, self.due - self.rounds)) - 1
            self.wait = min(2 * self.wait, self.longest_interval)
        if late or self._moved(load):
            self.plan = self._decide(load)
        elif self.thresholds and self.plan is self.settled:
            self._adapt(load)
        return self.plan

    def _moved(self, load: Load) -> bool:
        """Whether rows have come or gone since the last decision; while nobody drafts, whether the
        size class is another."""
        shape = load.rows, len(load.streams)
        if self.plan.tree.depth or self.shape == shape:
            return self.shape != shape
        return _size_class(load.rows) != _size_class(self.shape[0])

    def _decide(self, load: Load) -> Plan:
        """The plan of this round: the settled one, decided anew, or a trial of another."""
        self.shape, before = (load.rows, len(load.streams)), self.settled
        seen = self._outlook(load)
        rates = self._rates(seen)
        best = max(rates, key=rates.__getitem__)
        now = seen.still(before)
        if now not in rates:  # made for other rows
            now = max(rates.keys() - {PLAIN}, key=rates.__getitem__)
        self.settled = best if rates[best] > rates[now] * (1 + self.margin) else now
        switched = bool(self.settled.tree.depth) != bool(before.tree.depth)
        if switched or [*map(bool, self.settled.reach)] != [*map(bool, before.reach)]:
            self.wait = self.interval
        if switched:  # look again after a trial's time: the estimates may have been too high
            self.gap = self.first_gap
            self.due = min(self.due, self.rounds + self.first_gap)
            self.left = min(self.left, self.trial - 1)
        self.thresholds = []
        if isinstance(seen, ByRow) and self.settled.budget:
            self.thresholds = self._thresholds(seen)
        self._decide_soon(load)
        return self._trial(load, seen, rates) if self.rounds >= self.due else self.settled

    def _rates(self, seen: Outlook, less: bool = False) -> dict[Plan, float]:
        """The rate of plain decoding and of each of `Outlook.plans`."""
        plans = seen.plans(self.gammas, self.settled, less)
        return {plan: seen.rate(plan) for plan in (PLAIN, *plans)}

    def _thresholds(self, seen: ByRow) -> list[tuple[float, float]]:
        """`Beliefs.evidence` from which on it pays a row to draft 1, 2, ... deep while the others
        go on as they are; prices are those of a row whose depth is the median."""
        depths = [self.settled.budget[row] for row in seen.rows]
        row = depths.index(median_high(depth for depth in depths if depth))
        prices = []
        for depth in range(self.deepest + 1):
            depths[row] = depth
            prices.append(len(depths) * math.log(seen.seconds(depths)))

        @cache
        def best(odds_ratio: float) -> int:
            tokens, most, deep = 1.0, -prices[0], 0
            for depth, chance in enumerate(self.believed.marginal(odds_ratio), 1):
                tokens += chance
                found = math.log(tokens) - prices[depth]
                if found > most:
                    most, deep = found, depth
            return deep  # never falls as the odds rise, so that it can be bisected

        at = (bisect_left(ODDS_RATIOS, depth, key=best) for depth in range(1, len(prices)))
        return [self.believed.evidence(ODDS_RATIOS[i]) for i in at if i < len(ODDS_RATIOS)]

    def _adapt(self, load: Load) -> None:
        """Set each drafting row to the depth that its last guesses call for, all else unchanged:
        texts become easy and hard within a few rounds, and deciding anew each round is too slow."""
        found, budget = [], self.settled.budget
        for row, depth in zip(load.streams, budget, strict=True):
            if depth and row:
                rejected, depth = row.judged - row.kept, 0
                for slope, offset in self.thresholds:
                    if row.kept < slope * rejected + offset:
                        break
                    depth += 1
            found.append(depth)
        if tuple(found) != budget and any(found):
            self.plan = self.settled = budgeted(tuple(found))
            self._decide_soon(load)

    def _decide_soon(self, load: Load) -> None:
        """Where some rows draft and others do not, decide after `interval` rounds at most: only a
        decision lets a row begin to draft."""
        budget = self.settled.budget
        if any(budget) and not all(budget[row] for row in _decoding(load)):
            self.wait = self.interval
            self.left = min(self.left, self.interval - 1)

    # exploration

    def _trial(self, load: Load, seen: Outlook, rates: dict[Plan, float]) -> Plan:
        """The plan to try now, which may be the settled one; sets when the next trial is due."""
        drafts = bool(self.settled.tree.depth)
        self.gap = min(2 * self.gap, self.longest_gap)
        plan = self._faster(seen) if drafts else self._hopeful(load, rates[PLAIN])
        if plan != self.settled:
            lasts = self.trial + (0 if plan.tree.depth else self.calm)
            self.left = lasts - 1
            if drafts:
                lost = lasts * (1 - seen.rate(plan) / rates[self.settled])
                self.gap = max(self.first_gap, min(self.gap, int(lost / self.trial_share)))
        self.due = self.rounds + self.gap
        return plan

    def _faster(self, seen: Outlook) -> Plan:
        """The best plan if all but the settled one are a standard error faster than predicted."""
        rates = self._rates(seen, less=True)

        def bound(plan: Plan) -> float:
            variance = seen.slowdown.variance(plan.tree.depth) if plan != self.settled else 0.0
            return rates[plan] * math.exp(math.sqrt(variance))

        return max(rates, key=bound)

    def _hopeful(self, load: Load, plain_rate: float) -> Plan:
        """`_faster` if acceptance is a standard error higher, too; only the row of it whose drafter
        lacks least, where to catch up all of them takes longer than a trial."""
        plan = self._faster(self._outlook(load, above=1.0))
        if not plan.budget:
            return plan
        behind = {row: s.behind for row, s in _decoding(load).items() if plan.budget[row]}
        if sum(self.costs.catch_up_s(n) for n in behind.values() if n) <= self.trial / plain_rate:
            return plan
        least = min(behind, key=behind.__getitem__)
        return budgeted(tuple(d * (row == least) for row, d in enumerate(plan.budget)))

    # estimates

    def beliefs(self, above: float = 0.0, grade: int | None = None) -> Beliefs:
        """Acceptance at a grade, or over all of them. The estimate of each depth is shrunk to that
        of the depth before it, and then raised by `above` standard errors."""
        found, before = [], self.prior
        hopes = self.prior_guesses / (1 if grade is None else self.costs.grades)
        these = slice(None) if grade is None else slice(grade, grade + 1)
        all_judged = [sum(depth) for depth in zip(*self.judged[these], strict=True)]
        all_kept = [sum(depth) for depth in zip(*self.kept[these], strict=True)]
        for judged, kept in zip(all_judged, all_kept, strict=True):
            before = min(1.0, (kept + hopes * before) / (judged + hopes))
            error = math.sqrt(before * (1 - before) / (judged + hopes)) if above else 0.0
            found.append(min(1.0, before + above * error))
        judged, kept = sum(all_judged) + hopes, sum(all_kept) + hopes * self.prior
        return Beliefs(found, kept / judged, self.row_weight)

    def _outlook(self, load: Load, above: float = 0.0) -> Outlook:
        """The prices and the acceptance of these rows, `above` standard errors better than it
        seems."""
        rows = _decoding(load)
        arriving = self._arriving_s() / len(rows)
        start_s = [arriving + self.costs.catch_up_s(n) / self.horizon if n else arriving
                   for n in self._behind(load, rows)]  # fmt: skip
        packs, apart = self.costs.packs, bool(load.streams) and self.costs.packs
        slowdown, prices = self._slowdown(_size_class(self._paid(load))), self._prices(load)
        known = load.rows, list(rows), start_s, *prices, slowdown
        if apart and self.costs.grades > 1:
            return ByGrade(*known, *self._grades(above))
        believed = self.beliefs(above)
        if not above:
            self.believed = replace(believed, weight=self.depth_weight)
        marginal = [believed.marginal(believed.odds_ratio(row)) for row in rows.values()]
        wide = 0 if packs else load.rows
        return ByRow(*known, marginal, self._filled(rows), apart, wide)

    def _grades(self, above: float) -> tuple[list[float], list[list[float]], list[float]]:
        """The last three fields of `ByGrade`."""
        grades = range(self.costs.grades)
        all_met = sum(self.met) + len(grades)
        counts = zip(self.made, self.asked, strict=True)
        return (
            [(met + 1) / all_met for met in self.met],
            [self.beliefs(above, grade).marginal() for grade in grades],
            [(made + 1) / (asked + 1) for made, asked in counts],
        )

    def _filled(self, rows: dict[int, Stream]) -> list[float]:
        """[rows]: the share of its guesses that the drafter makes; 1 where all are paid for."""
        if not self.costs.packs:
            return [1.0] * len(rows)
        weight = self.row_weight
        believed = weight * (sum(self.made) + weight) / (sum(self.asked) + weight)
        return [(s.made + believed) / (s.asked + weight) for s in rows.values()]

    def _arriving_s(self) -> float:
        """Seconds a round in which the drafter would prefill requests as they arrive."""
        if not self.arrived:
            return 0.0
        return self.arrived / self.lasted * self.costs.catch_up_s(self.lacked / self.arrived)

    def _behind(self, load: Load, rows: dict[int, Stream]) -> list[int]:
        """[rows]: tokens that the drafter has to catch up if the row begins to draft; 0 for rows
        that draft already."""
        fits = len(self.plan.budget) in (0, load.rows)
        now = self.plan if fits else Plan(self.settled.tree)
        return [0 if now.depth(row) else s.behind for row, s in rows.items()]

    def _paid(self, load: Load) -> int:
        """Rows that a pass is paid for."""
        return load.rows - load.streams.count(None) if self.costs.packs else load.rows

    def _slowdown(self, size_class: int) -> Slowdown:
        """That of rounds of this size class; at first with half of the errors of the nearest."""
        if size_class not in self.slowdowns:
            known = [(abs(other - size_class), s.mean) for other, s in self.slowdowns.items()]
            self.slowdowns[size_class] = Slowdown(self.deepest)
            if known:
                self.slowdowns[size_class].mean = [x / 2 for x in min(known)[1]]
        return self.slowdowns[size_class]

    def _prices(self, load: Load) -> tuple[list[list[float]], list[float]]:
        """`levels` and `verify` of `Outlook`, read from the table once for each size: a server's
        contexts are few."""
        b, context = self._paid(load), load.context
        if (b, context) not in self.prices:
            levels = [
                [0.0, *(self.costs.level_s(n, d, context) for n in range(1, b + 1))]
                for d in range(1, self.deepest + 1)
            ]
            most = self.deepest * b
            verify = [self.costs.verify_s(b, 1 + m / b, context) for m in range(most + 1)]
            self.prices[b, context] = levels, verify
        return self.prices[b, context]

    # learning

    def learn(self, load: Load, plan: Plan, steps: Sequence[Step], seconds: float | None) -> None:
        self.told.append((load, plan, steps, seconds))
        self.left += seconds is None  # a trial goes on until it has been timed

    def _digest(self) -> None:
        """Update all estimates on the rounds since the last decision. At once, since code that was
        pushed out of the caches is slow: learning after every round would cost more."""
        measured = defaultdict[tuple[int, int], list[float]](list)  # over predicted seconds
        for load, plan, steps, seconds in self.told:
            depth, behind = plan.tree.depth, 0
            self.plainly = 0 if depth else self.plainly + 1
            for row, stream in enumerate(load.streams):
                if stream and (lacks := stream.behind):
                    if not stream.rounds:
                        self.arrived, self.lacked = self.arrived + 1, self.lacked + lacks
                    if depth and plan.depth(row):
                        behind += lacks
            if depth:
                self._judge(load, plan, steps)
            calm = depth or self.plainly > self.calm
            if calm and behind < LONG and seconds is not None:
                predicted = self._table_s(load, plan, steps)
                predicted += self.costs.catch_up_s(behind) if behind else 0.0
                measured[_size_class(self._paid(load)), depth].append(seconds / predicted)
        for (size_class, depth), ratios in measured.items():
            self._slowdown(size_class).observe(depth, median(ratios), len(ratios))
        self.lasted += len(self.told)
        fade = (self.fade if self.settled.tree.depth else self.plain_fade) ** len(self.told)
        for counts in (*self.judged, *self.kept, self.met, self.asked, self.made):
            counts[:] = [fade * x for x in counts]
        self.arrived, self.lacked = fade * self.arrived, fade * self.lacked
        self.lasted *= fade
        self.told.clear()

    def _judge(self, load: Load, plan: Plan, steps: Sequence[Step]) -> None:
        """Count guesses judged and accepted. Easy rows draft deeper, so each outcome is weighted by
        its likelihood over all rows to that in this row: then the counts hold of all rows, at
        every depth."""
        shares = self.believed.conditional
        for step in steps:
            row, asked = load.streams and load.streams[step.row], plan.asked(step)
            ratio = self.believed.odds_ratio(row) if row and not plan.reach else 1.0
            grade, accepted = min(step.grade, self.costs.grades - 1), step.accepted
            judged, kept = self.judged[grade], self.kept[grade]
            for i in range(min(accepted + 1, asked)):
                weight = 1 - shares[i] + ratio * shares[i]
                if i < accepted:
                    weight /= ratio
                    kept[i] += weight
                judged[i] += weight
            self.met[grade] += 1
            self.asked[grade] += asked
            self.made[grade] += step.drafted

    def _table_s(self, load: Load, plan: Plan, steps: Sequence[Step]) -> float:
        """Seconds of such a round by the table, catching up apart."""
        levels, verify = self._prices(load)
        depth, made = plan.tree.depth, plan.tree.depth * load.rows
        counts = [load.rows] * depth
        if depth and self.costs.packs:
            depths = [plan.depth(row) for row in _decoding(load)]
            counts = [len([g for g in depths if g > d]) for d in range(depth)]
            made = sum(step.drafted for step in steps)
        drafting = sum([level[n] for level, n in zip(levels, counts, strict=False)])
        return drafting + verify[made]


def _size_class(rows: int) -> int:
    """0, 1, 2, 3, ... for 1, 2, 3-4, 5-8, ... rows: the table errs in another way about one row
    than about eight."""
    return (rows - 1).bit_length()


def _decoding(load: Load) -> dict[int, Stream]:
    """The rows being decoded; where nothing is known of rows, all of them, alike."""
    streams = load.streams or (Stream(),) * load.rows
    return {row: stream for row, stream in enumerate(streams) if stream}
