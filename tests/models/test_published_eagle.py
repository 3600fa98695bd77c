"""EAGLE heads in the layouts of their publishers draft what an independent definition says."""

import json
import re

import pytest
import torch.nn.functional as F
from conftest import one_in, tiny_llama, tiny_tokenizer
from safetensors.torch import save_file
from support.norms import DEFAULTS
from support.published import EPS, HEAD, HEADS, HIDDEN, KEYS, THETA, E, Published

import specexp
from specexp.sequences import Sequences
from specexp.tree import Tree

L = 12


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A target of twelve layers: its folder, and itself in float64."""
    tokenizer = tiny_tokenizer("def mean(values): return sum(values) / len(values)\n" * 3)
    net = tiny_llama(0, L, vocab=len(tokenizer))
    folder = tmp_path_factory.mktemp("published") / "target"
    net.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, net.double().eval()


def config(vocab: int, **own):
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": E,
        "intermediate_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": KEYS,
        "head_dim": HEAD, "num_hidden_layers": 1, "vocab_size": vocab, "rms_norm_eps": EPS,
        "rope_theta": THETA, "rope_scaling": None, "max_position_embeddings": 128,
        "hidden_act": "silu", "tie_word_embeddings": False, "draft_vocab_size": 40,
    } | own  # fmt: skip


def speculators(**own):
    inner = own.pop("layer", {})
    return lambda vocab: {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0", "draft_vocab_size": 40, "norm_before_residual": False,
        "target_hidden_size": None, "eagle_aux_hidden_state_layer_ids": None,
        "transformer_layer_config": {
            k: v for k, v in config(vocab, **inner).items() if k != "draft_vocab_size"
        },
    } | own  # fmt: skip


def plain(**own):
    return lambda vocab: config(vocab, **own)


def midlayer(name):
    return name.replace("layers.0.", "midlayer.")


def deep(name):
    """As ModelOpt's Megatron exporter writes several layers."""
    name = re.sub(r"^layers\.([1-9])\.input_layernorm", r"layers.\1.hidden_norm", name)
    return re.sub(r"^layers\.", "midlayer.", name)


def same(name):
    return name


