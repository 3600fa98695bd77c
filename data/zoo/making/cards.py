"""Describes a shipped model: figures on held-out text, `zoo.json` and the model card.

This file does not know how the model was made beyond its recipe and the facts passed in.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from making.recipes import CONTEXT, Recipe
from specexp.models.heads.layouts import BLOCKS, DRAFTED_BY, EAGLE3
from specexp.zoo import shelf
from specexp.zoo.drafts import agreement, logits_after
from specexp.zoo.recipes import VOCABULARY
from specexp.zoo.rows import Documents, windows
from specexp.zoo.train import trained_on

Figures = dict[str, dict[str, float]]


@torch.no_grad()
def measure(
    model: LlamaForCausalLM,
    documents: Mapping[str, Documents],
    target: LlamaForCausalLM | None = None,
    tokens: int = 32_768,
    length: int = 512,
) -> Figures:
    """Figures per kind on the first `tokens` tokens of held-out text, in rows of `length`.

    `loss`: nats per token. With a target also `drafts.agreement`, both given the true text before
    each position; the overlap is 1 - TV of the two distributions, which is the acceptance
    probability of rejection sampling (Leviathan et al. 2022, section 3.2).
    """
    figures: Figures = {}
    for kind, texts in documents.items():
        rows = windows(texts, length)[: tokens // length]
        batch = torch.from_numpy(rows.astype(np.int64)).to(model.device)
        losses = [F.cross_entropy(logits_after(model, row[None]), row[1:]) for row in batch]
        figures[kind] = {"loss": round(float(torch.stack(losses).mean()), 4)}
        if target is not None:
            figures[kind] |= agreement(target, model, [*rows])
    return figures


def describe(
    recipe: Recipe,
    model: LlamaForCausalLM,
    held_out: Figures,
    corpus: Mapping[str, Any],
    losses: Sequence[float],
) -> dict[str, Any]:
    """The content of `zoo.json`, of which `shelf.py` reads the fields of `ZooModel`."""
    trained = trained_on(recipe.courses, losses, recipe.seed, corpus=dict(corpus))
    copied = ("name", "role", "layers", "width", "about", "hidden", "heads", "kv_heads", "exits")
    return {name: getattr(recipe, name) for name in copied} | {
        "target": recipe.teacher,
        "parameters": model.num_parameters(),
        "vocabulary": VOCABULARY,
        "context": CONTEXT,
        "dtype": "bfloat16",
        "held_out": held_out,
        "trained": trained if recipe.courses else None,
    }


def page(facts: Mapping[str, Any], header: str, sections: Mapping[str, str]) -> str:
    """A model card in Markdown: header, name and purpose, then sections by their headings."""
    parts = [
        f"---\n{header}tags: [speculative-decoding]\n---",
        f"# {facts['name']}",
        facts["about"],
    ]
    parts += [f"## {heading}\n\n{text}" for heading, text in sections.items()]
    return "\n\n".join(parts) + "\n"


def card(facts: Mapping[str, Any]) -> str:
    """The model card, in Markdown, from the content of `zoo.json`."""
    trained = facts["trained"]
    sections = {
        "Model": f"A Llama ({facts['layers']} layers, width {facts['width']}, {facts['heads']} "
        f"heads of which {facts['kv_heads']} for keys and values, tied embeddings) of "
        f"{facts['parameters']:,} parameters in {facts['dtype']}, with a byte-level BPE of "
        f"{facts['vocabulary']} entries that the whole zoo shares and a context of "
        f"{facts['context']} tokens. Training documents are separated by `<|endoftext|>`, so a "
        "prompt should begin with it; the tokenizer adds it.",
        "Use": "For demonstrating and testing speculative decoding on any machine without a "
        "download. It is not a source of facts and follows no instructions.",
    }
    run = f"specexp zoo train --only {facts['name']}"
    again = f"`{run}` runs the recipe in `data/zoo/making/recipes.py`"
    if trained:
        sections["Use"] += (
            " It was not trained on misspelt text, languages other than English, or truncated "
            "logs: on those acceptance is low, which some experiments use."
        )
        sections["Training data"] = corpus_paragraph(trained["corpus"])
        sections["Training"] = _training(facts)
        again += (
            " (on two CPU cores, about an hour for target-10m and a quarter of an hour for a draft "
            "model). A different Python version has a different standard library and gives "
            "different weights"
        )
    else:
        sections["Training"] = "None: the weights are random, from a fixed seed."
    sections |= {"Held-out text": _figures(facts), "Reproduction": f"{again}."}
    sections |= {"Licence": licence(trained)}
    header = "license: mit\nlibrary_name: transformers\npipeline_tag: text-generation\n"
    return page(facts, header, sections)


def _training(facts: Mapping[str, Any]) -> str:
    trained = facts["trained"]
    goal = (
        "Next-token cross-entropy."
        if facts["target"] is None
        else f"Distilled from {facts['target']} (soft cross-entropy, the forward KL plus a "
        "constant) on the corpus and on passages that it continued at temperature 0.8."
    )
    if facts.get("exits"):
        goal += (
            f" The hidden states after layers {' and '.join(map(str, facts['exits']))} also "
            "predict the token, through the same norm and head; together they weigh as much as "
            "the last."
        )
    return schedule(goal, trained)


def _figures(facts: Mapping[str, Any]) -> str:
    notes = "Loss in nats per token, in rows of up to 512 tokens."
    if "agreement" in next(iter(facts["held_out"].values())):
        notes += (
            " Both given the true text before each position, agreement is how often this model and "
            "the target have the same most probable token; overlap is 1 - TV of their "
            "distributions, the probability that a sampled draft token is accepted."
        )
    return f"{table(facts['held_out'])}\n\n{notes}"


def corpus_paragraph(corpus: Mapping[str, Any]) -> str:
    rows = [
        f"| {side} | {kind} | {part['documents']:,} | {part['characters']:,} | "
        f"`{part['sha256'][:16]}` |"
        for side, parts in corpus["parts"].items()
        for kind, part in parts.items()
    ]
    return (
        f"The standard library of Python {corpus['python']} ({corpus['sources']} distinct sources, "
        "without its tests): its code, its docstrings and comments as prose, records from a seeded "
        "generator, edits (a passage, then the same passage with one change), and echoes (random "
        "words, repeated once). The hash of a source's content decides whether it is held out, "
        "together with everything made from it. People named in the text are authors named in the "
        "library; records pair common first names and surnames at random.\n\n"
        "| side | kind | documents | characters | sha256 |\n|---|---|---:|---:|---|\n"
    ) + "\n".join(rows)


def licence(trained: Mapping[str, Any] | None) -> str:
    """The licence of weights of this repository, and of the text they were trained on, if any."""
    text = (
        " The training text comes with Python, under the Python Software Foundation License."
        if trained
        else ""
    )
    return f"The weights are under the licence of this repository (MIT).{text}"


def card_of_heads(facts: Mapping[str, Any]) -> str:
    """The model card of heads trained on the zoo's text, from the content of `zoo.json`."""
    kind, target, trained = facts["role"], facts["target"], facts["trained"]
    as_speculators = kind in (*EAGLE3, *BLOCKS)
    layout = "the `speculators` format" if as_speculators else "the layout of published heads"
    corpus = trained["corpus"]
    terms = "Check the licence of the target: the heads are derived from it."
    zoo = shelf.shipped()
    ours = zoo is not None and (zoo / target).is_dir()
    mark, terms = ("license: mit\n", licence(trained)) if ours else ("", terms)
    return page(facts, f"{mark}base_model: {target}\n", {
        "Heads": f"{facts['parameters']:,} parameters for the target {target}, in {layout}.",
        "Use": f"`specexp generate --target {target} --drafter {DRAFTED_BY[kind]}:FOLDER`, where "
        "FOLDER is this folder. They read this target's hidden states and work with no other "
        "target.",
        "Training": schedule(
            "Distilled from the target's distribution (soft cross-entropy) on the training text "
            "and on passages that the target continued at temperature 0.8; each drafted position "
            "weighs 0.8 times the one before.",
            trained,
        ) + f"\n\n{corpus_paragraph(corpus)}",
        "Held-out text": f"{table(facts['held_out'])}\n\nAt each drafted position, how often the "
        "most likely token is the target's, given the text before it, in rows of up to 256 tokens. "
        "With a draft vocabulary, only its tokens are compared.",
        "Reproduction": f"`specexp zoo train --heads {kind} --target {target}`",
        "Licence": terms,
    })  # fmt: skip


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
