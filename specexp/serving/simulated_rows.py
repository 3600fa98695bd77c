"""Rows without models: time advances by a cost table, draft tokens are accepted at random.

The server, its policies and the requests are those of the real engine; only the passes are
simulated. Every figure made with it is SIMULATED.
"""

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from specexp.serving.cost_table import Costs
from specexp.serving.engine_rows import window
from specexp.trace import Step
from specexp.tree import Tree


@dataclass
class _Sequence:
    length: int
    limit: int
    conditional: Sequence[float]
    filled: float

    def chance(self, index: int) -> float:
        """P(draft token `index` is accepted, if it was made and the one before it accepted)."""
        if not self.conditional:
            return 0.0
        chance = self.conditional[min(index, len(self.conditional) - 1)]
        return chance if index else chance / self.filled


class SimulatedRows:
    """Rows of a server whose time and acceptance are simulated.

    conditional(stream): of the request with that stream, P(draft token i accepted given that token
    i - 1 was) for i = 1, 2, ...; deeper tokens are like the last. filled(stream): the share of its
    rounds that have a draft, by default all. overhead_s: seconds of a step besides its passes."""

    steady = True  # no round is slower for being captured
    vocab = 1 << 63  # any prompt can be simulated
    timer = nullcontext()  # its time is counted, not measured

    def __init__(
        self, costs: Costs, conditional: Callable[[int], Sequence[float]], count: int, slots: int,
        slack: int, seed: int = 0, overhead_s: float = 0.0,
        filled: Callable[[int], float] = lambda stream: 1.0,
    ) -> None:  # fmt: skip
        self.costs, self.conditional, self.filled = costs, conditional, filled
        self.overhead_s = overhead_s
        self.count, self.slots, self.slack = count, slots, slack
        self.context = self.drafter_context = 1 << 30
        self.reads = costs.reads
        self.random = random.Random(seed).random
        self.time = 0.0
        self.texts: dict[int, _Sequence] = {}

    def clock(self) -> float:
        return self.time

    def wait(self, until: float) -> None:
        self.time = max(self.time, until)

    def fit(self, tree: Tree) -> None:
        """Any draft can be simulated."""

    def enter(self, row: int, text: Sequence[int], stream: int) -> None:
        chances = self.conditional(stream), self.filled(stream)
        self.texts[row] = _Sequence(len(text), len(text), *chances)

    def prefill(self, row: int, start: int, stop: int) -> None:
        self.time += self.costs.prefill_s(stop - start)

    def end_prefill(self, row: int, limit: int) -> None:
        self.texts[row].limit = limit

    def catch_up_row(self, row: int, start: int, stop: int) -> None:
        self.time += self.costs.catch_up_s(stop - start)

    def catch_up(self, budget: Sequence[int], longest: int, missed: int) -> None:
        rows = sum(g > 0 for g in budget) if self.costs.packs else len(budget)
        self.time += self.costs.catch_up_s(rows * missed)

    def round(self, budget: Sequence[int], longest: int, tree: Tree) -> list[Step]:
        context = window(longest + self.slack, self.slots)
        depths = [min(g, tree.depth) for g in budget]
        drafts = [self._drafted(at, gamma) for at, gamma in enumerate(depths)]
        computed = drafts if self.costs.packs else depths
        self.time += self.costs.plan_s(computed, context) + self.overhead_s
        steps = []
        for at, gamma in enumerate(drafts):
            text = self.texts.get(at)
            if text is None or text.length >= text.limit:
                continue
            accepted = 0
            while accepted < gamma and self.random() < text.chance(accepted):
                accepted += 1
            emitted = min(accepted + 1, text.limit - text.length)
            text.length += emitted
            steps.append(Step(at, gamma, accepted, emitted, done=text.length >= text.limit))
        return steps

    def _drafted(self, row: int, gamma: int) -> int:
        """How many of `gamma` draft tokens a row has: all or none."""
        text = self.texts.get(row)
        missing = gamma > 0 and text and text.filled < 1 and self.random() >= text.filled
        return 0 if missing else gamma

    def move(self, source: int, target: int, length: int) -> None:
        self.texts[target] = self.texts[source]

    def leave(self, row: int, broken: bool = False) -> None:
        self.texts.pop(row, None)

    def settle(self) -> None:
        """Nothing is under way."""

    def text(self, row: int, start: int, stop: int) -> list[int]:
        return []
