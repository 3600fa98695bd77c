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
from typing import Any, Literal, TypeAlias

from specexp import fitting
from specexp.errors import UserError
from specexp.zoo import files, shelf
from specexp.zoo.shelf import PACKAGE, SOURCE

SHELL = ("_", "SHLVL", "OLDPWD", "COLUMNS", "LINES")  # variables that decide nothing
TICK = 20_000_000  # ns that a file's time of change may be behind the clock
LARGE = 100_000_000  # bytes from which on the digest of a file is kept
MODEL = (  # the files of a model's folder that decide what it computes
    "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.spm", "*.codes", "*.vocab", "*.bpe",
    "*.tokenizer", "tokenizer*", "vocab*", "merges*",
    "*.safetensors", "*.pt", "*.bin", "additional_chat_templates/*.jinja",
)  # fmt: skip
OWN_CODE = Path("own")  # stands for the files of code of one's own (`Known.own_files`)
Answer: TypeAlias = tuple[Any, Iterable[Path] | None]
"""Plain data, and the files and folders that decide it, names of such that do not exist included;
None in their place if they are not all known: then the answer is not kept."""
Kernels: TypeAlias = Literal["compiled", "as found", "not asked"]
"""What to find out of this machine's kernels: which run once they are compiled, for which it may
wait; which run as it is; or nothing, since it takes torch."""


class Known:
    """Remembers what functions return: `known(f, x)` for as long as this object lives, in which no
    file changes; `known.cached(f, x)`, if `on_disk`, also in the user's cache folder. A UserError
    or OSError that a function raises is remembered, too, but not on disk.

    `own_files`: the files of one's own code that may run, None if they are not all known.
    """

    def __init__(self, on_disk: bool = False, kernels: Kernels = "compiled") -> None:
        self.on_disk, self.kernels = on_disk, kernels
        self.own_files: list[Path] | None = None
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
        question = _name(function), *args
        self._answers[self._look_up, question] = self._look_up(*question, again=True), None
        return self.cached(function, *args)

    def _look_up(self, function: str, *args: Any, again: bool = False) -> Any:
        if not self.on_disk:
            return _ask(function, *args)[0]

        def ask() -> Answer:
            answer, read = _ask(function, *args)
            if read is None or OWN_CODE not in read:
                return answer, read
            own = self.own_files
            return answer, None if own is None else {*read, *own} - {OWN_CODE}

        return _kept((function, args, os.getcwd()), ask, self._always, again)

    @cached_property
    def _always(self) -> str:
        """A digest of what decides every answer."""
        code = (path for path in PACKAGE.rglob("*") if path.suffix in SOURCE)
        cards = (model.path / "zoo.json" for model in shelf.models())
        folders = (*sys.path, *os.environ.get("PATH", "").split(os.pathsep))
        devices = (*Path("/dev").glob("nvidia*"), Path("/proc/driver/nvidia/version"))
        variables = sorted((n, v) for n, v in os.environ.items() if n not in SHELL)
        usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else [os.cpu_count()]
        stats = _stats((*sorted(code), *cards, *folders, *devices))
        return _digest(*stats, variables, sorted(usable))


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


def facts_of_model(source: str) -> Answer:
    """The name of a model and a digest. Of a folder: of its configuration, tokenizer and weights.
    Of a hub id: the revision in the local cache, or the id itself if it is not cached. The digest
    is the same with `+int8`."""
    bare, how = fitting.split(source)
    folder = Path(bare)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(bare, "config.json")
        return [source, Path(cached).parent.name if isinstance(cached, str) else bare], None
    found = {f for pattern in MODEL for f in folder.glob(pattern) if f.is_file()}
    contents = {str(f.relative_to(folder)): digest_of(f) for f in found}
    return [folder.name + how, digest(contents)], with_contents(folder)


def digest(value: Any) -> str:
    """16 hexadecimal digits of a value's canonical JSON."""
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def digest_of(path: Path) -> str:
    """SHA-256 of a file. It is read once, by all processes of a user if it is large, and again when
    it is another file or its size or times of change differ."""
    return _digest_of(path, *files.stamp(path))


@lru_cache(maxsize=4096)
def _digest_of(path: Path, *stamp: int) -> str:
    path = path.resolve()

    def read() -> Answer:
        with path.open("rb") as file:
            return file_digest(file, "sha256").hexdigest(), [path]

    large = stamp[1] >= LARGE
    return str(_kept(("digest", str(path)), read) if large else read()[0])


def _kept(
    question: tuple[Any, ...], ask: Callable[[], Answer], always: str = "", again: bool = False
) -> Any:
    """The answer to a question: as it is kept in the user's cache while what decides it is as it
    was, unless it is to be asked again. always: a digest of more that decides it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    file = cache / "specexp" / "known" / f"{_digest(*question)[:24]}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        record = {} if again else json.loads(file.read_text())
        if record["state"] == _digest(always, *_stats(record["read"])):
            return record["answer"]
    asked_at = time.time_ns() - TICK
    answer, read = ask()
    if read is None:
        return answer
    deciding = sorted({*map(str, read)})
    states = [*_stats(deciding)]
    if all(max(state[3:]) < asked_at for state in states):  # none changed meanwhile
        record = {"answer": answer, "read": deciding, "state": _digest(always, *states)}
        with suppress(OSError), files.whole(file) as partial:
            partial.write_text(json.dumps(record))
    return answer


def _stats(paths: Iterable[Path | str]) -> Iterator[tuple[str, int, int, int, int]]:
    for path in paths:
        with suppress(OSError, ValueError):
            yield str(path), *files.stamp(path)


def _digest(*parts: Any) -> str:
    return sha256(repr(parts).encode()).hexdigest()
