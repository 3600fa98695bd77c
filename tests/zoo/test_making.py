"""How the zoo was made: its text, its recipes, its cards and the weights that ship."""

import json
import random
import re

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from making.cards import card, card_of_heads, measure
from making.corpus import gather, is_held_out, passages, pieces
from making.edits import echo, edit, rename
from making.recipes import RECIPES, TARGET, quick_version
from making.records import record
from making.tokenizer import train_tokenizer
from making.train import loss_of, train_zoo
from specexp.api import load
from specexp.errors import UserError
from specexp.models.heads.layouts import DRAFTED_BY
from specexp.zoo import shelf
from specexp.zoo.heads import train_heads
from specexp.zoo.recipes import END, VOCABULARY
from specexp.zoo.rows import batches, encode

NAMES = ["target-10m", "target-exit-1m", "sibling-3m", "sibling-1m", "random-tiny"]
HEADS = ["target-10m-medusa", "target-10m-eagle3", "target-10m-dspark"]


@pytest.fixture(scope="module")
def zoo():
    return {
        name: AutoModelForCausalLM.from_pretrained(shelf.find(name), dtype=torch.float32)
        for name in NAMES
    }


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(shelf.find("target-10m"))


# the text


def test_gathering_twice_gives_the_same_text(corpus):
    again = gather(records=32, edits=32, limit=12)
    assert again.facts == corpus.facts
    assert again.train == corpus.train


def test_no_document_is_on_both_sides(corpus):
    for kind in ("code", "prose"):
        assert corpus.train[kind]
        assert not set(corpus.train[kind]) & set(corpus.held[kind])


def test_held_out_share_of_sources():
    held = [is_held_out(f"source {i}") for i in range(4000)]
    assert 0.045 < np.mean(held) < 0.08
    assert held == [is_held_out(f"source {i}") for i in range(4000)]


def test_pieces_of_a_module_are_all_of_it_and_keep_decorators():
    body = "".join(f"@wrap\ndef f{i}(x):\n    return x + {i}  # {'-' * 300}\n\n" for i in range(40))
    cut = pieces("import os\n" + body)
    assert len(cut) > 3
    assert all(not piece.rstrip().endswith("@wrap") for piece in cut)
    assert "".join(cut).count("def f") == 40


def test_passages_stand_under_the_name_they_explain():
    doc = "It does one thing. " * 12
    found = passages(f'import os\n\ndef f(a, b=1):\n    """{doc}"""\n')
    assert found == [f"f(a, b=1)\n\n{doc.strip()}\n"]


def test_edit_repeats_its_passage_with_one_change():
    code = [
        "def f(key, rows):\n    for row in rows:\n        if row[0] == key:\n"
        "            return row\n    return None"
    ]
    prose = ["The file is read once. Each of its lines is kept in memory until the end."]
    headings = set()
    for seed in range(300):
        text = edit(random.Random(seed), code, prose)
        assert text == edit(random.Random(seed), code, prose)
        before, after = text.split("\n\n")
        headings |= {before.split("\n")[0], after.split("\n")[0].split(" ")[0]}
        said, again = (set(re.findall(r"\w+", part.partition("\n")[2])) for part in (before, after))
        assert len(said & again) >= 0.5 * min(len(said), len(again)), text
    assert {"# Before", "Original:", "Text:", "Input:", "CSV:", "JSON", "Output:"} <= headings


def test_echo_repeats_its_words():
    for seed in range(100):
        before, after = echo(random.Random(seed), ["alpha", "beta", "x1", "_y"]).split("\n\n")
        said, again = (part.partition("\n")[2].split() for part in (before, after))
        assert len(said) == len(again) >= 9
        changed = {(a, b) for a, b in zip(said, again, strict=True) if a != b}
        assert len(changed) <= 1


def test_rename_leaves_attributes_and_longer_names():
    assert rename("x = self.x + xs[x]", "x", "total") == "total = self.x + xs[total]"
    assert rename("f(x=x)", "x", "total") == "f(total=total)"


def test_records_are_drawn_by_the_seed():
    first = [record(random.Random(s)) for s in range(200)]
    assert first == [record(random.Random(s)) for s in range(200)]
    assert len(set(first)) == 200


