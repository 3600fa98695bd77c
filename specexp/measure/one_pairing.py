"""Measurements as tables: acceptance, latency of one stream, throughput under batch, pass costs.

Every timed comparison is interleaved: after a warm-up, plain decoding and speculation take turns on
the same prompts in the same process, in alternating order. Both sides count delivered tokens and
decoding time without prefill. The tables hold raw counts and seconds; ratios and intervals are
computed from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from specexp import theory
from specexp.api import Pairing
from specexp.engine import Engine
from specexp.errors import UserError
from specexp.measure import statistics
from specexp.measure.costs import LEAD
from specexp.measure.interleave import clock
from specexp.measure.prompts import Prompt
from specexp.models.cache import rounded
from specexp.models.int8 import held
from specexp.models.lm import LM
from specexp.policy import Load
from specexp.sequences import Sequences
from specexp.serving.cost_table import CALM
from specexp.trace import Acceptance, Trace
from specexp.tree import Tree

WARM_UP_TOKENS = 8
MIN_BATCHES = 3  # batches of prompts that an interval over batches needs
VISIT_ROUNDS = 5  # rounds of one kind that are timed at each visit


def acceptance(
    pairings: Sequence[Pairing],
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    temperatures: Iterable[float] | None = None,
    batch: int = 16,
) -> pd.DataFrame:
    """One row per pairing, temperature and prompt: counts and the `Acceptance` record itself.
    Raises UserError if a pairing drafts nothing."""
    if not all(lone_tree(pairing.engine).depth for pairing in pairings):
        raise UserError("gamma is 0, so nothing is drafted; use 1 or more")
    rows: list[dict[str, Any]] = []
    runs = (
        [r.with_(temperature=t) for t in temperatures for r in pairings]
        if temperatures
        else pairings
    )
    chunks = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
    with tqdm(total=len(runs) * len(prompts), desc="acceptance", unit="prompt") as bar:
        for pairing in runs:
            for chunk in chunks:
                made = pairing.generate([p.text for p in chunk], max_new_tokens)
                for row, prompt in enumerate(chunk):
                    rows.append(_row(pairing, prompt) | _outcome(made.trace, row))
                bar.update(len(chunk))
    return pd.DataFrame(rows)


def pooled(samples: pd.DataFrame) -> Acceptance:
    """The acceptance of all rows together."""
    return Acceptance.pooled(samples["record"])


def made(samples: pd.DataFrame) -> float:
    """Drafted tokens over gamma times rounds, for chains in rows of `acceptance`. Below 1 where a
    lookup found no match, or drafts were cut at the end of the output."""
    asked = sum(g * r.passes for g, r in zip(samples["gamma"], samples["record"], strict=True))
    return pooled(samples).drafted / asked


def acceptance_metrics(samples: pd.DataFrame) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Acceptance metrics and per-position series of one pairing, as they are logged."""
    record = pooled(samples)
    record.check()
    rate = statistics.share(*units(samples, "accepted", "drafted"))
    metrics = {
        "acceptance/rate": record.rate,
        "acceptance/rate_ci_low": rate.low,
        "acceptance/rate_ci_high": rate.high,
        "acceptance/length": record.length,
        "counts/drafted": record.drafted,
        "counts/accepted": record.accepted,
        "counts/emitted": record.emitted,
        "counts/rounds": record.passes,
    }
    if "category" in samples:
        for category, part in samples.groupby("category"):
            metrics[f"category/{category}"] = pooled(part).rate
    series = {
        "acceptance/at_position": list(record.marginal),
        "acceptance/conditional": list(record.conditional),
    }
    return metrics, series


def latency_metrics(
    samples: pd.DataFrame, predictions: pd.DataFrame
) -> tuple[dict[str, float], dict[str, Any]]:
    """Metrics and series of a gamma sweep, from `latency` and `predicted`. The headline figures are
    those of the fastest draft length."""
    measured = speedups(samples, "gamma")
    best = measured.loc[measured["speedup"].idxmax()]
    at_best = samples[samples["gamma"] == best["gamma"]]
    metrics, series = acceptance_metrics(at_best)
    by_gamma = predictions.set_index("gamma")["speedup"].to_dict()
    metrics |= _headline(best) | {
        "speedup/predicted": by_gamma[best["gamma"]],
        "speedup/best_gamma": best["gamma"],
        "latency/ttft_ms": 1e3 * at_best["ttft_s"].median(),
        "latency/tpot_ms": 1e3 / best["tok_s"],
        "latency/plain_tpot_ms": 1e3 / best["plain_tok_s"],
    }
    curves = {
        "speedup/at_gamma": measured.set_index("gamma")["speedup"].to_dict(),
        "speedup/predicted_at_gamma": by_gamma,
    }
    return metrics, series | curves


