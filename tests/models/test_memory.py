"""What is reckoned from configs alone is what is there, and what does not fit is refused."""

import gc
import logging
import shutil
import weakref
from functools import partial

import pytest
import torch
from conftest import tiny_llama
from support import architectures, hybrids, peak_memory
from support.problems import problems
from support.tiny import engine, module
from transformers import AutoModelForCausalLM, DeepseekV3Config, FalconConfig, LlamaConfig

from specexp import api, rules
from specexp.api import resolve_device
from specexp.drafters.model import DraftModel
from specexp.engine import Engine
from specexp.errors import UserError
from specexp.fast.cpu.passes import Native
from specexp.fast.cuda_graphs import CudaTape
from specexp.measure import feasible
from specexp.measure.prompts import Prompt
from specexp.models import load, memory, recurrent
from specexp.models.load import of_module
from specexp.models.memory import (
    Need,
    gib,
    law_bytes,
    pass_bytes,
    row_bytes,
    slot_bytes,
    work_bytes,
)
from specexp.policy import Fixed
from specexp.sampling import Sampling
from specexp.sequences import Sequences
from specexp.tree import Tree
from specexp.zoo.known import Known

CPU = torch.device("cpu")
NETS = {
    "grouped": {}, "a head each": {"num_key_value_heads": 4}, "one key": {"num_key_value_heads": 1},
    "wide": {"intermediate_size": 160, "head_dim": 16},
}  # fmt: skip


# the measure itself


def test_alive_counts_storage_once_and_until_freed():
    with peak_memory.Alive() as alive:
        x = torch.zeros(1000)
        y = x.view(10, 100)[3:]
        y += 1
        assert alive.now == 4000
        z = [x * i for i in range(3)]
        assert alive.now == 16000
        del z, y
        x.add_(1)
        assert (alive.now, alive.peak) == (4000, 16000)
        w = torch.zeros(2000)
    assert alive.peak == 16000
    del x, w
    gc.collect()
    assert alive.now == 0


def test_peak_excludes_memory_held_before():
    kept = torch.zeros(5000)
    assert 20000 <= peak_memory.peak(CPU, lambda: [(kept + 1).sum(), (kept[:10] * 2).sum()]) < 20100


# what is reckoned


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NETS)
def test_pass_bytes_match_the_measured_peak(name, dtype, monkeypatch):
    monkeypatch.setattr(Native, "by_length_up_to", 0)  # compiled passes take less
    net = of_module(tiny_llama(0, 3, **NETS[name]).to(dtype))
    for batch, prompt in ((1, 100), (6, 30)):
        seqs = Sequences.of([[3] * prompt] * batch, 4, slack=2)
        net.allocate(*seqs.tokens.shape)
        net.prefill(seqs, 0, 2)
        found = peak_memory.peak(CPU, partial(net.prefill, seqs, 0, prompt))
        size = dtype.itemsize
        reckoned = pass_bytes(net.config, size, batch, prompt, seqs.tokens.shape[1])
        assert reckoned <= found <= 1.05 * reckoned


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("rule", ["match", "reject", "typical"])
def test_law_bytes_bound_the_measured_peak(rule, temperature):
    """On a vocabulary so large that nothing else matters."""
    V, law = 20_000, Sampling(temperature)
    nets = [of_module(tiny_llama(i, 1, vocab=V)) for i in range(2)]
    for tree in (Tree.chain(5), Tree.branching(3, 2)):
        made = Engine(nets[0], DraftModel(nets[1], law), Fixed(tree), law, rules.of(rule))
        seqs = made.begin(Sequences.of([[3] * 9] * 4, 30, slack=12))
        made.round(seqs, tree)
        a_logit = peak_memory.peak(CPU, partial(made.round, seqs, tree)) / (4 * len(tree) * V) - 4
        assert a_logit <= 1.05 * law_bytes(rule, temperature) + 4
    assert a_logit > law_bytes(rule, temperature) / 4


