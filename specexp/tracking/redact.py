"""Recognising secrets, and removing them from what is stored or shown."""

import bz2
import contextlib
import gzip
import json
import lzma
import math
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import IO, Any

NAME = re.compile(
    r"token$|secret|passw(?:or)?d|passphrase|api_?key|_(?:pat|pass|pwd|key|dsn)$|dbpass|credential"
    r"|connection_?string",
    re.IGNORECASE,
)
SHAPES = (  # of tokens, by who issues them
    r"hf_(?:[A-Za-z0-9]{20,}|[a-z]+_eyJ[\w.-]{20,})|sk-[\w-]{20,}",  # model hubs
    r"(?:sk|rk)_(?:live|test)_\w{16,}|sq0[a-z]{3}-[\w-]{20,}|shp[a-z]{2}_[0-9a-fA-F]{32}",  # shops
    r"AIza[\w-]{30,}",  # clouds
    r"AccountKey=[\w+/=]{40,}|(?<=[?&]sig=)[\w%+/=-]{20,}",
    r"(?<![aeiou])gh[pousr]_\w{20,}|github_pat_\w{20,}|GR1348941[\w-]{20,}",  # code
    r"gl(?:pat|dt|ft|rt|cbt|ptt|oas|imt|agent|soat)-[\w-]{20,}|ATATT3[\w=-]{60,}|lin_api_\w{30,}",
    r"npm_\w{30,}|pypi-[\w-]{40,}|dckr_pat_[\w-]{20,}|rubygems_[0-9a-f]{40,}",  # packages
    r"(?:xox[a-z]|xapp)-[\w-]{10,}|hooks\.slack\.com/services/[\w/]{20,}",  # mail and chat
    r"SG\.[\w-]{16,}\.[\w-]{16,}|(?<=/bot)\d{8,10}:[\w-]{35}",
    r"(?<=wandb login )[0-9a-f]{40}|(?<=[Bb]earer )[\w.~+/-]{16,}=*",  # any
    r"(?<=[Cc]ookie: )[\w-]+=[\w.%+/=; -]{8,}",
)
WORDS = (  # the same of those that could also be inside another word or base64
    r"gsk_\w{20,}|r8_\w{30,}|pplx-\w{40,}|(?:nvapi|xai)-[\w-]{40,}",  # model hubs
    r"tgp_v1_[\w-]{40,}|csk-\w{40,}|fw_[A-Za-z0-9]{20,}!|tvly-[\w-]{20,}|pcsk_\w{40,}",
    r"wandb_v1_\w{40,}|lsv2_[ps][tk]_\w{32,}|gl(?:sa_\w{32}_[\da-f]{8}|c_eyJ[\w=-]{20,})",  # runs
    r"ntn_\w{40,}|figd_[\w-]{40,}|PMAK-[\da-f-]{50,}|sntry[su]_[\w=-]{40,}|sbp_[\da-f]{40}",
    r"EAAA[\w-]{56,64}!|(?:AC|SK)[0-9a-z]{32}!|[0-9a-z]{32}-us\d{1,2}!",  # payments, mail, chat
    r"\d{8,10}:[\w-]{35}!|[MNO](?=[\w-]*\d)[\w-]{23,27}\.[\w-]{6}\.[\w-]{27,}",
    r"(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{12,}!|ya29\.[\w-]{20,}|GOCSPX-[\w-]{20,}",  # clouds
    r"do[opr]_v1_\w{40,}|dapi[0-9a-f]{32}!",  # code
    r"hv[bs]\.[\w-]{20,}|AGE-SECRET-KEY-1[A-Z0-9]{50,}|dp\.[a-z]{2,5}\.\w{40,}",
    r"AKC[A-Za-z0-9]{60,80}!|AP[0-9A-F][A-Za-z0-9]{28,80}!|cio[A-Za-z0-9]{32}!",  # packages
    r"eyJ[\w-]{10,}\.[\w-]{10,}(?:\.[\w-]+)?",  # any
)
# Before a word: nothing, or the end of an escape in JSON, in an address or of a colour.
_START = r"(?:(?<![\w+/-])|(?<=\\[nrt])|(?<=%[\dA-F]{2})|(?<=[\[;]\dm)|(?<=[\[;]\d\dm))"
_WORD = _START + "(?:" + "|".join(WORDS).replace("!", r"(?![\w+/=-])") + ")"
_KEY = "[A-Z ]*PRIVATE KEY"
# The lines of a key that was cut off before its end; in JSON, also across the strings of a list.
_CUT = r"""(?:[\w+/=\s-]|\\[nr]|",\s*"(?=[A-Za-z0-9+/=]{16,}(?:\\n)?"\s*[],]))"""
VALUE = re.compile(
    rf"{'|'.join(SHAPES)}|{_WORD}|(?<=Private-Lines: ){_CUT}+"
    rf"|-----BEGIN{_KEY}(?:(?:(?!-----BEGIN)[^\]\[{{}}])*?-----END{_KEY}(?:-----)?|{_CUT}*)"
)
PASSWORD = re.compile(r"(\w://[^\s:/@]*):(?:(?!://)[^\s\"\\])+@")  # in an address
USER = re.compile(r"(\w://)[^\s:/@]{20,}@")  # a token in a user's place
_NAMES = (  # that end the name of a secret in a text
    r"(?:token|secret\w{0,30}|passw(?:or)?d\w{0,30}|passphrase|_(?:pat|pass|pwd|dsn)|(?<=db)pass"
    r"|(?<![a-z])(?-i:pwd)|authorization|credentials?|connection_?string"
    r"|(?:api|auth|access|private|signing|account|encryption)[_-]?key)"
)
_BARE = r"[^\]\[\s\"'\\,;<>(){}|&`]{8,}+(?![\[({<])"
NAMED = re.compile(  # a name and its value: name = "value", "name": "value", --name value
    rf"(?=[-%_ACPSTacpst])(?i:(?:--[\w-]{{0,30}}?{_NAMES}(?: +|=)|curl .{{0,99}}?-u \w{{1,40}}:"
    rf"|%(?:set_)?env +\w{{0,30}}?{_NAMES} +"
    rf"|{_NAMES}"
    r"(?:\\*[\"'])?\]?[ \t]{0,9}(?::[ \t]?\w{1,20}[ \t]?=|[:=]{1,2}>?)[ \t]{0,9})"
    r"(?:[bru]?(?P<quote>\\*[\"']))?(?:(?:basic|token|apikey) )?"
    rf"(?P<value>(?![$%])(?(quote)[^\s\"'\\<>{{}}]{{8,}}+(?=\\*[\"'])|{_BARE})))"
)
# Values that are none: words, numbers with a unit, and several of both, as in a path or a name.
_PART, _LINK = r"(?:[^\W\d_]+\d{0,3}|\d+[^\W\d_]{0,3})", r"(?:[^\w!#$^&?]|_)"
PLAIN = re.compile(rf"{_LINK}*(?:{_PART}(?:{_LINK}+{_PART})+|[^\W\d_]*|\d+[^\W\d_]{{0,3}}){_LINK}*")
MIXED = re.compile("[A-Za-z]*[A-Z][a-z][A-Z][A-Za-z]*")  # no word either, if in quotes
HIDDEN = "[hidden]"
REFUSED = "looks like a secret; parameters are stored in plain text: use an environment variable"
_SHORTEST = 8
MOST_BYTES = 100_000_000  # of a file that is rewritten; a larger one is only searched
_CODINGS = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}  # by how a text begins
_PRINTED = re.compile(rb"[\t\r\n -~]{8,}")


