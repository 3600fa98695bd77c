"""Planted bugs. Each is a small change of the real source, and a named check must reject it.

A check that the unchanged code passes and every mutant fails is one that can fail. Four of the
bugs are invisible where laws do not depend on context, which is how such code is mostly tested.
"""

import inspect
import itertools
import random
import sys
import textwrap
from dataclasses import dataclass

import pytest
import torch
from conftest import one_in
from scipy.stats import chisquare
from support import architectures
from support.oracle import explore, gap, kept, overlap, surprise, warp
from support.toys import PROCESSED, processed_toy, texts, toy_engine

from specexp import growth, ops, rules, trace
from specexp import tree as trees
from specexp.drafters.model import DraftModel
from specexp.engine import Engine
from specexp.models import memory, processors
from specexp.models.cache import SlotCache, Slots
from specexp.models.lm import LM
from specexp.models.memory import Layer
from specexp.policy import Fixed
from specexp.rows import Rows
from specexp.rules import Block, Match, Reject, Typical
from specexp.sampling import ACCEPT, RESIDUAL, TOKEN, Noise, Sampling, mix
from specexp.sequences import Draft, Sequences
from specexp.trace import Acceptance
from specexp.tree import Nodes, Tree

ROUNDING = 1e-12
CHAIN, TWINS, BRANCHING = Tree.chain(2), Tree.branching(2), Tree((-1, 0, 0, 2))


# The checks -------------------------------------------------------------------------------------


def law_on_chains(blind: bool = False) -> None:
    for p, q in (("dense", "dense"), ("zeros", "zeros")):
        engine = toy_engine(Reject(), "drawn", p=p, q=q, blind=blind)
        assert gap(engine, texts(3, 8), 3, [CHAIN]) <= ROUNDING


def law_on_trees() -> None:
    for V, p, q in ((2, "dense", "dense"), (3, "zeros", "zeros"), (3, "dense", "onehot")):
        assert gap(toy_engine(Reject(), "drawn", V, p, q), texts(V, 4), 3, [BRANCHING]) <= ROUNDING
    assert gap(toy_engine(Reject(), "drawn"), texts(3, 4), 2, [TWINS]) <= ROUNDING


def law_of_chosen_tokens() -> None:
    for drafter in ("scripted", "chosen"):
        assert gap(toy_engine(Reject(), drafter), texts(3, 6), 3, [TWINS]) <= ROUNDING


def law_of_match() -> None:
    for drafter in ("drawn", "scripted"):
        engine = toy_engine(Match(), drafter, p="zeros", q="zeros")
        assert gap(engine, texts(3, 4), 3, [BRANCHING]) <= ROUNDING


def law_with_eos() -> None:
    assert gap(toy_engine(Reject(), "drawn", eos=(0,)), texts(3, 6), 3, [CHAIN]) <= ROUNDING


def law_of_batches() -> None:
    engine = toy_engine(Reject(), "drawn", V=2, eos=(1,))
    assert gap(engine, texts(2, 4, rows=2), 3, [CHAIN]) <= ROUNDING


def law_when_shaped() -> None:
    for shape in (Sampling(0.5), Sampling(1.0, top_k=2), Sampling(0.5, top_k=3, top_p=0.6)):
        engine = toy_engine(Reject(), "drawn", V=4, p="tied", sampling=shape)
        assert gap(engine, texts(4, 6), 2, [CHAIN]) <= ROUNDING


def law_when_processed() -> None:
    assert gap(processed_toy(Reject(), "scripted"), PROCESSED, 2, [BRANCHING]) <= ROUNDING


def law_when_sampled() -> None:
    for shape in (CHAIN, TWINS):
        engine = toy_engine(Reject(), "drawn")
        engine.policy = Fixed(shape)
        assert surprise(engine, texts(3, 3)[2], 3, 30_000) > 1e-6


def law_of_block() -> None:
    for drafter, p, q in (("drawn", "dense", "dense"), ("drawn", "zeros", "zeros"),
                          ("scripted", "dense", "dense")):  # fmt: skip
        assert gap(toy_engine(Block(), drafter, 3, p, q), texts(3, 8), 3, [CHAIN]) <= ROUNDING


def law_of_block_when_sampled() -> None:
    engine = toy_engine(Block(), "drawn", V=2)
    engine.policy = Fixed(Tree.chain(3))
    assert surprise(engine, texts(2, 3)[2], 5, 60_000) > 1e-6


def gain_of_block() -> None:
    """At least what Reject keeps, in every context, and more in some (exactly)."""
    cases = texts(3, 8)
    more = []
    for gamma in (2, 3):
        means = (kept(toy_engine(rule, "drawn"), cases, gamma) for rule in (Reject(), Block()))
        more += [b - a for a, b in zip(*means, strict=True)]
    assert min(more) >= -ROUNDING
    assert max(more) > 0.01


