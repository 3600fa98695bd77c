"""Notebooks that misbehave, in real kernels, harm themselves only."""

import shutil
from pathlib import Path

import nbformat
import pytest
import yaml
from support.faults import SOON, Warm, orphans

from specexp.grids import points

SLEEPS = "import subprocess; subprocess.Popen(['sleep', '300'], start_new_session=True)"
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(300)
    os._exit(0)
os.wait()
"""
POOL = """
import multiprocessing, time
pool = multiprocessing.get_context("fork").Pool(2)
pool.apply_async(time.sleep, (300,))
"""
VANDAL = """
import os
from dataclasses import replace
from pathlib import Path
mine = Path(os.environ["SPECEXP_ATTEMPT"])
for result in mine.parents[1].glob("results/*/result.json"):
    result.write_text("{}")
"""
NEIGHBOUR = """
import os, shutil, time
from dataclasses import replace
from pathlib import Path
mine = Path(os.environ["SPECEXP_ATTEMPT"])
others = []
while not others:
    time.sleep(0.1)
    others = [p for p in mine.parent.iterdir() if p != mine and (p / "result.json").exists()]
for other in others:
    harm(other)
"""
UNTIL_A_RESULT = """
import os, time
from pathlib import Path
while not any(Path(os.environ["SPECEXP_ATTEMPT"]).parents[1].glob("results/*")):
    time.sleep(0.1)
