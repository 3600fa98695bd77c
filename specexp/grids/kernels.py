"""Kernels: each is a process forked from one that has imported everything (forkserver.py), or a new
Python where forking is impossible. Either way all processes of a kernel end with it.

This module knows nothing of points or whether they succeed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty
from typing import Any

import zmq
from jupyter_client.asynchronous import AsyncKernelClient
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning import LocalProvisioner
from jupyter_core.utils import run_sync
from nbclient.exceptions import DeadKernelError

from specexp.grids.forkserver import described
from specexp.tracking.results import ROOT

# Imported by every kernel, which takes half of its start-up time.
MACHINERY = ("ipykernel.kernelapp", "ipykernel.debugger", "IPython")
# No sqlite history; and no watching of the parent process, as forkserver.py ends kernels.
ARGUMENTS = ["--HistoryManager.enabled=False", "--IPKernelApp.parent_handle=1"]
# The notebook's folder is on the path only when all is imported, as in ipykernel_launcher.
BARE = (
    "import sys; sys.path.remove('') if '' in sys.path else 0; "
    "from specexp.grids.forkserver import launch; launch(sys.argv[1:])"
)
COMMAND = [sys.executable, "-c", BARE, "-f", "{connection_file}", *ARGUMENTS]
# The path of a socket has at most 107 bytes, and our own names take 33 of them.
LONGEST_FOLDER = 107 - len("/specexp-12345678/tmp12345678/k-5")
# Figures go into cells, which run as they are written, whatever the environment says: with their
# assertions, and after nobody's start-up file. No warnings about debugging.
ALWAYS = {
    "PYTHONOPTIMIZE": "",
    "PYTHONSTARTUP": "",
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
}


class NoForkServer(DeadKernelError):
    """The fork server died three times: no more kernels can be started."""


class Kernels:
    """A source of kernels, for use in a `with`; `modules` are imported in the background.

    Kernels are plain (not forked) for the reason `why`, on systems other than Linux, when the fork
    server has died twice (as it does if an import starts threads), and for points on a GPU, as CUDA
    does not survive a fork. `how` says which.
    """

    def __init__(self, modules: Sequence[str] = (), why: str = "") -> None:
        self.modules, self.deaths, self.lock = modules, 0, threading.Lock()
        self.gone = ""  # how the last fork server died
        self.why = why or f"no safe fork on {sys.platform}" * (sys.platform != "linux")

    @property
    def how(self) -> str:
        return f"plain kernels ({self.why})" if self.why else "forked kernels"

    def __enter__(self) -> Kernels:
        usual = tempfile.gettempdir()
        where = usual if len(os.fsencode(usual)) <= LONGEST_FOLDER else "/tmp"
        self.folder = Path(tempfile.mkdtemp(prefix="specexp-", dir=where))
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop(patience=2)
        shutil.rmtree(self.folder, ignore_errors=True)

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """A kernel's environment: `env`, but that IPython finds no configuration."""
        return {**env, **ALWAYS, "IPYTHONDIR": str(self.folder / "ipython")}

    def worker(self) -> contextlib.closing[Worker]:
        """A worker, for one thread that runs points one after another."""
        return contextlib.closing(Worker(self))

    def connect(self) -> tuple[Connection, subprocess.Popen[bytes]]:
        """Ask the fork server for a new worker; returns the line to it, and that server. A dead one
        answers nothing. Raises NoForkServer."""
        with self.lock:
            if self.gone:
                raise NoForkServer(self.gone)
            here, there = Pipe()
            with there, contextlib.suppress(ConnectionError):
                socket.send_fds(self.control, [b"\0"], [there.fileno()])
            return here, self.server

    def replace(self, dead: subprocess.Popen[bytes]) -> None:
        """Start a new fork server, unless another thread has. After the second death it imports
        nothing; after the third, raises NoForkServer."""
        with self.lock:
            if dead is not self.server:
                return
            self._stop(patience=0.1)
            self.deaths += 1
            *_, last = ["", *(self.folder / "forkserver.log").read_text().strip().splitlines()]
            how = f"the fork server {described(dead.returncode)} {last}".strip()
            if self.deaths > 2:
                self.gone = how
                raise NoForkServer(how)
            if self.deaths == 2:
                self.why = self.why or how
            self._start()

    def _start(self) -> None:
        modules = () if self.why else (*MACHINERY, *self.modules)
        self.control, there = socket.socketpair()
        with there, open(self.folder / "forkserver.log", "wb") as log:
            tied = (str(there.fileno()), str(self.folder))
            self.server = subprocess.Popen(
                [sys.executable, "-m", "specexp.grids.forkserver", *tied, *modules],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[there.fileno()],
                start_new_session=True, env=self.environment(os.environ), cwd=ROOT,
            )  # fmt: skip

    def _stop(self, patience: float) -> None:
        self.control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.server.wait(patience)
        self.server.kill()
        self.server.wait()


