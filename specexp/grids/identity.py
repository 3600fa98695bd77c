"""The identity of a result: digests of its parameters, notebook, files, models, data and device.

The files are those that its numbers can depend on (`imports.closure`), each a part of its own. What
decides which code ran is part of it, too: device, threads, what is switched off. Points with the
same identity are the same experiment, whenever and wherever they run. A process reads files, models
and data once, and again if their size or modification time changes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache

from specexp.grids import imports
from specexp.grids.notebooks import Notebook
from specexp.measure import feasible, prompts
from specexp.models import int8
from specexp.tracking.provenance import device_class, switched_off

SOURCE = (".py", *imports.COMPILED)
ENGINE = f"{imports.NAME}/engine.py"
SHOWN, MOST = ("device", "threads", "engine"), 3  # parts whose values say something; others named
WHOLE, ENDS = 1_000_000_000, 1 << 20
_FILES = (
    "config.json", "generation_config.json", "tokenizer*", "vocab*", "merges.txt", "*.safetensors",
    "*.pt", "*.bin",
)  # fmt: skip
_MODELS = ("target", "targets", "draft", "drafts", "drafter", "drafters", "rivals")
_DATA = ("prompts", "arrivals")


def digest(value: Any) -> str:
    """16 hexadecimal digits of a value's canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


class Surroundings:
    """Computes the parts of an identity that many points share, each once.

    It caches them: make a new one when files may have changed.
    """

    def __init__(self) -> None:
        self.cached: dict[Any, dict[str, str]] = {}
        self.files: dict[Any, dict[str, str]] = {}

    def of(self, params: Mapping[str, Any], notebook: Notebook) -> dict[str, str]:
        """All parts of a point's identity except its parameters; equal ones are one dictionary.
        Raises UserError for a missing model."""
        named = imports.named_by(params)
        read = {n: params[n] for n in (*_MODELS, *_DATA, "device") if n in params}
        key = os.getcwd(), repr(read), named, notebook.path, notebook.digest  # paths are relative
        if key not in self.cached:
            parts = self._parts(params, notebook, named)
            self.cached[key] = next((p for p in self.cached.values() if p == parts), parts)
        return self.cached[key]

    def _parts(
        self, params: Mapping[str, Any], notebook: Notebook, named: frozenset[str]
    ) -> dict[str, str]:
        folder, device = notebook.path.parent, device_class(params.get("device", "auto"))
        if (key := (notebook.path, notebook.digest, named)) not in self.files:
            self.files[key] = imports.closure(notebook.imports, notebook.strings, folder, named)
        files = self.files[key]
        if device == "cpu":
            files = {name: d for name, d in files.items() if not name.startswith(imports.OF_GPU)}
        parts = {"notebook": notebook.digest[:16], **files}
        if sources := feasible.sources(dict(params)):
            parts["models"] = digest(sorted([name_of(s), model_digest(s)] for s in sources))
        if data := list(_data_files(params)):
            parts["data"] = digest([file_digest(file) for file in data])
        if "device" in params or ENGINE in files:
            parts["device"] = device
        if ENGINE in files:
            parts["threads"] = str(torch.get_num_threads())
            parts["engine"] = switched_off(params.get("device", "auto")) or "all on"
        return parts


def edited(parts: Mapping[str, str], folder: Path) -> list[str]:
    """The files among the parts of an identity that have changed since. folder: the notebook's."""

    def same(name: str, digest: str) -> bool:
        home = imports.PACKAGE.parent if name.startswith(f"{imports.NAME}/") else folder
        return (home / name).is_file() and imports.source_of(home / name).digest == digest

    return [n for n, d in parts.items() if n.endswith(SOURCE) and not same(n, d)]


def why_new(now: Mapping[str, str], before: Mapping[str, str]) -> str:
    """Why a point with the identity `now` has no use for a result with the identity `before`."""
    if "code" in before:  # once a digest of all source
        return "made before keys by room"
    names = sorted(n for n in now.keys() | before.keys() if now.get(n) != before.get(n))
    readable = [n for n in SHOWN if n in names and n in now and n in before]
    reasons = [f"{n} was {before[n]}, is {now[n]}" for n in readable]
    if rest := [n for n in names if n not in readable]:
        more = f" and {len(rest) - MOST} more" if len(rest) > MOST else ""
        reasons.insert(0, f"{', '.join(rest[:MOST])}{more} changed")
    return "; ".join(reasons)


def code_digest() -> str:
    """A digest of the library's whole source as it is now, machinery included."""
    total = hashlib.sha256()
    for path in sorted(imports.PACKAGE.rglob("*")):
        hidden = any(part[0] == "." for part in path.relative_to(imports.PACKAGE).parts)  # editors'
        if path.suffix in SOURCE and not hidden and path.is_file():
            total.update(path.read_bytes())
    return total.hexdigest()


def name_of(source: str) -> str:
    bare, how = int8.split(source)
    return Path(bare).name + how if os.path.isdir(bare) else source


def model_digest(source: str) -> str:
    """Of a folder: a digest of its config, tokenizer and weights. Of a hub id: the revision in the
    local cache, or the id itself if it is not cached. `+int8` is ignored."""
    source, _ = int8.split(source)
    if not os.path.isdir(source):
        cached = try_to_load_from_cache(source, "config.json")
        return Path(cached).parent.name if isinstance(cached, str) else source
    files = {f for pattern in _FILES for f in Path(source).glob(pattern) if f.is_file()}
    return digest({f.name: file_digest(f) for f in files})


def file_digest(path: Path) -> str:
    """SHA-256 of a file. Of files above 1 GB (half a second of hashing) only the size, the header
    that lists a safetensors file's tensors, and the first and last MiB are hashed: weights that
    differ only in between are taken for equal."""
    state = path.stat()
    return _file_digest(path, state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=4096)
def _file_digest(path: Path, size: int, changed_ns: int) -> str:
    total = hashlib.sha256()
    with path.open("rb") as file:
        if size <= WHOLE:
            return hashlib.file_digest(file, "sha256").hexdigest()
        header = int.from_bytes(file.read(8), "little")
        file.seek(0)
        total.update(f"{size} ".encode())
        total.update(file.read(max(ENDS, min(8 + header, 100 * ENDS))))
        file.seek(-ENDS, os.SEEK_END)
        total.update(file.read())
    return total.hexdigest()


def _data_files(read: Mapping[str, Any]) -> Iterable[Path]:
    """The files of prompts and arrival traces that these parameters name."""
    named = read.get("prompts")
    if isinstance(named, str):
        yield from prompts.files(named)
    kind, _, trace = str(read.get("arrivals", "")).partition(":")
    if kind == "trace":
        yield Path(trace)
