"""Guess with a draft model of another tokenizer, on the tokens that both spell alike.

(Token-level intersection: Timor et al. 2025, Accelerating LLM inference with lossless speculative
decoding for heterogeneous vocabularies, section 3.3.) The draft keeps a text of its own. A token
that both tokenizers have is one token there, too; any other is respelt, in up to `_LONGEST` pieces.
Guesses are drawn from the draft's law over the common tokens, which is the q a rule is shown, so
every rule stays exact.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specexp.drafters import Drafter, Plan, Ready
from specexp.drafters.model import all_rows
from specexp.errors import UserError
from specexp.growth import Level, grow
from specexp.lm import LM, Forward, load, read_config, read_tokenizer
from specexp.sampling import Rng, Sampling
from specexp.sequences import Draft, Sequences, Verdict
from specexp.tree import Tree

_LONGEST = 8  # pieces of one respelt token; what is longer is cut
_SLOTS = 3  # of the draft's text for each of the target's


class Tongues:
    """Two tokenizers. spelling [V, M]: each target token in the draft's, -1 beyond its end; common
    [V]: the one draft token that is spelt like it, -1 where there is none."""

    def __init__(self, target: Any, draft: Any, vocab: int) -> None:
        self.target, self.draft = target, draft
        theirs = {_plain(token): i for token, i in draft.get_vocab().items()}
        tokens = target.convert_ids_to_tokens(range(vocab))
        common = [-1 if t is None else theirs.get(_plain(t), -1) for t in tokens]
        spelt = [
            [same] if same >= 0 else self.translated([i])[:_LONGEST]
            for i, same in enumerate(common)
        ]
        M = max(map(len, spelt))
        self.spelling = torch.tensor([s + [-1] * (M - len(s)) for s in spelt])
        self.common = torch.tensor(common)

    def translated(self, ids: list[int]) -> list[int]:
        """Tokens of the target as the draft spells them; never empty."""
        return self._spelt(self.target.decode(ids), add_special_tokens=False)

    def begun(self, ids: list[int]) -> list[int]:
        """The same of a text from its beginning on: its special tokens are the draft's own."""
        return self._spelt(self.target.decode(ids, skip_special_tokens=True))

    def _spelt(self, text: str, **how: bool) -> list[int]:
        return list(self.draft(text, **how).input_ids) or [self.draft.eos_token_id or 0]


def _plain(token: str) -> str:
    """Byte-level and sentence-piece vocabularies write a leading space differently."""
    return token.replace("\u2581", "\u0120")


class Crossed(Drafter):
    reads = True

    def __init__(self, lm: LM, tongues: Tongues, sampling: Sampling) -> None:
        self.lm, self.tongues, self.sampling = lm, tongues, sampling
        self.name = f"{lm.name} (crossed)"
        self.models: tuple[LM, ...] = (lm,)
        self.context = lm.context
        self.spelling = tongues.spelling.to(lm.device)
        self.common = tongues.common.to(lm.device)

    def allocate(self, B: int, S: int) -> None:
        """A text of the draft's may be twice as long; beyond that its guesses are worth nothing."""
        self.longest, self.most = 2 * S, 1
        self.texts = Sequences.empty(B, _SLOTS * S, device=self.lm.device)
        self.told = torch.ones(B, dtype=torch.int64, device=self.lm.device)
        self.lm.allocate(B, _SLOTS * S)

    @property
    def state(self) -> tuple[Tensor, ...]:
        return (self.texts.tokens, self.texts.length, self.told)

    @property
    def shaped_by(self) -> tuple[int, ...]:
        return (self.most,)

    def prefill(self, seqs: Sequences, hidden: Tensor | None) -> None:
        for row, (tokens, length) in enumerate(
            zip(seqs.tokens.tolist(), seqs.length.tolist(), strict=True)
        ):
            text = self.tongues.begun(tokens[:length])[: self.longest]
            self.texts.write(seqs.first + row, text, limit=0, stream=0)
        self.told[seqs.rows] = seqs.length

    def catch_up(self, seqs: Sequences, missed: int) -> None:
        text, told = self._listen(seqs), self.told[seqs.rows]
        # of a prompt that is read in parts, as large a part
        read = replace(text, length=(text.length * seqs.length // told).clamp(min=1))
        pieces = (missed + 1) * self.spelling.shape[1]
        self.lm.refill(read, min(pieces, int(read.length.max())))

    def _listen(self, seqs: Sequences) -> Sequences:
        """Respell what was committed since the last round: at most `most` tokens a row."""
        text, told = self.texts.window(seqs.first, len(seqs.tokens)), self.told[seqs.rows]
        at = told[:, None] + torch.arange(self.most, device=told.device)
        new = seqs.tokens.gather(1, at.clamp(max=seqs.tokens.shape[1] - 1))
        pieces = torch.where((at < seqs.length[:, None])[..., None], self.spelling[new], -1)
        pieces = pieces.flatten(1)
        said = pieces >= 0
        end = text.tokens.shape[1] - 1  # no text reaches it: it takes padding, and what is over
        slot = torch.where(said, text.length[:, None] + said.cumsum(1) - 1, end)
        text.tokens.scatter_(1, slot.clamp(max=end), pieces.clamp(min=0))
        text.length += said.sum(1)
        text.length.clamp_(max=self.longest)
        told.copy_(torch.maximum(told, seqs.length))  # a prompt is read in parts, but told whole
        return text

    def propose(self, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
        text = self._listen(seqs)
        self.most = max(self.most, tree.depth + 1)

        def step(level: Level) -> Tensor:
            if level.depth == 0:
                # the deepest guess of the draft before, and the pieces of its bonus
                logits = self.lm.follow(text, self.spelling.shape[1] + 1)
            else:
                tokens = self.common[level.tokens].clamp(min=0)
                logits = self.lm.feed(text, tokens, *level.placed(text)).logits
            here = logits[..., self.common.clamp(min=0)]
            return here.masked_fill(self.common < 0, -torch.inf)

        drawn = rng if self.sampling.temperature > 0 else None
        grown = grow(seqs, tree, step, self.sampling, drawn)
        self.place = grown.place
        return grown.draft

    def observe(self, seqs: Sequences, tree: Tree, verdict: Verdict, seen: Forward) -> None:
        if not tree.is_chain:
            place = self.place.expand(len(verdict.path), -1)
            text = self.texts.window(seqs.first, len(seqs.tokens))
            self.lm.keep(text, replace(verdict, path=place.gather(1, verdict.path)))


def prepare(plan: Plan) -> Ready:
    """`crossed:NAME`: a draft model whose tokenizer is not the target's."""
    if not plan.argument:
        raise UserError("drafter crossed needs a draft model: crossed:NAME")
    source = plan.source(plan.method, plan.argument)
    config, tokenizer = read_config(source).get_text_config(), read_tokenizer(source)
    all_rows(config, max(tokenizer.get_vocab().values()) + 1, plan.argument)
    tongues = Tongues(plan.tokenizer, tokenizer, plan.vocab)
    if not (tongues.common >= 0).any():
        raise UserError(f"{plan.target} and {source} have no token in common: nothing to guess")

    def make(target: LM) -> Crossed:
        draft = load(source, Path(source).name, plan.dtype, str(target.device))
        return Crossed(draft, tongues, plan.sampling)

    return Ready(make, draws=True, config=config, slots=_SLOTS)
