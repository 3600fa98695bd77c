"""The command line `specexp ...`. Each command is a few lines over the package.

Imports are inside the commands, so that `--help` does not wait for torch.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
from rich.console import Console
from rich.table import Table

from specexp.errors import NonFiniteLogits, UserError

if TYPE_CHECKING:
    from specexp.api import Pairing
    from specexp.engine import Generation
    from specexp.grids.points import Point
    from specexp.measure.exactness import Exactness
    from specexp.serving.cost_table import Costs

app = typer.Typer(
    help="Experiments with speculative decoding: does it pay for your models, prompts and load?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
grid_app = typer.Typer(help="Run grids of experiment notebooks.", no_args_is_help=True)
store_app = typer.Typer(
    help="Check, rebuild, copy or serve the store of results and runs.", no_args_is_help=True
)
zoo_app = typer.Typer(help="Train small models and heads, make twins.", no_args_is_help=True)
app.add_typer(grid_app, name="grid")
app.add_typer(store_app, name="store")
app.add_typer(zoo_app, name="zoo")


def _print_version(wanted: bool) -> None:
    if wanted:
        import specexp

        print(f"specexp {specexp.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


console = Console(markup=False, emoji=False, highlight=False)  # messages are not markup

GridFiles = Annotated[list[Path], typer.Argument(help="Grid files (YAML).", metavar="FILE...")]
TargetName = Annotated[
    str, typer.Option(help="Target model: zoo name, folder or hub id; NAME+int8: 8-bit weights.")
]
DrafterName = Annotated[
    str,
    typer.Option(
        help="METHOD, METHOD:ARGUMENT or a draft model; `specexp models` lists them. `model` is "
        "the target's draft in the zoo."
    ),
]
Gamma = Annotated[
    Optional[int],  # noqa: UP045 (typer reads this at run time)
    typer.Option(help="Draft length; default: 5, or the drafter's longest if shorter."),
]
Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")]
Dtype = Annotated[str, typer.Option(help="float32 or bfloat16.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Only = Annotated[
    Optional[list[str]],  # noqa: UP045 (typer reads this at run time)
    typer.Option(
        help="Only points with these values, such as gamma=3 or drafter=ngram,suffix; repeatable."
    ),
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask to confirm very many points.")]
Port = Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)]
Host = Annotated[
    str, typer.Option(help="Address to listen on; 127.0.0.1 admits only this machine.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def main() -> None:
    """Run the command line. Each problem of the input is one line on stderr, with exit code 2."""
    if given := os.environ.get("SPECEXP_MLRUNS"):  # kernels run in other folders
        os.environ["SPECEXP_MLRUNS"] = os.path.abspath(given)
    try:
        app()
    except UserError as e:
        for line in str(e).splitlines():
            _complain("error", line)
        sys.exit(e.code)
    except NonFiniteLogits as e:
        _complain("failed", str(e))
        sys.exit(1)
    except OSError as e:
        from specexp.grids import runner as run
        from specexp.tracking import results

        if e.errno not in results.FULL:
            raise
        _complain("disk full", f"{e.strerror}: {e.filename or results.root()}")
        sys.exit(run.DISK_FULL)


@app.command()
def generate(
    target: TargetName = "target-10m",
    drafter: Annotated[
        str,
        typer.Option(
            help="METHOD, METHOD:ARGUMENT (ngram:4, early_exit:3, eagle:FOLDER) or a draft model; "
            "`specexp models` lists them. `model` is the target's draft in the zoo."
        ),
    ] = "model",
    draft: Annotated[
        Optional[str],  # noqa: UP045 (typer reads this at run time)
        typer.Option(
            help="The drafter's ARGUMENT as its own option: --drafter eagle --draft FOLDER is "
            "--drafter eagle:FOLDER."
        ),
    ] = None,
    gamma: Gamma = None,
    tree: Annotated[
        str,
        typer.Option(
            help="chain; 3x2x1: children per node at each depth; or grown:16: the 16 guesses that "
            "the drafter is surest of, up to gamma deep."
        ),
    ] = "chain",
    temperature: Temperature = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Sample from the likeliest tokens of this total probability.")
    ] = 1.0,
    rule: Annotated[
        str,
        typer.Option(
            help="Exact: match, reject, block, or auto (reject if guesses are drawn, else match); "
            "lossy: typical, lenient:0.8."
        ),
    ] = "auto",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate, at most.")] = 64,
    dtype: Dtype = "float32",
    device: Device = "auto",
    seed: Annotated[int, typer.Option(help="Seed of sampled output.")] = 0,
    prompt: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Text to continue."),
    ] = None,
    prompts: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="Instead of --prompt: a prompts file (JSON lines), all, or a shipped category "
            "such as code."
        ),
    ] = None,
    limit: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="With --prompts: how many of them to use."),
    ] = None,
    rounds: Annotated[
        bool,
        typer.Option("--rounds", help="Also show one line per round, with the rejected guesses."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Generate speculatively, show what was accepted, and compare the output with plain decoding.

    Example: `specexp generate --prompt "def mean(values):" --gamma 4 --rounds`
    """
    from specexp import api
    from specexp.measure import parameters
    from specexp.measure.exactness import certify
    from specexp.measure.prompts import Prompt, load

    if (prompt is None) == (prompts is None):
        raise UserError('give either --prompt "some text" or --prompts FILE')
    named = drafter if draft is None else f"{drafter}:{draft}"
    options: dict[str, Any] = {
        "target": target, "drafter": named, "temperature": temperature,
        "top_k": top_k, "top_p": top_p, "rule": rule, "tree": tree, "dtype": dtype,
        "device": device, "seed": seed,
    }  # fmt: skip
    options["gamma"] = api.usual_gamma(options) if gamma is None else gamma
    if prompt is None:
        chosen = load(str(prompts), None, limit)
    else:
        chosen = [Prompt(0, "command line", (prompt,))]
    parameters.insist(options | {"max_new_tokens": max_new_tokens}, chosen)
    pairing = api.load(**options)
    for text in (p.text for p in chosen):
        if not as_json:
            pairing.generate([text], max_new_tokens)  # warm-up: the next one is timed
        made = pairing.generate([text], max_new_tokens)
        exact = certify(pairing.engine, pairing.encode([text]), max_new_tokens)
        if as_json:
            print(json.dumps(_as_dict(pairing, text, made, exact), ensure_ascii=False))
        else:
            _show(pairing, text, made, exact, rounds)
        if exact.bugs:
            raise typer.Exit(1)


