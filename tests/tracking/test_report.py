"""`specexp report`: a page that says what came out, fetches nothing and runs nothing."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from support.stores import active, go, problems, quiet

from specexp.commands import app
from specexp.errors import UserError
from specexp.grids import grid_file
from specexp.tracking import compare, mlflow_view, presence, rebuild, report, results
from specexp.tracking import runs as track

HOSTILE = "<script>alert(1)</script><img src=https://evil.example/x>\x1b[31m\u202e"
ENDS = {"low": -0.05, "high": 0.05}
VOID = {"meta", "img", "br", "hr", "link", "input"}
SLOW, FAST = (
    {"speedup/measured": value, "speedup/ci_low": value - 0.1, "speedup/ci_high": value + 0.1,
     "acceptance/length": 2.5, "exact/pass": 1.0, "exact/tokens": 100.0,
     "exact/detectable_tv": 0.1234}
    for value in (1.2, 1.9)
)  # fmt: skip


class Reader(HTMLParser):
    """Tags that are open, names and attributes of all, and the text outside the style sheet."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data * (self.open[-1:] != ["style"])


def committed(
    name, metrics, drafter="ngram", tags=None, rounds=None, markdown="# Faster?\n\nWhy.", **params
):
    """A result with a figure, a notebook and a table of rounds."""
    attempt = results.new_attempt(name)
    record = {"experiment": "mine", "params": {"drafter": drafter, "gamma": 3} | params,
              "metrics": metrics, "series": {}, "tags": tags or {"device": "cpu"}}  # fmt: skip
    (attempt / results.RESULT).write_text(json.dumps(record))
    cells = [{"cell_type": "markdown", "source": markdown}]
    (attempt / "notebook.ipynb").write_text(json.dumps({"cells": cells}))
    table = pd.DataFrame({"question_id": [1, 2, 3, 3]}) if rounds is None else rounds
    (attempt / "tables").mkdir()
    table.to_parquet(attempt / "tables" / "rounds.parquet")
    (attempt / "figures").mkdir()
    figure = plt.figure(figsize=(1, 1))
    figure.savefig(attempt / "figures" / "speedup.png", dpi=20)
    plt.close(figure)
    facts = {"name": f"20_latency drafter={drafter}", "notebook": "20_latency.ipynb",
             "grid": "of mine", "status": "FINISHED"}  # fmt: skip
    return results.commit(attempt, name, facts)


def test_page_holds_question_answer_figures_and_command(store):
    by_kind = {"category/own": 0.75, "category_ci/own_low": 0.6, "category_ci/own_high": 0.85}
    committed("a", FAST | by_kind | {"category/other": 0.5})
    committed("b", SLOW, drafter="suffix")
    html = report.page(report.of("mine"))
    page = Reader(html)
    assert page.open == []
    text = " ".join(page.text.split())
    assert "Faster? mine, 2 runs" in text
    said = "1.90x [1.80, 2.00] of plain decoding's speed over 3 prompts (1.90x [1.79, 2.01] as one"
    assert f"ngram: {said} of 2 runs): certainly faster" in text
    assert "certainly faster. It is the best of 2 runs" in text
    assert "certainly better than the others" in text
    assert "75% [60, 85]" in text
    said = "(200 tokens compared; a mean total variation of 0.12 would be detected)"
    assert f"in 2 of 2 checked runs {said}" in text
    assert "specexp grid run 'of mine.yaml'" in text
    assert "results/a" in text
    assert "results/b" in text
    assert html.count("data:image/png;base64,") == 2
    folded = [name for name, _ in page.attributes if name == "open"]
    assert (html.count("<details"), len(folded)) == (3, 1), "the best run's figures are open"
    assert text.index("ngram: 1 figure") < text.index("suffix: 1 figure")


def test_page_shows_no_temperature_where_the_model_decides_it(store):
    committed("a", FAST, target="acme-10m", temperature=0.0, sampling="model")
    assert report.setting(report.of("mine")) == "target acme-10m; sampling model"
    committed("b", FAST, target="acme-10m", temperature=0.8, sampling="given")
    said = report.setting(report.of("mine"))
    assert said == "target acme-10m; temperature 0.8; sampling model / given"


