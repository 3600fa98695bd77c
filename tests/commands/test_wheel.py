"""The wheel, installed outside the checkout: it imports, names its version and runs your models."""

import os
import shutil
import site
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import build
import pytest

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def python(*args: str | Path) -> None:
    subprocess.run([sys.executable, "-m", *args], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__", ".*")
    shutil.copytree(ROOT / "specexp", source / "specexp", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    python(build.__name__, "--wheel", "--no-isolation", "--outdir", folder, source)
    [file] = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """installed("specexp", ...) -> stdout, in an environment of its own that holds the wheel and
    sees this one's packages, but not this one's specexp."""
    folder = tmp_path_factory.mktemp("elsewhere")
    venv.create(folder / "env", with_pip=False)
    bin_ = folder / "env" / "bin"
    [packages] = (folder / "env").glob("lib/python*/site-packages")
    (packages / "outer.pth").write_text("\n".join(site.getsitepackages()))
    python("pip", "--python", bin_ / "python", "install", "--no-deps", "--no-index", wheel)
    hidden = ("PYTHONPATH", "SPECEXP_ZOO", "SPECEXP_MLRUNS")
    env = {name: value for name, value in os.environ.items() if name not in hidden}

    def run(program: str, *args: str, check: bool = True) -> str:
        done = subprocess.run(
            [bin_ / program, *args], cwd=folder, env=env, capture_output=True, text=True
        )
        assert not check or not done.returncode, done.stderr
        return done.stdout if check else done.stderr

    return run


def test_wheel_contains_kernel_sources_templates_and_py_typed(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    sources = [*(ROOT / "specexp").rglob("*.cpp"), *(ROOT / "specexp").rglob("*.h")]
    pages = (ROOT / "specexp").rglob("*.html")
    modules = (ROOT / "specexp").rglob("*.py")
    expected = {file.relative_to(ROOT).as_posix() for file in [*sources, *modules, *pages]}
    assert expected | {"specexp/py.typed"} <= set(names)
    assert sources
    assert not [name for name in names if name.startswith(("tests/", "data/", "notebooks/"))]


def test_wheel_imports_and_names_its_version(installed):
    code = "import specexp; print(specexp.__version__, specexp.__file__); print(*specexp.__all__)"
    version, *names = installed("python", "-c", code).splitlines()
    assert version.split()[0] == VERSION
    assert "elsewhere" in version
    assert len(names[0].split()) == 10
    assert installed("specexp", "--version") == f"specexp {VERSION}\n"


def test_models_without_zoo_explains_how_to_get_it(installed):
    assert "SPECEXP_ZOO" in " ".join(installed("specexp", "models").split())
    refused = installed("specexp", "generate", "--prompt", "x", check=False)
    assert "SPECEXP_ZOO" in refused
    assert len(refused.splitlines()) == 1


def test_wheel_generates_with_own_models(installed, tiny_folders):
    target, draft = tiny_folders
    code = (
        f"import specexp; pair = specexp.load({target!r}, {draft!r}, 3); "
        "print(pair.generate('def mean(values):', 8).tokens_per_pass)"
    )
    assert float(installed("python", "-c", code)) >= 1
    options = ("--target", target, "--drafter", draft, "--max-new-tokens", "8", "--prompt", "def")
    assert '"exact"' in installed("specexp", "generate", *options, "--json")
