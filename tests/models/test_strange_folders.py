"""Folders and texts as strangers have them: one line and exit code 2, before weights are read."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support import architectures
from tokenizers import Tokenizer
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoTokenizer, PreTrainedConfig
from transformers.integrations import hub_kernels

import specexp
from specexp import errors, names
from specexp.api import Output
from specexp.commands import app
from specexp.drafters.crossed import TokenMap
from specexp.errors import UserError, refusing
from specexp.models.heads import layouts
from specexp.models.load import load, read_config, read_tokenizer, tokens_of, weight_bytes
from specexp.trace import Trace
from specexp.zoo.rows import encode as encode_documents


@pytest.fixture
def folder(tiny_folders, tmp_path):
    return shutil.copytree(tiny_folders[0], tmp_path / "mine")


def edit(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def refused(monkeypatch, capsys):
    """refused(folder, prompt, ...): the one line in which `specexp generate` refuses them."""

    def call(folder, prompt: str = "a", *more: str) -> str:
        arguments = ["--target", str(folder), "--drafter", "ngram", "--prompt", prompt, *more]
        with monkeypatch.context() as patch:
            patch.setattr("specexp.api.load_model", None)
            patch.setattr(sys, "argv", ["specexp", "generate", *arguments])
            with pytest.raises(SystemExit) as stopped:
                app.main()
        [line] = capsys.readouterr().err.splitlines()
        assert stopped.value.code == 2
        return line.removeprefix("error: ")

    return call


# tokenizers


BACKTRACKS = {
    "type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False
}  # fmt: skip
FAILS = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}  # of a joined text
FUSES = {"type": "Fuse"}
LONG = "a" * 40 + "b"


def test_pattern_that_blows_up_is_one_line_wherever_text_is_encoded(folder, refused):
    edit(folder / "tokenizer.json", pre_tokenizer=BACKTRACKS)
    assert refused(folder, LONG).startswith("the tokenizer fails on a prompt: ")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert refused(folder, LONG, "--chat").startswith("the tokenizer fails on a prompt: ")
    tokenizer = read_tokenizer(folder)
    with pytest.raises(UserError, match="the tokenizer fails on the training text"):
        encode_documents(tokenizer, [LONG])
    pairing = specexp.load(str(folder), "ngram", 2)
    with pytest.raises(UserError, match="the tokenizer fails on a prompt"):
        pairing.generate(LONG, 4)


def test_decoder_that_blows_up_is_one_line_wherever_tokens_are_decoded(folder, capfd):
    edit(folder / "tokenizer.json", decoder={"type": "Sequence", "decoders": [FUSES, FAILS]})
    pairing = specexp.load(str(folder), "ngram", 2)
    output = Output([], Trace(0), [], pairing.tokenizer)
    tokens = pairing.encode([LONG])[0]
    for decode in (
        pairing.decode,
        output.decode,
        TokenMap(pairing.tokenizer, pairing.tokenizer, 9).tokenized_prompt,
    ):
        with pytest.raises(UserError, match=r"the tokenizer fails on tokens: .*retry-limit"):
            decode(tokens)
    assert capfd.readouterr().err == ""


def test_panic_is_reported_once(folder, capfd):
    edit(folder / "tokenizer.json", pre_tokenizer=BACKTRACKS)
    with pytest.raises(UserError, match="the tokenizer fails on a prompt"):
        tokens_of(read_tokenizer(folder), LONG)
    assert capfd.readouterr().err == ""
    with refusing("a trial"):
        os.write(2, b"a warning\n")
    assert capfd.readouterr().err == "a warning\n"


def test_panic_elsewhere_is_one_line_too(folder, refused, monkeypatch):
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    written = json.loads(backend.to_str()) | {"pre_tokenizer": BACKTRACKS}
    backend = Tokenizer.from_str(json.dumps(written))
    monkeypatch.setattr("specexp.measure.parameters.insist", lambda *_: backend.encode(LONG))
    assert "retry-limit-in-match" in refused(folder)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        (
            "tokenizer.json",
            b'{"model":',
            "cannot read the tokenizer of .*: Expec.*; download or save",
        ),
        ("tokenizer.json", b"\xff\xfe", "cannot read the tokenizer of .*: 'utf-8' codec"),
        ("tokenizer.json", b"[" * 99_999, "cannot read the tokenizer of .*(recursion|overflow)"),
        ("tokenizer_config.json", b"[1]", "cannot read the tokenizer of .*: "),
        ("config.json", b"null", "cannot read the model .*: "),
        ("chat_template.jinja", b"{% for m in", "the target's chat template fails: unexpected"),
        ("chat_template.jinja", b"{{ 1 / 0 }}", "the target's chat template fails: division"),
        ("chat_template.jinja", b"{{ messages[7].x }}", "chat template fails: list object has no"),
    ],
)
def test_damaged_file_is_named(folder, refused, file, content, said):
    (folder / file).write_bytes(content)
    with pytest.raises(UserError, match=said):
        raise UserError(refused(folder, "a", "--chat"))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])  # for qwen3 transformers makes an empty one
@pytest.mark.parametrize("role", ["target", "drafter"])
def test_folder_without_a_tokenizer_is_named(folder, tiny_folders, refused, kind, role):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    edit(folder / "config.json", model_type=kind)
    drafter = ["--drafter", f"model:{folder}"] if role == "drafter" else []
    said = refused(tiny_folders[0] if drafter else folder, "a", *drafter)
    assert said == f"{folder} has no tokenizer.json: save its tokenizer there, too"


def test_file_in_the_place_of_a_folder_is_said_to_be_one(folder, refused):
    said = refused(folder / "config.json")
    assert said.endswith("config.json is a file: give the folder it is in (or a GGUF file)")


# texts that are none


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("caf\udcff", "a prompt holds the byte 0xff after 'caf': that is no UTF-8"),
        ("\ud83d", "a prompt holds half a surrogate pair after '': that is no UTF-8"),
    ],
)
def test_prompt_that_is_no_text_names_the_byte(folder, refused, prompt, said):
    assert refused(folder, prompt) == said
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert refused(folder, prompt, "--chat") == said
    with pytest.raises(UserError) as refusal:
        names.encode(read_tokenizer(folder), prompt)
    assert str(refusal.value) == said


def test_name_that_is_no_text_is_shown_with_a_symbol(folder, refused):
    assert "mine\ufffd; did you mean" in refused(f"{folder}\udcff")


# files of a model


def split(folder, place: str = "model.safetensors"):
    """Make an index name every tensor's file."""
    shutil.move(folder / "model.safetensors", folder / "part.safetensors")
    with safe_open(folder / "part.safetensors", "pt") as weights:
        index = {"metadata": {}, "weight_map": dict.fromkeys(weights.keys(), place)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("place", ["../other/x.safetensors", "{}/x.safetensors", "..", "a.bin", 3])
def test_weights_named_outside_the_folder_are_refused(folder, refused, place):
    place = place.format(folder) if isinstance(place, str) else place
    split(folder, place)
    said = f"index.json names {str(place)!r}: weights are *.safetensors of the folder itself"
    assert refused(folder).endswith(said)
    assert refused(folder, "a", "--drafter", f"model:{folder}").endswith(said)


def test_missing_shard_is_named_before_anything_runs(folder, refused):
    split(folder, "gone.safetensors")
    said = "model.safetensors.index.json names gone.safetensors, which is not there: download or"
    assert said in refused(folder)
    assert said in refused(folder, "a", "--drafter", f"model:{folder}")


def test_index_that_nothing_reads_is_passed_over(folder):
    """As in a folder of which transformers reads other files."""
    for name in ("model", "consolidated"):
        index = {"weight_map": {"x": "consolidated-00001.safetensors"}}
        (folder / f"{name}.safetensors.index.json").write_text(json.dumps(index))
    load(folder, "whole", "float32", "cpu")


def test_links_of_a_hub_cache_are_followed(folder, tiny_folders, tmp_path):
    split(folder, "part.safetensors")
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.move(file, blobs / str(number))
        file.symlink_to(f"../blobs/{number}")
    cached = load(folder, "cached", "float32", "cpu").module.state_dict()
    for name, tensor in (
        load(tiny_folders[0], "whole", "float32", "cpu").module.state_dict().items()
    ):
        assert torch.equal(cached[name], tensor)


def test_head_files_are_found_in_their_folder_alone(folder):
    """Whatever an index says of other folders."""
    split(folder, "../other/x.safetensors")
    tensors = {"0.0.linear.weight": torch.eye(4), "0.1.weight": torch.ones(8, 4)}
    save_file(tensors, folder / "part.safetensors")
    places = layouts.read(folder).places.values()
    assert {file for file, _ in places} == {folder / "part.safetensors"}


def test_adapter_is_refused_with_or_without_its_library(folder, refused):
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "../other"}')
    assert "holds an adapter, which is not applied here: merge it" in refused(folder)


