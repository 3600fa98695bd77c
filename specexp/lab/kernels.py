"""Kernels for grid points (plain ones)."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.manager import AsyncKernelManager


class Slot:
    def __init__(self) -> None:
        self.ended, self._km = "", None

    @contextlib.contextmanager
    def kernel(
        self, env: Mapping[str, str], cwd: Path, log: Path, seed: int, warm: Any
    ) -> Iterator[Any]:
        self._killed = False
        with tempfile.TemporaryDirectory(prefix="specexp-") as private:
            km = AsyncKernelManager(
                kernel_name="python3",
                transport="ipc",
                ip=f"{private}/k",
                connection_file=f"{private}/kernel.json",
            )
            start = km.start_kernel

            async def start_kernel(**kw: Any) -> Any:
                return await start(**{**kw, "env": dict(env), "cwd": str(cwd)})

            km.start_kernel = start_kernel
            self._km = km
            try:
                yield km
            finally:
                self.kill()
                self._km = None

    def kill(self) -> None:
        km = self._km
        if km is None or km.provisioner is None or not getattr(km.provisioner, "pid", None):
            return
        try:
            p = psutil.Process(km.provisioner.pid)
            kids = [*p.children(recursive=True), p]
        except psutil.NoSuchProcess:
            return
        for child in kids:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


class Kernels:
    def __init__(self, modules: Sequence[str] = (), forked: bool = True) -> None:
        self.how = "plain"

    def __enter__(self) -> Kernels:
        return self

    def __exit__(self, *e: object) -> None: ...

    @contextlib.contextmanager
    def slot(self) -> Iterator[Slot]:
        yield Slot()


def modules_of(notebooks: Any) -> list[str]:
    return []
