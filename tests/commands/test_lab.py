"""JupyterLab works on copies: what is in git stays as it is, and what a user changed is kept."""

import shutil
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from support.command_line import ran

from specexp.commands import lab
from specexp.grids import points as grid

SHIPPED = Path(__file__).parents[2] / "notebooks"


def files(folder: Path) -> dict[Path, bytes]:
    """The files of a folder that a user sees."""
    return {
        path.relative_to(folder): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and lab.ORIGINALS not in path.parts
    }


@pytest.fixture
def shipped(tmp_path):
    folder = tmp_path / "shipped"
    (folder / "grids").mkdir(parents=True)
    for name in ("a.ipynb", "beside.py", "grids/a.yaml", "README.md"):
        (folder / name).write_text(f"{name}, the first")
    return folder


@pytest.fixture
def own(shipped, tmp_path):
    assert lab.copy(shipped, tmp_path / "own") == []
    return tmp_path / "own"


def test_notebooks_grids_and_modules_are_copied(shipped, own):
    assert {name.as_posix() for name in files(own)} == {"a.ipynb", "beside.py", "grids/a.yaml"}


def test_a_changed_copy_stays_and_a_newer_original_is_named(shipped, own):
    (own / "a.ipynb").write_text("mine")
    assert lab.copy(shipped, own) == []
    (shipped / "a.ipynb").write_text("the second")
    assert lab.copy(shipped, own) == lab.copy(shipped, own) == [Path("a.ipynb")]
    assert (own / "a.ipynb").read_text() == "mine"
    (own / "a.ipynb").rename(own / "b.ipynb")
    assert lab.copy(shipped, own) == []
    assert (own / "a.ipynb").read_text() == "the second"
    assert (own / "b.ipynb").read_text() == "mine"


def test_a_copy_that_nobody_changed_is_renewed(shipped, own):
    (shipped / "grids" / "a.yaml").write_text("the second")
    assert lab.copy(shipped, own) == []
    assert (own / "grids" / "a.yaml").read_text() == "the second"


def test_a_copy_of_unknown_origin_stays(shipped, own):
    shutil.rmtree(own / lab.ORIGINALS)
    (own / "beside.py").write_text("mine, of a time without originals")
    assert lab.copy(shipped, own) == [Path("beside.py")]
    assert lab.copy(shipped, own) == [Path("beside.py")]


def test_run_all_and_save_leaves_the_shipped_notebooks_and_runs_modules_beside_it(tmp_path):
    """What JupyterLab does, without a browser: run the copy where it is, and save it there."""
    shipped, own = tmp_path / "shipped", tmp_path / "own"
    shipped.mkdir()
    cells = [nbformat.v4.new_code_cell("import beside\nbeside.value")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), shipped / "a.ipynb")
    (shipped / "beside.py").write_text("value = 7")
    before = files(shipped)
    lab.copy(shipped, own)
    notebook = nbformat.read(own / "a.ipynb", as_version=4)
    NotebookClient(notebook, resources={"metadata": {"path": str(own)}}).execute()
    nbformat.write(notebook, own / "a.ipynb")
    assert notebook.cells[0].outputs[0]["data"]["text/plain"] == "7"
    assert files(shipped) == before
    assert lab.copy(shipped, own) == []


def test_points_of_a_copied_grid_are_those_of_the_shipped_one(tmp_path):
    lab.copy(SHIPPED, tmp_path)
    name = "demo_1_acceptance.yaml"
    copied, original = (grid.load([folder / "grids" / name]) for folder in (tmp_path, SHIPPED))
    assert [p.run_key for p in copied] == [p.run_key for p in original]
    assert {p.notebook.parent for p in copied} == {tmp_path.resolve()}


@pytest.mark.parametrize(("user", "needed"), [(0, ["--allow-root"]), (1000, [])])
def test_the_command_opens_the_copies_with_its_options(user, needed, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("os.geteuid", lambda: user)
    monkeypatch.setenv("SPECEXP_MLRUNS", str(tmp_path))
    started = []
    monkeypatch.setattr("os.execv", lambda program, words: started.append(words))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    code, _, _ = ran(monkeypatch, capsys, "lab", "--no-browser")
    assert code == 0
    [words] = started
    jupyter = [sys.executable, "-m", "jupyterlab"]
    assert words == [*jupyter, *needed, "--no-browser", str(tmp_path / "notebooks")]
    assert (tmp_path / "notebooks" / "00_lesson.ipynb").is_file()
