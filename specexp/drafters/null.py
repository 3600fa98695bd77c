"""No guesses: every round is one step of plain decoding. The baseline of every comparison."""

from __future__ import annotations

from torch import Tensor

from specexp.drafters import Plan, Ready
from specexp.lm import LM, Forward
from specexp.sampling import Rng
from specexp.sequences import Draft, Sequences, Verdict
from specexp.tree import Tree


class Null:
    name = "null"
    taps: tuple[int, ...] = ()
    models: tuple[LM, ...] = ()
    context = 0

    def prefill(self, seqs: Sequences, hidden: Tensor | None) -> None:
        pass

    def propose(self, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
        return seqs.draft(Tree.chain(0).nodes(seqs.tokens.device))

    def observe(self, seqs: Sequences, tree: Tree, verdict: Verdict, seen: Forward) -> None:
        pass


def prepare(plan: Plan) -> Ready:
    plan.nothing()
    return Ready(lambda target: Null())
