"""The training loop, on random models of the zoo's shape, and heads for a target of one's own."""

import shutil
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from making.recipes import TARGET, quick_version
from making.train import loss_of
from specexp.commands import zoo
from specexp.errors import UserError
from specexp.models.load import of_module
from specexp.zoo import train
from specexp.zoo.heads import train_heads
from specexp.zoo.recipes import END, HEADS, Course, Phase
from specexp.zoo.rows import PIECE, batches, cut
from specexp.zoo.train import GIVEN, NEW, continued, fit

# tokens and rows


def test_rows_are_a_function_of_the_step(documents):
    course = quick_version(TARGET).courses[0]
    forward = [*batches(documents, course)]
    for step in range(course.steps):
        assert torch.equal(next(batches(documents, course, step)), forward[step])
    assert [tuple(b.shape) for b in forward] == [(4, 65)] * 4 + [(2, 129)] * 2


def test_epoch_holds_every_token_as_often_as_stated():
    ids = {"a": [np.arange(1, 9, dtype=np.uint16)], "b": [np.arange(11, 20, dtype=np.uint16)]}
    course = Course((Phase(5, 1, 5),), {"b": 2})
    seen = torch.cat([batch[:, :-1].flatten() for batch in batches(ids, course)]).tolist()
    counts = [seen.count(i) for i in range(20)]
    assert sum(counts) == 25  # of 8 + 2 * 9, the last being only predicted
    assert max(counts[1:9]) == 1
    assert max(counts[11:20]) == 2


def test_too_little_text_for_a_batch_is_refused():
    with pytest.raises(ValueError, match="do not fill one batch"):
        next(batches({"a": [np.zeros(9, dtype=np.uint16)]}, TARGET.courses[0]))


# the loop


def _fit(recipe, documents, work, aim=None, watch=len):
    model, courses = recipe.build(), recipe.courses[:1]
    return model, fit(recipe.name, courses, documents, work, model, loss_of(model, None),
                      compiled=False, checkpoint_every=2, aim=aim, watch=watch)  # fmt: skip


def test_resumed_training_has_the_same_weights(documents, tmp_path, monkeypatch):
    recipe, curve, resumed_curve = quick_version(TARGET, steps=6), {}, {}
    whole, losses = _fit(recipe, documents, tmp_path / "a", watch=curve.update)

    def killed(*args):
        yield from islice(batches(*args), 5)
        raise KeyboardInterrupt

    with monkeypatch.context() as first:
        first.setattr(train, "batches", killed)
        with pytest.raises(KeyboardInterrupt):
            _fit(recipe, documents, tmp_path / "b")
    (left,) = (tmp_path / "b").iterdir()
    assert len(torch.load(left, weights_only=True)["losses"]) == 4
    resumed, again = _fit(recipe, documents, tmp_path / "b", watch=resumed_curve.update)
    assert again == losses
    assert resumed_curve == curve
    assert [*curve] == [2, 4, 6, 8, 9]
    for name, weight in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], weight), name


