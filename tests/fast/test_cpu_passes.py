"""Compiled passes give what transformers gives, a token the same whatever stands beside it."""

from copy import deepcopy
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from conftest import one_in, tiny_llama
from support.inputs import COARSE
from support.tiny import DRAFTERS, NEW, PROMPTS, TREES, engine
from test_fused import NETS, made, passed, unfused

from specexp.engine import Engine
from specexp.errors import NonFiniteLogits
from specexp.fast import cpu_replays, fused
from specexp.fast.cpu.passes import Native
from specexp.fast.fused import Fused
from specexp.models import lm as lms
from specexp.models.cache import SlotCache
from specexp.models.lm import LM
from specexp.models.load import of_module
from specexp.sequences import Sequences

pytestmark = pytest.mark.compiler
FLOATS = [torch.float32, torch.bfloat16]
NEAR = {torch.float32: 2e-6, torch.bfloat16: 0.03}  # of their size


def compiled(name: str = "llama", dtype: torch.dtype = torch.float32) -> LM:
    lm = of_module(made(name, dtype))
    assert isinstance(lm.net, Native)
    return lm


@pytest.fixture(autouse=True)
def _fresh():
    """Every test tries its modules anew."""
    fused._FUSED.clear()


def apart(ours, theirs) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def off(name: str, dtype: torch.dtype = torch.float32) -> float:
    """By how much states and logits, of prompts and of a tree, differ from those of transformers
    in float64, at most."""
    lm, module = compiled(name, dtype), made(name, dtype).to(torch.float64)
    taps = (0, 1, lm.config.num_hidden_layers)
    (states, seen), (theirs, wanted) = passed(lm, taps), passed(unfused(module), taps)
    assert states.dtype == seen.hidden.dtype == dtype
    assert seen.logits.dtype == torch.float32
    pairs = (states, theirs), (seen.hidden, wanted.hidden), (seen.logits, wanted.logits)
    return max(apart(*pair) for pair in pairs)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", NETS)
def test_compiled_passes_match_transformers(name, dtype):
    assert off(name, dtype) < NEAR[dtype]


def test_switch_of_compiled_code_counts_for_a_module_seen_before(monkeypatch):
    module = made("llama", torch.float32)
    for off in ("off", "", "off"):
        monkeypatch.setenv("SPECEXP_NATIVE", off)
        assert isinstance(of_module(module).net, Fused if off else Native)


@pytest.mark.parametrize(("kind", "tree"), one_in(2, product(DRAFTERS, TREES)))
def test_drafting_leaves_text_of_plain_decoding(kind, tree):
    for temperature in (0.0, 0.9):
        made = engine(kind, tree, "match", temperature=temperature, dtype=torch.float32, seed=5)
        assert isinstance(made.target.net, Native)
        plain = made.plain()
        assert made.generate(PROMPTS, NEW).tokens == plain.generate(PROMPTS, NEW).tokens


@pytest.fixture
def set_default_dtype():
    yield torch.set_default_dtype
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("kind", "tree", "native"), one_in(9, product(DRAFTERS, ("chain", "grown"), ("", "off")))
)
def test_default_dtype_changes_no_round(kind, tree, native, set_default_dtype, monkeypatch):
    monkeypatch.setenv("SPECEXP_NATIVE", native)

    def texts() -> list[list[list[int]]]:
        laws = ("match", 0.0), ("match" if tree == "grown" else "reject", 0.9)
        engines = [
            engine(kind, tree, rule, temperature=temperature, dtype=torch.float32)
            for rule, temperature in laws
        ]
        return [made.generate(PROMPTS, NEW).tokens for made in engines]

    wanted = texts()
    for dtype in (torch.float64, torch.bfloat16):
        fused._FUSED.clear()
        set_default_dtype(dtype)
        assert texts() == wanted, dtype


@torch.inference_mode()
def steps(made: Engine) -> list[object]:
    """What a round does, one by one, but for what only looks."""
    seqs = made.begin(Sequences.of(PROMPTS, NEW, slack=9))
    made.round(seqs, made.policy.tree)
    with cpu_replays.recording() as noted:
        made.round(seqs, made.policy.tree)
    return [getattr(x, "func", None) or x.function for x in cpu_replays.changing(noted.steps)]


@pytest.mark.parametrize(
    "kind", ["null", "recycle", "early_exit", "medusa", "eagle", "eagle3", "dflash"]
)
def test_padded_vocabulary_adds_no_step_to_a_round(kind):
    """Logits of padding are not made; nothing is held twice."""
    whole, padded = (
        engine(kind, "chain", "match", temperature=0.9, dtype=torch.float32, vocab=vocab)
        for vocab in (None, 26)
    )
    assert steps(padded) == steps(whole)
    assert padded.target.net.fused.head.shape == (26, 32)
    assert padded.target.net.fused.head.data_ptr() == whole.target.module.lm_head.weight.data_ptr()
    made = padded.generate(PROMPTS, NEW)
    if kind == "null":
        assert isinstance(padded.recorder.latest[1].run, cpu_replays._CompiledReplay)
    assert max(map(max, made.tokens)) < 26
    plain = padded.plain()
    plain = Engine.of(plain, target=unfused(plain.target.module))
    plain.target.vocab = 26
    assert made.tokens == plain.generate(PROMPTS, NEW).tokens


