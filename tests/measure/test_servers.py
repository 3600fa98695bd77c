"""Two servers under load, of which one drafts: the same prompts, full loads, faults that show."""

import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler

import pandas as pd
import pytest
from conftest import also
from support import fake_servers

import specexp
from specexp import measure
from specexp.errors import UserError
from specexp.figures import under_load
from specexp.measure import servers
from specexp.measure.prompts import Prompt
from specexp.measure.servers import loops
from specexp.measure.servers.connection import Connection
from specexp.measure.servers.server import Reply

PROMPTS = [Prompt(number, "own", (f"a b c a b c {number}",)) for number in range(5)]


@pytest.fixture(scope="module")
def pairing():
    return specexp.load("target-10m", drafter="ngram", gamma=3)


@pytest.fixture
def pair(serving, pairing, request):
    kind = getattr(request, "param", "vllm")
    plain = serving(pairing.with_(drafter="plain"), kind)
    return servers.connect(serving(pairing, kind), plain, "target-10m", 3)


@pytest.mark.parametrize("pair", ["sglang", *also("vllm", "llamacpp")], indirect=True)
def test_both_servers_answer_every_prompt_at_every_load(pair, pairing):
    samples, counts = servers.closed_loops(pair, PROMPTS, [1, 3], 12, repeats=2)
    assert len(samples) == 2 * 2 * len(PROMPTS)
    assert samples["same"].all()
    assert list(samples["question_id"].unique()) == [*"01234"]
    whole = [pairing.generate(p.text, 12).tokens[0] for p in PROMPTS]
    assert list(samples["tokens"][:5]) == list(samples["plain_tokens"][:5]) == [*map(len, whole)]
    assert (samples["ttft_s"] < samples["s"]).all()
    assert list(counts["load"]) == [1, 1, 3, 3]
    assert (counts["accepted_tokens"] <= counts["draft_tokens"]).all()
    rated = servers.rates(samples, counts)
    assert list(rated["load"]) == [1, 3]
    assert (rated["low"] < rated["speedup"]).all()
    few = "too few prompts: at least 12 more"
    assert set(rated["doubt"]) <= {few, measure.statistics.NOT_CREDIBLE}
    assert under_load.servers(rated)


class Clocked:
    """A server that takes 10 ms a token and remembers how many requests it had at once."""

    def __init__(self, drafts=0):
        self.url, self.model, self.host = "http://here", "m", "here"
        self.dialect, self.drafts = self, drafts
        self.name, self.now, self.seen = "vLLM", 0, list[tuple[int, int]]()
        self.lock = threading.Lock()

    def counters(self):
        drafts = self.drafts * len(self.seen)
        return Counter(drafts=drafts, draft_tokens=3 * drafts)

    def complete(self, prompt, new):
        with self.lock:
            self.now += 1
            before = self.now
        time.sleep(0.01 * new)
        with self.lock:
            after, self.now = self.now, self.now - 1
            self.seen.append((before, after))
        return Reply([1] * new, False, 0.01, 0.01 * (new - 1), new - 1)


def test_prompts_that_count_meet_the_full_load():
    server, done = Clocked(), []
    replies, busy = loops._turn(server, [[1], [2], [3]], 4, 8, lambda: done.append(1))
    assert [len(reply.tokens) for reply in replies] == [8, 8, 8]
    assert len(done) == 3
    assert max(before for before, _ in server.seen) == 4
    assert busy < 1


def test_a_stream_that_fails_ends_all_others():
    server = Clocked()
    whole, sent = server.complete, []

    def breaks_off(prompt, new):
        sent.append(prompt)
        if len(sent) == 6:
            raise UserError("http://here broke off after 3 tokens: see its log")
        return whole(prompt, new)

    server.complete = breaks_off
    with pytest.raises(UserError, match="broke off"):
        loops._turn(server, [[n] for n in range(40)], 4, 4, lambda: None)
    assert len(sent) < 12


