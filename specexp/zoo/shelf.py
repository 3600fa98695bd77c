"""Lists and finds the zoo's models: those that ship in `data/zoo`, then those made here.

It knows the folders of the checkout (if the package is used from one), the zoo and the store, reads
each model's `zoo.json`, and imports nothing heavy.
"""

import importlib
import json
import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from specexp import fitting
from specexp.errors import UserError, meant

PACKAGE = Path(__file__).resolve().parents[1]
SOURCE = (".py", ".cpp", ".h", ".cu")  # of the package's files, those that are code
CHECKOUT = PACKAGE.parent if (PACKAGE.parent / "pyproject.toml").is_file() else None
"""The repository that this package is used from; None for an installed package."""
GET = (
    "an installed specexp has no models of its own: clone the repository, which contains them in "
    "data/zoo, and set SPECEXP_ZOO to that folder; your own models work without"
)
ROLES = ("target", "draft", "medusa", "eagle3", "eagle", "dspark", "dflash", "dflash2", "control")
MADE = ("zoo/packaged", "zoo/gguf", "zoo/drafts", "twins")  # folders of the store that hold models
METHODS = {
    "model": ("draft",), "medusa": ("medusa",), "eagle": ("eagle3", "eagle"),
    "dflash": ("dspark", "dflash2", "dflash"),
}  # fmt: skip


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

    @property
    def chats(self) -> bool:
        """Whether its tokenizer has a chat template."""
        return (self.path / "chat_template.jinja").is_file()


# --- folders --------------------------------------------------------------------------------------


def shipped() -> Path | None:
    """The folder of the models that ship: SPECEXP_ZOO, or the checkout's `data/zoo`; None if there
    is neither. Raises UserError if SPECEXP_ZOO is not a whole path or holds no model."""
    if not (named := os.environ.get("SPECEXP_ZOO")):
        return CHECKOUT / "data" / "zoo" if CHECKOUT else None
    folder = _whole("SPECEXP_ZOO", Path(named))
    if not any(folder.glob("*/zoo.json")):
        raise UserError(
            f"SPECEXP_ZOO is {named!r}, where no folder has a zoo.json: give the data/zoo of a "
            "clone of the repository"
        )
    return folder


def store() -> Path:
    """The folder of everything made here: SPECEXP_MLRUNS, or `mlruns/` of the checkout, which is
    not in git; for an installed package `specexp/mlruns` in the home folder.

    Raises UserError if SPECEXP_MLRUNS is not a whole path, or a file is in its place."""
    if named := os.environ.get("SPECEXP_MLRUNS"):
        return _whole("SPECEXP_MLRUNS", Path(named))
    return _whole("the store", (CHECKOUT or Path.home() / "specexp") / "mlruns")


@cache
def _whole(variable: str, folder: Path) -> Path:
    folder = Path(os.path.expanduser(folder))
    if not folder.is_absolute():
        raise UserError(
            f"{variable} is {str(folder)!r}, which is a different folder for every notebook: "
            "give the whole path"
        )
    above = next(path for path in (folder, *folder.parents) if path.exists())
    if not above.is_dir():
        raise UserError(f"{variable} is {str(folder)!r}, but {above} is a file: give a folder")
    return folder.resolve()


def making(module: str) -> ModuleType:
    """A module of `data/zoo/making`, which trained the shipped models on a text of its own. Raises
    UserError for an installed package, which does not contain it."""
    if CHECKOUT is None:
        raise UserError(
            "the zoo's recipes and training text are not part of an installed specexp: run this in "
            "a clone of the repository (heads are also trained on a text of yours: --text FILE)"
        )
    zoo = str(CHECKOUT / "data" / "zoo")
    if zoo not in sys.path:
        sys.path.insert(0, zoo)
    return importlib.import_module(f"making.{module}")


# --- models ---------------------------------------------------------------------------------------


def models(shelf: Path | None = None) -> list[ZooModel]:
    """The models of a folder in the order of ROLES, the largest first within each role.

    By default the models that ship, if they are here, then those made here."""
    if shelf is None:
        zoo = shipped()
        others = [model for folder in MADE for model in models(store() / folder)]
        return (models(zoo) if zoo else []) + others
    listed = []
    for card in shelf.glob("[!.]*/zoo.json"):
        facts = json.loads(card.read_text())
        fields = {key: facts[key] for key in ZooModel.__annotations__ if key != "path"}
        listed.append(ZooModel(path=card.parent, **fields))
    return sorted(listed, key=lambda model: (ROLES.index(model.role), -model.parameters))


def find(name: str) -> Path:
    """The folder of the zoo model called `name`. Raises UserError if there is none."""
    paths = {model.name: model.path for model in models()}
    if name in paths:
        return paths[name]
    if shipped() is None:
        raise UserError(f"no zoo model {name!r} here: {GET}")
    raise UserError(
        f"no zoo model is called {name!r}{meant(name, paths)} (there are {', '.join(paths)}; "
        "a hub id is OWNER/NAME)"
    )


def drafts_for(target: str, method: str = "model") -> list[ZooModel]:
    """The models or heads trained to draft for a target by a method, in the order of `models`. A
    target is known by the last part of its name, folder or hub id."""
    roles, named = METHODS.get(method, ()), Path(target).name
    return [model for model in models() if model.target == named and model.role in roles]


def default_draft(target: str, method: str = "model") -> ZooModel:
    """The model or heads that a method uses by default for a target, whose `+int8` counts for
    nothing. Raises UserError if there are none."""
    target, _ = fitting.split(target)
    drafts = drafts_for(target, method)
    if not drafts:
        what, trained = f"{method} heads", f"--heads {METHODS[method][0]}"
        if method == "model":
            what, trained = "draft model", "--draft"
        raise UserError(
            f"the zoo has no {what} for {target!r}; name one as {method}:NAME, train one (specexp "
            f"zoo train {trained} --target {target}), or take a drafter that needs none, such as "
            "ngram"
        )
    return drafts[0]
