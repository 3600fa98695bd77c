"""The closed forms against the paper's table, against brute force and against a simulation."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specexp.errors import UserError
from specexp.theory import (
    LONGEST,
    Prediction,
    alpha_of,
    best_gamma,
    break_even_alpha,
    measured_speedup,
    operations,
    predict,
    speedup,
    tokens_of_round,
    tokens_per_pass,
)

alphas = st.floats(0, 1)
gammas = st.integers(0, 40)
costs = st.floats(0, 2)


@pytest.mark.parametrize(
    ("alpha", "gamma", "times_operations", "times_speed"),
    [
        (0.6, 2, 1.53, 1.96),
        (0.7, 3, 1.58, 2.53),
        (0.8, 2, 1.23, 2.44),
        (0.8, 5, 1.63, 3.69),
        (0.9, 2, 1.11, 2.71),
        (0.9, 10, 1.60, 6.86),
    ],
)
def test_speedup_and_operations_match_table_1_of_leviathan(
    alpha: float, gamma: int, times_operations: float, times_speed: float
) -> None:
    assert round(operations(alpha, gamma, cost=0), 2) == times_operations
    assert round(speedup(alpha, gamma, cost=0), 2) == times_speed


def test_tokens_per_pass_of_four_draft_tokens() -> None:
    """Often quoted as 3.3 and 1.5 tokens per pass; four draft tokens really give 3.05 and 1.65."""
    assert round(tokens_per_pass(0.75, 4), 2) == 3.05
    assert round(tokens_per_pass(0.40, 4), 2) == 1.65


def test_predict_gathers_the_closed_forms() -> None:
    assert predict(0.8, 5, 0.1) == Prediction(
        tokens_per_pass=tokens_per_pass(0.8, 5),
        speedup=speedup(0.8, 5, 0.1),
        operations=operations(0.8, 5, 0.1),
        best_gamma=best_gamma(0.8, 0.1),
    )


@given(st.fractions(0, 1, max_denominator=10**6), gammas)
def test_tokens_match_the_papers_quotient(alpha: Fraction, gamma: int) -> None:
    exact = (1 - alpha ** (gamma + 1)) / (1 - alpha) if alpha < 1 else Fraction(gamma + 1)
    assert math.isclose(tokens_per_pass(float(alpha), gamma), exact, rel_tol=1e-14)


@given(st.floats(1e-17, 1e-6), gammas)
def test_tokens_are_exact_near_one(below: float, gamma: int) -> None:
    alpha = 1 - Fraction(1 - below)  # what is left of `below` after rounding
    exact = sum((1 - alpha) ** i for i in range(gamma + 1))
    assert math.isclose(tokens_per_pass(1 - below, gamma), exact, rel_tol=1e-14)
    assert tokens_per_pass(1.0, gamma) == gamma + 1


@given(alphas, alphas, gammas, costs)
def test_speedup_grows_with_alpha(a: float, b: float, gamma: int, cost: float) -> None:
    low, high = sorted((a, b))
    rounding = 1 + 1e-14
    assert tokens_per_pass(low, gamma) <= tokens_per_pass(high, gamma) * rounding
    assert speedup(low, gamma, cost) <= speedup(high, gamma, cost) * rounding
    assert operations(low, gamma, cost) * rounding >= operations(high, gamma, cost)


@given(alphas, gammas, costs)
def test_closed_forms_at_the_limits_of_alpha_and_gamma(
    alpha: float, gamma: int, cost: float
) -> None:
    assert 1 <= tokens_per_pass(alpha, gamma) <= gamma + 1
    assert tokens_per_pass(0, gamma) == 1
    assert speedup(alpha, 0, cost) == operations(alpha, 0, cost) == 1
    assert operations(alpha, gamma, cost) >= 1
    assert speedup(alpha, gamma, 0) == tokens_per_pass(alpha, gamma)


@given(alphas, costs, st.integers(0, 60))
def test_best_gamma_is_the_argmax(alpha: float, cost: float, limit: int) -> None:
    reached = speedup(alpha, best_gamma(alpha, cost, limit), cost)
    fastest = max(speedup(alpha, gamma, cost) for gamma in range(limit + 1))
    assert math.isclose(reached, fastest, rel_tol=1e-12)


def test_best_gamma_at_the_edges() -> None:
    assert best_gamma(0.5, 0.0) == LONGEST
    assert best_gamma(1.0, 0.5) == LONGEST
    assert best_gamma(0.0, 0.0) == best_gamma(1.0, 1.0) == best_gamma(0.3, 0.3) == 0
    assert best_gamma(0.3, 0.29) == 1


@given(alphas, st.floats(0, 1))
def test_best_gamma_pays_exactly_if_alpha_exceeds_cost(alpha: float, cost: float) -> None:
    assert (best_gamma(alpha, cost) > 0) == (alpha > cost)


@given(st.floats(0, 1), st.floats(0, 1))
def test_speedup_of_one_draft_token_is_corollary_3_9(a: float, b: float) -> None:
    cost, alpha = sorted((a, b))
    best = speedup(alpha, best_gamma(alpha, cost), cost)
    assert best >= (1 + alpha) / (1 + cost) * (1 - 1e-12)


@given(st.integers(1, 40), st.floats(1e-3, 0.999))
def test_break_even_is_where_the_speedup_crosses_one(gamma: int, cost: float) -> None:
    root = break_even_alpha(gamma, cost)
    assert cost <= root * (1 + 1e-12)
    assert math.isclose(speedup(root, gamma, cost), 1, rel_tol=1e-12)
    assert speedup(min(1, root + 1e-4), gamma, cost) > 1
    assert speedup(root - 1e-4, gamma, cost) < 1


def test_break_even_at_the_edges() -> None:
    assert math.isclose(break_even_alpha(1, 0.3), 0.3)
    assert break_even_alpha(5, 0) < 1e-300
    assert break_even_alpha(0, 0.1) == break_even_alpha(4, 1.0) == break_even_alpha(4, 7.0) == 1


@given(alphas, st.integers(0, 20), st.floats(0, 1))
def test_measured_with_ideal_costs_is_theorem_3_8(alpha: float, gamma: int, cost: float) -> None:
    measured = measured_speedup([alpha] * gamma, draft=gamma * cost, verify=1, step=1)
    assert math.isclose(measured, speedup(alpha, gamma, cost), rel_tol=1e-12)


@given(st.lists(alphas, max_size=12))
def test_tokens_of_a_round_are_one_plus_the_marginals(conditional: list[float]) -> None:
    marginals = [math.prod(conditional[: i + 1]) for i in range(len(conditional))]
    assert math.isclose(tokens_of_round(conditional), 1 + sum(marginals), rel_tol=1e-12)


def test_alpha_is_the_mean_overlap_of_p_and_q() -> None:
    p, q = [0.5, 0.3, 0.2], [0.1, 0.3, 0.6]
    assert math.isclose(alpha_of(p, q), 0.1 + 0.3 + 0.2)
    assert math.isclose(alpha_of([p, p], [q, p]), (0.6 + 1) / 2)
    assert alpha_of([1, 0], [0, 1]) == 0


@given(st.integers(0, 2**32 - 1))
def test_alpha_is_one_minus_total_variation_and_symmetric(seed: int) -> None:
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.full(9, 0.3), size=(2, 4))
    variation = 0.5 * np.abs(p - q).sum(-1).mean()
    assert math.isclose(alpha_of(p, q), 1 - variation, abs_tol=1e-12)
    assert alpha_of(p, q) == alpha_of(q, p)
    assert math.isclose(alpha_of(p, p), 1)


@pytest.mark.parametrize("gamma", [1, 4, 9])
def test_simulated_accept_rule_yields_predicted_tokens(gamma: int) -> None:
    """Draw from q, keep with probability min(1, p/q), stop at the first rejection."""
    rng = np.random.default_rng(gamma)
    p, q = np.array([0.45, 0.25, 0.2, 0.1]), np.array([0.2, 0.2, 0.1, 0.5])
    drafted = rng.choice(4, size=(40_000, gamma), p=q)
    kept = rng.random(drafted.shape) < (p / q)[drafted]
    tokens = 1 + np.cumprod(kept, axis=1).sum(axis=1)
    error = tokens.std() / math.sqrt(len(tokens))
    assert abs(tokens.mean() - tokens_per_pass(alpha_of(p, q), gamma)) < 5 * error


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: predict(-0.1, 4, 0.1), "alpha"),
        (lambda: predict(1.1, 4, 0.1), "alpha"),
        (lambda: predict(math.nan, 4, 0.1), "alpha"),
        (lambda: predict(0.5, -1, 0.1), "gamma"),
        (lambda: predict(0.5, LONGEST + 1, 0.1), "gamma"),
        (lambda: tokens_per_pass(0.5, 2.5), "gamma"),  # type: ignore[arg-type]
        (lambda: predict(0.5, 4, -0.1), "cost"),
        (lambda: predict(0.5, 4, math.nan), "cost"),
        (lambda: predict(0.5, 4, math.inf), "cost"),
        (lambda: best_gamma(0.5, 0.1, limit=-1), "gamma"),
        (lambda: break_even_alpha(-1, 0.1), "gamma"),
        (lambda: measured_speedup([0.5, 1.5], 1, 1, 1), "alpha"),
        (lambda: measured_speedup([0.5], -1, 1, 1), "draft"),
        (lambda: measured_speedup([0.5], 1, 0, 1), "verify"),
        (lambda: measured_speedup([0.5], 1, 1, math.inf), "step"),
        (lambda: alpha_of([0.5, 0.5], [1.0]), "shape"),
        (lambda: alpha_of([0.5, 0.4], [0.5, 0.5]), "p must hold"),
        (lambda: alpha_of([0.5, 0.5], [1.5, -0.5]), "q must hold"),
        (lambda: alpha_of([0.5, math.nan], [0.5, 0.5]), "p must hold"),
        (lambda: alpha_of([], []), "of shape"),
        (lambda: alpha_of(1.0, 1.0), "of shape"),
        (lambda: alpha_of("half", [1.0]), "p is 'half'; it must hold numbers"),
        (lambda: predict("0.5", 4, 0.1), "alpha is '0.5'; it must be a number"),  # type: ignore[arg-type]
        (lambda: predict(True, 4, 0.1), "alpha is True; it must be a number"),
    ],
)
def test_theory_rejects_bad_input_in_one_line(call: object, word: str) -> None:
    with pytest.raises(UserError, match=word) as refusal:
        call()  # type: ignore[operator]
    assert "\n" not in str(refusal.value)
