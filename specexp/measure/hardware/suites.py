"""The suites of `specexp bench`: is this machine limited by its hardware, or by the toolkit?

Interleaved comparisons in one process: `peers` (other engines at the same work), `roofline` (a pass
against memory bandwidth and its own matrix products) and `round` (where a round's time goes). Every
suite returns plain data that JSON can hold. (`specexp profile` says how the cost of a pass grows.)
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
from specexp.fast import cuda_graphs
from specexp.measure.costs import fingerprint
from specexp.measure.hardware import peers
from specexp.measure.hardware.machine import described, doubts, emulated
from specexp.measure.hardware.phases import phases
from specexp.measure.hardware.roofline import roofline
from specexp.measure.prompts import Prompt
from specexp.models.load import DTYPES
from specexp.tracking.provenance import cores, version

PACKAGES = ("specexp", "torch", "transformers", "numpy")


def about(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The machine and software behind the figures: `costs.fingerprint`, versions, load average, and
    a warning if the dtype is emulated."""
    return fingerprint(device, dtype) | {
        "where": described(device),
        "cores": cores(),
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
    device = torch.device(api.resolve_device(options["device"]))
    machine = fingerprint(device, DTYPES[options["dtype"]])
    words = "bench", machine["device"], machine["dtype"], Path(options["target"]).name
    return out / ("_".join(re.sub(r"\W+", "-", word).strip("-") for word in words) + ".json")


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
    return phases(pairing, texts, max_new_tokens, repeats)
