"""What can be served is told from configs alone."""

from types import SimpleNamespace

import pytest
import torch
from support import architectures
from transformers import (
    DeepseekV4Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    GPTNeoConfig,
    Llama4TextConfig,
    LlamaConfig,
    MiniMaxConfig,
    MistralConfig,
    MptConfig,
    Phi3Config,
    Qwen2MoeConfig,
    T5Config,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specexp.errors import UserError
from specexp.models import servable
from specexp.models.memory import Layer, layers

TWO = {"num_hidden_layers": 2, "max_position_embeddings": 128}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [9.0] * 4,
        "short_factor": [1.0] * 4}  # fmt: skip


def test_reach_reads_every_context_field():
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
    found = [*map(servable.context_length, (beside, phi, plain, mpt, SimpleNamespace()))]
    assert found == [16, 32, 64, 48, 1 << 30]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (DeepseekV4Config(), "heavily_compressed_attention layers"),
        (T5Config(), "encoder-decoder"),
    ],
    ids=lambda x: getattr(x, "model_type", ""),
)
def test_servable_refuses_state_that_cannot_roll_back(config, said):
    with pytest.raises(UserError, match=said):
        servable.check_servable(config, "mine")


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (MistralConfig(**TWO, sliding_window=64), [Layer("sliding_attention", 64)] * 2),
        (MistralConfig(**TWO, sliding_window=128), [Layer()] * 2),
        (MistralConfig(**TWO, sliding_window=None), [Layer()] * 2),
        (Qwen2MoeConfig(**TWO, sliding_window=64), [Layer()] * 2),  # use_sliding_window is off
        (Gemma3TextConfig(**TWO, sliding_window=64, layer_types=["sliding_attention",
         "full_attention"]), [Layer("sliding_attention", 64), Layer()]),
        (Llama4TextConfig(**TWO, attention_chunk_size=64, layer_types=["chunked_attention",
         "full_attention"]), [Layer("chunked_attention", chunk=64), Layer()]),
        (Gemma3nTextConfig(**TWO, sliding_window=128, num_kv_shared_layers=1, layer_types=[
         "sliding_attention"] * 2), [Layer("sliding_attention"),
                                     Layer("sliding_attention", owns=False)]),
        (GPTNeoConfig(num_layers=2, window_size=64, attention_types=[[["global", "local"], 1]]),
         [Layer(), Layer("sliding_attention", 64)]),
        (MiniMaxConfig(**TWO, sliding_window=64), [Layer("full_attention", 64),
                                                   Layer("linear_attention", owns=False)]),
    ],
)  # fmt: skip
def test_layers_have_the_windows_and_chunks_of_their_config(config, kinds):
    servable.check_servable(config, "mine")
    assert layers(config, servable.context_length(config)) == tuple(kinds)


def test_the_config_of_every_architecture_is_sound():
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            described = CONFIG_MAPPING[kind]().to_dict()
        except Exception:  # some have no defaults
            continue
        servable.check_config_json(described, kind)


class Fed:
    """A module that is fed other inputs than it is given."""

    def __init__(self, module, change):
        self.module, self.change, self.dtype, self.device = module, change, module.dtype, "cpu"
        self.config = module.config

    def forward(self, cache=None, position_ids=None, **inputs):
        inputs |= {servable.cache_name(self.module): cache, "position_ids": position_ids}
        return self.module(**inputs | self.change(inputs))

    __call__ = forward


class Wrapper(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **inputs):
        return self.module(*args, **inputs)


def test_inputs_are_those_of_the_module_behind_a_wrapper():
    net = architectures.build("mamba")
    assert servable.takes(Wrapper(net)) == servable.takes(net)
    assert servable.cache_name(Wrapper(net)) in servable.CACHES
    assert servable.cache_name(torch.nn.Linear(1, 1)) == ""


def test_cause_is_seen_in_short_passes():
    net = architectures.build("llama")
    changes = {
        "": lambda inputs: {},
        "its own positions do not begin at 0, as those of generate() do": lambda inputs: {
            "position_ids": inputs["position_ids"] if inputs["position_ids"] is not None
            else torch.arange(inputs["input_ids"].shape[1])[None] * 3
        },
        "its own logits with and without a cache differ": lambda inputs: {
            servable.cache_name(net): None
        },
        "it does not read position_ids": lambda inputs: {"position_ids": None},
    }  # fmt: skip
    for cause, change in changes.items():
        assert servable.cause(Fed(net, change)) == cause
