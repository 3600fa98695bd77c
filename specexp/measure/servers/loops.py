"""A server that drafts and the same without drafting, in turns, at a constant number of requests.

A turn is a closed loop: every stream sends its next prompt as soon as it has an answer. The streams
begin with prompts that are cut to rising lengths and do not count, and go on with prompts that do
not count until the last of those that do is answered. So each that counts meets the full load from
its first token to its last, and the server's throughput is the pace of one stream times the number
of streams. Intervals are over prompts, as both servers answer the same.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import count
from threading import Event
from typing import Any

import pandas as pd
from tqdm.auto import tqdm

from specexp import names
from specexp.errors import UserError, counted, warn_once
from specexp.measure import statistics, summaries
from specexp.measure.prompts import Prompt
from specexp.measure.servers.dialects import COUNTS
from specexp.measure.servers.server import Reply, Server
from specexp.models.load import text_of

BUSY = 0.5  # seconds of this process a second, above which it may be what is slow


@dataclass(frozen=True)
class Pair:
    """A server that drafts, and the same without drafting. tokenizer: of the model that both serve;
    gamma: the most tokens of a draft."""

    drafting: Server
    plain: Server
    tokenizer: Any
    gamma: int

    def __str__(self) -> str:
        engine, model = self.drafting.dialect.name, self.drafting.model
        return f"{engine} at {self.drafting.url}: {model}, beside {self.plain.url}"

    @property
    def tags(self) -> dict[str, str]:
        """For a result: which engine was measured, and on which machine."""
        return {"engine": f"{self.drafting.dialect.name} on {self.drafting.host}"}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [names.encode(self.tokenizer, text) for text in texts]

    def answer(self, text: str, max_new_tokens: int) -> str:
        """The model's own greedy continuation of a text."""
        reply = self.plain.complete(names.encode(self.tokenizer, text), max_new_tokens)
        return text_of(self.tokenizer, reply.tokens, skip_special_tokens=True)


def connect(drafting: str, plain: str, target: str, gamma: int) -> Pair:
    """Both servers, given by their addresses, and the tokenizer of the target that both serve: a
    zoo name, folder or hub id. Raises UserError if one does not answer, if they are the same or not
    of the same engine, or if there is no such tokenizer."""
    tokenizer = names.read_target(target).tokenizer
    pair = Pair(Server(drafting), Server(plain), tokenizer, gamma)
    if pair.drafting.url == pair.plain.url:
        raise UserError(
            f"{plain} is both servers: start one that drafts and one that does not, each with a "
            "port of its own"
        )
    engines = pair.drafting.dialect.name, pair.plain.dialect.name
    if len({*engines}) > 1:
        raise UserError(f"{drafting} is {engines[0]} and {plain} is {engines[1]}: use one engine")
    if pair.drafting.model != pair.plain.model:
        own = pair.drafting.model, pair.plain.model
        warn_once("%s serves %s, and %s serves %s", drafting, own[0], plain, own[1])
    return pair


def closed_loops(
    pair: Pair, prompts: Sequence[Prompt], streams: Sequence[int], max_new_tokens: int,
    repeats: int = 1,
) -> tuple[pd.DataFrame, pd.DataFrame]:  # fmt: skip
    """Both servers at every number of streams; in every other turn the plain one comes first.

    Returns two tables. One row a load (number of streams), repeat and prompt: question_id, turn; s
    (seconds from sending to the last token), ttft_s (to the first), tokens, later (those after the
    first), and the same behind `plain_`; same (whether both texts are). One row a load and repeat:
    COUNTS of the server that drafts, and busy (the share of a core that the client takes).

    Raises UserError if a server refuses or breaks off, if the plain one drafts, or if the other
    drafts nothing or more than the pair's gamma."""
    texts = pair.encode([prompt.text for prompt in prompts])
    samples, counts = list[dict[str, Any]](), list[dict[str, Any]]()
    total = 2 * len(texts) * len(streams) * repeats
    with tqdm(total=total, desc="servers", unit="answer") as bar:
        for number, (load, repeat) in enumerate((c, r) for c in streams for r in range(repeats)):
            replies = dict[str, list[Reply]]()
            for name, server in list(_sides(pair).items())[:: 1 if number % 2 else -1]:
                before = server.dialect.counters()
                replies[name], busy = _turn(server, texts, load, max_new_tokens, bar.update)
                drafted = server.dialect.counters() - before
                _insist(pair, name, drafted, first=not counts)
                if not name:
                    own = {"load": load, "repeat": repeat, "busy": busy}
                    counts.append(own | {key: drafted[key] for key in COUNTS})
            for prompt, ours, theirs in zip(prompts, replies[""], replies["plain_"], strict=True):
                row = {"load": load, "repeat": repeat, "question_id": str(prompt.question_id)}
                row |= {"turn": prompt.turn, "same": ours.tokens == theirs.tokens}
                samples.append(row | _timed(ours, "") | _timed(theirs, "plain_"))
    return pd.DataFrame(samples), pd.DataFrame(counts)


