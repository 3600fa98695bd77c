"""How rounds run: operation by operation, or recorded once and then replayed.

The engine hands every round to a recorder. The one in this file simply runs it. Those in fast/
replay it: on a GPU as one CUDA graph, on a CPU as a list of compiled calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch

from specexp.models.lm import LM
from specexp.ops import op
from specexp.sequences import Sequences
from specexp.tree import Tree

if TYPE_CHECKING:
    from specexp.engine import Engine

T = TypeVar("T")
DATA_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
TO_HOST = {"item", "is_nonzero", "allclose", "lift_fresh", "resolve_conj", "resolve_neg", "isin"}
Reports: TypeAlias = list[tuple[list[list[int]], float]]
"""What rounds reported (`round_report`), each with the time at which the host had it."""


class Recorder:
    """Runs every round operation by operation; recorders in fast/ subclass it.

    warm: rounds of a shape that run before one is recorded. ahead: further rounds that may be
    running while the host reads a report. steady: whether the last round's time is typical; False
    if it was a warm-up or was recorded.
    """

    warm = 0
    ahead = 0
    steady = True

    def start(
        self, engine: Engine, seqs: Sequences, tree: Tree, hold: int
    ) -> Callable[[], Reports]:
        """Begin a round; returns a function that waits for its report. Where a replay is one short
        call, that function may run further rounds, `hold` in all, until a row ends."""
        report = engine.round(seqs, tree).tolist()
        return lambda: [(report, time.perf_counter())]

    def run_stage(self, engine: Engine, stage: str, run: Callable[..., T], *args: Any) -> T:
        """`run(*args)`, a stage of `engine.round`, recorded by itself where that is possible. The
        result is valid until the next call for the same stage."""
        return run(*args)

    def clear(self) -> None:
        """Drop all recordings, because memory that they use is going away."""


@op
def recorder_for(target: LM) -> Recorder:
    """A recorder for one engine with this target."""
    return Recorder()


def reaches_host(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operation brings a value, or a shape that depends on one, to the host, or host
    data to a device. (`resolve_neg` is called by `tolist` and `numpy`; `lift_fresh` by
    `torch.tensor` and by indexing with a list; a boolean index has a data-dependent shape; `isin`
    may sort.)"""
    name = func.overloadpacket.__name__
    if name in ("index", "index_put", "index_put_"):
        return any(x is not None and x.dtype == torch.bool for x in args[1])
    return bool(DATA_DEPENDENT & set(func.tags)) or name in TO_HOST
