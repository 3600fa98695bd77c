"""Secrets are removed from stored text, and JSON stays valid."""

import bz2
import gzip
import io
import json
import lzma
import zipfile

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
HEX, LOW = "0a1b2c3d" * 8, "0x1y2z3w" * 4
TOKENS = (
    f"hf_{X}", f"sk-proj-{X}", f"sk_live_{X}", "AKIA" + "A1" * 8, "ASIA" + "A1" * 8, f"AIza{X}",
    f"ghp_{X}", f"github_pat_{X}", f"glpat-{X}", f"npm_{X}", f"pypi-{X}", f"dckr_pat_{X}",
    f"xoxb-123-{X}", f"SG.{X}.{X}", f"eyJ{X}.{X}.{X}", f"hf_oauth_eyJ{X}.{X}.{X}",
    f"gsk_{X}", f"r8_{X}", f"nvapi-{X}", f"xai-{X}", f"pplx-{X}", f"EAAA{X}", f"sq0csp-{X}",
    f"shpat_{HEX[:32]}", f"AC{LOW}", f"SK{LOW}", f"{HEX[:32]}-us12", f"123456789:{X[:35]}",
    f"M{X[:23]}.{X[:6]}.{X[:27]}", f"ya29.{X}", f"GOCSPX-{X}", f"dop_v1_{HEX}", f"dapi{HEX[:32]}",
    f"hvs.{X}", f"AGE-SECRET-KEY-1{X[:58].upper()}", f"dp.pt.{X}", f"AKC{X}", f"AP6{X[:40]}",
    f"cio{X[:32]}", f"GR1348941{X[:20]}", f"glimt-{X}", f"glagent-{X}", f"glsoat-{X}",
    f"ATATT3{X}{X}", f"lin_api_{X}", f"rubygems_{HEX}", f"xapp-1-{X}", f"tgp_v1_{X}", f"csk-{X}",
    f"fw_{X}", f"tvly-{X}", f"pcsk_{X}", f"wandb_v1_{X}", f"lsv2_pt_{HEX[:32]}_{HEX[:10]}",
    f"glsa_{X[:32]}_{HEX[:8]}", f"glc_eyJ{X}==", f"ntn_{X}", f"figd_{X}", f"PMAK-{HEX[:24]}-{HEX}",
    f"sntrys_{X}", f"sbp_{HEX[:40]}",
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
        (f"wandb login {HEX[:40]}", "wandb login {}"),
        (f"Cookie: session={X}; csrf=1a", "Cookie: {}"),
        (f"https://api.telegram.org/bot123456789:{X[:35]}/me", "https://api.telegram.org/bot{}/me"),
        (f"Private-Lines: 1\n{X}\nPrivate-MAC: 12", "Private-Lines: {}: 12"),
        ('{"a":"http://host:80","b":"me@host"}', None),
        ("_hf_hub_download_to_cache_dir, test_round_weighs_draft_sizes_by_frequency", None),
        (f"iVBORw0KGgo/AP6{X[:40]}+AKC{X}/EAAA{X}", None),
        ("the bearer of this, sk-short, key_of_map 0123456789abcdef0123456789abcdef", None),
    ],
)
def test_secret_in_its_place_is_hidden_and_plain_text_stays(text, safe):
    assert redact.hide(text) == (safe or text).replace("{}", redact.HIDDEN)


@pytest.mark.parametrize(
    "name",
    ["GH_PAT", "DB_PASS", "PGDBPASS", "MY_PWD", "SSH_PASSPHRASE", "SIGNING_KEY", "SENTRY_DSN",
     "AWS_CREDENTIALS", "STORAGE_CONNECTION_STRING", "HF_TOKEN", "CLIENT_SECRET"],
)  # fmt: skip
def test_environment_value_is_secret_by_its_name(monkeypatch, name):
    monkeypatch.setenv(name, "correct horse battery")
    assert redact.hide("a correct horse battery b") == f"a {redact.HIDDEN} b"


V = "pz7XDhKPdy/fJg+q"


