"""The reference of every check: logits of the target's unmodified transformers module, which reads
the whole text at once, without a cache. Its weights are those of the run, 8-bit ones included.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from specexp.engine import Engine
from specexp.errors import warn_once
from specexp.models.lm import LM
from specexp.models.memory import free_memory
from specexp.models.servable import cache_name
from specexp.sampling import TOKEN, Noise, mix

# Rounding error of a logit, relative to the largest in magnitude: 8 units in the last place for
# bfloat16; for float32 the error of reordered sums over a few thousand terms; for float64 that of
# norms and routers, which modules compute in float32 whatever their dtype.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 8 * 2.0**-8}


def near_winners(
    engine: Engine, text: Sequence[int], stream: int, reference: Reference
) -> set[int]:
    """The tokens that could win after `text` within rounding, on this noise; from a float32 pass
    without a cache."""
    target, sampling = engine.target, engine.sampling
    logits = reference.logits(text)
    eps = TOLERANCE[target.dtype]
    slack = eps * float(logits[logits.isfinite()].abs().max())
    if sampling.temperature == 0:
        return set(torch.nonzero(logits >= logits.max() - 2 * slack).flatten().tolist())
    device = logits.device
    key = mix(mix(torch.tensor([stream], device=device)) + len(text))
    winners: set[int] = set()
    near_ratio = math.exp(min(50.0, 2 * slack / sampling.temperature))  # of probabilities
    for sign in (0, 1, -1):  # a cut may fall to either side of a token
        top_p = min(1.0, sampling.top_p * (1 + sign * eps))
        min_p = min(1.0, sampling.min_p * near_ratio**sign)
        p = replace(sampling, top_p=top_p, min_p=min_p).law(logits[None])
        race = Noise(engine.seed).race(p, key, TOKEN).log()[0]
        near = race >= race.max() - 2 * slack / sampling.temperature
        winners |= set(torch.nonzero(near).flatten().tolist())
    return winners


class Reference:
    """The target in at least float32, without a cache. A bfloat16 target is copied at first use, to
    its own device, or to main memory if the device has no room."""

    def __init__(self, target: LM) -> None:
        self.target = target

    def logits(self, text: Sequence[int]) -> Tensor:
        """Logits [V] after `text`, on the target's device."""
        return self._after(self._module, self._device, text, 1)[0]

    def strays(self, text: Sequence[int], logits: Tensor) -> int:
        """How many of logits [n, V], after each of the last n tokens of `text`, differ from the
        unmodified module's by more than rounding.

        Allowed is the rounding of two passes and, for a bfloat16 module, what it loses against a
        float32 copy of itself. Where the module's own passes with and without a cache differ,
        either is accepted, with a warning."""
        target, n = self.target, len(logits)
        alone, size = self._after(target.module, target.device, text, n), TOLERANCE[target.dtype]
        rounding = size * alone.masked_fill(~alone.isfinite(), 0).abs().amax(-1)
        strays = ~(_off(logits, alone) <= 2 * rounding)
        if target.dtype == torch.bfloat16 and bool(strays.any()):
            exact = self._after(self._module, self._device, text, n)
            strays &= ~(_off(logits, exact) <= 2 * (rounding + _off(alone, exact)))
        if bool(strays.any()):
            cached = self._cached(text, n)
            apart = _off(cached, alone) > 2 * rounding
            own = strays & apart & (_off(logits, cached) <= 2 * rounding)
            if bool(own.any()):
                warn_once("the module of %s gives other logits with its own cache than without "
                          "one: either are taken for its own", target.name)  # fmt: skip
            strays &= ~own
        return int(strays.sum())

    def _after(self, module: Any, device: torch.device, text: Sequence[int], n: int) -> Tensor:
        """A module's logits [n, V] after each of the last n tokens, in at least float32, after the
        target's processors."""
        ids = torch.tensor([list(text)], device=device)
        with torch.inference_mode():
            logits = module(input_ids=ids, use_cache=False, logits_to_keep=n).logits[0, -n:]
        return self._processed(text, logits)

    def _cached(self, text: Sequence[int], n: int) -> Tensor:
        """The same from the target's module with a cache of its own, the last n tokens one by
        one."""
        module, ids = self.target.module, torch.tensor([list(text)], device=self.target.device)
        name, logits = cache_name(module), []
        kept: dict[str, Any] = {}
        with torch.inference_mode():
            for tokens in (ids[:, :-n], *ids[:, -n:].split(1, 1)):
                if tokens.numel():
                    out = module(input_ids=tokens, use_cache=True, logits_to_keep=1, **kept)
                    kept = {name: out.get(name)}
                    logits.append(out.logits[0, -1:])
        return self._processed(text, torch.cat(logits[-n:]))

    def _processed(self, text: Sequence[int], logits: Tensor) -> Tensor:
        logits = logits[:, : self.target.vocab].to(self.target.device)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return self.target.after(text, logits)

    @cached_property
    def _device(self) -> torch.device:
        need = 4 * sum(p.numel() for p in self.target.module.parameters())
        here = self.target.dtype != torch.bfloat16 or need < free_memory(self.target.device)
        return self.target.device if here else torch.device("cpu")

    @cached_property
    def _module(self) -> Any:
        module = self.target.module
        if self.target.dtype != torch.bfloat16:
            return module

        def moved(x: Tensor) -> Tensor:
            return (x.detach().float() if x.is_floating_point() else x).to(self._device)

        copies = {id(b): moved(b) for b in module.buffers()}
        copies |= {id(p): nn.Parameter(moved(p), requires_grad=False) for p in module.parameters()}
        return copy.deepcopy(module, copies)


def _off(a: Tensor, b: Tensor) -> Tensor:
    """[n]: the largest difference of logits [n, V]; equal infinities differ by 0."""
    return torch.where(a == b, 0.0, (a - b).abs()).amax(-1)
