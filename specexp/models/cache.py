"""A static KV cache, written at given slots by an unmodified transformers model.

A model calls `update` once per layer and pass. The layer writes the new keys and values at the
slots announced by `aim` and returns the whole buffer. The mask decides which slots are read, so a
roll back costs nothing: a row's length shrinks, and stale slots are overwritten later. Only for a
tree must the accepted path be moved to the front (`keep`). A layer with a window keeps only the
last slots, in a ring: slot s is at place s % R of R + 1, and padding goes to the last place, which
is never read.

Some modules count slots where they mean positions, which differ in a tree. The functions at the end
change a copy of such a module, so that it counts positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from inspect import getmodule
from typing import TYPE_CHECKING, Any
from weakref import proxy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from specexp.models.memory import Layer, layer_slots, layers
from specexp.models.scans import replaced
from specexp.objects import signature
from specexp.ops import op
from specexp.sequences import Sequences, Verdict
from specexp.tree import Branches, line_mask

if TYPE_CHECKING:
    from specexp.models.recurrent import States

# kinds of layers that have both attention and a state: the names of their masks
BOTH = {
    "hybrid": ("full_attention", "linear_attention"),
    "hybrid_sliding": ("sliding_attention", "linear_attention"),
}


@op
def store(
    keys: Tensor, values: Tensor, places: Tensor, new_keys: Tensor, new_values: Tensor
) -> None:
    """Write new keys and values [b, H, n, d] at these places [b, 1, n, 1] of b rows of a layer's
    keys and values [b, H, S, d]."""
    keys.scatter_(2, places.expand_as(new_keys), new_keys)
    values.scatter_(2, places.expand_as(new_values), new_values)


class Slots(CacheLayerMixin):
    """One layer: keys and values [B, H, S, d], which a pass writes at `cache.places[S]` of
    `cache.rows`. If S is less than the cache's size, the layer is a ring. `is_sliding`: it reads a
    window or a chunk; by that Inkling 2 finds a layer of each kind to ask for distances."""

    def __init__(self, cache: SlotCache, span: int) -> None:
        super().__init__()
        self.cache: Any = proxy(cache)  # a reference cycle would delay freeing the buffers
        self.size, self.is_sliding = cache.sizes[span], span > 0
        self.index: Tensor | None = None  # [B, 1, S, d], the keys of an indexer, if it has one

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        B = self.cache.batch
        self.keys, self.values = (
            x.new_zeros(B, x.shape[1], self.size, x.shape[-1]) for x in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.keys[self.cache.rows], self.values[self.cache.rows]
        store(keys, values, self.cache.places[self.size], key_states, value_states)
        return keys[:, :, : self.cache.seen], values[:, :, : self.cache.seen]

    def update_indexer(self, states: Tensor) -> Tensor:
        """The same for the keys [b, n, d] of an indexer, which chooses the keys to attend to."""
        if self.index is None:
            self.index = states.new_zeros(self.cache.batch, 1, self.size, states.shape[-1])
        rows = self.index[self.cache.rows]
        places = self.cache.places[self.size]
        rows.scatter_(2, places.expand_as(states[:, None]), states[:, None])
        return rows[:, 0, : self.cache.seen]

    @property
    def indexer_position_ids(self) -> Tensor:
        """The positions [3, b, seen] of what the slots hold, by which Qwen 4 rotates the keys of
        indexers. They follow from what this pass sees: what the module writes back is not kept."""
        _, place, seen = self.cache.placed(0)
        return torch.where(seen, place, 0).amax(1).expand(3, -1, -1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor) -> None:
        pass

    @property
    def buffers(self) -> Iterator[Tensor]:
        """What it holds, [B, H, S, d]: nothing if it reads another layer's keys, or none."""
        if self.is_initialized:
            yield from (self.keys, self.values)
        if self.index is not None:
            yield self.index

    @op
    def keep(self, rows: slice, source: Tensor, slots: Tensor) -> None:
        """Copy slots `source` [b, n] of these b rows to `slots` [b, n]."""
        for buffer in (whole[rows] for whole in self.buffers):
            moved = torch.take_along_dim(buffer, source[:, None, :, None], 2)
            buffer.scatter_(2, slots[:, None, :, None].expand_as(moved), moved)

    def get_seq_length(self) -> int:
        return 0  # positions and mask are always explicit; a count must not influence anything

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.seen, 0

    def get_max_length(self) -> int:
        return self.cache.size


