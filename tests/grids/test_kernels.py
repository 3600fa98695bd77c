"""Kernels: they start from the same state, are isolated, and leave no process behind."""

import asyncio
import gc
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from queue import Empty
from types import SimpleNamespace

import nbformat
import papermill
import psutil
import pytest
import torch
from conftest import also, one_in
from IPython.core.history import HistoryManager
from IPython.core.interactiveshell import InteractiveShell
from jupyter_client.kernelspec import KernelSpecManager
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill.clientwrap import PapermillNotebookClient
from support.processes import alive, until

from specexp.grids import kernels, notebooks
from specexp.grids.execute import _Client
from specexp.grids.forkserver import MODELS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture(scope="module")
def plain():
    with kernels.Kernels(why="as requested") as k:
        yield k


@pytest.fixture
def worker(fork_server):
    with fork_server.worker() as s:
        yield s


@pytest.fixture(params=["forked", "plain"])
def either(request):
    """A worker of forked or plain kernels, which behave alike."""
    k = request.getfixturevalue({"forked": "fork_server", "plain": "plain"}[request.param])
    with k.worker() as s:
        yield s


@pytest.fixture
def go(tmp_path):
    """Run cells in a worker; returns what each printed. `during` gets the worker while they run."""

    def call(worker, *cells, seed=0, device="auto", env=None, cwd=tmp_path, during=None, **options):
        notebook = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(textwrap.dedent(c)) for c in cells]
        )
        env = {**os.environ, **(env or {})}
        log = tmp_path / "log"
        with worker.kernel(env=env, cwd=cwd, log=log, seed=seed, device=device) as km:
            try:
                done = papermill.execute_notebook(
                    notebook, None, km=km, kernel_name="python3", progress_bar=False, **options
                )
            finally:
                if during:
                    during(worker)
        return [output(cell) for cell in done.cells]

    return call


def output(cell) -> str:
    parts = [o.get("text") or o.get("data", {}).get("text/plain", "") for o in cell.outputs]
    return "".join(parts).strip()


def wait_until_gone(pids) -> None:
    until(lambda: not any(map(alive, pids)))


# --- what a kernel starts from -------------------------------------------------------------------


def test_modules_that_notebooks_import_are_preloaded(tmp_path):
    cells = [
        "import torch, os.path as p\nfrom specexp import api, errors as t",
        "%matplotlib inline\n!ls\nimport numpy as np; x = 1",
        "this is no python",
        "def f():\n    import scipy",
        "from . import here\nfrom json import *\nfrom os import sep\napi.build",
    ]
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    nb.cells.append(nbformat.v4.new_markdown_cell("import this"))
    nb.cells.append(nbformat.v4.new_code_cell("x: int = 1", metadata={"tags": ["parameters"]}))
    nbformat.write(nb, tmp_path / "a.ipynb")
    assert notebooks.modules_of([tmp_path / "a.ipynb"] * 2) == (
        "torch", "os.path", "specexp.api", "specexp.errors", "numpy", "scipy", "json.*", "os.sep",
        "specexp.api.build",
    )  # fmt: skip


def test_forked_kernel_has_everything_imported(go, fork_server, worker):
    names = "specexp.api", "matplotlib.pyplot", MODELS, "nowhere.to.be.found"
    look = (
        f"import sys; print([n in sys.modules for n in {names}], 'matplotlib_inline' in sys.path)"
    )
    may_fork_models = not torch.backends.cuda.is_built()
    assert go(worker, look) == [f"[True, True, {may_fork_models}, False] False"]
    assert fork_server.how == "forked kernels"


def test_kernel_has_its_environment_and_folder(go, either, monkeypatch):
    monkeypatch.setenv("OF_THE_RUNNER", "1")
    (here := Path(either.kernels.folder) / "here").mkdir(exist_ok=True)
    (here / "beside.py").write_text("x = 'beside the notebook'")
    look = """
        import beside, os, sys
        print(os.environ["GIVEN"], os.environ.get("OF_THE_RUNNER"), os.getcwd(), beside.x)
        print(os.read(0, 1) == b"", os.getsid(0) == os.getpid())
    """
    env = {"GIVEN": "given", "OF_THE_RUNNER": "2"}
    [said] = go(either, look, env=env, cwd=here)
    assert said.split("\n") == [f"given 2 {here} beside the notebook", "True True"]
    assert os.environ["OF_THE_RUNNER"] == "1"


