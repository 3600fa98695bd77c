"""What a run answers, and why its timings may be doubtful; and what the MLflow UI shows of it and
its experiment: a view with columns, order and charts; a note; a run's name and description."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from statistics import NormalDist
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from specexp import theory
from specexp.errors import DEEPEST, brief, last_parts
from specexp.tracking.results import runs_in

if TYPE_CHECKING:
    import pandas as pd

KEY = "specexp"
VIEW_TAG = f"mlflow.sharedViewState.{KEY}"
NOTE = "mlflow.note.content"
SUPERSEDED = "superseded"  # the tag of a result of whose point there is a newer one
_METRIC = re.compile(r"[a-z0-9_]+/(?!\.\.?$)[A-Za-z0-9_.-]+")
_TAG = re.compile(r"\w[\w. -]{0,249}")
_MARKUP = re.compile(r"([\\`*<]|(?<!\w)_|_(?!\w))")
_STEP = re.compile(r"-?\d{1,18}")
_LONGEST_NAME = 250  # MLflow rejects longer ones
_LONGEST_TAG = 5000  # some of MLflow's stores reject longer ones
_LONGEST_PARAM = 6000  # MLflow truncates longer ones
CHARTS = "&compareRunsMode=CHART"  # added to `url`
OWN = "*Rewritten by `specexp grid run`: delete this line to keep a text of your own.*"
WIDTHS = {"attributes.`Run Name`": 180, "runDateAndNestInfo": 44, "tags.`answer`": 170}  # in pixels
SIGNS = {"drafter": "", "policy": "", "gamma": "γ=", "temperature": "T="}
DOUBTFUL = " (doubtful)"  # behind an answer
DRIFT = 1.3  # between repeats, of plain decoding's seconds per token
TIMED = ("speedup/", "latency/", "throughput/")
FIGURES = (  # columns where none of ANSWERS was logged
    "acceptance/length", "speedup/predicted", "throughput/tok_s", "latency/ttft_p95_ms",
    "latency/tpot_p95_ms", "goodput/share", "exact/pass", "exact/detectable_tv",
)  # fmt: skip
BARS = (
    "acceptance/rate", "acceptance/length", "speedup/measured", "throughput/tok_s",
    "latency/ttft_p95_ms", "regret/worst", "fleet/replicas",
)  # fmt: skip
LINES = (
    "acceptance/at_position", "speedup/at_gamma", "speedup/at_batch", "served/at_batch",
    "regret/at_batch", "load/speculated_at_batch", "map/break_even_batch",
)  # fmt: skip


class Answer(NamedTuple):
    """A metric that answers a question; the name of its interval's ends without `_low`, `_high`;
    how the number is written and its unit; what follows, in a column and in a sentence; whether the
    smallest is best, the value that a clear result differs from, and whether it rests on times;
    what follows instead where a loss is below zero, and so a gain."""

    metric: str
    ends: str
    digits: str
    unit: str
    brief: str
    words: str
    least: bool = False
    even: float | None = None
    timed: bool = True
    gained: tuple[str, str] | None = None

    def interval(self, metrics: Mapping[str, float]) -> tuple[float, float]:
        """The ends of the logged interval; the value twice if none was logged."""
        value = metrics[self.metric]
        low, high = (metrics.get(f"{self.ends}_{side}", value) for side in ("low", "high"))
        return low, high

    def together(self, metrics: Mapping[str, float], many: int) -> tuple[float, float]:
        """The ends of the interval, widened so that those of `many` runs hold together; on a
        logarithmic scale if it is of a ratio."""
        value, (low, high) = metrics[self.metric], self.interval(metrics)
        if self.even is not None and min(low, value, high) > 0:
            return widened(value, low, high, many)
        most = 1.0 if high <= 1 else math.inf  # a share stays one
        least = 0.0 if low >= 0 else -math.inf  # a regret is negative where nothing is lost
        low, high = (value + wider(many) * (end - value) for end in (low, high))
        return max(least, low), min(most, high)

    def figure(self, value: float, low: float, high: float) -> str:
        unit = self.unit.removesuffix("s" * (f"{value:{self.digits}}" == "1"))
        return figure(f"{{:{self.digits}}}{unit}", value, low, high)

    def said(self, value: float, low: float, high: float) -> tuple[str, str]:
        """`figure` and what follows, in a column and in a sentence."""
        figure, words = self.figure(value, low, high), (self.brief, self.words)
        if self.gained and value < 0:
            figure, words = self.figure(-value, -high, -low), self.gained
        return figure + words[0], figure + words[1]


def figure(form: str, value: float, low: float, high: float) -> str:
    """A value with its interval, if it has one: `1.42x [1.21, 1.66]`, `61% [55, 66]`."""
    ends = (form.format(end).rstrip("x%") for end in (low, high))
    return form.format(value) + f" [{', '.join(ends)}]" * (low < high)


def wider(many: int) -> float:
    """How much wider 95 % intervals are if those of `many` runs are to hold together, so that any
    of them may be picked (Bonferroni)."""
    return NormalDist().inv_cdf(1 - 0.025 / many) / NormalDist().inv_cdf(0.975)


def widened(value: float, low: float, high: float, many: int) -> tuple[float, float]:
    """The ends of the interval of a ratio, one of `many`, on a logarithmic scale (see `wider`)."""
    return value * (low / value) ** wider(many), value * (high / value) ** wider(many)


SPEEDUP = Answer("speedup/measured", "speedup/ci", ".2f", "x", "", " of plain decoding's speed",
                 even=1)  # fmt: skip
RATE = Answer("acceptance/rate", "acceptance/rate_ci", ".0%", "", " accepted",
              " of draft tokens accepted", timed=False)  # fmt: skip
LENGTH = Answer("acceptance/length", "acceptance/length_ci", ".2f", "", " tokens per pass",
                " tokens per target pass", timed=False)  # fmt: skip
ANSWERS = (
    Answer("fleet/replicas", "", ".0f", " replicas", "", "", least=True, timed=False),
    Answer("regret/worst", "regret/worst", ".1%", "", " regret",
           " of tokens/s lost at worst to the best fixed policy", least=True,
           gained=(" gained", " of tokens/s gained at worst against the best fixed policy")),
    SPEEDUP,
    RATE,
)  # fmt: skip


BESIDE = {
    "speedup/best_gamma": "with a draft length of {:.0f}",
    "throughput/crossing_batch": "certainly slower in a batch of {:.0f}",
    "fleet/replicas_plain": "plain decoding needs {:.0f}",
}


def beside(record: Mapping[str, Any]) -> list[str]:
    """What else decides, in words: which draft length, and what the load changes."""
    metrics, series = record.get("metrics", {}), record.get("series", {})
    words = [text.format(metrics[name]) for name, text in BESIDE.items() if name in metrics]
    at, low, high = (
        {int(batch): value for batch, value in series.get(f"speedup/at_batch{end}", {}).items()}
        for end in ("", "_low", "_high")
    )
    if len(at) > 1:
        first, last = (
            f"{SPEEDUP.figure(at[n], low.get(n, at[n]), high.get(n, at[n]))} in a batch of {n}"
            for n in (min(at), max(at))
        )
        other = f"with one of {record['params'].get('gamma')}, "  # than the best
        words.append(f"{other * ('speedup/best_gamma' in metrics)}{first}, {last}")
    return words


def is_simulated(record: Mapping[str, Any], metric: str) -> bool:
    """Whether a run's tag `simulated` names the group of this metric `group/name`."""
    groups = record.get("tags", {}).get("simulated", "")
    return metric.partition("/")[0] in groups.split(", ")


