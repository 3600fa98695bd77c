"""8-bit weights: what is quantised and what is not, held apart from the plain, and exact."""

import copy
import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import also, in_turn, tiny_llama, tiny_tokenizer
from support import architectures, peak_memory
from support.problems import problems
from support.references import interpreted, references
from support.tape import taped
from support.tiny import NoHostReads, gpt2, slowly
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specexp import api, fitting
from specexp.errors import UserError
from specexp.fast import fused
from specexp.fast.cpu import build, passes
from specexp.fast.fused import Fused
from specexp.grids import identity
from specexp.grids.notebooks import Notebook
from specexp.measure import costs, one_pairing
from specexp.measure.exactness import certify
from specexp.measure.hardware import roofline
from specexp.measure.prompts import Prompt
from specexp.models import int8, load, memory
from specexp.models.heads import layouts
from specexp.models.lm import Unfused
from specexp.models.servable import cache_name
from specexp.sequences import Sequences
from specexp.tree import Tree
from specexp.zoo import drafts
from specexp.zoo.heads import train_heads
from specexp.zoo.known import Known

pytestmark = pytest.mark.torchao
TEXTS = ["def mean(values):", "zz", "return sum(values) / len(values)"]
NEW = 24


def marked(name: str) -> Any:
    """A parameter whose tests are marked by its name."""
    return pytest.param(name, marks=getattr(pytest.mark, name))


DEVICES = ["cpu", marked("cuda")]


def small(folder: str) -> str:
    return f"{folder}+int8"


def check(target: str, drafter: str, **more) -> list[str]:
    texts = [Prompt(0, "mine", (TEXTS[0],))]
    return problems({"target": target, "drafter": drafter, "max_new_tokens": 8} | more, texts)


