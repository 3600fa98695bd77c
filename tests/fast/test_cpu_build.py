"""C++ is compiled once a machine; without a compiler a line says so. Planted bugs are caught."""

import itertools
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import test_cpu_replays
import test_fused_eagle
import torch
from conftest import also, one_in
from support.inputs import INPUTS, differing
from support.references import references
from test_cpu_passes import NEAR, off, reads_by_length, steady, wide_is_right
from test_fused import made

from specexp import ops
from specexp.fast import fused
from specexp.fast.cpu import build
from specexp.fast.fused import Fused
from specexp.fast.private import keep_triton, private
from specexp.models.load import of_module

pytestmark = pytest.mark.compiler


@pytest.fixture(autouse=True)
def _fresh():
    """Every test tries its modules anew."""
    fused._FUSED.clear()


def fails(why: str):
    raise RuntimeError(why)


@pytest.fixture
def anew(monkeypatch, tmp_path):
    """A machine on which nothing was compiled yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    build._loaded.cache_clear()
    yield tmp_path / "cache" / "specexp"
    build._loaded.cache_clear()


@pytest.fixture
def sooner(monkeypatch):
    """What is compiled is compiled in half the time, and runs slower."""
    monkeypatch.setattr(build, "FLAGS", tuple(f.replace("-O3", "-O1") for f in build.FLAGS))


@pytest.fixture
def once(shared, monkeypatch, anew, sooner) -> Path:
    """Where sources without a bug are compiled once for all tests that have one in another."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared / "compiled"))
    return anew.parent / "copy"


def test_code_is_compiled_once_a_machine(anew, sooner, monkeypatch):
    monkeypatch.setattr(build, "FILES", ("scans", "rounds"))
    assert build.library() is not None
    written = {file: file.stat().st_mtime_ns for file in anew.iterdir()}
    assert {file.name.partition("-")[0] for file in written} == {*build.FILES}
    build._loaded.cache_clear()
    monkeypatch.setattr(build.subprocess, "run", None)
    assert build.library() is not None
    assert {file: file.stat().st_mtime_ns for file in anew.iterdir()} == written


def test_waiting_for_a_compiler_is_said_on_stderr_once(anew, monkeypatch, tmp_path, capfd):
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nsleep 3\nexit 1\n")
    slow.chmod(0o700)
    monkeypatch.setenv("CXX", str(slow))
    assert build.library() is None
    assert capfd.readouterr().err.count(build.WAITING) == 1


def test_compiled_code_is_kept_where_only_its_owner_writes(tmp_path):
    folder = private(tmp_path / "cache")
    (folder / "rounds-1.so").write_bytes(b"own")
    assert list(private(folder).iterdir()) == [folder / "rounds-1.so"]
    (folder / "triton" / "kernel").mkdir(parents=True)
    (folder / "link").symlink_to(tmp_path)
    folder.chmod(0o777)
    assert list(private(folder).iterdir()) == [], "what others may have planted would run"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert tmp_path.exists()


@pytest.mark.parametrize("named", [None, "TRITON_CACHE_DIR", "TRITON_HOME"])
def test_triton_keeps_its_kernels_there_unless_told_otherwise(monkeypatch, tmp_path, named):
    for name in ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
        if name.startswith("TRITON") and name != named:
            monkeypatch.delenv(name)
    keep_triton()
    folder = tmp_path / "specexp" / "triton"
    assert folder.exists() == (named is None)
    if named is None:
        assert os.environ["TRITON_CACHE_DIR"] == str(folder)
        assert {f.stat().st_mode & 0o777 for f in (folder, folder.parent)} == {0o700}


