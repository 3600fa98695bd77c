"""How many replicas a day of traffic needs, with and without speculation.

The times of rounds and the acceptance are measured; everything else here is SIMULATED, by
`serving.fleet`, for lack of a real fleet. A replica is a machine like the one that the cost table
was measured on. Times are seconds inside, and milliseconds where they are shown or logged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from specexp.errors import UserError
from specexp.measure import summaries
from specexp.measure.under_load.served import answer_metrics
from specexp.serving import arrivals, fleet
from specexp.serving.arrivals import Arrivals, Lengths
from specexp.serving.cost_table import Costs
from specexp.serving.fleet import Limits, Pace, Served

ANSWERS = 5000  # of which latencies are drawn
HOURS = 24
TIMES = ("ttft_s", "tpot_s", "e2e_s")


@dataclass(frozen=True)
class Day:
    """The traffic of 24 hours: a number of requests, whose rate swings around its mean by the share
    `swing` and is lowest at midnight, and the distribution of lengths."""

    requests: int
    swing: float
    lengths: Lengths
    seed: int = 0

    @property
    def mean(self) -> float:
        """Mean rate, requests a second."""
        return self.requests / (HOURS * 3600)

    def rates(self) -> np.ndarray:
        """Requests a second in the middle of each hour."""
        middle = (np.arange(HOURS) + 0.5) / HOURS
        return self.mean * (1 - self.swing * np.cos(2 * np.pi * middle))

    def whole(self) -> Arrivals:
        """All requests of the day."""
        return arrivals.day(self.mean, self.requests, self.lengths, self.seed, self.swing)


def lengths(prompt_tokens: int, output_tokens: int) -> Lengths:
    """Lognormal lengths with these medians, clipped at four times the longer one."""
    return Lengths(prompt_tokens, output_tokens, most=4 * max(prompt_tokens, output_tokens))


@dataclass(frozen=True)
class Setting:
    """What all simulations share: the traffic, the pace of a replica under each policy, the cost
    table (for prefill) and the latency limits."""

    day: Day
    paces: Mapping[str, Pace]
    costs: Costs
    limits: Limits

    def size(self, name: str, rate: float, sample: int, near: int) -> float:
        """The fewest replicas that keep the limits for `sample` requests at this rate, NaN if no
        number does. Raises UserError instead for plain decoding: there is nothing to compare with.
        """
        offered = arrivals.bursty(rate, sample, self.day.lengths, self.day.seed)
        pace, read_s = self.paces[name], self.costs.prefill_s
        try:
            return fleet.size(offered, pace, read_s, self.limits, self.day.seed, near)
        except UserError:
            if name == "plain":
                raise
            return float("nan")


def setting(
    costs: Costs, accepted: pd.DataFrame, names: Sequence[str], day: Day, rows: int,
    ttft_ms: float, tpot_steps: float,
) -> Setting:  # fmt: skip
    """A setting for these policies. accepted: rows of `one_pairing.acceptance`; rows: streams of a
    replica at most; tpot_steps: the limit of TPOT in plain steps of a single stream, which means
    the same on every machine. Raises UserError."""
    if "plain" not in names:
        raise UserError("the other policies are compared with plain decoding: name plain, too")
    costs = costs.sparing(summaries.drafted_share(accepted))
    drawn = day.lengths.draw(20_000, np.random.default_rng(day.seed))
    prompt, output = (float(tokens.mean()) for tokens in drawn)
    conditional, context = summaries.pooled(accepted).conditional, prompt + output
    paces = {n: fleet.pace(costs, n, conditional, rows, context, prompt, output) for n in names}
    limits = Limits(ttft_ms / 1e3, tpot_steps / paces["plain"].tokens_s[1])
    return Setting(day, paces, costs, limits)


def pace_table(setting: Setting) -> pd.DataFrame:
    """One row a policy and number of streams: tokens/s of the replica, its draft length, and the
    milliseconds a token of each stream."""
    return pd.DataFrame(
        {"policy": name, "streams": b, "tok_s": b * pace.tokens_s[b], "gamma": pace.gamma[b],
         "token_ms": 1e3 / pace.tokens_s[b]}
        for name, pace in setting.paces.items()
        for b in range(1, pace.rows + 1)
    )  # fmt: skip


def hourly(setting: Setting, sample: int) -> pd.DataFrame:
    """One row a policy and hour of the day: the rate of its requests, and the fewest replicas that
    keep the limits for a sample of `sample` requests. Hours of equal rate are simulated once."""
    rows: list[dict[str, Any]] = []
    for name in tqdm(setting.paces, desc="sizing", unit="policy", delay=1):
        sizes: dict[float, float] = {}
        near = 1.0
        for hour, rate in enumerate(setting.day.rates().round(9).tolist()):
            if rate not in sizes:
                sizes[rate] = setting.size(name, rate, sample, int(near))
                near = near if np.isnan(sizes[rate]) else sizes[rate]
            rows.append({"policy": name, "hour": hour, "rate": rate, "replicas": sizes[rate]})
    return pd.DataFrame(rows)


def saved(hours: pd.DataFrame, name: str) -> float:
    """Share of plain decoding's replica-hours that a policy saves; negative if it needs more."""
    total = hours.groupby("policy")["replicas"].sum(min_count=HOURS)
    return float(1 - total[name] / total["plain"])


