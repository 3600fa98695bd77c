"""Servers on this machine: MLflow's UI over the store, for this machine alone unless told so."""

from __future__ import annotations

import os
import subprocess
import sys

from specexp.errors import UserError
from specexp.lab import store, track, view


def ui_command(port: int) -> list[str]:
    """MLflow's server for this machine alone: loopback, known Host headers, no job runner."""
    root = store.root()
    return [
        sys.executable, "-m", "mlflow", "server", "--backend-store-uri",
        f"sqlite:///{root / 'mlflow.db'}", "--default-artifact-root", (root / "artifacts").as_uri(),
        "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--allowed-hosts", f"localhost:{port},127.0.0.1:{port}",
    ]  # fmt: skip


def serve(port: int) -> int:
    """Run the UI until it is stopped; prints each experiment's link. Returns the exit code."""
    if not (store.root() / "mlflow.db").exists():
        raise UserError(f"no runs in {store.root()} yet: run `make demo`, or a notebook, first")
    for e in track.client().search_experiments():
        if e.name != "Default":
            print(f"{e.name:28s} {view.url(e.experiment_id, port)}")
    env = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    return subprocess.run(ui_command(port), env=os.environ | env, check=False).returncode
