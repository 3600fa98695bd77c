"""Networks, drafters and prompts so small that every text they can write can be listed.

A toy runs under the real `LM` over the real cache: its logits are a hash of the (position, token)
pairs that the mask lets it see, so a stale slot, a wrong mask or a wrong position is another law.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from specexp.drafters import Drafter
from specexp.drafters.lookup import Lookup
from specexp.drafters.model import DraftModel
from specexp.drafters.ngram import NGram
from specexp.drafters.plain import Plain
from specexp.drafters.suffix import Suffix
from specexp.engine import Engine
from specexp.models.load import of_module
from specexp.models.processors import NoRepeatNgram, Processors, RepetitionPenalty, SequenceBias
from specexp.policy import Fixed
from specexp.rules import Rule
from specexp.sampling import Rng, Sampling, mix
from specexp.sequences import Draft, Sequences
from specexp.tree import Tree

POISON = -7  # what fills every slot that no pass may read
GREATEST = 9  # weights of tokens are integers up to this
Text = tuple[int, ...]
Texts = tuple[Text, ...]  # of a batch, row by row


class Toy:
    """A network whose one attention layer hashes what it sees; laws are ratios of small integers.

    kind: `dense`; `zeros` (about a third of the tokens impossible); `onehot`; `even` and `odd`
    (disjoint supports); `tied` (logits equal in pairs). A `blind` toy ignores its context. It reads
    any number, and says V. Two toys of the same kind and salt are the same network. `dirty`: it
    ever read a poisoned slot.
    """

    known: ClassVar[dict[Any, list[int]]] = {}  # what toys have said after a prefix, by network
    device = torch.device("cpu")

    def __init__(
        self, V: int, kind: str = "dense", salt: int = 0, blind: bool = False,
        dtype: torch.dtype = torch.float64,
    ) -> None:  # fmt: skip
        self.V, self.kind, self.salt, self.blind, self.dtype = V, kind, salt, blind, dtype
        self.dirty = False
        self.config = SimpleNamespace(
            vocab_size=1 << 62, num_hidden_layers=1, num_attention_heads=1, hidden_size=1,
            max_position_embeddings=1 << 20, model_type="toy",
        )  # fmt: skip
        self.config.get_text_config = lambda: self.config

    def eval(self) -> Toy:
        return self

    def requires_grad_(self, _: bool) -> Toy:
        return self

    @property
    def base_model(self) -> Toy:
        return self

    def __call__(
        self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor,
        cache: Any, **_: Any,
    ) -> SimpleNamespace:  # fmt: skip
        layer = cache.update(input_ids[:, None, :, None], position_ids[:, None, :, None], 0)
        tokens, positions = (buffer[:, 0, :, 0] for buffer in layer)
        visible = attention_mask[:, 0] == 0
        self.dirty |= bool((visible & (tokens == POISON)[:, None]).any())
        read = (self.pair(positions, tokens)[:, None] * visible).sum(-1)
        weights = self.weights(read, position_ids, input_ids)
        return SimpleNamespace(logits=weights.log().to(self.dtype))

    @staticmethod
    def pair(positions: Tensor, tokens: Tensor) -> Tensor:
        return mix(mix(positions + 1) + tokens)

    def weights(self, read: Tensor, position: Tensor, token: Tensor) -> Tensor:
        """[..., V] float64 integers, from a sum of pairs and the reader's own pair."""
        context = (
            torch.zeros_like(read) if self.blind else mix(read + 3 * self.pair(position, token))
        )
        v = torch.arange(self.V)
        bits = (mix(mix(context + self.salt)[..., None] + v) >> 8) & 0xFFFFFF
        w = 1 + bits % GREATEST
        favourite = v == (context % self.V)[..., None]
        if self.kind == "zeros":
            w = w * ((bits // GREATEST % 3 > 0) | favourite)
        elif self.kind == "onehot":
            w = w * favourite
        elif self.kind in ("even", "odd"):
            w = w * ((v + context[..., None]) % 2 == (self.kind == "odd"))
        elif self.kind == "tied":
            w = w[..., v // 2]
        return w.double()

    def after(self, prefix: Sequence[int]) -> list[int]:
        """The weights of the token that follows `prefix`, which lies at positions 0, 1, ..."""
        network = type(self), self.V, self.kind, self.salt, self.blind
        if (known := self.known.get((network, tuple(prefix)))) is None:
            tokens, at = torch.tensor(prefix), torch.arange(len(prefix))
            weights = self.weights(self.pair(at, tokens).sum(), at[-1], tokens[-1])
            known = self.known[network, tuple(prefix)] = weights.long().tolist()
        return known


class Scripted(Drafter):
    """Arbitrary draft tokens: a hash of the text and the node; twins among siblings, -1 here and
    there. The hardest drafter for a rule that does not know q."""

    name = "scripted"

    def __init__(self, V: int) -> None:
        self.V = V

    def propose(self, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
        known = torch.arange(seqs.tokens.shape[1]) < seqs.length[:, None]
        text = (Toy.pair(torch.arange(seqs.tokens.shape[1]), seqs.tokens) * known).sum(1)
        drafted = mix(text[:, None] + torch.arange(1, len(tree))) % (self.V + 1) - 1
        return seqs.draft(tree.nodes("cpu"), drafted)


def toy_engine(
    rule: Rule,
    drafter: str = "drawn",
    V: int = 3,
    p: str = "dense",
    q: str = "dense",
    *,
    twin: bool = False,
    blind: bool = False,
    sampling: Sampling = Sampling(temperature=1.0),
    eos: Sequence[int] = (),
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Engine:
    """A toy of kind p as the target, and one of kind q, or the target's twin, as the drafter."""
    drafting = of_module(Toy(V, q, 1 if twin else 2, blind, dtype), "draft")
    made: dict[str, Drafter] = {
        "null": Plain(),
        "ngram": NGram(2),
        "scripted": Scripted(V),
        "drawn": DraftModel(drafting, sampling),
        "chosen": DraftModel(drafting, Sampling()),
        "lookup": Lookup(Suffix(V, 4), DraftModel(drafting, sampling), 1),
    }
    target = of_module(Toy(V, p, 1, blind, dtype), "target")
    return Engine(target, made[drafter], Fixed(Tree.chain(0)), sampling, rule, seed, eos)


def by_hand(text: Text, weights: list[int]) -> list[int]:
    """What the processors of `processed_toy` make of integer weights, by the definitions: a penalty
    of 1/2 squares those of tokens in the text; no three tokens come twice in a row; 0 never follows
    1, 2."""
    squared = [w * w if x in text else w for x, w in enumerate(weights)]
    triples = {*zip(text, text[1:], text[2:], strict=False), (1, 2, 0)}
    return [0 if (*text[-2:], x) in triples else w for x, w in enumerate(squared)]


PROCESSED: list[Texts] = [((5,),), ((0, 2, 1, 0, 2),), ((1, 1, 1),), ((0, 1, 2),)]


def processed_toy(rule: Rule, drafter: str) -> Engine:
    """An engine whose target's logits are processed, with three tokens; `after` says by_hand."""
    made = toy_engine(rule, drafter)
    bias = SequenceBias({(1, 2, 0): -torch.inf}, 3, torch.device("cpu"))
    steps = {"penalty": RepetitionPenalty(0.5), "ngrams": NoRepeatNgram(3), "bias": bias}
    target = made.target.apart(process=Processors(steps))
    after = target.module.after
    target.module.after = lambda text: by_hand(tuple(text), after(text))
    return Engine.of(made, target=target)


def texts(V: int, cases: int, rows: int = 1) -> list[Texts]:
    """Ragged prompts of 1 to 6 tokens; the first, no token of the vocabulary, sets them apart."""
    made = [
        (V + 1 + i, *((i * i + 3 * j + i // 3 + j // 2) % V for j in range(i % 6)))
        for i in range(cases * rows)
    ]
    return [tuple(made[c * rows : (c + 1) * rows]) for c in range(cases)]
