"""How much to draft at this load: from never to whatever promises most tokens a second.

A policy sees what is known when a round begins (`Load`), answers with a plan, and is told how that
went. It is named `never`, `always:3`, `threshold:3,8`, `table:1=5,8=2,16=0`, `goodput` or `bandit`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from specexp.errors import UserError
from specexp.policy import Fixed, Load, Plan, Policy, Stream
from specexp.trace import Step
from specexp.tree import MOST, Tree

GAMMAS = (1, 2, 3, 5)
SPREAD = -1  # in place of so many guesses for every row: as many as each deserves


class Prices(Protocol):
    """What rounds cost: see `costs.Costs`."""

    @property
    def packs(self) -> bool: ...
    def verify_s(self, batch: float, tokens: float, context: float) -> float: ...
    def level_s(self, rows: float, depth: int, context: float) -> float: ...
    def catch_up_s(self, length: float) -> float: ...


@dataclass(frozen=True)
class Threshold:
    """gamma guesses while no more than `most` rows are in use."""

    gamma: int
    most: int

    @property
    def widest(self) -> int:
        return Tree.chain(self.gamma).room

    def choose(self, load: Load) -> Plan:
        return Plan(Tree.chain(self.gamma if load.rows <= self.most else 0))

    def learn(self, load: Load, plan: Plan, steps: Sequence[Step], seconds: float) -> None:
        pass


@dataclass(frozen=True)
class Table:
    """Pairs (rows, gamma), rising: from that many rows on, so many guesses."""

    entries: tuple[tuple[int, int], ...]

    @property
    def widest(self) -> int:
        return Tree.chain(max(gamma for _, gamma in self.entries)).room

    def choose(self, load: Load) -> Plan:
        at = bisect_right(self.entries, (load.rows, math.inf)) - 1
        return Plan(Tree.chain(self.entries[at][1] if at >= 0 else 0))

    def learn(self, load: Load, plan: Plan, steps: Sequence[Step], seconds: float) -> None:
        pass


@dataclass
class InTurn:
    """gamma guesses for all rows, for half of them, for none: all that a server can be asked to do,
    round after round. For checks, and not for speed."""

    gamma: int
    rounds: int = field(default=0, init=False)

    @property
    def widest(self) -> int:
        return Tree.chain(self.gamma).room

    def choose(self, load: Load) -> Plan:
        self.rounds += 1
        some = (load.rows, load.rows // 2, 0)[(self.rounds - 1) % 3]
        return Plan(Tree.chain(self.gamma), (self.gamma,) * some + (0,) * (load.rows - some))

    def learn(self, load: Load, plan: Plan, steps: Sequence[Step], seconds: float) -> None:
        pass


class Pace:
    """How long rounds take, as a multiple of what the table says: the machine's pace, which drifts
    and is the same for all, times what the table has wrong about each kind of round, which is in
    part the same for batches of all sizes.

    A Kalman filter (Kalman 1960) over the logarithms. So a slow minute is not held against the kind
    of round that it falls on; kinds are compared by rounds that lie side by side. A round that took
    far longer than it should was held up by something else, and says little.
    """

    SIZES = 9  # of batches, by powers of two; the last one is for all that are larger

    def __init__(
        self, kinds: Sequence[int], machine: float, table: float, drift: float, noise: float
    ) -> None:
        """In logarithms: by how much machine and table may be off, the machine's drift a round and
        the noise of one."""
        self.first = {kind: 1 + i * self.SIZES for i, kind in enumerate(kinds)}
        self.mean = np.zeros(1 + len(kinds) * self.SIZES)
        alike = (np.ones((self.SIZES, self.SIZES)) + np.eye(self.SIZES)) / 2
        self.spread = np.zeros((len(self.mean), len(self.mean)))
        self.spread[0, 0] = machine**2
        self.spread[1:, 1:] = table**2 * np.kron(np.eye(len(kinds)), alike)
        self.drift, self.noise = drift**2, noise**2

    def _place(self, kind: int, rows: int) -> int:
        return self.first[kind] + min(rows.bit_length(), self.SIZES) - 1

    def see(self, kind: int, rows: int, times: float, rounds: int) -> None:
        """So many rounds of a kind took so many times what the table says of them."""
        at = self._place(kind, rows)
        self.spread[0, 0] += self.drift * rounds
        shared = self.spread[0] + self.spread[at]
        variance = shared[0] + shared[at] + self.noise / rounds
        most = 2 * math.sqrt(variance)
        off = math.log(max(times, 1e-9)) - self.mean[0] - self.mean[at]
        self.mean += shared * (min(max(off, -most), most) / variance)
        self.spread -= np.outer(shared, shared) / variance

    def off(self, kind: int, rows: int) -> float:
        """How many times longer than the table says, beside other kinds of rounds."""
        return math.exp(self.mean[self._place(kind, rows)])

    def doubt(self, kind: int, rows: int) -> float:
        at = self._place(kind, rows)
        return float(self.spread[at, at])


@dataclass
class Goodput:
    """The plan that promises most tokens a second, by measured costs and acceptance so far.

    (The objective of SmartSpec: Liu et al. 2024, arXiv 2406.14066, section 4.) Expected tokens
    follow from two running estimates: how often the i-th guess is kept given those before it, over
    all rows, and how much better or worse each row does than all. Either every row drafts, one of
    the `gammas`, or, where passes leave out what is no token (`Prices.packs`), guesses are spent
    one by one, the likeliest first, on whichever row. Costs come from the table and from how rounds
    of each kind compare with it (`Pace`); the first round after a change of form does not count.
    Whoever drafts pays for the drafter's reading, of texts as they come and, spread over `horizon`
    rounds, or until the next thought where each row is judged for itself, of what it lacks of those
    that are there. The form is changed only for a gain of `margin`, and the plan is thought about
    now and then, since that takes time.
    The table may be wrong: every `probe` rounds, and at ever longer intervals of up to `rarest`
    while the form stays, `trial` rounds go to the least known of those that come near it. While
    nothing is drafted nothing is learned, and what was learned fades: one row drafts, to see, as
    often, if drafting would pay at the best that acceptance may be.
    """

    costs: Prices
    gammas: tuple[int, ...] = GAMMAS
    horizon: int = 32
    margin: float = 0.02
    alone: int = 64  # rounds of one row between thoughts, of two half as many and so on,
    hold: int = 16  # but so many at least; few at first, four times as many while none drafts
    trial: int = 4
    probe: int = 64
    rarest: int = 512
    hoped: float = 0.8  # acceptance before anything is known: who does not draft learns little
    hopes: float = 16.0  # guesses that this counts as
    weight: float = 8.0  # and what is known of all rows, beside what is known of one
    fade: float = 0.995
    doubts: tuple[float, float, float, float] = (0.3, 0.15, 0.05, 0.15)  # see Pace

    judged: list[float] = field(default_factory=list, init=False)  # by depth, weighed by `better`
    kept: list[float] = field(default_factory=list, init=False)
    asked: float = field(default=0.0, init=False)  # guesses that could have been made
    made: float = field(default=0.0, init=False)
    begun: float = field(default=0.0, init=False)  # texts that came, tokens of them, rounds
    length: float = field(default=0.0, init=False)
    lasted: float = field(default=0.0, init=False)
    better: dict[int, float] = field(default_factory=dict, init=False)  # each row than all
    pace: Pace = field(init=False)
    form: int = field(default=0, init=False)  # so many guesses for every row, or SPREAD
    plan: Plan = field(default=Plan(Tree.chain(0)), init=False)
    rows: int = field(default=0, init=False)  # for which it was made
    tables: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = field(
        default_factory=dict, init=False
    )
    left: int = field(default=0, init=False)  # rounds for which it is not thought about
    told: list[tuple[Load, Plan, Sequence[Step], float]] = field(default_factory=list, init=False)
    before: int | None = field(default=None, init=False)  # the form of the last round told of
    rounds: int = field(default=0, init=False)
    due: int = field(default=0, init=False)  # the round that tries something else
    gap: int = field(default=0, init=False)  # and how many rounds that comes after the last one

    def __post_init__(self) -> None:
        deepest = max(self.gammas)
        self.judged, self.kept = [0.0] * deepest, [0.0] * deepest
        self.due = self.gap = self.probe
        self.lasted = float(self.probe)  # or all that come at first would seem to come for ever
        self.pace = Pace([0, *self.gammas, SPREAD], *self.doubts)

    @property
    def widest(self) -> int:
        return Tree.chain(max(self.gammas)).room

    def conditional(self, above: float = 0.0) -> list[float]:
        """P(guess i kept given that guess i - 1 was), i = 1, 2, ...; shrunk to the one before, and
        `above` standard errors higher than that."""
        found, before = [], self.hoped
        for judged, kept in zip(self.judged, self.kept, strict=True):
            before = min(1.0, (kept + self.hopes * before) / (judged + self.hopes))
            error = math.sqrt(before * (1 - before) / (judged + self.hopes))
            found.append(min(1.0, before + above * error))
        return found

    def choose(self, load: Load) -> Plan:
        self.rounds += 1
        self.left -= 1
        if self.left < 0 or self.rows != load.rows:
            self.plan, self.rows = self._think(load), load.rows
        return self.plan

    def _think(self, load: Load) -> Plan:
        self._digest()
        pause = min(max(self.hold, self.alone // load.rows), max(self.trial, self.rounds))
        rates, spread = self._rates(load, self.conditional(), pause)
        best = max(rates, key=rates.__getitem__)
        if rates[best] > rates.get(self.form, 0.0) * (1 + self.margin):
            self.form, self.gap = best, self.probe
            self.due = min(self.due, self.rounds + self.probe)
        form = self.form
        self.left = (pause if form else 4 * pause) - 1
        if self.rounds >= self.due:
            self.gap = min(2 * self.gap, self.rarest)
            self.due = self.rounds + self.gap
            if form:
                form, self.left = self._least_known(rates, load.rows), self.trial - 1
            elif load.streams and self._might_pay(load, pause):
                self.left = self.trial - 1 if self.costs.packs else 0
                return _one(load, min(self.gammas[-1], 3))
        if form == SPREAD:
            return Plan(Tree.chain(max(spread)), spread)
        return Plan(Tree.chain(form))

    def _least_known(self, rates: dict[int, float], b: int) -> int:
        """Of what may be nearly as good as the current form, the one of which least has been seen:
        the table may be wrong about it."""
        near = [g for g, rate in rates.items() if g >= 0 and rate > 0.75 * rates[self.form]]
        return max(near, key=lambda gamma: self.pace.doubt(gamma, b), default=self.form)

    def _might_pay(self, load: Load, pause: int) -> bool:
        """Would some draft pay if acceptance were as good as is still likely?"""
        rates, _ = self._rates(load, self.conditional(above=1.0), pause)
        return max(rates.values()) > rates[0]

    def _rates(
        self, load: Load, overall: list[float], pause: int
    ) -> tuple[dict[int, float], tuple[int, ...]]:
        """Tokens a second of each form, and how SPREAD spreads, until after `pause` rounds."""
        rows = _written(load)
        chances = self._chances(rows, overall)
        w, b = len(rows), self._paid(load)
        levels, verify = self._table(load)
        filled = self._filled(rows)
        behind = self._behind(load, rows)
        begin = self.costs.catch_up_s(sum(behind)) / self.horizon if any(behind) else 0.0
        coming = self._coming()
        tokens = (w + chances.sum(0).cumsum()).tolist()
        rates = {0: w / (float(verify[0]) * self.pace.off(0, b))}
        for g in self.gammas:
            seconds = float(levels[:g, b].sum() + verify[round(g * (filled.sum() + b - w))])
            rates[g] = tokens[g - 1] / (seconds * self.pace.off(g, b) + begin + coming)
        if not load.streams or w < 2 or not self.costs.packs:
            return rates, ()
        every = np.arange(len(overall))  # the depths that a draft may have, one a column
        order = np.argsort(-chances / filled[:, None], axis=None, kind="stable")
        row, depth = np.divmod(order, len(every))
        here = depth[:, None] == every
        counts = here.cumsum(0)
        gained = (here * chances.ravel()[order][:, None]).cumsum(0).cumsum(1)
        made = (here * filled[row][:, None]).cumsum(0).cumsum(1)
        seconds = levels[every, counts].cumsum(1) + verify[np.rint(made).astype(int)]
        seconds = seconds * self.pace.off(SPREAD, b) + counts[:, :1] * (coming / w)
        if any(behind):
            reading = np.array(behind)[row[depth == 0]].cumsum().tolist()
            reading = [self.costs.catch_up_s(n) / pause if n else 0.0 for n in reading]
            seconds += np.array(reading)[counts[:, :1] - 1]
        promised = np.where(counts > 0, (w + gained) / seconds, 0.0)
        most, deep = divmod(int(promised.argmax()), len(every))
        rates[SPREAD] = float(promised[most, deep]) / (1 + 2 * self.margin)  # the luckiest of many
        budget = np.zeros(load.rows, int)
        np.add.at(budget, np.array(list(rows))[row[: most + 1][depth[: most + 1] <= deep]], 1)
        return rates, tuple(budget.tolist())

    def _paid(self, load: Load) -> int:
        """The rows that a pass is paid for."""
        return load.rows - load.streams.count(None) if self.costs.packs else load.rows

    def _chances(self, rows: dict[int, Stream], overall: list[float]) -> np.ndarray:
        """[rows, depth]: how likely the guess of that depth is kept, and all before it."""
        mean = min(1.0, sum(self.kept) / sum(self.judged)) if sum(self.judged) else self.hoped
        self.better = {
            row: (s.kept / mean + self.weight) / (s.judged + self.weight) if mean else 1.0
            for row, s in rows.items()
        }
        better = np.array(list(self.better.values()))
        return np.minimum(1.0, better[:, None] * overall).cumprod(1)

    def _filled(self, rows: dict[int, Stream]) -> np.ndarray:
        """[rows]: the share of their guesses that is paid for: a drafter may not make all."""
        if not self.costs.packs:
            return np.ones(len(rows))
        mean = (self.made + self.weight) / (self.asked + self.weight)
        found = [(s.made + self.weight * mean) / (s.asked + self.weight) for s in rows.values()]
        return np.array(found)

    def _coming(self) -> float:
        """Seconds a round for which a drafter reads the texts that come."""
        if not self.begun:
            return 0.0
        return self.begun / self.lasted * self.costs.catch_up_s(self.length / self.begun)

    def _behind(self, load: Load, rows: dict[int, Stream]) -> list[int]:
        """How much the drafter has to read of each row that does not draft so far."""
        drafts = self.plan.budget if len(self.plan.budget) == load.rows else None
        return [
            s.behind if (self.form == 0 if drafts is None else not drafts[row]) else 0
            for row, s in rows.items()
        ]

    def _table(self, load: Load) -> tuple[np.ndarray, np.ndarray]:
        """What the table says at this size, read once, for a server's windows are few: seconds of
        the guess of a depth [depth, rows that draft so deep], and of all else of a round [guesses
        made]."""
        b = self._paid(load)
        if (b, load.context) not in self.tables:
            deepest, context = len(self.judged), load.context
            levels = [
                [0.0, *(self.costs.level_s(n, d, context) for n in range(1, b + 1))]
                for d in range(1, deepest + 1)
            ]
            verify = [self.costs.verify_s(b, 1 + m / b, context) for m in range(deepest * b + 1)]
            self.tables[b, load.context] = np.array(levels), np.array(verify)
        return self.tables[b, load.context]

    def learn(self, load: Load, plan: Plan, steps: Sequence[Step], seconds: float) -> None:
        self.told.append((load, plan, steps, seconds))

    def _digest(self) -> None:
        """Learn from all rounds since the last thought, at once: each alone would be as slow as
        code is that has just been swept from the caches."""
        times = []
        for load, plan, steps, seconds in self.told:
            if plan.tree.depth:
                self._judge(plan, steps)
            new = [s.behind for s in load.streams if s and s.behind and not s.rounds]
            self.begun, self.length = self.begun + len(new), self.length + sum(new)
            self.lasted += 1
            form = SPREAD if plan.budget else plan.tree.depth
            if form == self.before:
                times.append(seconds / self._price(load, plan, steps))
            self.before = form
        if times:
            self.pace.see(form, self._paid(load), float(np.median(times)), len(times))
        fade = (self.fade if self.form else 0.999) ** len(self.told)
        self.judged = [fade * x for x in self.judged]
        self.kept = [fade * x for x in self.kept]
        self.asked, self.made = fade * self.asked, fade * self.made
        self.begun, self.length = fade * self.begun, fade * self.length
        self.lasted *= fade
        self.told.clear()

    def _judge(self, plan: Plan, steps: Sequence[Step]) -> None:
        for step in steps:
            asked = plan.depth(step.row)
            better = self.better.get(step.row, 1.0)
            for i in range(min(step.accepted + 1, asked)):
                self.judged[i] += better
                self.kept[i] += i < step.accepted
            self.asked += asked
            self.made += step.drafted

    def _price(self, load: Load, plan: Plan, steps: Sequence[Step]) -> float:
        """What the table says of such a round, and of what the drafter read before it."""
        levels, verify = self._table(load)
        if not (deepest := plan.tree.depth):
            return float(verify[0])
        written = _written(load)
        depths = [plan.depth(row) for row in written]
        behind = sum(s.behind for s, d in zip(written.values(), depths, strict=True) if d)
        seconds = self.costs.catch_up_s(behind) if behind else 0.0
        if not self.costs.packs:
            return seconds + float(levels[:deepest, load.rows].sum() + verify[deepest * load.rows])
        for d in range(deepest):
            seconds += levels[d, sum(x > d for x in depths)]
        return float(seconds + verify[sum(step.drafted for step in steps)])


@dataclass
class Bandit:
    """Learns tokens a second of each draft length by trying, for batches of about the same size.

    Knows no costs and no acceptance: an upper confidence bound (Auer et al. 2002, UCB1) on the
    logarithm of a round's rate, for each power of two of rows. Estimates fade, as loads do.
    """

    gammas: tuple[int, ...] = (0, *GAMMAS)
    bonus: float = 0.3
    fade: float = 0.99
    hold: int = 8  # rounds that a choice is kept, since switching costs

    tried: dict[tuple[int, int], float] = field(default_factory=dict, init=False)
    mean: dict[tuple[int, int], float] = field(default_factory=dict, init=False)
    current: tuple[int, int] = field(default=(-1, 0), init=False)
    left: int = field(default=0, init=False)
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0], init=False)

    @property
    def widest(self) -> int:
        return Tree.chain(max(self.gammas)).room

    def choose(self, load: Load) -> Plan:
        size = load.rows.bit_length()
        if not self.left or self.current[0] != size:
            self.current, self.left, self.sums = (size, self._best(size)), self.hold, [0.0, 0.0]
        self.left -= 1
        return Plan(Tree.chain(self.current[1]))

    def _best(self, size: int) -> int:
        total = sum(self.tried.get((size, g), 0.0) for g in self.gammas)

        def hope(gamma: int) -> float:
            tried = self.tried.get((size, gamma), 0.0)
            if not tried:
                return math.inf
            return self.mean[size, gamma] + self.bonus * math.sqrt(math.log(total + 1) / tried)

        return max(self.gammas, key=hope)

    def learn(self, load: Load, plan: Plan, steps: Sequence[Step], seconds: float) -> None:
        self.sums[0] += sum(step.emitted for step in steps) / max(1, len(steps))
        self.sums[1] += seconds
        if self.left or not self.sums[0]:
            return
        reward = math.log(self.sums[0] / self.sums[1])
        tried = self.tried.get(self.current, 0.0)
        for arm in self.tried:
            if arm[0] == self.current[0]:
                self.tried[arm] *= self.fade
        mean = self.mean.get(self.current, 0.0)
        self.tried[self.current] = self.fade * tried + 1
        self.mean[self.current] = mean + (reward - mean) / self.tried[self.current]


def _written(load: Load) -> dict[int, Stream]:
    """The rows that are being written; where nothing is said of rows, all are alike."""
    streams = load.streams or (Stream(),) * load.rows
    return {row: stream for row, stream in enumerate(streams) if stream}


def _one(load: Load, gamma: int) -> Plan:
    """A draft for the row that has least to read for it."""
    behind = {row: stream.behind for row, stream in _written(load).items()}
    budget = [0] * load.rows
    budget[min(behind, key=behind.__getitem__)] = gamma
    return Plan(Tree.chain(gamma), tuple(budget))


NAMES = "never, always:GAMMA, threshold:GAMMA,ROWS, table:ROWS=GAMMA,..., goodput, bandit"


def of(name: str, costs: Prices | None = None, deepest: int = MOST) -> Policy:
    """The policy of a name. costs: the table that `goodput` reads; deepest: the longest draft that
    the drafter can make. Raises UserError, one line, for any other name or a longer draft."""
    kind, _, argument = name.partition(":")
    deepest = min(deepest, MOST)
    gammas = tuple(g for g in GAMMAS if g <= deepest) or (deepest,)
    try:
        if name == "never":
            return Fixed(Tree.chain(0))
        if name == "goodput":
            if costs is None:
                raise UserError("policy goodput needs a cost table: specexp profile makes one")
            return Goodput(costs, gammas)
        if name == "bandit":
            return Bandit((0, *gammas))
        if kind == "always":
            return Fixed(Tree.chain(_gamma(argument, name, deepest)))
        if kind == "threshold":
            gamma, most = argument.split(",")
            return Threshold(_gamma(gamma, name, deepest), int(most))
        if kind == "table":
            pairs = [entry.split("=") for entry in argument.split(",")]
            found = {int(b): _gamma(g, name, deepest) for b, g in pairs}
            if len(found) < len(pairs):
                raise UserError(f"policy {name!r} says twice how much so many rows draft")
            return Table(tuple(sorted(found.items())))
    except ValueError:
        raise UserError(f"policy {name!r} is not well formed: use one of {NAMES}") from None
    raise UserError(f"policy {name!r} is unknown (there are {NAMES})")


def _gamma(text: str, name: str, deepest: int) -> int:
    gamma = int(text)
    if not 0 <= gamma <= deepest:
        raise UserError(f"policy {name!r} drafts {gamma}; this drafter does 0 to {deepest}")
    return gamma
