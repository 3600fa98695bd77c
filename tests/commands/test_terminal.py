"""What a model or a notebook writes reaches a terminal as text, whatever it holds."""

import io
import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.live import Live
from rich.text import Text
from safetensors.torch import load_file, save_file

from specexp.commands import options
from specexp.terminal import Terminal, harmless, listing, table
from specexp.tracking import mlflow_server, runs

NASTY = "a\x1b]0;owned\x07b\x1b[2Jc\rd\x9b31me\u202ef\u2066g\x7f\x08h"
SAFE = "a␛]0;owned␇b␛[2Jc␍d�31me�f�g␡␈h"


def test_controls_become_symbols_and_text_stays():
    assert harmless(NASTY) == SAFE
    assert harmless("tür\n\tx ⏎ 漢") == "tür\n\tx ⏎ 漢"
    assert harmless("caf\udcff") == "caf\ufffd", "a byte that is no UTF-8 cannot be printed"


@pytest.mark.parametrize("shown", [NASTY, Text(NASTY, "red"), Text("x").append(NASTY, "bold")])
def test_terminal_sends_only_its_own_escapes(shown):
    file = io.StringIO()
    Terminal(file=file, force_terminal=True, markup=False, emoji=False, width=200).print(shown)
    sent = file.getvalue()
    assert "\x1b]0" not in sent
    assert "\x1b[2J" not in sent
    assert not set("\x07\r\x9b\u202e\u2066\x7f\x08") & set(sent)
    assert "owned" in sent


def test_a_file_is_not_cut_to_the_width_of_a_screen(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert Terminal(file=io.StringIO()).width > 150
    monkeypatch.setenv("COLUMNS", "60")
    assert Terminal(file=io.StringIO()).width == 60


@pytest.mark.parametrize("empty", [listing, partial(table, "a title")])
def test_a_narrow_terminal_cuts_no_word(empty):
    """Such as the paths of models: what is left of them would be the same for all."""
    shown, file = empty("name", "path", "speedup"), io.StringIO()
    shown.add_row("model", "/a/folder/whose/path/is/long/model", "")
    Terminal(file=file, force_terminal=True, no_color=True, width=32).print(shown)
    printed = "".join(file.getvalue().split())
    assert "/a/folder/whose/path/is/long/model" in printed
    assert "speedup" in printed


def test_live_display_still_moves_the_cursor(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")  # a dumb one has no cursor to move
    file = io.StringIO()
    with Live(Text(NASTY), console=Terminal(file=file, force_terminal=True, width=200)) as live:
        live.update(Text("second\nline"))
    assert "\x1b[2J" not in file.getvalue()
    assert "\x1b[2K" in file.getvalue(), "its own control codes are gone"


def test_commands_write_through_it(capsys):
    assert isinstance(options.console, Terminal)
    options.complain("error", NASTY)
    assert "\x1b]0" not in capsys.readouterr().err


def test_json_on_a_terminal_holds_no_controls(capsys):
    options.print_json({"text": NASTY + "é漢"})
    text = capsys.readouterr().out
    assert harmless(text) == text
    assert "é漢" in text
    assert json.loads(text) == {"text": NASTY + "é漢"}


LOUD = f"""
import logging, warnings
from specexp.commands import app
from transformers.utils.logging import get_logger

NASTY = {NASTY!r}

def speak():
    get_logger("transformers.x").error(NASTY)  # by a handler of its own
    for name in ("specexp", "specexp.serving", "huggingface_hub"):
        logging.getLogger(name).error("%s: %s", name, NASTY)
    try:
        raise ValueError(NASTY)
    except ValueError:
        logging.getLogger("specexp").exception("failed")
    warnings.warn(NASTY)
    raise RuntimeError(NASTY)

app.app = lambda **options: speak()
app.main()
"""


def test_loggers_warnings_and_tracebacks_send_no_escapes():
    ran = subprocess.run([sys.executable, "-c", LOUD], capture_output=True)
    stderr = ran.stderr.decode(errors="surrogateescape")
    assert ran.returncode == 1
    assert harmless(stderr) == stderr
    assert stderr.count(SAFE) == 7, stderr


def test_name_of_a_stranger_s_tensor_sends_no_escapes(tiny_folders, tmp_path):
    folder = Path(shutil.copytree(tiny_folders[0], tmp_path / "mine"))
    tensors = load_file(folder / "model.safetensors") | {f"x{NASTY}": torch.zeros(1)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    words = ["-m", "specexp", "generate", "--target", folder, "--drafter", "ngram"]
    words += ["--prompt", "a", "--device", "cpu", "--max-new-tokens", "2"]
    ran = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert SAFE in ran.stderr
    assert harmless(ran.stderr) == ran.stderr


def test_names_of_a_server_s_experiments_send_no_escapes(store, monkeypatch, capsys):
    runs.log(NASTY.replace("\r", ""), {"drafter": "ngram"}, {"speedup/measured": 1.0})
    monkeypatch.setattr("os.execvpe", lambda *_: None)
    monkeypatch.setattr("os.chdir", lambda *_: None)
    mlflow_server.show(0)
    shown = capsys.readouterr().out
    assert "owned" in shown
    assert harmless(shown) == shown