def test_checkpoint_of_another_recipe_or_text_is_ignored(documents, tmp_path):
    recipe = quick_version(TARGET, steps=2)
    more_code = replace(recipe.courses[0], repeats={"code": 2})
    _fit(recipe, documents, tmp_path)
    _fit(replace(recipe, seed=7), documents, tmp_path)
    _fit(replace(recipe, courses=(more_code,)), documents, tmp_path)
    _fit(recipe, documents, tmp_path, aim="another teacher")
    _fit(recipe, documents, tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


def test_continuations_are_of_the_target_and_its_documents(documents, tmp_path):
    one, other = (quick_version(replace(TARGET, seed=seed)).build().eval() for seed in (0, 1))
    given = documents["code"]
    texts = continued(of_module(one), given, 3, tmp_path)
    assert [len(text) for text in texts] == [GIVEN + NEW + 1] * 3
    assert all(text[-1] == END for text in texts)
    assert {tuple(text[:GIVEN]) for text in texts} <= {tuple(text[:GIVEN]) for text in given}
    assert not np.array_equal(texts, continued(of_module(one), documents["prose"], 3, tmp_path))
    other.model.embed_tokens.weight.data.copy_(one.model.embed_tokens.weight)
    assert not np.array_equal(texts, continued(of_module(other), given, 3, tmp_path))
    assert np.array_equal(texts, continued(of_module(one), given, 3, tmp_path))
    assert len(list(tmp_path.iterdir())) == 3


@pytest.fixture
def mine(tiny_folders, tmp_path):
    """A target that is not of the zoo, in a folder."""
    return shutil.copytree(tiny_folders[0], tmp_path / "mine")


def test_heads_train_on_continuations_from_many_places(mine, store, tmp_path, monkeypatch):
    seen, tokenizer = [], AutoTokenizer.from_pretrained(mine)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(5)
    tokenizer.save_pretrained(mine)

    def noted(target, documents, *rest):
        seen.extend(documents)
        made = continued(target, documents, *rest)
        assert all(document[-1] == tokenizer.eos_token_id != END for document in made)
        return made

    monkeypatch.setattr(train, "continued", noted)
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i} says {i * i}\n" for i in range(2000)))
    train_heads("medusa", mine, quick=True, text=text)
    starts = {tuple(document[:GIVEN]) for document in seen if len(document) > GIVEN}
    assert len(starts) > 10


def test_tokenizer_without_end_of_text_is_refused(mine):
    tokenizer = AutoTokenizer.from_pretrained(mine)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(mine)
    with pytest.raises(UserError, match="has no end of text"):
        train_heads("medusa", mine, quick=True)


def test_resumed_training_of_heads_logs_its_whole_curve_once(mine, store, tmp_path, monkeypatch):
    """Killed in its second course; steps are counted across courses."""
    text, learn, taken, logged = tmp_path / "text.txt", train.learn, [], []
    text.write_text("".join(f"line {i} says {i * i}\n" for i in range(2000)))
    first, second = (course.steps for course in HEADS["medusa"].quick().courses)

    def killed(*args):
        if len(taken) == first:
            raise KeyboardInterrupt
        taken.append(learn(*args))
        return taken[-1]

    monkeypatch.setattr("specexp.tracking.runs.log", lambda *args: logged.append(args))
    asked = "medusa", str(mine), None, "cpu", True, text
    monkeypatch.setattr(train, "learn", killed)
    with pytest.raises(KeyboardInterrupt):
        zoo._train_heads(*asked)
    monkeypatch.setattr(train, "learn", learn)
    for _ in range(2):
        zoo._train_heads(*asked)
    [(experiment, params, last, series)] = logged
    assert (experiment, params["text"], params["device"]) == ("heads", str(text), "cpu")
    assert {"training/loss", "accuracy/at_1"} <= series.keys()
    for name, curve in series.items():
        assert [*curve] == [first, first + second]
        assert curve[first + second] == last[name]


@pytest.mark.parametrize("size", [0, 10, 1000, PIECE + 10])
def test_text_too_short_to_learn_from_is_refused(mine, store, tmp_path, size):
    text = tmp_path / "text.txt"
    text.write_text("abc\n" * (size // 4))
    with pytest.raises(UserError, match=r"text\.txt is too short to learn from"):
        train_heads("medusa", mine, quick=True, text=text)


@pytest.mark.parametrize("line", [1, 60, 3 * PIECE])
def test_cut_keeps_all_text_and_ends_at_lines(line):
    text = ("x" * line + "\n") * (5 * PIECE // line + 2) + "the end"
    parts = cut(text)
    assert "".join(parts) == text
    assert all(PIECE // 2 <= len(part) <= PIECE + 1 for part in parts[:-1])
    if line < PIECE // 2:
        assert all(part.endswith("\n") for part in parts[:-1])