def is_timed(record: Mapping[str, Any]) -> bool:
    """Whether a run logged timings that are not simulated."""
    timed = (name for name in record.get("metrics", {}) if name.startswith(TIMED))
    return not all(is_simulated(record, name) for name in timed)


def not_credible(record: Mapping[str, Any]) -> list[str]:
    """Why the timings that a run logged cannot be; none if they can, or are simulated."""
    if is_simulated(record, "speedup/measured"):
        return []
    metrics = record.get("metrics", {})
    verify = metrics.get("cost/verify_steps")
    reasons = theory.doubts(
        metrics.get("speedup/measured", 1.0),
        metrics.get("acceptance/length"),
        metrics.get("speedup/predicted") if "speedup/measured" in metrics else None,
        None if verify is None else verify + metrics.get("cost/rest_steps", 0.0),
    )
    own = ["a timing was not credible"] * (metrics.get("speedup/credible") == 0)
    return reasons or own


def drift(rounds: pd.DataFrame) -> float:
    """Plain decoding's seconds per token in the slowest repeat over those in the fastest, at the
    batch size where they differ most, from a table of rounds; 1 without repeats."""
    table = rounds.select_dtypes("number")
    if not {"repeat", "plain_s", "plain_tokens"} <= set(table):
        return 1.0
    table = table.assign(batch=table.get("batch", 1))
    once = table.drop_duplicates(["batch", "repeat", "plain_s"])
    sums = once.groupby(["batch", "repeat"])[["plain_s", "plain_tokens"]].sum()
    pace = (sums["plain_s"] / sums["plain_tokens"]).groupby("batch")
    return float((pace.max() / pace.min()).max())


