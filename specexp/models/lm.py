"""Any transformers causal LM, run at given slots and positions over a static cache.

Targets and draft models are the same class. Contact with transformers is limited to this folder,
except that fast/fused.py knows how its layers are built. An explicit mask and explicit positions
suffice to run a ragged batch of trees through an unmodified model; load.py refuses models for which
they do not. A faster network may replace the module.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specexp.errors import UserError
from specexp.models import memory, recurrent
from specexp.models.cache import SlotCache, bias_by_position, count_by_position, window_by_layer
from specexp.models.memory import PREFILL, layers
from specexp.models.processors import unprocessed
from specexp.models.servable import cache_name, context_length, takes
from specexp.ops import op
from specexp.sequences import Draft, Sequences, Verdict, until
from specexp.tree import Branches, Tree


@dataclass
class Forward:
    """logits [B, N, V], if any were asked for; hidden [B, N, taps*E], the states asked for, or
    None."""

    logits: Tensor
    hidden: Tensor | None = None


class Network(Protocol):
    """What an LM runs: a pass over tokens [B, n] at positions [B, n] that writes keys and values to
    the slots that the cache is aimed at, and in which each token reads the slots that the cache
    says it sees (`SlotCache.see`). A token of -1 is padding: its output and the contents of its
    slot are unspecified.

    Returns the logits of the `last` tokens of each row (None: of all; 0: no logits) and, for all
    tokens, the hidden states `taps` concatenated (0: the embeddings; L: the LM head's input; -1:
    the last layer's output, before the last norm).
    """

    @property
    def parts(self) -> tuple[recurrent.Stepwise, ...]:
        """The replacements of its modules that have states (recurrent.py)."""

    @property
    def by_length_up_to(self) -> int:
        """Passes of up to this many tokens read each row by its length, so that they take no
        longer in a larger window; 0: every pass reads all slots of the window, under a mask."""

    def __call__(
        self, tokens: Tensor, positions: Tensor, cache: SlotCache, taps: tuple[int, ...],
        last: int | None, **inputs: Tensor,
    ) -> tuple[Tensor | None, Tensor | None]: ...  # fmt: skip


@op
def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., inputs] times weight [outputs, inputs], plus bias [outputs]."""
    return F.linear(x, weight, bias)


class Linear(nn.Linear):
    """A linear layer whose product is an operation."""

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias)


def as_operations(module: nn.Module) -> None:
    """Make the products of a module's linear layers operations."""
    for part in module.modules():
        if type(part) is nn.Linear:
            part.__class__ = Linear


def among_all(logits: Tensor, ids: Tensor, vocab: int) -> Tensor:
    """Logits [..., vocab]: these [..., V'] of the tokens `ids` [V'], and -inf of all others."""
    everywhere = logits.new_full((*logits.shape[:-1], vocab), -torch.inf)
    return everywhere.index_copy_(-1, ids, logits)


