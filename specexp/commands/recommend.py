"""`specexp recommend`: what to switch on, from the results that are there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from specexp import terminal
from specexp.commands import options as opt
from specexp.errors import UserError, counted

if TYPE_CHECKING:
    from specexp.decision.recommend import Advice

MEANING = (
    "Intervals are 95 % and hold for all settings of a batch size at once; drafting is on where "
    "they lie above 1."
)
MOST = 5  # results that are not used, with the reason of each


def recommend(
    target: str = typer.Argument(
        "", help="The target, as in the results. Default: every target.", metavar="TARGET"
    ),
    out: Path | None = opt.own(
        "Write the first table's speedups by batch size as CSV, and a figure beside it."
    ),
    grid: Path | None = opt.own(
        "Write a grid file that tries, in larger batches, what pays in the largest of each table."
    ),
    as_json: bool = opt.AS_JSON,
) -> None:
    """Say which drafter to switch on, with which draft length, and up to which load.

    Joins the results of all grids and notebooks that share target, prompts, output length,
    sampling, machine and kernels. It runs nothing, and says what was not measured.
    """
    picture = opt.picture_beside(out) if out else None
    if grid:
        if grid.exists():
            raise UserError(f"{grid} is there already: give another name")
        opt.check_writable(grid)

    from specexp.decision import engines, next_grid
    from specexp.decision import recommend as recommending
    from specexp.tracking import results

    if not (every := recommending.advise(target)):
        of = f" of {target}" * bool(target)
        raise UserError(
            f"no result{of} in {results.root()} has a speedup: run 20_latency, 40_drafters or "
            "30_throughput_under_batch, by hand or in a grid"
        )
    if grid:
        grid.write_text(next_grid.text(every, grid.parent.resolve()))
    options = [engines.of_advice(advice) for advice in every]
    if as_json:
        opt.print_json([
            {"target": advice.situation.target, "situation": str(advice.situation),
             "verdict": advice.verdict(), "drafters": advice.table().to_dict("records"),
             "measured": advice.speedups().to_dict("records"), "not_used": advice.left_out,
             "remedy": advice.remedy, "engines": engine}
            for advice, engine in zip(every, options, strict=True)
        ])  # fmt: skip
    else:
        for advice, engine in zip(every, options, strict=True):
            _show(advice, engine)
        if grid:
            opt.say(f"To measure what is open: specexp grid run {grid}")
    if out and picture:
        from specexp.figures import runs

        measured, about = every[0].speedups(), every[0].situation
        measured.to_csv(out, index=False)
        runs.plans(measured, f"{about.target}, {about}").savefig(picture, dpi=110)


def _show(advice: Advice, engine: Mapping[str, str]) -> None:
    title, table = f"{advice.situation.target}: {advice.situation}", advice.table()
    rows = terminal.table(title, *table)
    for row in table.itertuples(index=False):
        rows.add_row(*row)
    opt.console.print(*([rows] if len(table) else [title]))
    opt.say(advice.verdict())
    if advice.plans:
        opt.say(MEANING)
    if advice.left_out:
        opt.say(f"Not used: {counted(len(advice.left_out), 'result')}")
        for name, why in advice.left_out[:MOST]:
            opt.say(f"  {name}: {why}")
    if advice.remedy:
        opt.say(advice.remedy)
    if engine:
        there = "acceptance carries over, the speedup must be measured there: run 50_servers"
        there = "as measured there" if advice.situation.engine else there
        opt.say(f"In an engine ({there}):")
        for name, text in engine.items():
            opt.say(f"  {name:13s} {text}")
    opt.say("")
