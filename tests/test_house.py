"""The rules of the house over the files git tracks; each checker is shown what breaks its rule."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
TOP = {"notebooks", "specexp", "data", "tests", "mlruns", "environment.yml", "pyproject.toml"}
TOP |= {"constraints.txt", "Makefile", "README.md", "LOG.md", "LICENSE", ".ci", ".gitignore"}
OPTIONAL = {".gitattributes", "mlruns"}
LAB_ONLY = {"mlflow", "papermill", "pandas", "matplotlib", "seaborn"}
HEAVY = LAB_ONLY | {"torch", "transformers", "scipy", "specexp.lab", "specexp.zoo"}
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


def imported(source: str, package: str = "specexp") -> set[str]:
    """Every module a source imports, at any depth of nesting, with its parents."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level]
            base = ".".join([*(above if node.level else []), *filter(None, [node.module])])
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return {".".join(full.split(".")[:n]) for full in found for n in range(1, full.count(".") + 2)}


def forbidden(module: str) -> set[str]:
    """What a file of the package must not import: imports run one way."""
    if module == "specexp/cli.py":
        return LAB_ONLY
    if module.startswith("specexp/lab/"):
        return set()
    if module.startswith("specexp/zoo/"):
        return LAB_ONLY | {"specexp.lab"}
    above = {"specexp.lab", "specexp.zoo", "specexp.commands.app"}
    if module.startswith("specexp/serving/"):
        return LAB_ONLY | above
    return LAB_ONLY | above | {"specexp.serving"}


def test_there_are_files_to_check() -> None:
    assert len(MODULES) > 10
    assert len(NOTEBOOKS) >= 4


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_one_way(module: str) -> None:
    package = ".".join(Path(module).parent.parts)
    assert not imported(MODULES[module].read_text(), package) & forbidden(module)


@pytest.mark.parametrize(
    "source",
    [
        "import specexp.lab",
        "from specexp.measure.prompts import load",
        "from specexp import lab",
        "from .lab import prompts",
        "from . import lab",
        "def f():\n    import pandas as pd",
        "from matplotlib.pyplot import plot",
    ],
)
def test_a_forbidden_import_is_seen(source: str) -> None:
    assert imported(source) & forbidden("specexp/engine.py")


def test_only_what_stands_on_serving_imports_it() -> None:
    serving = imported("from specexp.serving import cost_table")
    assert serving & forbidden("specexp/policy.py")
    assert not serving & forbidden("specexp/lab/load.py")
    assert imported("from specexp.lab import maps") & forbidden("specexp/serving/cost_table.py")


def test_relative_imports_are_resolved() -> None:
    assert "specexp.measure.prompts" in imported("from ..lab import prompts", "specexp.drafters")
    assert not imported("from .tree import Tree") & forbidden("specexp/engine.py")


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
