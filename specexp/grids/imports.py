"""The files that a point's numbers can depend on: the import closure of its notebook.

1. `read` takes from a file's code, by `ast`, what it may import, at any depth, and its strings.
2. `_follow` goes from modules to their files and on to what these import: through the rooms that
   compute numbers and through code of one's own. Figures, grids, tracking, commands and the zoo are
   left out: mending a plot makes no result old. Nothing is imported here.
3. A drafter is imported by its name when it runs, so `closure` adds the files of the drafters that
   are named: in the parameters, the notebook, or the files found so far.

So does a file that a string in the notebook or in code of one's own names, relative to either, or a
word of a magic (`%run`, `!`), unless that code writes it, or it is in the store; and so does a
module beside the notebook whose name is a word in such a string, however it is imported (`exec`,
`%time import`). Python and notebooks are followed; of a model's folder this is only the name.
"""

import ast
import importlib.util
import json
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from specexp import objects
from specexp.tracking import results
from specexp.zoo.files import stamp
from specexp.zoo.known import digest_of
from specexp.zoo.shelf import PACKAGE, SOURCE

NAME = PACKAGE.name
ROOMS = ("models", "fast", "drafters", "serving", "measure")  # beside the files at the top
NAMING = ("serving", "measure")  # rooms whose strings may name a drafter
DRAFTERS = ("drafter", "rivals")  # parameters that name some
COMPILED = SOURCE[1:]
OF_GPU = f"{NAME}/fast/gpu/"
AT_START = ("sitecustomize", "usercustomize")  # run by every Python, if they are on its path
ELSEWHERE = " (elsewhere)"  # marks files that are neither specexp's nor beside the notebook
MODEL = "a model"  # in place of the digest of a folder that is one
MOST, LONGEST = 500, 1_000  # files that one source names; characters of a name
HUGE = 10_000_000_000  # bytes above which a file that code names stands for its size and time
SYSTEM = ("/proc", "/sys", "/dev")
_INSTALLED = {"site-packages", "dist-packages"}
_LIBRARY = Path(os.__file__).parent  # Debian's Python has a `sitecustomize` there
_DRAFTERS = f"{NAME}.drafters."
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*")
_MODULE = re.compile(rf"{NAME}(\.\w+)+")
_PLACE = re.compile(r"^(?:lookup:)?(?:\w+:)?(.*?)(?:\+int8)?$")  # METHOD:FOLDER+int8
_WRITING = re.compile(r"to_\w+|(save|dump|write|export)\w*|touch|FileHandler")
_READING = re.compile(r"open|exec|(read|load)\w*|\w*(read|load)|from_\w+|genfromtxt")
_TO_WRITE = re.compile(r"[rbt]*[wax][bt+]*")  # a mode of `open`
_MAGIC = re.compile(r"^([ \t]*)((?:[\w, ]+=[ \t]*)?[%!?].*|.*\?)$", re.MULTILINE)
_LOADS = re.compile(r"%(?:run(?:\s+-\w+)*|(?:re)?load_ext)\s+((?!\d)\w+(?:\.[A-Za-z_]\w*)*)(?!\S)")
_NEVER = re.compile(r"(\w+\.)*TYPE_CHECKING")  # true
_WRITTEN = re.compile(r">+\s*\S+|%%(?:write)?file.*")  # by a shell, by a magic


class Source(NamedTuple):
    """What code holds: the modules that it may import, its strings, and those of them that may name
    what it reads (`read`); and the digest of the file."""

    modules: tuple[str, ...] = ()
    strings: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    digest: str = ""


