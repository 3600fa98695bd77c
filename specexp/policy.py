"""How much to draft next, decided on the host between rounds from what is known by then.

The policies that look at the load are in serving/ (policies.py, goodput.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from specexp.trace import Step
from specexp.tree import Tree

HELD = 64  # rounds for which the host may look away


class Plan(NamedTuple):
    """What a round drafts: `tree`, and of it each row only as deep as its `budget` goes, if budgets
    are given, and as deep as its drafter is sure enough: `reach` is how deep at each grade
    (`Draft.grade`), if it tells them. hold: so many rounds may go by before the policy is asked
    again, if no row ends."""

    tree: Tree
    budget: tuple[int, ...] = ()
    hold: int = 1
    reach: tuple[int, ...] = ()

    def depth(self, row: int) -> int:
        """How deep that row drafts."""
        return self.budget[row] if self.budget else self.tree.depth

    def asked(self, step: Step) -> int:
        """How many guesses a row might have had."""
        depth = self.depth(step.row)
        return min(depth, self.reach[step.grade]) if self.reach else depth


class Stream(NamedTuple):
    """What is known of a row being written. behind: tokens that its drafter has not read. Of its
    recent rounds, fading: asked, the guesses its budgets allowed; made, those it got; judged, those
    up to the first refused or missing one; kept, those accepted. rounds: all it has had."""

    behind: int = 0
    judged: float = 0.0
    kept: float = 0.0
    asked: float = 0.0
    made: float = 0.0
    rounds: int = 0


class Load(NamedTuple):
    """The moment before a round. rows: what every pass covers; context: slots that it reads;
    waiting: requests in the queue; streams: of each row in order, None where nothing is written.
    Without `streams` rows cannot be treated apart: a plan has neither budgets nor reach."""

    rows: int
    context: int
    waiting: int = 0
    streams: tuple[Stream | None, ...] = ()


class Policy(Protocol):
    @property
    def widest(self) -> int:
        """Room for the largest tree it may choose (`Tree.room`): the slack every buffer keeps."""
        ...

    def choose(self, load: Load) -> Plan:
        """What comes next; budgets, if any, one for each of `load.rows`."""
        ...

    def learn(self, load: Load, plan: Plan, steps: Sequence[Step], seconds: float | None) -> None:
        """How that went: what every row did that was being written, unless it had guesses by a
        drafter that has not read its whole text yet; and how long it took, if such rounds will go
        on to take that long: the first of a kind do not (`Engine.steady`)."""
        ...


@dataclass(frozen=True)
class Fixed:
    """The same draft every round."""

    tree: Tree

    @property
    def widest(self) -> int:
        return self.tree.room

    def choose(self, load: Load) -> Plan:
        return Plan(self.tree, hold=HELD)

    def learn(self, load: Load, plan: Plan, steps: Sequence[Step], seconds: float | None) -> None:
        pass
