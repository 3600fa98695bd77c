"""Continuous batching: requests wait, are prefilled in chunks, decoded round by round, and leave.

One step of the server admits requests while there are free rows, prefills one chunk of their
prompts and runs one round, in which each row drafts as much as the policy says. A drafter that has
not read all tokens of a row first catches up, one chunk per step. A drafter that reads prompts does
not draft in a row's first round, so that no first token waits for it. A row is free as soon as its
request is done. The next request takes it, or the last row moves into it, so that passes cover no
more rows than are in use. The rows run on an engine (engine_rows.py) or in a simulation
(simulated_rows.py); the server does not know which.
"""

import logging
from collections import deque
from collections.abc import Callable
from typing import TypeAlias, TypeVar

from specexp.errors import UserError, check_type
from specexp.policy import Load, Plan, Policy, planned
from specexp.sequences import check_tokens
from specexp.serving.engine_rows import EngineRows, OutOfMemory, window
from specexp.serving.requests import Request, Response, Row, ServerStep, State
from specexp.serving.simulated_rows import SimulatedRows
from specexp.trace import Step

log = logging.getLogger(__name__)
T = TypeVar("T")
AnyRows: TypeAlias = EngineRows | SimulatedRows

NEAR = 16  # tokens: rows whose drafter lacks at most so many catch up together, in one pass