def hide(text: str, named: bool = True) -> str:
    """Replace the secrets in a text or JSON document by HIDDEN: what looks like a key or token,
    passwords in addresses, the values of environment variables named like secrets and, if `named`,
    values that the text itself names so."""
    for name, value in os.environ.items():
        if NAME.search(name) and len(value) >= _SHORTEST:
            escaped = (json.dumps(value, ensure_ascii=ascii)[1:-1] for ascii in (True, False))
            for written in (*escaped, value):
                text = text.replace(written, HIDDEN)
    for pattern, hidden in ((PASSWORD, rf"\1:{HIDDEN}@"), (USER, rf"\1{HIDDEN}@"), (VALUE, HIDDEN)):
        text = pattern.sub(hidden, text)
    return NAMED.sub(_without_value, text) if named else text


def _without_value(named: re.Match[str]) -> str:
    name = named[0].removesuffix(named["value"])
    return f"{name}{HIDDEN}" if _is_random(named) else named[0]


def _is_random(named: re.Match[str]) -> bool:
    return not PLAIN.fullmatch(named["value"]) or bool(
        named["quote"] and MIXED.fullmatch(named["value"])
    )


def is_secret(name: str, value: Any) -> bool:
    """Whether a value is a secret because of its name."""
    named = NAMED.search(f'{name}="{value}"') if isinstance(value, str) else None
    return bool(named and named.start() < len(name) and _is_random(named))


