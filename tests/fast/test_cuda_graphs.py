"""What is recorded and replayed does what was run: on a CPU by a tape, on a GPU by CUDA graphs."""

import copy
import gc
import itertools
import logging
import weakref
from contextlib import contextmanager, nullcontext

import pytest
import torch
from conftest import also, in_turn, on_every_device, one_in
from support.tape import Counted, Tape, covered, operations, taped, untaped
from support.tiny import (
    DRAFTERS,
    NEW,
    PROMPTS,
    TREES,
    InTurn,
    draft_module,
    engine,
    expected,
    module,
)

from specexp.drafters import Drafter
from specexp.drafters.model import DraftModel
from specexp.drafters.recycle import Recycle
from specexp.engine import Engine
from specexp.errors import NonFiniteLogits
from specexp.fast import cuda_graphs
from specexp.fast.cuda_graphs import CudaTape
from specexp.fast.recordings import MAX_RECORDINGS, Recordings, Refused
from specexp.measure.exactness import certify, compare
from specexp.measure.under_load.loops import AllHalfNone
from specexp.models.lm import fill
from specexp.models.load import of_module
from specexp.ops import OPS, fast
from specexp.policy import Fixed
from specexp.rules import Match
from specexp.sampling import Sampling
from specexp.sequences import Sequences
from specexp.serving.engine_rows import EngineRows, bucket
from specexp.serving.requests import Request
from specexp.serving.server import Server
from specexp.serving.sources import Source, serve
from specexp.tree import Tree

FEW = ["chain", "branching", "grown"]
LAWS = [("reject", 0.0), ("match", 0.9), ("reject", 0.9), ("block", 0.9)]
USUAL = [("chain", "block", 0.9), ("branching", "match", 0.9), ("grown", "reject", 0.0)]
CASES = [
    (tree, *law)
    for tree, law in itertools.product(FEW, LAWS)
    if (law[0] != "block" or tree == "chain") and (tree, *law) not in USUAL
]
MIXED = [
    kind if kind in ("model", "eagle3", "crossed") else pytest.param(kind, marks=pytest.mark.slow)
    for kind in DRAFTERS
]
LONG = 40
TURNS = [Tree.chain(gamma) for gamma in (3, 1, 0, 2)]


def told(found):
    """All that a generation says: texts, and every draft token of every round."""
    return found.tokens, [r.steps for r in found.trace.rounds]


@on_every_device
@pytest.mark.parametrize(
    ("kind", "case"), [*in_turn(DRAFTERS, USUAL), *also(*itertools.product(DRAFTERS, CASES))]
)
def test_replayed_rounds_are_the_rounds(kind, case, device):
    """Token for token, to the last bit, in batches one after the other in the same memory."""
    *shape, temperature = case
    asked = {"temperature": temperature, "dtype": torch.float32, "device": device}
    one, other = (make(engine(kind, *shape, **asked)) for make in (taped, untaped))
    for prompts in (PROMPTS, PROMPTS[2:4]):
        assert told(one.generate(prompts, LONG)) == told(other.generate(prompts, LONG))
    assert set(one.recorder.tape.recorded) == {"round"}
    assert one.recorder.tape.replays > 5
    assert not other.recorder.tape.recorded


@pytest.mark.parametrize(
    ("kind", "tree"), one_in(3, itertools.product(DRAFTERS, ("chain", "grown")))
)
def test_a_replayed_text_is_the_text_without_graphs(kind, tree):
    one, other = (engine(kind, tree, "match", temperature=0.9) for _ in range(2))
    assert told(taped(one).generate(PROMPTS, NEW)) == told(other.generate(PROMPTS, NEW))


@on_every_device
@pytest.mark.parametrize("kind", MIXED)
def test_rounds_of_several_trees_are_a_graph_each(kind, device):
    asked = {"dtype": torch.float32, "device": device}
    one, other = taped(engine(kind, **asked)), untaped(engine(kind, **asked))
    for made in (one, other):
        made.policy = InTurn(*TURNS)
    assert told(one.generate(PROMPTS, 60)) == told(other.generate(PROMPTS, 60))
    assert len(one.recorder.tape.recorded) >= (1 if kind == "null" else 4)


# prompts


