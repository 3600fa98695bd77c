"""What is wrong with parameters, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specexp.measure import parameters
from specexp.measure.prompts import Prompt
from specexp.zoo.known import Known


def problems(params: Mapping[str, Any], texts: list[Prompt] | None = None) -> list[str]:
    """Every problem of these parameters, one line each.

    texts: the prompts, by default those that the parameters name."""
    return [problem.what for problem in parameters.problems_of(params, texts, Known())]
