"""Identities: a result's key changes with what its numbers can depend on, and with nothing else."""

import json
import os
import shutil
import subprocess
import sys
import time
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from conftest import TRIVIAL, also, one_in
from safetensors.torch import load_file

from specexp.fast.cpu import build
from specexp.grids import grid_file, identity, imports, notebooks, progress
from specexp.grids import points as grid
from specexp.measure import feasible
from specexp.tracking import provenance, results
from specexp.zoo import known
from specexp.zoo.known import Known

PACKAGE = imports.PACKAGE
NOTEBOOKS = sorted((grid_file.ROOT / "notebooks").glob("*.ipynb"))
MEASURING = [path for path in NOTEBOOKS if path.stem != "90_compare"]
ACCEPTANCE = grid_file.ROOT / "notebooks" / "10_acceptance.ipynb"


# --- which files ---------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A copy of the library's source that may be edited; identities are computed from it."""
    copy = tmp_path / "checkout" / "specexp"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(imports, "PACKAGE", copy)
    return copy


def files(notebook: Path, **params) -> dict[str, str]:
    """The files in the key of a notebook's point: name -> digest."""
    read = notebooks.read(notebook)
    named = imports.named_by({n: p.default for n, p in read.parameters.items()} | params)
    return imports.closure(read.code, notebook.parent, named)


def edit(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write("\n# edited\n" if path.suffix == ".py" else "\n// edited\n")


def write(path: Path, *cells: str) -> Path:
    """A notebook of these code cells, after one with the parameter `name`."""
    sources = ["name: str = 'a'  # of a drafter, a rule ...", *cells]
    saved = [
        {"cell_type": "code", "metadata": {"tags": [] if n else ["parameters"]}, "source": [source]}
        for n, source in enumerate(sources)
    ]
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "cells": saved}))
    return path


@pytest.mark.parametrize("notebook", one_in(5, MEASURING), ids=lambda path: path.stem)
def test_core_file_is_in_every_measuring_key(package, notebook):
    before = files(notebook)
    assert before.keys() >= {f"specexp/{n}.py" for n in ("sampling", "engine", "rules", "tree")}
    edit(package / "sampling.py")
    assert changes(before, files(notebook)) == {"specexp/sampling.py"}


def test_room_without_numbers_is_in_no_key(package):
    before = [files(notebook) for notebook in NOTEBOOKS]
    for room in ("figures", "grids", "tracking", "commands", "zoo"):
        for file in (package / room).rglob("*.py"):
            edit(file)
    assert [files(notebook) for notebook in NOTEBOOKS] == before


def test_drafter_is_only_in_keys_that_name_it(package):
    named = {
        "alone": {"drafter": "ngram", "rivals": []},
        "with an argument": {"drafter": "ngram:4", "rivals": []},
        "as a rival": {"drafter": "sibling-3m", "rivals": ["suffix", "ngram"]},
        "not": {"drafter": "sibling-3m", "rivals": ["recycle"]},
    }
    before = {how: files(ACCEPTANCE, **params) for how, params in named.items()}
    edit(package / "drafters" / "ngram.py")
    after = {how: files(ACCEPTANCE, **params) for how, params in named.items()}
    assert {how for how in named if after[how] != before[how]} == set(named) - {"not"}


@pytest.mark.slow
def test_new_drafter_is_in_no_key_but_its_own(package):
    before = [files(notebook) for notebook in NOTEBOOKS]
    edit(package / "drafters" / "brandnew.py")
    assert [files(notebook) for notebook in NOTEBOOKS] == before
    assert "specexp/drafters/brandnew.py" in files(ACCEPTANCE, drafter="brandnew:3")


def test_drafter_named_in_a_cell_is_in_the_key(tmp_path):
    own = write(tmp_path / "own.ipynb", "import specexp\npair = specexp.load(drafter='eagle')")
    assert "specexp/drafters/eagle.py" in files(own)
    assert "specexp/drafters/medusa.py" not in files(own)
    assert "specexp/drafters/medusa.py" in files(own, name="medusa")


@pytest.mark.parametrize(("behind", "method"), [("eagle", "eagle"), ("sibling-3m", "model")])
def test_drafter_behind_a_lookup_is_in_the_key(tmp_path, behind, method):
    own = write(tmp_path / "own.ipynb", f"specexp.load(drafter='lookup:{behind}')\nimport specexp")
    for counted in (files(own), files(ACCEPTANCE, drafter=f"lookup:{behind}")):
        for name in ("lookup", "suffix", method):
            assert f"specexp/drafters/{name}.py" in counted


def test_kernels_are_in_the_keys_of_their_device(package, monkeypatch):
    with (package / "engine.py").open("a") as engine:
        engine.write("\nfrom specexp import ops\n")
    params, notebook = {"device": "cpu"}, notebooks.read(ACCEPTANCE)
    monkeypatch.setattr(feasible, "sources", lambda *_: [])

    def key() -> dict[str, str]:
        return identity.identity_of(params, notebook, Known(), together=False).parts

    before = key()
    edit(package / "fast" / "cpu" / "passes.cpp")
    assert changes(before, key()) == {"specexp/fast/cpu/passes.cpp"}
    before = key()
    kernels = package / "fast" / "gpu" / "ops.py"
    edit(kernels)
    kernels.with_name("__init__.py").touch()
    assert key() == before
    monkeypatch.setattr(provenance, "device_class", lambda device: "Some GPU")
    assert "specexp/fast/gpu/ops.py" in key()


