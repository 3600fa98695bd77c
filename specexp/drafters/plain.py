"""Draft nothing: every round is one plain decoding step, the baseline of every comparison."""

from __future__ import annotations

from specexp.drafters import Drafter, Prepared, Request
from specexp.sampling import Rng
from specexp.sequences import Draft, Sequences
from specexp.tree import Tree


class Plain(Drafter):
    name = "plain"
    context = 0

    def propose(self, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
        return seqs.draft(Tree.chain(0).nodes(seqs.tokens.device))


def prepare(request: Request) -> Prepared:
    request.nothing()
    return Prepared(lambda target: Plain())
