"""Tokenizes documents and packs them into training batches.

The tokenizer is a byte-level BPE trained on the corpus; every document ends with
`<|endoftext|>`. A batch depends on its step alone, so training can resume at any step without a
saved data position. This file does not know about models.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from specexp.zoo.recipes import CONTEXT, END, VOCABULARY, Course

END_TEXT = "<|endoftext|>"
Documents = list[np.ndarray]  # int32 [tokens], ending with the end of text


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE of `VOCABULARY` entries with single digits; deterministic."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[END_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return wrap(bpe)


def wrap(bpe: Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer for `transformers`; it puts `<|endoftext|>` before everything it encodes."""
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{END_TEXT} $A", special_tokens=[(END_TEXT, END)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END_TEXT,
        eos_token=END_TEXT,
        pad_token=END_TEXT,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> Documents:
    """The tokens of each text, followed by the tokenizer's end of text."""
    encodings = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    end = tokenizer.eos_token_id
    return [np.array([*e.ids, end], dtype=np.int32) for e in encodings]


@dataclass
class Rows:
    """Batches of rows cut from the concatenated documents, reshuffled every epoch."""

    documents: Mapping[str, Documents]
    repeats: Mapping[str, int] = field(default_factory=dict)  # of a kind per epoch; default 1
    seed: int = 0
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
        return [
            document
            for kind, documents in self.documents.items()
            for document in documents * self.repeats.get(kind, 1)
        ]

    def _rows(self, phase: int, epoch: int, length: int) -> np.ndarray:
        """All rows of an epoch, int32 [rows, length + 1]; documents are shuffled, then rows."""
        key = (phase, epoch, length)
        if self._epoch is None or self._epoch[0] != key:
            rng = np.random.default_rng([self.seed, phase, epoch])
            documents = self._each_epoch()
            stream = np.concatenate([documents[i] for i in rng.permutation(len(documents))])
            windows = np.lib.stride_tricks.sliding_window_view(stream, length + 1)[::length]
            self._epoch = key, windows[rng.permutation(len(windows))]
        return self._epoch[1]