def test_public_names_stand_for_the_modules_behind_them(package, tmp_path):
    (package / "__init__.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
        "    from specexp import theory\n    from specexp.tree import Tree\n"
    )
    names = {
        "import specexp": {"tree", "theory"},
        "from specexp import Tree": {"tree"},
        "from specexp import theory as t": {"theory"},
        "from specexp.tracking import runs": set(),
    }
    for cell, modules in names.items():
        found = files(write(tmp_path / "own.ipynb", cell))
        assert {n for n in ("tree", "theory") if f"specexp/{n}.py" in found} == modules
    path = write(tmp_path / "own.ipynb", "import specexp")
    assert notebooks.modules_of([path]) == ("specexp.theory", "specexp.tree.Tree")


def test_attribute_of_a_package_is_in_the_key(tmp_path):
    cell = "from specexp import measure as m\nm.statistics.interval([1.0])"
    own = write(tmp_path / "own.ipynb", cell)
    assert "specexp/measure/statistics.py" in files(own)
    assert "specexp/measure/one_pairing.py" not in files(own)


def test_modules_beside_the_notebook_are_in_the_key(tmp_path):
    modules = {
        "helper.py": "import other\nfrom tools import deep",
        "other.py": "def f():\n    import lazy",
        "lazy.py": "",
        "tools/__init__.py": "from . import shallow",
        "tools/shallow.py": "",
        "tools/deep.py": "from .within.far import x\nfrom ..outside import y",
        "tools/within/far.py": "import importlib\nimportlib.import_module('named')",
        "named.py": "this is no python",
        "run.py": "import runs",
        "runs.py": "",
        "unused.py": "",
        "typed.py": "",
    }
    for name, text in modules.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    cell = (
        "%%time\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import typed\n"
        "listed = !ls\nimport json, helper\n%run -i run.py 3"
    )
    own = write(tmp_path / "own.ipynb", cell)
    wanted = modules.keys() - {"unused.py", "typed.py"}
    assert files(own).keys() == wanted
    for name in wanted:
        before = files(own)
        edit(tmp_path / name)
        assert changes(before, files(own)) == {name}


NAMED = {
    "json": ("open('conf.json')", "conf.json"),
    "csv": ("import pandas as pd\npd.read_csv('d.csv')", "d.csv"),
    "text": ("from pathlib import Path\nPath('p.txt').read_text()", "p.txt"),
    "prompts": ("from specexp.measure import prompts\nprompts.load('p.jsonl')", "p.jsonl"),
    "weights": ("import torch\ntorch.load('m.pt')", "m.pt"),
    "file below": ("open('data/d.csv')", "data/d.csv"),
    "file elsewhere": ("open('../other/d.csv')", "../other/d.csv"),
    "file behind a method": ("specexp.load('x', drafter='mine:./m.pt')", "m.pt"),
    "exec": ("exec(open('run.py').read())", "run.py"),
    "runpy": ("import runpy\nrunpy.run_path('run.py')", "run.py"),
    "spec": ("import importlib.util as u\nu.spec_from_file_location('h', 'run.py')", "run.py"),
    "process": ("subprocess.run(['python', 'run.py'])", "run.py"),
    "import by keyword": ("importlib.import_module(name='run')", "run.py"),
    "folder on the path": ("sys.path.append('lib')\nimport inlib", "lib/inlib.py"),
    "folder above on the path": ("sys.path.append('../other')\nimport up", "../other/up.py"),
    "extension": ("import fast", f"fast{EXTENSION_SUFFIXES[0]}"),
    "shell": ("!python run.py --n=3 > out.txt", "run.py"),
    "shell cell": ("%%bash\npython run.py", "run.py"),
    "%run here": ("%run ./run.py", "run.py"),
    "%run without its end": ("%run run", "run.py"),
    "%run above": ("%run -i '../other/up.py' 3", "../other/up.py"),
    "%run of a notebook": ("%run more.ipynb", "more.ipynb"),
    "%load_ext": ("%load_ext run", "run.py"),
    "%time": ("%time import run", "run.py"),
    "%aimport": ("%aimport run", "run.py"),
    "module of a process": ("!python -m run", "run.py"),
    "run_module": ("import runpy\nrunpy.run_module('run')", "run.py"),
    "resolve_name": ("pkgutil.resolve_name('run:x')", "run.py"),
    "import of a text": ("for n in ['run']:\n    importlib.import_module(n)", "run.py"),
    "exec of an import": ("exec('import run')", "run.py"),
    "where types are not checked": ("if not typing.TYPE_CHECKING:\n    import run", "run.py"),
}


