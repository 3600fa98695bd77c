"""What `specexp bench` can be asked for, in words and numbers: checked before torch is imported."""

from collections.abc import Sequence
from typing import Any

from specexp.errors import meant
from specexp.measure import parameters

NAMES = ("peers", "roofline", "round")
WORK = {
    "plain": "plain", "draft": "draft model", "lookup": "prompt lookup",
    "plain over compiled": "plain, theirs compiled", "draft over plain": "speculation",
}  # fmt: skip  # the comparisons of `peers`, in words
PROMPTS = 5  # how many prompts are used, evenly over categories
MAX_BATCH = 8  # largest batch size that `peers` compares


def insist(names: Sequence[str], options: dict[str, Any]) -> None:
    """Raises UserError with every problem, one line each, before any weight is loaded."""
    problems = [
        f"suite {name!r} is unknown{meant(name, NAMES)} (there are {', '.join(NAMES)})"
        for name in names
        if name not in NAMES
    ]
    batches = options.get("batches", [1])
    most = max(MAX_BATCH, min(batches))  # rows of the largest batch that generates
    sizes = sorted({min(batch, most) for batch in batches})
    parameters.insist(options | {"batches": sizes}, None, problems)
