"""What is known of a grid's models, drafters and machine, and when it is asked again."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest
from conftest import also
from support.processes import HEAVY

from specexp import names
from specexp.errors import UserError
from specexp.grids import points
from specexp.measure import feasible
from specexp.zoo import known, shelf
from specexp.zoo.known import Known

PARAMETERS = """\
target: str = "target"  # a target
drafter: str = "ngram"  # a drafter
gamma: int = 2  # draft length
prompts: str = "prompts.txt"  # texts
tree: str = "chain"  # shape
temperature: float = 0.0  # 0 is greedy
seed: int = 0  # a seed
"""
READS = "import own; print(target, drafter, gamma, prompts, tree, temperature, seed)"
GRID = "notebook: book.ipynb\ngrid:\n  gamma: [2, 3]\n"


@pytest.fixture
def folder(tmp_path, tiny_folders, monkeypatch):
    """A notebook with a module, a model and prompts beside it, and a grid of it."""
    kind = {"cell_type": "code", "outputs": [], "execution_count": None}
    cells = [
        kind | {"source": PARAMETERS, "metadata": {"tags": ["parameters"]}},
        kind | {"source": READS, "metadata": {}},
    ]
    book = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells}
    home = tmp_path / "home"
    shutil.copytree(tiny_folders[0], home / "target")
    (home / "own.py").write_text("HERE = 1\n")
    (home / "prompts.txt").write_text("one text\n")
    (home / "book.ipynb").write_text(json.dumps(book))
    (home / "g.yaml").write_text(GRID)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return home


def write(path, text):
    path.write_text(text)


EDITS = {
    "nothing": lambda home: None,
    "gamma": lambda home: write(home / "g.yaml", GRID.replace("3", "9")),
    "seeds": lambda home: write(home / "g.yaml", f"{GRID}seeds: [0, 1]\n"),
    "prompts": lambda home: write(home / "prompts.txt", "another text\n"),
    "sampling": lambda home: write(home / "g.yaml", f"{GRID}  temperature: [0.0, 0.7]\n"),
    "tree": lambda home: write(home / "g.yaml", f"{GRID}fixed:\n  tree: 3x2\n"),
}
CHANGES = {  # and what is asked again
    "module": (lambda home: write(home / "own.py", "HERE = 22\n"), {"files"}),
    "weights": (lambda home: os.utime(home / "target" / "model.safetensors", (1, 1)),
                {"model", "pairing", "target", "tokenizer"}),
    "config": (lambda home: os.utime(home / "target" / "config.json", (1, 1)),
               {"model", "pairing", "target", "tokenizer"}),
    "template": (lambda home: write(home / "target" / "chat_template.jinja", "{{ x }}"),
                 {"model", "pairing", "target", "tokenizer"}),
    "name": (lambda home: (home / "ngram").mkdir(), {"files", "pairing"}),
    "environment": (lambda home: os.environ.__setitem__("CUDA_VISIBLE_DEVICES", "7"), None),
    "package": (lambda home: (home.parent / "site" / "unasked-9.dist-info").mkdir(), None),
    "code": (lambda home: write(home.parent / "code" / "api.py", "pass"), None),
}  # fmt: skip


@pytest.fixture
def asked(folder, monkeypatch):
    """asked(): the grid's points, and what had to be asked to find them."""
    for name in ("site", "code"):
        (folder.parent / name).mkdir()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.syspath_prepend(folder.parent / "site")
    monkeypatch.setattr(known, "PACKAGE", folder.parent / "code")
    ask = known._ask

    def load():
        time.sleep(2 * known.TICK / 1e9)  # what has just changed is asked for in any case
        names = []
        monkeypatch.setattr(known, "_ask", lambda *args: names.append(args[0]) or ask(*args))
        found = points.load([folder / "g.yaml"], on_disk=True)
        return found, {name.rpartition("facts_of_")[2] for name in names}

    return load


@pytest.mark.parametrize("edit", EDITS)
def test_a_grid_is_edited_without_asking_anything_again(folder, asked, edit):
    before, first = asked()
    assert {"files", "machine", "model", "pairing", "target", "tokenizer"} <= first
    EDITS[edit](folder)
    after, again = asked()
    assert not again
    assert after == points.load([folder / "g.yaml"])
    assert (after == before) == (edit == "nothing")


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_asked_again(folder, asked, change):
    _, first = asked()
    make, expected = CHANGES[change]
    make(folder)
    assert asked()[1] == (expected or first)
    assert asked()[1] == set()


def test_files_that_change_while_they_are_read_are_read_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "a"

    def find():
        file.write_text("new")
        return 1, [file]

    monkeypatch.setattr(known, "_ask", lambda *_: find())
    Known(on_disk=True).cached("a")
    assert not list((tmp_path / "cache").rglob("*.json"))


def test_a_cache_that_cannot_be_read_or_written_is_done_without(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    asking = "specexp.names.facts_of_rule", "block"
    assert Known(on_disk=True).cached(*asking)["chains_only"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Known(on_disk=True).cached(*asking)["chains_only"]
    [kept] = tmp_path.rglob("*.json")
    kept.write_text("{")
    assert Known(on_disk=True).cached(*asking)["chains_only"]


TEXTS = ["a", " def mean(values):\n\treturn", "é 日本語 \U0001f600", "<|endoftext|> <s>", "x" * 999]


def test_texts_have_the_tokens_that_their_target_reads(tmp_path, monkeypatch, tiny_folders):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    targets = [model.name for model in shelf.models() if model.role == "target"]
    for target in (*targets, *tiny_folders):
        kept, tokenizer = Known(on_disk=True), names.read_target(target)[2]
        assert feasible._tokenizer(target, kept)
        for text in TEXTS:
            assert feasible._tokens_of(text, target, kept) == len(names.encode(tokenizer, text))
        with pytest.raises(UserError, match="a prompt is empty"):
            feasible._tokens_of("", target, kept)


@pytest.mark.slow
def test_what_mlflow_shows_is_looked_up_without_importing_it(filled):
    code = (
        "import sys; from specexp.tracking import presence, results; "
        "folders = results.listed('results'); assert len(folders) == 3; "
        "gaps = presence.find_gaps({f: presence.shown_as(f) for f in folders}); "
        "assert gaps == presence.Gaps([], [], [], []); print(*sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not HEAVY & set(ran.stdout.split())


@pytest.mark.parametrize(
    ("command", "edits"),
    [("validate", [*EDITS][::2]), *also(("status", [*EDITS][1::2]), ("status", [*EDITS][::2]))],
)
def test_a_grid_is_checked_without_torch_after_an_edit(folder, command, edits):
    code = (
        "import sys; from specexp.commands.app import app; "
        f"app(['grid', '{command}', 'home/g.yaml'], standalone_mode=False); "
        "print(*sys.modules, file=sys.stderr)"
    )

    def ran():
        command = [sys.executable, "-c", code]
        return subprocess.run(command, capture_output=True, text=True, check=True)

    first = ran()
    assert "2 " in first.stdout
    assert ("torch" in first.stderr.split()) == (command == "validate")  # nothing has run yet
    for edit in edits:
        EDITS[edit](folder)
        assert not HEAVY & set(ran().stderr.split())
