"""A tiny model of every causal architecture of transformers, with random weights.

Sizes are shrunk by the names of their fields; what an architecture needs beyond that is in OWN. The
context is longer than any window, chunk and other limit, and prompts go past all of them.
"""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.peak_memory import held_per_row
from support.tiny import TREES
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specexp.drafters.early_exit import EarlyExit
from specexp.drafters.model import DraftModel
from specexp.drafters.ngram import NGram
from specexp.drafters.plain import Plain
from specexp.engine import Engine
from specexp.errors import UserError
from specexp.models import lm as lms
from specexp.models import load, memory, recurrent
from specexp.models.load import of_module
from specexp.models.recurrent import state_bytes
from specexp.models.servable import ORIGINAL, context_in_words, context_length
from specexp.policy import Fixed
from specexp.sampling import Sampling
from specexp.tree import Tree

V, CONTEXT, WINDOW, NEW = 60, 320, 24, 12
LENGTHS = (1, 7, 40, 266)  # of prompts
MIXES = ("plain empty", "ngram chain", "ngram branching", "self grown", "exit chain")
# which mix float32 with what they are given
SINGLE = {"inkling2_text", "inkling2_loop_text", "xglm", "xlnet"}

SMALL = {
    V: "vocab_size vocab_size_per_layer_input unpadded_vocab_size",
    CONTEXT: """max_position_embeddings n_positions n_ctx max_seq_len model_max_length mem_len
        max_target_positions context_length original_max_position_embeddings floor_scale
        keep_window_size""",
    WINDOW: """sliding_window attention_chunk_size sliding_window_size attention_window_size
        window_size local_attention""",
    32: """index_n_heads hidden_size d_model n_embd emb_dim embedding_size word_embed_proj_dim
        dim_model_base
        embedding_dim lru_width hidden_size_per_layer_input attention_hidden_size d_rel
        linear_head_dim qk_head_dim_total input_embedding_size output_embedding_size
        router_hidden_size""",
    64: """intermediate_size moe_intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim
        shared_expert_intermediate_size shared_intermediate_size dense_intermediate_size
        intermediate_size_mlp ffn_hidden_size expert_ffn_hidden_size d_inner dff dim_ff
        feed_forward_size shared_experts_intermediate_size moe_shared_expert_intermediate_size""",
    4: """num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers
        num_attention_heads n_head n_heads num_heads decoder_attention_heads attention_heads
        num_decoder_attention_heads encoder_attention_heads num_experts n_routed_experts
        num_local_experts moe_num_experts mamba_n_heads mamba_num_heads linear_num_value_heads
        swa_num_attention_heads linear_num_heads num_encoder_attention_heads""",
    2: """num_key_value_heads num_kv_heads num_experts_per_tok num_experts_per_token moe_k moe_topk
        linear_num_key_heads swa_num_key_value_heads encoder_layers num_encoder_layers
        num_kv_shared_layers n_mamba_heads mamba_n_groups n_groups mamba_ngroups""",
    1: "n_group topk_group num_expert_group first_k_dense_replace num_dense_layers",
    8: """head_dim dim_head d_head attention_head_size kv_channels mamba_d_head mamba_head_dim
        mamba_headdim qk_rope_head_dim qk_nope_head_dim v_head_dim linear_key_head_dim
        linear_value_head_dim swa_head_dim rotary_dim index_head_dim attention_head_dim
        state_size ssm_state_size mamba_d_state mamba_dt_rank time_step_rank""",
    16: "index_topk kv_lora_rank q_lora_rank qk_head_dim mamba_chunk_size chunk_size",
    0: "pad_token_id bos_token_id",
}  # fmt: skip
SIZE = {name: size for size, names in SMALL.items() for name in names.split()}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
PLAIN = {
    "eos_token_id": None,
    "is_decoder": True,
    "tie_word_embeddings": False,
    "forced_eos_token_id": None,
}
FOUR = ["sliding_attention", "full_attention"] * 2
LINEAR = ["linear_attention", "full_attention"] * 2
MLA = {"num_key_value_heads": 4, "qk_head_dim": 16}
INKLING = {
    "layer_types": ["hybrid_sliding", "hybrid"] * 2,
    "rel_extent": 40,
    "swa_head_dim": 16,
    "swa_num_key_value_heads": 4,
    "unpadded_vocab_size": V - 1,
}
MAMBA = {"mamba_d_head": 16, "mamba_n_heads": 4}
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "youtu",
                     "glm4_moe_lite", "glm_moe_dsa", "minicpm3", "sarvam_mla"), MLA),
    "bailing_hybrid": {"layer_types": LINEAR} | MLA,
    "bamba": MAMBA | {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(set(FOUR), ROPE), "layer_types": FOUR},
    "dots3_note_text": MLA | {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4,
                              "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16, "swa_head_dim": 16,
                              "swa_qk_nope_head_dim": 8, "swa_qk_rope_head_dim": 8,
                              "swa_v_head_dim": 8},
    "dory": {"layer_types": FOUR, "n_input_layers": 1, "n_output_layers": 1},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4},
    "falcon_h1": {"mamba_d_head": 16, "mamba_n_heads": 4, "mamba_d_ssm": 64},
    "gemma4_text": {"layer_types": FOUR},
    "gemma4_unified_text": {"layer_types": FOUR},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": MAMBA | {"layer_types": LINEAR},
    "inkling_text": INKLING | {"mlp_layer_types": ["dense", "sparse"] * 2},
    "inkling2_text": INKLING | {"n_layers_per_attn_res_block": 2, "log_scaling_n_floor": 100},
    "inkling2_loop_text": INKLING | {"n_layers_per_attn_res_block": 1, "log_scaling_n_floor": 100,
                                     "loop_layer_index_start": 1, "loop_layer_index_end": 3},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": LINEAR} | MLA,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"zero_expert_num": 2} | MLA,
    "mamba2": {"num_heads": 8},
    "qwen4_exp_text": {"layer_types": ["linear_attention", "indexed_attention"] * 2,
                       "indexer_n_heads": 32, "indexer_kv_heads": 1, "indexer_head_dim": 8,
                       "indexer_budget": 16, "indexer_compress_ratio": 4},
    "reformer": {"axial_pos_shape": [16, 20], "axial_pos_embds_dim": [16, 16]},
    "roc_bert": {"pronunciation_vocab_size": 60, "shape_vocab_size": 60,
                 "pronunciation_embed_dim": 32, "shape_embed_dim": 32},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "attention_hidden_size": 64,
              "attention_head_dim": 16},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


ALL = CONTEXT  # a window of the whole context is none
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mpt": ("mpt", {"max_seq_len": CONTEXT, "d_model": 32, "n_heads": 4, "n_layers": 4}),
    "bert, not a decoder": ("bert", {"is_decoder": False}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "mixtral, no window": ("mixtral", {"sliding_window": None}),
    "minimax, no window": ("minimax", {"sliding_window": None}),
    "phi3, no window": ("phi3", {"sliding_window": None}),
    "phi3, longrope": ("phi3", {
        "sliding_window": None, ORIGINAL: 100, "rope_parameters": ROPE | {"rope_type": "longrope"}
        | {"long_factor": [9.0] * 4, "short_factor": [1.0] * 4},
    }),
    "starcoder2, no window": ("starcoder2", {"sliding_window": None}),
    "gemma3_text, window of the context": ("gemma3_text", {"sliding_window": ALL}),
    "gemma3n_text, window of the context": ("gemma3n_text", {"sliding_window": ALL}),
    "gemma4_text, window of the context": ("gemma4_text", {"sliding_window": ALL}),
    "gemma4_text, global heads": ("gemma4_text", {"global_head_dim": 16}),
    "qwen2, window": ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}),
    "qwen3, window": ("qwen3", {"use_sliding_window": True, "max_window_layers": 2}),
    "smollm3, window": ("smollm3", {"use_sliding_window": True}),
    "llama4_text, temperature": ("llama4_text", {"floor_scale": 100}),
    "inkling_text, temperature": ("inkling_text", {"log_scaling_n_floor": 100}),
    "qwen4_exp_text, n-grams": ("qwen4_exp_text", {
        "ple_layer_ids": [1, 3], "ngram_vocab_size_base": 50, "eos_token_id": V - 1,
        "indexer_compress_ratio": 1,
    }),
    "doge, few keys": ("doge", {"keep_window_size": 100}),
    "granitemoehybrid, attention": ("granitemoehybrid", {"layer_types": ["full_attention"] * 4}),
    "falcon, ALiBi": ("falcon", {"alibi": True}),
    "falcon, a key for every head": ("falcon", {"multi_query": False, "num_kv_heads": 4}),
    "falcon, new": ("falcon", {"new_decoder_architecture": True}),
    "gpt_neo, global": ("gpt_neo", {"attention_types": [[["global"], 4]]}),
    "deepseek_v3, no latent queries": ("deepseek_v3", {"q_lora_rank": None}),
    **{
        f"llama, {kind}": ("llama", {"rope_parameters": ROPE | {"rope_type": kind} | more})
        for kind, more in {
            "linear": {"factor": 2.0}, "yarn": {"factor": 2.0, ORIGINAL: 100},
            "dynamic": {"factor": 2.0, ORIGINAL: 100},
            "longrope": {"long_factor": [9.0] * 4, "short_factor": [1.0] * 4, ORIGINAL: 100},
            "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                       ORIGINAL: 100},
        }.items()
    },
}  # fmt: skip


@functools.cache
def variants() -> dict[str, tuple[str, dict[str, Any]]]:
    """Every model type whose config is of a text model, and VARIANTS: its name, and what is unlike
    the tiny config. Other types have a text model as a part of theirs."""
    every = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    text = (kind for kind in every if not getattr(CONFIG_MAPPING[kind], "sub_configs", {}))
    own = {name: variant for name, variant in VARIANTS.items() if variant[0] in every}
    return {kind: (kind, {}) for kind in text} | own


