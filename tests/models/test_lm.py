"""Parity with transformers' own forward, and what is refused before a weight is read."""

import copy
import gc
import json
import os
import shutil
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_llama
from huggingface_hub.utils import are_progress_bars_disabled
from support.tiny import FAMILIES, PROMPTS, module, slowly
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BloomConfig,
    FalconConfig,
    Gemma3TextConfig,
    GPTNeoConfig,
    LlamaConfig,
    Mamba2Config,
    MistralConfig,
    MptConfig,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    Phi3Config,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
    RoFormerConfig,
    RoFormerForCausalLM,
    T5Config,
)
from transformers.utils import logging as transformers_logging

from specexp.drafters.model import DraftModel
from specexp.drafters.null import Null
from specexp.engine import Engine
from specexp.errors import NonFiniteLogits, UserError
from specexp.models import lm as lms
from specexp.models import load, memory, servable
from specexp.models.lm import LM
from specexp.models.load import of_module
from specexp.policy import Fixed
from specexp.sampling import Sampling
from specexp.sequences import Sequences
from specexp.tree import Tree

TREE = Tree((-1, 0, 0, 1, 1, 2, 3, 5))


def filled(target: LM, seqs: Sequences, taps: tuple[int, ...] = ()):
    target.allocate(*seqs.tokens.shape)
    return target.prefill(seqs, 0, int(seqs.length.max()) - 1, taps)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_ragged_batch_of_trees_has_the_logits_of_each_path_alone(family):
    net = module(family)
    target = of_module(net)
    seqs = Sequences.of(PROMPTS, 4, slack=len(TREE))
    guesses = torch.randint(0, 32, (len(PROMPTS), len(TREE) - 1), generator=torch.manual_seed(1))
    filled(target, seqs)
    seen = target.verify(seqs, seqs.draft(TREE.nodes("cpu"), guesses), taps=(0, 1))
    assert seen.hidden.shape == (len(PROMPTS), len(TREE), 2 * 32)
    for row, prompt in enumerate(PROMPTS):
        for node in range(len(TREE)):
            path, at = [], node
            while at > 0:
                path.insert(0, int(guesses[row, at - 1]))
                at = TREE.parents[at]
            with torch.no_grad():
                alone = net(torch.tensor([prompt + path]), use_cache=False).logits[0, -1]
            assert torch.allclose(seen.logits[row, node], alone, atol=1e-9, rtol=0)


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [9.0] * 4,
        "short_factor": [1.0] * 4}  # fmt: skip


@pytest.mark.parametrize("alone", [True, False])
def test_a_text_ends_where_longrope_would_turn_it_by_other_factors(alone):
    net = tiny_llama(0, rope_parameters=LONG | {"original_max_position_embeddings": 16}).double()
    prompts = PROMPTS[1:2] if alone else [PROMPTS[0], [*range(14)]]
    law = Sampling(0.0)
    greedy = Engine(of_module(net), DraftModel(of_module(net), law), Fixed(Tree.chain(5)), law)
    new = 16 - max(map(len, prompts))
    assert greedy.generate(prompts, new).tokens == [slowly(net, p, new) for p in prompts]
    with pytest.raises(UserError, match="the 16-token context of model by 1"):
        greedy.generate(prompts, new + 1)


def test_the_reach_of_a_config_is_that_of_its_layers():
    here = LONG | {"original_max_position_embeddings": 16}
    beside = SimpleNamespace(
        max_position_embeddings=64,
        rope_parameters={"full_attention": here, "other": {"rope_type": "default"}, "none": None},
    )
    phi = Phi3Config(
        max_position_embeddings=64, original_max_position_embeddings=32, hidden_size=32,
        num_attention_heads=4, pad_token_id=0,
        rope_scaling={"type": "longrope", "long_factor": [1.0] * 4, "short_factor": [1.0] * 4},
    )  # fmt: skip
    plain, mpt = LlamaConfig(max_position_embeddings=64), MptConfig(max_seq_len=48)
    found = [*map(servable.reach, (beside, phi, plain, mpt, SimpleNamespace()))]
    assert found == [16, 32, 64, 48, 1 << 30]


def test_weights_that_were_only_read_since_are_not_loaded_twice(tiny_folders):
    file = Path(tiny_folders[0]) / "model.safetensors"
    one = load.load(tiny_folders[0], "one", "float32", "cpu")
    os.utime(file, ns=(0, file.stat().st_mtime_ns))
    assert load.load(tiny_folders[0], "two", "float32", "cpu").module is one.module
    os.utime(file)
    assert load.load(tiny_folders[0], "three", "float32", "cpu").module is not one.module


