"""A block drafter with less work makes the states and logits of its module as it is."""

import copy
import logging
from dataclasses import replace

import pytest
import torch
from conftest import also, on_every_device
from support.fusing import (
    NEAR,
    bound,
    furthest,
    in_float64,
    of_its_own,
    through_kernels,
    uncompiled,
    where_kernels_run,
)
from support.tiny import PROMPTS, V, heads

from specexp.fast.cpu.passes import Native
from specexp.fast.fused import Fused
from specexp.fast.fused_block import FusedBlock
from specexp.models.heads import block as blocks
from specexp.models.heads.block import Block
from specexp.models.lm import LM
from specexp.sequences import Sequences

KINDS = {
    "DFlash": {"draft_vocab": 0},
    "causal": {"spans": ((0, True),) * 2},
    "DSpark": {"kind": "dspark", "rank": 4, "from_root": True},
    "whole vocabulary": {"draft_vocab": V},
    "DFlash 2": {"kind": "dflash2", "rank": 4, "candidates": 5, "kernel": 3, "group": 8,
                 "draft_vocab": 0},
}  # fmt: skip


def made(kind: str, dtype: torch.dtype, device: str = "cpu") -> Block:
    like = heads("dflash", torch.float32)
    plain = {"spans": ((0, False),) * 2, "draft_vocab": V - 8}
    block = Block(replace(like.shape, **plain | KINDS[kind]), *copy.deepcopy(like.borrowed))
    for name, weight in block.named_parameters():
        if "conv" in name:
            weight.data += torch.randn_like(weight) / 10
    if block.shape.draft_vocab == V - 8:
        block.d2t.fill_(3)
    return of_its_own(block, dtype, device)


def passed(block: Block, net, vocab: int = V) -> tuple[torch.Tensor, torch.Tensor]:
    """States and logits of a block after each row of a ragged batch."""
    lm = LM(block, "it", vocab, net)
    seqs = Sequences.of(PROMPTS, 4, slack=6, device=lm.device)
    B, S = seqs.tokens.shape
    lm.allocate(B, S)
    noise = torch.Generator().manual_seed(2)
    features = torch.randn(B, 9, 32, generator=noise).to(lm.device, lm.dtype)
    at = torch.arange(9, device=lm.device).expand(B, -1)
    lm.feed(seqs, at, at, at, None, last=0, features=features)
    slots = seqs.places(torch.arange(6, device=lm.device)[None])
    tokens = torch.where(slots == slots[:, :1], seqs.root, block.shape.mask)
    seen = lm.feed(seqs, tokens, slots, slots, None, (0,), last=5)
    known = seen.logits[..., 3 : V - 5]
    return seen.hidden, known


def off(kind: str, dtype: torch.dtype, device: str = "cpu") -> float:
    """By how much they differ from those of the module in float64, of their size."""
    block = made(kind, dtype, device)
    exact = in_float64(made(kind, dtype, device))
    return furthest(passed(block, blocks.network(block, "it", V)), passed(exact, exact))


@pytest.fixture
def plain(monkeypatch):
    uncompiled(monkeypatch)


@on_every_device
@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("kind", KINDS)
def test_fused_block_matches_the_module(plain, kind, dtype, device):
    assert isinstance(blocks.network(made(kind, dtype, device), "it", V).net, Fused)
    assert off(kind, dtype, device) < bound(dtype, device)


@where_kernels_run
@pytest.mark.parametrize("kind", ["DFlash 2", *also("DFlash", "causal", "DSpark")])
def test_block_through_kernels_matches_the_module(kind, device):
    """In which every token sees those after it, too."""
    with through_kernels(device):
        assert isinstance(blocks.network(made(kind, torch.float32, device), "it", V).net, Fused)
        assert off(kind, torch.float32, device) < bound(torch.float32, "cuda")


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "DFlash 2"])
def test_compiled_block_matches_the_module(kind, dtype):
    assert isinstance(blocks.network(made(kind, dtype), "it", V).net, Native)
    assert off(kind, dtype) < NEAR[dtype]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_outside_the_vocabulary_are_left_out(kind):
    block = made(kind, torch.float32)
    ours, exact = (passed(block, net, V - 8) for net in (blocks.network(block, "it", V - 8), block))
    assert ours[1].shape == exact[1].shape
    assert torch.allclose(ours[1], exact[1], atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"spans": ((6, False),) * 2}, "have windows"),
        ({"cap": 30.0}, "it scales embeddings or logits"),
    ],
)
def test_block_that_cannot_be_fused_is_run_as_it_is_and_logged(changes, said, caplog):
    block = made("DFlash", torch.float32)
    block.shape = replace(block.shape, **changes)
    with caplog.at_level(logging.WARNING, "specexp"):
        assert blocks.network(block, "mine", V) is block
    [line] = [r.getMessage() for r in caplog.records]
    assert line.startswith("mine: run by transformers, not fused, because ")
    assert said in line


def test_block_that_borrows_an_adapted_head_is_run_as_it_is(caplog):
    block = made("DFlash", torch.float32)
    block.borrowed[1].register_forward_hook(lambda m, args, out: out)
    assert blocks.network(block, "mine", V) is block
    assert "it has a hook on lm_head" in caplog.text


def test_block_that_differs_is_run_as_it_is(caplog):
    block = made("DFlash", torch.float32)
    block.rotary.inv_freq *= 1.5
    with caplog.at_level(logging.WARNING, "specexp"):
        assert not isinstance(blocks.network(block, "mine", V), FusedBlock)
    assert "differ by" in caplog.text