KERNEL = "kernels-community/x:Y"


@pytest.mark.parametrize(
    "fields",
    [
        {"_attn_implementation_internal": KERNEL},
        {"experts_implementation": KERNEL},
        {"attn_implementation": {"": KERNEL}},
        {"attn_implementation": {"text_config": KERNEL}},
        {"text_config": {"attn_implementation": KERNEL}},
        {"layers": [{"attn_implementation": KERNEL}]},
    ],
)
def test_kernels_of_a_hub_are_refused_for_targets_and_drafts(folder, refused, tiny_folders, fields):
    edit(folder / "config.json", **fields)
    said = "kernels from a hub are never fetched: remove the field"
    assert refused(folder).endswith(said)
    for method in ("model", "crossed"):
        draft = f"{method}:{folder}"
        assert refused(tiny_folders[0], "a", "--drafter", draft).endswith(said)


@pytest.mark.parametrize("experts", ["sonicmoe", "deepgemm"])
def test_experts_whose_kernels_are_on_a_hub_are_refused(folder, refused, experts):
    edit(folder / "config.json", experts_implementation=experts)
    said = f"experts_implementation '{experts}': it must be one of eager, batched_mm, grouped_mm"
    assert said in refused(folder)


@pytest.mark.parametrize(
    ("method", "said"),
    [
        *((x, "its kernels are on a hub") for x in ("eetq", "fbgemm_fp8", "metal")),
        ("gguf", "its weights are in a GGUF file: give that"),
    ],
)
def test_quantisation_that_would_fetch_kernels_or_be_ignored_is_refused(
    folder, refused, method, said
):
    edit(folder / "config.json", quantization_config={"quant_method": method})
    assert f"quantization_config.quant_method '{method}': {said}" in refused(folder)


