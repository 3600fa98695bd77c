"""Interleaved timing: the arms of a comparison are called in turns.

The speed of a shared machine drifts. Arms that are called one after another, in reverse order every
other turn, meet the same drift, so their ratios are reproducible even if their seconds are not. The
unit of every interval is the turn.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from scipy.stats import bootstrap, norm, t
from tqdm.auto import tqdm

from specexp.measure.statistics import MIN_REPEATS, TAIL, Interval, too_few

Arm = TypeVar("Arm")
Item = TypeVar("Item")
MAX_SHOWN = 8  # arms whose medians fit beside a progress bar
BAR = "{desc} {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"  # leaves room for medians


class Turn(NamedTuple):
    """One call of an arm: its duration and its result."""

    seconds: float
    result: Any = None


def clock(device: torch.device) -> float:
    """A timestamp in seconds, taken after all work queued on the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def time_in_turns(
    arms: Mapping[Arm, Callable[[Item], Any]],
    items: Sequence[Item],
    device: torch.device,
    label: str,
    lead: int = 0,
    warm: Sequence[Item] = (),
) -> dict[Arm, list[Turn]]:
    """Call every arm on every item and time each call; on every other item the arms go in reverse.

    warm: items of uncounted warm-up turns, by default the first item (where rounds are recorded, an
    item of every shape). lead: untimed calls of an arm, on the same item, just before each timed
    one. label: that of the progress bar, which shows the medians of few arms; "" for no bar.

    Returns the turns of each arm, in the order of the items. A KeyboardInterrupt is raised again
    with the seconds timed until then, by arm, as its argument."""
    turns: dict[Arm, list[Turn]] = {arm: [] for arm in arms}
    first = warm or items[:1]
    calls = len(arms) * (len(first) + len(items))
    try:
        with tqdm(total=calls, desc=label, bar_format=BAR, disable=not label) as bar:
            for number, item in enumerate([*first, *items], 1 - len(first)):
                for arm in list(arms)[:: -1 if number % 2 else 1]:
                    for _ in range(lead):
                        arms[arm](item)
                    begin = clock(device)
                    result = arms[arm](item)
                    duration = clock(device) - begin
                    if number > 0:
                        turns[arm].append(Turn(duration, result))
                    bar.update()
                if number > 0 and len(arms) <= MAX_SHOWN:
                    medians = (f"{_name(a)} {1e3 * median_s(x):,.2f}" for a, x in turns.items())
                    bar.set_postfix_str(f"ms: {', '.join(medians)}", refresh=False)
    except KeyboardInterrupt as e:
        raise KeyboardInterrupt({_name(arm): seconds(each) for arm, each in turns.items()}) from e
    return turns


def _name(arm: Any) -> str:
    parts = arm if isinstance(arm, tuple) else (arm,)
    return " ".join(map(str, parts))


def seconds(turns: Sequence[Turn]) -> list[float]:
    return [turn.seconds for turn in turns]


def median_s(turns: Sequence[Turn]) -> float:
    return float(np.median(seconds(turns)))


def ratio(above: Sequence[Turn], below: Sequence[Turn], factor: float = 1.0) -> Interval:
    """`factor` times the median seconds of one arm over another's, turns paired. Medians, because
    in a sum of millisecond passes one disturbed turn would outweigh all others; the interval is of
    its logarithm, for a ratio is never negative.

    A percentile bootstrap over six turns covers the true value 84 % of the time, so both ends are
    moved outwards by the ratio of Student's t quantile to the normal one."""
    data, n = (seconds(above), seconds(below)), len(above)
    low = high = value = float(_log_ratio(*data))
    if n > 1:
        options = {"paired": True, "method": "percentile", "n_resamples": 2000, "rng": 0}
        drawn = bootstrap(data, _log_ratio, **options)
        wider = t.ppf(1 - TAIL, n - 1) / norm.ppf(1 - TAIL) * math.sqrt(n / (n - 1))
        low, high = (value + wider * (float(end) - value) for end in drawn.confidence_interval)
    value, low, high = (factor * math.exp(x) for x in (value, low, high))
    return Interval(value, low, high, too_few(n, MIN_REPEATS, "repeats"))


def _log_ratio(above: Any, below: Any, axis: int = -1) -> Any:
    return np.log(np.median(above, axis) / np.median(below, axis))
