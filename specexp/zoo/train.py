"""The training loop that the zoo's models and heads share.

A killed run resumes at its last checkpoint and ends with the same weights as an uninterrupted one:
batches and learning rates depend on the step alone, and nothing else in the loop is random. Muon
(Jordan et al. 2024, as in `torch.optim.Muon`) trains the hidden matrices, AdamW the rest.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn
from tqdm import tqdm
from transformers import LlamaForCausalLM

from specexp.errors import refusing
from specexp.zoo import files
from specexp.zoo.recipes import END, Course
from specexp.zoo.rows import Documents, Rows

CHECKPOINT_EVERY = 100
GIVEN = 64  # tokens of a document that the target is given to continue
TOGETHER, TEMPERATURE = 64, 0.8  # documents that it continues at once, and how
Loss = Callable[[torch.Tensor], torch.Tensor]


def can_compile(device: str) -> bool:
    return device != "cpu" or shutil.which("g++") is not None


def check_device(device: str) -> None:
    with refusing(f"cannot train on {device!r}"):
        torch.empty(1, device=device)


def continued_once(
    target: LlamaForCausalLM, documents: Documents, count: int, work: Path, end: int = END
) -> Documents:
    """`continued`, cached in a file of `work` that is named by the target and the documents."""
    digest = hashlib.sha256(f"{fingerprint(target)} {end}".encode())
    digest.update(np.concatenate(documents).tobytes())
    path = work / f"continued-{count}-{digest.hexdigest()[:12]}.pt"
    if not path.exists():
        keep(path, torch.from_numpy(np.stack(continued(target, documents, count, end=end))))
    return list(torch.load(path, weights_only=True).numpy())


def fit(
    name: str, course: Course, rows: Rows, work: Path, model: nn.Module, loss_of: Loss,
    device: str = "cpu", compiled: bool = True, checkpoint_every: int = CHECKPOINT_EVERY,
    watch: Callable[[int, float], None] = lambda step, loss: None, aim: object = None,
) -> list[float]:  # fmt: skip
    """Train a model in place for one course; returns the loss at every step.

    Resumes from the checkpoint in `work` of the same name, course, text, initial weights and `aim`.
    `aim`: whatever else the loss depends on, compared by its `repr`. `watch(step, loss)` is called
    at every checkpoint with the mean of the last 20 losses."""
    path = work / f"{name}-{_digest((name, aim), course, rows, model)}.pt"
    model.train()
    optimizers = _optimizers(model, course)
    losses: list[float] = []
    if path.exists():
        state = torch.load(path, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        losses = state["losses"]
    if compiled:
        loss_of = torch.compile(loss_of, dynamic=False)
    start = len(losses)
    bar = tqdm(range(start, course.steps), initial=start, total=course.steps, desc=name)
    with flushing_denormals():
        for step in bar:
            batch = rows.batch(course, step).to(device)
            loss = loss_of(batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group["full_lr"] * course.pace(step)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
            rate = batch[:, 1:].numel() * (bar.format_dict["rate"] or 0.0)
            recent = float(np.mean(losses[-20:]))
            bar.set_postfix(loss=f"{recent:.3f}", tokens_s=f"{rate:.0f}", refresh=False)
            if (step + 1) % checkpoint_every == 0 or step + 1 == course.steps:
                progress = [optimizer.state_dict() for optimizer in optimizers]
                keep(path, {"model": model.state_dict(), "optimizers": progress, "losses": losses})
                watch(step + 1, recent)
    model.eval()
    return losses


@contextmanager
def flushing_denormals() -> Iterator[None]:
    """Flush denormals in the whole process: arithmetic near zero is ten times faster."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@torch.no_grad()
def continued(
    target: LlamaForCausalLM, documents: Documents, count: int, given: int = GIVEN, new: int = 191,
    end: int = END,
) -> Documents:  # fmt: skip
    """`count` documents of `given` real tokens, `new` sampled from the target, and the end."""
    rng = torch.Generator().manual_seed(0)
    long_enough = [document for document in documents if len(document) > given]
    continuations: Documents = []
    batch = min(TOGETHER, count)
    for _ in tqdm(range(0, count, batch), desc="the target continues the corpus"):
        drawn = torch.randint(len(long_enough), (batch,), generator=rng).tolist()
        starts = np.stack([long_enough[i][:given] for i in drawn]).astype(np.int64)
        text, cache = [torch.from_numpy(starts).to(target.device)], None
        for _ in range(new):
            with torch.autocast(target.device.type, torch.bfloat16):
                out = target(input_ids=text[-1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            law = (out.logits[:, -1].float() / TEMPERATURE).softmax(-1).cpu()
            text.append(torch.multinomial(law, 1, generator=rng).to(target.device))
        text.append(torch.full_like(text[-1], end))
        continuations += list(torch.cat(text, 1).cpu().numpy().astype(np.int32))
    return continuations[:count]


_MATRIX = re.compile(r"(_proj|linear|fc)\.weight$")  # not embeddings, LM heads or norms


def _optimizers(model: nn.Module, course: Course) -> list[torch.optim.Optimizer]:
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if _MATRIX.search(name)]
    rest = [p for name, p in named.items() if not _MATRIX.search(name)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=course.muon_lr, weight_decay=0.05),
        torch.optim.AdamW(rest, lr=course.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["full_lr"] = group["lr"]
    return optimizers


def keep(path: Path, content: object) -> None:
    """Save atomically: a reader finds the old file or the new one, never a part."""
    with files.whole(path) as partial, partial.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def fingerprint(model: nn.Module) -> str:
    """A digest of all weights, of any dtype but bfloat16, which numpy does not support."""
    digest = hashlib.sha256()
    for weight in model.state_dict().values():
        digest.update(weight.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def _digest(what: object, course: Course, rows: Rows, model: nn.Module) -> str:
    """Identifies a checkpoint by what is trained for, the schedule, the text and the weights."""
    begun = what, replace(course, repeats={}), rows.seed, fingerprint(model)
    digest = hashlib.sha256(repr(begun).encode())
    for kind, documents in rows.documents.items():
        times = rows.repeats.get(kind, 1)
        if times:
            digest.update(f"{kind} {times}".encode())
            digest.update(np.concatenate(documents).tobytes())
    return digest.hexdigest()[:12]
