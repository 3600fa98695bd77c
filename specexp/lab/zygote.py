"""The process that imports once and forks, so that a kernel costs tenths of a second.

    zygote        imports, and starts nothing: no torch operation, no CUDA, no thread, no handle
     └ slot       where points run one after another; may hold models, which its kernels inherit
        └ kernel  of one point, with whatever that starts

The first two listen to sockets whose other ends the runner holds (kernels.py): when it goes,
however it goes, all of this goes. A kernel dies with its slot, and what it leaves behind falls to
its slot, which kills it when the point ends. Nothing here knows notebooks, results or papermill.
"""

from __future__ import annotations

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
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any, NoReturn

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main(control: int, folder: str, modules: Collection[str]) -> None:
    """Import, then fork a slot for every socket that comes down `control`, until that closes: then
    neither process nor `folder` is left. A module that cannot be imported is the notebook's affair.
    """
    if not sys.flags.safe_path:
        del sys.path[0]  # the runner's directory, which a notebook does not see
    slots: set[int] = set()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    with guard(control, folder):
        for name in modules:
            with contextlib.suppress(Exception, SystemExit):
                importlib.import_module(name)
    if threading.active_count() > 1:
        sys.exit(f"imports started {threading.enumerate()[1].name}, which no fork would have")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a slot
    gc.collect()
    gc.freeze()
    line = Connection(control)
    with contextlib.suppress(EOFError):
        while True:
            end = Connection(recv_handle(line))
            clear(slots)  # what a slot left that was killed itself
            if (pid := os.fork()) == 0:
                line.close()
                _run(Slot(end).serve)
            slots.add(pid)
            end.close()
    clear()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


@contextlib.contextmanager
def guard(control: int, folder: str) -> Iterator[None]:
    """What imports may hang where nothing reaches it: meanwhile a process beside it ends it, and
    what is below it, when the runner goes."""
    importing = os.getpid()

    def watch() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        line = select.poll()
        line.register(control, 0)  # hears nothing but that the other end has gone
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


class Slot:
    """Runs kernels one at a time, as told over `line`; has one thread, and is never busy but while
    it loads models. It says `slot` (its pid) first; `kernel` (its pid) when one has been forked;
    `died` (how) when that ended unasked; `clear` when nothing of a point is left."""

    def __init__(self, line: Connection) -> None:
        self.line, self.pid, self.kernel, self.threads = line, os.getpid(), 0, 0
        self.ear, self.bell = os.pipe()
        os.set_blocking(self.bell, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.bell, warn_on_full_buffer=False)
        prctl(PR_SET_CHILD_SUBREAPER, 1)

    def serve(self) -> None:
        self.line.send({"slot": self.pid})
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                ready = multiprocessing.connection.wait([self.line, self.ear])
                if self.ear in ready:
                    os.read(self.ear, 1 << 10)
                for pid, how in reap():
                    if pid == self.kernel:
                        self.kernel = 0
                        self.line.send({"died": how})
                if self.line in ready:
                    self.answer(**self.line.recv())
        clear()

    def answer(
        self, start: dict[str, Any] | None = None, warm: dict[str, Any] | None = None,
        send: int = 0, end: bool = False,
    ) -> None:  # fmt: skip
        if warm:
            self.load(warm)
        if start:
            self.kernel = os.fork()
            if self.kernel == 0:
                _run(lambda: self.become(**start))
            self.line.send({"kernel": self.kernel})
        if send and self.kernel:
            os.killpg(self.kernel, send)
        if end:
            self.kernel = 0
            clear()
            self.line.send({"clear": True})

    def load(self, params: dict[str, Any]) -> None:
        """Load models in one thread: a child would wait for ever for those that it does not have.
        What cannot be loaded is the notebook's affair."""
        os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
        with contextlib.suppress(Exception):
            import torch

            from specexp.lab import build

            self.threads = torch.get_num_threads()
            torch.set_num_threads(1)
            build.warm(params)
        gc.collect()
        gc.freeze()

    def become(
        self, command: list[str], forked: bool, env: dict[str, str], cwd: str, log: str, seed: int
    ) -> None:
        """The kernel that `command` starts: this process itself or, if not forked, a new program.

        The environment replaces this one, but what was read from it at import stays as it was.
        """
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self.pid:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in (self.line.fileno(), self.ear, self.bell):
            os.close(descriptor)
        os.umask(0o077)
        to = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
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
            if threads := int(env.get("OMP_NUM_THREADS") or self.threads):
                sys.modules["torch"].set_num_threads(threads)
        sys.argv = command[command.index("-m") + 1 :]
        from ipykernel.kernelapp import IPKernelApp

        IPKernelApp.launch_instance(sys.argv[1:])


def reseed(seed: int) -> None:
    """Forked processes share the state of every generator: give this one its own."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)


def clear(keep: Collection[int] = ()) -> None:
    """Kill what is below this process, or only its children without those to keep, until nothing is
    left: what loses its parent becomes a child."""
    for _ in range(1000):  # and what the system will not let go is left
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
    """The children that have ended, and how each did."""
    ended = []
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append((found[0], words(os.waitstatus_to_exitcode(found[1]))))
    return ended


def words(code: int) -> str:
    names = {-s.value: s.name for s in signal.Signals}
    return f"exited with status {code}" if code >= 0 else f"killed by {names.get(code, -code)}"


def prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _run(work: Callable[[], None]) -> NoReturn:
    """All that a forked process does: it never goes on with what its parent was at."""
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
