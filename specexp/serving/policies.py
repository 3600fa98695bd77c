"""Load-aware policies: how many tokens to draft in the next round, given the load.

A policy sees the load when a round begins (`Load`), returns a plan, and learns from the outcome.
It is named `plain`, `never`, `always:3`, `threshold:3,8`, `table:1=5,8=2,16=0`, `greedy`, `goodput`
or `bandit`.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from specexp import objects
from specexp.errors import UserError, meant
from specexp.policy import PRICED, Fixed, Load, Plan, Policy
from specexp.serving.cost_table import Costs
from specexp.serving.goodput import GAMMAS, Goodput
from specexp.serving.greedy import Greedy
from specexp.trace import Step
from specexp.tree import MOST, Tree


@dataclass(frozen=True)
class Table(Policy):
    """entries: pairs (rows, gamma), rising; from so many rows on, gamma tokens are drafted."""

    entries: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        rows = [rows for rows, _ in self.entries]
        if not rows or rows[0] < 0 or any(a >= b for a, b in pairwise(rows)):
            raise UserError(f"numbers of rows are {rows}: name each once, rising, from 0 or 1 on")

    @property
    def widest(self) -> int:
        return Tree.chain(max(gamma for _, gamma in self.entries)).room

    def choose(self, load: Load) -> Plan:
        at = bisect_right(self.entries, (load.rows, math.inf)) - 1
        return Plan(Tree.chain(self.entries[at][1] if at >= 0 else 0))


@dataclass
class Bandit:
    """Learns by trial the tokens per second of each draft length, for each power of two of rows.

    It needs neither a cost table nor acceptance rates, only an upper confidence bound (Auer et al.
    2002, UCB1) on the logarithm of the rate. Estimates fade, since loads change.
    """

    gammas: tuple[int, ...] = (0, *GAMMAS)
    bonus: float = 0.3
    fade: float = 0.99
    hold: int = 8  # rounds that a choice is kept, since switching has a cost

    # an arm is (bit length of the rows, draft length); of each: faded trials, mean of the logarithm
    tried: dict[tuple[int, int], float] = field(default_factory=dict, init=False)
    mean: dict[tuple[int, int], float] = field(default_factory=dict, init=False)
    current: tuple[int, int] = field(default=(-1, 0), init=False)
    left: int = field(default=0, init=False)  # rounds until the next choice
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0], init=False)  # tokens, seconds

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
        """The draft length with the highest upper confidence bound."""
        total = sum(self.tried.get((size, g), 0.0) for g in self.gammas)

        def bound(gamma: int) -> float:
            tried = self.tried.get((size, gamma), 0.0)
            if not tried:
                return math.inf
            return self.mean[size, gamma] + self.bonus * math.sqrt(math.log(total + 1) / tried)

        return max(self.gammas, key=bound)

    def learn(self, load: Load, plan: Plan, steps: Sequence[Step], seconds: float | None) -> None:
        if steps and seconds is not None and plan.tree.depth == self.current[1]:
            self.sums[0] += sum(step.emitted for step in steps) / len(steps)
            self.sums[1] += seconds
        if self.left or not all(self.sums):
            return
        reward = math.log(self.sums[0] / self.sums[1])
        for arm in self.tried:
            if arm[0] == self.current[0]:
                self.tried[arm] *= self.fade
        tried, mean = self.tried.get(self.current, 0.0) + 1, self.mean.get(self.current, 0.0)
        self.tried[self.current] = tried
        self.mean[self.current] = mean + (reward - mean) / tried


NAMES = (
    "plain, never, always:GAMMA, threshold:GAMMA,ROWS, table:ROWS=GAMMA,..., greedy, goodput, "
    "bandit"
)
FIXED = ("plain", "never", "always")  # kinds that draft as much at any load


def is_fixed(name: str) -> bool:
    """Whether the policy of this name drafts as much at any load; unknown ones may not."""
    return name.partition(":")[0] in FIXED


def of(name: str | Policy, costs: Costs | None = None, deepest: int = MOST) -> Policy:
    """The policy that a name, an entry point, `module:Class` or a class stands for; a policy is
    returned as it is. costs: the cost table for `PRICED` policies; deepest: the longest draft that
    the drafter can make. Raises UserError, one line, for unknown names, longer drafts and objects
    that are not policies."""
    if not isinstance(name, str):
        return _own(name)
    kind, _, argument = name.partition(":")
    deepest = min(deepest, MOST)
    gammas = tuple(g for g in GAMMAS if g <= deepest) or (deepest,)
    try:
        if name in ("never", "plain"):  # plain runs on an engine without a drafter
            return Fixed(Tree.chain(0))
        if name in PRICED:
            if costs is None:
                raise UserError(
                    f"policy {name} needs a cost table: pass policies.of({name!r}, costs) of "
                    "specexp.serving, or use bandit"
                )
            return Greedy(costs, gammas) if name == "greedy" else Goodput(costs, gammas)
        if name == "bandit":
            return Bandit((0, *gammas))
        if kind == "always":
            return Fixed(Tree.chain(_gamma(argument, name, deepest)))
        if kind == "threshold":
            gamma, most = argument.split(",")
            entries = [(0, _gamma(gamma, name, deepest)), (int(most) + 1, 0)]
            return _named(name, entries)
        if kind == "table":
            pairs = [entry.split("=") for entry in argument.split(",")]
            entries = [(int(rows), _gamma(gamma, name, deepest)) for rows, gamma in pairs]
            return _named(name, sorted(entries))
    except ValueError:
        raise UserError(f"policy {name!r} is not well formed: use one of {NAMES}") from None
    if (own := objects.resolve("policy", name)) is not None:
        return _own(own)
    if missing := objects.missing("policy", name):
        raise UserError(missing)
    near = meant(kind, (known.partition(":")[0] for known in NAMES.split(", ")))
    raise UserError(
        f"policy {name!r} is unknown{near} (there are {NAMES}; one of your own is module:Class)"
    )


def _own(thing: Any) -> Policy:
    from specexp import checked  # which imports torch

    return checked.policy(thing)


def _named(name: str, entries: list[tuple[int, int]]) -> Table:
    try:
        return Table(tuple(entries))
    except UserError as e:
        raise UserError(f"policy {name!r}: {e}") from None


def _gamma(text: str, name: str, deepest: int) -> int:
    gamma = int(text)
    if not 0 <= gamma <= deepest:
        raise UserError(f"policy {name!r} drafts {gamma} tokens; use 0 to {deepest} here")
    return gamma
