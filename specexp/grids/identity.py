"""The identity of a result: digests of its parameters, notebook, code, models, data and device.

Points with the same identity are the same experiment, whenever and wherever they run. A process
reads models and data once, and again if their size or modification time changes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from specexp.measure import feasible, prompts
from specexp.models import int8
from specexp.tracking.provenance import device_class, switched_off

PACKAGE = Path(__file__).resolve().parents[1]
SOURCE = (".py", ".cpp", ".h")
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
        self.known: dict[Any, dict[str, str]] = {}
        self.code = code_digest()[:16]

    def of(self, params: Mapping[str, Any], notebook: str) -> dict[str, str]:
        """All parts of a point's identity except its parameters; equal ones are one dictionary.
        Raises UserError for a missing model."""
        read = {n: params[n] for n in (*_MODELS, *_DATA, "device") if n in params}
        key = os.getcwd(), repr(read), notebook  # paths may be relative
        if key not in self.known:
            parts = {"notebook": notebook[:16], "code": self.code}
            if sources := feasible.sources(dict(params)):
                parts["models"] = digest(sorted([name_of(s), model_digest(s)] for s in sources))
                if slower := switched_off(params.get("device", "auto")):
                    parts["engine"] = slower
            if files := list(_data_files(read)):
                parts["data"] = digest([file_digest(file) for file in files])
            if "device" in read:
                parts["device"] = device_class(read["device"])
            self.known[key] = next((p for p in self.known.values() if p == parts), parts)
        return self.known[key]


def code_digest() -> str:
    """A digest of the library's source as it is now."""
    total = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*")):
        hidden = any(part[0] == "." for part in path.relative_to(PACKAGE).parts)  # of editors
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
        names = prompts.NAMES if named == "all" else [named]
        yield from (
            prompts.SHIPPED / f"{name}.jsonl" if name in prompts.NAMES else Path(name)
            for name in names
        )
    kind, _, trace = str(read.get("arrivals", "")).partition(":")
    if kind == "trace":
        yield Path(trace)
