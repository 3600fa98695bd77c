"""A server as its client sees it: greedy completions of token ids, timed, and its counters."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from specexp.errors import UserError, counted
from specexp.measure.servers.connection import Connection
from specexp.measure.servers.dialects import spoken


@dataclass(frozen=True)
class Reply:
    """ended: by an end-of-text token, which may be missing from the tokens. ttft_s: seconds to the
    first tokens, or to the end of an answer without any; s: from there to the last. later: tokens
    that came after the first, of which several may come at once."""

    tokens: list[int]
    ended: bool
    ttft_s: float
    s: float
    later: int


class Server:
    def __init__(self, url: str) -> None:
        """Raises UserError if nothing answers there, or none that `dialects` knows."""
        self.connection = Connection(url)
        self.url = self.connection.url
        self.model, self.dialect = spoken(self.connection)

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    def complete(self, prompt: Sequence[int], max_new_tokens: int) -> Reply:
        """Continue token ids greedily. Raises UserError if the server refuses, returns none or
        breaks off."""
        path, body = self.dialect.request(prompt, max_new_tokens)
        tokens: list[int] = []
        arrivals: list[tuple[float, int]] = []  # seconds since the start, and tokens
        reason = ""  # why the answer ended, once it has
        start = time.perf_counter()
        for event in self.connection.events(path, body):
            new, why = self.dialect.read(event, len(tokens))
            if new:
                arrivals.append((time.perf_counter() - start, len(new)))
            tokens += new
            reason = why or reason
        ended = reason in ("stop", "eos")
        if not tokens and not ended:
            raise UserError(f"{self.url} returned no token ids: it needs a newer version")
        if not reason:
            raise UserError(
                f"{self.url} broke off after {counted(len(tokens), 'token')}: see its log"
            )
        arrivals = arrivals or [(time.perf_counter() - start, 0)]
        (first_s, at_first), (last_s, _) = arrivals[0], arrivals[-1]
        return Reply(tokens, ended, first_s, last_s - first_s, len(tokens) - at_first)
