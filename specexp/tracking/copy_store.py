"""Copies every run of every experiment from one MLflow store to another, and compares them.

MLflow 3.17.2 has no command for this except `migrate-filestore`. The copy uses MLflow's client on
both sides. A copied run has the tag `copied.from`, the id of the original run, however many stores
it went through; an interrupted copy has the tag `copied.half` and is made again. Traces, models and
prompts are not copied.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from specexp.errors import UserError
from specexp.tracking import results
from specexp.tracking import runs as track
from specexp.tracking.mlflow_store import Backend, digests

FROM, HALF, PARENT = "copied.from", "copied.half", "mlflow.parentRunId"
THREADS = 4
ENDED = ("FINISHED", "FAILED", "KILLED")


@dataclass
class Copied:
    """Runs copied, runs found there already, and counts of what was compared. `differences` is
    empty if the stores agree."""

    made: int = 0
    there: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)


def copy(to: str, source: str | None, console: Console) -> bool:
    """`transfer` between two addresses, with a printed summary; returns whether they agree."""
    target = Backend.at(to, results.root())
    place = Backend.at(source, results.root()) if source else track.backend()
    done = transfer(place, target, console)
    seen = ", ".join(f"{n} {what}" for what, n in done.seen.items())
    console.print(f"{done.made} runs copied, {done.there} were there already", highlight=False)
    for line in done.differences:
        console.print(Text("differs", "bold red") + Text(f": {line}", ""), soft_wrap=True)
    agrees = "all equal" if not done.differences else f"{len(done.differences)} differences"
    console.print(f"compared {seen}: {agrees}", highlight=False, soft_wrap=True)
    return not done.differences


def transfer(source: Backend, target: Backend, console: Console) -> Copied:
    """Copy missing runs, then read both sides again and compare them all. Raises UserError, Away,
    Damaged."""
    _check_stores(source, target)
    with results.alone("setup"):
        target.prepare()
    done = Copied()
    experiments = source.experiments(deleted=True)
    runs = [(e, run) for e in experiments for run in reversed(_whole(source, e))]
    for e in experiments:
        _experiment(target, e)
    known = _known(target, {_origin(run) for _, run in runs})

    def copied(each: tuple[Any, Any]) -> tuple[Any, Facts | None]:
        there = known.get(_origin(each[1]))
        if there is not None and _end(there) == _end(each[1]):
            return there, None
        return _copy(source, target, *each, there)

    def compared(each: tuple[Any, Facts | None]) -> tuple[Facts, Facts]:
        run, facts = each
        with target.reaching():
            copy = target.client.get_run(ids[run.info.run_id])
        return facts or _facts(source, run), _facts(target, copy)

    with Progress(console=console, transient=True) as progress:
        copies = list(progress.track(_at_once(copied, runs), len(runs), description="copying"))
        done.made = sum(facts is not None for _, facts in copies)
        done.there = len(copies) - done.made
        pairs = [(run, copy) for (_, run), (copy, _) in zip(runs, copies, strict=True)]
        ids = {run.info.run_id: copy.info.run_id for run, copy in pairs}
        for run, copy in pairs:
            _finish(target, run, copy, ids)
        for e in experiments:
            _delete(target, e)
        todo = [(run, facts) for (_, run), (_, facts) in zip(runs, copies, strict=True)]
        both = progress.track(_at_once(compared, todo), len(todo), description="comparing")
        for (_, run), (old, new) in zip(runs, both, strict=True):
            done.seen.update(old.counts)
            done.differences += [
                f"run {run.info.run_id} ({run.info.run_name}): {what} in {target}"
                for what in old.differs(new, ids)
            ]
    return done


@dataclass(frozen=True)
class Facts:
    """What a copy must share with its original: digests by kind, and counts. `parent`: the parent
    run's id, which differs between stores."""

    kinds: dict[str, str]
    counts: dict[str, int]
    parent: str | None

    def differs(self, copy: Facts, ids: Mapping[str, str]) -> list[str]:
        odd = [what for what in self.kinds if self.kinds[what] != copy.kinds[what]]
        wanted = ids.get(self.parent or "", self.parent)
        return odd + ["parent"] * (wanted != copy.parent)


