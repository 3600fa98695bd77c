"""The whole round on tiny real models, against decoding without any cache at all."""

import copy
import random
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from conftest import CONTEXT, in_turn, one_in
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny import (
    DRAFTERS,
    FAMILIES,
    NEW,
    PROMPTS,
    RULES,
    SHAPES,
    TREES,
    Alphabet,
    Even,
    InTurn,
    NoHostReads,
    V,
    draft_module,
    engine,
    expected,
    module,
    slowly,
)  # fmt: skip

from specexp import ops
from specexp.drafters import Drafter
from specexp.drafters.crossed import Crossed, TokenMap
from specexp.drafters.early_exit import first_layers
from specexp.drafters.model import DraftModel
from specexp.drafters.plain import Plain
from specexp.engine import Engine
from specexp.errors import NonFiniteLogits, UserError
from specexp.models.load import of_module
from specexp.policy import Fixed, Plan
from specexp.rules import Match, Reject
from specexp.sampling import Sampling
from specexp.sequences import Sequences, Verdict
from specexp.tree import Tree

CASES = [(kind, *shape) for kind in DRAFTERS for shape in SHAPES]


@pytest.mark.parametrize(("kind", "rule", "tree"), one_in(5, CASES))
def test_greedy_matches_decoding_without_a_cache(kind, rule, tree):
    made = engine(kind, tree, rule).generate(PROMPTS, NEW)
    assert made.tokens == expected("llama")
    for record in made.trace.by_row:
        record.check()


