"""Statistics of samples: acceptance, speedups with intervals, predictions, logged metrics.

The tables come from `one_pairing` and hold raw counts and seconds. Every ratio and interval is
computed here, so that a stored table gives the same figures as a fresh one.
"""

import re
from collections.abc import Iterable, Mapping
from itertools import chain, count
from typing import Any

import numpy as np
import pandas as pd

from specexp import theory
from specexp.measure import statistics
from specexp.measure.statistics import NOT_CREDIBLE, NOTHING, Draws, Interval
from specexp.trace import Acceptance

LABELS = ("pairing", "category", "question_id")  # columns of text, or of ids of any kind
TIMED = ["plain_s", "plain_tokens", "s", "tokens"]  # of plain decoding, then of speculation


# --- acceptance ----------------------------------------------------------------------------------


def pooled(samples: pd.DataFrame) -> Acceptance:
    """The acceptance of all rows together, from their column `record`."""
    return Acceptance.pooled(samples["record"])


def once(samples: pd.DataFrame) -> pd.DataFrame:
    """The first repeat: later ones are of the same texts, and so of no further draft tokens."""
    return samples[samples["repeat"] == 0] if "repeat" in samples else samples


def drafted_share(samples: pd.DataFrame) -> float:
    """Draft tokens over gamma times rounds, for chains in rows of `one_pairing.acceptance`. Below 1
    where a lookup found no match, or drafts were cut at the end of the output."""
    requested = sum(g * r.passes for g, r in zip(samples["gamma"], samples["record"], strict=True))
    return pooled(samples).drafted / requested


def gains(samples: pd.DataFrame, over: str) -> pd.DataFrame:
    """Acceptance length (tokens a target pass) of each rule minus that of the rule `over`.

    samples: rows of `one_pairing.acceptance` at one temperature. One row a rule, with columns rule,
    gain, and the ends low and high of its interval over prompts; all intervals hold at once. No row
    if `over` is alone."""
    each = samples.groupby(["rule", "question_id"])[["accepted", "passes"]].sum()
    by_rule = {rule: part.droplevel("rule") for rule, part in each.groupby("rule")}
    base = by_rule.pop(over).add_prefix("base_")
    pairs = {rule: part.join(base) for rule, part in by_rule.items()}
    draws = {r: statistics.difference_draws(*pair.to_numpy().T) for r, pair in pairs.items()}
    return _table("rule", "gain", draws)


def _table(by: str, column: str, draws: Mapping[Any, Draws]) -> pd.DataFrame:
    """One row a key, named `by`, with its value as this column; all intervals hold at once."""
    intervals = statistics.simultaneous(draws)
    rows = [{by: key} | interval.columns(column) for key, interval in intervals.items()]
    return pd.DataFrame(rows, columns=[by, column, "low", "high"])


def length(samples: pd.DataFrame) -> Interval:
    """Acceptance length (1 + accepted / passes) with its interval over prompts. It is at least as
    wide as if every round accepted one token or none: where none did, the next may."""
    accepted, passes = units(once(samples), "accepted", "passes")
    value = statistics.ratio(accepted, passes, accepted + passes)
    least = statistics.share(np.minimum(accepted, passes), passes)
    high = min(max(value.high, least.high), float(samples["gamma"].max()))
    return value._replace(high=high).plus(1)


def rate(samples: pd.DataFrame) -> Interval:
    """Acceptance rate (accepted / drafted) with its interval over prompts."""
    accepted, drafted, passes = units(once(samples), "accepted", "drafted", "passes")
    return statistics.share(accepted, drafted, drafted * (1 + accepted / np.maximum(passes, 1)))


def positions(samples: pd.DataFrame, given: bool = False) -> pd.DataFrame:
    """P(at least i draft tokens accepted), or, if `given`, P(token i accepted | token i - 1 was).
    One row a position, with columns position, value and the ends low and high of its interval over
    prompts."""
    deepest = int(samples["gamma"].max())
    counts = np.array([[*r.histogram, *[0] * deepest][: deepest + 1] for r in samples["record"]])
    reached = {f"{i}": counts[:, i:].sum(1) for i in range(deepest + 1)}
    each = samples[["question_id"]].assign(**reached, tokens=sum(reached.values()))
    rows = []
    for i in range(1, deepest + 1):
        before, least = (str(i - 1), i) if given else ("0", 1)  # tokens of a round that counts
        if each[before].any():
            accepted, rounds, tokens = units(each, f"{i}", before, "tokens")
            value = statistics.share(accepted, rounds, tokens / least)
            rows.append({"position": i} | value.columns("value"))
    return pd.DataFrame(rows)


