"""Is this machine ready, and how fast? Versions, device, dtype speed, disk, what is missing."""

from __future__ import annotations

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

from specexp import native
from specexp.lab import store
from specexp.lab.turns import clock
from specexp.lm import free_memory
from specexp.zoo import shelf

SHOWN = ("specexp", "torch", "transformers", "mlflow", "papermill", "jupyterlab")
EMULATED = 4.0  # times the time of float32: double precision honestly takes twice as long
SHAPES = {"cpu": (1024, 32), "cuda": (8192, 4)}
"""Width and number of matrices: together too large for the caches that matter, and on a GPU each
takes longer to read than to launch."""


def examine(console: Console) -> bool:
    """Print the report; False when something that every run needs is missing."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = Table(box=None, show_header=False)
    facts.add_row(
        "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    )
    facts.add_row("packages", ", ".join(f"{n} {version(n) or 'missing'}" for n in SHOWN))
    facts.add_row("device", described(device))
    facts.add_row("free memory", f"{free_memory(device) / 2**30:.1f} GiB")
    facts.add_row("threads", f"{torch.get_num_threads()} of {os.cpu_count()} cores, load {_load()}")
    facts.add_row("CPU passes", "compiled" if native.library() else "by single operations")
    root = store.root()
    free = shutil.disk_usage(_existing(root)).free
    facts.add_row("store", Text(f"{root}, {free / 2**30:.1f} GiB free"))
    facts.add_row("zoo", Text(", ".join(m.name for m in shelf.models()) or "missing"))
    console.print(facts)
    console.print(speeds(device))
    problems = [("missing", problem) for problem in missing()]
    if not os.access(_existing(root), os.W_OK):
        said = f"{root}: set SPECEXP_MLRUNS to a folder that may be written to"
        problems.append(("not writable", said))
    if not shelf.models():
        said = "the zoo's models: get a complete checkout, or run `specexp zoo train`"
        problems.append(("missing", said))
    for what, problem in problems:
        console.print(Text(what, "bold red") + Text(f" {problem}", ""), soft_wrap=True)
    if not problems:
        console.print(Text("ready", "green") + Text(": nothing is missing", ""))
    return not problems


def missing() -> list[str]:
    """Requirements of the package that this machine does not meet, one line each with the mend."""
    problems = []
    for needed in requirements():
        found = version(needed.name)
        if found is None:
            problems.append(f"{needed.name}: pip install {needed.name}")
        elif not needed.specifier.contains(found, prereleases=True):
            mend = f"pip install '{needed}'"
            problems.append(f"{needed.name}{needed.specifier}, {found} is installed: {mend}")
    return problems


def requirements() -> list[Requirement]:
    """What the package needs, as it was installed, or as a checkout says that was not."""
    try:
        asked = metadata.requires("specexp") or []
    except metadata.PackageNotFoundError:
        project = tomllib.loads((store.ROOT / "pyproject.toml").read_text())["project"]
        asked = project["dependencies"]
    return [r for r in map(Requirement, asked) if not (r.marker and "extra" in str(r.marker))]


def speeds(device: torch.device) -> Table:
    """What verifying n tokens costs next to one, by dtype: the whole bet of speculation."""
    counts = (1, 2, 6, 16, 64)
    table = Table(
        "dtype", "one token", "reads", *(f"n={n}" for n in counts[1:]),
        title="a pass over n tokens, relative to one token (linear layers of this machine)",
        title_justify="left", title_style="", box=None, header_style="bold",
    )  # fmt: skip
    for dtype in (torch.float32, torch.bfloat16):
        weights = [w.to(dtype) for w in _matrices(device)]
        best = {n: min(_pass(weights, n) for _ in range(9)) for n in counts}
        size = sum(w.numel() * w.element_size() for w in weights)
        table.add_row(
            str(dtype).removeprefix("torch."), f"{best[1] * 1e3:.2f} ms",
            f"{size / best[1] / 1e9:.0f} GB/s", *(f"{best[n] / best[1]:.2f}x" for n in counts[1:]),
        )  # fmt: skip
    return table


def slow(dtype: torch.dtype, device: torch.device) -> str:
    """One line when a token costs far more in this dtype than in float32, as it does where the
    processor has no such arithmetic and it is emulated; else ""."""
    if dtype == torch.float32:
        return ""
    single = _matrices(device)
    times = [
        min(_pass(weights, 1) for _ in range(4))
        for weights in ([w.to(dtype) for w in single], single)
    ]
    if times[0] < EMULATED * times[1]:
        return ""
    name = str(dtype).removeprefix("torch.")
    return (
        f"{name} is emulated slowly here: a token costs {times[0] / times[1]:.0f}x what it does in "
        "float32, and figures say nothing about hardware that has it; use --dtype float32"
    )


def _matrices(device: torch.device) -> list[torch.Tensor]:
    width, count = SHAPES[device.type]
    return [torch.randn(width, width, device=device) for _ in range(count)]


def _pass(weights: list[torch.Tensor], n: int) -> float:
    x = weights[0].new_ones(n, len(weights[0]))
    begin = clock(x.device)
    for w in weights:
        torch.nn.functional.linear(x, w)
    return clock(x.device) - begin


def described(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    return f"cpu ({torch.backends.cpu.get_cpu_capability()}); no CUDA device found"


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f}"


def version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _existing(path: os.PathLike[str]) -> str:
    at = os.path.abspath(path)
    while not os.path.exists(at):
        at = os.path.dirname(at)
    return at