class SlotCache(Cache):
    """A static buffer of `batch` rows of `size` slots per layer; call `aim` before each pass.

    `kinds`: its layers; a number stands for that many layers that read every slot. `room`: slots
    from the root on that a round may write. `states`: of the layers that keep a state. `mark`:
    identifies this buffer; no other cache has an equal one.
    """

    def __init__(self, kinds: Sequence[Layer] | int, batch: int, size: int, room: int = 1) -> None:
        self.kinds = (Layer(),) * kinds if isinstance(kinds, int) else tuple(kinds)
        self.mark = object()
        self.batch, self.size = batch, size
        self.states: States | None = None
        self.sizes = {layer.span: layer_slots(layer.span, size, room) for layer in self.kinds}
        self.places: dict[int, Tensor] = {}  # where a pass writes [b, 1, n, 1], by a layer's size
        self.see(None)
        super().__init__(layers=[Slots(self, layer.span) for layer in self.kinds])

    def aim(
        self, rows: slice, slots: Tensor, seen: int, tokens: Tensor | None = None,
        visible: Branches | None = None,
    ) -> None:  # fmt: skip
        """Make the next pass write tokens [b, n] (-1: padding) at slots [b, n] of these b rows, the
        furthest slot last, and read the first `seen` slots. `visible`: see `see`."""
        B, n = slots.shape
        self.rows, self.slots, self.seen = rows, slots.reshape(B, 1, n, 1), seen
        self.see(visible)
        for span, size in self.sizes.items():
            assert size == self.size or n + span <= size, "no room for the pass"
            places = self.place(slots, size)
            if size < self.size and tokens is not None:
                places = places.masked_fill(tokens < 0, size - 1)
            self.places[size] = places.reshape(B, 1, n, 1)

    def see(self, visible: Branches | None) -> None:
        """Let each token of the pass see the slots in `visible`; None: its own and all before."""
        self.visible = visible
        self._whole: Tensor | None = None
        self.positions: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # see `placed`

    def place(self, slots: Tensor, size: int) -> Tensor:
        """Where a layer of this size keeps these slots."""
        return slots if size == self.size else slots % (size - 1)

    def held(self, size: int) -> Tensor:
        """The slot [b or 1, 1, m] that each place of a layer of this size holds once this pass has
        written; negative: none."""
        place = torch.arange(min(self.seen, size), device=self.slots.device)[None, None]
        if size == self.size:
            return place
        first = self.slots[:, :, -1] + 2 - size
        return torch.where(place < size - 1, first + (place - first) % (size - 1), -1)

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """What an attention adds to the indices of a pass's tokens before it subtracts those of
        keys: an object that makes the difference a distance by position."""
        own, place, _ = self.placed(self.kinds[layer_idx].span)
        return Distances((own - place)[:, None])

    def mask(self, visible: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Additive mask [b, 1, n, seen]: 0 where a slot is visible, else the least finite number.
        visible [b, n, seen]; None: each token sees its own slot and all before it."""
        if visible is None:
            visible = line_mask(self.slots[:, 0, :, 0], self.seen)
        least = torch.finfo(dtype).min
        return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, least)[:, None]

    def masks(self, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
        """The mask of every kind of layer, by its name; one mask alone if all see the same."""
        return self.by_kind(lambda *span: self.mask(self.near(*span), dtype))

    def by_kind(self, make: Callable[[int, int], Tensor]) -> Tensor | dict[str, Tensor]:
        """What `make` returns for the window and chunk of every kind of layer; see `masks`."""
        spans = {layer.kind: (layer.window, layer.chunk) for layer in self.kinds}
        values = {span: make(*span) for span in set(spans.values())}
        if len(values) == 1:
            return values.popitem()[1]
        return {name: values[s] for kind, s in spans.items() for name in BOTH.get(kind, (kind,))}

    @property
    def whole(self) -> Tensor | None:
        """Which of the first `seen` slots each token sees, bool [b, n, seen]; None: see `see`."""
        if self._whole is None and self.visible is not None:
            self._whole = self.visible.mask(self.seen)
        return self._whole

    def placed(self, span: int) -> tuple[Tensor, Tensor, Tensor]:
        """For layers that read `span` positions back (0: all): the position of each token of this
        pass [b, n, 1], the positions of the tokens in the layer's m places [b or 1, n or 1, m], and
        whether each token sees them [b, n, m]. Kept, because modules ask in every layer."""
        if span not in self.positions:
            self.positions[span] = self._placed(span)
        return self.positions[span]

    def _placed(self, span: int) -> tuple[Tensor, Tensor, Tensor]:
        """The slots that a token sees hold one text in order, so a slot's position is the number of
        visible slots before it."""
        held = self.held(self.sizes.get(span, self.size))
        if (visible := self.whole) is None:
            own, place = self.slots[:, 0], held
            return own, place, (place >= 0) & (place <= own)
        place = visible.cumsum(-1) - 1
        own, at = place[:, :, -1:], held.clamp(min=0).expand(*visible.shape[:2], -1)
        return own, place.gather(2, at), visible.gather(2, at) & (held >= 0)

    def near(self, window: int, chunk: int) -> Tensor | None:
        """Which places of a layer each token sees, within its window and chunk, bool [b, n, m];
        None: see `see`."""
        if not window and not chunk:
            return self.whole
        own, place, near = self._placed(window or chunk)
        if window:
            near = near & (own - place < window)
        return near & (own // chunk == place // chunk) if chunk else near

    def keep(self, seqs: Sequences, verdict: Verdict) -> None:
        """Move the slots of the accepted path to the front of this round's draft, before commit."""
        depth = torch.arange(verdict.path.shape[1], device=verdict.path.device)[None]
        target = seqs.places(depth)
        source = torch.where(depth <= verdict.n[:, None], seqs.places(verdict.path), target)
        moves = {s: (self.place(source, s), self.place(target, s)) for s in self.sizes.values()}
        for layer in self.layers:
            layer.keep(seqs.rows, *moves[layer.size])
        if self.states:
            self.states.keep(seqs.rows, source, target, verdict.n)

    def copy(self, source: int, target: int, slots: int) -> None:
        """Copy the first `slots` slots of row `source` to row `target`."""
        for buffer in self._buffers():
            buffer[target, :, :slots] = buffer[source, :, :slots]
        if self.states:
            self.states.copy(source, target)

    def clear(self, row: int) -> None:
        """Zero a row: NaN in a slot would spoil attention even at weight 0."""
        for buffer in self._buffers():
            buffer[row] = 0
        if self.states:
            self.states.clear(row)

    def _buffers(self) -> Iterator[Tensor]:
        for layer in self.layers:
            yield from layer.buffers


class Distances:
    """Distances [b, 1, n, m] by position, where Inkling's attention subtracts the places of m keys
    from those of n tokens. It scales by place too, past the context (`servable.limits`)."""

    def __init__(self, distance: Tensor) -> None:
        self.distance = distance

    def __radd__(self, _: Any) -> Distances:
        return self

    __add__ = __sub__ = __radd__

    def __getitem__(self, part: Any) -> Any:
        return self.distance if len(part) == 4 else self  # all four before transformers 5.24

    def clamp(self, least: int, most: int) -> Tensor:
        return self.distance.clamp(least, most)

    def __lt__(self, bound: int) -> Tensor:
        return self.distance < bound

    def __ge__(self, bound: int) -> Tensor:
        return self.distance >= bound

    def float(self) -> Tensor:
        return self.distance.new_ones(1).float()


class EachRow:
    """A bias [b, H, n, S] where MPT's attention takes one for all rows, [H, n, S]."""

    def __init__(self, bias: Tensor) -> None:
        self.bias, self.shape = bias, bias.shape[1:]
        self.size = self.shape.__getitem__

    def __getitem__(self, part: Any) -> EachRow:
        return self

    def __radd__(self, scores: Tensor) -> Tensor:
        return scores + self.bias


def bias_by_position(module: Any) -> None:
    """Let the biases of an LM with ALiBi go by the place of a key among those that a token sees:
    its position, which is not its slot in a tree."""
    library = getmodule(type(module))
    of_line: Any = getattr(library, "build_alibi_tensor", None)  # of Bloom and Falcon
    of_mpt: Any = getattr(library, "build_mpt_alibi_tensor", None)

    def placed(line: Tensor, mask: Tensor) -> Tensor:
        """The biases [b, H, n, S] under a mask [b, 1, n, S]; line [H, 1, S]: those by slot."""
        return line[:, 0, (mask == 0).cumsum(-1)[:, 0] - 1].transpose(0, 1)

    def biases(mask: Tensor, H: int, dtype: torch.dtype) -> Tensor:
        every = mask.new_ones(1, mask.shape[-1], dtype=torch.int64)
        return placed(of_line(every, H, dtype), mask).flatten(0, 1)

    def enter(base: Any, args: Any, inputs: dict[str, Any]) -> None:
        mask = inputs["attention_mask"]
        line = of_mpt(base.num_heads, mask.shape[-1], device=mask.device)
        base.build_mpt_alibi_tensor = lambda *_, **__: EachRow(placed(line, mask))

    def leave(base: Any, *_: Any) -> None:
        del base.build_mpt_alibi_tensor  # and the mask

    if of_line and getattr(module.config, "alibi", True):
        base = module.base_model
        base.build_alibi_tensor = biases
        base.forward = replaced(base, {"build_alibi_tensor": biases})
    if of_mpt:
        module.base_model.register_forward_pre_hook(enter, with_kwargs=True)
        module.base_model.register_forward_hook(leave)


class Positions(nn.Module):
    """A table of positions that embeds those given to its model, whatever its decoder counts."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.weight, self.offset = table.weight, getattr(table, "offset", 0)

    def enter(self, module: Any, args: Any, inputs: dict[str, Any]) -> Any:
        if "position_ids" in inputs:
            self.at = inputs.pop("position_ids") + self.offset
        return args, inputs

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return F.embedding(self.at, self.weight)


def count_by_position(module: Any) -> None:
    """Let a decoder that numbers the tokens of a pass by the length of its cache (Bart and what
    descends from it) embed the positions that its model is given."""
    if "position_ids" in signature(module.forward).parameters:
        return
    for decoder in module.modules():
        if isinstance(table := getattr(decoder, "embed_positions", None), nn.Embedding):
            decoder.embed_positions = own = Positions(table)
            for part in (module, module.base_model):
                part.register_forward_pre_hook(own.enter, with_kwargs=True)


def window_by_layer(module: Any) -> None:
    """Give the layers of a model that takes one mask for all, and cuts windows by slot (GPT-Neo),
    the mask of their kind."""
    if not getattr(module.config, "attention_layers", None):
        return

    def within(kind: str, block: Any, args: Any, inputs: dict[str, Any]) -> Any:
        masks = inputs["attention_mask"]
        return args, inputs | {"attention_mask": masks[kind] if isinstance(masks, dict) else masks}

    def as_given(attention_mask: Any, **_: Any) -> Any:
        return attention_mask

    base = module.base_model
    base.forward = replaced(base, {"create_causal_mask": as_given})
    for block, layer in zip(base.h, layers(module.config), strict=True):
        own = block.attn.attention
        own.bias = own.bias.new_ones(1, 1, 1, 1).expand_as(own.bias)
        block.register_forward_pre_hook(partial(within, layer.kind), with_kwargs=True)