@pytest.mark.parametrize(
    ("drafting", "plain", "why"),
    [(1, 1, "http://plain drafts: start it without speculative decoding"),
     (0, 0, "http://here drafted nothing: is speculative decoding on?"),
     (1, 0, "http://here drafts 3.0 tokens at a time, and gamma is 2")],
)  # fmt: skip
def test_a_server_that_drafts_otherwise_than_said_is_refused(drafting, plain, why, monkeypatch):
    pair = servers.Pair(Clocked(drafting), Clocked(plain), None, 2)
    pair.plain.url = "http://plain"
    monkeypatch.setattr(servers.Pair, "encode", lambda pair, texts: [[1] for _ in texts])
    with pytest.raises(UserError, match=why):
        servers.closed_loops(pair, PROMPTS, [2], 4)


def test_two_addresses_of_one_server_or_of_two_engines_are_refused(serving, pairing):
    vllm, llama = serving(pairing), serving(pairing, "llamacpp")
    with pytest.raises(UserError, match="is both servers: start one that drafts and one that"):
        servers.connect(vllm, f"http://{vllm}/", "target-10m", 3)
    with pytest.raises(UserError, match=r"is vLLM and .* is llama.cpp: use one engine"):
        servers.connect(vllm, llama, "target-10m", 3)


def test_a_server_that_asks_for_a_key_gets_that_of_the_environment(monkeypatch):
    class Locked(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.headers["Authorization"] == "Bearer k3y" else 401)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *args):
            pass

    with fake_servers.starting() as start:
        connection = Connection(start(None, handler=Locked))
        with pytest.raises(UserError, match="401 Unauthorized: put its key into SPECEXP_API_KEY"):
            connection.json("/v1/models")
        monkeypatch.setenv("SPECEXP_API_KEY", "k3y")
        assert connection.json("/v1/models") == {}


def table(pace, prompts=40, load=4, **more):
    """Answers of 10 tokens: the plain server's in a second, the other's in 1 / pace."""
    rows = [
        {"load": load, "repeat": 0, "question_id": str(n), "turn": 1, "same": n > 0, "s": 1 / pace,
         "ttft_s": 0.1, "tokens": 10, "later": 9, "plain_s": 1.0, "plain_ttft_s": 0.2,
         "plain_tokens": 10, "plain_later": 9}
        for n in range(prompts)
    ]  # fmt: skip
    counted = {"drafts": 100, "draft_tokens": 300, "accepted_tokens": 150, "busy": 0.1}
    return pd.DataFrame(rows), pd.DataFrame([{"load": load, "repeat": 0} | counted | more])


def test_rates_are_those_of_all_streams_together():
    [row] = servers.rates(*table(2)).to_dict("records")
    assert row["plain_tok_s"] == pytest.approx(40)
    assert row["tok_s"] == pytest.approx(80)
    assert (row["speedup"], row["low"], row["high"]) == pytest.approx((2, 2, 2))
    assert (row["ttft_ms"], row["plain_ttft_ms"]) == pytest.approx((100, 200))
    assert (row["tpot_ms"], row["plain_tpot_ms"]) == pytest.approx((400 / 9, 800 / 9))
    assert (row["rate"], row["length"], row["same"]) == pytest.approx((0.5, 2.5, 39 / 40))
    assert row["doubt"] == ""


def test_a_speedup_beyond_what_was_accepted_is_not_credible():
    rated = servers.rates(*table(3, accepted_tokens=100))
    assert list(rated["doubt"]) == [measure.statistics.NOT_CREDIBLE]
    assert servers.metrics(rated)[0]["speedup/credible"] == 0


def test_a_load_at_which_a_server_leaves_drafting_off_has_no_acceptance_rate():
    off = table(1, drafts=0, draft_tokens=0, accepted_tokens=0)
    assert servers.rates(*off)["rate"].isna().all()


def test_a_busy_client_is_named(caplog):
    servers.rates(*table(2, busy=0.8))
    assert "this client takes 80 % of a core: it may be what is slow" in caplog.text
