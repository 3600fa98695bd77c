"""`specexp check`: a running server against the same target and drafter here."""

from __future__ import annotations

from math import isnan
from pathlib import Path

import typer

from specexp import terminal
from specexp.commands import options as opt


def check(
    ctx: typer.Context,
    url: str = typer.Argument(
        help="A vLLM, SGLang or llama.cpp server that drafts, such as http://localhost:8000.",
        metavar="URL",
    ),
    plain: str | None = opt.own("The same server without drafting, to measure the speedup too."),
    target: str = opt.TARGET,
    drafter: str = opt.DRAFTER,
    gamma: int | None = opt.GAMMA,
    prompts: str = opt.option("prompts"),
    limit: int = opt.option("limit", "", 20),
    chat: bool = opt.CHAT,
    max_new_tokens: int = opt.MAX_NEW_TOKENS,
    dtype: str = opt.DTYPE,
    device: str = opt.DEVICE,
    out: Path | None = opt.own("Write the counts and times of each prompt (CSV) here."),
    as_json: bool = opt.AS_JSON,
) -> None:
    """Compare a running server's text, acceptance and speed with an exact reference here.

    Give the server's own target, drafter, draft length and dtype. Prompts are sent one at a time,
    greedily; nothing else may use the server meanwhile. An API key is read from SPECEXP_API_KEY.
    Exit code 1: its text is not the target's. Under load: the notebook 50_servers.

    Example: `specexp check http://localhost:8000 --target Qwen/Qwen3-8B --drafter ngram --gamma 4`
    """
    from specexp.measure import parameters
    from specexp.measure import prompts as questions

    options = opt.pairing_options(ctx.params)
    parameters.insist(ctx.params | options)
    if out:
        opt.check_writable(out)

    from specexp import api
    from specexp.decision import check as checking
    from specexp.measure.servers import Server

    server, other = Server(url), Server(plain) if plain else None
    pairing = api.load(**options)
    texts = questions.in_chat(questions.load(prompts, limit=limit), pairing, max_new_tokens, chat)
    result = checking.check(server, pairing, texts, max_new_tokens, other)
    if out:
        result.samples.to_csv(out, index=False)
    engine = server.dialect.name
    if as_json:
        opt.print_json({
            "engine": engine, "model": server.model, "drafter": pairing.drafter,
            "gamma": pairing.gamma, "findings": result.lines(),
            "positions": result.positions.to_dict("records"),
            "prompts": result.samples.to_dict("records"), **result.figures(),
        })  # fmt: skip
    else:
        opt.say(f"{engine} at {server.url}: {server.model}; here {pairing.drafter}, {texts}")
        opt.say(*result.lines())
        if result.drafts:
            rows = terminal.table("drafts with at least so many tokens accepted",
                                  "", *result.positions["position"].astype(str))  # fmt: skip
            for side in ("server", "here"):
                shares = result.positions[side]
                rows.add_row(side, *("-" if isnan(x) else f"{x:.0%}" for x in shares))
            opt.console.print(rows)
    raise typer.Exit(1 if result.exactness.bugs else 0)