class ShortHead(Linear):
    """The rows `ids` of an LM head: the logits of all other tokens are -inf."""

    ids: Tensor

    def __init__(self, head: nn.Linear, ids: Sequence[int]) -> None:
        super().__init__(head.in_features, len(ids), head.bias is not None, device="meta")
        self.vocab = head.out_features
        self.register_buffer("ids", torch.tensor(ids, device=head.weight.device), persistent=False)
        for name, whole in head.named_parameters():
            setattr(self, name, nn.Parameter(whole.detach()[self.ids], requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        return among_all(super().forward(x), self.ids, self.vocab)


def shorten_head(module: Any) -> None:
    """Restrict the LM head to the tokens `draft_ids` of a draft's config, if it has any (FR-Spec:
    Zhao et al. 2025, arXiv 2502.14856)."""
    if ids := getattr(module.config.get_text_config(), "draft_ids", None):
        module.set_output_embeddings(ShortHead(module.get_output_embeddings(), ids))


@dataclass(frozen=True)
class Unfused:
    """A transformers module whose linear layers are operations. `parts`: the replacements of its
    modules that have states; `attends`: it takes positions and a mask; `kept`: what it calls its
    cache."""

    module: Any
    parts: tuple[recurrent.Stepwise, ...] = ()
    attends: bool = True
    kept: str = "cache"
    by_length_up_to = 0

    @classmethod
    def of(cls, module: Any) -> Unfused:
        if not isinstance(module, nn.Module):
            return cls(module)
        whole, parts = recurrent.stepwise(module)
        if not parts:
            for by_position in (bias_by_position, count_by_position, window_by_layer):
                by_position(whole)
        as_operations(whole)
        net = cls(whole, parts, not parts or "position_ids" in takes(whole), cache_name(whole))
        if parts and not parts[-1].states:
            cache = SlotCache(whole.config.get_text_config().num_hidden_layers, 1, 8)
            recurrent.examine(parts, cache, lambda at, last: net(at, at, cache, (), last))
        return net

    def __call__(
        self, tokens: Tensor, positions: Tensor, cache: SlotCache, taps: tuple[int, ...],
        last: int | None, **inputs: Tensor,
    ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        net = self.module.base_model if last == 0 else self.module
        options: dict[str, Any] = {self.kept: cache}
        if last != 0:
            options |= {"logits_to_keep": last or 0}
        if self.attends:
            options |= {"position_ids": positions, "attention_mask": self.masks(cache)}
        with made_by_last_layer(self.module, -1 in taps) as made:
            out = net(
                input_ids=tokens.clamp(min=0), use_cache=not self.parts,
                output_hidden_states=bool(taps), **options, **inputs,
            )  # fmt: skip
        seen = [made[0] if t == -1 else out.hidden_states[t] for t in taps]
        hidden = torch.cat(seen, -1) if taps else None
        return None if last == 0 else out.logits[:, -(last or 0) :], hidden

    def masks(self, cache: SlotCache) -> Any:
        """The mask that the module is given."""
        return cache.masks(self.module.dtype)


@contextmanager
def made_by_last_layer(module: Any, wanted: bool) -> Iterator[list[Tensor]]:
    """A list that gets the output of a transformers model's last layer, if that is `wanted`. Raises
    UserError for a model whose layers are in no nn.ModuleList."""
    made: list[Tensor] = []
    if not wanted:
        yield made
        return
    L = module.config.get_text_config().num_hidden_layers
    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList) and len(m) == L]
    if not lists:
        raise UserError(f"{type(module).__name__} has no list of its {L} layers: the output of the "
                        "last cannot be read; use other heads")  # fmt: skip
    keep = lists[0][-1].register_forward_hook(
        lambda _, given, out: made.append(out[0] if isinstance(out, tuple) else out)
    )
    try:
        yield made
    finally:
        keep.remove()


@op
def network(module: Any, name: str, vocab: int) -> Network:
    """What runs a module; by default the module itself.

    A kernel returns a network whose logits it has compared with the module's own; it may leave out
    those past the first `vocab`. `name`: what its log calls the module.
    """
    return Unfused.of(module)


class LM:
    """A causal LM with a cache of its own. `models.load` makes one from a folder or a module.

    `net`: what runs `module`. `vocab` V: the tokens it may emit; logits past them are padding.
    `process`: what a target's generation config does to the logits [B, N, V] after a draft.
    `context`: the longest sequence it can read. `fault` [B]: NaN for rows in which this model has
    produced NaN or infinite logits, above 0 for those in which `process` left no token, else 0 (see
    `why`). `keeps_last_slots_only`: it has states, or windows in rings, in which what is written
    past a text overwrites what comes before. `room`: slots from the root on that a round may write
    (`Tree.room`); `refed`: tokens before the root that it feeds again.
    """

    def __init__(
        self, module: Any, name: str, vocab: int, net: Network,
        process: Callable[[Draft, Tensor], Tensor] = unprocessed,
    ) -> None:  # fmt: skip
        self.module, self.name, self.vocab, self.net = module, name, vocab, net
        self.process = process
        self.config = module.config.get_text_config()
        self.context = context_length(self.config)
        self.layers = layers(self.config, self.context)
        self.keeps_last_slots_only = bool(net.parts) or any(layer.span for layer in self.layers)
        self.device, self.dtype = module.device, module.dtype
        self.cache: SlotCache | None = None
        self.fault = torch.zeros(0)
        self.room, self.refed = 1, 0

    def apart(self, name: str = "", process: Callable[[Draft, Tensor], Tensor] | None = None) -> LM:
        """An LM with the same weights and a cache of its own, perhaps under another name or with
        another `process`."""
        other = copy.copy(self)
        other.name, other.process = name or self.name, process or self.process
        other.cache, other.fault, other.room = None, torch.zeros(0), 1
        return other

    def after(self, text: Sequence[int], logits: Tensor) -> Tensor:
        """The module's logits [n, V] after the last n tokens of a text, after `process`."""
        n, device = len(logits), logits.device
        seqs = Sequences.of([text[: len(text) - n + 1]], 0, slack=n, device=device)
        drafted = torch.tensor([[*text[len(text) - n + 1 :]]], dtype=torch.int64, device=device)
        return self.process(seqs.draft(Tree.chain(n - 1).nodes(device), drafted), logits[None])[0]

    @cached_property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.module.parameters())

    def kv_bytes(self, S: int) -> int:
        """Bytes of the keys and values of a row of S slots."""
        sizes = memory.slot_bytes(self.config, self.dtype.itemsize, self.context)
        return memory.row_bytes(sizes, S, self.room)

    def allocate(self, B: int, S: int, beside: int = 0) -> None:
        """Replace the cache by an empty one of B rows of S slots. Raises UserError if it does not
        fit. `beside`: bytes per row of what a drafter keeps with it, which have to fit, too."""
        self.cache = None
        parts = self.net.parts
        states = recurrent.state_bytes(parts, self.room, self.refed)
        need = B * (self.kv_bytes(S) + states + beside)
        free = memory.free_memory(self.device)
        if need > free:
            most = free * B // need
            smaller_batch = f"a batch of at most {most}, or " if most else ""
            raise UserError(
                f"the cache of {self.name} for batch {B} x {S} tokens needs {memory.gib(need)} GiB "
                f"and {memory.gib(free)} GiB are free: use {smaller_batch}fewer tokens"
            )
        self.cache = SlotCache(self.layers, B, S, self.room)
        if parts:
            self.cache.states = recurrent.States(parts, B, self.room, self.refed, self.device)
        self.fault = torch.zeros(B, dtype=torch.float32, device=self.device)

    @torch.inference_mode()
    def feed(
        self,
        seqs: Sequences,
        tokens: Tensor,
        slots: Tensor,
        positions: Tensor,
        visible: Branches | None,
        taps: tuple[int, ...] = (),
        last: int | None = None,
        opens: bool = False,
        start: int | None = None,
        **inputs: Tensor,
    ) -> Forward:
        """One pass over tokens [B, n] of the rows of `seqs`, written at slots [B, n], at positions
        [B, n]; `visible` as in `SlotCache.see`, `taps`, `last` and `inputs` as in `Network`.
        `opens` and `start`: see `States.aim`; layers without states ignore them."""
        assert self.cache is not None, "allocate before the first pass"
        S = seqs.tokens.shape[1]
        self.cache.aim(seqs.rows, slots, S, tokens, visible)
        if self.cache.states:
            self.cache.states.aim(seqs.rows, slots, tokens, visible, opens, start)
        if self.context < S:  # only nodes past the limit are clamped, and they are never emitted
            positions = positions.clamp(max=self.context - 1)
        logits, hidden = self.net(tokens, positions, self.cache, taps, last, **inputs)
        if logits is None:
            return Forward(tokens.new_empty(0), hidden)
        logits = logits[..., : self.vocab]
        spoil(self.fault[seqs.rows], logits)
        return Forward(logits, hidden)

    @torch.inference_mode()
    def prefill(
        self, seqs: Sequences, start: int, stop: int, taps: tuple[int, ...] = ()
    ) -> Tensor | None:
        """Fill slots start..stop-1 with the tokens there; returns the tapped hidden states
        [B, stop-start, taps*E], or None.

        Slots past the length of a shorter row are padding.
        """
        if self.net.parts:
            return self._read([start] * len(seqs.tokens), seqs, stop, taps)
        hidden = []
        for first in range(start, stop, PREFILL):
            states = fill(self, seqs, range(first, min(first + PREFILL, stop)), False, taps)
            hidden += [] if states is None else [states]
        return torch.cat(hidden, 1) if hidden else None

    @torch.inference_mode()
    def refill(self, seqs: Sequences, count: int) -> None:
        """Feed the `count` tokens before each row's root again, in rows that may draft. A model
        with states is fed those that its states do not cover, whatever `count` is."""
        if self.net.parts:
            covered = self._states.covered[seqs.rows].tolist()
            self._read(covered, seqs, seqs.tokens.shape[1])
            return
        for first in range(-count, 0, PREFILL):
            fill(self, seqs, range(first, min(first + PREFILL, 0)), True)

    def fill_at(
        self, seqs: Sequences, at: Tensor, from_root: bool, taps: tuple[int, ...]
    ) -> Tensor | None:
        """A pass without logits over the tokens in the slots `at` [1, n], which are counted from
        each row's root if `from_root`; past the root all is padding. Returns the tapped states
        [B, n, taps*E], or None."""
        slots = seqs.places(at) if from_root else at.expand(len(seqs.tokens), -1)
        slots = slots.clamp(max=seqs.tokens.shape[1] - 1)
        tokens = until(seqs.drafting(seqs.read(slots), 0), slots, seqs.length - 1)
        return self.feed(seqs, tokens, slots, slots, None, taps, 0, True).hidden

    def follow(self, seqs: Sequences, count: int) -> Tensor:
        """Feed each row's last `count` tokens, root included, in rows that may draft; logits
        [B, 1, V] after the root."""
        slots = seqs.places(torch.arange(1 - count, 1, device=self.device)[None])
        tokens = seqs.drafting(seqs.read(slots), 0)
        logits = self.feed(seqs, tokens, slots, slots, None, last=1, opens=True).logits
        if self.net.parts:
            covered = self._states.covered[seqs.rows]
            covered.copy_(torch.where(tokens[:, -1] < 0, covered, seqs.length))
        return logits

    def verify(self, seqs: Sequences, draft: Draft, taps: tuple[int, ...] = ()) -> Forward:
        """One pass over a draft: node i in slot length-1+i at position length-1+depth[i]; logits
        as `process` leaves them."""
        assert draft.tokens.shape[1] <= self.room or not self.net.parts, "no room for the draft"
        nodes, visible = draft.nodes, None
        slots = positions = seqs.places(nodes.depth)
        if not nodes.is_chain:
            slots = seqs.places(torch.arange(draft.tokens.shape[1], device=self.device)[None])
            visible = Branches(slots[:, :1], nodes.ancestors)
        seen = self.feed(seqs, draft.tokens, slots, positions, visible, taps, opens=True)
        seen.logits = self.process(draft, seen.logits)
        return seen

    @torch.inference_mode()
    def keep(self, seqs: Sequences, draft: Draft, verdict: Verdict) -> None:
        """Move a tree's accepted path to the front of the cache, before the commit. A chain's path
        is there already."""
        assert self.cache is not None
        if not draft.nodes.is_chain:
            self.cache.keep(seqs, verdict)

    def why(self, row: int) -> str:
        """What a fault in this row means. Reads from the device."""
        if bool(self.fault[row].isnan()):
            return f"{self.name} produced NaN or infinite logits (check its weights and dtype)"
        return f"no token is left by {self.process} of the generation config of {self.name}"

    @property
    def _states(self) -> recurrent.States:
        assert self.cache is not None
        assert self.cache.states is not None
        return self.cache.states

    def forget(self, rows: slice | int) -> None:
        """Begin new texts in these rows."""
        self.fault[rows] = 0
        if self.cache and self.cache.states:
            self.cache.states.forget(rows)

    @torch.inference_mode()
    def _read(
        self, starts: Sequence[int], seqs: Sequences, stop: int, taps: tuple[int, ...] = ()
    ) -> Tensor | None:
        """Feed the tokens in slots `starts` [B] to `stop` - 1 or to the root, which is left out, in
        rows that may draft; one row at a time, so that no padding enters a state. Returns the
        tapped hidden states [B, stop - start, taps*E], or None."""
        states = self._states
        ends = [min(stop, length - 1) for length in seqs.length.tolist()]
        if seqs.budget is not None:
            ends = [e * (most > 0) for e, most in zip(ends, seqs.budget.tolist(), strict=True)]
        hidden = None
        if taps and stop > starts[0]:
            size = len(starts), stop - starts[0], len(taps) * self.config.hidden_size
            hidden = torch.zeros(size, dtype=self.dtype, device=self.device)
        for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
            one = replace(seqs.window(row, 1), budget=None)
            if start == 0:
                states.forget(one.rows)
            for first, last, at_once in states.spans(start, end):
                slots = torch.arange(first, last, device=self.device)[None]
                begin = first if at_once else None
                tokens = one.read(slots)
                seen = self.feed(one, tokens, slots, slots, None, taps, 0, True, begin).hidden
                if hidden is not None and seen is not None:
                    hidden[row, first - start : last - start] = seen
            if start < end:
                states.covered[one.rows] = end
        return hidden


@op
def fill(
    lm: LM, seqs: Sequences, span: range, from_root: bool, taps: tuple[int, ...] = ()
) -> Tensor | None:
    """`LM.fill_at` of a span of slots."""
    at = torch.arange(span.start, span.stop, device=lm.device)[None]
    return lm.fill_at(seqs, at, from_root, taps)


def note_emptied(fault: Tensor, logits: Tensor, verdict: Verdict, emitted: Tensor) -> None:
    """Raise fault [B] in rows that gained one of their `emitted` [B, 1] tokens where a generation
    config had ruled out every token: logits [B, N, V] as `LM.verify` returned them."""
    likeliest = logits.amax(-1).gather(1, verdict.path)
    gained = torch.arange(likeliest.shape[1], device=fault.device) < emitted
    fault += (gained & (likeliest == -torch.inf)).any(1)


@op
def spoil(fault: Tensor, logits: Tensor) -> None:
    """Make fault [B] NaN in rows whose logits [B, n, V] are not all finite."""
    fault.add_(logits.amax((1, 2)), alpha=0)  # 0 * inf and 0 * NaN are NaN
