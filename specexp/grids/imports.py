"""The files that a point's numbers can depend on: the import closure of its notebook.

Imports are read by `ast`, at any depth, and followed through the rooms that compute numbers and
through modules of one's own, beside the notebook or on Python's path. Figures, grids, tracking,
commands and the zoo are not followed: mending a plot makes no result old. A drafter is imported by
its name when it runs, so its file counts where that name stands: in the parameters, the notebook or
the files that it reaches. Nothing is imported here.
"""

import ast
import importlib.metadata
import importlib.util
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import suppress
from functools import cache, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from specexp.tracking import provenance

PACKAGE = Path(__file__).resolve().parents[1]
NAME = PACKAGE.name
ROOMS = ("models", "fast", "drafters", "serving", "measure")  # beside the files at the top
NAMING = ("serving", "measure")  # rooms whose strings may name a drafter
COMPILED = provenance.SOURCE[1:]
OF_GPU = f"{NAME}/fast/gpu/"
AT_START = ("sitecustomize", "usercustomize")  # run by every Python, if they are on its path
ELSEWHERE = " (elsewhere)"  # marks files that are neither specexp's nor beside the notebook

PACKAGED = {"site-packages", "dist-packages"}
_DRAFTERS = f"{NAME}.drafters."
_OWN = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_]\w*(?::.*)?")  # module:Class:ARGUMENT
_MODULE = re.compile(rf"{NAME}(\.\w+)+")


class Source(NamedTuple):
    """A file's digest, and the names and strings in its code (`read`)."""

    digest: str
    imports: tuple[str, ...] = ()
    strings: frozenset[str] = frozenset()


def closure(
    imports: Iterable[str], strings: Iterable[str], folder: Path, named: Iterable[str]
) -> dict[str, str]:
    """The files that results of a notebook with these imports and strings depend on: name ->
    digest.

    folder: the notebook's; named: the modules that the point's parameters name (`named_by`). File
    names are relative to the checkout for files of specexp, else to the notebook's folder.
    """
    chosen = {name for name in named if name.startswith(_DRAFTERS)}
    roots = _Roots(folder, set(named) - chosen)
    sources = _follow([*imports, *AT_START, *roots.others], roots)
    while PACKAGE / "drafters" / "__init__.py" in sources:
        before = len(sources)
        sources |= _follow(chosen | _drafters(_naming(sources) | set(strings)), roots)
        if len(sources) == before:
            break
    files = {roots.name(path): source.digest for path, source in sources.items()}
    for path in {path.parent for path in sources if path.is_relative_to(PACKAGE)}:
        files |= {
            roots.name(f): source_of(f).digest for f in path.iterdir() if f.suffix in COMPILED
        }
    return dict(sorted(files.items()))


def named_by(params: Mapping[str, Any]) -> frozenset[str]:
    """The modules that a point's parameters name: those of drafters, of `module:Class`, and of
    entry points, by which packages add drafters, rules and policies.

    A drafter's name that is no method is that of a model, which is also what drafts where nothing
    is named.
    """
    texts = [text for value in params.values() for text in texts_in(value)]
    first = {text.partition(":")[0] for text in texts}
    modules = _drafters(word for text in texts for word in re.findall(r"\w+", text))
    modules |= {match[1] for text in texts if (match := _OWN.fullmatch(text))}
    modules |= {point.module for point in _entry_points() if point.name in first}
    drafters = [text for n in ("drafter", "drafters", "rivals") for text in texts_in(params.get(n))]
    if not drafters or any(not _drafters([text]) for text in drafters):
        modules.add(f"{_DRAFTERS}model")
    return frozenset(modules)


