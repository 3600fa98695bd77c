"""Lists and finds the zoo's models: those that ship in `data/zoo`, then twins made here.

It reads each model's `zoo.json` and imports nothing heavy. It does not know how models are trained
or loaded.
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
    role: str  # one of ROLES
    target: str | None  # the target that a draft model or heads were trained for
    parameters: int
    layers: int
    width: int
    about: str


def made(what: str) -> Path:
    """The folder `what` of the store, for models made here.

    The store is SPECEXP_MLRUNS or, by default, `mlruns/` at the repository root, which is not in
    git. Raises UserError if SPECEXP_MLRUNS is a relative path.
    """
    store = Path(os.environ.get("SPECEXP_MLRUNS") or SHELF.parents[1] / "mlruns")
    if not store.is_absolute():
        raise UserError(
            f"SPECEXP_MLRUNS is {str(store)!r}, which is a different folder for every notebook: "
            "give the whole path"
        )
    return store.resolve() / what


def models(shelf: Path | None = None) -> list[ZooModel]:
    """The models of a folder in the order of ROLES, the largest first within each role.

    By default the models that ship, then the twins.
    """
    if shelf is None:
        return models(SHELF) + models(made("twins"))
    found = []
    for card in shelf.glob("*/zoo.json"):
        facts = json.loads(card.read_text())
        known = {key: facts[key] for key in ZooModel.__annotations__ if key != "path"}
        found.append(ZooModel(path=card.parent, **known))
    return sorted(found, key=lambda model: (ROLES.index(model.role), -model.parameters))


def find(name: str, shelf: Path | None = None) -> Path:
    """The folder of the zoo model called `name`. Raises UserError if there is none."""
    known = {model.name: model.path for model in models(shelf)}
    if name in known:
        return known[name]
    if not known:
        raise UserError(
            f"no zoo at {shelf or SHELF}: use a checkout of the repository, which contains it"
        )
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UserError(f"no zoo model is called {name!r}{hint} (there are {', '.join(known)})")


METHODS = {"model": ("draft",), "medusa": ("medusa",), "eagle": ("eagle3", "eagle")}


def drafts_for(target: str, method: str = "model", shelf: Path | None = None) -> list[ZooModel]:
    """The models or heads trained to draft for a target by a method, in the order of `models`."""
    roles = METHODS.get(method, ())
    return [model for model in models(shelf) if model.target == target and model.role in roles]


def default_draft(target: str, method: str = "model", shelf: Path | None = None) -> ZooModel:
    """The model or heads that a method uses by default. Raises UserError if there are none."""
    drafts = drafts_for(target, method, shelf)
    if not drafts:
        what = "draft model" if method == "model" else f"{method} heads"
        raise UserError(f"the zoo has no {what} for {target!r}; name one as {method}:NAME")
    return drafts[0]
