"""Grid files: which points they mean, and how bad ones are rejected before anything runs."""

import json
import re
import textwrap
import tracemalloc
from pathlib import Path

import pytest
import torch
import yaml
from conftest import TRIVIAL, also, one_in, tiny_llama
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.problems import problems

from specexp import api
from specexp.errors import UserError
from specexp.grids import grid_file, notebooks, paths, yaml_lines
from specexp.grids import points as grid
from specexp.measure import parameters
from specexp.measure.parameters import Problem
from specexp.models.load import read_tokenizer

ACCEPTANCE = grid_file.ROOT / "notebooks" / "10_acceptance.ipynb"
GRIDS = sorted((grid_file.ROOT / "notebooks" / "grids").glob("*.yaml"))
PARAMETERS = """\
x: int = 1  # a number
how: str = "well"  # how the run ends
rate: float = 1.0  # a rate
seed: int = 0  # of nothing
names: list = ["a"]  # some names
rates: list = [0.0, 0.5]  # some rates
flag: bool = False  # a flag
maybe: str | None = None  # or nothing
"""


def write(path: Path, *cells: str | dict, parameters: str | None = PARAMETERS, **metadata) -> Path:
    """A notebook with a parameters cell and code cells, as JupyterLab saves it."""
    tagged = [] if parameters is None else [{"source": parameters, "tags": ["parameters"]}]
    made = []
    for cell in [*tagged, *cells]:
        cell = cell if isinstance(cell, dict) else {"source": cell}
        source = cell["source"].splitlines(keepends=True)
        kind = cell.get("cell_type", "code")
        made.append(
            {"cell_type": kind, "source": source, "metadata": {"tags": cell.get("tags", [])}}
            | ({"outputs": [], "execution_count": None} if kind == "code" else {})
        )
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "cells": made} | metadata))
    return path


@pytest.fixture
def folder(tmp_path):
    """A folder for grids, beside a notebook whose cells read every parameter."""
    (tmp_path / "grids").mkdir()
    write(tmp_path / "reader.ipynb", "print(x, how, rate, seed, names, rates, flag, maybe)")
    write(tmp_path / "sized.ipynb", "print(max_new_tokens)", parameters="max_new_tokens: int = 3")
    return tmp_path / "grids"


@pytest.fixture
def load(folder):
    def call(text: str | bytes | dict, **options) -> list[grid.Point]:
        file = folder / "g.yaml"
        if isinstance(text, dict):
            text = yaml.safe_dump(text)
        file.write_bytes(text if isinstance(text, bytes) else textwrap.dedent(text).encode())
        return grid.load([file], **options)

    return call


def refusal(load, text, **options) -> list[str]:
    """The lines of the error without the file name: `3: what is wrong`."""
    with pytest.raises(UserError) as refused:
        load(text, **options)
    return [re.sub(r"^.*g\.yaml:(?=\d+: )", "", line) for line in str(refused.value).split("\n")]


GOOD = {"notebook": "../reader.ipynb", "experiment": "trivial", "grid": {"x": [1, 2]}}
HEAD = "notebook: ../reader.ipynb\n"
FUZZ = {"suppress_health_check": [HealthCheck.function_scoped_fixture]}


# --- what runs -----------------------------------------------------------------------------------


def test_load_crosses_axes_and_seeds_then_excludes_and_includes(load):
    points = load(
        {
            **GOOD,
            "fixed": {"rate": 2},
            "grid": {"x": [1, 2], "how": ["well", "raises"]},
            "seeds": [0, 1],
            "exclude": [{"x": 2, "how": "raises"}],
            "include": [{"x": 9}],
        }
    )
    assert len(points) == 2 * 2 * 2 - 2 + 1
    assert {p.params["x"] for p in points} == {1, 2, 9}
    assert all(p.params["rate"] == 2.0 and isinstance(p.params["rate"], float) for p in points)
    assert points[-1].params == {
        "x": 9, "how": "well", "rate": 2.0, "seed": 0, "names": ["a"], "rates": [0.0, 0.5],
        "flag": False, "maybe": None,
    }  # fmt: skip
    assert "x=9" in points[-1].label


def test_exclude_matches_default_values(load):
    text = HEAD + "grid: {x: [1, 2]}\nexclude: [{x: 1, how: well}]"
    assert [p.params["x"] for p in load(text)] == [2]


def test_include_without_grid_adds_no_product(load):
    assert [p.params["x"] for p in load(HEAD + "include: [{x: 5}, {x: 6}]")] == [5, 6]


def test_ints_in_a_list_of_floats_become_floats(load):
    [one] = load(HEAD + "fixed: {rates: [0, 1]}")
    [two] = load(HEAD + "fixed: {rates: [0.0, 1.0]}")
    assert one.params["rates"] == [0.0, 1.0]
    assert all(isinstance(rate, float) for rate in one.params["rates"])
    assert one.run_key == two.run_key


def test_load_merges_the_same_point_of_two_files(folder):
    files = [folder / "a.yaml", folder / "b.yaml"]
    for file in files:
        file.write_text(yaml.safe_dump(GOOD))
    assert len(grid.load(files)) == 2


def test_shipped_grids_are_valid(tmp_path, monkeypatch):
    here = [file for file in GRIDS if file.name != "real.yaml"]
    assert len(here) >= 6
    assert len(grid.load(here)) > 20
    monkeypatch.setenv("SPECEXP_MLRUNS", str(tmp_path))
    [real] = set(GRIDS) - set(here)
    with pytest.raises(
        UserError, match="smollm2 is not here yet: specexp zoo fetch smollm2"
    ) as all_:
        grid.load([real])
    assert len(str(all_.value).splitlines()) <= 4


# --- identity ------------------------------------------------------------------------------------


def test_run_key_covers_every_parameter_and_is_repeatable(load):
    one, two = load(GOOD)
    assert set(one.params) == set(notebooks.read(one.notebook).parameters)
    assert one.run_key != two.run_key
    assert [p.run_key for p in load(GOOD)] == [one.run_key, two.run_key]


def test_run_key_ignores_defaults_spelt_out(load):
    spelt = {**GOOD, "fixed": {"how": "well", "rate": 1}}
    assert [p.run_key for p in load(spelt)] == [p.run_key for p in load(GOOD)]
    other = {**GOOD, "fixed": {"how": "raises"}}
    assert {p.run_key for p in load(other)}.isdisjoint({p.run_key for p in load(GOOD)})


# --- how many, and which -------------------------------------------------------------------------


MANY_POINTS = HEAD + f"grid:\n  x: {list(range(101))}\nseeds: {list(range(10))}"


def test_more_than_1000_points_need_confirmation(load):
    asked = []
    points = load(MANY_POINTS, ask=lambda n: not asked.append(n))
    assert asked == [len(points)] == [1010]
    for ask in (None, lambda n: False):
        [said] = refusal(load, MANY_POINTS, ask=ask)
        for word in ("1,010 points", "x 101 x seed 10", "--yes"):
            assert word in said


def test_excluded_and_filtered_points_are_not_counted(load):
    excluded = MANY_POINTS + "\nexclude: [{x: 100}]"
    assert len(load(excluded)) == 1000
    assert len(load(MANY_POINTS, only=["seed=0,1"])) == 202


def test_too_large_grid_is_refused_unless_only_narrows_it(load):
    axes = "".join(f"  {name}: {list(range(300))}\n" for name in ("x", "seed", "rate"))
    [said] = refusal(load, HEAD + "grid:\n" + axes, ask=lambda n: True)
    assert said.startswith("2: 27,000,000 points")
    assert len(load(HEAD + "grid:\n" + axes, only=["x=7", "seed=1,2", "rate=0"])) == 2


CHOSEN = {
    "x=2": 2,
    "x=1,2": 4,
    "how=well": 2,
    'how="well"': 2,
    "how='a,b'": 0,
    "how=a,b": 2,
    "rate=1": 4,
    "rate=1.0e+0": 4,
    "names=a": 4,
    "names=[a]": 4,
    "flag=false": 4,
    "maybe=null": 4,
    "how=well|x=2": 1,
}


@pytest.mark.parametrize("asked", CHOSEN)
def test_only_selects_points_by_value(load, asked):
    axes = {"x": [1, 2], "how": ["well", "a,b"]}
    points = load(GOOD | {"grid": axes}, only=asked.split("|")) if CHOSEN[asked] else []
    assert len(points) == CHOSEN[asked]
    if not points:
        [said] = refusal(load, GOOD | {"grid": {"x": [1]}}, only=[asked])
        assert "no point has how a,b" in said


@pytest.mark.parametrize(
    ("asked", "chosen"), [("null", None), ("1, 2", [1, 2]), ("['a b', c]", ["a b", "c"])]
)
def test_only_selects_lists_and_their_absence(load, folder, asked, chosen):
    write(folder / "lists.ipynb", "print(xs)", parameters="xs: list | None = None")
    spec = {"notebook": "lists.ipynb", "grid": {"xs": [None, [1, 2], ["a b", "c"]]}}
    assert [p.params["xs"] for p in load(spec, only=[f"xs={asked}"])] == [chosen]


