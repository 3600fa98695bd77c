"""Files and folders that are written whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specexp.errors import UserError


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path beside `path`: the file or folder that the `with` block makes there takes the place of
    `path` at its end, unless the block raises. Readers find the old one or the new one, never a
    part. Raises OSError."""
    partial = path.with_name(f".{path.name.removeprefix('.')}-{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield partial
        if partial.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        partial.replace(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        partial.unlink(missing_ok=True)


def write(path: Path, text: str) -> None:
    """Write a text file whole or not at all. Raises UserError when that fails."""
    try:
        with whole(path) as partial:
            partial.write_text(text)
    except OSError as e:
        raise UserError(f"cannot write {path}: {e.strerror}; choose another path") from e


def stamp(path: Path | str) -> tuple[int, int, int, int]:
    """What tells a file from one with other content without reading it: its inode, size and times
    of modification and of change. The last cannot be set, as `touch` and `cp -p` set the former."""
    state = os.stat(path)
    return state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns
