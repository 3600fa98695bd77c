"""One page to send: an experiment's question, answer, figures, table, exactness, environment and
parameters.

Made from committed results alone, so without MLflow and with no server. The page is one file that
fetches nothing and runs nothing: figures are embedded, and all text of notebooks, models and
results is escaped, with symbols for control characters. Its only links lead to its runs in the
MLflow UI of the machine that has them.
"""

import base64
import json
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain, groupby, islice
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from specexp.errors import UserError, brief, counted, meant_beside
from specexp.terminal import harmless
from specexp.tracking import compare, mlflow_view, provenance, results, runs
from specexp.zoo import files

TEMPLATE = "report.html"
UI = "http://127.0.0.1:5000"  # of `specexp ui`
PNG = b"\x89PNG\r\n\x1a\n"
SETTING = ("target", "prompts", "limit", "chat", "temperature", "temperatures", "top_k", "top_p",
           "min_p", "sampling", "max_new_tokens")  # fmt: skip
USUAL = {"chat": False, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "sampling": "given"}
MODELS_OWN = ("temperature", "model")  # by that sampling, the parameter says nothing
MOST_FIGURES = 40  # of one experiment: some megabytes
FACTS = ("engine", *provenance.FACTS, "version.specexp", "load", "where", "git.commit", "git.dirty")


@dataclass(frozen=True)
class Run:
    """A committed result, or what it says of one of its rivals, read once."""

    folder: Path
    rival: str = ""

    @cached_property
    def result(self) -> dict[str, Any]:
        return results.load(self.folder / results.RESULT)

    @cached_property
    def record(self) -> dict[str, Any]:
        """What it logged, with all its tags."""
        logged = results.runs_in(self.result)[self.rival]
        tags = logged.get("tags", {}) | results.tags_of(self.folder)
        texts = {name: str(value) for name, value in tags.items()}
        return logged | {"tags": mlflow_view.run_tags(texts, self.result["params"], self.rival)}

    @property
    def tags(self) -> dict[str, str]:
        return dict(self.record["tags"])

    @property
    def ended(self) -> int:
        """When it was made, or a grid took it again (`rebuild.accept`), in milliseconds."""
        return int(self.tags.get("ended", 0))

    @cached_property
    def experiment(self) -> str:
        return str(results.new_names(self.folder).get("experiment", self.record["experiment"]))

    @property
    def metrics(self) -> dict[str, float]:
        return dict(self.record["metrics"])

    @property
    def point(self) -> tuple[str, ...]:
        """What two results of a point on a kind of device share, whatever code made them."""
        notebook, device = (self.tags.get(name, "") for name in ("notebook", "device"))
        params = json.dumps(self.record["params"], sort_keys=True)
        rough = "together" * (self.tags.get("together") == "yes")
        return self.experiment, notebook, device, rough, params, self.rival

    @property
    def label(self) -> str:
        """What the grid varies, as in `ngram gamma=3`; the drafter if it varies nothing."""
        name = self.tags.get("name", self.folder.name)
        stem = Path(self.tags.get("notebook", "")).stem
        drafter = self.record["params"].get("drafter", name)
        return name.removeprefix(stem).strip().removeprefix("drafter=") or str(drafter)

    @property
    def link(self) -> str:
        """Its page in the MLflow UI of this machine; "" if it is not there."""
        marker = runs.marker(self.folder)
        run_ids = marker.read_text().split() if runs.own() and marker.exists() else []
        shown = dict(zip(results.runs_in(self.result), run_ids, strict=False))
        return f"{UI}/#/runs/{shown[self.rival]}" if self.rival in shown else ""

    @property
    def prompts(self) -> int:
        """How many prompts, or conversations, the figures rest on; 0 if the rounds do not say."""
        return self._of_rounds[0]

    @cached_property
    def doubts(self) -> list[str]:
        """Why this run's timings should not be trusted."""
        return mlflow_view.doubts(self.record, lambda: self._of_rounds[1])

    @cached_property
    def _of_rounds(self) -> tuple[int, float]:
        rounds = results.rounds_of(self.folder)
        return len({*map(str, rounds.get("question_id", ()))}), mlflow_view.drift(rounds)

    @property
    def headline(self) -> str:
        """What it answers, with intervals, on one line."""
        return ", ".join(short for short, _ in mlflow_view.answers(self.record, bool(self.doubts)))

    def figures(self) -> Iterator[tuple[str, str]]:
        """Name and base64 text of each figure of the run, as they were logged; none for a rival."""
        kept = [] if self.rival else (self.folder / "figures").glob("*.png")
        for file in sorted(kept, key=lambda file: (file.stat().st_mtime_ns, file.name)):
            image = file.read_bytes()
            if image.startswith(PNG):
                yield file.stem, base64.b64encode(image).decode()

    def question(self) -> tuple[str, list[str]]:
        """Title and paragraphs of the notebook's first markdown cell."""
        cells = results.read(self.folder / results.NOTEBOOK).get("cells", [])
        texts = ("".join(c.get("source", "")) for c in cells if c.get("cell_type") == "markdown")
        blocks = re.split(r"\n\s*\n", next(texts, "").strip())
        title = re.fullmatch(r"#\s+(.+)", blocks[0])
        prose = [_plain(block) for block in blocks[bool(title) :] if re.match(r"[\w*`]", block)]
        return (_plain(title[1]) if title else self.experiment), prose


