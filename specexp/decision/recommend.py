"""Which drafter to switch on for a target, with which draft length, and up to which batch size.

It reads committed results and measures nothing. Results are joined if they share the target, the
prompts, the length of the output, the sampling, the machine and whether it had its kernels,
whatever notebook or grid made them; all names of one folder are one model. A result is left out if
a newer one read other contents under the names of its target, drafter or prompts. At each batch
size all settings measured there compete: a drafter's draft length is chosen among those that are
certainly faster than plain decoding, by intervals that hold for all competitors at once
(Bonferroni). A batch size between two measured ones gets the choice of the larger, as gains shrink
with the batch; beyond the largest batch measured, and from the first at which nothing is certain,
drafting is off.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from itertools import groupby
from math import log
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pandas as pd

from specexp.errors import UserError, brief, counted, last_parts, meant
from specexp.measure.parameters import PARAMETERS
from specexp.tracking import mlflow_view, report, results
from specexp.tracking.mlflow_view import SPEEDUP
from specexp.zoo import naming

SHARED = ("target", "prompts", "categories", "chat", "max_new_tokens", "temperature", "top_k",
          "top_p", "min_p", "sampling", "rule", "dtype")  # fmt: skip
MACHINE = ("device", "processor", "threads")
EXACT = ("match", "reject", "block")  # rules; greedily all accept the same
READ = {"target": "its target has", "drafter": "its drafter has", "prompts": "its prompts have",
        "models": "its models have", "data": "its prompts have"}  # fmt: skip
Machine: TypeAlias = tuple[tuple[str, str], ...]  # pairs of a name and its value
Contents: TypeAlias = dict[tuple[str, str], str]  # digests, by a key of READ and what is called so
Known: TypeAlias = tuple[report.Run, dict[str, Any]]  # a result and its `params_of`


class Situation(NamedTuple):
    """What results must share to be joined. params: pairs of a name and its value."""

    params: tuple[tuple[str, Any], ...]
    machine: Machine

    @property
    def target(self) -> str:
        return str(dict(self.params)["target"])

    @property
    def rule(self) -> str:
        """The rule that judges sampled drafts; "" for greedy decoding."""
        params = dict(self.params)
        return "" if _greedy(params) else str(params["rule"])

    @property
    def engine(self) -> str:
        """The engine of the server that was measured; "" if it was measured here."""
        return dict(self.machine).get("engine", "").partition(" on ")[0]

    def __str__(self) -> str:
        """In words, without what is as usual: `prompts all, temperature 0.8; cpu, AMD EPYC`."""
        always = ("target", "prompts")
        unusual = [
            f"{n} {v}" for n, v in self.params
            if n not in always and v != PARAMETERS[n].default
        ]  # fmt: skip
        prompts = f"prompts {last_parts(dict(self.params)['prompts'], 1)}"
        machine = [counted(int(v), "thread") if n == "threads" else v for n, v in self.machine if v]
        return "; ".join(", ".join(part) for part in ([prompts, *unusual], machine))


@dataclass(frozen=True)
class Measured:
    """The speedup of one setting at one batch size. draft: the draft length, or the tree's name."""

    drafter: str
    draft: int | str
    batch: int
    speedup: float
    low: float
    high: float
    prompts: int

    @property
    def width(self) -> float:
        return log(self.high / self.low)

    @property
    def drafts(self) -> str:
        if isinstance(self.draft, str):
            return f"the tree {self.draft}"
        return counted(self.draft, "token")

    def among(self, many: int) -> "Measured":
        """Itself, with an interval that holds together with those of `many` settings."""
        low, high = mlflow_view.widened(self.speedup, self.low, self.high, many)
        return replace(self, low=low, high=high)

    def __str__(self) -> str:
        return SPEEDUP.figure(self.speedup, self.low, self.high)


@dataclass(frozen=True)
class Plan:
    """What one drafter is worth. steps: the largest batch size of each range and the setting chosen
    for it, ascending; empty if nothing is certainly faster at the smallest batch. alone: its best
    setting there, chosen or not. largest: the largest batch size at which it was measured."""

    drafter: str
    steps: tuple[tuple[int, Measured], ...]
    alone: Measured
    largest: int

    def schedule(self) -> str:
        """`1: 4, 2 to 4: 2, then off`: the draft length by batch size."""
        words, first = [], 1
        for last, chosen in self.steps:
            words.append(f"{first}{f' to {last}' * (last > first)}: {chosen.draft}")
            first = last + 1
        unmeasured = " (not measured)" * bool(words and first > self.largest)
        return ", ".join([*words, "then off" + unmeasured]) if words else "off"


