"""Cuts and tokenizes texts and packs them into training batches.

Every document ends with the tokenizer's end of text. A batch depends on its step alone, so training
can resume at any step without a saved data position.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from specexp.errors import UserError, refusing
from specexp.zoo.recipes import Course

PIECE = 2400  # characters of a document, about 700 tokens
Documents = list[np.ndarray]  # int32 [tokens], ending with the end of text


@dataclass(frozen=True)
class Texts:
    """Training and held-out documents by kind, and what `zoo.json` says of them."""

    train: dict[str, list[str]]
    held: dict[str, list[str]]
    facts: dict[str, Any]


def read(file: Path) -> Texts:
    """A text file of one's own, of which a twentieth is held out. Raises UserError if there is no
    such file."""
    if not file.is_file():
        raise UserError(f"no text file at {file}")
    whole = file.read_text(errors="replace")
    pieces = cut(whole)
    few = max(1, len(pieces) // 20)
    facts = {"file": file.name, "characters": len(whole)}
    return Texts({"text": pieces[few:]}, {"text": pieces[:few]}, facts)


def cut(text: str) -> list[str]:
    """All of any text in pieces of up to `PIECE` characters, cut at line ends where possible."""
    return re.findall(rf"(?s).{{{PIECE // 2},{PIECE}}}(?:\n|\Z)|.{{1,{PIECE}}}", text)


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> Documents:
    """The tokens of each text, followed by the tokenizer's end of text."""
    with refusing("the tokenizer fails on the training text"):
        encodings = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    end = tokenizer.eos_token_id
    return [np.array([*e.ids, end], dtype=np.int32) for e in encodings]


def windows(documents: Documents, length: int) -> np.ndarray:
    """Rows [n, length + 1] cut from the concatenated documents, each beginning with the last token
    of the one before it; one shorter row if there are fewer tokens."""
    stream = np.concatenate(documents)
    length = min(length, len(stream) - 1)
    return np.lib.stride_tricks.sliding_window_view(stream, length + 1)[::length]


def batches(
    documents: Mapping[str, Documents], course: Course, start: int = 0
) -> Iterator[torch.Tensor]:
    """Token ids [batch, length + 1] int64 of each step of a course from `start` on, the last column
    of which is only predicted. Every epoch all documents are shuffled, then the rows cut from
    them."""
    each = [d for kind, texts in documents.items() for d in texts * course.repeats.get(kind, 1)]
    tokens = sum(map(len, each)) - 1  # the very last token is only predicted
    for number, phase in enumerate(course.phases):
        steps = tokens // phase.length // phase.batch  # of an epoch
        if not steps:
            raise ValueError(f"{tokens} tokens do not fill one batch of {phase}")
        epoch, rows = -1, np.empty(0)
        for step in range(start, phase.steps):
            if epoch != step // steps:
                epoch = step // steps
                rng = np.random.default_rng([0, number, epoch])
                rows = windows([each[i] for i in rng.permutation(len(each))], phase.length)
                rows = rows[rng.permutation(len(rows))]
            first = step % steps * phase.batch
            yield torch.from_numpy(rows[first : first + phase.batch].astype(np.int64))
        start = max(0, start - phase.steps)
