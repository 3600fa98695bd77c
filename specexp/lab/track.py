"""How results reach MLflow, and are read from it.

A notebook calls `parameters` and `log`. Under the runner `log` writes into the attempt folder it
was given and nothing else: a kernel never opens the store. By hand the same call makes an attempt
of its own, commits it and publishes it. Only what is committed or failed for good is published,
and publishing it twice changes nothing.

Runs go to `mlflow.db` and `artifacts/` in the store, or to the server MLFLOW_TRACKING_URI names.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import platform
import re
import sqlite3
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas as pd

from specexp.errors import UserError
from specexp.lab import secret, store, view

_METRIC = re.compile(r"[a-z0-9_]+/[A-Za-z0-9_.-]+")
_DAMAGE = ("file is not a database", "malformed", "Can't locate revision", "no such table")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,80}")
_IPYTHON = {"In", "Out", "exit", "quit", "get_ipython", "open"}
_VERSIONS = ("specexp", "torch", "transformers")


# --- what notebooks call -------------------------------------------------------------------------


def parameters(names: Mapping[str, Any]) -> dict[str, Any]:
    """The notebook's parameters: every public name with a plain value, `globals()` being given."""
    return {
        name: value
        for name, value in names.items()
        if not name.startswith("_")
        and name not in _IPYTHON
        and (value is None or isinstance(value, int | float | str | bool | list))
    }


def log(
    experiment: str,
    params: Mapping[str, Any],
    metrics: Mapping[str, float],
    series: Mapping[str, Sequence[float] | Mapping[int, float]] | None = None,
    tags: Mapping[str, str] | None = None,
    tables: Mapping[str, pd.DataFrame] | None = None,
    figures: Mapping[str, Any] | None = None,
) -> None:
    """Record one run: metrics `group/name`, series by step (lists count from 1), tables, figures.

    Under the runner the grid's experiment takes the place of this one. Raises UserError for a
    name or a value that could not be compared later.
    """
    curves = {
        name: dict(enumerate(values, 1)) if not isinstance(values, Mapping) else dict(values)
        for name, values in (series or {}).items()
    }
    record = {
        "experiment": os.environ.get("SPECEXP_EXPERIMENT", experiment),
        "params": dict(params),
        "metrics": {name: float(value) for name, value in metrics.items()},
        "series": {n: {str(k): float(v) for k, v in c.items()} for n, c in curves.items()},
        "tags": {**provenance(), **(tags or {})},
    }
    problems = problems_of(record)
    if problems:
        raise UserError("; ".join(problems))
    given = os.environ.get("SPECEXP_ATTEMPT")
    if given:
        _write(Path(given), record, tables or {}, figures or {})
        return
    key = f"byhand-{uuid.uuid4().hex[:10]}"
    with store.claim(key):
        attempt = store.new_attempt(key)
        _write(attempt, record, tables or {}, figures or {})
        name = f"{params.get('drafter', experiment)} by hand"
        result = store.commit(attempt, key, {"name": name, "status": "FINISHED"})
        with store.alone("setup"):
            initialise()
        publish(result)
    print(f"logged to {where()}; compare with: specexp ui")


def _write(
    attempt: Path, record: dict[str, Any],
    tables: Mapping[str, pd.DataFrame], figures: Mapping[str, Any],
) -> None:  # fmt: skip
    if (attempt / store.RESULT).exists():
        raise UserError("this notebook logged already; one run logs once")
    for name, table in tables.items():
        table.to_parquet(attempt / f"{_file_name(name)}.parquet")
    for name, figure in figures.items():
        (attempt / "figures").mkdir(exist_ok=True)
        path = attempt / "figures" / f"{_file_name(name)}.png"
        figure.savefig(path, dpi=110, bbox_inches="tight")
    (attempt / store.RESULT).write_text(json.dumps(record, indent=1))


def _file_name(name: str) -> str:
    if not _FILE.fullmatch(name):
        raise UserError(f"name tables and figures by letters, digits, - and _, not {name!r}")
    return name


def problems_of(record: Mapping[str, Any]) -> list[str]:
    """Why a record cannot be published: bad names, values that are not finite."""
    flat = dict(record["metrics"])
    for name, curve in record["series"].items():
        flat |= {f"{name} at {step}": value for step, value in curve.items()}
    names = [*record["metrics"], *record["series"]]
    return [
        *(f"metric {n!r} is not named group/name" for n in names if not _METRIC.fullmatch(n)),
        *(f"{n} is {v}, not a finite number" for n, v in flat.items() if not math.isfinite(v)),
    ]


