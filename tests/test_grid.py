"""Grid files: what runs, and the many ways a file is refused before anything does."""

import textwrap
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specexp.errors import UserError
from specexp.lab import build, grid

TRIVIAL = Path(__file__).parent / "notebooks" / "trivial.ipynb"
GOOD = {"notebook": str(TRIVIAL), "experiment": "trivial", "grid": {"x": [1, 2]}}


@pytest.fixture(autouse=True)
def no_semantics(monkeypatch):
    """The trivial notebook has no models; what `build.check` finds is tested on its own."""
    monkeypatch.setattr(build, "check", lambda params: [])


@pytest.fixture
def load(tmp_path):
    def call(text: str | bytes | dict) -> list[grid.Point]:
        file = tmp_path / "g.yaml"
        if isinstance(text, dict):
            text = yaml.safe_dump(text)
        file.write_bytes(text if isinstance(text, bytes) else textwrap.dedent(text).encode())
        return grid.load([file])

    return call


def test_the_product_of_axes_with_fixed_seeds_include_and_exclude(load):
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
    assert points[-1].params == {"x": 9, "how": "well", "rate": 2.0, "seed": 0, "names": ["a"]}
    assert "x=9" in points[-1].label


def test_every_parameter_is_resolved_and_names_the_point(load):
    one, two = load(GOOD)
    assert set(one.params) == {"x", "how", "rate", "seed", "names"}
    assert one.run_key != two.run_key
    assert [p.run_key for p in load(GOOD)] == [one.run_key, two.run_key]


def test_the_key_changes_with_a_default_spelt_out_only_if_its_value_does(load):
    spelt = {**GOOD, "fixed": {"how": "well", "rate": 1}}
    assert [p.run_key for p in load(spelt)] == [p.run_key for p in load(GOOD)]
    other = {**GOOD, "fixed": {"how": "raises"}}
    assert {p.run_key for p in load(other)}.isdisjoint({p.run_key for p in load(GOOD)})


def test_the_key_changes_with_the_code_and_with_the_notebook(load, monkeypatch):
    before = load(GOOD)[0].run_key
    monkeypatch.setattr(grid, "code_digest", lambda: "other code")
    code = load(GOOD)[0].run_key
    monkeypatch.setattr(grid, "_digest", lambda path: "other notebook")
    assert len({before, code, load(GOOD)[0].run_key}) == 3


def test_the_same_point_of_two_files_runs_once(tmp_path):
    files = [tmp_path / "a.yaml", tmp_path / "b.yaml"]
    for file in files:
        file.write_text(yaml.safe_dump(GOOD))
    assert len(grid.load(files)) == 2


def test_shipped_grids_are_valid_but_for_models_that_are_not_here():
    files = sorted((grid.ROOT / "notebooks" / "grids").glob("*.yaml"))
    assert len(files) >= 6
    assert len(grid.load(files)) > 20


