"""Logs results from notebooks, publishes them to MLflow and reads them back.

A notebook calls `parameters` and `log`. Under the runner, `log` only writes into the given attempt
folder: a kernel never opens the store or MLflow. In a notebook run by hand it makes an attempt,
commits and publishes it. Only committed results and kept failures are published, and publishing one
twice changes nothing.

Runs go to `mlflow.db` and `artifacts/` in the store, or to where MLFLOW_TRACKING_URI says.
"""

from __future__ import annotations

import ast
import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specexp.errors import UserError
from specexp.terminal import harmless
from specexp.tracking import mlflow_view, provenance, redact, results
from specexp.tracking.mlflow_store import (
    MADE_AS,
    Backend,
    StoreCorrupt,
    StoreRejected,
    StoreUnreachable,
    names_of,
)

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["StoreCorrupt", "StoreRejected", "StoreUnreachable"]
REMEDY = "; results are safe: rebuild it with `specexp store rebuild`"
Series = Mapping[str, Sequence[float] | Mapping[int, float]]
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,80}")
_RUNNERS = {
    "attempt", "ended", "error", "error.kind", "grid", "grid.file", "name", "notebook", "published",
    "rival", "run_key", "seconds", "status", "store", mlflow_view.SUPERSEDED, "together", "where",
}  # fmt: skip


# --- what notebooks call -------------------------------------------------------------------------


def parameters(names: Mapping[str, Any]) -> dict[str, Any]:
    """The notebook's parameters, given `globals()`: the names that its parameters cell declares, at
    their values now.

    That cell is the last one run that holds nothing but lines `name: type = value`. In a notebook
    that was made a script, it is all such lines at the top level. Raises UserError if there are
    none, or if a name no longer has a plain value.
    """
    declared: list[str] = []
    for source in names.get("In", ()):  # the cells that Jupyter or papermill has run
        declared = _declared(source, alone=True) or declared
    if "In" not in names and "__file__" in names:
        declared = _declared(Path(names["__file__"]).read_text(), alone=False)
    if not declared:
        raise UserError("run the parameters cell first: one with only lines `name: type = value`")
    for name in declared:
        value = names.get(name)
        if not (value is None or isinstance(value, int | float | str | bool | list)):
            kind = type(value).__name__
            raise UserError(f"the parameter {name} was overwritten by a {kind}: rename one of them")
    return {name: names.get(name) for name in declared}


def _declared(source: str, *, alone: bool) -> list[str]:
    """The names that lines `name: type = value` declare; none if `alone` and more is there."""
    try:
        lines = ast.parse(source).body
    except (SyntaxError, ValueError):
        return []
    declared = [
        line.target.id
        for line in lines
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.value
    ]
    return declared if len(declared) == len(lines) or not alone else []


def log(
    experiment: str,
    params: Mapping[str, Any],
    metrics: Mapping[str, float],
    series: Series | None = None,
    tags: Mapping[str, str] | None = None,
    tables: Mapping[str, pd.DataFrame] | None = None,
    figures: Mapping[str, Any] | None = None,
    rivals: Mapping[str, tuple[Mapping[str, float], Series]] | None = None,
) -> None:
    """Record one run: metrics `group/name`, series by step (lists count from 1), tables, figures.
    Each of `rivals`, a drafter with its metrics and series, is shown as a run beside it.

    Under the runner the grid's experiment replaces this one. Raises UserError for a name or value
    that MLflow would reject or change: tags are text.
    """
    record = {
        "experiment": os.environ.get("SPECEXP_EXPERIMENT", experiment),
        "params": json.loads(json.dumps(dict(params), default=results.plain)),
        **_logged(params, metrics, series or {}),
        "tags": {**provenance.tags(str(params.get("device", "auto"))), **(tags or {})},
    }
    if rivals:
        record["rivals"] = {d: _logged({**params, "drafter": d}, *r) for d, r in rivals.items()}
    tables, figures = tables or {}, figures or {}
    problems = [
        *mlflow_view.problems_of(record),
        *(f"the tag {n!r} is the runner's own: rename it" for n in tags or () if _reserved(n)),
        *(
            f"names of tables and figures have letters, digits, - and _, not {n!r}"
            for n in (*tables, *figures)
            if not _FILE.fullmatch(n)
        ),
    ]
    if problems:
        raise UserError("; ".join(problems))
    record = redact.hidden(record)
    if attempt_folder := os.environ.get("SPECEXP_ATTEMPT"):
        _write(Path(attempt_folder), record, tables, figures)
        return
    from specexp.tracking import rebuild

    key = f"byhand-{uuid.uuid4().hex[:10]}"
    with results.claim(key):
        attempt = results.new_attempt(key)
        try:
            _write(attempt, record, tables, figures)
        except BaseException:
            shutil.rmtree(attempt)
            raise
        for file in results.files_in(attempt):  # of a point, `grids.execute` does it
            redact.clean(file)
        named = mlflow_view.run_name(record["params"], mlflow_view.SIGNS) or record["experiment"]
        result = results.commit(attempt, key, {"name": f"{named} by hand", "status": "FINISHED"})
        try:
            with results.claim_setup():
                initialise()
            publish(result)
            rebuild.describe()
        except StoreUnreachable as e:
            why = "not in MLflow yet, publish it later with `specexp store rebuild`"
            why = "MLflow refused it" if isinstance(e, StoreRejected) else why
            why = "its experiment's note is not renewed" if published(result) else why
            print(harmless(f"kept in {result}; {why}: {e}"))
            return
    print(harmless(f"logged to {where()}; compare with: specexp ui"))


