"""The committed text of a batch, and what one round proposes and decides about it.

Three numbers that are easily mixed up: a *node* is an index in the draft (0..N-1), a *slot* an
index in the cache, a *position* an index in the text. Node i of a draft sits in slot
`length - 1 + i` at position `length - 1 + depth[i]`. Between rounds every cache holds the slots
`0..length-2`: the last committed token is always fed again as the root of the next draft, so there
is no first round.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from specexp import native
from specexp.errors import UserError
from specexp.sampling import mix
from specexp.tree import Nodes


@dataclass
class Draft:
    """One round's guesses. tokens [B, N] int64 with the root in column 0, -1 where none was made.

    `q[:, i]` [B, N, V] is the law from which the children of node i were drawn, without replacement
    in sibling order; None says that they were chosen, not drawn. `text`: what it continues.
    `grade` [B]: how sure the drafter is of each row's guesses, of its `grades`, more with each.
    """

    tokens: Tensor
    nodes: Nodes
    text: Sequences
    q: Tensor | None = None
    grade: Tensor | None = None

    @cached_property
    def keys(self) -> Tensor:
        """[B, N] addresses of the noise of the token that follows each node, until the commit;
        where nothing is left to chance any numbers will do."""
        return self.tokens if self.text.certain else self.text.keys(self.nodes.depth)

    def within(self) -> Draft:
        """The same without the guesses that lie deeper than their row may draft."""
        budget, reach = self.text.budget, self.text.reach
        if budget is None:
            return self
        if reach is not None and self.grade is not None:
            budget = _reached(budget, reach, self.grade)
        return replace(self, tokens=_until(self.tokens, self.nodes.depth, budget))

    def judged(self, path: Tensor, n: Tensor, bonus: Tensor) -> Verdict:
        """The verdict that keeps n [B] guesses along a path [B, D+1] and adds a bonus [B]."""
        guess = torch.arange(path.shape[1], device=path.device) < n[:, None]
        line = self.tokens.gather(1, path.roll(-1, 1))
        return Verdict(path, n, torch.where(guess, line, bonus[:, None]))


@dataclass
class Verdict:
    """What the target agreed with: path [B, D+1] of nodes from the root, whose last comes again
    beyond the end; n [B] accepted guesses; new [B, D+1], the token that follows each node of the
    path: these guesses and then the bonus."""

    path: Tensor
    n: Tensor
    new: Tensor


@dataclass
class Sequences:
    """tokens [B, S], length [B] (root included), limit [B], stream [B] (noise), eos [E]; int64.

    A row is done when `length >= limit`. Within a round `commit` alone changes anything.
    `by_round`: the noise of a position is another in every round. `certain`: none is asked for.
    `first`: row 0 is the row of that number in every cache and in whatever a drafter keeps a row
    (`window`). budget [B] int64: how deep each row may draft this round, -1: it has no part in it;
    None: as deep as the tree. reach [grades] int64: and how deep at each grade (`Draft.grade`).
    """

    tokens: Tensor
    length: Tensor
    limit: Tensor
    stream: Tensor
    eos: Tensor
    by_round: bool = False
    certain: bool = False
    first: int = 0
    budget: Tensor | None = None
    reach: Tensor | None = None

    @classmethod
    def empty(
        cls, B: int, S: int, eos: Sequence[int] = (), device: torch.device | str = "cpu"
    ) -> Sequences:
        """B rows with room for S tokens and nothing to write in any."""
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
        """Ragged prompts, padded on the right, with room for one whole draft past every limit."""
        if not prompts:
            raise UserError("no prompts given; pass at least one")
        for row, prompt in enumerate(prompts):
            if not len(prompt):
                raise UserError(f"prompt {row} is empty; give it at least one token")
        if max_new_tokens < 0:
            raise UserError(f"max_new_tokens is {max_new_tokens}; it must be 0 or more")
        rows = range(len(prompts)) if streams is None else streams
        if len(rows) != len(prompts):
            raise UserError(f"{len(rows)} streams for {len(prompts)} prompts; name one for each")
        longest = max(map(len, prompts))
        S = longest + max_new_tokens + slack
        tokens = torch.zeros(len(prompts), S, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt)
        length = torch.tensor([len(p) for p in prompts])
        return cls(
            tokens.to(device),
            length.to(device),
            (length + max_new_tokens).to(device),
            torch.tensor(list(rows), dtype=torch.int64, device=device),
            torch.tensor(list(eos), dtype=torch.int64, device=device),
        )

    def window(self, first: int, count: int, S: int | None = None) -> Sequences:
        """`count` rows from `first` on and their first S slots: the same memory, no copy."""
        rows = slice(first, first + count)
        return replace(
            self, tokens=self.tokens[rows, :S], length=self.length[rows], limit=self.limit[rows],
            stream=self.stream[rows], first=self.first + first,
        )  # fmt: skip

    def write(self, row: int, text: Sequence[int], limit: int, stream: int) -> None:
        """Begin a row anew: its text so far, where it ends and the name of its noise."""
        self.tokens[row, : len(text)] = torch.tensor(text, device=self.tokens.device)
        self.length[row], self.limit[row], self.stream[row] = len(text), limit, stream

    @cached_property
    def place(self) -> tuple[int, ...]:
        """Where they are: what is recorded of a round is good for no other place."""
        return (
            self.first,
            *self.tokens.shape,
            self.tokens.data_ptr(),
            *(x.data_ptr() for x in self.ragged),
        )

    @property
    def ragged(self) -> tuple[Tensor, ...]:
        """What says how deep rows may draft."""
        return tuple(x for x in (self.budget, self.reach) if x is not None)

    @property
    def rows(self) -> slice:
        """Where these rows are in tensors that hold a whole bank of them."""
        return slice(self.first, self.first + len(self.tokens))

    @property
    def live(self) -> Tensor:
        """[B] bool: rows still being written."""
        return self.length < self.limit

    @property
    def root(self) -> Tensor:
        """[B, 1] the last committed token of each row."""
        first = torch.arange(1, device=self.tokens.device)[None]
        return self.read(self.places(first))

    def places(self, depth: Tensor) -> Tensor:
        """[B, n] slots, or positions, `depth` [b, n] below the root; none is less than 0."""
        if code := native.by(self.length, depth):
            (b, n), B = depth.shape, len(self.length)
            made = torch.empty(B, n, dtype=torch.int64)
            code.places(B, n, b == 1, self.length, depth, made)
            return made
        return (self.length[:, None] - 1 + depth).clamp(min=0)

    def read(self, slots: Tensor) -> Tensor:
        """The tokens [B, n] in these slots [B, n]."""
        if code := native.by(slots):
            made = torch.empty(slots.shape, dtype=torch.int64)
            if not code.read(*slots.shape, self.tokens.stride(0), self.tokens, slots, made):
                raise IndexError(f"a slot is not one of {self.tokens.stride(0)}")
            return made
        return self.tokens.gather(1, slots)

    def drafting(self, tokens: Tensor, depth: int) -> Tensor:
        """What a drafter reads of tokens [B, n] to guess beyond that depth: -1 in rows whose budget
        ends there."""
        if self.budget is None:
            return tokens
        beyond = torch.arange(depth + 1, depth + 2, device=tokens.device)[None]
        return _until(tokens, beyond, self.budget)

    def draft(
        self,
        nodes: Nodes,
        guesses: Tensor | None = None,
        q: Tensor | None = None,
        grade: Tensor | None = None,
    ) -> Draft:
        """A draft over `nodes` from guesses [B, N-1] (None: the root alone)."""
        tokens = self.root if guesses is None else torch.cat([self.root, guesses], 1)
        return Draft(tokens, nodes, self, q, grade)

    def keys(self, depth: Tensor) -> Tensor:
        """[B, n] noise addresses of the tokens that follow nodes of `depth` [b, n].

        An address is a hash of the row's stream and the token's position in the text, so the noise
        a row sees depends on neither its batch nor its drafts. A rule that looks ahead has seen,
        when it decides, the noise of positions it then does not write: under such a rule the
        address is `by_round`, a hash of the root's position and the distance from it.
        """
        if code := native.by(self.stream, self.length, depth):
            (b, n), B = depth.shape, len(self.length)
            made = torch.empty(B, n, dtype=torch.int64)
            shape = B, n, b == 1, self.by_round
            code.addresses(*shape, self.stream, self.length, depth, made)
            return made
        root = mix(self.stream)[:, None] + self.length[:, None]
        return mix((mix(root) if self.by_round else root) + depth)

    def commit(self, verdict: Verdict) -> Tensor:
        """Append the accepted path and the bonus token. Returns, [B, 3], how many guesses were
        accepted, how many tokens emitted, after EOS and limit cuts, and whether the row goes on.

        A delivered EOS lowers the row's limit to its length. Rows already done emit 0. Tokens
        beyond a row's length are never read, and need not be spared.
        """
        if code := native.by(verdict.new, verdict.n, self.length, self.limit, self.eos):
            (B, places), (stride, _) = verdict.new.shape, self.tokens.stride()
            counts = torch.empty(B, 3, dtype=torch.int64)
            read = verdict.new, verdict.n, self.eos
            changed = self.tokens, self.length, self.limit
            code.commit(B, places, len(self.eos), stride, *read, *changed, counts)
            return counts
        at = torch.arange(verdict.new.shape[1], device=self.tokens.device)
        ends = (verdict.new[..., None] == self.eos).any(-1)
        before_end = torch.where(ends, at, at.numel()).amin(1)
        room = (self.limit - self.length).clamp(min=0)
        emitted = torch.minimum(torch.minimum(verdict.n, before_end) + 1, room)
        self.tokens.scatter_(1, self.length[:, None] + at, verdict.new)
        self.length += emitted
        self.limit.copy_(torch.where(emitted > before_end, self.length, self.limit))
        return torch.stack([verdict.n, emitted, self.live], 1)


def columns(parts: Sequence[Tensor]) -> Tensor:
    """Side by side: [B, n] of n [B, 1], which may be columns themselves."""
    if code := native.by(*(x[:1] for x in parts)):
        B, n = len(parts[0]), len(parts)
        made = torch.empty(B, n, dtype=torch.int64)
        strides = (c_int64 * n)(*(x.stride(0) for x in parts))
        code.columns(B, n, made, native.every(parts), strides)
        return made
    return torch.cat(list(parts), 1)


def _until(tokens: Tensor, depth: Tensor, budget: Tensor) -> Tensor:
    """tokens [B, n], and -1 where the depth [b, n] or [1, 1] exceeds the row's budget [B]."""
    if code := native.by(tokens, depth, budget):
        (B, n), (b, wide) = tokens.shape, depth.shape
        made = torch.empty(B, n, dtype=torch.int64)
        code.until(B, n, wide if b > 1 else 0, wide > 1, tokens, depth, budget, made)
        return made
    return torch.where(depth <= budget[:, None], tokens, -1)


def _reached(budget: Tensor, reach: Tensor, grade: Tensor) -> Tensor:
    """[B] how deep a row may draft that has this budget [B] and is at this grade [B]."""
    if code := native.by(budget, reach, grade):
        made = torch.empty_like(budget)
        code.reached(len(budget), budget, reach, grade, made)
        return made
    return torch.minimum(budget, reach[grade])
