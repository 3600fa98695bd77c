"""One pairing against plain decoding in two lines: how much faster is it, and is its output the
target's?

`Pairing.compare_with_plain` returns it, timed by `one_pairing` and checked by `exactness.certify`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from specexp.api import Pairing
from specexp.errors import UserError, counted
from specexp.measure import one_pairing, statistics, summaries
from specexp.measure.exactness import Exactness, certify
from specexp.measure.prompts import Prompt
from specexp.measure.statistics import Interval
from specexp.trace import Acceptance


@dataclass(frozen=True, repr=False)
class Comparison:
    """speedup: plain decoding's seconds per token over the pairing's, with its 95 % interval over
    `n` different prompts. exactness: the check of its output; acceptance: counts of all prompts
    together."""

    speedup: Interval
    n: int
    exactness: Exactness
    acceptance: Acceptance

    @property
    def exact(self) -> bool:
        """The rule keeps the target's distribution, and no difference was beyond rounding."""
        return not self.exactness.bugs and not self.exactness.lossy

    def __str__(self) -> str:
        prompts = counted(self.n, "prompt")
        return (
            f"speedup {self.speedup} over {prompts}: {statistics.verdict(self.speedup)}\n"
            f"{'exact' if self.exact else 'NOT EXACT'}: {self.exactness}"
        )

    __repr__ = __str__


def with_plain(
    pairing: Pairing, texts: Sequence[str], max_new_tokens: int, repeats: int
) -> Comparison:
    """Raises UserError without a prompt or a repeat, or if prompts do not fit the context."""
    if not texts:
        raise UserError("no prompts given; pass at least one")
    for name, value in (("max_new_tokens", max_new_tokens), ("repeats", repeats)):
        if value < 1:
            raise UserError(f"{name} is {value}; it must be 1 or more")
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts), 1)}
    prompts = [Prompt(numbers[text], "given", (text,)) for text in texts]
    arms = {pairing.drafter: pairing}
    samples = one_pairing.latency_by_arm(arms, prompts, max_new_tokens, repeats)
    [row] = summaries.speedups(samples, "arm").to_dict("records")
    speedup = Interval(*(row[name] for name in ("speedup", "low", "high", "doubt")))
    exactness = certify(pairing.engine, pairing.encode(texts), max_new_tokens)
    return Comparison(speedup, len(numbers), exactness, summaries.pooled(samples))