def quantised(module: nn.Module, *ends: str) -> nn.Module:
    """The module with 8-bit weights in its linear layers whose names end so."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    config = Int8WeightOnlyConfig(set_inductor_config=False)
    quantize_(module, config, lambda part, name: name.endswith(ends))
    return module


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ends", [("_proj",), ("down_proj",), ("q_proj", "k_proj", "v_proj")])
@pytest.mark.parametrize("bias", [False, True])
def test_compiled_passes_read_eight_bit_weights(dtype, ends, bias, caplog):
    sizes = {"hidden_size": 72, "intermediate_size": 104, "attention_bias": bias, "mlp_bias": bias}
    module = tiny_llama(0, **sizes).to(dtype)
    for name, p in module.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(p)
    module = quantised(module, *ends)
    net = load.of_module(module, "mine").net
    assert isinstance(net, passes.Native)
    assert not caplog.text
    tokens = torch.arange(70)[None] * 7919 % module.config.vocab_size
    kinds = memory.layers(module.config, 128)

    def logits(net: Any, n: int) -> torch.Tensor:
        at, cache = fused.whole_sequence(kinds, tokens[:, :n])
        with torch.inference_mode():
            return net(tokens[:, :n], at, cache, (), None)[0]

    wide = copy.deepcopy(module).float()  # the same weights, unquantised
    for part in wide.modules():
        if isinstance(part, nn.Linear) and int8.is_quantised(part.weight):
            rows, scales = int8.scaled_rows(part.weight)
            part.weight = nn.Parameter(rows * scales)
    with torch.inference_mode():
        wanted = wide(input_ids=tokens).logits
    made = logits(net, 70)
    close = 1e-5 if dtype == torch.float32 else 0.05
    assert (made - wanted).norm() < close * wanted.norm()
    for n in (1, 2, 3, 5, 7, 17):  # whatever tokens share the pass
        assert torch.equal(logits(net, n), made[:, :n])


def test_scaled_rows_are_those_of_symmetric_weights_alone():
    def layer() -> Any:
        return quantised(nn.ModuleDict({"x_proj": nn.Linear(32, 16)}), "x_proj")["x_proj"].weight

    weight = layer()
    rows, scales = int8.scaled_rows(weight)
    assert torch.equal(rows * scales, weight.dequantize())
    assert int8.scaled_rows(torch.zeros(2, 2)) is None
    shifted = layer()
    shifted.zero_point[3] = 1
    assert int8.scaled_rows(shifted) is None, "its zero point is not 0"
    active = layer()
    active.act_quant_kwargs = object()
    assert int8.scaled_rows(active) is None, "activations are quantised, too"
    coarse = layer()
    coarse.scale = coarse.scale[:1]
    assert int8.scaled_rows(coarse) is None, "one scale for all rows"


def quantised_layers(module: nn.Module) -> list[str]:
    return [
        name
        for name, part in module.named_modules()
        if any(hasattr(p, "__tensor_flatten__") for p in part.parameters(recurse=False))
    ]


# names


def test_split_separates_the_int8_suffix(tmp_path, monkeypatch):
    assert fitting.split("sibling-3m+int8") == ("sibling-3m", "+int8")
    assert fitting.split("org/name+int8") == ("org/name", "+int8")
    for name in ("sibling-3m", "org/name", "c++", "+int8", "a+int-8"):
        assert fitting.split(name) == (name, "")
    monkeypatch.chdir(tmp_path)
    Path("odd+int8").mkdir()
    assert fitting.split("odd+int8") == ("odd+int8", "")
    assert fitting.split("odd+int8+int8") == ("odd+int8", "+int8")


def test_folder_named_int8_is_loaded_plain(tiny_folders, tmp_path):
    odd = shutil.copytree(tiny_folders[1], tmp_path / "draft+int8")
    pairing = api.load(tiny_folders[0], str(odd), gamma=2)
    assert pairing.engine.drafter.name == "draft+int8"
    assert not quantised_layers(pairing.engine.drafter.lm.module)
    pairing = api.load(tiny_folders[0], small(str(odd)), gamma=2)
    assert quantised_layers(pairing.engine.drafter.lm.module)


@pytest.mark.parametrize("place", ["target", "drafter"])
def test_unknown_quantisation_suffix_is_a_one_line_error(tiny_folders, place):
    names = dict(zip(("target", "drafter"), tiny_folders, strict=True))
    names[place] += "+int4"
    [line] = check(**names)
    assert line.endswith(f"as {names[place][:-5]}+int8, and +int4 is unknown")


def test_missing_torchao_error_names_the_install_command(tiny_folders, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == "torchao" else found(n, *a)
    )
    [line] = check(tiny_folders[0], small(tiny_folders[1]))
    assert line.endswith('+int8 needs torchao: pip install "specexp[quant]"')
    assert check(*tiny_folders) == []


def test_float64_int8_is_refused_before_and_at_loading(tiny_folders):
    [line] = check(tiny_folders[0], small(tiny_folders[1]), dtype="float64")
    assert "float64 cannot be +int8" in line
    with pytest.raises(UserError, match="float64 cannot be"):
        load.load(small(tiny_folders[1]), "mine", "float64", "cpu")


def test_model_without_linear_layers_is_refused(tmp_path):
    gpt2().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"has no nn\.Linear to quantise"):
        load.read_config(small(str(tmp_path)))


def test_quantised_checkpoint_plus_int8_is_refused():
    config = tiny_llama(0).config
    config.quantization_config = {"bits": 4}
    with pytest.raises(UserError, match=r"quantised as it is: leave out \+int8"):
        int8.check(config, "mine")


def test_draft_is_cut_from_unquantised_weights(tiny_folders):
    made = load.load(small(tiny_folders[0]), "mine", "float32", "cpu").module
    with pytest.raises(UserError, match=r"from unquantised weights: leave out \+int8"):
        drafts.cut(made, 1)


def test_heads_refuse_the_int8_suffix(tiny_folders):
    with pytest.raises(UserError, match=r"heads are read as they are; leave out \+int8"):
        layouts.read(small(tiny_folders[0]))
    with pytest.raises(UserError, match=r"leave out \+int8"):
        train_heads("medusa", small(tiny_folders[0]), quick=True)


# what is quantised


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_linear_layers_are_quantised_and_no_embedding(tmp_path, tied, dtype):
    tiny_llama(0, tie_word_embeddings=tied).save_pretrained(tmp_path)
    plain, made = (load.load(name, "mine", dtype, "cpu") for name in (tmp_path, small(tmp_path)))
    names = [n for n, m in made.module.named_modules() if isinstance(m, nn.Linear)]
    assert quantised_layers(made.module) == names
    assert "lm_head" in names
    assert quantised_layers(plain.module) == []
    embeddings = (one.module.model.embed_tokens.weight for one in (made, plain))
    assert torch.equal(*embeddings)
    head = made.module.lm_head.weight.numel()
    assert made.parameters == plain.parameters + tied * head
    assert made.dtype == plain.dtype
    assert isinstance(made.net, passes.Native if build.library() else Fused)


def test_rounding_error_is_at_most_half_a_step_per_row(tiny_folders):
    plain, made = (
        load.load(n, "x", "float32", "cpu") for n in (tiny_folders[0], small(tiny_folders[0]))
    )
    for name, part in made.module.named_modules():
        if name in quantised_layers(made.module):
            was = plain.module.get_submodule(name).weight
            step = was.abs().amax(1, keepdim=True) / 127.5
            off = (part.weight.dequantize() - was).abs()
            assert (off <= 0.51 * step).all()
            assert off.max() > 0


def test_int8_logits_match_rounded_weights(tiny_folders):
    made = load.load(small(tiny_folders[0]), "x", "float32", "cpu").module
    plain = copy.deepcopy(load.load(tiny_folders[0], "x", "float32", "cpu").module)
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    with torch.inference_mode():
        assert not torch.allclose(made(ids).logits, plain(ids).logits, atol=1e-3)
        for name in quantised_layers(made):
            rounded = made.get_submodule(name).weight.dequantize()
            plain.get_submodule(name).weight = nn.Parameter(rounded, requires_grad=False)
        assert torch.allclose(made(ids).logits, plain(ids).logits, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.compiler)])
def test_fused_int8_pass_matches_module_and_shares_weights(compiled, tiny_folders, monkeypatch):
    monkeypatch.setenv("SPECEXP_NATIVE", "on" if compiled else "off")
    made = load.load(small(tiny_folders[0]), "mine", "float32", "cpu")
    attention = made.module.model.layers[1].self_attn
    places = [
        p.weight.qdata.untyped_storage().data_ptr() for p in (attention.q_proj, attention.v_proj)
    ]
    layers = (made.net.fused if compiled else made.net).layers
    assert places[0] == places[1] == layers[1].qkv.qdata.untyped_storage().data_ptr()
    seqs = Sequences.of([[3, 1, 2], [5]], 4, slack=3)
    logits = []
    for net in (made.net, Unfused(made.module, kept=cache_name(made.module))):
        made.net = net
        made.allocate(*seqs.tokens.shape)
        made.prefill(seqs, 0, 2)
        draft = seqs.draft(Tree.chain(2).nodes("cpu"), torch.tensor([[7, 8], [9, 10]]))
        logits.append(made.verify(seqs, draft).logits)
    assert torch.allclose(*logits, atol=1e-4 if compiled else 1e-5)


class Widened(TorchDispatchMode):
    """Counts the matrices of 8-bit integers that torch turns into floats."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(result) if torch.is_tensor(x) and x.is_floating_point()]
        given = [x for x in tree_leaves(args) if torch.is_tensor(x) and x.dtype == torch.int8]
        self.count += bool(made) and any(x.dim() == 2 and min(x.shape) > 1 for x in given)
        return result


