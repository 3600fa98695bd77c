"""A server's text, acceptance and speed beside an exact reference: which fault shows where."""

import json
from collections import Counter
from http.server import BaseHTTPRequestHandler

import pytest

import specexp
from specexp.commands import app
from specexp.decision.check import check
from specexp.errors import UserError
from specexp.measure import statistics
from specexp.measure.exactness import Divergence
from specexp.measure.prompts import Prompt
from specexp.measure.servers import Server

TEXTS = ["a b c a b c", "def mean(values):", "for x in range(3):\n", "import os\nimport"]
PROMPTS = [Prompt(number, "own", (text,)) for number, text in enumerate(TEXTS * 5)]
SHORT = PROMPTS[:4]
TOKENS = 24


@pytest.fixture(scope="module")
def pairing():
    return specexp.load("target-10m", drafter="ngram", gamma=4)


@pytest.mark.parametrize(
    ("kind", "how"),
    [("vllm", {}), ("llamacpp", {}), ("sglang", {"counts_on_its_way": True}),
     ("sglang", {"incremental": True})],
)  # fmt: skip
def test_a_server_that_does_its_work_equals_the_reference(serving, pairing, kind, how, monkeypatch):
    calls = Counter()
    for name in ("difference_draws", "speedup"):
        own = getattr(statistics, name)
        monkeypatch.setattr(
            statistics, name, lambda *x, own=own, **y: calls.update([own.__name__]) or own(*x, **y)
        )
    plain = Server(serving(pairing.with_(drafter="plain"), kind))
    found = check(Server(serving(pairing, kind, **how)), pairing, SHORT, TOKENS, plain)
    assert found.exactness.bugs == 0
    assert found.same == 4
    samples = found.samples
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        assert list(samples[name]) == list(samples[f"here_{name}"])
    assert samples["drafts"].sum() > 4
    assert list(found.positions["server"]) == list(found.positions["here"])
    assert found.missing.value == 0
    assert found.speedup.low < found.speedup.high
    said = " ".join(found.lines())
    assert "text: the target's in 4 of 4 prompts" in said
    assert "+0.00 [+0.00, +0.00], equal in 4 of 4 prompts" in said
    assert "speedup over the plain server: " in said
    assert calls == {"difference_draws": 1, "speedup": 1}, "an interval is computed once"


def test_turns_of_a_conversation_are_one_unit_of_an_interval(serving, pairing):
    turns = [Prompt(1, "own", (text,), turn=turn) for turn, text in enumerate(TEXTS[:2], 1)]
    plain = Server(serving(pairing.with_(drafter="plain")))
    found = check(Server(serving(pairing)), pairing, turns, TOKENS, plain)
    assert list(found.samples["turn"]) == [1, 2]
    assert found.speedup.doubt == "too few conversations: at least 16 more"


def test_drafts_that_are_worse_than_here_show_in_the_acceptance_alone(serving, pairing):
    found = check(Server(serving(pairing, most=1)), pairing, PROMPTS, TOKENS)
    assert found.exactness.bugs == 0, "rejected drafts are repaired"
    assert found.missing.high < 0
    said = " ".join(found.lines())
    assert "certainly fewer: its drafts or its rule differ; equal in " in said
    assert found.alike < len(PROMPTS)
    assert found.positions["server"][1] == 0 < found.positions["here"][1]
    found.exactness.divergences = [Divergence(0, 3, 5, 6, "bug")]  # as of a quantised target
    assert "certainly fewer, but its text differs; " in " ".join(found.lines())


def test_another_text_is_found_and_where(serving, pairing):
    found = check(Server(serving(pairing, spoils=True)), pairing, SHORT, TOKENS)
    assert found.exactness.bugs == 4
    assert "NOT the target's in 4, first in prompt 1 at token " in found.text()


@pytest.mark.parametrize("others", [{"drafts": 30}, {"drafts": -30}, {"accepted_tokens": 99}])
def test_counters_that_the_answers_cannot_explain_are_compared_with_nothing(
    serving, pairing, others
):
    server = Server(serving(pairing, others=others, counts=Counter(drafts=1000)))
    with pytest.raises(UserError, match="was it restarted, or used by others"):
        check(server, pairing, SHORT, 8)


