"""The identity of a result: digests of its parameters, notebook, files, models, data and device.

The files are those that its numbers can depend on (`imports.closure`), each a part of its own. What
decides which code ran is part of it, too: device, threads, versions, kernels, settings; for points
that measure time also the processor, and whether others run beside them. Points with the same
identity are the same experiment, whenever and wherever they run. Files, models and data are read
whole, once, and again when they change (`zoo.known.digest_of`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specexp.errors import UserError, first_line
from specexp.grids import imports, notebooks
from specexp.measure import feasible, prompts
from specexp.measure.parameters import PARAMETERS
from specexp.tracking import provenance
from specexp.zoo.known import Answer, Known, digest, digest_of, facts_of_model

if TYPE_CHECKING:
    from specexp.grids.points import Point

ENGINE = f"{imports.NAME}/engine.py"
SHOWN = provenance.FACTS  # parts whose values say something; others are named
MOST = 3  # of those that are named
UNCOMPILED = "not compiled yet"  # kernels of a plan that does not wait for a compiler
UNSURE = "done, if its kernels, not compiled here yet, come out as they were: `grid run` sees"
_DATA = re.compile(r"(?!.*\.(py|ipynb|so|pyd)\b).*\..*")  # among parts, a file that is no code


@dataclass(frozen=True, slots=True)
class Identity:
    """`parts`: digests or words, by the names of what the result depends on; `models`: the folders
    and hub ids, and `data`: the files and folders, that the parts of these names are digests of."""

    parts: dict[str, str]
    models: tuple[str, ...] = ()
    data: tuple[Path, ...] = ()


def identity_of(
    params: Mapping[str, Any], notebook: notebooks.Notebook, known: Known, together: bool
) -> Identity:
    """The identity of a point of this notebook; paths are relative to the working directory.
    `together`: timed points may run side by side. Raises UserError for a missing model."""
    own = {t for n in params if n not in PARAMETERS for t in imports.texts_in(params[n])}
    folders = (os.path.abspath(t) for t in own if os.path.isfile(f"{t}/config.json"))
    files, home = files_of(params, notebook, known), notebook.path.parent
    beside = (os.path.abspath(home / n) for n, what in files.items() if what == imports.MODEL)
    models = tuple(sorted({*feasible.sources(params, known), *folders, *beside}))
    named = map(Path, filter(os.path.isfile, sorted(own)))
    data = tuple(path.resolve() for path in (*_data_files(params), *named))
    parts = _parts(params, notebook, files, models, data, together, known)
    return Identity(parts, models, data)


def files_of(
    params: Mapping[str, Any], notebook: notebooks.Notebook, known: Known
) -> dict[str, str]:
    """The digests of the files that a point's numbers can depend on; from now on, those of one's
    own decide what is known of code of one's own."""
    home, named = notebook.path.parent, imports.named_by(params)
    files: dict[str, str] = known.cached(facts_of_files, notebook.code, str(home), named)
    known.own_files = _own(files, home)
    return files


def facts_of_files(code: imports.Source, folder: str, named: Sequence[str]) -> Answer:
    """The import closure of a notebook in this folder (`imports.closure`)."""
    home = Path(folder)
    files = imports.closure(code, home, named)
    own = _own(files, home)
    if own is None:
        return files, None
    naming = [(home, code.paths), *((file.parent, imports.source_of(file).paths) for file in own)]
    named_there = (imports.places(texts, home, there) for there, texts in naming)
    return files, [home, *own, *(file.parent for file in own), *chain(*named_there)]


def _own(files: Iterable[str], home: Path) -> list[Path] | None:
    """Those of a key's files that are not specexp's; None if some are elsewhere, as their names do
    not say where."""
    own = [name for name in files if not name.startswith(f"{imports.NAME}/")]
    elsewhere = any(name.endswith(imports.ELSEWHERE) for name in own)
    return None if elsewhere else [home / name for name in own]


def facts_of_machine(device: str, timed: bool, engine: bool) -> Answer:
    """The parts of a point's identity that tell what runs it; `engine`: with specexp's kernels.
    Nothing is compiled for that."""
    parts = provenance.machine(device, timed)
    missing = provenance.uncompiled(device) if engine else []
    kernels = UNCOMPILED if missing else provenance.kernels(device) if engine else ""
    return parts | ({"kernels": kernels} if engine else {}), missing


def _parts(
    params: Mapping[str, Any], notebook: notebooks.Notebook, files: Mapping[str, str],
    models: Iterable[str], data: Sequence[Path], together: bool, known: Known,
) -> dict[str, str]:  # fmt: skip
    device = params.get("device", "auto")
    question = facts_of_machine, device, notebook.timed, ENGINE in files
    parts: dict[str, str] = {} if known.kernels == "not asked" else {**known.cached(*question)}
    if known.kernels == "compiled" and parts.get("kernels") == UNCOMPILED:
        provenance.kernels(device)
        parts = {**known.ask_again(*question)}
    on_cpu = parts.get("device") == "cpu"
    parts |= {n: d for n, d in files.items() if not (on_cpu and n.startswith(imports.OF_GPU))}
    parts |= {"params": digest(params), "notebook": notebook.digest}
    if notebook.timed:
        parts["processor"] = known(provenance.processor)  # quotas change without a trace in files
        parts["together"] = "yes" if together else "no"
    sources = sorted(known.cached(facts_of_model, source) for source in models)
    if sources:
        parts["models"] = digest(sources)
    if data:
        parts["data"] = digest([digest_of(f) for path in data for f in prompts.files(path)])
    return parts


def changed_since(point: Point) -> str:
    """Which parts of a point's identity changed since its grid was loaded, in words; "" if none.
    Data that was not there then may be what the point itself fetched."""
    before, params, known = point.identity, point.params, Known()
    try:
        read = notebooks.read(point.notebook)
        files = files_of(params, read, known)
        now = _parts(params, read, files, before.models, before.data, point.together, known)
    except (UserError, OSError) as e:
        return first_line(e)
    there = {n: d for n, d in now.items() if n in before.parts or not _DATA.fullmatch(n)}
    return why_new(there, before.parts)


def why_new(now: Mapping[str, str], before: Mapping[str, str]) -> str:
    """Why a point of the identity `now` cannot use a result of `before`: which parts differ."""
    if "versions" not in before:
        return "made before keys named versions, kernels and settings"
    names = sorted(n for n in now.keys() | before.keys() if now.get(n) != before.get(n))
    if names == ["kernels"] and now.get("kernels") == UNCOMPILED:
        return UNSURE
    reasons = []
    for name in filter(names.__contains__, SHOWN):
        old, new = (parts.get(name, "not in the key") for parts in (before, now))
        reasons.append(f"{name} was {_apart(old, new)}, is {_apart(new, old)}")
    if rest := [name for name in names if name not in SHOWN]:
        more = f" and {len(rest) - MOST} more" if len(rest) > MOST else ""
        reasons.insert(0, f"{', '.join(rest[:MOST])}{more} changed")
    return "; ".join(reasons)


def _apart(text: str, other: str) -> str:
    """The comma-separated parts of a text that another does not have; all, if none are."""
    return ", ".join(p for p in text.split(", ") if p not in other.split(", ")) or text


def _data_files(read: Mapping[str, Any]) -> Iterable[Path]:
    """The files and folders of prompts and arrival traces that these parameters name."""
    named = read.get("prompts")
    if isinstance(named, str):
        yield from [Path(named)] if os.path.isdir(named) else prompts.files(named)
    kind, _, trace = str(read.get("arrivals", "")).partition(":")
    if kind == "trace":
        yield Path(trace)