def _plain(markdown: str) -> str:
    """A paragraph without marks of emphasis, on one line."""
    return re.sub(r"\*\*|`|(?<!\w)\*(?=\w)|(?<=\w)\*(?!\w)", "", " ".join(markdown.split()))


# --- which results -------------------------------------------------------------------------------


def of(what: str) -> list[Run]:
    """The runs of an experiment, of a grid file or of a result folder: of each point the newest.
    Raises UserError if there are none."""
    path = Path(what)
    if (path / results.RESULT).is_file():
        selected, hint = newest(filter(results.intact, [path.resolve()])), "it is damaged"
    elif path.suffix in (".yaml", ".yml"):
        selected = with_keys(results.keys_of(results.grid_name(path)))
        hint = f"make them with `specexp grid run {what}`"
        hint = hint if path.is_file() else f"there is no such file{meant_beside(path)}"
    else:
        everything = newest(filter(results.intact, results.listed("results")))
        selected = [run for run in everything if run.experiment == what]
        names = ", ".join(sorted({run.experiment for run in everything}))
        hint = f"there are some of {names}" if names else "run a grid or a notebook first"
    if not selected:
        raise UserError(f"no results of {what} in {results.root()}: {hint}")
    return selected


def with_keys(keys: Iterable[str]) -> list[Run]:
    """The runs of the results that have these run keys: of each point the newest."""
    named = {*keys}
    return newest(filter(results.intact, (f for f in results.listed("results") if f.name in named)))


def newest(folders: Iterable[Path], apart: Callable[[Run], Any] = lambda run: None) -> list[Run]:
    """The newest of intact results of each point, for each value of `apart`; its rivals, too."""
    ordered = sorted(map(Run, folders), key=attrgetter("ended"))
    each = (
        Run(run.folder, rival) if rival else run
        for run in ordered
        for rival in results.runs_in(run.result)
    )
    latest = {(run.point, apart(run)): run for run in each}
    return sorted(latest.values(), key=lambda run: (run.experiment, run.label))


def names_of(part: Sequence[Run]) -> dict[Run, str]:
    """The labels of runs; behind those that several have, the parameters in which these differ, and
    the device, and whether others ran beside them, if they differ in that."""
    names: dict[Run, str] = {}
    for label, same in groupby(sorted(part, key=attrgetter("label")), key=attrgetter("label")):
        facts = {
            run: run.record["params"] | {n: run.tags.get(n, "") for n in ("device", "together")}
            for run in same
        }
        every = dict.fromkeys(chain(*facts.values()))
        differ = [n for n in every if len({repr(each.get(n)) for each in facts.values()}) > 1]
        for run, each in facts.items():
            names[run] = " ".join([label, *(f"{n}={each.get(n, '')}" for n in differ)])
    return names


# --- the answer ----------------------------------------------------------------------------------