def test_kernel_is_of_this_python_whatever_kernelspecs_say(go, either, tmp_path, monkeypatch):
    (spec := tmp_path / "kernels" / "python3").mkdir(parents=True)
    said = {"argv": ["false"], "display_name": "other", "language": "R", "env": {"OTHER": "1"}}
    (spec / "kernel.json").write_text(json.dumps(said))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    assert KernelSpecManager().get_kernel_spec("python3").argv == ["false"]  # the control
    look = "import os, sys; print(sys.executable, sys.prefix, 'OTHER' in os.environ)"
    assert go(either, look) == [f"{sys.executable} {sys.prefix} False"]


def test_cells_run_as_written_whatever_start_up_files_and_switches_say(go, either, tmp_path):
    (startup := tmp_path / ".ipython" / "profile_default" / "startup").mkdir(parents=True)
    for file in (startup / "0.py", tmp_path / "startup.py"):
        file.write_text("from_a_file = 1")
    config = startup.parent / "ipython_config.py"
    config.write_text("c.InteractiveShellApp.exec_lines = ['from_a_file = 1']")
    env = {"HOME": str(tmp_path), "PYTHONSTARTUP": str(tmp_path / "startup.py")}
    look = """
        from IPython.core import shellapp
        shared = shellapp.SYSTEM_CONFIG_DIRS + shellapp.ENV_CONFIG_DIRS
        profile = get_ipython().profile_dir.location
        try: assert not __debug__
        except AssertionError: print("from_a_file" in globals(), shared)
        print(get_ipython().parent.parent.config_file_paths == [profile], profile)
    """
    [output] = go(either, look, env=env | {"PYTHONOPTIMIZE": "1"})
    assert output.startswith(f"False []\nTrue {either.kernels.folder}")


def test_points_are_isolated(go, worker):
    spoil = """
        import builtins, json, os, random, sys, torch
        json.spoilt = builtins.spoilt = True
        torch.zeros, os.environ["SPOILT"] = None, "yes"
        os.chdir("/"); sys.path.append("/spoilt"); os.umask(0)
        torch.set_num_threads(3); torch.set_default_dtype(torch.float64)
        x = 1
    """
    look = """
        import builtins, json, os, sys, torch
        print(hasattr(json, "spoilt"), hasattr(builtins, "spoilt"), "x" in globals())
        print(torch.zeros(1).dtype, torch.get_num_threads(), os.environ.get("SPOILT"), os.getcwd())
        print("/spoilt" in sys.path)
    """
    before = go(worker, look)
    pid = worker.worker_pid
    go(worker, spoil)
    assert go(worker, look) == before
    assert before[0].startswith("False False False\ntorch.float32 1 None")
    assert worker.worker_pid == pid  # it was one and the same worker


def test_generators_start_from_the_points_seed(go, worker):
    draw = """
        import random, numpy, torch
        print(random.random(), numpy.random.rand(), torch.rand(1).item(), torch.initial_seed())
    """
    first, again, other = (go(worker, draw, seed=seed)[0].split() for seed in (1, 1, 2**40))
    assert first == again
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_figures_displays_and_progress_bars_are_kept(go, either, tmp_path):
    seen = []
    cells = (
        "import matplotlib.pyplot as plt\nplt.plot([1, 2]);",
        "%matplotlib inline\nplt.plot([1, 2]);",
        "from tqdm.notebook import tqdm\nfor _ in tqdm(range(3)): pass",
        "1 + 1", "print(_ + Out[4] + len(In))", "!echo shell",
    )  # fmt: skip
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    with either.kernel(dict(os.environ, MPLBACKEND="agg"), tmp_path, tmp_path / "log", 0) as km:
        done = papermill.execute_notebook(
            notebook, None, km=km, kernel_name="python3", progress_bar=False
        )
    seen = [{kind for o in c.outputs for kind in o.get("data", {})} for c in done.cells]
    assert "image/png" in seen[0]
    assert "image/png" in seen[1]
    assert "application/vnd.jupyter.widget-view+json" in seen[2]
    assert output(done.cells[4]) == "10"
    assert output(done.cells[5]) == "shell"
    assert either.ended == ""


