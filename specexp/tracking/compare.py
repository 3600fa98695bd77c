"""Finished runs side by side as a table. Runs nothing."""

from functools import partial
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specexp.errors import brief
from specexp.terminal import ROWS
from specexp.tracking import mlflow_view, provenance, results
from specexp.tracking import runs as track
from specexp.zoo import naming

NAMED = ("drafter", "policy")  # in every table, even if all runs share them
PARAMETER = " (parameter)"  # behind the name of one's own that is also another column's
WHOLE = (*NAMED, "speedup", "timing")  # not broken in a narrow terminal
GROUPS = frozenset((
    "acceptance", "category", "category_ci", "cost", "costs", "counts", "exact", "fleet", "goodput",
    "latency", "load", "map", "memory", "regret", "served", "simulated", "speedup", "tax",
    "throughput",
))  # fmt: skip
"""Of the metrics that this project's notebooks log; those of others are one's own."""


def has_doubtful_timing(result: Path) -> bool:
    """Whether a timing of a result, or of a rival in it, is not credible."""
    record = results.read(result / results.RESULT)
    return any(map(mlflow_view.not_credible, results.runs_in(record).values()))


def show(console: Console, runs: pd.DataFrame) -> None:
    """Print runs as tables, of each experiment the first ROWS, then where to find everything."""
    for experiment, part in runs.groupby("experiment") if len(runs) else ():
        console.print()
        console.print(table(str(experiment), part.head(ROWS)))
        if len(part) > ROWS:
            console.print(f"and {len(part) - ROWS:,} more, in the report")
    console.print()
    for what, where in {
        "runs": track.where(),
        "notebooks": results.root() / "results" / "*" / results.PAGE,
        "compare": "make ui (or specexp ui), then open the link it prints",
        **({"decide": "specexp recommend"} if "metrics.speedup/measured" in runs else {}),
    }.items():
        console.print(Text(f"{what:10s} {where}"), soft_wrap=True)


def table(experiment: str, runs: pd.DataFrame) -> Table:
    """The overview of one experiment for the terminal: to fit, without categories, acceptance
    lengths and the check's power if it asks about others. What tells runs apart is never cut."""
    view = overview(runs.drop(columns="experiment"))
    if {"speedup", "regret", "replicas"} & {*view}:
        left_out = [
            c for c in view if c in ("detects a bias of", "length") or c.startswith("accepted: ")
        ]
        view = view.drop(columns=left_out)
    title = Text(experiment, "table.title")
    mark = " simulated"
    marked = [column for column in view if view[column].str.endswith(mark).all()]
    view[marked] = view[marked].apply(lambda cells: cells.str.removesuffix(mark))  # once is enough
    view = view.rename(columns={column: column + mark for column in marked})
    out = Table(*view, title=title, title_justify="left", box=None, header_style="bold",
                padding=(0, 1, 0, 0), pad_edge=False, min_width=len(experiment))  # fmt: skip
    for column in out.columns:
        column.no_wrap, column.overflow = column.header in WHOLE, "fold"
    for row in view.itertuples(index=False):
        out.add_row(*map(Text, row))
    return out


def short(runs: pd.DataFrame) -> pd.DataFrame:
    """The same runs with drafters by their full names, and with paths and hub ids in their
    parameters cut to what tells them apart."""
    if {"params.drafter", "params.target"} <= {*runs}:
        of = runs[["params.drafter", "params.target"]].fillna("")
        named = [naming.called(drafter, target) if drafter else None
                 for drafter, target in of.itertuples(index=False)]  # fmt: skip
        runs = runs.assign(**{"params.drafter": pd.Series(named, runs.index, dtype=object)})
    columns = {name: list(runs[name].dropna().unique()) for name in runs if name[:7] == "params."}
    return runs.assign(**{
        name: runs[name].map(partial(brief, among=values), na_action="ignore")
        for name, values in columns.items()
    })  # fmt: skip


