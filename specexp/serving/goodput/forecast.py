"""The rows and prices of a decision: what a plan would bring, and which plans to compare."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from specexp.policy import Load, Plan, Stream
from specexp.serving.goodput.slowdown import Slowdown
from specexp.tree import Tree

PLAIN = Plan(Tree.chain(0))


@dataclass
class Forecast(ABC):
    """Draft tokens are told apart by the row that they belong to, since some requests are easier
    than others (`ByRow`), or, where the drafter grades its drafts, by the grade, which predicts
    more (`ByGrade`).

    size: rows of the batch, and so of a budget; rows: those being decoded; start_s: seconds a round
    charged to each of these if it drafts. From the cost table: levels[depth][n], seconds in which n
    rows draft from `depth` to one deeper; verify[n], seconds of all else in a round with n draft
    tokens.
    """

    size: int
    rows: Sequence[int]
    start_s: Sequence[float]
    levels: Sequence[Sequence[float]]
    verify: Sequence[float]
    slowdown: Slowdown

    @abstractmethod
    def rate(self, plan: Plan) -> float:
        """Expected tokens a second of a row: the geometric mean over rows."""

    @abstractmethod
    def plans(self, gammas: Sequence[int], settled: Plan, less: bool) -> list[Plan]:
        """The best plans that draft, with `less` shallower ones too, and the settled plan if it
        still fits these rows."""

    @abstractmethod
    def still(self, settled: Plan) -> Plan:
        """The settled plan, adapted to these rows."""


def decoding(load: Load) -> dict[int, Stream]:
    """The rows being decoded; where nothing is known of rows, all of them, alike."""
    streams = load.streams or (Stream(),) * load.rows
    return {row: stream for row, stream in enumerate(streams) if stream}


@lru_cache(4096)
def budgeted(budget: tuple[int, ...]) -> Plan:
    """A chain as deep as the largest of these budgets of rows."""
    return Plan(Tree.chain(max(budget)), budget)


@lru_cache(4096)
def graded(reach: tuple[int, ...]) -> Plan:
    """A chain as deep as the largest of these depths of grades."""
    return Plan(Tree.chain(max(reach)), reach=reach)
