"""Whatever joins or leaves a batch, every request is answered once, with its own plain text."""

import copy
import random
from weakref import WeakSet

import pytest
import torch
from conftest import CONTEXT, in_turn
from hypothesis import given, settings
from hypothesis import strategies as st
from support import architectures
from support.tiny import DRAFTERS, NEW, PROMPTS, V, draft_module, engine, module, processed

from specexp import ops
from specexp.drafters.model import DraftModel
from specexp.drafters.ngram import NGram
from specexp.engine import Engine
from specexp.errors import UserError
from specexp.models.cache import Slots
from specexp.models.lm import LM
from specexp.models.load import of_module
from specexp.policy import Fixed, Plan
from specexp.rules import Match
from specexp.sampling import Sampling
from specexp.serving.engine_rows import EngineRows, OutOfMemory
from specexp.serving.requests import Request
from specexp.serving.server import Server
from specexp.serving.sources import Source, serve
from specexp.tree import Tree

SLOTS, SLACK = 96, 10
CHAINS = [Tree.chain(g) for g in (0, 0, 1, 3)]
SHAPES = [*CHAINS, Tree.branching(2, 2), Tree((-1, 0, 0, 0, 1, 1, 3, 4)), Tree.grown(9, 3)]


class Restless:
    """Another plan every round: trees and budgets by chance."""

    widest = SLACK

    def __init__(self, seed, trees=tuple(CHAINS), ragged=(False, True)):
        self.rng, self.trees, self.ragged = random.Random(seed), trees, ragged
        self.learned = []

    def choose(self, load):
        tree = self.rng.choice(self.trees)
        ragged = self.rng.choice(self.ragged)
        depths = (self.rng.randint(0, tree.depth) for _ in range(load.rows))
        return Plan(tree, tuple(depths) if ragged else ())

    def learn(self, load, plan, steps, seconds):
        assert len(steps) <= sum(stream is not None for stream in load.streams)
        assert all(step.drafted <= plan.depth(step.row) for step in steps if plan.tree.is_chain)
        self.learned += steps


def requests(count: int, seed: int = 0) -> list[Request]:
    rng = random.Random(seed)
    return [
        Request([rng.randrange(V) for _ in range(rng.choice([1, 2, 3, 9, 30]))],
                rng.randint(1, NEW), stream=100 + i)
        for i in range(count)
    ]  # fmt: skip


def alone(made: Engine, request: Request) -> list[int]:
    plain = made.plain()
    [tokens] = plain.generate([request.prompt], request.new, [request.stream]).tokens
    return tokens


def served(made: Engine, policy, source, rows: int = 3, **options) -> tuple[Server, list]:
    server = Server(EngineRows(made, rows, SLOTS, SLACK), policy, **options)
    return server, serve(server, source)


@pytest.mark.parametrize(("kind", "temperature"), in_turn(DRAFTERS, (0.0, 0.9)))
def test_responses_match_plain_decoding(kind, temperature):
    """Chunks of three, three rows, budgets of their own, drafts now and then."""
    trees = CHAINS if kind == "medusa" else SHAPES
    made = engine(kind, "chain", "match", temperature=temperature)
    todo = requests(9)
    policy = Restless(1, trees)
    server, responses = served(made, policy, Source(todo, 5), chunk=3)
    assert [a.request for a in responses] == todo
    for response in responses:
        assert response.state == "done"
        assert response.tokens == alone(made, response.request)
        assert response.deliveries[-1][1] == response.request.new
    assert max(step.rows for step in server.steps) == 3
    assert server.open == 0


