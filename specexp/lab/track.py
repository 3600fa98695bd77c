"""Where results live, and how they reach MLflow.

A notebook calls `parameters` and `log`. Under the runner `log` writes into the attempt folder it
was given and nothing else: a kernel never opens the store. By hand the same call makes an attempt
of its own, commits it and publishes it. One rename turns an attempt into a result (`commit`); only
results are published, and publishing one twice changes nothing.

The store is `mlruns/` at the repository root, or SPECEXP_MLRUNS: `mlflow.db` and `artifacts/`
belong to MLflow, `attempts/`, `results/` and `failed/` to the runner.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas as pd
from filelock import FileLock, Timeout

from specexp.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
VIEW = "specexp"
RESULT = "result.json"
_METRIC = re.compile(r"[a-z0-9_]+/[A-Za-z0-9_.-]+")
_IPYTHON = {"In", "Out", "exit", "quit", "get_ipython", "open"}
_VERSIONS = ("specexp", "torch", "transformers")


class StoreBusy(UserError):
    """Another runner holds the store."""


def store() -> Path:
    return Path(os.environ.get("SPECEXP_MLRUNS", ROOT / "mlruns")).resolve()


@contextmanager
def locked() -> Iterator[None]:
    """Hold the store. The lock is the kernel's, so a killed holder leaves nothing behind."""
    root = store()
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(root / ".lock")
        lock.acquire(timeout=0)
    except Timeout:
        holder = (root / ".holder").read_text() if (root / ".holder").exists() else "unknown"
        raise StoreBusy(f"{root} is in use by another run ({holder}): wait, or stop it") from None
    except OSError as e:
        raise UserError(f"cannot write to {root}: {e.strerror}; set SPECEXP_MLRUNS") from e
    try:
        (root / ".holder").write_text(f"pid {os.getpid()}: {' '.join(sys.argv)}")
        yield
    finally:
        lock.release()


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
    attempt = Path(given) if given else new_attempt("byhand")
    if (attempt / RESULT).exists():
        raise UserError("this notebook logged already; one run logs once")
    for name, table in (tables or {}).items():
        table.to_parquet(attempt / f"{name}.parquet")
    for name, figure in (figures or {}).items():
        (attempt / "figures").mkdir(exist_ok=True)
        figure.savefig(attempt / "figures" / f"{name}.png", dpi=110, bbox_inches="tight")
    (attempt / RESULT).write_text(json.dumps(record, indent=1))
    if not given:
        key = f"byhand-{uuid.uuid4().hex[:10]}"
        with locked():
            initialise()
            publish(commit(attempt, key, {"name": f"{params.get('drafter', experiment)} by hand"}))
        print(f"logged to {store()}; compare with: specexp ui")


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
    done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


# --- attempts and results -----------------------------------------------------------------------


def new_attempt(key: str) -> Path:
    attempt = store() / "attempts" / f"{key}-{uuid.uuid4().hex[:8]}"
    try:
        attempt.mkdir(parents=True)
    except OSError as e:
        raise UserError(f"cannot write to {store()}: {e.strerror}; set SPECEXP_MLRUNS") from e
    return attempt


def commit(attempt: Path, key: str, tags: Mapping[str, str]) -> Path:
    """Make an attempt a result: everything on disk, then one rename. Returns its new folder."""
    (attempt / "tags.json").write_text(json.dumps({"run_key": key, **tags}))
    files = sorted(p for p in attempt.rglob("*") if p.is_file())
    digests = {str(p.relative_to(attempt)): digest(p.read_bytes()) for p in files}
    (attempt / "manifest.json").write_text(json.dumps(digests, indent=1))
    for path in [*files, attempt / "manifest.json", attempt]:
        _fsync(path)
    result = store() / "results" / key
    result.parent.mkdir(exist_ok=True)
    os.rename(attempt, result)
    _fsync(result.parent)
    return result


def intact(result: Path) -> bool:
    """Is this result complete and unchanged since it was committed?"""
    try:
        digests = json.loads((result / "manifest.json").read_text())
        return all(digest((result / name).read_bytes()) == d for name, d in digests.items())
    except (OSError, ValueError):
        return False


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- MLflow --------------------------------------------------------------------------------------