@pytest.fixture
def reading(monkeypatch):
    """The graphs in which prompts are read, on a CPU as well; those of the last engine."""
    graphs, real = [], cuda_graphs.on
    monkeypatch.setitem(
        OPS[fill].kernels, "cpu", (cuda_graphs.replayed_fill, lambda device: fast())
    )

    def on(device):
        recordings = real(device)
        graphs.append(Recordings(Counted(recordings.tape if recordings else Tape())))
        return graphs[-1]

    monkeypatch.setattr(cuda_graphs, "on", on)
    OPS[fill].chosen.clear()
    yield graphs
    OPS[fill].chosen.clear()


@on_every_device
@pytest.mark.parametrize(
    ("kind", "family"),
    [("eagle3", "llama"), ("crossed", "llama"), ("ngram", "gemma3"),
     *also(("model", "llama"), ("early_exit", "llama"), ("suffix", "gpt2"))],
)  # fmt: skip
def test_prompts_are_read_in_graphs(kind, family, device, reading, monkeypatch):
    """Other prompts, and others of other lengths, replay what was captured for the first."""
    asked = {"family": family, "temperature": 0.9, "dtype": torch.float32, "device": device}
    one, other = (taped(engine(kind, "chain", "match", **asked)) for _ in range(2))
    texts = [PROMPTS, PROMPTS[1:], [[3] * 20] * 3, PROMPTS[::-1], [p[:3] for p in PROMPTS]] * 2
    replayed = [one.generate(prompts, NEW).tokens for prompts in texts]
    counts = [graphs.tape for graphs in reading if graphs.replays]
    assert {kind for count in counts for kind in count.recorded} == {"fill"}
    assert sum(count.replays for count in counts) >= 4
    monkeypatch.setattr(cuda_graphs, "on", lambda _: None)
    assert replayed == [other.generate(prompts, NEW).tokens for prompts in texts]


def test_what_cannot_read_prompts_in_graphs_says_so_once(reading, monkeypatch, caplog):
    def refuses(*_):
        raise Refused("this is not permitted")

    monkeypatch.setattr(Tape, "record", refuses)
    made = engine("null")
    assert [made.generate(PROMPTS, NEW).tokens for _ in range(4)] == [expected("llama")] * 4
    [line] = [r.message for r in caplog.records if "graphs" in r.message]
    assert line.startswith("CUDA graphs are off for prompts that target reads")


def test_passes_of_prompts_have_few_sizes():
    assert [cuda_graphs.padded(n) for n in (1, 16, 17, 64, 65, 300, 512)] == [
        16, 16, 32, 64, 128, 320, 512,
    ]  # fmt: skip


# while the host reads


@pytest.fixture
def watched():
    """An engine that notes when rounds are begun and when they are read."""

    def make(*args, **kwargs):
        made, seen = taped(engine(*args, **kwargs)), []
        start = made.start

        def noted(seqs, tree, hold):
            if tree.depth:
                assert int(seqs.length.max()) + tree.depth <= made.drafter.context
            seen.append(("begun", tree.depth))
            wait = start(seqs, tree, hold)
            return lambda: (seen.append(("read", tree.depth)), wait())[1]

        made.start = noted
        return made, seen

    return make


def test_a_round_is_under_way_while_the_one_before_is_read(watched):
    made, seen = watched("model", dtype=torch.float32)
    rounds = made.generate(PROMPTS, LONG).trace.rounds
    begun = [i for i, (what, _) in enumerate(seen) if what == "begun"]
    read = [i for i, (what, _) in enumerate(seen) if what == "read"]
    assert len(read) == len(rounds) > 8
    assert all(begun[n + 1] < read[n] for n in range(len(rounds) - 6))
    assert len(begun) <= len(read) + 1


