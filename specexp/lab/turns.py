"""Arms that take turns: how `specexp bench` times whatever it compares.

A shared machine is slow for a while and fast for a while. Arms that are called one after another,
forwards and then backwards, meet the same moments, so that ratios of theirs hold where the seconds
do not. The unit of every interval is the turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from tqdm.auto import tqdm

from specexp.lab import stats
from specexp.lab.stats import Interval

Arm = TypeVar("Arm")
Item = TypeVar("Item")


class Turn(NamedTuple):
    """One call of an arm: how long it took, and what it returned."""

    seconds: float
    made: Any = None


def clock(device: torch.device) -> float:
    """Seconds, once the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def take(
    arms: Mapping[Arm, Callable[[Item], Any]],
    items: Sequence[Item],
    device: torch.device,
    about: str,
    lead: int = 0,
    warm: Sequence[Item] = (),
) -> dict[Arm, list[Turn]]:
    """Give every item to every arm, in reverse order every other turn, after turns that do not
    count: of `warm`, items of every shape where rounds are recorded, or else of the first one; and
    before each turn `lead` more of its own. One turn an item, in order. about: what the progress
    bar says."""
    seen: dict[Arm, list[Turn]] = {arm: [] for arm in arms}
    first = warm or items[:1]
    with tqdm(total=len(arms) * (len(first) + len(items)), desc=about, unit="call") as bar:
        for number, item in enumerate([*first, *items], 1 - len(first)):
            for arm in list(arms)[:: -1 if number % 2 else 1]:
                for _ in range(lead):
                    arms[arm](item)
                begin = clock(device)
                made = arms[arm](item)
                took = clock(device) - begin
                if number > 0:
                    seen[arm].append(Turn(took, made))
                bar.update()
    return seen


def seconds(turns: Sequence[Turn]) -> list[float]:
    return [turn.seconds for turn in turns]


def median_s(turns: Sequence[Turn]) -> float:
    return float(np.median(seconds(turns)))


def ratio(above: Sequence[Turn], below: Sequence[Turn], factor: float = 1.0) -> Interval:
    """`factor` times the median seconds of one arm over those of another, of paired turns. Medians,
    for a pass takes milliseconds, and one disturbed turn would outweigh all others in a sum."""
    return stats.interval(
        lambda a, b: factor * np.median(a, -1) / np.median(b, -1), seconds(above), seconds(below)
    )
