"""Compiled code for a CPU: a pass over a few rows as one call (passes.cpp), and the other steps of
a round (`by`; rounds.cpp, chance.cpp).

A small model's pass is some six hundred operations of a few microseconds each, three times as long
as it takes to read the weights. The code is compiled once per machine; without a C++ compiler, or
with SPECEXP_NATIVE=off, torch's operations do the same (fused.py). A token's logits are equal to
the last bit whatever shares its pass, so verifying a chain gives exactly what plain decoding gives.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from ctypes import (
    CDLL,
    POINTER,
    Array,
    Structure,
    addressof,
    byref,
    c_bool,
    c_double,
    c_float,
    c_int64,
    c_void_p,
    cast,
)
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

if TYPE_CHECKING:
    from specexp.models.cache import SlotCache

log = logging.getLogger("specexp")

FOLDER = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-shared", "-fPIC")
NORMS, PRODUCTS = ("before", "after", "q_norm", "k_norm"), ("qkv", "out", "up", "down")
READ = torch.float32, torch.int64
BETWEEN = {
    "rounds": (
        "likeliest", "ranked", "spoil", "follow", "commit", "report", "lookup", "vote", "recall",
        "note", "learn", "either", "places", "read", "until", "reached", "columns", "at_least",
    ),
    "chance": ("law", "race", "addresses", "reject", "block"),
}  # fmt: skip


class Here(threading.local):
    """`calls`: a list to which this thread's calls of compiled functions are appended, or None."""

    calls: list[Any] | None = None


here = Here()


class Call(NamedTuple):
    """A call of a compiled function: its address, and its arguments as numbers and as objects."""

    function: int
    places: Array[c_int64]
    given: tuple[Any, ...]


class Function:
    """A compiled function of numbers, tensors and ctypes objects. Returns False if it failed."""

    def __init__(self, code: CDLL, name: str) -> None:
        self.code = code[f"call_{name}"]
        self.code.restype = c_bool
        self.address: int = cast(self.code, c_void_p).value or 0

    def __call__(self, *given: Any) -> bool:
        places = (c_int64 * len(given))(*map(_number, given))
        if here.calls is not None:
            here.calls.append(Call(self.address, places, given))
        done: bool = self.code(places)
        return done


def _number(x: Any) -> int:
    if isinstance(x, Tensor):
        return x.data_ptr()
    if isinstance(x, float):
        return c_int64.from_buffer(c_double(x)).value  # its bit pattern
    return x if isinstance(x, int) else addressof(x)


class Layer(Structure):
    _fields_ = [(name, c_void_p) for name in (*NORMS, *PRODUCTS, *(f"{p}_bias" for p in PRODUCTS))]


class Net(Structure):
    _fields_ = [
        *((n, c_int64) for n in ("layers", "width", "reads", "heads", "keys", "dim", "hidden")),
        *((n, c_int64) for n in ("known", "vocab", "all", "adds")),
        *((n, c_float) for n in ("eps", "scale", "stretch")),
        *((n, c_void_p) for n in ("embed", "norm", "head", "token_norm", "state_norm", "ids")),
        ("frequencies", c_void_p),
        ("layer", POINTER(Layer)),
    ]


class Pass(Structure):
    _fields_ = [
        *((n, c_int64) for n in ("rows", "n", "seen", "threads")),
        *((n, c_void_p) for n in ("tokens", "positions", "slots", "visible", "x", "k", "v")),
        *((n, c_int64) for n in ("at", "row_stride", "head_stride", "last", "taps")),
        *((n, c_void_p) for n in ("tap", "states", "logits", "room")),
    ]


