"""What a CUDA graph does, on a CPU: operations are recorded with the memory they read and write,
and run again on that memory. Python runs while they are recorded and never again."""

import pytest
import torch
from tiny import reaches_host
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specexp import graphs, native
from specexp.engine import Engine
from specexp.graphs import Graphs, Refused


class Operations(TorchDispatchMode):
    """Notes what is run. Like a stream that is captured it refuses what reaches the host. Nothing
    else is compiled meanwhile: only torch's operations can be noted."""

    def __init__(self):
        super().__init__()
        self.seen = []
        self.uncompiled = pytest.MonkeyPatch()

    def __enter__(self):
        self.uncompiled.setattr(native, "by", lambda *read: None)
        return super().__enter__()

    def __exit__(self, *raised):
        self.uncompiled.undo()
        return super().__exit__(*raised)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if reaches_host(func, args):
            raise Refused(f"{func} is not permitted in a recording")
        made = func(*args, **(kwargs or {}))
        self.seen.append((func, args, kwargs or {}, made))
        return made

    @torch.inference_mode()
    def again(self):
        for func, args, kwargs, made in self.seen:
            news = tree_leaves(func(*args, **kwargs))
            for old, new in zip(tree_leaves(made), news, strict=True):
                if torch.is_tensor(old) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    @property
    def shapes(self):
        """Names and shapes of all operations, which must not depend on what is in the tensors."""
        return [
            (str(func), [tuple(x.shape) for x in tree_leaves((args, made)) if torch.is_tensor(x)])
            for func, args, _, made in self.seen
        ]


class Tape:
    """A recorder for `graphs.Graphs`."""

    warm = 3

    def run(self, fn):
        return fn()

    def record(self, fn, kind):
        with Operations() as operations:
            made = fn()
        return operations.again, made


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
    real = graphs.on(engine.target.device)
    engine.graphs = Graphs(Counted(real.recorder if real else Tape()))
    return engine


def untaped(engine: Engine) -> Engine:
    """The same engine in the same memory, its operations launched one by one."""
    taped(engine).graphs.refused = True
    return engine
