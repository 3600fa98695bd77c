"""The store: a folder of attempts and results, with locks and an atomic commit.

The store is `mlruns/` at the repository root, or SPECEXP_MLRUNS. `attempts/` holds work in
progress, `results/` committed results, `failed/` and `replaced/` what was set aside, `claims/` the
lock files, `grids/` the run keys and the file of each grid. Locks are `flock` locks, which the
kernel releases when their holder dies. This module knows nothing of MLflow or notebooks.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specexp.errors import UserError
from specexp.tracking import redact
from specexp.zoo import shelf

if TYPE_CHECKING:
    import pandas as pd

ROOT = Path(__file__).resolve().parents[2]
POINT, RESULT, TAGS = "point.json", "result.json", "tags.json"
NOTEBOOK, PAGE = "notebook.ipynb", "notebook.html"  # as they ran; of a grid's points alone
MANIFEST = "manifest.json"
SETUP = "setup"  # a claim, see `claim_setup`
MARKER, NEW_NAMES = ".published", ".label.json"  # written after the commit, never by a notebook
PATIENCE_S = 120.0
FULL = (errno.ENOSPC, errno.EDQUOT)
MACHINE_ERRORS = (*FULL, errno.EIO, errno.EMFILE, errno.ENFILE)  # as opposed to permissions
DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO)  # the file is lost or unreadable


class StoreBusy(UserError):
    """Another process held a lock for longer than PATIENCE_S."""

    code = 3


def root() -> Path:
    """The store's folder, see `shelf.store`."""
    return shelf.store()


def standing() -> Path:
    """The store's folder, or the nearest above it if it does not exist yet."""
    return next(path for path in (root(), *root().parents) if path.exists())


def folder(name: str) -> Path:
    """A folder of the store, created if missing. Raises UserError if it cannot be written to."""
    path = root() / name
    with _writing():
        path.mkdir(parents=True, exist_ok=True)
    return path


def listed(name: str) -> list[Path]:
    """The entries of a folder of the store, sorted; none if it does not exist."""
    path = root() / name
    return sorted(path.iterdir()) if path.is_dir() else []


def from_root(path: Path) -> str:
    """A path in the repository, from there; "" for one elsewhere."""
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""


def store_id() -> str:
    """A random id that tells this store's runs from others' on one MLflow server."""
    path = folder("") / "id"
    if path.exists() and not path.read_text().strip():  # a disk was full, or somebody emptied it
        path.unlink(missing_ok=True)
    if not path.exists():
        new = path.with_name(f"id-{uuid.uuid4().hex[:12]}")
        new.write_text(new.name.removeprefix("id-"))
        with suppress(FileExistsError):
            os.link(new, path)  # atomic: the first process wins, and nobody reads half an id
        new.unlink()
    return path.read_text()


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as e:
        if e.errno in MACHINE_ERRORS:
            raise
        raise UserError(
            f"cannot write to {root()}: {e.strerror}; set SPECEXP_MLRUNS to a writable folder"
        ) from e


# --- claims --------------------------------------------------------------------------------------


@contextmanager
def claim(key: str, home: Path | None = None) -> Iterator[bool]:
    """Lock a key, here or in another folder, for the `with` block; yields False if it is held."""
    path = (home or folder("claims")) / key
    descriptor = _lock(path)
    if descriptor is None:
        yield False
        return
    try:
        command = redact.hide(" ".join([Path(sys.argv[0]).name, *sys.argv[1:]]))[:150]
        os.truncate(descriptor, 0)
        os.write(descriptor, f"pid {os.getpid()} on {socket.gethostname()}: {command}".encode())
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
        os.close(descriptor)  # `_held` of another process, or the holder's unlink, got in between


def _held(descriptor: int) -> bool:
    """Whether another process holds this lock. If none does, ours is shared until it is closed."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def holder(key: str) -> str | None:
    """The process that has claimed this key ("pid 7 on host: command"), or None."""
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
    """Every claimed key and its holder."""
    return {path.name: who for path in listed("claims") if (who := holder(path.name))}


@contextmanager
def claim_setup(tell: Callable[[str], None] = lambda message: None) -> Iterator[None]:
    """Hold the claim of one process at a time that may create or rebuild the database, for the
    `with` block. While another one has it, `tell` is called with a message. Raises StoreBusy after
    PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with claim(SETUP) as ours:
            if ours:
                yield
                return
        locked = f"locked for {SETUP} by {holder(SETUP) or 'another process'}"
        if time.monotonic() > deadline:
            raise StoreBusy(f"{root()} is {locked}: wait for it, or stop it")
        tell(f"waiting for the store, {locked}")
        time.sleep(0.1)