def _logged(
    params: Mapping[str, Any], metrics: Mapping[str, float], series: Series
) -> dict[str, Any]:
    """Metrics and series of a run as a record holds them, and the contents of what it read."""
    curves = {n: c if isinstance(c, Mapping) else dict(enumerate(c, 1)) for n, c in series.items()}
    return {
        "contents": provenance.contents(params),
        "metrics": {name: _number(name, value) for name, value in metrics.items()},
        "series": {n: {_step(k): _number(n, v) for k, v in c.items()} for n, c in curves.items()},
    }


def _number(name: str, value: Any) -> float:
    with suppress(TypeError, ValueError):
        return float(value)
    raise UserError(f"the metric {name} is {value!r:.60}, not a number")


def _step(step: Any) -> str:
    """A step as a string: 2.0 is "2"; others are unchanged, for `problems_of` to reject."""
    return str(math.floor(step) if isinstance(step, Real) and step % 1 == 0 else step)


def _write(
    attempt: Path, record: dict[str, Any],
    tables: Mapping[str, pd.DataFrame], figures: Mapping[str, Any],
) -> None:  # fmt: skip
    if (attempt / results.RESULT).exists():
        raise UserError("this notebook has called runs.log before; call it once per run")
    for name, table in tables.items():  # in a folder, as MLflow lists files by path: figures first
        (attempt / "tables").mkdir(exist_ok=True)
        table.to_parquet(attempt / "tables" / f"{name}.parquet")
    for name, figure in figures.items():
        (attempt / "figures").mkdir(exist_ok=True)
        about = {"Title": redact.hide(getattr(figure, "get_suptitle", str)())}
        file = attempt / "figures" / f"{name}.png"
        figure.savefig(file, dpi=110, bbox_inches="tight", metadata=about)
    (attempt / results.RESULT).write_text(json.dumps(record, indent=1))


def _reserved(tag: object) -> bool:
    """Whether only the runner may set this tag."""
    return tag in _RUNNERS or (str(tag).startswith("mlflow.") and tag != "mlflow.note.content")


# --- MLflow --------------------------------------------------------------------------------------


def own() -> bool:
    """Whether runs are tracked in the store's own database."""
    return not os.environ.get("MLFLOW_TRACKING_URI")


def backend() -> Backend:
    """Where runs are tracked: MLFLOW_TRACKING_URI, or the store's own database."""
    if address := os.environ.get("MLFLOW_TRACKING_URI"):
        return Backend.at(address, results.root())
    return Backend.of(results.root() / "mlflow.db", REMEDY)


def where() -> str:
    """Where runs are tracked, for messages: a path, or an address without its password."""
    return str(backend())


def client() -> Any:
    return backend().client


def initialise() -> None:
    """Create the database if it is missing, else check that it can be read. One process at a time
    may do so (`results.claim_setup`). Raises StoreUnreachable, StoreCorrupt."""
    has_database()
    backend().prepare()


def experiment_id(name: str) -> str:
    """The id of the experiment of this name (`names_of`), created or restored if necessary."""
    from mlflow.exceptions import MlflowException

    store, mlflow = backend(), client()

    def find() -> Any:
        if experiment := mlflow.get_experiment_by_name(name):
            return experiment
        return next((e for e in store.experiments() if names_of(e)[1] == name), None)

    experiment = find()
    if experiment is None:
        try:
            return str(mlflow.create_experiment(name, store.location(name), {MADE_AS: name}))
        except MlflowException:  # another process has just created it
            experiment = find()
            if experiment is None:
                raise
    if experiment.lifecycle_stage == "deleted":
        mlflow.restore_experiment(experiment.experiment_id)
        _delete_replaced(experiment.experiment_id)
    return str(experiment.experiment_id)