def _as_dict(pairing: Pairing, text: str, made: Generation, exact: Exactness) -> dict[str, Any]:
    record = made.trace.acceptance
    record.check()
    return {
        "prompt": text,
        "tokens": made.tokens[0],
        "text": pairing.decode(made.tokens[0]),
        "rounds": [
            {"drafted": s.drafted, "accepted": s.accepted, "emitted": s.emitted}
            for s in made.trace.steps()
        ],
        "acceptance": {
            "rate": record.rate, "length": record.length, "marginal": record.marginal,
            "conditional": record.conditional, "histogram": record.histogram,
            "drafted": record.drafted, "accepted": record.accepted, "emitted": record.emitted,
            "cut": record.cut, "passes": record.passes,
        },
        "exact": {
            "pass": exact.bugs == 0 and not exact.lossy, "lossy": exact.lossy,
            "tokens": exact.tokens, "ties": exact.ties, "bugs": exact.bugs,
        },
    }  # fmt: skip


def _show(pairing: Pairing, text: str, made: Generation, exact: Exactness, rounds: bool) -> None:
    from specexp.figures import tokens

    record, trace = made.trace.acceptance, made.trace
    console.print(tokens.stream(pairing, trace.rounds, made.tokens[0], prompt=text), soft_wrap=True)
    console.print()
    if rounds:
        console.print("round  accepted/drafted", style="dim")
        console.print(tokens.by_round(pairing, trace.rounds, made.tokens[0]), soft_wrap=True)
    console.print(tokens.legend())
    cut = f" ({record.cut} more cut off at the end)" if record.cut else ""
    rate = f"acceptance rate {record.rate:.0%} of {record.drafted} drafted, "
    console.print(
        f"{record.emitted} tokens in {record.passes} target passes{cut}: acceptance length "
        f"{record.length:.2f}, {rate if record.drafted else ''}{1 / trace.tpot_s:.0f} tokens/s",
        soft_wrap=True,
    )
    console.print(str(exact), soft_wrap=True)


