"""Tracking over HTTP: MLflow's server as `server` starts it, on SQLite and PostgreSQL."""

import json
import multiprocessing
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from mlflow.entities import ViewType
from rich.console import Console
from support import stores
from support.artifacts import digests
from support.servers import Mlflow, free_port, postgres
from support.stores import METRICS, go, problems

from specexp.commands import app
from specexp.grids import runner
from specexp.tracking import compare, mlflow_server, rebuild, runs
from specexp.tracking import results as disk
from specexp.tracking.mlflow_store import Backend

pytestmark = pytest.mark.slow

FOREIGN = (
    "evil.example", "127.0.0.1.evil.example", "10.0.0.1", "192.168.1.5", "172.16.0.1", "localhost",
    "127.0.0.1", "localhost.evil.example", "0.0.0.0", "[::1]", "169.254.1.1", "evil.example:{port}",
    "10.0.0.1:{port}", "localhost:1",
)  # fmt: skip


@pytest.fixture
def served(monkeypatch):
    """Track runs on this server until the test ends."""

    def call(running):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", running.url)

    return call


def test_ui_server_refuses_foreign_hosts_and_places_and_keeps_runs(
    store, served, monkeypatch, capsys, tmp_path
):
    runs.log("mine", {"drafter": "before"}, METRICS)
    with Mlflow(runs.backend()) as mlflow:
        hosts = [h.format(port=mlflow.port) for h in FOREIGN]
        assert {h: mlflow.status(Host=h) for h in hosts} == dict.fromkeys(hosts, 403)
        for host in (f"127.0.0.1:{mlflow.port}", f"localhost:{mlflow.port}"):
            assert mlflow.status(Host=host) == 200
        asked = "/api/2.0/mlflow/experiments/create"
        body, as_json = json.dumps({"name": "new"}).encode(), {"Content_Type": "application/json"}
        assert mlflow.status(asked, body, Origin="http://evil.example", **as_json) == 403
        assert 400 <= mlflow.status(asked, body, Content_Type="text/plain") < 500
        assert mlflow.status(asked, body, Origin=mlflow.url, **as_json) == 200
        for place in (tmp_path.as_uri(), str(tmp_path), "mlflow-artifacts:/../x", "s3://x/y", "x"):
            body = json.dumps({"name": f"at {place}", "artifact_location": place}).encode()
            assert mlflow.status(asked, body, **as_json) == 400
        below = [mlflow.running.pid]
        below += [p.pid for p in psutil.Process(below[0]).children(recursive=True)]
        heard = [c.laddr.ip for pid in below for c in psutil.Process(pid).net_connections()
                 if c.status == psutil.CONN_LISTEN]  # fmt: skip
        assert set(heard) == {"127.0.0.1"}

        served(mlflow)
        capsys.readouterr()
        runs.log("mine", {"drafter": "served"}, METRICS)
        runs.log("another", {"drafter": "served"}, METRICS)
        assert f"logged to {mlflow.url}" in capsys.readouterr().out
        frame = runs.runs().set_index("name")
        assert sorted(frame.index) == ["before by hand", "served by hand", "served by hand"]
        for run_id in frame["run_id"]:
            names = digests(runs.backend(), runs.client().get_run(run_id))
            assert "result.json" in names
            at = f"/get-artifact?path=result.json&run_uuid={run_id}"
            assert mlflow.status(at) == 200
        assert len(list((store / "artifacts").glob("*/*/artifacts/result.json"))) == 3

        mlflow_server.show(5000)
        said = capsys.readouterr().out
        assert f"{mlflow.url}/#/experiments/" in said
        console = Console(record=True, width=200)
        compare.show(console, runs.runs().head(0))
        assert mlflow.url in console.export_text()

        mlflow.stop()
        runs.log("mine", {"drafter": "later"}, METRICS)
        assert "connection refused" in capsys.readouterr().out
        [told] = problems()
        assert "connection refused" in told
        mlflow.start()
        assert any("0 times" in line for line in problems())
        rebuild.rebuild(Console(quiet=True))
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert problems() == []
    assert len(runs.runs()) == 4


@pytest.fixture
def become(monkeypatch):
    """Capture the program that a command would exec: its arguments and environment."""
    seen = []

    def call(*args):
        monkeypatch.setattr("os.execvpe", lambda file, args, env: seen.append((args, env)))
        monkeypatch.setattr(sys, "argv", ["specexp", *args])
        monkeypatch.chdir(".")  # and back when the test ends
        with pytest.raises(SystemExit) as stopped:
            app.main()
        return (stopped.value.code or 0, *(seen or [([], {})])[-1])

    return call


