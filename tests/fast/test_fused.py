"""A pass with less work gives what transformers gives, from the same weights, held once."""

import copy
import logging
from itertools import product
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.nn.functional as F
from conftest import on_every_device, one_in, tiny_llama
from support.tiny import DRAFTERS, NEW, PROMPTS, TREES, engine, expected, module
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import specexp
from specexp import ops
from specexp.engine import Engine
from specexp.errors import UserError
from specexp.fast import fused
from specexp.fast.cpu.passes import Native
from specexp.fast.fused import Fused, fastest_agreeing
from specexp.models.lm import LM, Unfused, shorten_head
from specexp.models.load import of_module
from specexp.models.servable import cache_name
from specexp.sequences import Sequences
from specexp.tree import Branches, Tree

SHAPE = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.4,
    "max_position_embeddings": 128,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
        "original_max_position_embeddings": 32}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32,
        "long_factor": [9.0] * 4, "short_factor": [1.0, 1.1, 1.2, 1.3]}  # fmt: skip


def shortened(model):
    shorten_head(model)
    return model


NETS = {
    "llama": lambda: tiny_llama(0),
    "tied": lambda: tiny_llama(0, tie_word_embeddings=True),
    "a short head": lambda: shortened(tiny_llama(0, tie_word_embeddings=True, draft_ids=SOME)),
    "a head each": lambda: tiny_llama(0, num_key_value_heads=4),
    "one key": lambda: tiny_llama(0, num_key_value_heads=1, head_dim=16),
    "biased": lambda: tiny_llama(0, attention_bias=True, mlp_bias=True),
    "yarn": lambda: tiny_llama(0, rope_parameters=YARN),
    "dynamic": lambda: tiny_llama(0, rope_parameters=DYNAMIC),
    "longrope": lambda: tiny_llama(0, rope_parameters=LONG),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)),
    "windows": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=len(TREE))),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8)),
}
SOME = [0, 3, 4, 7, 11, 12, 18, 25, 30]
TREE = Tree((-1, 0, 0, 1, 1, 2, 3, 5))


@pytest.fixture(autouse=True)
def _as_they_are(monkeypatch):
    """In transformers norms are rounded to float32 whatever the model is: in float64 that is all
    the difference there is. What is compiled has its own tests."""
    monkeypatch.setenv("SPECEXP_NATIVE", "off")
    monkeypatch.setitem(fused.ROUNDING, torch.float64, 1e-5)
    monkeypatch.setattr(fused, "_FUSED", WeakKeyDictionary())


def made(name: str, dtype: torch.dtype = torch.float64):
    torch.manual_seed(0)
    net = NETS[name]().to(dtype).eval()
    for parameter in net.parameters():  # biases and norms begin as zeros and ones
        parameter.data += 0.1 * torch.randn_like(parameter)
    return net


def unfused(net) -> LM:
    lm = of_module(net, "as it is")
    lm.net = Unfused(net, kept=cache_name(net))
    return lm


def passed(lm: LM, taps: tuple[int, ...]):
    """States of the prompts, and what verifying a draft tree sees, over a ragged batch."""
    seqs = Sequences.of(PROMPTS, 4, slack=len(TREE), device=lm.device)
    drafted = torch.randint(0, 32, (len(PROMPTS), len(TREE) - 1), generator=torch.manual_seed(1))
    lm.allocate(*seqs.tokens.shape)
    states = lm.prefill(seqs, 0, int(seqs.length.max()) - 1, taps)
    draft = seqs.draft(TREE.nodes(lm.device), drafted.to(lm.device))
    if states is not None:  # for padding they are unspecified
        place = torch.arange(states.shape[1], device=lm.device)
        states = states[place < seqs.length[:, None] - 1]
    return states, lm.verify(seqs, draft, taps)


@on_every_device
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NETS)
def test_fused_pass_matches_transformers(name, dtype, device):
    net = made(name, dtype).to(device)
    taps = (0, 1, net.config.num_hidden_layers)
    lm, plain = of_module(net), unfused(net)
    assert isinstance(lm.net, Fused)
    (states, seen), (wanted_states, wanted) = passed(lm, taps), passed(plain, taps)
    pairs = ((states, wanted_states), (seen.hidden, wanted.hidden), (seen.logits, wanted.logits))
    for ours, theirs in pairs:
        assert ours.dtype == theirs.dtype == dtype
        assert ours.shape == theirs.shape
        here = theirs.isfinite()
        assert torch.equal(here, ours.isfinite())
        off = (ours - theirs)[here].float().norm() / theirs[here].float().norm()
        assert off <= fused.ROUNDING[dtype]
    assert passed(lm, ())[0] is None


