"""Where compiled code is kept: a folder of this user alone, so that no other user's code is run."""

import os
import shutil
from pathlib import Path


def code_folder() -> Path:
    """The folder of all compiled code, which may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specexp"


def private(folder: Path) -> Path:
    """This folder, made if need be, in which only its owner can read or write. One that others
    could write to is emptied. Raises OSError if it belongs to someone else."""
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
    """Have Triton keep what it compiles there too, unless the environment names a place."""
    if not {"TRITON_CACHE_DIR", "TRITON_HOME"} & os.environ.keys():
        os.environ["TRITON_CACHE_DIR"] = str(private(private(code_folder()) / "triton"))
