"""A fluid simulation of many replicas behind a router, for millions of requests. Figures made with
it are SIMULATED, whatever machine the cost table was measured on.

A replica with b streams advances each of them by `tokens_s[b]` tokens a second (processor sharing).
So a replica needs one clock only, its *credit*: the tokens that a stream present from the start
would have got. It stands still during prefill. The events are arrivals and the ends of outputs.

Simplifications:
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from itertools import accumulate
from operator import mul

import numpy as np

from specexp.errors import UserError
from specexp.policy import Load
from specexp.serving import policies
from specexp.serving.arrivals import Arrivals
from specexp.serving.cost_table import Costs
from specexp.serving.goodput import GAMMAS

ALONE_S = 1e5  # between requests that each find a replica idle


@dataclass(frozen=True)
class Pace:
    """The speed of a replica under a policy; lists over its number of streams, 0..rows.

    gamma: draft length; tokens_s: tokens a second of each stream; round: expected tokens of a
    stream a round; over: expected tokens that the last round of an output yields beyond its end,
    and those that a plain first round lacks; spread: an output of n tokens takes the time of
    n + over + spread * sqrt(n) * z tokens, z being standard normal.
    """

    name: str
    gamma: Sequence[int]
    tokens_s: Sequence[float]
    round: Sequence[float]
    over: Sequence[float]
    spread: Sequence[float]

    @property
    def rows(self) -> int:
        return len(self.tokens_s) - 1


def pace(
    costs: Costs, name: str, conditional: Sequence[float], rows: int, context: float,
    prompt: float = 0.0, output: float = 1.0,
) -> Pace:  # fmt: skip
    """The pace of a policy: `plain`, one of `policies.PRICED`, or one that depends on the number
    of rows alone. Those of `PRICED` are the best of plain decoding and all draft lengths at every
    number of streams: they know costs and acceptance.

    conditional[i]: P(draft token i + 1 accepted given that token i was). The drafter's prefill of
    `prompt` tokens a request is spread over the rounds of an output of `output` tokens, both means.
    A batch that the table makes slower than a larger one takes the larger one's time, so that a
    single disturbed measurement does not matter. Raises UserError.
    """
    check_policy(name)
    deepest = costs.gammas[-1]
    gammas = [0, *(g for g in GAMMAS if g <= deepest)]

    def tokens_s(b: int, gamma: int) -> float:
        tokens = _moments(conditional, gamma)[0]
        reading = b * tokens / output * costs.catch_up_s(prompt) if gamma else 0.0
        padded = (b, *(x for x in costs.batches if x > b))
        return tokens / (min(costs.round_s(x, gamma, context) for x in padded) + reading)

    if name in policies.PRICED:
        chosen = [max(gammas, key=partial(tokens_s, b)) for b in range(1, rows + 1)]
    else:
        policy = policies.of(name, deepest=deepest)
        plans = [policy.choose(Load(b, int(context))) for b in range(1, rows + 1)]
        chosen = [plan.tree.depth for plan in plans]
    chosen = [chosen[0], *chosen]
    moments = [_moments(conditional, gamma) for gamma in chosen]
    return Pace(
        name, chosen, [0.0, *(tokens_s(b, chosen[b]) for b in range(1, rows + 1))],
        [mean for mean, _ in moments],
        [(square / mean - 1) / 2 + costs.reads * (mean - 1) for mean, square in moments],
        [math.sqrt(max(0.0, square / mean - mean)) for mean, square in moments],
    )  # fmt: skip


def _moments(conditional: Sequence[float], gamma: int) -> tuple[float, float]:
    """E[X] and E[X^2] of the tokens X that a round of gamma draft tokens yields.

    By renewal theory, rounds that reach n tokens overshoot them by (E[X^2] / E[X] - 1) / 2 on
    average, and the variance of their number is n Var[X] / E[X]^3 (Cox 1962, Renewal Theory,
    chapters 4 and 5)."""
    at_least = [1.0, *accumulate(conditional[:gamma], mul)]
    return math.fsum(at_least), math.fsum((2 * k + 1) * p for k, p in enumerate(at_least))


@dataclass(frozen=True, eq=False)
class Served:
    """The requests in order of arrival, all [n]: ttft_s, seconds from arrival to the end of the
    first round; tpot_s, seconds from there for each further token (NaN for outputs of one token);
    e2e_s; replica int. Of each replica: busy_s, seconds with a stream; stream_s, those times the
    number of streams."""

    arrivals: Arrivals
    ttft_s: np.ndarray
    tpot_s: np.ndarray
    e2e_s: np.ndarray
    replica: np.ndarray
    busy_s: np.ndarray
    stream_s: np.ndarray

    @property
    def seconds(self) -> float:
        """From the first arrival to the last end."""
        at = self.arrivals.at_s
        return float((at + self.e2e_s).max() - at[0])


@dataclass(slots=True)
class _Replica:
    """Streams that share one pace. work, of all requests: tokens of output, their deviation (see
    `Pace`), seconds of prefill. ends, firsts: heaps of (credit, request), at which an output and
    its first round end; first_s: the times of the latter, of all requests."""

    pace: Pace
    work: Sequence[tuple[float, float, float]]
    first_s: list[float]
    now: float = 0.0
    free: float = 0.0  # when prefill ends
    credit: float = 0.0
    begin: float = 0.0  # the credit at which the latest stream begins; no later one is before it
    streams: int = 0
    busy_s: float = 0.0
    stream_s: float = 0.0
    ends: list[tuple[float, int]] = field(default_factory=list)
    firsts: list[tuple[float, int]] = field(default_factory=list)
    waiting: deque[int] = field(default_factory=deque)

    def write(self, until: float) -> None:
        """Advance all streams to a time, no later than the next end."""
        b = self.streams
        if b:
            start = self.free if self.free > self.now else self.now
            if until > start:
                speed, credit = self.pace.tokens_s[b], self.credit
                reached = min(credit + (until - start) * speed, self.ends[0][0])
                while self.firsts and self.firsts[0][0] <= reached:
                    at, request = heappop(self.firsts)
                    self.first_s[request] = start + (at - credit) / speed
                self.credit = reached
            self.busy_s += until - self.now
            self.stream_s += b * (until - self.now)
        self.now = until

    def arrive(self, request: int, now: float) -> None:
        """Add a stream, or let the request wait for one to end."""
        if self.streams < self.pace.rows:
            self.write(now)
            self._join(request, waits=True)
        else:
            self.waiting.append(request)

    def _join(self, request: int, waits: bool) -> None:
        """Add a stream: prefill, then output; `waits`: for the round that is under way, if any."""
        pace, now, (tokens, deviation, read_s) = self.pace, self.now, self.work[request]
        running = waits and self.streams and self.free <= now
        begin = self.credit + (pace.round[self.streams] / 2 if running else 0.0)
        self.begin = begin = begin if begin > self.begin else self.begin
        self.free = (self.free if self.free > now else now) + read_s
        self.streams = b = self.streams + 1
        first = pace.round[b]
        heappush(self.firsts, (begin + first, request))
        need = tokens + pace.over[b] + pace.spread[b] * deviation
        heappush(self.ends, (begin + (need if need > first else first), request))

    @property
    def next_s(self) -> float:
        """When the next output ends; inf if there is none."""
        if not self.streams:
            return math.inf
        start = self.free if self.free > self.now else self.now
        return start + (self.ends[0][0] - self.credit) / self.pace.tokens_s[self.streams]

    def end(self, now: float) -> int:
        """Remove the stream whose output ends now, and let the next request in; returns the one
        that ended."""
        self.write(now)
        credit, request = heappop(self.ends)
        while self.firsts and self.firsts[0][0] <= credit:  # missed by a rounding
            self.first_s[heappop(self.firsts)[1]] = now
        self.streams -= 1
        if self.streams:
            self.credit = credit
        else:
            self.credit = self.begin = 0.0
        if self.waiting:
            self._join(self.waiting.popleft(), waits=False)
        return request


def simulate(
    arrivals: Arrivals, pace: Pace, read_s: Callable[[float], float], replicas: int, seed: int = 0,
) -> Served:  # fmt: skip
    """Serve all arrivals. read_s(tokens): seconds of a prompt's prefill, as `Costs.prefill_s`.

    The router gives a request to the first replica of those with the fewest requests, where it
    stays. Beyond `pace.rows` streams requests wait in order.
    """
    n = len(arrivals)
    lengths, which = np.unique(arrivals.prompt, return_inverse=True)
    reads = np.array([read_s(p) for p in lengths.tolist()])[which]
    deviations = np.random.default_rng(seed).standard_normal(n) * np.sqrt(arrivals.output)
    work = list(zip(arrivals.output.tolist(), deviations.tolist(), reads.tolist(), strict=True))
    first_s, end_s, where, load = [0.0] * n, [0.0] * n, [0] * n, [0] * replicas
    fleet = [_Replica(pace, work, first_s) for _ in range(replicas)]
    next_s = [math.inf] * replicas  # when the next output of each ends

    def end_until(time: float) -> None:
        while (now := min(next_s)) <= time:
            r = next_s.index(now)
            end_s[fleet[r].end(now)] = now
            load[r] -= 1
            next_s[r] = fleet[r].next_s

    for i, now in enumerate(arrivals.at_s.tolist()):
        end_until(now)
        where[i] = r = load.index(min(load))
        load[r] += 1
        fleet[r].arrive(i, now)
        next_s[r] = fleet[r].next_s
    end_until(1e300)  # the rest
    first, end = np.array(first_s), np.array(end_s)
    further = np.where(arrivals.output > 1, arrivals.output - 1, np.nan)
    return Served(
        arrivals, first - arrivals.at_s, (end - first) / further, end - arrivals.at_s,
        np.array(where), np.array([r.busy_s for r in fleet]), np.array([r.stream_s for r in fleet]),
    )  # fmt: skip


def check_policy(name: str) -> None:
    """Raises UserError for a policy that has no pace."""
    if name == "bandit":
        raise UserError("bandit learns by trying, which a fluid model cannot: use goodput")


@dataclass(frozen=True)
class Limits:
    """Latency limits of a fleet, in seconds, of the 95th percentiles of TTFT and TPOT."""

    ttft_s: float
    tpot_s: float

    def kept(self, served: Served) -> bool:
        """Whether both percentiles are within the limits."""
        ttft_s, tpot_s = p95(served)
        return ttft_s <= self.ttft_s and not tpot_s > self.tpot_s


def p95(served: Served) -> tuple[float, float]:
    """The 95th percentiles of TTFT and TPOT in seconds; NaN if all outputs are one token."""
    tpot_s = served.tpot_s[~np.isnan(served.tpot_s)]
    tpot_p95 = np.percentile(tpot_s, 95) if len(tpot_s) else math.nan
    return float(np.percentile(served.ttft_s, 95)), float(tpot_p95)


def size(
    arrivals: Arrivals, pace: Pace, read_s: Callable[[float], float], limits: Limits, seed: int = 0,
    near: int = 1,
) -> int:  # fmt: skip
    """The fewest replicas that keep the limits, by bisection, beginning at `near`.

    Raises UserError when requests miss the limits even on an idle replica.
    """
    apart = replace(arrivals, at_s=ALONE_S * np.arange(len(arrivals)))
    alone = simulate(apart, pace, read_s, 1, seed)
    if not limits.kept(alone):
        ttft_s, tpot_s = p95(alone)
        raise UserError(
            f"{pace.name} misses the limits on an idle replica: p95 of TTFT {1e3 * ttft_s:.4g} ms "
            f"and of TPOT {1e3 * tpot_s:.4g} ms, and {1e3 * limits.ttft_s:.4g} and "
            f"{1e3 * limits.tpot_s:.4g} are allowed: raise the limits"
        )

    def enough(replicas: int) -> bool:
        return limits.kept(simulate(arrivals, pace, read_s, replicas, seed))

    few, many = 0, near
    while not enough(many):
        few, many = many, 2 * many
    return few + 1 + bisect_left(range(few + 1, many), True, key=enough)
