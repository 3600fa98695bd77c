"""What the suites of `specexp bench` found, as tables and figures. Nothing here measures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import seaborn as sns
from matplotlib.figure import Figure
from rich.table import Table

from specexp.lab import stats
from specexp.lab.plots import PLAIN, PREDICTED, SPECULATIVE, batch_axis, canvas, panels
from specexp.lab.stats import Interval

WORK = {
    "plain": "plain decoding", "draft": "a draft model", "lookup": "prompt lookup",
    "vLLM plain": "plain decoding (vLLM)", "draft over plain": "ours speculates, theirs is plain",
}  # fmt: skip
PHASES = {
    "draft": "draft", "verify": "verify: the target's pass", "accept": "accept: law and rule",
    "commit": "commit: keep, observe, commit", "host": "host: report and Python between rounds",
}  # fmt: skip
AXES = {"batch": "rows", "tokens": "tokens a row", "context": "slots", "model": "",
        "vocabulary": "tokens, the head's product alone"}  # fmt: skip


def heading(about: dict[str, Any]) -> str:
    """What it ran on, in a line; `suites.about`."""
    return (
        f"{about['where']}, {about['dtype']}, {about['threads']} threads of {about['cores']} "
        f"cores, load average {about['load']:.1f}"
    )


def tables(name: str, found: dict[str, Any]) -> tuple[Table, list[str]]:
    """A suite's table, and the sentences below it."""
    views: dict[str, Callable[[dict[str, Any]], tuple[Table, list[str]]]] = {
        "peers": _peers, "roofline": _roofline, "round": _round, "scale": _scale,
    }  # fmt: skip
    return views[name](found)


def figure(name: str, found: dict[str, Any]) -> Figure:
    drawn = {"peers": over_peers, "roofline": floors, "round": phases, "scale": growth}
    return drawn[name](found)


# --- tables --------------------------------------------------------------------------------------


def _table(title: str, *columns: str, left: int = 1) -> Table:
    table = Table(*columns, title=title, title_justify="left", title_style="", box=None,
                  header_style="bold")  # fmt: skip
    for column in table.columns[left:]:
        column.justify = "right"
    return table


def times(found: dict[str, float]) -> str:
    """1.05x [0.91, 1.25]"""
    return f"{found['value']:.2f}x [{found['low']:.2f}, {found['high']:.2f}]"


def per_cent(found: dict[str, float]) -> str:
    return f"{found['value']:.0%} [{found['low']:.0%}, {found['high']:.0%}]"


def _peers(found: dict[str, Any]) -> tuple[Table, list[str]]:
    table = _table(
        f"peers: {found['drafter']}, γ = {found['gamma']}, {found['new_tokens']} new tokens of "
        f"{found['prompts']} prompts x {found['repeats']}; tokens/s of whole calls, prefill "
        "included, EOS ignored",
        "work", "batch", "theirs", "specexp", "specexp / theirs", "their text is ours",
    )  # fmt: skip
    notes = []
    for row in found["rows"]:
        if row["missing"]:
            notes.append(f"{WORK[row['work']]}: {row['missing']}")
        theirs = "-" if row["their_tok_s"] is None else f"{row['their_tok_s']:.1f}"
        table.add_row(
            WORK[row["work"]], str(row["batch"]), theirs, f"{row['tok_s']:.1f}",
            times(row["ratio"]) if row["ratio"] else "-", _equal(row["equal"]),
        )  # fmt: skip
    theirs = "theirs: transformers' generate() on the same weights; a draft model by assisted"
    notes.append(f"{theirs} generation with as many guesses, always")
    return table, notes


