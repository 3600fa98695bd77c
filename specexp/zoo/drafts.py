"""A draft model made from the target: some of its layers, trained on the target's own answers.

The draft keeps the target's tokenizer, embeddings and last norm, the rows of its LM head for tokens
that are frequent in the text, and a few of its layers, the first and the last among them. These
learn the target's whole distribution (soft cross-entropy, as DistillSpec: Zhou et al. 2023, arXiv
2310.08461) on texts that the target wrote, sampled. A quarter of the time goes to writing them.
"""

import copy
import hashlib
import json
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from specexp.engine import Engine
from specexp.errors import UserError, counted, refusing
from specexp.models import int8
from specexp.models.lm import shorten_head
from specexp.zoo import files, shelf
from specexp.zoo.recipes import Course, Phase
from specexp.zoo.rows import Documents, batches
from specexp.zoo.train import (
    Loss,
    fingerprint,
    fit,
    learn,
    mixed,
    optimizers_of,
    save,
    trained_on,
)

TEMPERATURE = 0.8  # of the answers
ANSWER = 160  # tokens of an answer, at most
MOST = 2000  # questions about the zoo's text
ASKED = 320  # characters of a text that the target is asked about
ASK = {"code": "Explain this code.\n\n", "prose": "What does this mean?\n\n",
       "records": "What is in these records?\n\n"}  # fmt: skip
BATCH = 16  # answers that are written together
LENGTH = 256  # tokens of a row
WORDS = 8192  # tokens that a draft may draft, at most
HELD_OUT = 16  # of the answers, one in so many is not trained on
FEWEST = 20  # steps that a schedule needs
_LAYER = re.compile(r"(?<=\.)(layers|h|blocks)\.(\d+)(?=\.)")


def kept_layers(L: int, layers: int) -> list[int]:
    """Which of L layers a draft keeps: as many, evenly spaced, the first and the last among them.
    Raises UserError if that is none or all of them."""
    if not 1 <= layers < L:
        raise UserError(f"a draft of a target of {counted(L, 'layer')} keeps 1 to {L - 1} of them")
    return [round(i) for i in np.linspace(0, L - 1, layers)]


def cut(target: PreTrainedModel, layers: int) -> PreTrainedModel:
    """A model of so many of the target's layers, in float32; only its layers and last norm are
    trained. Raises UserError for a model whose layers cannot be told apart, or whose weights are
    quantised."""
    if any(map(int8.is_quantised, target.parameters())):
        raise UserError(
            "a draft is cut from unquantised weights: leave out +int8; it drafts for the quantised "
            "model, too"
        )
    config = copy.deepcopy(target.config)
    L = config.get_text_config().num_hidden_layers
    chosen = kept_layers(L, layers)
    described = config.get_text_config()
    for key, value in described.to_dict().items():
        if isinstance(value, list) and len(value) == L:
            setattr(described, key, [value[i] for i in chosen])
    described.num_hidden_layers = layers
    places = {str(i): str(place) for place, i in enumerate(chosen)}
    weights = {}
    for name, weight in target.state_dict().items():
        layer = _LAYER.search(name)
        if layer is None:
            weights[name] = weight
        elif layer[2] in places:
            weights[_LAYER.sub(rf"\1.{places[layer[2]]}", name, count=1)] = weight
    with refusing(f"no draft can be cut from a {type(target).__name__}"):  # of layers that share
        draft = type(target)(config).to(target.device, torch.float32)
        draft.load_state_dict(weights)
    for part in (draft.get_input_embeddings(), draft.get_output_embeddings()):
        part.requires_grad_(False)
    return draft


def questions(chats: bool) -> list[str]:
    """Questions about the zoo's text, which only a checkout has, in random order; texts to continue
    for a target without a chat template (`chats` is False)."""
    train = shelf.making("corpus").gather(records=500, edits=0).train
    texts = [(ASK[kind] if chats else "") + text[:ASKED] for kind in ASK for text in train[kind]]
    return [texts[i] for i in np.random.default_rng(0).permutation(len(texts))[:MOST]]