def bias_of_lossy_rules() -> None:
    """What a lossy rule says it emits is what it emits, of drawn and of chosen draft tokens."""
    for rule in (Typical(), Reject(0.6)):
        for drafter in ("drawn", "chosen"):
            engine = toy_engine(rule, drafter, V=4)
            cases = texts(4, 6)
            found = explore(engine, cases, 1, [Tree.chain(1)]).law
            for law, (prompt,) in zip(found, cases, strict=True):
                p, q = (torch.tensor(lm.module.after(prompt)).double() for lm in engine.models)
                p, q = p / p.sum(), q / q.sum()
                if drafter == "chosen":
                    q = torch.zeros(4).double().index_fill(0, q.argmax(), 1.0)
                said = rule.emitted(p, q).tolist()
                assert said == pytest.approx([law.get(((t,),), 0.0) for t in range(4)], abs=1e-12)


def typical_by_hand() -> None:
    p = torch.tensor([0.5, 0.25, 0.2, 0.05])
    for law, likely in ((p, [1, 1, 1, 0]), (torch.tensor([0.9, 0.06, 0.03, 0.01]), [1, 0, 0, 0])):
        assert Typical(0.09)._typical(law).long().tolist() == likely
    assert Typical(0.25)._typical(torch.full((64,), 1 / 64)).all(), "an open law keeps all"


