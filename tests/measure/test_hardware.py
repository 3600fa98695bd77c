"""`specexp bench`: bytes counted by hand, arms in turns, ratios on faked clocks, equal work.

Nothing here asserts how fast anything is: time is a number that the arms themselves move on.
"""

import importlib.machinery
import importlib.util
import json
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from conftest import tiny_llama
from rich.console import Console
from support.tape import Tape, taped
from transformers import GPT2Config, GPT2LMHeadModel

from specexp import api
from specexp.commands import app, doctor
from specexp.drafters.model import DraftModel
from specexp.errors import UserError
from specexp.fast import cpu
from specexp.fast import cuda_graphs as graphs
from specexp.figures import hardware
from specexp.measure import interleave
from specexp.measure.hardware import peers, regression, roofline, suites
from specexp.measure.prompts import Prompt
from specexp.models.lm import LM
from specexp.models.load import of_module
from specexp.rules import Match, Reject
from specexp.sampling import Sampling

CPU = torch.device("cpu")
MEASURED = Path(__file__).parents[2] / "data" / "measurements"
PROMPTS = [Prompt(1, "code", ("def mean(values):",)), Prompt(2, "messy", ("zz qq mean mean",))]


@pytest.fixture
def pairing(tiny_folders):
    return api.build(tiny_folders[0], tiny_folders[1], gamma=3)


@pytest.fixture
def now(monkeypatch):
    """now.s: what every clock says, until somebody moves it on."""
    told = types.SimpleNamespace(s=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: told.s)
    return told


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(roofline, "COPIED", {"cpu": 2**16})
    monkeypatch.setattr(roofline, "PASSES", 2)
    monkeypatch.setattr(suites, "PASSES", 2)


# --- turns ---------------------------------------------------------------------------------------


def test_arms_take_turns_and_change_ends(now):
    called = []

    def arm(name, cost):
        def call(item):
            called.append((name, item))
            now.s += cost
            return f"{name}{item}"

        return call

    seen = interleave.take({"a": arm("a", 2), "b": arm("b", 1)}, [1, 2, 3], CPU, "test")
    assert called[:2] == [("a", 1), ("b", 1)]  # warm-up
    assert [name for name, _ in called[2:]] == ["b", "a", "a", "b", "b", "a"]
    assert [turn.made for turn in seen["a"]] == ["a1", "a2", "a3"]
    assert interleave.seconds(seen["a"]) == [2, 2, 2]
    assert interleave.ratio(seen["a"], seen["b"], 3) == (6, 6, 6)


def test_what_an_arm_does_to_lead_up_is_not_counted(now):
    def arm(_):
        now.s += 1

    seen = interleave.take({"a": arm}, [0, 0], CPU, "test", lead=2)
    assert interleave.seconds(seen["a"]) == [1, 1]
    assert now.s == 9


def test_what_is_warmed_up_does_not_count():
    called = []
    seen = interleave.take({"a": called.append}, [3, 4, 3, 4], CPU, "test", warm=[4, 3])
    assert called == [4, 3, 3, 4, 3, 4]
    assert len(seen["a"]) == 4


# --- bytes ---------------------------------------------------------------------------------------

LAYER = 32 * 32 * 2 + 16 * 32 * 2 + 3 * 32 * 64 + 2 * 32  # q and o; k and v; gate, up, down; norms


@pytest.mark.parametrize("tokens", [1, 6])
def test_bytes_of_a_pass_are_those_counted_by_hand(tokens):
    untied = tiny_llama(0, layers=2, vocab=40, tie_word_embeddings=False)
    tied = tiny_llama(0, layers=2, vocab=40, tie_word_embeddings=True)
    body, table = 2 * LAYER + 32, 40 * 32
    assert roofline.weight_bytes(untied, tokens) == 4 * (body + table + tokens * 32)
    assert roofline.weight_bytes(tied, tokens) == 4 * (body + table)
    half = tiny_llama(0, layers=2, vocab=40, tie_word_embeddings=True).bfloat16()
    assert roofline.weight_bytes(half, tokens) == 2 * (body + table)
    kv = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, width, float32
    assert roofline.pass_bytes(of_module(tied), 3, tokens, 100) == 4 * (body + table) + 3 * 100 * kv


def test_a_looked_up_table_is_never_read_beyond_its_end():
    untied = tiny_llama(0, layers=1, vocab=40, tie_word_embeddings=False)
    assert roofline.weight_bytes(untied, 1000) == roofline.weight_bytes(untied, 40)