def read(code: ast.AST) -> tuple[tuple[str, ...], frozenset[str]]:
    """The modules that code may import, and its strings.

    Modules are dotted names, each with an attribute if one is imported (`specexp.api.load`);
    relative ones begin with dots. Attributes of specexp's packages count as imports
    (`measure.costs.measure`), as packages may import them when they are first used. What stands
    under `if TYPE_CHECKING` never runs.
    """
    names: dict[str, None] = {}
    bound: dict[str, str] = {}  # what names in the code stand for
    strings: set[str] = set()
    nodes = list(_running(code))
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.name] = None
                top = alias.name.partition(".")[0]
                bound[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (f"{node.module}." if node.module else "")
            for alias in node.names:
                names[base + alias.name] = None
                bound[alias.asname or alias.name] = base + alias.name
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            if ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__"):
                names[str(node.args[0].value)] = None
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings.add(node.value)
    for node in nodes:
        first, *rest = _dotted(node)
        if rest and (module := bound.get(first, "")).partition(".")[0] == NAME:
            names[".".join([module, *rest])] = None
    return tuple(names), frozenset(strings)


def _dotted(node: ast.AST) -> list[str]:
    """The parts of `a.b.c`; an empty one for other code."""
    if isinstance(node, ast.Attribute):
        return [*_dotted(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else [""]


def unfolded(name: str) -> list[str]:
    """The modules that an import names; for specexp or an attribute of it, those behind its public
    names, which it imports when one is first used."""
    top, _, rest = name.partition(".")
    if top != NAME or "." in rest or len(list(_files(name, PACKAGE.parent))) > 1:
        return [name]
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    homes = {
        alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(NAME)
        for alias in node.names
    }
    return [homes[rest]] if rest in homes else list(homes.values()) or [name]


def source_of(path: Path) -> Source:
    """What a file holds; read again when its size or time has changed."""
    state = path.stat()
    return _source(path, state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=4096)
def _source(path: Path, size: int, changed_ns: int) -> Source:
    data = path.read_bytes()
    digest = sha256(data).hexdigest()[:16]
    with suppress(SyntaxError, ValueError):
        if path.suffix == ".py":
            return Source(digest, *read(ast.parse(data)))
    return Source(digest)


class _Roots:
    """Where modules are looked up: specexp, the notebook's folder, and where else Python finds
    them, for code of one's own (on PYTHONPATH, or installed as editable) and for `others`: modules
    that are named by parameters."""

    def __init__(self, folder: Path, others: Set[str]) -> None:
        self.folder, self.others = folder, others
        self.tops = {name.partition(".")[0] for name in others}
        self.roots: dict[str, Path] = {}

    def root(self, top: str) -> Path:
        """The folder from which a module is imported; the notebook's if it does not count."""
        if top not in self.roots:
            self.roots[top] = self.folder
            if top not in sys.stdlib_module_names and not list(_files(top, self.folder)):
                with suppress(ImportError, ValueError):
                    spec = importlib.util.find_spec(top)
                    file = Path(spec.origin) if spec and spec.origin else None
                    if spec and file and (top in self.tops or not PACKAGED & {*file.parts}):
                        self.roots[top] = file.parents[bool(spec.parent)]
        return self.roots[top]

    def files(self, name: str) -> Iterator[Path]:
        """The files that importing a module runs and that count: its own and its packages'."""
        top = name.partition(".")[0]
        if top != NAME:
            yield from _files(name, self.root(top))
            return
        for path in _files(name, PACKAGE.parent):
            if path.parent == PACKAGE or path.relative_to(PACKAGE).parts[0] in ROOMS:
                yield path

    def home(self, path: Path) -> Path:
        """The folder from which this file is imported."""
        if path.is_relative_to(PACKAGE):
            return PACKAGE.parent
        folders = (f for f in (self.folder, *self.roots.values()) if path.is_relative_to(f))
        return max(folders, key=lambda folder: len(folder.parts))

    def name(self, path: Path) -> str:
        home = self.home(path)
        mark = "" if home in (PACKAGE.parent, self.folder) else ELSEWHERE
        return path.relative_to(home).as_posix() + mark


def _follow(names: Iterable[str], roots: _Roots) -> dict[Path, Source]:
    """Every file that importing these modules may import."""
    sources: dict[Path, Source] = {}
    todo, seen = list(names), set[str]()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        todo += unfolded(name)
        for path in roots.files(name):
            if path not in sources:
                sources[path] = source = source_of(path)
                if path == PACKAGE / "__init__.py":
                    continue  # it imports nothing before a public name is used (`unfolded`)
                package = path.parent.relative_to(roots.home(path)).parts
                modules = [_absolute(name, package) for name in source.imports]
                modules += filter(_MODULE.fullmatch, source.strings)
                if path.is_relative_to(PACKAGE / "fast"):  # kernels name all that they speed up
                    modules = [name for name in modules if not name.startswith(_DRAFTERS)]
                todo += modules
    return sources


def _files(name: str, folder: Path) -> Iterator[Path]:
    """The files that importing a module from a folder runs; none of a module that is not there."""
    for part in name.split("."):
        folder /= part
        if (path := folder / "__init__.py").is_file() or (path := Path(f"{folder}.py")).is_file():
            yield path
        elif not folder.is_dir():
            return


def _absolute(name: str, package: tuple[str, ...]) -> str:
    """A name as imported by a module of this package, without its leading dots."""
    bare = name.lstrip(".")
    level = len(name) - len(bare)
    return ".".join([*package[: len(package) + 1 - level], bare]) if level else name


def _running(code: ast.AST) -> Iterator[ast.AST]:
    todo = deque([code])
    while todo:
        yield (node := todo.popleft())
        unused = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        todo += node.orelse if isinstance(node, ast.If) and unused else ast.iter_child_nodes(node)


def _drafters(texts: Iterable[str]) -> set[str]:
    """The modules of the drafters that these texts name, as METHOD or METHOD:ARGUMENT."""
    methods = {path.stem for path in (PACKAGE / "drafters").glob("[a-z]*.py")}
    named = methods & {text.partition(":")[0] for text in texts}
    return {f"{_DRAFTERS}{name}" for name in named}


def _naming(sources: Mapping[Path, Source]) -> set[str]:
    """The strings of the files that may name a drafter: beside the notebook, and harnesses."""
    homes = [PACKAGE / room for room in NAMING]
    return {
        string
        for path, source in sources.items()
        if not path.is_relative_to(PACKAGE) or any(map(path.is_relative_to, homes))
        for string in source.strings
    }


@cache
def _entry_points() -> list[importlib.metadata.EntryPoint]:
    points = importlib.metadata.entry_points()
    groups = (points.select(group=f"{NAME}.{what}") for what in ("drafters", "rules", "policies"))
    return [point for group in groups for point in group]


def texts_in(value: Any) -> list[str]:
    """The texts that a parameter's value is or holds."""
    return [x for x in (value if isinstance(value, list) else [value]) if isinstance(x, str)]
