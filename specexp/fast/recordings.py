"""Rounds that are recorded once and then replayed: what CUDA graphs and replays on a CPU share.

Run operation by operation, a round of a small model spends much of its time in Python. A replay
does without Python, if the recorded function keeps to three conditions: no value reaches the host,
every shape is known beforehand, and lasting state is changed in place, so that all memory stays
where it is. Random numbers need no recorded state: noise is a function of rows and lengths
(sampling.py), which are in that memory too. The first calls of a function are warm-ups, run
operation by operation, so that libraries allocate what they need before the recording. A function
that cannot be recorded keeps running that way.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from specexp.recording import Recorder, Reports
from specexp.sequences import Sequences
from specexp.tree import Tree

if TYPE_CHECKING:
    from specexp.engine import Engine

log = logging.getLogger("specexp")
T = TypeVar("T")

MAX_RECORDINGS = 64  # recordings kept; the least recently used is dropped first


class Refused(Exception):
    """A function cannot be recorded, and has done nothing; the message, one line, says why."""


class Tape:
    """Records functions of one device, so that they can be replayed. `warm` and `ahead`: see
    `Recorder`."""

    warm, ahead = 1, 0

    def run(self, fn: Callable[[], T]) -> T:
        """Call `fn` as a warm-up."""
        return fn()

    def record(self, fn: Callable[[], T], kind: Hashable) -> tuple[Callable[[], Any] | None, T]:
        """Run `fn` once and record it. Returns its replay, or None if it can only be called again,
        and its result. A replay overwrites the result, and so may the replay or recording of any
        other function of the same `kind` (None: of no kind). May raise Refused."""
        raise NotImplementedError

    def repeat(self, replay: Callable[[], Any] | None, most: int, report: Tensor) -> Reports:
        """Replay a round up to `most` more times in one call, none of them once a row has ended.
        `report`: where the round writes its report. Returns the reports; none if there is no such
        call."""
        return []


@dataclass
class Replay:
    """The recording of a function of tensors."""

    calls: int = 0  # of the function, before it was recorded
    run: Callable[[], Any] | None = None  # replays the function; None: it is not recorded
    refused: bool = False  # the function cannot be recorded
    inputs: tuple[Tensor, ...] = ()  # where a replay reads its inputs
    held: tuple[Tensor | None, ...] = ()  # used by a replay, and kept alive for it
    result: Any = None  # where a replay writes its result


class Recordings(Recorder):
    """A recorder that replays. Its recordings are found by their kind, which is the stage of a
    round, and a key, which holds all that the recorded function depends on. whose: the owner's name
    in warnings."""

    def __init__(self, tape: Tape, whose: str = "this engine") -> None:
        self.tape, self.warm, self.ahead, self.whose = tape, tape.warm, tape.ahead, whose
        self.replays: dict[tuple[Hashable, Hashable], Replay] = {}
        self.latest: tuple[Any, Replay] = None, Replay()  # the last used: its kind and key, and it
        self.refused = False  # a recording failed, so no other is tried

    def start(
        self, engine: Engine, seqs: Sequences, tree: Tree, hold: int
    ) -> Callable[[], Reports]:
        if not engine.recorded_whole:
            return super().start(engine, seqs, tree, hold)
        key = _key(engine, seqs, tree)
        report = self.run("round", key, lambda: engine.round(seqs, tree), held=memory_of(seqs))
        wait, replay = _fetch(report), self.latest[1]

        def reports() -> Reports:
            first = wait(), time.perf_counter()
            return [first, *self.tape.repeat(replay.run, hold - 1, report)]

        return reports

    @torch.inference_mode()
    def run_stage(self, engine: Engine, stage: str, run: Callable[..., T], *args: Any) -> T:
        """See `Recorder.run_stage`. The stages recorded are the draft, unless its drafter needs the
        host, and the target's pass."""
        if stage == "draft" and not engine.drafter.on_host:
            seqs, tree = args
            key = _key(engine, seqs, tree)
            draft: Any = self.run(stage, key, lambda: run(seqs, tree), held=memory_of(seqs))
            return cast(T, replace(draft))  # a new object: the old one has cached an earlier `keys`
        if stage == "verify":
            seqs, draft = args

            def verify(tokens: Tensor, depth: Tensor, ancestors: Tensor) -> T:
                nodes = replace(draft.nodes, depth=depth, ancestors=ancestors)
                return run(seqs, replace(draft, tokens=tokens, nodes=nodes))

            inputs = draft.tokens, draft.nodes.depth, draft.nodes.ancestors
            shape = draft.nodes.is_chain, *(x.shape for x in inputs)
            return self.run(stage, _key(engine, seqs, shape), verify, *inputs, held=memory_of(seqs))
        return run(*args)

    def run(
        self, kind: Hashable, key: Hashable, fn: Callable[..., T], *inputs: Tensor,
        held: tuple[Tensor | None, ...] = (),
    ) -> T:  # fmt: skip
        """The result of fn(*inputs), by a replay if there is one. Read it before the next run of
        the same `kind`.

        Functions with equal kinds and keys must do the same in the same memory, for `inputs` of the
        same shapes. `held`: tensors that they use and that the caller may drop. A function whose
        recording is refused runs as it is; the first refusal is a warning.
        """
        replay = self._replay((kind, key))
        self.steady = replay.run is not None or self.refused or replay.refused
        if replay.run is not None:
            for place, x in zip(replay.inputs, inputs, strict=True):
                place.copy_(x)
            replay.run()
            result: T = replay.result
            return result
        if self.steady:
            return fn(*inputs)
        replay.calls += 1
        if replay.calls <= self.warm:
            return self.tape.run(lambda: fn(*inputs))
        places = tuple(x.clone() for x in inputs)
        try:
            replay.run, result = self.tape.record(lambda: fn(*places), kind)
        except Refused as e:
            self.refused = True
            log.warning("CUDA graphs are off for %s, which makes it slower: %s", self.whose, e)
            return fn(*inputs)
        replay.refused = replay.run is None
        if replay.run is not None:
            replay.inputs, replay.held, replay.result = places, held, result
        return result

    def _replay(self, name: tuple[Hashable, Hashable]) -> Replay:
        """The replay of this kind and key, which becomes the most recently used one. `latest` is
        compared first because comparing a key is faster than hashing it."""
        if name != self.latest[0]:
            replay = self.replays.pop(name, None) or Replay()
            self.replays[name] = replay
            self.latest = name, replay
            if len(self.replays) > MAX_RECORDINGS:
                del self.replays[next(iter(self.replays))]
        return self.latest[1]

    def clear(self) -> None:
        self.replays.clear()
        self.latest = None, Replay()


def _key(engine: Engine, seqs: Sequences, of: Hashable) -> Hashable:
    """The key of a stage of a round, which holds all that the stage depends on besides its inputs:
    `of`, settings, and the memory it uses. Drafter and rule, which may be unhashable or compare
    equal to others, are known by their ids; the engine keeps them alive."""
    parts = engine.target, id(engine.drafter), id(engine.rule), engine.sampling, engine.rng
    caches = ((lm.net, lm.cache and lm.cache.mark) for lm in engine.models)
    return of, seqs.address, torch.get_num_threads(), *parts, engine.drafter.shaped_by, *caches


def memory_of(seqs: Sequences) -> tuple[Tensor | None, ...]:
    """The tensors of `seqs` that a recorded round reads and writes."""
    return seqs.tokens, seqs.length, seqs.limit, seqs.stream, seqs.eos, seqs.budget


def _fetch(x: Tensor) -> Callable[[], Any]:
    """Start copying integers to the host, before a later replay overwrites them. Returns a function
    that waits for the copy and returns it as nested lists."""
    if not x.is_cuda:
        rows = x.tolist()
        return lambda: rows
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(x.device))

    def wait() -> Any:
        copied.synchronize()
        return host.tolist()

    return wait