@app.command()
def theory(
    alpha: Annotated[float, typer.Option(help="Probability that a drafted token is accepted.")],
    gamma: Annotated[int, typer.Option(help="Draft length.")],
    cost: Annotated[
        float,
        typer.Option(help="Cost of drafting one token, in target passes: 0.1 is a tenth of one."),
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Predict the speedup by the closed forms of Leviathan et al. 2022 (arXiv 2211.17192).

    They assume independent acceptance, and that verifying a draft costs as much as one token.

    Example: `specexp theory --alpha 0.8 --gamma 5 --cost 0.1`
    """
    from dataclasses import asdict

    from specexp.theory import LONGEST, predict

    found = predict(alpha, gamma, cost)
    if as_json:
        print(json.dumps(asdict(found)))
        return
    best = f"{found.best_gamma}" + " or more" * (found.best_gamma == LONGEST)
    console.print(
        f"tokens per target pass  {found.tokens_per_pass:.4g}\n"
        f"speedup                 {found.speedup:.4g}x\n"
        f"arithmetic              {found.operations:.4g}x that of plain decoding\n"
        f"fastest draft length    {best}, at this alpha and cost"
    )


@app.command()
def profile(
    target: TargetName = "target-10m",
    drafter: DrafterName = "model",
    gamma_max: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Longest draft length; default: 5, or the drafter's longest if shorter."),
    ] = None,
    temperature: Temperature = 0.0,
    batches: Annotated[
        str, typer.Option(help="Batch sizes, separated by commas.")
    ] = "1,2,4,8,16,32,64",
    contexts: Annotated[
        str,
        typer.Option(help="Cache slots per stream; times beyond the largest are extrapolated."),
    ] = "128,256",
    dtype: Dtype = "float32",
    device: Device = "auto",
    force: Annotated[
        bool, typer.Option("--force", help="Measure again even if a table is stored.")
    ] = False,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Also write the table (JSON) here, and the figure (PNG) beside it."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the cost of rounds over batch, draft length and context, for policies and simulators.

    Takes about a minute for the zoo's models on two cores. A table measured before is reused.
    """
    from specexp import api
    from specexp.figures.break_even import cost_curves
    from specexp.measure import break_even, parameters
    from specexp.measure.prompts import Prompt

    rows, slots = _numbers("batches", batches), _numbers("contexts", contexts)
    options: dict[str, Any] = {
        "target": target, "drafter": drafter, "temperature": temperature, "top_k": 0, "top_p": 1.0,
        "dtype": dtype, "device": device, "seed": 0,
    }  # fmt: skip
    gamma = api.usual_gamma(options) if gamma_max is None else gamma_max
    options["gamma"] = gamma
    parameters.insist(options | {"batches": rows}, [Prompt(0, "command line", ("a",))])
    if out:
        _picture(out)
    pairing = api.load(**options)
    gammas = sorted({g for g in (0, 1, 2, 3, 5, 8, 12, 16, 24, 32) if g < gamma} | {gamma})
    costs = break_even.profile(pairing, rows, gammas, slots, force=force)
    files = [break_even.table_path(pairing)]
    if out:
        costs.save(out)
        files.append(out)
    for file in files:
        cost_curves(costs).savefig(file.with_suffix(".png"), dpi=110, bbox_inches="tight")
    if as_json:
        print(files[-1].read_text())
    else:
        _show_costs(costs, slots[0])
        console.print(f"kept in {_relative(files[-1])}", soft_wrap=True)


def _numbers(name: str, listed: str) -> list[int]:
    try:
        return [int(n) for n in listed.split(",")]
    except ValueError:
        raise UserError(f"{name} {listed!r}: give whole numbers such as 1,2,4") from None


def _show_costs(costs: Costs, context: int) -> None:
    from specexp.figures.break_even import in_words

    table = Table(
        "batch", *(f"n={n}" for n in costs.tokens), *(f"γ={g}" for g in costs.gammas),
        title=f"ms of a pass over n tokens a row, and of drafting γ tokens; {context} slots",
        title_justify="left", title_style="", box=None, header_style="bold",
    )  # fmt: skip
    for batch in costs.batches:
        times = [costs.verify_s(batch, n, context) for n in costs.tokens]
        times += [costs.draft_s(batch, g, context) for g in costs.gammas]
        table.add_row(str(batch), *(f"{t * 1e3:.1f}" for t in times))
    console.print(table)
    fit = costs.fit()
    knee, widest = fit.knee(context), costs.tokens[-1]
    console.print(
        f"a pass takes {in_words(fit, context)}; at about {knee:.0f} tokens they cost "
        f"as much as the floor: batch {knee:.0f} without drafts, {knee / widest:.1f} with "
        f"γ = {widest - 1}",
        soft_wrap=True,
    )  # fmt: skip


@app.command()
def serve(
    load: Annotated[
        str,
        typer.Option(
            help="How requests arrive. closed:N keeps N in flight; poisson:RATE, "
            "bursty:RATE,CV or day:RATE, in requests/s; or trace:FILE (CSV, BurstGPT columns)."
        ),
    ] = "closed:8",
    policy: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            help="plain (no drafter), never, always:GAMMA, threshold:GAMMA,ROWS, "
            "table:1=5,8=2,16=0 (rows=gamma), greedy, goodput or bandit; repeat to compare. "
            "Default: plain, always:3, goodput."
        ),
    ] = None,
    target: TargetName = "target-10m",
    drafter: DrafterName = "model",
    prompts: Annotated[
        str, typer.Option(help="A prompts file (JSON lines), a shipped category, or all.")
    ] = "all",
    count: Annotated[int, typer.Option(help="Number of requests; a trace is cut after them.")] = 64,
    max_new_tokens: Annotated[
        int, typer.Option(help="Tokens to generate per request, at most.")
    ] = 64,
    rows: Annotated[int, typer.Option(help="Requests decoded at once, at most.")] = 32,
    queue: Annotated[
        int, typer.Option(help="Requests that may wait; further ones are rejected.")
    ] = 1024,
    chunk: Annotated[int, typer.Option(help="Prompt tokens prefilled between two rounds.")] = 512,
    ttft_ms: Annotated[
        float, typer.Option(help="Goodput limit on the time to first token.")
    ] = 1000.0,
    tpot_ms: Annotated[
        float, typer.Option(help="Goodput limit on the time per token after the first.")
    ] = 50.0,
    temperature: Temperature = 0.0,
    dtype: Dtype = "float32",
    device: Device = "auto",
    seed: Annotated[int, typer.Option(help="Seed of arrivals and of sampled output.")] = 0,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Write every step (CSV) here, and the timelines (PNG) beside it."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Serve the same requests under several policies and compare throughput and latencies.

    Example: `specexp serve --load bursty:6,3 --policy plain --policy goodput`
    """
    from specexp import api
    from specexp.figures import under_load
    from specexp.measure import parameters
    from specexp.measure import prompts as questions
    from specexp.measure import under_load as serving

    options: dict[str, Any] = {
        "target": target, "drafter": drafter, "temperature": temperature, "top_k": 0, "top_p": 1.0,
        "dtype": dtype, "device": device, "seed": seed,
    }  # fmt: skip
    options["gamma"] = api.usual_gamma(options)
    usual = ["plain", f"always:{min(3, options['gamma'])}", "goodput"]
    names = list(dict.fromkeys(policy or usual))
    asked = options | {
        "policies": names, "arrivals": load, "prompts": prompts, "max_new_tokens": max_new_tokens,
        "count": count, "rows": rows, "chunk": chunk, "queue": queue, "ttft_ms": ttft_ms,
        "tpot_ms": tpot_ms,
    }  # fmt: skip
    parameters.insist(asked)
    picture = _picture(out) if out else None
    pairing = api.load(**options)
    texts = questions.load(prompts)
    offered = serving.traffic(pairing, texts, load, count, max_new_tokens, seed)
    costs = serving.prices(pairing, names, offered.requests)
    runs = serving.open_race(pairing, names, costs, offered, rows, chunk, queue)
    figures = serving.by_policy(runs, ttft_ms, tpot_ms)
    if as_json:
        print(figures.to_json(orient="records"))
    else:
        title = f"{len(offered.requests)} requests, {load}, {pairing.target.name}, {drafter}"
        _show_served(figures, title)
        for note in serving.notes(runs):
            console.print(note, soft_wrap=True)
    if out and picture:
        serving.steps(runs).to_csv(out, index=False)
        tables = {name: serving.timeline(run.steps) for name, run in runs.items()}
        under_load.timelines(tables).savefig(picture, dpi=110)


def _picture(out: Path) -> Path:
    """The path of the figure beside `out`. Raises UserError if `out` cannot be written."""
    if out.suffix == ".png":
        raise UserError(f"{out} would be overwritten by the figure: choose another extension")
    _writable(out)
    return out.with_suffix(".png")


def _writable(out: Path) -> None:
    """Raises UserError if the file cannot be written; its content is not touched."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.open("a").close()
    except OSError as e:
        raise UserError(f"cannot write {out}: {e.strerror}; choose another file") from e


def _show_served(figures: Any, title: str) -> None:
    from specexp.figures.under_load import SHOWN, as_text

    table = Table("", *figures["policy"], title=title, title_justify="left", title_style="",
                  box=None, header_style="bold")  # fmt: skip
    for column in table.columns[1:]:
        column.justify = "right"
    for key, label in SHOWN.items():
        table.add_row(label, *(as_text(key, value) for value in figures[key]))
    console.print(table)


@app.command()
def bench(
    suites: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(
            help="peers, roofline, round, scale, memory; default: all.", metavar="[SUITE]..."
        ),
    ] = None,
    target: TargetName = "target-10m",
    drafter: DrafterName = "model",
    gamma: Gamma = None,
    temperature: Temperature = 0.0,
    batches: Annotated[
        str,
        typer.Option(help="Batch sizes of scale and memory; peers uses the largest up to 8."),
    ] = "1,2,4,8,16",
    prompts: Annotated[
        str,
        typer.Option(
            help="A prompts file, a shipped category, or all; five prompts are used, evenly over "
            "categories."
        ),
    ] = "all",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate per prompt.")] = 64,
    repeats: Annotated[
        int, typer.Option(help="Timed turns per prompt; single passes get ten times as many.")
    ] = 3,
    dtype: Dtype = "float32",
    device: Device = "auto",
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            help="Write the results (JSON) here, and a figure (PNG) per suite beside it; in a "
            "folder the file is named by device, dtype and target."
        ),
    ] = None,
    against: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            help="A file written by --out before: compare the ratios; exit code 1 if any is worse."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Is this machine limited by its hardware or by the toolkit? All timings are interleaved.

    peers: other engines at the same work. roofline: a pass against memory bandwidth and its bare
    matrix products. round: where a round's time goes. scale: cost of a pass over batch, tokens and
    context. memory: peak against the prediction from configs. Takes two to four minutes for the
    zoo's models on two cores.
    """
    from specexp import api
    from specexp.figures import hardware
    from specexp.measure import prompts as questions
    from specexp.measure.hardware import regression
    from specexp.measure.hardware import suites as lab
    from specexp.serving.cost_table import write_whole

    names = list(dict.fromkeys(suites or lab.NAMES))
    options: dict[str, Any] = {
        "target": target, "drafter": drafter, "temperature": temperature, "top_k": 0, "top_p": 1.0,
        "dtype": dtype, "device": device, "seed": 0,
    }  # fmt: skip
    options["gamma"] = api.usual_gamma(options) if gamma is None else gamma
    rows, texts = _numbers("batches", batches), questions.load(prompts, limit=lab.PROMPTS)
    asked = {"batches": rows, "max_new_tokens": max_new_tokens, "repeats": repeats}
    lab.check(names, options | asked, texts)
    parameters = options | asked | {"prompts": prompts}
    earlier = regression.read(against, parameters, names) if against else None
    report: dict[str, Any] = {"parameters": parameters, "suites": {}}
    if out:
        out = lab.report_path(out, options)
        _writable(out)
    pairing = api.load(**options)
    report["about"] = lab.about(pairing.target.device, pairing.target.dtype)
    if not as_json:
        console.print(hardware.heading(report["about"]), soft_wrap=True)
    if warning := report["about"]["warning"]:
        _complain("warning", warning)
    for name in names:
        found = report["suites"][name] = lab.run(
            name, pairing, texts, rows, max_new_tokens, repeats
        )
        if out:
            write_whole(out, json.dumps(report, indent=1))
            picture = out.with_name(f"{out.stem}-{name}.png")
            hardware.figure(name, found).savefig(picture, dpi=110, bbox_inches="tight")
        if not as_json:
            shown, notes = hardware.tables(name, found)
            console.print(*shown, *notes, "", soft_wrap=True, sep="\n")
    if as_json:
        print(json.dumps(report))
    elif out:
        console.print(f"kept in {_relative(out)}", soft_wrap=True)
    if earlier:
        seen = regression.changes(earlier, report)
        if not as_json:
            console.print(regression.table(seen, earlier, report), soft_wrap=True)
        raise typer.Exit(int(any(change.worse for change in seen)))


@app.command()
def models(as_json: AsJson = False) -> None:
    """List the zoo's models, which draft goes with which target, and all drafting methods."""
    from specexp import drafters
    from specexp.zoo import shelf

    found = shelf.models()
    if as_json:
        listed = [
            {
                "name": m.name, "path": str(m.path), "parameters": m.parameters, "role": m.role,
                "target": m.target, "drafts": [d.name for d in shelf.drafts_for(m.name)],
            }
            for m in found
        ]  # fmt: skip
        print(json.dumps(listed, indent=2))
        return
    table = Table("name", "role", "parameters", "drafts for", "path", box=None, header_style="bold")
    for m in found:
        size = f"{m.parameters / 1e6:.1f}M"
        table.add_row(m.name, m.role, size, m.target or "", str(_relative(m.path)))
    console.print(table)
    console.print()
    methods = Table("--drafter", "how it guesses", box=None, header_style="bold")
    for method, about in drafters.described():
        methods.add_row(method, about)
    console.print(methods)
    if shelf.shipped() is None:
        console.print(f"\n{shelf.GET}", soft_wrap=True)
    note = "\nA model is given as zoo name, folder or hub id; NAME+int8 has 8-bit weights."
    console.print(note, soft_wrap=True)


