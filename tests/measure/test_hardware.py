"""The suites of `specexp bench`: bytes counted by hand, ratios on faked clocks.

Nothing here asserts how fast anything is: time is a number that the arms themselves move on.
"""

import pytest
import torch
from conftest import tiny_llama
from support.hybrids import hybrid
from support.questions import TWO
from support.tape import Tape, recorded, taped
from transformers import GPT2Config, GPT2LMHeadModel

from specexp import api, ops
from specexp.drafters.model import DraftModel
from specexp.engine import Engine
from specexp.fast.cpu import passes
from specexp.fast.recordings import Recordings
from specexp.figures import hardware
from specexp.measure import statistics
from specexp.measure.hardware import regression, roofline, suites, work
from specexp.measure.hardware.phases import PHASES, PassTimed, PhaseClock, phases
from specexp.models.lm import LM
from specexp.models.load import of_module
from specexp.recording import Recorder, recorder_for
from specexp.rules import Match, Reject

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(roofline, "COPIED", {"cpu": 2**16})
    monkeypatch.setattr(roofline, "PASSES", 2)


# --- bytes ---------------------------------------------------------------------------------------

LAYER = 32 * 32 * 2 + 16 * 32 * 2 + 3 * 32 * 64 + 2 * 32  # q and o; k and v; gate, up, down; norms


@pytest.mark.parametrize("tokens", [1, 6])
def test_pass_bytes_match_count_by_hand(tokens):
    untied = tiny_llama(0, layers=2, vocab=40, tie_word_embeddings=False)
    tied = tiny_llama(0, layers=2, vocab=40, tie_word_embeddings=True)
    body, table = 2 * LAYER + 32, 40 * 32
    assert roofline.weight_bytes(untied, tokens) == 4 * (body + table + tokens * 32)
    assert roofline.weight_bytes(tied, tokens) == 4 * (body + table)
    half = tiny_llama(0, layers=2, vocab=40, tie_word_embeddings=True).bfloat16()
    assert roofline.weight_bytes(half, tokens) == 2 * (body + table)
    kv = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, width, float32
    assert roofline.pass_bytes(of_module(tied), 3, tokens, 100) == 4 * (body + table) + 3 * 100 * kv


def test_embedding_bytes_end_with_the_table():
    untied = tiny_llama(0, layers=1, vocab=40, tie_word_embeddings=False)
    assert roofline.weight_bytes(untied, 1000) == roofline.weight_bytes(untied, 40)


def test_bare_products_cover_every_matrix_once(monkeypatch):
    model = tiny_llama(0, layers=2, vocab=40, tie_word_embeddings=True)
    multiply = roofline.products(model, 6)
    shapes = []
    linear = torch.nn.functional.linear
    monkeypatch.setattr(
        torch.nn.functional,
        "linear",
        lambda x, w: (shapes.append((x.shape, w.shape)), linear(x, w)),
    )
    multiply(None)
    assert len(shapes) == 2 * 7 + 1
    assert all(x == (6, w[1]) for x, w in shapes)
    assert sum(w.numel() for _, w in shapes) == 2 * (LAYER - 64) + 40 * 32
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=32, n_layer=1, n_head=2))
    assert [tuple(w.shape) for w in roofline.linear_weights(gpt2)] == [
        (96, 32), (32, 32), (128, 32), (32, 128), (40, 32),
    ]  # fmt: skip


# --- roofline ------------------------------------------------------------------------------------


def test_a_pass_has_given_rows_tokens_and_slots(pairing, monkeypatch):
    calls = []
    feed = LM.feed
    monkeypatch.setattr(
        LM, "feed",
        lambda self, *args, **more: (calls.append(args), feed(self, *args, **more))[1],
    )  # fmt: skip
    output = roofline.a_pass(pairing.target, [1, 2, 3], 2, 4, 64)(None)
    assert output.logits.shape == (2, 4, pairing.target.vocab)
    seqs, tokens, slots, _, visible = calls[-1][:5]
    assert tokens.shape == (2, 4)
    assert slots[0].tolist() == [59, 60, 61, 62]
    assert (seqs.tokens.shape, visible) == ((2, 64), None)


@pytest.mark.parametrize("family", ["granite4", "jamba"])
def test_a_pass_over_states_has_no_room_for_its_tokens(family):
    lm = of_module(hybrid(family))
    assert roofline.a_pass(lm, [1, 2, 3], 1, 4, 32)(None).logits.shape == (1, 4, lm.vocab)


