"""The memory of a batch: its sequences, the cache of every model, the state of the drafter.

Rows stay where they are while batches or requests come and go, so that a recorded round can be
replayed for all of them. `Engine.generate` enters a batch at a time, a server a request at a time.
"""

from collections.abc import Iterator, Sequence

import torch
from torch.utils.weak import WeakIdKeyDictionary

from specexp.drafters import Drafter
from specexp.errors import UserError
from specexp.models.lm import LM
from specexp.models.memory import rounded
from specexp.recording import Recorder
from specexp.sequences import Sequences

# of each drafter, the `SlotCache.mark` of the target's cache beside which it was last allocated
BESIDE = WeakIdKeyDictionary()


class Rows:
    """The rows of one engine. Engines that share a target share its cache: each prefills its own
    rows, over whatever another one left there."""

    def __init__(self, target: LM, drafter: Drafter, recorder: Recorder) -> None:
        self.target, self.drafter, self.recorder = target, drafter, recorder
        self.models: tuple[LM, ...] = (target, *drafter.models)
        self.seqs = Sequences.empty(0, 0)
        self.memory: tuple[object, ...] = ()  # identifies what `seqs` was allocated beside

    @torch.inference_mode()
    def allocate(self, B: int, S: int, room: int = 1) -> None:
        """Replace every cache and the drafter's state by empty ones for B rows of S slots. `room`:
        the slots that a round may write (`Tree.room`). Raises UserError if memory is short."""
        self.recorder.clear()
        for lm in self.models:
            lm.cache = None  # free the old caches before free memory is counted
        self.target.room = max(self.target.room, room)
        self.target.allocate(B, S)
        self._allocate_drafter(B, S)

    def _allocate_drafter(self, B: int, S: int) -> None:
        """Allocate the drafter's memory for the B rows of S slots of the target's cache."""
        assert self.target.cache is not None
        for lm in self.drafter.models:
            lm.room = max(lm.room, self.target.room)
        self.drafter.allocate(B, S)
        BESIDE[self.drafter] = self.target.cache.mark

    def reserve(self, B: int, S: int, eos: Sequence[int], room: int) -> None:
        """Allocate B empty rows of S slots, for texts that end at one of these tokens."""
        self.allocate(B, S, room)
        self._new_sequences(eos)

    @torch.inference_mode()
    def enter(self, batch: Sequences) -> Sequences:
        """Copy a batch [B, S] into the first rows and return them, without prefill. Memory grows to
        the largest batch so far and is then reused. Raises UserError if memory is short."""
        B, slots = batch.tokens.shape
        S, (rows, size) = rounded(slots), self._size()
        wider = any(lm.keeps_last_slots_only and lm.room < batch.slack for lm in self.models)
        broken = any(bool(lm.fault.any()) for lm in self.models)  # NaN in a slot
        if rows < B or size < S or wider or broken:
            self._grow(B, S, batch.slack)
        elif self.target.cache and BESIDE.get(self.drafter) is not self.target.cache.mark:
            self._allocate_drafter(rows, size)  # another engine allocated one of the two
        eos = batch.eos.tolist()
        if self.memory != self._identity(eos):
            self.recorder.clear()
            self._new_sequences(eos)
        window = self.seqs.window(0, B, S)
        window.tokens[:, :slots] = batch.tokens
        window.length[:], window.limit[:] = batch.length, batch.limit
        window.stream[:] = batch.stream
        return window

    def prefill(self, seqs: Sequences) -> Iterator[str]:
        """Prefill these rows, the target and then the drafter; yields `target` and `drafter` as
        each is done."""
        for lm in self.models:
            lm.forget(seqs.rows)
        read = int(seqs.length.max()) - 1
        hidden = self.target.prefill(seqs, 0, read, self.drafter.taps)
        yield "target"
        self.drafter.prefill(seqs, hidden)
        self.drafter.catch_up(seqs, read)
        yield "drafter"

    def _grow(self, B: int, S: int, room: int) -> None:
        """Allocate for B rows of S slots, and for no less than before if that fits."""
        rows, size = self._size()
        try:
            self.allocate(max(B, rows), max(S, size), room)
        except UserError:
            if rows <= B and size <= S:
                raise
            self.allocate(B, S, room)

    def _new_sequences(self, eos: Sequence[int]) -> None:
        rows, size = self._size()
        self.seqs = Sequences.empty(rows, size, eos, self.target.device)
        self.budget = torch.empty_like(self.seqs.length)
        self.memory = self._identity(eos)

    def _identity(self, eos: Sequence[int]) -> tuple[object, ...]:
        """Changes with the cache, the EOS tokens and the drafter's state, which an engine that
        shares them may have replaced."""
        state = tuple(part.data_ptr() for part in self.drafter.state)
        cache = self.target.cache and self.target.cache.mark  # the mark does not keep it alive
        return cache, tuple(eos), state

    def _size(self) -> tuple[int, int]:
        """Rows and slots of the target's cache."""
        cache = self.target.cache
        return (cache.batch, cache.size) if cache else (0, 0)

    @torch.inference_mode()
    def move(self, source: int, target: int, length: int) -> None:
        """Move a sequence of `length` tokens to a free row."""
        for cache in {id(lm.cache): lm.cache for lm in self.models}.values():
            assert cache is not None
            same = cache.size == self.seqs.tokens.shape[1]
            cache.copy(source, target, length if same else cache.size)
        own = self.seqs.tokens, self.seqs.length, self.seqs.limit, self.seqs.stream
        for part in (*own, *(lm.fault for lm in self.models), *self.drafter.state):
            part[target] = part[source]

    @torch.inference_mode()
    def leave(self, row: int) -> None:
        """Free a row."""
        self.seqs.length[row] = self.seqs.limit[row] = 1

    @torch.inference_mode()
    def clear(self, row: int) -> None:
        """Zero a row: NaN or infinity in a slot would spoil attention even at weight 0."""
        for lm in self.models:
            assert lm.cache is not None
            lm.cache.clear(row)
            lm.fault[row] = 0
        for part in self.drafter.state:
            part[row] = 0
