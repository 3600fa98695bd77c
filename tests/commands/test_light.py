"""Help and refusals come before anything heavy is imported: in a process of their own."""

import json
import os
import subprocess
import sys

import pytest
import typer.main
from conftest import also
from support.processes import HEAVY

from specexp.commands import app
from specexp.zoo import shelf

CODE = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from specexp.commands import app

lines, heavy, results = json.loads(sys.argv[1]), {*sys.argv[2:]}, []
for words in lines:
    sys.argv = ["specexp", *words]
    before, out, err, code = {*sys.modules}, io.StringIO(), io.StringIO(), 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            app.main()
        except SystemExit as stopped:
            code = stopped.code or 0
    new = sorted(heavy & ({*sys.modules} - before))
    results.append([code, out.getvalue(), err.getvalue(), new])
print(json.dumps(results))
"""


def ran(lines: list[tuple[str, ...]]) -> list[list]:
    """Of each command line exit code, stdout, stderr and the heavy packages that it imported, all
    in one process."""
    command = [sys.executable, "-c", CODE, json.dumps(lines), *HEAVY]
    wide = os.environ | {"COLUMNS": "400"}
    done = subprocess.run(command, capture_output=True, text=True, env=wide, check=True)
    return json.loads(done.stdout)


REFUSED = {
    "generate": "give either --prompt",
    "generate --prompt a --drafter modl": "did you mean 'model'?",
    "generate --prompt a --drafter nul": "did you mean 'plain'?",
    "generate --prompt a --drafter model:siblin-3m": "did you mean 'sibling-3m'?",
    "generate --prompt a --drafter no.such:Drafter": "there is no module no.such",
    "generate --prompt a --drafter nomine:Echo": "there is no module nomine",
    "generate --prompt a --drafter statistics.Echo": "did you mean 'statistics:Echo'?",
    "generate --prompt a --drafter lookup:ngram": "and not before ngram",
    "generate --prompt a --drafter lookup:siblin-3m": "did you mean 'sibling-3m'?",
    "generate --prompt a --rule rejct": "did you mean 'reject'?",
    "generate --prompt a --rule lenient:2": "lenience is 2",
    "generate --prompt a --tree 3y2": "such as 3x2x1",
    "generate --prompt a --target target-10n": "did you mean 'target-10m'?",
    "generate --prompt a --dtype int8": "use float32",
    "generate --prompt a --device tpu": "use auto",
    "generate --prompt a --temperature -1": "temperature is -1",
    "generate --prompts missing.jsonl": "no prompts at missing.jsonl",
    "serve --policy plian": "did you mean 'plain'?",
    "serve --policy always:x": "not well formed",
    "serve --load closd:3": "did you mean 'closed'?",
    "serve --drafter modl": "did you mean 'model'?",
    "serve --rows 0": "rows is 0",
    "bench foo": "suite 'foo' is unknown",
    "bench rooflin": "did you mean 'roofline'?",
    "bench --batches 1,x": "give whole numbers",
    "bench --target target-10n": "did you mean 'target-10m'?",
    "profile --drafter modl": "did you mean 'model'?",
    "zoo train --heads eagl": "did you mean 'eagle'?",
    "zoo train --heads eagle --target target-10n": "did you mean 'target-10m'?",
    "zoo train --draft --text missing.txt": "missing.txt",
    "zoo train --target x": "belongs to --heads or --draft",
    "zoo train --layers 2": "belong to --draft",
    "zoo fetch smolm": "did you mean 'smollm2'?",
}


def test_what_its_words_decide_is_refused_before_anything_heavy_is_imported():
    results = ran([tuple(line.split()) for line in REFUSED])
    for (line, said), (code, out, err, heavy) in zip(REFUSED.items(), results, strict=True):
        assert (code, out, heavy) == (2, "", []), f"{line}: {err}"
        assert said in err, line
        assert len(err.splitlines()) == 1, line


def pages(command, *words):
    """The words of every command and group of commands."""
    yield words
    for name, below in getattr(command, "commands", {}).items():
        yield from pages(below, *words, name)


def test_every_help_page_imports_nothing_heavy():
    every = [*pages(typer.main.get_command(app.app))]
    assert {("generate",), ("grid", "run"), ("store", "check"), ("zoo", "twin")} < {*every}
    results = ran([(*words, "-h") for words in every])
    for words, (code, out, err, heavy) in zip(every, results, strict=True):
        assert (code, err, heavy) == (0, "", []), words
        assert "Usage: specexp" in out, words


def test_no_command_shows_the_help_page_also_behind_two_dashes():
    bare, dashes, group = ran([(), ("--",), ("grid", "--")])
    assert dashes == bare
    for code, out, err, heavy in (dashes, group):
        assert (code, heavy) == (bare[0], [])
        assert "Usage: specexp" in out + err


LIGHT = ["--version", "models --json", "models", "theory --alpha 0.8 --gamma 5"]


def test_what_needs_no_model_imports_nothing_heavy():
    for line, (code, out, err, heavy) in zip(
        LIGHT, ran([tuple(line.split()) for line in LIGHT]), strict=True
    ):
        assert (code, err, heavy) == (0, "", []), line
        assert out, line


GRIDS = sorted((shelf.CHECKOUT / "notebooks" / "grids").glob("*.yaml"))


@pytest.mark.parametrize("command", ["status", *also("validate")])
def test_look_at_every_shipped_grid_imports_nothing_heavy(tmp_path, monkeypatch, command):
    """Of `validate`, a second look: the first keeps what transformers says of models."""
    monkeypatch.setenv("SPECEXP_MLRUNS", str(tmp_path / "store"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert len(GRIDS) > 10
    lines = [("grid", command, str(file)) for file in GRIDS]
    if command == "validate":
        assert "torch" in ran(lines)[0][3]
    results = ran(lines)
    for file, (code, out, err, heavy) in zip(GRIDS, results, strict=True):
        assert heavy == [], file
        if file.stem == "real":  # its models are fetched and trained first
            assert (code, "specexp zoo fetch smollm2" in err) == (2, True)
        else:
            assert (code, err) == (0, ""), file
            assert ("ready to run" if command == "validate" else "to do") in out
