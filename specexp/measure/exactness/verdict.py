"""The verdict on a run: differences from plain decoding, from the module without a cache, and of
draws from their distributions.

The two paths of a comparison sum the same numbers in different orders, so a near tie may go either
way. At the first difference of a row the logits are computed again in float32 without a cache: the
difference is a `tie` if both tokens are within rounding of winning there, else a `bug`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import torch

from specexp.engine import Engine
from specexp.errors import counted
from specexp.measure.exactness.draws import ALARM, Check, Witness
from specexp.measure.exactness.memory import remembers
from specexp.measure.exactness.reference import Reference, near_winners
from specexp.rules import Match
from specexp.sampling import likeliest

ALONE = 2  # rows of a batch that are compared with the module without a cache


@dataclass(frozen=True)
class Divergence:
    """The first difference of a row. `position`: index in its output; a token is -1 where that
    output had already ended; `kind`: tie or bug."""

    row: int
    position: int
    plain: int
    speculative: int
    kind: str


@dataclass
class Exactness:
    """The result of a check. `tokens`: how many agree before each row's first difference.

    `lossy`: name of the engine's rule if it changes the target's distribution, whatever the
    comparison shows; `replaced`: its name if Match was run in its place; both else "". `alone`:
    tokens whose logits were compared with those of the module without a cache; `strays`: how many
    of them differ beyond rounding; `unlikely`: how many tokens of a greedy run are not the
    likeliest by the logits that the rule saw. checks: those of the draws of a sampled run.
    `remembers`: the evidence that its drafter remembers text (`memory.remembers`), else ""."""

    rows: int
    lossy: str = ""
    replaced: str = ""
    tokens: int = 0
    divergences: list[Divergence] = field(default_factory=list)
    alone: int = 0
    strays: int = 0
    unlikely: int = 0
    checks: list[Check] = field(default_factory=list)
    remembers: str = ""

    @property
    def ties(self) -> int:
        return sum(d.kind == "tie" for d in self.divergences)

    @property
    def bugs(self) -> int:
        """Rows that differ from plain decoding, tokens that differ from the module alone or that a
        greedy rule should not have emitted, and kinds of draw that do not follow their
        distribution."""
        drawn = sum(not check.passed for check in self.checks)
        return len(self.divergences) - self.ties + self.strays + self.unlikely + drawn

    @property
    def detectable(self) -> float:
        """The smallest total variation, mean over draws, that every check of draws detects; NaN if
        there is none."""
        return max((check.detectable for check in self.checks), default=float("nan"))

    @property
    def detectable_in_row(self) -> float:
        """The same for a fault in a single row."""
        return max((check.in_row for check in self.checks), default=float("nan"))

    @property
    def metrics(self) -> dict[str, float]:
        metrics = {
            "exact/pass": float(self.bugs == 0 and not self.lossy),
            "exact/ties": float(self.ties),
            "exact/bugs": float(self.bugs),
            "exact/tokens": float(self.tokens),
            "exact/alone": float(self.alone),
        }
        if self.checks:
            metrics |= {
                "exact/detectable_tv": self.detectable,
                "exact/detectable_tv_row": self.detectable_in_row,
                "exact/bias": max(check.bias for check in self.checks),
            }
        return metrics | ({"exact/remembers": 1.0} if self.remembers else {})

    def __str__(self) -> str:
        others = len(self.divergences) - self.ties
        both = counted(self.ties, "near tie"), counted(others, "bug")
        result = ", ".join(both) if self.divergences else "identical"
        how = f", Match in place of {self.replaced}," if self.replaced else ""
        compared = f"{counted(self.tokens, 'token')} in {counted(self.rows, 'row')}"
        parts = [f"{compared}{how} compared with plain decoding: {result}"]
        if self.alone:
            result = counted(self.strays, "bug") if self.strays else "equal up to rounding"
            logits = f"logits of {counted(self.alone, 'token')} with the unmodified model's"
            parts.append(f"{logits}: {result}")
        if self.unlikely:
            parts.append(f"BUG: {self.unlikely} of them are not the likeliest of their own round")
        parts += [str(check) for check in self.checks]
        if self.checks:
            single = f", or {self.detectable_in_row:.2g} in a single row" if self.rows > 1 else ""
            parts[-1] += (
                f" (this detects a mean total variation of {self.detectable:.2g}{single}, with one "
                f"false alarm in {1 / ALARM:,.0f} runs)"
            )
        if self.remembers:
            parts.append(
                f"its drafter REMEMBERS text ({self.remembers}): figures are of text seen before"
            )
        line = "; ".join(parts)
        return f"{line}; but the rule is {self.lossy}" if self.lossy else line


def certify(engine: Engine, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Exactness:
    """Decode the prompts both ways, all rows in one ragged batch, and classify every difference;
    then look at rounds of the engine as it is (`check_rounds`).

    prompts: token ids of each row. Greedy output is made by the engine's own rule, sampled output
    by Match."""
    coupled = Engine.of(engine, rule=Match()) if engine.sampling.temperature > 0 else engine
    fast = coupled.generate(prompts, max_new_tokens).tokens
    exact = compare(engine, prompts, fast, max_new_tokens, range(len(prompts)))
    return check_rounds(exact, engine, prompts, max_new_tokens)


def check_rounds(
    exact: Exactness, engine: Engine, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> Exactness:
    """Generate with the engine's own rule and add to `exact`: whether the last rows' logits are
    those of the module without a cache and, if greedy, their tokens the likeliest by them; whether
    the draws of all rows follow their distributions, if sampled by an exact rule; and whether the
    drafter remembers text."""
    checked = engine.sampling.temperature > 0 and not engine.rule.lossy
    exact.remembers = remembers(engine, prompts, max_new_tokens)
    prompts = prompts if checked else prompts[-ALONE:]
    kept = range(max(0, len(prompts) - ALONE), len(prompts))
    witness, reference = Witness(engine, len(prompts), kept), Reference(engine.target)
    Engine.of(engine, clock=witness).generate(prompts, max_new_tokens)
    exact.checks = witness.checks if checked else []
    for row in kept:
        if tokens := witness.tokens[row]:
            text, logits = [*prompts[row], *tokens[:-1]], torch.cat(witness.logits[row])
            exact.alone += len(tokens)
            exact.strays += reference.strays(text, logits)
            if engine.sampling.temperature == 0:
                exact.unlikely += int((likeliest(logits).cpu() != torch.tensor(tokens)).sum())
    return exact


def compare(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    fast: Sequence[Sequence[int]],
    max_new_tokens: int,
    streams: Sequence[int],
) -> Exactness:
    """Classify the differences between plain decoding and `fast`, outputs made greedily or under
    Match. streams: the noise stream of each row."""
    plain = engine.plain().generate(prompts, max_new_tokens, streams).tokens
    rule = engine.rule
    sampled = engine.sampling.temperature > 0
    lossy = rule.name if rule.lossy and sampled else ""
    replaced = rule.name if not rule.samples and sampled else ""
    exact, reference = Exactness(len(prompts), lossy, replaced), Reference(engine.target)
    for row, (prompt, a, b) in enumerate(zip(prompts, plain, fast, strict=True)):
        pairs = enumerate(zip_longest(a, b, fillvalue=-1))
        same, x, y = next(((i, x, y) for i, (x, y) in pairs if x != y), (len(a), -1, -1))
        exact.tokens += same
        if x == y:
            continue
        text = [*prompt, *a[:same]]
        # an output that ends before the other is a bug: EOS is a token, and no rounding ends a text
        tie = min(x, y) >= 0 and {x, y} <= near_winners(engine, text, streams[row], reference)
        exact.divergences.append(Divergence(row, same, x, y, "tie" if tie else "bug"))
    return exact