def test_roofline_ratios_of_timed_arms(pairing, monkeypatch, now):
    def took(seconds):
        def call(_):
            now.s += seconds

        return call

    monkeypatch.setattr(roofline, "copying", lambda device: (took(0.5), 1_000_000))
    monkeypatch.setattr(roofline, "a_pass", lambda lm, ids, B, n, *_: took(n))
    monkeypatch.setattr(roofline, "products", lambda module, n: took(n / 4))
    report = roofline.roofline(pairing, ["text"], 1)
    step, verify, *draft = report["rows"]
    assert report["copy"] == {"bytes": 1_000_000, "ms": 500, "gb_s": pytest.approx(0.002)}
    assert [(r["model"], r["tokens"]) for r in report["rows"]] == [
        ("target", 1), ("target", 4), ("draft", 1), ("draft", 4),
    ]  # fmt: skip
    assert (step["ms"], verify["ms"], verify["bare_ms"]) == (1000, 4000, 1000)
    assert step["gb_s"] == pytest.approx(1e-9 * step["bytes"])
    assert step["of_copy"]["value"] == pytest.approx(step["bytes"] * 0.5 / 1_000_000)
    assert verify["over_bare"].items() >= {"value": 4, "low": 4, "high": 4}.items()
    assert verify["over_step"]["value"] == 4
    assert draft[0]["bytes"] == roofline.pass_bytes(pairing.engine.models[1], 1, 1, 128)


@pytest.mark.torchao
def test_quantised_weights_have_no_bare_products(tiny_folders):
    target, draft = tiny_folders
    report = roofline.roofline(api.load(target, f"{draft}+int8", gamma=3), ["text"], 1)
    assert [row["over_bare"] is None for row in report["rows"]] == [False, False, True, True]
    report["rows"].reverse()
    [_, products], notes = hardware.tables("roofline", report)
    assert [*products.columns[3].cells][:2] == ["-", "-"]
    assert notes[0].startswith("no bare products of quantised weights")
    suite = {"suites": {"roofline": report}}
    compared = [change.what for change in regression.changes(suite, suite)]
    assert sum(what.endswith("bare products") for what in compared) == 2


def test_copy_counts_bytes_read_and_written():
    copy, moved = roofline.copying(CPU)
    assert moved == 2 * 2**16
    assert copy(None).sum() == 2**16


# --- round ---------------------------------------------------------------------------------------


@pytest.fixture
def costly(monkeypatch, now):
    """Proposing takes 3 s, a pass 1, a target pass 5 besides, the rule 2 and observing 1."""
    monkeypatch.setenv("SPECEXP_GRAPHS", "off")  # what is replayed is not called

    def slow(owner, name, cost):
        call = getattr(owner, name)

        def slower(*args, **more):
            now.s += cost
            return call(*args, **more)

        monkeypatch.setattr(owner, name, slower)

    for owner, name, cost in (
        (DraftModel, "propose", 3), (LM, "feed", 1), (LM, "verify", 5), (Match, "__call__", 2),
        (Reject, "__call__", 2), (DraftModel, "observe", 1),
    ):  # fmt: skip
        slow(owner, name, cost)


def test_round_phases_match_planted_times(pairing, costly):
    report = phases(pairing, [p.text for p in TWO], 12, 2)
    fast, plain = report["fast"], report["plain"]
    ms = {phase: of["ms"] for phase, of in fast["phases"].items()}
    assert ms == {"draft": 6000, "verify": 6000, "accept": 2000, "commit": 1000, "host": 0}
    assert {p: of["ms"] for p, of in plain["phases"].items()} == {
        "draft": 0, "verify": 6000, "accept": 2000, "commit": 0, "host": 0,
    }  # fmt: skip
    assert fast["round_ms"] == sum(ms.values()) == 15000
    assert fast["sum_over_round"].items() >= {"value": 1, "low": 1, "high": 1}.items()
    assert fast["overhead"]["value"] == pytest.approx(3 / 15)
    assert fast["phases"]["draft"]["share"]["value"] == pytest.approx(6 / 15)
    length = report["acceptance"]["length"]
    assert report["speedup"]["from_passes"] == pytest.approx(length * 6 / 12)
    assert report["turns"] == 4


def test_round_speedup_is_of_delivered_tokens(pairing, costly):
    report = phases(pairing, [TWO[0].text], 12, 1)
    engine = pairing.with_().engine
    engine.eos = ()
    rounds = len(engine.generate(pairing.encode([TWO[0].text]), 12).trace.rounds)
    assert report["speedup"]["measured"]["value"] == pytest.approx(12 * 8 / (rounds * 15))


def test_round_intervals_are_of_repeats_however_much_prompts_differ(pairing, costly):
    each = [phases(pairing, [p.text], 12, 1)["speedup"]["measured"]["value"] for p in TWO]
    assert each[0] != each[1]
    report = phases(pairing, [p.text for p in TWO], 12, 3)
    speedup = report["speedup"]["measured"]
    assert min(each) < speedup["value"] < max(each)
    assert speedup["low"] == pytest.approx(speedup["value"]) == speedup["high"]
    assert speedup["doubt"] == "too few repeats: at least 2 more"


