"""Heads are trained on what drafting asks of them, and leave a folder that can be read."""

import copy
import dataclasses
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import one_in, tiny_llama
from support.definitions import block_hidden, law_after, selected
from support.tiny import V, heads, module

from specexp.errors import UserError
from specexp.models.heads import layouts
from specexp.models.heads.block import Block
from specexp.models.heads.weights import check
from specexp.zoo.heads import accuracy, loss_of, make, predictions_of, roots_of, train_heads
from specexp.zoo.recipes import HEADS, Course, Phase
from specexp.zoo.train import fit

KINDS = ["medusa", "eagle", "eagle3"]


def scaled(out):
    out.logits = out.logits * 3
    return out


def test_loss_is_least_at_the_heads_own_distribution():
    """`loss_of` is least where the heads say what the target says."""
    p = torch.rand(2, 5, 7).softmax(-1)

    def says(logits):
        return lambda batch: iter([(logits, p)])

    right = loss_of(says(p.log()), "cpu")(torch.zeros(1))
    wrong = loss_of(says(p.log() + torch.randn(2, 5, 7)), "cpu")(torch.zeros(1))
    assert right < wrong
    assert float(right) == pytest.approx(float(-(p * p.log()).sum(-1).mean()), abs=1e-3)
    assert accuracy(says(p.log()), torch.zeros(1), "cpu") == [1.0]


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_training_inputs_and_targets_match_drafting(kind):
    """Token `number` of a draft that leaves the text anywhere: the logits for it, and p."""
    net, target = heads(kind), module()
    drawn = torch.randint(0, V, (1, 14), generator=torch.Generator().manual_seed(1))
    text, drafter = drawn[0].tolist(), SimpleNamespace(heads=net, net=net)
    ids = net.draft_ids if kind == "eagle3" else torch.arange(V)
    for number, (logits, p) in enumerate(predictions_of(net, target)(drawn)):
        for start in (2, 6, 10):
            here, whole = start - 2, start + number
            drafted = law_after(kind, drafter, text[:start], text[start:whole])[ids]
            right = target(drawn[:, :whole], use_cache=False).logits[0, -1].softmax(-1)[ids]
            assert torch.allclose(logits[0, here].log_softmax(-1), drafted, atol=1e-9), (
                start,
                number,
            )
            assert torch.allclose(p[0, here].double(), right, atol=1e-6), (start, number)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["medusa", "eagle", "dflash"])
def test_heads_learn_what_the_target_says_though_it_scales_its_logits(kind):
    """Granite divides what its LM head returns, Cohere multiplies it, Gemma 2 caps it."""
    target = copy.deepcopy(module())
    own = target.forward
    target.forward = lambda *args, **kwargs: scaled(own(*args, **kwargs))
    drawn = torch.randint(0, V, (1, 14), generator=torch.Generator().manual_seed(1))
    said = target(drawn, use_cache=False).logits[0].softmax(-1).float()
    _, p, *_ = next(predictions_of(heads(kind), target)(drawn))
    rows = p.reshape(-1, V)
    off = (rows[:, None] - said[None]).abs().amax(-1).amin(1)  # of each from the nearest of them
    assert off.max() < 1e-6


@torch.no_grad()
@pytest.mark.parametrize(
    ("K", "own"),
    [(2, {}), (5, {}), (4, {"rank": 3}),
     (4, {"rank": 3, "candidates": 5, "kernel": 2, "group": 8, "draft_vocab": 0})],
)  # fmt: skip
def test_training_inputs_and_targets_of_blocks_match_drafting(K, own):
    """A block that begins at every root, all in one pass."""
    net, target, T = heads("dflash"), module(), 13
    shape = dataclasses.replace(net.shape, **{"block": K, "draft_vocab": V - 8} | own)
    own = Block(shape, *net.borrowed).to(net.dtype).eval()
    if shape.draft_vocab:
        own.d2t.fill_(3)
    for name, weight in own.named_parameters():
        if any(part in name for part in ("markov_w2", "conv", "selector")):
            torch.nn.init.normal_(weight)
    drawn = torch.randint(0, V, (2, T + 1), generator=torch.Generator().manual_seed(1))
    predictions = [*predictions_of(own, target)(drawn)]
    assert len(predictions) == K - 1
    p = target(drawn[:, :-1], use_cache=False).logits.softmax(-1)[..., own.draft_ids]
    roots = roots_of(T, K, drawn.device).tolist()
    assert roots[0] == 1
    for row, text in enumerate(drawn.tolist()):
        for at, root in enumerate(roots):
            states = block_hidden(own, text[: root + 1], K - 1)
            drafted = unary = own.draft_logits(states)
            before = text[root : root + K - 1]
            if shape.candidates:
                each = zip(unary, before, states, strict=True)
                drafted = torch.stack([selected(own.candidate_selector, *one) for one in each])
            elif shape.rank:
                drafted = drafted + own.markov_head(torch.tensor(before), states)
            for place, (logits, right, *also) in enumerate(predictions):
                assert torch.allclose(logits[row, at], drafted[place], atol=1e-9)
                for other in also:
                    assert torch.allclose(other[row, at], unary[place], atol=1e-9)
                assert torch.allclose(right[row, at].double(), p[row, root + place], atol=1e-6)


@pytest.mark.parametrize("kind", one_in(2, [*KINDS, *layouts.BLOCKS]))
def test_head_training_loss_falls(tmp_path, kind):
    target = tiny_llama(0).eval().requires_grad_(False)
    drawn = np.random.default_rng(0).integers(1, V, 5000)
    head = make(HEADS[kind].quick(), target, torch.from_numpy(np.bincount(drawn, minlength=V)))
    loss = loss_of(predictions_of(head, target), "cpu")
    course = Course((Phase(40, 4, 32),))
    losses = fit(kind, [course], {"noise": [drawn]}, tmp_path, head, loss, compiled=False)
    assert np.mean(losses[-5:]) < np.mean(losses[:5])


def test_train_heads_for_a_target_outside_the_zoo(tiny_folders, store, tmp_path):
    """The whole of training, and what it leaves."""
    folder = shutil.copytree(tiny_folders[0], tmp_path / "mine")
    text = tmp_path / "text.txt"
    text.write_text("def mean(values): return sum(values) / len(values)\n" * 400)
    for kind in [*KINDS, *layouts.BLOCKS]:
        seen = {}
        made = train_heads(kind, folder, quick=True, text=text, watch=seen.update)
        facts = json.loads((made / "zoo.json").read_text())
        assert facts["role"] == kind
        assert facts["target"] == "mine"
        assert facts["trained"]["corpus"] == {"file": "text.txt", "characters": 20_400}
        assert {"training/loss", "accuracy/at_1"} <= set(seen[max(seen)])
        check(layouts.read(made), module().config.__class__.from_pretrained(folder), "mine", kind)
    with pytest.raises(UserError, match="heads 'hydra' are unknown"):
        train_heads("hydra", folder)