def test_bare_products_are_every_matrix_of_the_model_once(monkeypatch):
    model = tiny_llama(0, layers=2, vocab=40, tie_word_embeddings=True)
    multiply = roofline.products(model, 6)
    seen = []
    linear = torch.nn.functional.linear
    monkeypatch.setattr(
        torch.nn.functional, "linear", lambda x, w: (seen.append((x.shape, w.shape)), linear(x, w))
    )
    multiply(None)
    assert len(seen) == 2 * 7 + 1
    assert all(x == (6, w[1]) for x, w in seen)
    assert sum(w.numel() for _, w in seen) == 2 * (LAYER - 64) + 40 * 32
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=32, n_layer=1, n_head=2))
    assert [tuple(w.shape) for w in roofline.matrices(gpt2)] == [
        (96, 32), (32, 32), (128, 32), (32, 128), (40, 32),
    ]  # fmt: skip


# --- roofline ------------------------------------------------------------------------------------


def test_a_pass_is_over_the_tokens_rows_and_slots_that_it_says(pairing, monkeypatch):
    seen = []
    feed = LM.feed
    monkeypatch.setattr(
        LM, "feed",
        lambda self, *args, **more: (seen.append(args), feed(self, *args, **more))[1],
    )  # fmt: skip
    made = roofline.a_pass(pairing.target, [1, 2, 3], 2, 4, 64)(None)
    assert made.logits.shape == (2, 4, pairing.target.vocab)
    seqs, tokens, slots, _, visible = seen[0][:5]
    assert tokens.shape == (2, 4)
    assert slots[0].tolist() == [59, 60, 61, 62]
    assert (seqs.tokens.shape, visible) == ((2, 64), None)


def test_roofline_divides_what_it_timed(pairing, monkeypatch, now):
    def took(seconds):
        def call(_):
            now.s += seconds

        return call

    monkeypatch.setattr(roofline, "copying", lambda device: (took(0.5), 1_000_000))
    monkeypatch.setattr(roofline, "a_pass", lambda lm, ids, B, n, *_: took(n))
    monkeypatch.setattr(roofline, "products", lambda module, n: took(n / 4))
    found = roofline.roofline(pairing, ["text"], 1)
    step, verify, *draft = found["rows"]
    assert found["copy"] == {"bytes": 1_000_000, "ms": 500, "gb_s": pytest.approx(0.002)}
    assert [(r["model"], r["tokens"]) for r in found["rows"]] == [
        ("target", 1), ("target", 4), ("draft", 1), ("draft", 4),
    ]  # fmt: skip
    assert (step["ms"], verify["ms"], verify["bare_ms"]) == (1000, 4000, 1000)
    assert step["gb_s"] == pytest.approx(1e-9 * step["bytes"])
    assert step["of_copy"]["value"] == pytest.approx(step["bytes"] * 0.5 / 1_000_000)
    assert verify["over_bare"] == {"value": 4, "low": 4, "high": 4}
    assert verify["over_step"]["value"] == 4
    assert draft[0]["bytes"] == roofline.pass_bytes(pairing.engine.models[1], 1, 1, 128)


def test_a_copy_counts_what_is_read_and_what_is_written():
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


def test_phases_are_found_where_time_is_spent(pairing, costly):
    found = suites.a_round(pairing, [p.text for p in PROMPTS], 12, 2)
    fast, plain = found["fast"], found["plain"]
    ms = {phase: of["ms"] for phase, of in fast["phases"].items()}
    assert ms == {"draft": 6000, "verify": 6000, "accept": 2000, "commit": 1000, "host": 0}
    assert {p: of["ms"] for p, of in plain["phases"].items()} == {
        "draft": 0, "verify": 6000, "accept": 2000, "commit": 0, "host": 0,
    }  # fmt: skip
    assert fast["round_ms"] == sum(ms.values()) == 15000
    assert fast["draft_passes_ms"] == 3000
    assert fast["sum_over_round"] == {"value": 1, "low": 1, "high": 1}
    assert fast["overhead"]["value"] == pytest.approx(6 / 15)
    assert fast["phases"]["draft"]["share"]["value"] == pytest.approx(6 / 15)
    length = found["acceptance"]["length"]
    assert found["speedup"]["from_passes"] == pytest.approx(length * 6 / 9)
    assert found["turns"] == 4