@pytest.mark.parametrize(
    "text",
    ['password = "{}"', "password: str = '{}'  # mine", "secret: {}", 'api_key="{}"',
     "db_pass='{}'",
     '{"auth_token": "{}", "n": 1}', 'os.environ["MY_TOKEN"] = "{}"', "curl -u me:{} https://host",
     "run --password {} now", "--hub-token={}", "WANDB_API_KEY={}\n", "x?access_token={}&n=1",
     "Authorization: Basic {}==", '"Authorization": "Basic {}"', "X-API-Key: {}",
     "if pwd := 1, x_pwd={}", "pwd = '{}'", "dbpass={}", 'auth_key: "{}"', "%env MY_TOKEN {}",
     "aws_secret_access_key = {}", "//registry.npmjs.org/:_authToken={}", "token = b'{}'"],
)  # fmt: skip
def test_value_is_hidden_for_its_name(text):
    for value in (V, "hunter2hunter2", "1b4e28ba-2fa1-11d2-883f-0016d3cca427"):
        said = text.replace("{}", value)
        assert redact.hide(said).rstrip("=") == text.replace("{}", redact.HIDDEN).replace("==", "")
        assert json.loads(redact.hide(json.dumps([said]))) == [redact.hide(said)]
        assert redact.hide(redact.hide(said)) == redact.hide(said)


@pytest.mark.parametrize(
    "text",
    ["token: 12", "tokens=64", "max_new_tokens = 128, tokens_per_pass: 3.25x",
     "the password is weak",
     "password = input('your password? ')", "password=getpass.getpass2you()",
     "a secret: whatever is",
     "token = tokenizer.decode(ids[0])", "token = sampled_tokens2[position]",
     "next_token = layer2_token",
     "password = None", "secret=os.environ['HF_TOKEN2']", "token=$HF_TOKEN_2",
     'token="${HF_TOKEN_2}"',
     'token="<your token 1>"', "password: ********", "api_key = 'xxxxxxxxxxxx'", "secret: [hidden]",
     'pad_token="<|endoftext1|>"', '{"token": "\u2581international", "p": 0.5}',
     'token: "def f2(x): y"',
     "token: +implementation", "time per token: 12.345ms/pass, 0.0123±0.001s", "token=0.00012345",
     "secret_file: /run/secrets/db_password1", "api_key = 'YOUR_API_KEY_2'", "token: Qwen3-0.6B",
     "PWD=/srv/me2/x_1a2b3c4d, OLDPWD=/var/ab12cd34e", "%env -v TOKEN", "the cookie: a wafer",
     '"run_key": "93df95c63d4c12dd"', "key = 93df95c63d4c12dd", "token: List2[Token]",
     "token: 1234567890"],
)  # fmt: skip
def test_plain_words_numbers_and_code_stay(text):
    for said in (text, json.dumps([text])):
        assert redact.hide(said) == said


def test_letters_in_random_case_are_a_secret_in_quotes_only():
    assert redact.hide('password = "pzXDhKPdyfJg"') == f'password = "{redact.HIDDEN}"'
    assert redact.hide("password = PyTorchSecret") == "password = PyTorchSecret"


def test_named_value_is_hidden_in_a_record():
    record = {
        "api_key": V,
        "token": "plainword",
        "how": [{"password": V}],
        "run_key": V,
        "token_n": 1,
    }
    safe = record | {"api_key": redact.HIDDEN, "how": [{"password": redact.HIDDEN}]}
    assert redact.hidden(record) == safe
    assert redact.is_secret("api_key", V)
    assert not redact.is_secret("how", f"password={V}")


