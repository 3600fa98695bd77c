"""How much to draft next, decided on the host between rounds from what is known by then.

The policies that look at the load are in serving/policies.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from specexp.trace import Step
from specexp.tree import Tree


class Share(NamedTuple):
    """The next `rows` rows draft `tree`; the shares, in row order, are a round's plan."""

    rows: int
    tree: Tree


Plan = tuple[Share, ...]


class Stream(NamedTuple):
    """What is known of a live row: tokens its drafter has not read, guesses lately judged (up to
    and including the first refusal of a round) and kept; both counts fade."""

    behind: int
    judged: float
    kept: float


@dataclass(frozen=True)
class Load:
    """The moment before a round. live: rows being written; context: slots that every pass reads;
    waiting: requests in the queue; streams: the live rows in order, or () where they cannot be
    treated apart and the plan must have one share."""

    live: int
    context: int
    waiting: int = 0
    streams: tuple[Stream, ...] = ()


class Policy(Protocol):
    @property
    def widest(self) -> int:
        """Room for the largest tree it may choose (`Tree.room`): the slack every buffer keeps."""
        ...

    def choose(self, load: Load) -> Plan:
        """What the live rows draft next: shares that add up to `load.live`."""
        ...

    def learn(self, load: Load, plan: Plan, steps: Sequence[Step], seconds: float) -> None:
        """How that went: what each live row did and how long the round took."""
        ...


@dataclass(frozen=True)
class Fixed:
    """The same draft every round."""

    tree: Tree

    @property
    def widest(self) -> int:
        return self.tree.room

    def choose(self, load: Load) -> Plan:
        return (Share(load.live, self.tree),)

    def learn(self, load: Load, plan: Plan, steps: Sequence[Step], seconds: float) -> None:
        pass