HEAD = f"notebook: {TRIVIAL}\n"
BAD = {
    # YAML itself
    "syntax": ("notebook: [", "line"),
    "tab": ("notebook:\n\t- a", "line"),
    "empty": ("", "mapping"),
    "list at top": ("- a\n- b", "mapping"),
    "text at top": ("hello", "mapping"),
    "number at top": ("3", "mapping"),
    "duplicate key": (HEAD + "grid: {x: [1]}\ngrid: {x: [2]}", "twice"),
    "duplicate parameter": (HEAD + "grid:\n  x: [1]\n  x: [2]", "twice"),
    "python tag": (HEAD + "fixed: !!python/object/apply:os.getcwd []", "tag"),
    "custom tag": (HEAD + "fixed: !thing {}", "tag"),
    "not utf-8": (b"notebook: \xff\xfe", "UTF-8"),
    "too large": (b"# " + b"x" * 1_100_000, "larger"),
    "aliases": (HEAD + "fixed: &a {x: 1}\ninclude: [" + ", ".join(["*a"] * 120) + "]", "aliases"),
    "unknown alias": (HEAD + "fixed: *nowhere", "alias"),
    "two documents": (HEAD + "---\n" + HEAD, "document"),
    "number as key": (HEAD + "1: 2", "not a text"),
    # keys
    "unknown key": (HEAD + "gird: {x: [1]}", "did you mean 'grid'"),
    "far key": (HEAD + "zzz: 1", "there are notebook"),
    "no notebook": ("grid: {x: [1]}", "notebook: name"),
    "notebook a number": ("notebook: 3", "notebook: name"),
    "notebook null": ("notebook: null", "notebook: name"),
    "notebook missing": ("notebook: nothing.ipynb", "does not exist"),
    "notebook near": ("notebook: ../10_aceptance.ipynb", "did you mean '10_acceptance.ipynb'"),
    "notebook not a notebook": ("notebook: README.md", "does not exist"),
    "notebook a folder": ("notebook: notebooks", "does not exist"),
    "experiment with slash": (HEAD + "experiment: ../up\ngrid: {x: [1]}", "experiment"),
    "experiment a list": (HEAD + "experiment: [a]\ngrid: {x: [1]}", "experiment"),
    "experiment long": (HEAD + f"experiment: {'a' * 100}", "experiment"),
    "fixed a list": (HEAD + "fixed: [1]", "fixed: a mapping"),
    "grid a list": (HEAD + "grid: [1]", "grid: a mapping"),
    "axis not a list": (HEAD + "grid: {x: 1}", "grid.x: a list"),
    "axis empty": (HEAD + "grid: {x: []}", "grid.x: a list with at least"),
    "axis null": (HEAD + "grid: {x: null}", "grid.x: a list"),
    "axis twice": (HEAD + "grid: {x: [1, 1]}", "twice"),
    "include a mapping": (HEAD + "include: {x: 1}", "include: a list"),
    "include empty entry": (HEAD + "include: [{}]", "include: a list"),
    "exclude a list of texts": (HEAD + "grid: {x: [1]}\nexclude: [a]", "exclude: a list"),
    "seeds a number": (HEAD + "seeds: 3", "seeds: a list"),
    "seeds empty": (HEAD + "seeds: []", "seeds: a list"),
    "seeds negative": (HEAD + "seeds: [-1]", "seeds: a list"),
    "seeds booleans": (HEAD + "seeds: [true]", "seeds: a list"),
    "seeds twice": (HEAD + "seeds: [1, 1]", "twice"),
    "timeout 0": (HEAD + "timeout_s: 0", "timeout_s"),
    "timeout text": (HEAD + "timeout_s: long", "timeout_s"),
    "timeout infinite": (HEAD + "timeout_s: .inf", "timeout_s"),
    # parameters
    "unknown parameter": (HEAD + "grid: {hwo: [well]}", "did you mean 'how'"),
    "unknown fixed": (HEAD + "fixed: {zzz: 1}", "there are x, how"),
    "unknown include": (HEAD + "include: [{zzz: 1}]", "include.zzz"),
    "unknown exclude": (HEAD + "grid: {x: [1]}\nexclude: [{zzz: 1}]", "exclude.zzz"),
    "code as name": (HEAD + 'fixed: {"x=0\\nimport os": 1}', "not a parameter name"),
    "keyword as name": (HEAD + "fixed: {class: 1}", "not a parameter name"),
    "dunder as name": (HEAD + "fixed: {__builtins__: 1}", "not a parameter name"),
    "homoglyph": (HEAD + "fixed: {ѕeed: 1}", "not a parameter name"),
    "secret name": (HEAD + "fixed: {api_key: abc}", "secret"),
    "secret value": (HEAD + f"fixed: {{how: hf_{'a' * 30}}}", "secret"),
    "int for text": (HEAD + "fixed: {how: 3}", "quotes"),
    "yes for text": (HEAD + "fixed: {how: yes}", "true and false"),
    "text for int": (HEAD + "fixed: {x: two}", "needs int"),
    "float for int": (HEAD + "fixed: {x: 1.5}", "needs int"),
    "bool for int": (HEAD + "fixed: {x: true}", "needs int"),
    "null for int": (HEAD + "fixed: {x: null}", "needs int, not null"),
    "1e-3": (HEAD + "fixed: {rate: 1e-3}", "1.0e-3"),
    "nan": (HEAD + "fixed: {rate: .nan}", "finite"),
    "infinity": (HEAD + "grid: {rate: [1.0, -.inf]}", "finite"),
    "huge int": (HEAD + "fixed: {x: 99999999999999999999}", "too large"),
    "date": (HEAD + "fixed: {how: 2024-01-01}", "needs str"),
    "list for int": (HEAD + "fixed: {x: [1]}", "needs int"),
    "text for list": (HEAD + "fixed: {names: a}", "needs list"),
    "mapping in list": (HEAD + "fixed: {names: [{a: 1}]}", "numbers and texts only"),
    "nan in list": (HEAD + "fixed: {names: [.nan]}", "finite"),
    "control character": (HEAD + 'fixed: {how: "a\\x07b"}', "control"),
    "long text": (HEAD + f"fixed: {{how: {'a' * 70_000}}}", "70000 characters"),
    "fixed and axis": (HEAD + "fixed: {x: 1}\ngrid: {x: [2]}", "both fixed and on an axis"),
    "seed twice": (HEAD + "grid: {seed: [1]}\nfixed: {seed: 2}", "both fixed"),
    # points
    "excludes all": (HEAD + "grid: {x: [1]}\nexclude: [{x: 1}]", "no point"),
    "excludes nothing": (HEAD + "grid: {x: [1]}\nexclude: [{x: 5}]", "matches no point"),
    "too many": (HEAD + f"grid: {{x: {list(range(101))}, seed: {list(range(100))}}}", "split"),
}


def test_there_are_more_than_sixty_bad_files():
    assert len(BAD) >= 60


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused_in_one_line_that_says_why(load, case):
    text, said = BAD[case]
    with pytest.raises(UserError) as refused:
        load(text)
    lines = str(refused.value).splitlines()
    assert len(lines) == 1, lines
    assert "g.yaml" in lines[0]
    assert said in lines[0]


def test_all_problems_are_told_at_once(load):
    with pytest.raises(UserError) as refused:
        load(HEAD + "fixed: {x: two, hwo: 1, rate: .nan}")
    assert len(str(refused.value).splitlines()) == 3


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.yaml: cannot be read"):
        grid.load([tmp_path / "nowhere.yaml"])


def test_what_the_models_say_is_told_once_for_all_points(load, monkeypatch):
    monkeypatch.setattr(build, "check", lambda params: ["gamma is -1; it must be 0 or more"])
    with pytest.raises(UserError) as refused:
        load(GOOD)
    assert str(refused.value).count("gamma is -1") == 1


NO_FIXTURE_CHECK = [HealthCheck.function_scoped_fixture]


@settings(max_examples=300, deadline=None, suppress_health_check=NO_FIXTURE_CHECK)
@given(data=st.data())
def test_any_mutation_loads_or_names_its_problem(load, data):
    text = yaml.safe_dump({**GOOD, "fixed": {"rate": 0.5}, "seeds": [1]})
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(at, min(len(text), at + 6)))
        text = text[:at] + data.draw(st.text(max_size=4)) + text[end:]
    said, points = "", []
    try:
        points = load(text.encode("utf-8", "surrogatepass"))
    except UserError as refused:
        said = str(refused)
    assert bool(points) != bool(said)
