"""What a run was made with: versions, commit, device, threads and load.

A result's key (`grids/identity.py`) and a run's tags take the same facts from here. This file knows
nothing of grids, commands or engines; it asks the compiled code only whether it can be compiled.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess

from specexp.zoo import shelf

PACKAGES = ("specexp", "torch", "transformers")
SWITCHES = ("SPECEXP_NATIVE", "SPECEXP_GRAPHS", "SPECEXP_FAST")


def tags(device: str = "auto") -> dict[str, str]:
    """The tags of a run on this device: versions, device, threads, load average, commit."""
    import torch

    commit, dirty = os.environ.get("SPECEXP_GIT", "").split() or git_state()
    off = switched_off(device)
    return {
        **{f"version.{name}": version(name) or "unknown" for name in PACKAGES},
        **({"engine": off} if off else {}),
        "version.python": platform.python_version(),
        "device": device_class(device),
        "threads": str(torch.get_num_threads()),
        "load": f"{os.getloadavg()[0]:.2f}",
        "git.commit": commit,
        "git.dirty": dirty,
    }


def version(package: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def device_class(device: str) -> str:
    """The GPU's name or "cpu", so that results of different devices have different keys."""
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu"


def switched_off(device: str) -> str:
    """Which accelerated parts are switched off or cannot be compiled; empty if none."""
    from specexp.fast.cpu import build

    off = [f"{name} off" for name in SWITCHES if os.environ.get(name) == "off"]
    if device_class(device) == "cpu" and not build.compiler():
        off.append("no compiler")
    return ", ".join(off)


def git_state() -> tuple[str, str]:
    """The commit of the checkout, and "true" if tracked files differ from it, else "false". The
    commit is "" where there is no checkout or no git."""
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return _git("rev-parse", "HEAD"), str(bool(changed)).lower()


def _git(*args: str) -> str:
    root = shelf.CHECKOUT
    if root is None:  # an installed package may lie in somebody else's repository
        return ""
    try:
        git = subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, check=False)
    except OSError:  # not installed
        return ""
    return git.stdout.strip() if git.returncode == 0 else ""