def test_tokenizer_training_is_deterministic(corpus):
    texts = corpus.train["prose"]
    first, second = (train_tokenizer(texts).backend_tokenizer.to_str() for _ in range(2))
    assert first == second


# training


def test_distillation_from_itself_has_no_gradient(documents):
    teacher, pupil = quick_version(TARGET).build(), quick_version(TARGET).build()
    teacher.requires_grad_(False)
    batch = next(batches(documents, quick_version(TARGET).courses[0]))
    loss = loss_of(pupil, teacher)(batch)
    loss.backward()
    p = teacher(input_ids=batch[:, :-1]).logits.softmax(-1)
    assert loss.item() == pytest.approx(-(p * p.log()).sum(-1).mean().item(), abs=1e-3)
    assert max(weight.grad.abs().max() for weight in pupil.parameters()) < 1e-4
    of_text = loss_of(pupil, None)(batch)
    of_text.backward()
    assert max(weight.grad.abs().max() for weight in pupil.parameters()) > 1e-3


def test_model_overlaps_fully_with_itself(documents):
    model = quick_version(TARGET).build().eval()
    figures = measure(model, documents, model, tokens=256, length=64)
    assert set(figures) == set(documents)
    for values in figures.values():
        assert values["agreement"] == 1.0
        assert values["overlap"] == pytest.approx(1.0, abs=1e-4)
        assert values["loss"] == pytest.approx(np.log(VOCABULARY), abs=0.2)


def test_figures_of_a_kind_are_independent_of_other_kinds(documents):
    model = quick_version(TARGET).build().eval()
    code = {"code": documents["code"]}
    brief = {"brief": [np.arange(1, 9, dtype=np.int32)]}
    alone, behind = (measure(model, d, tokens=256, length=64) for d in (code, brief | code))
    assert behind["code"] == alone["code"]


def test_quick_training_writes_every_model(tmp_path):
    made = train_zoo(["target-10m", "sibling-1m"], tmp_path / "out", tmp_path / "w", quick=True)
    assert [folder.name for folder in made] == ["target-10m", "sibling-1m"]
    found = shelf.models(tmp_path / "out")
    assert [(model.name, model.role, model.target) for model in found] == [
        ("target-10m", "target", None),
        ("sibling-1m", "draft", "target-10m"),
    ]
    AutoModelForCausalLM.from_pretrained(found[1].path)
    assert not list((tmp_path / "out").glob(".*"))


def test_bad_training_request_is_one_line(tmp_path):
    with pytest.raises(UserError, match="no recipe for 'target-9m': the zoo trains target-10m"):
        train_zoo(["target-9m"], tmp_path, tmp_path)
    with pytest.raises(UserError, match="cannot train on 'warp'"):
        train_zoo(["random-tiny"], tmp_path, tmp_path, device="warp")
    with pytest.raises(UserError, match="cannot train on 'warp'"):
        train_heads("medusa", shelf.find("target-10m"), device="warp")
    with pytest.raises(UserError, match=r"no target-10m in .*: train it first"):
        train_zoo(["sibling-1m"], tmp_path, tmp_path, quick=True)


# the weights that ship


def test_the_zoo_is_small_and_its_weights_are_safetensors():
    files = [path for path in shelf.shipped().glob("*/*") if path.parent.name != "making"]
    assert sum(path.stat().st_size for path in files) <= 46_600_000
    assert {path.suffix for path in files} == {".json", ".md", ".safetensors"}


