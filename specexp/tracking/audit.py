"""Checks that the store is consistent with itself and with MLflow. Reads only.

Points that another process has claimed are skipped. As others may change the store meanwhile, a
violation is only reported if two consecutive looks find it.
"""

import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from specexp.tracking import mlflow_view, presence
from specexp.tracking import results as store
from specexp.tracking import runs as track

ENDED = ("FINISHED", "FAILED", "KILLED")
READABLE = "MLflow can be read"
PAUSE_S = 0.3
_REBUILD = ": run `specexp store rebuild`"
_OR_REBUILD = ": run its grid again, or `specexp store rebuild`"


@dataclass(frozen=True)
class Invariant:
    """A statement, checked on `count` things. `broken`: a line for each violation; `notes`: a line
    for each exception that somebody made on purpose."""

    statement: str
    count: int
    broken: Sequence[str] = ()
    notes: Sequence[str] = ()


def check() -> list[Invariant]:
    """Every invariant, with the violations that two looks found."""
    first = _look()
    if not any(invariant.broken for invariant in first):
        return first
    time.sleep(PAUSE_S)
    before = {p.statement: p.broken for p in first if p.statement != READABLE}
    return [
        replace(p, broken=[line for line in p.broken if line in before.get(p.statement, p.broken)])
        for p in _look()
    ]


def _look() -> list[Invariant]:
    """Every invariant, with its violations at this moment."""
    folders = {
        name: [path for path in store.listed(name) if path.is_dir()]
        for name in ("results", "failed", "attempts")
    }
    busy = set(store.claims())
    shown: dict[str, list[Any]] | None = None
    try:
        unreadable = [f"{line}{_REBUILD}" for line in track.backend().integrity_problems()]
        shown = _shown()
        ended = (*folders["results"], *folders["failed"])
        gaps = presence.find_gaps({f: presence.shown_as(f) for f in ended})
    except (track.StoreCorrupt, track.StoreUnreachable) as e:
        shown, unreadable = None, [str(e)]
    busy |= set(store.claims())
    results, failed, attempts = (
        [path for path in paths if store.key_of(path) not in busy] for paths in folders.values()
    )
    torn = {path for path in results if not track.publishable(path)}
    changed = "changed since it was committed: run its grid again"
    left = [
        f"attempts/{path.name} was left by a process that died: run any grid"
        for path in attempts
        if path.exists()
    ]
    invariants = [
        Invariant("results are intact", len(results),
                  [f"results/{path.name} {changed}" for path in sorted(torn)]),
        Invariant("attempts belong to a running process", len(attempts), left),
        Invariant(READABLE, 1, unreadable),
    ]  # fmt: skip
    if shown is None:
        return invariants
    runs = {key: each for key, each in shown.items() if key not in busy}
    gone = {*gaps.deleted, *gaps.failures}
    publishable = [path for path in failed if track.publishable(path)]
    bare = [f for f in gaps.bare if store.key_of(f) not in busy]
    without = [f"{f.parent.name}/{f.name}: MLflow lacks its files{_OR_REBUILD}" for f in bare]
    return [
        *invariants,
        Invariant("results are in MLflow once and equal", len(results),
                  [*_unequal_results(results, gone | torn, runs), *without],
                  replace(gaps, vanished=[], bare=[]).lines()),
        Invariant("failed points are in MLflow as failures", len(publishable),
                  [*_unequal_failures(publishable, failed, gone, results, runs)]),
        Invariant("runs in MLflow have ended", sum(map(len, shown.values())), [*_unended(runs)]),
    ]  # fmt: skip


