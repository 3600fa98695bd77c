"""Other engines do the same work on the same weights; what differs is found."""

import json
import shutil
import types

import pytest
import torch
from support.questions import TWO

import specexp
from specexp.measure import interleave
from specexp.measure.hardware import peers
from specexp.sampling import Sampling


def test_peers_write_equal_texts(pairing):
    modules = [lm.module for lm in pairing.engine.models]
    kept = [module.generation_config for module in modules]
    for config in kept:
        config.eos_token_id = list(range(pairing.target.vocab))  # any token would end a text
    report = peers.peers(pairing, TWO, [2], 10, 2)
    assert [module.generation_config for module in modules] == kept
    assert [(r["work"], r["batch"]) for r in report["rows"]] == [
        ("plain", 1), ("draft", 1), ("lookup", 1), ("plain over compiled", 1), ("plain", 2),
        ("draft over plain", 2),
    ]  # fmt: skip
    compiled = report["rows"].pop(3)
    assert (compiled["ratio"], "on a GPU alone" in compiled["missing"]) == (None, True)
    for row in report["rows"]:
        assert row["missing"] is None
        assert row["equal"] == {"share": 1, "ties": 0, "others": 0}
        assert row["ratio"]["low"] <= row["ratio"]["value"] <= row["ratio"]["high"]


def test_peers_follow_the_generation_config_of_the_target(tiny_folders, tmp_path):
    folder = shutil.copytree(tiny_folders[0], tmp_path / "target")
    said = {"repetition_penalty": 1.4, "bad_words_ids": [[3, 4]]}
    (folder / "generation_config.json").write_text(json.dumps(said))
    report = peers.peers(specexp.load(str(folder), tiny_folders[1], gamma=3), TWO, [2], 10, 1)
    for row in report["rows"]:
        assert row["missing"] or row["equal"] == {"share": 1, "ties": 0, "others": 0}


def test_passes_over_a_static_cache_of_one_size_write_the_same_texts(pairing):
    module = pairing.target.module
    texts = pairing.encode([prompt.text for prompt in TWO])
    longest = max(map(len, texts))
    with peers.same_settings([module], 3, Sampling(), {}):
        plain = peers.transformers(module, 10)
        static = peers.transformers(module, 10, longest, cache_implementation="static")
        assert min(map(len, texts)) < longest
        for text in texts:
            assert static([text]) == plain([text])


def test_peer_that_fails_stops_the_others(pairing, monkeypatch):
    def fails(texts):
        raise RuntimeError("no compiler:\ninstall one")

    plain = peers.transformers(pairing.target.module, 10)
    monkeypatch.setattr(peers, "others", lambda *_: ({"compiled": fails, "plain": plain}, {}))
    report = peers.peers(pairing, TWO, [2], 10, 2)
    plain, *_, compiled, _, _ = report["rows"]
    assert plain["ratio"]["value"] > 0
    assert compiled["missing"] == "it fails with RuntimeError: no compiler: install one"
    assert (compiled["ratio"], compiled["equal"]) == (None, None)


def test_peer_ratios_are_of_delivered_tokens(pairing, monkeypatch, now):
    def writer(cost, tokens):
        def write(texts):
            now.s += cost
            return [[1] * tokens for _ in texts]

        return write

    monkeypatch.setattr(peers, "ours", lambda engine, new: writer(2, 10))
    monkeypatch.setattr(
        peers, "others",
        lambda *_: ({"plain": writer(3, 10), "draft": writer(2, 5)}, {"lookup": "gone"}),
    )  # fmt: skip
    monkeypatch.setattr(peers, "equal", lambda *_: None)
    report = peers.peers(pairing, TWO, [1, 4, 16], 10, 2)
    plain, draft, lookup, _, crowd, over = report["rows"]
    assert (plain["tok_s"], plain["their_tok_s"]) == (5, pytest.approx(10 / 3))
    assert plain["ratio"]["value"] == pytest.approx(1.5)
    assert draft["ratio"]["value"] == pytest.approx(2)
    assert (lookup["ratio"], lookup["missing"]) == (None, "gone")
    assert (crowd["batch"], crowd["tok_s"], over["ratio"]["value"]) == (4, 20, pytest.approx(1.5))


