"""Goodput: a load-aware policy that drafts what maximises the expected decoding rate.

*Objective.* For a plan P, with the draft length g_r of each of R rows,

    rate(P) = (product over r of E[tokens_r(g_r)]) ** (1 / R) / E[seconds(P)],

the geometric mean over rows of expected tokens a second. SmartSpec (Liu et al. 2024, arXiv
2406.14066, section 4) maximises the sum instead. But most of the time goes to the requests whose
draft tokens are rejected, and hurrying those that are fast anyway saves less of it than the sum
says. (Proportional fairness: Kelly 1997, Charging and rate control for elastic traffic.)

Four parts: `Acceptance` estimates the tokens, `Prices` the seconds; a `Forecast` made of both ranks
the plans, `Choice` settles one, and `Trials` tries another now and then. Where passes leave out
padding (`CostTable.packs`), each row has a depth of its own (`ByRow.spread`) or each of the
drafter's grades has (`ByGrade.best`); elsewhere all rows draft one of the `gammas`.

`greedy` (greedy.py) is the same idea without all that; its docstring says what is gained by it.
"""

from __future__ import annotations

from collections.abc import Sequence

from specexp.policy import Load, Plan
from specexp.serving.goodput.acceptance import Acceptance
from specexp.serving.goodput.choice import Choice
from specexp.serving.goodput.forecast import PLAIN, ByGrade, ByRow, Forecast
from specexp.serving.goodput.prices import CostTable, PastRound, Prices, decoding
from specexp.serving.goodput.trials import Trials
from specexp.trace import Step
from specexp.tree import Tree

GAMMAS = (1, 2, 3, 5)


class Goodput:
    """The policy that this file describes; one for one server, as it learns from every round. A
    part that is not passed has its defaults."""

    def __init__(
        self,
        costs: CostTable,
        gammas: tuple[int, ...] = GAMMAS,
        acceptance: Acceptance | None = None,
        prices: Prices | None = None,
        choice: Choice | None = None,
        trials: Trials | None = None,
    ) -> None:
        deepest = max(gammas)
        self.costs, self.widest = costs, Tree.chain(deepest).room
        self.acceptance = acceptance or Acceptance(costs.grades, deepest)
        self.prices = prices or Prices(costs, deepest)
        self.choice = choice or Choice(gammas)
        self.trials = trials or Trials()
        self.plan = PLAIN  # of this round: the settled one or a trial
        self.rounds = 0
        self.unread: list[PastRound] = []  # rounds from which nothing was learned yet

    def choose(self, load: Load) -> Plan:
        self.rounds += 1
        late = self.choice.due(min(self.rounds, max(1, self.trials.due - self.rounds)))
        if late:
            self.digest()
        if late or self.choice.moved(load, self.plan):
            self.plan = self._decide(load)
        elif self.choice.thresholds and self.plan is self.choice.settled:
            self.plan = self.choice.adapt(load)
        return self.plan

    def learn(self, load: Load, plan: Plan, steps: Sequence[Step], seconds: float | None) -> None:
        self.unread.append(PastRound(load, plan, steps, seconds))
        self.choice.left += seconds is None  # a trial goes on until it has been timed

    def digest(self) -> None:
        """Update all estimates on the rounds since the last decision. At once, since code that was
        pushed out of the caches is slow: learning after every round would cost more."""
        acceptance, drafts = self.acceptance, bool(self.choice.settled.tree.depth)
        for load, plan, steps, _ in self.unread:
            if plan.tree.depth:
                acceptance.learn(load, plan, steps)
        self.prices.learn(self.unread)
        fade = acceptance.fade if drafts else acceptance.plain_fade
        acceptance.forget(fade ** len(self.unread))
        self.prices.forget(fade ** len(self.unread))
        self.unread.clear()

    def _decide(self, load: Load) -> Plan:
        """The plan of this round: the settled one, decided anew, or a trial of another."""
        choice, trials = self.choice, self.trials
        self.acceptance.believe()
        forecast = self.forecast(load)
        rates = choice.rates(forecast)
        if choice.decide(load, forecast, rates):
            # look again after a trial's time: the estimates may have been too high
            trials.soon(self.rounds)
            choice.left = min(choice.left, trials.trial - 1)
        if isinstance(forecast, ByRow) and choice.settled.budget:
            choice.watch(forecast, self.acceptance.believed)
        return self._try(load, forecast, rates) if self.rounds >= trials.due else choice.settled

    def _try(self, load: Load, forecast: Forecast, rates: dict[Plan, float]) -> Plan:
        """The plan to try now, which may be the settled one."""
        choice, trials, settled = self.choice, self.trials, self.choice.settled
        drafts = bool(settled.tree.depth)
        hopeful = forecast if drafts else self.forecast(load, above=1.0)
        plan = trials.best(hopeful, choice.rates(hopeful, less=True), settled)
        if not drafts:
            plan = trials.narrowed(plan, decoding(load), self.costs, rates[PLAIN])
        trials.next(self.rounds)
        if plan != settled:
            loss = 1 - forecast.rate(plan) / rates[settled] if drafts else None
            choice.left = trials.begin(self.rounds, plan, loss) - 1
        return plan

    def forecast(self, load: Load, above: float = 0.0) -> Forecast:
        """The prices and the acceptance of these rows, `above` standard errors better than it
        seems."""
        rows, packs = decoding(load), self.costs.packs
        apart = bool(load.streams) and packs
        fits = len(self.plan.budget) in (0, load.rows)
        current = self.plan if fits else Plan(self.choice.settled.tree)
        prices = (
            load.rows, list(rows), self.prices.start_s(rows, current), *self.prices.table(load),
            self.prices.slowdown(load),
        )  # fmt: skip
        if apart and self.costs.grades > 1:
            return ByGrade(*prices, *self.acceptance.by_grade(above))
        marginal = self.acceptance.by_row(rows.values(), above)
        filled = self.acceptance.filled(rows.values()) if packs else [1.0] * len(rows)
        return ByRow(*prices, marginal, filled, apart, 0 if packs else load.rows)