@pytest.mark.parametrize(
    "dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.compiler)]
)
@pytest.mark.parametrize(("kind", "temperature"), in_turn(["ngram", "self"], (0.0, 0.9)))
def test_settings_of_a_generation_config_hold_for_every_row(kind, temperature, dtype):
    """Each reads the row's own tokens, which move with the row."""
    followed = {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [[5], [7, 7]],
    }
    plain = engine(kind, "chain", "match", temperature=temperature, dtype=dtype)
    made, todo = processed(plain, **followed), requests(9)
    _, responses = served(made, Restless(1, SHAPES), Source(todo, 5), chunk=3)
    texts = [response.tokens for response in responses]
    assert texts == [alone(made, request) for request in todo]
    assert texts != [alone(plain, request) for request in todo]


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("kind", ["ngram", "self"])
def test_rows_with_windows_in_rings_keep_their_texts(kind, ahead):
    """Prompts far longer than a ring are read in chunks while other rows are decoded, in rounds
    that cover them too (`ahead`: as on a GPU); rows move and are taken again."""
    rng = random.Random(3)
    lengths = (1, 70, 9, 45, 60, 2, 33)
    todo = [Request([rng.randrange(V) for _ in range(n)], rng.randint(3, NEW)) for n in lengths]
    with architectures.short_passes(8):
        made = engine(kind, "chain", "match", "gemma3")
        made.recorder.ahead = ahead
        _, responses = served(made, Restless(1, SHAPES), Source(todo, 4), chunk=5)
        sizes = {layer.size for layer in made.target.cache.layers}
    assert min(sizes) < 45 < max(sizes)
    for response in responses:
        asked = response.request
        assert response.tokens == architectures.greedy(module("gemma3"), asked.prompt, asked.new)


@pytest.mark.compiler
@pytest.mark.parametrize("kind", ["model", "ngram"])
def test_rehearsed_rounds_are_not_recorded_again(kind):
    made = engine(kind, "chain", "match", temperature=0.0, dtype=torch.float32)
    rows, todo = EngineRows(made, 3, SLOTS, SLACK), requests(9)
    rows.rehearse(3)
    known = set(made.recorder.replays)
    assert len(known) == 3 * (1 + 4)  # sizes; plain rounds of all rows, and those of some
    responses = serve(Server(rows, Restless(1)), Source(todo, 5))
    assert set(made.recorder.replays) == known
    for response in responses:
        assert response.tokens == alone(made, response.request)


@pytest.mark.compiler
def test_rehearsal_stops_when_memory_is_short(monkeypatch):
    made = engine("model", "chain", "match", temperature=0.0, dtype=torch.float32)
    rows, todo = EngineRows(made, 3, SLOTS, SLACK), requests(5)
    run, sizes = Engine.run, []

    def scarce(engine, seqs, tree):
        sizes.append(len(seqs.tokens))
        if len(set(sizes)) == 3:
            raise torch.OutOfMemoryError("out of memory: tried to allocate")
        return run(engine, seqs, tree)

    monkeypatch.setattr(Engine, "run", scarce)
    rows.rehearse(3)
    assert list(dict.fromkeys(sizes)) == [3, 2, 1]
    monkeypatch.undo()
    for response in serve(Server(rows, Restless(1)), Source(todo, 3)):
        assert response.tokens == alone(made, response.request)


def test_text_beyond_drafter_context_spares_other_rows(caplog):
    """The target drafts for itself: whatever is drafted is kept. While a longer text than the
    drafter can take is there nobody drafts."""
    made = engine("self", "chain", "match")
    made.drafter.context, made.drafter.name = 40, "a draft of forty tokens"
    server = Server(EngineRows(made, 2, SLOTS, SLACK), Fixed(Tree.chain(3)))
    long, short = server.submit(Request([3] * 30, 30)), server.submit(Request([1, 2, 5], 60))
    passes = 0
    while not long.over:
        server.step()
        passes += short.drafted == 0
    assert passes < short.passes < 40
    assert caplog.text.count("a draft of forty tokens reads at most 40 tokens") == 1
    drafted, kept = short.drafted, short.accepted
    server.step()
    server.step()
    assert short.drafted - drafted == short.accepted - kept == 6
    while server.step():
        pass
    assert short.tokens == alone(made, short.request)


