"""The peak memory of a run beside the need predicted from model configs.

On a GPU the allocator reports the peak. On a CPU it is the largest total size of the tensors alive
after any operation: what the program asked for, not what the process occupied.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specexp.api import Pairing
from specexp.engine import Engine
from specexp.models import memory
from specexp.models.int8 import plain_tensors
from specexp.models.lm import LM


class Alive(TorchDispatchMode):
    """Counts the bytes of tensors created while active: alive `now`, and at the `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.counted: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        inputs = {_address(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(output):
            if isinstance(x, Tensor) and _address(x) not in inputs | self.counted:
                storage, at = x.untyped_storage(), _address(x)
                self.counted.add(at)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, at, storage.nbytes())
        return output

    def _gone(self, at: int, size: int) -> None:
        self.counted.discard(at)
        self.now -= size


def _address(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def peak(device: torch.device, run: Callable[[], Any]) -> int:
    """The peak of `run()`, in bytes above the start."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    with Alive() as alive:
        run()
    return alive.peak


def weights(modules: Sequence[Any]) -> int:
    """Bytes of the storage behind these modules' parameters and buffers, each counted once."""
    sizes = {}
    for module in modules:
        if isinstance(module, nn.Module):
            for x in plain_tensors([*module.parameters(), *module.buffers()]):
                sizes[_address(x)] = x.untyped_storage().nbytes()
    return sum(sizes.values())


def predicted(engine: Engine, batch: int, slots: int, prompt: int) -> memory.Need:
    """The memory that a run of this engine needs. Weights, allocated caches and the drafter's state
    are counted as they are; working memory is computed from configs."""
    drafter, size = engine.drafter, engine.target.dtype.itemsize
    caches = {id(lm.cache): lm for lm in reversed(engine.models)}.values()
    cache_bytes = sum(lm.kv_bytes(lm.cache.size) * lm.cache.batch for lm in caches if lm.cache)
    state_bytes = sum(x.nbytes for x in drafter.state)
    law = memory.law_bytes(engine.rule.name, engine.sampling.temperature)
    return memory.Need(
        weights([lm.module for lm in engine.models] + list(vars(drafter).values())),
        cache_bytes + state_bytes,
        memory.work_bytes(
            [lm.config for lm in engine.models], size, batch, slots, prompt,
            engine.policy.widest, law, len(drafter.taps),
        ),
    )  # fmt: skip


def held_per_row(lm: LM) -> float:
    """Bytes of keys and values that an allocated cache holds of a row."""
    assert lm.cache is not None
    return sum(x.nbytes for x in lm.cache._buffers()) / lm.cache.batch


def peaks(
    pairing: Pairing, texts: Sequence[str], batches: Sequence[int], max_new_tokens: int
) -> dict[str, Any]:
    """Predicted and measured peak per batch size, and the bytes of keys and values of a row for
    each model, as its config states and as its KV cache holds. Prompts repeat to fill a batch.

    As plain data, all in bytes: a row per batch with batch, slots, weights, cache, work, predicted,
    measured and their ratio; a row per model with stated and held bytes a row."""
    ids, rows, models = pairing.encode(texts), [], []
    if pairing.target.device.type == "cuda":  # torch's first product takes lasting room
        pairing.apart().engine.generate(ids[:1] * max(batches), 2)
    for batch in sorted(set(batches)):
        engine = pairing.apart().engine
        engine.eos = ()
        prompts = [ids[i % len(ids)] for i in range(batch)]
        run = partial(engine.generate, prompts, max_new_tokens)
        highest = peak(pairing.target.device, run)
        assert engine.target.cache is not None
        slots = engine.target.cache.size
        need = predicted(engine, batch, slots, max(map(len, prompts)))
        measured = need.weights + highest
        rows.append(
            {"batch": batch, "slots": slots, "weights": need.weights, "cache": need.cache}
            | {"work": need.work, "predicted": need.total, "measured": measured}
            | {"ratio": measured / need.total}
        )
        models = [
            {"model": lm.name, "stated": lm.kv_bytes(lm.cache.size), "held": held_per_row(lm)}
            for lm in engine.models
            if lm is engine.target or lm.cache is not engine.target.cache
        ]
    work = {"drafter": pairing.drafter, "new_tokens": max_new_tokens}
    return work | {"rows": rows, "models": models}
