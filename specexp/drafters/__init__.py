"""Drafting methods, one file each. A drafter knows nothing about rules; every exact rule keeps the
target's distribution whatever is proposed.

A drafter is named `METHOD` or `METHOD:ARGUMENT`. METHOD is a file in this folder, whose `prepare`
interprets the argument, or an entry point of the group `specexp.drafters`. `module:Class` names a
class of your own, and in Python an object stands for itself; README.md beside this file shows how.
"""

from __future__ import annotations

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from specexp import objects
from specexp.errors import UserError, counted, warn_once
from specexp.fitting import DEFAULTS, UNLIMITED, Limits, whole
from specexp.models.lm import LM, Forward
from specexp.sampling import Rng, Sampling
from specexp.sequences import Draft, Sequences, Verdict
from specexp.tree import Tree


class Drafter(ABC):
    """Proposes draft tokens. To write a drafter, subclass this and define `propose`; the other
    methods are optional. specexp/drafters/README.md has a drafter in eight lines.

    Attributes:
        name: The name in tables; by default the class's, in lower case.
        draws: Draft tokens are sampled from a distribution q, which is passed on in the draft; the
            rule `auto` is then `reject`. False: they are chosen.
        taps: Indices of the target's hidden states that it needs; 0: the embeddings; L: the input
            of the LM head.
        models: The draft models that it runs.
        reads: These models have KV caches of their own, which `catch_up` must fill before they can
            draft.
        context: The longest sequence that it can draft for, in tokens; close to it the engine
            drafts less.
        state: Tensors [B, ...] that it keeps between rounds, besides the caches of its models;
            `seqs.rows` selects the rows of a call.
        on_host: It reads tensor values or decides shapes on the host, so its rounds cannot be
            recorded as graphs.
        shaped_by: Host numbers, besides the tree, that determine which operations it runs.
    """

    name: str
    draws: bool = False
    taps: tuple[int, ...] = ()
    models: tuple[LM, ...] = ()
    reads: bool = False
    context: int = UNLIMITED
    state: tuple[Tensor, ...] = ()
    on_host: bool = False
    shaped_by: tuple[int, ...] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" not in vars(cls):
            cls.name = cls.__name__.lower()

    @classmethod
    def prepare(cls, request: Request) -> Prepared:
        """Check the options of a run and say how to build this drafter, before weights are loaded.

        Override it for a drafter that needs the target, or whose argument needs checks. By default
        the class is called with the values of the argument: `module:Class:2` is `Class(2)`.

        Args:
            request: What is known about the run.

        Returns:
            What builds the drafter, once the target is loaded.

        Raises:
            UserError: The argument or the options do not suit this drafter.
        """
        built = objects.construct("drafter", request.method, cls, request.argument)
        return Prepared(lambda target: built, draws=built.draws)

    def give_way(self) -> None:
        """Be told, before `allocate`, that another draft may be verified in place of its own
        (`lookup`), so that what its own drafts left in caches must be fed again. Does nothing by
        default. Raises UserError if this drafter cannot."""

    def allocate(self, B: int, S: int) -> None:
        """Allocate state for B empty rows of S slots: by default the caches of `models`."""
        for lm in self.models:
            lm.allocate(B, S)

    def prefill(self, seqs: Sequences, hidden: Tensor | None) -> None:
        """Initialise the state of new rows from their prompts.

        hidden [B, P, taps*E]: the target's hidden states over the prompts, without the last token;
        None if there are none. Runs no draft model: `catch_up` does.
        """

    def catch_up(self, seqs: Sequences, missed: int) -> None:
        """Read the last `missed` tokens before the root, which were committed without a draft: the
        prompt, or the output of plain rounds. Some rows may have missed fewer."""

    @abstractmethod
    def propose(self, seqs: Sequences, tree: Tree, rng: Rng) -> Draft:
        """Propose one round's draft.

        Args:
            seqs: The rows: tokens [B, S], of which `length` [B] are committed; `seqs.root` [B, 1]
                is the last of them.
            tree: The shape to fill, N nodes with the root. `tree.nodes(device)` has it as tensors.
            rng: Noise for sampling, addressed by `seqs.keys(depth)` [B, n].

        Returns:
            `seqs.draft(nodes, tokens, q)`: tokens [B, N - 1] int64 for all nodes but the root, -1
            for no draft token; q [B, N, V] if they were sampled. The engine discards draft tokens
            deeper than the row's `seqs.budget`.
        """

    def observe(self, seqs: Sequences, draft: Draft, verdict: Verdict, seen: Forward) -> None:
        """Update the state from the verdict on a draft, before it is committed.

        draft: what `propose` returned, cut to the rows' budgets. seen: the target's logits and
        tapped hidden states at every node of the draft.
        """


