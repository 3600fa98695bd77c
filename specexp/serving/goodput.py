"""Goodput: a load-aware policy that drafts what maximises the expected decoding rate.

One draft length g serves all rows of a round, the one with the highest

    rate(g) = E[tokens of a row's round with g draft tokens] / E[seconds of that round]

(SmartSpec: Liu et al. 2024, arXiv 2406.14066, section 4). Three parts: `Acceptance` estimates the
tokens, `Prices` the seconds; `Choice` settles a length, and tries another now and then.

`greedy` (greedy.py) is the same idea without all that; its docstring says what is gained by it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TypeAlias

import numpy as np

from specexp.policy import Load, Plan
from specexp.serving.cost_table import CALM, Costs
from specexp.trace import Step
from specexp.tree import Tree

PastRound: TypeAlias = tuple[Load, Plan, Sequence[Step], float | None]  # see `Policy.learn`
GAMMAS = (1, 2, 3, 5)


class Goodput:
    """The policy that this file describes; one for one server, as it learns from every round.
    gammas: the draft lengths to choose from."""

    def __init__(self, costs: Costs, gammas: tuple[int, ...] = GAMMAS) -> None:
        deepest = max(gammas)
        self.gammas, self.widest = (0, *gammas), Tree.chain(deepest).room
        self.acceptance, self.prices = Acceptance(deepest), Prices(costs, deepest)
        self.choice = Choice()
        self.gamma = 0  # of this round: the settled one or a trial
        self.unread: list[PastRound] = []  # rounds from which nothing was learned yet

    def choose(self, load: Load) -> Plan:
        if late := self.choice.due():
            self.digest()
        if late or self.choice.moved(load.rows, self.gamma):
            self.gamma = self._decide(load)
        return Plan(Tree.chain(self.gamma))

    def learn(self, load: Load, plan: Plan, steps: Sequence[Step], seconds: float | None) -> None:
        self.unread.append((load, plan, steps, seconds))
        self.choice.left += seconds is None  # a trial goes on until it has been timed

    def digest(self) -> None:
        """Update all estimates on the rounds since the last decision, in one go: after every round
        it would cost more, as this code has left the CPU's caches by then."""
        acceptance = self.acceptance
        for _, plan, steps, _ in self.unread:
            if plan.tree.depth:
                acceptance.learn(plan, steps)
        self.prices.learn(self.unread)
        fade = acceptance.fade if self.choice.settled else acceptance.plain_fade
        acceptance.forget(fade ** len(self.unread))
        self.prices.forget(fade ** len(self.unread))
        self.unread.clear()

    def _decide(self, load: Load) -> int:
        """The draft length of this round: the settled one, decided anew, or a trial of another."""
        choice, rates = self.choice, self.rates(load)
        choice.decide(load.rows, rates)
        if choice.rounds < choice.trial_at:
            return choice.settled
        hopeful = rates if choice.settled else self.rates(load, above=1.0)
        return choice.attempt(rates, hopeful, self.prices.slowdown(load))

    def rates(self, load: Load, above: float = 0.0) -> dict[int, float]:
        """Expected tokens a second of a row, for each draft length, with an acceptance `above`
        standard errors better than it seems."""
        tokens = self.acceptance.tokens(above)
        drafts = self.gamma > 0
        seconds = self.prices.seconds(load, self.gammas, self.acceptance.filled, drafts)
        return {g: tokens[g] / took for g, took in zip(self.gammas, seconds, strict=True)}


