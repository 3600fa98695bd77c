"""Every causal architecture of transformers: its texts are transformers' own, or a line refuses it.

The page's table of architectures is what these tests observe; they print a row that is not there.
"""

import contextlib
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import also, one_in
from support import architectures
from support.references import lightened
from transformers import Gemma3nTextConfig, Gemma3TextConfig, LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.gemma3 import modeling_gemma3 as gemma3
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP, Gemma3RMSNorm
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP
from transformers.models.gemma4 import modeling_gemma4 as gemma4
from transformers.models.glm import modeling_glm as glm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from specexp.drafters import early_exit
from specexp.drafters.early_exit import EarlyExit
from specexp.drafters.ngram import NGram
from specexp.engine import Engine
from specexp.errors import UserError
from specexp.fast import lighter
from specexp.fast.fused import FAMILIES
from specexp.models.load import of_module
from specexp.models.memory import layers
from specexp.models.servable import cache_name
from specexp.policy import Fixed
from specexp.sampling import Sampling
from specexp.tree import Tree
from specexp.zoo import drafts

PAGE = Path(__file__).parents[2] / "specexp" / "models" / "README.md"
VARIANTS = architectures.variants()
ROWS = dict(re.findall(r"^\| (\S.*?) \| (r\S.*?) \|$", PAGE.read_text(), re.MULTILINE))


def test_pages_count_the_table():
    kinds = {kind for kind, _ in VARIANTS.values()}  # the table has some in several settings
    served = {VARIANTS[n][0] for n, outcome in ROWS.items() if outcome.startswith("right")}
    limited = {VARIANTS[n][0] for n, outcome in ROWS.items() if outcome.startswith("right up")}
    room = PAGE.parents[1] / "README.md"
    for page in (room, PAGE.parents[2] / "README.md"):
        text = " ".join(page.read_text().split())
        assert f"Of {len(kinds)} architectures of transformers, {len(served)} are served" in text
        assert "models/README.md" in text
    text = " ".join(room.read_text().split())
    assert f"({len(limited)} of them, in some settings, up to a limit below" in text
    assert f"; {len(kinds) - len(served)} are refused by a line" in text


def test_the_table_names_every_variant_of_every_architecture():
    assert list(ROWS) == list(VARIANTS)


# served by lines of their own: states, tables of positions, biases, latent or shared keys, limits
OWN = {
    "bart", "bert", "biogpt", "bloom", "deepseek_v32", "doge, few keys", "falcon, ALiBi",
    "falcon_h1", "gemma2", "gemma3n_text", "gpt2", "gptj", "inkling2_text", "inkling_text",
    "inkling_text, temperature", "jamba", "kimi_linear", "lfm2", "llama4_text, temperature",
    "longcat_flash", "mamba2", "mimo_v2_flash", "mixtral", "mpt", "opt", "phi3, longrope",
    "qwen3_next", "qwen4_exp_text", "qwen4_exp_text, n-grams", "whisper", "xglm", "zamba2",
}  # fmt: skip
RINGED = (
    "mistral", "gemma3_text", "gpt_oss", "gemma4_text", "llama4_text", "minimax", "gpt_neo",
    "inkling_text", "inkling2_text",
)  # fmt: skip
OTHERS = [name for name in VARIANTS if name not in OWN and ROWS.get(name) == "right"]
FIRST = [name for name in VARIANTS if name not in OTHERS]


@pytest.mark.parametrize("name", [*one_in(2, FIRST), *one_in(8, OTHERS)])
def test_short_texts_over_trees_are_those_of_transformers(name):
    served = architectures.outcome(name, (3, 40), ("ngram branching",))
    assert ROWS[name].startswith(served), f"| {name} | {served} |"


def fused(name: str) -> bool:
    kind, _ = VARIANTS[name]
    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind] in FAMILIES


@pytest.mark.parametrize("name", filter(fused, VARIANTS))
def test_long_texts_of_families_with_fused_passes_are_those_of_transformers(name):
    """In float32, since what is fused or compiled takes no float64."""
    served = architectures.outcome(name, (3, 266), ("ngram branching",), torch.float32)
    assert ROWS[name].startswith(served), f"| {name} | {served} |"


@pytest.mark.cuda
@pytest.mark.parametrize("name", VARIANTS)
def test_texts_on_a_gpu_are_those_of_transformers(name):
    """In float32, since a GPU's kernels take no float64. Of another transformers than the table's
    the CPU says what is right."""

    def served(device: str) -> str:
        try:
            return architectures.outcome(
                name, (3, 266), ("ngram branching",), torch.float32, device
            )
        except Exception as e:
            return f"{type(e).__name__}: {e}"

    assert ROWS[name].startswith(there := served("cuda")) or there == served("cpu")


