"""Answers about models and this machine, kept while nothing that decides them has changed.

To find out what a model is, or which kernels run here, takes torch and transformers: seconds of a
core, beside a point that may be timed. An answer is kept until the size or a time of change of
something that decides it differs: specexp's code, the models here, the packages and programs that
are installed, the devices, the environment, and the files that the answer was read from. So is the
digest of a large file, until that file differs.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cached_property, lru_cache
from hashlib import file_digest, sha256
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TypeAlias

from specexp.errors import UserError
from specexp.zoo import files, shelf

SHELL = ("_", "SHLVL", "OLDPWD", "COLUMNS", "LINES")  # variables that decide nothing
TICK = 20_000_000  # ns that a file's time of change may be behind the clock
LARGE = 100_000_000  # bytes from which on the digest of a file is kept
OWN_CODE = Path("own")  # stands for the files of code of one's own (`Known.own_files`)
Answer: TypeAlias = tuple[Any, Iterable[Path] | None]
"""Plain data, and the files and folders that decide it, names of such that do not exist included;
None in their place if they are not all known: then the answer is not kept."""


class Known:
    """Remembers what functions return: `known(f, x)` for as long as this object lives, in which no
    file changes; `known.cached(f, x)`, if `on_disk`, also in the user's cache folder. A UserError
    or OSError that a function raises is remembered, too, but not on disk.

    may_compile: an answer may wait for a compiler; None: nor is the machine asked what runs on it,
    which takes torch. `own_files`: the files of one's own code that
    may run, None if they are not all known.
    """

    def __init__(self, on_disk: bool = False, may_compile: bool | None = True) -> None:
        self.on_disk, self.may_compile = on_disk, may_compile
        self.own_files = None if on_disk else list[Path]()
        self._answers: dict[Any, tuple[Any, Exception | None]] = {}

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        if (function, args) not in self._answers:
            try:
                self._answers[function, args] = function(*args), None
            except (UserError, OSError) as e:
                self._answers[function, args] = None, e
        answer, error = self._answers[function, args]
        if error:
            raise error
        return answer

    def cached(self, function: Callable[..., Answer] | str, *args: Any) -> Any:
        """The answer of a function to these texts and numbers, in this folder. One that is slow to
        import is given as "specexp.MODULE.FUNCTION", and imported only if it has to be asked."""
        return self(self._look_up, _name(function), *args)

    def ask_again(self, function: Callable[..., Answer], *args: Any) -> Any:
        """The same, whatever is in the cache."""
        answer = self._ask_and_keep(_name(function), *args)
        self._answers[self._look_up, (_name(function), *args)] = answer, None
        return answer

    def _look_up(self, function: str, *args: Any) -> Any:
        with suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(self._file(function, *args).read_text()) if self.on_disk else {}
            if record["state"] == self._state(record["read"]):
                return record["answer"]
        return self._ask_and_keep(function, *args)

    def _file(self, function: str, *args: Any) -> Path:
        return _kept_in("known", function, args, os.getcwd())

    def _ask_and_keep(self, function: str, *args: Any) -> Any:
        if not self.on_disk:
            return _ask(function, *args)[0]
        asked_at = time.time_ns() - TICK
        answer, read = _ask(function, *args)
        if read is None or (OWN_CODE in read and self.own_files is None):
            return answer
        own = self.own_files or () if OWN_CODE in read else ()
        deciding = sorted({str(path) for path in (*read, *own) if path != OWN_CODE})
        if all(max(state[3:]) < asked_at for state in _stats(deciding)):  # none changed meanwhile
            record = {"answer": answer, "read": deciding, "state": self._state(deciding)}
            with suppress(OSError), files.whole(self._file(function, *args)) as partial:
                partial.write_text(json.dumps(record))
        return answer

    def _state(self, read: Iterable[str]) -> str:
        return _digest(self._always, *_stats(read))

    @cached_property
    def _always(self) -> str:
        """A digest of what decides every answer."""
        code = (path for path in _PACKAGE.rglob("*") if path.suffix in _CODE)
        cards = (model.path / "zoo.json" for model in shelf.models())
        folders = (*sys.path, *os.environ.get("PATH", "").split(os.pathsep))
        devices = (*Path("/dev").glob("nvidia*"), Path("/proc/driver/nvidia/version"))
        variables = sorted((n, v) for n, v in os.environ.items() if n not in SHELL)
        usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else [os.cpu_count()]
        stats = _stats((*sorted(code), *cards, *folders, *devices))
        return _digest(*stats, variables, sorted(usable))


_PACKAGE = Path(__file__).resolve().parents[1]
_CODE = (".py", ".cpp", ".h", ".cu")


def _name(function: Callable[..., Answer] | str) -> str:
    return function if isinstance(function, str) else f"{function.__module__}.{function.__name__}"


def _ask(name: str, *args: Any) -> Answer:
    collecting = gc.isenabled()
    gc.disable()  # imports leave little garbage: to look for it takes an eighth of their time
    try:
        answer: Answer = resolve_name(name)(*args)
        return answer
    finally:
        if collecting:
            gc.enable()


def with_contents(*paths: Path) -> list[Path]:
    """These files and folders, and the files in the folders and one folder below."""
    return [p for path in paths for p in (path, *path.glob("*"), *path.glob("*/*"))]


def digest_of(path: Path) -> str:
    """SHA-256 of a file. It is read once, by all processes of a user if it is large, and again when
    it is another file or its size or times of change differ."""
    return _digest_of(path, *files.stamp(path))


@lru_cache(maxsize=4096)
def _digest_of(path: Path, *stamp: int) -> str:
    asked_at, keep = time.time_ns() - TICK, files.stamp(path)[1] >= LARGE
    kept = _kept_in("digests", str(path.resolve()))
    with suppress(OSError, ValueError, KeyError, TypeError):
        record = json.loads(kept.read_text()) if keep else {}
        if record["stamp"] == [*stamp]:
            return str(record["digest"])
    with path.open("rb") as file:
        digest = file_digest(file, "sha256").hexdigest()
    if keep and files.stamp(path) == stamp and max(stamp[2:]) < asked_at:
        with suppress(OSError), files.whole(kept) as partial:
            partial.write_text(json.dumps({"stamp": stamp, "digest": digest}))
    return digest


def _kept_in(folder: str, *about: Any) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "specexp" / folder / f"{_digest(*about)[:24]}.json"


def _stats(paths: Iterable[Path | str]) -> Iterator[tuple[str, int, int, int, int]]:
    for path in paths:
        with suppress(OSError, ValueError):
            yield str(path), *files.stamp(path)


def _digest(*parts: Any) -> str:
    return sha256(repr(parts).encode()).hexdigest()
