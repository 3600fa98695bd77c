"""What a round tells the host: one small integer tensor, and how to read it."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specexp.ops import op
from specexp.trace import Step


@op
def round_report(counts: Tensor, tokens: Tensor, faults: Sequence[Tensor]) -> Tensor:
    """The report of B rows, int64 [B, 3 + models + N - 1].

    Columns: counts [B, 3] (see `Sequences.commit`); for each model, whether its fault [B] is not 0;
    the draft tokens of tokens [B, N], without the root.
    """
    broken = [fault[:, None] != 0 for fault in faults]
    return torch.cat([counts, *broken, tokens[:, 1:]], 1)


def steps(rows: Sequence[Sequence[int]], why: Sequence[Callable[[int], str]]) -> list[Step]:
    """The live rows of a report as lists. `why`: for each model, what its fault in a row means."""
    live_rows = []
    for number, (accepted, emitted, live, *rest) in enumerate(rows):
        if emitted:  # rows that are done emit nothing
            faults, tokens = rest[: len(why)], rest[len(why) :]
            broken = why[faults.index(1)](number) if 1 in faults else None
            drafted = len(tokens) - tokens.count(-1)
            live_rows.append(
                Step(number, drafted, accepted, emitted, tuple(tokens), not live, broken)
            )
    return live_rows
