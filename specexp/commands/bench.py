"""`specexp bench` and `specexp profile`: what this machine does with a pairing."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from specexp import terminal
from specexp.commands import options as opt

if TYPE_CHECKING:
    from specexp.serving.cost_table import Costs


def bench(
    ctx: typer.Context,
    suites: list[str] | None = typer.Argument(
        None, help="peers, roofline, round; default: all.", metavar="[SUITE]..."
    ),
    target: str = opt.TARGET,
    drafter: str = opt.DRAFTER,
    gamma: int | None = opt.GAMMA,
    temperature: float = opt.TEMPERATURE,
    sampling: str = opt.SAMPLING,
    batches: str = opt.option(
        "batches", "Written as 1,8; peers uses the largest up to 8.", "1,2,4,8,16"
    ),
    prompts: str = opt.option("prompts", "Five are used, spread evenly over the categories."),
    max_new_tokens: int = opt.MAX_NEW_TOKENS,
    repeats: int = opt.own("Timed turns per prompt; single passes get ten times as many.", 3),
    dtype: str = opt.DTYPE,
    device: str = opt.DEVICE,
    out: Path | None = opt.own(
        "Write the results (JSON) here; in a folder the file is named by device, dtype and target."
    ),
    against: Path | None = opt.own(
        "An earlier --out file to compare ratios with; exit code 1 if any is worse now."
    ),
    as_json: bool = opt.AS_JSON,
) -> None:
    """Is this machine limited by its hardware or by the toolkit? All timings are interleaved.

    peers: other engines doing the same work. roofline: a pass compared with memory bandwidth and
    with its bare matrix products. round: where a round's time goes. Takes two to three minutes for
    the zoo's models on two cores. For costs by batch, draft length and context: `specexp profile`.
    """
    from specexp.measure import prompts as questions
    from specexp.measure.hardware import work

    names = list(dict.fromkeys(suites or work.NAMES))
    options = opt.pairing_options(ctx.params)
    rows, limit = opt.numbers("batches", batches), work.PROMPTS
    given = {"batches": rows, "max_new_tokens": max_new_tokens, "repeats": repeats,
             "prompts": prompts}  # fmt: skip
    work.insist(names, options | given | {"limit": limit})
    texts = questions.load(prompts, limit=limit)

    from specexp import api
    from specexp.figures import hardware
    from specexp.measure.hardware import regression
    from specexp.measure.hardware.suites import about, report_path, run
    from specexp.zoo import files

    if gamma is None:
        options["gamma"] = api.usual_gamma(api.DEFAULTS | options)
    parameters = options | given
    earlier = regression.read(against, parameters, names) if against else None
    report: dict[str, Any] = {"parameters": parameters, "suites": {}}
    if out:
        out = report_path(out, options)
        opt.check_writable(out)
    pairing = api.load(**options)
    report["about"] = about(pairing.target.device, pairing.target.dtype)
    if not as_json:
        opt.say(hardware.heading(report["about"]))
    for line in report["about"]["warning"].splitlines():
        opt.complain("warning", line)
    for name in names:
        try:
            result = run(name, pairing, texts, rows, max_new_tokens, repeats)
            report["suites"][name] = result
        except KeyboardInterrupt as e:  # from `interleave.time_in_turns`
            report["interrupted"] = {name: e.args[0] if e.args else {}}
        if out:
            files.write(out, json.dumps(report, indent=1))
        if "interrupted" in report:
            break
        if not as_json:
            tables, notes = hardware.tables(name, result)
            opt.say(*tables, *notes, "")
    if as_json:
        opt.print_json(report)
    elif out:
        opt.say(f"kept in {opt.relative(out)}")
    if "interrupted" in report:
        opt.complain("interrupted", hardware.so_far(report["interrupted"]))
        raise typer.Exit(130)
    if earlier:
        changes = regression.changes(earlier, report)
        if not as_json:
            opt.say(hardware.changed(changes, earlier, report))
        raise typer.Exit(int(any(change.worse for change in changes)))


def profile(
    ctx: typer.Context,
    target: str = opt.TARGET,
    drafter: str = opt.DRAFTER,
    gamma_max: int | None = opt.own(
        "Longest draft length. Default: 5, or the drafter's longest if shorter."
    ),
    temperature: float = opt.TEMPERATURE,
    batches: str = opt.option("batches", "Written as 1,8.", "1,2,4,8,16,32,64"),
    contexts: str = opt.option(
        "contexts", "Written as 128,256; times beyond the largest are extrapolated.", "128,256"
    ),
    dtype: str = opt.DTYPE,
    device: str = opt.DEVICE,
    force: bool = opt.own("Measure again even if a table is stored.", False),
    out: Path | None = opt.own("Also write the table (JSON) here, and the figure (PNG) beside it."),
    as_json: bool = opt.AS_JSON,
) -> None:
    """Measure the cost of rounds over batch, draft length and context, for policies and simulators.

    Takes about a minute for the zoo's models on two cores. A table measured before is reused.
    """
    from specexp.measure import parameters
    from specexp.measure.prompts import Prompt

    rows, slots = opt.numbers("batches", batches), opt.numbers("contexts", contexts)
    options = opt.pairing_options(ctx.params | {"gamma": gamma_max})
    given = {"batches": rows, "contexts": slots}
    parameters.insist(options | given, [Prompt(1, "command line", ("a",))])
    if out:
        opt.picture_beside(out)

    from specexp import api
    from specexp.figures.break_even import cost_curves
    from specexp.measure import break_even
    from specexp.measure.hardware.machine import doubts

    pairing = api.load(**options)
    gamma = pairing.gamma
    gammas = sorted({g for g in (0, 1, 2, 3, 5, 8, 12, 16, 24, 32) if g < gamma} | {gamma})
    costs = break_even.profile(pairing, rows, gammas, slots, force=force)
    for line in doubts(pairing.target.device):
        opt.complain("warning", line)
    files = [break_even.table_path(pairing)]
    if out:
        costs.save(out)
        files.append(out)
    for file in files:
        cost_curves(costs).savefig(file.with_suffix(".png"), dpi=110, bbox_inches="tight")
    if as_json:
        fit = costs.fit()
        fitted = asdict(fit) | {"context": slots[0], "knee": fit.knee(slots[0])}
        opt.print_json(json.loads(files[-1].read_text()) | {"fit": fitted})
    else:
        _show_costs(costs, slots[0])
        opt.say(f"kept in {opt.relative(files[-1])}")


def _show_costs(costs: Costs, context: int) -> None:
    from specexp.figures.break_even import doubt, floor_ends, in_words

    table = terminal.table(
        f"{costs.about['target']} with {costs.about['drafter']}: ms of a pass over n tokens a row, "
        f"and of drafting γ tokens; {context} slots",
        "batch", *(f"n={n}" for n in costs.tokens), *(f"γ={g}" for g in costs.gammas[1:]),
    )  # fmt: skip
    for batch in costs.batches:
        times = [costs.verify_s(batch, n, context) * 1e3 for n in costs.tokens]
        times += [costs.draft_s(batch, g, context) * 1e3 for g in costs.gammas[1:]]
        table.add_row(str(batch), *(f"{t:.1f}" if t >= 1 else f"{t:.2g}" for t in times))
    fit = costs.fit()
    opt.console.print(table)
    opt.say(f"a pass takes {in_words(fit, context)}{doubt(costs)}; {floor_ends(costs, context)}")
