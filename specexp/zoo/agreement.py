"""Measures how often the first layers of a Llama predict the same token as the whole model.

This file does not know where the model comes from, or which factor changes the agreement.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from specexp.zoo.recipes import END, VOCABULARY


@torch.inference_mode()
def agreement(model: Any, draft: int, rows: int, new: int, seed: int) -> tuple[Tensor, Tensor]:
    """Greedy continuations, `new` tokens each, of random prompts of 16 tokens.

    Returns the tokens [rows, new] and, bool [rows, new], whether the model's first `draft` layers
    predict the same token from the same preceding tokens.
    """
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randint(END + 1, VOCABULARY, (rows, 16), generator=rng)
    cache, text, agrees = None, [], []
    for _ in range(new):
        output = model(tokens, past_key_values=cache, output_hidden_states=True, logits_to_keep=1)
        early = model.lm_head(model.model.norm(output.hidden_states[draft][:, -1:]))  # [rows, 1, V]
        drafted, tokens = (x[..., :VOCABULARY].argmax(-1) for x in (early, output.logits))
        cache = output.past_key_values
        text.append(tokens)
        agrees.append(drafted == tokens)
    return torch.cat(text, 1), torch.cat(agrees, 1)


def variety(text: Tensor) -> dict[str, float]:
    """How varied the outputs text [rows, n] are.

    `distinct`: distinct tokens of a row over its length. `repeated`: share of the 4-grams that
    occurred earlier in the row. `commonest`: share of the most common token in all rows.
    """
    grams = [[tuple(row[i : i + 4]) for i in range(len(row) - 3)] for row in text.tolist()]
    return {
        "distinct": round(sum(len(set(row)) for row in text.tolist()) / text.numel(), 4),
        "repeated": round(1 - sum(len(set(row)) for row in grams) / sum(map(len, grams)), 4),
        "commonest": round(text.flatten().bincount().max().item() / text.numel(), 4),
    }


def bisect(
    measure: Callable[[float], float], alpha: float, low: float, high: float, what: str = ""
) -> float:
    """The factor at which a decreasing `measure` is within 0.004 of alpha, or the 12th tried."""
    with tqdm(desc=what, unit="try") as bar:
        for _ in range(12):
            damp = math.sqrt(low * high)
            rate = measure(damp)
            bar.set_postfix_str(f"{rate:.3f} when damped by {damp:.3g}", refresh=False)
            bar.update()
            if abs(rate - alpha) < 0.004:
                break
            low, high = (damp, high) if rate > alpha else (low, damp)
    return float(f"{damp:.4g}")
