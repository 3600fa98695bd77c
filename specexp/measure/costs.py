"""Measures the cost table of an engine on this machine.

Rounds, in which every draft token is drafted, and prefills are timed after a warm-up, in blocks of
one kind. The result is a table (serving/cost_table.py) that is independent of how it was measured.
"""

import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import cycle, islice, product
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.nn import Module
from tqdm.auto import tqdm

from specexp import theory
from specexp.drafters import Drafter, named
from specexp.engine import Engine
from specexp.errors import UserError
from specexp.measure.interleave import clock
from specexp.models.int8 import by_address
from specexp.sequences import Draft, Sequences
from specexp.serving.cost_table import CALM, Costs
from specexp.tracking.provenance import cores
from specexp.tree import Tree

FULL = 8  # a batch of n < FULL is timed FULL // n times as often: short passes are easily disturbed
BLOCK = 8  # rounds timed at one draft length before the next length takes its turn
LEAD = 4  # untimed rounds before those that are timed: see `lead`
LEAD_READS = 2  # untimed prefills of a length: the second may be captured

Times: TypeAlias = dict[Any, list[tuple[float, float]]]


def fingerprint(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """What times depend on besides the models: device, torch, threads, dtype."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        from specexp.fast.cpu.build import vectors

        name = f"{platform.machine()} {vectors()}, {cores():g} cores"
    return {
        "device": name, "torch": torch.__version__, "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
    }  # fmt: skip


def about(engine: Engine) -> dict[str, Any]:
    """`Costs.about` of a table of this engine."""
    target = engine.target
    weights = by_address(target.module.parameters()).values()
    return {
        "target": target.name, "drafter": engine.drafter.name, "rule": engine.rule.name,
        **asdict(engine.sampling), "parameters": target.parameters,
        "weight_bytes": sum(weight.nbytes for weight in weights),
        "reads": engine.drafter.reads,
        "passes": type(target.net).__name__.lower(),
        "rounds": "replayed" if engine.recorder.warm else "run",
        **fingerprint(target.device, target.dtype),
    }  # fmt: skip


def added_bytes(engine: Engine) -> int:
    """Bytes of the drafter's weights that are not shared with the target."""
    held = (part for part in vars(engine.drafter).values() if isinstance(part, Drafter))
    parts = [x for d in (engine.drafter, *held) for x in vars(d).values() if isinstance(x, Module)]
    parts += [lm.module for lm in engine.drafter.models]
    own = by_address(p for part in parts for p in part.parameters())
    shared = by_address(engine.target.module.parameters())
    return sum(weight.nbytes for address, weight in own.items() if address not in shared)


def lead(engine: Engine, gamma: int) -> int:
    """How many rounds of a kind are not timed before some are: until they are recorded and the
    CPU's caches hold what they use, which a drafter's weights leave slowly before plain steps."""
    return max(LEAD if gamma else CALM, 1 + engine.recorder.warm)


def measure(
    engine: Engine, ids: Sequence[Sequence[int]], batches: Sequence[int], gammas: Sequence[int],
    contexts: Sequence[int], repeats: int = 5,
) -> Costs:  # fmt: skip
    """Time every setting after a warm-up that includes graph capture. Times are the lower quartile
    of `repeats` (more at small batches, see FULL), since disturbances only ever add time.

    ids: token ids, strung together and cut into rows; the longest row of a batch fills its buffer,
    the shortest half of it, as among requests that come and go. Rounds of a kind are timed in
    blocks, as they follow each other in use: a plain step right after a draft finds less of its
    weights in the caches. Draft lengths take turns, and the grid is walked forwards, then
    backwards, so that a machine that is slow for a while does not look like a slope. Settings
    whose passes over several tokens seem shorter than those over one are timed once more.
    Raises UserError for settings that fit no buffer, or if the machine is too busy."""
    batches, gammas, contexts = (sorted(set(x)) for x in (batches, [0, *gammas], contexts))
    _check(engine, ids, batches, gammas, contexts, repeats)
    engine = _Unpadded.of(engine)
    slack = gammas[-1] + 1
    longest = contexts[-1] - slack - 1
    lengths = [*(2**i for i in range(longest.bit_length()) if 2**i < longest), longest]
    text = list(islice(cycle(t for row in ids for t in row), contexts[-1] * batches[-1]))

    def rows(batch: int, length: int, context: int) -> Sequences:
        sizes = [length - i * length // (2 * batch) for i in range(batch)]
        prompts = [text[i * length :][:size] for i, size in enumerate(sizes)]
        new = context - slack - length
        return Sequences.of(prompts, new, slack=slack, device=engine.target.device)

    settings = list(product(batches, contexts))
    rounds: Times = {point: [] for point in product(batches, gammas, contexts)}
    reads: Times = {n: [] for n in lengths}

    @named(engine.drafter)
    def visit(batch: int, context: int, times: int, direction: int) -> None:
        seqs = rows(batch, longest + context - contexts[-1], context)
        engine.rows.allocate(batch, seqs.tokens.shape[1], slack)
        _prefill(engine, seqs)
        count = times * max(1, FULL // batch)
        for turn, done in enumerate(range(0, count, BLOCK)):
            few = min(BLOCK, count - done)
            for gamma in gammas[:: direction * (-1) ** turn]:
                tree, before = Tree.chain(gamma), lead(engine, gamma)
                turns = [_round(engine, seqs, tree) for _ in range(before + few)]
                rounds[batch, gamma, context] += turns[before:]

    for direction, times in ((1, (repeats + 1) // 2), (-1, repeats // 2)):
        for setting in tqdm(settings[::direction], desc="costs of rounds", unit="setting", delay=1):
            visit(*setting, times, direction)
        engine.rows.allocate(1, contexts[-1])
        for repeat in range(times + LEAD_READS):
            for n in lengths[:: direction * (-1) ** repeat]:
                seqs = engine.rows.enter(rows(1, n + 1, contexts[-1]))
                seconds = _prefill(engine, seqs)
                reads[n] += [seconds] if repeat >= LEAD_READS else []
    shape = len(batches), len(gammas), len(contexts)
    draft, whole = _quartiles(rounds, *shape)
    disturbed = (whole - draft < theory.LEAST * whole[:, :1]).any(1)
    for setting, again in zip(settings, disturbed.ravel(), strict=True):
        if again:
            visit(*setting, repeats, 1)
    draft, whole = _quartiles(rounds, *shape)
    draft, verify = _split(draft, whole)
    prefill, catch_up = _quartiles(reads, len(lengths))
    return Costs(
        about(engine), tuple(batches), tuple(contexts),
        verify, tuple(gammas), draft, tuple(lengths), prefill, catch_up,
    )  # fmt: skip


def _split(draft: np.ndarray, whole: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split the time of rounds [batch, gamma, context] into that of drafting and all else.

    Drafting was timed by itself. If that leaves less of the round than a pass over several tokens
    can take, drafting gets what such a pass leaves. Raises UserError for rounds so much shorter
    than a plain step that the machine must have been busy."""
    step = whole[:, :1]
    if (worst := float((whole / step).min())) < 1 / theory.MISSED:
        raise UserError(
            f"a round took {worst:.2f} of a plain step, timed twice: the machine is too busy to "
            "measure costs; run this again when it is not"
        )
    verify = np.maximum(whole - draft, np.minimum(theory.LEAST * step, whole))
    return whole - verify, verify


def _quartiles(times: Times, *shape: int) -> np.ndarray:
    """Lower quartiles [2, *shape] of both times, the keys being in order."""
    quartiles = [np.quantile(pairs, 0.25, axis=0) for pairs in times.values()]
    return np.array(quartiles).T.reshape(2, *shape)


def _check(
    engine: Engine, ids: Sequence[Sequence[int]], batches: list[int], gammas: list[int],
    contexts: list[int], repeats: int,
) -> None:  # fmt: skip
    for name, values, least in (
        ("batch", batches, 1), ("gamma", gammas, 0), ("context", contexts, gammas[-1] + 4),
        ("repeats", [repeats], 1),
    ):  # fmt: skip
        if not values or values[0] < least:
            shortest = values[0] if values else "missing"
            raise UserError(f"{name} is {shortest}; to measure costs it must be {least} or more")
    for model, needed, instead in (
        (engine.target, True, ""), (engine.drafter, gammas[-1] > 0, ", or gamma 0 alone"),
    ):  # fmt: skip
        if needed and contexts[-1] > model.context:
            raise UserError(
                f"context {contexts[-1]} exceeds the {model.context} tokens that {model.name} "
                f"serves; measure shorter ones{instead}"
            )
    if not any(ids):
        raise UserError("no prompt to measure costs on; give at least one token")


class _Unpadded(Engine):
    """An engine whose padding is replaced by tokens, so that every draft token asked for is
    verified and timed, also where passes leave out padding."""

    def draft(self, seqs: Sequences, tree: Tree) -> Draft:
        draft = super().draft(seqs, tree)
        return replace(draft, tokens=draft.tokens.clamp(min=0))


@torch.inference_mode()
def _prefill(engine: Engine, seqs: Sequences) -> tuple[float, float]:
    """Prefill; seconds of the target and of the drafter."""
    begin = clock(engine.target.device)
    target_s, drafter_s = (clock(engine.target.device) for _ in engine.rows.prefill(seqs))
    return target_s - begin, drafter_s - target_s


@torch.inference_mode()
def _round(engine: Engine, seqs: Sequences, tree: Tree) -> tuple[float, float]:
    """A round, undone afterwards; seconds to draft, and of all of it. Both are timed right after a
    whole round, as in use: a drafter that has just drafted finds its weights in the caches."""
    length, limit = seqs.length.clone(), seqs.limit.clone()

    def took(call: Callable[[Sequences, Tree], Any]) -> float:
        begin = clock(engine.target.device)
        call(seqs, tree)
        seconds = clock(engine.target.device) - begin
        seqs.length.copy_(length)
        seqs.limit.copy_(limit)
        return seconds

    def whole(seqs: Sequences, tree: Tree) -> None:
        engine.start(seqs, tree)()

    draft = partial(engine.recorder.run_stage, engine, "draft", engine.draft)
    if tree.depth:
        took(whole)
    whole_s = took(whole)
    return took(draft) if tree.depth else 0.0, whole_s
