"""What `make gpu` runs starts on a machine that has torch and little else, from a bare copy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What such a machine may lack, this package's own installation among it.
SITE = """
import sys
from importlib.machinery import PathFinder

GONE = {"specexp", "mlflow", "mlflow-skinny", "papermill", "nbformat", "nbclient", "nbconvert",
        "ipykernel", "jupyter_client", "jupyterlab", "ipywidgets", "hypothesis", "pytest_timeout"}

class Bare:
    @staticmethod
    def find_spec(name, path=None, target=None):
        gone = name.split(".")[0] in GONE - {"specexp"}
        return None if gone else PathFinder.find_spec(name, path, target)

    @staticmethod
    def find_distributions(*args, **kwargs):
        for found in PathFinder.find_distributions(*args, **kwargs):
            if (found.metadata["Name"] or "").replace("-", "_") not in GONE:
                yield found

sys.meta_path[sys.meta_path.index(PathFinder)] = Bare
"""


@pytest.fixture
def bare(tmp_path):
    """bare("-m", "pytest", ...) -> (exit code, what it said), by a Python that lacks all that."""
    (tmp_path / "sitecustomize.py").write_text(SITE)
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(tmp_path)])
    more = {"PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "GIT_DIR": os.devnull,
            "SPECEXP_MLRUNS": str(tmp_path / "mlruns")}  # fmt: skip

    def run(*args: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, *args], cwd=ROOT, env=os.environ | more, capture_output=True,
            text=True, timeout=300, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.mark.slow
@pytest.mark.parametrize("room", ["fast", ""])
def test_collection_names_the_tests_left_out(bare, room):
    some = ("-k", "test_gpu or test_fused_pass_matches", "-p", "no:cacheprovider")
    code, said = bare("-m", "pytest", "--collect-only", *some, f"tests/{room}")
    assert code == 0, said
    assert "test_gpu.py::test_greedy_text_is_that_of_the_cpu" in said
    assert "test_fused.py::test_fused_pass_matches" in said
    wants = {
        "core/test_tree.py": "hypothesis",
        "grids/test_grid_files.py": "hypothesis",
        "grids/test_kernels.py": "nbformat",
        "test_house.py": "a git checkout",
    }
    for file, missed in wants.items():
        [line] = [x for x in said.splitlines() if x.startswith(f"left out, for want of {missed}: ")]
        assert file in line
        assert "test_gpu.py" not in line


def test_stages_need_no_command_line(bare):
    without = "import sys; sys.modules['typer'] = None; from support import gpu_stages as stages"
    code, said = bare("-c", f"{without}; stages.main(['--help'])")
    assert code == 0, said
    assert "smoke,exactness,kernels" in said


@pytest.mark.slow
def test_bench_runs_on_a_bare_machine(bare, tmp_path):
    few = ("--gamma", "2", "--repeats", "1", "--max-new-tokens", "4", "--device", "cpu")
    code, said = bare("-m", "specexp", "bench", "round", *few, "--out", str(tmp_path))
    assert code == 0, said
    [file] = tmp_path.glob("bench_*_float32_target-10m.json")
    assert f"kept in {file}" in said


def test_doctor_names_what_is_missing(bare):
    without = "from specexp.commands import app, doctor; doctor.speeds = lambda device: ''"
    code, said = bare("-c", f"import sys; sys.argv = ['specexp', 'doctor']; {without}; app.main()")
    assert code == 1
    for package in ("mlflow", "papermill"):
        assert f"missing {package}: pip install {package}" in said
    assert "missing torch" not in said