def test_measured_speedup_is_of_delivered_tokens(pairing, costly):
    found = suites.a_round(pairing, [PROMPTS[0].text], 12, 1)
    engine = pairing.with_().engine
    engine.eos = ()
    rounds = len(engine.generate(pairing.encode([PROMPTS[0].text]), 12).trace.rounds)
    assert found["speedup"]["measured"]["value"] == pytest.approx(12 * 8 / (rounds * 15))


@pytest.mark.parametrize("graphs", ["off", pytest.param("on", marks=pytest.mark.compiler)])
def test_watching_changes_nothing_and_leaves_nothing(pairing, monkeypatch, graphs):
    monkeypatch.setenv("SPECEXP_GRAPHS", graphs)
    engine, ids = pairing.with_().engine, pairing.encode([PROMPTS[0].text])
    clean = engine.generate(ids, 12)
    before = {id(x): set(vars(x)) for x in (engine, engine.drafter, *engine.models)}
    with suites.watched(engine) as spent:
        watched = engine.generate(ids, 12)
    assert watched.tokens == clean.tokens
    assert spent["rounds"] == len(clean.trace.rounds)
    assert spent["draft"] > 0
    assert 0 <= spent["passes"] <= spent["draft"]
    assert (spent["passes"] == 0) == (graphs == "on")
    with pytest.raises(ZeroDivisionError), suites.watched(engine):
        raise ZeroDivisionError
    for x in (engine, engine.drafter, *engine.models):
        assert set(vars(x)) - before[id(x)] <= {"place"}


@pytest.mark.compiler
def test_a_clock_in_compiled_passes_tells_what_rounds_spend_in_them(pairing, monkeypatch):
    seconds = iter([3.0, 8.0])
    engine, ids = pairing.with_().engine, pairing.encode([PROMPTS[0].text])
    with suites.passing(engine) as spent:
        trace = engine.generate(ids, 12).trace
        assert 0 < spent() < trace.decode_s
    with suites.passing(engine) as spent:
        monkeypatch.setattr(cpu, "passes_s", lambda: next(seconds))
        engine.generate(ids, 12)
        assert spent() == 5  # from when the prompt had been read
    assert "begin" not in vars(engine)
    engine.replays = None
    with suites.passing(engine) as spent:
        assert spent() == 0


def test_watched_rounds_are_taken_apart_where_they_are_graphs(pairing):
    engine, ids = taped(pairing.with_(gamma=1).engine), pairing.encode([PROMPTS[0].text])
    clean = engine.generate(ids, 30)
    assert set(engine.graphs.recorder.recorded) == {"round"}
    before = {id(x): set(vars(x)) for x in (engine, engine.drafter, *engine.models)}
    with suites.watched(engine) as spent:
        watched = engine.generate(ids, 30)
    assert watched.tokens == clean.tokens
    assert engine.graphs.recorder.recorded == ["round", "draft", "verify"]
    assert spent["rounds"] == len(clean.trace.rounds)
    assert spent["passes"] == 0 < spent["draft"]
    for x in (engine, engine.drafter, *engine.models):
        assert set(vars(x)) - before[id(x)] <= {"place"}
    assert engine.generate(ids, 30).tokens == clean.tokens


def test_the_suites_say_the_same_of_graphs(monkeypatch, pairing):
    """Every suite on a tape: nothing is timed well, and everything has to fit together."""
    monkeypatch.setattr(graphs, "on", lambda device: graphs.Graphs(Tape()))
    monkeypatch.setattr(cpu.Native, "sparing", 0)  # a tape knows only torch's operations
    taped_rig = pairing.apart()
    for name in suites.NAMES:
        asked = (PROMPTS, [1, 2], 12, 1)
        found, wanted = suites.run(name, taped_rig, *asked), suites.run(name, pairing, *asked)
        assert found.keys() == wanted.keys()
        if name == "peers":
            for row in found["rows"]:
                assert row["ours_equal"]["others"] == 0
        if name == "round":
            assert found["acceptance"] == wanted["acceptance"]


def test_a_drafter_without_a_model_drafts_in_all_of_its_draft_phase(pairing):
    found = suites.a_round(pairing.with_(drafter="ngram"), [PROMPTS[0].text], 8, 1)
    assert found["fast"]["draft_passes_ms"] == found["fast"]["phases"]["draft"]["ms"] > 0


