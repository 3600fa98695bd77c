"""What drafters with a network of their own propose, against definitions without any cache."""

import copy
import dataclasses
import functools
import itertools

import pytest
import torch
from conftest import in_turn, tiny_tokenizer
from support.definitions import (
    block_says,
    eagle_says,
    law_after,
    likeliest,
    medusa_says,
    mtp_says,
    parallel_says,
    peagle_says,
)
from support.tiny import PROMPTS, Alphabet, V, engine, heads, module
from tokenizers.processors import TemplateProcessing

import specexp
from specexp.drafters.crossed import Crossed, TokenMap
from specexp.drafters.eagle import EagleLayer
from specexp.drafters.early_exit import EarlyExit
from specexp.drafters.model import of_model
from specexp.drafters.planted import Planted
from specexp.engine import Engine
from specexp.errors import UserError
from specexp.models.heads.eagle import Eagle, layer_config
from specexp.models.heads.layouts import BLOCKS
from specexp.models.load import of_module
from specexp.sampling import Sampling
from specexp.sequences import Sequences
from specexp.tree import Tree

KINDS = ["medusa", "eagle", "eagle3"]
MTP = pytest.param("mtp", marks=pytest.mark.mtp)


@pytest.mark.parametrize("kind", [*KINDS, "peagle", MTP, *BLOCKS, "parallel"])
def test_draft_tokens_match_the_definition_every_round(kind):
    """Ragged rows, accepted runs of every length; some draft tokens are accepted by luck alone, so
    the text is steered: what the drafter proposes is accepted as often as the toss of a coin
    says."""
    made = engine(kind, Tree.chain(3), "match", temperature=3.0, seed=2)
    made.drafter.sampling = Sampling()
    definitions = {"medusa": medusa_says, "peagle": peagle_says, "mtp": mtp_says}
    definitions |= {"parallel": parallel_says} | dict.fromkeys(BLOCKS, block_says)
    says = definitions.get(kind, eagle_says)
    nets = {"medusa": "heads", "parallel": "lm"}
    net = getattr(made.drafter, nets.get(kind, "net"))
    net = net.module if kind == "parallel" else net
    prompts = [p for p in PROMPTS if len(p) > 1 or kind == "parallel"]
    seqs = Sequences.of(prompts, 30, slack=4)
    seqs = made.begin(seqs)
    kept = set()
    for _ in range(12):
        texts = [row[:n] for row, n in zip(seqs.tokens.tolist(), seqs.length.tolist(), strict=True)]
        report = made.round(seqs, Tree.chain(3))
        kept |= set(report[:, 0].tolist())
        for text, row in zip(texts, report.tolist(), strict=True):
            if row[1]:
                assert row[-3:] == says(net, text, 3)
    assert len(kept) >= 2, "accepted and rejected draft tokens, or caches were not exercised"


@pytest.mark.parametrize("family", ["gemma3", "mamba"])
def test_a_model_that_cannot_read_a_token_twice_does_not_draft_in_parallel(family):
    draft = of_module(copy.deepcopy(module(family)), "mine")
    draft.config.pard_token = 1
    with pytest.raises(UserError, match=r"mine cannot draft in parallel .* has states or windows"):
        of_model(draft, Sampling())


@pytest.mark.parametrize("mask", [-1, V])
def test_a_mask_outside_the_vocabulary_is_refused(mask):
    draft = of_module(copy.deepcopy(module()), "mine")
    draft.config.pard_token = mask
    with pytest.raises(UserError, match=f"its pard_token is {mask}, and its vocabulary has {V}"):
        of_model(draft, Sampling())


