"""A GPU's kernels without one: whole passes and rounds in Triton's interpreter, and what kernels
need of two cards for which they are compiled."""

import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from conftest import also, in_turn, one_in, tiny_llama
from support import architectures
from support.gpu_kernels import calls
from support.references import interpreted, references
from support.tiny import DRAFTERS, PROMPTS, Even, engine
from test_fused import fails, made, passed, unfused
from torch import is_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specexp import ops
from specexp.engine import Engine, judged
from specexp.fast import fused, lighter
from specexp.fast.fused import AttentionInfo, Fused
from specexp.models import lm, load
from specexp.models.cache import SlotCache
from specexp.models.lm import Forward
from specexp.models.load import of_module
from specexp.models.memory import Layer
from specexp.rules import Block, Match, Reject
from specexp.sampling import TOKEN, Noise, Sampling
from specexp.sequences import Sequences
from specexp.serving.engine_rows import EngineRows
from specexp.tree import Branches, Tree

TESTS = Path(__file__).parents[1]
SHARED = {80: 99 * 1024, 90: 227 * 1024}  # bytes of a block; the first also of smaller cards
REGISTERS = 65536  # of a block
SPILLED = 16  # bytes of a thread: the four registers by which attention over tiles of 64 is short


def compiled(shared: Path, *what: object) -> Any:
    """What support/compiled.py says in a process of its own: here kernels are interpreted."""
    folder = shared / "triton"
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    environment = {"PYTHONPATH": path, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    run = subprocess.run(
        [sys.executable, "-m", "support.compiled", *map(str, what)], capture_output=True,
        env=os.environ | environment, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


@pytest.mark.triton
def test_layer_launches_or_moves_more_than_it_must(shared):
    for said in compiled(shared, "layer"):
        assert [launch["kernel"] for launch in said["launches"]] == [
            "rotate_kernel", "attention_kernel", "product_kernel", "add_norm_kernel",
            "product_swiglu_kernel", "product_kernel", "add_norm_kernel", "product_kernel",
        ]  # fmt: skip
        for launch in said["launches"]:
            print(f"{launch['kernel']:>21} {launch['bytes']:>12,} bytes")
        moved = sum(launch["bytes"] for launch in said["launches"])
        print(f"{moved / said['least']:>21.3f} of the least, {said['least']:,} bytes")
        assert 1 <= moved / said["least"] < 1.03


@pytest.mark.triton
@pytest.mark.parametrize(
    ("name", "card", "step"),
    [("verify", 90, 6),
     *also(*product(["verify", "batch", "prefill", "float32"], [90, 80], [1]))],
)  # fmt: skip
def test_kernel_spills_or_outgrows_a_card(name, card, step, shared):
    table = compiled(shared, name, card, step)
    assert {need["sm"] for need in table} == {card}
    for need in table:
        print(*(f"{need[part]} {part}" for part in ("kernel", "registers", "stack", "shared")))
    large = [
        need
        for need in table
        if need["stack"] > SPILLED
        or need["shared"] > SHARED[need["sm"]]
        or need["registers"] * 32 * need["warps"] > REGISTERS
    ]
    assert large == []
    assert not any(need["narrow"] for need in table), "a row may have 2 ** 31 numbers in a layer"


@pytest.mark.triton
def test_draft_of_many_tokens_outgrows_a_launch(monkeypatch):
    """A GPU takes 65,535 programs in all directions but the first."""
    rows, grids = importlib.import_module("specexp.fast.gpu.rows"), []

    class Noted:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args, **options: None

    monkeypatch.setattr(rows, "block_max_kernel", Noted())
    logits = torch.empty(2, 1025, 262_208, dtype=torch.bfloat16, device="meta")  # Gemma 3's
    assert rows.spoil(torch.empty(2, device="meta"), logits) is None
    [(blocks, B)] = grids
    assert blocks > 65_535 > B == 2


def attended(spoilt: bool, window: int, shape: Tree | None) -> torch.Tensor:
    """Attention of four tokens in two rows of different lengths. `spoilt`: what lies behind them,
    and well before their windows, is NaN."""
    B, n, S, K, d = 2, 4, 700, 2, 16
    random = torch.Generator().manual_seed(0)
    slots = torch.tensor([[150], [400]]) + torch.arange(n)
    cache = SlotCache([Layer(window=window)], B, S, room=n)
    cache.sizes = {window: S}  # no ring
    visible = shape and Branches(slots[:, :1], shape.nodes("cpu").ancestors)
    cache.aim(slice(0, B), slots, S, visible=visible)
    info = AttentionInfo(cache, slots, cache.kinds[0])
    q = torch.randn(B, 4, n, d, generator=random)
    keys, values = torch.randn(2, B, K, S, d, generator=random)
    for row, slot in enumerate(slots[:, 0].tolist() if spoilt else ()):
        for part in (keys, values):
            part[row, :, slot + n :] = torch.nan
            part[row, :, : max(0, slot - window - 64) if window else 0] = torch.nan
    return ops.kernels_of(torch.device("cuda")).kernels[fused.attention](q, keys, values, info, 1)


@pytest.mark.interpreter
@pytest.mark.parametrize("shape", [None, Tree.branching(1, 2)], ids=["chain", "tree"])
@pytest.mark.parametrize("window", [0, 80])
def test_attention_reads_slots_outside_a_row_or_its_window(shape, window):
    assert torch.equal(attended(True, window, shape), attended(False, window, shape))


@pytest.mark.interpreter
def test_attention_over_strides_of_more_than_32_bits_is_refused():
    """As of values that are a part of what latent attention makes for many heads."""
    B, n, S, K, d = 1, 1, 1 << 18, 2, 16
    cache, slots = SlotCache(1, B, S), torch.zeros(B, n, dtype=torch.int64)
    cache.aim(slice(0, B), slots, S)
    info = AttentionInfo(cache, slots, cache.kinds[0])
    run = ops.kernels_of(torch.device("cuda")).kernels[fused.attention]
    q, small = torch.randn(B, K, n, d), torch.empty(B, K, S, d, device="meta")
    wide = torch.empty_strided((B, K, S, d), (1 << 31, 64, 1 << 13, 1), device="meta")
    assert run(q, small, wide, info, 1.0) is NotImplemented


@pytest.mark.interpreter
@pytest.mark.parametrize(("dtype", "fits"), [(torch.float32, False), (torch.bfloat16, True)])
def test_attention_over_heads_that_outgrow_a_card_is_refused(dtype, fits):
    cache, slots = SlotCache(1, 1, 8), torch.zeros(1, 1, dtype=torch.int64)
    cache.aim(slice(0, 1), slots, 8)
    info = AttentionInfo(cache, slots, cache.kinds[0])
    q, keys = torch.randn(1, 2, 1, 512).to(dtype), torch.randn(1, 1, 8, 512).to(dtype)
    run = ops.kernels_of(torch.device("cuda")).kernels[fused.attention]
    assert (run(q, keys, keys, info, 0.1) is not NotImplemented) == fits


@pytest.mark.triton
def test_kernel_is_neither_compiled_nor_timed():
    kernels = {*ops.kernels_of(torch.device("cuda")).kernels} - {fused.by_length_up_to}
    assert {call.operation for call in calls(1, 6, 64, torch.bfloat16, "meta")} == kernels


def test_table_of_what_kernels_need_has_others_than_there_are():
    root = TESTS.parent
    sources = (root / "specexp" / "fast" / "gpu").glob("*.py")
    kernels = {k for file in sources for k in re.findall(r"def (\w+_kernel)\(", file.read_text())}
    table = json.loads((root / "data" / "measurements" / "gpu_compiled.json").read_text())
    assert {card: needs.keys() for card, needs in table.items()} == {"80": kernels, "90": kernels}


@pytest.mark.triton
@pytest.mark.parametrize(
    ("card", "why"),
    [((8, 0), "no such stride"), ((7, 5), "compute capability 7.5 is below 8.0")],
)
def test_gpu_that_runs_no_kernel_fails_rounds(card, why, monkeypatch, caplog):
    """Here there is none at all."""
    home, second = ops.kernels_of(torch.device("cuda")), torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda x: (card, (0, 0))[x != second])
    monkeypatch.setattr(torch, "zeros", fails)
    home._tried.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "specexp"):
            assert not home.triton_runs(second)
            assert not home.triton_runs(second)
        [line] = [record.getMessage() for record in caplog.records]
        assert line == f"Triton's kernels are not used: {why}"
        assert "no Triton" in home.state()
    finally:
        home._tried.cache_clear()


