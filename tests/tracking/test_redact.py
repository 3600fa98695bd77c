"""Secrets are removed from stored text, and JSON stays valid."""

import json

import pytest

from specexp.tracking import redact

BODY = [f"MIIEvQIBADANBgkqhkiG9w0BAQEFAASC{n:030}+/=\n" for n in range(3)]
BEGIN, END = "-----BEGIN RSA PRIVATE KEY-----\n", "-----END RSA PRIVATE KEY-----\n"
WHOLE = [BEGIN, "Proc-Type: 4,ENCRYPTED\n", *BODY, END]


@pytest.mark.parametrize("key", [WHOLE, [BEGIN, *BODY], [BEGIN]])
@pytest.mark.parametrize("kept", ["text", "json", "lines"])
def test_private_key_is_hidden_to_its_last_line(key, kept):
    said = ["before \n", *key, '"after"\n']
    text = {"text": "".join(said), "json": json.dumps(["".join(said)]), "lines": json.dumps(said)}
    safe = redact.hide(text[kept])
    told = safe if kept == "text" else "".join(json.loads(safe))
    assert told.startswith(f"before \n{redact.HIDDEN}")
    assert "PRIVATE" not in told
    assert "MII" not in told
    assert '"after"' in told


def test_hiding_keys_keeps_json_valid():
    code = 'if "-----BEGIN PRIVATE KEY-----" in text or text.endswith("-----END PRIVATE KEY-----"):'
    for said in (code, code.partition(" or ")[0], [code], {"a": code[:34], "b": code}):
        assert redact.HIDDEN in str(json.loads(redact.hide(json.dumps(said))))


def test_hidden_key_stays_within_its_cell():
    cells = [{"source": [BEGIN]}, {"source": ["x = 1"]}, {"source": [END]}]
    assert json.loads(redact.hide(json.dumps(cells)))[1] == cells[1]


@pytest.mark.parametrize("value", ['pass"word\\', "line one\nline two", "tür und tor"])
def test_environment_secret_is_hidden_in_json(monkeypatch, value):
    monkeypatch.setenv("MY_PASSWORD", value)
    wanted = [f"is {redact.HIDDEN}"]
    assert redact.hide(f"is {value}") == wanted[0]
    for ascii in (True, False):
        assert json.loads(redact.hide(json.dumps([f"is {value}"], ensure_ascii=ascii))) == wanted
