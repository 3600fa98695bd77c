"""Compiles the C++ code for this CPU, once per machine, and calls it from Python.

On a CPU each of torch's operations takes microseconds, which is much of a small model's round.
passes.cpp runs a network over a few rows as one call (passes.py); rounds.cpp, chance.cpp and
scans.cpp hold the kernels of operations (ops.py). A compiled file is kept under a name that depends
on its sources, the compiler, its flags and the processor. Without a C++ compiler, or if a file does
not compile, one warning says why and torch's operations run instead, as with SPECEXP_NATIVE=off.
"""

import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from ctypes import CDLL, Array, addressof, c_double, c_int64, c_void_p, cast
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specexp.fast.private import code_folder, private
from specexp.ops import switched_off

log = logging.getLogger("specexp")

FOLDER = Path(__file__).parent
# Every product that is added to a sum is a fused multiply-add. For some processors gcc would avoid
# these in tight loops only, and a token's sums would depend on how many tokens share its pass.
MULTIPLY_ADD = "-ffp-contract=fast", "--param=avoid-fma-max-bits=0"
FLAGS = ("-std=c++17", "-O3", "-march=native", *MULTIPLY_ADD, "-fopenmp", "-shared", "-fPIC")
LONGEST_S = 300  # seconds that compiling one file may take
FILES = ("passes", "rounds", "chance", "scans")
# Why code is not compiled, kept or loaded: no folder, a command that cannot be split, ...
FAULTS = OSError, AttributeError, RuntimeError, ValueError, subprocess.SubprocessError
WAITING = (
    f"compiling kernels for this CPU, once a machine: {len(FILES)} files of at most {LONGEST_S} s "
    "each (SPECEXP_NATIVE=off does without, slower)"
)


class ThisThread(threading.local):
    """`calls`: the list to which this thread's calls of compiled functions are appended; None: they
    are not recorded."""

    calls: list[Any] | None = None


this_thread = ThisThread()


class CompiledCall(NamedTuple):
    """A call of a compiled function: its address, and its arguments as numbers and as objects. A
    parameter that is given other data later leaves them as they are."""

    function: int
    numbers: Array[c_int64]
    arguments: tuple[Any, ...]


class Function:
    """A compiled function, called with numbers, tensors and ctypes objects. The caller checks
    dtypes and strides, as tensors are passed by address. Returns what the function returns, an
    integer: for most of them, 0 if it fails. `code` takes the arguments as int64 already."""

    def __init__(self, code: CDLL, name: str) -> None:
        self.code = code[f"call_{name}"]
        self.code.restype = c_int64
        self.address: int = cast(self.code, c_void_p).value or 0

    def __call__(self, *arguments: Any) -> int:
        numbers = (c_int64 * len(arguments))(*map(_number, arguments))
        if this_thread.calls is not None:
            held = tuple(x.detach() if isinstance(x, Tensor) else x for x in arguments)
            this_thread.calls.append(CompiledCall(self.address, numbers, held))
        result: int = self.code(numbers)
        return result


def _number(x: Any) -> int:
    """An argument as int64: an integer itself, the bits of a float, or the address of an object, 0
    for None."""
    if isinstance(x, Tensor):
        return x.data_ptr()
    if isinstance(x, float):
        return c_int64.from_buffer(c_double(x)).value
    if x is None:
        return 0
    return x if isinstance(x, int) else addressof(x)


def address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def addresses(tensors: Sequence[Tensor]) -> Array[c_void_p]:
    """The addresses of these tensors as one array, which a `Function` takes as an argument."""
    return (c_void_p * len(tensors))(*map(address, tensors))


def library() -> Any:
    """The compiled functions as attributes, and the `files` that hold them; compiled first if need
    be. None with SPECEXP_NATIVE=off or, after one warning that says why, if they cannot be."""
    return None if off() else _loaded()


def functions() -> Any:
    """The same, whatever SPECEXP_NATIVE is by now."""
    return _loaded()


