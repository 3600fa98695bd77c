"""Compiled passes give what transformers gives, a token the same whatever stands beside it."""

import logging
import random
import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_cpu_replays
import test_fused_eagle
import torch
from conftest import tiny_llama
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny import DRAFTERS, NEW, PROMPTS, TREES, engine
from test_fused import NETS, made, passed, unfused

from specexp.drafters.lookahead import POOL, Lookahead
from specexp.drafters.null import Null
from specexp.drafters.recycle import Recycle, Table
from specexp.drafters.suffix import Suffix
from specexp.engine import Engine
from specexp.errors import NonFiniteLogits
from specexp.fast import cpu, cpu_replays, fused
from specexp.fast.cpu import Native
from specexp.fast.fused import Fused
from specexp.models.cache import SlotCache
from specexp.models.lm import LM, Forward
from specexp.models.load import of_module
from specexp.policy import Fixed
from specexp.rules import Block, Match, Reject
from specexp.sampling import (
    ACCEPT,
    RESIDUAL,
    TOKEN,
    Certain,
    Noise,
    Sampling,
    _signed,
    likeliest,
    mix,
    ranked,
)
from specexp.sequences import Draft, Sequences, Verdict, columns
from specexp.tree import Nodes, Tree

pytestmark = pytest.mark.compiler
FLOATS = [torch.float32, torch.bfloat16]
NEAR = {torch.float32: 2e-6, torch.bfloat16: 0.03}  # of their size


def compiled(name: str = "llama", dtype: torch.dtype = torch.float32) -> LM:
    lm = of_module(made(name, dtype))
    assert isinstance(lm.net, Native)
    return lm


@pytest.fixture(autouse=True)
def _fresh():
    """Every test tries its modules anew."""
    fused._FUSED.clear()


def apart(ours, theirs) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def off(name: str, dtype: torch.dtype = torch.float32) -> float:
    """By how much states and logits, of prompts and of a tree, differ from those of transformers
    in float64, at most."""
    lm, module = compiled(name, dtype), made(name, dtype).to(torch.float64)
    taps = (0, 1, lm.config.num_hidden_layers)
    (states, seen), (theirs, wanted) = passed(lm, taps), passed(unfused(module), taps)
    assert states.dtype == seen.hidden.dtype == dtype
    assert seen.logits.dtype == torch.float32
    pairs = (states, theirs), (seen.hidden, wanted.hidden), (seen.logits, wanted.logits)
    return max(apart(*pair) for pair in pairs)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", NETS)
def test_compiled_passes_are_those_of_transformers(name, dtype):
    assert off(name, dtype) < NEAR[dtype]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_text_is_that_of_plain_decoding_whatever_drafts(kind, tree):
    for temperature in (0.0, 0.9):
        made = engine(kind, tree, "match", temperature=temperature, dtype=torch.float32, seed=5)
        assert isinstance(made.target.net, Native)
        plain = made.plain()
        assert made.generate(PROMPTS, NEW).tokens == plain.generate(PROMPTS, NEW).tokens


@torch.inference_mode()
def steps(made: Engine) -> list[object]:
    """What a round does, one by one, but for what only looks."""
    seqs = made.begin(Sequences.of(PROMPTS, NEW, slack=9))
    made.round(seqs, made.policy.tree)
    with cpu_replays.recording() as noted:
        made.round(seqs, made.policy.tree)
    return [getattr(x, "func", None) or x.function for x in cpu_replays.changing(noted.steps)]


@pytest.mark.parametrize("kind", ["null", "recycle", "early_exit", "medusa", "eagle", "eagle3"])
def test_rounds_of_a_padded_vocabulary_take_no_other_steps(kind):
    """Logits of padding are not made; nothing is held twice."""
    whole, padded = (
        engine(kind, "chain", "match", temperature=0.9, dtype=torch.float32, vocab=vocab)
        for vocab in (None, 26)
    )
    assert steps(padded) == steps(whole)
    assert padded.target.net.fused.head.shape == (26, 32)
    assert padded.target.net.fused.head.data_ptr() == whole.target.module.lm_head.weight.data_ptr()
    made = padded.generate(PROMPTS, NEW)
    if kind == "null":
        assert isinstance(padded.replays.latest[1].again, cpu_replays._Compiled)
    assert max(map(max, made.tokens)) < 26
    plain = padded.plain()
    plain.target = unfused(plain.target.module)
    plain.target.vocab = 26
    assert made.tokens == plain.generate(PROMPTS, NEW).tokens


# --- the same to the last bit --------------------------------------------------------------------


def fed(lm: LM, rows: list[list[int]], sizes: list[int]) -> torch.Tensor:
    """Logits of all places of these texts, fed so many at once."""
    lm.allocate(len(rows), 40)
    seqs = Sequences.of(rows, 40 - len(rows[0]), slack=0)
    found, at = [], 0
    for size in sizes:
        slots = torch.arange(at, at + size).expand(len(rows), -1)
        tokens = seqs.tokens.gather(1, slots)
        found.append(lm.feed(seqs, tokens, slots, slots, None).logits)
        at += size
    return torch.cat(found, 1)


def steady(name: str, dtype: torch.dtype = torch.float32) -> bool:
    lm = compiled(name, dtype)
    texts = torch.randint(0, 32, (5, 12), generator=torch.manual_seed(0)).tolist()
    alone = torch.cat([fed(lm, [text], [1] * 12) for text in texts])
    return all(
        torch.equal(fed(lm, texts[some], sizes), alone[some])
        for sizes in ([12], [5, 7], [1, 2, 3, 4, 2], [11, 1])
        for some in (slice(None), slice(2, 3))
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["llama", "one key", "biased", "qwen3"])
def test_a_token_has_the_same_logits_whatever_shares_its_pass(name, dtype):
    assert steady(name, dtype)