def test_a_drafter_may_ask_the_target_beforehand(pairing, costly, tiny_folders):
    planted = pairing.with_(drafter=f"planted:0.5,{tiny_folders[1]}")
    fast = suites.a_round(planted, [PROMPTS[0].text], 8, 1)["fast"]
    ms = {phase: of["ms"] for phase, of in fast["phases"].items()}
    assert (ms["verify"], ms["accept"], ms["host"]) == (6000, 2000, 0)
    assert ms["draft"] == 3000 + fast["draft_passes_ms"]  # not the truth, told beforehand


def test_an_eagle_layer_has_no_pass_of_its_own():
    pairing = api.build(drafter="eagle", gamma=2)
    assert [lm.name for lm in roofline.causal(pairing)] == ["target-10m"]
    fast = suites.a_round(pairing, [PROMPTS[0].text], 8, 1)["fast"]
    assert 0 < fast["draft_passes_ms"] <= fast["phases"]["draft"]["ms"]


# --- scale ---------------------------------------------------------------------------------------


def test_scale_fits_the_floor_and_the_slope_that_there_are(pairing, monkeypatch, now):
    verify = LM.verify

    def slower(self, seqs, draft, taps=()):
        now.s += 0.010 + 0.001 * draft.tokens.numel()
        return verify(self, seqs, draft, taps)

    def took(_):
        now.s += 1

    monkeypatch.setattr(LM, "verify", slower)
    monkeypatch.setattr(suites, "_heads", lambda weight: {7: took, 9: took})
    found = suites.scale(pairing, ["some text"], [1, 4], 1)
    assert found["fit"]["floor_ms"] == pytest.approx(10)
    assert found["fit"]["per_token_us"] == pytest.approx(1000)
    assert found["fit"]["knee"] == pytest.approx(10)
    by = {(r["axis"], r["value"]): r for r in found["rows"]}
    assert by["batch", 4]["ms"] == pytest.approx(14)
    assert by["tokens", 8]["over_first"]["value"] == pytest.approx(18 / 11)
    assert {v for axis, v in by if axis == "tokens"} == {1, 2, 4, 8, 16, 32, 64}
    assert {v for axis, v in by if axis == "context"} == {128}
    assert {v for axis, v in by if axis == "model"} == {"target", "draft"}
    assert by["model", "draft"]["parameters"] == pairing.engine.models[1].parameters


def test_the_head_is_cut_to_parts_of_its_vocabulary():
    heads = suites._heads(torch.ones(8, 4))
    assert {V: tuple(head(None).shape) for V, head in heads.items()} == {
        2: (1, 2), 4: (1, 4), 8: (1, 8),
    }  # fmt: skip


# --- peers ---------------------------------------------------------------------------------------


def test_peers_do_equal_work_and_write_equal_texts(pairing):
    modules = [lm.module for lm in pairing.engine.models]
    kept = [module.generation_config for module in modules]
    for config in kept:
        config.eos_token_id = list(range(pairing.target.vocab))  # any token would end a text
    found = peers.peers(pairing, PROMPTS, [2], 10, 2)
    assert [module.generation_config for module in modules] == kept
    assert [(r["work"], r["batch"]) for r in found["rows"]] == [
        ("plain", 1), ("draft", 1), ("lookup", 1), ("vLLM plain", 1),
        ("plain", 2), ("draft over plain", 2),
    ]  # fmt: skip
    for row in found["rows"]:
        assert row["ours_equal"]["share"] == 1
        if row["missing"] is None:
            assert row["equal"] == {"share": 1, "ties": 0, "others": 0}
            assert row["ratio"]["low"] <= row["ratio"]["value"] <= row["ratio"]["high"]


def test_ratios_are_of_delivered_tokens_a_second(pairing, monkeypatch, now):
    def writer(cost, tokens):
        def write(texts):
            now.s += cost
            return [[1] * tokens for _ in texts]

        return write

    monkeypatch.setattr(peers, "ours", lambda engine, new: writer(2, 10))
    monkeypatch.setattr(
        peers, "others",
        lambda pairing, new: ({"plain": writer(3, 10), "draft": writer(2, 5)}, {"lookup": "gone"}),
    )  # fmt: skip
    monkeypatch.setattr(peers, "equal", lambda *_: None)
    found = peers.peers(pairing, PROMPTS, [1, 4, 16], 10, 2)
    plain, draft, lookup, _, crowd, over = found["rows"]
    assert (plain["tok_s"], plain["their_tok_s"]) == (5, pytest.approx(10 / 3))
    assert plain["ratio"]["value"] == pytest.approx(1.5)
    assert draft["ratio"]["value"] == pytest.approx(2)
    assert (lookup["ratio"], lookup["missing"]) == (None, "gone")
    assert (crowd["batch"], crowd["tok_s"], over["ratio"]["value"]) == (4, 20, pytest.approx(1.5))


