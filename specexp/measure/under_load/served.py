"""Metrics from the steps and responses of servers: rates, regrets, latencies, goodput."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from specexp.errors import UserError
from specexp.measure import statistics, summaries
from specexp.serving.policies import is_fixed
from specexp.serving.requests import Response, ServerStep
from specexp.serving.sources import Run

QUANTILES = (50, 95, 99)
EVEN = statistics.Interval(1.0, 1.0, 1.0)  # the speedup of a policy over itself
MIN_SAMPLES = {50: 1, 95: 60, 99: 662}  # samples below which a quantile is not reported
BINS = 60  # of a timeline


# --- closed loops --------------------------------------------------------------------------------


def totals(steps: Sequence[ServerStep]) -> dict[str, float]:
    """Totals over a server's steps: s and busy_s (seconds, and those of rounds and prefills),
    tokens (emitted), rows, stream_s (seconds times streams), speculated (rows that had draft
    tokens), drafted and accepted (draft tokens)."""
    fields = ("busy_s", "rows", "speculated", "drafted", "accepted")
    return {
        "s": sum(t.end_s - t.begin_s for t in steps),
        "stream_s": sum(t.live * (t.end_s - t.begin_s) for t in steps),
        "tokens": sum(t.emitted for t in steps),
    } | {field: sum(getattr(t, field) for t in steps) for field in fields}


def _against(at: pd.DataFrame, base: str) -> dict[Any, statistics.Draws]:
    """The speedup over `base` of each other policy at one load, from paired turns."""
    first = at[at["policy"] == base].set_index("turn")
    others = {
        name: part.set_index("turn").loc[first.index]
        for name, part in at.groupby("policy", sort=False)
        if name != base
    }
    return {
        name: statistics.speedup_draws(first["s"], first["tokens"], other["s"], other["tokens"],
                                       same_work=True)
        for name, other in others.items()
    }  # fmt: skip


def rates(samples: pd.DataFrame) -> pd.DataFrame:
    """How fast each policy is at each load, from `closed_loops`.

    One row a load and policy, with columns load, policy, tok_s; the speedup over plain decoding
    with its interval low, high over turns and its doubt (see `summaries.judged`); and three shares:
    speculated (of rows), kept (of draft tokens accepted), overhead (of the time, the scheduler's
    own). All intervals at a load hold at once, so that any policy may be picked."""
    rows = []
    for load, at in samples.groupby("load"):
        base = at.loc[at["policy"] == "plain", ["tokens", "rows"]].sum()
        own = statistics.simultaneous(_against(at, "plain"))
        for name, part in at.groupby("policy", sort=False):
            s, total = own.get(name, EVEN), part.drop(columns="policy").sum()
            rows.append(
                {"load": load, "policy": name, "tok_s": total["tokens"] / total["s"]}
                | s.columns("speedup")
                | {"doubt": s.doubt}
                | {"length": total["tokens"] / total["rows"] * base["rows"] / base["tokens"]}
                | {"speculated": total["speculated"] / total["rows"]}
                | {"kept": total["accepted"] / max(1, total["drafted"])}
                | {"overhead": 1 - total["busy_s"] / total["s"]}
            )
    return summaries.judged(pd.DataFrame(rows)).drop(columns="length")


def regrets(samples: pd.DataFrame) -> pd.DataFrame:
    """The share of the rate that a policy loses to the best fixed choice at that load, which is
    plain decoding or a draft length, picked with hindsight; from `closed_loops`.

    One row a load and policy, with columns load, policy, oracle (the best fixed choice), regret and
    its interval low, high over turns; negative where the policy is faster. All intervals hold at
    once, and whichever fixed choice is the best in truth: the one that was the fastest may have
    been lucky. Raises UserError where no policy is fixed."""
    draws, speeds = dict[Any, statistics.Draws](), dict[Any, pd.Series]()
    for load, at in samples.groupby("load"):
        total = at.groupby("policy", sort=False)[["tokens", "s"]].sum()
        speeds[load] = total["tokens"] / total["s"]
        for base in filter(is_fixed, total.index):
            draws |= {(load, base, name): each for name, each in _against(at, base).items()}
    intervals = statistics.simultaneous(draws)
    rows = []
    for load, speed in speeds.items():
        fixed = [*filter(is_fixed, speed.index)]
        if not fixed:
            raise UserError("regret needs a fixed policy to compare with: plain or always:GAMMA")
        oracle = speed[fixed].idxmax()
        for name in speed.index:
            lost = {base: intervals.get((load, base, name), EVEN).rest() for base in fixed}
            rows.append(
                {"load": load, "policy": name, "oracle": oracle, "regret": lost[oracle].value}
                | {"low": max(each.low for each in lost.values())}
                | {"high": max(each.high for each in lost.values())}
            )
    return pd.DataFrame(rows)


def worst(lost: pd.DataFrame) -> pd.DataFrame:
    """The largest of the `regrets` of each policy, in columns regret, low and high: it is at least
    the highest lower end, and at most the highest upper end."""
    return lost.groupby("policy", sort=False)[["regret", "low", "high"]].max()


# --- open traffic --------------------------------------------------------------------------------


def request_table(responses: Sequence[Response]) -> pd.DataFrame:
    """One row a request, times in seconds as serving benchmarks define them: ttft_s from arrival to
    the first token, waiting (wait_s) included; tpot_s from the first token to the last, for each
    token after the first; e2e_s from arrival to the last token. Also kind, state, came_s, and the
    counts tokens, prompt, drafted, accepted, passes."""
    rows = []
    for a in responses:
        first = a.deliveries[0][0] if a.deliveries else float("nan")
        last, count = a.deliveries[-1] if a.deliveries else (float("nan"), 0)
        rows.append({
            "kind": a.request.kind, "state": a.state, "came_s": a.came_s,
            "wait_s": (first if a.begun_s is None else a.begun_s) - a.came_s,
            "ttft_s": first - a.came_s,
            "tpot_s": (last - first) / (count - 1) if count > 1 else float("nan"),
            "e2e_s": last - a.came_s, "tokens": count, "prompt": len(a.request.prompt),
            "drafted": a.drafted, "accepted": a.accepted, "passes": a.passes,
        })  # fmt: skip
    return pd.DataFrame(rows)


def answered_requests(runs: dict[str, Run]) -> pd.DataFrame:
    """`request_table` of all policies, with the column policy; only requests that were answered."""
    every = [request_table(run.responses).assign(policy=name) for name, run in runs.items()]
    return pd.concat(every, ignore_index=True).query("state == 'done'")


def itl_s(responses: Sequence[Response]) -> np.ndarray:
    """Inter-token latencies: seconds between the deliveries of a request, all requests pooled. The
    tokens of a round arrive together and count as one delivery."""
    each = [np.diff([at for at, _ in a.deliveries]) for a in responses if len(a.deliveries) > 1]
    return np.concatenate(each) if each else np.zeros(0)


def request_metrics(
    table: pd.DataFrame, seconds: float, ttft_ms: float, tpot_ms: float, **more_s: np.ndarray
) -> dict[str, float]:
    """Throughput, goodput and percentiles of latencies (and of `more_s`) from the columns state,
    tokens, ttft_s, tpot_s, e2e_s of `request_table`. Goodput: the requests answered within both
    limits, as a share of all and a second. NaN where there are too few samples."""
    done = table[table["state"] == "done"]
    within = (1e3 * done["ttft_s"] <= ttft_ms) & ~(1e3 * done["tpot_s"] > tpot_ms)
    figures = {
        "throughput/tok_s": done["tokens"].sum() / seconds,
        "throughput/req_s": len(done) / seconds,
        "goodput/share": within.sum() / len(table),
        "goodput/req_s": within.sum() / seconds,
    }
    series = {name: done[f"{name}_s"].dropna() for name in ("ttft", "tpot", "e2e")} | more_s
    for name, values in series.items():
        for q in QUANTILES:
            at = float(np.percentile(values, q)) if len(values) >= MIN_SAMPLES[q] else float("nan")
            figures[f"latency/{name}_p{q}_ms"] = 1e3 * at
    return figures


def served_metrics(
    responses: Sequence[Response], steps: Sequence[ServerStep], ttft_ms: float, tpot_ms: float
) -> dict[str, float]:
    """The metrics that serving benchmarks report, for MLflow: `request_metrics`, and the load."""
    table, total = request_table(responses), totals(steps)
    seconds = (steps[-1].end_s - min(a.came_s for a in responses)) if steps else float("nan")
    return request_metrics(table, seconds, ttft_ms, tpot_ms, itl=itl_s(responses)) | {
        "load/occupancy": total["stream_s"] / seconds,
        "load/speculated": total["speculated"] / max(1, total["rows"]),
        "load/refused": (table["state"] == "refused").sum(),
        "load/failed": (table["state"] == "failed").sum(),
        "load/overhead": 1 - total["busy_s"] / (total["s"] or float("nan")),
        "served/rate": total["accepted"] / (total["drafted"] or float("nan")),
    }


def by_policy(runs: dict[str, Run], ttft_ms: float, tpot_ms: float) -> pd.DataFrame:
    """`served_metrics` of every policy: one row each, the column policy first."""
    return pd.DataFrame(
        {"policy": name} | served_metrics(run.responses, run.steps, ttft_ms, tpot_ms)
        for name, run in runs.items()
    )


def timeline(steps: Sequence[ServerStep]) -> pd.DataFrame:
    """The load over time. One row a bin, with columns end_s (seconds); live and waiting (mean
    requests); and two shares: speculated (of rows), kept (of draft tokens accepted). Raises
    UserError when nothing was served."""
    if not steps:
        raise UserError("nothing was served: every request was refused; see the responses' reasons")
    table = pd.DataFrame(map(vars, steps))
    at = pd.cut(table["end_s"], BINS, labels=False)
    total = table.groupby(at)[["speculated", "rows", "drafted", "accepted", "emitted"]].sum()
    mean = table.groupby(at)[["end_s", "live", "waiting"]].mean()
    return mean.assign(
        speculated=total["speculated"] / total["rows"].clip(lower=1),
        kept=total["accepted"] / total["drafted"].where(total["drafted"] > 0),
    ).reset_index(drop=True)


def step_table(runs: dict[str, Run]) -> pd.DataFrame:
    """One row a step and policy, in order, with the fields of `ServerStep` and policy as columns;
    logged as a table."""
    every = [pd.DataFrame(map(vars, run.steps)).assign(policy=n) for n, run in runs.items()]
    return pd.concat(every, ignore_index=True)


def metrics(
    rated: pd.DataFrame, lost: pd.DataFrame, served: pd.DataFrame, policy: str
) -> tuple[dict[str, float], dict[str, Any]]:
    """Metrics and series of one policy, for MLflow: of closed loops from `rates` and `regrets`, of
    open traffic from `by_policy`. `speedup/measured` is that of the fewest streams."""
    mine, most = rated[rated["policy"] == policy], worst(lost).loc[policy]
    regret = lost[lost["policy"] == policy].set_index("load")["regret"]
    first = mine.iloc[0]
    figures = served.set_index("policy").loc[policy].dropna().to_dict() | {
        "speedup/measured": first["speedup"], "speedup/ci_low": first["low"],
        "speedup/ci_high": first["high"], "speedup/at_largest_batch": mine["speedup"].iloc[-1],
        "speedup/credible": float(summaries.sound(rated).all()),
        "regret/worst": most["regret"], "regret/worst_low": most["low"],
        "regret/worst_high": most["high"], "regret/mean": regret.mean(),
    }  # fmt: skip
    by_load = mine.set_index("load")
    return figures, summaries.at_batch(mine, "load") | {
        "throughput/at_batch": by_load["tok_s"].to_dict(),
        "load/speculated_at_batch": by_load["speculated"].to_dict(),
        "regret/at_batch": regret.to_dict(),
    }