def test_labels_differ_where_only_the_ends_of_long_values_or_the_grids_do(folder):
    long = [f"{'deep/' * 20}{name}" for name in "ab"]
    files = [folder / "one.yaml", folder / "two.yaml"]
    for x, file in enumerate(files):
        file.write_text(yaml.safe_dump(GOOD | {"fixed": {"x": x}, "grid": {"how": long}}))
    labels = [point.label for point in grid.load(files)]
    assert len({*labels}) == 4
    assert labels[0].startswith("one how=deep/deep/")


def test_only_filters_includes_and_drops_other_notebooks(folder):
    write(folder / "other.ipynb", "print(y)", parameters="y: int = 1")
    (folder / "a.yaml").write_text(HEAD + "grid: {x: [1]}\ninclude: [{x: 5}, {x: 6}]")
    (folder / "b.yaml").write_text("notebook: other.ipynb\ngrid: {y: [1, 2]}")
    files = [folder / "a.yaml", folder / "b.yaml"]
    assert len(grid.load(files)) == 5
    assert [p.params["x"] for p in grid.load(files, only=["x=1,6"])] == [1, 6]
    assert [p.params["y"] for p in grid.load(files, only=["y=2"])] == [2]


WRONG_ONLY = {
    "x": "write NAME=VALUE",
    "=3": "write NAME=VALUE",
    "x=": "write NAME=VALUE",
    "hwo=well": "did you mean 'how'?",
    "zzz=1": "choose from x, how",
    "x=3": "no point has x 3; choose from 1, 2",
    "x=two": "no point has x two",
    "x=1.5": "no point has x 1.5",
    "how=wel": "did you mean 'well'?",
    "x=012": "no point has x 012",
    "names=b": "no point has names b; choose from ['a']",
    "how=\x1b[31m": "no point has how '\\x1b[31m'",
}


@pytest.mark.parametrize("text", WRONG_ONLY)
def test_only_rejects_unknown_names_and_values(load, text):
    [said] = refusal(load, GOOD, only=[text])
    assert WRONG_ONLY[text] in said
    assert said.isprintable()


def test_problem_of_a_point_chosen_by_only_has_its_line(load, monkeypatch):
    monkeypatch.setattr(
        parameters,
        "problems_of",
        lambda params, *_: [Problem("x is 9", ("x",))] if params["x"] == 9 else [],
    )
    text = HEAD + "grid:\n  x: [1,\n   9]\n  how: [a, b]\ninclude:\n- {x: 2}\n- {x: 9, how: c}"
    assert refusal(load, text, only=["x=9", "how=a"]) == ["4: x is 9"]
    assert refusal(load, text, only=["how=c"]) == ["8: x is 9"]


def test_only_rejects_filters_that_match_no_point(load):
    [said] = refusal(load, GOOD, only=["x=1", "x=2"])
    assert "no point" in said


# --- what is refused -----------------------------------------------------------------------------


