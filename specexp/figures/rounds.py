"""Rounds as drawings: a strip of tokens by origin, and trees with acceptance on their edges."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, count
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from rich.cells import cell_len

from specexp.errors import counted
from specexp.figures import style
from specexp.figures.tokens import COLOURS, HATCHED, by_kind, cut, symbols

if TYPE_CHECKING:
    from specexp.api import Output

CHARACTER = 0.115  # inches
MIN_ROUNDS = 10  # rounds that a share should rest on


def strip(output: Output, most: int = 16) -> Figure:
    """The first rounds of row 0, one per line: each token in the colour of its origin, the rejected
    draft tokens hatched."""
    lines = list(by_kind(output.trace.rounds, output.tokens[0]))
    only = f"; drawn: the first {counted(most, 'round')}" * (len(lines) > most)
    lines = lines[:most]
    texts = [[(kind, _label(output.decode([t]))) for t, kind in line] for _, line in lines]
    widths = [[max(2, cell_len(text) + 1) for _, text in line] for line in texts]
    wide = max(map(sum, widths)) * CHARACTER + 1.2
    size = 9 * min(1, style.WIDEST / wide)
    with style.canvas(min(style.WIDEST, max(8, wide)), 1.7 + 0.3 * len(lines)) as (figure, axes):
        for y, (line, width) in enumerate(zip(texts, widths, strict=True)):
            for (kind, text), x, w in zip(line, accumulate([0, *width]), width, strict=False):
                axes.barh(y, w - 0.15, 0.86, x, color=COLOURS[kind], alpha=0.45,
                          hatch=HATCHED.get(kind), edgecolor="white", label=kind)  # fmt: skip
                axes.text(x + w / 2, y, text, ha="center", va="center", fontsize=size,
                          color=style.INK, family=style.fonts("monospace"))  # fmt: skip
        counts = [f"{step.accepted}/{step.drafted}" for step, _ in lines]
        axes.set_yticks(range(len(lines)), counts)
        axes.set(xlabel="one line per round: accepted/drafted, then its tokens", xticks=[])
        axes.invert_yaxis()
        axes.grid(False)
        style.title(figure, f"One output: {output.trace.by_row[0]}{only}")
    return figure


def _label(text: str) -> str:
    """A token as a label, without spaces at its end; fonts have no control characters."""
    shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in symbols(text))
    return cut(shown.rstrip() or "␣")


def trees(edges: pd.DataFrame) -> Figure:
    """Drafts as trees, a panel each: on the edge to a draft token how often it was accepted where
    its parent was, faint where that were few rounds; from `one_pairing.edges`."""
    if edges.empty:
        return style.nothing("Every draft here is grown: no two rounds have the same tree")
    arms = {name: part.reset_index(drop=True) for name, part in edges.groupby("arm", sort=False)}
    places, deepest = [_places(part["parent"]) for part in arms.values()], edges["depth"].max()
    size = max(3.5, 0.75 * max(map(max, places)) + 1.5), 1.6 + 0.6 * deepest
    with style.panels(len(arms), *size, sharey=True) as (figure, every):
        for axes, (name, part), x in zip(every, arms.items(), places, strict=True):
            for node, edge in part[1:].iterrows():
                across, up = [x[edge["parent"]], x[node]], [edge["depth"] - 1, edge["depth"]]
                rounds = part["accepted"][edge["parent"]]
                faint, share = 0.3 if rounds < MIN_ROUNDS else 1.0, f"{edge['rate']:.0%}"
                axes.plot(across, up, color=style.SPECULATIVE, lw=0.5 + 7 * edge["rate"], zorder=1,
                          alpha=faint)  # fmt: skip
                label = np.average([across, up], axis=1, weights=(1, 2))  # where siblings are apart
                axes.text(*label, share if rounds else "–", ha="center", va="center", fontsize=9,
                          bbox={"fc": "white", "ec": "none", "pad": 1})  # fmt: skip
            axes.scatter(x, part["depth"], s=60, color=style.PLAIN, edgecolors=style.INK, zorder=3)
            axes.set_title(name, fontsize=10)
            axes.set(xticks=[], yticks=range(deepest + 1), xlim=(-0.6, max(x) + 0.6))
            axes.grid(False)
        every[0].set_ylabel("depth")
        every[0].set_ylim(deepest + 0.3, -0.3)
        first = edges[edges["depth"] == 1]
        best = first[first["child"] == 0]["rate"]
        more = (first["rate"] * (first["child"] > 0)).groupby(first["arm"]).sum()
        shares = dict.fromkeys([f"{best.min():.0%}", f"{best.max():.0%}"])
        style.title(figure,
              f"The likeliest first draft token is accepted in {' to '.join(shares)} of rounds"
              + f"; its siblings add at most {more.max():.0%}" * bool((first["child"] > 0).any()),
              no_intervals=f"shares of rounds, faint where of fewer than {MIN_ROUNDS}, – of none"
        )  # fmt: skip
    return figure


def _places(parents: Sequence[int]) -> list[float]:
    """Where each node stands across: leaves side by side, every other node above the middle of its
    children."""
    x, free = [0.0] * len(parents), count()

    def place(node: int) -> float:
        below = [place(child) for child, parent in enumerate(parents) if parent == node]
        x[node] = sum(below) / len(below) if below else float(next(free))
        return x[node]

    place(0)
    return x
