"""What this machine is, and how long linear layers take on it over few and many tokens."""

import os
import statistics

import torch

from specexp.errors import counted
from specexp.fast.cpu import build
from specexp.measure.interleave import clock

EMULATED = 4.0  # times float32's time: native float64 takes twice as long, emulation far more
UNSTEADY, WAITING = 1.5, 1.2  # a median over the fastest time; more threads over one thread
SHAPES = {"cpu": (1024, 32), "cuda": (8192, 4)}
"""Width and number of matrices: together larger than the caches that matter; on a GPU each takes
longer to read than to launch."""


def described(device: torch.device) -> str:
    """The device in a few words."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    return f"cpu ({build.vectors()}); no CUDA device found"


def matrices(device: torch.device) -> list[torch.Tensor]:
    """Random float32 weights [width, width] of `SHAPES`."""
    width, count = SHAPES[device.type]
    return [torch.randn(width, width, dtype=torch.float32, device=device) for _ in range(count)]


def pass_s(weights: list[torch.Tensor], tokens: int) -> float:
    """Seconds of a pass over so many tokens through all matrices."""
    x = weights[0].new_ones(tokens, len(weights[0]))
    begin = clock(x.device)
    for w in weights:
        torch.nn.functional.linear(x, w)
    return clock(x.device) - begin


def doubts(device: torch.device) -> list[str]:
    """Why timings that are taken now would not hold, one line each with its remedy: what else uses
    the processor, and threads that wait for each other. None on a quiet machine, or for a GPU."""
    if device.type != "cpu":
        return []
    threads, load, cores = torch.get_num_threads(), os.getloadavg()[0], os.cpu_count() or 1
    weights, times = matrices(device), dict[int, list[float]]()
    try:
        for count in dict.fromkeys((threads, 1)):
            torch.set_num_threads(count)
            times[count] = [pass_s(weights, 2) for _ in range(9)]
    finally:
        torch.set_num_threads(threads)
    typical = {count: statistics.median(taken) for count, taken in times.items()}
    where = f"load average {load:.1f} on {counted(cores, 'core')}"
    lines = []
    if (slower := typical[threads] / typical[1]) > WAITING:
        lines.append(
            f"{threads} threads take {slower:.1f}x as long as one, since they wait for each other "
            f"({where}): set OMP_NUM_THREADS=1"
        )
    spread = max(typical[count] / min(taken) for count, taken in times.items())
    swings = f"a pass takes {spread:.1f}x its fastest time, {where}" if spread > UNSTEADY else where
    if spread > UNSTEADY or load > cores:
        lines.append(f"{swings}: others use this machine; measure when it is quiet")
    return lines


def emulated(dtype: torch.dtype, device: torch.device) -> str:
    """A warning if a one-token pass takes far longer in this dtype than in float32, because the
    processor emulates it; else ""."""
    if dtype == torch.float32:
        return ""
    single = matrices(device)
    both = [w.to(dtype) for w in single], single
    own_s, single_s = (min(pass_s(weights, 1) for _ in range(4)) for weights in both)
    if own_s < EMULATED * single_s:
        return ""
    name = str(dtype).removeprefix("torch.")
    return (
        f"{name} is emulated here: a one-token pass takes {own_s / single_s:.0f}x as long as in "
        f"float32, so figures do not hold for hardware with {name}; use --dtype float32"
    )
