"""Models from folders and from memory: what is loaded, shared, probed and refused."""

import contextlib
import copy
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from conftest import CONTEXT, tiny_llama
from huggingface_hub.utils import are_progress_bars_disabled
from support import architectures
from support.tiny import module
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    RoFormerConfig,
    RoFormerForCausalLM,
)
from transformers.utils import logging as transformers_logging

from specexp.errors import UserError
from specexp.models import lm as lms
from specexp.models import load
from specexp.models.cache import SlotCache
from specexp.models.load import of_module


@pytest.fixture
def folder(tmp_path):
    tiny_llama(0).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_load_folder_of_safetensors(folder, dtype):
    loaded = load.load(folder, "mine", dtype, "cpu")
    assert loaded.dtype == load.DTYPES[dtype]
    assert loaded.parameters == sum(p.numel() for p in tiny_llama(0).parameters())
    assert (loaded.name, loaded.context, loaded.vocab) == ("mine", 128, 32)


def test_draft_of_part_of_the_vocabulary_drafts_nothing_else(folder):
    """Its logits are its module's with all others left out, in the fast passes and the plain."""
    ids = [2, 3, 9, 30]
    whole = load.load(folder, "mine", "float32", "cpu").module
    tokens = torch.arange(1, 9)[None]
    wanted = torch.full((1, 8, 32), -torch.inf)
    with torch.no_grad():
        wanted[..., ids] = whole(tokens, use_cache=False).logits[..., ids]
        edit(folder, draft_ids=ids)
        part = load.load(folder, "mine", "float32", "cpu")
        assert torch.allclose(part.module(tokens, use_cache=False).logits, wanted, atol=1e-5)
    edit(folder, draft_ids=[2, 99])
    with pytest.raises(UserError, match="cannot load mine"):
        load.load(folder, "mine", "float32", "cpu")


