"""One pairing measured: acceptance, latency of one stream, throughput under batch, costs of passes.

Every timed comparison is interleaved: after a warm-up, plain decoding and speculation take turns on
the same prompts in the same process, in alternating order. Both sides count delivered tokens and
decoding time without prefill. The tables hold raw counts and seconds; `summaries` computes ratios
and intervals from them.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, cycle, islice, product
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from specexp import theory
from specexp.api import Pairing
from specexp.drafters import named
from specexp.engine import Engine, Generation
from specexp.errors import UserError, brief
from specexp.measure import interleave, statistics
from specexp.measure.costs import added_bytes, lead
from specexp.measure.exactness import ALIKE, remembers
from specexp.measure.interleave import clock
from specexp.measure.prompts import Prompt
from specexp.models.lm import Forward
from specexp.models.memory import rounded
from specexp.policy import Fixed, single_stream_tree
from specexp.rules import drawn_from
from specexp.sequences import Draft, Sequences, Verdict
from specexp.serving.cost_table import CALM
from specexp.trace import Acceptance, Step, Trace
from specexp.tree import Tree

UNTIMED_BATCH = 16  # prompts in a batch where nothing is timed
PLAIN = ("plain",)  # the key of plain decoding: a tuple, since any string may name another arm
VISIT_ROUNDS = 5  # rounds of one kind that are timed at each visit

log = logging.getLogger("specexp")


def arms(pairing: Pairing, rivals: Iterable[str]) -> dict[str, Pairing]:
    """This pairing and its variants with the drafters `rivals`, each under the shortest name that
    distinguishes it from the others. A drafter that is named twice appears once."""
    every = [pairing, *(pairing.with_(drafter=name) for name in rivals)]
    names = {arm.named: brief(arm.named, [other.named for other in every]) for arm in every}
    return {names[arm.named]: replace(arm, drafter=names[arm.named]) for arm in every}


def acceptance(
    pairings: Sequence[Pairing], prompts: Sequence[Prompt], max_new_tokens: int,
    temperatures: Iterable[float] | None = None,
) -> pd.DataFrame:  # fmt: skip
    """How often each pairing's draft tokens are accepted; nothing is timed.

    temperatures: run every pairing at each of these instead of at its own.

    One row per pairing, temperature and prompt, with columns pairing, rule, gamma (the depth of the
    deepest draft), temperature, category, question_id, turn; drafted, accepted, emitted, cut
    (tokens), passes (of the target); record (`Acceptance`), and the rounds behind them (see
    `summaries.rounds`). Raises UserError if a pairing drafts nothing."""
    for pairing in pairings:
        insist_on_drafts(pairing.engine)
    rows: list[dict[str, Any]] = []
    runs = [p.with_(temperature=t) for t in temperatures or () for p in pairings] or pairings
    with tqdm(total=len(runs) * len(prompts), desc="acceptance", unit="prompt") as bar:
        for pairing in runs:
            for chunk in _chunks(prompts):
                trace = pairing.generate([p.text for p in chunk], max_new_tokens).trace
                for row, prompt in enumerate(chunk):
                    rows.append(_labels(pairing, prompt) | _counts(trace, row))
                bar.update(len(chunk))
    return pd.DataFrame(rows)


def insist_on_drafts(engine: Engine) -> None:
    """Raises UserError if an engine drafts nothing."""
    if not (engine.drafter.context and single_stream_tree(engine.policy).depth):
        raise UserError("gamma is 0 or the drafter plain, so nothing is drafted; use others")


@torch.inference_mode()
def bias(pairing: Pairing, prompts: Sequence[Prompt], max_new_tokens: int) -> pd.Series:
    """The bias of the rule: total variation (0 to 1) between the distribution of a round's first
    emitted token and the target's, averaged over rounds; 0 for an exact rule. One value per prompt,
    indexed by question_id. For chains only."""
    engine, means = pairing.engine, []
    for prompt in tqdm(prompts, desc="bias", unit="prompt"):
        [ids], distances = pairing.encode([prompt.text]), list[float]()
        for draft, seen, *_ in in_stages(engine, ids, max_new_tokens):
            p, x = engine.sampling.law(seen.logits)[:, :1], draft.tokens[:, 1:2, None]
            emitted = p
            if x.numel() and x.item() >= 0:
                q = drawn_from(None if draft.q is None else draft.q[:, :1], p, x)
                emitted = engine.rule.emitted(p, q)
            distances.append(float((emitted - p).abs().sum()) / 2)
        means.append(np.mean(distances))
    return pd.Series(means, index=[p.question_id for p in prompts], name="total_variation")


def in_stages(
    engine: Engine, ids: Sequence[int], max_new_tokens: int, eos: Sequence[int] = ()
) -> Iterator[tuple[Draft, Forward, Verdict, Step]]:
    """The rounds of one row, as the engine runs them: for each its draft, the target pass over it,
    the rule's verdict, and its step as in a trace."""
    tree, device, length = single_stream_tree(engine.policy), engine.target.device, len(ids)
    batch = Sequences.of([ids], max_new_tokens, slack=engine.policy.widest, eos=eos, device=device)
    seqs = engine.begin(batch)
    while bool(seqs.live.all()):
        draft = engine.draft(seqs, tree.cut(engine.drafter.context - length))
        seen = engine.verify(seqs, draft)
        verdict = engine.accept(draft, seen)
        [step] = engine.steps(engine.commit(seqs, draft, verdict, seen).tolist())
        yield draft, seen, verdict, step
        length += step.emitted