def test_page_says_what_was_run_and_holds_a_grid_file_that_runs_it_again(store, tmp_path):
    source = {"mlflow.source.name": "notebooks/10_acceptance.ipynb", "device": "cpu"}
    fixed = {"target": "../models/acme-10m", "prompts": "../mine.jsonl", "top_p": 1.0,
             "temperatures": [0.0, 1.0], "limit": 40, "max_new_tokens": 32}  # fmt: skip
    for gamma in (1, 5):
        committed(f"{gamma}", FAST, tags=source, gamma=gamma, **fixed)
    part = report.of("mine")
    assert report.setting(part) == (
        "target acme-10m; prompts mine.jsonl (3 used); temperatures [0.0, 1.0]; max_new_tokens 32"
    )
    text = Reader(report.page(part)).text
    assert report.setting(part) in text
    [grid] = report.as_grids(part)
    assert grid in text
    (tmp_path / "again.yaml").write_text(grid)
    problems = grid_file.Report([])
    again = grid_file.read(tmp_path / "again.yaml", problems)
    assert problems.problems == []
    points = [params for params, _ in again.combinations()]
    assert len(points) == 2
    assert all(
        run.record["params"].items() <= point.items()
        for run, point in zip(part, points, strict=True)
    )


@pytest.mark.parametrize("name", ["length", "exact", "accepted", "run", "threads", "driver"])
def test_parameter_named_like_a_column_stands_beside_it(store, name):
    for key, metrics, x in (("a", FAST, 7), ("b", SLOW, 8)):
        facts = {"threads": f"{x}0", "driver": f"{x}00"}
        committed(key, metrics | {"acceptance/rate": 0.5}, tags=facts, **{name: x})
    cells = re.findall(r"<t[hd]>([^<]*)<", report.page(report.of("mine")))
    assert cells.count(f"{name} (parameter)") == 1
    assert {"7", "8", "70", "80", "700", "800", "2.50", "50%", "yes"} <= {*cells}


def test_commands_name_the_flag_of_points_that_ran_together(store):
    for name, together in (("a", "no"), ("b", "yes")):
        committed(name, FAST, tags={"device": "cpu", "together": together})
    grid = "specexp grid run 'of mine.yaml'"
    assert report.commands_to_repeat(report.of("mine")) == [grid, f"{grid} --together"]


def test_commands_say_that_a_commit_lacks_what_ran(store):
    commit = "a" * 40
    for name, dirty in (("a", "false"), ("b", "true")):
        committed(name, FAST, tags={"git.commit": commit, "git.dirty": dirty})
        checkout, grid = report.commands_to_repeat(report.of("mine"))
        changed = "  # and uncommitted changes"
        assert checkout == f"git checkout {commit}{changed * (dirty == 'true')}"
        assert grid == "specexp grid run 'of mine.yaml'"


def test_runs_of_one_label_are_told_apart(store):
    for name, device in (("a", "cpu"), ("b", "NVIDIA H100")):
        committed(name, FAST, tags={"device": device})
    committed("c", SLOW, drafter="suffix")
    part = report.of("mine")
    names = [name for name, *_ in report.compared(part)[0]]
    assert sorted(names) == ["ngram device=NVIDIA H100", "ngram device=cpu", "suffix"]
    assert "not certainly better than ngram device=" in report.answer(part)
    assert len(Reader(report.page(part)).text.split("device=cpu")) > 2


def test_several_runs_are_compared_on_one_scale_before_anything_else(store):
    committed("b", SLOW, drafter="suffix")
    assert report.compared(report.of("mine")) == ([], None)
    committed("a", FAST)
    rows, even = report.compared(report.of("mine"))
    assert [row[:2] for row in rows] == [
        ("ngram", "1.90x [1.79, 2.01]"), ("suffix", "1.20x [1.09, 1.32]"),
    ]  # fmt: skip
    places = [place for row in rows for place in row[2:]]
    assert [min(*places, even), max(places)] == [even, 98.0] == [2.0, rows[0][4]]
    text = Reader(report.page(report.of("mine"))).text
    assert text.index("The runs compared") < text.index("Runs side by side") < text.index("Figures")


def test_page_fetches_and_runs_nothing_whatever_texts_say(store):
    committed("a", FAST, drafter=HOSTILE, tags={"processor": HOSTILE}, markdown=f"# {HOSTILE}")
    html = report.page(report.of("mine"))
    page = Reader(html)
    assert page.open == []
    assert not page.tags & {"script", "link", "iframe", "object", "a", "form", "base"}
    assert not [name for name, _ in page.attributes if name == "href" or name.startswith("on")]
    sources = [value for name, value in page.attributes if name == "src"]
    assert sources
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert not re.search(r"url\(|@import", html)
    assert "alert(1)" in page.text
    assert not {"\x1b", "\u202e"} & set(html)