@dataclass(frozen=True)
class Advice:
    """plans: the best first, of all drafters measured in a situation. measured: the smallest
    batches first. left_out: the results that were not used, and why. remedy: how to measure those
    of doubtful timings again."""

    situation: Situation
    plans: tuple[Plan, ...]
    measured: tuple[Measured, ...]
    left_out: tuple[tuple[str, str], ...]
    remedy: str = ""

    @property
    def best(self) -> Plan | None:
        return next((plan for plan in self.plans if plan.steps), None)

    def called(self, drafter: str) -> str:
        """A drafter as people read it: a folder by its last parts that tell it from the others."""
        return brief(drafter, [plan.drafter for plan in self.plans])

    def verdict(self) -> str:
        """What to do, how sure that is, and what is not known."""
        if not self.plans:
            return (
                f"Nothing can be said: of {counted(len(self.left_out), 'result')} none has a "
                "speedup that can be trusted."
            )
        first = self.plans[0].alone
        batch = f"in a batch of {first.batch}" if first.batch > 1 else "for one stream"
        if not (plan := self.best):
            more = "more prompts would narrow the interval" if first.high > 1 else "it loses"
            return (
                f"Leave drafting off: no drafter is certainly faster {batch}. The fastest is "
                f"{self.called(first.drafter)}, drafting {first.drafts}: {first}; {more}."
            )
        text = f"Draft {first.drafts} with {self.called(plan.drafter)} {batch}: {first}. "
        last, chosen = plan.steps[-1]
        if last == plan.largest:
            how = ": run 30_throughput_under_batch (its grid: specexp recommend --grid FILE)"
            how *= isinstance(chosen.draft, int)  # it drafts no trees
            how = ": run 50_servers with more streams" if self.situation.engine else how
            text += f"Larger batches than {last} were not measured with it{how}. "
        else:
            larger = [m for m in self.measured if m.drafter == plan.drafter and m.batch > last]
            stop = _choice([m for m in larger if m.batch == larger[0].batch])
            text += f"Switch it off in batches above {last} ({stop} in one of {stop.batch}). "
        there = [m for m in self.measured if m.batch == first.batch]
        others = [p.drafter for p in self.plans[1:] if p.drafter in {m.drafter for m in there}]
        close = {m.drafter for m in there if m.high >= first.low}
        if rivals := [self.called(drafter) for drafter in others if drafter in close]:
            more = " and more" * (len(rivals) > 4)
            text += f"It is not certainly better than {', '.join(rivals[:4])}{more}. "
        elif others:
            part = " measured there" * (len(others) < len(self.plans) - 1)
            text += f"It is certainly better than the other drafters{part}. "
        if further := [p for p in self.plans if p.steps and p.steps[-1][0] > last]:
            other = max(further, key=lambda p: p.steps[-1][0])
            most, chosen = other.steps[-1]
            text += f"In batches up to {most} {self.called(other.drafter)} pays: there "
            text += f"{chosen}, drafting {chosen.drafts}. "
        return text.rstrip()

    def table(self) -> pd.DataFrame:
        """A row a drafter, as text."""
        return pd.DataFrame(
            {"drafter": self.called(plan.drafter), "speedup": str(plan.alone),
             "batch": plan.alone.batch, "draft": plan.alone.draft,
             "draft length by batch": plan.schedule(),
             "measured to batch": plan.largest, "prompts": plan.alone.prompts or ""}
            for plan in self.plans
        ).astype(str)  # fmt: skip

    def speedups(self) -> pd.DataFrame:
        """What was measured, a row a setting and batch size, the best drafter first. best: the
        drafter's choice at this batch size, on or not; on: whether its plan drafts there. Drafters
        have the names that results give them, not those of `called`."""
        rows = []
        for plan in self.plans:
            own = [m for m in self.measured if m.drafter == plan.drafter]
            until = plan.steps[-1][0] if plan.steps else 0
            for m in own:
                best = m is _choice([n for n in own if n.batch == m.batch])
                rows.append(vars(m) | {"best": best, "on": best and m.batch <= until})
        return pd.DataFrame(rows, columns=[*(f.name for f in fields(Measured)), "best", "on"])

    def __str__(self) -> str:
        remedy = f" {self.remedy}" * bool(self.remedy)
        return f"{self.situation.target} ({self.situation}): {self.verdict()}{remedy}"


