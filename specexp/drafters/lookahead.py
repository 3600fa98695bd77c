"""Guess by letting the target correct a whole line of guesses at once, over and over.

(Jacobi iteration with an n-gram pool: Fu et al. 2024, Lookahead decoding, arXiv 2402.02057.) The
deepest branch of every draft carries a line of guesses for the next places; verifying it yields the
target's own next token after each, which is the next, better line. What lines said in passing, n
tokens in a row, goes into a pool by its first token; the root's latest n-gram is tried at the head
of the line, others on the other branches. Unlike the paper's, the line is not an extra window
beside the draft but part of it, and costs no more than it; the pool is shared by the batch.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from specexp.drafters import Plan, Ready
from specexp.drafters.recycle import last_writer, row_of
from specexp.errors import UserError
from specexp.lm import LM, Forward
from specexp.sampling import Rng
from specexp.sequences import Draft, Sequences, Verdict
from specexp.tree import Tree

POOL = 8  # n-grams kept for each first token, the latest first


class Lookahead:
    name = "lookahead"
    taps: tuple[int, ...] = ()
    models: tuple[LM, ...] = ()
    context = 1 << 30

    def __init__(self, vocab: int, n: int, depth: int) -> None:
        self.vocab, self.n, self.depth = vocab, n, depth

    def prefill(self, seqs: Sequences, hidden: Tensor | None) -> None:
        """The line begins with the root's token over and over, the pool with the prompts."""
        device = seqs.tokens.device
        shape = (self.vocab + 1, POOL, self.n - 1)
        self.pool = torch.full(shape, -1, device=device)  # the last row: no token
        self.line = seqs.root.expand(-1, self.depth).clamp(max=self.vocab - 1)
        place = torch.arange(seqs.tokens.shape[1], device=device)
        known = place + self.n <= seqs.length[:, None]
        grams = torch.stack([seqs.tokens.roll(-i, 1) for i in range(1, self.n)], -1)
        self._learn(torch.where(known, seqs.tokens, -1), grams)

    def propose(self, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
        nodes = tree.nodes(seqs.tokens.device)
        on_line, self.branch = _deepest_branch(tree, seqs.tokens.device)
        latest = self._grams(seqs.root)[:, 0]
        head = torch.where(latest[:, -1:] >= 0, latest, self.line[:, : self.n - 1])
        line = torch.cat([head, self.line[:, self.n - 1 :]], 1)
        tokens = [seqs.root]
        tails: list[Tensor] = [latest[:, :0]]  # of a node: what is left of its n-gram
        for parent in range(len(tree)):
            found, tail = self._grams(tokens[parent]), tails[parent]
            used = int(parent == 0)  # the root's latest is at the head of the line
            for _ in range(tree.parents.count(parent)):
                if len(tokens) in on_line:
                    rest = line[:, tree.depths[parent] :]
                elif tail.shape[1]:
                    rest = tail
                    tail = tail[:, :0]
                else:
                    rest = found[:, min(used, POOL - 1)]
                    used += 1
                tokens.append(rest[:, :1])
                tails.append(rest[:, 1:] if len(tokens) - 1 not in on_line else rest[:, :0])
        self.fed = torch.cat(tokens, 1)
        return seqs.draft(nodes, self.fed[:, 1:])

    def _grams(self, token: Tensor) -> Tensor:
        """[B, POOL, n - 1]: what followed token [B, 1], the latest first; -1 where nothing did."""
        return self.pool[row_of(token, self.vocab)[:, 0]]

    def observe(self, seqs: Sequences, tree: Tree, verdict: Verdict, seen: Forward) -> None:
        """The target's answers along the deepest branch: they refine the line and feed the pool."""
        said = seen.logits[:, self.branch].argmax(-1)  # [B, d + 1]: after the root, and each guess
        read = self.fed[:, self.branch]
        d = said.shape[1] - 1
        ahead = verdict.n[:, None] + 1 + torch.arange(self.depth, device=said.device)
        self.line = said.gather(1, ahead.clamp(max=d))
        if d >= self.n - 1:
            keys = read[:, : d - self.n + 2]
            grams = torch.stack([said[:, i : i + keys.shape[1]] for i in range(self.n - 1)], -1)
            self._learn(keys, grams)

    def _learn(self, keys: Tensor, grams: Tensor) -> None:
        """Put grams [B, m, n - 1] first in the pool of keys [B, m]; of twins the last counts."""
        writer = last_writer(keys, self.vocab)
        news = grams.flatten(0, 1)[writer.clamp(min=0)][:, None]
        known = (self.pool == news).all(-1).any(1)
        shifted = torch.cat([news, self.pool[:, :-1]], 1)
        write = (writer >= 0) & ~known
        self.pool = torch.where(write[:, None, None], shifted, self.pool)


@lru_cache(maxsize=64)
def _deepest_branch(tree: Tree, device: torch.device) -> tuple[frozenset[int], Tensor]:
    """The root and the way to the first of the deepest nodes: as a set, and in order."""
    way = [tree.levels[-1].start]
    while way[-1]:
        way.append(tree.parents[way[-1]])
    return frozenset(way), torch.tensor(way[::-1], device=device)


def prepare(plan: Plan) -> Ready:
    """`lookahead:3`: pool n-grams of three tokens."""
    n = plan.whole(default=3, at_least=2)
    if plan.tree.depth and n > plan.tree.depth + 1:
        raise UserError(
            f"drafter lookahead:{n} needs drafts of {n - 1} or more: use gamma {n - 1} or more, or "
            f"lookahead:{plan.tree.depth + 1}"
        )
    return Ready(lambda target: Lookahead(target.vocab, n, max(1, plan.tree.depth)))