def test_places_that_a_server_does_not_count_are_not_called_rejected(serving, pairing):
    found = check(Server(serving(pairing, by_place=False)), pairing, SHORT, TOKENS)
    assert found.samples["accepted_tokens"].sum() > 0
    assert found.positions["server"].isna().all()


def test_an_end_that_the_server_leaves_out_is_no_difference(serving, pairing):
    ids = pairing.encode(TEXTS)
    ends = {tokens[9] for tokens in pairing.engine.generate(ids, TOKENS).tokens}
    ending = pairing.with_()
    ending.engine.eos = tuple(ends)
    for hides in (False, True):
        found = check(Server(serving(ending, hides_eos=hides)), ending, SHORT, TOKENS)
        assert found.exactness.bugs == 0


def test_an_answer_without_tokens_takes_part_in_no_pace(serving, pairing):
    """As where the first token ends the text, and the server leaves it out."""
    [first], *_ = pairing.engine.generate(pairing.encode(TEXTS), 1).tokens
    ending = pairing.with_()
    ending.engine.eos = (first,)
    found = check(Server(serving(ending, hides_eos=True)), ending, SHORT, TOKENS)
    assert list(found.samples["tokens"]) == [0, TOKENS, TOKENS, TOKENS]
    assert (found.samples["ttft_s"] > 0).all()
    found.samples["s"] = 0.001 * found.samples["later"]
    assert "speed: 1.00 ms a token after the first, TTFT " in found.lines()[-1]


def test_tokens_that_come_with_the_first_are_not_timed(serving, pairing):
    found = check(Server(serving(pairing, joins=True)), pairing, SHORT, TOKENS)
    begun = [ids + pairing.engine.generate([ids], 1).tokens[0] for ids in pairing.encode(TEXTS)]
    more = [pairing.engine.generate([ids], TOKENS - 1).trace.steps()[0].emitted for ids in begun]
    assert max(more) > 1
    assert list(found.samples["later"]) == [TOKENS - 1 - n for n in more]
    found = check(Server(serving(pairing)), pairing, SHORT, 1)
    assert "speed: TTFT " in " ".join(found.lines()), "there is no pace of one token"


class Never(specexp.Drafter):
    def propose(self, seqs, tree, rng):
        return seqs.draft(tree.nodes(seqs.device), seqs.root.repeat(1, len(tree) - 1) * 0 - 1)


@pytest.mark.parametrize(
    ("drafter", "here", "said"),
    [("plain", "ngram", "the server drafted nothing: is speculative decoding on?"),
     ("plain", Never(), "the server drafted nothing, nor did the reference on these prompts"),
     ("ngram", Never(), "% of draft tokens; the reference drafted nothing on these prompts")],
)  # fmt: skip
def test_acceptance_is_not_compared_where_one_side_drafts_nothing(
    serving, pairing, drafter, here, said
):
    server = Server(serving(pairing.with_(drafter=drafter)))
    found = check(server, pairing.with_(drafter=here), SHORT, TOKENS)
    assert found.drafts == (drafter == "ngram")
    assert "missing" not in found.figures()
    [line] = [line for line in found.lines() if line.startswith("acceptance: ")]
    assert line.endswith(said)


def test_a_version_that_counts_no_drafts_is_not_said_to_draft_none(serving, pairing):
    server = Server(serving(pairing.with_(drafter="plain"), "llamacpp"))
    said = " ".join(check(server, pairing, SHORT[:1], TOKENS).lines())
    assert "drafted nothing: is speculative decoding on? (Its older versions " in said


def test_another_draft_length_is_found_where_all_drafts_have_it(serving, pairing):
    found = check(Server(serving(pairing.with_(gamma=2))), pairing, PROMPTS, TOKENS)
    assert "the server drafts 2 tokens, here 4: use --gamma 2" in " ".join(found.lines())
    found.samples.loc[0, "draft_tokens"] -= 1  # a lookup that finds little to copy
    assert "the server drafts" not in " ".join(found.lines())


def test_accepted_tokens_that_the_limit_cuts_off_are_no_share_of_the_text(serving, pairing):
    longer, text = pairing.with_(gamma=8), "1, 2, 3, 4, 5, 6, 7, 8,"
    found = check(Server(serving(longer)), longer, [Prompt(0, "own", (text,))], 6)
    assert "acceptance: 1.67 accepted tokens per token written, " in " ".join(found.lines())


