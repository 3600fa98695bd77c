"""Guess with a smaller causal LM (Leviathan et al. 2022; Chen et al. 2023).

The first pass of a round always feeds the last two committed tokens and the deepest level is never
fed: whether or not the whole last draft was accepted, nothing is missing from the cache. Text that
was written while nobody asked for guesses is fed first (`catch_up`), and so is the prompt.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from specexp.drafters import Drafter, Plan, Ready
from specexp.errors import UserError
from specexp.growth import Level, grow
from specexp.lm import LM, Forward, load, read_config, read_tokenizer
from specexp.sampling import Rng, Sampling
from specexp.sequences import Draft, Sequences, Verdict
from specexp.tree import Tree


class DraftModel(Drafter):
    """Children are drawn from the draft's law under `sampling`, or, at temperature 0 or when
    `chosen`, are its most likely tokens."""

    reads = True

    def __init__(self, lm: LM, sampling: Sampling, chosen: bool = False) -> None:
        self.lm, self.sampling = lm, sampling
        self.chosen = chosen or sampling.temperature == 0
        self.name = lm.name
        self.models: tuple[LM, ...] = (lm,)
        self.context = lm.context

    def allocate(self, B: int, S: int) -> None:
        self.lm.allocate(B, S)

    def catch_up(self, seqs: Sequences, missed: int) -> None:
        self.lm.refill(seqs, missed + 1)  # and the deepest guess of the draft before

    def propose(self, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
        def step(level: Level) -> Tensor:
            if level.depth == 0:
                return self.lm.follow(seqs, 2)
            return self.lm.feed(seqs, level.tokens, *level.placed(seqs)).logits

        grown = grow(seqs, tree, step, self.sampling, None if self.chosen else rng)
        self.place = grown.place
        return grown.draft

    def observe(self, seqs: Sequences, tree: Tree, verdict: Verdict, seen: Forward) -> None:
        if not tree.is_chain:
            place = self.place.expand(len(verdict.path), -1)
            self.lm.keep(seqs, replace(verdict, path=place.gather(1, verdict.path)))


def prepare(plan: Plan) -> Ready:
    """`model:NAME`: a zoo name, a folder or a hub id, `+int8` behind it or not; without a name, the
    zoo's draft."""
    source = plan.source(plan.method, plan.argument)
    named = plan.argument or Path(source).name
    config = read_config(source).get_text_config()
    same_tokens(plan.tokenizer, plan.target, read_tokenizer(source), named)
    all_rows(config, plan.vocab, named)

    def make(target: LM) -> DraftModel:
        name = Path(source).name
        if source == plan.source(plan.method, plan.target):
            draft = LM(target.module, f"{name} (as its own draft)", target.vocab)
        else:
            draft = load(source, name, plan.dtype, str(target.device), target.vocab)
        return DraftModel(draft, plan.sampling)

    return Ready(make, draws=True, config=config)


def all_rows(config: Any, V: int, name: str) -> None:
    """Refuse a model whose head has no row for some of its tokenizer's V tokens."""
    if config.vocab_size < V:
        raise UserError(
            f"{name} has {config.vocab_size} logits for a tokenizer of {V} tokens; they do not "
            "match: choose another model"
        )


@lru_cache(maxsize=64)
def same_tokens(tokenizer: Any, target: str, other: Any, draft: str) -> None:
    """Refuse a draft whose tokenizer maps any token differently."""
    ours, theirs = tokenizer.get_vocab(), other.get_vocab()
    if ours != theirs:
        odd = sorted(t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t))
        shown = ", ".join(f"{t!r}: {ours.get(t)} and {theirs.get(t)}" for t in odd[:3])
        raise UserError(
            f"{target} and {draft} have different tokenizers ({len(odd)} tokens differ: {shown}); "
            f"pick a draft of the same family, or translate with drafter crossed:{draft}"
        )