def closure(code: Source, folder: Path, named: Iterable[str]) -> dict[str, str]:
    """The files that a point's numbers can depend on: name -> digest, and the folders of models
    that code names -> MODEL. Names are relative to the checkout for files of specexp, else to the
    notebook or the folder from which the file is imported.

    code, folder: the notebook's; named: the modules that the point's parameters name (`named_by`).
    """
    drafters = {module for module in named if module.startswith(_DRAFTERS)}
    finder = _Finder(folder, {*named} - drafters)
    quoted = finder.beside(code.strings)
    sources = _follow([*code.modules, *AT_START, *finder.named, *quoted], finder, code.paths)
    if PACKAGE / "drafters" / "__init__.py" in sources:  # else nothing here drafts
        drafters |= _drafters({*code.strings, *_strings_that_may_name_drafters(sources)})
        sources |= _follow(drafters, finder)
    folders = {path.parent for path in sources if path.is_relative_to(PACKAGE)}
    beside = (path for folder in folders for path in folder.iterdir())
    sources |= {path: source_of(path) for path in beside if path.suffix in COMPILED}
    return dict(sorted((finder.name(path), source.digest) for path, source in sources.items()))


def named_by(params: Mapping[str, Any]) -> tuple[str, ...]:
    """The modules that a point's parameters name, sorted: those of drafters, of `module:Class`, and
    of entry points, by which packages add drafters, rules and policies.

    A drafter's name that is no method is that of a model, which is also what drafts where nothing
    is named.
    """
    texts = [text for value in params.values() for text in texts_in(value)]
    first = {text.partition(":")[0] for text in texts}
    modules = _drafters(word for text in texts for word in re.findall(r"\w+", text))
    modules |= {*filter(None, map(objects.module_of, texts))}
    for kind in objects.GROUPS:
        there = objects.registered(kind)
        modules |= {there[name].module for name in first & there.keys()}
    drafters = [text for n in DRAFTERS for text in texts_in(params.get(n))]
    if not drafters or any(not _drafters([text]) for text in drafters):
        modules.add(f"{_DRAFTERS}model")
    return tuple(sorted(modules))


def texts_in(value: Any) -> list[str]:
    """The texts that a parameter's value is or holds."""
    return [x for x in (value if isinstance(value, list) else [value]) if isinstance(x, str)]


# --- 1. what a file's code names -----------------------------------------------------------------


def source_of(path: Path) -> Source:
    """What a file holds; read again when it is another file, or its size or times differ."""
    return _source(path, *stamp(path))


@lru_cache(maxsize=4096)
def _source(path: Path, *_stamp: int) -> Source:
    if path.is_dir():
        return Source(digest=MODEL)
    try:
        if path.stat().st_size > HUGE:
            return Source(digest=f"{_stamp[1]} bytes of {_stamp[2]}")
        digest = digest_of(path)[:16]
        data = path.read_bytes() if path.suffix in (".py", ".ipynb") else b""
    except OSError as e:
        return Source(digest=f"cannot be read: {e.strerror}")
    with suppress(SyntaxError, ValueError, KeyError, TypeError, RecursionError):
        if path.suffix == ".py":
            return read(ast.parse(data), digest)
        if path.suffix == ".ipynb":  # running it changes its outputs
            cells = json.loads(data)["cells"]
            code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
            return read(code_of(code)[0], sha256(repr(code).encode()).hexdigest()[:16])
    return Source(digest=digest)