@pytest.mark.parametrize("family", ["llama", *also("gemma3_text", "granitemoehybrid")])
@pytest.mark.parametrize("how", ["torch", *map(marked, ("compiler", "interpreter"))])
def test_only_torch_widens_eight_bit_weights(family, how, monkeypatch):
    module = architectures.build(family, torch.float32)
    int8.quantise(module, "cpu")
    text = [3, 1, 4, 1, 5]
    with torch.inference_mode():
        wanted = module(input_ids=torch.tensor([text])).logits[:, -1:]
    monkeypatch.setenv("SPECEXP_NATIVE", "on" if how == "compiler" else "off")
    with interpreted() if how == "interpreter" else references(off=False):
        lm = load.of_module(module, "mine")
        lm.allocate(1, 8)
        seqs = Sequences.of([text], 2, slack=1)
        with Widened() as widened:
            lm.prefill(seqs, 0, 4)
            logits = lm.follow(seqs, 1)
    assert (logits - wanted).norm() < 1e-4 * wanted.norm()
    assert bool(widened.count) == (how == "torch")


def test_weights_not_quantised_by_rows_stay_unfused():
    from torchao.quantization import Int8WeightOnlyConfig, PerTensor, quantize_

    module = tiny_llama(0)
    quantize_(module, Int8WeightOnlyConfig(granularity=PerTensor(), set_inductor_config=False))
    assert isinstance(load.of_module(module).net, Unfused)


