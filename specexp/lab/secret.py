"""What looks like a secret, and how texts are kept free of it."""

from __future__ import annotations

import json
import os
import re

NAME = re.compile(r"token$|secret|password|api_?key", re.IGNORECASE)
_KEY = "[A-Z ]*PRIVATE KEY"
# Lines of a key without its end, in JSON too, where a quote ends a text or goes on with the next.
_CUT = r"""(?:[\w+/=\s-]|\\[nr]|",\s*"(?=[A-Za-z0-9+/=]{16,}(?:\\n)?"\s*[],]))"""
VALUE = re.compile(
    r"hf_\w{20,}|sk-[\w-]{20,}|AKIA[A-Z0-9]{12,}|eyJ[\w-]{10,}\.[\w-]{10,}"
    rf"|-----BEGIN{_KEY}(?:(?:(?!-----BEGIN)[^][{{}}])*?-----END{_KEY}(?:-----)?|{_CUT}*)"
)
PASSWORD = re.compile(r"(\w://[^\s:/@]*):\S+@")  # in an address
HIDDEN = "[hidden]"
_SHORTEST = 8


def hide(text: str) -> str:
    """The text, which may be JSON, without what has a secret's shape, a password in an address
    among them, or is the value of a variable named as one."""
    for name, value in os.environ.items():
        if NAME.search(name) and len(value) >= _SHORTEST:
            escaped = (json.dumps(value, ensure_ascii=ascii)[1:-1] for ascii in (True, False))
            for written in (*escaped, value):
                text = text.replace(written, HIDDEN)
    return VALUE.sub(HIDDEN, PASSWORD.sub(rf"\1:{HIDDEN}@", text))