BIG = 99999999999999999999
BAD = {
    # YAML itself
    "syntax": ("notebook: a\ngrid: [", 2, "is not YAML"),
    "open quote": (HEAD + "fixed: {how: 'a}\n\n", 2, "unexpected end"),
    "open bracket": (HEAD + "grid: {x: [1,\n2], how", 2, "is not YAML"),
    "dangling": (HEAD + "grid:\n   x: [1]\n  how: [a]", 4, "starts on line"),
    "tab": ("notebook:\n\t- a", 2, "tab"),
    "tab in a mapping": (HEAD + "grid:\n\tx: [1]", 3, "tab"),
    "empty": ("", 1, "is empty"),
    "only comments": ("# nothing\n# here\n", 1, "is empty"),
    "list at top": ("- a\n- b", 1, "is not a mapping"),
    "text at top": ("hello", 1, "is not a mapping"),
    "number at top": ("3", 1, "is not a mapping"),
    "duplicate key": (HEAD + "grid: {x: [1]}\ngrid: {x: [2]}", 3, "twice, first on line 2"),
    "duplicate parameter": (HEAD + "grid:\n  x: [1]\n  x: [2]", 4, "twice, first on line 3"),
    "duplicate deep down": (HEAD + "include:\n- x: 5\n  x: 6", 4, "twice, first on line 3"),
    "crlf": (HEAD + "grid:\r\n  x: [1]\r\n  x: [2]\r\n", 4, "twice"),
    "bom": (b"\xef\xbb\xbf" + HEAD.encode() + b"gird: 1", 2, "did you mean 'grid'"),
    "python tag": (HEAD + "fixed: !!python/object/apply:dict {}", 2, "tag"),
    "custom tag": (HEAD + "fixed: !thing {}", 2, "tag"),
    "not utf-8": (HEAD.encode() + b"experiment: \xe9t\xe9", 2, "UTF-8"),
    "utf-16": ("notebook: a".encode("utf-16"), 1, "UTF-8"),
    "control byte": (HEAD + "grid: {x: [1]} # \x07", 2, "U+0007"),
    "line separator": (HEAD + "fixed: {how: 'a\u2028b'}", 2, "U+2028"),
    "nul": (HEAD + "\0", 2, "U+0000"),
    "anchor": (HEAD + "fixed: &a {x: 1}", 2, "anchors and aliases"),
    "aliases": (HEAD + "fixed:\n  how: *a", 3, "anchors and aliases"),
    "merge key": (HEAD + "fixed: {<<: {x: 1}}", 2, "merge keys"),
    "two documents": (HEAD + "---\n" + HEAD, 2, "document"),
    "number as key": (HEAD + "1: 2", 2, "'1' is not a string"),
    "yes as key": (HEAD + "fixed:\n  on: 1", 3, "YAML reads it as true or false"),
    "null as key": (HEAD + "fixed:\n  ~: 1", 3, "is not a string"),
    "list as key": (HEAD + "? [a]\n: 1", 2, "is not a string"),
    "deep": (HEAD + "fixed: " + "[" * 5000, 2, "nested too deep"),
    "directive": ("%YAML 9.9\n---\n" + HEAD, 1, "is not YAML"),
    # keys
    "unknown key": (HEAD + "gird: {x: [1]}", 2, "did you mean 'grid'"),
    "far key": (HEAD + "\n\nzzz: 1", 4, "the keys are notebook"),
    "no notebook": ("grid: {x: [1]}", 1, "notebook must name"),
    "notebook a number": ("notebook: 3", 1, "notebook must name"),
    "notebook null": ("notebook: null", 1, "notebook must name"),
    "notebook blank": ("notebook: ' '", 1, "notebook must name"),
    "notebook missing": ("experiment: a\nnotebook: nothing.ipynb", 2, "does not exist"),
    "notebook near": (
        "notebook: ../10_aceptance.ipynb",
        1,
        "mean 'notebooks/10_acceptance.ipynb'?",
    ),
    "notebook near the grid": ("notebook: ../raeder.ipynb", 1, "did you mean '../reader.ipynb'"),
    "notebook elsewhere": ("notebook: reader.ipynb", 1, "did you mean '../reader.ipynb'"),
    "notebook no notebook": ("notebook: README.md", 1, "is not an .ipynb file"),
    "notebook a folder": ("notebook: notebooks", 1, "does not exist"),
    "notebook with nul": ('notebook: "a\\0.ipynb"', 1, "does not exist"),
    "notebook long": (f"notebook: {'a' * 5000}.ipynb", 1, "does not exist"),
    "experiment up": (HEAD + "experiment: ..\ngrid: {x: [1]}", 2, "experiment"),
    "experiment with slash": (HEAD + "experiment: ../up\ngrid: {x: [1]}", 2, "experiment"),
    "experiment without a name": (HEAD + "experiment: ''\ngrid: {x: [1]}", 2, "experiment"),
    "experiment a list": (HEAD + "experiment: [a]\ngrid: {x: [1]}", 2, "experiment"),
    "experiment no": (
        HEAD + "experiment: no\ngrid: {x: [1]}",
        2,
        "YAML reads False: put it in quotes",
    ),
    "experiment long": (HEAD + f"experiment: {'a' * 100}", 2, "experiment"),
    "experiment secret": (HEAD + f"experiment: hf_{'a' * 30}", 2, "experiment"),
    "fixed a list": (HEAD + "fixed: [1]", 2, "fixed must be a mapping"),
    "grid a list": (HEAD + "grid: [1]", 2, "grid must be a mapping"),
    "grid empty": (HEAD + "experiment: a\ngrid:", 3, "grid is empty"),
    "grid an empty mapping": (HEAD + "grid: {}", 2, "grid is empty"),
    "axis not a list": (HEAD + "grid: {x: 1}", 2, "grid.x must be a list"),
    "axis empty": (HEAD + "grid:\n  how: [a]\n  x: []", 4, "grid.x must be a list of at least"),
    "axis null": (HEAD + "grid: {x: null}", 2, "grid.x must be a list"),
    "axis twice": (HEAD + "grid:\n  x:\n  - 1\n  - 2\n  - 1", 6, "1 appears twice, first on"),
    "axis twice as float": (HEAD + "grid:\n  rate: [1,\n  1.0]", 4, "twice, first on line 3"),
    "axis twice as list": (HEAD + "grid: {rates: [[1], [1.0]]}", 2, "twice"),
    "include a mapping": (HEAD + "include: {x: 1}", 2, "include must be a list"),
    "include empty entry": (HEAD + "include:\n- {x: 1}\n- {}", 4, "include must be a list"),
    "exclude a list of texts": (HEAD + "grid: {x: [1]}\nexclude:\n- a", 4, "must be a list"),
    "exclude nothing": (HEAD + "fixed: {x: 1}\ninclude: [{x: 2}]\nexclude: [{x: 1}]", 4, "neither"),
    "seeds a number": (HEAD + "seeds: 3", 2, "seeds must be a list"),
    "seeds empty": (HEAD + "seeds: []", 2, "seeds must be a list"),
    "seeds null": (HEAD + "seeds:", 2, "seeds must be a list"),
    "seeds negative": (HEAD + "seeds:\n- 0\n- -1", 4, "seed is -1"),
    "seeds booleans": (HEAD + "seeds: [true]", 2, "not True"),
    "seeds texts": (HEAD + "seeds: [a]", 2, "not 'a'"),
    "seeds huge": (HEAD + f"seeds: [{BIG}]", 2, "too large"),
    "seeds twice": (HEAD + "seeds:\n- 1\n- 1", 4, "twice, first on line 3"),
    "seeds and an axis": (HEAD + "grid: {seed: [1]}\nseeds: [1]", 3, "has an axis seed already"),
    "timeout 0": (HEAD + "timeout_s: 0", 2, "timeout_s"),
    "timeout text": (HEAD + "timeout_s: long", 2, "timeout_s"),
    "timeout true": (HEAD + "timeout_s: yes", 2, "timeout_s"),
    "timeout infinite": (HEAD + "timeout_s: .inf", 2, "timeout_s"),
    "timeout huge": (HEAD + "timeout_s: 1.0e+300", 2, "timeout_s"),
    # parameters
    "unknown parameter": (HEAD + "grid:\n  x: [1]\n  hwo: [well]", 4, "did you mean 'how'"),
    "another notebook's": (HEAD + "fixed: {trees: []}", 2, "of the notebook; choose from x, how"),
    "another's, nearly its own": (HEAD + "fixed: {seeds: [1]}", 2, "did you mean 'seed'"),
    "unknown fixed": (HEAD + "fixed:\n  x: 1\n  zzz: 1", 4, "choose from x, how"),
    "unknown include": (HEAD + "include:\n- x: 1\n  zzz: 1", 4, "include.zzz"),
    "unknown exclude": (HEAD + "grid: {x: [1]}\nexclude: [{zzz: 1}]", 3, "exclude.zzz"),
    "code as name": (HEAD + 'fixed: {"x=0\\nimport os": 1}', 2, "not a parameter name"),
    "keyword as name": (HEAD + "fixed: {class: 1}", 2, "not a parameter name"),
    "dunder as name": (HEAD + "fixed: {__builtins__: 1}", 2, "not a parameter name"),
    "homoglyph": (HEAD + "fixed: {ѕeed: 1}", 2, "not a parameter name"),
    "empty name": (HEAD + "fixed: {'': 1}", 2, "not a parameter name"),
    "secret name": (HEAD + "fixed: {api_key: abc}", 2, "secret"),
    "near one": ("notebook: ../sized.ipynb\nfixed: {max_new_token: 6}", 2, "'max_new_tokens'"),
    "secret value": (HEAD + f"fixed: {{how: hf_{'a' * 30}}}", 2, "secret"),
    "secret in a list": (HEAD + f"fixed: {{names: [a, AKIA{'A' * 16}]}}", 2, "secret"),
    "secret in an address": (HEAD + "fixed: {how: 'https://me:hush@host/x'}", 2, "secret"),
    "secret in a text": (HEAD + "fixed: {how: 'api_key=hunter2hunter2'}", 2, "secret"),
    "private key": (HEAD + "fixed: {how: '-----BEGIN RSA PRIVATE KEY-----'}", 2, "secret"),
    "int for text": (HEAD + "fixed: {how: 3}", 2, "quotes"),
    "yes for text": (HEAD + "grid:\n  how:\n  - a\n  - yes", 5, "true and false"),
    "off for text": (HEAD + "fixed: {how: off}", 2, "true and false"),
    "text for int": (HEAD + "fixed: {x: two}", 2, "needs a whole number"),
    "float for int": (HEAD + "fixed: {x: 1.5}", 2, "needs a whole number"),
    "bool for int": (HEAD + "fixed: {x: true}", 2, "needs a whole number"),
    "null for int": (HEAD + "fixed: {x: null}", 2, "needs a whole number, not null"),
    "empty for int": (HEAD + "fixed:\n  x:", 3, "needs a whole number, not null"),
    "text for bool": (HEAD + "fixed: {flag: 'yes'}", 2, "needs true or false"),
    "1e-3": (HEAD + "fixed: {rate: 1e-3}", 2, "write 0.001"),
    "1e-9": (HEAD + "fixed: {rate: 1e-9}", 2, "write 1.0e-09"),
    "0o17": (HEAD + "fixed: {x: 0o17}", 2, "write 15"),
    "octal": (HEAD + "grid:\n  x: [1,\n    012]", 4, "reads 012 as 10 (base 8)"),
    "sexagesimal": (HEAD + "fixed: {x: 1:30}", 2, "reads 1:30 as 90 (base 60)"),
    "no number": (HEAD + "fixed: {how: 0x_}", 2, "YAML takes 0x_ for a number"),
    "date": (HEAD + "fixed: {how: 2024-01-01}", 2, "2024-01-01 as a date"),
    "no date": (HEAD + "fixed: {how: 2024-13-45}", 2, "2024-13-45 as a date"),
    "nan": (HEAD + "fixed: {rate: .nan}", 2, "finite"),
    "infinity": (HEAD + "grid: {rate: [1.0, -.inf]}", 2, "finite"),
    "huge int": (HEAD + f"fixed: {{x: {BIG}}}", 2, "too large"),
    "endless int": (HEAD + f"fixed: {{x: {'9' * 5000}}}", 2, "too large"),
    "list for int": (HEAD + "fixed: {x: [1]}", 2, "needs a whole number"),
    "mapping for int": (HEAD + "fixed: {x: {a: 1}}", 2, "needs a whole number"),
    "list on an axis": (HEAD + "grid: {x: [[1, 2]]}", 2, "needs a whole number"),
    "text for list": (HEAD + "fixed: {names: a}", 2, "write ['a']"),
    "number in a list of texts": (
        HEAD + "fixed: {names: [a, 3]}",
        2,
        "needs a list, each item a text, not 3",
    ),
    "text in a list of floats": (HEAD + "fixed: {rates: [1e-3]}", 2, "write 0.001"),
    "mapping in list": (HEAD + "fixed: {names: [{a: 1}]}", 2, "only numbers and strings"),
    "list in list": (HEAD + "grid: {names: [[[a]]]}", 2, "only numbers and strings"),
    "nan in list": (HEAD + "fixed: {rates: [.nan]}", 2, "finite"),
    "control character": (HEAD + 'fixed: {how: "a\\x07b"}', 2, "control"),
    "long text": (HEAD + f"fixed: {{how: {'a' * 70_000}}}", 2, "70000 characters"),
    "fixed and axis": (HEAD + "fixed: {x: 1}\ngrid:\n  x: [2]", 4, "(line 2) and in `grid`"),
    "seed twice": (HEAD + "grid: {seed: [1]}\nfixed: {seed: 2}", 2, "both in `fixed`"),
    "seeds and fixed": (HEAD + "seeds: [1]\nfixed: {seed: 2}", 2, "(line 3) and in `seeds`"),
    # points
    "excludes all": (HEAD + "grid: {x: [1]}\nexclude: [{x: 1}]", 3, "removes every point"),
    "excludes nothing": (HEAD + "grid: {x: [1]}\nexclude:\n- {x: 1, how: a}\n", 4, "well"),
    "excludes no value": (HEAD + "grid: {x: [1, 2]}\nexclude: [{x: 5}]", 3, "values are 1, 2"),
    "repeats a grid point": (HEAD + "grid:\n  x: [1, 2]\ninclude:\n- x: 2", 5, "grid (line 2)"),
    "repeats the default": (HEAD + "seeds: [0]\ninclude: [{how: well}]", 3, "repeats a point"),
    "repeats an include": (HEAD + "include:\n- x: 2\n- {x: 2, how: well}", 4, "of line 3"),
    "repeats as float": (HEAD + "include:\n- rate: 2\n- rate: 2.0", 4, "of line 3"),
    "too many": (HEAD + f"grid: {{x: {list(range(101))}, seed: {list(range(10))}}}", 0, "--yes"),
}


def test_characters_that_this_python_does_not_know_are_escaped(load):
    shipped = SHIPPED[0].partition("grid:")[0]
    [line] = refusal(load, shipped + 'grid: {drafter: ["ngram:\U00018d9f"]}\n')
    assert "drafter ngram:\\U00018d9f: give a whole number" in line