@pytest.mark.parametrize(
    ("name", "dtype", "device"),
    [
        *one_in(3, ((name, torch.float64, "cpu") for name in RINGED)),
        *(pytest.param(name, torch.float32, "cuda", marks=pytest.mark.cuda) for name in RINGED),
        ("mistral", torch.float32, "cpu"),  # in passes of our own
    ],
)
def test_texts_many_times_as_long_as_a_ring_are_those_of_transformers(name, dtype, device):
    """Prompts of very different lengths in passes of seven tokens; windows and chunks of 24, shared
    keys, sinks. `outcome` compares the memory of the rings, too."""
    mixes = "ngram chain", "self grown"
    with architectures.short_passes():
        served = architectures.outcome(name, (1, 40, 130), mixes, dtype, device)
    assert served == "right"


@pytest.mark.slow
def test_texts_many_times_as_long_as_any_ring_are_those_of_transformers():
    configs = {n: architectures.config(kind, **own) for n, (kind, own) in VARIANTS.items()}
    spans = {name: any(layer.span for layer in layers(made)) for name, made in configs.items()}
    ringed = [name for name, span in spans.items() if span and ROWS[name] == "right"]
    assert len(ringed) > 30
    with architectures.short_passes():
        served = {n: architectures.outcome(n, (1, 40, 130), ("ngram branching",)) for n in ringed}
    assert served == dict.fromkeys(ringed, "right")


# windows, caps of scores, sinks, layers over the last tokens, states, indexers, biases
LIGHTER = (
    "gemma3_text", "gemma2", "gpt_oss", "gemma4_text", "qwen3_next", "deepseek_v32", "bloom",
)  # fmt: skip


@pytest.mark.parametrize("name", [*LIGHTER, *also(*(v for v in VARIANTS if v not in LIGHTER))])
def test_texts_of_lighter_passes_are_those_of_transformers(name):
    mixes = "ngram branching", "self grown"
    with lightened():
        served = architectures.outcome(name, (3, 266), mixes, torch.float32)
    assert ROWS[name].startswith(served), f"| {name} | {served} |"


@pytest.mark.parametrize(
    ("name", "changed", "masks"),
    [
        ("gemma3_text", {"Gemma3RMSNorm": 25, "Gemma3Attention": 4, "Gemma3MLP": 4}, False),
        ("gpt_oss", {"GptOssRMSNorm": 9, "GptOssAttention": 4}, False),
        ("deepseek_v32", {"DeepseekV32RMSNorm": 17, "DeepseekV32Attention": 4}, True),
        ("bloom", {}, True),
    ],
)
def test_module_is_changed_where_its_operations_are_kernels(name, changed, masks):
    module = architectures.build(name, torch.float32)
    with lightened():
        net = of_module(module, "it").net
    parts = [part for part in net.module.modules() if "forward" in vars(part)]
    counted = Counter(type(part).__name__ for part in parts)
    assert {kind: counted[kind] for kind in changed} == changed
    assert net.table.off == masks
    assert not any("forward" in vars(part) for part in module.modules())


@pytest.mark.parametrize("name", ["gemma2", "bamba"])
def test_a_cache_may_have_the_name_of_older_releases(name):
    module = architectures.build(name, torch.float32)
    expected, kept = architectures.greedy(module, [1, 2, 3], 8), cache_name(module)

    class Older(type(module)):
        def forward(self, past_key_values=None, position_ids=None, **inputs):
            inputs |= {kept: past_key_values, "position_ids": position_ids}
            return super().forward(**inputs)

    module.__class__ = Older
    for networks in (contextlib.nullcontext, lightened):
        with networks():
            engine = Engine(of_module(module), NGram(2), Fixed(Tree.chain(3)), Sampling(0.0))
        assert engine.target.net.kept == "past_key_values"
        assert engine.generate([[1, 2, 3]], 8).tokens == [expected]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gemma2", "olmo2", "afmoe", "granite", "falcon_h1"])
def test_lighter_passes_are_refused_for_rounding(name, dtype):
    """OLMo 2 rotates by float32; AfMoE gives attention its mask by name."""
    module = architectures.build(name, dtype)
    with lightened():
        table = of_module(module, "it").net.table
    assert not table.off


@pytest.mark.parametrize("given", [{"position_bias": torch.zeros(1)}, {"indices": torch.zeros(1)}])
def test_attention_that_is_told_more_is_refused(given):
    """Scores with a bias, or of chosen keys alone: these may make little difference on a probe."""
    q = torch.zeros(1, 1, 1, 8)
    with pytest.raises(NotImplementedError):
        lighter.Table()(SimpleNamespace(layer_idx=0), q, q, q, None, **given)
    with pytest.raises(NotImplementedError):
        lighter.Table()(SimpleNamespace(layer_idx=0), q, q, q, torch.zeros(1, 1, 1, 9))


