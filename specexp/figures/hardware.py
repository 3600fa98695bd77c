"""Results of `specexp bench` as tables. Nothing here measures."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.table import Table
from rich.text import Text

from specexp import terminal
from specexp.errors import counted
from specexp.figures.style import share, times
from specexp.measure.hardware.phases import PHASES
from specexp.measure.hardware.regression import MARGIN, Change
from specexp.measure.hardware.work import WORK
from specexp.measure.statistics import NOT_CREDIBLE


def heading(about: dict[str, Any]) -> str:
    """The machine in one line; about: from `suites.about`."""
    both = counted(about["threads"], "thread"), counted(about["cores"], "core")
    return (
        f"{about['where']}, {about['dtype']}, {' on '.join(both)}, load average {about['load']:.1f}"
    )


def so_far(interrupted: dict[str, dict[str, list[float]]]) -> str:
    """What a suite had timed before it was interrupted: medians by arm, in milliseconds."""
    [(suite, timed)] = interrupted.items()
    medians = [f"{arm} {1e3 * median(s):.2f} ms" for arm, s in timed.items() if s]
    return f"{suite}, after {', '.join(medians) or 'nothing that it times'}"


def tables(name: str, suite: dict[str, Any]) -> tuple[list[Table], list[str]]:
    """A suite's tables, and the notes below them."""
    return {"peers": _peers, "roofline": _roofline, "round": _round}[name](suite)


def _peers(suite: dict[str, Any]) -> tuple[list[Table], list[str]]:
    table = terminal.table(
        f"peers: {suite['drafter']}, γ = {suite['gamma']}, "
        f"{counted(suite['new_tokens'], 'new token')} for "
        f"{counted(suite['prompts'], 'prompt')}, repeats {suite['repeats']}",
        "tokens/s", "batch", "theirs", "specexp", "specexp / theirs", "same output",
    )  # fmt: skip
    for row in suite["rows"]:
        theirs = "-" if row["their_tok_s"] is None else f"{row['their_tok_s']:.1f}"
        table.add_row(
            WORK[row["work"]], str(row["batch"]), theirs, f"{row['tok_s']:.1f}",
            times(row["ratio"]) if row["ratio"] else "-", _equal(row["equal"]),
        )  # fmt: skip
    notes = [f"{WORK[row['work']]}: {row['missing']}" for row in suite["rows"] if row["missing"]]
    return [table], [
        *notes,
        "whole calls, prefill included, EOS ignored; theirs: transformers' generate() on the same "
        "weights, with a draft model its assisted generation at the same draft length, and "
        "plain decoding for speculation in a batch, which it cannot do; same output: the share "
        "equal to specexp's plain decoding",
        _intervals(suite["prompts"]),
    ]


def changed(compared: Sequence[Change], then: dict[str, Any], now: dict[str, Any]) -> Table:
    """One row per ratio of two reports; worse ones in red."""
    was, about = then.get("about", {}), now["about"]
    differ = (n for n in ("device", "threads", "torch") if was.get(n) != about.get(n))
    other = (f"{n} {was.get(n)}, now {about.get(n)}" for n in differ)
    title = ": ".join(filter(None, ["against an earlier run", "; ".join(other)]))
    rows = terminal.table(title, "ratio", "then", "now", "")
    rows.caption_justify = "left"
    rows.caption = f"worse, better: the intervals are apart by more than {MARGIN:.0%}"
    for change in compared:
        verdict = Text("better", "green") if change.better else Text()
        verdict = Text("worse", "red") if change.worse else verdict
        rows.add_row(Text(change.what), str(change.then), str(change.now), verdict)
    return rows


def _intervals(prompts: int) -> str:
    return f"intervals: timing noise alone, over repeats of the same {counted(prompts, 'prompt')}"


def _equal(output: dict[str, Any] | None) -> str:
    """Share of equal tokens, rows that differ at a near tie, and rows that differ otherwise."""
    if output is None:
        return "-"
    kinds = (("ties", "ties"), ("others", "unexplained"))
    counts = [f"{name}: {output[kind]}" for kind, name in kinds if output[kind]]
    return ", ".join([f"{output['share']:.1%}", *counts])


def _roofline(suite: dict[str, Any]) -> tuple[list[Table], list[str]]:
    copy, rows = suite["copy"], suite["rows"]
    memory = terminal.table(
        f"roofline: a copy moves {copy['gb_s']:.1f} GB/s ({copy['bytes'] / 2e6:.0f} MB read and as "
        f"many written); {suite['turns']} turns",
        "pass", "tokens", "ms", "must read", "GB/s", "of copy's GB/s",
    )  # fmt: skip
    columns = ("pass", "tokens", "bare products, ms", "pass / bare", "pass / one token")
    products = terminal.table("", *columns)
    for row in rows:
        name = row["model"], str(row["tokens"])
        read = f"{row['ms']:.2f}", f"{row['bytes'] / 1e6:.1f} MB", f"{row['gb_s']:.1f}"
        memory.add_row(*name, *read, share(row["of_copy"]))
        over = row["over_bare"]
        bare = (f"{row['bare_ms']:.2f}", times(over)) if over else ("-", "-")
        products.add_row(*name, *bare, times(row["over_step"]))
    notes = []
    if over := rows[0]["over_bare"]:
        notes.append(
            f"a one-token pass of {rows[0]['model']} takes {times(over)} its bare matrix products "
            "by torch; above 1x: attention, norms, launches and the toolkit; below: compiled "
            "kernels beat torch's"
        )
    if not all(row["over_bare"] for row in rows):
        notes.append("no bare products of quantised weights, which torch would widen first")
    if any(row["of_copy"]["value"] > 1 for row in rows):
        notes.append("above 100%: weights that stay in a cache are read faster than memory")
    return [memory, products], notes


def _round(suite: dict[str, Any]) -> tuple[list[Table], list[str]]:
    sides = suite["plain"], suite["fast"]
    table = terminal.table(
        f"round: {suite['drafter']}, one stream, {counted(suite['texts'], 'prompt')}, repeats "
        f"{suite['turns'] // suite['texts']}; ms a round",
        "phase", "plain", "share", f"γ = {suite['gamma']}", "share",
    )  # fmt: skip
    for phase in PHASES:
        both = [side["phases"][phase] for side in sides]
        table.add_row(phase, *(c for p in both for c in (f"{p['ms']:.3f}", share(p["share"]))))
    table.add_row("clean loop", *(c for s in sides for c in (f"{s['round_ms']:.3f}", "")))
    sums, overheads = ([side[key] for side in sides] for key in ("sum_over_round", "overhead"))
    table.add_row("phases / clean loop", *(c for s in sums for c in ("", times(s))))
    table.add_row("overhead", *(c for o in overheads for c in ("", share(o))))
    speedup, accepted = suite["speedup"], suite["acceptance"]
    return [table], [
        "accept: distribution and rule; commit: observe and commit; host: reading the report and "
        "Python between rounds;",
        "clean loop: a round without clocks between phases, to which these should add up (1x); "
        "overhead: its part outside draft and target passes",
        _intervals(suite["texts"]),
        f"acceptance length {accepted['length']:.2f}: speedup {times(speedup['measured'])} "
        f"measured, {speedup['from_passes']:.2f}x predicted from acceptance and the passes alone"
        + f"; {NOT_CREDIBLE}"
        * (speedup["measured"]["doubt"] == NOT_CREDIBLE),
    ]
