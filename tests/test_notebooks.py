"""Every notebook runs, by papermill as by hand, and logs what the next one compares."""

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
import yaml
from conftest import one_in
from PIL import Image
from rich.console import Console
from support.problems import problems

import specexp
from specexp.decision import recommend
from specexp.fitting import Limits, reach
from specexp.grids import points, runner
from specexp.policy import Fixed
from specexp.tracking import compare, mlflow_view, report, runs
from specexp.tree import Tree

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
SMALL = {
    "00_lesson": {"gamma": 2, "gammas": [1, 2], "batches": [1, 2], "count": 80, "limit": 3,
                  "max_new_tokens": 6},
    "10_acceptance": {"rivals": ["ngram"], "limit": 5, "max_new_tokens": 6, "temperatures": [0.0]},
    "20_latency": {"gammas": [1, 2], "limit": 2, "max_new_tokens": 6, "temperature": 0.8,
                   "top_p": 0.9},
    "30_throughput_under_batch": {"batches": [1, 2], "limit": 5, "max_new_tokens": 6, "repeats": 2,
                                  "turns": 2, "temperature": 0.8, "top_k": 5},
    "35_load_aware": {"policies": ["always:1"], "streams": [1, 2], "turns": 2, "count": 6,
                      "rows": 2, "limit": 5, "max_new_tokens": 6},
    "36_break_even_map": {"gammas": [1, 2], "batches": [1, 2], "contexts": [32, 48], "limit": 5,
                          "measured_batches": [1, 2], "max_new_tokens": 6, "repeats": 2},
    "37_fleet": {"policies": ["always:1"], "requests_per_day": 500, "sample": 40, "rows": 3,
                 "prompt_tokens": 5, "output_tokens": 8, "tpot_steps": 30.0, "ttft_ms": 9e4,
                 "limit": 5, "max_new_tokens": 6},
    "40_drafters": {"rivals": ["ngram", "recycle"], "trees": ["2x1", "grown:4"], "gamma": 2,
                    "limit": 2, "max_new_tokens": 6},
    "60_rules": {"rules": ["reject", "typical"], "gamma": 2, "temperatures": [0.0, 1.0],
                 "limit": 3, "max_new_tokens": 6},
}  # fmt: skip

APART = ("50_servers", "90_compare")  # each has a test of its own

CHECKPOINTS = (
    "1: 80% and 100%", r"2: α = [\d.]+%; like p",
    r"3: 2\.95 tokens, 1\.85x; best γ = 4: 1\.87x", r"4: (from 0\.\d\d|at none)",
)  # fmt: skip


def test_every_experiment_notebook_is_tested():
    assert {p.stem for p in NOTEBOOKS.glob("*.ipynb")} == {*SMALL, *APART}


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("prompts") / "question.jsonl"
    kinds = ("c0", "q&a: 数学")
    questions = [
        {"question_id": i or "first", "category": kinds[i % 2], "turns": [f"mean {i}"]}
        for i in range(6)
    ]
    file.write_text("\n".join(map(json.dumps, questions)))
    return str(file)