@pytest.mark.parametrize("how", NAMED)
def test_file_that_code_names_is_in_the_key_and_fails_a_point_meanwhile(tmp_path, monkeypatch, how):
    cell, name = NAMED[how]
    home = tmp_path / "home"
    for file in {name for _, name in NAMED.values()}:
        (home / file).parent.mkdir(parents=True, exist_ok=True)
        (home / file).write_text("")
    (home / "out.txt").write_text("")
    write(home / "more.ipynb", "1")
    write(home / "own.ipynb", cell)
    before = load(home / "own.yaml", notebook="own.ipynb")
    if name.endswith(".ipynb"):
        write(home / name, "2")
    else:
        (home / name).write_text("x = 1")
    after = load(home / "own.yaml", notebook="own.ipynb")
    assert changes(before.identity.parts, after.identity.parts) == {name}
    assert identity.changed_since(before) == f"{name} changed"
    assert identity.changed_since(after) == ""


def test_data_that_a_point_fetches_fails_it_not_but_code_does(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    write(home / "own.ipynb", "fetch('data.csv'), run('more.py')")
    before = load(home / "own.yaml", notebook="own.ipynb")
    (home / "data.csv").write_text("1")
    assert identity.changed_since(before) == ""
    assert load(home / "own.yaml", notebook="own.ipynb").run_key != before.run_key
    (home / "more.py").write_text("1")
    assert identity.changed_since(before) == "more.py changed"


def test_helper_and_notebook_that_code_names_are_followed(tmp_path):
    for folder in ("lib", "deep"):
        (tmp_path / folder).mkdir()
    (tmp_path / "lib" / "run.py").write_text("import beside\nopen('a.json'), open('b.json')")
    for name in ("lib/beside.py", "lib/a.json", "b.json", "c.json", "d.json", "other.py"):
        (tmp_path / name).write_text("")
    write(tmp_path / "more.ipynb", "import other\nopen('c.json')")
    write(tmp_path / "own.ipynb", "%run lib/run.py\n%run more.ipynb")
    wanted = {"lib/run.py", "lib/beside.py", "lib/a.json", "b.json", "c.json", "more.ipynb"}
    before = files(tmp_path / "own.ipynb")
    assert before.keys() == wanted | {"other.py"}
    saved = json.loads((tmp_path / "more.ipynb").read_text())
    for cell in saved["cells"]:
        cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": ["1\n"]}]
    (tmp_path / "more.ipynb").write_text(json.dumps(saved))
    assert files(tmp_path / "own.ipynb") == before, "running a notebook changes no key"


def test_name_of_a_named_file_is_the_same_wherever_the_checkout_is(tmp_path):
    for home in (tmp_path / "a" / "home", tmp_path / "home"):
        home.mkdir(parents=True)
        (home.parent / "d.csv").write_text("")
        own = write(home / "own.ipynb", "open('../d.csv'), open('/etc/passwd')")
        assert files(own).keys() == {"../d.csv", "/etc/passwd"}


def test_what_code_writes_and_folders_and_the_store_are_in_no_key(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECEXP_MLRUNS", str(tmp_path / "store"))
    for folder in ("data", "store"):
        (tmp_path / folder).mkdir()
    for name in ("a.csv", "b.json", "c.png", "d.txt", "e.txt", "f.py", "data/g", "store/x.json"):
        (tmp_path / name).write_text("")
    cell = (
        "from pathlib import Path\n%%writefile f.py\nOUT = Path('data') / 'a.csv'\nOUT = 'a.csv'\n"
        "frame.to_csv(OUT), json.dump(x, open('b.json', 'w')), figure.savefig(fname='c.png')\n"
        "Path('d.txt').write_text('1'), Path('e.txt').open(mode='a')\n!ls >data/g 2> data/g\n"
        "open('store/x.json'), open('/proc/meminfo'), load('Qwen/Qwen3-8B'), os.listdir('data')"
    )
    assert files(write(tmp_path / "own.ipynb", cell)) == {}
    both = "pd.read_csv('a.csv').to_csv('c.png')"
    assert files(write(tmp_path / "own.ipynb", both)).keys() == {"a.csv"}


@pytest.mark.parametrize(
    "cell",
    [
        "n = int(open('n.txt').read()) + 1\nopen('n.txt', 'w').write(str(n))",
        "F = 'n.txt'\nwith open(F) as f:\n    n = json.load(f)\njson.dump(n, open(F, 'w'))",
        "pd.read_csv('n.txt').to_csv('n.txt')",
        "p = Path('n.txt')\np.write_text(p.read_text() + 'x')",
        "json.dump({**json.load(open('n.txt')), 'n': 1}, open('n.txt', 'w'))",
        "torch.save(torch.load('n.txt') + 1, 'n.txt')",
    ],
)
def test_what_code_reads_and_then_writes_is_in_the_key(tmp_path, cell):
    (tmp_path / "n.txt").write_text("1")
    assert files(write(tmp_path / "own.ipynb", cell)).keys() == {"n.txt"}
    again = "frame.to_csv('n.txt')\npd.read_csv('n.txt')"
    assert files(write(tmp_path / "own.ipynb", again)) == {}


def test_model_that_code_names_is_in_the_key(tmp_path, tiny_folders):
    shutil.copytree(tiny_folders[1], tmp_path / "mine")
    for cell in ("import helper", "specexp.load('./mine+int8')", "load(drafter='eagle:mine')",
                 "load(drafter='lookup:eagle:mine')"):  # fmt: skip
        (tmp_path / "helper.py").write_text("import specexp\nspecexp.load('mine')")
        write(tmp_path / "own.ipynb", cell)
        before = load(tmp_path / "own.yaml", notebook="own.ipynb")
        with (tmp_path / "mine" / "model.safetensors").open("ab") as file:
            file.write(b"1")
        after = load(tmp_path / "own.yaml", notebook="own.ipynb")
        assert changes(before.identity.parts, after.identity.parts) == {"models"}
        assert identity.changed_since(before) == "models changed"


def test_huge_or_unreadable_file_that_code_names_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(imports, "HUGE", 10)
    own = write(tmp_path / "own.ipynb", "open('huge'), open('pipe'), open('locked'), open('x\\0')")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "huge").write_bytes(bytes(11))
    (tmp_path / "locked").write_text("")
    real = imports.digest_of

    def digest(path):
        if path.name != "locked":
            return real(path)
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(imports, "digest_of", digest)
    before = files(own)
    assert before["locked"] == "cannot be read: Permission denied"
    os.utime(tmp_path / "huge", ns=(1, 1))
    assert changes(before, files(own)) == {"huge"}


@pytest.mark.parametrize("name", ["data/new.json", "helpers.json", "mine/config.json"])
def test_named_file_that_appears_is_noticed_whatever_was_known(tmp_path, monkeypatch, name):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for folder in ("home/data", "home/mine"):
        (tmp_path / folder).mkdir(parents=True)
    home = tmp_path / "home"
    (home / "helper.py").write_text("open('helpers.json')")
    cell = "import helper\nopen('data/new.json'), load('mine')"
    read = notebooks.read(write(home / "own.ipynb", cell))
    time.sleep(2 * known.TICK / 1e9)
    before = identity.files_of({}, read, Known(on_disk=True))
    assert list((tmp_path / "cache").rglob("*.json")), "it was kept"
    (home / name).write_text("{}")
    after = identity.files_of({}, read, Known(on_disk=True))
    assert changes(before, after) == {name.removesuffix("/config.json")}


@pytest.mark.parametrize("package", ["bitsandbytes", "compressed-tensors", "optimum-quanto"])
def test_library_of_quantised_weights_is_in_the_key_where_it_is_installed(monkeypatch, package):
    before, real = provenance.machine("cpu", timed=False)["versions"], provenance.version
    assert package not in before
    monkeypatch.setattr(provenance, "version", lambda n: "1.5" if n == package else real(n))
    assert provenance.machine("cpu", timed=False)["versions"] == f"{before}, {package} 1.5"


def test_own_module_on_the_path_is_in_the_key_and_an_installed_one_is_not(tmp_path, monkeypatch):
    (tmp_path / "lib" / "site-packages").mkdir(parents=True)
    (tmp_path / "lib" / "mine.py").write_text("import theirs")
    (tmp_path / "lib" / "site-packages" / "theirs.py").write_text("")
    for folder in ("lib", "lib/site-packages"):
        monkeypatch.syspath_prepend(tmp_path / folder)
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # another test's
    (tmp_path / "notebooks").mkdir()
    own = write(tmp_path / "notebooks" / "own.ipynb", "import mine, theirs, torch")
    assert files(own).keys() == {"mine.py (elsewhere)"}


def test_start_up_code_that_python_comes_with_is_not_in_the_key(tmp_path, monkeypatch):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "sitecustomize.py").write_text("")  # as in Debian
    monkeypatch.syspath_prepend(tmp_path / "lib")
    monkeypatch.delitem(sys.modules, "sitecustomize", raising=False)
    own = write(tmp_path / "own.ipynb", "print(1)")
    assert files(own).keys() == {STARTUP}
    monkeypatch.setattr(imports, "_LIBRARY", tmp_path / "lib")
    assert files(own).keys() == set()


