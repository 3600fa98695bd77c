"""A grid loses nothing: faults at chosen moments, a resume, then the invariants (faults.py)."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from conftest import also, one_in
from mlflow.exceptions import MlflowException
from rich.console import Console
from support.faults import (
    FITS,
    PHASES,
    READING,
    SOON,
    TRIVIAL,
    Warm,
    committed,
    problems,
    quick_machines,
)
from support.processes import until
from support.stores import Outage

from specexp.grids import points as grid
from specexp.grids import runner
from specexp.tracking import runs


class Bench:
    """A store and a grid for it; `again` restores the store's initial state."""

    def __init__(
        self, warm: Warm, folder: Path, template: Path, points: int, done: Sequence[int] = ()
    ):
        self.warm, self.folder, self.store, self.points = warm, folder, folder / "store", points
        self.store.mkdir()
        shutil.copy(template / "mlflow.db", self.store)
        self.grid = self.file("grid", range(1, points + 1))
        if done:
            assert warm.run("grid", self.store, grids=[str(self.file("done", done))]).code == 0
        shutil.copytree(self.store, folder / "before")

    def file(self, name: str, xs, **more) -> Path:
        path = self.folder / f"{name}.yaml"
        spec = {"notebook": str(TRIVIAL), "experiment": "faults", "grid": {"x": list(xs)}}
        path.write_text(yaml.safe_dump(spec | more))
        return path

    def abandon(self) -> None:
        """Leave an attempt of a runner that died, for runs to recover."""
        (self.folder / "before" / "attempts" / "another-00000000").mkdir(parents=True)

    def again(self) -> None:
        shutil.rmtree(self.store)
        shutil.copytree(self.folder / "before", self.store)

    def go(self, **job):
        return self.warm.run("grid", self.store, **{"grids": [str(self.grid)], "tune": SOON, **job})

    def wrong(self, *grids: Path, **options) -> list[str]:
        return self.warm.problems(self.store, grids or (self.grid,), **options)

    def events(self, do: str = "kill") -> list[tuple[str, str]]:
        """(phase, what) of every event of an undisturbed run at which `do` can be injected."""
        self.again()
        fits = FITS.get(do)
        done = self.go()
        assert done.code == 0, done.said
        return [(p, w) for p, w, _ in done.events if (w in fits if fits else w not in READING)]

    def struck(self, *strikes: dict) -> list[str]:
        """What is wrong after these faults, in one run each, and a resume without faults."""
        self.again()
        found = []
        before = {}
        for strike in strikes:
            end = self.go(inject=strike)
            found += self.untouched(before)
            before = committed(self.store)
            if strike["do"] == "kill" and end.code not in (-9, 0):
                found.append(f"not killed: {end.code}, {end.said}")
            elif strike["do"] != "kill":
                found += self.misspoken(strike["do"], end)
        end = self.go()
        if end.code:
            found.append(f"the resume ended with {end.code}: {end.said}")
        return [*found, *self.untouched(before), *self.wrong()]

    def untouched(self, before: dict) -> list[str]:
        now = committed(self.store)
        return [f"done again: {key}" for key, what in before.items() if now.get(key) != what]

    def misspoken(self, do: str, end) -> list[str]:
        """A fault that can be reported is reported in one line, with the right exit code."""
        found = [f"a traceback: {end.said}"] if "Traceback" in end.said else []
        if end.code == 0:
            return found  # the fault did not matter
        full = do == "ENOSPC"
        if end.code not in ((5,) if full else (1, 2)):
            found.append(f"exit code {end.code}: {end.said}")
        if full and not (str(self.store) in end.line and "MB free" in end.line):
            found.append(f"no path or no free space: {end.line}")
        return found


@pytest.fixture
def bench(warm, disk, template):
    def call(points: int, done: Sequence[int] = ()) -> Bench:
        return Bench(warm, disk, template, points, done)

    return call


def each(bench: Bench, do: str, numbers, **more) -> list[str]:
    found = []
    for n in numbers:
        found += [f"event {n}: {w}" for w in bench.struck({"do": do, "at": n, **more})]
    return found


