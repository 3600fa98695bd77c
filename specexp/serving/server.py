"""Continuous batching: requests wait, are prefilled in chunks, decoded round by round, and leave.

One step of the server admits the requests for which there are rows, prefills one chunk of their
prompts and runs one round, in which each row drafts as much as the policy says. A drafter that has
not read all of a row first catches up, a chunk a step; a drafter that reads prompts sits out a
row's first round, so that no first token waits for it. A row is free as soon as its request is
done: the next request takes it, or the last row moves into it, so that passes cover no more rows
than are in use. The server does not know what a bank is made of: an engine (bank.py) or a
simulation (simulate.py).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

from specexp.errors import UserError
from specexp.policy import Load, Plan, Policy, Stream
from specexp.serving.engine_rows import OutOfMemory, window
from specexp.trace import Step
from specexp.tree import Tree

log = logging.getLogger(__name__)
T = TypeVar("T")

FADE = 0.8  # by which the counts of a row's acceptance shrink every round
NEAR = 16  # tokens: rows whose drafter lacks at most so many catch up together, in one pass


class Bank(Protocol):
    """The rows that requests are served on: see `bank.EngineBank`."""

    rows: int
    slots: int
    room: int

    @property
    def context(self) -> int: ...
    @property
    def drafter_context(self) -> int: ...
    @property
    def steady(self) -> bool: ...
    @property
    def reads(self) -> bool: ...
    def clock(self) -> float: ...
    def wait(self, until: float) -> None: ...
    def enter(self, row: int, text: Sequence[int], stream: int) -> None: ...
    def read(self, row: int, start: int, stop: int) -> None: ...
    def begin(self, row: int, limit: int) -> None: ...
    def catch_up_row(self, row: int, start: int, stop: int) -> None: ...
    def catch_up(self, budget: Sequence[int], longest: int, missed: int) -> None: ...
    def round(
        self, budget: Sequence[int], longest: int, tree: Tree, reach: tuple[int, ...]
    ) -> list[Step]: ...
    def move(self, source: int, target: int, length: int) -> None: ...
    def leave(self, row: int, broken: bool = False) -> None: ...
    def text(self, row: int, start: int, stop: int) -> list[int]: ...


@dataclass(frozen=True)
class Request:
    """prompt: token ids; new: the most tokens to generate; at_s: arrival, in seconds from the
    start; stream: the name of its noise; kind: its category, for tables."""

    prompt: Sequence[int]
    new: int
    at_s: float = 0.0
    stream: int = 0
    kind: str = ""


State = Literal["waiting", "reading", "writing", "done", "refused", "cancelled", "failed"]


@dataclass
class Answer:
    """A request and its outcome. `reason`: why it was refused or failed; begun_s: when it first got
    a row; deliveries: (seconds, tokens so far), one a round; passes: rounds that it took part in.
    Seconds count from the server's start."""

    request: Request
    came_s: float
    state: State = "waiting"
    reason: str = ""
    tokens: list[int] = field(default_factory=list)
    begun_s: float | None = None
    ended_s: float | None = None
    deliveries: list[tuple[float, int]] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    passes: int = 0

    @property
    def over(self) -> bool:
        return self.state in ("done", "refused", "cancelled", "failed")


@dataclass
class Seat:
    """An occupied row. In tokens: `length` of the sequence, `limit` that ends it, `read` by the
    target's prefill and `draft_read` by the drafter, if it `reads`. The rest is as in `Stream`."""

    answer: Answer
    length: int
    limit: int
    reads: bool
    read: int = 0
    draft_read: int = 0
    judged: float = 0.0
    kept: float = 0.0
    asked: float = 0.0
    made: float = 0.0

    @property
    def writing(self) -> bool:
        return self.answer.state == "writing"

    @property
    def behind(self) -> int:
        return self.length - 1 - self.draft_read if self.reads else 0


@dataclass(frozen=True)
class Tick:
    """One step. busy_s: seconds spent in the bank, the rest being the scheduler's overhead;
    waiting: requests in the queue; read: prompt tokens prefilled. Of its round: live, rows being
    decoded; rows, those that its passes covered; speculated, those that had guesses; guesses
    drafted and accepted; tokens emitted."""

    begin_s: float
    end_s: float
    busy_s: float
    waiting: int
    read: int
    live: int
    rows: int
    speculated: int
    drafted: int
    accepted: int
    emitted: int