def test_kernels_of_a_hub_are_off_for_the_methods_that_are_served(folder, monkeypatch):
    """transformers fetches them where the package `kernels` is installed."""
    monkeypatch.delenv("USE_HUB_KERNELS", raising=False)
    monkeypatch.setattr(hub_kernels, "_kernels_enabled", True)
    lm = load(folder, "mine", "float32", "cpu")
    assert not hub_kernels._kernels_enabled, lm
    edit(folder / "config.json", quantization_config={"quant_method": "mxfp4"})
    assert read_config(folder).quantization_config["dequantize"] is True


@pytest.mark.parametrize("place", ["../other/x.safetensors", "{}/x.safetensors", "..", "a/b", 3])
def test_weights_that_a_config_names_outside_the_folder_are_refused(folder, refused, place):
    place = place.format(folder) if isinstance(place, str) else place
    edit(folder / "config.json", transformers_weights=place)
    said = f"config.json has transformers_weights {place!r:.80}: weights are *.safetensors of"
    assert said in refused(folder)


def test_code_that_configs_name_is_never_run(folder, tiny_folders):
    """Neither a generation config nor heads can name code that runs."""
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    edit(folder / "generation_config.json", custom_generate="evil", trust_remote_code=True)
    edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.T", None]})
    specexp.load(str(folder), "ngram", 2).generate("a", 2)
    assert not (folder / "ran").exists()


