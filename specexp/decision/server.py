"""A server as its client sees it: greedy completions of token ids, timed, and its counters.

vLLM and llama.cpp are understood. Both count, of every verified draft, its draft tokens and those
accepted, the bonus token not included; rounds without a draft are not counted. The counters are of
the whole server, so nothing else may use it meanwhile.
"""

import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from specexp.errors import UserError, counted

KINDS = {"vllm": "vLLM", "llamacpp": "llama.cpp"}
PATIENCE_S = 600.0  # for one request
_COUNT = re.compile(r"(?m)^(\w+):spec_decode_num_(\w+?)(?:_total)?(?:\{(.*)\})? (\d\S*)")


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
        """Raises UserError if nothing answers there, or neither vLLM nor llama.cpp does."""
        self.url = url.rstrip("/") if "://" in url else f"http://{url.rstrip('/')}"
        text = self._get("/metrics")
        kind = next((kind for kind in KINDS if f"\n{kind}:" in f"\n{text}"), None)
        if kind is None:
            raise UserError(
                f"{self.url}/metrics has no counters of vLLM or llama.cpp (llama-server has them "
                "when started with --metrics)"
            )
        self.kind = KINDS[kind]
        listed = self._parsed("/v1/models", self._get("/v1/models"))
        self.model = str(next((model["id"] for model in listed.get("data") or ()), ""))

    def counters(self) -> Counter[str]:
        """drafts, draft_tokens and accepted_tokens so far, and accepted_1, accepted_2, ...: drafts
        of which at least so many tokens were accepted."""
        counts: Counter[str] = Counter()
        for _, name, labels, value in _COUNT.findall(self._get("/metrics")):
            if name == "accepted_tokens_per_pos" and (at := re.search(r'position="(\d+)"', labels)):
                counts[f"accepted_{int(at[1]) + 1}"] += int(float(value))
            elif name in ("drafts", "draft_tokens", "accepted_tokens"):
                counts[name] += int(float(value))
        return counts

    def complete(self, prompt: Sequence[int], max_new_tokens: int) -> Reply:
        """Continue token ids greedily. Raises UserError if the server refuses, returns none or
        breaks off."""
        if self.kind == "vLLM":
            path, body = "/v1/completions", {
                "model": self.model, "max_tokens": max_new_tokens, "return_token_ids": True,
            }  # fmt: skip
        else:
            path, body = "/completion", {
                "n_predict": max_new_tokens, "return_tokens": True, "cache_prompt": False,
            }  # fmt: skip
        body |= {"prompt": list(prompt), "temperature": 0, "stream": True}
        tokens: list[int] = []
        arrivals: list[tuple[float, int]] = []  # seconds since the start, and tokens
        ended = whole = False
        start = time.perf_counter()
        for event in self._events(path, body):
            choice: dict[str, Any] = next(iter(event.get("choices", [event])), {})
            new = choice.get("token_ids" if self.kind == "vLLM" else "tokens") or []
            if new:
                arrivals.append((time.perf_counter() - start, len(new)))
            tokens += new
            ended |= choice.get("finish_reason") == "stop" or choice.get("stop_type") == "eos"
            whole |= bool(choice.get("finish_reason") or choice.get("stop"))
        if not tokens and not ended:
            raise UserError(f"{self.url} returned no token ids: it needs a newer version")
        if not whole:
            raise UserError(
                f"{self.url} broke off after {counted(len(tokens), 'token')}: see its log"
            )
        arrivals = arrivals or [(time.perf_counter() - start, 0)]
        (first_s, at_first), (last_s, _) = arrivals[0], arrivals[-1]
        return Reply(tokens, ended, first_s, last_s - first_s, len(tokens) - at_first)

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer."""
        for line in self._open(path, json.dumps(body).encode()):
            if line.startswith(b"data: {"):
                event = self._parsed(path, line.removeprefix(b"data: ").decode(errors="replace"))
                if error := event.get("error"):
                    raise UserError(f"{self.url} refused a prompt: {error}")
                yield event

    def _parsed(self, path: str, text: str) -> dict[str, Any]:
        try:
            parsed = json.loads(text)
        except ValueError:
            parsed = None
        if not isinstance(parsed, dict):
            raise UserError(f"{self.url}{path} answers no JSON object, but {text[:60]!r}")
        return parsed

    def _get(self, path: str) -> str:
        return b"".join(self._open(path)).decode(errors="replace")

    def _open(self, path: str, body: bytes | None = None) -> Iterator[bytes]:
        """The lines of an answer. Raises UserError if there is none, or it is an error."""
        request = Request(self.url + path, body, {"Content-Type": "application/json"})
        try:
            with urlopen(request, timeout=PATIENCE_S) as answer:
                yield from answer
        except HTTPError as e:
            reason = " ".join(e.read(400).decode(errors="replace").split())
            raise UserError(f"{self.url}{path} answers {e.code} {e.reason}: {reason}") from None
        except (OSError, HTTPException, ValueError) as e:
            raise UserError(f"{self.url} does not answer: {e}; is the server up?") from None
