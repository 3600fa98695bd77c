"""Measurements as tables: acceptance, latency of one stream, throughput under batch, pass costs.

Every comparison is interleaved: plain decoding and speculation take turns on the same prompts in
the same process, forwards then backwards, after a warm-up. Both sides count delivered tokens and
decoding time, prefill apart. The tables hold raw counts and seconds; ratios and intervals are made
from them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from specexp import theory
from specexp.engine import Engine
from specexp.lab import stats
from specexp.lab.build import Rig
from specexp.lab.prompts import Prompt
from specexp.sequences import Sequences
from specexp.trace import Acceptance, Trace
from specexp.tree import Tree

WARM_UP_TOKENS = 8


def acceptance(
    rigs: Sequence[Rig],
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    temperatures: Iterable[float] | None = None,
    batch: int = 16,
) -> pd.DataFrame:
    """One row a pairing, temperature and prompt: counts and the `Acceptance` record itself."""
    rows: list[dict[str, Any]] = []
    runs = [r.with_(temperature=t) for t in temperatures for r in rigs] if temperatures else rigs
    chunks = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
    with tqdm(total=len(runs) * len(prompts), desc="acceptance", unit="prompt") as bar:
        for rig in runs:
            for chunk in chunks:
                made = rig.generate([p.text for p in chunk], max_new_tokens)
                for row, prompt in enumerate(chunk):
                    rows.append(_row(rig, prompt) | _outcome(made.trace, row))
                bar.update(len(chunk))
    return pd.DataFrame(rows)


def pooled(samples: pd.DataFrame) -> Acceptance:
    return Acceptance.pooled(samples["record"])


def acceptance_metrics(samples: pd.DataFrame) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Metrics and per-position series of one pairing, checked, as they are logged."""
    record = pooled(samples)
    record.check()
    rate = stats.ratio(samples["accepted"], samples["drafted"])
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
    samples: pd.DataFrame, foretold: pd.DataFrame
) -> tuple[dict[str, float], dict[str, Any]]:
    """Metrics and series of a gamma sweep; the headline is its fastest draft length."""
    measured = speedups(samples, "gamma")
    best = measured.loc[measured["speedup"].idxmax()]
    at_best = samples[samples["gamma"] == best["gamma"]]
    metrics, series = acceptance_metrics(at_best)
    by_gamma = foretold.set_index("gamma")["speedup"].to_dict()
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


def throughput_metrics(samples: pd.DataFrame) -> tuple[dict[str, float], dict[str, Any]]:
    """Metrics and series of a batch sweep; the headline is its smallest batch."""
    by_batch = speedups(samples, "batch")
    metrics, series = acceptance_metrics(samples)
    metrics |= _headline(by_batch.iloc[0])
    metrics["speedup/at_largest_batch"] = by_batch["speedup"].iloc[-1]
    losing = by_batch[by_batch["high"] < 1]["batch"]
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
    rig: Rig,
    prompts: Sequence[Prompt],
    gammas: Sequence[int],
    max_new_tokens: int,
    repeats: int = 1,
) -> pd.DataFrame:
    """One stream at a time: one row a gamma, prompt and repeat, beside plain decoding just then."""
    arms = {gamma: rig.with_(gamma=gamma).engine for gamma in gammas}
    plain = rig.engine.plain()
    _warm_up([plain, *arms.values()], [rig.encode([prompts[0].text])[0]])
    rows: list[dict[str, Any]] = []
    with tqdm(total=repeats * len(prompts) * (len(arms) + 1), desc="latency", unit="run") as bar:
        for repeat in range(repeats):
            for prompt in prompts:
                ids = rig.encode([prompt.text])
                traces = _take_turns({-1: plain, **arms}, ids, max_new_tokens, repeat % 2 == 1, bar)
                base = traces.pop(-1)
                for gamma, trace in traces.items():
                    rows.append(
                        _row(rig, prompt)
                        | {"gamma": gamma, "repeat": repeat, "ttft_s": trace.ttft_s}
                        | {"s": trace.decode_s, "tokens": trace.emitted}
                        | {"plain_s": base.decode_s, "plain_tokens": base.emitted}
                        | _outcome(trace)
                    )
    return pd.DataFrame(rows)


def throughput(
    rig: Rig,
    prompts: Sequence[Prompt],
    batches: Sequence[int],
    max_new_tokens: int,
    repeats: int = 2,
) -> pd.DataFrame:
    """One row a batch size and repeat. EOS is ignored and only rounds with every row live count, so
    that the batch really is that large; prompts repeat where there are fewer than rows."""
    fast, plain = rig.with_().engine, rig.engine.plain()
    fast.eos = plain.eos = ()
    rows: list[dict[str, Any]] = []
    with tqdm(total=2 * repeats * len(batches), desc="throughput", unit="run") as bar:
        for batch in batches:
            chosen = [prompts[i % len(prompts)] for i in range(batch)]
            ids = rig.encode([p.text for p in chosen])
            _warm_up([plain, fast], ids)
            for repeat in range(repeats):
                arms = {"plain": plain, "fast": fast}
                traces = _take_turns(arms, ids, max_new_tokens, repeat % 2 == 1, bar)
                s, tokens = full_batch(traces["fast"])
                plain_s, plain_tokens = full_batch(traces["plain"])
                rows.append(
                    {"pairing": rig.drafter, "gamma": rig.options["gamma"], "batch": batch}
                    | {"repeat": repeat, "s": s, "tokens": tokens}
                    | {"plain_s": plain_s, "plain_tokens": plain_tokens}
                    | _outcome(traces["fast"])
                )
    return pd.DataFrame(rows)


