"""Fault injection for runners, and a check that nothing was lost.

`Warm` is a process that has imported everything and forks a child for every job: a grid of stubbed
points, on a real store and a real MLflow database, takes a third of a second. In a child, an
`Injector` counts the events on the store (files opened for writing, each write, rename, fsync, SQL
statement, ...) and kills the process or fails the call at a chosen one. `problems` then lists what
is wrong with the store. `naive` is a runner written without a thought of faults, as a control: a
harness that finds nothing wrong with it is blind.

Used by test_faults.py and soak.py. Run as a program, this file is the warm server.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

TRIVIAL = Path(__file__).parent / "trivial.ipynb"
NEEDS_ROOM = {"open", "write", "fsync", "mkdir", "rename", "sql"}
FITS = {
    "ENOSPC": NEEDS_ROOM,
    "EIO": {*NEEDS_ROOM, "remove", "truncate", "read", "list", "connect"},
    "EMFILE": {"open", "read", "list", "connect"},
    "EACCES": {"open", "read", "list", "mkdir", "rename", "remove", "connect"},
}
SQL_SAYS = {
    "ENOSPC": "database or disk is full",
    "EIO": "disk I/O error",
    "EMFILE": "unable to open database file",
    "EACCES": "attempt to write a readonly database",
}
AUDITED = {
    "os.mkdir": "mkdir", "os.rename": "rename", "os.remove": "remove", "os.rmdir": "remove",
    "os.truncate": "truncate", "os.link": "open", "os.symlink": "open",
    "sqlite3.connect": "connect", "os.scandir": "list", "os.listdir": "list",
}  # fmt: skip
READING = {"read", "list", "connect"}
SOON = {"grids.runner.PATIENCE_S": 0.5, "grids.runner.ROOM_PER_POINT": 0}  # globals, for a test


# --- the client ----------------------------------------------------------------------------------


@dataclass
class End:
    """How a job ended. `code`: its exit status, or minus the signal; `said`: its output; `events`:
    on the store, as (phase, what, path); `phase`: the last one; `value`: what it returned."""

    code: int
    said: str
    events: list[tuple[str, str, str]]
    phase: str
    value: Any
    seconds: float
    peak_mb: float

    @property
    def line(self) -> str:
        """The last line of its output."""
        return next((x for x in reversed(self.said.splitlines()) if x.strip()), "")


class Warm:
    """A server process for the duration of the `with`. For one thread."""

    def __enter__(self) -> Warm:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("SPECEXP", "MLFLOW_TRACK"))}
        self._server = subprocess.Popen(
            [sys.executable, __file__], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**env, "OMP_NUM_THREADS": "1", "MLFLOW_DISABLE_TELEMETRY": "true"},
        )  # fmt: skip
        assert self._ask({"ask": "threads"}) == 1, "a process with threads must not be forked"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stdin.close()
        self._server.wait()

    def _ask(self, question: dict[str, Any]) -> Any:
        self._server.stdin.write(json.dumps(question) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def start(self, do: str, store: Path, **job: Any) -> int:
        """Start a job (a function of `JOBS`) and return its process id.

        inject: arguments of the Injector. tune: {"grids.runner.PATIENCE_S": 1} sets that global.
        environment: variables. limits: {"RLIMIT_FSIZE": bytes}. threads: of torch, which a run key
        names. Others are passed to the job.
        """
        return int(self._ask({"ask": "start", "job": {"do": do, "store": str(store), **job}}))

    def wait(self, pid: int, seconds: float = 1200, kill: dict[str, Any] | None = None) -> End:
        """Wait for a job to end; if it takes longer, kill it and raise TimeoutError.

        kill: {"after": s, "phase": name, "nth": n} sends SIGKILL s seconds after the job enters the
        phase for the n-th time, or after its start if no phase is given.
        """
        told = self._ask({"ask": "wait", "pid": pid, "seconds": seconds, "kill": kill})
        end = End(**told | {"events": [tuple(e) for e in told["events"]]})
        if end.code == 124:
            raise TimeoutError(f"job {pid} in {end.phase} after {seconds} s:\n{end.said[-3000:]}")
        return end

    def run(self, do: str, store: Path, seconds: float = 1200, **job: Any) -> End:
        return self.wait(self.start(do, store, **job), seconds)

    def problems(self, store: Path, grids: Sequence[Path], **options: Any) -> list[str]:
        """Run `problems` in a process of its own."""
        end = self.run("check", store, grids=[str(g) for g in grids], options=options)
        assert end.value is not None, end.said
        return end.value


def committed(store: Path) -> dict[str, tuple[str, int]]:
    """run_key -> attempt and time of every intact result, none of which a resume may change."""
    found = {}
    for result in sorted((store / "results").glob("*")):
        if not _torn(result):
            tags = json.loads((result / "tags.json").read_text())
            found[result.name] = tags["attempt"], (result / "manifest.json").stat().st_mtime_ns
    return found


# --- what must hold ------------------------------------------------------------------------------


def problems(
    root: Path, points: Sequence[Any], failed: Sequence[str] = (), artifacts: bool = True,
    patience_s: float = 600.0,
) -> list[str]:  # fmt: skip
    """What is wrong with the store of a finished grid, one line each, which begins with its kind:
    lost, torn, duplicated, differs, running, leftover or orphan.

    failed: run keys that may have failed (one FAILED run, no result). artifacts: also compare
    MLflow's copies of the files. patience_s: how long processes may take to end.
    """
    from specexp.tracking import runs as track

    expected = {p.run_key: p for p in points if p.run_key not in failed}
    found = [f"leftover {p.name} in attempts" for p in _inside(root / "attempts")]
    there = {p.name: p for p in _inside(root / "results")}
    found += [f"lost {key}: no result" for key in expected.keys() - there.keys()]
    found += [f"duplicated {key}: nobody's result" for key in there.keys() - expected.keys()]
    records = {}
    for key in expected.keys() & there.keys():
        if why := _torn(there[key]):
            found.append(f"torn {key}: {why}")
            continue
        records[key] = json.loads((there[key] / "result.json").read_text())
        if records[key]["params"] != expected[key].params:
            found.append(f"differs {key}: the result is of other parameters")
    runs: dict[str, list[Any]] = {}
    mlflow = track.client()
    for experiment in mlflow.search_experiments():
        page = None
        while page is None or page.token:
            page = mlflow.search_runs(
                [experiment.experiment_id], max_results=1000, page_token=page and page.token
            )
            for run in page:
                runs.setdefault(run.data.tags.get("run_key", "?"), []).append(run)
    for key, all_of_it in runs.items():
        statuses = sorted(r.info.status for r in all_of_it)
        found += [
            f"running {key}: {r.info.run_id}" for r in all_of_it if r.info.status == "RUNNING"
        ]
        if key in failed and statuses == ["FAILED"]:
            continue
        if len(statuses) > 1 or key not in expected:
            found.append(f"duplicated {key}: {' and '.join(statuses)} in MLflow")
        elif statuses != ["FINISHED"]:
            found.append(f"differs {key}: {statuses[0]} in MLflow")
        elif key in records:
            found += [f"differs {key}: {w}" for w in _differences(root, key, all_of_it[0], records)]
            if artifacts and (why := _artifacts_differ(there[key], all_of_it[0])):
                found.append(f"differs {key}: artifacts {why}")
    found += [f"lost {key}: not in MLflow" for key in expected.keys() - runs.keys()]
    return found + [f"orphan {pid} {command}" for pid, command in orphans(root, patience_s).items()]


def _inside(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _torn(result: Path) -> str:
    """Why this folder is not an intact result; empty if it is. Shares no code with the store."""
    try:
        digests = json.loads((result / "manifest.json").read_text())
        missing = {"result.json", "notebook.ipynb", "tags.json"} - digests.keys()
        if missing:
            return f"without {missing}"
        for name, expected in digests.items():
            if hashlib.sha256((result / name).read_bytes()).hexdigest() != expected:
                return f"{name} is not what was committed"
        cells = json.loads((result / "notebook.ipynb").read_text())["cells"]
        record = json.loads((result / "result.json").read_text())
    except (OSError, ValueError, KeyError) as e:
        return f"{type(e).__name__}: {e}"
    if any(c["cell_type"] == "code" and c["execution_count"] is None for c in cells):
        return "a cell was not executed"
    return "" if record["metrics"] else "no metrics"


def _differences(root: Path, key: str, run: Any, records: dict[str, Any]) -> Iterator[str]:
    from specexp.tracking import runs as track
    from specexp.tracking.mlflow_view import rounded

    record = records[key]
    shown = {
        n: json.dumps(v) if isinstance(v, list) else str(v) for n, v in record["params"].items()
    }
    if run.data.params != shown:
        yield "other params in MLflow"
    last = {n: list(c.values())[-1] for n, c in record["series"].items()}
    if run.data.metrics != {n: rounded(v) for n, v in (record["metrics"] | last).items()}:
        yield "other metrics in MLflow"
    for name, curve in record["series"].items():
        if track.curve(run.info.run_id, name) != {int(k): rounded(v) for k, v in curve.items()}:
            yield f"another {name} in MLflow"
    tags = json.loads((root / "results" / key / "tags.json").read_text())
    if run.data.tags.get("attempt") != tags["attempt"]:
        yield "another attempt in MLflow"


def _artifacts_differ(result: Path, run: Any) -> str:
    inside = unquote(run.info.artifact_uri.removeprefix("mlflow-artifacts:/"))
    copy = result.parents[1] / "artifacts" / inside
    digests = json.loads((result / "manifest.json").read_text())
    for name in [*digests, "manifest.json"]:
        try:
            if (copy / name).read_bytes() != (result / name).read_bytes():
                return f"{name} is another"
        except OSError as e:
            return f"{name}: {e.strerror}"
    return ""


def orphans(root: Path, seconds: float = 600.0) -> dict[int, str]:
    """Processes that a runner of this store started and that are still alive after `seconds`."""
    mark = f"SPECEXP_MLRUNS={root}\0".encode()
    deadline = time.monotonic() + seconds
    while True:
        alive = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes():
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")[:80]
                    alive[int(entry.name)] = command.decode(errors="replace")
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.05)


# --- the injector --------------------------------------------------------------------------------


class Injector:
    """Counts this process's events on the store, and injects one fault.

    do: None (only count), "kill" (SIGKILL), "stop" (SIGTERM), or the name of an errno. at: inject
    it at the at-th fitting event, counted from 1; with `phase`, only those in that phase; with
    `nth`, only those after the phase is entered for the n-th time. stays: the error persists, like
    a full disk, instead of affecting one call. A faulted write writes half of its data.
    """

    def __init__(
        self, root: Path, trace: Path, do: str | None = None, at: int = 0, phase: str | None = None,
        nth: int | None = None, stays: bool = False,
    ) -> None:  # fmt: skip
        self.root, self.do, self.at, self.only, self.stays = str(root), do, at, phase, stays
        self.nth, self.entered = nth, dict[str, int]()
        self.count, self.struck = 0, False
        self._local = threading.local()
        self._write, self._trace = os.write, os.open(trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    # phases

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before = self.now
        self.entered[name] = self.entered.get(name, 0) + 1
        self._enter(name)
        try:
            yield
        finally:
            self._enter(before)

    @property
    def now(self) -> str:
        return getattr(self._local, "phase", "setup")

    def _enter(self, name: str) -> None:
        self._local.phase = name
        self._write(self._trace, f"{name}\t\t\n".encode())

    def mark(self, owner: Any, name: str, phase: str) -> None:
        """Make calls of owner.name a phase of this name."""
        called = getattr(owner, name)

        def marked(*args: Any, **kwargs: Any) -> Any:
            with self.phase(phase):
                return called(*args, **kwargs)

        setattr(owner, name, marked)

    # events

    def install(self) -> None:
        sys.addaudithook(self._audit)
        for name in ("fsync", "write", "ftruncate", "sendfile"):
            self._wrap(name)
        opened = io.open

        def open_(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            made = opened(file, mode, *args, **kwargs)
            path = self._path(file)
            writing = path and any(letter in mode for letter in "wxa+")
            return _Torn(made, path, self.event) if writing else made

        import builtins

        import sqlalchemy

        io.open = builtins.open = open_  # type: ignore[assignment]
        sqlalchemy.event.listen(sqlalchemy.Engine, "before_cursor_execute", self._sql)
        sqlalchemy.event.listen(sqlalchemy.Engine, "commit", self._committing)

    def _wrap(self, name: str) -> None:
        called = getattr(os, name)
        what = {"ftruncate": "truncate", "sendfile": "write"}.get(name, name)

        def wrapped(descriptor: int, *args: Any, **kwargs: Any) -> Any:
            path = self._path(descriptor)
            if path:
                half = None
                if name == "write":
                    half = lambda: called(descriptor, args[0][: len(args[0]) // 2])  # noqa: E731
                elif name == "sendfile":
                    half = lambda: called(descriptor, *args[:2], args[2] // 2)  # noqa: E731
                self.event(what, path, half)
            return called(descriptor, *args, **kwargs)

        setattr(os, name, wrapped)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            changing = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            what, directory = "open" if changing else "read", None
        elif event in AUDITED:
            what, path = AUDITED[event], args[0] if args else None
            directory = args[-1] if what == "remove" else None
        else:
            return
        if found := self._path(path, directory):
            self.event(what, found)

    def _path(self, path: Any, directory: int | None = None) -> str:
        """The path if it lies in the store, else nothing."""
        try:
            if isinstance(path, int):
                path = os.readlink(f"/proc/self/fd/{path}")
            path = os.fsdecode(path)
            if not path.startswith("/") and isinstance(directory, int) and directory >= 0:
                path = os.path.join(os.readlink(f"/proc/self/fd/{directory}"), path)
        except (TypeError, OSError):
            return ""
        return path if path == self.root or path.startswith(self.root + "/") else ""

    def _sql(self, connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        words = statement.split()
        if self.root in str(connection.engine.url) and words[0] not in ("SELECT", "PRAGMA"):
            connection.info["changed"] = True
            self.event("sql", f"{self.root}/mlflow.db: {' '.join(words[:3])}")

    def _committing(self, connection: Any) -> None:
        if connection.info.pop("changed", False):
            self.event("sql", f"{self.root}/mlflow.db: COMMIT")

    def event(self, what: str, path: str, half: Callable[[], Any] | None = None) -> None:
        """Something is about to be done to the store. half: does it by half."""
        self._write(self._trace, f"{self.now}\t{what}\t{path[len(self.root) :]}\n".encode())
        if self.do is None:
            return
        fits = what in FITS[self.do] if self.do in FITS else what not in READING
        if not fits or (self.struck and not self.stays):
            return
        if not self.struck:
            here = self.only in (None, self.now) and self.nth in (None, self.entered.get(self.now))
            self.count += here
            if not here or self.count < self.at:
                return
            self.struck = True
            if half:
                half()
        self._strike(what, path)

    def _strike(self, what: str, path: str) -> None:
        if self.do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        elif self.do == "stop":
            os.kill(os.getpid(), signal.SIGTERM)
        elif what in ("sql", "connect"):
            import sqlite3

            from sqlalchemy.exc import OperationalError

            why = sqlite3.OperationalError(SQL_SAYS[str(self.do)])
            raise why if what == "connect" else OperationalError(path, {}, why)
        else:
            number = getattr(errno, str(self.do))
            raise OSError(number, os.strerror(number), path)


class _Torn:
    """A file open for writing, whose every write is an event."""

    def __init__(self, file: Any, path: str, event: Callable[..., None]) -> None:
        self._file, self._path, self._event = file, path, event

    def write(self, data: Any) -> Any:
        def half() -> None:
            self._file.write(data[: len(data) // 2])
            self._file.flush()

        self._event("write", self._path, half)
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Torn:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __iter__(self) -> Any:
        return iter(self._file)


PHASES = ("setup", "recover", "plan", "claim", "work", "check", "commit", "publish", "aside")


def _mark_phases(injector: Injector) -> None:
    from specexp.grids import execute, kernels, progress
    from specexp.grids import runner as run
    from specexp.grids.machines import local
    from specexp.tracking import compare
    from specexp.tracking import results as store
    from specexp.tracking import runs as track

    for owner, name, phase in (
        (run.Work, "recover", "recover"), (run.Work, "plan", "plan"), (run.Work, "_take", "claim"),
        (execute, "execute", "check"), (local, "execute", "check"), (execute, "_run", "work"),
        (progress, "set_aside", "aside"), (store, "commit", "commit"),
        (track, "publish", "publish"), (compare, "show", "report"),
        (kernels.Worker, "_start", "kernel"),
        (execute._Client, "execute_cell", "cell"),
    ):  # fmt: skip
        injector.mark(owner, name, phase)


# --- jobs: what a child does ---------------------------------------------------------------------


def _grid(job: dict[str, Any]) -> int:
    """`specexp grid run` with these arguments; points are stubbed unless `real`."""
    from specexp.commands import app
    from specexp.grids.machines import local

    local.LOCKS = Path(os.devnull)  # as in `machines`
    if not job.get("real"):
        local.Here = quick_machines(job)  # type: ignore[misc, assignment]
    sys.argv = ["specexp", "grid", "run", *job["grids"], *job.get("arguments", ())]
    app.main()
    return 0


def _check(job: dict[str, Any]) -> list[str]:
    from specexp.grids import points as grid

    options = dict(job["options"])
    points = grid.load(job["grids"])
    return problems(Path(job["store"]), points, **options)


def _initialise(job: dict[str, Any]) -> None:
    from specexp.tracking import results as store
    from specexp.tracking import runs as track

    with store.claim_setup():
        track.initialise()


def _open(job: dict[str, Any]) -> int:
    from specexp.tracking import runs as track

    _initialise(job)
    return len(track.client().search_experiments())


def _naive(job: dict[str, Any]) -> None:
    from specexp.grids import points as grid

    naive(Path(job["store"]), grid.load(job["grids"]))


JOBS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "grid": _grid, "check": _check, "initialise": _initialise, "open": _open, "naive": _naive,
}  # fmt: skip


def quick_machines(job: dict[str, Any]) -> Any:
    """Machines that execute points instantly, writing what a notebook and papermill would write;
    all checks of that are real. `ledger`: a file that gets a line per execution; `sleep`: seconds
    of work; `gate`: a file to wait for; `size`: characters of output; `fails`: the kind of failure
    to raise."""
    import nbformat
    import papermill

    from specexp.grids import execute

    def execute_notebook(source: str, target: str, **given: Any) -> Any:
        if job.get("ledger"):
            with open(job["ledger"], "a") as ledger:
                ledger.write(f"{Path(target).parent.name}\n")
        time.sleep(job.get("sleep", 0))
        while "gate" in job and not Path(job["gate"]).exists():
            time.sleep(0.01)
        given["log_file"].write("a line of the log\n")
        experiment = given["km"]["SPECEXP_EXPERIMENT"]
        write_point(Path(target).parent, given["parameters"], experiment, job.get("size", 1000))
        return nbformat.read(target, as_version=4)

    class Worker:
        ended = ""

        def kill(self) -> None: ...

        @contextlib.contextmanager
        def kernel(self, env: Any, **_: Any) -> Iterator[Any]:
            yield env

    class Quick:
        how = "stubbed"

        def __init__(self, points: Any, forked: bool = True) -> None: ...

        def __enter__(self) -> Quick:
            self.before = papermill.execute_notebook
            papermill.execute_notebook = execute_notebook
            return self

        def __exit__(self, *_: object) -> None:
            papermill.execute_notebook = self.before

        def at_once(self, jobs: int | None, alone: bool) -> int:
            return 1 if alone else jobs or 1

        def timing_lock(self) -> Any:
            return contextlib.nullcontext(True)

        @contextlib.contextmanager
        def worker(self, number: int) -> Iterator[Any]:
            yield self.run

        def run(self, point: Any, attempt: Path, watch: Any) -> str:
            if job.get("fails"):
                raise execute.Failure(job["fails"], "planted")
            execute.execute(point, attempt, Worker(), watch)  # type: ignore[arg-type]
            return "this machine"

        def kill(self) -> None: ...

    return Quick


class _Picture:
    def savefig(self, path: Path, **_: Any) -> None:
        path.write_bytes(b"picture" * 100)


def write_point(folder: Path, params: dict[str, Any], experiment: str, size: int = 1000) -> None:
    """Write what a notebook and papermill leave after a successful point."""
    from specexp.tracking import runs as track

    notebook = json.loads(TRIVIAL.read_text())
    for number, cell in enumerate(notebook["cells"], 1):
        if cell["cell_type"] == "code":
            cell["execution_count"] = number
            text = "x" * size + f" {params}\n"
            cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": text}]
    record = {
        "experiment": experiment,
        "params": params,
        "metrics": {"acceptance/rate": params["x"] / 1000, "speedup/measured": 1.0 + params["x"]},
        "series": {"acceptance/at_position": {"1": 0.5, "2": 0.25}},
        "tags": {},
    }
    track._write(folder, record, {}, {"curve": _Picture()})
    (folder / "notebook.ipynb").write_text(json.dumps(notebook))


def naive(root: Path, points: Sequence[Any]) -> None:
    """The control: it writes results in place, takes a notebook for a result, and logs to MLflow
    as it goes."""
    from specexp.tracking import runs as track
    from specexp.tracking.results import digest

    mlflow = track.client()
    for point in points:
        folder = root / "results" / point.run_key
        if (folder / "notebook.ipynb").exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        experiment = track.experiment_id("naive")
        tags = {"run_key": point.run_key, "attempt": "only"}
        run = mlflow.create_run(experiment, tags=tags).info.run_id
        (folder / "result.json").unlink(missing_ok=True)
        write_point(folder, point.params, "naive")
        (folder / "tags.json").write_text(json.dumps(tags))
        files = [p for p in folder.rglob("*") if p.is_file()]
        digests = {str(p.relative_to(folder)): digest(p.read_bytes()) for p in files}
        (folder / "manifest.json").write_text(json.dumps(digests))
        record = json.loads((folder / "result.json").read_text())
        for name, value in record["params"].items():
            mlflow.log_param(run, name, json.dumps(value) if isinstance(value, list) else value)
        for name, value in record["metrics"].items():
            mlflow.log_metric(run, name, value)
        for name, curve in record["series"].items():
            for step, value in curve.items():
                mlflow.log_metric(run, name, value, step=int(step))
        track.backend().put(
            mlflow.get_run(run).info.artifact_uri, folder, [*files, folder / "manifest.json"]
        )
        mlflow.set_terminated(run)


# --- the server ----------------------------------------------------------------------------------


def _child(job: dict[str, Any], folder: Path) -> int:
    import importlib

    os.environ |= {"SPECEXP_MLRUNS": job["store"], **job.get("environment", {})}
    for name, value in job.get("tune", {}).items():
        module, _, variable = name.rpartition(".")
        setattr(importlib.import_module(f"specexp.{module}"), variable, value)
    for name, value in job.get("limits", {}).items():
        resource.setrlimit(getattr(resource, name), (value, value))
    if job.get("clock"):
        _upset_clock(job["clock"])
    if job.get("threads"):
        import torch

        torch.set_num_threads(job["threads"])
    injector = Injector(Path(job["store"]), folder / "trace", **job.get("inject") or {})
    if job["do"] == "grid":
        _mark_phases(injector)
    injector.install()
    value = JOBS[job["do"]](job)
    (folder / "value").write_text(json.dumps(value))
    return 0


def _upset_clock(how: str) -> None:
    """jumps: up to an hour off at every call; 2040: a time beyond 32 bits."""
    import random

    true = time.time
    hours = (-1, 0, 1) if how == "jumps" else (24 * 365 * 14,)
    time.time = lambda: true() + 3600 * random.choice(hours)


def _fork(job: dict[str, Any], folder: Path) -> int:
    (folder / "said").touch()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        out = os.open(folder / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        code = _child(job, folder)
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(code)


def _wait(
    pid: int, folder: Path, begun: float, seconds: float, kill: dict[str, Any] | None
) -> dict[str, Any]:
    deadline, late = time.monotonic() + seconds, False
    struck = _moments(folder / "trace", begun, **kill) if kill else iter(())
    while True:
        got, status, usage = os.wait4(pid, os.WNOHANG)
        if got:
            break
        if next(struck, False):
            os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            late = True
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.002)
    took = time.monotonic() - begun
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    trace = (folder / "trace").read_text(errors="replace") if (folder / "trace").exists() else ""
    rows = [line.split("\t") for line in trace.splitlines() if line.count("\t") == 2]
    value = folder / "value"
    told = {
        "code": 124 if late else os.waitstatus_to_exitcode(status),
        "said": (folder / "said").read_text(errors="replace"),
        "events": [row for row in rows if row[1]],
        "phase": rows[-1][0] if rows else "setup",
        "value": json.loads(value.read_text()) if value.exists() else None,
        "seconds": took,
        "peak_mb": usage.ru_maxrss / 1024,
    }
    shutil.rmtree(folder)
    return told


def _moments(
    trace: Path, begun: float, after: float, phase: str | None = None, nth: int = 1
) -> Iterator[bool]:
    """Yields whether the time to kill has come, at every poll."""
    while phase and not trace.exists():
        yield False
    if phase:
        with trace.open() as rows:
            while nth > 0:
                nth -= rows.read().count(f"{phase}\t\t\n")
                yield False
        begun = time.monotonic()
    while time.monotonic() < begun + after:
        yield False
    yield True


def _rehearse() -> None:
    """Run a grid in this process, for everything that is created at first use."""
    import functools

    import yaml
    from mlflow.store.db import utils
    from rich.console import Console

    from specexp.grids import points as grid
    from specexp.grids import runner as run
    from specexp.tracking import runs as track

    utils._get_latest_schema_revision = functools.lru_cache(utils._get_latest_schema_revision)
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        os.environ["SPECEXP_MLRUNS"] = folder
        file = Path(folder) / "grid.yaml"
        file.write_text(yaml.safe_dump({"notebook": str(TRIVIAL), "grid": {"x": [1]}}))
        points = grid.load([file])
        run.run(points, Console(file=nowhere), machines=quick_machines({})(points))
        problems(Path(folder), points)
        track.client()._tracking_client.store.engine.dispose()
        del os.environ["SPECEXP_MLRUNS"]


def serve() -> None:
    """Import everything, then answer requests, one per line, until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import gc

    import typer

    import specexp.commands.app

    specexp.commands.app.app = typer.main.get_command(specexp.commands.app.app)  # type: ignore[assignment]
    _rehearse()
    gc.collect()
    gc.freeze()
    running: dict[int, tuple[Path, float]] = {}
    with tempfile.TemporaryDirectory(prefix="faults-") as base:
        for number, line in enumerate(sys.stdin):
            question = json.loads(line)
            if question["ask"] == "threads":
                answer: Any = threading.active_count()
            elif question["ask"] == "start":
                folder = Path(base) / str(number)
                folder.mkdir()
                answer = _fork(question["job"], folder)
                running[answer] = folder, time.monotonic()
            else:
                pid = question["pid"]
                answer = _wait(pid, *running.pop(pid), question["seconds"], question["kill"])
            answers.write(json.dumps(answer) + "\n")
        for pid in running:
            os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    serve()