def token_major(*args, **options):
    """Attention [B, H, n, d] in the memory order [B, n, H, d], which a kernel of CUDA returns."""
    heads = CPU_ATTENTION(*args, **options)
    return heads.transpose(1, 2).contiguous().transpose(1, 2)


CPU_ATTENTION = F.scaled_dot_product_attention


def test_fused_pass_depends_on_the_strides_of_attention(monkeypatch):
    monkeypatch.setattr(F, "scaled_dot_product_attention", token_major)
    assert isinstance(of_module(made("llama")).net, Fused)


@pytest.mark.parametrize(("kind", "tree"), one_in(4, product(DRAFTERS, TREES)))
def test_fused_text_matches_transformers_for_every_drafter(kind, tree):
    greedy = engine(kind, tree, "match")
    assert isinstance(greedy.target.net, Fused)
    assert greedy.generate(PROMPTS, NEW).tokens == expected("llama")
    drawn = engine(kind, tree, "match", temperature=0.9, seed=5)
    plain = drawn.plain()
    plain = Engine.of(plain, target=unfused(plain.target.module))
    assert drawn.generate(PROMPTS, NEW).tokens == plain.generate(PROMPTS, NEW).tokens


def test_last_logits_match_full_logits():
    for lm in (of_module(made("llama")), unfused(made("llama"))):
        seqs = Sequences.of(PROMPTS, 4, slack=1)
        lm.allocate(*seqs.tokens.shape)
        slots = torch.arange(4).expand(len(PROMPTS), 4)
        visible = Branches(slots[:, :1], torch.ones(1, 4, 4, dtype=torch.bool).tril())
        asked = (seqs, seqs.tokens[:, :4], slots, slots, visible)
        whole = lm.feed(*asked).logits
        for last in (1, 3):
            assert torch.allclose(lm.feed(*asked, last=last).logits, whole[:, -last:], atol=1e-12)


def storages(net) -> int:
    held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in net.parameters()}
    return sum(held.values())


@pytest.mark.parametrize("name", ["llama", "tied", "biased", "qwen3"])
def test_fusing_keeps_module_and_storage(name):
    net, ids = made(name), torch.tensor([PROMPTS[0]])
    weights = {k: v.clone() for k, v in net.state_dict().items()}
    with torch.no_grad():
        before, held = net(ids).logits, storages(net)
        of_module(net)
        assert torch.equal(net(ids).logits, before)
    assert storages(net) == held
    assert all(torch.equal(v, weights[k]) for k, v in net.state_dict().items())


def test_fused_module_is_saved_and_loaded_whole(tmp_path):
    net = made("llama", torch.float32)
    of_module(net)
    net.save_pretrained(tmp_path)
    again = type(net).from_pretrained(tmp_path)
    assert all(torch.equal(v, net.state_dict()[k]) for k, v in again.state_dict().items())


def test_weights_that_change_in_place_change_the_passes():
    net = made("llama")
    lm = of_module(net)
    before = passed(lm, ())[1].logits
    with torch.no_grad():
        net.model.layers[1].self_attn.k_proj.weight *= 1.5
    after = passed(lm, ())[1].logits
    assert not torch.allclose(after, before)
    assert torch.allclose(after, passed(unfused(net), ())[1].logits, atol=1e-5)


def test_early_exit_of_a_fused_module_shares_its_weights():
    from specexp.drafters.early_exit import first_layers

    net = made("llama")
    whole, cut = of_module(net), of_module(first_layers(net, 1))
    assert isinstance(cut.net, Fused)
    assert cut.net.layers[0].qkv.data_ptr() == whole.net.layers[0].qkv.data_ptr()
    assert cut.net.layers[0].up.data_ptr() == whole.net.layers[0].up.data_ptr()


def test_module_is_fused_once():
    net = made("llama")
    assert of_module(net).net is of_module(net).net


def gelu(net):
    net.model.layers[1].mlp.act_fn = torch.nn.GELU()


def rotated(net):
    net.model.rotary_emb.inv_freq *= 1.5


def scaled(net):
    net.model.layers[0].self_attn.o_proj.register_forward_hook(lambda m, i, out: 1.001 * out)


def replaced(net):
    mlp = net.model.layers[0].mlp
    mlp.forward = lambda x: mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)))


def shifted(net):
    net.lm_head.bias = torch.nn.Parameter(torch.ones_like(net.lm_head.weight[:, 0]))


