"""Kill a runner again and again, with real kernels, and count what is lost: `make soak`.

Grids of 30 points, each run until it is complete by runners that are killed at random moments and
started again. Most kills come by the clock; as a commit takes a hundredth of the time that a
notebook does, some are aimed, by the injector, at the phases that had the fewest. After each kill
no process of the runner may be left after five seconds and no finished point may have changed;
after each grid all must hold that `faults.problems` knows. Then, without kernels, what a thousand
points cost. Figures go to a JSON file.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer
import yaml
from faults import SOON, TRIVIAL, Warm, committed, orphans
from tqdm import tqdm

# Phases, and among how many of their first events to strike: so many there are in every start.
AIMED = {
    "setup": 5, "recover": 2, "aside": 6, "plan": 1, "claim": 10, "check": 6, "commit": 17,
    "publish": 40,
}  # fmt: skip
POINTS, IN_WORK, LONGEST_S = 30, 0.66, 600


@dataclass
class Figures:
    """What happened. `lost` and the like must be empty lists."""

    kills: int = 0
    grids: int = 0
    points: int = 0
    by_phase: Counter[str] = field(default_factory=Counter)
    aimed: int = 0
    problems: list[str] = field(default_factory=list)
    done_again: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    slowest_end_s: float = 0.0
    seconds: float = 0.0

    def told(self) -> dict[str, object]:
        wrong = len(self.problems) + len(self.done_again) + len(self.orphans)
        bound = 1 - 0.05 ** (1 / self.kills) if self.kills and not wrong else None
        return asdict(self) | {
            "faults": wrong,
            "faults_per_kill_95_upper_bound": bound,
            "seconds_per_kill": self.seconds / max(1, self.kills),
        }


class Soak:
    def __init__(self, warm: Warm, folder: Path, seed: int) -> None:
        self.warm, self.folder, self.figures = warm, folder, Figures()
        self.rng, self.begin = random.Random(seed), time.monotonic()
        self.grid, self.store = folder / "grid.yaml", folder / "store"
        spec = {
            "notebook": str(TRIVIAL),
            "experiment": "soak",
            "grid": {"x": [*range(1, POINTS + 1)]},
        }
        self.grid.write_text(yaml.safe_dump(spec))
        assert warm.run("initialise", folder / "template").code == 0

    def grids(self, kills: int) -> None:
        """Whole grids, until there were that many kills."""
        with tqdm(total=kills, unit="kill", smoothing=0.05) as bar:
            while self.figures.kills < kills:
                shutil.rmtree(self.store, ignore_errors=True)
                shutil.copytree(self.folder / "template", self.store)
                while self.figures.kills < kills and self.killed():
                    bar.update()
                    bar.set_postfix(self.figures.by_phase, refresh=False)
                self.completed()
        self.figures.seconds = time.monotonic() - self.begin

    def killed(self) -> bool:
        """One runner from start to kill; says whether it was killed before all was done."""
        figures, before = self.figures, committed(self.store)
        phase = self.target()
        inject = None
        if phase:
            at = self.rng.randint(1, AIMED[phase])
            inject = {"do": "kill", "phase": phase, "at": at}
        pid = self.start(inject)
        if not phase:
            time.sleep(self.rng.uniform(0, self.horizon()))
            os.kill(pid, signal.SIGKILL)
        end = self.warm.wait(pid, LONGEST_S)
        ended = time.monotonic()
        figures.orphans += [f"{p} {c}" for p, c in orphans(self.store).items()]
        figures.slowest_end_s = max(figures.slowest_end_s, time.monotonic() - ended)
        self.unchanged(before)
        if end.code != -signal.SIGKILL:
            figures.problems += [] if end.code == 0 else [f"exit code {end.code}: {end.said}"]
            return False
        figures.kills += 1
        figures.aimed += bool(phase)
        figures.by_phase[end.phase] += 1
        return True

    def target(self) -> str | None:
        """The phase to aim at, the rarest, or None for a kill by the clock."""
        if self.rng.random() < IN_WORK:
            return None
        left = any((self.store / "attempts").glob("*"))
        phases = [phase for phase in AIMED if left or phase != "aside"]
        return min(phases, key=lambda phase: (self.figures.by_phase[phase], self.rng.random()))

    def horizon(self) -> float:
        """Seconds in which a runner does a few points."""
        return self.ready_s + 4 * self.point_s

    def start(self, inject: dict[str, object] | None = None) -> int:
        return self.warm.start(
            "grid", self.store, real=True, grids=[str(self.grid)], tune=SOON, inject=inject
        )

    def rehearse(self) -> None:
        """How long a start takes, and a point."""
        shutil.copytree(self.folder / "template", self.store)
        pid, begin = self.start(), time.monotonic()
        marks: list[float] = []
        while len(marks) < 4:
            done = len(list((self.store / "results").glob("*/published")))
            marks += [time.monotonic() - begin] * (done - len(marks))
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        self.warm.wait(pid)
        self.point_s = (marks[3] - marks[0]) / 3
        self.ready_s = max(0.0, marks[0] - self.point_s)
        self.begin = time.monotonic()

    def unchanged(self, before: dict[str, tuple[str, int]]) -> None:
        after = committed(self.store)
        self.figures.done_again += [k for k, what in before.items() if after.get(k) != what]

    def completed(self) -> None:
        before = committed(self.store)
        end = self.warm.wait(self.start(), LONGEST_S)
        self.unchanged(before)
        self.figures.problems += [] if end.code == 0 else [f"exit code {end.code}: {end.said}"]
        self.figures.problems += self.warm.problems(self.store, [self.grid])
        self.figures.grids += 1
        self.figures.points += len(committed(self.store))


def thousand(warm: Warm, folder: Path, points: int) -> dict[str, float]:
    """What a grid of so many points costs beside its kernels: seconds, and megabytes at most."""
    store, grid = folder / "many", folder / "many.yaml"
    shutil.copytree(folder / "template", store)
    spec = {"notebook": str(TRIVIAL), "experiment": "many", "grid": {"x": [*range(points)]}}
    grid.write_text(yaml.safe_dump(spec))
    few = folder / "few.yaml"
    few.write_text(yaml.safe_dump(spec | {"grid": {"x": [*range(points // 20)]}}))
    job = {"tune": SOON, "seconds": LONGEST_S * 5}
    first = warm.run("grid", store, grids=[str(few)], **job)
    made = warm.run("grid", store, grids=[str(grid)], **job)
    again = warm.run("grid", store, grids=[str(grid)], **job)
    assert first.code == made.code == again.code == 0, made.said[-2000:]
    scan = warm.run("scan", store, grids=[str(grid)], **job).value
    return {
        "points": points,
        **{f"{name}_s": seconds for name, seconds in scan.items()},
        "resume_in_all_s": again.seconds,
        "stubbed_point_s": (made.seconds - again.seconds) / (points - points // 20),
        f"peak_mb_after_{points // 20}": first.peak_mb,
        f"peak_mb_after_{points}": made.peak_mb,
    }


def main(
    kills: Annotated[int, typer.Option(help="How often to kill a runner.")] = 1000,
    seed: Annotated[int, typer.Option(help="Of the moments.")] = 0,
    points: Annotated[int, typer.Option(help="Of the grid that is only scanned; 0: none.")] = 1000,
    out: Annotated[Path, typer.Option(help="Where the figures go.")] = Path(
        "data/measurements/soak.json"
    ),
) -> None:
    """Kill runners at random moments and count what is lost."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder, Warm() as warm:
        soak = Soak(warm, Path(folder).resolve(), seed)
        if kills:
            soak.rehearse()
            soak.grids(kills)
        told = {"kills": soak.figures.told(), "seed": seed}
        if points:
            told["scan"] = thousand(warm, Path(folder).resolve(), points)
    out.write_text(json.dumps(told, indent=1) + "\n")
    typer.echo(json.dumps(told, indent=1))
    raise typer.Exit(int(bool(soak.figures.told()["faults"])))


if __name__ == "__main__":
    typer.run(main)