def test_no_round_is_begun_that_nobody_can_need(watched):
    made, seen = watched("model", "chain", dtype=torch.float32)
    made.generate(PROMPTS, 5)
    assert seen[:2] == [("begun", 4), ("read", 4)]
    made, seen = watched("model", "chain", dtype=torch.float32)
    made.drafter.on_host = True  # one at a time
    made.generate(PROMPTS, LONG)
    assert [what for what, _ in seen] == ["begun", "read"] * (len(seen) // 2)


@pytest.mark.parametrize("kind", ["model", "eagle3", "null"])
def test_ends_and_contexts_hold_while_rounds_are_under_way(watched, kind):
    eos = (3, 9, 17)
    made, _ = watched(kind, eos=eos)
    made.policy = InTurn(*TURNS)
    other = engine(kind, eos=eos)
    assert made.generate(PROMPTS, LONG).tokens == other.generate(PROMPTS, LONG).tokens
    for pairing in (made, other):
        pairing.drafter.context = 20
    assert made.generate(PROMPTS, LONG).tokens == other.generate(PROMPTS, LONG).tokens


def test_a_round_that_is_read_late_is_not_read_out_of_the_next(monkeypatch):
    one, other = (taped(engine("model", dtype=torch.float32)) for _ in range(2))
    late = told(one.generate(PROMPTS, LONG))
    monkeypatch.setattr(other.recorder, "ahead", 0)
    assert told(other.generate(PROMPTS, LONG)) == late


# what a graph must not do


def places(made: Engine, seqs: Sequences) -> list[int]:
    """Where everything lies that lasts from round to round."""
    kept = [seqs.tokens, seqs.length, seqs.limit, seqs.stream, *made.drafter.state]
    for lm in made.models:
        kept += [lm.fault, *lm.cache._buffers()]
    return [x.data_ptr() for x in kept]


@pytest.mark.parametrize(("kind", "tree"), in_turn(DRAFTERS, FEW))
def test_state_keeps_its_addresses_and_rounds_their_shapes(kind, tree):
    made = engine(kind, tree, temperature=0.9, dtype=torch.float32)
    seqs = made.begin(Sequences.of(PROMPTS, NEW, slack=TREES[tree].room))
    made.round(seqs, TREES[tree])
    before, seen = places(made, seqs), []
    for _ in range(3):
        with operations() as noted:
            made.round(seqs, TREES[tree])
        assert places(made, seqs) == before
        seen.append(noted.shapes)
    assert seen[0] == seen[1] == seen[2]


class Elsewhere(Recycle):
    """Keeps what it learns in another tensor every round."""

    def observe(self, seqs, draft, verdict, seen):
        self.table.notes = self.table.notes.clone()
        super().observe(seqs, draft, verdict, seen)


class Counts(Drafter):
    """Drafts the number of the round, which it keeps on the host."""

    name, number = "counts", 0

    def propose(self, seqs, tree, rng):
        self.number += 1
        drafted = torch.full_like(seqs.tokens[:, 1 : len(tree)], self.number % 32)
        return seqs.draft(tree.nodes(seqs.tokens.device), drafted)


class CountsAndSaysSo(Counts):
    @property
    def shaped_by(self):
        return (self.number,)


@pytest.mark.parametrize("spoilt", [Elsewhere, Counts, CountsAndSaysSo])
def test_a_drafter_that_breaks_the_contract_is_noticed(spoilt):
    """The text is exact even so; the drafts are others."""
    found = []
    for make in (taped, untaped):
        null = engine("null", "chain", "match", temperature=0.9)
        drafter = Recycle(null.target, 4) if spoilt is Elsewhere else spoilt()
        drafter.__class__ = spoilt
        made = make(Engine(null.target, drafter, null.policy, null.sampling, null.rule))
        found.append(told(made.generate(PROMPTS, 60)))
    (texts, drafts), (wanted, others) = found
    assert texts == wanted
    assert (drafts == others) == (spoilt is CountsAndSaysSo)


class Host(DraftModel):
    """Reads a value on the host, and says so, or does not."""

    def propose(self, seqs, tree, rng):
        assert int(seqs.length.max()) > 0
        return super().propose(seqs, tree, rng)


def hosted(device: str, says: bool) -> Engine:
    law = Sampling()
    target = of_module(module("llama", torch.float32, device), "target")
    drafts = Host(of_module(copy.deepcopy(draft_module(torch.float32)).to(device), "draft"), law)
    drafts.on_host = says
    return Engine(target, drafts, Fixed(Tree.branching(2, 2)), law, Match())


@on_every_device
def test_of_a_drafter_on_the_host_the_target_is_recorded_alone(device):
    one, other = taped(hosted(device, says=True)), untaped(hosted(device, says=True))
    assert told(one.generate(PROMPTS, LONG)) == told(other.generate(PROMPTS, LONG))
    assert set(one.recorder.tape.recorded) == {"verify"}
    assert one.recorder.tape.replays > 5


@on_every_device
def test_what_cannot_be_recorded_is_run_and_one_line_says_why(device, caplog):
    one, other = taped(hosted(device, says=False)), untaped(hosted(device, says=False))
    with caplog.at_level(logging.WARNING, "specexp"):
        found = [one.generate(PROMPTS, LONG) for _ in range(2)]
    assert [told(x) for x in found] == [told(other.generate(PROMPTS, LONG)) for _ in range(2)]
    assert not one.recorder.tape.recorded
    [line] = [r.getMessage() for r in caplog.records if "CUDA graph" in r.getMessage()]
    assert line.startswith("CUDA graphs are off for this engine, which makes it slower: ")
    assert "\n" not in line


@on_every_device
def test_where_one_could_not_be_recorded_another_is(device):
    """Graphs of a kind share memory, and a recording that failed had begun to use it."""
    refused = taped(hosted(device, says=False))
    refused.generate(PROMPTS, LONG)
    assert refused.recorder.refused
    asked = {"dtype": torch.float32, "device": device}
    one, other = taped(engine("model", **asked)), untaped(engine("model", **asked))
    assert told(one.generate(PROMPTS, LONG)) == told(other.generate(PROMPTS, LONG))
    assert set(one.recorder.tape.recorded) == {"round"}
    assert one.recorder.tape.replays > 5


@torch.inference_mode()
def in_parts(made: Engine, trees: list[Tree], rounds: int) -> list[list[list[int]]]:
    """What is drafted when draft and verify are recorded apart and the rest is not."""
    seqs = made.begin(Sequences.of(PROMPTS, 60, slack=10))
    drafts = []
    for i in range(rounds):
        tree = trees[i % len(trees)]
        draft = made.recorder.run_stage(made, "draft", made.draft, seqs, tree)
        drafts.append(draft.tokens.tolist())
        seen = made.recorder.run_stage(made, "verify", made.verify, seqs, draft)
        made.commit(seqs, draft, made.accept(draft, seen), seen)
    return drafts


@pytest.mark.parametrize(
    "kind", ["model", "medusa", "eagle3", "dspark", "crossed", "recycle", "planted"]
)
def test_draft_recorded_apart_carries_its_memo_to_observe(kind):
    trees = [Tree.branching(2, 2, 1), Tree.branching(3, 1, 1), Tree.chain(4)]
    one, other = (make(engine(kind, rule="match")) for make in (taped, untaped))
    assert in_parts(one, trees, 24) == in_parts(other, trees, 24)
    assert {"draft", "verify"} <= set(one.recorder.tape.recorded)


def test_unreferenced_engine_is_freed_with_its_graphs():
    made = taped(engine("model"))
    made.generate(PROMPTS, LONG)
    assert made.recorder.replays
    gone = weakref.ref(made), weakref.ref(made.recorder)
    gc.disable()
    try:
        del made
        assert [ref() for ref in gone] == [None, None]
    finally:
        gc.enable()


# memory that stays


def test_engines_that_share_a_target_settle_in_one_memory():
    one = taped(engine("model", "chain"))
    other = taped(one.plain())
    batches = [PROMPTS, PROMPTS[:1], [[3] * 70], PROMPTS[1:4]]
    wanted = [engine("null", "empty").generate(prompts, NEW).tokens for prompts in batches]
    seen = []
    for _ in range(3):
        for prompts, texts in zip(batches, wanted, strict=True):
            for made in (one, other):
                assert made.generate(prompts, NEW).tokens == texts
        seen.append([len(made.recorder.tape.recorded) for made in (one, other)])
    assert seen[1] == seen[2]
    assert one.target.cache.batch == len(PROMPTS)
    assert one.target.cache.size >= 70 + NEW


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("kind", ["model", "early_exit"])
def test_a_cache_has_gone_when_room_for_a_larger_one_is_counted(kind, recorded, monkeypatch):
    made, there = engine(kind, "chain"), []
    made = taped(made) if recorded else made
    assert (made.recorder.ahead > 0) == recorded
    made.generate(PROMPTS[:1], NEW)
    held = [x for lm in made.models for x in (lm.cache, *lm.cache._buffers())]
    old = [weakref.ref(x) for x in held]
    del held

    def free_memory(device):
        there.extend(ref() is not None for ref in old)
        return 2**40

    monkeypatch.setattr("specexp.models.memory.free_memory", free_memory)
    gc.disable()
    try:
        made.generate(PROMPTS, NEW)
        assert there
        assert not any(there)
    finally:
        gc.enable()


def test_nothing_is_replayed_in_memory_that_is_gone():
    made = taped(engine("null", "empty"))
    seqs = made.begin(Sequences.of(PROMPTS, LONG, slack=1))
    for _ in range(CudaTape.warm + 3):
        made.run(seqs, TREES["empty"])
    assert made.recorder.tape.replays == 2
    made.plain().rows.allocate(len(PROMPTS), 99)  # the target is theirs, too
    made.run(seqs, TREES["empty"])
    assert made.recorder.tape.replays == 2


def test_cache_is_no_larger_than_asked_when_memory_is_short(monkeypatch):
    made = taped(engine("model", "chain"))
    made.generate(PROMPTS, NEW)
    monkeypatch.setattr("specexp.models.memory.free_memory", lambda device: 128 * 2**10)
    assert len(made.generate([[3] * 90], 9).tokens[0]) == 9
    assert made.target.cache.batch == 1


def test_texts_end_where_the_engine_says_that_they_do():
    made = taped(engine("model", "chain"))
    whole = made.generate(PROMPTS, LONG).tokens
    made.eos = (whole[0][4],)
    assert made.generate(PROMPTS, LONG).tokens[0] == whole[0][: whole[0].index(made.eos[0]) + 1]


def test_a_drafter_that_comes_later_finds_room():
    first = taped(engine("null", "chain", "match"))
    wanted = first.generate(PROMPTS, LONG).tokens
    for kind in ("model", "recycle"):
        drafter = engine(kind).drafter
        made = taped(Engine(first.target, drafter, first.policy, first.sampling, first.rule))
        assert made.generate(PROMPTS, LONG).tokens == wanted


def test_rules_and_laws_that_change_are_other_graphs():
    made = taped(engine("model", "chain", "reject", temperature=0.9))
    made.generate(PROMPTS, LONG)
    assert certify(made, PROMPTS, LONG).bugs == 0  # a copy of it, with another rule
    recorded = len(made.recorder.tape.recorded)
    made.generate(PROMPTS, LONG)
    assert len(made.recorder.tape.recorded) <= recorded + 1


@pytest.mark.parametrize("culprit", ["target", "draft"])
def test_nothing_that_is_no_number_stays_in_the_seats(culprit):
    law = Sampling()
    target = of_module(copy.deepcopy(module("llama", torch.float64)), "target")
    draft = of_module(copy.deepcopy(draft_module(torch.float64)), "draft")
    broken = target if culprit == "target" else draft
    weight = broken.module.model.embed_tokens.weight
    kept = weight[31].clone()
    made = taped(Engine(target, DraftModel(draft, law), Fixed(Tree.chain(3)), law))
    wanted = made.generate(PROMPTS[:4], LONG).tokens
    with torch.no_grad():
        weight[31] = torch.nan
    with pytest.raises(NonFiniteLogits):
        made.generate([[31, 31, 31], [31]], 9)
    with torch.no_grad():
        weight[31] = kept
    assert made.generate(PROMPTS[:4], LONG).tokens == wanted


# rows that come and go


@on_every_device
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("kind", MIXED)
def test_served_texts_are_the_texts(kind, ragged, device, reading):
    """Rounds cover free rows, too; texts join, leave and move; rows draft alike or by budgets.
    Prompts are read in a row of their own, where that is captured."""
    asked = {"temperature": 0.9, "dtype": torch.float32}
    made = taped(engine(kind, "chain", "match", device=device, **asked))
    bank = EngineRows(made, count=6, slots=64, slack=5)
    requests = [Request(p, NEW, stream=i) for i, p in enumerate(PROMPTS * 2)]
    server = Server(bank, AllHalfNone(3) if ragged else InTurn(*TURNS), chunk=8)
    responses = serve(server, Source(requests, 5))
    texts = [a.tokens for a in sorted(responses, key=lambda a: a.request.stream)]
    plain = engine("null", "empty", **asked)
    assert compare(plain, PROMPTS * 2, texts, NEW, range(10)).bugs == 0
    assert made.recorder.tape.replays > 0
    assert sum(graphs.tape.replays for graphs in reading) > 5
    assert {first for graphs in reading for (_, (_, (first, *_), *_)) in graphs.replays} <= {0, 6}


def test_row_that_breaks_spoils_a_prompt_that_is_half_read(reading):
    made = taped(engine("null", "empty"))
    bank, text = EngineRows(made, count=3, slots=64, slack=1), PROMPTS[3]
    for row in (0, 1):
        bank.enter(row, text, row)
    read = len(text) - 1
    bank.prefill(0, 0, read - 1)
    bank.leave(1, broken=True)
    bank.prefill(0, read - 1, read)
    bank.end_prefill(0, read + 1 + NEW)
    for _ in range(3):
        bank.round([0], read + NEW, TREES["empty"])
    assert bank.text(0, read + 1, read + 4) == expected("llama")[3][:3]
    bank.leave(0, broken=True)
    assert not any(x[bank.desk].any() for x in made.target.cache._buffers())


def test_rounds_cover_known_sizes_where_rows_are_free():
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 30)] == [
        1, 2, 4, 4, 8, 8, 8, 16, 16, 24, 32,
    ]  # fmt: skip
    made = engine("model", "chain")
    bank = EngineRows(made, count=7, slots=64, slack=5)

    assert covered(bank, 0, 0, 0) == (3, None)
    assert covered(bank, 0, 0, -1) == (3, [0, 0, -1])
    assert covered(bank, 2, 2, 2) == (3, [2, 2, 2])
    assert covered(bank, 2, 2, -1) == (3, [2, 2, -1])
    assert covered(bank, 2, 0, -1) == (3, [2, 0, -1])
    bank = EngineRows(taped(made), count=7, slots=64, slack=5)
    assert [covered(bank, *[2] * n)[0] for n in (1, 3, 4, 5, 7)] == [1, 4, 4, 7, 7]
    assert covered(bank, 2, 0, 1, 3, -1) == (7, [2, 0, 1, 3, -1, -1, -1])
    assert covered(bank, 0, 0, -1) == (4, None)


