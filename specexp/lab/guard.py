"""Has `specexp bench` become worse? Its ratios beside those of an earlier run, never its seconds.

A ratio has become worse when the two intervals lie apart, the wrong way round and by more than
MARGIN. Two runs of the same code on a machine of one's own hardly ever differ so; on a shared one
memory and cores are now faster, now slower, and a ratio that looks worse deserves a second run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from specexp.errors import UserError
from specexp.lab.stats import Interval
from specexp.lab.suite_views import WORK

MARGIN = 0.05
ALIKE = ("target", "drafter", "gamma", "temperature", "dtype", "max_new_tokens", "prompts")
SUITES = ("peers", "roofline", "round")  # those that say how good something is


class Change(NamedTuple):
    """One ratio, then and now. `rises`: is more of it better?"""

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
    """An earlier report. Raises UserError when it is none, or of something else than what is to be
    measured now."""
    try:
        report = dict(json.loads(path.read_text()))
        then, there = dict(report["parameters"]), set(report["suites"])
        _ = list(_ratios(report["suites"])), dict(report.get("about", {}))
    except OSError as e:
        raise UserError(f"cannot read {path}: {e.strerror}; make it: specexp bench --out") from e
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        raise UserError(f"{path} is no report of specexp bench --out, or an old one") from e
    odd = [
        f"{name} {then.get(name)!r}, now {parameters[name]!r}"
        for name in ALIKE
        if then.get(name) != parameters[name]
    ]
    if odd:
        raise UserError(f"{path} was made with {'; '.join(odd)}: compare like with like")
    if not there & {*suites} & {*SUITES}:
        raise UserError(
            f"{path} has none of the suites {', '.join(SUITES)} that are to be measured now"
        )
    return report


def changes(then: dict[str, Any], now: dict[str, Any]) -> list[Change]:
    """Every ratio that both reports have."""
    before = {what: found for what, found, _ in _ratios(then["suites"])}
    return [
        Change(what, before[what], found, rises)
        for what, found, rises in _ratios(now["suites"])
        if what in before
    ]


def _ratios(suites: dict[str, Any]) -> Iterator[tuple[str, Interval, bool]]:
    """What it is, the ratio, and whether more of it is better; no two have one name."""
    alone: set[str] = set()
    for row in suites.get("peers", {}).get("rows", ()):
        what = f"peers: {WORK[row['work']]}, batch {row['batch']}"
        what += ", together" if what in alone else ""  # a batch of one is compared twice
        alone.add(what)
        if row["ratio"]:
            yield what, Interval(**row["ratio"]), True
    for row in suites.get("roofline", {}).get("rows", ()):
        what = f"pass: {row['model']}, {row['tokens']} tokens"
        yield f"{what} / bare products", Interval(**row["over_bare"]), False
        if row["tokens"] > 1:
            yield f"{what} / one", Interval(**row["over_step"]), False
    if found := suites.get("round"):
        for side in ("plain", "fast"):
            yield f"round: {side}, outside passes", Interval(**found[side]["overhead"]), False
        yield "round: speedup", Interval(**found["speedup"]["measured"]), True


def table(found: Sequence[Change], then: dict[str, Any], now: dict[str, Any]) -> Table:
    """One row a ratio; what became worse in red."""
    title = "against an earlier run"
    if then.get("about", {}).get("device") != now["about"]["device"]:
        title += f" on another device ({then.get('about', {}).get('device')})"
    made = Table("ratio", "then", "now", "", title=Text(title), title_justify="left",
                 box=None, header_style="bold")  # fmt: skip
    for change in found:
        said = Text("better", "green") if change.better else Text()
        said = Text("worse", "red") if change.worse else said
        made.add_row(Text(change.what), str(change.then), str(change.now), said)
    return made
