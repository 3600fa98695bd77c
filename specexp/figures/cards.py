"""What a notebook shows of an Output and of a Pairing: HTML in the page's own colours."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import pandas as pd

from specexp.figures import tokens

if TYPE_CHECKING:
    from specexp.api import Output, Pairing

ROWS = 8  # that are shown of a batch


def of_output(output: Output) -> str:
    """The text of each row by kind of token, its rounds folded away, and the acceptance record."""
    rounds, records = output.trace.rounds, output.trace.by_row
    parts, opened = [tokens.shaded(tokens.legend())], " open" * (len(records) == 1)
    for row, new in enumerate(output.tokens[:ROWS]):
        parts += [
            tokens.shaded(tokens.stream(output, rounds, new, row=row)),
            f"<details{opened}><summary>{escape(str(records[row]))}</summary>",
            tokens.shaded(tokens.by_round(output, rounds, new, row)),
            "</details>",
        ]
    if len(records) > ROWS:
        parts.append(f"<p>and {len(records) - ROWS} more rows</p>")
    if len(records) > 1:
        parts.append(f"<p>all {len(records)} rows: {escape(str(output.acceptance))}</p>")
    return "\n".join(parts)


def of_pairing(pairing: Pairing) -> str:
    """What was paired, and how it drafts, samples and decides."""
    engine, target, options = pairing.engine, pairing.target, pairing.options
    models, policy, tree = [target, *engine.drafter.models], options["policy"], options["tree"]
    card = {
        "target": target.name,
        "drafter": pairing.drafter,
        "draft": f"{tree}, gamma {pairing.gamma}" if isinstance(tree, str) else str(tree),
        "policy": policy if isinstance(policy, str | None) else type(policy).__name__,
        "rule": engine.rule.name,
        "sampling": str(engine.sampling),
        "generation config": ", ".join(pairing.followed),
        "parameters": "; ".join(f"{model.name} {model.parameters:,}" for model in models),
        "device": str(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
    }
    rows = pd.Series({name: value for name, value in card.items() if value})
    return str(rows.to_frame().to_html(header=False, border=0))
