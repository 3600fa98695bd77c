"""Draft with a smaller LM that has a different tokenizer, using the tokens that both share.

(Token-level intersection: Timor et al. 2025, Accelerating LLM inference with lossless speculative
decoding algorithms for heterogeneous vocabularies, arXiv 2502.05202.) The draft model keeps its own
copy of the sequence, in its own tokens. A shared token is one token there too; any other is
re-tokenized into up to `_LONGEST` pieces. Draft tokens are sampled from the draft model's
distribution restricted to the shared tokens. The rule is given this restricted q, so every exact
rule stays exact.
"""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specexp.drafters import Drafter, Prepared, Request
from specexp.drafters.model import check_vocabulary, keep_path
from specexp.errors import UserError, warn_once
from specexp.growth import Level, grow
from specexp.models.lm import LM, Forward
from specexp.models.load import load, read_config, read_tokenizer, text_of, tokens_of
from specexp.sampling import Rng, Sampling
from specexp.sequences import Draft, Sequences, Verdict
from specexp.tree import Tree

_LONGEST = 8  # pieces kept of one re-tokenized token
_SLOTS = 3  # slots of the draft's cache per slot of the target's


class TokenMap:
    """The map from the target's tokens to the draft's.

    pieces [V, M]: the draft tokens of each target token, padded with -1. shared [V]: the draft
    token with the same string as the target token, or -1.
    """

    def __init__(self, target: Any, draft: Any, vocab: int) -> None:
        self.target, self.draft = target, draft
        theirs = {_plain(token): i for token, i in draft.get_vocab().items()}
        tokens = target.convert_ids_to_tokens(range(vocab))
        shared = [-1 if t is None else theirs.get(_plain(t), -1) for t in tokens]
        pieces = [
            [same] if same >= 0 else self.tokenized([i])[:_LONGEST] for i, same in enumerate(shared)
        ]
        M = max(map(len, pieces))
        self.pieces = torch.tensor([s + [-1] * (M - len(s)) for s in pieces])
        self.shared = torch.tensor(shared)

    def tokenized(self, ids: list[int]) -> list[int]:
        """These target tokens as draft tokens; never empty."""
        return self._encode(text_of(self.target, ids), add_special_tokens=False)

    def tokenized_prompt(self, ids: list[int]) -> list[int]:
        """A whole prompt as draft tokens, with the draft's own special tokens."""
        return self._encode(text_of(self.target, ids, skip_special_tokens=True))

    def _encode(self, text: str, **how: bool) -> list[int]:
        return tokens_of(self.draft, text, **how) or [self.draft.eos_token_id or 0]


mapped = lru_cache(maxsize=8)(TokenMap)  # it takes seconds


def _plain(token: str) -> str:
    """The token with SentencePiece's mark for a leading space replaced by byte-level BPE's."""
    return token.replace("\u2581", "\u0120")


