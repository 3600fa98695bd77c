"""The requests that are offered to servers, and when they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specexp.api import Pairing
from specexp.measure.prompts import Prompt, in_turns
from specexp.serving import arrivals
from specexp.serving.requests import Request
from specexp.serving.sources import Source


def requests(
    pairing: Pairing, prompts: Sequence[Prompt], count: int, max_new_tokens: int
) -> list[Request]:
    """`count` requests: the prompts, interleaved over their categories and repeated as needed."""
    mixed = in_turns(prompts)
    ids = pairing.encode([p.text for p in mixed])
    return [
        Request(ids[i % len(ids)], max_new_tokens, stream=i, kind=mixed[i % len(ids)].category)
        for i in range(count)
    ]


def staggered(offered: Sequence[Request], count: int) -> list[Request]:
    """The same requests, the first `count` of them cut to rising lengths: they begin together, but
    end one by one, so that the next prompts are not all prefilled in one step."""
    first = [
        replace(r, new=max(1, r.new * (i + 1) // count)) for i, r in enumerate(offered[:count])
    ]
    return [*first, *offered[count:]]


def traffic(
    pairing: Pairing, prompts: Sequence[Prompt], load: str, count: int, max_new_tokens: int,
    seed: int = 0,
) -> Source:  # fmt: skip
    """The load of that name (see `arrivals.parse`) with these prompts, `max_new_tokens` of output
    each. A trace's lengths shorten both. Raises UserError for a load that is not one."""
    arriving = arrivals.parse(load, count, seed)
    if isinstance(arriving, arrivals.Closed):
        repeated = requests(pairing, prompts, count, max_new_tokens)
        return Source(repeated, arriving.concurrency)
    whole = requests(pairing, prompts, len(arriving), max_new_tokens)
    traced = load.startswith("trace:")
    columns = (column.tolist() for column in (arriving.at_s, arriving.prompt, arriving.output))
    return Source(tuple(
        replace(r, at_s=at, prompt=r.prompt[:prompt], new=min(output, r.new)) if traced
        else replace(r, at_s=at)
        for r, at, prompt, output in zip(whole, *columns, strict=True)
    ))  # fmt: skip


def slots_for(offered: Sequence[Request], slack: int) -> int:
    """Slots of a row for the longest of these requests and a draft of `slack` slots."""
    return max(len(r.prompt) + r.new for r in offered) + slack
