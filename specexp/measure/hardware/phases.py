"""The suite `round`: where a round's time goes, phase by phase, plain and speculative.

A clean loop has no clocks except the one at the end of every round. The phases come from generating
the same outputs again, round by round in the same state, with a clock between the stages.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from specexp import theory
from specexp.api import Pairing
from specexp.engine import Engine
from specexp.fast.cpu import passes
from specexp.measure import interleave, statistics
from specexp.sequences import Sequences
from specexp.trace import Acceptance, Trace

T = TypeVar("T")
PHASES = ("draft", "verify", "accept", "commit", "host")


class PhaseClock:
    """A clock for `Engine(clock=...)`: seconds by phase, summed over rounds.

    The device is synchronised at every border, and phases have no gaps between them. draft, verify,
    accept and commit are the engine's stages; host: everything between two rounds, which is reading
    the report and Python's work on it. rounds: their number. Rounds that are otherwise replayed
    whole are split: draft and verify are replayed, the rest is launched one operation at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.last: float | None = None
        self.seconds = dict.fromkeys((*PHASES, "rounds"), 0.0)

    def __call__(self, stage: str, run: Callable[[], T]) -> T:
        if stage == "draft":
            self._border("host")
        result = run()
        self._border(stage)
        self.seconds["rounds"] += stage == "commit"
        return result

    def take(self) -> dict[str, float]:
        """The seconds since the last call; what precedes the next round, its prefill, is in no
        phase."""
        self._border("host")
        seconds, self.seconds = self.seconds, dict.fromkeys(self.seconds, 0.0)
        self.last = None
        return seconds

    def _border(self, phase: str) -> None:
        now = interleave.clock(self.device)
        if self.last is not None:
            self.seconds[phase] += now - self.last
        self.last = now


class PassTimed(Engine):
    """An engine that knows how long its passes took since the last prefill, by the clock inside
    compiled passes."""

    began_s = 0.0

    def begin(self, batch: Sequences) -> Sequences:
        seqs = super().begin(batch)
        self.began_s = passes.passes_s()
        return seqs

    @property
    def passes_s(self) -> float:
        """Seconds; 0 if rounds are not replayed or a model is not compiled: the phases are used
        instead."""
        compiled = all(isinstance(lm.net, passes.Native) for lm in self.models)
        return passes.passes_s() - self.began_s if compiled and self.recorder.warm else 0.0


def phases(
    pairing: Pairing, texts: Sequence[str], max_new_tokens: int, repeats: int
) -> dict[str, Any]:
    """Shares and milliseconds of every phase; the unit is a repeat of all texts. Plain data."""
    speculative = pairing.with_().engine
    speculative.eos = ()
    engines = {"plain": speculative.plain(), "fast": speculative}
    clocks = {side: PhaseClock(pairing.target.device) for side in engines}
    clean = {side: PassTimed.of(engine) for side, engine in engines.items()}
    clocked = {side: Engine.of(engine, clock=clocks[side]) for side, engine in engines.items()}

    def whole(side: str, ids: list[int]) -> tuple[Trace, float]:
        trace = clean[side].generate([ids], max_new_tokens).trace
        return trace, clean[side].passes_s

    def in_phases(side: str, ids: list[int]) -> dict[str, float]:
        clocked[side].generate([ids], max_new_tokens)
        return clocks[side].take()

    runs: dict[str, Callable[[str, list[int]], Any]] = {"whole": whole, "in phases": in_phases}
    arms = {(side, name): partial(run, side) for name, run in runs.items() for side in engines}
    items = pairing.encode(texts) * repeats
    # in the first turns, rounds are recorded and engines settle in the memory they share
    turns = interleave.time_in_turns(arms, items, pairing.target.device, "round", lead=2)
    results = {arm: [turn.result for turn in taken] for arm, taken in turns.items()}
    sides = {
        side: _side(results[side, "whole"], results[side, "in phases"], repeats) for side in engines
    }
    traces = {side: [trace for trace, _ in results[side, "whole"]] for side in engines}
    record = Acceptance.pooled(trace.acceptance for trace in traces["fast"])
    record.check()
    step, verify = (side["phases"]["verify"]["ms"] for side in sides.values())
    draft = sides["fast"]["phases"]["draft"]["ms"]
    predicted = record.tokens_per_pass * step / (draft + verify)
    times = [_by_repeat([t.decode_s for t in side], repeats) for side in traces.values()]
    tokens = [_by_repeat([t.emitted for t in side], repeats) for side in traces.values()]
    measured = statistics.speedup(times[0], tokens[0], times[1], tokens[1], same_work=True)
    if theory.doubts(measured.value, record.length, predicted, verify / step):
        measured = measured._replace(doubt=statistics.NOT_CREDIBLE)
    return {
        "gamma": pairing.gamma, "drafter": pairing.drafter,
        "texts": len(texts), "turns": len(items), **sides,
        "acceptance": {"rate": record.rate, "length": record.length,
                       "conditional": list(record.conditional)},
        "speedup": {"measured": measured._asdict(), "from_passes": predicted},
    }  # fmt: skip


def _side(
    clean: Sequence[tuple[Trace, float]], clocked: Sequence[dict[str, float]], repeats: int
) -> dict[str, Any]:
    """The figures of one engine. clean: traces with the seconds spent in passes (0 without a clock
    there); clocked: the same rounds by phase."""
    round_s = _by_repeat([trace.decode_s / len(trace.rounds) for trace, _ in clean], repeats)
    timed = _by_repeat([seconds / len(trace.rounds) for trace, seconds in clean], repeats)
    each = {
        phase: _by_repeat([s[phase] / s["rounds"] for s in clocked], repeats) for phase in PHASES
    }
    total = np.sum(list(each.values()), 0)
    inside = timed if timed.any() else each["draft"] + each["verify"]
    overhead = statistics.ratio(inside, round_s, same_work=True).rest()
    return {
        "round_ms": 1e3 * float(round_s.mean()),
        "phases": {
            phase: {"ms": 1e3 * float(each[phase].mean()),
                    "share": statistics.share(each[phase], total, same_work=True)._asdict()}
            for phase in PHASES
        },
        "sum_over_round": statistics.ratio(total, round_s, same_work=True)._asdict(),
        "overhead": overhead._asdict(),
    }  # fmt: skip


def _by_repeat(turns: Sequence[float], repeats: int) -> np.ndarray:
    """[repeats]: the means of a turn per text, all texts again and again."""
    return np.reshape(turns, (repeats, -1)).mean(1)
