"""Every causal architecture of transformers: its texts are transformers' own, or a line refuses it.

The page's table of architectures is what these tests observe; they print a row that is not there.
"""

import re
from pathlib import Path

import pytest
from support import architectures

PAGE = Path(__file__).parents[2] / "specexp" / "models" / "README.md"
ROWS = dict(re.findall(r"^\| (\S.*?) \| (r\S.*?) \|$", PAGE.read_text(), re.MULTILINE))


def test_readme_counts_the_table():
    served = sum(outcome.startswith("right") for outcome in ROWS.values())
    text = (PAGE.parents[2] / "README.md").read_text()
    assert f"Of {len(ROWS)} architectures of transformers {served} are served" in text


def test_the_table_names_every_variant_of_every_architecture():
    assert list(ROWS) == list(architectures.variants())


@pytest.mark.parametrize("name", architectures.variants())
def test_short_texts_over_trees_are_those_of_transformers(name):
    served = architectures.outcome(name, (3, 40), ("ngram branching",))
    assert ROWS[name].startswith(served), f"| {name} | {served} |"


@pytest.mark.slow
@pytest.mark.parametrize("name", architectures.variants())
def test_texts_of_every_drafter_and_tree_are_those_of_transformers(name):
    served = architectures.outcome(name, architectures.LENGTHS, architectures.MIXES)
    assert served == ROWS[name], f"| {name} | {served} |"