class Server:
    """Serves requests on a bank under a policy.

    chunk: prompt tokens prefilled a step, by the target and again by the drafter, so that a long
    prompt does not stall the requests being decoded; queue: requests that may wait, beyond which
    they are refused.
    """

    def __init__(self, bank: Bank, policy: Policy, chunk: int = 512, queue: int = 1024) -> None:
        if policy.widest > bank.room:
            raise UserError(
                f"the bank leaves {bank.room} slots for a draft and the policy wants "
                f"{policy.widest}: make the bank with more room"
            )
        if chunk < 1 or queue < 0:
            raise UserError(f"chunk is {chunk} and queue {queue}; at least 1 and 0 are needed")
        self.bank, self.policy, self.chunk, self.queue = bank, policy, chunk, queue
        self.seats: list[Seat | None] = [None] * bank.rows
        self.waiting: deque[Answer] = deque()
        self.ticks: list[Tick] = []
        self.notes: list[str] = []
        self._busy = 0.0
        self.rows = bank.rows  # that may be used; fewer once memory has run out
        self.started = bank.clock()

    @property
    def now(self) -> float:
        return self.bank.clock() - self.started

    @property
    def open(self) -> int:
        """Requests that wait or have a row."""
        return len(self.waiting) + sum(seat is not None for seat in self.seats)

    def submit(self, request: Request, came_s: float | None = None) -> Answer:
        """Queue a request, or refuse it with the reason; invalid ones never reach a row."""
        answer = Answer(request, self.now if came_s is None else came_s)
        P, need = len(request.prompt), len(request.prompt) + request.new
        if not P:
            return self._end(answer, "refused", "the prompt is empty; give it at least one token")
        if request.new < 1:
            said = f"{request.new} new tokens asked for; ask for at least one"
            return self._end(answer, "refused", said)
        most = min(self.bank.context, self.bank.slots - self.bank.room)
        if need > most:
            return self._end(
                answer, "refused",
                f"a prompt of {P} tokens and {request.new} new ones need {need} slots, "
                f"{need - most} more than the {most} of a row",
            )  # fmt: skip
        if len(self.waiting) >= self.queue + self.seats[: self.rows].count(None):
            return self._end(answer, "refused", f"the queue is full: {self.queue} requests wait")
        self.waiting.append(answer)
        return answer

    def cancel(self, answer: Answer) -> None:
        """Stop a request. Its answer keeps the tokens generated so far; its row is free."""
        if answer.over:
            return
        if answer.state == "waiting":
            self.waiting = deque(other for other in self.waiting if other is not answer)
            self._end(answer, "cancelled")
            return
        row = next(i for i, seat in enumerate(self.seats) if seat and seat.answer is answer)
        self._vacate(row, "cancelled")

    def step(self) -> bool:
        """Admit, prefill, run a round; False when there was nothing to do."""
        self._admit()
        if not any(self.seats):
            return False
        begin, self._busy = self.now, 0.0
        waiting = len(self.waiting)
        try:
            read = self._read()
            rows, steps = self._round()
        except OutOfMemory as e:
            self._shrink(str(e))
            return True
        self._compact()
        self.ticks.append(Tick(
            begin, self.now, self._busy, waiting, read, len(steps), rows,
            speculated=sum(step.drafted > 0 for step in steps),
            drafted=sum(step.drafted for step in steps),
            accepted=sum(step.accepted for step in steps),
            emitted=sum(step.emitted for step in steps),
        ))  # fmt: skip
        return True

    def _admit(self) -> None:
        for row in range(self.rows):
            if not self.waiting:
                return
            if self.seats[row] is None:
                answer = self.waiting.popleft()
                answer.state = "reading"
                answer.begun_s = self.now if answer.begun_s is None else answer.begun_s
                text = [*answer.request.prompt, *answer.tokens]
                limit = len(answer.request.prompt) + answer.request.new
                self.seats[row] = Seat(answer, len(text), limit, self.bank.reads)
                self.bank.enter(row, text, answer.request.stream)

    def _read(self) -> int:
        """Prefill one chunk of the prompts, in the order of arrival; returns its tokens."""
        left = self.chunk
        reading = [(row, s) for row, s in enumerate(self.seats) if s and not s.writing]
        for row, seat in sorted(reading, key=lambda pair: pair[1].answer.came_s):
            stop = min(seat.length - 1, seat.read + left)
            if stop > seat.read:
                self._timed(self.bank.read, row, seat.read, stop)
                left -= stop - seat.read
                seat.read = stop
            if seat.read == seat.length - 1:
                self._timed(self.bank.begin, row, seat.limit)
                seat.answer.state = "writing"
            if not left:
                break
        return self.chunk - left

    def _round(self) -> tuple[int, list[Step]]:
        """One round of the rows in use; returns how many rows it covered, and its steps."""
        top = 1 + max(row for row, seat in enumerate(self.seats) if seat)
        used = self.seats[:top]
        if not any(seat and seat.writing for seat in used):
            return 0, []
        longest = max(seat.length for seat in used if seat)
        context = window(longest + self.bank.room, self.bank.slots)
        load = Load(top, context, len(self.waiting), tuple(
            Stream(s.behind, s.judged, s.kept, s.asked, s.made, s.answer.passes)
            if s and s.writing else None
            for s in used
        ))  # fmt: skip
        begin = self.now
        plan = self._possible(self.policy.choose(load), load, longest)
        lacking = self._catch_up(plan.budget, longest) if plan.tree.depth else set()
        steps = self._timed(self.bank.round, plan.budget, longest, plan.tree, plan.reach)
        for step in steps:
            self._settle(step, plan)
        judged = [step for step in steps if step.row not in lacking]
        seconds = self.now - begin if self.bank.steady else None
        self.policy.learn(load, plan, judged, seconds)
        return top, steps

    def _possible(self, plan: Plan, load: Load, longest: int) -> Plan:
        """The plan with a budget for every row (-1: it is not decoded), cut to the drafter's
        context, and to 0 in a row's first round if the drafter would have to read the prompt."""
        most = max(0, self.bank.drafter_context - longest)
        reads = self.bank.reads
        budget = tuple(
            -1 if s is None else 0 if reads and not s.rounds else min(most, plan.depth(row))
            for row, s in enumerate(load.streams)
        )
        return plan._replace(tree=plan.tree.cut(max(0, *budget)), budget=budget)

    def _catch_up(self, budget: Sequence[int], longest: int) -> set[int]:
        """Let the drafter catch up with the rows that draft: those that it lags far behind one by
        one, a chunk in all, then the others in one pass. Returns the rows that it still lacks
        tokens of."""
        left = max(self.chunk, NEAR)  # more than a round adds
        drafting = zip(self.seats, budget, strict=False)
        writing = [(row, s) for row, (s, depth) in enumerate(drafting) if s and depth > 0]
        for row, seat in writing:
            if seat.behind > NEAR and left:
                stop = seat.draft_read + min(seat.behind, left)
                self._timed(self.bank.catch_up_row, row, seat.draft_read, stop)
                left -= stop - seat.draft_read
                seat.draft_read = stop
        near = [seat for _, seat in writing if seat.behind <= NEAR]
        if lag := max((seat.behind for seat in near), default=0):
            self._timed(self.bank.catch_up, budget, longest, lag)
        for seat in near:
            seat.draft_read = seat.length - 1
        return {row for row, seat in writing if seat.behind}

    def _settle(self, step: Step, plan: Plan) -> None:
        seat = self.seats[step.row]
        assert seat is not None
        answer = seat.answer
        if step.broken:
            self._vacate(step.row, "failed", f"{step.broken} produced NaN or infinite logits")
            return
        drafts = not seat.behind and plan.depth(step.row) > 0
        seat.length += step.emitted
        if drafts:
            seat.draft_read = seat.length - 1
        if drafts and (asked := plan.asked(step)):
            seat.judged = FADE * seat.judged + min(step.accepted + 1, asked)
            seat.kept = FADE * seat.kept + step.accepted
            seat.asked = FADE * seat.asked + asked
            seat.made = FADE * seat.made + step.drafted
        answer.drafted += step.drafted
        answer.accepted += step.accepted
        answer.passes += 1
        answer.deliveries.append((self.now, seat.length - len(answer.request.prompt)))
        if step.done:
            self._vacate(step.row, "done")

    def _compact(self) -> None:
        """Move the last rows into free ones that no waiting request will take."""
        holes = [row for row, seat in enumerate(self.seats) if seat is None]
        for hole in holes[len(self.waiting) :]:
            last = max((row for row, seat in enumerate(self.seats) if seat), default=-1)
            if hole < last:
                seat = self.seats[last]
                assert seat is not None
                self._timed(self.bank.move, last, hole, seat.length)
                self.bank.leave(last)
                self.seats[hole], self.seats[last] = seat, None

    def _vacate(self, row: int, state: State, reason: str = "") -> None:
        seat = self.seats[row]
        assert seat is not None
        self._collect(row, seat)
        self.bank.leave(row, broken=state == "failed")
        self.seats[row] = None
        self._end(seat.answer, state, reason)

    def _collect(self, row: int, seat: Seat) -> None:
        P = len(seat.answer.request.prompt)
        seat.answer.tokens = self.bank.text(row, P, seat.length)

    def _shrink(self, why: str) -> None:
        """Use half as many rows from now on; requests in the others go back to the front of the
        queue, with what they have generated."""
        used = [row for row, seat in enumerate(self.seats) if seat]
        if used == [0]:
            self._vacate(0, "failed", f"out of memory with one request alone: {why}")
            return
        self.rows = self.bank.rows = max(1, (used[-1] + 1) // 2)
        for row in reversed(range(self.rows, len(self.seats))):
            seat = self.seats[row]
            if seat:
                self._collect(row, seat)
                self.bank.leave(row)
                self.seats[row] = None
                seat.answer.state = "waiting"
                self.waiting.appendleft(seat.answer)
        self._note(f"out of memory with {used[-1] + 1} rows: going on with {self.rows} ({why})")

    def _note(self, line: str) -> None:
        self.notes.append(line)
        log.warning(line)

    def _end(self, answer: Answer, state: State, reason: str = "") -> Answer:
        assert not answer.over, "a request is answered once"
        answer.state, answer.reason, answer.ended_s = state, reason, self.now
        return answer

    def _timed(self, call: Callable[..., T], *args: object) -> T:
        begin = self.bank.clock()
        made = call(*args)
        self._busy += self.bank.clock() - begin
        return made


class Arriving(Protocol):
    """A source of requests."""

    def due(self, now: float, open_: int) -> list[tuple[float, Request]]:
        """Requests that have arrived by now, with their times, while `open_` are unfinished."""
        ...

    def next_s(self) -> float | None:
        """When the next one arrives; None if that is not known, or if none will."""
        ...

    @property
    def left(self) -> int: ...


class Timed:
    """An open load: requests arrive at their own times, however many are unfinished."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self.requests = deque(sorted(requests, key=lambda r: r.at_s))

    def due(self, now: float, open_: int) -> list[tuple[float, Request]]:
        found = []
        while self.requests and self.requests[0].at_s <= now:
            found.append((self.requests[0].at_s, self.requests.popleft()))
        return found

    def next_s(self) -> float | None:
        return self.requests[0].at_s if self.requests else None

    @property
    def left(self) -> int:
        return len(self.requests)


class Closed:
    """A closed loop: as soon as a request is done, the next one arrives; with `again`, the first
    one follows the last, for ever."""

    def __init__(self, requests: Iterable[Request], concurrency: int, again: bool = False) -> None:
        if concurrency < 1:
            raise UserError(f"concurrency is {concurrency}; a closed loop needs 1 stream or more")
        self.requests, self.concurrency, self.again = deque(requests), concurrency, again

    def due(self, now: float, open_: int) -> list[tuple[float, Request]]:
        count = min(len(self.requests), max(0, self.concurrency - open_))
        found = [self.requests.popleft() for _ in range(count)]
        if self.again:
            self.requests.extend(found)
        return [(now, request) for request in found]

    def next_s(self) -> float | None:
        return None

    @property
    def left(self) -> int:
        return len(self.requests)


def advance(server: Server, arriving: Arriving, answers: list[Answer]) -> bool:
    """Submit what has arrived and make one step, or wait for an arrival; False when all requests
    are answered."""
    now = server.now
    for came_s, request in arriving.due(now, server.open):
        answers.append(server.submit(request, came_s))
    if server.step():
        return True
    if (until := arriving.next_s()) is not None:
        server.bank.wait(server.started + until)
        return True
    return arriving.left > 0


def serve(
    server: Server, arriving: Arriving, watch: Callable[[Server], None] | None = None
) -> list[Answer]:
    """Serve until all requests are answered; the answers in the order of arrival."""
    answers: list[Answer] = []
    while advance(server, arriving, answers):
        if watch:
            watch(server)
    return answers
