"""Ways to guess. One file each; a drafter knows nothing of rules, and any rule keeps it exact."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from specexp.lm import LM, Forward
from specexp.sampling import Rng
from specexp.sequences import Draft, Sequences, Verdict
from specexp.tree import Tree


class Drafter(Protocol):
    """What the engine asks of a drafter.

    `taps`: hidden states of the target it wants to see. `models`: the models it runs. `context`:
    the longest text it can draft for; past it the engine drafts less.
    """

    name: str
    taps: tuple[int, ...]
    models: tuple[LM, ...]
    context: int

    def prefill(self, seqs: Sequences, hidden: Tensor | None) -> None:
        """A new batch begins; hidden [B, P, taps*E] are the target's states over the prompts."""
        ...

    def propose(self, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
        """Guess the nodes of `tree`."""
        ...

    def observe(self, seqs: Sequences, tree: Tree, verdict: Verdict, seen: Forward) -> None:
        """The verdict on the last draft, before it is committed."""
        ...