def test_runner_is_told_how_far_a_cell_is(worker, tmp_path):
    told: list[str] = []
    bar = "from tqdm.auto import tqdm\nfor _ in tqdm(range(3), 'a & b', mininterval=0): pass"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(bar)])
    with (
        worker.kernel(dict(os.environ), tmp_path, tmp_path / "log", 0) as km,
        open(os.devnull, "w") as log,
    ):
        papermill.execute_notebook(
            notebook, None, engine_name="specexp", km=km, kernel_name="python3",
            progress_bar=False, log_file=log, watch=told.append,
        )  # fmt: skip
    assert any(line.startswith("cell 1 of 1  a & b") for line in told), told
    assert any("2/3" in line for line in told), told


def test_fork_computes_in_the_threads_of_its_environment(go, worker):
    count = """
        import os, torch
        def threads(): return len(os.listdir("/proc/self/task"))
        before = threads()
        x = torch.rand(400, 400)
        assert torch.isfinite(x @ x).all() and (x + x).sum() > 0
        print(torch.get_num_threads(), threads() - before)
    """
    assert go(worker, count, env={"OMP_NUM_THREADS": "2"}) == ["2 1"]
    assert go(worker, count) == ["1 0"]


def test_gpu_point_is_not_forked(go, worker, monkeypatch):
    look = "import sys; print('torch' in sys.modules)"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert go(worker, look) == go(worker, look, device="cuda") == ["False"]
    assert go(worker, look, device="cpu") == ["True"]


# --- how it ends ---------------------------------------------------------------------------------

CHILDREN = """
    import os, subprocess, sys, time
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    pids = [os.getpid(), subprocess.Popen(sleep).pid]
    pids.append(subprocess.Popen(sleep, start_new_session=True).pid)
    orphan = "import os, sys; os.setsid(); print(os.spawnv(os.P_NOWAIT, sys.argv[1], sys.argv[1:]))"
    run = subprocess.run([sys.executable, "-c", orphan, *sleep], stdout=open("orphan", "w"))
    pids.append(int(open("orphan").read()))
    open("writing", "w").write(" ".join(map(str, pids)))
    os.rename("writing", "pids")
"""
ENDS = {
    "pass": "",
    "1 / 0": "",
    "os._exit(3)": "exited with status 3",
    "os.kill(os.getpid(), 9)": "was killed by SIGKILL",
    "import ctypes; ctypes.string_at(0)": "was killed by SIGSEGV",
}


@pytest.mark.parametrize(
    ("either", "end"),
    [*product(["forked"], ENDS), *one_in(5, product(["plain"], reversed(ENDS)))],
    indirect=["either"],
)
def test_no_process_outlives_a_point_whose_end_is_reported(go, either, tmp_path, end):
    def during(worker):
        assert all(alive(p) for p in pids()[1:])  # the control: only the end ends them

    def pids():
        return [int(p) for p in (tmp_path / "pids").read_text().split()]

    try:
        go(either, CHILDREN, end, during=during)
    except DeadKernelError:
        assert ENDS[end]
    except papermill.PapermillExecutionError:
        assert end == "1 / 0"
    else:
        assert end == "pass"
    assert not any(alive(pid) for pid in pids())
    assert either.ended == ENDS[end]
    assert go(either, "print(1)") == ["1"]


def test_hanging_point_is_killed_from_another_thread(go, either, tmp_path):
    killed = []

    def kill():
        while not (tmp_path / "pids").exists():
            time.sleep(0.05)
        killed.append(either.kill())

    (watchdog := threading.Thread(target=kill)).start()
    with pytest.raises(DeadKernelError):
        go(either, CHILDREN, "import signal; signal.signal(2, signal.SIG_IGN); time.sleep(600)")
    watchdog.join()
    assert not any(alive(int(pid)) for pid in (tmp_path / "pids").read_text().split())
    assert either.ended == ""
    either.kill()  # nothing runs: nothing happens
    assert go(either, "print(1)") == ["1"]


def test_cell_timeout_kills_the_kernel(go, worker):
    with pytest.raises(CellTimeoutError):
        go(worker, "import time; time.sleep(600)", execution_timeout=1)
    wait_until_gone([worker.pid])
    assert worker.ended == ""