# --- the same to the last bit --------------------------------------------------------------------


def fed(lm: LM, rows: list[list[int]], sizes: list[int]) -> torch.Tensor:
    """Logits of all places of these texts, fed so many at once."""
    lm.allocate(len(rows), 40)
    seqs = Sequences.of(rows, 40 - len(rows[0]), slack=0)
    found, at = [], 0
    for size in sizes:
        slots = torch.arange(at, at + size).expand(len(rows), -1)
        tokens = seqs.tokens.gather(1, slots)
        found.append(lm.feed(seqs, tokens, slots, slots, None).logits)
        at += size
    return torch.cat(found, 1)


def steady(name: str, dtype: torch.dtype = torch.float32) -> bool:
    lm = compiled(name, dtype)
    texts = torch.randint(0, 32, (5, 12), generator=torch.manual_seed(0)).tolist()
    alone = torch.cat([fed(lm, [text], [1] * 12) for text in texts])
    return all(
        torch.equal(fed(lm, texts[some], sizes), alone[some])
        for sizes in ([12], [5, 7], [1, 2, 3, 4, 2], [11, 1])
        for some in (slice(None), slice(2, 3))
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["llama", "one key", "biased", "qwen3"])
def test_logits_do_not_depend_on_what_shares_the_pass(name, dtype):
    assert steady(name, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_product_of_a_row_does_not_depend_on_rows_beside_it(dtype):
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(n).to(dtype) for n in ((16, 33), (41, 33), (41,)))
    whole = lms.product(x, weight, bias)
    exact = F.linear(*(y.double() for y in (x, weight, bias)))
    assert torch.allclose(whole.double(), exact, *COARSE[dtype])
    for rows in (slice(1), slice(3, 4), slice(2, 9)):
        assert torch.equal(lms.product(x[rows], weight, bias), whole[rows])


def reads_by_length(name: str, dtype: torch.dtype = torch.float32) -> bool:
    """Of five texts the first 0, 2, 4, 6 and 8 of eight tokens are fed, -1 in place of the others:
    those have the logits, states, keys and values that they have among all, and the others 0."""
    lm, kept = compiled(name, dtype), torch.arange(8) < 2 * torch.arange(5)[:, None]
    texts = torch.randint(0, 32, (5, 8), generator=torch.manual_seed(0))
    slots, seqs = torch.arange(8).expand(5, -1), Sequences.of(texts.tolist(), 0, slack=0)

    def seen(tokens: torch.Tensor, last: int | None = None) -> list[torch.Tensor]:
        lm.allocate(5, 8)
        made = lm.feed(seqs, tokens, slots, slots, None, taps=(0, 1), last=last)
        layer = lm.cache.layers[-1]
        deep = (x.transpose(1, 2).flatten(2) for x in (layer.keys, layer.values))
        return [made.logits, made.hidden, *deep]

    some = texts.where(kept, -1)
    pairs = zip(seen(some), seen(texts), strict=True)
    same = all(torch.equal(one, all_ * kept[..., None]) for one, all_ in pairs)
    return same and torch.equal(seen(some, 3)[0], seen(some)[0][:, -3:])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["llama", "one key", "biased", "qwen3"])
def test_padding_has_no_part_in_a_pass(name, dtype):
    assert reads_by_length(name, dtype)


def test_pass_of_padding_alone_is_zero():
    lm = compiled()
    lm.allocate(2, 8)
    seqs, slots = Sequences.of([[1] * 8] * 2, 0, slack=0), torch.arange(3).expand(2, -1)
    made = lm.feed(seqs, torch.full((2, 3), -1), slots, slots, None, taps=(0, 1), last=2)
    assert made.logits.shape[:2] == (2, 2)
    assert not made.logits.any()
    assert not made.hidden.any()
    assert not lm.fault.any()


def test_logits_do_not_depend_on_threads():
    lm, threads = compiled("biased"), torch.get_num_threads()
    texts = torch.randint(0, 32, (3, 12), generator=torch.manual_seed(0)).tolist()
    found = []
    try:
        for count in (1, 2, 3, 8):
            torch.set_num_threads(count)
            found.append(fed(lm, texts, [4, 8]))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, found[0]) for one in found)


def test_large_passes_are_left_to_torch(monkeypatch):
    lm = compiled()
    seen = passed(lm, ())[1].logits
    monkeypatch.setattr(Native, "by_length_up_to", 3)
    monkeypatch.setattr(lm.net, "run", None)
    assert apart(passed(lm, ())[1].logits, seen) < 1e-5