# held apart, and reckoned


def test_plain_and_int8_weights_are_loaded_apart(tiny_folders):
    target, draft = tiny_folders
    both = [api.load(target, name, gamma=2) for name in (draft, small(draft))]
    plain, made = (pairing.engine.drafter.lm.module for pairing in both)
    assert both[0].target.module is both[1].target.module
    assert quantised_layers(made)
    assert not quantised_layers(plain)
    again = api.load(target, small(draft), gamma=3)
    assert again.engine.drafter.lm.module is made
    assert [pairing.named for pairing in both] == [draft, small(draft)]
    assert [pairing.drafter for pairing in both] == ["draft", "draft+int8"]


@pytest.mark.parametrize(("target", "draft"), [(0, 1), (1, 0), (1, 1)])
def test_self_draft_shares_weights_only_at_equal_precision(tiny_folders, target, draft):
    names = tiny_folders[0], small(tiny_folders[0])
    pairing = api.load(names[target], names[draft], gamma=3, temperature=1.0)
    modules = pairing.target.module, pairing.engine.drafter.lm.module
    assert [bool(quantised_layers(m)) for m in modules] == [bool(target), bool(draft)]
    assert (modules[0] is modules[1]) == (target == draft)
    kept = pairing.generate(TEXTS, NEW).trace.acceptance
    assert (kept.rate == 1) == (target == draft)


def test_result_key_tells_int8_from_plain(tiny_folders):
    target, draft = tiny_folders
    notebook = Notebook(Path("own.ipynb"), {}, frozenset(), "a" * 64)
    of = [
        identity.identity_of({"target": t, "drafter": d}, notebook, Known(), False).parts
        for t, d in ((target, draft), (target, small(draft)), (small(target), draft))
    ]
    assert len({parts["models"] for parts in of}) == 3
    name, digest = identity.facts_of_model(small(draft))[0]
    assert digest == identity.facts_of_model(draft)[0][1]
    assert name == "draft+int8"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_predicted_int8_bytes_match_the_loaded_module(tiny_folders, dtype):
    for folder in tiny_folders:
        made = load.load(small(folder), "mine", dtype, "cpu")
        config = load.read_config(small(folder))
        reckoned = load.weight_bytes(config, load.DTYPES[dtype])
        assert reckoned == sum(x.nbytes for x in int8.plain_tensors(made.module.parameters()))
        assert reckoned < load.weight_bytes(load.read_config(folder), load.DTYPES[dtype])
        held = peak_memory.weights([made.module]) - sum(b.nbytes for b in made.module.buffers())
        assert held == reckoned
        embedding = made.module.get_input_embeddings().weight
        assert roofline.weight_bytes(made.module, 1) == reckoned - embedding[1:].nbytes