@pytest.mark.triton
def test_kernel_on_one_of_two_gpus_takes_keywords(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    run = ops.kernels_of(torch.device("cuda")).on_device(lambda w, k: (w, k))
    w = torch.zeros(1)
    assert run(w, k=2) == (w, 2)


@pytest.mark.triton
def test_triton_that_lacks_what_kernels_use_fails_rounds(monkeypatch, caplog):
    home, package = (
        ops.kernels_of(torch.device("cuda")),
        importlib.import_module("specexp.fast.gpu"),
    )
    monkeypatch.delattr(package, "laws")
    monkeypatch.setitem(sys.modules, "specexp.fast.gpu.laws", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    spec = importlib.util.spec_from_file_location("older", home.__file__)
    older = importlib.util.module_from_spec(spec)
    with caplog.at_level(logging.WARNING, "specexp"):
        spec.loader.exec_module(older)
        assert not older.triton_runs()
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("Triton's kernels are not used: ")
    assert "no Triton" in older.state()


@pytest.mark.interpreter
def test_weights_that_are_nan_draw_no_token_outside_the_vocabulary():
    """Its embedding would be outside the matrix, and the device lost for good."""
    V, noise = 40, Noise(0)
    p = torch.full((2, 2, V), torch.nan)
    seqs = Sequences.of([[1], [2]], 3, slack=1)
    draft = seqs.draft(Tree.chain(1).nodes("cpu"), torch.tensor([[0], [3]]), p)
    made = SimpleNamespace(sampling=Sampling(0.9), rng=noise)
    with interpreted():
        drawn = [noise.categorical(p, draft.keys, TOKEN)]
        for made.rule in (Match(), Reject(), Block()):
            drawn.append(judged(draft, Forward(p), made).new)
    for tokens in drawn:
        assert ((tokens >= 0) & (tokens < V)).all()


@pytest.mark.interpreter
def test_law_of_a_class_of_ones_own_is_kept():
    sampling, seqs = Even(0.9), Sequences.of([[1]] * 8, 3, slack=1)
    draft = seqs.draft(Tree.chain(1).nodes("cpu"), torch.zeros(8, 1, dtype=torch.int64))
    logits = torch.randn(8, 2, 8, generator=torch.Generator().manual_seed(0))
    made = SimpleNamespace(sampling=sampling, rng=sampling.rng(0))
    made.law = partial(Engine.law, made)
    with interpreted():
        for made.rule in (Match(), Reject()):
            assert not (judged(draft, Forward(logits), made).new % 2).any()


@pytest.mark.interpreter
@pytest.mark.parametrize("learns", [0, 1])
def test_product_that_is_trained_through_has_no_gradient(learns):
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    (x, weight)[learns].requires_grad_()
    with interpreted():
        lm.product(x, weight, None).sum().backward()
    assert (x, weight)[learns].grad.abs().sum() > 0


class Largest(TorchDispatchMode):
    """The numbers in the largest tensor that is new; of those of one dtype, if it is given."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.dtype, self.numbers = dtype, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves(args) if is_tensor(x)}
        for x in filter(is_tensor, tree_leaves(result)):
            if x.untyped_storage().data_ptr() not in given and self.dtype in (None, x.dtype):
                self.numbers = max(self.numbers, x.numel())
        return result


@pytest.mark.interpreter
@pytest.mark.parametrize("through", [references, interpreted])
def test_pass_writes_logits_that_nothing_reads_or_in_float32(through):
    """None of a prompt, of a text's last tokens those after the root, of a draft all."""
    V, B, N, tree = 3000, 2, 4, Tree.chain(3)
    seqs = Sequences.of([[1] * 5, [2] * 8], 3, slack=N)
    with through():
        target = of_module(tiny_llama(0, vocab=V).half())
        target.allocate(*seqs.tokens.shape)
        written, draft = {}, seqs.draft(tree.nodes("cpu"), torch.ones(B, N - 1, dtype=torch.int64))
        for name, run in {
            "prefill": lambda: target.prefill(seqs, 0, 7, (0, 2)),
            "follow": lambda: target.follow(seqs, 5),
            "verify": lambda: target.verify(seqs, draft, (2,)),
        }.items():
            with Largest() as every, Largest(torch.float32) as precise:
                run()
            assert precise.numbers < V
            written[name] = every.numbers
    assert written["prefill"] < V
    assert written["follow"] == B * V
    assert written["verify"] == B * N * V


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("rule", "case"),
    in_turn([Match(), Reject(), Block()], product([0.9, 0.0], [False, True])),
)
def test_rule_writes_a_number_for_every_token_of_the_vocabulary(rule, case):
    (temperature, drawn), V, tree = case, 2000, Tree.chain(2)
    sampling = Sampling(temperature, top_p=0.5)
    seqs = Sequences.of([[1], [2]], 3, slack=3)
    q = torch.full((2, len(tree), V), 1 / V) if drawn else None
    draft = seqs.draft(tree.nodes("cpu"), torch.tensor([[0, 1], [3, 4]]), q)
    logits = torch.randn(2, len(tree), V, generator=torch.Generator().manual_seed(0))
    made = SimpleNamespace(rule=rule, sampling=sampling, rng=sampling.rng(0))
    made.law = partial(Engine.law, made)
    numbers = {}
    for kernels in (False, True):
        with interpreted() if kernels else references(), Largest() as largest:
            judged(draft, Forward(logits), made)
        numbers[kernels] = largest.numbers
    assert numbers[True] < V
    assert numbers[False] >= logits.numel() or (temperature == 0 and rule.samples)


GROW = ("mtp", "dspark")  # a layer of the target's class; a block with windows


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "kind", [*GROW, *one_in(5, (kind for kind in DRAFTERS if kind not in GROW))]
)
def test_served_rounds_are_captured_anew_as_texts_grow(kind, monkeypatch):
    """All but those whose models have a module that reads every slot of a window."""
    monkeypatch.setenv("SPECEXP_NATIVE", "off")
    monkeypatch.setattr(fused, "_FUSED", WeakKeyDictionary())  # compiled by other tests
    with interpreted():
        made = engine(kind, "chain", "match", temperature=0.9, dtype=torch.float32)
        rows = EngineRows(made, 2, 256, 5)
    windows = set()
    made.run = lambda seqs, tree: windows.add(seqs.tokens.shape[1])
    for longest in (10, 90, 200):
        rows.round([4, 4], longest, Tree.chain(4))
    assert len(windows) == (3 if kind in GROW else 1)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "name", ["qwen3", *also("windows", "llama", "biased", "one key", "a head each")]
)
def test_pass_through_kernels_matches_transformers(name, monkeypatch):
    monkeypatch.setenv("SPECEXP_NATIVE", "off")
    net = made(name, torch.float32)
    taps = (0, 1, net.config.num_hidden_layers)
    with interpreted():
        lm = of_module(net)
        assert isinstance(lm.net, Fused)
        states, seen = passed(lm, taps)
    wanted_states, wanted = passed(unfused(net), taps)
    for ours, theirs in ((states, wanted_states), (seen.logits, wanted.logits)):
        off = (ours - theirs).norm() / theirs.norm()
        assert off <= fused.ROUNDING[torch.float32]


