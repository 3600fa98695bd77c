"""The speculative round: draft, verify, accept, commit. Everything else is chosen beforehand.

The round has no special cases: plain decoding is the drafter `plain`, greedy decoding a one-hot
distribution, a chain a tree, and a roll back a shorter length. Inside `round` nothing is read back
to the host, so a recorder may replay it as a whole (recording.py). The loop around it makes one
small read per round to learn which rows are done, on a GPU while the next round is already running.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from operator import add
from typing import Any, Self, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from specexp import fitting
from specexp.drafters import Drafter, named, warn_of_short_context
from specexp.drafters.plain import Plain
from specexp.errors import NonFiniteLogits, UserError, check_type
from specexp.fitting import Limits
from specexp.models.lm import LM, Forward, note_emptied
from specexp.models.processors import unprocessed
from specexp.models.servable import context_in_words
from specexp.ops import op
from specexp.policy import Fixed, Load, Plan, Policy, planned
from specexp.recording import Recorder, Reports, recorder_for
from specexp.rows import Rows
from specexp.rules import Match, Rule
from specexp.sampling import Certain, Sampling
from specexp.sequences import Draft, Sequences, Verdict, check_tokens, round_report
from specexp.trace import Round, Step, Trace, steps_of_report
from specexp.tree import Tree

T = TypeVar("T")
Clock: TypeAlias = Callable[[str, Callable[[], Any]], Any]


@dataclass
class Generation:
    """tokens: the new tokens of each row (EOS included); trace: what happened in every round."""

    tokens: list[list[int]]
    trace: Trace

    def until(self, eos: Sequence[int]) -> Trace:
        """What happened in each row up to the first of these tokens, as if that had ended it."""
        left = [
            next((n for n, t in enumerate(row, 1) if t in eos), len(row)) for row in self.tokens
        ]
        rounds = []
        for r in self.trace.rounds:
            steps = [s._replace(emitted=min(s.emitted, left[s.row])) for s in r.steps]
            for s in steps:
                left[s.row] -= s.emitted
            rounds.append(r._replace(steps=tuple(s for s in steps if s.emitted)))
        return replace(self.trace, rounds=rounds)


class Engine:
    """Runs the rounds of a target and a drafter.

    Args:
        target: the model whose distribution the output has.
        drafter: proposes the draft of every round.
        policy: chooses the tree of every round.
        sampling: temperature, top-k, top-p and min-p, for target and drafter alike.
        rule: which draft tokens to accept.
        seed: of all random numbers. Equal seeds, prompts and streams give equal text.
        eos: token ids that end a row.
        limits: the drafts that the drafter can make; a policy that plans others is refused.
        clock: called as `clock(stage, run)` for each stage of a round (draft, verify, accept,
            commit); it must return `run()`. Stages are then recorded one by one.
        recorder: how rounds are replayed; by default what suits the target's device.
    """

    def __init__(
        self, target: LM, drafter: Drafter, policy: Policy, sampling: Sampling = Sampling(),
        rule: Rule = Match(), seed: int = 0, eos: Sequence[int] = (), limits: Limits = Limits(),
        clock: Clock | None = None, recorder: Recorder | None = None,
    ) -> None:  # fmt: skip
        check_type("seed", seed, "int")
        for token in eos:
            check_type("an EOS token", token, "int")
        self.target, self.drafter, self.policy = target, drafter, policy
        self.sampling, self.rule, self.seed, self.eos = sampling, rule, seed, tuple(eos)
        self.limits, self.fit = limits, partial(fitting.reach, drafter.name, limits)
        self.rng, self.clock = sampling.rng(seed, rule.looks_ahead), clock
        self.recorder = recorder_for(target) if recorder is None else recorder
        self.rows = Rows(target, drafter, self.recorder)
        self.models = self.rows.models

    @classmethod
    def of(cls, other: Engine, **changes: Any) -> Self:
        """An engine with the parts of another one, some of them changed. The limits are kept with
        the drafter."""
        names = ["target", "drafter", "policy", "sampling", "rule", "seed", "eos"]
        names += ["limits"] * ("drafter" not in changes)
        return cls(**{name: getattr(other, name) for name in names} | changes)

    def __repr__(self) -> str:
        parts = self.target.name, self.drafter.name, self.rule.name, self.sampling
        return f"Engine({', '.join(map(str, parts))})"

    # the round

    @torch.inference_mode()
    def round(self, seqs: Sequences, tree: Tree) -> Tensor:
        """One round for every row. Returns its report (`round_report`), int64 [B, columns]."""
        draft = self.stage("draft", self.draft, seqs, tree)
        seen = self.stage("verify", self.verify, seqs, draft)
        verdict = self.stage("accept", self.accept, draft, seen)
        return self.stage("commit", self.commit, seqs, draft, verdict, seen)

    def draft(self, seqs: Sequences, tree: Tree) -> Draft:
        """The drafter's tokens, cut to each row's budget. Raises UserError if one that was computed
        on the host is outside the vocabulary."""
        drafter, seqs = self.drafter, replace(seqs, rng=self.rng)
        draft = drafter.propose(seqs, tree, self.rng).within()
        if drafter.on_host and (fault := draft.outside(self.target.vocab)):
            raise UserError(f"drafter {drafter.name} {fault}")
        return draft

    def verify(self, seqs: Sequences, draft: Draft) -> Forward:
        """One target pass over the whole draft."""
        return self.target.verify(seqs, draft, self.drafter.taps)

    def accept(self, draft: Draft, seen: Forward) -> Verdict:
        """The path of the draft that the rule accepts, and the token after it."""
        return judged(draft, seen, self)

    def commit(self, seqs: Sequences, draft: Draft, verdict: Verdict, seen: Forward) -> Tensor:
        """Append the accepted tokens. A row's length grows by them alone, which rolls back the
        rest of the draft."""
        self.target.keep(seqs, draft, verdict)
        self.drafter.observe(seqs, draft, verdict, seen)
        counts = seqs.commit(verdict)
        if self.target.process is not unprocessed:
            note_emptied(self.target.fault[seqs.rows], seen.logits, verdict, counts[:, 1:2])
        drafted = draft.tokens.shape[1] > 1
        faults = [lm.fault[seqs.rows] for lm in (self.models if drafted else (self.target,))]
        return round_report(counts, draft.tokens, faults)

    def law(self, seen: Forward) -> Tensor:
        """What the rule reads of a pass [B, N, V]: distributions, or logits if their argmax is
        enough."""
        shipped = type(self.sampling) is Sampling  # another may have a law of its own
        enough = isinstance(self.rng, Certain) and self.rule.samples and shipped
        return seen.logits if enough else self.sampling.law(seen.logits)

    def stage(self, name: str, run: Callable[..., T], *args: Any) -> T:
        """Run one stage of a round, timed by the clock if there is one."""
        if self.recorded_whole:
            return run(*args)
        if self.clock is None:
            return self.recorder.run_stage(self, name, run, *args)
        return cast(T, self.clock(name, lambda: self.recorder.run_stage(self, name, run, *args)))

    @property
    def recorded_whole(self) -> bool:
        """Whether a round may be recorded in one piece: its drafter does not need the host, and its
        stages are not timed."""
        return self.clock is None and not self.drafter.on_host

    # rounds of a batch

    def plain(self) -> Engine:
        """Ordinary decoding with the same target, sampling and noise: the baseline."""
        return Engine.of(self, drafter=Plain(), policy=Fixed(Tree.chain(0)), rule=Match())

    def start(self, seqs: Sequences, tree: Tree, hold: int = 1) -> Callable[[], Reports]:
        """Begin a round; see `Recorder.start`."""
        return self.recorder.start(self, seqs, tree, hold)

    def run(self, seqs: Sequences, tree: Tree) -> list[Step]:
        """Run one round; returns what it did in each live row."""
        [(rows, _)] = self.start(seqs, tree)()
        return self.steps(rows)

    def steps(self, rows: list[list[int]]) -> list[Step]:
        """The live rows of a report."""
        return steps_of_report(rows, [lm.why for lm in self.models])

    @torch.inference_mode()
    def begin(self, batch: Sequences) -> Sequences:
        """Enter a batch and prefill it. Returns the rows to run rounds on."""
        seqs = self.rows.enter(batch)
        for _ in self.rows.prefill(seqs):
            pass
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return seqs

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        streams: Sequence[int] | None = None,
    ) -> Generation:
        """Continue every prompt, all rows in one batch.

        Args:
            prompts: token ids, one list a row.
            max_new_tokens: the most tokens to add to a row.
            streams: the noise stream of each row, by default 0..B-1; a row's sample depends only on
                its prompt, the seed and its stream.

        Raises:
            UserError: a prompt does not fit the context, or memory is short.
            NonFiniteLogits: a model produced NaN or infinite logits, or its generation config left
                no token.
        """
        vocab = self.target.config.vocab_size  # prompts may hold tokens that it never emits
        for number, prompt in enumerate(prompts, 1):
            check_tokens(prompt, f"prompt {number}", vocab)
        check_type("max_new_tokens", max_new_tokens, "int")
        for stream in () if streams is None else streams:
            check_type("a stream", stream, "int")
        longest = max(map(len, prompts), default=0)
        if (over := longest + max_new_tokens - self.target.context) > 0:
            raise UserError(
                f"a prompt of {longest} tokens and {max_new_tokens} new ones exceed the "
                f"{context_in_words(self.target.config)} of {self.target.name} by {over}"
            )
        batch = Sequences.of(
            prompts, max_new_tokens,
            slack=self.policy.widest, eos=self.eos, streams=streams, device=self.target.device,
        )  # fmt: skip
        trace, lengths = Trace(len(prompts)), [len(prompt) for prompt in prompts]
        with named(self.drafter, trace.rounds):
            seqs = self._decode(batch, lengths, max_new_tokens, trace)
        rows = zip(seqs.tokens, prompts, lengths, strict=True)
        return Generation([row[len(p) : length].tolist() for row, p, length in rows], trace)

    def _decode(
        self, batch: Sequences, lengths: list[int], max_new_tokens: int, trace: Trace
    ) -> Sequences:
        """Prefill a batch and run rounds until every row is done; `lengths`, of its rows, and
        `trace` are kept up to date."""
        begin = time.perf_counter()
        seqs = self.begin(batch)
        trace.prefill_s = time.perf_counter() - begin
        limits = [length + max_new_tokens for length in lengths]
        left = max_new_tokens  # the most tokens that any row still needs
        live = [1] * len(lengths)  # by the last report
        behind = 0  # tokens per row committed since the drafter last drafted
        # further rounds that may be running while the host reads a round's report
        ahead = self.recorder.ahead if self.recorded_whole else 0
        # rounds under way: the load and the tree of each, what waits for its report, and whether it
        # was `Recorder.steady`
        running: deque[tuple[Load, Tree, Callable[[], Reports], bool]] = deque()
        while left:
            while len(running) <= ahead:
                pending = sum(tree.depth + 1 for _, tree, *_ in running)  # tokens a row, at most
                if running and pending >= left:
                    break  # the rounds under way may finish every row
                load = Load(sum(live), batch.tokens.shape[1])
                tree, hold = self._next(load, max(compress(lengths, live)) + pending)
                if tree.depth and behind:
                    self.drafter.catch_up(seqs, behind)
                behind = 0 if tree.depth else behind + 1
                wait = self.start(seqs, tree, hold)
                running.append((load, tree, wait, self.recorder.steady))
            load, tree, wait, steady = running.popleft()
            reports = wait()
            behind += (len(reports) - 1) * (not tree.depth)
            for report, now in reports:
                last = self._reported(report, tree, now - begin)
                seconds = last.end_s - trace.end_s if steady else None
                self.policy.learn(load, Plan(tree), last.steps, seconds)
                trace.rounds.append(last)
                steady = True  # the other rounds of one wait are replays
                lengths[:] = map(add, lengths, [row[1] for row in report])
            live = [row[2] for row in report]
            rows = zip(limits, lengths, live, strict=True)
            left = max((limit - length) * goes_on for limit, length, goes_on in rows)
            if not self.recorder.ahead and any(step.done for step in last.steps):
                depths = self.rows.budget[: len(lengths)].fill_(self.policy.widest)
                seqs = replace(seqs, budget=depths.masked_fill_(~seqs.live, -1))
        return seqs

    def _next(self, load: Load, longest: int) -> tuple[Tree, int]:
        """The tree that the policy plans, cut to what the drafter's context allows after `longest`
        tokens, and for how many rounds it may be held."""
        warn_of_short_context(self.drafter, longest)
        plan = planned(self.policy, load, self.fit)
        room = self.drafter.context - longest
        tree = plan.tree.cut(room)
        if not tree.depth:
            return tree, plan.hold
        return tree, min(plan.hold, 1 + (room - tree.depth) // (tree.depth + 1))

    def _reported(self, report: list[list[int]], tree: Tree, end_s: float) -> Round:
        """The record of a round by its report. Raises NonFiniteLogits if a row is broken."""
        live = self.steps(report)
        for step in live:
            if step.broken:
                raise NonFiniteLogits(
                    f"{step.broken} in row {step.row + 1}: no token of it was kept"
                )
        return Round(end_s, tree.depth, tuple(live))


@op
def judged(draft: Draft, seen: Forward, engine: Engine) -> Verdict:
    """The verdict of the engine's rule on a draft."""
    return engine.rule(draft, engine.law(seen), engine.rng)
