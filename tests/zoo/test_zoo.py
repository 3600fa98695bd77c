"""The zoo: its text, its rows, its training loop, its shelf and the weights that ship."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import tiny_llama, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from specexp.api import load
from specexp.errors import UserError
from specexp.zoo import cards, heads, shelf, twins
from specexp.zoo.cards import measure
from specexp.zoo.corpus import PIECE, cut, gather, is_held_out, passages, pieces
from specexp.zoo.edits import echo, edit, rename
from specexp.zoo.heads import train_heads
from specexp.zoo.recipes import END, RECIPES, TARGET, VOCABULARY, Course, Phase, quick_version
from specexp.zoo.recipes import HEADS as RECIPES_OF_HEADS
from specexp.zoo.records import record
from specexp.zoo.rows import Rows, encode, train_tokenizer
from specexp.zoo.train import GIVEN, _loss, continued, continued_once, fit, train_zoo

NAMES = ["target-10m", "target-exit-1m", "sibling-3m", "sibling-1m", "random-tiny"]
HEADS = ["target-10m-medusa", "target-10m-eagle3"]


@pytest.fixture(scope="module")
def corpus():
    return gather(records=32, edits=32, limit=12)


@pytest.fixture(scope="module")
def documents(corpus):
    tokenizer = train_tokenizer(text for texts in corpus.train.values() for text in texts)
    return {kind: encode(tokenizer, texts) for kind, texts in corpus.train.items()}


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
    assert again.facts() == corpus.facts()
    assert again.train == corpus.train


def test_no_document_is_on_both_sides(corpus):
    for kind in ("code", "prose"):
        assert corpus.train[kind]
        assert not set(corpus.train[kind]) & set(corpus.held[kind])


def test_the_side_of_a_source_is_a_fair_draw_from_its_content():
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


def test_an_edit_is_a_passage_said_twice():
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


def test_an_echo_is_words_said_twice():
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


# tokens and rows


def test_the_tokenizer_is_the_same_twice(corpus):
    texts = corpus.train["prose"]
    first, second = (train_tokenizer(texts).backend_tokenizer.to_str() for _ in range(2))
    assert first == second


def test_rows_are_a_function_of_the_step(documents):
    course = quick_version(TARGET).courses[0]
    forward = [Rows(documents).batch(course, step) for step in range(course.steps)]
    rows = Rows(documents)
    for step in reversed(range(course.steps)):
        assert torch.equal(rows.batch(course, step), forward[step])
    assert [tuple(b.shape) for b in forward] == [(4, 65)] * 4 + [(2, 129)] * 2


def test_an_epoch_holds_every_token_once_and_repeats_twice():
    ids = {"a": [np.arange(1, 9, dtype=np.uint16)], "b": [np.arange(11, 20, dtype=np.uint16)]}
    rows = Rows(ids, {"b": 2})
    course = Course((Phase(5, 1, 5),))
    seen = torch.cat([rows.batch(course, step)[:, :-1].flatten() for step in range(5)]).tolist()
    counts = [seen.count(i) for i in range(20)]
    assert sum(counts) == 25  # of 8 + 2 * 9, the last being only predicted
    assert max(counts[1:9]) == 1
    assert max(counts[11:20]) == 2


def test_too_little_text_is_said_so():
    with pytest.raises(ValueError, match="do not fill one batch"):
        Rows({"a": [np.zeros(9, dtype=np.uint16)]}).batch(TARGET.courses[0], 0)


# the loop


class Killed(Rows):
    """Rows of a run that dies when it asks for the sixth batch."""

    def batch(self, course, step):
        if step == 5:
            raise KeyboardInterrupt
        return super().batch(course, step)


def _fit(recipe, rows, work, aim=None):
    model, course = recipe.build(), recipe.courses[0]
    return model, fit(recipe.name, course, rows, work, model, _loss(model, None), compiled=False,
                      checkpoint_every=2, aim=aim)  # fmt: skip


def test_a_killed_run_ends_with_the_weights_of_one_that_was_not(documents, tmp_path):
    recipe = quick_version(TARGET, steps=6)
    whole, losses = _fit(recipe, Rows(documents), tmp_path / "a")
    with pytest.raises(KeyboardInterrupt):
        _fit(recipe, Killed(documents), tmp_path / "b")
    (left,) = (tmp_path / "b").iterdir()
    assert len(torch.load(left, weights_only=True)["losses"]) == 4
    resumed, again = _fit(recipe, Rows(documents), tmp_path / "b")
    assert again == losses
    for name, weight in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], weight), name


def test_another_recipe_or_text_does_not_go_on_from_a_checkpoint(documents, tmp_path):
    recipe = quick_version(TARGET, steps=2)
    _fit(recipe, Rows(documents), tmp_path)
    _fit(replace(recipe, seed=7), Rows(documents), tmp_path)
    _fit(recipe, Rows(documents, {"code": 2}), tmp_path)
    _fit(recipe, Rows(documents), tmp_path, aim="another teacher")
    _fit(recipe, Rows(documents), tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


def test_what_one_target_continued_is_not_taken_for_what_another_did(documents, tmp_path):
    one, other = (quick_version(replace(TARGET, seed=seed)).build().eval() for seed in (0, 1))
    given = documents["code"]
    found = continued_once(one, given, 2, tmp_path)
    assert not np.array_equal(found, continued_once(one, given[1:], 2, tmp_path))
    other.model.embed_tokens.weight.data.copy_(one.model.embed_tokens.weight)
    assert not np.array_equal(found, continued_once(other, given, 2, tmp_path))
    assert np.array_equal(found, continued_once(one, given, 2, tmp_path))
    assert len(list(tmp_path.iterdir())) == 3


def test_a_pupil_that_is_its_teacher_has_the_entropy_as_loss_and_nothing_to_learn(documents):
    teacher, pupil = quick_version(TARGET).build(), quick_version(TARGET).build()
    teacher.requires_grad_(False)
    batch = Rows(documents).batch(quick_version(TARGET).courses[0], 0)
    loss = _loss(pupil, teacher)(batch)
    loss.backward()
    law = teacher(input_ids=batch[:, :-1]).logits.softmax(-1)
    assert loss.item() == pytest.approx(-(law * law.log()).sum(-1).mean().item(), abs=1e-3)
    assert max(weight.grad.abs().max() for weight in pupil.parameters()) < 1e-4
    of_text = _loss(pupil, None)(batch)
    of_text.backward()
    assert max(weight.grad.abs().max() for weight in pupil.parameters()) > 1e-3


def test_a_model_overlaps_fully_with_itself(documents):
    model = quick_version(TARGET).build().eval()
    figures = measure(model, documents, model, tokens=256, length=64)
    assert set(figures) == set(documents)
    for values in figures.values():
        assert values["agreement"] == 1.0
        assert values["overlap"] == pytest.approx(1.0, abs=1e-4)
        assert values["loss"] == pytest.approx(np.log(VOCABULARY), abs=0.2)


def test_figures_of_a_kind_do_not_depend_on_a_short_one_before_it(documents):
    model = quick_version(TARGET).build().eval()
    code = {"code": documents["code"]}
    brief = {"brief": [np.arange(1, 9, dtype=np.int32)]}
    alone, behind = (measure(model, d, tokens=256, length=64) for d in (code, brief | code))
    assert behind["code"] == alone["code"]


def test_the_target_continues_what_it_is_given(documents):
    model = quick_version(TARGET).build().eval()
    given = documents["code"]
    texts = continued(model, given, count=3, given=8, new=5)
    assert [len(text) for text in texts] == [14] * 3
    assert all(text[-1] == END for text in texts)
    starts = {tuple(document[:8]) for document in given}
    assert all(tuple(text[:8]) in starts for text in texts)
    assert all(
        np.array_equal(a, b)
        for a, b in zip(texts, continued(model, given, count=3, given=8, new=5), strict=True)
    )


@pytest.fixture
def mine(tmp_path):
    """A target that is not of the zoo, in a folder."""
    tokenizer = tiny_tokenizer("def mean(values): return sum(values) / len(values)\n" * 3)
    folder = tmp_path / "mine"
    tiny_llama(0, 3, vocab=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_target_continues_a_text_from_many_places(mine, tmp_path, monkeypatch):
    seen, tokenizer = [], AutoTokenizer.from_pretrained(mine)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(5)
    tokenizer.save_pretrained(mine)

    def noted(target, documents, *rest):
        seen.extend(documents)
        made = continued_once(target, documents, *rest)
        assert all(document[-1] == tokenizer.eos_token_id != END for document in made)
        return made

    monkeypatch.setattr(heads, "continued_once", noted)
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i} says {i * i}\n" for i in range(2000)))
    train_heads("medusa", mine, tmp_path / "out", tmp_path / "work", quick=True, text=text)
    starts = {tuple(document[:GIVEN]) for document in seen if len(document) > GIVEN}
    assert len(starts) > 10


def test_a_tokenizer_without_an_end_of_text_is_said_so(mine):
    tokenizer = AutoTokenizer.from_pretrained(mine)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(mine)
    with pytest.raises(UserError, match="has no end of text"):
        train_heads("medusa", mine, quick=True)


def test_steps_go_on_from_one_course_to_the_next(mine, tmp_path):
    text, steps = tmp_path / "text.txt", []
    text.write_text("".join(f"line {i} says {i * i}\n" for i in range(2000)))
    train_heads("medusa", mine, tmp_path / "out", tmp_path / "work", quick=True, text=text,
                watch=lambda step, figures: steps.append(step))  # fmt: skip
    first, second = (course.steps for course in RECIPES_OF_HEADS["medusa"].quick().courses)
    assert steps == [first, first + second, first + second]


@pytest.mark.parametrize("size", [0, 10, 1000, PIECE + 10])
def test_a_text_too_short_to_learn_from_is_said_so(mine, tmp_path, size):
    text = tmp_path / "text.txt"
    text.write_text("abc\n" * (size // 4))
    with pytest.raises(UserError, match=r"text\.txt is too short to learn from"):
        train_heads("medusa", mine, tmp_path / "out", tmp_path / "work", quick=True, text=text)


@pytest.mark.parametrize("line", [1, 60, 3 * PIECE])
def test_a_text_is_cut_at_ends_of_lines_and_nothing_is_lost(line):
    text = ("x" * line + "\n") * (5 * PIECE // line + 2) + "the end"
    parts = cut(text)
    assert "".join(parts) == text
    assert all(PIECE // 2 <= len(part) <= PIECE + 1 for part in parts[:-1])
    if line < PIECE // 2:
        assert all(part.endswith("\n") for part in parts[:-1])


def test_a_quick_training_makes_a_whole_shelf(tmp_path):
    made = train_zoo(["target-10m", "sibling-1m"], tmp_path / "out", tmp_path / "w", quick=True)
    assert [folder.name for folder in made] == ["target-10m", "sibling-1m"]
    found = shelf.models(tmp_path / "out")
    assert [(model.name, model.role, model.target) for model in found] == [
        ("target-10m", "target", None),
        ("sibling-1m", "draft", "target-10m"),
    ]
    AutoModelForCausalLM.from_pretrained(found[1].path)
    assert not list((tmp_path / "out").glob(".*"))


def test_bad_requests_are_one_clear_line(tmp_path):
    with pytest.raises(UserError, match="no recipe for 'target-9m': the zoo trains target-10m"):
        train_zoo(["target-9m"], tmp_path, tmp_path)
    with pytest.raises(UserError, match="cannot train on 'warp'"):
        train_zoo(["random-tiny"], tmp_path, tmp_path, device="warp")
    with pytest.raises(UserError, match="cannot train on 'warp'"):
        train_heads("medusa", shelf.find("target-10m"), device="warp")
    with pytest.raises(UserError, match=r"no target-10m in .*: train it first"):
        train_zoo(["sibling-1m"], tmp_path, tmp_path, quick=True)


# the shelf


def test_the_shelf_lists_and_finds_what_ships():
    assert [model.name for model in shelf.models(shelf.shipped())] == [
        *NAMES[:-1],
        *HEADS,
        NAMES[-1],
    ]
    assert shelf.find("sibling-3m") == shelf.shipped() / "sibling-3m"
    assert [model.name for model in shelf.drafts_for("target-10m")] == NAMES[2:4]
    assert shelf.default_draft("target-10m").name == "sibling-3m"
    assert shelf.default_draft("target-10m", "medusa").name == "target-10m-medusa"
    assert shelf.default_draft("target-10m", "eagle").name == "target-10m-eagle3"


def test_an_unknown_name_gets_the_known_ones_and_a_hint(tmp_path):
    with pytest.raises(UserError, match=r"did you mean 'sibling-3m'\? \(there are target-10m, "):
        shelf.find("siblng-3m")
    with pytest.raises(UserError, match=r"no zoo model 'target-10m': no folder in .* zoo\.json"):
        shelf.find("target-10m", tmp_path)
    with pytest.raises(UserError, match="no draft model for 'random-tiny'"):
        shelf.default_draft("random-tiny")
    with pytest.raises(UserError, match="no medusa heads for 'random-tiny'; name one as medusa:"):
        shelf.default_draft("random-tiny", "medusa")


def test_installed_package_says_how_to_get_the_zoo(tmp_path, monkeypatch):
    shipped = shelf.shipped()
    monkeypatch.setattr(shelf, "CHECKOUT", None)
    monkeypatch.setenv("SPECEXP_MLRUNS", str(tmp_path))
    assert (shelf.shipped(), shelf.models()) == (None, [])
    with pytest.raises(UserError, match=r"'target-10m' here: .*clone.* SPECEXP_ZOO"):
        shelf.find("target-10m")
    with pytest.raises(UserError, match="clone of the repository"):
        shelf.making()
    monkeypatch.setenv("SPECEXP_ZOO", str(shipped))
    assert shelf.find("target-10m") == shipped / "target-10m"
    for folder, reason in ((str(tmp_path), "no folder has a zoo.json"), ("zoo", "the whole path")):
        monkeypatch.setenv("SPECEXP_ZOO", folder)
        with pytest.raises(UserError, match=reason):
            shelf.models()
    monkeypatch.delenv("SPECEXP_MLRUNS")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert shelf.store() == tmp_path / "specexp" / "mlruns"


@pytest.mark.parametrize("moves", [1, 2, 3])
def test_while_twins_are_replaced_there_is_no_target(tmp_path, monkeypatch, moves):
    """The old target and draft go away, then the draft and the target come."""
    monkeypatch.setitem(twins.SHAPES, "Tiny", twins.Shape(2, 64, 176, 4, 2, draft=1, rows=4224))
    twins.make("Tiny", damp=0.1, out=tmp_path)
    move, moved = Path.replace, []

    def killed(path, to):
        if len(moved) == moves:
            raise KeyboardInterrupt
        moved.append(move(path, to))

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        twins.make("Tiny", damp=0.2, out=tmp_path, force=True)
    assert not (tmp_path / "twin-tiny-target").exists()


# the weights that ship


def test_the_zoo_is_small_and_its_weights_are_safetensors():
    files = [path for path in shelf.shipped().rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 44_600_000
    assert {path.suffix for path in files} == {".json", ".md", ".safetensors"}


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_model_is_what_its_card_says(name, zoo):
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

    card = (folder / "README.md").read_text()
    assert card == cards.card(facts)
    assert f"{facts['parameters']:,} parameters" in card
    assert ("The training text comes with Python" in card) == bool(facts["trained"])
    for section in ("## Use", "## Training", "## Held-out text", "## Reproduction", "## Licence"):
        assert section in card
    if facts["trained"]:
        corpus = facts["trained"]["corpus"]
        assert f"Python {corpus['python']}" in card
        for parts in corpus["parts"].values():
            for part in parts.values():
                assert len(part["sha256"]) == 64
                assert part["sha256"][:16] in card


def test_the_shipped_tokenizer_gives_any_text_back(tokenizer):
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


def test_on_records_never_seen_the_drafts_follow_the_target_and_the_control_does_not(
    zoo, tokenizer
):
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


def test_the_target_copies(zoo, tokenizer):
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
            guesses = zoo["target-10m"](ids).logits[0, :-1].argmax(-1)
        right = (guesses == ids[0, 1:]).tolist()
        first += right[: start - 1]
        second += right[change - 1 :]
    assert np.mean(second) > 0.85
    assert np.mean(second) > np.mean(first) + 0.2


@pytest.mark.parametrize("name", HEADS)
def test_shipped_heads_are_what_their_card_says_and_guess(name):
    facts = json.loads((shelf.find(name) / "zoo.json").read_text())
    method = {"eagle3": "eagle"}.get(facts["role"], facts["role"])
    pairing = load("target-10m", method, gamma=3)
    own = pairing.engine.drafter.heads if method == "medusa" else pairing.engine.drafter.net
    assert sum(p.numel() for p in own.parameters()) == facts["parameters"]
    assert (shelf.find(name) / "README.md").read_text() == cards.card_of_heads(facts)
    made = pairing.generate(["def mean(values):\n", "total = 0\nfor i in range(10):\n"], 40)
    assert made.trace.acceptance.length > {"medusa": 1.3, "eagle": 2.2}[method]


def test_the_exit_target_speaks_after_its_first_layers():
    plain = load("target-exit-1m", "early_exit:2", gamma=3)
    assert plain.generate(["def mean(values):\n"], 40).trace.acceptance.rate > 0.4