@pytest.mark.parametrize("compiled", [True, False])
def test_depth_follows_budget(compiled, monkeypatch):
    """Of the third text no token has occurred before."""
    monkeypatch.setattr(ops, "fast", lambda: compiled)
    made = engine("ngram", "chain", "match")
    made = Engine.of(made, drafter=NGram(3))
    rows = EngineRows(made, 4, SLOTS, SLACK)
    texts = [1, 2, 3, 4, 1, 2, 3], [5, 1, 6, 1], [1, 2, 3], [1, 2, 3, 1, 2, 3]
    for row, text in enumerate(texts):
        rows.enter(row, text, row)
        rows.prefill(row, 0, len(text) - 1)
        rows.end_prefill(row, 60)
    steps = rows.round([3, 3, 3, 1], 20, Tree.chain(3))
    assert [step.drafted for step in steps] == [3, 3, 0, 1]


@pytest.mark.parametrize(
    ("kind", "rule"), in_turn(["model", "eagle3", "self", "lookup_eagle3"], ("reject", "block"))
)
def test_responses_do_not_depend_on_the_batch(rule, kind):
    made = engine(kind, "chain", rule, temperature=0.9)
    fixed = Fixed(Tree.chain(3))
    made.policy = fixed
    todo = requests(8, seed=3)
    _, responses = served(made, fixed, Source(todo, 4))
    for response in responses:
        _, [by_itself] = served(made, fixed, Source([response.request], 1), rows=1)
        assert response.tokens == by_itself.tokens


@pytest.mark.parametrize(("kind", "first"), [("model", 0), ("eagle3", 0), ("ngram", 3)])
def test_first_token_does_not_wait_for_the_drafter(kind, first):
    """A lookup reads nothing. Who came before goes on drafting."""
    made = engine(kind, "chain", "match")
    server = Server(EngineRows(made, 2, SLOTS, SLACK), Fixed(Tree.chain(3)))
    responses = []
    for _ in range(2):
        responses.append(server.submit(Request([1, 2, 3] * 9, NEW)))
        server.step()
        assert responses[-1].drafted == first
    assert responses[0].drafted >= 3
    while server.step():
        pass
    assert [a.tokens for a in responses] == [alone(made, a.request) for a in responses]


def test_lookup_drafter_is_never_behind():
    """After many plain rounds, of texts that are longer than a chunk."""
    made, policy = engine("ngram", "chain", "match"), Restless(0, [Tree.chain(0)] * 40)
    server = Server(EngineRows(made, 2, SLOTS, SLACK), policy, chunk=2)
    for _ in range(2):
        server.submit(Request([1, 2, 3] * 9, NEW))
    for _ in range(30):
        server.step()
    assert all(s is None or s.behind == 0 for s in server.occupied)


@settings(max_examples=8)
@given(st.integers(0, 2**32 - 1))
def test_random_arrivals_and_full_queues(seed):
    rng = random.Random(seed)
    made = engine("model", "chain", "match", temperature=rng.choice([0.0, 1.0]))
    policy = Restless(seed)
    server = Server(EngineRows(made, rng.randint(1, 4), SLOTS, SLACK), policy,
                    chunk=rng.choice([1, 5, 64]), queue=rng.randint(0, 6))  # fmt: skip
    todo, responses = requests(rng.randint(1, 12), seed), []
    while todo or server.open:
        for _ in range(rng.randint(0, 3)):
            if todo:
                responses.append(server.submit(todo.pop()))
        server.step()
    by_state = {s: [a for a in responses if a.state == s] for s in ("done", "refused")}
    assert sum(map(len, by_state.values())) == len(responses)
    for response in by_state["done"]:
        assert response.tokens == alone(made, response.request)
    assert all("queue is full" in a.reason and not a.tokens for a in by_state["refused"])


def test_end_of_text_frees_the_row():
    made = engine("model", "chain", "match")
    todo = requests(6)
    made.eos = (alone(made, todo[1])[0],)
    _, responses = served(made, Fixed(Tree.chain(3)), Source(todo, 3))
    for response in responses:
        text = alone(made, response.request)
        assert response.tokens == text
    assert len(responses[1].tokens) == 1