def test_file_without_a_notebook_has_its_other_mistakes_listed(load):
    said = refusal(load, "fixed: {target: target-10m, drafter: ngrm}\n")
    assert [line.partition("; did")[0] for line in said] == [
        "1: notebook must name the notebook to run, as in ../10_acceptance.ipynb",
        "1: drafter 'ngrm' is unknown",
    ]


def test_bad_files_number_at_least_a_hundred():
    assert len(BAD) >= 100


@pytest.mark.parametrize("case", BAD)
def test_bad_file_is_refused_with_its_line_and_reason(load, case):
    text, line, words = BAD[case]
    said = refusal(load, text)
    assert len(said) == 1, said
    assert said[0].startswith(f"{line}: " if line else "1,010 points")
    assert words in said[0]
    assert said[0].isprintable()
    assert len(said[0]) < 400


def test_type_mismatch_shows_the_parameters_help(load):
    [line] = refusal(load, f"notebook: {ACCEPTANCE}\nfixed: {{gamma: three}}")
    assert line == "2: fixed.gamma needs a whole number, not 'three' (gamma: draft length)"


@pytest.mark.parametrize("text", ["inf", "nan", "1e400"])
def test_text_of_no_finite_number_gets_no_advice(load, text):
    said = refusal(load, HEAD + f"fixed: {{rate: {text}}}")
    assert said == [f"2: fixed.rate needs a number, not {text!r}"]


def test_date_for_a_number_is_two_problems(load):
    assert [s[:2] for s in refusal(load, HEAD + "fixed: {x: 2024-01-01}")] == ["2:", "2:"]


def test_too_large_file_is_refused(load):
    [said] = refusal(load, b"# " + b"x" * 1_100_000)
    assert "larger than 1000 kB" in said


def test_problems_of_all_files_are_reported_in_order(folder):
    bad = {
        "a.yaml": HEAD + "zzz: 1\nfixed:\n  rate: .nan\n  hwo: 1\n  x: two\nseeds: [1, 1]",
        "b.yaml": HEAD + "grid:\n  x: []\n  x: 012\n",
        "c.yaml": "notebook: nothing.ipynb\ntimeout_s: 0\nexclude: 3",
        "d.yaml": f"notebook: {ACCEPTANCE}\ngrid:\n  gamma: [1, -2]\n  drafter: [ngram, mrgan]",
        "e.yaml": "notebook: [",
        "f.yaml": HEAD + "grid: {x: [1, 2]}",
    }
    for name, text in bad.items():
        (folder / name).write_text(text)
    with pytest.raises(UserError) as refused:
        grid.load([folder / name for name in bad])
    said = [line.removeprefix(f"{folder}/") for line in str(refused.value).splitlines()]
    assert [line.split(" ")[0] for line in said] == [
        "a.yaml:2:", "a.yaml:4:", "a.yaml:5:", "a.yaml:6:", "a.yaml:7:",
        "b.yaml:3:", "b.yaml:4:", "b.yaml:4:", "c.yaml:1:", "c.yaml:2:", "c.yaml:3:",
        "d.yaml:3:", "d.yaml:4:", "e.yaml:1:",
    ]  # fmt: skip


def test_value_of_a_wrong_type_hides_no_other_mistake(load):
    text = """\
        notebook: {}
        fixed:
          limit: many
          drafter: mrgan
          prompts: [nope.txt]
        grid:
          gamma: [2, two, 3]
          rule: [mach]
          seed: [1, 2]
        """
    said = refusal(load, textwrap.dedent(text).format(ACCEPTANCE))
    assert [line.split(" ")[0] for line in said] == ["3:", "4:", "5:", "7:", "8:"]


@pytest.mark.parametrize("notebook", ["nowhere.ipynb", "broken.ipynb"])
def test_notebook_that_cannot_be_read_hides_no_other_mistake(load, folder, notebook):
    (folder / "broken.ipynb").write_text("{")
    text = f"""\
        notebook: {notebook}
        fixed:
          own: 3
          limit: many
        grid:
          gamma: [2, -2, 2]
          drafter:
          - ngram
          - mrgan
          mine: [1, a]
        include: [{{rule: mach}}]
        """
    said = refusal(load, text)
    assert [line.split(" ")[0] for line in said] == ["1:", "4:", "6:", "6:", "9:", "11:"]
    [said] = refusal(load, f"notebook: {notebook}\nfixed: {{target: sibling-1m, own: a}}")
    assert said.startswith("1: ")


def test_filters_and_files_are_reported_together(load):
    filters = ["gamma=7", "drafter=ngarm", "zzz=1", "x"]
    text = f"notebook: {ACCEPTANCE}\ngrid:\n  gamma: [2, 3]\n  drafter: [ngram, mrgan]\n"
    said = refusal(load, f"{text}timeout_s: 0", only=filters)
    assert ["no point has gamma" in said[0], "did you mean 'ngram'" in said[1]] == [True, True]
    assert ["no parameter 'zzz'" in said[2], "write NAME=VALUE" in said[3]] == [True, True]
    assert [line[:2] for line in said[4:]] == ["4:", "5:"]
    text = text.replace(", mrgan", "")
    [said] = refusal(load, text.replace(str(ACCEPTANCE), "n.ipynb"), only=["limit=3", "mine=1"])
    assert said.startswith("1: notebook")
    [said] = refusal(load, f"{text}fixed: {{limit: a}}", only=["limit=3", "drafter=ngram"])
    assert said.startswith("5: fixed.limit")


def test_mistake_in_a_drafters_name_has_the_line_of_that_name(load):
    text = f"""\
        notebook: {ACCEPTANCE}
        fixed:
          target: {{}}
          limit: 3
          rivals:
          - ngram
          - eagle:gone
          - ngarm
        grid:
          gamma: [2, 3]
          drafter:
          - model
          - medusa:lost
          - ngrma
        """
    text = textwrap.dedent(text)
    said = refusal(load, text.format("target-10m"))
    assert [line.split(" ")[0] for line in said] == ["7:", "8:", "13:", "14:"]
    said = refusal(load, text.format("target-01m"))
    assert [line.split(" ")[0] for line in said] == ["3:", "7:", "8:", "13:", "14:"]


def test_number_in_a_message_is_no_mention_of_a_parameter():
    params = {"gamma": 2, "prompts": "gone.txt"}
    assert (
        parameters.by_mention("[Errno 2] No such file: 'gone.txt'", params, params)[0] == "prompts"
    )
    assert parameters.by_mention("gamma 2 is more than gone.txt", params, params)[0] == "gamma"


MANY_KINDS = """\
notebook: {}
fixed:
  prompts: nowhere.txt
  max_new_tokens: many
  tempratures: [0.0]
  rivals: [far/away]
grid:
  drafter: [ngram, mrgan]
  gamma: [2, 2, -2]
seeds: [1]
exclude: [{{gamma: 7}}]
include: [{{drafter: ngram}}, {{drafter: ngram}}]
timeout_s: soon
"""


def test_mistakes_of_every_kind_are_reported_together(load):
    text = MANY_KINDS.format(ACCEPTANCE)
    sure = (
        "3 no prompts",
        "4 needs a whole",
        "5 did you mean",
        "9 twice",
        "9 -2",
        "13 timeout_s",
        "8 mrgan",
    )
    of_a_whole_file = "6 far/away", "11 never 7", "12 repeats the point"
    for more, found in {"": sure + of_a_whole_file, "gird: 3": (*sure, "14 unknown key")}.items():
        said = refusal(load, text + more)
        for line, words in (each.split(" ", 1) for each in found):
            assert any(s.startswith(f"{line}: ") and words in s for s in said), (words, said)
        assert len(said) == len(found), said


@pytest.mark.parametrize(
    "wrong",
    [
        {"fixed": {"target": "sibling-1m", "drafter": 3}},
        {"fixed": {"target": "sibling-1m", "draftr": "ngram"}},
        {"fixed": {"target": "sibling-1m"}, "gird": {"drafter": ["ngram"]}},
        {"fixed": {"target": "sibling-1m"}, "grid": {"drafter": "ngram"}},
        {"fixed": {"target": "sibling-1m"}, "grid": ["drafter"], "exclude": [{"gamma": 9}]},
        {"include": [{"rivals": []}, {"rivals": [], "limit": "many"}]},
        {"grid": {"gamma": [2]}, "seeds": 3, "exclude": [{"seed": 3}]},
        {"grid": {"gama": [2]}, "exclude": [{"gamma": 7}], "include": [{"gamma": 3}]},
    ],
    ids=repr,
)
def test_what_a_mistake_hides_is_not_guessed_and_then_refused(load, wrong):
    assert len(refusal(load, {"notebook": str(ACCEPTANCE)} | wrong)) == 1