def logits_after(model: PreTrainedModel, batch: Tensor) -> Tensor:
    """Logits [B * T, V] after each token of a batch [B, T + 1] but the last."""
    return model(batch[:, :-1], use_cache=False).logits.flatten(0, 1).float()


def loss_of(target: PreTrainedModel, draft: PreTrainedModel) -> Loss:
    """Soft cross-entropy of a draft against its target among the tokens that it may draft, per
    token of a batch."""
    ids = getattr(draft.config.get_text_config(), "draft_ids", [])
    among = torch.tensor(ids, device=target.device) if ids else slice(None)

    def loss(batch: Tensor) -> Tensor:
        with mixed(target.device.type):
            with torch.no_grad():
                p = logits_after(target, batch)[:, among].softmax(-1)
            return F.cross_entropy(logits_after(draft, batch)[:, among], p)

    return loss


def answered(engine: Engine, prompts: Sequence[list[int]], seconds: float, file: Path) -> Documents:
    """The prompts that fit the target, each with its answer, batch after batch until the time is
    over. They are kept in a file, from which a killed run goes on."""
    state: dict[str, list[Any]] = {"documents": [], "seconds": []}
    if file.exists():
        state = torch.load(file, weights_only=True)
    new = min(ANSWER, engine.target.context // 2)
    prompts = [prompt for prompt in prompts if len(prompt) + new <= engine.target.context]
    batches = [prompts[i : i + BATCH] for i in range(0, len(prompts), BATCH)]
    with tqdm(desc="the target writes", unit=" answers", initial=len(state["documents"])) as bar:
        for batch in batches[len(state["seconds"]) :]:
            if sum(state["seconds"]) >= seconds and len(state["documents"]) > 1:
                break
            begin = time.perf_counter()
            first = len(state["documents"])
            answers = engine.generate(batch, new, range(first, first + len(batch))).tokens
            state["documents"] += [
                torch.tensor([*prompt, *answer], dtype=torch.int32)
                for prompt, answer in zip(batch, answers, strict=True)
            ]
            state["seconds"].append(time.perf_counter() - begin)
            bar.update(len(batch))
            bar.set_postfix_str(f"{sum(state['seconds']):.0f} of {seconds:.0f} s")
            save(file, state)
    return [text.numpy() for text in state["documents"]]


def frequent(documents: Documents, V: int) -> list[int]:
    """The tokens most frequent in documents; none if a draft may draft all V."""
    counts = np.bincount(np.concatenate(documents), minlength=V)[:V]
    often = np.argsort(-counts, kind="stable")[:WORDS].tolist()
    return sorted(often) if V > WORDS else []


def digest_of(target: PreTrainedModel, prompts: Sequence[list[int]], minutes: float) -> str:
    """Identifies what a draft is trained on, and for how long."""
    what = f"{fingerprint(target)} {prompts} {minutes}"
    return hashlib.sha256(what.encode()).hexdigest()[:12]


def folder_of(name: str, layers: int, out: Path | None = None) -> Path:
    """Where a draft of so many layers of the model `name` is written."""
    return (out or shelf.store() / "zoo" / "drafts") / f"{name}-draft-{layers}"


def train(
    engine: Engine, tokenizer: Any, name: str, prompts: Sequence[list[int]], layers: int,
    minutes: float, out: Path | None = None, source: str = "",
) -> Path:  # fmt: skip
    """Cut a draft from the target of an engine and train it for about so many minutes; returns the
    folder written, `zoo/drafts` of the store by default. The same command resumes a killed run.

    prompts: token ids of what the target is to answer; source: what they are, in words. Raises
    UserError if the answers are too few to learn from."""
    target, work = engine.target.module, shelf.store() / "zoo"
    draft = cut(target, layers)
    digest = digest_of(target, prompts, minutes)
    file = work / f"{name}-draft-{digest}.pt"
    documents = answered(engine, prompts, 15 * minutes, file)
    held = documents[::HELD_OUT]
    learnt = [d for i, d in enumerate(documents) if i % HELD_OUT]
    tokens, device = sum(map(len, learnt)), str(target.device)
    batch = min(1 if device == "cpu" else 4, (tokens - 1) // LENGTH)  # few steps learn little
    if batch < 1:
        raise UserError(
            f"{tokens} tokens of answers are too few to learn from: raise --minutes, or give more "
            "--text"
        )
    head = draft.get_output_embeddings()
    draft.config.get_text_config().draft_ids = frequent(learnt, engine.target.vocab)
    shorten_head(draft)
    loss = loss_of(target, draft)
    one = Course((Phase(1, batch, LENGTH),), adam_lr=1e-3)
    first = next(batches({"answers": learnt}, one)).to(device)
    steps = _steps(target, draft, first, one, 45 * minutes, file)
    course = replace(one, phases=(Phase(steps, batch, LENGTH),))
    losses = fit(f"{name}-draft", [course], {"answers": learnt}, work, draft, loss, device,
                 device != "cpu", min(20, steps // 4), aim=(layers, digest))  # fmt: skip
    figures = {"answers": agreement(target, draft, held)}
    answers = {"source": source, "answered": len(documents), "digest": digest,
               "temperature": engine.sampling.temperature}  # fmt: skip
    draft.set_output_embeddings(head)  # that of config.json; `shorten_head` takes its part again
    folder = folder_of(name, layers, out)
    facts = {
        "name": folder.name, "role": "draft", "target": name,
        "about": f"{counted(layers, 'layer')} of {name}, taught on its own answers.",
        "parameters": sum(p.numel() for p in draft.parameters()),
        "layers": layers, "width": draft.config.get_text_config().hidden_size,
        "held_out": figures, "trained": trained_on([course], losses, 0, answers=answers),
    }  # fmt: skip
    with files.whole(folder) as partial:
        draft.to(torch.bfloat16).save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / "zoo.json").write_text(json.dumps(facts, indent=1) + "\n")
    return folder


def _steps(
    target: PreTrainedModel, draft: PreTrainedModel, batch: Tensor, course: Course,
    seconds: float, file: Path,
) -> int:  # fmt: skip
    """How many steps take so long, as timed once on a copy of the draft and kept beside the
    answers."""
    state = torch.load(file, weights_only=True)
    key = f"steps of {draft.config.get_text_config().num_hidden_layers} layers"
    if key not in state:
        trial = copy.deepcopy(draft)
        loss, optimizers, times = loss_of(target, trial), optimizers_of(trial, course), []
        for _ in range(4):
            begin = time.perf_counter()
            learn(batch, trial, loss, optimizers, 1.0)
            times.append(time.perf_counter() - begin)
        state[key] = max(FEWEST, int(seconds / statistics.median(times[1:])))
        save(file, state)
    return int(state[key])


@torch.no_grad()
def agreement(
    target: PreTrainedModel, draft: PreTrainedModel, documents: Documents
) -> dict[str, float]:
    """How often the draft's most likely token is the target's (the acceptance of a greedy token),
    and the mean overlap of their distributions (that of a sampled one)."""
    same, overlap = [], []
    for document in documents:
        batch = torch.from_numpy(document.astype(np.int64))[None].to(target.device)
        theirs, ours = (logits_after(model, batch) for model in (target, draft))
        same.append((theirs.argmax(-1) == ours.argmax(-1)).float())
        overlap.append(torch.minimum(theirs.softmax(-1), ours.softmax(-1)).sum(-1))
    return {"agreement": round(float(torch.cat(same).mean()), 4),
            "overlap": round(float(torch.cat(overlap).mean()), 4)}  # fmt: skip