class Worker:
    """Runs one kernel at a time; jupyter_client uses it as that kernel's Popen.

    `died`: how the kernel ended by itself, as long as it is being waited for; `ended`: the same
    once it is over, empty if we killed it.
    """

    stdin = stdout = stderr = None

    def __init__(self, kernels: Kernels) -> None:
        self.kernels, self.lock = kernels, threading.RLock()
        self.line: Connection | None = None
        self.worker_pid = self.pid = 0  # the worker's process; its kernel's, once that runs
        self.running = self.killed = False
        self.died = self.ended = ""

    @contextlib.contextmanager
    def kernel(
        self, env: Mapping[str, str], cwd: Path, log: Path, seed: int, device: str = "auto"
    ) -> Iterator[AsyncKernelManager]:
        """The manager of a running kernel, for papermill's `km`. Its processes end with the `with`.

        env: its whole environment, although imported modules have read the fork server's; log: a
        file for output that belongs to no cell; seed: of a forked kernel's global generators;
        device: on which it computes. Waits for imports. Raises DeadKernelError if the kernel does
        not start.
        """
        with self.lock:
            self.running, self.killed, self.pid, self.died, self.ended = True, False, 0, "", ""
        import torch

        folder = tempfile.mkdtemp(dir=self.kernels.folder)
        km = _Manager(
            kernel_name="python3", client_factory=_Client, transport="ipc", ip=f"{folder}/k",
            connection_file=f"{folder}/kernel.json",
        )  # fmt: skip
        km.context.setsockopt(zmq.RECONNECT_IVL, 5)  # ms; a kernel listens after about 100
        on_gpu = device != "cpu" and torch.cuda.is_available()
        start = {
            "env": self.kernels.environment(env), "cwd": str(cwd), "log": str(log), "seed": seed,
            "forked": not (self.kernels.why or on_gpu),
        }  # fmt: skip
        km.provisioner = _Provisioner(parent=km, kernel_spec=km.kernel_spec)
        km.provisioner.start = lambda command: self._start(start | {"command": command})
        try:
            run_sync(km.start_kernel)()
            yield km
        finally:
            km.context.destroy(linger=0)
            self._end()
            shutil.rmtree(folder, ignore_errors=True)

    def kill(self) -> None:
        """Kill the running kernel and all its processes. May be called from any thread."""
        with self.lock, contextlib.suppress(OSError):
            self.killed = self.running
            if self.killed and self.line:
                with socket.socket(fileno=os.dup(self.line.fileno())) as line:
                    line.shutdown(socket.SHUT_WR if self.worker_pid else socket.SHUT_RDWR)

    def close(self) -> None:
        with self.lock:
            if self.line:
                self.line.close()
            self.line, self.worker_pid = None, 0

    def poll(self) -> int | None:
        with contextlib.suppress(DeadKernelError):
            while self.line and not self.died and self.line.poll():
                self._receive("died")
        return 1 if self.died else None

    wait = poll

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(OSError):
            self._send(send=number)

    def _start(self, start: dict[str, Any]) -> Worker:
        if self.line and self.line.poll():
            self.close()  # it died while idle
        while not self.line:
            self._open()
        self._send(start=start)
        self.pid = self._receive("kernel")
        return self

    def _open(self) -> None:
        line, server = self.kernels.connect()
        with self.lock:
            self.line = line
            if self.killed:
                raise DeadKernelError("killed")
        try:
            self.worker_pid = self._receive("worker")
        except DeadKernelError:
            self.close()
            if self.killed:
                raise
            self.died = ""
            self.kernels.replace(server)

    def _end(self) -> None:
        if not self.pid:
            self.kill()
        try:
            if not self.killed:
                self._send(end=True)
            self._receive("clear")
        except (DeadKernelError, OSError):
            self.close()
        with self.lock:
            self.running, self.ended = False, "" if self.killed else self.died
            if self.killed:
                self.close()

    def _send(self, **message: Any) -> None:
        if self.line:
            self.line.send(message)

    def _receive(self, wanted: str) -> Any:
        """Wait for the worker's message of this name. Raises DeadKernelError if it has died."""
        with contextlib.suppress(EOFError, OSError):
            while self.line:
                message = self.line.recv()
                self.died = message.get("died", self.died)
                if wanted in message:
                    return message[wanted]
        self.died = self.died or "was killed with its parent process"
        raise DeadKernelError(self.died)


class _Provisioner(LocalProvisioner):
    start: Callable[[list[str]], Worker]

    async def launch_kernel(self, cmd: list[str], **_: Any) -> Any:
        self.process = self.start(cmd)
        return self.connection_info


class _Manager(AsyncKernelManager):
    @property
    def kernel_spec(self) -> KernelSpec:
        """This Python, whatever kernels are installed."""
        return KernelSpec(argv=COMMAND, display_name="Python", language="python")

    def client(self, **options: Any) -> AsyncKernelClient:
        """A client whose sockets close with the manager's."""
        return super().client(context=self.context, **options)


class _Client(AsyncKernelClient):
    def start_channels(self, *_: Any, **__: Any) -> None:
        """Start all channels but the heartbeat, which is not used."""
        super().start_channels(hb=False)

    async def wait_for_ready(self, timeout: float | None = None) -> None:
        """As in jupyter_client, without its wait of 0.2 s for further messages and without a limit:
        a watchdog ends kernels that hang."""
        while True:
            self.kernel_info()
            with contextlib.suppress(Empty):
                await self.shell_channel.get_msg(timeout=1)
                await self.iopub_channel.get_msg(timeout=0.2)
                return
            if not await self.is_alive():
                raise DeadKernelError("the kernel died before it was ready")
