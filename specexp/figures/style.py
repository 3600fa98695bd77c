"""The common style of all figures: colours, axes side by side, axes over batch sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PLAIN, SPECULATIVE, PREDICTED = "#8c8c8c", "#0173b2", "#de8f05"
DOUBTFUL = 0.8  # R² of a fit of costs below which the measurement was probably disturbed


@contextmanager
def panels(columns: int, width: float, height: float) -> Iterator[tuple[Figure, list[Axes]]]:
    """Axes side by side in the common style; the figure is closed at the end."""
    style: Any = {"axes.titlelocation": "left", "axes.titlesize": 12, "legend.frameon": False}
    with sns.axes_style("whitegrid"), sns.plotting_context("notebook"), plt.rc_context(style):
        figure, axes = plt.subplots(
            1, columns, figsize=(width, height), layout="constrained", squeeze=False
        )
        yield figure, list(axes.flat)
        sns.despine(figure)
        plt.close(figure)


@contextmanager
def canvas(width: float = 8.0, height: float = 4.2) -> Iterator[tuple[Figure, Axes]]:
    """One pair of axes."""
    with panels(1, width, height) as (figure, (axes,)):
        yield figure, axes


def batch_axis(axes: Axes, batches: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(batches), [str(b) for b in batches])
    axes.minorticks_off()
    axes.set_xlabel("batch size (streams)")


def ends(table: pd.DataFrame, column: str = "speedup") -> np.ndarray:
    """The lengths [2, n] of a column's error bars, from its columns `low` and `high`."""
    return np.array([table[column] - table["low"], table["high"] - table[column]]).clip(0)