@pytest.mark.parametrize(
    "path", one_in(8, sorted(ACCEPTANCE.parent.glob("[1-6]*.ipynb"))), ids=lambda p: p.stem
)
def test_value_of_a_wrong_type_is_the_only_mistake_of_a_grid_that_is_right_otherwise(load, path):
    for n, (name, parameter) in enumerate(notebooks.read(path).parameters.items()):
        odd = {"no": 1} if parameter.problem({"no": 1}) else None
        line, section, value = (2, "fixed", odd) if n % 2 else (3, "grid", [odd])
        [said] = refusal(load, {"notebook": str(path), section: {name: value}})
        assert said.startswith(f"{line}: {section}.{name} needs"), said


def test_report_stops_at_200_problems(load):
    said = refusal(load, HEAD + "".join(f"k{i}: 1\n" for i in range(1300)))
    assert len(said) == 201
    assert said[-1] == "and 1,100 more problems"


def test_unreadable_grid_file_is_named(tmp_path):
    (tmp_path / "folder.yaml").mkdir()
    for name, why in {
        "nowhere.yaml": r"nowhere\.yaml: cannot be read: No such file",
        "folder.yaml": r"folder\.yaml: cannot be read: it is not a file",
        "a\0b": "cannot be read",
    }.items():
        with pytest.raises(UserError, match=why):
            grid.load([tmp_path / name])


def test_a_grid_file_that_is_not_there_is_looked_for_among_those_that_ship(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(grid_file.__file__).parents[2])
    meant = re.escape("; did you mean 'notebooks/grids/acceptance.yaml'?")
    with pytest.raises(UserError, match=meant):
        grid.load([Path("10_acceptance.yaml")])
    with pytest.raises(UserError, match=r"No such file or directory$"):  # no name is like it
        grid.load([Path("nowhere.yaml")])


# --- notebooks -----------------------------------------------------------------------------------


CELLS = {
    "no assignment": ("x = 1", "line 1: write `name: type = value`"),
    "an import": ("x: int = 1\nimport os", "line 2: write `name: type = value`"),
    "no value": ("x: int", "line 1: give x a value"),
    "unknown type": ("x: dict = {}", "line 1: give x a value and one of the types int"),
    "no literal": ("x: int = 1\ny: int = x + 1", "line 2: the value of y is not a literal"),
    "a call": ("x: list = list()", "line 1: the value of x is not a literal"),
    "a sum": ("x: str = 'a' + 'b'", "line 1: the value of x is not a literal"),
    "a set of lists": ("x: list = {[1]}", "line 1: the value of x is not a literal"),
    "syntax": ("x: int = 1\ny: int = (", "line 2: '(' was never closed"),
    "a magic": ("%matplotlib inline", "line 1: "),
    "wrong default": ("x: int = 'a'", "line 1: x needs a whole number, not 'a'"),
    "null default": ("x: int = None", "line 1: x needs a whole number, not null"),
    "infinite default": ("x: float = 1e999", "line 1: x is inf; only finite"),
    "secret default": (f"x: str = 'hf_{'a' * 30}'", "line 1: x looks like a secret"),
    "secret by its name": ("api_key: str = 'pz7XDhKPdy'", "line 1: api_key looks like a secret"),
    "twice": ("x: int = 1\nx: int = 2", "line 2: x is defined twice"),
    "underscore": ("_x: int = 1", "line 1: _x cannot be the name"),
    "attribute": ("x.y: int = 1", "line 1: write `name"),
}


@pytest.mark.parametrize("case", CELLS)
def test_bad_parameters_cell_is_refused_with_its_line(load, folder, case):
    source, words = CELLS[case]
    write(folder.parent / "reader.ipynb", "print(x)", parameters=source)
    [said] = refusal(load, "experiment: a\nnotebook: ../reader.ipynb\ngrid: {x: [1]}")
    assert said.startswith("2: reader.ipynb, parameters cell, ")
    assert words in said


def test_parameters_cell_reports_all_its_problems(load, folder):
    write(folder.parent / "reader.ipynb", parameters="x = 1\ny: int\nz: int = 'a'\nw: int = 1")
    assert len(refusal(load, HEAD)) == 3


def test_missing_parameters_cell_error_explains_how_to_tag_one(load, folder):
    untagged = write(folder.parent / "reader.ipynb", "x: int = 1", parameters=None)
    [said] = refusal(load, HEAD)
    assert "has no code cells tagged `parameters`" in said
    assert "Property Inspector" in said
    for kind, count in (("code", "has 2 code cells"), ("markdown", "has no code cells")):
        cell = {"source": "y: int = 1", "tags": ["parameters"], "cell_type": kind}
        write(untagged, *([cell] * 2), parameters=None)
        [said] = refusal(load, HEAD)
        assert count in said


@pytest.mark.parametrize("metadata", [None, {"specexp": None}, {"specexp": 3}, {"specexp": {}}])
def test_notebook_is_timed_unless_its_metadata_denies_it(folder, metadata):
    file = write(folder.parent / "reader.ipynb", "print(x)", metadata=metadata)
    assert notebooks.read(file).timed
    file = write(file, "print(x)", metadata={"specexp": {"timed": False}})
    assert not notebooks.read(file).timed


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "3", "null", "{}", '{"nbformat": 4}', '{"nbformat": 4, "cells": 3}',
        '{"nbformat": 4, "cells": [3]}', '{"nbformat": 4, "cells": [{"cell_type": "code"}]}',
        '{"nbformat": 4, "cells": [{"cell_type": "code", "source": 3}]}',
        '{"nbformat": 4, "cells": [{"cell_type": "code", "source": "", "metadata": 3}]}',
        '{"nbformat": 3, "worksheets": []}', "[" * 100_000, b"\xff\xff", b"\0" * 10,
    ],
)  # fmt: skip
def test_malformed_notebook_is_refused(load, folder, content):
    content = content if isinstance(content, bytes) else content.encode()
    (folder.parent / "reader.ipynb").write_bytes(content)
    [said] = refusal(load, HEAD)
    assert said.startswith("1: reader.ipynb is ")


def test_too_large_notebook_is_refused(load, monkeypatch):
    monkeypatch.setattr(notebooks, "LARGEST", 100)
    [said] = refusal(load, HEAD)
    assert "clear its outputs" in said


def test_seeds_need_a_seed_parameter(load, folder):
    write(folder.parent / "reader.ipynb", "print(x)", parameters="x: int = 1")
    [said] = refusal(load, HEAD + "seeds: [1, 2]")
    assert said.startswith("2: seeds: reader.ipynb has no parameter `seed: int`")


READING = {
    "print(seed)": True,
    "y = seed + 1": True,
    "print(f'{seed}')": True,
    "seed += 1": True,
    "print(params['seed'])": True,
    "print(params.get('seed'))": True,
    "frame.query('number == @seed')": True,
    "run(**params)": True,
    "eval('se' + 'ed')": True,
    "%time f(seed)": True,
    "%%bash\necho $seed": True,
    "%%time\nprint(seed)": True,
    "!echo {seed}": True,
    "%run -i script.py": True,
    "this is no Python: seed": True,
    "seed?": True,
    "def f(): return seed": True,
    "": False,
    "seed = 3": False,
    "# seed": False,
    "print('the seed is')": False,
    "track.log('a', params, {})": False,
    "logged = {**params, 'x': 99}": False,
    "%matplotlib inline\nprint(1)": False,
    "print(seeds)": False,
}


@pytest.mark.parametrize("cell", READING)
def test_axis_that_no_cell_reads_is_refused(load, folder, cell):
    first = "from specexp.tracking import runs\nparams = runs.parameters(globals())"
    write(folder.parent / "reader.ipynb", first, cell)
    if READING[cell]:
        assert len(load(HEAD + "seeds: [1, 2]")) == 2
    else:
        [said] = refusal(load, HEAD + "seeds: [1, 2]")
        assert said.startswith("2: seed is read by no cell of reader.ipynb")


def test_include_of_a_parameter_no_cell_reads_is_refused(load, folder):
    write(folder.parent / "reader.ipynb", "print(x)")
    said = refusal(load, HEAD + "grid: {x: [1]}\ninclude:\n- x: 2\n  how: a")
    assert [s.split(" is read")[0] for s in said] == ["5: how"]