@pytest.mark.parametrize("tree", ["chain", "branching"])
@pytest.mark.parametrize("kind", ["ngram", "self"])
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"llama"}))
def test_every_family_matches_decoding_without_a_cache(family, kind, tree):
    assert engine(kind, tree, family=family).generate(PROMPTS, NEW).tokens == expected(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_early_exit_matches_a_model_of_the_first_layers(family):
    net, ids = module(family), torch.tensor([PROMPTS[1]])
    cut = copy.deepcopy(net)
    [layers] = [part for part in cut.modules() if isinstance(part, torch.nn.ModuleList)]
    del layers[1:]
    cut.config.num_hidden_layers = 1
    with torch.no_grad():
        found, wanted, whole = (
            made(ids, use_cache=False).logits for made in (first_layers(net, 1), cut, net)
        )
    assert torch.equal(found, wanted)
    assert not torch.allclose(found, whole)
    assert engine("early_exit", "branching", family=family).generate(
        PROMPTS, NEW
    ).tokens == expected(family)


def test_early_exit_rejects_model_without_a_list_of_layers():
    net = copy.deepcopy(module("opt"))
    net.config.num_hidden_layers = 7
    with pytest.raises(UserError, match="cannot leave OPTForCausalLM: it has no list of its 7"):
        first_layers(net, 1)


@pytest.mark.parametrize(("kind", "tree"), one_in(3, product(DRAFTERS, TREES)))
def test_sampled_text_under_match_is_that_of_plain_decoding(kind, tree):
    made = engine(kind, tree, "match", temperature=0.9, seed=5)
    assert made.generate(PROMPTS, NEW).tokens == made.plain().generate(PROMPTS, NEW).tokens


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_law_of_a_class_of_ones_own_decides(rule, temperature):
    made = Engine.of(engine("ngram", "chain", rule), sampling=Even(temperature))
    for row in made.generate(PROMPTS, NEW).tokens:
        assert not any(token % 2 for token in row)


@pytest.mark.parametrize(
    ("gamma", "rule", "temperature"), one_in(5, product(range(1, 9), RULES, (0.0, 0.9)))
)
def test_draft_equal_to_target_is_accepted_whole(gamma, rule, temperature):
    made = engine("self", Tree.chain(gamma), rule, temperature=temperature)
    for step in made.generate(PROMPTS, 24).trace.steps():
        assert step.accepted == step.drafted == gamma


@pytest.mark.parametrize(("kind", "temperature"), in_turn(DRAFTERS, (0.0, 0.9)))
def test_row_of_a_batch_matches_the_row_alone(kind, temperature):
    made = engine(kind, "branching", "reject", temperature=temperature)
    together = made.generate(PROMPTS, NEW).tokens
    for row in (1, 4):
        assert made.generate([PROMPTS[row]], NEW, streams=[row]).tokens == [together[row]]
    order = [3, 0, 4, 2, 1]
    shuffled = made.generate([PROMPTS[i] for i in order], NEW, streams=order).tokens
    assert shuffled == [together[i] for i in order]


PATTERNS = (0, 0, 0, 3), (3, 0, 3, 1, 0, 0), (1, 0, 4, 0, 2)


@pytest.mark.parametrize(("kind", "pattern"), in_turn(DRAFTERS, PATTERNS))
def test_drafter_catches_up_after_rounds_without_a_draft(kind, pattern):
    """What it drafts after rounds without draft tokens is what it would draft of the same text."""
    made = engine(kind, "chain", "match", temperature=0.9)
    made.policy = InTurn(*map(Tree.chain, pattern))
    found = made.generate(PROMPTS, NEW)
    assert found.tokens == made.plain().generate(PROMPTS, NEW).tokens
    if kind == "recycle":
        return  # it remembers what was said, not the text
    fresh = engine(kind, "chain", "match", temperature=0.9)
    texts = [list(p) for p in PROMPTS]
    told = [0] * len(PROMPTS)
    for round_ in found.trace.rounds:
        for step in round_.steps:
            if step.draft and round_.depth and len(PROMPTS[step.row]) > 1:
                seqs = Sequences.of([texts[step.row]], 8, slack=6, streams=[step.row])
                if kind != "planted":
                    seqs = fresh.begin(seqs)
                    with torch.inference_mode():
                        draft = fresh.drafter.propose(seqs, Tree.chain(round_.depth), fresh.rng)
                    assert draft.tokens[0, 1:].tolist() == list(step.draft)
            new = found.tokens[step.row][told[step.row] :][: step.emitted]
            texts[step.row] += new
            told[step.row] += step.emitted


class Wordy(Alphabet):
    """Spells all but one letter in eight pieces."""

    def get_vocab(self):
        return {"A": 5}

    def __call__(self, text, **_):
        return SimpleNamespace(input_ids=[i for c in text for i in ([5] if c == "A" else range(8))])


@pytest.mark.parametrize("new", [4, 30])
def test_crossed_draft_of_many_tokens_reaches_the_end(new):
    law = Sampling()
    crossed = Crossed(of_module(draft_module(), "draft"), TokenMap(Alphabet(0), Wordy(5), V), law)
    made = Engine(of_module(module(), "target"), crossed, Fixed(Tree.chain(1)), law)
    assert made.generate([[5]], new).tokens == [slowly(module(), [5], new)]


def test_sample_depends_on_seed_and_stream():
    def sample(seed: int, streams: list[int]) -> list[list[int]]:
        return engine(temperature=1.0, seed=seed).generate([PROMPTS[1]] * 2, 12, streams).tokens

    assert sample(0, [0, 1]) == sample(0, [0, 1])
    assert sample(0, [0, 0])[0] == sample(0, [0, 0])[1]
    assert sample(0, [0, 1])[0] != sample(0, [0, 1])[1]
    assert sample(0, [0, 1]) != sample(1, [0, 1])


@pytest.mark.parametrize("kind", ["null", "self", "model", "ngram"])
@pytest.mark.parametrize("at", range(8))
def test_commit_cuts_at_eos(kind, at):
    """Whatever the place of the EOS in a draft: inside an accepted run, as correction, as bonus."""
    plain = expected("llama")[1]
    eos = plain[at]
    cut = plain[: plain.index(eos) + 1]
    made = engine(kind, "chain", eos=(eos, 999)).generate([PROMPTS[1], PROMPTS[1] + plain[:1]], NEW)
    assert made.tokens[0] == cut
    record = made.trace.by_row[0]
    record.check()
    assert record.emitted == len(cut)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_finished_rows_are_fed_no_token(kind, monkeypatch):
    """Texts end one after another; whoever has ended is fed no token any more."""
    made = engine(kind, "chain")
    made.eos = tuple({text[3 * i] for i, text in enumerate(expected("llama"))})
    verify, seen = made.verify, []

    def spy(seqs, draft):
        seen.append((seqs.live.tolist(), (draft.tokens >= 0).any(1).tolist()))
        return verify(seqs, draft)

    monkeypatch.setattr(made, "verify", spy)
    texts = made.generate(PROMPTS, NEW).tokens
    assert len({len(text) for text in texts}) > 1
    assert kind == "self" or any(not all(live) for live, _ in seen)  # its texts are too short
    assert all(live == fed for live, fed in seen)


def test_eos_in_the_prompt_does_not_end_the_row():
    eos = 7
    plain = expected("llama")[2]
    cut = plain[: plain.index(eos) + 1] if eos in plain else plain
    assert engine(eos=(eos,)).generate([[7, 7, 7]], NEW).tokens == [cut]


@pytest.mark.parametrize("count", [0, 1, 2, 3])
@pytest.mark.parametrize("tree", TREES)
def test_commit_cuts_at_the_length_limit(tree, count):
    made = engine("self", tree).generate(PROMPTS, count)
    assert made.tokens == [row[:count] for row in expected("llama")]


def test_trace_has_no_round_of_a_finished_row():
    made = engine("model", "branching")
    eos = expected("llama")[0][2]
    made.eos = (eos,)
    trace = made.generate(PROMPTS, NEW).trace
    alive = [len(trace.steps(row)) for row in range(len(PROMPTS))]
    assert min(alive) < max(alive)
    for row in range(len(PROMPTS)):
        rounds = [any(s.row == row for s in r.steps) for r in trace.rounds]
        assert rounds == sorted(rounds, reverse=True)


@pytest.mark.parametrize("kind", ["model", "self"])
@pytest.mark.parametrize("tree", ["chain", "branching", "irregular"])
def test_caches_after_each_round_match_a_fresh_prefill(kind, tree):
    made = engine(kind, tree)
    shape = TREES[tree]
    seqs = Sequences.of(PROMPTS, NEW, slack=shape.room)
    seqs = made.begin(seqs)
    while seqs.live.any():
        made.round(seqs, shape)
        for lm, upto in ((made.target, 1), (made.drafter.lm, 2)):
            fresh = of_module(lm.module)
            with torch.inference_mode():
                fresh.allocate(*seqs.tokens.shape)
                fresh.prefill(seqs, 0, int(seqs.length.max()) - 1)
            for layer, again in zip(lm.cache.layers, fresh.cache.layers, strict=True):
                for row, length in enumerate(seqs.length.tolist()):
                    held = slice(0, length - upto)
                    for a, b in ((layer.keys, again.keys), (layer.values, again.values)):
                        same = torch.allclose(a[row, :, held], b[row, :, held], atol=1e-10, rtol=0)
                        assert same, (row, length)


@settings(max_examples=12)
@given(st.integers(0, 2**32 - 1))
def test_garbage_in_stale_slots_does_not_change_the_text(seed):
    """Random drafts, some right, and garbage written over every slot that may not be read."""
    rng = random.Random(seed)
    plain = expected("llama", 40)

    class Scripted(Plain):
        context = CONTEXT

        def propose(self, seqs, tree, _):
            drafted = []
            for row, length in enumerate(seqs.length.tolist()):
                at = length - len(PROMPTS[row])
                right = [plain[row][min(at + d - 1, 39)] for d in tree.depths[1:]]
                drafted.append([t if rng.random() < 0.8 else rng.randrange(V) for t in right])
            return seqs.draft(tree.nodes("cpu"), torch.tensor(drafted, dtype=torch.int64))

    made = engine()
    made = Engine.of(made, drafter=Scripted())
    tree = rng.choice(list(TREES.values()))
    seqs = Sequences.of(PROMPTS, NEW, slack=tree.room)
    seqs = made.begin(seqs)
    with torch.inference_mode():
        while seqs.live.any():
            stale = torch.arange(seqs.tokens.shape[1]) >= seqs.length[:, None] - 1
            for layer in made.target.cache.layers:
                for buffer in (layer.keys, layer.values):
                    buffer.masked_fill_(stale[:, None, :, None], 1e4)
            made.round(seqs, tree)
    for row, prompt in enumerate(PROMPTS):
        assert seqs.tokens[row, len(prompt) : seqs.length[row]].tolist() == plain[row][:NEW]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", ["self", "ngram"])
def test_text_may_fill_the_context(family, kind):
    prompt = PROMPTS[1]
    made = engine(kind, "chain", family=family).generate([prompt], CONTEXT - len(prompt))
    assert made.tokens == [slowly(module(family), prompt, CONTEXT - len(prompt))]


def test_prompt_beyond_the_context_is_refused():
    with pytest.raises(UserError, match=f"120 tokens and 20 new ones exceed the {CONTEXT}.* by 12"):
        engine().generate([[1] * 120], 20)


def test_shorter_draft_context_does_not_change_the_text(caplog):
    made = engine("self")
    made.drafter.context, made.drafter.name = 16, "a draft of sixteen tokens"
    found = made.generate(PROMPTS, NEW)
    assert found.tokens == expected("llama")
    drafted = [max(s.drafted for s in r.steps) for r in found.trace.rounds]
    assert drafted[0] == 4
    assert drafted[-1] == 0
    assert drafted == sorted(drafted, reverse=True)
    assert "a draft of sixteen tokens reads at most 16 tokens: nothing is drafted" in caplog.text


def test_drafter_whose_context_is_too_short_warns_once(caplog):
    made = engine("model")
    made.drafter.context, made.drafter.name = 8, "a draft model of few tokens"
    for _ in range(2):
        found = made.generate(PROMPTS, NEW)
    assert found.tokens == expected("llama")
    assert found.trace.acceptance.drafted == 0
    assert [line for line in caplog.messages if "few tokens" in line] == [
        "a draft model of few tokens reads at most 8 tokens: nothing is drafted in a batch with a "
        "text that long; use shorter prompts, fewer new tokens or another drafter"
    ]


def test_batch_drafts_while_its_longest_row_has_room():
    made = engine("model")
    made.drafter.context = 24
    lengths = {row: len(prompt) for row, prompt in enumerate(PROMPTS)}
    depths = []
    for made_round in made.generate(PROMPTS, NEW).trace.rounds:
        assert made_round.depth == max(0, min(4, 24 - max(lengths.values())))
        depths.append(made_round.depth)
        for step in made_round.steps:
            lengths[step.row] += step.emitted
            if step.done:
                del lengths[step.row]
    assert 0 in depths


def test_rows_that_are_done_decide_nothing():
    """Neither how much room the drafter has, nor what a policy takes for the load."""
    long, loads = [*range(1, 31)], []

    class Noting(Fixed):
        def choose(self, load):
            loads.append(load.rows)
            return super().choose(load)

    [[first]] = engine("null").generate([long], 1).tokens
    made = Engine.of(engine("model", eos=(first,)), policy=Noting(Tree.chain(4)))
    made.drafter.context = 28
    trace = made.generate([[7, 7, 7], long], 8).trace
    assert [made_round.depth for made_round in trace.rounds][:2] == [0, 4]
    assert loads[:2] == [2, 1]


def test_budgets_without_streams_are_refused_and_none_is_deeper_than_its_tree():
    class Budgets(Fixed):
        def choose(self, load):
            return Plan(self.tree, (1,) * load.rows)

    assert [Plan(Tree.chain(2), (3, 1, 0)).depth(row) for row in range(3)] == [2, 1, 0]
    made = Engine.of(engine("ngram"), policy=Budgets(Tree.chain(2)))
    with pytest.raises(UserError, match=r"Budgets planned budgets \(1,\): .* load.streams, 0 here"):
        made.generate([[1, 2]], 4)


@dataclass
class Last(Drafter):
    """The token that was likeliest after the last root. All that are made compare equal, and none
    has a hash."""

    def allocate(self, B, S):
        self.state = (torch.zeros(B, 1, dtype=torch.int64),)

    def propose(self, seqs, tree, rng):
        last = self.state[0][seqs.rows].expand(-1, len(tree) - 1)
        return seqs.draft(tree.nodes(seqs.device), last.clone())

    def observe(self, seqs, draft, verdict, seen):
        self.state[0][seqs.rows] = seen.logits[:, :1].argmax(-1)


@dataclass
class Own(Match):
    """The same as a rule."""


def test_drafters_and_rules_are_told_apart_by_identity():
    """And a drafter is allocated again once it was used with another target."""
    policy, plain = Fixed(Tree.chain(2)), [engine("null", dtype=torch.float32) for _ in range(2)]
    one, other = (Engine.of(x, drafter=drafter, rule=Own(), policy=policy)
                  for drafter in [Last()] for x in plain)  # fmt: skip
    wanted = plain[0].generate(PROMPTS, NEW).tokens
    assert one.generate(PROMPTS, NEW).tokens == wanted
    other.generate(PROMPTS[:1], NEW)
    assert one.generate(PROMPTS, NEW).tokens == wanted
    assert Engine.of(one, drafter=Last()).generate(PROMPTS, NEW).tokens == wanted


@pytest.mark.parametrize("prompts", [[], [[1], []]])
def test_generate_rejects_an_empty_prompt(prompts):
    with pytest.raises(UserError, match=r"empty|no prompts"):
        engine().generate(prompts, 4)


@pytest.mark.parametrize("streams", [[], [0], [0, 1, 2]])
def test_generate_needs_a_stream_for_every_prompt(streams):
    with pytest.raises(UserError, match=f"{len(streams)} streams for 2 prompts"):
        engine(temperature=0.9).generate([[1, 2], [3]], 4, streams=streams)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("culprit", ["target", "draft"])
def test_non_finite_logits_stop_the_run_and_name_the_model(culprit, value):
    law = Sampling()
    target = of_module(copy.deepcopy(module()), "target")
    draft = of_module(copy.deepcopy(draft_module()), "draft")
    broken = target if culprit == "target" else draft
    broken.module.model.embed_tokens.weight[31] = value
    made = Engine(target, DraftModel(draft, law), Fixed(Tree.chain(3)), law)
    with pytest.raises(NonFiniteLogits, match=rf"{culprit} .* row 2"):
        made.generate([[1, 2], [3, 31]], 4)
    assert made.generate([[1, 2, 3]], 1).tokens[0] != []


def test_padding_of_a_vocabulary_is_never_emitted():
    law = Sampling(2.0)
    target = of_module(module(), "target", vocab=20)
    draft = of_module(draft_module(), "draft", vocab=20)
    made = Engine(target, DraftModel(draft, law), Fixed(Tree.chain(3)), law, Reject())
    tokens = made.generate([[1, 2], [3]], 60).tokens
    assert max(map(max, tokens)) < 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_generate_fills_its_length_in_every_dtype(kind, dtype):
    made = engine(kind, "chain", dtype=dtype)
    found = made.generate(PROMPTS, NEW)
    assert [len(t) for t in found.tokens] == [NEW] * len(PROMPTS)
    found.trace.acceptance.check()


@pytest.mark.parametrize(
    ("kind", "rule", "tree", "temperature"), one_in(9, ((*c, t) for c in CASES for t in (0.0, 0.9)))
)
def test_round_reads_nothing_on_the_host(kind, rule, tree, temperature):
    made = engine(kind, tree, rule, temperature=temperature)
    seqs = Sequences.of(PROMPTS, NEW, slack=TREES[tree].room)
    seqs = made.begin(seqs)
    made.round(seqs, TREES[tree])
    with NoHostReads():
        made.round(seqs, TREES[tree])


def test_commit_with_many_eos_reads_nothing_on_the_host(monkeypatch):
    monkeypatch.setattr(ops, "fast", lambda: False)
    seqs = Sequences.of([[5, 6]], 8, slack=5, eos=range(3, 32))
    new = torch.tensor([[1, 2, 9, 1, 1]])
    verdict = Verdict(torch.arange(5)[None], torch.tensor([4]), new)
    with NoHostReads():
        counts = seqs.commit(verdict)
    assert counts.tolist() == [[4, 3, 0]]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.max().item(), lambda x: int(x[1]), lambda x: bool(x[1]), lambda x: [7, 8][x[1]],
        lambda x: x.nonzero(), lambda x: x[x > 0], lambda x: x.unique(), lambda x: x == x[[0, 2]],
        lambda x: x.masked_select(x > 0), lambda x: torch.equal(x, x), lambda x: torch.tensor(3),
        lambda x: x.index_put((x > 0,), x[0]), lambda x: torch.isin(x, x),
    ],
)  # fmt: skip
def test_no_host_reads_notices_every_kind_of_read(read, inference):
    with torch.inference_mode(inference):
        x = torch.arange(3) - 1 + 1
        with pytest.raises(AssertionError, match="inside a round"), NoHostReads():
            read(x)


@pytest.mark.parametrize("read", [torch.Tensor.tolist, torch.Tensor.numpy])
def test_no_host_reads_notices_reads_of_whole_tensors(read):
    with torch.inference_mode():
        x = torch.arange(3) + 1
        with pytest.raises(AssertionError, match="inside a round"), NoHostReads():
            read(x)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("kind", ["model", "ngram"])
def test_generate_matches_generation_of_transformers(kind, prompt):
    """N23: plain, assisted and prompt-lookup generation of transformers, batch 1, greedy."""
    net = module()
    ids = torch.tensor([prompt])
    common = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    extra = (
        {"assistant_model": draft_module()} if kind == "model" else {"prompt_lookup_num_tokens": 3}
    )
    plain = net.generate(ids, attention_mask=torch.ones_like(ids), **common)
    theirs = net.generate(ids, attention_mask=torch.ones_like(ids), **common, **extra)
    ours = engine(kind, "chain").generate([prompt], NEW).tokens[0]
    assert ours == plain[0, len(prompt) :].tolist() == theirs[0, len(prompt) :].tolist()
