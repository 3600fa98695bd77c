"""Exact laws of speculative decoding, by walking every branch of chance.

`Oracle` answers a rule's or a drafter's questions in every possible way instead of drawing noise,
so the real round, run on it, yields the exact joint law of what it emits. Tokens come from toy
networks that run under the real `LM` over the real cache: their logits are a hash of the
(position, token) pairs that the mask lets them see, so a stale slot, a wrong mask or a wrong
position is another law. Nothing here knows how a rule decides.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

from specexp.drafters import Drafter
from specexp.drafters.model import DraftModel
from specexp.drafters.ngram import NGram
from specexp.drafters.null import Null
from specexp.engine import Engine
from specexp.lm import LM, Forward
from specexp.policy import Fixed
from specexp.rules import Rule
from specexp.sampling import Rng, Sampling, mix
from specexp.sequences import Draft, Sequences, Verdict
from specexp.tree import Tree

POISON = -7  # what fills every slot that no pass may read
GREATEST = 9  # weights of tokens are integers up to this
Text = tuple[int, ...]
Texts = tuple[Text, ...]  # of a batch, row by row
T = TypeVar("T")


class Toy:
    """A network whose one attention layer hashes what it sees; laws are ratios of small integers.

    kind: `dense`; `zeros` (about a third of the tokens impossible); `onehot`; `even` and `odd`
    (disjoint supports); `tied` (logits equal in pairs). A `blind` toy ignores its context. Two toys
    of the same kind and salt are the same network. `dirty`: it ever read a poisoned slot.
    """

    dtype, device = torch.float64, torch.device("cpu")

    def __init__(self, V: int, kind: str = "dense", salt: int = 0, blind: bool = False) -> None:
        self.V, self.kind, self.salt, self.blind = V, kind, salt, blind
        self.dirty = False
        self.config = SimpleNamespace(
            vocab_size=V, num_hidden_layers=1, num_attention_heads=1, hidden_size=1,
            max_position_embeddings=1 << 20, model_type="toy",
        )  # fmt: skip
        self.config.get_text_config = lambda: self.config

    def eval(self) -> Toy:
        return self

    def requires_grad_(self, _: bool) -> Toy:
        return self

    @property
    def base_model(self) -> Toy:
        return self

    def __call__(
        self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor,
        past_key_values: Any, **_: Any,
    ) -> SimpleNamespace:  # fmt: skip
        layer = past_key_values.update(
            input_ids[:, None, :, None], position_ids[:, None, :, None], 0
        )
        tokens, positions = (buffer[:, 0, :, 0] for buffer in layer)
        visible = attention_mask[:, 0] == 0
        self.dirty |= bool((visible & (tokens == POISON)[:, None]).any())
        read = (self.pair(positions, tokens)[:, None] * visible).sum(-1)
        return SimpleNamespace(logits=self.weights(read, position_ids, input_ids).log())

    @staticmethod
    def pair(positions: Tensor, tokens: Tensor) -> Tensor:
        return mix(mix(positions + 1) + tokens)

    def weights(self, read: Tensor, position: Tensor, token: Tensor) -> Tensor:
        """[..., V] float64 integers, from a sum of pairs and the reader's own pair."""
        context = (
            torch.zeros_like(read) if self.blind else mix(read + 3 * self.pair(position, token))
        )
        v = torch.arange(self.V)
        bits = (mix(mix(context + self.salt)[..., None] + v) >> 8) & 0xFFFFFF
        w = 1 + bits % GREATEST
        favourite = v == (context % self.V)[..., None]
        if self.kind == "zeros":
            w = w * ((bits // GREATEST % 3 > 0) | favourite)
        elif self.kind == "onehot":
            w = w * favourite
        elif self.kind in ("even", "odd"):
            w = w * ((v + context[..., None]) % 2 == (self.kind == "odd"))
        elif self.kind == "tied":
            w = w[..., v // 2]
        return w.double()

    def after(self, prefix: Sequence[int]) -> list[int]:
        """The weights of the token that follows `prefix`, which lies at positions 0, 1, ..."""
        tokens = torch.tensor(prefix)
        at = torch.arange(len(prefix))
        return [int(w) for w in self.weights(self.pair(at, tokens).sum(), at[-1], tokens[-1])]


class Scripted:
    """Guesses chosen anyhow: a hash of the text and the node; twins among siblings, -1 here and
    there. The hardest drafter for a rule that does not know q."""

    name, taps, models, context = "scripted", (), (), 1 << 30

    def __init__(self, V: int) -> None:
        self.V = V

    def prefill(self, seqs: Sequences, hidden: Tensor | None) -> None: ...

    def propose(self, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
        known = torch.arange(seqs.tokens.shape[1]) < seqs.length[:, None]
        text = (Toy.pair(torch.arange(seqs.tokens.shape[1]), seqs.tokens) * known).sum(1)
        guesses = mix(text[:, None] + torch.arange(1, len(tree))) % (self.V + 1) - 1
        return seqs.draft(tree.nodes("cpu"), guesses)

    def observe(self, seqs: Sequences, tree: Tree, verdict: Verdict, seen: Forward) -> None: ...


def toy_engine(
    rule: Rule,
    drafter: str = "drawn",
    V: int = 3,
    p: str = "dense",
    q: str = "dense",
    *,
    twin: bool = False,
    blind: bool = False,
    sampling: Sampling = Sampling(temperature=1.0),
    eos: Sequence[int] = (),
) -> Engine:
    """A toy of kind p as the target, and one of kind q, or the target's twin, as the drafter."""
    drafting = LM(Toy(V, q, salt=1 if twin else 2, blind=blind), "draft")
    made: dict[str, Drafter] = {
        "null": Null(),
        "ngram": NGram(2),
        "scripted": Scripted(V),
        "drawn": DraftModel(drafting, sampling),
        "chosen": DraftModel(drafting, sampling, chosen=True),
    }
    target = LM(Toy(V, p, salt=1, blind=blind), "target")
    return Engine(target, made[drafter], Fixed(Tree.chain(0)), sampling, rule, eos=eos)


def texts(V: int, cases: int, rows: int = 1) -> list[Texts]:
    """Ragged prompts of 1 to 6 tokens; the first, no token of the vocabulary, sets them apart."""
    made = [
        (V + 1 + i, *((i * i + 3 * j + i // 3 + j // 2) % V for j in range(i % 6)))
        for i in range(cases * rows)
    ]
    return [tuple(made[c * rows : (c + 1) * rows]) for c in range(cases)]


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
    that row 0 lives in round r and has n guesses accepted. dirty: a model read an empty slot.
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
        seen = torch.stack([case, report[:, 2]], 1)[report[:, 0] == 1]
        pairs, which = seen.unique(dim=0, return_inverse=True)
        total = weight.new_zeros(len(pairs)).index_add(0, which, weight[report[:, 0] == 1])
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
    engine.drafter.prefill(seqs, engine.target.prefill(seqs, engine.drafter.taps))
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
    was = seqs.length.clone()
    engine.rng = oracle
    report = engine.round(seqs, tree)
    live, drafted, n, emitted, still = report.T[:5]
    assert torch.equal(emitted, seqs.length - was), "reported emitted is what the row gained"
    assert torch.equal(still.bool(), seqs.live), "reported live is live"
    assert bool(((emitted == 0) | (live == 1)).all()), "a done row stays as it is"
    assert bool((emitted <= n + 1).all() & (n <= drafted).all()), "emitted <= n + 1 <= drafted + 1"
    return _freeze(engine, seqs).unflatten(0, (-1, R)), report[::R]


def _freeze(engine: Engine, seqs: Sequences) -> Tensor:
    """All that a round leaves to the next [B, C]: tokens, keys and values, length, limit."""
    slot = torch.arange(seqs.tokens.shape[1])
    parts = [seqs.tokens.masked_fill(slot >= seqs.length[:, None], POISON)]
    for lm in engine.models:
        layer = _layer(lm)
        empty = seqs.tokens[:, None, :, None]  # of prompts of one token, nothing is prefilled
        for held in (layer.keys, layer.values) if layer.is_initialized else (empty, empty):
            parts.append(held[:, 0, :, 0].masked_fill(slot >= seqs.length[:, None] - 1, POISON))
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
    merged, which = keyed.unique(dim=0, return_inverse=True)
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