@dataclass(frozen=True)
class Request:
    """What is known about a run before any weights are loaded.

    `argument`: the part of the drafter's name after `METHOD:`, or "". `target`: its name; `folder`:
    its folder or hub id, "" for a model in memory. `config` and `vocab`: the target's.
    `source(method, name)`: the folder or hub id of the model or heads called `name` (keeping a
    `+int8` suffix), or, if the name is empty, of the zoo's default for this method and target;
    raises UserError when there is none. `own`: the drafter, class, function or model that is not
    one of this folder's methods; None: `method` is one of them.
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
    folder: str = ""
    own: Any = None

    def integer(self, default: int = 0) -> int:
        """The argument, or `default`, or that of `fitting.DEFAULTS`, if there is none. Raises
        UserError unless it is 1 or more."""
        default = default or DEFAULTS[self.method]
        if value := whole(self.argument or str(default)):
            return value
        raise UserError(
            f"drafter {self.method}:{self.argument}: give a whole number of 1 or more, such as "
            f"{self.method}:{default}"
        )


@dataclass(frozen=True)
class Prepared(Limits):
    """A drafter whose options have been checked, and its limits.

    `make` builds it for the loaded target. `config`: the config of the draft model that it loads,
    if any.
    """

    make: Callable[[LM], Drafter]
    config: Any = None


@contextmanager
def named(drafter: Drafter, rounds: Sized = ()) -> Iterator[None]:
    """Note on an exception, which may be of the drafter's own code or due to what it returned, with
    which drafter it was raised, and after how many `rounds`."""
    try:
        yield
    except Exception as e:
        after = f", after {counted(len(rounds), 'round')}" * bool(rounds)
        e.add_note(f"with drafter {drafter.name}{after}")
        raise


def warn_of_short_context(drafter: Drafter, length: int) -> None:
    """Warn, once, of a drafter whose context is too short for a text of `length` tokens."""
    if 0 < drafter.context <= length:
        warn_once(
            "%s reads at most %d tokens: nothing is drafted in a batch with a text that long; use "
            "shorter prompts, fewer new tokens or another drafter", drafter.name, drafter.context,
        )  # fmt: skip


def prepare(request: Request) -> Prepared:
    """Check a drafter's options without loading weights. Raises UserError."""
    if request.own is not None:
        return _own(request)
    return cast(Prepared, _module(request.method).prepare(request))


def _module(method: str) -> Any:
    return importlib.import_module(f"{__name__}.{method}")


def _own(request: Request) -> Prepared:
    """As `prepare`, for an object in place of a name."""
    own, about = request.own, f"drafter {request.method}"
    if isinstance(own, nn.Module) and not isinstance(own, Drafter):
        return cast(Prepared, _module("model").in_memory(request))
    if isinstance(own, type) and not issubclass(own, Drafter):
        raise UserError(f"{about} is a class, but not a drafter: subclass specexp.Drafter")
    if inspect.isabstract(own):
        raise UserError(f"{about} has no propose(self, seqs, tree, rng): define it")
    if not isinstance(own, Drafter):
        prepare = getattr(own, "prepare", None) or (own if inspect.isroutine(own) else None)
        if prepare is None:
            raise UserError(
                f"drafter is {own!r:.40}: give a name, a specexp.Drafter (an "
                "instance or a class), a function that returns one, or a transformers model"
            )
        own = prepare(request)
    if isinstance(own, Prepared):
        return own
    if not isinstance(own, Drafter):
        raise UserError(
            f"{about} returned something of type {type(own).__name__}: return a specexp.Drafter, "
            "or specexp.drafters.Prepared"
        )
    return Prepared(lambda target: own, draws=own.draws)
