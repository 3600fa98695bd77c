"""The rules of the house over the files git tracks; each checker is shown what breaks its rule."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.processes import HEAVY

ROOT = Path(__file__).parents[1]
TOP = {"notebooks", "specexp", "data", "tests", "mlruns", "environment.yml", "pyproject.toml"}
TOP |= {"constraints.txt", "Makefile", "README.md", "LOG.md", "LICENSE", ".ci", ".gitignore"}
OPTIONAL = {".gitattributes", "mlruns"}
MACHINE_PATH = re.compile(
    rb"(?<![\w.])(?:/(?:home|root|Users|work|tmp|mnt|scratch)/|[A-Z]:\\+Users)"
)


def tracked(pattern: str = "*") -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", pattern], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [path for name in listed.stdout.split("\0")[:-1] if (path := ROOT / name).is_file()]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


MODULES = {name(path): path for path in tracked("specexp/*.py")}
NOTEBOOKS = {name(path): path for path in tracked("notebooks/*.ipynb")}


# rooms, and files of the top level, from the ground up: each imports only from floors below its own
FLOORS = [
    {"errors", "terminal", "objects", "tree", "theory", "trace", "policy", "ops", "fitting"},
    {"sampling", "sequences", "rules", "growth"},
    {"models"},
    {"drafters", "recording"},
    {"rows"},
    {"engine"},
    {"zoo", "tracking", "fast"},
    {"names", "checked", "api"},
    {"serving"},
    {"measure"},
    {"figures", "decision"},
    {"grids"},
    {"commands", "__main__", "__init__"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
SPEEDS = {"fast", "measure.hardware", "measure.costs", "commands"}
UPWARDS = {  # inside a function, when it is called
    ("api", "measure"): "Pairing.compare_with_plain measures",
    ("api", "figures"): "Output and Pairing show themselves in a notebook",
    ("api", "serving"): "load takes a policy by its name",
}
ONLY = {  # who may import these packages
    "mlflow": {"tracking"}, "papermill": {"grids"}, "triton": {"fast"},
    "ctypes": {"fast", "grids.forkserver"},
}  # fmt: skip
WITHOUT = {"figures": {"torch", "transformers"}, "measure.summaries": {"torch"}}


def imports(source: str, package: str = "specexp") -> Iterator[tuple[str, bool]]:
    """Every module that a source imports, and whether inside a function. What is imported for type
    checkers alone does not count."""

    def visit(node: ast.AST, inside: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            yield from ((alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level]
            base = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            yield from ((f"{base}.{alias.name}", inside) for alias in node.names)
        inside = inside or isinstance(node, ast.FunctionDef)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    return visit(ast.parse(source), False)


def dotted(module: str) -> str:
    """specexp/models/lm.py -> models.lm; specexp/models/__init__.py -> models"""
    name = module.removeprefix("specexp/").removesuffix(".py").replace("/", ".")
    return name.removesuffix(".__init__")


def within(name: str, rooms: set[str]) -> bool:
    return any(name == room or name.startswith(f"{room}.") for room in rooms)


def trespasses(module: str, source: str) -> list[str]:
    """What a file of the package imports and must not."""
    name, wrong = dotted(module), []
    package = ".".join(Path(module).parent.parts)
    own = name.split(".")[0]
    for full, inside in imports(source, package):
        top, _, rest = full.partition(".")
        if top != "specexp":
            if top in ONLY and not within(name, ONLY[top]):
                wrong.append(full)
            banned = [WITHOUT[room] for room in WITHOUT if within(name, {room})]
            wrong += [full] * any(top in packages for packages in banned)
            continue
        room = rest.split(".")[0]
        if room not in FLOOR or room == own:
            continue
        if room == "fast" and not within(name, SPEEDS):
            wrong.append(full)
        if FLOOR[room] > FLOOR[own] and not (inside and (own, room) in UPWARDS):
            wrong.append(full)
    return wrong


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_one_way(module: str) -> None:
    assert not trespasses(module, MODULES[module].read_text())


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("engine", "import specexp.measure"),
        ("engine", "from specexp.measure.prompts import load"),
        ("engine", "from specexp import measure"),
        ("engine", "from .measure import prompts"),
        ("engine", "def f():\n    from specexp.measure import prompts"),
        ("engine", "from specexp.fast import cuda_graphs"),
        ("drafters/ngram", "from specexp.engine import Engine"),
        ("models/load", "from specexp.fast.fused import Fused"),
        ("api", "from specexp.measure import comparison"),
        ("serving/server", "import mlflow"),
        ("measure/costs", "import papermill"),
        ("models/lm", "import ctypes"),
        ("figures/pairings", "import torch"),
        ("tracking/runs", "from specexp.grids import identity"),
    ],
)
def test_forbidden_import_is_seen(module: str, source: str) -> None:
    assert trespasses(f"specexp/{module}.py", source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("engine", "from specexp.tree import Tree"),
        ("models/load", "if TYPE_CHECKING:\n    from specexp.engine import Engine"),
        ("api", "def f():\n    from specexp.measure import comparison"),
        ("measure/costs", "from specexp.fast.cpu import build"),
        ("figures/pairings", "from specexp.measure import summaries"),
    ],
)
def test_allowed_import_is_no_trespass(module: str, source: str) -> None:
    assert not trespasses(f"specexp/{module}.py", source)


def test_files_form_no_circle() -> None:
    names = {f"specexp.{dotted(module)}": module for module in MODULES}
    below: dict[str, set[str]] = {}
    for full, module in names.items():
        package = ".".join(Path(module).parent.parts)
        text = MODULES[module].read_text()
        at_once = {name for name, inside in imports(text, package) if not inside}
        below[full] = {n for name in at_once for n in (name, name.rpartition(".")[0]) if n in names}
        below[full].discard(full)
    while leaves := [name for name, others in below.items() if not others & below.keys()]:
        for name in leaves:
            del below[name]
    assert not below


def test_files_folders_and_classes_stay_small() -> None:
    large = [file for file, path in MODULES.items() if len(path.read_text().splitlines()) > 450]
    dunder = {"__init__.py", "__main__.py"}
    folders = Counter(path.parent for path in MODULES.values() if path.name not in dunder)
    most = {ROOT / "specexp": 20, ROOT / "specexp/drafters": 20}  # of drafters a file each
    full = [name(folder) for folder, count in folders.items() if count > most.get(folder, 12)]
    members = [
        f"{module}: {node.name}"
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        and sum(isinstance(part, ast.FunctionDef) for part in node.body) > 20
    ]
    assert (large, full, members) == ([], [], [])


def test_the_command_line_starts_without_anything_heavy() -> None:
    code = "import sys, specexp.commands.app; print(*sys.modules, sep='\\n')"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = set(run.stdout.split())
    assert "specexp.commands.app" in loaded
    assert not loaded & HEAVY


def faults(notebook: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a committed notebook."""
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    tags = [tag for cell in notebook["cells"] for tag in cell["metadata"].get("tags", [])]
    prose = ("".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "markdown")
    for name in re.findall(r"sibling-\w+|target-\w+|smollm\w*", next(prose, "")):
        yield f"{name} is named in prose that reports of other models print"
    if tags.count("parameters") != 1:
        yield f"{tags.count('parameters')} cells tagged parameters"
    if len(code) > 14:
        yield f"{len(code)} code cells"
    for number, cell in enumerate(code):
        lines = "".join(cell["source"]).split("\n")
        if cell["outputs"] or cell["execution_count"] is not None:
            yield f"code cell {number} was committed with its outputs or count"
        if len(lines) > (20 if "parameters" in cell["metadata"].get("tags", []) else 14):
            yield f"code cell {number} has {len(lines)} lines"
        for line in lines:
            if re.match(r"(async\s+)?(def|class|for|while)\s", line):
                yield f"code cell {number}: {line}"


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_a_notebook_is_committed_clean_and_short(notebook: str) -> None:
    assert not list(faults(json.loads(NOTEBOOKS[notebook].read_text(encoding="utf-8"))))