def show(console: Console) -> bool:
    """Print the invariants, their violations and who is at work; returns whether all hold."""
    if not store.root().exists():
        console.print(Text(f"no store at {store.root()} yet: nothing to check"), soft_wrap=True)
        return True
    invariants, lines = check(), [Text("        checked")]
    for invariant in invariants:
        state = Text("broken  ", "bold red") if invariant.broken else Text("ok      ", "green")
        lines.append(state + Text(f"{invariant.count:7d}  {invariant.statement}", ""))
        lines += [Text(f"{'':17s}{line}") for line in (*invariant.broken, *invariant.notes)]
    lines += [Text(f"claimed          {key}: {who}") for key, who in store.claims().items()]
    if not any(invariant.broken for invariant in invariants) and not track.has_database():
        lines.append(Text("no runs published yet: `specexp grid run` publishes them"))
    lines.append(Text(f"store {store.root()}, runs in {track.where()}"))
    console.print(Text("\n").join(lines), soft_wrap=True)
    return not any(invariant.broken for invariant in invariants)


def _shown() -> dict[str, list[Any]]:
    """run_key -> active runs in MLflow."""
    runs = defaultdict(list)
    backend = track.backend()
    for experiment in backend.experiments() if track.has_database() else []:
        for run in filter(track.is_ours, backend.runs(experiment.experiment_id)):
            runs[run.data.tags["run_key"]].append(run)
    return dict(runs)


def _unequal_results(
    results: Iterable[Path], ignored: Set[Path], shown: Mapping[str, list[Any]]
) -> Iterator[str]:
    for result in results:
        record = store.read(result / store.RESULT)
        if result in ignored or not record:  # which somebody set aside meanwhile
            continue
        done = [run for run in shown.get(result.name, []) if run.info.status == "FINISHED"]
        parts = store.runs_in(record)
        for rival in {**parts, **dict.fromkeys(map(track.rival_of, done))}:
            runs = [run for run in done if track.rival_of(run) == rival]
            if len(runs) != 1 or rival not in parts:
                what = f"results/{result.name}{rival and f' with {rival}'}"
                yield f"{what} is in MLflow {len(runs)} times, not once{_REBUILD}"
                continue
            for what in _differences(runs[0], parts[rival]):
                run_id = runs[0].info.run_id
                yield f"results/{result.name}: {what} differs in MLflow's run {run_id}"
    keys = {result.name for result in results}
    for key in (shown.keys() - keys) if track.own() else ():
        for run in shown[key]:
            if run.info.status == "FINISHED":
                yield f"MLflow's run {run.info.run_id} is of results/{key}, which is missing"


def _differences(run: Any, record: Mapping[str, Any]) -> Iterator[str]:
    if not track.is_whole(run):
        yield "the run, which was only published in part,"
    if run.data.params != mlflow_view.as_params(record):
        yield "a parameter"
    points = mlflow_view.as_points(record)
    latest = {name: value for name, _, value in sorted(points, key=lambda p: p[1])}
    if {name: mlflow_view.rounded(value) for name, value in run.data.metrics.items()} != latest:
        yield "a metric"
    for name in record["series"]:
        expected = sorted((step, value) for n, step, value in points if n == name)
        logged = track.backend().history(run.info.run_id, name)
        if sorted((m.step, mlflow_view.rounded(m.value)) for m in logged) != expected:
            yield name


def _unequal_failures(
    publishable: list[Path], failed: list[Path], gone: Set[Path], results: Iterable[Path],
    shown: Mapping[str, list[Any]],
) -> Iterator[str]:  # fmt: skip
    names, done = {folder.name for folder in failed}, {result.name for result in results}
    last = {store.key_of(f): f for f in sorted(publishable, key=store.ended_ms)}
    for key, folder in sorted(last.items()):
        runs = [r for r in shown.get(key, []) if r.info.status in ("FAILED", "KILLED")]
        if len(runs) > 1 or not (runs or key in done or folder in gone):
            yield f"failed/{key}-* is in MLflow {len(runs)} times, not once{_REBUILD}"
        for run in runs:
            if run.data.tags.get("attempt") not in names:
                yield f"MLflow's run {run.info.run_id} is of a failed attempt that is missing"


def _unended(shown: Mapping[str, list[Any]]) -> Iterator[str]:
    for key, runs in shown.items():
        for run in runs:
            if run.info.status not in ENDED:
                named = f"{run.info.run_id} {json.dumps(run.info.run_name)} ({key})"
                yield f"MLflow's run {named} is {run.info.status}, and nobody runs it{_REBUILD}"