class Native:
    """Compiled passes of `fused`, which must be on a CPU. Passes of more than `sparing` tokens are
    left to `fused`, because torch's libraries are faster for many rows."""

    sparing = 512  # tokens

    def __init__(self, fused: Any, code: CDLL) -> None:
        self.fused, first = fused, fused.layers[0]
        self.dtype: torch.dtype = fused.head.dtype
        name = str(self.dtype).removeprefix("torch.")
        self.run, self.room_for = Function(code, name), code[f"room_for_{name}"]
        self.room_for.restype = c_int64
        self.frequencies = fused.frequencies.float().contiguous()
        self.layers = (Layer * len(fused.layers))(*(_layer(layer) for layer in fused.layers))
        known = 0 if fused.embed is None else len(fused.embed)
        self.net = Net(
            len(fused.layers), fused.head.shape[1], first.qkv.shape[1], first.heads, first.keys,
            first.head_dim, first.hidden, known, len(fused.head), fused.vocab, fused.adds,
            first.after.eps, first.scale, fused.rotary.attention_scaling, _at(fused.embed),
            _weight(fused.norm), _at(fused.head), *map(_weight, fused.beside or (None, None)),
            _at(fused.ids), _at(self.frequencies), self.layers,
        )  # fmt: skip
        self.buffers: WeakKeyDictionary[SlotCache, tuple[Any, Any]] = WeakKeyDictionary()

    def __call__(
        self, tokens: Tensor, positions: Tensor, visible: Tensor | None, cache: SlotCache,
        taps: tuple[int, ...], last: int | None, **inputs: Tensor,
    ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        """See `Fused`; logits are float32."""
        B, n = tokens.shape
        if B * n > self.sparing:
            return self.fused(tokens, positions, visible, cache, taps, last, **inputs)
        last, net = n if last is None else last, self.net
        keys, values = self.buffers.get(cache) or self._found(cache)
        tapped = (c_int64 * len(taps))(*taps)
        given = (tokens, positions, cache.slots, visible, inputs.get("x"))
        held = [None if x is None else x.contiguous() for x in given]
        states = torch.empty(B, n, len(taps) * net.width, dtype=self.dtype) if taps else None
        logits = torch.empty(B, last, net.all)
        head = cache.size * net.dim
        row = net.keys * head
        asked = Pass(
            B, n, cache.seen, torch.get_num_threads(), *map(_at, held), addressof(keys),
            addressof(values), cache.rows.start * row, row, head, last, len(taps),
            addressof(tapped), _at(states), _at(logits), None,
        )  # fmt: skip
        room = torch.empty(self.room_for(byref(net), byref(asked)))
        asked.room = _at(room)
        asked.holds = held, keys, values, tapped, states, logits, room
        if not self.run(net, asked):
            raise IndexError(f"a token is not below {net.known}, or a slot not below {cache.seen}")
        return logits if last else None, states

    def _found(self, cache: SlotCache) -> tuple[Any, Any]:
        """The addresses of every layer's keys and values."""
        like = torch.empty(0, self.net.keys, 0, self.net.dim, dtype=self.dtype)
        layers = cache.layers[: len(self.layers)]
        for layer in layers:
            if not layer.is_initialized:
                layer.lazy_initialization(like, like)
        kind = c_void_p * len(layers)
        found = kind(*(_at(x.keys) for x in layers)), kind(*(_at(x.values) for x in layers))
        return self.buffers.setdefault(cache, found)


def _at(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _weight(norm: Any) -> int | None:
    return norm and _at(norm.weight)


def _layer(layer: Any) -> Layer:
    norms = map(_weight, (layer.before, layer.after, *(layer.norms or (None, None))))
    biases = (layer.qkv_bias, layer.out_bias, layer.up_bias, layer.down_bias)
    return Layer(*norms, *map(_at, (layer.qkv, layer.out, layer.up, layer.down, *biases)))


class Library(NamedTuple):
    passes: CDLL
    rounds: CDLL
    chance: CDLL


def library() -> Library | None:
    """The compiled code, which is compiled if need be. None if it is turned off or cannot be
    compiled; one warning says why."""
    return None if os.environ.get("SPECEXP_NATIVE") == "off" else _loaded()


@cache
def _loaded() -> Library | None:
    try:
        found = Library(*(CDLL(str(_built(FOLDER / f"{name}.cpp"))) for name in Library._fields))
        found.passes.spent_ns.restype = c_int64
        rounds = found.rounds
        rounds.replay.restype, rounds.replay.argtypes = c_bool, (c_int64, c_void_p)
        rounds.replay_rounds.restype = c_int64
        numbers = c_int64, c_double, c_int64, c_int64
        rounds.replay_rounds.argtypes = c_int64, c_void_p, *numbers, *[c_void_p] * 3
        return found
    except (OSError, RuntimeError, subprocess.SubprocessError) as e:
        said = [line for line in str(getattr(e, "stderr", None) or e).splitlines() if line.strip()]
        why = next((line for line in said if "error" in line), said[0] if said else repr(e))
        log.warning("passes on this CPU are not compiled, which makes them slower: %s", why.strip())
        return None


def compiler() -> str | None:
    return os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)


def _built(source: Path) -> Path:
    """The shared library of this source, for this compiler and processor."""
    if (asked_of := compiler()) is None:
        raise OSError("there is no C++ compiler (install g++, or set CXX)")
    command = [*shlex.split(asked_of), *FLAGS]
    texts = (text.read_bytes() for text in (source, *sorted(source.parent.glob("*.h"))))
    parts = *texts, repr(command).encode(), _processor().encode()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specexp"
    file = folder / f"{source.stem}-{hashlib.sha256(b' '.join(parts)).hexdigest()[:16]}.so"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as made:
            asked = [*command, str(source), "-o", f"{made}/made.so"]
            subprocess.run(asked, check=True, capture_output=True, text=True, timeout=300)
            os.replace(f"{made}/made.so", file)
    return file


def _processor() -> str:
    """Identifies what -march=native depends on."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.exists() else []
    flags = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    return f"{platform.system()} {platform.machine()} {platform.processor()} {sorted(flags)}"


def vectors() -> str:
    """The instructions of this CPU that passes depend on: `AVX512 AMX`, `AVX512`, `AVX2`, ..."""
    return torch.backends.cpu.get_cpu_capability() + " AMX" * ("amx_bf16" in _processor())


def by(*read: Tensor) -> Any:
    """The compiled functions besides passes, if they can read these tensors. None if not, as on a
    GPU; the caller then uses torch's operations."""
    ready = all(x.is_cpu and x.is_contiguous() and x.dtype in READ for x in read)
    return (found := library()) and _between(found) if ready else None


@cache
def _between(found: Library) -> SimpleNamespace:
    names = ((getattr(found, part), name) for part, names in BETWEEN.items() for name in names)
    return SimpleNamespace(**{name: Function(code, name) for code, name in names})


def passes_s() -> float:
    """Seconds spent in compiled passes so far, in this process."""
    found = library()
    return float(found.passes.spent_ns()) / 1e9 if found else 0.0


def replaying() -> CDLL:
    """The library with `replay` and `replay_rounds` (rounds.cpp), which run lists of compiled
    calls."""
    found = library()
    assert found is not None
    return found.rounds


def every(tensors: Sequence[Tensor]) -> Any:
    """The addresses of these tensors, as an argument."""
    return (c_void_p * len(tensors))(*map(_at, tensors))


def of(fused: Any) -> Native | None:
    """The compiled passes of `fused`; None if they cannot be had."""
    weights = [w for w in (fused.embed, fused.head) if w is not None]
    weights += [layer.qkv for layer in fused.layers]
    kinds = {(type(w) in (Tensor, torch.nn.Parameter), w.device.type, w.dtype) for w in weights}
    if kinds not in ({(True, "cpu", torch.float32)}, {(True, "cpu", torch.bfloat16)}):
        return None
    if 2 * len(fused.frequencies) != fused.layers[0].head_dim:
        return None
    found = library()
    return Native(fused, found.passes) if found else None