def test_peer_intervals_are_of_repeats_however_much_prompts_differ(pairing, monkeypatch, now):
    def writer(power):
        def write(texts):
            now.s += len(texts[0]) ** power
            return [[1] * 10 for _ in texts]

        return write

    monkeypatch.setattr(peers, "ours", lambda engine, new: writer(1))
    monkeypatch.setattr(peers, "others", lambda *_: ({"plain": writer(2)}, {}))
    monkeypatch.setattr(peers, "equal", lambda *_: None)
    ratio = peers.peers(pairing, TWO, [2], 10, 3)["rows"][0]["ratio"]
    one, other = map(len, pairing.encode([prompt.text for prompt in TWO]))
    assert one != other
    mean = pytest.approx((one**2 + other**2) / (one + other))
    assert ratio["low"] == mean == ratio["high"]


def test_assisted_generation_drafts_gamma_tokens_every_round(pairing):
    widths = []
    target, draft = (lm.module for lm in pairing.engine.models)
    hook = target.register_forward_pre_hook(
        lambda module, args, more: widths.append(more["input_ids"].shape[1]), with_kwargs=True
    )
    write = peers.transformers(target, 30, assistant_model=draft)
    with peers.same_settings([target, draft], 3, Sampling(), {}):
        [row] = write([[5, 6, 7]])
    hook.remove()
    assert len(row) == 30
    assert widths[0] == 3 + 3  # the prompt and the first draft tokens
    assert set(widths[1:-3]) == {1 + 3}


def test_sampled_peers_share_settings_not_texts(pairing):
    with peers.same_settings([pairing.target.module], 3, Sampling(0.7, 5, 0.9), {}):
        config = pairing.target.module.generation_config
        assert (config.do_sample, config.temperature, config.top_k) == (True, 0.7, 5)
        assert (config.top_p, config.eos_token_id) == (0.9, None)
    plain = pairing.with_(temperature=0.7).engine.plain()
    assert peers.equal(plain, [[1]], [interleave.Turn(1.0, [[1]])], 1) is None


def test_equal_finds_a_planted_difference(pairing):
    plain = pairing.engine.plain()
    plain.eos = ()
    ids = pairing.encode([p.text for p in TWO])
    first, second = plain.generate(ids, 10).tokens
    turns = [interleave.Turn(1.0, [first]), interleave.Turn(1.0, [second])]
    assert peers.equal(plain, ids, turns, 10) == {"share": 1, "ties": 0, "others": 0}
    logits = plain.target.module(input_ids=torch.tensor([ids[1] + second[:4]])).logits[0, -1]
    wrong = [*second[:4], int(logits.argmin()), *second[5:]]
    turns = [interleave.Turn(1.0, [first]), interleave.Turn(1.0, [wrong])]
    assert peers.equal(plain, ids, turns, 10) == {"share": 14 / 20, "ties": 0, "others": 1}
    short = [interleave.Turn(1.0, [first]), interleave.Turn(1.0, [second[:7]])]
    assert peers.equal(plain, ids, short, 10) == {"share": 17 / 20, "ties": 0, "others": 1}


def test_missing_peer_says_why(pairing, monkeypatch):
    _, missing = peers.others(pairing.with_(drafter="ngram"), 4, 9)
    assert missing == {
        "draft": "assisted generation needs a draft model, and ngram is not one",
        "compiled": "transformers compiles its passes on a GPU alone",
    }
    monkeypatch.setattr(pairing.engine.drafter.lm, "config", types.SimpleNamespace(vocab_size=7))
    assert "mistakes for different tokenizers" in peers.unassisted(pairing)