def _delete_replaced(experiment: str) -> None:
    """Of a restored experiment, delete again the runs of this store that others had replaced."""
    kept: dict[tuple[str, str], list[str]] = {}
    folders = [f for name in ("failed", "results") for f in results.listed(name) if published(f)]
    for folder in sorted(folders, key=results.ended_ms):
        key, kind = results.key_of(folder), folder.parent.name
        if kind == "results":
            kept.pop((key, "failed"), None)
        kept[key, kind] = marker(folder).read_text().split()
    ids = {run_id for run_ids in kept.values() for run_id in run_ids}
    for run in filter(is_ours, backend().runs(experiment)):
        if is_whole(run) and run.info.run_id not in ids:  # others are being published
            client().delete_run(run.info.run_id)


def published(folder: Path) -> bool:
    """Whether this folder was published to where runs are tracked now."""
    return marker(folder).exists()


def marker(folder: Path) -> Path:
    """The file that marks a folder as published and holds the run's id."""
    if own():
        return folder / results.MARKER
    return folder / f"{results.MARKER}-{results.digest(backend().uri.encode())[:8]}"


def publishable(folder: Path) -> bool:
    """Whether a result is intact and valid for MLflow, or enough of a failed attempt is left to be
    published: those are not fsynced. Raises OSError if that cannot be determined now."""
    with results.ignoring_damage():
        if folder.parent.name == "results":
            record = folder / results.RESULT
            return results.intact(folder) and not mlflow_view.problems_of(results.load(record))
        tags, point = results.load(folder / results.TAGS), results.load(folder / results.POINT)
        described = {"run_key", "attempt", "status", "error", "error.kind"} <= tags.keys()
        return described and {"experiment", "params"} <= point.keys()
    return False


def publish(folder: Path) -> None:
    """Publish a result or failed attempt to MLflow, unless it has been.

    The folder's tags.json holds the run's tags, with `run_key`, `attempt`, `status` and `ended`.
    Raises StoreUnreachable, StoreRejected, StoreCorrupt, or OSError if the disk is full or the
    folder cannot be read.
    """
    if not published(folder):
        with backend().reaching():
            run_ids = _publish(folder)
        marker(folder).write_text("\n".join(run_ids))


def _publish(folder: Path) -> list[str]:
    """Create and fill its run and those of its rivals, mark them as whole, then delete the runs
    that they replace. A failure whose point has succeeded since is not shown."""
    from mlflow.entities import RunTag

    store = backend()
    tags = results.tags_of(folder) | {"store": results.store_id()}
    status, _ = tags.pop("status"), tags.pop("ended", None)
    record = results.load(folder / (results.RESULT if status == "FINISHED" else results.POINT))
    experiment = experiment_id(results.new_names(folder).get("experiment", record["experiment"]))
    before = store.runs(experiment, f"tags.run_key = '{tags['run_key']}'")
    ours, stay = [run for run in before if is_ours(run)], list[Any]()
    if status != "FINISHED":  # a failure replaces no success
        stay = [run for run in ours if is_whole(run) and run.info.status == "FINISHED"]
        for run in stay:
            if run.info.end_time > results.ended_ms(folder):
                return [str(run.info.run_id)]
    same = {
        rival_of(run): run
        for run in before
        if is_whole(run)
        and (run.data.tags.get("attempt"), run.info.status) == (tags["attempt"], status)
    }
    run_ids: list[str] = []
    for rival, part in results.runs_in(record).items():
        named = mlflow_view.run_tags(tags, record["params"], rival)
        if old := same.get(rival):  # its store or name may be another one now, or its files gone
            run_id = str(old.info.run_id)
            store.client.update_run(run_id, name=named.pop("name", None))
            store.client.log_batch(run_id, tags=[RunTag(n, text) for n, text in named.items()])
            if not run_ids and store.lacks(old.info.artifact_uri):
                store.put(old.info.artifact_uri, folder, _files_of(folder))
        else:
            run_id = _create_run(folder, experiment, status, named, part, *run_ids[:1])
        run_ids.append(run_id)
    for old in ours:
        if old not in stay and old.info.run_id not in run_ids:
            store.client.delete_run(old.info.run_id)
    return run_ids


