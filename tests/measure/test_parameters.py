"""One table of parameters: notebooks, commands and the page say what it says."""

import json
import re
from pathlib import Path

import pytest
from support.problems import problems

from specexp import api, errors
from specexp.measure import parameters
from specexp.measure.parameters import PARAMETERS
from specexp.zoo.known import Known

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))


def tagged(notebook: Path) -> list[str]:
    cells = json.loads(notebook.read_text())["cells"]
    [cell] = [c for c in cells if "parameters" in c["metadata"].get("tags", [])]
    return "".join(cell["source"]).splitlines()


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_explains_parameters_as_the_table(notebook):
    """Type and help of each; a notebook may add to the help after a semicolon."""
    for line in tagged(notebook):
        name, kind, comment = re.fullmatch(r"(\w+): (\w+) = .*?  # (.*)", line).groups()
        assert kind == PARAMETERS[name].type, line
        assert re.fullmatch(re.escape(PARAMETERS[name].help) + "(; .*)?", comment), line


def test_page_of_parameters_is_up_to_date():
    page = parameters.PAGE.read_text()
    table = page.partition(parameters.BEGIN)[2].partition(parameters.END)[0]
    assert table == parameters.as_markdown(), "run: python -m specexp.measure.parameters"


def test_defaults_are_those_of_load():
    for name in ("drafter", "temperature", "top_k", "top_p", "rule", "tree", "device"):
        assert PARAMETERS[name].default == api.DEFAULTS[name]


def test_lists_are_of_parameters_in_the_table():
    for name, parameter in PARAMETERS.items():
        assert not parameter.each or PARAMETERS[parameter.each].type != "list", name
        assert parameter.each == "" or parameter.type == "list", name


def test_value_of_another_type_is_left_to_its_notebook():
    assert problems({"count": "many", "rows": "a"}) == []


@pytest.mark.parametrize(
    ("params", "names"),
    [
        ({"gammas": [2, -1]}, ("gammas",)),
        ({"target": "target-10n", "gamma": 3}, ("target",)),
        ({"target": "target-10m", "drafter": "nrgam", "gamma": 1}, ("drafter",)),
        ({"target": "target-10m", "drafter": "ngram", "rivals": ["nrgam"]}, ("rivals",)),
        ({"target": "target-10m", "gamma": 1, "max_new_tokens": 10**6}, ("max_new_tokens",)),
        ({"policies": ["alwys:3"]}, ("policies",)),
    ],
)
def test_problem_names_the_parameter_to_change_first(params, names):
    [problem] = parameters.problems_of(params, None, Known())
    assert problem.names[: len(names)] == names


@pytest.mark.parametrize("warm", [{"temperature": 0.5}, {"temperatures": [0.0, 1.0]}, {}], ids=str)
def test_sampling_options_that_greedy_decoding_ignores_are_warned_of(caplog, warm):
    errors.warn_once.cache_clear()
    parameters.insist({"temperature": 0.0, "top_k": 0, "top_p": 0.9, "sampling": "given"} | warm)
    said = [] if warm else ["top_p has no effect at temperature 0"]
    assert [record.message for record in caplog.records] == said