@app.command()
def doctor() -> None:
    """Report versions, device, speed by dtype and disk space, and what is missing (exit code 1)."""
    from specexp.commands.doctor import examine

    healthy = examine(console)
    raise typer.Exit(0 if healthy else 1)


@app.command()
def ui(port: Port = 5000, host: Host = "127.0.0.1") -> None:
    """Serve the MLflow UI for this machine and print a link to each experiment's shared view."""
    from specexp.tracking import mlflow_server

    mlflow_server.show(port, host)


@store_app.command("check")
def store_check() -> None:
    """Check that every result is whole and in MLflow once, unchanged; exit code 4 if not."""
    from specexp.tracking import audit

    raise typer.Exit(0 if audit.show(console) else 4)


@store_app.command("rebuild")
def store_rebuild() -> None:
    """Rebuild MLflow's database from the results; the old one is renamed, not deleted."""
    from specexp.tracking import audit, rebuild

    rebuild.show(rebuild.rebuild(console), console)
    raise typer.Exit(0 if audit.show(console) else 4)


def _points(files: list[Path], only: list[str] | None, yes: bool) -> list[Point]:
    """The points of grid files; at a terminal, very many need a confirmation."""
    from specexp.grids import points as grid

    def ask(count: int) -> bool:
        return yes or typer.confirm(f"{count:,} points: is that intended?")

    return grid.load(files, ask if yes or sys.stdin.isatty() else None, only or ())


