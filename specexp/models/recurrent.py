"""State that no mask can take back: linear attention, state spaces, short convolutions.

A library layer with a state has a form for a text and one for a single token. A pass over a draft
runs the latter node by node, each from the state that its parent left; its first and last products,
which read no state, run once for all nodes. States are kept as keys are, one for each of a row's
last slots, so that a roll back is a length here too. No layer's mathematics is known here: which
modules have states, of which shapes, and which products read none is seen by running them.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from specexp.models import scans
from specexp.models.cache import SlotCache
from specexp.models.memory import PREFILL
from specexp.models.scans import FIRST, NOTHING, NOWHERE, Parts, entries_of, twin
from specexp.objects import signature
from specexp.tree import Branches

BY_ROW = {("recurrent", 0)}  # what a scan keeps once a row, and all else by slot
KEEPS = {"update_conv_state", "update_recurrent_state", "set_linear_cache"}  # write a state


class State:
    """The states of one module, in place of its cache. None are there at the beginning of a text.
    The module may change them in place."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

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
        columns = torch.cat([before, x], -1)
        self.parts["conv", state_idx] = columns[..., -size:]
        return columns

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.parts.get(("recurrent", state_idx))

    def update_recurrent_state(self, x: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        self.parts["recurrent", state_idx] = x
        return x

    get_linear_cache = get_recurrent_state

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


class ScanState(State):
    """In a scan or a walk, which keep what they compute themselves (scans.py): keeps nothing."""

    def update_conv_state(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x


class States:
    """The states of all modules of `batch` rows. Node by node: those after each of a row's last
    slots. By scan: those after the text, and what each of the last slots adds to them.

    `room`, `refed`: see `LM`. `covered` [B]: how many tokens of each row are in its states; only
    what refills a row reads it.
    """

    def __init__(
        self, parts: Sequence[Stepwise], batch: int, room: int, refed: int, device: Any
    ) -> None:
        self.size, self.refed = slots_kept(parts, room, refed), refed
        self.covered = torch.zeros(batch, dtype=torch.int64, device=device)
        scanned, self.by_row = parts[0].scanned, _by_row(parts)
        entries = FIRST + batch * self.size
        self.buffers = [
            {
                name: scans.empty(x, batch if name in self.by_row else entries, device)
                for name, x in part.kept.items()
            }
            for part in parts
        ]
        self.window = scans.Window(batch, self.size, _columns(parts), device) if scanned else None
        self.counts = [self.covered, *([self.window.based] if self.window else [])]
        self.most = room + refed if scanned else PREFILL  # tokens of a pass that is not at once
        self.continues = all(part.continues for part in parts)
        self.before = self.after = torch.zeros(0)

    def aim(
        self, rows: slice, slots: Tensor, tokens: Tensor, visible: Branches | None, opens: bool,
        start: int | None = None,
    ) -> None:  # fmt: skip
        """Make the next pass start each token [b, n] from the state of the last slot that it sees
        before its own (`visible`, see `SlotCache.see`), and leave its state at its own.
        `opens`: all tokens before these slots are committed, unlike those before a draft's deeper
        levels. `start`: these are tokens of one text from this slot on, which the modules read
        at once; None: they are read node by node, or by a scan."""
        self.rows, self.start = rows, start
        if self.window:
            n = slots.shape[1] if start is None else 1
            self.window.aim(rows, slots[:, :n], tokens[:, :n], visible, opens)
            if start is not None:
                self.window.based[rows] = slots[:, -1] + 1
                last = torch.arange(-self.window.back, 0, device=slots.device)
                self.before = self.window.entries(rows, slots[:, :1] + last)
                after = self.window.entries(rows, slots[:, -1:] + last + 1)
                self.after = torch.where(after == NOTHING, NOWHERE, after)
            return
        parent = slots - 1
        if visible is not None:
            root, ancestors = visible.root, visible.ancestors
            place = root[..., None] + torch.arange(ancestors.shape[2], device=slots.device)
            parent = torch.where(ancestors & (place < slots[..., None]), place, -1).amax(-1)
            parent = torch.maximum(parent, root - 1)
        before = torch.where(parent < 0, NOTHING, entries_of(rows, parent, self.size))
        after = torch.where(tokens < 0, NOWHERE, entries_of(rows, slots, self.size))
        self.before, self.after = before.t().contiguous(), after.t().contiguous()

    def spans(self, start: int, stop: int) -> Iterator[tuple[int, int, bool]]:
        """The passes [first, last) that read the tokens from `start` to `stop`, and whether each
        reads its tokens at once. The last `refed` are not, since each must leave a state."""
        last = stop - self.refed
        while start < last and (self.continues or not start):
            first, start = start, min(start + PREFILL, last) if self.continues else last
            yield first, start, True
        while start < stop:
            first, start = start, min(start + self.most, stop)
            yield first, start, False

    def read(self, module: int, node: int) -> State:
        """A copy of the states from which a node starts, or a text that is read at once."""
        if self.start == 0:
            return State({})
        parts = self.buffers[module]
        if self.window is None:
            return State({k: x.index_select(0, self.before[node]) for k, x in parts.items()})
        conv = parts["conv", 0].index_select(0, self.before[0]).t()[None]
        whole = {name: x[self.rows].clone() for name, x in parts.items() if name in self.by_row}
        return State({("conv", 0): conv, **whole})

    def write(self, module: int, node: int, state: State) -> None:
        """Keep the states after a node, or after a text that was read at once."""
        for name, x in self.buffers[module].items():
            if name in self.by_row:
                x[self.rows] = state.parts[name]
            elif self.window is None:
                x.index_copy_(0, self.after[node], state.parts[name])
            elif name == ("conv", 0):
                x.index_copy_(0, self.after[0], state.parts[name][0].t())

    def keep(self, rows: slice, source: Tensor, target: Tensor, n: Tensor) -> None:
        """Copy what the next round reads of slots `source` [b, D+1] to `target`, if n [b] draft
        tokens were accepted."""
        if self.window is None:
            last = n[:, None] - torch.arange(self.refed + 1, device=n.device)
            source, target = (x.gather(1, last.clamp(min=0)) for x in (source, target))
        here, there = (entries_of(rows, slots, self.size).flatten() for slots in (source, target))
        for part in self.buffers:
            for name, x in part.items():
                if name not in self.by_row:
                    x.index_copy_(0, there, x.index_select(0, here))

    def forget(self, rows: slice | int) -> None:
        """Begin new texts in these rows."""
        for count in self.counts:
            count[rows] = 0
        for part in self.buffers:
            for name in part.keys() & self.by_row:
                part[name][rows] = 0

    def copy(self, source: int, target: int) -> None:
        for count in self.counts:
            count[target] = count[source]
        for here, there in zip(self.of_row(source), self.of_row(target), strict=True):
            there.copy_(here)

    def clear(self, row: int) -> None:
        self.forget(row)
        for x in self.of_row(row):
            x.zero_()

    def of_row(self, row: int) -> list[Tensor]:
        """The states of a row [...], or what is kept of each slot [size, ...]."""
        slots = slice(FIRST + row * self.size, FIRST + (row + 1) * self.size)
        return [
            x[row] if name in self.by_row else x[slots]
            for part in self.buffers
            for name, x in part.items()
        ]


class Precomputed(nn.Module):
    """In place of a product that was computed for all nodes at once: the output for one node."""

    output: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.output


class Stepwise(nn.Module):
    """In place of a module with a state: the module over every node of a pass.

    `states`: those of one row after one token. `continues`: the module can read several tokens at
    once from a state too, and not only from the beginning. `scanned` (all modules of a network, or
    none): `scan` runs all nodes of a draft together. `walked`: `walk` does, from states by slot.
    Otherwise `alone` runs a pass of one node, and `step` one of several: the module without the
    product that writes its output (`last`), and with `Precomputed` in place of those that read its
    input (`first`).
    """

    def __init__(self, module: nn.Module, number: int) -> None:
        super().__init__()
        self.module, self.number = module, number
        self.input = next(iter(signature(module.forward).parameters))
        self.states: Parts = {}
        self.continues = self.scanned = self.walked = False
        self.scan, self.walk = scans.Scan(module), scans.Walk(module)
        self.first: list[tuple[nn.Module, Precomputed]] = []
        self.last: nn.Module = nn.Identity()
        self.step = module
        self.alone = scans.one_token(module)

    def forward(self, *args: Any, **inputs: Any) -> Any:
        """Its first input is x [b, n, E]; the cache is among the others."""
        inputs |= dict(zip([self.input], args, strict=False))
        x, given = inputs.pop(self.input), args[1:]
        [cache] = [i for i in (*given, *inputs.values()) if isinstance(i, SlotCache)]

        def run(module: Any, x: Tensor, state: State, node: int | None = None) -> Any:
            named = {name: _input(i, state, node) for name, i in inputs.items()}
            return module(x, *(_input(i, state, node) for i in given), **named)

        states = cache.states
        if states is None:
            return self._seen(x, run)
        self.scan.window, self.scan.buffers = states.window, states.buffers[self.number]
        if states.start is None and states.window:
            return run(self.scan.forward, x, ScanState({}))
        if states.start is None and self.walked:
            self.walk.aim(states.buffers[self.number], states.before, states.after)
            return run(self.walk.forward, x, ScanState({}))
        if x.shape[1] == 1 or states.start is not None:
            self.scan.fold()
            whole = self.alone if states.start is None else self.module
            y = run(whole, x, state := states.read(self.number, 0))
            states.write(self.number, -1, state)
            return y
        products = [(place, module(x).split(1, 1)) for module, place in self.first]
        outputs = []
        for node, one in enumerate(x.split(1, 1)):
            for place, product in products:
                place.output = product[node]
            outputs.append(run(self.step, one, state := states.read(self.number, node), node))
            states.write(self.number, node, state)
        return self.last(_joined(outputs))

    def _seen(self, x: Tensor, run: Callable[..., Any]) -> Any:
        """Run the module on the first token of a text, and see what it consists of."""
        linear = ((m, n) for n, m in self.module.named_modules() if isinstance(m, nn.Linear))
        names: dict[nn.Module, str] = dict(linear)
        first: set[nn.Module] = set()
        outputs: list[tuple[nn.Module, Any]] = []

        def seen(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if inputs[0].data_ptr() == x.data_ptr() and inputs[0].shape == x.shape:
                first.add(module)
            outputs.append((module, output))

        hooks = [module.register_forward_hook(seen) for module in names]
        y = run(self.module, x, state := State({}))
        for hook in hooks:
            hook.remove()
        self.states, self.step = state.parts, twin(self.module)
        self.step.forward = scans.one_token(self.step)
        for module in first:
            self.first.append((module, place := Precomputed()))
            self.step.set_submodule(names[module], place)
        for module in {module for module, output in outputs if output is y} - first:
            self.last = module
            self.step.set_submodule(names[module], nn.Identity())
        if self.scan.known:
            run(self.scan.forward, x, ScanState({}))
        return y

    @property
    def kept(self) -> Parts:
        """What is kept of one row after one token."""
        if not self.scanned:
            return self.states
        return self.scan.sizes | {name: self.states[name] for name in self.states.keys() & BY_ROW}


def _input(x: Any, state: State, node: int | None) -> Any:
    """Input x as a module with a state gets it, or one node: `state` for a cache, no mask."""
    if not isinstance(x, Tensor):
        return state if isinstance(x, SlotCache) else x
    return None if x.ndim == 4 else x if node is None else x[:, node : node + 1]


def _joined(outputs: list[Any]) -> Any:
    """The outputs [b, 1, ...] of all nodes, concatenated; a tuple if each of them is a tuple."""
    if isinstance(outputs[0], Tensor):
        return torch.cat(outputs, 1)
    return tuple(_joined(list(part)) for part in zip(*outputs, strict=True))


def keeps_state(module: nn.Module) -> bool:
    """Whether a module writes a state to its cache, itself or in a method that it calls."""
    forward: Any = inspect.unwrap(type(module).forward)
    called = (getattr(type(module), name, None) for name in forward.__code__.co_names)
    own = forward, *filter(inspect.isfunction, called)
    return any(KEEPS & set(f.__code__.co_names) for f in own)


def stepwise(module: Any) -> tuple[Any, tuple[Stepwise, ...]]:
    """A causal LM's twin, in which modules with states run over drafts, and what stands for these.
    Of an LM with states there is one twin."""
    if module in _TWINS:
        return _TWINS[module]
    whole = twin(module)
    paths = [name for name, part in module.named_modules() if keeps_state(part)]
    paths = [p for p in paths if not any(p.startswith(f"{above}.") for above in paths)]
    parts = tuple(Stepwise(whole.get_submodule(path), i) for i, path in enumerate(paths))
    for path, part in zip(paths, parts, strict=True):
        whole.set_submodule(path, part)
    if parts:
        _TWINS[module] = whole, parts
    return whole, parts


_TWINS: WeakKeyDictionary[Any, tuple[Any, tuple[Stepwise, ...]]] = WeakKeyDictionary()


def slots_kept(parts: Sequence[Stepwise], room: int, refed: int) -> int:
    """The slots of a row whose states are kept; by scan, a round's draft beside the last one's."""
    if not parts[0].scanned:
        return room + refed + 1
    return 2 * room + refed + _columns(parts)


def _columns(parts: Sequence[Stepwise]) -> int:
    """The most tokens that one of their convolutions reads, the current one included."""
    return max(part.states["conv", 0].shape[-1] for part in parts)


def _by_row(parts: Sequence[Stepwise]) -> set[tuple[str, int]]:
    """The names of what is kept once a row."""
    return BY_ROW if parts[0].scanned else set()


def state_bytes(parts: Sequence[Stepwise], room: int, refed: int) -> int:
    """Bytes of the states of a row, see `States`."""
    if not parts:
        return 0
    slots, by_row = slots_kept(parts, room, refed), _by_row(parts)
    kept = ((name, x.nbytes) for part in parts for name, x in part.kept.items())
    return sum(size if name in by_row else size * slots for name, size in kept)


@torch.inference_mode()
def examine(
    parts: Sequence[Stepwise], cache: SlotCache, run: Callable[[Tensor, int | None], Any]
) -> None:
    """Find out, by running them, what modules with states consist of, whether they can continue a
    text (`continues`), and whether a scan gives the logits of their one-token form (`scanned`), or
    a walk does (`walked`).

    `run(slots [1, n], last)`: a pass of their network over `cache`, of one row and eight slots. On
    the device `meta` nothing can be compared, and a scan is taken to be right."""
    device = next(parts[0].parameters()).device
    cache.aim(slice(0, 1), first_slot := torch.zeros(1, 1, dtype=torch.int64, device=device), 8)
    run(first_slot, 0)
    convolutions = ([i for kind, i in part.states if kind == "conv"] for part in parts)
    scanned = all(part.scan.known for part in parts) and all(own == [0] for own in convolutions)

    def together(on: bool) -> None:
        for part in parts:
            part.scanned = on and scanned
            part.walked = on and part.walk.known and part.states["recurrent", 0].ndim == 3

    if device.type == "meta":
        together(True)
        return

    def feed(first: int, last: int, start: int | None) -> tuple[Tensor, list[list[Tensor]]]:
        slots = torch.arange(first, last, device=device)[None]
        cache.aim(slice(0, 1), slots, 8)
        states.aim(slice(0, 1), slots, slots, None, True, start)
        logits = run(slots, None)[0]
        return logits, [[x[-1:].clone() for x in part.values()] for part in states.buffers]

    def agree(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
        pairs = ((a.float(), b.float()) for a, b in zip(ours, theirs, strict=True))
        return all((a - b).norm() <= 0.05 * b.norm() for a, b in pairs)

    states = cache.states = States(parts, 1, 7, 0, device)
    feed(0, 5, 0)
    (_, at_once), (logits, stepwise) = feed(5, 8, 5), feed(5, 8, None)
    for part, ours, theirs in zip(parts, at_once, stepwise, strict=True):
        part.continues = agree(ours, theirs)
    together(True)
    states = cache.states = States(parts, 1, 7, 0, device)
    feed(0, 5, 0)
    together(agree([feed(5, 8, None)[0]], [logits]))
