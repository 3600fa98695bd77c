"""Folders that are quantised already: their text is that of the weights that their files hold."""

import importlib.util
import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from support import architectures
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig

from specexp.drafters.ngram import NGram
from specexp.engine import Engine
from specexp.errors import UserError
from specexp.models import int8, load
from specexp.policy import Fixed
from specexp.tree import Tree

NEW = 12
SHAPE = {
    "vocab_size": architectures.V, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2,
    "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": None,
}  # fmt: skip
FOUR_BITS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def missing(library: str) -> bool:
    return importlib.util.find_spec(library) is None


def built(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def llama():
    return built(LlamaConfig(**SHAPE, hidden_size=128, intermediate_size=256))


def written(folder, module, tensors, quantization):
    """A folder of these tensors and the module's config, quantised so."""
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    own = {"architectures": [type(module).__name__], "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(module.config.to_dict() | own))
    return str(folder)


def text(source: str) -> list[int]:
    target = load.load(source, "mine", "float32", "cpu")
    made = Engine(target, NGram(2), Fixed(Tree.branching(2, 2)))
    return made.generate(architectures.prompts(20, 3), NEW).tokens[0]


@pytest.mark.skipif(missing("accelerate"), reason="needs accelerate")
def test_blocks_of_8_bit_floats_are_read_in_the_dtype_asked_for(tmp_path):
    """transformers unpacks them to bfloat16 alone, and fails beside what is not quantised."""
    module, tensors = llama(), {}
    for name, weight in module.state_dict().items():
        tensors[name] = weight
        if name.endswith("proj.weight"):
            blocks = weight.unfold(0, min(128, len(weight)), 128).unfold(1, 128, 128)
            scale = blocks.abs().amax((-1, -2)) / 448
            spread = scale.repeat_interleave(128, 0)[: len(weight)].repeat_interleave(128, 1)
            tensors[name] = (weight / spread).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale
            weight.copy_((tensors[name].float() * spread).bfloat16())
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    source = written(tmp_path, module, tensors, fp8)
    assert text(source) == architectures.greedy(module, architectures.prompts(20)[0], NEW)


@pytest.mark.skipif(missing("accelerate"), reason="needs accelerate")
def test_experts_of_4_bits_are_those_of_transformers(tmp_path):
    module = built(GptOssConfig(
        **SHAPE, hidden_size=64, intermediate_size=64, head_dim=16, num_local_experts=4,
        num_experts_per_tok=2, sliding_window=16, rope_parameters=architectures.ROPE,
    ))  # fmt: skip
    tensors = {}
    for name, weight in module.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            parts = weight.transpose(1, 2).unflatten(-1, (-1, 32))
            exponent = parts.abs().amax(-1).log2().floor() - 2
            size = (parts.abs() / exponent.exp2()[..., None])[..., None].sub(FOUR_BITS).abs()
            code = (size.argmin(-1) + 8 * (parts < 0)).to(torch.uint8)
            tensors[f"{name}_blocks"] = code[..., ::2] | code[..., 1::2] << 4
            tensors[f"{name}_scales"] = (exponent + 127).to(torch.uint8)
        else:
            tensors[name] = weight
    source = written(tmp_path, module, tensors, {"quant_method": "mxfp4"})
    theirs = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    assert text(source) == architectures.greedy(theirs, architectures.prompts(20)[0], NEW)


@pytest.mark.skipif(missing("compressed_tensors"), reason="needs compressed-tensors")
def test_compressed_tensors_are_those_of_transformers(tmp_path):
    module, tensors = llama(), {}
    for name, weight in module.state_dict().items():
        tensors[name] = weight
        if name.endswith("proj.weight"):
            scale = weight.abs().amax(1, keepdim=True) / 127
            tensors[name] = (weight / scale).round().to(torch.int8)
            tensors[f"{name}_scale"] = scale
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "format": "int-quantized"}
    packed = {
        "quant_method": "compressed-tensors", "format": group["format"], "ignore": ["lm_head"],
        "quantization_status": "compressed", "config_groups": {"all": group},
    }  # fmt: skip
    source = written(tmp_path, module, tensors, packed)
    theirs = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    assert text(source) == architectures.greedy(theirs, architectures.prompts(20)[0], NEW)


@pytest.mark.parametrize(
    ("described", "method"),
    [(None, ""), ({}, ""), ({"quant_method": "gptq"}, "gptq"), ({"bits": 4}, int8.UNNAMED),
     (SimpleNamespace(quant_method="awq"), "awq")],
)  # fmt: skip
def test_method_is_read_from_a_file_and_from_a_module_in_memory(described, method):
    assert int8.method(SimpleNamespace(quantization_config=described)) == method


def test_weights_that_a_library_unpacks_at_the_first_pass_are_unpacked():
    module, passes = llama(), []
    module.register_forward_pre_hook(lambda *_: passes.append(1))
    int8.unpack(module, torch.float32, "cannot load mine")
    assert passes == [1]


def test_quantised_module_that_fails_is_refused_in_one_line_that_names_the_method():
    module = llama()
    module.model.norm.register_forward_pre_hook(lambda *_: 1 // 0)
    with pytest.raises(UserError, match=r"^cannot load mine, quantised by x: .*zero$") as refused:
        int8.unpack(module, torch.float32, "cannot load mine, quantised by x")
    assert "\n" not in str(refused.value)
