"""Where requests come from, and the loop that serves them: an open load or a closed loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from specexp.errors import UserError
from specexp.serving.requests import Request, Response, ServerStep
from specexp.serving.server import Server


@dataclass(frozen=True)
class Source:
    """Requests and when they arrive: an open load, each at its own time (`at_s`); or a closed loop
    of `concurrency` streams, the next as soon as one is done. `repeat`: a closed loop starts over
    after the last one, for ever."""

    requests: Sequence[Request]
    concurrency: int | None = None
    repeat: bool = False

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.concurrency < 1:
            raise UserError(
                f"concurrency is {self.concurrency}; a closed loop needs 1 stream or more"
            )
        if self.repeat and self.concurrency is None:
            raise UserError("repeat is for closed loops: give concurrency, or leave repeat out")

    def as_served(self, responses: Iterable[Response]) -> Source:
        """The same requests with outputs as long as these, which may have ended before their
        limits."""
        written = {a.request.stream: max(1, len(a.tokens)) for a in responses}
        cut = (replace(r, new=written.get(r.stream, r.new)) for r in self.requests)
        return replace(self, requests=tuple(cut))


@dataclass
class Run:
    """A server, where its requests come from, and the responses so far, in order of arrival."""

    server: Server
    source: Source
    responses: list[Response] = field(default_factory=list)

    def __post_init__(self) -> None:
        requests, timed = self.source.requests, self.source.concurrency is None
        self.coming = deque(sorted(requests, key=lambda r: r.at_s) if timed else requests)

    @property
    def steps(self) -> list[ServerStep]:
        return self.server.steps

    def advance(self) -> bool:
        """Submit what has arrived and make one step, or wait for an arrival; False when all
        requests are over."""
        server, now, streams = self.server, self.server.now, self.source.concurrency
        free = len(self.coming) if streams is None else streams - server.open
        while self.coming and free > 0 and (streams is not None or self.coming[0].at_s <= now):
            free -= 1
            request = self.coming.popleft()
            came_s = request.at_s if streams is None else now
            self.responses.append(server.submit(request, came_s))
            if self.source.repeat:
                self.coming.append(request)
        if server.step():
            return True
        if self.coming and streams is None:
            server.rows.wait(server.started + self.coming[0].at_s)
        return bool(self.coming)


def serve(server: Server, source: Source) -> list[Response]:
    """Serve until all requests are over; the responses in order of arrival."""
    run = Run(server, source)
    with server.rows.timer:
        while run.advance():
            pass
    return run.responses