def length_and_bias(samples: pd.DataFrame, biases: Mapping[str, pd.Series]) -> pd.DataFrame:
    """Acceptance length and bias of each rule with their intervals over prompts, as columns rule,
    length, length_low, length_high, bias, bias_low and bias_high; biases: from `one_pairing.bias`
    by rule."""
    columns = [f"{name}{end}" for name in ("length", "bias") for end in ("", "_low", "_high")]
    rows = []
    for rule, part in samples.groupby("rule"):
        each = biases[rule].groupby(level=0).agg(["sum", "count"])
        bias = statistics.ratio(each["sum"], each["count"])
        rows.append([rule, *length(part)[:3], *bias[:3]])
    return pd.DataFrame(rows, columns=["rule", *columns])


def rounds(samples: pd.DataFrame) -> pd.DataFrame:
    """The trace behind a table of samples, as logged in parquet. One row a round and stream:
    columns round, end_s, row, drafted, accepted, emitted, and what the samples say of themselves
    (pairing, category, gamma, ...)."""
    names = ["round", "end_s", "row", "drafted", "accepted", "emitted"]
    mixed = [c for c in LABELS if c in samples and samples[c].dtype == object]
    samples = samples.astype(dict.fromkeys(mixed, "str")).reset_index(drop=True)
    each = samples["rounds"].explode()
    table = pd.DataFrame(each.tolist(), columns=names, index=each.index)
    about = samples.drop(columns=["record", "rounds", *names], errors="ignore")
    return table.join(about).reset_index(drop=True)


# --- speedup -------------------------------------------------------------------------------------


def speedups(samples: pd.DataFrame, by: str, expected: pd.DataFrame | None = None) -> pd.DataFrame:
    """The speedup over plain decoding, one row a value of the column `by` (an arm).

    samples: rows of `one_pairing.latency`, `latency_by_arm` or `throughput`. Columns: that one;
    speedup with its interval low, high and doubt (see `statistics.Interval`); tok_s and plain_tok_s
    (tokens per second); acceptance length and rate. All intervals hold at once, so that any row may
    be picked. What cannot be, by itself or by what is `expected`, is marked (see `judged`).

    Column promised, the same in all rows: the speedup to expect of the fastest, without the luck by
    which it came out first (see `leave_one_out`)."""
    parts = dict(list(samples.groupby(by)))
    timed = statistics.simultaneous({key: speedup_draws(part) for key, part in parts.items()})
    rows = [
        {by: key}
        | timed[key].columns("speedup")
        | {"doubt": timed[key].doubt}
        | {"tok_s": part["tokens"].sum() / part["s"].sum()}
        | {"plain_tok_s": part["plain_tokens"].sum() / part["plain_s"].sum()}
        | {"length": record.length, "rate": record.rate}
        for key, part in parts.items()
        for record in [pooled(part)]
    ]
    promised = _pace(leave_one_out(samples, by)[TIMED].sum())
    return judged(pd.DataFrame(rows).assign(promised=promised), expected)


def judged(measured: pd.DataFrame, expected: pd.DataFrame | None = None) -> pd.DataFrame:
    """The rows of `speedups`, with doubt `NOT_CREDIBLE` in those that `theory.doubts`.

    expected: from `predicted`: a row for each value of its first column that there is something to
    expect of, with columns speedup and verify."""
    by = "" if expected is None else expected.columns[0]
    rows = {} if expected is None else expected.set_index(by).to_dict("index")
    each = []
    for _, row in measured.iterrows():
        other = rows.get(row[by], {}) if by else {}
        reasons = theory.doubts(
            row["speedup"], row.get("length"), other.get("speedup"), other.get("verify")
        )
        each.append(NOT_CREDIBLE if reasons else row.get("doubt", ""))
    return measured.assign(doubt=each)


def sound(measured: pd.DataFrame) -> pd.Series:
    """Which rows of `speedups` are credible."""
    return measured["doubt"] != NOT_CREDIBLE


