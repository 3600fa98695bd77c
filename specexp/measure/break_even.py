"""Break-even maps: at which load and draft length speculation pays, predicted from measured parts.

`profile` measures the cost table of a pairing on this machine once and stores it; a point of a grid
measures its own, since a result must not depend on a file that its key does not cover. With the
acceptance on some prompts, the table predicts the speedup at every batch and draft length; `sweep`
and `compare` measure how well. Intervals are over prompts: that of the tokens per round is
bootstrapped, and that of the break-even batch follows from its ends, since the batch rises with the
tokens.
"""

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from specexp import theory
from specexp.api import Pairing
from specexp.errors import UserError
from specexp.measure import costs, one_pairing, statistics, summaries
from specexp.measure.prompts import Prompt, load
from specexp.measure.statistics import Interval
from specexp.serving import goodput
from specexp.serving.cost_table import Costs
from specexp.tracking import provenance, results

log = logging.getLogger("specexp")

BATCHES, GAMMAS, CONTEXTS = (1, 2, 4, 8, 16, 32, 64), (0, *goodput.GAMMAS), (128, 256)
FRESH = 6  # hours after which a stored table is warned about: a shared machine's speed drifts

# --- the table of a pairing ----------------------------------------------------------------------


def profile(
    pairing: Pairing, batches: Sequence[int] = BATCHES, gammas: Sequence[int] = GAMMAS,
    contexts: Sequence[int] | None = None, repeats: int = 5, force: bool = False, longest: int = 0,
) -> Costs:  # fmt: skip
    """The cost table of a pairing, in seconds over batch, draft length and context (slots).

    The stored table is returned if everything that decides it is the same (`about`) and it has all
    these points. Otherwise, or with `force`, a table of these and the stored points is measured and
    stored. gammas beyond the drafter's longest draft are left out. contexts: by default those of
    `CONTEXTS` that the models reach, and one for `longest` tokens if that is more. Raises UserError
    if the drafter drafts nothing."""
    if not pairing.engine.drafter.context:
        raise UserError(f"drafter {pairing.drafter} drafts nothing, so has no costs: name another")
    path, gammas = table_path(pairing), [g for g in gammas if g <= pairing.deepest]
    if contexts is None:
        most = min(pairing.target.context, pairing.engine.drafter.context)
        contexts = [c for c in CONTEXTS if c <= most] or [most]
        if longest > contexts[-1]:
            contexts.append(min(most, 1 << (longest - 1).bit_length()))
    axes, deepest = (batches, gammas, contexts), max(gammas, default=0)
    measured: tuple[Sequence[int], ...] = (), (), ()
    with suppress(UserError):  # there is none, or it is damaged
        stored = Costs.load(path)
        if stored.about == about(pairing):
            measured = stored.batches, stored.gammas, stored.contexts
    if not force and all(set(a) >= set(b) for a, b in zip(measured, axes, strict=True)):
        hours = (time.time() - path.stat().st_mtime) / 3600
        if hours > FRESH:
            log.warning("%s was measured %.0f hours ago: if the load of the machine has changed, "
                        "measure again with specexp profile --force", path, hours)  # fmt: skip
        return stored.upto(deepest)
    batches, gammas, contexts = ([*{*a, *b}] for a, b in zip(measured, axes, strict=True))
    gammas = [g for g in gammas if g <= pairing.deepest]
    ids = pairing.encode([prompt.text for prompt in load("all", limit=10)])
    table = costs.measure(pairing.engine, ids, batches, gammas, contexts, repeats)
    table = replace(table, about=about(pairing))
    table.save(path)
    return table.upto(deepest)


def about(pairing: Pairing) -> dict[str, Any]:
    """`Costs.about` of a table of this pairing."""
    device = str(pairing.target.device)
    return {
        **provenance.machine(device, timed=True), "kernels": provenance.kernels(device),
        "code": provenance.code_digest(), **costs.about(pairing.engine), "drafter": pairing.named,
        "processors": repr(pairing.followed),
    }  # fmt: skip


def table_path(pairing: Pairing) -> Path:
    """The file of a pairing's table: one for each target, drafter, device, dtype (and all of
    `about`). It is kept in the store, but that of a grid's point in the folder of its result."""
    digest = hashlib.sha256(json.dumps(about(pairing), sort_keys=True).encode()).hexdigest()[:12]
    names = (re.sub(r"[^\w.-]+", "_", name) for name in (pairing.target.name, pairing.drafter))
    home = Path(os.environ.get("SPECEXP_ATTEMPT") or results.root())
    return home / "costs" / f"{'--'.join(names)}--{digest}.json"


# --- break-even ----------------------------------------------------------------------------------


def round_tokens(samples: pd.DataFrame, gamma: int) -> Interval:
    """Mean tokens of a round of gamma draft tokens, with its interval over prompts. samples: rows
    of `one_pairing.acceptance` with at least gamma draft tokens a round."""
    kept = [sum(n * min(k, gamma) for k, n in enumerate(r.histogram)) for r in samples["record"]]
    return summaries.length(samples.assign(accepted=kept, gamma=gamma))


def break_even_batch(costs: Costs, gamma: int, tokens: float, context: float) -> float:
    """The largest batch at which a round of gamma draft tokens that yields `tokens` tokens takes no
    longer than as many plain steps: 0 if there is none, the table's last if drafting still pays
    there.

    Times are linear between the table's batches, and so is the time that a round saves."""
    at = costs.batches
    lost = [costs.round_s(b, gamma, context) - tokens * costs.step_s(b, context) for b in at]
    paying = [i for i, seconds in enumerate(lost) if seconds <= 0]
    if not paying:
        return 0.0
    around = slice(paying[-1], paying[-1] + 2)  # where it stops, or the last alone
    return float(np.interp(0, lost[around], at[around]))


