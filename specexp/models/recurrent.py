"""State that no mask can take back: linear attention, state spaces, short convolutions.

A library layer with a state has a form for a text and one for a single token. A pass over a draft
runs the latter node by node, each from the state that its parent left; its first and last products,
which read no state, run once for all nodes. States are kept as keys are, one for each of a row's
last slots, so that a roll back is a length here too. No layer's mathematics is known here: which
modules have states, of which shapes, and which products read none is seen by running them.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from specexp.models.cache import SlotCache
from specexp.models.memory import PREFILL
from specexp.tree import Branches

Parts: TypeAlias = dict[tuple[str, int], Tensor]
"""The states of one module [b, ...], by kind and number."""

NOWHERE, NOTHING, FIRST = 0, 1, 2  # entries: where padding is written; empty; the first slot's
KEEPS = {"update_conv_state", "update_recurrent_state", "set_linear_cache"}


class State:
    """The states of one module, in place of its cache. None are there at the beginning of a text.
    The module may change them in place. `follows` [b, 1, n]: 0 where a token is not the one before
    the next; `columns`: those of all tokens, after the ones that were there."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.follows: Tensor | None = None
        self.columns: Parts = {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.parts.get(("conv", state_idx))

    def update_conv_state(
        self, x: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> Tensor:
        """Append columns x [b, C, n], keep the last ones, and return all there were."""
        before = self.get_conv_state(layer_idx, state_idx)
        size = conv_kernel_size or x.shape[-1] if before is None else before.shape[-1]
        if before is None:
            before = x.new_zeros(*x.shape[:-1], max(0, size - x.shape[-1]))
        columns = torch.cat([before, x if self.follows is None else x * self.follows], -1)
        self.parts["conv", state_idx] = columns[..., -size:]
        self.columns["conv", state_idx] = columns
        return columns

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.parts.get(("recurrent", state_idx))

    def update_recurrent_state(self, x: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        self.parts["recurrent", state_idx] = x
        return x

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, x: Tensor) -> None:
        self.update_recurrent_state(x, layer_idx)

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return bool(self.parts)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    # before transformers 5.2x a module asked its layer of the cache, not the cache

    record_past = False

    @property
    def layers(self) -> Mapping[int, State]:
        return defaultdict(lambda: self)

    @property
    def conv_states(self) -> dict[int, Tensor]:
        return {i: x for (kind, i), x in self.parts.items() if kind == "conv"}

    @property
    def recurrent_states(self) -> dict[int, Tensor]:
        return {i: x for (kind, i), x in self.parts.items() if kind == "recurrent"}


class States:
    """The states of all modules after each of the last slots of `batch` rows, as many as a round
    may write and need: `room` from the root on, `again` before it, and one. `parts`: of one row.

    `covered` [B]: how many tokens of each row are in them; only what refills a row reads it.
    """

    def __init__(
        self, parts: Sequence[Parts], batch: int, room: int, again: int, device: Any
    ) -> None:
        self.size, self.again = room + again + 1, again
        entries = FIRST + batch * self.size
        self.buffers = [
            {name: x.new_zeros(entries, *x.shape[1:], device=device) for name, x in part.items()}
            for part in parts
        ]
        self.covered = torch.zeros(batch, dtype=torch.int64, device=device)
        self.start: int | None = None
        self.follows: Tensor | None = None
        self.before: Sequence[Tensor] = ()
        self.after: Sequence[Tensor] = ()

    def aim(
        self, rows: slice, slots: Tensor, tokens: Tensor, visible: Branches | None,
        start: int | None = None,
    ) -> None:  # fmt: skip
        """Make the next pass start each token [b, n] from the state of the last slot that it sees
        before its own (`visible`, see `lm.Network`), and leave its state at its own.
        `start`: of a text from this slot on, which the pass runs in one go."""
        parent = slots - 1
        if visible is not None:
            root, ancestors = visible.root, visible.ancestors
            place = root[..., None] + torch.arange(ancestors.shape[2], device=slots.device)
            parent = torch.where(ancestors & (place < slots[..., None]), place, -1).amax(-1)
            parent = torch.maximum(parent, root - 1)
        before = torch.where(parent < 0, NOTHING, self._entries(rows, parent))
        after = torch.where(tokens < 0, NOWHERE, self._entries(rows, slots))
        self.start, self.follows = start, None
        if visible is None:
            self.follows = nn.functional.pad(slots.diff() != 0, (0, 1), value=True)[:, None]
        self.before = before.t().contiguous().unbind()
        self.after = after.t().contiguous().unbind()

    def _entries(self, rows: slice, slots: Tensor) -> Tensor:
        """Where the states of slots [b, n] of these rows are."""
        row = torch.arange(rows.start, rows.stop, device=slots.device)[:, None]
        return FIRST + row * self.size + slots % self.size

    def read(self, module: int, node: int) -> State:
        """A copy of what a node starts from."""
        if self.start == 0:
            return State({})
        parts = self.buffers[module]
        return State({k: x.index_select(0, self.before[node]) for k, x in parts.items()})

    def write(self, module: int, node: int, state: State) -> None:
        for name, x in self.buffers[module].items():
            x.index_copy_(0, self.after[node], state.parts[name])

    def write_all(self, module: int, state: State) -> None:
        """Write what every token of a chain leaves: its column and those before it."""
        for name, x in self.buffers[module].items():
            windows = state.columns[name].unfold(-1, x.shape[-1], 1)[:, :, 1:]  # [b, C, n, size]
            x.index_copy_(0, torch.cat(list(self.after)), windows.permute(2, 0, 1, 3).flatten(0, 1))

    def keep(self, rows: slice, source: Tensor, target: Tensor, n: Tensor) -> None:
        """Copy what the next round reads of the states of slots `source` [b, D+1] to `target`, if n
        [b] draft tokens were accepted."""
        last = n[:, None] - torch.arange(self.again + 1, device=n.device)
        here, there = (
            self._entries(rows, slots.gather(1, last.clamp(min=0))).flatten()
            for slots in (source, target)
        )
        for part in self.buffers:
            for x in part.values():
                x.index_copy_(0, there, x.index_select(0, here))

    def copy(self, source: int, target: int) -> None:
        self.covered[target] = self.covered[source]
        for here, there in zip(self.of_row(source), self.of_row(target), strict=True):
            there.copy_(here)

    def clear(self, row: int) -> None:
        self.covered[row] = 0
        for x in self.of_row(row):
            x.zero_()

    def of_row(self, row: int) -> list[Tensor]:
        """The states of a row [size, ...]."""
        here = slice(FIRST + row * self.size, FIRST + (row + 1) * self.size)
        return [x[here] for part in self.buffers for x in part.values()]


class Given(nn.Module):
    """In place of a product that has been computed for all nodes: one node's."""

    now: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.now


class Stepwise(nn.Module):
    """In place of a module with a state: the module over every node of a pass.

    `states`: those of one row after one token. `continues`: whether the module runs over several
    tokens at once from a state too, and not only from the beginning; `by_columns`: and then leaves
    what its one-token form leaves, the last columns. `first`: the products that
    read the module's input, and what stands for them in `step`, which is the module over one node.
    `last`: the product that writes its output, which `step` leaves out.
    """

    def __init__(self, module: nn.Module, number: int) -> None:
        super().__init__()
        self.module, self.number = module, number
        self.input = next(iter(inspect.signature(module.forward).parameters))
        self.states: Parts = {}
        self.continues = self.by_columns = False
        self.first: list[tuple[nn.Module, Given]] = []
        self.last: nn.Module = nn.Identity()
        self.step = module

    def forward(self, *args: Any, **inputs: Any) -> Any:
        """Its first input is x [b, n, E]; the cache is among the others."""
        inputs |= dict(zip([self.input], args, strict=False))
        x, given = inputs.pop(self.input), args[1:]
        [cache] = [i for i in (*given, *inputs.values()) if isinstance(i, SlotCache)]

        def run(module: nn.Module, x: Tensor, state: State) -> Any:
            named = {name: _its(i, state) for name, i in inputs.items()}
            return module(x, *(_its(i, state) for i in given), **named)

        states = cache.states
        if states is None:
            return self._seen(x, run)
        if states.start is not None:
            y = run(self.module, x, state := states.read(self.number, 0))
            states.write(self.number, -1, state)
            return y
        if x.shape[1] == 1:
            y = run(self.module, x, state := states.read(self.number, 0))
            states.write(self.number, 0, state)
            return y
        if self.by_columns and states.follows is not None:
            state = states.read(self.number, 0)
            state.follows = states.follows
            y = run(self.module, x, state)
            states.write_all(self.number, state)
            return y
        products = [(place, module(x).split(1, 1)) for module, place in self.first]
        outputs = []
        for node, one in enumerate(x.split(1, 1)):
            for place, product in products:
                place.now = product[node]
            outputs.append(run(self.step, one, state := states.read(self.number, node)))
            states.write(self.number, node, state)
        return self.last(_joined(outputs))

    def _seen(self, x: Tensor, run: Callable[..., Any]) -> Any:
        """Run the module on the first token of a text, and see what it consists of."""
        first: dict[str, nn.Module] = {}
        outputs: list[tuple[str, Any]] = []

        def watch(name: str, module: nn.Module) -> Any:
            def seen(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
                if inputs[0].data_ptr() == x.data_ptr() and inputs[0].shape == x.shape:
                    first[name] = module
                outputs.append((name, output))

            return module.register_forward_hook(seen)

        products = {n: m for n, m in self.module.named_modules() if isinstance(m, nn.Linear)}
        hooks = [watch(*product) for product in products.items()]
        y = run(self.module, x, state := State({}))
        for hook in hooks:
            hook.remove()
        self.states, self.step = state.parts, twin(self.module)
        for name, module in first.items():
            self.first.append((module, place := Given()))
            self.step.set_submodule(name, place)
        for name in {name for name, output in outputs if output is y} - first.keys():
            self.last = products[name]
            self.step.set_submodule(name, nn.Identity())
        return y


def _its(x: Any, state: State) -> Any:
    """An input of a module with a state: its own state in place of the cache, and no mask."""
    if isinstance(x, SlotCache):
        return state
    return None if isinstance(x, Tensor) and x.ndim == 4 else x


def _joined(outputs: list[Any]) -> Any:
    """The outputs [b, 1, ...] of all nodes as one, or as many as each of them is."""
    if isinstance(outputs[0], Tensor):
        return torch.cat(outputs, 1)
    return tuple(_joined(list(part)) for part in zip(*outputs, strict=True))


def twin(module: Any) -> Any:
    """The same module with the same weights, in which parts can be replaced."""
    shared = [*module.parameters(), *module.buffers(), getattr(module, "config", None)]
    return copy.deepcopy(module, {id(x): x for x in shared})


def keeps_state(module: nn.Module) -> bool:
    """Whether a module writes a state to its cache."""
    return bool(KEEPS & set(inspect.unwrap(type(module).forward).__code__.co_names))


def stepwise(module: Any) -> tuple[Any, tuple[Stepwise, ...]]:
    """A causal LM's twin in which modules with states run over drafts, and what stands for them;
    the LM itself, if it has none."""
    named = module.named_modules() if isinstance(module, nn.Module) else ()
    paths = [name for name, part in named if keeps_state(part)]
    if not paths:
        return module, ()
    if module not in _TWINS:
        whole = twin(module)
        parts = tuple(Stepwise(whole.get_submodule(path), i) for i, path in enumerate(paths))
        for path, part in zip(paths, parts, strict=True):
            whole.set_submodule(path, part)
        _TWINS[module] = whole, parts
    return _TWINS[module]


_TWINS: WeakKeyDictionary[Any, tuple[Any, tuple[Stepwise, ...]]] = WeakKeyDictionary()


def state_bytes(parts: Sequence[Stepwise]) -> int:
    """Bytes of the states of one row after one token."""
    return sum(x.nbytes for part in parts for x in part.states.values())


def spans(
    start: int, stop: int, again: int, parts: Sequence[Stepwise]
) -> Iterator[tuple[int, int, bool]]:
    """The passes [first, last) that read the tokens from `start` to `stop`, and whether at once:
    not the last `again`, which will be fed again and so leave a state each."""
    continues, last = all(part.continues for part in parts), stop - again
    while start < last and (continues or not start):
        first, start = start, min(start + PREFILL, last) if continues else last
        yield first, start, True
    while start < stop:
        first, start = start, min(start + PREFILL, stop)
        yield first, start, False


@torch.inference_mode()
def examine(parts: Sequence[Stepwise], cache: SlotCache, run: Callable[[Tensor], Any]) -> None:
    """See what modules with states consist of, by passes `run(slots [1, n])` of their network over
    a cache of one row and eight slots, and whether they continue a text at once: that not on
    `meta`, where there are shapes alone."""
    device = next(parts[0].parameters()).device
    cache.aim(slice(0, 1), first_slot := torch.zeros(1, 1, dtype=torch.int64, device=device), 8)
    run(first_slot)
    if device.type == "meta":
        return
    states = cache.states = States([part.states for part in parts], 1, 7, 0, device)

    def feed(first: int, last: int, start: int | None) -> list[list[Tensor]]:
        slots = torch.arange(first, last, device=device)[None]
        cache.aim(slice(0, 1), slots, 8)
        states.aim(slice(0, 1), slots, slots, None, start)
        run(slots)
        return [[x[-3:].clone() for x in part.values()] for part in states.buffers]

    def agree(ours: list[Tensor], theirs: list[Tensor]) -> bool:
        pairs = zip(ours, theirs, strict=True)
        return all((a - b).norm() <= 0.05 * b.norm() for a, b in pairs)

    feed(0, 5, 0)
    at_once, stepwise = feed(5, 8, 5), feed(5, 8, None)
    for part, ours, theirs in zip(parts, at_once, stepwise, strict=True):
        part.continues = agree([x[-1] for x in ours], [x[-1] for x in theirs])
        part.by_columns = part.continues and all(kind == "conv" for kind, _ in part.states)
    for part, ours, theirs in zip(parts, feed(5, 8, None), stepwise, strict=True):
        part.by_columns = part.by_columns and agree(ours, theirs)
