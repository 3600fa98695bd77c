"""How much to draft next: decided on the host between rounds.

Policies that depend on the load are in serving/ (policies.py, goodput.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from specexp.errors import UserError
from specexp.trace import Step
from specexp.tree import Tree

HELD = 64  # `Plan.hold` of a policy whose choice is constant
PRICED = ("greedy", "goodput")  # names of policies that read a cost table


class Plan(NamedTuple):
    """What to draft in the next round: a `tree`, which is cut to each row's depth in `budget` if
    there are budgets. hold: rounds that may use this plan before the policy is asked again; it is
    asked sooner if a row ends."""

    tree: Tree
    budget: tuple[int, ...] = ()
    hold: int = 1

    def depth(self, row: int) -> int:
        """How deep this row drafts."""
        return min(self.budget[row], self.tree.depth) if self.budget else self.tree.depth


class Stream(NamedTuple):
    """The state of a live row. behind: tokens its drafter has not read; rounds: all so far."""

    behind: int = 0
    rounds: int = 0


class Load(NamedTuple):
    """The load when a round begins. rows: rows in the pass, in `Engine.generate` those not done;
    context: slots that the pass reads; waiting: requests in the queue; streams: the state of each
    row, None for a free one. Without `streams` all rows are alike, and a plan has no budgets. read,
    read_s: the tokens of each pass in which the drafter caught up before the round, and the seconds
    of these passes; they are known only when the policy learns."""

    rows: int
    context: int
    waiting: int = 0
    streams: tuple[Stream | None, ...] = ()
    read: tuple[int, ...] = ()
    read_s: float = 0.0


class Policy(Protocol):
    """Decides between rounds, on the host, how many tokens the next round drafts.

    To write a policy, subclass this and define `widest`, `choose` and, to adapt, `learn`; see
    specexp/drafters/README.md. Policies that depend on the load are in specexp/serving/.
    """

    @property
    def widest(self) -> int:
        """`Tree.room` of the largest tree that it may choose: the slots that every buffer reserves
        for drafts."""

    def choose(self, load: Load) -> Plan:
        """Plan the next round.

        Args:
            load: Rows in the pass, slots that it reads, requests that wait.

        Returns:
            A tree; and budgets (depths in tokens), if any, one for each of `load.streams`.
        """

    def learn(self, load: Load, plan: Plan, steps: Sequence[Step], seconds: float | None) -> None:
        """Learn from the outcome of a round. By default nothing is learned.

        Args:
            load: The load that `choose` was given, with what the drafter read.
            plan: What was done of the plan that it returned: its tree may be shallower.
            steps: What every live row drafted, accepted and emitted.
            seconds: How long the round took, without the reading before it; None if the time is not
                typical, as in a warm-up (`Recorder.steady`).
        """
        return


def planned(policy: Policy, load: Load, fit: Callable[[Tree], None] = lambda tree: None) -> Plan:
    """What a policy chooses. Raises UserError, one line that names it, unless that is a plan for
    which there are slots. `fit`: raises UserError for a tree that the drafter cannot draft."""
    about = f"policy {type(policy).__name__}"
    try:
        plan = policy.choose(load)
    except UserError as e:
        raise UserError(f"{about}: {e}") from e
    if not isinstance(plan, Plan):
        raise UserError(f"{about} chose a {type(plan).__name__}: return Plan(tree)")
    if not isinstance(plan.tree, Tree):
        raise UserError(
            f"{about} planned a {type(plan.tree).__name__}: plan a specexp.Tree, such as "
            "Tree.chain(5)"
        )
    if plan.tree.room > policy.widest:
        raise UserError(
            f"{about} chose a tree with room {plan.tree.room}, more than its `widest` of "
            f"{policy.widest}"
        )
    try:
        fit(plan.tree)
    except UserError as e:
        raise UserError(f"{about}: {e}") from e
    if plan.hold < 1:
        raise UserError(f"{about} holds its plan for {plan.hold} rounds: use 1 or more")
    if plan.budget and (len(plan.budget) != len(load.streams) or min(plan.budget) < 0):
        raise UserError(
            f"{about} planned budgets {plan.budget}: give 0 or more for each of load.streams, "
            f"{len(load.streams)} here"
        )
    return plan


def single_stream_tree(policy: Policy) -> Tree:
    """The draft shape that a policy chooses for a single stream."""
    return policy.choose(Load(1, 0)).tree


@dataclass(frozen=True)
class Fixed(Policy):
    """The same tree every round."""

    tree: Tree

    @property
    def widest(self) -> int:
        return self.tree.room

    def choose(self, load: Load) -> Plan:
        return Plan(self.tree, hold=HELD)