def _equal(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    odd = [f"{found[kind]} {said}" for kind, said in (("ties", "near ties"), ("others", "others"))
           if found[kind]]  # fmt: skip
    return ", ".join([f"{found['share']:.1%}", *odd])


def _roofline(found: dict[str, Any]) -> tuple[Table, list[str]]:
    copy = found["copy"]
    table = _table(
        f"roofline: a pass at batch 1, medians of {found['turns']} turns; a copy moves "
        f"{copy['gb_s']:.1f} GB/s ({copy['bytes'] / 2e6:.0f} MB read and as much written)",
        "model", "tokens", "must read", "ms", "GB/s", "of the copy", "bare products, ms",
        "pass / bare", "pass / one token",
    )  # fmt: skip
    for row in found["rows"]:
        table.add_row(
            row["model"], str(row["tokens"]), f"{row['bytes'] / 1e6:.1f} MB", f"{row['ms']:.2f}",
            f"{row['gb_s']:.1f}", per_cent(row["of_copy"]), f"{row['bare_ms']:.2f}",
            times(row["over_bare"]), times(row["over_step"]),
        )  # fmt: skip
    step = found["rows"][0]
    notes = [
        f"a step of {step['model']} takes {times(step['over_bare'])} its bare matrix products: "
        "what is above 1 is attention, norms, launches and the toolkit"
    ]
    if any(row["of_copy"]["value"] > 1 for row in found["rows"]):
        notes.append("above 100 %: weights that stay in a cache are faster than the memory")
    return table, notes


def _round(found: dict[str, Any]) -> tuple[Table, list[str]]:
    sides = found["plain"], found["fast"]
    table = _table(
        f"round: {found['drafter']}, γ = {found['gamma']}, one stream, {found['texts']} prompts x "
        f"{found['turns'] // found['texts']}; phases timed in a replay of the clean loop",
        "", "plain, ms", "share", "speculative, ms", "share",
    )  # fmt: skip
    for phase, said in PHASES.items():
        both = [side["phases"][phase] for side in sides]
        cells = [c for p in both for c in (f"{p['ms']:.3f}", per_cent(p["share"]))]
        table.add_row(said, *cells)
    for said, key in (("clean loop, a round", "round_ms"),):
        table.add_row(said, *(c for s in sides for c in (f"{s[key]:.3f}", "")))
    table.add_row(
        "sum of phases / clean", *(c for s in sides for c in ("", times(s["sum_over_round"])))
    )
    table.add_row(
        "neither draft nor target pass", *(c for s in sides for c in ("", per_cent(s["overhead"])))
    )
    speedup, kept = found["speedup"], found["acceptance"]
    return table, [
        f"{kept['length']:.2f} tokens a target pass: {times(speedup['measured'])} measured, "
        f"{speedup['from_passes']:.2f}x from acceptance and the passes alone"
    ]


def _scale(found: dict[str, Any]) -> tuple[Table, list[str]]:
    table = _table(
        f"scale: a target pass from one row, one token and {found['context']} slots; medians of "
        f"{found['turns']} turns", "axis", "", "ms", "to the first", left=2,
    )  # fmt: skip
    last = None
    for row in found["rows"]:
        axis = row["axis"]
        said = f"{row['value']} {AXES[axis]}".strip()
        if axis == "model":
            said += f", {row['parameters'] / 1e6:.1f}M, V = {row['vocabulary']}"
        table.add_row(axis if axis != last else "", said, f"{row['ms']:.2f}",
                      times(row["over_first"]))  # fmt: skip
        last = axis
    fit = found["fit"]
    said = f"a pass takes {fit['floor_ms']:.1f} ms and {fit['per_token_us']:.0f} µs a token"
    if fit["knee"]:
        said += f": the floor ends at about {fit['knee']:.0f} tokens in a pass"
    return table, [f"{said} (R² {fit['r2']:.2f})"]


# --- figures -------------------------------------------------------------------------------------


def over_peers(found: dict[str, Any]) -> Figure:
    """Tokens/s of both sides, a pair of bars a comparison."""
    rows = [row for row in found["rows"] if row["ratio"]]
    with canvas(8.5, 1.6 + 0.6 * len(rows)) as (drawn, axes):
        for at, row in enumerate(rows):
            axes.barh(at - 0.2, row["their_tok_s"], 0.38, color=PLAIN)
            axes.barh(at + 0.2, row["tok_s"], 0.38, color=SPECULATIVE)
            axes.text(max(row["tok_s"], row["their_tok_s"]), at, f"  {times(row['ratio'])}",
                      va="center")  # fmt: skip
        axes.set_yticks(range(len(rows)), [f"{WORK[r['work']]}, batch {r['batch']}" for r in rows])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.35 * max(max(r["tok_s"], r["their_tok_s"]) for r in rows))
        axes.set_xlabel("delivered tokens a second, prefill included (grey: transformers)")
        said = [f"{row['work']} {stats.verdict(Interval(**row['ratio']))}" for row in rows[:3]]
        drawn.suptitle(f"Against transformers: {', '.join(said)}", x=0.01, ha="left")
    return drawn


