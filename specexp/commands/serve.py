"""`specexp serve`: the same requests under several policies."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from specexp.commands import options as opt
from specexp.errors import counted


def serve(
    ctx: typer.Context,
    load: Annotated[
        str,
        typer.Option(
            help="How requests arrive. closed:N keeps N in flight; poisson:RATE, "
            "bursty:RATE,CV or day:RATE, in requests/s; or trace:FILE (CSV, BurstGPT columns)."
        ),
    ] = "closed:8",
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="plain (no drafter), never, always:GAMMA, threshold:GAMMA,ROWS, "
            "table:1=5,8=2,16=0 (rows=gamma), greedy, goodput or bandit; repeat to compare. "
            "Default: plain, always:3, goodput."
        ),
    ] = None,
    target: opt.Target = opt.default("target"),
    drafter: opt.Drafter = opt.default("drafter"),
    prompts: Annotated[str, opt.option("prompts")] = opt.default("prompts"),
    chat: opt.Chat = False,
    count: Annotated[int, opt.option("count", "A trace is cut after them.")] = opt.default("count"),
    max_new_tokens: opt.MaxNewTokens = opt.default("max_new_tokens"),
    rows: Annotated[int, opt.option("rows")] = opt.default("rows"),
    queue: Annotated[int, opt.option("queue")] = opt.default("queue"),
    chunk: Annotated[int, opt.option("chunk")] = opt.default("chunk"),
    ttft_ms: Annotated[float, opt.option("ttft_ms", "For goodput.")] = opt.default("ttft_ms"),
    tpot_ms: Annotated[float, opt.option("tpot_ms", "For goodput.")] = opt.default("tpot_ms"),
    temperature: opt.Temperature = opt.default("temperature"),
    sampling: opt.OwnSampling = opt.default("sampling"),
    dtype: opt.Dtype = opt.default("dtype"),
    device: opt.Device = opt.default("device"),
    seed: Annotated[int, opt.option("seed", "And of arrivals.")] = opt.default("seed"),
    out: Annotated[
        Path | None,
        typer.Option(help="Write every step (CSV) here, and the timelines (PNG) beside it."),
    ] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Serve the same requests under several policies and compare throughput and latencies.

    Example: `specexp serve --load bursty:6,3 --policy plain --policy goodput`
    """
    from specexp import api
    from specexp.figures import under_load
    from specexp.measure import parameters
    from specexp.measure import prompts as questions
    from specexp.measure import under_load as serving
    from specexp.measure.hardware.machine import doubts

    options = opt.pairing_options(ctx.params)
    usual = ["plain", f"always:{min(3, options['gamma'])}", "goodput"]
    names = list(dict.fromkeys(policy or usual))
    parameters.insist(ctx.params | options | {"policies": names, "policy": None, "arrivals": load})
    picture = opt.picture_beside(out) if out else None
    pairing = api.load(**options)
    texts = questions.in_chat(questions.load(prompts), pairing, max_new_tokens, chat)
    offered = serving.traffic(pairing, texts, load, count, max_new_tokens, seed)
    costs = serving.prices(pairing, names, offered.requests)
    for line in doubts(pairing.target.device):
        opt.complain("warning", line)
    runs = serving.open_race(pairing, names, costs, offered, rows, chunk, queue)
    figures = serving.by_policy(runs, ttft_ms, tpot_ms)
    notes = serving.notes(runs)
    if as_json:
        policies = json.loads(figures.to_json(orient="records"))
        print(opt.json_text({"policies": policies, "notes": notes}))
    else:
        requests = counted(len(offered.requests), "request")
        _show_served(figures, f"{requests}, {load}, {pairing.target.name}, {drafter}")
        for note in notes:
            opt.say(note)
    if out and picture:
        serving.steps(runs).to_csv(out, index=False)
        tables = {name: serving.timeline(run.steps) for name, run in runs.items()}
        under_load.timelines(tables).savefig(picture, dpi=110)


def _show_served(figures: Any, title: str) -> None:
    from specexp.figures.under_load import SHOWN, as_text

    table = Table("", *figures["policy"], title=title, title_justify="left", title_style="",
                  box=None, header_style="bold")  # fmt: skip
    for column in table.columns[1:]:
        column.justify = "right"
    for key, label in SHOWN.items():
        table.add_row(label, *(as_text(key, value) for value in figures[key]))
    opt.console.print(table)
