"""Trains the zoo: gather the text, then one model after another, each from its recipe.

A run that is killed goes on from its last checkpoint and ends with the same weights as one that
was not: the batch and the learning rates are functions of the step, and nothing else is drawn in
the loop. Hidden matrices are trained by Muon (Jordan et al. 2024, as in `torch.optim.Muon`), the
rest by AdamW; a draft model is taught the target's whole law (soft cross-entropy, which is the
forward KL plus a constant; Hinton et al. 2015, section 2) on the corpus and on text that the
target itself continued.

This file does not know what the text is (`corpus.py`) or how a batch is drawn (`rows.py`).
"""

import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import LlamaForCausalLM

from specexp.zoo.recipes import Recipe
from specexp.zoo.rows import Documents, Rows

log = logging.getLogger(__name__)
CHECKPOINT_EVERY = 100
Loss = Callable[[torch.Tensor], torch.Tensor]


def fit(
    recipe: Recipe,
    rows: Rows,
    work: Path,
    teacher: LlamaForCausalLM | None = None,
    device: str = "cpu",
    compiled: bool = True,
    stop_at: int | None = None,
    checkpoint_every: int = CHECKPOINT_EVERY,
) -> tuple[LlamaForCausalLM, list[float]]:
    """Train one model, from its checkpoint under `work` if there is one.

    Returns the model (float32) and its loss at every step. `stop_at` ends the run early, leaving
    a checkpoint, as a kill between two checkpoints would.
    """
    torch.set_flush_denormal(True)
    model = recipe.build()
    if teacher is not None and teacher.config.hidden_size == recipe.width:
        model.model.embed_tokens.weight.data.copy_(teacher.model.embed_tokens.weight.data)
    model = model.to(device).train()
    optimizers = _optimizers(model, recipe)
    losses: list[float] = []
    path = work / f"{recipe.name}-{_digest(recipe, rows)}.pt"
    if path.exists():
        state = torch.load(path, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        losses = state["losses"]
    loss_of = _loss(model, teacher, device)
    if compiled:
        loss_of = torch.compile(loss_of, dynamic=False)
    end = recipe.steps if stop_at is None else stop_at
    bar = tqdm(range(len(losses), end), initial=len(losses), total=recipe.steps, desc=recipe.name)
    for step in bar:
        batch = rows.batch(recipe, step).to(device)
        loss = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["full_lr"] * recipe.pace(step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        rate = batch[:, 1:].numel() * (bar.format_dict["rate"] or 0.0)
        bar.set_postfix(loss=f"{np.mean(losses[-20:]):.3f}", tokens_s=f"{rate:.0f}", refresh=False)
        if (step + 1) % checkpoint_every == 0 or step + 1 == recipe.steps:
            _save(path, model, optimizers, losses)
    return model.eval(), losses


@torch.no_grad()
def continued(
    target: LlamaForCausalLM,
    rows: Rows,
    recipe: Recipe,
    count: int = 1280,
    given: int = 96,
    new: int = 160,
    temperature: float = 0.8,
    batch: int = 64,
) -> Documents:
    """Passages of the corpus that the target has continued: `count` of `given + new` tokens."""
    rng = torch.Generator().manual_seed(recipe.seed)
    found: Documents = []
    for step in tqdm(range(-(-count // batch)), desc=f"{recipe.teacher} continues"):
        parts = [rows.batch(recipe, 2 * step), rows.batch(recipe, 2 * step + 1)]
        ids = torch.cat(parts)[:batch, :given].to(target.device)
        text, cache = [ids], None
        for _ in range(new):
            with torch.autocast(target.device.type, torch.bfloat16):
                out = target(input_ids=text[-1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            law = (out.logits[:, -1].float() / temperature).softmax(-1).cpu()
            text.append(torch.multinomial(law, 1, generator=rng).to(target.device))
        found += [row.astype(np.uint16) for row in torch.cat(text, 1).cpu().numpy()]
    return found[:count]


def _loss(model: LlamaForCausalLM, teacher: LlamaForCausalLM | None, device: str) -> Loss:
    """Cross-entropy per token of a batch [B, T + 1], against the text or a teacher's law."""

    def logits(net: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
        hidden = net.model(input_ids=ids, use_cache=False).last_hidden_state
        return F.linear(hidden, net.lm_head.weight).flatten(0, 1).float()  # [B * T, V]

    def of_text(batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            return F.cross_entropy(logits(model, batch[:, :-1]), batch[:, 1:].flatten())

    def of_teacher(batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            with torch.no_grad():
                law = logits(teacher, batch[:, :-1]).softmax(-1)
            return F.cross_entropy(logits(model, batch[:, :-1]), law)

    return of_text if teacher is None else of_teacher


def _optimizers(model: LlamaForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    inside = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in inside]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=recipe.muon_lr, weight_decay=0.05),
        torch.optim.AdamW(rest, lr=recipe.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["full_lr"] = group["lr"]
    return optimizers


def _save(
    path: Path,
    model: LlamaForCausalLM,
    optimizers: list[torch.optim.Optimizer],
    losses: list[float],
) -> None:
    """Write a checkpoint so that a reader finds the old one or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "losses": losses,
    }
    with part.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _digest(recipe: Recipe, rows: Rows) -> str:
    """Names a checkpoint: another recipe or another text is another run."""
    digest = hashlib.sha256(repr(asdict(recipe)).encode())
    digest.update(repr((rows.seed, sorted(rows.repeats.items()))).encode())
    for kind, documents in rows.documents.items():
        digest.update(kind.encode())
        digest.update(np.concatenate(documents).tobytes())
    return digest.hexdigest()[:12]