def state() -> str:
    """In words: the compiled code's compiler, instructions and digest, or why there is none."""
    if off():
        return "off by SPECEXP_NATIVE: torch's operations"
    if compiler() is None:
        return "no C++ compiler: torch's operations"
    if not (code := _loaded()):
        return "not compiled: torch's operations"
    files = b"".join(file.read_bytes() for file in code.files if file.exists())
    return f"compiled by {compiler()}, {vectors()}, {hashlib.sha256(files).hexdigest()[:8]}"


def uncompiled() -> list[Path]:
    """The libraries still to be compiled; none if that was tried in this process or cannot be."""
    if off() or compiler() is None or _loaded.cache_info().currsize:
        return []
    try:
        return [file for x in FILES if not (file := _file(FOLDER / f"{x}.cpp")).exists()]
    except FAULTS:  # which `library` will meet, too
        return []


def off() -> bool:
    return switched_off("SPECEXP_NATIVE")


@cache
def _loaded() -> Any:
    waiting = threading.Timer(1, print, [WAITING], {"file": sys.stderr, "flush": True})
    waiting.daemon = True
    waiting.start()
    try:
        codes = {x: _library(FOLDER / f"{x}.cpp") for x in FILES}
        functions = {name: Function(code, name) for x, code in codes.items() for name in _names(x)}
        files = [Path(code._name) for code in codes.values()]
        return SimpleNamespace(files=files, **functions)
    except FAULTS as e:
        output = getattr(e, "stderr", None) or str(e)
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        why = next((line for line in lines if "error" in line), lines[0] if lines else repr(e))
        log.warning("passes on this CPU are not compiled, which makes them slower: %s", why)
        return None
    finally:
        waiting.cancel()


def _names(file: str) -> list[str]:
    """The names of a file's functions that Python calls, read from its lines with CALLED."""
    return re.findall(r"^CALLED\((\w+)", (FOLDER / f"{file}.cpp").read_text(), re.MULTILINE)


def compiler() -> str | None:
    return os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)


def _command() -> list[str]:
    if (program := compiler()) is None:
        raise OSError("there is no C++ compiler (install g++, or set CXX)")
    return [*shlex.split(program), *FLAGS]


def _file(source: Path) -> Path:
    """The path of this source's shared library. Its name is a digest of the source, all headers,
    the compiler's command, the C library and the processor."""
    texts = (text.read_bytes() for text in (source, *sorted(source.parent.glob("*.h"))))
    parts = *texts, repr((_command(), platform.libc_ver())).encode(), _processor().encode()
    return code_folder() / f"{source.stem}-{hashlib.sha256(b' '.join(parts)).hexdigest()[:16]}.so"


def _library(source: Path) -> CDLL:
    """The shared library of this source. One that was kept and does not load, for example after a
    power cut, is compiled anew, unless its folder is one from which nothing may be run."""
    file = _built(source)
    try:
        return CDLL(str(file))
    except OSError:
        if not os.access(file, os.X_OK):
            raise
        file.unlink()
        return CDLL(str(_built(source)))


def _built(source: Path) -> Path:
    """The shared library of this source, compiled first if need be. Raises OSError without a
    compiler or a private folder, and subprocess.SubprocessError if compiling fails."""
    file = _file(source)
    folder = private(file.parent)
    if not _own(file):
        with tempfile.TemporaryDirectory(dir=folder) as unfinished:
            whole = [*_command(), str(source), "-o", f"{unfinished}/{source.stem}.so"]
            subprocess.run(whole, check=True, capture_output=True, text=True, timeout=LONGEST_S)
            os.chmod(whole[-1], 0o700)
            os.replace(whole[-1], file)
    return file


def _own(file: Path) -> bool:
    """Whether this is a regular file, not a link, that this user owns and nobody else may write."""
    try:
        state = file.lstat()
    except FileNotFoundError:
        return False
    mine = stat.S_ISREG(state.st_mode) and state.st_uid == os.getuid()
    return mine and not state.st_mode & 0o022


def _processor() -> str:
    """A description of this processor that differs wherever -march=native may differ."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    flags = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    return f"{platform.system()} {platform.machine()} {platform.processor()} {sorted(flags)}"


def vectors() -> str:
    """The vector instructions of this CPU, in words: `AVX512 AMX`, `AVX512`, `AVX2`, ..."""
    return torch.backends.cpu.get_cpu_capability() + " AMX" * ("amx_bf16" in _processor())