def overview(runs: pd.DataFrame) -> pd.DataFrame:
    """One row per run: what was paired, then the logged figures, then the parameters that differ
    between runs of an experiment and what differs in the machines and libraries that made them.
    Metrics of one's own are shown by their names, as are all of an experiment that logged no figure
    known here. Figures of the groups in a run's tag `simulated` are marked so, and parameters that
    are named like a figure or a fact."""
    runs = short(runs)
    view, differing, facts = (pd.DataFrame(index=runs.index) for _ in range(3))
    if "experiment" in runs:
        view["experiment"] = runs["experiment"]
    of_one = runs.get("experiment", pd.Series("", runs.index))
    for name in _named("params", runs):
        column = runs[f"params.{name}"]
        values = column.groupby(of_one).agg(lambda part: part.nunique(dropna=False))
        if name in NAMED or (values > 1).any():
            part = view if name in NAMED else differing
            part[name] = column.fillna("").astype(str)
    for fact in (f for f in provenance.FACTS if f"tags.{f}" in runs):
        facts[fact] = _differing(runs[f"tags.{fact}"])
    view["speedup"] = _metric(runs, "speedup/measured", "{:.2f}x", "speedup/ci")
    credible = _metric(runs, "speedup/credible", "{:.0f}")
    view["best γ"] = _metric(runs, "speedup/best_gamma", "{:.0f}")
    view["timing"] = credible.map({"0": "doubtful"}).fillna("")
    view["regret"] = _metric(runs, "regret/worst", "{:.1%}", "regret/worst")
    view["replicas"] = _metric(runs, "fleet/replicas", "{:.0f}")
    view["accepted"] = _metric(runs, "acceptance/rate", "{:.0%}", "acceptance/rate_ci")
    view["length"] = _metric(runs, "acceptance/length", "{:.2f}")
    view["predicted"] = _metric(runs, "speedup/predicted", "{:.2f}x")
    view["in the largest batch"] = _metric(runs, "speedup/at_largest_batch", "{:.2f}x")
    view["slower in a batch of"] = _metric(runs, "throughput/crossing_batch", "{:.0f}")
    view["TTFT p95"] = _metric(runs, "latency/ttft_p95_ms", "{:.0f} ms")
    view["TPOT p95"] = _metric(runs, "latency/tpot_p95_ms", "{:.0f} ms")
    view["tok/s"] = _metric(runs, "throughput/tok_s", "{:.0f}")
    view["bias"] = _metric(runs, "exact/total_variation", "{:.1%}")
    exact = _metric(runs, "exact/pass", "{:.0f}").map({"1": "yes", "0": "BUG", "": ""})
    lossy = (exact == "BUG") & (runs.get("metrics.exact/bugs", 1) == 0)
    view["exact"] = exact.mask(lossy, "lossy")
    view["detects a bias of"] = _metric(runs, "exact/detectable_tv", "TV {:.2f}")
    several = categories(runs)
    for category in several if len(several) > 1 else ():  # one is all that was accepted
        name, ends = f"category/{category}", f"category_ci/{category}"
        view[f"accepted: {category}"] = _metric(runs, name, "{:.0%}", ends)
    figures = view.drop(columns=["experiment", *NAMED, "exact"], errors="ignore")
    answered = figures.astype(bool).any(axis=1).groupby(of_one).transform("any")
    metrics = _named("metrics", runs)
    more: dict[str, pd.Series] = {}
    for name in metrics:
        if name.rpartition("_")[0] in metrics and name.endswith(("_low", "_high")):
            continue
        own = _metric(runs, name, "{:.4g}", name)
        more[name] = own.where(~answered | (name.partition("/")[0] not in GROUPS), "")
    view = pd.DataFrame({str(c): view[c] for c in view} | more)
    view = view.join(differing.join(facts, lsuffix=PARAMETER), rsuffix=PARAMETER)
    return view[[c for c in view if view[c].astype(bool).any()]]


def _named(kind: str, runs: pd.DataFrame, mark: str = ".") -> list[str]:
    """The names of the runs' `params` or `metrics`."""
    return [column.partition(mark)[2] for column in runs if column.startswith(f"{kind}{mark}")]


def categories(runs: pd.DataFrame) -> list[str]:
    """The categories of prompts whose acceptance rate was logged."""
    return sorted(_named("metrics.category", runs, "/"))


def curves(runs: pd.DataFrame, series: str) -> pd.DataFrame:
    """One series of all runs that logged it, with its interval: columns run_id, drafter, target,
    step, value, low and high (the value where none was logged), and whether it is credible."""
    column = f"metrics.{series}"
    having = runs[runs[column].notna()] if column in runs else runs.head(0)
    rows = []
    for _, run in having.iterrows():
        value, *ends = (track.curve(run["run_id"], f"{series}{e}") for e in ("", "_low", "_high"))
        about = run["run_id"], *(run.get(f"params.{name}", "") for name in ("drafter", "target"))
        credible = run.get("metrics.speedup/credible") != 0
        rows += [
            [*about, step, y, *(end.get(step, y) for end in ends), credible]
            for step, y in sorted(value.items())
        ]  # fmt: skip
    columns = ["run_id", "drafter", "target", "step", "value", "low", "high", "credible"]
    return pd.DataFrame(rows, columns=columns)


def _differing(texts: pd.Series) -> pd.Series:
    """The comma-separated parts of each text that not all of them have."""
    rows = [text.split(", ") if isinstance(text, str) else [] for text in texts]
    shared = set.intersection(*map(set, filter(None, rows))) if any(rows) else set()
    rest = [", ".join(part for part in row if part not in shared) for row in rows]
    return pd.Series(rest, texts.index, dtype=object)


def _metric(runs: pd.DataFrame, name: str, form: str, ends: str = "") -> pd.Series:
    """A metric as text, with its interval if its ends are logged: those begin with `ends`."""
    if f"metrics.{name}" not in runs:
        return pd.Series("", runs.index, dtype=object)
    names = (name, *(f"{ends}_{side}" for side in ("low", "high") if ends))
    columns = runs.reindex(columns=[f"metrics.{n}" for n in names]).itertuples(index=False)
    simulated = runs.get("tags.simulated", pd.Series("", index=runs.index)).fillna("")
    cells = []
    for (value, *between), groups in zip(columns, simulated, strict=True):
        low, high = between or (value, value)
        mark = " simulated" * (name.partition("/")[0] in groups.split(", "))
        cells.append("" if pd.isna(value) else mlflow_view.figure(form, value, low, high) + mark)
    return pd.Series(cells, runs.index, dtype=object)
