"""Drafting methods, one file each. A drafter knows nothing about rules; every exact rule keeps the
target's law whatever is guessed.

A drafter is named `METHOD` or `METHOD:ARGUMENT`. METHOD is a file in this folder and `prepare` in
that file interprets the argument, so adding a file adds a method everywhere.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specexp.errors import UserError
from specexp.models.lm import LM, Forward
from specexp.sampling import Rng, Sampling
from specexp.sequences import Draft, Sequences, Verdict
from specexp.tree import Tree


def methods() -> list[str]:
    """The names of the drafting methods, which are the files in this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


class Drafter(ABC):
    """The interface between the engine and a drafter. Only `propose` must be implemented.

    `taps`: the target's hidden states that it needs (0: the embeddings). `models`: the models that
    it runs. `reads`: whether those keep caches of their own, which `catch_up` must fill before they
    can draft. `context`: the longest sequence it can draft for; near it the engine drafts less.
    `state`: tensors [B, ...] that it keeps between rounds, besides the caches of its models;
    `seqs.rows` selects the rows of a call. `on_host`: it reads tensor values or decides shapes on
    the host, so its rounds cannot be recorded as graphs. `shaped_by`: host numbers, besides the
    tree, that determine which operations it runs. `grades`: how many confidence levels it reports
    (`Draft.grade`); 1 means that it reports none.
    """

    name: str
    taps: tuple[int, ...] = ()
    models: tuple[LM, ...] = ()
    reads: bool = False
    context: int = 1 << 30
    on_host: bool = False
    grades: int = 1

    @property
    def shaped_by(self) -> tuple[int, ...]:
        return ()

    @property
    def state(self) -> tuple[Tensor, ...]:
        return ()

    def allocate(self, B: int, S: int) -> None:
        """Allocate state for B empty rows of S slots."""

    def prefill(self, seqs: Sequences, hidden: Tensor | None) -> None:
        """Initialise the state of new rows from their prompts.

        hidden [B, P, taps*E]: the target's hidden states over the prompts, without the last token;
        None if there are none. Runs no draft model: `catch_up` does.
        """

    def catch_up(self, seqs: Sequences, missed: int) -> None:
        """Process the last `missed` tokens before the root, which were committed without drafting:
        the prompt, or the output of plain rounds. Some rows may have missed fewer."""

    @abstractmethod
    def propose(self, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
        """Guess the nodes of `tree`. The engine discards guesses deeper than the row's
        `seqs.budget`."""

    def observe(self, seqs: Sequences, tree: Tree, verdict: Verdict, seen: Forward) -> None:
        """Update the state from the verdict on the last draft, before it is committed.

        seen: the target's logits and tapped hidden states at every node of the draft.
        """


@dataclass(frozen=True)
class Request:
    """What is known about a run before any weights are loaded.

    `argument`: the part of the drafter's name after `METHOD:`, or "". `config` and `vocab`: the
    target's. `source(method, name)`: the folder or hub id of the model or heads called `name`
    (keeping a `+int8` suffix), or, if the name is empty, of the zoo's default for this method and
    target; raises UserError when there is none.
    """

    method: str
    argument: str
    target: str
    config: Any
    vocab: int
    tokenizer: Any
    sampling: Sampling
    tree: Tree
    dtype: str
    seed: int
    source: Callable[[str, str], str]

    def whole(self, default: int, at_least: int = 1) -> int:
        """The argument as an integer. Raises UserError if it is none, or below `at_least`."""
        try:
            value = int(self.argument or default)
        except ValueError:
            value = at_least - 1
        if value < at_least:
            raise UserError(
                f"drafter {self.method}:{self.argument}: give a whole number of {at_least} or "
                f"more, such as {self.method}:{default}"
            )
        return value

    def nothing(self) -> None:
        """Raise UserError if there is an argument."""
        if self.argument:
            raise UserError(
                f"drafter {self.method} takes no argument: use {self.method} without "
                f":{self.argument}"
            )


@dataclass(frozen=True)
class Prepared:
    """A drafter whose options have been checked; `make` builds it for the loaded target.

    `draws`: its guesses are sampled from a law that is passed to the rule (False: they are chosen
    deterministically). `deepest`: the greatest draft length it supports. `config`: the config of
    the draft model that it loads, if any; `slots`: slots of that model's cache per slot of the
    target's.
    """

    make: Callable[[LM], Drafter]
    draws: bool = False
    deepest: int = 1 << 30
    config: Any = None
    slots: int = 1


def described() -> list[tuple[str, str]]:
    """Every method with the first paragraph of its module docstring."""
    found = []
    for method in methods():
        about = importlib.import_module(f"{__name__}.{method}").__doc__ or ""
        found.append((method, " ".join(about.split("\n\n")[0].split())))
    return found


def prepare(plan: Request) -> Prepared:
    """Check a drafter's options without loading weights. Raises UserError."""
    if plan.method not in methods():
        near = difflib.get_close_matches(plan.method, methods(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(
            f"drafter {plan.method!r} is unknown{hint} (use one of {', '.join(methods())}; a draft "
            "model is model:NAME)"
        )
    found: Prepared = importlib.import_module(f"{__name__}.{plan.method}").prepare(plan)
    return found