def test_assisted_generation_drafts_gamma_tokens_every_round(pairing):
    widths = []
    target, draft = (lm.module for lm in pairing.engine.models)
    hook = target.register_forward_pre_hook(
        lambda module, args, more: widths.append(more["input_ids"].shape[1]), with_kwargs=True
    )
    write = peers.transformers(target, 30, assistant_model=draft)
    with peers.same_settings([target, draft], 3, Sampling()):
        [made] = write([[5, 6, 7]])
    hook.remove()
    assert len(made) == 30
    assert widths[0] == 3 + 3  # the prompt and the first guesses
    assert set(widths[1:-3]) == {1 + 3}


def test_sampling_is_the_same_law_and_texts_are_then_not_compared(pairing):
    with peers.same_settings([pairing.target.module], 3, Sampling(0.7, 5, 0.9)):
        config = pairing.target.module.generation_config
        assert (config.do_sample, config.temperature, config.top_k) == (True, 0.7, 5)
        assert (config.top_p, config.eos_token_id) == (0.9, None)
    plain = pairing.with_(temperature=0.7).engine.plain()
    assert peers.equal(plain, [[1]], [interleave.Turn(1.0, [[1]])], 1) is None


def test_a_planted_difference_is_found(pairing):
    plain = pairing.engine.plain()
    plain.eos = ()
    ids = pairing.encode([p.text for p in PROMPTS])
    first, second = plain.generate(ids, 10).tokens
    seen = [interleave.Turn(1.0, [first]), interleave.Turn(1.0, [second])]
    assert peers.equal(plain, ids, seen, 10) == {"share": 1, "ties": 0, "others": 0}
    law = plain.target.module(input_ids=torch.tensor([ids[1] + second[:4]])).logits[0, -1]
    wrong = [*second[:4], int(law.argmin()), *second[5:]]
    seen = [interleave.Turn(1.0, [first]), interleave.Turn(1.0, [wrong])]
    assert peers.equal(plain, ids, seen, 10) == {"share": 14 / 20, "ties": 0, "others": 1}
    short = [interleave.Turn(1.0, [first]), interleave.Turn(1.0, [second[:7]])]
    assert peers.equal(plain, ids, short, 10) == {"share": 17 / 20, "ties": 0, "others": 1}


def test_a_missing_peer_says_why(pairing, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    _, missing = peers.others(pairing.with_(drafter="ngram"), 4)
    assert missing == {
        "draft": "assisted generation needs a draft model, and ngram is not one",
        "vllm": "vLLM is not installed",
    }
    monkeypatch.setattr(pairing.engine.drafter.lm, "config", types.SimpleNamespace(vocab_size=7))
    assert "mistakes for different tokenizers" in peers.unassisted(pairing)


def test_vllm_is_asked_for_as_many_tokens_without_an_end(pairing, monkeypatch):
    asked = {}

    class Fake:
        def __init__(self, **how):
            asked.update(how)

        def generate(self, prompts, sampling, use_tqdm):
            answers = [[t + 1 for t in p["prompt_token_ids"]] for p in prompts]
            outs = [types.SimpleNamespace(token_ids=tuple(a)) for a in answers]
            return [types.SimpleNamespace(outputs=[out]) for out in outs]

    fake = types.ModuleType("vllm")
    fake.__spec__ = importlib.machinery.ModuleSpec("vllm", None)
    fake.LLM, fake.SamplingParams = Fake, lambda **how: asked.update(how)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    found, missing = peers.others(pairing, 6)
    assert found["vllm"]([[1, 2], [3]]) == [[2, 3], [4]]
    assert "vllm" not in missing
    assert (asked["max_tokens"], asked["ignore_eos"], asked["temperature"]) == (6, True, 0)
    assert asked["model"] == pairing.options["target"]


# --- what is said of the machine -----------------------------------------------------------------


@pytest.mark.parametrize(("times", "said"), [([9, 1], "9x"), ([2, 1], "")])
def test_an_emulated_dtype_is_warned_of(monkeypatch, times, said):
    single = iter([times[0]] * 4 + [times[1]] * 4)
    monkeypatch.setattr(doctor, "_pass", lambda weights, n: next(single))
    warning = doctor.slow(torch.float64, CPU)
    assert said in warning
    assert bool(warning) == bool(said)
    assert len(warning.splitlines()) <= 1
    assert doctor.slow(torch.float32, CPU) == ""


# --- the command ---------------------------------------------------------------------------------


def test_doctor_times_reading_and_not_launching():
    """On the fastest memory there is, in the smaller dtype."""
    width, count = doctor.SHAPES["cuda"]
    read_s, launch_s = 2 * width**2 / 5e12, 5e-6
    assert read_s > 4 * launch_s
    assert 4 * count * width**2 <= 2**30


def test_doctor_tells_what_is_absent_from_what_is_too_old(monkeypatch):
    there = {"torch": "2.4.0", "numpy": "2.1", "pandas": None}
    asked = ["torch>=2.11", "numpy", "pandas>=2"]
    monkeypatch.setattr(doctor, "version", there.get)
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: [*asked, "nvml; extra == 'gpu'"])
    assert doctor.missing() == [
        "torch>=2.11, 2.4.0 is installed: pip install 'torch>=2.11'",
        "pandas: pip install pandas",
    ]


