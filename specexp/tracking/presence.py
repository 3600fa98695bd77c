"""Compares published folders with what MLflow shows: what it lost, what was deleted in it on
purpose, and what has another name now. One query per experiment, however many folders."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from specexp.errors import counted
from specexp.tracking import results, runs
from specexp.tracking.mlflow_store import names_of
from specexp.zoo import files

ShownAs: TypeAlias = tuple[str | None, str | None]
ABSENT = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")  # MLflow has no such active run
FOLLOWING = ("name", "notebook", "mlflow.source.name")  # tags that follow the notebook's file


@dataclass(frozen=True)
class Gaps:
    """What MLflow lacks of what was published. `vanished`: folders marked as published without a
    whole run under their name; `deleted`: results whose run somebody deleted in MLflow; `failures`:
    failed attempts whose run was deleted, by somebody or for a later attempt; `bare`: folders whose
    run has lost its files."""

    vanished: list[Path] = field(default_factory=list)
    deleted: list[Path] = field(default_factory=list)
    failures: list[Path] = field(default_factory=list)
    bare: list[Path] = field(default_factory=list)

    def lines(self, remedy: str = "this run") -> list[str]:
        """What is missing and what to do, a line each. `remedy`: what publishes it again."""
        lines = []
        for folders, what in ((self.vanished, ""), (self.bare, "the files of ")):
            if folders:
                count = counted(len(folders), "published run")
                lines.append(f"MLflow lacks {what}{count}, which {remedy} publishes again")
        if n := len(self.deleted):
            named = ", ".join(map(_name_of, self.deleted[:3])) + ", ..." * (n > 3)
            lines.append(
                f"{counted(n, 'run')} deleted in MLflow on purpose ({named}): "
                "`specexp store rebuild` brings back what was deleted"
            )
        return lines


def _name_of(result: Path) -> str:
    with results.ignoring_damage():
        return str(results.tags_of(result)["name"])
    return ""


def find_gaps(named: Mapping[Path, ShownAs]) -> Gaps:
    """What MLflow lacks of those of these folders that are marked as published. `named`: how each
    is `shown_as`. Raises StoreUnreachable, StoreCorrupt."""
    marked = {f: runs.marker(f).read_text().split() for f in named if runs.published(f)}
    gaps = Gaps()
    if not marked or not runs.has_database():
        return gaps
    experiments = {experiment for folder in marked if (experiment := named[folder][0])}
    backend, named_by = runs.backend(), ("store", "published", "notebook", "run_key")
    shown, store = backend.states(experiments, named_by), results.store_id()
    for folder, run_ids in marked.items():
        experiment, notebook = named[folder]
        tags = dict(zip(named_by, (store, "1", notebook, results.key_of(folder)), strict=True))
        states = [shown.get(run_id) for run_id in run_ids]
        if any(state and state.deleted for state in states):
            (gaps.deleted if folder.parent.name == "results" else gaps.failures).append(folder)
        elif not states or any(
            not state or state.status == "RUNNING" or experiment not in state.experiment
            or (folder.parent.name == "results" and state.status != "FINISHED")
            or any(state.tags.get(name) != text for name, text in tags.items())
            for state in states
        ):  # fmt: skip
            gaps.vanished.append(folder)
        elif states[0] and backend.lacks(states[0].artifacts):  # the first one has the files
            gaps.bare.append(folder)
    return gaps


def shown_as(folder: Path) -> ShownAs:
    """The experiment and the notebook's file name under which MLflow is to show a folder; None for
    each that the folder does not say. Raises OSError if it cannot be read now."""
    with results.ignoring_damage():
        record = folder / (results.RESULT if folder.parent.name == "results" else results.POINT)
        named = results.new_names(folder) or results.load(record)
        return named.get("experiment"), results.tags_of(folder).get("notebook")
    return None, None


def rename(result: Path, experiment: str, tags: Mapping[str, str]) -> None:
    """Give a result another experiment and the names in these tags, for when it is published; and
    another end, by which it is newer than others of its point."""
    before = results.new_names(result).get("tags", {})
    following = {name: tags[name] for name in (*FOLLOWING, "ended") if name in tags}
    with files.whole(result / results.NEW_NAMES) as partial:
        partial.write_text(json.dumps({"experiment": experiment, "tags": before | following}))


def is_of_another_grid(result: Path, file: Path) -> bool:
    """Whether a result was made by another grid file than this one, which is still there."""
    own = results.read(result / results.TAGS).get("grid.file", "")
    return bool(own) and results.ROOT / own != file and (results.ROOT / own).is_file()


def unmark(folder: Path) -> None:
    """Take the mark `published` from a folder; delete its runs in experiments that it has left."""
    client, renamed = runs.client(), results.new_names(folder)
    for run_id in runs.marker(folder).read_text().split():
        try:
            with runs.backend().reaching():
                run = client.get_run(run_id)
                shown = names_of(client.get_experiment(run.info.experiment_id))
                if "run_key" not in run.data.tags:  # somebody deleted it
                    client.set_tag(run_id, "run_key", results.key_of(folder))
                ours = run.data.tags.get("run_key") == results.key_of(folder)
                if ours and renamed.get("experiment", shown[0]) not in shown:
                    client.delete_run(run_id)
        except runs.StoreUnreachable as e:
            if getattr(e.__cause__, "error_code", "") not in ABSENT:
                raise
    runs.marker(folder).unlink(missing_ok=True)
