"""What is said about a trained model: figures on held-out text, `zoo.json` and the model card.

This file does not know how the model came about beyond its recipe and the facts handed to it.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaForCausalLM

from specexp.zoo.recipes import CONTEXT, VOCABULARY, Course, HeadRecipe, Recipe
from specexp.zoo.rows import Documents

Figures = dict[str, dict[str, float]]


@torch.no_grad()
def measure(
    model: LlamaForCausalLM,
    documents: Mapping[str, Documents],
    target: LlamaForCausalLM | None = None,
    tokens: int = 32_768,
    length: int = 512,
) -> Figures:
    """Figures by kind on the first `tokens` tokens of held-out text, in rows of `length`.

    `loss`: nats per token. Beside a target, every position given the true text before it:
    `agreement`, how often both have the same most probable token, and `overlap`, 1 - TV of the
    two laws, the chance that rejection sampling accepts (Leviathan et al. 2023, section 3.2).
    """
    figures: Figures = {}
    for kind, texts in documents.items():
        stream = np.concatenate(texts)[: tokens + 1].astype(np.int64)
        T = min(length, len(stream) - 1)
        starts = range(0, len(stream) - T, T)
        sums: dict[str, float] = {}
        for start in starts:
            row = torch.from_numpy(stream[start : start + T + 1])[None].to(model.device)
            q = model(input_ids=row[:, :-1]).logits.float().log_softmax(-1)[0]  # [T, V]
            seen = {"loss": F.nll_loss(q, row[0, 1:])}
            if target is not None:
                p = target(input_ids=row[:, :-1]).logits.float().log_softmax(-1)[0]
                seen["agreement"] = (p.argmax(-1) == q.argmax(-1)).float().mean()
                seen["overlap"] = torch.minimum(p.exp(), q.exp()).sum(-1).mean()
            for name, value in seen.items():
                sums[name] = sums.get(name, 0.0) + value.item()
        figures[kind] = {name: round(value / len(starts), 4) for name, value in sums.items()}
    return figures


def describe(
    recipe: Recipe,
    model: LlamaForCausalLM,
    held_out: Figures,
    corpus: Mapping[str, Any],
    losses: Sequence[float],
) -> dict[str, Any]:
    """The content of `zoo.json`; `shelf.py` reads the first lines of it."""
    trained = {
        "courses": _courses(recipe.courses, losses),
        "seed": recipe.seed,
        "torch": torch.__version__.split("+")[0],
        "corpus": dict(corpus),
    }
    return {
        "name": recipe.name,
        "role": recipe.role,
        "target": recipe.teacher,
        "parameters": model.num_parameters(),
        "layers": recipe.layers,
        "width": recipe.width,
        "about": recipe.about,
        "hidden": recipe.hidden,
        "heads": recipe.heads,
        "kv_heads": recipe.kv_heads,
        "exits": list(recipe.exits),
        "vocabulary": VOCABULARY,
        "context": CONTEXT,
        "dtype": "bfloat16",
        "held_out": held_out,
        "trained": trained if recipe.courses else None,
    }


def card(facts: Mapping[str, Any]) -> str:
    """The model card, in Markdown, from the content of `zoo.json`."""
    trained = facts["trained"]
    parts = [
        "---\nlicense: mit\nlibrary_name: transformers\npipeline_tag: text-generation\n"
        "tags: [speculative-decoding]\n---",
        f"# {facts['name']}",
        facts["about"],
        "## Model",
        f"A Llama ({facts['layers']} layers, width {facts['width']}, {facts['heads']} heads of "
        f"which {facts['kv_heads']} for keys and values, tied embeddings) of "
        f"{facts['parameters']:,} parameters in {facts['dtype']}, with a byte-level BPE of "
        f"{facts['vocabulary']} entries that the whole zoo shares and a context of "
        f"{facts['context']} tokens. Every document begins after `<|endoftext|>`, so a prompt "
        "should too; the tokenizer puts it there.",
        "## Use",
        "Made for one purpose: to show and test speculative decoding on any machine, without a "
        "download. It is a small model of one kind of text, knows no facts worth relying on, "
        "follows no instructions, and was not trained on misspelt text, languages other than "
        "English, or truncated logs; on those its guesses are poor, which experiments use.",
    ]
    if trained:
        parts += ["## Training data", _data(trained["corpus"])]
        parts += ["## Training", _training(facts)]
    else:
        parts += ["## Training", "None: the weights are drawn from a seeded generator."]
    parts += ["## Held-out text", _figures(facts)]
    parts += [
        "## Make it again",
        f"`specexp zoo train --only {facts['name']}` runs the recipe in `specexp/zoo/recipes.py`"
        " (on two CPU cores: the target in about an hour, a draft model in a quarter of one)."
        " Another Python has another standard library and so gives other weights.",
        "## Licence",
        "The weights are under the licence of this repository (MIT). The text they were trained "
        "on comes with Python, under the Python Software Foundation License.",
    ]
    return "\n\n".join(parts) + "\n"


def describe_heads(
    recipe: HeadRecipe,
    name: str,
    target: str,
    heads: nn.Module,
    held_out: Figures,
    text: Mapping[str, Any],
    losses: Sequence[float],
) -> dict[str, Any]:
    """The content of `zoo.json` for heads; figures are the accuracy at each drafted position."""
    return {
        "name": name,
        "role": recipe.kind,
        "target": target,
        "parameters": sum(p.numel() for p in heads.parameters()),
        "layers": recipe.heads if recipe.kind == "medusa" else 1,
        "width": next(iter(heads.parameters())).shape[-1],
        "about": recipe.about,
        "held_out": held_out,
        "trained": {
            "courses": _courses(recipe.courses, losses),
            "seed": recipe.seed,
            "torch": torch.__version__.split("+")[0],
            "corpus": dict(text),
        },
    }


def card_of_heads(facts: Mapping[str, Any]) -> str:
    """The model card of heads, in Markdown."""
    kind = facts["role"]
    layout = "in its published layout" if kind != "eagle3" else "in the `speculators` format"
    corpus = facts["trained"]["corpus"]
    parts = [
        f"---\nlicense: mit\nbase_model: {facts['target']}\ntags: [speculative-decoding]\n---",
        f"# {facts['name']}",
        facts["about"],
        "## Heads",
        f"{facts['parameters']:,} parameters for the target {facts['target']}, {layout}.",
        "## Use",
        f"`specexp generate --target {facts['target']} --drafter {kind.rstrip('3')}` with a "
        "prompt. They read this target's hidden states, so they fit no other.",
        "## Training",
        _schedule(
            "Taught the law of the target (soft cross-entropy) from its own hidden states, on its "
            "corpus and on passages that it continued at temperature 0.8; a further position "
            "weighs 0.8 of the one before.",
            facts["trained"],
        ),
        _data(corpus) if "parts" in corpus else f"Text: {json.dumps(corpus)}",
        "## Held-out text",
        _table(facts["held_out"])
        + "\n\nAt each drafted position, how often the likeliest token is the target's (of the "
        "tokens that can be guessed), the text before it given; in rows of up to 256 tokens.",
        "## Make it again",
        f"`specexp zoo train --heads {kind} --target {facts['target']}`",
        "## Licence",
        "The weights are under the licence of this repository (MIT). The text they were trained "
        "on comes with Python, under the Python Software Foundation License.",
    ]
    return "\n\n".join(parts) + "\n"


def describe_twin(
    name: str, parameters: int, whole: bool, made: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of `zoo.json` for a random target (`whole`) or the draft cut from it."""
    layers = made["shape"]["layers"]
    cut = f"The first {layers} layers of {name}: the same weights, norm and head."
    return {
        "name": name if whole else f"{name}-draft",
        "role": "target" if whole else "draft",
        "target": None if whole else name,
        "parameters": parameters,
        "layers": layers,
        "width": made["shape"]["width"],
        "about": "Random weights in a real shape, to measure its costs." if whole else cut,
        **made,
    }