def test_relative_paths_of_a_grid_are_looked_up_beside_it(load, folder, monkeypatch):
    write(
        folder.parent / "asks.ipynb", "print(prompts)", parameters='prompts: str = "all"  # which'
    )
    question = '{"question_id": 1, "category": "code", "turns": ["def f():"]}\n'
    (folder / "mine.jsonl").write_text(question)
    spec = {"notebook": "../asks.ipynb", "grid": {"prompts": ["mine.jsonl", "all"]}}
    point, shipped = load(spec)
    assert point.params["prompts"] == f"{folder.name}/mine.jsonl"
    assert point.label == "asks prompts=mine.jsonl"
    assert load(spec, only=[point.label.split()[1]]) == [point]
    assert shipped.params["prompts"] == "all"
    assert "data" in point.identity.parts
    (folder.parent / "own").mkdir()
    (folder.parent / "own" / "beside.jsonl").write_text(question)
    monkeypatch.chdir(folder.parent)
    [said] = refusal(load, spec | {"grid": {"prompts": ["own/beside.jsonl"]}})
    assert "is relative to the notebook" in said
    assert "write '../own/beside.jsonl'" in said
    [said] = refusal(load, spec | {"grid": {"prompts": ["../own/besides.jsonl"]}})
    near = "relative to the grid file; did you mean '../own/beside.jsonl'?"
    assert said.endswith(f"prompts: there is no '../own/besides.jsonl' {near}")
    [point] = load(spec | {"grid": {"prompts": ["../own/beside.jsonl"]}})
    assert point.params["prompts"] == "own/beside.jsonl"
    (folder.parent / "own" / "wrong.csv").write_text("question\ndef f():")
    for name, place in (("../own/wrong.csv", folder), ("wrong.csv", folder.parent / "own")):
        (place / "wrong.yaml").write_text(
            yaml.safe_dump(spec | {"grid": {"prompts": [name, "all"]}})
        )
        with pytest.raises(UserError, match=rf"wrong.yaml:\d: {name}: line 1: no text"):
            grid.load([place / "wrong.yaml"])
    params = {"prompts": "own/wrong.csv", "drafter": "eagle:own", "gamma": 3}
    message = "own/wrong.csv, own/config.json and my/own"
    written = paths.as_written(message, params, folder.parent, folder)
    assert written == "../own/wrong.csv, ../own/config.json and my/own"
    monkeypatch.chdir(folder)
    (folder / "here.yaml").write_text(yaml.safe_dump(spec))
    assert grid.load(["here.yaml"])[0].params == grid.load([folder / "here.yaml"])[0].params
    assert grid.load(["here.yaml"])[0].params["prompts"] == f"{folder.name}/mine.jsonl"


@pytest.mark.parametrize(
    ("name", "written", "moved"),
    [
        ("target", "model", "grids/model"),
        ("target", "model+int8", "grids/model+int8"),
        ("target", "/model", "/model"),
        ("target", "target-10m", "target-10m"),
        (
            "rivals",
            ["ngram", "eagle:model", "ngram:4", "lookup:eagle:model", "lookup:model+int8"],
            [
                "ngram",
                "eagle:grids/model",
                "ngram:4",
                "lookup:eagle:grids/model",
                "lookup:grids/model+int8",
            ],
        ),
        ("arrivals", "trace:gaps.txt", "trace:grids/gaps.txt"),
        ("own", "gaps.txt", "grids/gaps.txt"),
        ("rule", "model", "model"),
    ],
)
def test_path_behind_a_method_moves_with_it(tmp_path, name, written, moved):
    (tmp_path / "grids" / "model").mkdir(parents=True)
    (tmp_path / "grids" / "ngram").mkdir()
    (tmp_path / "grids" / "gaps.txt").write_text("")
    if paths.may_name(name):
        written = paths.moved(name, written, tmp_path / "grids", tmp_path)
    assert written == moved


def test_notebooks_of_two_folders_read_their_own_relative_files(tmp_path):
    files, question = [], '{"question_id": 1, "category": "code", "turns": ["%s"]}\n'
    for name in ("one", "two"):
        (tmp_path / name / "grids").mkdir(parents=True)
        (tmp_path / name / "mine.jsonl").write_text(question % name)
        asked = 'prompts: str = "mine.jsonl"  # which'
        write(tmp_path / name / "asks.ipynb", "print(prompts)", parameters=asked)
        files.append(tmp_path / name / "grids" / "g.yaml")
        files[-1].write_text("notebook: ../asks.ipynb\n")
    [one], [two] = (grid.load([file]) for file in files)
    before, after = one.identity.parts, two.identity.parts
    assert [n for n in before.keys() | after.keys() if before[n] != after[n]] == ["data"]
    assert [p.run_key for p in grid.load(files)] == [one.run_key, two.run_key]
    (tmp_path / "two" / "mine.jsonl").unlink()
    with pytest.raises(UserError, match=r"two/grids/g\.yaml:.*mine\.jsonl"):
        grid.load(files)


def test_notebook_outside_the_project_is_refused(tmp_path):
    """Neither through a path nor a symbolic link: a notebook is code."""
    inside, outside = tmp_path / "project" / "grids", tmp_path / "elsewhere"
    inside.mkdir(parents=True)
    outside.mkdir()
    far = write(outside / "far.ipynb", "print(x)")
    (inside / "link.ipynb").symlink_to(far)
    near = write(inside.parent / "near.ipynb", "print(x)")
    (inside / "near.ipynb").symlink_to(near)
    file = inside / "g.yaml"
    for name in (str(far), "../../elsewhere/far.ipynb", "link.ipynb"):
        file.write_text(yaml.safe_dump({"notebook": name}))
        with pytest.raises(UserError, match=r"g\.yaml:1: .* is outside"):
            grid.load([file])
    for name in (
        "near.ipynb",
        "../near.ipynb",
        str(near),
        str(TRIVIAL),
        "tests/support/trivial.ipynb",
    ):
        file.write_text(yaml.safe_dump({"notebook": name}))
        assert len(grid.load([file])) == 1


# --- what build.check says -----------------------------------------------------------------------


MEANING = {
    "no draft": ("grid:\n  gamma: [2,\n    0]", {4: "gamma is 0, so nothing is drafted"}),
    "an axis value": ("grid:\n  gamma: [2,\n    -1]", {4: "gamma is -1"}),
    "a fixed value": ("fixed:\n  limit: 5\n  rule: rejct", {4: "did you mean 'reject'?"}),
    "a drafter": ("grid:\n  drafter:\n  - ngram\n  - nrgam\n  gamma: [1, 2]", {5: "nrgam"}),
    "a baseline": (
        "grid:\n  drafter: [ngram,\n    plain]\nfixed:\n  rivals:\n  - suffix\n  - plain",
        {4: "plain drafts nothing", 8: "plain drafts nothing"},
    ),
    "in a list": ("grid: {gamma: [2]}\nfixed:\n  temperatures: [0.0, -1.0]", {4: "temperature"}),
    "an include": ("grid:\n  gamma: [2]\ninclude:\n- gamma: 4\n- gamma: -3", {6: "gamma is -3"}),
    "two lines, one mistake": (
        "grid:\n  gamma: [2, -1]\ninclude:\n- gamma: -1\n  limit: 7",
        {3: "gamma is -1", 5: "gamma is -1"},
    ),
    "two mistakes": ("grid:\n  gamma: [-1]\n  limit: [0]", {3: "gamma is -1", 4: "limit is 0"}),
    "too long": ("fixed:\n  max_new_tokens: 64\ngrid:\n  gamma: [3, 99999999]", {5: "99999999"}),
    "beyond the context": ("grid:\n  limit: [1]\n  max_new_tokens: [8, 99999]", {4: "context"}),
    "target": ("fixed: {rivals: []}\ngrid:\n  target:\n  - target-10n\n  seed: [1]", {5: "10n"}),
    "a pairing": (
        "fixed:\n  rivals: []\n  rule: reject\ngrid:\n  drafter: [sibling-3m, ngram]",
        {4: "chosen, not drawn"},
    ),
}


@pytest.mark.parametrize("case", MEANING)
def test_impossible_value_is_refused_on_its_own_line(load, case):
    text, expected = MEANING[case]
    said = refusal(load, f"notebook: {ACCEPTANCE}\n{text}")
    assert {int(line.split(":")[0]) for line in said} == set(expected), said
    for line, words in expected.items():
        assert any(s.startswith(f"{line}: ") and words in s for s in said)


def test_problem_of_no_parameter_has_the_line_of_the_grid(load, monkeypatch):
    monkeypatch.setattr(parameters, "problems_of", lambda *_: [Problem("the world is flat")])
    assert refusal(load, HEAD + "experiment: a\ngrid: {x: [1, 2]}") == ["3: the world is flat"]
    assert refusal(load, "experiment: a\n" + HEAD) == ["2: the world is flat"]


def test_points_that_differ_in_their_seeds_are_judged_once_and_each_seed_alone(load, monkeypatch):
    judged, check = [], parameters.problems_of
    monkeypatch.setattr(parameters, "problems_of", lambda *a: judged.append(a) or check(*a))
    assert len({p.run_key for p in load(HEAD + "grid: {x: [1, 2]}\nseeds: [0, 1, 2]")}) == 6
    assert len(judged) == 2
    [line] = refusal(load, HEAD + "grid:\n  x: [1]\n  seed:\n  - 0\n  - -1")
    assert line.startswith("6: seed is -1")


def test_check_rejects_absent_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 2))
    assert problems({"device": "cuda:1"}) == []
    assert problems({"device": "cuda:2"}) == [
        "device 'cuda:2' does not exist; GPUs here: 2, from cuda:0"
    ]