def parse(source: str) -> ast.Module:
    """Raises SyntaxError for anything that is not Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(source)
        except (ValueError, RecursionError, MemoryError) as e:
            raise SyntaxError(f"is not Python: {e}", (None, 1, None, None)) from e


def code_of(sources: Iterable[str]) -> tuple[ast.Module, str]:
    """Cells as one module, without their magics, but for what these run and the words in them; of a
    cell that is not Python, the lines that are, and its words. And the rest: magics, and the cells
    that are not Python."""
    body, lines = list[ast.stmt](), list[str]()
    for source in sources:
        plain = _MAGIC.sub(_as_import, source)
        lines += [line for _, line in _MAGIC.findall(source)]
        try:
            body += parse(plain).body
        except SyntaxError:
            lines.append(source)
            for line in plain.splitlines():
                with suppress(SyntaxError):
                    body += parse(line.strip()).body
    rest = "\n".join(lines)
    words = re.findall(r"[^\s\"'`;|&<>()]+", _WRITTEN.sub(" ", rest))
    return ast.Module([*body, *(ast.Expr(ast.Constant(word)) for word in words)], []), rest


def _as_import(magic: re.Match[str]) -> str:
    loads = _LOADS.match(magic[2])
    return magic[1] + (f"import {loads[1]}" if loads else "pass")


def read(code: ast.AST, digest: str = "") -> Source:
    """What the code of a file of this digest holds, strings sorted.

    Modules are dotted names, each with an attribute if one is imported (`specexp.api.load`);
    relative ones begin with dots. Attributes of specexp's packages count as modules
    (`measure.costs.measure`), as packages may import them when they are first used. What stands
    under `if TYPE_CHECKING` never runs.
    """
    modules: dict[str, None] = {}
    meaning: dict[str, str] = {}  # of names that imports bind: `t` -> `specexp.theory`
    strings: set[str] = set()
    nodes = _running(code)
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                modules[alias.name] = None
                top = alias.name.partition(".")[0]
                meaning[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (f"{node.module}." if node.module else "")
            for alias in node.names:
                modules[base + alias.name] = None
                meaning[alias.asname or alias.name] = base + alias.name
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
            for value in (*node.args[:1], *(k.value for k in node.keywords if k.arg == "name")):
                if isinstance(value, ast.Constant):
                    modules[str(value.value)] = None
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings.add(node.value)
    for node in nodes:
        first, *rest = _dotted(node)
        if rest and (module := meaning.get(first, "")).partition(".")[0] == NAME:
            modules[".".join([module, *rest])] = None
    paths = {s for s in strings - _written(nodes) if len(s) < LONGEST and "\n" not in s}
    return Source(tuple(modules), tuple(sorted(strings)), tuple(sorted(paths)), digest)


def _called(node: ast.AST) -> str:
    """The last name of the function that a call calls."""
    function = getattr(node, "func", None)
    return str(getattr(function, "attr", getattr(function, "id", "")))


def _written(nodes: Iterable[ast.AST]) -> set[str]:
    """The strings that name what code writes, directly or as a variable, and has not read before:
    results, not causes. nodes: in the order in which they run."""
    values, calls, written = dict[str, list[ast.AST]](), list[ast.Call](), dict[str, bool]()
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            values.setdefault(node.targets[0].id, []).append(node.value)
        elif isinstance(node, ast.Call):
            calls.append(node)
    for call in calls:
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        modes = (str(arg.value) for arg in given if isinstance(arg, ast.Constant))
        opened = _called(call) == "open" and any(map(_TO_WRITE.fullmatch, modes))
        writes = opened or bool(_WRITING.fullmatch(_called(call)))
        if writes or _READING.fullmatch(_called(call)):
            for text in _texts([*given, *ast.iter_child_nodes(call.func)], values):
                written.setdefault(text, writes)
    return {text for text, writes in written.items() if writes}


def _texts(todo: list[ast.AST], values: Mapping[str, list[ast.AST]]) -> Iterator[str]:
    """The strings in these nodes, of which names have these values."""
    seen = set[str]()
    for node in todo:  # which grows
        if isinstance(node, ast.Constant):
            yield str(node.value)
        elif isinstance(node, ast.Name) and node.id not in seen:
            seen.add(node.id)
            todo += values.get(node.id, [])
        elif isinstance(node, ast.BinOp) or _called(node) == "Path":
            todo += ast.iter_child_nodes(node)


def _running(code: ast.AST) -> list[ast.AST]:
    """All nodes below in the order in which they run, but those under `if TYPE_CHECKING`."""
    todo, backwards = [code], list[ast.AST]()
    while todo:
        backwards.append(node := todo.pop())
        unused = isinstance(node, ast.If) and _NEVER.fullmatch(ast.unparse(node.test))
        todo += node.orelse if isinstance(node, ast.If) and unused else ast.iter_child_nodes(node)
    return backwards[::-1]


def _dotted(node: ast.AST) -> list[str]:
    """The parts of `a.b.c`; an empty one for other code."""
    if isinstance(node, ast.Attribute):
        return [*_dotted(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else [""]


# --- 2. from modules to files --------------------------------------------------------------------


def _follow(
    modules: Iterable[str], finder: "_Finder", paths: Iterable[str] = ()
) -> dict[Path, Source]:
    """Every file that importing these modules may run, and what the notebook and these name."""
    sources: dict[Path, Source] = {}
    todo, seen, files = list(modules), set[str](), [*finder.named_in(paths, finder.folder)]
    while todo or files:
        if not files and (module := todo.pop()) not in seen:
            seen.add(module)
            todo += behind_public_names(module)
            files += finder.files(module)
        if files and (path := files.pop()) not in sources:
            sources[path] = source = source_of(path)
            todo += _imported_by(path, source, finder)
            if not path.is_relative_to(PACKAGE):
                todo += finder.beside(source.strings)
                files += finder.named_in(source.paths, path.parent)
    return sources


def places(texts: Iterable[str], *folders: Path) -> Iterator[Path]:
    """Where what these texts name would be, from these folders."""
    outside = (os.path.abspath(results.root()), *SYSTEM)
    for text in sorted(texts):
        for bare in filter(None, dict.fromkeys((text, _PLACE.sub(r"\1", text)))):
            for folder in dict.fromkeys(folders):
                path = Path(os.path.normpath(os.path.join(folder, bare)))
                if not any(map(path.is_relative_to, outside)):
                    yield path


def _imported_by(path: Path, source: Source, finder: "_Finder") -> list[str]:
    """The modules that a file may import; specexp names some of its own in strings."""
    if path == PACKAGE / "__init__.py":
        return []  # it imports when a public name is used (`behind_public_names`)
    package = path.parent.relative_to(finder.root_of(path)).parts
    modules = [_absolute(name, package) for name in source.modules]
    modules += filter(_MODULE.fullmatch, source.strings)
    if path.is_relative_to(PACKAGE / "fast"):  # kernels name all that they speed up
        return [module for module in modules if not module.startswith(_DRAFTERS)]
    return modules


def _absolute(name: str, package: tuple[str, ...]) -> str:
    """A name as imported by a module of this package, without its leading dots."""
    bare = name.lstrip(".")
    level = len(name) - len(bare)
    return ".".join([*package[: len(package) + 1 - level], bare]) if level else name


def behind_public_names(module: str) -> list[str]:
    """For specexp, the modules behind its public names, which it imports when one is first used;
    for an attribute of it, the module behind that one; any other module itself."""
    top, _, rest = module.partition(".")
    if top != NAME or "." in rest or len(list(_files(module, PACKAGE.parent))) > 1:
        return [module]
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    homes = {
        alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(NAME)
        for alias in node.names
    }
    return [homes[rest]] if rest in homes else list(homes.values()) or [module]


class _Finder:
    """Finds the files of modules that count: of specexp, beside the notebook, and of code of one's
    own on PYTHONPATH or installed as editable; of other packages if parameters name them (`named`).
    """

    def __init__(self, folder: Path, named: Set[str]) -> None:
        self.folder, self.named = folder, named
        self.paths: list[Path] = []  # folders that code names, or of scripts that it names
        self._roots: dict[str, Path] = {}  # the folder from which a top-level module is imported

    def files(self, module: str) -> Iterator[Path]:
        """The files that importing a module runs and that count: its own and its packages'."""
        top = module.partition(".")[0]
        if top != NAME:
            yield from _files(module, self._root(top))
            return
        for path in _files(module, PACKAGE.parent):
            if path.parent == PACKAGE or path.relative_to(PACKAGE).parts[0] in ROOMS:
                yield path

    def root_of(self, path: Path) -> Path:
        """The folder from which this file is imported."""
        if path.is_relative_to(PACKAGE):
            return PACKAGE.parent
        roots = (f for f in (self.folder, *self._roots.values()) if path.is_relative_to(f))
        return max(roots, key=lambda root: len(root.parts), default=path.parent)

    def named_in(self, texts: Iterable[str], folder: Path) -> Iterator[Path]:
        """The files and models that these texts, in code of this folder, name."""
        for path in islice(filter(os.path.exists, places(texts, self.folder, folder)), MOST):
            if os.path.isfile(path) or os.path.isfile(path / "config.json"):
                self.paths += [path.parent] if path.suffix == ".py" else []
                yield path
            elif os.path.isdir(path) and not _INSTALLED & {*path.parts}:
                self.paths.append(path)

    def beside(self, texts: Iterable[str]) -> Iterator[str]:
        """The words in these texts that are modules beside the notebook, or where code looks."""
        folders = [folder for folder in (self.folder, *self.paths) if os.path.isdir(folder)]
        there = {name.partition(".")[0] for folder in folders for name in os.listdir(folder)}
        words = {word for text in texts for word in _DOTTED.findall(text)}
        for word in sorted(words):
            if word.partition(".")[0] in there and any(any(_files(word, f)) for f in folders):
                yield word

    def name(self, path: Path) -> str:
        """A file's name in a key."""
        root = self.root_of(path)
        if root in (PACKAGE.parent, self.folder):
            return path.relative_to(root).as_posix()
        if root in self._roots.values() and root not in self.paths and path.is_file():
            return path.relative_to(root).as_posix() + ELSEWHERE
        apart = os.path.commonpath([path, self.folder]) == os.sep
        return str(path) if apart else os.path.relpath(path, self.folder)

    def _root(self, top: str) -> Path:
        """The folder from which a top-level module is imported; the notebook's, where it has no
        files, if it does not count."""
        if top not in self._roots:
            near = [f for f in (self.folder, *self.paths) if any(_files(top, f))]
            self._roots[top] = near[0] if near else self.folder
            if top not in sys.stdlib_module_names and not near:
                with suppress(ImportError, ValueError):
                    spec = importlib.util.find_spec(top)
                    file = Path(spec.origin) if spec and spec.origin else None
                    named = top in {module.partition(".")[0] for module in self.named}
                    own = file and file.parent != _LIBRARY and not _INSTALLED & {*file.parts}
                    if spec and file and (named or own):
                        self._roots[top] = file.parents[bool(spec.parent)]  # above a package's
        return self._roots[top]


def _files(module: str, folder: Path) -> Iterator[Path]:
    """The files that importing a module from a folder runs; none of a module that is not there."""
    at, endings = str(folder), ("/__init__.py", *EXTENSION_SUFFIXES, ".py")
    for part in module.split("."):
        at += f"/{part}"
        if path := next((p for end in endings if os.path.isfile(p := at + end)), ""):
            yield Path(path)
        elif not os.path.isdir(at):
            return


# --- 3. drafters by their names ------------------------------------------------------------------


def _drafters(texts: Iterable[str]) -> set[str]:
    """The modules of the drafters that these texts name, also behind `lookup:`."""
    methods = {path.stem for path in (PACKAGE / "drafters").glob("[a-z]*.py")}
    named = methods & {part for text in texts for part in text.split(":")[:2]}
    return {f"{_DRAFTERS}{name}" for name in named}


def _strings_that_may_name_drafters(sources: Mapping[Path, Source]) -> Iterator[str]:
    """The strings of code of one's own, and of specexp's rooms that run drafters by name."""
    rooms = [PACKAGE / room for room in NAMING]
    for path, source in sources.items():
        if not path.is_relative_to(PACKAGE) or any(map(path.is_relative_to, rooms)):
            yield from source.strings