@pytest.mark.parametrize(
    ("kind", "shape"),
    in_turn(["medusa", "eagle", "eagle3", "early_exit", "model"], [(9, 3), (5, 4), (12, 2)]),
    ids=str,
)
def test_grown_tree_matches_the_definition_every_round(kind, shape):
    tree = Tree.grown(*shape)
    made = engine(kind, tree)
    prompts = [p for p in PROMPTS if len(p) > 1]
    seqs = Sequences.of(prompts, 20, slack=tree.room)
    seqs = made.begin(seqs)
    drafts = []
    propose = made.drafter.propose
    made.drafter.propose = lambda *given: drafts.append(propose(*given)) or drafts[-1]
    for _ in range(3):
        texts = [row[:n] for row, n in zip(seqs.tokens.tolist(), seqs.length.tolist(), strict=True)]
        made.round(seqs, tree)
        nodes, tokens = drafts[-1].nodes, drafts[-1].tokens
        for row, text in enumerate(texts):
            ways = [nodes.ancestors[row, i].nonzero()[1:, 0] for i in range(1, len(tree))]
            paths = [tuple(tokens[row, way].tolist()) for way in ways]
            says = functools.partial(law_after, kind, made.drafter, text)
            assert set(paths) == likeliest(says, *shape, tree.width)


def test_early_exit_after_all_layers_is_the_target():
    for temperature in (0.0, 0.9):
        made = engine("null", Tree.chain(4), "reject", temperature=temperature)
        made = Engine.of(made, drafter=EarlyExit(made.target, 2, made.sampling))
        for step in made.generate(PROMPTS, 20).trace.steps():
            assert step.accepted == step.drafted == 4


def test_planted_acceptance_rate_is_the_one_asked_for():
    for temperature in (0.0, 1.0):
        for alpha in (0.0, 0.6, 1.0):
            made = engine("model", Tree.chain(4), "match", temperature=temperature)
            made = Engine.of(
                made, drafter=Planted(alpha, made.target, made.drafter, made.sampling, made.seed, 4)
            )
            trace = made.generate(PROMPTS * (12 if alpha == 0.6 else 1), 40).trace
            tried = [(s.accepted, s.drafted) for s in trace.steps()]
            flips = sum(min(a + 1, d) for a, d in tried)
            rate = sum(a for a, _ in tried) / flips
            assert rate == pytest.approx(
                alpha, abs=5 * (0.25 / flips) ** 0.5 if alpha == 0.6 else 0
            )
            assert made.generate(PROMPTS, 20).tokens == made.plain().generate(PROMPTS, 20).tokens


@pytest.mark.parametrize("tree", [Tree.chain(3), Tree.branching(2, 1, 1)], ids=str)
def test_crossed_twin_with_shifted_vocabulary_is_accepted(tree):
    """The same network with its vocabulary shifted: only a broken translation, or a cache without
    the accepted path, could differ."""
    shifted = copy.deepcopy(module())
    for weight in (shifted.model.embed_tokens.weight, shifted.lm_head.weight):
        weight.data = weight.data.roll(5, 0)
    whole = Alphabet(5)
    whole.get_vocab = lambda: {chr(65 + i): (i + 5) % V for i in range(V)}
    for temperature in (0.0, 0.9):
        made = engine("null", tree, "reject", temperature=temperature)
        draft = of_module(shifted, "shifted")
        made = Engine.of(
            made, drafter=Crossed(draft, TokenMap(Alphabet(0), whole, V), made.sampling)
        )
        for step in made.generate(PROMPTS, 24).trace.steps():
            assert (step.accepted, step.drafted) == (3, len(tree) - 1)


