"""What `grid validate` and `grid status` remember, and when they look again."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from support.processes import HEAVY

from specexp.commands.remembered import remembered
from specexp.grids import points

PARAMETERS = """\
target: str = "target"  # a target
drafter: str = "ngram"  # a drafter
gamma: int = 2  # draft length
prompts: str = "prompts.txt"  # texts
"""


@pytest.fixture
def folder(tmp_path, tiny_folders, monkeypatch):
    """A notebook with a module, a model and prompts beside it, and a grid of it."""
    kind = {"cell_type": "code", "outputs": [], "execution_count": None}
    cells = [
        kind | {"source": PARAMETERS, "metadata": {"tags": ["parameters"]}},
        kind | {"source": "import own; print(target, drafter, gamma, prompts)", "metadata": {}},
    ]
    book = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells}
    home = tmp_path / "home"
    shutil.copytree(tiny_folders[0], home / "target")
    (home / "own.py").write_text("HERE = 1\n")
    (home / "prompts.txt").write_text("one text\n")
    (home / "book.ipynb").write_text(json.dumps(book))
    (home / "g.yaml").write_text("notebook: book.ipynb\ngrid:\n  gamma: [2, 3]\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return home


CHANGES = {
    "grid": lambda home: (home / "g.yaml").write_text("notebook: book.ipynb\nseeds: []\n"),
    "notebook": lambda home: os.utime(home / "book.ipynb", (1, 1)),
    "module": lambda home: (home / "own.py").write_text("HERE = 22\n"),
    "weights": lambda home: os.utime(home / "target" / "model.safetensors", (1, 1)),
    "tokenizer": lambda home: (home / "target" / "chat_template.jinja").write_text("{{ x }}"),
    "prompts": lambda home: (home / "prompts.txt").write_text("another text\n"),
    "name": lambda home: (home / "ngram").mkdir(),  # now the drafter of that name may be a folder
    "environment": lambda home: os.environ.__setitem__("CUDA_VISIBLE_DEVICES", "7"),
}


@pytest.mark.parametrize("change", [None, *CHANGES])
def test_points_are_found_anew_only_when_what_decides_them_has_changed(folder, change, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    asked = []

    def found(checked: bool) -> list[points.Point]:
        def find() -> list[points.Point]:
            asked.append(checked)
            return points.load([folder / "g.yaml"], checked=False)

        return remembered([folder / "g.yaml"], (None, False), checked, find)

    first = found(checked=False)
    assert found(checked=False) == first
    assert found(checked=True) == first  # nobody had checked them
    assert found(checked=False) == found(checked=True) == first
    assert asked == [False, True]
    if change:
        CHANGES[change](folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(points, "load", lambda *_, **__: [])
            assert found(checked=True) == []


def test_what_mlflow_shows_is_looked_up_without_importing_it(filled):
    code = (
        "import sys; from specexp.tracking import presence, results; "
        "folders = results.listed('results'); assert len(folders) == 3; "
        "assert presence.missing(folders) == presence.Missing([], [], []); print(*sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not HEAVY & set(ran.stdout.split())


@pytest.mark.parametrize("command", ["validate", "status"])
def test_a_grid_without_changes_is_listed_without_torch(folder, command):
    code = (
        "import sys; from specexp.commands.app import app; "
        f"app(['grid', '{command}', 'home/g.yaml'], standalone_mode=False); "
        "print(*sys.modules, file=sys.stderr)"
    )
    ran = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert ran[0].stdout == ran[1].stdout
    assert "2 " in ran[0].stdout
    assert "torch" in ran[0].stderr.split()
    assert not HEAVY & set(ran[1].stderr.split())
