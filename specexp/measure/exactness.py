"""Losslessness check of every run: is the output the target's own, token by token?

Greedy output is compared with plain greedy decoding. Sampled output is compared under common noise:
with the rule Match, speculative output must equal plain sampling exactly. The two paths sum the
same numbers in different orders, so a near tie may go either way. At the first difference of a row
the logits are computed again in float32 without a cache: the difference is a `tie` if both tokens
are within rounding of winning there, else a `bug`. (Tests prove by exact enumeration that the exact
rules keep the distribution; what a run can still get wrong is caches, masks and positions.)
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from specexp.engine import Engine
from specexp.models.lm import LM
from specexp.models.memory import free_memory
from specexp.rules import Match
from specexp.sampling import TOKEN, Noise, mix

# Rounding error of a logit, relative to the largest in magnitude: 8 units in the last place for
# bfloat16; for float32 the error of reordered sums over a few thousand terms.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 8 * 2.0**-8}


@dataclass(frozen=True)
class Divergence:
    """The first difference of a row. `position`: index in its output; a token is -1 where that
    output had already ended; `kind`: tie or bug."""

    row: int
    position: int
    plain: int
    speculative: int
    kind: str


@dataclass
class Exactness:
    """The result of a check. `tokens`: how many agree before each row's first difference.

    `lossy`: name of the engine's rule if it changes the target's distribution, whatever the
    comparison shows; `replaced`: its name if Match was run in its place; both else "".
    """

    rows: int
    lossy: str = ""
    replaced: str = ""
    tokens: int = 0
    divergences: list[Divergence] = field(default_factory=list)

    @property
    def ties(self) -> int:
        return sum(d.kind == "tie" for d in self.divergences)

    @property
    def bugs(self) -> int:
        return sum(d.kind == "bug" for d in self.divergences)

    @property
    def metrics(self) -> dict[str, float]:
        return {
            "exact/pass": float(self.bugs == 0 and not self.lossy),
            "exact/ties": float(self.ties),
            "exact/bugs": float(self.bugs),
            "exact/tokens": float(self.tokens),
        }

    def __str__(self) -> str:
        result = "identical" if not self.divergences else f"{self.ties} near ties, {self.bugs} bugs"
        rows = "1 row" if self.rows == 1 else f"{self.rows} rows"
        how = f", Match in place of {self.replaced}," if self.replaced else ""
        line = f"{self.tokens} tokens in {rows}{how} compared with plain decoding: {result}"
        return f"{line}; but the rule is {self.lossy}" if self.lossy else line


def certify(engine: Engine, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Exactness:
    """Decode the prompts both ways, all rows in one ragged batch, and classify every difference.

    prompts: token ids of each row. Greedy output is made by the engine's own rule, sampled output
    by Match."""
    coupled = Engine.of(engine, rule=Match()) if engine.sampling.temperature > 0 else engine
    fast = coupled.generate(prompts, max_new_tokens).tokens
    return compare(engine, prompts, fast, max_new_tokens, range(len(prompts)))


def compare(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    fast: Sequence[Sequence[int]],
    max_new_tokens: int,
    streams: Sequence[int],
) -> Exactness:
    """Classify the differences between plain decoding and `fast`, outputs made greedily or under
    Match. streams: the noise stream of each row."""
    plain = engine.plain().generate(prompts, max_new_tokens, streams).tokens
    rule = engine.rule
    sampled = engine.sampling.temperature > 0
    lossy = rule.name if rule.lossy and sampled else ""
    replaced = rule.name if not rule.samples and sampled else ""
    exact, reference = Exactness(len(prompts), lossy, replaced), Reference(engine.target)
    for row, (prompt, a, b) in enumerate(zip(prompts, plain, fast, strict=True)):
        same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        if same is None and len(a) != len(b):
            same = min(len(a), len(b))  # one ended earlier, which rounding cannot explain
        exact.tokens += len(a) if same is None else same
        if same is None:
            continue
        x, y = (t[same] if same < len(t) else -1 for t in (a, b))
        text = [*prompt, *a[:same]]
        tie = min(x, y) >= 0 and {x, y} <= near_winners(engine, text, streams[row], reference)
        exact.divergences.append(Divergence(row, same, x, y, "tie" if tie else "bug"))
    return exact


def near_winners(
    engine: Engine, text: Sequence[int], stream: int, reference: Reference
) -> set[int]:  # fmt: skip
    """The tokens that could win after `text` within rounding, on this noise; from a float32 pass
    without a cache."""
    target, sampling = engine.target, engine.sampling
    logits = reference.logits(text)
    eps = TOLERANCE[target.dtype]
    slack = eps * float(logits.abs().max())
    if sampling.temperature == 0:
        return set(torch.nonzero(logits >= logits.max() - 2 * slack).flatten().tolist())
    device = logits.device
    key = mix(mix(torch.tensor([stream], device=device)) + len(text))
    winners: set[int] = set()
    for top_p in {sampling.top_p, min(1.0, sampling.top_p + eps), sampling.top_p * (1 - eps)}:
        p = replace(sampling, top_p=top_p).law(logits[None])
        race = Noise(engine.seed).race(p, key, TOKEN).log()[0]
        near = race >= race.max() - 2 * slack / sampling.temperature
        winners |= set(torch.nonzero(near).flatten().tolist())
    return winners


class Reference:
    """The target in at least float32, without a cache. A bfloat16 target is copied at first use, to
    its own device, or to main memory if the device has no room."""

    def __init__(self, target: LM) -> None:
        self.target = target

    def logits(self, text: Sequence[int]) -> torch.Tensor:
        """Logits [V] after `text`, on the target's device."""
        module, ids = self._module, torch.tensor([list(text)], device=self._device)
        with torch.inference_mode():
            last = module(input_ids=ids, use_cache=False).logits[0, -1, : self.target.vocab]
        return last.float().to(self.target.device)

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

        def moved(x: torch.Tensor) -> torch.Tensor:
            return (x.detach().float() if x.is_floating_point() else x).to(self._device)

        copies = {id(b): moved(b) for b in module.buffers()}
        copies |= {id(p): nn.Parameter(moved(p), requires_grad=False) for p in module.parameters()}
        return copy.deepcopy(module, copies)
