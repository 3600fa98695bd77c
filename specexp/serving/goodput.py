"""The plan under which rows write fastest, by measured costs and acceptance so far."""

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
from specexp.serving.costs import CALM
from specexp.serving.outlook import PLAIN, Beliefs, ByGrade, ByRow, Outlook, budgeted
from specexp.serving.pace import Pace
from specexp.trace import Step
from specexp.tree import Tree

GAMMAS = (1, 2, 3, 5)
ODDS = [1e-6, *(2.0 ** (i / 8) for i in range(-32, 33))]  # of a row, in those of all rows
LONG = 32  # tokens: of texts of which its drafter lacks so many, a round reads only a part


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
    """The plan under which rows write fastest, by measured costs and acceptance so far.

    What is made as large as can be is the geometric mean of the tokens a second that the rows
    promise. Their sum is what SmartSpec takes (Liu et al. 2024, arXiv 2406.14066, section 4), but
    tokens of a row whose guesses are refused take longest, whenever they are written, and so most
    of the time goes to them: to hurry those who are fast anyway brings less than the round says.
    (Proportional fairness: Kelly 1997, Charging and rate control for elastic traffic.)

    Expected tokens follow from two running estimates: how often the i-th guess is kept given those
    before it, over all rows, and by how much each row's odds are better or worse. Where passes
    leave out what is no token (`Prices.packs`), guesses are spent one by one on whichever row they
    bring most, for what they cost; else every row drafts, one of the `gammas`. A drafter that says
    how sure it is (`Prices.grades`) knows more of its guesses than its rows' past does: there each
    grade has estimates of its own, and how deep to draft at each is what is decided (`outlook.py`).
    Costs come from the table and from how rounds of each kind compare with it, learned apart for
    few rows and for many (`Pace`). Whoever drafts pays for the drafter's reading, of texts as they
    come and, spread over the rounds that this will serve, of what it lacks of those there are. What
    it has settled on is changed only for a gain of `margin`: what promises most is often what seems
    better than it is. It is thought about every `hold` rounds and when rows come or go, and, since
    that takes time, ever less often while all draft or nobody does, up to every `seldom` rounds; in
    between each row that drafts may do so deeper or less deep, as its last guesses say (`_adapt`).
    The table may be wrong: now and then `trial` rounds go to what may be better than it says, first
    after `probe` rounds, then at ever longer intervals of up to `rarest`, and more often if that
    seems to take no more than a `share` of the time: what is nearly as good costs little to know
    better. The first `calm` steps after a draft take longer, for a drafter's weights leave the
    caches slowly: they do not count, and a trial not to draft lasts as much longer. While nothing
    is drafted nothing is learned, and what was learned fades: drafts are tried as often, if they
    would pay at the best that acceptance may be.
    """

    costs: Prices
    gammas: tuple[int, ...] = GAMMAS
    horizon: int = 32  # rounds that a row's drafts are likely to last, and
    stays: int = 128  # those of all rows
    margin: float = 0.02
    hold: int = 24
    seldom: int = 128
    trial: int = 4
    calm: int = CALM
    probe: int = 64
    rarest: int = 2048
    share: float = 0.002
    hoped: float = 0.8  # acceptance before anything is known: who does not draft learns little
    hopes: float = 16.0  # guesses that this counts as
    weight: float = 16.0  # and what is known of all rows, beside what is known of one;
    nimble: float = 5.0  # the same where all that is in question is how deep it drafts
    fade: float = 0.995
    doubts: tuple[float, float, float, float, float] = (0.3, 0.3, 0.15, 0.02, 0.15)  # see Pace
    few: int = 4  # rounds of one depth, at least, whose times are looked at together

    judged: list[list[float]] = field(init=False)  # by grade and depth
    kept: list[list[float]] = field(init=False)
    met: list[float] = field(init=False)  # how often a row was at each grade, the guesses that it
    asked: list[float] = field(init=False)  # could have made there,
    made: list[float] = field(init=False)  # and those that it did
    begun: float = field(default=0.0, init=False)  # texts that came, tokens of them, rounds
    length: float = field(default=0.0, init=False)
    lasted: float = field(default=0.0, init=False)
    paces: dict[int, Pace] = field(default_factory=dict, init=False)  # see _size
    settled: Plan = field(default=PLAIN, init=False)
    plan: Plan = field(default=PLAIN, init=False)  # of this round, which may be a trial,
    shape: tuple[int, int] = field(default=(0, 0), init=False)  # thought about with so many rows
    tables: dict[tuple[int, int], tuple[list[list[float]], list[float]]] = field(
        default_factory=dict, init=False
    )
    left: int = field(default=0, init=False)  # rounds for which it is not thought about,
    held: int = field(init=False)  # and after the next thought
    told: list[tuple[Load, Plan, Sequence[Step], float | None]] = field(
        default_factory=list, init=False
    )
    times: defaultdict[tuple[int, int], list[float]] = field(init=False)  # [size, depth], in those
    believed: Beliefs = field(init=False)
    deeper: list[tuple[float, float]] = field(default_factory=list, init=False)  # see _turns
    plainly: int = field(init=False)  # rounds since somebody drafted
    rounds: int = field(default=0, init=False)
    due: int = field(default=0, init=False)  # the round that tries something else
    gap: int = field(default=0, init=False)  # and how many rounds that comes after the last one

    def __post_init__(self) -> None:
        grades = self.costs.grades
        self.judged = [[0.0] * self.deepest for _ in range(grades)]
        self.kept = [[0.0] * self.deepest for _ in range(grades)]
        self.met, self.asked, self.made = ([0.0] * grades for _ in range(3))
        self.due = self.gap = self.probe
        self.held = self.hold
        self.times = defaultdict(list)
        self.plainly = self.calm
        self.lasted = float(self.probe)  # or all that come at first would seem to come for ever
        self.believed = self.beliefs()

    @property
    def widest(self) -> int:
        return Tree.chain(self.deepest).room

    @property
    def deepest(self) -> int:
        return max(self.gammas)

    def beliefs(self, above: float = 0.0, grade: int | None = None) -> Beliefs:
        """Of P(guess i kept given that guess i - 1 was), i = 1, 2, ..., at a grade or at all; each
        shrunk to the one before, and `above` standard errors higher than that."""
        found, before = [], self.hoped
        hopes = self.hopes / (1 if grade is None else self.costs.grades)
        these = slice(None) if grade is None else slice(grade, grade + 1)
        all_judged = [sum(depth) for depth in zip(*self.judged[these], strict=True)]
        all_kept = [sum(depth) for depth in zip(*self.kept[these], strict=True)]
        for judged, kept in zip(all_judged, all_kept, strict=True):
            before = min(1.0, (kept + hopes * before) / (judged + hopes))
            error = math.sqrt(before * (1 - before) / (judged + hopes)) if above else 0.0
            found.append(min(1.0, before + above * error))
        judged, kept = sum(all_judged) + hopes, sum(all_kept) + hopes * self.hoped
        return Beliefs(found, kept / judged, self.weight)

    def choose(self, load: Load) -> Plan:
        self.rounds += 1
        self.left -= 1
        if late := self.left < 0:
            self._digest()
            self.left = min(self.held, self.rounds, max(1, self.due - self.rounds)) - 1
            self.held = min(2 * self.held, self.seldom)
        if late or self._moved(load):
            self.plan = self._think(load)
        elif self.deeper and self.plan is self.settled:
            self._adapt(load)
        return self.plan

    def _moved(self, load: Load) -> bool:
        """Have rows come or gone since it was thought about; where nobody drafts, many?"""
        shape = load.rows, len(load.streams)
        if self.plan.tree.depth or self.shape == shape:
            return self.shape != shape
        return _size(load.rows) != _size(self.shape[0])

    def _adapt(self, load: Load) -> None:
        """Each row that drafts does so as deep as now seems best for it if nothing else changes:
        texts become easy and hard within a few rounds."""
        found, budget = [], self.settled.budget
        for row, depth in zip(load.streams, budget, strict=True):
            if depth and row:
                refused, depth = row.judged - row.kept, 0
                for odds, more in self.deeper:
                    if row.kept < odds * refused + more:
                        break
                    depth += 1
            found.append(depth)
        if tuple(found) != budget and any(found):
            self.plan = self.settled = budgeted(tuple(found))
            self._stay(load)

    def _stay(self, load: Load) -> None:
        """A row that has stopped drafting begins again only with a thought: not too late."""
        budget = self.settled.budget
        if any(budget) and not all(budget[row] for row in _written(load)):
            self.held = self.hold
            self.left = min(self.left, self.hold - 1)

    def _think(self, load: Load) -> Plan:
        self.shape, before = (load.rows, len(load.streams)), self.settled
        seen = self._outlook(load)
        rates = self._rates(seen)
        best = max(rates, key=rates.__getitem__)
        now, drafted = seen.still(before), bool(before.tree.depth)
        if now not in rates:  # made for other rows
            now = max(rates.keys() - {PLAIN}, key=rates.__getitem__)
        self.settled = best if rates[best] > rates[now] * (1 + self.margin) else now
        drafts = bool(self.settled.tree.depth)
        if drafts != drafted or [*map(bool, self.settled.reach)] != [*map(bool, before.reach)]:
            self.held = self.hold  # who begins to draft may soon be seen not to be worth it
        if drafts != drafted:
            self.gap = self.probe
            self.due = min(self.due, self.rounds + self.probe)
            self.left = min(self.left, self.trial - 1)  # it may have been for what is hoped alone
        self.deeper = []
        if isinstance(seen, ByRow) and self.settled.budget:
            self.deeper = self._turns(seen)
        self._stay(load)
        if self.rounds < self.due:
            return self.settled
        self.gap = min(2 * self.gap, self.rarest)
        plan = self._promising(seen) if drafts else self._hopeful(load, rates[PLAIN])
        if plan != self.settled:
            lasts = self.trial + (0 if plan.tree.depth else self.calm)
            self.left = lasts - 1
            if drafts:
                lost = lasts * (1 - seen.rate(plan) / rates[self.settled])
                self.gap = max(self.probe, min(self.gap, int(lost / self.share)))
        self.due = self.rounds + self.gap
        return plan

    def _promising(self, seen: Outlook) -> Plan:
        """What may be best if rounds so deep are as fast as is still likely: the table may be wrong
        about it."""
        rates = self._rates(seen, less=True)

        def hope(plan: Plan) -> float:
            doubt = seen.pace.doubt(plan.tree.depth) if plan != self.settled else 0.0
            return rates[plan] * math.exp(math.sqrt(doubt))

        return max(rates, key=hope)

    def _hopeful(self, load: Load, plainly: float) -> Plan:
        """What may pay, where nobody drafts, if acceptance is as good as is still likely. If its
        drafter cannot catch up while a trial lasts, it is for the row alone that lacks least."""
        hoped = self._rates(self._outlook(load, above=1.0))
        plan = max(hoped, key=hoped.__getitem__)
        if not plan.budget:
            return plan
        behind = {row: s.behind for row, s in _written(load).items() if plan.budget[row]}
        if sum(self.costs.catch_up_s(n) for n in behind.values() if n) <= self.trial / plainly:
            return plan
        least = min(behind, key=behind.__getitem__)
        return budgeted(tuple(d * (row == least) for row, d in enumerate(plan.budget)))

    def _turns(self, seen: ByRow) -> list[tuple[float, float]]:
        """When it is best for a row that it drafts 1, 2, ... deep, if the others go on as they are:
        if it has had so many guesses kept for each that was refused, and so many more. What that
        takes is asked of one that is as deep as most."""
        depths = [self.settled.budget[row] for row in seen.rows]
        row = depths.index(median_high(depth for depth in depths if depth))
        prices = []
        for depth in range(self.deepest + 1):
            depths[row] = depth
            prices.append(len(depths) * math.log(seen.seconds(depths)))

        @cache
        def best(better: float) -> int:
            tokens, most, deep = 1.0, -prices[0], 0
            for depth, chance in enumerate(self.believed.chances(better), 1):
                tokens += chance
                found = math.log(tokens) - prices[depth]
                if found > most:
                    most, deep = found, depth
            return deep  # never less for better odds

        at = (bisect_left(ODDS, depth, key=best) for depth in range(1, len(prices)))
        return [self.believed.enough(ODDS[i]) for i in at if i < len(ODDS)]

    def _rates(self, seen: Outlook, less: bool = False) -> dict[Plan, float]:
        """Tokens a second of a row under plain decoding and under `Outlook.plans`."""
        plans = seen.plans(self.gammas, self.settled, less)
        return {plan: seen.rate(plan) for plan in (PLAIN, *plans)}

    def _outlook(self, load: Load, above: float = 0.0) -> Outlook:
        """above: so many standard errors is acceptance better than it seems."""
        rows = _written(load)
        lasting = self.horizon if self.settled.tree.depth else self.stays
        coming = self._coming() / len(rows)
        begin = [coming + self.costs.catch_up_s(n) / lasting if n else coming
                 for n in self._behind(load, rows)]  # fmt: skip
        packs, apart = self.costs.packs, bool(load.streams) and self.costs.packs
        pace, prices = self._pace(_size(self._paid(load))), self.priced(load)
        known = load.rows, list(rows), begin, *prices, pace
        if apart and self.costs.grades > 1:
            return ByGrade(*known, *self._grades(above))
        believed = self.beliefs(above)
        if not above:
            self.believed = replace(believed, weight=self.nimble)
        chances = [believed.chances(believed.better(row)) for row in rows.values()]
        wide = 0 if packs else load.rows
        return ByRow(*known, chances, self._filled(rows), apart, wide)

    def _grades(self, above: float) -> tuple[list[float], list[list[float]], list[float]]:
        """How often a row is at each, the chances of its guesses there, and how many are made."""
        grades = range(self.costs.grades)
        all_met = sum(self.met) + len(grades)
        counts = zip(self.made, self.asked, strict=True)
        return (
            [(met + 1) / all_met for met in self.met],
            [self.beliefs(above, grade).chances() for grade in grades],
            [(made + 1) / (asked + 1) for made, asked in counts],
        )

    def _paid(self, load: Load) -> int:
        """The rows that a pass is paid for."""
        return load.rows - load.streams.count(None) if self.costs.packs else load.rows

    def _pace(self, size: int) -> Pace:
        """That of rounds of this size; at first, half of what is thought of the nearest one."""
        if size not in self.paces:
            known = [(abs(other - size), pace.mean) for other, pace in self.paces.items()]
            self.paces[size] = Pace(self.deepest, *self.doubts)
            if known:
                self.paces[size].mean = [x / 2 for x in min(known)[1]]
        return self.paces[size]

    def _filled(self, rows: dict[int, Stream]) -> list[float]:
        """[rows]: the share of their guesses that is paid for: a drafter may not make all."""
        if not self.costs.packs:
            return [1.0] * len(rows)
        weight = self.weight
        believed = weight * (sum(self.made) + weight) / (sum(self.asked) + weight)
        return [(s.made + believed) / (s.asked + weight) for s in rows.values()]

    def _coming(self) -> float:
        """Seconds a round for which a drafter reads the texts that come."""
        if not self.begun:
            return 0.0
        return self.begun / self.lasted * self.costs.catch_up_s(self.length / self.begun)

    def _behind(self, load: Load, rows: dict[int, Stream]) -> list[int]:
        """How much the drafter has to read of each row that does not draft so far."""
        fits = len(self.plan.budget) in (0, load.rows)
        now = self.plan if fits else Plan(self.settled.tree)
        return [0 if now.depth(row) else s.behind for row, s in rows.items()]

    def priced(self, load: Load) -> tuple[list[list[float]], list[float]]:
        """What the table says at this size, read once, for a server's windows are few: seconds of
        the guess of a depth [depth][rows that draft so deep], and of all else of a round [guesses
        made]."""
        b = self._paid(load)
        if (b, load.context) not in self.tables:
            deepest, context = self.deepest, load.context
            levels = [
                [0.0, *(self.costs.level_s(n, d, context) for n in range(1, b + 1))]
                for d in range(1, deepest + 1)
            ]
            verify = [self.costs.verify_s(b, 1 + m / b, context) for m in range(deepest * b + 1)]
            self.tables[b, load.context] = levels, verify
        return self.tables[b, load.context]

    def learn(self, load: Load, plan: Plan, steps: Sequence[Step], seconds: float | None) -> None:
        self.told.append((load, plan, steps, seconds))
        self.left += seconds is None

    def _digest(self) -> None:
        """Learn from all rounds since the last thought at once: each alone would be as slow as code
        is that has just been swept from the caches."""
        for load, plan, steps, seconds in self.told:
            depth, behind = plan.tree.depth, 0
            self.plainly = 0 if depth else self.plainly + 1
            for row, stream in enumerate(load.streams):
                if stream and (lacks := stream.behind):
                    if not stream.rounds:
                        self.begun, self.length = self.begun + 1, self.length + lacks
                    if depth and plan.depth(row):
                        behind += lacks
            if depth:
                self._judge(load, plan, steps)
            calm = depth or self.plainly > self.calm
            if calm and behind < LONG and seconds is not None:
                price = self._drafting_s(load, plan) + self._checking_s(load, plan, steps)
                price += self.costs.catch_up_s(behind) if behind else 0.0
                self.times[_size(self._paid(load)), depth].append(seconds / price)
        for (size, depth), times in self.times.items():
            if len(times) >= self.few:
                self._pace(size).see(depth, median(times), len(times))
                times.clear()
        self.lasted += len(self.told)
        fade = (self.fade if self.settled.tree.depth else 0.999) ** len(self.told)
        for counts in (*self.judged, *self.kept, self.met, self.asked, self.made):
            counts[:] = [fade * x for x in counts]
        self.begun, self.length = fade * self.begun, fade * self.length
        self.lasted *= fade
        self.told.clear()

    def _judge(self, load: Load, plan: Plan, steps: Sequence[Step]) -> None:
        """Easy rows draft deeper, and so each answer counts as often as it is likelier of all rows
        than of this one: what is learned is of all, at every depth."""
        shares = self.believed.shares
        for step in steps:
            row, asked = load.streams and load.streams[step.row], plan.asked(step)
            better = self.believed.better(row) if row and not plan.reach else 1.0
            grade, accepted = min(step.grade, self.costs.grades - 1), step.accepted
            judged, kept = self.judged[grade], self.kept[grade]
            for i in range(min(accepted + 1, asked)):
                weight = 1 - shares[i] + better * shares[i]
                if i < accepted:
                    weight /= better
                    kept[i] += weight
                judged[i] += weight
            self.met[grade] += 1
            self.asked[grade] += asked
            self.made[grade] += step.drafted

    def _drafting_s(self, load: Load, plan: Plan) -> float:
        """What the table says of the guesses of a plan."""
        levels = self.priced(load)[0][: plan.tree.depth]
        if not (levels and self.costs.packs):
            return sum(level[load.rows] for level in levels)
        depths = [plan.depth(row) for row in _written(load)]
        return sum([level[len([g for g in depths if g > d])] for d, level in enumerate(levels)])

    def _checking_s(self, load: Load, plan: Plan, steps: Sequence[Step]) -> float:
        """And of all else of such a round."""
        made = plan.tree.depth * load.rows
        if made and self.costs.packs:
            made = sum(step.drafted for step in steps)
        return self.priced(load)[1][made]


def _size(rows: int) -> int:
    """The power of two up to which the rows are. What the table has wrong about one row is not what
    it has wrong about eight."""
    return (rows - 1).bit_length()


def _written(load: Load) -> dict[int, Stream]:
    """The rows that are being written; where nothing is said of rows, all are alike."""
    streams = load.streams or (Stream(),) * load.rows
    return {row: stream for row, stream in enumerate(streams) if stream}
