"""Rebuilds MLflow's database, and the notes in it, from the results, of which MLflow is a view."""

import contextlib
import json
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from specexp.tracking import mlflow_view, presence, report, runs
from specexp.tracking import results as store
from specexp.tracking.mlflow_store import PROXIED, Backend, StoreUnreachable, names_of
from specexp.zoo import files


@dataclass(frozen=True)
class Rebuilt:
    """How many results and failures were published; the files of the old database; the folders that
    were left out as damaged, or as refused by MLflow and why."""

    results: int
    failures: int
    aside: tuple[Path, ...]
    torn: tuple[Path, ...]
    refused: Mapping[Path, str]


def rebuild(console: Console) -> Rebuilt:
    """Publish every result and failure again, oldest first, including those logged by hand. The
    store's own database and artifacts are renamed first; a server keeps its runs and gets those
    that it lacks. Raises StoreBusy while another process works on the store."""
    with store.claim_setup(lambda message: console.print(Text(message))):
        others = [who for key, who in store.claims().items() if key != store.SETUP]
        if others:
            raise store.StoreBusy(f"{others[0]} is using {store.root()}: stop it first")
        kept = [*store.root().glob(f"results/*/{store.TAGS}"),
                *store.root().glob(f"failed/*/{store.TAGS}")]  # fmt: skip
        folders = sorted((tags.parent for tags in kept), key=store.ended_ms)
        for folder in folders:  # first, so that a runner publishes them even if we are killed
            runs.marker(folder).unlink(missing_ok=True)
        aside = _set_aside() if runs.own() else ()
        runs.backend().prepare()
        torn = [f for f in folders if not runs.publishable(f)]
        whole = [f for f in folders if f not in torn]
        refused: dict[Path, str] = {}
        with Progress(console=console, transient=True) as progress:
            for folder in progress.track(whole, description="publishing"):
                try:
                    with store.claim(store.key_of(folder)) as ours:
                        if ours:
                            runs.publish(folder)
                except runs.StoreRejected as e:
                    refused[folder] = str(e)
    published = [f for f in whole if f not in refused]
    describe()
    results = sum(f.parent.name == "results" for f in published)
    return Rebuilt(results, len(published) - results, aside, tuple(torn), refused)


def accept(folders: Iterable[Path]) -> list[report.Run]:
    """Make these results of a grid the newest of their points, though other code has made others
    since, and return them as `report.newest` does, without those that were damaged meanwhile."""
    chosen, last = {*folders}, dict[tuple[str, ...], tuple[int, Path]]()
    mine: list[report.Run] = []
    for folder in store.listed("results"):
        run = report.Run(folder)
        with store.ignoring_damage():
            last[run.point] = max(last.get(run.point, (0, folder)), (run.ended, folder))
            mine += [run] * (folder in chosen)
    for run in mine:
        ended, newest = last[run.point]
        if newest not in chosen:
            with store.claim(run.folder.name) as ours:
                if ours:
                    end = {"ended": str(ended + 1)}
                    presence.rename(run.folder, run.experiment, run.tags | end)
    return report.newest(run.folder for run in mine)


def describe() -> None:
    """Mark what newer results supersede, write question, today's answer, links and commands to the
    pages of experiments, unless somebody wrote a text there, and a report to their artifacts: of
    those whose published results are others than when it was last done. Raises StoreUnreachable,
    StoreCorrupt, or OSError."""
    file, backend = runs.marker(store.folder("notes")), runs.backend()
    before, folders = store.read(file), store.listed("results")
    now = {f.name: each for f in folders if (each := _state(f, before.get(f.name)))}
    changed = [n for n in now.keys() | before.keys() if now.get(n) != before.get(n)]
    names = {each[n][1] for n in changed for each in (now, before) if n in each}
    if not names or not runs.has_database():
        return
    shown = [e for e in backend.experiments() if not names.isdisjoint(names_of(e))]
    names |= {name for experiment in shown for name in names_of(experiment)}
    newest = report.newest(
        f for f in folders if presence.shown_as(f)[0] in names and store.intact(f)
    )
    for experiment in shown:
        part = [run for run in newest if run.experiment in names_of(experiment)]
        _supersede(backend, experiment.experiment_id, {(r.folder.name, r.rival) for r in part})
        note = experiment.tags.get(mlflow_view.NOTE, "")
        if not part and backend.runs(experiment.experiment_id):  # of others
            continue
        if not note or note.endswith(mlflow_view.OWN):
            note = _note(backend, experiment, part) if part else ""
            with backend.reaching():
                backend.client.set_experiment_tag(experiment.experiment_id, mlflow_view.NOTE, note)
    with files.whole(file) as partial:
        partial.write_text(json.dumps(now))