# what configs say


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"architectures": [None]}, "config.json has architectures [None]: it must be a list of"),
        ({"max_position_embeddings": -5}, "max_position_embeddings -5: it must be 1 or more"),
        ({"attn_implementation": "flash_attention_2"}, "'flash_attention_2': it must be eager or"),
        ({"_attn_implementation": "flex_attention"}, "'flex_attention': it must be eager or sdpa"),
        ({"text_config": {"model_type": "llama"}}, "'dict' object has no attribute"),
        ({"hidden_act": "softplush"}, "no model that can be built: there is no 'softp"),
        ({"intermediate_size": -3}, "no model that can be built: Trying to create"),
        ({"head_dim": 0}, "to a negative power"),
        ({"pad_token_id": 99_999}, "no model that can be built: Padding_idx must be"),
        ({"rope_parameters": {"rope_type": "x"}}, "no model that can be built: there"),
        ({"num_hidden_layers": 2_000_000_000}, "no model has more than 4096 layers"),
        ({"n_layer": 2_000_000_000}, "no model has more than 4096 layers"),
        ({"text_config": {"depth": 4097}}, "text_config.depth 4097: no model has more than 4096"),
        ({"depths": [2, [4097]]}, "depths [2, [4097]]: no model has more than 4096 of them"),
        ({"num_hidden_layers": 4096}, " tensors for the 4096 layers that config.json says: down"),
        ({"intermediate_size": 10**15}, "GiB are free: choose a model of at most"),
    ],
)
def test_config_that_makes_no_model_is_one_line(folder, refused, fields, said):
    edit(folder / "config.json", **fields)
    assert said in refused(folder)


ENDLESS = """
import json, resource, sys
from pathlib import Path
from specexp.errors import UserError
from specexp.models.load import read_config

folder = Path(sys.argv[1])
described = json.loads((folder / "config.json").read_text())
mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + 2**30,) * 2)
for fields in json.load(sys.stdin):
    (folder / "config.json").write_text(json.dumps(described | fields))
    try:
        read_config(folder)
    except UserError as e:
        print(e)
"""
MANY = 2_000_000_000
COUNTS = [
    {"num_hidden_layers": MANY},
    {"model_type": "gpt_neo", "attention_types": [[["global"], MANY]]},
    {"model_type": "gpt_neo", "num_layers": MANY},
    {"model_type": "mixtral", "num_local_experts": MANY},
    {"model_type": "phimoe", "num_local_experts": MANY},
    {"model_type": "cohere2_moe", "first_k_dense_replace": MANY},
    {"model_type": "gemma3n_text", "altup_num_inputs": MANY},
    {"model_type": "musicgen_decoder", "num_codebooks": MANY},
    {"model_type": "mpt", "n_heads": MANY},
    {"model_type": "prophetnet", "ngram": MANY},
    {"num_labels": MANY},
]


LISTS = {"rope_parameters": {"short_factor": [1] * 200_000}}, {"x": [[[1]] * 999] * 200}


def test_endless_counts_and_lists_are_refused_before_anything_is_built(folder):
    """In a process with 1 GiB of memory to spare."""
    words, told = [sys.executable, "-c", ENDLESS, folder], json.dumps([*COUNTS, *LISTS])
    refusals = subprocess.run(words, input=told, capture_output=True, text=True).stdout.splitlines()
    counts, lists = refusals[: len(COUNTS)], refusals[len(COUNTS) :]
    assert ["no model has more than " in refusal for refusal in counts] == [True] * len(COUNTS)
    assert [line.endswith("has more than 100,000 values: no model's has") for line in lists] == [
        True
    ] * len(LISTS)