def test_a_long_prompt_is_prefilled_in_pieces(monkeypatch):
    target = of_module(module())
    prompts = [list(range(30)), [3, 1, 2]]
    whole = Sequences.of(prompts, 4, slack=1)
    filled(target, whole)
    keys = target.cache.layers[1].keys.clone()
    monkeypatch.setattr(lms, "PREFILL", 7)
    states = filled(target, whole, taps=(2,))
    assert torch.allclose(target.cache.layers[1].keys, keys, atol=1e-12)
    assert states.shape == (2, 29, 32)


def test_a_cache_that_cannot_fit_is_refused_with_the_numbers(monkeypatch):
    target = of_module(module())
    monkeypatch.setattr(memory, "free_memory", lambda device: 2**20)
    said = r"batch 1000 x 400 tokens needs .* GiB .* a batch of at most [1-9]\d*, or fewer tokens"
    with pytest.raises(UserError, match=said):
        target.allocate(1000, 400)
    with pytest.raises(UserError, match="are free: use fewer tokens"):  # not even one row fits
        target.allocate(1000, 40_000)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_room_is_counted_without_the_cache_that_goes(family, monkeypatch):
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


def test_bytes_per_token_are_those_of_the_cache():
    target = of_module(module())
    filled(target, Sequences.of([[1, 2, 3]], 5, slack=2))
    held = sum(b.numel() * b.itemsize for x in target.cache.layers for b in (x.keys, x.values))
    assert target.kv_bytes_per_token * 10 == held


@pytest.fixture
def folder(tmp_path):
    tiny_llama(0).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_of_safetensors_loads(folder, dtype):
    loaded = load.load(folder, "mine", dtype, "cpu")
    assert loaded.dtype == load.DTYPES[dtype]
    assert loaded.parameters == sum(p.numel() for p in tiny_llama(0).parameters())
    assert (loaded.name, loaded.context, loaded.vocab) == ("mine", 128, 32)


def test_pickled_weights_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="pickled weights are refused"):
        load.read_config(folder)


def test_remote_code_is_refused_and_never_run(folder):
    canary = folder / "ran"
    (folder / "evil.py").write_text(f"open({str(canary)!r}, 'w')\nclass C: pass\nclass M: pass\n")
    for changes in (
        {"auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}},
        {"auto_map": {"AutoConfig": "evil.C"}, "model_type": "evil"},
    ):
        edit(folder, **changes)
        with pytest.raises(UserError) as refused:
            load.read_config(folder)
        assert len(str(refused.value).splitlines()) == 1
        assert not canary.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_type": "nothing"}', "\x00"])
def test_a_broken_config_is_one_clear_line(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(UserError) as refused:
        load.read_config(folder)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("num_attention_heads", 0, "modulo by zero"),
        ("num_attention_heads", 3, "not a multiple of the number of attention heads"),
        ("rms_norm_eps", "small", "'rms_norm_eps' expected float"),
        ("rope_scaling", "odd", "'rope_parameters' with value 'odd'"),
    ],
)
def test_a_config_with_a_wrong_value_is_refused_and_the_value_is_named(folder, field, value, said):
    edit(folder, **{field: value})
    with pytest.raises(UserError, match="cannot read the model") as refused:
        load.read_config(folder)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_was_read_is_kept_until_its_file_changes(folder):
    tokenizer = Path(__file__).parents[2] / "data" / "zoo" / "random-tiny" / "tokenizer.json"
    shutil.copy(tokenizer, folder / "tokenizer.json")
    config, read = load.read_config(folder), load.read_tokenizer(folder)
    config.vocab_size = 7  # of this caller alone
    assert load.read_config(folder).vocab_size == 32
    assert load.read_tokenizer(folder) is read
    edit(folder, vocab_size=310)
    assert load.read_config(folder).vocab_size == 310
    (folder / "tokenizer.json").write_text(tokenizer.read_text() + " ")
    assert load.read_tokenizer(folder) is not read


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 9}, r"63 of its tensors are missing .* such as model\.layers\."),
        ({"intermediate_size": 8}, r"of another shape .* such as model\.layers\.0\.mlp\."),
    ],
)
def test_weights_that_are_not_all_there_are_refused_and_never_made_up(folder, changes, said):
    edit(folder, **changes)
    with pytest.raises(UserError, match=said):
        load.load(folder, "tiny", "float32", "cpu")


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        load.read_config(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "header", "empty"])
def test_broken_weights_are_one_clear_line(folder, damage):
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(
        {"cut": data[:-100], "header": b"\xff" * 8 + data[8:], "empty": b""}[damage]
    )
    with pytest.raises(UserError, match="cannot load mine"):
        load.load(folder, "mine", "float32", "cpu")


