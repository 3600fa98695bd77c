"""How much to draft at this load: from never to whatever promises most tokens a second.

A policy sees what is known when a round begins (`Load`), answers with a plan, and is told how that
went. It is named `never`, `always:3`, `threshold:3,8`, `table:1=5,8=2,16=0`, `goodput` or `bandit`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from operator import itemgetter, mul
from typing import Any, Protocol

import numpy as np

from specexp.errors import UserError
from specexp.policy import Fixed, Load, Plan, Policy, Share, Stream
from specexp.trace import Step
from specexp.tree import MOST, Tree

GAMMAS = (1, 2, 3, 5)


class Prices(Protocol):
    """What rounds cost: see `costs.Costs`."""

    def step_s(self, batch: float, context: float) -> float: ...
    def round_s(self, batch: float, gamma: float, context: float) -> float: ...
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
        return (Share(load.rows, Tree.chain(self.gamma if load.rows <= self.most else 0)),)

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
        gamma = self.entries[at][1] if at >= 0 else 0
        return (Share(load.rows, Tree.chain(gamma)),)

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
        return _plan(load.rows, (load.rows, load.rows // 2, 0)[(self.rounds - 1) % 3], self.gamma)

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
        self, kinds: Sequence[Any], slower: float, machine: float, table: float, drift: float,
        noise: float,
    ) -> None:  # fmt: skip
        """slower: how much longer than its parts a round of two shares is thought to take. In
        logarithms: by how much machine and table may be off, the machine's drift a round and the
        noise of one."""
        self.first = {kind: 1 + i * self.SIZES for i, kind in enumerate(kinds)}
        means = [[math.log(slower) * apart] * self.SIZES for _, apart in kinds]
        self.mean = np.array([0.0, *chain.from_iterable(means)])
        alike = (np.ones((self.SIZES, self.SIZES)) + np.eye(self.SIZES)) / 2
        self.spread = np.zeros((len(self.mean), len(self.mean)))
        self.spread[0, 0] = machine**2
        self.spread[1:, 1:] = table**2 * np.kron(np.eye(len(kinds)), alike)
        self.drift, self.noise = drift**2, noise**2

    def _place(self, kind: Any, rows: int) -> int:
        return self.first[kind] + min(rows.bit_length(), self.SIZES) - 1

    def see(self, kind: Any, rows: int, times: float, rounds: int) -> None:
        """So many rounds of a kind took so many times what the table says of them."""
        at = self._place(kind, rows)
        self.spread[0, 0] += self.drift * rounds
        shared = self.spread[0] + self.spread[at]
        variance = shared[0] + shared[at] + self.noise / rounds
        most = 2 * math.sqrt(variance)
        off = math.log(max(times, 1e-9)) - self.mean[0] - self.mean[at]
        self.mean += shared * (min(max(off, -most), most) / variance)
        self.spread -= np.outer(shared, shared) / variance

    def off(self, kind: Any, rows: int) -> float:
        """How many times longer than the table says, beside other kinds of rounds."""
        return math.exp(self.mean[self._place(kind, rows)])

    def doubt(self, kind: Any, rows: int) -> float:
        at = self._place(kind, rows)
        return float(self.spread[at, at])


@dataclass
class Goodput:
    """The plan that promises most tokens a second, by measured costs and acceptance so far.

    (The objective of SmartSpec: Liu et al. 2024, arXiv 2406.14066, section 4.) Expected tokens
    follow from two running estimates: how often the i-th guess is kept given those before it, over
    all rows, and how much better or worse each row does than all. A draft of one length may go to
    every row, to a share of them, the best ones, or to none; costs come from the table and from how
    rounds of each kind compare with it (`Pace`), the reading of new texts by the drafter included;
    the first round after a change does not count: rows that begin are charged what it has to read
    first, spread over `horizon` rounds. A plan is changed only for a gain of `margin`, and is
    thought about now and then, since that takes time.
    The table may be wrong: every `probe` rounds, and at ever longer intervals of up to `rarest`
    while the plan stays, `hold` rounds go to the least known of those that come near it. While
    nothing is drafted nothing is learned, and what was learned fades: one row drafts, to see, as
    often, if drafting would pay at the best that acceptance may be.
    """

    costs: Prices
    gammas: tuple[int, ...] = GAMMAS
    horizon: int = 32
    margin: float = 0.02
    hold: int = 4  # rounds between thoughts while something is drafted
    idle: int = 8  # and while nothing is
    probe: int = 64
    rarest: int = 512
    parts: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)
    apart: float = 1.5  # how much longer than its parts a round of two shares is thought to take
    hoped: float = 0.7  # acceptance before anything is known
    weight: float = 8.0  # guesses that what is hoped for, or known of all rows, counts as
    fade: float = 0.995
    doubts: tuple[float, float, float, float] = (0.3, 0.15, 0.05, 0.15)  # see Pace

    judged: list[float] = field(default_factory=list, init=False)
    kept: list[float] = field(default_factory=list, init=False)
    pace: Pace = field(init=False)
    before: tuple[int, bool] = field(default=(-1, False), init=False)  # the round before, its kind
    size: int = field(default=0, init=False)  # and its rows
    current: tuple[int, float] = field(default=(0, 0.0), init=False)
    prices: dict[tuple[int, int, int], float] = field(default_factory=dict, init=False)
    plan: Plan = field(default=(), init=False)
    left: int = field(default=0, init=False)  # rounds for which it is not thought about
    seen: list[tuple[float, float]] = field(default_factory=list, init=False)  # seconds and prices
    rounds: int = field(default=0, init=False)
    due: int = field(default=0, init=False)  # the round that tries something else
    gap: int = field(default=0, init=False)  # and how many rounds that comes after the last one

    def __post_init__(self) -> None:
        deepest = max(self.gammas)
        self.judged, self.kept = [0.0] * deepest, [0.0] * deepest
        self.due = self.gap = self.probe
        kinds = [(0, False), *((g, apart) for g in self.gammas for apart in (False, True))]
        self.pace = Pace(kinds, self.apart, *self.doubts)

    @property
    def widest(self) -> int:
        return Tree.chain(max(self.gammas)).room

    def conditional(self, above: float = 0.0) -> list[float]:
        """P(guess i kept given that guess i - 1 was), i = 1, 2, ...; shrunk to the one before, and
        `above` standard errors higher than that."""
        found, before = [], self.hoped
        for judged, kept in zip(self.judged, self.kept, strict=True):
            before = (kept + self.weight * before) / (judged + self.weight)
            error = math.sqrt(before * (1 - before) / (judged + self.weight))
            found.append(min(1.0, before + above * error))
        return found

    def choose(self, load: Load) -> Plan:
        self.rounds += 1
        self.left -= 1
        if self.left < 0 or sum(share.rows for share in self.plan) != load.rows:
            self.plan = self._think(load)
        return self.plan

    def _think(self, load: Load) -> Plan:
        if self.seen:
            took, priced = map(sum, zip(*self.seen, strict=True))
            self.pace.see(self.before, self.size, took / priced, len(self.seen))
            self.seen = []
        b = load.rows
        tokens = self._expected(load, self.conditional())
        rates = {(0, 0.0): self._rate(load, tokens, 0, 0.0)}
        fronts = {math.ceil(part * b): part for part in (self.parts if load.streams else (1.0,))}
        for gamma in self.gammas:
            for part in fronts.values():
                rates[gamma, part] = self._rate(load, tokens, gamma, part)
        best = max(rates, key=rates.__getitem__)
        if rates[best] > rates.get(self.current, 0.0) * (1 + self.margin):
            self.current, self.gap = best, self.probe
            self.due = min(self.due, self.rounds + self.probe)
        gamma, part = self.current
        self.left = (self.hold if gamma else self.idle) - 1
        if self.rounds >= self.due:
            self.gap = min(2 * self.gap, self.rarest)
            self.due = self.rounds + self.gap
            if gamma:
                gamma, part = self._least_known(rates, b)
            elif load.streams and self._might_pay(load):
                gamma, part, self.left = min(self.gammas[-1], 3), 1 / b, 0
        return _plan(b, math.ceil(part * b), gamma)

    def _least_known(self, rates: dict[tuple[int, float], float], b: int) -> tuple[int, float]:
        """Of what may be nearly as good as the current plan, the one of which least has been seen:
        the table may be wrong about it."""
        near = [
            (gamma, part)
            for (gamma, part), rate in rates.items()
            if part in (0.0, 1.0) and rate > 0.75 * rates[self.current]
        ]
        return max(near, key=lambda plan: self.pace.doubt((plan[0], False), b))

    def _might_pay(self, load: Load) -> bool:
        """Would some draft pay if acceptance were as good as is still likely?"""
        tokens = self._expected(load, self.conditional(above=1.0))
        plain = self._rate(load, tokens, 0, 0.0)
        return any(self._rate(load, tokens, g, 1.0) > plain for g in self.gammas)

    def _expected(self, load: Load, overall: list[float]) -> list[list[float]]:
        """Tokens that a round brings the first 0, 1, ... of all rows, the best ones first: a list
        for each number of guesses."""
        mean = sum(self.kept) / sum(self.judged) if sum(self.judged) else self.hoped
        streams = load.streams or (Stream(),) * load.rows
        found = []
        for stream in streams:
            if stream is None:
                found.append([0.0] * (len(overall) + 1))
                continue
            own = (stream.kept + self.weight * mean) / (stream.judged + self.weight)
            factor = own / mean if mean else 1.0
            kept = accumulate((min(1.0, a * factor) for a in overall), mul)
            found.append(list(accumulate([1.0, *kept])))
        found.sort(key=itemgetter(-1), reverse=True)
        return [list(accumulate(column, initial=0.0)) for column in zip(*found, strict=True)]

    def _rate(self, load: Load, tokens: list[list[float]], gamma: int, part: float) -> float:
        """Tokens a second of a plan."""
        b = load.rows
        front = math.ceil(part * b)
        brought = tokens[gamma][front] + tokens[0][b] - tokens[0][front]
        seconds = self._price(load, front, gamma) * self.pace.off((gamma, 0 < front < b), b)
        drafting = math.ceil(self.current[1] * b)
        if behind := sum(s.behind for s in load.streams[drafting:front] if s):
            seconds += self.costs.catch_up_s(behind) / self.horizon
        return brought / seconds

    def _price(self, load: Load, front: int, gamma: int) -> float:
        """What the table says of a round in which so many rows draft, read once for every size: a
        server's windows are few."""
        seconds = 0.0
        for asked in ((front, gamma, load.context), (load.rows - front, 0, load.context)):
            if asked[0] and asked not in self.prices:
                self.prices[asked] = self.costs.round_s(*asked)
            seconds += self.prices[asked] if asked[0] else 0.0
        return seconds

    def learn(self, load: Load, plan: Plan, steps: Sequence[Step], seconds: float) -> None:
        fade = self.fade if self.current[0] else 0.999
        self.judged = [fade * x for x in self.judged]
        self.kept = [fade * x for x in self.kept]
        for step in steps:
            for i in range(min(step.accepted + 1, step.drafted)):
                self.judged[i] += 1
                self.kept[i] += i < step.accepted
        kind = _kind(plan)
        if kind == self.before:
            self.seen.append((seconds, self._price(load, plan[0].rows, kind[0])))
        self.before, self.size = kind, load.rows


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
        return (Share(load.rows, Tree.chain(self.current[1])),)

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


def _plan(rows: int, front: int, gamma: int) -> Plan:
    if not gamma or not front:
        return (Share(rows, Tree.chain(0)),)
    if front >= rows:
        return (Share(rows, Tree.chain(gamma)),)
    return Share(front, Tree.chain(gamma)), Share(rows - front, Tree.chain(0))


def _kind(plan: Plan) -> tuple[int, bool]:
    """The draft length of a plan, and whether some rows have none."""
    return len(plan[0].tree) - 1, len(plan) > 1


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
