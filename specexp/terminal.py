"""A console on which no text of a model, a prompt or a notebook can act as a command.

Escape sequences in a text could recolour, overwrite or retitle a terminal, and bidirectional
controls reorder a line so that it reads as what it is not. They are shown as symbols.
"""

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment
from rich.table import Column, Table

ROWS = 100  # of a table
WIDE = 200  # columns of a file
_BIDI = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_SURROGATES = range(0xD800, 0xE000)  # so Python keeps a byte that is no UTF-8; cannot be printed
_SYMBOLS = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: 0x2421,
    **dict.fromkeys([*range(0x80, 0xA0), *_BIDI, *_SURROGATES], 0xFFFD),
}


def harmless(text: str) -> str:
    """The text with a symbol for each control character but line ends and tabs."""
    return text.translate(_SYMBOLS)


_FORMAT = warnings.formatwarning


class Record(logging.LogRecord):
    """A message of any library's logger, which may quote a stranger's file."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.exc_info and self.exc_info[0]:
            self.exc_text = harmless("".join(traceback.format_exception(*self.exc_info)).rstrip())

    def getMessage(self) -> str:  # noqa: N802
        return harmless(super().getMessage())


def guard() -> None:
    """Make harmless what any library logs or warns of in this process from now on."""
    logging.setLogRecordFactory(Record)
    warnings.formatwarning = _warning


def _warning(*args: Any, **kwargs: Any) -> str:
    return harmless(_FORMAT(*args, **kwargs))


def died(*error: Any) -> None:
    """Write the traceback of an exception that nothing catches: `sys.excepthook`."""
    sys.stderr.write(harmless("".join(traceback.format_exception(*error))))


def table(title: str, *columns: str) -> Table:
    """An empty table of numbers behind the names in its first column."""
    rows = listing(*columns, title=title, title_justify="left", title_style="")
    for column in rows.columns[1:]:
        column.justify = "right"
    return rows


def listing(*columns: str, **options: Any) -> Table:
    """An empty table of words, none of which is cut in a narrow terminal."""
    named = (Column(name, overflow="fold") for name in columns)
    return Table(*named, box=None, header_style="bold", **options)


class Terminal(Console):
    """A rich console whose own colours and cursor moves are the only ones. What goes to a file or
    a pipe is not cut to the width of a screen, unless COLUMNS gives one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if not (self.is_terminal or "COLUMNS" in os.environ):
            self.width = WIDE

    def render(self, *args: Any, **kwargs: Any) -> Iterable[Segment]:
        for text, style, control in super().render(*args, **kwargs):
            yield Segment(text if control else harmless(text), style, control)