def floors(found: dict[str, Any]) -> Figure:
    """Every pass beside its two floors: the bytes at the copy's bandwidth, the bare products."""
    rows = found["rows"]
    with canvas(8.5, 1.6 + 0.8 * len(rows)) as (drawn, axes):
        for at, row in enumerate(rows):
            memory = 1e-6 * row["bytes"] / found["copy"]["gb_s"]
            bars = ((memory, PLAIN), (row["bare_ms"], PREDICTED), (row["ms"], SPECULATIVE))
            for place, (ms, colour) in enumerate(bars, -1):
                axes.barh(at + 0.26 * place, ms, 0.25, color=colour)
        said = ("its bytes at the copy's bandwidth", "bare matrix products", "the pass")
        for colour, label in zip((PLAIN, PREDICTED, SPECULATIVE), said, strict=True):
            axes.barh(0, 0, color=colour, label=label)
        axes.set_yticks(range(len(rows)), [f"{r['model']}, {_count(r['tokens'])}" for r in rows])
        axes.invert_yaxis()
        axes.set_xlabel("ms")
        axes.legend(loc="lower right")
        step = rows[0]
        axes.set_title(
            f"A step of {step['model']} takes {times(step['over_bare'])} its bare products"
        )
    return drawn


def _count(tokens: int) -> str:
    return f"{tokens} tokens" if tokens > 1 else "1 token"


def phases(found: dict[str, Any]) -> Figure:
    """A round of either kind, phase upon phase; the mark is the clean loop's round."""
    sides = {"plain": found["plain"], f"γ = {found['gamma']}": found["fast"]}
    with canvas(8.5, 3.0) as (drawn, axes):
        palette = sns.color_palette("colorblind", len(PHASES))
        for at, side in enumerate(sides.values()):
            left = 0.0
            for phase, colour in zip(PHASES, palette, strict=True):
                ms = side["phases"][phase]["ms"]
                axes.barh(at, ms, 0.6, left=left, color=colour, label="" if at else phase)
                left += ms
            axes.plot([side["round_ms"]] * 2, [at - 0.38, at + 0.38], "k-", lw=2,
                      label="" if at else "clean loop")  # fmt: skip
        axes.set_yticks(range(len(sides)), list(sides))
        axes.invert_yaxis()
        axes.set_xlabel(f"ms a round, {found['drafter']}")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        overhead = found["fast"]["overhead"]
        axes.set_title(
            f"{per_cent(overhead)} of a round is neither a draft pass nor the target's; "
            f"{times(found['speedup']['measured'])} for {found['speedup']['from_passes']:.2f}x"
        )
    return drawn


def growth(found: dict[str, Any]) -> Figure:
    """A pass over batch, tokens a row and context, in passes over one token."""
    fit = found["fit"]
    with panels(3, 13.5, 4.0) as (drawn, every):
        for axes, axis in zip(every, ("batch", "tokens", "context"), strict=True):
            rows = [row for row in found["rows"] if row["axis"] == axis]
            x = [row["value"] for row in rows]
            ratios = [row["over_first"] for row in rows]
            error = [
                [r["value"] - r["low"] for r in ratios],
                [r["high"] - r["value"] for r in ratios],
            ]
            axes.axhline(1, color=PLAIN, lw=1)
            axes.errorbar(x, [r["value"] for r in ratios], yerr=error, fmt="o-", capsize=3,
                          color=SPECULATIVE)  # fmt: skip
            batch_axis(axes, x)
            axes.set_xlabel({"batch": "batch (rows)", "tokens": "tokens a row",
                             "context": "context (slots)"}[axis])  # fmt: skip
            axes.set_ylim(0, None)
        every[0].set_ylabel(f"passes over one token (of {found['rows'][0]['ms']:.2f} ms)")
        drawn.suptitle(
            f"A pass takes {fit['floor_ms']:.1f} ms and {fit['per_token_us']:.0f} µs a token "
            f"(R² {fit['r2']:.2f})", x=0.01, ha="left",
        )  # fmt: skip
    return drawn
