"""Draft by Jacobi iteration: every round, the target refines a line of draft tokens (lookahead).

(Fu et al. 2024, Lookahead decoding, arXiv 2402.02057.) The deepest branch of every draft holds the
line, one draft token for each of the next positions. Verifying it gives the target's next token
after each of them, which is the refined line. The n-grams that occur on refined lines are kept in a
pool, keyed by their first token. The root's latest n-gram replaces the head of the line; other
n-grams fill the other branches. Unlike in the paper, the line is part of the draft rather than an
extra window beside it, so it costs no extra tokens. Every row has its own pool.
"""

from functools import cache

import torch
from torch import Tensor

from specexp.drafters import Drafter, Prepared, Request
from specexp.drafters.recycle import Table, in_vocabulary
from specexp.errors import UserError
from specexp.models.lm import LM, Forward
from specexp.sampling import Rng, likeliest
from specexp.sequences import Draft, Sequences, Verdict, columns
from specexp.tree import Tree

POOL = 8  # n-grams kept per first token, the latest first


class Lookahead(Drafter):
    name = "lookahead"

    def __init__(self, target: LM, n: int, depth: int) -> None:
        self.vocab, self.device, self.n = target.vocab, target.device, n
        self.depth = max(depth, n - 1)  # of the line

    def allocate(self, B: int, S: int) -> None:
        self.pool = Table(B, self.vocab, (POOL, self.n - 1), self.device)
        self.lines = torch.zeros(B, self.depth, dtype=torch.int64, device=self.device)

    @property
    def state(self) -> tuple[Tensor, ...]:
        return (*self.pool.state, self.lines)

    def prefill(self, seqs: Sequences, hidden: Tensor | None) -> None:
        """Start the line as copies of the root token, and the pool with the prompt's n-grams."""
        self.pool.clear(seqs.rows)
        self.lines[seqs.rows] = seqs.root.clamp(max=self.vocab - 1)
        place = torch.arange(seqs.tokens.shape[1], device=self.device)
        complete = place + self.n <= seqs.length[:, None]
        tokens = in_vocabulary(seqs.tokens, self.vocab)
        grams = torch.stack([tokens.roll(-i, 1) for i in range(1, self.n)], -1)
        self._learn(seqs, torch.where(complete, seqs.tokens, -1), grams)

    def propose(self, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
        nodes = tree.nodes(seqs.tokens.device)
        on_line, branch = _deepest_branch(tree, seqs.tokens.device)
        old = self.lines[seqs.rows]
        tokens = [seqs.root]
        grams = self._grams(seqs, tokens[0])
        latest, none = grams[:, 0], grams[:, 0, :0]
        head = torch.where(latest >= 0, latest, old[:, : self.n - 1])
        beyond = [torch.full_like(tokens[0], -1)] * (tree.depth - self.depth)
        line = [*head.split(1, 1), *old.split(1, 1)[self.n - 1 :], *beyond]
        tails = [none]  # per node, the rest of its n-gram
        for parent in range(len(tree)):
            tail = tails[parent]
            used = int(parent == 0)  # the root's latest n-gram is on the line already
            for _ in range(tree.parents.count(parent)):
                if len(tokens) in on_line:
                    rest = line[tree.depths[parent]]
                elif tail.shape[1]:
                    rest, tail = tail, none
                else:
                    grams = grams if used else self._grams(seqs, tokens[parent])
                    rest = grams[:, min(used, POOL - 1)]
                    used += 1
                tokens.append(rest[:, :1])
                tails.append(rest[:, 1:])
        return Draft(columns(*tokens), nodes, seqs, memo=branch)

    def _grams(self, seqs: Sequences, token: Tensor) -> Tensor:
        """[B, POOL, n - 1]: the pooled continuations of token [B, 1], the latest first, or -1."""
        return self.pool.read(seqs.rows, token)[:, 0]

    def observe(self, seqs: Sequences, draft: Draft, verdict: Verdict, seen: Forward) -> None:
        """Refine the line and extend the pool from the target's tokens along the deepest branch."""
        predicted = likeliest(seen.logits)
        branch = draft.memo
        predicted = predicted[:, branch]  # [B, d + 1], after the root and each draft token
        read = draft.tokens[:, branch]
        verified = (read >= 0).cumprod(1)  # within the row's budget
        last = verified.sum(1, keepdim=True) - 1
        following = verdict.n[:, None] + 1 + torch.arange(self.depth, device=predicted.device)
        line = predicted.gather(1, torch.minimum(following, last).clamp(min=0))
        self.lines[seqs.rows] = torch.where(last < 0, self.lines[seqs.rows], line)
        d = predicted.shape[1] - 1
        if d >= self.n - 1:
            keys = torch.where(verified[:, self.n - 1 :] > 0, read[:, : d - self.n + 2], -1)
            m = keys.shape[1]
            grams = torch.stack([predicted[:, i : i + m] for i in range(self.n - 1)], -1)
            self._learn(seqs, keys, grams)

    def _learn(self, seqs: Sequences, keys: Tensor, grams: Tensor) -> None:
        """Put grams [B, m, n - 1] first in the pools of keys [B, m]; the last of equal keys
        counts."""
        old = self.pool.read(seqs.rows, keys)  # [B, m, POOL, n - 1]
        news = grams[:, :, None]
        pooled = (old == news).all(-1).any(-1)[..., None, None]
        shifted = torch.cat([news, old[:, :, :-1]], 2)
        self.pool.write(seqs.rows, keys, torch.where(pooled, old, shifted))


@cache  # never freed: recorded graphs read these tensors
def _deepest_branch(tree: Tree, device: torch.device) -> tuple[frozenset[int], Tensor]:
    """The path from the root to the first of the deepest nodes: as a set, and in order."""
    path = [tree.levels[-1].start]
    while path[-1]:
        path.append(tree.parents[path[-1]])
    return frozenset(path), torch.tensor(path[::-1], device=device)


def prepare(request: Request) -> Prepared:
    """`lookahead:3`: pool n-grams of three tokens, the first included."""
    n = request.whole(default=3, at_least=2)
    if request.tree.depth and n > request.tree.depth + 1:
        raise UserError(
            f"drafter lookahead:{n} needs a draft length of {n - 1} or more: use gamma {n - 1} or "
            f"more, or lookahead:{request.tree.depth + 1}"
        )
    return Prepared(lambda target: Lookahead(target, n, request.tree.depth))