def doubts(record: Mapping[str, Any], drifted: Callable[[], float] = lambda: 1.0) -> list[str]:
    """Why timings that a run logged should not be trusted: they are not credible, the pace drifted
    or something else ran beside them; none if they should, or are simulated. `drifted`: finds out
    the `drift` of its rounds, and is only called if there are timings."""
    if not is_timed(record):
        return []
    reasons, tags = not_credible(record), record.get("tags", {})
    with suppress(KeyError, ValueError):
        load, threads = float(tags["load"]), float(tags["threads"])
        here = tags.get("device") == "cpu" and "engine" not in tags  # else a server has the work
        if here and load > threads + 1:
            both = f"the load average was {load:g}, its own threads {threads:g}"
            reasons.append(f"other work ran beside it ({both})")
    if (fold := drifted()) > DRIFT:
        reasons.append(f"plain decoding's pace drifted {fold:.1f}-fold between repeats")
    return [*reasons, *["other points ran beside it"] * (tags.get("together") == "yes")]


def row(
    experiment: str, run_id: str, name: str, record: Mapping[str, Any], doubtful: bool
) -> dict[str, Any]:
    """A run in a table of runs, in which doubtful timings are not credible."""
    return (
        {"experiment": experiment, "run_id": run_id, "name": name}
        | {f"params.{n}": text for n, text in as_params(record).items()}
        | {f"metrics.{n}": value for n, value in record["metrics"].items()}
        | ({"metrics.speedup/credible": 0.0} if doubtful else {})
        | {f"tags.{n}": text for n, text in record["tags"].items() if not n.startswith("mlflow.")}
    )


def answers(record: Mapping[str, Any], doubtful: bool) -> Iterator[tuple[str, str]]:
    """The figures of a run that answer, with their intervals, in a column and in a sentence; those
    simulated are marked, and timings if they are doubtful."""
    metrics = record.get("metrics", {})
    for a in ANSWERS:
        if a.metric in metrics:
            mark = " simulated" * is_simulated(record, a.metric)
            mark = mark or DOUBTFUL * (doubtful and a.timed)
            brief, words = a.said(metrics[a.metric], *a.interval(metrics))
            yield brief + mark, words + mark


def answer_tags(record: Mapping[str, Any], doubtful: bool, files: str = "") -> dict[str, str]:
    """Two tags of a run: `answer`, a column of the view, and its description in sentences, with a
    link to `files` if another run keeps them. A tag that the notebook logged stays as it is."""
    if not (said := [*answers(record, doubtful)]):
        return {}
    (answer, first), *rest = said
    description = "; ".join([f"**{first}**", *beside(record), *(words for _, words in rest)])
    description += f"\n\n[Figures and notebook, in the run that measured it]({files})" * bool(files)
    tags = {"answer": answer, NOTE: description}
    return {n: text for n, text in tags.items() if n not in record.get("tags", {})}


