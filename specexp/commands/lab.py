"""`specexp lab`: JupyterLab on working copies of the notebooks; those in git stay as they are."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import typer

from specexp.commands.options import say
from specexp.errors import UserError

COPIED = ("*.ipynb", "*.py", "grids/*.yaml")
ORIGINALS = ".originals"  # what the copies were when they were made


def copy(shipped: Path, folder: Path) -> list[Path]:
    """Copy notebooks, modules beside them and grids to `folder`, with what they were to its
    `.originals`. A copy that was changed stays; returns the names of those whose original is
    another one now."""
    kept = []
    for source in sorted(path for pattern in COPIED for path in shipped.glob(pattern)):
        name = source.relative_to(shipped)
        own, original = folder / name, folder / ORIGINALS / name
        content, copied = source.read_bytes(), original.is_file() and original.read_bytes()
        if own.exists() and own.read_bytes() not in (content, copied):
            kept += [name] * (content != copied)
            continue
        for path in (own, original):
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, path)
    return kept


def lab(
    options: list[str] | None = typer.Argument(None, help="Options of JupyterLab."),
) -> None:
    """Open JupyterLab on copies of the notebooks and grids, kept in mlruns/notebooks.

    Example: `specexp lab --no-browser --port 8890`
    """
    from specexp.tracking import results
    from specexp.zoo import shelf

    if options and not options[0].startswith("-"):
        raise UserError(
            f"specexp lab takes JupyterLab's options, such as --no-browser, but no {options[0]}: "
            "open a notebook there"
        )
    if shelf.CHECKOUT is None:
        raise UserError(
            "the notebooks are not part of an installed specexp: run this in a clone of the "
            "repository"
        )
    if importlib.util.find_spec("jupyterlab") is None:
        raise UserError('JupyterLab is not installed: pip install "specexp[lab]"')
    folder = results.folder("notebooks")
    for name in copy(shelf.CHECKOUT / "notebooks", folder):
        say(
            f"{name}: the shipped one is newer, and yours was changed and stays; rename "
            f"{folder / name} to get the new one"
        )
    root = ["--allow-root"] * (os.geteuid() == 0)  # as in most containers; a token guards it
    line = [sys.executable, "-m", "jupyterlab", *root, *(options or []), str(folder)]
    os.execv(sys.executable, line)