def test_cache_of_another_user_is_not_used(anew, monkeypatch, caplog):
    monkeypatch.setattr(build.os, "getuid", lambda: 12345)
    assert build.library() is None
    assert "belongs to another user: set XDG_CACHE_HOME" in caplog.text


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Where the library of a source is, which a compiler here makes of the word `ours`."""

    def run(command, **_):
        Path(command[-1]).write_bytes(b"ours")
        Path(command[-1]).chmod(0o775)  # as under a umask of 002

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build.subprocess, "run", run)
    return build._built(build.FOLDER / "rounds.cpp")


def planted_link(file: Path, monkeypatch) -> None:
    file.unlink()
    file.symlink_to(file.parent.parent / "theirs")
    file.resolve().write_bytes(b"theirs")


def planted_mode(file: Path, monkeypatch) -> None:
    file.write_bytes(b"theirs")
    file.chmod(0o722)


def planted_owner(file: Path, monkeypatch) -> None:
    file.write_bytes(b"theirs")
    monkeypatch.setattr(build, "private", lambda folder: folder)
    monkeypatch.setattr(build.os, "getuid", lambda: 12345)


@pytest.mark.parametrize("plant", [planted_link, planted_mode, planted_owner])
def test_code_that_another_may_have_written_is_compiled_anew(compiled, monkeypatch, plant):
    plant(compiled, monkeypatch)
    assert build._built(build.FOLDER / "rounds.cpp").read_bytes() == b"ours"
    assert not compiled.is_symlink()


def test_own_code_is_not_compiled_again(compiled, monkeypatch):
    monkeypatch.setattr(build.subprocess, "run", None)
    assert build._built(build.FOLDER / "rounds.cpp") == compiled


def test_library_that_does_not_load_is_compiled_anew(compiled, monkeypatch):
    def load(name):
        if not Path(name).read_bytes():
            raise OSError(f"{name}: file too short")
        return name

    monkeypatch.setattr(build, "CDLL", load)
    compiled.write_bytes(b"")
    assert build._library(build.FOLDER / "rounds.cpp") == str(compiled)
    access = os.access
    monkeypatch.setattr(build.os, "access", lambda x, *more: x != compiled and access(x, *more))
    compiled.write_bytes(b"")
    with pytest.raises(OSError, match="file too short"):  # nor would another
        build._library(build.FOLDER / "rounds.cpp")


def test_library_of_another_c_library_is_not_used(compiled, monkeypatch):
    monkeypatch.setattr(build.platform, "libc_ver", lambda: ("glibc", "2.17"))
    assert build._file(build.FOLDER / "rounds.cpp") != compiled


@pytest.mark.parametrize("fault", ["folder", "home", "command"])
def test_code_that_cannot_be_kept_is_one_warning(anew, monkeypatch, caplog, fault):
    if fault == "folder":
        monkeypatch.setenv("XDG_CACHE_HOME", f"/{300 * 'x'}")
    elif fault == "home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", lambda: fails("Could not determine home directory."))
    else:
        monkeypatch.setenv("CXX", 'g++ "')
    with caplog.at_level(logging.WARNING, "specexp"):
        build.uncompiled()
        assert build.library() is None
        assert build.uncompiled() == []
    assert len(caplog.records) == 1
    assert build.state() == "not compiled: torch's operations"


@pytest.mark.parametrize(
    ("compiler", "said"),
    [("", "no C++ compiler (install g++"), ("/nowhere/g++", "nowhere"), ("false", "false")],
)
def test_warning_says_why_nothing_is_compiled(anew, monkeypatch, caplog, compiler, said):
    if compiler:
        monkeypatch.setenv("CXX", compiler)
    else:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(anew))
    with caplog.at_level(logging.WARNING, "specexp"):
        assert isinstance(of_module(made("llama", torch.float32)).net, Fused)
        assert isinstance(of_module(made("tied", torch.float32)).net, Fused)
    [line] = [r.getMessage() for r in caplog.records]
    assert line.startswith("passes on this CPU are not compiled, which makes them slower: ")
    assert said in line


def changed(monkeypatch, folder: Path, change: Callable[[str], str], *names: str) -> None:
    """From now on sources are a copy of what they were, of which some are changed."""
    shutil.copytree(build.FOLDER, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for name in names:
        source = folder / name
        source.write_text(change(source.read_text()))
    monkeypatch.setattr(build, "FOLDER", folder)


def test_warning_quotes_first_compile_error(once, monkeypatch, caplog):
    monkeypatch.setattr(build, "FILES", ("rounds",))
    changed(monkeypatch, once, lambda text: text + "\nnonsense;\n", "rounds.cpp")
    with caplog.at_level(logging.WARNING, "specexp"):
        assert build.library() is None
    assert "error" in caplog.text
    assert "nonsense" in caplog.text


# --- planted bugs --------------------------------------------------------------------------------

BUGS = {
    "a token does not see itself": ("p.slots[token] + 1", "p.slots[token]"),
    "a mask is not read": ("visible[i][j] ? s[j]", "true ? s[j]"),
    "keys of the first row": ("row * p.row_stride + key", "0 * p.row_stride + key"),
    "a head reads another's keys": ("key * p.head_stride", "(key + 1) % net.keys * p.head_stride"),
    "heads of a key exchanged": ("(first + i) % G)", "(G - 1 - (first + i) % G))"),
    "all tokens see what the first does": ("(first + i) / G", "first / G"),
    "turned the other way": ("cosine[i] - x", "cosine[i] + x"),
    "up for gate": ("E, room.gate, F);", "E, room.up, F);"),
    "norms of queries left out": ("if (weight) rms_norm", "if (weight && h >= H) rms_norm"),
    "states a layer late": ("p.tap[t] == layer", "p.tap[t] == layer + 1"),
    "logits of the first places": ("% p.n + p.last - p.n", "% p.n < p.last ? i % p.n : -1"),
    "logits stay where they were made": ("if (wanted && kept", "if (false && kept"),
    "shorter texts lie as far apart": ("h / G * count", "h / G * n"),
    "what is read is what is added to": ("given = net.token_norm && !at", "given = false"),
    "what is added to is never normed": ("if (net.adds) start_from", "if (false) start_from"),
    "columns of their own": ("columns[net.ids[o]]", "columns[o]"),
    "no token is impossible": ("columns, net.all, -INFINITY", "columns, net.all, 0.0f"),
    "what has no part is impossible": ("* net.all, 0.0f)", "* net.all, -INFINITY)"),
    "states of what has no part": ("if (p.tokens[i] == -1) memset", "if (false) memset"),
    "features as the norm got them last": ("tap(-1, x)", "tap(-1, read)"),
    "the last of equals": ("w[at] == w[best] && at < best", "w[at] == w[best] && at > best"),
    "the last lane's largest": ("place = x > most ? here", "place = x >= most ? here"),
    "no number is not seen": ("odd |= x != x", "odd |= x != x && false"),
    "accepted after a refusal": ("depth[up] < 0 || ", ""),
    "compared with a node's own sample": ("!= sample[up]", "!= sample[i]"),
    "a tree for all": ("shared ? 0 : nodes", "0"),
    "an end of text that is not delivered": ("before_end) + 1", "before_end - 1) + 1"),
    "an end of text does not end the row": ("if (emitted > before_end)", "if (!emitted)"),
    "done rows go back": ("*limit - *length, 0)", "*limit - *length, -1)"),
    "no slot is the first": ("1 + depth[i], 0)", "1 + depth[i], 1)"),
    "slots of the first text": ("*out++ = tokens[*slots];", "*out++ = tokens[slots[-i]];"),
    "a budget that ends a draft token early": ("right] <= *budget", "right] < *budget"),
    "the depths of the first row": ("depth += down, budget++", "budget++"),
    "rows for columns": ("parts[i][row * strides[i]]", "parts[i][0]"),
    "columns of nothing else": ("parts[i][row * strides[i]]", "parts[i][row]"),
    "all that agree have a vote": ("voters.clear(), most = agrees", "most = agrees"),
    "the fewest votes": ("more > 0 ||", "more < 0 ||"),
    "ties go to the earliest": ("end > voters[b.to - 1].end", "end < voters[b.to - 1].end"),
    "a draft token is trusted for itself": ("all.trust * share}", "share}"),
    "votes alone are the share": ("(float)(v - from) / (all.to - all.from)", "(float)(v - from)"),
    "a stretch too far": ("depth[i] <= stretch * most", "depth[i] <= stretch * most + 1"),
    "ids beyond the vocabulary are drafted": ("says >= 0 && says < vocab", "says >= 0"),
    "a draft token is no text": ("says = at > last ? out[node]", "says = false ? out[node]"),
    "the root's draft token for all": ("depth[node] > at - last", "depth[node] > 1"),
    "what is noted of another": ("&& owner[place] == token", "&& owner[place] >= 0"),
    "notes of the first row": ("tokens += down, owner += places + 1", "tokens += down, owner += 0"),
    "the place for the token": ("owner[place] = *tokens", "owner[place] = place"),
    "the first for the largest": (
        "if (kept == most && !above(w[i], w[best[most - 1]]))",
        "if (kept == most)",
    ),
    "ranked as they come": ("at && above(w[i], w[best[at - 1]])", "false"),
    "a lane's noise is that of another vector's": ("~(i + t) : i + t)", "~(i + t) : t)"),
    "parts on the noise of the last tokens": ("parts ? ~(i + t)", "parts ? i - t"),
    "parts by their first token": ("total(std::min(PART, size - i * PART)", "total(1"),
    "a token of the first part": ("largest(room, parts) * PART", "0 * PART"),
    "uniforms of other bits": ("* GOLDEN) & INT64_MAX", "* GOLDEN) >> 1"),
    "hashed once too little": ("return x ^ x >> 31", "return x"),
    "early arrivals rounded": ("0006145e-06f + lost)", "0006145e-06f)"),
    "a race without an end": ("u < latest ? u : latest", "u"),
    "purposes share their noise": ("mix(key + salt)", "mix(key)"),
    "noise of the first row": ("keys[row / n * down + row % n]", "keys[row % n]"),
    "keys side by side": ("keys[row / n * down + row % n]", "keys[row]"),
    "noise by row, not by place": ("*stream++) + *length++", "*stream++)"),
    "the noise of a position seen again": ("by_round ? mix(root) : root", "root"),
    "temperature upside down": ("(x[i] - most) / temperature", "(x[i] - most) * temperature"),
    "top-k drops ties": ("x < least ? none", "x <= least ? none"),
    "top-k keeps one more": ("least = ranked[top_k - 1]", "least = ranked[top_k]"),
    "top-p keeps one too few": ("before < top_p &&", "before + p[left[0]] < top_p &&"),
    "top-p of the highest of equals": ("a > b); };", "a < b); };"),
    "what top-p leaves is not scaled": ("    scaled(size, p);\n}", "}"),
    "a draft token of zero probability taken as drawn": (
        "x >= 0 && q[x] > 0) return",
        "x >= 0) return",
    ),
    "no draft token taken for token 0": (
        "-1 : row.tokens[child];",
        "-1 : std::max<int64_t>(0, row.tokens[child]);",
    ),
    "siblings drawn from one q": ("others[x] = 0;", ""),
    "second sibling held against p": ("<= rest_of_p[x] /", "<= row.p_at(node)[x] /"),
    "siblings share a coin": ("row.coin(node, rank)", "row.coin(node, 0)"),
    "nodes share a coin": ("row.coin(node, rank)", "row.coin(0, rank)"),
    "lenient in the ratio only": ("- lenience * drawn[i]", "- drawn[i]"),
    "lenient in the rest only": ("(row.lenience * chance)", "chance"),
    "residual is p": ("rest_of_p = spare, std::swap", "std::swap"),
    "coins on the bonus's noise": ("keys[node] + accept_salt", "keys[node] + residual_salt"),
    "bonus on the root's noise": ("keys[path[count]] + residual_salt", "keys[0] + residual_salt"),
    "children of the first row": ("shared ? 0 : first * width", "0"),
    "block: passes with its mass": ("mass / all : 1", "mass : 1"),
    "block: coin of the draft token after": ("row.coin(i - 1, 0)", "row.coin(i, 0)"),
    "block: not cut at one": ("(p[x] / drawn[x]), 1.0f)", "(p[x] / drawn[x]), 9.0f)"),
    "block: of the last alone": ("owed = std::min(owed *", "owed = std::min(1 *"),
    "block: residual of p, not of P p": ("subtract(owed, p", "subtract(1, p"),
    "block: bonus from p": ("mass > 0 ? spare : p", "p"),
    "rounds after the last": ("if (report[1] && !report[2])", "if (false)"),
    "rounds that are not made": ("if (!replay(count, calls)) return -1;", ""),
    "all at once": ("*seconds++ = now", "*seconds = now"),
    "slots in another order": ("m + a] < place", "m + a] > place"),
    "decayed by what is not seen": ("sees ? by[d] : 0", "by[d]"),
    "what is added to a state for what is read": ("w + (folds + i) * J", "w + i * J"),
    "what is drafted is added to a state": ("folds ? c : 0", "c"),
    "a write that knows itself": ("if (at < c) by[at] = 0;", ""),
    "writes of padding": ("at == c || !after[token]", "at == c"),
    "keys of another head": ("group = h / (H / G)", "group = h % G"),
    "the first row's states": ("(r * H + h) * K * V", "h * K * V"),
    "one rate for all heads": ("beta[token * H + h]", "beta[token * H]"),
    "one decay for all keys of a state": ("w, D > 1, state", "w, 0, state"),
    "the first columns a token reads": ("(i + 1) * back - k", "i * back"),
    "taps in another order": ("* k + t]);", "* k + k - 1 - t]);"),
    "the bias of the first channels": ("load(bias + c)", "load(bias)"),
    "columns of the parent's parent": ("memmove(to, from + 1", "memmove(to, from"),
    "a column of another row": ("i % rows * down + i / rows", "i / rows * down + i % rows"),
    "columns side by side by row": ("(i % rows * n + i / rows) * C;", "i * C;"),
    "every token goes on from the text": ("(before[i] * H + h)", "(before[i % rows] * H + h)"),
    "a state for its parent's": ("(after[i] * H + h)", "(before[i] * H + h)"),
    "the step of another row": ("(row * H + h + u)", "(h + u)"),
    "a step that only grows": ("(x > 0.0f ? x : none) - arrival", "x - arrival"),
    "a write by the first row's key": ("load(B + token * K", "load(B + i / rows * K"),
    "the skip of the first channels": ("load(D + h)", "load(D)"),
    "sums in another order": ("(q[0] + q[2]) + (q[1] + q[3])", "q[0] + q[1] + q[2] + q[3]"),
}


def right() -> bool:
    eagles = (
        test_fused_eagle.off(kind, torch.float32) for kind in ("eagle3", "norm_before_residual")
    )
    near = all(x < NEAR[torch.float32] for x in (off("qwen3"), *eagles))
    near = near and test_fused_eagle.tells_apart(test_fused_eagle.made("eagle3", torch.float32))
    same = steady("qwen3") and steady("one key") and reads_by_length("qwen3")
    with references():
        kernels = [x for x in INPUTS if "cpu" in ops.OPS[x].kernels]
        bugs = (differing(x, "cpu", "cpu", range(150))[0] for x in kernels)
        if not (near and same and not any(bugs)):
            return False
    return test_cpu_replays.held_rounds_are_rounds("model")


@pytest.mark.parametrize("bug", one_in(len(BUGS), BUGS))
def test_planted_bug_is_caught(once, monkeypatch, bug):
    good, bad = BUGS[bug]
    count = {p.name: p.read_text().count(good) for p in build.FOLDER.iterdir() if p.is_file()}
    [name] = [name for name, found in count.items() if found]
    assert count[name] == 1
    changed(monkeypatch, once, lambda text: text.replace(good, bad), name)
    monkeypatch.setattr(fused, "_difference", lambda *_: 0.0)
    assert not right()


def test_compiled_code_without_its_symbols_is_a_warning(once, monkeypatch, caplog):
    absent = "\n#ifdef NEVER\nCALLED(absent, absent)\n#endif\n"
    changed(monkeypatch, once, lambda text: text + absent, "rounds.cpp")
    assert build.library() is None
    assert "call_absent" in caplog.text


ZEN = "x86-64-v3 -mtune=znver3"
OTHER_MAKER = "native -U__SSE4A__" if "sse4a" in build._processor() else "native -D__SSE4A__=1"


@pytest.mark.slow
@pytest.mark.parametrize("march", [f"{ZEN} -O1", *(OTHER_MAKER, ZEN, "x86-64-v3", "x86-64")])
def test_narrower_vectors_and_other_makers_processors_give_the_same(anew, monkeypatch, march):
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        march = "native"
    flags = (f.replace("native", march).split() for f in build.FLAGS)
    monkeypatch.setattr(build, "FLAGS", tuple(itertools.chain(*flags)))
    assert right()


@pytest.mark.usefixtures("once")
def test_no_bug_is_seen_where_none_was_planted():
    assert right()


# --- products by tiles ---------------------------------------------------------------------------

AMX = build.vectors().endswith("AMX")


TILE_BUGS = {
    "packed for the tile before": ("packed + c * TILE", "packed + c / 2 * TILE"),
    "weights of the first inputs": ("w + u * lump + c * DEEP", "w + u * lump"),
    "the first sixteen outputs for all": ("w + u * lump + c * DEEP", "w + c * DEEP"),
    "tokens for pairs": ("rows - 1) * inputs + at);\n        transpose(row);",
                         "rows - 1) * inputs + at);"),
    "the first sixteen tokens for all": ("std::min(first + t, rows - 1)", "std::min(t, rows - 1)"),
    "sums go on": ("each<N>([&](auto u) { zero_tile<u>(); });", ""),
    "a bias for sixteen outputs": ("load(bias + u * SIDE)", "load(bias)"),
    "set where it is added": ("added ? load(to) + sums : sums", "sums"),
}  # fmt: skip


@pytest.mark.skipif(not AMX, reason="this processor has no AMX")
@pytest.mark.parametrize("bug", also(*TILE_BUGS))
def test_bug_planted_in_tiles_is_caught(once, monkeypatch, bug):
    good, bad = TILE_BUGS[bug]
    source = (build.FOLDER / "tiles.h").read_text()
    assert source.count(good) == 1
    changed(monkeypatch, once, lambda text: text.replace(good, bad), "tiles.h")
    monkeypatch.setattr(fused, "_difference", lambda *_: 0.0)
    assert not wide_is_right()
