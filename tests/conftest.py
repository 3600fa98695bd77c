"""Tiny real models, folders of them, and a store: what the tests share."""

import ast
import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
import time
import types
from collections.abc import Iterable
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the network, nor does a process that one starts

import pytest
import torch

# read when Triton is imported, which transformers may do: a GPU's kernels run in numpy without one
os.environ["TRITON_INTERPRET"] = str(int(not torch.cuda.is_available()))

from support.questions import PROMPTS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specexp import ops

CONTEXT = 128
HERE = Path(__file__).parent
TRIVIAL = HERE / "support" / "trivial.ipynb"

on_every_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
)


def also(*slow: object) -> list:
    """Cases of a test that only `make test-all` runs."""
    return [
        pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=pytest.mark.slow) for x in slow
    ]


def one_in(n: int, cases: Iterable) -> list:
    """These cases of a test, all but every n-th marked slow: a sample runs in every `make test`."""
    return [x for i, case in enumerate(cases) for x in (also(case) if i % n else [case])]


def in_turn(first: Iterable, second: Iterable) -> list:
    """All pairs, slow but for one of each of the first, with the second in turn."""
    others = list(second)
    n = len(others)
    return one_in(n, ((x, others[(i + j) % n]) for i, x in enumerate(first) for j in range(n)))


if importlib.util.find_spec("triton") and os.environ["TRITON_INTERPRET"] == "1":
    from triton.runtime import interpreter

    patched = {}  # by module; a launch patches the language for all that it calls
    call = interpreter.InterpretedFunction.__call__

    def inline(self, *args, **kwargs):
        module = self.fn.__module__
        if module.startswith("specexp") or patched.get(module):
            return self.rewrite()(*args, **kwargs)
        patched[module] = True
        return call(self, *args, **kwargs)

    interpreter.InterpretedFunction.__call__ = inline

if importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    settings.register_profile("house", deadline=None)  # a machine may have other things to do
    settings.load_profile("house")


@functools.cache
def imports(file: Path) -> tuple[frozenset[Path], frozenset[str]]:
    """Files of ours, and packages of others, that importing a file imports."""
    ours, others = set(), set()
    for node in ast.parse(file.read_text()).body:
        names = [alias.name for alias in getattr(node, "names", ())]
        if isinstance(node, ast.ImportFrom):
            names = [str(node.module), *(f"{node.module}.{name}" for name in names)]
        elif not isinstance(node, ast.Import):
            continue
        for name in names:
            part = name.replace(".", "/")
            beside = file.parent / part
            paths = beside, HERE / part, HERE.parent / part, HERE.parent / part / "__init__"
            found = {there for path in paths if (there := path.with_suffix(".py")).is_file()}
            ours |= found
            package = name.split(".")[0]
            if not found and package not in {file.stem for file in ours}:
                others.add(package)
    return frozenset(ours), frozenset(others)


@functools.cache
def absent(package: str) -> bool:
    return importlib.util.find_spec(package) is None


def lacking(file: Path) -> list[str]:
    """Absent packages without which a test module cannot be imported."""
    seen, todo, others = {file}, [file], set()
    while todo:
        ours, theirs = imports(todo.pop())
        todo += ours - seen
        seen |= ours
        others |= theirs
    return sorted(filter(absent, others))


def is_checkout() -> bool:
    asked = ["git", "ls-files", "--error-unmatch", __file__]
    return (
        shutil.which("git") is not None
        and subprocess.run(asked, cwd=HERE, capture_output=True).returncode == 0
    )


LEFT_OUT = {
    file.relative_to(HERE).as_posix(): why
    for file in sorted(HERE.rglob("test_*.py"))
    if (why := lacking(file))
}
if not is_checkout():
    LEFT_OUT.setdefault("test_house.py", []).append("a git checkout")
collect_ignore = list(LEFT_OUT)


def pytest_terminal_summary(terminalreporter):
    """A bare machine runs the tests that it can, and says which it cannot."""
    for missed in sorted({name for why in LEFT_OUT.values() for name in why}):
        files = ", ".join(file for file, why in LEFT_OUT.items() if missed in why)
        terminalreporter.write_line(f"left out, for want of {missed}: {files}")