def first_of_each_kind(events, every: int = 10**9) -> list[int]:
    """The numbers of the first event of each kind (phase and what) and of every `every`-th."""
    seen: dict = {}
    for n, event in enumerate(events, 1):
        seen.setdefault(event, n)
    return sorted({*seen.values(), *range(every, len(events) + 1, every)})


# --- killed at any moment ------------------------------------------------------------------------


STEPS = 4  # parts of a test, of which one is quick


@pytest.mark.parametrize("part", one_in(STEPS, range(STEPS)))
def test_kill_at_each_commit_step_keeps_one_result(bench, part):
    b = bench(points=3, done=[1, 3])
    b.abandon()
    events = b.events()
    steps = [n for n, (phase, _) in enumerate(events, 1) if phase == "commit"]
    around = [n for n in first_of_each_kind(events) if n not in steps][::2]
    assert len(steps) > 10
    hit = Counter(events[n - 1][0] for n in steps + around)
    assert {"claim", "work", "check", "commit", "publish", "recover", "setup"} <= set(hit), hit
    assert each(b, "kill", steps[part::STEPS] + around[part::STEPS]) == []


PARTS = 8  # of a test that is too long for one sitting: every eighth event


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(PARTS))
def test_kill_before_every_event_then_resume_is_whole(bench, part):
    b = bench(points=3)
    b.abandon()
    events = b.events()
    hit = Counter(phase for phase, _ in events)
    assert len(events) > 200
    assert set(PHASES) - set(hit) <= {"plan", "aside"}, hit  # to plan is to read
    assert each(b, "kill", range(1 + part, len(events) + 1, PARTS)) == []
    b.again()
    assert b.go(inject={"do": "kill", "at": len(events) + 1}).code == 0


def kills(bench: Bench, times: int, seed: int) -> tuple[list[str], Counter]:
    """Three kills in a row at random events, `times` times: the problems and the phases hit."""
    rng, found, hit = random.Random(seed), [], Counter()
    events = bench.events()
    for _ in range(times):
        strikes = [{"do": "kill", "at": rng.randint(1, len(events))} for _ in range(3)]
        hit[events[strikes[0]["at"] - 1][0]] += 1
        found += [f"{strikes}: {w}" for w in bench.struck(*strikes)]
    return found, hit


def test_kill_during_resume(bench):
    found, hit = kills(bench(points=2), 3, seed=6)
    assert found == []
    assert len(hit) > 1


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(7, 11))
def test_kill_during_resume_a_hundred_times(bench, seed):
    found, hit = kills(bench(points=3), 25, seed)
    assert found == []
    assert len(hit) > 3


@pytest.mark.parametrize("at", [100, *also(-1)], ids=["in a migration", "before it is there"])
def test_half_created_database_is_created_anew(warm, disk, at):
    store = disk / "store"
    store.mkdir()
    made = [e for e in warm.run("initialise", store).events if e[1] not in READING]
    assert len(made) > 300
    file = disk / "grid.yaml"
    file.write_text(yaml.safe_dump({"notebook": str(TRIVIAL), "grid": {"x": [1]}}))
    shutil.rmtree(store)
    store.mkdir()
    strike = {"do": "kill", "at": at % len(made)}
    assert warm.run("initialise", store, inject=strike).code == -9
    end = warm.run("grid", store, grids=[str(file)])
    assert end.code == 0, end.said
    assert warm.problems(store, [file]) == []
    assert not list(store.glob("mlflow.db.new*"))


def test_killed_forced_run_loses_no_point(bench):
    b = bench(points=2, done=[1, 2])
    before = committed(b.store)
    forced = [e for e in b.go(arguments=["--force"]).events if e[1] not in READING]
    moved = next(n for n, e in enumerate(forced, 1) if e[:2] == ("commit", "rename"))
    assert "/results/" in forced[moved - 1][2]  # the old one aside; the new one comes next
    b.again()
    assert b.go(arguments=["--force"], inject={"do": "kill", "at": moved + 1}).code == -9
    [gone] = before.keys() - committed(b.store).keys()
    end = b.go()
    assert end.code == 0
    assert end.said.startswith("0 of 2 points to run")
    assert committed(b.store).keys() == before.keys()
    assert b.wrong() == []
    [kept] = (b.store / "replaced").iterdir()
    assert kept.name.startswith(gone)


