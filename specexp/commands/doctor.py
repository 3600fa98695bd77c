"""`specexp doctor`: versions, device, speed by dtype, disk, and what is missing."""

import importlib.metadata as metadata
import os
import platform
import re
import shutil
import tomllib

import torch
from packaging.requirements import Requirement
from rich.table import Table
from rich.text import Text

from specexp import ops, terminal
from specexp.commands.options import console, say
from specexp.errors import counted
from specexp.measure.hardware.machine import described, doubts, matrices, pass_s
from specexp.models.memory import free_memory
from specexp.tracking import results
from specexp.tracking.provenance import cores, version
from specexp.zoo import shelf

SHOWN = ("specexp", "torch", "transformers", "mlflow", "papermill", "jupyterlab")


def examine() -> bool:
    """Print the report; False if something that every run needs is missing."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    usable, load = counted(cores(), "core"), os.getloadavg()[0]
    root, there = results.root(), results.standing()
    zoo = ", ".join(m.name for m in shelf.models())
    kernels = re.sub(r", [0-9a-f]{8}\b", "", ops.state(device))  # no digest
    facts = terminal.listing("", "", show_header=False)
    for name, fact in {
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "packages": ", ".join(f"{n} {version(n) or 'missing'}" for n in SHOWN),
        "device": described(device),
        "free memory": f"{free_memory(device) / 2**30:.1f} GiB",
        "threads": f"torch uses {torch.get_num_threads()} on {usable}, load average {load:.1f}",
        "kernels": kernels + "; float64 runs without" * bool(ops.kernels_of(device)),
        "store": f"{root}, {shutil.disk_usage(there).free / 2**30:.1f} GiB free",
        "zoo": zoo or "none: your own models work without",
    }.items():
        facts.add_row(name, fact)
    console.print(facts, speeds(device), sep="\n")
    doubtful = doubts(device)
    for line in doubtful:
        say(Text.assemble(("doubtful", "bold yellow"), f" timings: {line}"))
    problems = [("missing", problem) for problem in missing()]
    if not os.access(there, os.W_OK):
        problems.append(("not writable", f"{root}: set SPECEXP_MLRUNS to a folder you can write"))
    if not zoo:
        problems.append(("missing", f"the zoo's models: {shelf.GET}"))
    for what, problem in problems:
        say(Text.assemble((what, "bold red"), f" {problem}"))
    if not problems:
        busy = ", but do not time anything now" * bool(doubtful)
        say(Text.assemble(("ready", "green"), f": nothing is missing{busy}"))
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
    """Required packages: of the installed metadata or, if not installed, of pyproject.toml."""
    try:
        lines = metadata.requires("specexp") or []
    except metadata.PackageNotFoundError:
        project = tomllib.loads((results.ROOT / "pyproject.toml").read_text())["project"]
        lines = project["dependencies"]
    return [r for r in map(Requirement, lines) if not (r.marker and "extra" in str(r.marker))]


def speeds(device: torch.device) -> Table:
    """Time of a pass over n tokens relative to one token, by dtype: what verification costs."""
    counts = (1, 2, 6, 16, 64)
    size = sum(w.numel() for w in matrices(device)) / 1e6
    title = (
        f"speed of matrix products with {size:.0f} million weights, which make up most of a target "
        "pass: the time for 1 token, the rate at which it reads the weights, and the time for n "
        "tokens as a multiple of that for 1; where it is near 1x, checking n - 1 draft tokens is "
        "cheap"
    )
    several = (f"{n} tokens" for n in counts[1:])
    table = terminal.table(title, "dtype", "1 token", "weights read", *several)
    for dtype in (torch.float32, torch.bfloat16):
        weights = [w.to(dtype) for w in matrices(device)]
        taken = [[pass_s(weights, n) for n in counts] for _ in range(9)]  # in turns
        best = dict(zip(counts, map(min, zip(*taken, strict=True)), strict=True))
        read = sum(w.numel() * w.element_size() for w in weights)  # bytes
        table.add_row(
            str(dtype).removeprefix("torch."), f"{best[1] * 1e3:.2f} ms",
            f"{read / best[1] / 1e9:.0f} GB/s", *(f"{best[n] / best[1]:.2f}x" for n in counts[1:]),
        )  # fmt: skip
    return table