def pytest_collection_modifyitems(config, items):
    """Tests that need a GPU, the right to mount, or a package that is no part of an installation
    exist only where there is one: deselected elsewhere, never skipped."""
    there = {
        "cuda": torch.cuda.is_available(),
        "mount": _may_mount(),
        "postgres": _postgres(),
        "compiler": _compiler(),
        "chromium": any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
    } | {
        name: importlib.util.find_spec(name) is not None
        for name in ("speculators", "ray", "torchao", "triton")
    }
    there["interpreter"] = not there["cuda"] and _is_installed("triton", 3, 7)
    there["mtp"] = _is_installed("transformers", 5, 20)
    gone = [
        item
        for item in items
        if any(item.get_closest_marker(name) and not found for name, found in there.items())
    ]
    if gone:
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item in items if item not in gone]


def _is_installed(package: str, *least: int) -> bool:
    """Whether a package is installed, in this version (major, minor) or a newer one."""
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(map(int, found.split(".")[:2])) >= least


def _compiler() -> bool:
    try:
        from specexp.fast.cpu import build
    except ModuleNotFoundError:
        return False
    return build.compiler() is not None


def _postgres() -> bool:
    programs = shutil.which("initdb") or any(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return bool(programs) and importlib.util.find_spec("psycopg2") is not None


def _may_mount() -> bool:
    if os.geteuid() != 0:
        return False
    with tempfile.TemporaryDirectory() as folder:
        asked = ["mount", "-t", "tmpfs", "tmpfs", folder]
        if shutil.which("mount") is None or subprocess.run(asked, capture_output=True).returncode:
            return False
        return subprocess.run(["umount", folder]).returncode == 0


@pytest.fixture(autouse=True)
def _choose_kernels_anew():
    """What one test switches off is on in the next."""
    ops.forget()


@pytest.fixture
def serving():
    """Starts servers around pairings (`support.fake_servers`); returns their addresses."""
    from support import fake_servers

    with fake_servers.starting() as start:
        yield start


@pytest.fixture(autouse=True)
def _every_figure_is_readable(request, monkeypatch):
    """Those that the tests of figures draw."""
    if request.path.parent.name != "figures":
        yield
        return
    from support import readable

    from specexp.figures import style

    drawn, close = [], style.plt.close
    monkeypatch.setattr(style.plt, "close", lambda figure: (drawn.append(figure), close(figure)))
    yield
    for figure in drawn:
        readable.check(figure)


def tiny_llama(seed: int, layers: int = 2, vocab: int = 32, **config) -> LlamaForCausalLM:
    """Random weights, spread widely enough that greedy texts do not repeat one token."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": vocab, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT, "initializer_range": 0.4,
        "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**shape | config))


def tiny_tokenizer(text: str) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"]
    bpe.train_from_iterator(
        [text],
        trainers.BpeTrainer(
            vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=special[0], bos_token=special[0])


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Path:
    """A folder of this run of tests, one for all processes among which they are divided."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory) -> tuple[str, str]:
    """A target and a draft on disk with one tokenizer: safetensors, as from a hub."""
    tokenizer = tiny_tokenizer("def mean(values): return sum(values) / len(values)\n" * 3)
    folders = []
    for name, seed, layers in (("target", 0, 3), ("draft", 1, 1)):
        folder = tmp_path_factory.mktemp("models") / name
        tiny_llama(seed, layers, vocab=len(tokenizer)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        folders.append(str(folder))
    return folders[0], folders[1]


@pytest.fixture(scope="module")
def pairing(tiny_folders):
    from specexp import api

    return api.load(*tiny_folders, gamma=3)


@pytest.fixture(scope="module")
def acceptance(pairing):
    from specexp.measure import one_pairing

    return one_pairing.acceptance([pairing, pairing.with_(drafter="ngram")], PROMPTS, 10)


@pytest.fixture(scope="module")
def latency(pairing):
    from specexp.measure import one_pairing

    return one_pairing.latency(pairing, PROMPTS, [1, 3], 10, repeats=2)


@pytest.fixture(scope="module")
def throughput(pairing):
    from specexp.measure import one_pairing

    return one_pairing.throughput(pairing, PROMPTS, [1, 4], 10, repeats=2)


@pytest.fixture
def few(monkeypatch):
    """Quantiles are told of any number of samples."""
    from specexp.measure.under_load import served

    monkeypatch.setattr(served, "MIN_SAMPLES", dict.fromkeys(served.QUANTILES, 1))


@pytest.fixture(scope="session")
def corpus():
    """A little of the zoo's text."""
    from making.corpus import gather

    return gather(records=32, edits=32, limit=12)


@pytest.fixture(scope="session")
def documents(corpus):
    """The tokens of each kind of that text."""
    from making.tokenizer import train_tokenizer
    from specexp.zoo.rows import encode

    tokenizer = train_tokenizer(text for texts in corpus.train.values() for text in texts)
    return {kind: encode(tokenizer, texts) for kind, texts in corpus.train.items()}


@pytest.fixture
def now(monkeypatch):
    """now.s: what every clock says, until somebody moves it on."""
    now = types.SimpleNamespace(s=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: now.s)
    return now


@pytest.fixture(scope="session")
def migrated(tmp_path_factory):
    """A store whose database exists: creating one takes seconds, copying it does not. From then on
    MLflow asks all its migrations only once which is the newest."""
    from mlflow.store.db import utils

    from specexp.tracking import runs

    utils._get_latest_schema_revision = functools.cache(utils._get_latest_schema_revision)
    root = tmp_path_factory.mktemp("migrated")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECEXP_MLRUNS", str(root))
        runs.initialise()
    return root


@pytest.fixture
def store(tmp_path, monkeypatch, migrated):
    """A fresh store of one test's own; runs log a quiet machine, whatever runs beside the tests."""
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5, 0.5, 0.5))
    root = tmp_path / "mlruns"
    root.mkdir()
    shutil.copy(migrated / "mlflow.db", root / "mlflow.db")
    monkeypatch.setenv("SPECEXP_MLRUNS", str(root))
    return root


