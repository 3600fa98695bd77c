"""What looks like a secret, and how texts are kept free of it."""

from __future__ import annotations

import os
import re

NAME = re.compile(r"token$|secret|password|api_?key", re.IGNORECASE)
VALUE = re.compile(
    r"hf_\w{20,}|sk-[\w-]{20,}|AKIA[A-Z0-9]{12,}|-----BEGIN[A-Z ]*PRIVATE KEY"
    r"|eyJ[\w-]{10,}\.[\w-]{10,}"
)
PASSWORD = re.compile(r"(\w://[^\s:/@]*):\S+@")  # in an address
HIDDEN = "[hidden]"
_SHORTEST = 8


def hide(text: str) -> str:
    """The text without what has a secret's shape, a password in an address among them, or is the
    value of a variable named as one."""
    for name, value in os.environ.items():
        if NAME.search(name) and len(value) >= _SHORTEST:
            text = text.replace(value, HIDDEN)
    return VALUE.sub(HIDDEN, PASSWORD.sub(rf"\1:{HIDDEN}@", text))
