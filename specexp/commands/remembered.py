"""The points that `validate` and `status` found, kept while nothing that decides them has changed.

To find them takes torch and transformers: seconds of a core, beside a point that may be timed. What
decides them is compared by size and time of change: specexp's code, the files and folders that the
points read, the models here, the packages and programs that are installed, the environment. `grid
run` finds its points afresh, and so asks again whether they fit into memory.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from specexp.grids import imports, points
from specexp.grids.identity import Around
from specexp.grids.points import Point
from specexp.zoo import files, shelf

SHELL = ("_", "SHLVL", "OLDPWD", "COLUMNS", "LINES")  # variables that decide nothing


def remembered(
    grids: Sequence[Path], options: Sequence[Any], checked: bool, find: Callable[[], list[Point]]
) -> list[Point]:
    """The points of these grid files, those found last time if they must be the same, else those
    that `find` returns. `options`: what else decides which; `checked`: that each can be built."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specexp" / "points"
    key = _digest([os.path.abspath(grid) for grid in grids], options)
    file, around = folder / f"{key[:16]}.json", _around()
    with suppress(OSError, ValueError, KeyError, TypeError):
        record = json.loads(file.read_text())
        if record["checked"] >= checked and record["state"] == _digest(
            around, *_stats(record["read"])
        ):
            return [_point(fields) for fields in record["points"]]
    found = find()
    if len(found) <= points.MANY and (read := _read(grids, found)):
        record = {"checked": checked, "read": read, "state": _digest(around, *_stats(read))}
        record["points"] = [asdict(point) for point in found]
        with suppress(OSError), files.whole(file) as partial:
            partial.write_text(json.dumps(record, default=str))
    return found


def _point(fields: dict[str, Any]) -> Point:
    around, tuples = fields["around"], ("varying", "others")
    data = tuple(map(Path, around["data"]))
    whole = Around(around["parts"], tuple(around["models"]), data)
    return Point(**fields | {n: tuple(fields[n]) for n in tuples}
                 | {"notebook": Path(fields["notebook"]), "around": whole})  # fmt: skip


def _read(grids: Iterable[Path], found: Iterable[Point]) -> list[str]:
    """The files and folders that decide these points; none if not all of them are known."""
    read = {path for grid in grids for path in (grid.resolve(), grid.resolve().parent)}
    for point in found:
        home, models = point.notebook.parent, point.around.models
        parts = [name for name in point.around.parts if name.endswith(".py")]
        if any(name.endswith(imports.ELSEWHERE) for name in point.around.parts):
            return []
        if not all(map(os.path.isdir, models)):  # of hub ids, and of weights made smaller
            return []
        read |= {home, point.notebook, *(home / name for name in parts if (home / name).is_file())}
        read |= {f for folder in (*map(Path, models), *point.around.data) for f in _within(folder)}
    return sorted(map(str, read))


def _within(path: Path) -> list[Path]:
    return [path, *path.iterdir()] if path.is_dir() else [path]


def _around() -> str:
    """A digest of what decides points besides the files that they read."""
    code = (
        path for path in imports.PACKAGE.rglob("*") if path.suffix in (".py", *imports.COMPILED)
    )
    cards = (model.path / "zoo.json" for model in shelf.models())
    folders = (*sys.path, *os.environ.get("PATH", "").split(os.pathsep))
    devices = (*Path("/dev").glob("nvidia*"), Path("/proc/driver/nvidia/version"))
    variables = sorted((n, v) for n, v in os.environ.items() if n not in SHELL)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    stats = _stats((*sorted(code), *cards, *folders, *devices))
    return _digest(*stats, variables, cores, os.getcwd())


def _stats(paths: Iterable[Path | str]) -> Iterator[tuple[str, int, int, int]]:
    for path in paths:
        with suppress(OSError):
            state = os.stat(path)
            yield str(path), state.st_ino, state.st_size, state.st_mtime_ns


def _digest(*parts: Any) -> str:
    return sha256(repr(parts).encode()).hexdigest()