def break_even_batches(costs: Costs, samples: pd.DataFrame, context: float) -> pd.DataFrame:
    """The break-even batch at the acceptance of `samples` (see `round_tokens`).

    One row a draft length of the table, with columns gamma, tokens (of a round), batch and the ends
    low and high of its interval over prompts."""
    costs, rows = costs.at_drafted_share(summaries.drafted_share(samples)), []
    for gamma in costs.gammas[1:]:
        tokens = round_tokens(samples, gamma)
        ends = (break_even_batch(costs, gamma, t, context) for t in tokens[:3])
        rows.append((gamma, tokens.value, *ends))
    return pd.DataFrame(rows, columns=["gamma", "tokens", "batch", "low", "high"])


def break_even_alpha(costs: Costs, batch: float, gamma: int, context: float) -> float:
    """The acceptance probability alpha, the same at every position, from which on gamma draft
    tokens pay at this load; 1 also where no alpha does."""
    extra = costs.round_s(batch, gamma, context) / costs.step_s(batch, context) - 1
    return theory.break_even_alpha(gamma, max(0.0, extra / gamma))


# --- measured against predicted ------------------------------------------------------------------


def sweep(
    pairing: Pairing, prompts: Sequence[Prompt], batches: Sequence[int], gammas: Sequence[int],
    max_new_tokens: int, repeats: int,
) -> pd.DataFrame:  # fmt: skip
    """`one_pairing.throughput` at every draft length, with the same columns; as in the cost table,
    `context` includes the slots of the longest draft."""
    arms = [pairing.with_(gamma=gamma, tree="chain") for gamma in gammas]
    parts = [one_pairing.throughput(a, prompts, batches, max_new_tokens, repeats) for a in arms]
    samples = pd.concat(parts, ignore_index=True)
    return samples.assign(context=samples["context"] + max(gammas) + 1)


def compare(costs: Costs, accepted: pd.DataFrame, samples: pd.DataFrame) -> pd.DataFrame:
    """Measured against predicted speedups, from a `sweep`.

    One row a draft length and batch, with columns gamma, batch, context (slots); the measured
    speedup, its interval low, high and its doubt; predicted, from the acceptance of `accepted`; and
    predicted_own, from that of the very same runs, whose error comes from the cost table alone."""
    costs = costs.at_drafted_share(summaries.drafted_share(accepted))
    usual, rows = summaries.pooled(accepted).conditional, []
    for (gamma, batch), part in samples.groupby(["gamma", "batch"]):
        context = part["context"].mean()
        measured = summaries.speedup_draws(part).interval
        record = summaries.pooled(part)
        step_s, round_s = costs.step_s(batch, context), costs.round_s(batch, gamma, context)
        own = record.tokens_per_pass * step_s / round_s
        doubts = theory.doubts(measured.value, record.length, own)
        rows.append(
            {"gamma": gamma, "batch": batch, "context": context}
            | measured.columns("speedup")
            | {"doubt": statistics.NOT_CREDIBLE if doubts else measured.doubt}
            | {"predicted": costs.speedup(batch, gamma, usual, context), "predicted_own": own}
        )
    return pd.DataFrame(rows)


def predicted_error(compared: pd.DataFrame, column: str = "predicted") -> float:
    """Median of |log(predicted / measured)|: 0.1 is an error of ten per cent either way."""
    return float(np.log(compared[column] / compared["speedup"]).abs().median())


def tax(
    pairing: Pairing, prompts: Sequence[Prompt], batches: Sequence[int], max_new_tokens: int,
    repeats: int,
) -> pd.DataFrame:  # fmt: skip
    """The overhead of having a drafter and a rule without drafting, against plain decoding, by
    turns. One row a batch, with columns batch, tax and its interval low, high: the additional time
    a token (0.02 is two per cent)."""
    samples = one_pairing.throughput(
        pairing.with_(gamma=0, tree="chain"), prompts, batches, max_new_tokens, repeats
    )
    rows = []
    for batch, part in samples.groupby("batch"):
        pace = summaries.round_draws(part).interval
        times = Interval(1 / pace.value, 1 / pace.high, 1 / pace.low)
        rows.append({"batch": batch} | times.plus(-1).columns("tax"))
    return pd.DataFrame(rows)


def metrics(
    costs: Costs, accepted: pd.DataFrame, compared: pd.DataFrame, taxes: pd.DataFrame,
    context: float,
) -> tuple[dict[str, float], dict[str, Any]]:  # fmt: skip
    """Metrics and series of a map, for MLflow."""
    figures, series = summaries.acceptance_metrics(accepted)
    fit = costs.fit()
    figures |= {
        "costs/floor_ms": 1e3 * fit.floor_s,
        "costs/per_token_us": 1e6 * fit.token_s(context),
        "costs/fit_r2": fit.r2,
        "map/predicted_error": predicted_error(compared),
        "map/predicted_error_own": predicted_error(compared, "predicted_own"),
        "speedup/credible": float(summaries.sound(compared).all()),
    }
    batches = break_even_batches(costs, accepted, context).set_index("gamma")
    return figures, series | {
        "map/break_even_batch": batches["batch"].to_dict(),
        "tax/at_batch": taxes.set_index("batch")["tax"].to_dict(),
    }