def test_check_rejects_policy_deeper_than_its_drafter():
    base = {"target": "target-10m", "drafter": "medusa", "gamma": 1}
    said = "policy 'always:5' drafts 5 tokens; use 0 to 3 here"
    assert problems(base | {"policies": ["always:3", "plain", "goodput"]}) == []
    assert problems(base | {"policies": ["always:3", "always:5"]}) == [said]
    assert problems(base | {"rivals": ["ngram"], "policy": "always:5"}) == [said]


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"gammas": []}, "gammas is empty; give at least one"),
        ({"gammas": [0, 2]}, "gamma is 0, so nothing is drafted; use 1 or more"),
        ({"gamma": -1, "drafter": "ngram"}, "gamma is -1; use 1 or more"),
        ({"streams": []}, "streams is empty; give at least one"),
        ({"temperatures": [0.5, 1.0, 1]}, "temperatures holds 1 twice; leave one out"),
        ({"swing": 1.5}, "swing is 1.5; it is a share of the mean rate, from 0 to 1"),
        ({"policy": "bandit", "requests_per_day": 9},
         "bandit learns by trial, which this simulation cannot model: use goodput"),
        ({"target": "./nowhere"}, "there is no folder ./nowhere"),
        ({"target": "models/of/mine"}, "there is no folder models/of/mine"),
        ({"target": ""}, "the name of a model is empty"),
        ({"target": "mine.GGUF"}, "there is no file mine.GGUF"),
        ({"target": "a" * 5000}, "no zoo model is called"),
        ({"target": "https://huggingface.co/Qwen/Qwen3-8B/tree/main"}, "give the hub id, Qwen/Qw"),
        ({"target": "TARGET-10M"}, "no zoo model is called 'TARGET-10M'; did you mean 'target-1"),
        ({"target": "target-10m", "drafter": "SIBLING-3M"},
         "called 'SIBLING-3M'; did you mean 'sibling-3m'?"),
        ({"target": "target-10m", "drafter": ""}, "the name of a drafter is empty"),
        ({"target": "target-10m", "drafter": "ngram: 5"}, "give a whole number of 1 or more"),
        ({"target": "target-10m", "drafter": "early_exit:+4"}, "give a whole number of 1 or more"),
        ({"target": "target-10m", "drafter": "Suffix"},
         "drafter 'Suffix' is unknown; did you mean 'suffix'?"),
        ({"target": "target-10m", "contexts": [128, 2048], "gammas": [2]},
         "context 2048 exceeds the 1024-token context of target-10m"),
        ({"target": "target-10m", "contexts": [8, 128], "gammas": [2, 5]},
         "context 8 is too short for 5 draft tokens: use 9 or more"),
        ({"target": "target-10m", "drafter": "target-10m-medusa"},
         "are medusa heads, not a model: name them as medusa:"),
        ({"target": "target-10m", "drafter": "target-10m-eagle3"},
         "are eagle3 heads, not a model: name them as eagle:"),
    ],
)  # fmt: skip
def test_check_rejects_impossible_parameter(params, said):
    [problem] = problems(params)
    assert said in problem


@pytest.mark.parametrize("method", ["", "model:", "crossed:", "planted:0.5,"])
def test_check_rejects_draft_with_fewer_logits_than_tokens(tiny_folders, tmp_path, method):
    tokenizer = read_tokenizer(tiny_folders[0])
    tokenizer.save_pretrained(tmp_path)
    tiny_llama(0, 1, vocab=len(tokenizer) - 3).save_pretrained(tmp_path)
    [said] = problems({"target": tiny_folders[0], "drafter": f"{method}{tmp_path}"}, [])
    assert said.startswith(f"{tmp_path} has {len(tokenizer) - 3} logits for a tokenizer of")


def test_check_suggests_crossed_for_another_tokenizer(tiny_folders):
    [said] = problems({"target": "target-10m", "drafter": tiny_folders[1]})
    assert said.endswith(f"translate with drafter crossed:{tiny_folders[1]}")
    assert problems({"target": "target-10m", "drafter": f"crossed:{tiny_folders[1]}"}) == []


def test_planted_without_a_draft_model_says_that_it_runs_one(tiny_folders):
    [said] = problems({"target": tiny_folders[0], "drafter": "planted:0.5"}, [])
    assert said.startswith(
        "drafter planted runs a draft model in every round, and the zoo has none"
    )
    assert said.endswith("name one as planted:0.5,NAME")


def test_load_refuses_a_pairing_before_loading_its_target(monkeypatch):
    monkeypatch.setattr("specexp.models.load.of_module", None)
    for wrong, said in (
        ({"drafter": "ngram", "rule": "block", "temperature": 1.0}, "use rule match"),
        ({"drafter": "early_exit:99"}, "leave before the last"),
        ({"tree": "9999"}, "at most 1024"),
        ({"drafter": "nowhere"}, "nowhere"),
    ):
        with pytest.raises(UserError, match=said):
            api.load(**wrong)


def test_notebooks_call_insist_first_and_it_reports_all():
    with pytest.raises(UserError, match=r"^gammas is empty; .*\nlimit is 0; .*more$"):
        parameters.insist({"gammas": [], "limit": 0})
    for number in (10, 20, 30, 40, 60):
        [file] = (grid_file.ROOT / "notebooks").glob(f"{number}_*.ipynb")
        cells = json.loads(file.read_text())["cells"]
        work = [cell["source"] for cell in cells if cell["cell_type"] == "code"][2]
        assert work[0] == "measure.parameters.insist(params)\n"


def test_check_applies_temperatures_to_the_drafter_not_rivals():
    base = {"target": "target-10m", "drafter": "sibling-3m", "rivals": ["ngram"], "rule": "reject"}
    assert problems(base | {"temperatures": [0.0, 1.0]}) == []
    [said] = problems(base | {"temperature": 1.0})
    assert "chosen, not drawn" in said
    [said] = problems(base | {"temperatures": [0.0, 1.0], "drafter": "suffix"})
    assert "suffix" in said


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"prompts": "nowhere.txt", "chat": True}, "no chat template"),
        ({"categories": ["nothing"], "chat": True}, "no chat template"),
        ({"prompts": "nowhere.txt", "max_new_tokens": 9999}, "prompt of one letter with 9999 new"),
        ({"rule": "mach", "drafter": "medusa", "gamma": 50}, "drafts at most 3"),
        ({"top_p": 2.0, "drafter": "medusa", "gamma": 50}, "drafts at most 3"),
        ({"sampling": "own", "drafter": "medusa", "gamma": 50}, "drafts at most 3"),
        ({"gammas": [0, 50], "drafter": "medusa"}, "drafts at most 3"),
    ],
    ids=repr,
)
def test_a_value_that_is_wrong_by_itself_hides_no_other_problem(params, said):
    _, other = problems({"target": "target-10m", **params})
    assert said in other


def test_check_reports_too_long_prompts_in_one_line():
    [said] = problems({"target": "target-10m", "max_new_tokens": 10**6})
    assert said.endswith("(also too long: 79 more prompts)")
    [said] = problems({"target": "target-10m", "max_new_tokens": 10**6, "limit": 2})
    assert said.endswith("(also too long: 1 more prompt)")


def test_a_drafter_that_the_grid_file_does_not_set_is_said_to_be_the_notebooks(load):
    fixed = {"target": "random-tiny", "max_new_tokens": 8}
    named = {"notebook": str(ACCEPTANCE), "fixed": fixed | {"drafter": "medusa"}}
    assert not any("medusa is the" in line for line in refusal(load, named)), "this file has it"
    drafters = str(ACCEPTANCE.with_name("40_drafters.ipynb"))
    said = refusal(load, {"notebook": drafters, "fixed": fixed})
    [eagle] = [line for line in said if "no eagle heads" in line]
    assert eagle.endswith("(eagle is the notebook's default: set drafter in this file)")
    [medusa] = [line for line in said if "no medusa heads" in line]
    assert medusa.endswith("(medusa is the notebook's default: set rivals in this file)")


def test_default_gamma_is_within_the_drafters_depth():
    assert problems({"target": "target-10m", "drafter": "medusa", "policies": ["goodput"]}) == []
    assert api.load(drafter="medusa").engine.policy.tree.depth == 3


def test_exception_in_a_check_refuses_the_points(load, monkeypatch):
    def broken(params, texts, once):
        if params["x"] == 1:
            return []
        raise ZeroDivisionError("by\nnothing") if params["x"] == 3 else ValueError("no")

    monkeypatch.setattr(parameters, "problems_of", broken)
    assert refusal(load, HEAD + "grid:\n  x: [2,\n   3]") == [
        "2: cannot be checked at x=2: ValueError: no",
        "2: cannot be checked at x=3: ZeroDivisionError: by nothing",
    ]


# --- hostile texts -------------------------------------------------------------------------------


HOSTILE = [
    "x=0\nimport os", "'; import os #", '"; import os #', "{x}", "{x.__class__}", "{{", "%s",
    "$(ls)", "`ls`", "../../etc/passwd", "~", "~/x", "C:\\x", "\\", "\\\\", "a\\nb", "\n",
    "\t", "a\n\nb\n",
    " ", "  a  ", "", "null", "~ ", "true", "no", "on", "012", "1:30", "1e-3", "0x1f", "2024-01-01",
    "- a", "# a", "a # b", "a: b", "[a", "{a", "&a", "*a", "!a", "|", ">", "%a", "@a", "`a", "'",
    '"', "''", '""', "'''", '"""', "None", "nan", "inf", "-", "--", "---", "...", "<<",
    "=", "?", ":", "é", "日本語", "𝒙", "\U0001f600", "\u200b", "\u202e", "\u2028", "\ufeff",
    "\u00a0", "ﬁ", "İ", "CON", "a" * 65_536, "a" * 300, "%2e%2e%2f", "a.", ".", "..", "/", "//",
    "\\u0000", "<script>", "[bold]x[/bold]", "[/]", ":smile:", "\\N{BULLET}", "b'x'",
    "f'{1}'", "lambda: 0", "x;y", "x&y", "\ud7ff", "\ue000", "\U0010ffff",
    "ascii", "0", "-0", "1_000", "１",
]  # fmt: skip


