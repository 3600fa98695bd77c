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
from specexp.zoo.cards import Figures, page, schedule, table, trained_on
from specexp.zoo.recipes import VOCABULARY
from specexp.zoo.rows import Documents


@torch.no_grad()
def measure(
    model: LlamaForCausalLM,
    documents: Mapping[str, Documents],
    target: LlamaForCausalLM | None = None,
    tokens: int = 32_768,
    length: int = 512,
) -> Figures:
    """Figures per kind on the first `tokens` tokens of held-out text, in rows of `length`.

    `loss`: nats per token. With a target, both given the true text before each position:
    `agreement`, how often both have the same most probable token, and `overlap`, 1 - TV of the
    two laws, which is the acceptance probability of rejection sampling (Leviathan et al. 2022,
    section 3.2).
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
    """The content of `zoo.json`, of which `shelf.py` reads the fields of `ZooModel`."""
    trained = trained_on(recipe.courses, losses, recipe.seed, corpus=dict(corpus))
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
            "the target have the same most probable token; overlap is 1 - TV of their laws, the "
            "probability that a sampled guess is accepted."
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
