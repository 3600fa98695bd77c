"""Recurrences over all tokens of a draft at once, from one state a row.

A recurrence S <- decay S + key (x) write, which a query reads, is a sum over what a token sees. So
keys, writes, decays and the columns of convolutions are kept by slot, as attention keeps its keys
and values; the state before them is read once for all nodes, and a new round begins by adding to it
what was accepted. (Yang et al. 2024, Gated Delta Networks; Dao and Gu 2024, Mamba 2.) The library
has one text of each recurrence, copied from model to model; here they are known by its names.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cached_property
from types import FunctionType, MethodType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from specexp.ops import op
from specexp.tree import Branches

Parts: TypeAlias = dict[tuple[str, int], Tensor]
"""What is kept for one module [b, ...], by kind and number."""

NOWHERE, NOTHING, FIRST = 0, 1, 2  # entries: where padding is written; empty; the first slot's
SCANS = {
    "torch_chunk_gated_delta_rule": "delta_rule",
    "chunk_kimi_delta_attention": "delta_rule",
    "mamba2_chunk_scan": "mamba2",
}


@dataclass
class Paths:
    """What tokens at slots [b, n] see of those that are kept, `place` [b, m]: those on their path,
    if `seen` [b, n, m], of which the first row may be what is added to the states."""

    seen: Tensor
    place: Tensor
    slots: Tensor

    @cached_property
    def between(self) -> Tensor:
        """Whether the write of a slot decays by another's before a token reads it [b, m, n * (1 +
        m)], and the state before that."""
        place = self.place
        after = place[:, None, :] > place[:, :, None]  # [b, m, m]: slot l is after slot j
        after = nn.functional.pad(after, (0, 0, 1, 0), value=True)  # and all are after the state
        return (self.seen[:, :, None] & after[:, None]).float().flatten(1, 2).mT

    @cached_property
    def weights(self) -> Tensor:
        """[b, 1, 1, n, 1 + m]: 1 for the state and for what is seen, else 0."""
        return nn.functional.pad(self.seen, (1, 0), value=True).float()[:, None, None]

    @cached_property
    def prior(self) -> Tensor:
        """[b, 1, 1, m]: 1 for slots before this pass."""
        return (self.place < self.slots[:, :1])[:, None, None].float()

    @cached_property
    def earlier(self) -> Tensor:
        """[b, 1, n, n]: 1 for tokens of earlier slots, and of those in one slot for the last."""
        last = nn.functional.pad(self.slots.diff() != 0, (0, 1), value=True)
        return ((self.slots[:, None] < self.slots[..., None]) & last[:, None])[:, None].float()

    def decays(self, g: Tensor) -> Tensor:
        """By what the state and then the write of each slot have decayed at a token
        [b, H, k, n, 1 + m], by their logarithms g [b, m, H, k]; 0 for a slot that it does not
        see."""
        w = (g.flatten(2).mT @ self.between).exp()
        return w.view(len(w), *g.shape[2:], *self.weights.shape[3:]) * self.weights


class Window:
    """The last `size` slots of `batch` rows, and where a pass reads and writes in them: of those
    after the states, and of `back` columns that a convolution reads, which may lie before.

    `based` [B]: how many tokens of each row are in its states.
    """

    def __init__(self, batch: int, size: int, back: int, device: Any) -> None:
        self.size, self.back = size, back
        self.based = torch.zeros(batch, dtype=torch.int64, device=device)

    def entries(self, rows: slice, slots: Tensor) -> Tensor:
        """Where slots [b, n] of these rows are kept; those before the first are empty."""
        at = entries_of(rows, slots.flatten(1), self.size)
        return torch.where(slots < 0, NOTHING, at.view(slots.shape))

    def fold(self, place: Tensor, slots: Tensor, tokens: Tensor) -> Tensor:
        """What the next pass adds to the states, of the entries of slots `place` [b, m]: those
        before the first of slots [b, n]. Returns [b, 1, m]."""
        based = self.based[self.rows]
        until = torch.where(tokens[:, 0] < 0, based, torch.maximum(based, slots[:, 0]))
        based.copy_(until)
        return (place < until[:, None])[:, None]

    def aim(
        self, rows: slice, slots: Tensor, tokens: Tensor, visible: Branches | None, first: bool
    ) -> None:
        """Make the next pass feed tokens [b, n] at these slots. `first`: what lies before them is
        of the text, and is added to the states once they are read."""
        self.rows, self.folds = rows, int(first)
        based = self.based[rows, None]
        place = based + (torch.arange(self.size, device=based.device) - based) % self.size
        columns = torch.arange(-self.back, 0, device=slots.device)
        if visible is None:
            seen = place[:, None] <= slots[..., None]
            columns = slots[..., None] + columns + 1
        else:
            root, ancestors = visible.root, visible.ancestors.expand(len(slots), -1, -1)
            M = ancestors.shape[2]
            at = (place - root)[:, None].expand(-1, slots.shape[1], -1)
            seen = (at < 0) | (ancestors.gather(2, at.clamp(0, M - 1)) & (at < M))
            path = root + torch.arange(-self.back, M, device=slots.device)
            on = nn.functional.pad(ancestors, (self.back, 0), value=True)
            path = torch.where(on, path[:, None], -1)
            columns = path.topk(self.back).values.flip(-1)
        if first:
            seen = torch.cat([self.fold(place, slots, tokens), seen], 1)
        self.paths = Paths(seen, place, slots)
        self.own = slots % self.size
        self.after = torch.where(tokens < 0, NOWHERE, self.entries(rows, slots)).flatten()
        self.columns = self.entries(rows, columns)  # [b, n, back]


def entries_of(rows: slice, slots: Tensor, size: int) -> Tensor:
    """Where slots [b, n] of these rows are kept, the last `size` of each."""
    row = torch.arange(rows.start, rows.stop, device=slots.device)[:, None]
    return FIRST + row * size + slots % size


def spread(x: Tensor, heads: int, dim: int) -> Tensor:
    """As many heads: each of x for as many that follow each other."""
    times = heads // x.shape[dim]
    return x if times == 1 else x.repeat_interleave(times, dim)


class Scan:
    """In a module with a state: its recurrence and its convolution over all nodes of a pass.

    `sizes`: what it keeps of a slot, and the state of a row, after one token.
    """

    def __init__(self, module: nn.Module) -> None:
        raw = inspect.unwrap(type(module).forward)
        names = set(raw.__code__.co_names)
        own = {name: getattr(self, SCANS[name]) for name in names & set(SCANS)}
        self.known = "causal_conv1d_fn" in names and (
            bool(own) or not names & {"update_recurrent_state", "set_linear_cache"}
        )
        functions = {**raw.__globals__, **own, "causal_conv1d_fn": self.convolution}
        forward = FunctionType(
            raw.__code__, functions, raw.__name__, raw.__defaults__, raw.__closure__
        )
        forward.__kwdefaults__ = raw.__kwdefaults__
        self.forward = MethodType(forward, module)
        self.turned = "mamba2_chunk_scan" in own
        self.sizes: Parts = {}
        self.window: Window | None = None
        self.buffers: Parts = {}

    def _kept(self, name: str, x: Tensor) -> None:
        """Write x [b, n, ...] at this pass's slots."""
        if self.window is None:
            self.sizes[name, 0] = x[:1, 0]
        else:
            self.buffers[name, 0].index_copy_(0, self.window.after, x.flatten(0, 1))

    @op
    def convolution(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None,
        activation: str | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        """x [b, C, n], weight [C, k]; each node with those before it on its path."""
        self._kept("conv", x.transpose(1, 2))
        if self.window is None:
            return x
        at = self.window.columns[..., -weight.shape[-1] :]
        wide = torch.promote_types(x.dtype, torch.float32)
        columns = self.buffers["conv", 0].index_select(0, at.flatten()).view(*at.shape, -1)
        y = (columns.to(wide) * weight.t().to(wide)).sum(2)
        y = y if bias is None else y + bias
        y = y if activation is None else ACT2FN[activation](y)
        return y.to(x.dtype).transpose(1, 2)

    def delta_rule(
        self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False, **_: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The gated delta rule; decays g [b, n, H] or, in Kimi's, [b, n, H, K]."""
        q, k, v, g, beta = (x.float() for x in (query, key, value, g, beta))
        if use_qk_l2norm_in_kernel:
            q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        y = self._scan(q * q.shape[-1] ** -0.5, k, v, g if g.ndim == 4 else g[..., None], beta)
        return y.to(query.dtype), value  # in place of the state, which nobody reads

    def mamba2(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
        D: Tensor | None = None, dt_bias: Tensor | None = None, dt_softplus: bool = False,
        return_final_states: bool = False, **_: Any,
    ) -> Any:  # fmt: skip
        """As its one-token form, which bounds no time steps."""
        dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        dt = (nn.functional.softplus(dt) if dt_softplus else dt).float()[..., None]
        y = self._scan(C.float(), B.float(), x.float() * dt, dt * A.float()[:, None])
        y = y if D is None else y + x * D[:, None]
        return (y.to(x.dtype), x) if return_final_states else y.to(x.dtype)

    def _here(self) -> tuple[Tensor, ...]:
        """Keys, decays and writes [b, m, ...] and states [b, H, K, V] of this pass's rows."""
        assert self.window is not None
        rows, m = self.window.rows, self.window.size
        at = slice(FIRST + rows.start * m, FIRST + rows.stop * m)
        kept = (self.buffers[name, 0][at] for name in ("key", "decay", "write"))
        state = self.buffers["recurrent", 0][rows]
        return (*(x.unflatten(0, (-1, m)) for x in kept), state)

    def fold(self) -> None:
        """Add to the states what the window says."""
        if self.window and ("recurrent", 0) in self.buffers:
            keys, decays, writes, state = self._here()
            self._fold(self.window.paths.decays(decays)[..., 0, :], keys, writes, state)

    def _fold(self, w: Tensor, keys: Tensor, writes: Tensor, state: Tensor) -> None:
        """By decays w [b, H, k, 1 + m]."""
        x, y = (writes, keys) if self.turned else (spread(keys, w.shape[1], 2), writes)
        x = x.permute(0, 2, 3, 1) * w[..., 1:]
        y = y.transpose(1, 2).flatten(0, 1)  # one matrix for all heads that share a key, if turned
        state.mul_(w[..., :1])
        state.view(len(y), -1, y.shape[2]).baddbmm_(x.reshape(len(y), -1, x.shape[3]), y)

    @op
    def _scan(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None = None
    ) -> Tensor:
        """q, k [b, n, G, K] (each for H / G heads), v [b, n, H, V], g [b, n, H, 1 or K],
        beta [b, n, H]: of the delta rule, which writes what its key does not yet read."""
        window, H = self.window, v.shape[2]
        b, n = k.shape[:2]
        if window is None:
            for name, kept in (("key", k), ("decay", g), ("write", v)):
                self._kept(name, kept)
            return v
        self._kept("key", k)
        self._kept("decay", g)
        keys, decays, writes, state = self._here()
        paths = window.paths
        w = paths.decays(decays)
        past, w = w[..., 0, :], w[..., window.folds :, :]
        x = (q if beta is None else torch.cat([q, k], 1)).transpose(1, 2)  # q, then keys to read by
        each = (-1, n)  # of [b, H, n or 2n, ...], as [b, H, 1 or 2, n, ...]
        left = w[..., 0].mT[:, :, None]  # [b, H, 1, n, k]
        if self.turned:
            read = state.view(b, x.shape[1], -1, x.shape[3]) @ x.mT
            read = read.view(b, H, -1, n).mT * left[:, :, 0]
        else:
            read = (spread(x, H, 1).unflatten(2, each) * left).flatten(2, 3) @ state
        if g.shape[-1] == 1:
            scores = spread(x @ keys.permute(0, 2, 3, 1), H, 1).unflatten(2, each) * w[..., 1:]
        else:
            terms = x.unflatten(2, each), w[..., 1:], keys
            scores = torch.einsum("bhtnk,bhknm,bmhk->bhtnm", *terms)
        scores = scores.flatten(2, 3)
        if beta is not None:
            rate = beta.transpose(1, 2)[..., None]
            (read, known), (scores, among) = read.split(n, 2), scores.split(n, 2)
            v = rate * (v.transpose(1, 2) - known - (among * paths.prior) @ writes.transpose(1, 2))
            if n > 1:
                own = window.own[:, None, None].expand(b, H, n, -1)
                among = rate * among.gather(3, own) * paths.earlier
                v = torch.linalg.solve_triangular(among, v, upper=False, unitriangular=True)
            v = v.transpose(1, 2)
        self._kept("write", v)
        y = (read + scores @ writes.transpose(1, 2)).transpose(1, 2).contiguous()
        if window.folds:
            self._fold(past, keys, writes, state)
        return y
