"""A drafter, a rule and a policy from a notebook cell, as the page of this room shows them."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from specexp import drafters, objects
from specexp.errors import UserError
from specexp.grids import points, runner
from specexp.measure import costs, one_pairing, under_load
from specexp.measure.exactness import certify
from specexp.measure.prompts import Prompt
from specexp.tracking import runs

PAGE = Path(drafters.__file__).with_name("README.md").read_text()
NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "10_acceptance.ipynb"
PROMPTS = [[1, 2, 1, 2, 1, 2], [5, 6, 7], [9]]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def cell():
    """The names that the page's Python defines, run from top to bottom."""
    names = {"__name__": "__main__"}
    for block in blocks("python"):
        exec(block, names)
    return names


@pytest.mark.slow
def test_page_shows_a_drafter_a_rule_and_a_policy_that_run(cell, capsys):
    exec(blocks("python")[0], {"__name__": "__main__"})
    rate, speedup, exact = capsys.readouterr().out.splitlines()
    assert 0 < float(rate) <= 1
    assert speedup.startswith("speedup ")
    assert exact.startswith("exact: 64 tokens in 2 rows")
    assert cell["warm"].engine.rule.name == "follow"
    assert type(cell["cautious"].engine.policy).__name__ == "Cautious"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tree", ["chain", "2x2"])
def test_own_drafter_and_rule_are_exact(cell, temperature, tree):
    pair = cell["pair"].with_(
        drafter=cell["Echo"](3), rule=cell["Follow"], temperature=temperature, tree=tree
    )
    checked = certify(pair.engine, PROMPTS, 24)
    assert checked.bugs == 0
    assert checked.metrics["exact/pass"] == 1
    assert pair.engine.generate(PROMPTS, 24).trace.acceptance.drafted > 0


def test_own_policy_is_exact_and_adapts(cell):
    pair = cell["pair"].with_(policy=cell["Cautious"]())
    assert certify(pair.engine, PROMPTS, 24).bugs == 0
    assert len({r.depth for r in pair.engine.generate(PROMPTS, 24).trace.rounds}) > 1


def test_own_drafter_proposes_the_period(cell):
    [out] = cell["pair"].engine.generate([PROMPTS[0]], 1).trace.rounds
    assert out.steps[0].draft == (1, 2, 1, 2)


ANNOTATED = """
import specexp

class Last(specexp.Drafter):
    def __init__(self, times: Unknown = 1):
        pass

    def propose(self, seqs: Unknown, tree: Unknown, rng: Unknown) -> Unknown:
        return seqs.draft(tree.nodes(seqs.tokens.device), seqs.root.expand(-1, len(tree) - 1))
"""


def test_annotations_may_name_what_only_a_type_checker_imports(cell):
    lazy = "" if sys.version_info >= (3, 14) else "from __future__ import annotations\n"
    exec(lazy + ANNOTATED, names := {"__name__": "__main__"})
    last = objects.construct("drafter", "last", names["Last"], "2")
    pair = cell["pair"].with_(drafter=last)
    assert pair.engine.generate(PROMPTS, 4).trace.acceptance.drafted > 0


class Late(drafters.Drafter):
    """Goes wrong behind 20 tokens, where nothing is checked: it raises or, if its rounds may be
    recorded, proposes what no vocabulary has."""

    def __init__(self, on_host):
        self.on_host = on_host

    def propose(self, seqs, tree, rng):
        if self.on_host and int(seqs.length.max()) > 20:
            raise LookupError("my own mistake")
        tokens = seqs.root.expand(-1, len(tree) - 1)
        return seqs.draft(
            tree.nodes(tokens.device), tokens.masked_fill(seqs.length[:, None] > 20, 10**6)
        )


@pytest.mark.parametrize("on_host", [True, False])
def test_drafter_that_goes_wrong_late_is_named_with_its_round(cell, on_host):
    pair = cell["pair"].with_(drafter=Late(on_host))
    with pytest.raises(LookupError) as raised:
        pair.engine.generate(PROMPTS, 40)
    [note] = raised.value.__notes__
    assert re.fullmatch(r"with drafter late, after \d+ rounds", note)
    assert (raised.traceback[-1].name == "propose") == on_host
    texts = [Prompt(1, "code", ("x = 1\n" * 5,))]
    for measured in (
        lambda: one_pairing.pass_costs(pair, texts, [2]),
        lambda: under_load.closed_loops(pair, ["always:2"], None, texts, [1], 24, 2),
        lambda: costs.measure(pair.engine, PROMPTS, [1], [2], [48]),
    ):
        with pytest.raises(LookupError) as raised:
            measured()
        assert raised.value.__notes__[0].startswith("with drafter late")


class Unread(Late):
    def prefill(self, seqs, hidden):
        if int(seqs.length.max()) > 20:
            raise LookupError("my own mistake")


def test_drafter_that_goes_wrong_as_a_served_prompt_is_read_is_named(cell):
    pair = cell["pair"].with_(drafter=Unread(False))
    texts = [Prompt(1, "code", ("x = 1\n" * 5,))]
    with pytest.raises(LookupError) as raised:
        under_load.closed_loops(pair, ["always:2"], None, texts, [1], 24, 2)
    assert raised.value.__notes__ == ["with drafter unread"]


@pytest.fixture
def mine(tmp_path):
    """The page's grid, in a folder with the notebook and `mine.py`."""
    imports = "import torch\nimport specexp\nfrom specexp.sampling import TOKEN\n"
    classes = re.findall(r"^class .*?(?=\n\n\n|\Z)", "\n\n\n".join(blocks("python")), re.M | re.S)
    (tmp_path / "mine.py").write_text(imports + "\n\n".join(c for c in classes[:2]))
    shutil.copy(NOTEBOOK, tmp_path / NOTEBOOK.name)
    [grid] = map(yaml.safe_load, blocks("yaml"))
    grid["fixed"] |= {"max_new_tokens": 8, "temperatures": [1.0], "device": "cpu"}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(grid))
    return tmp_path / "mine.yaml"


def test_own_drafter_runs_in_a_grid_and_is_a_parameter_in_mlflow(mine, store, kept):
    todo = [p for p in points.load([mine]) if p.params["drafter"] == "mine:Echo:3"]
    console = Console(record=True, width=200)
    assert runner.run(todo, console) == 0, console.export_text()
    client = runs.client()
    [experiment] = client.search_experiments(filter_string="name = 'my drafter'")
    [run] = client.search_runs([experiment.experiment_id])
    assert run.data.params["drafter"] == "mine:Echo:3"
    assert run.data.metrics["exact/pass"] == 1
    assert run.data.metrics["counts/drafted"] > 0


def test_key_of_a_point_covers_the_file_of_its_drafter(mine):
    before = {p.params["drafter"]: p.run_key for p in points.load([mine])}
    (mine.parent / "mine.py").open("a").write("\n# changed\n")
    after = {p.params["drafter"]: p.run_key for p in points.load([mine])}
    assert {name for name in before if before[name] != after[name]} == {"mine:Echo", "mine:Echo:3"}


def test_grid_with_an_unknown_class_is_refused_before_it_starts(mine):
    spec = yaml.safe_load(mine.read_text())
    spec["grid"]["drafter"] = ["mine:Ecko"]
    mine.write_text(yaml.safe_dump(spec))
    with pytest.raises(UserError, match="drafter mine:Ecko: module mine has no Ecko"):
        points.load([mine])