def speed() -> None:
    """What losslessness cannot see: a draft that is the target is accepted whole every round."""
    greedy = toy_engine(Match(), "chosen", twin=True, sampling=Sampling(0.0))
    sampled = toy_engine(Reject(), "drawn", V=2, twin=True)
    for engine, shape in ((sampled, CHAIN), (greedy, CHAIN), (greedy, Tree.branching(2, 1, 1))):
        found = explore(engine, texts(2, 6), 6, [shape]).accepted
        assert {n for (_, _, n), w in found.items() if w > ROUNDING} == {shape.depth}
        assert max(r for _, r, _ in found) == -(-6 // (shape.depth + 1)) - 1


def kept_as_often_as_can_be() -> None:
    """Nor can it see that a draft token is kept less often than min(p, q) allows."""
    engine = toy_engine(Reject(), "drawn")
    cases = texts(3, 6)
    alphas = [float(overlap(engine, prompt, 1, min)) for (prompt,) in cases]
    assert kept(engine, cases, 1) == pytest.approx(alphas, abs=ROUNDING)


def counts() -> None:
    """Of plain decoding every pass of a living row emits one token; the record adds up."""
    [case] = texts(3, 1, rows=6)
    for drafter, shape in (("null", Tree.chain(0)), ("drawn", CHAIN)):
        engine = toy_engine(Match(), drafter, eos=(0,))
        engine.policy = Fixed(shape)
        made = engine.generate(case, 9)
        made.trace.acceptance.check()
        assert made.trace.acceptance.emitted == sum(map(len, made.tokens))
        assert all(len(row) <= 9 and 0 not in row[:-1] for row in made.tokens)
        if drafter == "null":
            assert made.trace.acceptance.passes == made.trace.acceptance.emitted


def shape() -> None:
    """`Sampling.law` against rational numbers."""
    weights = [9, 1, 5, 5, 3, 2, 9, 8]
    shapes = [Sampling(0.0), Sampling(0.5), Sampling(1.0, 3), Sampling(1.0, 0, 0.6)]
    for s in (*shapes, Sampling(0.5, 4, 0.7), Sampling(1.0, 3, 0.6)):
        found = s.law(torch.tensor(weights, dtype=torch.float64).log()).tolist()
        assert found == pytest.approx([float(x) for x in warp(weights, s)], abs=ROUNDING)


def precision() -> None:
    """Over 152,064 tokens, laws are within 1e-5 of float64 and races within rounding."""
    torch.manual_seed(0)
    logits = (4 * torch.randn(152_064)).bfloat16()
    for s in (Sampling(1.0), Sampling(0.7, top_p=0.9)):
        assert (s.law(logits).double() - s.law(logits.double())).abs().sum() / 2 <= 1e-5
    keys, lanes = torch.arange(8), torch.arange(152_064)
    u = Noise(0).uniform(keys, TOKEN, lanes)
    won = Noise(0).race(torch.ones(8, 152_064), keys, TOKEN).double()
    assert (won * -torch.log1p(-u.double().clamp(max=1 - 2**-24)) - 1).abs().max() < 1e-6
    early = u[u < 1e-3]
    assert len(early.unique()) == len(early), "two tokens arrive at once, the lower one wins"


class Edge(Noise):
    """The extreme uniforms there are: never, almost never, at once."""

    def uniform(self, keys, purpose, lanes):
        return torch.tensor([1.0, 1 - 2**-24, 2.0**-64])[:, None].expand(3, len(lanes))


def edges() -> None:
    keys = torch.zeros(3, dtype=torch.int64)
    assert Edge(0).bernoulli(torch.ones(3), keys, 0).all()
    assert not Edge(0).bernoulli(torch.zeros(3), keys, 0).any()
    for mass in (1.0, 1e-30):
        w = torch.tensor([[0.0, 0.0, mass, 0.0]]).expand(3, 4)  # not compiled
        assert Edge(0).categorical(w, keys, TOKEN).tolist() == [2, 2, 2]
        assert Edge(0).draw(w, 2, keys)[:, 0].tolist() == [2, 2, 2]
    for extreme in (0, -1, (1 << 63) - 1, -(1 << 63)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("specexp.sampling.mix", lambda x, bits=extreme: torch.full_like(x, bits))
            u = Noise(0).uniform(keys, TOKEN, torch.arange(2))
        assert ((u > 0) & (u <= 1)).all()


def parts() -> None:
    """Of 20 tokens in parts of 8, of which the last has four."""
    keys, w = mix(torch.arange(40_000)), torch.arange(20.0) % 7
    w[0] = 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specexp.sampling.PART", 8)
        drawn = Noise(1).uncoupled(w.expand(len(keys), -1), keys)
    counts = torch.bincount(drawn, minlength=20)
    assert (counts[w == 0] == 0).all()
    some = w > 0
    expected = w[some].double() / w.sum() * len(keys)
    assert chisquare(counts[some].numpy(), expected.numpy()).pvalue > 1e-6


def addresses() -> None:
    seqs = Sequences.of([[1, 2, 3], [1, 2, 3], [1, 2]], 4, slack=3, streams=[0, 1, 0])
    at = seqs.keys(torch.tensor([[0, 1, 1]]))
    assert at[0, 1] == at[0, 2], "siblings share the noise of their position"
    assert at[0, 0] != at[0, 1], "positions differ"
    assert at[0, 0] != at[1, 0], "rows differ"
    assert at[0, 0] == at[2, 1], "a position's noise does not depend on where the round began"
    keys, lanes = mix(torch.arange(50_000)), torch.arange(2)
    streams = [Noise(0).uniform(keys, purpose, lanes) for purpose in (TOKEN, ACCEPT, RESIDUAL)]
    streams.append(Noise(1).uniform(keys, TOKEN, lanes))
    coin = Noise(0).bernoulli(torch.full((50_000,), 0.5), keys, 1)[:, None]
    table = torch.corrcoef(torch.cat([*streams[:1], *streams[2:], coin], 1).T).fill_diagonal_(0)
    assert table.abs().max() < 0.03, "purposes, lanes and seeds are independent"
    first, second = Noise(0).draw(torch.ones(50_000, 3), 2, keys).T
    assert (first != second).all(), "drawn without replacement"


def texts_in_windows() -> None:
    """Of a model with windows, shared keys and an indexer, and of one with chunks; windows and
    chunks in rings, of which texts are several times as long."""
    assert architectures.outcome("deepseek_v32", (3, 40), ("self grown",)) == "right"
    with architectures.short_passes():
        for name in ("gemma3n_text", "llama4_text"):
            assert architectures.outcome(name, (3, 90), ("self grown",)) == "right", name


def keys_in_rings() -> None:
    """Whatever is written, rolled back, left out or fed again, each token sees the last keys that
    were written at the slots in its window, in rings of sixteen places that leave no room."""
    window, most, room, rng = 5, 6, 6, random.Random(0)
    with architectures.short_passes(most):
        cache = SlotCache([Layer("sliding_attention", window)], 2, 200, room)
    [layer], texts, written = cache.layers, [{}, {}], itertools.count(1.0)
    lengths = [40, 11]

    def feed(slots: list[list[int]], ends: list[int]) -> None:
        """A pass in which the tokens from `ends` on are padding."""
        tokens = [[-(s >= end) for s in line] for line, end in zip(slots, ends, strict=True)]
        keys = torch.tensor([[next(written) for _ in line] for line in slots])
        cache.aim(slice(0, 2), torch.tensor(slots), 200, torch.tensor(tokens))
        held = layer.update(keys[:, None, :, None], keys[:, None, :, None])[0][:, 0, :, 0]
        seen = cache.near(window, 0)
        for row, (text, line, end) in enumerate(zip(texts, slots, ends, strict=True)):
            text |= {s: key for s, key in zip(line, keys[row].tolist(), strict=True) if s < end}
            for node, slot in enumerate(line):
                wanted = [text.get(s) for s in range(max(0, slot - window + 1), slot + 1)]
                assert slot >= end or sorted(held[row][seen[row, node]].tolist()) == sorted(wanted)

    for first in range(0, 39, most):
        feed([[*range(first, min(first + most, 39))]] * 2, lengths)
    for _ in range(20):
        going = [rng.random() < 0.7 for _ in lengths]
        feed([[*range(L - 1, L - 1 + room)] for L in lengths], [200 * on for on in going])
        lengths = [L + on * rng.choice([1, room]) for L, on in zip(lengths, going, strict=True)]
        feed([[*range(L - 1 - most, L - 1)] for L in lengths], lengths)


CHECKS = {
    f.__name__: f
    for f in (shape, precision, edges, parts, addresses, law_on_chains, law_on_trees,
              law_of_chosen_tokens, law_of_match, law_with_eos, law_of_batches, law_when_shaped,
              law_when_processed, law_when_sampled, law_of_block, law_of_block_when_sampled,
              gain_of_block, bias_of_lossy_rules, typical_by_hand, speed,
              kept_as_often_as_can_be, counts, texts_in_windows, keys_in_rings)
}  # fmt: skip


# The bugs ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """`edits`, old to new, of the source of `owner.name`; the check `killer` must fail."""

    bug: str
    owner: object
    name: str
    edits: dict[str, str]
    killer: str

    def plant(self, monkeypatch) -> None:
        """Wherever the package has bound the function, its mutant takes its place; nothing that is
        compiled does."""
        monkeypatch.setattr(ops, "fast", lambda: False)
        ops.forget()
        healthy = getattr(self.owner, self.name)
        source = textwrap.dedent(inspect.getsource(healthy))
        for old, new in self.edits.items():
            assert source.count(old) == 1, f"{self.bug}: {old!r} is not there just once"
            source = source.replace(old, new)
        code = compile(f"from __future__ import annotations\n{source}", f"<{self.bug}>", "exec")
        made: dict[str, object] = {}
        exec(code, inspect.unwrap(healthy).__globals__, made)
        monkeypatch.setattr(self.owner, self.name, made[self.name])
        if not inspect.isclass(self.owner):
            for name, module in list(sys.modules.items()):
                if name.startswith("specexp.") and vars(module).get(self.name) is healthy:
                    monkeypatch.setattr(module, self.name, made[self.name])


FULL = "(n == nodes.deepest)[:, None]"
COIN = "rng.bernoulli(ratio[..., 0].clamp(max=1), draft.keys, rank)"
DRAWN = "rng.draw(laws[-1], width, "
REST = "(left - self.lenience * drawn).clamp(min=0)"
RETURN = "return with_bonus(draft, path, n, left, rng)"
STOP = "stop = path.gather(1, n[:, None])"
OWED = "owed = left.gather(1, stop[..., None].expand(-1, 1, left.shape[-1]))"
GAINED = "torch.minimum(verdict.n, before_end) + 1"
ROOM = "(self.limit - self.length).clamp(min=0)"
reject = (Reject, "__call__")
match = (rules, "follow")
block = (Block, "__call__")
MOVE = "layer.keep(seqs.rows, *moves[layer.size])"
grow = (growth, "grow")
commit = (Sequences, "commit")
verify = (LM, "verify")
law = (Sampling, "law")


def last(new: str) -> dict[str, str]:
    """Reject draws its last token from another law."""
    drawn = RETURN.replace("left", "owed[:, None].expand_as(left)")
    return {RETURN: f"{STOP}\n    {OWED}[:, 0]\n    owed = {new}\n    {drawn}"}


MUTANTS = [
    # What is proposed
    Mutant("draft tokens drawn from another q", *grow,
           {DRAWN: "rng.draw(sampling.law(logits / 2), width, "},
           "law_on_chains"),
    Mutant("likeliest draft token under a soft q", *grow,
           {f"{DRAWN}seqs.keys(nodes.depth[:, here]))": "ranked(logits, width)"},
           "law_on_chains"),
    Mutant("q reported at another temperature", *grow,
           {"laws.append(sampling.law(logits))": "laws.append(Sampling(1.0).law(logits))",
            DRAWN: "rng.draw(sampling.law(logits), width, "},
           "law_when_shaped"),
    # What the target says of it
    Mutant("temperature on q only", Engine, "law",
           {"self.sampling.law(seen.logits)": "Sampling(1.0).law(seen.logits)"},
           "law_when_shaped"),
    Mutant("stale prefix", trees.Branches, "mask", {"(place < 0)[": "(place < -1)["},
           "law_on_trees"),
    Mutant("blind to the token before", trees, "line_mask",
           {"<= slots[:, :, None]": "!= slots[:, :, None] - 1"}, "law_on_chains"),
    Mutant("sees what comes after it", trees, "line_mask",
           {"<= slots[:, :, None]": "<= slots[:, -1:, None]"}, "law_on_chains"),
    Mutant("first row verifies all", Engine, "law",
           {"(seen.logits)": "(seen.logits[:, :1].expand_as(seen.logits))"}, "law_on_chains"),
    Mutant("rows laid out as the first", *verify,
           {"seqs.places(nodes.depth)":
            "seqs.window(0, 1).places(nodes.depth).expand(len(draft.tokens), -1)"},
           "law_on_chains"),
    Mutant("a node's slot taken for its position", *verify,
           {"slots, positions, visible": "slots, slots, visible"}, "law_on_trees"),
    Mutant("nodes see their siblings", trees.Branches, "mask",
           {"ancestors.gather(2, index)": "(index >= 0)"}, "law_on_trees"),
    Mutant("logits shaped by committed tokens alone", processors, "texts",
           {"draft.tokens.clamp(min=0)": "seqs.root"},
           "law_when_processed"),
    Mutant("logits shaped by siblings too", processors, "texts",
           {"torch.where(nodes.ancestors, slots[:, None], S)":
            "(slots[:, :1] + torch.arange(N))[:, None].expand(B, N, N)"}, "law_when_processed"),
    # What is kept
    Mutant("threshold for a coin", *reject, {COIN: "(ratio[..., 0] > 0.5)"}, "law_on_chains"),
    Mutant("accept if a sample agrees, then the residual", *reject,
           {COIN: "(rng.categorical(left, draft.keys, TOKEN) == x[..., 0])"}, "law_on_chains"),
    Mutant("ratio ten percent too large", *reject,
           {"ratio[..., 0].clamp": "(1.1 * ratio[..., 0]).clamp"}, "law_on_chains"),
    Mutant("typical acceptance", *reject, {COIN: "(p.gather(-1, x)[..., 0] > 0.3)"},
           "law_on_chains"),
    Mutant("accepts what the target never says", *reject,
           {"ratio[..., 0].clamp(max=1)": "ratio[..., 0].clamp(0.05, 1)"}, "law_on_chains"),
    Mutant("a draft token of zero probability taken as drawn", rules, "drawn_from",
           {"torch.where(q.gather(-1, x) > 0, q, certain)": "q"}, "law_on_trees"),
    Mutant("no draft token taken for token 0", *reject, {"open_ & (x >= 0)": "open_"},
           "law_of_chosen_tokens"),
    Mutant("siblings drawn from one q", *reject,
           {"normalised(drawn.scatter(-1, x, 0.0), drawn)": "drawn"}, "law_on_trees"),
    Mutant("second sibling held against p", *reject, {"ratio = left.gather": "ratio = p.gather"},
           "law_on_trees"),
    Mutant("siblings tried after one was taken", *reject, {"open_ = open_ & ~accepted": "pass"},
           "law_on_trees"),
    Mutant("siblings share a coin", *reject, {"draft.keys, rank)": "draft.keys, 0)"},
           "law_when_sampled"),
    Mutant("match: compared with a node's own sample", *match,
           {"draft.tokens == at_parent": "draft.tokens == sample"}, "law_of_match"),
    Mutant("accepted after a refusal", Nodes, "accepted", {".cumprod(1)": ""}, "law_on_chains"),
    Mutant("accepted without its ancestors", Nodes, "accepted",
           {"((ok | (node == 0))[:, None, :] | ~self.ancestors).all(-1)":
            "(ok | (node == 0))"}, "law_of_match"),
    Mutant("draft tokens kept only where samples agree", *reject,
           {"nodes, tokens = draft.nodes, draft.tokens": "return Match()(draft, p, rng)"},
           "kept_as_often_as_can_be"),
    # A chain judged as a whole
    Mutant("block: passes with P_i", *block, {"S / (S + 1 - P)": "P"}, "law_of_block"),
    Mutant("block: passes with its own ratio", *block,
           {"S / (S + 1 - P)": "odds.roll(1, 1).clamp(max=1)"}, "law_of_block"),
    Mutant("block: passes with S_i", *block, {"S / (S + 1 - P)": "S"}, "law_of_block"),
    Mutant("block: P_i not cut at one", *block,
           {"(weights[-1] * odds[:, i]).clamp(max=1)": "weights[-1] * odds[:, i]",
            "chance[:, 1:]": "chance[:, 1:].clamp(0, 1)"}, "law_of_block"),
    Mutant("block: residual of p, not of P_i p", *block,
           {"(P[..., None] * p - drawn)": "(p - drawn)"}, "law_of_block"),
    Mutant("block: bonus from p", *block,
           {"normalised(uncovered, p)": "p"},
           "law_of_block"),
    Mutant("block: stops at the first that fails", *block,
           {"(passes * lengths).amax(1)": "passes.long().cumprod(1).sum(1)"}, "law_of_block"),
    Mutant("block: the last draft token judged like the others", *block,
           {"torch.where(exists[..., None], drawn_from(draft.q, p, x), 0.0)":
            "torch.where(exists[..., None], drawn_from(draft.q, p, x), draft.q[:, :1] if draft.q "
            "is not None else 0.0)"}, "law_of_block"),
    Mutant("block: no draft token taken for token 0", *block,
           {"(following >= 0).cumprod(1)": "(place0 >= 0).cumprod(1)",
            "x = following.clamp(min=0)[..., None]":
            "x = following.clamp(min=0)[..., None]\n    place0 = torch.zeros_like(following)\n"
            "    place0[:, -1] = -1"}, "law_of_block"),
    Mutant("block: only as good as the rule it replaces", *block,
           {"tokens = draft.tokens": "return Reject()(draft, p, rng)"}, "gain_of_block"),
    Mutant("a rule that looks ahead sees the same noise again", Noise, "keys",
           {"mix(root) if self.by_round else root": "root"}, "law_of_block_when_sampled"),
    # Lossy on purpose, and by how much
    Mutant("lenient in the ratio only", *reject,
           {"(left - self.lenience * drawn)": "(left - drawn)"}, "bias_of_lossy_rules"),
    Mutant("lenience upside down", *reject,
           {"/ (self.lenience * drawn.gather(-1, x))": "* self.lenience / drawn.gather(-1, x)"},
           "bias_of_lossy_rules"),
    Mutant("typical: entropy of the wrong sign", Typical, "_typical",
           {"torch.exp(-entropy)": "torch.exp(entropy)"}, "typical_by_hand"),
    Mutant("typical: judged by the law after the draft token", Typical, "__call__",
           {"torch.take_along_dim(self._typical(p), draft.nodes.parents[..., None], 1)":
            "self._typical(p)"}, "bias_of_lossy_rules"),
    # What follows
    Mutant("residual is p", *reject, {"normalised(uncovered, left)": "left"}, "law_on_chains"),
    Mutant("residual is the absolute difference", *reject, {REST: "(left - drawn).abs()"},
           "law_on_chains"),
    Mutant("residual without the draft token only", *reject, {REST: "left.scatter(-1, x, 0.0)"},
           "law_on_chains"),
    Mutant("residual of the first row", *reject, last(f"torch.where({FULL}, owed, left[:, 0])"),
           "law_on_chains"),
    Mutant("residual of the next row", *reject,
           {RETURN: RETURN.replace("left", "left.roll(-1, 1)")},
           "law_on_chains"),
    Mutant("residual on the draft token's noise", Noise, "uncoupled",
           {"RESIDUAL, tokens": "TOKEN, tokens"}, "law_when_sampled"),
    Mutant("a part of the vocabulary as likely as any other", Noise, "uncoupled",
           {"parts.sum(-1)": "(parts.sum(-1) > 0).float()"}, "parts"),
    Mutant("a part and its tokens share their noise", Noise, "uncoupled", {"~part": "part"},
           "parts"),
    Mutant("bonus from q", *reject, last(f"torch.where({FULL}, draft.q[:, -2], owed)"),
           "law_on_chains"),
    Mutant("bonus of the first row", *reject, last(f"torch.where({FULL}, p[:, 0], owed)"),
           "law_on_chains"),
    Mutant("likeliest bonus", *reject,
           last(f"torch.where({FULL}, (owed == owed.amax(1, keepdim=True)).double(), owed)"),
           "law_on_chains"),
    Mutant("match: bonus of the root", *match,
           {"sample.gather(1, path))": "draft.judged(path, n, sample[:, 0]).new)"},
           "law_of_match"),
    Mutant("batch rolled back to its shortest row and redrawn", *reject,
           {"path, n = nodes.accepted(ok)":
            "path, n = nodes.accepted(ok)\n"
            "    short = n.view(-1, 2).amin(1).repeat_interleave(2)\n"
            "    left = torch.where((n > short)[:, None, None], p, left)\n"
            "    n = short"}, "law_of_batches"),
    # What is written
    Mutant("correction dropped after an accepted draft token", *commit,
           {GAINED: "torch.minimum(verdict.n - ((verdict.n > 0) & (verdict.n < "
                    "verdict.new.shape[1] - 1)).long(), before_end) + 1"}, "law_on_chains"),
    Mutant("one accepted token skipped", Draft, "judged", {"path.roll(-1, 1)": "path.roll(-2, 1)"},
           "law_on_chains"),
    Mutant("bonus thrown away", *commit,
           {GAINED: "torch.minimum((verdict.n - 1).clamp(min=0), before_end) + 1"}, "speed"),
    Mutant("goes on past an end of text", *commit,
           {"torch.where(ends, at, at.numel()).amin(1)":
            "torch.full_like(verdict.n, at.numel())"}, "law_with_eos"),
    Mutant("an end of text does not end the row", *commit,
           {"emitted > before_end": "torch.zeros_like(self.live)"},
           "law_with_eos"),
    Mutant("an end of text that is not delivered", *commit,
           {GAINED: "torch.minimum(verdict.n + 1, before_end)"}, "law_with_eos"),
    Mutant("one token past the limit", *commit,
           {ROOM: "(self.limit - self.length + 1).clamp(min=0)"}, "law_on_chains"),
    Mutant("done rows go on", *commit, {ROOM: "(self.limit - self.length).clamp(min=1)"},
           "law_of_batches"),
    # What is remembered
    Mutant("cache off by one", *verify,
           {"slots = positions = seqs.places(nodes.depth)":
            "positions = seqs.places(nodes.depth)\n    slots = 1 + positions"},
           "law_on_chains"),
    Mutant("prefill of one token too few", Rows, "prefill",
           {"read = int(seqs.length.max()) - 1": "read = max(0, int(seqs.length.max()) - 2)"},
           "law_on_chains"),
    Mutant("accepted path left where it was", Engine, "commit",
           {"self.target.keep(seqs, draft, verdict)": "pass"}, "law_on_trees"),
    Mutant("accepted path moved from one node before", SlotCache, "keep",
           {"places(verdict.path)": "places((verdict.path - 1).clamp(min=0))"}, "law_on_trees"),
    Mutant("accepted path moved without its last node", SlotCache, "keep",
           {"<= verdict.n": "< verdict.n"}, "law_on_trees"),
    Mutant("accepted path of shared keys moved twice", SlotCache, "keep",
           {MOVE: f"{MOVE}\n        {MOVE}"}, "texts_in_windows"),
    Mutant("indexer's accepted path left where it was", Slots, "keep",
           {"whole in self.buffers)": "whole in [*self.buffers][:2])"}, "texts_in_windows"),
    Mutant("window of one position more", SlotCache, "near",
           {"own - place < window": "own - place <= window"}, "texts_in_windows"),
    Mutant("window of one position less", SlotCache, "near",
           {"own - place < window": "own - place < window - 1"}, "texts_in_windows"),
    Mutant("chunks begin one position early", SlotCache, "near",
           {"own // chunk == place // chunk": "(own + 1) // chunk == (place + 1) // chunk"},
           "texts_in_windows"),
    Mutant("windows count the slots of a tree", SlotCache, "_placed",
           {"place = visible.cumsum(-1) - 1":
            "place = torch.arange(self.seen)[None, None].expand_as(visible)",
            "own, at = place[:, :, -1:],": "own, at = self.slots[:, 0],"},
           "texts_in_windows"),
    Mutant("ring of one place too few", memory, "layer_slots",
           {"// 8) * 8)": "// 8) * 8 - 1)"},
           "keys_in_rings"),
    Mutant("ring that holds the slots before", SlotCache, "held", {"+ 2 - size": "+ 1 - size"},
           "keys_in_rings"),
    Mutant("padding in the place of what a row still reads", SlotCache, "aim",
           {"tokens < 0": "tokens < -1"}, "keys_in_rings"),
    Mutant("place of padding that is seen", SlotCache, "held",
           {"place < size - 1": "place < size"}, "keys_in_rings"),
    Mutant("tokens past the end of a shorter row kept", LM, "fill_at",
           {"seqs.length - 1": "seqs.length + 999"}, "texts_in_windows"),
    Mutant("accepted path moved to its slots in a ring", SlotCache, "place",
           {"slots % (size - 1)": "slots.clamp(max=size - 1)"}, "texts_in_windows"),
    Mutant("draft's accepted path left where it was", DraftModel, "observe",
           {"if not self.gives_way:": "if False:"}, "speed"),
    Mutant("only the root is fed again", DraftModel, "_step",
           {"self.lm.follow(rows, 1 + self.again)": "self.lm.follow(rows, 1)"}, "speed"),
    # From logits to a law
    Mutant("top-p keeps one token too few", *law,
           {"ranked.cumsum(-1) - ranked >= self.top_p": "ranked.cumsum(-1) > self.top_p"},
           "shape"),
    Mutant("top-k drops ties", *law, {"logits < least": "logits <= least"}, "shape"),
    Mutant("top-k after top-p", *law,
           {"if 0 < self.top_k < logits.shape[-1]:": "if False:",
            "    return p\n":
            "    p = p * (p >= p.topk(self.top_k or p.shape[-1]).values[..., -1:])\n"
            "    return p / p.sum(-1, keepdim=True)\n"}, "shape"),
    Mutant("temperature upside down", *law, {"/ self.temperature": "* self.temperature"}, "shape"),
    Mutant("greedy ties go to the highest token", *law,
           {"likeliest(logits)[..., None]":
            "logits.shape[-1] - 1 - likeliest(logits.flip(-1))[..., None]"}, "shape"),
    Mutant("minus infinity made a large number", *law,
           {"logits = logits.to(torch.promote_types(logits.dtype, torch.float32))":
            "logits = logits.nan_to_num(neginf=-4.0)"}, "law_on_chains"),
    Mutant("the law in the model's own dtype", *law,
           {"torch.promote_types(logits.dtype, torch.float32)": "logits.dtype"}, "precision"),
    # From a law to a token
    Mutant("an impossible draft token kept by a uniform of nothing", Noise, "bernoulli",
           {"u <= p": "u - 2.0**-64 <= p"}, "edges"),
    Mutant("a certain draft token lost to a uniform of one", Noise, "bernoulli",
           {"u <= p": "u < p"}, "edges"),
    Mutant("uniforms that can be nothing", Noise, "uniform", {"bits.float() + 0.5": "bits.float()"},
           "edges"),
    Mutant("a certain token lost to an endless race", Noise, "arrivals",
           {".clamp(max=1 - 2**-24)": ""}, "edges"),
    Mutant("a sum of probabilities that stops short of one", Noise, "categorical",
           {"likeliest(self.race(w, keys, purpose))":
            "(w.cumsum(-1) < self.uniform(keys, purpose, torch.arange(1))).sum(-1)"}, "edges"),
    Mutant("uniforms of 24 bits", Noise, "uniform",
           {"& 0x7FFFFFFFFFFFFFFF": "& 0x7FFFFF8000000000"}, "precision"),
    Mutant("early arrivals rounded", Noise, "arrivals",
           {"-torch.log1p(-u)": "-torch.log(1 - u)"}, "precision"),
    Mutant("rows share their noise", Noise, "keys",
           {"mix(stream)": "mix(0 * stream)"}, "addresses"),
    Mutant("noise by node, not by position", Noise, "keys",
           {"+ length[:, None]": "+ 0 * length[:, None]"}, "addresses"),
    Mutant("purposes share their noise", Noise, "salt", {"* 8 + purpose": "* 8"}, "addresses"),
    Mutant("seeds share their noise", Noise, "salt", {"self.seed * 8": "8"}, "addresses"),
    Mutant("lanes share their noise", Noise, "uniform", {"lanes * _GOLDEN": "lanes * 0"},
           "addresses"),
    Mutant("coins on the draft token's noise", Noise, "bernoulli", {"ACCEPT": "TOKEN"},
           "addresses"),
    Mutant("siblings drawn with replacement", Noise, "draw",
           {"ranked(self.race(w, keys, TOKEN), k)":
            "torch.stack([self.categorical(w, keys + i, TOKEN) for i in range(k)], -1)"},
           "addresses"),
    # What is reported
    Mutant("done rows counted", trace, "steps_of_report", {"if emitted:": "if True:"}, "counts"),
    Mutant("bonus not counted", Acceptance, "of", {"s.accepted + 1": "s.accepted"}, "counts"),
    Mutant("emitted before the cut", *commit,
           {"[verdict.n, emitted,": "[verdict.n, verdict.n + 1,"}, "counts"),
]  # fmt: skip


@pytest.mark.parametrize("check", one_in(4, CHECKS))
def test_unchanged_code_passes_every_check(check):
    CHECKS[check]()


@pytest.mark.parametrize("mutant", one_in(9, MUTANTS), ids=lambda m: m.bug)
def test_planted_bug_is_caught(mutant, monkeypatch):
    mutant.plant(monkeypatch)
    with pytest.raises(AssertionError):
        CHECKS[mutant.killer]()


def test_every_check_catches_a_bug_and_bugs_are_distinct():
    assert {m.killer for m in MUTANTS} == set(CHECKS)
    assert len({m.bug for m in MUTANTS}) == len(MUTANTS) >= 25


@pytest.mark.parametrize(
    "bug",
    ["stale prefix", "first row verifies all", "residual of the first row",
     "bonus of the first row"],
)  # fmt: skip
def test_context_free_models_miss_the_bug(bug, monkeypatch):
    [mutant] = [m for m in MUTANTS if m.bug == bug]
    mutant.plant(monkeypatch)
    law_on_chains(blind=True)