# functions by themselves


def test_first_calls_run_eagerly_and_least_recent_is_dropped():
    kept, called = Recordings(Tape()), []
    total = torch.zeros(3)

    def add(x):
        called.append(1)
        return total.add_(x).clone()

    for i in range(1, 9):
        made = kept.run("add", 0, add, torch.full((3,), float(i)))
        assert made.tolist() == [i * (i + 1) / 2] * 3
    assert len(called) == CudaTape.warm + 1
    for key in range(1, MAX_RECORDINGS + 1):
        kept.run("add", key, add, torch.zeros(3))
    for _ in range(2):
        kept.run("add", 0, add, torch.zeros(3))
    assert len(kept.replays) == MAX_RECORDINGS


def test_on_a_cpu_functions_stay_what_they_are():
    cpu = torch.device("cpu")

    def fn():
        return 1

    assert cuda_graphs.on(cpu) is None
    assert cuda_graphs.capture(fn, cpu) is fn
    assert engine().recorder.ahead == 0


def test_graphs_can_be_turned_off(monkeypatch):
    monkeypatch.setenv("SPECEXP_GRAPHS", "off")
    assert cuda_graphs.on(torch.device("cuda")) is None


def test_a_graph_shares_memory_only_with_a_graph_that_is_alive(monkeypatch):
    """torch refuses to capture into a pool whose graphs are gone while a tensor is still in it."""

    class Graph:
        replay = pool = lambda self: self.memory

    @contextmanager
    def capturing(graph, pool, stream):
        graph.memory = pool
        yield

    fakes = {
        "CUDAGraph": Graph, "graph": capturing, "graph_pool_handle": itertools.count().__next__,
        "current_stream": lambda: None,
    }  # fmt: skip
    fakes |= dict.fromkeys(("Stream", "stream", "device"), lambda _: nullcontext())
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    cuda = CudaTape(torch.device("cuda"))

    def record(kind, fn=int):
        return cuda.record(fn, kind)[0]

    first = record("round")
    again, other, alone = record("round"), record("draft"), record(None)
    assert first() == again()
    assert len({first(), other(), alone(), record(None)()}) == 4
    gone = first()
    del first, again
    after = record("round")
    assert after() != gone
    with pytest.raises(Refused):
        record("round", lambda: torch.tensor(1).view(2))
    assert record("round")() != after()


@pytest.mark.cuda
def test_graphs_are_captured_again_after_all_are_dropped():
    recorder, kept = CudaTape(torch.device("cuda")), []
    for _ in range(2):
        x = torch.zeros(4, device="cuda")
        again, made = recorder.record(lambda x=x: x + 1, "round")
        kept.append(made)
        del again
    assert [made.tolist() for made in kept] == [[1.0] * 4] * 2


@pytest.mark.cuda
def test_captured_is_replayed_on_a_gpu():
    x, called = torch.zeros(4, device="cuda"), []

    def fn():
        called.append(1)
        return x.add_(1).sum()

    run = cuda_graphs.capture(fn, x.device)
    assert [float(run()) for _ in range(9)] == [4.0 * i for i in range(1, 10)]
    assert len(called) == CudaTape.warm + 1
