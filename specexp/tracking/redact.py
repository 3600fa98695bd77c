"""Recognising secrets, and removing them from what is stored or shown."""

import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

NAME = re.compile(
    r"token$|secret|passw(?:or)?d|passphrase|api_?key|_(?:pat|pass|pwd|key|dsn)$|credential"
    r"|connection_?string",
    re.IGNORECASE,
)
SHAPES = (  # of tokens, by who issues them
    r"hf_\w{20,}|sk-[\w-]{20,}|(?:sk|rk)_(?:live|test)_\w{16,}",  # model hubs, payments
    r"(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{12,}|AIza[\w-]{30,}",  # clouds
    r"AccountKey=[\w+/=]{40,}|(?<=[?&]sig=)[\w%+/=-]{20,}",
    r"gh[pousr]_\w{20,}|github_pat_\w{20,}|gl(?:pat|dt|ft|rt|cbt|ptt|oas)-[\w-]{20,}",  # code
    r"npm_\w{30,}|pypi-[\w-]{40,}|dckr_pat_[\w-]{20,}",  # packages
    r"xox[a-z]-[\w-]{10,}|hooks\.slack\.com/services/[\w/]{20,}|SG\.[\w-]{16,}\.[\w-]{16,}",  # mail
    r"eyJ[\w-]{10,}\.[\w-]{10,}(?:\.[\w-]+)?|(?<=[Bb]earer )[\w.~+/-]{16,}=*",  # any
)
_KEY = "[A-Z ]*PRIVATE KEY"
# The lines of a key that was cut off before its end; in JSON, also across the strings of a list.
_CUT = r"""(?:[\w+/=\s-]|\\[nr]|",\s*"(?=[A-Za-z0-9+/=]{16,}(?:\\n)?"\s*[],]))"""
VALUE = re.compile(
    rf"{'|'.join(SHAPES)}|-----BEGIN{_KEY}(?:(?:(?!-----BEGIN)[^][{{}}])*?-----END{_KEY}(?:-----)?|{_CUT}*)"
)
PASSWORD = re.compile(r"(\w://[^\s:/@]*):\S+@")  # in an address
USER = re.compile(r"(\w://)[^\s:/@]{20,}@")  # a token in a user's place
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
    for pattern, hidden in ((PASSWORD, rf"\1:{HIDDEN}@"), (USER, rf"\1{HIDDEN}@"), (VALUE, HIDDEN)):
        text = pattern.sub(hidden, text)
    return text


def hidden(value: Any, hide: Callable[[str], str] = hide) -> Any:
    """The value with the secrets hidden in all its texts, at any depth."""
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, Mapping):
        return {hidden(name, hide): hidden(part, hide) for name, part in value.items()}
    return [hidden(part, hide) for part in value] if isinstance(value, list | tuple) else value