@pytest.fixture
def points(tmp_path):
    """Points of a notebook of trifles, with these axes."""
    import yaml

    from specexp.grids import points as grid

    def call(
        timeout_s: float = 1200, together: bool = False, notebook: Path = TRIVIAL, **axes
    ) -> list[grid.Point]:
        file = tmp_path / "trivial.yaml"
        spec = {"notebook": str(notebook), "experiment": "grid of trifles", "timeout_s": timeout_s}
        file.write_text(yaml.safe_dump(spec | {"grid": axes}))
        return grid.load([file], together=together)

    return call


@pytest.fixture
def written(points, monkeypatch):
    """Points whose result is written without a kernel; x = 13 fails."""
    from support import stores

    return stores.without_kernels(points, monkeypatch)


@pytest.fixture(scope="session")
def filled_once(migrated, tmp_path_factory):
    """A store with three results that were logged by hand, for tests to copy."""
    from support import stores

    from specexp.tracking import runs

    root = tmp_path_factory.mktemp("filled")
    shutil.copy(migrated / "mlflow.db", root / "mlflow.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getloadavg", lambda: (0.5, 0.5, 0.5))
        patch.setenv("SPECEXP_MLRUNS", str(root))
        stores.filled(root)
        runs.client()._tracking_client.store.engine.dispose()  # which writes its journal back
    return root


@pytest.fixture
def filled(store, filled_once):
    """A store with three results that were logged by hand."""
    return Path(shutil.copytree(filled_once, store, dirs_exist_ok=True))


@pytest.fixture(scope="session")
def fork_server():
    """One process that has imported what notebooks import, and forks kernels for many tests. It has
    two threads, as a control where each point is to have one."""
    from specexp.grids import kernels, notebooks

    shipped = (HERE.parent / "notebooks").glob("*.ipynb")
    modules = notebooks.modules_of([TRIVIAL, *sorted(shipped)])
    server = kernels.Kernels(("torch", "specexp.api", "matplotlib.pyplot", *modules))
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OMP_NUM_THREADS", "2")
            stack.enter_context(server)
        yield server


@pytest.fixture
def kept(fork_server):
    """The runner takes kernels from that process: to import all that takes it seconds a grid."""
    from support import machines

    from specexp.grids.machines import local

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "Here", machines.kept(fork_server))
        yield


@pytest.fixture
def copied_tables(monkeypatch, migrated):
    """A new database is copied from a template: creating its tables takes seconds."""
    from support import stores

    stores.copy_tables(monkeypatch, migrated)


@pytest.fixture(scope="session")
def warm():
    """A process that forks runners, see faults.py."""
    from support.faults import Warm

    with Warm() as server:
        yield server


@pytest.fixture(scope="session")
def template(warm, tmp_path_factory):
    """A store with a database and nothing else, made by `warm`."""
    root = tmp_path_factory.mktemp("template")
    assert warm.run("initialise", root).code == 0
    return root


@pytest.fixture
def disk(tmp_path):
    """A folder on a fast disk where there is one: for thousands of fsyncs."""
    there = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path
    folder = there / f"specexp-{os.getpid()}-{tmp_path.name}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)
