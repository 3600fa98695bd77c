"""The store: where results lie, who works on what, and the rename that makes a result.

It is `mlruns/` at the repository root, or SPECEXP_MLRUNS. `attempts/` holds work in progress,
`results/` what was committed, `failed/` and `replaced/` what was set aside, `claims/` who is at
work, `grids/` which keys are a grid's, whichever grid it was that made them. Locks are the
operating system's: a killed holder leaves none behind. Nothing here knows MLflow or notebooks.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specexp.errors import UserError
from specexp.lab import secret
from specexp.zoo import shelf

ROOT = Path(__file__).resolve().parents[2]
POINT, RESULT, TAGS = "point.json", "result.json", "tags.json"
MANIFEST = "manifest.json"
PATIENCE_S = 120.0
FULL = (errno.ENOSPC, errno.EDQUOT)
TROUBLE = (*FULL, errno.EIO, errno.EMFILE, errno.ENFILE)  # of the machine, not of permissions
GONE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO)  # a file that is damaged


class StoreBusy(UserError):
    """Somebody else holds a lock for longer than we wait."""

    code = 3


def root() -> Path:
    return shelf.made("")


def folder(name: str) -> Path:
    """A folder of the store, made if need be. Raises UserError where nothing may be written."""
    path = root() / name
    with _writing():
        path.mkdir(parents=True, exist_ok=True)
    return path


def identity() -> str:
    """Names this store among those that publish to one server; made at its first use."""
    path = folder("") / "id"
    if not path.exists():
        new = path.with_name(f"id-{uuid.uuid4().hex[:12]}")
        new.write_text(new.name.removeprefix("id-"))
        with contextlib.suppress(FileExistsError):
            os.link(new, path)  # the first of several wins, and nobody reads half a name
        new.unlink()
    return path.read_text()


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as e:
        if e.errno in TROUBLE:
            raise
        raise UserError(f"cannot write to {root()}: {e.strerror}; set SPECEXP_MLRUNS") from e


# --- claims --------------------------------------------------------------------------------------


@contextmanager
def claim(key: str) -> Iterator[bool]:
    """Is this key ours now? One process or thread at a time gets True, until it leaves or dies."""
    path = folder("claims") / key
    descriptor = _lock(path)
    if descriptor is None:
        yield False
        return
    try:
        os.truncate(descriptor, 0)
        os.write(descriptor, f"pid {os.getpid()} on {socket.gethostname()}: {_command()}".encode())
        yield True
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _lock(path: Path) -> int | None:
    while True:
        with _writing():
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except BlockingIOError:
            if _held(descriptor):
                os.close(descriptor)
                return None
        except FileNotFoundError:
            pass
        os.close(descriptor)  # it was only looked at, or its holder removed it between our steps


def _held(descriptor: int) -> bool:
    """Does somebody hold this lock? To ask is to have a share in it, until the file is closed."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def holder(key: str) -> str | None:
    """Who has claimed this key, or None."""
    path = root() / "claims" / key
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return os.read(descriptor, 200).decode(errors="replace") if _held(descriptor) else None
    finally:
        os.close(descriptor)


def claims() -> dict[str, str]:
    """Every key that is claimed now, and by whom."""
    place = root() / "claims"
    names = sorted(p.name for p in place.iterdir()) if place.is_dir() else []
    return {name: who for name in names if (who := holder(name))}


def _command() -> str:
    return secret.hide(" ".join([Path(sys.argv[0]).name, *sys.argv[1:]]))[:150]


@contextmanager
def alone(what: str, waiting: Callable[[str], None] = lambda said: None) -> Iterator[None]:
    """Wait until nobody else does `what`, then do it. Raises StoreBusy after PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with claim(what) as ours:
            if ours:
                yield
                return
        if time.monotonic() > deadline:
            raise StoreBusy(f"{root()}: {what} is held by {holder(what)}; wait, or stop it")
        waiting(f"waiting for {holder(what) or 'another run'}")
        time.sleep(0.1)


# --- grids ----------------------------------------------------------------------------------------


def remember(grid: str, keys: Set[str]) -> None:
    """These keys are of points of a grid."""
    if new := keys - keys_of(grid):
        with (folder("grids") / f"{grid}.txt").open("a") as file:
            file.writelines(f"\n{key}" for key in sorted(new))


def keys_of(grid: str) -> set[str]:
    """All that were ever remembered."""
    file = root() / "grids" / f"{grid}.txt"
    return set(file.read_text().split()) if file.exists() else set()


# --- attempts and results -----------------------------------------------------------------------


def new_attempt(key: str) -> Path:
    path = folder("attempts") / f"{key}-{uuid.uuid4().hex[:8]}"
    path.mkdir()
    return path


def key_of(attempt: Path) -> str:
    """The key an attempt, or what became of it, is for."""
    return attempt.name.rpartition("-")[0]


def of(key: str, where: str) -> list[Path]:
    """The attempts for a key, or what became of them, in one of the store's folders."""
    there = folder(where)
    return [there / name for name in os.listdir(there) if name.rpartition("-")[0] == key]