def cell(source: str = "x = 1", tags: tuple[str, ...] = (), **more: object) -> dict[str, object]:
    return {
        "cell_type": "code",
        "metadata": {"tags": list(tags)},
        "source": source.splitlines(keepends=True),
        "outputs": [],
        "execution_count": None,
    } | more


@pytest.mark.parametrize(
    ("cells", "fault"),
    [
        ([], "0 cells tagged"),
        ([cell(tags=("parameters",))], "2 cells tagged"),
        ([cell()] * 14, "15 code cells"),
        ([cell("x\n" * 14)], "15 lines"),
        ([cell(outputs=[{}])], "outputs"),
        ([cell(execution_count=3)], "outputs or count"),
        ([cell("def f(x):\n    return x")], "def f"),
        ([cell("x = 1\nfor gamma in gammas:\n    run(gamma)")], "for gamma"),
        ([cell("while True:\n    pass")], "while True"),
        ([cell("`sibling-3m` is high", cell_type="markdown")], "sibling-3m is named"),
    ],
)
def test_a_fault_of_a_notebook_is_seen(cells: list[dict[str, object]], fault: str) -> None:
    first = [] if fault == "0 cells tagged" else [cell(tags=("parameters",))]
    assert any(fault in found for found in faults({"cells": first + cells}))