def test_model_of_endless_tensors_is_refused_before_they_are_made(folder):
    few = {"model_type": "gemma3n_text", "num_kv_shared_layers": 0, "altup_num_inputs": 2}
    edit(folder / "config.json", **few)
    assert weight_bytes(read_config(folder), torch.float32)  # imports its classes
    edit(folder / "config.json", altup_num_inputs=32768)
    tensors = []
    hook = register_module_parameter_registration_hook(lambda *tensor: tensors.append(tensor[1]))
    with pytest.raises(UserError, match="describes no model: none has more than 5,000 tensors"):
        weight_bytes(read_config(folder), torch.float32)
    hook.remove()
    assert len(tensors) == 5001


@pytest.mark.parametrize(
    ("name", "field", "positions"),
    [("gpt_neo", "max_position_embeddings", 10**6), ("gptj", "n_positions", 10**10)],
)
def test_tables_of_endless_positions_are_refused_before_they_are_made(
    folder, name, field, positions
):
    architectures.build(name).save_pretrained(folder)
    edit(folder / "config.json", **{field: positions})
    with pytest.raises(UserError, match=r"the weights of mine in float32 take .* GiB are free"):
        load(folder, "mine", "float32", "cpu")


def test_endless_heads_are_refused_before_one_is_built(folder, tiny_folders):
    tensors = {f"{MANY}.0.linear.weight": torch.eye(4), f"{MANY}.1.weight": torch.ones(8, 4)}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match="medusa heads; the file lacks heads: it has 2 tensors"):
        specexp.load(tiny_folders[0], f"medusa:{folder}", 2)


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        (4, "cannot load mine: 9 of its tensors are missing or of another shape than config.json"),
        (2, "mine: its config has no place for 9 tensors of its files, such as model.layers.2."),
    ],
)
def test_layers_of_another_number_than_weights_are_one_line(folder, capfd, caplog, layers, said):
    edit(folder / "config.json", num_hidden_layers=layers)
    try:
        load(folder, "mine", "float32", "cpu")
        [line] = [record.getMessage() for record in caplog.records]
    except UserError as refusal:
        line = str(refusal)
    assert line.startswith(said)
    assert capfd.readouterr().err == ""


def test_quantised_folder_whose_library_fails_is_one_line(folder):
    edit(folder / "config.json", quantization_config={"quant_method": "torchao", "quant_type": "x"})
    with pytest.raises(UserError, match=r"cannot load mine: \S") as refusal:
        load(folder, "mine", "float32", "cpu")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("reading", ["config", "tokenizer", "heads"])
def test_what_a_slow_hub_is_asked_for_is_said_while_it_is_waited_for(reading, monkeypatch, capfd):
    """Also where what a library writes is held back until it returns (`refusing`)."""
    seen = [""]

    def slow(*args, **options):
        while not seen[-1] and len(seen) < 500:
            time.sleep(0.01)
            seen.append(capfd.readouterr().err)
        raise OSError("no hub")

    monkeypatch.setattr(errors, "PATIENCE_S", 0.01)
    monkeypatch.setattr(sys, "stderr", sys.__stderr__)
    monkeypatch.setattr(PreTrainedConfig, "get_config_dict", slow)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", slow)
    monkeypatch.setattr("huggingface_hub.snapshot_download", slow)
    read = {"config": read_config, "tokenizer": read_tokenizer, "heads": layouts.read}[reading]
    with pytest.raises(UserError, match="me/slow"):
        read("me/slow")
    assert seen[-1].startswith("waiting for me/slow from the hub")


def test_a_model_that_the_hub_does_not_give_is_refused_with_what_to_do(monkeypatch):
    def no_hub(source):
        raise OSError("We couldn't connect to the hub.\nCheck your internet connection.")

    monkeypatch.setattr(PreTrainedConfig, "get_config_dict", no_hub)
    with pytest.raises(
        UserError, match=r"cannot get me/gated from the hub: .* hub; .*hf auth login"
    ):
        read_config("me/gated")