def is_doubtful(record: Mapping[str, Any]) -> bool:
    """Whether a run that was read from MLflow has doubtful timings; that its pace drifted, only its
    tag `answer` says there."""
    return DOUBTFUL in record["tags"].get("answer", "") or bool(doubts(record))


def run_name(
    params: Mapping[str, Any], varying: Collection[str],
    among: Mapping[str, Collection[Any]] = MappingProxyType({}),
) -> str:  # fmt: skip
    """A run's name: its drafter, then the other parameters that vary, as in `sibling-3m γ=3`.
    `among`: their values in other runs, which each is told from (`brief`)."""
    others = {**among, "drafter": [*among.get("drafter", ()), *(params.get("rivals") or ())]}
    names = [*SIGNS, *(n for n in varying if n not in SIGNS)]
    named = [n for n in names if n in params and (n in varying or n == "drafter")]
    return " ".join(
        SIGNS.get(n, f"{n}=") + brief(params[n], others.get(n, ())) for n in named
    )[:200]  # fmt: skip


def run_tags(tags: Mapping[str, str], params: Mapping[str, Any], rival: str) -> dict[str, str]:
    """The tags of a result's run or, if `rival` is not "", of the run of that drafter, whose name
    stands in place of the result's own."""
    if not rival:
        return dict(tags)
    name, own = tags.get("name", ""), params.get("drafter", "")
    among = [own, *(params.get("rivals") or ())]
    # the drafter's own part of the name, by however many parts of a path it is told from others
    written = next(
        (text for n in range(DEEPEST, 0, -1) if (text := last_parts(own, n)) in name), ""
    )
    named = name.replace(written, brief(rival, among), 1) if written else f"{rival} {name}"
    return {**tags, "name": named, "rival": rival}


def note(
    experiment: str, question: str, answer: str, commands: Collection[str], report: str
) -> str:
    """The Markdown on the pages of the experiment with this id: today's answer first, as MLflow's
    start page and a folded banner show the first line only; the question, links to the view and
    the report (or the command that writes it), and the commands that run it again."""
    question, answer = (_MARKUP.sub(r"\\\1", text) for text in (question, answer))
    runs = url(experiment, ".")
    parts = [
        answer.replace(". ", ".\n\n", 1),
        f"**{question}** [The runs with intervals]({runs}), [their charts]({runs}{CHARTS}), "
        f"a report to send: {report}",
    ]
    parts += ["Run it again:", "```\n" + "\n".join(commands) + "\n```"] if commands else []
    return "\n\n".join([*parts, OWN])


def shared_view(logged: Collection[str], at_ms: int) -> str:
    """A saved view as JSON: columns, order and charts of the logged metrics; made at that time.

    The format is internal to MLflow's UI (3.17.2). Should it change, `url` leads to the plain list.
    The answer stands beside the name, wide enough for its interval.
    """
    best = next((a for a in ANSWERS if a.metric in logged), None)
    columns = ["tags.`answer`"] if best else [f"metrics.`{m}`" for m in FIGURES if m in logged]
    section = {"uuid": "overview", "name": "Does it pay?", "display": True, "isReordered": True}
    bars = [{"type": "BAR", "metricKey": m, "runsCountToCompare": 20} for m in BARS if m in logged]
    lines: list[dict[str, object]] = [
        {
            "type": "LINE", "metricKey": m, "selectedMetricKeys": [m], "xAxisKey": "step",
            "xAxisScaleType": "log" if m.endswith("_batch") else "linear",
            "scaleType": "linear", "lineSmoothness": 0,
            "useGlobalXaxisKey": True, "useGlobalLineSmoothing": True, "runsCountToCompare": 20,
            "range": {}, "yAxisKey": "metric", "yAxisExpressions": [],
            "selectedXAxisMetricKey": "", "ignoreOutliers": False, "displayPoints": True,
        }
        for m in LINES
        if m in logged
    ]  # fmt: skip
    scatter = {
        "type": "SCATTER", "runsCountToCompare": 100,
        "xaxis": {"key": "acceptance/rate", "type": "METRIC"},
        "yaxis": {"key": "speedup/measured", "type": "METRIC"},
    }  # fmt: skip
    both = {"acceptance/rate", "speedup/measured"} <= set(logged)
    common = {"metricSectionId": "overview", "deleted": False, "isGenerated": False}
    charts = [
        {"uuid": f"chart{i}", **common, **chart}
        for i, chart in enumerate([*bars, *lines, *[scatter] * both])
    ]
    state = {
        "selectedColumns": columns,
        "columnOrder": ["0", *WIDTHS, "duration"],
        "columnWidths": WIDTHS,
        "orderByKey": f"metrics.`{best.metric}`" if best else "attributes.start_time",
        "orderByAsc": bool(best and best.least),
        "searchFilter": f"tags.{SUPERSEDED} IS NULL",
        "runsHiddenMode": "SHOW_ALL",
        "compareRunCharts": charts,
        "compareRunSections": [section],
        "isAccordionReordered": True,
    }
    view = {"name": "Does it pay?", "createdAt": at_ms, "updatedAt": at_ms}
    return json.dumps(view | {"state": json.dumps(state)})


