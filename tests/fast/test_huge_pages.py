"""Weights in large pages: where they lie changes, and nothing else."""

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from specexp.fast import fused, huge_pages

SHAPE = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 4096,
    "num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True,
}  # fmt: skip


def model(**shape) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE | shape)).eval()


def storages(module: nn.Module) -> set[int]:
    return {p.untyped_storage().data_ptr() for p in module.parameters()}


@pytest.mark.parametrize("tied", [True, False])
@torch.inference_mode()
def test_placed_weights_and_logits_are_unchanged(tied):
    moved = model(tie_word_embeddings=tied)
    still, tokens = copy.deepcopy(moved), torch.arange(20)[None] * 7 % 4096
    huge_pages.place_weights(moved)
    assert len(storages(moved)) == 1 < len(storages(still))
    for a, b in zip(moved.parameters(), still.parameters(), strict=True):
        assert torch.equal(a, b)
    assert (moved.lm_head.weight is moved.model.embed_tokens.weight) is tied
    assert torch.equal(moved(input_ids=tokens).logits, still(input_ids=tokens).logits)


def test_placed_matrices_are_joined_without_a_copy():
    module = model()
    huge_pages.place_weights(module)
    before = storages(module)
    attn = module.model.layers[0].self_attn
    whole, bias = fused.joined([attn.q_proj, attn.k_proj, attn.v_proj])
    assert whole.data_ptr() == attn.q_proj.weight.data_ptr()
    assert bias.data_ptr() == attn.q_proj.bias.data_ptr()
    assert storages(module) <= before | {bias.untyped_storage().data_ptr()}


def test_module_smaller_than_a_page_is_not_moved():
    module = model(vocab_size=64)
    before = storages(module)
    huge_pages.place_weights(module)
    assert storages(module) == before


def test_module_that_memory_does_not_hold_twice_is_not_moved(monkeypatch):
    def full(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    module = model()
    before = storages(module)
    monkeypatch.setattr(huge_pages.mmap, "mmap", full)
    huge_pages.place_weights(module)
    assert storages(module) == before


def test_system_without_huge_pages_moves_nothing(monkeypatch):
    module = model()
    before = storages(module)
    monkeypatch.delattr(huge_pages.mmap, "MADV_HUGEPAGE")
    huge_pages.place_weights(module)
    assert storages(module) == before
