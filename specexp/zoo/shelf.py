"""What models the zoo holds and where: reads `data/zoo/*/zoo.json`, imports nothing heavy.

This file does not know how the models were trained, nor how they are loaded.
"""

import difflib
import json
from dataclasses import dataclass
from pathlib import Path

from specexp.errors import UserError

SHELF = Path(__file__).resolve().parents[2] / "data" / "zoo"
ROLES = ("target", "draft", "control")


@dataclass(frozen=True)
class ZooModel:
    """One folder of the zoo, in Hugging Face format."""

    name: str
    path: Path
    role: str  # "target", "draft" or "control"
    target: str | None  # the target that a draft model was taught to follow
    parameters: int
    layers: int
    width: int
    about: str


def models(shelf: Path = SHELF) -> list[ZooModel]:
    """Every model of the zoo: targets, then drafts, then controls, the largest first."""
    found = []
    for card in shelf.glob("*/zoo.json"):
        facts = json.loads(card.read_text())
        known = {key: facts[key] for key in ZooModel.__annotations__ if key != "path"}
        found.append(ZooModel(path=card.parent, **known))
    return sorted(found, key=lambda model: (ROLES.index(model.role), -model.parameters))


def find(name: str, shelf: Path = SHELF) -> Path:
    """The folder of a model of the zoo.

    Raises UserError, naming the models there are, when there is none of that name.
    """
    known = {model.name: model.path for model in models(shelf)}
    if name in known:
        return known[name]
    if not known:
        raise UserError(f"no zoo at {shelf}: it comes with a checkout of the repository")
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UserError(f"no zoo model is called {name!r}{hint} (there are {', '.join(known)})")


def drafts_for(target: str, shelf: Path = SHELF) -> list[ZooModel]:
    """The draft models taught to follow a target, the most faithful (largest) first."""
    return [model for model in models(shelf) if model.target == target]


def default_draft(target: str, shelf: Path = SHELF) -> ZooModel:
    """The draft model to take when none is named. Raises UserError when the zoo has none."""
    drafts = drafts_for(target, shelf)
    if not drafts:
        raise UserError(f"the zoo has no draft model for {target!r}; name one")
    return drafts[0]
