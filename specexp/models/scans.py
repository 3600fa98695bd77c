"""Recurrences over all tokens of a draft: at once, from one state per row, or token by token.

The recurrence S <- decay S + key (x) write, read by a query, is a weighted sum over the tokens that
the query sees. So the key, the write and the decay of each token, and its column of a convolution's
input, are kept by slot, as attention keeps keys and values. A pass reads the state S once for all
nodes, and adds what the slots on each node's path contribute. The next round first folds the
accepted tokens into S. (Yang et al. 2024, Gated Delta Networks; Dao and Gu 2024, Mamba 2.)
In Mamba 1 (Gu and Dao 2023) each number of S has a decay of its own, and such a sum would cost more
than the recurrence: `Walk`. transformers copies one text of each recurrence from model to model:
SCANS has their names.
"""

from __future__ import annotations

import copy
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
"""The states of one module, or what it keeps by slot: tensors [b, ...] by kind and number."""

# entries of a buffer: 0 takes what is written for padding, 1 stays empty, 2 is the first slot's
NOWHERE, NOTHING, FIRST = 0, 1, 2
SCANS = {
    "torch_chunk_gated_delta_rule": "delta_rule",
    "chunk_kimi_delta_attention": "delta_rule",
    "mamba2_chunk_scan": "mamba2",
}


@dataclass
class Paths:
    """What the tokens of a pass, at slots [b, n], see of the m slots that are kept.

    place [b, m]: the numbers of these slots. seen [b, n, m] bool: whether a slot is on the token's
    path. A pass that folds slots into the states has one row more, before the others: the slots
    that are folded.
    """

    seen: Tensor
    place: Tensor
    slots: Tensor

    @cached_property
    def decay_between(self) -> Tensor:
        """[b, m, n * (1 + m)]: 1 where the decay of a slot (the first m) acts on the state, or on
        the write of a slot (1 + m), before a token (n) reads it: the token sees the decaying slot,
        which comes after the other."""
        place = self.place
        after = place[:, None, :] > place[:, :, None]  # [b, m, m]: slot l is after slot j
        after = nn.functional.pad(after, (0, 0, 1, 0), value=True)  # and all are after the state
        return (self.seen[:, :, None] & after[:, None]).float().flatten(1, 2).mT

    @cached_property
    def weights(self) -> Tensor:
        """[b, 1, 1, n, 1 + m]: 1 for the state and for the slots that a token sees, else 0."""
        return nn.functional.pad(self.seen, (1, 0), value=True).float()[:, None, None]

    @cached_property
    def before_pass(self) -> Tensor:
        """[b, 1, 1, m]: 1 for slots before those of this pass."""
        return (self.place < self.slots[:, :1])[:, None, None].float()

    @cached_property
    def earlier_in_pass(self) -> Tensor:
        """[b, 1, n, n]: 1 where a token (the last n) has an earlier slot than another; of tokens
        that share a slot only the last one counts."""
        last = nn.functional.pad(self.slots.diff() != 0, (0, 1), value=True)
        return ((self.slots[:, None] < self.slots[..., None]) & last[:, None])[:, None].float()

    def decays(self, g: Tensor) -> Tensor:
        """[b, H, k, n, 1 + m]: the factors by which the state, and then the write of each slot,
        have decayed when a token reads them; 0 for a slot that it does not see. g [b, m, H, k]: the
        logarithm of each slot's decay."""
        factors = (g.flatten(2).mT @ self.decay_between).exp()
        return factors.view(len(factors), *g.shape[2:], *self.weights.shape[3:]) * self.weights