def _chunks(prompts: Sequence[Prompt]) -> list[Sequence[Prompt]]:
    return [prompts[i : i + UNTIMED_BATCH] for i in range(0, len(prompts), UNTIMED_BATCH)]


def edges(
    arms: Mapping[str, Pairing], prompts: Sequence[Prompt], max_new_tokens: int
) -> pd.DataFrame:
    """How often each draft token of a fixed tree is accepted where its parent is; nothing is timed.
    Trees that are grown have another shape each round and are left out.

    One row an arm and node, with columns arm, node, parent, depth, child (the number among its
    siblings), accepted (rounds) and rate (of the rounds that accepted its parent, but for those
    whose output ended there)."""
    rows: list[dict[str, Any]] = []
    for name, pairing in arms.items():
        tree = single_stream_tree(pairing.engine.policy)
        if tree.width:
            continue
        accepted, judged = np.zeros((2, len(tree)), int)
        for chunk in _chunks(prompts):
            output = pairing.generate([p.text for p in chunk], max_new_tokens)
            for row, tokens in enumerate(output.tokens):
                new = iter(tokens)
                for step in output.trace.steps(row):
                    path = _path(tree, step, [next(new) for _ in range(step.emitted)])
                    accepted[path] += 1
                    judged[path[: len(path) - (step.emitted < step.accepted)]] += 1
        for node, (parent, depth) in enumerate(zip(tree.parents, tree.depths, strict=True)):
            rows.append({"arm": name, "node": node, "parent": parent, "depth": depth,
                         "child": node - tree.parents.index(parent), "accepted": accepted[node],
                         "rate": accepted[node] / max(1, judged[max(0, parent)])})  # fmt: skip
    return pd.DataFrame(rows)


def _path(tree: Tree, step: Step, emitted: list[int]) -> list[int]:
    """The nodes that a round accepted, from the root; without those behind an output's end."""
    path = [0]
    for token in emitted[: step.accepted]:
        children = (i for i, parent in enumerate(tree.parents) if parent == path[-1])
        path.append(next(i for i in children if step.draft[i - 1] == token))
    return path


def latency(
    pairing: Pairing, prompts: Sequence[Prompt], gammas: Sequence[int], max_new_tokens: int,
    repeats: int = 1,
) -> pd.DataFrame:  # fmt: skip
    """`latency_by_arm` with a draft length as each arm, without the column arm."""
    arms: dict[Any, Pairing] = {gamma: pairing.with_(gamma=gamma) for gamma in gammas}
    return latency_by_arm(arms, prompts, max_new_tokens, repeats).drop(columns="arm")


def latency_by_arm(
    arms: dict[Any, Pairing], prompts: Sequence[Prompt], max_new_tokens: int, repeats: int = 1
) -> pd.DataFrame:
    """The latency of one stream: all arms and plain decoding take turns on every prompt. Repeats in
    which a drafter remembers the text are left out (see `_drop_remembered_repeats`).

    One row per arm, prompt and repeat: the columns of `acceptance`, and arm, repeat, ttft_s, s and
    tokens (decoding time in seconds without prefill, delivered tokens), plain_s and plain_tokens
    (the same for plain decoding)."""
    pairing = next(iter(arms.values()))
    engines = {PLAIN: pairing.engine.plain()} | {arm: each.engine for arm, each in arms.items()}
    texts = pairing.encode([p.text for p in prompts])
    notes = {arm: remembers(each.engine, texts, max_new_tokens) for arm, each in arms.items()}
    items = [[ids] for ids in texts] * repeats
    turns = _by_turns(engines, items, max_new_tokens, "latency")
    rows = [
        _labels(arms[arm], prompt)
        | {"arm": arm, "repeat": repeat, "ttft_s": output.trace.ttft_s}
        | {"s": output.trace.decode_s, "tokens": output.trace.emitted}
        | {"plain_s": plain.trace.decode_s, "plain_tokens": plain.trace.emitted}
        | _counts(output.trace)
        for (repeat, prompt), outputs in zip(product(range(repeats), prompts), turns, strict=True)
        for plain in [outputs.pop(PLAIN)]
        for arm, output in outputs.items()
    ]
    return _drop_remembered_repeats(pd.DataFrame(rows), "arm", notes)


