"""A server's answers over HTTP: text, one JSON object, or a stream of them."""

import json
import os
from collections.abc import Iterator
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from specexp.errors import UserError

PATIENCE_S = 600.0  # for one request
API_KEY = "SPECEXP_API_KEY"  # the environment variable with that of a server that asks for one


class Connection:
    """Its methods raise UserError if there is no answer, or it is an error or no JSON object."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/") if "://" in url else f"http://{url.rstrip('/')}"

    def text(self, path: str) -> str:
        return b"".join(self._lines(path)).decode(errors="replace")

    def json(self, path: str) -> dict[str, Any]:
        return self._parsed(path, self.text(path))

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer, as they come."""
        for line in self._lines(path, json.dumps(body).encode()):
            if line.startswith(b"data: {"):
                event = self._parsed(path, line.removeprefix(b"data: ").decode(errors="replace"))
                if error := event.get("error"):
                    raise self.refused(error.get("message") if isinstance(error, dict) else error)
                yield event

    def refused(self, reason: Any) -> UserError:
        return UserError(f"{self.url} refused a prompt: {reason}")

    def _parsed(self, path: str, text: str) -> dict[str, Any]:
        try:
            parsed = json.loads(text)
        except ValueError:
            parsed = None
        if not isinstance(parsed, dict):
            raise UserError(f"{self.url}{path} answers no JSON object, but {text[:60]!r}")
        return parsed

    def _lines(self, path: str, body: bytes | None = None) -> Iterator[bytes]:
        key = os.environ.get(API_KEY)
        own = {"Authorization": f"Bearer {key}"} if key else {}
        request = Request(self.url + path, body, {"Content-Type": "application/json"} | own)
        try:
            with urlopen(request, timeout=PATIENCE_S) as answer:
                yield from answer
        except HTTPError as e:
            reason = " ".join(e.read(400).decode(errors="replace").split())
            reason = "not a vLLM, SGLang or llama.cpp server?" if reason[:1] == "<" else reason
            reason = f"put its key into {API_KEY}" if e.code in (401, 403) else reason
            raise UserError(f"{self.url}{path} answers {e.code} {e.reason}: {reason}") from None
        except (OSError, HTTPException, ValueError) as e:
            raise UserError(f"{self.url} does not answer: {e}; is the server up?") from None