def test_crossed_never_drafts_a_token_the_draft_lacks():
    made = engine("crossed", Tree.chain(3), "reject", temperature=1.5)
    trace = made.generate(PROMPTS * 4, 40).trace
    drafted = [g for s in trace.steps() for g in s.draft]
    assert max(drafted) < V - 6
    assert any(t >= V - 6 for row in made.generate(PROMPTS * 4, 40).tokens for t in row)
    text = made.drafter.texts
    for row in range(3):
        told = made.drafter.token_map.tokenized_prompt(PROMPTS[row])
        assert text.tokens[row, : len(told)].tolist() == told


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_eagle_drafts_past_the_context_of_its_config(kind, dtype):
    whole = heads(kind, dtype)
    layer = layer_config(whole.config.to_dict() | {"max_position_embeddings": 8})
    short = Eagle(dataclasses.replace(whole.shape, layer=layer), *whole.borrowed)
    short.load_state_dict(whole.state_dict())
    texts = []
    for net in (whole, short.to(dtype)):
        made = engine("null", Tree.chain(3), dtype=dtype)
        made = Engine.of(made, drafter=EagleLayer(net, made.target, made.sampling))
        texts.append([r.steps for r in made.generate(PROMPTS, 24).trace.rounds])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_eagle_draft_of_one_token_prompt_reads_no_stale_state(kind):
    drafted = []
    for left, others in ((3, []), (9, []), (0, [[1, 2, 3]])):
        made = engine(kind, Tree.chain(3))
        seqs = Sequences.of([[5], *others], 8, slack=4)
        seqs.tokens[0, 1:] = left
        seqs = made.begin(seqs)
        drafted.append(made.drafter.propose(seqs, Tree.chain(3), made.rng).tokens[0].tolist())
    assert drafted[0] == drafted[1] == drafted[2]


@torch.inference_mode()
def test_crossed_catch_up_in_parts_matches_one_call():
    """Every letter of it takes the draft two pieces."""
    prompt = [26 + i % 6 for i in range(24)]
    texts, caches = [], []
    for parts in ([23], [4, 9, 23]):
        made = engine("crossed", Tree.chain(3))
        made.rows.allocate(1, 64)
        seqs = Sequences.of([prompt], 8, slack=4)
        made.drafter.most = 4  # as after rounds of others
        made.drafter.prefill(seqs, None)
        for start, stop in itertools.pairwise([0, *parts]):
            part = dataclasses.replace(seqs, length=torch.tensor([stop + 1]))
            made.drafter.catch_up(part, stop - start)
        made.drafter.propose(seqs, Tree.chain(3), made.rng)
        text = made.drafter.texts
        texts.append(text.tokens[0, : text.length[0]].tolist())
        caches.append(made.drafter.lm.cache.layers[0].keys[0, :, :47])
    assert texts[0] == texts[1] == [1, 2] * 24
    assert torch.allclose(*caches, atol=1e-12)


def test_crossed_prompt_gets_the_drafts_special_tokens():
    ours, theirs = tiny_tokenizer("a mean of values"), tiny_tokenizer("values of a mean")
    theirs.add_special_tokens({"bos_token": "<s>"})
    theirs.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", theirs.bos_token_id)]
    )
    token_map = TokenMap(ours, theirs, len(ours))
    prompt = [ours.bos_token_id, *ours("a mean").input_ids]
    assert token_map.tokenized_prompt(prompt) == theirs("a mean").input_ids
    assert theirs.bos_token_id not in token_map.tokenized(prompt)


@pytest.mark.parametrize("shape", [(9, 1), (9, 3)], ids=str)
def test_grown_tree_children_and_parents_agree(shape):
    made = engine("model", tree := Tree.grown(*shape))
    seqs = made.begin(Sequences.of(PROMPTS, 8, slack=tree.room))
    nodes = made.drafter.propose(seqs, tree, made.rng).nodes
    for parents, children in zip(nodes.parents.tolist(), nodes.children.tolist(), strict=True):
        listed = {(child, up) for up, row in enumerate(children) for child in row if child >= 0}
        assert listed == set(enumerate(parents)) - {(0, 0)}


def test_variants_of_a_crossed_pairing_share_its_map():
    pair = specexp.load("target-10m", "crossed:sibling-3m", 2)
    variant = pair.with_(temperature=0.8)
    assert variant.engine.drafter.token_map is pair.engine.drafter.token_map