def card_of_twin(facts: Mapping[str, Any]) -> str:
    """The model card of a random target or draft, in Markdown."""
    shape, seen = facts["shape"], facts["agreement"]
    damped = (
        f"What layers beyond the first {shape['draft']} of the target write into the residual "
        f"stream is scaled by {seen['damp']}"
    )
    parts = [
        "---\nlicense: mit\nlibrary_name: transformers\ntags: [speculative-decoding]\n---",
        f"# {facts['name']}",
        facts["about"],
        "## Model",
        f"A Llama ({facts['layers']} layers, width {facts['width']}, {shape['heads']} heads of "
        f"which {shape['kv_heads']} for keys and values, {'tied' if shape['tied'] else 'untied'} "
        f"embeddings) of {facts['parameters']:,} parameters in {facts['dtype']}, drawn from seed "
        f"{facts['seed']}. Made by `specexp zoo twin`. The tokenizer is the zoo's, of "
        f"{VOCABULARY} tokens. The head has {shape['rows']:,} rows and is computed in full, but "
        "no other token is ever emitted: specexp reads no further, and at temperature 0 the rows "
        "beyond never win, nor does the end of text.",
        "## Acceptance",
    ]
    if "reached" not in seen:
        return "\n\n".join([*parts, f"{damped}; the acceptance was not measured."]) + "\n"
    text = seen["text"]
    parts += [
        f"alpha {seen['asked']} was asked for and {seen['reached']} ± {seen['error']} reached: the "
        "share of positions of the target's own greedy text where the draft, given that text, has "
        f"the same most probable token ({seen['tokens']} tokens in {facts['dtype']}; measured on "
        f"{seen['on']}). {damped}.",
        "## Text",
        "Noise. Of a greedy text of 128 tokens, those that differ from one another are "
        f"{text['distinct']:.0%}; {text['repeated']:.1%} of its 4-grams came before in it, and "
        f"the commonest token of all texts is {text['commonest']:.1%} of them.",
    ]
    return "\n\n".join(parts) + "\n"