def test_a_folder_gets_a_file_that_says_what_was_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(suites, "fingerprint", lambda *_: {"device": "NVIDIA X 9", "dtype": "f8"})
    options = {"device": "cpu", "dtype": "bfloat16", "target": "some/mine"}
    assert suites.place(tmp_path, options) == tmp_path / "bench_NVIDIA-X-9_f8_mine.json"
    assert suites.place(tmp_path / "x.json", options) == tmp_path / "x.json"
    (tmp_path / "v0.3").mkdir()
    assert suites.place(tmp_path / "v0.3", options).parent == tmp_path / "v0.3"


@pytest.fixture
def bench(monkeypatch, capsys, tiny_folders, tmp_path):
    """bench("round", "--gamma", "2") -> (exit code, stdout, stderr), on the tiny models."""
    file = tmp_path / "question.jsonl"
    lines = [{"question_id": i, "category": "mine", "turns": [f"text {i}"]} for i in range(2)]
    file.write_text("\n".join(map(json.dumps, lines)))
    usual = ("--target", tiny_folders[0], "--drafter", tiny_folders[1], "--prompts", str(file))

    def call(*args: str):
        few = ("--gamma", "2", "--repeats", "1", "--max-new-tokens", "6", "--batches", "1,2")
        monkeypatch.setattr(sys, "argv", ["specexp", "bench", *usual, *few, *args])
        with pytest.raises(SystemExit) as stopped:
            app.main()
        out, err = capsys.readouterr()
        return stopped.value.code or 0, out, err

    return call


def test_bench_writes_json_and_a_picture_a_suite(bench, tmp_path, tiny_folders):
    out = tmp_path / "new" / "bench.json"
    code, said, err = bench("--out", str(out))
    assert code == 0, err
    report = json.loads(out.read_text())
    assert list(report["suites"]) == list(suites.NAMES)
    assert {"device", "torch", "threads", "dtype", "load", "versions", "warning"} <= set(
        report["about"]
    )
    assert {"torch", "transformers", "python"} <= set(report["about"]["versions"])
    assert report["parameters"]["target"] == tiny_folders[0]
    assert report["parameters"]["batches"] == [1, 2]
    for name in suites.NAMES:
        assert out.with_name(f"bench-{name}.png").stat().st_size > 0
        assert f"{name}:" in said
    first = said.splitlines()[0]
    assert all(part in first for part in ("cpu", "float32", "threads", "load average"))


