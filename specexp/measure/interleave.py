"""Interleaved timing: `specexp bench` calls the arms that it compares in turns.

The speed of a shared machine drifts. Arms called one after another, in reverse order every other
turn, meet the same drift, so their ratios are reproducible where their seconds are not. The unit of
every interval is the turn.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import starmap
from typing import Any, NamedTuple, ParamSpec, TypeAlias, TypeVar

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from specexp import theory
from specexp.measure import statistics
from specexp.measure.statistics import Interval

log = logging.getLogger("specexp")
Arm = TypeVar("Arm")
Item = TypeVar("Item")
How = ParamSpec("How")
Measure: TypeAlias = Callable[How, pd.DataFrame]
FEW = 8  # arms whose medians fit beside a progress bar
BAR = "{desc} {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"  # leaves room for medians
ALIKE = 0.02  # how far the passes of repeats may differ, from near ties alone


class Turn(NamedTuple):
    """One call of an arm: its duration and its result."""

    seconds: float
    result: Any = None


def clock(device: torch.device) -> float:
    """A timestamp in seconds, taken after all work queued on the device has finished."""
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
    """Time every arm on every item, arms in reverse order every other turn; one turn an item.

    Uncounted warm-up turns come first, on `warm` (where rounds are recorded: items of every shape),
    or else on the first item. Each arm is called `lead` more times just before every timed call, on
    the same item. about: the label of the progress bar, which shows the medians of few arms as they
    come; none without it. Returns the turns of each arm, one an item, in the order of the items. A
    KeyboardInterrupt tells what was timed before it: its argument has the seconds by arm."""
    turns: dict[Arm, list[Turn]] = {arm: [] for arm in arms}
    first = warm or items[:1]
    calls = len(arms) * (len(first) + len(items))
    with tqdm(total=calls, desc=about, bar_format=BAR, disable=not about) as bar, _telling(turns):
        for number, item in enumerate([*first, *items], 1 - len(first)):
            for arm in list(arms)[:: -1 if number % 2 else 1]:
                for _ in range(lead):
                    arms[arm](item)
                begin = clock(device)
                result = arms[arm](item)
                took = clock(device) - begin
                if number > 0:
                    turns[arm].append(Turn(took, result))
                bar.update()
            if number > 0 and len(arms) <= FEW:
                medians = ", ".join(starmap(_so_far, turns.items()))
                bar.set_postfix_str(f"ms: {medians}", refresh=False)
    return turns


@contextmanager
def _telling(turns: Mapping[Any, Sequence[Turn]]) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as e:
        raise KeyboardInterrupt({_name(arm): seconds(each) for arm, each in turns.items()}) from e


def _so_far(arm: Any, turns: Sequence[Turn]) -> str:
    """ours draft 420.00"""
    return f"{_name(arm)} {1e3 * median_s(turns):,.2f}"


def _name(arm: Any) -> str:
    parts = arm if isinstance(arm, tuple) else (arm,)
    return " ".join(str(getattr(part, "__name__", part)) for part in parts)


def seconds(turns: Sequence[Turn]) -> list[float]:
    return [turn.seconds for turn in turns]


def median_s(turns: Sequence[Turn]) -> float:
    return float(np.median(seconds(turns)))


def ratio(above: Sequence[Turn], below: Sequence[Turn], factor: float = 1.0) -> Interval:
    """`factor` times the median seconds of one arm over another's, turns paired. Medians, because
    in a sum of millisecond passes one disturbed turn would outweigh all others."""
    return statistics.interval(
        lambda a, b: factor * np.median(a, -1) / np.median(b, -1), seconds(above), seconds(below)
    )


def credibly(by: str) -> Callable[[Measure[How]], Measure[How]]:
    """Makes what times arms (values of the column `by`) time them all once more if the speedup of
    any is not credible. The second timing counts then, whatever it says (column timing: 2), unless
    a drafter remembers the first: its passes differ.

    Of such a drafter's repeats only the first one counts, with a warning."""

    def decorate(measure: Measure[How]) -> Measure[How]:
        @wraps(measure)
        def measured(*given: How.args, **options: How.kwargs) -> pd.DataFrame:
            samples = measure(*given, **options).assign(timing=1)
            if _credible(samples, by):
                return _without_memory(samples, by)
            log.warning("a speedup exceeds what its tokens explain: all is timed once more")
            again = measure(*given, **options).assign(timing=2)
            later = again.assign(repeat=again["repeat"] + 1 + samples["repeat"].max())
            both = pd.concat([samples, later], ignore_index=True)
            kept = _without_memory(both, by)
            return again if len(kept) == len(both) else kept[kept["timing"] == 1]

        return measured

    return decorate


def _credible(samples: pd.DataFrame, by: str) -> bool:
    sums = samples.groupby(by)[["s", "tokens", "plain_s", "plain_tokens", "accepted", "passes"]]
    return all(
        theory.credible((plain_s / plain_tokens) / (s / tokens), 1 + accepted / passes)
        for s, tokens, plain_s, plain_tokens, accepted, passes in sums.sum().to_numpy()
    )


def _without_memory(samples: pd.DataFrame, by: str) -> pd.DataFrame:
    """The samples; of those (`by` a column) whose passes differ between repeats, though prompts and
    noise are the same, only the first repeat, with a warning: their drafter remembers."""
    counts = samples.pivot_table(["accepted", "passes"], by, "repeat", "sum")
    lengths = 1 + counts["accepted"] / counts["passes"]
    learns = lengths.index[lengths.max(axis=1) > (1 + ALIKE) * lengths.min(axis=1)]
    for name in learns:
        log.warning(
            f"{by} {name}: {', '.join(f'{x:.2f}' for x in lengths.loc[name])} tokens a pass in "
            "repeats of the same prompts: its drafter remembers them, so only the first one counts"
        )
    return samples[(samples["repeat"] == 0) | ~samples[by].isin(learns)]
