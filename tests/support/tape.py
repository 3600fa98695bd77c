"""What a CUDA graph does, on a CPU: operations are recorded with the memory they read and write,
and run again on that memory. Python runs while they are recorded and never again."""

from contextlib import contextmanager
from typing import Any

import torch
from support.references import references
from torch.utils._pytree import tree_leaves

from specexp.engine import Engine
from specexp.fast import cuda_graphs, recordings
from specexp.fast.cpu_replays import Recording, replay_of
from specexp.fast.fused_block import FusedBlock
from specexp.fast.fused_eagle import FusedEagle
from specexp.fast.recordings import Recordings, Refused
from specexp.recording import Recorder
from specexp.serving.engine_rows import EngineRows


class Operations(Recording):
    """Notes what is run. Like a stream that is captured it refuses what reaches the host."""

    def not_replayable(self, func):
        raise Refused(f"{func} is not permitted in a recording")

    @property
    def shapes(self):
        """Names and shapes of all operations, which must not depend on what is in the tensors."""
        return [
            (str(step.func), [tuple(x.shape) for x in tree_leaves(step) if torch.is_tensor(x)])
            for step in self.steps
        ]


@contextmanager
def operations():
    """Nothing is compiled meanwhile: a stream knows only operations."""
    with references(), Operations() as noted:
        yield noted


class Tape(recordings.Tape):
    """A tape for `Recordings`."""

    warm, ahead = 3, 1

    def record(self, fn, kind):
        with operations() as noted:
            made = fn()
        return replay_of(noted.steps), made


class Counted(recordings.Tape):
    """A tape that tells the kinds of what it recorded, and how often something was replayed."""

    def __init__(self, inner):
        self.inner, self.warm, self.ahead = inner, inner.warm, inner.ahead
        self.recorded, self.replays = [], 0

    def run(self, fn):
        return self.inner.run(fn)

    def record(self, fn, kind):
        replay, made = self.inner.record(fn, kind)
        self.recorded.append(kind)

        def counted():
            self.replays += 1
            replay()

        return counted, made


def in_torch(net: Any) -> Any:
    """The same passes without compiled code."""
    if isinstance(net, FusedEagle):
        return FusedEagle(net.eagle, in_torch(net.net))
    if isinstance(net, FusedBlock):
        return FusedBlock(net.block, in_torch(net.net))
    return getattr(net, "fused", net)


def taped(engine: Engine) -> Engine:
    """The same engine with graphs, on whatever device."""
    for lm in engine.models:
        lm.net = in_torch(lm.net)  # a tape knows only torch's operations
    real = cuda_graphs.on(engine.target.device)
    return Engine.of(engine, recorder=Recordings(Counted(real.tape if real else Tape())))


def untaped(engine: Engine) -> Engine:
    """The same engine in the same memory, its operations launched one by one."""
    engine = taped(engine)
    engine.recorder.refused = True
    return engine


def unrecorded(engine: Engine) -> Engine:
    """The same engine, its rounds run as they are."""
    return Engine.of(engine, recorder=Recorder())


@torch.inference_mode()
def covered(bank: EngineRows, *budget: int) -> tuple[int, list[int] | None]:
    """How many rows a round of these rows covers, and their budgets."""
    rows = bank._rows(budget, 9, max(budget))
    return len(rows.tokens), None if rows.budget is None else rows.budget.tolist()


def recorded(engine: Engine) -> set[Any]:
    """The kinds of which something is recorded."""
    replays = getattr(engine.recorder, "replays", {})
    return {kind for (kind, _), replay in replays.items() if replay.run}
