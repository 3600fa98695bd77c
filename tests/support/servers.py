"""Real servers for the tests: MLflow's, and PostgreSQL's if it is installed."""

import contextlib
import glob
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from specexp.tracking import mlflow_server
from specexp.tracking.mlflow_store import Backend


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Mlflow:
    """MLflow's server over `place`, which can be stopped and restarted at the same `url`.
    running: one that was just started, on `port`."""

    def __init__(
        self, place: Backend, host: str = "127.0.0.1", port: int | None = None,
        running: subprocess.Popen[bytes] | None = None,
    ) -> None:  # fmt: skip
        self.place, self.host, self.port, self.running = place, host, port or free_port(), running
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "Mlflow":
        if self.running:
            self.await_answer()
        else:
            self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self) -> None:
        self.running = subprocess.Popen(
            mlflow_server.command(self.place, self.host, self.port),
            env=mlflow_server.environment(self.place),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.await_answer()

    def await_answer(self) -> None:
        assert self.running
        while self.status("/health") != 200:
            assert self.running.poll() is None
            time.sleep(0.3)

    def stop(self) -> None:
        assert self.running
        self.running.terminate()
        self.running.wait()

    def status(self, path: str = "/", data: bytes | None = None, **headers: str) -> int:
        """The HTTP status of a request; 0 if there is no answer."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self.url + path, data, named)
        try:
            return int(urllib.request.urlopen(request, timeout=600).status)
        except urllib.error.HTTPError as e:
            return e.code
        except OSError:
            return 0


def initdb() -> str | None:
    """The path of initdb, or None: PostgreSQL's tools are often not on PATH."""
    found = sorted(glob.glob("/usr/lib/postgresql/*/bin/initdb"))
    return found[-1] if found else shutil.which("initdb")


@contextlib.contextmanager
def postgres():
    """A PostgreSQL server on loopback, with a password; yields the address of its database. It
    refuses to run as root, so root runs it as `nobody`."""
    tools = Path(str(initdb())).resolve().parent
    options = {}
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        options = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        data, secret = Path(folder) / "data", Path(folder) / "password"
        secret.write_text("p:w/@-secret")
        if options:
            for path in (Path(folder), secret):
                os.chown(path, options["user"], options["group"])

        def tool(name: str, *args: str) -> None:
            done = subprocess.run([str(tools / name), *args], cwd=folder, capture_output=True,
                                  text=True, **options)  # fmt: skip
            assert done.returncode == 0, done.stderr

        tool("initdb", "-D", str(data), "-U", "lab", "-A", "scram-sha-256", "--pwfile",
             str(secret), "--no-sync")  # fmt: skip
        running = subprocess.Popen(
            [str(tools / "postgres"), "-D", str(data), "-p", str(port), "-k", folder,
             "-c", "listen_addresses=127.0.0.1", "-c", "fsync=off"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder, **options,
        )  # fmt: skip
        try:
            while subprocess.run(
                [str(tools / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(port)], check=False
            ).returncode:
                assert running.poll() is None
                time.sleep(0.2)
            yield f"postgresql://lab:p%3Aw%2F%40-secret@127.0.0.1:{port}/postgres"
        finally:
            running.terminate()
            running.wait()