def sparing(name: str, dtype: torch.dtype = torch.float32) -> bool:
    """Of five texts the first 0, 2, 4, 6 and 8 of eight tokens are fed, -1 in place of the others:
    those have the logits, states, keys and values that they have among all, and the others 0."""
    lm, kept = compiled(name, dtype), torch.arange(8) < 2 * torch.arange(5)[:, None]
    texts = torch.randint(0, 32, (5, 8), generator=torch.manual_seed(0))
    slots, seqs = torch.arange(8).expand(5, -1), Sequences.of(texts.tolist(), 0, slack=0)

    def seen(tokens: torch.Tensor, last: int | None = None) -> list[torch.Tensor]:
        lm.allocate(5, 8)
        made = lm.feed(seqs, tokens, slots, slots, None, taps=(0, 1), last=last)
        layer = lm.cache.layers[-1]
        deep = (x.transpose(1, 2).flatten(2) for x in (layer.keys, layer.values))
        return [made.logits, made.hidden, *deep]

    some = texts.where(kept, -1)
    pairs = zip(seen(some), seen(texts), strict=True)
    same = all(torch.equal(one, all_ * kept[..., None]) for one, all_ in pairs)
    return same and torch.equal(seen(some, 3)[0], seen(some)[0][:, -3:])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["llama", "one key", "biased", "qwen3"])
def test_what_is_no_token_has_no_part_in_a_pass(name, dtype):
    assert sparing(name, dtype)


def test_a_pass_of_no_token_is_nothing():
    lm = compiled()
    lm.allocate(2, 8)
    seqs, slots = Sequences.of([[1] * 8] * 2, 0, slack=0), torch.arange(3).expand(2, -1)
    made = lm.feed(seqs, torch.full((2, 3), -1), slots, slots, None, taps=(0, 1), last=2)
    assert made.logits.shape[:2] == (2, 2)
    assert not made.logits.any()
    assert not made.hidden.any()
    assert not lm.fault.any()


def test_and_however_many_threads_make_it():
    lm, threads = compiled("biased"), torch.get_num_threads()
    texts = torch.randint(0, 32, (3, 12), generator=torch.manual_seed(0)).tolist()
    found = []
    try:
        for count in (1, 2, 3, 8):
            torch.set_num_threads(count)
            found.append(fed(lm, texts, [4, 8]))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, found[0]) for one in found)


def test_many_tokens_are_left_to_the_libraries(monkeypatch):
    lm = compiled()
    seen = passed(lm, ())[1].logits
    monkeypatch.setattr(cpu.Native, "sparing", 3)
    monkeypatch.setattr(lm.net, "run", None)
    assert apart(passed(lm, ())[1].logits, seen) < 1e-5


def test_logits_of_the_last_places_are_those_of_all_of_them():
    lm = compiled()
    seqs = Sequences.of(PROMPTS, 4, slack=1)
    lm.allocate(*seqs.tokens.shape)
    slots = torch.arange(4).expand(len(PROMPTS), 4)
    asked = (seqs, seqs.tokens[:, :4], slots, slots, None)
    whole = lm.feed(*asked).logits
    for last in (1, 3):
        assert torch.equal(lm.feed(*asked, last=last).logits, whole[:, -last:])


# --- between passes ------------------------------------------------------------------------------


MODULE = tiny_llama(0)


def rounded_off(seed: int) -> list[torch.Tensor]:
    """All that a round leaves behind and tells of some rows of a bank: some are done, ends of text
    and equal logits are frequent, some guesses were not made, some logits are no numbers."""
    torch.manual_seed(seed)
    dice = random.Random(seed)
    B, first, V = dice.randint(1, 4), dice.randint(0, 2), dice.choice([3, 17, 40])
    tree = Tree.parse(dice.choice(["chain", "2x2", "3x1x1"]), dice.randint(0, 4))
    N, nodes = len(tree), tree.nodes("cpu")
    if dice.random() < 0.3:  # one tree a row, each node following any before it
        parents = torch.stack(
            [torch.tensor([0, *map(dice.randrange, range(1, N))]) for _ in range(B)]
        )
        nodes = Nodes.of(parents.sort(1).values, max(N - 1, 0), N)
    length = torch.randint(1, 6, (first + B,))
    bank = Sequences(
        torch.randint(0, 3, (first + B, 20)), length, length + torch.randint(-1, 5, length.shape),
        torch.arange(first + B), torch.arange(dice.randint(0, 2)),
    )  # fmt: skip
    seqs = bank.window(first, B, 18)
    logits = torch.randint(-1, 2, (B, N, V)).float()
    logits[torch.rand(B, N, V) < dice.choice([0, 0.05])] = dice.choice([torch.inf, torch.nan])
    logits[torch.rand(B, N) < 0.1] = -torch.inf
    guesses = torch.randint(-1, 3, (B, N - 1))
    target, other = (LM(MODULE, "model", V, lambda *asked: (logits, None)) for _ in range(2))
    for lm in (target, other):
        lm.allocate(first + B, 18)
    other.fault[torch.rand(first + B) < 0.3] = torch.nan
    drafter = Null()
    drafter.models = (other,)
    made = Engine(target, drafter, Fixed(tree))
    draft = seqs.draft(nodes, guesses)
    seen = target.verify(seqs, draft)
    verdict = Match()(draft, seen.logits, Certain())
    counts = seqs.commit(verdict)
    seqs.budget = torch.randint(-1, 3, (B,))
    some = draft.within().tokens
    draft.grade, seqs.reach = torch.randint(0, 3, (B,)), torch.randint(0, 3, (3,))
    placed = (
        seqs.places(nodes.depth - 2),
        seqs.drafting(draft.tokens, 1),
        some,
        draft.within().tokens,
    )
    known = (
        seqs.read(seqs.places(-nodes.depth)),
        columns(list(draft.tokens.contiguous().split(1, 1))),
    )
    text = bank.tokens.masked_fill(torch.arange(20) >= bank.length[:, None], -1)
    told = likeliest(logits), verdict.path, verdict.n, verdict.new, counts, target.fault.isnan()
    return [
        *told,
        *placed,
        *known,
        text,
        bank.length,
        bank.limit,
        made._report(seqs, draft, counts),
        made._report(seqs, replace(draft, grade=None), counts),
    ]


