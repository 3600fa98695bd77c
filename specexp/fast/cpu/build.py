"""Compiled code for a CPU: C++ that is compiled once per machine, and how Python calls it.

passes.cpp runs a network over a few rows as one call (passes.py); rounds.cpp, chance.cpp and
scans.cpp hold the kernels of operations (ops.py). Without a C++ compiler, or with
SPECEXP_NATIVE=off, torch's operations do the same.
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
from ctypes import CDLL, Array, addressof, c_bool, c_double, c_int64, c_void_p, cast
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specexp.fast.private import code_folder, private

log = logging.getLogger("specexp")

FOLDER = Path(__file__).parent
# Every product that is added is a fused multiply-add: for some processors gcc would leave it out in
# tight loops, and a token's sums would depend on the tokens beside it.
MULTIPLY_ADD = "-ffp-contract=fast", "--param=avoid-fma-max-bits=0"
FLAGS = ("-std=c++17", "-O3", "-march=native", *MULTIPLY_ADD, "-fopenmp", "-shared", "-fPIC")
LONGEST_S = 300  # for one file
FILES = ("passes", "rounds", "chance", "scans")
WAITING = (
    f"compiling kernels for this CPU, once a machine: {len(FILES)} files of at most {LONGEST_S} s "
    "each (SPECEXP_NATIVE=off does without, slower)"
)


class ThisThread(threading.local):
    """`calls`: a list to which this thread's calls of compiled functions are appended, or None."""

    calls: list[Any] | None = None


this_thread = ThisThread()


class CompiledCall(NamedTuple):
    """A call of a compiled function: its address, and its arguments as numbers and as objects."""

    function: int
    numbers: Array[c_int64]
    arguments: tuple[Any, ...]


class Function:
    """A compiled function of numbers, tensors and ctypes objects. Returns False if it failed."""

    def __init__(self, code: CDLL, name: str) -> None:
        self.code = code[f"call_{name}"]
        self.code.restype = c_bool
        self.address: int = cast(self.code, c_void_p).value or 0

    def __call__(self, *arguments: Any) -> bool:
        numbers = (c_int64 * len(arguments))(*map(_number, arguments))
        if this_thread.calls is not None:
            this_thread.calls.append(CompiledCall(self.address, numbers, arguments))
        done: bool = self.code(numbers)
        return done


def _number(x: Any) -> int:
    """How an argument is passed: a number, or its address."""
    if isinstance(x, Tensor):
        return x.data_ptr()
    if isinstance(x, float):
        return c_int64.from_buffer(c_double(x)).value  # its bit pattern
    return x if isinstance(x, int) else addressof(x)


def address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def addresses(tensors: Sequence[Tensor]) -> Array[c_void_p]:
    """The addresses of these tensors, as an argument."""
    return (c_void_p * len(tensors))(*map(address, tensors))


class Library(NamedTuple):
    """The compiled files, and the functions of all of them, by name."""

    files: dict[str, CDLL]
    functions: Any


def library() -> Library | None:
    """The compiled code, which is compiled if need be. None if it is turned off or cannot be
    compiled; one warning says why."""
    return None if off() else _loaded()


def state() -> str:
    """In words: the compiled code's compiler, instructions and digest, or why there is none."""
    if off():
        return "off by SPECEXP_NATIVE: torch's operations"
    if compiler() is None:
        return "no C++ compiler: torch's operations"
    if not (code := _loaded()):
        return "does not compile: torch's operations"
    paths = (Path(file._name) for file in code.files.values())
    files = b"".join(file.read_bytes() for file in paths if file.exists())
    return f"compiled by {compiler()}, {vectors()}, {hashlib.sha256(files).hexdigest()[:8]}"


def uncompiled() -> list[Path]:
    """The files that are still to be compiled; none if that was tried, or will not be."""
    if off() or compiler() is None or _loaded.cache_info().currsize:
        return []
    return [file for x in FILES if not (file := _file(FOLDER / f"{x}.cpp")).exists()]


def off() -> bool:
    return os.environ.get("SPECEXP_NATIVE") == "off"


@cache
def _loaded() -> Library | None:
    waiting = threading.Timer(1, print, [WAITING], {"file": sys.stderr, "flush": True})
    waiting.daemon = True
    waiting.start()
    try:
        files = {x: CDLL(str(_built(FOLDER / f"{x}.cpp"))) for x in FILES}
        rounds = files["rounds"]
        files["passes"].spent_ns.restype = c_int64
        rounds.replay.restype, rounds.replay.argtypes = c_bool, (c_int64, c_void_p)
        rounds.replay_rounds.restype = c_int64
        numbers = c_int64, c_double, c_int64, c_int64
        rounds.replay_rounds.argtypes = c_int64, c_void_p, *numbers, *[c_void_p] * 3
        functions = {name: Function(code, name) for x, code in files.items() for name in _names(x)}
        return Library(files, SimpleNamespace(**functions))
    except (OSError, AttributeError, RuntimeError, subprocess.SubprocessError) as e:
        output = getattr(e, "stderr", None) or str(e)
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        why = next((line for line in lines if "error" in line), lines[0] if lines else repr(e))
        log.warning("passes on this CPU are not compiled, which makes them slower: %s", why)
        return None
    finally:
        waiting.cancel()


def _names(file: str) -> list[str]:
    """The functions of a file that Python calls."""
    return re.findall(r"^CALLED\((\w+)", (FOLDER / f"{file}.cpp").read_text(), re.MULTILINE)


def functions() -> Any:
    """The compiled functions by name; None if there is no compiled code."""
    code = _loaded()
    return code and code.functions


def compiler() -> str | None:
    return os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)


def _command() -> list[str]:
    if (program := compiler()) is None:
        raise OSError("there is no C++ compiler (install g++, or set CXX)")
    return [*shlex.split(program), *FLAGS]


def _file(source: Path) -> Path:
    """Where the shared library of this source belongs, for this compiler and processor."""
    texts = (text.read_bytes() for text in (source, *sorted(source.parent.glob("*.h"))))
    parts = *texts, repr(_command()).encode(), _processor().encode()
    return code_folder() / f"{source.stem}-{hashlib.sha256(b' '.join(parts)).hexdigest()[:16]}.so"


def _built(source: Path) -> Path:
    """The shared library of this source, which is compiled if need be."""
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
    """Whether this is a file, no link, of this user that nobody else can write to."""
    try:
        state = file.lstat()
    except FileNotFoundError:
        return False
    mine = stat.S_ISREG(state.st_mode) and state.st_uid == os.getuid()
    return mine and not state.st_mode & 0o022


def _processor() -> str:
    """Identifies what -march=native depends on."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    flags = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    return f"{platform.system()} {platform.machine()} {platform.processor()} {sorted(flags)}"


def vectors() -> str:
    """The instructions of this CPU that passes depend on: `AVX512 AMX`, `AVX512`, `AVX2`, ..."""
    return torch.backends.cpu.get_cpu_capability() + " AMX" * ("amx_bf16" in _processor())
