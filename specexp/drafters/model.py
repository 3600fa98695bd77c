"""Draft with a smaller causal LM that has the target's tokenizer.

(Leviathan et al. 2022; Chen et al. 2023.) The deepest level of a draft is never fed, so after a
fully accepted draft its last token is missing from the draft model's cache. Therefore the first
pass of a round always feeds the last two committed tokens; if other drafts may be accepted in place
of its own, as many as the deepest draft so far. `catch_up` feeds the prompt and tokens committed
without a draft.

A draft model whose config names a `pard_token` was taught to draft in parallel (An et al. 2025,
PARD, arXiv 2504.18583): one pass, over as many of these tokens as the draft is deep.
"""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specexp.drafters import Drafter, Prepared, Request
from specexp.errors import UserError
from specexp.growth import Level, Step, at_once, grow
from specexp.models.lm import LM, Forward
from specexp.models.load import load, of_module, read_config, read_tokenizer
from specexp.sampling import Rng, Sampling
from specexp.sequences import Draft, Sequences, Verdict
from specexp.tree import Tree


class DraftModel(Drafter):
    """Samples children from the draft model's distribution under `sampling`, which need not be the
    target's; at temperature 0 takes the most likely tokens."""

    reads = True

    def __init__(self, lm: LM, sampling: Sampling) -> None:
        self.lm, self.sampling, self.draws = lm, sampling, sampling.temperature > 0
        self.name = lm.name
        self.models: tuple[LM, ...] = (lm,)
        lm.refed = 1  # `propose` feeds the token before the root again
        self.context = lm.context
        self.again, self.gives_way = 1, False  # how many tokens before the root it feeds again

    def give_way(self) -> None:
        insist_on_rereading(not self.lm.keeps_last_slots_only, self.lm.name)
        self.gives_way = True

    def catch_up(self, seqs: Sequences, missed: int) -> None:
        self.lm.refill(seqs, missed + self.again)

    def propose(self, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
        if self.gives_way:  # what the deepest draft so far can have put in the place of tokens
            self.again = max(self.again, tree.depth)
            self.shaped_by = (self.again,)
        return grow(seqs, tree, self._step(seqs, tree), self.sampling, rng)

    def _step(self, seqs: Sequences, tree: Tree) -> Step:
        rows = seqs
        if seqs.budget is not None and self.lm.net.parts:
            # a state cannot read a token twice, so rows that sit out write padding after it
            rows = replace(seqs, length=seqs.length + (seqs.budget < 1))

        def step(level: Level) -> Tensor:
            if level.depth == 0:
                return self.lm.follow(rows, 1 + self.again)
            return self.lm.feed(seqs, level.tokens, *level.placed(seqs)).logits

        return step

    def observe(self, seqs: Sequences, draft: Draft, verdict: Verdict, seen: Forward) -> None:
        if not self.gives_way:
            keep_path(self.lm, seqs, draft, verdict)


def keep_path(lm: LM, seqs: Sequences, draft: Draft, verdict: Verdict) -> None:
    """Move the accepted path of a tree that `grow` made to the front of its model's cache."""
    if not draft.nodes.is_chain:
        places = torch.take_along_dim(draft.memo, verdict.path, 1)
        lm.keep(seqs, draft, replace(verdict, path=places))


class ParallelModel(DraftModel):
    """Drafts all levels in one pass: a mask stands for each token that is not known yet, and the
    logits after the k-th of them are those of the draft's level k + 1, whatever was drafted before
    it. Masks are left in the cache, so a round first feeds the last committed tokens again: as many
    as the deepest draft so far can have put masks in the place of."""

    def __init__(self, lm: LM, sampling: Sampling, mask: int) -> None:
        """mask: the token. Raises UserError if there is no such token, or for a model that cannot
        read a token twice."""
        if not 0 <= mask < lm.config.vocab_size:
            raise UserError(
                f"{lm.name} cannot draft in parallel: its pard_token is {mask}, and its vocabulary "
                f"has {lm.config.vocab_size} tokens"
            )
        super().__init__(lm, sampling)
        self.give_way()
        self.mask = mask

    def _step(self, seqs: Sequences, tree: Tree) -> Step:
        def masked() -> Tensor:
            from_root = torch.arange(-self.again, tree.depth, device=self.lm.device)[None]
            slots = seqs.places(from_root)
            tokens = torch.where(from_root > 0, self.mask, seqs.read(slots))
            tokens = seqs.drafting(tokens, 0)
            return self.lm.feed(seqs, tokens, slots, slots, None, last=tree.depth).logits

        return at_once(masked)


def of_model(lm: LM, sampling: Sampling) -> DraftModel:
    """The drafter that a draft model is, by its config."""
    mask = getattr(lm.config, "pard_token", None)
    return DraftModel(lm, sampling) if mask is None else ParallelModel(lm, sampling, int(mask))


def prepare(request: Request) -> Prepared:
    """`model:NAME`: a zoo name, folder or hub id, optionally followed by `+int8`; without a name,
    the zoo's draft for the target."""
    source = request.source(request.method, request.argument)
    named = request.argument or Path(source).name
    config = read_config(source).get_text_config()
    check_tokenizers(request.tokenizer, request.target, read_tokenizer(source), named)
    check_vocabulary(config, request.vocab, named)

    def make(target: LM) -> DraftModel:
        name = Path(source).name
        if source == request.folder:
            draft = target.apart(f"{name} (as its own draft)")
        else:
            draft = load(source, name, request.dtype, str(target.device), target.vocab)
        return of_model(draft, request.sampling)

    return Prepared(make, draws=True, config=config)


def in_memory(request: Request) -> Prepared:
    """As `prepare`, for a transformers model in memory."""
    module, name = request.own, request.method
    config = causal_config(module, f"draft model {name}")
    check_vocabulary(config, request.vocab, name)

    def make(target: LM) -> DraftModel:
        draft = of_module(module, name, target.vocab)
        check_device_and_dtype(draft, target)
        return of_model(draft, request.sampling)

    return Prepared(make, draws=True, config=config)


def causal_config(module: Any, about: str) -> Any:
    """The config of a module in memory. Raises UserError unless it is a transformers causal LM."""
    if not hasattr(getattr(module, "config", None), "get_text_config") or not hasattr(
        module, "get_output_embeddings"
    ):
        raise UserError(
            f"{about} is of type {type(module).__name__}: give a transformers causal LM, such as "
            "AutoModelForCausalLM.from_pretrained(...), or a name as text"
        )
    return module.config.get_text_config()


def check_device_and_dtype(model: LM, target: LM) -> None:
    """Raise UserError if a draft model has another device or dtype than the target."""
    if model.device != target.device:
        raise UserError(
            f"draft model {model.name} is on {model.device} and target {target.name} on "
            f"{target.device}: move one with .to({str(target.device)!r})"
        )
    if model.dtype != target.dtype:
        raise UserError(
            f"draft model {model.name} is in {str(model.dtype)[6:]} and target {target.name} in "
            f"{str(target.dtype)[6:]}: convert one with .to({target.dtype})"
        )


def insist_on_rereading(able: bool, name: str) -> None:
    """Raise UserError for a model that cannot read a token twice and would have to."""
    if not able:
        raise UserError(
            f"{name} cannot draft in parallel or behind a lookup: it has states or windows"
        )


def check_vocabulary(config: Any, V: int, name: str) -> None:
    """Raise UserError if the model has fewer logits than its tokenizer has tokens, V."""
    if config.vocab_size < V:
        raise UserError(
            f"{name} has {config.vocab_size} logits for a tokenizer of {V} tokens: give it the "
            "tokenizer that it was trained with, or resize its embeddings (resize_token_embeddings)"
        )


@lru_cache(maxsize=64)
def check_tokenizers(tokenizer: Any, target: str, other: Any, draft: str) -> None:
    """Raise UserError if the two tokenizers give any token different ids."""
    ours, theirs = tokenizer.get_vocab(), other.get_vocab()
    if ours != theirs:
        odd = sorted(t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t))
        shown = ", ".join(f"{t!r}: {ours.get(t)} and {theirs.get(t)}" for t in odd[:3])
        raise UserError(
            f"{target} and {draft} have different tokenizers ({len(odd)} tokens differ: {shown}); "
            f"pick a draft of the same family, or translate with drafter crossed:{draft}"
        )