def answer(part: Sequence[Run]) -> str:
    """What came out, in words: the first run with its own interval (that of its tag and of tables)
    and number of prompts, and which others are not certainly worse. What is called certain is so by
    intervals that are widened (Bonferroni) for the first of several."""
    answer, having = _answering(part)
    if answer is None:
        return "No speedup and no comparable acceptance was logged; the table below has what was."
    many, best, names = len(having), having[0], names_of(part)
    value, (low, high) = best.metrics[answer.metric], answer.together(best.metrics, many)
    has_interval = low < high
    text = f"{names[best]}: {answer.said(value, *answer.interval(best.metrics))[1]}"
    if best.prompts:
        text += f" over {counted(best.prompts, 'prompt')}"
    text += ", simulated" * mlflow_view.is_simulated(best.record, answer.metric)
    if not has_interval:
        text += ", without an interval, so nothing is certain"
    elif _doubtful(answer, best):
        text += ": a doubtful timing"
    else:
        text += f" ({answer.said(value, low, high)[0]} as one of {many} runs)" * (many > 1)
        if answer.even is not None:
            clear = "certainly faster" if low > answer.even else "certainly slower"
            text += f": {clear if not low <= answer.even <= high else 'no clear difference'}"
    text += "".join(f"; {words}" for words in mlflow_view.beside(best.record))
    if many == 1:
        return f"{text}."
    sure = [run for run in having if not _doubtful(answer, run)]
    if not sure:
        return f"{text}. None of the {many} runs is called the best, as all timings are doubtful."
    if len(sure) == 1:
        return f"{text}. The timings of {counted(many - 1, 'other run')} are doubtful."
    first, better, caveat = "best", "better", ""
    if answer == mlflow_view.LENGTH:
        first, better = "most", "more"
        caveat = " A longer draft has more, and costs more: only a speedup says whether it pays."
    text += f". It is the {first} of {len(sure)} runs"
    text += f", besides {many - len(sure)} of doubtful timings" * (len(sure) < many)
    if not has_interval:
        return f"{text}.{caveat}"
    others = ((names[run], *answer.together(run.metrics, many)) for run in sure if run is not best)
    # the ends of a run without an interval are equal, and nothing is certain of it
    close = [s for s, least, most in others if least == most or max(least, low) <= min(most, high)]
    rest = f"{', '.join(close[:4])}{' and more' * (len(close) > 4)}" if close else "the others"
    return f"{text}, {'not ' * bool(close)}certainly {better} than {rest}.{caveat}"


def _answering(part: Sequence[Run]) -> tuple[mlflow_view.Answer | None, list[Run]]:
    """The first metric that answers and that runs have, with these runs, the best first: but those
    of doubtful timings last. Drafts of different sizes are compared by acceptance length, as a
    short one has a higher rate whatever it yields."""
    sizes = {repr([run.record["params"].get(n) for n in ("gamma", "tree")]) for run in part}
    by_length = {mlflow_view.RATE: mlflow_view.LENGTH} if len(sizes) > 1 else {}
    for answer in (by_length.get(each, each) for each in mlflow_view.ANSWERS):
        if having := [run for run in part if answer.metric in run.metrics]:
            order = {run: run.metrics[answer.metric] for run in having}
            having.sort(key=order.__getitem__, reverse=not answer.least)
            return answer, sorted(having, key=lambda run: _doubtful(answer, run))
    return None, []


def _doubtful(answer: mlflow_view.Answer, run: Run) -> bool:
    return answer.timed and bool(run.doubts)


def compared(part: Sequence[Run]) -> tuple[list[tuple[Any, ...]], float | None]:
    """Of several runs, the best first: label, what answers with its interval in words, and both as
    places on one scale, in per cent of its width; and the place a clear result is away from."""
    (answer, having), names = _answering(part), names_of(part)
    if answer is None or len(having) == 1:
        return [], None
    ranges = {
        run: (run.metrics[answer.metric], *answer.together(run.metrics, len(having)))
        for run in having
    }
    shown = [*chain(*ranges.values()), *([] if answer.even is None else [answer.even])]
    least, width = min(shown), (max(shown) - min(shown)) or 1.0

    def place(value: float) -> float:
        return round(2 + 96 * (value - least) / width, 1)

    rows = [
        (names[run], answer.said(*each)[0] + mlflow_view.DOUBTFUL * _doubtful(answer, run),
         *map(place, each))
        for run, each in ranges.items()
    ]  # fmt: skip
    return rows, None if answer.even is None else place(answer.even)