def throughput(
    pairing: Pairing, prompts: Sequence[Prompt], batches: Sequence[int], max_new_tokens: int,
    repeats: int = 2,
) -> pd.DataFrame:  # fmt: skip
    """Speculation and plain decoding take turns on static batches of each size.

    Every size sees all prompts; the last batch is filled with some of them again, which do not
    count. A size with fewer than `statistics.MIN_REPEATS` batches is repeated more often. Rows go
    on after EOS and only rounds in which every row is live are timed, so the batch really has that
    size; tokens and passes count in all rounds up to a row's EOS, as for one stream.

    One row per batch size, prompt and repeat: the columns of `acceptance`, and batch, number (of
    the batch of prompts), repeat; s, tokens, plain_s, plain_tokens as in `latency_by_arm`, where
    the seconds are the prompt's share of its batch's: its rounds times `row_round_s`; and context
    (slots of the batch's buffer, without those of a draft)."""
    fast, plain = pairing.with_().engine, pairing.engine.plain()
    fast.eos = plain.eos = ()
    texts = pairing.encode([p.text for p in prompts])
    notes = dict.fromkeys(batches, remembers(fast, texts, max_new_tokens))
    rows: list[dict[str, Any]] = []
    for batch in batches:
        count = -(-len(texts) // batch)
        often = max(repeats, -(-statistics.MIN_REPEATS // count))
        endless = cycle(zip(prompts, texts, strict=True))
        items = [list(islice(endless, batch)) for _ in range(count)] * often
        ids = [[text for _, text in item] for item in items]
        engines, numbers = {PLAIN: plain, "fast": fast}, product(range(often), range(count))
        turns = _by_turns(engines, ids, max_new_tokens, f"throughput, batch {batch}")
        for (repeat, number), item, outputs in zip(numbers, items, turns, strict=True):
            s, plain_s = (row_round_s(outputs[arm].trace) for arm in ("fast", PLAIN))
            drafted, plainly = (outputs[arm].until(pairing.engine.eos) for arm in ("fast", PLAIN))
            context = max(len(text) for _, text in item) + max_new_tokens
            for row, (prompt, _) in enumerate(item[: len(prompts) - number * batch]):
                counts, plain_passes = _counts(drafted, row), len(plainly.steps(row))
                rows.append(
                    _labels(pairing, prompt) | counts
                    | {"batch": batch, "number": number, "repeat": repeat, "context": context}
                    | {"s": s * counts["passes"], "tokens": counts["emitted"]}
                    | {"plain_s": plain_s * plain_passes, "plain_tokens": plain_passes}
                )  # fmt: skip
    return _drop_remembered_repeats(pd.DataFrame(rows), "batch", notes)


def _by_turns(
    engines: Mapping[Any, Engine], items: Sequence[list[list[int]]], max_new_tokens: int, label: str
) -> Iterator[dict[Any, Generation]]:
    """Let all engines generate every item, a batch of token ids, in turns; yields their outputs of
    each item.

    If rounds are recorded, one item of every buffer size is generated first as a warm-up, the
    largest twice: engines share the target's cache, and recordings are lost when it grows."""
    widths = {engine.policy.widest for engine in engines.values()}
    shapes = {
        tuple(rounded(max(map(len, item)) + max_new_tokens + width) for width in widths): item
        for item in items
        if any(engine.recorder.warm for engine in engines.values())
    }
    largest_first = [item for _, item in sorted(shapes.items(), reverse=True)]
    arms = {arm: partial(engine.generate, max_new_tokens=max_new_tokens)
            for arm, engine in engines.items()}  # fmt: skip
    device = next(iter(engines.values())).target.device
    warm = [*largest_first[:1], *largest_first]
    turns = interleave.time_in_turns(arms, items, device, label, warm=warm)
    for each in zip(*turns.values(), strict=True):
        yield {arm: turn.result for arm, turn in zip(turns, each, strict=True)}


def _drop_remembered_repeats(
    samples: pd.DataFrame, by: str, notes: Mapping[Any, str]
) -> pd.DataFrame:
    """The samples without the later repeats of arms (values of the column `by`) whose drafter
    remembers text: because `notes` say so (`exactness.remembers`), or because the acceptance length
    changes between repeats of the same prompts with the same noise. Logs a warning for each."""
    counts = samples.pivot_table(["accepted", "passes"], by, "repeat", "sum")
    lengths = 1 + counts["accepted"] / counts["passes"]
    differ = lengths.max(axis=1) > (1 + ALIKE) * lengths.min(axis=1)
    remembering = [name for name in lengths.index if differ[name] or notes[name]]
    for name in remembering:
        repeats = f"{', '.join(f'{x:.2f}' for x in lengths.loc[name])} tokens per pass in repeats"
        log.warning(
            f"{by} {name}: its drafter remembers text ({notes[name] or repeats}), so later repeats "
            "would be of text that it has seen; only the first repeat counts"
        )
    return samples[(samples["repeat"] == 0) | ~samples[by].isin(remembering)]


def row_round_s(trace: Trace) -> float:
    """A row's share of a round's seconds, over the rounds in which every row was live."""
    full = [r for r in trace.rounds if len(r.steps) == trace.batch]
    return (full[-1].end_s - trace.prefill_s) / (len(full) * trace.batch)


def arm_costs(
    arms: dict[Any, Pairing], prompts: Sequence[Prompt], repeats: int = 40
) -> pd.DataFrame:
    """What a round of each arm costs, in time (see `_round_seconds`) and in memory.

    One row per arm, with columns arm; draft_s, verify_s, rest_s (seconds of a round) and step_s (of
    a plain step); drafted (draft tokens of a round); weights_mb and kv_bytes (MB, and bytes per
    token, that the drafter needs besides the target's)."""
    first = next(iter(arms.values()))
    engines = {None: first.engine.plain(), **{arm: pairing.engine for arm, pairing in arms.items()}}
    kinds = {arm: (engine, single_stream_tree(engine.policy)) for arm, engine in engines.items()}
    seconds = _round_seconds(kinds, first.encode([p.text for p in prompts]), repeats)
    step = sum(seconds.pop(None))
    return pd.DataFrame(
        {
            "arm": arm, "draft_s": draft, "verify_s": verify, "rest_s": rest, "step_s": step,
            "drafted": len(kinds[arm][1]) - 1,
            "weights_mb": added_bytes(engines[arm]) / 1e6,
            "kv_bytes": sum(m.kv_bytes(m.cache.size) // m.cache.size
                            for m in engines[arm].drafter.models
                            if m.cache and m.cache is not engines[arm].target.cache),
        }
        for arm, (draft, verify, rest) in seconds.items()
    )  # fmt: skip


def pass_costs(
    pairing: Pairing, prompts: Sequence[Prompt], gammas: Sequence[int], repeats: int = 40
) -> pd.DataFrame:
    """What a round costs at each draft length (see `_round_seconds`).

    One row per draft length, with columns gamma and draft_s, verify_s, rest_s (seconds to draft
    gamma tokens, to verify them, and for the rule and the commit). Row 0 is a plain step."""
    kinds = {g: (pairing.engine, Tree.chain(g)) for g in sorted({0, *gammas})}
    seconds = _round_seconds(kinds, pairing.encode([p.text for p in prompts]), repeats)
    return pd.DataFrame(
        {"gamma": gamma, "draft_s": draft, "verify_s": verify, "rest_s": rest}
        for gamma, (draft, verify, rest) in seconds.items()
    )


def _round_seconds(
    kinds: Mapping[Any, tuple[Engine, Tree]], texts: Sequence[list[int]], repeats: int
) -> dict[Any, tuple[float, float, float]]:
    """Seconds to draft, to verify and for the rest of a round, for each kind of round; the first
    kind is a plain step.

    The kinds take turns, `repeats` rounds each, continuing one prompt after another. Rounds are
    timed as a whole and, separately, stage by stage. The three figures add up to the whole round;
    stages whose sum exceeds it are scaled down to it. If a pass over several tokens seems faster
    than a plain one, everything is timed once more and the second timing counts."""
    seconds = _round_seconds_once(kinds, texts, repeats)
    (_, plain, _), *_ = seconds.values()
    least = min(verify for _, verify, _ in seconds.values())
    return seconds if least >= theory.LEAST * plain else _round_seconds_once(kinds, texts, repeats)


def _round_seconds_once(
    kinds: Mapping[Any, tuple[Engine, Tree]], texts: Sequence[list[int]], repeats: int
) -> dict[Any, tuple[float, float, float]]:
    deepest = max(tree.depth for _, tree in kinds.values())
    # one buffer size for all, so that rounds are recorded only once
    size = max(map(len, texts)) + (CALM + 2 * VISIT_ROUNDS) * (1 + deepest)
    # kinds share the target's cache: each prefills again
    arms = {
        kind: partial(_time_rounds, engine, tree, size) for kind, (engine, tree) in kinds.items()
    }
    visits = islice(cycle(texts), -(-repeats // VISIT_ROUNDS))
    device = next(iter(kinds.values()))[0].target.device
    seconds = {}
    for kind, turns in interleave.time_in_turns(arms, list(visits), device, "rounds").items():
        whole, apart = zip(*(turn.result for turn in turns), strict=True)
        (all_s,), (draft, verify) = _typical(chain(*whole)), _typical(chain(*apart))
        share = min(1.0, all_s / (draft + verify))
        seconds[kind] = draft * share, verify * share, max(0.0, all_s - draft - verify)
    return seconds


def _typical(rounds: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
    """rounds: (tokens drafted, seconds ...). The median seconds for each number of tokens drafted,
    averaged by its frequency, since a lookup drafts more in some rounds than in others."""
    alike = pd.DataFrame(rounds).groupby(0)
    return tuple(np.average(alike.median(), axis=0, weights=alike.size()))


@torch.inference_mode()
def _time_rounds(
    engine: Engine, tree: Tree, size: int, text: list[int]
) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
    """Time rounds that continue a prompt: (tokens drafted, seconds) of whole rounds, then (tokens
    drafted, seconds to draft, seconds to verify) of rounds timed stage by stage.

    The first rounds are not counted (`costs.lead`). At the end of the output or the drafter's
    context rows are reset to the text."""
    tree = tree.cut(engine.drafter.context - len(text))
    reach = min(size, engine.target.context, engine.drafter.context if tree.depth else size)
    new = max(1, reach - len(text))
    seqs = engine.begin(Sequences.of([text], new, slack=tree.room, device=engine.target.device))
    length, limit = seqs.length.clone(), seqs.limit.clone()
    first = lead(engine, tree.depth)
    whole: list[tuple[float, ...]] = []
    apart: list[tuple[float, ...]] = []

    def drafted(step: Step) -> int:
        if step.done:
            seqs.length.copy_(length)
            seqs.limit.copy_(limit)
        return step.drafted

    with named(engine.drafter, whole):
        while len(whole) < first + VISIT_ROUNDS:
            begin = clock(engine.target.device)
            for rows, end in engine.start(seqs, tree, first + VISIT_ROUNDS - len(whole))():
                whole.append((drafted(*engine.steps(rows)), end - begin))
                begin = end
        while len(apart) < VISIT_ROUNDS:
            now = [clock(engine.target.device)]
            draft = engine.recorder.run_stage(engine, "draft", engine.draft, seqs, tree)
            now.append(clock(engine.target.device))
            engine.recorder.run_stage(engine, "verify", engine.verify, seqs, draft)
            now.append(clock(engine.target.device))
            apart.append((drafted(*engine.run(seqs, tree)), *np.diff(now)))
    return whole[first:], apart


def _counts(trace: Trace, row: int = 0) -> dict[str, Any]:
    """Columns: counts of one row, their `Acceptance`, and the rounds behind them."""
    record = Acceptance.of(trace.steps(row))
    record.check()
    rounds = [
        (number, r.end_s, s.row, s.drafted, s.accepted, s.emitted)
        for number, r in enumerate(trace.rounds)
        for s in r.steps
        if s.row == row
    ]
    return {
        "drafted": record.drafted, "accepted": record.accepted, "emitted": record.emitted,
        "passes": record.passes, "cut": record.cut, "record": record, "rounds": rounds,
    }  # fmt: skip


def _labels(pairing: Pairing, prompt: Prompt) -> dict[str, Any]:
    """Columns: what was run. gamma: the depth of a policy's one tree, or a bound on that of all."""
    policy = pairing.engine.policy
    return {
        "pairing": pairing.drafter, "rule": pairing.engine.rule.name,
        "gamma": policy.tree.depth if isinstance(policy, Fixed) else policy.widest - 1,
        "temperature": pairing.options["temperature"],
        "category": prompt.category, "question_id": prompt.question_id, "turn": prompt.turn,
    }  # fmt: skip
