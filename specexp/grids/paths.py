"""Paths in a grid file are relative to it. A notebook runs in its own folder: it gets them relative
to that, so that a point's parameters do not depend on where the checkout is."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specexp import fitting
from specexp.errors import UserError, meant_beside
from specexp.grids.imports import DRAFTERS, texts_in
from specexp.measure import prompts
from specexp.measure.parameters import PARAMETERS

MODELS = ("target", *DRAFTERS)
DATA = ("prompts", "arrivals")
_QUANTISED = re.compile(r"(.+?)((?:\+int8)?)")


def may_name(name: str) -> bool:
    """Whether a parameter may name a path: those of models and data, and a notebook's own."""
    return name in (*MODELS, *DATA) or name not in PARAMETERS


def moved(name: str, value: Any, grid: Path, notebook: Path) -> Any:
    """A parameter's value with its path, if it is one, relative to the folder `notebook` instead of
    the folder `grid`. Raises UserError for one that is relative to the notebook's as it stands."""
    if isinstance(value, list):
        return [moved(name, item, grid, notebook) for item in value]
    if not isinstance(value, str) or grid == notebook:
        return value
    exists = os.path.exists if name in PARAMETERS else os.path.isfile
    for head, path, tail in _parts(name, value):
        there, beside = os.path.join(grid, path), os.path.join(notebook, path)
        if exists(there):
            return head + os.path.relpath(there, notebook) + tail
        has_folder = Path(path).name != path
        if name in PARAMETERS and has_folder and os.path.exists(beside):
            raise UserError(
                f"{name} {path!r:.80} is relative to the notebook: paths in a grid are relative to "
                f"the grid file, write {os.path.relpath(beside, grid)!r}"
            )
        is_path = (name in DATA or (name in MODELS and has_folder)) and (head or ":" not in path)
        if is_path and (near := meant_beside(Path(path), folder=grid)):
            raise UserError(f"{name}: there is no {path!r:.80} relative to the grid file{near}")
    return value


def as_written(message: str, params: Mapping[str, Any], notebook: Path, grid: Path) -> str:
    """A message about a point, with the paths of its parameters relative to the folder of its grid
    file, where they were written, instead of the notebook's."""
    texts = [(name, t) for name in filter(may_name, params) for t in texts_in(params[name])]
    there = {path: os.path.join(notebook, path) for x in texts for _, path, _ in _parts(*x) if path}
    own = {p: os.path.relpath(full, grid) for p, full in there.items() if os.path.exists(full)}
    if not own:
        return message
    longest_first = "|".join(map(re.escape, sorted(own, key=len, reverse=True)))
    named = rf"(?<![\w./-])(?:{longest_first})(?![\w-])"
    return re.sub(named, lambda match: own[match[0]], message)


def _parts(name: str, text: str) -> Iterator[tuple[str, str, str]]:
    """What stands before, in and after the path that a text may be, or may hold behind a colon
    (`eagle:FOLDER`, `trace:FILE`, `FOLDER+int8`)."""
    names = fitting.methods() if name in DRAFTERS else ("all", *prompts.NAMES)
    lookup = "lookup:" * text.startswith("lookup:")
    whole = text.removeprefix(lookup)
    method, colon, argument = whole.partition(":")
    for head, part in (("", "" if whole in names else whole), (method + colon, argument)):
        if (match := _QUANTISED.fullmatch(part)) and not os.path.isabs(part):
            yield lookup + head, match[1], match[2]