def test_links_lead_to_the_runs_of_the_ui_alone(store):
    track.log("mine", {"drafter": "ngram"}, FAST, rivals={"suffix": (SLOW, {})})
    run_ids = sorted(run.info.run_id for run in active())
    page = Reader(report.page(report.of("mine")))
    links = sorted(value for name, value in page.attributes if name == "href")
    assert links == [f"{report.UI}/#/runs/{run_id}" for run_id in run_ids]


def test_pdf_without_a_browser_is_one_line_before_anything_is_written(store, monkeypatch, capsys):
    committed("a", FAST)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("sys.argv", ["specexp", "report", "mine", "--pdf"])
    with pytest.raises(SystemExit):
        app.main()
    assert "no Chromium on PATH (chromium, chromium-browser," in capsys.readouterr().err
    assert not list((store / "reports").glob("*"))


def test_page_can_be_read_on_light_and_dark_screens(store):
    committed("a", FAST)
    html = report.page(report.of("mine"))
    light, dark, paper = (dict(re.findall(r"--(\w+): (#\w+)", block))
                          for block in re.findall(r":root \{([^}]*)\}", html))  # fmt: skip
    assert "@media (prefers-color-scheme: dark)" in html
    assert light.keys() == dark.keys() == paper.keys()
    for colours in (light, dark, paper):
        for text, behind in (("ink", "paper"), ("dim", "paper"), ("doubt", "paper"),
                             ("ink", "answer")):  # fmt: skip
            bright, dim = sorted((luminance(colours[text]), luminance(colours[behind])))[::-1]
            assert (bright + 0.05) / (dim + 0.05) >= 4.5, (text, behind)  # WCAG AA
    assert luminance(dark["paper"]) < 0.05 < 0.9 < luminance(light["paper"])
    assert re.search(r"figure img \{[^}]*background: #fff", html), "figures are on white paper"


def luminance(colour: str) -> float:
    light = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return 0.2126 * light[0] + 0.7152 * light[1] + 0.0722 * light[2]


def test_a_loss_is_called_certainly_slower(store):
    loss = {"speedup/measured": 0.7, "speedup/ci_low": 0.6, "speedup/ci_high": 0.8}
    committed("a", FAST | loss)
    answer = report.answer(report.of("mine"))
    assert "ngram: 0.70x [0.60, 0.80] of plain decoding's speed" in answer
    assert answer.endswith(": certainly slower.")


def test_answer_says_which_draft_length_and_at_which_load_it_loses(store):
    committed("a", FAST | {"speedup/best_gamma": 4.0, "throughput/crossing_batch": 16.0})
    run = report.of("mine")
    assert "faster; with a draft length of 4; certainly slower in a batch of 16." in report.answer(
        run
    )
    curve = {"1": 1.9, "4": 1.2, "16": 0.9}
    by_batch = {
        f"speedup/at_batch{end}": {batch: value + more for batch, value in curve.items()}
        for end, more in (("", 0), ("_low", -0.05), ("_high", 0.05))
    }
    said = mlflow_view.answer_tags(run[0].record | {"series": by_batch}, False)[mlflow_view.NOTE]
    assert "with a draft length of 4" in said
    of_three = "with one of 3, 1.90x [1.85, 1.95] in a batch of 1, 0.90x [0.85, 0.95] in a batch of"
    assert of_three in said
    view = compare.overview(report.frame(run))
    assert list(view["best γ"]) == ["4"]
    assert list(view["slower in a batch of"]) == ["16"]


def test_overlapping_intervals_name_no_certain_winner(store):
    committed("a", FAST | {"speedup/ci_low": 1.1})
    committed("b", SLOW, drafter="suffix")
    assert "not certainly better than suffix" in report.answer(report.of("mine"))


def test_nothing_is_certain_of_a_run_without_an_interval(store):
    committed("a", FAST)
    committed("b", {"speedup/measured": 1.7, "exact/pass": 1.0}, drafter="suffix")
    assert "not certainly better than suffix" in report.answer(report.of("mine"))


