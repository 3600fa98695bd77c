"""Cuts and tokenizes texts and packs them into training batches.

Every document ends with the tokenizer's end of text. A batch depends on its step alone, so training
can resume at any step without a saved data position.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
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


@dataclass
class Rows:
    """Batches of rows cut from the concatenated documents, reshuffled every epoch."""

    documents: Mapping[str, Documents]
    repeats: Mapping[str, int] = field(default_factory=dict)  # of a kind per epoch; default 1
    _epoch: tuple[tuple[int, int, int], np.ndarray] | None = None

    def batch(self, course: Course, step: int) -> torch.Tensor:
        """Token ids [batch, length + 1] int64 of a step; the last column is only predicted."""
        number, step = course.place(step)
        phase = course.phases[number]
        batches = self.tokens // phase.length // phase.batch
        if not batches:
            raise ValueError(f"{self.tokens} tokens do not fill one batch of {phase}")
        epoch, step = divmod(step, batches)
        rows = self._rows(number, epoch, phase.length)
        rows = rows[step * phase.batch : (step + 1) * phase.batch]
        return torch.from_numpy(rows.astype(np.int64))

    @property
    def tokens(self) -> int:
        """Training tokens per epoch; the very last token is only predicted."""
        return sum(map(len, self._each_epoch())) - 1

    def _each_epoch(self) -> Documents:
        repeated = (texts * self.repeats.get(kind, 1) for kind, texts in self.documents.items())
        return list(chain.from_iterable(repeated))

    def _rows(self, phase: int, epoch: int, length: int) -> np.ndarray:
        """All rows of an epoch, int32 [rows, length + 1]; documents are shuffled, then rows."""
        key = (phase, epoch, length)
        if self._epoch is None or self._epoch[0] != key:
            rng = np.random.default_rng([0, phase, epoch])
            documents = self._each_epoch()
            rows = windows([documents[i] for i in rng.permutation(len(documents))], length)
            self._epoch = key, rows[rng.permutation(len(rows))]
        return self._epoch[1]
