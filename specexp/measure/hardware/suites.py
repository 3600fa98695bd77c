"""The suites of `specexp bench`: is this machine limited by its hardware, or by the toolkit?

Interleaved comparisons in one process: `peers` (other engines at the same work), `roofline` (a pass
against memory bandwidth and its own matrix products), `round` (where a round's time goes) and
`scale` (how the cost of a pass grows). Every suite returns plain data that JSON can hold.
"""

import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from specexp import api
from specexp.api import Pairing
from specexp.errors import UserError
from specexp.fast import cuda_graphs
from specexp.measure import interleave, parameters
from specexp.measure.costs import fingerprint
from specexp.measure.hardware import peers
from specexp.measure.hardware.machine import described, doubts, emulated
from specexp.measure.hardware.phases import phases
from specexp.measure.hardware.roofline import PASSES, a_pass, roofline
from specexp.measure.prompts import Prompt
from specexp.models.load import DTYPES
from specexp.serving.cost_table import Fit
from specexp.tracking.provenance import version

NAMES = ("peers", "roofline", "round", "scale")
WORK = {
    "plain": "plain", "draft": "draft model", "lookup": "prompt lookup",
    "draft over plain": "speculation",
}  # fmt: skip  # the comparisons of `peers`, in words
TOKENS = (1, 2, 4, 8, 16, 32, 64)  # tokens a row in one pass
CONTEXTS = (128, 256, 512, 1024, 2048, 4096)  # slots of the buffer
PROMPTS = 5  # how many prompts are used, evenly over categories
PACKAGES = ("specexp", "torch", "transformers", "numpy")


def about(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The machine and software behind the figures: `costs.fingerprint`, versions, load average, and
    a warning if the dtype is emulated."""
    return fingerprint(device, dtype) | {
        "where": described(device),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "versions": {"python": platform.python_version()}
        | {name: installed for name in PACKAGES if (installed := version(name))},
        "graphs": cuda_graphs.on(device) is not None,
        "warning": "\n".join(filter(None, [emulated(dtype, device), *doubts(device)])),
    }


def report_path(out: Path, options: dict[str, Any]) -> Path:
    """The file to write: `out` itself, or, if that is a folder, a file in it named by device, dtype
    and target."""
    if out.suffix and not out.is_dir():
        return out
    device = torch.device(api.where(options["device"]))
    machine = fingerprint(device, DTYPES[options["dtype"]])
    words = "bench", machine["device"], machine["dtype"], Path(options["target"]).name
    return out / ("_".join(re.sub(r"\W+", "-", word).strip("-") for word in words) + ".json")


def check(names: Sequence[str], options: dict[str, Any], texts: list[Prompt]) -> None:
    """Raises UserError with every problem, one line each, before any weight is loaded."""
    unknown = [name for name in names if name not in NAMES]
    problems = [f"suite {name!r} is unknown; there are {', '.join(NAMES)}" for name in unknown]
    if options["gamma"] == 0:
        problems.append("gamma is 0; to measure speculation it must be 1 or more")
    batches = options.get("batches", [1])
    most = max(peers.MOST, min(batches))  # rows of the largest batch that generates
    problems += parameters.check(options | {"batches": [min(b, most) for b in batches]}, texts)
    if problems:
        raise UserError("\n".join(problems))


def run(
    name: str, pairing: Pairing, prompts: Sequence[Prompt], batches: Sequence[int],
    max_new_tokens: int, repeats: int,
) -> dict[str, Any]:  # fmt: skip
    """One suite, as plain data."""
    if name == "peers":
        return peers.peers(pairing, prompts, batches, max_new_tokens, repeats)
    texts = [prompt.text for prompt in prompts]
    if name == "roofline":
        return roofline(pairing, texts, repeats)
    if name == "round":
        return phases(pairing, texts, max_new_tokens, repeats)
    return scale(pairing, texts, batches, repeats)


# --- scale ---------------------------------------------------------------------------------------


def scale(
    pairing: Pairing, texts: Sequence[str], batches: Sequence[int], repeats: int
) -> dict[str, Any]:  # fmt: skip
    """How the cost of a target pass grows along each axis, starting from one row, one token and a
    short buffer."""
    target, gamma = pairing.target, pairing.options["gamma"]
    ids = [t for row in pairing.encode(texts) for t in row]
    contexts = [c for c in CONTEXTS if c <= target.context] or [target.context]
    short = contexts[0]
    tokens = [n for n in sorted({*TOKENS, gamma + 1}) if n <= short // 2]
    axes = {
        "batch": [(b, 1, short) for b in sorted({1, *batches})],
        "tokens": [(1, n, short) for n in tokens],
        "context": [(1, 1, c) for c in contexts],
    }
    points = dict.fromkeys(point for along in axes.values() for point in along)
    arms = {
        point: a_pass(target, ids, *point, slack=min(max(TOKENS), short // 2)) for point in points
    }
    turns = interleave.take(arms, range(repeats * PASSES), target.device, "scale", lead=1)
    rows = [
        {"axis": axis, "value": point[at], "ms": 1e3 * interleave.median_s(turns[point]),
         "over_first": interleave.ratio(turns[point], turns[along[0]])._asdict()}
        for at, (axis, along) in enumerate(axes.items())
        for point in along
    ]  # fmt: skip
    timed = [(b * n, c, interleave.median_s(turns[b, n, c])) for b, n, c in points]
    fit = Fit.of(*zip(*timed, strict=True))
    return {
        "turns": repeats * PASSES, "context": short, "rows": rows,
        "fit": {"floor_ms": 1e3 * fit.floor_s, "per_token_us": 1e6 * fit.token_s(short),
                "per_slot_ns": 1e9 * fit.per_slot_s, "r2": fit.r2,
                "knee": fit.knee(short) if fit.token_s(short) else None},
    }  # fmt: skip