def test_bench_prints_nothing_but_json_when_asked(bench):
    code, out, err = bench("roofline", "round", "roofline", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert list(report["suites"]) == ["roofline", "round"]
    assert [row["tokens"] for row in report["suites"]["roofline"]["rows"]] == [1, 3, 1, 3]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["rouf"], "suite 'rouf' is unknown; there are peers, roofline, round, scale, memory"),
        (["--gamma", "0"], "gamma is 0"),
        (["--gamma", "-1"], "gamma is -1"),
        (["--repeats", "0"], "repeats is 0"),
        (["--batches", "1,x"], "batches '1,x': give whole numbers"),
        (["--batches", "0,2"], "batch is 0"),
        (["--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--gamma", "999"], "gamma 999 exceeds the 128-token context"),
        (["--temperature", "-1"], "temperature"),
        (["--dtype", "int8"], "dtype 'int8' is unknown"),
        (["--device", "tpu"], "device 'tpu' is unknown"),
        (["--drafter", "modl"], "did you mean"),
        (["--prompts", "nowhere.jsonl"], "no prompts at nowhere.jsonl"),
        (["--out", "/dev/null/bench.json"], "cannot write /dev/null/bench.json"),
    ],
)
def test_bad_input_is_one_line_before_a_weight_is_loaded(bench, monkeypatch, options, says):
    def loaded(*args):
        raise AssertionError("loaded")

    monkeypatch.setattr("specexp.models.load.load", loaded)
    code, out, err = bench(*options)
    assert code == 2, err
    assert says in err
    assert len(err.strip().splitlines()) == 1
    assert not out


# --- against an earlier run ----------------------------------------------------------------------


def as_json(value: float, off: float = 0.0) -> dict[str, float]:
    return {"value": value, "low": value - off, "high": value + off}


def figures(**ratios: dict[str, float]) -> dict:
    """A report of these ratios, the others as they usually are."""
    sides = {side: {"overhead": as_json(0.16, 0.02)} for side in ("plain", "fast")}
    sides["fast"]["overhead"] = ratios.get("overhead", sides["fast"]["overhead"])
    peer = {"work": "plain", "batch": 1, "ratio": ratios.get("peer", as_json(3.0, 0.1))}
    step = {"model": "m", "tokens": 4, "over_bare": as_json(0.6, 0.1),
            "over_step": ratios.get("step", as_json(1.1, 0.02))}  # fmt: skip
    speedup = {"measured": as_json(1.5, 0.1)}
    return {
        "about": {"device": "this"},
        "suites": {
            "peers": {"rows": [peer, peer | {"work": "draft", "ratio": None}]},
            "roofline": {"rows": [step]},
            "round": sides | {"speedup": speedup},
        },
    }


@pytest.mark.parametrize(
    ("now", "worse", "better"),
    [
        ({}, None, None),
        ({"peer": as_json(2.5, 0.1)}, "peers: plain, batch 1", None),
        ({"peer": as_json(2.7, 0.1)}, None, None),  # apart, by less than the margin
        ({"peer": as_json(2.5, 0.5)}, None, None),  # too uncertain
        ({"peer": as_json(4.0, 0.1)}, None, "peers: plain, batch 1"),
        ({"step": as_json(1.3, 0.02)}, "pass: m, 4 tokens / one", None),
        ({"step": as_json(1.0, 0.01)}, None, "pass: m, 4 tokens / one"),
        ({"overhead": as_json(0.3, 0.01)}, "round: fast, outside passes", None),
    ],
)
def test_a_ratio_is_worse_when_the_intervals_lie_apart_the_wrong_way_round(now, worse, better):
    found = regression.changes(figures(), figures(**now))
    assert len(found) == 6
    assert [c.what for c in found if c.worse] == ([worse] if worse else [])
    assert [c.what for c in found if c.better] == ([better] if better else [])


@pytest.mark.parametrize("alone", [as_json(3.0, 0.1), None])
def test_a_batch_of_one_that_is_compared_twice_is_not_taken_for_one_figure(alone):
    report = figures(peer=alone)
    plain = report["suites"]["peers"]["rows"][0]
    report["suites"]["peers"]["rows"].append(plain | {"ratio": as_json(1.0, 0.1)})
    found = regression.changes(report, report)
    assert not any(change.worse or change.better for change in found)
    said = [change.what for change in found if "peers" in change.what]
    assert said == ["peers: plain, batch 1"] * bool(alone) + ["peers: plain, batch 1, together"]


def test_names_in_the_comparison_are_shown_to_the_letter():
    report = figures()
    report["suites"]["roofline"]["rows"][0]["model"] = "[bold]m[/]"
    console = Console(width=200, record=True)
    with console.capture() as said:
        console.print(regression.table(regression.changes(report, report), report, report))
    assert "pass: [bold]m[/], 4 tokens / one" in said.get()


