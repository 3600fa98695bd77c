"""The folder of compiled code, which its owner alone can read and write.

Compiling is slow, so the C++ libraries (cpu/build.py) and Triton's kernels are kept for the next
process. A library that another user has put there would run with this user's rights. So a folder
that belongs to someone else is refused, and one that others could write to is emptied.
"""

import os
import shutil
from pathlib import Path


def code_folder() -> Path:
    """The folder of all compiled code, which may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specexp"


def private(folder: Path) -> Path:
    """Make this folder if need be, close it to all other users, and return it. If others could
    write to it, its contents are deleted. Raises OSError if it belongs to another user."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = folder.stat()
    if state.st_uid != os.getuid():
        raise OSError(f"{folder} belongs to another user: set XDG_CACHE_HOME to a folder of yours")
    if state.st_mode & 0o077:
        folder.chmod(0o700)
    if state.st_mode & 0o022:
        for entry in folder.iterdir():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    return folder


def keep_triton() -> None:
    """Make Triton keep its compiled kernels there too, by setting TRITON_CACHE_DIR, unless that or
    TRITON_HOME is set already. Raises OSError if the folder cannot be made or is another user's."""
    if not {"TRITON_CACHE_DIR", "TRITON_HOME"} & os.environ.keys():
        os.environ["TRITON_CACHE_DIR"] = str(private(private(code_folder()) / "triton"))