class GatedNorm(LlamaRMSNorm):
    def forward(self, x, gate=None):
        return super().forward(x) if gate is None else super().forward(x) * gate


class NormOfGroups(LlamaRMSNorm):
    """Each of four parts of x by its own size."""

    def forward(self, x):
        size = x.float().unflatten(-1, (4, -1)).square().mean(-1, keepdim=True)
        x = x.unflatten(-1, (4, -1)) * (size + self.variance_epsilon).rsqrt().to(x.dtype)
        return self.weight * x.flatten(-2)


class Clamped(LlamaMLP):
    def forward(self, x):
        gate, up = self.gate_proj(x).clamp(max=7), self.up_proj(x).clamp(-7, 7)
        return self.down_proj(self.act_fn(gate) * up)


def test_gates_are_known_by_what_they_do():
    """One of Gemma 3n keeps the largest of its gates alone."""
    sizes = {"hidden_size": 32, "intermediate_size": 24, "hidden_activation": "gelu_pytorch_tanh"}
    swiglu, geglu = LlamaMLP(LlamaConfig(**sizes)), Gemma3MLP(Gemma3TextConfig(**sizes))
    assert (lighter.gates(swiglu), lighter.gates(geglu)) == (False, True)
    assert lighter.gates(swiglu.bfloat16()) is False
    assert lighter.gates(geglu.bfloat16()) is True
    with torch.no_grad():
        for weight in geglu.parameters():
            weight.mul_(0.1)  # so small that SiLU is near
    assert lighter.gates(geglu) is True
    for other in (torch.nn.ReLU(), torch.nn.GELU(), ACT2FN["quick_gelu"]):
        swiglu.act_fn = other
        assert lighter.gates(swiglu) is None
    assert lighter.gates(Clamped(LlamaConfig(**sizes))) is None
    config = Gemma3nTextConfig(**sizes, num_hidden_layers=1, activation_sparsity_pattern=[0.9])
    assert lighter.gates(Gemma3nTextMLP(config, layer_idx=0)) is None
    assert lighter.gates(torch.nn.Linear(8, 8)) is None


def test_norms_are_known_by_what_they_do():
    plain, shifted = LlamaRMSNorm(8), Gemma3RMSNorm(8)
    for norm in (plain, shifted):
        torch.nn.init.normal_(norm.weight)
    assert (lighter.above(plain), lighter.above(shifted)) == (0.0, 1.0)
    assert lighter.above(plain.bfloat16()) == 0.0
    plain.variance_epsilon = 1e-3
    assert lighter.above(plain) == 0.0
    plain.forward = lambda x: 1.1 * LlamaRMSNorm.forward(plain, x)
    assert lighter.above(plain) is None
    assert lighter.above(GatedNorm(8)) is None
    assert lighter.above(NormOfGroups(1024).bfloat16()) is None
    assert lighter.above(torch.nn.LayerNorm(1024, bias=False).bfloat16()) is None
    assert lighter.above(torch.nn.LayerNorm(8)) is None


def test_rotations_are_known_by_what_they_do():
    assert lighter.rotates(gemma3.apply_rotary_pos_emb)
    assert not lighter.rotates(glm.apply_rotary_pos_emb)  # pairs of neighbours
    assert not lighter.rotates(gemma4.apply_rotary_pos_emb)  # of queries alone


@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
def test_layers_that_share_keys_make_no_draft(name):
    lm = of_module(architectures.build(name), "it")
    for first in (1, 2, 3):
        with pytest.raises(
            UserError, match=r"^(early_exit cannot leave it|first [23] layers of it)"
        ):
            EarlyExit(lm, first, Sampling())
    with pytest.raises(UserError, match="no draft can be cut from a Gemma") as refusal:
        drafts.cut(lm.module, 2)
    assert "\n" not in str(refusal.value)


def test_layers_that_share_keys_are_seen_before_weights_are_read():
    request = SimpleNamespace(
        config=architectures.config("gemma3n_text"), target="it", integer=lambda default: 2
    )
    with pytest.raises(UserError, match="its last 2 layers have no keys of their own: use another"):
        early_exit.prepare(request)


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_texts_of_every_drafter_and_tree_are_those_of_transformers(name):
    served = architectures.outcome(name, architectures.LENGTHS, architectures.MIXES)
    assert served == ROWS[name], f"| {name} | {served} |"
