"""Checks that the store is consistent with itself and with MLflow. Reads only.

Points that another process has claimed are skipped. As others may change the store meanwhile, a
violation is only reported if two consecutive looks find it.
"""

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
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


@dataclass(frozen=True)
class Invariant:
    """A statement, checked on `count` things; `broken`: one line per violation; `beside`: lines
    about what is as somebody wanted it."""

    statement: str
    count: int
    broken: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()


def problems() -> list[str]:
    """Every violation; empty if the store is consistent."""
    return [line for invariant in check() for line in invariant.broken]


def check() -> list[Invariant]:
    """Every invariant, with the violations that two looks found."""
    first = _look()
    if not any(invariant.broken for invariant in first):
        return first
    time.sleep(PAUSE_S)
    before = {p.statement: p.broken for p in first if p.statement != READABLE}
    return [
        replace(
            p, broken=tuple(line for line in p.broken if line in before.get(p.statement, p.broken))
        )
        for p in _look()
    ]


def _look() -> list[Invariant]:
    """Every invariant, with its violations at this moment."""
    results = {p.name: p for p in _folders("results")}
    failed = _folders("failed")
    attempts = _folders("attempts")
    busy = set(store.claims())
    try:
        unsound = track.backend().sound()
        shown: dict[str, list[Any]] | None = _shown()
        missing = presence.missing([*results.values(), *failed])
        unreadable = tuple(f"{line}{_REBUILD}" for line in unsound)
    except (track.StoreCorrupt, track.StoreUnreachable) as e:
        shown, unreadable = None, (str(e),)
    busy |= set(store.claims())
    results = {key: p for key, p in results.items() if key not in busy}
    failed = [p for p in failed if store.key_of(p) not in busy]
    publishable = [p for p in failed if track.publishable(p)]
    ours = [p for p in attempts if store.key_of(p) not in busy and p.exists()]
    invariants = [
        Invariant("results are intact", len(results), tuple(_torn(results))),
        Invariant("attempts belong to a running process", len(attempts), tuple(_left(ours))),
        Invariant(READABLE, 1, unreadable),
    ]
    if shown is not None:
        runs = {k: each for k, each in shown.items() if k not in busy}
        gone = {*missing.deleted, *missing.failures}
        beside = tuple(replace(missing, lost=()).lines())
        invariants += [
            Invariant("results are in MLflow once and equal", len(results),
                    tuple(_unlike(results, gone, runs)), beside),
            Invariant("failed points are in MLflow as failures", len(publishable),
                    tuple(_unshown(publishable, failed, gone, results, runs))),
            Invariant("runs in MLflow have ended", sum(map(len, shown.values())),
                    tuple(_running(runs))),
        ]  # fmt: skip
    return invariants


def show(console: Console) -> bool:
    """Print the invariants, their violations and who is at work; returns whether all hold."""
    if not store.root().exists():
        console.print(Text(f"no store at {store.root()} yet: nothing to check"), soft_wrap=True)
        return True
    invariants = check()
    for invariant in invariants:
        state = Text("broken  ", "bold red") if invariant.broken else Text("ok      ", "green")
        console.print(
            state + Text(f"{invariant.count:6d}  {invariant.statement}", ""), soft_wrap=True
        )
        for line in (*invariant.broken, *invariant.beside):
            console.print(Text(f"                {line}", ""), soft_wrap=True)
    for key, who in store.claims().items():
        console.print(Text(f"claimed         {key}: {who}", ""), soft_wrap=True)
    console.print(Text(f"store {store.root()}, runs in {track.where()}"), soft_wrap=True)
    return not any(invariant.broken for invariant in invariants)


def _folders(name: str) -> list[Path]:
    return [path for path in store.listed(name) if path.is_dir()]


def _torn(results: Mapping[str, Path]) -> Iterator[str]:
    for key, result in results.items():
        if not track.publishable(result):
            yield f"results/{key} changed since it was committed: run its grid again"


def _left(attempts: list[Path]) -> Iterator[str]:
    for attempt in attempts:
        yield f"attempts/{attempt.name} was left by a process that died: run any grid"


def _shown() -> dict[str, list[Any]]:
    """run_key -> active runs in MLflow."""
    runs = defaultdict(list)
    backend = track.backend()
    for experiment in backend.experiments() if track.has_database() else []:
        for run in filter(track.is_ours, backend.runs(experiment.experiment_id)):
            runs[run.data.tags["run_key"]].append(run)
    return dict(runs)


def _unlike(
    results: Mapping[str, Path], gone: Set[Path], shown: Mapping[str, list[Any]]
) -> Iterator[str]:
    for key, result in results.items():
        if result in gone:
            continue
        by_rival = defaultdict(list)
        for run in shown.get(key, []):
            if run.info.status == "FINISHED":
                by_rival[track.rival_of(run)].append(run)
        parts = store.runs_in(store.read(result / store.RESULT))
        for rival in {**parts, **by_rival}:
            runs = by_rival[rival]
            if len(runs) != 1 or rival not in parts:
                what = f"results/{key}{rival and f' with {rival}'}"
                yield f"{what} is in MLflow {len(runs)} times, not once{_REBUILD}"
                continue
            [run] = runs
            for what in _differences(run, parts[rival]):
                yield f"results/{key}: {what} differs in MLflow's run {run.info.run_id}"
    for key, runs in shown.items():
        for run in runs:
            if track.own() and run.info.status == "FINISHED" and key not in results:
                yield f"MLflow's run {run.info.run_id} is of results/{key}, which is missing"


def _differences(run: Any, record: Mapping[str, Any]) -> Iterator[str]:
    if not record:
        return
    if not track.is_whole(run):
        yield "the run, which was only published in part,"
    if run.data.params != mlflow_view.as_params(record):
        yield "a parameter"
    points = mlflow_view.as_points(record)
    latest = {name: value for name, _, value in sorted(points, key=lambda p: p[1])}
    if run.data.metrics != latest:
        yield "a metric"
    for name in record["series"]:
        expected = sorted((step, value) for n, step, value in points if n == name)
        logged = track.backend().history(run.info.run_id, name)
        if sorted((m.step, m.value) for m in logged) != expected:
            yield name


def _unshown(
    publishable: list[Path], failed: list[Path], gone: Set[Path], results: Mapping[str, Path],
    shown: Mapping[str, list[Any]],
) -> Iterator[str]:  # fmt: skip
    names = {folder.name for folder in failed}
    last = {store.key_of(f): f for f in sorted(publishable, key=store.ended_ms)}
    for key, folder in sorted(last.items()):
        runs = [r for r in shown.get(key, []) if r.info.status in ("FAILED", "KILLED")]
        if len(runs) > 1 or not (runs or key in results or folder in gone):
            yield f"failed/{key}-* is in MLflow {len(runs)} times, not once{_REBUILD}"
        for run in runs:
            if run.data.tags.get("attempt") not in names:
                yield f"MLflow's run {run.info.run_id} is of a failed attempt that is missing"


def _running(shown: Mapping[str, list[Any]]) -> Iterator[str]:
    for key, runs in shown.items():
        for run in runs:
            if run.info.status not in ENDED:
                named = f"{run.info.run_id} {json.dumps(run.info.run_name)} ({key})"
                yield f"MLflow's run {named} is {run.info.status}, and nobody runs it{_REBUILD}"
