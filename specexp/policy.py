"""How much to draft next: decided on the host between rounds.

Policies that depend on the load are in serving/ (policies.py, goodput.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from specexp.trace import Step
from specexp.tree import Tree

HELD = 64  # `Plan.hold` of a policy that never changes its mind


class Plan(NamedTuple):
    """What a round drafts: `tree`, which each row cuts to the depth in its `budget`, if there are
    budgets. hold: rounds that may follow this plan before the policy is asked again; it is asked
    sooner if a row ends."""

    tree: Tree
    budget: tuple[int, ...] = ()
    hold: int = 1

    def depth(self, row: int) -> int:
        """How deep this row drafts."""
        return self.budget[row] if self.budget else self.tree.depth


class Stream(NamedTuple):
    """The state of a live row. behind: tokens its drafter has not read; rounds: all so far."""

    behind: int = 0
    rounds: int = 0


class Load(NamedTuple):
    """The load when a round begins. rows: rows in the pass; context: slots that it reads; waiting:
    requests in the queue; streams: the state of each row, None for a free one. Without `streams`
    all rows are alike, and a plan has no budgets. read, read_s: tokens of each pass in which the
    drafter caught up before the round, and their seconds, as is known when a policy learns."""

    rows: int
    context: int
    waiting: int = 0
    streams: tuple[Stream | None, ...] = ()
    read: tuple[int, ...] = ()
    read_s: float = 0.0


class Policy(Protocol):
    """What decides, between rounds and on the host, how much the next round drafts.

    A policy of your own defines these three; see specexp/drafters/README.md. Those that depend on
    the load are in specexp/serving/.
    """

    @property
    def widest(self) -> int:
        """`Tree.room` of the largest tree that it may choose, in slots: the slack that every buffer
        keeps."""

    def choose(self, load: Load) -> Plan:
        """Plan the next round.

        Args:
            load: Rows in the pass, slots that it reads, requests that wait.

        Returns:
            A tree; and budgets (depths in tokens), if any, one for each of `load.rows`.
        """

    def learn(self, load: Load, plan: Plan, steps: Sequence[Step], seconds: float | None) -> None:
        """Learn the outcome of a round; a policy that subclasses this one need not.

        Args:
            load: What `choose` was given; and what the drafter read.
            plan: What it returned.
            steps: What every live row drafted, accepted and emitted.
            seconds: How long the round took, without what was read before it; None if later rounds
                like it will not take as long, as after a warm-up (`Recorder.steady`).
        """
        return


@dataclass(frozen=True)
class Fixed(Policy):
    """The same tree every round."""

    tree: Tree

    @property
    def widest(self) -> int:
        return self.tree.room

    def choose(self, load: Load) -> Plan:
        return Plan(self.tree, hold=HELD)
