"""Laws and noise: against references in plain Python, at the edges, and by their statistics."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare
from support.references import references

from specexp.errors import UserError
from specexp.fitting import LEAST
from specexp.sampling import (
    ACCEPT,
    RESIDUAL,
    TOKEN,
    Certain,
    Noise,
    Sampling,
    likeliest,
    mix,
    ranked,
)

LOGITS = st.lists(st.integers(-40, 40).map(lambda x: x / 8), min_size=1, max_size=9)


def reference(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """Temperature, then top-k (ties kept), then top-p (ties to the lowest token), in order."""
    if temperature == 0:
        return [float(i == logits.index(max(logits))) for i in range(len(logits))]
    scaled = [x / temperature for x in logits]
    if 0 < top_k < len(scaled):
        least = sorted(scaled, reverse=True)[top_k - 1]
        scaled = [x if x >= least else -math.inf for x in scaled]
    top = max(scaled)
    weights = [math.exp(x - top) for x in scaled]
    p = [w / sum(weights) for w in weights]
    if top_p < 1:
        kept, mass = set(), 0.0
        for i in sorted(range(len(p)), key=lambda i: (-p[i], i)):
            if mass >= top_p:
                break
            kept.add(i)
            mass += p[i]
        p = [x if i in kept else 0.0 for i, x in enumerate(p)]
        p = [x / sum(p) for x in p]
    return p


@given(
    LOGITS,
    st.sampled_from([0.0, 0.1, 0.7, 1.0, 2.0, 100.0]),
    st.integers(0, 9),
    st.sampled_from([0.05, 0.3, 0.9, 1.0]),
)
def test_sampling_applies_temperature_then_top_k_then_top_p(logits, temperature, top_k, top_p):
    law = Sampling(temperature, top_k, top_p).law(torch.tensor(logits, dtype=torch.float64))
    expected = reference(logits, temperature, top_k, top_p)
    assert law.tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, LEAST])
def test_tiny_temperature_is_greedy_without_overflow(temperature):
    logits = torch.tensor([[3.0, 50.0, -80.0, 49.0]])
    for off in (False, True):
        with references(off):
            cold = Sampling(temperature).law(logits)
            assert torch.equal(cold, Sampling(0.0).law(logits))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_ranking_more_tokens_than_the_vocabulary_is_refused(dtype):
    w = torch.rand(2, 3, dtype=dtype)
    assert ranked(w, 3).sort().values.tolist() == [[0, 1, 2]] * 2
    with pytest.raises(UserError, match="vocabulary of 3 has no 4 likeliest"):
        ranked(w, 4)
    with pytest.raises(UserError, match="vocabulary of 3 has no 4"):
        Noise(0).draw(w, 4, torch.arange(2))


def test_greedy_ties_go_to_the_lowest_token():
    assert Sampling(0.0).law(torch.tensor([1.0, 5.0, 5.0])).tolist() == [0, 1, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_distributions_are_at_least_float32(dtype):
    law = Sampling(1.0).law(torch.randn(3, 50, dtype=dtype))
    assert law.dtype == torch.float32
    assert law.sum(-1).tolist() == pytest.approx([1, 1, 1])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": 1e-39}, r"use 0 \(greedy\) or at least 1.2e-38"),
        ({"temperature": 1e-320}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"top_k": 2.5}, "top_k is 2.5; it must be a whole number"),
        ({"top_k": True}, "top_k is True; it must be a whole number"),
        ({"temperature": "1"}, "temperature is '1'; it must be a number"),
        ({"min_p": None}, "min_p is None; it must be a number"),
    ],
)
def test_sampling_rejects_impossible_settings(options, said):
    with pytest.raises(UserError, match=said):
        Sampling(**options)


KEYS = mix(torch.arange(200_000))


def test_noise_is_a_function_of_its_address():
    one, same, other = Noise(1), Noise(1), Noise(2)
    lanes = torch.arange(5)
    assert torch.equal(one.uniform(KEYS, TOKEN, lanes), same.uniform(KEYS, TOKEN, lanes))
    assert not torch.equal(one.uniform(KEYS, TOKEN, lanes), other.uniform(KEYS, TOKEN, lanes))
    alone = one.uniform(KEYS[7:8], TOKEN, lanes)
    assert torch.equal(alone, one.uniform(KEYS, TOKEN, lanes)[7:8])


def test_uniforms_are_uniform_and_in_range():
    u = Noise(0).uniform(KEYS, TOKEN, torch.arange(4))
    assert (u > 0).all()
    assert (u <= 1).all()
    counts = torch.histc(u, 100, 0, 1).numpy()
    assert chisquare(counts).pvalue > 1e-6


def test_purposes_lanes_rows_and_positions_are_independent():
    noise = Noise(0)
    lane = torch.arange(1)
    streams = {
        "token": noise.uniform(KEYS, TOKEN, lane),
        "accept": noise.uniform(KEYS, ACCEPT, lane),
        "residual": noise.uniform(KEYS, RESIDUAL, lane),
        "lane": noise.uniform(KEYS, TOKEN, lane + 1),
        "next": noise.uniform(KEYS.roll(1), TOKEN, lane),
        "seed": Noise(1).uniform(KEYS, TOKEN, lane),
    }
    table = torch.corrcoef(torch.stack([u.flatten() for u in streams.values()]))
    table.fill_diagonal_(0)
    assert table.abs().max() < 5 / math.sqrt(len(KEYS))


def test_coin_of_probability_one_never_fails():
    noise = Noise(0)
    one, zero = torch.ones(len(KEYS)), torch.zeros(len(KEYS))
    assert noise.bernoulli(one, KEYS, 0).all()
    assert not noise.bernoulli(zero, KEYS, 0).any()


def test_draws_follow_p_and_never_have_probability_zero():
    w = torch.tensor([0.0, 0.5, 0.2, 0.0, 0.3])
    drawn = Noise(3).categorical(w.expand(len(KEYS), -1), KEYS, TOKEN)
    counts = torch.bincount(drawn, minlength=5)
    assert counts[0] == counts[3] == 0
    kept = w > 0
    expected = w[kept].double() / w[kept].double().sum() * len(KEYS)
    assert chisquare(counts[kept].numpy(), expected.numpy()).pvalue > 1e-6


def test_draws_without_replacement_match_drawing_one_by_one():
    w = torch.tensor([0.5, 0.3, 0.15, 0.05])
    pairs = Noise(4).draw(w.expand(len(KEYS), -1), 2, KEYS)
    counts = torch.bincount(pairs[:, 0] * 4 + pairs[:, 1], minlength=16).double()
    expected = torch.tensor(
        [float(w[a] * w[b] / (1 - w[a])) if a != b else 0.0 for a in range(4) for b in range(4)],
        dtype=torch.float64,
    )
    assert (counts[expected == 0] == 0).all()
    kept = expected > 0
    expected = expected[kept] / expected.sum() * len(KEYS)
    assert chisquare(counts[kept].numpy(), expected.numpy()).pvalue > 1e-6


def test_token_of_probability_one_is_always_drawn():
    """Even where its arrival rounds to never: otherwise an impossible token would be drawn."""
    w = torch.zeros(4, 3)
    w[:, 2] = 1e-30

    class Edge(Noise):
        def uniform(self, keys, purpose, lanes):
            return torch.tensor([1.0, 1 - 2**-24, 2.0**-64, 0.5])[:, None].expand(4, 3)

    assert Edge(0).categorical(w, torch.zeros(4, dtype=torch.int64), TOKEN).tolist() == [2] * 4


def test_one_hot_draw_ignores_the_noise():
    p = torch.tensor([[0.0, 1.0, 0.0]])
    keys = torch.zeros(1, dtype=torch.int64)
    assert Certain().categorical(p, keys, TOKEN).tolist() == [1]
    assert Certain().bernoulli(torch.tensor([0.0, 1.0]), keys, 0).tolist() == [False, True]


def test_float32_draws_of_152000_tokens_have_no_bias():
    """Frequencies of a coarse grouping of 152,000 near-uniform tokens show no bias."""
    V, draws = 152_064, 1_000
    noise, w = Noise(5), torch.ones(250, V)
    drawn = torch.cat(
        [noise.categorical(w, KEYS[i : i + 250], TOKEN) for i in range(0, draws, 250)]
    )
    counts = torch.histc(drawn.float(), 16, 0, V).numpy()
    assert chisquare(counts).pvalue > 1e-6
    assert len(drawn.unique()) > 0.97 * draws


def test_a_million_draws_have_no_impossible_token():
    keys = mix(torch.arange(1_000_000))
    w = torch.tensor([0.0, 1e-6, 0.0, 1.0, 0.0])
    possible = w > 0
    assert possible[Noise(6).categorical(w.expand(len(keys), -1), keys, TOKEN)].all()
    assert possible[Noise(6).draw(w.expand(len(keys), -1), 2, keys)].all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_likeliest_matches_argmax_of_torch(dtype):
    w = torch.randint(-3, 3, (5, 4, 40)).to(dtype)  # with ties
    w[0, 0, 7], w[1, 1] = torch.nan, -torch.inf
    for x in (w, w[0, 0], w[..., 3:30], w.expand(2, -1, -1, -1), w.mT):
        found = likeliest(x)
        assert torch.equal(found, x.argmax(-1))
        assert found.dtype == torch.int64