def test_read_config_refuses_pickled_weights(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="pickled weights are refused"):
        load.read_config(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(UserError, match=r"has no \*\.safetensors; it holds no weights$"):
        load.read_config(folder)


def test_read_config_refuses_remote_code_without_running_it(folder):
    canary = folder / "ran"
    (folder / "evil.py").write_text(f"open({str(canary)!r}, 'w')\nclass C: pass\nclass M: pass\n")
    edit(folder, auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    own = load.load(folder, "mine", "float32", "cpu").module  # transformers' own Llama
    assert type(own).__module__.startswith("transformers.")
    edit(folder, model_type="evil")
    with pytest.raises(UserError, match="needs remote code, which is never run"):
        load.read_config(folder)
    assert not canary.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_type": "nothing"}', "\x00"])
def test_broken_config_is_a_one_line_error(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(UserError) as refused:
        load.read_config(folder)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("num_attention_heads", 0, "num_attention_heads 0: it must be 1 or more"),
        ("num_attention_heads", -4, "num_attention_heads -4: it must be 1 or more"),
        ("num_key_value_heads", 0, "num_key_value_heads 0: it must be 1 or more"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps nan: it must be a number"),
        ("eos_token_id", [{"id": 3}], "eos_token_id .*: it must be a token id or a list"),
        ("text_config", {"num_hidden_layers": 5000}, "no model has more than 4096 layers"),
        ("_attn_implementation", "a/b", "kernels from a hub are never fetched"),
        ("quantization_config", {"quant_method": "mine"}, "quantised by mine, which transformers"),
        ("num_attention_heads", 3, "not a multiple of the number of attention heads"),
        ("rms_norm_eps", "small", "'rms_norm_eps' expected float"),
        ("rope_scaling", "odd", "'rope_parameters' with value 'odd'"),
    ],
)
def test_config_error_names_the_wrong_value(folder, field, value, said):
    edit(folder, **{field: value})
    with pytest.raises(UserError, match=said) as refused:
        load.read_config(folder)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("method", "library"),
    [
        ("gptq", "optimum"), ("awq", "gptqmodel"), ("bitsandbytes", "bitsandbytes"),
        ("hqq", "hqq"), ("aqlm", "aqlm"), ("quanto", "optimum-quanto"), ("vptq", "vptq"),
    ],
)  # fmt: skip
def test_absent_library_of_quantised_weights_is_named(folder, method, library):
    bits = {"bits": 4, "group_size": 32} | (
        {"load_in_4bit": True} if method == "bitsandbytes" else {}
    )
    edit(folder, quantization_config={"quant_method": method} | bits)
    with pytest.raises(UserError, match=f"cannot load mine.*{library}") as refused:
        load.load(folder, "mine", "float32", "cpu")
    assert len(str(refused.value).splitlines()) == 1


def test_config_with_an_infinity_is_counted():
    shape = {"vocab_size": 32, "hidden_size": 32, "shared_intermediate_size": 32}
    net = GraniteMoeHybridForCausalLM(
        GraniteMoeHybridConfig(**shape, num_hidden_layers=1, num_attention_heads=2,
                               num_key_value_heads=2, layer_types=["full_attention"],
                               mamba_n_heads=4, num_local_experts=0)
    )  # fmt: skip
    assert net.config.time_step_limit[1] == float("inf")
    counted = load.weight_bytes(net.config, torch.float32) // 4
    assert counted == sum(p.numel() for p in net.parameters())


def test_config_and_tokenizer_are_cached_until_files_change(folder):
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


def test_load_refuses_tensors_of_another_shape(folder):
    edit(folder, intermediate_size=8)
    said = r"of another shape .* such as model\.layers\.0\.mlp\."
    with pytest.raises(UserError, match=said):
        load.load(folder, "tiny", "float32", "cpu")


def test_read_config_refuses_a_folder_without_config(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        load.read_config(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "header", "empty"])
def test_broken_weights_are_a_one_line_error(folder, damage):
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(
        {"cut": data[:-100], "header": b"\xff" * 8 + data[8:], "empty": b""}[damage]
    )
    with pytest.raises(UserError, match=r"cannot read .*model\.safetensors: .*; download or save"):
        load.load(folder, "mine", "float32", "cpu")


def test_error_without_message_is_named_by_type(folder, monkeypatch):
    def fails(*_, **__):
        raise OSError

    monkeypatch.setattr(load.transformers.AutoModelForCausalLM, "from_pretrained", fails)
    with pytest.raises(UserError, match="cannot load mine: OSError"):
        load.load(folder, "mine", "float32", "cpu")


def test_weights_are_shared_until_their_file_changes(tiny_folders):
    file = Path(tiny_folders[0]) / "model.safetensors"
    one = load.load(tiny_folders[0], "one", "float32", "cpu")
    os.utime(file, ns=(0, file.stat().st_mtime_ns))
    assert load.load(tiny_folders[0], "two", "float32", "cpu").module is one.module
    os.utime(file)
    assert load.load(tiny_folders[0], "three", "float32", "cpu").module is not one.module


def test_read_config_refuses_a_masked_lm(tmp_path):
    shape = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    net = BertForMaskedLM(BertConfig(**shape, intermediate_size=32, vocab_size=50))
    net.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="causal"):
        load.read_config(tmp_path)


@pytest.mark.parametrize(("option", "said"), [("dtype", "float32"), ("device", "no CUDA")])
def test_load_refuses_unknown_dtype_and_absent_device(folder, option, said):
    options = {"dtype": "float32", "device": "cpu"} | {
        option: "cuda:0" if option == "device" else "x"
    }
    if option == "device" and torch.cuda.is_available():
        options["device"], said = "cuda:99", "CUDA"
    with pytest.raises(UserError, match=said):
        load.load(folder, "mine", **options)


@pytest.mark.parametrize("native", [True, False])
def test_dtype_that_a_gpu_emulates_is_warned_of(native, monkeypatch, caplog):
    monkeypatch.setattr(load.memory, "no_cuda", lambda: "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
    for dtype in load.DTYPES:
        load._check_device(dtype, "cuda")
    assert [m.partition(",")[0] for m in caplog.messages] == ["this GPU only emulates bfloat16"] * (
        not native
    )


def test_load_leaves_download_progress_bars_on(tiny_folders):
    load.load(tiny_folders[1], "draft", "float32", "cpu")
    assert not are_progress_bars_disabled()
    assert not transformers_logging.is_progress_bar_enabled()


# modules in memory


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


def bidirectional():
    return architectures.build("bert, not a decoder")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (gpt, "it takes no cache; in torch.* it fails over a tree"),
        (roformer, "it takes no position_ids; "),
        (bidirectional, "its logits change with later tokens; its logits over a tree differ"),
    ],
)
def test_probe_refuses_a_module_with_other_logits_over_a_tree(make, said, dtype):
    torch.manual_seed(0)
    net = make().to(dtype)
    for _ in range(2):
        with pytest.raises(UserError, match=rf"mine \(.*\) cannot be served; .*{said}") as refused:
            of_module(net, "mine")
        assert len(str(refused.value).splitlines()) == 1


