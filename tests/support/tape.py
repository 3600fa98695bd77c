"""What a CUDA graph does, on a CPU: operations are recorded with the memory they read and write,
and run again on that memory. Python runs while they are recorded and never again."""

from contextlib import contextmanager

import torch
from support.references import references
from torch.utils._pytree import tree_leaves

from specexp.engine import Engine
from specexp.fast import cuda_graphs
from specexp.fast.cpu_replays import Recording, again
from specexp.fast.cuda_graphs import Graphs, Refused


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


class Tape:
    """A recorder for `graphs.Graphs`."""

    warm = 3

    def run(self, fn):
        return fn()

    def record(self, fn, kind):
        with operations() as noted:
            made = fn()
        return again(noted.steps), made


class Counted:
    """A recorder that tells the kinds of what it recorded, and how often something was replayed."""

    def __init__(self, inner):
        self.inner, self.warm = inner, inner.warm
        self.recorded, self.replays = [], 0

    def run(self, fn):
        return self.inner.run(fn)

    def record(self, fn, kind):
        again, made = self.inner.record(fn, kind)
        self.recorded.append(kind)

        def counted():
            self.replays += 1
            again()

        return counted, made


def taped(engine: Engine) -> Engine:
    """The same engine with graphs, on whatever device."""
    for lm in engine.models:
        lm.net = getattr(lm.net, "fused", lm.net)  # a tape knows only torch's operations
    real = cuda_graphs.on(engine.target.device)
    engine.graphs = Graphs(Counted(real.recorder if real else Tape()))
    return engine


def untaped(engine: Engine) -> Engine:
    """The same engine in the same memory, its operations launched one by one."""
    taped(engine).graphs.refused = True
    return engine
