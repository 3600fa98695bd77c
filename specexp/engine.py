"""The speculative round: draft, verify, accept, roll back. Everything else is chosen beforehand.

The round has no `if` on kinds of things: plain decoding is the null drafter, greedy decoding a
one-hot distribution, a chain a tree, and a roll back a shorter length. Inside `round` nothing is
read back to the host; the loop around it makes one small read per round to learn which rows are
done, on a GPU while the next round is running. So a round can be one CUDA graph (graphs.py) over
rows and caches whose addresses stay the same from batch to batch. On a CPU it is replayed, several
rounds in one call while the policy holds (replays.py).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from specexp.drafters import Drafter
from specexp.drafters.null import Null
from specexp.errors import NonFiniteLogits, UserError
from specexp.fast import cpu_replays, cuda_graphs
from specexp.fast.cpu_replays import Reported
from specexp.models.cache import rounded
from specexp.models.lm import LM, Forward
from specexp.policy import Fixed, Load, Plan, Policy
from specexp.rules import Match, Rule
from specexp.sampling import Certain, Sampling
from specexp.sequences import Draft, Sequences, round_report
from specexp.trace import Round, Step, Trace
from specexp.tree import Tree

T = TypeVar("T")


@dataclass
class Generation:
    """tokens: the new tokens of each row (EOS included); trace: what happened in every round."""

    tokens: list[list[int]]
    trace: Trace


class Engine:
    def __init__(
        self,
        target: LM,
        drafter: Drafter,
        policy: Policy,
        sampling: Sampling = Sampling(),
        rule: Rule = Match(),
        seed: int = 0,
        eos: Sequence[int] = (),
    ) -> None:
        self.target, self.drafter, self.policy = target, drafter, policy
        self.sampling, self.rule, self.seed, self.eos = sampling, rule, seed, tuple(eos)
        self.rng = sampling.rng(seed)
        self.graphs, self.replays = cuda_graphs.on(target.device), cpu_replays.of(target)
        self.seats: Sequences | None = None  # rows reused by every batch
        self.seated: tuple[object, ...] = ()
        self.budget: Tensor  # of the rows in use, set once some are done

    def plain(self) -> Engine:
        """Ordinary decoding with the same target, sampling and noise: the baseline."""
        still = Fixed(Tree.chain(0))
        return Engine(self.target, Null(), still, self.sampling, Match(), self.seed, self.eos)

    @torch.inference_mode()
    def round(self, seqs: Sequences, tree: Tree) -> Tensor:
        """One round for every row. Returns its report, int64 [B, columns]; `steps` reads it."""
        seqs = replace(seqs, by_round=self.rule.looks_ahead, certain=self.certain)  # same memory
        draft = self._propose(seqs, tree)
        seen = self._verify(seqs, draft)  # one target pass checks every guess
        verdict = self.rule(draft, self.law(seen), self.rng)
        if not tree.is_chain:
            self.target.keep(seqs, verdict)  # the accepted path moves to the front
        self.drafter.observe(seqs, tree, verdict, seen)
        counts = seqs.commit(verdict)  # length grows by what was accepted: that is the roll back
        return self._report(seqs, draft, counts)

    @property
    def certain(self) -> bool:
        """Whether nothing is random (temperature 0)."""
        return isinstance(self.rng, Certain)

    def law(self, seen: Forward) -> Tensor:
        """What the rule reads of a pass: distributions, or logits if their argmax is enough."""
        only = self.certain and self.rule.samples
        return seen.logits if only else self.sampling.law(seen.logits)

    def _propose(self, seqs: Sequences, tree: Tree) -> Draft:
        """A round's guesses. Code that times rounds sets this to `drafted`, recorded separately."""
        return self._guesses(seqs, tree)

    def _guesses(self, seqs: Sequences, tree: Tree) -> Draft:
        """The drafter's guesses, cut to each row's budget."""
        return self.drafter.propose(seqs, tree, self.rng).within()

    def _verify(self, seqs: Sequences, draft: Draft) -> Forward:
        """The target's pass. With a drafter on the host the round cannot be recorded whole, so the
        pass is recorded by itself."""
        if self.drafter.on_host:
            return self.verified(seqs, draft)
        return self.target.verify(seqs, draft, self.drafter.taps)

    def _report(self, seqs: Sequences, draft: Draft, counts: Tensor) -> Tensor:
        """Columns: counts [B, 3]; per model that ran, whether its logits were not finite; the
        guesses; their grade, if the drafter has grades."""
        drafts = draft.tokens.shape[1] > 1
        faults = [lm.fault[seqs.rows] for lm in (self.models if drafts else (self.target,))]
        return round_report(counts, draft.tokens, faults, draft.grade if drafts else None)

    @property
    def models(self) -> tuple[LM, ...]:
        return (self.target, *self.drafter.models)

    # the same, recorded where possible

    def launch(self, seqs: Sequences, tree: Tree, hold: int = 1) -> Callable[[], list[Reported]]:
        """Begin a round. The returned function waits for it and gives its report and the time it
        was there. On a CPU, where a recorded round is one short call, that function also runs more
        rounds, `hold` in all, until a row ends."""
        if self.drafter.on_host:
            return self.unrecorded(seqs, tree)
        told = self.recorded(
            "round", seqs, tree, lambda: cuda_graphs.HostCopy(self.round(seqs, tree))
        )
        first, known = told.fetch(), self.replays

        def reported() -> list[Reported]:
            now = first(), time.perf_counter()
            return [now, *(cpu_replays.more(known, hold - 1, told.x) if known else [])]

        return reported

    def unrecorded(self, seqs: Sequences, tree: Tree) -> Callable[[], list[Reported]]:
        """One round, launched one operation at a time; returns what `launch` returns."""
        report = self.round(seqs, tree).tolist()
        return lambda: [(report, time.perf_counter())]

    def report(self, seqs: Sequences, tree: Tree) -> list[list[int]]:
        """Run one round and return its report."""
        [(report, _)] = self.launch(seqs, tree)()
        return report

    @property
    def ahead(self) -> int:
        """How many further rounds may be running while the host reads a round's report."""
        return int(self.graphs is not None and not self.drafter.on_host)

    @property
    def warm(self) -> int:
        """Rounds of a kind that run unrecorded before one is recorded."""
        return self.recordings.recorder.warm if self.recordings else 0

    @property
    def steady(self) -> bool:
        """Whether the next round like the last one will take as long as it did: not if the last
        was a warm-up or was recorded."""
        return self.recordings is None or self.recordings.steady

    @property
    def recordings(self) -> cuda_graphs.Graphs | None:
        """Recorded rounds: CUDA graphs, or replays on a CPU; None if neither is possible."""
        return self.graphs or self.replays

    @torch.inference_mode()
    def drafted(self, seqs: Sequences, tree: Tree) -> Draft:
        """A round's guesses, recorded by themselves."""
        if self.drafter.on_host:
            return self._guesses(seqs, tree)
        inner = (x for x in vars(self.drafter).values() if isinstance(x, Drafter))
        states = [vars(x) for x in (self.drafter, *inner)]

        def guess() -> tuple[Draft, list[dict[str, Any]]]:
            before = [dict(state) for state in states]
            draft = self._guesses(seqs, tree)
            pairs = zip(states, before, strict=True)
            return draft, [{k: v for k, v in s.items() if v is not b.get(k)} for s, b in pairs]

        draft, left = self.recorded("draft", seqs, tree, guess)
        for state, changes in zip(states, left, strict=True):  # `observe` reads what was left there
            state |= {k: v for k, v in changes.items() if isinstance(v, Tensor)}
        return draft

    @torch.inference_mode()
    def verified(self, seqs: Sequences, draft: Draft) -> Forward:
        """The target's pass over a draft, recorded by itself."""

        def check(tokens: Tensor, depth: Tensor, ancestors: Tensor) -> Forward:
            nodes = replace(draft.nodes, depth=depth, ancestors=ancestors)
            given = replace(draft, tokens=tokens, nodes=nodes)
            return self.target.verify(seqs, given, self.drafter.taps)

        given = draft.tokens, draft.nodes.depth, draft.nodes.ancestors
        of = draft.nodes.is_chain, *(x.shape for x in given)
        return self.recorded("verify", seqs, of, check, *given)

    def recorded(
        self, kind: str, seqs: Sequences, of: Hashable, fn: Callable[..., T], *inputs: Tensor
    ) -> T:
        """fn(*inputs), replayed if possible. Besides `inputs`, it may depend only on this engine,
        the rows of `seqs` and `of`. The result is valid until the next call of the same kind."""
        known = self.recordings
        if known is None:
            return fn(*inputs)
        models = ((lm.net, lm.cache and lm.cache.mark) for lm in self.models)
        parts = self.target, self.drafter, self.rule, self.sampling, self.rng
        key = of, seqs.place, torch.get_num_threads(), *parts, self.drafter.shaped_by, *models
        memory = seqs.tokens, seqs.length, seqs.limit, seqs.stream, seqs.eos
        return known.run(kind, key, fn, *inputs, held=memory + seqs.ragged)

    # the memory of a batch

    @torch.inference_mode()
    def allocate(self, B: int, S: int) -> None:
        """Make room for B rows of S slots in every cache. Raises UserError if memory is short."""
        if known := self.recordings:
            known.clear()
        for lm in self.models:
            lm.cache = None  # free the old caches before free memory is counted
        self.target.allocate(B, S)
        self.drafter.allocate(B, S)

    @torch.inference_mode()
    def begin(self, seqs: Sequences) -> Sequences:
        """Make room for a new batch and prefill it. Returns the rows to run rounds on: these, or,
        where rounds are recorded, a copy of them at addresses that stay."""
        if recordings := self.recordings:
            seqs = self._seat(seqs, recordings)
        else:
            self.allocate(*seqs.tokens.shape)
            self.budget = torch.empty_like(seqs.length)
        known = int(seqs.length.max()) - 1
        self.drafter.prefill(seqs, self.target.prefill(seqs, 0, known, self.drafter.taps))
        self.drafter.catch_up(seqs, known)
        return seqs

    def _seat(self, seqs: Sequences, known: cuda_graphs.Graphs) -> Sequences:
        """Copy a batch into the seats, which are as large as the largest batch so far."""
        B, slots = seqs.tokens.shape
        S, (batch, size, mark) = rounded(slots), self._held()
        broken = any(bool(lm.fault.any()) for lm in self.models)  # some slots hold NaN
        if broken or batch < B or size < S:
            self._make_room(B, S)
            batch, size, mark = self._held()
        elif self.seated[:2] != (mark, self.drafter):  # another engine made the room
            self.drafter.allocate(batch, size)
        state = tuple(x.data_ptr() for x in self.drafter.state)  # others may have reallocated it
        wanted = mark, self.drafter, tuple(seqs.eos.tolist()), state
        if self.seats is None or self.seated != wanted:
            known.clear()
            self.seats = Sequences.empty(batch, size, wanted[2], self.target.device)
            self.budget = torch.empty_like(self.seats.length)
            self.seated = wanted
        rows = self.seats.window(0, B, S)
        rows.tokens[:, :slots] = seqs.tokens
        rows.length[:], rows.limit[:], rows.stream[:] = seqs.length, seqs.limit, seqs.stream
        return rows

    def _make_room(self, B: int, S: int) -> None:
        """Allocate, keeping at least the old size if that fits."""
        batch, size, _ = self._held()
        for room in dict.fromkeys([(max(B, batch), max(S, size)), (B, S)]):
            try:
                return self.allocate(*room)
            except UserError:
                if room == (B, S):
                    raise

    def _held(self) -> tuple[int, int, object]:
        """Rows and slots of the target's cache, and its mark. Holds no reference to the cache."""
        cache = self.target.cache
        return (cache.batch, cache.size, cache.mark) if cache else (0, 0, None)

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        streams: Sequence[int] | None = None,
    ) -> Generation:
        """Continue every prompt by up to `max_new_tokens` tokens, all rows in one batch.

        streams: the noise stream of each row, by default 0..B-1; a row's sample depends only on its
        prompt, the seed and its stream. Raises UserError if a prompt does not fit the context and
        NonFiniteLogits if a model produces NaN or infinite logits.
        """
        lengths = [len(prompt) for prompt in prompts]
        longest = max(lengths, default=0)
        if longest + max_new_tokens > self.target.context:
            over = longest + max_new_tokens - self.target.context
            raise UserError(
                f"a prompt of {longest} tokens and {max_new_tokens} new ones exceed the "
                f"{self.target.context}-token context of {self.target.name} by {over}"
            )
        seqs = Sequences.of(
            prompts, max_new_tokens,
            slack=self.policy.widest, eos=self.eos, streams=streams, device=self.target.device,
        )  # fmt: skip
        begin = time.perf_counter()
        seqs = self.begin(seqs)
        self._synchronize()
        trace = Trace(len(prompts), time.perf_counter() - begin)
        slots = seqs.tokens.shape[1]
        left = max_new_tokens  # most tokens any row still needs
        missed = 0  # tokens per row written without guesses
        begun: deque[tuple[Load, Tree, Callable[[], list[Reported]], bool]] = deque()
        while left:
            while len(begun) <= self.ahead:
                coming = sum(tree.depth + 1 for _, tree, *_ in begun)  # most tokens per row
                if begun and coming >= left:
                    break
                load = Load(len(prompts), slots)
                plan = self.policy.choose(load)
                room = max(0, self.drafter.context - max(lengths) - coming)
                tree = plan.tree.cut(room)
                if tree.depth and missed:
                    self.drafter.catch_up(seqs, missed)
                missed = 0 if tree.depth else missed + 1
                fit = 1 + (room - tree.depth) // (tree.depth + 1) if tree.depth else plan.hold
                wait = self.launch(seqs, tree, min(plan.hold, fit))
                begun.append((load, tree, wait, self.steady))
            load, tree, wait, steady = begun.popleft()
            reports = wait()
            missed += (len(reports) - 1) * (not tree.depth)
            for report, now in reports:
                made = self._read(report, tree, now - begin)
                seconds = made.end_s - trace.end_s if steady else None
                self.policy.learn(load, Plan(tree), made.steps, seconds)
                trace.rounds.append(made)
                steady = True  # further rounds of a launch are replays
                lengths = [length + row[1] for length, row in zip(lengths, report, strict=True)]
            rows = zip(prompts, lengths, report, strict=True)
            left = max((len(p) + max_new_tokens - n) * row[2] for p, n, row in rows)
            if self.graphs is None and any(step.done for step in made.steps):
                depths = self.budget[: len(prompts)].fill_(self.policy.widest)
                seqs = replace(seqs, budget=depths.masked_fill_(~seqs.live, -1))
        return Generation(
            [seqs.tokens[i, len(p) : lengths[i]].tolist() for i, p in enumerate(prompts)], trace
        )

    def _read(self, report: list[list[int]], tree: Tree, end_s: float) -> Round:
        steps = self.steps(report)
        for step in steps:
            if step.broken:
                raise NonFiniteLogits(
                    f"{step.broken} produced NaN or infinite logits in row {step.row}; nothing "
                    "drawn from them was kept: check its weights and dtype"
                )
        return Round(end_s, len(tree), tree.depth, tuple(steps))

    def steps(self, report: list[list[int]]) -> list[Step]:
        """The live rows' part of a report."""
        steps, models = [], self.models
        first = 3 + len(models)
        for i, row in enumerate(report):
            accepted, emitted, live = row[:3]
            if emitted:  # done rows emit nothing
                faults, guesses = row[3:first], row[first:]
                broken = models[faults.index(1)].name if 1 in faults else None
                grade = guesses.pop() if guesses and self.drafter.grades > 1 else 0
                made = len(guesses) - guesses.count(-1)
                told = tuple(guesses), not live, broken, grade
                steps.append(Step(i, made, accepted, emitted, *told))
        return steps

    def _synchronize(self) -> None:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
