"""Policies under load, measured as `35_load_aware` does, with longer turns and with bursts.

    PYTHONPATH=tests python -m support.load_aware --device "2 shared AMD EPYC cores"

With a draft model and with prompt lookup: closed loops of 1 to 64 streams, so many turns that each
policy generates for about `--seconds`; then bursts at two rates. With the draft model also the cost
table, and open traffic beside its simulation. Writes `load_aware.json`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

import specexp
from specexp import measure
from specexp.measure import statistics, under_load
from specexp.measure.under_load.loops import turn_tokens
from specexp.serving.arrivals import at_rate
from specexp.serving.cost_table import Costs

TARGET, NEW = "target-10m", 64  # and the most new tokens of a request
STREAMS = 1, 2, 4, 8, 16, 32, 64
LENGTHS = {
    "sibling-3m": {1: (1, 2, 3, 5), 4: (1, 2, 3), 8: (1, 3)},
    "ngram": {1: (1, 2, 3, 5), 8: (1, 2, 3), 32: (1, 2)},
}  # from so many streams on
BURSTS = {
    "sibling-3m": ((300, 600), ["always:1"]),
    "ngram": ((600, 1000), ["always:1", "always:2"]),
}
OPEN = ["plain", "never", "always:1", "always:3", "threshold:3,8", "bandit", "goodput"]
SEEDS, REQUESTS, ROWS = (0, 1), 400, 32
TTFT_MS, TPOT_MS = 1000.0, 50.0


def policies_at(drafter: str, streams: int) -> list[str]:
    lengths = next(
        gammas for least, gammas in reversed(LENGTHS[drafter].items()) if streams >= least
    )
    return ["plain", "never", *(f"always:{gamma}" for gamma in lengths), "goodput"]


def closed(
    pairing: specexp.Pairing, drafter: str, costs: Costs, prompts: Sequence[Any], seconds: float
) -> dict[str, Any]:
    """Rates and regrets of all policies in closed loops, and the turns that they rest on."""
    rows, turns = [], {}
    for streams in STREAMS:
        tok_s = streams / costs.verify_s(streams, 1, costs.contexts[0])
        turns[streams] = max(12, round(seconds * tok_s / turn_tokens(streams)))
        samples = under_load.closed_loops(
            pairing, policies_at(drafter, streams), costs, prompts, [streams], NEW,
            turns[streams],
        )  # fmt: skip
        lost = under_load.regrets(samples).rename(
            columns={"low": "low_regret", "high": "high_regret"}
        )
        rows.append(under_load.rates(samples).merge(lost, on=["load", "policy"]))
        print(rows[-1].round(3).to_string(index=False), flush=True)
    return {
        "turns": turns,
        "tokens_a_turn": {streams: turn_tokens(streams) for streams in STREAMS},
        "closed_loop": records(pd.concat(rows)),
    }


def bursts(
    pairing: specexp.Pairing, drafter: str, costs: Costs, prompts: Sequence[Any]
) -> dict[str, Any]:
    """Requests in bursts, twice: their latencies, and how much faster they are than in plain
    decoding (mean E2E, paired by request)."""
    rates, fixed = BURSTS[drafter]
    rows = []
    for race, rate in ((race, rate) for race in (1, 2) for rate in rates):
        offer = at_rate("bursty,3", rate / NEW)
        offered = under_load.traffic(pairing, prompts, offer, REQUESTS, NEW, seed=race)
        runs = under_load.open_loop(pairing, ["plain", *fixed, "goodput"], costs, offered, ROWS)
        each = {name: request_ms(run.responses) for name, run in runs.items()}
        load = under_load.by_policy(runs, TTFT_MS, TPOT_MS).set_index("policy")
        for name, ms in each.items():
            faster = statistics.ratio(each["plain"]["e2e_ms"], ms["e2e_ms"], same_work=True)
            mean = ms.mean()
            rows.append(
                {"race": race, "rate": rate, "policy": name, "e2e_mean_ms": mean["e2e_ms"]}
                | {"e2e_p95": load.loc[name, "latency/e2e_p95_ms"]}
                | {"tpot_mean_ms": mean["tpot_ms"], "ttft_mean_ms": mean["ttft_ms"]}
                | faster.columns("faster")
                | {"occupancy": load.loc[name, "load/occupancy"]}
                | {"speculated": load.loc[name, "load/speculated"]}
            )
    print(pd.DataFrame(rows).round(3).to_string(index=False), flush=True)
    what = f"bursty, coefficient of variation 3, {ROWS} rows, {REQUESTS} requests"
    return {"arrivals": what, "rows": records(pd.DataFrame(rows))}


def request_ms(responses: Sequence[Any]) -> pd.DataFrame:
    """TTFT, TPOT and E2E of each request in milliseconds, in the order in which they were sent."""
    ordered = sorted(responses, key=lambda response: response.request.stream)
    seconds = under_load.served.request_table(ordered)[["ttft_s", "tpot_s", "e2e_s"]]
    return (1e3 * seconds).rename(columns=lambda name: name.replace("_s", "_ms"))


def open_traffic(
    pairing: specexp.Pairing, costs: Costs, prompts: Sequence[Any], most: float
) -> dict[str, Any]:
    """Traffic of 0.7 of the most tokens/s that plain decoding reaches; real, and simulated."""
    accepted = measure.one_pairing.acceptance([pairing], prompts, NEW)
    real, simulated = [], []
    for seed in SEEDS:
        offer = at_rate("bursty,3", 0.7 * most / NEW)
        offered = under_load.traffic(pairing, prompts, offer, REQUESTS, NEW, seed)
        runs = under_load.open_loop(pairing, OPEN, costs, offered, ROWS)
        real.append(under_load.by_policy(runs, TTFT_MS, TPOT_MS).assign(seed=seed))
        as_long = offered.as_served(runs["plain"].responses)
        models, _ = under_load.simulate_fitted(costs, accepted, runs, as_long, ROWS)
        simulated.append(under_load.compare_runs(runs, models, TTFT_MS, TPOT_MS).assign(seed=seed))
    print(pd.concat(simulated).round(1).to_string(index=False), flush=True)
    return {"open_traffic": records(pd.concat(real)), "simulated": records(pd.concat(simulated))}


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(table.to_json(orient="records", double_precision=4))
    return rows


def table(costs: Costs) -> dict[str, Any]:
    """The cost table in milliseconds, prefill aside."""
    return {
        "batches": costs.batches, "contexts": costs.contexts, "gammas": costs.gammas,
        "draft_ms": (1e3 * costs.draft).round(4).tolist(),
        "verify_ms": (1e3 * costs.verify).round(4).tolist(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", required=True, help="the machine, in words")
    parser.add_argument("--seconds", type=float, default=20, help="of a policy at a load")
    parser.add_argument("--out", type=Path, default=Path("data/measurements"))
    args = parser.parse_args()
    parts: dict[str, dict[str, Any]] = {}
    for drafter in LENGTHS:
        pairing = specexp.load(TARGET, drafter)
        prompts = measure.prompts.load("all", limit=80)
        longest = max(map(len, pairing.encode([p.text for p in prompts]))) + NEW
        costs = measure.break_even.profile(pairing, STREAMS, longest=longest)
        parts[drafter] = own = closed(pairing, drafter, costs, prompts, args.seconds)
        if drafter == "sibling-3m":
            loops = pd.DataFrame(own["closed_loop"])
            most = loops.loc[loops["policy"] == "plain", "tok_s"].max()
            about = {"about": costs.about, "costs": table(costs)}
            own |= about | open_traffic(pairing, costs, prompts, most)
        own["bursts"] = bursts(pairing, drafter, costs, prompts)
    head = {"device": args.device, "notebook": "35_load_aware"}
    file = head | parts["sibling-3m"] | {"lookup": {"drafter": "ngram"} | parts["ngram"]}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "load_aware.json").write_text(json.dumps(file, indent=1) + "\n")


if __name__ == "__main__":
    main()
