"""The training loop that the zoo's models and heads share.

A killed run resumes at its last checkpoint and ends with the same weights as an uninterrupted one:
batches and learning rates depend on the step alone, and nothing else in the loop is random. Muon
(Jordan et al. 2024, as in `torch.optim.Muon`) trains the hidden matrices, where the device
multiplies bfloat16, and AdamW the rest.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from specexp.drafters.plain import Plain
from specexp.engine import Engine
from specexp.errors import refusing
from specexp.models.lm import LM
from specexp.policy import Fixed
from specexp.sampling import Sampling
from specexp.tree import Tree
from specexp.zoo import files
from specexp.zoo.recipes import END, Course
from specexp.zoo.rows import Documents, batches

GIVEN, NEW = 64, 191  # tokens that the target is given, and by which it continues them
TOGETHER, TEMPERATURE = 64, 0.8  # documents that it continues at once, and how
Loss = Callable[[torch.Tensor], torch.Tensor]
Curve = dict[int, dict[str, float]]  # figures by the step at which they were taken


def can_compile(device: str) -> bool:
    return device != "cpu" or shutil.which("g++") is not None


def multiplies_bfloat16(device: str) -> bool:
    """Whether the device has instructions for it. A CPU without takes fifty times as long."""
    can = torch.cpu.get_capabilities() if device == "cpu" else {"bf16": True}
    return any(can.get(unit) for unit in ("bf16", "avx512_bf16", "amx_bf16"))


def mixed(device: str) -> torch.autocast:
    """Products in bfloat16, where the device multiplies it."""
    return torch.autocast(device, torch.bfloat16, multiplies_bfloat16(device))


def check_device(device: str) -> None:
    with refusing(f"cannot train on {device!r}"):
        torch.empty(1, device=device)


def continued(
    target: LM, documents: Documents, count: int, work: Path, end: int = END
) -> Documents:
    """`count` documents of GIVEN real tokens, NEW that the target samples (or as many as it
    has room for), and the end; kept in a file of `work` that the target and the documents name."""
    digest = hashlib.sha256(f"{fingerprint(target.module)} {end}".encode())
    digest.update(np.concatenate(documents).tobytes())
    path = work / f"continued-{count}-{digest.hexdigest()[:12]}.pt"
    if not path.exists():
        engine = Engine(target, Plain(), Fixed(Tree.chain(0)), Sampling(TEMPERATURE))
        new = min(NEW, target.context - GIVEN)
        openings = [document[:GIVEN].tolist() for document in documents if len(document) > GIVEN]
        drawn = np.random.default_rng(0).integers(len(openings), size=count)
        texts: list[list[int]] = []
        for i in tqdm(range(0, count, TOGETHER), desc="the target continues the corpus"):
            prompts = [openings[j] for j in drawn[i : i + TOGETHER]]
            answers = engine.generate(prompts, new, range(i, i + len(prompts))).tokens
            texts += [[*p, *answer, end] for p, answer in zip(prompts, answers, strict=True)]
        save(path, torch.tensor(texts, dtype=torch.int32))
    return list(torch.load(path, weights_only=True).numpy())


def fit(
    name: str, courses: Sequence[Course], documents: Mapping[str, Documents], work: Path,
    model: nn.Module, loss_of: Loss, device: str = "cpu", compiled: bool = True,
    checkpoint_every: int = 100, aim: object = None,
    look: Callable[[], dict[str, float]] = dict,
    watch: Callable[[Curve], object] = lambda curve: None,
) -> list[float]:  # fmt: skip
    """Train a model in place, one course after another; returns the loss at every step.

    Resumes from the checkpoint in `work` of the same name, course, text, initial weights and `aim`.
    `aim`: whatever else the loss depends on, compared by its `repr`. `watch(curve)` is called at
    every checkpoint with the figures of all checkpoints so far, by the number of the step: the mean
    of the last 20 losses, and what `look` returned."""
    losses: list[float] = []
    curve: Curve = {}
    if compiled:
        loss_of = torch.compile(loss_of, dynamic=False)
    model.train()
    torch.set_flush_denormal(True)  # in the whole process: arithmetic near zero is ten times faster
    try:
        for course in courses:
            before = len(losses)
            path = work / f"{name}-{_digest((name, aim), course, documents, model)}.pt"
            optimizers = optimizers_of(model, course)
            if path.exists():
                state = torch.load(path, map_location=device, weights_only=True)
                model.load_state_dict(state["model"])
                for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
                    optimizer.load_state_dict(saved)
                losses, curve = state["losses"], state["curve"]
            start = len(losses) - before
            texts = batches(documents, course, start)
            bar = tqdm(texts, initial=start, total=course.steps, desc=name)
            for step, batch in enumerate(bar, start):
                pace = course.pace(step)
                losses.append(learn(batch.to(device), model, loss_of, optimizers, pace))
                rate = batch[:, 1:].numel() * (bar.format_dict["rate"] or 0.0)
                recent = float(np.mean(losses[before:][-20:]))
                bar.set_postfix(loss=f"{recent:.3f}", tokens_s=f"{rate:.0f}", refresh=False)
                if (step + 1) % checkpoint_every == 0 or step + 1 == course.steps:
                    curve[len(losses)] = {"training/loss": recent} | look()
                    progress = [optimizer.state_dict() for optimizer in optimizers]
                    save(path, {"model": model.state_dict(), "optimizers": progress,
                                "losses": losses, "curve": curve})  # fmt: skip
                    watch(curve)
    finally:
        torch.set_flush_denormal(False)
    model.eval()
    return losses


def learn(
    batch: torch.Tensor, model: nn.Module, loss_of: Loss,
    optimizers: Sequence[torch.optim.Optimizer], pace: float,
) -> float:  # fmt: skip
    """One step from a batch, at this factor on the learning rates; returns the loss."""
    loss = loss_of(batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["full_lr"] * pace
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.item()


def trained_on(
    courses: Sequence[Course], losses: Sequence[float], seed: int, **text: Mapping[str, Any]
) -> dict[str, Any]:
    """What `zoo.json` says of training: the schedule, the mean loss of every 20 steps, and the
    facts about the text."""
    described = []
    for course in courses:
        mine, losses = losses[: course.steps], losses[course.steps :]
        blocks = [mine[i : i + 20] for i in range(0, len(mine), 20)]
        described.append({
            "phases": [[p.steps, p.batch, p.length] for p in course.phases],
            "tokens": course.tokens, "repeats": dict(course.repeats),
            "muon_lr": course.muon_lr, "adam_lr": course.adam_lr,
            "loss": [round(float(np.mean(block)), 4) for block in blocks],
        })  # fmt: skip
    return {"courses": described, "seed": seed, "torch": torch.__version__.split("+")[0], **text}


_MATRIX = re.compile(r"(_proj|linear|fc)\.weight$")  # not embeddings, LM heads or norms


def optimizers_of(model: nn.Module, course: Course) -> list[torch.optim.Optimizer]:
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if _MATRIX.search(name)]
    rest = [p for name, p in named.items() if not _MATRIX.search(name)]
    optimizers: list[torch.optim.Optimizer] = []
    if matrices and multiplies_bfloat16(matrices[0].device.type):  # as Muon does
        optimizers.append(torch.optim.Muon(matrices, lr=course.muon_lr, weight_decay=0.05))
    else:
        rest = [*matrices, *rest]
    adam = torch.optim.AdamW(rest, lr=course.adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
    optimizers.append(adam)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["full_lr"] = group["lr"]
    return optimizers


def save(path: Path, content: object) -> None:
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


def _digest(
    what: object, course: Course, documents: Mapping[str, Documents], model: nn.Module
) -> str:
    """Identifies a checkpoint by what is trained for, the schedule, the text and the weights."""
    digest = hashlib.sha256(f"{what} {course} {fingerprint(model)}".encode())
    for kind, texts in documents.items():
        if course.repeats.get(kind, 1):
            digest.update(kind.encode())
            digest.update(np.concatenate(texts).tobytes())
    return digest.hexdigest()[:12]
