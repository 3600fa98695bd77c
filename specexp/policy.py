"""How much to draft next, decided on the host between rounds from what is known by then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from specexp.tree import Tree


class Policy(Protocol):
    @property
    def widest(self) -> int:
        """Room for the largest tree it may choose (`Tree.room`): the slack every buffer keeps."""
        ...

    def choose(self, live: int) -> Tree:
        """The next draft's shape; `live`: rows still being written."""
        ...


@dataclass(frozen=True)
class Fixed:
    """The same draft every round."""

    tree: Tree

    @property
    def widest(self) -> int:
        return self.tree.room

    def choose(self, live: int) -> Tree:
        return self.tree
