"""The terminal display of a running grid: lines for finished points, a table of running ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

SHOWN = {"done": "green", "failed": "red", "stopped": "yellow", "kept": "yellow"}


@dataclass
class Board:
    """The progress of `total` points. Thread-safe."""

    console: Console
    total: int
    done: int = 0
    failed: int = 0
    jobs: int = 1
    _running: dict[str, tuple[float, str]] = field(default_factory=dict)
    _took: list[float] = field(default_factory=list)
    _lock: Any = field(default_factory=threading.RLock)
    _begin: float = field(default_factory=time.monotonic)
    _note: str = ""

    def __enter__(self) -> Board:
        self._live = Live(
            console=self.console, get_renderable=self._picture, refresh_per_second=2, transient=True
        )
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def began(self, label: str) -> Callable[[str], None]:
        """A point has started; returns a function to call with its progress."""
        begin = time.monotonic()

        def watch(said: str) -> None:
            with self._lock:
                self._running[label] = begin, said

        watch("starting")
        return watch

    def ended(self, label: str, state: str, detail: str = "") -> None:
        """A point has ended; `state` is one of SHOWN. The time is left out if it did not run."""
        with self._lock:
            took = f"{'':8s}"
            if label in self._running:
                seconds = time.monotonic() - self._running.pop(label)[0]
                self._took.append(seconds)
                took = f"{seconds:6.1f} s"
            self.done += state in ("done", "kept")
            self.failed += state == "failed"
            line = Text(f"{state:9s}", SHOWN[state]) + Text(f"{took}  {label}  ")
            self.console.print(line + Text(detail, "dim"), soft_wrap=True)

    def say(self, line: str, once: bool = False) -> None:
        """Print a message; with `once`, not if it was the last one printed."""
        with self._lock:
            if once and line == self._note:
                return
            self._note = line
            self.console.print(Text(line), soft_wrap=True)

    @property
    def left(self) -> str:
        """An estimate of the time left, from the mean of the points so far."""
        if not self._took:
            return ""
        rest = self.total - self.done - self.failed
        return f"about {duration(sum(self._took) / len(self._took) * rest / self.jobs)} left"

    def _picture(self) -> Group:
        with self._lock:
            now = time.monotonic()
            rows = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
            for label, (begin, said) in self._running.items():
                rows.add_row("running", duration(now - begin), Text(label), Text(said, "dim"))
            totals = Table.grid(padding=(0, 2, 0, 0))
            bar = ProgressBar(self.total, self.done + self.failed, width=24)
            counts = f"{self.done} done, {self.failed} failed of {self.total}"
            totals.add_row(bar, counts, duration(now - self._begin), self.left)
            return Group(rows, totals)


def duration(seconds: float) -> str:
    """Seconds as `0:05` or `2:00:00`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