def _state(folder: Path, before: Any) -> Any:
    """When a published result last changed, and the experiment that shows it; else None."""
    with store.ignoring_damage():
        changed = folder.stat().st_mtime_ns  # also when it is published or renamed
        if runs.published(folder):
            same = before and before[0] == changed
            return before if same else [changed, presence.shown_as(folder)[0]]
    return None


def _supersede(backend: Backend, experiment: str, current: Collection[tuple[str, str]]) -> None:
    """Mark the results that this store shows in the experiment of this id, but for those of these
    keys and rivals: the view and `runs.runs` leave out what a newer result of its point stands for.
    """
    with backend.reaching():
        for run in filter(runs.is_ours, backend.runs(experiment, "attributes.status = 'FINISHED'")):
            tags, run_id = run.data.tags, run.info.run_id
            old = (tags["run_key"], runs.rival_of(run)) not in current
            if old and mlflow_view.SUPERSEDED not in tags:
                backend.client.set_tag(run_id, mlflow_view.SUPERSEDED, "yes")
            elif not old and mlflow_view.SUPERSEDED in tags:
                backend.client.delete_tag(run_id, mlflow_view.SUPERSEDED)


def _note(backend: Backend, experiment: Any, part: Sequence[report.Run]) -> str:
    asking = min(part, key=lambda run: "notebook" not in run.tags)  # not one by hand
    answer, page = report.answer(part), f"`specexp report {shlex.quote(asking.experiment)}`"
    location = experiment.artifact_location
    if location.startswith(PROXIED):  # so that the UI has a link to it
        with contextlib.suppress(OSError, StoreUnreachable):  # the command makes it later
            file = report.write(part, names=[experiment.name])
            backend.put(location, file.parent, [file])
            below = quote(f"{location.removeprefix(PROXIED).strip('/')}/{file.name}")
            page = f"[one page](./api/2.0/mlflow-artifacts/artifacts/{below})"
    if doubtful := sum(bool(run.doubts) for run in part):
        answer += f" Timings of {doubtful} of {len(part)} runs are doubtful: the report says why."
    commands, title = report.commands_to_repeat(part), asking.question()[0]
    return mlflow_view.note(experiment.experiment_id, title, answer, commands, page)


def show(rebuilt: Rebuilt, console: Console) -> None:
    """Print what was done."""
    lines = [
        f"published {rebuilt.results} results and {rebuilt.failures} failures to {runs.where()}",
        *(f"left out, as it is damaged: {path}" for path in rebuilt.torn),
        *(f"left out, as MLflow refused it: {p}: {why}" for p, why in rebuilt.refused.items()),
    ]
    if rebuilt.aside:
        names = ", ".join(path.name for path in rebuilt.aside)
        lines += [f"the old files are now {names}: delete them once you have checked the new ones",
                  "restart `specexp ui` or `mlflow server` if one is running"]  # fmt: skip
    console.print(Text("\n".join(lines)), soft_wrap=True)


def _set_aside() -> tuple[Path, ...]:
    """Rename database, journals and artifacts to unused names."""
    mark = f".damaged-{datetime.now():%Y%m%d-%H%M%S-%f}"
    renamed = []
    for name, journal in (("mlflow.db", ""), ("mlflow.db", "-wal"), ("mlflow.db", "-shm"),
                          ("artifacts", "")):  # fmt: skip
        path = store.root() / f"{name}{journal}"
        if path.exists():
            renamed.append(path.rename(store.root() / f"{name}{mark}{journal}"))
    return tuple(renamed)