def _create_run(
    folder: Path, experiment: str, status: str, tags: dict[str, str], record: Mapping[str, Any],
    main: str = "",
) -> str:  # fmt: skip
    """`main`: the run that keeps the files, if this is one of a rival."""
    from mlflow.entities import Metric, Param

    mlflow, ended = client(), results.ended_ms(folder)
    started = ended - int(float(tags.get("seconds", 0)) * 1000)
    name = tags.pop("name", tags["run_key"])
    theirs = {n: text for n, text in record.get("tags", {}).items() if not _reserved(n)}
    files = f"./#/experiments/{experiment}/runs/{main}/artifacts" if main else ""
    record = {**record, "tags": theirs | tags}
    doubts = mlflow_view.doubts(record, lambda: mlflow_view.drift(results.rounds_of(folder)))
    answers = mlflow_view.answer_tags(record, bool(doubts), files)
    run = mlflow.create_run(experiment, started, record["tags"] | answers, name)
    metrics = [Metric(n, v, ended, step) for n, step, v in mlflow_view.as_points(record)]
    params = [Param(n, v) for n, v in mlflow_view.as_params(record).items()]
    if metrics:
        view = mlflow_view.shared_view({m.key for m in metrics}, ended)
        mlflow.set_experiment_tag(experiment, mlflow_view.VIEW_TAG, view)
    for at in range(0, max(len(metrics), 1), 1000):
        mlflow.log_batch(run.info.run_id, metrics[at : at + 1000], params if at == 0 else [])
    if not main:
        backend().put(run.info.artifact_uri, folder, _files_of(folder))
    mlflow.set_terminated(run.info.run_id, status, ended)
    mlflow.set_tag(run.info.run_id, "published", "1")
    return str(run.info.run_id)


def _files_of(folder: Path) -> list[Path]:
    """What is shown of a folder: all but what was added when it had been published."""
    added = {*folder.glob(f"{results.MARKER}*"), folder / results.NEW_NAMES}
    return [path for path in results.files_in(folder) if path not in added]


def is_whole(run: Any) -> bool:
    """Whether everything of this run was published."""
    return run.data.tags.get("published") == "1" and run.info.status != "RUNNING"


def rival_of(run: Any) -> str:
    """The drafter of a run that stands beside its result's own; else ""."""
    return str(run.data.tags.get("rival", ""))


def is_ours(run: Any) -> bool:
    """Whether a run was published from this store: a server may hold those of many."""
    tags = run.data.tags
    return "run_key" in tags and tags.get("store") in (None, results.store_id())


def has_database() -> bool:
    """Whether there is a database to read: a store has none before its first run. Raises
    StoreCorrupt if it has lost the one it had, or StoreUnreachable."""
    if not backend().empty():
        return True
    if own() and any(results.root().glob(f"results/*/{results.MARKER}")):
        raise backend().damaged("is empty or gone")
    return False


def runs(experiment: str | None = None, grid: str | None = None) -> pd.DataFrame:
    """Finished runs that none supersedes, newest first: columns `params.x`, `metrics.group/name`,
    `tags.x`; `metrics.speedup/credible` is 0 where timings are doubtful. `grid`: only runs of this
    grid's points, whichever grid ran them. Raises StoreUnreachable, StoreCorrupt."""
    import pandas as pd

    store, keys = backend(), results.keys_of(grid or "")

    def is_of_grid(run: Any) -> bool:
        tags = run.data.tags
        named = tags.get("grid") == grid and not (keys and is_ours(run))  # else `keys` says it
        return grid is None or named or tags.get("run_key") in keys

    finished = [
        (e.name, run)
        for e in (store.experiments() if has_database() else [])
        if experiment is None or experiment in names_of(e)
        for run in store.runs(e.experiment_id, "attributes.status = 'FINISHED'")
        if mlflow_view.SUPERSEDED not in run.data.tags and is_of_grid(run)
    ]
    finished.sort(key=lambda pair: pair[1].info.start_time, reverse=True)
    records = [(name, run.info, run.data.to_dictionary()) for name, run in finished]
    return pd.DataFrame(
        mlflow_view.row(name, run.run_id, run.run_name, record, mlflow_view.is_doubtful(record))
        for name, run, record in records
    )


def curve(run_id: str, name: str) -> dict[int, float]:
    """A series of one run: step -> value."""
    return {m.step: m.value for m in backend().history(run_id, name)}
