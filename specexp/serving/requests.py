"""A server's requests and responses, and its records of rows and steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Literal

from specexp.errors import UserError, check_type
from specexp.policy import Plan, Stream
from specexp.trace import Step

State = Literal["waiting", "reading", "writing", "done", "refused", "failed"]


@dataclass(frozen=True)
class Request:
    """prompt: token ids; new: the most tokens to generate; at_s: arrival, in seconds from the
    start; stream: its noise stream; kind: its category, for tables."""

    prompt: Sequence[int]
    new: int
    at_s: float = 0.0
    stream: int = 0
    kind: str = ""

    def __post_init__(self) -> None:
        check_type("new", self.new, "int")
        check_type("stream", self.stream, "int")
        check_type("at_s", self.at_s, "float")
        if not isfinite(self.at_s):
            raise UserError(f"at_s is {self.at_s}; a request arrives at a finite time")


@dataclass
class Response:
    """A request and its outcome. `reason`: why it was refused or failed. Seconds from the server's
    start: came_s, its arrival; begun_s, when it first got a row. deliveries: (seconds, tokens so
    far), one a round; passes: rounds that it took part in."""

    request: Request
    came_s: float
    state: State = "waiting"
    reason: str = ""
    tokens: list[int] = field(default_factory=list)
    begun_s: float | None = None
    deliveries: list[tuple[float, int]] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    passes: int = 0

    @property
    def over(self) -> bool:
        return self.state in ("done", "refused", "failed")

    def end(self, state: State, reason: str) -> Response:
        assert not self.over, "a request is answered once"
        self.state, self.reason = state, reason
        return self


@dataclass
class Row:
    """An occupied row. In tokens: `length` of the sequence, `limit` that ends it, `read` by the
    target's prefill and `draft_read` by the drafter, if it `reads`."""

    response: Response
    length: int
    limit: int
    reads: bool
    read: int = 0
    draft_read: int = 0

    @property
    def writing(self) -> bool:
        return self.response.state == "writing"

    @property
    def behind(self) -> int:
        """Tokens before the root that the drafter has not read."""
        return self.length - 1 - self.draft_read if self.reads else 0

    @property
    def stream(self) -> Stream:
        """What a policy may know of the row."""
        return Stream(self.behind, self.response.passes)

    def advance(self, step: Step, plan: Plan, now: float) -> None:
        """Account for one round of the row."""
        self.length += step.emitted
        if plan.depth(step.row) > 0:
            self.draft_read = self.length - 1
        response = self.response
        response.drafted += step.drafted
        response.accepted += step.accepted
        response.passes += 1
        response.deliveries.append((now, self.length - len(response.request.prompt)))


@dataclass(frozen=True)
class ServerStep:
    """One step of a server, from begin_s to end_s. busy_s: seconds in the rows' passes, the rest
    being the scheduler's overhead; waiting: requests in the queue; read: prompt tokens prefilled.

    Of its round: live, rows that were decoded; rows, those that its passes covered; speculated,
    those that had draft tokens; drafted and accepted, draft tokens; emitted, tokens."""

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