def advise(target: str = "", runs: Iterable[report.Run] | None = None) -> list[Advice]:
    """Advice for each situation in which this target, or any, was measured; the one with the most
    measurements first. target: a name, folder or hub id, or its last part. runs: by default the
    newest result of each point on each machine. Raises UserError if there are none."""
    if runs is None:
        runs = report.newest(filter(results.intact, results.listed("results")), machine_of)
    known = [(run, params) for run in runs if (params := params_of(run)).get("target")]
    targets = {params["target"] for _, params in known}
    place_of = cache(_place)
    chosen = {t for t in targets if not target or place_of(t) == place_of(target)} or {
        t for t in targets if last_parts(t, 1) == target
    }
    if targets and not chosen:
        there = f"; there are some of {', '.join(sorted(targets))}"
        raise UserError(
            f"no results of {target} in {results.root()}{meant(target, targets, there)}"
        )
    names, grouped = _shortest(chosen, place_of), dict[Situation, list[Known]]()
    read, newest = dict[report.Run, Contents](), Contents()
    for run, params in sorted(known, key=lambda each: each[0].ended):
        if params["target"] in chosen:
            params["target"] = names[params["target"]]
            shared = tuple((name, _shared(params, name)) for name in SHARED)
            grouped.setdefault(Situation(shared, machine_of(run)), []).append((run, params))
            read[run] = _read(run, params, place_of)
            newest |= read[run]
    changed = {
        run: next((READ[key[0]] for key, digest in own.items() if newest[key] != digest), "")
        for run, own in read.items()
    }
    every = [_advise(situation, part, changed) for situation, part in grouped.items()]
    every = [advice for advice in every if advice.measured or advice.left_out]
    return sorted(every, key=lambda advice: -len(advice.measured))


def params_of(run: report.Run) -> dict[str, Any]:
    """A result's parameters. Paths, which it has relative to its notebook, are relative to the
    working folder."""
    params, source = dict(run.record["params"]), run.tags.get("mlflow.source.name", "notebooks/")
    notebook = results.ROOT / source.rpartition("/")[0]
    named = {name: str(params[name]) for name in ("target", "drafter", "prompts") if name in params}
    return params | {name: moved(value, notebook, Path.cwd()) for name, value in named.items()}


def moved(value: str, old: Path, new: Path) -> str:
    """A name whose path, if it has one, is relative to the folder `new` instead of `old`."""
    head, colon, path = value.rpartition(":")
    bare = path.removesuffix("+int8")
    if "/" not in bare or os.path.isabs(bare) or not (there := old / bare).exists():
        return value
    return f"{head}{colon}{os.path.relpath(there, new)}{path[len(bare) :]}"


def machine_of(run: report.Run) -> Machine:
    """What decides how long a result's work took: of a server, the engine and where it ran; else,
    of its kernels only which were missing, as every version has others."""
    if "engine" in run.tags:
        return (("engine", run.tags["engine"]),)
    kernels = run.tags.get("kernels", "").split(", ")
    missing = ", ".join(part for part in kernels if re.search(r"\b(no|not|off)\b", part))
    return *((name, run.tags.get(name, "")) for name in MACHINE), ("kernels", missing)


def _shared(params: Mapping[str, Any], name: str) -> Any:
    """A parameter's value, or its default; of a list the items as text, in any order the same; of
    rules that accept the same, `auto`."""
    value = params.get(name, PARAMETERS[name].default)
    if name == "rule" and value in (EXACT if _greedy(params) else ("reject",)):
        return "auto"
    if isinstance(value, list):
        return ", ".join(sorted(map(str, value))) or PARAMETERS[name].default
    return value


def _greedy(params: Mapping[str, Any]) -> bool:
    return _shared(params, "temperature") == 0 and _shared(params, "sampling") == "given"


def _advise(
    situation: Situation, known: Sequence[Known], changed: Mapping[report.Run, str]
) -> Advice:
    """changed: what a newer result than each shows to have other contents now; else ""."""
    usable: list[Measured] = []
    left_out: list[tuple[str, str]] = []
    for run, params in known:
        if SPEEDUP.metric not in run.metrics:
            continue
        why = f"{changed[run]} changed since" if changed[run] else _unusable(run)
        measured = [] if why else measured_in(run, params)
        usable += measured
        if not measured:
            left_out.append((f"{run.experiment}: {run.label}", why or "it has no interval"))
    names = _shortest({m.drafter for m in usable}, partial(_place, target=situation.target))
    best: dict[tuple[str, int | str, int], Measured] = {}
    for m in (replace(m, drafter=names[m.drafter]) for m in usable):
        key = m.drafter, m.draft, m.batch
        if key not in best or m.width < best[key].width:  # the most precise counts
            best[key] = m
    at = Counter(m.batch for m in best.values())
    competing = [m.among(at[m.batch]) for m in sorted(best.values(), key=attrgetter("batch"))]
    drafters = dict.fromkeys(m.drafter for m in competing)
    plans = [_plan(name, [m for m in competing if m.drafter == name]) for name in drafters]
    plans.sort(key=lambda plan: (not plan.steps, plan.alone.batch, -plan.alone.speedup))
    remedy = report.remedy(run for run, _ in known if SPEEDUP.metric in run.metrics)
    return Advice(situation, tuple(plans), tuple(competing), tuple(left_out), remedy)