def _sides(pair: Pair) -> dict[str, Server]:
    return {"": pair.drafting, "plain_": pair.plain}


def _timed(reply: Reply, of: str) -> dict[str, float]:
    return {f"{of}s": reply.ttft_s + reply.s, f"{of}ttft_s": reply.ttft_s,
            f"{of}tokens": len(reply.tokens), f"{of}later": reply.later}  # fmt: skip


def _turn(
    server: Server, texts: Sequence[list[int]], streams: int, max_new_tokens: int,
    done: Callable[[], object],
) -> tuple[list[Reply], float]:  # fmt: skip
    """A closed loop over these texts: their replies in order, and the share of a core that it took.
    done: called after each of them."""
    replies, sending, stop = dict[int, Reply](), count(), Event()

    def stream(number: int) -> float:
        begin, cut = time.thread_time(), max(1, max_new_tokens * (number + 1) // streams)
        server.complete(texts[-1 - number % len(texts)], cut)
        while len(replies) < len(texts) and not stop.is_set():
            at = next(sending)
            reply = server.complete(texts[at % len(texts)], max_new_tokens)
            if at < len(texts):
                replies[at] = reply
                done()
        return time.thread_time() - begin

    begin = time.perf_counter()
    with ThreadPoolExecutor(streams) as pool:
        try:
            each = [pool.submit(stream, number) for number in range(streams)]
            busy = sum(future.result() for future in as_completed(each))
        finally:
            stop.set()
    return [replies[at] for at in range(len(texts))], busy / (time.perf_counter() - begin)


def _insist(pair: Pair, name: str, drafted: Counter[str], first: bool) -> None:
    drafts, tokens = drafted["drafts"], drafted["draft_tokens"]
    if name and drafts:
        raise UserError(f"{pair.plain.url} drafts: start it without speculative decoding")
    if first and not name and not drafts:  # later it may be a load at which it leaves drafting off
        raise UserError(f"{pair.drafting.url} drafted nothing: is speculative decoding on?")
    if not name and tokens > pair.gamma * drafts:
        raise UserError(
            f"{pair.drafting.url} drafts {tokens / drafts:.1f} tokens at a time, and gamma is "
            f"{pair.gamma}: give gamma as the server has it"
        )


def rates(samples: pd.DataFrame, counts: pd.DataFrame) -> pd.DataFrame:
    """How fast the server that drafts is at each load, from `closed_loops`.

    One row a load: tok_s and plain_tok_s, all streams together; speedup with its interval low, high
    over prompts and its doubt (see `summaries.judged`); median ttft_ms and plain_ttft_ms; tpot_ms
    and plain_tpot_ms, after the first token; rate (accepted / drafted), length (1 + accepted /
    drafts); same (the share of texts that are the plain server's). The intervals of all loads hold
    at once."""
    parts = dict(list(samples.groupby("load")))
    draws = {load: _draws(part) for load, part in parts.items()}
    intervals, rows = statistics.simultaneous(draws), []
    for load, part in parts.items():
        total = counts.loc[counts["load"] == load, [*COUNTS]].sum()
        row = {"load": load, "doubt": intervals[load].doubt} | intervals[load].columns("speedup")
        for of in ("", "plain_"):
            row[f"{of}tok_s"] = load * part[f"{of}tokens"].sum() / part[f"{of}s"].sum()
            row[f"{of}ttft_ms"] = 1e3 * part[f"{of}ttft_s"].median()
            later = (part[f"{of}s"] - part[f"{of}ttft_s"]).sum()
            row[f"{of}tpot_ms"] = 1e3 * later / max(1, part[f"{of}later"].sum())
        row["rate"] = total["accepted_tokens"] / (total["draft_tokens"] or float("nan"))
        row["length"] = 1 + total["accepted_tokens"] / max(1, total["drafts"])
        rows.append(row | {"same": part["same"].mean()})
    if (busy := counts["busy"].max()) > BUSY:
        warn_once("this client takes %.0f %% of a core: it may be what is slow", 100 * busy)
    return summaries.judged(pd.DataFrame(rows))


def _draws(part: pd.DataFrame) -> statistics.Draws:
    timed = part[(part[["plain_tokens", "tokens"]] > 0).all(axis=1)]
    if timed.empty:
        raise UserError(f"{counted(len(part), 'answer')} held no token: use other prompts")
    return summaries.speedup_draws(timed)


def metrics(rated: pd.DataFrame) -> tuple[dict[str, float], dict[str, dict[int, float]]]:
    """Metrics and series for MLflow, from `rates`; what has no load is of the fewest streams."""
    first, (figures, series) = rated.iloc[0], summaries.load_metrics(rated, "load")
    return figures | {
        "latency/ttft_ms": first["ttft_ms"], "latency/tpot_ms": first["tpot_ms"],
        "acceptance/rate": first["rate"], "exact/same": rated["same"].min(),
    }, series  # fmt: skip