def lead_over_others(samples: pd.DataFrame) -> pd.DataFrame:
    """How many times as fast the fastest arm is as each other, paired by prompt and repeat.

    samples: rows of `one_pairing.latency_by_arm`. One row an arm but the fastest, with columns arm,
    times, and the ends low and high of its interval; all intervals hold at once."""
    pair, timed = ["question_id", "repeat"], ["s", "tokens"]
    first = _pace(samples.groupby("arm")[TIMED].sum()).idxmax()
    each = {a: part.groupby(pair)[timed].sum() for a, part in samples.groupby("arm", sort=False)}
    best = each.pop(first).add_prefix("best_")
    both = {arm: part.join(best, how="inner") for arm, part in each.items()}
    pairs = {arm: rows.groupby("question_id").sum() for arm, rows in both.items()}
    draws = {a: statistics.speedup_draws(*rows.to_numpy().T) for a, rows in pairs.items()}
    return _table("arm", "times", draws)


def speedup_draws(samples: pd.DataFrame) -> Draws:
    """The speedup of one arm, for `statistics.simultaneous`: over prompts and, as those of a batch
    share its time, over batches and repeats. A single batch that ran once has no interval."""
    draws = statistics.speedup_draws(*units(samples, *TIMED), units=unit(samples))
    if "batch" not in samples or samples["batch"].iloc[0] == 1:
        return draws
    if len(samples.groupby(["number", "repeat"])) > 1:
        return draws.under(round_draws(samples))
    alone = np.full_like(draws.low, draws.value)
    return Draws(draws.value, alone, alone, round_draws(samples).doubt)


def round_draws(samples: pd.DataFrame) -> Draws:
    """Plain decoding's seconds of a round over speculation's, from rows of `one_pairing.throughput`
    at one size. It hardly depends on the text, so all batches are repeats of the same work."""
    timed = ["plain_s", "plain_tokens", "s", "passes"]
    batches = samples.groupby(["number", "repeat"])[timed].sum()
    return statistics.speedup_draws(*batches.to_numpy().T, same_work=True)


def unit(samples: pd.DataFrame) -> str:
    """What an interval's units are: prompts or, where a question has several turns, conversations:
    a later turn contains the earlier ones."""
    return "conversations" if "turn" in samples and samples["turn"].max() > 1 else "prompts"


def units(samples: pd.DataFrame, *columns: str) -> list[np.ndarray]:
    """Columns summed over repeats and turns, one entry per `unit`."""
    samples = samples.groupby("question_id", sort=False)[list(columns)].sum()
    return [samples[column].to_numpy() for column in columns]


def leave_one_out(samples: pd.DataFrame, by: str) -> pd.DataFrame:
    """For each prompt the rows of the arm (value of `by`) that is fastest on all other prompts, so
    that no prompt takes part in the choice which it judges.

    samples: rows of `one_pairing.latency`, `latency_by_arm` or `throughput`, all arms on the same
    prompts. A single prompt chooses for itself."""
    total = samples.pivot_table(TIMED, "question_id", by, "sum", sort=False)
    others = total.sum() - total if len(total) > 1 else total
    choice = _pace(others).idxmax(axis=1)
    return samples[samples[by] == samples["question_id"].map(choice)]


def _pace(total: pd.DataFrame) -> Any:
    """Plain decoding's seconds per token over speculation's."""
    return (total["plain_s"] / total["plain_tokens"]) / (total["s"] / total["tokens"])


def rounds_s(costs: pd.DataFrame) -> pd.Series:
    """Seconds of a round, for each row of `one_pairing.pass_costs`."""
    return costs[["draft_s", "verify_s", "rest_s"]].sum(axis=1)


def step_s(costs: pd.DataFrame) -> float:
    """Seconds of a plain step, from `one_pairing.pass_costs` or `one_pairing.arm_costs`."""
    plain = costs["step_s"] if "step_s" in costs else rounds_s(costs[costs["gamma"] == 0])
    return float(plain.iloc[0])


def predicted(samples: pd.DataFrame, by: str, costs: pd.DataFrame) -> pd.DataFrame:
    """The speedup predicted from each arm's tokens per target pass and the costs of its rounds;
    nothing is fitted.

    costs: from `one_pairing.pass_costs` or `one_pairing.arm_costs`, whose first column has values
    of the column `by` of the samples. One row an arm of both, with columns `by`, tokens (of a
    round), speedup and verify (a pass and the rule, in plain steps)."""
    parts, step, rows = dict(list(samples.groupby(by))), step_s(costs), []
    for row in costs.to_dict("records"):
        arm = row[costs.columns[0]]
        if arm in parts:
            tokens, check = pooled(parts[arm]).tokens_per_pass, row["verify_s"] + row["rest_s"]
            speedup = tokens * step / (row["draft_s"] + check)
            rows.append({by: arm, "tokens": tokens, "speedup": speedup, "verify": check / step})
    return pd.DataFrame(rows, columns=[by, "tokens", "speedup", "verify"])


