"""Triton's kernels compiled for cards that are not here. `python -m support.compiled verify 90`
prints what each needs of a card at the sizes of a model of 8 billion parameters (`verify 90 6`: one
call in six of them), `layer` what one layer of each of SHAPES launches, `most 90` the most of all
passes on a card as it stands in data/measurements/gpu_compiled.json; with TRITON_INTERPRET=0."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import triton
from support.gpu_kernels import HIDDEN, E, H, K, calls
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from specexp import ops
from specexp.fast import fused
from specexp.fast.fused import Fused
from specexp.fast.gpu import launches
from specexp.models import lm
from specexp.models.cache import SlotCache

CARD = 90  # compute capability of an H100
PASSES = {  # rows, tokens of each, slots, dtype
    "verify": (1, 6, 8192, torch.bfloat16),
    "batch": (64, 6, 8192, torch.bfloat16),
    "prefill": (1, 512, 8192, torch.bfloat16),
    "float32": (1, 512, 8192, torch.float32),
}
SHAPES = ((E, HIDDEN), (2048, 8192))  # widths of Llama 3 of 8 billion parameters, and of 1


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
def compiling(capability: int, whole: bool = True) -> Iterator[list[dict[str, Any]]]:
    """Meanwhile launches compile and run nothing; yields what each kernel needs. `whole`: of a
    card, too; else they are not even compiled."""
    needs, run = [], JITFunction.run

    def compiled(self, *args, grid, warmup, **options):
        more: dict[str, Any] = {}
        if whole:
            kernel = run(self, *args, grid=grid, warmup=True, **options)
            more = {"warps": kernel.metadata.num_warps, "shared": kernel.metadata.shared}
            more |= registers(kernel.asm["cubin"])
            # strides of a cache by which whole numbers of 32 bits are multiplied
            more["narrow"] = re.findall(r"muli %\w+, %([kv]_[bhs]) : i32", kernel.asm["ttir"])
        given = dict(zip(self.arg_names, args, strict=False))
        if self.__name__ == "rotate_kernel":  # of the cache it writes its own slots alone
            given |= {"keys": None, "values": None}
        moved = {(x.untyped_storage()._cdata, x.storage_offset(), x.shape): x.nbytes
                 for x in given.values() if torch.is_tensor(x)}  # fmt: skip
        more["bytes"] = sum(moved.values())  # of all that it is given, read or written
        needs.append({"kernel": self.__name__, "sm": capability} | more)

    driver.set_active(Card(capability))
    JITFunction.run = compiled
    launches.supported = lambda device: capability >= 90
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


def launch(B: int, n: int, S: int, dtype: torch.dtype, step: int) -> None:
    """Every kernel once, or one call in `step`, on tensors that hold nothing."""
    for call in islice(calls(B, n, S, dtype, "meta"), 0, None, step):
        run, _ = ops.OPS[call.operation].kernels["cuda"]
        assert run(*call.args) is not NotImplemented, call.name


class Launched(TorchDispatchMode):
    """Notes the operations that launch something: not those that make a view or room."""

    def __init__(self, needs: list[dict[str, Any]]) -> None:
        super().__init__()
        self.needs = needs

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not func.is_view and name not in ("empty", "empty_like", "new_empty", "new_zeros"):
            self.needs.append({"kernel": name})
        return func(*args, **(kwargs or {}))


def layer(width: int, hidden: int, B: int, n: int, S: int, dtype: torch.dtype) -> dict[str, Any]:
    """What one layer of a pass launches, in order, and the least bytes that it can move: weights,
    keys and values of all slots, and its input and output."""
    shape = {"num_attention_heads": H, "num_key_value_heads": K, "vocab_size": 1000}
    config = LlamaConfig(hidden_size=width, intermediate_size=hidden, num_hidden_layers=3, **shape)
    with torch.device("meta"), torch.inference_mode():
        module = LlamaForCausalLM(config).to(dtype)
        base, head = module.model, module.lm_head.weight
        net = Fused(base.layers, base.rotary_emb, base.norm, head, base.embed_tokens.weight)
        tokens, cache = torch.empty(B, n, dtype=torch.int64), SlotCache(3, B, S)
        cache.aim(slice(0, B), tokens, S)
        for operation in (
            fused.rotate_and_store, fused.attention, fused.add_norm, fused.product_add_norm,
            fused.product_swiglu, lm.product,
        ):  # fmt: skip
            op = ops.OPS[operation]
            op.chosen[torch.device("meta")] = op.kernels["cuda"][0]
        with compiling(CARD, whole=False) as needs, Launched(needs):
            net(tokens, tokens, cache, (), 1)
    names = [need["kernel"] for need in needs]
    _, first, second = (at for at, name in enumerate(names) if name == "rotate_kernel")
    weights = sum(w.nbytes for w in base.layers[1].parameters())
    least = weights + cache.layers[1].keys[:, :, :S].nbytes * 2 + 2 * B * n * width * dtype.itemsize
    return {"launches": needs[first:second], "least": least}


def table(name: str, capability: int, step: int = 1) -> list[dict[str, Any]]:
    """What every kernel, or one call in `step`, needs in such a pass on a card."""
    with compiling(capability) as needs:
        launch(*PASSES[name], step)
    return needs


def most(capability: int) -> dict[str, dict[str, int]]:
    """The most that each kernel needs on a card in any of the passes."""
    needed: dict[str, dict[str, int]] = {}
    for need in (need for name in PASSES for need in table(name, capability)):
        so_far = needed.setdefault(need["kernel"], {})
        for what in ("registers", "stack", "shared", "warps"):
            so_far[what] = max(need[what], so_far.get(what, 0))
    return dict(sorted(needed.items()))


if __name__ == "__main__":
    ops.kernels_of(torch.device("cuda"))
    what, numbers = sys.argv[1], map(int, sys.argv[2:])
    if what == "layer":
        said: Any = [layer(*shape, *PASSES["verify"]) for shape in SHAPES]
    else:
        said = most(*numbers) if what == "most" else table(what, *numbers)
    json.dump(said, sys.stdout)