class Adapted(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * 1.0001


def adapted(net):
    net.model.layers[1].self_attn.o_proj.__class__ = Adapted


BEYOND = [
    (scaled, "it has a hook on model.layers.0.self_attn.o_proj"),
    (replaced, "model.layers.0.mlp has a forward of its own"),
    (gelu, "model.layers.1.mlp.act_fn is no SiLU but a GELU"),
    (adapted, "model.layers.1.self_attn.o_proj is no nn.Linear but a Adapted"),
    (shifted, "its LM head has a bias"),
]


@pytest.mark.parametrize(("spoil", "said"), [(rotated, "differ by"), *BEYOND])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_network_that_differs_is_unfused_and_logged(spoil, said, dtype, caplog):
    net = made("llama", dtype)
    spoil(net)
    with caplog.at_level(logging.WARNING, "specexp"):
        assert isinstance(of_module(net, "mine").net, Unfused)
    [line] = [r.getMessage() for r in caplog.records]
    assert line.startswith("mine: run by transformers, not fused, because ")
    assert said in line


def test_hooks_with_which_transformers_captures_states_do_not_matter():
    net = made("llama")
    net(torch.tensor([PROMPTS[0]]), output_hidden_states=True)
    assert any(part._forward_hooks for part in net.modules())
    assert isinstance(of_module(net).net, Fused)


def test_rounding_that_float64_would_show_is_no_fault_of_the_model():
    reference = torch.randn(1, 8, 5, dtype=torch.float64)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    nets = [lambda *_: (reference * (1 + 5e-5), None)]
    assert fastest_agreeing(nets, 1, tokens, reference) == (None, "in float64 their rounding shows")


def fails(*_, **__):
    raise ValueError("no such stride")


@pytest.mark.parametrize("part", ["__init__", "__call__"])
def test_network_that_raises_is_unfused_and_logged(part, caplog, monkeypatch):
    monkeypatch.setattr(Fused, part, fails)
    with caplog.at_level(logging.WARNING, "specexp"):
        assert isinstance(of_module(made("llama"), "mine").net, Unfused)
    [line] = [r.getMessage() for r in caplog.records]
    why = "it fails with ValueError: no such stride"
    assert line == f"mine: run by transformers, not fused, because {why}"


@pytest.mark.compiler
@pytest.mark.parametrize("fault", ["raises", "differs"])
def test_faulty_compiled_pass_falls_back_to_fused(fault, caplog, monkeypatch):
    def halved(net, *args, **inputs):
        logits, states = run(net, *args, **inputs)
        return logits / 2, states

    run = Native.__call__
    monkeypatch.delenv("SPECEXP_NATIVE")
    monkeypatch.setattr(Native, "__call__", fails if fault == "raises" else halved)
    with caplog.at_level(logging.WARNING, "specexp"):
        assert isinstance(of_module(made("llama", torch.float32), "mine").net, Fused)
    [line] = [r.getMessage() for r in caplog.records]
    assert line.startswith("mine: run in torch's operations, uncompiled, because it")
    assert {"raises": "no such stride", "differs": "differ by 5.0e-01"}[fault] in line


def test_out_of_memory_while_fusing_is_raised(monkeypatch):
    def out(*_, **__):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Fused, "__call__", out)
    with pytest.raises(torch.OutOfMemoryError):
        of_module(made("llama"))


@pytest.mark.parametrize("switch", ["FAST", "NATIVE", "GRAPHS"])
def test_switch_with_another_value_than_off_is_refused(monkeypatch, switch):
    monkeypatch.setenv(f"SPECEXP_{switch}", "0")
    ops.forget()
    with pytest.raises(UserError, match=f"^SPECEXP_{switch} is '0', which switches nothing: use"):
        specexp.load("random-tiny", drafter="ngram")
    monkeypatch.undo()
    ops.forget()


def test_fast_off_leaves_every_network_unfused(monkeypatch):
    monkeypatch.setenv("SPECEXP_FAST", "off")
    ops.forget()
    whole, cut = of_module(made("llama")), engine("early_exit").drafter.lm
    assert [type(lm.net) for lm in (whole, cut)] == [Unfused, Unfused]
    assert isinstance(engine("eagle").drafter.lm.net, Unfused)
    monkeypatch.undo()
    ops.forget()


@pytest.mark.parametrize("family", ["gemma", "gpt2", "neox"])
def test_other_families_are_unfused(family, caplog):
    with caplog.at_level(logging.WARNING, "specexp"):
        assert isinstance(of_module(copy.deepcopy(module(family)), "mine").net, Unfused)
    assert "is none of LlamaForCausalLM" in caplog.text
