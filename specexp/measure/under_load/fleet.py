"""How many replicas a day of traffic needs, with and without speculation.

The times of rounds and the acceptance are measured; everything else here is SIMULATED, for lack of
a real fleet. A replica is a machine like the one that the cost table was measured on; the router
gives each of R replicas every R-th request, so one of them stands for all.

A replica with b streams gives each of them so many tokens a second (processor sharing). So it needs
one clock only, its *credit*: the tokens that a stream present from the start would have got. It
stands still during prefill. The events are arrivals and the ends of outputs. Simplifications:

- Tokens flow evenly; how far a request is from the mean is drawn once.
- All requests have the same acceptance, and all streams the same context.
- A prompt is prefilled at once when its request gets a place, and no stream advances meanwhile.
- A request that joins others waits for half a round of theirs.
- A request's first round takes as long as the others, also where it is plain since the drafter
  would have to read the prompt; that prefill is spread over the rounds.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from specexp.errors import UserError
from specexp.measure import summaries
from specexp.measure.under_load.served import request_metrics
from specexp.policy import PRICED, Load, planned
from specexp.serving import policies
from specexp.serving.arrivals import Arrivals, Lengths, bursty
from specexp.serving.cost_table import Costs
from specexp.serving.goodput import GAMMAS

HOURS = 24
RARE = 1e-5  # requests a second of which each finds the replica idle


# --- one replica ---------------------------------------------------------------------------------


class Pace(NamedTuple):
    """The rounds of a replica that has a certain number of streams.

    gamma: draft length; tokens_s: tokens a second of each stream; round: expected tokens of a
    stream a round; overshoot: expected tokens that the last round of an output yields beyond its
    end, plus those that a plain first round lacks; spread: an output of n tokens takes as long as
    n + overshoot + spread * sqrt(n) * z tokens, z being standard normal."""

    gamma: int
    tokens_s: float
    round: float = 1.0
    overshoot: float = 0.0
    spread: float = 0.0


def paces_of(
    costs: Costs, name: str, conditional: Sequence[float], rows: int, context: float,
    prompt: float = 0.0, output: float = 1.0,
) -> list[Pace]:  # fmt: skip
    """The pace of a replica under a policy with 1, 2, ... `rows` streams. The policy is `plain`,
    one that depends on the number of rows alone (`bandit` does not), or one of `policy.PRICED`,
    which know costs and acceptance: at every number of streams the best of plain decoding and all
    draft lengths.

    conditional[i]: P(draft token i + 1 accepted given that token i was). The drafter's prefill of
    `prompt` tokens a request is spread over the rounds of an output of `output` tokens, both means.
    A batch that is slower than a larger one in the table takes the larger one's time, so that a
    single disturbed measurement does not matter. Raises UserError."""
    deepest = costs.gammas[-1]
    gammas = [0, *(g for g in GAMMAS if g <= deepest)]
    policy = None if name in PRICED else policies.of(name, deepest=deepest)

    def tokens_s(b: int, gamma: int) -> float:
        tokens = _moments(conditional, gamma)[0]
        reading = b * tokens / output * costs.catch_up_s(prompt) if gamma else 0.0
        padded = (b, *(x for x in costs.batches if x > b))
        return tokens / (min(costs.round_s(x, gamma, context) for x in padded) + reading)

    every = []
    for b in range(1, rows + 1):
        if policy:
            gamma = planned(policy, Load(b, int(context))).tree.depth
        else:
            gamma = max(gammas, key=partial(tokens_s, b))
        mean, square = _moments(conditional, gamma)
        overshoot = (square / mean - 1) / 2 + costs.reads * (mean - 1)
        spread = math.sqrt(max(0.0, square / mean - mean))
        every.append(Pace(gamma, tokens_s(b, gamma), mean, overshoot, spread))
    return every


def _moments(conditional: Sequence[float], gamma: int) -> tuple[float, float]:
    """E[X] and E[X^2] of the tokens X that a round of gamma draft tokens yields.

    By renewal theory, rounds that reach n tokens overshoot them by (E[X^2] / E[X] - 1) / 2 on
    average, and the variance of their number is n Var[X] / E[X]^3 (Cox 1962, Renewal Theory,
    chapters 4 and 5)."""
    at_least = [1.0, *accumulate(conditional[:gamma], mul)]
    return math.fsum(at_least), math.fsum((2 * k + 1) * p for k, p in enumerate(at_least))


def simulate(
    arrivals: Arrivals, paces: Sequence[Pace], read_s: Callable[[float], float], seed: int = 0
) -> pd.DataFrame:
    """Serve all arrivals on one replica. read_s(tokens): seconds of a prompt's prefill. With as
    many streams as there are paces, requests wait in order.

    One row a request in order of arrival, with columns at_s, tokens; ttft_s, seconds from arrival
    to the end of the first round; tpot_s, seconds from there for each further token (NaN for
    outputs of one token); e2e_s."""
    n, outputs = len(arrivals), arrivals.output
    deviations = np.random.default_rng(seed).standard_normal(n) * np.sqrt(outputs)
    columns = arrivals.at_s, arrivals.prompt, outputs, deviations
    at_s, prompts, tokens, deviation = (column.tolist() for column in columns)
    first, end_s = np.zeros(n), np.zeros(n)  # the credit of a first round; the time of an end
    ends: list[tuple[float, int]] = []  # a heap: the credit at which an output ends, its request
    path: list[tuple[float, float]] = []  # credit and time, wherever their course changes
    coming, waiting = deque(range(n)), deque[int]()
    now = free = credit = begin = 0.0  # free: when prefill ends
    while coming or ends:
        start, speed = max(free, now), paces[max(0, len(ends) - 1)].tokens_s
        ending = start + (ends[0][0] - credit) / speed if ends else math.inf
        arriving = at_s[coming[0]] if coming else math.inf
        now = min(ending, arriving)
        if ends and now > start:
            path.append((credit, start))
            credit = ends[0][0] if now == ending else credit + (now - start) * speed
            path.append((credit, now))
        half_round = 0.0
        if ending <= arriving:
            credit, request = heappop(ends)
            end_s[request] = now
        else:
            waiting.append(coming.popleft())
            if ends and free <= now:
                half_round = paces[len(ends) - 1].round / 2
        if waiting and len(ends) < len(paces):
            request, pace = waiting.popleft(), paces[len(ends)]
            begin = max(begin, credit + half_round)  # never before that of an earlier request
            free = max(free, now) + read_s(prompts[request])
            needed = tokens[request] + pace.overshoot + pace.spread * deviation[request]
            first[request] = begin + pace.round
            heappush(ends, (begin + max(needed, pace.round), request))
    credits, times = -np.array(path)[::-1].T  # so that of equal credits the earliest time counts
    first_s = np.minimum(-np.interp(-first, credits, times), end_s)
    further = np.where(outputs > 1, outputs - 1, np.nan)
    return pd.DataFrame({
        "at_s": arrivals.at_s, "tokens": outputs, "ttft_s": first_s - arrivals.at_s,
        "tpot_s": (end_s - first_s) / further, "e2e_s": end_s - arrivals.at_s,
    })  # fmt: skip


# --- a day ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Day:
    """The traffic of 24 hours: a number of requests, whose rate swings around its mean by the share
    `swing` and is lowest at midnight, and the distribution of lengths."""

    requests: int
    swing: float
    lengths: Lengths
    seed: int = 0

    def rates(self) -> np.ndarray:
        """Requests a second in the middle of each hour [24]."""
        middle = (np.arange(HOURS) + 0.5) / HOURS
        mean = self.requests / (HOURS * 3600)
        return (mean * (1 - self.swing * np.cos(2 * np.pi * middle))).round(9)


def lengths(prompt_tokens: int, output_tokens: int) -> Lengths:
    """Lognormal lengths with these medians, clipped at four times the longer one."""
    return Lengths(prompt_tokens, output_tokens, most=4 * max(prompt_tokens, output_tokens))


@dataclass(frozen=True)
class Setting:
    """What all simulations share: the traffic; the paces of a replica under each policy; the cost
    table, for prefill; and the limits in seconds on the 95th percentiles of TTFT and TPOT."""

    day: Day
    paces: Mapping[str, Sequence[Pace]]
    costs: Costs
    ttft_s: float
    tpot_s: float

    def serve(self, name: str, rate: float, sample: int, replicas: int = 1) -> pd.DataFrame:
        """`simulate` one of the replicas that serve `rate` requests a second: `sample` of its
        requests. (Every R-th arrival of a Poisson process comes after R gaps.)"""
        day, cv = self.day, replicas**-0.5
        offered = bursty(rate / replicas, sample, day.lengths, day.seed, cv)
        return simulate(offered, self.paces[name], self.costs.prefill_s, day.seed)

    def within_limits(self, served: pd.DataFrame) -> bool:
        """Whether both 95th percentiles are. (The TPOT of outputs of one token is NaN.)"""
        most = served[["ttft_s", "tpot_s"]].quantile(0.95)
        return bool(most["ttft_s"] <= self.ttft_s and not most["tpot_s"] > self.tpot_s)

    def fewest_replicas(self, name: str, rate: float, sample: int, near: int = 1) -> int:
        """The fewest replicas that keep the limits, by bisection from `near`; one that is idle must
        keep them."""

        def enough(replicas: int) -> bool:
            return self.within_limits(self.serve(name, rate, sample, replicas))

        few, many = 0, near
        while not enough(many):
            few, many = many, 2 * many
        return few + 1 + bisect_left(range(few + 1, many), True, key=enough)


def setting(
    costs: Costs, accepted: pd.DataFrame, names: Sequence[str], day: Day, rows: int,
    ttft_ms: float, tpot_steps: float,
) -> Setting:  # fmt: skip
    """A setting for these policies. accepted: rows of `one_pairing.acceptance`; rows: streams of a
    replica at most; tpot_steps: the limit of TPOT in plain steps of a single stream, which means
    the same on every machine. Raises UserError."""
    if "plain" not in names:
        raise UserError("the other policies are compared with plain decoding: name plain, too")
    own = costs.at_drafted_share(summaries.drafted_share(accepted))
    drawn = day.lengths.draw(20_000, np.random.default_rng(day.seed))
    prompt, output = (float(tokens.mean()) for tokens in drawn)
    conditional, context = summaries.pooled(accepted).conditional, prompt + output
    each = {n: paces_of(own, n, conditional, rows, context, prompt, output) for n in names}
    return Setting(day, each, costs, ttft_ms / 1e3, tpot_steps / each["plain"][0].tokens_s)


def pace_table(setting: Setting) -> pd.DataFrame:
    """One row a policy and number of streams: tokens/s of the replica, its draft length, and the
    milliseconds a token of each stream."""
    return pd.DataFrame(
        {"policy": name, "streams": b, "tok_s": b * pace.tokens_s, "gamma": pace.gamma,
         "token_ms": 1e3 / pace.tokens_s}
        for name, paces in setting.paces.items()
        for b, pace in enumerate(paces, 1)
    )  # fmt: skip


def hourly(setting: Setting, sample: int) -> pd.DataFrame:
    """One row a policy and hour of the day: the rate of its requests, and the fewest replicas that
    keep the limits, by `sample` requests of one (NaN if no number does). Raises UserError if plain
    decoding misses them: there is nothing to compare with."""
    rates, rows = setting.day.rates(), []
    for name in tqdm(setting.paces, desc="sizing", unit="policy", delay=1):
        alone = setting.serve(name, RARE, sample)
        sizes, near = dict.fromkeys(rates, np.nan), 1
        if setting.within_limits(alone):
            for rate in sizes:
                near = sizes[rate] = setting.fewest_replicas(name, rate, sample, near)
        elif name == "plain":
            ttft_ms, tpot_ms = 1e3 * alone[["ttft_s", "tpot_s"]].quantile(0.95)
            raise UserError(
                f"plain misses the limits on an idle replica: p95 of TTFT {ttft_ms:.4g} ms and of "
                f"TPOT {tpot_ms:.4g} ms, and {1e3 * setting.ttft_s:.4g} and "
                f"{1e3 * setting.tpot_s:.4g} are allowed: raise the limits"
            )
        rows += [{"policy": name, "hour": hour, "rate": rate, "replicas": sizes[rate]}
                 for hour, rate in enumerate(rates)]  # fmt: skip
    return pd.DataFrame(rows)


def saved(hours: pd.DataFrame, name: str) -> float:
    """Share of plain decoding's replica-hours that a policy saves; negative if it needs more."""
    total = hours.groupby("policy")["replicas"].sum(min_count=HOURS)
    return float(1 - total[name] / total["plain"])