@pytest.mark.parametrize("drafter", ["target", "draft", "ngram"])
def test_predicted_run_memory_matches_the_peak(tiny_folders, monkeypatch, drafter):
    target, draft = tiny_folders
    name = {"target": target, "draft": draft}.get(drafter, drafter)
    pairing = api.load(target, name, gamma=3)
    asked = pairing, ["def mean(values):" * 3, "zz"], [1, 4], 8
    for row in peak_memory.peaks(*asked)["rows"]:
        assert 0.8 < row["ratio"] < 1.05
    monkeypatch.setattr(Native, "by_length_up_to", 0)
    monkeypatch.setenv("SPECEXP_GRAPHS", "off")  # a replay keeps what is used in between
    found = peak_memory.peaks(*asked)
    for row in found["rows"]:
        assert 0.95 < row["ratio"] < 1.05
    for kept in found["models"]:
        assert kept["stated"] == kept["held"]
    parameters = dict.fromkeys(p for lm in pairing.engine.models for p in lm.module.parameters())
    held = sum(p.nbytes for p in parameters)
    assert found["rows"][0]["weights"] == pytest.approx(held, rel=0.01)


def test_weight_and_kv_bytes_need_no_loading(tiny_folders, monkeypatch):
    for folder in tiny_folders:
        loaded = load.load(folder, "mine", "float32", "cpu")
        config = load.read_config(folder)
        monkeypatch.setattr(torch.Tensor, "normal_", None)  # nothing may be initialised
        assert load.weight_bytes(config, torch.float32) == 4 * loaded.parameters
        assert load.weight_bytes(config, torch.bfloat16) == 2 * loaded.parameters
        assert row_bytes(slot_bytes(config, 4), 9) == loaded.kv_bytes(9)
        monkeypatch.undo()
    config.quantization_config = {"bits": 4}
    assert load.weight_bytes(config, torch.float32) == 0


SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
LATENT = {
    "intermediate_size": 64, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 2, "kv_lora_rank": 16, "q_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}  # fmt: skip
ATTENTION = {
    "a key for two heads": LlamaConfig(**SHAPE, num_key_value_heads=2),
    "one key": FalconConfig(**SHAPE),
    "a key a head": FalconConfig(**SHAPE, multi_query=False),
    "a key a head, from fewer": FalconConfig(**SHAPE, new_decoder_architecture=True,
                                             num_kv_heads=2),
    "latent": DeepseekV3Config(**SHAPE, **LATENT),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENTION)
def test_kv_bytes_match_the_cache(name):
    net = of_module(AutoModelForCausalLM.from_config(ATTENTION[name]))
    seqs = Sequences.of([[3] * 9] * 2, 4, slack=2)
    net.allocate(*seqs.tokens.shape)
    net.prefill(seqs, 0, 8)
    assert net.kv_bytes(net.cache.size) == peak_memory.held_per_row(net)


def test_needed_covers_the_cache_of_a_crossed_draft(tiny_folders):
    base = {"target": tiny_folders[0], "gamma": 2, "max_new_tokens": 20, "temperature": 0.0}
    for name, slots in ((tiny_folders[1], 1), (f"crossed:{tiny_folders[1]}", 3)):
        pairing = api.load(tiny_folders[0], name, gamma=2)
        pairing.generate(["def mean(values):"], 20)
        models = pairing.engine.models
        held = sum(peak_memory.held_per_row(m) * m.cache.batch for m in models)
        [options] = feasible.each_pairing(base | {"drafter": name})
        plan = feasible.candidate(options, 1 << 20, Known())
        tokens = len(pairing.encode(["def mean(values):"])[0]) + 20
        assert plan.limits.slots == slots
        assert held <= feasible.needed(plan, 1, tokens).cache


@pytest.mark.parametrize(("drafter", "taps"), [("ngram", 0), ("medusa", 1), ("eagle", 3)])
def test_needed_leaves_out_states_that_heads_read(drafter, taps):
    """Those of 4000 tokens, and a copy of them where the passes are put together."""
    named = {"target": "target-10m", "drafter": drafter, "gamma": 1, "temperature": 0.0}
    [options] = feasible.each_pairing(named)
    plan = feasible.candidate(options, 1 << 20, Known())
    assert len(api.load(**named).engine.drafter.taps) == taps
    states = 64 * 4000 * taps * 4 * plan.models[0].hidden_size
    assert plan.limits.taps == taps
    assert feasible.needed(plan, 64, 4100, 100).work >= 2 * states
    assert taps or feasible.needed(plan, 64, 4100, 100) == feasible.needed(plan, 64, 4100)


STATEFUL = [name for name in hybrids.CONFIGS if name != "recurrent_gemma"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", STATEFUL)
def test_state_bytes_need_no_weights(name, dtype):
    net = AutoModelForCausalLM.from_config(hybrids.CONFIGS[name](), dtype=dtype)
    held = recurrent.state_bytes(of_module(net).net.parts, 5, 1)
    assert load.state_bytes(net.config, dtype, 5, 1) == held > 0


def test_few_modules_without_weights_are_kept(monkeypatch):
    monkeypatch.setattr(load, "_ON_META", kept := {})
    monkeypatch.setattr(load, "MOST_ON_META", 2)
    small = {"vocab_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    for width in (32, 64, 32, 96):
        load.weight_bytes(LlamaConfig(**small, hidden_size=width), torch.float32)
    assert [module.config.hidden_size for module in kept.values()] == [32, 96]


def test_state_bytes_of_experts_depend_on_no_routing():
    net = architectures.build("qwen3_next")
    held = recurrent.state_bytes(of_module(net).net.parts, 5, 1)
    assert load.state_bytes(net.config, net.dtype, 5, 1) == held > 0


@pytest.fixture(scope="module")
def hybrid_folder(tiny_folders, tmp_path_factory):
    folder = shutil.copytree(tiny_folders[0], tmp_path_factory.mktemp("hybrid") / "hybrid")
    config = hybrids.CONFIGS["qwen3_5"]()
    config.vocab_size = load.read_config(folder).vocab_size
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(("drafter", "tree"), [("ngram", "chain"), ("", "chain"), ("", "3x2")])
def test_needed_covers_the_states_of_every_slot_of_a_round(hybrid_folder, drafter, tree):
    named = {"target": hybrid_folder, "drafter": drafter or hybrid_folder, "gamma": 3, "tree": tree}
    pairing = api.load(**named)
    pairing.generate(["def mean(values):"] * 4, 20)
    [options] = feasible.each_pairing(named | {"max_new_tokens": 20})
    plan = feasible.candidate(options, 1 << 20, Known())
    tokens = len(pairing.encode(["def mean(values):"])[0]) + 20
    needed = feasible.needed(plan, 4, tokens).cache
    for each in (model := pairing.engine.models):
        needed -= 4 * each.kv_bytes(each.cache.size)
        held = (each.cache.states.of_row(row) for row in range(4))
        needed -= sum(x.nbytes for states in held for x in states)
    assert needed == 0, f"of {len(model)} caches"


def test_check_refuses_states_that_do_not_fit(hybrid_folder, little):
    weights = load.weight_bytes(load.read_config(hybrid_folder), torch.float32)
    little(weights + 2_000_000)
    [line] = check([hybrid_folder, "ngram"], batch=4096)
    fits = int(line.split("a batch of ")[1].split()[0])
    plain = slot_bytes(load.read_config(hybrid_folder).get_text_config(), 4)
    assert check([hybrid_folder, "ngram"], batch=fits) == []
    assert fits * row_bytes(plain, 64) < 1_000_000, "keys alone would fit in a batch of twice that"


def test_gib_and_need_are_readable():
    assert [gib(x * 2**30) for x in (0.0042, 0.1, 12.34, 123.4)] == ["0.004", "0.1", "12.3", "123"]
    said = str(Need(2**30, 2**29, 2**28))
    assert said == "1.8 GiB (1.0 of weights, 0.5 of keys, values and states, 0.2 to work in)"


def test_work_bytes_is_the_largest_phase():
    config = module().config
    asked = {"itemsize": 4, "B": 2, "S": 100, "law": 8}
    reading = work_bytes([config], prompt=90, nodes=1, **asked)
    assert reading == pass_bytes(config, 4, 2, 90, 100)
    assert work_bytes([config], prompt=9000, nodes=1, **asked) == pass_bytes(config, 4, 2, 512, 100)
    wide = {"itemsize": 4, "B": 2, "S": 100, "law": 8000}
    assert work_bytes([config], prompt=1, nodes=6, **wide) == 2 * 6 * 32 * 8004
    seen = 2 * 90 * 3 * 32 * 4
    assert work_bytes([config], prompt=90, nodes=1, taps=3, **asked) == reading + seen


# what is refused


@pytest.fixture
def little(monkeypatch):
    """little(bytes): so much is free from now on."""

    def set_free(size: int):
        monkeypatch.setattr(memory, "free_memory", lambda device: size)

    return set_free


def check(folders, **more):
    texts = [Prompt(0, "mine", ("def mean(values):",))]
    named = {"target": folders[0], "drafter": folders[1], "gamma": 2, "max_new_tokens": 20}
    return problems(named | more, texts)


def test_check_refuses_before_loading_and_names_what_fits(tiny_folders, little, monkeypatch):
    little(2**40)
    assert check(tiny_folders, batches=[1, 4096]) == []
    target, draft = (load.read_config(folder) for folder in tiny_folders)
    weights = sum(load.weight_bytes(c, torch.float32) for c in (target, draft))
    monkeypatch.setattr(load.transformers.AutoModelForCausalLM, "from_pretrained", None)
    for free in (weights + 2_000_000, weights + 20_000_000):
        little(free)
        [line] = check(tiny_folders, batches=[1, 4096])
        assert "batch 4096" in line
        fits = int(line.split("a batch of ")[1].split()[0])
        assert 1 < fits < 4096
        assert check(tiny_folders, batches=[fits]) == []
        assert check(tiny_folders, batches=[fits + 1]) != []
    little(weights + 1000)
    [line] = check(tiny_folders)
    assert line.endswith("use --dtype bfloat16")
    little(weights // 2 + 1000)
    [line] = check(tiny_folders, dtype="bfloat16", batch=3)
    assert "choose a model of at most 0.0 billion parameters, in bfloat16" in line


def test_check_reports_the_pairing_that_needs_most(tiny_folders, little):
    little(1000)
    [line] = check(tiny_folders, drafters=["ngram", tiny_folders[1]], gammas=[1, 3])
    target, draft = (load.read_config(folder) for folder in tiny_folders)
    weights = sum(load.weight_bytes(c, torch.float32) for c in (target, draft))
    assert f"({gib(weights)} of weights" in line


def test_self_draft_weights_count_once(tiny_folders, little):
    target = load.read_config(tiny_folders[0])
    little(int(1.9 * load.weight_bytes(target, torch.float32)))
    assert check([tiny_folders[0], tiny_folders[0]]) == []


def test_load_refuses_weights_larger_than_memory(tiny_folders, little, monkeypatch):
    little(5000)
    monkeypatch.setattr(load, "_IN_USE", {})
    with pytest.raises(UserError, match=r"weights of mine in float32 take .* are free on cpu"):
        load.load(tiny_folders[0], "mine", "float32", "cpu")


@pytest.mark.parametrize(
    ("raised", "why"),
    [(RuntimeError("The NVIDIA driver is too old (found 11040).\nUpdate it."), "too old"),
     (AssertionError("Torch not compiled with CUDA enabled"), "not compiled with CUDA")],
)  # fmt: skip
def test_gpu_that_torch_cannot_use_goes_unmentioned(raised, why, tmp_path, monkeypatch, caplog):
    def init() -> None:
        raise raised

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(memory, "DEV", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with caplog.at_level(logging.WARNING, "specexp"):
        assert resolve_device("auto") == "cpu"
        assert not caplog.records
        (tmp_path / "nvidiactl").touch()  # of a driver that has found no GPU
        (tmp_path / "nvidia0").touch()
        assert resolve_device("auto") == resolve_device("cpu") == "cpu"
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert resolve_device("auto") == "cpu"
    [line] = [record.getMessage() for record in caplog.records]
    assert why in line
    assert line.startswith("no CUDA device is available (")
    assert line.endswith("): running on the CPU")


def test_allocate_error_names_the_batch_that_fits(little):
    target = of_module(module())
    little(target.kv_bytes(1000))
    said = r"batch 99 x 100 tokens needs .* GiB .* a batch of at most 10, or fewer tokens"
    with pytest.raises(UserError, match=said):
        target.allocate(99, 100)
    with pytest.raises(UserError, match="are free: use fewer tokens"):  # not even one row fits
        target.allocate(99, 1001)
    target.allocate(10, 100)


def test_features_of_eagle_count_beside_its_cache(monkeypatch):
    """They are as large, here; and the old ones leave their memory to the new ones."""
    drafter = engine("eagle3").drafter
    drafter.allocate(10, 100)
    free = 10 * drafter.lm.kv_bytes(100)
    assert drafter.features.nbytes == free
    old, gone = weakref.ref(drafter.features), []
    monkeypatch.setattr(memory, "free_memory", lambda device: gone.append(old() is None) or free)
    with pytest.raises(UserError, match=r"cache of eagle3 of target .* a batch of at most 5, "):
        drafter.allocate(10, 100)
    assert gone == [True]
    drafter.allocate(5, 100)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["model", "ngram"])
def test_predicted_run_memory_matches_the_peak_on_a_gpu(kind):
    """The zoo's pair; within 5 % of what is reckoned, unless an operation takes room of its own."""
    pairing = api.load(drafter=kind, gamma=5, dtype="bfloat16", device="cuda")
    found = peak_memory.peaks(pairing, ["def mean(values):\n    return" * 8], [8, 64], 32)
    for row in found["rows"]:
        assert 0.8 < row["ratio"] < 1.2


def test_free_memory_of_a_gpu_leaves_out_what_is_kept_for_graphs(monkeypatch):
    def segment(total, active, device=0, pool=(0, 0)):
        return {"total_size": total, "active_size": active, "device": device,
                "segment_pool_id": pool}  # fmt: skip

    segments = [segment(50, 20), segment(8, 8), segment(70, 10, pool=(0, 3)), segment(90, 0, 1)]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert memory.free_memory(torch.device("cuda:0")) == 1030
    assert memory.free_memory(torch.device("cuda")) == 1090


def test_free_memory_of_a_gpu_leaves_out_what_was_kept_for_graphs_that_are_gone(monkeypatch):
    left = [1000]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: left.append(1400))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", list)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (left[-1], 2000))
    assert memory.free_memory(torch.device("cuda:0")) == 1400


@pytest.mark.cuda
def test_free_memory_of_a_gpu_is_told_by_its_allocator(monkeypatch):
    """As if no other process had any: other tests run on the same GPU."""
    device, whole = torch.device("cuda"), 1 << 40

    def left(device):
        return whole - torch.cuda.memory_reserved(device), whole

    monkeypatch.setattr(torch.cuda, "mem_get_info", left)
    torch.cuda.empty_cache()
    before = memory.free_memory(device)
    held = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    assert before - memory.free_memory(device) >= held.nbytes
    del held
    assert before - memory.free_memory(device) < 32 << 20
    replay, twos = CudaTape(device).record(
        lambda: torch.ones(64 << 20, dtype=torch.uint8, device=device).add_(1), None
    )
    assert before - memory.free_memory(device) >= twos.nbytes
    del replay, twos
    assert before - memory.free_memory(device) < 32 << 20