@pytest.mark.parametrize("family", ["llama", "gemma3", "falcon_h1"])
def test_catching_up_leaves_no_gap(family):
    """The target as its own draft, with rings and with states: after any number of rounds without
    it, however far it lags, nothing is missing in the rounds that draft."""
    made = engine("self", "chain", "match", family)
    policy = Restless(5)
    todo = [*requests(7), *(Request([i * 7 % V for i in range(n)], NEW) for n in (65, 45))]
    _, responses = served(made, policy, Source(todo, 4), chunk=7)
    drafted = [step for step in policy.learned if step.drafted]
    assert len(drafted) > 20
    assert all(step.accepted == step.drafted for step in drafted)
    for response in responses:
        assert response.tokens == alone(made, response.request)
        assert response.accepted == response.drafted


def test_drafter_catches_up_in_chunks():
    made = engine("self", "chain", "match")
    rows, policy = EngineRows(made, 2, SLOTS, SLACK), Restless(0, [Tree.chain(2)], [False])
    read, catch_up_row = [], rows.catch_up_row

    def noted(row, start, stop):
        read.append((start, stop))
        catch_up_row(row, start, stop)

    rows.catch_up_row = noted
    request = Request([i * 7 % V for i in range(60)], 20)
    server = Server(rows, policy, chunk=20)
    response = server.submit(request)
    for chunks in range(6):
        server.step()
        assert len(read) == max(0, min(3, chunks - 2))
    while server.step():
        pass
    assert [start for start, _ in read] == [0, *(stop for _, stop in read)][:-1]
    assert {stop - start for start, stop in read} == {20}
    assert response.tokens == alone(made, request)
    drafted = [step.drafted for step in policy.learned]
    assert drafted[:4] == [0, 0, 0, 2]
    assert set(drafted[3:-1]) == {2}
    assert response.drafted == response.accepted


def test_nan_fails_one_request_and_leaves_the_row_clean():
    law = Sampling()
    for culprit in ("target", "draft"):
        # the bad token is never said
        target = of_module(copy.deepcopy(module()), "target", V - 1)
        draft = of_module(copy.deepcopy(draft_module()), "draft", V - 1)
        broken = target if culprit == "target" else draft
        broken.module.model.embed_tokens.weight[V - 1] = float("nan")
        made = Engine(target, DraftModel(draft, law), Fixed(Tree.chain(3)), law, Match())
        good = [Request(p, 12, stream=i) for i, p in enumerate(PROMPTS[:4])]
        bad = [Request([1] * 20 + [V - 1] * 2, 12), Request([3, V - 1], 12)]
        todo = [good[0], bad[0], good[1], bad[1], *good[2:]]
        _, responses = served(made, made.policy, Source(todo, 2), rows=2)
        for response in responses:
            if V - 1 in response.request.prompt:
                assert response.state == "failed"
                assert culprit in response.reason
            else:
                assert response.tokens == alone(made, response.request)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (Request([], 5), "the prompt is empty"),
        (Request([1], 0), "0 new tokens"),
        (Request([1] * 80, 20), "100 slots, 14 more than the 86 of a row"),
        (Request([1, 2.5], 5), "the prompt is [1, 2.5]; it must be a list of whole numbers"),
        (Request([1, 9999], 5), "the prompt has the token 9999; the target has 0 to 31"),
        (Request(["a"], 5), "the prompt is ['a']; it must be a list of whole numbers"),
    ],
    ids=["empty", "nothing", "long", "fraction", "unknown", "text"],
)
def test_invalid_requests_are_refused_with_the_reason(request_, reason):
    made = engine("model", "chain", "match")
    _, responses = served(made, Fixed(Tree.chain(3)), Source([request_, *requests(2)], 2))
    assert responses[0].state == "refused"
    assert reason in responses[0].reason
    assert [a.state for a in responses[1:]] == ["done", "done"]