def fastest(measured: pd.DataFrame) -> pd.Series:
    """The fastest row of `speedups`, with the speedup and the tokens/s that it promises."""
    best = measured.loc[measured["speedup"].idxmax()].copy()
    best["measured"], best["speedup"] = best["speedup"], best["promised"]
    best["low"] = min(best["low"], best["promised"])
    best["tok_s"] = best["promised"] * best["plain_tok_s"]
    return best


def verdict(row: pd.Series) -> str:
    """A row of `speedups` or `fastest` in words, with its interval."""
    speedup = Interval(row["speedup"], row["low"], row["high"], row["doubt"])
    words, value = statistics.verdict(speedup), f"{speedup.value:.2f}x"
    picked = f"{row.get('measured', speedup.value):.2f}x"
    luck = f" ({picked} without cross-validation)" * (picked != value)
    return f"{value} [{speedup.low:.2f}, {speedup.high:.2f}]{luck}: {words}"


def doubt_of_speedups(measured: pd.DataFrame) -> str:
    """What to add to a title if a row of `speedups` is not credible, else ""."""
    return "" if sound(measured).all() else f"; {NOT_CREDIBLE}"


def doubt_of_passes(steps: pd.Series) -> str:
    """What to add to a title if a pass over several tokens seems to take less time than one over a
    single token, else "". steps: times of such passes, in passes over one."""
    return f"; {NOT_CREDIBLE}" if any(theory.doubts(1.0, verify=s) for s in steps) else ""


def best_is_certain(table: pd.DataFrame, column: str) -> bool:
    """Whether the interval (low, high) of the row with the largest value lies above all others."""
    best = table[column].idxmax()
    return bool((table["high"].drop(best) < table["low"][best]).all())


# --- what is logged ------------------------------------------------------------------------------


def acceptance_metrics(samples: pd.DataFrame) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Metrics of the acceptance of one pairing, and its series over positions in the draft."""
    record = pooled(once(samples))
    record.check()
    over_all = length(samples)
    metrics = _rate_metrics(samples, "acceptance/rate", "acceptance/rate_ci") | {
        "acceptance/length": over_all.value,
        "acceptance/length_ci_low": over_all.low,
        "acceptance/length_ci_high": over_all.high,
        "counts/drafted": record.drafted,
        "counts/accepted": record.accepted,
        "counts/emitted": record.emitted,
        "counts/rounds": record.passes,
    }
    if "category" in samples:
        names = _metric_names(samples["category"].unique())
        for category, part in samples.groupby("category"):
            name = names[category]
            metrics |= _rate_metrics(part, f"category/{name}", f"category_ci/{name}")
    return metrics, {
        "acceptance/at_position": list(record.marginal),
        "acceptance/conditional": list(record.conditional),
    }


def _rate_metrics(samples: pd.DataFrame, name: str, ends: str) -> dict[str, float]:
    """The acceptance rate and, as `ends`_low and `ends`_high, its interval; no metric where nothing
    was drafted."""
    value, low, high, doubt = rate(samples)
    return {} if doubt == NOTHING else {name: value, f"{ends}_low": low, f"{ends}_high": high}


def _metric_names(categories: Iterable[str]) -> dict[str, str]:
    """The names under which MLflow can hold categories: only letters, digits, `_`, `.` and `-`.
    Where nothing else is left, or another category has that name, a number follows."""
    plain = {c: re.sub(r"[^\w.-]+", "_", c, flags=re.ASCII)[:200] for c in sorted(categories)}
    names, taken = dict[str, str](), {"_", ".", ".."}
    for category, name in sorted(plain.items(), key=lambda pair: pair[0] != pair[1]):
        numbered = (f"{name}{n}" for n in count(1))
        names[category] = next(n for n in chain([name], numbered) if n not in taken)
        taken.add(names[category])
    return names


def latency_metrics(
    samples: pd.DataFrame, predictions: pd.DataFrame
) -> tuple[dict[str, float], dict[str, Any]]:
    """Metrics and series of a sweep of gamma, from `one_pairing.latency` and `predicted`. The
    headline figures are those of the fastest draft length: its interval, and what it promises."""
    measured = speedups(samples, "gamma", predictions)
    best = fastest(measured)
    at_best = samples[samples["gamma"] == best["gamma"]]
    metrics, series = acceptance_metrics(at_best)
    by_gamma = predictions.set_index("gamma")["speedup"].to_dict()
    metrics |= _headline(best, measured) | {
        "speedup/predicted": by_gamma[best["gamma"]],
        "speedup/best_gamma": best["gamma"],
        "latency/ttft_ms": 1e3 * at_best["ttft_s"].median(),
        "latency/tpot_ms": 1e3 / best["tok_s"],
        "latency/plain_tpot_ms": 1e3 / best["plain_tok_s"],
    }
    return metrics, series | {
        "speedup/at_gamma": measured.set_index("gamma")["speedup"].to_dict(),
        "speedup/predicted_at_gamma": by_gamma,
    }


def arm_metrics(
    samples: pd.DataFrame, costs: pd.DataFrame
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Metrics and series of one arm, from its rows of `one_pairing.latency_by_arm` and the table of
    `one_pairing.arm_costs`."""
    metrics, series = acceptance_metrics(samples)
    row = costs.set_index("arm").loc[samples["arm"].iloc[0]]
    expected = predicted(samples, "arm", costs)
    measured = speedups(samples, "arm", expected)
    return metrics | _headline(measured.iloc[0], measured) | {
        "speedup/predicted": expected["speedup"].iloc[0],
        "latency/ttft_ms": 1e3 * samples["ttft_s"].median(),
        "cost/draft_steps": row["draft_s"] / row["step_s"],
        "cost/verify_steps": row["verify_s"] / row["step_s"],
        "cost/rest_steps": row["rest_s"] / row["step_s"],
        "memory/weights_mb": row["weights_mb"],
        "memory/kv_bytes_per_token": row["kv_bytes"],
    }, series