def test_class_named_by_a_parameter_is_in_the_key(tmp_path, monkeypatch):
    own = write(tmp_path / "own.ipynb", "print(1)")
    (tmp_path / "mine.py").write_text("import helper")
    (tmp_path / "helper.py").write_text("")
    assert files(own, name="mine:Echo").keys() == {"mine.py", "helper.py"}
    assert files(own, name="nowhere:Echo").keys() == set()
    elsewhere = tmp_path / "elsewhere" / "drafts"
    elsewhere.mkdir(parents=True)
    (elsewhere / "__init__.py").write_text("from drafts import echo")
    (elsewhere / "echo.py").write_text("import torch")
    monkeypatch.syspath_prepend(elsewhere.parent)
    installed = {"drafts/__init__.py (elsewhere)", "drafts/echo.py (elsewhere)"}
    assert files(own, name="drafts:Echo").keys() == installed
    point = EntryPoint("echo", "drafts:Echo", "specexp.drafters")
    registered = {"drafter": {"echo": point}}
    monkeypatch.setattr(imports.objects, "registered", lambda kind: registered.get(kind, {}))
    assert files(own, name="echo:3").keys() == installed


def test_every_module_that_a_point_loads_is_in_its_key(tiny_folders):
    """The control: what really is imported, in the rooms that count. Kernels import drafters that
    the point does not use, and what reads models prints."""
    code = (
        "import sys, specexp; from specexp import measure; measure.exactness, measure.one_pairing\n"
        "pair = specexp.load(sys.argv[1], drafter='ngram', rule='match', device='cpu')\n"
        "pair.with_(drafter='recycle').generate(['mean'], 4); pair.generate(['mean'], 4)\n"
        "print(*(m.__file__ for n, m in sys.modules.items() if n.startswith('specexp')))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code, tiny_folders[0]],
        cwd=grid_file.ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    names = {Path(file).relative_to(grid_file.ROOT).as_posix() for file in loaded}
    rooms = tuple(f"specexp/{room}/" for room in imports.ROOMS)
    counted = {n for n in names if n.startswith(rooms) or n.count("/") == 1}
    counted -= {"specexp/drafters/suffix.py", "specexp/terminal.py"}
    assert "specexp/drafters/recycle.py" in counted
    key = files(ACCEPTANCE, drafter="ngram", rivals=["recycle"]).keys()
    assert counted - key == set()


@pytest.mark.slow
def test_points_without_checks_have_the_same_keys_and_read_no_model():
    """Each shipped drafter asks for its model before it reads one."""
    file = grid_file.ROOT / "notebooks" / "grids" / "drafters.yaml"
    code = (
        "import sys; from specexp.grids import points\n"
        "print(*(p.run_key for p in points.load(sys.argv[1:], checked=False)))\n"
        "sys.exit('transformers.modeling_utils' in sys.modules)"
    )
    unchecked = subprocess.run(
        [sys.executable, "-c", code, file], capture_output=True, text=True, check=True
    )
    assert unchecked.stdout.split() == [point.run_key for point in grid.load([file])]


# --- what else -----------------------------------------------------------------------------------


def changes(before: dict[str, str], after: dict[str, str]) -> set[str]:
    names = before.keys() | after.keys()
    return {name for name in names if before.get(name) != after.get(name)}


def load(file: Path, **spec) -> grid.Point:
    """The first point of a grid file with these contents."""
    file.write_text(yaml.safe_dump(spec))
    return grid.load([file])[0]


def test_key_is_the_digest_of_the_identity(points):
    [point] = points(x=[1])
    assert point.run_key == identity.digest(point.identity.parts)
    parts = {"params", "notebook", "specexp/__init__.py", *identity.SHOWN}
    assert set(point.identity.parts) == parts - {"kernels", "libraries", "driver"}


def test_only_a_plan_that_will_run_waits_for_a_compiler(tmp_path, monkeypatch):
    called, compiler = tmp_path / "called", tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\ntouch {called}\nexit 1\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    build._loaded.cache_clear()
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump({"notebook": str(ACCEPTANCE), "fixed": {"device": "cpu"}}))
    [plan] = grid.load([file], checked=False, on_disk=True, kernels="as found")
    assert plan.identity.parts["kernels"] == identity.UNCOMPILED
    assert not called.exists()
    [point] = grid.load([file], checked=False, on_disk=True)
    assert called.exists()
    assert point.identity.parts["kernels"] == "not compiled: torch's operations"
    assert changes(point.identity.parts, plan.identity.parts) == {"kernels"}
    assert identity.why_new(plan.identity.parts, point.identity.parts) == identity.UNSURE
    [again] = grid.load([file], checked=False, on_disk=True, kernels="as found")
    assert again == point, "what was compiled is known"
    build._loaded.cache_clear()


