"""How likely draft tokens are accepted at each depth: counts of accepted over judged draft tokens
that fade with time and start from a prior."""

import math
from collections.abc import Sequence

from specexp.policy import Plan
from specexp.trace import Step


class Acceptance:
    """deepest: draft tokens of the longest draft."""

    prior = 0.8  # acceptance before anything is known: high, so that drafts are tried
    prior_tokens = 16.0  # judged draft tokens that the prior counts for
    fade = 0.998  # of all counts, a round, while somebody drafts,
    plain_fade = 0.999  # and while nobody does

    def __init__(self, deepest: int) -> None:
        self.judged, self.accepted = [0.0] * deepest, [0.0] * deepest  # to the first rejected
        self.requested = self.drafted = 0.0  # draft tokens that rows might have had, and had

    def tokens(self, above: float = 0.0) -> list[float]:
        """[draft length, from 0]: expected tokens of a row's round. The acceptance of each depth is
        shrunk to that of the depth before it, and then raised by `above` standard errors."""
        expected, share, chance, prior = [1.0], self.prior, 1.0, self.prior_tokens
        for judged, accepted in zip(self.judged, self.accepted, strict=True):
            share = min(1.0, (accepted + prior * share) / (judged + prior))
            error = math.sqrt(share * (1 - share) / (judged + prior)) if above else 0.0
            chance *= min(1.0, share + above * error)
            expected.append(expected[-1] + chance)
        return expected

    @property
    def filled(self) -> float:
        """The share of the requested draft tokens that the drafter makes."""
        return (self.drafted + self.prior_tokens) / (self.requested + self.prior_tokens)

    def learn(self, plan: Plan, steps: Sequence[Step]) -> None:
        """Count the draft tokens of a round, judged and accepted."""
        for step in steps:
            requested = plan.depth(step.row)
            for i in range(min(step.accepted + 1, requested)):
                self.judged[i] += 1
                self.accepted[i] += i < step.accepted
            self.requested += requested
            self.drafted += step.drafted

    def forget(self, share: float) -> None:
        """Let all counts fade to this share."""
        for counts in (self.judged, self.accepted):
            counts[:] = [share * count for count in counts]
        self.requested, self.drafted = share * self.requested, share * self.drafted