@pytest.mark.parametrize("value", [0.9, 99.0])
def test_round_speedup_that_cannot_be_is_said(pairing, costly, monkeypatch, value):
    measured = statistics.Interval(value, value - 0.1, value + 0.1)
    monkeypatch.setattr(statistics, "speedup", lambda *columns, same_work: measured)
    report = phases(pairing, [TWO[0].text], 12, 1)
    _, (*_, last) = hardware.tables("round", report)
    assert ("not credible: was the machine busy?" in last) == (value == 99)


@pytest.mark.parametrize("graphs", ["off", pytest.param("on", marks=pytest.mark.compiler)])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_clocked_round_changes_nothing(pairing, monkeypatch, graphs, temperature):
    monkeypatch.setenv("SPECEXP_GRAPHS", graphs)
    engine = pairing.with_(temperature=temperature).engine
    ids = pairing.encode([TWO[0].text])
    clean, clock = engine.generate(ids, 12), PhaseClock(engine.target.device)
    clocked = Engine.of(engine, clock=clock)
    for _ in range(3):
        assert clocked.generate(ids, 12).tokens == clean.tokens
        seconds = clock.take()
        assert seconds["rounds"] == len(clean.trace.rounds)
        assert all(seconds[phase] > 0 for phase in PHASES)
    assert clock.take() == dict.fromkeys(seconds, 0.0)
    assert recorded(clocked) == ({"draft", "verify"} if graphs == "on" else set())


@pytest.mark.compiler
def test_clock_of_compiled_passes(pairing, monkeypatch):
    seconds = iter([3.0, 8.0])
    engine, ids = PassTimed.of(pairing.with_().engine), pairing.encode([TWO[0].text])
    trace = engine.generate(ids, 12).trace
    assert 0 < engine.passes_s < trace.decode_s
    monkeypatch.setattr(passes, "passes_s", lambda: next(seconds))
    engine.generate(ids, 12)
    assert engine.passes_s == 5
    assert PassTimed.of(engine, recorder=Recorder()).passes_s == 0


def test_watched_rounds_split_cuda_graphs(pairing):
    engine, ids = taped(pairing.apart().with_(gamma=1).engine), pairing.encode([TWO[0].text])
    clean = engine.generate(ids, 30)
    assert set(engine.recorder.tape.recorded) == {"round"}
    clock = PhaseClock(engine.target.device)
    clocked = Engine.of(engine, clock=clock, recorder=taped(engine).recorder)
    assert clocked.generate(ids, 30).tokens == clean.tokens
    assert clocked.recorder.tape.recorded == ["draft", "verify"]
    assert clock.take()["rounds"] == len(clean.trace.rounds)
    assert engine.generate(ids, 30).tokens == clean.tokens


def test_suites_run_on_cuda_graphs(monkeypatch, pairing):
    """Every suite on a tape: nothing is timed well, and everything has to fit together."""
    chosen = ops.OPS[recorder_for].chosen
    monkeypatch.setitem(chosen, torch.device("cpu"), lambda target: Recordings(Tape()))
    monkeypatch.setattr(passes.Native, "by_length_up_to", 0)  # a tape knows only torch's operations
    taped_rig = pairing.apart()
    for name in work.NAMES:
        report = suites.run(name, taped_rig, TWO, [1, 2], 12, 1)
        if name == "round":
            expected = suites.run(name, pairing, TWO, [1, 2], 12, 1)
            assert report["acceptance"] == expected["acceptance"]
        else:
            assert report["rows"]


def test_draft_phase_of_a_drafter_without_model(pairing):
    report = phases(pairing.with_(drafter="ngram"), [TWO[0].text], 8, 1)
    assert report["fast"]["phases"]["draft"]["ms"] > 0


def test_planted_drafter_does_not_pay_for_the_target(pairing, costly, tiny_folders):
    planted = pairing.with_(drafter=f"planted:0.5,{tiny_folders[1]}")
    fast = phases(planted, [TWO[0].text], 8, 1)["fast"]
    ms = {phase: of["ms"] for phase, of in fast["phases"].items()}
    assert (ms["draft"], ms["verify"], ms["accept"], ms["host"]) == (6000, 6000, 2000, 0)


def test_eagle_layer_has_no_pass_of_its_own():
    pairing = api.load(drafter="eagle", gamma=2)
    assert [lm.name for lm in roofline.causal(pairing)] == ["target-10m"]
    assert phases(pairing, [TWO[0].text], 8, 1)["fast"]["phases"]["draft"]["ms"] > 0