def test_cost_table_and_metrics_count_int8_bytes(tiny_folders):
    target, draft = tiny_folders
    pairing = api.load(small(target), small(draft), gamma=2)
    sizes = [load.weight_bytes(load.read_config(small(f)), torch.float32) for f in tiny_folders]
    assert costs.about(pairing.engine)["weight_bytes"] == sizes[0]
    assert one_pairing.added_bytes(pairing.engine) == sizes[1]


def test_memory_check_counts_int8_weights(tiny_folders, monkeypatch):
    target = tiny_folders[0]
    sizes = [load.weight_bytes(load.read_config(n), torch.float32) for n in (target, small(target))]
    room = 2_000_000
    monkeypatch.setattr(memory, "free_memory", lambda device: sum(sizes) + room)
    assert check(target, small(target)) == []  # two modules of one config
    monkeypatch.setattr(memory, "free_memory", lambda device: sizes[0] + room // 100)
    assert len(check(target, small(target))) == 1
    monkeypatch.setattr(memory, "free_memory", lambda device: sizes[1])
    monkeypatch.setattr(load, "_IN_USE", {})
    with pytest.raises(UserError, match="the weights of mine in float32 take"):
        load.load(small(target), "mine", "float32", "cpu")  # a CPU holds them whole first


# exact


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("quantised", "shape"),
    in_turn([(0, 1), (1, 0), (1, 1)], [("match", "chain"), ("match", "2x2"), ("reject", "chain")]),
)
def test_int8_greedy_text_matches_the_target(tiny_folders, quantised, shape, device):
    rule, tree = shape
    names = [name + "+int8" * q for name, q in zip(tiny_folders, quantised, strict=True)]
    pairing = api.load(*names, gamma=3, rule=rule, tree=tree, device=device)
    ids = pairing.encode(TEXTS)
    pairing.engine.eos = ()
    assert certify(pairing.engine, ids, NEW).divergences == []
    if device == "cpu":
        alone = [slowly(pairing.target.module, row, NEW) for row in ids]
        assert pairing.generate(TEXTS, NEW).tokens == alone


@pytest.mark.parametrize(
    ("drafter", "dtype"), in_turn(["draft", "early_exit:1", "ngram"], ["float32", "bfloat16"])
)
def test_int8_sampled_text_matches_the_target(tiny_folders, drafter, dtype):
    name = small(tiny_folders[1]) if drafter == "draft" else drafter
    pairing = api.load(small(tiny_folders[0]), name, gamma=3, temperature=0.9, dtype=dtype)
    assert certify(pairing.engine, pairing.encode(TEXTS), NEW).bugs == 0


def test_int8_round_reads_no_host_value_and_replays(tiny_folders):
    pairing = api.load(small(tiny_folders[0]), small(tiny_folders[1]), gamma=3)
    tree, ids = Tree.chain(3), pairing.encode(TEXTS)
    made = pairing.apart().engine
    seqs = made.begin(Sequences.of(ids, NEW, slack=tree.room))
    made.round(seqs, tree)
    with NoHostReads():
        made.round(seqs, tree)
    recorded = taped(pairing.apart().engine)
    assert recorded.generate(ids, NEW).tokens == pairing.engine.generate(ids, NEW).tokens
    assert recorded.recorder.tape.replays > 0


def test_eagle_drafts_for_an_int8_target():
    pairing = api.load("target-10m+int8", "eagle", gamma=3)
    assert certify(pairing.engine, pairing.encode(TEXTS[:1]), 16).bugs == 0


def test_crossed_draft_may_be_int8(tiny_folders, tmp_path):
    tokenizer = tiny_tokenizer("while True: break\n" * 3)
    tiny_llama(2, 1, vocab=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    pairing = api.load(tiny_folders[0], f"crossed:{small(tmp_path)}", gamma=2)
    assert quantised_layers(pairing.engine.drafter.lm.module)
    assert certify(pairing.engine, pairing.encode(TEXTS), NEW).bugs == 0