def test_notebooks_run_as_a_grid_and_are_compared(
    store, kept, tmp_path, tiny_folders, prompts_file, monkeypatch
):
    """One store: every experiment by the runner, then the comparison over their runs. Whether their
    timings are credible is not asked: beside other tests they seldom are."""
    monkeypatch.setattr(compare, "has_doubtful_timing", lambda attempt: False)
    target, draft = tiny_folders
    files = []
    for name, small in SMALL.items():
        fixed = {"target": target, "drafter": draft, "prompts": prompts_file, **small}
        files.append(tmp_path / f"{name}.yaml")
        spec = {"notebook": f"notebooks/{name}.ipynb", "experiment": name[3:], "fixed": fixed}
        files[-1].write_text(yaml.safe_dump(spec))
    whole_grid = points.load(files)
    console = Console(record=True, width=160)
    assert runner.run(whole_grid, console) == 0, console.export_text()
    assert f"{len(SMALL)} of {len(SMALL)} points to run, in forked kernels" in console.export_text()
    finished = runs.runs()
    assert set(finished["experiment"]) == {name[3:] for name in SMALL}
    assert (finished["metrics.exact/pass"] == 1).all()
    groups = {name[8:].partition("/")[0] for name in finished if name.startswith("metrics.")}
    assert groups <= compare.GROUPS
    by_name = finished.set_index("experiment")
    for metric in ("acceptance/rate", "acceptance/length", "counts/emitted", "exact/tokens"):
        assert by_name[f"metrics.{metric}"].notna().all()
    kinds = [f"metrics.category/{kind}" for kind in ("c0", "q_a_")]
    assert (by_name.loc[["acceptance"], kinds].max() >= 0).all()
    assert by_name.loc["latency", "metrics.speedup/predicted"] > 0
    assert by_name.loc["throughput_under_batch", "metrics.speedup/at_largest_batch"] > 0
    for end in ("low", "high"):
        of_each = by_name.loc[
            ["lesson", "throughput_under_batch"], f"metrics.speedup/at_batch_{end}"
        ]
        assert of_each.notna().all()
    assert by_name.loc["load_aware", "metrics.regret/worst"] < 1
    assert by_name.loc["load_aware", "metrics.simulated/throughput_off"] >= 0
    assert by_name.loc["break_even_map", "metrics.map/predicted_error"] >= 0
    assert by_name.loc["break_even_map", "metrics.costs/floor_ms"] >= 0
    assert by_name.loc["fleet", "metrics.fleet/replicas"] >= 1
    assert by_name.loc["fleet", "metrics.fleet/saved"] <= 1
    for name in ("10_acceptance", "40_drafters"):
        assert len(by_name.loc[[name[3:]]]) == 1 + len(SMALL[name]["rivals"])
    drafters = by_name.loc[["drafters"]]
    assert (drafters[["metrics.cost/draft_steps", "metrics.speedup/measured"]] > 0).all(axis=None)
    assert by_name.loc["rules", "metrics.exact/total_variation"] == 0
    for point in whole_grid:
        result = store / "results" / point.run_key
        assert (result / "tables" / "rounds.parquet").stat().st_size > 0
        drawn = list((result / "figures").glob("*.png"))
        assert len(drawn) >= 2
        for title in (Image.open(file).text["Title"] for file in drawn):
            assert Path(target).name in title, "what was measured"
            assert re.search(r"\d prompts", title), "on how many prompts"
            if point.params.get("temperature") == 0.8:
                assert re.search("temperature 0.8, top_(p 0.9|k 5),", title), "how it was sampled"
        assert len(images(result / "notebook.ipynb")) >= 2
        assert draft not in texts(result / "notebook.ipynb")  # its short name is
        html = (result / "notebook.html").read_text()
        assert " object at 0x" not in html
        assert not re.findall(r"""<script|(?:src|href)=["']?(?:https?:)?//""", html)
        assert "Content-Security-Policy" in html
    said = texts(store / "results" / whole_grid[0].run_key / "notebook.ipynb")
    for answer in CHECKPOINTS:  # of 00_lesson
        assert re.search(answer, said), answer
    compared = execute("90_compare", tmp_path)
    assert draft not in texts(compared)
    assert len(images(compared)) == 4
    assert f"{len(finished)} finished runs" in compared.read_text()
    assert "no result has a speedup" not in texts(compared)
    for asked in ({"grid": "10_acceptance"}, {"grid": "20_latency", "newest": 0}):
        assert "no result has a speedup" in texts(execute("90_compare", tmp_path, parameters=asked))


def test_a_tree_has_no_chain_of_its_size_where_the_drafter_drafts_less():
    """The default trees of 40_drafters, with heads that draft at most 7 tokens ahead."""
    cells = nbformat.read(NOTEBOOKS / "40_drafters.ipynb", 4).cells
    [build] = [cell.source for cell in cells if "\nshapes = " in cell.source]
    limits = Limits(deepest=7)

    def with_(tree: str, gamma: int = 3) -> SimpleNamespace:
        shape = Tree.parse(tree, gamma)
        reach("dflash", limits, shape)
        return SimpleNamespace(engine=SimpleNamespace(policy=Fixed(shape)))

    names = {"pairing": SimpleNamespace(deepest=7, with_=with_), "trees": ["4x2", "2x1x1"]}
    exec(build[build.index("shapes = ") : build.index("texts = ")], names)
    assert list(names["shapes"]) == ["4x2", "2x1x1", "chain of 6"]


