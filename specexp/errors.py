"""The two errors a run may end with, any other exception being a bug, and words of messages."""

import difflib
import logging
import os
import sys
import threading
import traceback
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import islice
from numbers import Integral, Real
from pathlib import Path
from typing import Any

PATIENCE_S = 2.0
DEEPEST, LONGEST = 5, 40  # parts of a path in a name, and characters, at most
_TYPES = {
    "int": (Integral, "a whole number"), "float": (Real, "a number"), "str": (str, "a text"),
    "str | Sequence[str]": (Iterable, "a text or a list of texts"),
}  # fmt: skip


class UserError(Exception):
    """Bad input. The message is one line: what is wrong and what to do. `code`: the exit status."""

    code = 2

    def _render_traceback_(self) -> list[str]:
        """What Jupyter shows: the message alone, as the input is at fault and no line of code, or
        below the traceback of the exception that it explains."""
        cause = traceback.format_exception(self.__cause__) if self.__cause__ else []
        notes = getattr(self, "__notes__", [])
        return [*(part.rstrip() for part in cause), f"UserError: {self}", *notes]


class NonFiniteLogits(Exception):
    """A model produced NaN or infinite logits, or its generation config left no token. No token
    drawn from them is ever emitted."""


def check_type(name: str, value: Any, kind: str) -> None:
    """Raise UserError for a value of another type than an annotation names. True is no number, and
    a whole number must fit into 64 bits."""
    of, words = _TYPES.get(kind.removesuffix(" | None"), (object, ""))
    if not isinstance(value, of) or (words and isinstance(value, bool)):
        raise UserError(f"{name} is {value!r:.40}; it must be {words}")
    if isinstance(value, Integral) and not -(2**63) <= int(value) < 2**63:
        raise UserError(f"{name} is {value!r:.40}, which is too large a number")


@cache
def warn_once(message: str, *values: Any) -> None:
    """Log a warning, once in a process for the same values."""
    logging.getLogger("specexp").warning(message, *values)


def panicked(e: BaseException) -> bool:
    """Whether a library in Rust panicked, mostly over its input: that is no Exception."""
    return type(e).__name__ == "PanicException"


@contextmanager
def refusing(what: str, advice: str = "") -> Iterator[None]:
    """Raise a UserError for whatever a library raises over bad input: `what` before its message,
    and what to do after it."""
    try:
        with _one_report():
            yield
    except BaseException as e:
        if isinstance(e, UserError) or not (isinstance(e, Exception) or panicked(e)):
            raise
        raise UserError("; ".join(filter(None, [f"{what}: {first_line(e)}", advice]))) from e


@contextmanager
def _one_report() -> Iterator[None]:
    """Drop the report that a panicking library writes to stderr, below Python: its exception says
    it again. All else is written a little later. Stderr is the process's, so only its main thread
    does so."""
    alone = threading.current_thread() is threading.main_thread()
    if not (alone and sys.__stderr__ and hasattr(os, "memfd_create")):
        yield
        return
    panic, stderr = False, os.dup(2)
    with open(os.memfd_create("stderr"), "w+b") as aside:
        os.dup2(aside.fileno(), 2)
        try:
            yield
        except BaseException as e:
            panic = panicked(e)
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            aside.seek(0)
            if not panic:
                with suppress(OSError):  # nobody may read it
                    os.write(2, aside.read())


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Say on stderr what is being waited for, where that takes longer than PATIENCE_S."""
    own = sys.stderr is not None and sys.stderr is sys.__stderr__
    stderr = os.fdopen(os.dup(2), "w") if own else sys.stderr  # also within `refusing`
    how = {"file": stderr, "flush": True}
    timer = threading.Timer(PATIENCE_S, print, [f"waiting for {what}"], how)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if own:
            stderr.close()


def first_line(e: BaseException) -> str:
    """The first line of a message, and the second after a colon; the type of an empty one."""
    first, *more = str(e).strip().splitlines() or [type(e).__name__]
    if isinstance(e, KeyError):  # its message is the key alone
        first = f"there is no {first}"
    return f"{first.rstrip()} {more[0].strip()}" if more and first.rstrip().endswith(":") else first


def ran_out(message: str) -> bool:
    """Whether this is the message of a RuntimeError that torch raises when memory runs out: on a
    CPU, by an allocator or a driver of a GPU, or by cuBLAS."""
    phrases = "not enough memory", "can't allocate memory", "out of memory", "STATUS_ALLOC_FAILED"
    return any(words in message for words in phrases)


def meant(name: str, names: Iterable[str], otherwise: str = "") -> str:
    """`; did you mean 'this'?` of the nearest of these names, or `otherwise` if none is near."""
    near = nearest(name, names)
    return f"; did you mean {near!r}?" if near else otherwise


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The one of these names that is most like this one, whatever the case; None if none is."""
    names = {other.casefold(): other for other in names}
    near = difflib.get_close_matches(name.casefold(), names, 1)
    return names[near[0]] if near else None


def meant_beside(path: Path, otherwise: str = "", folder: Path = Path()) -> str:
    """`meant` of what stands beside a path, relative to a folder, that does not exist, or of what
    a shell would take it for."""
    with suppress(OSError, ValueError, RuntimeError):
        if (whole := path.expanduser()) != path and whole.exists():
            return f"; did you mean {str(whole)!r}?"
        others: Iterable[Path] = islice((folder / path).parent.iterdir(), 1000)
        others = sorted(others, key=lambda other: other.suffix == path.suffix)
        names = {other.stem: other.name for other in others}  # an equal ending is no likeness
        if near := nearest(path.stem, names):
            return f"; did you mean {str(path.with_name(names[near]))!r}?"
    return otherwise


def counted(n: float, noun: str, ending: str = "s") -> str:
    """`1 token`, `2 tokens`, `1,024 tokens`."""
    return f"{n:,.12g} {noun}{ending * bool(n != 1)}"


def brief(value: Any, among: Collection[Any] = ()) -> str:
    """A parameter's value as part of a name. A path or hub id is cut to its last parts, as few as
    tell it from the other values in `among`; a method before it stays: `eagle:heads`."""
    long = "/" in str(value) or len(str(value)) > LONGEST
    others = [other for other in among if other != value] if long else []
    for parts in range(1, DEEPEST + 1):
        text = last_parts(value, parts)
        if text not in (last_parts(other, parts) for other in others):
            return text
    return str(value)


def last_parts(value: Any, parts: int) -> str:
    """A path or hub id cut to its last parts, a method before it kept; other values as text."""
    text = str(value)
    if isinstance(value, str) and "/" in value:
        method, colon, path = value.rpartition(":")
        text = method + colon + "/".join(path.rstrip("/").split("/")[-parts:])
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
