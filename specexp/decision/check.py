"""Is the server that is really run doing its work? Its text, its acceptance and its speed.

The same prompts go to the server and through a pairing here, which is exact and whose acceptance is
therefore a reference. A fault in a server's drafting leaves its text right, since rejected draft
tokens are repaired: only its acceptance shows it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from specexp.api import Pairing
from specexp.errors import UserError, counted
from specexp.measure import exactness, statistics, summaries
from specexp.measure.exactness import Exactness
from specexp.measure.one_pairing import insist_on_drafts
from specexp.measure.prompts import Prompt
from specexp.measure.servers.dialects import COUNTS
from specexp.measure.servers.server import Reply, Server
from specexp.measure.statistics import Interval
from specexp.policy import single_stream_tree

Round = tuple[int, int, int]  # its tokens drafted, accepted and emitted


@dataclass(frozen=True)
class Checked:
    """samples: a row a prompt, with COUNTS of the server and, behind `here_`, of the reference;
    tokens, s, ttft_s and later (see `Reply`), and the same behind `plain_` if there is a second
    server. positions: of each place in a draft, the shares of drafts with at least so many tokens
    accepted, on the server (NaN if it does not count by place) and here. same: prompts on which
    both servers wrote the same text."""

    server: Server
    exactness: Exactness
    samples: pd.DataFrame
    positions: pd.DataFrame
    same: int | None

    def _over(self, of: str, below: str) -> float:
        """Accepted tokens over a count, on the server or (of `here_`) of the reference."""
        accepted, count = self.samples[[f"{of}accepted_tokens", f"{of}{below}"]].sum()
        return float(accepted / count) if count else 0.0

    def _length(self, of: str) -> float | None:
        """Tokens in a draft, on the server or (of `here_`) of the reference; None if these, on
        average over a prompt, are not the same whole number for all."""
        drafts, tokens = self.samples[f"{of}drafts"], self.samples[f"{of}draft_tokens"]
        [length, *others] = (tokens / drafts).dropna().unique()
        return length if length.is_integer() and not others else None

    @cached_property
    def missing(self) -> Interval | None:
        """Accepted tokens a draft on the server minus those here, paired by prompt; None if one of
        them drafted nothing."""
        if not (self.drafts and self.samples["here_drafts"].any()):
            return None
        names = ("accepted_tokens", "drafts", "here_accepted_tokens", "here_drafts")
        return statistics.difference_draws(*summaries.units(self.samples, *names)).interval

    @cached_property
    def speedup(self) -> Interval | None:
        """Over the second server, from prompts with later tokens from both; None without one."""
        names = ["plain_s", "plain_later", "s", "later"]
        if "plain_s" not in self.samples:
            return None
        timed = self.samples[(self.samples[["plain_later", "later"]] > 0).all(axis=1)]
        each, units = summaries.units(timed, *names), summaries.unit(timed)
        return statistics.speedup(*each, units=units) if len(timed) else None

    @property
    def drafts(self) -> bool:
        return bool(self.samples["drafts"].sum())

    @property
    def alike(self) -> int:
        """Prompts in which server and reference drafted and accepted as many tokens in as many
        rounds: all of them, if both draft alike and no text differs."""
        there, here = (self.samples[[of + name for name in COUNTS]] for of in ("", "here_"))
        return int((there.to_numpy() == here.to_numpy()).all(axis=1).sum())

    def figures(self) -> dict[str, float]:
        """What `lines` says, in numbers: accepted tokens a draft, as a share of draft tokens, and
        per token written, on the server and (`here_`) of the reference; intervals; exactness."""
        names = {"per_draft": "drafts", "rate": "draft_tokens", "share": "tokens"}
        sides = ("", "here_")
        each = {f"{of}{n}": self._over(of, below) for n, below in names.items() for of in sides}
        intervals = {"missing": self.missing, "speedup": self.speedup}
        return each | {"alike": self.alike} | self.exactness.metrics | {
            f"{name}{end}": value
            for name, interval in intervals.items() if interval
            for end, value in zip(("", "_low", "_high"), interval[:3], strict=True)
        }  # fmt: skip

    def text(self) -> str:
        """Whether the server's text is the target's, in words."""
        differing = [d for d in self.exactness.divergences if d.kind == "bug"]
        ties, rows = self.exactness.ties, self.exactness.rows
        sentence = f"the target's in {rows - len(differing)} of {counted(rows, 'prompt')}"
        sentence += f" ({counted(ties, 'near tie')})" * (ties > 0)
        if differing:
            first = differing[0]
            sentence += (
                f"; NOT the target's in {len(differing)}, first in prompt {first.row + 1} at token "
                f"{first.position + 1}. If the server's weights or dtype differ (8 or 16 bits), "
                "give the same here"
            )
        return sentence

    def lines(self) -> list[str]:
        """The findings in words."""
        samples = self.samples
        ttft, later = samples["ttft_s"].median(), samples["later"].sum()
        lines = [f"text: {self.text()}"]
        if self.same is not None:
            lines.append(f"text: the plain server's in {self.same} of {len(samples)}")
        lines += [f"acceptance: {line}" for line in self._acceptance()]
        pace = f"{1e3 * samples['s'].sum() / max(1, later):.2f} ms a token after the first, "
        lines.append(f"speed: {pace * bool(later)}TTFT {1e3 * ttft:.0f} ms")
        if self.speedup:
            over = f"{self.speedup}, {statistics.verdict(self.speedup)}"
            lines.append(f"speedup over the plain server: {over}")
        return lines

    def _acceptance(self) -> list[str]:
        on, off = self.figures(), self.missing
        if off is None and self.drafts:
            rate = f"{on['rate']:.0%} of draft tokens"
            return [f"{rate}; the reference drafted nothing on these prompts"]
        if off is None:
            on_here = self.samples["here_drafts"].any()
            neither = ", nor did the reference on these prompts"
            why = ": is speculative decoding on?" if on_here else neither
            if on_here and self.server.dialect.name == "llama.cpp":
                why += " (Its older versions count no drafts.)"
            return [f"the server drafted nothing{why}"]
        there, here = self._length(""), self._length("here_")
        n = len(self.samples)
        clear = (
            "" if self.alike == n else
            f"the server drafts {there:.0f} tokens, here {here:.0f}: use --gamma {there:.0f}; "
            if there and here and there != here else
            f"certainly {'fewer' if off.high < 0 else 'more'}, but its text differs; "
            if self.exactness.bugs and not off.low <= 0 <= off.high else
            "certainly fewer: its drafts or its rule differ; " if off.high < 0 else
            "certainly more: its drafter differs; " if off.low > 0 else
            f"{off.doubt or 'no clear difference'}; "
        )  # fmt: skip
        return [
            f"{on['rate']:.0%} of draft tokens, {on['here_rate']:.0%} here; "
            f"{on['per_draft']:.2f} a draft, {on['here_per_draft']:.2f} here: "
            f"{off.value:+.2f} [{off.low:+.2f}, {off.high:+.2f}], {clear}"
            f"equal in {self.alike} of {counted(n, 'prompt')}",
            f"{on['share']:.2f} accepted tokens per token written, {on['here_share']:.2f} here "
            "(also those that the end of an answer cut off)",
        ]


def check(
    server: Server, pairing: Pairing, prompts: Sequence[Prompt], max_new_tokens: int,
    plain: Server | None = None,
) -> Checked:  # fmt: skip
    """Send prompts to a server one at a time and compare with greedy output of the pairing, which
    should have its target, drafter, draft length and dtype.

    plain: the same server without drafting; both take turns. Raises UserError if a server does not
    answer, or the pairing samples or drafts nothing."""
    if pairing.options["temperature"] > 0:
        raise UserError("a server is checked with greedy output: use temperature 0")
    texts = pairing.encode([prompt.text for prompt in prompts])
    servers = {"": server} | ({"plain_": plain} if plain else {})
    for each in servers.values():  # warm-up, and a complaint before the reference takes its time
        each.complete(texts[0], 2)
    rounds = _rounds(pairing, texts, max_new_tokens)
    rows, outputs = [], {name: list[Reply]() for name in servers}
    start = before = server.dialect.counters()
    for number, ids in enumerate(tqdm(texts, desc="server", unit="prompt")):
        prompt = prompts[number]
        row: dict[str, Any] = {"question_id": prompt.question_id, "turn": prompt.turn}
        for name in list(servers)[:: 1 if number % 2 else -1]:
            reply = servers[name].complete(ids, max_new_tokens)
            outputs[name].append(reply)
            row |= {f"{name}tokens": len(reply.tokens), f"{name}s": reply.s,
                    f"{name}ttft_s": reply.ttft_s, f"{name}later": reply.later}  # fmt: skip
        now = server.dialect.counters()
        row |= {name: now[name] - before[name] for name in COUNTS}
        drafts, drafted, accepted = (row[name] for name in COUNTS)
        if not (0 <= drafts <= row["tokens"] + 1 and 0 <= accepted <= drafted):
            raise UserError(
                f"{server.url} counted {drafts} drafts of {drafted} tokens, {accepted} accepted, "
                f"while it wrote {counted(row['tokens'], 'token')}: was it restarted, or used by "
                "others? Check it while nothing else uses it"
            )
        before = now
        rows.append(row)
    gamma = single_stream_tree(pairing.engine.policy).depth
    full = gamma if server.dialect.counts_every_round else None
    counts = [_counts(each, full) for each in rounds]
    reference = pd.DataFrame(counts, columns=COUNTS).add_prefix("here_")
    reference["here_tokens"] = [1 + sum(emitted for *_, emitted in each) for each in rounds]
    samples = pd.DataFrame(rows).join(reference)
    same = (
        sum(a.tokens == b.tokens for a, b in zip(outputs[""], outputs["plain_"], strict=True))
        if plain else None
    )  # fmt: skip
    exact = _compared(pairing, texts, outputs[""], max_new_tokens)
    drafts = reference["here_drafts"].sum()
    positions = _positions(before - start, rounds, int(drafts), gamma)
    return Checked(server, exact, samples, positions, same)


def _compared(
    pairing: Pairing, texts: Sequence[list[int]], replies: Sequence[Reply], max_new_tokens: int
) -> Exactness:
    """Replies against plain decoding here. A server may leave out the token that ends a text,
    whichever of them it was."""
    eos, outputs = pairing.engine.eos, [reply.tokens for reply in replies]
    cut = [r.ended and not {*r.tokens[-1:]} & {*eos} for r in replies]
    whole = [[*out, *eos[:1]] if short else out for out, short in zip(outputs, cut, strict=True)]
    exact = exactness.compare(pairing.engine, texts, whole, max_new_tokens, range(len(texts)))
    exact.divergences = [
        d for d in exact.divergences
        if not (cut[d.row] and d.position == len(outputs[d.row]) and d.plain in eos)
    ]  # fmt: skip
    return exact


def _rounds(pairing: Pairing, texts: Sequence[list[int]], max_new_tokens: int) -> list[list[Round]]:
    """The rounds of each prompt here, one prompt at a time as on the server, and from the state in
    which a server drafts first: its pass over the prompt has emitted a token and drafted nothing.
    """
    engine = pairing.engine
    insist_on_drafts(engine)
    rounds = []
    for ids in tqdm(texts, desc="reference", unit="prompt"):
        [[first]] = engine.generate([ids], 1).tokens
        if first in engine.eos or max_new_tokens == 1:
            rounds.append(list[Round]())
            continue
        trace = engine.generate([[*ids, first]], max_new_tokens - 1).trace
        rounds.append([(s.drafted, s.accepted, s.emitted) for s in trace.steps()])
    return rounds


def _counts(rounds: Sequence[Round], full: int | None) -> tuple[int, int, int]:
    """COUNTS of a prompt's rounds as a server has them: without rounds that drafted nothing or, if
    given, every round as a draft of the `full` length."""
    drafted = [(of if full is None else full, n) for of, n, _ in rounds if of or full]
    return len(drafted), sum(of for of, _ in drafted), sum(n for _, n in drafted)


def _positions(
    there: dict[str, int], here: Iterable[Sequence[Round]], drafts: int, gamma: int
) -> pd.DataFrame:
    accepted = np.array([n for rounds in here for _, n, _ in rounds])
    by_place = there["accepted_1"] or not there["accepted_tokens"]
    drafts_there = max(1, there["drafts"]) if by_place else np.nan
    return pd.DataFrame(
        {"position": at, "server": there[f"accepted_{at}"] / drafts_there,
         "here": float((accepted >= at).sum() / max(1, drafts))}
        for at in range(1, gamma + 1)
    )  # fmt: skip
