"""Measures a grid's overhead per point: `make overhead`.

Runs a grid of a trivial notebook, which imports what experiments import (torch, transformers,
MLflow), as `specexp grid run` does; before and after it, runs the same notebook with papermill
alone, in one long-lived process. Prints seconds per point and writes them as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import nbformat
import papermill
import yaml
from rich.console import Console
from rich.progress import track as progress

from specexp.grids import points as grid
from specexp.grids import runner
from specexp.tracking import runs

CELLS = [
    "import mlflow\nimport torch\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
    "from specexp import api\nfrom specexp.figures import pairings\n"
    "from specexp.measure import one_pairing\nfrom specexp.tracking import runs\n\n"
    "params = runs.parameters(globals())",
    'runs.log("overhead", params, {"overhead/x": float(x)})',
]


def write_notebook(folder: Path) -> Path:
    """The trivial experiment: parameters, imports, one logged metric."""
    parameters = nbformat.v4.new_code_cell("x: int = 0  # a number")
    parameters.metadata["tags"] = ["parameters"]
    cells = [parameters, *map(nbformat.v4.new_code_cell, CELLS)]
    path = folder / "trivial.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


def by_papermill(notebook: Path, folder: Path, points: int, first: int) -> list[float]:
    """Seconds per point with papermill alone."""
    took = []
    for x in progress(range(first, first + points), description="papermill alone"):
        attempt = folder / f"plain-{x}"
        attempt.mkdir()
        os.environ["SPECEXP_ATTEMPT"] = str(attempt)
        begin = time.perf_counter()
        papermill.execute_notebook(
            str(notebook), str(attempt / "out.ipynb"), {"x": x}, kernel_name="python3",
            language="python", progress_bar=False,
        )  # fmt: skip
        took.append(time.perf_counter() - begin)
    del os.environ["SPECEXP_ATTEMPT"]
    return took


def by_specexp(notebook: Path, folder: Path, points: int, forked: bool) -> float:
    """Seconds for a grid of this many points, start-up included."""
    file = folder / "grid.yaml"
    file.write_text(yaml.safe_dump({"notebook": notebook.name, "grid": {"x": list(range(points))}}))
    os.environ["SPECEXP_MLRUNS"] = str(folder / ("forked" if forked else "fresh"))
    runs.initialise()
    todo = grid.load([file])
    begin = time.perf_counter()
    assert runner.run(todo, Console(quiet=True), forked=forked) == runner.DONE
    return time.perf_counter() - begin


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--points", type=int, default=100)
    options.add_argument("--beside", type=int, default=10, help="points of the two slower ways")
    options.add_argument("--out", type=Path, default=Path("data/measurements/grid_overhead.json"))
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        notebook = write_notebook(folder)
        plain = by_papermill(notebook, folder, asked.beside, 0)
        forked = by_specexp(notebook, folder, asked.points, forked=True)
        plain += by_papermill(notebook, folder, asked.beside, asked.beside)
        fresh = by_specexp(notebook, folder, asked.beside, forked=False)
    figures = {
        "points": asked.points,
        "forked_s_per_point": round(forked / asked.points, 3),
        "fresh_s_per_point": round(fresh / asked.beside, 3),
        "papermill_s_per_point": round(statistics.median(plain), 3),
        "papermill_points": len(plain),
        "load": os.getloadavg()[0],
        "cores": os.cpu_count(),
    }
    asked.out.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
