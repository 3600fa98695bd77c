"""What a model or a notebook writes reaches a terminal as text, whatever it holds."""

import io
import json

import pytest
from rich.live import Live
from rich.text import Text

from specexp.commands import options
from specexp.terminal import Terminal, harmless

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


def test_live_display_still_moves_the_cursor():
    file = io.StringIO()
    with Live(Text(NASTY), console=Terminal(file=file, force_terminal=True, width=200)) as live:
        live.update(Text("second\nline"))
    assert "\x1b[2J" not in file.getvalue()
    assert "\x1b[2K" in file.getvalue(), "its own control codes are gone"


def test_commands_write_through_it(capsys):
    assert isinstance(options.console, Terminal)
    options.complain("error", NASTY)
    assert "\x1b]0" not in capsys.readouterr().err


def test_json_on_a_terminal_holds_no_controls():
    text = options.json_text({"text": NASTY + "é漢"})
    assert harmless(text) == text
    assert "é漢" in text
    assert json.loads(text) == {"text": NASTY + "é漢"}