@grid_app.command("validate")
def grid_validate(files: GridFiles, only: Only = None, yes: Yes = False) -> None:
    """Check grid files completely, without running anything."""
    points = _points(files, only, yes)
    console.print(f"{len(points)} points in {len(files)} files: ready to run")


@grid_app.command("run")
def grid_run(
    files: GridFiles,
    only: Only = None,
    jobs: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            help="Points to run at once; points that measure time still get a machine to "
            "themselves. Default: 1 here, what fits on Ray."
        ),
    ] = None,
    on: Annotated[
        str,
        typer.Option(
            help="Where to run: here; ray (all CPUs and GPUs of this machine); or a Ray cluster as "
            "HOST:6379, ray://HOST:10001 or auto (the one running here)."
        ),
    ] = "here",
    together: Annotated[
        bool,
        typer.Option("--together", help="Run timed points side by side too: timings get rough."),
    ] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Run points again that failed before.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Run finished points again; old results are kept.")
    ] = False,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Start every kernel from scratch instead of forking: slower."),
    ] = False,
    yes: Yes = False,
) -> None:
    """Run every point that has not finished yet.

    Ctrl-C stops the run without losing finished points; the same command resumes it. Exit code:
    0 all done, 1 some failed, 2 bad input, 3 store busy, 4 store damaged, 5 disk full.
    """
    from specexp.grids import runner as run
    from specexp.grids.machines import local

    if jobs is not None and jobs < 1:
        raise UserError(f"--jobs is {jobs}; it must be 1 or more")
    points = _points(files, only, yes)
    say = partial(console.print, soft_wrap=True)
    place = local.of(on, points, forked=not fresh, together=together, say=say)
    raise typer.Exit(
        run.run(
            points, console, place=place, jobs=jobs, together=together,
            retry_failed=retry_failed, force=force,
        )
    )  # fmt: skip


