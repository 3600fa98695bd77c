"""What a grid keeps of a point holds no secrets that its notebook printed, logged or wrote."""

import json

import nbformat
import pandas as pd
import pytest

from specexp.grids import execute
from specexp.grids.progress import Failure
from specexp.tracking import runs

TOKEN, WORD = f"ghp_{'A1b2C3d4' * 5}", "correct horse battery"
BINARY = b"\xff\x00" + TOKEN.encode()


@pytest.mark.parametrize("fails", [False, True])
def test_notebook_log_result_tables_and_own_files_of_a_point(points, tmp_path, monkeypatch, fails):
    [point] = points(x=[1])
    folder = tmp_path / "attempt"
    folder.mkdir()
    monkeypatch.setenv("MY_PASSWORD", WORD)
    monkeypatch.setenv("SPECEXP_ATTEMPT", str(folder))

    def ran(*_):
        cell = nbformat.v4.new_code_cell(f"say('{TOKEN}')", execution_count=1)
        said = {"output_type": "stream", "name": "stdout", "text": f"{WORD}, {TOKEN}"}
        cell.outputs = [nbformat.from_dict(said)]
        nbformat.write(nbformat.v4.new_notebook(cells=[cell]), folder / execute.NOTEBOOK)
        (folder / execute.LOG).write_text(f"{WORD}\n{TOKEN}\x1b[2J\n")
        params = {**point.params, "how": TOKEN}
        tables = {"rows": pd.DataFrame({"text": [WORD]})}
        runs.log("mine", params, {"a/b": 1.0}, tags={"why": WORD}, tables=tables)
        (folder / "more").mkdir()
        (folder / "more" / "own.txt").write_text(f"kept\r\n{TOKEN}")
        (folder / "own.bin").write_bytes(BINARY)
        (folder / "own.npy").write_bytes(BINARY[:2])
        pd.DataFrame({"text": [f"{TOKEN} {n}" for n in range(9)]}).to_parquet(
            folder / "own.parquet"
        )
        (folder / "own16.txt").write_text(TOKEN, encoding="utf-16")
        (folder / f"{TOKEN}.txt").write_text("its name")
        (folder / TOKEN).mkdir()
        (folder / TOKEN / "in.txt").write_text("the name of its folder")
        if fails:
            raise Failure("error", "it fails")

    monkeypatch.setattr(execute, "_run", ran)
    monkeypatch.setattr(execute, "_check", lambda *_: None)
    try:
        execute.execute(point, folder, None)
    except Failure:
        assert fails
    files = {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert {execute.NOTEBOOK, execute.PAGE, execute.LOG, "result.json", "rows.parquet"} < {*files}
    for secret in (TOKEN, WORD):
        assert [name for name, content in files.items() if secret.encode() in content] == []
    assert not [path for path in folder.rglob("*") if TOKEN in path.name]
    assert "own.bin" not in files, "it cannot be rewritten"
    for name in ("own.bin", "[hidden]", "[hidden].txt"):
        line = f"\n[left out, as it shows a secret: {name}]\n"
        assert files[execute.LOG].decode().count(line) == 1
    assert files["own.npy"] == BINARY[:2]
    assert files["own16.txt"].decode("utf-16") == "[hidden]"
    assert [*pd.read_parquet(folder / "own.parquet")["text"]] == [f"[hidden] {n}" for n in range(9)]
    assert files["own.txt"] == b"kept\r\n[hidden]"
    assert json.loads(files["result.json"])["params"]["how"] == "[hidden]"
    assert b"[hidden]" in files[execute.PAGE]
