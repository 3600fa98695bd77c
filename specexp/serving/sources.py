"""Where requests come from, and the loop that serves them: an open load or a closed loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol

from specexp.errors import UserError
from specexp.serving.requests import Request, Response
from specexp.serving.server import Server


class Source(Protocol):
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
        due = []
        while self.requests and self.requests[0].at_s <= now:
            due.append((self.requests[0].at_s, self.requests.popleft()))
        return due

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
        due = [self.requests.popleft() for _ in range(count)]
        if self.again:
            self.requests.extend(due)
        return [(now, request) for request in due]

    def next_s(self) -> float | None:
        return None

    @property
    def left(self) -> int:
        return len(self.requests)


def advance(server: Server, source: Source, responses: list[Response]) -> bool:
    """Submit what has arrived and make one step, or wait for an arrival; False when all requests
    are over."""
    now = server.now
    for came_s, request in source.due(now, server.open):
        responses.append(server.submit(request, came_s))
    if server.step():
        return True
    if (until := source.next_s()) is not None:
        server.rows.wait(server.started + until)
        return True
    return source.left > 0


def serve(server: Server, source: Source) -> list[Response]:
    """Serve until all requests are over; the responses in the order of arrival."""
    responses: list[Response] = []
    while advance(server, source, responses):
        pass
    return responses