def provenance() -> dict[str, str]:
    """Tags that say where a run came from: versions, device, threads, load, commit."""
    import torch

    versions = {f"version.{name}": metadata.version(name) for name in _VERSIONS}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        **versions,
        "version.python": platform.python_version(),
        "device": device,
        "threads": str(torch.get_num_threads()),
        "load": f"{os.getloadavg()[0]:.2f}",
        "git.commit": _git("rev-parse", "HEAD"),
        "git.dirty": str(bool(_git("status", "--porcelain", "--untracked-files=no"))).lower(),
    }


def _git(*args: str) -> str:
    asked = ["git", *args]
    done = subprocess.run(asked, cwd=store.ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


# --- MLflow --------------------------------------------------------------------------------------


def uri() -> str:
    """Where runs are tracked: MLFLOW_TRACKING_URI, or the store's own database."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{store.root() / 'mlflow.db'}"


def where() -> str:
    """The same for people: a path, or an address without its password."""
    if own():
        return str(store.root() / "mlflow.db")
    return re.sub(r"//[^/@]*@", "//", uri())


def own() -> bool:
    """Are runs tracked in the store's own database?"""
    return not os.environ.get("MLFLOW_TRACKING_URI")


def client() -> Any:
    """An MLflow client; its calls fail after seconds, not minutes, when a server is away."""
    _settle_mlflow()
    from mlflow import MlflowClient

    return MlflowClient(uri())


def _settle_mlflow() -> None:
    for name, value in {
        "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    }.items():  # fmt: skip
        os.environ.setdefault(name, value)
    for noisy in ("alembic", "mlflow.store.db.utils"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)


class Away(Exception):
    """MLflow cannot be reached, or is busy, now; what was to be shown is safe and can be later."""


class Damaged(Exception):
    """The store's database cannot be read."""


@contextmanager
def _reaching() -> Iterator[None]:
    """Tell why a call to MLflow failed: a full disk, a damaged database, or nobody there."""
    from mlflow.exceptions import MlflowException
    from requests import RequestException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, RequestException, SQLAlchemyError, sqlite3.Error) as e:
        said = str(e)
        if "disk is full" in said or "No space left" in said:
            raise OSError(errno.ENOSPC, "No space left on device", where()) from e
        if any(words in said for words in _DAMAGE):
            raise Damaged(f"{where()} cannot be read: run `specexp store rebuild`") from e
        raise Away(secret.hide(said.strip().splitlines()[0][:200])) from e


def initialise() -> None:
    """Create the database if it is ours and not there, or follow the store where it was moved to;
    by one process at a time (`store.alone`), as two would ruin it, and aside, as one that dies
    halfway would too."""
    if own() and (store.root() / "mlflow.db").exists():
        _follow()
    elif own():
        _create()


def _create() -> None:
    _settle_mlflow()
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    new = store.root() / "mlflow.db.new"
    for name in (new.name, f"{new.name}-wal", f"{new.name}-shm", f"{new.name}-journal"):
        new.with_name(name).unlink(missing_ok=True)
    with _reaching():
        SqlAlchemyStore(f"sqlite:///{new}", str(store.root() / "artifacts")).engine.dispose()
    with closing(sqlite3.connect(new)) as db:
        db.execute("PRAGMA journal_mode=wal")
    os.rename(new, store.root() / "mlflow.db")


def _follow() -> None:
    """MLflow remembers where artifacts lie by absolute paths; the store may have been moved."""
    with _reaching(), closing(sqlite3.connect(store.root() / "mlflow.db", timeout=20)) as db, db:
        rows = db.execute("SELECT experiment_id, name, artifact_location FROM experiments")
        for number, name, old in rows.fetchall():
            now = _artifacts(name)
            if old != now and old.endswith(now.removeprefix(store.root().as_uri())):
                db.execute(
                    "UPDATE experiments SET artifact_location = ? WHERE experiment_id = ?",
                    (now, number),
                )
                db.execute(
                    "UPDATE runs SET artifact_uri = ? || substr(artifact_uri, ?) "
                    "WHERE experiment_id = ? AND substr(artifact_uri, 1, ?) = ?",
                    (now, len(old) + 1, number, len(old), old),
                )


def _artifacts(experiment: str) -> str:
    return (store.root() / "artifacts" / experiment).as_uri()


def experiment_id(name: str) -> str:
    """The experiment of this name, made if need be."""
    from mlflow.exceptions import MlflowException

    mlflow = client()
    found = mlflow.get_experiment_by_name(name)
    if found is None:
        place = _artifacts(name) if own() else None
        try:
            return str(mlflow.create_experiment(name, artifact_location=place))
        except MlflowException:  # somebody else was faster
            found = mlflow.get_experiment_by_name(name)
            if found is None:
                raise
    return str(found.experiment_id)


def published(folder: Path) -> bool:
    """Is it known that MLflow, where we track now, shows this folder?"""
    return _marker(folder).exists()


def publish(folder: Path) -> str:
    """Show a result or a failed attempt in MLflow, once, and remember it; returns the run's id.
    Raises Away, Damaged, or OSError where a disk is full.

    The folder's tags.json holds the run's tags, `run_key`, `attempt` and `status` among them.
    """
    marker = _marker(folder)
    if not marker.exists():
        with _reaching():
            run_id = _publish(folder)
        marker.write_text(run_id)
    return marker.read_text()


def _marker(folder: Path) -> Path:
    return folder / ("published" if own() else f"published-{store.digest(uri().encode())[:8]}")


def _publish(folder: Path) -> str:
    from mlflow.entities import Metric, Param, RunTag

    tags = store.read(folder / store.TAGS)
    status, name = tags.pop("status"), tags.pop("name", tags["run_key"])
    record = store.read(folder / (store.RESULT if status == "FINISHED" else store.POINT))
    mlflow, experiment = client(), experiment_id(record["experiment"])
    for old in mlflow.search_runs([experiment], f"tags.run_key = '{tags['run_key']}'"):
        whole = old.data.tags.get("published") == "1"
        if whole and old.data.tags.get("attempt") == tags["attempt"]:
            return str(old.info.run_id)
        if not (whole and old.info.status == "FINISHED" != status):
            mlflow.delete_run(old.info.run_id)
        elif old.info.end_time > (folder / store.TAGS).stat().st_mtime * 1000:
            return str(old.info.run_id)  # what failed was made up for before it could be told
    now = int(time.time() * 1000)
    run = mlflow.create_run(experiment, run_name=name, tags=record.get("tags", {}) | tags)
    metrics = [Metric(n, v, now, 0) for n, v in record.get("metrics", {}).items()]
    for n, curve in record.get("series", {}).items():
        metrics += [Metric(n, v, now, int(step)) for step, v in curve.items()]
    params = [
        Param(n, json.dumps(v) if isinstance(v, list) else str(v))
        for n, v in record["params"].items()
    ]
    if metrics:
        shown = view.shared({*record["params"], *(m.key for m in metrics)})
        mlflow.set_experiment_tag(experiment, view.TAG, shown)
    for at in range(0, max(len(metrics), 1), 1000):
        mlflow.log_batch(run.info.run_id, metrics[at : at + 1000], params if at == 0 else [])
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):  # MLflow's own walk skips
        inside = path.parent.relative_to(folder).as_posix()  # in silence what it cannot open
        mlflow.log_artifact(run.info.run_id, str(path), None if inside == "." else inside)
    mlflow.set_terminated(run.info.run_id, status)
    mlflow.log_batch(run.info.run_id, tags=[RunTag("published", "1")])
    return str(run.info.run_id)


def runs(experiment: str | None = None, grid: str | None = None) -> pd.DataFrame:
    """Finished runs, newest first: columns `params.x`, `metrics.group/name`, `tags.x`."""
    if own() and not (store.root() / "mlflow.db").exists():
        return pd.DataFrame()
    wanted = "attributes.status = 'FINISHED'" + (f" and tags.grid = '{grid}'" if grid else "")
    with _reaching():
        mlflow = client()
        found = [
            (e.name, run)
            for e in mlflow.search_experiments()
            if experiment in (None, e.name)
            for run in mlflow.search_runs([e.experiment_id], wanted, max_results=5000)
        ]
    return pd.DataFrame(
        {"experiment": name, "run_id": run.info.run_id, "name": run.info.run_name}
        | {f"params.{k}": v for k, v in run.data.params.items()}
        | {f"metrics.{k}": v for k, v in run.data.metrics.items()}
        | {f"tags.{k}": v for k, v in run.data.tags.items() if not k.startswith("mlflow.")}
        for name, run in found
    )


def curve(run_id: str, name: str) -> dict[int, float]:
    """A series of one run by step."""
    return {m.step: m.value for m in client().get_metric_history(run_id, name)}
