"""Rounds on a CPU that are called again say what rounds say that are run."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle, pairwise, product
from typing import NamedTuple

import pytest
import torch
from conftest import one_in
from support.tape import covered, recorded, unrecorded
from support.tiny import DRAFTERS, NEW, PROMPTS, TREES, InTurn, engine
from test_cuda_graphs import TURNS, told
from torch import Tensor

from specexp.engine import Engine
from specexp.fast import cpu_replays
from specexp.fast.cpu import build
from specexp.fast.recordings import Recordings
from specexp.measure.under_load.loops import AllHalfNone
from specexp.models import lm
from specexp.models.load import of_module
from specexp.policy import Fixed, Plan
from specexp.recording import Recorder
from specexp.sequences import Sequences
from specexp.serving.engine_rows import EngineRows
from specexp.serving.requests import Request
from specexp.serving.server import Server
from specexp.serving.sources import Source, serve
from specexp.trace import Step
from specexp.tree import Tree

pytestmark = pytest.mark.compiler
LONG = 40


def fast(*args, **asked) -> Engine:
    return engine(*args, **{"rule": "match", "dtype": torch.float32} | asked)


def slow(*args, **asked) -> Engine:
    return unrecorded(fast(*args, **asked))


LAWS = ("match", 0.0), ("reject", 0.9), ("block", 0.9)
SHAPES = "empty", "chain", "branching", "grown"


@pytest.mark.parametrize(("kind", "tree", "law"), one_in(11, product(DRAFTERS, SHAPES, LAWS)))
def test_replayed_rounds_are_the_rounds(kind, tree, law):
    """Token for token, in batches one after the other, of rows that end one after the other."""
    rule, temperature = law
    if rule == "block" and tree in ("branching", "grown"):
        rule = "match"
    asked = {"rule": rule, "temperature": temperature, "eos": (3, 17)}
    one, other = (make(kind, tree, **asked) for make in (fast, slow))
    for prompts in (PROMPTS, PROMPTS[2:4], PROMPTS[:1]):
        assert told(one.generate(prompts, LONG)) == told(other.generate(prompts, LONG))
        assert recorded(one) == {"round"}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_policies_may_change_trees(temperature):
    def text(make):
        made = make("model", temperature=temperature)
        made.policy = InTurn(*TURNS)
        return told(made.generate(PROMPTS, 60))

    assert text(fast) == text(slow)


class Asked(Fixed):
    """Counts how often it is asked."""

    times = 0

    def choose(self, load):
        Asked.times += 1
        return super().choose(load)


def held_rounds_are_rounds(kind: str, context: int | None = None) -> bool:
    """Those of which the host sees none until the last one is over: trees, tokens and times."""
    found = []
    for make in (fast, slow):
        made = make(kind, eos=(3, 17))
        made.drafter.context = context or made.drafter.context
        made.generate(PROMPTS, LONG)  # what is recorded is met before it is held
        made.policy, Asked.times = Asked(made.policy.tree), 0
        traces = [made.generate([prompt], LONG).trace for prompt in PROMPTS]
        ends = [[each.end_s for each in trace.rounds] for trace in traces]
        rising = all(a < b for times in ends for a, b in pairwise(times))
        found.append([[each[1:] for each in trace.rounds] for trace in traces])
        once_each = Asked.times == sum(map(len, ends))
        if not rising or once_each != (make is slow):
            return False
    return found[0] == found[1]


@pytest.mark.parametrize("context", [None, 24])
@pytest.mark.parametrize("kind", ["null", "model", "ngram"])
def test_a_policy_that_holds_is_not_asked_again(kind, context):
    assert held_rounds_are_rounds(kind, context)


def test_nobody_is_kept_waiting_for_rounds_that_take_long(monkeypatch):
    monkeypatch.setattr(cpu_replays, "MAX_CALL_S", 0.0)
    made = fast("null", "empty")
    made.generate(PROMPTS, LONG)
    made.policy, Asked.times = Asked(made.policy.tree), 0
    assert len(made.generate(PROMPTS, LONG).trace.rounds) == Asked.times


@pytest.mark.parametrize("kind", ["model", "ngram"])
@torch.inference_mode()
def test_rows_with_budgets_are_replayed(kind):
    made, budget = fast(kind), torch.tensor([4, 0, -1, 2, 4])

    def rounds(pairing):
        seqs = pairing.begin(Sequences.of(PROMPTS, LONG, slack=5))
        seqs.budget = budget.clone()
        reports = []
        for turn in range(12):
            seqs.budget.copy_(budget.roll(turn))  # in the same memory
            reports.append(pairing.run(seqs, TREES["chain"]))
        lines = zip(seqs.tokens.tolist(), seqs.length.tolist(), strict=True)
        return reports, [tokens[:length] for tokens, length in lines]

    assert rounds(made) == rounds(slow(kind))
    assert "round" in recorded(made)


def test_a_draft_on_the_host_has_its_target_replayed():
    one, other = fast("suffix"), slow("suffix")
    one.drafter.on_host = other.drafter.on_host = True
    assert told(one.generate(PROMPTS, LONG)) == told(other.generate(PROMPTS, LONG))
    assert "verify" in recorded(one)
    assert "round" not in recorded(one)


def test_a_chain_and_a_tree_of_its_size_are_other_passes():
    class Changes(Fixed):
        def choose(self, load):
            return Plan(next(shapes))

    found = []
    for make in (fast, slow):
        shapes = cycle([Tree.chain(6), Tree.chain(6), Tree.branching(2, 2)])
        made = make("suffix")
        made.drafter.on_host, made.policy = True, Changes(Tree.chain(6))
        found.append(told(made.generate(PROMPTS, LONG)))
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["model", "ngram", "null"])
def test_served_texts_are_the_texts(kind):
    """Rows join, move and leave, their prompts are read in chunks, and they draft by budgets."""
    wanted = slow("null", "empty").generate(PROMPTS * 2, NEW, streams=range(10)).tokens
    made = fast(kind)
    server = Server(EngineRows(made, count=4, slots=64, slack=5), AllHalfNone(3), chunk=8)
    requests = [Request(p, NEW, stream=i) for i, p in enumerate(PROMPTS * 2)]
    responses = serve(server, Source(requests, 4))
    assert {a.request.stream: a.tokens for a in responses} == dict(enumerate(wanted))
    assert "round" in recorded(made)


def test_few_batch_sizes_are_recorded_without_free_rows():
    bank = EngineRows(fast("model", "chain"), count=7, slots=64, slack=5)

    assert [covered(bank, *[2] * n)[0] for n in (1, 2, 3, 5, 6, 7)] == [1, 2, 4, 7, 7, 7]
    assert covered(bank, 2, 0, 1) == (4, [2, 0, 1, -1])
    assert covered(bank, 0, 0, 0) == (4, [0, 0, 0, -1])
    assert covered(bank, 0, 0, -1, 0) == (4, [0, 0, -1, 0])
    assert covered(bank, 0, 0, 0, 0) == (4, None)


@pytest.mark.parametrize(("dtype", "kinds"), [(torch.float32, 1), (torch.float64, 2)])
def test_sparing_passes_record_one_round_for_texts_of_any_length(dtype, kinds):
    made, seen = fast("null", dtype=dtype), set()
    bank = EngineRows(made, count=1, slots=128, slack=5)
    run = made.run

    def noted(seqs: Sequences, tree: Tree) -> list[Step]:
        seen.add(seqs.address)
        return run(seqs, tree)

    made.run = noted
    server = Server(bank, Fixed(TREES["empty"]))
    [answer] = serve(server, Source([Request(PROMPTS[0], 80)], 1))
    assert len(answer.tokens) == 80
    assert len(seen) == kinds


@dataclass(frozen=True)
class Hears(Fixed):
    """Keeps the times that it is told."""

    times: list[float | None] = field(default_factory=list)

    def learn(self, load, plan, steps, seconds):
        self.times.append(seconds)

    def check(self, pairing) -> None:
        """The first of a kind, which are recorded or prepare that, are not told; all are, where
        none is recorded."""
        cold = [None] * (cpu_replays.CpuTape.warm + 1) if pairing is fast else []
        assert self.times[: len(cold)] == cold
        assert len(self.times) == 20
        assert all(self.times[len(cold) :])


@pytest.mark.parametrize("pairing", [fast, slow])
def test_policy_learns_times_of_replayed_rounds_when_serving(pairing):
    hears = Hears(TREES["empty"])
    server = Server(EngineRows(pairing("null"), count=1, slots=64, slack=5), hears)
    serve(server, Source([Request(PROMPTS[0], 20, stream=0)], 1))
    hears.check(pairing)


@pytest.mark.parametrize("pairing", [fast, slow])
def test_policy_learns_times_of_replayed_rounds_in_generate(pairing):
    made, hears = pairing("null"), Hears(TREES["empty"])
    made.policy = hears
    made.generate(PROMPTS, 20)
    hears.check(pairing)


@torch.inference_mode()
def test_round_without_draft_makes_the_calls_of_plain_decoding():
    """Its calls are those of plain decoding, one by one."""
    found = []
    for made in (fast("model"), fast("model").plain()):
        seqs = made.begin(Sequences.of(PROMPTS, LONG, slack=5))
        for _ in range(4):
            made.run(seqs, TREES["empty"])
        found.append([call.function for call in made.recorder.latest[1].run.calls])
    assert found[0] == found[1]
    assert len(found[0]) > 5


# what is not replayed


@torch.inference_mode()
def tried(fn) -> bool:
    """Whether a function is replayed, tried three times."""
    known = Recordings(cpu_replays.CpuTape())
    for _ in range(3):
        known.run("this", 0, fn)
    return known.latest[1].run is not None


def test_what_reaches_the_host_is_not_replayed():
    length = torch.tensor([3, 5])
    seqs = Sequences.of([[1, 2, 3], [1, 2, 3, 4, 5]], 4, slack=1)
    for spoilt in (
        lambda: seqs.places(torch.tensor([[0]])),  # from it
        lambda: seqs.root.tolist(),
        lambda: seqs.root.numpy(),
        lambda: seqs.root if int(seqs.length.max()) else None,
        lambda: seqs.tokens[seqs.live],
        lambda: seqs.root.clone().unsqueeze_(0),  # it would change its shape again and again
        lambda: length[:, None],  # nothing at all
        lambda: torch.arange(3) + 1,
    ):
        assert not tried(spoilt)


class Reckoned(NamedTuple):
    """Functions of x [4] in memory that stays, which give something of their own."""

    plainly: Callable[[Tensor], Tensor]
    operations: int  # that have to be done again


def normed_in_passing(x: Tensor) -> Tensor:
    """An operation that changes one thing and makes another."""
    mean, spread = torch.zeros(1), torch.ones(1)
    return torch.nn.functional.batch_norm(x[:, None], mean, spread, training=True)[:, 0] + mean


RECKONED = [
    Reckoned(lambda x: x + 1, 1),
    Reckoned(lambda x: x * torch.arange(4), 1),
    Reckoned(lambda x: (x + (torch.arange(4) * 2 - 1).clamp(min=0)) * 2, 2),  # the rest is there
    Reckoned(lambda x: torch.zeros(4).index_add_(0, torch.arange(4), x), 2),  # emptied anew
    Reckoned(lambda x: torch.full((4,), 7.0).add_(x[1:].sum()), 3),
    Reckoned(lambda x: torch.ones(5)[1:].mul_(x), 2),  # through a view
    Reckoned(lambda x: x.topk(2).values + x.sort(descending=True).indices[:2], 3),
    Reckoned(lambda x: torch.where(x > 2, x, -1), 2),
    Reckoned(lambda x: torch.cat([part + 1 for part in x.split(2)]), 3),
    Reckoned(lambda x: x.to(torch.int64).float(), 2),
    Reckoned(lambda x: x.view(2, 2).t().reshape(4) * 1, 2),
    Reckoned(lambda x: x.new_empty(4).copy_(x), 1),
    Reckoned(lambda x: x.repeat_interleave(2)[x.long() % 3], 4),
    Reckoned(lambda x: torch.linalg.vector_norm(x, keepdim=True), 1),
    Reckoned(lambda x: torch.aminmax(x * 2).max + torch.frexp(x).mantissa, 4),
    Reckoned(normed_in_passing, 4),
]


@pytest.mark.parametrize("case", RECKONED)
@torch.inference_mode()
def test_what_torch_reckons_is_reckoned_again(case):
    x = torch.arange(4.0)
    replay, made = cpu_replays.CpuTape().record(lambda: case.plainly(x), None)
    for _ in range(3):
        x.copy_(torch.randn(4).abs() * 3)
        replay()
        assert torch.equal(made, case.plainly(x))
    with cpu_replays.recording() as noted:
        case.plainly(x)
    assert len(list(cpu_replays.changing(noted.steps))) == case.operations


@torch.inference_mode()
def test_chance_falls_anew():
    torch.manual_seed(0)
    replay, made = cpu_replays.CpuTape().record(lambda: torch.rand(8) + 1, None)
    before = made.clone()
    replay()
    assert (made != before).all()


def test_torch_operations_replay_outside_inference_mode():
    x = torch.arange(4.0)
    for fn in (lambda: x + 1, lambda: (x + 1) * 2):
        with torch.inference_mode():
            replay, made = cpu_replays.CpuTape().record(fn, None)
        x.add_(1)
        replay()
        assert torch.equal(made, fn())


def test_what_takes_much_room_is_not_kept(monkeypatch):
    made = fast("model", "chain")
    monkeypatch.setattr(cpu_replays, "MAX_BYTES", 1000)
    made.generate(PROMPTS, LONG)
    assert "round" not in recorded(made)


@pytest.mark.parametrize("on", ["on", "off"])
def test_replays_can_be_turned_off(monkeypatch, on):
    monkeypatch.setenv("SPECEXP_GRAPHS", on)
    assert (type(fast().recorder) is Recorder) == (on == "off")
    assert type(engine(dtype=torch.float64).recorder) is Recorder  # nothing of it is compiled


# what a replay depends on


def test_other_numbers_of_threads_are_other_replays(monkeypatch):
    made, threads = fast("null", "empty"), torch.get_num_threads()
    seqs = made.begin(Sequences.of(PROMPTS, LONG, slack=1))
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for _ in range(3):
                made.run(seqs, TREES["empty"])
            assert len(made.recorder.replays) == count
    finally:
        torch.set_num_threads(threads)


def test_a_pass_in_another_thread_is_not_noted():
    made, other = fast("null", "empty"), fast("null", "empty")
    seqs, theirs = (e.begin(Sequences.of(PROMPTS, LONG, slack=1)) for e in (made, other))

    def round_beside():
        worker = threading.Thread(target=other.round, args=(theirs, TREES["empty"]))
        worker.start()
        worker.join()
        return made.round(seqs, TREES["empty"])

    with torch.inference_mode(), cpu_replays.recording() as noted:
        round_beside()
    count = len(noted.steps)
    with torch.inference_mode(), cpu_replays.recording() as noted:
        made.round(seqs, TREES["empty"])
    assert len(noted.steps) == count
    assert build.this_thread.calls is None


@pytest.mark.parametrize("slot", [-1, 99])
def test_a_slot_that_there_is_not_is_not_read(slot):
    seqs = Sequences.of(PROMPTS, LONG, slack=1)
    with pytest.raises(IndexError, match="outside the 49 slots"):
        seqs.read(torch.full((5, 2), slot))


def test_a_slot_behind_a_window_is_not_read():
    window = Sequences.of([[1, 2, 3]], 7, slack=2).window(0, 1, 4)
    assert window.read(torch.tensor([[2]])).tolist() == [[3]]
    with pytest.raises(IndexError, match="outside the 4 slots"):
        window.read(torch.tensor([[6]]))


@torch.inference_mode()
def test_a_token_that_there_is_not_is_refused_in_a_replay_too():
    made = fast("null", "empty")
    seqs = made.begin(Sequences.of(PROMPTS, LONG, slack=1))
    for _ in range(4):
        made.run(seqs, TREES["empty"])
    seqs.tokens[0, seqs.length[0] - 1] = 99
    with pytest.raises(IndexError, match="a token or a slot is out of range"):
        made.run(seqs, TREES["empty"])


def test_nothing_is_replayed_in_memory_that_is_gone():
    made = fast("model")
    seqs = made.begin(Sequences.of(PROMPTS, LONG, slack=5))
    for _ in range(4):
        made.run(seqs, TREES["chain"])
    assert "round" in recorded(made)
    made.plain().rows.allocate(len(PROMPTS), 99)  # the target is theirs, too
    latest = made.recorder.latest
    made.run(seqs, TREES["chain"])
    assert made.recorder.latest is not latest


def test_a_replay_keeps_the_weights_that_its_module_had():
    weight, x = torch.nn.Parameter(torch.randn(512, 512), False), torch.randn(1, 512)
    replay, made = cpu_replays.CpuTape().record(lambda: lm.product(x, weight, None), None)
    before = made.clone()
    weight.data = torch.zeros(512, 512)
    others = [torch.zeros(512, 512) for _ in range(8)]  # over what was freed
    replay()
    assert torch.equal(made, before)
    del others


def test_what_another_engine_moved_of_a_drafter_is_found():
    """Both engines run one drafter, whose tables are made anew by whoever begins."""
    one = fast("recycle")
    other = Engine(one.target, one.drafter, one.policy, one.sampling, one.rule)
    wanted = told(slow("recycle").generate(PROMPTS, LONG))
    for made in (one, other, one):
        assert told(made.generate(PROMPTS, LONG)) == wanted


def test_a_network_that_changes_is_another_replay():
    made, lm = fast("null", "empty"), of_module(engine(dtype=torch.float32).target.module)
    seqs = made.begin(Sequences.of(PROMPTS, LONG, slack=1))
    for _ in range(4):
        made.run(seqs, TREES["empty"])
    run, called = lm.net, []
    made.target.net = lambda *asked, **more: (called.append(1), run(*asked, **more))[1]
    made.run(seqs, TREES["empty"])
    assert called


def test_the_deepest_draft_is_cut_where_the_drafter_ends():
    def text(make):
        made = make("model", Tree.chain(4))
        made.drafter.context = 20
        return told(made.generate(PROMPTS, LONG))

    assert text(fast) == text(slow)
