"""This machine for the runner, without a new process that imports everything for each grid."""

import os
from pathlib import Path

from specexp.grids import kernels
from specexp.grids.machines import local

local.LOCKS = Path(os.devnull)  # timed points wait for those of their own store alone


class Idle(local.Here):
    """It starts no process: for points that need no kernel."""

    def __enter__(self) -> "Idle":
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing was started."""


def kept(server: kernels.Kernels) -> type[Idle]:
    """Machines whose kernels all come from one server, which stays when a grid ends."""

    class Kept(Idle):
        def __init__(self, points, forked: bool = True) -> None:
            super().__init__(points, forked)
            self._kernels = server

    return Kept
