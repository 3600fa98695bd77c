"""What happened in every round, and the acceptance metrics derived from it.

Counts are kept per row and round, and every rate is derived from them, so the identities between
the metrics (`Acceptance.check`) are asserted before anything is reported. Other engines use other
names for these metrics; data/GLOSSARY.md lists them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from specexp.errors import counted


class Step(NamedTuple):
    """One live row in one round, with counts of tokens. `draft`: its draft tokens in node order, -1
    for none; `done`: this was the row's last round; `broken`: what was wrong with a model's logits,
    if anything."""

    row: int
    drafted: int
    accepted: int
    emitted: int
    draft: tuple[int, ...] = ()
    done: bool = False
    broken: str | None = None


def steps_of_report(
    report: Sequence[Sequence[int]], why: Sequence[Callable[[int], str]]
) -> list[Step]:
    """The live rows of a round's report (`sequences.round_report`). `why`: for each model, a
    function that explains its fault in a row."""
    live_rows = []
    for number, (accepted, emitted, live, *rest) in enumerate(report):
        if emitted:  # rows that are done emit nothing
            faults, tokens = rest[: len(why)], rest[len(why) :]
            broken = why[faults.index(1)](number) if 1 in faults else None
            drafted = len(tokens) - tokens.count(-1)
            live_rows.append(
                Step(number, drafted, accepted, emitted, tuple(tokens), not live, broken)
            )
    return live_rows


class Round(NamedTuple):
    """One round of a batch. `end_s`: seconds from the start of the generation until its report was
    on the host; `depth`: of its tree; `steps`: of its live rows."""

    end_s: float
    depth: int
    steps: tuple[Step, ...]


@dataclass(repr=False)
class Trace:
    """What happened to one batch, from prefill to the last round.

    Everything that is reported about a generation is derived from it: `acceptance`, `by_row`,
    `decode_s`, `ttft_s` and `tpot_s` (seconds).

    Attributes:
        batch: Rows.
        prefill_s: Seconds from the start to the end of prefill.
        rounds: One record per round; `Round.end_s` counts from the same start.
    """

    batch: int
    prefill_s: float = 0.0
    rounds: list[Round] = field(default_factory=list)

    def __repr__(self) -> str:  # not every step: a notebook shows it
        rows, rounds = counted(self.batch, "row"), counted(len(self.rounds), "round")
        return f"Trace({rows}, {rounds}, {self.end_s:.3g} s: {self.acceptance})"

    def steps(self, row: int | None = None) -> list[Step]:
        return [s for r in self.rounds for s in r.steps if row is None or s.row == row]

    @property
    def acceptance(self) -> Acceptance:
        """Pooled over rows; `by_row` keeps them apart."""
        return Acceptance.of(self.steps())

    @property
    def by_row(self) -> list[Acceptance]:
        return [Acceptance.of(self.steps(row)) for row in range(self.batch)]

    @property
    def emitted(self) -> int:
        return sum(s.emitted for s in self.steps())

    @property
    def end_s(self) -> float:
        """The end of the last round, or of prefill if there was none."""
        return self.rounds[-1].end_s if self.rounds else self.prefill_s

    @property
    def decode_s(self) -> float:
        """Seconds spent in rounds, without prefill."""
        return self.end_s - self.prefill_s

    @property
    def ttft_s(self) -> float:
        """Time to first token (TTFT), in seconds: prefill and the first round."""
        return self.rounds[0].end_s if self.rounds else self.prefill_s

    @property
    def tpot_s(self) -> float:
        """Time per output token (TPOT) of one row, in seconds, without prefill: a row counts in the
        rounds in which it was live."""
        ends = [self.prefill_s, *(r.end_s for r in self.rounds)]
        spans = (end - begin for begin, end in itertools.pairwise(ends))
        row_s = sum(s * len(r.steps) for s, r in zip(spans, self.rounds, strict=True))
        return row_s / self.emitted if self.emitted else float("nan")


@dataclass(frozen=True)
class Acceptance:
    """The acceptance metrics. `histogram[k]`: target passes that accepted exactly k draft tokens.

    `cut`: accepted or bonus tokens that an EOS or the length limit cut off."""

    drafted: int
    emitted: int
    cut: int
    histogram: tuple[int, ...]

    @classmethod
    def of(cls, steps: Iterable[Step]) -> Acceptance:
        steps = list(steps)
        histogram = [0] * (1 + max((s.accepted for s in steps), default=0))
        for s in steps:
            histogram[s.accepted] += 1
        emitted = sum(s.emitted for s in steps)
        uncut = sum(s.accepted + 1 for s in steps)  # emitted without an EOS or a limit
        return cls(sum(s.drafted for s in steps), emitted, uncut - emitted, tuple(histogram))

    @property
    def passes(self) -> int:
        """Target passes, counted per row."""
        return sum(self.histogram)

    @property
    def accepted(self) -> int:
        return sum(k * count for k, count in enumerate(self.histogram))

    @property
    def rate(self) -> float:
        """accepted / drafted: the share of draft tokens accepted. 0 if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def length(self) -> float:
        """Acceptance length (tau, MAT): tokens per target pass, the bonus included."""
        return 1 + self.accepted / self.passes if self.passes else float("nan")

    @property
    def tokens_per_pass(self) -> float:
        """Tokens emitted per target pass: `length` without what was cut off."""
        return self.emitted / self.passes if self.passes else float("nan")

    @property
    def marginal(self) -> tuple[float, ...]:
        """P(at least i draft tokens accepted) for i = 1, 2, ..."""
        reached = self._reached()
        return tuple(r / reached[0] for r in reached[1:])

    @property
    def conditional(self) -> tuple[float, ...]:
        """P(token i accepted given that token i-1 was) for i = 1, 2, ... A pass that drafted fewer
        than i tokens counts as one that did not accept token i."""
        reached = self._reached()
        return tuple(b / a for a, b in itertools.pairwise(reached))

    def __str__(self) -> str:
        a_pass = f"{self.emitted / self.passes:.2f} per pass" if self.passes else "none"
        if self.cut:
            lost = counted(self.cut, "token")
            a_pass += f", {self.length:.2f} counting {lost} cut off at the end"
        drafted = counted(self.drafted, "draft token")
        rate = f"; acceptance rate {self.rate:.0%}, {self.accepted} of {drafted}"
        passes = counted(self.passes, "target pass", "es")
        tokens = f"{counted(self.emitted, 'token')} in {passes}: {a_pass}"
        return tokens + rate * (self.drafted > 0)

    def _reached(self) -> list[int]:
        """Passes that accepted at least 0, 1, 2, ... draft tokens."""
        return [sum(self.histogram[i:]) for i in range(len(self.histogram))]

    @classmethod
    def pooled(cls, parts: Iterable[Acceptance]) -> Acceptance:
        """All passes together."""
        parts = list(parts)
        counts = itertools.zip_longest((0,), *(p.histogram for p in parts), fillvalue=0)
        return cls(
            sum(p.drafted for p in parts), sum(p.emitted for p in parts),
            sum(p.cut for p in parts), tuple(map(sum, counts)),
        )  # fmt: skip

    def check(self) -> None:
        """Assert the identities that hold between the figures; raises AssertionError naming one."""
        gained = self.accepted + self.passes - self.cut
        assert self.emitted == gained, "emitted = accepted + passes - cut"
        assert 0 <= self.accepted <= self.drafted, "accepted <= drafted"
        if self.passes:
            assert abs(self.length - 1 - sum(self.marginal)) < 1e-9, "length = 1 + sum of marginals"
        if self.drafted:
            assert abs(self.rate * self.drafted - self.accepted) < 1e-6, "rate = accepted / drafted"