def test_a_good_notebook_has_no_fault() -> None:
    text = {"cell_type": "markdown", "metadata": {}, "source": ["for a reader\n"] * 30}
    good = [text, cell(tags=("parameters",)), cell("[run(g) for g in gammas]")]
    assert not list(faults({"cells": good}))


def pins() -> dict[str, str]:
    """constraints.txt: canonical name -> version."""
    lines = (ROOT / "constraints.txt").read_text().split()
    return {canonicalize_name(k): v for k, v in (line.split("==") for line in lines)}


def requirements(*extras: str) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    more = [line for extra in extras for line in project["optional-dependencies"][extra]]
    return [Requirement(line) for line in project["dependencies"] + more]


def test_every_requirement_is_pinned_to_a_version_it_allows() -> None:
    pinned = pins()
    for requirement in requirements("lab", "dev", "ray"):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is not in constraints.txt"
        assert requirement.specifier.contains(version), f"{requirement} excludes {version}"


def test_the_conda_environment_is_the_same_pins() -> None:
    listed = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    pip = next(entry["pip"] for entry in listed if isinstance(entry, dict))
    lines = [Requirement(line) for line in pip if not line.startswith("-")]
    pinned = pins()
    for line in lines:
        assert str(line.specifier) == f"=={pinned[canonicalize_name(line.name)]}", str(line)
    missing = {canonicalize_name(r.name) for r in requirements("lab", "dev", "ray")}
    assert not missing - {canonicalize_name(line.name) for line in lines}


def test_the_conda_python_is_one_that_the_project_allows() -> None:
    listed = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    python = next(entry for entry in listed if str(entry).startswith("python="))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    allowed = Requirement(f"python{project['requires-python']}").specifier
    assert allowed.contains(python.split("=")[-1])


def test_the_top_level_holds_only_what_the_readme_explains() -> None:
    present = {name(path).split("/")[0] for path in tracked()}
    assert not present - TOP - OPTIONAL, "new at the top level"
    assert not TOP - present - OPTIONAL, "missing at the top level"


def test_no_file_names_a_path_of_one_machine() -> None:
    named = {name(path): MACHINE_PATH.search(path.read_bytes()) for path in tracked()}
    assert not {where: found[0] for where, found in named.items() if found}


@pytest.mark.parametrize("folder", ["home", "root", "work", "tmp", "Users"])
def test_a_machine_path_is_seen(folder: str) -> None:
    assert MACHINE_PATH.search(f'open("/{folder}/ada/x.txt")'.encode())
    assert not MACHINE_PATH.search(f"https://example.org/{folder}/x and var/{folder}/y".encode())


def test_only_the_zoo_holds_large_files() -> None:
    large = [name(path) for path in tracked() if path.stat().st_size > 2**20]
    assert not [path for path in large if not path.startswith("data/zoo/")]
