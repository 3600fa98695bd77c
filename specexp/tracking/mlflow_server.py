"""Starts MLflow's own server over a store, by default for this machine only.

The server has no password, so it only accepts requests for the host names it was started with. It
stores artifacts itself, none outside the store, and runs no jobs. It gets addresses with passwords
through the environment, where `ps` does not show them.
"""

import errno
import ipaddress
import os
import socket
import sys

import psutil
from rich.console import Console

from specexp.errors import UserError
from specexp.tracking import mlflow_view, results, runs
from specexp.tracking.mlflow_store import Backend

_LOCAL = ("localhost", "127.0.0.1", "[::1]")


def show(port: int, host: str = "127.0.0.1") -> None:
    """Print a link per experiment and become the UI, unless runs are tracked on a server, which has
    one. Raises UserError, StoreUnreachable, StoreCorrupt."""
    backend = runs.backend()
    if runs.own() and not runs.has_database():
        raise UserError(f"no runs in {results.root()} yet: run `make demo`, or a notebook, first")
    if not backend.served:
        _check_free(host, port)
        with results.alone("setup"):
            runs.initialise()
    base = backend.uri if backend.served else _address(host, port)
    for e in backend.experiments():
        if e.name != "Default":
            print(f"{e.name:28s} {mlflow_view.url(e.experiment_id, base)}")
    if not backend.served:
        _warn(host)
        _become(backend, host, port)


def command(backend: Backend, host: str, port: int) -> list[str]:
    """The command of MLflow's server, with the host names it accepts and without secrets."""
    names = _names(host)
    hosts = [*(f"{n}:{port}" for n in names), *_more()]
    origins = [f"{scheme}://{n}" for n in hosts for scheme in ("http", "https")]
    return [
        sys.executable, "-m", "mlflow", "server", "--host", host, "--port", str(port),
        "--workers", "1" if backend.file else "2", "--serve-artifacts",
        "--uvicorn-opts", "--log-level warning",
        "--allowed-hosts", ",".join(hosts), "--cors-allowed-origins", ",".join(origins),
    ]  # fmt: skip


def environment(backend: Backend) -> dict[str, str]:
    """The environment for `command`."""
    inherited = {n: v for n, v in os.environ.items() if n != "MLFLOW_TRACKING_URI"}
    return inherited | {
        "MLFLOW_BACKEND_STORE_URI": backend.uri,
        "MLFLOW_ARTIFACTS_DESTINATION": backend.artifacts.as_uri(),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        # No client may say where artifacts are kept, so all are below the destination above.
        "MLFLOW_ARTIFACT_LOCATION_MAX_LENGTH": "0",
    }


def _become(backend: Backend, host: str, port: int) -> None:
    """Replace this process, so that its signals reach the server; in a folder without modules."""
    sys.stdout.flush()
    os.chdir(results.root())
    line = command(backend, host, port)
    os.execvpe(line[0], line, environment(backend))


def _names(host: str) -> list[str]:
    """The host names by which a server that listens there can be reached."""
    if _loopback(host):
        return list(_LOCAL)
    named = [host] if not _any(host) else _addresses()
    return list(dict.fromkeys([*_LOCAL, *named, socket.gethostname(), socket.getfqdn()]))


def _more() -> list[str]:
    """Further host names, from MLflow's own variable."""
    names = os.environ.get("MLFLOW_SERVER_ALLOWED_HOSTS", "").split(",")
    return [name.strip() for name in names if name.strip() and "*" not in name]


def _addresses() -> list[str]:
    addresses = [a for each in psutil.net_if_addrs().values() for a in each]
    four = [a.address for a in addresses if a.family == socket.AF_INET]
    return four + [f"[{a.address}]" for a in addresses if a.family == socket.AF_INET6]


def _address(host: str, port: int) -> str:
    if _any(host):
        host = socket.gethostname()
    elif _loopback(host):
        host = "127.0.0.1" if ":" not in host else host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _any(host: str) -> bool:
    return host in ("0.0.0.0", "::")


def _loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _warn(host: str) -> None:
    if not _loopback(host):
        warning = (
            "there is no password: whoever can reach this server can read and change everything"
        )
        Console(stderr=True).print(f"[bold red]warning[/]: {warning}", soft_wrap=True)


def _check_free(host: str, port: int) -> None:
    """Raise UserError if a server could not listen there."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            raise UserError(f"port {port} is in use: choose another with --port") from e
        raise UserError(f"cannot listen on {host}, port {port}: {e.strerror}") from e
