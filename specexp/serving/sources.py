"""Where requests come from, and the loop that serves them: an open load or a closed loop."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from specexp.errors import UserError
from specexp.serving.requests import Request, Response, ServerStep
from specexp.serving.server import Server


class Source:
    """Requests that arrive at their own times, however many are unfinished; or, in a closed loop of
    `concurrency` streams, as soon as one is done. `again`: the first follows the last, for ever."""

    def __init__(
        self, requests: Iterable[Request], concurrency: int | None = None, again: bool = False
    ) -> None:
        if concurrency is not None and concurrency < 1:
            raise UserError(f"concurrency is {concurrency}; a closed loop needs 1 stream or more")
        self.concurrency, self.again = concurrency, again
        timed = sorted(requests, key=lambda r: r.at_s) if concurrency is None else requests
        self.requests = deque(timed)

    def due(self, now: float, open_: int) -> list[tuple[float, Request]]:
        """Requests that have arrived by now, with their times, while `open_` are unfinished."""
        due: list[tuple[float, Request]] = []
        while self.requests and (
            self.requests[0].at_s <= now
            if self.concurrency is None
            else open_ + len(due) < self.concurrency
        ):
            request = self.requests.popleft()
            due.append((request.at_s if self.concurrency is None else now, request))
            if self.again:
                self.requests.append(request)
        return due


@dataclass
class Run:
    """A server, where its requests come from, and the responses so far, in order of arrival."""

    server: Server
    source: Source
    responses: list[Response] = field(default_factory=list)

    @property
    def steps(self) -> list[ServerStep]:
        return self.server.steps

    def advance(self) -> bool:
        """Submit what has arrived and make one step, or wait for an arrival; False when all
        requests are over."""
        server, source = self.server, self.source
        for came_s, request in source.due(server.now, server.open):
            self.responses.append(server.submit(request, came_s))
        if server.step():
            return True
        if source.requests and source.concurrency is None:
            server.rows.wait(server.started + source.requests[0].at_s)
        return bool(source.requests)


def serve(server: Server, source: Source) -> list[Response]:
    """Serve until all requests are over; the responses in order of arrival."""
    run = Run(server, source)
    with server.rows.timer:
        while run.advance():
            pass
    return run.responses
