"""The algorithm's tests pass on a copy of the package from which `fast/` was deleted."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(3600)
ROOT = Path(__file__).parents[2]
TEXTS = "core/test_engine.py::test_sampled_text_under_match_is_that_of_plain_decoding"
DRAWS = "test_shipped_rules_on_shipped_drafters_follow_their_distributions"
QUICK = [TEXTS, f"measure/test_exactness.py::{DRAWS}"]
FEW = "model or eagle3 or ngram"  # texts of some drafters, draws of one
WHOLE = ["core", "drafters", "serving", "measure/test_exactness.py"]
GRIDS = "tests/drafters/test_own_drafter.py"  # runs one, and only the algorithm does without fast/
GONE = """
import sys

class Gone:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition("specexp.fast")[:2] == ("", "specexp.fast"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Gone)  # an editable installation would find what the copy lacks
"""


def passes_without_fast(folder: Path, tests: list[str], some: str = "") -> str:
    """Run these tests, or some of them, where nothing but references is; returns what pytest said,
    "" if green."""
    spare = shutil.ignore_patterns("fast", "__pycache__")
    shutil.copytree(ROOT / "specexp", folder / "specexp", ignore=spare)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=spare)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder)
    for name in ("data", "notebooks"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "sitecustomize.py").write_text(GONE)
    command = [
        sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", "--ignore", GRIDS,
        "-k", some,
    ]  # fmt: skip
    run = subprocess.run(
        [*command, *(f"tests/{name}" for name in tests)], cwd=folder, text=True,
        env=os.environ | {"PYTHONPATH": str(folder)}, capture_output=True,
    )  # fmt: skip
    return run.stdout[-4000:] + run.stderr[-2000:] if run.returncode else ""


def test_rounds_are_exact_without_fast(tmp_path):
    assert passes_without_fast(tmp_path, QUICK, FEW) == ""


@pytest.mark.slow
def test_whole_algorithm_passes_without_fast(tmp_path):
    assert passes_without_fast(tmp_path, WHOLE) == ""