"""
MEMORY = """
import resource
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 300_000_000, -1))
"""
ENDS = {
    "well": "pass",
    # ends that are no success (R10)
    "raises SystemExit": "raise SystemExit(0)",
    "exits": "exit()",
    "quits": "quit()",
    "leaves at once": "import os; os._exit(0)",
    "forgets": "get_ipython().run_line_magic('reset', '-f'); params",
    # ends of the kernel (R11)
    "is killed": "import os; os.kill(os.getpid(), 9)",
    "breaks": "import ctypes; ctypes.string_at(0)",
    "aborts": "import os; os.abort()",
    # memory (R13)
    "wants too much": MEMORY + "bytearray(2_000_000_000)",
    "wants too large an array": MEMORY + "import numpy; numpy.ones(250_000_000)",
    "wants too large a tensor": "import torch" + MEMORY + "torch.ones(500_000_000)",
    # no end (R14)
    "sleeps": "import time; time.sleep(600)",
    "is busy": "while True: pass",
    "does not listen": "import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(600)",
    "holds the lock": "import ctypes; ctypes.PyDLL(None).sleep(600)",
    "waits for a child": POOL + "pool.apply(time.sleep, (600,))",
    # an end that takes its time, after the last cell
    "lingers": "import atexit, time; atexit.register(time.sleep, 600)",
    "leaves a thread": "import threading; threading.Timer(600, print).start()",
    # processes left behind (R15)
    "leaves a process": SLEEPS,
    "leaves a daemon": DAEMON,
    "leaves a pool": POOL,
    "forks": "import os; os.fork() or os._exit(0); os.wait()",
    "forks and both go on": "import os; os.fork()",
    # output (R16)
    "floods": "for _ in range(50): print('x' * 1_000_000)",
    "floods at once": "print('x' * 60_000_000)",
    "shows and shows": "for n in range(20_000): display(n)",
    "loses what it says last": "get_ipython().kernel._publish_status = lambda *_, **__: None",
    # others' files
    "is a vandal": VANDAL,
    "harms a neighbour": "harm = lambda p: (p / 'result.json').write_text('{}')" + NEIGHBOUR,
    "removes a neighbour": "import shutil; harm = shutil.rmtree" + NEIGHBOUR,
    "is slow": UNTIL_A_RESULT,
}  # fmt: skip
FAILS = {
    "raises SystemExit": {"invalid-result", "error"},
    "exits": {"invalid-result", "error", "kernel-died"},
    "quits": {"invalid-result", "error", "kernel-died"},
    "leaves at once": {"kernel-died"},
    "forgets": {"error"},
    "is killed": {"kernel-died"},
    "breaks": {"kernel-died"},
    "aborts": {"kernel-died"},
    "wants too much": {"oom"},
    "wants too large an array": {"oom"},
    "wants too large a tensor": {"oom"},
    "sleeps": {"timeout"},
    "is busy": {"timeout"},
    "does not listen": {"timeout"},
    "holds the lock": {"timeout"},
    "waits for a child": {"timeout"},
}


def wild(folder: Path) -> Path:
    """A notebook that ends as `how` says in its cell number `where`."""
    cell = "if where == {0}:\n    exec(ends[how])"
    cells = [
        "how: str = 'well'  # how it ends\nwhere: int = 1  # in which cell\nx: int = 1  # a number",
        f"from specexp.tracking import provenance, runs\n\n"
        f"params, ends = runs.parameters(globals()), {ENDS!r}\n"
        "provenance.tags = lambda device: {}  # would import torch",
        *(cell.format(n) for n in (1, 2)),
        "runs.log('wild', params, {'a/b': 1.0}, {'a/c': [1.0]})",
        cell.format(3),
    ]
    made = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(c) for c in cells],
        metadata={
            "specexp": {"timed": False},
            "kernelspec": {"name": "python3", "display_name": "Python", "language": "python"},
        },
    )
    made.cells[0].metadata["tags"] = ["parameters"]
    nbformat.write(made, folder / "wild.ipynb")
    return folder / "wild.ipynb"


class Wild:
    """A store, and grids of notebooks that misbehave."""

    def __init__(self, warm: Warm, store: Path, folder: Path):
        self.warm, self.store, self.folder, self.notebook = warm, store, folder, wild(folder)

    def go(self, *arguments: str, timeout_s: float = 1200, **axes):
        end = self.warm.run(
            "grid", self.store, real=True, arguments=arguments, tune=SOON,
            grids=[str(self.file(timeout_s, **axes))],
        )  # fmt: skip
        assert "Traceback" not in end.said
        return end

    def file(self, timeout_s: float = 1200, **axes) -> Path:
        path = self.folder / "wild.yaml"
        spec = {"notebook": str(self.notebook), "grid": axes, "timeout_s": timeout_s}
        path.write_text(yaml.safe_dump(spec))
        return path

    def kinds(self, **axes) -> dict[tuple[str, int], str]:
        """(how, where) -> the kind of failure of each point of the grid, or `done`."""
        found = {}
        for point in points.load([self.file(**axes)]):
            failed = [*(self.store / "failed").glob(f"{point.run_key}-*/error.txt")]
            done = (self.store / "results" / point.run_key).exists()
            kind = "done" if done else failed[0].read_text().partition(":")[0] if failed else "lost"
            found[point.params["how"], point.params["where"]] = kind
        return found

    def wrong(self, **axes) -> list[str]:
        file = self.file(**axes)
        fails = [p.run_key for p in points.load([file]) if p.params["how"] in FAILS]
        return self.warm.problems(self.store, [file], failed=fails)

    def result(self, how: str) -> Path:
        [point] = points.load([self.file(how=[how])])
        return self.store / "results" / point.run_key

    def as_expected(self, timeout_s: float = 1200, **axes) -> None:
        """Run a grid: what must fail fails, of its kind, and all else is done, once and whole."""
        end = self.go(timeout_s=timeout_s, **axes)
        for (how, where), kind in self.kinds(**axes).items():
            assert kind in FAILS.get(how, {"done"}), (how, where, kind, end.said)
        assert self.wrong(**axes) == []


@pytest.fixture
def wilds(warm, disk, template):
    store = disk / "store"
    store.mkdir()
    shutil.copy(template / "mlflow.db", store)
    return Wild(warm, store, disk)


def test_bad_notebooks_harm_only_themselves(wilds):
    hows = ["well", "forgets", "leaves a daemon", "floods", "is a vandal"]
    assert wilds.go(how=hows).code == 1
    kinds = {how: kind for (how, _), kind in wilds.kinds(how=hows).items()}
    assert kinds == dict.fromkeys(hows, "done") | {"forgets": "error"}
    flooded(wilds.result("floods"))
    torn = [w for w in wilds.wrong(how=hows) if w.startswith("torn")]
    assert len(torn) == 3  # found by whoever looks next, and made up for
    assert wilds.go(how=hows).code == 1
    assert wilds.wrong(how=hows) == []


def flooded(result: Path) -> None:
    """Ten million characters were kept, and it says so."""
    for name in ("notebook.ipynb", "log.txt"):
        assert (result / name).stat().st_size < 12_000_000
    assert "the rest is left out" in (result / "notebook.ipynb").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_early_ends_in_each_cell_are_failures(wilds):
    hows = [*FAILS][:8]
    wilds.as_expected(how=hows, where=[1, 2, 3])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_out_of_memory_fails_one_point(wilds):
    wilds.as_expected(
        how=["wants too much", "wants too large an array", "wants too large a tensor", "well"]
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_endless_notebooks_time_out(wilds):
    hows = [how for how, kinds in FAILS.items() if kinds == {"timeout"}]
    wilds.as_expected(timeout_s=8, how=hows, where=[2])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_hang_after_the_last_cell_is_a_success(wilds):
    wilds.as_expected(how=["lingers", "leaves a thread"], where=[3])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_process_outlives_its_point(wilds):
    hows = ["leaves a process", "leaves a daemon", "leaves a pool", "forks", "forks and both go on"]
    wilds.as_expected(how=hows)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("how", ["leaves a process", "leaves a daemon", "leaves a pool"])
def test_no_process_outlives_a_killed_runner(wilds, how):
    file = str(wilds.file(how=[how, "sleeps"]))
    end = wilds.warm.run(
        "grid",
        wilds.store,
        real=True,
        grids=[file],
        inject={"do": "kill", "phase": "check", "at": 1},
    )
    assert end.code == -9
    assert orphans(wilds.store) == {}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_floods_of_output_are_cut(wilds):
    hows = ["floods", "floods at once", "shows and shows", "loses what it says last"]
    end = wilds.go(how=hows)
    assert end.code == 0, end.said
    assert end.peak_mb < 1000, end.peak_mb
    assert wilds.wrong(how=hows) == []
    flooded(wilds.result("floods"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("how", ["harms a neighbour", "removes a neighbour"])
def test_damage_by_another_point_is_found(wilds, how):
    hows = [how, "is slow"]
    end = wilds.go("--jobs", "2", how=hows, where=[3])
    kinds = wilds.kinds(how=hows, where=[3])
    assert kinds[how, 3] == "done"
    assert kinds["is slow", 3] != "done", end.said
    assert wilds.go("--retry-failed", how=hows, where=[3]).code == 0
    assert wilds.wrong(how=hows, where=[3]) == []
