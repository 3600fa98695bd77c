"""What models the zoo holds and where: reads `data/zoo/*/zoo.json`, imports nothing heavy.

Twins made here (`specexp zoo twin`) stand behind the models that ship.

This file does not know how the models were trained, nor how they are loaded.
"""

import difflib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from specexp.errors import UserError

SHELF = Path(__file__).resolve().parents[2] / "data" / "zoo"
ROLES = ("target", "draft", "medusa", "eagle3", "eagle", "control")


@dataclass(frozen=True)
class ZooModel:
    """One folder of the zoo, in Hugging Face format."""

    name: str
    path: Path
    role: str  # "target", "draft", "control", or the kind of heads it is
    target: str | None  # the target that a draft model or heads were taught to follow
    parameters: int
    layers: int
    width: int
    about: str


def made(what: str) -> Path:
    """Where what is trained or made here goes: a folder of the store, `mlruns/` at the repository
    root, which is not in git, or SPECEXP_MLRUNS. Raises UserError where that is relative."""
    store = Path(os.environ.get("SPECEXP_MLRUNS") or SHELF.parents[1] / "mlruns")
    if not store.is_absolute():
        raise UserError(
            f"SPECEXP_MLRUNS is {str(store)!r}, which is another folder for every notebook: give "
            "the whole path"
        )
    return store.resolve() / what


def models(shelf: Path | None = None) -> list[ZooModel]:
    """Every model of a shelf: targets, then drafts, then controls, the largest first. By default
    those that ship and then the twins."""
    if shelf is None:
        return models(SHELF) + models(made("twins"))
    found = []
    for card in shelf.glob("*/zoo.json"):
        facts = json.loads(card.read_text())
        known = {key: facts[key] for key in ZooModel.__annotations__ if key != "path"}
        found.append(ZooModel(path=card.parent, **known))
    return sorted(found, key=lambda model: (ROLES.index(model.role), -model.parameters))


def find(name: str, shelf: Path | None = None) -> Path:
    """The folder of a model of the zoo.

    Raises UserError, naming the models there are, when there is none of that name.
    """
    known = {model.name: model.path for model in models(shelf)}
    if name in known:
        return known[name]
    if not known:
        raise UserError(f"no zoo at {shelf or SHELF}: it comes with a checkout of the repository")
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UserError(f"no zoo model is called {name!r}{hint} (there are {', '.join(known)})")


METHODS = {"model": ("draft",), "medusa": ("medusa",), "eagle": ("eagle3", "eagle")}


def drafts_for(target: str, method: str = "model", shelf: Path | None = None) -> list[ZooModel]:
    """What was taught to follow a target and drafts by a method, the most faithful first."""
    roles = METHODS.get(method, ())
    return [model for model in models(shelf) if model.target == target and model.role in roles]


def default_draft(target: str, method: str = "model", shelf: Path | None = None) -> ZooModel:
    """What a method takes when none is named. Raises UserError when the zoo has nothing."""
    drafts = drafts_for(target, method, shelf)
    if not drafts:
        what = "draft model" if method == "model" else f"{method} heads"
        raise UserError(f"the zoo has no {what} for {target!r}; name one as {method}:NAME")
    return drafts[0]
