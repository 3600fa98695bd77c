"""Recognising secrets, and removing them from what is stored or shown."""

from __future__ import annotations

import json
import os
import re

NAME = re.compile(r"token$|secret|password|api_?key", re.IGNORECASE)
_KEY = "[A-Z ]*PRIVATE KEY"
# The lines of a key that was cut off before its end; in JSON, also across the strings of a list.
_CUT = r"""(?:[\w+/=\s-]|\\[nr]|",\s*"(?=[A-Za-z0-9+/=]{16,}(?:\\n)?"\s*[],]))"""
VALUE = re.compile(
    r"hf_\w{20,}|sk-[\w-]{20,}|AKIA[A-Z0-9]{12,}|eyJ[\w-]{10,}\.[\w-]{10,}"
    rf"|-----BEGIN{_KEY}(?:(?:(?!-----BEGIN)[^][{{}}])*?-----END{_KEY}(?:-----)?|{_CUT}*)"
)
PASSWORD = re.compile(r"(\w://[^\s:/@]*):\S+@")  # in an address
HIDDEN = "[hidden]"
REFUSED = "looks like a secret; parameters are stored in plain text: use an environment variable"
_SHORTEST = 8


def hide(text: str) -> str:
    """Replace the secrets in a text or JSON document by HIDDEN: what looks like a key or token,
    passwords in addresses, and the values of environment variables named like secrets."""
    for name, value in os.environ.items():
        if NAME.search(name) and len(value) >= _SHORTEST:
            escaped = (json.dumps(value, ensure_ascii=ascii)[1:-1] for ascii in (True, False))
            for written in (*escaped, value):
                text = text.replace(written, HIDDEN)
    return VALUE.sub(HIDDEN, PASSWORD.sub(rf"\1:{HIDDEN}@", text))
