"""Draft nothing: every round is one plain decoding step, the baseline of every comparison."""

from specexp.drafters import Drafter, Prepared, Request
from specexp.errors import UserError
from specexp.sampling import Rng
from specexp.sequences import Draft, Sequences
from specexp.tree import Tree


class Plain(Drafter):
    name = "plain"
    context = 0

    def propose(self, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
        return seqs.draft(Tree.chain(0).nodes(seqs.device))


def prepare(request: Request) -> Prepared:
    if request.argument:
        raise UserError(f"drafter plain takes no argument: use plain without :{request.argument}")
    return Prepared(lambda target: Plain())
