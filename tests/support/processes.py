"""Waiting for processes and for what they write."""

import time
from collections.abc import Callable

import psutil


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
