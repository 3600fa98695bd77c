"""Kills runners a thousand times and checks that nothing is lost: `make soak`.

A grid of real, forked kernels starts on a new store. Its runner is killed (SIGKILL), the next one
resumes at once and is killed in turn, until one completes the grid: then every point must have one
intact result, which is in MLflow. Kills are random (at a random time after the start) or aimed (at
a random event or moment of a phase with too few kills so far): half of each while any phase has too
few, and counted separately.

The control, a naive runner under the same harness, must be caught. Writes the figures as JSON. If
anything is wrong, exits with 1 and keeps the store.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import nbformat
import yaml
from rich.progress import track as progress
from scipy.stats import binomtest
from support.faults import READING, End, Warm, committed, orphans

MOMENTS = (
    "setup", "recover", "aside", "plan", "claim", "kernel", "work", "cell", "check",
    "manifest", "fsync", "rename", "publish", "report",
)  # fmt: skip
AT_WORK = ("work", "cell")  # a kernel is running; it is executing a cell
BY_CLOCK = ("kernel", "work", "cell", "report")  # phases with hardly any events
KINDS = (
    "lost", "duplicated", "torn", "running", "orphan", "executed again", "changed",
    "differs", "leftover", "ended",
)  # fmt: skip
PATIENCE_S = 600.0
CELLS = (
    "x: int = 0  # a number",
    "import os\nimport time\n\nfrom specexp.tracking import provenance, runs\n\n"
    "params = runs.parameters(globals())\n"
    "provenance.tags = lambda device: {}  # would import torch",
    "with open(os.environ['LEDGER'], 'a') as ledger:\n"
    "    print(os.path.basename(os.environ['SPECEXP_ATTEMPT']), file=ledger)",
    "for n in range(5):\n    time.sleep(0.01)\n    print(n)",
    "runs.log('soak', params, {'soak/x': float(x)}, {'soak/curve': [0.5, 0.25]})",
)


@dataclass(frozen=True)
class Kill:
    """A kill. `resumed`: the runner had resumed a killed one's work; `early`: it had not started a
    point yet."""

    moment: str
    aimed: bool
    resumed: bool
    early: bool


def moment(phase: str, events: Sequence[tuple[str, str, str]]) -> str:
    """The phase, or the step of a commit: manifest, fsync or rename (just before or after it)."""
    if phase != "commit":
        return phase
    steps = {what for _, what, _ in takewhile(lambda e: e[0] == "commit", reversed(events))}
    return next((step for step in ("rename", "fsync") if step in steps), "manifest")


class Soak:
    """`run` kills runners; `kills` and `found`, a line per problem, hold the outcome.

    folder: for stores; those with a problem are kept.
    """

    def __init__(
        self, warm: Warm, folder: Path, kills: int, points: int = 30, seed: int = 0,
        do: str = "grid",
    ) -> None:  # fmt: skip
        self.warm, self.folder, self.wanted, self.points, self.do = warm, folder, kills, points, do
        self.rng = random.Random(seed)
        self.kills: list[Kill] = []
        self.found: dict[str, None] = {}
        self.grids = 0
        self.grid, self.template = folder / "grid.yaml", folder / "template"
        made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in CELLS])
        made.cells[0].metadata["tags"] = ["parameters"]
        nbformat.write(made, folder / "soak.ipynb")
        spec = {"notebook": str(folder / "soak.ipynb"), "grid": {"x": list(range(points))}}
        self.grid.write_text(yaml.safe_dump(spec))

    # phases with too few kills

    @property
    def at_work(self) -> int:
        return sum(kill.moment in AT_WORK for kill in self.kills)

    def short(self) -> list[str]:
        """The phases with too few kills: 2 % in each and 60 % at work are wanted. Only a grid has
        phases."""
        hit = Counter(kill.moment for kill in self.kills)
        few = [name for name in MOMENTS if hit[name] < self.wanted // 50]
        idle = self.at_work < 0.6 * self.wanted
        return [*few, *["cell"] * idle] if self.do == "grid" else []

    # runners

    def run(self) -> Iterator[Kill]:
        """Kill until the wanted number is reached and no phase is short, or twice that number.
        Every grid is completed."""
        self._rehearse()
        while not self._enough():
            self._begin()
            end = self._runner(**self._strike())
            while end.code == -9:
                yield self.kills[-1]
                end = self._runner(**({} if self._enough() else self._strike()))
            self._end(end)

    def _enough(self) -> bool:
        done = len(self.kills)
        return done >= self.wanted and (not self.short() or done >= 2 * self.wanted)

    def _rehearse(self) -> None:
        """Run one grid, with one kill, to learn how long it takes and which events it has."""
        assert self.warm.run("initialise", self.template).code == 0
        self._begin()
        begun = self._runner(inject={"do": "kill", "at": 3, "phase": "cell"})
        end = self._runner()
        self._end(end)
        self.kills.clear()
        self.seconds = max(begun.seconds, end.seconds)  # the naive one has no cells
        self.strikes: dict[str, list[dict[str, Any]]] = defaultdict(list)
        count: Counter[str] = Counter()
        for n, (phase, what, _) in enumerate(end.events, 1):
            if what not in READING:
                count[phase] += 1
                strike = {"do": "kill", "phase": phase, "at": count[phase]}
                self.strikes[moment(phase, end.events[:n])].append(strike)

    def _strike(self) -> dict[str, Any]:
        """Choose a random or an aimed kill; early ones are likelier, as a grid is long."""
        short, early = self.short(), self.rng.random() ** 3
        if not short or self.rng.random() < 0.5:
            return {"kill": {"after": self.rng.uniform(0, self.seconds / 3)}}
        aim = self.rng.choice(short)
        if aim in BY_CLOCK:
            nth = 1 if aim == "report" else self.rng.randint(1, 10)
            return {"kill": {"phase": aim, "nth": nth, "after": early / 20}}
        strikes = self.strikes[aim]
        return {"inject": strikes[int(early * len(strikes))]}

    def _begin(self) -> None:
        self.grids += 1
        self.store = self.folder / f"grid-{self.grids}"
        shutil.copytree(self.template, self.store)
        self.ledger = self.folder / f"ledger-{self.grids}"
        self.ledger.touch()
        self.resumed = False
        self.before: dict[str, Any] = {}
        self.alive: dict[int, float] = {}

    def _runner(
        self, inject: dict[str, Any] | None = None, kill: dict[str, Any] | None = None
    ) -> End:
        pid = self.warm.start(
            self.do, self.store, real=True, grids=[str(self.grid)], inject=inject,
            environment={"LEDGER": str(self.ledger)},
        )  # fmt: skip
        end = self.warm.wait(pid, kill=kill)
        if end.code == -9:
            aimed = bool(inject or (kill and "phase" in kill))
            early = all(phase != "work" for phase, *_ in end.events)
            self.kills.append(Kill(moment(end.phase, end.events), aimed, self.resumed, early))
        self._look()
        self.resumed = True
        return end

    # what must hold

    def _look(self) -> None:
        """Check what holds between runners: results are intact, never change and are not executed
        again, and no process of a runner survives it."""
        whole, now = committed(self.store), time.monotonic()
        there = {path.name for path in (self.store / "results").glob("*")}
        last = {name.rpartition("-")[0]: name for name in self.ledger.read_text().split()}
        self.alive = {pid: self.alive.get(pid, now) for pid in orphans(self.store, 0)}
        self._note(
            *(f"torn {key}: after a kill" for key in there - whole.keys()),
            *(f"changed {key}" for key, what in self.before.items() if whole.get(key) != what),
            *(f"executed again {k}" for k, (by, _) in whole.items() if last.get(k, by) != by),
            *(f"orphan {p}" for p, since in self.alive.items() if now - since > PATIENCE_S),
        )
        self.before = whole

    def _end(self, end: End) -> None:
        """Check what holds at the end of a grid."""
        if end.code:
            self._note(f"ended with {end.code}: {end.said[-3000:]}")
        self._note(*self.warm.problems(self.store, [self.grid]))
        if not any(line.startswith(f"{self.store}: ") for line in self.found):
            shutil.rmtree(self.store)
            self.ledger.unlink()

    def _note(self, *lines: str) -> None:
        self.found |= dict.fromkeys(f"{self.store}: {line}" for line in lines)

    def figures(self) -> dict[str, Any]:
        told = [line.partition(": ")[2] for line in self.found]
        kills = len(self.kills)
        bound = binomtest(min(len(told), kills), kills, alternative="less").proportion_ci(0.95)
        return {
            "kills": kills,
            "random": sum(not kill.aimed for kill in self.kills),
            "aimed": sum(kill.aimed for kill in self.kills),
            "at_work": self.at_work,
            "of_resumes": sum(kill.resumed for kill in self.kills),
            "of_resumes_before_work": sum(kill.resumed and kill.early for kill in self.kills),
            "phases": self._histogram(False, True),
            "phases_random": self._histogram(False),
            "phases_aimed": self._histogram(True),
            "grids": self.grids,
            "points_a_grid": self.points,
            "wrong": {kind: sum(line.startswith(kind) for line in told) for kind in KINDS},
            "fault_per_kill_upper_95": round(bound.high, 5),
        }

    def _histogram(self, *aimed: bool) -> dict[str, int]:
        hit = Counter(kill.moment for kill in self.kills if kill.aimed in aimed)
        return {name: hit[name] for name in MOMENTS}


def main() -> None:
    from specexp.tracking import provenance

    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--kills", type=int, default=1000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--out", type=Path, default=Path("data/measurements/soak.json"))
    asked = options.parse_args()
    begin = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    print(f"seed {asked.seed}, stores in {folder}")
    with Warm() as warm:
        made = {}
        for do, kills in (("naive", 40), ("grid", asked.kills)):
            (folder / do).mkdir()
            made[do] = Soak(warm, folder / do, kills, seed=asked.seed, do=do)
            for _ in progress(made[do].run(), description=f"{do} killed", total=kills):
                pass
    soak, control = made["grid"], made["naive"].figures()
    tags = provenance.tags()
    figures = {
        **soak.figures(),
        "short": soak.short(),
        "control": {name: control[name] for name in ("kills", "grids", "wrong")},
        "seconds": round(time.monotonic() - begin),
        "seed": asked.seed,
        **{name: tags[name] for name in ("version.specexp", "git.commit", "load")},
        "cores": os.cpu_count(),
    }
    asked.out.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))
    survived = not (control["wrong"]["torn"] or control["wrong"]["duplicated"])
    if soak.found or soak.short() or survived:
        print(*soak.found, sep="\n")
        sys.exit(
            f"seed {asked.seed}; short: {soak.short()}; control survived: {survived}; {folder}"
        )
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