def guessed(seed: int) -> list[torch.Tensor]:
    """What drafters without weights guess in some rounds, and what they know then, of some rows of
    a bank: prompts hold ids beyond the vocabulary, tokens share places, some know nothing yet."""
    torch.manual_seed(seed)
    dice = random.Random(seed)
    B, first, V, n = dice.randint(1, 4), dice.randint(0, 2), dice.choice([3, 6, 12]), 3
    trees = Tree.branching(2, 2), Tree.branching(3, 1, 2), Tree((-1, 0, 0, 0, 1, 1, 3, 4))
    tree = dice.choice([*trees, *map(Tree.chain, range(6))])
    bank = Sequences.empty(first + B, 64)
    bank.tokens.copy_(torch.randint(0, dice.choice([2, V, V + 2]), bank.tokens.shape))
    bank.length.copy_(torch.randint(1, 30, (first + B,)))
    bank.limit.fill_(50)
    seqs = bank.window(first, B, 60)
    target = SimpleNamespace(vocab=V, device=torch.device("cpu"))
    share, stretch = dice.choice([0.1, 0.2, 0.5]), dice.choice([0.5, 1.0, 3.0])
    suffix = Suffix(V, dice.randint(1, 4), share, stretch)
    recycle, lookahead = Recycle(target, 4), Lookahead(target, n, tree.depth)
    drafters = suffix, recycle, lookahead
    for drafter in drafters:
        drafter.allocate(*bank.tokens.shape)
    places = dice.choice([2, V])
    recycle.table = Table(first + B, V, (recycle.k,), target.device, places)
    lookahead.pool = Table(first + B, V, (POOL, n - 1), target.device, places)
    for drafter in drafters:
        drafter.prefill(seqs, None)
    guesses, some = [], torch.arange(-1, V + 2).expand(B, -1)
    for _ in range(4):
        seqs.budget = dice.choice([None, torch.randint(-1, tree.depth + 2, (B,))])
        drafts = [drafter.propose(seqs, tree, Certain()) for drafter in drafters]
        guesses += [x for draft in drafts for x in (draft.tokens, draft.grade) if x is not None]
        logits = torch.rand(B, len(tree), V).argsort(-1).float()  # none are equal
        line = torch.randint(0, V, (B, tree.depth + 1))
        verdict = Verdict(line, torch.randint(0, tree.depth + 1, (B,)), line)
        for drafter in drafters:
            drafter.observe(seqs, tree, verdict, Forward(logits, None))
        seqs.commit(verdict)
    known = (table.read(seqs.rows, some) for table in (recycle.table, lookahead.pool))
    return [*guesses, *known, lookahead.lines]


def alike(seed: int, told: Callable[[int], list[torch.Tensor]] = rounded_off) -> bool:
    """Whether compiled code and torch's operations tell the same, of the end of a round or else."""
    assert cpu.by(torch.zeros(0)) is not None
    ours = told(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "by", lambda *read: None)
        theirs = told(seed)
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@given(st.integers(0, 1 << 32))
@settings(max_examples=300)
def test_a_round_ends_as_it_does_by_single_operations(seed):
    assert alike(seed)


@given(st.integers(0, 1 << 32))
@settings(max_examples=300)
def test_guesses_are_those_of_single_operations(seed):
    assert alike(seed, guessed)


@pytest.mark.parametrize("last", [(20, 21), (21, 20)])
def test_votes_are_counted_one_by_one_however_long_the_text(last):
    """Two tokens that have followed as often, the last time three places apart."""
    text = [t for said in (last * 6666) for t in (1, 2, said)] + [1, 2]
    seqs, tree = Sequences.of([text], 4, slack=4), Tree.branching(2)
    found = [Suffix(64, 2).propose(seqs, tree, Certain()).tokens.tolist()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "by", lambda *read: None)
        found.append(Suffix(64, 2).propose(seqs, tree, Certain()).tokens.tolist())
    assert found == [[[2, *reversed(last)]]] * 2


@pytest.mark.parametrize("size", [3, 16, 1000])
def test_of_equals_the_first_is_ranked_first(size):
    w = torch.randint(0, 5, (2, 4, size)).float()
    wanted = w.sort(descending=True, stable=True).indices
    for k in (1, 3):
        assert torch.equal(ranked(w, k), wanted[..., :k])


# --- chance --------------------------------------------------------------------------------------