def test_hostile_texts_reach_the_plan_unchanged(load):
    texts = list(
        dict.fromkeys([*HOSTILE, *(f"{a}{b}" for a in HOSTILE[:8] for b in HOSTILE[8:24])])
    )
    assert len(texts) >= 200
    texts = [text for text in texts if len(text) < 5000] + ["a" * 65_536]
    for style in (None, '"'):
        spec = yaml.dump({**GOOD, "grid": {"how": texts}}, default_style=style)
        points = load(spec)
        assert [p.params["how"] for p in points] == texts
        assert len({p.run_key for p in points}) == len(texts)
    assert all(p.label.isprintable() and len(p.label) < 100 for p in points)
    keys = [p.run_key for p in points]
    assert all(re.fullmatch("[0-9a-f]{16}", key) for key in keys)


@settings(max_examples=40, **FUZZ)
@given(text=st.text(max_size=60), name=st.text(max_size=12))
@example(text="\ud800", name="x\n")
def test_any_text_round_trips_or_is_refused(load, text, name):
    spec = {"notebook": "../reader.ipynb", "fixed": {"how": text}}
    written = json.dumps(spec, ensure_ascii=False)  # JSON is YAML
    try:
        [point] = load(written.encode("utf-8", "surrogatepass"))
    except UserError:
        point = None
    if point is None:
        assert notebooks.value_problem(text) or yaml_lines.HIDDEN.search(text)
    else:
        assert point.params["how"] == text
    if name not in notebooks.read(TRIVIAL).parameters:
        said = refusal(load, json.dumps({"notebook": "../reader.ipynb", "fixed": {name: 1}}))
        assert all(line.isprintable() for line in said)


NAMES = [
    "x=0", "x\n", "x;y", " x", "x ", "x.y", "x[0]", "x()", "import", "None", "lambda", "__x__", "_",
    "ｘ", "х", "x\u200b", "1x", "x-y", "x:y", "x\\", "$x", "{x}", "../x", "x\n\n",
    "True", "async", "x,y", "x y", "\u202ex", "x#", '"x"',
]  # fmt: skip


def test_hostile_names_are_refused_and_not_executed(load, tmp_path):
    canary = tmp_path / "ran"
    code = f"x=0\nopen({str(canary)!r}, 'w')\ny"
    for name in [code, *NAMES]:
        [said] = refusal(load, json.dumps({"notebook": "../reader.ipynb", "fixed": {name: 1}}))
        assert "is not a parameter name" in said
    assert len(NAMES) >= 30
    assert not canary.exists()


BOMBS = {
    "laughs": "a: &a [x,x]\n" + "".join(
        f"{b}: &{b} [*{a},*{a},*{a},*{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    ),
    "itself": "a: &a [*a]",
    "quadratic": "a: &a " + "x" * 10_000 + "\nb: [" + ",".join(["*a"] * 10_000) + "]",
    "deep lists": "[" * 900_000,
    "deep mappings": "{a: " * 200_000,
    "deep blocks": "- " * 400_000,
    "deep keys": "? " * 400_000,
    "huge int": "a: " + "9" * 900_000,
    "huge hex": "a: 0x" + "f" * 900_000,
    "sexagesimal": "a: 1" + ":59" * 300_000,
    "huge float": "a: " + "9" * 900_000 + ".0",
    "long key": "x" * 900_000 + ": 1",
    "many keys": "".join(f"k{i}: 1\n" for i in range(60_000)),
    "many values": HEAD + "grid: {x: [" + ",".join(map(str, range(120_000))) + "]}",
    "many comments": "#\n" * 490_000,
}  # fmt: skip


LONG = ("many keys", "many values")  # to parse


@pytest.mark.parametrize("case", [*(case for case in BOMBS if case not in LONG), *also(*LONG)])
def test_yaml_bomb_is_refused_within_200_mb(load, case):
    tracemalloc.start()
    said = refusal(load, BOMBS[case])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 200_000_000
    assert all(len(line) < 500 for line in said)


# --- any mutation --------------------------------------------------------------------------------


SEEDS = [
    yaml.safe_dump({**GOOD, "fixed": {"rate": 0.5}, "seeds": [1]}),
    yaml.safe_dump({**GOOD, "include": [{"x": 7, "how": "a"}], "exclude": [{"x": 2}]}),
]
SHIPPED = [file.read_text().replace("../", f"{ACCEPTANCE.parent}/") for file in GRIDS]
PIECES = [
    "", "\n", "  ", "- ", ": ", "\t", "{", "}", "[", "]", "'", '"', "&a ", "*a", "!!set ",
    "<<: ", "~", "yes", "-1", "0", "012", "1:30", "1e-3", ".nan", ".inf", "99999999999999999999",
    "2024-01-01", "1.5", "true", "null", "[]", "{}", "[[1]]", "a: 1", "\r\n", "\ufeff", "\0",
    "grid:", "seeds: [1, 2]", "seeds:", "include: [{x: 1}]", "exclude: [{x: 1}]", "fixed: {x: 1}",
    "x", "gamma: [-1]", "ngram:0", "medusa:x", "model:", "grown:99999", "3x9999999999x9",
    "\u202e", "é", "../reader.ipynb",
]  # fmt: skip


@st.composite
def mutated(draw, texts):
    """A valid grid with parts removed, repeated, moved or replaced by odd text."""
    text = draw(st.sampled_from(texts))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(text)))
        end = draw(st.integers(at, min(len(text), at + 12)))
        piece = st.sampled_from(PIECES) | st.text(max_size=4) | st.just(text[at:end] * 2)
        text = text[:at] + draw(piece) + text[end:]
    return text


def holds(load, text: str) -> None:
    """The text loads as points with fitting values, or fails with the lines of its problems."""
    said, points = "", []
    try:
        points = load(text.encode("utf-8", "surrogatepass"), ask=lambda n: False)
    except UserError as refused:
        said = str(refused)
    assert bool(points) != bool(said)
    for line in said.split("\n") if said else ():
        assert line.isprintable()
        assert re.search(r"g\.yaml(:\d+)?: |are more than", line), line
    for point in points:
        known = notebooks.read(point.notebook).parameters
        assert list(point.params) == list(known)
        assert not any(p.problem(point.params[n]) for n, p in known.items())
    assert len({p.run_key for p in points}) == len(points)


@pytest.mark.parametrize("text", SEEDS + SHIPPED[:2])
def test_texts_to_mutate_are_valid_grids(load, text):
    assert len(load(text)) >= 2


@settings(max_examples=200, **FUZZ)
@given(text=mutated(SEEDS))
def test_mutated_grid_loads_or_names_its_problem(load, text):
    holds(load, text)


@settings(max_examples=12, **FUZZ)
@given(text=mutated(SHIPPED))
def test_mutated_shipped_grid_loads_or_names_its_problem(load, text):
    holds(load, text)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@settings(max_examples=8_000, **FUZZ)
@given(text=mutated(SEEDS))
def test_many_mutated_grids_load_or_name_their_problems(load, text):
    holds(load, text)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@settings(max_examples=2_000, **FUZZ)
@given(text=mutated(SHIPPED))
def test_many_mutated_shipped_grids_load_or_name_their_problems(load, text):
    holds(load, text)


def test_yaml_lines_gives_the_line_of_each_value(tmp_path):
    (tmp_path / "g.yaml").write_text("a: 1\n\n# no\nb:\n- x\n-   {c: 2,\n  d: [3,\n 4]}\n")
    document = yaml_lines.read(tmp_path / "g.yaml")
    assert document.value == {"a": 1, "b": ["x", {"c": 2, "d": [3, 4]}]}
    expected = {("a",): 1, ("b",): 4, ("b", 0): 5, ("b", 1): 6, ("b", 1, "c"): 6, ("b", 1, "d"): 7,
                ("b", 1, "d", 1): 8, ("b", 1, "d", 9): 7, ("nowhere", 3): 1}  # fmt: skip
    assert {path: document.line(*path) for path in expected} == expected


def test_yaml_lines_reads_shipped_grids_as_pyyaml_does():
    for file in GRIDS:
        assert yaml_lines.read(file).value == yaml.safe_load(file.read_text())


def test_long_axis_is_read_in_linear_time(points, monkeypatch):
    calls, canonical = [], grid_file.canonical
    monkeypatch.setattr(grid_file, "canonical", lambda v: calls.append(v) or canonical(v))
    count = 300
    assert len(points(x=list(range(count)))) == count
    assert len(calls) < 40 * count
