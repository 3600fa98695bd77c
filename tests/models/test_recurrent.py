"""Models whose layers keep states no mask can take back: text is transformers' own all the same."""

import copy
import functools
from dataclasses import replace
from itertools import chain, product

import pytest
import torch
from conftest import one_in
from support.hybrids import CONFIGS
from support.tape import taped
from support.tiny import (
    NEW,
    PROMPTS,
    RULES,
    TREES,
    Alphabet,
    InTurn,
    NoHostReads,
    V,
    engine,
    module,
)
from transformers.models.mamba import modeling_mamba

from specexp import checked
from specexp.drafters.crossed import Crossed, TokenMap
from specexp.drafters.model import DraftModel
from specexp.engine import Engine
from specexp.errors import UserError
from specexp.models import recurrent, scans
from specexp.models.load import of_module
from specexp.models.recurrent import States
from specexp.models.scans import Scan, Walk, Window
from specexp.policy import Fixed
from specexp.sampling import Sampling
from specexp.sequences import Sequences
from specexp.serving.engine_rows import EngineRows
from specexp.serving.requests import Request
from specexp.serving.server import Server
from specexp.serving.sources import Source, serve
from specexp.tree import Tree

FAMILIES = sorted(set(CONFIGS) - {"recurrent_gemma"})
FEW = ["lfm2", "mamba", "qwen3_5"]
GREEDY = Sampling(0.0)
LONG = [[*range(30)], [3, 1, 2]]


@functools.cache
def expected(family: str, prompt: tuple[int, ...]) -> list[int]:
    """What transformers generates, with its own cache."""
    ids = torch.tensor([prompt])
    text = module(family).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return text[0, len(prompt) :].tolist()


def right(made: Engine, family: str, prompts=PROMPTS) -> bool:
    wanted = [expected(family, tuple(prompt)) for prompt in prompts]
    return made.generate(prompts, NEW).tokens == wanted


