"""How likely draft tokens are accepted: by depth over all rows, by row, and by the drafter's grade.

Every estimate is a count of accepted over judged draft tokens that fades with time and starts from
a prior. A row differs from the others by one number, the ratio of its odds of acceptance to those
of all rows (a logistic model with an effect of the row and one of the depth: Rasch 1960,
Probabilistic models for some intelligence and attainment tests).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from specexp.policy import Load, Plan, Stream
from specexp.trace import Step


@dataclass(frozen=True)
class Beliefs:
    """Estimated acceptance. conditional[i]: P(draft token i + 1 accepted given that token i was),
    over all rows; mean: accepted share of the judged draft tokens; weight: the number of judged
    tokens for which `mean` counts in the estimate of one row."""

    conditional: Sequence[float]
    mean: float
    weight: float

    @cached_property
    def odds(self) -> float:
        """Odds that a draft token is accepted, over all rows."""
        return self.mean / max(1 - self.mean, 1e-9)

    def odds_ratio(self, row: Stream) -> float:
        """A row's odds over those of all rows; taken to be the same at every depth."""
        judged, accepted = row.judged + self.weight, row.accepted + self.weight * self.mean
        return accepted / max(judged - accepted, 1e-9 * judged) / self.odds

    def evidence(self, odds_ratio: float) -> tuple[float, float]:
        """(slope, offset): a row has that odds ratio if accepted = slope * rejected + offset."""
        odds = odds_ratio * self.odds
        return odds, self.weight * (odds * (1 - self.mean) - self.mean)

    def marginal(self, odds_ratio: float = 1.0) -> list[float]:
        """P(draft tokens 1..i accepted) for i = 1, 2, ..., at that odds ratio."""
        chance, chances = 1.0, []
        for share in self.conditional:
            chance *= odds_ratio * share / (1 - share + odds_ratio * share)
            chances.append(chance)
        return chances


@dataclass
class Acceptance:
    """Counts that fade, and what they say. grades: see `Drafter.grades`; deepest: of a draft."""

    grades: int
    deepest: int
    prior: float = 0.8  # acceptance before anything is known: high, so that drafts are tried
    prior_tokens: float = 16.0  # judged draft tokens that the prior counts for
    row_weight: float = 16.0  # `Beliefs.weight` where it is decided who drafts,
    depth_weight: float = 5.0  # and how deep between decisions, where a mistake is soon corrected
    fade: float = 0.995  # of all counts, a round, while somebody drafts,
    plain_fade: float = 0.999  # and while nobody does

    judged: list[list[float]] = field(init=False)  # [grade][depth], to the first rejected
    accepted: list[list[float]] = field(init=False)  # [grade][depth] accepted
    rounds: list[float] = field(init=False)  # [grade] of a row that was at it,
    requested: list[float] = field(init=False)  # [grade] draft tokens it might have had in them,
    drafted: list[float] = field(init=False)  # [grade] and those that it had
    believed: Beliefs = field(init=False)  # as of the last decision, with `depth_weight`

    def __post_init__(self) -> None:
        self.judged = [[0.0] * self.deepest for _ in range(self.grades)]
        self.accepted = [[0.0] * self.deepest for _ in range(self.grades)]
        self.rounds, self.requested, self.drafted = ([0.0] * self.grades for _ in range(3))
        self.believed = self.beliefs()

    def believe(self) -> None:
        """Fix what is believed until the next decision."""
        self.believed = replace(self.beliefs(), weight=self.depth_weight)

    def beliefs(self, above: float = 0.0, grade: int | None = None) -> Beliefs:
        """Acceptance at a grade, or over all of them. The estimate of each depth is shrunk to that
        of the depth before it, and then raised by `above` standard errors."""
        conditional, share = [], self.prior
        prior = self.prior_tokens / (1 if grade is None else self.grades)
        these = slice(None) if grade is None else slice(grade, grade + 1)
        all_judged = [sum(depth) for depth in zip(*self.judged[these], strict=True)]
        all_accepted = [sum(depth) for depth in zip(*self.accepted[these], strict=True)]
        for judged, accepted in zip(all_judged, all_accepted, strict=True):
            share = min(1.0, (accepted + prior * share) / (judged + prior))
            error = math.sqrt(share * (1 - share) / (judged + prior)) if above else 0.0
            conditional.append(min(1.0, share + above * error))
        judged, accepted = sum(all_judged) + prior, sum(all_accepted) + prior * self.prior
        return Beliefs(conditional, accepted / judged, self.row_weight)

    def by_row(self, rows: Iterable[Stream], above: float) -> list[list[float]]:
        """[rows][depth]: P(all draft tokens up to there accepted)."""
        beliefs = self.beliefs(above)
        return [beliefs.marginal(beliefs.odds_ratio(row)) for row in rows]

    def by_grade(self, above: float) -> tuple[list[float], list[list[float]], list[float]]:
        """The last three fields of `ByGrade`."""
        grades = range(self.grades)
        total = sum(self.rounds) + len(grades)
        counts = zip(self.drafted, self.requested, strict=True)
        return (
            [(rounds + 1) / total for rounds in self.rounds],
            [self.beliefs(above, grade).marginal() for grade in grades],
            [(drafted + 1) / (requested + 1) for drafted, requested in counts],
        )

    def filled(self, rows: Iterable[Stream]) -> list[float]:
        """[rows]: the share of the requested draft tokens that the drafter makes."""
        weight = self.row_weight
        drafted = weight * (sum(self.drafted) + weight) / (sum(self.requested) + weight)
        return [(row.drafted + drafted) / (row.requested + weight) for row in rows]

    def learn(self, load: Load, plan: Plan, steps: Sequence[Step]) -> None:
        """Count the draft tokens of a round, judged and accepted. Easy rows draft deeper, so each
        outcome is weighted by its likelihood over all rows to that in this row: then the counts
        hold of all rows, at every depth."""
        shares = self.believed.conditional
        for step in steps:
            row, requested = load.streams and load.streams[step.row], plan.requested(step)
            ratio = self.believed.odds_ratio(row) if row and not plan.reach else 1.0
            grade, accepted = min(step.grade, self.grades - 1), step.accepted
            judged_counts, accepted_counts = self.judged[grade], self.accepted[grade]
            for i in range(min(accepted + 1, requested)):
                weight = 1 - shares[i] + ratio * shares[i]
                if i < accepted:
                    weight /= ratio
                    accepted_counts[i] += weight
                judged_counts[i] += weight
            self.rounds[grade] += 1
            self.requested[grade] += requested
            self.drafted[grade] += step.drafted

    def forget(self, share: float) -> None:
        """Let all counts fade to this share."""
        for counts in (*self.judged, *self.accepted, self.rounds, self.requested, self.drafted):
            counts[:] = [share * count for count in counts]