class Acceptance:
    """The acceptance rate of draft tokens at each depth: counts of accepted and of judged draft
    tokens, which fade with time and start from a prior. deepest: the longest draft, in tokens."""

    prior = 0.8  # acceptance before anything is known: high, so that drafts are tried
    prior_tokens = 16.0  # judged draft tokens that the prior counts for
    fade = 0.998  # of all counts, a round, while somebody drafts,
    plain_fade = 0.999  # and while nobody does

    def __init__(self, deepest: int) -> None:
        self.judged, self.accepted = [0.0] * deepest, [0.0] * deepest  # by depth
        self.requested = self.drafted = 0.0  # draft tokens that were planned, and that were made

    def tokens(self, above: float) -> list[float]:
        """[draft length, from 0]: expected tokens of a row's round. The acceptance of each depth is
        shrunk to that of the depth before it, and then raised by `above` standard errors."""
        expected, share, chance, prior = [1.0], self.prior, 1.0, self.prior_tokens
        for judged, accepted in zip(self.judged, self.accepted, strict=True):
            share = min(1.0, (accepted + prior * share) / (judged + prior))
            error = math.sqrt(share * (1 - share) / (judged + prior)) if above else 0.0
            chance *= min(1.0, share + above * error)
            expected.append(expected[-1] + chance)
        return expected

    @property
    def filled(self) -> float:
        """The share of the requested draft tokens that the drafter makes."""
        return (self.drafted + self.prior_tokens) / (self.requested + self.prior_tokens)

    def learn(self, plan: Plan, steps: Sequence[Step]) -> None:
        """Count a round's draft tokens; those after the first rejected one were not judged."""
        for step in steps:
            requested = plan.depth(step.row)
            for i in range(min(step.accepted + 1, requested)):
                self.judged[i] += 1
                self.accepted[i] += i < step.accepted
            self.requested += requested
            self.drafted += step.drafted

    def forget(self, share: float) -> None:
        """Let all counts fade to this share."""
        for counts in (self.judged, self.accepted):
            counts[:] = [share * count for count in counts]
        self.requested, self.drafted = share * self.requested, share * self.drafted


class Choice:
    """The settled draft length, when to decide it anew, and when to try another.

    It is replaced by the one with the highest rate if that gains more than `margin`: the highest of
    several estimates is probably too high (the winner's curse). Deciding takes time, so it happens
    every `interval` rounds and when rows come or go; while nothing changes, ever less often, down
    to once in `longest_interval` rounds.

    Every `gap` rounds, `trial` rounds go to the length that would be best if its time, and, where
    nobody drafts, acceptance too, were a standard error better than it seems (optimism in the face
    of uncertainty: Auer et al. 2002, Machine Learning 47): both may have changed since they were
    last seen. The gap doubles from `first_gap` up to `longest_gap`; while somebody drafts it is
    shorter where trials seem to cost less than `trial_share` of the time.
    """

    margin = 0.02  # relative gain for which the settled length is changed
    interval, longest_interval = 24, 128  # rounds between decisions, at first and at most
    first_gap, longest_gap = 64, 2048  # rounds between trials
    trial = 4  # rounds of a trial
    calm = CALM  # more of plain rounds: see `Prices.calm`
    trial_share = 0.002  # of the time: what trials may seem to cost

    def __init__(self) -> None:
        self.settled = self.rows = 0  # the draft length, and the rows for which it was settled
        self.rounds = self.left = 0  # rounds so far, and until the next decision
        self.wait = self.interval  # rounds from the next decision to the one after it
        self.trial_at = self.gap = self.first_gap  # the next trial's round; rounds to the one after

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