def test_the_figures_that_are_kept_can_be_compared_with():
    for file in ("bench.json", "bench_bfloat16.json"):
        kept = json.loads((MEASURED / file).read_text())
        again = regression.read(MEASURED / file, kept["parameters"], suites.NAMES)
        found = regression.changes(kept, again)
        assert len(found) == 14
        assert not any(change.worse or change.better for change in found)


def test_an_earlier_report_is_there_until_something_was_measured(bench, tmp_path, monkeypatch):
    def fails(*args):
        raise UserError("planted")

    (out := tmp_path / "then.json").write_text("earlier figures")
    monkeypatch.setattr(suites, "run", fails)
    assert bench("round", "--out", str(out))[0] == 2
    assert out.read_text() == "earlier figures"


def test_bench_ends_with_1_where_something_became_worse(bench, tmp_path):
    out = tmp_path / "then.json"
    assert bench("round", "--out", str(out))[0] == 0
    kept = json.loads(out.read_text())
    kept["about"]["device"] = "a toaster"
    kept["suites"]["round"]["plain"]["overhead"] = as_json(1e9)  # nothing can be worse
    kept["suites"]["round"]["speedup"]["measured"] = as_json(1e-9)
    for overhead, code, word in ((-1e9, 1, "worse"), (1e9, 0, "better")):
        kept["suites"]["round"]["fast"]["overhead"] = as_json(overhead)
        out.write_text(json.dumps(kept))
        ended, said, err = bench("round", "--against", str(out))
        assert ended == code, err
        assert "on another device (a toaster)" in said
        [row] = [line for line in said.splitlines() if "round: fast" in line]
        assert word in row


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda file: file.unlink(), "cannot read"),
        (lambda file: file.write_text("[]"), "is not a report that this version reads"),
        (lambda file: file.write_text("{"), "is not a report that this version reads"),
        (
            lambda file: file.write_text('{"parameters": {}, "suites": {}}'),
            "was measured with target",
        ),
        (
            lambda file: file.write_text('{"parameters": {}, "suites": {"round": {"plain": 1}}}'),
            "is not a report that this version reads",
        ),
        (
            lambda file: file.write_text('{"parameters": {}, "suites": {"peers": []}}'),
            "is not a report that this version reads",
        ),
    ],
)
def test_what_cannot_be_compared_with_is_refused_beforehand(bench, tmp_path, spoil, says):
    file = tmp_path / "then.json"
    file.write_text("{}")
    spoil(file)
    code, out, err = bench("round", "--against", str(file))
    assert code == 2
    assert says in err
    assert len(err.strip().splitlines()) == 1
    assert not out


def test_an_earlier_report_of_other_suites_is_refused(tmp_path):
    file = tmp_path / "then.json"
    given = dict.fromkeys(regression.ALIKE, 1)
    file.write_text(json.dumps({"parameters": given, "suites": {"scale": {}, "peers": {}}}))
    with pytest.raises(UserError, match="none of the suites"):
        regression.read(file, given, ["scale", "round"])
    assert regression.read(file, given, ["peers"])


def test_an_unknown_suite_is_refused_by_the_package_too(tiny_folders):
    with pytest.raises(UserError, match="unknown"):
        suites.check(["x"], {"gamma": 1, "target": tiny_folders[0], "drafter": "null"}, PROMPTS)


def test_tables_say_what_is_missing_and_what_differs():
    odd = {"share": 0.9, "ties": 1, "others": 2}
    same = {"value": 2.0, "low": 1.5, "high": 2.5}
    row = {"work": "plain", "batch": 1, "tok_s": 20.0, "their_tok_s": 10.0, "ratio": same,
           "missing": None, "equal": odd}  # fmt: skip
    gone = row | {"work": "draft", "their_tok_s": None, "ratio": None, "equal": None,
                  "missing": "because"}  # fmt: skip
    found = {"drafter": "d", "gamma": 2, "new_tokens": 4, "prompts": 1, "repeats": 1,
             "rows": [row, gone]}  # fmt: skip
    shown, notes = hardware.tables("peers", found)
    console = Console(width=100, record=True, quiet=True)
    with console.capture() as said:
        console.quiet = False
        console.print(*shown)
    assert "2.00x [1.50, 2.50]" in said.get()
    assert "90.0 %, ties: 1, unexplained: 2" in said.get()
    assert notes[0] == "draft model: because"
    assert "plain 2.00x faster" in hardware.figure("peers", found).get_suptitle()
