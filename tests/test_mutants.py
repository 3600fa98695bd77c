"""Planted bugs. Each is a small change of the real source, and a named check must reject it.

A check that the unchanged code passes and every mutant fails is one that can fail. Four of the
bugs are invisible where laws do not depend on context, which is how such code is mostly tested.
"""

import inspect
import textwrap
from dataclasses import dataclass

import pytest
import torch
from oracle import explore, gap, warp
from toys import texts, toy_engine

from specexp import engine as engines
from specexp import lm as lms
from specexp import rules, sampling, sequences, tree
from specexp.cache import SlotCache
from specexp.drafters import model as drafting
from specexp.rules import Match, Reject
from specexp.sampling import TOKEN, Noise, Sampling
from specexp.sequences import Sequences
from specexp.tree import Tree

ROUNDING = 1e-12
CHAIN, BRANCHING = Tree.chain(2), Tree((-1, 0, 0, 2))


def law_on_chains(blind: bool = False) -> None:
    for p, q in (("dense", "dense"), ("zeros", "zeros")):
        engine = toy_engine(Reject(), "drawn", p=p, q=q, blind=blind)
        assert gap(engine, texts(3, 8), 3, [CHAIN]) <= ROUNDING


def law_on_trees() -> None:
    assert gap(toy_engine(Reject(), "drawn"), texts(3, 4), 3, [BRANCHING]) <= ROUNDING


def law_of_match() -> None:
    for drafter in ("drawn", "scripted"):
        assert gap(toy_engine(Match(), drafter), texts(3, 3), 3, [BRANCHING]) <= ROUNDING


def law_with_eos() -> None:
    assert gap(toy_engine(Reject(), "drawn", eos=(0,)), texts(3, 6), 3, [CHAIN]) <= ROUNDING


def law_of_batches() -> None:
    engine = toy_engine(Reject(), "drawn", V=2, eos=(1,))
    assert gap(engine, texts(2, 4, rows=2), 3, [CHAIN]) <= ROUNDING


def law_when_shaped() -> None:
    for shape in (Sampling(0.5), Sampling(1.0, top_k=2), Sampling(0.5, top_k=3, top_p=0.6)):
        engine = toy_engine(Reject(), "drawn", V=4, p="tied", sampling=shape)
        assert gap(engine, texts(4, 6), 2, [CHAIN]) <= ROUNDING