class Prices:
    """What a round costs here and now: the cost table, corrected for today's machine, and the
    drafter's prefill. deepest: the longest draft, in tokens.

    The table was measured on a calm machine; how much longer rounds take now is learned for each
    draft length, apart for 1, 2, 3-4, 5-8, ... rows (`Slowdown`). A drafter that reads prompts must
    catch up before it drafts: with each request as it arrives, and with what it lacks of a row,
    which is spread over the rounds that it will serve. How much longer that takes is learned, too:
    among many requests it decides whether drafts pay.
    """

    horizon = 32  # rounds over which catching up is spread
    calm = CALM  # plain rounds after a draft that are not timed: its weights fill the caches
    readings = 4  # of as many tokens as a short prompt has, that count as priced right at first
    memory = 64.0  # rounds without a request before the first, or it would seem a flood

    def __init__(self, costs: Costs, deepest: int) -> None:
        self.costs, self.deepest = costs, deepest
        self.slowdowns: dict[int, Slowdown] = {}  # by size class
        self.plain_rounds = self.calm  # since the last round that drafted
        # requests that arrived, the tokens of them that the drafter had not read, and the rounds
        # counted; seconds of catching up by the clock and by the table; all of them fade
        self.arrived, self.lacked, self.rounds = 0.0, 0.0, self.memory
        self.read_s = self.priced_s = 0.0

    def seconds(
        self, load: Load, gammas: Sequence[int], filled: float, drafts: bool
    ) -> list[float]:
        """[gammas]: expected seconds of a round with each draft length. filled: the share of the
        planned draft tokens that the drafter makes, on which the time of a pass that leaves out
        padding depends linearly; drafts: whether rows draft now, so that their drafter has read
        them already."""
        rows, slowdown = self._rows(load), self.slowdown(load)
        catch_up = 0.0  # seconds a round
        if self.arrived:
            lacked = self.lacked / self.arrived
            catch_up = self.arrived / self.rounds * self.costs.catch_up_s(lacked)
        if not drafts:
            behind = [s.behind for s in load.streams if s and s.behind]
            catch_up += sum(map(self.costs.catch_up_s, behind)) / self.horizon
        verified = filled if self.costs.packs else 1.0  # the share of the planned draft tokens
        seconds = []
        for gamma in gammas:
            least = self.costs.round_s(rows, gamma, load.context, 0)
            most = self.costs.round_s(rows, gamma, load.context)
            factor, predicted = slowdown.factor(gamma), least + verified * (most - least)
            reading = self.dear(factor) * catch_up if gamma else 0.0
            seconds.append(factor * predicted + reading)
        return seconds

    def dear(self, usual: float) -> float:
        """Measured over predicted time of catching up; `usual` as long as little was read."""
        prior = self.readings * self.costs.catch_up_s(64)
        whole = self.priced_s + prior
        return (self.read_s + usual * prior) / whole if whole else usual

    def slowdown(self, load: Load) -> Slowdown:
        """The slowdown of rounds of this load's size class."""
        return self.of_size(size_class(self._rows(load)))

    def of_size(self, size: int) -> Slowdown:
        """The slowdown of a size class; a new one begins with half the errors of the nearest."""
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
            gamma = plan.tree.depth
            self.plain_rounds = 0 if gamma or load.read else self.plain_rounds + 1
            for stream in load.streams:
                if stream and stream.behind and not stream.rounds:
                    self.arrived, self.lacked = self.arrived + 1, self.lacked + stream.behind
            priced = sum(map(self.costs.catch_up_s, load.read))
            self.read_s += min(load.read_s, 4 * self.dear(1.0) * priced)  # more is no reading
            self.priced_s += priced
            if (gamma or self.plain_rounds > self.calm) and seconds is not None:
                rows = drafting = self._rows(load)
                drafted = gamma * rows
                if self.costs.packs:
                    drafting = sum([plan.depth(s.row) > 0 for s in steps])
                    drafted = sum([s.drafted for s in steps])
                predicted = self.costs.round_s(rows, gamma, load.context, drafted, drafting)
                ratios[size_class(rows), gamma].append(seconds / predicted)
        for (size, gamma), each in ratios.items():
            self.of_size(size).observe(gamma, median(each), len(each))
        self.rounds += len(rounds)

    def forget(self, share: float) -> None:
        """Let the counts of requests and of what was read fade to this share."""
        self.arrived, self.lacked = share * self.arrived, share * self.lacked
        self.read_s, self.priced_s = share * self.read_s, share * self.priced_s
        self.rounds *= share

    def _rows(self, load: Load) -> int:
        """The rows that a pass computes: not the free ones if it leaves out padding."""
        return load.rows - load.streams.count(None) if self.costs.packs else load.rows


def size_class(rows: int) -> int:
    """0, 1, 2, 3, ... for 1, 2, 3-4, 5-8, ... rows: the table's error for one row is not that for
    eight."""
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
