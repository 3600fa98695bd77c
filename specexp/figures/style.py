"""The style sheet of all figures: colours and symbols, titles, axes side by side, batch axes.

A name (a drafter, a policy, a rule) has one colour and one symbol in all figures of a notebook;
plain decoding is grey. Colours differ in lightness and lines in their symbols, so that a figure can
be read in grey; its paper is white, so that it can be read on a dark page.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib import font_manager, ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PLAIN, SPECULATIVE, PREDICTED, INK = "#7f7f7f", "#0b5394", "#e69f00", "#333333"
COLOURS = (SPECULATIVE, PREDICTED, "#0f7a5c", "#d55e00", "#56b4e9", "#6a2c91", "#d88fc0", "#8a6d3b")
SYMBOLS, HATCHES = "osD^vPX", ("", "//", "..", "xx", "--")
DOUBTFUL = 0.8  # R² of a fit of costs below which the measurement was probably disturbed
NARROWEST, WIDEST = 7.0, 10.5  # inches: a title has room; in a page 700 pixels wide it can be read
LOG_DIGITS = (1,), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)  # first digits of numbers at an axis
DIGIT = 0.1  # inches, of a number at an axis
WIDE_SHARE = 0.5  # an interval of a share that is wider says only that prompts are too few
HOLLOW = {"markerfacecolor": "none", "markeredgewidth": 2}  # a rule that is lossy; a doubtful run
SHEET: Any = {
    "figure.facecolor": "white", "axes.titlelocation": "left", "axes.titlesize": 12,
    "legend.frameon": False, "legend.fontsize": 9, "figure.labelsize": 12, "hatch.linewidth": 0.6,
    "text.parse_math": False,  # names and tokens may hold $
}  # fmt: skip
SCRIPTS = (  # fonts for tokens in scripts that the usual font lacks, where they are installed
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "Noto Sans JP", "Source Han Sans SC",
    "WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "Microsoft YaHei", "SimHei", "PingFang SC",
    "Hiragino Sans", "Hiragino Sans GB", "Yu Gothic", "IPAexGothic", "Malgun Gothic",
    "Apple SD Gothic Neo", "NanumGothic", "Arial Unicode MS",
)  # fmt: skip
_subject = ""
_order: dict[str, int] = {}


def subject(text: str) -> str:
    """What all figures from here on are about, the last line of their titles: target, drafter and
    prompts."""
    global _subject
    _subject = text
    return text


def marks(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Colour and symbol of each name, as arguments of `Axes.plot`."""
    looks = {}
    for name in names:
        at = _order.setdefault(name, len(_order))
        looks[name] = {"color": COLOURS[at % len(COLOURS)], "marker": SYMBOLS[at % len(SYMBOLS)]}
    own = {"plain": {"color": PLAIN, "marker": "x"}, "never": {"color": INK, "marker": "x"}}
    return looks | {name: look for name, look in own.items() if name in looks}


@cache
def fonts(family: str) -> list[str]:
    """This family, and behind it those of SCRIPTS that are installed."""
    installed = set(font_manager.get_font_names())
    return [family, *(name for name in SCRIPTS if name in installed)]


@contextmanager
def panels(count: int, width: float, height: float, **grid: Any) -> Iterator[tuple[Figure, Any]]:
    """Axes of this size in the common style, side by side and, where they would be wider than a
    page, in rows; together they are wide enough for a title. At the end the figure gets its legend
    and is closed. grid: of `plt.subplots`."""
    width = max(width, NARROWEST / count)
    rows = min(count, math.ceil(count * width / WIDEST - 0.01))
    columns = math.ceil(count / rows)
    size = (min(WIDEST, columns * width), rows * height)
    sheet = SHEET | {"font.family": fonts("sans-serif")}
    with sns.axes_style("whitegrid"), sns.plotting_context("notebook"), plt.rc_context(sheet):
        figure, axes = plt.subplots(
            rows, columns, figsize=size, layout="constrained", squeeze=False, **grid
        )
        for spare in axes.flat[count:]:
            spare.remove()
        yield figure, list(axes.flat[:count])
        _legend(figure)
        sns.despine(figure)
        plt.close(figure)


@contextmanager
def canvas(width: float = 8.0, height: float = 4.2) -> Iterator[tuple[Figure, Axes]]:
    """One pair of axes."""
    with panels(1, width, height) as (figure, (axes,)):
        yield figure, axes


def nothing(why: str) -> Figure:
    """In place of a figure that has nothing to show."""
    with canvas(8, 1.2) as (figure, axes):
        axes.text(0.5, 0.5, why, ha="center", va="center")
        axes.set_axis_off()
    return figure


def title(figure: Figure, text: str, about: str | None = None, no_intervals: str = "") -> None:
    """What a figure shows; below it the subject, or `about` instead; below that why some estimates
    in it carry no interval, or which do not."""
    why = f"No intervals: {no_intervals}" * bool(no_intervals)
    lines = [text, _subject if about is None else about, why]
    whole = "\n".join(filter(None, lines)).replace("$", r"\$")  # to wrap, it looks for formulas
    figure.suptitle(whole, x=0.01, ha="left", fontsize=12, wrap=True, parse_math=True)


