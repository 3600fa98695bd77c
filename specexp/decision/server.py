"""A server as its client sees it: greedy completions of token ids, timed, and its counters.

vLLM, SGLang and llama.cpp are understood. All count, of every verified draft, its draft tokens and
those accepted, the bonus token not included, also where an answer ends before it has them all. vLLM
and llama.cpp do not count rounds without a draft, and their counters are of the whole server, so
nothing else may use it meanwhile. SGLang counts every round as a draft of full length, and sends
its counts with each answer.
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

VLLM, SGLANG, LLAMA = "vLLM", "SGLang", "llama.cpp"
KINDS = {"vllm": VLLM, "llamacpp": LLAMA}  # by the prefix of their counters
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
        """Raises UserError if nothing answers there, or none of the three does."""
        self.url = url.rstrip("/") if "://" in url else f"http://{url.rstrip('/')}"
        listed = self._parsed("/v1/models", self._get("/v1/models")).get("data")
        model: dict[str, Any] = next(iter(listed or ()), {})
        self.model = str(model.get("id", ""))
        self.kind = SGLANG if model.get("owned_by") == "sglang" else self._kind_by_counters()
        self._answered: Counter[str] = Counter()  # what answers of SGLang have counted

    def _kind_by_counters(self) -> str:
        text = self._get("/metrics")
        for prefix, kind in KINDS.items():
            if f"\n{prefix}:" in f"\n{text}":
                return kind
        raise UserError(
            f"{self.url} is not SGLang, and its /metrics have no counters of vLLM or llama.cpp "
            "(llama-server has them when started with --metrics)"
        )

    @property
    def counts_every_round(self) -> bool:
        """Whether a round counts as a draft of full length, however little was drafted."""
        return self.kind == SGLANG

    def counters(self) -> Counter[str]:
        """drafts, draft_tokens and accepted_tokens so far, and accepted_1, accepted_2, ...: drafts
        of which at least so many tokens were accepted."""
        if self.kind == SGLANG:
            return self._answered.copy()
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
        path, body = self._request(list(prompt), max_new_tokens)
        tokens: list[int] = []
        arrivals: list[tuple[float, int]] = []  # seconds since the start, and tokens
        reason = ""  # why the answer ended, once it has
        start = time.perf_counter()
        for event in self._events(path, body):
            new, why = self._read(event, len(tokens))
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

    def _request(self, prompt: list[int], max_new_tokens: int) -> tuple[str, dict[str, Any]]:
        """The path and the body that ask for a greedy completion."""
        greedy = {"temperature": 0, "stream": True}
        if self.kind == SGLANG:
            sampling = {"temperature": 0, "max_new_tokens": max_new_tokens}
            return "/generate", {"input_ids": prompt, "sampling_params": sampling, "stream": True}
        if self.kind == VLLM:
            return "/v1/completions", greedy | {
                "prompt": prompt, "model": self.model, "max_tokens": max_new_tokens,
                "return_token_ids": True,
            }  # fmt: skip
        return "/completion", greedy | {
            "prompt": prompt, "n_predict": max_new_tokens, "return_tokens": True,
            "cache_prompt": False,
        }  # fmt: skip

    def _read(self, event: dict[str, Any], have: int) -> tuple[list[int], str]:
        """The tokens of an event that follow the `have` tokens of those before, and why the answer
        ends with it, or ""."""
        if self.kind == SGLANG:
            return self._read_sglang(event, have)
        if self.kind == VLLM:
            choice: dict[str, Any] = next(iter(event.get("choices") or ()), {})
            return choice.get("token_ids") or [], choice.get("finish_reason") or ""
        return event.get("tokens") or [], (event.get("stop_type") or "?") * bool(event.get("stop"))

    def _read_sglang(self, event: dict[str, Any], have: int) -> tuple[list[int], str]:
        """An event holds all tokens so far, or the new ones (`--incremental-streaming-output`); the
        last one holds the counts of its rounds."""
        about, tokens = event.get("meta_info") or {}, event.get("output_ids") or []
        total = about.get("completion_tokens", 0)
        new = tokens[have:total] if len(tokens) > total - have else tokens
        reason = about.get("finish_reason") or {}
        if reason.get("type") == "abort":
            raise UserError(f"{self.url} refused a prompt: {reason.get('message')}")
        if drafts := about.get("spec_verify_ct"):
            if "spec_num_correct_drafts" not in about:
                raise UserError(f"{self.url} has other counters: it needs SGLang 0.5.23 or newer")
            self._answered.update(
                drafts=drafts,
                draft_tokens=about["spec_num_proposed_drafts"],
                accepted_tokens=about["spec_num_correct_drafts"],
            )
        for accepted, drafts in enumerate(about.get("spec_correct_drafts_histogram") or ()):
            self._answered.update({f"accepted_{at}": drafts for at in range(1, accepted + 1)})
        return new, str(reason.get("type", ""))

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
