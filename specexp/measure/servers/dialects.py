"""How vLLM, SGLang and llama.cpp are asked for token ids, answer, and count drafts.

All count, of every verified draft, its draft tokens and those accepted, the bonus token not
included, also where an answer ends before it has them all; the pass over a prompt has no draft.
vLLM and llama.cpp do not count rounds without a draft, and their counters are of the whole server,
so nothing else may use it meanwhile. SGLang counts every round as a draft of full length, and sends
its counts with each answer.
"""

import re
from collections import Counter
from collections.abc import Sequence
from threading import Lock
from typing import Any, Protocol

from specexp.errors import UserError
from specexp.measure.servers.connection import Connection

COUNTS = ("drafts", "draft_tokens", "accepted_tokens")
_COUNT = re.compile(r"(?m)^(\w+):spec_decode_num_(\w+?)(?:_total)?(?:\{(.*)\})? (\d\S*)")


class Dialect(Protocol):
    """counts_every_round: a round counts as a draft of full length, however little was drafted."""

    name: str
    counts_every_round: bool

    def request(self, prompt: Sequence[int], max_new_tokens: int) -> tuple[str, dict[str, Any]]:
        """The path and the body that ask for a greedy completion, streamed."""

    def read(self, event: dict[str, Any], have: int) -> tuple[list[int], str]:
        """The tokens of an event that follow the `have` tokens of those before, and why the answer
        ends with it (`stop` or `eos`: with an end-of-text token), or "" if it goes on."""

    def counters(self) -> Counter[str]:
        """COUNTS so far, and accepted_1, accepted_2, ...: drafts
        of which at least so many tokens were accepted."""


class VLLM:
    name, counts_every_round = "vLLM", False

    def __init__(self, connection: Connection, model: str) -> None:
        self.connection, self.model = connection, model

    def request(self, prompt: Sequence[int], max_new_tokens: int) -> tuple[str, dict[str, Any]]:
        return "/v1/completions", {
            "prompt": prompt, "model": self.model, "max_tokens": max_new_tokens,
            "temperature": 0, "stream": True, "return_token_ids": True,
        }  # fmt: skip

    def read(self, event: dict[str, Any], have: int) -> tuple[list[int], str]:
        choice: dict[str, Any] = next(iter(event.get("choices") or ()), {})
        return choice.get("token_ids") or [], choice.get("finish_reason") or ""

    def counters(self) -> Counter[str]:
        return _of_the_server(self.connection)


class LlamaCpp:
    name, counts_every_round = "llama.cpp", False

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def request(self, prompt: Sequence[int], max_new_tokens: int) -> tuple[str, dict[str, Any]]:
        return "/completion", {
            "prompt": prompt, "n_predict": max_new_tokens, "temperature": 0, "stream": True,
            "return_tokens": True, "cache_prompt": False,
        }  # fmt: skip

    def read(self, event: dict[str, Any], have: int) -> tuple[list[int], str]:
        return event.get("tokens") or [], (event.get("stop_type") or "?") * bool(event.get("stop"))

    def counters(self) -> Counter[str]:
        return _of_the_server(self.connection)


class SGLang:
    name, counts_every_round = "SGLang", True

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._counted: Counter[str] = Counter()  # by the answers read so far
        self._counting = Lock()  # answers may come side by side

    def request(self, prompt: Sequence[int], max_new_tokens: int) -> tuple[str, dict[str, Any]]:
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens}
        return "/generate", {"input_ids": prompt, "sampling_params": sampling, "stream": True}

    def read(self, event: dict[str, Any], have: int) -> tuple[list[int], str]:
        """An event holds all tokens so far, or the new ones (`--incremental-streaming-output`); the
        last one holds the counts of its rounds."""
        about, tokens = event.get("meta_info") or {}, event.get("output_ids") or []
        total = about.get("completion_tokens", 0)
        new = tokens[have:total] if len(tokens) > total - have else tokens
        reason = about.get("finish_reason") or {}
        if reason.get("type") == "abort":
            raise self.connection.refused(reason.get("message"))
        if reason:
            self._count(about)
        return new, str(reason.get("type", ""))

    def _count(self, about: dict[str, Any]) -> None:
        if not (drafts := about.get("spec_verify_ct")):
            return
        if "spec_num_correct_drafts" not in about:
            needs = "has other counters: it needs SGLang 0.5.23 or newer"
            raise UserError(f"{self.connection.url} {needs}")
        counts = Counter(
            drafts=drafts,
            draft_tokens=about["spec_num_proposed_drafts"],
            accepted_tokens=about["spec_num_correct_drafts"],
        )
        for accepted, drafts in enumerate(about.get("spec_correct_drafts_histogram") or ()):
            counts.update({f"accepted_{at}": drafts for at in range(1, accepted + 1)})
        with self._counting:
            self._counted.update(counts)

    def counters(self) -> Counter[str]:
        return self._counted.copy()


def spoken(connection: Connection) -> tuple[str, Dialect]:
    """The first model of a server, and the dialect that it speaks. Raises UserError if it is none
    of the three."""
    card: dict[str, Any] = next(iter(connection.json("/v1/models").get("data") or ()), {})
    model = str(card.get("id", ""))
    if card.get("owned_by") == "sglang":
        return model, SGLang(connection)
    counters = "\n" + connection.text("/metrics")
    if "\nvllm:" in counters:
        return model, VLLM(connection, model)
    if "\nllamacpp:" in counters:
        return model, LlamaCpp(connection)
    raise UserError(
        f"{connection.url} is not SGLang, and its /metrics have no counters of vLLM or llama.cpp "
        "(llama-server has them when started with --metrics)"
    )


def _of_the_server(connection: Connection) -> Counter[str]:
    counts: Counter[str] = Counter()
    for _, name, labels, value in _COUNT.findall(connection.text("/metrics")):
        if name == "accepted_tokens_per_pos" and (at := re.search(r'position="(\d+)"', labels)):
            counts[f"accepted_{int(at[1]) + 1}"] += int(float(value))
        elif name in COUNTS:
            counts[name] += int(float(value))
    return counts
