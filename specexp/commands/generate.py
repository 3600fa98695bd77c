"""`specexp generate` and `specexp theory`: one text, and what the closed forms predict."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from specexp.commands import options as opt
from specexp.errors import UserError, counted

if TYPE_CHECKING:
    from specexp.api import Output, Pairing
    from specexp.measure.exactness import Exactness
    from specexp.measure.prompts import Prompt
    from specexp.trace import Acceptance

RUNS = 3  # of each kind that are timed


def generate(
    ctx: typer.Context,
    target: str = opt.TARGET,
    drafter: str = opt.DRAFTER,
    gamma: int | None = opt.GAMMA,
    tree: str = opt.option(
        "tree",
        "3x2x1: children per node at each depth; grown:16: the 16 draft tokens that the "
        "drafter is surest of, up to gamma deep.",
    ),
    temperature: float = opt.TEMPERATURE,
    top_k: int = opt.option("top_k"),
    top_p: float = opt.option("top_p"),
    min_p: float = opt.option("min_p"),
    sampling: str = opt.SAMPLING,
    rule: str = opt.option("rule", "typical and lenient:0.8 are lossy."),
    max_new_tokens: int = opt.MAX_NEW_TOKENS,
    dtype: str = opt.DTYPE,
    device: str = opt.DEVICE,
    seed: int = opt.SEED,
    prompt: str | None = typer.Option(None, help="Text to continue.", rich_help_panel="Prompts"),
    prompts: str | None = opt.option("prompts", "Use it instead of --prompt.", None),
    limit: int | None = opt.option("limit", "Only with --prompts.", None),
    chat: bool = opt.CHAT,
    rounds: bool = opt.own("Also show one line per round, with rejected draft tokens.", False),
    as_json: bool = opt.AS_JSON,
) -> None:
    """Generate speculatively, show what was accepted, and compare the output with plain decoding.

    Example: `specexp generate --prompt "def mean(values):" --gamma 4 --rounds`
    """
    from specexp.measure import parameters
    from specexp.measure.prompts import Prompt, Prompts, in_chat, load
    from specexp.tree import Tree

    if (prompt is None) == (prompts is None):
        raise UserError('give either --prompt "some text" or --prompts FILE')
    if prompt and os.path.isfile(prompt):
        raise UserError(
            f"--prompt {prompt} is a file, not a text: did you mean --prompts {prompt}?"
        )
    if limit is not None and prompts is None:
        raise UserError("--limit limits --prompts: leave it out with --prompt")
    options = opt.pairing_options(ctx.params)
    texts = None if prompt is None else Prompts([Prompt(1, "command line", (prompt,))], "")
    parameters.insist(ctx.params | options, texts)

    from specexp import api
    from specexp.measure.exactness import certify

    pairing = api.load(**options)
    texts = in_chat(texts or load(str(prompts), None, limit), pairing, max_new_tokens, chat)
    if not as_json and prompts is not None:
        opt.console.print(f"{texts}\n", style="dim")
    every: list[tuple[Prompt, Acceptance, dict[str, Any]]] = []
    trees = rounds and not Tree.parse(tree, pairing.gamma).is_chain
    for question in texts:
        text = question.text
        speed, output = _timed(pairing, text, max_new_tokens)
        output, parents = _rerun(pairing, text, max_new_tokens) if trees else (output, [])
        exact = certify(pairing.engine, pairing.encode([text]), max_new_tokens)
        speed["credible"] &= not exact.remembers  # the runs before had shown it this text
        if as_json:
            shown = {"prompts": str(texts)} | _as_dict(pairing, text, output, exact, parents)
            opt.print_json(shown | {"speed": speed})
        else:
            if len(texts) > 1:
                turn = f", turn {question.turn}" * (question.turn > 1)
                opt.console.rule(Text(f"prompt {question.question_id}{turn}"), style="dim")
            _show(pairing, text, output, rounds, parents, legend=not every)
            doubt = f"; doubtful: runs differ by {speed['spread']:.1f}x, is the machine busy?"
            doubt = "; doubtful: its drafter remembers text" if exact.remembers else doubt
            times = f"{speed['speedup']:.2f}x" if speed["clear"] else "no clear difference from"
            opt.say(
                f"{speed['tokens_per_s']:.0f} tokens/s, {times} plain decoding "
                f"({speed['plain_tokens_per_s']:.0f} tokens/s); the fastest of {RUNS} runs each"
                f"{'' if speed['credible'] else doubt}",
                f"{'NOT EXACT: ' * bool(exact.bugs or exact.lossy)}{exact}",
            )
        every.append((question, output.acceptance, speed))
        if exact.bugs:
            raise typer.Exit(1)
    if len(every) > 1 and not as_json:
        opt.console.rule(style="dim")
        opt.say(*_all(every))


def _all(every: Sequence[tuple[Prompt, Acceptance, dict[str, Any]]]) -> Iterator[str]:
    """What all prompts say together, in lines; no verdict if most timings are doubtful. Of each
    prompt: itself, its counts, and `_timed`."""
    import pandas as pd

    from specexp.measure import statistics, summaries
    from specexp.trace import Acceptance

    yield f"all {len(every)} prompts: {Acceptance.pooled(counts for _, counts, _ in every)}"
    rows = [
        {"question_id": prompt.question_id, "turn": prompt.turn, "credible": speed["credible"],
         "plain_s": n / speed["plain_tokens_per_s"], "plain_tokens": n,
         "s": n / speed["tokens_per_s"], "tokens": n}
        for prompt, counts, speed in every if (n := counts.emitted)
    ]  # fmt: skip
    if len(rows) > 1:
        timed = pd.DataFrame(rows)
        speedup = summaries.speedup_draws(timed).interval
        doubts = int((~timed["credible"]).sum())
        doubt = [f"timings of {counted(doubts, 'prompt')} are doubtful"] * (doubts > 0)
        verdict = [statistics.verdict(speedup)] * (2 * doubts <= len(timed))
        yield f"speedup {speedup}: {'; '.join([*verdict, *doubt])}"


def _timed(pairing: Pairing, text: str, max_new_tokens: int) -> tuple[dict[str, Any], Output]:
    """Tokens per second of plain and of speculative decoding, both warm and in turns: the fastest
    runs, how far runs differ, whether that is credible, and whether the two differ clearly: by more
    than runs do, and by no more than the tokens per pass. And the latter's last output."""
    from specexp.measure import interleave
    from specexp.measure.hardware.machine import UNSTEADY
    from specexp.theory import doubts

    plain, ids = pairing.engine.plain(), pairing.encode([text])
    arms: dict[str, Callable[[int], Any]] = {
        "plain": lambda _: plain.generate(ids, max_new_tokens),
        "own": lambda _: pairing.generate([text], max_new_tokens),
    }
    turns = interleave.time_in_turns(arms, range(RUNS), pairing.target.device, label="")
    sides = [[turn.result.trace.tpot_s for turn in turns[arm]] for arm in arms]
    (plain_s, own_s), output = map(min, sides), turns["own"][-1].result
    spread, speedup = max(max(side) / min(side) for side in sides), plain_s / own_s
    length = output.acceptance.length
    sure = spread < UNSTEADY and not doubts(speedup, length)
    apart = max(sides[1]) < plain_s or own_s > max(sides[0])
    return {
        "tokens_per_s": 1 / own_s, "plain_tokens_per_s": 1 / plain_s, "speedup": speedup,
        "runs": RUNS, "spread": spread, "credible": sure, "clear": apart and speedup <= length,
    }, output  # fmt: skip


