"""`specexp serve`: the same requests under several policies."""

import json
from pathlib import Path

import typer

from specexp import terminal
from specexp.commands import options as opt
from specexp.errors import counted


def serve(
    ctx: typer.Context,
    load: str = opt.own(
        "How requests arrive. closed:N keeps N in flight; poisson:RATE, "
        "bursty:RATE,CV or day:RATE, in requests/s; or trace:FILE (CSV, BurstGPT columns).",
        "closed:8",
    ),
    policy: list[str] | None = opt.own(
        "plain (no drafter), never (a drafter that never drafts), always:GAMMA, "
        "threshold:GAMMA,ROWS, table:1=5,8=2,16=0 (rows=gamma), greedy, goodput or bandit; repeat "
        "to compare. Default: plain, always:3, goodput."
    ),
    target: str = opt.TARGET,
    drafter: str = opt.DRAFTER,
    prompts: str = opt.option("prompts"),
    chat: bool = opt.CHAT,
    count: int = opt.own("Number of requests to serve; of a trace, the first ones.", 64),
    max_new_tokens: int = opt.MAX_NEW_TOKENS,
    rows: int = opt.option("rows"),
    queue: int = opt.option("queue"),
    chunk: int = opt.option("chunk"),
    ttft_ms: float = opt.option("ttft_ms", "Goodput counts requests within both limits."),
    tpot_ms: float = opt.option("tpot_ms", "Goodput counts requests within both limits."),
    temperature: float = opt.TEMPERATURE,
    sampling: str = opt.SAMPLING,
    dtype: str = opt.DTYPE,
    device: str = opt.DEVICE,
    seed: int = opt.option("seed", "Arrivals depend on it too."),
    out: Path | None = opt.own("Write every step (CSV) here, and the timelines (PNG) beside it."),
    as_json: bool = opt.AS_JSON,
) -> None:
    """Serve the same requests under several policies and compare throughput and latencies.

    Example: `specexp serve --load bursty:6,3 --policy plain --policy goodput`
    """
    from specexp.measure import parameters
    from specexp.measure import prompts as questions

    options = opt.pairing_options(ctx.params)
    given = {"policies": policy, "policy": None, "arrivals": load}
    parameters.insist(ctx.params | options | given)
    picture = opt.picture_beside(out) if out else None

    from specexp import api
    from specexp.figures import under_load
    from specexp.measure import under_load as serving
    from specexp.measure.hardware.machine import doubts

    pairing = api.load(**options)
    usual = ["plain", f"always:{min(3, pairing.gamma)}", "goodput"]
    names = list(dict.fromkeys(policy or usual))
    texts = questions.in_chat(questions.load(prompts), pairing, max_new_tokens, chat)
    offered = serving.traffic(pairing, texts, load, count, max_new_tokens, seed)
    costs = serving.costs_for(pairing, names, offered, rows)
    for line in doubts(pairing.target.device):
        opt.complain("warning", line)
    runs = serving.open_loop(pairing, names, costs, offered, rows, chunk, queue)
    figures = serving.by_policy(runs, ttft_ms, tpot_ms)
    about = f"{pairing}, {counted(len(offered.requests), 'request')}, {load}"
    notes = serving.notes(runs)
    if as_json:
        policies = json.loads(figures.to_json(orient="records"))
        opt.print_json({"policies": policies, "notes": notes})
    else:
        table = terminal.table(about, "", *figures["policy"])
        for key, label in under_load.SHOWN.items():
            table.add_row(label, *(under_load.as_text(key, value) for value in figures[key]))
        opt.console.print(table)
        limits = f"limits: TTFT {ttft_ms:g} ms, TPOT {tpot_ms:g} ms"
        opt.say(f"{limits}; - where requests are too few", *notes)
    if out and picture:
        serving.step_table(runs).to_csv(out, index=False)
        tables = {name: serving.timeline(run.steps) for name, run in runs.items()}
        under_load.timelines(tables, about).savefig(picture, dpi=110)
