"""Three prompts of two categories, which the tiny tokenizer knows."""

from specexp.measure.prompts import Prompt

PROMPTS = [
    Prompt(1, "code", ("def mean(values):",)),
    Prompt(2, "code", ("return sum(values) / len(values)",)),
    Prompt(3, "messy", ("zz qq mean mean mean",)),
]