def config(kind: str, **changes: Any) -> Any:
    """The tiny config of a model type."""
    cls = CONFIG_MAPPING[kind]
    names = {field.name for field in dataclasses.fields(cls)} | set(cls.attribute_map)
    fields = {name: size for name, size in SIZE.items() if name in names}
    fields |= {name: value for name, value in PLAIN.items() if name in names}
    return cls(**fields | OWN.get(kind, {}) | changes)


def build(name: str, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Any:
    """The tiny model of a variant, in float64 where its library can: weights spread so widely that
    greedy texts do not repeat one token."""
    if name not in variants():
        pytest.skip(f"this release of transformers has no {name}")
    kind, changes = variants()[name]
    tiny = config(kind, **changes)
    tiny._experts_implementation = "eager"  # others take no float64
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(tiny).parameters())
    assert size < 3e6, f"{name} has {size} weights"
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(tiny).eval()
    for weight in module.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5 * 1.5)
    return module.to(device) if kind in SINGLE else module.to(device, dtype)


@torch.no_grad()
def greedy(module: Any, prompt: list[int], count: int) -> list[int]:
    """What transformers generates."""
    ids = torch.tensor([prompt], device=module.device)
    text = module.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count,
        do_sample=False, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return text[0, len(prompt) :].tolist()


@contextlib.contextmanager
def short_passes(most: int = 7) -> Iterator[None]:
    """Meanwhile a prompt is read in passes so short that windows are kept in rings."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (memory, lms, recurrent):
            patch.setattr(module, "PREFILL", most)
        yield


def prompts(*lengths: int) -> list[list[int]]:
    """Texts with patterns that a lookup finds again."""
    at = torch.arange(max(lengths))
    text = (at % 7 * 5 + at % 11 * 3) % (V - 2) + 1
    return [text[-length:].tolist() for length in lengths]


def outcome(
    name: str,
    lengths: tuple[int, ...],
    mixes: tuple[str, ...],
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> str:
    """How a variant is served: `right`, perhaps up to so many tokens, or the line that refuses it.

    Raises AssertionError where a text, of any of these mixes of drafter and tree, is another than
    transformers': of a ragged batch with prompts of these lengths, and of the longest alone.
    """
    module = build(name, dtype, device)
    try:
        lm = of_module(module, "it")
    except UserError as e:
        own = module.config.get_text_config()
        with contextlib.suppress(UserError):  # of a folder this is asked before its weights
            assert context_length(own) > 0
            assert load.state_bytes(own, module.dtype, 1, 0) >= 0
        return f"refused: {reason(str(e))}"
    edge = [lm.context - NEW] if lm.context < CONTEXT else []  # the last token is at the limit
    texts = prompts(*sorted([*lengths, *edge]))
    fitting = [text for text in texts if len(text) + NEW <= lm.context]
    expected = [greedy(module, text, NEW) for text in fitting]
    sampling = Sampling(0.0)
    drafters = {
        "plain": Plain,
        "ngram": lambda: NGram(2),
        "self": lambda: DraftModel(lm.apart("itself"), sampling),
        "exit": lambda: EarlyExit(lm, 2, sampling),
    }
    for mix in mixes:
        drafter, tree = mix.split()
        try:
            engine = Engine(lm, drafters[drafter](), Fixed(TREES[tree]), sampling)
        except UserError:
            assert drafter == "exit", mix
            continue
        assert engine.generate(fitting, NEW).tokens == expected, f"{mix} in a ragged batch"
        assert engine.generate(fitting[-1:], NEW).tokens == expected[-1:], f"{mix} alone"
    if lm.cache:
        assert lm.kv_bytes(lm.cache.size) == held_per_row(lm)
    assert load.state_bytes(lm.config, lm.dtype, 5, 1) == state_bytes(lm.net.parts, 5, 1)
    assert load.weight_bytes(module.config, lm.dtype) == sum(p.nbytes for p in module.parameters())
    assert memory.pass_bytes(lm.config, lm.dtype.itemsize, 2, 3, CONTEXT) > 0
    if len(fitting) < len(texts):
        with pytest.raises(UserError, match=r"-token context \("):
            Engine(lm, Plain(), Fixed(Tree.chain(0))).generate(texts[-1:], NEW)
        return f"right up to {context_in_words(lm.config).replace('-token context', ' tokens')}"
    return "right"


def reason(line: str) -> str:
    """Why a line refuses a model, without its name, advice and figures."""
    assert len(line.splitlines()) == 1
    line = re.sub(
        r"^it (\(.*?\) )?|cannot be served; choose another model: |in torch.\w+ ", "", line
    )
    advice = "[,:] (which|choose|use) .*|; use .*"
    return re.sub(rf"{advice}|; it.* over a tree.*|(?<=over a tree): .*| by \S+ of .*", "", line)