def test_what_a_library_asks_its_cache_for_is_named():
    net = copy.deepcopy(module("gpt2"))

    def forward(cache=None, **inputs):
        assert cache is None or cache.layers[0].spans
        return type(net).forward(net, **inputs)

    net.forward = forward
    with pytest.raises(UserError, match="; choose another model: it asks its cache for spans"):
        of_module(net)


@pytest.mark.parametrize("name", ["inkling_text", "qwen4_exp_text, n-grams"])
def test_probe_sees_positions_that_are_slots(name, monkeypatch):
    placed = SlotCache._placed

    def by_slot(self, span):
        return self.slots[:, 0], self.held(self.size), placed(self, span)[2]

    monkeypatch.setattr(SlotCache, "_placed", by_slot)
    with pytest.raises(UserError, match="its logits over a tree differ"):
        of_module(architectures.build(name))


def test_window_that_a_module_ignores_is_seen_though_its_passes_are_our_own():
    """Its config has one; its class reads every token."""
    of_module(tiny_llama(0, sliding_window=CONTEXT))
    with pytest.raises(UserError, match="its logits over a tree differ by"):
        of_module(tiny_llama(0, sliding_window=20))


def test_module_whose_own_logits_are_no_numbers_agrees_with_none():
    """Without a mask attention of torch's takes no negative scale; with one it does."""
    net = AutoModelForCausalLM.from_config(architectures.config("granite", attention_multiplier=-1))
    with pytest.raises(UserError, match="its logits are NaN; check weights and config"):
        of_module(net)


def test_module_is_probed_once_and_left_without_cache(monkeypatch):
    net = copy.deepcopy(module("gpt2"))
    assert of_module(net).cache is None
    monkeypatch.setattr(load, "difference", None)
    of_module(net)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_module_whose_logits_are_nan_is_refused_and_called_nothing_else(kind, caplog):
    net = copy.deepcopy(module(kind))
    net.get_input_embeddings().weight.data[::2] = torch.nan
    with pytest.raises(UserError, match="its logits are NaN; check weights and config"):
        of_module(net)
    assert "its logits differ" not in caplog.text


def test_probe_passes_on_out_of_memory(monkeypatch):
    def out(*_, **__):
        raise torch.OutOfMemoryError

    net = copy.deepcopy(module("gpt2"))
    monkeypatch.setattr(net, "forward", out)
    with pytest.raises(torch.OutOfMemoryError):
        of_module(net)


def test_probe_reads_past_the_window(monkeypatch):
    near = SlotCache.near
    monkeypatch.setattr(
        SlotCache, "near", lambda self, window, chunk: near(self, window + 1, chunk)
    )
    with pytest.raises(UserError, match="its logits over a tree differ"):
        of_module(architectures.build("mistral"))


def test_probe_reads_past_limits_of_rotation(monkeypatch):
    monkeypatch.setattr(lms, "context_length", lambda config: config.max_position_embeddings)
    with pytest.raises(UserError, match="its logits over a tree differ"):
        of_module(architectures.build("phi3, longrope"))


def test_probe_moves_an_accepted_path(monkeypatch):
    monkeypatch.setattr(SlotCache, "keep", lambda *_: None)
    with pytest.raises(UserError, match="its logits over a tree differ"):
        of_module(architectures.build("gemma3_text"))


def test_probe_names_the_limit_that_it_cannot_reach(monkeypatch, caplog):
    net = architectures.build("mistral")
    monkeypatch.setattr(load, "WORK", 20 * sum(p.numel() for p in net.parameters()))
    of_module(net, "mine")
    assert "mine was compared with its module on 20 tokens: sliding_window" in caplog.text