def test_servers_are_compared_under_load_and_recommended(
    store, tmp_path, tiny_folders, prompts_file, serving, monkeypatch
):
    monkeypatch.setattr(mlflow_view, "doubts", lambda *about: [])  # not asked beside other tests
    target, _ = tiny_folders
    drafting = specexp.load(target, drafter="ngram", gamma=2)
    point = {
        "server": serving(drafting), "plain_server": serving(drafting.with_(drafter="plain")),
        "target": target, "drafter": "ngram", "gamma": 2, "prompts": prompts_file,
        "streams": [1, 2], "max_new_tokens": 6, "repeats": 1,
    }  # fmt: skip
    file, console = tmp_path / "own.yaml", Console(record=True, width=160)
    spec = {"notebook": "notebooks/50_servers.ipynb", "fixed": point}
    file.write_text(yaml.safe_dump(spec))
    assert runner.run(points.load([file]), console) == 0, console.export_text()
    [run] = runs.runs().to_dict("records")
    assert run["metrics.exact/same"] == 1
    assert 0 <= run["metrics.acceptance/rate"] <= 1
    assert run["metrics.speedup/at_batch"] == run["metrics.speedup/at_largest_batch"] > 0
    [advice] = recommend.advise()
    assert str(advice.situation).endswith("vLLM on 127.0.0.1")
    assert {m.batch for m in advice.measured} == {1, 2}
    page = report.page(report.newest(store.glob("results/*")))
    assert "At least 100% of the texts are the plain server" in page
    assert "vLLM on 127.0.0.1" in page
    [figure] = store.glob("results/*/figures/load.png")
    assert "ngram, γ = 2, 6 prompts" in Image.open(figure).text["Title"]


def test_compare_without_runs_says_what_to_run(store, tmp_path, fork_server):
    with (
        fork_server.worker() as worker,
        worker.kernel(dict(os.environ), NOTEBOOKS, tmp_path / "log", seed=0) as kernel,
    ):
        assert "run `make demo`" in execute("90_compare", tmp_path, km=kernel).read_text()


def execute(name: str, folder: Path, **options) -> Path:
    import papermill

    out = folder / f"{name}.ipynb"
    papermill.execute_notebook(
        str(NOTEBOOKS / f"{name}.ipynb"), str(out), cwd=str(NOTEBOOKS), kernel_name="python3",
        progress_bar=False, **options,
    )  # fmt: skip
    return out


def outputs(notebook: Path) -> list:
    cells = nbformat.read(notebook, as_version=4).cells
    return [o for c in cells if c.cell_type == "code" for o in c.outputs]


def images(notebook: Path) -> list[str]:
    shown = outputs(notebook)
    return [o["data"]["image/png"] for o in shown if "image/png" in o.get("data", {})]


def texts(notebook: Path) -> str:
    return "".join(o.get("text", "") + str(o.get("data", "")) for o in outputs(notebook))


BROKEN = """
from dataclasses import replace

from specexp.models.lm import LM

whole = LM.verify
LM.verify = lambda lm, seqs, draft, taps=(): whole(
    lm, replace(seqs, length=seqs.length + (draft.tokens.shape[1] > 1)), draft, taps)
"""


@pytest.mark.parametrize("name", one_in(5, SMALL))
def test_planted_divergence_fails_the_notebook(
    name, store, kept, tmp_path, tiny_folders, prompts_file
):
    """A cache off by one is planted before the check: the notebook stops and logs nothing."""
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    built = next(i for i, c in enumerate(notebook.cells) if "parameters.insist(params)" in c.source)
    notebook.cells.insert(built + 1, nbformat.v4.new_code_cell(BROKEN))
    nbformat.write(notebook, tmp_path / f"{name}.ipynb")
    target, draft = tiny_folders
    fixed = {"target": target, "drafter": draft, "prompts": prompts_file, **SMALL[name]}
    file = tmp_path / "broken.yaml"
    file.write_text(yaml.safe_dump({"notebook": f"{name}.ipynb", "fixed": fixed}))
    [point] = points.load([file])
    assert runner.run([point], Console(quiet=True)) == runner.FAILED
    [error] = (store / "failed").glob("*/error.txt")
    assert "AssertionError" in error.read_text()
    assert not (store / "results").exists()


def test_defaults_pass_every_check(tmp_path):
    files = [tmp_path / f"{name}.yaml" for name in SMALL]
    for file in files:
        file.write_text(yaml.safe_dump({"notebook": str(NOTEBOOKS / f"{file.stem}.ipynb")}))
    assert len(points.load(files)) == len(SMALL)


def test_shipped_grids_pass_every_check():
    files = sorted((NOTEBOOKS / "grids").glob("*.yaml"))
    every = points.load([f for f in files if f.name != "real.yaml"])  # its model is fetched first
    assert len(every) >= 30
    assert not any(problems(point.params) for point in every)
