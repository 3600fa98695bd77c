"""The command line, run in this process."""

import sys

import pytest

from specexp.commands import app


def ran(monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `specexp WORDS`."""
    monkeypatch.setattr(sys, "argv", ["specexp", *words])
    with pytest.raises(SystemExit) as stopped:
        app.main()
    return stopped.value.code or 0, *capsys.readouterr()