@pytest.mark.parametrize(
    ("value", "line"),
    [({"new": 2.5}, "new is 2.5; it must be a whole number"), ({"new": True}, "new is True"),
     ({"stream": 0.5}, "stream is 0.5; it"), ({"at_s": float("nan")}, "at_s is nan; a request")],
)  # fmt: skip
def test_numbers_that_a_request_would_round_are_refused(value, line):
    with pytest.raises(UserError, match=line):
        Request(**{"prompt": [1], "new": 3} | value)


def test_text_may_fill_row_and_context():
    made = engine("model", "chain", "match")
    rows = EngineRows(made, 1, CONTEXT + SLACK, SLACK)
    [response] = serve(Server(rows, Fixed(Tree.chain(3))), Source([Request([1] * 100, 28)], 1))
    assert response.tokens == alone(made, response.request)


def test_full_queue_refuses_in_order():
    made = engine("null", "empty", "match")
    todo = [Request([1, 2], 3, stream=i) for i in range(12)]
    _, responses = served(made, Fixed(Tree.chain(0)), Source(todo), rows=2, queue=4)
    assert [a.state for a in responses] == ["done"] * 6 + ["refused"] * 6
    begun = [a.begun_s for a in responses[:6]]
    assert begun == sorted(begun)


def test_closed_loop_needs_a_stream():
    with pytest.raises(UserError, match="needs 1 stream or more"):
        Source(requests(2), 0)


def test_open_load_does_not_repeat():
    """Its requests would arrive again at once, for ever."""
    with pytest.raises(UserError, match="repeat is for closed loops"):
        Source([Request([1], 4)], repeat=True)


@pytest.mark.parametrize("budget", [(2,), (2, -3, 2)])
def test_budgets_that_do_not_fit_the_rows_are_refused_whenever_they_come(budget):
    policy = Restless(0)
    fits, odd = Plan(Tree.chain(1)), Plan(Tree.chain(2), budget)
    policy.choose = lambda load: odd if policy.learned else fits
    with pytest.raises(UserError, match=r"policy Restless planned budgets .* load.streams, 3 "):
        served(engine("ngram"), policy, Source([Request([1, 2, 3], 8)] * 3))


def test_policy_wider_than_the_rows_is_refused():
    with pytest.raises(UserError, match=r"leave 10 slots .* wants 21"):
        Server(EngineRows(engine("null"), 1, SLOTS, SLACK), Fixed(Tree.chain(20)))


def test_rows_are_halved_when_memory_is_short(monkeypatch, caplog):
    made = engine("model", "chain", "match")
    allocate = LM.allocate

    def small(lm, B, S):
        if B > 4:
            raise UserError("the cache needs more than there is")
        allocate(lm, B, S)

    monkeypatch.setattr(LM, "allocate", small)
    assert EngineRows(made, 8, SLOTS, SLACK).count == 4
    assert "more than 4 rows" in caplog.text


@pytest.fixture
def room(monkeypatch):
    """room(bytes): so many there are, for the keys and values of whatever is alive."""
    made, make = WeakSet(), Slots.lazy_initialization

    def taken():
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in made)

    def set_room(size: int):
        def scarce(layer, keys, values):
            make(layer, keys, values)
            if taken() + layer.keys.nbytes + layer.values.nbytes > size:
                raise torch.OutOfMemoryError("out of memory: tried to allocate")
            made.add(layer)

        monkeypatch.setattr(Slots, "lazy_initialization", scarce)
        monkeypatch.setattr("specexp.models.memory.free_memory", lambda device: size - taken())

    return set_room


def test_rows_take_their_memory_at_construction(room):
    """What is there would do for eight rows of the target's, were there no drafter."""
    first, second = (engine("model", "chain", "match") for _ in range(2))
    sizes = [lm.kv_bytes(SLOTS) for lm in first.models]
    room(8 * sizes[0])
    each_rows = [EngineRows(made, 8, SLOTS, SLACK) for made in (first, second)]
    assert [rows.count for rows in each_rows] == [4, 1]
    todo = requests(7)
    for rows, made in zip(each_rows, (first, second), strict=True):
        server = Server(rows, Restless(2))
        responses = serve(server, Source(todo, 7))
        assert [a.tokens for a in responses] == [alone(made, r) for r in todo]
        assert server.notes == []