def result_of(key: str) -> Path:
    return root() / "results" / key


def commit(attempt: Path, key: str, tags: Mapping[str, str]) -> Path:
    """Make an attempt a result: everything on disk, then one rename. Returns its new folder.

    A result that is there already is set aside under `replaced/`.
    """
    known = {"run_key": key, "attempt": attempt.name, "ended": now_ms(), **tags}
    (attempt / TAGS).write_text(json.dumps(known))
    digests = {str(p.relative_to(attempt)): digest(p.read_bytes()) for p in files_in(attempt)}
    (attempt / MANIFEST).write_text(json.dumps(digests, indent=1))
    return _settle(attempt, folder("results") / key)


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def ended_ms(folder: Path) -> int:
    """When what a result or a failed attempt holds ended. Of one that does not say, as older ones,
    when its tags were written."""
    said = read(folder / TAGS).get("ended")
    return said if isinstance(said, int) else (folder / TAGS).stat().st_mtime_ns // 1_000_000


def finish(attempt: Path) -> bool:
    """Make an attempt a result whose `commit` was cut short when it was whole. False where it was
    not, or a result is there."""
    result = folder("results") / key_of(attempt)
    if result.exists() or not intact(attempt):
        return False
    _settle(attempt, result)
    return True


def _settle(attempt: Path, result: Path) -> Path:
    files = files_in(attempt)
    folders = sorted({p.parent for p in files} | {attempt}, reverse=True)
    for path in [*files, *folders]:
        _fsync(path)
    if result.exists():
        set_aside(result, "replaced")
    os.rename(attempt, result)
    _fsync(result.parent)
    return result


def set_aside(path: Path, where: str) -> Path:
    """Move an attempt or a result out of the way, whole; returns its new place."""
    name = path.name if path.parent.name == "attempts" else f"{path.name}-{uuid.uuid4().hex[:8]}"
    kept = folder(where) / name
    os.rename(path, kept)
    return kept


def files_in(folder: Path) -> list[Path]:
    """Every regular file below a folder. Raises OSError for a part that cannot be listed."""

    def refuse(e: OSError) -> None:
        raise e

    walk = os.walk(folder, onerror=refuse)
    found = (Path(place, name) for place, _, names in walk for name in names)
    return sorted(p for p in found if p.is_file() and not p.is_symlink())


def only_files(attempt: Path) -> None:
    """Remove what is neither a file nor a folder: a link could lead what is copied elsewhere."""
    for path in attempt.rglob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            path.unlink()


def intact(result: Path) -> bool:
    """Is this result complete and unchanged since it was committed?

    Raises OSError where that cannot be told now (too many open files, not ours to read).
    """

    def as_committed() -> bool:
        digests = load(result / MANIFEST)
        if not {RESULT, TAGS} <= digests.keys():
            return False
        data = {name: (result / name).read_bytes() for name in digests}
        mine = json.loads(data[TAGS])["run_key"] in (result.name, key_of(result))
        return mine and all(digest(data[name]) == d for name, d in digests.items())

    return sound(as_committed)


def sound(check: Callable[[], bool]) -> bool:
    """What `check` finds in files; False where one is torn or gone. Raises its other OSErrors."""
    try:
        return check()
    except (KeyError, TypeError, ValueError):
        return False
    except OSError as e:
        if e.errno in GONE:
            return False
        raise


def load(path: Path) -> dict[str, Any]:
    """A JSON file of the store. Raises OSError, and ValueError or TypeError where it is torn."""
    return dict(json.loads(path.read_text()))


def read(path: Path) -> dict[str, Any]:
    """What can be read of a JSON file of the store: nothing when there is none or it is torn."""
    try:
        return load(path)
    except (OSError, TypeError, ValueError):
        return {}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