def _legend(figure: Figure) -> None:
    """One legend below all panels that have none of their own; each label is there once."""
    named: dict[str, Any] = {}
    for axes in (axes for axes in figure.axes if not axes.get_legend()):
        handles, labels = axes.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    if not named:
        return
    wide = max(0.6 + 0.075 * len(label) for label in named)  # inches
    columns = min(len(named), max(1, int(figure.get_figwidth() / wide)))
    figure.legend(named.values(), named, loc="outside lower center", ncols=columns)
    lines = math.ceil(len(named) / columns)
    figure.set_figheight(figure.get_figheight() + 0.2 * (lines - 1))


def points(axes: Axes, table: pd.DataFrame, by: str, column: str = "speedup", **look: Any) -> Any:
    """Points of a column over that of `by`, with the 95 % intervals that they have (see `ends`)."""
    across = ends(table, by) if f"{by}_low" in table else None
    return axes.errorbar(table[by], table[column], ends(table, column), across, capsize=3, **look)


def shifted(table: pd.DataFrame, by: str, line: int, lines: int) -> pd.DataFrame:
    """The table of one of `lines` lines over a logarithmic axis, moved a little along it, so that
    intervals at one value of `by` do not hide each other; all lines stay nearer to it than to
    twice the value."""
    step = min(1.06, 1.6 ** (1 / lines))
    return table.assign(**{by: table[by] * step ** (line - (lines - 1) / 2)})


def label_left(every: Iterable[Any], text: str) -> None:
    """What is up, in panels that share it: said once a row."""
    for axes in every:
        if axes.get_subplotspec().is_first_col():
            axes.set_ylabel(text)


def batch_axis(axes: Axes, batches: Collection[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    axis_of(axes, "batch size (streams)", batches, math.log2)


def gamma_axis(axes: Axes, gammas: Collection[int]) -> None:
    axis_of(axes, "draft length γ", gammas)


def axis_of(
    axes: Axes, label: str, values: Collection[float], at: Callable[[float], float] = float
) -> None:
    """A horizontal axis with numbers at the least and the largest of these values, and at those
    between that are far enough apart to be read; at: where on the axis a value is."""
    texts = {value: f"{value:g}" for value in sorted({*values})}
    ends = min(texts), max(texts)
    inches = axes.get_window_extent().width / axes.figure.dpi
    room = DIGIT * (1 + max(map(len, texts.values()))) * (at(ends[1]) - at(ends[0])) / inches
    ticks = {*ends}
    for value in texts:
        if min(abs(at(value) - at(tick)) for tick in ticks) >= room:
            ticks.add(value)
    axes.set_xlabel(label)
    axes.set_xticks(sorted(ticks), [texts[tick] for tick in sorted(ticks)])


def log_axis(axes: Axes, which: str = "y") -> None:
    """A logarithmic axis with numbers at 1, 10, 100 ... of what is drawn; if these are fewer than
    three, at 1, 2, 5 ..., or at more digits, or at even steps."""
    axes.set(**{f"{which}scale": "log"})
    axis: Any = getattr(axes, f"{which}axis")
    low, high = sorted(getattr(axes, f"get_{which}lim")())
    locators: list[ticker.Locator] = [ticker.LogLocator(subs=digits) for digits in LOG_DIGITS]
    locators.append(ticker.MaxNLocator(4, steps=(1, 2, 5, 10)))  # 1 is a multiple of all of these
    axis.set_major_locator(
        next(
            (each for each in locators
             if sum(low <= tick <= high for tick in each.tick_values(low, high)) >= 3),
            locators[-1],
        )
    )  # fmt: skip
    thousands = ticker.EngFormatter(sep="")
    axis.set_major_formatter(lambda x, _: thousands(x) if x >= 1e4 else f"{x:g}")
    axis.set_minor_locator(ticker.NullLocator())


def top(speedups: pd.Series, high: pd.Series) -> float:
    """Where an axis of speedups ends: above their intervals, unless those are very wide."""
    return float(min(2.2 * max(1, speedups.max()), max(1.2, 1.1 * high.max())))


def per_cent(axes: Axes, which: str = "y") -> None:
    getattr(axes, f"{which}axis").set_major_formatter(lambda x, _: f"{100 * x:.6g}%")


def ends(table: pd.DataFrame, column: str = "speedup") -> np.ndarray:
    """The lengths [2, n] of a column's error bars, from its columns `low` and `high`, or those that
    begin with its own name, as `bias_low`."""
    low, high = (f"{column}_{e}" if f"{column}_{e}" in table else e for e in ("low", "high"))
    return np.array([table[column] - table[low], table[high] - table[column]]).clip(0)


def share(row: Any) -> str:
    """A share with its interval, from columns value, low and high: `64% [43, 80]`; without the
    interval if there is only one unit."""
    between = f" [{100 * row['low']:.0f}, {100 * row['high']:.0f}]" * bool(row["low"] < row["high"])
    return f"{row['value']:.0%}{between}"


def times(row: Any, column: str = "value") -> str:
    """A ratio with its interval, from that column, low and high: `1.05x [0.91, 1.25]`; without the
    interval if there is only one unit."""
    between = f" [{row['low']:.2f}, {row['high']:.2f}]" * bool(row["low"] < row["high"])
    return f"{row[column]:.2f}x{between}"