def test_interval_of_the_best_is_widened_before_it_excludes_one(store):
    barely = FAST | {"speedup/measured": 1.1, "speedup/ci_low": 1.01, "speedup/ci_high": 1.19}
    committed("a", barely)
    assert "certainly faster" in report.answer(report.of("mine"))
    committed("b", SLOW | {"speedup/measured": 0.5}, drafter="suffix")
    assert "no clear difference" in report.answer(report.of("mine"))


@pytest.mark.parametrize(
    ("metric", "text"),
    [
        ("fleet/replicas", "2 replicas, simulated"),
        ("regret/worst", "200.0% of tokens/s lost at worst"),
    ],
)
def test_answer_of_costs_is_the_smallest_and_certain_only_with_an_interval(store, metric, text):
    for name, value in (("a", 3.0), ("b", 2.0)):
        committed(name, {metric: value}, drafter=name, tags={"simulated": "fleet"})
    answer = report.answer(report.of("mine"))
    assert answer.startswith(f"b: {text.partition(',')[0]}")
    assert answer.endswith("without an interval, so nothing is certain. It is the best of 2 runs.")
    assert "certainly" not in answer


def test_regret_below_zero_is_a_gain_with_its_interval(store):
    ends = {"regret/worst": -0.12, "regret/worst_low": -0.24, "regret/worst_high": 0.01}
    committed("a", ends)
    said = "12.0% [-1.0, 24.0] of tokens/s gained at worst against the best fixed policy"
    [run] = report.of("mine")
    assert said in report.answer([run])
    assert run.headline == "12.0% [-1.0, 24.0] gained"
    committed("b", {"regret/worst": 0.02}, drafter="suffix")
    rows, _ = report.compared(report.of("mine"))
    assert [words.partition("%")[0] + words[-7:] for _, words, *_ in rows] == [
        "12.0 gained", "2.0 regret"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "metrics",
    [
        {"speedup/measured": 1.9, "speedup/ci_low": 1.8, "speedup/ci_high": 2.0},
        {"regret/worst": 0.04, "regret/worst_low": 0.01, "regret/worst_high": 0.07},
        {"acceptance/rate": 0.5, "acceptance/rate_ci_low": 0.4, "acceptance/rate_ci_high": 0.6},
    ],
)
def test_the_best_of_several_runs_has_its_tags_interval_and_then_a_wider_one(store, metrics):
    for drafter in ("ngram", "suffix"):
        committed(drafter, metrics, drafter)
    best, other = report.of("mine")
    answer, tag = report.answer([best, other]), best.headline
    own, wider = re.findall(r"[\d.]+[x%] \[.*?\]", answer)
    assert tag.startswith(own)
    assert f"({wider}" in answer
    assert wider != own


def test_renamed_result_is_reported_under_its_new_name(store):
    result = committed("a", FAST)
    tags = {"name": "suffix γ=3", "notebook": "new.ipynb", "mlflow.source.name": "new.ipynb"}
    presence.rename(result, "new", tags)
    assert "on purpose (suffix γ=3)" in presence.Gaps(deleted=[result]).lines()[0]
    assert not [
        path for path in result.iterdir() if "label" in path.name and path.suffix != ".json"
    ]
    with pytest.raises(UserError, match="there are some of new"):
        report.of("mine")
    page = Reader(report.page(report.of("new")))
    assert "suffix γ=3: 1.90x" in " ".join(page.text.split())


def test_widened_interval_of_a_share_stays_a_share(store):
    high = {"acceptance/rate": 0.97, "acceptance/rate_ci_low": 0.9, "acceptance/rate_ci_high": 1.0}
    committed("a", high)
    committed("b", {"acceptance/rate": 0.1}, drafter="suffix")
    assert "97% [89, 100] accepted as one of 2 runs" in report.answer(report.of("mine"))


@pytest.mark.parametrize("interval", [False, True])
def test_drafts_of_different_lengths_are_compared_by_tokens_per_pass(store, interval):
    for gamma, rate, length in ((1, 0.6, 1.6), (5, 0.27, 2.37)):
        of_rate = {f"acceptance/rate_ci_{end}": rate + more for end, more in ENDS.items()}
        of_length = {f"acceptance/length_ci_{end}": length + more for end, more in ENDS.items()}
        logged = {"acceptance/rate": rate, "acceptance/length": length} | of_rate
        committed(f"{gamma}", logged | (of_length if interval else {}), gamma=gamma)
    answer = report.answer(report.of("mine"))
    figure, first = "2.37", "without an interval, so nothing is certain. It is the most of 2 runs."
    if interval:
        figure, first = "2.37 [2.32, 2.42]", "the most of 2 runs, certainly more than the others."
    assert answer.startswith(f"ngram gamma=5: {figure} tokens per target pass over 3 prompts")
    assert f"{first} A longer draft has more, and costs more: only a speedup says" in answer
    assert not re.search("best|better", answer)