def speed() -> None:
    """What losslessness cannot see: a draft that is the target is accepted whole every round."""
    greedy = toy_engine(Match(), "chosen", twin=True, sampling=Sampling(0.0))
    sampled = toy_engine(Reject(), "drawn", V=2, twin=True)
    for engine, shape in ((sampled, CHAIN), (greedy, CHAIN), (greedy, Tree.branching(2, 1, 1))):
        found = explore(engine, texts(2, 6), 6, [shape])
        assert not found.dirty, "a model read a slot that holds nothing"
        assert {n for (_, _, n), w in found.accepted.items() if w > 1e-12} == {shape.depth}
        assert max(r for _, r, _ in found.accepted) == -(-6 // (shape.depth + 1)) - 1


class Edge(Noise):
    """The extreme uniforms there are: never, almost never, at once."""

    def uniform(self, keys, purpose, lanes):
        return torch.tensor([1.0, 1 - 2**-24, 2.0**-64])[:, None].expand(3, len(lanes))


def noise() -> None:
    keys = torch.zeros(3, dtype=torch.int64)
    assert Edge(0).bernoulli(torch.ones(3), keys, 0).all()
    assert not Edge(0).bernoulli(torch.zeros(3), keys, 0).any()
    w = torch.tensor([[0.0, 0.0, 1e-30]]).expand(3, 3)
    assert Edge(0).categorical(w, keys, TOKEN).tolist() == [2, 2, 2]
    seqs = Sequences.of([[1, 2, 3], [1, 2, 3], [1, 2]], 4, slack=3, streams=[0, 1, 0])
    at = seqs.keys(torch.tensor([[0, 1, 1]]))
    assert at[0, 1] == at[0, 2], "siblings share the noise of their position"
    assert at[0, 0] != at[0, 1], "positions differ"
    assert at[0, 0] != at[1, 0], "rows differ"
    assert at[0, 0] == at[2, 1], "a position's noise does not depend on where the round began"
    many = sampling.mix(torch.arange(50_000))
    u = Noise(0).uniform(many, TOKEN, torch.arange(2))
    other = Noise(0).uniform(many, sampling.RESIDUAL, torch.arange(2))
    table = torch.corrcoef(torch.cat([u, other], 1).T).fill_diagonal_(0)
    assert table.abs().max() < 0.03, "lanes and purposes are independent"
    fine = torch.sort(u.flatten()).values
    assert len(fine.unique()) > 0.99 * len(fine), "float32 does not make uniforms equal"


def shape() -> None:
    """`Sampling.law` against rational numbers."""
    weights = [9, 1, 5, 5, 3, 2, 8, 8]
    for s in (Sampling(0.5), Sampling(1.0, 3), Sampling(1.0, 0, 0.6), Sampling(0.5, 4, 0.7)):
        found = s.law(torch.tensor(weights, dtype=torch.float64).log()).tolist()
        assert found == pytest.approx([float(x) for x in warp(weights, s)], abs=1e-12)


CHECKS = {
    f.__name__: f
    for f in (shape, noise, law_on_chains, law_on_trees, law_of_match, law_with_eos,
              law_of_batches, law_when_shaped, speed)
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """`old` becomes `new` in the source of `owner.name`; the check `killer` must fail."""

    bug: str
    owner: object
    name: str
    old: str
    new: str
    killer: str

    def plant(self, monkeypatch) -> None:
        function = getattr(self.owner, self.name)
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
        assert source.count(self.old) == 1, f"{self.bug}: {self.old!r} is not there just once"
        world = dict(inspect.unwrap(function).__globals__)
        code = "from __future__ import annotations\n" + source.replace(self.old, self.new)
        exec(compile(code, f"<{self.bug}>", "exec"), world)
        for owner in (self.owner, drafting) if self.name == "tree_mask" else (self.owner,):
            monkeypatch.setattr(owner, self.name, world[self.name])


FULL = "(n == nodes.deepest)[:, None]"
COIN = "rng.bernoulli(ratio[..., 0].clamp(max=1), draft.keys, rank)"
DRAWN = "rng.draw(laws[-1], width, keys[:, level])"
REST = "(left - drawn).clamp(min=0)"
RETURN = "return Verdict(path, n, rng.categorical(owed"
reject = (Reject, "__call__")
match = (Match, "__call__")
propose = (drafting.DraftModel, "propose")
round_ = (engines.Engine, "round")
commit = (sequences.Sequences, "commit")
verify = (lms.LM, "verify")
law = (sampling.Sampling, "law")
MUTANTS = [
    Mutant("guesses drawn from another q", *propose, DRAWN,
           "rng.draw(self.sampling.law(logits / 2), width, keys[:, level])", "law_on_chains"),
    Mutant("likeliest guess under a soft q", *propose, DRAWN,
           "logits.topk(width).indices", "law_on_chains"),
    Mutant("q reported at another temperature", *propose,
           "laws.append(self.sampling.law(logits))\n            picked = " + DRAWN,
           "laws.append(Sampling(1.0).law(logits))\n            picked = "
           "rng.draw(self.sampling.law(logits), width, keys[:, level])", "law_when_shaped"),
    Mutant("temperature on q only", *round_, "self.sampling.law(seen.logits)",
           "Sampling(1.0).law(seen.logits)", "law_when_shaped"),
    Mutant("stale prefix", lms, "tree_mask", "return (offset < 0)", "return (offset < -1)",
           "law_on_chains"),
    Mutant("first row verifies all", *round_, "self.sampling.law(seen.logits)",
           "self.sampling.law(seen.logits[:, :1].expand_as(seen.logits))", "law_on_chains"),
    Mutant("threshold for a coin", *reject, COIN, "(ratio[..., 0] > 0.5)", "law_on_chains"),
    Mutant("accept if a sample agrees, then the residual", *reject, COIN,
           "(rng.categorical(left, draft.keys, TOKEN) == x[..., 0])", "law_on_chains"),
    Mutant("ratio ten percent too large", *reject, "ratio[..., 0].clamp",
           "(1.1 * ratio[..., 0]).clamp", "law_on_chains"),
    Mutant("typical acceptance", *reject, COIN, "(p.gather(-1, x)[..., 0] > 0.3)", "law_on_chains"),
    Mutant("accepts what the target never says", *reject, "ratio[..., 0].clamp(max=1)",
           "ratio[..., 0].clamp(0.05, 1)", "law_on_chains"),
    Mutant("residual is p", *reject, f"normalised({REST}, left)", "left", "law_on_chains"),
    Mutant("residual is the absolute difference", *reject, REST, "(left - drawn).abs()",
           "law_on_chains"),
    Mutant("residual without the guess only", *reject, REST, "left.scatter(-1, x, 0.0)",
           "law_on_chains"),
    Mutant("residual of the first row", *reject, RETURN,
           f"owed = torch.where({FULL}, owed, left[:, 0])\n    {RETURN}", "law_on_chains"),
    Mutant("bonus from q", *reject, RETURN,
           f"owed = torch.where({FULL}, draft.q[:, -2], owed)\n    {RETURN}", "law_on_chains"),
    Mutant("bonus of the first row", *reject, RETURN,
           f"owed = torch.where({FULL}, p[:, 0], owed)\n    {RETURN}", "law_on_chains"),
    Mutant("likeliest bonus", *reject, RETURN,
           f"owed = torch.where({FULL}, (owed == owed.amax(1, keepdim=True)).double(), owed)\n"
           f"    {RETURN}", "law_on_chains"),
    Mutant("siblings drawn from one q", *reject,
           "normalised(drawn.scatter(-1, x, 0.0), drawn)", "drawn", "law_on_trees"),
    Mutant("second sibling held against p", *reject, "ratio = left.gather", "ratio = p.gather",
           "law_on_trees"),
    Mutant("what a sibling took is not kept", *reject, "open_ = open_ & ~took", "pass",
           "law_on_trees"),
    Mutant("match: bonus of the root", *match, "path.gather(1, n[:, None])", "path[:, :1]",
           "law_of_match"),
    Mutant("match: compared with a node's own sample", *match, "draft.tokens == wanted",
           "draft.tokens == sample", "law_of_match"),
    Mutant("accepted without its ancestors", tree.Nodes, "accepted",
           "((ok | root)[:, None, :] | ~self.ancestors).all(-1)",
           "(ok | root).expand(len(ok), -1)", "law_of_match"),
    Mutant("correction dropped", *commit, "torch.minimum(verdict.n, before_end) + 1",
           "torch.minimum(verdict.n - (verdict.n < draft.nodes.deepest).long(), before_end) + 1",
           "law_on_chains"),
    Mutant("one accepted token skipped", *commit, "line.roll(-1, 1)", "line.roll(-2, 1)",
           "law_on_chains"),
    Mutant("bonus thrown away", *commit, "torch.minimum(verdict.n, before_end) + 1",
           "torch.minimum((verdict.n - 1).clamp(min=0), before_end) + 1", "speed"),
    Mutant("goes on past an end of text", *commit, "torch.where(ends, at, at.numel()).amin(1)",
           "torch.full_like(verdict.n, at.numel())", "law_with_eos"),
    Mutant("an end of text does not end the row", *commit,
           "(ends & (at < emitted[:, None])).any(1)", "torch.zeros_like(self.live)",
           "law_with_eos"),
    Mutant("one token past the limit", *commit, "(self.limit - self.length).clamp(min=0)",
           "(self.limit - self.length + 1).clamp(min=0)", "law_on_chains"),
    Mutant("done rows go on", *commit, "(self.limit - self.length).clamp(min=0)",
           "(self.limit - self.length).clamp(min=1)", "law_of_batches"),
    Mutant("batch rolled back to its shortest row", *commit, "n = verdict.n[:, None]",
           "verdict.n = verdict.n.amin().expand_as(verdict.n)\n    n = verdict.n[:, None]",
           "law_of_batches"),
    Mutant("cache off by one", *verify, "slots = root + torch", "slots = root + 1 + torch",
           "law_on_chains"),
    Mutant("a node's slot taken for its position", *verify, "root + draft.nodes.depth", "slots",
           "law_on_trees"),
    Mutant("nodes see their siblings", lms, "tree_mask",
           "ancestors.expand(B, -1, -1).gather(2, node)", "True", "law_on_trees"),
    Mutant("accepted path left where it was", *round_, "if not tree.is_chain:", "if False:",
           "law_on_trees"),
    Mutant("accepted path moved one slot short", SlotCache, "keep",
           "target = root + torch", "target = root - 1 + torch", "law_on_trees"),
    Mutant("draft's accepted path left where it was", drafting.DraftModel, "observe",
           "if not tree.is_chain:", "if False:", "speed"),
    Mutant("catch-up of one token", drafting.DraftModel, "_catch_up",
           "- 2 + torch.arange(2", "- 1 + 0 * torch.arange(2", "speed"),
    Mutant("top-p keeps one token too few", *law, "ranked.cumsum(-1) - ranked >= self.top_p",
           "ranked.cumsum(-1) > self.top_p", "shape"),
    Mutant("top-k drops ties", *law, "logits < least", "logits <= least", "shape"),
    Mutant("temperature upside down", *law, "/ self.temperature", "* self.temperature", "shape"),
    Mutant("an impossible guess kept by a uniform of nothing", sampling.Noise, "bernoulli",
           "u <= p", "u - 2.0**-64 <= p", "noise"),
    Mutant("a certain guess lost to a uniform of one", sampling.Noise, "bernoulli",
           "u <= p", "u < p", "noise"),
    Mutant("a certain token lost to an endless race", sampling.Noise, "race",
           ".clamp(max=1 - 2**-24)", "", "noise"),
    Mutant("rows share their noise", sequences.Sequences, "keys", "mix(self.stream)",
           "mix(0 * self.stream)", "noise"),
    Mutant("noise by node, not by position", sequences.Sequences, "keys",
           "self.length[:, None] + depth", "depth", "noise"),
    Mutant("purposes share their noise", sampling.Noise, "uniform", "* 8 + purpose", "* 8",
           "noise"),
    Mutant("coarse uniforms", sampling.Noise, "uniform", "& 0x7FFFFFFFFFFFFFFF",
           "& 0x7FFF000000000000", "noise"),
]  # fmt: skip


def test_there_are_at_least_twenty_five_and_each_is_another():
    assert len(MUTANTS) >= 25
    assert len({m.bug for m in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("check", CHECKS)
def test_the_code_as_it_is_passes(check):
    CHECKS[check]()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.bug)
def test_a_planted_bug_is_caught(mutant, monkeypatch):
    mutant.plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        CHECKS[mutant.killer]()


BLIND_TO = ["stale prefix", "first row verifies all", "residual of the first row",
            "bonus of the first row"]  # fmt: skip


@pytest.mark.parametrize("bug", BLIND_TO)
def test_laws_that_ignore_context_would_not_have_shown_it(bug, monkeypatch):
    [mutant] = [m for m in MUTANTS if m.bug == bug]
    mutant.plant(monkeypatch)
    law_on_chains(blind=True)


def test_rules_are_where_the_mutants_think(monkeypatch):
    """The harness itself: a planted exception is reached through the real round."""
    monkeypatch.setattr(rules.Reject, "__call__", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        law_on_chains()
