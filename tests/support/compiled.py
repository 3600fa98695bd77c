"""Triton's kernels compiled for cards that are not here: `python -m support.compiled` prints what
each needs of a card, at the sizes of a model of 8 billion parameters, with TRITON_INTERPRET=0."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from specexp import ops
from specexp.measure.hardware.kernels import calls

CARDS = (80, 90)  # compute capabilities: A100, H100
PASSES = {  # rows, tokens of each, slots, dtype
    "verify": (1, 6, 8192, torch.bfloat16),
    "batch": (64, 6, 8192, torch.bfloat16),
    "prefill": (1, 512, 8192, torch.bfloat16),
    "float32": (1, 512, 8192, torch.float32),
}


class Card:
    """What Triton asks of a driver in order to compile."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


@contextmanager
def compiling(capability: int) -> Iterator[list[dict[str, Any]]]:
    """Meanwhile launches compile and run nothing; yields what each kernel needs."""
    needs, run = [], JITFunction.run

    def compiled(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        more = {"warps": kernel.metadata.num_warps, "shared": kernel.metadata.shared}
        more |= registers(kernel.asm["cubin"])
        needs.append({"kernel": self.__name__, "sm": capability} | more)

    driver.set_active(Card(capability))
    JITFunction.run = compiled
    try:
        yield needs
    finally:
        JITFunction.run = run


def registers(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack, to which it spills those it has too few of."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        asked = [tool, "--dump-resource-usage", file]
        text = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+).*LOCAL:(\d+)", text)
    assert found, text
    return {"registers": int(found[1]), "stack": int(found[2]) + int(found[3])}


def launch(B: int, n: int, S: int, dtype: torch.dtype) -> None:
    """Every kernel once, on tensors that hold nothing."""
    for call in calls(B, n, S, dtype, "meta"):
        run, _ = ops.OPS[call.operation].kernels["cuda"]
        assert run(*call.args) is not NotImplemented, call.name


def table(passes: Sequence[str]) -> list[dict[str, Any]]:
    """What every kernel needs in these passes on every card."""
    rows = []
    for capability in CARDS:
        for name in passes:
            with compiling(capability) as needs:
                launch(*PASSES[name])
            rows += [{"pass": name} | need for need in needs]
    return rows


if __name__ == "__main__":
    ops.home(torch.device("cuda"))
    json.dump(table(sys.argv[1:] or list(PASSES)), sys.stdout)