@grid_app.command("status")
def grid_status(files: GridFiles, only: Only = None, yes: Yes = False) -> None:
    """Show which points are done, running, failed or to run, and an estimate of the time left."""
    from specexp.grids import progress

    points = _points(files, only, yes)
    console.print(progress.status(points))
    for line in progress.changed(points):
        console.print(line, soft_wrap=True)


@zoo_app.command("train")
def zoo_train(
    only: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Train only this model (repeatable); default: all, the target first."),
    ] = None,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            help="Folder to write to; default: mlruns/zoo/models, with --quick mlruns/zoo/quick."
        ),
    ] = None,
    heads: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Train heads for --target instead: medusa, eagle or eagle3."),
    ] = None,
    target: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="With --heads: zoo name, folder or hub id; default: target-10m."),
    ] = None,
    text: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="With --heads: a text file to train on; default: the zoo's own text."),
    ] = None,
    device: Device = "auto",
    quick: Annotated[
        bool, typer.Option("--quick", help="Train only a few steps, to test the setup.")
    ] = False,
) -> None:
    """Train the zoo on the text files of this Python installation, or heads for any target.

    An interrupted training resumes with the same command.

    Example: `specexp zoo train --heads eagle3 --target target-10m`
    """
    from specexp import api

    device = api.where(device)
    if heads is not None:
        if only:
            raise UserError("--only trains models and --heads trains heads: give only one of them")
        _train_heads(heads, target or "target-10m", out, device, quick, text)
        return
    for option, given in (("--target", target), ("--text", text)):
        if given is not None:
            raise UserError(f"{option} belongs to --heads: add --heads medusa, eagle or eagle3")
    from specexp.zoo.train import train_zoo

    for folder in train_zoo(only or None, out, device=device, quick=quick):
        console.print(f"wrote {_relative(folder)}", soft_wrap=True)