def throughput_metrics(
    samples: pd.DataFrame, expected: pd.DataFrame | None = None
) -> tuple[dict[str, float], dict[str, Any]]:
    """Metrics and series of a sweep of the batch size, from `one_pairing.throughput`. The headline
    figures are those of the smallest batch. expected: at some sizes, from `predicted`."""
    by_batch = speedups(samples, "batch", expected)
    of_one_size = samples[samples["batch"] == samples["batch"].min()]  # others repeat its prompts
    metrics, series = acceptance_metrics(of_one_size)
    over_batch, curves = load_metrics(by_batch, "batch")
    return metrics | over_batch, series | curves


def load_metrics(
    measured: pd.DataFrame, by: str
) -> tuple[dict[str, float], dict[str, dict[int, float]]]:
    """Metrics and series of speedups over the load, the column `by`, which ascends.

    `throughput/crossing_batch`: the smallest load whose whole interval lies below 1."""
    metrics = _headline(measured.iloc[0], measured)
    metrics["speedup/at_largest_batch"] = measured["speedup"].iloc[-1]
    with_interval = measured[(measured["low"] < measured["high"]) & sound(measured)]
    losing = with_interval[with_interval["high"] < 1][by]
    if len(losing):
        metrics["throughput/crossing_batch"] = losing.iloc[0]
    curves = measured.set_index(by)
    return metrics, at_batch(measured, by) | {
        "throughput/at_batch": curves["tok_s"].to_dict(),
        "throughput/plain_at_batch": curves["plain_tok_s"].to_dict(),
    }


def at_batch(measured: pd.DataFrame, by: str) -> dict[str, dict[int, float]]:
    """The series of the speedup over the load, with the ends of its interval, from rows of
    `speedups` or `under_load.rates`. by: the column of the load."""
    curves = measured.set_index(by).rename(columns={"speedup": "", "low": "_low", "high": "_high"})
    return {f"speedup/at_batch{end}": curves[end].to_dict() for end in ("", "_low", "_high")}


def _headline(row: pd.Series, measured: pd.DataFrame) -> dict[str, float]:
    """Metrics of a row of `speedups`, credible only if all that were timed with it are."""
    return {
        "speedup/measured": row["speedup"], "speedup/ci_low": row["low"],
        "speedup/credible": float(sound(measured).all()),
        "speedup/ci_high": row["high"], "throughput/tok_s": row["tok_s"],
        "throughput/plain_tok_s": row["plain_tok_s"],
    }  # fmt: skip