def hidden(value: Any, hide: Callable[[str], str] = hide) -> Any:
    """The value with the secrets hidden in all its texts, at any depth."""
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, Mapping):
        return {
            hidden(name, hide): HIDDEN if is_secret(name, part) else hidden(part, hide)
            for name, part in value.items()
        }
    return [hidden(part, hide) for part in value] if isinstance(value, list | tuple) else value


# --- files ---------------------------------------------------------------------------------------


def shows(content: bytes) -> bool:
    """Whether a secret can be read in bytes that are no text."""
    text = b"\n".join(_PRINTED.findall(content.replace(b"\0", b""))).decode()
    return hide(text, named=False) != text


def clean(file: Path) -> bool:
    """Hide the secrets in a text file or in a table's texts. Returns False if one can be read in a
    file that cannot be rewritten, or in what it has packed: of each part the first MOST_BYTES."""
    if file.stat().st_size <= MOST_BYTES:
        content = file.read_bytes()
        coding = _CODINGS.get(content[:2], "utf-8")
        with contextlib.suppress(UnicodeDecodeError):
            if "\0" not in (text := content.decode(coding)):
                if (safe := hide(text)) != text:
                    file.write_bytes(safe.encode(coding))
                return True
        if content.startswith(b"PAR1") and not _clean_table(file, content):
            return False
    with file.open("rb") as opened:
        if _is_shown_in(opened):
            return False
    return not any(_is_shown_in(part, MOST_BYTES) for part in _packed(file))


def _is_shown_in(opened: IO[bytes], most: float = math.inf) -> bool:
    before = b""
    with contextlib.suppress(Exception):  # of what is packed otherwise, or damaged: anything
        while most > 0 and (block := opened.read(2**20)):
            if shows(before + block):
                return True
            before, most = block[-10_000:], most - len(block)
    return False


def _packed(file: Path) -> Iterator[Any]:
    """A file unpacked in each way, most of which fail when they are read; and a zip's files."""
    for unpack in (gzip.open, bz2.open, lzma.open):
        with unpack(file) as part:
            yield part
    if zipfile.is_zipfile(file):
        with contextlib.suppress(Exception), zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                yield archive.open(name)


def _clean_table(file: Path, content: bytes) -> bool:
    """As `clean`, for a parquet file; one that cannot be read shows nothing here."""
    from pyarrow import BufferReader, array, parquet

    safe = True
    with contextlib.suppress(Exception):
        table = parquet.ParquetFile(BufferReader(content)).read()
        for number, field in enumerate(table.schema):
            texts = table[number].to_pylist() if "string" in str(field.type) else []
            if repr(replaced := hidden(texts, cache(hide))) != repr(texts):
                safe = False  # until it is written
                table = table.set_column(number, field, array(replaced, field.type))
        if not safe:
            parquet.write_table(table, file)
            safe = True
    return safe