@pytest.mark.parametrize(
    ("kind", "tree"),
    [("null", "empty"), ("ngram", "chain"), ("ngram", "irregular"), ("self", "grown")],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_text_of_a_ragged_batch_is_that_of_transformers(family, kind, tree):
    assert right(engine(kind, tree, "match", family), family)


@pytest.mark.parametrize("family", ["granite4", "jamba", "lfm2", "qwen3_5"])
def test_text_in_float32_is_that_in_float64(family):
    """In which convolutions are torch's operations."""
    assert right(engine("self", "grown", "match", family, dtype=torch.float32), family)


@pytest.mark.parametrize(("rule", "tree"), [("match", "branching"), ("reject", "chain")])
@pytest.mark.parametrize("family", FEW)
def test_sampled_text_of_a_row_does_not_depend_on_its_batch(family, rule, tree):
    made = engine("self", tree, rule, family, temperature=0.9)
    together = made.generate(PROMPTS, NEW).tokens
    assert made.generate(PROMPTS[1:2], NEW, streams=[1]).tokens == together[1:2]
    if rule == "match":
        assert made.plain().generate(PROMPTS, NEW).tokens == together


@pytest.mark.parametrize("tree", ["chain", "branching", "grown"])
@pytest.mark.parametrize("family", FEW)
def test_attention_target_takes_a_draft_with_states(family, tree):
    draft = DraftModel(of_module(module(family), "draft"), GREEDY)
    made = Engine.of(engine("null", "chain", "match"), drafter=draft, policy=Fixed(TREES[tree]))
    assert right(made, "llama")


TURNS = [Tree.chain(3), Tree.chain(0), Tree.chain(0), Tree.branching(2, 2), Tree.chain(1)]


def itself(family: str, kind: str) -> Engine:
    """A target that is its own draft, so that whatever it drafts is accepted."""
    target = of_module(module(family), "target")
    draft = target.apart("draft")
    if kind == "crossed":
        drafter = Crossed(draft, TokenMap(Alphabet(0), Alphabet(0), V), GREEDY)
    else:
        drafter = DraftModel(draft, GREEDY)
    return Engine(target, drafter, Fixed(Tree.chain(3)), GREEDY, RULES["match"])


@pytest.mark.parametrize("kind", ["model", "crossed"])
@pytest.mark.parametrize("family", FEW)
def test_draft_catches_up_with_rounds_that_drafted_nothing(family, kind):
    """Were a state not of the text, drafts of the target itself would be rejected."""
    made = itself(family, kind)
    made.policy = InTurn(*TURNS)
    assert right(made, family)
    drafted = [(depth, step) for depth, step in made.policy.learned if step.drafted]
    assert drafted
    assert all(step.accepted == depth for depth, step in drafted)


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
@pytest.mark.parametrize("family", FEW)
def test_drafter_that_reads_hidden_states_takes_prompts_of_one_token(family, kind):
    assert right(engine(kind, "chain", "match", family), family, [[3], [1]])


@pytest.mark.parametrize("family", FEW)
def test_copy_of_a_draft_feeds_as_many_tokens_again(family):
    """Its states are kept for that many tokens, so its draft of itself is accepted whole."""
    made = itself(family, "model")
    copied = checked.copied(made.drafter, made.target, made.target)
    assert copied.lm is not made.drafter.lm
    steps = Engine.of(made, drafter=copied).generate(PROMPTS, NEW).trace.acceptance
    assert steps.accepted == steps.drafted > 0


def served_right(made: Engine, family: str) -> bool:
    """Whether requests that come and go have the text of transformers, and a draft that is the
    target itself is accepted whole."""
    policy, lengths = InTurn(*TURNS), [5, NEW, 9, 7, NEW, 4, NEW, 6, 3, NEW]
    todo = [
        Request(p, n, stream=n)
        for p, n in zip([*PROMPTS, *LONG, *PROMPTS[:3]], lengths, strict=True)
    ]
    rows = EngineRows(made, 3, 96, policy.widest)
    right = all(
        response.tokens == expected(family, tuple(response.request.prompt))[: response.request.new]
        for response in serve(Server(rows, policy, chunk=4), Source(todo, 3))
    )
    whole = all(step.accepted == depth for depth, step in policy.learned if step.drafted)
    return right and (whole or made.drafter.name != "itself")


@pytest.mark.parametrize(
    ("family", "kind"),
    one_in(2, product(FEW, ["ngram", "self", "early_exit", "planted", "crossed"])),
)
def test_served_text_is_that_of_transformers_while_rows_come_and_go(family, kind):
    made = itself(family, kind) if kind == "crossed" else engine(kind, "chain", "match", family)
    assert served_right(made, family)


@pytest.mark.parametrize("kind", ["ngram", "self"])
@pytest.mark.parametrize("family", FEW)
def test_prompt_read_in_pieces_leaves_the_same_states(family, kind, monkeypatch):
    monkeypatch.setattr(recurrent, "PREFILL", 7)
    assert right(engine(kind, "chain", "match", family), family, LONG)


@torch.inference_mode()
def test_rows_prefilled_again_have_the_states_of_the_new_text():
    one, other = itself("qwen3_5", "model"), itself("qwen3_5", "model")
    seqs = one.begin(Sequences.of([LONG[0][::-1]], NEW, slack=4))
    theirs = other.begin(Sequences.of([LONG[0]], NEW, slack=4))
    seqs.tokens.copy_(theirs.tokens)
    list(one.rows.prefill(seqs))
    ours, wanted = (made.drafter.lm.cache.states.of_row(0) for made in (one, other))
    assert all(map(torch.allclose, ours, wanted))


@pytest.mark.parametrize("tree", ["chain", "irregular", "grown"])
@pytest.mark.parametrize("family", FEW)
def test_round_over_states_reads_nothing_on_the_host(family, tree):
    made = engine("self", tree, "match", family)
    seqs = made.begin(Sequences.of(PROMPTS, NEW, slack=TREES[tree].room))
    made.round(seqs, TREES[tree])
    with NoHostReads():
        made.round(seqs, TREES[tree])


@pytest.mark.parametrize("family", FEW)
def test_replayed_rounds_are_the_rounds(family):
    one, other = (engine("self", "grown", "match", family, temperature=0.9) for _ in range(2))
    one = taped(one)
    assert one.generate(PROMPTS, NEW).tokens == other.generate(PROMPTS, NEW).tokens
    assert one.recorder.tape.replays
    assert served_right(taped(engine("self", "chain", "match", family)), family)


def test_states_outside_the_cache_are_refused_by_name():
    with pytest.raises(UserError, match=r"recurrent_gemma\) keeps its layers' states where"):
        of_module(module("recurrent_gemma"))


def sits_out(made: Engine, family: str) -> bool:
    """Whether a round leaves the states of a row alone that is not decoded in it."""
    seqs = made.begin(Sequences.of(PROMPTS, NEW, slack=TREES["grown"].room))
    budget = torch.tensor([4, -1, 4, 4, 0])
    caches = [made.target.cache, made.drafter.lm.cache]
    before = [[x.clone() for x in cache.states.of_row(1)] for cache in caches]
    made.round(replace(seqs, budget=budget), TREES["grown"])
    after = [cache.states.of_row(1) for cache in caches]
    return all(map(torch.equal, chain(*before), chain(*after)))


@pytest.mark.parametrize("family", FEW)
def test_row_that_sits_a_round_out_keeps_its_states(family):
    assert sits_out(engine("self", "grown", "match", family), family)


def of_another_node(self, rows, slots, tokens, visible, *rest):
    AIM(self, rows, slots, tokens, None, *rest)


def of_padding(self, rows, slots, tokens, visible, *rest):
    AIM(self, rows, slots, tokens.clamp(min=0), visible, *rest)


def not_rolled_back(self, rows, slots, tokens, visible, first, start=None):
    last = self.after[-1:]
    AIM(self, rows, slots, tokens, visible, first, start)
    if start is None and last.shape == self.before[:1].shape:
        self.before = torch.cat([last, self.before[1:]])


def of_what_was_rejected(self, place, slots, tokens):
    return FOLD(self, place, slots + 1, tokens)


AIM, FOLD = States.aim, Window.to_fold
FAULTS = {
    "of another node": (States, "aim", of_another_node, served_right),
    "of padding": (States, "aim", of_padding, sits_out),
    "not moved with its path": (States, "keep", lambda *_: None, served_right),
    "not moved with its row": (States, "copy", lambda *_: None, served_right),
}
CASES = [
    *((family, *fault) for fault in FAULTS.values() for family in ("qwen3_5", "mamba")),
    ("mamba", States, "aim", not_rolled_back, served_right),
    ("qwen3_5", Window, "to_fold", of_what_was_rejected, served_right),
]


@pytest.mark.parametrize(("family", "owner", "method", "wrong", "check"), CASES)
def test_wrong_state_is_noticed(family, owner, method, wrong, check, monkeypatch):
    made = engine("self", "grown", "match", family)
    monkeypatch.setattr(owner, method, wrong)
    assert not check(made, family)


@pytest.mark.parametrize("family", FAMILIES)
def test_recurrences_with_one_decay_a_key_run_all_nodes_at_once(family):
    """In Mamba 1 each number of a state decays by itself."""
    parts = of_module(module(family)).net.parts
    assert {part.scanned for part in parts} == {family not in ("jamba", "mamba")}
    assert {part.walked for part in parts} == {family in ("jamba", "mamba")}


@pytest.mark.parametrize(
    ("family", "at_once", "method"),
    [
        ("qwen3_5", Scan, "delta_rule"),
        ("mamba", Walk, "recurrence"),
        ("jamba", Walk, "convolution"),
    ],
)
def test_recurrence_that_is_not_the_librarys_runs_node_by_node(
    monkeypatch, family, at_once, method
):
    true = getattr(at_once, method)
    monkeypatch.setattr(
        at_once, method, lambda self, x, k, *rest, **named: true(self, x, -k, *rest, **named)
    )
    net = copy.deepcopy(module(family))
    parts = of_module(net).net.parts
    assert not any(part.scanned or part.walked for part in parts)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_convolution_of_one_token_is_the_library_s(dtype):
    drawn = torch.Generator().manual_seed(0)
    x, kept, weight, bias = (
        torch.randn(size, generator=drawn).to(dtype)
        for size in ((2, 6, 1), (2, 6, 4), (6, 4), (6,))
    )
    ours, theirs = kept.clone(), kept.clone()
    for with_bias in (bias, None):
        y = scans.one_convolution(x, ours, weight, with_bias, "silu")
        wanted = modeling_mamba.causal_conv1d_update(
            x, theirs, weight, with_bias, activation="silu"
        )
        torch.testing.assert_close(y, wanted)
        assert torch.equal(ours, theirs)
