"""Tiny models of families whose layers keep states."""

from conftest import CONTEXT
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    GraniteMoeHybridConfig,
    JambaConfig,
    Lfm2Config,
    MambaConfig,
    Qwen3_5TextConfig,
    RecurrentGemmaConfig,
)

SMALL = {
    "vocab_size": 32, "hidden_size": 32, "initializer_range": 0.4, "pad_token_id": 0,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
SHAPE = SMALL | {
    "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}  # fmt: skip
SCAN = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "head_dim": 8,
}  # fmt: skip
STATE, KEYS = "linear_attention", "full_attention"
CONFIGS = {
    "qwen3_5": lambda: Qwen3_5TextConfig(
        **SHAPE, **DELTA, num_hidden_layers=2, layer_types=[STATE, KEYS]
    ),
    "lfm2": lambda: Lfm2Config(
        **SHAPE, num_hidden_layers=3, layer_types=["conv", KEYS, "conv"], block_multiple_of=8
    ),
    "granite4": lambda: GraniteMoeHybridConfig(
        **SHAPE, **SCAN, num_hidden_layers=2, layer_types=[KEYS, STATE],
        num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=32,
    ),
    "falcon_h1": lambda: FalconH1Config(
        **SHAPE, **SCAN, num_hidden_layers=2, mamba_d_ssm=64, head_dim=8
    ),
    "jamba": lambda: JambaConfig(
        **SHAPE, num_hidden_layers=2, attn_layer_period=2, attn_layer_offset=1, num_experts=1,
        mamba_dt_rank=4,
    ),
    "mamba": lambda: MambaConfig(**SMALL, state_size=4, num_hidden_layers=2),
    "recurrent_gemma": lambda: RecurrentGemmaConfig(
        **SMALL, intermediate_size=64, num_attention_heads=4, num_hidden_layers=3, lru_width=32,
        attention_window_size=64,
    ),
}  # fmt: skip


def hybrid(family):
    return AutoModelForCausalLM.from_config(CONFIGS[family]())
