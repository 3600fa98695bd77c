"""Where requests come from, and the loop that serves them: an open load or a closed loop."""

from collections import deque
from collections.abc import Iterable

from specexp.errors import UserError
from specexp.serving.requests import Request, Response
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


def advance(server: Server, source: Source, responses: list[Response]) -> bool:
    """Submit what has arrived and make one step, or wait for an arrival; False when all requests
    are over."""
    now = server.now
    for came_s, request in source.due(now, server.open):
        responses.append(server.submit(request, came_s))
    if server.step():
        return True
    if source.requests and source.concurrency is None:
        server.rows.wait(server.started + source.requests[0].at_s)
    return bool(source.requests)


def serve(server: Server, source: Source) -> list[Response]:
    """Serve until all requests are over; the responses in the order of arrival."""
    responses: list[Response] = []
    while advance(server, source, responses):
        pass
    return responses