def test_value_without_interval_is_not_certain(store):
    committed("a", {"speedup/measured": 1.5})
    assert "nothing is certain" in report.answer(report.of("mine"))


def _repeats(slower: float) -> pd.DataFrame:
    """Plain decoding in two repeats at two batch sizes, of which the larger has a third one."""
    paces = {(1, 0): 1.0, (1, 1): slower, (8, 0): 0.2, (8, 1): 0.2, (8, 2): 0.2}
    rows = [(*key, pace * 10, 10) for key, pace in paces.items()]
    return pd.DataFrame(rows, columns=["batch", "repeat", "plain_s", "plain_tokens"])


@pytest.mark.parametrize(
    ("metrics", "tags", "slower", "reason"),
    [
        ({"acceptance/length": 1.5, "speedup/credible": 0.0}, {}, 1, "not credible"),
        ({"speedup/predicted": 0.5}, {}, 1, "was predicted"),
        ({}, {"load": "7.5", "threads": "2"}, 1, "load average was 7.5"),
        ({}, {"together": "yes"}, 1, "ran beside it"),
        ({}, {}, 1.6, "drifted 1.6-fold"),
        ({}, {"load": "2.2", "threads": "2"}, 1.1, ""),
        ({"acceptance/length": 1.5}, {"simulated": "speedup"}, 1, ""),
    ],
)
def test_doubtful_timing_is_marked(store, metrics, tags, slower, reason):
    committed("a", FAST | metrics, tags={"device": "cpu", **tags}, rounds=_repeats(slower))
    [run] = report.of("mine")
    assert bool(run.doubts) == bool(reason)
    assert reason in " ".join(run.doubts)
    assert ("certainly" in report.answer([run])) == (not reason)
    text = Reader(report.page([run])).text
    assert ("doubtful" in text) == bool(reason)
    assert ("running: specexp grid run 'of mine.yaml' --retry-doubtful" in text) == bool(reason)


def test_answer_in_mlflow_is_doubtful_if_the_pace_drifted(store):
    for name, slower in (("a", 1.1), ("b", 1.6)):
        track.publish(committed(name, FAST, drafter=name, rounds=_repeats(slower)))
    answers = sorted(run.data.tags["answer"] for run in active())
    assert answers == ["1.90x [1.80, 2.00]", "1.90x [1.80, 2.00] (doubtful)"]
    table = track.runs().set_index("params.drafter")["metrics.speedup/credible"]
    assert (table["b"], table.isna()["a"]) == (0, True)


def test_a_reason_for_doubt_is_said_once_of_all_runs_that_it_holds_for(store):
    for name in ("a", "b"):
        committed(name, FAST, drafter=name, tags={"device": "cpu", "together": "yes"})
    text = " ".join(Reader(report.page(report.of("mine"))).text.split())
    assert "a, b: other points ran beside it" in text


def test_a_point_is_shown_once_by_its_newest_intact_result(store):
    old, new = committed("a", SLOW), committed("b", FAST)
    damaged = committed("c", FAST)
    (damaged / "result.json").write_text("{}")
    on_gpu = committed("d", SLOW, tags={"device": "NVIDIA H100"})
    assert [run.folder for run in report.of("mine")] == [new, on_gpu]
    assert [run.folder for run in report.of(str(old))] == [old]


def test_a_result_is_found_from_inside_its_folder(store, monkeypatch):
    monkeypatch.chdir(folder := committed("a", FAST))
    assert [run.folder.name for run in report.of(".")] == [folder.name]


def test_order_of_the_parameters_cell_makes_no_other_point(store):
    for name, params in (("a", {"x": 1, "y": 2}), ("b", {"y": 2, "x": 1})):
        attempt = results.new_attempt(name)
        record = {"experiment": "mine", "params": params, "metrics": SLOW, "series": {}}
        (attempt / results.RESULT).write_text(json.dumps(record))
        results.commit(attempt, name, {"status": "FINISHED"})
    assert [run.folder.name for run in report.of("mine")] == ["b"]


