"""The suite `memory`: how much a run had in memory at most, beside what its configs foretold.

A GPU's allocator tells its own peak. On a CPU the tensors alive after every operation are added up,
which is what the program asked for and not what the process took.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specexp import memory
from specexp.engine import Engine
from specexp.lab.build import Rig
from specexp.lm import LM
from specexp.quantised import held


class Alive(TorchDispatchMode):
    """Bytes of tensors made while it lasts: `now`, and at most `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {_address(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(made):
            if isinstance(x, Tensor) and _address(x) not in given | self.known:
                storage, at = x.untyped_storage(), _address(x)
                self.known.add(at)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, at, storage.nbytes())
        return made

    def _gone(self, at: int, size: int) -> None:
        self.known.discard(at)
        self.now -= size


def _address(x: Tensor) -> int:
    return x.untyped_storage()._cdata


@contextmanager
def peak(device: torch.device) -> Iterator[list[int]]:
    """A list; at the end the peak is appended, in bytes above what there was at the beginning."""
    found: list[int] = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield found
        found.append(torch.cuda.max_memory_allocated(device) - before)
        return
    with Alive() as alive:
        yield found
    found.append(alive.peak)


def weights(modules: Sequence[Any]) -> int:
    """Bytes of the memory that these modules' parameters and buffers lie in, each counted once."""
    found = {}
    for module in modules:
        if isinstance(module, nn.Module):
            for x in held([*module.parameters(), *module.buffers()]):
                found[_address(x)] = x.untyped_storage().nbytes()
    return sum(found.values())


def foretold(engine: Engine, batch: int, slots: int, prompt: int) -> memory.Need:
    """What a run of this engine needs: weights and what the drafter keeps a row as they are, all
    else computed."""
    drafter, size = engine.drafter, engine.target.dtype.itemsize
    caches = {id(lm.cache): lm for lm in reversed(engine.models)}.values()
    held = sum(lm.kv_bytes_per_token * lm.cache.batch * lm.cache.size for lm in caches if lm.cache)
    kept = sum(x.nbytes for x in drafter.state)
    law = memory.law_bytes(engine.rule.name, engine.sampling.temperature)
    return memory.Need(
        weights([lm.module for lm in engine.models] + list(vars(drafter).values())),
        held + kept,
        memory.work_bytes(
            [lm.config for lm in engine.models], size, batch, slots, prompt,
            engine.policy.widest, law, len(drafter.taps),
        ),
    )  # fmt: skip


def held_per_token(lm: LM) -> float:
    """Bytes of keys and values that a cache really holds for each of its slots."""
    assert lm.cache is not None
    return sum(x.nbytes for x in lm.cache._buffers()) / (lm.cache.batch * lm.cache.size)


def peaks(
    rig: Rig, texts: Sequence[str], batches: Sequence[int], max_new_tokens: int
) -> dict[str, Any]:
    """One row a batch: what was foretold, and the peak; one a model: bytes of keys and values for a
    token, stated and held. Prompts repeat where there are fewer than rows."""
    ids, rows, models = rig.encode(texts), [], []
    if rig.target.device.type == "cuda":  # the first product of all takes room that is kept
        rig.apart().engine.generate(ids[:1], 2)
    for batch in sorted(set(batches)):
        engine = rig.apart().engine
        engine.eos = ()
        prompts = [ids[i % len(ids)] for i in range(batch)]
        with peak(rig.target.device) as found:
            engine.generate(prompts, max_new_tokens)
        assert engine.target.cache is not None
        slots = engine.target.cache.size
        need = foretold(engine, batch, slots, max(map(len, prompts)))
        measured = need.weights + found[0]
        rows.append(
            {"batch": batch, "slots": slots, "weights": need.weights, "cache": need.cache}
            | {"work": need.work, "foretold": need.total, "measured": measured}
            | {"ratio": measured / need.total}
        )
        models = [
            {"model": lm.name, "stated": lm.kv_bytes_per_token, "held": held_per_token(lm)}
            for lm in engine.models
            if lm is engine.target or lm.cache is not engine.target.cache
        ]
    return {"drafter": rig.drafter, "new_tokens": max_new_tokens, "rows": rows, "models": models}