class Crossed(Drafter):
    """Drafts shared tokens. `texts`: the sequences in the draft model's tokens. covered [B]: how
    many target tokens of each row they contain. `most`: the most tokens that a row can gain between
    two drafts."""

    draws = reads = True

    def __init__(self, lm: LM, token_map: TokenMap, sampling: Sampling) -> None:
        self.lm, self.token_map, self.sampling = lm, token_map, sampling
        self.name = f"{lm.name} (crossed)"
        self.models: tuple[LM, ...] = (lm,)
        self.context = lm.context
        self.pieces = token_map.pieces.to(lm.device)
        self.shared = token_map.shared.to(lm.device)
        lm.refed = self.pieces.shape[1]

    def give_way(self) -> None:
        raise UserError(f"{self.name} cannot draft behind a lookup: its text is not the target's")

    def allocate(self, B: int, S: int) -> None:
        """The draft model's sequences are cut at 2 * S tokens; beyond, drafts are poor."""
        self.longest, self.most, self.shaped_by = 2 * S, 1, (1,)
        self.texts = Sequences.empty(B, _SLOTS * S, device=self.lm.device)
        self.covered = torch.ones(B, dtype=torch.int64, device=self.lm.device)
        self.state = (self.texts.tokens, self.texts.length, self.covered)
        self.lm.allocate(B, _SLOTS * S)

    def prefill(self, seqs: Sequences, hidden: Tensor | None) -> None:
        prompts = zip(seqs.tokens.tolist(), seqs.length.tolist(), strict=True)
        for row, (tokens, length) in enumerate(prompts):
            text = self.token_map.tokenized_prompt(tokens[:length])[: self.longest]
            self.texts.write(seqs.first + row, text, limit=0, stream=0)
        self.covered[seqs.rows] = seqs.length

    def catch_up(self, seqs: Sequences, missed: int) -> None:
        text, covered = self._extend(seqs), self.covered[seqs.rows]
        # where a prompt is prefilled in parts, the same share of the draft's sequence
        length = (text.length * seqs.length // covered).clamp(min=1)
        read = replace(text, length=length, budget=seqs.budget)
        pieces = (missed + 1) * self.pieces.shape[1]
        self.lm.refill(read, min(pieces, int(read.length.max())))

    def _extend(self, seqs: Sequences) -> Sequences:
        """Re-tokenize what was committed since the last call, at most `most` tokens per row."""
        text, covered = self.texts.window(seqs.first, len(seqs.tokens)), self.covered[seqs.rows]
        at = covered[:, None] + torch.arange(self.most, device=covered.device)
        new = seqs.tokens.gather(1, at.clamp(max=seqs.tokens.shape[1] - 1))
        pieces = torch.where((at < seqs.length[:, None])[..., None], self.pieces[new], -1)
        pieces = pieces.flatten(1)
        real = pieces >= 0
        end = text.tokens.shape[1] - 1  # never read: padding and overflow are written here
        slot = torch.where(real, text.length[:, None] + real.cumsum(1) - 1, end)
        text.tokens.scatter_(1, slot.clamp(max=end), pieces.clamp(min=0))
        text.length += real.sum(1)
        text.length.clamp_(max=self.longest)
        # the maximum, as `prefill` covers the whole of a prompt that `catch_up` gets in parts
        covered.copy_(torch.maximum(covered, seqs.length))
        return text

    def propose(self, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
        text = replace(self._extend(seqs), budget=seqs.budget)
        self.most = max(self.most, tree.depth + 1)
        self.shaped_by = (self.most,)

        def step(level: Level) -> Tensor:
            if level.depth == 0:
                # the last draft's deepest token, and the pieces of the bonus token
                logits = self.lm.follow(text, self.pieces.shape[1] + 1)
            else:
                shared = self.shared[level.tokens].clamp(min=0)
                tokens = torch.where(level.tokens < 0, -1, shared)
                logits = self.lm.feed(text, tokens, *level.placed(text)).logits
            here = logits[..., self.shared.clamp(min=0)]
            return here.masked_fill(self.shared < 0, -torch.inf)

        return grow(seqs, tree, step, self.sampling, rng)

    def observe(self, seqs: Sequences, draft: Draft, verdict: Verdict, seen: Forward) -> None:
        keep_path(self.lm, self.texts.window(seqs.first, len(seqs.tokens)), draft, verdict)


def prepare(request: Request) -> Prepared:
    """`crossed:NAME`: a draft model with a different tokenizer from the target's."""
    if not request.argument:
        raise UserError("drafter crossed needs a draft model: crossed:NAME")
    source = request.source(request.method, request.argument)
    config, tokenizer = read_config(source).get_text_config(), read_tokenizer(source)
    check_vocabulary(config, max(tokenizer.get_vocab().values()) + 1, request.argument)
    token_map = mapped(request.tokenizer, tokenizer, request.vocab)
    both = int((token_map.shared >= 0).sum())
    if not both:
        raise UserError(f"{request.target} and {source} share no token: choose another draft")

    def make(target: LM) -> Crossed:
        if both < request.vocab:
            warn_once("%s shares %d of its %d tokens with %s: only these are drafted",
                      request.target, both, request.vocab, request.argument)  # fmt: skip
        draft = load(source, Path(source).name, request.dtype, str(target.device))
        return Crossed(draft, token_map, request.sampling)

    return Prepared(make, draws=True, config=config, slots=_SLOTS)