def duel_metrics(
    samples: pd.DataFrame, costs: pd.DataFrame
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Metrics and series of one arm, from its rows of `duel` and the table of `costs`."""
    metrics, series = acceptance_metrics(samples)
    row = costs.set_index("arm").loc[samples["arm"].iloc[0]]
    return metrics | _headline(speedups(samples, "arm").iloc[0]) | {
        "latency/ttft_ms": 1e3 * samples["ttft_s"].median(),
        "cost/draft_steps": row["draft_s"] / row["step_s"],
        "cost/verify_steps": row["verify_s"] / row["step_s"],
        "cost/rest_steps": row["rest_s"] / row["step_s"],
        "memory/weights_mb": row["weights_mb"],
        "memory/kv_bytes_per_token": row["kv_bytes"],
    }, series  # fmt: skip


def gains(samples: pd.DataFrame, over: str) -> pd.DataFrame:
    """Acceptance length of each rule minus that of the rule `over`, with intervals over prompts.

    samples: rows of `acceptance` at one temperature."""
    columns = ["accepted", "passes"]
    by_rule = {rule: part.set_index("question_id") for rule, part in samples.groupby("rule")}
    base = by_rule.pop(over)
    rows = []
    for rule, part in by_rule.items():
        pairs = part[columns].join(base[columns], rsuffix="_base")
        gain = statistics.interval(
            lambda a, n, b, m: a.sum(-1) / n.sum(-1) - b.sum(-1) / m.sum(-1),
            *(pairs[c] for c in pairs),
        )
        rows.append({"rule": rule, "gain": gain.value, "low": gain.low, "high": gain.high})
    return pd.DataFrame(rows)


def throughput_metrics(samples: pd.DataFrame) -> tuple[dict[str, float], dict[str, Any]]:
    """Metrics and series of a batch sweep; the headline figures are those of its smallest batch.

    `throughput/crossing_batch`: the smallest batch whose whole interval lies below 1."""
    by_batch = speedups(samples, "batch")
    once = (samples["batch"] == samples["batch"].min()) & (samples["repeat"] == 0)
    metrics, series = acceptance_metrics(samples[once])  # all other rows repeat these prompts
    metrics |= _headline(by_batch.iloc[0])
    metrics["speedup/at_largest_batch"] = by_batch["speedup"].iloc[-1]
    with_interval = by_batch[by_batch["low"] < by_batch["high"]]  # more than one sample
    losing = with_interval[with_interval["high"] < 1]["batch"]
    if len(losing):
        metrics["throughput/crossing_batch"] = losing.iloc[0]
    columns = {
        "speedup/at_batch": "speedup",
        "throughput/at_batch": "tok_s",
        "throughput/plain_at_batch": "plain_tok_s",
    }
    curves = {n: by_batch.set_index("batch")[c].to_dict() for n, c in columns.items()}
    return metrics, series | curves


def _headline(row: pd.Series) -> dict[str, float]:
    return {
        "speedup/measured": row["speedup"], "speedup/ci_low": row["low"],
        "speedup/ci_high": row["high"], "throughput/tok_s": row["tok_s"],
        "throughput/plain_tok_s": row["plain_tok_s"],
    }  # fmt: skip


def latency(
    pairing: Pairing,
    prompts: Sequence[Prompt],
    gammas: Sequence[int],
    max_new_tokens: int,
    repeats: int = 1,
) -> pd.DataFrame:
    """One stream at a time: one row per gamma, prompt and repeat, with plain decoding's figures of
    the same turn."""
    arms: dict[Any, Pairing] = {gamma: pairing.with_(gamma=gamma) for gamma in gammas}
    return duel(arms, prompts, max_new_tokens, repeats).drop(columns="arm")


def duel(
    arms: dict[Any, Pairing], prompts: Sequence[Prompt], max_new_tokens: int, repeats: int = 1
) -> pd.DataFrame:
    """One stream at a time: all arms and plain decoding take turns on every prompt. One row per
    arm, prompt and repeat."""
    pairing = next(iter(arms.values()))
    engines: dict[Any, Engine] = {None: pairing.engine.plain()}
    engines |= {arm: other.engine for arm, other in arms.items()}
    _warm_up(engines.values(), [pairing.encode([p.text]) for p in prompts], max_new_tokens)
    rows: list[dict[str, Any]] = []
    with tqdm(total=repeats * len(prompts) * len(engines), desc="latency", unit="run") as bar:
        for repeat, (number, prompt) in product(range(repeats), enumerate(prompts)):
            ids, backwards = pairing.encode([prompt.text]), (repeat + number) % 2 == 1
            traces = _take_turns(engines, ids, max_new_tokens, backwards, bar)
            base = traces.pop(None)
            for arm, trace in traces.items():
                rows.append(
                    _row(arms[arm], prompt)
                    | {"arm": arm, "repeat": repeat, "ttft_s": trace.ttft_s}
                    | {"s": trace.decode_s, "tokens": trace.emitted}
                    | {"plain_s": base.decode_s, "plain_tokens": base.emitted}
                    | _outcome(trace)
                )
    return pd.DataFrame(rows)


def costs(arms: dict[Any, Pairing], prompts: Sequence[Prompt], repeats: int = 40) -> pd.DataFrame:
    """Costs of a round, one row per arm: seconds to draft, to verify and for the rest (see
    `_phases`). `step_s`: a plain step. `weights_mb` and `kv_bytes` (per token): the memory that the
    drafter needs besides the target's."""
    first = next(iter(arms.values()))
    engines = {None: first.engine.plain(), **{arm: pairing.engine for arm, pairing in arms.items()}}
    kinds = {arm: (engine, lone_tree(engine)) for arm, engine in engines.items()}
    found = _phases(kinds, first.encode([p.text for p in prompts]), repeats)
    step = sum(found.pop(None))
    return pd.DataFrame(
        {
            "arm": arm, "draft_s": draft, "verify_s": verify, "rest_s": rest, "step_s": step,
            "guesses": len(lone_tree(engines[arm])) - 1,
            "weights_mb": added_bytes(engines[arm]) / 1e6,
            "kv_bytes": sum(m.kv_bytes_per_token for m in engines[arm].drafter.models
                            if m.cache is not engines[arm].target.cache),
        }
        for arm, (draft, verify, rest) in found.items()
    )  # fmt: skip


def added_bytes(engine: Engine) -> int:
    """Bytes of the drafter's weights that are not shared with the target."""
    shared = {p.data_ptr() for p in held(engine.target.module.parameters())}
    own = {
        p.data_ptr(): p.numel() * p.element_size()
        for module in _modules(engine.drafter)
        for p in held(module.parameters())
    }
    return sum(size for pointer, size in own.items() if pointer not in shared)


def _modules(drafter: Any) -> Iterator[torch.nn.Module]:
    for part in vars(drafter).values():
        if isinstance(part, torch.nn.Module):
            yield part
        elif isinstance(part, LM) and isinstance(part.module, torch.nn.Module):
            yield part.module
        elif hasattr(part, "propose"):
            yield from _modules(part)


def bias(pairing: Pairing, prompts: Sequence[Prompt], max_new_tokens: int) -> pd.Series:
    """Total variation between the law of a round's first emitted token and the target's law,
    averaged over rounds; one value per prompt. 0 for an exact rule. For chains only."""
    engine = pairing.engine
    found = []
    for prompt in tqdm(prompts, desc="bias", unit="prompt"):
        seqs = Sequences.of(
            pairing.encode([prompt.text]), max_new_tokens, slack=engine.policy.widest,
            device=engine.target.device,
        )  # fmt: skip
        found.append(_bias(engine, seqs, max_new_tokens))
    return pd.Series(found, index=[p.question_id for p in prompts], name="total_variation")


@torch.inference_mode()
def _bias(engine: Engine, seqs: Sequences, most: int) -> float:
    seqs = engine.begin(seqs)
    tree, found = lone_tree(engine), []
    for _ in range(most):
        draft = engine.drafter.propose(seqs, tree, engine.rng)
        seen = engine.target.verify(seqs, draft, engine.drafter.taps)
        p = engine.sampling.law(seen.logits)
        chosen = torch.zeros_like(p[:, 0]).scatter(1, draft.tokens[:, 1:2].clamp(min=0), 1.0)
        q = chosen if draft.q is None else draft.q[:, 0]
        made = bool((draft.tokens[:, 1] >= 0).all())
        emitted = engine.rule.emitted(p[:, 0], q) if made else p[:, 0]
        found.append(float((emitted - p[:, 0]).abs().sum()) / 2)
        verdict = engine.rule(draft, p, engine.rng)
        if not tree.is_chain:
            engine.target.keep(seqs, verdict)
        engine.drafter.observe(seqs, tree, verdict, seen)
        seqs.commit(verdict)
        if not bool(seqs.live.any()):
            break
    return float(np.mean(found))


def throughput(
    pairing: Pairing,
    prompts: Sequence[Prompt],
    batches: Sequence[int],
    max_new_tokens: int,
    repeats: int = 2,
) -> pd.DataFrame:
    """One row per batch of prompts and repeat, for each batch size.

    Every size sees the same prompts: the first max(batches), repeated to fill a batch. A size with
    fewer than `stats.FEWEST` samples is repeated more often. EOS is ignored and only rounds in
    which every row is live are counted, so the batch really has that size.
    `context`: slots of the batch's buffer, without those of a draft."""
    fast, plain = pairing.with_().engine, pairing.engine.plain()
    fast.eos = plain.eos = ()
    prompts = prompts[: max(batches)]
    texts = pairing.encode([p.text for p in prompts])
    starts = {batch: range(0, len(texts), batch) for batch in batches}
    turns = {b: max(repeats, -(-statistics.FEWEST // len(firsts))) for b, firsts in starts.items()}
    rows: list[dict[str, Any]] = []
    total = 2 * sum(turns[batch] * len(firsts) for batch, firsts in starts.items())
    with tqdm(total=total, desc="throughput", unit="run") as bar:
        for batch in batches:
            all_ids = [
                [texts[(first + i) % len(texts)] for i in range(batch)] for first in starts[batch]
            ]
            _warm_up([plain, fast], all_ids, max_new_tokens)
            for repeat, (number, ids) in product(range(turns[batch]), enumerate(all_ids)):
                arms = {"plain": plain, "fast": fast}
                backwards = (repeat + number) % 2 == 1
                traces = _take_turns(arms, ids, max_new_tokens, backwards, bar)
                s, tokens = full_batch(traces["fast"])
                plain_s, plain_tokens = full_batch(traces["plain"])
                rows.append(
                    {"pairing": pairing.drafter, "gamma": pairing.options["gamma"], "batch": batch}
                    | {"number": number, "repeat": repeat, "s": s, "tokens": tokens}
                    | {"plain_s": plain_s, "plain_tokens": plain_tokens}
                    | {"context": max(map(len, ids)) + max_new_tokens}
                    | _outcome(traces["fast"])
                )
    return pd.DataFrame(rows)


def full_batch(trace: Trace) -> tuple[float, int]:
    """Seconds and delivered tokens of the rounds in which every row was live."""
    full = [r for r in trace.rounds if len(r.steps) == trace.batch]
    return full[-1].end_s - trace.prefill_s, sum(s.emitted for r in full for s in r.steps)


def pass_costs(
    pairing: Pairing, prompts: Sequence[Prompt], gammas: Sequence[int], repeats: int = 40
) -> pd.DataFrame:
    """Seconds to draft gamma tokens and to verify them, one row per gamma (see `_phases`).

    The row gamma = 0 is a plain step. The rule and the commit are in `rest_s`.
    """
    kinds = {g: (pairing.engine, Tree.chain(g)) for g in sorted({0, *gammas})}
    found = _phases(kinds, pairing.encode([p.text for p in prompts]), repeats)
    return pd.DataFrame(
        {"gamma": gamma, "draft_s": draft, "verify_s": verify, "rest_s": rest}
        for gamma, (draft, verify, rest) in found.items()
    )


def _phases(
    kinds: Mapping[Any, tuple[Engine, Tree]], texts: Sequence[list[int]], repeats: int
) -> dict[Any, tuple[float, float, float]]:
    """Seconds to draft, to verify and for the rest of a round, for each kind of round.

    The kinds take turns, `repeats` rounds each, continuing one prompt after another. Rounds are
    timed whole and, separately, with a clock between phases. The three figures add up to the whole
    round: where the phases timed apart take longer than that, they are scaled down to it."""
    whole: dict[Any, list[tuple[float, ...]]] = {kind: [] for kind in kinds}
    apart: dict[Any, list[tuple[float, ...]]] = {kind: [] for kind in kinds}
    deepest = max(tree.depth for _, tree in kinds.values())
    # one buffer size for all, so that rounds are recorded only once
    size = max(map(len, texts)) + (CALM + 2 * VISIT_ROUNDS) * (1 + deepest)
    for visit in range(1 + -(-repeats // VISIT_ROUNDS)):
        for kind in list(kinds) if visit % 2 else list(kinds)[::-1]:
            engine, tree = kinds[kind]  # kinds share the target's cache: each prefills again
            rounds, phases = _rounds(engine, tree, texts[visit % len(texts)], size)
            if visit:
                whole[kind] += rounds
                apart[kind] += phases
    found = {}
    for kind in kinds:
        (all_s,), (draft, verify) = _typical(whole[kind]), _typical(apart[kind])
        share = min(1.0, all_s / (draft + verify))
        found[kind] = draft * share, verify * share, max(0.0, all_s - draft - verify)
    return found


def _typical(rounds: list[tuple[float, ...]]) -> tuple[float, ...]:
    """rounds: (tokens drafted, seconds ...). The median seconds of rounds that drafted as many
    tokens, averaged over that number by frequency: a lookup drafts more in some rounds than in
    others."""
    alike = pd.DataFrame(rounds).groupby(0)
    return tuple(np.average(alike.median(), axis=0, weights=alike.size()))


@torch.inference_mode()
def _rounds(
    engine: Engine, tree: Tree, text: list[int], size: int
) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
    """Time rounds that continue a prompt: (tokens drafted, seconds) of whole rounds, then (tokens
    drafted, seconds to draft, seconds to verify) of rounds timed by phase.

    The first rounds are not counted: the processor's caches still hold what another kind of round
    left there. At the end of the output the rows are reset to its beginning."""
    new = max(1, min(size, engine.target.context) - len(text))
    seqs = Sequences.of([text], new, slack=tree.room, device=engine.target.device)
    seqs = engine.begin(seqs)
    length, limit = seqs.length.clone(), seqs.limit.clone()
    lead = max(LEAD if tree.depth else CALM, 1 + engine.warm)
    whole: list[tuple[float, ...]] = []
    apart: list[tuple[float, ...]] = []

    def found(report: list[list[int]]) -> int:
        [step] = engine.steps(report)
        if step.done:
            seqs.length.copy_(length)
            seqs.limit.copy_(limit)
        return step.drafted

    while len(whole) < lead + VISIT_ROUNDS:
        begin = _clock(engine)
        for report, end in engine.launch(seqs, tree, lead + VISIT_ROUNDS - len(whole))():
            whole.append((found(report), end - begin))
            begin = end
    while len(apart) < VISIT_ROUNDS:
        now = [_clock(engine)]
        draft = engine.drafted(seqs, tree)
        now.append(_clock(engine))
        engine.verified(seqs, draft)
        now.append(_clock(engine))
        apart.append((found(engine.report(seqs, tree)), *np.diff(now)))
    return whole[lead:], apart


def lone_tree(engine: Engine) -> Tree:
    """The draft shape that the engine's policy chooses for a single stream."""
    return engine.policy.choose(Load(1, 0)).tree


def _clock(engine: Engine) -> float:
    return clock(engine.target.device)


def rounds_s(costs: pd.DataFrame) -> pd.Series:
    """Seconds of a round, for each row of `pass_costs`."""
    return costs[["draft_s", "verify_s", "rest_s"]].sum(axis=1)


def step_s(costs: pd.DataFrame) -> float:
    """Seconds of a plain step, from `pass_costs`."""
    return float(rounds_s(costs[costs["gamma"] == 0]).iloc[0])


def predicted(costs: pd.DataFrame, record: Acceptance) -> pd.DataFrame:
    """Speedup predicted from per-position acceptance and measured pass costs, one row per gamma.

    record: acceptance at the longest draft; positions it never reached count as never accepted.
    """
    step = step_s(costs)
    kept = [*record.conditional, *[0.0] * int(costs["gamma"].max())]
    rows = []
    for gamma, draft, verify, rest in costs.itertuples(index=False):
        tokens = theory.tokens_of_round(kept[:gamma])
        speedup = theory.measured_speedup(kept[:gamma], draft, verify + rest, step)
        rows.append({"gamma": gamma, "tokens": tokens, "speedup": speedup})
    return pd.DataFrame(rows)


def speedups(samples: pd.DataFrame, by: str) -> pd.DataFrame:
    """Speedup with its interval, tokens/s of both sides, acceptance length and rate, one row per
    value of a column."""
    rows = []
    for key, part in samples.groupby(by):
        s = statistics.speedup(*units(part, "plain_s", "plain_tokens", "s", "tokens"))
        rows.append(
            {by: key, "speedup": s.value, "low": s.low, "high": s.high}
            | {"tok_s": part["tokens"].sum() / part["s"].sum()}
            | {"plain_tok_s": part["plain_tokens"].sum() / part["plain_s"].sum()}
            | {"length": pooled(part).length, "rate": pooled(part).rate}
        )
    return pd.DataFrame(rows)


def units(samples: pd.DataFrame, *columns: str) -> list[np.ndarray]:
    """Columns summed over repeats, one entry per unit of an interval: a prompt, or a batch of them.

    With fewer than `MIN_BATCHES` batches each repeat is a unit: the interval then covers timing
    noise only, and says nothing about other prompts."""
    unit = "question_id" if "question_id" in samples else "number"
    if unit == "question_id" or samples.get(unit, pd.Series()).nunique() >= MIN_BATCHES:
        samples = samples.groupby(unit, sort=False)[list(columns)].sum()
    return [samples[column].to_numpy() for column in columns]


def _take_turns(
    arms: dict[Any, Engine], ids: list[list[int]], max_new_tokens: int, backwards: bool, bar: tqdm
) -> dict[Any, Trace]:
    order: list[Any] = list(arms)[:: -1 if backwards else 1]
    traces = {}
    for arm in order:
        traces[arm] = arms[arm].generate(ids, max_new_tokens).trace
        bar.update()
    return traces


def _outcome(trace: Trace, row: int | None = None) -> dict[str, Any]:
    """Counts of one row (or of all), the `Acceptance` record, and the rounds behind them."""
    record = trace.acceptance if row is None else trace.by_row[row]
    record.check()
    rounds = [
        (number, r.end_s, s.row, s.drafted, s.accepted, s.emitted)
        for number, r in enumerate(trace.rounds)
        for s in r.steps
        if row is None or s.row == row
    ]
    return {
        "drafted": record.drafted, "accepted": record.accepted, "emitted": record.emitted,
        "passes": record.passes, "cut": record.cut, "record": record, "rounds": rounds,
    }  # fmt: skip


def rounds(samples: pd.DataFrame) -> pd.DataFrame:
    """The trace behind a table of samples, one row per round and stream, as logged in parquet."""
    names = ["round", "end_s", "row", "drafted", "accepted", "emitted"]
    about = [c for c in samples if samples[c].dtype != object and c not in names]
    about += [c for c in ("pairing", "category") if c in samples and c not in about]
    parts = [
        pd.DataFrame(sample["rounds"], columns=names).assign(**sample[about].to_dict())
        for _, sample in samples.drop(columns=["accepted", "drafted", "emitted"]).iterrows()
    ]
    return pd.concat(parts, ignore_index=True)


def _warm_up(engines: Iterable[Engine], ids: list[list[list[int]]], most: int) -> None:
    """Generate a few tokens of the first batch; where rounds are recorded, one whole batch of every
    buffer size. The largest come first: engines share the target's cache, and recordings are lost
    when it grows."""
    for engine in sorted(engines, key=lambda engine: -engine.policy.widest):
        if engine.recordings is None:
            engine.generate(ids[0], WARM_UP_TOKENS)
            continue
        longest = {rounded(max(map(len, b)) + most + engine.policy.widest): b for b in ids}
        for _, batch in sorted(longest.items(), reverse=True):
            engine.generate(batch, most)


def _row(pairing: Pairing, prompt: Prompt) -> dict[str, Any]:
    return {
        "pairing": pairing.drafter, "rule": pairing.engine.rule.name,
        "gamma": pairing.options["gamma"],
        "temperature": pairing.options["temperature"],
        "category": prompt.category, "question_id": prompt.question_id,
    }  # fmt: skip