@pytest.mark.slow
@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "gemma4_text, global heads", "qwen3_next"])
def test_lighter_pass_through_kernels_matches_transformers(name):
    """Caps, sinks, windows, layers that share keys, states; over a tree, and without a mask."""
    module = architectures.build(name, torch.float32)
    with interpreted():
        net = lighter.network(module, "it", architectures.V)
        off = load.difference(lm.LM(module, "it", architectures.V, net), 40)
    assert off < fused.ROUNDING[torch.float32]
    assert net.by_length_up_to > 0


@pytest.mark.slow
@pytest.mark.interpreter
def test_ring_read_through_kernels_matches_transformers(monkeypatch):
    """Prompts in passes of seven tokens, a window of 24."""
    monkeypatch.setenv("SPECEXP_NATIVE", "off")
    with interpreted(), architectures.short_passes():
        served = architectures.outcome("mistral", (1, 40), ("ngram chain",), torch.float32)
    assert served == "right"


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("kind", "tree", "rule"),
    [("model", "chain", "reject"),
     *also(("eagle3", "branching", "match"), ("medusa", "grown", "match"))],
)  # fmt: skip
def test_text_through_kernels_matches_references(kind, tree, rule, monkeypatch):
    monkeypatch.setenv("SPECEXP_NATIVE", "off")
    few = PROMPTS[1:3]
    options = {"temperature": 0.9, "dtype": torch.float32}
    wanted = engine(kind, tree, rule, **options).generate(few, 4).tokens
    with interpreted():
        assert engine(kind, tree, rule, **options).generate(few, 4).tokens == wanted