@pytest.mark.parametrize("name", NAMES)
def test_shipped_model_matches_its_card(name, zoo):
    folder = shelf.find(name)
    facts = json.loads((folder / "zoo.json").read_text())
    model = zoo[name]
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.num_parameters() == facts["parameters"]
    assert model.config.num_hidden_layers == facts["layers"]
    assert model.config.hidden_size == facts["width"]
    assert model.config.tie_word_embeddings
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    shared = (shelf.find("target-10m") / "tokenizer.json").read_bytes()
    assert (folder / "tokenizer.json").read_bytes() == shared
    recipe = next(recipe for recipe in RECIPES if recipe.name == name)
    assert (recipe.role, recipe.teacher) == (facts["role"], facts["target"])

    text = (folder / "README.md").read_text()
    assert text == card(facts)
    assert f"{facts['parameters']:,} parameters" in text
    assert ("The training text comes with Python" in text) == bool(facts["trained"])
    for section in ("## Use", "## Training", "## Held-out text", "## Reproduction", "## Licence"):
        assert section in text
    if facts["trained"]:
        corpus = facts["trained"]["corpus"]
        assert f"Python {corpus['python']}" in text
        for parts in corpus["parts"].values():
            for part in parts.values():
                assert len(part["sha256"]) == 64
                assert part["sha256"][:16] in text


def test_shipped_tokenizer_round_trips_any_text(tokenizer):
    rng = random.Random(0)
    noise = "".join(chr(rng.choice([rng.randrange(32, 127), rng.randrange(0x3B1, 0x3C9), 0x1F600]))
                    for _ in range(400))  # fmt: skip
    for text in ("def f(x):\n\treturn  x\n\n", "  12,345.67\r\n", "naïve café", noise, ""):
        first, *ids = tokenizer(text)["input_ids"]
        assert first == END
        assert tokenizer.decode(ids) == text
        assert all(0 < i < VOCABULARY for i in ids)
    assert tokenizer.convert_tokens_to_ids("<|endoftext|>") == END == tokenizer.eos_token_id
    assert len(tokenizer) == VOCABULARY


def test_drafts_overlap_with_the_target_on_unseen_records(zoo, tokenizer):
    rng = random.Random(20)
    documents = {"records": encode(tokenizer, [record(rng) for _ in range(12)])}
    target = zoo["target-10m"]
    figures = {
        name: measure(zoo[name], documents, target, tokens=1500, length=500)["records"]
        for name in NAMES
        if name != "target-exit-1m"
    }
    assert figures["target-10m"]["loss"] < 1.3
    assert figures["sibling-3m"]["overlap"] > figures["sibling-1m"]["overlap"] > 0.5
    assert figures["sibling-3m"]["agreement"] > 0.65
    assert figures["random-tiny"]["overlap"] < 0.05


def test_target_copies_from_its_context(zoo, tokenizer):
    code = "def greet(person, times):\n    for i in range(times):\n        print('hello', person)"
    prose = "The museum opens at nine in the morning and closes at six. Late visitors may wait."
    first, second = [], []
    for seed in range(24):
        text = edit(random.Random(seed), [code], [prose])
        before, after = text.split("\n\n")
        heading = after.split("\n")[0]
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        start = len(tokenizer(before)["input_ids"])
        change = len(tokenizer(f"{before}\n\n{heading}\n")["input_ids"])
        with torch.no_grad():
            predicted = zoo["target-10m"](ids).logits[0, :-1].argmax(-1)
        right = (predicted == ids[0, 1:]).tolist()
        first += right[: start - 1]
        second += right[change - 1 :]
    assert np.mean(second) > 0.85
    assert np.mean(second) > np.mean(first) + 0.2


@pytest.mark.parametrize("name", HEADS)
def test_shipped_heads_match_their_card_and_draft(name):
    facts = json.loads((shelf.find(name) / "zoo.json").read_text())
    method = DRAFTED_BY[facts["role"]]
    pairing = load("target-10m", method, gamma=3)
    own = pairing.engine.drafter.heads if method == "medusa" else pairing.engine.drafter.net
    assert sum(p.numel() for p in own.parameters()) == facts["parameters"]
    assert (shelf.find(name) / "README.md").read_text() == card_of_heads(facts)
    made = pairing.generate(["def mean(values):\n", "total = 0\nfor i in range(10):\n"], 40)
    assert made.trace.acceptance.length > {"medusa": 1.3, "eagle": 2.2, "dflash": 1.8}[method]


def test_early_exit_of_the_exit_target_is_accepted():
    plain = load("target-exit-1m", "early_exit:2", gamma=3)
    assert plain.generate(["def mean(values):\n"], 40).trace.acceptance.rate > 0.4
