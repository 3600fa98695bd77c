"""An MLflow store at an address: a SQLite file, a PostgreSQL database or a server.

Adds what MLflow lacks: creating a database atomically, telling a damaged one from a busy one, and
artifacts that can be moved. A database names its artifacts relative to their folder (`artifacts/`
beside a SQLite file), as MLflow's server does, so that it can be moved and served. This module
knows nothing of results or grids.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import logging
import os
import re
import shutil
import sqlite3
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from specexp.errors import UserError
from specexp.tracking import redact

PROXIED = "mlflow-artifacts:/"
MADE_AS = "specexp.experiment"  # a tag of experiments, see `names_of`
TABLES = "dc11669786a5"  # the version of the tables of MLflow 3.17.2
_DAMAGE = {
    "file is not a database": "is not a database",
    "malformed": "is damaged",
    "no such table": "is empty or gone",
    "out-of-date database schema": "was written by another version of MLflow",
    "Can't locate revision": "was written by another version of MLflow",
}
_AWAY = {
    "Connection refused": "connection refused: is the server running?",
    "timed out": "no answer in time",
    "unable to open database file": "it cannot be opened: check permissions and open files",
    "database is locked": "another program has locked it",
    "attempt to write a readonly database": "it is read-only",
    "NameResolutionError": "no such host",
    "could not translate host name": "no such host",
    "password authentication failed": "user or password is wrong",
}
_REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")
_QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}  # fmt: skip


class StoreUnreachable(UserError):
    """MLflow cannot be reached or is busy now. Results are safe and can be published later."""

    code = 1


class StoreRejected(StoreUnreachable):
    """MLflow rejects the request as invalid, so that trying again is useless."""


class StoreCorrupt(UserError):
    """The database cannot be read."""

    code = 4


@dataclass(frozen=True)
class State:
    """Where a run is in MLflow (`names_of` its experiment), whether it was deleted there, how it
    ended, some tags, and where a database says its artifacts are."""

    experiment: tuple[str, ...]
    deleted: bool
    status: str
    tags: dict[str, str]
    artifacts: str = ""


@dataclass(frozen=True)
class Backend:
    """`uri`: its address for MLflow. `home`: the folder of `artifacts/`, which is not part of a
    PostgreSQL address. `remedy`: added to errors about damage, says what to do. `file`: the SQLite
    file, or None for other stores."""

    uri: str
    home: Path
    remedy: str = ""
    file: Path | None = None

    @classmethod
    def at(cls, address: str, home: Path) -> Backend:
        """The store at an address. Raises UserError if it is invalid or needs a missing driver."""
        scheme, _, driver = address.partition(":")[0].partition("+")
        if scheme == "sqlite" and (file := Path(_database(address))).name:
            return cls.of(file.resolve())
        if scheme == "postgresql":  # the default driver of SQLAlchemy 2.0 and 2.1 differs
            driver = driver or "psycopg2"
            if not importlib.util.find_spec(driver):
                raise UserError('PostgreSQL needs its driver: pip install "specexp[postgres]"')
            address = f"postgresql+{driver}:{address.partition(':')[2]}"
        elif scheme not in ("http", "https"):
            raise UserError(
                f"{hidden(address)} is not the address of an MLflow store: give sqlite:///PATH, "
                "postgresql://... or http://..."
            )
        return cls(address.rstrip("/"), home)

    @classmethod
    def of(cls, file: Path, remedy: str = "") -> Backend:
        """The store in a SQLite file."""
        return cls(_address(file), file.parent, remedy, file)

    @property
    def served(self) -> bool:
        """Whether the address is a server's."""
        return self.uri.startswith("http")

    @property
    def artifacts(self) -> Path:
        """The folder of a database's artifacts."""
        return self.home / "artifacts"

    def __str__(self) -> str:
        return str(self.file or hidden(self.uri))

    @property
    def client(self) -> Any:
        """An MLflow client, whose calls fail within seconds if a server cannot be reached."""
        _configure(self.uri)
        from mlflow import MlflowClient

        return MlflowClient(self.uri)

    @contextlib.contextmanager
    def reaching(self) -> Iterator[None]:
        """Translate errors of MLflow into StoreUnreachable, StoreRejected or StoreCorrupt; into
        OSError if a disk is full."""
        try:
            yield
        except Exception as e:
            from mlflow.exceptions import MlflowException  # it takes seconds; no error needs none
            from requests import RequestException
            from sqlalchemy.exc import SQLAlchemyError

            if not isinstance(
                e, MlflowException | RequestException | SQLAlchemyError | sqlite3.Error
            ):
                raise
            message = str(e).replace(self.uri, str(self))
            if "disk is full" in message or "No space left" in message:
                raise OSError(errno.ENOSPC, "No space left on device", str(self)) from e
            for words, what in _DAMAGE.items():
                if self.file and words in message:
                    raise self.damaged(what) from e
            short = next((what for words, what in _AWAY.items() if words in message), None)
            line = f"{self}: {short or redact.hide(message.strip().splitlines()[0][:200])}"
            refused = not short and getattr(e, "error_code", "") in _REFUSALS
            raise (StoreRejected if refused else StoreUnreachable)(line) from e

    def damaged(self, what: str) -> StoreCorrupt:
        return StoreCorrupt(f"{self} {what}{self.remedy}")

    # --- the database ----------------------------------------------------------------------------

    def prepare(self) -> None:
        """Create the database if there is none, and check that it can be read. One process at a
        time may do so. Raises UserError if its folder is missing, StoreUnreachable, StoreCorrupt.
        """
        if self.served:
            return
        if self.file and not self.file.parent.is_dir():
            raise UserError(f"the folder {self.file.parent} does not exist: create it first")
        empty = self.empty()
        with self.reaching():
            if not self.file:
                import sqlalchemy

                soon = {"connect_timeout": 10}  # MLflow itself tries for minutes
                sqlalchemy.create_engine(self.uri, connect_args=soon).connect().close()
                create_tables(self.uri)
            elif empty:
                _create(self.file)
            elif not _is_current(self.file):  # MLflow would take seconds to say that it is
                create_tables(self.uri)

    def empty(self) -> bool:
        """Whether it is a SQLite file that is missing or has no tables. Raises StoreCorrupt if it
        is not MLflow's, or StoreUnreachable."""
        if not self.file or not self.file.exists():
            return bool(self.file)
        if not self.file.is_file():
            raise self.damaged("is not a file")
        if not self.file.stat().st_size:
            return True
        with self.reaching(), contextlib.closing(_sqlite(self.file)) as db:
            tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
        if tables and "experiments" not in tables:
            raise self.damaged("is not MLflow's: it has other tables")
        return not tables

    def integrity_problems(self) -> list[str]:
        """What SQLite finds wrong with its file; empty for other stores. Raises as `empty`."""
        if not self.file or self.empty():
            return []
        with self.reaching(), contextlib.closing(_sqlite(self.file)) as db:
            create_tables(self.uri)
            lines = [str(row[0]) for row in db.execute("PRAGMA quick_check(5)")]
        return [line for line in lines if line != "ok"]

    # --- what is in it ---------------------------------------------------------------------------

    def experiments(self) -> list[Any]:
        """The experiments that are not deleted."""
        with self.reaching():
            return list(_pages(self.client.search_experiments))

    def states(self, experiments: Set[str], tags: Sequence[str]) -> dict[str, State]:
        """The state of every run, deleted or not, in experiments with one of these names (see
        `names_of`), with those of its tags. From a database in one query: MLflow takes seconds for
        a thousand runs."""
        with self.reaching():
            return (_served_states if self.served else _states)(self, experiments, tags)

    def runs(self, experiment: str, filter: str = "") -> list[Any]:
        """Runs of an experiment's id that are not deleted, newest first."""
        with self.reaching():
            return list(_pages(self.client.search_runs, [experiment], filter, max_results=1000))

    def history(self, run: str, metric: str) -> list[Any]:
        """Every logged value of a run's metric, with step and timestamp."""
        with self.reaching():
            return list(self.client.get_metric_history(run, metric))

    # --- artifacts -------------------------------------------------------------------------------

    def location(self, experiment: str) -> str | None:
        """The artifact location of a new experiment; None lets the server choose."""
        if self.served:
            return None
        return PROXIED + (re.sub(r"[^A-Za-z0-9_-]+", "-", experiment).strip("-") or "experiment")

    def put(self, location: str, folder: Path, files: Iterable[Path]) -> None:
        """Copy files of a folder to the artifacts of a run or experiment at this location. Raises
        as `reaching` does, or OSError."""
        into = artifacts_of(self, location)
        for path in files:  # one by one: MLflow's log_artifacts skips unreadable folders
            inside = path.relative_to(folder)
            if into:
                (into / inside).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, into / inside)
                continue
            from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

            with self.reaching():
                below = inside.parent.as_posix().removeprefix(".") or None
                get_artifact_repository(location, self.uri).log_artifact(str(path), below)

    def lacks(self, location: str) -> bool:
        """Whether the artifacts of a run at this location were kept here and are gone."""
        folder = artifacts_of(self, location)
        try:
            return folder is not None and not os.listdir(folder)
        except OSError as e:
            return isinstance(e, FileNotFoundError)


