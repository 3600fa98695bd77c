"""Many replicas behind a router: a fluid simulation of millions of requests. Figures made with it
are SIMULATED, whatever the table of costs was measured on.

A replica with b streams advances each of them by `tokens_s[b]` tokens a second (processor
sharing), so that what a stream has been given is the difference of one clock of the replica, its
*credit*, which stands still while a prompt is read. Only comings and endings are events.

What is simplified: tokens flow evenly, and the luck with guesses is drawn once a request; all texts
have one acceptance and all streams one context; a prompt is read at once, when its request gets a
place, and nobody writes meanwhile; who joins others waits for half of their round; its first round,
plain where a draft model would have to read the prompt, takes as long as its others; what that
reads is spread over the rounds.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import accumulate
from operator import mul

import numpy as np

from specexp.errors import UserError
from specexp.policy import Load
from specexp.serving import policies
from specexp.serving.arrivals import Arrivals
from specexp.serving.costs import Costs
from specexp.serving.goodput import GAMMAS

ROUTERS = ("least", "round_robin", "two_choices")


@dataclass(frozen=True)
class Pace:
    """How a replica writes under a policy; lists over its streams, 0 ... rows.

    gamma: guesses a round; tokens_s: tokens a second of each stream; round: tokens that a round
    brings a stream; over: those that the last round of an answer brings too many, and a plain
    first one too few; luck: an answer of n tokens takes as long as n + over + luck * sqrt(n) * z
    do on average, z being normal.
    """

    name: str
    gamma: Sequence[int]
    tokens_s: Sequence[float]
    round: Sequence[float]
    over: Sequence[float]
    luck: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.tokens_s) < 2 or not all(0 < x < math.inf for x in self.tokens_s[1:]):
            raise UserError(f"{self.name} needs a positive pace at one stream or more")

    @property
    def rows(self) -> int:
        return len(self.tokens_s) - 1


def pace(
    costs: Costs,
    name: str,
    conditional: Sequence[float],
    rows: int,
    context: float,
    prompt: float = 0.0,
    output: float = 1.0,
) -> Pace:
    """The pace of a policy: `plain`, `goodput`, or one of `policies.NAMES` that only looks at the
    rows. `goodput` knows costs and acceptance and is at every load the best of plain and all
    draft lengths.

    conditional[i]: P(guess i + 1 kept given that guess i was). The drafter reads prompts of
    `prompt` tokens, which answers of `output` tokens pay for, both means. A batch that is slower
    than a larger one is padded to it, so that one disturbed time does not stand in the way. Raises
    UserError.
    """
    if rows < 1:
        raise UserError(f"rows is {rows}; a replica serves at least one stream")
    if output <= 0:
        raise UserError(f"output is {output}; an answer has at least one token")
    check_policy(name)
    deepest = costs.gammas[-1]
    gammas = [0, *(g for g in GAMMAS if g <= deepest)]

    def tokens_s(b: int, gamma: int) -> float:
        tokens = _moments(conditional, gamma)[0]
        reading = b * tokens / output * costs.catch_up_s(prompt) if gamma else 0.0
        padded = (b, *(x for x in costs.batches if x > b))
        return tokens / (min(costs.round_s(x, gamma, context) for x in padded) + reading)

    if name == "goodput":
        chosen = [max(gammas, key=partial(tokens_s, b)) for b in range(1, rows + 1)]
    else:
        policy = policies.of("never" if name == "plain" else name, deepest=deepest)
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
    """Of the tokens X that a round of gamma guesses brings: their mean and mean square.

    By renewal theory rounds that pass n tokens pass them by (E[X^2] / E[X] - 1) / 2 on average, and
    their number varies by n Var[X] / E[X]^3 (Cox 1962, Renewal Theory, chapters 4 and 5)."""
    at_least = [1.0, *accumulate(conditional[:gamma], mul)]
    return math.fsum(at_least), math.fsum((2 * k + 1) * p for k, p in enumerate(at_least))


@dataclass(frozen=True, eq=False)
class Served:
    """What became of the requests, in the order of their coming, in seconds: `ttft_s` from its
    coming to the end of its first round, `tpot_s` from there for each further token (NaN for one
    token), `e2e_s`; all [n], `replica` int [n]. busy_s, stream_s: of each replica, seconds with a
    stream, and the same times the streams."""

    arrivals: Arrivals
    ttft_s: np.ndarray
    tpot_s: np.ndarray
    e2e_s: np.ndarray
    replica: np.ndarray
    busy_s: np.ndarray
    stream_s: np.ndarray

    @property
    def seconds(self) -> float:
        """From the first coming to the last ending."""
        at = self.arrivals.at_s
        return float((at + self.e2e_s).max() - at[0])


@dataclass(slots=True)
class _Replica:
    """Streams that share one pace. `ends` and `firsts`: heaps of (credit, request), at which an
    answer ends and its first round does; first_s: where the times of the latter go."""

    pace: Pace
    first_s: list[float]
    now: float = 0.0
    free: float = 0.0  # when the prompts are read
    credit: float = 0.0
    begin: float = 0.0  # the credit at which the latest stream begins; nobody begins before it
    streams: int = 0
    version: int = 0
    busy_s: float = 0.0
    stream_s: float = 0.0
    ends: list[tuple[float, int]] = field(default_factory=list)
    firsts: list[tuple[float, int]] = field(default_factory=list)
    waiting: deque[int] = field(default_factory=deque)

    def write(self, until: float) -> None:
        """Let time pass, up to the next ending at most."""
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

    def join(self, request: int, tokens: float, luck: float, read_s: float, waits: bool) -> None:
        """Read a prompt and write its answer; `waits`: for the round that runs, if one does."""
        pace, now = self.pace, self.now
        running = waits and self.streams and self.free <= now
        begin = self.credit + (pace.round[self.streams] / 2 if running else 0.0)
        self.begin = begin = begin if begin > self.begin else self.begin
        self.free = (self.free if self.free > now else now) + read_s
        self.streams = b = self.streams + 1
        first = pace.round[b]
        heappush(self.firsts, (begin + first, request))
        need = tokens + pace.over[b] + pace.luck[b] * luck
        heappush(self.ends, (begin + (need if need > first else first), request))

    def next_s(self) -> float:
        """When the next answer ends."""
        start = self.free if self.free > self.now else self.now
        return start + (self.ends[0][0] - self.credit) / self.pace.tokens_s[self.streams]

    def end(self, now: float) -> int:
        """The request whose answer ends now."""
        self.write(now)
        credit, request = heappop(self.ends)
        while self.firsts and self.firsts[0][0] <= credit:  # missed by a rounding
            self.first_s[heappop(self.firsts)[1]] = now
        self.streams -= 1
        if self.streams:
            self.credit = credit
        else:
            self.credit = self.begin = 0.0
        return request


def simulate(
    arrivals: Arrivals,
    pace: Pace,
    read_s: Callable[[float], float],
    replicas: int,
    router: str = "least",
    seed: int = 0,
    watch: Callable[[int], None] | None = None,
) -> Served:
    """Serve all that comes. read_s(tokens): seconds to read a prompt, as `Costs.prefill_s`.

    A request goes to the replica that the router names when it comes (`least`: the first of those
    with fewest requests; `two_choices`: the shorter of two drawn at random; `round_robin`) and
    stays there; beyond `pace.rows` streams requests wait in order. `watch` is told now and then
    how many have come. Raises UserError.
    """
    _check(arrivals, replicas)
    n, rows = len(arrivals), pace.rows
    lengths, which = np.unique(arrivals.prompt, return_inverse=True)
    reads = np.array([read_s(p) for p in lengths.tolist()])[which].tolist()
    at_s, tokens = arrivals.at_s.tolist(), arrivals.output.tolist()
    z = np.random.default_rng(seed).standard_normal(n)
    lucks = (z * np.sqrt(arrivals.output)).tolist()
    first_s, end_s, where, load = [0.0] * n, [0.0] * n, [0] * n, [0] * replicas
    fleet = [_Replica(pace, first_s) for _ in range(replicas)]
    route = _route(router, load, seed)
    events: list[tuple[float, int, int]] = []

    def end_until(time: float) -> None:
        while events and events[0][0] <= time:
            now, r, version = heappop(events)
            replica = fleet[r]
            if version == replica.version:
                end_s[replica.end(now)] = now
                load[r] -= 1
                if replica.waiting:
                    i = replica.waiting.popleft()
                    replica.join(i, tokens[i], lucks[i], reads[i], False)
                if replica.streams:
                    schedule(r, replica)

    def schedule(r: int, replica: _Replica) -> None:
        replica.version += 1
        heappush(events, (replica.next_s(), r, replica.version))

    for i, now in enumerate(at_s):
        end_until(now)
        where[i] = r = route(i)
        load[r] += 1
        replica = fleet[r]
        if replica.streams < rows:
            replica.write(now)
            replica.join(i, tokens[i], lucks[i], reads[i], True)
            schedule(r, replica)
        else:
            replica.waiting.append(i)
        if watch and not i % 4096:
            watch(i)
    end_until(math.inf)
    first, end = np.array(first_s), np.array(end_s)
    with np.errstate(invalid="ignore", divide="ignore"):
        further = np.where(arrivals.output > 1, arrivals.output - 1, np.nan)
        tpot_s = (end - first) / further
    return Served(
        arrivals, first - arrivals.at_s, tpot_s, end - arrivals.at_s, np.array(where),
        np.array([r.busy_s for r in fleet]), np.array([r.stream_s for r in fleet]),
    )  # fmt: skip


def check_policy(name: str) -> None:
    """Raises UserError for one that has no pace."""
    if name == "bandit":
        raise UserError("bandit learns by trying, which a fluid model cannot: use goodput")


def check_router(router: str) -> None:
    """Raises UserError for one that is not there."""
    if router not in ROUTERS:
        raise UserError(f"router {router!r} is unknown; use one of {', '.join(ROUTERS)}")


def _route(router: str, load: list[int], seed: int) -> Callable[[int], int]:
    """The router of a name: the replica of the i-th request, from how many each has."""
    replicas, draw = len(load), random.Random(seed).random

    def two_choices(i: int) -> int:
        a, b = int(draw() * replicas), int(draw() * replicas)
        return b if load[b] < load[a] else a

    routes: dict[str, Callable[[int], int]] = {
        "least": lambda i: load.index(min(load)),
        "round_robin": lambda i: i % replicas,
        "two_choices": two_choices,
    }
    check_router(router)
    return routes[router]


def _check(arrivals: Arrivals, replicas: int) -> None:
    if replicas < 1:
        raise UserError(f"replicas is {replicas}; a fleet has at least one")
    if not len(arrivals):
        raise UserError("no request comes; give at least one")
    if (np.diff(arrivals.at_s) < 0).any() or arrivals.at_s[0] < 0:
        raise UserError("requests must come in order, from 0 seconds on: sort them")
    if (arrivals.output <= 0).any() or (arrivals.prompt < 0).any():
        raise UserError("every request needs tokens to write, and none less than 0 to read")


@dataclass(frozen=True)
class Limits:
    """What a fleet is sized for: the `quantile` of TTFT and of TPOT stay within these seconds."""

    ttft_s: float
    tpot_s: float
    quantile: float = 0.95

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name} is {getattr(self, name)}; a limit is positive and finite")
        if not 0 < self.quantile < 1:
            raise UserError(f"quantile is {self.quantile}; it lies between 0 and 1")

    def of(self, served: Served) -> tuple[float, float]:
        """The quantiles of TTFT and TPOT; TPOT 0 if every answer is one token."""
        many = served.tpot_s[~np.isnan(served.tpot_s)]
        tpot_s = float(np.quantile(many, self.quantile)) if len(many) else 0.0
        return float(np.quantile(served.ttft_s, self.quantile)), tpot_s

    def kept(self, served: Served) -> bool:
        ttft_s, tpot_s = self.of(served)
        return ttft_s <= self.ttft_s and tpot_s <= self.tpot_s


def size(
    arrivals: Arrivals,
    pace: Pace,
    read_s: Callable[[float], float],
    limits: Limits,
    router: str = "least",
    seed: int = 0,
    near: int = 1,
) -> int:
    """A number of replicas that keeps the limits where one less does not, by bisection from `near`
    (the fewest, since more replicas never do worse but for the router's chance).

    Raises UserError when requests would miss the limits alone.
    """
    _check(arrivals, near)
    alone = simulate(_apart(arrivals, pace, read_s), pace, read_s, 1, seed=seed)
    if not limits.kept(alone):
        ttft_s, tpot_s = limits.of(alone)
        raise UserError(
            f"{pace.name} misses the limits on an idle replica: TTFT {1e3 * ttft_s:.4g} ms and "
            f"TPOT {1e3 * tpot_s:.4g} ms at quantile {limits.quantile:g}, and "
            f"{1e3 * limits.ttft_s:.4g} and {1e3 * limits.tpot_s:.4g} are allowed: raise the limits"
        )

    def enough(replicas: int) -> bool:
        return limits.kept(simulate(arrivals, pace, read_s, replicas, router, seed))

    few, many = 0, near
    while not enough(many):
        few, many = many, 2 * many
        if few > len(arrivals):
            raise UserError(f"router {router} keeps the limits with no number of replicas")
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if enough(middle) else (middle, many)
    return many


def _apart(arrivals: Arrivals, pace: Pace, read_s: Callable[[float], float]) -> Arrivals:
    """The same requests, each coming when the one before it has long been answered."""
    most = float(arrivals.output.max())
    need = most + pace.round[1] + pace.over[1] + 9 * pace.luck[1] * math.sqrt(most)
    longest = read_s(float(arrivals.prompt.max())) + need / pace.tokens_s[1]
    return Arrivals(2 * longest * np.arange(len(arrivals)), arrivals.prompt, arrivals.output)
