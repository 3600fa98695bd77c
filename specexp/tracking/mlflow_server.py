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
from pathlib import Path
from urllib.parse import unquote, urlsplit

import psutil
from rich.console import Console

from specexp.errors import UserError
from specexp.terminal import harmless
from specexp.tracking import mlflow_view, results, runs
from specexp.tracking.mlflow_store import Backend

_LOCAL = ("localhost", "127.0.0.1", "[::1]")
_EVERYWHERE = ("0.0.0.0", "::")
_PLACES = (  # where MLflow's tables say that files are
    "SELECT artifact_location AS place FROM experiments",
    "SELECT artifact_uri FROM runs",
    "SELECT artifact_location FROM logged_models",
    "SELECT source FROM model_versions",
    "SELECT storage_location FROM model_versions",
    "SELECT value FROM trace_tags WHERE key = 'mlflow.artifactLocation'",
)


def show(port: int, host: str = "127.0.0.1") -> None:
    """Print a link per experiment and become the UI, unless runs are tracked on a server, which has
    one. Raises UserError, StoreUnreachable, StoreCorrupt."""
    backend, base = runs.backend(), runs.backend().uri
    if runs.own() and not runs.has_database():
        raise UserError(f"no runs in {results.root()} yet: run `make demo`, or a notebook, first")
    if not backend.served:
        _check_free(host, port)
        with results.claim_setup():
            runs.initialise()
        check_places(backend)
        reached = socket.gethostname() if host in _EVERYWHERE else host
        base = f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"
    for e in backend.experiments():
        if e.name != "Default":
            print(harmless(f"{e.name:28s} {mlflow_view.url(e.experiment_id, base)}"))
    if backend.served:
        return
    if not _loopback(host):
        warning = "there is no password: whoever can reach this server can read and change all"
        Console(stderr=True).print(f"[bold red]warning[/]: {warning}", soft_wrap=True)
    sys.stdout.flush()
    os.chdir(results.root())  # where there are no modules to import
    words = command(backend, host, port)
    os.execvpe(words[0], words, environment(backend))  # so that signals reach the server


def command(backend: Backend, host: str, port: int) -> list[str]:
    """The command of MLflow's server, with the host names it accepts and without secrets."""
    hosts = _hosts(host, port)
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


def _hosts(host: str, port: int) -> list[str]:
    """The names, with the port, by which a server that listens there can be reached, and those that
    MLflow's own variable adds."""
    names = list(_LOCAL)
    if host in _EVERYWHERE:
        every = [a for each in psutil.net_if_addrs().values() for a in each]
        names += [a.address for a in every if a.family == socket.AF_INET]
        names += [f"[{a.address}]" for a in every if a.family == socket.AF_INET6]
    elif not _loopback(host):
        names.append(host)
    if not _loopback(host):
        names += [socket.gethostname(), socket.getfqdn()]
    more = os.environ.get("MLFLOW_SERVER_ALLOWED_HOSTS", "").split(",")
    return [
        *(f"{name}:{port}" for name in dict.fromkeys(names)),
        *(name.strip() for name in more if name.strip() and "*" not in name),
    ]


def _loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_places(backend: Backend) -> None:
    """Raise UserError if a database names files outside its artifacts: MLflow's server would read
    and write there for everybody who can reach it."""
    import sqlalchemy

    engine = sqlalchemy.create_engine(backend.uri, poolclass=sqlalchemy.pool.NullPool)
    with backend.reaching(), engine.connect() as connection:
        rows = connection.execute(sqlalchemy.text(" UNION ".join(_PLACES)))
        outside = sorted({place for (place,) in rows if place and not _inside(backend, place)})
    if outside:
        raise UserError(
            f"{backend} keeps files outside {backend.artifacts}: {outside[0]}"
            f"{f' and {len(outside) - 1} more' * (len(outside) > 1)}. The UI would read and write "
            "there for everybody who can reach it; if you trust it, start `mlflow server` yourself"
        )


def _inside(backend: Backend, place: str) -> bool:
    parts = urlsplit(place)
    path = Path(unquote(parts.path))
    if parts.scheme in ("mlflow-artifacts", "models", "runs"):
        return ".." not in path.parts
    folder = backend.artifacts.resolve()
    return parts.scheme in ("", "file") and path.resolve().is_relative_to(folder)


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
