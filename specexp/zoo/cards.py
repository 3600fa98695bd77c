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
    """The model card of heads that were trained on a text of one's own."""
    kind, target, corpus = facts["role"], facts["target"], facts["trained"]["corpus"]
    return page(facts, f"base_model: {target}\n", {
        "Use": f"`specexp generate --target {target} --drafter {kind.rstrip('3')}:FOLDER`, where "
        "FOLDER is this folder. They read this target's hidden states and work with no other.",
        "Training": f"`specexp zoo train --heads {kind} --target {target} --text {corpus['file']}`,"
        f" a text of {corpus['characters']:,} characters. `zoo.json` has the schedule, the losses "
        "and, at each drafted position, how often the most likely token is the target's.",
        "Licence": "Check the licences of the target and the text: the heads are derived from "
        "both.",
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
    target, answers = facts["target"], facts["trained"]["answers"]
    return page(facts, f"base_model: {target}\n", {
        "Use": f"`specexp generate --target {target} --drafter model:{facts['name']}`",
        "Training": "Distilled from the target's distribution on its own answers, sampled at "
        f"temperature {answers['temperature']}, to the first {answers['answered']:,} of "
        f"{answers['source']}. Embeddings and LM head are the target's. `zoo.json` has the "
        "schedule, the losses and, on answers held out, how often the most likely token is the "
        "target's and the mean overlap of the two distributions.",
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
    """The model card of a twin."""
    agreement = facts["agreement"]
    reached = (
        f"alpha {agreement['asked']} was asked for and {agreement['reached']} ± "
        f"{agreement['error']} measured on {agreement['on']}."
        if "reached" in agreement else "It was not measured."
    )  # fmt: skip
    return page(facts, "license: mit\nlibrary_name: transformers\n", {
        "Model": f"A Llama of {facts['parameters']:,} parameters in {facts['dtype']}, drawn from "
        f"seed {facts['seed']} by `specexp zoo twin`; its output is noise. The tokenizer is the "
        f"zoo's, of {VOCABULARY} tokens; further rows of the head are computed, but never emitted.",
        "Acceptance": "The outputs of the target's layers after the first "
        f"{facts['shape']['draft']} are scaled by {agreement['damp']}. {reached}",
    })  # fmt: skip


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