def whole_day(setting: Setting, replicas: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Every request of the day on one fleet, under every policy: one row of `served_metrics` a
    policy; and ttft_s, tpot_s and e2e_s of `ANSWERS` requests of each, evenly over the day."""
    offered = setting.day.whole()
    some = np.unique(np.linspace(0, len(offered) - 1, ANSWERS).astype(int))
    rows, answers = [], []
    for name, pace in tqdm(setting.paces.items(), desc="day", unit="policy", delay=1):
        read_s, seed = setting.costs.prefill_s, setting.day.seed
        served = fleet.simulate(offered, pace, read_s, replicas, seed)
        table = pd.DataFrame({"policy": name, "state": "done", "tokens": offered.output,
                              **{key: getattr(served, key) for key in TIMES}})  # fmt: skip
        rows.append({"policy": name} | served_metrics(table, served, setting.limits))
        answers.append(table.loc[some, ["policy", *TIMES]])
    return pd.DataFrame(rows), pd.concat(answers)


def served_metrics(table: pd.DataFrame, served: Served, limits: Limits) -> dict[str, float]:
    """`answer_metrics` of a simulated fleet; `load/occupancy`: mean streams of a busy replica;
    `load/busy`: the share of time that replicas are busy."""
    limits_ms = 1e3 * limits.ttft_s, 1e3 * limits.tpot_s
    return answer_metrics(table, served.seconds, *limits_ms) | {
        "load/occupancy": float(served.stream_s.sum() / served.busy_s.sum()),
        "load/busy": float(served.busy_s.mean() / served.seconds),
    }


def peak(hours: pd.DataFrame, name: str) -> int:
    """Replicas that a policy needs in its busiest hour. Raises UserError if no number suffices."""
    most = hours.loc[hours["policy"] == name, "replicas"].max(skipna=False)
    if np.isnan(most):
        raise UserError(f"{name} misses the limits with any number of replicas: raise tpot_steps")
    return int(most)


def metrics(
    setting: Setting, hours: pd.DataFrame, days: pd.DataFrame, accepted: pd.DataFrame, policy: str
) -> tuple[dict[str, float], dict[str, Any]]:
    """Metrics and series of one policy, for MLflow; all but `acceptance` are SIMULATED."""
    values, accepted_at = summaries.acceptance_metrics(accepted)
    series: dict[str, Any] = dict(accepted_at)
    values["fleet/saved"] = saved(hours, policy)
    by_hour = hours.set_index("hour").groupby("policy")["replicas"]
    for name, suffix in ((policy, ""), ("plain", "_plain")):
        mine = by_hour.get_group(name)
        values[f"fleet/replicas{suffix}"] = peak(hours, name)
        values[f"fleet/replica_hours{suffix}"] = mine.sum()
        series[f"fleet/replicas{suffix}_at_hour"] = mine.to_dict()
    values |= {
        "fleet/requests": setting.day.requests,
        "fleet/ttft_limit_ms": 1e3 * setting.limits.ttft_s,
        "fleet/tpot_limit_ms": 1e3 * setting.limits.tpot_s,
    }
    values |= days.set_index("policy").loc[policy].dropna().to_dict()
    tokens_s = enumerate(setting.paces[policy].tokens_s)
    series["fleet/tok_s_at_streams"] = {b: b * each for b, each in tokens_s if b}
    return values, series
