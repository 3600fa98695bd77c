"""Describes heads, drafts and twins made here: `zoo.json` and the model card."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from specexp.errors import counted
from specexp.zoo import shelf
from specexp.zoo.recipes import VOCABULARY, Course, HeadRecipe

Figures = dict[str, dict[str, float]]


def trained_on(
    courses: Sequence[Course], losses: Sequence[float], seed: int, **text: Mapping[str, Any]
) -> dict[str, Any]:
    """What `zoo.json` says of training: schedule, losses, and the facts about the text."""
    return {
        "courses": courses_of(courses, losses), "seed": seed,
        "torch": torch.__version__.split("+")[0], **text,
    }  # fmt: skip


def page(facts: Mapping[str, Any], header: str, sections: Mapping[str, str]) -> str:
    """A model card in Markdown: header, name and purpose, then sections by their headings."""
    parts = [
        f"---\n{header}tags: [speculative-decoding]\n---",
        f"# {facts['name']}",
        facts["about"],
    ]
    parts += [f"## {heading}\n\n{text}" for heading, text in sections.items()]
    return "\n\n".join(parts) + "\n"


def describe_heads(
    recipe: HeadRecipe, name: str, target: str, heads: nn.Module, held_out: Figures,
    text: Mapping[str, Any], losses: Sequence[float],
) -> dict[str, Any]:  # fmt: skip
    """The content of `zoo.json` for heads. held_out: the accuracy at each drafted position."""
    return {
        "name": name, "role": recipe.kind, "target": target,
        "parameters": sum(p.numel() for p in heads.parameters()),
        "layers": recipe.heads if recipe.kind == "medusa" else 1,
        "width": next(iter(heads.parameters())).shape[-1],
        "about": recipe.about, "held_out": held_out,
        "trained": trained_on(recipe.courses, losses, recipe.seed, corpus=dict(text)),
    }  # fmt: skip


def card_of_heads(facts: Mapping[str, Any]) -> str:
    """The model card of heads, from the content of `zoo.json`."""
    kind, target, trained = facts["role"], facts["target"], facts["trained"]
    layout = "the `speculators` format" if kind == "eagle3" else "the layout of published heads"
    corpus = trained["corpus"]
    own_text = f" --text {corpus['file']}" if "file" in corpus else ""
    text = f"The text {corpus['file']}, {corpus['characters']:,} characters." if own_text else ""
    mark = ""
    licence = "Check the licences of the target and the text: the heads are derived from both."
    if not own_text:
        making = shelf.making("cards")  # which knows the zoo's text
        text = making.corpus_paragraph(corpus)
        if shelf.ships(target):
            mark, licence = "license: mit\n", making.licence(trained)
    return page(facts, f"{mark}base_model: {target}\n", {
        "Heads": f"{facts['parameters']:,} parameters for the target {target}, in {layout}.",
        "Use": f"`specexp generate --target {target} --drafter {kind.rstrip('3')}:FOLDER`, where "
        "FOLDER is this folder. They read this target's hidden states and work with no other "
        "target.",
        "Training": schedule(
            "Distilled from the target's law (soft cross-entropy) on the training text and on "
            "passages that the target continued at temperature 0.8; each drafted position weighs "
            "0.8 times the one before.",
            trained,
        ) + f"\n\n{text}",
        "Held-out text": f"{table(facts['held_out'])}\n\nAt each drafted position, how often the "
        "most likely token is the target's, given the text before it, in rows of up to 256 tokens. "
        "With a draft vocabulary, only its tokens are compared.",
        "Reproduction": f"`specexp zoo train --heads {kind} --target {target}{own_text}`",
        "Licence": licence,
    })  # fmt: skip


def describe_draft(
    name: str, target: str, draft: PreTrainedModel, course: Course, losses: Sequence[float],
    held_out: Figures, answers: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """The content of `zoo.json` for a draft cut from a target."""
    config = draft.config.get_text_config()
    return {
        "name": name, "role": "draft", "target": target,
        "parameters": sum(p.numel() for p in draft.parameters()),
        "layers": config.num_hidden_layers, "width": config.hidden_size,
        "about": f"{counted(config.num_hidden_layers, 'layer')} of {target}, taught on its own "
        "answers.",
        "held_out": held_out, "trained": trained_on([course], losses, 0, answers=dict(answers)),
    }  # fmt: skip


def card_of_draft(facts: Mapping[str, Any]) -> str:
    """The model card of a draft cut from a target."""
    target, trained = facts["target"], facts["trained"]
    return page(facts, f"base_model: {target}\n", {
        "Use": f"`specexp generate --target {target} --drafter model:{facts['name']}`",
        "Training": schedule(
            "Distilled from the target's distribution (soft cross-entropy) on its own answers, "
            f"sampled at temperature {trained['answers']['temperature']}, to the first "
            f"{trained['answers']['answered']:,} of {trained['answers']['source']}. "
            "Embeddings and LM head are the target's and were not trained.",
            trained,
        ),
        "Held-out answers": f"{table(facts['held_out'])}\n\nHow often the most likely token is the "
        "target's, and the mean overlap of the two distributions: the acceptance of greedy and of "
        "sampled tokens.",
        "Licence": "That of the target, from which it is derived.",
    })  # fmt: skip


def describe_twin(
    name: str, parameters: int, whole: bool, details: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of `zoo.json` for a twin target (`whole`) or the draft cut from it."""
    layers = details["shape"]["layers"]
    cut = f"The first {layers} layers of {name}, with the same weights, norm and head."
    return {
        "name": name if whole else f"{name}-draft", "role": "target" if whole else "draft",
        "target": None if whole else name,
        "parameters": parameters, "layers": layers, "width": details["shape"]["width"],
        "about": "Random weights in a real shape, for measuring its costs." if whole else cut,
        **details,
    }  # fmt: skip


