"""The speculative round: draft, verify, accept, roll back. Everything else is chosen beforehand.

There is no `if` on kinds of things here: plain decoding is the null drafter, greedy is a one-hot
law, a chain is a tree, rolling back is a shorter length. Inside `round` nothing is read back to the
host; the loop around it makes one small read a round to learn who is done.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specexp.drafters import Drafter
from specexp.drafters.null import Null
from specexp.errors import NonFiniteLogits, UserError
from specexp.lm import LM
from specexp.policy import Fixed, Policy
from specexp.rules import Match, Rule
from specexp.sampling import Sampling
from specexp.sequences import Sequences
from specexp.trace import Round, Step, Trace
from specexp.tree import Tree


@dataclass
class Generation:
    """tokens: the new tokens of each row (EOS included); trace: how they came about."""

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

    def plain(self) -> Engine:
        """Ordinary decoding with the same target, law and noise: the baseline."""
        still = Fixed(Tree.chain(0))
        return Engine(self.target, Null(), still, self.sampling, Match(), self.seed, self.eos)

    def round(self, seqs: Sequences, tree: Tree) -> Tensor:
        """One round for every row; what the host will want to know of it, [B, 5 + N] int64."""
        seqs = replace(seqs, by_round=self.rule.looks_ahead)  # the same tensors
        live = seqs.live
        draft = self.drafter.propose(seqs, tree, self.rng)  # guess
        seen = self.target.verify(seqs, draft, self.drafter.taps)  # one pass checks every guess
        verdict = self.rule(draft, self.sampling.law(seen.logits), self.rng)  # keep what agrees
        if not tree.is_chain:
            self.target.keep(seqs, verdict)  # the accepted path becomes a line
        self.drafter.observe(seqs, tree, verdict, seen)
        emitted = seqs.commit(draft, verdict)  # length grows: that is the roll back
        drafted = (draft.tokens[:, 1:] >= 0).sum(1)
        faults = torch.stack([lm.fault for lm in self.models]).T
        counts = torch.stack([live, drafted, verdict.n, emitted, seqs.live], 1)
        return torch.cat([counts, faults, draft.tokens[:, 1:]], 1)

    @property
    def models(self) -> tuple[LM, ...]:
        return (self.target, *self.drafter.models)

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        streams: Sequence[int] | None = None,
    ) -> Generation:
        """Continue every prompt by up to `max_new_tokens` tokens, all rows in one batch.

        streams: names of the rows' noise, by default 0..B-1; a row's sample depends on its prompt,
        the seed and its stream alone. Raises UserError for prompts that do not fit the context and
        NonFiniteLogits when a model breaks.
        """
        longest = max(map(len, prompts), default=0)
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
        self.drafter.prefill(seqs, self.target.prefill(seqs, self.drafter.taps))
        self._synchronize()
        trace = Trace(len(prompts), time.perf_counter() - begin)
        live = len(prompts) if max_new_tokens else 0
        while live:
            tree = self.policy.choose(live).cut(max(0, self.drafter.context - longest))
            report = self.round(seqs, tree).tolist()
            trace.rounds.append(self._read(report, tree, time.perf_counter() - begin))
            live = sum(row[4] for row in report)
            longest += max(row[3] for row in report)
        lengths = seqs.length.tolist()
        return Generation(
            [seqs.tokens[i, len(p) : lengths[i]].tolist() for i, p in enumerate(prompts)], trace
        )

    def _read(self, report: list[list[int]], tree: Tree, end_s: float) -> Round:
        faults = slice(5, 5 + len(self.models))
        for i, row in enumerate(report):
            for lm, bad in zip(self.models, row[faults], strict=True):
                if bad and row[0]:
                    raise NonFiniteLogits(
                        f"{lm.name} produced NaN or infinite logits in row {i}; nothing drawn from "
                        "them was kept: check its weights and dtype"
                    )
        steps = tuple(
            Step(i, row[1], row[2], row[3], tuple(row[faults.stop :]))
            for i, row in enumerate(report)
            if row[0]
        )
        return Round(end_s, len(tree), tree.depth, steps)

    def _synchronize(self) -> None:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
