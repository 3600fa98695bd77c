"""The process that imports once and forks kernels, so that one starts in tenths of a second.

    fork server   imports modules, and nothing else: no torch operation, CUDA, thread or handle
     └ worker     runs points one after another
        └ kernel  of one point, with any processes it starts

The fork server and its workers listen to sockets whose other ends the runner holds (kernels.py),
and exit when it does, however it ends. A kernel dies with its worker. Processes that a kernel
leaves behind become children of the worker, which kills them when the point ends. This module knows
nothing of notebooks, results or papermill. (The standard library's forkserver is one for a whole
process, forks even if an import has started threads, and outlives a runner that is killed while an
import hangs.)
"""

import contextlib
import ctypes
import gc
import importlib
import multiprocessing.connection
import os
import random
import select
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import psutil

# What every model of transformers imports, in seconds. With it comes torchao where it is installed,
# which asks a GPU what it can do, and CUDA does not survive a fork.
MODELS = "transformers.modeling_layers"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main(control: int, folder: str, modules: Collection[str]) -> None:
    """Import the modules, then fork a worker for every socket received over `control`. When that
    closes, kill all workers and remove `folder`. A module that cannot be imported is skipped: the
    notebook will report it.
    """
    if not sys.flags.safe_path:
        del sys.path[0]  # this process's directory, which is not on a notebook's path
    workers: set[int] = set()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    with guard(control, folder):
        for name in modules:
            with contextlib.suppress(Exception, SystemExit):
                importlib.import_module(name)
        if (torch := sys.modules.get("torch")) and not torch.backends.cuda.is_built():
            with contextlib.suppress(Exception):
                importlib.import_module(MODELS)
    if threading.active_count() > 1:
        sys.exit(f"an import started {threading.enumerate()[1].name}, which a fork would lack")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that workers leave no zombies
    gc.collect()
    gc.freeze()
    line = socket.socket(fileno=control)
    while (received := socket.recv_fds(line, 1, 1))[0]:
        end = Connection(received[1][0])
        kill_children(workers)  # the orphans of workers that were killed
        if (pid := os.fork()) == 0:
            line.close()
            _run(Worker(end).serve)
        workers.add(pid)
        end.close()
    kill_children()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


@contextlib.contextmanager
def guard(control: int, folder: str) -> Iterator[None]:
    """Meanwhile, a second process kills this one and its descendants when the runner exits: an
    import that hangs could not notice."""
    importing = os.getpid()

    def watch() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        line = select.poll()
        line.register(control, 0)  # reports only that the other end was closed
        if os.getppid() == importing and line.poll():
            shutil.rmtree(folder, ignore_errors=True)
            below = psutil.Process(importing).children(recursive=True)
            for pid in [*(p.pid for p in below if p.pid != os.getpid()), importing]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    if (watching := os.fork()) == 0:
        _run(watch)
    yield
    os.kill(watching, signal.SIGKILL)
    os.waitpid(watching, 0)


class Worker:
    """Runs kernels one at a time, on commands from `line`; single-threaded. Its messages: `worker`
    (its pid) at first; `kernel` (pid) after a fork; `died` (how) if that ended by itself; `clear`
    when no process of a point is left."""

    def __init__(self, line: Connection) -> None:
        self.line, self.pid, self.kernel = line, os.getpid(), 0
        self.wake, self.wake_end = os.pipe()  # written to when a child ends
        os.set_blocking(self.wake_end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake_end, warn_on_full_buffer=False)
        prctl(PR_SET_CHILD_SUBREAPER, 1)

    def serve(self) -> None:
        self.line.send({"worker": self.pid})
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                ready = multiprocessing.connection.wait([self.line, self.wake])
                if self.wake in ready:
                    os.read(self.wake, 1 << 10)
                for pid, how in reap():
                    if pid == self.kernel:
                        self.kernel = 0
                        self.line.send({"died": how})
                if self.line in ready:
                    self.handle(**self.line.recv())
        kill_children()

    def handle(self, start: dict[str, Any] | None = None, send: int = 0, end: bool = False) -> None:
        if start:
            self.kernel = os.fork()
            if self.kernel == 0:
                _run(lambda: self.become_kernel(**start))
            self.line.send({"kernel": self.kernel})
        if send and self.kernel:
            os.killpg(self.kernel, send)
        if end:
            self.kernel = 0
            kill_children()
            self.line.send({"clear": True})

    def become_kernel(
        self, command: list[str], forked: bool, env: dict[str, str], cwd: str, log: str, seed: int
    ) -> None:
        """Turn this process into the kernel of `command`: in place or, if not forked, by exec.

        `env` replaces the environment, but modules keep what they read from the old one.
        """
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self.pid:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in (self.line.fileno(), self.wake, self.wake_end):
            os.close(descriptor)
        to = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        for descriptor in (1, 2):
            os.dup2(to, descriptor)
        os.close(to)
        os.chdir(cwd)
        if not forked:
            os.execvpe(command[0], command, env)
        os.environ.clear()
        os.environ.update(env)
        reseed(seed)
        with contextlib.suppress(KeyError, ValueError):
            if threads := int(env["OMP_NUM_THREADS"]):
                sys.modules["torch"].set_num_threads(threads)
        launch(command[command.index("-f") :])


def launch(arguments: list[str]) -> None:
    """Become a kernel that no file of this machine configures: cells run as they are written."""
    from ipykernel.kernelapp import IPKernelApp
    from IPython.core import application

    application.ENV_CONFIG_DIRS.clear()  # IPython reads its start-up files from these lists, too
    application.SYSTEM_CONFIG_DIRS.clear()
    sys.argv = ["ipykernel", *arguments]
    IPKernelApp.launch_instance(arguments)


def reseed(seed: int) -> None:
    """Seed the global generators, whose state all forked processes would share."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)


def kill_children(keep: Collection[int] = ()) -> None:
    """Kill all descendants or, with `keep`, the other direct children, until none is left: orphans
    become children of this process."""
    for _ in range(1000):  # then give up on what cannot be killed
        below = psutil.Process().children(recursive=not keep)
        strangers = [process for process in below if process.pid not in keep]
        if not strangers:
            return
        for process in strangers:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.002)
        reap()


def reap() -> list[tuple[int, str]]:
    """The children that have ended: pid and how."""
    ended = []
    with contextlib.suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append((child[0], described(os.waitstatus_to_exitcode(child[1]))))
    return ended


def described(code: int) -> str:
    """An exit code in words."""
    names = {-s.value: s.name for s in signal.Signals}
    return f"exited with status {code}" if code >= 0 else f"was killed by {names.get(code, -code)}"


def prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _run(work: Callable[[], None]) -> NoReturn:
    """Do the work of a forked process, then exit: it must not continue its parent's code."""
    code = 1
    try:
        work()
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