def full_batch(trace: Trace) -> tuple[float, int]:
    """Seconds and delivered tokens of the rounds in which every row was still being written."""
    full = [r for r in trace.rounds if len(r.steps) == trace.batch]
    return full[-1].end_s - trace.prefill_s, sum(s.emitted for r in full for s in r.steps)


def pass_costs(
    rig: Rig, prompt: Prompt, gammas: Sequence[int], batch: int = 1, repeats: int = 15
) -> pd.DataFrame:
    """Median seconds to draft gamma tokens and to verify them, phases timed apart on one prompt.

    The row gamma = 0 is a plain step. The rule and the commit are in `rest_s`.
    """
    engine = rig.engine
    seqs = Sequences.of(
        rig.encode([prompt.text]) * batch, 64, slack=max(gammas) + 1, device=engine.target.device
    )
    engine.drafter.prefill(seqs, engine.target.prefill(seqs, engine.drafter.taps))
    wanted = sorted({0, *gammas})
    seen: dict[int, list[tuple[float, float, float]]] = {g: [] for g in wanted}
    for repeat in range(repeats + 2):
        for gamma in wanted if repeat % 2 else wanted[::-1]:
            seen[gamma].append(_one_round(engine, seqs, Tree.chain(gamma)))
    rows = []
    for gamma, times in seen.items():
        draft, verify, rest = np.median(np.array(times[2:]), axis=0)
        rows.append({"gamma": gamma, "draft_s": draft, "verify_s": verify, "rest_s": rest})
    return pd.DataFrame(rows)


@torch.inference_mode()
def _one_round(engine: Engine, seqs: Sequences, tree: Tree) -> tuple[float, float, float]:
    now = [_clock(engine)]
    draft = engine.drafter.propose(seqs, tree, engine.rng)
    now.append(_clock(engine))
    seen = engine.target.verify(seqs, draft, engine.drafter.taps)
    now.append(_clock(engine))
    engine.rule(draft, engine.sampling.law(seen.logits), engine.rng).n.tolist()
    now.append(_clock(engine))
    return now[1] - now[0], now[2] - now[1], now[3] - now[2]


def _clock(engine: Engine) -> float:
    if engine.target.device.type == "cuda":
        torch.cuda.synchronize(engine.target.device)
    return time.perf_counter()


def predicted(costs: pd.DataFrame, record: Acceptance) -> pd.DataFrame:
    """Speedup that per-position acceptance and measured pass costs foretell, one row a gamma.

    record: acceptance at the longest draft; positions it never reached count as never accepted.
    """
    step = float(costs.loc[costs["gamma"] == 0, ["draft_s", "verify_s", "rest_s"]].to_numpy().sum())
    kept = [*record.conditional, *[0.0] * int(costs["gamma"].max())]
    rows = []
    for gamma, draft, verify, rest in costs.itertuples(index=False):
        tokens = theory.tokens_of_round(kept[:gamma])
        speedup = theory.measured_speedup(kept[:gamma], draft, verify + rest, step)
        rows.append({"gamma": gamma, "tokens": tokens, "speedup": speedup})
    return pd.DataFrame(rows)


def speedups(samples: pd.DataFrame, by: str) -> pd.DataFrame:
    """Speedup with its interval, tokens/s of both arms and acceptance length, by a column."""
    rows = []
    for key, part in samples.groupby(by):
        s = stats.speedup(part["plain_s"], part["plain_tokens"], part["s"], part["tokens"])
        rows.append(
            {by: key, "speedup": s.value, "low": s.low, "high": s.high}
            | {"tok_s": part["tokens"].sum() / part["s"].sum()}
            | {"plain_tok_s": part["plain_tokens"].sum() / part["plain_s"].sum()}
            | {"length": pooled(part).length, "rate": pooled(part).rate}
        )
    return pd.DataFrame(rows)


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
    """Counts of one row (or all), the checked record, and the rounds they came from."""
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
    """The trace behind a table, one row a round and stream: what is kept as parquet."""
    names = ["round", "end_s", "row", "drafted", "accepted", "emitted"]
    about = [c for c in samples if samples[c].dtype != object and c not in names]
    about += [c for c in ("pairing", "category") if c in samples and c not in about]
    parts = [
        pd.DataFrame(sample["rounds"], columns=names).assign(**sample[about].to_dict())
        for _, sample in samples.drop(columns=["accepted", "drafted", "emitted"]).iterrows()
    ]
    return pd.concat(parts, ignore_index=True)


def _warm_up(engines: Iterable[Engine], ids: list[list[int]]) -> None:
    for engine in engines:
        engine.generate(ids, WARM_UP_TOKENS)


def _row(rig: Rig, prompt: Prompt) -> dict[str, Any]:
    return {
        "pairing": rig.drafter, "gamma": rig.options["gamma"],
        "temperature": rig.options["temperature"],
        "category": prompt.category, "question_id": prompt.question_id,
    }  # fmt: skip
