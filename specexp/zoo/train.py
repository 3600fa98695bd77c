"""Trains the zoo's models from their recipes, one after another.

A killed run resumes at its last checkpoint and ends with the same weights as an uninterrupted one:
batches and learning rates depend on the step alone, and nothing else in the loop is random. Muon
(Jordan et al. 2024, as in `torch.optim.Muon`) trains the hidden matrices, AdamW the rest. A draft
model learns the target's whole law (soft cross-entropy, which is the forward KL plus a constant;
Hinton et al. 2015, section 2) on the corpus and on continuations that the target generated.

This file does not know what the text is (`corpus.py`) or how batches are formed (`rows.py`).
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
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import nn
from tqdm import tqdm
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specexp.errors import UserError, first_line
from specexp.zoo import shelf
from specexp.zoo.cards import card, describe, measure, write
from specexp.zoo.corpus import Corpus, gather
from specexp.zoo.recipes import END, RECIPES, Course, Recipe, quick_version
from specexp.zoo.rows import Documents, Rows, encode, train_tokenizer, wrap

CHECKPOINT_EVERY = 100
GIVEN = 64  # tokens of a document that the target is given to continue
Loss = Callable[[torch.Tensor], torch.Tensor]


def train_zoo(
    only: list[str] | None = None,
    out: Path | None = None,
    work: Path | None = None,
    device: str = "cpu",
    quick: bool = False,
) -> list[Path]:
    """Train the zoo, or the models named in `only`; returns the folders written.

    `work`: folder of the checkpoints, by default `zoo/` of the store. `out`: folder of the models,
    by default `work / "models"`, so that the shipped models are not overwritten; a draft model
    needs its target there. `quick`: a smoke test of a minute on little text; its models are
    useless.

    Raises UserError for an unknown model, an unavailable device, or a target not trained yet.
    """
    work = work or shelf.made("zoo")
    out = out or work / ("quick" if quick else "models")
    recipes = _chosen(only)
    check_device(device)
    corpus = gather(records=80, edits=80, limit=24) if quick else gather()
    made = []
    for recipe in recipes:
        made.append(out / recipe.name)
        _make(quick_version(recipe) if quick else recipe, corpus, out, work, device, quick)
    return made


def _make(recipe: Recipe, corpus: Corpus, out: Path, work: Path, device: str, quick: bool) -> None:
    """Train one model and write its folder."""
    target = _load(out / recipe.teacher, device) if recipe.teacher else None
    tokenizer = _tokenizer(corpus, recipe, out)
    train = {kind: encode(tokenizer, texts) for kind, texts in corpus.train.items()}
    held = {kind: encode(tokenizer, texts) for kind, texts in corpus.held.items()}
    if target is not None:
        given = [d for kind in corpus.train if kind != "echoes" for d in train[kind]]
        train["continued"] = continued_once(target, given, 8 if quick else 512, work)
    losses: list[float] = []
    model = recipe.build().to(device)
    if target is not None and target.config.hidden_size == recipe.width:
        model.model.embed_tokens.weight.data.copy_(target.model.embed_tokens.weight.data)
    compiled = not quick and can_compile(device)
    aim = recipe.exits, fingerprint(target) if target is not None else ""
    for course in recipe.courses:
        rows = Rows(train, course.repeats)
        loss = _loss(model, target, recipe.exits)
        losses += fit(recipe.name, course, rows, work, model, loss, device, compiled, aim=aim)
    shipped = model.to(torch.bfloat16)
    shipped.generation_config = GenerationConfig(
        bos_token_id=END, eos_token_id=END, pad_token_id=END
    )
    folder = out / recipe.name
    part = out / f".{recipe.name}.part"
    shutil.rmtree(part, ignore_errors=True)
    shipped.save_pretrained(part)
    tokenizer.save_pretrained(part)
    tokens = 2_048 if quick else 32_768
    figures = measure(shipped.float().to(device), held, target, tokens)
    facts = describe(recipe, shipped, figures, corpus.facts(), losses)
    write(part, facts, card(facts))
    shutil.rmtree(folder, ignore_errors=True)
    part.replace(folder)


def can_compile(device: str) -> bool:
    return device != "cpu" or shutil.which("g++") is not None


def _chosen(only: list[str] | None) -> list[Recipe]:
    names = [recipe.name for recipe in RECIPES]
    for name in only or []:
        if name not in names:
            raise UserError(f"no recipe for {name!r}: the zoo trains {', '.join(names)}")
    return [recipe for recipe in RECIPES if only is None or recipe.name in only]


def check_device(device: str) -> None:
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"cannot train on {device!r}: {first_line(error)}") from error


def _load(folder: Path, device: str) -> LlamaForCausalLM:
    """A trained model in float32, frozen."""
    if not (folder / "model.safetensors").exists():
        raise UserError(
            f"no {folder.name} in {folder.parent}: train it first, or point --out at its folder"
        )
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.to(device).eval().requires_grad_(False)


def _tokenizer(corpus: Corpus, recipe: Recipe, out: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of the zoo's target in `out`; a new one for that target or without it."""
    target = next(r.name for r in RECIPES if r.role == "target")
    path = out / target / "tokenizer.json"
    if recipe.name != target and path.exists():
        return wrap(Tokenizer.from_file(str(path)))
    return train_tokenizer(
        text for kind, texts in corpus.train.items() if kind != "echoes" for text in texts
    )


def continued_once(
    target: LlamaForCausalLM, documents: Documents, count: int, work: Path, end: int = END
) -> Documents:
    """`continued`, cached in a file of `work` that is named by the target and the documents."""
    digest = hashlib.sha256(f"{fingerprint(target)} {end}".encode())
    digest.update(np.concatenate(documents).tobytes())
    path = work / f"continued-{count}-{digest.hexdigest()[:12]}.pt"
    if not path.exists():
        _write(path, torch.from_numpy(np.stack(continued(target, documents, count, end=end))))
    return list(torch.load(path, weights_only=True).numpy())


def fit(
    name: str,
    course: Course,
    rows: Rows,
    work: Path,
    model: nn.Module,
    loss_of: Loss,
    device: str = "cpu",
    compiled: bool = True,
    checkpoint_every: int = CHECKPOINT_EVERY,
    watch: Callable[[int, float], None] = lambda step, loss: None,
    aim: object = None,
) -> list[float]:
    """Train a model in place for one course; returns the loss at every step.

    Resumes from the checkpoint in `work` of the same name, course, text, initial weights and `aim`.
    `aim`: whatever else the loss depends on, compared by its `repr`. `watch(step, loss)` is called
    at every checkpoint with the mean of the last 20 losses.
    """
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
            bar.set_postfix(
                loss=f"{np.mean(losses[-20:]):.3f}", tokens_s=f"{rate:.0f}", refresh=False
            )
            if (step + 1) % checkpoint_every == 0 or step + 1 == course.steps:
                state = {
                    "model": model.state_dict(),
                    "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                    "losses": losses,
                }
                _write(path, state)
                watch(step + 1, float(np.mean(losses[-20:])))
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
    target: LlamaForCausalLM,
    documents: Documents,
    count: int,
    given: int = GIVEN,
    new: int = 191,
    temperature: float = 0.8,
    batch: int = 64,
    end: int = END,
) -> Documents:
    """`count` documents of `given` real tokens, `new` sampled from the target, and the end."""
    rng = torch.Generator().manual_seed(0)
    long_enough = [document for document in documents if len(document) > given]
    found: Documents = []
    batch = min(batch, count)
    for _ in tqdm(range(0, count, batch), desc="the target continues the corpus"):
        drawn = torch.randint(len(long_enough), (batch,), generator=rng).tolist()
        starts = np.stack([long_enough[i][:given] for i in drawn]).astype(np.int64)
        text, cache = [torch.from_numpy(starts).to(target.device)], None
        for _ in range(new):
            with torch.autocast(target.device.type, torch.bfloat16):
                out = target(input_ids=text[-1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            law = (out.logits[:, -1].float() / temperature).softmax(-1).cpu()
            text.append(torch.multinomial(law, 1, generator=rng).to(target.device))
        text.append(torch.full_like(text[-1], end))
        found += list(torch.cat(text, 1).cpu().numpy().astype(np.int32))
    return found[:count]


def _loss(
    model: LlamaForCausalLM, teacher: LlamaForCausalLM | None, exits: tuple[int, ...] = ()
) -> Loss:
    """Cross-entropy per token of a batch [B, T + 1], against the text or a teacher's law.

    `exits`: layers whose hidden states must also predict the token through the model's own norm and
    head; the mean of their losses is added (LayerSkip, Elhoushi et al. 2024, section 4.1.2).
    """

    def laws(net: LlamaForCausalLM, ids: torch.Tensor) -> list[torch.Tensor]:
        out = net.model(input_ids=ids, use_cache=False, output_hidden_states=bool(exits))
        states = [out.last_hidden_state, *(net.model.norm(out.hidden_states[e]) for e in exits)]
        return [F.linear(x, net.lm_head.weight).flatten(0, 1).float() for x in states]  # [B * T, V]

    def against(answer: Callable[[torch.Tensor], torch.Tensor]) -> Loss:
        def loss(batch: torch.Tensor) -> torch.Tensor:
            with torch.autocast(model.device.type, torch.bfloat16):
                right = answer(batch)
                last, *early = (F.cross_entropy(x, right) for x in laws(model, batch[:, :-1]))
                return last + sum(early) / len(early) if early else last

        return loss

    @torch.no_grad()
    def law(batch: torch.Tensor) -> torch.Tensor:
        assert teacher is not None
        return laws(teacher, batch[:, :-1])[0].softmax(-1)

    return against(law) if teacher is not None else against(lambda batch: batch[:, 1:].flatten())


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


def _write(path: Path, content: object) -> None:
    """Save atomically: a reader finds the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


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
