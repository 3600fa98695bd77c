"""Arrival times and lengths of requests: a closed loop, Poisson, bursts, a day, or a trace.

All are reproducible from a seed. A load is named as in notebooks and grids: `closed:8`,
`poisson:4.5`, `bursty:4.5,3`, `day:2`, `trace:FILE`.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specexp.errors import UserError, meant, meant_beside

COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type")


@dataclass(frozen=True, eq=False)
class Arrivals:
    """Requests in order of arrival as columns [n]: at_s float64, seconds from the start; the tokens
    of the `prompt` and the most tokens of the `output`."""

    at_s: np.ndarray
    prompt: np.ndarray
    output: np.ndarray

    def __len__(self) -> int:
        return len(self.at_s)


@dataclass(frozen=True)
class Closed:
    """So many requests at a time: the next arrives when one is done."""

    concurrency: int


@dataclass(frozen=True)
class Lengths:
    """Distribution of prompt and output lengths in tokens: lognormal with these medians and this
    standard deviation of the logarithm, clipped to 1..most."""

    prompt: int = 60
    output: int = 40
    spread: float = 0.6
    most: int = 400

    def draw(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Prompt and output lengths, int64 [count] each; exactly the medians at spread 0."""
        around = np.exp(self.spread * rng.standard_normal((2, count)))
        tokens = np.rint(np.array([[self.prompt], [self.output]]) * around)
        prompts, outputs = np.clip(tokens, 1, self.most).astype(np.int64)
        return prompts, outputs


def bursty(rate: float, count: int, lengths: Lengths, seed: int, cv: float = 1.0) -> Arrivals:
    """`rate` arrivals a second with gamma-distributed gaps of coefficient of variation cv: 1 is
    Poisson, above 1 there are bursts and lulls. (As BurstGPT fits them: Wang et al. 2024, arXiv
    2401.17644.)"""
    _bounded(rate=rate, cv=cv)
    rng = np.random.default_rng(seed)
    shape = 1 / cv**2
    at_s = rng.gamma(shape, 1 / (rate * shape), count).cumsum()
    return Arrivals(at_s, *lengths.draw(count, rng))


def day(rate: float, count: int, lengths: Lengths, seed: int, swing: float = 0.8) -> Arrivals:
    """A day of `count` requests, count / rate seconds long, whose arrival rate swings around its
    mean `rate` a second by the share `swing`, as a cosine that is lowest at the start and the end.

    Inhomogeneous Poisson, by thinning (Lewis and Shedler 1979).
    """
    _bounded(rate=rate)
    rng = np.random.default_rng(seed)
    length, peak = count / rate, rate * (1 + swing)
    arrived = np.zeros(0)
    while len(arrived) < count:
        size = int(1.2 * count * (1 + swing)) + 100
        at = (arrived[-1] if len(arrived) else 0.0) + rng.exponential(1 / peak, size).cumsum()
        load = 1 - swing * np.cos(2 * np.pi * at / length)
        arrived = np.concatenate([arrived, at[rng.random(size) * (1 + swing) < load]])
    return Arrivals(arrived[:count], *lengths.draw(count, rng))


def read_csv(path: str | Path, count: int | None = None) -> Arrivals:
    """A trace in the columns of BurstGPT, or its first `count` requests. Failed ones (no response
    tokens) and empty prompts are left out; times count from the first of the rest. Raises UserError
    with file and line."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            rows = [(reader.line_num, row) for row in reader]
    except FileNotFoundError:
        raise UserError(f"there is no trace {str(path)!r}{meant_beside(Path(path))}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        raise UserError(f"cannot read the trace {path}: {e}") from e
    trace: list[tuple[float, int, int]] = []
    for line, row in rows:
        try:
            at, prompt, output = (float(row[COLUMNS[i]]) for i in (0, 2, 3))
        except (KeyError, TypeError, ValueError) as e:
            raise UserError(
                f"{path}:{line}: not a request; a trace has the columns {', '.join(COLUMNS)}"
            ) from e
        if not (np.isfinite([at, prompt, output]).all() and prompt >= 0 and output >= 0):
            raise UserError(f"{path}:{line}: times and tokens must be finite and not negative")
        if trace and at < trace[-1][0]:
            raise UserError(f"{path}:{line}: is earlier than the request above it; sort the trace")
        if int(output) and int(prompt):
            trace.append((at, int(prompt), int(output)))
    if not trace:
        raise UserError(f"{path} has no request with tokens in it")
    at_s, prompts, outputs = map(np.array, zip(*trace[:count], strict=True))
    return Arrivals(at_s - at_s[0], prompts, outputs)


def parse(load: str, count: int, seed: int = 0) -> Arrivals | Closed:
    """The first `count` requests of the load of that name. Raises UserError for another name."""
    kind, _, argument = load.partition(":")
    try:
        if kind == "closed":
            if (streams := int(argument)) < 1:
                raise UserError(f"load {load!r} needs at least one stream")
            return Closed(streams)
        if kind == "poisson":
            return bursty(float(argument), count, Lengths(), seed)
        if kind == "bursty":
            rate, _, cv = argument.partition(",")
            return bursty(float(rate), count, Lengths(), seed, float(cv or 3))
        if kind == "day":
            return day(float(argument), count, Lengths(), seed)
        if kind == "trace":
            return read_csv(argument, count)
    except ValueError:
        raise UserError(f"load {load!r} is not well formed; {_HELP}") from None
    near = meant(kind, ("closed", "poisson", "bursty", "day", "trace"))
    raise UserError(f"load {load!r} is unknown{near} ({_HELP})")


def at_rate(arrivals: str, rate: float) -> str:
    """The name of a load from that of its arrivals (`bursty,3`), at `rate` requests a second; a
    trace (`trace:FILE`) has its own rate and is returned as it is."""
    kind, _, rest = arrivals.partition(",")
    named = kind in ("poisson", "bursty", "day")
    return f"{kind}:{rate:.4g}{',' + rest if rest else ''}" if named else arrivals


_HELP = "use closed:STREAMS, poisson:RATE, bursty:RATE,CV, day:RATE (a second) or trace:FILE"


def _bounded(**values: float) -> None:
    for name, value in values.items():
        if not 1e-6 <= value <= 1e6:
            raise UserError(f"{name} is {value}; use 1e-6 to 1e6")
