"""Waiting for processes and for what they write; packages that a quick one must not import."""

import time
from collections.abc import Callable

import psutil

HEAVY = {"torch", "transformers", "scipy", "mlflow", "papermill", "pandas", "matplotlib", "seaborn"}


def until(true: Callable[[], object]) -> None:
    """Wait for an event, however long it takes: pytest ends a test that hangs."""
    while not true():
        time.sleep(0.02)


def alive(process: psutil.Process | int) -> bool:
    try:
        process = psutil.Process(process) if isinstance(process, int) else process
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