def _train_heads(
    kind: str, target: str, out: Path | None, device: str, quick: bool, text: Path | None
) -> None:
    """Train heads and log loss and accuracy by position to the MLflow experiment `heads`."""
    from specexp import api
    from specexp.tracking import runs as track
    from specexp.zoo.heads import train_heads

    history: dict[str, dict[int, float]] = {}

    def watch(step: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            history.setdefault(name, {})[step] = value

    folder = train_heads(kind, api.locate(target), out, device=device, quick=quick, text=text,
                         watch=watch)  # fmt: skip
    last = {name: values[max(values)] for name, values in history.items()}
    method = {"eagle3": "eagle"}.get(kind, kind)
    console.print(
        f"wrote {_relative(folder)}; use it as --drafter {method}:{_relative(folder)}",
        soft_wrap=True,
    )  # fmt: skip
    track.log("heads", {"heads": kind, "target": target, "quick": quick}, last, history)


@zoo_app.command("twin")
def zoo_twin(
    params: Annotated[str, typer.Option(help="Size, in the shapes of Llama 3: 200M, 1B, 8B, 70B.")],
    alpha: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="Acceptance probability to reach, per token of a greedy chain."),
    ] = None,
    damp: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="Instead of --alpha: the factor on the output of the deep layers."),
    ] = None,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Folder to write both models to; default: mlruns/twins."),
    ] = None,
    dtype: Dtype = "bfloat16",
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
    vocab: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Vocabulary size; default: the shape's (200M: 32768, else 128256)."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace existing twins of the same name.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Create a target and a draft of a real model's shape with random weights and a chosen
    acceptance, to measure true costs at any scale without a download.

    Example: `specexp zoo twin --params 200M --alpha 0.8`
    """
    from specexp.zoo import shelf, twins

    facts = twins.make(params, alpha, out, damp, dtype, seed, vocab, force)
    if as_json:
        print(json.dumps(facts))
        return
    name, seen = facts["name"], facts["agreement"]
    place = _relative(out or shelf.made("twins")) / name
    reached = "acceptance not measured"
    if alpha is not None:
        reached = f"alpha {alpha} requested, {seen['reached']} ± {seen['error']} on {seen['on']}"
    pair = f"{place}-target --drafter {place}-draft" if out else name
    console.print(
        f"wrote {place}-target of {facts['parameters']:,} parameters, and {place}-draft\n"
        f"{reached}; output of deep layers scaled by {seen['damp']}\n"
        f"use them as --target {pair} --dtype {dtype}",
        soft_wrap=True,
    )  # fmt: skip


def _relative(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _complain(what: str, line: str) -> None:
    from rich.text import Text

    Console(stderr=True).print(Text(what, "bold red") + Text(f": {line}", ""), soft_wrap=True)


if __name__ == "__main__":
    main()