def test_what_says_nothing_is_told_by_its_kind(folder, monkeypatch):
    def fails(*_, **__):
        raise OSError

    monkeypatch.setattr(load.AutoModelForCausalLM, "from_pretrained", fails)
    with pytest.raises(UserError, match="cannot load mine: OSError"):
        load.load(folder, "mine", "float32", "cpu")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (MistralConfig(sliding_window=64, max_position_embeddings=128), "sliding_attention"),
        (Gemma3TextConfig(sliding_window=64, max_position_embeddings=128), "sliding_attention"),
        (Qwen3NextConfig(), "linear_attention"),
        (Mamba2Config(), "linear_attention"),
        (RecurrentGemmaConfig(), "sliding_attention"),
        (GPTNeoConfig(num_layers=2, attention_types=[[["global", "local"], 1]]), "local_attention"),
        (T5Config(), "encoder-decoder"),
        (MptConfig(), "ALiBi"),
        (BloomConfig(), "ALiBi"),
        (FalconConfig(alibi=True), "ALiBi"),
    ],
    ids=lambda x: getattr(x, "model_type", ""),
)
def test_models_whose_state_cannot_be_rolled_back_are_refused_by_name(config, said):
    with pytest.raises(UserError, match=said):
        servable.servable(config, "mine")


def gpt():
    return OpenAIGPTLMHeadModel(
        OpenAIGPTConfig(vocab_size=32, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    )


def roformer():
    return RoFormerForCausalLM(
        RoFormerConfig(
            vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=64, initializer_range=0.4, is_decoder=True,
        )
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("make", "said"), [(gpt, "fails over a tree"), (roformer, "logits over")])
def test_a_module_that_a_round_cannot_drive_is_refused_in_a_line(make, said, dtype):
    torch.manual_seed(0)
    net = make().to(dtype)
    for _ in range(2):
        with pytest.raises(UserError, match=rf"mine \(.*\) cannot be served; .*{said}") as refused:
            of_module(net, "mine")
        assert len(str(refused.value).splitlines()) == 1


def test_a_module_is_tried_once_and_leaves_no_cache(monkeypatch):
    net = copy.deepcopy(module("gpt2"))
    assert of_module(net).cache is None
    monkeypatch.setattr(load, "_difference", None)
    of_module(net)


def test_a_module_of_no_numbers_is_left_to_whoever_runs_it():
    net = copy.deepcopy(module("gpt2"))
    net.transformer.wte.weight.data[::2] = torch.nan
    greedy = Engine(of_module(net), Null(), Fixed(Tree.chain(0)))
    with pytest.raises(NonFiniteLogits):
        greedy.generate(PROMPTS, 4)


def test_memory_that_runs_out_is_no_fault_of_the_module(monkeypatch):
    def out(*_, **__):
        raise torch.OutOfMemoryError

    net = copy.deepcopy(module("gpt2"))
    monkeypatch.setattr(net, "forward", out)
    with pytest.raises(torch.OutOfMemoryError):
        of_module(net)


def test_global_layers_of_gpt_neo_are_served():
    servable.servable(GPTNeoConfig(num_layers=2, attention_types=[[["global"], 2]]), "mine")


def test_a_window_as_wide_as_the_context_is_full_attention():
    servable.servable(MistralConfig(sliding_window=128, max_position_embeddings=128), "mine")
    servable.servable(MistralConfig(sliding_window=None), "mine")


def test_a_model_that_is_no_causal_lm_is_refused(tmp_path):
    shape = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    net = BertForMaskedLM(BertConfig(**shape, intermediate_size=32, vocab_size=50))
    net.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="causal"):
        load.read_config(tmp_path)


@pytest.mark.parametrize(("option", "said"), [("dtype", "float32"), ("device", "no CUDA")])
def test_unknown_dtypes_and_absent_devices_are_refused(folder, option, said):
    options = {"dtype": "float32", "device": "cpu"} | {
        option: "cuda:0" if option == "device" else "x"
    }
    if option == "device" and torch.cuda.is_available():
        options["device"], said = "cuda:99", "CUDA"
    with pytest.raises(UserError, match=said):
        load.load(folder, "mine", **options)


def test_downloads_show_how_far_they_are(tiny_folders):
    load.load(tiny_folders[1], "draft", "float32", "cpu")
    assert not are_progress_bars_disabled()
    assert not transformers_logging.is_progress_bar_enabled()