def _read(run: report.Run, params: Mapping[str, Any], place_of: Callable[..., str]) -> Contents:
    """Digests of what a result read, by what it was and what is called so: what it logged and, of
    a grid's, the parts of its identity, in which its models are one."""
    identity = results.read(run.folder / results.POINT).get("identity", {})
    own = sorted((name, value) for name, value in params.items() if name not in PARAMETERS)
    names = {"models": ("target", "drafter", "rivals"), "data": ("prompts", "arrivals")}
    parts = {
        (part, repr([*map(params.get, names[part]), own])): identity[part]
        for part in names
        if part in identity
    }
    target, drafter, prompts = (str(params.get(n)) for n in ("target", "drafter", "prompts"))
    places = {"target": place_of(target), "drafter": place_of(drafter, target)}
    places["prompts"] = prompts
    logged = run.record.get("contents", {})
    return {(name, places[name]): digest for name, digest in logged.items()} | parts


def _unusable(run: report.Run) -> str:
    """Why a result's speedup cannot decide anything; "" if it can."""
    drafter = run.record["params"].get("drafter")
    if drafter is None:
        return "its parameters name no drafter"
    if str(drafter).partition(":")[0] == "planted":
        return "its drafts are planted: no such drafter exists"
    if mlflow_view.is_simulated(run.record, SPEEDUP.metric):
        return "it is simulated"
    if run.metrics.get("exact/pass", "server" in run.record["params"]) != 1:  # `check` is for those
        return "its output was not checked, or not the target's"
    if _gamma(run) is None:
        return "a policy chose its draft lengths"
    return "; ".join(run.doubts)


def measured_in(run: report.Run, params: Mapping[str, Any]) -> list[Measured]:
    """The speedups that a usable result logged with intervals: by batch size, or of one stream.
    params: as `params_of` gives them."""
    metrics, series = run.record["metrics"], run.record["series"]
    names = (f"speedup/at_batch{end}" for end in ("", "_low", "_high"))
    curve, lows, highs = (series.get(name, {}) for name in names)
    gamma = _gamma(run)
    at = {(gamma, 1): (metrics[SPEEDUP.metric], *SPEEDUP.interval(metrics))}
    if curve:
        alone = at if "speedup/best_gamma" in metrics else {}  # else it is of the smallest batch
        gamma = params.get("gamma", gamma)
        at = alone | {(gamma, int(b)): (v, lows.get(b, v), highs.get(b, v))
                      for b, v in curve.items()}  # fmt: skip
    drafter = naming.called(str(params["drafter"]), params["target"])
    return [
        Measured(drafter, _draft(params, gamma), batch, value, low, high, run.prompts)
        for (gamma, batch), (value, low, high) in at.items()
        if 0 < low < high
    ]


def _draft(params: Mapping[str, Any], gamma: Any) -> int | str:
    """What a result drafted: a chain's length, or its tree with what else decides the shape."""
    tree = str(params.get("tree") or "chain")
    deep = f", {gamma} deep" * tree.startswith("grown")
    return int(gamma) if tree == "chain" else f"{tree}{deep}"


def _gamma(run: report.Run) -> Any:
    """The draft length of a result, if several were measured the best; None if a policy chose."""
    return run.metrics.get("speedup/best_gamma", run.record["params"].get("gamma"))


def _place(name: str, target: str = "") -> str:
    """The folder or hub id that a target's name stands for; of a drafter's name, if its target is
    given, the method and where its weights are. The name itself if nothing is there any more."""
    with suppress(UserError):
        if not target:
            return naming.locate(name)
        method, _ = naming.method_of(name) or ("", "")
        if source := naming.source_of(name, target):
            return f"{method}:{source}"
    return name


def _shortest(names: Collection[str], place: Callable[[str], str]) -> dict[str, str]:
    """For each name the shortest of those that stand for the same place."""
    shortest: dict[str, str] = {}
    for name in sorted(names, key=lambda name: (len(name), name)):
        shortest.setdefault(place(name), name)
    return {name: shortest[place(name)] for name in names}


def _plan(drafter: str, measured: Sequence[Measured]) -> Plan:
    steps: list[tuple[int, Measured]] = []
    by_batch = {batch: list(at) for batch, at in groupby(measured, attrgetter("batch"))}
    for batch, at in by_batch.items():
        if (chosen := _choice(at)).low <= 1:
            break
        if steps and steps[-1][1].draft == chosen.draft:
            steps.pop()
        steps.append((batch, chosen))
    return Plan(drafter, tuple(steps), _choice(by_batch[min(by_batch)]), max(by_batch))


def _choice(at: Sequence[Measured]) -> Measured:
    """The fastest of a drafter's settings at one batch size, of those certainly faster than plain
    decoding if there are any."""
    return max([m for m in at if m.low > 1] or at, key=attrgetter("speedup"))