def test_a_result_of_a_changed_point_is_marked_and_left_out_of_the_view(store):
    committed("a", FAST)
    rebuild.rebuild(quiet())
    assert set(track.runs()["tags.run_key"]) == {"a"}
    committed("b", SLOW)
    rebuild.rebuild(quiet())
    assert set(track.runs()["tags.run_key"]) == {"b"}
    [experiment] = [e for e in track.backend().experiments() if e.name == "mine"]
    state = json.loads(json.loads(experiment.tags[mlflow_view.VIEW_TAG])["state"])
    in_view = track.backend().runs(experiment.experiment_id, state["searchFilter"])
    assert [run.data.tags["run_key"] for run in in_view] == ["b"]
    assert len(active()) == 2
    assert problems() == []


def test_results_that_do_not_exist_are_one_line_with_what_there_is(store, tmp_path):
    committed("a", FAST)
    with pytest.raises(UserError, match=r"no results of other .* there are some of mine"):
        report.of("other")
    (tmp_path / "grid.yaml").write_text("notebook: far.ipynb")
    with pytest.raises(UserError, match=r"specexp grid run .*/grid\.yaml"):
        report.of(f"{tmp_path}/grid.yaml")
    with pytest.raises(UserError, match=r"no such file; did you mean '.*/grid\.yaml'\?$"):
        report.of(f"{tmp_path}/grids.yaml")


def test_command_writes_the_page_where_it_says(store, tmp_path, monkeypatch, capsys):
    committed("a", FAST)
    for arguments in (["mine"], ["mine", "--out", str(tmp_path / "mine.html")]):
        monkeypatch.setattr("sys.argv", ["specexp", "report", *arguments])
        with pytest.raises(SystemExit):
            app.main()
        [path] = capsys.readouterr().out.splitlines()
        assert "certainly faster" in (tmp_path / path).read_text()


def test_page_of_a_grid_file_has_the_points_that_it_has_now(store, written, monkeypatch, capsys):
    file = written(1, 2)[0].file
    assert go(written(1, 2))[0] == 0
    assert go(written(1, 3))[0] == 0
    page = store / "reports" / "trivial.yaml.html"
    for names in ("x=1, x=3", "x=1"):
        assert written(*(int(name[-1]) for name in names.split(", ")))
        monkeypatch.setattr("sys.argv", ["specexp", "report", str(file)])
        with pytest.raises(SystemExit):
            app.main()
        assert capsys.readouterr().out.split()[-1] == str(page)
        cells = set(re.findall(r"x=\d", Reader(page.read_text()).text))
        assert ", ".join(sorted(cells)) == names


def test_page_of_some_points_or_of_another_grid_leaves_that_of_the_whole(store, written, tmp_path):
    todo = written(1, 2)
    assert go(todo)[0] == 0
    page = store / "reports" / "trivial.yaml.html"
    before = page.read_bytes()
    assert "trivial.yaml+x-1.html" in go(todo[:1], only=["x=1"])[1]
    (other := tmp_path / "other" / "trivial.yaml").parent.mkdir()
    other.write_text(todo[0].file.read_text())
    with pytest.raises(UserError, match="no results of"):
        report.of(str(other))
    assert re.search(r"trivial-\w{6}\.yaml\.html", go([replace(todo[0], files=(other,))])[1])
    assert page.read_bytes() == before
    grids = [track.runs(grid=file.stem) for file in (store / "grids").glob("*.file")]
    assert sorted(map(len, grids)) == [1, 2]


def test_grid_run_ends_with_the_path_of_its_report(store, written, monkeypatch):
    code, text = go(written(1, 2, 13))
    assert code == 1
    what, path = text.splitlines()[-1].split()
    assert (what, path) == ("report", str(store / "reports" / "trivial.yaml.html"))
    page = Reader((store / "reports" / "trivial.yaml.html").read_text())
    assert "2 runs" in page.text
    monkeypatch.setattr(report, "page", lambda runs: (_ for _ in ()).throw(OSError(28, "full")))
    code, text = go(written(1, 2))
    assert (code, text.splitlines()[-1].split()) == (0, [what, path]), "the page is as it was"
    code, text = go(written(1, 2, 3))
    assert (code, "none, full" in text.splitlines()[-1]) == (0, True)