def test_bad_servers_are_one_line(serving, pairing):
    with pytest.raises(UserError, match=r"http://127.0.0.1:9 does not answer: .*is the server up"):
        Server("127.0.0.1:9")
    with pytest.raises(UserError, match=r"not SGLang, and .* no counters of vLLM .*--metrics"):
        Server(serving(pairing, kind="tgi"))
    ended = {"completion_tokens": 4, "spec_verify_ct": 2, "finish_reason": {"type": "length"}}
    earlier = {"meta_info": ended, "output_ids": [1]}
    with pytest.raises(UserError, match=r"other counters: it needs SGLang 0.5.23"):
        Server(serving(pairing, kind="sglang", adds=[earlier])).complete([1, 2], 4)
    textual = {"text": "a", "meta_info": {"completion_tokens": 1}}
    with pytest.raises(UserError, match="returned no token ids: it needs a newer version"):
        Server(
            serving(pairing, kind="sglang", parts=0, ends=f"data: {json.dumps(textual)}\n\n")
        ).complete([1, 2], 4)
    too_long = {"type": "abort", "message": "too long"}
    with pytest.raises(UserError, match="refused a prompt: too long"):
        Server(serving(pairing, kind="sglang", reason=too_long)).complete([1, 2], 4)
    for error in ("too long", {"message": "too long", "code": 400}):
        with pytest.raises(UserError, match=r"refused a prompt: too long$"):
            Server(serving(pairing, adds=[{"error": error}])).complete([1, 2], 4)
    for listed in ("no JSON", "[]"):
        with pytest.raises(UserError, match=r"/v1/models answers no JSON object, but"):
            Server(serving(pairing, models=listed))
    other = (
        r"/v1/models answers 501 Unsupported method.*: not a vLLM, SGLang or llama.cpp server\?$"
    )
    with pytest.raises(UserError, match=other):  # where no reason is given, it is a page of HTML
        Server(serving(pairing, handler=BaseHTTPRequestHandler))
    with pytest.raises(UserError, match=r"/v1/completions answers no JSON object, but '{nope"):
        Server(serving(pairing, ends="data: {nope\n\n")).complete([1, 2], 4)
    with pytest.raises(UserError, match="broke off after 1 token: see its log"):
        Server(serving(pairing, parts=1)).complete([1, 2], 4)
    refusing = Server(serving(pairing, refuses=True))
    with pytest.raises(UserError, match=r"answers 400 Bad Request: .*prompt too long"):
        refusing.complete([1, 2], 4)
    with pytest.raises(UserError, match="use temperature 0"):
        check(refusing, pairing.with_(temperature=0.5), SHORT, TOKENS)


def test_events_and_counters_that_say_nothing_are_left_out(serving, pairing):
    usage = {"choices": [], "usage": {"total_tokens": 6}}
    server = Server(
        serving(pairing, adds=[usage], models='{"data": null}', counts=Counter(drafts=float("nan")))
    )
    assert server.model == ""
    assert len(server.complete([1, 2], 4).tokens) == 4
    assert not server.dialect.counters()["drafts"]


@pytest.mark.parametrize("spoils", [False, True])
def test_the_command_prints_findings_and_fails_on_another_text(
    serving, pairing, capsys, monkeypatch, tmp_path, spoils
):
    out = tmp_path / "prompts.csv"
    words = ["check", serving(pairing, spoils=spoils), "--drafter", "ngram", "--gamma", "4",
             "--limit", "3", "--max-new-tokens", "12", "--out", str(out)]  # fmt: skip
    monkeypatch.setattr("sys.argv", ["specexp", *words, *["--json"] * spoils])
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert ended.value.code == spoils
    text = capsys.readouterr().out
    if spoils:
        printed = json.loads(text)
        assert printed["exact/bugs"] == 3
        assert "NOT the target's in 3" in printed["findings"][0]
    else:
        assert "the target's in 3 of 3" in text
        assert "drafts with at least so many" in text
    assert out.read_text().startswith("question_id,turn,tokens,s,ttft_s,later,drafts,")