NAMED = "eagle_aux_hidden_state_layer_ids"
OLDER = ("low", "mid", "high")
ON = {"use_aux_hidden_state": True}
# publisher: (the config, the names of the tensors, what they are)
EAGLE3 = {
    "yuhuili": (plain(architectures=["LlamaForCausalLM"]), midlayer, Published()),
    "yuhuili, of another width": (
        plain(hidden_size=16, target_hidden_size=E), midlayer,
        Published(width=16, own=("embed_tokens", "lm_head")),
    ),
    "AngelSlim": (
        plain(model_type="qwen3", tie_word_embeddings=True), midlayer, Published(),
    ),
    "SpecForge": (
        plain(eagle_config={NAMED: [1, 5, 8], **ON}), midlayer, Published(),
    ),
    "SpecForge, other layers": (
        plain(eagle_config={NAMED: [3, 4, 10], **ON}), midlayer, Published(reads=(4, 5, 11)),
    ),
    "SpecForge 3.1": (
        plain(fc_norm=True, norm_output=True), midlayer,
        Published(norms=("fc_norm", "norm_output")),
    ),
    "SpecForge, biases of Qwen 2": (
        plain(model_type="qwen2", attention_bias=True), midlayer, Published(bias="qkvo"),
    ),
    "SGLang's older norms": (
        plain(use_aux_norm=True),
        lambda n: re.sub(r"fc_norm\.(\d)", lambda m: f"aux_norm_{OLDER[int(m[1])]}", midlayer(n)),
        Published(norms=("fc_norm",)),
    ),
    "ModelOpt": (
        plain(eagle_config={NAMED: [1, 5, 8], **ON, "parallel_draft_step": 1}), same, Published(),
    ),
    "ModelOpt, two layers": (
        plain(num_hidden_layers=2, draft_vocab_size=None, eagle_config={NAMED: [1, 5, 8], **ON}),
        same, Published(layers=2, drafted=0),
    ),
    "ModelOpt by Megatron, two layers": (
        plain(num_hidden_layers=2, architectures=["LlamaForCausalLMEagle3Deep"],
              eagle_config={NAMED: [1, 5, 8], **ON}),
        deep, Published(layers=2),
    ),
    "ModelOpt, of the last state alone": (
        plain(eagle_config={NAMED: [], "use_aux_hidden_state": False}), midlayer,
        Published(reads=(L + 1,), fused=False),
    ),
    "ModelOpt, the last layer before its norm": (
        plain(eagle_config={NAMED: [8, 10, 12], **ON, "norm_before_fc": True}), midlayer,
        Published(reads=(8, 10, 12), norms=("norm_before_fc",)),
    ),
    "TensorRT-LLM's name of a norm": (
        plain(eagle_config={"return_hidden_post_norm": True}), midlayer,
        Published(norms=("norm_output",)),
    ),
    "no head of its own": (
        plain(draft_vocab_size=None), midlayer, Published(own=(), drafted=0),
    ),
    "another activation": (
        plain(hidden_act="gelu_pytorch_tanh"), midlayer,
        Published(act=lambda x: F.gelu(x, approximate="tanh")),
    ),
    "all names below model": (
        plain(), lambda n: n if n in ("d2t", "t2d", "lm_head.weight") else f"model.{midlayer(n)}",
        Published(),
    ),
    "RedHatAI": (speculators(), same, Published(own=("embed_tokens", "lm_head"))),
    "RedHatAI, today's": (
        speculators(**{NAMED: [2, 5, 10], "fc_norm": False} | dict.fromkeys(DEFAULTS, True)), same,
        Published(reads=(2, 5, 10), norms=DEFAULTS, own=("embed_tokens", "lm_head")),
    ),
    "RedHatAI, layers of Qwen 3": (
        speculators(layer={"model_type": "qwen3", "attention_bias": False}), same,
        Published(normed=True, own=("embed_tokens", "lm_head")),
    ),
    "RedHatAI, two layers of Qwen 3": (
        speculators(layer={"model_type": "qwen3", "num_hidden_layers": 2}), same,
        Published(normed=True, layers=2, own=("embed_tokens", "lm_head")),
    ),
    "speculators, biases": (
        speculators(layer={"attention_bias": True, "mlp_bias": True}), same,
        Published(bias="qkvom"),
    ),
}  # fmt: skip
EAGLE1 = {
    "yuhuili": ({}, {"bias": "f", "own": ("embed_tokens",)}),
    "yuhuili, without a bias": ({"bias": False}, {}),
    "yuhuili, of Qwen 2": ({"qkv_bias": True}, {"bias": "fqkv"}),
    "two layers": ({"num_hidden_layers": 2}, {"bias": "f", "layers": 2}),
    "a head in the file": ({}, {"bias": "f", "own": ("lm_head",)}),
}


def put(folder, target, settings, named, published):
    """The folder of a checkpoint."""
    vocab = target.config.vocab_size
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings(vocab)))
    held = {named(name): tensor for name, tensor in published.made(vocab).items()}
    save_file(held, folder / "model.safetensors")
    return folder


def check_drafts(target, drafter, says):
    """Rounds of ragged rows; in some, tokens are accepted."""
    folder, net = target
    pair = specexp.load(
        str(folder), drafter, 3, dtype="float64", temperature=3.0, rule="match", seed=3
    )
    made = pair.engine
    made.drafter.sampling = specexp.Sampling()
    seqs = made.begin(Sequences.of([[5, 9, 7, 9, 40], [1, 2], [33, 8, 6]], 30, slack=4))
    for _ in range(4):
        texts = [row[:n] for row, n in zip(seqs.tokens.tolist(), seqs.length.tolist(), strict=True)]
        report = made.round(seqs, Tree.chain(3)).tolist()
        assert [row[-3:] for row in report] == [says(net, text, 3) for text in texts]


@pytest.mark.parametrize(("settings", "named", "published"), one_in(2, EAGLE3.values()), ids=EAGLE3)
def test_eagle3_of_each_publisher_drafts_by_the_definition(
    tmp_path, target, settings, named, published
):
    folder = put(tmp_path / "head", target[1], settings, named, published)
    check_drafts(target, f"eagle:{folder}", published.says)


@pytest.mark.parametrize(("own", "made"), EAGLE1.values(), ids=EAGLE1)
def test_eagle1_of_each_publisher_drafts_by_the_definition(tmp_path, target, own, made):
    published = Published(reads=(L + 1,), concatenates=False, drafted=0, **{"own": ()} | made)
    settings = plain(architectures=["LlamaForCausalLM"], draft_vocab_size=None, **own)
    folder = put(tmp_path / "head", target[1], settings, same, published)
    check_drafts(target, f"eagle:{folder}", published.says)
