"""The shelf: which models there are, which drafts go with which target, and where they stand."""

from pathlib import Path

import pytest

from specexp.errors import UserError
from specexp.zoo import naming, shelf, twins

NAMES = ["target-10m", "target-exit-1m", "sibling-3m", "sibling-1m", "random-tiny"]
HEADS = ["target-10m-medusa", "target-10m-eagle3", "target-10m-dspark"]


def test_shelf_lists_and_finds_shipped_models(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECEXP_MLRUNS", str(tmp_path))
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
    assert shelf.default_draft("target-10m", "dflash").name == "target-10m-dspark"


def test_unknown_model_name_gets_a_hint():
    with pytest.raises(UserError, match=r"did you mean 'sibling-3m'\? \(there are target-10m, "):
        shelf.find("siblng-3m")
    with pytest.raises(UserError, match="no draft model for 'random-tiny'"):
        shelf.default_draft("random-tiny")
    with pytest.raises(UserError, match="no medusa heads for 'random-tiny'; name one as medusa:"):
        shelf.default_draft("random-tiny", "medusa")


def test_draft_that_is_not_there_is_one_command_away():
    """In one line, before anything is loaded; of a target that is not there, too."""
    command = "specexp zoo train --draft --target smollm2 --layers 3"
    with pytest.raises(UserError, match=f"smollm2-draft-3 is not here yet: {command}$"):
        naming.locate("smollm2-draft-3")


def test_installed_package_says_how_to_get_the_zoo(tmp_path, monkeypatch):
    shipped = shelf.shipped()
    monkeypatch.setattr(shelf, "CHECKOUT", None)
    monkeypatch.setenv("SPECEXP_MLRUNS", str(tmp_path))
    assert (shelf.shipped(), shelf.models()) == (None, [])
    with pytest.raises(UserError, match=r"'target-10m' here: .*clone.* SPECEXP_ZOO"):
        shelf.find("target-10m")
    with pytest.raises(UserError, match="clone of the repository"):
        shelf.making("corpus")
    monkeypatch.setenv("SPECEXP_ZOO", str(shipped))
    assert shelf.find("target-10m") == shipped / "target-10m"
    for folder, reason in ((str(tmp_path), "no folder has a zoo.json"), ("zoo", "the whole path")):
        monkeypatch.setenv("SPECEXP_ZOO", folder)
        with pytest.raises(UserError, match=reason):
            shelf.models()
    monkeypatch.delenv("SPECEXP_MLRUNS")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert shelf.store() == tmp_path / "specexp" / "mlruns"
    monkeypatch.setenv("SPECEXP_MLRUNS", "~/runs")  # as a file of settings has it, not a shell
    assert shelf.store() == tmp_path / "runs"


@pytest.mark.parametrize("moves", [0, 1])
def test_no_target_while_twins_are_replaced(tmp_path, monkeypatch, moves):
    """The old target goes away, then the draft comes, then the target."""
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
