"""The grid that measures what results leave open: up to which batch size does it pay to draft?"""

import os
from pathlib import Path

import yaml

from specexp.decision.recommend import Advice, moved
from specexp.errors import UserError
from specexp.measure.parameters import PARAMETERS
from specexp.tracking import results

NOTEBOOK = "notebooks/30_throughput_under_batch.ipynb"
MOST, DOUBLINGS = 3, 5  # drafters, the best first; batch sizes beyond the largest measured one


def text(advice: Advice, folder: Path) -> str:
    """A grid file for a folder: the drafters that pay in every batch in which they were measured,
    each with the draft length chosen in the largest, from there on in batches twice as large each.
    Raises UserError if there are none, or if no result can be trusted."""
    if not advice.plans:
        raise UserError(str(advice))
    drafts = {
        plan.drafter: (chosen.draft, plan.largest)
        for plan in advice.plans
        for last, chosen in plan.steps[-1:]
        if last == plan.largest and isinstance(chosen.draft, int)
    }
    if not drafts:
        raise UserError(
            f"no chain of draft tokens pays for {advice.situation.target} in the largest batch in "
            "which it was measured: larger ones need no grid, and trees have none"
        )
    here = Path.cwd()
    own = {
        name: moved(value, here, folder) if isinstance(value, str) else value
        for name, value in advice.situation.params
        if name == "target" or value != PARAMETERS[name].default
    }
    best = {moved(name, here, folder): draft for name, draft in [*drafts.items()][:MOST]}
    first = min(largest for _, largest in best.values())
    grid = {
        "notebook": os.path.relpath(results.ROOT / NOTEBOOK, folder),
        "fixed": own | {"batches": [first << doubling for doubling in range(DOUBLINGS + 1)]},
        "include": [{"drafter": name, "gamma": draft} for name, (draft, _) in best.items()],
        "timeout_s": 3600,
    }
    question = "# In which batches do the drafters pay that pay in smaller ones?\n"
    return question + yaml.safe_dump(grid, sort_keys=False, default_flow_style=None)