def test_kernel_that_cannot_start_logs_why(go, either, tmp_path):
    with pytest.raises(DeadKernelError):
        go(either, "print(1)", cwd=tmp_path / "nowhere")
    assert "nowhere" in (tmp_path / "log").read_text()
    assert either.ended == "exited with status 1"
    assert go(either, "print(1)") == ["1"]


def test_killed_slot_takes_its_kernel_and_no_other(go, fork_server, tmp_path):
    with fork_server.worker() as worker, fork_server.worker() as other:
        assert go(other, "print(1)") == ["1"]
        with pytest.raises(DeadKernelError):
            go(worker, CHILDREN, "os.kill(os.getppid(), 9); time.sleep(600)")
        assert worker.ended == "was killed with its parent process"
        assert go(worker, "print(1)") == ["1"]
        wait_until_gone([int(pid) for pid in (tmp_path / "pids").read_text().split()])
        os.kill(worker.worker_pid, signal.SIGKILL)  # while it is idle
        wait_until_gone([worker.worker_pid])
        assert go(worker, "print(1)") == ["1"]
        before = other.worker_pid
        assert go(other, "print(1)") == ["1"]
        assert other.worker_pid == before
    assert fork_server.how == "forked kernels"


def test_workers_run_points_at_once(go, fork_server):
    def work(name: str) -> list[str]:
        cell = f"import time; time.sleep(0.1); print({name!r})"
        with fork_server.worker() as worker:
            return [go(worker, cell)[0] for _ in range(3)]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, "ab")) == [["a"] * 3, ["b"] * 3]


def test_points_leak_no_descriptor_or_thread(go, worker):
    def held() -> tuple[int, int, int]:
        gc.collect()
        folder = worker.kernels.folder
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(os.listdir(folder))

    go(worker, "print(1)")
    before = held()
    for _ in range(3):
        go(worker, "print(1)")
    assert held() == before


def test_only_the_user_can_reach_a_kernel(worker, tmp_path):
    with worker.kernel(dict(os.environ), tmp_path, tmp_path / "log", 0) as km:
        folder = Path(km.connection_file).parent
        assert folder.stat().st_mode & 0o77 == folder.parent.stat().st_mode & 0o77 == 0
        assert not psutil.Process(worker.pid).net_connections("inet")
    assert not folder.exists()


# --- who ends with whom --------------------------------------------------------------------------


@pytest.fixture
def helpers(tmp_path, monkeypatch):
    """A folder of modules for a fork server to import."""
    (folder := tmp_path / "helpers").mkdir()
    (folder / "hangs.py").write_text(
        f"import time; open({str(tmp_path / 'importing')!r}, 'w').close(); time.sleep(600)"
    )
    (folder / "stuck.py").write_text(
        "import ctypes, subprocess; child = subprocess.Popen(['sleep', '600'])\n"
        f"with open({str(tmp_path / 'deadlocked')!r}, 'w') as file: file.write(str(child.pid))\n"
        "lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, bytes(64)\n"
        "lock(mutex), lock(mutex)"
    )
    (folder / "threads.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,), name='sleeper', daemon=True).start()"
    )
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{ROOT}")


def test_imports_that_start_threads_are_not_forked(go, helpers):
    with kernels.Kernels(["threads"]) as k, k.worker() as worker:
        assert go(worker, "import sys; print('threads' in sys.modules)") == ["False"]
        assert k.how.startswith("plain kernels (")
        assert "an import started sleeper" in k.how


def test_dead_fork_server_is_replaced_once(go):
    with kernels.Kernels() as k, k.worker() as worker:
        assert go(worker, "print(1)") == ["1"]
        for how in ("forked kernels", "plain kernels (the fork server was killed by SIGKILL)"):
            k.server.kill()
            assert go(worker, "print(1)") == ["1"]  # the worker lives on
            worker.close()
            assert go(worker, "print(1)") == ["1"]
            assert k.how == how
        k.server.kill()
        worker.close()
        for _ in range(2):
            with pytest.raises(kernels.NoForkServer, match="the fork server was killed by SIGKILL"):
                go(worker, "print(1)")