def test_row_that_does_not_fit_is_one_line(room):
    made = engine("model", "chain", "match")
    room(made.target.kv_bytes(SLOTS))
    with pytest.raises(UserError, match="not one row of 96 slots fits: serve shorter requests"):
        EngineRows(made, 2, SLOTS, SLACK)


@pytest.mark.parametrize(("at", "temperature"), in_turn([3, 5, 6, 8, 13], (0.0, 0.9)))
def test_rows_shrink_when_memory_runs_out(monkeypatch, at, temperature):
    made = engine("model", "chain", "match", temperature=temperature)
    run, calls = LM.feed, []

    def scarce(lm, seqs, *given, **kwargs):
        calls.append(len(seqs.tokens))
        if len(seqs.tokens) > 2 and len(calls) > at:
            raise torch.OutOfMemoryError("out of memory: tried to allocate")
        return run(lm, seqs, *given, **kwargs)

    todo = requests(7)
    texts = [alone(made, r) for r in todo]
    monkeypatch.setattr(LM, "feed", scarce)
    server, responses = served(made, Restless(2), Source(todo, 7), rows=6)
    assert [a.tokens for a in responses] == texts
    assert "out of memory with" in server.notes[0]
    assert server.usable <= 3
    assert Server(server.rows, Restless(2)).usable == server.usable


def test_request_beyond_memory_fails_with_the_reason(monkeypatch):
    made = engine("null", "empty", "match")
    run = LM.feed

    def scarce(lm, seqs, tokens, *given, **kwargs):
        if int(seqs.length.max()) > 20:
            raise torch.OutOfMemoryError("out of memory")
        return run(lm, seqs, tokens, *given, **kwargs)

    monkeypatch.setattr(LM, "feed", scarce)
    todo = [Request([1] * 30, 4), Request([1, 2], 4)]
    _, responses = served(made, Fixed(Tree.chain(0)), Source(todo, 2), rows=2)
    assert [a.state for a in responses] == ["failed", "done"]
    assert "out of memory with one request alone" in responses[0].reason


def test_other_errors_are_not_taken_for_memory(monkeypatch):
    made = engine("null", "empty", "match")
    rows = EngineRows(made, 1, SLOTS, SLACK)
    monkeypatch.setattr(LM, "feed", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        serve(Server(rows, Fixed(Tree.chain(0))), Source(requests(2), 2))
    assert not issubclass(OutOfMemory, RuntimeError)


def test_time_of_a_pass_ends_when_its_device_has_run_it(monkeypatch):
    """On a GPU a prompt would otherwise be read in the time of the round after it."""
    made = engine("null", "empty", "match")
    server = Server(EngineRows(made, 1, SLOTS, SLACK), made.policy)
    late = iter([1.0])  # seconds that the device takes after a call returns
    monkeypatch.setattr(
        server.rows, "settle", lambda: server.rows.wait(server.rows.clock() + next(late, 0.0))
    )
    server._timed(lambda: None)
    assert server._busy >= 1.0
    waited = []
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    server.rows.settle()
    assert not waited
    server.rows.timer.device = torch.device("cuda:1")
    server.rows.settle()
    assert waited == [torch.device("cuda:1")]


def test_long_prompt_does_not_stall_other_rows():
    """While it is read in chunks, a running stream is delivered something in every step."""
    made = engine("null", "empty", "match")
    server = Server(EngineRows(made, 2, SLOTS, SLACK), Fixed(Tree.chain(0)), chunk=8)
    first = server.submit(Request([1, 2], 30))
    server.step()
    long = server.submit(Request([3] * 60, 4))
    while long.state != "writing":
        before = len(first.deliveries)
        server.step()
        assert len(first.deliveries) == before + 1
        assert server.steps[-1].read <= 8
    assert len(first.deliveries) >= 8
