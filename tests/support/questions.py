"""Prompts which the tiny tokenizer knows, and what reads letters for tokens."""

from types import SimpleNamespace

from specexp.measure.prompts import Prompt

PROMPTS = [
    Prompt(1, "code", ("def mean(values):",)),
    Prompt(2, "code", ("return sum(values) / len(values)",)),
    Prompt(3, "messy", ("zz qq mean mean mean",)),
]
TWO = [Prompt(1, "code", ("def mean(values):",)), Prompt(2, "messy", ("zz qq mean mean",))]
LETTERS = SimpleNamespace(encode=lambda texts: [[ord(c) for c in text] for text in texts])