class Window:
    """Where a pass reads and writes the slots that are kept: the last `size` of each of `batch`
    rows.

    They are the slots after those in the states and, before them, as many as a convolution reads:
    `back` columns. `based` [B]: how many tokens of each row are in its states.
    """

    def __init__(self, batch: int, size: int, back: int, device: Any) -> None:
        self.size, self.back = size, back
        self.based = torch.zeros(batch, dtype=torch.int64, device=device)

    def entries(self, rows: slice, slots: Tensor) -> Tensor:
        """The entries of slots [b, n] of these rows; that of a slot before the text is empty."""
        at = entries_of(rows, slots.flatten(1), self.size)
        return torch.where(slots < 0, NOTHING, at.view(slots.shape))

    def to_fold(self, place: Tensor, slots: Tensor, tokens: Tensor) -> Tensor:
        """Which of the slots `place` [b, m] the next pass folds into the states, [b, 1, m] bool:
        those before the first slot that it feeds, of slots [b, n]. `based` counts them at once."""
        based = self.based[self.rows]
        until = torch.where(tokens[:, 0] < 0, based, torch.maximum(based, slots[:, 0]))
        based.copy_(until)
        return (place < until[:, None])[:, None]

    def aim(
        self, rows: slice, slots: Tensor, tokens: Tensor, visible: Branches | None, opens: bool
    ) -> None:
        """Make the next pass feed tokens [b, n] at these slots. `opens`: all tokens before them are
        committed, so the pass folds them into the states after reading these."""
        self.rows, self.folds = rows, int(opens)
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
        if opens:
            seen = torch.cat([self.to_fold(place, slots, tokens), seen], 1)
        self.paths = Paths(seen, place, slots)
        self.own = slots % self.size
        self.after = torch.where(tokens < 0, NOWHERE, self.entries(rows, slots)).flatten()
        self.columns = self.entries(rows, columns)  # [b, n, back]


def empty(x: Tensor, entries: int, device: Any) -> Tensor:
    """A buffer of so many states like x [1, ...], which is one after the first token of a text. Of
    tokens (the n-grams of Qwen 4) it begins with what stands for those before a text."""
    buffer = x.new_zeros(entries, *x.shape[1:], device=device)
    if not x.is_floating_point():
        buffer[NOTHING] = x[0, ..., :1]
    return buffer


def entries_of(rows: slice, slots: Tensor, size: int) -> Tensor:
    """The entries of slots [b, n] of these rows, each of which keeps its last `size` slots."""
    row = torch.arange(rows.start, rows.stop, device=slots.device)[:, None]
    return FIRST + row * size + slots % size


def spread(x: Tensor, heads: int, dim: int) -> Tensor:
    """x with `heads` heads along `dim`: each head of x repeated for those that share it."""
    times = heads // x.shape[dim]
    return x if times == 1 else x.repeat_interleave(times, dim)


def replaced(module: nn.Module, functions: dict[str, Any]) -> Any:
    """The module's own `forward`, in which these stand for its library's functions."""
    raw = inspect.unwrap(type(module).forward)
    functions = {**raw.__globals__, **functions}
    forward = FunctionType(raw.__code__, functions, raw.__name__, raw.__defaults__, raw.__closure__)
    forward.__kwdefaults__ = raw.__kwdefaults__
    return MethodType(forward, module)


def twin(module: Any) -> Any:
    """The same module with the same weights, in which parts can be replaced. What has no parts is
    shared, but for linear layers and norms: what a quantised one holds may have no copy."""
    shared = [*module.parameters(), *module.buffers(), getattr(module, "config", None)]
    whole = (x for x in module.modules() if not [*x.children()])
    shared += [x for x in whole if type(x) is not nn.Linear and "RMSNorm" not in type(x).__name__]
    return copy.deepcopy(module, {id(x): x for x in shared})


def one_token(module: nn.Module) -> Any:
    """The module's `forward` for one token."""
    return replaced(module, {"causal_conv1d_update": one_convolution})