def peak(hours: pd.DataFrame, name: str) -> int:
    """Replicas that a policy needs in its busiest hour. Raises UserError if no number suffices."""
    most = hours.loc[hours["policy"] == name, "replicas"].max(skipna=False)
    if np.isnan(most):
        raise UserError(f"{name} misses the limits with any number of replicas: raise the limits")
    return int(most)


def busiest(setting: Setting, sample: int, replicas: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The busiest hour on this many replicas, by `sample` requests of one: a row of
    `request_metrics` a policy; and the requests, with the column policy."""
    rate, rows, requests = setting.day.rates().max(), [], []
    for name in setting.paces:
        served = setting.serve(name, rate, sample, replicas).assign(policy=name, state="done")
        seconds = (served["at_s"] + served["e2e_s"]).max() - served["at_s"].min()
        limits_ms = 1e3 * setting.ttft_s, 1e3 * setting.tpot_s
        rows.append({"policy": name} | request_metrics(served, seconds / replicas, *limits_ms))
        requests.append(served)
    return pd.DataFrame(rows), pd.concat(requests)


def metrics(
    setting: Setting, hours: pd.DataFrame, at_peak: pd.DataFrame, accepted: pd.DataFrame,
    policy: str,
) -> tuple[dict[str, float], dict[str, Any]]:  # fmt: skip
    """Metrics and series of one policy, for MLflow; all but `acceptance` are SIMULATED. hours and
    at_peak: from `hourly` and `busiest`."""
    values, accepted_at = summaries.acceptance_metrics(accepted)
    series: dict[str, Any] = dict(accepted_at)
    values |= at_peak.set_index("policy").loc[policy].dropna().to_dict() | {
        "fleet/saved": saved(hours, policy), "fleet/requests": setting.day.requests,
        "fleet/ttft_limit_ms": 1e3 * setting.ttft_s, "fleet/tpot_limit_ms": 1e3 * setting.tpot_s,
    }  # fmt: skip
    for name, suffix in ((policy, ""), ("plain", "_plain")):
        mine = hours[hours["policy"] == name].set_index("hour")["replicas"]
        values[f"fleet/replicas{suffix}"] = peak(hours, name)
        values[f"fleet/replica_hours{suffix}"] = mine.sum()
        series[f"fleet/replicas{suffix}_at_hour"] = mine.to_dict()
    return values, series