def _states(backend: Backend, experiments: Set[str], tags: Sequence[str]) -> dict[str, State]:
    import sqlalchemy

    query = sqlalchemy.text(
        "SELECT r.run_uuid, e.name, m.value, r.lifecycle_stage, r.status, r.artifact_uri, "
        "t.key, t.value "
        "FROM runs r JOIN experiments e ON e.experiment_id = r.experiment_id "
        "LEFT JOIN experiment_tags m ON m.experiment_id = e.experiment_id AND m.key = :made_as "
        "LEFT JOIN tags t ON t.run_uuid = r.run_uuid AND t.key IN :tags "
        "WHERE e.name IN :names OR m.value IN :names"
    ).bindparams(
        sqlalchemy.bindparam("made_as", MADE_AS),
        sqlalchemy.bindparam("tags", list(tags), expanding=True),
        sqlalchemy.bindparam("names", list(experiments), expanding=True),
    )
    states: dict[str, State] = {}
    engine = sqlalchemy.create_engine(backend.uri, poolclass=sqlalchemy.pool.NullPool)
    with engine.connect() as connection:
        for run, name, made_as, stage, status, place, key, value in connection.execute(query):
            state = State((name, made_as or name), stage == "deleted", status, {}, place or "")
            state = states.setdefault(run, state)
            if key:
                state.tags[key] = value
    return states


