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


X = "Ab1" * 20
TOKENS = (
    f"hf_{X}", f"sk-proj-{X}", f"sk_live_{X}", "AKIA" + "A1" * 8, "ASIA" + "A1" * 8, f"AIza{X}",
    f"ghp_{X}", f"github_pat_{X}", f"glpat-{X}", f"npm_{X}", f"pypi-{X}", f"dckr_pat_{X}",
    f"xoxb-123-{X}", f"SG.{X}.{X}", f"eyJ{X}.{X}.{X}",
)  # fmt: skip


@pytest.mark.parametrize("token", TOKENS)
def test_token_is_known_by_its_shape(token):
    assert redact.hide(f"x = '{token}'") == f"x = '{redact.HIDDEN}'"
    assert redact.VALUE.search(token)


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        (f"Authorization: Bearer {X}", "Authorization: Bearer {}"),
        (f"https://x.blob/a?sv=1&sig={X}&x=1", "https://x.blob/a?sv=1&sig={}&x=1"),
        (f"https://{X}@host/repository", "https://{}@host/repository"),
        (f"AccountName=a;AccountKey={X};", "AccountName=a;{};"),
        ("https://user@host/x", "https://user@host/x"),
        ("the bearer of this, sk-short, key_of_map 0123456789abcdef0123456789abcdef", None),
    ],
)
def test_secret_in_its_place_is_hidden_and_plain_text_stays(text, safe):
    assert redact.hide(text) == (safe or text).replace("{}", redact.HIDDEN)


@pytest.mark.parametrize(
    "name",
    ["GH_PAT", "DB_PASS", "MY_PWD", "SSH_PASSPHRASE", "SIGNING_KEY", "SENTRY_DSN",
     "AWS_CREDENTIALS", "STORAGE_CONNECTION_STRING", "HF_TOKEN", "CLIENT_SECRET"],
)  # fmt: skip
def test_environment_value_is_secret_by_its_name(monkeypatch, name):
    monkeypatch.setenv(name, "correct horse battery")
    assert redact.hide("a correct horse battery b") == f"a {redact.HIDDEN} b"
