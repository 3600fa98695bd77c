"""Parity with transformers' own forward, and the memory of a cache."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from conftest import tiny_llama
from support import architectures
from support.tiny import FAMILIES, PROMPTS, module, slowly

from specexp.drafters.model import DraftModel
from specexp.engine import Engine
from specexp.errors import UserError
from specexp.models import lm as lms
from specexp.models import memory
from specexp.models.cache import SlotCache
from specexp.models.lm import LM
from specexp.models.load import of_module
from specexp.policy import Fixed
from specexp.sampling import Sampling
from specexp.sequences import Sequences
from specexp.tree import Branches, Tree

TREE = Tree((-1, 0, 0, 1, 1, 2, 3, 5))


def filled(target: LM, seqs: Sequences, taps: tuple[int, ...] = ()):
    target.allocate(*seqs.tokens.shape)
    return target.prefill(seqs, 0, int(seqs.length.max()) - 1, taps)


@pytest.mark.parametrize("family", FAMILIES)
def test_tree_logits_match_each_path_alone_in_a_ragged_batch(family):
    net = module(family)
    target = of_module(net)
    seqs = Sequences.of(PROMPTS, 4, slack=len(TREE))
    drafted = torch.randint(0, 32, (len(PROMPTS), len(TREE) - 1), generator=torch.manual_seed(1))
    filled(target, seqs)
    seen = target.verify(seqs, seqs.draft(TREE.nodes("cpu"), drafted), taps=(0, 1))
    assert seen.hidden.shape == (len(PROMPTS), len(TREE), 2 * 32)
    for row, prompt in enumerate(PROMPTS):
        for node in range(len(TREE)):
            path, at = [], node
            while at > 0:
                path.insert(0, int(drafted[row, at - 1]))
                at = TREE.parents[at]
            with torch.no_grad():
                alone = net(torch.tensor([prompt + path]), use_cache=False).logits[0, -1]
            assert torch.allclose(seen.logits[row, node], alone, atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", ["gemma3_text", "bloom", "mamba2"])
def test_linear_layers_are_operations_on_the_weights_of_an_unchanged_module(name):
    net = architectures.build(name)
    before = {at: type(part) for at, part in net.named_modules()}
    run = of_module(net).net.module
    linear = [part for part in run.modules() if isinstance(part, torch.nn.Linear)]
    assert {type(part) for part in linear} == {lms.Linear}
    assert {id(part.weight) for part in linear} <= {id(w) for w in net.parameters()}
    assert {at: type(part) for at, part in net.named_modules()} == before


class Kept(torch.nn.Module):
    """A linear layer of a library's own that has no copy."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.weight, self.lock = linear.weight, threading.Lock()

    def forward(self, x):
        return x @ self.weight.T


def test_layer_that_has_no_copy_is_run_as_it_is():
    net = copy.deepcopy(module("gemma"))
    mlp = net.model.layers[0].mlp
    mlp.down_proj = own = Kept(mlp.down_proj)
    run = of_module(net).net.module
    assert run.model.layers[0].mlp.down_proj is own
    assert type(run.model.layers[0].mlp.up_proj) is lms.Linear


@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon, ALiBi"])
def test_alibi_by_slot_is_noticed(name, monkeypatch):
    monkeypatch.setattr(lms, "bias_by_position", lambda module: None)
    with pytest.raises(UserError, match="over a tree"):
        of_module(architectures.build(name))


@pytest.mark.parametrize("name", ["bart", "mvp", "gpt_neo"])
def test_module_that_counts_by_itself_is_left_as_it_is(name):
    net = architectures.build(name)
    before = {at: type(part) for at, part in net.named_modules()}
    buffers = {at: id(buffer) for at, buffer in net.named_buffers()}
    of_module(net)
    assert {at: type(part) for at, part in net.named_modules()} == before
    assert {at: id(buffer) for at, buffer in net.named_buffers()} == buffers
    assert not any(p._forward_pre_hooks or p._forward_hooks for p in net.modules())


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [9.0] * 4,
        "short_factor": [1.0] * 4}  # fmt: skip


@pytest.mark.parametrize("alone", [True, False])
def test_longrope_text_is_limited_to_the_short_factors(alone):
    net = tiny_llama(0, rope_parameters=LONG | {"original_max_position_embeddings": 16}).double()
    prompts = PROMPTS[1:2] if alone else [PROMPTS[0], [*range(14)]]
    law = Sampling(0.0)
    greedy = Engine(of_module(net), DraftModel(of_module(net), law), Fixed(Tree.chain(5)), law)
    new = 16 - max(map(len, prompts))
    assert greedy.generate(prompts, new).tokens == [slowly(net, p, new) for p in prompts]
    said = r"the 16-token context \(original_max_position_embeddings in its config\) of model by 1"
    with pytest.raises(UserError, match=said):
        greedy.generate(prompts, new + 1)


def test_prefill_in_pieces_matches_one_pass(monkeypatch):
    target = of_module(module())
    prompts = [list(range(30)), [3, 1, 2]]
    whole = Sequences.of(prompts, 4, slack=1)
    filled(target, whole)
    keys = target.cache.layers[1].keys.clone()
    monkeypatch.setattr(lms, "PREFILL", 7)
    states = filled(target, whole, taps=(2,))
    assert torch.allclose(target.cache.layers[1].keys, keys, atol=1e-12)
    assert states.shape == (2, 29, 32)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_allocate_frees_the_old_cache_before_counting(family, monkeypatch):
    target, there = of_module(module(family)), []
    filled(target, Sequences.of([[1, 2, 3]], 5, slack=2))
    old = weakref.ref(target.cache)
    monkeypatch.setattr(memory, "free_memory", lambda device: there.append(old()) or 2**40)
    gc.disable()
    try:
        target.allocate(1, 20)
    finally:
        gc.enable()
    assert there == [None]


def test_positions_of_slots_follow_from_what_a_pass_sees():
    """Of two rows, in a pass over a tree and in one over lines of a text."""
    roots, slots = torch.tensor([[5], [0]]), torch.arange(len(TREE))
    cache, nodes = SlotCache(1, 2, 16), TREE.nodes(torch.device("cpu"))
    expected = torch.arange(16).repeat(2, 1) * (torch.arange(16) < roots)
    expected.scatter_(1, roots + slots, roots + nodes.depth)
    cache.aim(slice(0, 2), roots + slots, 16, visible=Branches(roots, nodes.ancestors))
    assert torch.equal(cache.layers[0].indexer_position_ids, expected.expand(3, -1, -1))
    last = roots + len(TREE) - 1
    cache.aim(slice(0, 2), roots + slots, 16)
    expected = torch.arange(16).repeat(2, 1) * (torch.arange(16) <= last)
    assert torch.equal(cache.layers[0].indexer_position_ids, expected.expand(3, -1, -1))
