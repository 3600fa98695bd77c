"""Exact laws of speculative decoding, by walking every branch of chance.

`Oracle` answers a rule's or a drafter's questions in every possible way instead of drawing noise,
so the real round, run on it over the toys, yields the exact joint law of what it emits. Nothing
here knows how a rule decides, or how a model computes.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any, TypeVar

import torch
from scipy.stats import power_divergence
from support.toys import POISON, Text, Texts
from torch import Tensor

from specexp.engine import Engine
from specexp.models.lm import LM
from specexp.sampling import Noise, Sampling, mix
from specexp.sequences import Sequences
from specexp.tree import Tree

T = TypeVar("T")

# Chance ---------------------------------------------------------------------------------------


@dataclass
class Fork(Exception):
    """A question was answered in every way: one world for each, `parent` [W'] saying whose."""

    parent: Tensor
    weight: Tensor
    answers: Tensor


class Oracle:
    """An `Rng` for a batch of `worlds`, each of the same number of consecutive rows.

    `answers` [W, A] says, element by element in the order asked, what came about in each world.
    The first question beyond them raises `Fork`, unless its answer is certain everywhere.
    """

    def __init__(self, answers: Tensor, at_once: int) -> None:
        self.answers, self.at_once, self.used = answers, at_once, 0

    def keys(self, stream: Tensor, length: Tensor, depth: Tensor) -> Tensor:
        return Noise(0).keys(stream, length, depth)

    def bernoulli(self, p: Tensor, keys: Tensor, lane: int) -> Tensor:
        p = p.nan_to_num(0).clamp(0, 1)  # as u <= p does
        return self._ask(torch.stack([1 - p, p], -1)).bool()

    def categorical(self, w: Tensor, keys: Tensor, purpose: int) -> Tensor:
        """Equal addresses and equal laws give equal draws, as noise that is a function does."""
        drawn = self._ask(w)
        if keys.dim() == 1:
            return drawn
        alike = (w[:, :, None] == w[:, None]).all(-1) & (keys[:, :, None] == keys[:, None])
        return drawn.gather(1, alike.int().argmax(-1))

    def uncoupled(self, w: Tensor, keys: Tensor) -> Tensor:
        return self._ask(w)

    def draw(self, w: Tensor, k: int, keys: Tensor) -> Tensor:
        """Tokens of weight 0, once nothing else is left, come in any order."""
        orders = torch.tensor(list(itertools.permutations(range(w.shape[-1]), k)))
        odds = torch.ones(1, dtype=w.dtype)
        left = w[..., None, :].expand(*w.shape[:-1], len(orders), -1)
        unused = torch.ones_like(left)
        for x in orders.T[..., None]:
            left = torch.where(left.sum(-1, keepdim=True) > 0, left, unused)
            x = x.expand(*left.shape[:-1], 1)
            odds = odds * (left.gather(-1, x) / left.sum(-1, keepdim=True))[..., 0]
            left, unused = left.scatter(-1, x, 0), unused.scatter(-1, x, 0)
        return orders[self._ask(odds)]

    def _ask(self, odds: Tensor) -> Tensor:
        """odds [rows, ..., K] >= 0 of K outcomes; the outcome of every element [rows, ...]."""
        W, A = self.answers.shape
        flat = odds.double().reshape(W, -1, odds.shape[-1])
        count = flat.shape[1]
        assert bool((flat >= 0).all() & (flat.sum(-1) > 0).all()), "not a law"
        flat = flat / flat.sum(-1, keepdim=True)
        parent, weight = torch.arange(W), torch.ones(W, dtype=torch.float64)
        new = torch.empty(W, 0, dtype=torch.int64)
        for e in range(A - self.used, count):
            if len(parent) > self.at_once:
                break
            branch, outcome = flat[parent, e].nonzero(as_tuple=True)
            weight = weight[branch] * flat[parent[branch], e, outcome]
            new = torch.cat([new[branch], outcome[:, None]], 1)
            parent = parent[branch]
        answers = torch.cat([self.answers[parent], new], 1)
        if len(parent) > W:
            raise Fork(parent, weight, answers)
        self.answers, self.used = answers, self.used + count
        return answers[:, self.used - count : self.used].reshape(odds.shape[:-1])


def branches(
    run: Callable[[Tensor, Oracle], T], worlds: int, at_once: int = 1 << 14
) -> Iterator[tuple[Tensor, Tensor, T]]:
    """Run a program over every branch of chance, up to about `at_once` worlds side by side.

    `run(world, oracle)` starts afresh from the worlds [W'] it is given, until it no longer forks.
    Yields which worlds they were, with what probability they went this way, and what came out.
    """
    stack = [
        (
            torch.arange(worlds),
            torch.ones(worlds, dtype=torch.float64),
            torch.empty(worlds, 0).long(),
        )
    ]
    while stack:
        world, weight, answers = stack.pop()
        try:
            result = run(world, Oracle(answers, at_once))
        except Fork as fork:
            forked = world[fork.parent], weight[fork.parent] * fork.weight, fork.answers
            stack += zip(*(part.split(at_once) for part in forked), strict=True)
            continue
        yield world, weight, result


# Every text the engine can write --------------------------------------------------------------


@dataclass
class Outcome:
    """What can come of each case c, exactly.

    law[c]: the probability of each text (a token tuple a row). accepted[c, r, n]: the probability
    that row 0 lives in round r and has n draft tokens accepted. dirty: a model read an empty slot.
    """

    law: list[dict[Texts, float]]
    accepted: dict[tuple[int, int, int], float] = field(default_factory=lambda: defaultdict(float))
    dirty: bool = False

    def end(self, case: Tensor, state: Tensor, weight: Tensor, begin: Tensor) -> None:
        for c, rows, w in zip(case.tolist(), state.tolist(), weight.tolist(), strict=True):
            starts = begin[c].tolist()
            texts = (tuple(row[a : row[-2]]) for a, row in zip(starts, rows, strict=True))
            self.law[c][tuple(texts)] += w

    def count(self, case: Tensor, r: int, report: Tensor, weight: Tensor) -> None:
        live = report[:, 1] > 0
        seen = torch.stack([case, report[:, 0]], 1)[live]
        pairs, which = seen.unique(dim=0, return_inverse=True)
        total = weight.new_zeros(len(pairs)).index_add(0, which, weight[live])
        for (c, n), w in zip(pairs.tolist(), total.tolist(), strict=True):
            self.accepted[c, r, n] += w


@torch.inference_mode()
def explore(
    engine: Engine,
    cases: Sequence[Sequence[Sequence[int]]],
    max_new_tokens: int,
    trees: Sequence[Tree],
) -> Outcome:
    """The exact joint law of what `engine` makes of each case, a batch of prompts.

    All cases run side by side, so they must have the same number of rows. Round r drafts
    `trees[r % len(trees)]`. Between rounds all that lies past a row's text, or past the slots its
    caches have committed, is poisoned; worlds that then agree in everything are one world. Every
    live row must emit: what is not done after `max_new_tokens` rounds is missing from the law.
    """
    R = len(cases[0])
    prompts = [list(prompt) for case in cases for prompt in case]
    seqs = Sequences.of(prompts, max_new_tokens, slack=max(map(len, trees)), eos=engine.eos)
    seqs = engine.begin(seqs)
    begin = seqs.length.reshape(-1, R)
    case, weight = torch.arange(len(cases)), torch.ones(len(cases), dtype=torch.float64)
    state = _freeze(engine, seqs).unflatten(0, (-1, R))
    out = Outcome([defaultdict(float) for _ in cases])
    for r in range(max_new_tokens + 1):
        live = (state[..., -2] < state[..., -1]).any(1)
        out.end(case[~live], state[~live], weight[~live], begin)
        case, state, weight = case[live], state[live], weight[live]
        if not len(case):
            break
        run = partial(_round, engine, trees[r % len(trees)], state)
        parts = []
        for world, chance, (after, report) in branches(run, len(state)):
            out.count(case[world], r, report, chance * weight[world])
            parts.append(_merge(case[world], after, chance * weight[world]))
        case, state, weight = _merge(*map(torch.cat, zip(*parts, strict=True)))
    out.dirty = any(lm.module.dirty for lm in engine.models)
    return out


def _round(
    engine: Engine, tree: Tree, state: Tensor, world: Tensor, oracle: Oracle
) -> tuple[Tensor, Tensor]:
    """One real round of these worlds; their states after it, and what it reports of row 0."""
    R = state.shape[1]
    seqs = _thaw(engine, state[world].flatten(0, 1))
    was, live = seqs.length.clone(), seqs.live
    engine.rng = oracle
    report = engine.round(seqs, tree)
    n, emitted, still = report.T[:3]
    drafted = (report[:, 3 + len(engine.models) :] >= 0).sum(1)
    assert torch.equal(emitted, seqs.length - was), "reported emitted is what the row gained"
    assert torch.equal(still.bool(), seqs.live), "reported live is live"
    assert torch.equal(emitted > 0, live), "live rows go on, and no others"
    assert bool((emitted <= n + 1).all() & (n <= drafted).all()), "emitted <= n + 1 <= drafted + 1"
    return _freeze(engine, seqs).unflatten(0, (-1, R)), report[::R]


def _freeze(engine: Engine, seqs: Sequences) -> Tensor:
    """All that a round leaves to the next [B, C]: tokens, keys and values, length, limit."""
    B, S = seqs.tokens.shape  # the caches may be larger, of a batch before
    slot = torch.arange(S)
    parts = [seqs.tokens.masked_fill(slot >= seqs.length[:, None], POISON)]
    for lm in engine.models:
        layer = _layer(lm)
        empty = seqs.tokens[:, None, :, None]  # of prompts of one token, nothing is prefilled
        for held in (layer.keys, layer.values) if layer.is_initialized else (empty, empty):
            parts.append(held[:B, 0, :S, 0].masked_fill(slot >= seqs.length[:, None] - 1, POISON))
    return torch.cat([*parts, seqs.length[:, None], seqs.limit[:, None]], 1)


def _thaw(engine: Engine, state: Tensor) -> Sequences:
    S = (state.shape[1] - 2) // (1 + 2 * len(engine.models))
    tokens, *buffers = (part.clone() for part in state[:, :-2].split(S, 1))
    for lm, keys, values in zip(engine.models, buffers[::2], buffers[1::2], strict=True):
        lm.allocate(*tokens.shape)
        layer = _layer(lm)
        layer.keys, layer.values = keys[:, None, :, None], values[:, None, :, None]
        layer.is_initialized = True
    stream, eos = torch.arange(len(state)), torch.tensor(engine.eos, dtype=torch.int64)
    return Sequences(tokens, state[:, -2].clone(), state[:, -1].clone(), stream, eos)


def _layer(lm: LM) -> Any:
    assert lm.cache is not None
    return lm.cache.layers[0]


def _merge(case: Tensor, state: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    keyed = torch.cat([case[:, None], state.flatten(1)], 1)
    hashed = (keyed * mix(torch.arange(keyed.shape[1]))).sum(1)  # sorts sooner than whole rows
    hashes, which = hashed.unique(return_inverse=True)
    merged = keyed[torch.zeros_like(hashes).scatter(0, which, torch.arange(len(keyed)))]
    assert torch.equal(merged[which], keyed), "different worlds have one hash"
    total = weight.new_zeros(len(merged)).index_add(0, which, weight)
    return merged[:, 0], merged[:, 1:].reshape(-1, *state.shape[1:]), total


# The law they are held to ---------------------------------------------------------------------


def warp(weights: Sequence[int], sampling: Sampling) -> list[Fraction]:
    """Temperature 0 or 1/k, then top-k (ties kept), then top-p, in rational numbers."""
    if sampling.temperature == 0:
        return [Fraction(i == weights.index(max(weights))) for i in range(len(weights))]
    power = round(1 / sampling.temperature)
    assert power * sampling.temperature == 1
    w = [Fraction(x) ** power for x in weights]
    if 0 < sampling.top_k < len(w):
        least = sorted(w)[-sampling.top_k]
        w = [x if x >= least else Fraction(0) for x in w]
    if sampling.top_p < 1:
        p, before, kept = (
            Fraction(sampling.top_p).limit_denominator(1000) * sum(w),
            Fraction(0),
            set(),
        )
        for i in sorted(range(len(w)), key=lambda i: -w[i]):
            if before < p:
                kept.add(i)
            before += w[i]
        w = [x if i in kept else Fraction(0) for i, x in enumerate(w)]
    return [x / sum(w) for x in w]


def target_law(
    lm: LM,
    prompt: Sequence[int],
    max_new_tokens: int,
    eos: Sequence[int] = (),
    sampling: Sampling = Sampling(temperature=1.0),
) -> dict[Text, Fraction]:
    """The joint law of plain decoding: every text the target can write, ended by eos."""
    law: dict[Text, Fraction] = {(): Fraction(1)}
    for _ in range(max_new_tokens):
        longer: dict[Text, Fraction] = {}
        for text, weight in law.items():
            if text and text[-1] in eos:
                longer[text] = weight
                continue
            for x, p in enumerate(warp(lm.module.after([*prompt, *text]), sampling)):
                if p:
                    longer[(*text, x)] = weight * p
        law = longer
    return law


def product(laws: Sequence[dict[Text, Fraction]]) -> dict[Texts, Fraction]:
    """The joint law of independent rows."""
    joint: dict[Texts, Fraction] = {(): Fraction(1)}
    for law in laws:
        joint = {(*texts, text): a * b for texts, a in joint.items() for text, b in law.items()}
    return joint


def distance(a: Mapping[Any, float], b: Mapping[Any, Fraction]) -> float:
    """Total variation."""
    return sum(abs(a.get(x, 0.0) - float(b.get(x, 0))) for x in {*a, *b}) / 2


def gap(
    engine: Engine, cases: Sequence[Texts], max_new_tokens: int, trees: Sequence[Tree]
) -> float:
    """The largest distance, over the cases, of what the engine writes from what the target does;
    it must be rounding. Asserts that no model read an empty slot."""
    out = explore(engine, cases, max_new_tokens, trees)
    assert not out.dirty, "a model read a slot that holds nothing"
    return max(
        distance(law, plain(engine, case, max_new_tokens))
        for law, case in zip(out.law, cases, strict=True)
    )


def plain(engine: Engine, case: Texts, max_new_tokens: int) -> dict[Texts, Fraction]:
    """The joint law of plain decoding of a batch."""
    return product(
        [target_law(engine.target, p, max_new_tokens, engine.eos, engine.sampling) for p in case]
    )


@torch.inference_mode()
def written(engine: Engine, case: Texts, max_new_tokens: int) -> dict[Texts, float]:
    """The exact joint law of `generate` itself, world by world: only for the smallest toys."""

    def run(world: Tensor, oracle: Oracle) -> Texts:
        engine.rng = oracle
        return tuple(map(tuple, engine.generate(case, max_new_tokens).tokens))

    law: dict[Texts, float] = defaultdict(float)
    for _, weight, found in branches(run, 1, at_once=1):
        law[found] += float(weight)
    return law


def kept(engine: Engine, cases: Sequence[Texts], gamma: int) -> list[float]:
    """Expected draft tokens kept in the first round, by case."""
    found = explore(engine, cases, 1, [Tree.chain(gamma)]).accepted
    means = [0.0] * len(cases)
    for (c, r, n), weight in found.items():
        means[c] += n * weight * (r == 0)
    return means


def overlap(
    engine: Engine, prompt: Text, depth: int, both: Callable[[Fraction, Fraction], Fraction]
) -> Fraction:
    """P(at least `depth` draft tokens of a chain are kept): both(p, q) summed along every path."""
    if depth == 0:
        return Fraction(1)
    p, q = (lm.module.after(prompt) for lm in engine.models)
    paths = (
        both(Fraction(a, sum(p)), Fraction(b, sum(q)))
        * overlap(engine, (*prompt, x), depth - 1, both)
        for x, (a, b) in enumerate(zip(p, q, strict=True))
    )
    return sum(paths, Fraction(0))


def surprise(engine: Engine, case: Texts, max_new_tokens: int, draws: int) -> float:
    """The G-test's p-value of texts sampled with the engine's own noise, `draws` of the case.

    Outcomes expected fewer than five times are pooled; an impossible one gives 0.
    """
    seen = Counter(sampled(engine, case, max_new_tokens, draws))
    law = plain(engine, case, max_new_tokens)
    if not seen.keys() <= law.keys():
        return 0.0
    observed, expected = [0], [0.0]
    for texts, weight in law.items():
        if (mean := float(weight) * draws) < 5:
            observed[0] += seen[texts]
            expected[0] += mean
        else:
            observed.append(seen[texts])
            expected.append(mean)
    if not expected[0]:
        observed, expected = observed[1:], expected[1:]
    return float(power_divergence(observed, expected, lambda_="log-likelihood").pvalue)


def sampled(engine: Engine, case: Texts, max_new_tokens: int, draws: int) -> list[Texts]:
    """What `generate` writes for the case `draws` times over, side by side, each row a stream."""
    R = len(case)
    flat = engine.generate(list(case) * draws, max_new_tokens).tokens
    return [tuple(map(tuple, flat[i : i + R])) for i in range(0, R * draws, R)]