def wide_is_right() -> bool:
    """In bfloat16, 16 rows of 31 tokens through matrices of three and five tiles: near transformers
    in float64, and each row as it is alone."""
    shape = {"hidden_size": 96, "intermediate_size": 160, "attention_bias": True}
    net = tiny_llama(0, **shape).to(torch.bfloat16).requires_grad_(False)
    for parameter in net.parameters():  # biases begin as zeros
        parameter += 0.1 * torch.randn_like(parameter)
    lm, module = of_module(net), deepcopy(net).to(torch.float64)
    assert isinstance(lm.net, Native)
    texts = torch.randint(0, 32, (16, 31), generator=torch.manual_seed(0))
    rows = texts.tolist()
    logits = fed(lm, rows, [31])
    wanted = module(texts).logits
    alone = fed(lm, rows[3:4], [1, 30]), fed(lm, rows[:2], [31])
    same = torch.equal(alone[0], logits[3:4]) and torch.equal(alone[1], logits[:2])
    return same and apart(logits, wanted) < NEAR[torch.bfloat16]


def test_wide_bfloat16_matrices_match_transformers():
    assert wide_is_right()


# --- what goes wrong -----------------------------------------------------------------------------


def test_broken_row_leaves_others_unchanged():
    lm = compiled()
    lm.module.model.embed_tokens.weight.data[7] = torch.nan
    good = [[1, 2, 3, 4], [4, 3, 2, 1]]
    logits = fed(lm, [good[0], [1, 7, 2, 3], good[1]], [4])
    assert (lm.fault != 0).tolist() == [False, True, False]
    assert torch.equal(logits[[0, 2]], fed(lm, good, [4]))
    broken = engine("null", "chain", "match", dtype=torch.float32)
    broken = Engine.of(broken, target=of_module(made("llama", torch.float32), "mine"))
    broken.target.module.lm_head.weight.data[3] = torch.inf
    with pytest.raises(NonFiniteLogits, match="mine produced NaN"):
        broken.generate(PROMPTS, NEW)


@pytest.mark.parametrize(("token", "slot"), [(32, 0), (-2, 0), (1, 8), (1, -1)])
def test_unknown_token_or_slot_is_refused_before_writing(token, slot):
    net = compiled().net
    cache = SlotCache(3, 1, 8)
    tokens, slots = torch.tensor([[1, token]]), torch.tensor([[0, slot]])
    cache.aim(slice(0, 1), slots, 8)
    with pytest.raises(IndexError, match="not below 32, or a slot not below 8"):
        net(tokens, slots, cache, (), None)
    assert not cache.layers[0].keys.any()


def test_weights_changed_in_place_change_passes():
    lm = compiled()
    before = passed(lm, ())[1].logits
    with torch.no_grad():
        lm.module.model.layers[1].self_attn.k_proj.weight *= 1.5
    after = passed(lm, ())[1].logits
    assert apart(after, before) > 1e-3
    assert apart(after, passed(unfused(lm.module), ())[1].logits) < 1e-5


def halved(module):
    module.to(torch.bfloat16)


def moved(module):
    for parameter in module.parameters():
        parameter.data = 1.1 * parameter.data


def assigned(module):
    module.load_state_dict({k: 1.1 * v for k, v in module.state_dict().items()}, assign=True)


@pytest.mark.parametrize("reassign", [halved, moved, assigned])
def test_reassigned_weights_are_read_after_the_next_load_only(reassign):
    lm = compiled("biased")
    before = passed(lm, ())[1].logits
    reassign(lm.module)
    others = [torch.full_like(p, torch.nan) for p in lm.module.parameters()]  # over what was freed
    assert torch.equal(passed(lm, ())[1].logits, before)
    del others
    again = of_module(lm.module)
    assert isinstance(again.net, Native)
    exact = unfused(deepcopy(lm.module).double())
    assert apart(passed(again, ())[1].logits, passed(exact, ())[1].logits) < NEAR[again.dtype]
    assert of_module(lm.module).net is again.net


@pytest.mark.parametrize(("first", "wide"), [(0, 4), (0, 4096), (1, 4), (1, 4096)])
def test_layers_of_unequal_shapes_are_not_compiled(first, wide, caplog):
    module = made("llama", torch.float32)
    mlp = module.model.layers[first].mlp
    mlp.gate_proj, mlp.up_proj = torch.nn.Linear(32, wide), torch.nn.Linear(32, wide)
    mlp.down_proj = torch.nn.Linear(wide, 32)
    assert isinstance(of_module(module).net, Fused)
    assert not caplog.text, "it was tried"


def test_float64_is_not_compiled():
    assert not isinstance(of_module(made("llama", torch.float64)).net, Native)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_own_long_pass_leaves_rotation_of_short_texts(name):
    lm = compiled(name)
    before = passed(lm, ())[1].logits
    lm.module(torch.arange(150)[None] % 32)
    assert torch.equal(passed(lm, ())[1].logits, before)


def test_specexp_native_off_uses_fused_passes(monkeypatch):
    monkeypatch.setenv("SPECEXP_NATIVE", "off")
    assert isinstance(of_module(made("llama", torch.float32)).net, Fused)