def test_ui_warns_of_what_it_opens_and_names_its_hosts(store, become, capsys, monkeypatch):
    port = str(free_port())
    runs.log("mine", {"drafter": "ngram"}, METRICS)
    capsys.readouterr()
    code, args, env = become("ui", "--port", port)
    out, err = capsys.readouterr()
    assert code == 0
    assert f"http://127.0.0.1:{port}/#/experiments/" in out
    assert "password" not in err
    assert "--serve-artifacts" in args
    assert env["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] == "false"
    assert env["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert env["MLFLOW_BACKEND_STORE_URI"] == f"sqlite:///{store / 'mlflow.db'}"

    monkeypatch.setenv("MLFLOW_SERVER_ALLOWED_HOSTS", "lab.example, *")
    code, args, _ = become("ui", "--port", port, "--host", "0.0.0.0")
    out, err = capsys.readouterr()
    assert code == 0
    assert "no password" in err
    assert len(err.strip().splitlines()) == 1
    hosts = args[args.index("--allowed-hosts") + 1].split(",")
    assert {f"{socket.gethostname()}:{port}", f"127.0.0.1:{port}", "lab.example"} <= set(hosts)
    assert not any("*" in host for host in hosts)
    assert f"http://{socket.gethostname()}:{port}" in out


def test_ui_refuses_a_port_or_host_it_cannot_listen_on(store, become, capsys):
    runs.log("mine", {"drafter": "ngram"}, METRICS)
    capsys.readouterr()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for options, reason in (
            (("--port", port), "is in use"),
            (("--host", "203.0.113.7", "--port", str(free_port())), "cannot listen"),
        ):
            code, command, _ = become("ui", *options)
            err = capsys.readouterr().err
            assert code == 2
            assert reason in err
            assert not command
            assert len(err.strip().splitlines()) == 1


def test_unreachable_database_is_named_without_its_password(store, become, capsys, monkeypatch):
    pytest.importorskip("psycopg2")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://me:hush@127.0.0.1:9/db")
    code, *_ = become("store", "rebuild")
    err = capsys.readouterr().err
    assert code == 1
    assert "connection refused" in err
    assert "hush" not in err


def lines_of(page: str, word: str) -> str:
    """The shell block of mlruns/README.md that contains a word."""
    [block] = [block for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) if word in block]
    return block


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def database(request):
    """The address of a database in place of the page's; PostgreSQL's keeps the page's scheme."""
    if request.param == "sqlite":
        yield lambda address: "sqlite:///mlflow.db"
    else:
        with postgres() as own:
            yield lambda address: address.replace("///specexp", own.partition(":")[2])


def test_server_of_the_page_takes_a_rebuild_once(store, tmp_path, monkeypatch, database):
    for number in range(3):
        runs.log("mine", {"drafter": "ngram", "x": number}, METRICS, {"a/curve": [0.5] * 1200})
    page = (disk.ROOT / "mlruns" / "README.md").read_text()
    port, home = free_port(), tmp_path / "mlruns of the server"
    home.mkdir()
    lines = lines_of(page, "mlflow server").replace("5000", str(port))
    [address] = re.findall(r"postgresql\S+", lines)
    lines = lines.replace(address, database(address))
    lines = lines.replace("cd mlruns", f"cd '{home}'").replace(
        "mlflow server", "exec mlflow server"
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = subprocess.Popen(["sh", "-ec", lines], env=os.environ | {"PATH": path})
    with Mlflow(Backend.of(home / "mlflow.db"), port=port, running=command) as mlflow:
        for host in (f"localhost:{port}", f"127.0.0.1:{port}"):
            assert mlflow.status(Host=host) == 200
        hosts = [h.format(port=port) for h in FOREIGN]
        assert {h: mlflow.status(Host=h) for h in hosts} == dict.fromkeys(hosts, 403)

        address = lines_of(page, "export MLFLOW_TRACKING_URI")
        assert f"export MLFLOW_TRACKING_URI={mlflow.url}" in address.replace("5000", str(port))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow.url)
        for _ in range(2):
            assert rebuild.rebuild(Console(quiet=True)).results == 3
            assert problems() == []
        place = runs.backend()
        [mine] = [e for e in place.experiments() if e.name == "mine"]
        every = place.client.search_runs([mine.experiment_id], run_view_type=ViewType.ALL)
        assert len(every) == 3
        assert len(list((home / "artifacts").glob("*/*/artifacts/result.json"))) == 3


# --- grids over a server -------------------------------------------------------------------------


@pytest.fixture
def slow(points, monkeypatch):
    """Points that take half a second each, without a kernel."""
    return stores.without_kernels(points, monkeypatch, seconds=0.5)


def restarts_in_mid_grid(store, slow, served, place):
    """Stop the server after the third point, and restart it once the runner has noticed."""
    with Mlflow(place) as mlflow:
        served(mlflow)

        def disturb():
            while len(list((store / "results").glob("*/.published*"))) < 3:
                time.sleep(0.05)
            mlflow.stop()
            time.sleep(8)
            mlflow.start()

        other = threading.Thread(target=disturb)
        other.start()
        code, said = go(slow(*range(8)))
        other.join()
        if code:  # the outage was longer than the runner waits
            code, said = go(slow(*range(8)))
        assert code == 0
        assert mlflow.url in said
        assert problems() == []
        assert len(runs.runs()) == 8
        assert not (store / "mlflow.db").exists() or place.file


@pytest.mark.slow
def test_server_restart_in_mid_grid_loses_nothing(store, slow, served):
    restarts_in_mid_grid(store, slow, served, runs.backend())


@pytest.mark.slow
@pytest.mark.postgres
def test_postgres_server_restart_in_mid_grid_loses_nothing(store, slow, served):
    (store / "mlflow.db").unlink()
    with postgres() as address:
        restarts_in_mid_grid(store, slow, served, Backend.at(address, store))


@pytest.mark.slow
def test_next_grid_run_publishes_after_server_outage(store, written, served, monkeypatch):
    monkeypatch.setattr(runner, "PATIENCE_S", 1)
    with Mlflow(runs.backend()) as mlflow:
        served(mlflow)
        mlflow.stop()
        code, said = go(written(1, 2, 3))
        assert code == 1
        assert "run the same command again" in said
        assert "not published to MLflow yet" in said
        mlflow.start()
        code, said = go(written(1, 2, 3))
        assert code == 0
        assert "0 of 3 points to run" in said
        assert problems() == []


def _publishes(root, uri, number):
    import os

    os.environ |= {"SPECEXP_MLRUNS": root, "MLFLOW_TRACKING_URI": uri}
    for i in range(5):
        runs.log("shared", {"drafter": "ngram", "by": number, "i": i}, METRICS,
                  {"acceptance/at_position": [0.5] * 100})  # fmt: skip


@pytest.mark.slow
@pytest.mark.postgres
def test_postgres_takes_four_writers_and_a_rebuild(tmp_path, monkeypatch, migrated):
    quiet = Console(quiet=True)
    with postgres() as address, Mlflow(Backend.at(address, tmp_path / "served")) as mlflow:
        mlflow.place.prepare()
        context = multiprocessing.get_context("spawn")
        writers = [
            context.Process(target=_publishes, args=(str(tmp_path / str(n)), uri, n))
            for n, uri in enumerate([mlflow.url, mlflow.url, mlflow.place.uri, mlflow.place.uri])
        ]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        assert [w.exitcode for w in writers] == [0] * 4
        for n in (0, 1):
            monkeypatch.setenv("SPECEXP_MLRUNS", str(tmp_path / str(n)))
            monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow.url)
            assert problems() == []
        assert len(runs.runs()) == 20

        monkeypatch.delenv("MLFLOW_TRACKING_URI")
        monkeypatch.setenv("SPECEXP_MLRUNS", str(tmp_path / "mine"))
        (tmp_path / "mine").mkdir()
        shutil.copy(migrated / "mlflow.db", tmp_path / "mine" / "mlflow.db")
        for i in range(3):
            runs.log("mine", {"drafter": "ngram", "i": i}, METRICS, {"a/curve": [0.1] * 1200})
        for address in (mlflow.url, mlflow.place.uri):  # the second finds all of them there
            monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
            assert rebuild.rebuild(quiet).results == 3
            assert problems() == []
            assert len(runs.runs()) == 23
        seen = " ".join(
            " ".join(psutil.Process(p.pid).cmdline())
            for p in [psutil.Process(mlflow.running.pid),
                      *psutil.Process(mlflow.running.pid).children(recursive=True)]
        )  # fmt: skip
        assert "secret" not in seen
        assert disk.store_id() != ""
