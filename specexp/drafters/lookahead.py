"""Guess by letting the target correct a whole line of guesses at once, over and over.

(Jacobi iteration with an n-gram pool: Fu et al. 2024, Lookahead decoding, arXiv 2402.02057.) The
deepest branch of every draft carries a line of guesses for the next places; verifying it yields the
target's own next token after each, which is the next, better line. What lines said in passing, n
tokens in a row, goes into a pool by its first token; the root's latest n-gram is tried at the head
of the line, others on the other branches. Unlike the paper's, the line is not an extra window
beside the draft but part of it, and costs no more than it. Every stream has a pool of its own.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from specexp import native
from specexp.drafters import Drafter, Plan, Ready
from specexp.drafters.recycle import Table, ours
from specexp.errors import UserError
from specexp.lm import LM, Forward
from specexp.sampling import Rng, likeliest
from specexp.sequences import Draft, Sequences, Verdict, columns
from specexp.tree import Tree

POOL = 8  # n-grams kept for each first token, the latest first


class Lookahead(Drafter):
    name = "lookahead"

    def __init__(self, target: LM, n: int, depth: int) -> None:
        self.vocab, self.device, self.n = target.vocab, target.device, n
        self.depth = max(depth, n - 1)  # of a line

    def allocate(self, B: int, S: int) -> None:
        self.pool = Table(B, self.vocab, (POOL, self.n - 1), self.device)
        self.lines = torch.zeros(B, self.depth, dtype=torch.int64, device=self.device)

    @property
    def state(self) -> tuple[Tensor, ...]:
        return (*self.pool.state, self.lines)

    def prefill(self, seqs: Sequences, hidden: Tensor | None) -> None:
        """The line begins with the root's token over and over, the pool with the prompt."""
        self.pool.clear(seqs.rows)
        self.lines[seqs.rows] = seqs.root.clamp(max=self.vocab - 1)
        place = torch.arange(seqs.tokens.shape[1], device=self.device)
        known = place + self.n <= seqs.length[:, None]
        said = ours(seqs.tokens, self.vocab)
        grams = torch.stack([said.roll(-i, 1) for i in range(1, self.n)], -1)
        self._learn(seqs, torch.where(known, seqs.tokens, -1), grams)

    def propose(self, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
        nodes = tree.nodes(seqs.tokens.device)
        on_line, self.branch = _deepest_branch(tree, seqs.tokens.device)
        old = self.lines[seqs.rows]
        tokens = [seqs.root]
        found = self._grams(seqs, tokens[0])
        latest, none = found[:, 0], found[:, 0, :0]
        head = _either(latest, old[:, : self.n - 1])
        beyond = [torch.full_like(tokens[0], -1)] * (tree.depth - self.depth)
        line = [*head.split(1, 1), *old.split(1, 1)[self.n - 1 :], *beyond]
        tails = [none]  # of a node: what is left of its n-gram
        for parent in range(len(tree)):
            tail = tails[parent]
            used = int(parent == 0)  # the root's latest is at the head of the line
            for _ in range(tree.parents.count(parent)):
                if len(tokens) in on_line:
                    rest = line[tree.depths[parent]]
                elif tail.shape[1]:
                    rest, tail = tail, none
                else:
                    found = found if used else self._grams(seqs, tokens[parent])
                    rest = found[:, min(used, POOL - 1)]
                    used += 1
                tokens.append(rest[:, :1])
                tails.append(rest[:, 1:])
        draft = Draft(columns(tokens), nodes, seqs).within()
        self.fed = draft.tokens
        return draft

    def _grams(self, seqs: Sequences, token: Tensor) -> Tensor:
        """[B, POOL, n - 1]: what followed token [B, 1], the latest first; -1 where nothing did."""
        return self.pool.read(seqs.rows, token)[:, 0]

    def observe(self, seqs: Sequences, tree: Tree, verdict: Verdict, seen: Forward) -> None:
        """The target's answers along the deepest branch: they refine the line and feed the pool."""
        said = likeliest(seen.logits)
        if code := native.by(said, self.fed, verdict.n, *self.state):
            shape = *said.shape, len(self.branch), self.depth, self.pool.places, POOL, self.n - 1
            changed = (x[seqs.rows] for x in (self.lines, *self.pool.state))
            code.learn(*shape, self.branch, self.fed, said, verdict.n, *changed)
            return
        said = said[:, self.branch]  # [B, d + 1]: after the root, and each guess
        read = self.fed[:, self.branch]
        heard = (read >= 0).cumprod(1)  # as far as the row's budget went
        last = heard.sum(1, keepdim=True) - 1
        ahead = verdict.n[:, None] + 1 + torch.arange(self.depth, device=said.device)
        line = said.gather(1, torch.minimum(ahead, last).clamp(min=0))
        self.lines[seqs.rows] = torch.where(last < 0, self.lines[seqs.rows], line)
        d = said.shape[1] - 1
        if d >= self.n - 1:
            keys = torch.where(heard[:, self.n - 1 :] > 0, read[:, : d - self.n + 2], -1)
            grams = torch.stack([said[:, i : i + keys.shape[1]] for i in range(self.n - 1)], -1)
            self._learn(seqs, keys, grams)

    def _learn(self, seqs: Sequences, keys: Tensor, grams: Tensor) -> None:
        """Put grams [B, m, n - 1] first in the pool of keys [B, m]; of twins the last counts."""
        old = self.pool.read(seqs.rows, keys)  # [B, m, POOL, n - 1]
        news = grams[:, :, None]
        known = (old == news).all(-1).any(-1)[..., None, None]
        shifted = torch.cat([news, old[:, :, :-1]], 2)
        self.pool.write(seqs.rows, keys, torch.where(known, old, shifted))


def _either(tokens: Tensor, others: Tensor) -> Tensor:
    """Rows of tokens [B, n], and of others where there is none."""
    if code := native.by(tokens[:1], others[:1]):
        made = torch.empty(tokens.shape, dtype=torch.int64)
        strides = tokens.stride(0), others.stride(0)
        code.either(*tokens.shape, *strides, tokens, others, made)
        return made
    return torch.where(tokens >= 0, tokens, others)


@cache  # for good: graphs read them where they lie
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
    return Ready(lambda target: Lookahead(target, n, plan.tree.depth))