@pytest.mark.parametrize(
    "part",
    ["eyJ", "a://b:", "token", "token=", 'token="', "--token", "%env ", "Cookie: a=", "pwd",
     "A", "1", "M1-", "\\nM1",
     "\x1b[1meyJ",
     "Private-Lines: ", "-----BEGIN PRIVATE KEY", "curl -u a", "secret_", "x:1/2 ", "{[", "a@b"],
)  # fmt: skip
@pytest.mark.timeout(30)
def test_a_long_line_takes_time_in_proportion_to_its_length(part):
    redact.hide(part * (200_000 // len(part)))


# --- files ---------------------------------------------------------------------------------------

TOKEN = f"ghp_{X}"


@pytest.mark.parametrize(
    ("coding", "spaces"),
    [("utf-8", 9), ("utf-16-le", 9), ("utf-16-be", 9),
     pytest.param("utf-8", 11_000_000, marks=pytest.mark.slow)],
)  # fmt: skip
def test_text_of_any_coding_and_size_is_cleaned(tmp_path, coding, spaces):
    text = "\ufeff" * (coding != "utf-8") + "tür {}\r\n" + " " * spaces
    file = tmp_path / "own.txt"
    file.write_bytes(text.replace("{}", TOKEN).encode(coding))
    assert redact.clean(file)
    assert file.read_bytes().decode(coding) == text.replace("{}", redact.HIDDEN)


def test_texts_of_a_table_are_cleaned_and_its_types_and_index_stay(tmp_path):
    import pandas as pd

    def table(token):
        nested = [[{"a": [token, None]}], []]
        index = pd.Index([token, "b"], name="i")
        columns = {"t": [token, "b"], "n": [1, 2], "kind": pd.Categorical([token, "b"])}
        return pd.DataFrame({**columns, "nested": nested}, index=index)

    file = tmp_path / "own.parquet"
    table(TOKEN).to_parquet(file)
    assert redact.clean(file)
    pd.testing.assert_frame_equal(pd.read_parquet(file), pd.read_parquet(kept(table, tmp_path)))
    before = file.read_bytes()
    assert redact.clean(file)
    assert file.read_bytes() == before, "nothing to hide: left as it is"


def test_description_of_a_table_in_base64_is_no_secret(tmp_path):
    """A parquet file holds its schema so; it may read `ABIAQAAFAEAAOAAAAC`."""
    import pandas as pd

    names = "load repeat question_id turn same s ttft_s tokens later"
    names += " plain_s plain_ttft_s plain_tokens plain_later"
    kinds = dict.fromkeys(names.split(), "int64") | {"same": "bool"}
    kinds |= dict.fromkeys(["s", "ttft_s", "plain_s", "plain_ttft_s"], "float64")
    file = tmp_path / "own.parquet"
    pd.DataFrame(dict.fromkeys(kinds, range(40))).astype(kinds).to_parquet(file)
    assert b"ABIAQAAFAEAAOAAAAC" in file.read_bytes()
    assert redact.clean(file)


def kept(table, folder):
    file = folder / "safe.parquet"
    table(redact.HIDDEN).to_parquet(file)
    return file


def test_binary_file_that_shows_a_secret_is_known_and_another_is_not(tmp_path, monkeypatch):
    import pickle

    import numpy as np

    file = tmp_path / "own"
    noise = np.random.default_rng(0).bytes(3_000_000)
    for content, safe in (
        (pickle.dumps({"t": TOKEN}), False), (noise + TOKEN.encode() + noise, False),
        (b"\0\0" + TOKEN.encode("utf-16-le"), False), (b"PAR1" + TOKEN.encode() + b"\xff", False),
        (noise, True), (pickle.dumps({"password": "a plain word"}), True), (b"PAR1" + noise, True),
    ):  # fmt: skip
        file.write_bytes(content)
        assert redact.clean(file) == safe
        assert file.read_bytes() == content
    monkeypatch.setattr(redact, "MOST_BYTES", 100)
    file.write_text(f"{'z' * (2**20 - 20)} {TOKEN}")
    assert not redact.clean(file), "larger than what is rewritten, and across two blocks"


def zipped(content: bytes) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("empty", b"")
        archive.writestr("in/own", content)
    return packed.getvalue()


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, zipped])
def test_packed_file_that_shows_a_secret_is_known_and_a_damaged_or_safe_one_stays(tmp_path, pack):
    file = tmp_path / "own"
    packed = pack(f"{'plain words ' * 100_000}{TOKEN}".encode())
    for content, safe in ((packed, False), (packed[:40], True), (pack(b"plain words"), True)):
        file.write_bytes(content)
        assert redact.clean(file) == safe
        assert file.read_bytes() == content