def test_saving_or_running_a_notebook_keeps_the_key(tmp_path):
    own, file = tmp_path / "own.ipynb", tmp_path / "own.yaml"
    shutil.copy(TRIVIAL, own)
    before = load(file, notebook="own.ipynb")
    saved = json.loads(own.read_text())
    for cell in saved["cells"]:
        cell |= {"execution_count": 7, "id": "abc", "source": "".join(cell["source"])}
        cell["metadata"]["scrolled"] = True
        cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": ["1\n"]}]
    saved["cells"].insert(0, {"cell_type": "markdown", "source": ["# New words"], "metadata": {}})
    saved["metadata"] = {"kernelspec": {"name": "python3"}}
    own.write_text(json.dumps(saved, indent=2))
    assert load(file, notebook="own.ipynb").run_key == before.run_key
    saved["cells"][-1]["source"] += "\nprint(1)"
    own.write_text(json.dumps(saved))
    after = load(file, notebook="own.ipynb")
    assert changes(before.identity.parts, after.identity.parts) == {"notebook"}


class Case:
    """A grid of one point: a notebook with a helper, prompts, and a draft model in parts; and the
    environment that its key is computed in."""

    def __init__(self, folder: Path, models: tuple[str, str], patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch, self.together = folder, patch, False
        self.write("helper.py", "scale = 1")
        self.write("prompts.jsonl", QUESTION)
        self.write("table.csv", "1")
        self.draft = Path(shutil.copytree(models[1], folder / "draft"))
        whole = self.draft / "model.safetensors"
        shutil.copy(whole, self.draft / "2.safetensors")
        first, second, *rest = load_file(whole)
        third, fourth = "3.safetensors", "4.safetensors"
        self.index(dict.fromkeys(rest, whole.name) | {first: "2.safetensors", second: third})
        for name in (third, fourth):
            shutil.copy(whole, self.draft / name)
        config = json.loads((self.draft / "config.json").read_text())
        self.write("draft/config.json", json.dumps(config | {"transformers_weights": fourth}))
        self.fixed = {
            "target": models[0], "rivals": [str(self.draft)], "drafter": "ngram",
            "prompts": str(folder / "prompts.jsonl"), "max_new_tokens": 4,
            "tables": ["table.csv"], "judge": shutil.copytree(models[1], folder / "judge").name,
        }  # fmt: skip
        self.timed(False)

    def index(self, weight_map: dict[str, str], **more: int) -> None:
        saved = {"weight_map": weight_map, "metadata": more}
        self.write("draft/model.safetensors.index.json", json.dumps(saved))

    def write(self, file: str, text: str) -> None:
        (self.folder / file).parent.mkdir(exist_ok=True)
        (self.folder / file).write_text(text)

    def flip(self, file: str) -> None:
        """Change the last bit of a file."""
        data = (self.folder / file).read_bytes()
        (self.folder / file).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    def timed(self, timed: bool) -> None:
        saved = json.loads(ACCEPTANCE.read_text())
        saved["metadata"]["specexp"] = {"timed": timed}
        saved["cells"].append(saved["cells"][-1] | {"source": "import helper", "id": "new"})
        [cell] = [c for c in saved["cells"] if "parameters" in c["metadata"].get("tags", [])]
        cell["source"] += ["\ntables: list = []  # files", "\njudge: str = ''  # a model"]
        self.write("own.ipynb", json.dumps(saved))

    def point(self) -> grid.Point:
        spec = {"notebook": "own.ipynb", "fixed": self.fixed}
        self.write("own.yaml", yaml.safe_dump(spec))
        return grid.load([self.folder / "own.yaml"], together=self.together, checked=False)[0]

    def env(self, name: str, value: str) -> None:
        self.patch.setenv(name, value)

    def startup(self, file: str) -> None:
        """Put a file on Python's path, before any other of this name."""
        self.write(f"path/{file}", "import torch")
        self.patch.syspath_prepend(self.folder / "path")
        self.patch.delitem(sys.modules, file.removesuffix(".py"), raising=False)

    def fact(self, owner: object, name: str, value: str | int) -> None:
        self.patch.setattr(owner, name, lambda *_: value)


STARTUP = f"sitecustomize.py{imports.ELSEWHERE}"
QUESTION = '{"question_id": 1, "category": "c", "turns": ["mean"]}'
TOKENS = {
    "helper beside the notebook": (lambda c: edit(c.folder / "helper.py"), {"helper.py"}),
    "prompts": (lambda c: c.write("prompts.jsonl", QUESTION + "\n"), {"data"}),
    "file of a parameter of one's own": (lambda c: c.write("table.csv", "2"), {"data"}),
    "model of a parameter of one's own": (
        lambda c: c.flip("judge/model.safetensors"), {"models"},
    ),
    "weights": (lambda c: c.flip("draft/2.safetensors"), {"models"}),
    "index of weights": (lambda c: c.index({"x": "model.safetensors"}), {"models"}),
    "weights that an index has": (lambda c: c.flip("draft/3.safetensors"), {"models"}),
    "weights that config.json has": (lambda c: c.flip("draft/4.safetensors"), {"models"}),
    "generation config": (lambda c: c.write("draft/generation_config.json", "{}"), {"models"}),
    "chat template": (lambda c: edit(c.draft / "chat_template.jinja"), {"models"}),
    "one of several chat templates": (
        lambda c: c.write("draft/additional_chat_templates/rag.jinja", "{{ 1 }}"), {"models"},
    ),
    "USE_HUB_KERNELS": (lambda c: c.env("USE_HUB_KERNELS", "yes"), {"settings"}),
    "threads": (lambda c: c.fact(torch, "get_num_threads", 77), {"threads"}),
    "torch": (lambda c: c.fact(provenance, "version", "9.9"), {"versions"}),
    "ATEN_CPU_CAPABILITY": (
        lambda c: c.fact(torch.backends.cpu, "get_cpu_capability", "DEFAULT"),
        {"instructions", "kernels"},
    ),
    "start-up code of Python": (lambda c: c.startup("sitecustomize.py"), {STARTUP}),
    **{
        name: (lambda c, n=name: c.env(n, "1"), {"settings"})
        for name in ("MKL_CBWR", "OMP_THREAD_LIMIT", "OPENBLAS_NUM_THREADS", "LD_LIBRARY_PATH",
                     "TRITON_F32_DEFAULT", "TORCH_MKLDNN_MATMUL_MIN_DIM",
                     "TRANSFORMERS_SDPA_FORCE_GQA")
    },
    "compiled code": (lambda c: c.flip("library.so"), {"kernels"}),
    "code that does not compile": (lambda c: c.fact(build, "_loaded", None), {"kernels"}),
    "compiler": (lambda c: c.fact(build, "compiler", "g++ -O0"), {"kernels"}),
    **{name: (lambda c, n=name: c.env(n, "off"), {"kernels"}) for name in provenance.SWITCHES},
}  # fmt: skip
ALIKE = (  # to others of them
    "weights that an index has", "one of several chat templates", "OMP_THREAD_LIMIT",
    "OPENBLAS_NUM_THREADS", "LD_LIBRARY_PATH", "TRITON_F32_DEFAULT",
    "TRANSFORMERS_SDPA_FORCE_GQA", *provenance.SWITCHES[1:],
)  # fmt: skip
TIME = {
    "processor": lambda c: c.fact(provenance, "processor", "another"),
    "python": lambda c: c.fact(provenance.platform, "python_version", "3.99"),
    "settings": lambda c: c.env("OMP_PROC_BIND", "true"),
    "together": lambda c: setattr(c, "together", True),
}


@pytest.fixture
def case(tmp_path, tiny_folders, monkeypatch):
    (tmp_path / "library.so").write_bytes(b"1")
    library = SimpleNamespace(files=[tmp_path / "library.so"])
    monkeypatch.setattr(build, "_loaded", lambda: library)
    monkeypatch.setattr(build, "uncompiled", list)
    monkeypatch.setattr(build, "compiler", lambda: "c++")
    for name in (*provenance.SWITCHES, *os.environ):
        if name in provenance.SWITCHES or provenance._counts(name, timed=True):
            monkeypatch.delenv(name, raising=False)
    return Case(tmp_path, tiny_folders, monkeypatch)


@pytest.mark.parametrize("what", [what for what in TOKENS if what not in ALIKE] + also(*ALIKE))
def test_whatever_decides_tokens_changes_the_key_and_fails_a_point_meanwhile(case, what):
    change, parts = TOKENS[what]
    before = case.point()
    assert case.point().run_key == before.run_key
    assert identity.changed_since(before) == ""
    change(case)
    assert changes(before.identity.parts, case.point().identity.parts) == parts
    assert all(part in identity.changed_since(before) for part in parts)


@pytest.mark.parametrize("what", TIME)
def test_what_decides_time_alone_changes_the_keys_of_timed_points(case, what):
    untimed = case.point()
    case.timed(True)
    timed = case.point()
    TIME[what](case)
    assert changes(timed.identity.parts, case.point().identity.parts) == {what}
    case.timed(False)
    assert case.point().run_key == untimed.run_key


def test_device_changes_the_key(case):
    before = case.point().identity.parts
    assert before["device"] == "cpu"
    case.fact(provenance, "device_class", "Some GPU")
    changed = changes(before, case.point().identity.parts)
    others = {name for name in changed if not name.startswith(imports.OF_GPU)}
    assert others == {"device", "instructions", "libraries", "kernels"}


def test_libraries_of_a_gpu_change_its_keys_and_its_driver_those_of_timed_points(case):
    case.fact(provenance, "device_class", "Some GPU")
    for timed in (False, True):
        case.timed(timed)
        before = case.point().identity.parts
        case.fact(provenance, "driver", f"570.{timed}")
        assert changes(before, case.point().identity.parts) == ({"driver"} if timed else set())
        before = case.point().identity.parts
        case.fact(torch.backends.cudnn, "version", 91000 + timed)
        assert changes(before, case.point().identity.parts) == {"libraries"}


@pytest.mark.parametrize(
    "kind", ["UNIX x86_64 Kernel Module ", "UNIX Open Kernel Module for x86_64 "]
)
def test_driver_of_a_gpu_is_read_from_linux(tmp_path, kind):
    (file := tmp_path / "version").write_text(
        f"NVRM version: NVIDIA {kind} 570.124.06  Wed Feb 26 02:02:44 UTC 2025\n"
        "GCC version:  gcc version 12.2.0\n"
    )
    assert provenance.driver(file) == "570.124.06"
    assert provenance.driver(tmp_path / "none") == "unknown"


def test_gpu_is_known_by_its_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU at {device}")
    assert provenance.device_class("auto") == "GPU at cuda"
    assert provenance.device_class("cuda:1") == "GPU at cuda:1"
    assert provenance.device_class("cpu") == "cpu"


@pytest.mark.parametrize(
    ("group", "files", "cores"),
    [
        ("0::/", {"cpu.max": "50000 100000\n"}, 0.5),
        ("0::/a/b", {"a/cpu.max": "25000 100000\n", "a/b/cpu.max": "max 100000\n"}, 0.25),
        (
            "3:memory:/a\n2:cpu,cpuacct:/a",
            {"cpu/a/cpu.cfs_quota_us": "10000\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, 0.1,
        ),
        ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ("0::/", {}, None),
    ],
)  # fmt: skip
def test_quota_of_a_control_group_is_fewer_cores(tmp_path, group, files, cores):
    for name, text in {"../../../proc/self/cgroup": group, **files}.items():
        file = Path(os.path.normpath(tmp_path / "sys/fs/cgroup" / name))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert provenance.cores(tmp_path) == (cores or usable)
    assert f"{provenance.cores():g} cores" in provenance.processor()


def test_any_byte_of_a_large_file_changes_the_key(case, monkeypatch):
    """A merged LoRA changes the middle of a file only."""
    monkeypatch.setattr(known, "LARGE", 100)
    before, weights = case.point(), case.draft / "2.safetensors"
    data, times = weights.read_bytes(), weights.stat()
    for at in (0, len(data) // 2, len(data) - 1):
        weights.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))  # as `cp -p` leaves them
        assert changes(before.identity.parts, case.point().identity.parts) == {"models"}


def test_large_file_is_read_once_by_all_processes(tmp_path, monkeypatch):
    read, real = [], known.file_digest
    monkeypatch.setattr(known, "LARGE", 100)
    monkeypatch.setattr(known, "file_digest", lambda file, how: read.append(1) or real(file, how))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (file := tmp_path / "w").write_bytes(bytes(200))
    time.sleep(2 * known.TICK / 1e9)  # what has just changed is read in any case
    digests = set()
    for _ in range(3):
        digests.add(known.digest_of(file))
        known._digest_of.cache_clear()  # as in another process
    assert (len(digests), len(read)) == (1, 1)
    file.write_bytes(bytes(199) + b"1")
    assert known.digest_of(file) not in digests
    assert len(read) == 2


def test_part_of_a_model_stays_as_it_was(tmp_path):
    """If it must change, all results with models run again."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    (tmp_path / "mine" / "model.safetensors").write_bytes(b"01")
    assert known.facts_of_model(str(tmp_path / "mine"))[0] == ["mine", "d87cd01c66d71b59"]


@pytest.mark.parametrize("name", ["model.safetensors", "medusa_lm_head.pt", "pytorch_model.bin"])
def test_byte_of_weights_changes_the_key_in_any_format(tmp_path, name):
    (tmp_path / name).write_bytes(b"01")
    before = known.facts_of_model(str(tmp_path))[0][1]
    (tmp_path / name).write_bytes(b"02")
    assert known.facts_of_model(str(tmp_path))[0][1] != before


@pytest.mark.parametrize("name", ["bpe.codes", "source.spm", "spiece.model", "vocab.txt", "m.bpe"])
def test_line_of_a_tokenizer_changes_the_key_in_any_format(tmp_path, name):
    (tmp_path / name).write_text("a b")
    before = known.facts_of_model(str(tmp_path))[0][1]
    (tmp_path / name).write_text("a c")
    assert known.facts_of_model(str(tmp_path))[0][1] != before


def test_hub_id_stands_for_its_cached_revision(tmp_path, monkeypatch):
    assert known.facts_of_model("nobody/nothing")[0][1] == "nobody/nothing"
    cached = tmp_path / "snapshots" / "abc123" / "config.json"
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: str(cached))
    assert known.facts_of_model("some/model")[0][1] == "abc123"


@pytest.mark.parametrize("name", ["figures/new.py", "native/new.cpp", "native/new.h"])
def test_library_digest_covers_python_and_compiled_source(tmp_path, monkeypatch, name):
    for folder in ("figures", "native", "native/__pycache__"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(provenance, "PACKAGE", tmp_path)
    before = provenance.code_digest()
    (tmp_path / "native/__pycache__/new.so").write_text("1")
    assert provenance.code_digest() == before
    (tmp_path / name).write_text("1")
    assert provenance.code_digest() != before


def test_library_digest_ignores_what_editors_leave(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "PACKAGE", tmp_path)
    before = provenance.code_digest()
    (tmp_path / ".#run.py").symlink_to("somebody@here.1:2")
    (tmp_path / "run.py").symlink_to("gone.py")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / ".ipynb_checkpoints" / "run-checkpoint.py").write_text("1")
    assert provenance.code_digest() == before


# --- why a point is new --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        ({"versions": "torch 1.0"}, "versions was torch 1.0, is VERSIONS"),
        ({"notebook": "other"}, "notebook changed"),
        ({"specexp/drafters/ngram.py": "other"}, "specexp/drafters/ngram.py changed"),
        (dict.fromkeys("abcd", "other"), "a, b, c and 1 more changed"),
        ({"models": "1"}, "models changed"),
    ],
)
def test_status_says_why_a_point_is_new(store, points, before, reason):
    done, never = points(x=[1, 2])
    reason = reason.replace("VERSIONS", done.identity.parts["versions"])
    record = {"tags": {"notebook": done.notebook.name}, "identity": done.identity.parts | before}
    earlier = store / "results" / "0123456789abcdef"
    earlier.mkdir(parents=True)
    (earlier / results.POINT).write_text(json.dumps(record))
    assert progress.reasons_to_run([done, never]) == {done.run_key: reason}
    assert progress.explain_reruns([done, never]) == [
        f"1 point to run again, old results are kept: {reason}"
    ]
    details = progress.status([done, never]).columns[3].cells
    assert [text.plain for text in details] == [reason, ""]


def test_device_and_threads_are_told_by_their_values():
    before = {"device": "cpu", "threads": "2", "versions": "torch 1", "notebook": "1"}
    now = {"device": "Some GPU", "threads": "1", "versions": "torch 2", "notebook": "1"}
    assert identity.why_new(now, before) == (
        "device was cpu, is Some GPU; threads was 2, is 1; versions was torch 1, is torch 2"
    )
    old = {"device": "cpu", "threads": "2", "engine": "all on"}
    assert identity.why_new(now, old).startswith("made before keys named versions")