SHAPES = [{}, {"top_k": 2}, {"top_k": 7}, {"top_p": 0.37}, {"top_p": 0.93, "top_k": 5}]
LAST = (1 << 64) - 1


def unmixed(x: int) -> int:
    """The number of which `mix` makes x."""
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        made = x
        for _ in range(64 // shift):
            made = x ^ made >> shift
        x = made * pow(factor, -1, 1 << 64) & LAST
    return x


def key_of(noise: Noise, purpose: int, lane: int, bits: int) -> int:
    """The key at which this lane is hashed to these bits."""
    at = unmixed(bits) - lane * 0x9E3779B97F4A7C15
    return _signed((unmixed(at & LAST) - noise.salt(purpose)) & LAST)


def shaped(dice: random.Random, *size: int) -> torch.Tensor:
    """Logits, of which some are none and some are equal."""
    logits = torch.randn(*size) * dice.choice([1, 4])
    logits = logits.round() if dice.random() < 0.3 else logits
    return logits.masked_fill(torch.rand(*size) < dice.choice([0, 0.3]), -torch.inf).index_fill(
        -1, torch.tensor(dice.randrange(size[-1])), 1.0
    )


def tossed(seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What chance decides in a round, and the numbers it does so by: laws of all shapes, keys of
    rows and rounds, verdicts of trees and chains of guesses that were drawn or chosen, twins among
    siblings, or none."""
    torch.manual_seed(seed)
    dice = random.Random(seed)
    noise, lenience = Noise(dice.randint(0, 9)), dice.choice([1.0, 0.6])
    B, V = dice.choice([1, 4, 30]), dice.choice([2, 5, 17, 40])
    tree = Tree.parse(dice.choice(["chain", "chain", "3", "2x2", "3x1x1"]), dice.randint(0, 4))
    N, nodes = len(tree), tree.nodes("cpu")
    if dice.random() < 0.3:  # one tree a row
        parents = torch.stack(
            [torch.tensor([0, *map(dice.randrange, range(1, N))]) for _ in range(B)]
        )
        nodes = Nodes.of(parents.sort(1).values, max(N - 1, 0), N)
    logits = shaped(dice, B, N, V)
    near = [
        Sampling(t, **shape).law(logits[:, i % N])
        for t in (0.3, 1.7)
        for i, shape in enumerate(SHAPES)
    ]
    p = logits.softmax(-1)
    away = shaped(dice, B, N, V).softmax(-1)
    other = dice.choice([p, away, (p + away) / 2, (p + away) / 2])
    q = other if dice.random() < 0.7 else None
    seqs = Sequences(
        torch.randint(0, V, (B, 9)), torch.randint(1, 9, (B,)), torch.full((B,), 9),
        torch.randint(0, 9, (B,)), torch.arange(0), by_round=dice.random() < 0.5,
    )  # fmt: skip
    keys = seqs.keys(nodes.depth)
    some = slice(dice.randrange(N), N)
    near.append(noise.race(p[:, some].contiguous(), keys[:, some], RESIDUAL))
    odd = [key_of(noise, TOKEN, 1, bits) for bits in (0, 1, LAST, LAST >> 1)]
    near.append(noise.race(torch.ones(4, V), torch.tensor(odd), TOKEN))
    drawn = other.gather(1, nodes.parents.expand(B, N)[..., None].expand(B, N, V))
    guesses = torch.multinomial(drawn.flatten(0, 1), 1).view(B, N)[:, 1:]
    guesses = guesses.masked_fill(torch.rand(B, N - 1) < dice.choice([0, 0.2]), -1)
    draft = seqs.draft(nodes, guesses, q)
    found = [keys, noise.draw(p, 1, keys), noise.categorical(p, keys, RESIDUAL)]
    rules = [Reject(lenience), Match(), *[Block()] * (nodes.deepest == N - 1 and nodes.is_chain)]
    for rule in rules:
        verdict = rule(draft, p, noise)
        found += [verdict.path, verdict.n, verdict.new]
    return found, near


def falls_alike(seed: int) -> bool:
    """Whether compiled code and torch's operations leave the same to chance."""
    assert cpu.by(torch.zeros(0)) is not None
    ours, near = tossed(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "by", lambda *read: None)
        theirs, wanted = tossed(seed)
    same = all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    pairs = zip(near, wanted, strict=True)
    return same and all(torch.allclose(a, b, rtol=2e-6, atol=1e-37) for a, b in pairs)


@pytest.mark.parametrize("seed", range(0, 600, 100))
def test_chance_falls_as_it_does_by_single_operations(seed):
    assert [i for i in range(seed, seed + 100) if not falls_alike(i)] == []


def decided(noise: Noise, keys: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """[B] bool: is a chosen guess kept of which the target is as sure as p [B]?"""
    B, nodes = len(p), Tree.chain(1).nodes("cpu")
    law = torch.stack([p, 1 - p], 1)[:, None].expand(-1, 2, -1).contiguous()
    text = Sequences.empty(B, 2)
    draft = Draft(torch.zeros(B, 2, dtype=torch.int64), nodes, text)
    draft.keys = keys[:, None].expand(-1, 2).contiguous()
    return Reject()(draft, law, noise).n == 1


def test_uniforms_are_those_of_torch_to_the_last_bit():
    """A coin falls heads at its uniform, and tails at the number before."""
    noise = Noise(3)
    odd = [key_of(noise, ACCEPT, 0, bits) for bits in (0, 1, 5, LAST >> 1, (LAST >> 2) + 1)]
    keys = torch.cat([mix(torch.arange(100_000)), torch.tensor(odd)])
    u = noise.uniform(keys, ACCEPT, torch.zeros(1, dtype=torch.int64))[:, 0]
    assert u[-5:].tolist()[0] == 2.0**-64
    assert u[-2] == 1
    assert decided(noise, keys, u).all()
    assert not decided(noise, keys, u.nextafter(torch.zeros(1))).any()


@pytest.mark.parametrize("V", [1, 15, 16, 1000])
def test_arrivals_are_exact_but_for_rounding(V):
    noise, keys = Noise(1), mix(torch.arange(100_000 // V))
    u = noise.uniform(keys, TOKEN, torch.arange(V)).clamp(max=1 - 2**-24).double()
    w = 1 - torch.rand(len(keys), V, generator=torch.manual_seed(0))  # never 0
    off = noise.race(w, keys, TOKEN).double() * -torch.log1p(-u) / w.double() - 1
    assert off.abs().max() < 3e-7
    assert not noise.race(0 * w, keys, TOKEN).any()


def test_laws_and_verdicts_are_the_same_however_many_rows_and_threads_make_them():
    torch.manual_seed(0)
    V, noise, threads = 33_001, Noise(0), torch.get_num_threads()
    nodes, seqs = Tree.chain(1).nodes("cpu"), Sequences.of([[1], [2], [3]], 3, slack=1)
    logits, guesses = torch.randn(3, 2, V), torch.randint(0, V, (3, 1))

    def made(rows: slice) -> list[torch.Tensor]:
        few = seqs.window(rows.start, rows.stop - rows.start)
        draft = few.draft(nodes, guesses[rows])
        p = Sampling(0.8, top_p=0.9).law(logits[rows])
        verdict = Reject()(draft, p, noise)
        return [p, noise.race(p, draft.keys, TOKEN), verdict.n, verdict.new]

    wanted = made(slice(0, 3))
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for rows in (slice(0, 3), slice(1, 2), slice(1, 3)):
                pairs = zip(made(rows), wanted, strict=True)
                assert all(torch.equal(some, all_[rows]) for some, all_ in pairs)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_law_of_no_numbers_is_none_and_spoils_no_other(bad):
    logits = torch.randn(3, 20, generator=torch.manual_seed(0))
    good = logits.clone()
    logits[1, 4] = bad
    for shape in SHAPES:
        law = Sampling(0.7, **shape).law
        assert law(logits)[1].isnan().any()
        assert torch.equal(law(logits)[[0, 2]], law(good)[[0, 2]])


@pytest.mark.parametrize("rule", [Reject(), Block()])
def test_a_guess_that_is_no_token_is_refused(rule):
    seqs = Sequences.of([[1], [2]], 3, slack=1)
    draft = seqs.draft(Tree.chain(1).nodes("cpu"), torch.tensor([[0], [5]]))
    with pytest.raises(IndexError, match="a guess is outside the vocabulary of 5 tokens"):
        rule(draft, torch.full((2, 2, 5), 0.2), Noise(0))


@pytest.mark.parametrize("rule", [Reject(), Block()])
def test_a_draft_of_fewer_tokens_is_not_read_past_its_laws(rule):
    seqs = Sequences.of([[1], [2]], 3, slack=1)
    guesses, q = torch.tensor([[0], [3]]), torch.full((2, 2, 4), 0.25)
    draft = seqs.draft(Tree.chain(1).nodes("cpu"), guesses, q)
    with pytest.raises(RuntimeError, match="must match the size"):
        rule(draft, torch.full((2, 2, 5), 0.2), Noise(0))


# --- what goes wrong -----------------------------------------------------------------------------


def test_a_row_that_is_no_number_spoils_no_other():
    lm = compiled()
    lm.module.model.embed_tokens.weight.data[7] = torch.nan
    good = [[1, 2, 3, 4], [4, 3, 2, 1]]
    logits = fed(lm, [good[0], [1, 7, 2, 3], good[1]], [4])
    assert (lm.fault != 0).tolist() == [False, True, False]
    assert torch.equal(logits[[0, 2]], fed(lm, good, [4]))
    broken = engine("null", "chain", "match", dtype=torch.float32)
    broken.target = of_module(made("llama", torch.float32), "mine")
    broken.target.module.lm_head.weight.data[3] = torch.inf
    with pytest.raises(NonFiniteLogits, match="mine produced NaN"):
        broken.generate(PROMPTS, NEW)


@pytest.mark.parametrize(("token", "slot"), [(32, 0), (-2, 0), (1, 8), (1, -1)])
def test_tokens_and_slots_that_there_are_not_are_refused_before_anything_is_written(token, slot):
    net = compiled().net
    cache = SlotCache(3, 1, 8)
    tokens, slots = torch.tensor([[1, token]]), torch.tensor([[0, slot]])
    cache.aim(slice(0, 1), slots, 8)
    with pytest.raises(IndexError, match="not below 32, or a slot not below 8"):
        net(tokens, slots, None, cache, (), None)
    assert not cache.layers[0].keys.any()


def test_weights_that_change_in_place_change_the_passes():
    lm = compiled()
    before = passed(lm, ())[1].logits
    with torch.no_grad():
        lm.module.model.layers[1].self_attn.k_proj.weight *= 1.5
    after = passed(lm, ())[1].logits
    assert apart(after, before) > 1e-3
    assert apart(after, passed(unfused(lm.module), ())[1].logits) < 1e-5


def test_other_numbers_are_not_compiled():
    assert not isinstance(of_module(made("llama", torch.float64)).net, Native)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_a_module_that_read_more_by_itself_turns_short_texts_as_before(name):
    lm = compiled(name)
    before = passed(lm, ())[1].logits
    lm.module(torch.arange(150)[None] % 32)
    assert torch.equal(passed(lm, ())[1].logits, before)


def test_it_can_be_turned_off(monkeypatch):
    monkeypatch.setenv("SPECEXP_NATIVE", "off")
    assert isinstance(of_module(made("llama", torch.float32)).net, Fused)


# --- a compiler, or none -------------------------------------------------------------------------


@pytest.fixture
def anew(monkeypatch, tmp_path):
    """A machine on which nothing was compiled yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cpu._loaded.cache_clear()
    yield tmp_path / "cache" / "specexp"
    cpu._loaded.cache_clear()


def test_it_is_compiled_once_a_machine(anew, monkeypatch):
    assert cpu.library() is not None
    written = {file: file.stat().st_mtime_ns for file in anew.iterdir()}
    assert {file.name.partition("-")[0] for file in written} == {"passes", "rounds", "chance"}
    cpu._loaded.cache_clear()
    monkeypatch.setattr(cpu.subprocess, "run", None)
    assert cpu.library() is not None
    assert {file: file.stat().st_mtime_ns for file in anew.iterdir()} == written


@pytest.mark.parametrize(
    ("compiler", "said"),
    [("", "no C++ compiler (install g++"), ("/nowhere/g++", "nowhere"), ("false", "false")],
)
def test_without_a_compiler_passes_are_slower_and_a_line_says_why(
    anew, monkeypatch, caplog, compiler, said
):
    if compiler:
        monkeypatch.setenv("CXX", compiler)
    else:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(anew))
    with caplog.at_level(logging.WARNING, "specexp"):
        assert isinstance(of_module(made("llama", torch.float32)).net, Fused)
        assert isinstance(of_module(made("tied", torch.float32)).net, Fused)
    [line] = [r.getMessage() for r in caplog.records]
    assert line.startswith("passes on this CPU are not compiled, which makes them slower: ")
    assert said in line


def changed(monkeypatch, folder: Path, change: Callable[[str], str], *names: str) -> None:
    """From now on sources are a copy of what they were, of which some are changed."""
    shutil.copytree(cpu.FOLDER, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for name in names:
        source = folder / name
        source.write_text(change(source.read_text()))
    monkeypatch.setattr(cpu, "FOLDER", folder)


def test_a_source_that_does_not_compile_is_told_by_its_first_error(anew, monkeypatch, caplog):
    changed(monkeypatch, anew.parent / "copy", lambda text: text + "\nnonsense;\n", "rounds.cpp")
    with caplog.at_level(logging.WARNING, "specexp"):
        assert cpu.library() is None
    assert "error" in caplog.text
    assert "nonsense" in caplog.text


# --- planted bugs --------------------------------------------------------------------------------

BUGS = {
    "a token does not see itself": ("p.slots[token] + 1", "p.slots[token]"),
    "a mask is not read": ("visible[i][j] ? s[j]", "true ? s[j]"),
    "keys of the first row": ("row * p.row_stride + key", "0 * p.row_stride + key"),
    "a head reads another's keys": ("key * p.head_stride", "(key + 1) % net.keys * p.head_stride"),
    "heads of a key exchanged": ("(first + i) % G)", "(G - 1 - (first + i) % G))"),
    "all tokens see what the first does": ("(first + i) / G", "first / G"),
    "turned the other way": ("cosine[i] - x", "cosine[i] + x"),
    "up for gate": ("E, room.gate, F);", "E, room.up, F);"),
    "norms of queries left out": ("if (weight) normed", "if (weight && h >= H) normed"),
    "states a layer late": ("p.tap[t] == layer", "p.tap[t] == layer + 1"),
    "logits of the first places": ("% p.n + p.last - p.n", "% p.n < p.last ? i % p.n : -1"),
    "logits stay where they were made": ("if (wanted && kept", "if (false && kept"),
    "shorter texts lie as far apart": ("h / G * tall", "h / G * n"),
    "what is read is what is added to": ("given = net.token_norm && !at", "given = false"),
    "what is added to is never normed": ("if (net.adds) begins", "if (false) begins"),
    "columns of their own": ("made[net.ids[o]]", "made[o]"),
    "no token is impossible": ("made, net.all, -INFINITY", "made, net.all, 0.0f"),
    "what has no part is impossible": ("* net.all, 0.0f)", "* net.all, -INFINITY)"),
    "states of what has no part": ("if (p.tokens[i] == -1) memset", "if (false) memset"),
    "features as the norm got them last": ("tap(-1, x)", "tap(-1, read)"),
    "the last of equals": ("w[at] == w[best] && at < best", "w[at] == w[best] && at > best"),
    "the last lane's largest": ("place = x > most ? here", "place = x >= most ? here"),
    "no number is not seen": ("odd |= x != x", "odd |= x != x && false"),
    "faults of the first rows": ("for (fault += first; ", "for (; "),
    "accepted after a refusal": ("depth[up] < 0 || ", ""),
    "compared with a node's own sample": ("!= sample[up]", "!= sample[i]"),
    "a tree for all": ("shared ? 0 : nodes", "0"),
    "an end of text that is not delivered": ("before_end) + 1", "before_end - 1) + 1"),
    "an end of text does not end the row": ("if (emitted > before_end)", "if (!emitted)"),
    "done rows go back": ("*limit - *length, 0)", "*limit - *length, -1)"),
    "the first row's fault": ("faults[i][first + row]", "faults[i][row]"),
    "no slot is the first": ("1 + depth[i], 0)", "1 + depth[i], 1)"),
    "slots of the first text": ("*made++ = tokens[*slots];", "*made++ = tokens[slots[-i]];"),
    "a budget that ends a guess early": ("right] <= *budget", "right] < *budget"),
    "the depths of the first row": ("depth += down, budget++", "budget++"),
    "rows for columns": ("parts[i][row * strides[i]]", "parts[i][0]"),
    "columns of nothing else": ("parts[i][row * strides[i]]", "parts[i][row]"),
    "all that agree have a vote": ("voters.clear(), most = agrees", "most = agrees"),
    "the fewest votes": ("more > 0 ||", "more < 0 ||"),
    "ties go to the earliest": ("end > voters[b.to - 1].end", "end < voters[b.to - 1].end"),
    "a guess is trusted for itself": ("all.trust * share}", "share}"),
    "votes alone are the share": ("(float)(v - from) / (all.to - all.from)", "(float)(v - from)"),
    "a stretch too far": ("depth[i] <= stretch * most", "depth[i] <= stretch * most + 1"),
    "ids beyond the vocabulary are guessed": ("says >= 0 && says < vocab", "says >= 0"),
    "a guess is no text": ("says = at > last ? made[node]", "says = false ? made[node]"),
    "the root's guess for all": ("depth[node] > at - last", "depth[node] > 1"),
    "what is noted of another": ("&& owner[place] == token", "&& owner[place] >= 0"),
    "notes of the first row": ("tokens += down, owner += places + 1", "tokens += down, owner += 0"),
    "the place for the token": ("owner[place] = *tokens", "owner[place] = place"),
    "a line that begins with what is accepted": ("*n + 1 + i,", "*n + i,"),
    "what no guess was made for is learnt": (" && fed[branch[heard]] >= 0", ""),
    "an n-gram is put in twice": ("if (found < end) continue;", ""),
    "one n-gram a token": ("std::copy_backward(kept, end - size, end);", ""),
    "an n-gram of its first token": ("gram[i] = said[branch[g + i]]", "gram[i] = said[branch[g]]"),
    "no token for token 0": ("tokens[i] >= 0 ? tokens[i]", "tokens[i] > 0 ? tokens[i]"),
    "the first for the largest": (
        "if (kept == most && !(w[i] > w[best[most - 1]]))",
        "if (kept == most)",
    ),
    "ranked as they come": ("at && w[i] > w[best[at - 1]]", "false"),
    "a lane's noise is that of another vector's": ("uniform(at, i + t)", "uniform(at, t)"),
    "uniforms of other bits": ("* GOLDEN) & INT64_MAX", "* GOLDEN) >> 1"),
    "hashed once too little": ("return x ^ x >> 31", "return x"),
    "early arrivals rounded": ("0006145e-06f + lost)", "0006145e-06f)"),
    "a race without an end": ("u < latest ? u : latest", "u"),
    "purposes share their noise": ("mixed(key + salt)", "mixed(key)"),
    "noise of the first row": ("keys[row / n * down + row % n]", "keys[row % n]"),
    "keys side by side": ("keys[row / n * down + row % n]", "keys[row]"),
    "noise by row, not by place": ("*stream++) + *length++", "*stream++)"),
    "the noise of a position seen again": ("by_round ? mixed(root) : root", "root"),
    "temperature upside down": ("(x[i] - most) / temperature", "(x[i] - most) * temperature"),
    "top-k drops ties": ("x < least ? none", "x <= least ? none"),
    "top-k keeps one more": ("least = ranked[top_k - 1]", "least = ranked[top_k]"),
    "top-p keeps one too few": ("before < top_p &&", "before + p[left[0]] < top_p &&"),
    "top-p of the highest of equals": ("a > b); };", "a < b); };"),
    "what top-p leaves is not scaled": ("    scaled(size, p);\n}", "}"),
    "a guess of zero probability taken as drawn": ("x >= 0 && q[x] > 0) return", "x >= 0) return"),
    "no guess taken for token 0": (
        "-1 : row.tokens[child];",
        "-1 : std::max<int64_t>(0, row.tokens[child]);",
    ),
    "siblings drawn from one q": ("others[x] = 0;", ""),
    "second sibling held against p": ("<= left[x] /", "<= row.p_at(node)[x] /"),
    "siblings share a coin": ("row.coin(node, rank)", "row.coin(node, 0)"),
    "nodes share a coin": ("row.coin(node, rank)", "row.coin(0, rank)"),
    "lenient in the ratio only": ("- lenience * drawn[i]", "- drawn[i]"),
    "lenient in the rest only": ("(row.lenience * chance)", "chance"),
    "residual is p": ("left = spare, std::swap", "std::swap"),
    "coins on the bonus's noise": ("keys[node] + accept", "keys[node] + residual"),
    "bonus on the root's noise": ("keys[path[count]] + residual", "keys[0] + residual"),
    "children of the first row": ("shared ? 0 : first * width", "0"),
    "block: passes with its mass": ("mass / all : 1", "mass : 1"),
    "block: coin of the guess after": ("row.coin(i - 1, 0)", "row.coin(i, 0)"),
    "block: not cut at one": ("(p[x] / drawn[x]), 1.0f)", "(p[x] / drawn[x]), 9.0f)"),
    "block: of the last alone": ("owed = std::min(owed *", "owed = std::min(1 *"),
    "block: residual of p, not of P p": ("uncovered(owed, p", "uncovered(1, p"),
    "block: bonus from p": ("mass > 0 ? spare : p", "p"),
    "rounds after the last": ("if (report[1] && !report[2])", "if (false)"),
    "rounds that are not made": ("if (!replay(count, calls)) return -1;", ""),
    "all at once": ("*seconds++ = now", "*seconds = now"),
    "sums in another order": ("(q[0] + q[2]) + (q[1] + q[3])", "q[0] + q[1] + q[2] + q[3]"),
}


def right() -> bool:
    eagles = (
        test_fused_eagle.off(kind, torch.float32) for kind in ("eagle3", "norm_before_residual")
    )
    near = all(x < NEAR[torch.float32] for x in (off("qwen3"), *eagles))
    near = near and test_fused_eagle.tells_apart(test_fused_eagle.made("eagle3", torch.float32))
    same = steady("qwen3") and steady("one key") and sparing("qwen3")
    rounds = alike, falls_alike, lambda seed: alike(seed, guessed)
    if not (near and same and all(told(seed) for told in rounds for seed in range(150))):
        return False
    return test_cpu_replays.held_rounds_are_rounds("model")


@pytest.fixture(scope="session")
def once(tmp_path_factory) -> Path:
    """Where sources without a bug are compiled once for all that have one in another."""
    return tmp_path_factory.mktemp("once")


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(anew, once, monkeypatch, bug):
    good, bad = BUGS[bug]
    count = {p.name: p.read_text().count(good) for p in cpu.FOLDER.iterdir() if p.is_file()}
    [name] = [name for name, found in count.items() if found]
    assert count[name] == 1
    changed(monkeypatch, anew.parent / "copy", lambda text: text.replace(good, bad), name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(once))
    monkeypatch.setattr(cpu, "FLAGS", tuple(f.replace("-O3", "-O1") for f in cpu.FLAGS))
    monkeypatch.setattr(fused, "_off", lambda *_: 0.0)
    assert not right()


@pytest.mark.parametrize("march", ["x86-64", "x86-64-v3"])
def test_processors_with_narrower_vectors_are_served_too(anew, monkeypatch, march):
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        march = "native"
    flags = (f.replace("native", march) for f in cpu.FLAGS)
    monkeypatch.setattr(cpu, "FLAGS", tuple(flags))
    assert right()


def test_without_one_it_is_not(anew, monkeypatch):
    monkeypatch.setattr(cpu, "FLAGS", tuple(f.replace("-O3", "-O1") for f in cpu.FLAGS))
    assert right()


# --- products by tiles ---------------------------------------------------------------------------

AMX = cpu.vectors().endswith("AMX")


def wide_is_right() -> bool:
    """In bfloat16, 16 rows of 31 tokens through matrices of three and five tiles: near transformers
    in float64, and each row as it is alone."""
    shape = {"hidden_size": 96, "intermediate_size": 160, "attention_bias": True}
    net = tiny_llama(0, **shape).to(torch.bfloat16).requires_grad_(False)
    for parameter in net.parameters():  # biases begin as zeros
        parameter += 0.1 * torch.randn_like(parameter)
    lm, module = of_module(net), deepcopy(net).to(torch.float64)
    assert isinstance(lm.net, Native)
    texts = torch.randint(0, 32, (16, 31), generator=torch.manual_seed(0))
    rows = texts.tolist()
    logits = fed(lm, rows, [31])
    wanted = module(texts).logits
    alone = fed(lm, rows[3:4], [1, 30]), fed(lm, rows[:2], [31])
    same = torch.equal(alone[0], logits[3:4]) and torch.equal(alone[1], logits[:2])
    return same and apart(logits, wanted) < NEAR[torch.bfloat16]


def test_many_rows_of_wide_matrices_in_bfloat16():
    assert wide_is_right()


TILE_BUGS = {
    "packed for the tile before": ("packed + c * TILE", "packed + c / 2 * TILE"),
    "weights of the first inputs": ("w + u * lump + c * DEEP", "w + u * lump"),
    "the first sixteen outputs for all": ("w + u * lump + c * DEEP", "w + c * DEEP"),
    "tokens for pairs": ("rows - 1) * inputs + at);\n        transpose(row);",
                         "rows - 1) * inputs + at);"),
    "the first sixteen tokens for all": ("std::min(first + t, rows - 1)", "std::min(t, rows - 1)"),
    "sums go on": ("each<N>([&](auto u) { zero_tile<u>(); });", ""),
    "a bias for sixteen outputs": ("load(bias + u * SIDE)", "load(bias)"),
    "set where it is added": ("added ? load(to) + sums : sums", "sums"),
}  # fmt: skip


@pytest.mark.skipif(not AMX, reason="this processor has no AMX")
@pytest.mark.parametrize("bug", TILE_BUGS)
def test_a_bug_planted_in_tiles_is_caught(anew, once, monkeypatch, bug):
    good, bad = TILE_BUGS[bug]
    source = (cpu.FOLDER / "tiles.h").read_text()
    assert source.count(good) == 1
    changed(monkeypatch, anew.parent / "copy", lambda text: text.replace(good, bad), "tiles.h")
    monkeypatch.setenv("XDG_CACHE_HOME", str(once))
    monkeypatch.setattr(fused, "_off", lambda *_: 0.0)
    assert not wide_is_right()
