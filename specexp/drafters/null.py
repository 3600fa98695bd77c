"""Guess nothing: every round is one plain decoding step, the baseline of every comparison."""

from __future__ import annotations

from specexp.drafters import Drafter, Plan, Ready
from specexp.sampling import Rng
from specexp.sequences import Draft, Sequences
from specexp.tree import Tree


class Null(Drafter):
    name = "null"
    context = 0

    def propose(self, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
        return seqs.draft(Tree.chain(0).nodes(seqs.tokens.device))


def prepare(plan: Plan) -> Ready:
    plan.nothing()
    return Ready(lambda target: Null())
