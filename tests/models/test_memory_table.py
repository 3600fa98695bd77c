"""The page's table of memory is what configs of published shapes are reckoned to need."""

import re
from pathlib import Path

import pytest
import torch
import transformers

from specexp.models import load, memory
from specexp.tree import Tree

PAGE = Path(__file__).parents[2] / "specexp" / "models" / "README.md"
ROWS = re.findall(r"^\| (?:.* \| ){3}[\d,]+ \|$", PAGE.read_text(), re.MULTILINE)
SHAPES = {
    ("one key head per query head", "Llama 2 7B"): (
        "Llama", {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
    ),
    ("shared key heads", "Llama 3.1 8B"): (
        "Llama", {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
                  "num_key_value_heads": 8},
    ),
    ("shared key heads", "Qwen 3 8B"): (
        "Qwen3", {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
                  "num_key_value_heads": 8, "head_dim": 128},
    ),
    ("latent keys (MLA)", "DeepSeek V3"): ("DeepseekV3", {}),
    ("windows in 5 of 6 layers", "Gemma 3 27B"): (
        "Gemma3Text", {"hidden_size": 5376, "num_hidden_layers": 62, "num_attention_heads": 32,
                       "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024},
    ),
    ("windows in half the layers", "gpt-oss 20B"): ("GptOss", {"num_hidden_layers": 24}),
    ("windows, 15 of 35 layers share keys", "Gemma 3n E4B"): ("Gemma3nText", {}),
    ("short convolutions, 6 of 16 attend", "LFM2 1.2B"): (
        "Lfm2", {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
                 "num_key_value_heads": 8, "full_attn_idxs": [2, 5, 8, 10, 12, 14]},
    ),
    ("gated delta rule, 12 of 48 attend", "Qwen3-Next 80B"): ("Qwen3Next", {}),
    ("Mamba 1, 4 of 32 attend", "Jamba v0.1"): ("Jamba", {}),
    ("Mamba 2, none attends", "Mamba Codestral 7B"): ("Mamba2", {}),
}  # fmt: skip


def row(family: str, model: str) -> str:
    name, fields = SHAPES[family, model]
    config = getattr(transformers, f"{name}Config")(**fields)
    states = load.state_bytes(config, torch.bfloat16, Tree.chain(4).room, 0)
    sizes = dict(memory.slot_bytes(config, 2))
    token = sizes.pop(0, 0)
    row = states + memory.row_bytes([*sizes.items()], 1 << 30, Tree.chain(4).room)
    return f"| {family} | {model} | {token:,} | {row:,} |"


def test_table_names_every_shape():
    assert [tuple(line.split(" | ")[:2]) for line in ROWS] == [
        (f"| {family}", model) for family, model in SHAPES
    ]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape[1])
def test_row_of_the_table_is_reckoned(shape):
    assert row(*shape) in ROWS, row(*shape)