def exactness(part: Sequence[Run]) -> str:
    """Whether the output was the target's, in how many runs and tokens."""
    checked = [run.metrics for run in part if "exact/pass" in run.metrics]
    if same := [run.metrics["exact/same"] for run in part if "exact/same" in run.metrics]:
        return f"At least {min(same):.0%} of the texts are the plain server's; see specexp check."
    if not checked:
        return "No run checked whether its output is the target's."
    passed = sum(metrics["exact/pass"] == 1 for metrics in checked)
    tokens = sum(metrics.get("exact/tokens", 0) for metrics in checked)
    text = f"The output was the target's in {passed} of {len(checked)} checked runs"
    text += f" ({tokens:,.0f} tokens compared"
    if smallest := [m["exact/detectable_tv"] for m in checked if "exact/detectable_tv" in m]:
        text += f"; a mean total variation of {max(smallest):.2g} would be detected"
    text += ")"
    if passed < len(checked):
        bugs = sum(metrics.get("exact/bugs", 0) for metrics in checked)
        text += f"; the others use a lossy rule or have a bug ({bugs:.0f} differences)"
    return f"{text}{f'; {n} unchecked' if (n := len(part) - len(checked)) else ''}."


# --- the page ------------------------------------------------------------------------------------


def page(everything: Sequence[Run]) -> str:
    """The page of these runs, a section for each experiment."""
    names = dict.fromkeys(run.experiment for run in everything)
    parts = [_section([r for r in everything if r.experiment == name]) for name in names]
    return str(_template().render(sections=parts, made_of=_made_of(everything)))


@cache
def _template() -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True,
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        finalize=lambda value: harmless(value) if isinstance(value, str) else value,
    )  # fmt: skip
    return environment.get_template(TEMPLATE)


def _made_of(everything: Sequence[Run]) -> str:
    """A digest of what a page is made from: the folders of its runs, and this code."""
    folders = [(run.folder.name, run.folder.stat().st_mtime_ns) for run in everything]
    template = (Path(__file__).parent / TEMPLATE).read_text()
    return results.digest(repr((folders, template, provenance.code_digest())).encode())


def _section(part: Sequence[Run]) -> dict[str, Any]:
    (title, prose), names = part[0].question(), names_of(part)
    (_, having), (rows, even) = _answering(part), compared(part)
    first = [*having, *(run for run in part if run not in having)]
    drawn = ((names[run], name, image) for run in first for name, image in run.figures())
    figures = [
        (label, [(name, image) for _, name, image in of_run])
        for label, of_run in groupby(islice(drawn, MOST_FIGURES), key=itemgetter(0))
    ]
    labels, doubts = [names[run] for run in part], dict[str, list[str]]()
    for run in part:
        for reason in run.doubts:
            doubts.setdefault(reason, []).append(names[run])
    table = compare.overview(frame(part).drop(columns="experiment"))
    table = table[[name for name in table if list(table[name]) != labels]]
    table = pd.DataFrame({"run": labels}).join(table, rsuffix=compare.PARAMETER)
    made_with = {n: dict.fromkeys(run.tags[n] for run in part if run.tags.get(n)) for n in FACTS}
    return {
        "experiment": part[0].experiment, "title": title, "prose": prose, "answer": answer(part),
        "setting": setting(part), "grids": as_grids(part), "compared": rows, "even": even,
        "figures": figures, "more": next(drawn, None) is not None,
        "columns": list(table), "rows": table.to_numpy().tolist(), "exactness": exactness(part),
        "doubts": doubts, "remedy": remedy(part), "environment": made_with,
        "commands": commands_to_repeat(part),
        "runs": [(run.tags.get("name", run.label), run.folder.name, run.link) for run in part],
    }  # fmt: skip


