"""Ways to guess. One file each; a drafter knows nothing of rules, and any rule keeps it exact.

A drafter is named `METHOD` or `METHOD:ARGUMENT`: METHOD is a file of this folder, and `prepare` in
that file says what the argument means. So a new file is a new method, known everywhere at once.
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
from specexp.lm import LM, Forward
from specexp.sampling import Rng, Sampling
from specexp.sequences import Draft, Sequences, Verdict
from specexp.tree import Tree


def methods() -> list[str]:
    """The names of the files in this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


class Drafter(ABC):
    """What the engine asks of a drafter. All but `propose` may be left as it is here.

    `taps`: hidden states of the target it wants to see. `models`: the models it runs. `reads`: they
    read a text, in caches of their own, before they can go on with it (`catch_up`). `context`: the
    longest text it can draft for; past it the engine drafts less. `state`: what it keeps for
    every row [B, ...] between rounds, besides the caches of its models; `seqs.rows` says which of
    them a call is about. `on_host`: it reads values or decides shapes on the host, so that no round
    of it can be recorded as a graph. `shaped_by`: numbers on the host, besides the tree, that shape
    what it runs. `grades`: how many it tells apart by how sure it is (`Draft.grade`); 1: it does
    not say.
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
        """Room for B rows of S slots, all empty."""

    def prefill(self, seqs: Sequences, hidden: Tensor | None) -> None:
        """These rows begin; hidden [B, P, taps*E] are the target's states over the prompts. Runs
        no draft model: `catch_up` does."""

    def catch_up(self, seqs: Sequences, missed: int) -> None:
        """The last `missed` tokens before the root, or fewer, were written without guesses."""

    @abstractmethod
    def propose(self, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
        """Guess the nodes of `tree`; of guesses deeper than their row's `seqs.budget` nothing is
        kept."""

    def observe(self, seqs: Sequences, tree: Tree, verdict: Verdict, seen: Forward) -> None:
        """The verdict on the last draft, before it is committed."""


@dataclass(frozen=True)
class Plan:
    """What is known of an experiment before a weight is loaded.

    `argument`: what follows `METHOD:` in the drafter's name, "" if nothing. `config`: the target's.
    `source(method, name)`: the folder or hub id of the model or heads of that name, `+int8` behind
    it if so named, or, without a name, of the zoo's own for this method and target; raises
    UserError when there is none.
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
        """The argument as a whole number."""
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
        """Refuse an argument."""
        if self.argument:
            raise UserError(
                f"drafter {self.method} takes no argument, and {self.argument!r} was given"
            )


@dataclass(frozen=True)
class Ready:
    """`make` gives the drafter for the loaded target. `draws`: its guesses are drawn from a law
    that the rule is shown (else they are chosen). `deepest`: the longest draft it can make.
    `config`: of the model that it loads, if it does; `slots`: of that model's cache for each of the
    target's."""

    make: Callable[[LM], Drafter]
    draws: bool = False
    deepest: int = 1 << 30
    config: Any = None
    slots: int = 1


def described() -> list[tuple[str, str]]:
    """Every method, and the first sentence of its file."""
    found = []
    for method in methods():
        about = importlib.import_module(f"{__name__}.{method}").__doc__ or ""
        found.append((method, " ".join(about.split("\n\n")[0].split())))
    return found


def prepare(plan: Plan) -> Ready:
    """Check everything about a drafter without loading a weight; raises UserError, one line."""
    if plan.method not in methods():
        near = difflib.get_close_matches(plan.method, methods(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(
            f"drafter {plan.method!r} is unknown{hint} (there are {', '.join(methods())}; and a "
            "draft model is model:NAME)"
        )
    found: Ready = importlib.import_module(f"{__name__}.{plan.method}").prepare(plan)
    return found