def write(folder: Path, facts: Mapping[str, Any], text: str) -> None:
    """`zoo.json` and `README.md` into a model's folder."""
    (folder / "zoo.json").write_text(json.dumps(facts, indent=1) + "\n")
    (folder / "README.md").write_text(text)


def _data(corpus: Mapping[str, Any]) -> str:
    rows = [
        f"| {side} | {kind} | {part['documents']:,} | {part['characters']:,} | "
        f"`{part['sha256'][:16]}` |"
        for side, parts in corpus["parts"].items()
        for kind, part in parts.items()
    ]
    return (
        f"The standard library of Python {corpus['python']} ({corpus['sources']} sources, tests "
        "left out, each once): its code, its docstrings and comments as prose, records drawn from "
        "a seeded generator, edits (a passage, then the same passage with one thing changed), and "
        "echoes (words in no order, said twice). A source is held out by the hash of its content, "
        "and what is made from it stays on its side. The people named in it are authors named in "
        "the library; records pair common first names and surnames at random.\n\n"
        "| side | kind | documents | characters | sha256 |\n|---|---|---:|---:|---|\n"
    ) + "\n".join(rows)


def _courses(courses: Sequence[Course], losses: Sequence[float]) -> list[dict[str, Any]]:
    described: list[dict[str, Any]] = []
    for course in courses:
        mine, losses = losses[: course.steps], losses[course.steps :]
        described.append(
            {
                "phases": [[p.steps, p.batch, p.length] for p in course.phases],
                "tokens": course.tokens,
                "repeats": dict(course.repeats),
                "muon_lr": course.muon_lr,
                "adam_lr": course.adam_lr,
                "loss": [
                    round(float(np.mean(mine[i : i + 20])), 4) for i in range(0, len(mine), 20)
                ],
            }
        )
    return described


def _training(facts: Mapping[str, Any]) -> str:
    trained = facts["trained"]
    goal = (
        "Next-token cross-entropy."
        if facts["target"] is None
        else f"Taught the law of {facts['target']} (soft cross-entropy, the forward KL plus a "
        "constant) on the corpus and on passages which that model continued at temperature 0.8."
    )
    if facts.get("exits"):
        goal += (
            f" The states after layers {' and '.join(map(str, facts['exits']))} must predict it "
            "through the same norm and head, too; together they weigh as much as the last."
        )
    return _schedule(goal, trained)


def _schedule(goal: str, trained: Mapping[str, Any]) -> str:
    """How it was trained, course by course."""
    lines = [
        f"{goal} Muon for the hidden matrices, AdamW for the rest; a short rise, a plateau, a "
        f"straight fall to 2 %; seed {trained['seed']}, torch {trained['torch']}. A kind counts "
        "once an epoch unless said otherwise.\n"
    ]
    for number, course in enumerate(trained["courses"], 1):
        steps = ", then ".join(f"{s} steps of {b} x {n} tokens" for s, b, n in course["phases"])
        mix = ", ".join(f"{kind} x {times}" for kind, times in course["repeats"].items())
        lines.append(
            f"{number}. {course['tokens']:,} tokens: {steps}; {mix}; learning rates "
            f"{course['muon_lr']} and {course['adam_lr']}; training loss {course['loss'][0]:.2f} "
            f"in the first 20 steps, {course['loss'][-1]:.2f} in the last."
        )
    return "\n".join(lines)


def _figures(facts: Mapping[str, Any]) -> str:
    notes = "Loss in nats per token, in rows of up to 512 tokens."
    if "agreement" in next(iter(facts["held_out"].values())):
        notes += (
            " Given the true text before each position: agreement is how often this model and the "
            "target have the same most probable token; overlap is 1 - TV of their laws, the "
            "chance that a sampled guess is accepted."
        )
    return f"{_table(facts['held_out'])}\n\n{notes}"


def _table(figures: Figures) -> str:
    names = list(next(iter(figures.values())))
    lines = [f"| kind | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    for kind, values in figures.items():
        lines.append(f"| {kind} | " + " | ".join(f"{values[n]:.3f}" for n in names) + " |")
    return "\n".join(lines)
