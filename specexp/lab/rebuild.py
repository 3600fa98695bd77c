"""What MLflow shows, made anew from what was committed: a database is never the record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from specexp.lab import store, track


@dataclass(frozen=True)
class Rebuilt:
    """How many results and failures were published, what was set aside, what was left out: torn,
    or refused by MLflow and why."""

    results: int
    failures: int
    aside: tuple[Path, ...]
    torn: tuple[Path, ...]
    refused: Mapping[Path, str]


def rebuild(console: Console) -> Rebuilt:
    """Publish every result and failure again, in the order in which they came, those that were
    logged by hand too. The store's own database and artifacts are set aside first; a server's stay,
    and only what it lacks is added. Raises StoreBusy while anybody is at work."""
    with store.alone("setup", lambda said: console.print(Text(said))):
        others = [who for key, who in store.claims().items() if key != "setup"]
        if others:
            raise store.StoreBusy(f"{others[0]} is at work here: stop it first")
        folders = _committed()
        for folder in folders:  # first: what is not marked is shown again, whenever we are killed
            track.marker(folder).unlink(missing_ok=True)
        aside = _set_aside() if track.own() else ()
        track.backend().prepare()
        torn = [f for f in folders if not track.publishable(f)]
        whole = [f for f in folders if f not in torn]
        refused: dict[Path, str] = {}
        with Progress(console=console, transient=True) as progress:
            for folder in progress.track(whole, description="publishing"):
                with store.claim(_key(folder)) as ours:
                    if ours:
                        try:
                            track.publish(folder)
                        except track.Refused as e:
                            refused[folder] = str(e)
    done = [f for f in whole if f not in refused]
    results = sum(f.parent.name == "results" for f in done)
    return Rebuilt(results, len(done) - results, aside, tuple(torn), refused)


def show(made: Rebuilt, console: Console) -> None:
    """Say what was done, one line a thing."""
    lines = [f"{made.results} results and {made.failures} failures are in {track.where()}"]
    lines += [f"left out, as it is damaged: {path}" for path in made.torn]
    lines += [
        f"left out, as MLflow refused it: {path}: {why}" for path, why in made.refused.items()
    ]
    if made.aside:
        names = ", ".join(path.name for path in made.aside)
        lines += [f"set aside: {names}; delete them when you miss nothing",
                  "start `specexp ui` or `specexp store serve` again if one is open"]  # fmt: skip
    console.print(Text("\n".join(lines)), soft_wrap=True)


def _committed() -> list[Path]:
    """Results and failures that MLflow was or is to be told of, oldest first."""
    found = [
        p for name in ("results", "failed") for p in store.root().glob(f"{name}/*/{store.TAGS}")
    ]
    return sorted((p.parent for p in found), key=store.ended_ms)


def _key(folder: Path) -> str:
    return folder.name if folder.parent.name == "results" else store.key_of(folder)


def _set_aside() -> tuple[Path, ...]:
    """Database, journals and artifacts under names that nothing uses."""
    mark = f".damaged-{datetime.now():%Y%m%d-%H%M%S-%f}"
    kept = []
    for name, journal in (("mlflow.db", ""), ("mlflow.db", "-wal"), ("mlflow.db", "-shm"),
                          ("artifacts", "")):  # fmt: skip
        path = store.root() / f"{name}{journal}"
        if path.exists():
            kept.append(path.rename(store.root() / f"{name}{mark}{journal}"))
    return tuple(kept)