def one_convolution(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:  # fmt: skip
    """x [b, C, 1], weight [C, k]: the convolution of one token with the columns before it, `state`
    [b, C, >= k - 1], to which it is appended. A product and a sum: some processors have no grouped
    convolution in bfloat16, and torch runs each channel by itself there."""
    columns = torch.cat([state, x], -1)
    state.copy_(columns[..., 1:])
    return _summed(columns[..., -weight.shape[-1] :], weight, bias, activation, -1)[..., None]


def _summed(
    columns: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, dim: int
) -> Tensor:
    """Columns times weights, summed over this dimension, in float32 or float64."""
    wide = torch.promote_types(columns.dtype, torch.float32)
    y = (columns.to(wide) * weight.to(wide)).sum(dim)
    y = y if bias is None else y + bias
    y = y if activation is None else ACT2FN[activation](y)
    return y.to(columns.dtype)


class Scan:
    """Runs a module with a state over all nodes of a pass: `forward` is the module's own, with its
    recurrence and its convolution replaced by those of this class.

    `known`: whether that replaces all by which the module keeps states. `turned`: its states are
    [.., V, K], as in Mamba 2. `window`: what a pass reads and writes; without one the module is
    only examined, and what it keeps of a slot is noted in `sizes`.
    """

    def __init__(self, module: nn.Module) -> None:
        vars(module).update(conv_idx=0)  # Inkling counts those of a layer, each with its own state
        raw = inspect.unwrap(type(module).forward)
        names = set(raw.__code__.co_names)
        own = {name: getattr(self, SCANS[name]) for name in names & set(SCANS)}
        self.known = "causal_conv1d_fn" in names and (
            bool(own) or not names & {"update_recurrent_state", "set_linear_cache"}
        )
        self.forward = replaced(module, own | {"causal_conv1d_fn": self.convolution})
        self.turned = "mamba2_chunk_scan" in own
        self.sizes: Parts = {}
        self.window: Window | None = None
        self.buffers: Parts = {}

    def _store(self, name: str, x: Tensor) -> None:
        """Keep x [b, n, ...] at this pass's slots."""
        if self.window is None:
            self.sizes[name, 0] = x[:1, 0]
        else:
            self.buffers[name, 0].index_copy_(0, self.window.after, x.flatten(0, 1))

    @op
    def convolution(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None,
        activation: str | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        """x [b, C, n], weight [C, k]: the convolution of each node with the k - 1 tokens before it
        on its path."""
        self._store("conv", x.transpose(1, 2))
        if self.window is None:
            return x
        at = self.window.columns[..., -weight.shape[-1] :]
        columns = self.buffers["conv", 0].index_select(0, at.flatten()).view(*at.shape, -1)
        return _summed(columns, weight.t(), bias, activation, 2).transpose(1, 2)

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

    def _kept(self) -> tuple[Tensor, ...]:
        """Keys, decays and writes [b, m, ...] and states [b, H, K, V] of this pass's rows."""
        assert self.window is not None
        rows, m = self.window.rows, self.window.size
        at = slice(FIRST + rows.start * m, FIRST + rows.stop * m)
        kept = (self.buffers[name, 0][at] for name in ("key", "decay", "write"))
        state = self.buffers["recurrent", 0][rows]
        return (*(x.unflatten(0, (-1, m)) for x in kept), state)

    def fold(self) -> None:
        """Fold into the states the slots that the window chose (`Window.to_fold`)."""
        if self.window and ("recurrent", 0) in self.buffers:
            keys, decays, writes, state = self._kept()
            self._fold(self.window.paths.decays(decays)[..., 0, :], keys, writes, state)

    def _fold(self, w: Tensor, keys: Tensor, writes: Tensor, state: Tensor) -> None:
        """The same, given the factors w [b, H, k, 1 + m] by which each has decayed."""
        x, y = (writes, keys) if self.turned else (spread(keys, w.shape[1], 2), writes)
        x = x.permute(0, 2, 3, 1) * w[..., 1:]
        y = y.transpose(1, 2).flatten(0, 1)  # one matrix for all heads that share a key, if turned
        state.mul_(w[..., :1])
        state.view(len(y), -1, y.shape[2]).baddbmm_(x.reshape(len(y), -1, x.shape[3]), y)

    @op
    def _scan(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None = None
    ) -> Tensor:
        """The recurrence: what the queries read, [b, n, H, V].

        q, k [b, n, G, K], each for H / G heads; v [b, n, H, V]; g [b, n, H, 1 or K], logarithms of
        decays; beta [b, n, H] for the delta rule alone, which writes the part of v that its key
        does not yet read."""
        window, H = self.window, v.shape[2]
        b, n = k.shape[:2]
        if window is None:
            for name, part in (("key", k), ("decay", g), ("write", v)):
                self._store(name, part)
            return v
        self._store("key", k)
        self._store("decay", g)
        keys, decays, writes, state = self._kept()
        paths = window.paths
        w = paths.decays(decays)
        fold_decays, w = w[..., 0, :], w[..., window.folds :, :]
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
            (read, by_key), (scores, key_scores) = read.split(n, 2), scores.split(n, 2)
            of_earlier = (key_scores * paths.before_pass) @ writes.transpose(1, 2)
            v = rate * (v.transpose(1, 2) - by_key - of_earlier)
            if n > 1:  # the tokens of this pass read each other's writes
                own = window.own[:, None, None].expand(b, H, n, -1)
                among = rate * key_scores.gather(3, own) * paths.earlier_in_pass
                v = torch.linalg.solve_triangular(among, v, upper=False, unitriangular=True)
            v = v.transpose(1, 2)
        self._store("write", v)
        y = (read + scores @ writes.transpose(1, 2)).transpose(1, 2).contiguous()
        if window.folds:
            self._fold(fold_decays, keys, writes, state)
        return y


class Walk:
    """Runs a Mamba 1 over all nodes of a pass: its products once, its convolution and recurrence
    node by node, each from the state that its parent left."""

    def __init__(self, module: nn.Module) -> None:
        names = inspect.unwrap(type(module).forward).__code__.co_names
        own = {"causal_conv1d_fn": self.convolution, "mamba_selective_scan": self.recurrence}
        self.known = own.keys() <= set(names)
        self.forward = replaced(module, own)

    def aim(self, buffers: Parts, before: Tensor, after: Tensor) -> None:
        """buffers: the module's states by entry. before, after [n, b]: of each node of the next
        pass, the entries of its parent's states and of its own."""
        self.buffers, self.before, self.after = buffers, before, after

    @op
    def convolution(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None,
        activation: str | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        """x [b, C, n], weight [C, k]: the convolution of each node with the k - 1 tokens before it
        on its path."""
        kept, columns = self.buffers["conv", 0], []
        for before, after, own in zip(self.before, self.after, x.split(1, 2), strict=True):
            columns.append(torch.cat([kept.index_select(0, before)[..., 1:], own], -1))
            kept.index_copy_(0, after, columns[-1])
        return _summed(torch.stack(columns, 1), weight, bias, activation, -1).transpose(1, 2)

    @op
    def recurrence(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
        z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False,
        return_last_state: bool = False, **_: Any,
    ) -> Any:  # fmt: skip
        """S <- exp(dt A) S + dt x B, of which C reads x's next value; x, dt, z [b, H, n], A [H, K],
        B, C [b, K, n], S [b, H, K]."""
        dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[:, None]
        dt = (nn.functional.softplus(dt) if delta_softplus else dt).float()
        decays, writes = (dt.permute(2, 0, 1)[..., None] * A).exp(), (dt * x).unbind(-1)
        kept, read = self.buffers["recurrent", 0], []
        for node, key in enumerate(B.float().unbind(-1)):
            S = kept.index_select(0, self.before[node]).float() * decays[node]
            S.addcmul_(writes[node][..., None], key[:, None])
            kept.index_copy_(0, self.after[node], S.to(kept.dtype))
            read.append(S.to(C.dtype) @ C[..., node, None])
        y = torch.cat(read, -1)
        y = y if D is None else y + x * D[:, None]
        y = y if z is None else y * nn.functional.silu(z)
        y = y.to(x.dtype)
        return (y, y) if return_last_state else y  # in place of the state, which nobody reads