def card_of_twin(facts: Mapping[str, Any]) -> str:
    """The model card of a twin, from the content of `zoo.json`."""
    shape, agreement = facts["shape"], facts["agreement"]
    damped = (
        f"The outputs of the target's layers after the first {shape['draft']} are scaled by "
        f"{agreement['damp']}."
    )
    sections = {
        "Model": f"A Llama ({facts['layers']} layers, width {facts['width']}, {shape['heads']} "
        f"heads of which {shape['kv_heads']} for keys and values, "
        f"{'tied' if shape['tied'] else 'untied'} embeddings) of {facts['parameters']:,} "
        f"parameters in {facts['dtype']}, drawn from seed {facts['seed']} by `specexp zoo twin`. "
        f"The tokenizer is the zoo's, of {VOCABULARY} tokens. The head has {shape['rows']:,} rows, "
        "all of which are computed, but only those tokens are emitted: specexp ignores the other "
        "rows, and at temperature 0 neither they nor the end of text are ever the most probable.",
        "Acceptance": f"{damped} Acceptance was not measured.",
    }
    if "reached" in agreement:
        text = agreement["text"]
        sections |= {
            "Acceptance": f"alpha {agreement['asked']} was asked for and {agreement['reached']} ± "
            f"{agreement['error']} measured: the share of positions of the target's greedy output "
            "where the draft, given the tokens before, has the same most probable token "
            f"({agreement['tokens']} tokens, {facts['dtype']}, on {agreement['on']}). {damped}",
            "Output": f"Noise. In greedy outputs of 128 tokens, {text['distinct']:.0%} of the "
            f"tokens are distinct, {text['repeated']:.1%} of the 4-grams occurred before, and the "
            f"most common token makes up {text['commonest']:.1%} of all outputs.",
        }
    return page(facts, "license: mit\nlibrary_name: transformers\n", sections)


def write(folder: Path, facts: Mapping[str, Any], text: str) -> None:
    """Write `zoo.json` and `README.md` into a model's folder."""
    (folder / "zoo.json").write_text(json.dumps(facts, indent=1) + "\n")
    (folder / "README.md").write_text(text)


def courses_of(courses: Sequence[Course], losses: Sequence[float]) -> list[dict[str, Any]]:
    described: list[dict[str, Any]] = []
    for course in courses:
        mine, losses = losses[: course.steps], losses[course.steps :]
        blocks = [mine[i : i + 20] for i in range(0, len(mine), 20)]
        described.append({
            "phases": [[p.steps, p.batch, p.length] for p in course.phases],
            "tokens": course.tokens, "repeats": dict(course.repeats),
            "muon_lr": course.muon_lr, "adam_lr": course.adam_lr,
            "loss": [round(float(np.mean(block)), 4) for block in blocks],
        })  # fmt: skip
    return described


def schedule(goal: str, trained: Mapping[str, Any]) -> str:
    """The training of each course."""
    lines = [
        f"{goal} Muon for the hidden matrices, AdamW for the rest; learning rates with a short "
        f"warm-up, a plateau and a linear decay to 2 %; seed {trained['seed']}, torch "
        f"{trained['torch']}. Each kind of text occurs once per epoch unless stated.\n"
    ]
    for number, course in enumerate(trained["courses"], 1):
        steps = ", then ".join(f"{s} steps of {b} x {n} tokens" for s, b, n in course["phases"])
        mix = ", ".join(f"{kind} x {times}" for kind, times in course["repeats"].items())
        mix = f"{mix}; " if mix else ""
        lines.append(
            f"{number}. {course['tokens']:,} tokens: {steps}; {mix}learning rates "
            f"{course['muon_lr']} and {course['adam_lr']}; training loss {course['loss'][0]:.2f} "
            f"in the first 20 steps, {course['loss'][-1]:.2f} in the last."
        )
    return "\n".join(lines)


def table(figures: Figures) -> str:
    names = list(next(iter(figures.values())))
    lines = [f"| kind | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    for kind, values in figures.items():
        lines.append(f"| {kind} | " + " | ".join(f"{values[n]:.3f}" for n in names) + " |")
    return "\n".join(lines)
