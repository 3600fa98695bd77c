"""From a name to an object: drafters, rules and policies that do not ship with specexp.

A text is `NAME` or `NAME:ARGUMENT`, where a package registered NAME as an entry point in the group
`specexp.drafters`, `specexp.rules` or `specexp.policies`; or `module:Object` or
`module:Object:ARGUMENT`, where the module is installed or stands in the working folder, which in a
grid is the notebook's. This file knows nothing about drafters, rules and policies.
"""

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from specexp.errors import UserError, first_line

if sys.version_info >= (3, 14):  # where annotations may name what only a type checker imports
    from annotationlib import Format

    signature = partial(inspect.signature, annotation_format=Format.STRING)
else:
    signature = inspect.signature

GROUPS = {"drafter": "drafters", "rule": "rules", "policy": "policies"}
_WRITTEN = re.compile(r"([A-Za-z_]\w*(?:\.\w+)*):([A-Za-z_]\w*)(?::(.*))?")


@cache
def registered(kind: str) -> dict[str, EntryPoint]:
    """The entry points of a kind ("drafter", "rule" or "policy") by name."""
    return {entry.name: entry for entry in entry_points(group=f"specexp.{GROUPS[kind]}")}


def described(kind: str, folder: Path | None = None) -> list[tuple[str, str]]:
    """What the modules of a folder, if given, and the entry points of a kind do, by name: the first
    paragraph of each docstring, and of a module that of its `prepare`, which says what an argument
    means. A module is read and not imported, which would take seconds."""
    texts = dict[str, list[str | None]]()
    for file in sorted(folder.glob("[!_]*.py")) if folder else ():
        module = ast.parse(file.read_text())
        defined = (node for node in module.body if isinstance(node, ast.FunctionDef))
        prepares = [ast.get_docstring(node) for node in defined if node.name == "prepare"]
        texts[file.stem] = [ast.get_docstring(module), *prepares]
    for name, entry in sorted(registered(kind).items()):
        texts.setdefault(name, [entry.load().__doc__])
    return [
        (name, " ".join(" ".join((text or "").split("\n\n")[0] for text in each).split()))
        for name, each in texts.items()
    ]


def find(kind: str, text: str) -> tuple[Any, str] | None:
    """The object that a text names and its argument, or "". None if the text names no entry point
    and no module that can be imported. Raises UserError if importing it fails."""
    name, _, argument = text.partition(":")
    if entry := registered(kind).get(name):
        return _attempt(kind, text, entry.load), argument
    if not (parts := _WRITTEN.fullmatch(text)):
        return None
    module, name, argument = parts[1], parts[2], parts[3] or ""
    with _here(module):
        if not _exists(module):
            return None
        loaded = _attempt(kind, text, lambda: importlib.import_module(module))
    if not hasattr(loaded, name):
        raise UserError(f"{kind} {text}: module {module} has no {name}")
    return getattr(loaded, name), argument


def is_there(kind: str, text: str) -> bool:
    """Whether a text names an entry point or a module, which is not imported."""
    with _here(module := module_of(text)):
        return text.partition(":")[0] in registered(kind) or bool(module and _exists(module))


def resolve(kind: str, text: str) -> Any | None:
    """The rule or policy that a text names: what its class or function returns when it is called
    with the argument, or the object itself. None and errors as for `find`."""
    if (own := find(kind, text)) is None:
        return None
    thing, argument = own
    if isinstance(thing, type) or inspect.isroutine(thing):
        return construct(kind, text, thing, argument)
    return thing


def construct(kind: str, text: str, factory: Callable[..., Any], argument: str = "") -> Any:
    """factory(*values), the values being those of an argument such as `2` or `0.5,3`. Raises
    UserError if the factory takes other ones."""
    if getattr(factory, "_is_protocol", False):
        raise UserError(f"{kind} {text} defines nothing itself: subclass it, or give a name")
    values = _values(argument)
    try:
        signature(factory).bind(*values)
    except (TypeError, ValueError) as e:
        raise UserError(
            f"{kind} {text}: {factory.__name__}{values} cannot be called: {e}; give its arguments "
            "after a colon, separated by commas, or pass an instance"
        ) from e
    return factory(*values)


def check_takes(about: str, method: Any, arguments: str) -> None:
    """Raise UserError unless a method can be called with these arguments, such as `seqs, tree`."""
    try:
        signature(method).bind(*arguments.split(", "))
    except TypeError:
        raise UserError(f"{about} must take ({arguments})") from None
    except ValueError:
        pass  # a builtin that does not tell its signature


def lazily(package: str, path: Iterable[str]) -> tuple[list[str], Callable[[str], ModuleType]]:
    """`__all__` and `__getattr__` of a package whose files are each loaded when first named."""
    names = [module.name for module in pkgutil.iter_modules(path)]

    def load(name: str) -> ModuleType:
        if name in names:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return names, load


def module_of(text: str) -> str:
    """The module of a text that is written `module:Object`, importable or not; else ""."""
    parts = _WRITTEN.fullmatch(text)
    return parts[1] if parts else ""


def missing(kind: str, text: str) -> str:
    """What is wrong with a text that is written `module:Object` and whose module is not there; ""
    for any other text."""
    if not (module := module_of(text)) or is_there(kind, text):
        return ""
    where = f"neither installed nor in the folder {Path.cwd()}"
    return f"{kind} {text}: there is no module {module}, {where}"


def is_shipped(thing: Any) -> bool:
    """Whether an object's class is one of this package."""
    return type(thing).__module__.partition(".")[0] == "specexp"


def _values(argument: str) -> tuple[Any, ...]:
    if not argument:
        return ()
    try:
        return tuple(ast.literal_eval(f"({argument},)"))
    except (ValueError, SyntaxError):
        return (argument,)


def _attempt(kind: str, text: str, importing: Callable[[], Any]) -> Any:
    try:
        return importing()
    except Exception as e:  # somebody else's module may raise anything
        raise UserError(f"{kind} {text} cannot be imported: {first_line(e)}") from e


@contextmanager
def _here(module: str) -> Iterator[None]:
    """The working folder, meanwhile: first for this module, as in a notebook, but last for what it
    imports, so that a `random.py` there does not stand in for Python's."""
    here, top = str(Path.cwd()), module.partition(".")[0]

    def first(name: str, *_: Any) -> ModuleSpec | None:
        mine = name == top and name not in sys.stdlib_module_names
        spec = PathFinder.find_spec(name, [here]) if mine else None
        return spec if spec and spec.loader else None  # a folder alone may be anything

    finder: Any = SimpleNamespace(find_spec=first)
    paths = [here] if here not in sys.path else []
    sys.meta_path.insert(0, finder)
    sys.path += paths
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for path in paths:
            sys.path.remove(path)


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
