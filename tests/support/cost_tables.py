"""Cost tables made up for tests: exactly a floor and two slopes, or without any order."""

import numpy as np

from specexp.serving.cost_table import Costs, Fit

ABOUT = {
    "target": "t", "drafter": "d", "rule": "match", "temperature": 0.0, "parameters": 10_000_000,
    "weight_bytes": 40_000_000, "device": "none", "torch": "0", "threads": 1, "dtype": "float32",
}  # fmt: skip
BATCHES, GAMMAS, CONTEXTS, LENGTHS = (1, 2, 4, 8, 16), (0, 1, 3, 5), (64, 128), (1, 16, 64)


def planted(
    floor: float = 5e-3, token: float = 1e-4, slot: float = 1e-6, draft: float = 1e-3
) -> Costs:
    """A table of passes that are exactly a floor and two slopes; a draft token costs `draft`."""
    law = Fit(floor, token, slot, 1.0)
    return Costs(
        ABOUT, BATCHES, CONTEXTS,
        np.array([[[law.pass_s(b, 1 + g, c) for c in CONTEXTS] for g in GAMMAS] for b in BATCHES]),
        GAMMAS, np.array([[[draft * g for _ in CONTEXTS] for g in GAMMAS] for _ in BATCHES]),
        LENGTHS, np.array([1e-3, 2e-3, 8e-3]), np.array([0.0, 1e-3, 2e-3]),
    )  # fmt: skip


def rough(seed: int = 0) -> Costs:
    """A table without any order in it: slopes up and down."""
    rng = np.random.default_rng(seed)
    shape = len(BATCHES), len(GAMMAS), len(CONTEXTS)
    return Costs(
        ABOUT, BATCHES, CONTEXTS, rng.uniform(1e-3, 1, shape), GAMMAS,
        rng.uniform(0, 1, shape), LENGTHS, rng.uniform(1e-3, 1, 3), rng.uniform(0, 1, 3),
    )  # fmt: skip