class Server:
    """Serves requests on rows under a policy.

    chunk: prompt tokens prefilled per step, by the target and again by the drafter, so that a long
    prompt does not stall the requests being decoded. queue: the most requests that may wait;
    further ones are refused.
    """

    def __init__(self, rows: AnyRows, policy: Policy, chunk: int = 512, queue: int = 1024) -> None:
        if policy.widest > rows.slack:
            raise UserError(
                f"the rows leave {rows.slack} slots for a draft and the policy wants "
                f"{policy.widest}: make them with more slack"
            )
        check_type("chunk", chunk, "int")
        check_type("queue", queue, "int")
        if chunk < 1 or queue < 0:
            raise UserError(f"chunk is {chunk} and queue {queue}; use at least 1 and 0")
        self.rows, self.policy, self.chunk, self.queue = rows, policy, chunk, queue
        self.occupied: list[Row | None] = [None] * rows.count
        self.usable = rows.count  # fewer once memory has run out
        self.waiting: deque[Response] = deque()
        self.steps: list[ServerStep] = []
        self.notes: list[str] = []
        self.started = rows.clock()
        self._busy = 0.0

    @property
    def now(self) -> float:
        return self.rows.clock() - self.started

    @property
    def open(self) -> int:
        """Requests that wait or have a row."""
        return len(self.waiting) + sum(row is not None for row in self.occupied)

    def submit(self, request: Request, came_s: float | None = None) -> Response:
        """Queue a request, or refuse it with the reason; invalid ones never reach a row."""
        response = Response(request, self.now if came_s is None else came_s)
        if reason := self._refusal(request):
            return response.end("refused", reason)
        self.waiting.append(response)
        return response

    def _refusal(self, request: Request) -> str:
        P, need = len(request.prompt), len(request.prompt) + request.new
        most = min(self.rows.context, self.rows.slots - self.rows.slack)
        try:
            check_tokens(request.prompt, "the prompt", self.rows.vocab)
        except UserError as e:
            return str(e)
        if request.new < 1:
            return f"{request.new} new tokens asked for; ask for at least one"
        if need > most:
            return (
                f"a prompt of {P} tokens and {request.new} new ones need {need} slots, "
                f"{need - most} more than the {most} of a row"
            )
        if len(self.waiting) >= self.queue + self.occupied[: self.usable].count(None):
            return f"the queue is full: {self.queue} requests wait"
        return ""

    def step(self) -> bool:
        """Admit, prefill, run a round; False when there was nothing to do."""
        self._admit()
        if not any(self.occupied):
            return False
        begin, self._busy = self.now, 0.0
        waiting = len(self.waiting)
        try:
            read = self._prefill()
            covered, steps = self._round()
        except OutOfMemory as e:
            self._shrink(str(e))
            return True
        self._compact()
        self.steps.append(ServerStep(
            begin, self.now, self._busy, waiting, read, len(steps), covered,
            speculated=sum(step.drafted > 0 for step in steps),
            drafted=sum(step.drafted for step in steps),
            accepted=sum(step.accepted for step in steps),
            emitted=sum(step.emitted for step in steps),
        ))  # fmt: skip
        return True

    def _admit(self) -> None:
        for at in range(self.usable):
            if not self.waiting:
                return
            if self.occupied[at] is None:
                response = self.waiting.popleft()
                response.state = "reading"
                response.begun_s = self.now if response.begun_s is None else response.begun_s
                request = response.request
                text = [*request.prompt, *response.tokens]
                limit = len(request.prompt) + request.new
                self.occupied[at] = Row(response, len(text), limit, self.rows.reads)
                self.rows.enter(at, text, request.stream)

    def _prefill(self) -> int:
        """Prefill one chunk of the prompts, in the order of arrival; returns its tokens."""
        left = self.chunk
        reading = [(at, row) for at, row in enumerate(self.occupied) if row and not row.writing]
        for at, row in sorted(reading, key=lambda pair: pair[1].response.came_s):
            stop = min(row.length - 1, row.read + left)
            if stop > row.read:
                self._timed(self.rows.prefill, at, row.read, stop)
                left -= stop - row.read
                row.read = stop
            if row.read == row.length - 1:
                self._timed(self.rows.end_prefill, at, row.limit)
                row.response.state = "writing"
            if not left:
                break
        return self.chunk - left

    def _round(self) -> tuple[int, list[Step]]:
        """One round of the rows in use; returns how many rows it covered, and its steps."""
        top = 1 + max(at for at, row in enumerate(self.occupied) if row)
        used = self.occupied[:top]
        if not any(row and row.writing for row in used):
            return 0, []
        longest = max(row.length for row in used if row)
        context = window(longest + self.rows.slack, self.rows.slots)
        streams = tuple(row.stream if row and row.writing else None for row in used)
        load = Load(top, context, len(self.waiting), streams)
        begin = self.now
        possible = self._possible(planned(self.policy, load, self.rows.fit), load, longest)
        reading = self.now
        plan, read = self._catch_up(possible, longest) if possible.tree.depth else (possible, ())
        load = load._replace(read=read, read_s=self.now - reading)
        steps = self._timed(self.rows.round, plan.budget, longest, plan.tree)
        for step in steps:
            self._record_step(step, plan)
        seconds = self.now - begin - load.read_s if self.rows.steady else None
        self.policy.learn(load, plan, steps, seconds)
        return top, steps

    def _possible(self, plan: Plan, load: Load, longest: int) -> Plan:
        """The plan with a budget for every row (-1: it is not decoded), cut to the drafter's
        context, and to 0 in a row's first round if the drafter would have to read the prompt."""
        most = max(0, self.rows.drafter_context - longest)
        reads = self.rows.reads
        budget = tuple(
            -1 if s is None else 0 if reads and not s.rounds else min(most, plan.depth(at))
            for at, s in enumerate(load.streams)
        )
        return _within(plan, budget)

    def _catch_up(self, plan: Plan, longest: int) -> tuple[Plan, tuple[int, ...]]:
        """Let the drafter catch up with the rows that draft: those that it lags far behind one by
        one, a chunk in all, then the others in one pass, together with rows that are decoded and
        lack no more. Returns the plan, without drafts for rows of which it still lacks tokens, and
        the tokens of each pass."""
        left, read = max(self.chunk, NEAR), list[int]()  # more than a round adds
        each = zip(self.occupied, plan.budget, strict=False)
        decoded = [(at, row, depth) for at, (row, depth) in enumerate(each) if row and depth >= 0]
        for at, row, depth in decoded:
            if depth and row.behind > NEAR and left:
                stop = row.draft_read + min(row.behind, left)
                self._timed(self.rows.catch_up_row, at, row.draft_read, stop)
                read.append(stop - row.draft_read)
                left -= read[-1]
                row.draft_read = stop
        if lacking := {at for at, row, depth in decoded if depth and row.behind > NEAR}:
            budget = (0 if at in lacking else depth for at, depth in enumerate(plan.budget))
            plan = _within(plan, tuple(budget))
        if lag := max((row.behind for at, row, _ in decoded if plan.budget[at]), default=0):
            # padding may overwrite what the drafter holds of as many tokens
            near = {at: row for at, row, _ in decoded if row.behind <= lag}
            reading = tuple(1 if at in near else -1 for at in range(len(plan.budget)))
            self._timed(self.rows.catch_up, reading, longest, lag)
            read.append(lag * len(near))
            for row in near.values():
                row.draft_read = row.length - 1
        return plan, tuple(read)

    def _record_step(self, step: Step, plan: Plan) -> None:
        """Note what a round did in a row, and free the row if its request has ended or failed."""
        if step.broken:
            self._vacate(step.row, "failed", step.broken)
            return
        row = self.occupied[step.row]
        assert row is not None
        row.advance(step, plan, self.now)
        if step.done:
            self._vacate(step.row, "done")

    def _compact(self) -> None:
        """Move the last rows into free ones that no waiting request will take."""
        free = [at for at, row in enumerate(self.occupied) if row is None]
        for target in free[len(self.waiting) :]:
            last = max((at for at, row in enumerate(self.occupied) if row), default=-1)
            if target < last:
                row = self.occupied[last]
                assert row is not None
                self._timed(self.rows.move, last, target, row.length)
                self.rows.leave(last)
                self.occupied[target], self.occupied[last] = row, None

    def _vacate(self, at: int, state: State, reason: str = "") -> None:
        """End the request of a row, and free the row."""
        self._leave(at, broken=state == "failed").end(state, reason)

    def _leave(self, at: int, broken: bool = False) -> Response:
        """Free a row; its request keeps what it has generated."""
        row = self.occupied[at]
        assert row is not None
        row.response.tokens = self.rows.text(at, len(row.response.request.prompt), row.length)
        self.rows.leave(at, broken)
        self.occupied[at] = None
        return row.response

    def _shrink(self, why: str) -> None:
        """Use half as many rows from now on; requests in the others go back to the front of the
        queue, with what they have generated."""
        used = [at for at, row in enumerate(self.occupied) if row]
        if used == [0]:
            self._vacate(0, "failed", f"out of memory with one request alone: {why}")
            return
        self.usable = self.rows.count = max(1, (used[-1] + 1) // 2)
        for at in reversed(range(self.usable, len(self.occupied))):
            if self.occupied[at]:
                response = self._leave(at)
                response.state = "waiting"
                self.waiting.appendleft(response)
        note = f"out of memory with {used[-1] + 1} rows: going on with {self.usable} ({why})"
        self.notes.append(note)
        log.warning(note)

    def _timed(self, call: Callable[..., T], *args: object) -> T:
        begin = self.rows.clock()
        result = call(*args)
        self.rows.settle()
        self._busy += self.rows.clock() - begin
        return result


def _within(plan: Plan, budget: tuple[int, ...]) -> Plan:
    """The plan with this budget, its tree no deeper than the largest."""
    return plan._replace(tree=plan.tree.cut(max(budget)), budget=budget)