def test_runners_folder_is_not_on_the_path(go, tmp_path, monkeypatch):
    (tmp_path / "specexp").mkdir()
    (tmp_path / "random.py").write_text("raise RuntimeError")
    (home := tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    with kernels.Kernels() as k, k.worker() as worker:
        assert go(worker, "print(1)", cwd=home) == ["1"]
        assert k.how == "forked kernels"


def test_hang_before_the_kernel_starts_is_killed(go, helpers, tmp_path):
    with kernels.Kernels(["hangs"]) as k, k.worker() as worker:
        (watchdog := threading.Timer(0.2, worker.kill)).start()
        with pytest.raises(DeadKernelError):
            go(worker, "print(1)")
        watchdog.join()
        assert worker.ended == ""
        server = k.server.pid
    wait_until_gone([server])


RUNNER = """
import os, sys
from pathlib import Path
import nbclient, nbformat
from specexp.grids import kernels

folder, modules, state, cell = Path(sys.argv[1]), *sys.argv[2:]
with kernels.Kernels(modules.split(), "plain" * (state == "plain")) as k, k.worker() as worker:
    print(k.server.pid, k.folder, flush=True)
    with worker.kernel(dict(os.environ), folder, folder / "log", 0) as km:
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
        nbclient.NotebookClient(notebook, km=km).execute()
"""
STATES = {"forked": "", "plain": "", "importing": "hangs", "deadlocked": "stuck"}


@pytest.mark.parametrize("state", ["forked", *also("importing", "plain", "deadlocked")])
def test_killed_runner_leaves_no_process(helpers, tmp_path, state):
    """Nor do processes that hang before its first kernel."""
    cell = textwrap.dedent(CHILDREN) + "time.sleep(600)"
    runner = subprocess.Popen(
        [sys.executable, "-c", RUNNER, str(tmp_path), STATES[state], state, cell],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    server, folder = runner.stdout.readline().split()
    mark = tmp_path / (state if state in ("importing", "deadlocked") else "pids")
    until(mark.exists)
    below = psutil.Process(runner.pid).children(recursive=True)
    pids = {process.pid for process in below} | {int(pid) for pid in mark.read_text().split()}
    assert int(server) in pids
    assert all(map(alive, pids))
    runner.kill()
    runner.wait()
    wait_until_gone(pids)
    until(lambda: not Path(folder).exists())


@pytest.mark.parametrize("length", [74, 75, *also(150)])
def test_long_temporary_folder_name(go, tmp_path, monkeypatch, length):
    home = Path(tempfile.mkdtemp(dir="/tmp"))
    long = home / ("x" * (length - len(str(home)) - 1))
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with kernels.Kernels(why="as requested") as k, k.worker() as worker:
        assert k.folder.is_relative_to(long) == (length == 74)
        assert go(worker, "print(1)") == ["1"]
    long.rmdir()
    home.rmdir()


def test_kernels_are_forked_only_on_linux(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        assert kernels.Kernels().how == "plain kernels (no safe fork on darwin)"
    assert kernels.Kernels(why="as requested").how == "plain kernels (as requested)"


def test_reply_whose_arrival_woke_nobody_ends_a_cell(monkeypatch):
    """The socket was being written to when it came."""
    asked = []

    async def get_msg(timeout=None):
        asked.append(timeout)
        if timeout is None:
            await asyncio.Event().wait()  # for good
        if len(asked) < 3:
            raise Empty
        return "the reply"

    client = SimpleNamespace(shell_channel=SimpleNamespace(get_msg=get_msg))
    monkeypatch.setattr(PapermillNotebookClient, "start_new_kernel_client", lambda self: client)
    notebook = SimpleNamespace(nb=nbformat.v4.new_notebook())
    _Client(notebook, log_file=None, watch=print).start_new_kernel_client()
    assert asyncio.run(asyncio.wait_for(client.shell_channel.get_msg(), 600)) == "the reply"


def test_cell_shows_a_user_error_in_one_line_below_what_it_explains(capsys, monkeypatch):
    monkeypatch.setattr(HistoryManager, "enabled", False)
    shell = InteractiveShell()
    shell.run_cell("import specexp\nspecexp.Tree.chain(-1)")
    assert re.fullmatch(r"UserError: gamma is -1; .*\n", capsys.readouterr().out)
    shell.run_cell("from specexp.errors import refusing\nwith refusing('no way'):\n    {}['key']")
    *cause, line = capsys.readouterr().out.splitlines()
    assert line.startswith("UserError: no way: ")
    assert cause[-1] == "KeyError: 'key'"