def url(experiment: str, base: str) -> str:
    """The link to an experiment's runs in the shared view; `base` is the address of the UI."""
    return (
        f"{base}/#/experiments/{experiment}/runs?viewStateShareKey={KEY}"
        "&workflowType=machine_learning"
    )


def as_params(record: Mapping[str, Any]) -> dict[str, str]:
    """A record's parameters as MLflow stores them."""
    written = {
        n: json.dumps(v) if isinstance(v, list) else str(v) for n, v in record["params"].items()
    }
    return {n: v[:_LONGEST_PARAM] for n, v in written.items()}


def as_points(record: Mapping[str, Any]) -> list[tuple[str, int, float]]:
    """A record's metrics and series as MLflow stores them: (name, step, value), rounded. What
    answers comes first: MLflow compares runs by the first metric."""
    metrics = record.get("metrics", {})
    first = [a.metric for a in ANSWERS if a.metric in metrics]
    names = dict.fromkeys([*first, *metrics])
    points = [(n, 0, rounded(metrics[n])) for n in names]
    for n, curve in record.get("series", {}).items():
        points += [(n, int(step), rounded(v)) for step, v in curve.items()]
    return points


def rounded(value: float) -> float:
    """A value of four digits, or a whole number: MLflow's UI shows all. The record keeps them."""
    return float(round(value)) if abs(value) >= 1000 else float(f"{value:.4g}")


def problems_of(record: Mapping[str, Any]) -> list[str]:
    """Why a record cannot be published: bad names or steps, values not finite, tags not text."""
    return list(dict.fromkeys(what for r in runs_in(record).values() for what in _problems(r)))


def _problems(record: Mapping[str, Any]) -> Iterator[str]:
    points = [(name, name, "0", value) for name, value in record["metrics"].items()]
    for name, curve in record["series"].items():
        points += [(name, f"{name} at {step}", str(step), v) for step, v in curve.items()]
    for name in dict.fromkeys([*record["metrics"], *record["series"]]):
        if not _METRIC.fullmatch(name):
            yield f"metric {name!r} is not named group/name"
        if len(name) > _LONGEST_NAME:
            size = f"has {len(name)} characters, more than {_LONGEST_NAME}"
            yield f"the metric {name[:40]}... {size}"
    for name, where, step, value in points:
        if not _STEP.fullmatch(step):
            yield f"{name} has the step {step}, not a 64-bit integer"
        if not math.isfinite(value):
            yield f"{where} is {value}, not a finite number"
    for tag, text in record.get("tags", {}).items():
        named = isinstance(tag, str) and _TAG.fullmatch(tag) and isinstance(text, str)
        if not named or len(text) > _LONGEST_TAG:
            yield (
                f"the tag {tag!r:.60} must have a plain name and a text of at most {_LONGEST_TAG} "
                f"characters, not {text!r:.40}"
            )
