"""The expected speedup of speculative decoding: in closed form, and from measured costs.

The notation is that of Leviathan et al. 2022 (arXiv 2211.17192); Chen et al. 2023 (arXiv
2302.01318) found the same acceptance rule. alpha is the probability that a draft token is accepted,
gamma the number of draft tokens per round, and costs are in units of one plain target step: a cost
of 0.05 means that the drafter is twenty times faster than its target.

The closed forms assume that draft tokens are accepted independently with the same alpha, and that a
pass over gamma + 1 tokens costs as much as a pass over one. Neither holds exactly, so
`measured_speedup` takes an acceptance probability per position and the times of real passes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import numpy as np
from numpy.typing import ArrayLike

from specexp.errors import UserError, check_type

BEYOND = 1.15  # a speedup above this multiple of the acceptance length is not credible
MISSED = 3.0  # nor is a speedup that is off its prediction by this factor
LEAST = 0.8  # nor a pass over several tokens that takes less than this share of a plain step
LONGEST = 1000  # the most draft tokens per round; `best_gamma` stops here if they are free


@dataclass(frozen=True)
class Prediction:
    """What the closed forms predict for one (alpha, gamma, cost), relative to plain decoding.

    `tokens_per_pass`: mean tokens per target pass (the acceptance length); `speedup`: the factor in
    time; `operations`: the factor in arithmetic; `best_gamma`: the fastest draft length at this
    alpha and cost."""

    tokens_per_pass: float
    speedup: float
    operations: float
    best_gamma: int


def predict(alpha: float, gamma: int, cost: float) -> Prediction:
    """All closed forms at once. `cost` is both c (time) and c-hat (arithmetic) of one draft token.

    Raises UserError unless 0 <= alpha <= 1, 0 <= gamma <= LONGEST and cost is finite and >= 0."""
    return Prediction(
        tokens_per_pass=tokens_per_pass(alpha, gamma),
        speedup=speedup(alpha, gamma, cost),
        operations=operations(alpha, gamma, cost),
        best_gamma=best_gamma(alpha, cost),
    )


def alpha_of(p: ArrayLike, q: ArrayLike) -> float:
    """P(a token drawn from q is accepted): the mean over contexts of sum(min(p, q)).

    p, q: distributions [..., V] of target and drafter. Leviathan et al., Corollary 3.6."""
    p, q = _distributions("p", p), _distributions("q", q)
    if p.shape != q.shape:
        raise UserError(f"p has shape {p.shape} and q {q.shape}; both must be [..., V]")
    return min(1.0, float(np.minimum(p, q).sum(axis=-1).mean()))


def tokens_per_pass(alpha: float, gamma: int) -> float:
    """1 + alpha + ... + alpha^gamma = (1 - alpha^(gamma+1)) / (1 - alpha). Equation 1.

    Summed term by term, which is exact at alpha = 1 too, where the quotient is undefined."""
    _check(alpha=alpha, gamma=gamma)
    return math.fsum(alpha**i for i in range(gamma + 1))


def speedup(alpha: float, gamma: int, cost: float) -> float:
    """Time of plain decoding over time of speculative decoding. Theorem 3.8."""
    _check(cost=cost)
    return tokens_per_pass(alpha, gamma) / (gamma * cost + 1)


def operations(alpha: float, gamma: int, cost: float) -> float:
    """Arithmetic of speculative decoding over that of plain decoding. Theorem 3.11; `cost` is
    c-hat.

    Rejected tokens are wasted arithmetic, which costs time once other rows keep the machine busy.
    """
    _check(cost=cost)
    return (gamma * cost + gamma + 1) / tokens_per_pass(alpha, gamma)


def best_gamma(alpha: float, cost: float, limit: int = LONGEST) -> int:
    """The fastest draft length up to `limit`, the shorter at a tie; 0: plain decoding is fastest.

    Each further draft token adds fewer tokens and the same time, so the first length that the next
    one does not beat is the best. If drafting is free that is `limit`, or the last gamma at which
    alpha^gamma is still positive as a float."""
    _check(alpha=alpha, gamma=limit, cost=cost)
    gamma, tokens, gain = 0, 1.0, alpha
    while gamma < limit and gain * (gamma * cost + 1) > cost * tokens:
        gamma, tokens, gain = gamma + 1, tokens + gain, gain * alpha
    return gamma


def break_even_alpha(gamma: int, cost: float) -> float:
    """The alpha above which `speedup(alpha, gamma, cost)` exceeds 1; 1.0 if none does.

    At gamma = 1 it is the cost itself (Corollary 3.9). It never falls as gamma grows: later
    tokens are accepted less often and cost the same."""
    _check(gamma=gamma, cost=cost)
    if gamma == 0 or cost >= 1:
        return 1.0
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        pays = math.fsum(middle**i for i in range(1, gamma + 1)) > gamma * cost
        low, high = (low, middle) if pays else (middle, high)
    return low


def measured_speedup(
    conditional: Sequence[float], draft: float, verify: float, step: float
) -> float:
    """The speedup of a round of gamma = len(conditional) draft tokens, from measurements.

    `conditional[i]`: P(draft token i + 1 accepted given that token i was); `draft`: time to
    propose them; `verify`: time of the target pass over gamma + 1 tokens, including the rule;
    `step`: time of a plain step. All three in one unit and at one load. Equals Theorem 3.8 for
    constant conditionals and verify = step."""
    if not 0 <= draft < math.inf:
        raise UserError(f"the draft time must be finite and not negative, not {draft}")
    for name, time in (("verify", verify), ("step", step)):
        if not 0 < time < math.inf:
            raise UserError(f"the {name} time must be finite and positive, not {time}")
    return tokens_of_round(conditional) * step / (draft + verify)


def tokens_of_round(conditional: Sequence[float]) -> float:
    """1 + the sum of the marginals: a draft token counts only if all before it were accepted."""
    for alpha in conditional:
        _check(alpha=alpha)
    return 1 + math.fsum(accumulate(conditional, mul))


def doubts(
    speedup: float, length: float | None = None, predicted: float | None = None,
    verify: float | None = None,
) -> list[str]:  # fmt: skip
    """Reasons why a measured speedup is impossible, so that other work must have disturbed the
    timing; empty if there are none.

    A pass over several tokens is never faster than one over a single token. So the speedup cannot
    exceed the acceptance length, and `verify`, the time of the target pass and the rule in plain
    steps, cannot be below 1. Nor is a speedup off a prediction from the same machine by a factor of
    three. Arguments that are None are not checked."""
    reasons = []
    if length and speedup > BEYOND * length:
        reasons.append(
            f"a speedup of {speedup:.2f}x with {length:.2f} tokens per target pass is not credible"
        )
    if predicted and not 1 / MISSED < speedup / predicted < MISSED:
        reasons.append(f"{speedup:.2f}x was measured where {predicted:.2f}x was predicted")
    if verify is not None and verify < LEAST:
        reasons.append(f"verifying a draft took only {verify:.2f} times as long as a plain step")
    return reasons


def _check(alpha: float = 0.0, gamma: int = 0, cost: float = 0.0) -> None:
    for name, value in (("alpha", alpha), ("cost", cost)):
        check_type(name, value, "float")
    if not 0 <= alpha <= 1:
        raise UserError(f"alpha is a probability, between 0 and 1, not {alpha}")
    if not isinstance(gamma, int | np.integer) or not 0 <= gamma <= LONGEST:
        raise UserError(f"gamma is a whole number of draft tokens from 0 to {LONGEST}, not {gamma}")
    if not 0 <= cost < math.inf:
        raise UserError(f"cost is in plain target steps, finite and not negative, not {cost}")


def _distributions(name: str, values: ArrayLike) -> np.ndarray:
    """Distributions [..., V] in float64. Raises UserError for anything else."""
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise UserError(f"{name} is {values!r:.40}; it must hold numbers") from None
    if array.ndim == 0 or array.size == 0:
        raise UserError(f"{name} must be probabilities [..., V], not of shape {array.shape}")
    # NaN fails both comparisons
    if not (array >= 0).all() or not (abs(array.sum(axis=-1) - 1) < 1e-2).all():
        raise UserError(f"{name} must hold probabilities that sum to 1 over the last axis")
    return array