def _served_states(
    backend: Backend, experiments: Set[str], tags: Sequence[str]
) -> dict[str, State]:
    from mlflow.entities import ViewType

    client, everything = backend.client, ViewType.ALL
    return {
        run.info.run_id: State(
            names_of(experiment), run.info.lifecycle_stage == "deleted", run.info.status,
            {n: run.data.tags[n] for n in tags if n in run.data.tags},
        )
        for experiment in _pages(client.search_experiments, view_type=everything)
        if not experiments.isdisjoint(names_of(experiment))
        for run in _pages(
            client.search_runs, [experiment.experiment_id], "", everything, max_results=1000
        )
    }  # fmt: skip


def names_of(experiment: Any) -> tuple[str, ...]:
    """The name that MLflow shows, and the one under which specexp made the experiment: grids and
    results keep to it when somebody renames the experiment in MLflow."""
    return str(experiment.name), str(experiment.tags.get(MADE_AS, experiment.name))


def artifacts_of(backend: Backend, uri: str) -> Path | None:
    """The folder of artifacts at this address; None if a server or another storage keeps them."""
    if backend.served or not uri.startswith(PROXIED):
        return None
    parts = PurePosixPath(unquote(urlsplit(uri).path)).parts
    if ".." in parts:
        raise backend.damaged(f"names artifacts outside their folder: {uri}")
    return backend.artifacts.joinpath(*parts[1:])


def create_tables(uri: str) -> None:
    """Create MLflow's tables in a database if missing, check their version, and put the artifacts
    of the Default experiment where the others' are."""
    _configure(uri)
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    SqlAlchemyStore(uri, PROXIED).engine.dispose()


def _is_current(file: Path) -> bool:
    with contextlib.closing(_sqlite(file)) as db:
        return db.execute("SELECT version_num FROM alembic_version").fetchall() == [(TABLES,)]


def _configure(uri: str) -> None:
    """Set the environment variables that MLflow reads at its first use."""
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if uri.startswith("sqlite"):  # pooled connections would keep writing to a deleted file
        os.environ.setdefault("MLFLOW_SQLALCHEMYSTORE_POOLCLASS", "NullPool")
    for noisy in map(logging.getLogger, ("alembic", "mlflow.store.db.utils")):
        if noisy.level != logging.CRITICAL:  # to set it clears the caches of every logger
            noisy.setLevel(logging.CRITICAL)


def _sqlite(file: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{quote(str(file))}?mode=rw", uri=True, timeout=5)


def _create(file: Path) -> None:
    """Create a SQLite file under another name, then rename it: a half-made one is never used."""
    for half in file.parent.glob(f"{file.name}.new-*"):
        half.unlink()
    new = file.with_name(f"{file.name}.new-{uuid.uuid4().hex[:8]}")
    create_tables(_address(new))
    with contextlib.closing(sqlite3.connect(new)) as db:
        db.execute("PRAGMA journal_mode=wal")
    for old in ("-wal", "-shm"):  # left by a deleted file
        file.with_name(file.name + old).unlink(missing_ok=True)
    os.rename(new, file)


def _address(file: Path) -> str:
    """The SQLAlchemy address of a SQLite file, whatever characters its path has."""
    from sqlalchemy import URL

    plain = f"sqlite:///{file}"
    if _database(plain) == str(file):
        return plain
    # with the driver's name, or MLflow would make a folder of the escaped path
    return URL.create("sqlite+pysqlite", database=str(file)).render_as_string()


def _database(address: str) -> str:
    """The path in a SQLite address, or ""."""
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        return make_url(address).database or ""
    except ArgumentError:
        return ""


def hidden(address: str) -> str:
    """An address without driver, user and password, for messages."""
    bare = re.sub(r"//.*@", "//", re.sub(r"^(postgresql)\+\w+", r"\1", address))
    return re.sub(r"([?&](?:\w*password|passfile|user)=)[^&]*", r"\1...", bare)


def _pages(search: Callable[..., Any], *args: Any, **options: Any) -> Iterator[Any]:
    token = None
    while True:
        page = search(*args, page_token=token, **options)
        yield from page
        token = page.token
        if not token:
            return