def _rerun(pairing: Pairing, text: str, max_new_tokens: int) -> tuple[Output, list[list[int]]]:
    """The output made once more, round by round, and the parent of each node of every draft."""
    from specexp.engine import Engine

    parents: list[list[int]] = []

    def watch(stage: str, run: Callable[[], Any]) -> Any:
        result = run()
        if stage == "draft":
            parents.append([-1, *result.nodes.parents[0, 1:].tolist()])
        return result

    watched = replace(pairing, engine=Engine.of(pairing.engine, clock=watch))
    return watched.generate([text], max_new_tokens), parents


def _as_dict(
    pairing: Pairing, text: str, output: Output, exact: Exactness, parents: Sequence[list[int]]
) -> dict[str, Any]:
    record = output.trace.acceptance
    record.check()
    rounds = [
        {"drafted": s.drafted, "accepted": s.accepted, "emitted": s.emitted, "draft": s.draft}
        for s in output.trace.steps()
    ]
    for described, tree in zip(rounds, parents, strict=False):
        described["parents"] = tree
    figures = ("length", "marginal", "conditional", "accepted", "passes")
    return {
        "prompt": text,
        "tokens": output.tokens[0],
        "text": pairing.decode(output.tokens[0]),
        "rounds": rounds,
        "acceptance": asdict(record) | {name: getattr(record, name) for name in figures} | {
            "rate": record.rate if record.drafted else None,
            "tokens_per_pass": output.tokens_per_pass,
        },
        "exact": asdict(exact) | {
            "pass": exact.bugs == 0 and not exact.lossy, "ties": exact.ties, "bugs": exact.bugs,
            "detectable_tv": exact.detectable,
        },
        "followed": list(pairing.followed),
    }  # fmt: skip


def _show(
    pairing: Pairing, text: str, output: Output, rounds: bool, parents: Sequence[Sequence[int]],
    legend: bool,
) -> None:  # fmt: skip
    """The output by kind of token, in colours or, where there are none, in marks."""
    from specexp.figures import tokens

    trace = output.trace
    coloured = opt.console.color_system is not None and not opt.console.no_color
    parts = [tokens.stream(pairing, trace.rounds, output.tokens[0], prompt=f"{text}\n")]
    if rounds:
        lines = tokens.by_round(pairing, trace.rounds, output.tokens[0], parents=parents)
        parts += [Text("\nround  accepted/drafted", "dim"), lines]
    for part in [*parts, Text("\n").append_text(tokens.legend(rounds)) if legend else Text()]:
        opt.say(part if coloured else tokens.marked(part))
    opt.say(str(trace.acceptance))
    if pairing.followed:
        opt.say(f"as its generation config says: {', '.join(pairing.followed)}")


def theory(
    alpha: float = opt.own("Probability that a draft token is accepted.", ...),
    gamma: int = opt.own("Draft length.", ...),
    cost: float = opt.own(
        "Cost of drafting one token, in target passes: 0.1 is a tenth of one.", 0.0
    ),
    as_json: bool = opt.AS_JSON,
) -> None:
    """Predict the speedup by the closed forms of Leviathan et al. 2022 (arXiv 2211.17192).

    They assume independent acceptance, and that verifying a draft costs as much as one token.

    Example: `specexp theory --alpha 0.8 --gamma 5 --cost 0.1`
    """
    from specexp.theory import LONGEST, predict

    prediction = predict(alpha, gamma, cost)
    if as_json:
        opt.print_json(asdict(prediction))
        return
    best = f"{prediction.best_gamma}" + " or more" * (prediction.best_gamma == LONGEST)
    opt.say(
        f"tokens per target pass  {prediction.tokens_per_pass:.4g}",
        f"speedup                 {prediction.speedup:.4g}x",
        f"arithmetic operations   {prediction.operations:.4g}x those of plain decoding",
        f"fastest draft length    {best}, at this alpha and cost",
    )