def _at_once(work: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
    """The results of `work` in order, computed by THREADS threads; stops at the first error."""
    with ThreadPoolExecutor(THREADS, "copy") as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            for future in futures:
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _check_stores(source: Backend, target: Backend) -> None:
    if source.uri == target.uri:
        raise UserError(f"{source} would be copied to itself: name another store")
    if source.file and not source.file.exists():
        raise UserError(f"{source} does not exist")
    if target.file and not target.file.parent.is_dir():
        raise UserError(f"the folder {target.file.parent} does not exist: create it first")
    source.prepare(known=True)


def _whole(place: Backend, experiment: Any) -> list[Any]:
    """Runs of an experiment, newest first, with deleted ones, without interrupted copies."""
    runs = place.runs(experiment.experiment_id, deleted=True)
    return [run for run in runs if HALF not in run.data.tags]


def _origin(run: Any) -> str:
    return str(run.data.tags.get(FROM, run.info.run_id))


def _end(run: Any) -> tuple[str, int]:
    return run.info.status, run.info.end_time


def _experiment(target: Backend, wanted: Any) -> None:
    with target.reaching():
        there = target.client.get_experiment_by_name(wanted.name)
        if there is None:
            location = target.location(wanted.name)
            target.client.create_experiment(wanted.name, location, wanted.tags)
        elif there.lifecycle_stage == "active":
            for key in wanted.tags.keys() - there.tags.keys():
                target.client.set_experiment_tag(there.experiment_id, key, wanted.tags[key])


def _known(target: Backend, origins: set[str]) -> dict[str, Any]:
    """Original run id -> run in the target. Deletes interrupted copies of these originals."""
    known = {}
    for e in target.experiments(deleted=True):
        for run in target.runs(e.experiment_id, deleted=True):
            if HALF not in run.data.tags:
                known[_origin(run)] = known[run.info.run_id] = run
            elif run.data.tags[HALF] in origins and run.info.lifecycle_stage == "active":
                with target.reaching():
                    target.client.delete_run(run.info.run_id)
    return known


def _copy(
    source: Backend, target: Backend, experiment: Any, run: Any, stale: Any
) -> tuple[Any, Facts]:
    """Copy one run to the target; returns the copy and the facts of the original."""
    from mlflow.entities import Param

    client = target.client
    with target.reaching():
        place = client.get_experiment_by_name(experiment.name)
        if place.lifecycle_stage == "deleted":
            raise UserError(f"experiment {experiment.name} is deleted in {target}: restore it")
        if stale and stale.info.lifecycle_stage == "active":
            client.delete_run(stale.info.run_id)
    points = _points(source, run)
    with tempfile.TemporaryDirectory() as folder:
        source.fetch(run, Path(folder))
        facts = _facts(source, run, points, digests(Path(folder)))
        with target.reaching():
            tags = run.data.tags | {HALF: _origin(run)}
            info = run.info
            new = client.create_run(place.experiment_id, info.start_time, tags, info.run_name)
            copy = new.info.run_id
            every = [m for each in points.values() for m in each]
            for at in range(0, len(every), 1000):
                client.log_batch(copy, metrics=every[at : at + 1000])
            params = [Param(n, v) for n, v in run.data.params.items()]
            for at in range(0, len(params), 100):
                client.log_batch(copy, params=params[at : at + 100])
            if run.inputs and run.inputs.dataset_inputs:
                client.log_inputs(copy, run.inputs.dataset_inputs)
            target.put(new, Path(folder))
            if info.status in ENDED:
                client.set_terminated(copy, info.status, info.end_time)
            client.set_tag(copy, FROM, _origin(run))
            client.delete_tag(copy, HALF)
            return client.get_run(copy), facts


def _finish(target: Backend, run: Any, copy: Any, ids: Mapping[str, str]) -> None:
    """Set the parent's new id and the deleted state, once all runs are in the target."""
    if copy.info.lifecycle_stage == "deleted":
        return
    parent = run.data.tags.get(PARENT)
    with target.reaching():
        if parent in ids and copy.data.tags.get(PARENT) != ids[parent]:
            target.client.set_tag(copy.info.run_id, PARENT, ids[parent])
        if run.info.lifecycle_stage == "deleted":
            target.client.delete_run(copy.info.run_id)


def _delete(target: Backend, wanted: Any) -> None:
    """Delete an experiment that is deleted in the source, unless it has active runs here."""
    if wanted.lifecycle_stage == "deleted":
        with target.reaching():
            there = target.client.get_experiment_by_name(wanted.name)
            if there.lifecycle_stage == "active" and not target.runs(there.experiment_id):
                target.client.delete_experiment(there.experiment_id)


def _points(place: Backend, run: Any) -> dict[str, list[Any]]:
    return {name: place.history(run.info.run_id, name) for name in run.data.metrics}


def _facts(
    place: Backend, run: Any, points: dict[str, list[Any]] | None = None,
    artifacts: dict[str, str] | None = None,
) -> Facts:  # fmt: skip
    info, data = run.info, run.data
    points = _points(place, run) if points is None else points
    artifacts = place.digests(run) if artifacts is None else artifacts
    inputs = run.inputs.dataset_inputs if run.inputs else []
    metrics = {
        name: sorted((m.step, m.timestamp, repr(m.value)) for m in each)
        for name, each in points.items()
    }
    tags = {k: v for k, v in data.tags.items() if k not in (FROM, PARENT)}
    kinds = {
        "name": info.run_name, "status": info.status, "times": (info.start_time, info.end_time),
        "lifecycle": info.lifecycle_stage, "parameters": sorted(data.params.items()),
        "tags": sorted(tags.items()), "metrics": sorted(metrics.items()),
        "last values": sorted((n, repr(v)) for n, v in data.metrics.items()),
        "datasets": sorted((d.dataset.name, d.dataset.digest) for d in inputs),
        "artifacts": sorted(artifacts.items()),
    }  # fmt: skip
    counts = {
        "runs": 1, "parameters": len(data.params), "metric points": sum(map(len, metrics.values())),
        "tags": len(tags), "artifacts": len(artifacts),
    }  # fmt: skip
    shown = {what: results.digest(repr(value).encode()) for what, value in kinds.items()}
    return Facts(shown, counts, data.tags.get(PARENT))