def client() -> Any:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    for noisy in ("alembic", "mlflow.store.db.utils"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    from mlflow import MlflowClient

    return MlflowClient(f"sqlite:///{store() / 'mlflow.db'}")


def initialise() -> None:
    """Create the database, under the lock: two processes at once would ruin a fresh one."""
    if not (store() / "mlflow.db").exists():
        client().search_experiments(max_results=1)
        import sqlite3

        with sqlite3.connect(store() / "mlflow.db") as db:
            db.execute("PRAGMA journal_mode=wal")


def experiment_id(name: str) -> str:
    mlflow = client()
    found = mlflow.get_experiment_by_name(name)
    if found is None:
        where = (store() / "artifacts" / name).as_uri()
        found = mlflow.get_experiment(mlflow.create_experiment(name, artifact_location=where))
    return str(found.experiment_id)


def publish(result: Path) -> str:
    """Show a committed result in MLflow, once; returns the run's id."""
    record = json.loads((result / RESULT).read_text())
    tags = json.loads((result / "tags.json").read_text())
    return _publish(result, record, tags, "FINISHED")


def publish_failure(folder: Path, record: dict[str, Any], tags: dict[str, str], status: str) -> str:
    """Show a failed attempt: its parameters, the error as a tag, its notebook and log."""
    return _publish(folder, record, tags, status)


def _publish(folder: Path, record: dict[str, Any], tags: dict[str, str], status: str) -> str:
    from mlflow.entities import Metric, Param, RunTag

    mlflow, experiment = client(), experiment_id(record["experiment"])
    key = tags["run_key"]
    for old in mlflow.search_runs([experiment], f"tags.run_key = '{key}'"):
        if old.data.tags.get("published") == "1" and old.info.status == status == "FINISHED":
            return str(old.info.run_id)
        mlflow.delete_run(old.info.run_id)
    now = int(time.time() * 1000)
    name = tags.pop("name", key)
    run = mlflow.create_run(experiment, run_name=name, tags={**record.get("tags", {}), **tags})
    metrics = [Metric(n, v, now, 0) for n, v in record.get("metrics", {}).items()]
    for n, curve in record.get("series", {}).items():
        metrics += [Metric(n, v, now, int(step)) for step, v in curve.items()]
    params = [
        Param(n, json.dumps(v) if isinstance(v, list) else str(v))
        for n, v in record["params"].items()
    ]
    if metrics:
        view = shared_view({*record["params"], *(m.key for m in metrics)})
        mlflow.set_experiment_tag(experiment, f"mlflow.sharedViewState.{VIEW}", view)
    for at in range(0, max(len(metrics), 1), 1000):
        mlflow.log_batch(run.info.run_id, metrics[at : at + 1000], params if at == 0 else [])
    mlflow.log_artifacts(run.info.run_id, str(folder))
    mlflow.log_batch(run.info.run_id, tags=[RunTag("published", "1")])
    mlflow.set_terminated(run.info.run_id, status)
    return str(run.info.run_id)


def runs(experiment: str | None = None, grid: str | None = None) -> pd.DataFrame:
    """Finished runs, newest first: columns `params.x`, `metrics.group/name`, `tags.x`."""
    if not (store() / "mlflow.db").exists():
        return pd.DataFrame()
    mlflow = client()
    rows = []
    for e in mlflow.search_experiments():
        if experiment and e.name != experiment:
            continue
        where = "attributes.status = 'FINISHED'" + (f" and tags.grid = '{grid}'" if grid else "")
        for run in mlflow.search_runs([e.experiment_id], where, max_results=5000):
            data = run.data
            rows.append(
                {"experiment": e.name, "run_id": run.info.run_id, "name": run.info.run_name}
                | {f"params.{k}": v for k, v in data.params.items()}
                | {f"metrics.{k}": v for k, v in data.metrics.items()}
                | {f"tags.{k}": v for k, v in data.tags.items() if not k.startswith("mlflow.")}
            )
    return pd.DataFrame(rows)


def curve(run_id: str, name: str) -> dict[int, float]:
    """A series of one run by step."""
    return {m.step: m.value for m in client().get_metric_history(run_id, name)}


# --- the UI --------------------------------------------------------------------------------------


OPTIONS = ("drafter", "policy", "gamma", "temperature")
FIGURES = (
    "acceptance/rate", "acceptance/length", "speedup/measured", "speedup/predicted",
    "throughput/tok_s", "latency/ttft_p95_ms", "latency/tpot_p95_ms", "goodput/share",
    "regret/worst", "fleet/replicas", "exact/pass",
)  # fmt: skip
BARS = (
    "acceptance/rate", "acceptance/length", "speedup/measured", "throughput/tok_s",
    "latency/ttft_p95_ms", "regret/worst", "fleet/replicas",
)  # fmt: skip
LINES = (
    "acceptance/at_position", "speedup/at_gamma", "speedup/at_batch", "served/at_batch",
    "regret/at_batch", "load/speculated_at_batch", "map/break_even_batch",
)  # fmt: skip


def shared_view(logged: Collection[str]) -> str:
    """The state the UI opens with behind `view_url`: columns, order and charts, of the parameters
    and metrics that an experiment has.

    The format is internal to MLflow's UI (3.17.2); should it change, the link shows the plain list.
    """
    columns = [f"params.`{p}`" for p in OPTIONS if p in logged]
    columns += [f"metrics.`{m}`" for m in FIGURES if m in logged]
    section = {"uuid": "overview", "name": "Does it pay?", "display": True, "isReordered": True}
    charts: list[dict[str, Any]] = [
        {"type": "BAR", "metricKey": m, "runsCountToCompare": 20, "displayName": _short(m)}
        for m in BARS
        if m in logged
    ]
    charts += [
        {
            "type": "LINE", "metricKey": m, "selectedMetricKeys": [m], "displayName": _short(m),
            "xAxisKey": "step", "xAxisScaleType": "linear", "scaleType": "linear",
            "lineSmoothness": 0, "useGlobalXaxisKey": True, "useGlobalLineSmoothing": True,
            "runsCountToCompare": 20, "range": {}, "yAxisKey": "metric", "yAxisExpressions": [],
            "selectedXAxisMetricKey": "", "ignoreOutliers": False, "displayPoints": True,
        }
        for m in LINES
        if m in logged
    ]  # fmt: skip
    if {"acceptance/rate", "speedup/measured"} <= set(logged):
        charts.append({
            "type": "SCATTER", "runsCountToCompare": 100,
            "displayName": "rate, speedup",
            "xaxis": {"key": "acceptance/rate", "type": "METRIC"},
            "yaxis": {"key": "speedup/measured", "type": "METRIC"},
        })  # fmt: skip
    common = {"metricSectionId": "overview", "deleted": False, "isGenerated": False}
    charts = [{"uuid": f"chart{i}", **common, **c} for i, c in enumerate(charts)]
    state = {
        "selectedColumns": columns,
        "orderByKey": next((c for c in columns if "speedup" in c), "attributes.start_time"),
        "orderByAsc": False,
        "runsHiddenMode": "SHOW_ALL",
        "compareRunCharts": charts,
        "compareRunSections": [section],
        "isAccordionReordered": True,
    }
    return json.dumps(state)


def _short(metric: str) -> str:
    return metric.rpartition("/")[2].replace("_", " ")


def view_url(experiment: str, port: int) -> str:
    """The link that opens an experiment's runs in the shared view."""
    return (
        f"http://127.0.0.1:{port}/#/experiments/{experiment}/runs?viewStateShareKey={VIEW}"
        "&compareRunsMode=CHART&workflowType=machine_learning"
    )


def ui_command(port: int) -> list[str]:
    """MLflow's server for this machine alone: loopback, known Host headers, no job runner."""
    root = store()
    return [
        sys.executable, "-m", "mlflow", "server", "--backend-store-uri",
        f"sqlite:///{root / 'mlflow.db'}", "--default-artifact-root", (root / "artifacts").as_uri(),
        "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--allowed-hosts", f"localhost:{port},127.0.0.1:{port}",
    ]  # fmt: skip


def serve(port: int) -> int:
    """Run the UI until it is stopped; prints each experiment's link. Returns the exit code."""
    if not (store() / "mlflow.db").exists():
        raise UserError(f"no runs in {store()} yet: run `make demo`, or a notebook, first")
    for e in client().search_experiments():
        if e.name != "Default":
            print(f"{e.name:28s} {view_url(e.experiment_id, port)}")
    env = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    return subprocess.run(ui_command(port), env=os.environ | env, check=False).returncode
