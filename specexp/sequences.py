"""The committed tokens of a batch, and the draft and verdict of one round.

Three indices are easily confused: a *node* indexes the draft (0..N-1), a *slot* the KV cache, a
*position* the text. Node i of a draft is in slot `length - 1 + i` at position
`length - 1 + depth[i]`. Between rounds every cache holds slots `0..length-2`. The last committed
token is not in any cache yet: it is fed as the root of the next draft, so the first round is like
any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from specexp.errors import UserError
from specexp.ops import op
from specexp.sampling import Noise, Rng
from specexp.tree import Nodes

NOISE = Noise(0)  # the noise of sequences outside an engine's rounds


def check_tokens(tokens: Sequence[int], about: str, vocab: int) -> None:
    """Raises UserError unless these are one or more tokens of 0..vocab-1."""
    try:
        ids = torch.as_tensor(tokens)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        ids = torch.zeros(())
    if ids.shape == (0,):
        raise UserError(f"{about} is empty; give it at least one token")
    if ids.ndim != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
        raise UserError(f"{about} is {tokens!r:.40}; it must be a list of whole numbers, token ids")
    for token in map(int, ids.aminmax()):
        if not 0 <= token < vocab:
            raise UserError(f"{about} has the token {token}; the target has 0 to {vocab - 1}")


@dataclass
class Draft:
    """One round's draft tokens. tokens [B, N] int64, the root in column 0; -1: no draft token.

    q [B, N, V]: `q[:, i]` is the distribution from which the children of node i were drawn, without
    replacement in sibling order; all 0: they were chosen, not drawn. None: all were chosen.
    `text`: the sequences that the draft continues. `memo`: what the drafter passes to its
    `observe`, a tensor or a tuple of them.
    """

    tokens: Tensor
    nodes: Nodes
    text: Sequences
    q: Tensor | None = None
    memo: Any = None

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    @cached_property
    def keys(self) -> Tensor:
        """[B, N] noise addresses of the token that follows each node; valid until the commit."""
        return self.text.keys(self.nodes.depth)

    def within(self) -> Draft:
        """The same draft without the tokens deeper than their row's budget allows."""
        if self.text.budget is None:
            return self
        return replace(self, tokens=until(self.tokens, self.nodes.depth, self.text.budget))

    def outside(self, V: int) -> str:
        """What is wrong with a token that is not of a vocabulary of V tokens; "" if all are."""
        if not (wrong := outside(self.tokens, -1, V)):
            return ""
        return (
            f"proposed token {wrong[0]}, outside the vocabulary of {V} tokens: use 0 to {V - 1}, "
            "or -1 for no draft token"
        )

    def judged(self, path: Tensor, n: Tensor, bonus: Tensor) -> Verdict:
        """The verdict that accepts n [B] draft tokens along path [B, D+1], then adds bonus [B]."""
        accepted = torch.arange(path.shape[1], device=path.device) < n[:, None]
        line = self.tokens.gather(1, path.roll(-1, 1))
        return Verdict(path, n, torch.where(accepted, line, bonus[:, None]))


@dataclass
class Verdict:
    """What the rule decided: path [B, D+1], nodes from the root down, padded with the last one;
    n [B], the number of accepted draft tokens; new [B, D+1], the token after each node of the path:
    the accepted draft tokens, then the bonus token."""

    path: Tensor
    n: Tensor
    new: Tensor

    @classmethod
    def empty(cls, draft: Draft) -> Verdict:
        """One on this draft whose tensors are still to be written."""
        B, D = len(draft.tokens), draft.nodes.deepest
        path, new = (draft.tokens.new_empty(B, D + 1) for _ in range(2))
        return cls(path, draft.tokens.new_empty(B), new)


