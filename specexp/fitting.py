"""Do options fit together: a draft's shape, a drafter's limits, a rule, a vocabulary?

Only names and numbers are compared, so that a plan is checked without importing torch.
"""

import os
import pkgutil
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from specexp import objects
from specexp.errors import UserError, check_type, meant
from specexp.tree import Tree

UNLIMITED = 1 << 30  # of tokens, children ...: stands for a limit where there is none
LEAST = 2.0**-126  # the least temperature; float32 rounds smaller ones to 0
RULES = ("match", "reject", "block", "typical")
DEFAULTS = {"ngram": 3, "recycle": 8, "suffix": 16}  # the numbers of drafters that are given none
LONG_MATCH = 4  # tokens; a lookup drafts where so many occurred before, else what is behind it
BEHIND_LOOKUP = ("model", "eagle", "dflash", "mtp", "medusa", "early_exit")
NUMBERED = {"typical": "epsilon", "lenient": "lenience"}  # rules that take a number


@cache
def shipped() -> list[str]:
    """The names of the drafting methods that ship, a file each."""
    folder = Path(__file__).with_name("drafters")
    return sorted(module.name for module in pkgutil.iter_modules([str(folder)]))


def methods() -> list[str]:
    """The names of all drafting methods: those shipped, then the entry points of other packages."""
    return [*shipped(), *sorted(objects.registered("drafter").keys() - set(shipped()))]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The drafts that a drafter can make.

    `draws`: its draft tokens are sampled from a distribution that is passed to the rule (False:
    they are chosen deterministically). `deepest`: the greatest draft length; `widest`: the most
    children of a node. `slots`: slots of its model's cache per slot of the target's. `taps`: how
    many of the target's hidden states it reads of each token of a prompt.
    """

    draws: bool = False
    deepest: int = UNLIMITED
    widest: int = UNLIMITED
    slots: int = 1
    taps: int = 0


def behind(method: str, argument: str) -> tuple[str, str]:
    """Method and argument of the drafter behind a lookup, whose argument is that drafter's full
    name (`naming.method_of`); of another drafter, its own."""
    name, _, own = argument.partition(":")
    return (name, own) if method == "lookup" else (method, argument)


def whole(text: str) -> int:
    """The whole number of 1 or more that a text is, written in digits alone; else 0."""
    return int(text) if re.fullmatch(r"[1-9][0-9]{0,8}", text) else 0


def fit(
    drafter: str, limits: Limits, tree: Tree, vocab: int, rule: Any, temperature: float
) -> None:
    """Raise UserError if the drafter cannot make this draft, or the rule cannot judge it.

    drafter: its method; vocab: tokens of the target; rule: what has a rule's `name`, `chains_only`
    and `wants_q`, or None for `auto`."""
    reach(drafter, limits, tree)
    widest = max(*tree.degrees, tree.width)
    if widest > vocab:
        raise UserError(
            f"a tree as wide as {widest} is wider than the vocabulary of {vocab} tokens"
        )
    if rule is None:
        return
    if rule.chains_only and not tree.is_chain:
        raise UserError(f"rule {rule.name} works on chains only: use tree chain, or another rule")
    if rule.wants_q and temperature > 0 and not (limits.draws and not tree.width):
        raise UserError(
            f"rule {rule.name} needs draft tokens drawn from a distribution, and {drafter}'s on "
            "this tree are chosen, not drawn: use rule match"
        )


def usual_gamma(limits: Limits, shape: str | Tree) -> int:
    """The default draft length: 5, or the longest that the drafter can make and that a tree of this
    shape can hold."""
    tree = Tree.parse(shape, 1)
    return min(5, limits.deepest, len(tree) - 1 if tree.width else 5)


def reach(drafter: str, limits: Limits, tree: Tree) -> None:
    """Raise UserError for a draft that is deeper or wider than this drafter can make."""
    widest = max(tree.degrees)
    if tree.depth > limits.deepest:
        raise UserError(
            f"drafter {drafter} drafts at most {limits.deepest} tokens ahead and the draft is "
            f"{tree.depth} deep: use gamma {limits.deepest} or less"
        )
    if widest > limits.widest:
        raise UserError(
            f"drafter {drafter} keeps {limits.widest} candidates per token and a node of the tree "
            f"has {widest} children: use {drafter}:{widest}"
        )


def split(name: str) -> tuple[str, str]:
    """A model's name without `+int8`, and `+int8` or "". An existing folder with such a name is
    that folder. Raises UserError for `NAME+` followed by anything else."""
    match = re.fullmatch(r"(.+)\+(\w+)", name)
    if not match or os.path.isdir(name):
        return name, ""
    if match[2] != "int8":
        raise UserError(
            f"{name}: weights can be quantised as {match[1]}+int8, and +{match[2]} is unknown"
        )
    return match[1], "+int8"


def rule(name: str) -> tuple[str, tuple[float, ...]]:
    """The kind of a rule that ships and its number, if it is given one; "" and none for a rule of
    another package. Raises UserError for a name that no rule has."""
    kind, _, argument = name.partition(":")
    if kind in RULES and not argument:
        return kind, ()
    if bounded := NUMBERED.get(kind):
        try:
            number = float(argument)
        except ValueError:
            raise UserError(f"rule {name!r} needs a number, such as {kind}:0.3") from None
        share(bounded, number)
        return kind, (number,)
    if kind in RULES:
        raise UserError(f"rule {kind} takes no argument, and {argument!r} was given")
    if objects.is_there("rule", name):
        return "", ()
    if missing := objects.missing("rule", name):
        raise UserError(missing)
    raise UserError(
        f"rule {name!r} is unknown{meant(kind, [*RULES, *NUMBERED])} (there are "
        f"{', '.join([*RULES, 'typical:EPSILON', 'lenient:LENIENCE'])}; one of your own is "
        "module:Class)"
    )


def share(name: str, value: float) -> None:
    """Raise UserError for a rule's number that is out of range."""
    if not 0 < value <= 1:
        raise UserError(f"{name} is {value:g}; it must lie in (0, 1]")


def check_sampling(
    temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> None:
    """Raise UserError for a setting of `specexp.Sampling` that is out of range."""
    for name, value in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p)):
        check_type(name, value, "float")
    check_type("top_k", top_k, "int")
    if not 0 <= temperature < float("inf"):
        raise UserError(f"temperature is {temperature}; use 0 (greedy) or more")
    if 0 < temperature < LEAST:
        raise UserError(f"temperature is {temperature}; use 0 (greedy) or at least {LEAST:.2g}")
    if top_k < 0:
        raise UserError(f"top_k is {top_k}; use 0 (keep all) or more")
    if not 0 < top_p <= 1:
        raise UserError(f"top_p is {top_p}; it must lie in (0, 1]")
    if not 0 <= min_p <= 1:
        raise UserError(f"min_p is {min_p}; it must lie in [0, 1], and 0 keeps all")