def setting(part: Sequence[Run]) -> str:
    """Target, prompts and sampling of these runs, without what is as usual."""
    params, words = [run.record["params"] for run in part], list[str]()
    counts = dict.fromkeys(str(run.prompts) for run in part if run.prompts)
    for name in SETTING:
        given = [p[name] for p in params if name in p and (name, p.get("sampling")) != MODELS_OWN]
        if all(value == USUAL.get(name) for value in given) or (name == "limit" and counts):
            continue
        number = f" ({' / '.join(counts)} used)" * (name == "prompts" and bool(counts))
        words.append(f"{name} {' / '.join(dict.fromkeys(brief(v, given) for v in given))}{number}")
    return "; ".join(words)


def as_grids(part: Sequence[Run]) -> list[str]:
    """The parameters of these runs as grid files, one a notebook, with paths for beside it."""
    by_notebook, grids = dict[str, list[dict[str, Any]]](), []
    for run in part:
        points = by_notebook.setdefault(run.tags.get("mlflow.source.name", ""), [])
        if run.result["params"] not in points:  # a rival has those of its result
            points.append(run.result["params"])
    for notebook, points in by_notebook.items():
        first = points[0].items()
        fixed = {n: v for n, v in first if all(repr(p.get(n)) == repr(v) for p in points)}
        own = [{n: v for n, v in point.items() if n not in fixed} for point in points]
        grid = {
            "notebook": notebook, "experiment": part[0].experiment, "fixed": fixed,
            "include": [*filter(None, own)],
        }  # fmt: skip
        filled = {name: value for name, value in grid.items() if value}
        grids.append(yaml.safe_dump(filled, sort_keys=False, allow_unicode=True))
    return grids


def frame(part: Sequence[Run]) -> pd.DataFrame:
    """The runs as `runs.runs` returns them; not credible are the timings of doubtful ones."""
    return pd.DataFrame(
        mlflow_view.row(run.experiment, run.folder.name, run.label, run.record, bool(run.doubts))
        for run in part
    )


def commands_to_repeat(part: Sequence[Run]) -> list[str]:
    """The commands that run these points again, for a shell; none if no grid ran them."""
    commit, *others = {run.tags.get("git.commit", "") for run in part}
    dirty = any(run.tags.get("git.dirty") == "true" for run in part)
    one = re.fullmatch("[0-9a-f]{40}", commit) and not others
    checkout = [f"git checkout {commit}{'  # and uncommitted changes' * dirty}"] if one else []
    grids = [
        f"specexp grid run {file}{flag}"
        for how, flag in (("no", ""), ("yes", " --together"))
        for file in _grid_files([r for r in part if r.tags.get("together", "no") == how])
    ]
    return [*checkout, *grids] if grids else []


def remedy(part: Iterable[Run]) -> str:
    """How to measure again what is doubtful; "" if nothing is."""
    doubtful = [run for run in part if run.doubts]
    files = " ".join(_grid_files(doubtful))
    how = f"specexp grid run {files} --retry-doubtful" if files else "run their notebooks again"
    what = "To measure doubtful timings again, with nothing else running"
    return f"{what}: {how}" * bool(doubtful)


def _grid_files(part: Sequence[Run]) -> list[str]:
    """The grid files that ran these points, for a shell."""
    gridded = [run.tags for run in part if "grid" in run.tags]
    files = {tags.get("grid.file") or f"{tags['grid']}.yaml" for tags in gridded}
    return sorted(map(shlex.quote, files))


def write(everything: Sequence[Run], out: Path | None = None, names: Collection[str] = ()) -> Path:
    """Write the page of these runs to `out`, or to the store's `reports/` under these names, unless
    it is there, made of the same. Returns its path. Raises OSError."""
    if out is None:
        name = re.sub(r"[^\w.+-]+", "-", "+".join(sorted(names)))[:100].strip("-+.") or "report"
        out = results.folder("reports") / f"{name}.html"
    if out.is_file() and _made_of(everything).encode() in out.read_bytes()[:1000]:
        return out
    with files.whole(out) as partial:
        partial.write_bytes(page(everything).encode(errors="replace"))
    return out
