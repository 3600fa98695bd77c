"""Goodput: a load-aware policy that drafts what maximises the expected decoding rate.

One draft length g serves all rows of a round, the one with the highest

    rate(g) = E[tokens of a row's round with g draft tokens] / E[seconds of that round]

(SmartSpec: Liu et al. 2024, arXiv 2406.14066, section 4). Three parts: `Acceptance` estimates the
tokens, `Prices` the seconds; `Choice` settles a length, and tries another now and then.

`greedy` (greedy.py) is the same idea without all that; its docstring says what is gained by it.
"""

from collections.abc import Sequence

from specexp.policy import Load, Plan
from specexp.serving.cost_table import Costs
from specexp.serving.goodput.acceptance import Acceptance
from specexp.serving.goodput.choice import Choice
from specexp.serving.goodput.prices import PastRound, Prices
from specexp.trace import Step
from specexp.tree import Tree

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
        self.unread.append(PastRound(load, plan, steps, seconds))
        self.choice.left += seconds is None  # a trial goes on until it has been timed

    def digest(self) -> None:
        """Update all estimates on the rounds since the last decision. At once, since code that was
        pushed out of the caches is slow: learning after every round would cost more."""
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