# --- grids ----------------------------------------------------------------------------------------


def grid_name(file: Path) -> str:
    """What a grid file is called here: by its stem, with a digest of its path behind it if another
    file, which is still there, has that name."""
    path, owner = _path_of(file), root() / "grids" / f"{file.stem}.file"
    other = owner.read_text() if owner.exists() else path
    taken = other != path and (ROOT / other).is_file()
    return f"{file.stem}-{digest(path.encode())[:6]}" if taken else file.stem


def _path_of(file: Path) -> str:
    full = file.parent.resolve() / file.name
    return from_root(full) or str(full)


def remember(file: Path, keys: Set[str]) -> None:
    """Add run keys to those of a grid's points. One process at a time may do so."""
    name, path = grid_name(file), _path_of(file)
    owner = folder("grids") / f"{name}.file"
    if not owner.exists() or owner.read_text() != path:
        owner.write_text(path)
    if new := keys - keys_of(name):
        with (folder("grids") / f"{name}.txt").open("a") as kept:
            kept.writelines(f"\n{key}" for key in sorted(new))


def keys_of(grid: str) -> set[str]:
    """The run keys of every point that the grid of this name ever had, whichever grid ran it."""
    file = root() / "grids" / f"{grid}.txt"
    return set(file.read_text().split()) if file.exists() else set()


# --- attempts and results -----------------------------------------------------------------------


def new_attempt(key: str) -> Path:
    path = folder("attempts") / f"{key}-{uuid.uuid4().hex[:8]}"
    path.mkdir()
    return path


def key_of(path: Path) -> str:
    """The run key of a result, or of a folder elsewhere in the store, named `<key>-<random>`."""
    return path.name if path.parent.name == "results" else path.name.rpartition("-")[0]


def attempts_of(key: str, where: str) -> list[Path]:
    """The folders of a run key in `attempts/`, `failed/` or `replaced/`."""
    return [path for path in listed(where) if key_of(path) == key]


def result_of(key: str) -> Path:
    return root() / "results" / key


def commit(attempt: Path, key: str, tags: Mapping[str, str]) -> Path:
    """Turn an attempt into a result: fsync every file, then rename the folder. Returns the result.

    An existing result of this key is moved to `replaced/`.
    """
    facts = {"run_key": key, "attempt": attempt.name, "ended": now_ms(), **tags}
    (attempt / TAGS).write_text(json.dumps(facts))
    (attempt / MANIFEST).unlink(missing_ok=True)  # a notebook's own file of this name
    digests = {str(p.relative_to(attempt)): _digest_of(p) for p in files_in(attempt)}
    (attempt / MANIFEST).write_text(json.dumps(digests, indent=1))
    return _move_into_place(attempt, folder("results") / key)


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def ended_ms(folder: Path) -> int:
    """When a result or failed attempt ended, in milliseconds; 0 if it does not say."""
    ended = read(folder / TAGS).get("ended")
    return ended if isinstance(ended, int) else 0


def finish(attempt: Path) -> bool:
    """Complete an interrupted `commit`. False if the attempt is not intact or a result exists."""
    result = folder("results") / key_of(attempt)
    if result.exists() or not intact(attempt):
        return False
    _move_into_place(attempt, result)
    return True


def _move_into_place(attempt: Path, result: Path) -> Path:
    files = files_in(attempt)
    folders = sorted({p.parent for p in files} | {attempt}, reverse=True)
    for path in [*files, *folders]:
        _fsync(path)
    replaced = set_aside(result, "replaced") if result.exists() else None
    try:
        os.rename(attempt, result)
    except OSError:
        if replaced:
            os.rename(replaced, result)
        raise
    with suppress(OSError):  # the result is there; if the move is lost, `finish` repeats it
        _fsync(result.parent)
    return result


def set_aside(path: Path, where: str) -> Path:
    """Move an attempt or a result to another folder of the store; returns its new path."""
    name = path.name if path.parent.name == "attempts" else f"{path.name}-{uuid.uuid4().hex[:8]}"
    new = folder(where) / name
    os.rename(path, new)
    return new


