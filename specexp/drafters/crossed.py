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

from specexp.drafters import Plan, Ready
from specexp.errors import UserError
from specexp.growth import Level, grow
from specexp.lm import LM, Forward, load, read_config, read_tokenizer
from specexp.sampling import Rng, Sampling
from specexp.sequences import Draft, Sequences, Verdict
from specexp.tree import Tree

_LONGEST = 8  # pieces of one respelt token; what is longer is cut


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
        """A text of target tokens as the draft spells it; never empty."""
        text = self.target.decode(ids)
        found = list(self.draft(text, add_special_tokens=False).input_ids)
        return found or [self.draft.eos_token_id or 0]


def _plain(token: str) -> str:
    """Byte-level and sentence-piece vocabularies write a leading space differently."""
    return token.replace("\u2581", "\u0120")


class Crossed:
    taps: tuple[int, ...] = ()

    def __init__(self, lm: LM, tongues: Tongues, sampling: Sampling) -> None:
        self.lm, self.tongues, self.sampling = lm, tongues, sampling
        self.name = f"{lm.name} (crossed)"
        self.models: tuple[LM, ...] = (lm,)
        self.context = lm.context
        self.spelling = tongues.spelling.to(lm.device)
        self.common = tongues.common.to(lm.device)

    def prefill(self, seqs: Sequences, hidden: Tensor | None) -> None:
        lengths = seqs.length.tolist()
        rows = [row[:n] for row, n in zip(seqs.tokens.tolist(), lengths, strict=True)]
        new = seqs.tokens.shape[1] - min(lengths)
        self.text = Sequences.of(
            [self.tongues.translated(row) for row in rows],
            new * self.spelling.shape[1],
            slack=new + 1,
            device=seqs.tokens.device,
        )
        self.told, self.most = seqs.length.clone(), 1
        self.lm.prefill(self.text)

    def _listen(self, seqs: Sequences) -> None:
        """Respell what was committed since the last draft: at most `most` tokens a row."""
        at = self.told[:, None] + torch.arange(self.most, device=self.told.device)
        new = seqs.tokens.gather(1, at.clamp(max=seqs.tokens.shape[1] - 1))
        pieces = torch.where((at < seqs.length[:, None])[..., None], self.spelling[new], -1)
        pieces = pieces.flatten(1)
        said = pieces >= 0
        end = self.text.tokens.shape[1] - 1  # a slot that no text reaches takes the padding
        slot = torch.where(said, self.text.length[:, None] + said.cumsum(1) - 1, end)
        self.text.tokens.scatter_(1, slot, pieces.clamp(min=0))
        self.text.length += said.sum(1)
        self.told = seqs.length.clone()

    def propose(self, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
        self._listen(seqs)
        self.most = tree.depth + 1
        root, S = self.text.length[:, None] - 1, self.text.tokens.shape[1]

        def step(level: Level) -> Tensor:
            if level.depth == 0:
                logits = self._catch_up()
            else:
                tokens = self.common[level.tokens].clamp(min=0)
                logits = self.lm.feed(tokens, *level.placed(root, S)).logits
            here = logits[..., self.common.clamp(min=0)]
            return here.masked_fill(self.common < 0, -torch.inf)

        drawn = rng if self.sampling.temperature > 0 else None
        grown = grow(seqs, tree, step, self.sampling, drawn)
        self.place = grown.place
        return grown.draft

    def _catch_up(self) -> Tensor:
        """Feed what the cache may lack: the deepest guess and the pieces of the bonus token."""
        window = self.spelling.shape[1] + 1
        back = torch.arange(window, device=self.text.length.device) - window
        slots = (self.text.length[:, None] + back).clamp(min=0)
        visible = torch.arange(self.text.tokens.shape[1], device=slots.device) <= slots[:, :, None]
        fed = self.lm.feed(self.text.tokens.gather(1, slots), slots, slots, visible)
        return fed.logits[:, -1:]

    def observe(self, seqs: Sequences, tree: Tree, verdict: Verdict, seen: Forward) -> None:
        if not tree.is_chain:
            place = self.place.expand(len(verdict.path), -1)
            self.lm.keep(self.text, replace(verdict, path=place.gather(1, verdict.path)))


def prepare(plan: Plan) -> Ready:
    """`crossed:NAME`: a draft model whose tokenizer is not the target's."""
    if not plan.argument:
        raise UserError("drafter crossed needs a draft model: crossed:NAME")
    source = plan.source(plan.method, plan.argument)
    read_config(source)
    tongues = Tongues(plan.tokenizer, read_tokenizer(source), plan.vocab)
    if not (tongues.common >= 0).any():
        raise UserError(f"{plan.target} and {source} have no token in common: nothing to guess")

    def make(target: LM) -> Crossed:
        draft = load(source, Path(source).name, plan.dtype, str(target.device))
        return Crossed(draft, tongues, plan.sampling)

    return Ready(make, draws=True)
