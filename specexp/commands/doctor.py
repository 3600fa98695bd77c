"""`specexp doctor`: versions, device, speed by dtype, disk, and what is missing."""

import importlib.metadata as metadata
import os
import platform
import shutil
import tomllib

import torch
from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specexp import ops
from specexp.errors import counted
from specexp.measure.hardware.machine import described, doubts, matrices, pass_s
from specexp.models.memory import free_memory
from specexp.tracking import results
from specexp.tracking.provenance import version
from specexp.zoo import shelf

SHOWN = ("specexp", "torch", "transformers", "mlflow", "papermill", "jupyterlab")


def examine(console: Console) -> bool:
    """Print the report; False if something that every run needs is missing."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = Table(box=None, show_header=False)
    facts.add_row(
        "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    )
    facts.add_row("packages", ", ".join(f"{n} {version(n) or 'missing'}" for n in SHOWN))
    facts.add_row("device", described(device))
    facts.add_row("free memory", f"{free_memory(device) / 2**30:.1f} GiB")
    cores, load = counted(os.cpu_count() or 1, "core"), os.getloadavg()[0]
    facts.add_row("threads", f"{torch.get_num_threads()} on {cores}, load average {load:.1f}")
    facts.add_row("kernels", ops.state(device))
    facts.add_row("in torch", f"float64, and {', '.join(ops.in_torch(device))}")
    root = results.root()
    free = shutil.disk_usage(_existing(root)).free
    facts.add_row("store", Text(f"{root}, {free / 2**30:.1f} GiB free"))
    zoo = ", ".join(m.name for m in shelf.models())
    facts.add_row("zoo", Text(zoo or "none: your own models work without"))
    console.print(facts)
    console.print(speeds(device))
    doubtful = doubts(device)
    for line in doubtful:
        text = Text.assemble(("doubtful", "bold yellow"), f" timings: {line}")
        console.print(text, soft_wrap=True)
    problems = [("missing", problem) for problem in missing()]
    if not os.access(_existing(root), os.W_OK):
        problems.append(("not writable", f"{root}: set SPECEXP_MLRUNS to a folder you can write"))
    if not zoo:
        problems.append(("missing", f"the zoo's models: {shelf.GET}"))
    for what, problem in problems:
        console.print(Text.assemble((what, "bold red"), f" {problem}"), soft_wrap=True)
    if not problems:
        busy = ", but do not time anything now" * bool(doubtful)
        console.print(Text.assemble(("ready", "green"), f": nothing is missing{busy}"))
    return not problems


def missing() -> list[str]:
    """Unmet requirements of the package, one line each with the command that installs them."""
    problems = []
    for needed in requirements():
        installed = version(needed.name)
        if installed is None:
            problems.append(f"{needed.name}: pip install {needed.name}")
        elif not needed.specifier.contains(installed, prereleases=True):
            fix = f"pip install '{needed}'"
            problems.append(f"{needed.name}{needed.specifier}, {installed} is installed: {fix}")
    return problems


def requirements() -> list[Requirement]:
    """Required packages: from the installed metadata, or from pyproject.toml in a checkout that is
    not installed."""
    try:
        lines = metadata.requires("specexp") or []
    except metadata.PackageNotFoundError:
        project = tomllib.loads((results.ROOT / "pyproject.toml").read_text())["project"]
        lines = project["dependencies"]
    return [r for r in map(Requirement, lines) if not (r.marker and "extra" in str(r.marker))]


def speeds(device: torch.device) -> Table:
    """Time of a pass over n tokens relative to one token, by dtype: what verification costs."""
    counts = (1, 2, 6, 16, 64)
    table = Table(
        "dtype", "one token", "reads", *(f"n={n}" for n in counts[1:]),
        title="linear layers over n tokens, relative to one",
        title_justify="left", title_style="", box=None, header_style="bold",
    )  # fmt: skip
    for dtype in (torch.float32, torch.bfloat16):
        weights = [w.to(dtype) for w in matrices(device)]
        taken = [[pass_s(weights, n) for n in counts] for _ in range(9)]  # in turns
        best = dict(zip(counts, map(min, zip(*taken, strict=True)), strict=True))
        size = sum(w.numel() * w.element_size() for w in weights)
        table.add_row(
            str(dtype).removeprefix("torch."), f"{best[1] * 1e3:.2f} ms",
            f"{size / best[1] / 1e9:.0f} GB/s", *(f"{best[n] / best[1]:.2f}x" for n in counts[1:]),
        )  # fmt: skip
    return table


def _existing(path: os.PathLike[str]) -> str:
    """The path, or its nearest parent that exists."""
    at = os.path.abspath(path)
    while not os.path.exists(at):
        at = os.path.dirname(at)
    return at
