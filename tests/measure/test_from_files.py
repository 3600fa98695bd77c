"""What a folder's files say by themselves is what transformers makes of them, or nothing."""

import json
import shutil

import pytest
import torch
from conftest import tiny_llama, tiny_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import Qwen3Config, Qwen3ForCausalLM

from specexp import names, rules
from specexp.measure import feasible, from_files
from specexp.measure.prompts import Prompt
from specexp.zoo import shelf
from specexp.zoo.known import Known

ZOO = [m.name for m in shelf.models(shelf.shipped()) if m.role in ("target", "draft", "control")]
DRAFTERS = (
    "plain", "ngram", "suffix:4", "recycle", "recycle:3", "early_exit", "early_exit:2", "model",
    "sibling-1m", "random-tiny", "planted:0.5", "planted:0.5,sibling-1m", "medusa", "eagle",
    "dflash", "lookup", "lookup:sibling-1m", "lookup:eagle", "lookup:dflash", "lookup:early_exit:2",
)  # fmt: skip
TEMPLATE = """{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""
CHAT = Prompt("q", "math", ("1+1?", "2+2?"), system="Brief")


def alike(facts):
    """Facts of a pairing without what only tells models apart, as JSON keeps them."""
    models = [{n: v for n, v in sizes.items() if n != "described"} for sizes in facts["models"]]
    return json.loads(json.dumps([facts["method"], facts["limits"], models]))


def compare(target, drafters, dtype="float32"):
    """Assert that the files of these pairings say what transformers does; returns how many do."""
    known, said = Known(), 0
    plain = known(from_files.model, names.locate(target))
    assert plain is None or plain.facts == names.facts_of_target(target)[0]
    for drafter in drafters:
        changed = {"target": target, "drafter": drafter, "dtype": dtype, "gamma": 1}
        options = tuple((feasible.DEFAULTS | changed | {"rule": "auto"}).items())
        asked = tuple((name, value) for name, value in options if name != "rule")
        if facts := from_files.pairing(known, asked):
            assert alike(facts) == alike(names.facts_of_pairing(*asked)[0]), drafter
            said += 1
    return said


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_files_of_the_zoo_say_what_transformers_does(dtype):
    counts = {target: compare(target, DRAFTERS, dtype) for target in ZOO}
    assert counts["target-10m"] == len(DRAFTERS)
    assert min(counts.values()) > 7


def test_heads_of_another_target_are_left_to_transformers(tmp_path):
    folder = shutil.copytree(shelf.find("target-10m-dspark"), tmp_path / "block")
    asked = {"target": "target-10m", "drafter": f"dflash:{folder}", "dtype": "float32"}
    options = tuple((feasible.DEFAULTS | asked).items())
    assert from_files.pairing(Known(), options)
    edit(folder / "zoo.json", target="another")
    assert from_files.pairing(Known(), options) is None
    (folder / "zoo.json").unlink()
    assert from_files.pairing(Known(), options) is None


@pytest.fixture
def folder(tmp_path, tiny_folders):
    shutil.copytree(tiny_folders[0], tmp_path / "target")
    return tmp_path / "target"


def qwen3(tied):
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 400}
    return Qwen3ForCausalLM(Qwen3Config(**shape, **heads, tie_word_embeddings=tied))


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
OWN = {
    "llama": lambda: tiny_llama(0, vocab=400),
    "llama, tied": lambda: tiny_llama(0, vocab=400, tie_word_embeddings=True),
    "llama 3": lambda: tiny_llama(0, vocab=400, rope_parameters=LLAMA3),
    "qwen 3": lambda: qwen3(False),
    "qwen 3, tied": lambda: qwen3(True),
}


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("name", from_files.TOKENIZERS)
def test_files_of_ones_own_model_say_what_transformers_does(folder, kind, name):
    OWN[kind]().save_pretrained(folder)
    edit(folder / "tokenizer_config.json", tokenizer_class=name)
    assert compare(str(folder), ["ngram", f"model:{folder}"]) == 2
    for changed in ({}, {"post_processor": None}):
        edit(folder / "tokenizer.json", **changed)
        tokenizer, whole = (
            from_files.model(str(folder)).tokenizer,
            names.read_target(str(folder))[2],
        )
        for text in ("a", " def mean(values):", "é 日本語", "<|endoftext|> <s>"):
            assert tokenizer.encode(text).ids == names.encode(whole, text)


def edit(file, **changed):
    described = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(described | changed))


STRANGE = {  # in which file, and what it says
    "unknown field": ("config", {"logit_scale": 2.0}),
    "unknown type": ("config", {"model_type": "gemma"}),
    "other class": ("config", {"architectures": ["LlamaModel"]}),
    "biases": ("config", {"attention_bias": True}),
    "size that files do not have": ("config", {"intermediate_size": 65}),
    "size that is no number": ("config", {"hidden_size": "32"}),
    "no room for its padding": ("config", {"pad_token_id": 99_999}),
    "quantised": ("config", {"quantization_config": {"quant_method": "awq"}}),
    "scaled rotation": ("config", {"rope_parameters": LLAMA3 | {"rope_type": "yarn"}}),
    "setting of texts": ("generation_config", {"repetition_penalty": 1.1}),
    "tokenizer of another class": ("tokenizer_config", {"tokenizer_class": "Qwen2Tokenizer"}),
    "token that is added": ("tokenizer_config", {"eos_token": "<|new|>"}),
    "tokens before each text": ("tokenizer_config", {"add_bos_token": True}),
    "tokens added beside": ("added_tokens", {"<|new|>": 9}),
}


@pytest.mark.parametrize("case", STRANGE)
def test_anything_strange_is_left_to_transformers(folder, case):
    assert from_files.model(str(folder))
    name, changed = STRANGE[case]
    edit(folder / f"{name}.json", **changed)
    assert from_files.model(str(folder)) is None


def test_torn_files_are_left_to_transformers(folder):
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[:-9])
        assert from_files.model(str(folder)) is None, name
        (folder / name).write_bytes(whole)
    assert from_files.model(str(folder))
    assert from_files.model(f"{folder}+int8") is from_files.model("org/name") is None


@pytest.mark.parametrize("adds", [False, True])
def test_chat_has_as_many_tokens_as_in_transformers(folder, adds):
    tokenizer = tiny_tokenizer("user: 1+1? assistant: 2\n" * 9)
    if adds:
        bos = (tokenizer.bos_token, tokenizer.bos_token_id)
        single = TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
        tokenizer.backend_tokenizer.post_processor = single
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    tiny_llama(0, vocab=len(tokenizer)).save_pretrained(folder)
    plain = from_files.model(str(folder))
    fields = CHAT.question_id, CHAT.category, CHAT.turns, CHAT.answers, CHAT.system, CHAT.chat
    assert from_files.chat(plain, CHAT) == feasible.facts_of_chat(str(folder), *fields)[0]
    for odd in ("{{ raise_exception('no') }}", "{{ strftime_now('%Y') }}", "{{ 1 | tojson }}", "x"):
        (folder / "chat_template.jinja").write_text(odd)
        assert from_files.chat(plain, CHAT) is None, odd


@pytest.mark.parametrize("rule", ["match", "reject", "block", "typical:0.3", "lenient:0.5"])
def test_rules_ask_of_drafts_what_their_names_say(rule):
    judge, said = rules.of(rule), feasible._ruling(rule, Known())
    assert (said.chains_only, said.wants_q) == (judge.chains_only, judge.wants_q)


def test_every_gpu_has_the_least_memory_that_is_counted_on():
    assert not torch.cuda.is_available() or torch.cuda.mem_get_info()[1] > feasible.LEAST
