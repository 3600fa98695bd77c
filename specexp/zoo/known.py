"""Answers about models and this machine, kept while nothing that decides them has changed.

To find out what a model is, or which kernels run here, takes torch and transformers: seconds of a
core, beside a point that may be timed. An answer is kept until the size or the time of change of
something that decides it differs: specexp's code, the models here, the packages and programs that
are installed, the devices, the environment, and the files that the answer was read from.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from specexp.errors import UserError
from specexp.zoo import files, shelf

SHELL = ("_", "SHLVL", "OLDPWD", "COLUMNS", "LINES")  # variables that decide nothing
TICK = 20_000_000  # ns that a file's time of change may be behind the clock
OWN = Path("own")  # in place of the files of code of one's own
Answer: TypeAlias = tuple[Any, Iterable[Path] | None]
"""Plain data, and the files and folders that decide it (names of such that do not exist included);
None in their place if they are not all known, so that the answer is not kept."""


class Known:
    """Answers to questions, each a function and its arguments. A function is called once, while no
    file changes; a UserError or OSError that it raises is an answer, too.

    kept: lasting answers are looked up, and written, in the user's cache folder. waits: an answer
    may wait for a compiler. `own`: the files of one's own code that may run, None if they are not
    all known.
    """

    def __init__(self, kept: bool = False, waits: bool = True) -> None:
        self.kept, self.waits, self.own = kept, waits, None if kept else list[Path]()
        self._answers: dict[Any, tuple[Any, Exception | None]] = {}

    def __call__(self, find: Callable[..., Any], *args: Any) -> Any:
        if (find, args) not in self._answers:
            try:
                self._answers[find, args] = find(*args), None
            except (UserError, OSError) as e:
                self._answers[find, args] = None, e
        answer, error = self._answers[find, args]
        if error:
            raise error
        return answer

    def lasting(self, find: str, *args: Any) -> Any:
        """The answer that a function returns for these texts and numbers, in this folder. find:
        where it is, `specexp.MODULE.FUNCTION`; it is imported if it has to be asked."""
        return self(self._lasting, find, *args)

    def anew(self, find: str, *args: Any) -> Any:
        """The same, asked in any case."""
        answer = self._asked(find, *args)
        self._answers[self._lasting, (find, *args)] = answer, None
        return answer

    def _lasting(self, find: str, *args: Any) -> Any:
        with suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(self._file(find, *args).read_text()) if self.kept else {}
            if record["state"] == self._state(record["read"]):
                return record["answer"]
        return self._asked(find, *args)

    def _file(self, find: str, *args: Any) -> Path:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cache / "specexp" / "known" / f"{_digest(find, args, os.getcwd())[:24]}.json"

    def _asked(self, find: str, *args: Any) -> Any:
        if not self.kept:
            return _ask(find, *args)[0]
        asked_at = time.time_ns() - TICK
        answer, read = _ask(find, *args)
        if read is None or (OWN in read and self.own is None):
            return answer
        own = self.own or () if OWN in read else ()
        deciding = sorted({str(path) for path in (*read, *own) if path != OWN})
        if all(state[3] < asked_at for state in _stats(deciding)):
            record = {"answer": answer, "read": deciding, "state": self._state(deciding)}
            with suppress(OSError), files.whole(self._file(find, *args)) as partial:
                partial.write_text(json.dumps(record))
        return answer

    def _state(self, read: Iterable[str]) -> str:
        return _digest(self._around, *_stats(read))

    @cached_property
    def _around(self) -> str:
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


def _ask(find: str, *args: Any) -> Answer:
    module, _, function = find.rpartition(".")
    collecting = gc.isenabled()
    gc.disable()  # imports leave little garbage: to look for it takes an eighth of their time
    try:
        answer: Answer = getattr(import_module(module), function)(*args)
        return answer
    finally:
        if collecting:
            gc.enable()


def within(*paths: Path) -> list[Path]:
    """These files and folders, and the files in the folders and one folder below."""
    return [p for path in paths for p in (path, *path.glob("*"), *path.glob("*/*"))]


def _stats(paths: Iterable[Path | str]) -> Iterator[tuple[str, int, int, int]]:
    for path in paths:
        with suppress(OSError, ValueError):
            state = os.stat(path)
            yield str(path), state.st_ino, state.st_size, state.st_mtime_ns


def _digest(*parts: Any) -> str:
    return sha256(repr(parts).encode()).hexdigest()