def files_in(folder: Path) -> list[Path]:
    """Every regular file below a folder. Raises OSError if a subfolder cannot be listed."""

    def refuse(e: OSError) -> None:
        raise e

    walk = os.walk(folder, onerror=refuse)
    paths = (Path(below, name) for below, _, names in walk for name in names)
    return sorted(p for p in paths if p.is_file() and not p.is_symlink())


def is_folder(path: Path) -> bool:
    """Whether this is a folder itself, not a link to one."""
    return path.is_dir() and not path.is_symlink()


def only_files(attempt: Path) -> None:
    """Remove links and the like, through which copies could read other files, and what a notebook
    has called as MARKER or NEW_NAMES."""
    for path in [*attempt.glob(f"{MARKER}*"), *attempt.glob(NEW_NAMES)]:
        shutil.rmtree(path) if is_folder(path) else path.unlink()
    for path in attempt.rglob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            path.unlink()


@contextmanager
def ignoring_damage() -> Iterator[None]:
    """Ends the `with` block without an error if a file that it reads is torn or missing. Raises
    OSError if that cannot be determined now (too many open files, no permission)."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError):
        pass
    except OSError as e:
        if e.errno not in DAMAGE:
            raise


def intact(result: Path) -> bool:
    """Whether this result is complete and unchanged since it was committed."""
    with ignoring_damage():
        digests = load(result / MANIFEST)
        whole = all(_digest_of(result / name) == d for name, d in digests.items())
        return whole and {RESULT, TAGS} <= digests.keys() and _in_place(result)
    return False


def unchanged(result: Path, since: Path) -> bool:
    """Whether no file of a result changed since the file `since` was written. It asks for times of
    change alone: `intact` reads about a megabyte, from a cold disk for thousands of results."""
    with ignoring_damage():
        then = os.stat(since).st_ctime_ns  # no program can set this time back
        files = [MANIFEST, *load(result / MANIFEST)]
        folders = {name.rpartition("/")[0] for name in files} - {""}  # `since` may be in its own
        times = (os.stat(f"{result}/{name}").st_ctime_ns for name in (*files, *folders))
        return all(time < then for time in times) and _in_place(result)
    return False


def _in_place(result: Path) -> bool:
    """Whether a result lies in the folder of its key."""
    return bool(load(result / TAGS)["run_key"] in (result.name, key_of(result)))


def plain(value: Any) -> Any:
    """A parameter that JSON does not know: numbers and arrays of NumPy and torch as Python's."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise UserError(f"the parameter {value!r:.60} is no number, no text and no list of them")


def load(path: Path) -> dict[str, Any]:
    """Read a JSON file of the store. Raises OSError, and ValueError or TypeError if it is torn."""
    return dict(json.loads(path.read_text()))


def runs_in(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The runs that a record holds, each as a record: its own under "", and one for each drafter
    that its notebook compared with it."""
    own = {n: value for n, value in record.items() if n != "rivals"}
    rivals = record.get("rivals", {}).items()
    return {"": own} | {
        drafter: own | rival | {"params": own["params"] | {"drafter": drafter}}
        for drafter, rival in rivals
    }


def new_names(folder: Path) -> dict[str, Any]:
    """`experiment` and `tags` of a result whose notebook or experiment was renamed since
    (`presence.rename`); else an empty dictionary. Raises as `load`."""
    path = folder / NEW_NAMES
    return load(path) if path.exists() else {}


def tags_of(folder: Path) -> dict[str, Any]:
    """The tags that a result or failed attempt was committed with, under its new names if it has
    any. Raises as `load`."""
    return load(folder / TAGS) | new_names(folder).get("tags", {})


def rounds_of(result: Path) -> pd.DataFrame:
    """The table of rounds that a result keeps; empty if there is none that can be read."""
    import pandas as pd

    with suppress(OSError, ValueError):
        return pd.read_parquet(result / "tables" / "rounds.parquet")
    return pd.DataFrame()


def read(path: Path) -> dict[str, Any]:
    """Read a JSON file of the store; an empty dictionary if it is missing or torn."""
    try:
        return load(path)
    except (OSError, TypeError, ValueError):
        return {}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _digest_of(path: Path) -> str:
    """The digest of a file, which may be larger than memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
