"""A store with results, and a grid whose points need no kernel."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlflow.exceptions import MlflowException
from rich.console import Console
from support.artifacts import digests
from support.machines import Idle

from specexp.grids import runner as run
from specexp.grids.machines import local
from specexp.grids.progress import Failure
from specexp.tracking import audit, mlflow_store
from specexp.tracking import runs as track

METRICS = {"acceptance/rate": 0.5, "speedup/measured": 1.25}
SERIES = {"acceptance/at_position": [0.9, 0.8], "speedup/at_batch": {1: 2.0, 32: 0.9}}


def copy_tables(monkeypatch, migrated: Path) -> None:
    """Copy MLflow's tables from a template, as creating them takes seconds."""
    real = mlflow_store.create_tables

    def create(uri: str) -> None:
        if uri.startswith("sqlite") and not Path(uri.removeprefix("sqlite:///")).exists():
            shutil.copy(migrated / "mlflow.db", uri.removeprefix("sqlite:///"))
        real(uri)

    monkeypatch.setattr(mlflow_store, "create_tables", create)


def filled(store: Path) -> Path:
    """The store, with three results that were logged by hand."""
    for number in range(3):
        track.log("mine", {"drafter": "ngram", "x": [number]}, METRICS, SERIES)
    return store


def without_kernels(
    points: Callable[..., Any], monkeypatch, seconds: float = 0
) -> Callable[..., Any]:
    """Points whose result is written without a kernel, after so many seconds; x = 13 fails."""

    def execute(point, attempt, *rest):
        time.sleep(seconds)
        if point.params["x"] == 13:
            raise Failure("error", "planted")
        record = {
            "experiment": point.experiment, "params": point.params, "metrics": METRICS,
            "series": {"acceptance/at_position": {"1": 0.5, "2": 0.25}}, "tags": {"device": "cpu"},
        }  # fmt: skip
        (attempt / "result.json").write_text(json.dumps(record))

    monkeypatch.setattr(local, "execute", execute)
    monkeypatch.setattr(local, "Here", Idle)
    return lambda *xs: points(x=list(xs))


class Outage:
    """MLflow cannot be reached in the first `times` calls; `calls` counts them all."""

    def __init__(self, monkeypatch, times: int):
        self.times, self.calls, self.publish = times, 0, track._publish
        monkeypatch.setattr(track, "_publish", self)

    def __call__(self, folder: Path) -> str:
        self.calls += 1
        if self.calls <= self.times:
            raise MlflowException("database is locked")
        return self.publish(folder)


def problems() -> list[str]:
    """Every violation of an invariant; empty if the store is consistent."""
    return [line for invariant in audit.check() for line in invariant.broken]


def first(mlruns):
    return sorted((mlruns / "results").iterdir())[0]


def run_of(result):
    return (result / ".published").read_text()


def half(result):
    track.client().create_run(track.experiment_id("mine"), tags={"run_key": result.name})


def run_of_key(key):
    [run] = [r for r in active() if r.data.tags.get("run_key") == key]
    return run.info.run_id


def go(points, **options):
    console = Console(record=True, width=300, force_terminal=False)
    code = run.run(points, console, **options)
    return code, console.export_text()


def quiet():
    return Console(quiet=True)


def shown(place=None):
    """Everything active in MLflow except times and ids."""
    place = place or track.backend()
    found = []
    for e in place.experiments():
        for r in place.runs(e.experiment_id):
            points = {
                n: sorted((m.step, m.value) for m in place.history(r.info.run_id, n))
                for n in r.data.metrics
            }
            times = r.info.start_time, r.info.end_time
            found.append((e.name, r.info.run_name, r.info.status, times, r.data.params, r.data.tags,
                          points, digests(place, r)))  # fmt: skip
    return sorted(found, key=repr)


def active() -> list:
    place = track.backend()
    return [r for e in place.experiments() for r in place.runs(e.experiment_id)]