# --- the harness can see -------------------------------------------------------------------------


def test_harness_catches_a_naive_runner_once_killed(warm, disk, template):
    """The control: the same harness on a runner written without a thought of faults."""
    store = disk / "store"
    file = disk / "grid.yaml"
    file.write_text(yaml.safe_dump({"notebook": str(TRIVIAL), "grid": {"x": [1, 2]}}))

    def fresh() -> None:
        shutil.rmtree(store, ignore_errors=True)
        store.mkdir()
        shutil.copy(template / "mlflow.db", store)

    fresh()
    whole = warm.run("naive", store, grids=[str(file)])
    assert warm.problems(store, [file]) == []
    events = [e for e in whole.events if e[1] not in READING]
    harms, caught = {"torn", "duplicated", "running"}, set()
    for at in range(1, len(events) // 2, 4):
        if harms <= caught:
            break
        fresh()
        assert (
            warm.run("naive", store, grids=[str(file)], inject={"do": "kill", "at": at}).code == -9
        )
        assert warm.run("naive", store, grids=[str(file)]).code == 0
        caught |= {w.split()[0] for w in warm.problems(store, [file])}
    assert harms <= caught


def test_harness_finds_planted_damage(bench):
    b = bench(points=2, done=[1, 2])
    results = sorted((b.store / "results").iterdir())

    def planted(harm) -> set[str]:
        b.again()
        harm()
        return {w.split()[0] for w in b.wrong()}

    database = f"{b.store}/mlflow.db"
    sql = (
        "import sqlite3, sys; d = sqlite3.connect(sys.argv[1]); d.execute(sys.argv[2]); d.commit()"
    )

    def change(statement: str):
        return lambda: subprocess.run([sys.executable, "-c", sql, database, statement], check=True)

    assert planted(lambda: None) == set()
    assert planted(lambda: shutil.rmtree(results[0])) == {"lost"}
    assert planted(lambda: (results[0] / "log.txt").write_text("another")) == {"torn"}
    assert planted(lambda: (b.store / "attempts" / "x-1").mkdir()) == {"leftover"}
    assert planted(change("UPDATE runs SET status = 'RUNNING'")) == {"running", "differs"}
    assert planted(change("DELETE FROM metrics WHERE step = 2")) == {"differs"}
    assert planted(change("UPDATE params SET value = '9' WHERE key = 'x'")) == {"differs"}
    assert planted(change("UPDATE latest_metrics SET value = 7")) == {"differs"}
    b.again()
    orphan = subprocess.Popen(["sleep", "3600"], env={"SPECEXP_MLRUNS": str(b.store)})
    assert {w.split()[0] for w in b.wrong(patience_s=0)} == {"orphan"}
    orphan.kill()
    orphan.wait()


# --- a disk that is full, failing, or not ours ---------------------------------------------------


@pytest.mark.parametrize("do", one_in(4, ["ENOSPC", "EIO", "EMFILE", "EACCES"]))
def test_disk_errors_are_one_line_and_lose_nothing(bench, do):
    b = bench(points=1)
    kinds = first_of_each_kind(b.events(do))
    assert len(kinds) > 8
    chosen = kinds[:: 1 + len(kinds) // 4]
    assert each(b, do, chosen, stays=do == "ENOSPC") == []


def test_disk_error_once_a_result_has_moved_calls_it_failed(bench):
    b = bench(points=2)
    b.again()
    done = [(what, path) for phase, what, path in b.go().events
            if phase == "commit" and what in FITS["EIO"]]  # fmt: skip
    last = done.index(("fsync", "/results")) + 1  # of the first point
    assert b.struck({"do": "EIO", "phase": "commit", "at": last}) == []


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize("do", ["ENOSPC", "EIO", "EMFILE", "EACCES"])
def test_disk_errors_at_every_event(bench, do, stays, part):
    b = bench(points=2)
    events = b.events(do)
    assert len(events) > 50
    assert each(b, do, range(1 + part, len(events) + 1, PARTS), stays=stays) == []


@pytest.fixture
def mounted(tmp_path):
    """mounted("-t", "tmpfs", ...): a folder where that is mounted."""
    folders = []

    def call(*how: str) -> Path:
        folder = tmp_path / f"mount{len(folders)}"
        folder.mkdir()
        subprocess.run(["mount", *how, str(folder)], check=True)
        folders.append(folder)
        return folder

    yield call
    for folder in folders:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.mount
def test_really_full_disk(warm, template, tmp_path, mounted):
    """Depending on its size it is full in the notebook, an artifact or the database."""
    said = Counter()
    for room in (0, 400_000, 1_200_000):
        store = mounted("-t", "tmpfs", "-o", "size=6m", "tmpfs")
        shutil.copy(template / "mlflow.db", store)
        file = tmp_path / "grid.yaml"
        file.write_text(yaml.safe_dump({"notebook": str(TRIVIAL), "grid": {"x": [1, 2, 3]}}))
        filler = store / "filler"
        free = os.statvfs(store).f_bavail * os.statvfs(store).f_frsize
        filler.write_bytes(b"x" * (free - room))
        end = warm.run("grid", store, grids=[str(file)], tune=SOON)
        assert end.code == 5, end.said
        assert "Traceback" not in end.said
        assert str(store) in end.line
        assert "MB free" in end.line
        said[len(committed(store))] += 1
        before = committed(store)
        filler.unlink()
        end = warm.run("grid", store, grids=[str(file)], tune=SOON)
        assert end.code == 0, end.said
        assert warm.problems(store, [file]) == []
        assert before.items() <= committed(store).items()
    assert len(said) > 1, said  # not all in the same place


@pytest.mark.mount
def test_read_only_store_is_refused_in_one_line(bench, mounted):
    b = bench(points=1, done=[1])
    there = mounted("--bind", str(b.store))
    subprocess.run(["mount", "-o", "remount,ro,bind", str(there)], check=True)
    end = b.warm.run("grid", there, grids=[str(b.file("more", [5]))])
    assert end.code == 2
    assert end.line.startswith(f"error: cannot write to {there}: Read-only file system")
    assert "Traceback" not in end.said


def test_file_size_limit_is_an_error_in_one_line(bench):
    b = bench(points=1)
    end = b.go(limits={"RLIMIT_FSIZE": 200_000}, size=300_000)
    assert end.code in (1, 5)
    assert "Traceback" not in end.said
    assert "File too large" in end.said
    assert b.go(arguments=["--retry-failed"]).code == 0
    assert b.wrong() == []


# --- results that were damaged -------------------------------------------------------------------


def _edited(path: Path, change) -> None:
    notebook = json.loads(path.read_text())
    change(notebook["cells"])
    path.write_text(json.dumps(notebook))


def _swapped(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


DAMAGE = {
    "empty": lambda r: (r / "notebook.ipynb").write_text(""),
    "half": lambda r: os.truncate(r / "notebook.ipynb", (r / "notebook.ipynb").stat().st_size // 2),
    "NUL bytes": lambda r: (r / "result.json").write_bytes(bytes(500)),
    "a cell dropped": lambda r: _edited(r / "notebook.ipynb", lambda cells: cells.pop()),
    "an output dropped": lambda r: _edited(r / "notebook.ipynb", lambda c: c[0].update(outputs=[])),
    "a file gone": lambda r: (r / "figures" / "curve.png").unlink(),
    "all files gone": lambda r: [p.unlink() for p in r.rglob("*") if p.is_file()],
    "an empty manifest": lambda r: (r / "manifest.json").write_text("{}"),
    "a manifest that is none": lambda r: (r / "manifest.json").write_text("[1]"),
    "a torn manifest": lambda r: (r / "manifest.json").write_text('{"result.json": "'),
    "a notebook replaced by a folder": lambda r: (
        (r / "notebook.ipynb").unlink(), (r / "notebook.ipynb").mkdir(),
    ),
}  # fmt: skip


def test_any_damage_is_found_and_the_point_rerun(bench):
    count = len(DAMAGE) + 5
    b = bench(points=count, done=range(1, count + 1))
    before = committed(b.store)
    results = sorted((b.store / "results").iterdir())
    for harm, result in zip(DAMAGE.values(), results, strict=False):
        harm(result)
    one, other, third, fourth, good = results[len(DAMAGE) :]
    _swapped(one, other)  # whole folders, each of them intact in itself
    _swapped(third / "notebook.ipynb", fourth / "notebook.ipynb")
    end = b.go()
    assert end.code == 0, end.said
    assert f"{len(results) - 1} of {len(results)} points to run" in end.said
    assert b.wrong() == []
    after = committed(b.store)
    assert after[good.name] == before[good.name]
    assert all(after[r.name] != before[r.name] for r in results if r != good)
    kept = {p.name.rpartition("-")[0] for p in (b.store / "replaced").iterdir()}
    assert kept == {r.name for r in results} - {good.name}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_any_changed_byte_is_found(bench):
    b = bench(points=160, done=range(1, 161))
    rng = random.Random(9)
    for result in (b.store / "results").iterdir():
        files = [p for p in sorted(result.rglob("*")) if p.is_file() and p.name != ".published"]
        file = rng.choice(files)
        data = bytearray(file.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
    end = b.go()
    assert "160 of 160 points to run" in end.said
    assert b.wrong() == []


def test_torn_failures_are_skipped(bench):
    b = bench(points=1)
    b.go(inject={"do": "kill", "phase": "work", "at": 5})
    b.go(inject={"do": "kill", "phase": "commit", "at": 1})
    for kept in (b.store / "failed").iterdir():
        for name in ("point.json", "tags.json", "error.txt"):
            (kept / name).write_text("")
        (kept / ".published").unlink(missing_ok=True)
    (b.store / "attempts" / "a stray file").write_text("")
    end = b.go()
    assert end.code == 0, end.said
    assert b.wrong() == ["leftover a stray file in attempts"]


# --- several runners -----------------------------------------------------------------------------


def together(warm, store: Path, jobs: list[dict]) -> list:
    pids = [warm.start("grid", store, **job) for job in jobs]
    return [warm.wait(pid) for pid in pids]


def executions(ledger: Path) -> Counter:
    return Counter(line.rpartition("-")[0] for line in ledger.read_text().splitlines())


def starts(warm, disk, runners: int, times: int, xs=range(1, 5)) -> None:
    """Start runners together on a store that does not exist yet: each point runs once."""
    file = disk / "grid.yaml"
    file.write_text(yaml.safe_dump({"notebook": str(TRIVIAL), "grid": {"x": list(xs)}}))
    for n in range(times):
        store, ledger = disk / f"store{n}", disk / f"ledger{n}"
        job = {"grids": [str(file)], "ledger": str(ledger), "sleep": 0.05}
        ends = together(warm, store, [job] * runners)
        assert [e.code for e in ends] == [0] * runners, [e.said for e in ends]
        assert all("Traceback" not in e.said for e in ends)
        assert set(executions(ledger).values()) == {1}
        assert warm.problems(store, [file]) == []
        shutil.rmtree(store)


def test_runners_on_a_new_store_run_each_point_once(warm, disk):
    starts(warm, disk, runners=3, times=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("runners", [2, 8])
def test_runners_on_a_new_store_run_each_point_once_often(warm, disk, runners):
    starts(warm, disk, runners, times=25, xs=range(1, 11))


def test_points_shared_by_two_grids_run_once(bench, tmp_path):
    b = bench(points=1)
    one, other = b.file("one", [1, 2, 3]), b.file("other", [2, 3, 4])
    ledger = tmp_path / "ledger"
    jobs = [{"grids": [str(f)], "ledger": str(ledger), "sleep": 0.2} for f in (one, other)]
    assert [e.code for e in together(b.warm, b.store, jobs)] == [0, 0]
    assert sorted(executions(ledger).values()) == [1, 1, 1, 1]
    assert b.wrong(one, other) == []


@pytest.mark.parametrize("phase", ["work", "publish"])
def test_waiting_runner_settles_what_a_killed_one_left(bench, tmp_path, phase):
    b, gate = bench(points=2), tmp_path / "gate"
    dying = b.warm.start(
        "grid", b.store, grids=[str(b.grid)], gate=str(gate),
        inject={"do": "kill", "phase": phase, "at": 3 if phase == "work" else 20},
    )  # fmt: skip
    until(lambda: list((b.store / "attempts").glob("*/log.txt")))
    waiting = b.warm.start("grid", b.store, grids=[str(b.grid)])
    until(lambda: list((b.store / "results").glob("*/.published")))
    gate.touch()
    assert b.warm.wait(dying).code == -9
    other = b.warm.wait(waiting)
    assert other.code == 0, other.said
    assert "waiting for" in other.said
    assert b.wrong() == []


# --- clocks, places, MLflow away ----------------------------------------------------------------


@pytest.mark.parametrize("clock", ["jumps", "2040"])
def test_jumping_clock_changes_nothing(bench, clock):
    b = bench(points=3)
    end = b.go(clock=clock, inject={"do": "kill", "phase": "publish", "nth": 2, "at": 9})
    assert end.code == -9
    before = committed(b.store)
    assert b.go(clock=clock).code == 0
    assert b.wrong() == []
    assert b.untouched(before) == []


def test_failure_dated_in_the_future_can_be_retried(bench):
    """It failed when the clock was an hour ahead, and is not taken for another runner's failure."""
    b = bench(points=1)
    assert b.go(fails="planted").code == 1
    [kept] = (b.store / "failed").iterdir()
    later = time.time() + 3600
    for path in kept.iterdir():
        os.utime(path, (later, later))
    end = b.go(arguments=["--retry-failed"])
    assert end.code == 0, end.said
    assert b.wrong() == []


def test_moved_store_works(bench):
    b = bench(points=4, done=[1, 2])
    old = b.store
    b.store = b.folder / "else where"
    old.rename(b.store)
    before = committed(b.store)
    end = b.go()
    assert end.code == 0, end.said
    assert b.wrong() == []
    assert b.untouched(before) == []
    assert not old.exists()


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(runner, "PATIENCE_S", 0)


def go(points: list[grid.Point], **job) -> tuple[int, str]:
    console = Console(record=True, width=200, force_terminal=False)
    code = runner.run(points, console, machines=quick_machines(job)(points))
    return code, console.export_text()


def test_outage_is_waited_for_once_not_per_point(store, points, impatient, monkeypatch):
    todo = points(x=[*range(1, 6)])
    outage = Outage(monkeypatch, 10**6)
    assert go(todo)[0] == 1
    assert outage.calls <= len(todo) + 1
    outage.times = 0
    assert go(todo)[0] == 0
    assert problems(store, todo) == []


def test_failure_published_after_a_success_is_not_shown(store, points, impatient, monkeypatch):
    todo = points(x=[1])
    Outage(monkeypatch, 4)
    assert go(todo, fails="lost")[0] == 1
    code, said = go(todo)
    assert code == 0, said
    assert problems(store, todo) == []


def test_refused_note_is_one_line(store, points, impatient, monkeypatch):
    def refuses(*_, **__):
        raise MlflowException("database is locked")

    assert go(points(x=[0]))[0] == 0  # it makes the experiment
    monkeypatch.setattr(runs.client().__class__, "search_experiments", refuses)
    code, said = go(points(x=[1]))
    assert code == 0
    assert "MLflow's notes are not renewed: " in said
    assert "locked it\n" in said


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_memory_is_flat_over_a_thousand_points(bench):
    few, many = bench(points=60), 1000
    first = few.go()
    few.again()
    few.grid = few.file("many", range(1, many + 1))
    last = few.go(seconds=3000)
    assert first.code == last.code == 0
    assert last.peak_mb < first.peak_mb + 100, (first.peak_mb, last.peak_mb)
    assert few.go().said.startswith(f"0 of {many} points to run")
    assert few.wrong() == []
