"""Regression check for `specexp bench`: compares the ratios of two runs, never their seconds.

A ratio is worse if the two intervals are disjoint in the wrong direction, by more than MARGIN. Two
runs of the same code on an idle machine hardly ever differ that much; on a shared machine memory
and core speeds drift, so repeat the run before trusting a ratio that looks worse.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specexp.errors import UserError, counted
from specexp.measure.hardware.work import NAMES, WORK
from specexp.measure.statistics import Interval

MARGIN = 0.05
WRITE = "write one with specexp bench --out"
MUST_MATCH = ("target", "drafter", "gamma", "temperature", "sampling", "dtype", "max_new_tokens",
              "prompts")  # fmt: skip


class Change(NamedTuple):
    """One ratio, then and now. `rises`: whether higher is better."""

    what: str
    then: Interval
    now: Interval
    rises: bool

    @property
    def worse(self) -> bool:
        if self.rises:
            return self.now.high < self.then.low * (1 - MARGIN)
        return self.now.low > self.then.high * (1 + MARGIN)

    @property
    def better(self) -> bool:
        return self._replace(then=self.now, now=self.then).worse


def read(path: Path, parameters: dict[str, Any], suites: Sequence[str]) -> dict[str, Any]:
    """Load an earlier report. Raises UserError if the file is none, if its parameters are not
    those given, or if it shares none of the suites."""
    try:
        report = dict(json.loads(path.read_text()))
        earlier, measured = report["parameters"], set(report["suites"])
        _ = list(_ratios(report["suites"])), dict(report.get("about", {}))
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}; {WRITE}") from e
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        raise UserError(f"{path} is not a report that this version reads; {WRITE}") from e
    changed = [name for name in MUST_MATCH if earlier.get(name) != parameters[name]]
    if changed:
        each = "; ".join(f"{n} {earlier.get(n)!r}, now {parameters[n]!r}" for n in changed)
        raise UserError(f"{path} was measured with {each}: use the same options for both")
    if not measured & {*suites} & {*NAMES}:
        raise UserError(f"{path} shares none of the suites {', '.join(NAMES)} with this run: "
                        "nothing to compare")  # fmt: skip
    return report


def changes(then: dict[str, Any], now: dict[str, Any]) -> list[Change]:
    """Every ratio that both reports have."""
    before = {what: ratio for what, ratio, _ in _ratios(then["suites"])}
    after = [ratio for ratio in _ratios(now["suites"]) if ratio[0] in before]
    return [Change(what, before[what], ratio, rises) for what, ratio, rises in after]


def _ratios(suites: dict[str, Any]) -> Iterator[tuple[str, Interval, bool]]:
    """A unique name for each ratio, the ratio, and whether higher is better."""
    alone: set[str] = set()
    for row in suites.get("peers", {}).get("rows", ()):
        what = f"peers: {WORK[row['work']]}, batch {row['batch']}"
        what += ", together" if what in alone else ""  # --batches 1 gives two rows at batch 1
        alone.add(what)
        if row["ratio"]:
            yield what, Interval(**row["ratio"]), True
    for row in suites.get("roofline", {}).get("rows", ()):
        what = f"pass: {row['model']}, {counted(row['tokens'], 'token')}"
        if row["over_bare"]:
            yield f"{what} / bare products", Interval(**row["over_bare"]), False
        if row["tokens"] > 1:
            yield f"{what} / one", Interval(**row["over_step"]), False
    if rounds := suites.get("round"):
        for side in ("plain", "fast"):
            inside = Interval(**rounds[side]["overhead"]).rest()  # unlike it, never near 0
            yield f"round: {side}, share inside passes", inside, True
        yield "round: speedup", Interval(**rounds["speedup"]["measured"]), True
