"""The grid that measures what results leave open: up to which batch size does it pay to draft?"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from specexp.decision.recommend import Advice, moved
from specexp.errors import UserError
from specexp.measure.parameters import PARAMETERS
from specexp.tracking import results

NOTEBOOK = "notebooks/30_throughput_under_batch.ipynb"
LACKS = ("categories", "min_p")  # parameters of other notebooks
MOST, DOUBLINGS = 3, 5  # drafters, the best first; batch sizes beyond the largest measured one


def text(every: Sequence[Advice], folder: Path) -> str:
    """A grid file for a folder: in each situation the drafters that pay in every batch in which
    they were measured, each with the draft length chosen in the largest, from there on in batches
    twice as large each. A comment names situations that the notebook cannot be given. Raises
    UserError if nothing is open, or if no result can be trusted."""
    if not any(advice.plans for advice in every):
        raise UserError(str(every[0]))
    entries: dict[Any, dict[str, Any]] = {}  # of machines, the one with the most measurements
    unfit = list[str]()  # situations
    for advice in every:
        if advice.situation.engine:
            unfit.append(f"run 50_servers with more streams for: {advice.situation}")
            continue
        points = _open(advice, folder)
        for entry in filter(_fits, points):
            entries.setdefault((advice.situation.params, entry["drafter"]), entry)
        if points and not _fits(points[0]):
            unfit.append(f"the notebook lacks a parameter of: {advice.situation}")
    if not entries and unfit:
        raise UserError("\n".join(unfit))
    if not entries:
        targets = ", ".join(dict.fromkeys(advice.situation.target for advice in every))
        raise UserError(
            f"no chain of draft tokens pays for {targets} in the largest batch in which it was "
            "measured: larger ones need no grid, and trees have none"
        )
    first, *others = entries.values()
    own = ("drafter", "gamma")
    fixed = {
        name: value for name, value in first.items()
        if name not in own and all(entry.get(name) == value for entry in others)
    }  # fmt: skip
    grid = {
        "notebook": os.path.relpath(results.ROOT / NOTEBOOK, folder),
        "fixed": fixed,
        "include": [{n: v for n, v in e.items() if n not in fixed} for e in entries.values()],
        "timeout_s": 3600,
    }
    comments = "In which batches do the drafters pay that pay in smaller ones?", *unfit
    return "".join(f"# {line}\n" for line in comments) + yaml.safe_dump(
        grid, sort_keys=False, default_flow_style=None
    )


def _fits(entry: dict[str, Any]) -> bool:
    """Whether the notebook has these parameters, each with one value."""
    listed = (isinstance(v, str) and PARAMETERS[name].type != "str" for name, v in entry.items())
    return not (any(name in LACKS for name in entry) or any(listed))


def _open(advice: Advice, folder: Path) -> list[dict[str, Any]]:
    """The parameters of a point for each of the best drafters of which it is open."""
    drafts = {
        plan.drafter: (chosen.draft, plan.largest)
        for plan in advice.plans
        for last, chosen in plan.steps[-1:]
        if last == plan.largest and isinstance(chosen.draft, int)
    }
    here, best = Path.cwd(), [*drafts.items()][:MOST]
    own = {
        name: moved(value, here, folder) if isinstance(value, str) else value
        for name, value in advice.situation.params
        if name == "target" or value != PARAMETERS[name].default
    }
    first = min((largest for _, (_, largest) in best), default=1)
    batches = [first << doubling for doubling in range(DOUBLINGS + 1)]
    return [
        own | {"drafter": moved(name, here, folder), "gamma": draft, "batches": batches}
        for name, (draft, _) in best
    ]