@dataclass
class Sequences:
    """tokens [B, S], length [B] (root included), limit [B], stream [B] (noise), eos [E]; int64.

    A row is done when `length >= limit`. Within a round only `commit` changes anything.
    `rng`: computes noise addresses; within a round it is the engine's.
    `first`: the number of row 0 in the caches and in the drafter's state (see `window`).
    budget [B] int64: how deep each row may draft in this round (-1: the row does not take part);
    None: as deep as the tree. `slack`: slots past the longest row that a draft may fill.
    """

    tokens: Tensor
    length: Tensor
    limit: Tensor
    stream: Tensor
    eos: Tensor
    rng: Rng = NOISE
    first: int = 0
    budget: Tensor | None = None
    slack: int = 1

    @classmethod
    def empty(
        cls, B: int, S: int, eos: Sequence[int] = (), device: torch.device | str = "cpu"
    ) -> Sequences:
        """B empty rows with room for S tokens; none is live."""
        one = torch.ones(B, dtype=torch.int64, device=device)
        return cls(
            torch.zeros(B, S, dtype=torch.int64, device=device), one, one.clone(),
            torch.zeros_like(one), torch.tensor(list(eos), dtype=torch.int64, device=device),
        )  # fmt: skip

    @classmethod
    def of(
        cls,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        slack: int,
        eos: Sequence[int] = (),
        streams: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> Sequences:
        """Rows from ragged prompts, padded on the right, with `slack` slots past the longest
        possible row: `Tree.room` of the largest draft. Raises UserError without prompts."""
        if not len(prompts):
            raise UserError("no prompts given; pass at least one")
        if max_new_tokens < 0:
            raise UserError(f"max_new_tokens is {max_new_tokens}; it must be 0 or more")
        rows = range(len(prompts)) if streams is None else streams
        if len(rows) != len(prompts):
            raise UserError(f"{len(rows)} streams for {len(prompts)} prompts; name one for each")
        S = max(map(len, prompts)) + max_new_tokens + slack
        seqs = cls.empty(len(prompts), S, eos)
        for row, (prompt, stream) in enumerate(zip(prompts, rows, strict=True)):
            seqs.write(row, prompt, len(prompt) + max_new_tokens, stream)
        own = ("tokens", "length", "limit", "stream", "eos")
        return replace(seqs, slack=slack, **{name: getattr(seqs, name).to(device) for name in own})

    def window(self, first: int, count: int, S: int | None = None) -> Sequences:
        """A view of `count` rows from `first` on and of their first S slots; nothing is copied."""
        rows = slice(first, first + count)
        return replace(
            self, tokens=self.tokens[rows, :S], length=self.length[rows], limit=self.limit[rows],
            stream=self.stream[rows], first=self.first + first,
        )  # fmt: skip

    def write(self, row: int, text: Sequence[int], limit: int, stream: int) -> None:
        """Start a row anew with these tokens, this limit on its length and this noise stream."""
        self.tokens[row, : len(text)] = torch.as_tensor(text, device=self.device)
        self.length[row], self.limit[row], self.stream[row] = len(text), limit, stream

    @cached_property
    def address(self) -> tuple[int, ...]:
        """Identifies this memory; a recorded round is valid for one address only."""
        budget = 0 if self.budget is None else self.budget.data_ptr()
        return (self.first, *self.tokens.shape, self.tokens.data_ptr(), budget)

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    @property
    def rows(self) -> slice:
        """The index of these rows in the caches and in the drafter's state, which hold all rows."""
        return slice(self.first, self.first + len(self.tokens))

    @property
    def live(self) -> Tensor:
        """[B] bool: rows that are not done."""
        return self.length < self.limit

    @property
    def root(self) -> Tensor:
        """[B, 1] the last committed token of each row."""
        return self.read(self.slots(0, 1))

    def slots(self, first: int, stop: int) -> Tensor:
        """[B, stop - first]: the slots from `first` to `stop` - 1, counted from the root's."""
        return self.places(torch.arange(first, stop, device=self.device)[None])

    @op
    def places(self, depth: Tensor) -> Tensor:
        """[B, n]: the root's slot, `length - 1`, plus `depth` [b, n], but at least 0. A node's
        index gives its slot, its depth its position; before the root both are negative."""
        return (self.length[:, None] - 1 + depth).clamp(min=0)

    @op
    def read(self, slots: Tensor) -> Tensor:
        """The tokens [B, n] in slots [B, n]."""
        return self.tokens.gather(1, slots)

    def drafting(self, tokens: Tensor, depth: int) -> Tensor:
        """What a drafter feeds to draft level `depth` + 1: these tokens [B, n], but -1 (padding) in
        rows whose budget does not reach that level."""
        if self.budget is None:
            return tokens
        beyond = torch.arange(depth + 1, depth + 2, device=tokens.device)[None]
        return until(tokens, beyond, self.budget)

    def draft(
        self, nodes: Nodes, drafted: Tensor | None = None, q: Tensor | None = None, memo: Any = None
    ) -> Draft:
        """A draft over `nodes` with draft tokens `drafted` [B, N-1]; None: the root alone."""
        tokens = self.root if drafted is None else torch.cat([self.root, drafted], 1)
        return Draft(tokens, nodes, self, q, memo)

    def keys(self, depth: Tensor) -> Tensor:
        """[B, n] noise addresses of the tokens that follow nodes at `depth` [b, n]."""
        return self.rng.keys(self.stream, self.length, depth)

    @op
    def commit(self, verdict: Verdict) -> Tensor:
        """Append the accepted path and the bonus token. Returns [B, 3]: draft tokens accepted,
        tokens emitted after the EOS and limit cuts, and whether the row goes on.

        An emitted EOS lowers the row's limit to its length. Rows already done emit 0. Tokens past a
        row's length are never read and may be overwritten.
        """
        at = torch.arange(verdict.new.shape[1], device=self.tokens.device)
        ends = (verdict.new[..., None] == self.eos).any(-1)
        before_end = torch.where(ends, at, at.numel()).amin(1)
        room = (self.limit - self.length).clamp(min=0)
        emitted = torch.minimum(torch.minimum(verdict.n, before_end) + 1, room)
        self.tokens.scatter_(1, self.length[:, None] + at, verdict.new)
        self.length += emitted
        self.limit.copy_(torch.where(emitted > before_end, self.length, self.limit))
        return torch.stack([verdict.n, emitted, self.live], 1)


@op
def round_report(counts: Tensor, tokens: Tensor, faults: Sequence[Tensor]) -> Tensor:
    """What a round of B rows tells the host, int64 [B, 3 + models + N - 1].

    Columns: counts [B, 3] (see `Sequences.commit`); for each model, whether its fault [B] is not 0;
    the draft tokens of tokens [B, N], without the root.
    """
    broken = [fault[:, None] != 0 for fault in faults]
    return torch.cat([counts, *broken, tokens[:, 1:]], 1)


@op
def columns(*parts: Tensor) -> Tensor:
    """Parts [B, n], which may be strided views, side by side."""
    return torch.cat(parts, 1)


@op
def until(tokens: Tensor, depth: Tensor, budget: Tensor) -> Tensor:
    """tokens [B, n], with -1 where depth [b, n] or [1, 1] exceeds the row's budget [B]."""
    return torch.where(depth <= budget[:, None], tokens, -1)


def outside(x: Tensor, least: int, end: int) -> list[int]:
    """The values of x that are below `least`, or `end` or more. Reads x on the host."""
    return cast(list[int], x[(x < least) | (x >= end)].tolist())
