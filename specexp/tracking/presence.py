"""Compares published folders with what MLflow shows: what it lost, what was deleted in it on
purpose, and what has another name now. One query per experiment, however many folders."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from specexp.errors import counted
from specexp.tracking import results, runs
from specexp.tracking.mlflow_store import names_of
from specexp.zoo import files

Names: TypeAlias = tuple[str | None, str | None]
FOLLOWING = ("name", "notebook", "mlflow.source.name")  # tags that follow the notebook's file


@dataclass(frozen=True)
class Missing:
    """`lost`: folders marked as published of which MLflow has no whole run under their name;
    `deleted`: results whose run was deleted in MLflow; `failures`: failures whose run was, on
    purpose or for a later one."""

    lost: Sequence[Path] = ()
    deleted: Sequence[Path] = ()
    failures: Sequence[Path] = ()

    def lines(self, remedy: str = "this run") -> list[str]:
        """What is missing and what to do, a line each. `remedy`: what publishes the lost again."""
        lines = []
        if self.lost:
            count = counted(len(self.lost), "published run")
            lines.append(f"MLflow lacks {count}, which {remedy} publishes again")
        if n := len(self.deleted):
            tags = [results.read(f / results.TAGS) for f in self.deleted[:3]]
            named = ", ".join(t.get("name", "") for t in tags) + ", ..." * (n > 3)
            lines.append(
                f"{counted(n, 'run')} deleted in MLflow on purpose ({named}): "
                "`specexp store rebuild` brings back what was deleted"
            )
        return lines


def missing(named: Mapping[Path, Names]) -> Missing:
    """What MLflow lacks of those of these folders that are marked as published; with the `names` of
    each. Raises StoreUnreachable, StoreCorrupt."""
    marked = {f: runs.marker(f).read_text().split() for f in named if runs.published(f)}
    if not marked or not runs.has_database():
        return Missing()
    experiments = {experiment for folder in marked if (experiment := named[folder][0])}
    shown = runs.backend().states(experiments, ("store", "published", "notebook"))
    lost, deleted, failures, store = list[Path](), list[Path](), list[Path](), results.identity()
    for folder, run_ids in marked.items():
        experiment, notebook = named[folder]
        tags = {"store": store, "published": "1", "notebook": notebook}
        states = [shown.get(run_id) for run_id in run_ids]
        if any(state and state.deleted for state in states):
            (deleted if folder.parent.name == "results" else failures).append(folder)
        elif not states or any(
            not state or state.status == "RUNNING" or experiment not in state.experiment
            or any(state.tags.get(name) != text for name, text in tags.items())
            for state in states
        ):  # fmt: skip
            lost.append(folder)
    return Missing(lost, deleted, failures)


def names(folder: Path) -> Names:
    """The experiment and the notebook's file under which MLflow shall show a folder; None for what
    it does not tell. Raises OSError if it cannot be read now."""
    with results.unless_torn():
        label = results.label(folder)
        record = folder / (results.RESULT if folder.parent.name == "results" else results.POINT)
        tags = label["tags"] if label else results.load(folder / results.TAGS)
        return (label or results.load(record)).get("experiment"), tags.get("notebook")
    return None, None


def rename(result: Path, experiment: str, tags: Mapping[str, str]) -> None:
    """Note another experiment and the names in these tags for a result; they count when it is
    published."""
    label = {"experiment": experiment, "tags": {name: tags[name] for name in FOLLOWING}}
    with files.whole(result / results.LABEL) as partial:
        partial.write_text(json.dumps(label))


def forget(folder: Path) -> None:
    """Take the mark from a folder, and delete its runs where they are of another experiment now."""
    from mlflow.exceptions import MlflowException

    client, label = runs.client(), results.label(folder)
    for run_id in runs.marker(folder).read_text().split():
        with runs.backend().reaching(), contextlib.suppress(MlflowException):  # there is none
            run = client.get_run(run_id)
            shown = names_of(client.get_experiment(run.info.experiment_id))
            ours = run.data.tags.get("run_key") == results.key_of(folder)
            if ours and label.get("experiment", shown[0]) not in shown:
                client.delete_run(run_id)
    runs.marker(folder).unlink(missing_ok=True)
