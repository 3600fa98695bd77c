"""The shared view in which the MLflow UI opens an experiment: columns, order, charts, link."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

KEY = "specexp"
TAG = f"mlflow.sharedViewState.{KEY}"
OPTIONS = ("drafter", "policy", "gamma", "temperature")
FIGURES = (
    "acceptance/rate", "acceptance/length", "speedup/measured", "speedup/predicted",
    "throughput/tok_s", "latency/ttft_p95_ms", "latency/tpot_p95_ms", "goodput/share",
    "regret/worst", "fleet/replicas", "exact/pass", "exact/detectable_tv",
)  # fmt: skip
BARS = (
    "acceptance/rate", "acceptance/length", "speedup/measured", "throughput/tok_s",
    "latency/ttft_p95_ms", "regret/worst", "fleet/replicas",
)  # fmt: skip
LINES = (
    "acceptance/at_position", "speedup/at_gamma", "speedup/at_batch", "served/at_batch",
    "regret/at_batch", "load/speculated_at_batch", "map/break_even_batch",
)  # fmt: skip


def shared(logged: Collection[str]) -> str:
    """The view's state as JSON: columns, order and charts of the logged parameters and metrics.

    The format is internal to MLflow's UI (3.17.2). Should it change, `url` leads to the plain list.
    """
    columns = [f"params.`{p}`" for p in OPTIONS if p in logged]
    columns += [f"metrics.`{m}`" for m in FIGURES if m in logged]
    section = {"uuid": "overview", "name": "Does it pay?", "display": True, "isReordered": True}
    charts: list[dict[str, Any]] = [
        {"type": "BAR", "metricKey": m, "runsCountToCompare": 20, "displayName": _short(m)}
        for m in BARS
        if m in logged
    ]
    charts += [
        {
            "type": "LINE", "metricKey": m, "selectedMetricKeys": [m], "displayName": _short(m),
            "xAxisKey": "step", "xAxisScaleType": "linear", "scaleType": "linear",
            "lineSmoothness": 0, "useGlobalXaxisKey": True, "useGlobalLineSmoothing": True,
            "runsCountToCompare": 20, "range": {}, "yAxisKey": "metric", "yAxisExpressions": [],
            "selectedXAxisMetricKey": "", "ignoreOutliers": False, "displayPoints": True,
        }
        for m in LINES
        if m in logged
    ]  # fmt: skip
    if {"acceptance/rate", "speedup/measured"} <= set(logged):
        charts.append({
            "type": "SCATTER", "runsCountToCompare": 100,
            "displayName": "rate, speedup",
            "xaxis": {"key": "acceptance/rate", "type": "METRIC"},
            "yaxis": {"key": "speedup/measured", "type": "METRIC"},
        })  # fmt: skip
    common = {"metricSectionId": "overview", "deleted": False, "isGenerated": False}
    charts = [{"uuid": f"chart{i}", **common, **c} for i, c in enumerate(charts)]
    state = {
        "selectedColumns": columns,
        "orderByKey": next((c for c in columns if "speedup" in c), "attributes.start_time"),
        "orderByAsc": False,
        "runsHiddenMode": "SHOW_ALL",
        "compareRunCharts": charts,
        "compareRunSections": [section],
        "isAccordionReordered": True,
    }
    return json.dumps(state)


def _short(metric: str) -> str:
    return metric.rpartition("/")[2].replace("_", " ")


def url(experiment: str, base: str) -> str:
    """The link to an experiment's runs in the shared view; `base` is the address of the UI."""
    return (
        f"{base}/#/experiments/{experiment}/runs?viewStateShareKey={KEY}"
        "&compareRunsMode=CHART&workflowType=machine_learning"
    )
